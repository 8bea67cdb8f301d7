"""The kernel of `ternary_matmul` for few rows of x, whose time is that of reading the codes.

A block has some rows of the weight, and its warps divide K: each goes over 64 bytes of a row at a
time, 256 codes, every one of them by 4 lanes of 16 bytes, and multiplies them with x by the tensor
cores of a warp (mma, unsigned times signed bytes). In a word of codes, the four that lie 8 bits
apart are bytes of a number, once the others are masked: of columns 4 apart, so that x's bytes are
brought in that order. Codes are 1 more than the weights: the sum of x is taken away at the end.

With few rows of x, codes are not moved down: those that lie 2, 4 and 6 bits up count 4, 16 and 64
times, and have sums of their own. Nothing passes through shared memory but the warps' sums at the
end. Imported only by ternary_matmul.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith, gpu
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.device import ACCESS_BYTES, LANES, SHARED_BYTES, WARPS
from pallas_kernels.lane_code import (
    address_of,
    asm,
    further,
    less,
    load,
    load_float,
    store_float,
    times,
    word,
)
from pallas_kernels.packed import Packed

MMA_ROWS, MMA_COLUMNS = 16, 8  # of the weight and of x, in one instruction
ACROSS = 4  # lanes that share a row in it
PER_WORD = 16
LANE = PER_WORD * 4  # columns of a lane, at a time
TURN = LANE * ACROSS  # columns of a warp
PLACES = 4  # where a code may lie in a byte
PAD = 4  # words behind a tile's sums, the first of which is the sum of x: no two lanes' banks meet


@dataclasses.dataclass(frozen=True)
class Config:
    """A block has tile_n rows of the weight and `warps` that divide K.

    ahead: turns that a warp asks for before it needs them.
    """

    tile_n: int = 32
    warps: int = 4
    ahead: int = 2


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel is compiled for."""

    config: Config
    interpret: bool
    out_dtype: str


def turns(k: int) -> int:
    """Of a row, of all warps; the last may be a part of one."""
    return -(-k // TURN)


def columns(m: int) -> int:
    """Rows of x, as mma counts them."""
    return -(-m // MMA_COLUMNS) * MMA_COLUMNS


def apart(m: int) -> bool:
    """Whether codes have sums by their place in a byte."""
    return m <= MMA_COLUMNS


def shared_bytes(config: Config, m: int) -> int:
    """On chip: the sums of the warps."""
    return config.warps * columns(m) * (config.tile_n + PAD) * 4 + 1024


def problem(config: Config, m: int, n: int, k: int) -> str | None:
    """What speaks against the config for m rows of x and a weight [n, k]."""
    c, size_bytes = config, shared_bytes(config, m)
    rounds = -(-turns(k) // max(c.warps, 1))
    problems = {
        f"tile_n must divide the weight's rows and be a multiple of {MMA_ROWS}": (
            c.tile_n < 1 or c.tile_n % MMA_ROWS or n % c.tile_n
        ),
        f"warps must be a multiple of {WARPS}, 16 at most": (
            not 0 < c.warps <= 16 or c.warps % WARPS
        ),
        f"ahead must be 1 to {rounds}, the turns of a warp": not 1 <= c.ahead <= rounds,
        f"takes {size_bytes} of {SHARED_BYTES} bytes on chip": size_bytes > SHARED_BYTES,
    }
    return next((sentence for sentence, found in problems.items() if found), None)


def warp_products(
    static: Static, xq, x_scale, packed: Packed, bias, residual, *, plain: Callable[..., jax.Array]
):
    """[M, N] of xq [M, K]. plain: (xq, x_scale, codes, row_scale, bias, residual) -> the same of a
    block's rows in plain JAX, for the interpreter, which knows neither a warp's products nor a
    lane's registers.
    """
    c, interpret = static.config, static.interpret
    m, n = xq.shape[0], packed.shape[0]

    def body(x_ref, scale_ref, residual_ref, codes_ref, gamma_ref, bias_ref, out_ref, **scratch):
        place = pl.ds(lax.axis_index("block") * c.tile_n, c.tile_n)
        more = None if residual_ref is None else residual_ref.at[:, place]
        added = None if bias_ref is None else bias_ref.at[place]
        out, codes, gamma = out_ref.at[:, place], codes_ref.at[place], gamma_ref.at[place]
        if interpret:
            read = lambda ref: None if ref is None else ref[...]  # noqa: E731
            out[...] = plain(*map(read, (x_ref, scale_ref, codes, gamma, added, more)))
            return
        refs = {"x": x_ref, "x_scale": scale_ref, "codes": codes, "row_scale": gamma, "out": out}
        refs |= {"parts": scratch["parts"], "bias": added, "residual": more}
        refs = {name: ref for name, ref in refs.items() if ref is not None}

        @plgpu.inline_mgpu(arg_types=(jax.tree.map(lambda _: plgpu.RefType(), refs),))
        def multiply(_: Any, refs: Any) -> Any:
            dtype = None if bias is None else bias.dtype.name
            _Block(static, m, n, xq.shape[1], dtype, jax.tree.map(address_of, refs)).run()

        multiply(refs)  # pyright: ignore[reportCallIssue]

    threads: Any = {}
    if c.warps > WARPS and not interpret:
        threads = {"num_threads": c.warps // WARPS, "thread_name": "group"}
    parts = plgpu.SMEM((c.warps, columns(m), c.tile_n + PAD), jnp.int32)
    return _compat.kernel(
        body,
        name="ternary_matmul",
        out_type=jax.ShapeDtypeStruct((m, n), static.out_dtype),
        scratch_types={} if interpret else {"parts": parts},
        grid=(n // c.tile_n,),
        grid_names=("block",),
        interpret=interpret,
        approx_math=True,
        **threads,
    )(xq, x_scale, residual, packed.codes, packed.row_scale, bias)


class _Block:
    """What a thread does: loads, products, sums."""

    def __init__(self, static: Static, m: int, n: int, k: int, bias_dtype, at: Mapping[str, Any]):
        self.config, self.out_dtype = static.config, static.out_dtype
        self.m, self.n, self.k, self.at, self.bias_dtype = m, n, k, at, bias_dtype
        self.tiles = self.config.tile_n // MMA_ROWS
        self.places = PLACES if apart(m) else 1
        self.thread = mgpu_utils.thread_idx()
        lane = arith.remui(self.thread, word(LANES))
        self.warp = arith.divui(self.thread, word(LANES))
        self.row, self.across = (f(lane, word(ACROSS)) for f in (arith.divui, arith.remui))
        self.codes_at = further(at["codes"], times(self.row, k // 4))
        self.x_at = []
        for start in range(0, columns(m), MMA_COLUMNS):
            one = arith.minui(arith.addi(self.row, word(start)), word(m - 1))
            self.x_at.append(further(at["x"], times(one, k)))

    def place(self, round_: Any, last: bool) -> tuple[Any, Any]:
        """Which part of a row is a lane's, and whether there is one (None: there is).

        last: whether the turn may pass the end.
        """
        turn = arith.addi(times(round_, self.config.warps), self.warp)
        place = arith.addi(times(turn, ACROSS), self.across)
        if not last or (self.k % TURN == 0 and turns(self.k) % self.config.warps == 0):
            return place, None
        parts = self.k // LANE
        return arith.minui(place, word(parts - 1)), less(place, parts)

    def fetch(self, round_: Any, last: bool) -> list[Any]:
        """The words that a turn needs first: codes, and x where it is one column."""
        place, inside = self.place(round_, last)
        address = further(self.codes_at, times(place, ACCESS_BYTES))
        found = []
        for start in range(0, self.config.tile_n, MMA_ROWS // 2):
            found += load(address, start * self.k // 4, 4, once=True)
        if len(self.x_at) == 1:
            found += self.x(0, range(4), place, inside)
        return found

    def x(self, column: int, which: Iterable[int], place: Any, inside: Any) -> list[Any]:
        """16 numbers of x for each word of codes, as words; zeros where no part is inside."""
        address = further(self.x_at[column], times(place, LANE))
        words = [x for i in which for x in load(address, i * PER_WORD, 4)]
        return words if inside is None else [arith.select(inside, x, word(0)) for x in words]

    def multiply(self, loaded, sums, x_sums, round_: Any, last: bool) -> tuple[list, list]:
        """The sums, four for 16 rows of the weight, 8 of x and a place; and what a turn adds."""
        count = 2 * self.tiles
        codes = [loaded[4 * i : 4 * i + 4] for i in range(count)]
        early, columns_ = loaded[4 * count :], range(len(self.x_at))
        place, inside = (None, None) if early else self.place(round_, last)
        sums, x_sums = list(sums), list(x_sums)
        for at in range(0, 4, 2):
            left = [self._left(codes[2 * i : 2 * i + 2], at) for i in range(self.tiles)]
            for column in columns_:
                words = early[4 * at : 4 * at + 8] or self.x(column, (at, at + 1), place, inside)
                x_sums[column] = _add_bytes(words, x_sums[column])
                right = list(zip(_transposed(words[:4]), _transposed(words[4:]), strict=True))
                for tile in range(self.tiles):
                    first = (tile * len(columns_) + column) * self.places * 4
                    for i in range(PLACES):
                        mine = slice(start := first + i % self.places * 4, start + 4)
                        sums[mine] = _mma(sums[mine], left[tile][i], list(right[i]))
        return sums, x_sums

    def _left(self, codes: list[list[Any]], at: int) -> list[list[Any]]:
        """What mma takes of 16 rows of the weight for two words of each row, by place."""
        moved = self.places == 1
        return [
            [_of_place(row[at + i], place, moved=moved) for i in range(2) for row in codes]
            for place in range(PLACES)
        ]

    def run(self) -> None:
        ahead, rounds = self.config.ahead, -(-turns(self.k) // self.config.warps)
        number = 4 * self.places * self.tiles * len(self.x_at)
        sums, x_sums = [word(0)] * number, [word(0)] * len(self.x_at)
        ring = [self.fetch(word(i), last=i == rounds - 1) for i in range(ahead)]
        width = len(ring[0])
        repeats = max(0, (rounds - 1 - ahead) // ahead)  # of which no load is the last turn's

        def state(carry):
            ring = [carry[s * width : (s + 1) * width] for s in range(ahead)]
            return ring, carry[ahead * width :][:number], carry[ahead * width :][number:]

        def flat(ring, sums, x_sums):
            return [x for each in ring for x in each] + sums + x_sums

        if repeats:

            @mgpu_utils.fori(word(repeats), flat(ring, sums, x_sums))
            def loop(i, carry):
                ring, sums, x_sums = state(list(carry))
                first = times(i, ahead)
                for s in range(ahead):
                    here = arith.addi(first, word(s))
                    sums, x_sums = self.multiply(ring[s], sums, x_sums, here, last=False)
                    ring[s] = self.fetch(arith.addi(here, word(ahead)), last=False)
                return flat(ring, sums, x_sums)

            ring, sums, x_sums = state(list(loop.results))
        for turn in range(repeats * ahead, rounds):
            here, end = ring[turn % ahead], rounds - 1
            sums, x_sums = self.multiply(here, sums, x_sums, word(turn), last=turn == end)
            if turn + ahead < rounds:
                ring[turn % ahead] = self.fetch(word(turn + ahead), last=turn + ahead == end)
        self._show(sums, x_sums)
        gpu.barrier()
        self._finish()

    def _show(self, sums: list[Any], x_sums: list[Any]) -> None:
        """Writes a warp's sums, for each row of x those of the tile and that of x itself."""
        line = self.config.tile_n + PAD
        first = times(self.warp, columns(self.m) * line)
        row = arith.addi(times(self.across, 2 * line), self.row)
        address = further(self.at["parts"], times(arith.addi(first, row), 4))
        count, width = len(self.x_at), 4 * self.places
        for i in range(self.tiles):
            for j in range(count):
                mine = sums[(i * count + j) * width :][:width]
                for e in range(4):
                    total = mine[e]
                    for place in range(1, self.places):
                        # What is in it is a multiple of 4^place
                        moved = arith.shrsi(mine[4 * place + e], word(2 * place))
                        total = arith.addi(total, moved)
                    offset = 4 * ((MMA_COLUMNS * j + e % 2) * line + 16 * i + 8 * (e // 2))
                    asm(f"st.shared.u32 [$0 + {offset}], $1;", "", address, total)
        address = further(self.at["parts"], times(arith.addi(first, times(self.row, line)), 4))
        for j, total in enumerate(x_sums):
            for mask in (1, 2):
                text = f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, 0xffffffff;"
                total = arith.addi(total, asm(text, "r", total, effects=True))
            offset = 4 * (MMA_COLUMNS * j * line + self.config.tile_n)
            with mgpu_utils.when(less(self.across, 1)):
                asm(f"st.shared.u32 [$0 + {offset}], $1;", "", address, total)

    def _finish(self) -> None:
        """Adds the warps' sums, and what follows; a thread has one result at a time."""
        c = self.config
        count, threads = self.m * c.tile_n, c.warps * LANES
        for start in range(0, count, threads):
            place = arith.addi(self.thread, word(start))
            if start + threads <= count:
                self._finish_one(place)
                continue
            with mgpu_utils.when(less(place, count)):
                self._finish_one(place)

    def _finish_one(self, place: Any) -> None:
        c, line = self.config, self.config.tile_n + PAD
        one, row = (f(place, word(c.tile_n)) for f in (arith.divui, arith.remui))
        start = further(self.at["parts"], times(times(one, line), 4))
        address = further(start, times(row, 4))
        total = None
        for warp in range(c.warps):
            offset = 4 * warp * columns(self.m) * line
            part = _shared(address, offset)
            part = arith.subi(part, _shared(start, offset + 4 * c.tile_n))
            total = part if total is None else arith.addi(total, part)
        y = asm("cvt.rn.f32.s32 $0, $1;", "f", total)
        for name, index in (("x_scale", one), ("row_scale", row)):
            scale = load_float(further(self.at[name], times(index, 4)), "float32")
            y = arith.mulf(y, scale)
        if "bias" in self.at:
            size = jnp.dtype(self.bias_dtype).itemsize
            bias = load_float(further(self.at["bias"], times(row, size)), self.bias_dtype)
            y = arith.addf(y, bias)
        size = jnp.dtype(self.out_dtype).itemsize
        offset = times(arith.addi(times(one, self.n), row), size)
        if "residual" in self.at:
            more = load_float(further(self.at["residual"], offset), self.out_dtype)
            y = arith.addf(y, more)
        store_float(further(self.at["out"], offset), y, self.out_dtype)


def _shared(address: Any, offset: int) -> Any:
    return asm(f"ld.shared.u32 $0, [$1 + {offset}];", "r", address, effects=True)


def _of_place(codes: Any, place: int, *, moved: bool) -> Any:
    """The codes at one place of each byte; moved: down to its beginning."""
    if not moved:
        return arith.andi(codes, word(0x03030303 << 2 * place if place < 3 else -0x3F3F3F40))
    down = arith.shrui(codes, word(2 * place)) if place else codes
    return arith.andi(down, word(0x03030303))


def _add_bytes(words: list[Any], total: Any) -> Any:
    """Adds the signed bytes of words to a total."""
    for each in words:
        total = asm("dp4a.s32.s32 $0, $1, 0x01010101, $2;", "r", each, total)
    return total


def _transposed(four: list[Any]) -> list[Any]:
    """Of 16 bytes in four words those that lie 4 apart, as four words."""
    low = [asm("prmt.b32 $0, $1, $2, 0x5140;", "r", *four[i : i + 2]) for i in (0, 2)]
    high = [asm("prmt.b32 $0, $1, $2, 0x7362;", "r", *four[i : i + 2]) for i in (0, 2)]
    return [
        asm(f"prmt.b32 $0, $1, $2, {order};", "r", *pair)
        for pair in (low, high)
        for order in ("0x5410", "0x7632")
    ]


def _mma(sums: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
    """sums + a [16, 32] @ b [32, 8]: unsigned times signed bytes, four int32 a thread."""
    numbers = [f"${i}" for i in range(14)]
    out, left, right, before = (
        "{" + ", ".join(numbers[i:j]) + "}" for i, j in ((0, 4), (4, 8), (8, 10), (10, 14))
    )
    text = f"mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {out}, {left}, {right}, {before};"
    return asm(text, "rrrr", *a, *b, *sums)
