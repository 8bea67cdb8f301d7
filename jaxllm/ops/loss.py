"""Token cross entropy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], *, ignore_index: int = -100
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Sum of -log softmax(logits)[target] in nats, and how many targets it is over.

    Targets are already shifted; those that are `ignore_index` do not count. The sum and the count
    come apart so that micro-batches can be weighted by tokens.
    Dtypes: the log-sum-exp is float32 whatever the logits' dtype.
    """
    counted = targets != ignore_index
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, jnp.where(counted, targets, 0)[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    return jnp.sum(jnp.where(counted, losses, jnp.float32(0))), jnp.sum(counted, dtype=jnp.int32)
