"""RMSNorm, with and without a residual, forward and backward: widths of real models."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from benchmarks.case import Case
from pallas_kernels import triton_rms_norm
from pallas_kernels.measure import size_bytes
from pallas_kernels.rms_norm import rms_norm, rms_norm_reference

EPS = 1e-6
QWEN, PHI, LLAMA = 896, 3072, 4096  # Qwen2.5-0.5B, Phi-3-mini, Llama-3.1-8B


def cases() -> list[Case]:
    """Training and prefill at 8192 tokens, decoding at 1 to 64; odd sizes are compiled only."""
    sizes = [(8192, 8192), (8192, LLAMA), (8192, PHI), (8192, QWEN)]
    decode = [(1, QWEN), (64, QWEN), (1, LLAMA), (16, LLAMA), (64, LLAMA)]
    found = [_case(m, d) for m, d in sizes + decode]
    found += [_case(8192, LLAMA, "float32"), _case(8192, LLAMA, "float16")]
    found += [_case(m, d, residual=True) for m, d in ((8192, 8192), (8192, QWEN), (1, LLAMA))]
    found += [_case(m, d, backward=True) for m, d in ((8192, 8192), (8192, LLAMA), (8192, QWEN))]
    # The forward kernel runs in this program too, for the sum that the backward pass reads: it is
    # no time of the backward pass alone.
    found += [_case(8192, 8192, residual=True, backward=True, compile_only=True)]
    for m, d, dtype in (
        (1, 96, "bfloat16"),
        (7, 1000, "float16"),
        (13, 4864, "float32"),
        (257, 2048, "bfloat16"),
    ):
        for residual in (False, True):
            for backward in (False, True):
                found.append(_case(m, d, dtype, residual, backward, compile_only=True))
    return found


def _case(
    m: int,
    d: int,
    dtype: str = "bfloat16",
    residual: bool = False,
    backward: bool = False,
    compile_only: bool = False,
) -> Case:
    x, weight = jax.ShapeDtypeStruct((m, d), dtype), jax.ShapeDtypeStruct((d,), dtype)
    forward = (x, weight, x) if residual else (x, weight)
    cotangents = (x, x) if residual else (x,)
    ways = [_call(f) for f in (rms_norm, rms_norm_reference, triton_rms_norm.rms_norm)]
    if backward:
        ways = [functools.partial(_backward, way, len(forward)) for way in ways]
    run, plain, triton = ways
    words = ["residual"] * residual + ["backward"] * backward
    arguments = forward + cotangents if backward else forward
    return Case(
        op="rms_norm",
        label=", ".join([f"{m} x {d} {dtype}", *words]),
        arguments=arguments,
        run=run,
        plain=plain,
        kind="memory-reduce",
        bytes=size_bytes(arguments, forward if backward else cotangents),
        truth=functools.partial(_truth_backward if backward else _truth, residual),
        rivals={"triton": triton},
        compile_only=compile_only,
    )


def _call(f: Any) -> Any:
    def call(x, weight, residual=None):
        return f(x, weight, eps=EPS, residual=residual)

    return call


def _backward(f: Any, count: int, *arguments: jax.Array) -> tuple[jax.Array, ...]:
    out, vjp = jax.vjp(f, *arguments[:count])
    cotangents = arguments[count:]
    return vjp(cotangents if isinstance(out, tuple) else cotangents[0])


def _normal(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    inverse = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)
    return x * inverse, inverse


def _truth(residual: bool, x: np.ndarray, weight: np.ndarray, *rest: np.ndarray) -> Any:
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    if not residual:
        return _normal(x)[0] * weight
    total = x + rest[0].astype(np.float64)
    return _normal(total)[0] * weight, total


def _truth_backward(residual: bool, x: np.ndarray, weight: np.ndarray, *rest: np.ndarray) -> Any:
    x, weight, *others = (a.astype(np.float64) for a in (x, weight, *rest))
    dy = others[1] if residual else others[0]
    h, inverse = _normal(x + others[0] if residual else x)
    g = dy * weight
    dx = inverse * (g - h * np.mean(g * h, axis=-1, keepdims=True))
    dw = np.sum(dy * h, axis=0)
    return (dx + others[2], dw, dx + others[2]) if residual else (dx, dw)
