"""What a thread does in the kernel of `between_attentions`: products that follow one another.

A block stays, and has some tiles of each product. Four warps bring codes and scales of all of them
on chip, as fast as stages are free again, and wait for nothing else: memory does not wait where
blocks do, and where no stage is free either, the next one's codes come into the L2. The others
multiply, leave the sums of a product's tiles side by side on chip, and meet behind the last of
them. Then all blocks of the launch meet, for each of the next product's results takes all of this
one's. How much is on its way at a time is bounded: what blocks tell each other waits behind it, and
memory is slower with more. As in lane_code.py, values are those of one thread.
Imported only by between_attentions_kernel.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax._src.lib.mlir.dialects import arith, gpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels.between_attentions_bring import Bring
from pallas_kernels.between_attentions_config import BRINGING, Config, Plan
from pallas_kernels.between_attentions_join import Join
from pallas_kernels.between_attentions_tiles import Tiles, tiles_of
from pallas_kernels.device import LANES
from pallas_kernels.lane_code import (
    MOST_EARLY,
    accesses_of_thread,
    asm,
    equal,
    further,
    less,
    only_where,
    times,
    word,
)
from pallas_kernels.meeting import Meeting
from pallas_kernels.quantized_matmul_config import PARTS


def begin(config: Config, barriers: Any) -> None:
    """Sets up the stages' barriers, by all threads."""
    with mgpu_utils.when(less(mgpu_utils.thread_idx(), 1)):
        for i in range(config.stages):
            for kind, count in enumerate((BRINGING, config.warps)):
                to = further(barriers, word(8 * (2 * i + kind)))
                asm(f"mbarrier.init.shared::cta.b64 [$0], {count};", "", to, effects=True)
    gpu.barrier()


def divided(
    warps: int,
    multiply: Callable[[], Any],
    bring: Callable[[], Any],
    registers: tuple[int, int] | None = None,
) -> None:
    """What a block's warps do: its first multiply, the others bring. registers: that a thread of
    the former has and one of the latter; None: all as many.
    """
    thread, multiplying = mgpu_utils.thread_idx(), warps * LANES
    with mgpu_utils.when(less(thread, multiplying)):
        if registers is not None:
            asm(f"setmaxnreg.inc.sync.aligned.u32 {registers[0]};", "")
        multiply()
    with mgpu_utils.when(less(word(multiplying - 1), thread)):
        if registers is not None:
            asm(f"setmaxnreg.dec.sync.aligned.u32 {registers[1]};", "")
        bring()


class Chain:
    """What a thread does."""

    def __init__(
        self,
        plan: Plan,
        dtypes: Sequence[Mapping[str, Any]],
        pointers: Sequence[Callable[[], Mapping[str, Any]]],
        meeting: Any,
        block: Any,
        *,
        ring: Any,
        barriers: Any,
        dealt: Any = None,
    ):
        """dtypes, pointers: of each product, as `Block` has them; where its arrays lie is asked for
        when it begins. meeting: an address, see `Meeting`. block: which one it is. ring, barriers:
        addresses on chip. dealt: how many tiles the blocks have had before, a word; None: none.
        """
        self.plan = plan
        self.stages, self.warps = plan.config.stages, plan.config.warps
        self.meeting = Meeting(meeting, plan.num_blocks, self.warps)
        self.dtypes, self.pointers, self.block = dtypes, pointers, block
        self.ring, self.barriers = ring, barriers
        self.products: dict[int, Tiles] = {}  # those that are multiplied
        # The tiles of all products are dealt in one round after the other
        self.bases = []
        for before in plan.tiles_before:
            place = word(before) if dealt is None else arith.addi(dealt, word(before))
            place = arith.remui(place, word(plan.num_blocks))
            further_on = arith.addi(block, arith.subi(word(plan.num_blocks), place))
            self.bases.append(arith.remui(further_on, word(plan.num_blocks)))

    def run(self) -> None:
        """All of it."""
        begin(self.plan.config, self.barriers)
        divided(self.warps, self.multiply, lambda: self.bring(self.nothing_brought()))

    def _tiles(self, i: int) -> Tiles:
        """A product, whose addresses take registers from here on."""
        return tiles_of(self.plan.products[i], self.dtypes[i], self.pointers[i](), self.block)

    def _tiles_of(self, i: int) -> Any:
        """How many of a product's tiles are the block's."""
        rounded_up = word(self.plan.products[i].tiles + self.plan.num_blocks - 1)
        return arith.divui(arith.subi(rounded_up, self.bases[i]), word(self.plan.num_blocks))

    def _tile(self, i: int, place: Any) -> Any:
        """Which tile of a product is the block's at that place."""
        return arith.addi(self.bases[i], times(place, self.plan.num_blocks))

    # stages: their barriers lie side by side, "full" and "empty"

    def _full(self, stage: Any) -> Any:
        return further(self.barriers, times(stage, 16))

    def _empty(self, stage: Any) -> Any:
        return further(self._full(stage), word(8))

    def _stage_at(self, stage: Any) -> Any:
        return further(self.ring, times(stage, self.plan.stage_bytes))

    def _next(self, stage: Any, phase: Any) -> list[Any]:
        """The stage behind, and the phase of its barriers."""
        stage = arith.addi(stage, word(1))
        same = less(stage, self.stages)
        other = arith.xori(phase, word(1))
        return [arith.select(same, stage, word(0)), arith.select(same, phase, other)]

    @staticmethod
    def _wait(barrier: Any, phase: Any) -> None:
        text = """{ .reg .pred done;
            again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @!done bra again; }"""
        asm(text, "", barrier, phase, effects=True)

    @staticmethod
    def _not_yet(barrier: Any, phase: Any) -> Any:
        """Whether `_wait` would have to wait now; other threads may see otherwise."""
        text = """{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [$1], $2;
            selp.u32 $0, 0, 1, done; }"""
        return equal(asm(text, "r", barrier, phase, effects=True), word(1))

    @staticmethod
    def nothing_brought() -> list[Any]:
        """What `bring` begins with: stage and phase."""
        return [word(0)] * 2

    def bring(self, carry: list[Any]) -> list[Any]:
        """Of the warps that bring codes: all of the block's tiles."""
        number = arith.subi(mgpu_utils.thread_idx(), word(self.warps * LANES))
        most = self.plan.config.window - 1  # on their way, when another stage is asked for
        for i in range(len(self.plan.products)):

            def each_tile(place, carry, i=i, codes=Bring(self._tiles(i), number)):
                begun = codes.begin(self._tile(i, place))

                @mgpu_utils.fori(word(self.plan.products[i].rounds), carry)
                def each_round(round_, carry):
                    stage, phase = carry
                    asm(f"cp.async.wait_group {most};", "", effects=True)
                    room = self._empty(stage), arith.xori(phase, word(1))
                    only_where(self._not_yet(*room), codes.ask_into_l2, begun, round_)
                    self._wait(*room)
                    codes.ask(begun, round_, self._stage_at(stage), self._full(stage))
                    asm("cp.async.commit_group;", "", effects=True)
                    return self._next(stage, phase)

                return list(each_round.results)

            carry = list(mgpu_utils.fori(self._tiles_of(i), carry)(each_tile).results)
        return carry

    # products

    def multiply(self) -> None:
        """Of the warps that multiply: all products, and what follows them."""
        at, gone = self.nothing_multiplied(), []

        def wait(i: int) -> None:
            if i > 0:
                self.meeting.wait(word(i))
            if i == len(self.plan.products) - 1:
                gone.append(self.meeting.leave())

        for i in range(len(self.plan.products)):
            if i > 0:
                self.meeting.come()
            at = self.product(i, at, functools.partial(wait, i))
        self.meeting.clear(*gone)

    @staticmethod
    def nothing_multiplied() -> list[Any]:
        """What `product` begins with: stage and phase."""
        return [word(0)] * 2

    def product(self, i: int, at: list[Any], wait: Callable[[], None]) -> list[Any]:
        """One of the products, and what follows it; where the next one begins. wait: until what
        other blocks have written for the product is there.

        Blocks have come to that meeting by then, and some may be behind it: what is asked for here
        before `wait` was there before the meeting that precedes it, and the product writes none of
        it. With an `EarlyMeeting` it need not have been, but a residual has: each block has had all
        of it as the x of a product before, which was awaited.
        """
        tiles, barrier = self._tiles(i), self.meeting.barrier
        self.products[i] = tiles
        early, of_x, join, made = self._early(i), tiles.early(), self._join(i), None
        wait()
        if join is not None:
            made = join.sums(self.block, barrier)
        tiles.keep(of_x, barrier, made)
        barrier()
        at = self._sums(i, at)
        barrier()
        self._finish(i, early)
        return at

    def _join(self, i: int) -> Join | None:
        """What makes x of a product of what the one before gave, if that is not x."""
        if (post_norm := self.plan.joined[i]) is None:
            return None
        tiles, late = self.products[i], self.plan.products[i].late
        return Join(tiles.rows, post_norm, tiles.pointers, late="stream" in late)

    def _sums(self, i: int, at: list[Any]) -> list[Any]:
        """Of all the block's tiles of a product, a warp's share of K; on chip. at: stage, phase."""
        tiles, product = self.products[i], self.plan.products[i]
        rounds = [word(each) for each in range(product.rounds)]
        held: list[Any] = []
        if product.config.held:
            held = [[tiles.x_of(each, which) for which in range(PARTS)] for each in rounds]

        @mgpu_utils.fori(self._tiles_of(i), at)
        def each_tile(place, at):
            def each_round(round_, carry, x=None):
                stage, phase, *sums = carry
                self._wait(self._full(stage), phase)
                stage_at = self._stage_at(stage)
                for which in range(PARTS):
                    part = x[which] if x else tiles.x_of(round_, which)
                    sums = tiles.multiply(stage_at, round_, which, part, sums)
                asm("bar.warp.sync 0xffffffff;", "", effects=True)
                with mgpu_utils.when(equal(tiles.lane, word(0))):
                    text = "{ .reg .b64 x; mbarrier.arrive.shared::cta.b64 x, [$0]; }"
                    asm(text, "", self._empty(stage), effects=True)
                return [*self._next(stage, phase), *sums]

            done = [*at, *tiles.zeros()]
            if held:
                for each, x in zip(rounds, held, strict=True):
                    done = each_round(each, done, x)
            else:
                done = list(mgpu_utils.fori(word(product.rounds), done)(each_round).results)
            tiles.show(done[2:], self._parts(i, place))
            return done[:2]

        return list(each_tile.results)

    def _parts(self, i: int, place: Any) -> Any:
        """Where the warps' sums of a tile of the block lie."""
        size_bytes = self.warps * self.plan.products[i].config.tile_n * 4
        return further(self.products[i].pointers["parts"], times(place, size_bytes))

    def _results(self, i: int) -> list[tuple[Any, Any, Any, Any]]:
        """A thread's results of a product: which of the block's tiles and of its rows, which row of
        the weight, and whether there is one.
        """
        tiles, found = self.products[i], []
        count = self.plan.products[i].most_tiles * tiles.out_rows
        for number, inside in accesses_of_thread(count, self.warps * LANES):
            place, row = (f(number, word(tiles.out_rows)) for f in (arith.divui, arith.remui))
            tile = self._tile(i, place)
            there = less(tile, tiles.num_tiles)
            there = there if inside is None else arith.andi(there, inside)
            tile = arith.minui(tile, word(tiles.num_tiles - 1))
            found.append((place, row, arith.addi(tiles.first_row(tile), row), there))
        return found

    def _early(self, i: int) -> list[dict[str, Any]]:
        """What a thread's results are made of beside sums, if they are few, and there before the
        last meeting: a residual that blocks make for the product before is not.
        """
        mine, finish = self._results(i), self.products[i].finish
        late = i > 0 and self.plan.joined[i - 1] is not None and "residual" in finish.at
        if len(mine) > MOST_EARLY or late:
            return []
        return [finish.operands(word(0), whole, there) for _, _, whole, there in mine]

    def _finish(self, i: int, early: list[dict[str, Any]]) -> None:
        """Adds up the sums of the block's tiles, and writes what becomes of them."""
        finish, one = self.products[i].finish, word(0)
        behind = self.products[i].behind_sums()
        for j, (place, row, whole, there) in enumerate(self._results(i)):
            operands = early[j] if early else finish.operands(one, whole, there)
            operands, parts = {**operands, **behind}, self._parts(i, place)
            only_where(there, finish.complete, parts, one, row, whole, operands)
