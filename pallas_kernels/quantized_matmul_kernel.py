"""The kernel of `quantized_matmul` for few rows of x, whose time is that of reading the codes.

A block has some rows of the weight, and its warps divide K: each goes over 64 bytes of a row at a
time, every one of them by 4 lanes of 16 bytes, and multiplies what it has unpacked in registers
(mma, the tensor cores of a warp) with x, whose numbers it reads in the order in which the codes
come out of their words. Nothing passes through shared memory but the warps' sums at the end, which
are added in the order of the warps, so that the same call gives the same bits. What a warp will
need is asked for some turns ahead. A scale of a group that is a whole turn multiplies its float32
sums; that of a smaller group multiplies the numbers. Imported only by quantized_matmul.py.
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
    """A block has tile_n rows of the weight (gate and up together) and `warps` that divide K.

    ahead: turns that a warp asks for before it needs them.
    """

    tile_n: int = 32
    warps: int = 4
    ahead: int = 2


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel is compiled for."""

    name: str
    config: Config
    interpret: bool
    out_dtype: str
    gated: bool = False


def turn(scheme: str) -> int:
    """Numbers of a row that a warp takes at a time."""
    return TURN_BYTES // 4 * unpack.per_word(scheme)


def turns(packed: Packed) -> int:
    """Of a row, of all warps."""
    return packed.shape[1] // turn(packed.scheme)


def shared_bytes(config: Config, m: int) -> int:
    """On chip: the sums of the warps."""
    return config.warps * _columns(m) * config.tile_n * 4 + 1024


def problem(config: Config, m: int, packed: Packed, *, gated: bool) -> str | None:
    """What speaks against the config for m rows of x."""
    c, grain = config, MMA_ROWS * (1 + gated)
    size_bytes = shared_bytes(config, m)
    rounds = -(-turns(packed) // max(c.warps, 1))
    problems = {
        f"tile_n must divide the weight's rows and be a multiple of {grain}": (
            c.tile_n < 1 or c.tile_n % grain or packed.shape[0] % c.tile_n
        ),
        f"warps must be a multiple of {WARPS}, 16 at most": (
            not 0 < c.warps <= 16 or c.warps % WARPS
        ),
        f"ahead must be 1 to {rounds}, the turns of a warp": not 1 <= c.ahead <= rounds,
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
        row = lax.axis_index("block") * rows

        def piece(ref, along, half):
            place = pl.ds(row + half * n, rows)
            return ref.at[place] if along == 0 or len(ref.shape) == 1 else ref.at[:, place]

        halved = {
            name: [piece(ref, along, half) for half in range(halves)]
            for (name, (_, along)), ref in zip(arrays.items(), given, strict=True)
        }
        out = piece(out_ref, 1, 0)
        more = None if residual_ref is None else piece(residual_ref, 1, 0)
        if interpret:
            whole = {
                name: jnp.concatenate([ref[...] for ref in refs], axis=arrays[name][1])
                for name, refs in halved.items()
            }
            added = whole.pop("bias", None)
            weight = dataclasses.replace(packed, **whole)
            out[...] = plain(x_ref[...], weight, added, None if more is None else more[...])
            return
        refs = {"x": [x_ref], **halved, "out": [out], "parts": [scratch["parts"]]}
        if more is not None:
            refs["residual"] = [more]

        @plgpu.inline_mgpu(arg_types=(jax.tree.map(lambda _: plgpu.RefType(), refs),))
        def multiply(*given: Any) -> Any:
            pointers = jax.tree.map(_pointer, given[1])
            _Block(static, x, packed, bias, pointers).run()

        multiply(refs)

    threads: Any = {}
    if c.warps > WARPS and not interpret:
        threads = {"num_threads": c.warps // WARPS, "thread_name": "group"}
    shape = (c.warps, _columns(m), c.tile_n)
    return _compat.kernel(
        body,
        name=static.name,
        out_type=jax.ShapeDtypeStruct((m, n), static.out_dtype),
        scratch_types={} if interpret else {"parts": plgpu.SMEM(shape, jnp.float32)},
        grid=(n // rows,),
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


def _load(address: Any, offset: int, size_bytes: int, *, once: bool = False) -> Any:
    """A word, or four; fewer bytes become a word. once: nobody else reads it."""
    cached = ".L1::no_allocate" if once else ""
    if size_bytes == 16:
        text = f"ld.global.nc{cached}.v4.u32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
        return asm(text, "rrrr", address, effects=True)
    if size_bytes == 4:
        return asm(f"ld.global.nc{cached}.u32 $0, [$1 + {offset}];", "r", address, effects=True)
    kind, wide = ("u8", "cvt.u32.u16 $0, x;") if size_bytes == 1 else ("u16", "cvt.u32.u16 $0, x;")
    text = f"{{ .reg .b16 x; ld.global.nc{cached}.{kind} x, [$1 + {offset}]; {wide} }}"
    return asm(text, "r", address, effects=True)


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
    """What a thread does: loads, products, sums."""

    def __init__(self, static: Static, x, packed: Packed, bias, pointers: Mapping[str, list[Any]]):
        self.static, self.packed, self.pointers = static, packed, pointers
        c = self.config = static.config
        self.m, self.k = x.shape
        self.dtype, self.bias = jnp.dtype(x.dtype), bias
        self.halves = 1 + static.gated
        self.out_rows = c.tile_n // self.halves
        self.n = packed.shape[0] // self.halves
        self.scheme = packed.scheme
        self.turn, self.turns = turn(self.scheme), turns(packed)
        self.rounds = -(-self.turns // c.warps)
        thread = mgpu_utils.thread_idx()
        lane = arith.remui(thread, _int(LANES))
        self.thread, self.warp = thread, arith.divui(thread, _int(LANES))
        self.row, self.across = (f(lane, _int(ACROSS)) for f in (arith.divui, arith.remui))
        group = packed.group_size or 0
        grouped = packed.scale is not None
        self.sums_scaled = grouped and unpack.scales_sums(self.scheme) and group % self.turn == 0
        each = self.turn // ACROSS  # numbers of a row that a lane has
        # groups that a lane has numbers of, in a turn
        self.lane_groups = max(1, each // group) if grouped and not self.sums_scaled else 1
        row_bytes = packed.codes.shape[1] * packed.codes.dtype.itemsize
        start = arith.addi(_scaled(self.row, row_bytes), _scaled(self.across, ACCESS_BYTES))
        self.row_bytes = row_bytes
        self.codes_at = [_at(p, start) for p in pointers["codes"]]
        self.x_at = []
        for column in range(0, _columns(self.m), MMA_COLUMNS):
            one = arith.addi(self.row, _int(column))
            one = arith.minui(one, _int(self.m - 1))
            at = arith.addi(_scaled(one, self.k * 2), _scaled(self.across, each * 2))
            self.x_at.append(_at(pointers["x"][0], at))

    def _tiles(self):
        """Of 16 rows of the weight: which half they are in, and how far from its beginning."""
        for half in range(self.halves):
            for start in range(0, self.out_rows, MMA_ROWS):
                yield half, start

    def _groups(self, name: str, at: Any) -> list[Any]:
        """Scales or zeros of a turn: of each 16 rows, of a row and the eighth below, of groups."""
        array = getattr(self.packed, name)
        if array is None:
            return []
        size, group = array.dtype.itemsize, self.packed.group_size or self.k
        first = _scaled(at, self.turn)
        if not self.sums_scaled:
            first = arith.addi(first, _scaled(self.across, self.turn // ACROSS))
        first = arith.divui(first, _int(group))
        wide = array.shape[1] * size
        offset = arith.addi(_scaled(first, wide), _scaled(self.row, size))
        starts = [_at(p, offset) for p in self.pointers[name]]
        return [
            _load(starts[half], (start + 8 * down) * size + i * wide, size)
            for half, start in self._tiles()
            for down in range(2)
            for i in range(self.lane_groups)
        ]

    def load(self, round_: Any, last: bool) -> list[Any]:
        """What a turn needs, flat. last: whether the turn may be past the end."""
        at = arith.addi(_scaled(round_, self.config.warps), self.warp)
        inside = None
        if last and self.turns % self.config.warps:
            inside = _less(at, self.turns)
            at = arith.minui(at, _int(self.turns - 1))
        codes_at = [_at(p, _scaled(at, TURN_BYTES)) for p in self.codes_at]
        found = []
        for half, start in self._tiles():
            for down in (0, 8):
                place = (start + down) * self.row_bytes
                found += _load(codes_at[half], place, ACCESS_BYTES, once=True)
        for pointer in self.x_at:
            pointer = _at(pointer, _scaled(at, self.turn * 2))
            for i in range(0, self.turn // ACROSS * 2, ACCESS_BYTES):
                words = _load(pointer, i, ACCESS_BYTES)
                if inside is not None:
                    words = [arith.select(inside, word, _int(0)) for word in words]
                found += words
        return found + self._groups("scale", at) + self._groups("zero", at)

    def multiply(self, loaded: list[Any], sums: list[Any]) -> list[Any]:
        """The sums, four a 16 rows of the weight and 8 of x, and what a turn adds."""
        loaded = list(loaded)
        take = lambda count: [loaded.pop(0) for _ in range(count)]  # noqa: E731
        tiles = list(self._tiles())
        codes = [[take(4) for _ in range(2)] for _ in tiles]
        per_word = unpack.per_word(self.scheme)
        x = [[take(per_word // 2) for _ in range(4)] for _ in self.x_at]
        x = [[unpack.pairs_of_x(words, self.scheme) for words in column] for column in x]
        scaled, zeroed = self.packed.scale is not None, self.packed.zero is not None
        shape = lambda flat: [flat[2 * i * g : 2 * (i + 1) * g] for i in range(len(tiles))]  # noqa: E731
        g = self.lane_groups
        scales = shape(take(2 * g * len(tiles))) if scaled else None
        zeros = shape(take(2 * g * len(tiles))) if zeroed else None
        assert not loaded
        stored = self.packed.scale.dtype if self.packed.scale is not None else None
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
            if self.scheme == "int4":
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
                part = [
                    [_fma(y, wide[e // 2], z) for e, (y, z) in enumerate(zip(p, b, strict=True))]
                    for p, b in zip(part, before, strict=True)
                ]
            done += [y for p in part for y in p]
        return done

    def run(self) -> None:
        ahead, rounds = self.config.ahead, self.rounds
        zero = arith.constant(ir.F32Type.get(), 0.0)
        sums = [zero] * (4 * self.config.tile_n // MMA_ROWS * len(self.x_at))
        ring = [self.load(_int(i), last=i == rounds - 1) for i in range(ahead)]
        width = len(ring[0])
        repeats = max(0, (rounds - 1 - ahead) // ahead)  # of which no load is the last turn's
        if repeats:

            @mgpu_utils.fori(_int(repeats), [x for each in ring for x in each] + sums)
            def loop(i, carry):
                ring = [carry[s * width : (s + 1) * width] for s in range(ahead)]
                sums = carry[ahead * width :]
                first = _scaled(arith.addi(i, _int(1)), ahead)
                for s in range(ahead):
                    sums = self.multiply(ring[s], sums)
                    ring[s] = self.load(arith.addi(first, _int(s)), last=False)
                return [x for each in ring for x in each] + sums

            carry = list(loop.results)
            ring = [carry[s * width : (s + 1) * width] for s in range(ahead)]
            sums = carry[ahead * width :]
        for turn_ in range(repeats * ahead, rounds):
            sums = self.multiply(ring[turn_ % ahead], sums)
            if turn_ + ahead < rounds:
                ring[turn_ % ahead] = self.load(
                    _int(turn_ + ahead), last=turn_ + ahead == rounds - 1
                )
        self._show(sums)
        gpu.barrier()
        self._finish()

    def _show(self, sums: list[Any]) -> None:
        """Writes a warp's sums, of a row of x one beside the other."""
        c = self.config
        start = _scaled(self.warp, _columns(self.m) * c.tile_n)
        start = arith.addi(start, _scaled(self.across, 2 * c.tile_n))
        address = _at(self.pointers["parts"][0], _scaled(arith.addi(start, self.row), 4))
        for i in range(c.tile_n // MMA_ROWS):
            for j in range(len(self.x_at)):
                for e, value in enumerate(sums[4 * (i * len(self.x_at) + j) :][:4]):
                    row, column = 16 * i + 8 * (e // 2), MMA_COLUMNS * j + e % 2
                    offset = 4 * (column * c.tile_n + row)
                    asm(f"st.shared.f32 [$0 + {offset}], $1;", "", address, value, effects=True)

    def _finish(self) -> None:
        """Adds the warps' sums in order, and what follows; a result is a thread's."""
        c = self.config
        count, threads = self.m * self.out_rows, c.warps * LANES
        for start in range(0, count, threads):
            place = arith.addi(self.thread, _int(start))
            if start + threads <= count:
                self._finish_one(place)
                continue
            with mgpu_utils.when(_less(place, count)):
                self._finish_one(place)

    def _finish_one(self, place: Any) -> None:
        c, m = self.config, _columns(self.m)
        one, row = (f(place, _int(self.out_rows)) for f in (arith.divui, arith.remui))
        ys = []
        for half in range(self.halves):
            at = arith.addi(_scaled(one, c.tile_n), row)
            address = _at(self.pointers["parts"][0], _scaled(at, 4))
            y: Any = None
            for warp in range(c.warps):
                offset = 4 * (warp * m * c.tile_n + half * self.out_rows)
                part = asm(f"ld.shared.f32 $0, [$1 + {offset}];", "f", address, effects=True)
                y = part if y is None else arith.addf(y, part)
            rest = unpack.rest(self.scheme, self.dtype)
            if rest != 1:
                y = arith.mulf(y, arith.constant(ir.F32Type.get(), rest))
            if self.packed.row_scale is not None:
                y = arith.mulf(y, self._number("row_scale", half, row, jnp.float32))
            if self.bias is not None:
                y = arith.addf(y, self._number("bias", half, row, self.bias.dtype))
            ys.append(y)
        y = ys[0]
        if self.static.gated:
            text = """{ .reg .f32 x; mul.f32 x, $1, 0fBFB8AA3B; ex2.approx.f32 x, x;
                add.f32 x, x, 0f3F800000; div.approx.f32 x, $1, x; mul.f32 $0, x, $2; }"""
            y = asm(text, "f", *ys)
        index = arith.addi(_scaled(one, self.n), row)
        if "residual" in self.pointers:
            y = arith.addf(y, self._number("residual", 0, index, jnp.dtype(self.static.out_dtype)))
        out = jnp.dtype(self.static.out_dtype)
        address = _at(self.pointers["out"][0], _scaled(index, out.itemsize))
        if out == jnp.float32:
            asm("st.global.f32 [$0], $1;", "", address, y, effects=True)
            return
        kind = "bf16" if out == jnp.bfloat16 else "f16"
        text = f"{{ .reg .b16 x; cvt.rn.{kind}.f32 x, $1; st.global.b16 [$0], x; }}"
        asm(text, "", address, y, effects=True)

    def _number(self, name: str, half: int, index: Any, dtype: Any) -> Any:
        size = jnp.dtype(dtype).itemsize
        address = _at(self.pointers[name][half], _scaled(index, size))
        return unpack.as_float32(_load(address, 0, size), dtype)
