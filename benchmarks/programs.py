"""Prefill, decode and a training step of small models, compiled whole, and what they may cost.

The models have the widths of real ones and four layers. How many kernels a layer costs is the
difference to the same program with two layers, halved.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxllm
from jaxllm import aot, ops, train
from jaxllm.config import ModelConfig, Rope, Runtime

LAYERS = 4
PROMPT, CAPACITY = 512, 1024  # tokens of the prefill, room in the cache
BATCH = 4  # rows of PROMPT tokens in a training step

_QWEN = ModelConfig(  # the widths of Qwen2.5-0.5B
    model_type="qwen2",
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=LAYERS,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=32_768,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    rope=Rope(1e6),
    tie_word_embeddings=True,
    qkv_bias=True,
)
_LLAMA = ModelConfig(  # the widths of Llama-3.2-1B
    model_type="llama",
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=LAYERS,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    rope=Rope(5e5),
    tie_word_embeddings=True,
)
MODELS = {
    "Qwen2.5-0.5B float32": (_QWEN, "float32"),
    "Qwen2.5-0.5B bfloat16": (_QWEN, "bfloat16"),
    "Llama-3.2-1B bfloat16": (_LLAMA, "bfloat16"),
}


@dataclasses.dataclass(frozen=True)
class Limit:
    """What a program may cost at most; as measured when it was written, without room.

    kernels: launches a layer; peak_mib: with arguments and outputs; weight_copies: launches that do
    nothing but move an array of the shape of a weight matrix.
    """

    kernels: float
    peak_mib: float
    weight_copies: int = 0


# In the two steps that copy weights, XLA writes the new parameter over the donated old one while
# the old one is still to be read; it copies it before.
LIMITS = {
    ("Qwen2.5-0.5B float32", "prefill", "auto"): Limit(19, 810),
    ("Qwen2.5-0.5B float32", "decode", "auto"): Limit(22, 752),
    ("Qwen2.5-0.5B bfloat16", "prefill", "auto"): Limit(14, 393),
    ("Qwen2.5-0.5B bfloat16", "decode", "auto"): Limit(16, 377),
    ("Qwen2.5-0.5B bfloat16", "training", "auto"): Limit(66, 3820, weight_copies=9),
    ("Llama-3.2-1B bfloat16", "prefill", "auto"): Limit(13, 1009),
    ("Llama-3.2-1B bfloat16", "decode", "auto"): Limit(17, 974),
    ("Llama-3.2-1B bfloat16", "training", "auto"): Limit(62, 5501),
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What one whole program became; mosaic: names of our kernels, in order."""

    kept_bytes: int
    alias_bytes: int
    temporary_bytes: int
    peak_bytes: int
    kernels_a_layer: float
    graphs: int
    weight_copies: tuple[str, ...]
    mosaic: tuple[str, ...]


def _structs(model: ModelConfig, dtype: str, implementation: Any) -> Any:
    runtime = Runtime(dtype=dtype, param_dtype=dtype, implementation=implementation)
    return nnx.eval_shape(lambda: jaxllm.Transformer(model, runtime, rngs=nnx.Rngs(0)))


def _serving(model: ModelConfig, dtype: str, implementation: Any) -> tuple[Any, Any]:
    weights = jaxllm.flatten(_structs(model, dtype, implementation))
    cache = jax.eval_shape(
        lambda: jaxllm.KVCache.create(model, batch=1, capacity=CAPACITY, dtype=jnp.dtype(dtype))
    )
    return weights, cache


def _ids(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


# Each returns the function, its arguments, and those that it is given to keep


def _prefill(*model: Any) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    weights, cache = _serving(*model)
    return jaxllm.prefill, (weights, _ids(1, PROMPT), _ids(1), cache), cache


def _decode(*model: Any) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    weights, cache = _serving(*model)
    return jaxllm.decode_step, (weights, _ids(1), cache), cache


def _train(*model: Any) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    module = _structs(*model)
    optimizer = optax.adamw(1e-3)
    weights: Any = {
        ".".join(map(str, path)): jax.ShapeDtypeStruct(param.shape, param.dtype)
        for path, param in nnx.to_flat_state(nnx.state(module, nnx.Param))
    }
    steps: Any = _ids()
    state = train.TrainState(weights, jax.eval_shape(optimizer.init, weights), steps)
    batch = {"tokens": _ids(BATCH, PROMPT), "targets": _ids(BATCH, PROMPT)}
    return train.make_train_step(module, optimizer), (state, batch), state


PROGRAMS = {"prefill": _prefill, "decode": _decode, "training": _train}


def compile_program(model: str, program: str, implementation: str) -> Facts:
    """Compile one of PROGRAMS for one of MODELS, with four layers and with two."""
    config, dtype = MODELS[model]
    chosen = implementation if implementation != "pallas" else pallas_where_there_is()
    function, arguments, kept = PROGRAMS[program](config, dtype, chosen)
    whole = aot.compile_for(function, *arguments)
    short = dataclasses.replace(config, num_hidden_layers=LAYERS // 2, layer_types=())
    short_function, short_arguments, _ = PROGRAMS[program](short, dtype, chosen)
    fewer = aot.compile_for(short_function, *short_arguments)
    return Facts(
        kept_bytes=size_bytes(kept),
        alias_bytes=whole.alias_bytes,
        temporary_bytes=whole.temporary_bytes,
        peak_bytes=whole.peak_bytes,
        kernels_a_layer=(len(whole.launches) - len(fewer.launches)) / (LAYERS - LAYERS // 2),
        graphs=whole.graphs,
        weight_copies=weight_copies(whole, arguments[0]),
        mosaic=tuple(whole.mosaic_launches()),
    )


def faults(facts: Facts, limit: Limit) -> list[str]:
    """What is wrong with a whole program, a phrase each."""
    found = []
    if facts.alias_bytes < facts.kept_bytes:
        found.append(f"of {facts.kept_bytes} donated bytes {facts.alias_bytes} are aliased")
    if facts.kernels_a_layer > limit.kernels:
        found.append(f"{facts.kernels_a_layer:g} kernels a layer, not {limit.kernels:g}")
    if facts.peak_bytes > limit.peak_mib * 2**20:
        found.append(f"peak of {facts.peak_bytes / 2**20:.0f} MiB, not {limit.peak_mib:g}")
    if len(facts.weight_copies) > limit.weight_copies:
        found.append(f"copies weights: {', '.join(facts.weight_copies)}")
    return found


# What the kernels of an op are called, and how often at least a program of LAYERS layers has them
KERNEL_OF = {
    "embedding": ("embedding", 1),
    "rms_norm": ("rms_norm", 2 * LAYERS + 1),
    "linear": ("matmul", 4 * LAYERS),
    "rope": ("rope", LAYERS),
    "glu": ("swiglu", LAYERS),
}


def pallas_where_there_is() -> dict[str, str]:
    """The mapping for `Runtime` that takes our kernel for each op that has one."""
    return {op: "pallas" for op, (_, table) in ops.OPS.items() if "pallas" in table}


def missing_kernels(launched: Sequence[str], chosen: Iterable[str], training: bool) -> list[str]:
    """Which kernels of the ops `chosen` a program ought to launch and does not, a phrase each."""
    found = []
    for op in chosen:
        name, times = KERNEL_OF[op]
        forward = [k for k in launched if k.startswith(name) and "backward" not in k]
        if len(forward) < times:
            found.append(f"{len(forward)} launches of {name}, not {times}")
        if training and not any(k.startswith(name) and "backward" in k for k in launched):
            found.append(f"no backward kernel of {name}")
    return found


def weight_copies(program: aot.Program, weights: Any) -> tuple[str, ...]:
    """Launches that do nothing but move an array as large and of the shape of a weight matrix,
    transposed or not.
    """
    matrices = {tuple(sorted(x.shape)) for x in jax.tree.leaves(weights) if len(x.shape) > 1}
    return tuple(
        launch.name
        for launch in program.launches
        if (launch.kind == "kCopy" or "copy" in launch.name or "transpose" in launch.name)
        and any(tuple(sorted(shape)) in matrices for _, shape in launch.results)
    )


def size_bytes(tree: Any) -> int:
    """Bytes of all arrays of a pytree."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
