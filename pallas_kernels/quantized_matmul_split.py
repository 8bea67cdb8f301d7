"""The kernel of `quantized_matmul` for 17 to 64 rows of x: codes in the 64-row side of wgmma.

out^T = W x^T, and the blocks of a cluster divide K, as in `matmul_few_rows.split_products`; but W
comes as codes, which a warpgroup unpacks into the registers that the tensor cores read. For that x
has its columns in the order in which codes leave their words (`ordered`). Scales multiply the
numbers. Imported only by quantized_matmul.py.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, vector
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels import quantized_unpack as unpack
from pallas_kernels.device import SHARED_BYTES
from pallas_kernels.lane_code import address_of, asm
from pallas_kernels.matmul_few_rows import GRAIN, LINE, MAX_CLUSTER
from pallas_kernels.packed import Packed
from pallas_kernels.quantize import dequantize
from pallas_kernels.quantized_matmul_config import Config, Static
from pallas_kernels.wgmma_tiles import LINE_BYTES, WGMMA_ROWS, rows_as_copied, wgmma_transforms


def step(scheme: str) -> int:
    """Numbers of K in 128 bytes of codes."""
    return LINE_BYTES // 4 * unpack.per_word(scheme)


def ordered(x, scheme: str):
    """x with as many columns as whole steps of K, in the order in which `_numbers` has them."""
    m, k = x.shape
    size = step(scheme)
    x = jnp.pad(x, ((0, 0), (0, -k % size)))
    if unpack.per_word(scheme) == 8:  # across, half, word, which of two, pair
        x = x.reshape(m, -1, 4, 2, 4, 2, 4).transpose(0, 1, 3, 4, 6, 2, 5)
    else:
        x = x.reshape(m, -1, 4, 2, 4, 2, 2).transpose(0, 1, 3, 4, 6, 2, 5)
    return x.reshape(m, -1)


def problem(config: Config, m: int, packed: Packed, out_dtype, *, gated: bool) -> str | None:
    """What speaks against the config for m rows of x."""
    c, halves = config, 1 + gated
    steps = -(-packed.shape[1] // step(packed.scheme))
    size_bytes = split_bytes(config, m, packed, gated=gated)
    problems = {
        f"takes {WGMMA_ROWS} rows of x at most": m > WGMMA_ROWS,
        "the result must have 16 bits, which alone are transposed on their way on chip": (
            jnp.dtype(out_dtype).itemsize != 2
        ),
        f"tile_n must divide the weight's rows and be {WGMMA_ROWS * halves} or 128": (
            c.tile_n not in (WGMMA_ROWS * halves, 128) or packed.shape[0] % c.tile_n
        ),
        "stages must be 2 at least": c.stages < 2,
        f"cluster must be 1 to {MAX_CLUSTER}": not 1 <= c.cluster <= MAX_CLUSTER,
        "the blocks of a cluster have no step of K each": steps < c.cluster,
        f"takes {size_bytes} of {SHARED_BYTES} bytes on chip": size_bytes > SHARED_BYTES,
    }
    return next((sentence for sentence, found in problems.items() if found), None)


def straddles(packed: Packed) -> bool:
    """Whether groups are neither whole parts of a lane's share of a step nor whole shares of it."""
    size, group = step(packed.scheme), packed.group_size or step(packed.scheme)
    lane = size // 4
    parts = lane % group == 0 and group >= lane // 8
    return not (parts or group in (lane, 2 * lane) or group % size == 0)


def _grained(m: int) -> int:
    return -(-m // GRAIN) * GRAIN


def _piece(m: int, cluster: int) -> int:
    """Rows of x whose sums one block of a cluster finishes."""
    return GRAIN * -(-_grained(m) // (GRAIN * cluster))


def _groups(packed: Packed) -> int:
    """Of a step."""
    size = step(packed.scheme)
    return max(1, size // (packed.group_size or size))


def split_bytes(config: Config, m: int, packed: Packed, *, gated: bool) -> int:
    """On chip: the ring, the result, what a cluster's blocks show each other, barriers."""
    c, few = config, _grained(m)
    stage = c.tile_n * LINE_BYTES + few * step(packed.scheme) * 2
    for each in (packed.scale, packed.zero):
        stage += 0 if each is None else _groups(packed) * c.tile_n * each.dtype.itemsize
    result = few * c.tile_n // (1 + gated) * 2
    rows = _piece(m, c.cluster)
    parts = -(-few // rows) * rows * c.tile_n * 4 if c.cluster > 1 else 0
    return c.stages * stage + result + parts + 4096


def split_products(
    static: Static,
    x,
    packed: Packed,
    bias=None,
    residual=None,
    *,
    finish: Callable[..., jax.Array],
):
    """A cluster takes config.tile_n rows of W, gate and up together, and divides K.

    finish: of the sums [M, O] in float32 the result, for the interpreter, which knows no other
    block's shared memory.
    """
    c, interpret, out_dtype = static.config, static.interpret, jnp.dtype(static.out_dtype)
    scheme, group = packed.scheme, packed.group_size
    m, k = x.shape
    halves = 1 + static.gated
    n, tile = packed.shape[0] // halves, c.tile_n // halves
    few, size = _grained(m), step(scheme)
    chunks, k_steps = size // LINE, -(-k // size)
    groups = _groups(packed)
    per = group // size if group and group > size else 1  # steps of a group
    cluster = 1 if interpret else c.cluster
    parts = c.cluster // cluster
    rows = _piece(m, cluster)
    pieces = [(start, min(rows, few - start)) for start in range(0, few, rows)]
    blocks = [divmod(start, tile) for start in range(0, c.tile_n, WGMMA_ROWS)]
    grouped = {"scale": packed.scale, "zero": packed.zero}
    grouped = {name: each for name, each in grouped.items() if each is not None}
    xs = jnp.pad(x, ((0, 0), (0, -k % size))) if interpret else ordered(x, scheme)

    def body(x_ref, codes_ref, *refs, **scratch):
        *given, row_scale_ref, bias_ref, residual_ref, out_ref = refs
        given = dict(zip(grouped, given, strict=True))
        x_s, codes_s, full = scratch["x"], scratch["codes"], scratch["full"]
        rank = lax.axis_index("rank") if cluster > 1 else lax.axis_index("part")
        row = lax.axis_index("tile") * tile
        begin, end = k_steps * rank // c.cluster, k_steps * (rank + 1) // c.cluster
        zero = row * 0

        def slot_of(at):
            return lax.rem(at - begin, jnp.int32(c.stages))

        def fetch(at):
            slot = slot_of(at)
            for half in range(halves):
                place = pl.ds(row + half * n, tile)
                source = codes_ref.at[place, pl.ds(at * LINE_BYTES, LINE_BYTES)]
                target = rows_as_copied(codes_s, (slot,), half * tile, tile, interpret)
                plgpu.copy_gmem_to_smem(source, target, full.at[slot])
                for name, ref in given.items():
                    source = ref.at[pl.ds(at * groups if per == 1 else at // per, groups), place]
                    target = scratch[name].at[slot, half]
                    plgpu.copy_gmem_to_smem(source, target, full.at[slot])
            for chunk in range(chunks):
                source = x_ref.at[pl.ds(zero, few), pl.ds(at * size + chunk * LINE, LINE)]
                target = rows_as_copied(x_s, (slot, chunk), 0, few, interpret)
                plgpu.copy_gmem_to_smem(source, target, full.at[slot])

        for stage in range(c.stages):
            pl.when(begin + stage < end)(functools.partial(fetch, begin + stage))

        def finished_here(piece) -> Any:
            return pl.when(rank == piece) if cluster > 1 else lambda f: f()

        def out_at(ref, piece, whole):
            start, size = pieces[piece]
            size = size if whole else min(size, m - start)
            return ref.at[pl.ds(zero + start if whole else start, size), pl.ds(row, tile)]

        def out_slot(piece, size):
            return scratch["out"].at[pl.ds(pieces[piece][0], size)]

        if residual is not None and parts == 1:
            for piece, (_start, size_) in enumerate(pieces):

                @finished_here(piece)
                def _(piece=piece, size_=size_):
                    source = out_at(residual_ref, piece, whole=True)
                    plgpu.copy_gmem_to_smem(source, out_slot(piece, size_), scratch["residual"])

        def issue(at, accs):
            """Products of a step, a group of wgmma for each 64 numbers of K."""
            slot = slot_of(at)
            plgpu.barrier_wait(full.at[slot])
            accs = list(accs)
            for i, (half, start) in enumerate(blocks):
                first = half * tile + start
                of = {
                    name: scratch[name].at[slot, half, :, pl.ds(start, WGMMA_ROWS)]
                    for name in given
                }
                codes = codes_s.at[slot, pl.ds(first, WGMMA_ROWS)]
                numbers = _numbers(codes, of, packed, x.dtype, interpret=interpret)
                for chunk, a in enumerate(numbers):
                    (a,) = _compat.wgmma_ready(a, interpret=interpret)
                    accs[i] = _compat.wgmma(
                        accs[i], a, x_s.at[slot, chunk], transpose_b=True, interpret=interpret
                    )
                # those before this block's are done
                accs = wait(chunks, accs)
            # no sum is under way where a step ends: its registers may be moved there
            accs = wait(0, accs)
            plgpu.commit_smem()  # every warp has read its codes: they may be overwritten
            pl.when(at + c.stages < end)(lambda: fetch(at + c.stages))
            return tuple(accs)

        def wait(count, accs):
            accs = _compat.wgmma_wait(count, *accs)
            return list(accs) if isinstance(accs, (tuple, list)) else [accs]

        zeros = jnp.zeros((WGMMA_ROWS, few), jnp.float32)
        if not interpret:
            zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
        accs = _compat.wgmma_ready(*[zeros] * len(blocks), interpret=interpret)
        totals = wait(0, lax.fori_loop(begin, end, issue, tuple(accs)))
        if parts > 1:
            for (half, start), total in zip(blocks, totals, strict=True):
                out_ref.at[rank, pl.ds(row + half * n + start, WGMMA_ROWS)][...] = total
            return

        def leave(piece, ys):
            size = pieces[piece][1]

            def column(ref, i):
                half, start = blocks[i]
                place = pl.ds(row + half * n + start, WGMMA_ROWS)
                y = _compat.load(ref.at[place], plgpu.Layout.WGMMA.reduce(1), optimized=False)
                y = lax.broadcast_in_dim(y.astype(jnp.float32), (WGMMA_ROWS, size), (0,))
                return plgpu.layout_cast(y, plgpu.Layout.WGMMA)

            rest = 1 if interpret else unpack.rest(scheme, x.dtype)
            for i in range(len(ys)):
                if rest != 1:
                    ys[i] = ys[i] * rest
                if row_scale_ref is not None:
                    ys[i] = ys[i] * column(row_scale_ref, i)
                if bias_ref is not None:
                    ys[i] = ys[i] + column(bias_ref, i)
            if static.gated:
                ups = ys[len(ys) // 2 :]
                ys = [jax.nn.silu(gate) * up for gate, up in zip(ys, ups, strict=False)]
            if residual is not None:
                plgpu.barrier_wait(scratch["residual"])
            for i, y in enumerate(ys):
                place = out_slot(piece, size).at[:, pl.ds(i * WGMMA_ROWS, WGMMA_ROWS)].T
                if residual is not None:
                    more = _compat.load(place, plgpu.Layout.WGMMA, optimized=False)
                    y = y + more.astype(jnp.float32)
                place[...] = y.astype(out_dtype)
            plgpu.commit_smem()
            target = out_at(out_ref, piece, whole=False)
            plgpu.copy_smem_to_gmem(out_slot(piece, target.shape[0]), target)
            plgpu.wait_smem_to_gmem(0)

        if cluster == 1:
            leave(0, list(totals))
            return
        shown, meeting = scratch["parts"], scratch["meeting"]
        for piece, (start, size_) in enumerate(pieces):
            for i, total in enumerate(totals):
                shown.at[piece, i, :, pl.ds(0, size_)][...] = total[:, start : start + size_]
        plgpu.barrier_arrive(meeting)
        plgpu.barrier_wait(meeting)
        for piece, (_start, size_) in enumerate(pieces):

            @finished_here(piece)
            def _(piece=piece, size_=size_):
                def part_of(peer, i):
                    ref = plgpu.cluster_ref(shown.at[piece, i], {"rank": jnp.int32(peer)})
                    ref = ref.at[:, pl.ds(0, size_)]
                    return _compat.load(ref, plgpu.Layout.WGMMA, optimized=False)

                leave(
                    piece,
                    [
                        functools.reduce(operator.add, [part_of(p, i) for p in range(cluster)])
                        for i in range(len(blocks))
                    ],
                )

        plgpu.barrier_arrive(meeting)
        plgpu.barrier_wait(meeting)

    scratch: dict[str, Any] = {
        "x": plgpu.SMEM(
            (c.stages, chunks, few, LINE), x.dtype, transforms=wgmma_transforms(LINE, x.dtype)
        ),
        "codes": plgpu.SMEM(
            (c.stages, c.tile_n, LINE_BYTES),
            packed.codes.dtype,
            transforms=wgmma_transforms(LINE_BYTES, packed.codes.dtype),
        ),
        "full": plgpu.Barrier(
            num_arrivals=chunks + halves * (1 + len(grouped)), num_barriers=c.stages
        ),
    }
    for name, each in grouped.items():
        scratch[name] = plgpu.SMEM((c.stages, halves, groups, tile), each.dtype)
    out_type: Any = jax.ShapeDtypeStruct((m, n), out_dtype)
    if parts > 1:
        out_type = jax.ShapeDtypeStruct((parts, n * halves, few), jnp.float32)
    else:
        scratch["out"] = plgpu.SMEM((few, tile), out_dtype)
        if residual is not None:
            scratch["residual"] = plgpu.Barrier()
    together: Any = {}
    if cluster > 1:
        scratch["parts"] = plgpu.SMEM((len(pieces), len(blocks), WGMMA_ROWS, rows), jnp.float32)
        scratch["meeting"] = plgpu.ClusterBarrier(collective_axes=("rank",))
        together = {"cluster": (cluster,), "cluster_names": ("rank",)}
    result = _compat.kernel(
        body,
        name=static.name,
        out_type=out_type,
        scratch_types=scratch,
        grid=(n // tile, parts),
        grid_names=("tile", "part"),
        interpret=interpret,
        approx_math=True,
        **together,
    )(xs, packed.codes, *grouped.values(), packed.row_scale, bias, residual)
    if parts == 1:
        return result
    return finish(functools.reduce(operator.add, list(result))[:, :m].T)


def _numbers(codes, of: dict[str, Any], packed: Packed, dtype, *, interpret: bool):
    """[64, 64] numbers in registers for each 64 of K; of: scales and zeros [groups, 64]."""
    scheme = packed.scheme
    size = step(scheme)
    count = size // LINE
    names = list(of)
    group = packed.group_size or size
    lane = size // 4  # numbers of a row that a lane has, side by side
    each = max(1, lane // group)  # groups of a lane

    types = (
        plgpu.RefType((plgpu.TilingTransform((8, LINE_BYTES)), plgpu.SwizzleTransform(LINE_BYTES))),
    )
    types += (plgpu.RefType(),) * len(names)
    one = plgpu.ShapeDtypeStruct((WGMMA_ROWS, LINE), dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=types, return_type=(one,) * count)
    def load(_: Any, ref: Any, *refs: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        c32 = lambda v: mgpu_utils.c(v, i32)  # noqa: E731
        thread = mgpu_utils.thread_idx()
        lane_ = arith.remui(thread, c32(32))
        warp = arith.remui(arith.divui(thread, c32(32)), c32(4))
        down, across = arith.divui(lane_, c32(4)), arith.remui(lane_, c32(4))
        row = arith.addi(arith.muli(warp, c32(16)), down)
        base = address_of(ref)
        turn = arith.remui(row, c32(8))
        words = []
        for h in range(2):
            piece = arith.addi(arith.muli(across, c32(2)), c32(h))
            at = arith.muli(arith.xori(piece, turn), c32(16))
            at = arith.addi(arith.addi(base, arith.muli(row, c32(LINE_BYTES))), at)
            words.append(
                [
                    asm(
                        f"ld.shared.v4.u32 {{$0, $1, $2, $3}}, [$4 + {8 * d * LINE_BYTES}];",
                        "rrrr",
                        at,
                        effects=True,
                    )
                    for d in range(2)
                ]
            )
        arrays: Any = {"scale": packed.scale, "zero": packed.zero}
        loaded: dict[str, list[Any]] = {}
        first = arith.divui(arith.muli(across, c32(lane)), c32(group)) if group < size else c32(0)
        for name, r in zip(names, refs, strict=True):
            array = arrays[name]
            bytes_ = array.dtype.itemsize
            # rows of a group's scales lie as far apart as the tile is wide
            strides, _offset = ir.MemRefType(r.type).get_strides_and_offset()
            wide = strides[0] * bytes_
            at = arith.addi(
                address_of(r),
                arith.addi(arith.muli(first, c32(wide)), arith.muli(row, c32(bytes_))),
            )
            loaded[name] = [
                _load_shared(at, g * wide + 8 * d * bytes_, bytes_)
                for d in range(2)
                for g in range(each)
            ]
        stored = None if packed.scale is None else packed.scale.dtype
        scales: list[Any] = [None] * (2 * each)
        if "scale" in loaded:
            scales = [unpack.scale_pair(scheme, s, dtype, stored) for s in loaded["scale"]]
        zeros: list[Any] = [None] * (2 * each)
        if scheme == "int4":
            zeros = [unpack.zero_pair(dtype, z) for z in loaded.get("zero", zeros)]
        steps = []
        for h in range(2):
            for word in range(4):
                here = (4 * h + word) * each // 8
                pair = [
                    unpack.values(
                        scheme,
                        words[h][d][word],
                        dtype,
                        zero=zeros[d * each + here],
                        scale=scales[d * each + here],
                    )
                    for d in range(2)
                ]
                for s in range(0, len(pair[0]), 2):
                    steps.append([pair[0][s], pair[1][s], pair[0][s + 1], pair[1][s + 1]])
        return tuple(_registers(steps[4 * i : 4 * i + 4], dtype) for i in range(count))

    if interpret:
        parts = {name: ref[...] for name, ref in of.items()}
        whole = {"scale": None, "zero": None, "row_scale": None, **parts}
        size = min(group, size)
        part = dataclasses.replace(packed, codes=codes[...], **whole, group_size=size)
        return jnp.split(dequantize(part, dtype), count, axis=1)
    return load(codes, *of.values())


def _load_shared(address: Any, offset: int, size_bytes: int) -> Any:
    if size_bytes == 4:
        return asm(f"ld.shared.u32 $0, [$1 + {offset}];", "r", address, effects=True)
    kind = "u8" if size_bytes == 1 else "u16"
    text = f"{{ .reg .b16 x; ld.shared.{kind} x, [$1 + {offset}]; cvt.u32.u16 $0, x; }}"
    return asm(text, "r", address, effects=True)


def _registers(steps: Any, dtype) -> Any:
    """Four words for each 16 of K as an array that wgmma takes."""
    kind = ir.BF16Type if dtype == jnp.bfloat16 else ir.F16Type
    pair = ir.VectorType.get((2,), kind.get())
    one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    layout = fragmented_array.WGMMA_LAYOUT
    shape = (WGMMA_ROWS, 16 * len(steps))
    # [row tile, 8 columns, 8 rows below]: a thread's order
    flat = np.empty((1, 2 * len(steps), 2), dtype=object)
    for s, (a0, a1, a2, a3) in enumerate(steps):
        for j, h, word in ((0, 0, a0), (0, 1, a1), (1, 0, a2), (1, 1, a3)):
            flat[0, 2 * s + j, h] = vector.bitcast(pair, vector.broadcast(one, word))
    return mgpu.FragmentedArray(
        _registers=flat.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None
    )
