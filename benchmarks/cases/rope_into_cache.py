"""A token's heads turned and written into the cache: decode steps of real models.

The caller keeps its cache, so XLA copies it for either side: it has two slots here.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case
from benchmarks.models import LLAMA_8B, PHI_3_MINI, QWEN
from jaxllm.config import ModelConfig
from pallas_kernels.around_product import Cache, Rotary
from pallas_kernels.measure import size_bytes
from pallas_kernels.rope_into_cache import rope_into_cache, rope_into_cache_reference

SLOTS = 2  # of a cache


def cases() -> list[Case]:
    """One row to 64 of a decode step; odd sizes are compiled only."""
    found = [_model(rows, model) for model in (QWEN, LLAMA_8B, PHI_3_MINI) for rows in (1, 16)]
    found.append(_model(64, LLAMA_8B))
    for heads in ((3, 1, 32), (4, 2, 160)):
        found.append(_case(3, *heads, dtype="float16", compile_only=True))
    return found


def _model(rows: int, model: ModelConfig) -> Case:
    return _case(rows, model.num_attention_heads, model.num_key_value_heads, model.head_dim)


def _case(
    b: int, n: int, k: int, h: int, dtype: str = "bfloat16", compile_only: bool = False
) -> Case:
    heads = jax.ShapeDtypeStruct((b, (n + 2 * k) * h), dtype)
    angles = jax.ShapeDtypeStruct((b, h // 2), "float32")
    cache = jax.ShapeDtypeStruct((b, SLOTS, k, h), dtype)
    call = functools.partial(_call, n, k)
    return Case(
        op="rope_into_cache",
        label=f"{b} x {n} + {k} heads of {h}, {dtype}",
        arguments=(heads, angles, angles, cache, cache),
        run=functools.partial(call, rope_into_cache),
        plain=functools.partial(call, rope_into_cache_reference),
        kind="launch",
        bytes=size_bytes(heads, angles, angles, heads),
        truth=functools.partial(_truth, n),
        compile_only=compile_only,
    )


def _cache(k: Any, v: Any) -> Cache:
    return Cache(k, v, jnp.full(len(k), SLOTS - 1, jnp.int32))


def _call(n: int, kv_heads: int, f: Any, heads, cos, sin, k, v) -> Any:
    return f(heads, Rotary(cos, sin, n, kv_heads), _cache(k, v))


def _truth(n: int, heads, cos, sin, k, v) -> Any:
    import oracles  # type: ignore

    angles = (a.astype(heads.dtype).astype(np.float64) for a in (cos, sin))
    return oracles.turn_and_write(heads.astype(np.float64), *angles, n, _cache(k, v))
