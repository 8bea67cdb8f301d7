"""The model of the tensor cores: sums by hand, and how far from float64 it ever is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensor_cores import BITS, DEPTH, float8_sums

FP8 = jnp.float8_e4m3fn


def sums(a: list[float], b: list[float]) -> float:
    return float(float8_sums(*(jnp.asarray([x], jnp.float32).astype(FP8) for x in (a, b)))[0, 0])


@pytest.mark.parametrize(
    ("a", "b", "total"),
    [
        ([], [], 0),
        ([1.5], [1.75], 2.625),
        ([2**6, 2**-6], [2**6, 2**0], 2**12),  # 2^-6 is 2^-18 of the other
        ([2**6, 1], [2**6, 0.5], 2**12 + 0.5),  # the last that counts, 2^-13 of it
        ([2**6, 1], [2**6, 0.25], 2**12),
        ([2**6, -1], [2**6, 0.25], 2**12),  # toward zero
        ([2**6, 1, 1], [2**6, 0.25, 0.25], 2**12),  # each for itself
        ([2**6, 1, -(2**6)], [2**6, 0.25, 2**6], 0),  # the greatest may cancel
        ([1.5, -1, 2**-6], [1.5, 1, 2**-7], 1.25 + 2**-13),  # 1.5^2 has the power of 1
        ([1] * DEPTH + [2**-4], [2**8] * DEPTH + [2**-4], 2**13),  # a step later, what is summed
        ([1] * DEPTH + [1], [2**8] * DEPTH + [1], 2**13 + 1),
        ([1] + [0] * (DEPTH - 1) + [1], [0.25] + [0] * (DEPTH - 1) + [256], 256.25),
        ([2**6, 2**6, 1], [2**6, 2**6, 0.5], 2**13),  # 13 bits behind the sum's own leading one
        ([2**-9], [2**-9], 2**-18),  # subnormal
    ],
)
def test_sums_by_hand(a: list[float], b: list[float], total: float):
    fill = [0.0] * (DEPTH - len(a) % DEPTH)
    assert sums([*a, *fill], [*b, *fill]) == total
    assert sums(a or [0], b or [0]) == total


def test_long_sums_of_one_sign():
    """Weights times values of 4096 keys lose a tenth in one sum, next to nothing in blocks."""
    weights, values = jnp.full((1, 4096), 256, FP8), jnp.full((1, 4096), 1.375, FP8)
    exact = 4096 * 256 * 1.375
    assert 0.88 < float(float8_sums(weights, values)[0, 0]) / exact < 0.92
    blocks = [float8_sums(weights[:, :128], values[:, :128]) for _ in range(32)]
    assert float(sum(blocks)[0, 0]) / exact > 0.995


@pytest.mark.parametrize("k", [16, 128, 896])
def test_what_a_step_loses(k: int):
    """Less than 35 times 2^-13 of the largest there was, and more than float32 would."""
    rng = np.random.default_rng(k)
    a, b = (jnp.asarray(rng.standard_normal((40, k)), jnp.float32).astype(FP8) for _ in range(2))
    exact, wide = (np.asarray(x).astype(np.float64) for x in (a, b))
    products = exact[:, None] * wide[None]
    largest = np.maximum(np.abs(products).max(-1), np.abs(products.cumsum(-1)).max(-1))
    error = np.abs(np.asarray(jax.jit(float8_sums)(a, b)) - products.sum(-1))
    allowed = -(-k // DEPTH) * (DEPTH + 3) * 2.0**-BITS * largest
    assert np.all(error < allowed)
    assert np.max(error / largest) > 2.0 ** -(BITS + 1)
