"""The kernel of `ternary_matmul` for few rows of x, whose time is that of reading the codes.

A block has some rows of the weight, and its warps divide K: each goes over 64 bytes of a row at a
time, 256 codes, every one of them by 4 lanes of 16 bytes, and multiplies them with x by the tensor
cores of a warp (mma, unsigned times signed bytes). In a word of codes, the four that lie 8 bits
apart are bytes of a number, once the others are masked: of columns 4 apart, so that x's bytes are
brought in that order. Codes are 1 more than the weights: the sum of x is taken away at the end.

With few rows of x, codes are not moved down: those that lie 2, 4 and 6 bits up count 4, 16 and 64
times, and have sums of their own. The warps' sums meet in shared memory. x of floating point is
normed and made int8 there by every block (`ternary_rows`), while the first codes are on their way:
it costs no launch. Imported only by ternary_matmul.py.
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
    asm,
    by_thread,
    further,
    less,
    load,
    load_shared,
    mma,
    times,
    word,
)
from pallas_kernels.packed import Packed
from pallas_kernels.ternary_finish import Finish
from pallas_kernels.ternary_rows import add_bytes, quantise_rows

MMA = "m16n8k32.row.col.s32.u8.s8.s32"
MMA_ROWS, MMA_COLUMNS = 16, 8  # of the weight and of x, in one instruction
ACROSS = 4  # lanes that share a row in it
PER_WORD = 16
LANE = PER_WORD * 4  # columns of a lane, at a time
TURN = LANE * ACROSS  # columns of a warp
PLACES = 4  # where a code may lie in a byte
PAD = 4  # words behind a tile's sums, the first of which is the sum of x: no two lanes' banks meet


@dataclasses.dataclass(frozen=True)
class Config:
    """A block has tile_n rows of the weight; `warps` divide K.

    ahead: turns that a warp asks for before it needs them.
    """

    tile_n: int = 32
    warps: int = 4
    ahead: int = 2


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel is compiled for. epilogue: see `ternary_matmul`; eps: of the norm."""

    config: Config
    interpret: bool
    out_dtype: str
    num_sms: int
    epilogue: str | None = None
    eps: float = 0.0

    @property
    def halves(self) -> int:
        """2 where the weight is gate and up."""
        return 1 if self.epilogue is None else 2


def turns(k: int) -> int:
    """Of a row, of all warps; the last may be a part of one."""
    return -(-k // TURN)


def columns(m: int) -> int:
    """Rows of x, as mma counts them."""
    return -(-m // MMA_COLUMNS) * MMA_COLUMNS


def apart(m: int) -> bool:
    """Whether codes have sums by their place in a byte."""
    return m <= MMA_COLUMNS


def shared_bytes(config: Config, m: int, k: int, *, floats: bool) -> int:
    """On chip: the sums of the warps, and x where it comes as floats."""
    rows = m * k + 12 * m * config.warps if floats else 0
    return config.warps * columns(m) * (config.tile_n + PAD) * 4 + rows + 1024


def problem(
    config: Config, m: int, n: int, k: int, *, halves: int = 1, floats: bool = False
) -> str | None:
    """What speaks against the config for m rows of x and a weight [n, k].

    halves: 2 where it is gate and up; floats: whether x is of floating point.
    """
    c, size_bytes, grain = config, shared_bytes(config, m, k, floats=floats), MMA_ROWS * halves
    rounds = -(-turns(k) // max(c.warps, 1))
    problems = {
        f"tile_n must divide the weight's rows and be a multiple of {grain}": (
            c.tile_n < 1 or c.tile_n % grain or n % c.tile_n
        ),
        f"warps must be a multiple of {WARPS}, 16 at most": (
            not 0 < c.warps <= 16 or c.warps % WARPS
        ),
        f"ahead must be 1 to {rounds}, the turns of a warp": not 1 <= c.ahead <= rounds,
        f"takes {size_bytes} of {SHARED_BYTES} bytes on chip": size_bytes > SHARED_BYTES,
    }
    return next((sentence for sentence, found in problems.items() if found), None)


def warp_products(
    static: Static,
    x,
    packed: Packed,
    *,
    x_scale=None,
    norm=None,
    bias=None,
    residual=None,
    plain: Callable[..., jax.Array],
):
    """[M, F] of x [M, K], which is int8 and has `x_scale`, or of 16-bit floats and may have `norm`.

    plain: (x, packed, x_scale=, norm=, bias=, residual=) -> the same of a block's rows in plain
    JAX, for the interpreter, which knows neither a warp's products nor a lane's registers.
    """
    c, interpret, halves = static.config, static.interpret, static.halves
    (m, k), n, rows = x.shape, packed.shape[0] // halves, c.tile_n // halves
    # of these a block has some rows, of each half
    cut = {"codes": packed.codes, "row_scale": packed.row_scale, "bias": bias}
    cut = {name: array for name, array in cut.items() if array is not None}
    given = {"x_scale": x_scale, "norm": norm, "residual": residual}
    given = {name: array for name, array in given.items() if array is not None}

    def body(x_ref, *refs, **scratch):
        *refs, out_ref = refs
        row = lax.axis_index("block") * rows
        place = pl.ds(row, rows)
        parts = {
            name: [ref.at[pl.ds(row + half * n, rows)] for half in range(halves)]
            for name, ref in zip(cut, refs, strict=False)
        }
        whole = dict(zip(given, refs[len(cut) :], strict=True))
        if "residual" in whole:
            whole["residual"] = whole["residual"].at[:, place]
        out = out_ref.at[:, place]
        if interpret:
            found = {name: jnp.concatenate([r[...] for r in refs]) for name, refs in parts.items()}
            keywords = {name: ref[...] for name, ref in whole.items()}
            if "bias" in found:
                keywords["bias"] = found["bias"]
            codes, gamma = found["codes"], found["row_scale"]
            weight = dataclasses.replace(packed, codes=codes, row_scale=gamma)
            out[...] = plain(x_ref[...], weight, **keywords)
            return
        every = {"x": x_ref, "out": out, **parts, **whole, **scratch}
        dtypes = {"x": x.dtype.name, "bias": "" if bias is None else bias.dtype.name}
        by_thread(lambda at: _Block(static, (m, n, k), dtypes, at).run(), every)

    threads: Any = {}
    if c.warps > WARPS and not interpret:
        threads = {"num_threads": c.warps // WARPS, "thread_name": "group"}
    scratch = {"parts": plgpu.SMEM((c.warps, columns(m), c.tile_n + PAD), jnp.int32)}
    if x_scale is None:
        scratch["rows"] = plgpu.SMEM((m, k), jnp.int8)
        scratch["marks"] = plgpu.SMEM((3, m, c.warps), jnp.float32)
    return _compat.kernel(
        body,
        name="ternary_matmul" if static.epilogue is None else f"ternary_matmul_{static.epilogue}",
        out_type=jax.ShapeDtypeStruct((m, n), static.out_dtype),
        scratch_types={} if interpret else scratch,
        grid=(n // rows,),
        grid_names=("block",),
        interpret=interpret,
        approx_math=True,
        **threads,
    )(x, *cut.values(), *given.values())


class _Block:
    """What a thread does: loads, products, sums."""

    def __init__(
        self,
        static: Static,
        sizes: tuple[int, int, int],
        dtypes: Mapping[str, Any],
        at: Any,
    ):
        self.static, self.config = static, static.config
        self.m, self.n, self.k = sizes
        m, _, k = sizes
        self.at, self.dtypes = at, dtypes
        self.floats = dtypes["x"] != "int8"
        self.rounds = -(-turns(k) // self.config.warps)
        self.tiles = self.config.tile_n // MMA_ROWS  # as mma counts
        self.rows = self.config.tile_n // static.halves
        self.places = PLACES if apart(m) else 1
        self.thread = mgpu_utils.thread_idx()
        lane = arith.remui(self.thread, word(LANES))
        self.warp = arith.divui(self.thread, word(LANES))
        self.row, self.across = (f(lane, word(ACROSS)) for f in (arith.divui, arith.remui))
        self.codes_at = [further(p, times(self.row, k // 4)) for p in at["codes"]]
        self.x_at = []
        for start in range(0, columns(m), MMA_COLUMNS):
            one = arith.minui(arith.addi(self.row, word(start)), word(m - 1))
            self.x_at.append(further(at["rows" if self.floats else "x"], times(one, k)))
        self.finish = Finish(
            at=at,
            m=m,
            n=self.n,
            rows=self.rows,
            halves=static.halves,
            warps=self.config.warps,
            line=self.config.tile_n + PAD,
            lines=columns(m),
            epilogue=static.epilogue,
            out_dtype=static.out_dtype,
            bias_dtype=dtypes["bias"],
        )

    def place(self, round_: int | Any) -> tuple[Any, Any]:
        """Which part of a row is a lane's, and whether there is one (None: there is).

        Only the last turn may pass the end; round_ is a number there.
        """
        last = round_ == self.rounds - 1 if isinstance(round_, int) else False
        round_ = word(round_) if isinstance(round_, int) else round_
        turn = arith.addi(times(round_, self.config.warps), self.warp)
        place = arith.addi(times(turn, ACROSS), self.across)
        if not last or (self.k % TURN == 0 and turns(self.k) % self.config.warps == 0):
            return place, None
        parts = self.k // LANE
        return arith.minui(place, word(parts - 1)), less(place, parts)

    def fetch(self, round_: int | Any) -> list[Any]:
        """The words that a turn needs first: codes, and x where it is one column.

        round_: a number where it may be the last.
        """
        place, inside = self.place(round_)
        found = []
        for address in self.codes_at:
            address = further(address, times(place, ACCESS_BYTES))
            for start in range(0, self.rows, MMA_ROWS // 2):
                found += load(address, start * self.k // 4, 4, once=True)
        if len(self.x_at) == 1 and not self.floats:
            found += self.x(0, range(4), place, inside)
        return found

    def x(self, column: int, which: Iterable[int], place: Any, inside: Any) -> list[Any]:
        """16 numbers of x for each word of codes, as words; zeros where no part is inside.

        On chip, where `quantise_rows` has put them, they lie as codes come; else in their order.
        """
        address = further(self.x_at[column], times(place, LANE))
        read = load_shared if self.floats else load
        words = [x for i in which for x in read(address, i * PER_WORD, 4)]
        return words if inside is None else [arith.select(inside, x, word(0)) for x in words]

    def multiply(self, loaded, sums, x_sums, round_: int | Any) -> tuple[list, list]:
        """The sums, four for 16 rows of the weight, 8 of x and a place; and what a turn adds."""
        count = 2 * self.tiles
        codes = [loaded[4 * i : 4 * i + 4] for i in range(count)]
        early, columns_ = loaded[4 * count :], range(len(self.x_at))
        place, inside = (None, None) if early else self.place(round_)
        sums, x_sums = list(sums), list(x_sums)
        for at in range(0, 4, 2):
            left = [self._left(codes[2 * i : 2 * i + 2], at) for i in range(self.tiles)]
            for column in columns_:
                words = early[4 * at : 4 * at + 8] or self.x(column, (at, at + 1), place, inside)
                halves = words[:4], words[4:]
                if not self.floats:
                    x_sums[column] = add_bytes(words, x_sums[column])
                    halves = tuple(map(_transposed, halves))
                right = list(zip(*halves, strict=True))
                for tile in range(self.tiles):
                    first = (tile * len(columns_) + column) * self.places * 4
                    for i in range(PLACES):
                        mine = slice(start := first + i % self.places * 4, start + 4)
                        sums[mine] = mma(MMA, left[tile][i], list(right[i]), sums[mine])
        return sums, x_sums

    def _left(self, codes: list[list[Any]], at: int) -> list[list[Any]]:
        """What mma takes of 16 rows of the weight for two words of each row, by place."""
        moved = self.places == 1
        return [
            [_of_place(row[at + i], place, moved=moved) for i in range(2) for row in codes]
            for place in range(PLACES)
        ]

    def run(self) -> None:
        ring = [self.fetch(i) for i in range(self.config.ahead)]
        early = self.finish.early()
        if self.floats:
            self.finish.rows_of_x = quantise_rows(
                self.at,
                self.m,
                self.k,
                dtype=self.dtypes["x"],
                warps=self.config.warps,
                eps=self.static.eps,
            )
        self._show(*self._sums(ring))
        gpu.barrier()
        self.finish.run(early)

    def _zeros(self) -> tuple[list[Any], list[Any]]:
        """Sums, and sums of x, to begin with."""
        number = 4 * self.places * self.tiles * len(self.x_at)
        return [word(0)] * number, [word(0)] * len(self.x_at)

    def _sums(self, ring: list[list[Any]]) -> tuple[list[Any], list[Any]]:
        """The sums of a warp, whose first turns are asked for."""
        ahead, rounds = self.config.ahead, self.rounds
        (sums, x_sums), width = self._zeros(), len(ring[0])
        number = len(sums)
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
                    sums, x_sums = self.multiply(ring[s], sums, x_sums, here)
                    ring[s] = self.fetch(arith.addi(here, word(ahead)))
                return flat(ring, sums, x_sums)

            ring, sums, x_sums = state(list(loop.results))
        for turn in range(repeats * ahead, rounds):
            sums, x_sums = self.multiply(ring[turn % ahead], sums, x_sums, turn)
            if turn + ahead < rounds:
                ring[turn % ahead] = self.fetch(turn + ahead)
        return sums, x_sums

    def _show(self, sums: list[Any], x_sums: list[Any]) -> None:
        """Writes a warp's sums, for each row of x those of the weight and that of x itself."""
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
        if self.floats:
            return
        address = further(self.at["parts"], times(arith.addi(first, times(self.row, line)), 4))
        for j, total in enumerate(x_sums):
            for mask in (1, 2):
                text = f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, 0xffffffff;"
                total = arith.addi(total, asm(text, "r", total, effects=True))
            offset = 4 * (MMA_COLUMNS * j * line + self.config.tile_n)
            with mgpu_utils.when(less(self.across, 1)):
                asm(f"st.shared.u32 [$0 + {offset}], $1;", "", address, total)


def _of_place(codes: Any, place: int, *, moved: bool) -> Any:
    """The codes at one place of each byte; moved: down to its beginning."""
    if not moved:
        return arith.andi(codes, word(0x03030303 << 2 * place))
    down = arith.shrui(codes, word(2 * place)) if place else codes
    return arith.andi(down, word(0x03030303))


def _transposed(four: list[Any]) -> list[Any]:
    """Of 16 bytes in four words those that lie 4 apart, as four words."""
    low = [asm("prmt.b32 $0, $1, $2, 0x5140;", "r", *four[i : i + 2]) for i in (0, 2)]
    high = [asm("prmt.b32 $0, $1, $2, 0x7362;", "r", *four[i : i + 2]) for i in (0, 2)]
    return [
        asm(f"prmt.b32 $0, $1, $2, {order};", "r", *pair)
        for pair in (low, high)
        for order in ("0x5410", "0x7632")
    ]
