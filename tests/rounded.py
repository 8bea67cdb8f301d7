"""Plain JAX that rounds where a kernel must: how far from the truth the kernel may be.

Only where the kernel's own reference rounds elsewhere. `benchmarks` and the kernels' tests use it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def linear_cross_entropy(
    hidden, head, targets, *, ignore_index=-100, softcap=None, z_loss=0.0
) -> Any:
    """(sum, d_hidden, d_head) of `pallas_kernels.linear_cross_entropy`, with all logits.

    Rounded are the gradient by logits before a row's factor, hidden states after it, the results.
    """
    rows, matrix = hidden.astype(jnp.float32), head.astype(jnp.bfloat16).astype(jnp.float32)
    counted = targets != ignore_index
    ids = jnp.where(counted, targets, 0)[:, None]

    def losses(logits):
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        lse = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, ids, 1)[:, 0]
        found = lse - chosen + z_loss * lse * lse
        return jnp.sum(jnp.where(counted, found, jnp.float32(0))), (lse, chosen)

    dot = functools.partial(jnp.dot, precision="highest")
    (total, (lse, chosen)), d_logits = jax.value_and_grad(losses, has_aux=True)(dot(rows, matrix.T))
    # The mantissa of the factor is all that matters, so that it may be clipped
    factor = jnp.exp2(jnp.clip((chosen - lse) * np.float32(np.log2(np.e)), -60.0, 0.0))[:, None]
    factor = factor * (1.0 + 2.0 * z_loss * lse[:, None])
    d_logits = (d_logits / factor).astype(jnp.bfloat16).astype(jnp.float32)
    scaled = (rows * factor).astype(jnp.bfloat16).astype(jnp.float32)
    d_hidden, d_head = dot(d_logits, matrix) * factor, dot(d_logits.T, scaled)
    return total, d_hidden.astype(hidden.dtype), d_head.astype(head.dtype)
