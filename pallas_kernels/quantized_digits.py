"""Codes of 8 or 4 bits times x by whole numbers: codes are multiplied as they are.

With one row of x the time is not that of the products, but of making numbers of codes: seven
instructions for eight of them. So x is made into codes, once for all rows of the weight. SPAN
numbers side by side have one unit, a power of two, in which each is a whole number

    X = d0 2^16 + d1 2^8 + d2,  |X| <= 2^22,  digits d from -128 to 127,

exactly, if it has 8 significant bits (bfloat16) and is no smaller than 2^-14 of the span's largest;
smaller ones are off by half a unit at most, 2^-22 of the largest. (A largest one below 2^-105
counts as that.) A product of tensor cores has eight columns of x, of which one row needs one; its
digits are three of four, so that there is room for two rows. Sums over a part of K are whole
numbers, and exact.

int8's codes are the numbers of a product as they are. A byte of int4 has an even input in its lower
four bits and the next one in its upper: these are taken where they stand, which makes them 16 times
as large, and so the unit of odd inputs is 16 times as large, too (exact are then those no smaller
than 2^-10 of the largest). What int4's codes are too large by, 8 or a zero point, is taken from the
sums. Imported only by modules of between_attentions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels import quantized_matmul_config as sizes
from pallas_kernels.lane_arithmetic import all_floats, hex_of, number, shuffled
from pallas_kernels.lane_code import asm, further, less, mma, times, word
from pallas_kernels.packed import Packed
from pallas_kernels.quantized_matmul_config import ACROSS, PART_BYTES
from pallas_kernels.quantized_rows import Rows

SPAN = 128  # numbers of x that share a unit
COUNT = 3  # digits of a number
COLUMNS = 4  # of a product, that a row of x has; behind its digits they are nobody's
_ACCESSES = SPAN // 8  # of a thread to x, of a span
# Of a span: what the sums of its digits are multiplied by, and what is taken from them
UNITS_BYTES = 32
_TOP = 22  # |X| <= 2^22
_LEAST = _TOP  # exponent, its bias counted in, that a span's largest counts as having at least
_BIAS = 127
SCHEMES = ("int8", "int4")
_TYPES = {
    "int8": "m16n8k32.row.col.s32.s8.s8.s32",
    "int4": "m16n8k32.row.col.s32.u8.s8.s32",
}


def fit(packed: Packed) -> bool:
    """Whether x is multiplied so: scales must be of whole parts."""
    if packed.scheme not in SCHEMES:
        return False
    return packed.scale is None or (packed.group_size or 0) % sizes.part(packed.scheme) == 0


def x_bytes(numbers: int) -> int:
    """On chip, of a row of x, and of its sums of squares behind it."""
    return COUNT * numbers + PART_BYTES


def units_bytes(numbers: int) -> int:
    """On chip, beside x."""
    return numbers // SPAN * UNITS_BYTES


@dataclasses.dataclass(frozen=True)
class DigitRows(Rows):
    """Rows of x as digits: of a part one digit of all numbers behind the other, in the order of the
    codes. At sums, for each row and span, eight numbers: the units of the first two digits, less
    the span's sum, 0; the unit of the third and zeros. The sum is times 8 if that is what int4's
    codes are too large by (`eight`).
    """

    eight: bool = False

    @property
    def _numbers(self) -> int:
        return (self.row_bytes - PART_BYTES) // COUNT

    @property
    def _units(self) -> int:
        return self._numbers // 8

    def _made(self, words: list[Any]) -> Any:
        """The digits' words, a span's unit, and what is taken from its sums."""
        largest = None
        for each in words:
            each = arith.andi(each, word(0x7FFF7FFF))
            largest = each if largest is None else _larger(largest, each)
        for mask in (8, 4, 2, 1):
            largest = _larger(largest, shuffled(largest, mask))
        one, other = (
            arith.shrui(arith.andi(largest, word(m)), word(n))
            for m, n in ((0x7F80, 7), (0x7F800000, 23))
        )
        exponent = arith.maxui(one, other)
        finite = less(exponent, 255)
        exponent = arith.maxui(exponent, word(_LEAST))
        # x 2^(bias + 21 - exponent), as whole numbers: below 2^22 whatever the mantissa
        shift = arith.subi(word(2 * _BIAS + _TOP - 1), exponent)
        factors = [_float_of(arith.shli(shift, word(23)))]
        if self.scheme == "int4":
            factors.append(arith.mulf(factors[0], number(1 / 16)))
        numbers = all_floats(words, "bfloat16")
        whole = [_balanced(x, factors[i % len(factors)]) for i, x in enumerate(numbers)]
        if self.scheme == "int4":
            whole = whole[0::2] + whole[1::2]
        digits = [_digits(whole[i : i + 4]) for i in (0, 4)]
        # of 1 in X; NaN where a number is none, for a digit cannot be
        unit = _float_of(arith.shli(arith.subi(exponent, word(_TOP - 1)), word(23)))
        unit = arith.select(finite, unit, number(float("nan")))
        total = self._sum_of_part(words) if self.summed else None
        return digits, unit, total

    def _write(self, one: int, place: Any, made: Any) -> None:
        digits, unit, total = made  # of a span the first of its threads has the total
        per_part = sizes.part(self.scheme) // 8  # accesses
        part, inner = (f(place, word(per_part)) for f in (arith.divui, arith.remui))
        across, i = (f(inner, word(per_part // ACROSS)) for f in (arith.divui, arith.remui))
        base = further(self.at["kept"], times(part, COUNT * sizes.part(self.scheme)))
        for digit in range(COUNT):
            to = arith.addi(base, place_of(self.scheme, digit, across, i))
            pair = [each[digit] for each in digits]
            offset = one * self.row_bytes + digit * sizes.part(self.scheme)
            asm(f"st.shared.v2.u32 [$0 + {offset}], {{$1, $2}};", "", to, *pair, effects=True)
        span, inner = (f(place, word(_ACCESSES)) for f in (arith.divui, arith.remui))
        to = further(self.at["sums"], times(span, UNITS_BYTES))
        with mgpu_utils.when(less(inner, 1)):
            nothing = number(0.0)
            taken = nothing
            if total is not None:
                taken = arith.mulf(total, number(8.0)) if self.eight else total
            large, small = (arith.mulf(unit, number(2.0**n)) for n in (16, 8))
            first, second = (large, small, taken, nothing), (unit, nothing, nothing, nothing)
            start = one * units_bytes(self._numbers)
            for offset, values in ((start, first), (start + 16, second)):
                text = f"st.shared.v4.f32 [$0 + {offset}], {{$1, $2, $3, $4}};"
                asm(text, "", to, *values, effects=True)


def place_of(scheme: str, digit: int, across: Any, i: Any) -> Any:
    """Of a digit of a part, where the i-th 8 numbers of one of four lanes lie."""
    if scheme == "int8":
        return arith.addi(times(across, 16), times(i, 8))
    # A lane's first 16 bytes, then its others; digits side by side the other way round
    half, low = (f(i, word(2)) for f in (arith.divui, arith.remui))
    half = arith.xori(half, word(digit % 2))
    return arith.addi(arith.addi(times(half, 64), times(across, 16)), times(low, 8))


def products(scheme: str, codes: list[list[Any]], x: list[Any]) -> list[Any]:
    """Whole sums of a tile's 16 rows by 8 columns, over a part, as float32: four of a lane.

    codes: of the lane's two rows, four words each; x: of its column's digit four words, with int4
    eight.
    """
    sums = [word(0)] * 4
    for i in range(0, 4, 2 if scheme == "int8" else 1):
        if scheme == "int8":
            left = [codes[0][i], codes[1][i], codes[0][i + 1], codes[1][i + 1]]
            right = x[i : i + 2]
        else:
            left = [
                arith.andi(row[i], word(mask)) for mask in (0x0F0F0F0F, 0xF0F0F0F0) for row in codes
            ]
            right = x[2 * i : 2 * i + 2]
        sums = mma(_TYPES[scheme], left, right, sums)
    return [asm("cvt.rn.f32.s32 $0, $1;", "f", each) for each in sums]


def whole(sums: list[Any]) -> list[Any]:
    """Of a tile the sums of its two rows that the lane has, those of all digits together: of the
    first row of x in the first of four lanes, of the second in the third.
    """
    found = []
    for i in (0, 2):
        both = arith.addf(sums[i], sums[i + 1])
        found.append(arith.addf(both, shuffled(both, 1)))
    return found


def _balanced(x: Any, factor: Any) -> Any:
    """A float32 times the factor as a whole number, each of whose lower three bytes has 128 more
    than its digit.
    """
    # 1.5 2^23 more, and the whole number stands in the lower bits
    text = f"{{ .reg .f32 y; fma.rn.f32 y, $1, $2, {hex_of(1.5 * 2**23)}; mov.b32 $0, y; }}"
    bits = asm(text, "r", x, factor)
    return arith.addi(bits, word(0x00808080 - 0x00400000))


def _digits(numbers: list[Any]) -> list[Any]:
    """Of four numbers, a word of each digit, the largest first."""

    def chosen(a: Any, b: Any, order: str) -> Any:
        return asm(f"prmt.b32 $0, $1, $2, {order};", "r", a, b)

    a, b, c, d = numbers
    low, more = chosen(a, b, "0x5140"), chosen(c, d, "0x5140")  # bytes 0, 0, 1, 1
    high, rest = chosen(a, b, "0x0062"), chosen(c, d, "0x0062")  # bytes 2, 2
    orders = ((high, rest, "0x5410"), (low, more, "0x7632"), (low, more, "0x5410"))
    found = [chosen(*order) for order in orders]
    return [arith.xori(each, word(0x80808080)) for each in found]


def _larger(a: Any, b: Any) -> Any:
    """Of two bfloat16 and two, none of them negative, the larger ones; NaN counts as large."""
    return asm("max.u16x2 $0, $1, $2;", "r", a, b)


def _float_of(bits: Any) -> Any:
    return asm("mov.b32 $0, $1;", "f", bits)
