"""Which blocks of keys a block of queries meets: by arithmetic, and by segment ids.

Shared by flash_attention and its backward pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def block_ranges(
    q_segment_ids: Int[Array, "B T"],
    kv_segment_ids: Int[Array, "B S"],
    *,
    q_block: int,
    kv_block: int,
) -> Int[Array, "B Q 4"]:
    """For each block of q_block queries: first and last + 1 of the blocks of kv_block keys that may
    hold a segment of its own; then of those blocks in which every pair agrees, one run of them.

    What is outside the first range has no segment in common with the queries (the ranges of their
    ids do not meet: exact for sorted ids); inside, ids must be compared. A range may be empty.
    """

    def ends(ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % size)), mode="edge")
        blocks = ids.reshape(ids.shape[0], -1, size)
        return blocks.min(axis=-1), blocks.max(axis=-1)

    q_low, q_high = (x[:, :, None] for x in ends(q_segment_ids, q_block))
    kv_low, kv_high = (x[:, None, :] for x in ends(kv_segment_ids, kv_block))
    meets = (q_low <= kv_high) & (kv_low <= q_high)
    agrees = (q_low == q_high) & (kv_low == q_low) & (kv_high == q_low)
    index = jnp.arange(meets.shape[-1], dtype=jnp.int32)[None, None, :]

    def first(where: jax.Array) -> jax.Array:
        return jnp.min(jnp.where(where, index, index.size), axis=-1)

    last = jnp.max(jnp.where(meets, index + 1, 0), axis=-1)
    start = first(agrees)
    end = first(~agrees & (index >= start[..., None]))
    return jnp.stack([first(meets), last, start, end], axis=-1).astype(jnp.int32)
