"""A product of `between_attentions` in a block: stages of codes, which some warps bring and the
others multiply, as `quantized_matmul_lanes.Block` does it, or by whole numbers.

Of a tile of the weight's rows a stage has 128 bytes of codes for each warp that multiplies, row by
row, and their scales. Sums of a tile meet in the first of the four lanes that share a row. As in
lane_code.py, values are those of one thread. Imported only by between_attentions_lanes.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels import quantized_digits as digits
from pallas_kernels import quantized_unpack as unpack
from pallas_kernels import ternary_rows as ternary
from pallas_kernels.between_attentions_config import Product
from pallas_kernels.device import ACCESS_BYTES
from pallas_kernels.lane_arithmetic import fused, shuffled
from pallas_kernels.lane_code import (
    asm,
    further,
    less,
    load_shared,
    load_shared_part,
    mma,
    times,
    word,
)
from pallas_kernels.packed import CODES_PER_BYTE
from pallas_kernels.quantized_matmul_config import ACROSS, MMA_ROWS, PART_BYTES, PARTS, TURN_BYTES
from pallas_kernels.quantized_matmul_lanes import Block


class Tiles(Block):
    """A product in a block: see `Product`."""

    def __init__(
        self, product: Product, dtypes: Mapping[str, Any], pointers: Mapping[str, Any], block: Any
    ):
        """As of a `Block`."""
        rows = jax.ShapeDtypeStruct((product.folds, product.inputs), product.dtype)
        super().__init__(
            product.static, rows, product.view, dtypes, pointers, block, late=product.late
        )
        self.product = product
        # Outputs of a tile lie side by side in memory; of what is folded, their halves do
        self.pitch_bytes, self.half_bytes, self.half_groups = self.row_bytes, 0, 0
        if product.folded:
            self.pitch_bytes, self.half_bytes = 2 * self.row_bytes, self.row_bytes
            self.halves, self.out_rows = 2, self.out_rows // 2
            self.half_groups = self.k // self.group if product.group_bytes() else 0
            whole = {"m": 1, "n": product.packed.shape[0], "rows": self.out_rows}
            self.finish = dataclasses.replace(self.finish, **whole)
        self.finish = dataclasses.replace(self.finish, row_bytes=product.x_bytes)
        # of a row of codes: where the lane's 16 bytes of a part are
        place = arith.addi(times(self.row, product.stride_bytes), times(self.warp, TURN_BYTES))
        place = arith.addi(place, times(self.across, ACCESS_BYTES))
        self.take_from = [arith.addi(place, word(i * PART_BYTES)) for i in range(PARTS)]
        self.group_starts, start = {}, self.config.tile_n * product.stride_bytes
        for name, size_bytes in product.group_bytes().items():
            self.group_starts[name] = start
            start += size_bytes * product.groups

    # the others multiply it

    def codes(self, slot_at: Any, which: int) -> list[list[list[Any]]]:
        """As in `Block`."""
        source, stride = further(slot_at, self.take_from[which]), self.product.stride_bytes
        return [
            [
                load_shared(source, (half * self.out_rows + start) * stride, 4)
                for half, start in pair
            ]
            for pair in self._tiles()
        ]

    def groups(self, slot_at: Any, which: int) -> dict[str, list[list[Any]]]:
        """As in `Block`."""
        p = self.product
        first = arith.addi(times(self.warp, self.turn), word(which * self.part))
        if not self.sums_scaled:
            first = arith.addi(first, times(self.across, self.part // ACROSS))
        first = word(0) if self.group >= p.chunk else arith.divui(first, word(self.group))
        found = {}
        for name, start_bytes in self.group_starts.items():
            item = getattr(self.packed, name).dtype.itemsize
            wide = self.out_rows * item
            at = further(slot_at, arith.addi(times(first, wide), times(self.row, item)))
            read: Any = load_shared
            if item < 4:
                read = functools.partial(load_shared_part, size_bytes=item)
            found[name] = [
                [
                    read(at, start_bytes + (half * p.groups + i) * wide + start * item)
                    for half, start in pair
                    for i in range(self.lane_groups)
                ]
                for pair in self._tiles()
            ]
        return found

    # x, of which `early` is asked for before it is there

    def early(self) -> Any:
        """What x meets on its way on chip."""
        return self.rows.early()

    def keep(self, early: Any, barrier: Callable[[], None], made: Any = None) -> None:
        """Brings x on chip; a barrier must follow. early: what the function of this name gave.
        made: x, as `Join.sums` gives it; None: as it lies in memory.
        """
        del barrier
        self.rows.keep(lambda: None, early, made)

    def behind_sums(self) -> dict[str, Any]:
        """Of x, what sums are multiplied by, and before that made less by."""
        return {} if self.finish.eps is None else {"root": self.finish.root(word(0))}

    # sums of a tile: those that `multiply` takes and returns

    def zeros(self) -> list[Any]:
        """To begin with."""
        count = 4 * self.config.tile_n // MMA_ROWS
        return [arith.constant(ir.F32Type.get(), 0.0)] * count

    def show(self, sums: list[Any], parts: Any) -> None:
        """Writes a warp's sums of a tile at parts [warps, outputs]."""
        each = len(sums) * MMA_ROWS // self.config.tile_n
        pairs = [self._of_rows(sums[i : i + each]) for i in range(0, len(sums), each)]
        if self.product.folded:
            pairs = [[arith.addf(*pair)] for pair in pairs]
        place = arith.addi(times(self.warp, self.finish.tile_n), self.row)
        address = further(parts, times(place, 4))
        with mgpu_utils.when(less(self.across, 1)):
            for i, value in enumerate(value for pair in pairs for value in pair):
                text = f"st.shared.f32 [$0 + {4 * MMA_ROWS // 2 * i}], $1;"
                asm(text, "", address, value, effects=True)

    def _of_rows(self, sums: list[Any]) -> list[Any]:
        """Of 16 rows, those of the lane's two: times x, or folded the second times its other half,
        which is another column.
        """
        return [sums[0], sums[3] if self.product.folded else sums[2]]


class DigitTiles(Tiles):
    """x as digits, of which a lane multiplies one: see quantized_digits.py."""

    def __init__(self, product: Product, *rest: Any):
        super().__init__(product, *rest)
        given = {f.name: getattr(self.rows, f.name) for f in dataclasses.fields(self.rows)}
        given |= {"row_bytes": product.x_bytes, "eight": self.packed.zero is None}
        self.rows = digits.DigitRows(**given)
        one, digit = (f(self.row, word(digits.COLUMNS)) for f in (arith.divui, arith.remui))
        one, digit = arith.minui(one, word(self.m - 1)), arith.minui(digit, word(digits.COUNT - 1))
        at = arith.addi(times(one, product.x_bytes), times(digit, self.part))
        at = arith.addi(at, times(self.warp, digits.COUNT * self.turn))
        at = further(self.pointers["kept"], arith.addi(at, times(self.across, ACCESS_BYTES)))
        self.digits_at = [at]
        if self.scheme == "int4":
            odd = times(arith.andi(digit, word(1)), PART_BYTES)
            self.digits_at = [
                arith.addi(at, arith.xori(odd, word(i * PART_BYTES))) for i in range(2)
            ]
        one, lane = (f(self.across, word(2)) for f in (arith.divui, arith.remui))
        one = times(arith.minui(one, word(self.m - 1)), digits.units_bytes(product.numbers))
        lane = times(lane, digits.UNITS_BYTES // 2)
        self.units_at = further(self.pointers["sums"], arith.addi(one, lane))

    def x_of(self, round_: Any, which: int) -> list[Any]:
        """Of the lane's digit the words of a part."""
        found = []
        for at in self.digits_at:
            at = further(at, times(round_, digits.COUNT * self.config.warps * self.turn))
            found += load_shared(at, which * digits.COUNT * self.part, 4)
        return found

    def multiply(self, slot_at: Any, round_: Any, which: int, x: Any, sums: list[Any]) -> list[Any]:
        """As in `Block`."""
        codes, groups = self.codes(slot_at, which), self.groups(slot_at, which)
        taken, units = self._units_of(round_, which)
        done = []
        for i, tile in enumerate(codes):
            part, before = digits.products(self.scheme, tile, x), sums[4 * i :][:4]
            for e, y in enumerate(part):
                less_of = taken[e % 2]
                if less_of is not None and "zero" in groups:
                    zero = asm("cvt.rn.f32.u32 $0, $1;", "f", groups["zero"][i][e // 2])
                    less_of = arith.mulf(less_of, zero)
                if less_of is not None:
                    y = fused(y, units[e % 2], less_of)
                elif "scale" in groups:
                    y = arith.mulf(y, units[e % 2])
                by = units[e % 2]
                if "scale" in groups:
                    by = unpack.as_float32(groups["scale"][i][e // 2], self.scale_dtype)
                done.append(fused(y, by, before[e]))
        return done

    def _units_of(self, round_: Any, which: int) -> tuple[list[Any], list[Any]]:
        """Of the lane's two columns, what is added to a part's sums, if anything, and before that
        their units.
        """
        spans = self.turn // digits.SPAN
        span = arith.addi(times(round_, self.config.warps), self.warp)
        at = further(self.units_at, times(span, spans * digits.UNITS_BYTES))
        offset = which * spans // PARTS * digits.UNITS_BYTES
        text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
        *units, one, other = asm(text, "ffff", at, effects=True)
        return [one, other] if self.from_sums else [None, None], units

    def _of_rows(self, sums: list[Any]) -> list[Any]:
        """As in `Tiles`; of all digits together."""
        first, second = digits.whole(sums)
        return [first, shuffled(second, 2) if self.product.folded else second]


class TernaryTiles(Tiles):
    """x as int8, of one scale, and codes where they stand in a byte: 1, 4, 16 and 64 times as
    large, with sums of their own. Codes are 1 more than the weights; see ternary_matmul_kernel.py.
    """

    def __init__(self, product: Product, *rest: Any):
        super().__init__(product, *rest)
        self.finish = dataclasses.replace(self.finish, eps=None)  # the norm is behind x already
        at = arith.addi(times(self.warp, self.turn), times(self.across, self.part // ACROSS))
        if product.folded:  # columns 0 and 1 have a half each
            one = arith.minui(self.row, word(1))
            at = arith.addi(at, times(one, self.k))
        self.bytes_at = further(self.pointers["kept"], at)

    def early(self) -> Any:
        """The norm's words."""
        if "norm" not in self.pointers:
            return None
        return ternary.read_row(self.pointers["norm"], self._inputs, self.config.warps)

    def keep(self, early: Any, barrier: Callable[[], None], made: Any = None) -> None:
        """As in `Tiles`."""
        assert made is None, "x of a ternary weight lies in memory"
        names = {"x": "x", "norm": "norm", "kept": "rows", "sums": "marks", "wait": "wait"}
        at = {to: self.pointers[name] for name, to in names.items() if name in self.pointers}
        [scale], [total] = ternary.quantise_rows(
            at,
            1,
            self._inputs,
            dtype="bfloat16",
            warps=self.config.warps,
            eps=self.static.eps or 0.0,
            weight=early,
            late="x" in self.product.late,
            barrier=barrier,
        )
        self.scale, self.total = scale, asm("cvt.rn.f32.s32 $0, $1;", "f", total)

    @property
    def _inputs(self) -> int:
        return self.product.packed.shape[1]

    def behind_sums(self) -> dict[str, Any]:
        """As in `Tiles`."""
        return {"root": self.scale, "less": self.total}

    def zeros(self) -> list[Any]:
        """As in `Tiles`: of each place in a byte."""
        return [word(0)] * (4 * CODES_PER_BYTE["ternary"] * self.config.tile_n // MMA_ROWS)

    def x_of(self, round_: Any, which: int) -> list[Any]:
        """Four words, one of each place, of each of the lane's four words of codes."""
        at = further(self.bytes_at, times(round_, self.config.warps * self.turn))
        return [load_shared(at, which * self.part + 16 * i, 4) for i in range(4)]

    def multiply(self, slot_at: Any, round_: Any, which: int, x: Any, sums: list[Any]) -> list[Any]:
        """As in `Block`."""
        del round_
        done, places = [], CODES_PER_BYTE["ternary"]
        for i, codes in enumerate(self.codes(slot_at, which)):
            for place in range(places):
                mask = word(0x03030303 << 2 * place)
                before = sums[4 * (places * i + place) :][:4]
                for j in (0, 2):
                    left = [arith.andi(row[j + e], mask) for e in range(2) for row in codes]
                    right = [x[j][place], x[j + 1][place]]
                    before = mma("m16n8k32.row.col.s32.u8.s8.s32", left, right, before)
                done += before
        return done

    def _of_rows(self, sums: list[Any]) -> list[Any]:
        """As in `Tiles`; of all places together, which are whole numbers."""
        found = []
        for e in (0, 3 if self.product.folded else 2):
            total = sums[e]
            for place in range(1, CODES_PER_BYTE["ternary"]):
                total = arith.addi(total, arith.shrsi(sums[4 * place + e], word(2 * place)))
            found.append(asm("cvt.rn.f32.s32 $0, $1;", "f", total))
        return found


def tiles_of(product: Product, *rest: Any) -> Tiles:
    """The product's tiles, by how it is multiplied."""
    if product.packed.scheme == "ternary":
        return TernaryTiles(product, *rest)
    return (DigitTiles if product.digits else Tiles)(product, *rest)
