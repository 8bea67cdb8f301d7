"""Rotary frequencies by the book, angles exact at any position, rotation as complex numbers."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import absent
from kernels import interpreted
from numerics import assert_as_accurate

from jaxllm import ops
from jaxllm.config import MAX_POSITIONS, Rope
from jaxllm.ops.rope import cos_sin, frequencies, rope, turns

pytestmark = pytest.mark.usefixtures("strict_jax")

ROPES = {
    "default": Rope(1e4),
    "large theta": Rope(1e6),
    "linear": Rope(1e4, "linear", factor=8.0),
    "llama3": Rope(
        5e5, "llama3", factor=8.0, low_freq_factor=1.0, original_max_position_embeddings=8192
    ),
    "llama3, other bounds": Rope(
        1e4,
        "llama3",
        factor=3.0,
        low_freq_factor=2.0,
        high_freq_factor=7.0,
        original_max_position_embeddings=500,
    ),
    "yarn": Rope(1e6, "yarn", factor=4.0, original_max_position_embeddings=32_768),
    "yarn, a ramp past the last pair": Rope(
        100.0, "yarn", factor=4.0, beta_fast=1e5, original_max_position_embeddings=10**6
    ),
    "yarn, not truncated": Rope(
        1e4, "yarn", factor=4.0, truncate=False, original_max_position_embeddings=2048
    ),
    "yarn, other betas": Rope(
        1e4,
        "yarn",
        factor=16.0,
        beta_fast=20.0,
        beta_slow=3.0,
        original_max_position_embeddings=4096,
    ),
    "yarn, one pair wide": Rope(  # both bounds of the ramp at one pair
        1e4,
        "yarn",
        factor=2.0,
        beta_fast=1.0,
        beta_slow=1.0,
        truncate=True,
        original_max_position_embeddings=6,
    ),
    "longrope": Rope(
        1e4,
        "longrope",
        original_max_position_embeddings=100,
        short_factor=tuple(1 + i / 32 for i in range(32)),
        long_factor=tuple(1.5 + i for i in range(32)),
    ),
}


def ours(dim: int, kind: Rope, *, long: bool = False) -> np.ndarray:
    arguments = dataclasses.asdict(kind)
    for name in ("partial_rotary_factor", "attention_factor"):
        del arguments[name]
    lists = [arguments.pop(name) for name in ("short_factor", "long_factor")]
    return frequencies(dim, **arguments, divisors=lists[long])


@pytest.mark.parametrize("dim", [64, 6])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies(name, dim):
    kind = ROPES[name]
    if kind.rope_type == "longrope" and dim == 6:
        kind = dataclasses.replace(kind, short_factor=(1.0, 1.2, 2.0), long_factor=(3.0, 4.0, 5.0))
    for long in (False, True):
        length = 101 if long else 100
        expected = oracles.frequencies(dim, dataclasses.asdict(kind), length)
        np.testing.assert_allclose(ours(dim, kind, long=long), expected, rtol=1e-13)


def test_frequencies_of_the_llama3_release():
    """Golden numbers of specs 7.4."""
    by_hand = {
        (64, 32.0): {
            0: 1.0,
            8: 3.76060309e-2,
            16: 4.29556797e-4,
            20: 8.57025549e-6,
            24: 1.66196747e-6,
            31: 9.41830673e-8,
        },
        (128, 8.0): {
            0: 1.0,
            16: 3.76060309e-2,
            32: 5.24846161e-4,
            40: 3.42810220e-5,
            48: 6.64786987e-6,
            63: 3.06892599e-7,
        },
    }
    for (dim, factor), expected in by_hand.items():
        f = ours(dim, dataclasses.replace(ROPES["llama3"], factor=factor))
        for i, value in expected.items():
            assert f[i] == pytest.approx(value, rel=1e-7), (dim, i)


@pytest.mark.parametrize(
    ("dim", "kind", "sentence"),
    [
        (8, {"rope_type": "ntk"}, "rope_type 'ntk' is not supported"),
        (7, {}, "numbers turn in pairs, but 7 are to be turned"),
        (8, {"rope_type": "longrope"}, "longrope needs 4 divisors, one a pair, got None"),
        (8, {"rope_type": "longrope", "divisors": (1.0, 2.0, 3.0)}, "4 divisors, .*, got 3"),
        (8, {"rope_type": "llama3"}, "llama3 needs original_max_position_embeddings"),
        (8, {"rope_type": "yarn"}, "yarn needs original_max_position_embeddings"),
    ],
)
def test_what_has_no_frequencies(dim, kind, sentence):
    with pytest.raises(ValueError, match=f"^rope: .*{sentence}"):
        frequencies(dim, rope_theta=1e4, **kind)


# Where float32 angles go wrong: far out. 1e-6 is three roundings to float32 of an angle up to pi.
POSITIONS = np.array(
    [0, 1, 2, 4095, 65_537, 99_999, 100_000, 524_287, MAX_POSITIONS - 1, *range(7, 10**6, 9973)]
)
EXACT = 1e-6


def angle_errors(cos, sin, f: np.ndarray, scale: float = 1.0, positions=POSITIONS) -> float:
    angles = positions[:, None] * f
    return max(
        float(np.max(np.abs(np.asarray(table, np.float64)[0] - scale * function(angles))))
        for table, function in ((cos, np.cos), (sin, np.sin))
    )


@pytest.mark.parametrize("name", ROPES)
def test_angles_are_exact_at_any_position(name):
    f = ours(64, ROPES[name])
    parts = (part[None, None] for part in turns(f))
    cos, sin = cos_sin(jnp.asarray(POSITIONS, jnp.int32)[None], *parts)
    assert cos.dtype == sin.dtype == jnp.float32
    assert angle_errors(cos, sin, f) < EXACT


def test_negative_positions_turn_the_other_way():
    f = ours(64, ROPES["default"])
    parts = (part[None, None] for part in turns(f))
    cos, sin = cos_sin(jnp.asarray(-POSITIONS, jnp.int32)[None], *parts)
    assert angle_errors(cos, sin, f, positions=-POSITIONS) < EXACT


def test_angles_in_float32_would_not_be():
    """The twin: more than the 1e-4 that is asked for."""
    f = ours(64, ROPES["default"])
    angles = jnp.asarray(POSITIONS, jnp.float32)[:, None] * jnp.asarray(f, jnp.float32)[None]
    assert angle_errors(jnp.cos(angles)[None], jnp.sin(angles)[None], f) > 1e-3


def test_a_frequency_above_one_radian():
    f = np.array([7.5, math.pi, 1.0])
    cos, sin = cos_sin(
        jnp.asarray(POSITIONS, jnp.int32)[None], *(part[None, None] for part in turns(f))
    )
    assert angle_errors(cos, sin, f) < EXACT


def test_the_attention_factor_scales_both():
    f = ours(64, ROPES["default"])
    cos, sin = cos_sin(
        jnp.asarray(POSITIONS, jnp.int32)[None],
        *(part[None, None] for part in turns(f)),
        scale=1.25,
    )
    assert angle_errors(cos, sin, f, 1.25) < 1.25 * EXACT


def test_frequencies_may_differ_from_token_to_token():
    one, two = ours(8, Rope(1e4)), ours(8, Rope(100.0))
    positions = jnp.asarray([[3, 3, 5]], jnp.int32)
    each = [jnp.stack([a, b, a])[None] for a, b in zip(turns(one), turns(two), strict=True)]
    cos, _ = cos_sin(positions, *each)
    expected = np.cos(np.stack([3 * one, 3 * two, 5 * one]))
    np.testing.assert_allclose(cos[0], expected, atol=EXACT)


# -------------------------------------------------------------------------------------- rotation


def rotated(dtype, *, turning: int = 8, H: int = 8):
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((2, 3, n, H)), dtype) for n in (4, 2))
    angles = rng.uniform(-4, 4, (2, 3, turning // 2))
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    result = jax.jit(rope)(q, k, cos, sin)
    return result, [
        [oracles.rotate(np.asarray(x), angles, dtype=d) for x in (q, k)]
        for d in (jnp.dtype(dtype), np.float64)
    ]


@pytest.mark.parametrize(
    ("dtype", "turning"),
    [(jnp.float32, 8), (jnp.float32, 6), (jnp.bfloat16, 6), (jnp.float16, 2)],
)
def test_rotation(dtype, turning):
    result, (plain, truth) = rotated(dtype, turning=turning)
    for x, near, exact in zip(result, plain, truth, strict=True):
        assert x.dtype == dtype
        assert_as_accurate(x, near, exact)


def test_the_check_can_fail():
    (q, k), (plain, truth) = rotated(jnp.float32)
    adjacent = np.asarray(k).reshape(*k.shape[:-1], 2, 4).swapaxes(-1, -2).reshape(k.shape)
    for wrong, i in ((q.at[0, 0, 0, 0].multiply(1.05), 0), (adjacent, 1), (-q, 0)):
        with pytest.raises(AssertionError, match="error is"):
            assert_as_accurate(wrong, plain[i], truth[i])


def test_tables_are_rounded_to_the_dtype_first():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((1, 9, 2, 8)), jnp.bfloat16)
    tables = [jnp.asarray(rng.standard_normal((1, 9, 4)), jnp.float32) for _ in range(2)]
    rounded = [table.astype(jnp.bfloat16).astype(jnp.float32) for table in tables]
    np.testing.assert_array_equal(rope(x, x, *tables)[0], rope(x, x, *rounded)[0])


def test_numbers_that_are_not_turned_stay_as_they_are():
    q = jnp.arange(2 * 8, dtype=jnp.float32).reshape(1, 1, 2, 8)
    quarter = jnp.zeros((1, 1, 2), jnp.float32), jnp.ones((1, 1, 2), jnp.float32)
    out, _ = rope(q, q, *quarter)
    assert out[0, 0, 0].tolist() == [-2, -3, 0, 1, 4, 5, 6, 7]  # (x1, x2) turns to (-x2, x1)


def test_the_kernel_turns_as_xla_does():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((2, 3, n, 24)), jnp.bfloat16) for n in (3, 1))
    cos, sin = (jnp.asarray(rng.standard_normal((2, 3, 8)), jnp.float32) for _ in range(2))
    kernel = interpreted(functools.partial(rope, implementation="pallas-interpret"), q, k, cos, sin)
    for ours, xla in zip(kernel, rope(q, k, cos, sin, implementation="xla"), strict=True):
        np.testing.assert_array_equal(ours, xla)


def test_auto_leaves_slices_and_float32_to_xla():
    def reason(dtype, **kwargs):
        q, cos = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((4, 128, 8, 128), (4, 128, 64)))
        return ops.explain("rope", q, q, cos, cos, **kwargs)["pallas"]

    with absent("NVIDIA H200"):
        assert reason(jnp.bfloat16) is None
        assert "copies of the slices" in str(reason(jnp.bfloat16, sliced=True))
        assert reason(jnp.float32) == "in float32 XLA is as fast"


@pytest.mark.own_errors
def test_positions_are_integers():
    with pytest.raises(ValueError, match="^cos_sin: positions must be integers, got float32$"):
        cos_sin(jnp.ones((1, 1)), *turns(np.ones(2)))
