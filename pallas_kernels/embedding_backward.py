"""Sums of rows by id: what `embedding` has for a gradient. Imported by it alone.

dy [M, D], ids [M] -> [V, D]. The ids are sorted (stably, by XLA). A block owns every blocks-th tile
of the result's rows: it writes zeros where no id falls, and elsewhere adds up the rows of each id
in the order in which they came, in float32. So each number of the result is written once, nothing
is added atomically, and two runs give the same bits.
An id that comes often would be a long chain of sums in one block, when the others have long
finished: so wherever all of RUN sorted ids on end are one id, another kernel adds up these rows
before, a block for each such run.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.device import MAX_BOX, SHARED_BYTES
from pallas_kernels.row_parts import Part, fewest_parts, part_of

RUN = 32  # rows; of the commonest word of 8192 come about 400: 13 sums of runs, 62 others at most
STAGES = 4  # rows on their way to a block that adds them up
# Of the result, that leave in one copy, and blocks a multiprocessor: what a row with ids waits for
# comes one after another, so that many blocks of little are best (151936 x 896 bfloat16, H200: the
# sums take 83 us, 95 with 8 KB and 4 blocks, 130 with 16 KB)
TILE_BYTES, BLOCKS = 2 * 1024, 16
PART = 2048  # numbers of a row a block: 16 sums a thread, and 4 KB a copy


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
    sizes = (dy.dtype.itemsize, jnp.dtype(dtype).itemsize)
    width = dy.shape[1]
    parts = fewest_parts(width, sizes, most=PART) or fewest_parts(width, sizes)
    assert parts is not None, "why_not lets no such row through"
    part = part_of(width, parts, min(sizes), rows=1, interpret=interpret)
    ids = jnp.clip(ids, 0, count - 1)
    in_order, order = _sorted(ids, count)
    every = jnp.arange(count + 1, dtype=jnp.int32)
    starts = jnp.searchsorted(in_order, every, method="scan_unrolled").astype(jnp.int32)
    rows = part.view(dy)
    runs = [_sum_runs(part, rows, order, in_order)] if len(ids) >= 2 * RUN else []
    result = _sum_rows(part, rows, order, starts, runs, jnp.dtype(dtype), scale, num_sms)
    return result.reshape(count, width)


def _sorted(ids: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The ids in their order, and which place each had; the first of two alike comes first."""
    shift = (len(ids) - 1).bit_length()
    if (count - 1).bit_length() + shift > 32:
        order = jnp.argsort(ids, stable=True).astype(jnp.int32)
        return ids[order], order
    # Both in one number, which XLA sorts faster than two
    places = jnp.arange(len(ids), dtype=jnp.uint32)
    both = jnp.sort((ids.astype(jnp.uint32) << shift) | places)
    return (both >> shift).astype(jnp.int32), (both & (2**shift - 1)).astype(jnp.int32)


def _add_up(part: Part, count, source, ring, arrived, stages: int, total):
    """total + the rows source(0), ..., source(count - 1), brought on chip `stages` ahead."""

    def fetch(i):
        slot = jax.lax.rem(i, stages)
        plgpu.copy_gmem_to_smem(source(i), ring.at[slot], arrived.at[slot])

    def add(i, total):
        slot = jax.lax.rem(i, stages)
        plgpu.barrier_wait(arrived.at[slot])
        total = total + part.load(ring.at[slot]).astype(jnp.float32)
        plgpu.commit_smem()  # all threads have read the slot
        pl.when(i + stages < count)(lambda: fetch(i + stages))
        return total

    for i in range(stages):
        pl.when(i < count)(functools.partial(fetch, jnp.int32(i)))
    return jax.lax.fori_loop(0, count, add, total)


def _sum_runs(part: Part, dy, order, in_order):
    """float32 [M // RUN, parts, chunks, inner]: the sum of each run of rows that have one id.

    What stands for the others is left as it was.
    """
    count = order.shape[0] // RUN

    def body(dy_ref, order_ref, ids_ref, out_ref, ring, arrived):
        first, column = jax.lax.axis_index("block") * RUN, jax.lax.axis_index("part")

        @pl.when(ids_ref[first] == ids_ref[first + RUN - 1])
        def _():
            source = lambda i: part.at(dy_ref, order_ref[first + i], column)  # noqa: E731
            total = _add_up(part, RUN, source, ring, arrived, STAGES, part.zeros())
            part.store(out_ref.at[jax.lax.axis_index("block"), column], total)

    [result] = _compat.kernel(
        body,
        name="embedding_backward_runs",
        out_type=[jax.ShapeDtypeStruct((count, part.parts, part.chunks, part.inner), jnp.float32)],
        grid=(count, part.parts),
        grid_names=("block", "part"),
        scratch_types=[
            part.buffer(STAGES, dy.dtype),
            plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        ],
        unsafe_no_auto_barriers=True,  # a slot that all have read is passed on by `commit_smem`
        interpret=part.interpret,
    )(dy, order, in_order)
    return result


def _sum_rows(part: Part, dy, order, starts, runs, dtype, scale, num_sms):
    """[V, parts, n, inner] from the rows and, if there are any, the sums of runs.

    starts[i] is how many ids are below i: the rows of id i are order[starts[i] : starts[i + 1]].
    """
    v, row_bytes = starts.shape[0] - 1, part.padded * dtype.itemsize
    rows = max(1, min(MAX_BOX, TILE_BYTES // row_bytes))
    tiles = -(-v // rows) * part.parts
    run_stages = 2 * bool(runs)
    shared = 2 * rows * row_bytes + part.padded * (STAGES * dy.dtype.itemsize + 4 * run_stages)
    blocks = min(tiles, min(BLOCKS, SHARED_BYTES // (shared + 2048)) * num_sms)  # all run at once

    def body(dy_ref, order_ref, starts_ref, *refs):
        run_refs, (out_ref, zeros, sums, ring, arrived), run_ring = (
            refs[: len(runs)],
            refs[len(runs) : len(runs) + 5],
            refs[len(runs) + 5 :],
        )
        block = jax.lax.axis_index("block")
        for r in range(rows):
            part.store(zeros.at[r], part.zeros(dtype))
        plgpu.commit_smem()

        def start_of(row):
            return starts_ref[jnp.minimum(row, v)]

        def sum_of(row, column):
            start, end = start_of(row), start_of(row + 1)
            # Whole runs lie from `left` to `right`; before and behind them are single rows.
            left = right = start
            if runs:
                left = jnp.minimum((start + RUN - 1) // RUN * RUN, end)
                right = left + (end - left) // RUN * RUN

            def single(i):
                at = start + i
                at = jnp.where(at < left, at, at - left + right)
                return part.at(dy_ref, order_ref[at], column)

            singles = left - start + end - right
            total = _add_up(part, singles, single, ring, arrived, STAGES, part.zeros())
            if runs:
                sums_of_runs, run_arrived = run_ring
                whole = lambda i: part.at(run_refs[0], left // RUN + i, column)  # noqa: E731
                total = _add_up(
                    part,
                    (right - left) // RUN,
                    whole,
                    sums_of_runs,
                    run_arrived,
                    run_stages,
                    total,
                )
            if scale is not None:
                total = total * jnp.asarray(scale, dy.dtype).astype(jnp.float32)
            return total

        def tile(i, _):
            index = block + i * blocks
            first, column = index // part.parts * rows, jax.lax.rem(index, part.parts)
            is_empty = start_of(first) == start_of(first + rows)

            @pl.when(is_empty)
            def _():
                part.write(zeros, out_ref, first, rows, column, v)

            @pl.when(jnp.logical_not(is_empty))
            def _():
                def one_row(r, _):
                    part.store(sums.at[r], sum_of(first + r, column).astype(dtype))
                    return 0

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                jax.lax.fori_loop(0, rows, one_row, 0)
                plgpu.commit_smem()
                part.write(sums, out_ref, first, rows, column, v)

            return 0

        jax.lax.fori_loop(0, (tiles - block + blocks - 1) // blocks, tile, 0)
        plgpu.wait_smem_to_gmem(0)

    [result] = _compat.kernel(
        body,
        name="embedding_backward",
        out_type=[jax.ShapeDtypeStruct((v, *dy.shape[1:]), dtype)],
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[
            *[part.buffer(rows, dtype)] * 2,
            part.buffer(STAGES, dy.dtype),
            plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
            *[part.buffer(run_stages, jnp.float32) for _ in runs],
            *[plgpu.Barrier(num_arrivals=1, num_barriers=run_stages) for _ in runs],
        ],
        unsafe_no_auto_barriers=True,  # a slot that all have read is passed on by `commit_smem`
        interpret=part.interpret,
    )(dy, order, starts, *runs)
    return result
