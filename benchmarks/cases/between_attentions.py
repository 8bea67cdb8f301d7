"""From attention to attention, one row: a layer of real models by one launch, and by four.

A label is the model and the format of its weights, "plain" if they are in 16 bits. The rival "four
launches" does each product by the kernel that has it without this one. "link" is the structure of
the weights, whose arrays are the arguments behind heads and x.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case
from benchmarks.models import GEMMA3_1B, LLAMA, LLAMA_8B, PHI_3_MINI, QWEN
from jaxllm import ops
from jaxllm.config import ModelConfig
from pallas_kernels.around_product import Cache, Norm, Rotary
from pallas_kernels.between_attentions import (
    Following,
    Link,
    Weights,
    between_attentions,
    between_attentions_reference,
)
from pallas_kernels.measure import size_bytes
from pallas_kernels.packed import CODES, PLAIN, SCALES, Packed
from pallas_kernels.quantize import quantize

MODELS = {
    "Llama-3.1-8B": LLAMA_8B,
    "Qwen2.5-0.5B": QWEN,
    "Llama-3.2-1B": LLAMA,
    "Phi-3-mini": PHI_3_MINI,
    "Gemma-3-1B": GEMMA3_1B,
}
SLOTS = 512  # of a cache
MOST_NUMBERS = 2**25  # of gate or up, that a host multiplies in float64 within seconds
# (format, group size, zero points), of Llama-3.1-8B's layer
FORMATS: Any = (
    ("int8", 128, False),
    ("int4", 128, True),
    ("int4", 32, False),
    ("fp8", None, False),
    *((scheme, None, False) for scheme in ("nvfp4", "mxfp4", "mxfp8")),
)


def cases() -> list[Case]:
    """Ternary weights are compiled only: int8 made of x makes a step of any rounding."""
    found = [
        _case(name, form, compile_only=form == "ternary")
        for name in MODELS
        for form in (PLAIN, "int8", "int4", "ternary")
        if (name, form) != ("Gemma-3-1B", "ternary")  # which sums with a norm it has not
    ]
    found += [_case("Llama-3.1-8B", *form) for form in FORMATS]
    return [*found, _case("Qwen2.5-0.5B", "int8", last=True, compile_only=True)]


def _case(
    name: str,
    form: str,
    group: int | None = None,
    zeros: bool = False,
    *,
    last: bool = False,
    compile_only: bool = False,
) -> Case:
    config = MODELS[name]
    make = functools.partial(_make, config, (form, group, zeros), last)
    arguments = jax.eval_shape(make, jax.random.key(0))
    link = link_of(config, (form, group, zeros), last)
    words = [name, form] + [f"groups of {group}"] * bool(group) + ["zero points"] * zeros
    weights = [weights.weight for weights in link.products.values()]
    d, f = config.hidden_size, config.intermediate_size
    call = functools.partial(_call, link)
    return Case(
        op="between_attentions",
        label=", ".join([*words, *["the last layer"] * last]),
        arguments=arguments,
        run=functools.partial(call, between_attentions),
        plain=functools.partial(call, _plain),
        kind="memory-read",
        # of the cache a token is written; what passes between the products stays in the L2
        bytes=size_bytes(*arguments[:2], *weights) + 2 * d,
        operations=2 * sum(o * i for o, i in (w.shape for w in weights)),
        ceiling="read",
        keywords={"link": link},
        make=make,
        truth=functools.partial(_truth, link) if d * f < MOST_NUMBERS else None,
        rivals={"four launches": functools.partial(call, _four_launches)},
        compile_only=compile_only,
    )


def link_of(config: ModelConfig, how: tuple[str, int | None, bool], last: bool) -> Link:
    """The structure, of shapes."""
    d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
    n, k = config.num_attention_heads, config.num_key_value_heads
    form, group, zeros = how

    def norm() -> Any:
        weight: Any = jax.ShapeDtypeStruct((d,), jnp.bfloat16)
        return Norm(weight, config.rms_norm_eps, config.zero_centered_norm)

    def weights(o: int, i: int, norm: Any = None, *, bias: bool = False) -> Weights:
        shape: Any = jax.ShapeDtypeStruct((o, i), jnp.bfloat16)
        pack = functools.partial(quantize, scheme=form, group_size=group, zero_points=zeros)
        packed: Any = Packed.of(shape) if form == PLAIN else jax.eval_shape(pack, shape)
        biases: Any = jax.ShapeDtypeStruct((o,), jnp.bfloat16) if bias else None
        return Weights(packed, biases, norm)

    following: Any = None
    if not last:
        angles: Any = jax.ShapeDtypeStruct((1, h // 2), jnp.float32)
        held: Any = jax.ShapeDtypeStruct((1, SLOTS, k, h), jnp.bfloat16)
        cache = Cache(held, held, jax.ShapeDtypeStruct((1,), jnp.int32))  # pyright: ignore
        qkv = weights((n + 2 * k) * h, d, norm(), bias=config.qkv_bias)
        # Heads that are normed first are turned by a launch of their own
        apart = Following(qkv), Following(qkv, Rotary(angles, angles, n, k), cache)
        following = apart[not config.qk_norm]
    behind = norm() if config.post_norms else None
    out, down = (each._replace(post_norm=behind) for each in (weights(d, n * h), weights(d, f)))
    gate = ops.EPILOGUES[config.hidden_act]
    return Link(out, weights(2 * f, d, norm()), down, following, gate)


def _make(config: ModelConfig, how: Any, last: bool, key: jax.Array) -> tuple[jax.Array, ...]:
    widths = (config.num_attention_heads * config.head_dim, config.hidden_size)
    return made_of(widths, link_of(config, how, last), how, key)


def made_of(widths: Any, structure: Any, how: Any, key: jax.Array) -> tuple[jax.Array, ...]:
    """Rows of such widths, and the arrays of a structure of shapes; integers are 7."""
    form, group, zeros = how

    def made(key: jax.Array) -> tuple[Any, ...]:
        keys = iter(jax.random.split(key, 64))

        def normal(spec: Any, scale: float = 1.0) -> jax.Array:
            numbers = jax.random.normal(next(keys), spec.shape, jnp.float32)
            return (numbers * jnp.float32(scale)).astype(spec.dtype)

        def packed(weight: Packed) -> Packed:
            spec = jax.ShapeDtypeStruct(weight.shape, jnp.bfloat16)
            numbers = normal(spec, weight.shape[1] ** -0.5)
            if form == PLAIN:
                return Packed.of(numbers)
            return quantize(numbers, form, group, zero_points=zeros)

        rows = [normal(jax.ShapeDtypeStruct((1, width), jnp.bfloat16)) for width in widths]
        arrays = []
        for spec in jax.tree.leaves(structure, is_leaf=lambda x: isinstance(x, Packed)):
            if isinstance(spec, Packed):
                arrays += jax.tree.leaves(packed(spec))
            elif is_array(spec):
                integers = jnp.issubdtype(spec.dtype, jnp.integer)
                arrays.append(jnp.full(spec.shape, 7, spec.dtype) if integers else normal(spec))
        return (*rows, *arrays)

    return jax.jit(made)(key)


def is_array(leaf: Any) -> bool:
    """Whether it is one, or the shape of one."""
    return hasattr(leaf, "shape")


def filled(structure: Any, arrays: Any) -> Any:
    """The structure with arrays in the places of shapes."""
    leaves, tree = jax.tree.flatten(structure)
    rest = iter(arrays)
    return jax.tree.unflatten(tree, [next(rest) if is_array(x) else x for x in leaves])


def _call(link: Link, run: Any, heads: Any, x: Any, *arrays: Any) -> Any:
    y, after, *_ = run(heads, x, filled(link, arrays), meeting=jnp.zeros(2, jnp.int32))
    return y, after


def _plain(heads: Any, x: Any, link: Link, **_: Any) -> Any:
    def narrow(leaf: Any) -> Any:  # float8 again: for the truth all floats were widened
        if not isinstance(leaf, Packed) or leaf.scheme == PLAIN:
            return leaf
        scale = leaf.scale.astype(SCALES[leaf.scheme][0]) if leaf.scheme == "nvfp4" else leaf.scale
        return dataclasses.replace(leaf, codes=leaf.codes.astype(CODES[leaf.scheme]), scale=scale)

    link = jax.tree.map(narrow, link, is_leaf=lambda x: isinstance(x, Packed))
    return between_attentions_reference(heads, x, link)


def _four_launches(heads: Any, x: Any, link: Link, **rest: Any) -> Any:
    how = {"between_attentions": "xla"}  # by `fused_linear`, whose kernels "auto" takes
    y, after, _ = ops.between_attentions(heads, x, link, **rest, implementation=how)
    if after is None or link.following is None or link.following.rotary is None:
        return y, after
    q, *kv = after
    return y, (q.reshape(1, -1), *kv)


def _truth(link: Link, heads: np.ndarray, x: np.ndarray, *arrays: np.ndarray) -> Any:
    import between_calls  # type: ignore

    return between_calls.truth({"heads": heads, "x": x, "link": filled(link, arrays)})
