"""How blocks of `decode_layers` go over layers that are alike, and what that takes: plain data."""

from __future__ import annotations

import dataclasses

from pallas_kernels import between_attentions_config as between
from pallas_kernels.between_attentions_config import NormNumbers
from pallas_kernels.device import ACCESS_BYTES, LANES
from pallas_kernels.quantized_matmul_config import ACROSS, MMA_COLUMNS

NAMES = ("qkv", "out", "gate_up", "down")  # the products of a layer, in their order
CACHE = [(None, "k"), (None, "v")]  # a layer's, of no product
NORMS = ("q_norm", "k_norm")  # of heads
OWN = ("codes", "scale", "zero", "row_scale", "bias", "norm")  # arrays of a product, by layer
STREAM = [(0, "x"), (1, "residual"), (3, "out")]  # from layer to layer, which none has of its own
# Of what blocks hand each other there are so many copies, for layers in turn; whoever writes one
# makes that of so many layers later AWAITED; and blocks may be so many meetings behind others, of
# which a layer has four. With 4, 2 and up to 5 nobody reads that copy any more (what out gives is
# read until the next layer's first meeting, down's until its third), and that it is AWAITED is
# there before it is looked at or written: the block that saw to it has come twice by then.
COPIES, LATER, SLACK = 4, 2, 4
KEYS = MMA_COLUMNS  # of a product with q
EACH = ACCESS_BYTES // 2  # numbers of an access
SPAN = ACROSS * EACH  # numbers of a key that four lanes have in one access
MOST_GROUP = MMA_COLUMNS  # query heads that share a key head
WIDEST = 128
# Of a thread, of what the heads see. With 132, two pieces of 96 numbers each, some spill
MOST_WORDS = 120
# Of a thread that multiplies and one that brings, by how many warps multiply: the heads take more
REGISTERS = {8: (216, 72)}


@dataclasses.dataclass(frozen=True)
class Config(between.Config):
    """As of `between_attentions`. turns: of a block's warps over keys, before more blocks share
    those of a key head. H200, tokens a second of Qwen2.5-0.5B with 1, 2 and 4: 1939, 1990, 1991; of
    Qwen3-0.6B 1602, 1600, 1582.
    """

    turns: int = 2


@dataclasses.dataclass(frozen=True)
class Attend:
    """What the heads of one token see: q_heads of `width`, over kv_heads in a cache with `slots`
    for keys, the last `window` of them, if that is less. Of q's and k's heads the first numbers are
    turned, twice `half`, behind norms of each, if there are any.

    A warp has `pieces` of KEYS keys at a time, and as many on their way. All blocks together have
    at most `splits` for each key head.
    """

    q_heads: int
    kv_heads: int
    width: int
    half: int
    q_norm: NormNumbers | None
    k_norm: NormNumbers | None
    slots: int
    scale: float
    window: int | None
    warps: int
    num_blocks: int
    turns: int

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.q_heads // self.kv_heads

    @property
    def norms(self) -> dict[str, NormNumbers]:
        """Of heads, those that there are, by name."""
        both = zip(NORMS, (self.q_norm, self.k_norm), strict=True)
        return {name: norm for name, norm in both if norm is not None}

    @property
    def splits(self) -> int:
        most = -(-self.slots // (self.turns * self.turn_keys))
        return min(self.num_blocks // self.kv_heads, most)

    @property
    def num_parts(self) -> int:
        """Of heads, that blocks leave to a key head's first one."""
        return self.kv_heads * (self.splits - 1) * self.group

    @property
    def parts_stats_at(self) -> int:
        """Behind the sums of these: of each the largest score and the sum."""
        return 4 * self.num_parts * self.width

    @property
    def parts_bytes(self) -> int:
        """Of both, in whole accesses."""
        return self.parts_stats_at + 8 * (self.num_parts + self.num_parts % 2)

    @property
    def pieces(self) -> int:
        """Of KEYS keys, that a warp has at a time, and as many on their way; beside them a lane has
        its part of q, and sums.
        """
        keys_and_values = self.width // 4
        rest = self.width // 8 + self.width // 4
        return (MOST_WORDS - rest) // (2 * keys_and_values)

    @property
    def turn_keys(self) -> int:
        """Of a block at a time."""
        return self.warps * self.pieces * KEYS

    @property
    def accesses(self) -> int:
        """Of a lane, to a key; four have one together."""
        return self.width // SPAN

    @property
    def columns(self) -> int:
        """Numbers of a value side by side that a lane has; eight have some of one each."""
        return 8 if self.width % 64 == 0 else 4

    @property
    def row_bytes(self) -> int:
        """From key to key in the cache."""
        return 2 * self.kv_heads * self.width

    @property
    def stats_at(self) -> int:
        """On chip, behind the warps' sums: of each warp and head the largest score and the sum."""
        return 4 * self.warps * self.group * self.width

    @property
    def heads_at(self) -> int:
        """On chip, behind those: q's heads of the group, and the token's key."""
        return self.stats_at + 8 * self.warps * self.group

    @property
    def turn_lanes(self) -> int:
        """That have a head of the token together: a power of 2, of which some may have none."""
        return 1 << (self.width // EACH - 1).bit_length()

    @property
    def turn_accesses(self) -> int:
        """Of a block, to q's heads of the group, the token's key and its value."""
        return (self.group + 2) * self.turn_lanes

    @property
    def shared_bytes(self) -> int:
        return self.heads_at + 2 * (self.group + 1) * self.width


@dataclasses.dataclass(frozen=True)
class Plan(between.Plan):
    """`layers` of them, each as `products` and `attend` have it. entries: the arrays that each has
    of its own: which product's, or None, and its name.
    """

    config: Config
    attend: Attend
    layers: int
    entries: tuple[tuple[int | None, str], ...]

    def scratch_bytes(self) -> dict[str, int]:
        """As of `between_attentions`, and where each layer's arrays lie."""
        found = super().scratch_bytes()
        found["kept"] = max(found["kept"], self.attend.shared_bytes)
        return {**found, "table": 8 * self.layers * len(self.entries)}

    @property
    def own(self) -> list[tuple[int | None, str]]:
        """Entries of what is an array of the layer's."""
        return [entry for entry in self.entries if entry not in STREAM]

    @property
    def handed_on(self) -> dict[str, int]:
        """What blocks hand each other in a layer, one behind the other: bytes, of what they have of
        heads in float32, of the rest in bfloat16.
        """
        qkv, out, gate_up, down = (product.packed.shape for product in self.products)
        widths = {"qkv": qkv[0], "heads": out[1], "middle": out[0], "gated": gate_up[0] // 2}
        found = {name: 2 * width for name, width in (widths | {"stream": down[0]}).items()}
        return {"parts": self.attend.parts_bytes, **found}

    @property
    def handed_bytes(self) -> int:
        """All of it, of a layer."""
        return sum(self.handed_on.values())

    def handed_at(self, name: str) -> int:
        """Where one of `handed_on` begins."""
        before = list(self.handed_on).index(name)
        return sum(list(self.handed_on.values())[:before])

    @property
    def tiles(self) -> int:
        """Of a layer."""
        return sum(product.tiles for product in self.products)

    def problem(self) -> str | None:
        """What speaks against its config."""
        if self.attend.turns < 1:
            return "turns must be 1 at least"
        return super().problem()


assert LANES == ACROSS * MMA_COLUMNS
