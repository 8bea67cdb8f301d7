"""Rows of x brought on chip by the threads of a block, for the products of `quantized_matmul`.

They lie there as pairs, in the order in which `quantized_unpack.values` has those of the codes.
Of an RMSNorm that stands before the product, x is multiplied by its weight here, rounded once to
x's dtype; the sums of squares, a warp's each, lie behind the row that they are of, and its root
multiplies the sums (`quantized_finish`). Imported only by quantized_matmul_lanes.py,
quantized_digits.py, quantized_tma.py and between_attentions_join.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels import quantized_matmul_config as sizes
from pallas_kernels import quantized_unpack as unpack
from pallas_kernels.awaited import load_all
from pallas_kernels.device import ACCESS_BYTES, LANES
from pallas_kernels.lane_arithmetic import (
    added_products,
    over_warp,
    shuffled,
    sum_of_squares,
)
from pallas_kernels.lane_code import (
    asm,
    further,
    less,
    load_four,
    only_where,
    store_shared,
    times,
    word,
)
from pallas_kernels.quantized_matmul_config import ACROSS, PART_BYTES

AT_ONCE = 8  # accesses of a thread to x on their way


@dataclasses.dataclass(frozen=True)
class Rows:
    """x [m, k] of 16 bits a number.

    at: addresses of x, on chip of kept, and of the norm's weight [k], of x's dtype, if there is a
    norm. row_bytes: of a row on chip, PART_BYTES of them behind it. offset: of a row's numbers the
    block's first, which has `count` at most. zero_centered: x is multiplied by 1 + weight. summed:
    less the sum of each part's numbers is put on chip at sums, [part, whole columns of a product].
    late: other blocks of this launch have written x; with a `wait` in at, x is awaited: as of
    `load_all`.
    """

    at: Mapping[str, Any]
    m: int
    k: int
    scheme: str
    warps: int
    row_bytes: int
    offset: Any
    count: int
    dtype: Any
    zero_centered: bool = False
    summed: bool = False
    late: bool = False

    def early(self) -> dict[int, Any]:
        """The norm's weights that the first accesses to x meet, for `keep`: asked for before x is
        there.
        """
        starts = {start for _, start in self.places()[:AT_ONCE]} if "norm" in self.at else ()
        return {start: self.read(load_four, self.at["norm"], start) for start in sorted(starts)}

    def keep(
        self,
        first: Callable[[], None],
        early: Mapping[int, Any] | None = None,
        made: Mapping[int, Any] | None = None,
    ) -> None:
        """Brings the rows on chip, then zeros; a barrier must follow.

        first: what is asked for between the first accesses and what is done with them. early: what
        the function of this name gave. made: of one row what its accesses are to be, by how far
        from the thread's first, if it is not what lies at x.
        """
        thread, units, end = mgpu_utils.thread_idx(), self._units, self.end()
        threads, places, normed = self.warps * LANES, self.places(), "norm" in self.at
        squares: list[Any] = [None] * self.m
        for begin in range(0, len(places), AT_ONCE):
            some = places[begin : begin + AT_ONCE]
            loaded = self._loaded(some) if made is None else [made[start] for _, start in some]
            weights = dict(early or {})
            if normed:
                for _, start in some:
                    if start not in weights:
                        weights[start] = self.read(load_four, self.at["norm"], start)
            if begin == 0:
                first()
            for (one, start), words in zip(some, loaded, strict=True):
                place = arith.addi(thread, word(start))
                there = arith.cmpi(arith.CmpIPredicate.ult, place, end)
                words = [arith.select(there, w, word(0)) for w in words]
                if normed:
                    squares[one] = sum_of_squares(words, "bf16x2", squares[one])
                    words = self.weighed(words, weights[start])
                written = self._made(words)
                inside = None if start + threads <= units else less(place, units)
                only_where(inside, self._write, one, place, written)
        if normed:
            self._write_squares(squares)

    @property
    def _units(self) -> int:
        """Accesses to a row on chip."""
        return (self.row_bytes - PART_BYTES) // ACCESS_BYTES

    def end(self) -> Any:
        """Accesses to the block's part of a row."""
        numbers = arith.minui(arith.subi(word(self.k), self.offset), word(self.count))
        return arith.divui(numbers, word(ACCESS_BYTES // 2))

    def places(self) -> list[tuple[int, int]]:
        """A thread's accesses: of which row, and how far from the thread's first."""
        places = [
            (one, at) for one in range(self.m) for at in range(0, self._units, self.warps * LANES)
        ]
        if "norm" in self.at:  # rows in turn, which share the norm's weight
            places.sort(key=lambda place: place[1])
        return places

    def read(self, read: Callable[..., list[Any]], source: Any, start: int) -> list[Any]:
        """The thread's access to a row at `source`; past the row's end its last one."""
        return read(self._access(source, start), 0)

    def _access(self, source: Any, start: int) -> Any:
        """Where `read` reads."""
        last = arith.subi(self.end(), word(1))
        at = arith.minui(arith.addi(mgpu_utils.thread_idx(), word(start)), last)
        return further(source, times(at, ACCESS_BYTES))

    def _loaded(self, places: Sequence[tuple[int, int]]) -> list[Any]:
        """Some of a thread's accesses, as `places` has them."""
        accesses = [(self._access(self._row(one), start), 0, 4) for one, start in places]
        return load_all(accesses, self.at, late=self.late)

    def _row(self, one: int) -> Any:
        row = further(self.at["x"], word(one * self.k * 2))
        return further(row, times(self.offset, 2))

    def pairs(self, words: list[Any]) -> list[Any]:
        """An access to x in the order of the codes."""
        half = unpack.per_word(self.scheme) // 2
        found = []
        for i in range(0, len(words), half):
            found += unpack.pairs_of_x(words[i : i + half], self.scheme)
        return found

    def weighed(self, words: list[Any], weights: list[Any]) -> list[Any]:
        """x w, or x w + x, rounded once."""
        text = "mul.rn.bf16x2 $0, $1, $2;"
        if self.zero_centered:
            text = "fma.rn.bf16x2 $0, $1, $2, $1;"
        return [asm(text, "r", x, w) for x, w in zip(words, weights, strict=True)]

    def _sum_of_part(self, words: list[Any]) -> Any:
        """Less the sum of a part's numbers, of which 16 lanes side by side have an access each; in
        the first of them.

        The columns of a product are sums over four lanes: 0 to 3 and 4 to 7 make up the two parts.
        """
        assert sizes.part(self.scheme) * 2 == ACCESS_BYTES * LANES // 2, "of a part, 16 accesses"
        ones = [unpack.minus_one(self.dtype)] * 4
        sums = added_products(None, ones, words[:2], self.dtype)
        sums = added_products(sums, ones, words[2:], self.dtype)
        pair = arith.addf(*sums[:2])  # columns 2 l and 2 l + 1, of lane l among four
        half = arith.addf(pair, shuffled(pair, 1))
        first = less(arith.remui(mgpu_utils.thread_idx(), word(LANES)), LANES // 2)
        return arith.select(first, half, shuffled(half, 2))

    def _made(self, words: list[Any]) -> Any:
        """What is written of an access: its words, and the sum of its part; by whole warps."""
        return words, self._sum_of_part(words) if self.summed else None

    def _write(self, one: int, place: Any, made: Any) -> None:
        words, total = made
        pairs = self.pairs(words)
        # a lane's accesses lie one below the other, those of the four lanes side by side
        count = sizes.part(self.scheme) * 2 // ACCESS_BYTES
        whole, inner = (f(place, word(count)) for f in (arith.divui, arith.remui))
        lane, i = (f(inner, word(count // ACROSS)) for f in (arith.divui, arith.remui))
        to = arith.addi(arith.addi(times(whole, count), times(i, ACROSS)), lane)
        to = further(self.at["kept"], times(to, ACCESS_BYTES))
        store_shared(to, one * self.row_bytes, pairs)
        if total is not None:
            to = times(whole, sizes.columns(self.m) * 4)
            with mgpu_utils.when(less(inner, 1)):
                text = f"st.shared.f32 [$0 + {4 * one}], $1;"
                asm(text, "", further(self.at["sums"], to), total, effects=True)

    def _write_squares(self, squares: list[Any]) -> None:
        """A warp's sum for each row, behind the row."""
        warp, lane = (f(mgpu_utils.thread_idx(), word(LANES)) for f in (arith.divui, arith.remui))
        squares = [over_warp(each, "add.f32") for each in squares]
        address = further(self.at["kept"], times(warp, 4))
        with mgpu_utils.when(less(lane, 1)):
            for one, each in enumerate(squares):
                offset = (one + 1) * self.row_bytes - PART_BYTES
                asm(f"st.shared.f32 [$0 + {offset}], $1;", "", address, each)
