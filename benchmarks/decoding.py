"""Decoding, end to end: by implementation, with packed weights, with and without CUDA graphs.

Models have random weights, and of packed ones each is made, packed and let go of before the next.
"""

from __future__ import annotations

import functools
import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxllm
from benchmarks.models import (
    GEMMA2_2B,
    GEMMA3_1B,
    GEMMA3_4B,
    LLAMA_8B,
    PHI_4_MINI,
    QWEN,
    QWEN3,
    QWEN3_8B,
    kernels,
)
from jaxllm.config import ModelConfig, Runtime
from jaxllm.programs import LOOP_AS_GRAPH, DecodeState, decode, prefill
from jaxllm.quantize import PackedLinear, linears
from jaxllm.run import bucket
from jaxllm.sampling import Sampling
from pallas_kernels.measure import Stopwatch, size_bytes
from pallas_kernels.quantize import quantize

SECTIONS = ("decode", "packed-decode", "decode-heads", "decode-gemma", "cuda-graphs")
PROMPT, NEW_TOKENS = 64, 256
FUSED = "auto, fused"  # what `jaxllm generate` runs
# What is behind a name, and what `Runtime` takes for it
BY_PRODUCT, BY_LAYER = ", a launch a product", ", two launches a layer"
HOWS: dict[str, Any] = {
    BY_PRODUCT: {"between_attentions": "xla"},
    BY_LAYER: {"decode_layers": "xla"},
}
ROWS = (4, 16)  # that FUSED decodes too, and XLA
# (format and how, rows): bfloat16 with as many rows is what the others are compared with
PACKED = (
    *itertools.product(
        [f"{a}{how}" for a in ("bfloat16", "int8", "int4", "ternary") for how in ("", BY_PRODUCT)],
        [1],
    ),
    # Of which "auto" makes one for all
    *((f"{a}{BY_LAYER}", 1) for a in ("int8", "int4", "ternary")),
    *itertools.product(["bfloat16", "int4"], [16]),
    *itertools.product(["bfloat16", "int8", "int4"], [64]),
)
HEAD = "int8"  # of packed models
# What XLA is told, for one compilation; its own default makes a graph of the loop's body
GRAPHS: dict[str, Mapping[str, Any]] = {
    "the loop one graph": LOOP_AS_GRAPH,
    "a graph a token": {
        **LOOP_AS_GRAPH,
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL",
    },
    "no graphs": {**LOOP_AS_GRAPH, "xla_gpu_enable_command_buffer": ""},
}
GRAPH_MODELS = {"Qwen2.5-0.5B": QWEN, "Llama-3.1-8B": LLAMA_8B}
# Whose heads are normed before they are turned, or turned in part
HEAD_MODELS = {"Qwen3-0.6B": QWEN3, "Qwen3-8B": QWEN3_8B, "Phi-4-mini": PHI_4_MINI}
# And whose products have norms behind them
GEMMA_MODELS = {"Gemma-3-1B": GEMMA3_1B, "Gemma-3-4B": GEMMA3_4B, "Gemma-2-2B": GEMMA2_2B}
MODELS = {"decode-heads": HEAD_MODELS, "decode-gemma": GEMMA_MODELS}

Work = Callable[[Stopwatch], dict[str, Any]]


def tasks(section: str) -> Iterator[tuple[str, Work]]:
    """(key, work) of one of SECTIONS."""
    if section == "decode":
        for name in implementations():
            yield f"decode/{name}", functools.partial(by_implementation, QWEN, name)
        for rows, name in itertools.product(ROWS, (FUSED, "xla")):
            run = functools.partial(by_implementation, QWEN, name, rows=rows)
            yield f"decode/{_label(name, rows)}", run
    elif section == "packed-decode":
        for name, rows in PACKED:
            run = functools.partial(packed, LLAMA_8B, name, rows)
            yield f"packed-decode/{_label(name, rows)}", run
    elif section in MODELS:
        for (model, config), rows in itertools.product(MODELS[section].items(), (1, 16)):
            for name in (FUSED, "auto", "xla"):
                run = functools.partial(by_implementation, config, name, rows=rows)
                yield f"{section}/{model}, {_label(name, rows)}", run
    elif section == "cuda-graphs":
        for model, config in GRAPH_MODELS.items():
            for how in GRAPHS:
                yield f"cuda-graphs/{model}, {how}", functools.partial(graphs, config, how)


def implementations() -> dict[str, Any]:
    """By name, what `Runtime` takes; first what a user would, then XLA with one kernel of ours."""
    ours = kernels()
    plain = dict.fromkeys(ours, "xla")
    # A decoder of Llama's kind has no layer norm, and its softmax is inside attention
    # and one that is not fused has nothing from attention to attention
    others = ("layer_norm", "scale_softmax", "between_attentions", "decode_layers")
    alone = [op for op in ours if op not in others]
    return {
        **{name: name for name in ("xla", "auto", "pallas")},
        FUSED: "auto",
        **{FUSED + name: HOWS[name] for name in (BY_PRODUCT, BY_LAYER)},
        "xla, cudnn's attention": {**plain, "attention": "cudnn"},
        **{f"xla, our {op}": {**plain, op: "pallas"} for op in alone},
    }


def by_implementation(
    config: ModelConfig,
    implementation: str,
    watch: Stopwatch,
    *,
    rows: int = 1,
    prompt: int = PROMPT,
    new_tokens: int = NEW_TOKENS,
) -> dict[str, Any]:
    """`generate` for some rows of a bfloat16 model."""
    del watch  # the loop's own times are what a user sees
    choice = implementations()[implementation]
    model = random_model(config, choice, fused=implementation.startswith(FUSED))
    found = generated(model, rows, prompt=prompt, new_tokens=new_tokens)
    return {**found, "implementation": choice if isinstance(choice, str) else dict(choice)}


def packed(
    config: ModelConfig,
    name: str,
    rows: int,
    watch: Stopwatch,
    *,
    prompt: int = PROMPT,
    new_tokens: int = NEW_TOKENS,
) -> dict[str, Any]:
    """`generate` for some rows of a model whose projections are packed, its head in HEAD.

    name: the scheme, or "bfloat16", and one of HOWS or nothing behind it.
    """
    del watch
    scheme, comma, rest = name.partition(",")
    how = HOWS[comma + rest] if comma else "auto"
    if scheme == "bfloat16":
        model = random_model(config, how)
    else:
        model = packed_model(config, how, scheme=scheme)
    weights = size_bytes(nnx.state(model, nnx.Param))
    found = generated(model, rows, prompt=prompt, new_tokens=new_tokens)
    return {**found, "rows": rows, "weight_bytes": weights}


def random_model(
    config: ModelConfig, implementation: Any = "auto", *, fused: bool = True
) -> jaxllm.Transformer:
    """In bfloat16."""
    runtime = Runtime(dtype="bfloat16", param_dtype="bfloat16", implementation=implementation)
    model = jaxllm.Transformer(config, runtime, rngs=nnx.Rngs(0))
    if fused:
        jaxllm.fuse(model)
    return model


def packed_model(
    config: ModelConfig, implementation: Any = "auto", *, scheme: str, head: str = HEAD
) -> jaxllm.Transformer:
    """A fused model with random weights that never were all there in bfloat16.

    The head stays in bfloat16 if it is the embedding's table.
    """
    runtime = Runtime(dtype="bfloat16", param_dtype="bfloat16", implementation=implementation)
    model = nnx.eval_shape(lambda: jaxllm.Transformer(config, runtime, rngs=nnx.Rngs(0)))
    keys = (jax.random.fold_in(jax.random.key(0), i) for i in range(2**31))
    for name, (parent, attribute, module) in linears(model, ()).items():
        kind, spec = head if name == "lm_head" else scheme, module.weight.get_value()
        weights = jax.block_until_ready(quantize(_normal(next(keys), spec), kind))
        rest = {"dtype": jnp.bfloat16, "implementation": module.implementation}
        setattr(parent, attribute, PackedLinear(weights, module.bias, **rest))
    for _, parameter in nnx.iter_graph(model):
        spec = parameter.get_value() if isinstance(parameter, nnx.Param) else None
        if isinstance(spec, jax.ShapeDtypeStruct):
            vector = len(spec.shape) == 1
            drawn = jnp.ones(spec.shape, spec.dtype) if vector else _normal(next(keys), spec)
            parameter.set_value(drawn)
    jaxllm.fuse(model)
    return model


def _normal(key: jax.Array, spec: Any) -> jax.Array:
    return jnp.bfloat16(0.02) * jax.random.normal(key, spec.shape, spec.dtype)


def generated(
    model: jaxllm.Transformer, rows: int, *, prompt: int, new_tokens: int
) -> dict[str, Any]:
    """Tokens a second of `generate`, of all rows together, by the wall clock.

    bytes_a_token: of a step, every weight once (a tied table once, as the head) and the rows' cache
    at its mean length, divided by the rows; over the read rate that is the limit.
    """
    config = model.config
    numbers = np.random.default_rng(0).integers(0, config.vocab_size, (rows, prompt))
    run = functools.partial(
        jaxllm.generate, model, None, numbers.tolist(), max_new_tokens=new_tokens, stop_ids=[]
    )
    start = time.perf_counter()
    run()
    first_s = time.perf_counter() - start
    results = [run() for _ in range(3)]
    best = max(results, key=lambda r: r.timings.decode_tokens_per_s)
    cached = cache_bytes(config) * (prompt + new_tokens // 2)
    return {
        "tokens_per_s": statistics.median(r.timings.decode_tokens_per_s for r in results),
        "best_tokens_per_s": best.timings.decode_tokens_per_s,
        "prefill_s": statistics.median(r.timings.prefill_s for r in results),
        "first_call_s": first_s,
        "bytes_a_token": step_bytes(model) // rows + cached,
        "tokens": best.tokens[0][:8],
    }


def step_bytes(model: jaxllm.Transformer) -> int:
    """The weights that a step reads: an embedding that is no head, too, is not among them."""
    weights = size_bytes(nnx.state(model, nnx.Param))
    if not model.config.tie_word_embeddings:
        weights -= 2 * model.config.vocab_size * model.config.hidden_size
    return weights


def cache_bytes(config: ModelConfig) -> int:
    """Of one token, in bfloat16."""
    return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def graphs(
    config: ModelConfig,
    how: str,
    watch: Stopwatch,
    *,
    prompt: int = PROMPT,
    new_tokens: int = NEW_TOKENS,
) -> dict[str, Any]:
    """`decode`, the loop that `generate` runs, of a fused bfloat16 model, compiled by GRAPHS[how].

    One row; by the wall clock, a token's share of a dispatch.
    """
    del watch
    model = random_model(config)
    weights = jaxllm.flatten(model)
    size = min(64, new_tokens)
    cache = jaxllm.KVCache.create(
        config, batch=1, capacity=bucket(prompt + 5 * size, 128), dtype=jnp.bfloat16
    )
    ids = jax.random.randint(jax.random.key(1), (1, prompt), 0, config.vocab_size, jnp.int32)
    logits, cache = prefill(weights, ids, jnp.full((1,), prompt, jnp.int32), cache)
    none = jnp.zeros((1,), jnp.int32)
    state = DecodeState(cache, logits, none + 5 * size, none)
    rest = jax.device_put((Sampling.of(1), none - 1, np.int32(size), np.zeros(1, bool)))
    start = time.perf_counter()
    lowered = decode.lower(weights, state, *rest, size=size, greedy=True)
    program = lowered.compile(compiler_options=dict(GRAPHS[how]))
    compile_s = time.perf_counter() - start
    seconds, outs = [], []
    for _ in range(4):
        start = time.perf_counter()
        state, out = program(weights, state, *rest)
        outs.append(jax.device_get(out))
        seconds.append(time.perf_counter() - start)
    return {
        "us_a_token": 1e6 * statistics.median(seconds[1:]) / size,
        "compile_s": compile_s,
        "logprobs": outs[0].logprobs[0, :8].tolist(),
    }


def _label(name: str, rows: int) -> str:
    return name if rows == 1 else f"{name}, {rows} rows"


def _parts(label: str) -> tuple[str, int]:
    """The name and the rows that `_label` made it of."""
    many = re.fullmatch(r"(.+), (\d+) rows", label)
    return (many[1], int(many[2])) if many else (label, 1)


def lines(
    found: Callable[[str], dict[str, dict[str, Any]]],
    ceilings: Mapping[str, Any],
    why: Callable[[Any], str],
) -> Iterator[str]:
    """The results of these sections as Markdown; found: of one of them, by key."""
    yield from _by_implementation("Qwen2.5-0.5B's shape", found("decode"), ceilings, why)
    yield from _by_implementation(
        "shapes of Qwen3 and Phi-4-mini", found("decode-heads"), ceilings, why
    )
    yield from _by_implementation("shapes of Gemma", found("decode-gemma"), ceilings, why)
    yield from _packed(found("packed-decode"), ceilings, why)
    yield from _graphs(found("cuda-graphs"), why)


def _by_implementation(
    of: str,
    found: dict[str, dict[str, Any]],
    ceilings: Mapping[str, Any],
    why: Callable[[Any], str],
) -> Iterator[str]:
    if not found:
        return
    yield (
        f"Decoding, {of}, random bfloat16 weights, one row if no more are named, 64 + 256 tokens "
        "each:"
    )
    yield ""
    yield "| implementation | tokens a second | of the limit by the copy rate | by the read rate |"
    yield "|---|--:|--:|--:|"
    for name, row in found.items():
        if "tokens_per_s" not in row:
            yield f"| {name} | {why(row)} | | |"
            continue
        parts = (_share(row, ceilings, name) for name in ("copy", "read"))
        yield f"| {name} | {row['tokens_per_s']:.0f} | {' | '.join(parts)} |"
    yield ""


def _share(row: Mapping[str, Any], ceilings: Mapping[str, Any], name: str) -> str:
    if name not in ceilings:
        return ""
    return f"{100 * row['tokens_per_s'] * row['bytes_a_token'] / ceilings[name]:.0f} %"


def _packed(
    found: dict[str, dict[str, Any]], ceilings: Mapping[str, Any], why: Callable[[Any], str]
) -> Iterator[str]:
    if not found:
        return
    yield (
        "Decoding, Llama-3.1-8B's shape, random weights, 64 + 256 tokens a row; packed projections "
        f"with the head in {HEAD}. Times as fast: as bfloat16 with as many rows. Prompts: until "
        f"they are read, {PROMPT} tokens a row."
    )
    yield ""
    yield (
        "| weights | rows | GB | prompts, ms | tokens a second | of the read rate | times as fast |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for label, row in found.items():  # of which some are not made any more, or by another name
        name, rows = _parts(label)
        if "tokens_per_s" not in row:
            yield f"| {name} | {rows} | | | {why(row)} | | |"
            continue
        plain = found.get(_label("bfloat16", rows), {}).get("tokens_per_s")
        times = f"{row['tokens_per_s'] / plain:.2f}" if plain and name != "bfloat16" else ""
        yield (
            f"| {name} | {rows} | {row['weight_bytes'] / 1e9:.2f} | {1e3 * row['prefill_s']:.1f} | "
            f"{row['tokens_per_s']:.0f} | {_share(row, ceilings, 'read')} | {times} |"
        )
    yield ""


def _graphs(found: dict[str, dict[str, Any]], why: Callable[[Any], str]) -> Iterator[str]:
    if not found:
        return
    yield (
        "Decoding with CUDA graphs and without them: one row of a fused bfloat16 model, greedy, "
        "dispatches of 64 tokens."
    )
    yield ""
    first = next(iter(GRAPHS))
    yield f"| model and graphs | us a token | log-probabilities apart from those of {first} |"
    yield "|---|--:|--:|"
    for name, row in found.items():
        if "us_a_token" not in row:
            yield f"| {name} | {why(row)} | |"
            continue
        model = name.partition(", ")[0]
        whole = found.get(f"{model}, {first}", {}).get("logprobs")
        apart = "" if whole is None else f"{max(map(_apart, whole, row['logprobs'])):.2g}"
        yield f"| {name} | {row['us_a_token']:.0f} | {apart} |"
    yield ""


def _apart(a: float, b: float) -> float:
    return abs(a - b)
