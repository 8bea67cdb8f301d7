"""What stands before and behind a product in decoding: as data, its mathematics in plain JAX, and
what is refused of heads.

Norm, Rotary and Cache are what `gemv`, `quantized_matmul` and `rope_into_cache` take of it.
Source of the norm: Zhang and Sennrich 2019, arXiv:1910.07467; of the rotation: rope.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.options import check_flags, check_number
from pallas_kernels.rms_norm import rms_norm_reference
from pallas_kernels.rope import rope_reference


class Norm(NamedTuple):
    """An RMSNorm of x, as in rms_norm.py: weight [I]."""

    weight: Float[Array, " I"]
    eps: float
    zero_centered: bool = False

    @property
    def keywords(self) -> dict[str, Any]:
        """What an RMSNorm is called with, beside arrays."""
        return {"eps": self.eps, "zero_centered": self.zero_centered}


class Rotary(NamedTuple):
    """cos and sin [*B, R / 2] of x's rows; the outputs are q's, k's and v's heads of H in turn, of
    which the first R numbers are turned.

    q_norm, k_norm: of each of q's heads and of k's, weights [H], before they are turned.
    """

    cos: Float[Array, "*B R2"]
    sin: Float[Array, "*B R2"]
    q_heads: int
    kv_heads: int
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    @property
    def norms(self) -> dict[str, Norm]:
        """Those that there are, by name."""
        named = {"q_norm": self.q_norm, "k_norm": self.k_norm}
        return {name: norm for name, norm in named.items() if norm is not None}

    def width(self, outputs: int) -> int:
        """Of a head, where all have so many."""
        return outputs // (self.q_heads + 2 * self.kv_heads)

    def split(self, outputs: Float[Array, "B NKH"]) -> list[Array]:
        """q, k and v [1, B, heads, H] of outputs [B, (N + 2 K) H]."""
        rows, numbers = outputs.shape
        places = (self.q_heads, self.q_heads + self.kv_heads)
        count = places[-1] + self.kv_heads
        return jnp.split(outputs.reshape(1, rows, count, self.width(numbers)), places, axis=2)

    def why_apart(self, outputs: int) -> str | None:
        """What keeps so many outputs from being turned where they are summed, each with its partner
        half a head further.
        """
        if self.norms:
            return "heads are normed before they are turned"
        if (turned := 2 * self.cos.shape[-1]) != (width := self.width(outputs)):
            return f"{turned} of the {width} numbers of a head are turned"
        return None


class Cache(NamedTuple):
    """Keys and values [B, S, K, H], and the slot of each row, int32 [B], that its token goes to."""

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]
    slots: Int[Array, " B"]


def around_heads(inputs: int, q_heads: int, kv_heads: int, width: int) -> dict[str, Any]:
    """Keywords of a product of q, k and v whose `tuning_calls` want some norm and angles."""
    # not one number throughout: XLA would make that of a constant by a kernel that is timed too
    weight = jnp.linspace(0.5, 1.5, inputs, dtype=jnp.float32).astype(jnp.bfloat16)
    angles = jnp.linspace(-1, 1, width // 2, dtype=jnp.float32)[None]
    rotary = Rotary(jnp.cos(angles), jnp.sin(angles), q_heads, kv_heads)
    return {"norm": Norm(weight, 1e-5), "epilogue": "rope", "rotary": rotary}


def turn_and_write(heads, rotary, cache=None):
    """q [B, N H] of heads of q, k and v side by side, normed and turned, and k and v: [B, K, H], or
    those of the cache with these in their slots.
    """
    q, k, v = rotary.split(heads)
    q, k = (
        z if norm is None else rms_norm_reference(z, norm.weight, **norm.keywords)
        for z, norm in ((q, rotary.q_norm), (k, rotary.k_norm))
    )
    q, k = rope_reference(q, k, *(a[None] for a in rotary[:2]))
    k, v = (k[0], v[0]) if cache is None else write(cache, k[0], v[0])
    return q.reshape(len(heads), q.shape[2] * q.shape[3]), k, v


def write(cache: Cache, k: Float[Array, "B K H"], v: Float[Array, "B K H"]) -> tuple[Array, Array]:
    """The cache's keys and values with one token more a row; none where a slot is no place."""
    # XLA makes one kernel of many updates, and two of one: a head is an update of its own
    rows, heads = (jnp.arange(n, dtype=jnp.int32) for n in k.shape[:2])
    at = (rows[:, None], cache.slots[:, None], heads[None, :])
    into: Any = {"mode": "drop", "unique_indices": True, "wrap_negative_indices": False}
    held = ((jnp.asarray(cache.k), k), (jnp.asarray(cache.v), v))
    k, v = (a.at[at].set(new.astype(a.dtype), **into) for a, new in held)
    return k, v


def check_post_norm(post_norm: Norm, outputs: int, *, who: str) -> None:
    """Refuses a norm that is none of so many outputs; shapes suffice.

    Raises: ValueError, in the name of the op `who`.
    """
    weight, eps, zero_centered = post_norm
    check_number(who, "the post_norm's eps", eps, positive=True)
    check_flags(who, zero_centered=zero_centered)
    if weight.shape != (outputs,) or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ValueError(
            f"{who}: the post_norm's weight must be floating point, [O] = [{outputs}], got "
            f"{weight.dtype}{list(weight.shape)}"
        )


def check_head_norms(rotary: Rotary, width: int, *, who: str) -> None:
    """Refuses norms that are none of a head, of this width, of q or k; shapes suffice.

    Raises: ValueError, in the name of the op `who`.
    """
    for name, (weight, eps, zero_centered) in rotary.norms.items():
        check_number(who, f"{name}'s eps", eps, positive=True)
        check_flags(who, zero_centered=zero_centered)
        if weight.shape != (width,) or not jnp.issubdtype(weight.dtype, jnp.floating):
            raise ValueError(
                f"{who}: {name}'s weight must be floating point, [H] = [{width}], got "
                f"{weight.dtype}{list(weight.shape)}"
            )


def check_heads(heads, rotary, cache, *, who: str) -> None:
    """Refuses heads [*B, (N + 2 K) H] that cannot be turned and written; shapes suffice.

    Raises: ValueError, in the name of the op `who`.
    """
    lead, count = heads.shape[:-1], rotary.q_heads + 2 * rotary.kv_heads
    width = cache.k.shape[-1]
    half = min([width // 2, *rotary.cos.shape[-1:]])
    own = math.prod(lead), cache.k.shape[1], rotary.kv_heads, width
    wanted = {
        "heads": (heads, (*lead, count * width)),
        "cos": (rotary.cos, (*lead, half)),
        "sin": (rotary.sin, (*lead, half)),
        "the cache's keys": (cache.k, own),
        "the cache's values": (cache.v, own),
        "the cache's slots": (cache.slots, own[:1]),
    }
    check_head_norms(rotary, width, who=who)
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(f"{who}: {name} must be {list(shape)}, got {list(array.shape)}")
    if not heads.dtype == cache.k.dtype == cache.v.dtype:
        raise ValueError(
            f"{who}: heads are {heads.dtype}, but the cache holds {cache.k.dtype} and "
            f"{cache.v.dtype}"
        )
    if not jnp.issubdtype(cache.slots.dtype, jnp.integer):
        raise ValueError(f"{who}: slots must be integers, got {cache.slots.dtype}")
    for name, angles in (("cos", rotary.cos), ("sin", rotary.sin)):
        if not jnp.issubdtype(angles.dtype, jnp.floating):
            raise ValueError(f"{who}: {name} is {angles.dtype}; it must be floating point")
