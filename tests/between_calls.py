"""Calls of `between_attentions` by chance, and what is right of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from numerics import assert_as_accurate
from quantized_calls import BF16, F32, SLOTS, TILED_FORMATS, numbers

from pallas_kernels.around_product import Cache, Norm, Rotary
from pallas_kernels.between_attentions import (
    Following,
    Link,
    Weights,
    between_attentions,
    between_attentions_reference,
)
from pallas_kernels.between_attentions_config import MEETING_WORDS
from pallas_kernels.packed import PLAIN, Packed
from pallas_kernels.quantize import quantize


def weight(seed: int, o: int, i: int, form: str) -> Packed:
    plain = numbers(seed, (o, i), BF16, i**-0.5)
    if form == PLAIN:
        return Packed.of(plain)
    if form == "ternary":
        return quantize(plain, form)
    scheme, group, zeros, *_ = TILED_FORMATS[form]
    return quantize(plain, scheme, group, zero_points=zeros)


def call(
    d: int,
    f: int,
    heads: tuple[int, int, int] | None,
    form: str,
    *,
    bias: bool = False,
    centred: bool = False,
    slot: int = 2,
    sub_norms: bool = False,
    gate: str = "swiglu",
    turned: bool = True,
    post_norms: str = "",
) -> dict[str, Any]:
    """Arguments; heads: how many q and k have and their width, or None for no next layer. turned:
    whether these are, or the product stays as it is. post_norms: behind "out", "down" or both.
    """
    n, k, width = heads or (2, 1, 64)

    def norm(seed: int, size: int = d) -> Norm:
        return Norm(numbers(seed, (size,), BF16, 0.1 if centred else 1.0), 0.1, centred)

    def weights(seed: int, o: int, i: int, norm: Norm | None = None) -> Weights:
        more = numbers(seed + 20, (o,), BF16) if bias else None
        return Weights(weight(seed, o, i, form), more, norm)

    before, within = (norm(11, n * width), norm(12, f)) if sub_norms else (None, None)
    behind = {name: norm(13 + i) for i, name in enumerate(post_norms.split())}
    products = (
        weights(2, d, n * width, before)._replace(post_norm=behind.get("out")),
        weights(4, 2 * f, d, norm(3)),
        weights(5, d, f, within)._replace(post_norm=behind.get("down")),
    )
    following = None
    if heads is not None:
        angles = np.random.default_rng(6).uniform(-np.pi, np.pi, (1, width // 2))
        cos, sin = (jnp.asarray(g(angles), F32) for g in (np.cos, np.sin))
        held = (numbers(seed, (1, SLOTS, k, width), BF16) for seed in (7, 8))
        cache = Cache(*held, jnp.asarray([slot], jnp.int32))
        qkv = weights(10, (n + 2 * k) * width, d, norm(9))
        following = Following(qkv, Rotary(cos, sin, n, k), cache) if turned else Following(qkv)
    rows = {"heads": numbers(0, (1, n * width), BF16), "x": numbers(1, (1, d), BF16)}
    return {**rows, "link": Link(*products, following, gate)}


def jitted(
    arguments: dict[str, Any],
    kernel: Callable[..., Any] = between_attentions,
    **how: Any,
) -> tuple[Any, tuple[Any, ...]]:
    """The call as a function of its arrays and the meeting, and these."""
    leaves, tree = jax.tree.flatten(arguments)
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")]

    def run(arrays: list[Any], meeting: Any) -> Any:
        every = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            every[place] = array
        return kernel(**jax.tree.unflatten(tree, every), meeting=meeting, **how)

    return run, ([leaves[i] for i in places], jnp.zeros(MEETING_WORDS, jnp.int32))


def shapes_of(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The arguments that it makes, of shapes alone."""
    arguments: dict[str, Any] = {}

    def build() -> list[Any]:
        arguments.update(make())
        return [a for a in jax.tree.leaves(arguments) if hasattr(a, "shape")]

    rest = iter(jax.eval_shape(build))
    leaves, tree = jax.tree.flatten(arguments)
    return jax.tree.unflatten(tree, [next(rest) if hasattr(x, "shape") else x for x in leaves])


def exact(a: Any) -> np.ndarray:
    """In float64."""
    return np.asarray(a).astype(np.float64)


def normed(x: np.ndarray, norm: Norm) -> Any:
    """Likewise."""
    return oracles.rms_norm(x, exact(norm.weight) + norm.zero_centered, eps=norm.eps)


def product(x: np.ndarray, weights: Weights, **rest: Any) -> Any:
    """Likewise, with its norms and bias."""
    if (post_norm := weights.post_norm) is not None:
        residual = rest.pop("residual")
        z = product(x, weights._replace(post_norm=None), **rest)
        return residual + normed(z, post_norm)
    if (norm := weights.norm) is not None:
        x = normed(x, norm)
    if weights.bias is not None:
        rest["bias"] = exact(weights.bias)
    return oracles.matmul(x, oracles.packed_numbers(weights.weight), transpose_b=True, **rest)


def truth(arguments: dict[str, Any]) -> Any:
    """In float64, rounded nowhere but where angles are."""
    link = arguments["link"]
    x = product(exact(arguments["heads"]), link.out, residual=exact(arguments["x"]))
    gated = product(x, link.gate_up, epilogue=link.gate)
    y = product(gated, link.down, residual=x)
    if link.following is None:
        return y, None
    qkv, rotary, cache = link.following
    if rotary is None:
        return y, (product(y, qkv),)
    angles = (exact(angle.astype(cache.k.dtype)) for angle in rotary[:2])
    return y, oracles.turn_and_write(product(y, qkv), *angles, rotary.q_heads, cache)


def written_alone(after: Any, cache: Cache) -> Any:
    """q, and of what is given for the cache the slot that was written; the others are as before."""
    q, *held = after
    slot = int(np.asarray(cache.slots)[0])
    for ours, before in zip(held, (cache.k, cache.v), strict=True):
        np.testing.assert_array_equal(np.delete(ours, slot, 1), np.delete(before, slot, 1))
    return q, *(a[:, slot] for a in held)


def assert_near(y: Any, near: Any) -> None:
    """Three roundings of x to int8 lie behind each other, and a number that goes the other way in
    one is off by 1/127 of the largest: of some hundred numbers, by more than the sum's rounding.
    """
    y, near = (np.asarray(a).astype(np.float64) for a in (y, near))
    error = np.linalg.norm(y - near) / np.linalg.norm(near)
    assert error < 4e-2, f"the error is {error:.1e}"


def assert_right(arguments: dict[str, Any], ours: Any) -> None:
    """Of a ternary link, near the plain path: what becomes int8 makes a tie of any difference."""
    plain = between_attentions_reference(**arguments)
    if arguments["link"].out.weight.scheme == "ternary":
        if (following := arguments["link"].following) is not None and following.rotary is not None:
            ours, plain = ((y, written_alone(after, following.cache)) for y, after in (ours, plain))
        for y, near in zip(*map(jax.tree.leaves, (ours, plain)), strict=True):
            assert (y.dtype, y.shape) == (near.dtype, near.shape)
            assert_near(y, near)
        return
    for y, near, far in zip(*map(jax.tree.leaves, (ours, plain, truth(arguments))), strict=True):
        assert (y.dtype, y.shape) == (near.dtype, near.shape)
        assert_as_accurate(y, near, far)
