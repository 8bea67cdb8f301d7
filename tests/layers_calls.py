"""Calls of `decode_layers` by chance, and what is right of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from between_calls import assert_near, weight
from numerics import assert_as_accurate
from quantized_calls import BF16, F32, numbers

from pallas_kernels.around_product import Cache, Norm, Rotary
from pallas_kernels.between_attentions import Weights
from pallas_kernels.decode_layers import (
    Layer,
    Token,
    decode_layers,
    decode_layers_reference,
    meeting_words,
)
from pallas_kernels.packed import PLAIN


def call(
    d: int,
    f: int,
    heads: tuple[int, int, int],
    form: str = PLAIN,
    *,
    layers: int = 2,
    slots: int = 40,
    keys: int = 21,
    window: int | None = None,
    bias: bool = False,
    sub_norms: bool = False,
    gate: str = "swiglu",
) -> dict[str, Any]:
    """Arguments; heads: how many q and k have, and their width."""
    n, k, width = heads
    seeds = iter(range(1000))

    def norm(size: int = d) -> Norm:
        return Norm(numbers(next(seeds), (size,), BF16), 1e-5)

    def weights(o: int, i: int, norm: Norm | None = None) -> Weights:
        more = numbers(next(seeds), (o,), BF16) if bias else None
        return Weights(weight(next(seeds), o, i, form), more, norm)

    def held() -> jax.Array:
        return numbers(next(seeds), (1, slots, k, width), BF16)

    def layer() -> Layer:
        before, within = (norm(n * width), norm(f)) if sub_norms else (None, None)
        qkv = weights((n + 2 * k) * width, d, norm())
        out, gate_up = weights(d, n * width, before), weights(2 * f, d, norm())
        return Layer(qkv, out, gate_up, weights(d, f, within), held(), held())

    angles = np.random.default_rng(6).uniform(-np.pi, np.pi, (1, width // 2))
    rotary = Rotary(*(jnp.asarray(g(angles), F32) for g in (np.cos, np.sin)), n, k)
    slot, lengths = (jnp.asarray([each], jnp.int32) for each in (keys - 1, keys))
    token = Token(rotary, slot, lengths, None, window, gate)
    return {
        "x": numbers(77, (1, d), BF16),
        "layers": [layer() for _ in range(layers)],
        "token": token,
    }


def jitted(arguments: dict[str, Any], **how: Any) -> tuple[Any, tuple[Any, ...]]:
    """The call as a function of its arrays and the meeting, and these."""
    leaves, tree = jax.tree.flatten(arguments)
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")]
    words = meeting_words(arguments["token"].rotary.kv_heads)

    def run(arrays: list[Any], meeting: Any) -> Any:
        every = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            every[place] = array
        return decode_layers(**jax.tree.unflatten(tree, every), meeting=meeting, **how)

    return run, ([leaves[i] for i in places], jnp.zeros(words, jnp.int32))


def poisoned(arguments: dict[str, Any]) -> dict[str, Any]:
    """Where keys and values that are not seen, and the token's own, are no numbers."""
    keys = int(arguments["token"].kv_lengths[0])
    layers = [
        layer._replace(
            **{name: getattr(layer, name).at[:, keys - 1 :].set(jnp.nan) for name in "kv"}
        )
        for layer in arguments["layers"]
    ]
    return {**arguments, "layers": layers}


def truth(arguments: dict[str, Any]) -> Any:
    """In float64, rounded nowhere but where angles are."""

    def exact(a: Any) -> np.ndarray:
        return np.asarray(a).astype(np.float64)

    def product(x: np.ndarray, weights: Weights, **rest: Any) -> Any:
        if (norm := weights.norm) is not None:
            x = oracles.rms_norm(x, exact(norm.weight) + norm.zero_centered, eps=norm.eps)
        if weights.bias is not None:
            rest["bias"] = exact(weights.bias)
        return oracles.matmul(x, oracles.packed_numbers(weights.weight), transpose_b=True, **rest)

    token: Token = arguments["token"]
    x, caches = exact(arguments["x"]), []
    rotary, slots, lengths = token.rotary, token.slots, np.asarray(token.kv_lengths)
    for layer in arguments["layers"]:
        angles = (exact(angle.astype(BF16)) for angle in rotary[:2])
        cache = Cache(exact(layer.k), exact(layer.v), slots)
        q, k, v = oracles.turn_and_write(product(x, layer.qkv), *angles, rotary.q_heads, cache)
        width = k.shape[-1]
        heads = oracles.attention(
            q.reshape(1, 1, -1, width),
            k[:, : lengths[0]],
            v[:, : lengths[0]],
            kv_lengths=lengths,
            window=token.window,
        )
        x = product(heads.reshape(1, -1), layer.out, residual=x)
        gated = product(x, layer.gate_up, epilogue="swiglu")
        x = product(gated, layer.down, residual=x)
        caches.append((k, v))
    return x, caches


def assert_right(arguments: dict[str, Any], ours: Any) -> None:
    """Of ternary layers, near the plain path: what becomes int8 makes a tie of any difference."""
    plain = decode_layers_reference(**arguments)
    keys = int(arguments["token"].kv_lengths[0])

    def seen(found: Any) -> list[Any]:
        x, caches = found
        return [x, *(array[:, :keys] for both in caches for array in both)]

    if arguments["layers"][0].out.weight.scheme == "ternary":
        for y, near in zip(*map(seen, (ours, plain)), strict=True):
            assert (y.dtype, y.shape) == (near.dtype, near.shape)
            assert_near(y, near)
        return
    for y, near, exact in zip(*map(seen, (ours, plain, truth(arguments))), strict=True):
        assert (y.dtype, y.shape) == (near.dtype, near.shape)
        assert_as_accurate(y, near, exact)
