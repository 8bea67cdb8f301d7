"""RMSNorm and LayerNorm against float64, with their rounding points."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import absent
from kernels import interpreted
from numerics import assert_as_accurate

from jaxllm.ops import explain, layer_norm, rms_norm
from jaxllm.ops.norm import RMS_NORM

pytestmark = pytest.mark.usefixtures("strict_jax")


def case(*shape: int, dtype=jnp.float32, weight_dtype=None):
    rng = np.random.default_rng(0)
    x = jnp.asarray(3 * rng.standard_normal(shape), dtype)
    weight = 0.5 + 0.3 * rng.standard_normal(shape[-1])
    return x, jnp.asarray(jnp.asarray(weight, dtype), weight_dtype or dtype)


def expected(x, weight, **kwargs):
    arrays = np.asarray(x), np.asarray(weight)
    return [oracles.rms_norm(*arrays, **kwargs, dtype=d) for d in (x.dtype, np.float64)]


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(
    ("shape", "eps", "dtype"),
    [
        ((7,), 1e-5, jnp.float32),
        ((3, 1), 1e-6, jnp.float32),
        ((2, 3, 97), 1.0, jnp.float32),
        ((2, 3, 4, 16), 1e-6, jnp.bfloat16),
        ((5, 896), 1e-5, jnp.bfloat16),
        ((5, 96), 1e-5, jnp.float16),
    ],
)
def test_rms_norm(shape, eps, dtype, zero_centered):
    x, weight = case(*shape, dtype=dtype)
    out = rms_norm(x, weight, eps=eps, zero_centered=zero_centered)
    assert out.dtype == dtype
    assert_as_accurate(out, *expected(x, weight, eps=eps, zero_centered=zero_centered))


def test_the_check_can_fail():
    x, weight = case(2, 3, 97)
    good, (plain, truth) = rms_norm(x, weight, eps=1e-5), expected(x, weight, eps=1e-5)
    for wrong in (
        good.at[0, 0, 0].multiply(1.05),
        rms_norm(x, weight, eps=1e-4),
        rms_norm(x, weight, eps=1e-5, zero_centered=True),
        good.astype(jnp.bfloat16),
    ):
        with pytest.raises(AssertionError, match="error is"):
            assert_as_accurate(wrong, plain, truth)


def test_statistics_are_float32_in_half_precision():
    """Squares of 400 overflow float16; a sum of 4096 ones stops at 256 in bfloat16."""
    for value, dtype in ((400.0, jnp.float16), (1.0, jnp.bfloat16)):
        x = jnp.full((1, 4096), value, dtype)
        out = rms_norm(x, jnp.ones(4096, dtype), eps=1e-6)
        np.testing.assert_array_equal(out, jnp.ones_like(out))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rounding_points(zero_centered):
    """Bit for bit where Hugging Face rounds: before the weight, or only behind it (Gemma)."""
    x, weight = case(64, 96, dtype=jnp.bfloat16)
    out = np.asarray(rms_norm(x, weight, eps=1e-6, zero_centered=zero_centered))
    x64, w64 = (np.asarray(a).astype(np.float64) for a in (x, weight))
    y = x64 / np.sqrt(np.mean(x64 * x64, axis=-1, keepdims=True) + 1e-6)
    bf16 = np.asarray(x).dtype
    early = (y.astype(bf16).astype(np.float64) * (w64 + zero_centered)).astype(bf16)
    late = (y * (w64 + zero_centered)).astype(bf16)
    ours, other = (late, early) if zero_centered else (early, late)
    # A sum in another order turns a tie now and then
    assert np.mean(out == ours) > 0.999
    assert np.mean(out == other) < 0.9


@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_weight_of_another_dtype(zero_centered):
    x, weight = case(3, 16, dtype=jnp.bfloat16, weight_dtype=jnp.float32)
    out = rms_norm(x, weight, eps=1e-6, zero_centered=zero_centered)
    assert out.dtype == jnp.bfloat16
    same = rms_norm(x, weight.astype(jnp.bfloat16), eps=1e-6, zero_centered=zero_centered)
    np.testing.assert_array_equal(out, same)


def test_gradient():
    """Against differences of the float64 function."""
    x, weight = case(2, 5)
    d_out = np.random.default_rng(1).standard_normal((2, 5))

    def loss(x, weight):
        return jnp.sum(rms_norm(x, weight, eps=1e-2) * jnp.asarray(d_out, jnp.float32))

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, weight)
    arrays = [np.asarray(a, np.float64) for a in (x, weight)]
    for i, gradient in enumerate(gradients):
        truth = np.zeros_like(arrays[i])
        for at in np.ndindex(truth.shape):
            sides = []
            for step in (1e-5, -1e-5):
                moved = [a.copy() for a in arrays]
                moved[i][at] += step
                sides.append(np.sum(oracles.rms_norm(*moved, eps=1e-2) * d_out))
            truth[at] = (sides[0] - sides[1]) / 2e-5
        # The differences themselves are good to 1e-9
        np.testing.assert_allclose(gradient, truth, rtol=1e-5, atol=1e-6)
        assert not np.allclose(gradient, 1.01 * truth, rtol=1e-5, atol=1e-6)


def test_a_row_of_zeros():
    x, weight = jnp.zeros((2, 4)), jnp.ones(4)
    both = jax.jit(jax.value_and_grad(lambda x: jnp.sum(rms_norm(x, weight, eps=1e-6))))
    out, gradient = both(x)
    assert out == 0
    np.testing.assert_allclose(gradient, 1e3, rtol=1e-6)


def layer_norm_case(*shape: int, dtype=jnp.float32, bias=True, mean=0.0):
    x, weight = case(*shape, dtype=dtype)
    x = (x.astype(jnp.float32) / 3 + mean).astype(dtype)
    return x, weight, jnp.flip(weight) if bias else None


def layer_norm_plain(x, weight, bias):
    """In float32, rounded once."""
    x32, w32, b32 = (None if a is None else np.asarray(a, np.float32) for a in (x, weight, bias))
    assert x32 is not None
    centred = x32 - np.mean(x32, axis=-1, keepdims=True)
    variance = np.mean(centred * centred, axis=-1, keepdims=True)
    y = centred / np.sqrt(variance + np.float32(1e-5)) * w32
    return (y if b32 is None else y + b32).astype(np.asarray(x).dtype)


def layer_norm_truth(x, weight, bias):
    bias = None if bias is None else np.asarray(bias)
    return oracles.layer_norm(np.asarray(x), np.asarray(weight), bias, eps=1e-5)


@pytest.mark.parametrize("implementation", ["auto", "pallas-interpret"])
@pytest.mark.parametrize(
    ("shape", "kwargs"),
    [
        ((64,), {}),
        ((2, 3, 96), {"dtype": jnp.bfloat16}),
        ((5, 40), {"dtype": jnp.float16, "bias": False}),
        ((3, 96), {"mean": 1e4}),
    ],
)
def test_layer_norm(shape, kwargs, implementation):
    x, weight, bias = layer_norm_case(*shape, **kwargs)
    f = functools.partial(layer_norm, eps=1e-5, implementation=implementation)
    out = interpreted(f, x, weight, bias) if "-" in implementation else f(x, weight, bias)
    assert out.dtype == x.dtype
    plain, truth = layer_norm_plain(x, weight, bias), layer_norm_truth(x, weight, bias)
    largest_term = kwargs.get("mean")  # of the sum that the mean is
    assert_as_accurate(out, plain, truth, largest_term=largest_term)
    for wrong in (out.at[0].multiply(1.05), rms_norm(x, weight, eps=1e-5)):
        with pytest.raises(AssertionError, match="error is"):
            assert_as_accurate(wrong, plain, truth, largest_term=largest_term)


def test_the_gradient_of_layer_norm():
    x, weight, bias = layer_norm_case(3, 16)
    d_out = np.random.default_rng(1).standard_normal(x.shape).astype(np.float32)
    pull = jax.vjp(functools.partial(layer_norm, eps=1e-5), x, weight, bias)[1]
    arrays = [np.asarray(a) for a in (x, weight, bias)]
    truth = oracles.layer_norm(*arrays, eps=1e-5, d_out=d_out)
    for mine, exact in zip(pull(jnp.asarray(d_out)), truth, strict=True):
        # float32 sums of 16 terms
        np.testing.assert_allclose(mine, exact, rtol=1e-5, atol=1e-5)
        assert not np.allclose(mine, 1.01 * exact, rtol=1e-5, atol=1e-5)


def test_who_runs_layer_norm():
    x, row = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 896), (896,)))
    with absent("NVIDIA H200"):
        assert explain("layer_norm", x, row, None, eps=1e-5)["pallas"] is None
    assert "needs an NVIDIA GPU" in (explain("layer_norm", x, row, row, eps=1e-5)["pallas"] or "")


def test_triton_runs_by_name_where_it_can(monkeypatch):
    x, row = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 896), (896,)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with absent("NVIDIA A100-SXM4-80GB", 108):
        assert "only by name" in (explain("rms_norm", x, row, eps=1e-5)["triton"] or "")
        assert RMS_NORM["triton"].why_not(x, row, eps=1e-5, zero_centered=False) is None
    with absent("Tesla T4", 40):
        assert "8.0 or newer" in (explain("rms_norm", x, row, eps=1e-5)["triton"] or "")
