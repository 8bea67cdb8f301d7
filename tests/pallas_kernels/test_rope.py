"""RoPE in the interpreter: every dtype, odd sizes, gradients; what it refuses; its tilings."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import H200
from kernels import interpreted
from numerics import assert_as_accurate

from pallas_kernels import device as device_lib
from pallas_kernels.rope import (
    Config,
    bucket,
    candidates,
    default_config,
    rope,
    rope_reference,
    tuning_calls,
    why_not,
)

pytestmark = pytest.mark.usefixtures("strict_jax")


def case(B, T, N, K, H, R, dtype: Any = jnp.float32, angles_dtype: Any = jnp.float32) -> Any:
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((B, T, n, H)), dtype) for n in (N, K))
    angles = rng.uniform(-4, 4, (B, T, R // 2))
    return q, k, *(jnp.asarray(f(angles), angles_dtype) for f in (np.cos, np.sin))


# What is turned by lanes, heads of 16 bits, is plain JAX in the interpreter: test_rope_lanes.py
BY_COPIES = functools.partial(rope, config=Config(1), interpret=True)


def rounded(arrays, dtype):
    """In float64, the tables as they are after their rounding to the dtype."""
    q, k, *tables = arrays
    return [np.asarray(x, np.float64) for x in (q, k, *(t.astype(dtype) for t in tables))]


def assert_turned(ours, arrays, dtype):
    plain = rope_reference(*arrays)
    q, k, cos, sin = rounded(arrays, dtype)
    for x, result, near in zip((q, k), ours, plain, strict=True):
        assert result.dtype == dtype
        assert_as_accurate(result, near, oracles.turn(x, cos, sin))


@pytest.mark.parametrize(
    ("shape", "dtype", "angles_dtype"),
    [
        ((1, 1, 3, 1, 64, 64), jnp.bfloat16, jnp.float32),  # one token, an odd number of heads
        ((1, 33, 1, 1, 64, 64), jnp.bfloat16, jnp.bfloat16),  # one past a tile of tokens
        ((2, 37, 2, 1, 96, 96), jnp.float16, jnp.float32),  # halves of six accesses; a prime
        ((3, 5, 2, 2, 80, 32), jnp.float32, jnp.float16),  # a part of each head passes through
        ((1, 3, 2, 1, 256, 256), jnp.bfloat16, jnp.float32),  # the widest head
        ((1, 2, 1, 1, 112, 112), jnp.float16, jnp.float32),  # more than a thread can hold
    ],
)
def test_rope(shape, dtype, angles_dtype):
    arrays = case(*shape, dtype=dtype, angles_dtype=angles_dtype)
    assert_turned(interpreted(BY_COPIES, *arrays), arrays, dtype)


def test_float32_heads_narrower_than_an_access_of_16_bits():
    arrays = case(1, 3, 2, 1, 16, 8)
    assert_turned(
        interpreted(functools.partial(rope, interpret=True), *arrays), arrays, jnp.float32
    )


def test_the_check_can_fail():
    arrays = case(1, 5, 2, 1, 32, 32)
    q, k = interpreted(functools.partial(rope, interpret=True), *arrays)
    adjacent = k.reshape(1, 5, 1, 2, 16).swapaxes(-1, -2).reshape(k.shape)
    for wrong in ((q.at[0, 3, 1, 7].multiply(1.05), k), (q, adjacent), (arrays[0], k)):
        with pytest.raises(AssertionError, match="error is"):
            assert_turned(wrong, arrays, jnp.float32)


def test_the_part_that_passes_through_is_the_same_to_the_bit():
    arrays = case(1, 3, 2, 1, 64, 16, jnp.bfloat16)
    for x, y in zip(arrays, interpreted(BY_COPIES, *arrays)):  # noqa: B905
        np.testing.assert_array_equal(x[..., 16:], y[..., 16:])


def test_rotary_dim_is_twice_the_columns():
    arrays = case(1, 3, 2, 1, 64, 16)
    named = interpreted(functools.partial(rope, rotary_dim=16, interpret=True), *arrays)
    assert_turned(named, arrays, jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients(dtype):
    """Of q and k by the kernel, of cos and sin by the reference."""
    arrays = case(2, 5, 3, 1, 48, 32, dtype)
    rng = np.random.default_rng(1)
    d_out = tuple(jnp.asarray(rng.standard_normal(x.shape), dtype) for x in arrays[:2])

    def pull(f, *arrays):
        return jax.vjp(f, *arrays)[1](d_out)

    ours = interpreted(functools.partial(pull, BY_COPIES), *arrays)
    plain = pull(rope_reference, *arrays)
    q, k, cos, sin = rounded(arrays, dtype)
    d_q, *of_q = oracles.turn_backward(q, cos, sin, np.asarray(d_out[0], np.float64))
    d_k, *of_k = oracles.turn_backward(k, cos, sin, np.asarray(d_out[1], np.float64))
    truth = [d_q, d_k, *(a + b for a, b in zip(of_q, of_k, strict=True))]
    for x, mine, near, exact in zip(arrays, ours, plain, truth, strict=True):
        assert mine.dtype == x.dtype
        assert_as_accurate(mine, near, exact)


def test_a_gradient_that_nothing_flows_into():
    """Only k's result is used, so q's cotangent is no array."""
    arrays = case(1, 3, 2, 1, 32, 32)

    def total(rope, *arrays):
        return jnp.sum(rope(*arrays)[1] ** 2)

    ours = interpreted(
        jax.grad(functools.partial(total, functools.partial(rope, interpret=True)), (0, 1, 2)),
        *arrays,
    )
    plain = jax.grad(functools.partial(total, rope_reference), (0, 1, 2))(*arrays)
    assert not np.any(ours[0])
    for mine, near in zip(ours, plain, strict=True):
        np.testing.assert_allclose(mine, near, atol=1e-5)


def test_q_and_k_are_kept_only_for_gradients_of_the_angles():
    arrays = case(1, 3, 2, 1, 32, 32)

    def kept(count):
        def pull(*arrays):
            f = lambda *some: rope(*some, *arrays[count:], interpret=True)  # noqa: E731
            return jax.vjp(f, *arrays[:count])[1]

        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(pull, *arrays)))

    angles = 2 * arrays[2].size
    assert kept(2) == angles
    assert kept(4) == angles + arrays[0].size + arrays[1].size


def test_second_derivatives():
    arrays = case(1, 2, 1, 1, 32, 32)

    def slope(rope, q):
        return jnp.sum(jax.grad(lambda q: jnp.sum(rope(q, *arrays[1:])[0] ** 3))(q) ** 2)

    ours = interpreted(
        jax.grad(functools.partial(slope, functools.partial(rope, interpret=True))), arrays[0]
    )
    plain = jax.grad(functools.partial(slope, rope_reference))(arrays[0])
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("config", [Config(1), Config(2, 2), Config(3), Config(7)])
def test_a_config_changes_no_bit(config):
    arrays = case(1, 19, 3, 2, 32, 32, jnp.bfloat16)
    other = interpreted(functools.partial(rope, config=config, interpret=True), *arrays)
    for x, y in zip(
        other, interpreted(functools.partial(rope, interpret=True), *arrays), strict=True
    ):
        np.testing.assert_array_equal(x, y)


def specs(B=1, T=8192, N=14, K=2, H=64, R=64, dtype="bfloat16", angles="float32"):
    heads = [jax.ShapeDtypeStruct((B, T, n, H), dtype) for n in (N, K)]
    return *heads, *[jax.ShapeDtypeStruct((B, T, R // 2), angles)] * 2


@pytest.mark.parametrize(
    ("arrays", "device", "phrase"),
    [
        (specs(), device_lib.Device("cpu"), "needs an NVIDIA GPU, found cpu"),
        (specs(), dataclasses.replace(H200, capability=8.0), "needs a Hopper GPU"),
        (specs(dtype="float64"), H200, "takes bfloat16, float16 or float32, got q float64"),
        (specs(angles="float64"), H200, "takes bfloat16, float16 or float32, got cos float64"),
        (specs(T=0), H200, "nothing to turn: q is"),
        (specs(K=0), H200, "nothing to turn: k is"),
        (
            (specs()[0], specs(dtype="float16")[1], *specs()[2:]),
            H200,
            "q is bfloat16 and k is float16; one kernel turns both in one dtype",
        ),
        (specs(H=84), H200, "heads of 168 bytes are no multiple of 16 bytes"),
        (specs(H=80, R=20), H200, "halves of 20 bytes are no multiple of 16 bytes"),
        (specs(R=10, dtype="float32", angles="bfloat16"), H200, "halves of 10 bytes are no"),
        (specs(H=320), H200, "heads of 320 numbers are longer than 256"),
        (specs(H=256, R=248, dtype="float32"), H200, "halves of 124 numbers take"),
    ],
)
def test_why_not(arrays, device, phrase):
    assert phrase in (why_not(*arrays, device=device) or "")


def test_nothing_stands_in_the_way_of_real_models():
    for call in tuning_calls():
        assert why_not(*call.arguments, device=H200) is None


def test_it_says_why_it_cannot_run():
    with pytest.raises(NotImplementedError, match="rope: cannot run this call: needs an NVIDIA"):
        rope(*case(1, 2, 1, 1, 32, 32))


@pytest.mark.parametrize(
    ("change", "keywords", "sentence"),
    [
        ({0: jnp.ones((1, 3, 2, 32), jnp.int32)}, {}, "q is int32; it must be floating point"),
        ({3: jnp.ones((1, 3, 16), jnp.int32)}, {}, "sin is int32; it must be floating point"),
        ({1: jnp.ones((1, 3, 1, 64))}, {}, r"which k \[1, 3, 1, 64\] as \[B, T, K, H\] does not"),
        ({1: jnp.ones((1, 4, 1, 32))}, {}, "does not fit"),
        ({0: jnp.ones((3, 2, 32))}, {}, "does not fit"),
        ({2: jnp.ones((1, 3, 8))}, {}, r"cos \[1, 3, 8\] and sin \[1, 3, 16\] must both be"),
        ({2: jnp.ones((1, 1, 16)), 3: jnp.ones((1, 1, 16))}, {}, r"with B, T = \[1, 3\]"),
        ({}, {"rotary_dim": 16}, "rotary_dim is 16, but cos and sin have 16 columns, half of 32"),
        ({2: jnp.ones((1, 3, 17)), 3: jnp.ones((1, 3, 17))}, {}, "34 numbers are to be turned"),
        ({}, {"config": Config(0)}, "heads and repeat must be 1 at least"),
        ({}, {"config": Config(tokens=-1)}, "tokens and lanes not negative"),
        ({}, {"config": Config(tokens=48)}, "lanes turn numbers of 16 bits, not float32"),
        ({}, {"config": Config(1, 9)}, "288 tokens a block are more than 256, what one copy takes"),
        (
            {},
            {"config": Config(64)},
            r"Config\(heads=64, repeat=1, tokens=0, lanes=0\): takes \d+ of 232448 bytes",
        ),
    ],
)
def test_user_errors(change, keywords, sentence):
    arrays = [change.get(i, x) for i, x in enumerate(case(1, 3, 2, 1, 32, 32))]
    with pytest.raises(ValueError, match=f"rope: .*{sentence}"):
        rope(*arrays, **keywords, interpret=True)


def test_configs_follow_the_sizes():
    f32: Any = {"dtype": "float32"}
    assert default_config(*specs(**f32), device=H200) == Config(8)  # 16 heads in two groups
    assert default_config(*specs(**f32, T=1), device=H200) == Config(1)  # blocks for each head
    llama: Any = {"N": 32, "K": 8, "H": 128, "R": 128}
    assert default_config(*specs(**llama, **f32), device=H200) == Config(10)
    for tokens in (1, 8192):  # of 16 bits by lanes
        assert default_config(*specs(**llama, T=tokens), device=H200) == Config(tokens=1, lanes=128)
    assert default_config(*specs(H=60, R=60), device=H200).lanes == 0
    assert bucket(*specs(T=5000)) == "bfloat16-m8192-n14-k2-h64-r64-float32"
    assert bucket(*specs(T=5000)) != bucket(*specs(T=5000, R=32))
    for call in tuning_calls():
        found = candidates(*call.arguments, device=H200)
        assert len(found) > 4
        assert default_config(*call.arguments, device=H200) not in found


@pytest.mark.gpu
@pytest.mark.parametrize("call", tuning_calls(), ids=lambda call: bucket(*call.arguments))
def test_on_the_gpu(call):
    shapes = [x.shape for x in call.arguments]
    (B, T, N, H), K = shapes[0], shapes[1][2]
    arrays = case(B, T, N, K, H, 2 * shapes[2][-1], jnp.bfloat16)
    assert_turned(jax.jit(rope)(*arrays), arrays, jnp.bfloat16)
    pull = lambda f: jax.jit(lambda *a: jax.vjp(lambda q, k: f(q, k, *a[2:]), *a[:2])[1](a[:2]))  # noqa: E731
    for mine, near in zip(pull(rope)(*arrays), pull(rope_reference)(*arrays), strict=True):
        np.testing.assert_array_equal(mine, near)
