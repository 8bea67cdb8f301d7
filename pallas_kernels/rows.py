"""Rows of any width on their way through a multiprocessor: what the kernels bound by memory share.

A kernel runs as a few blocks a multiprocessor, of one warpgroup each. Block p takes tiles p,
p + blocks, ... of `RowTile.rows` rows: the copy engine (TMA) brings a tile into one of a ring of
stages in shared memory while earlier tiles are computed, registers hold it with 16 bytes a thread
and access, and the result goes back the same way. Each byte is read once and written once.

A row lies in shared memory as [chunks, inner], for the copy engine takes at most 256 numbers a
dimension; where its width does not fill the threads, the engine adds zeros on the way in and cuts
them off on the way out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat

ACCESS_BYTES = 16  # the widest access of a thread, and the grain of the copy engine
WARPS, LANES = 4, 32  # of a warpgroup
MAX_BOX = 256  # numbers a dimension that one copy takes
SMEM_BYTES = 227 * 1024  # of shared memory that blocks may have on a Hopper multiprocessor
MAX_ROW_BYTES = 32 * 1024  # two stages of three such arrays, and weights beside them, fit there


@dataclasses.dataclass(frozen=True)
class RowTile:
    """How rows of `width` numbers lie: `rows` a tile, `width` padded to chunks * inner.

    warps and lanes: by how many of them, (down, across), the rows are split; `vector` numbers of
    the narrowest dtype are one access. `interpret`: it is for the interpreter, which knows no
    layouts and reshapes values, not references.
    """

    width: int
    rows: int
    inner: int
    chunks: int
    vector: int
    warps: tuple[int, int]
    lanes: tuple[int, int]
    interpret: bool = False

    @property
    def padded(self) -> int:
        """The width in shared memory and registers."""
        return self.chunks * self.inner

    @property
    def layout(self) -> Any:
        """Of rows in registers."""
        (warps_down, warps_across), (lanes_down, lanes_across) = self.warps, self.lanes
        warp = (lanes_down, lanes_across * self.vector)
        return _compat.tiled_layout(
            ((warps_down * warp[0], warps_across * warp[1]), warp, (self.vector,)),
            warp_dims=(-5, -4),
            lane_dims=(-3, -2),
        )

    def groups(self, numbers: int) -> list[list[Part]]:
        """The tile cut into groups of whole rows, and each into parts from left to right.

        A part is what a thread loads at once: about `numbers` numbers of a row that has the whole
        warpgroup. Narrower rows are not cut.
        """
        if self.warps[1] == 1:
            return [[Part(self, 0, self.rows, 0, self.chunks)]]
        grain = self.warps[1] * self.lanes[1] * self.vector // self.inner
        step = max(1, numbers // self.vector) * max(1, grain)
        starts = range(0, self.chunks, step)
        return [
            [Part(self, row, 1, start, min(step, self.chunks - start)) for start in starts]
            for row in range(self.rows)
        ]

    def view(self, x: jax.Array) -> jax.Array:
        """[M, width] or [width] as the kernel takes it: [M, n, inner] or [n, inner]."""
        return x.reshape(*x.shape[:-1], self.width // self.inner, self.inner)

    def buffer(self, dtype: Any, *stages: int) -> Any:
        """Shared memory for one tile a stage."""
        return plgpu.SMEM((*stages, self.rows, self.chunks, self.inner), dtype)

    def row_buffer(self, dtype: Any) -> Any:
        """Shared memory for one row, such as a weight."""
        return plgpu.SMEM((self.chunks, self.inner), dtype)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel over rows is tiled: changes its speed, never its result.

    repeat: rows a tile, in multiples of the rows that the warpgroup holds side by side.
    stages: tiles in flight a block. blocks_per_sm: blocks a multiprocessor.
    """

    repeat: int = 1
    stages: int = 2
    blocks_per_sm: int = 2

    def __post_init__(self) -> None:
        if min(self.repeat, self.stages, self.blocks_per_sm) < 1:
            raise ValueError(f"rows: {self}: each number must be 1 at least")


@dataclasses.dataclass(frozen=True)
class Part:
    """What a block has in registers at once: some rows of a tile and some of their chunks."""

    tile: RowTile
    row: int
    rows: int
    chunk: int
    chunks: int

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, columns]."""
        return self.rows, self.chunks * self.tile.inner

    def across(self, column: jax.Array) -> jax.Array:
        """One number a row [rows] along the rows: [rows, columns]."""
        return self._lay_out(jax.lax.broadcast_in_dim(column, self.shape, [0]))

    def down(self, row: jax.Array) -> jax.Array:
        """A row [columns] under each other: [rows, columns]."""
        return self._lay_out(jax.lax.broadcast_in_dim(row, self.shape, [1]))

    def zeros(self) -> jax.Array:
        """float32 [rows, columns]."""
        return self._lay_out(jnp.zeros(self.shape, jnp.float32))

    def columns(self) -> jax.Array:
        """Which column of the array each number is in: int32 [rows, columns]."""
        if self.tile.interpret:
            index = jax.lax.broadcasted_iota(jnp.int32, self.shape, 1)
        else:
            index = plgpu.broadcasted_iota(jnp.int32, self.shape, 1, layout=self.tile.layout)
        return index + self.chunk * self.tile.inner

    def lines(self) -> jax.Array:
        """Which row of the part each number is in: int32 [rows, columns]."""
        if self.tile.interpret:
            return jax.lax.broadcasted_iota(jnp.int32, self.shape, 0)
        return plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=self.tile.layout)

    def _lay_out(self, x: jax.Array) -> jax.Array:
        return x if self.tile.interpret else plgpu.layout_cast(x, self.tile.layout)


def row_tile(width: int, itemsize: int, *, repeat: int = 1, interpret: bool = False) -> RowTile:
    """The tile for rows of `width` numbers of `itemsize` bytes (the narrowest dtype of the call).

    Narrow rows share a warp, middle ones have a warp each, and a row of more than four accesses a
    lane has the whole warpgroup.
    """
    vector = ACCESS_BYTES // itemsize
    units = -(-width // vector)
    if units <= LANES:
        across = 1 << (units - 1).bit_length()
        warps, lanes = (WARPS, 1), (LANES // across, across)
    elif units <= WARPS * LANES:
        warps, lanes = (WARPS, 1), (1, LANES)
    else:
        warps, lanes = (1, WARPS), (1, LANES)
    step = warps[1] * lanes[1] * vector
    inner = _inner(width, vector)
    grain = step // math.gcd(step, inner)  # chunks that fill the threads
    chunks = -(-width // (inner * grain)) * grain
    rows = repeat * warps[0] * lanes[0]
    return RowTile(width, rows, inner, chunks, vector, warps, lanes, interpret)


def _inner(width: int, vector: int) -> int:
    """The longest run of numbers that divides the width; at least one access."""
    for inner in (256, 128, 64, 32, 16, 8, 4):
        if inner >= vector and width % inner == 0 and width // inner <= MAX_BOX:
            return inner
    raise AssertionError(f"why_not lets no row of {width} numbers through")


def why_not_rows(width: int, itemsize: int) -> str | None:
    """What keeps the copy engine from rows of this width."""
    size = width * itemsize
    if size % ACCESS_BYTES:
        return (
            f"rows of {size} bytes are no multiple of {ACCESS_BYTES} bytes, which the copy engine "
            "needs"
        )
    if size > MAX_ROW_BYTES:
        return f"rows of {size} bytes are longer than {MAX_ROW_BYTES}, what stays on chip"
    inner = math.gcd(width, MAX_BOX)
    if width // inner > MAX_BOX:
        return f"rows of {width} numbers are {width // inner} runs of {inner}; a copy takes {MAX_BOX}"
    return None


def default_config(
    width: int, itemsize: int, count: int, *, array_bytes: int, held_bytes: int
) -> Config:
    """Tiles of about 8 KB, three in flight a block, and as many blocks as fit, up to eight.

    array_bytes: of one number in all inputs together; held_bytes: in all weights.
    """
    tile = row_tile(width, itemsize)
    repeat = max(1, 8192 // (tile.rows * tile.padded * itemsize))
    while repeat > 1 and tile.rows * repeat * 132 * 4 > count:  # rows enough for all blocks first
        repeat //= 2
    stage = repeat * tile.rows * tile.padded * array_bytes
    held = tile.padded * held_bytes + 4096
    stages = max(1, min(3, (SMEM_BYTES - held) // stage))
    return Config(repeat, stages, max(1, min(8, SMEM_BYTES // (stages * stage + held))))


@dataclasses.dataclass(frozen=True)
class Staged:
    """A tile in shared memory: its parts go into registers and back as [rows, columns]."""

    ref: Any

    def load(self, part: Part) -> jax.Array:
        ref = self._of(part)
        if part.tile.interpret:
            return ref[...].reshape(part.shape)
        return _compat.load(ref.reshape(*part.shape), part.tile.layout)

    def store(self, part: Part, value: jax.Array) -> None:
        ref = self._of(part)
        if part.tile.interpret:
            ref[...] = value.reshape(part.rows, part.chunks, part.tile.inner)
        else:
            ref.reshape(*value.shape)[...] = value

    def _of(self, part: Part) -> Any:
        return self.ref.at[pl.ds(part.row, part.rows), pl.ds(part.chunk, part.chunks)]


@dataclasses.dataclass(frozen=True)
class StagedRow:
    """A row in shared memory, such as a weight."""

    ref: Any

    def load(self, part: Part) -> jax.Array:
        """The part's columns under each other: [rows, columns]."""
        ref = self.ref.at[pl.ds(part.chunk, part.chunks)]
        if part.tile.interpret:
            return part.down(ref[...].reshape(part.shape[1]))
        return part.down(_compat.load(ref.reshape(part.shape[1]), part.tile.layout.reduce(0)))


def over_rows(
    step: Callable[..., Any],
    *,
    name: str,
    inputs: Sequence[jax.Array],
    weights: Sequence[jax.Array] = (),
    outputs: Sequence[Any],
    sums: int = 0,
    numbers: int,
    config: Config | None,
    num_sms: int,
    interpret: bool,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Runs sums = step(group, inputs, weights, outputs, sums) for all rows of the inputs [M, D].

    `group` is the parts of some whole rows (`RowTile.groups(numbers)`), inputs and outputs are
    `Staged`, weights [D] `StagedRow`. `outputs` are the dtypes of the results [M, D]; output j is
    written over input j on chip, of the same dtype, so a step loads a part before it stores it.
    Each of the `sums` is a list, a part its entry: float32 [rows, columns], which the step adds to.
    Returns the outputs and, for each sum, rows [some, D] that are still to be added up.
    """
    count, width = inputs[0].shape
    assert all(x.dtype == dtype for x, dtype in zip(inputs, outputs, strict=False)), name
    sizes = [x.dtype.itemsize for x in inputs]
    narrowest = min(sizes)
    if config is None:
        held = sum(w.dtype.itemsize for w in weights)
        config = default_config(width, narrowest, count, array_bytes=sum(sizes), held_bytes=held)
    tile = row_tile(width, narrowest, repeat=config.repeat, interpret=interpret)
    tiles = -(-count // tile.rows)
    blocks = min(tiles, num_sms * config.blocks_per_sm)
    view = tile.view(inputs[0]).shape
    out_type = [jax.ShapeDtypeStruct(view, dtype) for dtype in outputs]
    line = max(tile.padded, WARPS * LANES)  # of narrower rows, a register load takes several
    out_type += [jax.ShapeDtypeStruct((blocks, line), jnp.float32)] * sums
    shared = [plgpu.SMEM((tile.rows * tile.padded // line, line), jnp.float32)]
    shared *= bool(sums and tile.warps[0] > 1)

    def body(*refs):
        refs = iter(refs)
        take = lambda n: [next(refs) for _ in range(n)]  # noqa: E731
        in_refs, weight_refs, out_refs, sum_refs = map(
            take, (len(inputs), len(weights), len(outputs), sums)
        )
        buffers, weight_rows, lines = map(take, (len(inputs), len(weights), len(shared)))
        barrier, *weight_barrier = refs
        for ref, row in zip(weight_refs, weight_rows, strict=True):
            plgpu.copy_gmem_to_smem(_whole(ref, tile), row, weight_barrier[0])
        if weights:
            plgpu.barrier_wait(weight_barrier[0])
        weights_on_chip = [StagedRow(row) for row in weight_rows]
        groups = tile.groups(numbers)

        def tile_step(slots, totals):
            staged = [Staged(ref) for ref in slots]
            for group in groups:
                totals = step(group, staged, weights_on_chip, staged[: len(outputs)], totals)
            return totals

        zeros = [[part.zeros() for part in groups[0]] for _ in range(sums)]
        totals = stream(
            tile_step,
            tile=tile,
            tiles=tiles,
            blocks=blocks,
            stages=config.stages,
            sources=in_refs,
            targets=out_refs,
            buffers=buffers,
            barrier=barrier,
            carry=zeros,
        )
        for ref, total in zip(sum_refs, totals, strict=True):
            ref = ref.at[jax.lax.axis_index("block")]
            if shared:
                _add_lines(total[0], groups[0][0], lines[0], ref)
                continue
            for part, columns in zip(groups[0], total, strict=True):
                at = pl.ds(part.chunk * tile.inner, part.shape[1])
                ref[at] = jnp.sum(columns, axis=0)

    results = _compat.kernel(
        body,
        name=name,
        out_type=out_type,
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[
            *(tile.buffer(x.dtype, config.stages) for x in inputs),
            *(tile.row_buffer(w.dtype) for w in weights),
            *shared,
            plgpu.Barrier(num_arrivals=len(inputs), num_barriers=config.stages),
            *[plgpu.Barrier(num_arrivals=len(weights))] * bool(weights),
        ],
        interpret=interpret,
    )(*map(tile.view, inputs), *map(tile.view, weights))
    return (
        [x.reshape(-1, width) for x in results[: len(outputs)]],
        [x.reshape(-1, tile.padded)[:, :width] for x in results[len(outputs) :]],
    )


def _add_lines(total: jax.Array, part: Part, lines: Any, target: Any) -> None:
    """Adds up the rows of a part, which lie in different warps, by way of shared memory."""
    if part.tile.interpret:
        lines[...] = total.reshape(lines.shape)
    else:
        lines.reshape(*part.shape)[...] = total
    first = lines[0]
    target[...] = jax.lax.fori_loop(1, lines.shape[0], lambda i, line: line + lines[i], first)


def _whole(ref: Any, tile: RowTile) -> Any:
    """A row [n, inner] in device memory, with what lies outside cut off."""
    return ref.at[pl.ds(_zero(), tile.chunks)]


def _at_tile(ref: Any, index: jax.Array, tile: RowTile) -> Any:
    """Tile `index` of an array [M, n, inner] in device memory, likewise."""
    return ref.at[pl.ds(index * tile.rows, tile.rows), pl.ds(_zero(), tile.chunks)]


def _zero() -> jax.Array:
    """0 as an offset that only the run knows: JAX refuses one that passes the end by itself."""
    return jax.lax.axis_index("block") * 0


def stream(
    step: Callable[..., Any],
    *,
    tile: RowTile,
    tiles: int,
    blocks: int,
    stages: int,
    sources: Sequence[Any],
    targets: Sequence[Any],
    buffers: Sequence[Any],
    barrier: Any,
    carry: Any = None,
    places: Sequence[Callable[..., Any]] | None = None,
) -> Any:
    """Calls carry = step(slots, carry) for each tile of this block; returns the last carry.

    The slots are a stage of each of the `buffers` (`RowTile.buffer` of `stages`), which hold a tile
    of the sources; what the step leaves in the first of them goes to the targets. Both are arrays
    in device memory as `RowTile.view` makes them. `barrier` has a barrier a stage that expects as
    many arrivals as there are sources. `places`: for each source, and the target written from its
    slot, where in the array tile `index` lies, place(ref, index), if not in rows one after another.
    """
    block = jax.lax.axis_index("block")
    places = places or [functools.partial(_at_tile, tile=tile)] * len(sources)
    mine = (tiles - block + blocks - 1) // blocks
    # A slot is filled anew when its result has left; that of the step just done is given a step's
    # time for it, if there is another slot.
    lag = min(1, stages - 1)
    ahead = stages - lag

    def fetch(i, slot):
        for ref, buffer, place in zip(sources, buffers, places, strict=True):
            plgpu.copy_gmem_to_smem(
                place(ref, block + i * blocks), buffer.at[slot], barrier.at[slot]
            )

    for s in range(ahead):
        pl.when(s < mine)(functools.partial(fetch, s, s))

    def body(i, carry):
        slot = jax.lax.rem(i, stages)
        plgpu.barrier_wait(barrier.at[slot])
        carry = step([buffer.at[slot] for buffer in buffers], carry)
        plgpu.commit_smem()
        for ref, buffer, place in zip(targets, buffers, places, strict=False):
            plgpu.copy_smem_to_gmem(
                buffer.at[slot], place(ref, block + i * blocks), commit_group=False
            )
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(lag, wait_read_only=True)
        pl.when(i + ahead < mine)(
            functools.partial(fetch, i + ahead, jax.lax.rem(i + ahead, stages))
        )
        return carry

    carry = jax.lax.fori_loop(0, mine, body, carry)
    plgpu.wait_smem_to_gmem(0)
    return carry
