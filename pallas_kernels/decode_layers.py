"""Layers of one token in a single launch, from the residual stream to the residual stream.

Of each layer, whose weights and cache are its own, and whose shapes are those of the others:

    q, k, v = norm(x) Wqkv^T             q and k are normed, if their heads have norms, and turned;
                                         k and v are written to the layer's cache
    x <- x + attention(q, cache) Wo^T
    g  = silu(a) b,  [a, b] = norm'(x) Wgu^T
    x <- x + g Wd^T

x [*B, D], *B one row. Weights are as in between_attentions.py, which has a layer's products in a
launch and the attention in one of its own: beside their bytes these two take 7 us and more, and
here a layer has four meetings of almost all blocks, of 1 us or less each, while weights come on
chip.
`decode_layers_lanes` says what a block does. The gradient is that of the plain path.
Source of norm and rotation: around_product.py; of the formats: quantize.py; of the attention:
decode_attention.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_batching import sequential_vmap
from jax.tree_util import keystr
from jaxtyping import Array, Float, Int

from pallas_kernels import decode_layers_kernel as kernel
from pallas_kernels import device as device_lib
from pallas_kernels.around_product import Cache, Norm, Rotary, turn_and_write
from pallas_kernels.attention_reference import check_window, in_32_bits
from pallas_kernels.between_attentions import (
    Following,
    Link,
    Weights,
    check_meeting,
    for_lanes_of,
    heads_of,
    in_parts,
)
from pallas_kernels.between_attentions import check as check_link
from pallas_kernels.between_attentions import default_config as config_between
from pallas_kernels.between_attentions import plan_of as plan_between
from pallas_kernels.between_attentions import why_not as why_not_between
from pallas_kernels.between_attentions_config import MEETING_WORDS, NormNumbers
from pallas_kernels.decode_attention import decode_attention, decode_attention_reference
from pallas_kernels.decode_layers_config import (
    CACHE,
    EACH,
    MOST_GROUP,
    NAMES,
    NORMS,
    OWN,
    REGISTERS,
    SPAN,
    STREAM,
    WIDEST,
    Attend,
    Config,
    Plan,
)
from pallas_kernels.device import Device
from pallas_kernels.options import check_options, check_scale
from pallas_kernels.packed import PLAIN
from pallas_kernels.quantized_matmul import (
    quantized_matmul,
    quantized_matmul_reference,
)
from pallas_kernels.ternary_matmul import (
    straight_through,
    ternary_linear,
    ternary_linear_reference,
)

NAME = "decode_layers"
FORMAT = "'s format"  # behind a product's name: how its arrays lie together
# Of a launch, which is told where each lies: compiled with 960, run with 288
MOST_ARRAYS = 1024
# On their way to a multiprocessor. H200, us a layer with 32 and 48 KiB: Qwen2.5-0.5B in bfloat16
# 15.1 and 15.7, Llama-3.1-8B in ternary 28.3 and 28.9, int4 38.7 and 39.6, bfloat16 112 and 107
WINDOW_BYTES = 2**15


class Layer(NamedTuple):
    """A layer's weights: qkv [(N + 2K) H, D], out [D, N H], gate_up [2F, D] (gate's rows, then
    up's), down [D, F]; its keys and values [1, S, K, H]; and norms of each of q's heads and of k's.
    """

    qkv: Weights
    out: Weights
    gate_up: Weights
    down: Weights
    k: Float[Array, "1 S K H"]
    v: Float[Array, "1 S K H"]
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    def link(self, token: Token) -> Link:
        """The layer's products, as if its own of q, k and v came last."""
        return Link(self.out, self.gate_up, self.down, Following(self.qkv), token.gate)

    def with_products(self, link: Link) -> Layer:
        """The layer with those of what `link` gives, in which weights are others."""
        return self._replace(**link.products)

    def turning(self, token: Token) -> Rotary:
        """How q and k are normed and turned."""
        return token.rotary._replace(q_norm=self.q_norm, k_norm=self.k_norm)


class Token(NamedTuple):
    """What layers have in common: cos and sin [*B, R / 2] of the token, the slot of a cache that
    its key and value go to (none where it is S or more), and how many keys it sees, its own among
    them (those in the first places of a cache), int32 [1] each. scale: of scores, 1 / sqrt(H) if
    None; window: the most keys that it sees, if not all. gate: as in between_attentions.
    """

    rotary: Rotary
    slots: Int[Array, " 1"]
    kv_lengths: Int[Array, " 1"]
    scale: float | None = None
    window: int | None = None
    gate: str = "swiglu"


def decode_layers(
    x: Float[Array, "*B D"],
    layers: Sequence[Layer],
    token: Token,
    *,
    meeting: Int[Array, " 2"],
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "*B D"], list[tuple[Array, Array]], Int[Array, " 2"]]:
    """(y, of each layer (k, v) with the token in them, meeting): what the layers make of x.

    k and v are the cache's own memory if nothing else needs that.
    meeting: int32 zeros, as of `between_attentions`.
    kv_lengths below 1 count as 1, above S as S.
    Dtypes, rounding, and that all blocks must run at once: as of `between_attentions`; what the
    heads see is bfloat16, its scores and sums float32, and weights of values are rounded.
    Gradients: of all floats but packed weights; of x where it became int8 straight through.
    Raises: ValueError if shapes or dtypes disagree. NotImplementedError without a Hopper GPU
    (unless `interpret`, which runs op by op), or for what `why_not` says.
    """
    check(x, layers, token, meeting)
    check_options(NAME, config, Config, interpret=interpret)
    device = device_lib.INTERPRETED_OP_BY_OP if interpret else device_lib.current()
    if (reason := why_not(x, layers, token, device=device)) is not None:
        raise NotImplementedError(f"{NAME}: cannot run this call: {reason}")
    plan = plan_of(x, layers, token, device=device, config=config)
    if (problem := plan.problem()) is not None:
        raise ValueError(f"{NAME}: {plan.config}: {problem}")
    layers, token = _for_lanes(layers, token)
    if interpret:
        ops = (quantized_matmul, ternary_linear, decode_attention)
        ops = (functools.partial(f, interpret=True) for f in ops)
        return *_in_parts(*ops, x, layers, token), meeting
    angles = _angles(token)
    own = [_own(plan, layer) for layer in layers]
    rest = (angles, token.slots, token.kv_lengths, meeting)
    found: Any = _decode(plan, x.reshape(1, -1), own, *rest)
    y, meeting, *caches = found
    return y.reshape(x.shape), list(zip(caches[::2], caches[1::2], strict=True)), meeting


def decode_layers_reference(x, layers: Sequence[Layer], token: Token) -> Any:
    """The mathematics in plain JAX: y, and of each layer (k, v)."""
    ops = (quantized_matmul_reference, ternary_linear_reference, decode_attention_reference)
    return _in_parts(*ops, x, layers, token)


def _in_parts(packed_product, ternary_product, attention, x, layers, token: Token) -> Any:
    """Op by op: of most weights by the first, of ternary ones by the second."""
    _, slots, lengths, scale, window, gate = token
    (cos, sin), caches = _angles(token), []
    for layer in layers:
        (heads,) = heads_of(packed_product, ternary_product, x, Following(layer.qkv))
        how = layer.turning(token)._replace(cos=cos, sin=sin)
        cache = Cache(layer.k, layer.v, slots)
        q, k, v = turn_and_write(heads.reshape(1, -1), how, cache)
        width = k.shape[-1]
        lengths = jnp.clip(lengths.astype(jnp.int32), 1, k.shape[1])
        heads = attention(q.reshape(1, 1, -1, width), k, v, lengths, scale=scale, window=window)
        link = Link(layer.out, layer.gate_up, layer.down, None, gate)
        heads = heads.reshape(*x.shape[:-1], -1)
        x, _ = in_parts(packed_product, ternary_product, heads, x, link)
        caches.append((k, v))
    return x, caches


def why_not(
    x, layers: Sequence[Layer], token: Token, *, device: Device | None = None
) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    device = device or device_lib.current()
    for name in ("scale", "window"):
        if isinstance(getattr(token, name), Tracer):
            return f"the {name} is part of the kernel, and here it is traced"
    if not layers:
        return "there are no layers"
    first = _kind(layers[0])
    for i, layer in enumerate(layers):
        kind = _kind(layer)
        for name in sorted({*first, *kind}, key=lambda name: (name.endswith(FORMAT), name)):
            if first.get(name) != kind.get(name):
                return f"layer {i} is not like layer 0 in {name}"
    layer = layers[0]  # which the others are like
    if layer.out.post_norm is not None or layer.down.post_norm is not None:
        return "takes no post_norm"
    if reason := why_not_between(_heads(x, layer, token), x, layer.link(token), device=device):
        return reason
    kv_heads, width = layer.k.shape[2:]
    if width % SPAN or width > WIDEST:
        return f"head width {width} is not a multiple of {SPAN} up to {WIDEST}"
    if not (half := token.rotary.cos.shape[-1]):
        return "nothing of a head is turned"
    if half % EACH:
        return f"takes halves of what is turned of a head in multiples of {EACH}, got {half}"
    for name, norm in layer.turning(token).norms.items():
        if norm.weight.dtype != x.dtype:
            return f"takes {name}'s weight in {x.dtype}, got {norm.weight.dtype}"
    if (group := token.rotary.q_heads // kv_heads) > MOST_GROUP:
        return f"{group} query heads share a key head; it takes {MOST_GROUP} at most"
    if kv_heads > device.num_sms:
        return f"{kv_heads} key heads are more than the {device.num_sms} blocks"
    plan = plan_of(x, layers, token, device=device)
    if (count := len(layers) * len(plan.own)) > MOST_ARRAYS:
        return f"{len(layers)} layers have {count} arrays; it takes {MOST_ARRAYS} at most"
    return plan.problem()


def plan_of(
    x, layers: Sequence[Layer], token: Token, *, device: Device, config: Config | None = None
) -> Plan:
    """What the kernel is compiled for; config: None for the default."""
    first, given = layers[0], config or Config()
    registers, _ = REGISTERS.get(given.warps, (None, None))
    how: Any = {"device": device, "config": given, "registers": registers}
    found = plan_between(x, first.link(token), **how)
    products = {product.static.name: product for product in found.products}
    alike = []
    for name in NAMES:
        late = ("residual",) if name in ("out", "down") else ()  # x is awaited
        alike.append(dataclasses.replace(products[name], late=late))
    entries = (*_arrays(first), *STREAM)
    _, slots, kv_heads, width = first.k.shape
    attend = Attend(
        token.rotary.q_heads,
        kv_heads,
        width,
        token.rotary.cos.shape[-1],
        NormNumbers.of(first.q_norm),
        NormNumbers.of(first.k_norm),
        slots,
        width**-0.5 if token.scale is None else float(token.scale),
        None if token.window is None else in_32_bits(token.window),
        given.warps,
        device.num_sms,
        given.turns,
    )
    plan = Plan(given, tuple(alike), attend, len(layers), entries)
    if config is not None:
        return plan
    return dataclasses.replace(plan, config=config_between(plan, WINDOW_BYTES))


def _arrays(layer: Layer) -> dict[tuple[int | None, str], Any]:
    """Those that there are, by the number of their product, or None, and their names."""
    arrays: dict[tuple[int | None, str], Any] = {(None, "k"): layer.k, (None, "v"): layer.v}
    for name in NORMS:
        norm = getattr(layer, name)
        arrays[None, name] = None if norm is None else norm.weight
    for i, product in enumerate(NAMES):
        weight, bias, norm, _ = getattr(layer, product)
        parts = {name: getattr(weight, name) for name in OWN if hasattr(weight, name)}
        parts |= {"bias": bias, "norm": None if norm is None else norm.weight}
        arrays |= {(i, name): array for name, array in parts.items()}
    return {entry: array for entry, array in arrays.items() if array is not None}


def _angles(token: Token) -> tuple[Any, Any]:
    """cos and sin as one row each."""
    cos, sin = (a.reshape(1, -1) for a in token.rotary[:2])
    return cos, sin


def _heads(x, layer: Layer, token: Token) -> Any:
    """What the heads see, as a shape."""
    width = layer.k.shape[-1] * token.rotary.q_heads
    return jax.ShapeDtypeStruct((*x.shape[:-1], width), x.dtype)


def _for_lanes(layers: Sequence[Layer], token: Token) -> tuple[list[Layer], Token]:
    """With small arrays in dtypes that lanes read."""
    layers = [layer.with_products(for_lanes_of(layer.link(token))) for layer in layers]
    slots, lengths = (a.astype(jnp.int32) for a in (token.slots, token.kv_lengths))
    return layers, token._replace(slots=slots, kv_lengths=lengths)


def _kind(layer: Layer) -> dict[str, Any]:
    """What layers that are alike have in common, by name."""

    def numbers_of(norm: Norm | None) -> Norm | None:
        """With those of Python, whatever they came as: of arrays shapes are compared."""
        return norm and Norm(norm.weight, float(norm.eps), bool(norm.zero_centered))

    def of_leaf(leaf: Any) -> Any:
        return (leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf

    found: dict[str, Any] = {"k": of_leaf(layer.k), "v": of_leaf(layer.v)}
    kinds: dict[str, Any] = {name: numbers_of(getattr(layer, name)) for name in NORMS}
    for name in NAMES:
        product: Weights = getattr(layer, name)
        kinds[name] = product._replace(norm=numbers_of(product.norm))
    for name, kind in kinds.items():
        leaves, tree = jax.tree.flatten_with_path(kind)
        found |= {f"{name}{keystr(path)}": of_leaf(leaf) for path, leaf in leaves}
        found[f"{name}{FORMAT}"] = tree  # told last: what it holds has names of its own
    return found


def check(x, layers: Sequence[Layer], token: Token, meeting) -> None:
    """Raises: ValueError if shapes or dtypes disagree, as `decode_layers` does."""
    if not layers:
        raise ValueError(f"{NAME}: there are no layers")
    if token.rotary.norms:
        raise ValueError(f"{NAME}: norms of heads are the layers', and not the token's")
    for i, layer in enumerate(layers):
        cache = Cache(layer.k, layer.v, token.slots)
        following = Following(layer.qkv, layer.turning(token), cache)
        link = layer.link(token)._replace(following=following)
        check_link(_heads(x, layer, token), x, link, who=f"{NAME}, layer {i}")
    lengths, kv_heads = token.kv_lengths, token.rotary.kv_heads
    if (n := token.rotary.q_heads) % kv_heads:
        raise ValueError(
            f"{NAME}: {n} query heads cannot share {kv_heads} key heads; N must be a multiple of K"
        )
    if lengths.shape != (1,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"{NAME}: kv_lengths is {lengths.dtype}{list(lengths.shape)}, not int32[1]"
        )
    if token.scale is not None:
        check_scale(NAME, token.scale)
    if not isinstance(token.window, Tracer):  # which `why_not` has a phrase for
        check_window(NAME, token.window)
    check_meeting(meeting, MEETING_WORDS, who=NAME)


def _own(plan: Plan, layer: Layer) -> list[Any]:
    """A layer's arrays, in the order of the plan's entries."""
    arrays = _arrays(layer)
    return [arrays[entry] for entry in plan.own]


def _layer(plan: Plan, own: Sequence[Any]) -> Layer:
    """The other way."""
    arrays = dict(zip(plan.own, own, strict=True))
    made: list[Any] = []
    for i, product in enumerate(plan.products):
        parts = {name: arrays.get((i, name)) for name in OWN}
        bias, scale, norm, static = parts.pop("bias"), parts.pop("norm"), None, product.static
        if scale is not None:
            norm = Norm(scale, static.eps or 0.0, static.zero_centered)
        made.append(Weights(dataclasses.replace(product.packed, **parts), bias, norm))
    qkv, out, gate_up, down = made
    norms = {
        name: Norm(arrays[None, name], *numbers) for name, numbers in plan.attend.norms.items()
    }
    return Layer(qkv, out, gate_up, down, *(arrays[entry] for entry in CACHE), **norms)


def _plain(plan: Plan, x, own, angles, slots, lengths, meeting) -> Any:
    """What `kernel.layers` returns, as far as it has gradients."""
    a, gate = plan.attend, plan.gate
    rotary = Rotary(angles[0], angles[1], a.q_heads, a.kv_heads)
    token = Token(rotary, slots, lengths, a.scale, a.window, gate)
    ops = (quantized_matmul_reference, straight_through, decode_attention_reference)
    y, caches = _in_parts(*ops, x, [_layer(plan, each) for each in own], token)
    return y, meeting, *(array for both in caches for array in both)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _decode(plan: Plan, *arrays: Any):
    # Blocks of two slices would wait for each other: a slice is a launch of its own
    return sequential_vmap(functools.partial(kernel.layers, plan))(*arrays)


def _forward(plan: Plan, *arrays: Any):
    return _decode(plan, *arrays), arrays


def _backward(plan: Plan, arrays: Any, cotangents: Any):
    x, own, angles, *rest = arrays
    moved = [_has_gradient(plan, *entry) for entry in plan.own]

    def plain(x, some, angles, *rest):
        given = [
            [mine if of else array for mine, array, of in zip(one, every, moved, strict=True)]
            for one, every in zip(some, own, strict=True)
        ]
        return _plain(plan, x, given, angles, *rest)

    some = [[array if of else None for array, of in zip(one, moved, strict=True)] for one in own]
    return jax.vjp(plain, x, some, angles, *rest)[1](cotangents)


def _has_gradient(plan: Plan, product: int | None, name: str) -> bool:
    """Whether an array of a layer has one: none of a weight that is packed."""
    if product is None or name in ("bias", "norm"):
        return True
    return plan.products[product].packed.scheme == PLAIN


_decode.defvjp(_forward, _backward)
# Calls alike share one compiled kernel
_decode = jax.jit(_decode, static_argnums=0)  # pyright: ignore[reportAssignmentType]
