"""Hopper's asynchronous matrix product (wgmma), told instruction by instruction.

Mosaic's own puts a fence before each product; with one in flight the assembler then has to wait for
it before the next. Here the caller says where the fence is. Imported only by _compat.
"""

from __future__ import annotations

import itertools
from typing import Any

from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import llvm, nvvm, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels.wgmma_tiles import WGMMA_ROWS

K_BYTES = 32


def issue(acc: Any, a: Any, b: Any, swizzle: int, depth: int, columns: int) -> Any:
    """acc + a @ b as one group of instructions, float32 [M, N]; zeros if acc is None.

    a: registers [M, K], or shared memory as tiles [M / 8, K / line, 8, line]. b: tiles
    [K / 8, N / line, 8, line]. Both are bfloat16 or float16 and may be views that transpose; or
    both are float8_e4m3fn, and in shared memory K is innermost.
    Of K only `depth` are summed, of N only `columns` computed.
    """
    in_registers = isinstance(a, mgpu.FragmentedArray)
    (_, n), dtype = mma_utils.tiled_memref_shape(b)
    size_bytes = mgpu_utils.bytewidth(dtype)
    group, step = swizzle // size_bytes, K_BYTES // size_bytes
    m = a.shape[0] if in_registers else mma_utils.tiled_memref_shape(a)[0][0]
    f32 = ir.F32Type.get()
    a_base, a_rows, a_group, a_step = None, 0, 0, 0
    a_transposed = False
    if not in_registers:
        (a_base, steps), (a_rows, a_group), fastest = mma_utils.create_descriptor(
            a,
            swizzle=swizzle,
            large_tile=(WGMMA_ROWS, group),
            group_size=(WGMMA_ROWS, group),
            logical_k_major=False,
        )
        a_step, a_transposed = steps[1][0], fastest != mma_utils.Dim.K
    # of whole lines of columns, then of a part of one
    whole = columns - columns % group if group < columns < n else columns
    parts = [(0, whole), *([(whole, columns)] if whole < columns else [])]
    rights = []
    for start, end in parts:
        some = slice(start // group, start // group + -(-(end - start) // group))
        (b_base, steps), (_, b_group), fastest = mma_utils.create_descriptor(
            b if columns == n else mgpu_utils.memref_slice(b, (slice(None), some)),
            swizzle=swizzle,
            large_tile=(group, group),
            group_size=(group, n if columns == n else -(-(end - start) // group) * group),
            logical_k_major=True,
        )
        rights.append((b_base, b_group, steps[1][0], fastest != mma_utils.Dim.K))
    layout = fragmented_array.WGMMA_LAYOUT
    wide = fragmented_array.WGMMA_LAYOUT_ACC_32BIT
    if acc is None:  # the first instruction does not read it
        splat = mgpu.FragmentedArray.splat(llvm.mlir_undef(f32), (m, columns), wide)
        registers = splat.registers
    else:
        registers = acc.to_layout(wide).registers
    registers = registers.copy()
    for row in range(m // WGMMA_ROWS):
        rows = registers[row : row + 1]
        values = list(rows.flat)
        reads = acc is not None
        for at in range(depth // step):
            chunk, inner = divmod(at, group // step)
            if in_registers:
                part = a[row * WGMMA_ROWS : (row + 1) * WGMMA_ROWS, at * step : (at + 1) * step]
                left = [_as_i32(x) for x in part.registers.flat]
            else:
                left = [_offset(a_base, row * a_rows + chunk * a_group + inner * a_step)]
            for (start, end), (base, b_group, b_step, b_transposed) in zip(
                parts, rights, strict=True
            ):
                right = _offset(base, chunk * b_group + inner * b_step)
                some = slice(start * WGMMA_ROWS // 128, end * WGMMA_ROWS // 128)  # a thread's
                values[some] = _instruction(
                    values[some],
                    left,
                    right,
                    end - start,
                    step,
                    dtype,
                    reads,
                    a_transposed,
                    b_transposed,
                )
            reads = True
        for i, value in enumerate(values):
            rows.flat[i] = value
    nvvm.wgmma_commit_group_sync_aligned()
    done = mgpu.FragmentedArray(_registers=registers, _layout=wide, _is_signed=None)
    return done.to_layout(layout)


def _instruction(acc, a, b, n, step, dtype, reads, a_transposed, b_transposed) -> list[Any]:
    f32: Any = ir.F32Type.get()
    count = itertools.count()
    take = lambda number: [f"${next(count)}" for _ in range(number)]  # noqa: E731
    sums, _, left, right = take(len(acc)), take(len(acc)), take(len(a)), take(1)
    left = "{" + ",".join(left) + "}" if len(a) > 1 else left[0]
    transposes = [a_transposed] * (len(a) == 1) + [b_transposed]
    kind = str(dtype)
    if kind == "f8E4M3FN":  # of 8 bits there is one order, K innermost, and no flag
        assert not any(transposes), transposes
        kind, transposes = "e4m3", []
    flags = "".join(f", {int(flag)}" for flag in transposes)
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(reads)}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{n}k{step}.f32.{kind}.{kind} "
        f"{{{','.join(sums)}}}, {left}, {right[0]}, p, 1, 1{flags}; }}\n"
    )
    constraints = ["=f"] * len(acc) + [str(i) for i in range(len(acc))]
    constraints += ["r"] * len(a) if len(a) > 1 else ["l"]
    scalars = [_scalar(x) for x in acc]
    done: Any = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * len(acc)),
        [*scalars, *a, b],
        text,
        ",".join([*constraints, "l"]),
        asm_dialect=0,
        has_side_effects=True,
    )
    one = ir.VectorType.get((1,), f32)
    return [vector.broadcast(one, llvm.extractvalue(f32, done, [i])) for i in range(len(acc))]


def _scalar(x):
    return vector.extract(x, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))


def _as_i32(x):
    i32 = ir.IntegerType.get_signless(32)
    return _scalar(vector.bitcast(ir.VectorType.get((1,), i32), x))


def _offset(descriptor, offset_bytes: int):
    i64 = ir.IntegerType.get_signless(64)
    more = llvm.ConstantOp(i64, ir.IntegerAttr.get(i64, offset_bytes >> 4)).result
    return llvm.add(descriptor, more, overflow_flags=llvm.IntegerOverflowFlags.none)
