"""RoPE told in PTX: the threads of a block by the machine of lanes, which heads are taken, what it
compiles to. test_rope.py has what else there is of `rope`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from kernels import interpreted
from lane_machine import Machine, stand_in
from numerics import assert_as_accurate

from jaxllm import aot
from pallas_kernels import lane_arithmetic, lane_code, rope_lanes
from pallas_kernels.rope import Config, rope, rope_reference
from pallas_kernels.rope_lanes import Heads

pytestmark = pytest.mark.usefixtures("strict_jax")

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def case(tokens: int, heads: Heads, dtype: Any, of_angles: Any = F32) -> tuple[jax.Array, ...]:
    """q, k, cos and sin, of one sequence."""
    rng = np.random.default_rng(0)
    shapes = [(1, tokens, n, heads.width) for n in (heads.q, heads.k)]
    q, k = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    angles = rng.uniform(-4, 4, (1, tokens, heads.half))
    return q, k, *(jnp.asarray(f(angles), of_angles) for f in (np.cos, np.sin))


def assert_turned(found: Any, arrays: tuple[jax.Array, ...], back: bool = False) -> None:
    q, k, *tables = arrays
    tables = [t.astype(q.dtype) for t in tables]
    cos, sin = (np.asarray(t, np.float64) for t in tables)
    plain = rope_reference(q, k, tables[0], -tables[1] if back else tables[1])
    for x, mine, near in zip((q, k), found, plain, strict=True):
        truth = oracles.turn(np.asarray(x, np.float64), cos, -sin if back else sin)
        assert mine.dtype == x.dtype
        assert_as_accurate(mine, near, truth)
        rest = 2 * cos.shape[-1]
        np.testing.assert_array_equal(mine[..., rest:], x[..., rest:])


def by_machine(monkeypatch, arrays: Any, tokens: int, lanes: int, back: bool) -> list[jax.Array]:
    """q and k, block by block."""
    held = {
        name: np.asarray(x[0]) for name, x in zip(("q", "k", "cos", "sin"), arrays, strict=True)
    }
    for name in ("q", "k"):
        held[f"{name}_out"] = np.full(held[name].shape, np.nan, held[name].dtype)
    machine = Machine(held, {}, tokens * lanes)
    stand_in(monkeypatch, machine, (lane_code, lane_arithmetic, rope_lanes))
    (count, q_heads, width), (_, k_heads, _) = held["q"].shape, held["k"].shape
    heads = Heads(q_heads, k_heads, width, held["cos"].shape[1])
    dtypes = {name: held[name].dtype.name for name in ("q", "cos", "sin")}

    def code(block):
        rope_lanes.Block(machine.at, block, dtypes, heads, count, tokens, lanes, back).run()

    for block in range(-(-count // tokens)):
        machine.run(block, code)
    shapes = {name: held[name] for name in ("q", "k")}
    return [
        jnp.asarray(machine.content(f"{name}_out", x.dtype, x.shape))[None]
        for name, x in shapes.items()
    ]


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "dtype", "of_angles", "config"),
    [
        (2, Heads(32, 8, 128, 64), BF16, F32, (2, 64)),
        (3, Heads(32, 8, 128, 64), BF16, BF16, (1, 128)),  # the last heads: half of the threads
        (5, Heads(32, 32, 96, 48), F16, F32, (4, 96)),  # the last block: one token of four
        (1, Heads(32, 32, 96, 48), BF16, F16, (1, 384)),  # heads of q and k side by side
        (8, Heads(14, 2, 64, 32), BF16, F32, (8, 16)),
        (7, Heads(14, 2, 64, 32), F16, F16, (4, 32)),  # of q and of k in one access of a warp
        (3, Heads(32, 8, 128, 32), BF16, F32, (2, 64)),  # a part passes through
        (8, Heads(6, 3, 128, 48), F16, F32, (8, 48)),
        (2, Heads(5, 3, 80, 8), BF16, F32, (8, 16)),  # more threads than heads
        (17, Heads(2, 1, 80, 40), BF16, BF16, (64, 10)),
    ],
)
def test_every_token(monkeypatch, tokens, heads, dtype, of_angles, config, back):
    arrays = case(tokens, heads, dtype, of_angles)
    of_block, lanes = config
    assert rope_lanes.problem(of_block, lanes, heads, dtype) is None
    found = by_machine(monkeypatch, arrays, of_block, lanes, back)
    assert_turned(found, arrays, back)
    for wrong in ([found[0], 1.1 * found[1]], [jnp.roll(found[0], 1, 3), found[1]]):
        with pytest.raises(AssertionError):
            assert_turned([x.astype(dtype) for x in wrong], arrays, back)


CONFIG, HEADS = Config(tokens=4, lanes=96), Heads(5, 3, 96, 24)


def test_what_surrounds_a_block():
    """In the interpreter, which has JAX for lanes; forward, backward and under vmap."""
    arrays = case(6, HEADS, BF16)
    run = partial(rope, config=CONFIG, interpret=True)
    assert_turned(interpreted(run, *arrays), arrays)
    back = interpreted(lambda *a: jax.vjp(run, *a)[1](a[:2])[:2], *arrays)
    assert_turned(back, arrays, back=True)
    several = [x.reshape(2, 1, 3, *x.shape[2:]) for x in arrays]
    many = interpreted(jax.vmap(run), *several)
    assert_turned([x.reshape(1, 6, *x.shape[3:]) for x in many], arrays)


@pytest.mark.parametrize(
    ("tokens", "lanes", "heads", "dtype", "phrase"),
    [
        (4, 96, Heads(32, 32, 96, 48), F32, "lanes turn numbers of 16 bits, not float32"),
        (8, 120, Heads(8, 4, 120, 60), BF16, "halves of 60 of 120 numbers are no multiple of 8"),
        (2, 64, Heads(32, 32, 96, 48), BF16, "64 threads for 2 tokens are no multiple of 6 for"),
        (0, 64, Heads(32, 8, 128, 64), BF16, "tokens and lanes are 0 and 64; both must"),
        (16, 0, Heads(32, 8, 128, 64), BF16, "tokens and lanes are 16 and 0; both must"),
        (8, 40, Heads(32, 8, 128, 64), BF16, "320 threads a block are no multiple of 128 up to"),
        (32, 64, Heads(32, 8, 128, 64), BF16, "2048 threads a block are no multiple of 128 up to"),
        (16, 8, Heads(32, 8, 128, 64), BF16, "320 words of heads do not lie in the registers of"),
        (16, 64, Heads(32, 8, 128, 64), BF16, "40 words of heads do not lie in the registers of"),
    ],
)
def test_which_heads_it_takes(tokens, lanes, heads, dtype, phrase):
    assert phrase in (rope_lanes.problem(tokens, lanes, heads, dtype) or "")


def test_defaults():
    def default(*heads):
        return rope_lanes.default(Heads(*heads), BF16)

    assert default(32, 32, 96, 48) == (1, 384)
    assert default(32, 8, 128, 64) == default(32, 8, 128, 32) == (1, 128)
    assert default(14, 2, 64, 32) == (2, 64)  # one token has too little for 128 threads
    assert default(32, 8, 80, 40) == (4, 160)
    assert default(8, 4, 120, 60) is None


@pytest.mark.aot
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    ("heads", "config", "most"),
    [
        (Heads(32, 32, 96, 48), (1, 384), 40),
        (Heads(32, 32, 96, 48), (2, 192), 64),
        (Heads(32, 32, 96, 48), (4, 96), 80),
        (Heads(32, 8, 128, 64), (2, 64), 96),
        (Heads(32, 8, 128, 32), (2, 64), 104),
        (Heads(32, 8, 128, 64), (1, 128), 80),
        (Heads(32, 8, 128, 32), (1, 128), 80),
        (Heads(14, 2, 64, 32), (2, 64), 48),
        (Heads(24, 8, 128, 48), (2, 192), 64),
        (Heads(8, 4, 112, 56), (8, 112), 72),
    ],
)
def test_compiled(heads, config, most, dtype, back):
    """Wide accesses, nothing spilled."""
    shape = (1, 8192, heads.q, heads.width)
    q, k = (jax.ShapeDtypeStruct((*shape[:2], n, heads.width), dtype) for n in (heads.q, heads.k))
    angles = jax.ShapeDtypeStruct((1, 8192, heads.half), F32)
    run = partial(rope, config=Config(tokens=config[0], lanes=config[1]))
    if back:
        f = lambda q, k, cos, sin: jax.vjp(lambda q, k: run(q, k, cos, sin), q, k)[1]((q, k))  # noqa: E731
    else:
        f = run
    kernel = aot.compile_for(f, q, k, angles, angles).kernel("rope_backward" if back else "rope")
    words = heads.words(config[1])
    assert kernel.spill_store_bytes == kernel.spill_load_bytes == 0
    assert kernel.registers <= most
    assert kernel.count("LDG", "128") == words // 4 + 4 == kernel.count("LDG")
    assert kernel.count("STG", "EF", "128") == words // 4 == kernel.count("STG")


@pytest.mark.aot
def test_compiled_under_vmap():
    arrays = [jax.ShapeDtypeStruct((7, 1, 99, n, 96), BF16) for n in (32, 32)]
    angles = jax.ShapeDtypeStruct((7, 1, 99, 48), BF16)
    run = jax.vmap(partial(rope, config=Config(tokens=4, lanes=96)))
    kernel = aot.compile_for(run, *arrays, angles, angles).kernel("rope")
    assert kernel.spill_store_bytes == 0
    assert kernel.count("LDG", "128") == 8 + 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("of_angles", [F32, BF16])
@pytest.mark.parametrize(
    ("heads", "config"),
    [
        (Heads(32, 32, 96, 48), (4, 96)),
        (Heads(32, 32, 96, 48), (1, 384)),
        (Heads(32, 8, 128, 64), (2, 64)),
        (Heads(32, 8, 128, 32), (2, 64)),
        (Heads(32, 8, 128, 64), (1, 128)),
        (Heads(14, 2, 64, 32), (2, 64)),
        (Heads(24, 8, 128, 48), (8, 48)),
    ],
)
def test_on_the_gpu(heads, config, of_angles, dtype):
    """Forward, backward, and under vmap, where a block is not its number in the grid."""
    arrays = case(693, heads, dtype, of_angles)
    run = partial(rope, config=Config(tokens=config[0], lanes=config[1]))
    found = jax.jit(run)(*arrays)
    assert_turned(found, arrays)
    back = jax.jit(lambda *a: jax.vjp(lambda q, k: run(q, k, *a[2:]), *a[:2])[1](a[:2]))(*arrays)
    assert_turned(back, arrays, back=True)
    many = jax.jit(jax.vmap(run))(*(x.reshape(7, 1, 99, *x.shape[2:]) for x in arrays))
    for x, y in zip(many, found, strict=True):
        np.testing.assert_array_equal(x.reshape(y.shape), y)
