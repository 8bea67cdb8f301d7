"""Layers one behind the other, of one token: what lies between two attentions is one op.

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
        _, out, gate_up, down = _linears(block)
        norms = (
            block.self_attn.attn_sub_norm,
            block.post_attention_layernorm,
            block.mlp.ffn_sub_norm,
        )
        following, gate = None, ops.EPILOGUES[block.mlp.activation]
        if i + 1 < len(blocks):
            following = _beginning(blocks[i + 1], rotary[i + 1], caches[i + 1], x.dtype)
        out, gate_up, down = map(_weights, (out, gate_up, down), norms)
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
