"""Codes of a tile of a weight as numbers in registers, each rounded once, as `dequantize` does it.

They lie as wgmma reads its left operand: of each 8 numbers of a row a thread has two side by side,
whose codes it loads from shared memory as the byte or two that they take. What happens between is
told instruction by instruction (`quantized_unpack`). The interpreter calls `dequantize`. Imported
only by quantized_matmul_tiles.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels import quantized_unpack as unpack
from pallas_kernels.lane_code import HALVES, array_of, asm, register_of, words_of
from pallas_kernels.packed import Packed
from pallas_kernels.quantize import dequantize
from pallas_kernels.quantized_tiles_config import CHUNK, code_bytes, step
from pallas_kernels.wgmma_tiles import WGMMA_ROWS

EACH = 8  # numbers of a row that four threads share


def layout(rows: int, line: int = EACH, each: int = 2) -> Any:
    """Of 64 rows Layout.WGMMA, where a thread has two rows; of 32 rows a thread has one of them.

    line: what four threads share of a row, of which each has `each` side by side.
    """
    tiles = ((rows, line), (rows // 4, line), (8, line), (each,))
    return _compat.tiled_layout(tiles, warp_dims=(-7,), lane_dims=(-3, -2))


def numbers(codes, of: dict[str, Any], packed: Packed, dtype, chunk: int, *, interpret: bool):
    """[64, 64] numbers in registers (Layout.WGMMA): those of a chunk of a stage.

    codes: a reference to 64 rows, or two to 32 rows; a thread then has a row of each (`halves`
    takes sums apart). of: for each of them, references to scales and zeros [groups, rows].
    """
    size = step(packed)
    group = min(packed.group_size or size, size)
    first, count = chunk * CHUNK // group, max(1, CHUNK // group)
    if interpret:
        wide = code_bytes(packed) * CHUNK // size
        parts = []
        for i, ref in enumerate(codes):
            grouped = {name: refs[i][...][first : first + count] for name, refs in of.items()}
            part = dataclasses.replace(
                packed,
                codes=ref[...][:, chunk * wide : (chunk + 1) * wide],
                row_scale=None,
                group_size=min(group, CHUNK),
                **{"scale": None, "zero": None, **grouped},
            )
            parts.append(dequantize(part, dtype))
        return jnp.concatenate(parts)
    line = EACH * code_bytes(packed) // size  # bytes that four threads share
    as_codes = layout(WGMMA_ROWS // len(codes), line, line // 4)
    loaded = [_compat.load(ref, as_codes, optimized=False) for ref in codes]
    places = [(name, i) for name in of for i in range(count)]
    loaded += [
        _compat.load(ref.at[first + i], as_codes.reduce(1), optimized=False)
        for name, i in places
        for ref in of[name]
    ]
    types = [as_codes] * len(codes) + [as_codes.reduce(1)] * (len(places) * len(codes))

    @plgpu.inline_mgpu(
        arg_types=tuple(types),
        return_type=plgpu.ShapeDtypeStruct((WGMMA_ROWS, CHUNK), dtype, layout=plgpu.Layout.WGMMA),
    )
    def expanded(_: Any, *arrays: Any) -> Any:
        held = [array.registers.reshape(-1, 2 // len(codes)) for array in arrays]
        held = [
            np.concatenate(held[i : i + len(codes)], axis=1)
            for i in range(0, len(held), len(codes))
        ]
        rows, *grouped = held  # of 8 numbers, and of the two rows of a thread
        of = dict(zip(places, (registers[0] for registers in grouped), strict=True))
        each = CHUNK // EACH
        kind = ir.BF16Type if dtype == jnp.bfloat16 else ir.F16Type
        found = []
        for at, registers in enumerate(rows[chunk * each : (chunk + 1) * each]):
            for row, register in enumerate(registers):
                zero, scale = (
                    words_of(of[name, at * count // each][row])[0] if (name, 0) in of else None
                    for name in ("zero", "scale")
                )
                (word,) = words_of(register)
                found.append(register_of([_pair(word, zero, scale, packed, dtype)], kind.get()))
        return array_of(found, (WGMMA_ROWS, CHUNK), plgpu.Layout.WGMMA)

    return expanded(*loaded)


def halves(total: jax.Array, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Sums [64, N] of two times 32 rows (`numbers`) as two arrays [32, N]."""
    rows = WGMMA_ROWS // 2
    if interpret:
        return total[:rows], total[rows:]
    columns = total.shape[1]
    one = plgpu.ShapeDtypeStruct((rows, columns), total.dtype, layout=layout(rows))

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=(one, one))
    def apart(_: Any, *arrays: Any) -> Any:
        registers = arrays[0].registers.reshape(-1, 2).T
        return tuple(array_of(list(each), (rows, columns), layout(rows)) for each in registers)

    return apart(total)


def store_turned(ref: Any, value: jax.Array, *, interpret: bool) -> None:
    """ref[...] = value.T, of 64 or 32 rows of the weight and 16 bits, or of 32 rows in float32."""
    if interpret:
        ref[...] = value.T
        return
    if value.dtype == jnp.float32:
        turned = _one_by_one(value)
    else:
        turned = _exchanged(value, layout(value.shape[0]), _turned(value.shape[0]))
    ref.transpose((1, 0))[...] = turned


def _one_by_one(value: jax.Array) -> jax.Array:
    """As it lies in `layout`, but a thread's two numbers of a row are written one by one."""
    rows = value.shape[0]
    tiles = ((rows, EACH), (rows // 4, EACH), (8, EACH), (2,), (1,))
    apart = _compat.tiled_layout(tiles, warp_dims=(-8,), lane_dims=(-4, -3))

    @plgpu.inline_mgpu(
        arg_types=(layout(rows),),
        return_type=plgpu.ShapeDtypeStruct(value.shape, value.dtype, layout=apart),
    )
    def split(_: Any, *arrays: Any) -> Any:
        (value,) = arrays
        words = (word for register in value.registers.flat for word in words_of(register))
        found = [register_of([word], value.mlir_dtype) for word in words]
        return array_of(found, value.shape, apart)

    return split(value)


def load_turned(ref: Any, *, interpret: bool) -> jax.Array:
    """ref[...].T, in `layout`."""
    if interpret:
        return ref[...].T
    rows = ref.shape[1]
    value = _compat.load(ref.transpose((1, 0)), _turned(rows))
    return _exchanged(value, _turned(rows), layout(rows))


def _turned(rows: int) -> Any:
    """`layout` with a thread's two numbers in two rows, as Layout.WGMMA_TRANSPOSED has them; JAX
    knows it of 64 rows alone.
    """
    tiles = ((rows, 8), (rows // 4, 8), (8, 8), (2, 2), (2, 1))
    return _compat.tiled_layout(tiles, warp_dims=(-10,), lane_dims=(-6, -3, -5), vector_dim=-2)


def _exchanged(value: jax.Array, before: Any, after: Any) -> jax.Array:
    """From `layout` to `_turned`, or back: the threads of two rows exchange a number each."""

    @plgpu.inline_mgpu(
        arg_types=(before,),
        return_type=plgpu.ShapeDtypeStruct(value.shape, value.dtype, layout=after),
    )
    def exchange(_: Any, *arrays: Any) -> Any:
        (value,) = arrays
        kind = value.mlir_dtype
        lane = mgpu_utils.thread_idx()
        found = []
        for register in value.registers.flat:
            (mine,) = words_of(register)
            text = """{ .reg .pred p; .reg .b32 x, y; and.b32 x, $2, 4; setp.eq.u32 p, x, 0;
                selp.b32 x, 0x5410, 0x3276, p; shfl.sync.bfly.b32 y, $1, 4, 31, -1;
                prmt.b32 $0, $1, y, x; }"""
            found.append(register_of([asm(text, "r", mine, lane, effects=True)], kind))
        return array_of(found, value.shape, after)

    return exchange(value)


def _pair(codes: Any, zero: Any, scale: Any, packed: Packed, dtype) -> Any:
    """The numbers of two codes side by side, rounded once as `dequantize`'s.

    codes: the lowest bits of a word, of which the others are 0. zero, scale: as they were loaded,
    or None.
    """
    scheme = packed.scheme
    stored = None if packed.scale is None else packed.scale.dtype
    # exact: a product of 16-bit numbers is rounded once, but the scale itself must be one
    wide = unpack.scales_sums(scheme) and stored is not None and stored != dtype
    pair = None if scale is None or wide else unpack.scale_pair(scheme, scale, dtype, stored)
    zeros = unpack.zero_pair(dtype, zero) if scheme == "int4" else None
    apart = unpack.half_a_word_apart(scheme, codes)
    # the assembler leaves out what makes the other pairs, which nobody reads
    found, *_ = unpack.values(scheme, apart, dtype, zero=zeros, scale=pair)
    if wide:
        factor = unpack.as_float32(scale, stored)
        kind = HALVES[jnp.dtype(dtype).name]
        text = f"""{{ .reg .b16 x, y; .reg .f32 a, b; mov.b32 {{x, y}}, $1;
            cvt.f32.{kind} a, x; cvt.f32.{kind} b, y; mul.rn.f32 a, a, $2; mul.rn.f32 b, b, $2;
            cvt.rn.{kind}x2.f32 $0, b, a; }}"""
        return asm(text, "r", found, factor)
    return found
