"""Sums of rows by id told in PTX: the threads of its kernels by the machine of lanes; as compiled.

test_embedding.py has what else there is of `embedding` and its gradient.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from lane_machine import Machine, stand_in

from jaxllm import aot
from pallas_kernels import (
    embedding_backward,
    embedding_lanes,
    embedding_sums_lanes,
    embedding_zeros_lanes,
    lane_arithmetic,
    lane_code,
)
from pallas_kernels.device import REGISTERS, THREADS
from pallas_kernels.embedding import embedding
from pallas_kernels.embedding_sums_lanes import MORE, RUN, Order, Sums
from pallas_kernels.embedding_zeros_lanes import Keys, Zeros, shared_bytes

pytestmark = pytest.mark.usefixtures("strict_jax")

MODULES = (lane_code, lane_arithmetic, embedding_lanes, embedding_sums_lanes, embedding_zeros_lanes)
BF16, F16, F32 = "bfloat16", "float16", "float32"


def machine_of(monkeypatch, arrays: Any, shared: Any) -> Machine:
    machine = Machine(arrays, shared, THREADS)
    stand_in(monkeypatch, machine, MODULES)
    return machine


def zeros_of(v: int, d: int, dtype: str, ids: np.ndarray, blocks: int) -> Zeros:
    sums = Sums(len(ids), d, v, dtype, dtype, None, True)
    return Zeros(sums, Keys(v, (len(ids) - 1).bit_length()), blocks, True)


def by_machine(monkeypatch, zeros: Zeros, ids: np.ndarray) -> tuple[np.ndarray, Order]:
    """Of memory that was full of ones: the array, and the order."""
    sums = zeros.sums
    given = np.pad(ids, (0, -len(ids) % embedding_zeros_lanes.WORDS))
    arrays = {"given": given, "out": np.ones((sums.count, sums.width), jnp.dtype(sums.out))}
    shapes = sums.order_shapes._asdict()
    arrays |= {name: np.full(shape, -1, np.int32) for name, shape in shapes.items()}
    machine = machine_of(monkeypatch, arrays, shared_bytes(zeros))

    def code(block):
        embedding_zeros_lanes.Block(zeros, machine.at, block).run()

    for block in range(zeros.blocks):
        machine.run(block, code)
    found = {name: machine.content(name, x.dtype, x.shape) for name, x in arrays.items()}
    return found["out"], Order(*(found[name] for name in Order._fields))


def order_of(ids: np.ndarray, sums: Sums) -> Order:
    """By NumPy."""
    places = np.argsort(ids, kind="stable").astype(np.int32)
    in_order, shapes = ids[places], sums.order_shapes
    more = (0, shapes.ids[0] - len(ids))
    lasts = in_order[np.minimum(np.arange(sums.runs) * RUN + RUN - 1, len(ids) - 1)]
    return Order(
        np.pad(in_order, more, constant_values=sums.count),
        np.pad(places, more),
        np.searchsorted(in_order, in_order[::RUN]).astype(np.int32),
        np.searchsorted(in_order, lasts, "right").astype(np.int32),
        np.zeros(shapes.arrivals, np.int32),
    )


def ids_like(kind: str, v: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(count)
    if kind == "one":
        return np.full(count, v - 1, np.int32)
    if kind == "outside":
        return rng.integers(-v, 2 * v, count).astype(np.int32)
    if kind == "words":
        return np.minimum(rng.zipf(1.3, count) - 1, v - 1).astype(np.int32)
    if kind == "few of each":
        return rng.integers(0, v, count).astype(np.int32)
    return rng.permutation(v)[:count].astype(np.int32)


@pytest.mark.parametrize(
    ("kind", "v", "d", "count", "dtype", "blocks"),
    [
        ("words", 37, 1000, 77, BF16, 3),
        ("outside", 70, 64, 50, F32, 7),
        ("one", 5, 4864, 64, F16, 2),
        ("all different", 401, 24, 300, BF16, 2),
        ("words", 3, 16384, 9, F32, 5),  # rows longer than a tile; blocks without
        ("words", 1, 8, 1, BF16, 1),
        ("words", 300, 8, 129, BF16, 1),
    ],
)
def test_zeros_and_order(monkeypatch, kind, v, d, count, dtype, blocks):
    """Zeros where no id is, and most other rows left alone; the order, and where ids begin and end;
    what is counted begins at zero.
    """
    monkeypatch.setattr(embedding_zeros_lanes, "TILE_BYTES", 4096)
    ids = ids_like(kind, v, count)
    zeros = zeros_of(v, d, dtype, ids, blocks)
    out, order = by_machine(monkeypatch, zeros, ids)
    inside = np.clip(ids, 0, v - 1)
    untouched = np.setdiff1d(np.arange(v), inside)
    assert not out[untouched].any()
    of_first_tile = np.arange(v) % zeros.share < zeros.tile
    assert out[inside[~of_first_tile[inside]]].all()
    truth, runs = order_of(inside, zeros.sums), zeros.sums.runs
    for name in ("ids", "places", "begins", "ends"):
        np.testing.assert_array_equal(getattr(order, name), getattr(truth, name), err_msg=name)
    goes_on = order.ends > np.minimum(np.arange(1, runs + 1) * RUN, count)
    assert not order.arrivals[goes_on].any()


def test_zeros_everywhere(monkeypatch):
    """Where ids are sorted elsewhere, and where a block has more rows than it can note."""
    ids = ids_like("words", 200, 20)
    zeros = zeros_of(200, 64, BF16, ids, 2)._replace(counted=False)
    out, order = by_machine(monkeypatch, zeros, ids)
    assert not out.any()
    assert not order.arrivals.any()
    monkeypatch.setattr(embedding_zeros_lanes, "MOST_NOTED", 99)
    zeros = zeros._replace(counted=True)
    assert not zeros.noted
    assert not by_machine(monkeypatch, zeros, ids)[0].any()


def sums_by_machine(
    monkeypatch, sums: Sums, dy: np.ndarray, order: Order, turns: Any
) -> np.ndarray:
    """Of zeros, but for NaN in rows of ids; turns: the blocks in the order in which they run."""
    rows = sums.count if sums.by_id else sums.rows
    out = np.zeros((rows, sums.width), jnp.dtype(sums.out))
    out[order.ids[: sums.rows] if sums.by_id else slice(None)] = np.nan
    arrays = {"dy": dy, "out": out, **order._asdict()}
    arrays["parts"] = np.full((sums.runs, 2, sums.width), np.nan, np.float32)
    machine = machine_of(monkeypatch, arrays, {})

    def code(block):
        embedding_sums_lanes.Block(sums, machine.at, block).run()

    for block in turns(range(-(-sums.runs * sums.across // THREADS))):
        machine.run(block, code)
    assert not machine.content("arrivals", np.int32, order.arrivals.shape).any()
    return machine.content("out", jnp.dtype(sums.out), (rows, sums.width))


@pytest.mark.parametrize("turns", [list, lambda blocks: list(reversed(blocks))], ids=["", "back"])
@pytest.mark.parametrize(
    ("kind", "v", "d", "count", "dy", "out", "scale", "by_id"),
    [
        ("words", 37, 1000, 77, BF16, BF16, None, True),
        ("words", 11, 24, 300, F16, F32, 0.5, True),
        ("one", 2, 8, 800, BF16, BF16, None, True),  # many groups of runs
        ("words", 5, 16, 611, F16, F16, None, False),
        ("one", 5, 896, 64, BF16, BF16, None, True),
        ("one", 5, 8, 61, F32, BF16, 2.0, False),
        ("all different", 401, 24, 300, BF16, F16, None, True),
        ("words", 37, 40, 85, F32, F32, None, False),
        ("few of each", 90, 8, 400, BF16, BF16, None, True),
        ("few of each", 60, 8, 400, BF16, BF16, None, False),
        ("words", 1, 8, 1, BF16, BF16, None, True),
        ("words", 3, 136, 9, F16, F16, None, False),
    ],
)
def test_threads_add_up(monkeypatch, kind, v, d, count, dy, out, scale, by_id, turns):
    """Whole numbers, exactly, whichever block is the last."""
    rng, ids = np.random.default_rng(1), ids_like(kind, v, count)
    rows = rng.integers(-3, 4, (count, d)).astype(jnp.dtype(dy))
    sums = Sums(count, d, v, dy, out, scale, by_id)
    order = order_of(ids, sums)
    found = sums_by_machine(monkeypatch, sums, rows, order, turns)
    truth = oracles.rows_by_id(np.asarray(rows, np.float64) * (scale or 1), ids, v)
    if by_id:
        np.testing.assert_array_equal(np.asarray(found, np.float64), truth)
        return
    last = order.ids[:count] != order.ids[1 : count + 1]
    np.testing.assert_array_equal(
        np.asarray(found, np.float64)[last], truth[order.ids[:count][last]]
    )


@pytest.mark.parametrize("most", [embedding_zeros_lanes.NO_KEY, 1])
@pytest.mark.parametrize(
    ("kind", "v", "count"), [("words", 37, 77), ("one", 5, 64), ("few of each", 60, 401)]
)
def test_the_order_by_xla(monkeypatch, most, kind, v, count):
    """With keys of 32 bits, and where an id and a place need more."""
    monkeypatch.setattr(embedding_zeros_lanes, "NO_KEY", most)
    ids, arrivals = ids_like(kind, v, count), object()
    sums = Sums(count, 8, v, BF16, BF16, None, True)
    keys = Keys(v, (count - 1).bit_length())
    assert keys.fit == (most > 1)
    found = embedding_backward.sorted_order(sums, keys, jnp.asarray(ids), arrivals)
    assert found.arrivals is arrivals
    truth = order_of(ids, sums)
    for name in ("ids", "places", "begins", "ends"):
        np.testing.assert_array_equal(getattr(found, name), getattr(truth, name), err_msg=name)


def test_each_of_a_batch_counts_for_itself():
    """Under vmap a kernel writes into its part of an array: what it counts in must have one."""
    sums = functools.partial(
        embedding_backward.sum_by_id,
        count=50,
        dtype=BF16,
        scale=None,
        num_sms=132,
        interpret=False,
    )
    for m in (64, embedding_zeros_lanes.MOST_COUNTED + 1):
        dy, ids = jax.ShapeDtypeStruct((3, m, 8), BF16), jax.ShapeDtypeStruct((3, m), jnp.int32)
        traced = jax.make_jaxpr(jax.vmap(sums))(dy, ids)
        shape = (3, *Sums(m, 8, 50, BF16, BF16, None, True).order_shapes.arrivals)
        assert f"i32[{','.join(map(str, shape))}]" in str(traced)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("v", "d", "count", "dtype", "out"),
    [
        (1009, 896, 8192, BF16, BF16),
        (1009, 896, embedding_zeros_lanes.MOST_COUNTED, BF16, BF16),
        (109, 3072, 333, F32, BF16),
        (109, 1000, 333, BF16, F32),
    ],
)
def test_as_compiled(v, d, count, dtype, out):
    """All rows of a thread are asked for before the first is added, and lie in registers: of four
    blocks a multiprocessor; of what counts, in those of as many as there are.
    """
    ids = jax.ShapeDtypeStruct((count,), jnp.int32)
    table, d_out = jax.ShapeDtypeStruct((v, d), dtype), jax.ShapeDtypeStruct((count, d), out)
    pull = lambda t, i, g: jax.vjp(lambda t: embedding(t, i, dtype=out), t)[1](g)[0]  # noqa: E731
    program = aot.compile_for(pull, table, ids, d_out)
    zeros, sums = (program.kernel(f"embedding_backward_{name}") for name in ("zeros", "sums"))
    assert not zeros.spill_store_bytes + sums.spill_store_bytes
    assert embedding_zeros_lanes.BLOCKS * THREADS * zeros.registers <= REGISTERS
    assert 4 * THREADS * sums.registers <= REGISTERS
    wide = jnp.dtype(out).itemsize // min(jnp.dtype(x).itemsize for x in (dtype, out))
    asked = sum(n for name, n in sums.instructions.items() if name == "LDG.E.128.CONSTANT")
    assert asked == (RUN + MORE) * wide + (2 * RUN + MORE) // 4  # and ids and places
