"""Layers one behind the other, of one token: what lies between two attentions is one op, or all of
them are.

A `Block` begins with a norm and ends with a sum; what wants fewest launches begins behind a layer's
attention and ends before the next one's. So a token goes through layers of the plain kind here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxllm import ops
from jaxllm.cache import Entry, LayerCache
from jaxllm.layers import Block, RMSNorm, Tables, weight_of

# Ops that have launches of their own where `decode_layers` has all layers in one
_INSTEAD = {"attention", "fused_linear", "between_attentions"}


def links(
    blocks: Sequence[Block],
    x: Float[Array, "B T D"],
    rotary: Sequence[Tables],
    caches: Sequence[LayerCache],
) -> list[ops.Link] | None:
    """What `decode` goes through, of each block; None where it cannot: with more than one token,
    and layers that were not fused (`jaxllm.fuse`), that have something between a product and its
    neighbours, or whose products are of several dtypes or implementations. One name for all ops
    ("pallas") is that of the products, where it has not all of them together.
    """
    if x.shape[:2] != (1, 1) or not all(map(_is_plain, blocks, rotary)):
        return None
    linears = [linear for block in blocks for linear in _linears(block)]
    how = linears[0].implementation
    if any((each.dtype, each.implementation) != (x.dtype, how) for each in linears):
        return None
    found = []
    for i, block in enumerate(blocks):
        following, gate = None, ops.EPILOGUES[block.mlp.activation]
        if i + 1 < len(blocks):
            following = _beginning(blocks[i + 1], rotary[i + 1], caches[i + 1], x.dtype)
        _, out, gate_up, down = map(_weights, _linears(block), _norms(block))
        link = ops.Link(out, gate_up, down, following, gate)
        if isinstance(how, str) and not _has(how, x, link):
            return None
        found.append(link)
    return found


def _has(implementation: str, x: Float[Array, "B T D"], link: ops.Link) -> bool:
    heads = jax.ShapeDtypeStruct((1, 1, link.out.weight.shape[1]), x.dtype)
    rest = {"meeting": ops.no_meeting(), "implementation": implementation}
    try:
        ops.chosen("between_attentions", heads, x, link, **rest)
    except NotImplementedError:
        return False
    return True


def decode(
    blocks: Sequence[Block],
    x: Float[Array, "B T D"],
    rotary: Sequence[Tables],
    caches: Sequence[LayerCache],
    links: Sequence[ops.Link],
) -> tuple[Float[Array, "B T D"], list[Entry]]:
    """What the blocks make of x one behind the other, and their cache entries with the token."""
    if (found := _together(blocks, x, rotary, caches)) is not None:
        layers, token, how = found
        with jax.named_scope("layers"):
            meeting = ops.no_meetings(token.rotary.kv_heads)
            x, held, _ = ops.decode_layers(x, layers, token, meeting=meeting, implementation=how)
        return x, [cache.written(*kv)[0] for cache, kv in zip(caches, held, strict=True)]
    meeting, entries, after = ops.no_meeting(), [], None
    for i, (block, link) in enumerate(zip(blocks, links, strict=True)):
        attention = block.self_attn
        with jax.named_scope(f"layer_{i}"):
            with jax.named_scope("attention"):
                if after is None:
                    q, entry, keys = block.begin(x, rotary[i], caches[i])
                else:
                    q, *kv = after
                    entry, keys = caches[i].written(*kv)
                heads = attention.attend(q, keys)
            with jax.named_scope("between_attentions"):
                how = attention.o_proj.implementation
                x, after, meeting = ops.between_attentions(
                    heads, x, link, meeting=meeting, implementation=how
                )
        entries.append(entry)
    return x, entries


def _together(
    blocks: Sequence[Block],
    x: Float[Array, "B T D"],
    rotary: Sequence[Tables],
    caches: Sequence[LayerCache],
) -> tuple[list[ops.Layer], ops.Token, Any] | None:
    """What `ops.decode_layers` takes in place of `links`, and the implementation; None where that
    is not a launch, or an implementation is named of an op that it would do instead.
    """
    how = _linears(blocks[0])[0].implementation
    named = {} if isinstance(how, str) else how
    if "decode_layers" not in named and any(named.get(op, "auto") != "auto" for op in _INSTEAD):
        return None
    if (found := layers_of(blocks, x, rotary, caches)) is None:
        return None
    meeting = ops.no_meetings(found[1].rotary.kv_heads)
    try:
        name = ops.chosen("decode_layers", x, *found, meeting=meeting, implementation=how)
    except NotImplementedError:
        if not isinstance(how, str):
            raise
        return None
    return (*found, how) if name != "xla" else None


def layers_of(
    blocks: Sequence[Block],
    x: Float[Array, "B T D"],
    rotary: Sequence[Tables],
    caches: Sequence[LayerCache],
) -> tuple[list[ops.Layer], ops.Token] | None:
    """Blocks that have `links` as `ops.decode_layers` takes them; None if their attention differs,
    caps its scores, or has a cache of other numbers than x.
    """
    places = [place for cache in caches if (place := cache.place(x.dtype)) is not None]
    kinds = {
        (own.scale, own.window, own.softcap, type(cache.entry), *map(id, angles))
        for own, cache, angles in zip(
            (block.self_attn for block in blocks), caches, rotary, strict=True
        )
    }
    first = blocks[0].self_attn
    if len(places) < len(blocks) or len(kinds) > 1 or first.softcap is not None:
        return None
    layers = []
    for block, (k, v, _) in zip(blocks, places, strict=True):
        qkv, out, gate_up, down = map(_weights, _linears(block), _norms(block))
        layers.append(ops.Layer(qkv, out, gate_up, down, k, v))
    k, v, slots = places[0]
    rotary_of = ops.Rotary(*rotary[0], first.heads, first.kv_heads)
    lengths = caches[0].written(k, v)[1]["kv_lengths"]
    gate = ops.EPILOGUES[blocks[0].mlp.activation]
    return layers, ops.Token(rotary_of, slots, lengths, first.scale, first.window, gate)


def _norms(block: Block) -> tuple[Any, Any, Any, Any]:
    """Before each of `_linears`."""
    attention, mlp = block.self_attn, block.mlp
    before = (block.input_layernorm, attention.attn_sub_norm, block.post_attention_layernorm)
    return *before, mlp.ffn_sub_norm


def _linears(block: Block) -> tuple[Any, Any, Any, Any]:
    attention, mlp = block.self_attn, block.mlp
    return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj


def _is_plain(block: Block, rotary: Tables) -> bool:
    """Whether it is fused, and takes inputs in their order."""
    orders = (getattr(linear, "order", None) for linear in _linears(block))
    return block.is_fused(1, 2 * rotary[0].shape[-1]) and not any(o is not None for o in orders)


def _weights(linear: Any, norm: RMSNorm | None) -> ops.Weights:
    bias = None if linear.bias is None else linear.bias[...]
    return ops.Weights(weight_of(linear), bias, None if norm is None else norm.as_argument())


def _beginning(block: Block, rotary: Tables, cache: LayerCache, dtype: Any) -> ops.Following | None:
    """What a block begins with, if its cache holds numbers that a product may write."""
    if (place := cache.place(dtype)) is None:
        return None
    attention = block.self_attn
    qkv = _weights(attention.qkv_proj, block.input_layernorm)
    rotary_of = ops.Rotary(*rotary, attention.heads, attention.kv_heads)
    return ops.Following(qkv, rotary_of, ops.Cache(*place))
