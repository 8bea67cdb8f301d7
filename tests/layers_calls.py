"""Calls of `decode_layers` by chance, and what is right of them."""

from __future__ import annotations

from typing import Any

import between_calls
import jax
import jax.numpy as jnp
import numpy as np
import oracles
from between_calls import assert_near, exact, product, weight
from numerics import assert_as_accurate
from quantized_calls import BF16, F32, numbers

from pallas_kernels.around_product import Cache, Norm, Rotary
from pallas_kernels.between_attentions import Weights
from pallas_kernels.decode_layers import (
    Layer,
    Token,
    decode_layers,
    decode_layers_reference,
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
    slot: int | None = None,
    length: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    centred: bool = False,
    bias: bool = False,
    sub_norms: bool = False,
    gate: str = "swiglu",
    head_norms: str = "",
    turned: int | None = None,
) -> dict[str, Any]:
    """Arguments; heads: how many q and k have, and their width. slot, length: None for those of a
    token that is the last of `keys`. head_norms: of "q", "k" or both. turned: of a head, None: all.
    """
    n, k, width = heads
    seeds = iter(range(1000))

    def norm(size: int = d) -> Norm:
        return Norm(numbers(next(seeds), (size,), BF16, 0.1 if centred else 1.0), 0.1, centred)

    def weights(o: int, i: int, norm: Norm | None = None) -> Weights:
        more = numbers(next(seeds), (o,), BF16) if bias else None
        return Weights(weight(next(seeds), o, i, form), more, norm)

    def held() -> jax.Array:
        return numbers(next(seeds), (1, slots, k, width), BF16)

    def layer() -> Layer:
        before, within = (norm(n * width), norm(f)) if sub_norms else (None, None)
        qkv = weights((n + 2 * k) * width, d, norm())
        out, gate_up = weights(d, n * width, before), weights(2 * f, d, norm())
        down, cache = weights(d, f, within), (held(), held())
        norms = (norm(width) if name in head_norms else None for name in "qk")
        return Layer(qkv, out, gate_up, down, *cache, *norms)

    angles = np.random.default_rng(6).uniform(-np.pi, np.pi, (1, (turned or width) // 2))
    rotary = Rotary(*(jnp.asarray(g(angles), F32) for g in (np.cos, np.sin)), n, k)
    slot, length = keys - 1 if slot is None else slot, keys if length is None else length
    slots_of, lengths = (jnp.asarray([each], jnp.int32) for each in (slot, length))
    token = Token(rotary, slots_of, lengths, scale, window, gate)
    return {
        "x": numbers(77, (1, d), BF16),
        "layers": [layer() for _ in range(layers)],
        "token": token,
    }


def jitted(arguments: dict[str, Any], **how: Any) -> tuple[Any, tuple[Any, ...]]:
    """The call as a function of its arrays and the meeting, and these."""
    return between_calls.jitted(arguments, decode_layers, **how)


def seen(arguments: dict[str, Any]) -> int:
    """How many keys the token sees but for a window."""
    slots = arguments["layers"][0].k.shape[1]
    return min(max(int(arguments["token"].kv_lengths[0]), 1), slots)


def poisoned(arguments: dict[str, Any]) -> dict[str, Any]:
    """Where keys and values that are not seen, and the token's own, are no numbers."""
    slot, count = int(arguments["token"].slots[0]), seen(arguments)

    def held(array: jax.Array) -> jax.Array:
        array = array.at[:, count:].set(jnp.nan)
        return array.at[:, slot : slot + 1].set(jnp.nan)  # past the end it is nowhere

    layers = [layer._replace(k=held(layer.k), v=held(layer.v)) for layer in arguments["layers"]]
    return {**arguments, "layers": layers}


def truth(arguments: dict[str, Any]) -> Any:
    """In float64, rounded nowhere but where angles are."""
    token: Token = arguments["token"]
    x, caches = exact(arguments["x"]), []
    rotary, slots, count = token.rotary, token.slots, seen(arguments)
    for layer in arguments["layers"]:
        angles = (exact(angle.astype(BF16)) for angle in rotary[:2])
        cache = Cache(exact(layer.k), exact(layer.v), slots)
        norms, heads = (layer.q_norm, layer.k_norm), product(x, layer.qkv)
        q, k, v = oracles.turn_and_write(heads, *angles, rotary.q_heads, cache, norms)
        width = k.shape[-1]
        heads = oracles.attention(
            q.reshape(1, 1, -1, width),
            k[:, :count],
            v[:, :count],
            kv_lengths=np.asarray([count]),
            scale=token.scale,
            window=token.window,
        )
        x = product(heads.reshape(1, -1), layer.out, residual=x)
        gated = product(x, layer.gate_up, epilogue=token.gate)
        x = product(gated, layer.down, residual=x)
        caches.append((k, v))
    return x, caches


def assert_right(arguments: dict[str, Any], ours: Any) -> None:
    """Of ternary layers, near the plain path: what becomes int8 makes a tie of any difference."""
    plain = decode_layers_reference(**arguments)
    count = seen(arguments)

    def numbers_of(found: Any) -> list[Any]:
        x, caches = found
        return [x, *(array[:, :count] for both in caches for array in both)]

    if arguments["layers"][0].out.weight.scheme == "ternary":
        for y, near in zip(*map(numbers_of, (ours, plain)), strict=True):
            assert (y.dtype, y.shape) == (near.dtype, near.shape)
            assert_near(y, near)
        return
    for y, near, far in zip(*map(numbers_of, (ours, plain, truth(arguments))), strict=True):
        assert (y.dtype, y.shape) == (near.dtype, near.shape)
        assert_as_accurate(y, near, far)
