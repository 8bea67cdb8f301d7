"""Matrix products of 8-bit floating-point numbers, forward and backward, with current scaling.

    y = x W^T       x and W rounded to e4m3
    dx = dy W       dy rounded to e5m2, for gradients need range more than digits
    dW = dy^T x

A tensor is divided by s = largest magnitude / largest number of the format, and rounded; the sums
are float32 and are multiplied by both s. The scale comes from the tensor itself at every use, so
there is no state to keep. On a GPU that has such products, XLA calls cuBLASLt's with the scales in
the call; a CPU computes the same sums of the same rounded numbers.
Source: Micikevicius et al. 2022, arXiv:2209.05433.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.layers import Linear
from jaxllm.quantize import KEEP, linears

FORWARD = jnp.float8_e4m3fn
GRADIENT = jnp.float8_e5m2


class Fp8Linear(Linear):
    """A `Linear` with the same parameters whose three products are of 8-bit numbers.

    The parameters stay in their dtype and so do their gradients; the result is in the runtime's
    dtype or `out_dtype`, as from `Linear`.
    """

    def __init__(self, linear: Linear):
        self.weight, self.bias = linear.weight, linear.bias
        self.dtype = linear.dtype
        self.implementation = linear.implementation

    def __call__(self, x: Float[Array, "*B I"], *, out_dtype=None) -> Float[Array, "*B O"]:
        y: Array = _product(
            jnp.dtype(out_dtype or self.dtype), x.astype(self.dtype), self.weight[...]
        )
        if self.bias is None:
            return y
        bias = self.bias[...].astype(y.dtype)
        return y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)


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


def to_fp8(x: Float[Array, "*B"], dtype: Any = FORWARD) -> tuple[Array, Float[Array, ""]]:
    """(x / s rounded to an 8-bit dtype, s): s is float32, 1 for a tensor of zeros, and never 0."""
    most = np.float32(jnp.finfo(dtype).max)
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    least = jnp.finfo(jnp.float32).tiny  # else the quotients of a tiny tensor would be NaN
    scale = jnp.where(largest > 0, jnp.maximum(largest / most, least), jnp.float32(1))
    # What is too large would become NaN, not the largest number
    rounded = jnp.clip(x.astype(jnp.float32) / scale, -most, most).astype(dtype)
    return rounded, scale


def _dot(a, b, axes: tuple[int, int], dtype: Any) -> Array:
    """Two scaled tensors of two axes each, multiplied over one of each."""
    (a, a_scale), (b, b_scale) = a, b
    contracted = (((axes[0],), (axes[1],)), ((), ()))
    y = jax.lax.dot_general(a, b, contracted, preferred_element_type=jnp.float32)
    return (y * (a_scale * b_scale)).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(out_dtype: Any, x, weight):
    return _product_forward(out_dtype, x, weight)[0]


def _product_forward(out_dtype, x, weight):
    rows = to_fp8(x.reshape(-1, x.shape[-1]))
    small = to_fp8(weight)
    y = _dot(rows, small, (1, 1), out_dtype).reshape(*x.shape[:-1], weight.shape[0])
    return y, (rows, small, jnp.zeros((0,), x.dtype), jnp.zeros((0,), weight.dtype))


def _product_backward(out_dtype, saved, d_y):
    del out_dtype
    rows, weight, like_x, like_weight = saved
    d_rows = to_fp8(d_y.reshape(-1, d_y.shape[-1]), GRADIENT)
    d_x = _dot(d_rows, weight, (1, 0), like_x.dtype).reshape(*d_y.shape[:-1], -1)
    d_weight = _dot(d_rows, rows, (0, 0), like_weight.dtype)
    return d_x, d_weight


_product.defvjp(_product_forward, _product_backward)
