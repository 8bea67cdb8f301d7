"""Zeros where no id is, and meanwhile the order of the ids: what a thread does, told in PTX.

Zeros take the time. A block has some rows side by side, writes tiles of them, and has noted on chip
which of them are ids', for those are written anyway. All ids lie in the registers of each block,
and between two tiles it counts for one of them how many come before: its place in the order. The
interpreter, which knows no lanes, writes zeros alone. Imported only by embedding_backward.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, gpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.device import ACCESS_BYTES, THREADS, WARPS
from pallas_kernels.embedding_sums_lanes import RUN, Order, Sums
from pallas_kernels.lane_arithmetic import over_block
from pallas_kernels.lane_code import (
    accesses_of_thread,
    asm,
    by_thread,
    equal,
    further,
    less,
    load,
    load_shared,
    load_shared_part,
    only_where,
    store,
    store_shared,
    times,
    times_long,
    word,
)

BLOCKS = 3  # a multiprocessor, whose registers no more have room in with MOST_COUNTED ids
MOST_COUNTED = 2**14  # ids, of which each thread of a block has 128 in registers
MOST_NOTED = 2**15  # rows of a block: a byte on chip for each
NO_KEY = 2**32 - 1  # above all keys
TILE_BYTES = 16 * 1024
STORES_AT_ONCE = 8  # of a thread between two looks at the end
BOARDS = 4  # of words, one a warp
WORDS = ACCESS_BYTES // 4  # ids that are loaded at once


class Keys(NamedTuple):
    """An id below `count` and a place below 2^shift in one number: in order, and no two alike."""

    count: int
    shift: int

    @property
    def fit(self) -> bool:
        return self.count << self.shift <= NO_KEY


class Zeros(NamedTuple):
    """The array that `sums` are written to, by so many blocks; counted: with the ids' order."""

    sums: Sums
    keys: Keys
    blocks: int
    counted: bool

    @property
    def ids(self) -> int:
        """That are counted."""
        return self.sums.rows if self.counted else 0

    @property
    def row_bytes(self) -> int:
        return self.sums.width * jnp.dtype(self.sums.out).itemsize

    @property
    def share(self) -> int:
        """Rows of a block; the last ones may have fewer."""
        return -(-self.sums.count // self.blocks)

    @property
    def tile(self) -> int:
        """Rows."""
        return max(1, min(self.share, TILE_BYTES // self.row_bytes))

    @property
    def noted(self) -> bool:
        """Whether zeros are written only where no id is."""
        return self.counted and self.share <= MOST_NOTED

    @property
    def mine(self) -> int:
        """Ids that a block counts."""
        return -(-self.ids // self.blocks)


def zeros_and_order(
    zeros: Zeros, ids: jax.Array, dy: jax.Array, *, interpret: bool
) -> list[jax.Array]:
    """Zeros but for rows of which `ids` [M] has the number, where anything may be, and, if ids are
    counted, what `Order` has; else zeros everywhere, and of `Order` the arrivals alone.

    dy is not read: XLA shall not run this, and keep the zeros, long before there is one.
    """
    sums = zeros.sums
    if zeros.counted:
        ids = jnp.pad(ids, (0, -len(ids) % WORDS))
    order = sums.order_shapes._asdict()
    names = Order._fields if zeros.counted else ("arrivals",)
    shapes = {"out": jax.ShapeDtypeStruct((sums.count, sums.width), jnp.dtype(sums.out))}
    shapes |= {name: jax.ShapeDtypeStruct(order[name], jnp.int32) for name in names}

    def body(ids_ref, dy_ref, *refs, **scratch):
        del dy_ref
        if interpret:
            for ref in refs:
                ref[...] = jnp.zeros(ref.shape, ref.dtype)
            return
        every = {"given": ids_ref, **dict(zip(shapes, refs, strict=True)), **scratch}
        block = lax.axis_index("block")
        by_thread(lambda at, block: Block(zeros, at, block).run(), every, block)

    scratch = {name: plgpu.SMEM((size,), jnp.uint8) for name, size in shared_bytes(zeros).items()}
    return _compat.kernel(
        body,
        name="embedding_backward_zeros",
        out_type=list(shapes.values()),
        grid=(1 if interpret else zeros.blocks,),
        grid_names=("block",),
        scratch_types={} if interpret else scratch,
        interpret=interpret,
    )(ids, dy)


def shared_bytes(zeros: Zeros) -> dict[str, int]:
    """What a block has on chip, by name."""
    if not zeros.counted:
        return {}
    return {
        "boards": BOARDS * WARPS * 4,
        "noted": -(-zeros.share // ACCESS_BYTES) * ACCESS_BYTES if zeros.noted else ACCESS_BYTES,
        "own": zeros.mine * 4,
    }


class Block:
    """What a thread of a block does.

    at: addresses of the ids [M], in whole accesses ("given"), of out, and of what `Order` has; on
    chip of boards, of its own keys, and of a byte for each of its rows: whether an id is there.
    block: which one.
    """

    def __init__(self, zeros: Zeros, at: Mapping[str, Any], block: Any):
        self.zeros, self.at, self.block = zeros, at, block
        self.thread, end = mgpu_utils.thread_idx(), word(zeros.sums.count)
        self.leads = less(self.thread, 1)
        self.first = arith.minui(times(block, zeros.share), end)  # of the block's rows
        self.count = arith.minui(arith.subi(end, self.first), word(zeros.share))

    def run(self) -> None:
        z, every = self.zeros, []
        ids, own = self._ids(), self._own()
        # Memory is busy with the first tile while the ids are on their way and looked at
        self._tile(word(0), noted=False)
        if z.counted:
            self._keep_own_keys(own)
            every = [self._key(*each) for each in ids]
            self._note(every)
            self._mark_the_end()
        else:
            self._clear_all_arrivals()

        @mgpu_utils.fori(word(max(-(-z.share // z.tile) - 1, z.mine)), [])
        def each(i, carry):
            if z.counted:
                self._find_place(i, every)
            self._tile(arith.addi(i, word(1)), noted=z.noted)
            return carry

    def _tile(self, i: Any, *, noted: bool) -> None:
        """The block's tile i, if there is one; noted: only where no id is."""
        z = self.zeros
        across = z.row_bytes // ACCESS_BYTES
        steps = -(-z.tile * across // THREADS)
        at_once = min(STORES_AT_ONCE, steps)
        before = times(i, z.tile)
        with mgpu_utils.when(less(before, self.count)):
            first = arith.addi(self.first, before)
            start = further(self.at["out"], times_long(first, z.row_bytes))
            rows = arith.minui(arith.subi(self.count, before), word(z.tile))

            @mgpu_utils.fori(word(-(-steps // at_once)), [])
            def some(turn, carry):
                for j in range(at_once):
                    place = arith.addi(times(turn, at_once * THREADS), word(j * THREADS))
                    place = arith.addi(place, self.thread)
                    row = arith.divui(place, word(across))
                    there = less(row, rows)
                    if noted:
                        row = arith.addi(before, arith.minui(row, arith.subi(rows, word(1))))
                        of_id = load_shared_part(further(self.at["noted"], row), 0, 1)
                        there = arith.andi(there, less(of_id, 1))
                    address = further(start, times_long(place, ACCESS_BYTES))
                    only_where(there, store, address, 0, [word(0)] * 4)
                return carry

    def _ids(self) -> list[tuple[Any, Any, Any]]:
        """The thread's ids, their places, and whether there is one (None: there is)."""
        z, found = self.zeros, []
        for access, inside in accesses_of_thread(-(-z.ids // WORDS), THREADS):
            address = further(self.at["given"], times_long(access, ACCESS_BYTES))
            for i, which in enumerate(load(address, 0, WORDS)):
                place = arith.addi(times(access, WORDS), word(i))
                there = inside
                if z.ids % WORDS:
                    there = less(place, z.ids)
                    there = there if inside is None else arith.andi(there, inside)
                found.append((which, place, there))
        return found

    def _own(self) -> list[tuple[Any, ...]]:
        """Of the ids that the block counts those that the thread brings on chip: which of them, the
        id, its place, and whether there is one (None: there is).
        """
        found = []
        for i, inside in accesses_of_thread(self.zeros.mine, THREADS):
            place = arith.addi(self.block, times(i, self.zeros.blocks))
            place = arith.minui(place, word(self.zeros.ids - 1))
            which = load(further(self.at["given"], times_long(place, 4)), 0)
            found.append((i, which, place, inside))
        return found

    def _key(self, which: Any, place: Any, there: Any = None) -> Any:
        """Of an id, or one above all; there: whether there is one (None: there is)."""
        which = arith.minsi(arith.maxsi(which, word(0)), word(self.zeros.sums.count - 1))
        key = arith.addi(times(which, 1 << self.zeros.keys.shift), place)
        return key if there is None else arith.select(there, key, word(NO_KEY))

    def _id_of(self, key: Any) -> Any:
        return arith.divui(key, word(1 << self.zeros.keys.shift))

    def _keep_own_keys(self, own: list[tuple[Any, ...]]) -> None:
        for i, which, place, inside in own:
            to = further(self.at["own"], times(i, 4))
            only_where(inside, asm, "st.shared.u32 [$0], $1;", "", to, self._key(which, place))

    def _note(self, every: list[Any]) -> None:
        """On chip, which of the block's rows are ids'."""
        noted = -(-self.zeros.share // ACCESS_BYTES) if self.zeros.noted else 0
        for place, inside in accesses_of_thread(noted, THREADS):
            to = further(self.at["noted"], times(place, ACCESS_BYTES))
            only_where(inside, store_shared, to, 0, 4 * [word(0)])
        gpu.barrier()
        for key in every if noted else []:
            row = arith.subi(self._id_of(key), self.first)
            to = further(self.at["noted"], row)
            only_where(less(row, self.count), asm, "st.shared.u8 [$0], $1;", "", to, word(1))
        gpu.barrier()

    def _mark_the_end(self) -> None:
        """Of the order, behind the last row."""
        z = self.zeros
        more = (z.sums.runs + 1) * RUN - z.ids
        place = arith.addi(self.thread, word(z.ids))
        with mgpu_utils.when(arith.andi(less(self.block, 1), less(self.thread, more))):
            self._put("ids", place, word(z.sums.count))
            self._put("places", place, word(0))

    def _put(self, name: str, place: Any, value: Any) -> None:
        to = further(self.at[name], times_long(place, 4))
        asm("st.global.u32 [$0], $1;", "", to, value)

    def _less(self, every: list[Any], key: Any, board: Any) -> Any:
        """How many keys come before one; board: which."""
        i32, count = ir.IntegerType.get_signless(32), word(0)
        for each in every:
            count = arith.addi(count, arith.extui(i32, less(each, key)))
        board = further(self.at["boards"], times(board, 4 * WARPS))
        return over_block([count], "add.s32", board, WARPS)[0]

    def _find_place(self, i: Any, every: list[Any]) -> None:
        """Of the id that the block counts i-th, if there is one, in the order."""
        z = self.zeros
        with mgpu_utils.when(less(arith.addi(self.block, times(i, z.blocks)), z.ids)):
            key = load_shared(further(self.at["own"], times(i, 4)), 0)
            # by turns in two places: no other barrier parts a count from the next
            at = self._less(every, key, arith.andi(i, word(1)))
            which = self._id_of(key)
            first = times(which, 1 << z.keys.shift)  # key of its id
            run, inner = (f(at, word(RUN)) for f in (arith.divui, arith.remui))
            with mgpu_utils.when(self.leads):
                self._put("ids", at, which)
                self._put("places", at, arith.subi(key, first))
            with mgpu_utils.when(equal(inner, word(0))):
                begin = self._less(every, first, word(2))
                only_where(self.leads, self._put, "begins", run, begin)
            last = arith.ori(equal(inner, word(RUN - 1)), equal(at, word(z.ids - 1)))
            with mgpu_utils.when(last):
                following = arith.addi(first, word(1 << z.keys.shift))
                end = self._less(every, following, word(3))
                only_where(self.leads, self._put, "ends", run, end)
                self._clear_arrivals(run, less(arith.addi(at, word(1)), end))

    def _clear_arrivals(self, run: Any, goes_on: Any) -> None:
        """Of a run whose last id goes on in the next."""
        count = 2 * self.zeros.sums.across
        with mgpu_utils.when(goes_on):
            for place, inside in accesses_of_thread(count, THREADS):
                index = arith.addi(times(run, count), place)
                only_where(inside, self._put, "arrivals", index, word(0))

    def _clear_all_arrivals(self) -> None:
        count = math.prod(self.zeros.sums.order_shapes.arrivals)
        step = self.zeros.blocks * THREADS

        @mgpu_utils.fori(word(-(-count // step)), [])
        def each(i, carry):
            index = arith.addi(times(self.block, THREADS), self.thread)
            index = arith.addi(index, times(i, step))
            only_where(less(index, count), self._put, "arrivals", index, word(0))
            return carry
