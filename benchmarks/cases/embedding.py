"""Rows of a table by id, and their sums by id: the tables of real models."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case
from pallas_kernels.embedding import embedding, embedding_reference
from pallas_kernels.measure import size_bytes

# Qwen2.5-0.5B, Phi-3-mini, Llama-3.1-8B, Gemma-2-2B (which scales)
QWEN, PHI, LLAMA, GEMMA = (151936, 896), (32064, 3072), (128256, 4096), (256000, 2304)


def cases() -> list[Case]:
    """Prefill and training of 8192 tokens, decoding of 1 to 64; odd sizes are compiled only."""
    found = [_case(*table, 8192) for table in (QWEN, PHI, LLAMA)]
    found += [_case(*table, count) for table in (QWEN, LLAMA) for count in (1, 16, 64)]
    found += [_case(*GEMMA, 8192, scale=GEMMA[1] ** 0.5)]
    found += [_case(*table, 8192, backward=True) for table in (QWEN, PHI)]
    for v, d, count, dtype, out, scale in (
        (7, 96, 5, "bfloat16", None, None),
        (1009, 1000, 37, "float16", None, None),
        (1009, 1000, 37, "float16", None, 2.0),
        (101, 4864, 7, "float32", None, 1.5),
        (101, 16, 5, "float32", "bfloat16", None),
        (*QWEN, 8192, "float32", "bfloat16", None),
    ):
        for backward in (False, True):
            found.append(_case(v, d, count, dtype, out, scale, backward, compile_only=True))
    found.append(_case(*LLAMA, 8192, backward=True, compile_only=True))
    return found


def _case(
    v: int,
    d: int,
    count: int,
    dtype: str = "bfloat16",
    out: str | None = None,
    scale: float | None = None,
    backward: bool = False,
    compile_only: bool = False,
) -> Case:
    table, ids = jax.ShapeDtypeStruct((v, d), dtype), jax.ShapeDtypeStruct((count,), "int32")
    rows = jax.ShapeDtypeStruct((count, d), out or dtype)
    words = [f"to {out}"] * bool(out) + ["scaled"] * bool(scale) + ["backward"] * backward
    keywords = {"scale": scale, "dtype": out and jnp.dtype(out)}
    run, plain = (functools.partial(f, **keywords) for f in (embedding, embedding_reference))
    read = jax.ShapeDtypeStruct((count, d), dtype)
    return Case(
        op="embedding",
        label=", ".join([f"{count} of {v} x {d} {dtype}", *words]),
        arguments=(table, ids, rows) if backward else (table, ids),
        run=_backward(run) if backward else run,
        plain=_backward(plain) if backward else plain,
        kind="memory",
        bytes=size_bytes(ids, rows, table if backward else read),
        keywords={"scale": scale},
        truth=functools.partial(_truth_backward if backward else _truth, scale, out or dtype),
        make=functools.partial(_make, table, ids, rows if backward else None),
        compile_only=compile_only,
    )


def _make(table, ids, rows, key):
    """Ids that are spread evenly; for the backward pass as in text, few of them often."""
    keys = jax.random.split(key, 3)
    numbers = jax.random.normal(keys[0], table.shape, table.dtype)
    if rows is None:
        return numbers, jax.random.randint(keys[1], ids.shape, 0, table.shape[0], ids.dtype)
    spread = jnp.exp(jax.random.uniform(keys[1], ids.shape) * jnp.log(float(table.shape[0])))
    few = jnp.minimum(spread.astype(ids.dtype), table.shape[0]) - 1
    return numbers, few, jax.random.normal(keys[2], rows.shape, rows.dtype)


def _backward(f):
    def pull(table, ids, d_rows):
        return jax.vjp(lambda table: f(table, ids), table)[1](d_rows)[0]

    return pull


def _scale(scale: float | None, dtype: str) -> float:
    return 1.0 if scale is None else float(np.asarray(scale, jnp.dtype(dtype)))


def _truth(scale: float | None, dtype: str, table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    rows = table[ids].astype(jnp.dtype(dtype)).astype(np.float64)
    return rows * _scale(scale, dtype)


def _truth_backward(
    scale: float | None, dtype: str, table: np.ndarray, ids: np.ndarray, d_rows: np.ndarray
) -> np.ndarray:
    import oracles  # type: ignore

    return oracles.rows_by_id(d_rows.astype(np.float64) * _scale(scale, dtype), ids, table.shape[0])
