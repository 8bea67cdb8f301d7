"""Layers one behind the other, of one token: what lies between two attentions is one op, or all of
them are.

A `Block` begins with a norm and ends with a sum; what wants fewest launches begins behind a layer's
attention and ends before the next one's. So a token goes through layers that are fused here.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxllm import ops
from jaxllm.cache import Entry, LayerCache
from jaxllm.layers import Attention, Block, Product, Tables, weight_of

logger = logging.getLogger("jaxllm")

# By op, those that have launches of their own where it is one: with one of them named, "auto" does
# without it
INSTEAD = {
    "decode_layers": ("attention", "fused_linear", "between_attentions"),
    "between_attentions": ("fused_linear",),
}


def decode(
    blocks: Sequence[Block],
    x: Float[Array, "B T D"],
    rotary: Sequence[Tables],
    caches: Sequence[LayerCache],
) -> tuple[Float[Array, "B T D"], list[Entry]] | None:
    """What the blocks make of x one behind the other, and their cache entries with the token; None
    where that is nothing but one block after the other (`why_not`, and one name for all ops that
    the products have not together).

    Raises: NotImplementedError if an op is named alone, by a mapping, and cannot have the token.
    """
    attentions = [getattr(block, "self_attn", None) for block in blocks]
    how = next((each.implementation for each in attentions if type(each) is Attention), "auto")
    if (reason := why_not(blocks, x)) is not None:
        if x.shape[1] == 1:  # of a prompt nobody asks
            for op in INSTEAD:
                _taken(op, how, reason)
        return None
    reason = why_not_together(blocks, x, rotary, caches)
    call: Any = () if reason else (x, *layers_of(blocks, rotary, caches))
    meeting = ops.no_meeting()
    if _taken("decode_layers", how, reason, *call, meeting=meeting):
        with jax.named_scope("layers"):
            x, held, _ = ops.decode_layers(*call, meeting=meeting, implementation=how)
        return x, [cache.written(*kv)[0] for cache, kv in zip(caches, held, strict=True)]
    found = links(blocks, x, rotary, caches)
    if isinstance(how, str) and how not in ("auto", "xla"):
        for link in found:
            heads = jax.ShapeDtypeStruct((1, 1, link.out.weight.shape[1]), x.dtype)
            of_link = heads, x, link
            if not _taken("between_attentions", how, None, *of_link, meeting=ops.no_meeting()):
                return None
    elif not isinstance(how, str) and _others("between_attentions", how):
        how = {**how, "between_attentions": "xla"}
    return _linked(blocks, x, rotary, caches, found, how)


def why_not(blocks: Sequence[Block], x: Float[Array, "B T D"]) -> str | None:
    """What keeps blocks from being one behind the other here; None: nothing."""
    if x.shape[:2] != (1, 1):
        return f"takes one token of one row, got x {list(x.shape)}"
    for i, block in enumerate(blocks):
        if type(block) is not Block:
            return f"layer {i} is a {type(block).__name__}, not a Block"
        if (reason := block.why_not_fused(1)) is not None:
            return f"layer {i}: {reason}"
        if any(getattr(linear, "order", None) is not None for linear in _linears(block)):
            return f"layer {i} takes inputs in an order of their own"
        if any(linear.dtype != x.dtype for linear in _linears(block)):
            return f"layer {i} does not compute in {x.dtype}, which x has"
        how = blocks[0].self_attn.implementation
        for each in (block.self_attn, *_linears(block)):
            if each.implementation != how:
                return f"layer {i} has ops by {each.implementation!r}, layer 0 by {how!r}"
    return None


def why_not_together(
    blocks: Sequence[Block],
    x: Float[Array, "B T D"],
    rotary: Sequence[Tables],
    caches: Sequence[LayerCache],
) -> str | None:
    """What keeps blocks, for which `why_not` has nothing, from being one op; None: nothing."""
    for i, cache in enumerate(caches):
        if cache.place(x.dtype) is None:
            return f"layer {i} has keys and values in {cache.entry.k.dtype}, not {x.dtype}"
    first = _kind(blocks[0], caches[0], rotary[0])
    for i, given in enumerate(zip(blocks, caches, rotary, strict=True)):
        for what, value in _kind(*given).items():
            if value != first[what]:
                return f"layer {i} has another {what} than layer 0"
    if (cap := blocks[0].self_attn.softcap) is not None:
        return f"scores have a soft cap, {cap:g}"
    return None


def _kind(block: Block, cache: LayerCache, angles: Tables) -> dict[str, Any]:
    """What layers have in common that are one op, by name."""
    own = block.self_attn
    return {
        "window": own.window,
        "scale": own.scale,
        "soft cap": own.softcap,
        "number of heads": (own.heads, own.kv_heads),
        "rotation": tuple(map(id, angles)),
        "kind of cache": type(cache.entry),
        "activation": block.mlp.activation,
    }


def layers_of(
    blocks: Sequence[Block], rotary: Sequence[Tables], caches: Sequence[LayerCache]
) -> tuple[list[ops.Layer], ops.Token]:
    """What `ops.decode_layers` takes, where `why_not_together` has nothing."""
    layers = []
    for block, cache in zip(blocks, caches, strict=True):
        qkv, out, gate_up, down = map(weights_of, block.products())
        how = block.self_attn.turning(rotary[0])
        norms = how.q_norm, how.k_norm
        layers.append(ops.Layer(qkv, out, gate_up, down, cache.entry.k, cache.entry.v, *norms))
    first, attention = caches[0], blocks[0].self_attn
    slots = first.entry.slots(first.lengths, first.counts)
    turning = ops.Rotary(*rotary[0], attention.heads, attention.kv_heads)
    seen = first.entry.seen(first.lengths)
    rest = attention.scale, attention.window, ops.EPILOGUES[blocks[0].mlp.activation]
    return layers, ops.Token(turning, slots, seen, *rest)


def links(
    blocks: Sequence[Block],
    x: Float[Array, "B T D"],
    rotary: Sequence[Tables],
    caches: Sequence[LayerCache],
) -> list[ops.Link]:
    """What `ops.between_attentions` takes behind each block's attention, where `why_not` has
    nothing.
    """
    found = []
    for i, block in enumerate(blocks):
        following = None
        if i + 1 < len(blocks):
            following = _beginning(blocks[i + 1], rotary[i + 1], caches[i + 1], x.dtype)
        _, out, gate_up, down = map(weights_of, block.products())
        found.append(ops.Link(out, gate_up, down, following, ops.EPILOGUES[block.mlp.activation]))
    return found


def _linked(
    blocks: Sequence[Block],
    x: Float[Array, "B T D"],
    rotary: Sequence[Tables],
    caches: Sequence[LayerCache],
    links: Sequence[ops.Link],
    how: Any,
) -> tuple[Float[Array, "B T D"], list[Entry]]:
    """As `decode`, an attention and what lies behind it in turn."""
    meeting, entries, after = ops.no_meeting(), [], None
    for i, (block, link) in enumerate(zip(blocks, links, strict=True)):
        with jax.named_scope(f"layer_{i}"):
            with jax.named_scope("attention"):
                if after is None:
                    q, entry, keys = block.begin(x, rotary[i], caches[i])
                else:
                    q, *kv = after
                    entry, keys = caches[i].written(*kv)
                heads = block.self_attn.attend(q, keys)
            with jax.named_scope("between_attentions"):
                x, after, meeting = ops.between_attentions(
                    heads, x, link, meeting=meeting, implementation=how
                )
        entries.append(entry)
    return x, entries


def _taken(op: str, how: Any, reason: str | None, *call: Any, **rest: Any) -> bool:
    """Whether a kernel has the op's call, given what may keep it from all such calls.

    Raises: NotImplementedError if the op is named alone, by a mapping, and the kernel has not.
    """
    name = ops.name_for(op, how)
    if name == "xla":
        return False
    if others := _others(op, how):
        reason = reason or f"{others[0]} is named"
    if reason is None:
        reason = ops.why_not(op, *call, **rest, implementation=how)
    if reason is None:
        return True
    if name != "auto" and not isinstance(how, str):
        raise NotImplementedError(f"{op}: {name!r} cannot run this call: {reason}")
    _log_once(op, reason)
    return False


def _others(op: str, how: str | Mapping[str, str]) -> list[str]:
    """What a mapping names of INSTEAD, where it does not name the op."""
    if isinstance(how, str) or how.get(op, "auto") != "auto":
        return []
    return [other for other in INSTEAD[op] if how.get(other, "auto") != "auto"]


@functools.lru_cache(maxsize=64)
def _log_once(op: str, reason: str) -> None:
    logger.info("a token is decoded without %s: %s", op, reason)


def _linears(block: Block) -> list[Any]:
    return [product.linear for product in block.products()]


def weights_of(product: Product) -> ops.Weights:
    """The projection's, and norms, as ops take them."""
    linear, *norms = product
    bias = None if linear.bias is None else linear.bias[...]
    around = (None if norm is None else norm.as_argument() for norm in norms)
    return ops.Weights(weight_of(linear), bias, *around)


def _beginning(block: Block, rotary: Tables, cache: LayerCache, dtype: Any) -> ops.Following | None:
    """What a block begins with, if its cache holds numbers that a product may write."""
    if (place := cache.place(dtype)) is None:
        return None
    attention = block.self_attn
    qkv = weights_of(block.products()[0])
    return ops.Following(qkv, attention.turning(rotary), ops.Cache(*place))
