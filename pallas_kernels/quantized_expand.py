"""Codes of a tile of a weight as numbers in registers, each rounded once, as `dequantize` does it.

What a thread has is 8 numbers of a row side by side before and after: their codes come from shared
memory and their 16 bytes go there by plain loads and stores of arrays, and only what happens to
their words between is told instruction by instruction (`quantized_unpack`). The interpreter calls
`dequantize`. Imported only by quantized_matmul_tiles.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels import quantized_unpack as unpack
from pallas_kernels.lane_code import HALVES, array_of, asm, register_of, words_of
from pallas_kernels.packed import Packed
from pallas_kernels.quantize import dequantize
from pallas_kernels.quantized_tiles_config import CHUNK, CODE_BYTES, HELD, ROWS, step


def numbers(codes_ref, of: dict[str, Any], packed: Packed, dtype, chunk: int, *, interpret: bool):
    """[64, 64] numbers in registers: those of a chunk of the 64 bytes of each row.

    of: references to scales and zeros [groups, 64] of a stage.
    """
    size = step(packed.scheme)
    group = min(packed.group_size or size, size)
    first, count = chunk * CHUNK // group, max(1, CHUNK // group)
    if interpret:
        wide = CODE_BYTES * CHUNK // size
        parts = {name: ref[...][first : first + count] for name, ref in of.items()}
        whole = {"scale": None, "zero": None, **parts}
        part = dataclasses.replace(
            packed,
            codes=codes_ref[...][:, chunk * wide : (chunk + 1) * wide],
            row_scale=None,
            group_size=min(group, CHUNK),
            **whole,
        )
        return dequantize(part, dtype)
    # A warp has 16 rows by 16 numbers: of what it stores, 8 threads fill the banks
    tile = lambda width, each: _compat.tiled_layout(  # noqa: E731
        ((64, width), (16, width), (each,)), warp_dims=(-5,), lane_dims=(-2, -3)
    )
    each = HELD * CODE_BYTES // size
    as_codes, as_numbers = tile(2 * each, each), tile(2 * HELD, HELD)
    codes = _compat.load(codes_ref, as_codes, optimized=False)
    loaded = [
        _compat.load(ref.at[first + i], as_codes.reduce(1), optimized=False)
        for ref in of.values()
        for i in range(count)
    ]
    names = [name for name in of for _ in range(count)]

    @plgpu.inline_mgpu(
        arg_types=(as_codes, *[as_codes.reduce(1)] * len(loaded)),
        return_type=plgpu.ShapeDtypeStruct((ROWS, CHUNK), dtype, layout=as_numbers),
    )
    def expanded(_: Any, codes: Any, *loaded: Any) -> Any:
        of: dict[str, list[Any]] = {"scale": [], "zero": []}
        for each, array in zip(names, loaded, strict=True):
            (register,) = array.registers.flat
            of[each] += words_of(register)
        held = list(codes.registers.flat)
        held = held[chunk * len(held) * CHUNK // size :][: len(held) * CHUNK // size]
        kind = ir.BF16Type if dtype == jnp.bfloat16 else ir.F16Type
        found = []
        for i, register in enumerate(held):
            here = i * count // len(held)
            zero, scale = (of[name][here] if of[name] else None for name in ("zero", "scale"))
            pairs = []
            for word in words_of(register):
                pairs += _pairs(word, zero, scale, packed, dtype)
            found.append(register_of(pairs, kind.get()))
        return array_of(found, (ROWS, CHUNK), as_numbers)

    return expanded(codes, *loaded)


def _pairs(codes: Any, zero: Any, scale: Any, packed: Packed, dtype) -> list[Any]:
    """The numbers of a word of codes in their order, two in a word, rounded once as `dequantize`'s.

    zero, scale: as they were loaded, or None.
    """
    scheme = packed.scheme
    stored = None if packed.scale is None else packed.scale.dtype
    # exact: a product of 16-bit numbers is rounded once, but the scale itself must be one
    wide = unpack.scales_sums(scheme) and stored is not None and stored != dtype
    pair = None if scale is None or wide else unpack.scale_pair(scheme, scale, dtype, stored)
    zeros = unpack.zero_pair(dtype, zero) if scheme == "int4" else None
    pairs = unpack.values(scheme, codes, dtype, zero=zeros, scale=pair)
    if wide:
        factor = unpack.as_float32(scale, stored)
        kind = HALVES[jnp.dtype(dtype).name]
        text = f"""{{ .reg .b16 x, y; .reg .f32 a, b; mov.b32 {{x, y}}, $1;
            cvt.f32.{kind} a, x; cvt.f32.{kind} b, y; mul.rn.f32 a, a, $2; mul.rn.f32 b, b, $2;
            cvt.rn.{kind}x2.f32 $0, b, a; }}"""
        pairs = [asm(text, "r", each, factor) for each in pairs]
    # of n codes a pair has i and i + n / 2
    half = len(pairs)
    return [
        asm(f"prmt.b32 $0, $1, $2, {order};", "r", pairs[i], pairs[i + 1])
        for order in ("0x5410", "0x7632")
        for i in range(0, half, 2)
    ]
