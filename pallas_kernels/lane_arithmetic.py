"""Arithmetic on words of two 16-bit numbers, and over the threads of a warp or block, told in PTX.

As in lane_code.py, values are those of one thread. kind is PTX's name of a dtype: `KINDS` has both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, gpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels.device import ACCESS_BYTES, LANES, WARPS
from pallas_kernels.lane_code import HALVES, asm, further, less, mma, times, word

DTYPES = (jnp.bfloat16, jnp.float16)
KINDS = {"bfloat16": "bf16x2", "float16": "f16x2"}
EACH = ACCESS_BYTES // 2  # numbers of an access


def halves_as_float32(x: str, kind: str) -> str:
    """PTX that makes the two numbers of word `x` float32 in registers a and b."""
    if kind == "bf16x2":
        text = f"{{ .reg .b32 t; shl.b32 t, {x}, 16; mov.b32 a, t; "
        return text + f"and.b32 t, {x}, 0xffff0000; mov.b32 b, t; }} "
    return f"{{ .reg .b16 s, t; mov.b32 {{s, t}}, {x}; cvt.f32.f16 a, s; cvt.f32.f16 b, t; }} "


def floats(x: Any, dtype: str) -> list[Any]:
    """The numbers of a word as float32: two, or the one that it is."""
    if dtype == "float32":
        return [asm("mov.b32 $0, $1;", "f", x)]
    text = f"{{ .reg .f32 a, b; {halves_as_float32('$2', KINDS[dtype])} "
    return asm(text + "mov.f32 $0, a; mov.f32 $1, b; }", "ff", x)


def all_floats(words: list[Any], dtype: str) -> list[Any]:
    """The numbers of several words, in their order."""
    return [x for each in words for x in floats(each, dtype)]


def words_of_floats(numbers: list[Any], dtype: str) -> list[Any]:
    """The other way: float32 rounded, two in a word."""
    text = f"cvt.rn.{KINDS[dtype]}.f32 $0, $2, $1;"
    return [asm(text, "r", *numbers[i : i + 2]) for i in range(0, len(numbers), 2)]


def bits(x: Any) -> Any:
    """A float32 as a word."""
    return asm("mov.b32 $0, $1;", "r", x)


def number(value: float) -> Any:
    """A constant of float32."""
    return asm(f"mov.f32 $0, {hex_of(value)};", "f")


def larger(a: Any, b: Any) -> Any:
    """Of two float32."""
    return asm("max.f32 $0, $1, $2;", "f", a, b)


def fused(a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once."""
    return asm("fma.rn.f32 $0, $1, $2, $3;", "f", a, b, c)


def product(dtype: str, x: Any, y: Any) -> Any:
    """Two numbers times two, rounded."""
    return asm(f"mul.rn.{KINDS[dtype]} $0, $1, $2;", "r", x, y)


def added(dtype: str, x: Any, y: Any) -> Any:
    """The sums of two numbers and two, rounded."""
    return asm(f"add.rn.{KINDS[dtype]} $0, $1, $2;", "r", x, y)


def added_products(sums: list[Any] | None, a: list[Any], b: list[Any], dtype: Any) -> list[Any]:
    """sums + a [16, 16] @ b [16, 8] of a warp, four float32 a thread; None: 0 + a @ b."""
    kind = HALVES[jnp.dtype(dtype).name]
    return mma(f"m16n8k16.row.col.f32.{kind}.{kind}.f32", a, b, sums or [number(0)] * 4)


def sum_of_squares(words: list[Any], kind: str, total: Any = None) -> Any:
    """Of the words' numbers, float32, added to `total` (None: 0)."""
    total = number(0) if total is None else total
    for x in words:
        text = f"{{ .reg .f32 a, b; {halves_as_float32('$1', kind)} fma.rn.f32 a, a, a, $2; "
        total = asm(text + "fma.rn.f32 $0, b, b, a; }", "f", x, total)
    return total


def over_warp(value: Any, operation: str, lanes: int = LANES) -> Any:
    """What the lanes of a warp have, joined: "add.f32", "add.s32", "max.NaN.f32"; or what so many
    side by side have, a power of 2.
    """
    kind = "f" if operation.endswith("f32") else "r"
    while lanes := lanes // 2:
        value = asm(f"{operation} $0, $1, $2;", kind, value, shuffled(value, lanes))
    return value


def shuffled(value: Any, mask: int) -> Any:
    """What the lane has whose number differs in the bits of `mask`: a word or a float32."""
    text = f"{{ .reg .b32 x; mov.b32 x, $1; shfl.sync.bfly.b32 x, x, {mask}, 31, 0xffffffff; "
    kind = "f" if value.type == ir.F32Type.get() else "r"
    return asm(text + "mov.b32 $0, x; }", kind, value, effects=True)


def over_block(
    values: list[Any],
    operation: str,
    board: Any,
    warps: int,
    barrier: Callable[[], None] | None = None,
) -> list[Any]:
    """What the threads of a block have, joined; the same in each of them.

    board: an address on chip of words [values, warps], at 16 bytes. The block meets once here, and
    must meet once more before it writes there again. warps: its first ones, a multiple of 4.
    barrier: where these meet; None: they are all.
    """
    kind = "f" if operation.endswith("f32") else "r"
    thread = mgpu_utils.thread_idx()
    warp, lane = (f(thread, word(LANES)) for f in (arith.divui, arith.remui))
    done = [over_warp(value, operation) for value in values]
    with mgpu_utils.when(less(lane, 1)):
        for i, value in enumerate(done):
            place = further(board, times(arith.addi(warp, word(i * warps)), 4))
            asm("st.shared.b32 [$0], $1;", "", place, value)
    (barrier or gpu.barrier)()
    found = []
    for i in range(len(done)):
        total = None
        for each in range(0, warps, WARPS):
            text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {4 * (i * warps + each)}];"
            for part in asm(text, 4 * kind, board, effects=True):
                both = f"{operation} $0, $1, $2;"
                total = part if total is None else asm(both, kind, total, part)
        found.append(total)
    return found


def reciprocal_root(squares: Any, count: int, eps: float) -> Any:
    """1 / sqrt(squares / count + eps), by the root of the hardware, as in rms_norm."""
    text = f"{{ .reg .f32 x; fma.rn.f32 x, $1, {hex_of(1 / count)}, {hex_of(eps)}; "
    return asm(text + "rsqrt.approx.f32 $0, x; }", "f", squares)


def hex_of(number: float) -> str:
    """A float32 as PTX writes it."""
    return "0f" + np.float32(number).tobytes()[::-1].hex().upper()
