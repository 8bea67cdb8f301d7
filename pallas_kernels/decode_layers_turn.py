"""The token's heads that a block of `decode_layers` reads: normed, turned, and where they belong.

A product gives q, k and v as they are. A block has the heads of q that share its key head, and the
token's key and value, some lanes of a warp a head: so norms and rotation need no launch or meeting
of their own. As in lane_code.py, values are those of one thread. Imported only by
decode_layers_attention.py.
Source of norm and rotation: around_product.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jax._src.lib.mlir.dialects import arith

from pallas_kernels.decode_layers_config import EACH, Attend
from pallas_kernels.device import ACCESS_BYTES
from pallas_kernels.lane_arithmetic import (
    KINDS,
    all_floats,
    fused,
    number,
    over_warp,
    reciprocal_root,
    sum_of_squares,
    words_of_floats,
)
from pallas_kernels.lane_code import (
    equal,
    further,
    less,
    load_four,
    only_where,
    store,
    store_shared,
    times,
    times_long,
    word,
)

DTYPE = "bfloat16"
ONES, SIGNS = 0x3F803F80, 0x80008000  # of both numbers of a word

Words = list[Any]  # of an access


class Turn:
    """Of one access of a thread to the heads: those of q, then the key and the value."""

    def __init__(self, attend: Attend, head: Any, place: Any, inside: Any, at: Mapping[str, Any]):
        """Asks for all but the heads. head: the key head. place, inside: as of
        `accesses_of_thread`, of `Attend.turn_accesses`. at: addresses of qkv, cos, sin, the
        norms' weights and the cache's k and v, as `Attention` has them.
        """
        a = self.attend = attend
        self.head, self.at = head, at
        self.row, column = (f(place, word(a.turn_lanes)) for f in (arith.divui, arith.remui))
        count, half = a.width // EACH, a.half // EACH
        there = less(column, count)
        self.there = there if inside is None else arith.andi(there, inside)
        self.column = arith.minui(column, word(count - 1))
        self.of_q, self.of_k = less(self.row, a.group), equal(self.row, word(a.group))
        first, turned = less(self.column, half), less(self.column, 2 * half)
        back, on = (f(self.column, word(half)) for f in (arith.subi, arith.addi))
        partner = arith.select(first, on, arith.select(turned, back, self.column))
        own_head = arith.addi(times(head, a.group), self.row)
        behind = times(arith.subi(self.row, word(a.group)), a.kv_heads)
        behind = arith.addi(arith.addi(word(a.q_heads), head), behind)
        number_of = arith.select(self.of_q, own_head, behind)
        heads = further(at["qkv"], times(number_of, 2 * a.width))
        # The access, and its partner half of what is turned away
        self.heads = [further(heads, times(c, ACCESS_BYTES)) for c in (self.column, partner)]
        angle = arith.select(first, self.column, arith.select(turned, back, word(0)))
        cos, sin = (_access(at[name], angle) for name in ("cos", "sin"))
        self.turned = turned = arith.andi(turned, arith.ori(self.of_q, self.of_k))
        sign = arith.select(first, word(SIGNS), word(0))
        self.cos = [arith.select(turned, each, word(ONES)) for each in cos]
        self.sin = [arith.select(turned, arith.xori(each, sign), word(0)) for each in sin]
        of = {"q_norm": self.of_q, "k_norm": self.of_k}
        self.norms = [(norm, of[name]) for name, norm in a.norms.items()]
        if weights := [at[name] for name in a.norms]:
            weight = arith.select(self.of_q, weights[0], weights[-1])
            self.scales = [_access(weight, c) for c in (self.column, partner)]

    def put(self, both: Sequence[Words], chip: Any, slot: Any, keeps: Any) -> None:
        """Writes what becomes of the access: of q's heads and the key on chip, one behind the
        other; of key and value, where the block keeps them, in their slot of the cache, if any.

        both: four words at each of `heads`. Lanes that have a head together come here together.
        """
        a = self.attend
        own, partner = both
        partner = [arith.select(self.turned, each, word(0)) for each in partner]
        xs, partners = (all_floats(words, DTYPE) for words in (own, partner))
        if self.norms:
            xs, partners = self._normed(own, xs, partners)
        cos, sin = (all_floats(words, DTYPE) for words in (self.cos, self.sin))
        every = zip(xs, partners, cos, sin, strict=True)
        words = words_of_floats([fused(x, c, arith.mulf(p, s)) for x, p, c, s in every], DTYPE)
        inside = times(self.column, ACCESS_BYTES)
        to = further(chip, arith.addi(times(self.row, 2 * a.width), inside))
        seen = arith.andi(self.there, less(self.row, a.group + 1))
        only_where(seen, store_shared, to, 0, words)
        place = arith.addi(times_long(slot, a.row_bytes), times_long(self.head, 2 * a.width))
        to = arith.select(self.of_k, self.at["k"], self.at["v"])
        kept = arith.andi(keeps, arith.andi(self.there, less(word(a.group - 1), self.row)))
        kept = arith.andi(kept, less(slot, a.slots))  # one below 0 is a word far above
        only_where(kept, store, further(arith.addi(to, place), inside), 0, words)

    def _normed(self, own: Words, *both: Words) -> Any:
        """Numbers of the access, and of its partner, where the head has a norm."""
        squares = sum_of_squares([arith.select(self.there, x, word(0)) for x in own], KINDS[DTYPE])
        squares = over_warp(squares, "add.f32", self.attend.turn_lanes)
        one = number(1.0)
        root, added = one, number(0.0)
        normed = functools.reduce(arith.ori, (here for _, here in self.norms))
        for norm, here in self.norms:
            mine = reciprocal_root(squares, self.attend.width, norm.eps)
            root = arith.select(here, mine, root)
            if norm.zero_centered:
                added = arith.select(here, one, added)
        found = []
        for numbers, scale in zip(both, self.scales, strict=True):
            factors = (arith.addf(each, added) for each in all_floats(scale, DTYPE))
            factors = [arith.select(normed, each, one) for each in factors]
            found.append(
                [arith.mulf(arith.mulf(x, root), f) for x, f in zip(numbers, factors, strict=True)]
            )
        return found


def _access(address: Any, column: Any) -> Words:
    """To what nobody writes in this launch."""
    return load_four(further(address, times(column, ACCESS_BYTES)), 0)
