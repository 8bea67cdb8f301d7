"""Sums of rows by id: what `embedding` has for a gradient. Imported by it alone.

dy [M, D], ids [M] -> [V, D], in three kernels. The first writes zeros everywhere, which takes the
time, and meanwhile brings the ids in order: a block counts for some of them how many come before.
(XLA sorts more than MOST_COUNTED of them, and those that need more than 32 bits with a place.) Of
the second each block has RUN places of that order and adds up the rows of each id, one after
another in float32; so all blocks have as much to do, however often an id comes. Where all rows of
an id are there, their sum is written. What began in a block before, or goes on in the next, is put
aside, and the third kernel adds that up. So nothing is added atomically, and two runs give the same
bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.device import ACCESS_BYTES, MAX_BOX, SHARED_BYTES, THREADS
from pallas_kernels.row_parts import Part, fewest_parts, part_of

RUN = 32  # rows a block: of the commonest word of 8192 come about 400, which 13 blocks have
STAGES = 8  # rows on their way to a block that adds them up, if they fit
PART = 2048  # numbers of a row a block: 16 sums a thread, and 4 KB a copy
MOST_COUNTED = 2**14  # ids, of which each thread of a block has 128 in registers
NO_KEY = np.uint32(2**32 - 1)  # above all keys
ZEROS_BYTES = 16 * 1024  # of the result that leave in one copy
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
    part = part_of(width, parts, min(sizes), interpret=interpret)
    rows = part.view(dy)
    result, order = _zeros_and_order(part, rows, ids, count, dtype, num_sms)
    sums = _Sums(part, len(dy), count, dtype, None if scale is None else dy.dtype.type(scale))
    if _compat.WRITES_REFERENCES:
        held = jax.new_ref(result)
        [aside] = sums.of_blocks(rows, order, held)
        sums.joined(aside, order, held)
        result = jax.freeze(held)
    else:
        aside, found = sums.of_blocks(rows, order)
        own, shared = sums.owners(order)
        result = _placed(result, own, found)
        result = _placed(result, shared, *sums.joined(aside, order))
    return result.reshape(count, width)


class _Order(NamedTuple):
    """Ids in their order: int32 [M + 1], the number of rows of the result behind the last; which
    place each had, int32 [M], of two alike the first first; and for each block the first place, in
    the order, of its first id, int32 [blocks].
    """

    ids: jax.Array
    places: jax.Array
    begins: jax.Array


def _placed(result: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    """With rows at ids, which are all different and may lie outside."""
    return result.at[ids].set(rows, mode="drop", unique_indices=True)


def _zeros_and_order(part: Part, dy, ids: jax.Array, count: int, dtype: Any, num_sms: int):
    """Zeros [V, parts, n, inner], and the order of the ids."""
    many = len(ids)
    keys = _Keys(count, (many - 1).bit_length())
    counted = keys.fit and many <= MOST_COUNTED
    zeros, *order = _zeros(part, dy, ids, keys, counted, dtype, num_sms)
    if counted:
        return zeros, _Order(*order)
    if keys.fit:
        every = keys.of(ids, jnp.arange(many, dtype=jnp.uint32))
        in_order, places = keys.id_and_place(jnp.sort(every, stable=False))
    else:
        ids = jnp.clip(ids, 0, count - 1)
        places = jnp.argsort(ids, stable=True).astype(jnp.int32)
        in_order = ids[places]
    begins = jnp.searchsorted(in_order, in_order[::RUN], method="scan_unrolled").astype(jnp.int32)
    return zeros, _Order(jnp.pad(in_order, (0, 1), constant_values=count), places, begins)


class _Keys(NamedTuple):
    """An id below `count` and a place below 2^shift in one number: in order, and no two alike."""

    count: int
    shift: int

    @property
    def fit(self) -> bool:
        return self.count << self.shift <= int(NO_KEY)

    def of(self, ids: Any, places: Any) -> Any:
        inside = jnp.minimum(jnp.maximum(ids, 0), self.count - 1)
        return (inside.astype(jnp.uint32) << self.shift) | places

    def id_and_place(self, key: Any) -> tuple[Any, Any]:
        place = key & np.uint32(2**self.shift - 1)
        return (key >> self.shift).astype(jnp.int32), place.astype(jnp.int32)


def _zeros(part: Part, dy, ids: jax.Array, keys: _Keys, counted: bool, dtype, num_sms: int):
    """Zeros [V, parts, n, inner], which XLA writes at less than half the speed; and if `counted`
    the order, in which the place of a key is how many are less.

    dy is not read: XLA shall not run this, and keep the zeros, long before there is one.
    """
    many, v = len(ids), keys.count
    ids = jnp.pad(ids, (0, -many % GRAIN if counted else 0))
    rows = max(1, min(MAX_BOX, ZEROS_BYTES // (part.padded * dtype.itemsize)))
    tiles, blocks = -(-v // rows) * part.parts, BLOCKS * num_sms
    layout = plgpu.Layout.WG_STRIDED(ids.shape, vec_size=ACCESS_BYTES // 4)

    def all_keys(ids_ref):
        if part.interpret:
            every, place = ids_ref[...], jax.lax.broadcasted_iota(jnp.uint32, ids.shape, 0)
        else:
            every = _compat.load(ids_ref, layout, optimized=False)
            place = plgpu.broadcasted_iota(jnp.uint32, ids.shape, 0, layout=layout)
        every = keys.of(every, place)
        return every if len(every) == many else jnp.where(place < many, every, NO_KEY)

    def body(ids_ref, dy_ref, out_ref, *refs):
        del dy_ref
        *order_refs, zeros = refs
        block = jax.lax.axis_index("block")
        for r in range(rows):
            part.store(zeros.at[r], part.zeros(dtype))
        plgpu.commit_smem()
        every = all_keys(ids_ref) if counted else None

        def turn(i, _):
            index = block + i * blocks

            @pl.when(index < tiles)
            def _():
                first, column = index // part.parts * rows, jax.lax.rem(index, part.parts)
                part.write(zeros, out_ref, first, rows, column, v)

            if counted:  # in turns with zeros, so that it takes no time beside them
                count_one(ids_ref, every, index, *order_refs)
            return 0

        last = max(tiles, many + 1) if counted else tiles
        jax.lax.fori_loop(0, (last - block + blocks - 1) // blocks, turn, 0)
        plgpu.wait_smem_to_gmem(0)

    def count_one(ids_ref, every, index, in_order_ref, places_ref, begins_ref):
        less = lambda key: jnp.sum(jnp.where(every < key, 1, 0))  # noqa: E731

        @pl.when(index < many)
        def _():
            key = keys.of(ids_ref[index], index.astype(jnp.uint32))
            at = less(key)
            in_order_ref[at], places_ref[at] = keys.id_and_place(key)

            @pl.when(jax.lax.rem(at, RUN) == 0)
            def _():
                begins_ref[at // RUN] = less(key >> keys.shift << keys.shift)

        @pl.when(index == many)
        def _():
            in_order_ref[many] = jnp.int32(v)

    shapes = ((many + 1,), (many,), (-(-many // RUN),)) if counted else ()
    return _compat.kernel(
        body,
        name="embedding_backward_zeros",
        out_type=[
            jax.ShapeDtypeStruct((v, *part.row), dtype),
            *[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
        ],
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[part.buffer(rows, dtype)],
        unsafe_no_auto_barriers=True,  # nobody writes on chip what another reads
        interpret=part.interpret,
    )(ids, dy)


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

    def of_blocks(self, dy, order: _Order, held=None) -> list[jax.Array]:
        """float32 [2 blocks, parts, chunks, inner]: what each block adds to an id that began in a
        block before, then what it leaves the next to add to; where there is neither, anything.
        Without `held` then the other sums, [rows, parts, n, inner].
        """
        part = self.part

        def body(inputs, results, target, ring, out, arrived):
            (dy_ref, ids_ref, places_ref, begins_ref), (aside_ref,) = inputs, results
            block, column = jax.lax.axis_index("block"), jax.lax.axis_index("part")
            first = block * RUN
            rows = jnp.minimum(RUN, self.rows - first)
            begun = jnp.where(begins_ref[block] < first, ids_ref[first], -1)  # the id, if one is

            def then(i, total):
                here, behind = ids_ref[first + i], ids_ref[first + i + 1]
                ends = here != behind

                @pl.when(ends & (here != begun))
                def _():
                    place = first + i if held is None else here
                    self._leave(total, out, target, place, column)

                @pl.when(jnp.where(ends, here == begun, i == rows - 1))
                def _():
                    which = 2 * block + jnp.where(here == begun, 0, 1)
                    part.store(aside_ref.at[which, column], total)

                return jax.lax.cond(ends, part.zeros, lambda: total)

            source = lambda i: part.at(dy_ref, places_ref[first + i], column)  # noqa: E731
            _add_up(part, rows, source, ring, arrived, then)
            plgpu.wait_smem_to_gmem(0)

        aside = (2 * self.blocks, part.parts, part.chunks, part.inner)
        return self._launch(
            body,
            "embedding_backward_sums",
            (dy, *order),
            [jax.ShapeDtypeStruct(aside, jnp.float32)],
            held,
            of=self.rows,
            staged=dy.dtype,
        )

    def joined(self, aside, order: _Order, held=None) -> list[jax.Array]:
        """The sums of ids that several blocks have, each by the block where it ends.

        Without `held` they are the result, [blocks, parts, n, inner].
        """
        part = self.part

        def body(inputs, _, target, ring, out, arrived):
            aside_ref, ids_ref, begins_ref = inputs
            block, column = jax.lax.axis_index("block"), jax.lax.axis_index("part")
            first = block * RUN
            here, begin = ids_ref[first], begins_ref[block]
            behind = ids_ref[jnp.minimum(first + RUN, self.rows)]

            @pl.when((begin < first) & (behind != here))
            def _():
                begun = begin // RUN

                def source(i):
                    which = 2 * (begun + i) + jnp.where(i == 0, 1, 0)
                    return part.at(aside_ref, which, column)

                total = _add_up(part, block - begun + 1, source, ring, arrived)
                self._leave(total, out, target, block if held is None else here, column)
                plgpu.wait_smem_to_gmem(0)

        return self._launch(
            body,
            "embedding_backward_joined",
            (aside, order.ids, order.begins),
            [],
            held,
            of=self.blocks,
            staged=jnp.dtype(jnp.float32),
        )

    def owners(self, order: _Order) -> tuple[jax.Array, jax.Array]:
        """int32 [rows] and [blocks]: the ids of what `of_blocks` and `joined` return, `count` and
        more where that is nothing.
        """
        place, block = jnp.arange(self.rows), jnp.arange(self.blocks)
        first, ids = block * RUN, order.ids
        several = order.begins < first  # blocks have the first id of a block
        begun = jnp.where(several, ids[first], -1)
        whole = (ids[place] != ids[place + 1]) & (ids[place] != begun[place // RUN])
        ends = several & (ids[jnp.minimum(first + RUN, self.rows)] != ids[first])
        return (
            jnp.where(whole, ids[place], self.count + place),
            jnp.where(ends, ids[first], self.count + block),
        )

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
