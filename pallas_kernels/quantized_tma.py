"""Rows of x that the copy engine has brought on chip, read into registers once.

They lie there as they are, cut into lines of 128 bytes, [numbers / 64, rows, 64], the rows being 8
or 16; of row r's line, the 16 bytes i lie where i ^ (r mod 8) would (the copy engine's swizzle), so
that lanes that read one row each find them in other banks. Rows that x has not, and numbers past
its end, are zeros. On the way into registers x becomes what `quantized_rows` puts on chip: pairs in
the order of the codes, times the norm's weight, with its sums of squares and the sums over parts.
Imported only by quantized_matmul_lanes.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels import quantized_matmul_config as sizes
from pallas_kernels import quantized_unpack as unpack
from pallas_kernels.device import ACCESS_BYTES
from pallas_kernels.lane_arithmetic import added_products, shuffled, sum_of_squares
from pallas_kernels.lane_code import (
    asm,
    equal,
    further,
    less,
    load_four,
    load_shared,
    times,
    word,
)
from pallas_kernels.quantized_matmul_config import (
    ACROSS,
    MMA_COLUMNS,
    PART_BYTES,
    PARTS,
    TMA_NUMBERS,
)
from pallas_kernels.quantized_rows import Rows

LINE_BYTES = 2 * TMA_NUMBERS


@dataclasses.dataclass(frozen=True)
class CopiedRows:
    """x [m, k] as the lanes of a warp read it: `row` and `across` are a lane's place in a product.

    rows: which x, and what it meets; its addresses have the norm's `squares` on chip too, [columns,
    PART_BYTES], a warp's sum each. rounds: turns of a warp.
    """

    rows: Rows
    rounds: int
    warp: Any
    row: Any
    across: Any

    def read(self) -> list[list[list[list[Any]]]]:
        """By round and part what `Block.x_of` gives; behind the next barrier sums of squares and of
        parts are on chip.
        """
        squares = [[None] * self._accesses for _ in range(self._groups)]
        found = [
            [self._part(round_, which, squares) for which in range(PARTS)]
            for round_ in range(self.rounds)
        ]
        if self._normed:
            self._write_squares(squares)
        return found

    @property
    def _normed(self) -> bool:
        return "norm" in self.rows.at

    @property
    def _groups(self) -> int:
        """Of 8 rows, those that there are not among them."""
        return sizes.columns(self.rows.m) // MMA_COLUMNS

    @property
    def _part_bytes(self) -> int:
        """Of a row."""
        return 2 * sizes.part(self.rows.scheme)

    @property
    def _accesses(self) -> int:
        """Of a lane to a part: four of 4 bits a code, two of 8."""
        return self._part_bytes // ACROSS // ACCESS_BYTES

    def _start(self, round_: int, which: int) -> int:
        """Where the first warp's part begins in a row."""
        return (round_ * self.rows.warps * PARTS + which) * self._part_bytes

    def _of_lane(self) -> tuple[Any, Any]:
        """How far in a row a warp's turn is from the first one's, and a lane's bytes of a part from
        the part's beginning.
        """
        turn = times(self.warp, PARTS * self._part_bytes)
        return turn, times(self.across, self._part_bytes // ACROSS)

    def _part(self, round_: int, which: int, squares: list[list[Any]]) -> list[list[Any]]:
        """Of each 8 rows the pairs of a part; their squares are added to those of the accesses."""
        weights, found = self._weights(round_, which) if self._normed else [], []
        for group, sums in enumerate(squares):
            accesses = self._read(round_, which, group)
            if self._normed:
                for i, words in enumerate(accesses):
                    sums[i] = sum_of_squares(words, "bf16x2", sums[i])
                accesses = map(self.rows.weighed, accesses, weights)
            found.append([pair for words in accesses for pair in self.rows.pairs(words)])
            if self.rows.summed:
                self._write_sum(round_, which, group, found[-1])
        return found

    def _read(self, round_: int, which: int, group: int) -> list[list[Any]]:
        """A lane's accesses to a part of its row of 8.

        Where these are four, the lanes of a row have two lines, and those of the second read what
        is third first: so the 8 lanes that read together find all banks.
        """
        (turn, inner), last = self._of_lane(), less(word(1), self.across)
        line, inside = (f(inner, word(LINE_BYTES)) for f in (arith.divui, arith.remui))
        inside = arith.xori(inside, times(self.row, ACCESS_BYTES))
        swaps = self._accesses == 4
        if swaps:
            inside = arith.xori(inside, arith.select(last, word(2 * ACCESS_BYTES), word(0)))
        line = arith.addi(line, arith.divui(turn, word(LINE_BYTES)))
        line_bytes = self._groups * MMA_COLUMNS * LINE_BYTES  # of all rows
        at = arith.addi(times(line, line_bytes), times(self.row, LINE_BYTES))
        at = further(self.rows.at["kept"], at)
        offset = self._start(round_, which) // LINE_BYTES * line_bytes
        offset += group * MMA_COLUMNS * LINE_BYTES
        places = (arith.xori(inside, word(i * ACCESS_BYTES)) for i in range(self._accesses))
        found = [load_shared(further(at, place), offset, 4) for place in places]
        if swaps:
            found = [
                [arith.select(last, *pair) for pair in zip(found[i ^ 2], words, strict=True)]
                for i, words in enumerate(found)
            ]
        turns = self.rows.count // sizes.turn(self.rows.scheme)
        if self.rows.count < self.rows.k and (round_ + 1) * self.rows.warps > turns:
            # What lies behind the block's part of a row is another block's
            there = less(arith.addi(self.warp, word(round_ * self.rows.warps)), turns)
            found = [[arith.select(there, each, word(0)) for each in words] for words in found]
        return found

    def _weights(self, round_: int, which: int) -> list[list[Any]]:
        """The norm's, of a lane's accesses to a part; past the row's end the last ones."""
        at = arith.addi(*self._of_lane())
        at = arith.addi(at, word(self._start(round_, which)))
        last = self.rows.k * 2 - self._accesses * ACCESS_BYTES
        at = further(self.rows.at["norm"], arith.minui(at, word(last)))
        return [load_four(at, i * ACCESS_BYTES) for i in range(self._accesses)]

    def _write_sum(self, round_: int, which: int, group: int, pairs: list[Any]) -> None:
        """Less the sum of a part of 8 rows, where `Rows` puts it; by each row's lanes the same."""
        ones, total = [unpack.minus_one(self.rows.dtype)] * 4, None
        for i in range(0, len(pairs), 2):
            total = added_products(total, ones, pairs[i : i + 2], self.rows.dtype)
        assert total is not None, "a part has numbers"
        columns = self._groups * MMA_COLUMNS
        turn = arith.addi(word(round_ * self.rows.warps), self.warp)
        to = arith.addi(times(turn, PARTS * columns * 4), times(self.across, 8))
        to = further(self.rows.at["sums"], to)
        offset = (which * columns + group * MMA_COLUMNS) * 4
        text = f"st.shared.v2.f32 [$0 + {offset}], {{$1, $2}};"
        asm(text, "", to, *total[:2], effects=True)

    def _write_squares(self, squares: list[list[Any]]) -> None:
        """A warp's sum for each row."""
        for group, (total, *more) in enumerate(squares):
            for each in more:
                total = arith.addf(total, each)
            for mask in (1, 2):
                total = arith.addf(total, shuffled(total, mask))
            row = arith.addi(self.row, word(group * MMA_COLUMNS))
            to = arith.addi(times(row, PART_BYTES), times(self.warp, 4))
            with mgpu_utils.when(equal(self.across, word(0))):
                asm("st.shared.f32 [$0], $1;", "", further(self.rows.at["squares"], to), total)
