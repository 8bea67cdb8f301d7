"""What becomes of a product's sums: scales, bias, activation, residual, rounding to fewer bits.

In plain JAX, for references, gradients and sums that are added behind a kernel; that of `matmul`
shares what is done number by number.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

FP8 = jnp.float8_e4m3fn
BLOCK = 128  # numbers along K, and rows of a weight, that share a scale
MOST = {"int8": 127, "float8_e4m3fn": 448}  # -128 is never made, so that negation is safe


def precision(dtype: jnp.dtype) -> lax.Precision | None:
    """float32 means float32: a GPU would round the operands of the product to 10 bits (tf32)."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def gelu_exact(x: jax.Array) -> jax.Array:
    """x (1 + erf(x / sqrt(2))) / 2."""
    return x * (0.5 + 0.5 * lax.erf(x * math.sqrt(0.5)))


def gelu_tanh(x: jax.Array) -> jax.Array:
    """x (1 + tanh(z)) / 2, z = sqrt(2 / pi) (x + 0.044715 x^3).

    (1 + tanh(z)) / 2 is sigmoid(2 z), which keeps its digits where z is negative.
    """
    z = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return x * jax.nn.sigmoid(2 * z)


GELUS = {"gelu": gelu_exact, "gelu_pytorch_tanh": gelu_tanh}
# Epilogues of gate and up, and what becomes of the gate before it multiplies up
GATES = {"swiglu": jax.nn.silu, "geglu": gelu_tanh}
EPILOGUES = (None, "swiglu", *GELUS)


def saturated(y: jax.Array, dtype) -> jax.Array:
    """float32 rounded to int8 or float8_e4m3fn, to the nearest, ties to even."""
    most = jnp.float32(MOST[jnp.dtype(dtype).name])
    y = jnp.minimum(jnp.maximum(y, -most), most)
    if jnp.dtype(dtype) == jnp.int8:
        y = lax.round(y, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int32)
    return y.astype(dtype)


def sums(a, b, *, transpose_b=False, a_scale=None, b_scale=None) -> jax.Array:
    """a @ b: int32 of int8, else float32; with block scales, which alone count here, times them."""
    b = jnp.swapaxes(b, -1, -2) if transpose_b else b
    if a_scale is not None and b_scale is not None and b_scale.ndim == 2:
        k, n = b.shape
        wide = jnp.repeat(a_scale.astype(jnp.float32), BLOCK, axis=-1)[..., :k]
        of_b = jnp.repeat(jnp.repeat(b_scale.T, BLOCK, axis=0), BLOCK, axis=1)[:k, :n]
        a, b = a.astype(jnp.float32) * wide, b.astype(jnp.float32) * of_b.astype(jnp.float32)
        return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
    if a.dtype == FP8:  # each of its numbers is a bfloat16 too
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    wide = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
    return jnp.matmul(a, b, precision=precision(a.dtype), preferred_element_type=wide)


def finish(
    total,
    bias=None,
    residual=None,
    a_scale=None,
    b_scale=None,
    out_scale=None,
    epilogue=None,
    *,
    out_dtype,
):
    """The result, of sums that block scales are already in; a_scale is [.., M, 1] or a number."""
    if jnp.dtype(out_dtype) == jnp.int32:
        return total
    total = total.astype(jnp.float32)
    wide = lambda x: x.astype(jnp.float32).reshape((1,) * (total.ndim - x.ndim) + x.shape)  # noqa: E731
    for scale in (a_scale, b_scale):
        total = total if scale is None else total * wide(scale)
    total = total if bias is None else total + wide(bias)
    if epilogue in GATES:
        gate, up = jnp.split(total, 2, axis=-1)
        total = GATES[epilogue](gate) * up
    elif epilogue is not None:
        total = GELUS[epilogue](total)
    total = total if residual is None else total + wide(residual)
    return (
        total.astype(out_dtype)
        if out_scale is None
        else saturated(total * wide(out_scale), out_dtype)
    )
