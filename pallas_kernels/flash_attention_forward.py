"""The forward kernel of `flash_attention`.

One block stays on each multiprocessor. A tile is 64 queries of one head for each consumer; tiles
come in an order that shares keys and values in the L2 and puts the longest first. A warpgroup of
few registers brings queries, keys and values through the copy engine (TMA), keys and values into
rings of stages, and runs ahead into the next tile. Each consumer warpgroup goes through the blocks
of keys from the last to the first: while the tensor cores multiply the weights of one block by its
values, it computes the weights of the next from scores that they finished before. Consumers take
turns in giving the tensor cores work, so that the softmax of one runs under the products of the
other. Scores and weights never leave the registers. Only blocks that some query of the tile sees
are visited, and only those that some query does not wholly see are masked.
Imported only by flash_attention.py. Source: Shah et al. 2024 (FlashAttention-3), arXiv:2407.08608.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.attention_reference import LOG2E
from pallas_kernels.flash_attention_blocks import block_ranges
from pallas_kernels.flash_attention_schedule import schedule, section, steps
from pallas_kernels.wgmma_tiles import WGMMA_ROWS, rows_as_copied, wgmma_transforms

REGISTERS = {1: (None, None), 2: (24, 240), 3: (32, 160)}  # of the producer and each consumer


@dataclasses.dataclass(frozen=True)
class Config:
    """A block takes 64 queries for each of its consumers, and kv_block keys at a time.

    stages: blocks of keys, and of values, that are loaded ahead. q_stages: tiles of queries that
    are. turns: whether consumers take turns at the tensor cores. ahead: whether the first scores of
    a tile are computed beside the last sums of the one before.
    """

    kv_block: int = 128
    consumers: int = 2
    stages: int = 2
    q_stages: int = 2
    turns: bool = True
    ahead: bool = False


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


def line_width(head_width: int) -> int:
    """Numbers a row of shared memory, of 128 or 64 bytes: what pads a head least."""
    return min((64, 32), key=lambda line: -(-head_width // line) * line)


def padded_width(head_width: int) -> int:
    """Of a head in shared memory and in registers."""
    line = line_width(head_width)
    return -(-head_width // line) * line


def shared_bytes(config: Config, head_width: int, itemsize: int = 2) -> int:
    """On chip: queries, stages of keys and values, segment ids, barriers."""
    c, width = config, padded_width(head_width)
    rows = c.q_stages * c.consumers * WGMMA_ROWS + 2 * c.stages * c.kv_block
    ids = 4 * (c.q_stages * c.consumers * WGMMA_ROWS + c.stages * c.kv_block)
    return rows * width * itemsize + ids + 2048


def forward(static: Static, q, k, v, q_segment_ids, kv_segment_ids, kv_lengths, sinks):
    """(out [B, T, N, H], lse float32 [B, N, T], natural logarithm; None unless save_lse)."""
    c = static.config
    (b, t, n, h), (_, s, kv_heads, _) = q.shape, k.shape
    line, dtype = line_width(h), q.dtype
    width = padded_width(h)
    parts = width // line
    tile_rows = c.consumers * WGMMA_ROWS
    q_tiles, kv_blocks = pl.cdiv(t, tile_rows), pl.cdiv(s, c.kv_block)
    rows = b * n
    blocks = min(static.num_sms, rows * q_tiles)
    segmented = q_segment_ids is not None
    order, most = None, 1  # nothing to look up where each block has one tile
    if rows * q_tiles > blocks:
        sizes = {"tile_rows": tile_rows, "kv_block": c.kv_block}
        mask: dict[str, Any] = {"causal": static.causal, "window": static.window}
        order = schedule(
            blocks,
            rows,
            section(rows, n // kv_heads, 2 * s * h * dtype.itemsize),
            # how long a document is nobody knows yet: tiles side by side go to all blocks in turn
            tuple(1 if segmented else steps(i, t, s, **sizes, **mask) for i in range(q_tiles)),
        )
        most = len(order) // blocks - 1
    # So that the last tile is like the others, one more follows it, of which nothing but the first
    # scores are computed.
    ahead = c.ahead
    has_lengths = kv_lengths is not None
    masked = static.causal or static.window is not None or segmented or has_lengths
    masked = masked or s % c.kv_block > 0
    # a score becomes a power of two of it: bent * factor, and factor is positive
    bend = static.scale if static.softcap is None else static.scale / static.softcap
    factor = LOG2E if static.softcap is None else static.softcap * LOG2E
    if static.softcap is None and bend > 0:
        bend, factor = 1.0, LOG2E * bend
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

    def body(q_ref, k_ref, v_ref, rest, out_ref, lse_ref, **scratch):
        group = lax.axis_index("group")
        block = lax.axis_index("block")
        i32 = jnp.int32
        my_tiles = rest["order"][block] if order else i32(1)

        def tile_at(i):
            """What the i-th tile of this block is; behind the last, something."""
            return rest["order"][blocks + block * most + i] if order else block

        def tile_of(index) -> dict[str, Any]:
            """Batch, head and first query of a tile, and its blocks of keys."""
            row, down = index // i32(q_tiles), lax.rem(index, i32(q_tiles))
            batch, head = row // i32(n), lax.rem(row, i32(n))
            start = down * tile_rows
            keys = rest["lengths"][batch] if has_lengths else i32(s)
            tile = {"batch": batch, "head": head, "start": start, "keys": keys}
            last = jnp.minimum(start + (tile_rows - 1), t - 1)
            low, high = limits(tile, start)[0], limits(tile, last)[1]
            first = jnp.maximum(low, 0) // i32(c.kv_block)
            end = jnp.maximum(high + 1, 0) + (c.kv_block - 1)
            end = jnp.minimum(end // i32(c.kv_block), kv_blocks)
            same = (i32(0), i32(kv_blocks))
            if segmented:
                at = (batch * q_tiles + down) * 4
                first = jnp.maximum(first, rest["ranges"][at])
                end = jnp.minimum(end, rest["ranges"][at + 1])
                same = (rest["ranges"][at + 2], rest["ranges"][at + 3])
            # a tile that sees nothing visits one block, too, and masks all of it
            first = jnp.minimum(first, kv_blocks - 1)
            return tile | {"first": first, "end": jnp.maximum(end, first + 1), "same": same}

        def limits(tile, query):
            """First and last key that a query sees, segments apart."""
            at = tile["keys"] - t + query
            low, high = i32(0), i32(s - 1)
            if static.causal:
                high = jnp.minimum(at, high)
            elif has_lengths:
                high = jnp.minimum(tile["keys"] - 1, high)
            if static.window is not None:
                low = at - (static.window - 1)
                if not static.causal:
                    high = jnp.minimum(at + (static.window - 1), high)
            return low, high

        def tile_as_copied(name, *index):
            tile = scratch[name]
            return rows_as_copied(tile, index, 0, tile.shape[-2], static.interpret)

        def columns(part, traced):
            """A part of a head, whose end may lie past its width: JAX must not know where."""
            return pl.ds(traced * 0 + part * line if h % line else part * line, line)

        def slot_of(at):
            return lax.rem(at, i32(c.stages))

        def q_slot_of(i):
            return lax.rem(i, i32(c.q_stages))

        def produce():
            if (registers := REGISTERS[c.consumers][0]) is not None:
                plgpu.set_max_registers(registers, action="decrease")

            def load_queries(i, where):
                batch, head, q_slot = where["batch"], where["head"], q_slot_of(i)

                @pl.when(i >= c.q_stages)
                def _():
                    plgpu.barrier_wait(scratch["q_empty"].at[q_slot])

                full = scratch["q_full"].at[q_slot]
                for consumer in range(c.consumers):
                    taken = pl.ds(where["start"] + consumer * WGMMA_ROWS, WGMMA_ROWS)
                    for part in range(parts):
                        plgpu.copy_gmem_to_smem(
                            q_ref.at[batch, taken, head, columns(part, batch)],
                            tile_as_copied("q", q_slot, consumer, part),
                            full,
                        )
                if segmented:
                    source = pl.ds(batch * (q_tiles * tile_rows) + where["start"], tile_rows)
                    target = scratch["q_ids"].at[pl.ds(q_slot * tile_rows, tile_rows)]
                    plgpu.copy_gmem_to_smem(rest["q_ids"].at[source], target, full)

            def load_block(name, where, step, at):
                batch, kv_head = where["batch"], where["head"] // i32(n // kv_heads)
                down, slot = (where["end"] - 1 - step) * c.kv_block, slot_of(at)

                @pl.when(at >= c.stages)
                def _():
                    plgpu.barrier_wait(scratch[f"{name}_empty"].at[slot])

                full = scratch[f"{name}_full"].at[slot]
                source = {"k": k_ref, "v": v_ref}[name]
                for part in range(parts):
                    plgpu.copy_gmem_to_smem(
                        source.at[batch, pl.ds(down, c.kv_block), kv_head, columns(part, batch)],
                        tile_as_copied(name, slot, part),
                        full,
                    )
                if segmented and name == "k":
                    ids = pl.ds(batch * (kv_blocks * c.kv_block) + down, c.kv_block)
                    target = scratch["kv_ids"].at[pl.ds(slot * c.kv_block, c.kv_block)]
                    plgpu.copy_gmem_to_smem(rest["kv_ids"].at[ids], target, full)

            def tile(i, carry):
                at, index = carry
                following = tile_at(i + 1)  # it arrives while this one is loaded
                where = tile_of(index)
                load_queries(i, where)

                def load(step, at):
                    load_block("k", where, step, at)
                    load_block("v", where, step, at)
                    return at + 1

                at = lax.fori_loop(i32(0), where["end"] - where["first"], load, at)
                return at, following

            steps, index = lax.fori_loop(i32(0), my_tiles, tile, (i32(0), tile_at(0)))
            if ahead:
                where = tile_of(index)
                load_queries(my_tiles, where)
                load_block("k", where, 0, steps)
            # every phase of a barrier must be seen
            for name, size, done in (
                ("q_empty", c.q_stages, my_tiles + int(ahead)),
                ("k_empty", c.stages, steps + int(ahead)),
                ("v_empty", c.stages, steps),
            ):
                for slot in range(size):

                    @pl.when(done > slot)
                    def _(name=name, slot=slot):
                        plgpu.barrier_wait(scratch[name].at[i32(slot)])

        def take_turn():
            if c.turns and c.consumers > 1:
                plgpu.barrier_wait(scratch["turn"].at[group])

        def end_turn():
            if c.turns and c.consumers > 1:
                following = lax.rem(group + 1, i32(c.consumers))
                plgpu.barrier_arrive(scratch["turn"].at[following])

        def consume():
            if (registers := REGISTERS[c.consumers][1]) is not None:
                plgpu.set_max_registers(registers, action="increase")
            row_layout = plgpu.Layout.WGMMA.reduce(1)
            scores_shape = (WGMMA_ROWS, c.kv_block)

            def filled(shape, value, layout):
                return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

            def wide(x, columns):
                return lax.broadcast_in_dim(x, (WGMMA_ROWS, columns), (0,))

            def masked_out(tile, scores, at, j):
                """-inf for what a query does not see; by columns of eight, of which a thread has
                two: so their places are numbers in the program and take no registers.
                """
                rows = plgpu.broadcasted_iota(i32, (WGMMA_ROWS,), 0, layout=row_layout)
                columns = plgpu.broadcasted_iota(i32, (WGMMA_ROWS, 8), 1, layout=plgpu.Layout.WGMMA)
                low, high = (
                    (wide(x, 8) if x.ndim else x) - columns
                    for x in (y - j * c.kv_block for y in limits(tile, tile["row"] + rows))
                )
                parts = []
                for column in range(0, c.kv_block, 8):
                    seen = high >= column
                    if static.window is not None:
                        seen = seen & (low <= column)
                    part = scores[:, column : column + 8]
                    parts.append(jnp.where(seen, part, -jnp.inf))
                scores = jnp.concatenate(parts, axis=1)
                if segmented:
                    mine = ids("q_ids", tile["q_ids"], WGMMA_ROWS, 0)
                    theirs = ids("kv_ids", slot_of(at) * c.kv_block, c.kv_block, 1)
                    scores = jnp.where(mine == theirs, scores, -jnp.inf)
                return scores

            def ids(name, start, size, dimension):
                layout = plgpu.Layout.WGMMA.reduce(1 - dimension)
                part = _compat.load(scratch[name].at[pl.ds(start, size)], layout)
                part = lax.broadcast_in_dim(part, scores_shape, (dimension,))
                return plgpu.layout_cast(part, plgpu.Layout.WGMMA)

            def softmax(tile, scores, at, j, top, total, is_masked):
                """The weights of a block and by how much what was summed before is too large."""
                if static.softcap is not None:  # tanh, which the hardware has to 11 bits only
                    power = jnp.exp2(scores * jnp.float32(2 * LOG2E * bend))
                    scores = 1.0 - 2.0 / (1.0 + power)
                elif bend != 1.0:
                    scores = scores * jnp.float32(bend)
                if is_masked:
                    scores = masked_out(tile, scores, at, j)
                new_top = jnp.maximum(top, scores.max(axis=1) * jnp.float32(factor))
                anchor = new_top
                if is_masked:  # a row that has seen nothing yet
                    anchor = jnp.where(new_top == -jnp.inf, jnp.float32(0), new_top)
                shrink = jnp.exp2(top - anchor)
                weights = jnp.exp2(scores * jnp.float32(factor) - wide(anchor, c.kv_block))
                total = total * shrink + weights.sum(axis=1)
                return weights, new_top, total, shrink

            def give_back_queries(i):
                """The result, which lies in the place of a tile's queries, has left it."""
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(scratch["q_empty"].at[q_slot_of(i)])

            def wait_for(name, at):
                plgpu.barrier_wait(scratch[f"{name}_full"].at[slot_of(at)])

            def multiply_keys(i, at):
                return _compat.wgmma(
                    None,
                    scratch["q"].at[q_slot_of(i), group],
                    scratch["k"].at[slot_of(at)],
                    transpose_b=True,
                    interpret=static.interpret,
                )

            def multiply_values(sums, weights, at):
                return _compat.wgmma(
                    sums,
                    weights,
                    scratch["v"].at[slot_of(at)],
                    interpret=static.interpret,
                )

            def first_scores(i, at):
                plgpu.barrier_wait(scratch["q_full"].at[q_slot_of(i)])
                wait_for("k", at)
                take_turn()
                _compat.wgmma_ready(interpret=static.interpret)
                scores = multiply_keys(i, at)
                end_turn()
                return _compat.wgmma_wait(0, scores)

            def tile(i, carry):
                at, index, *scores = carry
                following = tile_at(i + 1)
                where = tile_of(index)
                q_slot = q_slot_of(i)
                row = where["start"] + group * WGMMA_ROWS
                where |= {"row": row, "q_ids": q_slot * tile_rows + group * WGMMA_ROWS}
                first, end = where["first"], where["end"]

                def step(is_masked, step, carry):
                    sums, weights, top, total, at = carry
                    wait_for("k", at)
                    wait_for("v", at - 1)  # nothing but products between the products
                    take_turn()
                    sums, weights = _compat.wgmma_ready(sums, weights, interpret=static.interpret)
                    scores = multiply_keys(i, at)
                    sums = multiply_values(sums, weights, at - 1)
                    end_turn()
                    scores = _compat.wgmma_wait(1, scores)
                    if not (segmented and is_masked):
                        plgpu.barrier_arrive(scratch["k_empty"].at[slot_of(at)])
                    weights, top, total, shrink = softmax(
                        where, scores, at, end - 1 - step, top, total, is_masked
                    )
                    if segmented and is_masked:
                        plgpu.commit_smem()  # registers have read ids, which copies overwrite
                        plgpu.barrier_arrive(scratch["k_empty"].at[slot_of(at)])
                    weights, top, total, shrink = lax.optimization_barrier(
                        (weights, top, total, shrink)
                    )
                    sums = _compat.wgmma_wait(0, sums)
                    plgpu.barrier_arrive(scratch["v_empty"].at[slot_of(at - 1)])
                    # rounded only now: no product in flight may find its registers written
                    weights = weights.astype(dtype)
                    return sums * wide(shrink, width), weights, top, total, at + 1

                scores = scores[0] if ahead else first_scores(i, at)
                top = filled((WGMMA_ROWS,), -jnp.inf, row_layout)
                total = filled((WGMMA_ROWS,), 0, row_layout)
                weights, top, total = softmax(where, scores, at, end - 1, top, total, masked)[:3]
                if segmented:
                    plgpu.commit_smem()
                plgpu.barrier_arrive(scratch["k_empty"].at[slot_of(at)])
                if c.q_stages > 1:

                    @pl.when(i > 0)
                    def _():
                        give_back_queries(i - 1)

                sums = filled((WGMMA_ROWS, width), 0, plgpu.Layout.WGMMA)
                carry = (sums, weights.astype(dtype), top, total, at + 1)
                # steps count from the last block down: masked, wholly seen, masked
                before, after = i32(1), i32(1)
                steps = end - first
                if masked:
                    low, high = limits(where, row)[1], limits(where, row + (WGMMA_ROWS - 1))[0]
                    above = jnp.maximum(low + 1, 0) // i32(c.kv_block)
                    below = (jnp.maximum(high, 0) + (c.kv_block - 1)) // i32(c.kv_block)
                    above = jnp.minimum(above, where["same"][1])
                    below = jnp.maximum(below, where["same"][0])
                    before = jnp.clip(end - above, 1, steps)
                    after = jnp.clip(end - below, before, steps)
                    carry = lax.fori_loop(i32(1), before, functools.partial(step, True), carry)
                    carry = lax.fori_loop(before, after, functools.partial(step, False), carry)
                    if static.window is not None or segmented:
                        carry = lax.fori_loop(after, steps, functools.partial(step, True), carry)
                else:
                    carry = lax.fori_loop(i32(1), steps, functools.partial(step, False), carry)
                sums, weights, top, total, at = carry
                wait_for("v", at - 1)
                if ahead:
                    plgpu.barrier_wait(scratch["q_full"].at[q_slot_of(i + 1)])
                    wait_for("k", at)
                    take_turn()
                sums, weights = _compat.wgmma_ready(sums, weights, interpret=static.interpret)
                sums = multiply_values(sums, weights, at - 1)
                if ahead:
                    scores = multiply_keys(i + 1, at)
                    end_turn()
                shrink: Any = None
                if sinks is not None:
                    sink = jnp.full((WGMMA_ROWS,), rest["sinks"][where["head"]], jnp.float32)
                    sink = plgpu.layout_cast(sink, row_layout)
                    new_top = jnp.maximum(top, sink)
                    anchor = jnp.where(new_top == -jnp.inf, jnp.float32(0), new_top)  # nothing seen
                    shrink = jnp.exp2(top - anchor)
                    total = total * shrink + jnp.exp2(sink - anchor)
                    top = new_top
                some = total > 0
                share = 1.0 / jnp.where(some, total, jnp.float32(1))
                share = share if shrink is None else share * shrink
                if static.save_lse:
                    lse = (top + jnp.log2(total)) * jnp.float32(1 / LOG2E)
                    lse = jnp.where(some, lse, -jnp.inf)
                    assert lse_ref is not None
                    lse_ref[where["batch"], where["head"], pl.ds(row, WGMMA_ROWS)] = lse
                sums = _compat.wgmma_wait(1 if ahead else 0, sums)
                plgpu.barrier_arrive(scratch["v_empty"].at[slot_of(at - 1)])
                sums = (sums * wide(share, width)).astype(dtype)
                for part in range(parts):
                    scratch["q"].at[q_slot, group, part][...] = sums[
                        :, part * line : (part + 1) * line
                    ]
                plgpu.commit_smem()
                for part in range(parts):
                    plgpu.copy_smem_to_gmem(
                        tile_as_copied("q", q_slot, group, part),
                        out_ref.at[
                            where["batch"],
                            pl.ds(row, WGMMA_ROWS),
                            where["head"],
                            columns(part, row),
                        ],
                    )
                if c.q_stages == 1:
                    give_back_queries(i)
                return (at, following, *([_compat.wgmma_wait(0, scores)] if ahead else []))

            if c.turns and c.consumers > 1:

                @pl.when(group == c.consumers - 1)
                def _():
                    plgpu.barrier_arrive(scratch["turn"].at[i32(0)])

            carry = (i32(0), tile_at(0))
            if ahead:
                carry = (*carry, first_scores(i32(0), i32(0)))
            carry = lax.fori_loop(i32(0), my_tiles, tile, carry)
            if c.q_stages > 1:  # no block is without a tile
                give_back_queries(my_tiles - 1)
            if ahead:
                give_back_queries(my_tiles)
                plgpu.barrier_arrive(scratch["k_empty"].at[slot_of(carry[0])])
            plgpu.wait_smem_to_gmem(0)

            if c.turns and c.consumers > 1:

                @pl.when(group == 0)
                def _():
                    plgpu.barrier_wait(scratch["turn"].at[i32(0)])

        lax.cond(group == c.consumers, produce, consume)

    transforms = wgmma_transforms(line, dtype)
    tile_of_keys = plgpu.SMEM((c.stages, parts, c.kv_block, line), dtype, transforms=transforms)
    scratch = {
        "q": plgpu.SMEM(
            (c.q_stages, c.consumers, parts, WGMMA_ROWS, line), dtype, transforms=transforms
        ),
        "k": tile_of_keys,
        "v": tile_of_keys,
        "q_full": plgpu.Barrier(
            num_arrivals=c.consumers * parts + segmented, num_barriers=c.q_stages
        ),
        "k_full": plgpu.Barrier(num_arrivals=parts + segmented, num_barriers=c.stages),
        "v_full": plgpu.Barrier(num_arrivals=parts, num_barriers=c.stages),
        "q_empty": plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.q_stages),
        "k_empty": plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.stages),
        "v_empty": plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.stages),
    }
    if segmented:
        scratch["q_ids"] = plgpu.SMEM((c.q_stages * tile_rows,), jnp.int32)
        scratch["kv_ids"] = plgpu.SMEM((c.stages * c.kv_block,), jnp.int32)
    if c.turns and c.consumers > 1:
        scratch["turn"] = plgpu.Barrier(num_arrivals=1, num_barriers=c.consumers)
    out_type: list[Any] = [jax.ShapeDtypeStruct(q.shape, dtype)]
    if static.save_lse:  # whole tiles of it: written from registers, which stop at no end
        out_type.append(jax.ShapeDtypeStruct((b, n, q_tiles * tile_rows), jnp.float32))
    given: dict[str, Any] = {name: x for name, x in optional.items() if x is not None}

    def entry(q_ref, k_ref, v_ref, *refs, **scratch):
        rest = dict(zip(given, refs, strict=False))
        out_ref, lse_ref, *_ = (*refs[len(given) :], None)
        body(q_ref, k_ref, v_ref, rest, out_ref, lse_ref, **scratch)

    out, *lse = _compat.kernel(
        entry,
        name="flash_attention",
        out_type=tuple(out_type),
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=c.consumers + 1,
        thread_name="group",
        interpret=static.interpret,
        approx_math=True,
    )(q, k, v, *given.values())
    return out, lse[0][:, :, :t] if static.save_lse else None
