"""The backward pass of attention: (dq, dk, dv, dsinks), with nothing of size T x S in memory.

    P = exp(score - lse)     dV = P^T dO     dS = P (dO V^T - delta)
    dK = scale dS^T Q        dQ = scale dS K

with delta = rowsum(out dout) - dlse, and a sink's -sum(exp(sink - lse) delta). How it is computed
is said in flash_attention_backward_kernel; here is what surrounds it: delta, which tiles meet, and
dQ's way from float32 [B, N, T, H] to q's.
Memory beyond the result: that array, lse and delta; and where blocks share a key head's query heads
(Config.shares), what each has of dk and dv, in float32.
Sources: Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608.
`flash_attention` is how a user calls it, and says what it refuses.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import device as device_lib
from pallas_kernels.device import LOG2E, SHARED_BYTES, Device
from pallas_kernels.flash_attention_backward_kernel import (
    ADDERS,
    ROWS,
    Config,
    Static,
    gradients,
    shared_bytes,
)
from pallas_kernels.flash_attention_blocks import block_ranges

NAME = "flash_attention_backward"


def _ranges(static: Static, lengths, q_ids, kv_ids):
    """For a tile of keys: first tile of queries that sees it and the end of them, and of those that
    see all of it; for a tile of queries: first tile of keys, and if there is one. int32 [B, tiles],
    or [1, tiles] where rows do not differ.

    Neither `first` nor `end` falls from one tile of keys to the next, so the tiles of keys that add
    to one of queries are neighbours, and a block knows how many add before itself.
    """
    c, (b, t, s, *_) = static.config, static.shape
    q_tiles, kv_tiles = static.tiles
    # constants of the program, where no number decides
    xp: Any = jnp if static.lengths or static.segments else np
    if lengths is None:
        lengths = xp.full((b if static.segments else 1,), s, np.int32)
    b = lengths.shape[0]
    # keys count from where query 0 sits
    start = xp.arange(kv_tiles, dtype=np.int32)[None] * static.block_kv - (lengths - t)[:, None]
    last = start + (static.block_kv - 1)
    there = (xp.minimum(lengths, s) - lengths + t)[:, None]  # where the keys that are there end
    present = xp.minimum(last, there - 1)
    first = inner_first = xp.zeros((b, kv_tiles), np.int32)  # queries, here still
    final = inner_final = xp.full((b, kv_tiles), t - 1, np.int32)
    if static.causal:
        first, inner_first = xp.maximum(first, start), xp.maximum(inner_first, last)
    if static.window is not None:
        final = xp.minimum(final, present + (static.window - 1))
        inner_final = xp.minimum(inner_final, start + (static.window - 1))
        if not static.causal:
            first = xp.maximum(first, start - (static.window - 1))
            inner_first = xp.maximum(inner_first, last - (static.window - 1))
    end = xp.where((present >= start) & (final >= 0), final // c.block_q + 1, 0)
    first = first // c.block_q
    inner_first = -(-inner_first // c.block_q)
    # queries past T see nothing in any case
    inner_final = xp.where(inner_final >= t - 1, q_tiles * c.block_q - 1, inner_final)
    inner_end = xp.where(last < there, (inner_final + 1) // c.block_q, 0)
    if static.segments:
        same = block_ranges(kv_ids, q_ids, q_block=static.block_kv, kv_block=c.block_q)
        first, end = xp.maximum(first, same[..., 0]), xp.minimum(end, same[..., 1])
        inner_first = xp.maximum(inner_first, same[..., 2])
        inner_end = xp.minimum(inner_end, same[..., 3])
    empty = first >= end
    first, end = xp.where(empty, q_tiles, first), xp.where(empty, 0, end)
    # what never falls; a tile that nothing sees takes what its neighbours have
    if xp is np:
        first = np.minimum.accumulate(first[:, ::-1], axis=1)[:, ::-1]
        end = np.maximum.accumulate(end, axis=1)
    else:
        first, end = lax.cummin(first, axis=1, reverse=True), lax.cummax(end, axis=1)
    first = xp.minimum(first, end)
    tile = xp.arange(q_tiles, dtype=np.int32)[None, :, None]
    before = xp.sum(end[:, None, :] <= tile, axis=2)
    after = xp.sum(first[:, None, :] <= tile, axis=2)
    numbers = [first, end, inner_first, inner_end, before]
    return *(xp.asarray(x).astype(np.int32) for x in numbers), after > before


def backward(
    q,
    k,
    v,
    out,
    lse,
    dout,
    dlse=None,
    *,
    causal,
    scale,
    window,
    softcap,
    q_segment_ids=None,
    kv_segment_ids=None,
    kv_lengths=None,
    sinks=None,
    config: Config | None = None,
    interpret: bool = False,
):
    """(dq, dk, dv) in the dtypes of q, k and v, and of the sinks, or None.

    lse and dlse are float32 [B, N, T].
    """
    (b, t, n, h), (_, s, kv_heads, _) = q.shape, k.shape
    if config is None:
        device = device_lib.INTERPRETED if interpret else device_lib.current()
        config = default_config(q, k, device=device)
    elif problem := config_problem(config, q, k):
        raise ValueError(f"{NAME}: {config}: {problem}")
    if kv_lengths is not None:  # keys past S are not there, but the queries sit where they say
        kv_lengths = kv_lengths.astype(jnp.int32)
    static = Static(
        config,
        (b, t, s, n, kv_heads, h),
        causal,
        scale,
        window,
        softcap,
        kv_lengths is not None,
        q_segment_ids is not None,
        interpret,
    )
    return _backward(
        static, q, k, v, out, lse, dout, dlse, q_segment_ids, kv_segment_ids, kv_lengths, sinks
    )


@functools.partial(jax.jit, static_argnums=0)
def _backward(static: Static, q, k, v, out, lse, dout, dlse, q_ids, kv_ids, lengths, sinks):
    c, (b, t, s, n, _, h) = static.config, static.shape
    q_tiles, kv_tiles = static.tiles
    rows = q_tiles * c.block_q
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    delta = jnp.swapaxes(delta, 1, 2)
    if dlse is not None:
        delta = delta - jnp.where(lse == -jnp.inf, jnp.float32(0), dlse)
    dsinks = None
    if sinks is not None:  # a score's gradient is weight (dweight - delta), and dweight is 0 here
        weights = jnp.exp(jnp.where(lse == -jnp.inf, -jnp.inf, sinks[None, :, None] - lse))
        dsinks = -jnp.sum(weights * delta, axis=(0, 2))

    def by_tile(x, fill):
        x = jnp.pad(x, ((0, 0), (0, 0), (0, rows - t)), constant_values=fill)
        return x.reshape(b, n, q_tiles, c.block_q)

    # A query that sees nothing, or is not there, has weights exp2(-inf) = 0.
    unit = -1 / static.scale if static.begins else LOG2E
    nothing = math.copysign(math.inf, unit)  # times the scale it is -inf, whatever the scale's sign
    lse = jnp.where(lse == -jnp.inf, nothing, lse * jnp.float32(unit))
    *ranges, seen = _ranges(static, lengths, q_ids, kv_ids)
    if static.segments:
        q_ids = jnp.pad(q_ids.astype(jnp.int32), ((0, 0), (0, rows - t)))
        q_ids = q_ids.reshape(b, q_tiles, c.block_q)
        kv_ids = jnp.pad(kv_ids.astype(jnp.int32), ((0, 0), (0, kv_tiles * static.block_kv - s)))
    few_q, few_k = max(0, c.block_q - t), max(0, static.block_kv - s)  # a copy is of a whole tile
    pad = lambda x, few: jnp.pad(x, ((0, 0), (0, few), (0, 0), (0, 0))) if few else x  # noqa: E731
    dq, dk, dv = gradients(
        static,
        pad(q, few_q),
        pad(k, few_k),
        pad(v, few_k),
        pad(dout, few_q),
        by_tile(lse, nothing),
        by_tile(-delta, 0.0),
        ranges,
        lengths,
        q_ids,
        kv_ids,
    )
    # Nobody has written a tile of queries that no tile of keys is for.
    dq = dq.reshape(b, n, q_tiles, c.block_q, dq.shape[-1])
    dq = dq * jnp.float32(static.scale)
    if not (isinstance(seen, np.ndarray) and seen.all()):
        dq = jnp.where(seen[:, None, :, None, None], dq, jnp.float32(0))
    dq = dq.reshape(b, n, rows, -1)[:, :, :t, :h].astype(q.dtype)
    if c.shares > 1:
        dk, dv = (
            jnp.sum(x.reshape(*x.shape[:2], -1, c.shares, x.shape[-1]), axis=3)[..., :h]
            for x in (dk, dv)
        )
    return jnp.swapaxes(dq, 1, 2), *(x[:, :s].astype(q.dtype) for x in (dk, dv)), dsinks


def default_config(q, k, *, device: Device) -> Config:
    """By the width of the heads; in shares where there are fewer blocks than take all of a GPU."""
    # tile by tile 32768 tokens take 41.6 ms, head by head 40.9; 8192 the same; 2048 1.41, not 1.70
    config = Config(64, by_head=q.shape[1] > 8192)
    if q.shape[-1] > 2 * ROWS:
        # of dout no second tile fits beside what is there; early dV would spill a half more
        config = Config(64, do_stages=1, early=False, dq_buffers=1)
    elif q.shape[-1] <= ROWS:
        # twice as many scores, and no registers left to hold P in; 448 TFLOP/s against 428 with
        # the buffers of wider heads (8192 tokens, H200)
        config = Config(128, early=False, dq_buffers=1, ds_buffers=2)
    (b, s, kv_heads, _), group = k.shape, q.shape[2] // k.shape[2]
    blocks = b * kv_heads * -(-s // (ROWS if q.shape[-1] > 2 * ROWS else 2 * ROWS))
    shares = [i for i in range(1, group + 1) if group % i == 0]
    enough = [i for i in shares if 2 * blocks * i >= 3 * device.num_sms]
    return dataclasses.replace(config, shares=(enough or shares[-1:])[0])


def config_problem(config: Config, q, k) -> str | None:
    """What the kernel or the hardware has against a config."""
    c, width, group = config, q.shape[-1], q.shape[2] // k.shape[2]
    block_q = 2 * ROWS if width <= ROWS else ROWS
    size_bytes = shared_bytes(config, width)
    problems = {
        f"block_q must be {block_q} for heads of {width}": c.block_q != block_q,
        "stages and do_stages must be at least 1": min(c.stages, c.do_stages) < 1,
        f"dq_buffers and ds_buffers must be 1 or {ADDERS}": (
            not {c.dq_buffers, c.ds_buffers} <= {1, ADDERS}
        ),
        "together must be at least 1": c.together < 1,
        f"shares must divide the {group} query heads of a key head": (
            c.shares < 1 or group % c.shares != 0
        ),
        f"takes {size_bytes} of {SHARED_BYTES} bytes on chip": size_bytes > SHARED_BYTES,
    }
    return next((text for text, wrong in problems.items() if wrong), None)
