"""The kernel of `flash_attention_backward`: dq, dk and dv in one pass over the tiles of keys.

    P = exp(score - lse)     dV = P^T dO     dS = P (dO V^T - delta)
    dK = scale dS^T Q        dQ = scale dS K

One block owns a tile of keys of one key head and goes over the tiles of queries that see it, of
every query head of the group, so that dk and dv are summed in registers and written once; or of a
share of these heads, and what the shares have of dk and dv is added by XLA. Scores
are transposed (rows are keys): P^T and dS^T then are the left operands of their products as they
lie in registers. Two consumer warpgroups have half of the keys each; dS^T goes through shared
memory, from which each computes its half of the tile's part of dQ. That part is added to a float32
array in memory by the copy engine (TMA). A counter for every tile of queries holds each block back
until the one before it has added its part: the order of every sum is fixed, and two calls give the
same bits. Of so many heads at a time the blocks start with the first tile of keys, the longest
ones, and each waits only for blocks that started before it; those that run together go over the
same queries, whose tiles and parts of dQ then stay in the L2. A third warpgroup, of few registers,
loads the tiles and adds the parts of dQ.
Heads wider than 128 do not fit: there a block has half as many keys, both consumers compute all
scores, and each has half of the columns of dk, dv and dQ.
Imported only by flash_attention_backward.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat, soft_cap
from pallas_kernels.device import LOG2E
from pallas_kernels.wgmma_tiles import LINE_BYTES, WGMMA_ROWS, rows_as_copied, wgmma_transforms

ROWS = WGMMA_ROWS  # also the columns of 16 bits that the widest swizzle takes
CONSUMERS = 2
ADDERS = 2  # warps that add parts of dQ, in turns: each has the time of two steps
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240  # 504 of the 3 x 168 that a block starts with


@dataclasses.dataclass(frozen=True)
class Config:
    """A block takes block_q queries a step; of q and of dout, so many steps are loaded ahead.

    early: dV is multiplied before dS is known, which holds P longer. dq_buffers: parts of dQ that
    wait to be added; ds_buffers: of dS, one of which the consumers have to hand back to each other.
    together: key heads, or shares of them, of all rows of the batch, whose tiles start before those
    of others.
    by_head: one query head after the other, instead of all of them for one tile of queries. shares:
    blocks among which the query heads of a key head are divided; dk and dv are then added later.
    """

    block_q: int = 64
    stages: int = 2
    do_stages: int = 2
    early: bool = True
    dq_buffers: int = 2
    ds_buffers: int = 1
    together: int = 16
    by_head: bool = False
    shares: int = 1


@dataclasses.dataclass(frozen=True)
class Static:
    """What the kernel is compiled for; shape is B, T, S, N, K, H, not padded."""

    config: Config
    shape: tuple[int, int, int, int, int, int]
    causal: bool
    scale: float
    window: int | None
    softcap: float | None
    lengths: bool
    segments: bool
    interpret: bool

    @property
    def begins(self) -> bool:
        """Whether the sum of a score begins with what of the log-sum-exp is taken off it."""
        return self.softcap is None and self.scale != 0

    @property
    def wide(self) -> bool:
        return self.shape[-1] > 2 * ROWS

    @property
    def chunks(self) -> int:
        """Of 64 columns, in a head."""
        return 4 if self.wide else -(-self.shape[-1] // ROWS)

    @property
    def depth(self) -> int:
        """Of a head's columns, those that wgmma has to sum over."""
        return -(-self.shape[-1] // 16) * 16

    @property
    def block_kv(self) -> int:
        return ROWS if self.wide else CONSUMERS * ROWS

    @property
    def tiles(self) -> tuple[int, int]:
        """Of queries, of keys."""
        _, t, s, *_ = self.shape
        return -(-t // self.config.block_q), -(-s // self.block_kv)


def shared_bytes(config: Config, width: int) -> int:
    """On chip: tiles of keys, values, queries and of dout, dS, parts of dQ, numbers, barriers."""
    c, wide = config, width > 2 * ROWS
    chunks, block_kv = (4, ROWS) if wide else (-(-width // ROWS), CONSUMERS * ROWS)
    rows = 2 * block_kv + (c.stages + c.do_stages) * c.block_q
    tiles = rows * chunks * LINE_BYTES
    ds = c.ds_buffers * CONSUMERS * c.block_q * LINE_BYTES
    dq = c.dq_buffers * CONSUMERS * 2 * ROWS * LINE_BYTES
    numbers = 4 * ((2 * c.stages + c.do_stages) * c.block_q + block_kv + 2 * ROWS)
    return tiles + ds + dq + numbers + 1024


def gradients(static: Static, q, k, v, dout, lse, delta, ranges, lengths, q_ids, kv_ids):
    """(sum of dQ's parts without the scale, float32 [B, N, T, H], padded; dk; dv). With shares dk
    and dv are float32, padded, and of as many heads as there are shares.

    delta, negative, and lse are float32 [B, N, tiles of queries, block_q]; lse is in bits and inf
    where nothing is seen, or with `begins` in units of a product of q and k, and negative.
    ranges: for a tile of keys, the first tile of queries that sees it and the end of them, neither
    falling from one tile of keys to the next, and both again of those that see all of it; for a
    tile of queries the first tile of keys. int32 [B, tiles], or [1, tiles] for all rows.
    Ids are padded to whole tiles, and those of queries are [B, tiles, block_q].
    """
    c, (b, t, s, n, kv_heads, h), interpret = static.config, static.shape, static.interpret
    (q_tiles, kv_tiles), chunks, wide = static.tiles, static.chunks, static.wide
    heads = kv_heads * c.shares
    group, dtype, block_q, block_kv = n // heads, q.dtype, c.block_q, static.block_kv
    parts = block_q // ROWS  # of a tile of queries; with two, each consumer has one of dQ
    owned = chunks // CONSUMERS if wide else chunks  # of dk's and dv's chunks, by a consumer
    owned_columns = owned * ROWS if wide else static.depth
    pieces = parts * chunks // 2  # of 64 columns, of a consumer's dQ
    assert parts * chunks == (4 if wide else 2), (block_q, chunks)
    hand_back = c.ds_buffers == 1 and not wide  # wide: a consumer reads only what it has written
    masked = static.causal or static.window is not None or static.lengths or static.segments
    masked = masked or s % block_kv > 0
    stages = {"q": c.stages, "do": c.do_stages}
    rows_of = {"q": "lse", "do": "delta"}

    inputs: dict[str, Any] = {"q": q, "k": k, "v": v, "do": dout, "lse": lse, "delta": delta}
    names = ("first", "end", "inner_first", "inner_end", "before")
    # one array: XLA starts a kernel for every constant that it can compute
    xp: Any = np if all(isinstance(x, np.ndarray) for x in ranges) else jnp
    numbers = [np.arange(2 * ROWS, dtype=np.int32), *(x.reshape(-1) for x in ranges)]
    starts = dict(zip(names, itertools.accumulate(map(np.size, numbers)), strict=False))
    inputs["numbers"] = jnp.asarray(xp.concatenate(numbers))
    rows_differ = ranges[0].shape[0] > 1
    if static.lengths:
        inputs["lengths"] = lengths
    if static.segments:
        inputs |= {"q_ids": q_ids, "kv_ids": kv_ids}

    def body(*refs, **scratch):
        source = dict(zip(inputs, refs, strict=False))
        dq_ref, dk_ref, dv_ref = refs[len(inputs) :]
        thread, task = lax.axis_index("group"), lax.axis_index("task")
        turn = None if interpret else pl.get_global(plgpu.SemaphoreType.REGULAR((b * n * q_tiles,)))
        start = task // (c.together * kv_tiles) * c.together
        task = task - start * kv_tiles
        rows = jnp.minimum(b * heads - start, c.together)
        tile, row = task // rows, start + lax.rem(task, rows)
        batch, share = row // heads, lax.rem(row, heads)
        kv_head = share // c.shares
        kv_start = tile * block_kv

        def number(name, at):
            size = q_tiles if name == "before" else kv_tiles
            return source["numbers"][starts[name] + at + (batch * size if rows_differ else 0)]

        first, end = number("first", tile), number("end", tile)
        total = group * (end - first)

        def columns(chunk):
            # what is not known is not checked: a copy may pass the end of a row of heads
            return pl.ds(task * 0 + chunk * ROWS, ROWS)

        def slot_of(at, what):
            return lax.rem(at, jnp.int32(stages[what]))

        def produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            keys = pl.ds(kv_start, block_kv)
            for what in ("k", "v"):
                for chunk in range(chunks):
                    plgpu.copy_gmem_to_smem(
                        source[what].at[batch, keys, kv_head, columns(chunk)],
                        rows_as_copied(scratch[what], (0, chunk), 0, block_kv, interpret),
                        scratch["kv_full"],
                    )
            if masked:
                numbers = source["numbers"].at[pl.ds(0, 2 * ROWS)]
                plgpu.copy_gmem_to_smem(numbers, scratch["numbers"], scratch["kv_full"])
            if static.segments:
                plgpu.copy_gmem_to_smem(
                    source["kv_ids"].at[batch, keys], scratch["kv_ids"], scratch["kv_full"]
                )

            def place(at):
                """Query head and tile of queries of a step, the last tile first."""
                if c.by_head:
                    steps = end - first
                    return share * group + at // steps, end - 1 - lax.rem(at, steps)
                head = 0 if group == 1 else lax.rem(at, jnp.int32(group))
                return share * group + head, end - 1 - at // group

            def load(at, what):
                (head, m), slot = place(at), slot_of(at, what)
                full = scratch[what + "_full"].at[slot]
                for chunk in range(chunks):
                    plgpu.copy_gmem_to_smem(
                        source[what].at[batch, pl.ds(m * block_q, block_q), head, columns(chunk)],
                        rows_as_copied(scratch[what], (slot, chunk), 0, block_q, interpret),
                        full,
                    )
                row = rows_of[what]
                plgpu.copy_gmem_to_smem(source[row].at[batch, head, m], scratch[row].at[slot], full)
                if static.segments and what == "q":
                    plgpu.copy_gmem_to_smem(
                        source["q_ids"].at[batch, m], scratch["q_ids"].at[slot], full
                    )

            def load_again(at, what):
                plgpu.barrier_wait(scratch[what + "_empty"].at[slot_of(at, what)])
                later = at + stages[what]
                pl.when(later < total)(lambda: load(later, what))

            def put(head, m, turns, piece, reduction_op):
                buffer = turns if c.dq_buffers > 1 else 0
                for consumer in range(CONSUMERS):
                    chunk, part = divmod(consumer * pieces + piece, parts)
                    for half in range(2):
                        if chunk * ROWS + half * (ROWS // 2) >= h:
                            continue  # the zeros that a head is padded with
                        rows = pl.ds(m * block_q + part * ROWS, ROWS)
                        to = pl.ds(chunk * ROWS + half * (ROWS // 2), ROWS // 2)
                        lead = (tile,) if interpret else ()
                        plgpu.copy_smem_to_gmem(
                            rows_as_copied(
                                scratch["dq"], (buffer, consumer, half), 0, ROWS, interpret
                            ),
                            dq_ref.at[*lead, batch, head, rows, to],
                            reduction_op=reduction_op,
                        )

            def load_all():
                for what, ahead in stages.items():
                    for at in range(ahead):
                        pl.when(at < total)(lambda at=at, what=what: load(jnp.int32(at), what))

                def step(at, _):
                    load_again(at, "do")
                    load_again(at, "q")
                    return 0

                if not interpret:
                    lax.fori_loop(0, total, step, 0)

            def add(at):
                head, m = place(at)
                turns = at % ADDERS if isinstance(at, int) else lax.rem(at, jnp.int32(ADDERS))
                counter = None if turn is None else turn.at[(batch * n + head) * q_tiles + m]
                rank = 0 if counter is None else tile - number("before", m)
                if counter is not None:
                    plgpu.semaphore_wait(counter, rank, decrement=False, memory_scope="gpu")
                for piece in range(pieces):
                    plgpu.barrier_wait(scratch["dq_full"].at[turns])
                    if counter is None:  # interpreted: a part for each tile of keys, added later
                        put(head, m, turns, piece, None)
                    else:
                        pl.when(rank == 0)(lambda piece=piece: put(head, m, turns, piece, None))
                        pl.when(rank > 0)(lambda piece=piece: put(head, m, turns, piece, "add"))
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(scratch["dq_empty"].at[turns])
                if counter is not None:
                    plgpu.wait_smem_to_gmem(0)
                    plgpu.semaphore_signal(counter, memory_scope="gpu")

            if interpret:  # one thread does in turns what warps do side by side

                def step(at, _):
                    load_again(at, "do")
                    add(at)
                    load_again(at, "q")
                    return 0

                load_all()
                lax.fori_loop(0, total, step, 0)
                plgpu.wait_smem_to_gmem(0)
                return

            @plgpu.warp_map
            def _(warp):
                pl.when(warp == 0)(load_all)

                @pl.when((warp > 0) & (warp <= ADDERS))
                def _():
                    def step(i, _):
                        add(i * ADDERS + warp - 1)
                        return 0

                    lax.fori_loop(0, (total + ADDERS - warp) // ADDERS, step, 0)

        def consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            wgmma = functools.partial(_compat.wgmma, interpret=interpret)
            ready = functools.partial(_compat.wgmma_ready, interpret=interpret)
            sums = functools.partial(wgmma, columns=owned_columns)
            wait = _compat.wgmma_wait
            start = 0 if wide else thread * ROWS
            mine = pl.ds(start, ROWS)
            length = source["lengths"][batch] if static.lengths else jnp.int32(s)
            behind = length - t  # of query 0
            inner_first, inner_end = number("inner_first", tile), number("inner_end", tile)
            cap = (static.softcap or 1) * LOG2E

            def own(ref):
                """Of the chunks of a head, those whose sums this consumer has."""
                return ref.at[pl.ds(thread * owned, owned)] if wide else ref

            def broadcast(ref, dimension):
                """Numbers of the rows (0) or of the columns (1) of scores, in shared memory."""
                x = _compat.load(ref, plgpu.Layout.WGMMA.reduce(1 - dimension))
                x = lax.broadcast_in_dim(x, (ROWS, block_q), (dimension,))
                return x if interpret else plgpu.layout_cast(x, plgpu.Layout.WGMMA)

            def seen(scores, m, slot):
                """Scores of keys that queries see; others are -inf."""
                # Both count from the tile of keys. What no step changes would be kept in registers,
                # a number a column: hence the queries' numbers come from shared memory.
                key = broadcast(scratch["numbers"].at[mine], 0)
                at = broadcast(scratch["numbers"].at[pl.ds(0, block_q)], 1)
                at = at + (behind + m * block_q - kv_start)
                mask = key < jnp.minimum(length, s) - kv_start
                if static.causal:
                    mask &= key <= at
                if static.window is not None:
                    mask &= key + static.window > at
                    if not static.causal:
                        mask &= key < at + static.window
                if static.segments:
                    ids = broadcast(scratch["q_ids"].at[slot], 1)
                    mask &= broadcast(scratch["kv_ids"].at[mine], 0) == ids
                return jnp.where(mask, scores, -jnp.inf)

            def weights(x, m, slot):
                """P, and P times what the soft cap leaves of a score's slope."""
                if static.softcap is None:
                    x = x * (static.scale * LOG2E)
                else:
                    x = cap * soft_cap.tanh(x, static.scale / static.softcap, interpret=interpret)
                if masked:
                    sees_all = (inner_first <= m) & (m < inner_end)
                    x = lax.cond(sees_all, lambda x: x, lambda x: seen(x, m, slot), x)
                p = jnp.exp2(x if static.begins else x - broadcast(scratch["lse"].at[slot], 1))
                if static.softcap is None:
                    return p.astype(dtype), p
                tanh = jnp.maximum(x * (1 / cap), -1.0)  # -inf has the weight 0
                return p.astype(dtype), p * (1 - tanh * tanh)

            def query_part(piece, ds, here):
                """64 columns of this consumer's part of dQ, in flight."""
                if wide:
                    left, right = (
                        ds.at[thread, 0],
                        scratch["k"].at[here, thread * 2 + piece],
                    )
                    return wgmma(None, left, right, transpose_a=True)
                chunk, part = thread // parts, lax.rem(thread, parts)
                dq = None
                for i in range(CONSUMERS):
                    left = ds.at[i, part]
                    right = scratch["k"].at[here, chunk, pl.ds(i * ROWS, ROWS)]
                    dq = wgmma(dq, left, right, transpose_a=True)
                return dq

            def step(at, carry):
                *tile_of_queries, dk, dv = carry
                m = tile_of_queries[0] if c.by_head else end - 1 - at // group
                slot, do_slot = slot_of(at, "q"), slot_of(at, "do")
                here = jnp.minimum(m, 0)  # 0: what is computed of it is not kept in registers
                ds = scratch["ds"].at[lax.rem(at, jnp.int32(2)) if c.ds_buffers > 1 else here]
                q, do = scratch["q"].at[slot], scratch["do"].at[do_slot]
                plgpu.barrier_wait(scratch["q_full"].at[slot])
                plgpu.barrier_wait(scratch["do_full"].at[do_slot])
                x, dp = None, broadcast(scratch["delta"].at[do_slot], 1)
                if static.begins:
                    x, dp = ready(broadcast(scratch["lse"].at[slot], 1), dp)
                else:
                    (dp,) = ready(dp)
                scores = functools.partial(wgmma, transpose_b=True, depth=static.depth)
                x = scores(x, scratch["k"].at[here, :, mine], q)
                dp = scores(dp, scratch["v"].at[here, :, mine], do)
                p16, p = weights(wait(1, x), m, slot)
                if c.early:
                    (p16,) = ready(p16)
                    dv = sums(dv, p16, own(do))
                dp = wait(int(c.early), dp)
                ds16 = (p * dp).astype(dtype)
                if hand_back:  # both have read what is there
                    pl.when(at > 0)(lambda: plgpu.barrier_wait(scratch["ds_empty"]))
                for i in range(parts):
                    to = ds.at[thread, i]
                    to[...] = ds16[:, i * ROWS : (i + 1) * ROWS]
                plgpu.commit_smem()
                if not wide:
                    plgpu.barrier_arrive(scratch["ds_full"])
                if not c.early:
                    (p16,) = ready(p16)
                    dv = sums(dv, p16, own(do))
                if not wide:
                    plgpu.barrier_wait(scratch["ds_full"])
                (ds16,) = ready(ds16)
                dq = query_part(0, ds, here)
                dk = sums(dk, ds16, own(q))
                dv = wait(2 if wide else 3, dv)
                plgpu.barrier_arrive(scratch["do_empty"].at[do_slot])
                dq = wait(1, dq)
                if hand_back:
                    plgpu.barrier_arrive(scratch["ds_empty"])
                turns = lax.rem(at, jnp.int32(ADDERS))
                for piece in range(pieces):
                    if piece:
                        ready()
                        dq = wait(0, query_part(piece, ds, here))
                    last = turns  # who had the buffer before
                    if not piece and c.dq_buffers == 1:
                        last = lax.rem(at + (ADDERS - 1), jnp.int32(ADDERS))
                    again = at >= (0 if piece else c.dq_buffers)
                    empty = scratch["dq_empty"].at[last]
                    pl.when(again)(functools.partial(plgpu.barrier_wait, empty))
                    for half in range(2):
                        to = scratch["dq"].at[turns if c.dq_buffers > 1 else 0, thread, half]
                        to[...] = dq[:, half * (ROWS // 2) : (half + 1) * (ROWS // 2)]
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(scratch["dq_full"].at[turns])
                dk = wait(0, dk)
                plgpu.barrier_arrive(scratch["q_empty"].at[slot])
                following = [jnp.where(m == first, end, m) - 1] if c.by_head else []
                return (*following, dk, dv)

            plgpu.barrier_wait(scratch["kv_full"])

            def zeros(size):
                x = jnp.zeros((ROWS, size), jnp.float32)
                return x if interpret else plgpu.layout_cast(x, plgpu.Layout.WGMMA)

            carry = ready(zeros(owned_columns), zeros(owned_columns))
            carry = (end - 1, *carry) if c.by_head else carry
            *_, dk, dv = lax.fori_loop(0, total, step, carry)
            for i in range(1, c.dq_buffers + 1):  # every phase of a barrier must be seen
                last = scratch["dq_empty"].at[lax.rem(total + (2 * ADDERS - i), jnp.int32(ADDERS))]
                pl.when(total >= i)(functools.partial(plgpu.barrier_wait, last))
            if hand_back:
                pl.when(total > 0)(lambda: plgpu.barrier_wait(scratch["ds_empty"]))
            if wide:  # the other consumer has read these columns of V too
                plgpu.barrier_arrive(scratch["done"])
                plgpu.barrier_wait(scratch["done"])
            rows = pl.ds(kv_start + start, ROWS)
            for result, ref in ((dk, dk_ref), (dv, dv_ref)):
                result = result * static.scale if ref is dk_ref else result
                if c.shares > 1:
                    which = pl.ds(thread * owned_columns if wide else 0, owned_columns)
                    ref.at[batch, rows, share, which][...] = result
                    continue
                if more := owned * ROWS - owned_columns:
                    result = jnp.concatenate([result, zeros(more)], axis=1)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                which = [thread * owned + i if wide else i for i in range(owned)]
                for i, chunk in enumerate(which):
                    scratch["v"][0, chunk, mine] = result[:, i * ROWS : (i + 1) * ROWS].astype(
                        dtype
                    )
                plgpu.commit_smem()
                for chunk in which:
                    plgpu.copy_smem_to_gmem(
                        rows_as_copied(scratch["v"], (0, chunk), start, ROWS, interpret),
                        ref.at[batch, rows, kv_head, columns(chunk)],
                    )
            plgpu.wait_smem_to_gmem(0)

        lax.cond(thread == CONSUMERS, produce, consume)

    def lines(*lead, dtype=dtype):
        line = LINE_BYTES // jnp.dtype(dtype).itemsize
        return plgpu.SMEM((*lead, line), dtype, transforms=wgmma_transforms(line, dtype))

    def barrier(arrivals, number=1):
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)

    scratch = {
        "k": lines(1, chunks, block_kv),
        "v": lines(1, chunks, block_kv),
        "q": lines(c.stages, chunks, block_q),
        "do": lines(c.do_stages, chunks, block_q),
        "ds": lines(c.ds_buffers, CONSUMERS, parts, ROWS),
        "dq": lines(c.dq_buffers, CONSUMERS, 2, ROWS, dtype=jnp.float32),
        "lse": plgpu.SMEM((c.stages, block_q), jnp.float32),
        "delta": plgpu.SMEM((c.do_stages, block_q), jnp.float32),
        "kv_full": barrier(2 * chunks + masked + static.segments),
        "q_full": barrier(chunks + 1 + static.segments, c.stages),
        "do_full": barrier(chunks + 1, c.do_stages),
        "q_empty": barrier(CONSUMERS, c.stages),
        "do_empty": barrier(CONSUMERS, c.do_stages),
        "dq_full": barrier(CONSUMERS, ADDERS),
        "dq_empty": barrier(1, ADDERS),
        "done" if wide else "ds_full": barrier(CONSUMERS),
    }
    if hand_back:
        scratch["ds_empty"] = barrier(CONSUMERS)
    if masked:
        scratch["numbers"] = plgpu.SMEM((2 * ROWS,), jnp.int32)
    if static.segments:
        scratch["kv_ids"] = plgpu.SMEM((block_kv,), jnp.int32)
        scratch["q_ids"] = plgpu.SMEM((c.stages, block_q), jnp.int32)
    k_shape = jax.ShapeDtypeStruct(k.shape, dtype)
    if c.shares > 1:
        padded = (b, kv_tiles * block_kv, heads, chunks * ROWS)
        k_shape = jax.ShapeDtypeStruct(padded, jnp.float32)
    dq_shape = (b, n, q_tiles * block_q, chunks * ROWS)
    run = _compat.kernel(
        body,
        name="flash_attention_backward",
        out_type=[
            jax.ShapeDtypeStruct((kv_tiles, *dq_shape) if interpret else dq_shape, jnp.float32),
            *[k_shape] * 2,
        ],
        scratch_types=scratch,
        grid=(kv_tiles * b * heads,),
        grid_names=("task",),
        num_threads=CONSUMERS + 1,
        thread_name="group",
        interpret=interpret,
        approx_math=True,
        unsafe_no_auto_barriers=True,  # every thread arrives; what is stored is committed
    )
    # Under vmap each slice is a launch of its own, for those of one launch share its counters
    dq, dk, dv = sequential_vmap(run)(*inputs.values())
    if interpret:
        first, end = map(jnp.asarray, ranges[:2])
        m = jnp.arange(q_tiles * block_q, dtype=jnp.int32)[:, None, None] // block_q
        wrote = (first[None] <= m) & (m < end[None])  # [T, B, tiles of keys]
        wrote = jnp.transpose(wrote, (2, 1, 0))[:, :, None, :, None]
        dq = jnp.sum(jnp.where(wrote, dq, jnp.float32(0)), axis=0)
    return dq, dk, dv
