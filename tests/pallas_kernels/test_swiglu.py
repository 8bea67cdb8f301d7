"""SwiGLU and GeGLU in the interpreter: every dtype and form, odd sizes, gradients; refusals."""

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
from pallas_kernels import tuned
from pallas_kernels.swiglu import (
    Config,
    _tile,
    bucket,
    candidates,
    default_config,
    geglu,
    geglu_reference,
    relu2_glu,
    relu2_glu_reference,
    swiglu,
    swiglu_reference,
    tuning_calls,
    why_not,
)

pytestmark = pytest.mark.usefixtures("strict_jax")

# By the names of the oracle: ours, plain
OPS: dict[str, Any] = {
    "silu": (swiglu, swiglu_reference),
    "gelu_pytorch_tanh": (geglu, geglu_reference),
    "gelu": tuple(functools.partial(f, approximate=False) for f in (geglu, geglu_reference)),
    "relu2": (relu2_glu, relu2_glu_reference),
}


def case(*shape, dtype: Any = jnp.float32, fused=False) -> Any:
    """The arguments, and the cotangent of the result."""
    rng = np.random.default_rng(0)
    gate, up, d_out = (jnp.asarray(2 * rng.standard_normal(shape), dtype) for _ in range(3))
    return ((jnp.concatenate([gate, up], axis=-1),) if fused else (gate, up)), d_out


def both(op, arrays, d_out):
    """The result and the gradients."""
    out, pull = jax.vjp(op, *arrays)
    return out, *pull(d_out)


def truth(activation, arrays, d_out):
    one = len(arrays) == 1
    gate, up = np.split(np.asarray(arrays[0]), 2, axis=-1) if one else map(np.asarray, arrays)
    gradients = oracles.glu_gradient(gate, up, np.asarray(d_out), activation=activation)
    if one:
        gradients = (np.concatenate(gradients, axis=-1),)
    return oracles.glu(gate, up, activation=activation), *gradients


def assert_right(ours, activation, arrays, d_out):
    plain = both(OPS[activation][1], arrays, d_out)
    for mine, near, exact in zip(ours, plain, truth(activation, arrays, d_out), strict=True):
        assert mine.dtype == d_out.dtype
        assert_as_accurate(mine, near, exact)


def run(activation, arrays, d_out, **keywords):
    op = functools.partial(OPS[activation][0], interpret=True, **keywords)
    return interpreted(functools.partial(both, op), arrays, d_out)


@pytest.mark.parametrize(
    ("activation", "shape", "dtype", "fused"),
    [
        ("silu", (1, 96), jnp.float32, False),
        ("gelu_pytorch_tanh", (7, 96), jnp.bfloat16, True),  # narrow rows side by side
        ("gelu", (3, 5, 40), jnp.float16, True),
        ("gelu_pytorch_tanh", (5, 1000), jnp.float16, False),
        ("silu", (3, 896), jnp.bfloat16, True),
        ("gelu", (2, 520), jnp.float32, True),  # two past one access of all threads
        ("silu", (8,), jnp.bfloat16, False),
        ("gelu", (1, 1032), jnp.bfloat16, False),
        ("silu", (3, 4872), jnp.bfloat16, True),  # two tiles a row
        ("silu", (3, 4864), jnp.bfloat16, True),  # 19 tiles of two numbers a thread
        ("silu", (8, 4864), jnp.bfloat16, True),  # tiles of a warp fill the rows
        ("relu2", (1, 4864), jnp.bfloat16, True),  # and of one row fewer bytes do
        ("gelu", (4, 640), jnp.float32, True),
        ("silu", (2, 4864), jnp.float16, False),
        ("gelu_pytorch_tanh", (2, 1024), jnp.bfloat16, True),  # tiles that fill the arrays
        ("silu", (3, 512), jnp.float32, False),
        ("relu2", (3, 896), jnp.bfloat16, False),
    ],
)
def test_glu(activation, shape, dtype, fused):
    arrays, d_out = case(*shape, dtype=dtype, fused=fused)
    assert_right(run(activation, arrays, d_out), activation, arrays, d_out)


def test_the_check_can_fail():
    arrays, d_out = case(5, 96)
    out, d_gate, d_up = run("silu", arrays, d_out)
    for wrong in (
        (out.at[4, 95].multiply(1.05), d_gate, d_up),
        (out, d_up, d_gate),
        (out, d_gate.at[0, 0].add(1e-3), d_up),
        both(swiglu_reference, arrays[::-1], d_out),
        both(geglu_reference, arrays, d_out),
    ):
        with pytest.raises(AssertionError, match="error is"):
            assert_right(wrong, "silu", arrays, d_out)
    tanh = both(geglu_reference, arrays, d_out)
    with pytest.raises(AssertionError, match="error is"):
        assert_right(tanh, "gelu", arrays, d_out)


def test_one_array_gives_the_same_bits():
    arrays, d_out = case(3, 96, dtype=jnp.bfloat16)
    out, *gradients = run("silu", arrays, d_out)
    one, gradient = run("silu", (jnp.concatenate(arrays, axis=-1),), d_out)
    np.testing.assert_array_equal(one, out)
    np.testing.assert_array_equal(gradient, jnp.concatenate(gradients, axis=-1))


def test_the_activation_is_rounded_before_the_product():
    """As Hugging Face does; a product in float32 has other bits."""
    (gate, up), _ = case(8, 96, dtype=jnp.bfloat16)
    out = np.asarray(interpreted(functools.partial(swiglu, interpret=True), gate, up))
    value = oracles.activate(np.asarray(gate, np.float64), "silu")
    bf16 = out.dtype
    early = (value.astype(bf16).astype(np.float64) * np.asarray(up, np.float64)).astype(bf16)
    late = (value * np.asarray(up, np.float64)).astype(bf16)
    assert np.mean(out == early) > 0.999
    assert np.mean(out == late) < 0.9


@pytest.mark.parametrize("activation", [name for name in OPS if name != "relu2"])
def test_far_out_it_stays_finite(activation):
    far = jnp.asarray([-3e38, -1e4, -90.0, 0.0, 0.0, 90.0, 1e4, 3e38])
    out, d_gate, d_up = run(activation, (far, jnp.ones(8)), jnp.ones(8))
    kept = np.maximum(far, 0)
    np.testing.assert_allclose(out, kept, rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(d_up, kept, rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(d_gate, [0, 0, 0, 0.5, 0.5, 1, 1, 1], atol=1e-6)


def test_a_square_far_out():
    far = jnp.asarray([-3e38, -1e4, -90.0, 0.0, 0.0, 90.0, 1e4, 1e19])
    out, d_gate, d_up = run("relu2", (far, jnp.ones(8)), jnp.ones(8))
    kept = np.maximum(far, 0)
    np.testing.assert_allclose(out, kept**2, rtol=1e-6)
    np.testing.assert_allclose(d_up, kept**2, rtol=1e-6)
    np.testing.assert_allclose(d_gate, 2 * kept, rtol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("width", "config"),
    [
        (3000, Config(1, 1, 1)),
        (3000, Config(2, 4, 1)),
        (3000, Config(8, 2, 3)),
        (2048, Config(1, 0, 1)),
        (2048, Config(2, 0, 1)),
        (2048, Config(1, 2, 1)),
    ],
)
def test_a_config_changes_no_bit(width, config, fused):
    arrays, _ = case(3, width, dtype=jnp.bfloat16, fused=fused)
    f = functools.partial(swiglu, interpret=True)
    other = interpreted(functools.partial(f, config=config), *arrays)
    np.testing.assert_array_equal(other, interpreted(f, *arrays))


def test_a_tuned_row_that_does_not_fit_is_passed_over(monkeypatch):
    """The key of a row is a power of two; a config without a stream needs an exact size."""
    monkeypatch.setattr(tuned, "lookup", lambda *args: Config(1, 0))
    arrays, d_out = case(3, 96)
    assert_right(run("silu", arrays, d_out), "silu", arrays, d_out)


def specs(M=8192, F=4864, dtype="bfloat16", fused=False):
    x = jax.ShapeDtypeStruct((M, 2 * F if fused else F), dtype)
    return (x,) if fused else (x, x)


@pytest.mark.parametrize(
    ("arrays", "device", "phrase"),
    [
        (specs(), device_lib.Device("cpu"), "needs an NVIDIA GPU, found cpu"),
        (specs(), dataclasses.replace(H200, capability=8.0), "needs a Hopper GPU"),
        (specs(dtype="float64"), H200, "takes bfloat16, float16 or float32, got float64"),
        (specs(M=0), H200, "an array [0, 4864] holds no numbers"),
        (specs(F=100), H200, "rows of 200 bytes are no multiple of 16 bytes"),
        (specs(F=100, fused=True), H200, "rows of 200 bytes are no multiple of 16 bytes"),
    ],
)
def test_why_not(arrays, device, phrase):
    assert phrase in (why_not(*arrays, device=device) or "")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("M", [1, 2**15])
@pytest.mark.parametrize("F", [8, 104, 4864, 6152, 53248])
def test_no_size_is_too_large(M, F, fused):
    arrays = specs(M, F, fused=fused)
    assert why_not(*arrays, device=H200) is None
    for backward in (False, True):
        config = default_config(*arrays, backward=backward, device=H200)
        width, streamed = F if fused else M * F, config.stages > 0
        count = None if streamed else M * F // width
        tile = _tile(width, 2, config.repeat, count).on_chip
        assert max(tile.rows, tile.chunks, tile.inner) <= device_lib.MAX_BOX
        assert streamed or width % tile.padded == 0
        taken = config.blocks_per_sm * config.stages * 2 * tile.rows * tile.padded * (2 + backward)
        assert taken < device_lib.SHARED_BYTES


def test_it_says_why_it_cannot_run():
    (gate, up), _ = case(2, 96)
    with pytest.raises(NotImplementedError, match="swiglu: cannot run this call: needs an NVIDIA"):
        swiglu(gate, up)
    with pytest.raises(NotImplementedError, match="geglu: cannot run this call: rows of 20 bytes"):
        geglu(jnp.ones((2, 10)), interpret=True)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ([jnp.ones((2, 8)), jnp.ones((2, 16))], r"gate is float32\[2, 8\] and up float32\[2, 16\]"),
        ([jnp.ones(8), jnp.ones(8, jnp.bfloat16)], r"float32\[8\] and up bfloat16\[8\]; they must"),
        ([jnp.ones(()), jnp.ones(())], "they must be alike and have rows"),
        ([jnp.ones((2, 7))], r"gate holds two halves a row, but its shape is \(2, 7\)"),
        ([jnp.ones(())], r"gate holds two halves a row, but its shape is \(\)"),
        ([jnp.ones(8, jnp.int32)], "gate is int32; it must be floating point"),
        ([jnp.ones(8), jnp.ones(8, jnp.int32)], "up is int32; it must be floating point"),
    ],
)
@pytest.mark.own_errors
def test_user_errors(arrays, sentence):
    for op, name in ((swiglu, "swiglu"), (geglu, "geglu")):
        with pytest.raises(ValueError, match=f"{name}: .*{sentence}"):
            op(*arrays, interpret=True)


def test_a_config_without_a_stream_takes_what_fills_its_tiles():
    (gate, up), _ = case(2, 96)
    with pytest.raises(NotImplementedError, match="swiglu: .* has no stream, which takes tiles of"):
        swiglu(gate, up, config=Config(1, 0), interpret=True)


def test_configs_follow_the_sizes():
    assert bucket(*specs()) == "bfloat16-n2^26-two"
    others = [specs(M=1), specs(dtype="float32"), specs(fused=True)]
    assert len({bucket(*arrays) for arrays in [specs(), *others]}) == 4
    assert default_config(*specs(), device=H200) == Config(2, 0, 1)
    assert default_config(*specs(M=64), device=H200) == Config(1, 0, 1)
    assert default_config(*specs(M=1), device=H200) == Config(1, 0, 1)  # 19 tiles of 256
    assert default_config(*specs(M=1, fused=True), device=H200) == Config(1, 0, 1)
    assert default_config(*specs(M=1, F=1032), device=H200).stages == 1
    for count, warps, vector in ((1, (1, 4), 2), (4, (4, 1), 8), (16, (4, 1), 8), (3, (1, 4), 2)):
        tile = _tile(4864, 2, 1, count)
        assert tile.fills(count)
        assert (tile.on_chip.warps, tile.on_chip.vector) == (warps, vector)
    assert not _tile(1152, 2, 1, 1).fills(1)  # by two bytes a thread: less than is taken
    assert default_config(*specs(M=15), device=H200) == Config(1, 1, 8)  # 71.25 tiles
    assert default_config(*specs(fused=True), device=H200) == Config(2, 0, 1)
    assert default_config(*specs(M=8188, fused=True), device=H200) == Config(1, 0, 1)
    assert default_config(*specs(M=8191, fused=True), device=H200).stages == 3
    assert default_config(*specs(F=8192, fused=True), device=H200) == Config(2, 0, 1)
    for call in tuning_calls():
        found = candidates(*call.arguments, device=H200)
        assert len(found) > 1
        assert default_config(*call.arguments, device=H200) not in found
        assert why_not(*call.arguments, device=H200) is None


@pytest.mark.gpu
@pytest.mark.parametrize("activation", OPS)
@pytest.mark.parametrize(
    ("shape", "dtype", "fused"),
    [
        ((1, 4864), jnp.bfloat16, False),
        ((64, 8192), jnp.bfloat16, True),
        ((1021, 14336), jnp.bfloat16, False),
        ((1021, 4864), jnp.float16, True),
        ((2048, 4864), jnp.bfloat16, True),
        ((509, 1000), jnp.float32, True),
        ((256, 14336), jnp.float32, False),
    ],
)
def test_on_the_gpu(activation, shape, dtype, fused):
    arrays, d_out = case(*shape, dtype=dtype, fused=fused)
    ours = jax.jit(functools.partial(both, OPS[activation][0]))(arrays, d_out)
    assert_right(ours, activation, arrays, d_out)
