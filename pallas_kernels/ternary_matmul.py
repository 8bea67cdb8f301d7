"""Ternary weights times int8 activations, exact in int32: y = (xq Wq^T) (a / 127) gamma.

xq [*B, I] are the activations of a token as int8 and a their largest magnitude; Wq [O, I] is -1, 0
or 1, two bits each, with a gamma for each output (`Packed`, scheme "ternary").
Source: Ma et al. 2024, arXiv:2402.17764; Wang et al. 2024, arXiv:2410.16144.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8

from pallas_kernels.packed import Packed

SMALLEST = 1e-5  # of the largest magnitude that a token is scaled by


def quantize_rows(x: Float[Array, "*B I"]) -> tuple[Int8[Array, "*B I"], Float[Array, "*B"]]:
    """Activations as int8, -128 to 127, and what 1 of them stands for: float32, max |x| / 127.

    Arithmetic in float32; `round` is to the nearest, ties to even.
    """
    x = x.astype(jnp.float32)
    largest = jnp.maximum(jnp.max(jnp.abs(x), axis=-1), np.float32(SMALLEST))
    quotients = jnp.round(x * (np.float32(127) / largest)[..., None])
    return jnp.clip(quotients, -128, 127).astype(jnp.int8), largest / np.float32(127)


def ternary_matmul_reference(
    xq: Int8[Array, "*B I"], x_scale: Float[Array, "*B"], packed: Packed, *, out_dtype: Any
) -> Float[Array, "*B O"]:
    """The mathematics in plain JAX."""
    weight = unpack(packed.codes)
    sums = jax.lax.dot_general(
        xq, weight, (((xq.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    )
    y = sums.astype(jnp.float32) * x_scale[..., None]
    assert packed.row_scale is not None
    return (y * packed.row_scale.reshape((1,) * (y.ndim - 1) + (-1,))).astype(out_dtype)


def unpack(codes: Any) -> Int8[Array, "O I"]:
    """-1, 0 and 1 of codes [O, I / 4]."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)
    columns = codes[..., None] >> shifts[None, None] & np.uint8(3)
    return columns.reshape(codes.shape[0], -1).astype(jnp.int8) - np.int8(1)
