"""From a layer's attention to the next one's in a single launch, where one token is decoded.

    x <- x + heads Wo^T                          what attention gives, added to the residual stream
    g  = silu(a) b,  [a, b] = norm(x) Wgu^T
    y  = x + g Wd^T
    q, k, v = norm'(y) Wqkv'^T                   of the next layer; q and k are turned

heads [*B, N H], x and y [*B, D], *B one row. Each product may have a norm before it, and what is
added to the residual stream one behind it (between_attentions_join.py). Weights are
`Packed`, of codes of 8, 4 or 2 bits or of numbers of 16 (`Packed.of`). As many blocks as there are
multiprocessors, one on each, go over the four weights one behind the other; between two products
they wait for each other, while what they multiply next is on its way. Four launches take 2 us and
more each beside their bytes; this is one.
`between_attentions_lanes` says what a block does. Its sizes are constants, and not a tuned row's:
one choice was fastest for all models and formats that were tried (benchmarks/notes.md).
The gradient is that of the plain path.
Source of norm and rotation: around_product.py; of the formats: quantize.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels import between_attentions_kernel as kernel
from pallas_kernels import device as device_lib
from pallas_kernels import quantized_matmul_config as sizes
from pallas_kernels.around_product import Cache, Norm, Rotary, check_post_norm, turn_and_write
from pallas_kernels.between_attentions_config import (
    BRINGING,
    MEETING_WORDS,
    Config,
    NormNumbers,
    Plan,
    Product,
)
from pallas_kernels.device import ACCESS_BYTES, LANES, REGISTERS, SHARED_BYTES, Device
from pallas_kernels.matmul_finish import GATES as PLAIN_GATES
from pallas_kernels.options import check_options
from pallas_kernels.packed import CODES_PER_BYTE, PLAIN, Packed
from pallas_kernels.quantized_matmul import (
    for_lanes,
    quantized_matmul,
    quantized_matmul_reference,
)
from pallas_kernels.quantized_matmul import why_not as why_not_quantized
from pallas_kernels.quantized_matmul_check import check as check_product
from pallas_kernels.quantized_matmul_config import Heads, Static
from pallas_kernels.rms_norm import rms_norm_reference
from pallas_kernels.ternary_matmul import GATES as TERNARY_GATES
from pallas_kernels.ternary_matmul import (
    straight_through,
    ternary_linear,
    ternary_linear_reference,
)
from pallas_kernels.ternary_matmul import why_not as why_not_ternary

GATES = tuple(dict.fromkeys((*PLAIN_GATES, *TERNARY_GATES)))  # of weights of any kind
MOST_TERNARY = 2**16  # inputs whose sums of bytes times codes stay whole numbers of float32
# On their way to a multiprocessor. H200, us from attention to attention with 32, 48 and 64 KiB:
# Llama-3.1-8B in bfloat16 115.7, 104.6 and 113.8, in int4 35.7, 34.6 and 36.3
WINDOW_BYTES = 3 * 2**14


HELD_PART = 7 / 16  # of a thread's registers, that x and sums may take: with 80 of 168 some spill
HELD_ROUNDS = 4  # most turns of a tile whose x a thread keeps in registers, and that are unrolled


class Weights(NamedTuple):
    """Of a product: the weight [O, I], the bias [O] behind it, and the norm of x before it.

    post_norm: behind product and bias, of what is then added to the residual stream.
    """

    weight: Packed
    bias: Float[Array, " O"] | None = None
    norm: Norm | None = None
    post_norm: Norm | None = None


class Following(NamedTuple):
    """What the next layer begins with: q, k and v as `quantized_matmul` makes them with "rope", the
    heads of q and k turned by `rotary`, k and v in their slots of the `cache`. With neither, the
    product [*B, (N + 2K) H] as it is, for what turns no heads by itself: see rope_into_cache.py.
    """

    qkv: Weights
    rotary: Rotary | None = None
    cache: Cache | None = None


class Link(NamedTuple):
    """The weights of a launch: out [D, N H], gate_up [2F, D] (gate's rows, then up's), down [D, F]
    and, unless no layer follows, qkv [(N + 2K) H, D]. gate: of GATES, what becomes of gate and up.
    """

    out: Weights
    gate_up: Weights
    down: Weights
    following: Following | None = None
    gate: str = "swiglu"

    @property
    def products(self) -> dict[str, Weights]:
        """In their order, by name."""
        found = {"out": self.out, "gate_up": self.gate_up, "down": self.down}
        return found if self.following is None else {**found, "qkv": self.following.qkv}


def between_attentions(
    heads: Float[Array, "*B NH"],
    x: Float[Array, "*B D"],
    link: Link,
    *,
    meeting: Int[Array, " 2"],
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "*B D"], tuple[Array, ...] | None, Int[Array, " 2"]]:
    """(y, (q, k, v) of the next layer, or its product alone in a tuple, or None; meeting).

    q is [*B, N H]; k and v are the cache's [1, S, K, H], in its own memory if nothing else needs
    that.
    meeting: int32 zeros by which the blocks of a launch find each other. They come back as zeros,
    to be handed to the next call, which so comes behind this one.
    Dtypes: bfloat16; cos, sin and biases any float, slots any integers. Sums are float32, and what
    one product hands to the next is rounded to bfloat16, as if each were a call of its own. With
    int8 in groups of 64, int4 in groups of 128, their multiples or none, x counts as whole numbers
    of 24 bits (quantized_digits.py), with ternary weights as int8, one scale a row
    (ternary_matmul.py).
    All blocks must run at once: where another call of it runs on the same GPU, or another process
    keeps multiprocessors for itself, as under MPS, they may wait for each other, and end with an
    error after some ten seconds.
    Gradients: of all floats but packed weights; of x where it became int8 straight through.
    Raises: ValueError if shapes or dtypes disagree. NotImplementedError without a Hopper GPU
    (unless `interpret`, which runs product by product), or for what `why_not` says.
    """
    check(heads, x, link, who="between_attentions")
    check_meeting(meeting, MEETING_WORDS, who="between_attentions")
    check_options("between_attentions", config, Config, interpret=interpret)
    device = device_lib.INTERPRETED_OP_BY_OP if interpret else device_lib.current()
    if (reason := why_not(heads, x, link, device=device)) is not None:
        raise NotImplementedError(f"between_attentions: cannot run this call: {reason}")
    plan = plan_of(x, link, device=device, config=config)
    if (problem := plan.problem()) is not None:
        raise ValueError(f"between_attentions: {plan.config}: {problem}")
    link = for_lanes_of(link)
    if interpret:
        most, ternary = (
            functools.partial(f, interpret=True) for f in (quantized_matmul, ternary_linear)
        )
        return *in_parts(most, ternary, heads, x, link), meeting
    weights, biases, *norms = zip(*link.products.values(), strict=True)
    norms, post_norms = (tuple(norm and norm.weight for norm in each) for each in norms)
    angles = cache = None
    if (following := link.following) is not None and following.rotary is not None:
        rotary, cache = following.rotary, following.cache
        angles = tuple(a.reshape(1, -1) for a in (rotary.cos, rotary.sin))
    rows = (a.reshape(1, -1) for a in (heads, x))
    found: Any = _between(plan, *rows, weights, biases, norms, post_norms, angles, cache, meeting)
    y, *rest, meeting = found
    if not rest:
        return y.reshape(x.shape), None, meeting
    heads, *kv = rest
    return y.reshape(x.shape), (heads.reshape(*x.shape[:-1], -1), *kv), meeting


def for_lanes_of(link: Link) -> Link:
    """The link with small arrays in dtypes that lanes read."""

    def bias_of(weights: Weights) -> Weights:
        return weights._replace(bias=None if weights.bias is None else for_lanes(weights.bias))

    out, gate_up, down, following, gate = link
    if following is not None:
        qkv, rotary, cache = following
        if rotary is not None and cache is not None:
            rotary = rotary._replace(cos=for_lanes(rotary.cos), sin=for_lanes(rotary.sin))
            cache = cache._replace(slots=cache.slots.astype(jnp.int32))
        following = Following(bias_of(qkv), rotary, cache)
    return Link(bias_of(out), bias_of(gate_up), bias_of(down), following, gate)


def between_attentions_reference(heads, x, link: Link) -> Any:
    """The mathematics in plain JAX: y, and what is made of it for the next layer, or None."""
    return in_parts(quantized_matmul_reference, ternary_linear_reference, heads, x, link)


def in_parts(packed_product, ternary_product, heads, x, link: Link) -> tuple[Any, Any]:
    """Product by product: of most weights by the first, of ternary ones by the second."""
    made = functools.partial(_product, packed_product, ternary_product)
    x = made(heads, link.out, residual=x)
    y = made(made(x, link.gate_up, epilogue=link.gate), link.down, residual=x)
    if link.following is None:
        return y, None
    return y, heads_of(packed_product, ternary_product, y, link.following)


def heads_of(packed_product, ternary_product, x, following: Following) -> tuple[Any, ...]:
    """q, k and v of x, or its product alone, as `in_parts` makes them."""
    qkv, rotary, cache = following
    made = functools.partial(_product, packed_product, ternary_product)
    if rotary is None:
        return (made(x, qkv),)
    if qkv.weight.scheme != "ternary":
        return made(x, qkv, epilogue="rope", rotary=rotary, cache=cache)
    angles = {"cos": rotary.cos.reshape(1, -1), "sin": rotary.sin.reshape(1, -1)}
    q, k, v = turn_and_write(made(x, qkv).reshape(1, -1), rotary._replace(**angles), cache)
    return q.reshape(*x.shape[:-1], -1), k, v


def _product(packed_product, ternary_product, x, weights: Weights, **around: Any) -> Any:
    weight, bias, norm, post_norm = weights
    if post_norm is not None:
        residual, alone = around.pop("residual"), weights._replace(post_norm=None)
        y: Any = _product(packed_product, ternary_product, x, alone, **around)
        y = rms_norm_reference(y, post_norm.weight, **post_norm.keywords)
        return residual + y
    if weight.scheme != "ternary":
        return packed_product(x, weight, bias=bias, norm=norm, **around)
    normed = {} if norm is None else {"norm": norm.weight, "eps": norm.eps}
    return ternary_product(x, weight, bias=bias, **normed, **around)


def why_not(heads, x, link: Link, *, device: Device | None = None) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    device = device or device_lib.current()
    if reason := device_lib.why_not_hopper(device):
        return reason
    if reason := _compat.why_not_written():
        return reason
    if (rows := math.prod(x.shape[:-1])) != 1:
        return f"takes one row of x, got {rows}"
    if x.dtype != jnp.bfloat16 or heads.dtype != x.dtype:
        return f"takes bfloat16, got x {x.dtype} and heads {heads.dtype}"
    ternary = {weights.weight.scheme == "ternary" for weights in link.products.values()}
    if link.gate not in PLAIN_GATES and False in ternary:
        return f"only ternary weights have {link.gate!r}"
    for name in link.products:
        if reason := _why_not_product(name, link, x.dtype, device):
            return f"{name}: {reason}"
    return plan_of(x, link, device=device).problem()


def _why_not_product(name: str, link: Link, dtype: Any, device: Device) -> str | None:
    (weight, _, norm, post_norm), following = link.products[name], link.following
    if post_norm is not None and post_norm.weight.dtype != dtype:
        return f"takes a post_norm's weight in {dtype}, got {post_norm.weight.dtype}"
    row = jax.ShapeDtypeStruct((1, weight.shape[1]), dtype)
    if weight.scheme != "ternary":
        rotary = following.rotary if name == "qkv" and following else None
        around: Any = {"norm": norm, "epilogue": _epilogue(name, link), "rotary": rotary}
        return why_not_quantized(row, weight, **around, config=_tile(name, link), device=device)
    if norm is not None and norm.weight.dtype != dtype:
        return f"takes a norm's weight in {dtype}, got {norm.weight.dtype}"
    if norm is not None and norm.zero_centered:
        return "the norm before a ternary weight adds no 1 to its own"
    if name == "gate_up" and link.gate not in TERNARY_GATES:
        return f"ternary weights have no {link.gate!r}"
    before = {"gate_up": link.out, "qkv": link.down}.get(name)
    if before is not None and before.post_norm is not None:
        return "x of a ternary weight is no sum with a norm"
    if weight.shape[1] > MOST_TERNARY:
        return f"takes {MOST_TERNARY} inputs at most, got {weight.shape[1]}"
    if name == "qkv" and following and (rotary := following.rotary) is not None:
        if reason := rotary.why_apart(weight.shape[0]):
            return reason
        if (half := rotary.cos.shape[-1]) % 8:
            return f"takes halves of heads in multiples of 8, got {half}"
    gate = link.gate if name == "gate_up" else None
    return why_not_ternary(row, weight, epilogue=gate, device=device)


def plan_of(
    x,
    link: Link,
    *,
    device: Device,
    config: Config | None = None,
    registers: int | None = None,
) -> Plan:
    """What the kernel is compiled for; config: None for the default. registers: of a thread that
    multiplies; None: all of a block's have as many.
    """
    warps, following = (config or Config()).warps, link.following
    registers = registers or REGISTERS // (warps * LANES + BRINGING)
    products = []
    post: NormNumbers | None = None  # of the product before
    for name, (weight, _, norm, post_norm) in link.products.items():
        tile = _tile(name, link, warps)
        eps, centered = (None, False) if norm is None else (float(norm.eps), norm.zero_centered)
        gate, turned = link.gate if name == "gate_up" else None, None
        if name == "qkv" and following and following.rotary and following.cache:
            half, slots = following.rotary.cos.shape[-1], following.cache.k.shape[1]
            turned = Heads(following.rotary.q_heads, following.rotary.kv_heads, half, slots)
        static = Static(
            name, tile, False, x.dtype.name, device.num_sms, gate, eps, centered, turned
        )
        late = {"out": (), "down": ("x", "residual")}.get(name, ("x",))
        if name == "qkv" and post is not None:
            late = (*late, "stream")
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), weight)
        product = Product(static, shapes, late)
        # Squares are of one row, and so is what is made of a product before
        whole_rows = (norm is not None and weight.scheme != "ternary") or post is not None
        if _epilogue(name, link) is None and not whole_rows and _is_better_folded(product):
            product = dataclasses.replace(product, folded=True)
        if _may_hold(product, registers):
            held = dataclasses.replace(static, config=dataclasses.replace(tile, held=True))
            product = dataclasses.replace(product, static=held)
        post = NormNumbers.of(post_norm)
        products.append(dataclasses.replace(product, post_norm=post))
    plan = Plan(config or Config(), tuple(products))
    return plan if config else dataclasses.replace(plan, config=default_config(plan))


def _tile(name: str, link: Link, warps: int = Config().warps) -> sizes.Config:
    """What a block has of a weight at a time."""
    halves = 1 if _epilogue(name, link) is None else 2
    return sizes.Config(sizes.grain(link.products[name].weight, halves=halves), warps, 1, 1)


def _may_hold(product: Product, registers: int) -> bool:
    """Whether a thread has registers for its part of x beside the sums, and use for it."""
    if product.most_tiles == 1 or product.rounds > HELD_ROUNDS:
        return False
    places = CODES_PER_BYTE["ternary"] if product.packed.scheme == "ternary" else 1
    sums = places * product.config.tile_n * sizes.MMA_COLUMNS // LANES
    return product.held_words + sums <= registers * HELD_PART


def _epilogue(name: str, link: Link) -> str | None:
    turns = link.following is not None and link.following.rotary is not None
    # `quantized_matmul` has not the gate of ternary weights alone, whose shapes are those of others
    gate = link.gate if link.gate in PLAIN_GATES else "swiglu"
    return {"gate_up": gate, "qkv": "rope" if turns else None}.get(name)


def _is_better_folded(product: Product) -> bool:
    """Whether the fullest block has fewer rows of the weight with twice as many tiles, of half as
    many outputs each. H200, us: Phi-3-mini in bfloat16 63.3, folded 60.9; Qwen2.5-0.5B 17.8, 17.0.
    """
    packed, outputs = product.packed, product.config.tile_n // 2
    grouped = [a.dtype.itemsize for a in (packed.scale, packed.zero) if a is not None]
    if packed.shape[1] % (2 * (packed.group_size or sizes.part(packed.scheme))):
        return False
    if packed.shape[1] % (2 * sizes.part(packed.scheme)):
        return False
    if outputs * min(grouped, default=ACCESS_BYTES) < ACCESS_BYTES:
        return False
    folded = dataclasses.replace(product, folded=True)
    return folded.most_tiles * outputs < product.most_tiles * 2 * outputs


def default_config(plan: Plan, window_bytes: int = WINDOW_BYTES) -> Config:
    """As many stages as fit on chip, and of them as many on their way as `window_bytes` are."""

    def with_stages(stages: int) -> Plan:
        config = dataclasses.replace(plan.config, stages=stages, window=1)
        return dataclasses.replace(plan, config=config)

    most = max(1, SHARED_BYTES // plan.stage_bytes)
    fits = (n for n in range(most, 1, -1) if with_stages(n).shared_bytes <= SHARED_BYTES)
    stages = next(fits, 1)
    window = max(1, min(stages, round(window_bytes / plan.stage_bytes)))
    return dataclasses.replace(plan.config, stages=stages, window=window)


def check(heads, x, link: Link, *, who: str) -> None:
    """Refuses arrays that disagree; shapes suffice.

    Raises: ValueError, in the name of the op `who`.
    """
    if x.ndim < 1 or heads.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"{who}: heads {list(heads.shape)} and x {list(x.shape)} are not [*B, N H] and [*B, D]"
        )
    if link.gate not in GATES:
        raise ValueError(f"{who}: no gate is named {link.gate!r}; there are {', '.join(GATES)}")
    lead, d = x.shape[:-1], x.shape[-1]
    y = jax.ShapeDtypeStruct(x.shape, x.dtype)
    inner = jax.ShapeDtypeStruct((*lead, link.gate_up.weight.shape[0] // 2), x.dtype)
    rows = {"out": heads, "gate_up": y, "down": inner, "qkv": y}
    for name, (weight, bias, norm, post_norm) in link.products.items():
        around: dict[str, Any] = {"rotary": None, "cache": None, "residual": None}
        if name == "qkv" and link.following is not None:
            around |= {"rotary": link.following.rotary, "cache": link.following.cache}
        if name in ("out", "down"):
            around["residual"] = y
            if weight.shape[0] != d:
                raise ValueError(
                    f"{who}: the weight of {name} has {weight.shape[0]} outputs, but x is {d} wide"
                )
        rest = {"norm": norm, "bias": bias, "epilogue": _epilogue(name, link), "out_dtype": None}
        check_product(rows[name], weight, **rest, **around, who=f"{who}, {name}")
        if post_norm is not None:
            if name not in ("out", "down"):
                raise ValueError(f"{who}, {name}: only out and down have a post_norm")
            check_post_norm(post_norm, d, who=f"{who}, {name}")


def check_meeting(meeting, words: int, *, who: str) -> None:
    """Raises: ValueError, in the name of the op `who`, if a meeting has not so many words."""
    shape, dtype = getattr(meeting, "shape", None), getattr(meeting, "dtype", None)
    if shape != (words,) or dtype != jnp.int32:
        found = "no array" if shape is None else f"{dtype}{list(shape)}"
        raise ValueError(f"{who}: meeting is {found}, not int32[{words}]")


def _plain(plan: Plan, heads, x, weights, biases, norms, post_norms, angles, cache, meeting):
    """What `kernel.products` returns, as far as it has gradients."""
    products, following = {}, None
    for product, *arrays in zip(plan.products, weights, biases, norms, post_norms, strict=True):
        static, (weight, bias, scale, post_scale) = product.static, arrays
        norm = post_norm = None
        if static.eps is not None:
            norm = Norm(scale, static.eps, static.zero_centered)
        if product.post_norm is not None:
            post_norm = Norm(post_scale, *product.post_norm)
        products[static.name] = Weights(weight, bias, norm, post_norm)
    if (turned := plan.products[-1].static.heads) is not None:
        rotary = Rotary(angles[0], angles[1], turned.q, turned.kv)
        following = Following(products.pop("qkv"), rotary, cache)
    elif "qkv" in products:
        following = Following(products.pop("qkv"))
    link = Link(**products, following=following, gate=plan.gate)
    y, rest = in_parts(quantized_matmul_reference, straight_through, heads, x, link)
    return y, *(rest or ()), meeting


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _between(plan: Plan, *arrays: Any):
    # Blocks of two slices would wait for each other: a slice is a launch of its own
    return sequential_vmap(functools.partial(kernel.products, plan))(*arrays)


def _forward(plan: Plan, *arrays: Any):
    return _between(plan, *arrays), arrays


def _backward(plan: Plan, arrays: Any, cotangents: Any):
    heads, x, weights, *rest = arrays
    numbers = [weight.codes if weight.scheme == PLAIN else None for weight in weights]

    def plain(heads, x, numbers, *rest):
        given = [
            weight if own is None else Packed.of(own)
            for weight, own in zip(weights, numbers, strict=True)
        ]
        return _plain(plan, heads, x, given, *rest)

    d_heads, d_x, d_numbers, *d_rest = jax.vjp(plain, heads, x, numbers, *rest)[1](cotangents)
    d_weights = tuple(None if own is None else Packed.of(own) for own in d_numbers)
    return d_heads, d_x, d_weights, *d_rest


_between.defvjp(_forward, _backward)
# Layers alike share one compiled kernel
_between = jax.jit(_between, static_argnums=0)  # pyright: ignore[reportAssignmentType]
