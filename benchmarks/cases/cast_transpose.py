"""Cast and transpose: activations and gradients of a training step, and weights."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case
from pallas_kernels.cast_transpose import cast_transpose, cast_transpose_reference
from pallas_kernels.measure import size_bytes

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
SCALE = 2.0**-6


def cases() -> list[Case]:
    """A Llama of 1.3B parameters at 32768 tokens, Llama-3.1-8B and Qwen2.5-0.5B at 8192."""
    found = [_case(32768, 2048), _case(32768, 5504, dtype=E5M2), _case(8192, 14336)]
    found += [_case(8192, 4864, dtype=E5M2), _case(2048, 2048, "float32")]
    for x_dtype in ("bfloat16", "float16", "float32"):
        found += [_case(128, 128, x_dtype, dtype, compile_only=True) for dtype in (E4M3, E5M2)]
    return found


def _case(
    m: int, n: int, x_dtype: str = "bfloat16", dtype: Any = E4M3, compile_only: bool = False
) -> Case:
    x = jax.ShapeDtypeStruct((m, n), x_dtype)
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    return Case(
        op="cast_transpose",
        label=f"{m} x {n} {x_dtype}, {jnp.dtype(dtype).name}",
        arguments=(x, scale),
        run=functools.partial(cast_transpose, dtype=dtype),
        plain=functools.partial(cast_transpose_reference, dtype=dtype),
        kind="memory",
        bytes=size_bytes(x) + 2 * m * n,
        truth=_truth,
        constants={1: np.float32(SCALE)},
        compile_only=compile_only,
    )


def _truth(x: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What is rounded; nothing of a normal random number, so scaled, is beyond either dtype."""
    y = x.astype(np.float64) / scale
    return y, y.T
