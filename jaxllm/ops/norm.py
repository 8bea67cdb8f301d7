"""Normalisation over the last axis: by the root of the mean square, or by mean and deviation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from jaxllm.ops._select import (
    Implementation,
    Table,
    of_kernel,
    pallas,
    select,
    slower_for_few,
)
from pallas_kernels import triton_rms_norm
from pallas_kernels.layer_norm import check as check_layer_norm
from pallas_kernels.layer_norm import layer_norm as layer_norm_kernel
from pallas_kernels.layer_norm import layer_norm_reference
from pallas_kernels.layer_norm import why_not as why_not_layer_norm
from pallas_kernels.rms_norm import check as check_rms_norm
from pallas_kernels.rms_norm import rms_norm as rms_norm_kernel
from pallas_kernels.rms_norm import rms_norm_reference
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
    Raises: ValueError if shapes or dtypes disagree or eps is not positive. NotImplementedError if
    the named implementation cannot run the call.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467; rounding points of Hugging Face's Llama and
    Gemma.
    """
    check_rms_norm(x, weight, eps, residual, zero_centered)
    kwargs = {"eps": eps, "residual": residual, "zero_centered": zero_centered}
    return select("rms_norm", RMS_NORM, implementation, x, weight, **kwargs)(x, weight, **kwargs)


def _rms_norm_not_auto(x, weight, **kwargs) -> str | None:
    del weight, kwargs
    if x.shape[-1:] <= (256,):  # H200, bfloat16, 262144 x 128: 34.4 us, XLA 33.5 us
        return "XLA is as fast for rows of 256 numbers or fewer"
    return slower_for_few(math.prod(x.shape[:-1]))


RMS_NORM: Table = {
    **pallas(rms_norm_kernel, why_not_rms_norm, _rms_norm_not_auto),
    "triton": Implementation(
        triton_rms_norm.rms_norm,
        of_kernel(triton_rms_norm.why_not),
        lambda *args, **kwargs: "runs only by name: timed on Hopper only, which 'pallas' is for",
    ),
    "xla": Implementation(rms_norm_reference),
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
    Raises: ValueError if shapes or dtypes disagree or eps is not positive. NotImplementedError if
    the named implementation cannot run the call.
    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.
    """
    check_layer_norm(x, weight, bias, eps)
    run = select("layer_norm", LAYER_NORM, implementation, x, weight, bias, eps=eps)
    return run(x, weight, bias, eps=eps)


def _layer_norm_not_auto(x, weight, bias, **kwargs) -> str | None:
    del weight, bias, kwargs
    return slower_for_few(math.prod(x.shape[:-1]))


LAYER_NORM: Table = {
    **pallas(layer_norm_kernel, why_not_layer_norm, _layer_norm_not_auto),
    "xla": Implementation(layer_norm_reference),
}
