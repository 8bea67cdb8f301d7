"""The kernel of `matmul`: one product of two matrices, and what follows it before it is written.

One block stays on each multiprocessor and takes every blocks-th tile of the result, in an order
that snakes through groups of rows so that neighbours share what the L2 holds. A warpgroup of few
registers brings tiles of a and b through the copy engine (TMA) into a ring of stages, 128-byte
swizzled, and runs ahead into the next tile while the consumers still write the last. Two consumer
warpgroups each multiply (wgmma) their half of the rows, one stage's product in flight while the
stage before it is given back. The result leaves by slices of 128 bytes, two buffers a consumer.
Where gate and up meet, the left half of a tile of b comes from the gate columns and the right half
from the up columns, so that each pair is in the registers of one thread.
Imported only by matmul*.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.matmul_finish import BLOCK, GELUS, saturated
from pallas_kernels.ring import Ring
from pallas_kernels.wgmma_tiles import LINE_BYTES, WGMMA_ROWS, rows_as_copied, wgmma_transforms

VECTOR_BYTES = 1024  # a bias or scales of a tile, as aligned on chip
FORMS = ("tiles", "vectors", "split")
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232  # 40 + 2 * 232 of the 512 that three share


@dataclasses.dataclass(frozen=True)
class Config:
    """A block computes tile_m x tile_n at a time, tile_k of K a stage.

    consumers: warpgroups that split the rows of a tile. stages: how many are loaded ahead.
    snake: tiles of rows that are neighbours in the order of tiles. form: the kernel, one of FORMS;
    the two of `matmul_few_rows` say there what of all this means something to them. cluster: of
    "split", blocks that divide K.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    consumers: int = 2
    stages: int = 4
    snake: int = 8
    cluster: int = 1
    form: str = "tiles"


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel is compiled for."""

    name: str
    config: Config
    num_sms: int
    interpret: bool
    out_dtype: str
    transpose_a: bool = False
    transpose_b: bool = False
    epilogue: str | None = None

    @property
    def gated(self) -> bool:
        return self.epilogue == "swiglu"


def shared_bytes(config: Config, dtype, vectors: int) -> int:
    """On chip: stages, two slices of the result a consumer, scales and bias, barriers."""
    c = config
    stage = (c.tile_m + c.tile_n) * c.tile_k * dtype.itemsize
    slices = 2 * c.consumers * WGMMA_ROWS * LINE_BYTES
    barriers = 8 * (3 * c.stages + 2 * c.consumers + 2)
    return c.stages * stage + slices + max(vectors, 1) * VECTOR_BYTES + barriers


def product(
    static: Static, a, b, bias=None, residual=None, a_scale=None, b_scale=None, out_scale=None
):
    """One product of two matrices; a is [K, M] with transpose_a.

    With block scales, a_scale [M, K / 128] and b_scale [N / 128, K / 128], a stage is a block.
    Columns beyond 128 are multiplied when the sums of those before them have been added up, and
    lie behind a barrier of their own: without it ptxas would do both at once, and lacks registers.
    """
    c, gated, out_dtype = static.config, static.gated, jnp.dtype(static.out_dtype)
    m, k = a.shape[::-1] if static.transpose_a else a.shape
    n = b.shape[0] if static.transpose_b else b.shape[1]
    halves = 2 if gated else 1
    blocks = b_scale is not None and b_scale.ndim == 2
    sums = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
    width, tile_width = n // halves, c.tile_n // halves  # of the result
    rows = c.tile_m // c.consumers
    tiles = (-(-m // c.tile_m), -(-width // tile_width))
    k_steps = -(-k // c.tile_k)
    step = LINE_BYTES // a.dtype.itemsize
    chunks = c.tile_k // step
    wgmma_columns = min(c.tile_n, BLOCK) if blocks else c.tile_n  # multiplied at a time
    scale_columns = math.gcd(tile_width, BLOCK, width if gated else 0)  # that share a block scale
    b_rows = min(tile_width, wgmma_columns)  # brought by one copy
    slice_width = min(scale_columns if blocks else tile_width, LINE_BYTES // out_dtype.itemsize)
    slices = [
        (row, column)
        for row in range(0, rows, WGMMA_ROWS)
        for column in range(0, tile_width, slice_width)
    ]
    given: Any = {"bias": bias, "a_scale": a_scale, "b_scale": b_scale, "out_scale": out_scale}
    # a vector: of how many parts a tile has it; none where it has a number for each row
    vectors = {
        name: {"a_scale": 0, "out_scale": 1}.get(name, halves)
        for name, x in given.items()
        if x is not None and x.ndim == 1 and x.shape != (1,)
    }

    def body(
        a_ref,
        b_ref,
        bias_ref,
        residual_ref,
        a_scale_ref,
        b_scale_ref,
        out_scale_ref,
        out_ref,
        **scratch,
    ):
        sources = {
            "bias": bias_ref,
            "a_scale": a_scale_ref,
            "b_scale": b_scale_ref,
            "out_scale": out_scale_ref,
        }
        a_stages, b_stages, slots = scratch["a"], scratch["b"], scratch["out"]
        ring = Ring(scratch["full"], scratch["empty"], c.stages)
        group = lax.axis_index("group")

        def each_tile(step) -> Any:
            """step(row, column of the result, first stage) -> next stage, for every tile."""

            @plgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="block", init_carry=jnp.int32(0))
            def end(info, carry):
                down, across = plgpu.planar_snake(info.index[0], tiles, 0, c.snake)
                return step(down * c.tile_m, across * tile_width, carry)

            return end

        def load_chunk(row, column, inner, to, barrier):
            """128 bytes of K, or as many rows of an operand that lies the other way."""
            if static.transpose_a:
                outer = pl.ds(row, c.tile_m)
                plgpu.copy_gmem_to_smem(a_ref.at[inner, outer], a_stages.at[to], barrier)
            else:
                # Fewer rows than a tile: what lies behind them in shared memory is multiplied too,
                # and ends in rows that are not written.
                few = min(c.tile_m, -(-m // 8) * 8)
                target = rows_as_copied(a_stages, to, 0, few, static.interpret)
                plgpu.copy_gmem_to_smem(a_ref.at[pl.ds(row, few), inner], target, barrier)
            for start in range(0, c.tile_n, b_rows):
                half, within = divmod(start, tile_width)
                outer = pl.ds(column + half * width + within, b_rows)
                if static.transpose_b:
                    source = b_ref.at[outer, inner]
                    target = rows_as_copied(b_stages, to, start, b_rows, static.interpret)
                else:
                    source, target = b_ref.at[inner, outer], b_stages.at[to]
                arrives = barrier if start < wgmma_columns else scratch["full_beyond"].at[to[0]]
                plgpu.copy_gmem_to_smem(source, target, arrives)

        def produce():
            if c.consumers > 1:
                plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def tile(row, column, at):
                def load(i, at):
                    slot = ring.claim(at)
                    for chunk in range(chunks):
                        inner = pl.ds(i * c.tile_k + chunk * step, step)
                        load_chunk(row, column, inner, (slot, chunk), ring.full.at[slot])
                    return at + 1

                end = lax.fori_loop(0, k_steps, load, at)
                if vectors:  # after the stages: nothing waits for these before the last of them

                    @pl.when(at > 0)
                    def _():
                        plgpu.barrier_wait(scratch["vectors_empty"])

                    for name, count in vectors.items():
                        source, target = sources[name], scratch[name]
                        parts = [
                            (column + half * width, half * tile_width, tile_width)
                            for half in range(count)
                        ]
                        parts = parts or [(row, 0, c.tile_m)]
                        for start, to, size in parts:
                            size = _whole_lines(size, source.dtype)
                            plgpu.copy_gmem_to_smem(
                                source.at[pl.ds(start, size)],
                                target.at[pl.ds(to, size)],
                                scratch["vectors_full"],
                            )
                return end

            end = each_tile(tile)
            if vectors:  # as in `Ring.drain`

                @pl.when(end > 0)
                def _():
                    plgpu.barrier_wait(scratch["vectors_empty"])

            ring.drain(end)

        def consume():
            if c.consumers > 1:
                plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            mine = pl.ds(group * rows, rows)

            def multiply(at, acc):
                def issue(at):
                    slot = ring.wait(at)
                    for chunk in range(chunks):
                        left, right = a_stages.at[slot, chunk], b_stages.at[slot, chunk]
                        left = left.at[:, mine].T if static.transpose_a else left.at[mine]
                        plgpu.wgmma(acc, left, right.T if static.transpose_b else right)

                def next_stage(_, at):
                    issue(at)
                    plgpu.wgmma_wait(chunks)  # those before this stage's are done
                    ring.give_back(at - 1)
                    return at + 1

                issue(at)
                end = lax.fori_loop(1, k_steps, next_stage, at + 1)
                total = acc[...]
                ring.give_back(end - 1)
                return total

            def multiply_blocks(at, row, column):
                """Sums for every `scale_columns` columns; those of a stage are scaled and added."""
                places = []
                for start in range(0, c.tile_n, scale_columns):
                    half, within = divmod(start, tile_width)
                    place = lax.div(column + half * width + within, jnp.int32(BLOCK))
                    places.append(jnp.minimum(place, b_scale_ref.shape[0] - 1))  # not beyond N

                def issue(slot, start):
                    _compat.wgmma_ready(interpret=static.interpret)
                    return _compat.wgmma(
                        None,
                        a_stages.at[slot, 0].at[mine],
                        b_stages.at[slot, 0].at[pl.ds(start, wgmma_columns)],
                        transpose_b=True,
                        interpret=static.interpret,
                    )

                def add(totals, products, scales):
                    for which, (total, scale) in enumerate(zip(totals, scales, strict=True)):
                        start = which * scale_columns
                        scale = lax.broadcast_in_dim(scale, (rows, scale_columns), (0,))
                        scale = plgpu.layout_cast(scale, plgpu.Layout.WGMMA)
                        yield total + products[:, start : start + scale_columns] * scale

                def next_stage(i, carry):
                    at, totals = carry
                    slot = ring.wait(at)
                    products = issue(slot, 0)
                    # asked for before the product, it would wait for them
                    of_rows = _compat.load(
                        a_scale_ref.at[pl.ds(row, rows), i],
                        plgpu.Layout.WGMMA.reduce(1),
                        optimized=False,
                    )
                    scales = [of_rows * b_scale_ref[place, i] for place in places]
                    added = []
                    for start in range(0, c.tile_n, wgmma_columns):
                        if start:
                            plgpu.barrier_wait(scratch["full_beyond"].at[slot])
                            products = issue(slot, start)
                        products = _compat.wgmma_wait(0, products)
                        end = start + wgmma_columns
                        if end == c.tile_n:
                            ring.give_back(at)
                        some = slice(start // scale_columns, end // scale_columns)
                        added += add(totals[some], products, scales[some])
                    return at + 1, added

                zeros = jnp.zeros((rows, scale_columns), jnp.float32)
                zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
                return lax.fori_loop(0, k_steps, next_stage, (at, [zeros] * len(places)))[1]

            def times(y, name, dimension, row, column, by=jnp.multiply):
                """A slice of the result with a scale, or with the bias."""
                if name not in vectors:
                    return y if sources[name] is None else by(y, sources[name][0])
                start = (group * rows + row, column)[dimension]
                part = scratch[name].at[pl.ds(start, (WGMMA_ROWS, slice_width)[dimension])]
                layout = plgpu.Layout.WGMMA.reduce(1 - dimension)
                part = _compat.load(part, layout).astype(jnp.float32)
                part = lax.broadcast_in_dim(part, (WGMMA_ROWS, slice_width), (dimension,))
                return by(y, plgpu.layout_cast(part, plgpu.Layout.WGMMA))

            def scaled(total, row, column):
                if blocks:
                    which, start = divmod(column, scale_columns)
                    y = total[which][:, start : start + slice_width]
                else:
                    y = total[row : row + WGMMA_ROWS, column : column + slice_width]
                if out_dtype == jnp.int32:
                    return y
                y = y.astype(jnp.float32)
                if not blocks:
                    y = times(y, "a_scale", 0, row, column)
                    y = times(y, "b_scale", 1, row, column)
                return times(y, "bias", 1, row, column, jnp.add)

            def tile(row, column, at):
                row = row + group * rows

                def target(ref, i):
                    down, across = slices[i]
                    return ref.at[
                        pl.ds(row + down, WGMMA_ROWS), pl.ds(column + across, slice_width)
                    ]

                def slot_rows(i):
                    return rows_as_copied(slots, (group, i % 2), 0, WGMMA_ROWS, static.interpret)

                def load_residual(i):
                    barrier = scratch["residual"].at[group, i % 2]
                    plgpu.copy_gmem_to_smem(target(residual_ref, i), slot_rows(i), barrier)

                if residual is not None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for i in range(min(2, len(slices))):
                        load_residual(i)
                if blocks:
                    total = multiply_blocks(at, row, column)
                else:
                    total = pl.run_scoped(
                        functools.partial(multiply, at),
                        plgpu.WGMMAAccumulatorRef((rows, c.tile_n), sums),
                    )
                if vectors:
                    plgpu.barrier_wait(scratch["vectors_full"])
                for i, (down, across) in enumerate(slices):
                    slot = slots.at[group, i % 2]
                    y = scaled(total, down, across)
                    if gated:
                        y = jax.nn.silu(y) * scaled(total, down, across + tile_width)
                    elif static.epilogue is not None:
                        y = GELUS[static.epilogue](y)
                    if residual is not None:
                        plgpu.barrier_wait(scratch["residual"].at[group, i % 2])
                        y = y + _compat.load(slot, plgpu.Layout.WGMMA).astype(jnp.float32)
                    else:  # the copy before the last has left its slot; the last one too, if
                        # the tile before this one ended in the same slot
                        again = i == 0 and len(slices) % 2
                        plgpu.wait_smem_to_gmem(0 if again else 1, wait_read_only=True)
                    if out_scale is None:
                        slot[...] = y.astype(out_dtype)
                    else:
                        y = times(y, "out_scale", 1, down, across)
                        slot[...] = saturated(y, out_dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(slot_rows(i), target(out_ref, i))
                    if residual is not None and i + 2 < len(slices):
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        load_residual(i + 2)
                if vectors:
                    plgpu.barrier_arrive(scratch["vectors_empty"])
                return at + k_steps

            each_tile(tile)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(group == c.consumers, produce, consume)

    stages = (c.stages, chunks)
    a_tile = (step, c.tile_m) if static.transpose_a else (c.tile_m, step)
    b_tile = (c.tile_n, step) if static.transpose_b else (step, c.tile_n)
    scratch = {
        "a": plgpu.SMEM(
            (*stages, *a_tile), a.dtype, transforms=wgmma_transforms(a_tile[1], a.dtype)
        ),
        "b": plgpu.SMEM(
            (*stages, *b_tile), b.dtype, transforms=wgmma_transforms(b_tile[1], b.dtype)
        ),
        "out": plgpu.SMEM(
            (c.consumers, 2, WGMMA_ROWS, slice_width),
            out_dtype,
            transforms=wgmma_transforms(slice_width, out_dtype),
        ),
        "full": plgpu.Barrier(
            num_arrivals=chunks * (1 + wgmma_columns // b_rows), num_barriers=c.stages
        ),
        "empty": plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.stages),
    }
    for name, count in vectors.items():
        dtype = given[name].dtype
        size = _whole_lines(count * tile_width or c.tile_m, dtype)
        scratch[name] = plgpu.SMEM((size,), dtype)
    if wgmma_columns < c.tile_n:
        scratch["full_beyond"] = plgpu.Barrier(num_barriers=c.stages)
    if blocks:  # whole tiles
        assert a_scale is not None
        a_scale = jnp.pad(a_scale, ((0, -m % c.tile_m), (0, 0)))
    if vectors:
        arrivals = sum(count or 1 for count in vectors.values())
        scratch["vectors_full"] = plgpu.Barrier(num_arrivals=arrivals)
        scratch["vectors_empty"] = plgpu.Barrier(num_arrivals=c.consumers)
    if residual is not None:
        scratch["residual"] = plgpu.Barrier(num_barriers=(c.consumers, 2))
    return _compat.kernel(
        body,
        name=static.name,
        out_type=jax.ShapeDtypeStruct((m, width), out_dtype),
        scratch_types=scratch,
        grid=(min(static.num_sms, tiles[0] * tiles[1]),),
        grid_names=("block",),
        num_threads=c.consumers + 1,
        thread_name="group",
        interpret=static.interpret,
        approx_math=True,
    )(
        _whole_tiles(a) if static.transpose_a else a,
        b if static.transpose_b else _whole_tiles(b),
        bias,
        residual,
        a_scale,
        b_scale,
        out_scale,
    )


def _whole_lines(size: int, dtype) -> int:
    """A vector is copied by 128 bytes at least."""
    line = LINE_BYTES // dtype.itemsize
    return -(-size // line) * line


def _whole_tiles(x):
    """An operand whose rows are not along K is copied by tiles of 8 rows and 128 bytes.

    Where it has no such sizes, zeros fill them up; that costs a copy of it.
    """
    tile = (8, LINE_BYTES // x.dtype.itemsize)
    missing = [-size % t for size, t in zip(x.shape, tile, strict=True)]
    return jnp.pad(x, [(0, more) for more in missing]) if any(missing) else x
