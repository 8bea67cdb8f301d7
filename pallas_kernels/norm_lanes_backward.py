"""The backward pass of LayerNorm and RMSNorm of rows of 16-bit numbers: what a thread does, in PTX.

A block goes over some rows after others, or each of its warps over narrow ones. A thread has the
same columns of every row, 8 numbers side by side of every 8 * threads: their shares of d_weight and
d_bias stay in its registers until the end, and so does the weight. It asks for its numbers of the
next rows ahead of time, in a ring on chip where no other thread reads them, so that nobody waits
for anybody but for the sums over a row. Shares of the blocks are added by XLA in a fixed order.
The interpreter, which knows no lanes, checks only what surrounds a block.
Imported only by layer_norm.py and rms_norm.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith, gpu
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.device import ACCESS_BYTES, LANES, THREADS, WARPS
from pallas_kernels.lane_arithmetic import (
    DTYPES,
    EACH,
    KINDS,
    all_floats,
    bits,
    floats,
    fused,
    number,
    reciprocal_root,
    sum_of_squares,
    words_of_floats,
)
from pallas_kernels.lane_code import (
    accesses_of_thread,
    all_or_nothing,
    asm,
    by_thread,
    copy_ahead,
    further,
    less,
    load,
    load_shared,
    only_where,
    store_once,
    times,
    times_long,
    word,
)
from pallas_kernels.norm_lanes import Kind, over_row, squares_where

# Of a thread: with their sums for a LayerNorm's weight and bias, 32 numbers take 234 registers
MOST_NUMBERS = 32
# LayerNorm's of 8192 rows, H200: 3072 wide by 4 warps, two blocks a multiprocessor, 43.4 us, by 8
# and one 51.3; 4096 wide 58.5 and 52.8
MOST_OF_FOUR_WARPS = 3072
# On chip, of x and dy: of a row of 8192 a block asks for one ahead (105 us; with two or three 108
# to 117), of one of 4096 for three (52.8; with two 56.4, with seven 55.8)
RING_BYTES = 64 * 1024
MOST_AHEAD = 4
MOST_SUMS = 2  # of d_weight and d_bias


class Plan(NamedTuple):
    """warps: that share a row, one or all of a block's. ahead: rows on their way or read.
    blocks_per_sm: blocks a multiprocessor.
    """

    warps: int
    ahead: int
    blocks_per_sm: int

    @property
    def block_warps(self) -> int:
        return max(self.warps, WARPS)

    @property
    def rows(self) -> int:
        """Of a block at a time."""
        return self.block_warps // self.warps


def plan_of(width: int, dtype: Any) -> Plan | None:
    """None: such rows are not taken here."""
    if dtype not in DTYPES or width % EACH or width <= LANES * EACH:
        return None
    if width <= LANES * MOST_NUMBERS:
        return Plan(1, 2, 2)
    if width <= MOST_OF_FOUR_WARPS:
        return Plan(WARPS, MOST_AHEAD, 2)
    if width <= 2 * THREADS * MOST_NUMBERS:
        return Plan(2 * WARPS, min(MOST_AHEAD, RING_BYTES // (4 * width)), 1)
    return None


def gradients_of_rows(
    x: jax.Array,
    dy: jax.Array,
    weight: jax.Array,
    d_total: jax.Array | None = None,
    *,
    kind: Kind,
    biased: bool,
    plan: Plan,
    plain: Callable[..., tuple[jax.Array, ...]],
    num_sms: int,
    interpret: bool,
) -> tuple[jax.Array, list[jax.Array]]:
    """d_x [M, D] of x and dy [M, D] and a weight [D]; and float32 d_weight [D], and d_bias if
    `biased`. d_total [M, D] is added to d_x.

    plain: (row of x, of dy, weight) -> d_x, d_weight and, if biased, d_bias of that row, float32,
    for the interpreter, which knows no lanes.
    """
    count, width = x.shape
    sums = 1 + biased
    blocks = _blocks(pl.cdiv(count, plan.rows), num_sms * plan.blocks_per_sm)
    arrays = {"x": x, "dy": dy} | ({} if d_total is None else {"d_total": d_total})
    names = (*arrays, "weight")
    dtypes = {"x": x.dtype.name, "weight": weight.dtype.name}

    def body(*refs, **scratch):
        *given, out_ref, shares_ref = refs
        given = dict(zip(names, given, strict=True))
        if interpret:
            _plainly(given, out_ref, shares_ref, plain, blocks)
            return
        every = {**given, "out": out_ref, "shares": shares_ref, **scratch}

        def gradients(at: Any, block: Any) -> None:
            Block(at, block, tuple(arrays), dtypes, kind, x.shape, plan, blocks, sums).run()

        by_thread(gradients, every, lax.axis_index("block"))

    how: dict[str, Any] = {}
    if not interpret:
        how["scratch_types"] = {
            "ring": plgpu.SMEM((ring_bytes(plan, width, len(arrays)),), jnp.uint8),
            "board": plgpu.SMEM((4, plan.block_warps), jnp.float32),
        }
        if plan.block_warps > WARPS:
            how |= {"num_threads": plan.block_warps // WARPS, "thread_name": "warpgroup"}
    d_x, shares = _compat.kernel(
        body,
        name=f"{kind.name}{'' if d_total is None else '_residual'}_backward",
        out_type=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((sums, blocks, width), jnp.float32),
        ],
        grid=(blocks,),
        grid_names=("block",),
        interpret=interpret,
        **how,
    )(*arrays.values(), weight)
    return d_x, list(jnp.sum(shares, axis=1))


def _blocks(turns: int, most: int) -> int:
    """A few less than `most`, where that leaves one in a hundred turns less without a row.

    LayerNorm of 8192 x 8192, H200: 132 blocks 104.8 us, 128 103.9.
    """
    taken = lambda blocks: pl.cdiv(turns, blocks) * blocks  # noqa: E731
    least = min(range(most, most - most // 16 - 1, -1), key=taken)
    return min(turns, least if taken(least) < 0.99 * taken(most) else most)


def ring_bytes(plan: Plan, width: int, arrays: int) -> int:
    """On chip, for what all threads of a block have asked for; at the end for narrow rows' sums."""
    accesses = pl.cdiv(width // EACH, plan.warps * LANES)
    asked = plan.ahead * arrays * accesses * plan.block_warps * LANES * ACCESS_BYTES
    return asked if plan.warps > 1 else max(asked, MOST_SUMS * WARPS * 4 * width)


def _plainly(given, out_ref, shares_ref, plain, blocks: int) -> None:
    """What a block does, by plain(row of x, of dy, weight)."""
    block, count = lax.axis_index("block"), out_ref.shape[0]
    rows = block + blocks * jnp.arange(pl.cdiv(count, blocks))
    there, rows = rows < count, jnp.minimum(rows, count - 1)
    x, dy = (given[name][...][rows] for name in ("x", "dy"))
    d_x, *shares = jax.vmap(plain, (0, 0, None))(x, dy, given["weight"][...])
    if "d_total" in given:
        d_x += given["d_total"][...][rows].astype(jnp.float32)
    for i, row in enumerate(d_x.astype(out_ref.dtype)):

        @pl.when(there[i])
        def _(row=row, i=i):
            out_ref.at[rows[i]][...] = row

    for i, share in enumerate(shares):
        shares_ref.at[i, block][...] = jnp.sum(jnp.where(there[:, None], share, 0.0), axis=0)


class Block:
    """What a thread of a block does.

    at: addresses of x, dy, perhaps d_total, and out [M, D], of weight, of shares: float32 [sums,
    blocks, D]; on chip of ring: `ring_bytes`, and of board: float32 [4, warps]. block: which one,
    of these arrays'. arrays: the names of those that are read row by row.
    """

    def __init__(
        self,
        at: Mapping[str, Any],
        block: Any,
        arrays: tuple[str, ...],
        dtypes: Mapping[str, str],
        kind: Kind,
        shape: tuple[int, ...],
        plan: Plan,
        blocks: int,
        sums: int,
    ):
        self.at, self.block, self.arrays, self.dtypes = at, block, arrays, dtypes
        self.kind, self.plan, self.blocks, self.sums = kind, plan, blocks, sums
        self.count, self.width = shape
        self.dtype, self.thread = dtypes["x"], mgpu_utils.thread_idx()
        self.first, thread = block, self.thread  # of its rows
        if plan.warps == 1:
            warp, thread = (f(thread, word(LANES)) for f in (arith.divui, arith.remui))
            self.first = arith.addi(times(block, plan.rows), warp)
        self.mine = accesses_of_thread(self.width // EACH, plan.warps * LANES, thread)
        self.access_bytes = plan.block_warps * LANES * ACCESS_BYTES  # of all threads
        self.ring = further(at["ring"], times(self.thread, ACCESS_BYTES))

    def run(self) -> None:
        plan = self.plan
        weight = [self._weight(place) for place, _ in self.mine]
        for i in range(plan.ahead - 1):
            self._ask(word(i), word(i))
        rounds = pl.cdiv(self.count, self.blocks * plan.rows)
        totals = [number(0)] * (self.sums * EACH * len(self.mine))

        @mgpu_utils.fori(word(rounds), [word(0), *totals])
        def each_row(i, carry):
            slot, *totals = carry
            before = arith.select(less(slot, 1), word(plan.ahead), slot)
            # the row that is read last frees its place for the one that is asked for now
            self._ask(arith.addi(i, word(plan.ahead - 1)), arith.subi(before, word(1)))
            asm(f"cp.async.wait_group {plan.ahead - 1};", "", effects=True)
            totals = self._gradients(i, slot, weight, totals)
            slot = arith.addi(slot, word(1))
            return [arith.select(less(slot, plan.ahead), slot, word(0)), *totals]

        self._write_shares(list(each_row.results)[1:])

    def _row(self, i: Any) -> tuple[Any, Any]:
        """Row i of the thread's, the last of all where there is none, and whether there is one."""
        row = arith.addi(self.first, times(i, self.blocks * self.plan.rows))
        return arith.minui(row, word(self.count - 1)), less(row, self.count)

    def _weight(self, place: Any) -> list[Any]:
        """The words of eight numbers."""
        held = self.dtypes["weight"]
        offsets = (0, ACCESS_BYTES) if held == "float32" else (0,)
        address = further(self.at["weight"], times(place, ACCESS_BYTES * len(offsets)))
        return [x for i in offsets for x in load(address, i, 4)]

    def _weighed(self, dy: list[Any], weight: list[Any]) -> list[Any]:
        w = all_floats(weight, self.dtypes["weight"])
        w = [arith.addf(number(1), x) for x in w] if self.kind.zero_centered else w
        return list(map(arith.mulf, dy, w))

    def _slot_at(self, slot: Any) -> Any:
        return further(
            self.ring, times(slot, len(self.arrays) * len(self.mine) * self.access_bytes)
        )

    def _in_slot(self, array: int) -> list[int]:
        """How far in a slot the thread's accesses of an array lie."""
        first = array * len(self.mine)
        return [(first + j) * self.access_bytes for j in range(len(self.mine))]

    def _ask(self, i: Any, slot: Any) -> None:
        """For the thread's numbers of its row i; for zeros where there are none."""
        row, there = self._row(i)
        start, target = times_long(row, 2 * self.width), self._slot_at(slot)
        for array, name in enumerate(self.arrays):
            source = further(self.at[name], start)
            for offset, (place, inside) in zip(self._in_slot(array), self.mine, strict=True):
                size = all_or_nothing(there if inside is None else arith.andi(there, inside))
                copy_ahead(target, further(source, times(place, ACCESS_BYTES)), offset, 0, size)
        asm("cp.async.commit_group;", "", effects=True)

    def _gradients(self, i: Any, slot: Any, weight: list[Any], totals: list[Any]) -> list[Any]:
        """Writes those of a row, and adds to its columns' sums."""
        at = self._slot_at(slot)
        words = [
            [load_shared(at, offset, 4) for offset in self._in_slot(array)]
            for array in range(len(self.arrays))
        ]
        x, dy, *more = [[all_floats(four, self.dtype) for four in of_array] for of_array in words]
        g = list(map(self._weighed, dy, weight))
        mean_of_g: Any = None
        if self.kind.name == "rms_norm":
            squares = sum_of_squares([x for four in words[0] for x in four], KINDS[self.dtype])
            # by turns in two places: no other barrier parts a row's sums from the next one's
            which = times(arith.andi(i, word(1)), 2)
            squares, products = self._over_row([squares, self._along(x, g)], which)
        else:
            total = self._sum(x)
            mean = arith.mulf(self._over_row([total], word(0))[0], number(1 / self.width))
            x = [[arith.subf(n, mean) for n in eight] for eight in x]
            squares = number(0)
            for (_, inside), eight in zip(self.mine, x, strict=True):
                squares = squares_where(inside, eight, squares)
            # in other places than the mean's, whose barrier parts these sums from the next row's
            values = [squares, self._along(x, g), self._sum(g)]
            squares, products, of_g = self._over_row(values, word(1))
            mean_of_g = arith.mulf(of_g, number(1 / self.width))
        root = reciprocal_root(squares, self.width, self.kind.eps)
        # d_x = root g - root mean(g) - x root^3 mean(g x)
        along = arith.mulf(arith.mulf(root, root), arith.mulf(root, products))
        along = arith.mulf(along, number(-1 / self.width))
        offset = number(0) if mean_of_g is None else arith.mulf(mean_of_g, root)
        row, there = self._row(i)
        target = further(self.at["out"], times_long(row, 2 * self.width))
        for j, (place, inside) in enumerate(self.mine):
            d_x = [arith.subf(arith.mulf(root, n), offset) for n in g[j]]
            d_x = [fused(n, along, d) for n, d in zip(x[j], d_x, strict=True)]
            if more:
                d_x = list(map(arith.addf, d_x, more[0][j]))
            inside = there if inside is None else arith.andi(there, inside)
            address = further(target, times(place, ACCESS_BYTES))
            only_where(inside, store_once, address, words_of_floats(d_x, self.dtype))
        h = [arith.mulf(n, root) for eight in x for n in eight]
        d = [n for eight in dy for n in eight]
        of_weight, of_bias = totals[: len(d)], totals[len(d) :]
        return [*map(fused, h, d, of_weight), *map(arith.addf, d, of_bias)]

    def _sum(self, numbers: list[list[Any]]) -> Any:
        total = number(0)
        for eight in numbers:
            for n in eight:
                total = arith.addf(total, n)
        return total

    def _along(self, x: list[list[Any]], g: list[list[Any]]) -> Any:
        total = number(0)
        for eights in zip(x, g, strict=True):
            for n, d in zip(*eights, strict=True):
                total = fused(n, d, total)
        return total

    def _over_row(self, values: list[Any], which: Any) -> list[Any]:
        """The sums of all threads that share the row; which: of the board's lines the first."""
        return over_row(values, self.at["board"], which, self.plan.warps)

    def _write_shares(self, totals: list[Any]) -> None:
        """The block's sums; where each warp has rows of its own, by way of the ring."""
        if self.plan.warps > 1:
            self._write(totals, "st.global.v4.b32", self._shares_at, self.mine)
            return
        asm("cp.async.wait_group 0;", "", effects=True)
        gpu.barrier()
        line_bytes, warp = 4 * self.width, arith.divui(self.thread, word(LANES))

        def line_of(s: int) -> Any:
            return further(self.at["ring"], times(arith.addi(warp, word(WARPS * s)), line_bytes))

        self._write(totals, "st.shared.v4.b32", line_of, self.mine)
        gpu.barrier()
        mine, sums = accesses_of_thread(self.width // EACH, THREADS), []
        for s in range(self.sums):
            for place, _ in mine:
                column = further(self.at["ring"], times(place, 4 * EACH))
                for i in (0, ACCESS_BYTES):
                    lines = [
                        load_shared(column, (WARPS * s + w) * line_bytes + i, 4)
                        for w in range(WARPS)
                    ]
                    for words in zip(*lines, strict=True):
                        found = [floats(x, "float32")[0] for x in words]
                        sums.append(functools.reduce(arith.addf, found))
        self._write(sums, "st.global.v4.b32", self._shares_at, mine)

    def _shares_at(self, s: int) -> Any:
        start = times_long(arith.addi(self.block, word(s * self.blocks)), 4 * self.width)
        return further(self.at["shares"], start)

    def _write(
        self, totals: list[Any], how: str, line_of: Callable[[int], Any], mine: list[Any]
    ) -> None:
        """Each sum's numbers of the accesses `mine` to its line."""
        for s in range(self.sums):
            line = line_of(s)
            for j, (place, inside) in enumerate(mine):
                eight = totals[EACH * (s * len(mine) + j) :][:EACH]
                address = further(line, times(place, 4 * EACH))
                for i in range(0, EACH, 4):
                    text = f"{how} [$0 + {4 * i}], {{$1, $2, $3, $4}};"
                    only_where(inside, asm, text, "", address, *map(bits, eight[i : i + 4]))
