"""Outputs that are heads of q, k and v in turn: which of them a block has, where they go, RoPE.

A block has `size` outputs of the first half of a head and their partners half a head further, which
one angle turns: x1 cos - x2 sin and x2 cos + x1 sin. Imported by gemv_kernel.py,
quantized_matmul_kernel.py (for the interpreter) and rope_into_cache.py.
Source: Su et al. 2021, arXiv:2104.09864.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl


class HeadPlaces(NamedTuple):
    """Of the block with this number, which has `size` outputs of either half of a head.

    heads: how many are q's and k's; half: of what is turned of a head, how many outputs; rest: how
    many are behind that, which a block of whole heads has too.
    """

    block: Any
    size: int
    half: int
    heads: tuple[int, int]
    rest: int = 0

    @property
    def width(self) -> int:
        """Of a head."""
        return 2 * self.half + self.rest

    @property
    def head(self) -> Any:
        return lax.div(self.block, self.half // self.size)

    @property
    def first(self) -> Any:
        """Of a half, where the block's outputs begin."""
        return lax.rem(self.block, self.half // self.size) * self.size

    @property
    def pieces(self) -> list[tuple[Any, int]]:
        """Of a head, where the block's outputs begin and how many there are: of either half, and
        of the rest.
        """
        found = [(self.first, self.size), (self.first + self.half, self.size)]
        return [*found, (2 * self.half, self.rest)] if self.rest else found

    @property
    def starts(self) -> list[Any]:
        """Of all outputs, where the block's pieces begin."""
        return [self.width * self.head + start for start, _ in self.pieces]

    def turned(self, ys: Any, cos: Any, sin: Any) -> list[Any]:
        """The outputs, those of q's and k's halves turned; all float32."""
        here = (self.head < sum(self.heads)).astype(jnp.float32)  # v's heads stay
        cos, sin = cos * here + (1 - here), sin * here
        left, right, *rest = ys
        return [left * cos - right * sin, right * cos + left * sin, *rest]

    def targets(self, out_refs: Any, held: Any, one: Any) -> list[tuple[Any, ...]]:
        """Where outputs of a row of x may go: (whether, a reference for each piece).

        out_refs: of q, [M, N H]. held: references to a cache's keys and values, and its slots; if
        there is none, out_refs have a second for k and v, [M, 2 K H].
        """

        def side_by_side(ref: Any, before: int) -> list[Any]:
            places = zip(self.starts, self.pieces, strict=True)
            return [ref.at[one, pl.ds(start - before, size)] for start, (_, size) in places]

        q, kv = self.heads
        found: list[tuple[Any, ...]] = [(self.head < q, *side_by_side(out_refs[0], 0))]
        if held is None:
            return [*found, (self.head >= q, *side_by_side(out_refs[1], self.width * q))]
        slot = held[2][one]
        fits = (slot >= 0) & (slot < held[0].shape[1])
        for which, ref in enumerate(held[:2]):
            mine = self.head - q - which * kv
            places = (pl.ds(*piece) for piece in self.pieces)
            whether = (mine >= 0) & (mine < kv) & fits
            found.append((whether, *(ref.at[one, slot, mine, place] for place in places)))
        return found
