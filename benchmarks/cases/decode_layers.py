"""Layers of one token in one launch, and with a launch for each product and each attention.

A label is the model and the format of its weights, "plain" if they are in 16 bits, how many layers
there are and how many keys the token sees. Layers and what they have in common are a structure,
whose arrays are the arguments behind x.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case
from benchmarks.cases import between_attentions
from benchmarks.cases.between_attentions import filled, link_of, made_of
from benchmarks.models import QWEN3
from jaxllm import ops
from pallas_kernels.around_product import Norm, Rotary
from pallas_kernels.between_attentions_config import MEETING_WORDS
from pallas_kernels.decode_layers import (
    Layer,
    Token,
    decode_layers,
    decode_layers_reference,
)
from pallas_kernels.measure import size_bytes
from pallas_kernels.packed import PLAIN

MODELS = {**between_attentions.MODELS, "Qwen3-0.6B": QWEN3}
LAYERS = 4
SLOTS, KEYS = 512, 300  # of a cache, and those that are seen
LONG = 8192  # of both, in one case
# (model, format): those whose layers are small, and for the compiler's sake one that is not
CALLS = (
    *(("Qwen2.5-0.5B", form) for form in (PLAIN, "int8", "int4", "ternary")),
    *(("Qwen3-0.6B", form) for form in (PLAIN, "int4")),
    *(("Phi-3-mini", form) for form in ("int4", "ternary")),
    *(("Llama-3.1-8B", form) for form in (PLAIN, "int8", "int4", "ternary")),
)
TRUE = "Qwen2.5-0.5B"  # whose layers a host multiplies in float64 within seconds


def cases() -> list[Case]:
    """Ternary weights are compiled only: int8 made of x makes a step of any rounding."""
    found = [_case(*call, compile_only=call[1] == "ternary") for call in CALLS]
    return [*found, _case("Qwen2.5-0.5B", PLAIN, keys=LONG)]


def _case(name: str, form: str, *, keys: int = KEYS, compile_only: bool = False) -> Case:
    how = (form, 128 if form == "int4" and name != "Qwen2.5-0.5B" else None, False)
    layers, token = structure = _structure(name, how, max(SLOTS, keys))
    config = MODELS[name]
    make = functools.partial(_make, structure, how, config.hidden_size, keys)
    arguments = jax.eval_shape(make, jax.random.key(0))
    weights = [weights.weight for layer in layers for weights in layer[:4]]
    width = token.rotary.kv_heads * config.head_dim
    call = functools.partial(_call, structure)
    return Case(
        op="decode_layers",
        label=f"{name}, {form}, {LAYERS} layers, {keys} keys",
        arguments=arguments,
        run=functools.partial(call, decode_layers),
        plain=functools.partial(call, _plain),
        kind="memory-read",
        # of the cache what is seen; what passes between the products stays in the L2
        bytes=size_bytes(arguments[0], *weights) + 2 * 2 * LAYERS * keys * width,
        operations=2 * sum(o * i for o, i in (w.shape for w in weights)),
        ceiling="read",
        keywords={"structure": structure},
        make=make,
        truth=functools.partial(_truth, structure) if name == TRUE and keys == KEYS else None,
        compared=_of_all_layers,
        rivals={"a launch a product": functools.partial(call, _launches)},
        compile_only=compile_only,
        # outside all loops but that of layers
        spilled_bytes=32 if (name, form) == ("Llama-3.1-8B", "ternary") else 0,
    )


def _structure(name: str, how: Any, slots: int) -> tuple[list[Layer], Token]:
    """The layers and what they have in common, of shapes."""
    config = MODELS[name]
    n, k, h = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def shape(*size: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(size, dtype)

    def layer() -> Layer:
        out, gate_up, down, following, _ = link_of(config, how, False)
        assert following is not None, "it is not the last"
        held = shape(1, slots, k, h), shape(1, slots, k, h)
        norm = Norm(shape(h), config.rms_norm_eps) if config.qk_norm else None
        return Layer(following.qkv, out, gate_up, down, *held, norm, norm)

    angles, at = shape(1, h // 2, dtype=jnp.float32), shape(1, dtype=jnp.int32)
    return [layer() for _ in range(LAYERS)], Token(Rotary(angles, angles, n, k), at, at)


def _make(structure: Any, how: Any, width: int, keys: int, key: jax.Array) -> tuple[Any, ...]:
    arrays = made_of([width], structure, how, key)
    *rest, slots, lengths = arrays
    return *rest, jnp.full_like(slots, keys - 1), jnp.full_like(lengths, keys)


def _call(structure: Any, run: Any, x: Any, *arrays: Any) -> Any:
    layers, token = filled(structure, arrays)
    y, caches, *_ = run(x, layers, token, meeting=jnp.zeros(MEETING_WORDS, jnp.int32))
    return y, caches


def _plain(x: Any, layers: Any, token: Any, **_: Any) -> Any:
    return decode_layers_reference(x, layers, token)


def _launches(x: Any, layers: Any, token: Any, **rest: Any) -> Any:
    how = {"decode_layers": "xla"}  # by `fused_linear` and `attention`, whose kernels "auto" takes
    return ops.decode_layers(x, layers, token, **rest, implementation=how)


def _of_all_layers(result: Any) -> Any:
    """With the caches of all layers as one: a layer's has two heads of a token that are new, and
    the largest error of so few numbers was up to 3.1 times plain's (one of six inputs, int4), where
    that of all layers' was 1.9 times it.
    """
    y, caches = result
    keys, values = zip(*caches, strict=True)
    return y, np.stack(keys), np.stack(values)


def _truth(structure: Any, x: np.ndarray, *arrays: np.ndarray) -> Any:
    import layers_calls  # type: ignore

    layers, token = filled(structure, arrays)
    return layers_calls.truth({"x": x, "layers": layers, "token": token})
