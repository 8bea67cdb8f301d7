"""The kernel of `quantized_matmul` for few rows of x, whose time is that of reading the codes.

A block takes some rows of the weight after others, and its warps divide K: each goes over 64 bytes
of a row at a time, every one of them by 4 lanes of 16 bytes, and multiplies what it has unpacked in
registers (mma, the tensor cores of a warp) with x, which lies on chip, in the order in which the
codes come out of their words. Codes and scales of the next turns, of the next rows too, are on
their way into a ring on chip, of which each lane reads what it has asked for itself. The warps'
sums meet on chip and are added in the order of the warps, so that the same call gives the same
bits. A scale of a group that is a whole turn multiplies its float32 sums; that of a smaller group
multiplies the numbers. Imported only by quantized_matmul.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, gpu, llvm
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels import quantized_unpack as unpack
from pallas_kernels.device import ACCESS_BYTES, LANES, SHARED_BYTES, WARPS
from pallas_kernels.packed import Packed
from pallas_kernels.quantized_unpack import asm

MMA_ROWS, MMA_COLUMNS = 16, 8  # of the weight and of x, in one instruction
ACROSS = 4  # lanes that share a row in it
TURN_BYTES = ACROSS * ACCESS_BYTES  # of a row, a warp at a time


@dataclasses.dataclass(frozen=True)
class Config:
    """How a block goes over the weight.

    form "warps": a block has tile_n rows of the weight at a time (gate and up together) and `warps`
    that divide K, and asks for codes `ahead` turns before it needs them; `blocks` share a
    multiprocessor. form "split" is that of `quantized_matmul_split`: a cluster of blocks has tile_n
    rows of the weight and divides K, in a ring of `stages`.
    """

    tile_n: int = 32
    warps: int = 4
    ahead: int = 4
    blocks: int = 2
    form: str = "warps"
    stages: int = 4
    cluster: int = 1


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel is compiled for."""

    name: str
    config: Config
    interpret: bool
    out_dtype: str
    num_sms: int
    gated: bool = False


def turn(scheme: str) -> int:
    """Numbers of a row that a warp takes at a time."""
    return TURN_BYTES // 4 * unpack.per_word(scheme)


def turns(packed: Packed) -> int:
    """Of a row, of all warps."""
    return packed.shape[1] // turn(packed.scheme)


def _rounds(config: Config, packed: Packed) -> int:
    """Turns of a warp in a row."""
    return -(-turns(packed) // config.warps)


def _group_bytes(config: Config, packed: Packed) -> dict[str, int]:
    """On chip, of a warp's turn: scales and zeros."""
    arrays = {"scale": packed.scale, "zero": packed.zero}
    groups = max(1, turn(packed.scheme) // (packed.group_size or turn(packed.scheme)))
    return {
        name: groups * config.tile_n * array.dtype.itemsize
        for name, array in arrays.items()
        if array is not None
    }


def _warp_bytes(config: Config, packed: Packed) -> int:
    """On chip, of a warp's turn: codes, 16 bytes a lane and row, scales and zeros."""
    codes = config.tile_n // 8 * LANES * ACCESS_BYTES
    return codes + sum(_group_bytes(config, packed).values())


def _x_bytes(config: Config, packed: Packed) -> int:
    """On chip, of a row of x: whole rounds; rows side by side begin in other banks."""
    return _rounds(config, packed) * config.warps * turn(packed.scheme) * 2 + TURN_BYTES


def shared_bytes(config: Config, m: int, packed: Packed) -> int:
    """On chip: codes on their way, x, the sums of the warps."""
    c = config
    sums = 2 * c.warps * _columns(m) * c.tile_n * 4
    return c.ahead * c.warps * _warp_bytes(c, packed) + m * _x_bytes(c, packed) + sums + 1024


def problem(config: Config, m: int, packed: Packed, *, gated: bool) -> str | None:
    """What speaks against the config for m rows of x."""
    c, grain = config, MMA_ROWS * (1 + gated)
    whole = c.tile_n > 0 and c.tile_n % grain == 0 and packed.shape[0] % c.tile_n == 0
    warps = 0 < c.warps <= 16 and c.warps % WARPS == 0
    size_bytes = c.blocks * shared_bytes(c, m, packed) if whole and warps else 0
    problems = {
        f"tile_n must divide the weight's rows and be a multiple of {grain}": not whole,
        f"warps must be a multiple of {WARPS}, 16 at most": not warps,
        "ahead must be 1 at least": c.ahead < 1,
        "blocks must be 1 at least": c.blocks < 1,
        f"takes {size_bytes} of {SHARED_BYTES} bytes on chip": size_bytes > SHARED_BYTES,
    }
    return next((sentence for sentence, found in problems.items() if found), None)


def _columns(m: int) -> int:
    return -(-m // MMA_COLUMNS) * MMA_COLUMNS


def warp_products(
    static: Static, x, packed: Packed, bias=None, residual=None, *, plain: Callable[..., jax.Array]
):
    """[M, N] of x [M, K]. plain: (x, weight, bias, residual) -> the same of a block's rows in plain
    JAX, for the interpreter, which knows neither a warp's products nor a lane's registers.
    """
    c, interpret = static.config, static.interpret
    m, halves = x.shape[0], 1 + static.gated
    n, rows = packed.shape[0] // halves, c.tile_n // halves
    parts = ("codes", "scale", "zero", "row_scale")
    # by name: an array, and which of its dimensions is that of the weight's rows
    arrays = {name: (getattr(packed, name), 0 if name == "codes" else -1) for name in parts}
    arrays |= {"bias": (bias, -1)}
    arrays = {name: x for name, x in arrays.items() if x[0] is not None}

    def body(x_ref, residual_ref, *refs, **scratch):
        *given, out_ref = refs
        given = dict(zip(arrays, given, strict=True))
        if interpret:
            row = lax.axis_index("block") * rows
            place = [pl.ds(row + half * n, rows) for half in range(halves)]

            def both(name):
                ref, along = given[name], arrays[name][1]
                wide = along == -1 and len(ref.shape) == 2
                pieces = [ref[:, at] if wide else ref[at] for at in place]
                return jnp.concatenate(pieces, axis=along)

            whole = {name: both(name) for name in given}
            added = whole.pop("bias", None)
            weight = dataclasses.replace(packed, **whole)
            more = None if residual_ref is None else residual_ref[:, place[0]]
            out_ref[:, place[0]] = plain(x_ref[...], weight, added, more)
            return
        refs = {"x": x_ref, **given, "out": out_ref, **scratch}
        if residual_ref is not None:
            refs["residual"] = residual_ref

        @plgpu.inline_mgpu(arg_types=(jax.tree.map(lambda _: plgpu.RefType(), refs),))
        def multiply(*given: Any) -> Any:
            pointers = jax.tree.map(_pointer, given[1])
            _Block(static, x, packed, bias, pointers).run()

        multiply(refs)

    threads: Any = {}
    if c.warps > WARPS and not interpret:
        threads = {"num_threads": c.warps // WARPS, "thread_name": "group"}
    scratch = {}
    if not interpret:
        scratch = {
            "ring": plgpu.SMEM((c.ahead * c.warps * _warp_bytes(c, packed),), jnp.uint8),
            "kept": plgpu.SMEM((m * _x_bytes(c, packed),), jnp.uint8),
            "parts": plgpu.SMEM((2, c.warps, _columns(m), c.tile_n), jnp.float32),
        }
    return _compat.kernel(
        body,
        name=static.name,
        out_type=jax.ShapeDtypeStruct((m, n), static.out_dtype),
        scratch_types=scratch,
        grid=(n // rows if interpret else min(n // rows, c.blocks * static.num_sms),),
        grid_names=("block",),
        interpret=interpret,
        approx_math=True,
        **threads,
    )(x, residual, *(x for x, _ in arrays.values()))


# Of one thread: values of MLIR


def _pointer(ref: Any) -> Any:
    """The address of a reference's beginning: 64 bits in global memory, 32 on chip."""
    bits = 32 if mgpu_utils.is_smem_ref(ref) else 64
    pointer = mgpu_utils.memref_ptr(ref)
    return llvm.ptrtoint(ir.IntegerType.get_signless(bits), pointer)


def _int(value: int, bits: int = 32) -> Any:
    return mgpu_utils.c(value, ir.IntegerType.get_signless(bits))


def _at(pointer: Any, offset: Any) -> Any:
    """The address so many bytes further, a 32-bit number."""
    if pointer.type == offset.type:
        return arith.addi(pointer, offset)
    return arith.addi(pointer, arith.extui(pointer.type, offset))


def _scaled(value: Any, by: int) -> Any:
    return arith.muli(value, _int(by))


def _less(value: Any, than: int) -> Any:
    return arith.cmpi(arith.CmpIPredicate.ult, value, _int(than))


def _times(value: Any, by: int) -> Any:
    """A product of 64 bits."""
    return arith.muli(arith.extui(ir.IntegerType.get_signless(64), value), _int(by, 64))


def _load(address: Any, offset: int, size_bytes: int, *, shared: bool = False) -> Any:
    """A word, or four; fewer bytes become a word."""
    space = "shared" if shared else "global.nc"
    if size_bytes == 16:
        text = f"ld.{space}.v4.u32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
        return asm(text, "rrrr", address, effects=True)
    if size_bytes == 4:
        return asm(f"ld.{space}.u32 $0, [$1 + {offset}];", "r", address, effects=True)
    kind = "u8" if size_bytes == 1 else "u16"
    text = f"{{ .reg .b16 x; ld.{space}.{kind} x, [$1 + {offset}]; cvt.u32.u16 $0, x; }}"
    return asm(text, "r", address, effects=True)


def _copy(target: Any, source: Any, to: int, start: int, size: Any) -> None:
    """Asks for 16 bytes in shared memory, of which `size`, all or none, come from global memory."""
    text = f"cp.async.cg.shared.global [$0 + {to}], [$1 + {start}], 16, $2;"
    asm(text, "", target, source, size, effects=True)


def _mma(sums: list[Any] | None, a: list[Any], b: list[Any], dtype: Any) -> list[Any]:
    """sums + a [16, 16] @ b [16, 8], four float32 a thread; zeros if sums is None."""
    kind = "bf16" if dtype == jnp.bfloat16 else "f16"
    start = sums or [arith.constant(ir.F32Type.get(), 0.0)] * 4
    numbers = [f"${i}" for i in range(14)]
    out, left, right, before = (
        "{" + ", ".join(numbers[i:j]) + "}" for i, j in ((0, 4), (4, 8), (8, 10), (10, 14))
    )
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {out}, {left}, {right}, {before};"
    )
    return asm(text, "ffff", *a, *b, *start)


def _fma(x: Any, y: Any, z: Any) -> Any:
    return asm("fma.rn.f32 $0, $1, $2, $3;", "f", x, y, z)


class _Block:
    """What a thread does: copies, products, sums."""

    def __init__(self, static: Static, x, packed: Packed, bias, pointers: Mapping[str, Any]):
        self.static, self.packed, self.pointers = static, packed, pointers
        c = self.config = static.config
        self.m, self.k = x.shape
        self.dtype, self.bias = jnp.dtype(x.dtype), bias
        self.halves = 1 + static.gated
        self.out_rows = c.tile_n // self.halves
        self.n = packed.shape[0] // self.halves
        self.num_tiles = self.n // self.out_rows
        self.num_blocks = min(self.num_tiles, c.blocks * static.num_sms)
        self.scheme = packed.scheme
        self.turn, self.turns = turn(self.scheme), turns(packed)
        self.rounds = _rounds(c, packed)
        thread = mgpu_utils.thread_idx()
        self.lane = arith.remui(thread, _int(LANES))
        self.thread, self.warp = thread, arith.divui(thread, _int(LANES))
        self.row, self.across = (f(self.lane, _int(ACROSS)) for f in (arith.divui, arith.remui))
        group = packed.group_size or 0
        grouped = packed.scale is not None
        self.sums_scaled = grouped and unpack.scales_sums(self.scheme) and group % self.turn == 0
        each = self.turn // ACROSS  # numbers of a row that a lane has
        # groups that a lane has numbers of, in a turn
        self.lane_groups = max(1, each // group) if grouped and not self.sums_scaled else 1
        # numbers of K in the groups of scales that a turn brings, and how many groups
        self.group = group or self.turn
        self.turn_groups = max(1, self.turn // self.group)
        self.row_bytes = packed.codes.shape[1] * packed.codes.dtype.itemsize
        self.warp_bytes = _warp_bytes(c, packed)
        self.group_bytes = _group_bytes(c, packed)
        start = arith.addi(_scaled(self.row, self.row_bytes), _scaled(self.across, ACCESS_BYTES))
        self.codes_at = [
            arith.addi(_at(pointers["codes"], start), _int(half * self.n * self.row_bytes, 64))
            for half in range(self.halves)
        ]
        self.ring_at = _at(pointers["ring"], _scaled(self.warp, self.warp_bytes))
        self.x_bytes = _x_bytes(c, packed)
        self.x_at = []
        for column in range(0, _columns(self.m), MMA_COLUMNS):
            one = arith.minui(arith.addi(self.row, _int(column)), _int(self.m - 1))
            at = arith.addi(_scaled(one, self.x_bytes), _scaled(self.across, ACCESS_BYTES))
            at = arith.addi(at, _scaled(self.warp, self.turn * 2))
            self.x_at.append(_at(pointers["kept"], at))

    def _tiles(self):
        """Of 16 rows of the weight: which half they are in, and how far from its beginning."""
        for half in range(self.halves):
            for start in range(0, self.out_rows, MMA_ROWS):
                yield half, start

    def copy(self, tile: Any, round_: Any, slot: Any) -> None:
        """Asks for what the warp's turn needs; past the end of a row or of the tiles for zeros."""
        at = arith.addi(_scaled(round_, self.config.warps), self.warp)
        wanted = arith.andi(_less(at, self.turns), _less(tile, self.num_tiles))
        size = arith.select(wanted, _int(ACCESS_BYTES), _int(0))
        at = arith.minui(at, _int(self.turns - 1))
        tile = arith.minui(tile, _int(self.num_tiles - 1))
        slot_at = _at(self.ring_at, _scaled(slot, self.config.warps * self.warp_bytes))
        target = _at(slot_at, _scaled(self.lane, ACCESS_BYTES))
        offset = arith.addi(_times(tile, self.out_rows * self.row_bytes), _times(at, TURN_BYTES))
        sources = [arith.addi(p, offset) for p in self.codes_at]
        to = 0
        for half, start in self._tiles():
            for down in (0, 8):
                _copy(target, sources[half], to, (start + down) * self.row_bytes, size)
                to += LANES * ACCESS_BYTES
        for name in self.group_bytes:
            self._copy_groups(name, tile, at, _at(slot_at, _int(to)), size)
            to += self.group_bytes[name]
        asm("cp.async.commit_group;", "", effects=True)

    def _copy_groups(self, name: str, tile: Any, at: Any, target: Any, size: Any) -> None:
        """Scales or zeros, [half, group, row] on chip: a lane brings 16 bytes, while there are."""
        item = getattr(self.packed, name).dtype.itemsize
        wide = self.out_rows * item // ACCESS_BYTES  # accesses of a half's group
        count = self.halves * self.turn_groups * wide
        first = arith.divui(_scaled(at, self.turn), _int(self.group))
        for start in range(0, count, LANES):
            place = arith.addi(self.lane, _int(start))
            half, inner = (
                f(place, _int(self.turn_groups * wide)) for f in (arith.divui, arith.remui)
            )
            group, column = (f(inner, _int(wide)) for f in (arith.divui, arith.remui))
            row = arith.addi(_scaled(tile, self.out_rows), _scaled(half, self.n))
            source = arith.addi(_scaled(arith.addi(first, group), self.packed.shape[0]), row)
            source = arith.addi(_times(source, item), _times(column, ACCESS_BYTES))
            source = arith.addi(self.pointers[name], source)
            to = _at(target, _scaled(place, ACCESS_BYTES))
            if start + LANES <= count:
                _copy(to, source, 0, 0, size)
            else:
                with mgpu_utils.when(_less(place, count)):
                    _copy(to, source, 0, 0, size)

    def arrived(self, slot: Any) -> list[Any]:
        """A turn's codes, 4 words for each of 2 rows of each tile; then scales and zeros, by row
        and group of the lane.
        """
        asm(f"cp.async.wait_group {self.config.ahead - 1};", "", effects=True)
        asm("bar.warp.sync 0xffffffff;", "", effects=True)
        slot_at = _at(self.ring_at, _scaled(slot, self.config.warps * self.warp_bytes))
        source, to, words = _at(slot_at, _scaled(self.lane, ACCESS_BYTES)), 0, []
        for _ in range(self.config.tile_n // 8):
            words += _load(source, to, ACCESS_BYTES, shared=True)
            to += LANES * ACCESS_BYTES
        first = _int(0)
        if not self.sums_scaled and self.group < self.turn:
            first = arith.divui(_scaled(self.across, self.turn // ACROSS), _int(self.group))
        for name, size_bytes in self.group_bytes.items():
            item = getattr(self.packed, name).dtype.itemsize
            wide = self.out_rows * item
            at = _at(slot_at, arith.addi(_scaled(first, wide), _scaled(self.row, item)))
            words += [
                _load(
                    at,
                    to + (half * self.turn_groups + i) * wide + (start + down) * item,
                    item,
                    shared=True,
                )
                for half, start in self._tiles()
                for down in (0, 8)
                for i in range(self.lane_groups)
            ]
            to += size_bytes
        return words

    def keep_x(self) -> None:
        """Brings x on chip, in the order in which `unpack.values` has its pairs; then zeros."""
        units = self.x_bytes // ACCESS_BYTES - TURN_BYTES // ACCESS_BYTES  # of a row
        per_turn = self.turn * 2 // ACCESS_BYTES
        threads = self.config.warps * LANES
        half = unpack.per_word(self.scheme) // 2
        for one in range(self.m):
            source = arith.addi(self.pointers["x"], _int(one * self.k * 2, 64))
            target = _at(self.pointers["kept"], _int(one * self.x_bytes))
            starts = range(0, units, threads)
            places = [arith.addi(self.thread, _int(start)) for start in starts]
            loaded = []
            for place in places:
                inside = _less(place, self.k * 2 // ACCESS_BYTES)
                at = arith.minui(place, _int(self.k * 2 // ACCESS_BYTES - 1))
                words = _load(_at(source, _scaled(at, ACCESS_BYTES)), 0, ACCESS_BYTES)
                loaded.append([arith.select(inside, word, _int(0)) for word in words])
            for start, place, words in zip(starts, places, loaded, strict=True):
                pairs = []
                for i in range(0, 4, half):
                    pairs += unpack.pairs_of_x(words[i : i + half], self.scheme)
                # a lane's units lie one below the other, those of the four lanes side by side
                whole, inner = (f(place, _int(per_turn)) for f in (arith.divui, arith.remui))
                lane, i = (f(inner, _int(per_turn // ACROSS)) for f in (arith.divui, arith.remui))
                to = arith.addi(arith.addi(_scaled(whole, per_turn), _scaled(i, ACROSS)), lane)
                to = _at(target, _scaled(to, ACCESS_BYTES))
                text = "st.shared.v4.u32 [$0], {$1, $2, $3, $4};"
                if start + threads <= units:
                    asm(text, "", to, *pairs, effects=True)
                else:
                    with mgpu_utils.when(_less(place, units)):
                        asm(text, "", to, *pairs, effects=True)

    def multiply(self, loaded: list[Any], round_: Any, sums: list[Any]) -> list[Any]:
        """The sums, four a 16 rows of the weight and 8 of x, and what a turn adds."""
        loaded = list(loaded)
        take = lambda count: [loaded.pop(0) for _ in range(count)]  # noqa: E731
        tiles = list(self._tiles())
        codes = [[take(4) for _ in range(2)] for _ in tiles]
        per_word = unpack.per_word(self.scheme)
        x = []
        for pointer in self.x_at:
            pointer = _at(pointer, _scaled(round_, self.config.warps * self.turn * 2))
            found = []
            for i in range(0, self.turn // ACROSS * 2, ACCESS_BYTES):
                found += _load(pointer, i * ACROSS, ACCESS_BYTES, shared=True)
            x.append([found[i : i + per_word // 2] for i in range(0, len(found), per_word // 2)])
        scaled, zeroed = self.packed.scale is not None, self.packed.zero is not None
        shape = lambda flat: [flat[2 * i * g : 2 * (i + 1) * g] for i in range(len(tiles))]  # noqa: E731
        g = self.lane_groups
        scales = shape(take(2 * g * len(tiles))) if scaled else None
        zeros = shape(take(2 * g * len(tiles))) if zeroed else None
        assert not loaded
        stored = self.packed.scale.dtype if self.packed.scale is not None else None
        # int4: what its numbers are too large by is taken from the sums
        from_sums = len(tiles) > 1 and self.scheme == "int4" and self.sums_scaled
        sums_of_x: Any = [None] * len(x)
        if from_sums:
            ones = [unpack.minus_one(self.dtype)] * 4
            for j, column in enumerate(x):
                for pairs in column:
                    for step in range(0, per_word // 2, 2):
                        right = pairs[step : step + 2]
                        sums_of_x[j] = _mma(sums_of_x[j], ones, right, self.dtype)
        done = []
        for i, _ in enumerate(tiles):
            before = [sums[4 * (i * len(x) + j) :][:4] for j in range(len(x))]
            part: Any = [None] * len(x) if self.sums_scaled else before
            pair_scales: Any = [None] * (2 * g)
            if scales is not None and not self.sums_scaled:
                pair_scales = [
                    unpack.scale_pair(self.scheme, s, self.dtype, stored) for s in scales[i]
                ]
            pair_zeros: Any = [None] * (2 * g)
            if self.scheme == "int4" and not from_sums:
                pair_zeros = [
                    unpack.zero_pair(self.dtype, z) for z in (zeros[i] if zeros else pair_zeros)
                ]
            for word in range(4):
                here = word * g // 4
                rows = [
                    unpack.values(
                        self.scheme,
                        codes[i][down][word],
                        self.dtype,
                        zero=pair_zeros[down * g + here],
                        scale=pair_scales[down * g + here],
                    )
                    for down in range(2)
                ]
                for step in range(0, per_word // 2, 2):
                    left = [rows[0][step], rows[1][step], rows[0][step + 1], rows[1][step + 1]]
                    part = [
                        _mma(p, left, x[j][word][step : step + 2], self.dtype)
                        for j, p in enumerate(part)
                    ]
            if self.sums_scaled and scales is not None:
                wide = [unpack.as_float32(s, stored) for s in scales[i]]
                if from_sums:
                    more = [
                        unpack.too_large(self.dtype, z) for z in (zeros[i] if zeros else pair_zeros)
                    ]
                    part = [
                        [
                            _fma(y, more[e // 2], z)
                            for e, (y, z) in enumerate(zip(p, b, strict=True))
                        ]
                        for p, b in zip(sums_of_x, part, strict=True)
                    ]
                part = [
                    [_fma(y, wide[e // 2], z) for e, (y, z) in enumerate(zip(p, b, strict=True))]
                    for p, b in zip(part, before, strict=True)
                ]
            done += [y for p in part for y in p]
        return done

    def run(self) -> None:
        c, rounds = self.config, self.rounds
        block, zero = mgpu_utils.block_idx(), arith.constant(ir.F32Type.get(), 0.0)
        # the turn that is asked for next: of which rows, and which
        tile, round_ = block, _int(0)
        for i in range(c.ahead):
            self.copy(tile, round_, _int(i))
            tile, round_ = self._next(tile, round_)
        self.keep_x()
        gpu.barrier()
        count = 4 * c.tile_n // MMA_ROWS * len(self.x_at)
        # of the tiles, those that are this block's
        more = arith.subi(_int(self.num_tiles + self.num_blocks - 1), block)

        @mgpu_utils.fori(arith.divui(more, _int(self.num_blocks)), [_int(0), tile, round_])
        def each_tile(i, carry):
            @mgpu_utils.fori(_int(rounds), [*carry, *[zero] * count])
            def each_round(at, carry):
                slot, tile, round_, *sums = carry
                sums = self.multiply(self.arrived(slot), at, sums)
                asm("bar.warp.sync 0xffffffff;", "", effects=True)
                self.copy(tile, round_, slot)
                tile, round_ = self._next(tile, round_)
                slot = arith.addi(slot, _int(1))
                slot = arith.select(_less(slot, c.ahead), slot, _int(0))
                return [slot, tile, round_, *sums]

            carry, sums = list(each_round.results[:3]), list(each_round.results[3:])
            size_bytes = c.warps * _columns(self.m) * c.tile_n * 4
            parts = arith.andi(i, _int(1))
            parts = _at(self.pointers["parts"], _scaled(parts, size_bytes))
            self._show(sums, parts)
            gpu.barrier()
            first = arith.addi(block, _scaled(i, self.num_blocks))
            self._finish(parts, _scaled(first, self.out_rows))
            return carry

    def _next(self, tile: Any, round_: Any) -> tuple[Any, Any]:
        round_ = arith.addi(round_, _int(1))
        same = _less(round_, self.rounds)
        after = arith.addi(tile, _int(self.num_blocks))
        return arith.select(same, tile, after), arith.select(same, round_, _int(0))

    def _show(self, sums: list[Any], parts: Any) -> None:
        """Writes a warp's sums, of a row of x one beside the other."""
        c = self.config
        start = _scaled(self.warp, _columns(self.m) * c.tile_n)
        start = arith.addi(start, _scaled(self.across, 2 * c.tile_n))
        address = _at(parts, _scaled(arith.addi(start, self.row), 4))
        for i in range(c.tile_n // MMA_ROWS):
            for j in range(len(self.x_at)):
                for e, value in enumerate(sums[4 * (i * len(self.x_at) + j) :][:4]):
                    row, column = 16 * i + 8 * (e // 2), MMA_COLUMNS * j + e % 2
                    offset = 4 * (column * c.tile_n + row)
                    asm(f"st.shared.f32 [$0 + {offset}], $1;", "", address, value, effects=True)

    def _finish(self, parts: Any, first: Any) -> None:
        """Adds the warps' sums in order, and what follows; a result is a thread's. first: row."""
        c = self.config
        count, threads = self.m * self.out_rows, c.warps * LANES
        for start in range(0, count, threads):
            place = arith.addi(self.thread, _int(start))
            if start + threads <= count:
                self._finish_one(place, parts, first)
                continue
            with mgpu_utils.when(_less(place, count)):
                self._finish_one(place, parts, first)

    def _finish_one(self, place: Any, parts: Any, first: Any) -> None:
        c, m = self.config, _columns(self.m)
        one, row = (f(place, _int(self.out_rows)) for f in (arith.divui, arith.remui))
        whole, ys = arith.addi(first, row), []
        for half in range(self.halves):
            at = arith.addi(_scaled(one, c.tile_n), row)
            address = _at(parts, _scaled(at, 4))
            y: Any = None
            for warp in range(c.warps):
                offset = 4 * (warp * m * c.tile_n + half * self.out_rows)
                part = asm(f"ld.shared.f32 $0, [$1 + {offset}];", "f", address, effects=True)
                y = part if y is None else arith.addf(y, part)
            rest = unpack.rest(self.scheme, self.dtype)
            if rest != 1:
                y = arith.mulf(y, arith.constant(ir.F32Type.get(), rest))
            if self.packed.row_scale is not None:
                y = arith.mulf(y, self._number("row_scale", half, whole, jnp.float32))
            if self.bias is not None:
                y = arith.addf(y, self._number("bias", half, whole, self.bias.dtype))
            ys.append(y)
        y = ys[0]
        if self.static.gated:
            text = """{ .reg .f32 x; mul.f32 x, $1, 0fBFB8AA3B; ex2.approx.f32 x, x;
                add.f32 x, x, 0f3F800000; div.approx.f32 x, $1, x; mul.f32 $0, x, $2; }"""
            y = asm(text, "f", *ys)
        index = arith.addi(_scaled(one, self.n), whole)
        if "residual" in self.pointers:
            y = arith.addf(y, self._number("residual", 0, index, jnp.dtype(self.static.out_dtype)))
        out = jnp.dtype(self.static.out_dtype)
        address = _at(self.pointers["out"], _scaled(index, out.itemsize))
        if out == jnp.float32:
            asm("st.global.f32 [$0], $1;", "", address, y, effects=True)
            return
        kind = "bf16" if out == jnp.bfloat16 else "f16"
        text = f"{{ .reg .b16 x; cvt.rn.{kind}.f32 x, $1; st.global.b16 [$0], x; }}"
        asm(text, "", address, y, effects=True)

    def _number(self, name: str, half: int, index: Any, dtype: Any) -> Any:
        size = jnp.dtype(dtype).itemsize
        index = arith.addi(index, _int(half * self.n))
        address = _at(self.pointers[name], _scaled(index, size))
        return unpack.as_float32(_load(address, 0, size), dtype)
