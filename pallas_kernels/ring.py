"""A ring of slots on chip, which some warpgroups fill and others give back, in turn."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Ring:
    """What is brought n-th, from 0, lies in slot n % slots.

    full, empty: barriers, one a slot, at which what is brought arrives (a copy by itself) and those
    who are done with it.
    """

    full: Any
    empty: Any
    slots: int

    def slot(self, n: Any) -> jax.Array:
        """int32, of an int32 n."""
        return lax.rem(n, jnp.int32(self.slots))

    def claim(self, n: Any) -> jax.Array:
        """The slot of what is now brought, as soon as all have given back what was there."""

        @pl.when(n >= self.slots)
        def _():
            plgpu.barrier_wait(self.empty.at[self.slot(n)])

        return self.slot(n)  # anew: a number kept from before has ptxas unroll the loop

    def wait(self, n: Any) -> jax.Array:
        """The slot of the n-th, as soon as it is there."""
        slot = self.slot(n)
        plgpu.barrier_wait(self.full.at[slot])
        return slot

    def give_back(self, n: Any) -> None:
        plgpu.barrier_arrive(self.empty.at[self.slot(n)])

    def drain(self, count: Any) -> None:
        """Waits until all `count` were given back: every phase of a barrier must be seen."""
        for slot in range(self.slots):
            wait = functools.partial(plgpu.barrier_wait, self.empty.at[jnp.int32(slot)])
            pl.when(count > slot)(wait)
