"""What `quantized_matmul` refuses before any kernel, and `between_attentions` of each product."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.around_product import check_heads
from pallas_kernels.matmul_finish import GATES
from pallas_kernels.options import check_dtype, check_flags, check_number
from pallas_kernels.packed import Packed

OUT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
EPILOGUES = (*GATES, "rope")


def result_dtype(x, out_dtype) -> jnp.dtype:
    """`out_dtype`, or x's."""
    return jnp.dtype(out_dtype or x.dtype)


def check(
    x,
    packed: Packed,
    *,
    norm,
    bias,
    epilogue,
    residual,
    rotary,
    cache,
    out_dtype,
    who: str = "quantized_matmul",
) -> None:
    """Refuses a call of the op `who` whose shapes or dtypes disagree; shapes suffice.

    Raises: ValueError.
    """
    if (reason := packed.problem()) is not None:
        raise ValueError(f"{who}: {reason}")
    o, i = packed.shape
    scale = None if norm is None else norm.weight
    if x.ndim < 1 or x.shape[-1] != i:
        raise ValueError(
            f"{who}: x {list(x.shape)} is [.., I], which a weight [O, I] of {[o, i]} does not fit"
        )
    check_dtype(who, "out_dtype", out_dtype)
    arrays = {"x": x, "the norm's weight": scale, "bias": bias, "residual": residual}
    for name, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{who}: {name} is {array.dtype}; it must be floating point")
    out = result_dtype(x, out_dtype)
    if out not in OUT_DTYPES:
        raise ValueError(f"{who}: out_dtype {out} is not bfloat16, float16 or float32")
    if epilogue not in (None, *EPILOGUES):
        names = ", ".join(map(repr, EPILOGUES))
        raise ValueError(f"{who}: no epilogue is named {epilogue!r}; there are {names}")
    if epilogue in GATES and o % 2:
        raise ValueError(f"{who}: {epilogue!r} takes gate and up rows, but O = {o} is odd")
    if norm is not None:
        check_number(who, "the norm's eps", norm.eps, positive=True)
        check_flags(who, zero_centered=norm.zero_centered)
        if norm.weight.shape != (i,):
            raise ValueError(
                f"{who}: the norm's weight {list(norm.weight.shape)} is not [I] = [{i}]"
            )
    if bias is not None and bias.shape != (o,):
        raise ValueError(f"{who}: bias {list(bias.shape)} is not [O] = [{o}]")
    shape = (*x.shape[:-1], o // 2 if epilogue in GATES else o)
    if residual is not None and (residual.shape, residual.dtype) != (shape, out):
        raise ValueError(
            f"{who}: the residual is {residual.dtype}{list(residual.shape)}, but the "
            f"result is {out}{list(shape)}"
        )
    if len({epilogue == "rope", rotary is not None, cache is not None}) > 1:
        raise ValueError(
            f"{who}: 'rope', rotary and a cache go together, and some of them were given"
        )
    if rotary is not None:
        if residual is not None or out != x.dtype:
            raise ValueError(f"{who}: 'rope' takes no residual and gives x's dtype")
        heads = jax.ShapeDtypeStruct((*x.shape[:-1], o), x.dtype)
        check_heads(heads, rotary, cache, who=who)
