"""Every projection, embedding and head: a product with a weight [out, in], a gather of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.ops._select import Implementation, Table, pallas, select, slower_for_few
from pallas_kernels.embedding import check as check_embedding
from pallas_kernels.embedding import embedding as embedding_kernel
from pallas_kernels.embedding import embedding_reference
from pallas_kernels.embedding import why_not as why_not_embedding
from pallas_kernels.matmul import matmul as matmul_kernel
from pallas_kernels.matmul import why_not as why_not_matmul


def precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """float32 means float32: a GPU would round the operands of the product to 10 bits (tf32)."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def linear(
    x: Float[Array, "*B I"],
    weight: Float[Array, "O I"],
    bias: Float[Array, " O"] | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
    implementation: str | Mapping[str, str] = "auto",
) -> Float[Array, "*B O"]:
    """x @ weight.T + bias, with the weight stored [out, in] as checkpoints have it.

    Dtypes: weight and bias are cast to x's dtype; sums are float32; the result has `out_dtype`, x's
    if None.
    """
    run = select("linear", LINEAR, implementation, x, weight, bias, out_dtype=out_dtype)
    return run(x, weight, bias, out_dtype=out_dtype)


def _linear_xla(x, weight, bias, *, out_dtype):
    y = jax.lax.dot_general(
        x,
        weight.astype(x.dtype),
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=precision(x.dtype),
        preferred_element_type=out_dtype or x.dtype,
    )
    if bias is not None:
        y = y + bias.astype(y.dtype).reshape((1,) * (y.ndim - 1) + bias.shape)
    return y


def _linear_pallas(x, weight, bias=None, *, out_dtype=None, interpret=False):
    dtype = out_dtype or x.dtype
    y = matmul_kernel(
        x.reshape(-1, x.shape[-1]),
        weight.astype(x.dtype),
        transpose_b=True,
        bias=None if bias is None else bias.astype(dtype),
        out_dtype=dtype,
        interpret=interpret,
    )
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _linear_pallas_why_not(x, weight, bias=None, *, out_dtype=None, device):
    del bias
    rows = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)
    weight = jax.ShapeDtypeStruct(weight.shape, x.dtype)  # it is cast
    return why_not_matmul(rows, weight, transpose_b=True, out_dtype=out_dtype, device=device)


def _linear_pallas_not_auto(x, weight, bias=None, *, out_dtype=None, device):
    # H200, bfloat16: alone the kernel is 2 to 7 % faster than XLA's at 8192 tokens, at few up to a
    # third, but a model decodes slower with it (benchmarks/README.md)
    del x, weight, bias, out_dtype, device
    return "a model decodes faster where XLA joins products with what stands before and behind them"


def embedding(
    table: Float[Array, "V D"],
    ids: Int[Array, "*B"],
    *,
    scale: float | None = None,
    dtype: jnp.dtype | None = None,
    implementation: str | Mapping[str, str] = "auto",
) -> Float[Array, "*B D"]:
    """Rows of the table in `dtype` (the table's if None), times `scale`, rounded to that dtype.

    Traced ids outside the table are clamped to its ends. Raises: ValueError for concrete ones,
    and if the ids are no integers or the table is not [V, D] of floating point.
    """
    check_embedding(table, ids, scale, dtype)
    kwargs = {"scale": scale, "dtype": dtype}
    return select("embedding", EMBEDDING, implementation, table, ids, **kwargs)(
        table, ids, **kwargs
    )


def _embedding_not_auto(table, ids, **kwargs) -> str | None:
    del table, kwargs
    return slower_for_few(ids.size)


LINEAR: Table = {
    **pallas(_linear_pallas, _linear_pallas_why_not, _linear_pallas_not_auto),
    "xla": Implementation(_linear_xla),
}
EMBEDDING: Table = {
    **pallas(embedding_kernel, why_not_embedding, _embedding_not_auto),
    "xla": Implementation(embedding_reference),
}
