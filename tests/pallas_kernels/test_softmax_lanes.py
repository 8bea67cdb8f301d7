"""Softmax of long rows told in PTX: the threads of a cluster by the machine of lanes, which rows
are taken, what it compiles to, and a GPU.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import H200
from kernels import interpreted
from lane_machine import Machine, stand_in
from numerics import assert_as_accurate

from jaxllm import aot
from pallas_kernels import lane_arithmetic, lane_code, softmax, softmax_kernel, softmax_lanes
from pallas_kernels.device import REGISTERS, THREADS
from pallas_kernels.softmax import Config, scale_softmax, scale_softmax_reference

pytestmark = pytest.mark.usefixtures("strict_jax")

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def rows(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.asarray(4 * np.random.default_rng(0).standard_normal(shape), dtype)


def by_lanes(monkeypatch, x: jax.Array, scale: float, cluster: int, warpgroups: int) -> jax.Array:
    """All rows, cluster by cluster."""
    held = {"x": np.asarray(x), "out": np.full(x.shape, np.nan, x.dtype)}
    [words] = softmax_lanes.board_shape(cluster, warpgroups)
    machine = Machine(held, {"board": 4 * words}, 128 * warpgroups)
    stand_in(monkeypatch, machine, (lane_code, lane_arithmetic, softmax_lanes))
    factor = softmax_kernel.left_to_exponent(scale)
    assert factor is not None

    def code(row, rank):
        how = x.dtype.name, factor, x.shape[1], cluster, 4 * warpgroups
        softmax_lanes.Block(machine.at, row, rank, *how).run()

    with np.errstate(all="ignore"):  # of what nothing was written to yet, and of infinities
        for row in range(x.shape[0]):
            machine.run_cluster(row, cluster, code)
    return jnp.asarray(machine.content("out", held["x"].dtype, x.shape))


def assert_right(found: Any, x: jax.Array, scale: float) -> None:
    assert found.dtype == x.dtype
    near = scale_softmax_reference(x, scale=scale)
    assert_as_accurate(found, near, oracles.scale_softmax(np.asarray(x), scale=scale))


@pytest.mark.parametrize(
    ("shape", "dtype", "scale", "cluster", "warpgroups"),
    [
        ((2, 8248), BF16, 1.0, 1, 1),  # the last access is fewer threads'
        ((1, 8248), F16, 0.3, 2, 1),  # of an odd number of accesses the last block has fewer
        ((1, 16384), BF16, 2.0, 8, 1),
        ((1, 8264), BF16, 1.0, 8, 4),  # and threads that have none
        ((1, 24576), F16, 1.0, 4, 2),
        ((1, 16640), BF16, 0.5, 1, 2),
        ((2, 8196), F32, 0.3, 2, 1),  # of an odd number of accesses, and the last is one thread's
        ((1, 16384), F32, 2.0, 8, 1),
        ((1, 8204), F32, 1.0, 8, 4),
        ((1, 16640), F32, 1.0, 1, 4),
    ],
)
def test_every_row(monkeypatch, shape, dtype, scale, cluster, warpgroups):
    x = rows(shape, dtype)
    found = by_lanes(monkeypatch, x, scale, cluster, warpgroups)
    assert_right(found, x, scale)
    for wrong in (jnp.roll(found, 1, axis=1), 1.1 * found):
        with pytest.raises(AssertionError):
            assert_right(wrong.astype(dtype), x, scale)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("cluster", [2, 4])
def test_rows_that_are_not_finite(monkeypatch, cluster, dtype):
    x = rows((5, 8248), dtype)
    x = x.at[0].set(-jnp.inf).at[1, 3:].set(-jnp.inf).at[2, 4200].set(jnp.nan)
    x = x.at[3, 8247].set(jnp.inf).at[4, :4100].set(-jnp.inf)
    found = by_lanes(monkeypatch, x, 1.0, cluster, 1)
    assert np.all(np.isnan(np.asarray(found)) == np.asarray([[0], [0], [1], [1], [0]], bool))
    finite = jnp.asarray([0, 1, 4])
    assert_right(found[finite], x[finite], 1.0)
    assert np.all(np.asarray(found)[0] == 0)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_scores_that_are_far_apart(monkeypatch, dtype):
    x = rows((1, 8248), dtype).at[0, :3].set(jnp.asarray([3e38, -3e38, 3e38], dtype))
    found = np.asarray(by_lanes(monkeypatch, x, 1e3, 2, 1), np.float32)
    np.testing.assert_array_equal(found, [[0.5, 0, 0.5] + [0] * 8245])


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_what_surrounds_a_block(monkeypatch, dtype):
    """In the interpreter, which has the reference for lanes: alone, under vmap, its gradient."""
    taken, ran = [], softmax_lanes.softmax_of_rows

    def seen(x, **keywords):
        taken.append(keywords["warpgroups"])
        return ran(x, **keywords)

    monkeypatch.setattr(softmax_lanes, "softmax_of_rows", seen)
    x = rows((6, 8248), dtype)
    f = partial(scale_softmax, scale=0.7, interpret=True)
    assert_right(interpreted(f, x), x, 0.7)
    many = interpreted(jax.vmap(f), x.reshape(2, 3, -1))
    assert_right(many.reshape(x.shape), x, 0.7)
    assert taken == [2, 2]
    d_y = rows(x.shape, dtype)[::-1]
    (d_x,) = interpreted(lambda x, d_y: jax.vjp(f, x)[1](d_y), x, d_y)
    how = {"scale": 0.7, "d_y": np.asarray(d_y)}
    plain, truth = (
        oracles.scale_softmax(np.asarray(x), **how, dtype=each)[0] for each in (dtype, np.float64)
    )
    assert_as_accurate(d_x, plain, truth)


def test_what_it_leaves_to_others(monkeypatch):
    """Calls for which the config says that lanes have the rows, and which they do not take."""
    monkeypatch.setattr(softmax_lanes, "softmax_of_rows", None)
    config = Config(stages=1, cluster=8, warpgroups=2)

    def shape(x, **keywords):
        f = partial(scale_softmax, config=config, interpret=True, **keywords)
        return jax.eval_shape(f, x).shape

    x = jnp.zeros((2, 8248), BF16)
    for keywords in ({"mask": x == 0}, {"causal": True}, {"scale": jnp.float32(1)}, {"scale": -1}):
        assert shape(x, **keywords) == x.shape
    assert shape(jnp.zeros((1, 131076), F32)) == (1, 131076)  # more than registers hold
    assert shape(x[:, :8192]) == (2, 8192)  # on chip as a whole
    with pytest.raises(TypeError, match="NoneType"):
        shape(x)


def test_which_rows_it_takes():
    taken = softmax_lanes.takes
    assert taken(131072, BF16, 8, 1)
    assert taken(151936, F16, 8, 2)
    assert not taken(151936, BF16, 8, 1)  # 149 numbers a thread
    assert taken(131072, F32, 8, 2)
    assert not taken(131076, F32, 8, 2)
    assert taken(131076, F32, 8, 4)
    assert not taken(131074, F32, 8, 4)  # no whole accesses
    assert not taken(131072, jnp.int32, 8, 2)
    assert not taken(131072, BF16, 8, 0)
    assert not taken(131072, BF16, 6, 2)

    def default(*shape, dtype="bfloat16", **keywords):
        x = jax.ShapeDtypeStruct(shape, dtype)
        found = softmax.default_config(x, **keywords, device=H200)
        candidates = softmax.candidates(x, **keywords, device=H200)
        assert found in candidates
        assert len(set(candidates)) == len(candidates)
        return found.cluster, found.warpgroups

    assert default(16, 128248) == (8, 2)
    assert default(64, 131072, dtype="float16") == (8, 2)
    assert default(64, 131072, dtype="float32") == (8, 2)
    assert default(64, 151936, dtype="float32") == (8, 4)
    assert default(64, 131072, causal=True) == (8, 0)
    assert default(64, 8192) == (1, 0)


@pytest.mark.aot
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("shape", [(1024, 131072), (16, 128248), (64, 151936), (1, 32064)])
def test_compiled(shape, dtype):
    """Wide accesses, nothing spilled, and registers for three blocks of two warpgroups, two of
    four.
    """
    x = jax.ShapeDtypeStruct(shape, dtype)
    kernel = aot.compile_for(scale_softmax, x).kernel("scale_softmax")
    assert kernel.spill_store_bytes == 0
    warpgroups = softmax.default_config(x, device=H200).warpgroups
    blocks = {2: 3, 4: 2}[warpgroups]
    assert blocks * warpgroups * THREADS * kernel.registers <= REGISTERS
    numbers = 16 // jnp.dtype(dtype).itemsize
    accesses = -(-shape[1] // (8 * numbers * 128 * warpgroups))
    assert kernel.count("LDG", "128") == accesses
    assert kernel.count("STG", "EF", "128") == accesses


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "dtype", "cluster", "warpgroups"),
    [
        (width, dtype, *how)
        for width in (8248, 32064, 128248, 131072, 151936)
        for dtype in (BF16, F16, F32)
        for how in ((8, 1), (8, 2), (8, 4), (4, 4), (2, 2))
        if softmax_lanes.takes(width, dtype, *how)
    ],
)
def test_on_the_gpu(width, dtype, cluster, warpgroups):
    """Alone, and under vmap, where a block is not its number in the grid."""
    x = rows((6, width), dtype)
    x = x.at[1].set(-jnp.inf).at[2, 3:].set(-jnp.inf).at[3, : width // 2].set(-jnp.inf)
    config = Config(stages=1, blocks_per_sm=1, cluster=cluster, warpgroups=warpgroups)
    f = partial(scale_softmax, scale=0.7, config=config)
    found = f(x)
    assert_right(found, x, 0.7)
    assert np.all(np.asarray(found)[1] == 0)
    np.testing.assert_array_equal(jax.vmap(f)(x.reshape(2, 3, width)).reshape(x.shape), found)
    broken = f(x.at[0, width - 1].set(jnp.nan).at[4, 0].set(jnp.inf))
    wanted = np.asarray([[1], [0], [0], [0], [1], [0]], bool)
    assert np.all(np.isnan(np.asarray(broken)) == wanted)


@pytest.mark.gpu
def test_every_message_comes():
    """Many clusters beside each other, again and again: no row lacks a warp's sum."""
    x = rows((256, 131072), BF16)
    lanes = softmax.default_config(x, device=H200)
    run = jax.jit(partial(scale_softmax, config=lanes))
    first = run(x)
    others = scale_softmax(x, config=dataclasses.replace(lanes, warpgroups=0)).astype(F32)
    apart = jnp.abs(first.astype(F32) - others) / jnp.maximum(others, 1e-20)
    assert float(jnp.max(apart)) < 0.01  # a unit in the last place of bfloat16
    for _ in range(24):
        assert bool(jnp.array_equal(run(x), first))
