"""Rows by id told in PTX: the threads of a block by the machine of lanes, what it compiles to.

test_embedding.py has what else there is of `embedding`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lane_machine import Machine, stand_in

from jaxllm import aot
from pallas_kernels import embedding_lanes, lane_arithmetic, lane_code
from pallas_kernels.device import REGISTERS, THREADS
from pallas_kernels.embedding import Config, embedding, embedding_reference

pytestmark = pytest.mark.usefixtures("strict_jax")

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
CASES = [
    # v, d, ids, table, result, scale, pieces
    (7, 8, 1, BF16, BF16, None, 1),
    (9, 1000, 5, F16, F16, 2.5, 2),
    (101, 40, 51, F16, F32, 0.3, 16),
    (101, 48, 7, F32, BF16, 1.5, 3),
    (9, 24, 65, BF16, F16, None, 2),
    (5, 4, 300, F32, F32, 0.7, 2),
    (4, 128, 32, BF16, BF16, None, 2),  # nothing is left over
    (3, 24, 77, F32, F16, 1e-4, 1),
]


def case(v: int, d: int, count: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """A table, and ids of which some lie outside."""
    rng = np.random.default_rng(0)
    ids = rng.integers(-3, v + 3, count).astype(np.int32)
    ids[: min(2, count - 1)] = [2**31 - 1, -(2**31)][: min(2, count - 1)]
    return np.asarray(jnp.asarray(rng.standard_normal((v, d)), dtype)), ids


def by_machine(monkeypatch, table, ids, dtype: Any, scale: Any, pieces: int) -> np.ndarray:
    """The rows, block by block."""
    out = np.full((len(ids), table.shape[1]), np.nan, jnp.dtype(dtype))
    machine = Machine({"table": table, "out": out, "ids": ids}, {}, THREADS)
    stand_in(monkeypatch, machine, (lane_code, lane_arithmetic, embedding_lanes))
    dtypes = table.dtype.name, out.dtype.name
    factor = None if scale is None else float(out.dtype.type(scale))

    def code(block):
        embedding_lanes.Block(
            machine.at, block, dtypes, table.shape, len(ids), factor, pieces
        ).run()

    each = embedding_lanes.numbers_of_piece(*dtypes)
    for block in range(-(-out.size // each // (pieces * THREADS))):
        machine.run(block, code)
    return machine.content("out", out.dtype, out.shape)


@pytest.mark.parametrize(("v", "d", "count", "dtype", "out", "scale", "pieces"), CASES)
def test_threads_bring_rows(monkeypatch, v, d, count, dtype, out, scale, pieces):
    """Rounded as XLA rounds them: the same to the bit."""
    table, ids = case(v, d, count, dtype)
    found = by_machine(monkeypatch, table, ids, out, scale, pieces)
    monkeypatch.undo()
    inside = jnp.clip(ids, 0, v - 1)
    plain = embedding_reference(jnp.asarray(table), inside, scale=scale, dtype=out)
    np.testing.assert_array_equal(found, np.asarray(plain))


@pytest.mark.aot
@pytest.mark.parametrize("pieces", [1, 2, 16])
@pytest.mark.parametrize(("dtype", "out"), [(BF16, BF16), (F32, BF16), (F16, F32)])
def test_as_compiled(dtype, out, pieces):
    """Pieces are asked for before the first is stored, and lie in registers: of three blocks."""
    table = jax.ShapeDtypeStruct((1009, 1000), dtype)
    ids = jax.ShapeDtypeStruct((333,), jnp.int32)
    run = lambda t, i: embedding(t, i, scale=2.5, dtype=out, config=Config(pieces))  # noqa: E731
    kernel = aot.compile_for(run, table, ids).kernel("embedding")
    assert kernel.spill_store_bytes == 0
    assert 3 * THREADS * kernel.registers <= REGISTERS
    wide = pieces * jnp.dtype(dtype).itemsize // min(jnp.dtype(x).itemsize for x in (dtype, out))
    assert sum(n for name, n in kernel.instructions.items() if name.startswith("LDG.E.128")) == wide
