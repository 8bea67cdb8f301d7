"""A cache of bytes as the tensor cores take it: no tile is ever widened in shared memory.

int8 keys are multiplied as they are stored, by a query that is split in two: 256 high + low, each
int8, and a scale a head. Products of int8 are exact; the split has 1/65024 of a head's largest
number, finer than bfloat16 for numbers above 1/64 of that and coarser for smaller ones. What has
no such product is widened in registers, of which wgmma reads its left side: keys of float8, and
values, which loads that transpose 2 bytes at a time bring as V^T. A tile of 16 bits in shared
memory would be written and read again: 6 bytes of traffic there for each byte of the cache, which
is as much as there is. Imported only by decode_attention_kernel.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, llvm, nvvm, vector
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.wgmma_tiles import WGMMA_ROWS

STEPS = 127 * 256  # of a query between 0 and the largest number of its head

# Of [heads, 64]: a thread's columns are 16 j + 4 c + 2 g + e, and 16 j + 8 g + 2 c + e
_AS_LOADED = _compat.tiled_layout(
    ((8, 64), (8, 16), (4,), (2,)), warp_dims=(-5,), lane_dims=(-4, -3)
)
_AS_KEYS = _compat.tiled_layout(((8, 64), (8, 16), (8,), (2,)), warp_dims=(-5,), lane_dims=(-4, -2))
# Of [64, heads]: a thread's rows are 16 w + 2 r + h, where wgmma's are 16 w + 8 h + r
_AS_VALUES = _compat.tiled_layout(((64, 8), (16, 8), (2, 2)), warp_dims=(-6,), lane_dims=(-4, -3))


def split_query(q_s, split_s, scale_s, *, interpret: bool):
    """Writes q_s [heads, columns] as split_s [2, columns / line, heads, line]; scale_s [heads]."""
    _, copies, heads, line = split_s.shape
    layout = _compat.tiled_layout(
        ((8, line), (8, line // 4), (8, 16), (4,)), warp_dims=(-6,), lane_dims=(-3, -2)
    )
    lines, largest = [], jnp.float32(1e-30)
    for i in range(copies):
        x = _compat.load(q_s.at[:, pl.ds(i * line, line)], layout, optimized=False)
        lines.append(x.astype(jnp.float32))
        size = jnp.where(lines[-1] == lines[-1], jnp.abs(lines[-1]), jnp.inf)  # NaN stays one
        largest = jnp.maximum(largest, jnp.max(size, axis=1))
    scale_s[...] = largest / STEPS
    each = lax.broadcast_in_dim(STEPS / largest, (heads, line), (0,))
    each = plgpu.layout_cast(each, layout)
    for i, x in enumerate(lines):
        whole = jnp.round(x * each)
        high = jnp.round(whole * (1 / 256) + 1 / 1024)  # a half goes up: the rest is -128 to 127
        for part, number in enumerate((high, whole - high * 256.0)):
            split_s.at[part, i][...] = number.astype(jnp.int8)
    if not interpret:
        plgpu.commit_smem()


def scores_of_split(tiles, split_s):
    """[keys, heads] float32 of int8 keys, a line of their width a tile, but for the scales."""
    keys, heads = tiles[0].shape[0], split_s.shape[2]

    def products(*sums):
        for i, tile in enumerate(tiles):
            for part, acc in enumerate(sums):
                plgpu.wgmma(acc, tile, split_s.at[part, i].T)
        plgpu.wgmma_wait(0)
        return tuple(acc[...] for acc in sums)

    sums = [plgpu.WGMMAAccumulatorRef((keys, heads), jnp.int32)] * 2
    high, low = pl.run_scoped(products, *sums)
    return high.astype(jnp.float32) * 256.0 + low.astype(jnp.float32)


def order_query(q_s, *, interpret: bool):
    """Brings the columns of q_s [lines, heads, 64] into the order in which `keys` has them."""
    if interpret:
        return
    for i in range(q_s.shape[0]):
        x = _compat.load(q_s.at[i], _AS_LOADED, optimized=False)
        q_s.at[i][...] = _relabelled(x, _AS_LOADED, _AS_KEYS)
    plgpu.commit_smem()


def keys(ref, dtype, *, interpret: bool):
    """[keys, line] of bytes in registers of `dtype` for wgmma, columns as in `order_query`."""
    if interpret:
        return _plain(ref, dtype)
    tile, line = ref.shape
    widen = _widener(ref.dtype, dtype)

    @plgpu.inline_mgpu(
        arg_types=(_ref_type(line),),
        return_type=plgpu.ShapeDtypeStruct((tile, line), dtype, layout=plgpu.Layout.WGMMA),
    )
    def load(_: Any, *refs: Any) -> Any:
        (ref,) = refs
        words = np.empty((tile // WGMMA_ROWS, line // 8, 2), dtype=object)
        warp, lane = _thread()
        row = warp * 16 + lane % 16  # 8 rows by 16 bytes, four of them: (h, j) is (lane // 8)
        turn = _turn(lane % 8, line)
        for j in range(0, line // 16, 2):
            at = row * line + ((lane // 16 + j) ^ turn) * 16
            for m in range(tile // WGMMA_ROWS):
                for i, word in enumerate(
                    _matrices(ref, at + m * WGMMA_ROWS * line, transposed=False)
                ):
                    for g in range(2):
                        words[m, 2 * (j + i // 2) + g, i % 2] = widen(word, 2 * g, 2 * g + 1)
        return _registers(words, (tile, line), dtype)

    return load(ref)


def values(ref, dtype, chunks: int, *, interpret: bool) -> Sequence[jax.Array]:
    """[keys, line] of bytes transposed, as chunks of [64, keys] in registers of `dtype` for wgmma.

    Of each 16 rows, the one that stands at 8 h + r is 2 r + h; `results` puts that right.
    """
    if interpret:
        x = _plain(ref, dtype)
        return [x[:, i * WGMMA_ROWS : (i + 1) * WGMMA_ROWS].T for i in range(chunks)]
    tile, line = ref.shape
    widen = _widener(ref.dtype, dtype)
    one = plgpu.ShapeDtypeStruct((WGMMA_ROWS, tile), dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(_ref_type(line),), return_type=(one,) * chunks)
    def load(_: Any, *refs: Any) -> Any:
        (ref,) = refs
        words = [np.empty((tile // 8, 2), dtype=object) for _ in range(chunks)]
        warp, lane = _thread()
        matrix = lane // 8  # 8 keys by 16 bytes, four of them: of `chunks` chunks
        row, piece = matrix // chunks * 8 + lane % 8, matrix % chunks * 4 + warp
        at = row * line + (piece ^ _turn(lane % 8, line)) * 16
        rows = 32 // chunks
        for step in range(tile // rows):
            for i, word in enumerate(_matrices(ref, at + step * rows * line, transposed=True)):
                for h in range(2):
                    place = step * (rows // 8) + i // chunks, h
                    words[i % chunks][place] = widen(word, h, 2 + h)
        return tuple(_registers(x, (WGMMA_ROWS, tile), dtype) for x in words)

    return load(ref)


def results(outs, scratch, *, interpret: bool):
    """Products of `values`, [64, heads] each, with rows in order; scratch [len, 64, heads]."""
    if interpret:
        return outs
    for i, out in enumerate(outs):
        in_order = _relabelled(out, plgpu.Layout.WGMMA, _AS_VALUES)
        _compat.store(scratch.at[i], in_order, interpret=False)
    plgpu.commit_smem()
    outs = [
        _compat.load(scratch.at[i], plgpu.Layout.WGMMA, optimized=False) for i in range(len(outs))
    ]
    plgpu.commit_smem()
    return outs


def _plain(ref, dtype):
    x = ref[...]
    return (x if x.dtype == jnp.int8 else x.astype(jnp.float32)).astype(dtype)


def _relabelled(x, before, after):
    """The same registers under another layout: what stands elsewhere is another number."""

    @plgpu.inline_mgpu(
        arg_types=(before,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=after),
    )
    def relabel(_: Any, *arrays: Any) -> Any:
        (x,) = arrays
        layout = after.to_mgpu()
        registers = x.registers.reshape(layout.registers_shape(x.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return relabel(x)


def _ref_type(line: int):
    return plgpu.RefType((plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(line)))


class _Number:
    """An int32 of a thread, with the operators of Python."""

    def __init__(self, value: Any):
        self.value = value

    def _with(self, operation, other):
        i32 = ir.IntegerType.get_signless(32)
        other = other.value if isinstance(other, _Number) else mgpu.c(other, i32)
        return _Number(operation(self.value, other))

    def __add__(self, other):
        return self._with(arith.addi, other)

    def __mul__(self, other):
        return self._with(arith.muli, other)

    def __floordiv__(self, other):
        return self._with(arith.divui, other)

    def __mod__(self, other):
        return self._with(arith.remui, other)

    def __xor__(self, other):
        return self._with(arith.xori, other)


def _thread() -> tuple[_Number, _Number]:
    """The warp of the warpgroup, and the lane."""
    thread = _Number(mgpu_utils.thread_idx())
    return thread // 32 % 4, thread % 32


def _turn(row: _Number, line: int) -> _Number:
    """What a row's pieces of 16 bytes are swizzled by: the number of its 128 bytes."""
    return row * line // 128 % (line // 16)


def _matrices(ref: Any, at: _Number, *, transposed: bool) -> list[Any]:
    """Four times 8 rows of 16 bytes, of which each thread says where one begins."""
    i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
    start = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [at.value], i8)
    layout = nvvm.MMALayout.col if transposed else nvvm.MMALayout.row
    shape = ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>")
    words: Any = nvvm.ldmatrix(
        start, layout=layout, num=4, shape=shape, elt_type=nvvm.LdStMatrixEltType.B16
    )
    return [llvm.extractvalue(i32, words, [i]) for i in range(4)]


def _widener(narrow, dtype):
    """f(word, i, j): bytes i and j of a word as two numbers of 16 bits."""
    bfloat16 = dtype == jnp.bfloat16

    def int8(i: int, j: int) -> str:
        assert j == i + 2
        if not bfloat16:  # 1152 + b is 0x6400 | (b ^ 0x80)
            return f"""prmt.b32 x, $1, 0, 0x4{j}4{i}; mov.b32 y, 0x64806480;
                xor.b32 x, x, y; sub.f16x2 $0, x, y;"""
        # 128 + (b & 127), less 128 or, where b is negative, 256
        return f"""shr.u32 x, $1, {8 * i}; mov.b32 y, 0x43004300;
            lop3.b32 z, x, 0x00800080, y, 0xea; lop3.b32 x, x, 0x007f007f, y, 0xea;
            sub.bf16x2 $0, x, z;"""

    def float8(i: int, j: int) -> str:
        text = f"""prmt.b32 x, $1, 0, 0x44{j}{i}; mov.b32 {{low, high}}, x;
            cvt.rn.f16x2.e4m3x2 x, low;"""
        if not bfloat16:
            return f"{text} mov.b32 $0, x;"
        return f"""{text} mov.b32 {{low, high}}, x;
            cvt.f32.f16 a, low; cvt.f32.f16 b, high; cvt.rn.bf16x2.f32 $0, b, a;"""

    def widen(word: Any, i: int, j: int) -> Any:
        text = (int8 if narrow == jnp.int8 else float8)(i, j)
        names = ".reg .b32 x, y, z; .reg .b16 low, high; .reg .f32 a, b;"
        i32 = ir.IntegerType.get_signless(32)
        return llvm.inline_asm(i32, [word], f"{{ {names} {text} }}", "=r,r")

    return widen


def _registers(words: Any, shape: tuple[int, int], dtype) -> Any:
    """Words of two numbers each as an array that wgmma takes."""
    kind = ir.BF16Type if dtype == jnp.bfloat16 else ir.F16Type
    pair = ir.VectorType.get((2,), kind.get())
    one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    layout = fragmented_array.WGMMA_LAYOUT
    registers = np.empty(words.shape, dtype=object)
    for place, word in np.ndenumerate(words):
        registers[place] = vector.bitcast(pair, vector.broadcast(one, word))
    registers = registers.reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
