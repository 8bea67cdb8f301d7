"""The kernel of `quantized_matmul` for more rows of x than `warps` has registers for.

x is multiplied by tiles of the weight that become numbers of x's dtype in registers. A warpgroup of
few registers brings x, codes, scales and zero points through the copy engine (TMA) into a ring of
stages, 128 numbers of each row a stage (or 64: `step`). Each of the others takes 64 rows of the
weight (32 of gate and 32 of up), expands their codes, 64 numbers of each row at a time, and
multiplies what it holds (wgmma, whose left operand is the weight, from registers, and whose right
one is x, on chip). What one expands hides behind what the others multiply, and behind its own
product before that. So sums stand with a row of the weight in a row, and are turned on their way
out. Blocks stay on their multiprocessors and take tile after tile in an order that snakes through
groups of rows; with `splits`, several blocks divide K, and their float32 sums are added behind the
kernel in a fixed order. What happens to a code between its word and its number is
`quantized_unpack`'s, and plain JAX in the interpreter, which sees all the rest. Imported only by
quantized_matmul.py.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels import quantized_unpack as unpack
from pallas_kernels.matmul_finish import GATES
from pallas_kernels.packed import Packed
from pallas_kernels.quantized_expand import halves as halves_of
from pallas_kernels.quantized_expand import layout, load_turned, numbers, store_turned
from pallas_kernels.quantized_matmul_config import Static
from pallas_kernels.quantized_tiles_config import (
    CHUNK,
    Tiles,
    code_bytes,
    grouped_arrays,
    groups_of,
    step,
    too_early,
    whole_copies,
)
from pallas_kernels.ring import Ring
from pallas_kernels.wgmma_tiles import WGMMA_ROWS, rows_as_copied, wgmma_transforms

# Of a thread that brings and of one that multiplies, by consumers; five warpgroups begin with 96
REGISTERS = {1: None, 2: (40, 232), 3: (32, 160), 4: (24, 112)}


def _tiles(static: Static) -> Tiles:
    assert isinstance(static.config, Tiles)
    return static.config


def tile_products(static: Static, x, packed: Packed, bias=None, residual=None):
    """x [M, K] times the weight, [M, F] of 16 bits with all that follows; or float32 sums alone,
    [splits, M, O], of more splits than one each its part.
    """
    c, interpret = _tiles(static), static.interpret
    gate, gated, out_dtype = static.gate, static.gated, jnp.dtype(static.out_dtype)
    sums_alone = out_dtype == jnp.float32
    rest = 1.0 if interpret else unpack.rest(packed.scheme, x.dtype)
    halves, size, row_bytes = 1 + gated, step(packed), code_bytes(packed)
    (m, k), chunks = x.shape, size // CHUNK
    width, tile_width = packed.shape[0] // halves, c.tile_n // halves
    # a consumer has gate and up, and what fills two lines in float32, in pieces: each of its warps
    # has some rows of all
    consumers, pieces = c.consumers, range(2 if gated or sums_alone else 1)
    line = WGMMA_ROWS // len(pieces)
    tiles = (-(-m // c.tile_m), -(-width // tile_width))
    steps = k // size
    grouped, groups = grouped_arrays(packed), groups_of(packed)
    per = max(1, (packed.group_size or k) // size)  # steps that share a group
    few = min(c.tile_m, -(-m // 8) * 8)  # rows behind them end in rows that are not written
    # slices of the result: rows of x, how many, and which piece
    slices = [
        (start, min(WGMMA_ROWS, c.tile_m - start), piece)
        for start in range(0, c.tile_m, WGMMA_ROWS)
        for piece in (pieces if sums_alone else (0,))
    ]
    vectors = {"row_scale": packed.row_scale, "bias": bias}
    vectors = {name: each for name, each in vectors.items() if each is not None}
    assert not (sums_alone and (gated or vectors or residual is not None))
    # the second half's numbers lie so far behind the start of what was copied
    early = {name: too_early(width, each.dtype) for name, each in (grouped | vectors).items()}

    def body(x_ref, codes_ref, *refs, **scratch):
        *given, residual_ref, out_ref = refs
        given = dict(zip((*grouped, *vectors), given, strict=True))
        x_s, codes_s, slots = (scratch[n] for n in ("x", "codes", "out"))
        stages = Ring(scratch["full"], scratch["empty"], c.stages)
        group = lax.axis_index("group")
        registers = REGISTERS[consumers]

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
            if registers is not None:
                plgpu.set_max_registers(registers[0], action="decrease")

            def tile(_part, row, column, inner, at):
                def load(i, at):
                    slot = stages.claim(at)
                    full = stages.full.at[slot]
                    for half in range(halves):
                        start = column + half * width
                        source = codes_ref.at[
                            pl.ds(start, tile_width), pl.ds(i * row_bytes, row_bytes)
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

        def consume():
            if registers is not None:
                plgpu.set_max_registers(registers[1], action="increase")
            first = group * (WGMMA_ROWS // halves)

            # of each piece: its half, and where in what was copied of that it begins
            places = [(i, first) if gated else (0, first + i * line) for i in pieces]

            def multiply(inner, at):
                """The next stage, and the sums [64, tile_m]: first of gate, then of up."""

                def stage(i, carry):
                    at, total = carry
                    slot = stages.wait(at)
                    for chunk in range(chunks):
                        codes = [
                            codes_s.at[slot, pl.ds(start + half * tile_width, line)]
                            for half, start in places
                        ]
                        of = {
                            each: [
                                scratch[each].at[
                                    slot, half, :, pl.ds(start + half * early[each], line)
                                ]
                                for half, start in places
                            ]
                            for each in grouped
                        }
                        left = numbers(codes, of, packed, x.dtype, chunk, interpret=interpret)
                        if chunk == 0:  # the stage before this has been read
                            left, total = _compat.wgmma_wait(0, left, total)

                            @pl.when(i > inner[0])
                            def _():
                                stages.give_back(at - 1)

                        left, total = _compat.wgmma_ready(left, total, interpret=interpret)
                        right = x_s.at[slot, chunk]
                        total = _compat.wgmma(
                            total, left, right, transpose_b=True, interpret=interpret
                        )
                    # the next stage first writes the registers that the first product has read
                    return at + 1, _compat.wgmma_wait(chunks - 1, total)

                zeros = jnp.zeros((WGMMA_ROWS, c.tile_m), jnp.float32)
                zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
                at, total = lax.fori_loop(inner[0], inner[1], stage, (at, zeros))
                total = _compat.wgmma_wait(0, total)
                stages.give_back(at - 1)
                return at, total

            def finished(total, start, count, half):
                """A slice of the sums with what belongs to its rows."""

                def vector_of(each):
                    place = scratch[each].at[half, pl.ds(first + half * early[each], line)]
                    part = _compat.load(place, layout(line).reduce(1)).astype(jnp.float32)
                    wide = lax.broadcast_in_dim(part, (line, count), (0,))
                    return plgpu.layout_cast(wide, layout(line))

                y = total[:, start : start + count]
                y = y if rest == 1 else y * rest  # powers of two
                y = y * vector_of("row_scale") if "row_scale" in vectors else y
                return y + vector_of("bias") if "bias" in vectors else y

            def tile(part, row, column, inner, at):
                column = column + first

                def target(ref, i):
                    start, count, piece = slices[i]
                    place = pl.ds(row + start, count), pl.ds(column + piece * line, line)
                    return ref.at[part, *place] if sums_alone else ref.at[*place]

                def slot_rows(i):
                    return rows_as_copied(slots, (group, i % 2), 0, slices[i][1], interpret)

                def load_residual(i):
                    barrier = scratch["residual"].at[group, i % 2]
                    plgpu.copy_gmem_to_smem(target(residual_ref, i), slot_rows(i), barrier)

                if residual is not None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for i in range(min(2, len(slices))):
                        load_residual(i)
                at, total = multiply(inner, at)
                sums: Any = (total,)
                if len(pieces) > 1:
                    sums = halves_of(total, interpret=interpret)
                if vectors:
                    plgpu.barrier_wait(scratch["vectors_full"])
                for i, (start, count, piece) in enumerate(slices):
                    slot = slots.at[group, i % 2, pl.ds(0, count)]
                    y = finished(sums[piece], start, count, 0)
                    if gate is not None:
                        y = GATES[gate](y) * finished(sums[1], start, count, 1)
                    if residual is not None:
                        plgpu.barrier_wait(scratch["residual"].at[group, i % 2])
                        added = load_turned(slot, interpret=interpret)
                        y = y + added.astype(jnp.float32)
                    else:  # the copy before the last has left its slot; the last one too, if the
                        # tile before this one ended in the same slot
                        again = i == 0 and len(slices) % 2
                        plgpu.wait_smem_to_gmem(0 if again else 1, wait_read_only=True)
                    store_turned(slot, y.astype(out_dtype), interpret=interpret)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(slot_rows(i), target(out_ref, i))
                    if residual is not None and i + 2 < len(slices):
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        load_residual(i + 2)
                if vectors:
                    plgpu.barrier_arrive(scratch["vectors_empty"])
                return at

            each_tile(tile)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(group == consumers, produce, consume)

    dtype = x.dtype
    scratch: dict[str, Any] = {
        "x": plgpu.SMEM(
            (c.stages, chunks, c.tile_m, CHUNK), dtype, transforms=wgmma_transforms(CHUNK, dtype)
        ),
        "codes": plgpu.SMEM(
            (c.stages, c.tile_n, row_bytes),
            packed.codes.dtype,
            transforms=wgmma_transforms(row_bytes, packed.codes.dtype),
        ),
        "out": plgpu.SMEM(
            (consumers, 2, WGMMA_ROWS, line),
            out_dtype,
            transforms=wgmma_transforms(line, out_dtype),
        ),
        "full": plgpu.Barrier(
            num_arrivals=chunks + halves * (1 + len(grouped)), num_barriers=c.stages
        ),
        "empty": plgpu.Barrier(num_arrivals=consumers, num_barriers=c.stages),
    }
    for each, array in grouped.items():
        wide = whole_copies(tile_width + early[each], array.dtype)
        scratch[each] = plgpu.SMEM((c.stages, halves, groups, wide), array.dtype)
    for each, array in vectors.items():
        wide = whole_copies(tile_width + early[each], array.dtype)
        scratch[each] = plgpu.SMEM((halves, wide), array.dtype)
    if vectors:
        scratch["vectors_full"] = plgpu.Barrier(num_arrivals=halves * len(vectors))
        scratch["vectors_empty"] = plgpu.Barrier(num_arrivals=consumers)
    if residual is not None:
        scratch["residual"] = plgpu.Barrier(num_barriers=(consumers, 2))
    shape = (c.splits, m, width) if sums_alone else (m, width)
    return _compat.kernel(
        body,
        name=static.name,
        out_type=jax.ShapeDtypeStruct(shape, out_dtype),
        scratch_types=scratch,
        grid=(min(static.num_sms, math.prod(tiles) * c.splits),),
        grid_names=("block",),
        num_threads=consumers + 1,
        thread_name="group",
        interpret=interpret,
        approx_math=True,
    )(x, packed.codes, *grouped.values(), *vectors.values(), residual)
