"""What a thread does in the kernel of `quantized_matmul` for few rows: copies, products, sums.

Values are those of MLIR, as in lane_code.py. Imported only by quantized_matmul_kernel.py and
between_attentions_tiles.py.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, gpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels import quantized_matmul_config as sizes
from pallas_kernels import quantized_unpack as unpack
from pallas_kernels.device import ACCESS_BYTES, LANES
from pallas_kernels.lane_arithmetic import added_products
from pallas_kernels.lane_code import (
    all_or_nothing,
    asm,
    copy_ahead,
    further,
    less,
    load_shared,
    load_shared_part,
    long,
    times,
    times_long,
    word,
)
from pallas_kernels.packed import Packed
from pallas_kernels.quantized_finish import Finish
from pallas_kernels.quantized_matmul_config import (
    ACROSS,
    MMA_COLUMNS,
    MMA_ROWS,
    PART_BYTES,
    PARTS,
    TURN_BYTES,
    Static,
)
from pallas_kernels.quantized_rows import Rows
from pallas_kernels.quantized_tma import CopiedRows

GROUPED = ("scale", "zero")  # what a `Packed` has a number of for each group


def _fused(sums: list[Any], by: list[Any], more: list[Any]) -> list[Any]:
    """sums * by + more: of four, two belong to each of a tile's two rows, which `by` is of."""
    text = "fma.rn.f32 $0, $1, $2, $3;"
    return [
        asm(text, "f", y, by[e // 2], z) for e, (y, z) in enumerate(zip(sums, more, strict=True))
    ]


class Block:
    """What a thread does: copies, products, sums."""

    def __init__(
        self,
        static: Static,
        x,
        packed: Packed,
        dtypes: Mapping[str, Any],
        pointers: Mapping[str, Any],
        block: Any,
        *,
        late: Collection[str] = (),
    ):
        """dtypes: of bias, cos and sin, those that there are. block: which one it is. late: what
        other blocks of this launch have written: "x", "residual"; others are not read here.
        """
        self.static, self.packed, self.pointers = static, packed, pointers
        c = self.config = static.config
        self.m, self.k = x.shape
        self.dtype = jnp.dtype(x.dtype)
        self.halves, self.apart = static.halves, static.apart(packed.shape[0])
        self.out_rows = c.tile_n // self.halves
        self.num_tiles = packed.shape[0] // c.tile_n
        self.num_blocks = sizes.num_blocks(c, self.num_tiles, static.num_sms)
        self.scheme = packed.scheme
        self.turn, self.share = sizes.turn(self.scheme), sizes.share(c, packed)
        self.rounds = sizes.rounds(c, packed)
        thread = mgpu_utils.thread_idx()
        splits = word(c.splits)
        self.block, split = (f(block, splits) for f in (arith.divui, arith.remui))
        self.first_turn = times(split, self.share)
        self.lane = arith.remui(thread, word(LANES))
        self.warp = arith.divui(thread, word(LANES))
        self.row, self.across = (f(self.lane, word(ACROSS)) for f in (arith.divui, arith.remui))
        group = packed.group_size or 0
        grouped = packed.scale is not None
        self.scale_dtype = None if packed.scale is None else packed.scale.dtype
        self.part = sizes.part(self.scheme)
        self.sums_scaled = grouped and unpack.scales_sums(self.scheme) and group % self.part == 0
        each = self.part // ACROSS  # numbers of a row that a lane has
        # int4: what its numbers are too large by is taken from the sums
        self.from_sums = self.sums_scaled and self.scheme == "int4"
        # groups that a lane has numbers of, in a part
        self.lane_groups = max(1, each // group) if grouped and not self.sums_scaled else 1
        # numbers of K in the groups of scales that a turn brings, and how many groups
        self.group = group or self.turn
        self.turn_groups = max(1, self.turn // self.group)
        self.row_bytes = packed.codes.shape[1] * packed.codes.dtype.itemsize
        self.warp_bytes = sizes.warp_bytes(c, packed)
        self.group_bytes = sizes.group_bytes(c, packed)
        # 8 lanes bring 128 bytes of a row; every other row has its two parts the other way round
        accesses = TURN_BYTES // ACCESS_BYTES
        down, self.access = (f(self.lane, word(accesses)) for f in (arith.divui, arith.remui))
        start = times(down, self.row_bytes)
        self.codes_at = [
            arith.addi(further(pointers["codes"], start), long(half * self.apart * self.row_bytes))
            for half in range(self.halves)
        ]
        odd = lambda row: times(arith.andi(row, word(1)), PART_BYTES)  # noqa: E731
        place = arith.xori(times(self.access, ACCESS_BYTES), odd(down))
        self.bring_to = arith.addi(times(down, TURN_BYTES), place)
        place = arith.addi(times(self.row, TURN_BYTES), times(self.across, ACCESS_BYTES))
        self.take_from = [
            arith.addi(place, arith.xori(odd(self.row), word(i * PART_BYTES))) for i in range(PARTS)
        ]
        self.ring_at = further(pointers["ring"], times(self.warp, self.warp_bytes))
        row_bytes = sizes.x_bytes(c, packed)
        self.x_at = []
        for column in range(0, sizes.columns(self.m), MMA_COLUMNS):
            one = arith.minui(arith.addi(self.row, word(column)), word(self.m - 1))
            at = arith.addi(times(one, row_bytes), times(self.across, ACCESS_BYTES))
            at = arith.addi(at, times(self.warp, self.turn * 2))
            self.x_at.append(further(pointers["kept"], at))
        self.rows = Rows(
            at=pointers,
            m=self.m,
            k=self.k,
            scheme=self.scheme,
            warps=c.warps,
            row_bytes=row_bytes,
            offset=times(self.first_turn, self.turn),
            count=self.share * self.turn,
            zero_centered=static.zero_centered,
            dtype=self.dtype,
            summed=self.from_sums,
            late="x" in late,
        )
        of_norm = pointers
        if c.tma:  # rows of sums of squares alone
            of_norm, row_bytes = {**pointers, "kept": pointers["squares"]}, PART_BYTES
        self.finish = Finish(
            at=of_norm,
            m=self.m,
            k=self.k,
            n=packed.shape[0] // (1 + static.gated),
            rows=self.out_rows,
            halves=self.halves,
            apart=self.apart,
            warps=c.warps,
            scheme=self.scheme,
            dtype=self.dtype,
            dtypes=dtypes,
            out_dtype=static.out_dtype,
            row_bytes=row_bytes,
            out_row=times(split, self.m),
            eps=static.eps,
            heads=static.heads,
            gate=static.gate,
            late="residual" in late,
        )

    def _tiles(self):
        """Of 16 rows on chip, one half's after the other, those two that a lane has the first of:
        each by its half, and how far from that one's beginning.
        """
        for first in range(0, self.config.tile_n, MMA_ROWS):
            yield [divmod(first + down, self.out_rows) for down in (0, MMA_ROWS // 2)]

    def first_row(self, tile: Any) -> Any:
        """Where a tile's rows of the first half begin in the weight."""
        if self.static.heads is None:
            return times(tile, self.out_rows)
        of_head = self.apart // self.out_rows
        head, inner = (f(tile, word(of_head)) for f in (arith.divui, arith.remui))
        return arith.addi(times(head, 2 * self.apart), times(inner, self.out_rows))

    def copy(self, tile: Any, round_: Any, slot: Any) -> None:
        """Asks for what the warp's turn needs; past the end of a row, of the block's part of it or
        of the tiles for zeros.
        """
        there = less(tile, self.num_tiles)
        at = arith.addi(times(round_, self.config.warps), self.warp)
        if self.config.splits > 1:
            there = arith.andi(there, less(at, self.share))
            at = arith.addi(at, self.first_turn)
        tile = arith.minui(tile, word(self.num_tiles - 1))
        slot_at = further(self.ring_at, times(slot, self.config.warps * self.warp_bytes))
        target = further(slot_at, self.bring_to)
        place = arith.addi(times(at, TURN_BYTES), times(self.access, ACCESS_BYTES))
        size = all_or_nothing(arith.andi(there, less(place, self.row_bytes)))
        place = arith.minui(place, word(self.row_bytes - ACCESS_BYTES))
        offset = arith.addi(times_long(self.first_row(tile), self.row_bytes), times_long(place, 1))
        sources = [arith.addi(p, offset) for p in self.codes_at]
        step = LANES * ACCESS_BYTES // TURN_BYTES  # rows
        for row in range(0, self.config.tile_n, step):
            half, start = divmod(row, self.out_rows)
            copy_ahead(target, sources[half], row * TURN_BYTES, start * self.row_bytes, size)
        to = self.config.tile_n * TURN_BYTES
        for name in self.group_bytes:
            self._copy_groups(name, tile, at, further(slot_at, word(to)), there)
            to += self.group_bytes[name]
        asm("cp.async.commit_group;", "", effects=True)

    def _copy_groups(self, name: str, tile: Any, at: Any, target: Any, there: Any) -> None:
        """Scales or zeros, [half, group, row] on chip: a lane brings 16 bytes, while there are."""
        item = getattr(self.packed, name).dtype.itemsize
        wide = self.out_rows * item // ACCESS_BYTES  # accesses of a half's group
        count = self.halves * self.turn_groups * wide
        first = arith.divui(times(at, self.turn), word(self.group))
        for start in range(0, count, LANES):
            place = arith.addi(self.lane, word(start))
            half, inner = (
                f(place, word(self.turn_groups * wide)) for f in (arith.divui, arith.remui)
            )
            group, column = (f(inner, word(wide)) for f in (arith.divui, arith.remui))
            group, last = arith.addi(first, group), self.k // self.group - 1
            size = all_or_nothing(arith.andi(there, less(group, last + 1)))
            group = arith.minui(group, word(last))
            row = arith.addi(self.first_row(tile), times(half, self.apart))
            source = arith.addi(times(group, self.packed.shape[0]), row)
            source = arith.addi(times_long(source, item), times_long(column, ACCESS_BYTES))
            source = arith.addi(self.pointers[name], source)
            to = further(target, times(place, ACCESS_BYTES))
            if start + LANES <= count:
                copy_ahead(to, source, 0, 0, size)
            else:
                with mgpu_utils.when(less(place, count)):
                    copy_ahead(to, source, 0, 0, size)

    def arrived(self, slot: Any) -> Any:
        """Waits for a turn; where it lies."""
        asm(f"cp.async.wait_group {self.config.ahead - 1};", "", effects=True)
        asm("bar.warp.sync 0xffffffff;", "", effects=True)
        return further(self.ring_at, times(slot, self.config.warps * self.warp_bytes))

    def codes(self, slot_at: Any, which: int) -> list[list[list[Any]]]:
        """Of each tile's two rows that the lane has, 4 words of a part."""
        source = further(slot_at, self.take_from[which])
        return [
            [
                load_shared(source, (half * self.out_rows + start) * TURN_BYTES, 4)
                for half, start in pair
            ]
            for pair in self._tiles()
        ]

    def groups(self, slot_at: Any, which: int) -> dict[str, list[list[Any]]]:
        """Scales and zeros, those that there are: of each tile, a word by row and group that the
        lane has numbers of.
        """
        first = word(which * self.part // self.group)
        if not self.sums_scaled:
            first = arith.addi(times(self.across, self.part // ACROSS), word(which * self.part))
            first = arith.divui(first, word(self.group))
            first = first if self.group < self.turn else word(0)
        to, found = self.config.tile_n * TURN_BYTES, {}
        for name, size_bytes in self.group_bytes.items():
            item = getattr(self.packed, name).dtype.itemsize
            wide = self.out_rows * item
            at = further(slot_at, arith.addi(times(first, wide), times(self.row, item)))
            read = (
                load_shared if item == 4 else functools.partial(load_shared_part, size_bytes=item)
            )
            found[name] = [
                [
                    read(at, to + (half * self.turn_groups + i) * wide + start * item)
                    for half, start in pair
                    for i in range(self.lane_groups)
                ]
                for pair in self._tiles()
            ]
            to += size_bytes
        return found

    def x_of(self, round_: Any, which: int) -> list[Any]:
        """Of each 8 rows of x a part as pairs, in the order of the codes."""
        x = []
        for pointer in self.x_at:
            pointer = further(pointer, times(round_, self.config.warps * self.turn * 2))
            found = []
            for i in range(0, self.part // ACROSS * 2, ACCESS_BYTES):
                offset = which * self.part * 2 + i * ACROSS
                found += load_shared(pointer, offset, 4)
            x.append(found)
        return x

    def _sums_at(self, round_: Any) -> Any:
        """Where the sums of x over a turn's parts begin, those of a lane's two columns."""
        at = arith.addi(times(round_, self.config.warps), self.warp)
        at = times(at, PARTS * len(self.x_at) * MMA_COLUMNS * 4)
        return further(self.pointers["sums"], arith.addi(at, times(self.across, 8)))

    def _sums_of_x(self, round_: Any, which: int) -> list[Any]:
        """Of each 8 rows of x less the sum over a part, as it stands in a product's sums."""
        found, at = [], self._sums_at(round_)
        for j in range(len(self.x_at)):
            offset = (which * len(self.x_at) + j) * MMA_COLUMNS * 4
            text = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {offset}];"
            found.append(asm(text, "ff", at, effects=True) * 2)
        return found

    def multiply(
        self, slot_at: Any, round_: Any, which: int, x: list[Any], sums: list[Any]
    ) -> list[Any]:
        """The sums, four a 16 rows of the weight and 8 of x, and what a part adds; x: as `x_of`."""
        codes, groups = self.codes(slot_at, which), self.groups(slot_at, which)
        sums_of_x = self._sums_of_x(round_, which) if self.from_sums else []
        done = []
        for i, tile in enumerate(codes):
            scales, zeros = (groups[name][i] if name in groups else None for name in GROUPED)
            before = [sums[4 * (i * len(x) + j) :][:4] for j in range(len(x))]
            part: Any = [None] * len(x) if self.sums_scaled else before
            part = self._products(tile, scales, zeros, x, part)
            if self.sums_scaled:
                part = self._scaled(part, before, scales or [], zeros, sums_of_x)
            done += [y for p in part for y in p]
        return done

    def _products(self, codes: Any, scales: Any, zeros: Any, x: Any, sums: list[Any]) -> list[Any]:
        """The sums of a tile by 8 rows of x, and the products of its codes with x."""
        g = self.lane_groups
        pair_scales: list[Any] = [None] * (2 * g)
        if scales is not None and not self.sums_scaled:
            pair_scales = [
                unpack.scale_pair(self.scheme, s, self.dtype, self.scale_dtype) for s in scales
            ]
        pair_zeros: list[Any] = [None] * (2 * g)
        if self.scheme == "int4" and not self.from_sums:
            pair_zeros = [unpack.zero_pair(self.dtype, z) for z in zeros or pair_zeros]
        rows: list[list[Any]] = [[], []]  # of each, the pairs of the words so far
        done = 0
        for at in range(4):
            here = at * g // 4
            for down in range(2):
                rows[down] += unpack.values(
                    self.scheme,
                    codes[down][at],
                    self.dtype,
                    zero=pair_zeros[down * g + here],
                    scale=pair_scales[down * g + here],
                )
            while done + 2 <= len(rows[0]):  # an instruction takes two pairs of each row
                left = [row[done + i] for i in range(2) for row in rows]
                sums = [
                    added_products(p, left, x[j][done : done + 2], self.dtype)
                    for j, p in enumerate(sums)
                ]
                done += 2
        return sums

    def _scaled(
        self, part: Any, before: Any, scales: list[Any], zeros: Any, sums_of_x: Any
    ) -> list[Any]:
        """The sums before, and the part's times the scales of the tile's two rows."""
        wide = [unpack.as_float32(s, self.scale_dtype) for s in scales]
        if self.from_sums:
            more = [unpack.too_large(self.dtype, z) for z in zeros or [None] * 2]
            part = [_fused(p, more, q) for p, q in zip(sums_of_x, part, strict=True)]
        return [_fused(p, wide, q) for p, q in zip(part, before, strict=True)]

    def ask(self) -> None:
        """Asks for the codes of the first turns."""
        *first, _ = self._turns_ahead()
        for slot, turn in enumerate(first):
            self.copy(*turn, word(slot))

    def run(self) -> None:
        """All of it; where the copy engine has brought x, `ask` has been before."""
        c, block, zero = self.config, self.block, arith.constant(ir.F32Type.get(), 0.0)
        held: list[Any] = []  # of x, by round and part
        if c.tma:
            place = {"warp": self.warp, "row": self.row, "across": self.across}
            held = CopiedRows(self.rows, self.rounds, **place).read()
        else:
            self.rows.keep(self.ask)
        gpu.barrier()
        if c.held and not held:
            rounds = [word(round_) for round_ in range(self.rounds)]
            held = [[self.x_of(at, which) for which in range(PARTS)] for at in rounds]
        roots = self.finish.roots()
        *_, (tile, round_) = self._turns_ahead()
        count = 4 * c.tile_n // MMA_ROWS * len(self.x_at)
        # of the tiles, those that are this block's
        more = arith.subi(word(self.num_tiles + self.num_blocks - 1), block)

        @mgpu_utils.fori(arith.divui(more, word(self.num_blocks)), [word(0), tile, round_])
        def each_tile(i, carry):
            first = self.first_row(arith.addi(block, times(i, self.num_blocks)))
            early = self.finish.early(first)

            def each_round(at, carry, x=None):
                slot, tile, round_, *sums = carry
                slot_at = self.arrived(slot)
                for which in range(PARTS):
                    part = x[which] if x else self.x_of(at, which)
                    sums = self.multiply(slot_at, at, which, part, sums)
                asm("bar.warp.sync 0xffffffff;", "", effects=True)
                self.copy(tile, round_, slot)
                tile, round_ = self._next(tile, round_)
                slot = arith.addi(slot, word(1))
                slot = arith.select(less(slot, c.ahead), slot, word(0))
                return [slot, tile, round_, *sums]

            done = [*carry, *[zero] * count]
            if c.held:
                for at, x in enumerate(held):
                    done = each_round(word(at), done, x)
            else:
                done = list(mgpu_utils.fori(word(self.rounds), done)(each_round).results)
            carry, sums = done[:3], done[3:]
            size_bytes = c.warps * self.m * c.tile_n * 4
            parts = arith.andi(i, word(1))
            parts = further(self.pointers["parts"], times(parts, size_bytes))
            self.finish.show(sums, parts)
            gpu.barrier()
            self.finish.run(parts, first, early, roots)
            return carry

    def _turns_ahead(self) -> list[tuple[Any, Any]]:
        """Of which rows and which: those on their way at a time, and the one behind."""
        turns = [(self.block, word(0))]
        for _ in range(self.config.ahead):
            turns.append(self._next(*turns[-1]))
        return turns

    def _next(self, tile: Any, round_: Any) -> tuple[Any, Any]:
        round_ = arith.addi(round_, word(1))
        same = less(round_, self.rounds)
        after = arith.addi(tile, word(self.num_blocks))
        return arith.select(same, tile, after), arith.select(same, round_, word(0))
