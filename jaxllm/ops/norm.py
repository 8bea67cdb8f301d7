"""Root-mean-square normalisation over the last axis."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.ops._select import Implementation, Table, select


def rms_norm(
    x: Float[Array, "*B D"],
    weight: Float[Array, " D"],
    *,
    eps: float,
    zero_centered: bool = False,
    implementation: str | Mapping[str, str] = "auto",
) -> Float[Array, "*B D"]:
    """x / sqrt(mean(x^2) + eps) * weight; `zero_centered` (Gemma) multiplies by 1 + weight.

    Dtypes: statistics in float32. The normalised row is rounded to x's dtype before the weight;
    with zero_centered the product is taken in float32 and rounded once. The result has x's dtype.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467; rounding points of Hugging Face's Llama and
    Gemma.
    """
    kwargs = {"eps": eps, "zero_centered": zero_centered}
    return select("rms_norm", RMS_NORM, implementation, x, weight, **kwargs)(x, weight, **kwargs)


def _rms_norm_xla(x, weight, *, eps, zero_centered):
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
    if zero_centered:
        return (y * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    return y.astype(x.dtype) * weight.astype(x.dtype)


RMS_NORM: Table = {"xla": Implementation(_rms_norm_xla)}
