"""Sums of rows by id: what `embedding` has for a gradient. Imported by it alone.

dy [M, D], ids [M] -> [V, D], in three kernels. The first writes zeros everywhere, which takes the
time, and meanwhile brings the ids in order: a block counts for some of them how many come before.
(XLA sorts more than MOST_COUNTED of them, and those that need more than 32 bits with a place.) Of
the second each block has RUN places of that order and adds up the rows of each id, one after
another in float32; so all blocks have as much to do, however often an id comes. Where all rows of
an id are there, their sum is written. What began in the block before, or goes on in the next, is
put aside, and the third kernel adds that up. So nothing is added atomically, and two runs give the
same bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.device import ACCESS_BYTES, MAX_BOX, SHARED_BYTES, THREADS
from pallas_kernels.row_parts import Part, fewest_parts, part_of

RUN = 32  # rows a block: of the commonest word of 8192 come about 400, which 13 blocks have
STAGES = 8  # rows on their way to a block that adds them up, if they fit
PART = 2048  # numbers of a row a block: 16 sums a thread, and 4 KB a copy
MOST_COUNTED = 2**14  # ids, of which each thread of a block has 128 in registers
KEY_BITS = 32
ZEROS_BYTES = 8 * 1024  # of the result that leave in one copy
BLOCKS = 3  # a multiprocessor, whose registers no more have room in with MOST_COUNTED ids
RESERVED_BYTES = 4096  # on chip beside rows: barriers, alignment, Mosaic's own
GRAIN = THREADS * ACCESS_BYTES // 4  # ids that a block loads at once


def sum_by_id(
    dy: jax.Array,
    ids: jax.Array,
    *,
    count: int,
    dtype: Any,
    scale: float | None,
    num_sms: int,
    interpret: bool,
) -> jax.Array:
    """For each of `count` ids the sum of its rows, times `scale` (rounded to dy's dtype)."""
    dtype = jnp.dtype(dtype)
    sizes = (dy.dtype.itemsize, dtype.itemsize)
    width = dy.shape[1]
    parts = fewest_parts(width, sizes, most=PART) or fewest_parts(width, sizes)
    assert parts is not None, "why_not lets no such row through"
    part = part_of(width, parts, min(sizes), rows=1, interpret=interpret)
    rows = part.view(dy)
    result, in_order, order = _zeros_and_order(part, rows, ids, count, dtype, num_sms)
    sums = _Sums(part, len(dy), count, dtype, None if scale is None else dy.dtype.type(scale))
    if _compat.WRITES_REFERENCES:
        held = jax.new_ref(result)
        [aside] = sums.of_blocks(rows, order, in_order, held)
        sums.joined(aside, in_order, held)
        result = jax.freeze(held)
    else:
        aside, found = sums.of_blocks(rows, order, in_order)
        own, shared = sums.owners(in_order)
        result = _placed(result, own, found)
        result = _placed(result, shared, *sums.joined(aside, in_order))
    return result.reshape(count, width)


def _placed(result: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    """With rows at ids, which are all different and may lie outside."""
    return result.at[ids].set(rows, mode="drop", unique_indices=True)


def _zeros_and_order(part: Part, dy, ids: jax.Array, count: int, dtype: Any, num_sms: int):
    """Zeros [V, parts, n, inner]; the ids in their order, int32 [M + 1 or more], `count` behind the
    last; and which place each had, int32 [M or more], of two alike the first first.
    """
    many = len(ids)
    ids = jnp.clip(ids, 0, count - 1)
    shift = (many - 1).bit_length()
    if (count - 1).bit_length() + shift > KEY_BITS:
        order = jnp.argsort(ids, stable=True).astype(jnp.int32)
        in_order = ids[order]
    else:  # both in one number, of which no two are alike
        keys = (ids.astype(jnp.uint32) << shift) | jnp.arange(many, dtype=jnp.uint32)
        if many <= MOST_COUNTED:
            return _zeros_and_count(part, dy, keys, shift, count, dtype, num_sms)
        in_order, order = _id_and_place(jnp.sort(keys, stable=False), shift)
    zeros = jnp.zeros((count, *part.row), dtype)
    return zeros, jnp.pad(in_order, (0, 1), constant_values=count), order


def _id_and_place(key: jax.Array, shift: int) -> tuple[jax.Array, jax.Array]:
    return (key >> shift).astype(jnp.int32), (key & (2**shift - 1)).astype(jnp.int32)


def _zeros_and_count(part: Part, dy, keys, shift: int, v: int, dtype, num_sms: int):
    """As `_zeros_and_order`: the place of a key is how many are less.

    dy is not read: XLA shall not run this, and keep the zeros, long before there is one.
    """
    many = len(keys)
    most = jnp.uint32(2**32 - 1)  # less than no other
    keys = jnp.pad(keys, (0, -many % GRAIN), constant_values=most)
    rows = max(1, min(MAX_BOX, ZEROS_BYTES // (part.padded * dtype.itemsize)))
    tiles, blocks = -(-v // rows) * part.parts, BLOCKS * num_sms
    layout = plgpu.Layout.WG_STRIDED(keys.shape, vec_size=ACCESS_BYTES // 4)

    def body(keys_ref, dy_ref, out_ref, ids_ref, places_ref, zeros):
        del dy_ref
        block = jax.lax.axis_index("block")
        for r in range(rows):
            part.store(zeros.at[r], part.zeros(dtype))
        plgpu.commit_smem()
        every = keys_ref[...] if part.interpret else _compat.load(keys_ref, layout, optimized=False)

        # In turns, so that the one takes no time beside the other
        def both(i, _):
            index = block + i * blocks

            @pl.when(index < tiles)
            def _():
                first, column = index // part.parts * rows, jax.lax.rem(index, part.parts)
                part.write(zeros, out_ref, first, rows, column, v)

            @pl.when(index < many)
            def _():
                key = keys_ref[index]
                less = jnp.sum(jnp.where(every < key, 1, 0))
                ids_ref[less], places_ref[less] = _id_and_place(key, shift)

            @pl.when(index == many)
            def _():
                ids_ref[many] = jnp.int32(v)

            return 0

        jax.lax.fori_loop(0, (max(tiles, many + 1) - block + blocks - 1) // blocks, both, 0)
        plgpu.wait_smem_to_gmem(0)

    ordered = jax.ShapeDtypeStruct((many + 1,), jnp.int32)
    return _compat.kernel(
        body,
        name="embedding_backward_zeros",
        out_type=[jax.ShapeDtypeStruct((v, *part.row), dtype), ordered, ordered],
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[part.buffer(rows, dtype)],
        unsafe_no_auto_barriers=True,  # nobody writes on chip what another reads
        interpret=part.interpret,
    )(keys, dy)


def _add_up(
    part: Part,
    count: Any,
    source: Callable[[Any], Any],
    ring: Any,
    arrived: Any,
    then: Callable[[Any, Any], Any] = lambda i, total: total,
) -> Any:
    """source(0) + ... + source(count - 1), brought on chip ahead; total = then(i, total) behind
    each.
    """
    stages = ring.shape[0]

    def fetch(i):
        slot = jax.lax.rem(i, stages)
        plgpu.copy_gmem_to_smem(source(i), ring.at[slot], arrived.at[slot])

    def add(i, total):
        slot = jax.lax.rem(i, stages)
        plgpu.barrier_wait(arrived.at[slot])
        total = total + part.load(ring.at[slot]).astype(jnp.float32)
        plgpu.commit_smem()  # all threads have read the slot
        pl.when(i + stages < count)(lambda: fetch(i + stages))
        return then(i, total)

    for i in range(stages):
        pl.when(i < count)(functools.partial(fetch, jnp.int32(i)))
    return jax.lax.fori_loop(0, count, add, part.zeros())


def _begun(in_order: Any, block: Any, number: Any) -> Any:
    """Whether an id in a block has rows in the block before."""
    return (block > 0) & (in_order[jnp.maximum(block * RUN - 1, 0)] == number)


@dataclasses.dataclass(frozen=True)
class _Sums:
    """The sums of `rows` rows by ids below `count`, by blocks that have RUN of them in order.

    They go into `held`, an array [V, parts, n, inner]; without one into one of their own, each
    where `owners` says.
    """

    part: Part
    rows: int
    count: int
    dtype: Any
    scale: Any  # in dy's dtype, or None

    @property
    def blocks(self) -> int:
        return -(-self.rows // RUN)

    def of_blocks(self, dy, order, in_order, held=None) -> list[jax.Array]:
        """float32 [2 blocks, parts, chunks, inner]: what each block adds to an id of the block
        before it, then what it leaves the next to add to; where there is neither, anything.
        Without `held` then the other sums, [rows, parts, n, inner].
        """
        part = self.part

        def body(inputs, results, target, ring, out, arrived):
            (dy_ref, order_ref, ids_ref), (aside_ref,) = inputs, results
            block, column = jax.lax.axis_index("block"), jax.lax.axis_index("part")
            first = block * RUN
            rows = jnp.minimum(RUN, self.rows - first)

            def then(i, total):
                here, behind = ids_ref[first + i], ids_ref[first + i + 1]
                begun, ends = _begun(ids_ref, block, here), here != behind

                @pl.when(ends & jnp.logical_not(begun))
                def _():
                    self._leave(total, out, target, first + i if held is None else here, column)

                @pl.when(jnp.where(ends, begun, i == rows - 1))
                def _():
                    which = 2 * block + jnp.where(begun, 0, 1)
                    part.store(aside_ref.at[which, column], total)

                return jax.lax.cond(ends, part.zeros, lambda: total)

            source = lambda i: part.at(dy_ref, order_ref[first + i], column)  # noqa: E731
            _add_up(part, rows, source, ring, arrived, then)
            plgpu.wait_smem_to_gmem(0)

        aside = (2 * self.blocks, part.parts, part.chunks, part.inner)
        return self._launch(
            body,
            "embedding_backward_sums",
            (dy, order, in_order),
            [jax.ShapeDtypeStruct(aside, jnp.float32)],
            held,
            of=self.rows,
            staged=dy.dtype,
        )

    def joined(self, aside, in_order, held=None) -> list[jax.Array]:
        """The sums of ids that several blocks have, each by the block where it begins.

        Without `held` they are the result, [blocks, parts, n, inner].
        """
        part = self.part

        def body(inputs, _, target, ring, out, arrived):
            aside_ref, ids_ref = inputs
            block, column = jax.lax.axis_index("block"), jax.lax.axis_index("part")
            last = jnp.minimum(block * RUN + RUN, self.rows) - 1
            here = ids_ref[last]

            @pl.when((ids_ref[last + 1] == here) & jnp.logical_not(_begun(ids_ref, block, here)))
            def _():
                def halved(_, between):
                    least, most = between
                    middle = (least + most) // 2
                    has = ids_ref[middle * RUN] == here
                    return jnp.where(has, middle, least), jnp.where(has, most, middle)

                steps = self.blocks.bit_length()
                between = block + 1, jnp.int32(self.blocks)
                final, _ = jax.lax.fori_loop(0, steps, halved, between)  # that has some of its rows

                def source(i):
                    which = 2 * (block + i) + jnp.where(i == 0, 1, 0)
                    return part.at(aside_ref, which, column)

                total = _add_up(part, final - block + 1, source, ring, arrived)
                self._leave(total, out, target, block if held is None else here, column)
                plgpu.wait_smem_to_gmem(0)

        return self._launch(
            body,
            "embedding_backward_joined",
            (aside, in_order),
            [],
            held,
            of=self.blocks,
            staged=jnp.dtype(jnp.float32),
        )

    def owners(self, in_order: jax.Array) -> tuple[jax.Array, jax.Array]:
        """int32 [rows] and [blocks]: the ids of what `of_blocks` and `joined` return, `count` and
        more where that is nothing.
        """
        place, block = jnp.arange(self.rows), jnp.arange(self.blocks)
        last = jnp.minimum(block * RUN + RUN, self.rows) - 1
        found = []
        for at, of, whole in ((place, place // RUN, True), (last, block, False)):
            here = in_order[at]
            own = ((in_order[at + 1] != here) == whole) & ~_begun(in_order, of, here)
            found.append(jnp.where(own, here, self.count + at))
        return found[0], found[1]

    def _leave(self, total, out, target, place, column) -> None:
        """Writes a sum, by way of `out`, to a row of `target`."""
        if self.scale is not None:
            total = total * self.scale.astype(jnp.float32)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.part.store(out.at[0], total.astype(self.dtype))
        plgpu.commit_smem()
        self.part.write(out, target, place, 1, column, target.shape[0])

    def _launch(
        self, body, name, arrays, results, held, *, of: int, staged: Any
    ) -> list[jax.Array]:
        """body(inputs, results, target, ring, out, arrived) by all blocks; what it returns holds,
        without `held`, last the target, of so many rows.
        """
        part = self.part
        room = SHARED_BYTES - part.padded * self.dtype.itemsize - RESERVED_BYTES
        stages = min(STAGES, room // (part.padded * staged.itemsize))

        def in_turn(*refs):
            inputs, refs = refs[: len(arrays)], refs[len(arrays) :]
            at = 0 if held is not None else len(results)
            *found, out, ring, arrived = (*refs[:at], *refs[at + 1 :])
            body(inputs, found, refs[at], ring, out, arrived)

        own = jax.ShapeDtypeStruct((of, *part.row), self.dtype)
        return _compat.kernel(
            in_turn,
            name=name,
            out_type=[*results, *[own] * (held is None)],
            grid=(self.blocks, part.parts),
            grid_names=("block", "part"),
            scratch_types=[
                part.buffer(1, self.dtype),
                part.buffer(stages, staged),
                plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            ],
            unsafe_no_auto_barriers=True,  # a slot that all have read is passed on by `commit_smem`
            interpret=part.interpret,
        )(*arrays, *[held] * (held is not None))
