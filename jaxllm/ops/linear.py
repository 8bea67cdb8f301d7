"""Every projection, embedding and head: a product with a weight [out, in], a gather of rows."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.ops._select import Implementation, Table, select


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


def embedding(
    table: Float[Array, "V D"],
    ids: Int[Array, "*B"],
    *,
    dtype: jnp.dtype | None = None,
    implementation: str | Mapping[str, str] = "auto",
) -> Float[Array, "*B D"]:
    """Rows of the table, in `dtype` (the table's if None).

    Ids outside the table are clamped to its ends.
    """
    run = select("embedding", EMBEDDING, implementation, table, ids, dtype=dtype)
    return run(table, ids, dtype=dtype)


def _embedding_xla(table, ids, *, dtype):
    return jnp.take(table, ids, axis=0, mode="clip").astype(dtype or table.dtype)


LINEAR: Table = {"xla": Implementation(_linear_xla)}
EMBEDDING: Table = {"xla": Implementation(_embedding_xla)}
