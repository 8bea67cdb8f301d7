"""The kernel of `quantized_matmul` for more rows of x than `warps` has registers for.

x is multiplied by tiles of the weight that lie in shared memory as numbers of x's dtype. A
warpgroup of few registers brings x, codes, scales and zero points through the copy engine (TMA)
into a ring of stages, 64 bytes of codes of each row a stage. Others expand the codes, 64 numbers of
each row at a time, into a second ring of 128-byte swizzled tiles, while the last ones multiply
(wgmma, both operands in shared memory) what was expanded before. Blocks stay on their
multiprocessors and take tile after tile in an order that snakes through groups of rows; with
`splits`, several blocks divide K, and their float32 sums are added behind the kernel in a fixed
order. What happens to a code between its word and its number is `quantized_unpack`'s, and plain JAX
in the interpreter, which sees all the rest. Imported only by quantized_matmul.py.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels import quantized_unpack as unpack
from pallas_kernels.packed import Packed
from pallas_kernels.quantized_expand import numbers
from pallas_kernels.quantized_matmul_config import Static
from pallas_kernels.quantized_tiles_config import (
    CHUNK,
    CODE_BYTES,
    ROWS,
    Tiles,
    grouped_arrays,
    groups_of,
    step,
    too_early,
    whole_copies,
)
from pallas_kernels.ring import Ring
from pallas_kernels.wgmma_tiles import LINE_BYTES, WGMMA_ROWS, rows_as_copied, wgmma_transforms

# 40 + 88 + 2 * 184 of the 512 that four warpgroups share; with one consumer all have enough
PRODUCER_REGISTERS, EXPANDER_REGISTERS, CONSUMER_REGISTERS = 40, 88, 184


def _tiles(static: Static) -> Tiles:
    assert isinstance(static.config, Tiles)
    return static.config


def tile_products(static: Static, x, packed: Packed, bias=None, residual=None):
    """[splits, M, N] of x [M, K]: of more splits than one each its part of the sums."""
    c, interpret = _tiles(static), static.interpret
    gated, out_dtype = static.gated, jnp.dtype(static.out_dtype)
    rest = 1.0 if interpret else unpack.rest(packed.scheme, x.dtype)
    halves, size = 1 + gated, step(packed.scheme)
    (m, k), chunks = x.shape, size // CHUNK
    width, tile_width = packed.shape[0] // halves, c.tile_n // halves
    rows, blocks = c.tile_m // c.consumers, c.tile_n // ROWS // c.expanders
    tiles = (-(-m // c.tile_m), -(-width // tile_width))
    steps = k // size
    grouped, groups = grouped_arrays(packed), groups_of(packed)
    per = max(1, (packed.group_size or k) // size)  # steps that share a group
    few = min(c.tile_m, -(-m // 8) * 8)  # rows behind them end in rows that are not written
    slice_width = min(tile_width, LINE_BYTES // out_dtype.itemsize)
    slices = [
        (row, column)
        for row in range(0, rows, WGMMA_ROWS)
        for column in range(0, tile_width, slice_width)
    ]
    vectors = {"row_scale": packed.row_scale, "bias": bias}
    vectors = {name: each for name, each in vectors.items() if each is not None}
    # the second half's numbers lie so far behind the start of what was copied
    early = {name: too_early(width, each.dtype) for name, each in (grouped | vectors).items()}

    def body(x_ref, codes_ref, *refs, **scratch):
        *given, residual_ref, out_ref = refs
        given = dict(zip((*grouped, *vectors), given, strict=True))
        x_s, codes_s, numbers_s, slots = (scratch[n] for n in ("x", "codes", "numbers", "out"))
        stages = Ring(scratch["full"], scratch["empty"], c.stages)
        buffers = Ring(scratch["ready"], scratch["free"], c.buffers)
        group = lax.axis_index("group")

        def each_tile(step_of) -> Any:
            """step_of(part, row, column, steps of K, first stage) -> next stage, for every tile."""

            @plgpu.nd_loop(
                (tiles[0] * tiles[1] * c.splits,), collective_axes="block", init_carry=jnp.int32(0)
            )
            def end(info, carry):
                at = info.index[0]
                part = lax.rem(at, jnp.int32(c.splits)) if c.splits > 1 else at * 0
                at = lax.div(at, jnp.int32(c.splits)) if c.splits > 1 else at
                down, across = plgpu.planar_snake(at, tiles, 0, c.snake)
                inner = (steps * part // c.splits, steps * (part + 1) // c.splits)
                return step_of(part, down * c.tile_m, across * tile_width, inner, carry)

            return end

        def produce():
            if c.consumers > 1:
                plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def tile(_part, row, column, inner, at):
                def load(i, at):
                    slot = stages.claim(at)
                    full = stages.full.at[slot]
                    for half in range(halves):
                        start = column + half * width
                        source = codes_ref.at[
                            pl.ds(start, tile_width), pl.ds(i * CODE_BYTES, CODE_BYTES)
                        ]
                        target = rows_as_copied(
                            codes_s, (slot,), half * tile_width, tile_width, interpret
                        )
                        plgpu.copy_gmem_to_smem(source, target, full)
                        for each in grouped:
                            first = i * groups if per == 1 else lax.div(i, jnp.int32(per))
                            target = scratch[each].at[slot, half]
                            source = given[each].at[
                                pl.ds(first, groups),
                                pl.ds(start - half * early[each], target.shape[1]),
                            ]
                            plgpu.copy_gmem_to_smem(source, target, full)
                    for chunk in range(chunks):
                        source = x_ref.at[pl.ds(row, few), pl.ds(i * size + chunk * CHUNK, CHUNK)]
                        target = rows_as_copied(x_s, (slot, chunk), 0, few, interpret)
                        plgpu.copy_gmem_to_smem(source, target, full)
                    return at + 1

                end = lax.fori_loop(inner[0], inner[1], load, at)
                if vectors:  # behind the stages: nothing waits for these before the last of them

                    @pl.when(at > 0)
                    def _():
                        plgpu.barrier_wait(scratch["vectors_empty"])

                    for each in vectors:
                        for half in range(halves):
                            target = scratch[each].at[half]
                            start = column + half * (width - early[each])
                            source = given[each].at[pl.ds(start, target.shape[0])]
                            plgpu.copy_gmem_to_smem(source, target, scratch["vectors_full"])
                return end

            end = each_tile(tile)
            if vectors:

                @pl.when(end > 0)
                def _():
                    plgpu.barrier_wait(scratch["vectors_empty"])

            stages.drain(end)

        def expand():
            if c.consumers > 1:
                plgpu.set_max_registers(EXPANDER_REGISTERS, action="decrease")
            first = (group - c.consumers - 1) * blocks

            def block(i, slot, buffer, chunk):
                start = (first + i) * ROWS
                half, inside = (f(start, jnp.int32(tile_width)) for f in (lax.div, lax.rem))
                of = {
                    each: scratch[each].at[slot, half, :, pl.ds(inside + half * early[each], ROWS)]
                    for each in grouped
                }
                codes = codes_s.at[slot, pl.ds(start, ROWS)]
                found = numbers(codes, of, packed, x.dtype, chunk, interpret=interpret)
                numbers_s.at[buffer, pl.ds(start, ROWS)][...] = found

            def tile(_part, _row, _column, inner, at):
                def stage(_, at):
                    slot = stages.wait(at)
                    for chunk in range(chunks):
                        buffer = buffers.claim(at * chunks + chunk)
                        for i in range(blocks):
                            block(i, slot, buffer, chunk)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(buffers.full.at[buffer])
                    stages.give_back(at)
                    return at + 1

                return lax.fori_loop(inner[0], inner[1], stage, at)

            buffers.drain(each_tile(tile) * chunks)

        def consume():
            if c.consumers > 1:
                plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            mine = pl.ds(group * rows, rows)

            def multiply(inner, at, acc):
                def stage(at, *, first):
                    slot = stages.wait(at)
                    for chunk in range(chunks):
                        turn = at * chunks + chunk
                        buffer = buffers.wait(turn)
                        plgpu.wgmma(acc, x_s.at[slot, chunk].at[mine], numbers_s.at[buffer].T)
                        if first and chunk == 0:
                            continue
                        plgpu.wgmma_wait(1)  # the one before is done
                        buffers.give_back(turn - 1)
                        if chunk == 0:
                            stages.give_back(at - 1)
                    return at + 1

                begin, end = inner
                at = stage(at, first=True)
                at = lax.fori_loop(begin + 1, end, lambda _, at: stage(at, first=False), at)
                total = acc[...]
                buffers.give_back(at * chunks - 1)
                stages.give_back(at - 1)
                return total

            def finished(total, row, column, half):
                """A slice of the sums with what belongs to its columns."""

                def vector_of(each):
                    place = scratch[each].at[half, pl.ds(column + half * early[each], slice_width)]
                    part = _compat.load(place, plgpu.Layout.WGMMA.reduce(0)).astype(jnp.float32)
                    part = lax.broadcast_in_dim(part, (WGMMA_ROWS, slice_width), (1,))
                    return plgpu.layout_cast(part, plgpu.Layout.WGMMA)

                column_ = column + half * tile_width
                y = total[row : row + WGMMA_ROWS, column_ : column_ + slice_width]
                y = y if rest == 1 else y * rest  # powers of two
                y = y * vector_of("row_scale") if "row_scale" in vectors else y
                return y + vector_of("bias") if "bias" in vectors else y

            def tile(part, row, column, inner, at):
                row = row + group * rows

                def target(ref, i):
                    down, across = slices[i]
                    return ref.at[
                        pl.ds(row + down, WGMMA_ROWS), pl.ds(column + across, slice_width)
                    ]

                def slot_rows(i):
                    return rows_as_copied(slots, (group, i % 2), 0, WGMMA_ROWS, interpret)

                def load_residual(i):
                    barrier = scratch["residual"].at[group, i % 2]
                    plgpu.copy_gmem_to_smem(target(residual_ref, i), slot_rows(i), barrier)

                if residual is not None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for i in range(min(2, len(slices))):
                        load_residual(i)
                total = pl.run_scoped(
                    functools.partial(multiply, inner, at),
                    plgpu.WGMMAAccumulatorRef((rows, c.tile_n), jnp.float32),
                )
                if vectors:
                    plgpu.barrier_wait(scratch["vectors_full"])
                for i, (down, across) in enumerate(slices):
                    slot = slots.at[group, i % 2]
                    y = finished(total, down, across, 0)
                    if gated:
                        y = jax.nn.silu(y) * finished(total, down, across, 1)
                    if residual is not None:
                        plgpu.barrier_wait(scratch["residual"].at[group, i % 2])
                        y = y + _compat.load(slot, plgpu.Layout.WGMMA).astype(jnp.float32)
                    else:  # the copy before the last has left its slot; the last one too, if the
                        # tile before this one ended in the same slot
                        again = i == 0 and len(slices) % 2
                        plgpu.wait_smem_to_gmem(0 if again else 1, wait_read_only=True)
                    slot[...] = y.astype(out_dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(slot_rows(i), target(out_ref.at[part], i))
                    if residual is not None and i + 2 < len(slices):
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        load_residual(i + 2)
                if vectors:
                    plgpu.barrier_arrive(scratch["vectors_empty"])
                return at + inner[1] - inner[0]

            each_tile(tile)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(
            group < c.consumers, consume, lambda: lax.cond(group == c.consumers, produce, expand)
        )

    dtype = x.dtype
    scratch: dict[str, Any] = {
        "x": plgpu.SMEM(
            (c.stages, chunks, c.tile_m, CHUNK), dtype, transforms=wgmma_transforms(CHUNK, dtype)
        ),
        "codes": plgpu.SMEM(
            (c.stages, c.tile_n, CODE_BYTES),
            packed.codes.dtype,
            transforms=wgmma_transforms(CODE_BYTES, packed.codes.dtype),
        ),
        "numbers": plgpu.SMEM(
            (c.buffers, c.tile_n, CHUNK), dtype, transforms=wgmma_transforms(CHUNK, dtype)
        ),
        "out": plgpu.SMEM(
            (c.consumers, 2, WGMMA_ROWS, slice_width),
            out_dtype,
            transforms=wgmma_transforms(slice_width, out_dtype),
        ),
        "full": plgpu.Barrier(
            num_arrivals=chunks + halves * (1 + len(grouped)), num_barriers=c.stages
        ),
        "empty": plgpu.Barrier(num_arrivals=c.consumers + c.expanders, num_barriers=c.stages),
        "ready": plgpu.Barrier(num_arrivals=c.expanders, num_barriers=c.buffers),
        "free": plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.buffers),
    }
    for each, array in grouped.items():
        wide = whole_copies(tile_width + early[each], array.dtype)
        scratch[each] = plgpu.SMEM((c.stages, halves, groups, wide), array.dtype)
    for each, array in vectors.items():
        wide = whole_copies(tile_width + early[each], array.dtype)
        scratch[each] = plgpu.SMEM((halves, wide), array.dtype)
    if vectors:
        scratch["vectors_full"] = plgpu.Barrier(num_arrivals=halves * len(vectors))
        scratch["vectors_empty"] = plgpu.Barrier(num_arrivals=c.consumers)
    if residual is not None:
        scratch["residual"] = plgpu.Barrier(num_barriers=(c.consumers, 2))
    return _compat.kernel(
        body,
        name=static.name,
        out_type=jax.ShapeDtypeStruct((c.splits, m, width), out_dtype),
        scratch_types=scratch,
        grid=(min(static.num_sms, math.prod(tiles) * c.splits),),
        grid_names=("block",),
        num_threads=c.consumers + 1 + c.expanders,
        thread_name="group",
        interpret=interpret,
        approx_math=True,
    )(x, packed.codes, *grouped.values(), *vectors.values(), residual)
