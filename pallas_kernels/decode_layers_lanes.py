"""What a thread does in the kernel of `decode_layers`: layer after layer, of one token.

Four warps of a block bring the weights of all layers on chip, as fast as there is room, and wait
for nothing else; the others multiply as in `between_attentions`, and between q, k and v and the
next product they are the heads. All blocks meet before each of the five. Layers are alike, and so
one loop; where the arrays of each lie stands in a table on chip.
As in lane_code.py, values are those of one thread. Imported only by decode_layers_kernel.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels.between_attentions_config import BRINGING
from pallas_kernels.between_attentions_lanes import Chain, Meeting, begin, divided
from pallas_kernels.decode_layers_attention import Attention, Seen
from pallas_kernels.decode_layers_config import MEETINGS, NAMES, REGISTERS, Plan
from pallas_kernels.device import LANES
from pallas_kernels.lane_code import asm, equal, further, times, word


class Layers:
    """What a thread does."""

    def __init__(
        self,
        plan: Plan,
        dtypes: Sequence[Mapping[str, Any]],
        pointers: Sequence[Mapping[str, Any]],
        around: Mapping[str, Any],
        block: Any,
    ):
        """dtypes, pointers: of each product, as `Chain` has them, but for what layers have of their
        own (`Plan.entries`). around: addresses of lengths, meeting, and of what `Attention` takes
        but the cache; on chip of the table. block: which one it is.
        """
        self.plan, self.dtypes, self.pointers = plan, dtypes, pointers
        self.around, self.block = around, block
        self.warps = plan.config.warps
        self.meeting = Meeting(around["meeting"], plan.num_blocks, self.warps)

    def run(self, layers: Sequence[Sequence[Any]]) -> None:
        """All of it. layers: of each the addresses of its entries."""
        self.begin(layers)
        divided(self.warps, self.multiply, self.bring, REGISTERS.get(self.warps))

    def begin(self, layers: Sequence[Sequence[Any]]) -> None:
        """Writes the table, a warp a share of it, and sets up the stages' barriers."""
        every = [address for layer in layers for address in layer]
        warps = self.warps + BRINGING // LANES
        share = -(-len(every) // warps)
        for warp in range(warps):
            with mgpu_utils.when(equal(mgpu_utils.thread_idx(), word(warp * LANES))):
                for i in range(warp * share, min(len(every), (warp + 1) * share)):
                    text = f"st.shared.u64 [$0 + {8 * i}], $1;"
                    asm(text, "", self.around["table"], every[i])
        begin(self.plan.config, self.pointers[0]["barriers"])

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
        seen = Seen(self.plan.attend, self.around["lengths"], self.block)

        @mgpu_utils.fori(word(self.plan.layers), Chain.nothing_multiplied())
        def each_layer(layer: Any, at: Any) -> Any:
            at, (chain, cache) = list(at), self._layer(layer)
            Attention(self.plan.attend, seen, cache()).prefetch()
            met = times(layer, MEETINGS)

            def meet(count: int) -> None:
                self.meeting.meet(arith.addi(met, word(count)))

            for i, name in enumerate(NAMES):
                if name == "out":
                    meet(2)
                    attention = Attention(self.plan.attend, seen, {**self.around, **cache()})
                    attention.run(self.meeting.barrier)
                count = i + 1 + (i > 0)
                at = chain.product(i, at, lambda count=count: meet(count))
            return at

        del each_layer
        self.meeting.clear(self.meeting.leave())

    def _layer(self, layer: Any) -> tuple[Chain, Callable[[], dict[str, Any]]]:
        """A layer's products, and where its cache lies when that is asked for."""
        row = further(self.around["table"], times(layer, 8 * len(self.plan.entries)))

        def own(product: int | None) -> dict[str, Any]:
            found = {}
            for i, (of, name) in enumerate(self.plan.entries):
                if of == product:
                    text = f"ld.shared.u64 $0, [$1 + {8 * i}];"
                    found[name] = asm(text, "l", row, effects=True)
            return found

        def pointers(product: int) -> dict[str, Any]:
            found = {**self.pointers[product], **own(product)}
            return {**found, **own(None)} if product == 0 else found

        asked = [functools.partial(pointers, i) for i in range(len(NAMES))]
        dealt = times(layer, self.plan.tiles)
        chip = {name: self.pointers[0][name] for name in ("ring", "barriers")}
        meeting = self.around["meeting"]
        chain = Chain(self.plan, self.dtypes, asked, meeting, self.block, **chip, dealt=dealt)
        return chain, functools.partial(own, None)
