"""Calls of `ops.attention` with small numbers, and what they should give: shared by its tests."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from kernels import interpreted

from jaxllm.ops.attention import attention


def numbers(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def inputs(B=2, T=5, S=5, N=4, K=2, H=8, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    """q, k, v and a cotangent; scores of a size that makes attention far from uniform."""
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))
    q, k, v, d_out = (numbers(i, *shape, dtype=dtype) for i, shape in enumerate(shapes))
    return q * jnp.asarray(2, dtype), k, v, d_out


def ids(*rows: str) -> jax.Array:
    return jnp.asarray([[int(c) for c in row] for row in rows], jnp.int32)


def lengths(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def segments(q: jax.Array, kv: jax.Array | None = None) -> dict[str, jax.Array]:
    return {"q_segment_ids": q, "kv_segment_ids": q if kv is None else kv}


SINKS = jnp.asarray([0.5, -1.0, 2.0, -jnp.inf], jnp.float32)  # a head: the last has none

# Sizes, then arguments. Every value of an argument meets several of the others.
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "causal": ({}, {}),
    "all see all": ({"N": 3, "K": 3}, {"causal": False}),
    "one head, odd width": ({"N": 1, "K": 1, "H": 5}, {}),
    "one key head for six": ({"N": 6, "K": 1, "T": 3, "S": 3}, {"scale": 0.3}),
    "two heads a key head, prime sizes": ({"N": 6, "K": 3, "T": 7, "S": 7, "H": 3}, {"softcap": 2}),
    "one token": ({"T": 1, "S": 7}, {}),
    "one token over a cache": ({"T": 1, "S": 7}, {"kv_lengths": lengths(3, 7)}),
    "one token, window": ({"T": 1, "S": 7}, {"window": 3, "kv_lengths": lengths(2, 7)}),
    "one token over a full cache": ({"T": 1, "S": 7}, {"kv_lengths": lengths(8, 7), "window": 3}),
    "a chunk behind others": ({"T": 3, "S": 7}, {}),
    "a chunk over a cache": ({"T": 3, "S": 7}, {"kv_lengths": lengths(4, 7), "softcap": 1.5}),
    "a chunk over an empty row": ({"T": 3, "S": 7}, {"kv_lengths": lengths(0, 2), "window": 2}),
    "a padded chunk past the end": ({"T": 3, "S": 7}, {"kv_lengths": lengths(8, 9)}),
    "more queries than keys": ({"T": 7, "S": 4}, {"window": 3}),
    "more queries than keys, not causal": ({"T": 9, "S": 5}, {"window": 6, "causal": False}),
    "one key": ({"T": 4, "S": 1}, {}),
    "window of one": ({}, {"window": 1, "softcap": 3.0}),
    "window": ({"T": 7, "S": 7}, {"window": 3}),
    "window wider than the text": ({}, {"window": 9}),
    "window to both sides": ({"T": 3, "S": 7}, {"window": 2, "causal": False}),
    "lengths, not causal": ({"T": 3, "S": 7}, {"causal": False, "kv_lengths": lengths(2, 6)}),
    "packed": ({"T": 7, "S": 7}, segments(ids("1122223", "0011100"))),
    "packed, window": ({"T": 7, "S": 7}, {**segments(ids("1112222", "1111111")), "window": 2}),
    "packed, not causal": ({}, {**segments(ids("12122", "11222")), "causal": False}),
    "segments that nobody has": ({"T": 2, "S": 4}, segments(ids("31", "22"), ids("1122", "1111"))),
    "sinks": ({}, {"sinks": SINKS}),
    "sinks, window, softcap": ({"T": 3, "S": 7}, {"sinks": SINKS, "window": 2, "softcap": 2.0}),
    "sinks alone": ({"T": 3, "S": 7}, {"sinks": SINKS, "kv_lengths": lengths(0, 2)}),
    "segments and lengths": (
        {"T": 4, "S": 6},
        {**segments(ids("1122", "1111"), ids("111122", "111111")), "kv_lengths": lengths(6, 3)},
    ),
}
NOTHING: dict[str, Any] = {
    **dict.fromkeys(
        ("window", "softcap", "q_segment_ids", "kv_segment_ids", "kv_lengths", "sinks")
    ),
    **dict.fromkeys(("q_scale", "k_scale", "v_scale")),
    "return_weights": False,
}


def compare(arrays, kwargs, gradient: bool, implementation: str, *, one_by_one: bool = False):
    """Ours, the plain path and the truth: the result, and the gradients of q, k, v and sinks.

    `arrays` are q, k, v and the cotangent. one_by_one: how the plain path's products add up.
    """
    *qkv, d_out = arrays
    dtype = qkv[0].dtype
    # Arrays are traced, as in a model; the rest is part of the program
    sides = {name: jnp.asarray(x) for name, x in kwargs.items() if hasattr(x, "shape")}
    rest = {name: value for name, value in kwargs.items() if name not in sides}
    sinks = [sides.pop("sinks")] if "sinks" in sides else []

    def both(operands, d_out, sides):
        def call(q, k, v, *sinks):
            more = {**sides, **rest, **({"sinks": sinks[0]} if sinks else {})}
            return attention(q, k, v, **more, implementation=implementation)

        if not gradient:
            return (call(*operands),)
        out, pull = jax.vjp(call, *operands)
        return out, *pull(d_out)

    args, operands = (*qkv, *sinks), tuple(np.asarray(x) for x in qkv)
    known = {name: np.asarray(value) for name, value in sides.items()} | rest
    if qkv[0].shape[1] == 1 and "kv_lengths" in known:  # a traced one past the end counts as S
        known["kv_lengths"] = np.minimum(known["kv_lengths"], qkv[1].shape[1])
    if sinks:
        known["sinks"] = np.asarray(sinks[0])
    expected = []
    for kind in (dtype, np.dtype(np.float64)):
        known |= {"dtype": kind, "one_by_one": one_by_one and kind == dtype}
        if gradient:
            known |= {"d_out": np.asarray(d_out), "return_both": True}
        found = oracles.attention(*operands, **known)
        expected.append(found if gradient else (found,))
    if implementation.endswith("-interpret"):
        return interpreted(both, args, d_out, sides), *expected
    return jax.jit(both)(args, d_out, sides), *expected
