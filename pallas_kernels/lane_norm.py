"""Arithmetic of an RMSNorm on words of two 16-bit numbers, told in PTX.

As in lane_code.py, values are those of one thread. kind is PTX's: bf16x2 or f16x2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels.lane_code import asm


def halves_as_float32(x: str, kind: str) -> str:
    """PTX that makes the two numbers of word `x` float32 in registers a and b."""
    if kind == "bf16x2":
        text = f"{{ .reg .b32 t; shl.b32 t, {x}, 16; mov.b32 a, t; "
        return text + f"and.b32 t, {x}, 0xffff0000; mov.b32 b, t; }} "
    return f"{{ .reg .b16 s, t; mov.b32 {{s, t}}, {x}; cvt.f32.f16 a, s; cvt.f32.f16 b, t; }} "


def sum_of_squares(words: list[Any], kind: str, total: Any = None) -> Any:
    """Of the words' numbers, float32, added to `total` (None: 0)."""
    total = asm("mov.f32 $0, 0f00000000;", "f") if total is None else total
    for x in words:
        text = f"{{ .reg .f32 a, b; {halves_as_float32('$1', kind)} fma.rn.f32 a, a, a, $2; "
        total = asm(text + "fma.rn.f32 $0, b, b, a; }", "f", x, total)
    return total


def over_warp(value: Any, operation: str) -> Any:
    """What the lanes of a warp have, joined: "add.f32", "add.s32", "max.NaN.f32"."""
    kind = "f" if operation.endswith("f32") else "r"
    for mask in (16, 8, 4, 2, 1):
        text = f"{{ .reg .b32 x; .reg .{operation.split('.')[-1]} y; mov.b32 x, $1; "
        text += f"shfl.sync.bfly.b32 x, x, {mask}, 31, 0xffffffff; mov.b32 y, x; "
        value = asm(text + f"{operation} $0, $1, y; }}", kind, value, effects=True)
    return value


def reciprocal_root(squares: Any, count: int, eps: float) -> Any:
    """1 / sqrt(squares / count + eps), by the root of the hardware, as in rms_norm."""
    text = f"{{ .reg .f32 x; fma.rn.f32 x, $1, {hex_of(1 / count)}, {hex_of(eps)}; "
    return asm(text + "rsqrt.approx.f32 $0, x; }", "f", squares)


def hex_of(number: float) -> str:
    """A float32 as PTX writes it."""
    return "0f" + np.float32(number).tobytes()[::-1].hex().upper()
