"""What is known of a call of `flash_attention` before its forward kernel runs: `plan_of`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.device import LOG2E
from pallas_kernels.flash_attention_blocks import block_ranges
from pallas_kernels.flash_attention_schedule import schedule, section, steps
from pallas_kernels.wgmma_tiles import WGMMA_ROWS


@dataclasses.dataclass(frozen=True)
class Config:
    """A block takes 64 queries for each of its consumers, and kv_block keys at a time.

    stages: blocks of keys, and of values, that are loaded ahead. q_stages: tiles of queries that
    are. turns: whether consumers take turns at the tensor cores.
    """

    kv_block: int = 128
    consumers: int = 2
    stages: int = 2
    q_stages: int = 2
    turns: bool = True


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel is compiled for."""

    config: Config
    num_sms: int
    interpret: bool
    causal: bool
    scale: float
    window: int | None
    softcap: float | None
    save_lse: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known of a call by its shapes. most: tiles of one block; None if each has one."""

    static: Static
    t: int
    s: int
    n: int
    h: int  # numbers of a head
    group: int  # query heads a key head
    tile_rows: int
    q_tiles: int
    kv_blocks: int
    blocks: int
    most: int | None
    segmented: bool
    has_lengths: bool

    @property
    def masked(self) -> bool:
        """Whether some query of a block of keys may not see them all."""
        static = self.static
        masked = static.causal or static.window is not None or self.segmented or self.has_lengths
        return masked or self.s % static.config.kv_block > 0


def plan_of(
    static: Static, q, k, q_segment_ids, kv_segment_ids, kv_lengths, sinks
) -> tuple[Plan, dict[str, jax.Array]]:
    """The plan, and what a kernel is given beside q, k and v, by name."""
    c = static.config
    (b, t, n, h), (_, s, kv_heads, _) = q.shape, k.shape
    tile_rows = c.consumers * WGMMA_ROWS
    q_tiles, kv_blocks = pl.cdiv(t, tile_rows), pl.cdiv(s, c.kv_block)
    rows = b * n
    blocks = min(static.num_sms, rows * q_tiles)
    segmented = q_segment_ids is not None
    order, most = None, None  # nothing to look up where each block has one tile
    if rows * q_tiles > blocks:
        sizes = {"tile_rows": tile_rows, "kv_block": c.kv_block}
        mask: dict[str, Any] = {"causal": static.causal, "window": static.window}
        order = schedule(
            blocks,
            rows,
            section(rows, n // kv_heads, 2 * s * h * q.dtype.itemsize),
            # how long a document is nobody knows yet: tiles side by side go to all blocks in turn
            tuple(1 if segmented else steps(i, t, s, **sizes, **mask) for i in range(q_tiles)),
        )
        most = len(order) // blocks - 1
    ranges = None
    if segmented:
        ranges = block_ranges(
            q_segment_ids, kv_segment_ids, q_block=tile_rows, kv_block=c.kv_block
        ).reshape(-1)
        q_segment_ids, kv_segment_ids = (
            jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, -ids.shape[1] % size))).reshape(-1)
            for ids, size in ((q_segment_ids, tile_rows), (kv_segment_ids, c.kv_block))
        )
    optional = {
        "order": None if order is None else jnp.asarray(order, jnp.int32),
        "ranges": ranges,
        "q_ids": q_segment_ids,
        "kv_ids": kv_segment_ids,
        "lengths": None if kv_lengths is None else kv_lengths.astype(jnp.int32),
        "sinks": None if sinks is None else sinks * jnp.float32(LOG2E),
    }
    found = Plan(
        static,
        t,
        s,
        n,
        h,
        n // kv_heads,
        tile_rows,
        q_tiles,
        kv_blocks,
        blocks,
        most,
        segmented,
        kv_lengths is not None,
    )
    return found, {name: x for name, x in optional.items() if x is not None}


def bend_and_factor(static: Static) -> tuple[float, float]:
    """A score becomes a power of two of it: bent * factor, and factor is positive.

    With a soft cap c, `soft_cap.minus_sigmoid` bends it to (tanh(score / c) - 1) / 2, so that the
    power is LOG2E (c tanh(score / c) - c).
    """
    if static.softcap is not None:
        return static.scale / static.softcap, 2 * static.softcap * LOG2E
    return (1.0, LOG2E * static.scale) if static.scale > 0 else (static.scale, LOG2E)
