"""The threshold of top-k and top-p: what it compiles to; its times are in ops/."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case
from pallas_kernels.measure import size_bytes
from pallas_kernels.sampling_threshold import sampling_threshold, sampling_threshold_reference

TOP_K, TOP_P = 50, 0.9


def cases() -> list[Case]:
    """The vocabularies of real models, compiled only."""
    return [_case(1, 151936), _case(16, 128256), _case(2, 32000)]


def _case(b: int, v: int) -> Case:
    make = functools.partial(_make, b, v)
    arguments = jax.eval_shape(make, jax.random.key(0))
    return Case(
        op="sampling_threshold",
        label=f"{b} x {v} scores",
        arguments=arguments,
        run=sampling_threshold,
        plain=sampling_threshold_reference,
        kind="memory-read",
        bytes=size_bytes(arguments) + 4 * b,
        truth=_truth,
        make=make,
        compile_only=True,
    )


def _make(b: int, v: int, key: jax.Array) -> tuple[jax.Array, ...]:
    scores = jax.random.normal(key, (b, v), jnp.float32)
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ratio = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    return keys, ratio, jnp.full((b,), TOP_K, jnp.int32), jnp.full((b,), TOP_P, jnp.float32)


def _truth(keys: np.ndarray, ratio: np.ndarray, top_k: np.ndarray, top_p: np.ndarray) -> np.ndarray:
    """By a sort: the last of the k largest that has less than p of their mass above it."""
    found = []
    for row, mass, k, p in zip(keys, ratio.astype(np.float64), top_k, top_p, strict=True):
        order = np.argsort(-row.astype(np.int64))[:k]
        above = np.cumsum(mass[order]) - mass[order]
        found.append(row[order][above < p * mass[order].sum()][-1])
    return np.array(found, np.float64)
