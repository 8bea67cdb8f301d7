"""What the forward kernels of `flash_attention` share, whatever their numbers are.

Which tiles a block of the grid has, which keys a tile meets and which of these a query sees; the
warpgroup that brings queries, keys and values; the softmax of a block of keys. A kernel says how
keys and values are copied, and what is multiplied. Imported only by those kernels and by
flash_attention.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat, soft_cap
from pallas_kernels.device import LOG2E
from pallas_kernels.flash_attention_plan import Plan
from pallas_kernels.ring import Ring
from pallas_kernels.wgmma_tiles import WGMMA_ROWS, rows_as_copied

REGISTERS = {1: (None, None), 2: (24, 240), 3: (32, 160)}  # of the producer and each consumer


def shared_scratch(plan: Plan, *, q_parts: int, k_parts: int, v_parts: int) -> dict[str, Any]:
    """Barriers and segment ids; the parts are copies that one tile of each arrives in."""
    c, segmented = plan.static.config, plan.segmented
    scratch: dict[str, Any] = {
        "q_full": plgpu.Barrier(
            num_arrivals=c.consumers * q_parts + segmented, num_barriers=c.q_stages
        ),
        "k_full": plgpu.Barrier(num_arrivals=k_parts + segmented, num_barriers=c.stages),
        "v_full": plgpu.Barrier(num_arrivals=v_parts, num_barriers=c.stages),
        "q_empty": plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.q_stages),
        "k_empty": plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.stages),
        "v_empty": plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.stages),
    }
    if segmented:
        scratch["q_ids"] = plgpu.SMEM((c.q_stages * plan.tile_rows,), jnp.int32)
        scratch["kv_ids"] = plgpu.SMEM((c.stages * c.kv_block,), jnp.int32)
    if c.turns and c.consumers > 1:
        scratch["turn"] = plgpu.Barrier(num_arrivals=1, num_barriers=c.consumers)
    return scratch


def filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    """So many equal float32 numbers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def wide(x: jax.Array, columns: int) -> jax.Array:
    """A number a row as so many equal columns."""
    return lax.broadcast_in_dim(x, (WGMMA_ROWS, columns), (0,))


def numbers(x: Any) -> Any:
    """A constant of the program as float32; what is traced is that already."""
    return jnp.float32(x) if isinstance(x, float) else x


class Block:
    """One block of the grid at work: the references of `plan`'s arrays and of shared memory.

    A tile is a dictionary of its batch row, head, first query, keys, and the first and last + 1
    block of keys that it meets. lift: the power of two by which weights and their sums are larger
    than those of the softmax. shift: `top`, a row's largest score as a power of two, is less by it.
    """

    def __init__(self, plan: Plan, rest: dict[str, Any], scratch: dict[str, Any], lift: int = 0):
        self.plan, self.rest, self.scratch, self.lift = plan, rest, scratch, lift
        self.shift = (plan.static.softcap or 0.0) * LOG2E  # see `bend_and_factor`
        self.group = lax.axis_index("group")
        self.block = lax.axis_index("block")
        self.row_layout = plgpu.Layout.WGMMA.reduce(1)
        c = plan.static.config
        self.rings = {
            name: Ring(scratch[f"{name}_full"], scratch[f"{name}_empty"], slots)
            for name, slots in (("q", c.q_stages), ("k", c.stages), ("v", c.stages))
        }

    @property
    def tiles(self):
        """How many this block has: read at each use, for registers are scarcer than that costs."""
        return jnp.int32(1) if self.plan.most is None else self.rest["order"][self.block]

    def tile_at(self, i):
        """What the i-th tile of this block is; behind the last, something."""
        plan = self.plan
        if plan.most is None:
            return self.block
        return self.rest["order"][plan.blocks + self.block * plan.most + i]

    def tile_of(self, index) -> dict[str, Any]:
        """Batch, head and first query of a tile, and its blocks of keys."""
        plan, i32, kv_block = self.plan, jnp.int32, self.plan.static.config.kv_block
        row, down = index // i32(plan.q_tiles), lax.rem(index, i32(plan.q_tiles))
        batch, head = row // i32(plan.n), lax.rem(row, i32(plan.n))
        start = down * plan.tile_rows
        keys = self.rest["lengths"][batch] if plan.has_lengths else i32(plan.s)
        tile = {"batch": batch, "head": head, "start": start, "keys": keys}
        last = jnp.minimum(start + (plan.tile_rows - 1), plan.t - 1)
        low, high = self.limits(tile, start)[0], self.limits(tile, last)[1]
        first = jnp.maximum(low, 0) // i32(kv_block)
        end = jnp.maximum(high + 1, 0) + (kv_block - 1)
        end = jnp.minimum(end // i32(kv_block), plan.kv_blocks)
        same = (i32(0), i32(plan.kv_blocks))
        if plan.segmented:
            at = (batch * plan.q_tiles + down) * 4
            first = jnp.maximum(first, self.rest["ranges"][at])
            end = jnp.minimum(end, self.rest["ranges"][at + 1])
            same = (self.rest["ranges"][at + 2], self.rest["ranges"][at + 3])
        # a tile that sees nothing visits one block, too, and masks all of it
        first = jnp.minimum(first, plan.kv_blocks - 1)
        return tile | {"first": first, "end": jnp.maximum(end, first + 1), "same": same}

    def limits(self, tile, query):
        """First and last key that a query sees, segments apart."""
        plan, static = self.plan, self.plan.static
        at = tile["keys"] - plan.t + query
        low, high = jnp.int32(0), jnp.int32(plan.s - 1)
        if static.causal:
            high = jnp.minimum(at, high)
        elif plan.has_lengths:
            high = jnp.minimum(tile["keys"] - 1, high)
        if static.window is not None:
            low = at - (static.window - 1)
            if not static.causal:
                high = jnp.minimum(at + (static.window - 1), high)
        return low, high

    def as_copied(self, name: str, *index):
        """A tile on chip, as the copy engine takes it."""
        tile = self.scratch[name]
        return rows_as_copied(tile, index, 0, tile.shape[-2], self.plan.static.interpret)

    def columns(self, part: int, size: int, traced):
        """A part of a head, whose end may lie past its width: JAX must not know where."""
        return pl.ds(traced * 0 + part * size if self.plan.h % size else part * size, size)

    def produce(self, q_ref, copy_block: Callable[..., None]) -> None:
        """What the warpgroup does that brings queries, keys and values.

        copy_block("k" or "v", tile, key head, first key, slot, barrier). On chip q is
        [stages, consumers, parts of a head, queries, columns].
        """
        plan, c, scratch, i32 = self.plan, self.plan.static.config, self.scratch, jnp.int32
        _, _, parts, _, size = scratch["q"].shape
        if (registers := REGISTERS[c.consumers][0]) is not None:
            plgpu.set_max_registers(registers, action="decrease")

        def load_queries(i, where):
            q_slot = self.rings["q"].claim(i)
            full = self.rings["q"].full.at[q_slot]
            for consumer, part in itertools.product(range(c.consumers), range(parts)):
                taken = pl.ds(where["start"] + consumer * WGMMA_ROWS, WGMMA_ROWS)
                columns = self.columns(part, size, where["batch"])
                source = q_ref.at[where["batch"], taken, where["head"], columns]
                target = self.as_copied("q", q_slot, consumer, part)
                plgpu.copy_gmem_to_smem(source, target, full)
            if plan.segmented:
                start = where["batch"] * (plan.q_tiles * plan.tile_rows) + where["start"]
                source = pl.ds(start, plan.tile_rows)
                target = scratch["q_ids"].at[pl.ds(q_slot * plan.tile_rows, plan.tile_rows)]
                plgpu.copy_gmem_to_smem(self.rest["q_ids"].at[source], target, full)

        def load_block(name, where, step, at):
            kv_head = where["head"] // i32(plan.group)
            down, slot = (where["end"] - 1 - step) * c.kv_block, self.rings[name].claim(at)
            full = self.rings[name].full.at[slot]
            copy_block(name, where, kv_head, down, slot, full)
            if plan.segmented and name == "k":
                ids = pl.ds(where["batch"] * (plan.kv_blocks * c.kv_block) + down, c.kv_block)
                target = scratch["kv_ids"].at[pl.ds(slot * c.kv_block, c.kv_block)]
                plgpu.copy_gmem_to_smem(self.rest["kv_ids"].at[ids], target, full)

        def tile(i, carry):
            at, index = carry
            following = self.tile_at(i + 1)  # it arrives while this one is loaded
            where = self.tile_of(index)
            load_queries(i, where)

            def load(step, at):
                load_block("k", where, step, at)
                load_block("v", where, step, at)
                return at + 1

            at = lax.fori_loop(i32(0), where["end"] - where["first"], load, at)
            return at, following

        done, _ = lax.fori_loop(i32(0), self.tiles, tile, (i32(0), self.tile_at(0)))
        for name, count in (("q", self.tiles), ("k", done), ("v", done)):
            self.rings[name].drain(count)

    @property
    def _has_turns(self) -> bool:
        return self.plan.static.config.turns and self.plan.static.config.consumers > 1

    def take_turn(self) -> None:
        if self._has_turns:
            plgpu.barrier_wait(self.scratch["turn"].at[self.group])

    def end_turn(self) -> None:
        if self._has_turns:
            following = lax.rem(self.group + 1, jnp.int32(self.plan.static.config.consumers))
            plgpu.barrier_arrive(self.scratch["turn"].at[following])

    def begin_turns(self) -> None:
        if self._has_turns:

            @pl.when(self.group == self.plan.static.config.consumers - 1)
            def _():
                plgpu.barrier_arrive(self.scratch["turn"].at[jnp.int32(0)])

    def end_turns(self) -> None:
        if self._has_turns:

            @pl.when(self.group == 0)
            def _():
                plgpu.barrier_wait(self.scratch["turn"].at[jnp.int32(0)])

    def multiply_keys(self, i, at):
        """Scores of this consumer's queries of the i-th tile, begun."""
        return _compat.wgmma(
            None,
            self.scratch["q"].at[self.rings["q"].slot(i), self.group],
            self.scratch["k"].at[self.rings["k"].slot(at)],
            transpose_b=True,
            interpret=self.plan.static.interpret,
        )

    def first_weights(self, tile, i, at):
        """What `softmax` makes of the last block of keys, which is a tile's first."""
        interpret = self.plan.static.interpret
        self.rings["q"].wait(i)
        self.rings["k"].wait(at)
        self.take_turn()
        _compat.wgmma_ready(interpret=interpret)
        scores = self.multiply_keys(i, at)
        self.end_turn()
        scores = _compat.wgmma_wait(0, scores)
        top = filled((WGMMA_ROWS,), -jnp.inf, self.row_layout)
        total = filled((WGMMA_ROWS,), 0, self.row_layout)
        found = self.softmax(tile, scores, at, tile["end"] - 1, top, total, self.plan.masked)
        if self.plan.segmented:
            plgpu.commit_smem()  # registers have read ids, which copies overwrite
        self.rings["k"].give_back(at)
        return found

    def masked_out(self, tile, scores, at, j):
        """-inf for what a query does not see; by columns of eight, of which a thread has two: so
        their places are numbers in the program and take no registers.
        """
        plan, i32, kv_block = self.plan, jnp.int32, self.plan.static.config.kv_block
        rows = plgpu.broadcasted_iota(i32, (WGMMA_ROWS,), 0, layout=self.row_layout)
        columns = plgpu.broadcasted_iota(i32, (WGMMA_ROWS, 8), 1, layout=plgpu.Layout.WGMMA)
        low, high = (
            (wide(x, 8) if x.ndim else x) - columns
            for x in (y - j * kv_block for y in self.limits(tile, tile["row"] + rows))
        )
        parts = []
        for column in range(0, kv_block, 8):
            seen = high >= column
            if plan.static.window is not None:
                seen = seen & (low <= column)
            part = scores[:, column : column + 8]
            parts.append(jnp.where(seen, part, -jnp.inf))
        scores = jnp.concatenate(parts, axis=1)
        if plan.segmented:
            mine = self._ids("q_ids", tile["q_ids"], WGMMA_ROWS, 0)
            theirs = self._ids("kv_ids", self.rings["k"].slot(at) * kv_block, kv_block, 1)
            scores = jnp.where(mine == theirs, scores, -jnp.inf)
        return scores

    def _ids(self, name, start, size, dimension):
        layout = plgpu.Layout.WGMMA.reduce(1 - dimension)
        part = _compat.load(self.scratch[name].at[pl.ds(start, size)], layout)
        shape = (WGMMA_ROWS, self.plan.static.config.kv_block)
        part = lax.broadcast_in_dim(part, shape, (dimension,))
        return plgpu.layout_cast(part, plgpu.Layout.WGMMA)

    def softmax(self, tile, scores, at, j, top, total, is_masked):
        """The weights of a block and by how much what was summed before is too large.

        The tile says how scores are bent and multiplied, as `bend_and_factor` does.
        """
        static, bend, factor = self.plan.static, tile["bend"], tile["factor"]
        if static.softcap is not None:
            # What is masked may be NaN, and shares nothing then. Sharing by four takes registers
            # that a result wider than 128 does not leave (256 was measured).
            together = 1 if is_masked else 4 if self.plan.h <= 128 else 2
            scores = soft_cap.minus_sigmoid(
                scores, bend, interpret=static.interpret, together=together
            )
        elif bend != 1.0:
            scores = scores * numbers(bend)
        if is_masked:
            scores = self.masked_out(tile, scores, at, j)
        new_top = jnp.maximum(top, scores.max(axis=1) * numbers(factor))
        anchor = new_top
        if is_masked:  # a row that has seen nothing yet
            anchor = jnp.where(new_top == -jnp.inf, jnp.float32(0), new_top)
        shrink = jnp.exp2(top - anchor)
        lifted = anchor - jnp.float32(self.lift) if self.lift else anchor
        weights = jnp.exp2(scores * numbers(factor) - wide(lifted, static.config.kv_block))
        total = total * shrink + weights.sum(axis=1)
        return weights, new_top, total, shrink

    def spans(self, tile, steps) -> tuple[Any, Any]:
        """Steps count from the last block of keys down: masked until the first of these, wholly
        seen by this consumer's queries until the second, masked from there on.
        """
        i32, kv_block = jnp.int32, self.plan.static.config.kv_block
        row, end = tile["row"], tile["end"]
        low, high = self.limits(tile, row)[1], self.limits(tile, row + (WGMMA_ROWS - 1))[0]
        above = jnp.maximum(low + 1, 0) // i32(kv_block)
        below = (jnp.maximum(high, 0) + (kv_block - 1)) // i32(kv_block)
        above = jnp.minimum(above, tile["same"][1])
        below = jnp.maximum(below, tile["same"][0])
        before = jnp.clip(end - above, 1, steps)
        return before, jnp.clip(end - below, before, steps)

    def over_blocks(self, tile, step: Callable[[bool, Any, Any], Any], carry: Any) -> Any:
        """The carry after step(is masked, number, carry) for each block of keys but the last."""
        steps = tile["end"] - tile["first"]

        def loop(start, stop, is_masked, carry):
            return lax.fori_loop(start, stop, lambda i, x: step(is_masked, i, x), carry)

        if not self.plan.masked:
            return loop(jnp.int32(1), steps, False, carry)
        before, after = self.spans(tile, steps)
        carry = loop(jnp.int32(1), before, True, carry)
        carry = loop(before, after, False, carry)
        if self.plan.static.window is not None or self.plan.segmented:
            carry = loop(after, steps, True, carry)
        return carry

    def shares(self, tile, top, total, lse_ref) -> jax.Array:
        """What the sums of a tile's rows are multiplied by in the end; writes the logarithm."""
        shrink: Any = None
        if "sinks" in self.rest:
            sink = self.rest["sinks"][tile["head"]] - jnp.float32(self.shift)
            sink = plgpu.layout_cast(jnp.full((WGMMA_ROWS,), sink, jnp.float32), self.row_layout)
            new_top = jnp.maximum(top, sink)
            anchor = jnp.where(new_top == -jnp.inf, jnp.float32(0), new_top)  # nothing seen
            shrink = jnp.exp2(top - anchor)
            more = sink - anchor
            more = more + jnp.float32(self.lift) if self.lift else more
            total = total * shrink + jnp.exp2(more)
            top = new_top
        some = total > 0
        share = 1.0 / jnp.where(some, total, jnp.float32(1))
        share = share if shrink is None else share * shrink
        if self.plan.static.save_lse:
            power = top + jnp.log2(total)
            offset = self.shift - self.lift
            power = power + jnp.float32(offset) if offset else power
            lse = jnp.where(some, power * jnp.float32(1 / LOG2E), -jnp.inf)
            lse_ref[tile["batch"], tile["head"], pl.ds(tile["row"], WGMMA_ROWS)] = lse
        return share


def call(
    body: Callable[..., None],
    plan: Plan,
    operands: tuple[jax.Array, ...],
    given: dict[str, jax.Array],
    out_type: jax.ShapeDtypeStruct,
    scratch: dict[str, Any],
) -> tuple[jax.Array, jax.Array | None]:
    """Runs body(operands.., rest, out, lse or None, **scratch) in each block: (out, lse).

    given: what `plan` gave, or more of the kind; body finds their references in `rest`, by name.
    """
    static = plan.static
    out_types: list[Any] = [out_type]
    if static.save_lse:  # whole tiles of it: written from registers, which stop at no end
        b = out_type.shape[0]
        rows = plan.q_tiles * plan.tile_rows
        out_types.append(jax.ShapeDtypeStruct((b, plan.n, rows), jnp.float32))

    def entry(*refs, **scratch):
        (first, refs), end = (refs[: len(operands)], refs[len(operands) :]), len(given)
        rest = dict(zip(given, refs, strict=False))
        out_ref, lse_ref, *_ = (*refs[end:], None)
        body(*first, rest, out_ref, lse_ref, **scratch)

    out, *lse = _compat.kernel(
        entry,
        name="flash_attention",
        out_type=tuple(out_types),
        scratch_types=scratch,
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=static.config.consumers + 1,
        thread_name="group",
        interpret=static.interpret,
        approx_math=True,
    )(*operands, *given.values())
    return out, lse[0][:, :, : plan.t] if static.save_lse else None
