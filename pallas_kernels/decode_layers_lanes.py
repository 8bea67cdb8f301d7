"""What a thread does in the kernel of `decode_layers`: layer after layer, of one token.

Four warps of a block bring the weights of all layers on chip, as fast as there is room, and wait
for nothing else; the others multiply as in `between_attentions`, and between q, k and v and the
next product they are the heads. Blocks meet before each product, early, and await what they hand
each other (awaited.py); the few that are heads await q, k and v without a meeting. Layers are
alike, and so one loop; where the arrays of each lie stands in a table on chip.
As in lane_code.py, values are those of one thread. Imported only by decode_layers_kernel.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels.awaited import clear
from pallas_kernels.between_attentions_config import BRINGING
from pallas_kernels.between_attentions_lanes import Chain, begin, divided
from pallas_kernels.decode_layers_attention import Attention, Seen
from pallas_kernels.decode_layers_config import (
    COPIES,
    LATER,
    NAMES,
    REGISTERS,
    SLACK,
    STREAM,
    Plan,
)
from pallas_kernels.device import LANES
from pallas_kernels.lane_code import asm, equal, further, times, word
from pallas_kernels.meeting import EarlyMeeting

# For each product: its arguments that blocks hand each other, by their names in `Plan.handed_on`
AROUND: dict[str, dict[str, str]] = {
    "qkv": {"out": "qkv"},
    "out": {"x": "heads", "out": "middle"},
    "gate_up": {"x": "middle", "out": "gated"},
    "down": {"x": "gated", "residual": "middle"},
}
# And where its result goes, in the last layer but for the last product
MADE = {name: around.get("out", "stream") for name, around in AROUND.items()}


class Layers:
    """What a thread does."""

    def __init__(
        self,
        plan: Plan,
        dtypes: Sequence[Mapping[str, Any]],
        at: Mapping[str, Any],
        chip: Mapping[str, Any],
        block: Any,
    ):
        """dtypes: of each product, as `Chain` has them. at: addresses of what layers have in
        common: x, y, cos, sin, slots, lengths, meeting, and handed, COPIES of
        `Plan.handed_on`. chip: of `Plan.scratch_bytes`. block:
        which one it is.
        """
        self.plan, self.dtypes, self.at, self.chip = plan, dtypes, at, chip
        self.block, self.warps = block, plan.config.warps
        self.meeting = EarlyMeeting(at["meeting"], plan.num_blocks, self.warps, slack=SLACK)

    def run(self, own: Sequence[Sequence[Any]]) -> None:
        """All of it. own: of each layer the addresses of `Plan.own`."""
        self.begin(own)
        divided(self.warps, self.multiply, self.bring, REGISTERS.get(self.warps))

    def begin(self, own: Sequence[Sequence[Any]]) -> None:
        """Writes the table, a warp a share of it, and sets up the stages' barriers."""
        every, stream = [], self.at["x"]
        for i, addresses in enumerate(own):
            rest, last = iter(addresses), i + 1 == self.plan.layers
            made = self.at["y"] if last else self._handed("stream", word(i))
            of_stream: dict[Any, Any] = {
                entry: made if entry[1] == "out" else stream for entry in STREAM
            }
            every += [
                of_stream[entry] if entry in STREAM else next(rest) for entry in self.plan.entries
            ]
            stream = made
        warps = self.warps + BRINGING // LANES
        share = -(-len(every) // warps)
        for warp in range(warps):
            with mgpu_utils.when(equal(mgpu_utils.thread_idx(), word(warp * LANES))):
                for i in range(warp * share, min(len(every), (warp + 1) * share)):
                    text = f"st.shared.u64 [$0 + {8 * i}], $1;"
                    asm(text, "", self.chip["table"], every[i])
        begin(self.plan.config, self.chip["barriers"])

    def bring(self) -> None:
        """Of the warps that bring codes: all of them."""
        start = Chain.nothing_brought()

        @mgpu_utils.fori(word(self.plan.layers), start)
        def each_layer(layer: Any, carry: Any) -> Any:
            chain, _ = self._layer(layer)
            return chain.bring(list(carry))

        del each_layer

    def multiply(self) -> None:
        """Of the warps that multiply: all products, and between them the heads."""
        seen = Seen(self.plan.attend, self.at["lengths"], self.block)
        self._clear()

        @mgpu_utils.fori(word(self.plan.layers), Chain.nothing_multiplied())
        def each_layer(layer: Any, at: Any) -> Any:
            at, (chain, cache) = list(at), self._layer(layer)
            for i, name in enumerate(NAMES):
                if name == "out":
                    around = {**self.at, "kept": self.chip["kept"], **cache()}
                    around |= {key: self._handed(key, layer) for key in ("qkv", "heads", "parts")}
                    for key in ("heads", "parts"):
                        around[f"{key} spent"] = self._handed(key, layer, LATER)
                    Attention(self.plan.attend, seen, around).run(self.meeting.barrier)
                self.meeting.come()
                if i == 0:
                    Attention(self.plan.attend, seen, cache()).prefetch()
                at = chain.product(i, at, functools.partial(self._wait, layer, i))
            return at

        del each_layer
        self.meeting.clear(self.meeting.leave())

    def _clear(self) -> None:
        """Makes all that blocks hand each other AWAITED, before the first meeting."""
        threads = self.warps * LANES
        thread = arith.addi(times(self.block, threads), mgpu_utils.thread_idx())
        size_bytes = COPIES * self.plan.handed_bytes
        clear(self.at["handed"], size_bytes, thread, threads * self.plan.num_blocks)
        self.meeting.settle()

    def _handed(self, name: str, layer: Any, later: int = 0) -> Any:
        """Where something of `Plan.handed_on` is, of a layer, or of so many later."""
        copy = arith.remui(arith.addi(layer, word(later)), word(COPIES))
        at = further(self.at["handed"], word(self.plan.handed_at(name)))
        return further(at, times(copy, self.plan.handed_bytes))

    def _wait(self, layer: Any, which: int) -> None:
        """At one of a layer's meetings, of which there is one before each product."""
        self.meeting.wait(arith.addi(times(layer, len(NAMES)), word(which + 1)))

    def _layer(self, layer: Any) -> tuple[Chain, Callable[[], dict[str, Any]]]:
        """A layer's products, and where its cache lies when that is asked for."""
        row = further(self.chip["table"], times(layer, 8 * len(self.plan.entries)))

        def own(product: int | None) -> dict[str, Any]:
            found = {}
            for i, (of, name) in enumerate(self.plan.entries):
                if of == product:
                    text = f"ld.shared.u64 $0, [$1 + {8 * i}];"
                    found[name] = asm(text, "l", row, effects=True)
            return found

        def pointers(product: int) -> dict[str, Any]:
            name = NAMES[product]
            shared = {key: self._handed(at, layer) for key, at in AROUND[name].items()}
            shared["spent"] = self._handed(MADE[name], layer, LATER)
            # what comes in is there
            shared["wait"] = arith.minui(layer, word(1)) if product == 0 else None
            return {**self.chip, **own(product), **shared}

        asked = [functools.partial(pointers, i) for i in range(len(NAMES))]
        rest = {"ring": self.chip["ring"], "barriers": self.chip["barriers"]}
        rest |= {"dealt": times(layer, self.plan.tiles)}
        chain = Chain(self.plan, self.dtypes, asked, self.at["meeting"], self.block, **rest)
        return chain, functools.partial(own, None)
