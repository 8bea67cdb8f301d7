"""q's and k's heads of one token as lanes of `decode_layers` read them: normed, and turned.

A product gives these heads as they are, and whoever reads one has all of it, four lanes together:
so a norm needs no launch or meeting of its own. As in lane_code.py, values are those of one thread.
Imported only by decode_layers_attention.py.
Source of norm and rotation: around_product.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax._src.lib.mlir.dialects import arith

from pallas_kernels.between_attentions_config import NormNumbers
from pallas_kernels.decode_layers_config import EACH, Attend
from pallas_kernels.device import ACCESS_BYTES
from pallas_kernels.lane_arithmetic import (
    all_floats,
    fused,
    number,
    reciprocal_root,
    shuffled,
    sum_of_squares,
    words_of_floats,
)
from pallas_kernels.lane_code import further, less, load_four, load_late, times, word
from pallas_kernels.quantized_matmul_config import ACROSS

DTYPE, KIND = "bfloat16", "bf16x2"
ONES, SIGNS = 0x3F803F80, 0x80008000  # of both numbers of a word

Words = list[Any]  # of an access
Pair = tuple[Words, Words]  # of an access and of its partner, half of what is turned away


class Scale(NamedTuple):
    """A norm's: what it has beside its weight, and that weight."""

    numbers: NormNumbers
    weights: list[Pair]


class Turn:
    """What a lane needs to make heads what they are multiplied as."""

    def __init__(self, attend: Attend, across: Any, at: Mapping[str, Any]):
        """Asks for it: nobody writes that in this launch. across: which of the four lanes. at:
        addresses of cos and sin [R / 2] in bfloat16, and of the norms' weights, q_norm and k_norm.
        """
        self.attend, self.at, half = attend, at, attend.half // EACH
        self.places = [arith.addi(across, word(i * ACROSS)) for i in range(attend.accesses)]
        self.angles: list[Any]  # pairs of cosines and sines with their signs; None: not turned
        self.partners: list[Any]  # which of the lane's own accesses, or another's place
        if half % ACROSS == 0:
            self._pair_own(half // ACROSS)
        else:
            self._pair_others(half)
        self.scales = {
            name: Scale(norm, self._pairs(load_four, at[name]))
            for name, norm in (("q_norm", attend.q_norm), ("k_norm", attend.k_norm))
            if norm is not None
        }

    def _pair_own(self, step: int) -> None:
        """Where the partner is the lane's, so many accesses away."""
        of = [self._angle(place) for place in self.places[:step]]
        rest = range(2 * step, len(self.places))
        self.partners = [*range(step, 2 * step), *range(step), *rest]
        negative = ((cos, _signed(sin, word(SIGNS))) for cos, sin in of)
        self.angles = [*negative, *of, *(None for _ in rest)]

    def _pair_others(self, half: int) -> None:
        """Where it is another lane's, so many places away."""
        self.partners, self.angles = [], []
        for place in self.places:
            first, turned = less(place, half), less(place, 2 * half)
            back, on = arith.subi(place, word(half)), arith.addi(place, word(half))
            nearer = arith.select(turned, back, place)
            self.partners.append(arith.select(first, on, nearer))
            cos, sin = self._angle(arith.select(first, place, arith.select(turned, back, word(0))))
            sin = _signed(sin, arith.select(first, word(SIGNS), word(0)))
            cos = [arith.select(turned, each, word(ONES)) for each in cos]
            self.angles.append((cos, [arith.select(turned, each, word(0)) for each in sin]))

    def _angle(self, place: Any) -> Pair:
        """An access to cosines, and to sines."""
        cos, sin = (further(self.at[name], times(place, ACCESS_BYTES)) for name in ("cos", "sin"))
        return load_four(cos, 0), load_four(sin, 0)

    def _pairs(self, load: Callable[[Any, int], Words], address: Any) -> list[Pair]:
        """What lies there of a head, by the lane's accesses."""

        def at(place: Any) -> Words:
            return load(further(address, times(place, ACCESS_BYTES)), 0)

        own = [at(place) for place in self.places]
        partners = [own[each] if isinstance(each, int) else at(each) for each in self.partners]
        return list(zip(own, partners, strict=True))

    def loaded(self, head: Any) -> list[Pair]:
        """Of a head, whose address is given: other blocks have written it."""
        return self._pairs(load_late, head)

    def turned(self, head: list[Pair], norm: str) -> list[Words]:
        """What is loaded of a head, normed by the norm of that name, if there is one, and turned:
        rounded once. All lanes that have it together come here.
        """
        scale, found = self.scales.get(norm), []
        root = None if scale is None else self._root(head, scale.numbers.eps)
        for i, pair in enumerate(head):
            xs, partners = (all_floats(words, DTYPE) for words in pair)
            if scale is not None:
                xs, partners = (
                    _normed(numbers, root, words, zero_centered=scale.numbers.zero_centered)
                    for numbers, words in zip((xs, partners), scale.weights[i], strict=True)
                )
            if (angles := self.angles[i]) is not None:
                cos, sin = (all_floats(words, DTYPE) for words in angles)
                xs = [
                    fused(x, c, arith.mulf(partner, s))
                    for x, partner, c, s in zip(xs, partners, cos, sin, strict=True)
                ]
            found.append(words_of_floats(xs, DTYPE))
        return found

    def _root(self, head: list[Pair], eps: float) -> Any:
        squares = sum_of_squares([word for own, _ in head for word in own], KIND)
        for mask in (1, 2):
            squares = arith.addf(squares, shuffled(squares, mask))
        return reciprocal_root(squares, self.attend.width, eps)


def _signed(words: Words, signs: Any) -> Words:
    return [arith.xori(each, signs) for each in words]


def _normed(xs: list[Any], root: Any, weight: Words, *, zero_centered: bool) -> list[Any]:
    factors = all_floats(weight, DTYPE)
    if zero_centered:
        factors = [arith.addf(factor, number(1.0)) for factor in factors]
    return [arith.mulf(arith.mulf(x, root), factor) for x, factor in zip(xs, factors, strict=True)]
