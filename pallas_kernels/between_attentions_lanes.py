"""What a thread does in the kernel of `between_attentions`: products that follow one another.

A block stays, and has some tiles of each product. Four warps bring codes and scales of all of them
on chip, as fast as stages are free again, and wait for nothing else: memory does not wait where
blocks do. The others multiply, leave the sums of a product's tiles side by side on chip, and meet
behind the last of them. Then all blocks of the launch meet, for each of the next product's results
takes all of this one's. How much is on its way at a time is bounded: what blocks tell each other
waits behind it, and memory is slower with more. As in lane_code.py, values are those of one thread.
Imported only by between_attentions_kernel.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax._src.lib.mlir.dialects import arith, gpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels.between_attentions_config import BRINGING, Plan
from pallas_kernels.between_attentions_tiles import tiles_of
from pallas_kernels.device import LANES
from pallas_kernels.lane_code import (
    MOST_EARLY,
    accesses_of_thread,
    as_word,
    asm,
    equal,
    further,
    less,
    only_where,
    times,
    word,
)
from pallas_kernels.quantized_matmul_config import PARTS

MOST_POLLS = 2**24  # of a block that waits for the others, some ten seconds; then it gives up


class Chain:
    """What a thread does."""

    def __init__(
        self,
        plan: Plan,
        dtypes: Sequence[Mapping[str, Any]],
        pointers: Sequence[Mapping[str, Any]],
        meeting: Any,
        block: Any,
    ):
        """dtypes, pointers: of each product, as `Block` has them, and on chip ring and barriers.
        meeting: where two words lie, 0 before and after: how often blocks have come to a meeting,
        and how many have left the last. block: which one it is.
        """
        self.plan, self.meeting = plan, meeting
        self.stages, self.warps = plan.config.stages, plan.config.warps
        self.products = [
            tiles_of(product, of, at, block)
            for product, of, at in zip(plan.products, dtypes, pointers, strict=True)
        ]
        self.ring, self.barriers = (pointers[0][name] for name in ("ring", "barriers"))
        # The tiles of all products are dealt in one round after the other
        self.bases = []
        for before in plan.tiles_before:
            further_on = arith.addi(block, word(plan.num_blocks - before % plan.num_blocks))
            self.bases.append(arith.remui(further_on, word(plan.num_blocks)))

    def run(self) -> None:
        """All of it."""
        self.begin()
        thread, multiplying = mgpu_utils.thread_idx(), self.warps * LANES
        with mgpu_utils.when(less(thread, multiplying)):
            self.multiply()
        with mgpu_utils.when(less(word(multiplying - 1), thread)):
            self.bring()

    def begin(self) -> None:
        """Sets up the stages' barriers, by all threads."""
        with mgpu_utils.when(less(mgpu_utils.thread_idx(), 1)):
            for i in range(self.stages):
                for kind, count in enumerate((BRINGING, self.warps)):
                    to = further(self.barriers, word(8 * (2 * i + kind)))
                    asm(f"mbarrier.init.shared::cta.b64 [$0], {count};", "", to, effects=True)
        gpu.barrier()

    def _tiles_of(self, i: int) -> Any:
        """How many of a product's tiles are the block's."""
        rounded_up = word(self.products[i].num_tiles + self.plan.num_blocks - 1)
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

    def bring(self) -> None:
        """Of the warps that bring codes: all of the block's tiles."""
        number = arith.subi(mgpu_utils.thread_idx(), word(self.warps * LANES))
        window = self.plan.config.window
        # stage and phase; those of the stage `window` before; how many stages were asked for
        carry = [word(0)] * 5
        for i, tiles in enumerate(self.products):

            def each_tile(place, carry, i=i, tiles=tiles):
                @mgpu_utils.fori(word(self.plan.products[i].rounds), carry)
                def each_round(round_, carry):
                    stage, phase, before, phase_before, count = carry
                    few = less(count, window)
                    with mgpu_utils.when(less(word(window - 1), count)):
                        self._wait(self._full(before), phase_before)
                    self._wait(self._empty(stage), arith.xori(phase, word(1)))
                    at, tile = self._stage_at(stage), self._tile(i, place)
                    tiles.bring(number, tile, round_, at, self._full(stage))
                    later = zip(self._next(before, phase_before), carry[2:4], strict=True)
                    later = [arith.select(few, same, after) for after, same in later]
                    return [*self._next(stage, phase), *later, arith.addi(count, word(1))]

                return list(each_round.results)

            carry = list(mgpu_utils.fori(self._tiles_of(i), carry)(each_tile).results)

    # products

    def multiply(self) -> None:
        """Of the warps that multiply: all products, and what follows them."""
        at, gone = [word(0), word(0)], None
        for i, tiles in enumerate(self.products):
            early, of_x = self._early(i), tiles.early()
            if i > 0:
                self._meet(i)
            if i == len(self.products) - 1:
                gone = self._leave()
            tiles.keep(of_x, self._barrier)
            self._barrier()
            at = self._sums(i, at)
            self._barrier()
            self._finish(i, early)
        self._clear(gone)

    def _barrier(self) -> None:
        """Where the warps that multiply meet."""
        asm(f"bar.sync 1, {self.warps * LANES};", "", effects=True)

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
        """What a thread's results are made of beside sums, if they are few."""
        mine, finish = self._results(i), self.products[i].finish
        if len(mine) > MOST_EARLY:
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

    # blocks

    def _meet(self, count: int) -> None:
        """Waits until all blocks have come here, this time being the count-th: what they have
        written before can be read behind it.
        """
        self._barrier()
        with mgpu_utils.when(less(mgpu_utils.thread_idx(), 1)):
            asm("fence.acq_rel.gpu;", "", effects=True)
            asm("red.relaxed.gpu.global.add.u32 [$0], 1;", "", self.meeting)
            text = f"""{{ .reg .pred p; .reg .u32 come, polls; mov.u32 polls, 0;
                again: ld.acquire.gpu.global.u32 come, [$0];
                add.u32 polls, polls, 1; setp.gt.u32 p, polls, {MOST_POLLS}; @p trap;
                setp.lt.u32 p, come, {count * self.plan.num_blocks}; @p bra again; }}"""
            asm(text, "", self.meeting)
        self._barrier()

    def _leave(self) -> Any:
        """Counts a block behind the last meeting; how many were before it, in its first thread."""
        first = as_word(less(mgpu_utils.thread_idx(), 1))
        last = self.plan.num_blocks - 1
        text = f"""{{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.u32 $0, 0;
            @p atom.inc.relaxed.gpu.global.u32 $0, [$1 + 4], {last}; }}"""
        return asm(text, "r", self.meeting, first, effects=True)

    def _clear(self, gone: Any) -> None:
        """Makes the words 0 again where all blocks have left; the second is it already."""
        last = equal(gone, word(self.plan.num_blocks - 1))
        with mgpu_utils.when(arith.andi(less(mgpu_utils.thread_idx(), 1), last)):
            asm("st.relaxed.gpu.global.u32 [$0], 0;", "", self.meeting)
