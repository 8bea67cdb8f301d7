"""Packed codes as numbers of 16 bits in registers, two at a time and in few instructions.

A code's bits are put where a 16-bit float has them, and one operation of two numbers takes away
what that has added or multiplied. No table, and no conversion, of which there are 16 a clock.

    int4    128 + c is 0x4300 | c in bfloat16 (float16: 1024 + c, 0x6400); less 128 + zero
    int8    128 + (c & 127), less 128 or, of a negative c, 256
    E2M1    sign, two bits of exponent and one of mantissa at the ends of theirs: times 2^126
    E4M3    likewise, times 2^120
    plain   there is nothing to do: the two of a word are a pair

Of a word of codes, the pairs are of numbers that lie half a word apart, for they are there at once:
of 8 codes 0 and 4, 1 and 5, 2 and 6, 3 and 7, of 4 codes 0 and 2, 1 and 3. `pairs_of_x` brings what
they are multiplied with in the same order. Imported only by the modules of quantized_matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import llvm

from pallas_kernels.lane_code import asm, word
from pallas_kernels.packed import CODES_PER_BYTE, PLAIN

E2M1 = ("nvfp4", "mxfp4")
MX = ("mxfp4", "mxfp8")
_MX_SHIFT = 20  # MX scales up to 2^21 stay numbers of bfloat16, and what they multiply is 2^-20


def per_word(scheme: str) -> int:
    """Codes in 32 bits."""
    return 2 if scheme == PLAIN else 4 * CODES_PER_BYTE.get(scheme, 1)


def values(scheme: str, codes: Any, dtype: Any, *, zero: Any, scale: Any) -> list[Any]:
    """The pairs of a word of codes, as words of two numbers of `dtype`.

    zero: `zero_pair`'s, of int4; None: numbers are too large by `too_large`. scale: `scale_pair`'s,
    where numbers are scaled one by one, as E2M1 always are; else None.
    """
    if scheme == PLAIN:
        return [codes]
    bfloat16 = dtype == jnp.bfloat16
    kind = "bf16x2" if bfloat16 else "f16x2"
    if scheme == "int4":
        pairs = _int4(codes, zero, kind)
    elif scheme in E2M1:
        pairs = _e2m1(codes, bfloat16)
    elif scheme == "int8":
        pairs = _int8(codes, bfloat16)
    else:
        pairs = _e4m3(codes, bfloat16)
        if scheme == "fp8":
            whole = word(0x7B807B80 if bfloat16 else 0x5C005C00)
            pairs = [_multiply(pair, whole, kind) for pair in pairs]
    return pairs if scale is None else [_multiply(pair, scale, kind) for pair in pairs]


def _multiply(pair, scale, kind: str):
    return asm(f"mul.rn.{kind} $0, $1, $2;", "r", pair, scale)


def _int4(codes, zero, kind: str) -> list[Any]:
    magic = "0x43004300" if kind == "bf16x2" else "0x64006400"
    text = "{ .reg .b32 x; "
    for i in range(4):
        source = "$4" if i == 0 else "x"
        text += f"shr.u32 x, $4, {4 * i}; " if i else ""
        to = f"${i}" if zero is None else "x"
        text += f"lop3.b32 {to}, {source}, 0x000f000f, {magic}, 0xea; "
        text += "" if zero is None else f"sub.rn.{kind} ${i}, x, $5; "
    return asm(text + "}", "rrrr", codes, *([] if zero is None else [zero]))


def half_a_word_apart(scheme: str, codes: Any) -> Any:
    """Two codes side by side, the lowest bits of a word, as codes that `values` has as its first
    pair; the others of the word it returns are no codes.
    """
    if per_word(scheme) == 8:
        return asm("mul.lo.u32 $0, $1, 0x1001;", "r", codes)
    return asm("prmt.b32 $0, $1, 0, 0x4140;", "r", codes)


def minus_one(dtype: Any) -> Any:
    """Two numbers of `dtype`, -1 each, as a word."""
    return word(0xBF80BF80 if dtype == jnp.bfloat16 else 0xBC00BC00)


def too_large(dtype: Any, zero: Any | None) -> Any:
    """By how much int4's numbers are too large without a zero, float32; zero: its code, None: 8."""
    more = 128.0 if dtype == jnp.bfloat16 else 1024.0
    if zero is None:
        f32 = ir.F32Type.get()
        return llvm.ConstantOp(f32, ir.FloatAttr.get(f32, more + 8)).result
    bits = 0x43000000 if more == 128 else 0x44800000
    text = f"shl.b32 x, $1, {16 if more == 128 else 13}; or.b32 x, x, {bits:#x}; mov.b32 $0, x;"
    return asm("{ .reg .b32 x; " + text + "}", "f", zero)


def zero_pair(dtype: Any, zero: Any | None) -> Any:
    """What int4 is taken from; zero: its code, None for 8."""
    magic = 0x43004300 if dtype == jnp.bfloat16 else 0x64006400
    if zero is None:
        return word(magic + 0x00080008)
    return asm(f"mad.lo.u32 $0, $1, 0x00010001, {magic:#x};", "r", zero)


def _int8(codes, bfloat16: bool) -> list[Any]:
    text = "{ .reg .b32 x, y, z; "
    for i in range(2):
        if bfloat16:
            text += f"shr.u32 x, $2, {8 * i}; " if i else "mov.b32 x, $2; "
            text += f"""lop3.b32 z, x, 0x00800080, 0x43004300, 0xea;
                lop3.b32 x, x, 0x007f007f, 0x43004300, 0xea; sub.rn.bf16x2 ${i}, x, z; """
        else:  # 1152 + c is 0x6400 | (c ^ 0x80)
            text += f"""prmt.b32 x, $2, 0, 0x4{i + 2}4{i}; xor.b32 x, x, 0x64806480;
                mov.b32 y, 0x64806480; sub.rn.f16x2 ${i}, x, y; """
    return asm(text + "}", "rr", codes)


def _e2m1(codes, bfloat16: bool) -> list[Any]:
    text = "{ .reg .b32 w, x, y; shr.u32 w, $4, 8; "
    for i in range(4):
        source, up = "w" if i > 1 else "$4", 4 * (i % 2)
        mask = 0x000F000F << up
        if bfloat16:  # the product puts the sign 12 bits up, and the rest 6
            text += f"""and.b32 x, {source}, {mask:#x};
                mul.lo.u32 x, x, {(1 << 6 | 1 << 12) >> up:#x}; and.b32 ${i}, x, 0x81c081c0; """
        else:
            text += f"""shl.b32 x, {source}, {12 - up}; shl.b32 y, {source}, {9 - up};
                and.b32 y, y, 0x0e000e00; lop3.b32 ${i}, x, 0x80008000, y, 0xea; """
    return asm(text + "}", "rrrr", codes)


def _e4m3(codes, bfloat16: bool) -> list[Any]:
    text = "{ .reg .b32 x, y; "
    for i in range(2):
        text += "mov.b32 x, $2; " if i else "shl.b32 x, $2, 8; "
        down, mask = (4, "0x07f007f0") if bfloat16 else (1, "0x3f803f80")
        text += f"""shr.u32 y, x, {down}; and.b32 y, y, {mask};
            lop3.b32 ${i}, x, 0x80008000, y, 0xea; """
    return asm(text + "}", "rr", codes)


def pairs_of_x(words: Sequence[Any], scheme: str) -> list[Any]:
    """Numbers of 16 bits in their order, as many as a word has codes, as pairs like `values`'s."""
    half = len(words) // 2
    assert len(words) == per_word(scheme) // 2
    if scheme == PLAIN:
        return list(words)
    return [
        asm(f"prmt.b32 $0, $1, $2, {order};", "r", words[i], words[i + half])
        for i in range(half)
        for order in ("0x5410", "0x7632")
    ]


def scale_pair(scheme: str, scale: Any, dtype: Any, stored: Any) -> Any:
    """A scale as two numbers that `values` takes, one half of what its codes lack with it.

    scale: the word or the float32 that was loaded, `stored` its dtype.
    """
    if scheme in MX:
        # bfloat16 of 2^(e - 127), of 2^126 or 2^120, and of 2^-_MX_SHIFT
        add = (126 if scheme == "mxfp4" else 120) - _MX_SHIFT
        text = f"min.u32 x, $1, {254 - add}; add.u32 x, x, {add}; mul.lo.u32 $0, x, 0x00800080;"
        return asm("{ .reg .b32 x; " + text + "}", "r", scale)
    if scheme == "nvfp4":
        # s 2^-120 as a float32, times 2^238 (2^127), of which E2M1 lacks 2^126 (2^14)
        bfloat16 = dtype == jnp.bfloat16
        factors = ("0f7B000000", "0f7B000000") if bfloat16 else ("0f7B000000", "0f43800000")
        text = f"""shl.b32 x, $1, 20; mov.b32 y, x; mul.f32 y, y, {factors[0]};
            mul.f32 y, y, {factors[1]}; cvt.rn.{"bf16x2" if bfloat16 else "f16x2"}.f32 $0, y, y;"""
        return asm("{ .reg .b32 x; .reg .f32 y; " + text + "}", "r", scale)
    wide = as_float32(scale, stored)
    kind = "bf16x2" if dtype == jnp.bfloat16 else "f16x2"
    return asm(f"cvt.rn.{kind}.f32 $0, $1, $1;", "r", wide)


def as_float32(scale: Any, stored: Any) -> Any:
    """A scale that was loaded as a word."""
    if stored == jnp.float32:
        return asm("mov.b32 $0, $1;", "f", scale)
    if stored == jnp.bfloat16:
        return asm("{ .reg .b32 x; shl.b32 x, $1, 16; mov.b32 $0, x; }", "f", scale)
    text = "{ .reg .b16 x, y; mov.b32 {x, y}, $1; cvt.f32.f16 $0, x; }"
    return asm(text, "f", scale)


def scales_sums(scheme: str) -> bool:
    """Whether scales may multiply sums; else numbers are incomplete without."""
    return scheme in ("int8", "int4", "fp8")


def rest(scheme: str, dtype: Any) -> float:
    """What sums must still be multiplied by, for what `scale_pair` left out."""
    if scheme in MX:
        return 2.0**_MX_SHIFT
    if scheme == "nvfp4":
        return 2.0**8 if dtype == jnp.bfloat16 else 2.0**7
    return 1.0
