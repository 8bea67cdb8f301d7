"""Rows of x made int8 by the threads of a block, in its shared memory, after an RMSNorm if asked.

As in plain JAX, what is normed is rounded to x's dtype, and so is its product with the norm's
weight. A thread has 16 numbers side by side of every `threads` times 16, and leaves their bytes in
the order in which codes come out of a word: four times those that lie 4 apart. Imported only by
ternary_matmul_kernel.py and between_attentions_tiles.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax._src.lib.mlir.dialects import arith

from pallas_kernels.awaited import load_all
from pallas_kernels.device import LANES
from pallas_kernels.lane_arithmetic import (
    KINDS,
    halves_as_float32,
    hex_of,
    over_block,
    reciprocal_root,
    sum_of_squares,
)
from pallas_kernels.lane_code import (
    accesses_of_thread,
    asm,
    further,
    only_where,
    store_shared,
    times,
    word,
)

EACH = 16  # numbers that a thread has at a time
MOST_WORDS = 64  # of x, that a thread has at once
SMALLEST = 1e-5  # of the largest magnitude that a row is scaled by
MAGIC = "0f4B400000"  # 1.5 * 2^23, to which a number is added to be rounded; its bits are then last


def read_row(
    address: Any, k: int, warps: int, at: Mapping[str, Any] | None = None, *, late: bool = False
) -> list[Any]:
    """A thread's words of a row of k numbers. at, late: as of `load_all`."""
    mine, found = accesses_of_thread(k // EACH, warps * LANES), []
    starts = [further(address, times(place, 2 * EACH)) for place, _ in mine]
    places = [(start, offset, 4) for start in starts for offset in (0, EACH)]
    loaded = iter(load_all(places, at or {}, late=late))
    for _, there in mine:
        words = [*next(loaded), *next(loaded)]
        if there is not None:
            words = [arith.select(there, x, word(0)) for x in words]
        found += words
    return found


def quantise_rows(
    at: Mapping[str, Any],
    m: int,
    k: int,
    *,
    dtype: str,
    warps: int,
    eps: float,
    weight: list[Any] | None = None,
    late: bool = False,
    barrier: Callable[[], None] | None = None,
) -> tuple[list[Any], list[Any]]:
    """What 1 of each row stands for, float32, and the sums of the rows' bytes, int32; the rows are
    in `at["rows"]`, behind a barrier.

    at: addresses of x [m, k], norm [k] of x's dtype (if there is one) and, on chip, of rows, int8
    [m, k], and marks, words [3, m, warps]. weight: what `read_row` gave of the norm; None: it is
    not read yet. late: other blocks of this launch have written x; with a `wait` in at, x is
    awaited: as of `load_all`. barrier: as in `over_block`.
    """
    kind = KINDS[dtype]
    mine = accesses_of_thread(k // EACH, warps * LANES)

    def joined(values: list[Any], operation: str, which: int, first: int) -> list[Any]:
        """Of some rows, over the block."""
        marks = further(at["marks"], word(4 * warps * (which * m + first)))
        return over_block(values, operation, marks, warps, barrier)

    if weight is None and "norm" in at:
        weight = read_row(at["norm"], k, warps)
    step = max(1, MOST_WORDS // (EACH // 2 * len(mine)))
    scales, sums = [], []
    for first in range(0, m, step):
        some = range(first, min(first + step, m))
        starts = [further(at["x"], word(2 * k * row)) for row in some]
        rows = [read_row(start, k, warps, at, late=late) for start in starts]
        if weight is not None:
            squares = [sum_of_squares(words, kind) for words in rows]
            totals = joined(squares, "add.f32", 0, first)
            roots = [reciprocal_root(total, k, eps) for total in totals]
            rows = [
                [_normed(x, root, w, kind) for x, w in zip(words, weight, strict=True)]
                for words, root in zip(rows, roots, strict=True)
            ]
        largest = joined([_largest(words, kind) for words in rows], "max.NaN.f32", 1, first)
        for row, a, words in zip(some, largest, rows, strict=True):
            a = asm(f"max.NaN.f32 $0, $1, {hex_of(SMALLEST)};", "f", a)
            inverse = asm("div.rn.f32 $0, 0f42FE0000, $1;", "f", a)
            scales.append(asm("div.rn.f32 $0, $1, 0f42FE0000;", "f", a))
            target, total = further(at["rows"], word(row * k)), word(0)
            for i, (place, there) in enumerate(mine):
                eight = words[8 * i : 8 * i + 8]
                four = [*_bytes(eight[0::2], inverse, kind), *_bytes(eight[1::2], inverse, kind)]
                total = add_bytes(four, total)  # zeros where nothing is there
                only_where(there, store_shared, further(target, times(place, EACH)), 0, four)
            sums.append(total)
    return scales, joined(sums, "add.s32", 2, 0)


def add_bytes(words: list[Any], total: Any) -> Any:
    """A total and the signed bytes of words, added up."""
    for each in words:
        total = asm("dp4a.s32.s32 $0, $1, 0x01010101, $2;", "r", each, total)
    return total


def _normed(x: Any, root: Any, weight: Any, kind: str) -> Any:
    """Two numbers times the root, rounded, times two of the weight, rounded."""
    text = f"{{ .reg .f32 a, b; .reg .b32 y; {halves_as_float32('$1', kind)} mul.rn.f32 a, a, $2; "
    text += f"mul.rn.f32 b, b, $2; cvt.rn.{kind}.f32 y, b, a; mul.rn.{kind} $0, y, $3; }}"
    return asm(text, "r", x, root, weight)


def _largest(words: list[Any], kind: str) -> Any:
    """The largest magnitude of words of two numbers, as float32; NaN if there is one."""
    found = word(0)
    for x in words:
        text = f"{{ .reg .b32 y; abs.{kind} y, $1; max.NaN.{kind} $0, y, $2; }}"
        found = asm(text, "r", x, found)
    return asm(
        f"{{ .reg .f32 a, b; {halves_as_float32('$1', kind)} max.NaN.f32 $0, a, b; }}", "f", found
    )


def _bytes(words: list[Any], inverse: Any, kind: str) -> list[Any]:
    """Eight numbers in four words times `inverse`, rounded, as bytes: those in the words' lower
    halves as one word, those in the upper as another.

    No number is above the row's largest, so that none leaves -127 to 127.
    """
    text = "{ .reg .f32 a, b; .reg .b32 p<4>, q<4>; "
    for i in range(4):
        text += halves_as_float32(f"${2 + i}", kind)
        for number, target in (("a", f"p{i}"), ("b", f"q{i}")):
            text += f"mul.rn.f32 {number}, {number}, $6; add.rn.f32 {number}, {number}, {MAGIC}; "
            text += f"mov.b32 {target}, {number}; "
    for i, name in enumerate("pq"):
        text += f"prmt.b32 {name}0, {name}0, {name}1, 0x0040; "
        text += f"prmt.b32 {name}2, {name}2, {name}3, 0x0040; "
        text += f"prmt.b32 ${i}, {name}0, {name}2, 0x5410; "
    return asm(text + "}", "rr", *words, inverse)
