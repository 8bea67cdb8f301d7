"""Rows of any width on their way through a multiprocessor: what the kernels bound by memory share.

A kernel with a stream (`stream`) runs as a few blocks a multiprocessor, of one warpgroup, or two
that share each row. Block p takes tiles p, p + blocks, ... of `RowTile.rows` rows: the copy engine
(TMA) brings a tile into one of a ring of stages in shared memory while earlier tiles are computed,
registers hold it with 16 bytes a thread and access, and the result goes back the same way. Each
byte is read once and written once.

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
from pallas_kernels import device as device_lib
from pallas_kernels.device import (
    ACCESS_BYTES,
    LANES,
    MAX_BOX,
    SHARED_BYTES,
    THREADS,
    WARPS,
)

# That share a row. Four were no faster (RMSNorm, 8192 x 8192 bfloat16: 67.1 us against 65.9), and
# the interpreter wants a free thread of the processor for each.
MAX_WARPGROUPS = 2
NUMBERS = 64  # that a thread may hold of a row before it reads the row in parts
MARGIN_BYTES = 4096  # on chip beside tiles and weights: barriers, scratch for sums, alignment
MAX_ROW_BYTES = 32 * 1024  # two stages of three such arrays, and weights beside them, fit there


@dataclasses.dataclass(frozen=True)
class RowTile:
    """How rows of `width` numbers lie: `rows` a tile, `width` padded to chunks * inner.

    The numbers of a row belong to `warpgroups` from left to right, each of which has `chunks` of
    `inner`. warps and lanes: by how many of them, (down, across), the rows of one warpgroup are
    split; `vector` numbers of the narrowest dtype are one access. `interpret`: it is for the
    interpreter, which knows no layouts and reshapes values, not references. `lines`: into how many
    the part of a row that has the warpgroup is cut, one under another; with 4 each warp has one,
    and a sum along it needs no memory.
    """

    width: int
    rows: int
    inner: int
    chunks: int
    vector: int
    warps: tuple[int, int]
    lanes: tuple[int, int]
    warpgroups: int = 1
    interpret: bool = False
    lines: int = 1

    @property
    def padded(self) -> int:
        """The width in shared memory and registers, of all warpgroups."""
        return self.warpgroups * self.chunks * self.inner

    @property
    def first_chunk(self) -> Any:
        """Of the warpgroup that asks."""
        return 0 if self.warpgroups == 1 else jax.lax.axis_index("warpgroup") * self.chunks

    @property
    def unknown_first_chunk(self) -> jax.Array:
        """The same as only the run knows it: JAX refuses a known one that passes the end."""
        return self.first_chunk + jax.lax.axis_index("block") * 0

    @property
    def layout(self) -> Any:
        """Of rows in registers."""
        (warps_down, warps_across), (lanes_down, lanes_across) = self.warps, self.lanes
        if self.lines > 1:
            warps_down, warps_across = self.lines, 1
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

    def row_buffer(self, dtype: Any, *warpgroups: int) -> Any:
        """Shared memory for one row, such as a weight."""
        return plgpu.SMEM((*warpgroups, self.chunks, self.inner), dtype)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel over rows is tiled: changes its speed, never its result.

    repeat: rows a tile, in multiples of the rows that the warpgroup holds side by side. stages:
    tiles in flight a block; 0 is no stream at all, but a block for each tile, from memory to
    registers and back (of some norms by lanes: `norm_lanes.takes`). blocks_per_sm: blocks a
    multiprocessor that a stream has. warpgroups: among how many the numbers of a wide row are
    divided.
    """

    repeat: int = 1
    stages: int = 2
    blocks_per_sm: int = 2
    warpgroups: int = 1

    def __post_init__(self) -> None:
        if min(self.repeat, self.stages + 1, self.blocks_per_sm, self.warpgroups) < 1:
            raise ValueError(f"rows: {self}: stages may be 0, the other numbers must be 1 at least")
        if self.warpgroups > MAX_WARPGROUPS:
            raise ValueError(f"rows: {self}: at most {MAX_WARPGROUPS} warpgroups share a row")


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
        """[rows, columns], or [lines, columns] of a row's part that lies so."""
        numbers = self.chunks * self.tile.inner
        lines = self.tile.lines
        return (self.rows, numbers) if lines == 1 else (lines, numbers // lines)

    def across(self, column: jax.Array) -> jax.Array:
        """One number a row ([rows], or a scalar for one row) along the rows: [rows, columns]."""
        return self._lay_out(jax.lax.broadcast_in_dim(column, self.shape, range(column.ndim)))

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
        if self.tile.lines > 1:
            index = index + self.lines() * self.shape[1]
        return index + (self.tile.first_chunk + self.chunk) * self.tile.inner

    def lines(self) -> jax.Array:
        """Which row of the part each number is in: int32 [rows, columns]."""
        if self.tile.interpret:
            return jax.lax.broadcasted_iota(jnp.int32, self.shape, 0)
        return plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=self.tile.layout)

    def _lay_out(self, x: jax.Array) -> jax.Array:
        return x if self.tile.interpret else plgpu.layout_cast(x, self.tile.layout)


def row_tile(
    width: int,
    itemsize: int,
    *,
    repeat: int = 1,
    warpgroups: int = 1,
    in_lines: bool = False,
    interpret: bool = False,
) -> RowTile:
    """The tile for rows of `width` numbers of `itemsize` bytes (the narrowest dtype of the call).

    Narrow rows share a warp, middle ones have a warp each, and a row of more than four accesses a
    lane has the whole warpgroup, or several: as many as `warpgroups` says, or fewer where the row
    does not divide. `in_lines`: a row that has the warpgroup lies in lines, one a warp.
    """
    vector = ACCESS_BYTES // itemsize
    units = -(-width // vector)
    if units <= LANES:
        across = 1 << (units - 1).bit_length()
        warps, lanes = (WARPS, 1), (LANES // across, across)
    elif units <= THREADS:
        warps, lanes = (WARPS, 1), (1, LANES)
    else:
        warps, lanes = (1, WARPS), (1, LANES)
    step = warps[1] * lanes[1] * vector
    inner = math.gcd(width, MAX_BOX)
    grain = step // math.gcd(step, inner)  # chunks that fill the threads
    grains = -(-width // (inner * grain))
    whole = grains * inner * grain == width
    while warpgroups > 1 and (warps[0] > 1 or grains % warpgroups or not whole):
        warpgroups -= 1
    chunks = grains // warpgroups * grain
    rows = repeat * warps[0] * lanes[0]
    lines = WARPS if in_lines and warps[0] == 1 else 1
    return RowTile(width, rows, inner, chunks, vector, warps, lanes, warpgroups, interpret, lines)


def why_not_rows(width: int, itemsize: int, *weight_itemsizes: int) -> str | None:
    """What keeps the copy engine from rows of this width, and from weights beside them."""
    size = width * itemsize
    if reason := device_lib.why_not_copied("rows", size):
        return reason
    if size > MAX_ROW_BYTES:
        return f"rows of {size} bytes are longer than {MAX_ROW_BYTES}, what stays on chip"
    inner = math.gcd(width, MAX_BOX)
    if width // inner > MAX_BOX:
        return (
            f"rows of {width} numbers are {width // inner} runs of {inner}; a copy takes {MAX_BOX}"
        )
    padded = row_tile(width, itemsize).padded
    if any(padded * weight % THREADS for weight in weight_itemsizes):
        return f"rows of {width} numbers have a weight of fewer bytes than a warpgroup has threads"
    return None


def copied(weight: jax.Array) -> jax.Array:
    """A row beside rows of float32, as the copy engine takes it: its own bytes may be too few."""
    if device_lib.why_not_copied("a weight", weight.size * weight.dtype.itemsize) is None:
        return weight
    return weight.astype(jnp.float32)


def default_config(
    width: int,
    itemsize: int,
    count: int,
    *,
    array_bytes: int,
    held_bytes: int,
    num_sms: int,
    sums: int = 0,
    meetings: int = 1,
) -> Config:
    """What was near the best for rows of every width on an H200 (benchmarks/notes.md).

    Rows that fill the threads need no stream: blocks that come and go keep more loads in flight
    than a stream of copies does (8192 x 8192 bfloat16: 65.9 us against 68.4). Two
    warpgroups share a row of 8 accesses a thread or more, unless they would meet more than once a
    row (`meetings`) with little else to do: LayerNorm of the same size took 81.9 us so. A stream
    has 3 tiles in flight a block (LayerNorm's backward pass of that size, before it went by lanes,
    took 174.9, 113.4 and 112.2 us with 2, 3 and 4), and blocks for about 96 KB in flight a
    multiprocessor.
    array_bytes: of one number in all inputs together; held_bytes: in all weights; sums: whether
    the kernel adds up rows.
    """
    tile = row_tile(width, itemsize)
    accesses = -(-tile.padded // (tile.vector * THREADS))
    alone = tile.warps[0] > 1 or (meetings > 1 and not sums)
    warpgroups = 1 if alone else max(1, min(MAX_WARPGROUPS, accesses // 4))
    if not sums and tile.padded == width and count % tile.rows == 0:
        repeat, numbers = 1, tile.rows * width // THREADS  # that a thread has
        while (
            tile.warps[0] > 1
            and 2 * repeat * numbers <= NUMBERS
            and repeat < 4
            and count % (2 * repeat * tile.rows) == 0
        ):
            repeat *= 2
        return Config(repeat, 0, 1, warpgroups)
    repeat = max(1, min(4096 // (tile.rows * tile.padded * itemsize), MAX_BOX // tile.rows))
    while repeat > 1 and tile.rows * repeat * num_sms * 4 > count:  # first rows for all blocks
        repeat //= 2
    stage = repeat * tile.rows * tile.padded * array_bytes
    lines = 4096 * bool(sums) * tile.warps[0] * repeat  # room for rows of sums
    held = tile.padded * held_bytes + lines + MARGIN_BYTES
    stages = max(1, min(3, (SHARED_BYTES - held) // stage))
    blocks = min(8, 98304 // (stages * stage), SHARED_BYTES // (stages * stage + held))
    return Config(repeat, stages, max(1, blocks), warpgroups)


def candidates(
    width: int, itemsize: int, count: int, *, array_bytes: int, held_bytes: int
) -> list[Config]:
    """With and without a stream, one to four tiles' rows at once, a row among one or two."""
    found = []
    for repeat, warpgroups in ((1, 1), (2, 1), (4, 1), (1, 2)):
        tile = row_tile(width, itemsize, repeat=repeat, warpgroups=warpgroups)
        if tile.warpgroups != warpgroups:
            continue
        if fits(Config(repeat, 0, 1, warpgroups), width, itemsize, count):
            found.append(Config(repeat, 0, 1, warpgroups))
        stages = 3  # with two, one is in flight, and 4 never won
        taken = tile.padded * (stages * tile.rows * array_bytes + held_bytes) + MARGIN_BYTES
        blocks = min(8, SHARED_BYTES // taken)
        found += [Config(repeat, stages, n, warpgroups) for n in {blocks, blocks // 2} if n]
    return found


def fits(config: Config, width: int, itemsize: int, count: int) -> bool:
    """Whether so many rows can be had with the config: without a stream, all tiles are whole."""
    tile = row_tile(width, itemsize, repeat=config.repeat, warpgroups=config.warpgroups)
    return config.stages > 0 or (tile.padded == width and count % tile.rows == 0)


@dataclasses.dataclass(frozen=True)
class Staged:
    """A tile in shared memory: its parts go into registers and back as [rows, columns]."""

    ref: Any

    def load(self, part: Part) -> jax.Array:
        ref = self._of(part)
        if part.tile.interpret:
            return ref[...].reshape(part.shape)
        return _compat.load(ref.reshape(*part.shape), part.tile.layout)

    def number(self, part: Part, chunk: int) -> jax.Array:
        """The first number of one of the chunks of the part, which is of one row."""
        return self.ref[part.row, part.chunk + chunk, 0]

    def store(self, part: Part, value: jax.Array) -> None:
        ref = self._of(part)
        if part.tile.interpret:
            ref[...] = value.reshape(ref.shape)
        else:
            ref.reshape(*value.shape)[...] = value

    def _of(self, part: Part) -> Any:
        # JAX cuts a piece of a row into lines only where no axis of one row stands before it
        row = part.row if part.tile.lines > 1 else pl.ds(part.row, part.rows)
        return self.ref.at[row, pl.ds(part.chunk, part.chunks)]


def _at_tile(ref: Any, index: jax.Array, first: int, chunks: int, *, tile: RowTile) -> Any:
    """Some chunks of tile `index` of an array [M, n, inner] in device memory."""
    start = tile.unknown_first_chunk + first
    return ref.at[pl.ds(index * tile.rows, tile.rows), pl.ds(start, chunks)]


def _copies(chunks: int) -> list[tuple[int, int]]:
    """(first chunk, chunks) of each copy of so many."""
    return [(first, min(MAX_BOX, chunks - first)) for first in range(0, chunks, MAX_BOX)]


def copy_inside(source: Any, target: Any, size: int, there: Any) -> None:
    """Copies `size` rows from shared memory, or as many as are `there`, in no group.

    What passes the end of an array is cut off, but for rows that lie side by side in device memory
    as on chip: these JAX copies as one piece, which would go on in the rows behind, those of
    another group or, under vmap, of another slice.
    """
    inside = there >= size

    @pl.when(inside)
    def _():
        plgpu.copy_smem_to_gmem(source, target, commit_group=False)

    @pl.when(jnp.logical_not(inside))
    def _():
        def one(row, carry):
            plgpu.copy_smem_to_gmem(source.at[row], target.at[row], commit_group=False)
            return carry

        jax.lax.fori_loop(0, there, one, 0)


def arrivals(*buffers: Any) -> int:
    """At a barrier of `stream`, for a stage of each of the buffers."""
    return sum(len(_copies(buffer.shape[-2])) for buffer in buffers)


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
    first_barrier: Any = 0,
    places: Sequence[Callable[..., Any]] | None = None,
    chunk_of: Callable[[Any], Any] = lambda index: index * 0,
    row_of: Callable[[Any], Any] | None = None,
    count: int | None = None,
) -> Any:
    """Calls carry = step(slots, carry) for each tile of this block; returns the last carry.

    The slots are a stage of each of the `buffers` (`RowTile.buffer` of `stages`), which hold a tile
    of the sources; what the step leaves in the first of them goes to the targets. Both are arrays
    in device memory as `RowTile.view` makes them. `barrier` has a barrier a stage that expects
    `arrivals` of the buffers, from `first_barrier` on. `places`: for each source, and the target
    written from its slot, where in the array [.., n, inner] `chunks` of tile `index` lie from the
    tile's chunk `first` on, place(ref, index, first, chunks), if not in rows one after another;
    chunks are the buffer's own. `chunk_of`: at which of the n chunks tile `index` begins; `row_of`:
    at which of `count` rows, if not of all rows one after another.
    """
    block = jax.lax.axis_index("block")
    places = places or [functools.partial(_at_tile, tile=tile)] * len(sources)
    row_of = row_of or (lambda index: index * tile.rows)
    last = targets[0].shape[0] if count is None else count
    mine = (tiles - block + blocks - 1) // blocks
    # A slot is filled anew when its result has left; that of the step just done is given a step's
    # time for it, if there is another slot.
    lag = min(1, stages - 1)
    ahead = stages - lag

    def fetch(i, slot):
        for ref, buffer, place in zip(sources, buffers, places, strict=True):
            for first, chunks in _copies(buffer.shape[-2]):
                plgpu.copy_gmem_to_smem(
                    place(ref, block + i * blocks, first, chunks),
                    buffer.at[slot, :, pl.ds(first, chunks)],
                    barrier.at[first_barrier + slot],
                )

    for s in range(ahead):
        pl.when(s < mine)(functools.partial(fetch, s, s))

    def leave(source, ref, place, index):
        def copy(first, chunks):
            plgpu.copy_smem_to_gmem(
                source.at[:, pl.ds(first, chunks)],
                place(ref, index, first, chunks),
                commit_group=False,
            )

        rest = ref.shape[-2] % tile.chunks
        for first, chunks in _copies(tile.chunks):
            if tile.rows > 1 and not rest and last % tile.rows:
                here, to = source.at[:, pl.ds(first, chunks)], place(ref, index, first, chunks)
                copy_inside(here, to, tile.rows, last - row_of(index))
                continue
            if tile.rows > 1 or not rest:
                copy(first, chunks)
                continue
            # What passes the end of one row is not cut off: JAX makes a plain copy of one row,
            # which would go on in the next.
            inside = chunk_of(index) + first + chunks <= ref.shape[-2]
            pl.when(inside)(functools.partial(copy, first, chunks))
            if 0 < rest - first < chunks:
                pl.when(jnp.logical_not(inside))(functools.partial(copy, first, rest - first))

    def body(i, carry):
        slot = jax.lax.rem(i, stages)
        plgpu.barrier_wait(barrier.at[first_barrier + slot])
        carry = step([buffer.at[slot] for buffer in buffers], carry)
        plgpu.commit_smem()
        for ref, buffer, place in zip(targets, buffers, places, strict=False):
            leave(buffer.at[slot], ref, place, block + i * blocks)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(lag, wait_read_only=True)
        pl.when(i + ahead < mine)(
            functools.partial(fetch, i + ahead, jax.lax.rem(i + ahead, stages))
        )
        return carry

    carry = jax.lax.fori_loop(0, mine, body, carry)
    plgpu.wait_smem_to_gmem(0)
    return carry
