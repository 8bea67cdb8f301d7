"""The threshold of top-k and top-p: what it compiles to; jaxllm.sampling says what it takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.case import Case
from pallas_kernels.measure import size_bytes
from pallas_kernels.sampling_threshold import sampling_threshold, sampling_threshold_reference


def cases() -> list[Case]:
    """The vocabularies of real models, compiled only."""
    return [_case(1, 151936), _case(16, 128256), _case(2, 32000)]


def _case(b: int, v: int) -> Case:
    arguments = tuple(
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((b, v), jnp.int32),
            ((b, v), jnp.float32),
            ((b,), jnp.int32),
            ((b,), jnp.float32),
        )
    )
    return Case(
        op="sampling_threshold",
        label=f"{b} x {v} scores",
        arguments=arguments,
        run=sampling_threshold,
        plain=sampling_threshold_reference,
        kind="memory-read",
        bytes=size_bytes(*arguments) + 4 * b,
        compile_only=True,
    )
