"""Token cross entropy against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from numerics import assert_as_accurate

from jaxllm.ops import cross_entropy

pytestmark = pytest.mark.usefixtures("strict_jax")


def case(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(4 * rng.standard_normal((2, 5, 13)), dtype)
    targets = rng.integers(0, 13, (2, 5))
    targets[0, 1] = targets[1, 3:] = -100
    return logits, jnp.asarray(targets, jnp.int32)


def truth(logits, targets, **kwargs) -> float:
    return oracles.cross_entropy(
        np.asarray(logits).reshape(-1, 13), np.asarray(targets).reshape(-1), **kwargs
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sum_and_count(dtype):
    logits, targets = case(dtype)
    total, count = jax.jit(cross_entropy)(logits, targets)
    assert (total.dtype, count.dtype, int(count)) == (jnp.float32, jnp.int32, 7)
    exact = np.array(truth(logits, targets))
    # Float32 inside whatever the logits are: only roundings of sums near 30
    assert_as_accurate(total, exact, exact)
    with pytest.raises(AssertionError, match="error is"):
        assert_as_accurate(1.00001 * total, exact, exact)


def test_gradient_is_softmax_minus_one_hot():
    logits, targets = case()
    gradient = jax.jit(jax.grad(lambda x: cross_entropy(x, targets)[0]))(logits)
    p = np.exp(oracles.log_softmax(np.asarray(logits)))
    expected = (p - np.eye(13)[np.maximum(targets, 0)]) * (np.asarray(targets) != -100)[..., None]
    assert_as_accurate(gradient, expected, expected)
    assert np.all(np.asarray(gradient)[1, 3:] == 0)
    with pytest.raises(AssertionError, match="error is"):
        assert_as_accurate(np.asarray(gradient) + 1e-5, expected, expected)


def test_large_logits_do_not_overflow():
    logits = jnp.asarray([[[1e4, 0.0, -1e4], [-3e4, 1.0, 3e4]]])
    total, _ = cross_entropy(logits, jnp.asarray([[1, 2]], jnp.int32))
    assert float(total) == 1e4


def test_nothing_to_count():
    logits, targets = case()
    total, count = cross_entropy(logits, jnp.full_like(targets, -100))
    assert (float(total), int(count)) == (0.0, 0)


def test_another_ignored_index():
    logits, targets = case()
    targets = jnp.where(targets == -100, jnp.int32(3), targets)
    total, count = cross_entropy(logits, targets, ignore_index=3)
    assert int(count) == int(np.sum(np.asarray(targets) != 3))
    assert float(total) == pytest.approx(truth(logits, targets, ignore_index=3), rel=1e-6)
