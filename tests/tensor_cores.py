"""Float8 products as Hopper's tensor cores add them up, which the interpreter does not show.

Of K they take 32 at a time. The 32 products, which are exact, and the sum so far are cut off,
toward zero, below 2^-13 of the greatest power of two among them (a product's is that of both
factors together: its mantissa goes up to 4). What these add up to is cut off 13 bits behind its
leading one. So a step loses less than (33 + 2) 2^-13 of the largest number that it meets.
An H200 agrees: the log-sum-exps of `flash_attention` were up to 7e-4 from float64's in ten cases,
and of each the largest error was that of such sums but for 2e-6.
Source: Xie et al. 2025 (MMA-Sim), arXiv:2511.10909; DeepSeek-AI 2024, arXiv:2412.19437, 3.5.2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

DEPTH, BITS = 32, 13  # of K at a time; behind the greatest power of two
SMALLEST = -6  # power of two of float8_e4m3fn, that of its subnormal numbers too
NOTHING = -100  # power of two below that of any number here


def float8_sums(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b.T of float8_e4m3fn [M, K] and [N, K]: float32 [M, N]."""
    missing = -a.shape[1] % DEPTH
    a, b = (jnp.pad(x.astype(jnp.float32), ((0, 0), (0, missing))) for x in (a, b))
    parts = tuple(jnp.swapaxes(x.reshape(len(x), -1, DEPTH), 0, 1) for x in (a, b))

    def step(total, some):
        a, b = some
        tops = [jnp.where(x == 0, NOTHING, jnp.maximum(_power(x), SMALLEST)) for x in some]
        top = jnp.max(tops[0][:, None] + tops[1][None], axis=-1)
        top = jnp.maximum(jnp.maximum(top, _power(total)), NOTHING)
        up, down = _two_to(BITS - top), _two_to(top - BITS)
        whole = jnp.sum(jnp.trunc(a[:, None] * b[None] * up[..., None]), axis=-1)
        total = (whole + jnp.trunc(total * up)) * down  # whole numbers below 2^24: exact
        kept = lax.bitcast_convert_type(total, jnp.int32) & np.int32(-1 << (23 - BITS))
        return lax.bitcast_convert_type(kept, jnp.float32), None

    return lax.scan(step, jnp.zeros((len(a), len(b)), jnp.float32), parts)[0]


def _power(x: jax.Array) -> jax.Array:
    """The power of two of a normal number, -127 of 0."""
    return (lax.bitcast_convert_type(x, jnp.int32) >> 23 & 255) - 127


def _two_to(power: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((power + 127) << 23, jnp.float32)
