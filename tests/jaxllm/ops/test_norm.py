"""RMSNorm against float64, with its rounding points."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from numerics import assert_as_accurate

from jaxllm.ops import rms_norm

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
