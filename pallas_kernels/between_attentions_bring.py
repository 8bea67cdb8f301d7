"""How a thread of the warps that bring codes asks for a stage of them, on chip or into the L2.

What does not change from stage to stage is made before, once for a product or a tile; rows differ
in the offsets of instructions.
As in lane_code.py, values are those of one thread. Imported only by between_attentions_lanes.py.
"""

from __future__ import annotations

from typing import Any

from jax._src.lib.mlir.dialects import arith

from pallas_kernels.between_attentions_config import BRINGING
from pallas_kernels.between_attentions_tiles import Tiles
from pallas_kernels.device import ACCESS_BYTES
from pallas_kernels.lane_code import (
    accesses_of_thread,
    all_or_nothing,
    asm,
    copy_ahead,
    equal,
    further,
    less,
    long,
    only_where,
    times,
    times_long,
    word,
)


class Bring:
    """Of a product."""

    def __init__(self, tiles: Tiles, number: Any):
        """number: of the thread, among those that bring."""
        self.tiles, self.product = tiles, tiles.product
        p = self.product
        across = p.chunk_bytes // ACCESS_BYTES  # accesses to a row
        down, column = (f(number, word(across)) for f in (arith.divui, arith.remui))
        self.column = times(column, ACCESS_BYTES)
        self.to = arith.addi(times(down, p.stride_bytes), self.column)
        self.last = arith.minui(self.column, word(tiles.row_bytes - ACCESS_BYTES))
        start = arith.addi(times_long(down, tiles.pitch_bytes), times_long(self.last, 1))
        self.codes_at = arith.addi(tiles.pointers["codes"], start)
        self.step = BRINGING // across  # rows
        self.groups = [
            self._group(name, *each)
            for name in p.group_bytes()
            for each in accesses_of_thread(
                self._wide(name) * p.groups * tiles.halves, BRINGING, number
            )
        ]

    def _wide(self, name: str) -> int:
        """Accesses to a half's group."""
        item = getattr(self.product.packed, name).dtype.itemsize
        return self.tiles.out_rows * item // ACCESS_BYTES

    def _group(self, name: str, place: Any, inside: Any) -> tuple[str, Any, Any, Any, Any]:
        """Of an access to scales or zeros, [half, group, row] on chip: of what, of which group in a
        stage, where it begins for the first group and row, to where it goes, and whether there is
        one.
        """
        p, tiles, wide = self.product, self.tiles, self._wide(name)
        half, inner = (f(place, word(p.groups * wide)) for f in (arith.divui, arith.remui))
        group, column = (f(inner, word(wide)) for f in (arith.divui, arith.remui))
        item = getattr(p.packed, name).dtype.itemsize
        apart = tiles.half_groups * p.packed.shape[0] + tiles.apart
        start = times_long(half, apart * item)
        start = arith.addi(start, times_long(column, ACCESS_BYTES))
        to = arith.addi(times(place, ACCESS_BYTES), word(tiles.group_starts[name]))
        return name, group, arith.addi(tiles.pointers[name], start), to, inside

    def begin(self, tile: Any) -> tuple[list[Any], list[Any]]:
        """Of a tile, where its first round begins: each half's codes, and each access to groups."""
        p, tiles = self.product, self.tiles
        first = tiles.first_row(tile)
        codes = arith.addi(self.codes_at, times_long(first, tiles.pitch_bytes))
        apart = tiles.half_bytes + tiles.apart * tiles.pitch_bytes
        halves = [codes, *(arith.addi(codes, long(i * apart)) for i in range(1, tiles.halves))]
        items = {name: getattr(p.packed, name).dtype.itemsize for name in p.group_bytes()}
        starts = {name: times_long(first, item) for name, item in items.items()}
        return halves, [arith.addi(at, starts[name]) for name, _, at, _, _ in self.groups]

    def ask(self, begun: tuple[list[Any], list[Any]], round_: Any, stage: Any, full: Any) -> None:
        """Asks for codes and scales of one round; past a row's end for zeros. That they have come
        is counted at `full`.
        """
        p, tiles = self.product, self.tiles
        halves, groups = begun
        place = times(round_, p.chunk_bytes)
        size = word(ACCESS_BYTES)
        if p.rounds * p.chunk_bytes > tiles.row_bytes:
            there = less(arith.addi(place, self.column), tiles.row_bytes)
            size = all_or_nothing(there)
            most = arith.subi(word(tiles.row_bytes - ACCESS_BYTES), self.last)
            place = arith.select(there, place, most)
        sources, target = [further(at, place) for at in halves], further(stage, self.to)
        for row in range(0, p.config.tile_n, self.step):
            half, down = divmod(row, tiles.out_rows)
            copy_ahead(target, sources[half], row * p.stride_bytes, down * tiles.pitch_bytes, size)
        for (name, group, _, to, inside), at in zip(self.groups, groups, strict=True):
            only_where(inside, self._ask_group, name, group, at, round_, further(stage, to))
        asm("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "", full, effects=True)

    def ask_into_l2(self, begun: tuple[list[Any], list[Any]], round_: Any) -> None:
        """Asks a round's codes into the L2, a row's by the thread that has their first access."""
        only_where(equal(self.column, word(0)), self._ask_rows, begun[0], round_)

    def _ask_rows(self, halves: list[Any], round_: Any) -> None:
        p, tiles = self.product, self.tiles
        place = times(round_, p.chunk_bytes)
        size = arith.minui(arith.subi(word(tiles.row_bytes), place), word(p.chunk_bytes))
        sources = [further(at, place) for at in halves]
        for row in range(0, p.config.tile_n, self.step):
            half, down = divmod(row, tiles.out_rows)
            text = f"cp.async.bulk.prefetch.L2.global [$0 + {down * tiles.pitch_bytes}], $1;"
            asm(text, "", sources[half], size)

    def _ask_group(self, name: str, group: Any, at: Any, round_: Any, target: Any) -> None:
        p, tiles = self.product, self.tiles
        row_bytes = p.packed.shape[0] * getattr(p.packed, name).dtype.itemsize
        first = times(round_, p.groups)
        if p.chunk < tiles.group:
            first = arith.divui(times(round_, p.chunk), word(tiles.group))
        group, count = arith.addi(first, group), -(-tiles.k // tiles.group)
        size = all_or_nothing(less(group, count))
        group = arith.minui(group, word(count - 1))
        copy_ahead(target, arith.addi(at, times_long(group, row_bytes)), 0, 0, size)
