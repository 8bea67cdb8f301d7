"""Projections of BitNet b1.58 against NumPy, and the gradient that passes their quantisers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops import bit_linear
from pallas_kernels.quantize import quantize
from pallas_kernels.ternary_matmul import quantize_rows, unpack

pytestmark = pytest.mark.usefixtures("strict_jax")


def case(*shape, outputs=20, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    w = rng.standard_normal((outputs, shape[-1])).astype(np.float32)
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def expected(x, w):
    """In float64, from integers in int64."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    gamma, a = max(np.abs(w).mean(), 1e-5), np.maximum(np.abs(x).max(-1, keepdims=True), 1e-5)
    wq = np.clip(np.round(w / gamma), -1, 1).astype(np.int64)
    xq = np.clip(np.round(127 * x / a), -128, 127).astype(np.int64)
    return (xq @ wq.T) * (a / 127) * gamma, xq * (a / 127), wq * gamma


def test_golden_of_the_quantisers():
    weight = jnp.asarray([[0.5, -0.1, 0.02, -0.9], [0.3, 0, -0.45, 0.2]])
    packed = quantize(weight, "ternary")
    np.testing.assert_array_equal(unpack(packed.codes), [[1, 0, 0, -1], [1, 0, -1, 1]])
    np.testing.assert_allclose(packed.row_scale, [0.30875] * 2, rtol=1e-6)
    xq, x_scale = quantize_rows(jnp.asarray([[1, -2.5, 0.3, 0], [0, 0, 0, 0]]))
    np.testing.assert_array_equal(xq, [[51, -127, 15, 0], [0, 0, 0, 0]])
    np.testing.assert_allclose(1 / x_scale, [50.8, 127e5], rtol=1e-6)
    assert xq.dtype == jnp.int8


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_bit_linear(dtype):
    x, w = case(2, 3, 36, dtype=dtype)
    y = jax.jit(bit_linear)(x, w)
    truth, *_ = expected(x, w)
    assert y.dtype == dtype
    # Sums are exact; of the scales, gamma is a sum, and two products and a rounding follow
    tolerance = max(float(jnp.finfo(dtype).eps), 1e-6)
    np.testing.assert_allclose(np.asarray(y, np.float64), truth, rtol=tolerance, atol=1e-30)
    wide = bit_linear(x, w, out_dtype=jnp.dtype(jnp.float32))
    np.testing.assert_allclose(wide, truth, rtol=1e-6, atol=1e-30)
    with pytest.raises(AssertionError):  # the twin: one activation more
        np.testing.assert_allclose(
            bit_linear(x.at[0, 0, 0].add(1), w, out_dtype=jnp.dtype(jnp.float32)), truth, rtol=1e-6
        )


def test_bias():
    x, w = case(3, 36)
    bias = jnp.arange(20, dtype=jnp.float32)
    np.testing.assert_allclose(bit_linear(x, w, bias), bit_linear(x, w) + bias[None], rtol=1e-6)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(bit_linear(x, w, 1.01 * bias), bit_linear(x, w) + bias[None])


@pytest.mark.own_errors
def test_what_does_not_fit_is_one_sentence():
    x, w = case(3, 36)
    with pytest.raises(
        ValueError, match=r"^bit_linear: x \[3, 32\] and the weight \[20, 36\] must be"
    ):
        bit_linear(x[:, :32], w)
    with pytest.raises(ValueError, match=r"^bit_linear: x \[3, 0\] and .* neither I nor O 0"):
        bit_linear(x[:, :0], w[:, :0])
    with pytest.raises(
        ValueError, match="^bit_linear: four ternary inputs share a byte, and I = 6"
    ):
        bit_linear(x[:, :6], w[:, :6])
    with pytest.raises(ValueError, match="^bit_linear: out_dtype must be a dtype, got 'foo'"):
        bit_linear(x, w, out_dtype="foo")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="^bit_linear: x is int32; it must be floating point"):
        bit_linear(x.astype(jnp.int32), w)
    with pytest.raises(ValueError, match=r"^bit_linear: bias \[19\] is not \[O\] = \[20\]"):
        bit_linear(x, w, jnp.ones(19))
    with pytest.raises(ValueError, match="the weight has numbers that are NaN or infinite"):
        bit_linear(x, w.at[0, 0].set(jnp.nan))


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_what_is_no_number_shows(number):
    x, w = case(2, 36)
    wrong = jax.jit(bit_linear)(x.at[1, 5].set(number), w)
    assert not np.isfinite(wrong[1]).any()
    np.testing.assert_array_equal(wrong[0], jax.jit(bit_linear)(x, w)[0])
    assert not np.isfinite(jax.jit(bit_linear)(x, w.at[0, 0].set(number))).all(axis=1).any()


def test_no_rows():
    x, w = case(0, 36)
    assert bit_linear(x, w).shape == (0, 20)


def test_the_gradient_is_that_of_a_linear_at_the_quantised_operands():
    x, w = case(2, 5, 36)
    d_y = jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, 20)), jnp.float32)
    _, pull = jax.vjp(bit_linear, x, w)
    d_x, d_w = pull(d_y)
    _, rows, weight = expected(x, w)
    np.testing.assert_allclose(d_x, np.asarray(d_y) @ weight, atol=1e-5)
    truth = np.einsum("bto,bti->oi", np.asarray(d_y), rows)
    np.testing.assert_allclose(d_w, truth, atol=1e-5)
    assert np.abs(np.asarray(d_y) @ np.asarray(w) - d_x).max() > 0.1  # not that of the master
