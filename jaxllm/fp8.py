"""Matrix products of 8-bit floating-point numbers, forward and backward, with current scaling.

    y = x W^T       x and W rounded to e4m3
    dx = dy W       dy rounded to e5m2, for gradients need range more than digits
    dW = dy^T x

A tensor is divided by s, the least power of two with which it fits the format, and rounded; the
sums are float32 and are multiplied by both s, which rounds nothing (but a product of both below
2^-126 is 0). The scale comes from the tensor itself at every use, so there is no state to keep.
Products want K innermost in both operands, so each tensor is rounded both ways round at once
(`ops.cast_transpose`). On a GPU that has such products, XLA calls cuBLASLt's with the scales in the
call, and asks for its fast sums: Hopper's tensor cores keep 13 bits of one behind the leading one.
A CPU sums the same rounded numbers in float32 throughout.
Source: Micikevicius et al. 2022, arXiv:2209.05433.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxllm import ops
from jaxllm.layers import Linear
from jaxllm.ops.linear import add_bias
from jaxllm.quantize import KEEP, linears
from pallas_kernels.varying import vary_alike

FORWARD = jnp.float8_e4m3fn
GRADIENT = jnp.float8_e5m2


class Fp8Linear(Linear):
    """A `Linear` with the same parameters whose three products are of 8-bit numbers.

    The parameters stay in their dtype and so do their gradients; the weight is cast to the
    runtime's dtype before it is quantised; the result is in that dtype or `out_dtype`, as from
    `Linear`.
    """

    def __init__(self, linear: Linear):
        self.weight, self.bias = linear.weight, nnx.data(linear.bias)
        self.dtype = linear.dtype
        self.implementation = linear.implementation

    def __call__(self, x: Float[Array, "*B I"], *, out_dtype=None) -> Float[Array, "*B O"]:
        implementation = ops.name_for("cast_transpose", self.implementation)
        dtype = jnp.dtype(out_dtype or self.dtype)
        y: Array = _product(
            dtype, implementation, *vary_alike(x.astype(self.dtype), self.weight[...])
        )
        return add_bias(y, None if self.bias is None else self.bias[...])


def use_fp8(model: nnx.Module, *, keep: Sequence[str] = KEEP) -> None:
    """Turns every `Linear` of the model into an `Fp8Linear` of the same parameters, but those whose
    name's last part is in `keep`; the embedding, and so a tied head, is none.

    Raises: ValueError if there is none to turn.
    """
    found = linears(model, keep)
    if not found:
        raise ValueError("fp8: the model has no linear layer that is plain and not kept")
    for parent, attribute, linear in found.values():
        setattr(parent, attribute, Fp8Linear(linear))


def scale_of(x: Float[Array, "*B"], dtype: Any = FORWARD) -> Float[Array, ""]:
    """The least power of two with which x / scale has no number beyond the largest of `dtype`.

    float32; 1 for a tensor of zeros, and never 0; NaN or infinite if x has such a number.
    """
    most = np.float32(jnp.finfo(dtype).max)
    largest = jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
    least = jnp.finfo(jnp.float32).tiny  # else the quotients of a tiny tensor would be NaN
    ratio = jnp.maximum(largest / most, least)
    mantissa, exponent = jnp.frexp(ratio)
    scale = jnp.ldexp(jnp.float32(1), exponent - (mantissa == 0.5))
    scale = jnp.where(largest > 0, scale, jnp.float32(1))
    return jnp.where(jnp.isfinite(largest), scale, largest)


class _Operand(NamedTuple):
    """A matrix in 8 bits, both ways round: what it stands for is scale times that."""

    rows: Array
    columns: Array
    scale: Array


def _operand(x: Float[Array, "M N"], dtype: Any, implementation: str) -> _Operand:
    scale = scale_of(x, dtype)
    return _Operand(*ops.cast_transpose(x, scale, dtype, implementation=implementation), scale)


def _dot(a: Array, b: Array, scale: Array, dtype: Any) -> Array:
    """scale * a @ b^T of two matrices in 8 bits."""
    # bfloat16 has float32's exponents, so that a power of two rounds nothing: cuBLASLt, which has
    # the scale from XLA, need not write float32 first
    wide = dtype if dtype == jnp.bfloat16 else jnp.float32
    contracted = (((1,), (1,)), ((), ()))
    y = jax.lax.dot_general(a, b, contracted, preferred_element_type=wide)
    return (y * scale.astype(wide)).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(out_dtype: Any, implementation: str, x, weight):
    if implementation == "auto":  # without a gradient nothing is turned round: XLA leaves that out
        implementation = "xla"
    return _product_forward(out_dtype, implementation, x, weight)[0]


def _product_forward(out_dtype, implementation, x, weight):
    rows = _operand(x.reshape(-1, x.shape[-1]), FORWARD, implementation)
    # As a training step casts it, so that every program quantises the same
    small = _operand(weight.astype(x.dtype), FORWARD, implementation)
    y = _dot(rows.rows, small.rows, rows.scale * small.scale, out_dtype)
    saved = [(operand.columns, operand.scale) for operand in (rows, small)]
    like = jnp.zeros((0,), x.dtype), jnp.zeros((0,), weight.dtype)
    return y.reshape(*x.shape[:-1], weight.shape[0]), (*saved, like)


def _product_backward(out_dtype, implementation, saved, d_y):
    del out_dtype
    (x, x_scale), (weight, weight_scale), (like_x, like_weight) = saved
    d_rows = _operand(d_y.reshape(-1, d_y.shape[-1]), GRADIENT, implementation)
    d_x = _dot(d_rows.rows, weight, d_rows.scale * weight_scale, like_x.dtype)
    d_weight = _dot(d_rows.columns, x, d_rows.scale * x_scale, like_weight.dtype)
    return d_x.reshape(*d_y.shape[:-1], weight.shape[0]), d_weight


_product.defvjp(_product_forward, _product_backward)
