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

from jaxllm.ops.linear import add_bias
from pallas_kernels.matmul_finish import precision
from pallas_kernels.options import check_arrays, check_dtype
from pallas_kernels.quantize import dequantize, quantize
from pallas_kernels.ternary_matmul import quantize_rows, ternary_matmul_reference
from pallas_kernels.varying import vary_alike


def bit_linear(
    x: Float[Array, "*B I"],
    weight: Float[Array, "O I"],
    bias: Float[Array, " O"] | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
) -> Float[Array, "*B O"]:
    """x times a weight that is trained, both quantised here: by plain JAX on every device.

    Dtypes: x, weight and bias of any float; x is int8 and the weight ternary by float32 arithmetic,
    sums are int32, and the result has `out_dtype`, x's if None. A gradient has the dtype of what it
    is of; its products are made in x's.
    Raises: ValueError if shapes or dtypes disagree, I does not divide by four, or a weight that is
    not traced has a NaN or an infinity; a traced one makes the result NaN.
    """
    check_arrays("bit_linear", x=x, weight=weight, bias=bias)
    check_dtype("bit_linear", "out_dtype", out_dtype)
    for name, array in (("x", x), ("weight", weight), ("bias", bias)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"bit_linear: {name} is {array.dtype}; it must be floating point")
    if x.ndim < 1 or weight.ndim != 2 or x.shape[-1] != weight.shape[1] or not weight.size:
        raise ValueError(
            f"bit_linear: x {list(x.shape)} and the weight {list(weight.shape)} must be [.., I] "
            "and [O, I], neither I nor O 0"
        )
    if weight.shape[1] % 4:
        raise ValueError(
            f"bit_linear: four ternary inputs share a byte, and I = {weight.shape[1]} does not "
            "divide by four"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bit_linear: bias {list(bias.shape)} is not [O] = [{weight.shape[0]}]")
    y: Array = _bit_product(jnp.dtype(out_dtype or x.dtype), *vary_alike(x, weight))
    return add_bias(y, bias)


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
    d_x = jax.lax.dot_general(
        d_y.astype(x.dtype),
        dequantize(quantize(weight, "ternary"), x.dtype),
        (((d_y.ndim - 1,), (0,)), ((), ())),
        precision=precision(x.dtype),
        preferred_element_type=x.dtype,
    )
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
