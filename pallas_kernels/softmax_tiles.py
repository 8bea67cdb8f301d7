"""Where the tiles of `scale_softmax` lie, and what of the mask belongs to each.

A tile is some whole rows, or the share of a row that one block of a cluster has. Imported only by
softmax.py and softmax_kernel.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, builtin
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat, rows
from pallas_kernels.device import ACCESS_BYTES, LANES, MAX_BOX, SHARED_BYTES, THREADS, WARPS
from pallas_kernels.rows import MARGIN_BYTES, Part, RowTile

NUMBERS = 64  # of a row that a thread holds at once: float32 registers, with as many for the rest
KEPT = 160  # the most numbers of a share that it holds, and has fewer blocks beside its own
MAX_CLUSTER = 8  # blocks that any GPU runs as one cluster
ROOM = SHARED_BYTES - MARGIN_BYTES  # on chip, of a block that has a multiprocessor alone


@dataclasses.dataclass(frozen=True)
class Config:
    """How rows are tiled: changes the speed, never the result.

    repeat: rows a tile, in multiples of those that the warpgroup holds side by side. warps: of a
    row that one warp could hold, 1 or 4. stages: tiles in flight a block; 0 is a block for each
    tile, from memory to registers and back. blocks_per_sm: blocks a multiprocessor that has stages.
    cluster: the most blocks that share a row which one block cannot have; other rows ignore it.
    warpgroups: 1, 2 or 4 of a block that has its share of a row as softmax_lanes.py does, whatever
    the numbers but cluster are; 0: none has. What that does not take ignores it.
    """

    repeat: int = 1
    warps: int = 1
    stages: int = 3
    blocks_per_sm: int = 4
    cluster: int = 1
    warpgroups: int = 0

    def __post_init__(self) -> None:
        numbers = (self.repeat, self.stages + 1, self.blocks_per_sm, self.cluster)
        known = self.warps in (1, 4) and self.warpgroups in (0, 1, 2, 4)
        if min(numbers) < 1 or not known or self.cluster > MAX_CLUSTER:
            raise ValueError(
                f"scale_softmax: {self}: warps is 1 or 4, warpgroups 0, 1, 2 or 4, stages may be "
                f"0, the other numbers must be 1 at least, and cluster {MAX_CLUSTER} at most"
            )


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel is compiled for.

    groups: the leading axes of x from left to right, neighbours that the mask treats alike taken
    together: (rows, whether the mask has them). apart: 1, or the rows of the last group but one,
    where x has that group behind the last (`softmax._in_turn`). queries: T of a causal
    [.., T, S], else 0. scale: None if it is an array.
    """

    groups: tuple[tuple[int, bool], ...]
    apart: int
    queries: int
    scale: float | None
    config: Config
    num_sms: int
    interpret: bool


def fits(width: int, itemsize: int) -> bool:
    """Whether a row stays on chip, in few enough runs for one copy."""
    runs = width // math.gcd(width, MAX_BOX)
    return width * itemsize <= rows.MAX_ROW_BYTES and runs <= MAX_BOX


def row_tile(width: int, itemsize: int, config: Config, interpret: bool) -> RowTile:
    """Whole rows."""
    tile = rows.row_tile(width, itemsize, repeat=config.repeat, interpret=interpret)
    if config.warps == 1 and tile.warps == (1, 4) and width <= NUMBERS * LANES:
        step = LANES * tile.vector
        grain = step // math.gcd(step, tile.inner)
        chunks = -(-width // (tile.inner * grain)) * grain
        tile = dataclasses.replace(tile, warps=(4, 1), rows=4 * config.repeat, chunks=chunks)
    return tile


def share(width: int, itemsize: int, cluster: int) -> int:
    """Numbers of a row that each of so many blocks has, the last the rest; whole accesses of all
    threads.
    """
    step = THREADS * ACCESS_BYTES // itemsize
    return -(-width // (cluster * step)) * step


def _share_tile(width: int, itemsize: int, cluster: int, interpret: bool) -> RowTile:
    """A share of a row, which has the warpgroup."""
    inner = math.gcd(width, MAX_BOX)
    return RowTile(
        width=width,
        rows=1,
        inner=inner,
        chunks=share(width, itemsize, cluster) // inner,
        vector=ACCESS_BYTES // itemsize,
        warps=(1, WARPS),
        lanes=(1, LANES),
        interpret=interpret,
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which tile of the rows [groups / apart, rows, apart, S] which block has when.

    cluster: blocks that share a row; 0: tiles are whole rows. blocks: of the grid, clusters where
    there are any. stages: tiles in flight a block; 0: a block has one tile and needs no copy
    engine. No share of a row lies wholly behind its end, for what a copy of one row writes there is
    not cut off.
    """

    tile: RowTile
    groups: tuple[tuple[int, bool], ...]
    apart: int
    blocks: int
    stages: int
    cluster: int

    @property
    def rows(self) -> int:
        return self.groups[-1][0]

    @property
    def tiles(self) -> int:
        """Rows, where they are shared."""
        count = math.prod(n for n, _ in self.groups)
        return count if self.cluster else count // self.rows * -(-self.rows // self.tile.rows)

    def at(self, index: Any) -> tuple[Any, Any, Any]:
        """Where tile `index` begins: group, row, chunk."""
        div, rem = jax.lax.div, jax.lax.rem
        zero = jax.lax.axis_index("block") * 0
        if not self.cluster:
            tiles = -(-self.rows // self.tile.rows)
            return div(index, tiles), rem(index, tiles) * self.tile.rows, zero
        rank = jax.lax.axis_index("rank") if self.cluster > 1 else zero
        return div(index, self.rows), rem(index, self.rows), rank * self.tile.chunks

    def place(self, ref: Any, index: Any, first: int, chunks: int) -> Any:
        """Some chunks of tile `index` in device memory, [groups / apart, rows, apart, n, inner]."""
        group, row, chunk = self.at(index)
        outer, inner = self.split(group)
        return ref.at[outer, pl.ds(row, self.tile.rows), inner, pl.ds(chunk + first, chunks)]

    def split(self, group: Any) -> tuple[Any, Any]:
        """Where a group is in x, before its rows and behind them."""
        if self.apart == 1:
            return group, 0
        return jax.lax.div(group, self.apart), jax.lax.rem(group, self.apart)

    @property
    def mask_inner(self) -> int:
        return math.gcd(MAX_BOX, self.tile.padded)

    @property
    def mask_buffer(self) -> Any:
        count = self.tile.rows if self.groups[-1][1] else 1
        shape = (self.stages, count, self.tile.padded // self.mask_inner, self.mask_inner)
        return plgpu.SMEM(shape, jnp.int8)

    def mask_view(self, mask: jax.Array) -> jax.Array:
        """int8 [groups, rows, S] as the copy engine takes it, rows filled up if they must be."""
        inner = self.mask_inner
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, -mask.shape[-1] % inner)))
        return mask.reshape(*mask.shape[:-1], mask.shape[-1] // inner, inner)

    def mask_at(self, index: Any) -> tuple[Any, Any, Any]:
        """Where the mask of tile `index` begins; it is one row if all rows have it in common."""
        rest, row, chunk = self.at(index)
        zero = jax.lax.axis_index("block") * 0
        group, stride = zero, 1
        for n, has in reversed(self.groups[:-1]):
            if has:
                group = group + jax.lax.rem(rest, n) * stride
                stride *= n
            rest = jax.lax.div(rest, n)
        return group, row if self.groups[-1][1] else zero, chunk

    def mask_place(self, ref: Any, index: Any, first: int, chunks: int) -> Any:
        group, row, chunk = self.mask_at(index)
        _, count, _, inner = self.mask_buffer.shape
        start = chunk * self.tile.inner // inner + first
        return ref.at[group, pl.ds(row, count), pl.ds(start, chunks)]


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile in device memory, for `stages` 0; its parts go to registers and back."""

    plan: Plan
    ref: Any  # [groups / apart, rows, apart, S]
    index: Any

    def load(self, part: Part) -> jax.Array:
        if part.tile.interpret:
            return self._of(part)[...]
        return _compat.load(self._of(part), part.tile.layout, optimized=False)

    def load_seen(self, part: Part, columns: Any) -> jax.Array:
        """Zeros instead of what lies wholly behind the first `columns` of the row: a byte saved."""
        pieces = []
        for piece in accesses(part):
            nothing = functools.partial(lambda p: p.zeros().astype(self.ref.dtype), piece)
            some = functools.partial(self.load, piece)
            pieces.append(jax.lax.cond(piece.chunk * piece.tile.inner < columns, some, nothing))
        return jnp.concatenate(pieces, axis=1)

    def store(self, part: Part, value: jax.Array) -> None:
        self._of(part)[...] = value

    def _of(self, part: Part) -> Any:
        group, row, chunk = self.plan.at(self.index)
        outer, inner = self.plan.split(group)
        columns = pl.ds((chunk + part.chunk) * part.tile.inner, part.shape[1])
        return self.ref.at[outer, pl.ds(row + part.row, part.rows), inner, columns]


@dataclasses.dataclass(frozen=True)
class Mask:
    """The mask of a tile, in shared memory or, for `stages` 0, in device memory."""

    plan: Plan
    ref: Any
    index: Any

    def load(self, part: Part) -> jax.Array:
        """int8 [rows, columns], not 0 where it lets through."""
        tile, shared = part.tile, not self.plan.groups[-1][1]
        first, columns = part.chunk * tile.inner, part.shape[1]
        shape = (columns,) if shared else part.shape
        layout = None if tile.interpret else tile.layout.reduce(0) if shared else tile.layout
        if self.plan.stages:
            inner = self.plan.mask_inner
            at = (pl.ds(first // inner, columns // inner),)
            ref = self.ref.at[(0, *at) if shared else (pl.ds(part.row, part.rows), *at)]
            if tile.interpret:
                values = ref[...].reshape(shape)
            else:
                values = _compat.load(ref.reshape(*shape), layout)
        else:
            group, row, chunk = self.plan.mask_at(self.index)
            place = group, row + part.row, chunk * tile.inner + first
            values = _booleans(self.ref, place, shape, layout)
        return part.down(values) if shared else values


def _booleans(ref: Any, at: Sequence[Any], shape: tuple[int, ...], layout: Any) -> jax.Array:
    """Of bool [groups, rows, S] in device memory `shape`, [S'] or [rows', S'], from `at` on, as
    int8: the bytes as they lie there, for Mosaic would load bits.
    """
    group, row, column = at
    if layout is None:
        rows_of = row if len(shape) == 1 else pl.ds(row, shape[0])
        return ref[group, rows_of, pl.ds(column, shape[-1])].astype(jnp.int8)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * 3),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.int8, layout=layout),
    )
    def load(_: Any, ref: Any, *at: Any) -> Any:
        kind = ir.MemRefType(ref.type)
        i8 = ir.IntegerType.get_signless(8)
        kind = ir.MemRefType.get(kind.shape, i8, kind.layout, kind.memory_space)
        ref = builtin.unrealized_conversion_cast([kind], [ref])
        index = ir.IndexType.get()
        group, row, column = (arith.index_cast(index, x.registers.item()) for x in at)
        rows_of = row if len(shape) == 1 else mgpu_utils.ds(row, shape[0])
        ref = mgpu_utils.memref_slice(ref, (group, rows_of, mgpu_utils.ds(column, shape[-1])))
        return mgpu.FragmentedArray.load_untiled(
            ref, layout=layout.to_mgpu(), is_signed=True, optimized=False
        )

    return load(ref, *map(jnp.int32, at))  # pyright: ignore[reportCallIssue]


def misfit(
    config: Config, groups: Sequence[tuple[int, bool]], width: int, itemsize: int
) -> str | None:
    """What keeps a config without stages from rows of this width."""
    if config.stages:
        return None
    if not fits(width, itemsize):
        if width == config.cluster * share(width, itemsize, config.cluster):
            return None
        return (
            f"{config} has no stages, for rows that fill the threads of all its blocks, but got "
            f"rows of {width}"
        )
    tile, count = row_tile(width, itemsize, config, False), groups[-1][0]
    if width < tile.padded or count % tile.rows:
        return (
            f"{config} has no stages, for rows that fill the threads, {tile.rows} at a time, but "
            f"got {count} rows of {width}"
        )
    return None


def share_bytes(config: Config, width: int, itemsize: int, held_bytes: int) -> int:
    """On chip, of a block's share: `held_bytes` of each number, in all arrays and a mask."""
    return config.stages * share(width, itemsize, config.cluster) * held_bytes


def plan_of(static: Static, width: int, itemsize: int, held_bytes: int) -> Plan:
    """Which block has what, of rows of this width, `held_bytes` of each number on chip.

    Raises: NotImplementedError if the config does not fit them.
    """
    config = static.config
    if (reason := misfit(config, static.groups, width, itemsize)) is not None:
        raise NotImplementedError(f"scale_softmax: cannot run this call: {reason}")
    if fits(width, itemsize):
        tile = row_tile(width, itemsize, config, static.interpret)
        plan = Plan(tile, static.groups, static.apart, 1, config.stages, 0)
        blocks = static.num_sms * config.blocks_per_sm
        blocks = min(plan.tiles, blocks) if plan.stages else plan.tiles
        return dataclasses.replace(plan, blocks=blocks)
    # The interpreter knows no other block's shared memory, and has room for the whole row.
    cluster = 1 if static.interpret else config.cluster
    while (cluster - 1) * share(width, itemsize, cluster) >= width:
        cluster -= 1
    size_bytes = share_bytes(config, width, itemsize, held_bytes)
    if size_bytes > ROOM and not static.interpret:
        raise NotImplementedError(
            f"scale_softmax: cannot run this call: {config} takes {size_bytes} bytes on chip for "
            f"rows of {width}, more than {ROOM}"
        )
    tile = _share_tile(width, itemsize, cluster, static.interpret)
    plan = Plan(tile, static.groups, static.apart, 1, config.stages, cluster)
    most = max(1, static.num_sms * config.blocks_per_sm // cluster) if plan.stages else plan.tiles
    return dataclasses.replace(plan, blocks=min(plan.tiles, most))


def accesses(part: Part) -> list[Part]:
    """The part from left to right in the narrowest parts that all threads have a share of."""
    tile = part.tile
    step = max(1, tile.warps[1] * tile.lanes[1] * tile.vector // tile.inner)
    starts = range(part.chunk, part.chunk + part.chunks, step)
    return [dataclasses.replace(part, chunk=start, chunks=step) for start in starts]
