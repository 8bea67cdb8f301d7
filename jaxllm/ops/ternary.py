"""Projections of BitNet b1.58: ternary weights, int8 activations, sums of integers.

The gradient passes both quantisers as if they were not there (straight through): it is that of a
plain product at the quantised x and weight, and the scales have none.
Source: Ma et al. 2024, arXiv:2402.17764.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.ops.linear import precision
from pallas_kernels.packed import Packed
from pallas_kernels.quantize import dequantize, quantize
from pallas_kernels.ternary_matmul import quantize_rows, ternary_matmul_reference


def bit_linear(
    x: Float[Array, "*B I"],
    weight: Float[Array, "O I"],
    bias: Float[Array, " O"] | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
) -> Float[Array, "*B O"]:
    """x times a weight that is trained, both quantised here: by plain JAX on every device.

    The result has `out_dtype`, x's if None.
    """
    y: Array = _bit_product(jnp.dtype(out_dtype or x.dtype), x, weight)
    return y if bias is None else y + bias.astype(y.dtype).reshape((1,) * (y.ndim - 1) + (-1,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _bit_product(out_dtype, x, weight):
    xq, x_scale = quantize_rows(x)
    packed = quantize(weight, "ternary")
    return ternary_matmul_reference(xq, x_scale, packed, out_dtype=out_dtype)


def _bit_product_forward(out_dtype, x, weight):
    return _bit_product(out_dtype, x, weight), (x, weight)


def _bit_product_backward(out_dtype, saved, d_y):
    x, weight = saved
    xq, x_scale = quantize_rows(x)
    d_x = _d_x(d_y, quantize(weight, "ternary"), x.dtype)
    rows = (xq.astype(jnp.float32) * x_scale[..., None]).astype(x.dtype)
    d_weight = jax.lax.dot_general(
        d_y.astype(x.dtype).reshape(-1, d_y.shape[-1]),
        rows.reshape(-1, x.shape[-1]),
        (((0,), (0,)), ((), ())),
        precision=precision(x.dtype),
        preferred_element_type=weight.dtype,
    )
    return d_x, d_weight


_bit_product.defvjp(_bit_product_forward, _bit_product_backward)


def _d_x(d_y, packed: Packed, dtype):
    """The gradient of the rows of a product with the weight."""
    return jax.lax.dot_general(
        d_y.astype(dtype),
        dequantize(packed, dtype),
        (((d_y.ndim - 1,), (0,)), ((), ())),
        precision=precision(dtype),
        preferred_element_type=dtype,
    )
