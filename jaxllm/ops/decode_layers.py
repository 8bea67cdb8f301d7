"""All layers of a model, of one token: decoding in one launch, and not some for each layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.ops._select import Implementation, Table, pallas, select
from jaxllm.ops.attention import attention
from jaxllm.ops.between_attentions import (
    in_parts,
    packed_in,
    weights_as_shapes,
    why_not_faster,
    with_weights,
)
from jaxllm.ops.fused_linear import Cache, fused_linear
from pallas_kernels.between_attentions import Link
from pallas_kernels.decode_layers import Layer, Token, check, why_not
from pallas_kernels.decode_layers import decode_layers as in_one_launch
from pallas_kernels.device import INTERPRETED_OP_BY_OP
from pallas_kernels.measure import size_bytes

# Of a layer's weights, and of the room that it has for keys and values, up to which "auto" has all
# layers in one launch. H200, tokens a second in one launch and in two a layer, with room for 512
# keys: Qwen2.5-0.5B (28 MiB of weights) 2232 and 1859, Llama-3.1-8B in ternary (52) 1044 and 946,
# in int4 (107) 796 and 720, in int8 (208) 498 and 477, in bfloat16 (416) 264 and 267. With room for
# 4096 Llama-3.1-8B (16 MiB) makes 682 and 661 in int4, 454 and 441 to 449 in int8. Neither more of
# these was timed, nor weights between int8's and bfloat16's, nor an H100: benchmarks/notes.md
MOST_BYTES, MOST_CACHE_BYTES = 256 * 2**20, 16 * 2**20


def decode_layers(
    x: Float[Array, "*B D"],
    layers: Sequence[Layer],
    token: Token,
    *,
    meeting: Int[Array, " 2"],
    implementation: str | Mapping[str, str] = "auto",
) -> tuple[Float[Array, "*B D"], list[tuple[Array, Array]], Int[Array, " 2"]]:
    """(y, of each layer (k, v) with the token in them, meeting): what layers make of x, one row.

    layers: each with its weights, arrays or packed, and its cache. token: what they have in common;
    kv_lengths below 1 count as 1, above S as S.
    meeting: `no_meeting()`, or what the call before has returned.
    "xla" computes it op by op, each by the same `implementation`; "pallas" takes bfloat16, and the
    whole GPU while it runs.
    Raises: ValueError if shapes or dtypes disagree. NotImplementedError if the named implementation
    cannot run the call.
    """
    check(x, _shapes(x, layers, token), token, meeting)
    call = (x, layers, token)
    run = select("decode_layers", DECODE_LAYERS, implementation, *call, meeting=meeting)
    return run(*call, meeting=meeting, implementation=implementation)


def _with(change: Callable[[Link], Link], layer: Layer, token: Token) -> Layer:
    """The layer with other weights, made of those of its products."""
    return layer.with_products(change(layer.link(token)))


def _pallas(x, layers, token, *, meeting, implementation=None, interpret=False):
    del implementation
    change = functools.partial(with_weights, functools.partial(packed_in, x.dtype))
    layers = [_with(change, layer, token) for layer in layers]
    return in_one_launch(x, layers, token, meeting=meeting, interpret=interpret)


def _op_by_op(x, layers, token: Token, *, meeting, implementation):
    caches = []
    for layer in layers:
        qkv = layer.qkv
        around: Any = {"norm": qkv.norm, "epilogue": "rope", "rotary": layer.turning(token)}
        around |= {"cache": Cache(layer.k, layer.v, token.slots), "implementation": implementation}
        q, k, v = fused_linear(x, qkv.weight, qkv.bias, **around)
        heads = attention(
            q.reshape(1, 1, -1, k.shape[-1]),
            k,
            v,
            kv_lengths=jnp.clip(token.kv_lengths.astype(jnp.int32), 1, k.shape[1]),
            causal=True,
            scale=token.scale,
            window=token.window,
            implementation=implementation,
        )
        link = layer.link(token)._replace(following=None)
        heads = heads.reshape(*x.shape[:-1], -1)
        x, *_ = in_parts(heads, x, link, meeting=None, implementation=implementation)
        caches.append((k, v))
    return x, caches, meeting


def _shapes(x, layers: Sequence[Layer], token: Token) -> list[Layer]:
    """As the kernel is handed them."""
    return [_with(lambda link: weights_as_shapes(link, x.dtype), each, token) for each in layers]


def _why_not_pallas(x, layers, token, *, device, meeting) -> str | None:
    del meeting
    return why_not(x, _shapes(x, layers, token), token, device=device)


def _not_auto(x, layers, token, *, device, meeting) -> str | None:
    del device, meeting
    first = _shapes(x, layers[:1], token)[0]
    link = first.link(token)
    if reason := why_not_faster(x, link):
        return reason
    weights = size_bytes(*(product.weight for product in link.products.values()))
    for what, size, most in (
        ("weights", weights, MOST_BYTES),
        ("keys and values", size_bytes(first.k, first.v), MOST_CACHE_BYTES),
    ):
        if size > most:
            return (
                f"more than {most >> 20} MiB of {what} a layer ({size / 2**20:.2f} here) were not "
                "found to be faster in one launch"
            )
    return None


DECODE_LAYERS: Table = {
    **pallas(_pallas, _why_not_pallas, _not_auto, INTERPRETED_OP_BY_OP),
    "xla": Implementation(_op_by_op),
}

__all__ = ["DECODE_LAYERS", "Layer", "Token", "decode_layers"]
