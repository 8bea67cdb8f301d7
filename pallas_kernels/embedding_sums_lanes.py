"""Sums of rows by id, in the order of the ids: what a thread does, told in PTX.

A thread has RUN places of the order, and of their rows the piece of 16 bytes that it writes. It
asks for all of them before it adds up the first. A sum of which it has all rows it writes, and of
an id that ends at most MORE places behind its run it has all. Of an id that others have rows of too
each puts its part aside and counts itself; whoever comes last adds the parts in their order, so
that no bit depends on who that was. Nobody waits. The interpreter, which knows no lanes, adds up an
id's rows at once and checks only what surrounds that. Imported only by the modules of embedding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels import _compat
from pallas_kernels.device import THREADS
from pallas_kernels.embedding_lanes import load_piece, numbers_of_piece, store_piece, words_in
from pallas_kernels.lane_arithmetic import all_floats, bits, number
from pallas_kernels.lane_code import (
    asm,
    by_thread,
    equal,
    further,
    less,
    load,
    only_where,
    times,
    times_long,
    without,
    word,
)

RUN = 8  # places of a thread
# Places of the next run that a thread looks at too: of 8192 ids few come so often that they end
# later, and to count oneself takes several times as long as to ask for a row. A multiple of 4
MORE = 4
GROUP = 16  # runs whose parts one thread adds up
PARTS_AT_ONCE = 4  # parts that it asks for before it adds the first


class Order(NamedTuple):
    """M rows in the order of their ids, all int32.

    ids: [(runs + 1) RUN], behind the last row V; places: the same, which row it is. begins, ends:
    [runs], where the first id of a run begins, and behind which place its last id ends.
    arrivals: [runs, 2, pieces of a row], counters that are zeros where the last id of a run goes on
    in the next, and are so again behind a kernel.
    """

    ids: Any
    places: Any
    begins: Any
    ends: Any
    arrivals: Any


class Sums(NamedTuple):
    """What is added up: `rows` rows of `width` numbers, by ids below `count`, times scale.

    scale: rounded to dy's dtype. by_id: a sum is written where its id says; else where the last of
    its rows stands in the order.
    """

    rows: int
    width: int
    count: int
    dy: str  # a dtype
    out: str
    scale: float | None
    by_id: bool

    @property
    def numbers(self) -> int:
        """Of a piece."""
        return numbers_of_piece(self.dy, self.out)

    @property
    def across(self) -> int:
        """Pieces of a row."""
        return self.width // self.numbers

    @property
    def runs(self) -> int:
        """Of RUN places of the order; the last may have fewer."""
        return -(-self.rows // RUN)

    @property
    def order_shapes(self) -> Order:
        places, runs = ((self.runs + 1) * RUN,), (self.runs,)
        return Order(places, places, runs, runs, (self.runs, 2, self.across))


def sums_by_order(
    sums: Sums, dy: jax.Array, order: Order, held: Any = None, *, interpret: bool
) -> jax.Array | None:
    """Of dy [M, D]. held: a reference to an array [V, D], written if `by_id`; else the result is an
    array [M, D].
    """
    names = ("dy", *Order._fields, *["out"] * sums.by_id, "parts", *["out"] * (not sums.by_id))

    def body(*refs):
        every = dict(zip(names, refs, strict=True))
        block = lax.axis_index("block")
        if interpret:
            _plainly(sums, block, every)
            return
        by_thread(lambda at, block: Block(sums, at, block).run(), every, block)

    results = [jax.ShapeDtypeStruct((sums.runs, 2, sums.width), jnp.float32)]
    if not sums.by_id:
        results.append(jax.ShapeDtypeStruct((sums.rows, sums.width), jnp.dtype(sums.out)))
    found = _compat.kernel(
        body,
        name="embedding_backward_sums",
        out_type=results,
        grid=(sums.runs if interpret else -(-sums.runs * sums.across // THREADS),),
        grid_names=("block",),
        interpret=interpret,
    )(dy, *order, *[held] * sums.by_id)
    return None if sums.by_id else found[1]


def _plainly(sums: Sums, run: Any, refs: Mapping[str, Any]) -> None:
    """The sums of the ids that end in a run."""
    ids, rows = refs["ids"][...], refs["dy"][...].astype(jnp.float32)
    rows = rows[refs["places"][...][: sums.rows]]
    for i in range(RUN):
        place = run * RUN + i
        which = ids[place]

        @pl.when((which != ids[place + 1]) & (which < sums.count))
        def _(place=place, which=which):
            total = jnp.sum(jnp.where((ids[: sums.rows] == which)[:, None], rows, 0.0), axis=0)
            total = total if sums.scale is None else total * sums.scale
            target = refs["out"].at[which if sums.by_id else place]
            target[...] = total.astype(sums.out)


class Block:
    """What a thread of a block does.

    at: addresses of dy, of what `Order` has, of out, and of parts: float32 [runs, 2, D], of a run
    what it adds to an id that began before, and what it leaves later ones to add to. block: which.
    """

    def __init__(self, sums: Sums, at: Mapping[str, Any], block: Any):
        self.sums, self.at = sums, at
        total = sums.runs * sums.across
        index = arith.addi(times(block, THREADS), mgpu_utils.thread_idx())
        self.inside = less(index, total)
        index = arith.minui(index, word(total - 1))
        self.mine, self.piece = (f(index, word(sums.across)) for f in (arith.divui, arith.remui))
        self.first = times(self.mine, RUN)
        self.sizes = [sums.numbers * jnp.dtype(dtype).itemsize for dtype in (sums.dy, sums.out)]

    def run(self) -> None:
        """Of an id that began in the run before, or goes on in the next, both threads must agree
        who has its rows: one alone if it ends at most MORE places behind its first run.
        """
        sums = self.sums
        ids, places = self._words("ids", RUN), self._words("places", RUN + MORE)
        before = self._word("ids", arith.subi(self.first, arith.minui(self.first, word(1))))
        behind = self._word("ids", arith.addi(self.first, word(RUN)))
        begin, end = (self._word(name, self.mine) for name in ("begins", "ends"))
        rows = [load_piece(self._row(place), self.sizes[0]) for place in places[:RUN]]
        same = [equal(*pair) for pair in zip([before, *ids], [*ids, behind], strict=True)]
        began = arith.divui(begin, word(RUN))
        begun = arith.andi(same[0], without(self.inside, less(self.mine, 1)))
        goes_on = arith.andi(same[RUN], arith.andi(self.inside, less(ids[-1], sums.count)))
        near_begun = without(begun, less(arith.addi(began, word(1)), self.mine))
        total, still, ended, end_of_it = self._add_up(ids, rows, same, begun, near_begun)
        last = arith.subi(end, word(1))
        whole = arith.andi(still, goes_on)  # the run is of one id, that others have too
        ends_near = less(last, arith.addi(self.first, word(RUN + MORE)))
        alone = without(arith.andi(goes_on, ends_near), whole)
        target = ids[-1] if sums.by_id else last
        only_where(alone, self._write_with_more, target, total, places[RUN:], end)
        goes_on = without(goes_on, alone)
        half = arith.select(whole, word(0), word(1))
        only_where(goes_on, self._put_aside, self.mine, half, total)
        # First the id that began before, if it ended here; then the one that goes on
        of_first = [ended, began, self.mine, ids[0] if sums.by_id else end_of_it]
        of_last = [goes_on, arith.select(whole, began, self.mine)]
        of_last += [arith.divui(last, word(RUN)), target]

        @mgpu_utils.fori(arith.select(arith.ori(ended, goes_on), word(2), word(0)), [])
        def each(i, carry):
            there, *what = (
                arith.select(less(i, 1), a, b) for a, b in zip(of_first, of_last, strict=True)
            )
            only_where(there, self._arrive, *what)
            return carry

    def _add_up(
        self, ids: list[Any], rows: list[Any], same: list[Any], begun: Any, near_begun: Any
    ) -> tuple[list[Any], Any, Any, Any]:
        """Writes sums of ids that end here, or puts that of one aside which began before; returns
        the sum of the last id, whether that is the one that began before, whether that one's part
        was put aside, and where it ended.

        near_begun: it began in the run before, whose thread has its rows if it ends among MORE.
        """
        total, still, end_of_it = all_floats(rows[0], self.sums.dy), begun, self.first
        put_aside: Any = None
        for i, which in enumerate(ids):
            if i:
                still = arith.andi(still, same[i])
                row = all_floats(rows[i], self.sums.dy)
                total = [arith.select(same[i], x, number(0)) for x in total]
                total = list(map(arith.addf, total, row))
            place = arith.addi(self.first, word(i))
            there = arith.andi(less(which, self.sums.count), self.inside)
            ends = without(there, same[i + 1])
            target = which if self.sums.by_id else place
            only_where(without(ends, still), self._write, target, total)
            aside = arith.andi(ends, still)
            aside = without(aside, near_begun) if i < MORE else aside
            only_where(aside, self._put_aside, self.mine, word(0), total)
            put_aside = arith.ori(put_aside, aside) if i else aside
            end_of_it = arith.select(aside, place, end_of_it)
        return total, still, put_aside, end_of_it

    def _word(self, name: str, index: Any) -> Any:
        return load(further(self.at[name], times_long(index, 4)), 0)

    def _words(self, name: str, count: int) -> list[Any]:
        """From the run's first on."""
        return load_piece(further(self.at[name], times_long(self.first, 4)), 4 * count)

    def _row(self, place: Any) -> Any:
        """Where the thread's piece of a row of dy lies; behind the last row anything there is."""
        place = arith.minui(place, word(self.sums.rows - 1))
        start = further(self.at["dy"], times_long(place, self.sums.across * self.sizes[0]))
        return further(start, times(self.piece, self.sizes[0]))

    def _write_with_more(self, row: Any, total: list[Any], places: list[Any], end: Any) -> None:
        """The sum of an id that goes on, with its rows in the next run, all of them in `places`."""
        asked = [load_piece(self._row(place), self.sizes[0]) for place in places]
        for i, words in enumerate(asked):
            there = less(arith.addi(self.first, word(RUN + i)), end)
            more = all_floats(words, self.sums.dy)
            more = [arith.select(there, x, number(0)) for x in more]
            total = list(map(arith.addf, total, more))
        self._write(row, total)

    def _write(self, row: Any, total: list[Any]) -> None:
        if self.sums.scale is not None:
            by = number(self.sums.scale)
            total = [arith.mulf(x, by) for x in total]
        start = further(self.at["out"], times_long(row, self.sums.across * self.sizes[1]))
        address = further(start, times(self.piece, self.sizes[1]))
        store_piece(address, words_in(self.sums.out, total))

    def _half(self, run: Any, began: Any) -> Any:
        """Which of a run's two parts is that of an id: 1 where it began."""
        return arith.select(equal(run, began), word(1), word(0))

    def _part(self, run: Any, half: Any) -> Any:
        """Where the thread's piece of a part lies."""
        line = arith.addi(times(run, 2), half)
        start = further(self.at["parts"], times_long(line, 4 * self.sums.width))
        return further(start, times(self.piece, 4 * self.sums.numbers))

    def _put_aside(self, run: Any, half: Any, part: list[Any]) -> None:
        store_piece(self._part(run, half), list(map(bits, part)))

    def _arrive(self, began: Any, last: Any, row: Any) -> None:
        """Of an id of runs `began` to `last`, whose part of this run is put aside.

        Whoever is the last of GROUP runs adds up their parts, and puts that in the first one's
        place; whoever is the last of all groups adds up theirs. A counter counts those of a group
        at its first run with the id, another the groups at the id's first run.
        """
        here = arith.subi(self.mine, arith.remui(self.mine, word(GROUP)))
        first = arith.maxui(began, here)
        others = arith.subi(arith.minui(last, arith.addi(here, word(GROUP - 1))), first)
        with self._if_last(first, 0, others):
            run_of = lambda j: arith.addi(first, j)  # noqa: E731
            total = self._added(run_of, began, arith.addi(others, word(1)))
            self._put_aside(first, self._half(first, began), total)
            group, others = (arith.divui(run, word(GROUP)) for run in (began, last))
            others = arith.subi(others, group)
            with self._if_last(began, 1, others):

                def first_of(j):
                    return arith.maxui(began, times(arith.addi(group, j), GROUP))

                self._write(row, self._added(first_of, began, arith.addi(others, word(1))))

    @contextlib.contextmanager
    def _if_last(self, run: Any, which: int, others: Any) -> Iterator[None]:
        """Where a thread is the last to count itself, at one of a run's two counters; what all have
        written before that, it may read. Where there are no others nothing is counted.
        """
        index = arith.addi(times(run, 2), word(which))
        index = arith.addi(times(index, self.sums.across), self.piece)
        counter = further(self.at["arrivals"], times_long(index, 4))
        text = """{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.u32 $0, 0; @p fence.acq_rel.gpu;
            @p atom.global.relaxed.gpu.add.u32 $0, [$1], 1; @p fence.acq_rel.gpu; }"""
        before = asm(text, "r", counter, others, effects=True)
        with mgpu_utils.when(equal(before, others)):
            text = "{ .reg .pred p; setp.ne.u32 p, $1, 0; @p st.global.u32 [$0], 0; }"
            asm(text, "", counter, others)
            yield

    def _added(self, run_of: Callable[[Any], Any], began: Any, count: Any) -> list[Any]:
        """The sum of `count` parts, in order; run_of: j -> the run of the j-th."""
        turns = arith.divui(arith.addi(count, word(PARTS_AT_ONCE - 1)), word(PARTS_AT_ONCE))

        @mgpu_utils.fori(turns, [number(0)] * self.sums.numbers)
        def turn(i, total):
            asked = []
            for j in range(PARTS_AT_ONCE):
                which = arith.addi(times(i, PARTS_AT_ONCE), word(j))
                run = run_of(arith.minui(which, arith.subi(count, word(1))))
                address = self._part(run, self._half(run, began))
                part = load_piece(address, 4 * self.sums.numbers, late=True)
                asked.append((less(which, count), part))
            for there, part in asked:
                numbers = [arith.select(there, x, number(0)) for x in all_floats(part, "float32")]
                total = list(map(arith.addf, total, numbers))
            return total

        return list(turn.results)
