"""A projection with what stands before and behind it: for decoding, where launches count."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.ops._select import Implementation, Table, choose, pallas
from jaxllm.ops.glu import glu
from jaxllm.ops.linear import linear
from jaxllm.ops.norm import rms_norm
from jaxllm.ops.rope import rope
from pallas_kernels.gemv import MAX_ROWS, Norm, Rotary, check, gemv
from pallas_kernels.gemv import why_not as why_not_gemv
from pallas_kernels.packed import Packed

FUSED_ROWS = MAX_ROWS  # of x, that a layer takes this op for


def fused_linear(
    x: Float[Array, "*B I"],
    weight: Float[Array, "O I"] | Packed,
    bias: Float[Array, " O"] | None = None,
    *,
    norm: Norm | None = None,
    epilogue: str | None = None,
    residual: Float[Array, "*B F"] | None = None,
    rotary: Rotary | None = None,
    implementation: str | Mapping[str, str] = "auto",
) -> Any:
    """epilogue(norm(x) @ weight.T + bias) + residual: [*B, F] in x's dtype.

    epilogue "swiglu": the outputs are gate, then up, and F is half of them. "rope": they are the
    heads of q, k and v; those of q and k are turned, and the result is (q, k, v), each
    [*B, heads, H].
    "xla" computes it by the ops of its parts, which round between them, by the same
    `implementation`.
    Raises: ValueError if shapes or dtypes disagree. NotImplementedError if the named implementation
    cannot run the call.
    """
    around = {"norm": norm, "epilogue": epilogue, "residual": residual, "rotary": rotary}
    if not isinstance(weight, Packed):
        weight = weight.astype(x.dtype)
        check(x, weight, bias=bias, out_dtype=None, **around)
    name = choose("fused_linear", FUSED_LINEAR, implementation, x, weight, bias, **around)
    y = FUSED_LINEAR[name].run(x, weight, bias, **around, implementation=implementation)
    if rotary is None:
        return y
    width = 2 * rotary.cos.shape[-1]
    q, kv = (part.reshape(*x.shape[:-1], -1, width) for part in y)
    return q, *jnp.split(kv, 2, axis=-2)


def _in_parts(x, weight, bias, *, norm, epilogue, residual, rotary, implementation):
    same = {"implementation": implementation}
    if norm is not None:
        x = rms_norm(x, norm.weight, eps=norm.eps, zero_centered=norm.zero_centered, **same)
    y = linear(x, weight, bias, **same)
    if epilogue == "swiglu":
        y = glu(y, activation="silu", **same)
    if rotary is None:
        return y if residual is None else y + residual
    width = 2 * rotary.cos.shape[-1]
    heads = y.reshape(1, math.prod(x.shape[:-1]), -1, width)
    places = (rotary.q_heads, rotary.q_heads + rotary.kv_heads)
    q, k, v = jnp.split(heads, places, axis=2)
    angles = (a.reshape(1, -1, width // 2) for a in rotary[:2])
    q, k = rope(q, k, *angles, sliced=True, **same)
    kv = jnp.concatenate([k, v], axis=2)
    return tuple(part.reshape(*x.shape[:-1], -1) for part in (q, kv))


def _pallas(x, weight, bias, *, implementation=None, interpret=False, **around):
    del implementation
    return gemv(x, weight, bias=bias, interpret=interpret, **around)


def _why_not_pallas(x, weight, bias, *, device, **around) -> str | None:
    if isinstance(weight, Packed):
        return "the weight is packed"
    return why_not_gemv(x, weight, bias=bias, **around, device=device)


FUSED_LINEAR: Table = {
    **pallas(_pallas, _why_not_pallas, lambda *args, **kwargs: "was not timed yet"),
    "xla": Implementation(_in_parts),
}
