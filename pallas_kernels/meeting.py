"""Where the blocks of a launch meet, which stay until its end: a count of those that have come.

As in lane_code.py, values are those of one thread. Imported only by modules of between_attentions
and decode_layers.
"""

from __future__ import annotations

from typing import Any

from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels.device import LANES
from pallas_kernels.lane_code import MOST_POLLS, as_word, asm, equal, less, times, word


class Meeting:
    """Where all blocks of a launch meet."""

    look = "ld.acquire.gpu.global.u32"

    def __init__(self, address: Any, num_blocks: int, warps: int):
        """address: where two words lie, 0 before and after: how often blocks have come to a
        meeting, and how many have left the last. warps: of a block that come to it, its first.
        """
        self.address, self.num_blocks, self.threads = address, num_blocks, warps * LANES

    def barrier(self) -> None:
        """Where these warps of a block meet."""
        asm(f"bar.sync 1, {self.threads};", "", effects=True)

    def come(self) -> None:
        """Tells the others that what the block has written before is there.

        The fence waits for what is asked for before it, too.
        """
        self.barrier()
        with mgpu_utils.when(less(mgpu_utils.thread_idx(), 1)):
            self.fence()
            self.count()

    @staticmethod
    def fence() -> None:
        """What the block has written is there before what the thread does next; and what others
        have done the same with is read behind it, if the thread has seen what they did next.
        """
        asm("fence.acq_rel.gpu;", "", effects=True)

    def count(self) -> None:
        """One more has come."""
        asm("red.relaxed.gpu.global.add.u32 [$0], 1;", "", self.address)

    def wait(self, count: Any) -> None:
        """Until all blocks have come, this time being the count-th, a word: what they have written
        before can be read behind it.
        """
        with mgpu_utils.when(less(mgpu_utils.thread_idx(), 1)):
            text = f"""{{ .reg .pred p; .reg .u32 come, polls; mov.u32 polls, 0;
                again: {self.look} come, [$0];
                add.u32 polls, polls, 1; setp.gt.u32 p, polls, {MOST_POLLS}; @p trap;
                setp.lt.u32 p, come, $1; @p bra again; }}"""
            asm(text, "", self.address, self.comings(count))
        self.barrier()

    def comings(self, count: Any) -> Any:
        """How often blocks must have come, all together."""
        return times(count, self.num_blocks)

    def leave(self) -> Any:
        """Counts a block behind the last meeting; how many were before it, in its first thread."""
        first, last = as_word(less(mgpu_utils.thread_idx(), 1)), self.num_blocks - 1
        text = f"""{{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.u32 $0, 0;
            @p atom.inc.relaxed.gpu.global.u32 $0, [$1 + 4], {last}; }}"""
        return asm(text, "r", self.address, first, effects=True)

    def clear(self, gone: Any) -> None:
        """Makes the words 0 again where all blocks have left, each behind a fence of its own behind
        its count; the second is it already.
        """
        last = equal(gone, word(self.num_blocks - 1))
        with mgpu_utils.when(arith.andi(less(mgpu_utils.thread_idx(), 1), last)):
            asm("st.relaxed.gpu.global.u32 [$0], 0;", "", self.address)


class EarlyMeeting(Meeting):
    """Blocks tell that they have written before it is there, and leave before the last few have
    come, but not the first time: behind `wait` all is that a block had written before it came for
    the last time but one, which may be some meetings before this. What is read sooner must be
    awaited (awaited.py).

    That is what the hardware does, and more than PTX's model of memory says: a fence that is done
    has what the block wrote in the L2, and so does a count that others have seen behind it; they
    read and write there, and begin when they have seen the count.

    On an H200 a fence behind the count, which waits while the others come, in place of one before
    it gives 7 % more tokens a second of Qwen2.5-0.5B and of Qwen3-0.6B, 4 and 3 % of Llama-3.1-8B
    in int4 and ternary; looking without an `acquire` 2 and 1 % of the first two; and a slack of 4
    another 2 % of both, 1 of the 8B in ternary and nothing in int4.
    """

    look = "ld.relaxed.gpu.global.u32"

    def __init__(self, address: Any, num_blocks: int, warps: int, *, slack: int):
        """slack: how many meetings blocks, all together, may be behind one that others leave."""
        super().__init__(address, num_blocks, warps)
        self.slack = min(slack, num_blocks - 1)  # some must come, or `comings` were below 0

    def comings(self, count: Any) -> Any:
        """As of `Meeting`, but for the first time less the slack."""
        first, every = equal(count, word(1)), super().comings(count)
        return arith.select(first, every, arith.subi(every, word(self.slack)))

    def come(self) -> None:
        """Tells the others that what the block has written before is on its way; by another thread
        than the one that waits, which looks while the fence does.
        """
        self.barrier()
        with mgpu_utils.when(self._teller()):
            self.count()
            self.fence()

    def settle(self) -> None:
        """What the block has written before is there when it comes the next time."""
        self.barrier()
        with mgpu_utils.when(self._teller()):
            self.fence()

    @staticmethod
    def _teller() -> Any:
        return equal(mgpu_utils.thread_idx(), word(LANES))
