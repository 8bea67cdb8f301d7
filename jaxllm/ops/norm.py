"""Normalisation over the last axis: by the root of the mean square, or by mean and deviation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.ops._select import Implementation, Table, pallas, select, slower_for_few
from pallas_kernels import triton_rms_norm
from pallas_kernels.layer_norm import layer_norm as layer_norm_kernel
from pallas_kernels.layer_norm import why_not as why_not_layer_norm
from pallas_kernels.rms_norm import rms_norm as rms_norm_kernel
from pallas_kernels.rms_norm import why_not as why_not_rms_norm


def rms_norm(
    x: Float[Array, "*B D"],
    weight: Float[Array, " D"],
    *,
    eps: float,
    residual: Float[Array, "*B D"] | None = None,
    zero_centered: bool = False,
    implementation: str | Mapping[str, str] = "auto",
) -> Any:
    """x / sqrt(mean(x^2) + eps) * weight; with `residual`: (the norm of x + residual, that sum).

    `zero_centered` (Gemma) multiplies by 1 + weight.
    Dtypes: statistics in float32. x + residual and the normalised row, before the weight, are
    rounded to x's dtype; with zero_centered the product is taken in float32 and rounded once. The
    results have x's dtype.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467; rounding points of Hugging Face's Llama and
    Gemma.
    """
    kwargs = {"eps": eps, "residual": residual, "zero_centered": zero_centered}
    return select("rms_norm", RMS_NORM, implementation, x, weight, **kwargs)(x, weight, **kwargs)


def _rms_norm_xla(x, weight, *, eps, residual, zero_centered):
    total = x if residual is None else x + residual
    x32 = total.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
    if zero_centered:
        y = (y * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    else:
        y = y.astype(x.dtype) * weight.astype(x.dtype)
    return y if residual is None else (y, total)


def _rms_norm_not_auto(x, weight, **kwargs) -> str | None:
    del weight, kwargs
    if x.shape[-1:] <= (256,):  # H200, bfloat16, 262144 x 128: 34.4 us, XLA 33.5 us
        return "XLA is as fast for rows of 256 numbers or fewer"
    return slower_for_few(math.prod(x.shape[:-1]))


RMS_NORM: Table = {
    **pallas(rms_norm_kernel, why_not_rms_norm, _rms_norm_not_auto),
    "triton": Implementation(
        triton_rms_norm.rms_norm,
        triton_rms_norm.why_not,
        lambda *args, **kwargs: "runs only by name: no call was measured faster than with xla",
    ),
    "xla": Implementation(_rms_norm_xla),
}


def layer_norm(
    x: Float[Array, "*B D"],
    weight: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    *,
    eps: float,
    implementation: str | Mapping[str, str] = "auto",
) -> Float[Array, "*B D"]:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias; without a bias, nothing is added.

    Dtypes: all in float32, rounded once at the end to x's dtype. The variance is that of x - mean,
    so that a mean of 1e4 times the deviation does no harm.
    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.
    """
    run = select("layer_norm", LAYER_NORM, implementation, x, weight, bias, eps=eps)
    return run(x, weight, bias, eps=eps)


def _layer_norm_xla(x, weight, bias, *, eps):
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    weight, *rest = (
        w.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + w.shape)
        for w in (weight, bias)
        if w is not None
    )
    y = centred * jax.lax.rsqrt(variance + eps) * weight
    return (y + rest[0] if rest else y).astype(x.dtype)


def _layer_norm_not_auto(x, weight, bias, **kwargs) -> str | None:
    del weight, bias, kwargs
    return slower_for_few(math.prod(x.shape[:-1]))


LAYER_NORM: Table = {
    **pallas(layer_norm_kernel, why_not_layer_norm, _layer_norm_not_auto),
    "xla": Implementation(_layer_norm_xla),
}
