"""LayerNorm with weight and bias, forward and backward: the widths that RMSNorm is measured at."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from benchmarks.case import Case
from pallas_kernels.layer_norm import layer_norm, layer_norm_reference
from pallas_kernels.measure import size_bytes

EPS = 1e-5
QWEN, PHI, LLAMA = 896, 3072, 4096  # the widths of Qwen2.5-0.5B, Phi-3-mini, Llama-3.1-8B


def cases() -> list[Case]:
    """Training and prefill at 8192 tokens, decoding at 1 to 64; odd sizes are compiled only."""
    found = [_case(8192, d) for d in (8192, LLAMA, PHI, QWEN)]
    found += [_case(1, QWEN), _case(64, QWEN), _case(1, LLAMA), _case(64, LLAMA)]
    found += [_case(8192, LLAMA, dtype) for dtype in ("float32", "float16")]
    found += [_case(8192, d, backward=True) for d in (8192, LLAMA, QWEN)]
    for m, d, dtype in (
        (1, 96, "bfloat16"),
        (7, 1000, "float16"),
        (13, 4864, "float32"),
        (257, 2048, "bfloat16"),
        (64, 16384, "bfloat16"),
        (8192, 7168, "bfloat16"),  # too wide for both sums in registers
        (8192, 7680, "bfloat16"),
    ):
        for backward in (False, True):
            found.append(_case(m, d, dtype, backward, compile_only=True))
    for m, d in ((64, QWEN), (64, LLAMA)):
        for backward in (False, True):
            found.append(_case(m, d, "bfloat16", backward, "float32", compile_only=True))
    return found


def _case(
    m: int,
    d: int,
    dtype: str = "bfloat16",
    backward: bool = False,
    weight_dtype: str | None = None,
    compile_only: bool = False,
) -> Case:
    x, row = jax.ShapeDtypeStruct((m, d), dtype), jax.ShapeDtypeStruct((d,), weight_dtype or dtype)
    arguments = (x, row, row, x) if backward else (x, row, row)
    ways = [functools.partial(f, eps=EPS) for f in (layer_norm, layer_norm_reference)]
    if backward:
        ways = [functools.partial(_backward, way) for way in ways]
    run, plain = ways
    words = [f"weight {weight_dtype}"] * bool(weight_dtype) + ["backward"] * backward
    read = (x, row, x) if backward else arguments  # the bias has no part in its own gradient
    return Case(
        op="layer_norm",
        label=", ".join([f"{m} x {d} {dtype}", *words]),
        arguments=arguments,
        run=run,
        plain=plain,
        kind="memory-reduce",
        bytes=size_bytes(read, (x, row, row) if backward else x),
        truth=_truth_backward if backward else _truth,
        compile_only=compile_only,
    )


def _backward(norm: Any, *arguments: jax.Array) -> tuple[jax.Array, ...]:
    *arrays, d_out = arguments
    return jax.vjp(norm, *arrays)[1](d_out)


def _truth(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> Any:
    import oracles  # type: ignore

    return oracles.layer_norm(x, weight, bias, eps=EPS)


def _truth_backward(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, d_out: np.ndarray) -> Any:
    import oracles  # type: ignore

    return oracles.layer_norm(x, weight, bias, eps=EPS, d_out=d_out)
