"""Where a product's result is normed before it is added to the residual stream: x <- x + norm(z).

Each block of `between_attentions` makes all of x, which the next product multiplies, and has it in
its threads' registers by then; one of the blocks writes it too. As in lane_code.py, values are
those of one thread. Imported only by between_attentions_lanes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels.between_attentions_config import NormNumbers
from pallas_kernels.device import ACCESS_BYTES
from pallas_kernels.lane_arithmetic import (
    all_floats,
    number,
    over_block,
    reciprocal_root,
    sum_of_squares,
    words_of_floats,
)
from pallas_kernels.lane_code import (
    further,
    less,
    load_four,
    load_late,
    only_where,
    rounded,
    store,
    times,
    word,
)
from pallas_kernels.quantized_rows import Rows

DTYPE = "bfloat16"


class Join:
    """Of the row that a product multiplies; made where its last meeting is awaited."""

    def __init__(self, rows: Rows, post_norm: NormNumbers, at: Mapping[str, Any], *, late: bool):
        """rows: where z lies. at: addresses of post_norm, the norm's weight; of stream, what is
        added, and joined, where the sum goes; on chip of parts. late: other blocks of this launch
        have written the stream, before the last meeting.
        """
        self.rows, self.post_norm, self.at = rows, post_norm, at
        self.starts = [start for _, start in rows.places()]
        # of each access; asked for before z is there
        self.weights = [rows.read(load_four, at["post_norm"], start) for start in self.starts]
        read = load_late if late else load_four
        self.streams = [rows.read(read, at["stream"], start) for start in self.starts]

    def sums(self, block: Any, barrier: Callable[[], None]) -> dict[int, list[Any]]:
        """x, of each access, by how far from the thread's first it is; the first block writes it.

        barrier: where the warps meet that have the row.
        """
        rows, given, squares = self.rows, [], None
        end = rows.end()
        theres = [less(self._place(start), end) for start in self.starts]
        for start, there in zip(self.starts, theres, strict=True):
            z = rows.read(load_late, rows.at["x"], start)
            given.append([arith.select(there, each, word(0)) for each in z])
            squares = sum_of_squares(given[-1], "bf16x2", squares)
        [total] = over_block([squares], "add.f32", self.at["parts"], rows.warps, barrier)
        root = reciprocal_root(total, rows.k, self.post_norm.eps)
        found = {}
        every = zip(self.starts, theres, given, self.weights, self.streams, strict=True)
        for start, there, z, weight, stream in every:
            normed = [
                self._normed(arith.mulf(x, root), w)
                for x, w in zip(all_floats(z, DTYPE), all_floats(weight, DTYPE), strict=True)
            ]
            summed = map(arith.addf, normed, all_floats(stream, DTYPE))
            found[start] = words_of_floats(list(summed), DTYPE)
            mine = arith.andi(there, less(block, 1))
            to = further(self.at["joined"], times(self._place(start), ACCESS_BYTES))
            only_where(mine, store, to, 0, found[start])
        return found

    def _normed(self, x: Any, weight: Any) -> Any:
        """What rms_norm_reference makes of a number that is divided by the root already."""
        if self.post_norm.zero_centered:
            return rounded(arith.mulf(x, arith.addf(weight, number(1.0))), DTYPE)
        return rounded(arith.mulf(rounded(x, DTYPE), weight), DTYPE)

    @staticmethod
    def _place(start: int) -> Any:
        return arith.addi(mgpu_utils.thread_idx(), word(start))
