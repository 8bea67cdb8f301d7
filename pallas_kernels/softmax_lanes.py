"""Softmax of long rows among the blocks of a cluster, told in PTX.

A thread has 16 bytes side by side of every 16 * threads of its block's share. Numbers of 16 bits it
keeps two in a register, as they came: more rows are under way at a time than with float32 in twice
as many. Each thread sums exponentials around its own maximum, each warp joins what its threads
have, and sends it to every block of the cluster. The messages count themselves at the barrier of
the block that they go to, so a block waits once, and none goes before all that is sent to it has
come. The exponentials are then taken anew, with the sum in the exponent; those of float32 numbers
have stayed in the numbers' registers. The interpreter, which knows no lanes, checks only what
surrounds a block. Imported only by softmax.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.device import ACCESS_BYTES, LANES, THREADS, WARPS
from pallas_kernels.lane_arithmetic import (
    KINDS,
    bits,
    floats,
    halves_as_float32,
    hex_of,
    larger,
    number,
    over_warp,
)
from pallas_kernels.lane_code import (
    asm,
    by_thread,
    further,
    less,
    load,
    only_where,
    store_once,
    times,
    times_long,
    word,
)

MOST_WORDS = 64  # of a thread: registers
CLUSTERS, WARPGROUPS = (2, 4, 8), (1, 2, 4)
PAIR_BYTES = 8  # a maximum and a sum
PAIRS_AT = 16  # bytes of the board before its pairs: a barrier has 8
# Words of -inf, twice where two numbers are one
NOTHING = {"bfloat16": 0xFF80FF80, "float16": 0xFC00FC00, "float32": 0xFF800000}
LOWEST = float(jnp.finfo(jnp.float32).min)
# PTX of the sum x: of a row of -inf it is 0; a NaN stays
AT_LEAST_HALF = "max.NaN.f32 x, $1, 0f3F000000;"


def _each(dtype: Any) -> int:
    """Numbers of an access."""
    return ACCESS_BYTES // jnp.dtype(dtype).itemsize


def _share(width: int, dtype: Any, cluster: int) -> int:
    """Accesses of each block; the last may have fewer."""
    return -(-width // (_each(dtype) * cluster))


def takes(width: int, dtype: Any, cluster: int, warpgroups: int) -> bool:
    """Whether such blocks take rows of that width."""
    known = jnp.dtype(dtype).name in NOTHING and cluster in CLUSTERS and warpgroups in WARPGROUPS
    most = MOST_WORDS // 4 * warpgroups * THREADS
    return known and width % _each(dtype) == 0 and _share(width, dtype, cluster) <= most


def default_warpgroups(width: int, dtype: Any, cluster: int) -> int:
    """Of a block; 0: such rows are not taken here.

    Two, H200, us of 2 and 4: bfloat16 64 x 131072 11.6 and 11.5, 1 x 32064 2.3 and 2.6; float32
    19.0 and 20.5, 2.3 and 2.5, 16 x 128256 7.7 and 7.5.
    """
    return next((n for n in (2, 4) if takes(width, dtype, cluster, n)), 0)


def softmax_of_rows(
    x: jax.Array,
    *,
    factor: float,
    cluster: int,
    warpgroups: int,
    plain: Callable[[jax.Array], jax.Array],
    interpret: bool,
) -> jax.Array:
    """2 ** (factor * x) of x [M, S], over its sum of each row; what `takes` takes.

    plain: row [S] -> [S], for the interpreter, which knows no lanes.
    """
    count, width = x.shape
    dtype = x.dtype.name

    def body(x_ref, out_ref, **scratch):
        row = lax.axis_index("block")
        if interpret:
            out_ref.at[row][...] = plain(x_ref.at[row][...])
            return
        every = {"x": x_ref, "out": out_ref, **scratch}

        def softmax(at: Any, row: Any, rank: Any) -> None:
            Block(at, row, rank, dtype, factor, width, cluster, warpgroups * WARPS).run()

        by_thread(softmax, every, row, lax.axis_index("rank"))

    how: dict[str, Any] = {}
    if not interpret:
        how["scratch_types"] = {"board": plgpu.SMEM(board_shape(cluster, warpgroups), jnp.float32)}
        how |= {"cluster": (cluster,), "cluster_names": ("rank",)}
        if warpgroups > 1:
            how |= {"num_threads": warpgroups, "thread_name": "warpgroup"}
    return _compat.kernel(
        body,
        name="scale_softmax",
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(count,),
        grid_names=("block",),
        interpret=interpret,
        **how,
    )(x)


def board_shape(cluster: int, warpgroups: int) -> tuple[int]:
    """Of float32: a barrier, and a pair of each warp of the cluster."""
    return ((PAIRS_AT + PAIR_BYTES * cluster * warpgroups * WARPS) // 4,)


class Block:
    """What a thread of a block does.

    at: addresses of x and out [M, S] and, on chip, of a board of `board_shape`. row, rank: which
    row, and which block of its cluster. warps: of the block.
    """

    def __init__(
        self,
        at: Mapping[str, Any],
        row: Any,
        rank: Any,
        dtype: str,
        factor: float,
        width: int,
        cluster: int,
        warps: int,
    ):
        self.board, self.rank, self.dtype, self.factor = at["board"], rank, dtype, hex_of(factor)
        self.cluster, self.warps = cluster, warps
        thread = mgpu_utils.thread_idx()
        self.warp, self.lane = (f(thread, word(LANES)) for f in (arith.divui, arith.remui))
        self.first = less(thread, 1)
        share, accesses = _share(width, dtype, cluster), width // _each(dtype)
        start = arith.addi(times(rank, share), thread)
        where = times(start, ACCESS_BYTES)
        row_at = times_long(row, jnp.dtype(dtype).itemsize * width)
        self.ours, self.results = (further(further(at[n], row_at), where) for n in ("x", "out"))
        self.mine = []  # bytes to each access from the first, and whether there is one (None: yes)
        for place in range(0, share, warps * LANES):
            rules = []
            if place + warps * LANES > share:
                rules.append(less(thread, share - place))
            if share * cluster > accesses:
                rules.append(less(arith.addi(start, word(place)), accesses))
            inside = functools.reduce(arith.andi, rules) if rules else None
            self.mine.append((place * ACCESS_BYTES, inside))

    def run(self) -> None:
        self._prepare()
        words = [self._load(offset, inside) for offset, inside in self.mine]
        top = self._top(words)
        if self.dtype == "float32":
            exponentials, total = self._exponentials(words, top)
            results = self._scaled(exponentials, top, *self._of_row(top, total))
        else:
            total = self._sum_of_thread(words, top)
            results = self._anew(words, *self._of_row(top, total))
        for (offset, inside), four in zip(self.mine, results, strict=True):
            only_where(inside, store_once, further(self.results, word(offset)), four)

    def _of_row(self, top: Any, total: Any) -> tuple[Any, Any]:
        """The row's maximum, and its sum around it, of what a thread has."""
        self._send(*self._join(top, total))
        return self._received()

    def _load(self, offset: int, inside: Any) -> list[Any]:
        """Four words, of -inf where there are none."""
        if inside is None:
            return load(self.ours, offset, 4, once=True)
        there = arith.extui(ir.IntegerType.get_signless(32), inside)
        clear = " ".join(f"mov.u32 ${i}, {NOTHING[self.dtype]:#x};" for i in range(4))
        text = f"{{ .reg .pred p; setp.ne.u32 p, $5, 0; {clear} "
        text += f"@p ld.global.nc.L1::no_allocate.v4.u32 {{$0, $1, $2, $3}}, [$4 + {offset}]; }}"
        return asm(text, "rrrr", self.ours, there, effects=True)

    def _top(self, words: list[list[Any]]) -> Any:
        """The maximum of the thread's numbers, finite if all are -inf."""
        kind = KINDS.get(self.dtype, "f32")
        largest = functools.reduce(
            lambda a, b: asm(f"max.{kind} $0, $1, $2;", "r", a, b), [x for y in words for x in y]
        )
        return functools.reduce(larger, floats(largest, self.dtype), number(LOWEST))

    def _exponentials(self, words: list[list[Any]], top: Any) -> tuple[list[list[Any]], Any]:
        """Those of float32 numbers, and their sum: they take no more registers than the numbers."""
        found = [[self._exponential(floats(x, self.dtype)[0], top) for x in four] for four in words]
        return found, functools.reduce(arith.addf, [x for four in found for x in four])

    def _scaled(
        self, exponentials: list[list[Any]], top: Any, row_top: Any, row_sum: Any
    ) -> Iterator[list[Any]]:
        """The words of exponentials around `top` over the row's sum."""
        inverse = asm(f"{{ .reg .f32 x; {AT_LEAST_HALF} rcp.approx.ftz.f32 $0, x; }}", "f", row_sum)
        by = self._around(row_top, top, inverse)
        for four in exponentials:
            yield [bits(arith.mulf(x, by)) for x in four]

    def _sum_of_thread(self, words: list[list[Any]], top: Any) -> Any:
        """Of the exponentials of its numbers."""
        zero, total = word(0), number(0)
        for x in (x for four in words for x in four):
            total = arith.addf(total, self._sum(x, top, zero))
            zero = self._zero(total)
        return total

    def _anew(self, words: list[list[Any]], top: Any, row_sum: Any) -> Iterator[list[Any]]:
        """The words of the numbers' exponentials over the row's sum."""
        text = f"{{ .reg .f32 x; {AT_LEAST_HALF} lg2.approx.ftz.f32 x, x; "
        less_sum = asm(text + "mul.f32 $0, x, 0fBF800000; }", "f", row_sum)
        zero = self._zero(row_sum)
        for four in words:
            done = []
            for x in four:
                done.append(self._quotients(x, top, less_sum, zero))
                zero = self._zero(done[-1])
            yield done

    def _zero(self, after: Any) -> Any:
        """The sign of a number that has none, so that the compiler waits for it, and has one word
        as float32 at a time. All of them would be twice as many registers; two at a time leave room
        for three blocks and not four (H200: 64 x 151936 13.1 us by one, 14.5 by two).
        """
        return asm("{ .reg .b32 x; mov.b32 x, $1; shr.u32 $0, x, 31; }", "r", after)

    def _halves(self, zero: str) -> str:
        """PTX that declares a and b, float32: the numbers of word $1; `zero` is the operand of
        `_zero`.
        """
        if self.dtype == "bfloat16":
            return (
                f".reg .b32 a, b; prmt.b32 a, $1, {zero}, 0x1044; prmt.b32 b, $1, {zero}, 0x3244; "
            )
        text = f".reg .f32 a, b; .reg .b32 w; xor.b32 w, $1, {zero}; "
        return text + halves_as_float32("w", KINDS[self.dtype])

    def _sum(self, x: Any, top: Any, zero: Any) -> Any:
        """Of the exponentials of a word's numbers."""
        text = f"{{ {self._halves('$3')}"
        for y in ("a", "b"):
            text += f"sub.f32 {y}, {y}, $2; mul.f32 {y}, {y}, {self.factor}; "
            text += f"ex2.approx.ftz.f32 {y}, {y}; "
        return asm(text + "add.f32 $0, a, b; }", "f", x, top, zero)

    def _quotients(self, x: Any, top: Any, less_sum: Any, zero: Any) -> Any:
        """A word of the exponentials of a word's numbers over the row's sum, minus whose logarithm
        is `less_sum`.
        """
        kind = KINDS[self.dtype]
        text = f"{{ {self._halves('$4')}"
        for y in ("a", "b"):
            text += f"sub.f32 {y}, {y}, $2; fma.rn.f32 {y}, {y}, {self.factor}, $3; "
            text += f"ex2.approx.ftz.f32 {y}, {y}; "
        return asm(text + f"cvt.rn.{kind}.f32 $0, b, a; }}", "r", x, top, less_sum, zero)

    def _join(self, top: Any, total: Any) -> tuple[Any, Any]:
        """What the lanes of a warp have."""
        all_top = over_warp(top, "max.f32")
        return all_top, over_warp(self._around(all_top, top, total), "add.f32")

    def _around(self, other: Any, top: Any, total: Any) -> Any:
        """A sum around `top`, around another maximum."""
        return arith.mulf(self._exponential(top, other), total)

    def _exponential(self, x: Any, top: Any) -> Any:
        """Of a number."""
        text = f"{{ .reg .f32 x; sub.f32 x, $1, $2; mul.f32 x, x, {self.factor}; "
        return asm(text + "ex2.approx.ftz.f32 $0, x; }", "f", x, top)

    def _prepare(self) -> None:
        """The barrier of this block's messages, and half of a meeting: `_send` has the other."""
        size_bytes = PAIR_BYTES * self.cluster * self.warps
        with mgpu_utils.when(self.first):
            text = "mbarrier.init.shared::cta.b64 [$0], 1; "
            text += f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size_bytes}; "
            asm(text + "fence.mbarrier_init.release.cluster;", "", self.board)
        asm("barrier.cluster.arrive.relaxed.aligned;", "")

    def _send(self, top: Any, total: Any) -> None:
        """What a warp has, to each block of the cluster, whose barriers are ready by now."""
        asm("barrier.cluster.wait.aligned;", "")
        which = arith.addi(times(self.rank, self.warps), self.warp)
        place = further(self.board, arith.addi(times(which, PAIR_BYTES), word(PAIRS_AT)))
        text = "{ .reg .b32 a, b; mapa.shared::cluster.u32 a, $0, $2; "
        text += "mapa.shared::cluster.u32 b, $1, $2; st.async.weak.shared::cluster."
        text += "mbarrier::complete_tx::bytes.v2.f32 [a], {$3, $4}, [b]; }"
        with mgpu_utils.when(less(self.lane, self.cluster)):
            asm(text, "", place, self.board, self.lane, top, total)

    def _received(self) -> tuple[Any, Any]:
        """The row's maximum, and its sum."""
        text = "{ .reg .pred p; again: "
        text += "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$0], 0; "
        asm(text + "@!p bra again; }", "", self.board)
        count = self.cluster * self.warps  # a power of two
        place = arith.remui(self.lane, word(min(count, LANES)))
        address = further(self.board, times(place, PAIR_BYTES))
        pairs = []
        for start in range(0, count, LANES):
            text = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {PAIRS_AT + PAIR_BYTES * start}];"
            pairs.append(asm(text, "ff", address, effects=True))
        largest = over_warp(functools.reduce(larger, [top for top, _ in pairs]), "max.f32")
        sums = [self._around(largest, *pair) for pair in pairs]
        total = over_warp(functools.reduce(arith.addf, sums), "add.f32")
        if count < LANES:  # lanes have read each pair so often
            total = asm(f"mul.f32 $0, $1, {hex_of(count / LANES)};", "f", total)
        return largest, total
