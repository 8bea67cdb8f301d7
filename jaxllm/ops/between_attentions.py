"""A layer from behind its attention to the next layer's: for decoding one token, where launches are
what time goes to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.ops._select import Implementation, Table, pallas, select
from jaxllm.ops.fused_linear import fused_linear, turned_in_one_launch
from pallas_kernels.around_product import Cache, Rotary
from pallas_kernels.between_attentions import (
    Following,
    Link,
    Weights,
    check,
    check_meeting,
    why_not,
)
from pallas_kernels.between_attentions import between_attentions as in_one_launch
from pallas_kernels.between_attentions_config import MEETING_WORDS
from pallas_kernels.device import INTERPRETED_OP_BY_OP
from pallas_kernels.packed import PLAIN, Packed
from pallas_kernels.rope_into_cache import why_not as why_not_rope_into_cache

# (scheme, numbers of a group, zero points) whose layer is faster in one launch. H200, us of
# Llama-3.1-8B's against a launch a product (2026-11-25-h200-awaited-numbers.json): 103.7 and 110.1,
# int8 55.4 and 61.9, in groups 57.1 and 67.5, int4 34.0 and 41.2, in groups of 32 41.3 and 46.5,
# with zeros 40.7 and 45.0, fp8 57.7 and 66.4, nvfp4 45.6 and 52.8, mxfp4 41.9 and 49.0; ternary
# 1058 and 1250 a token; but mxfp8 71.8 and 70.3
FASTER = (
    *((PLAIN, None, False), ("ternary", None, False)),
    *(("int8", None, False), ("int8", 128, False)),
    *(("int4", 128, False), ("int4", 128, True), ("int4", 32, False)),
    *(("fp8", None, False), ("nvfp4", 16, False), ("mxfp4", 32, False)),
)


def no_meeting() -> Int[Array, " 2"]:
    """What a chain of calls of `between_attentions` or `decode_layers` begins with."""
    return jnp.zeros(MEETING_WORDS, jnp.int32)


def between_attentions(
    heads: Float[Array, "*B NH"],
    x: Float[Array, "*B D"],
    link: Link,
    *,
    meeting: Int[Array, " 2"],
    implementation: str | Mapping[str, str] = "auto",
) -> tuple[Float[Array, "*B D"], tuple[Array, ...] | None, Int[Array, " 2"]]:
    """(y, (q, k, v) or None, meeting): x = x + out(heads), then y = x + down(gate(a) b), a and b
    being gate_up(x) (what is added first goes through a post_norm, if there is one), and of the
    layer that follows q [*B, N, H] of y and its cache with k and v;
    without a rotary its product alone, in a tuple. Where it norms q's and k's heads, or turns only
    a part of each, the kernel has a second launch behind it, `rope_into_cache`.

    link: weights, arrays or packed, each with what stands around it.
    meeting: `no_meeting()`, or what the call before has returned.
    "xla" computes it by `fused_linear`, product by product, by the same `implementation`.
    Raises: ValueError if shapes or dtypes disagree. NotImplementedError if the named implementation
    cannot run the call.
    """
    check(heads, x, weights_as_shapes(link, x.dtype), who="between_attentions")
    check_meeting(meeting, MEETING_WORDS, who="between_attentions")
    call = (heads, x, link)
    run = select("between_attentions", BETWEEN_ATTENTIONS, implementation, *call, meeting=meeting)
    y, after, meeting = run(*call, meeting=meeting, implementation=implementation)
    if link.following is None or link.following.rotary is None:
        return y, after, meeting
    q, k, v = after
    return y, (q.reshape(*x.shape[:-1], -1, k.shape[-1]), k, v), meeting


def with_weights(change: Callable[[Any], Packed], link: Link) -> Link:
    """The link with other weights, made of its own."""

    def changed(product: Weights) -> Weights:
        return product._replace(weight=change(product.weight))

    out, gate_up, down, following, gate = link
    if following is not None:
        following = following._replace(qkv=changed(following.qkv))
    return Link(changed(out), changed(gate_up), changed(down), following, gate)


def _pallas(heads, x, link, *, meeting, implementation=None, interpret=False):
    del implementation
    link = with_weights(functools.partial(packed_in, x.dtype), link)
    link, behind = _parted(link)
    y, after, meeting = in_one_launch(heads, x, link, meeting=meeting, interpret=interpret)
    if behind is not None and after is not None:
        after = turned_in_one_launch(after[0], *behind, interpret=interpret)
    return y, after, meeting


def _parted(link: Link) -> tuple[Link, tuple[Rotary, Cache] | None]:
    """The link with the next layer's product alone, and what is left to do with it, if its heads
    are not turned where they are summed; else the link, and None.
    """
    if (following := link.following) is None:
        return link, None
    qkv, rotary, cache = following
    if rotary is None or cache is None or not rotary.why_apart(qkv.weight.shape[0]):
        return link, None
    return link._replace(following=Following(qkv)), (rotary, cache)


def packed_in(dtype: Any, weight: Any) -> Packed:
    """A weight as kernels take it: one that is not packed in that dtype."""
    return weight if isinstance(weight, Packed) else Packed.of(weight.astype(dtype))


def in_parts(heads, x, link: Link, *, meeting, implementation):
    def made(x, product: Weights, **around: Any) -> Any:
        around |= {"norm": product.norm, "post_norm": product.post_norm}
        around |= {"implementation": implementation}
        return fused_linear(x, product.weight, product.bias, **around)

    x = made(heads, link.out, residual=x)
    y = made(made(x, link.gate_up, epilogue=link.gate), link.down, residual=x)
    if link.following is None:
        return y, None, meeting
    qkv, rotary, cache = link.following
    if rotary is None:
        return y, (made(y, qkv),), meeting
    return y, made(y, qkv, epilogue="rope", rotary=rotary, cache=cache), meeting


def weights_as_shapes(link: Link, dtype: Any) -> Link:
    """As the kernel is handed it: weights that are not packed in x's dtype."""

    def packed(weight: Any) -> Packed:
        if isinstance(weight, Packed):
            return weight
        shape: Any = jax.ShapeDtypeStruct(weight.shape, dtype)
        return Packed.of(shape)

    return with_weights(packed, link)


def _why_not_pallas(heads, x, link, *, device, meeting) -> str | None:
    del meeting
    shapes, behind = _parted(weights_as_shapes(link, x.dtype))
    if behind is not None and shapes.following is not None:
        product = jax.ShapeDtypeStruct((1, shapes.following.qkv.weight.shape[0]), x.dtype)
        if (reason := why_not_rope_into_cache(product, *behind, device=device)) is not None:
            return f"what follows, rope_into_cache: {reason}"
    return why_not(heads, x, shapes, device=device)


def _not_auto(heads, x, link, *, device, meeting) -> str | None:
    del heads, device, meeting
    return why_not_faster(x, link)


def why_not_faster(x, link: Link) -> str | None:
    """What speaks against "auto" having products of such weights in one launch."""
    for name, (weight, *_) in weights_as_shapes(link, x.dtype).products.items():
        how = (weight.scheme, weight.group_size, weight.zero is not None)
        if how not in FASTER:
            scheme, group, zeros = how
            form = f"{scheme}{f' in groups of {group}' * bool(group)}{' with zeros' * zeros}"
            return f"{name}: {form} was not found to be faster in one launch"
    return None


BETWEEN_ATTENTIONS: Table = {
    **pallas(_pallas, _why_not_pallas, _not_auto, INTERPRETED_OP_BY_OP),
    "xla": Implementation(in_parts),
}

__all__ = [
    "BETWEEN_ATTENTIONS",
    "Following",
    "Link",
    "Weights",
    "between_attentions",
    "no_meeting",
]
