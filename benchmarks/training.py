"""Whole training steps: tokens a second, model FLOP utilisation and memory, by remat policy.

The model is a Llama of 1.3B parameters; the rivals of torch_training.py train the same one. Every
step: bfloat16 products, float32 weights and AdamW's moments, clipping, random tokens on the device.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxllm import train
from jaxllm.config import ModelConfig, Rope, Runtime
from jaxllm.model import Transformer

LLAMA_1B = ModelConfig(
    model_type="llama",
    vocab_size=32_000,
    hidden_size=2048,
    intermediate_size=5504,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=128,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    rope=Rope(1e4),
    tie_word_embeddings=False,
)
ROWS, LENGTH = 32, 2048  # 65536 tokens a step
PEAK_FLOPS = 989e12  # H100 and H200, bfloat16, dense; NVIDIA's data sheet
WARM_UP, STEPS = 2, 6
# (remat policy, micro-batches): parts as few as 139 GiB hold, the least remat first
WAYS = (("none", 2), ("none", 4), ("dots", 1), ("save_attention", 1), ("full", 1))


def matmul_parameters(config: ModelConfig) -> int:
    """Parameters that every token is multiplied by: the input embedding is only looked up."""
    d, f, width = config.hidden_size, config.intermediate_size, config.head_dim
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    layer = d * heads * width + 3 * d * f
    return config.num_hidden_layers * layer + config.vocab_size * d


def flops_a_token(config: ModelConfig, length: int) -> int:
    """6 a parameter of `matmul_parameters`, and attention: 6 L T N H.

    A product is 2 forward and 4 backward. Of attention's two products [T, T, H] a head causality
    needs half, 2 T N H a token and layer forward, and twice that backward. What remat does again
    is not counted.
    """
    width = config.num_attention_heads * config.head_dim
    attention = 6 * config.num_hidden_layers * length * width
    return 6 * matmul_parameters(config) + attention


def utilisation(config: ModelConfig, length: int, tokens_per_s: float) -> float:
    """MFU: the share of PEAK_FLOPS that `flops_a_token` at that rate are."""
    return flops_a_token(config, length) * tokens_per_s / PEAK_FLOPS


def tasks() -> Iterator[tuple[str, Callable[..., dict[str, Any]]]]:
    """(key, work) of each way to run our step."""
    for remat, parts in WAYS:
        name = f"train/{remat}, {parts} part{'s' if parts > 1 else ''}"
        yield name, functools.partial(measure, LLAMA_1B, remat, parts)


def program(
    config: ModelConfig, remat: str, parts: int, *, rows: int = ROWS, length: int = LENGTH
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step, and the shapes of its arguments: to compile with and without a GPU."""
    runtime = Runtime(dtype="bfloat16", param_dtype="float32", remat=remat)
    model = nnx.eval_shape(lambda: Transformer(config, runtime, rngs=nnx.Rngs(0)))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.1))
    state = train.init_state(model, optimizer)
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    step = train.make_train_step(model, optimizer, micro_batches=parts)
    return step, (state, {"tokens": ids, "targets": ids})


def measure(
    config: ModelConfig,
    remat: str,
    parts: int,
    watch: Any = None,
    *,
    rows: int = ROWS,
    length: int = LENGTH,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Steps by the wall clock, one after the other, as a loop runs them."""
    del watch  # a step is long, and its kernels are not all there is to it
    step, (shapes, batch_shapes) = program(config, remat, parts, rows=rows, length=length)
    start = time.perf_counter()
    compiled = step.lower(shapes, batch_shapes).compile()  # type: ignore[attr-defined]
    compile_s = time.perf_counter() - start
    state = _random_state(shapes, jax.random.key(0))
    text = jax.random.randint(
        jax.random.key(1), (rows, length + 1), 0, config.vocab_size, jnp.int32
    )
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    losses, seconds = [], []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]))  # waits
        seconds.append(time.perf_counter() - start)
    memory = compiled.memory_analysis()
    stats = jax.devices()[0].memory_stats() or {}
    return {
        **figures(config, rows, length, seconds[WARM_UP:]),
        "losses": losses,
        "compile_s": compile_s,
        "temporary_bytes": memory.temp_size_in_bytes,
        "state_bytes": memory.alias_size_in_bytes,
        "peak_bytes": stats.get("peak_bytes_in_use", 0),
    }


def figures(config: ModelConfig, rows: int, length: int, seconds: list[float]) -> dict[str, Any]:
    """What is told of a run, ours or a rival's."""
    step_s = statistics.median(seconds)
    rate = rows * length / step_s
    return {
        "step_s": step_s,
        "tokens_per_s": rate,
        "mfu": utilisation(config, length, rate),
        "tokens": rows * length,
    }


def _random_state(shapes: train.TrainState, key: jax.Array) -> train.TrainState:
    """A state of those shapes: matrices by chance, norms 1, the rest 0.

    Array by array, for as one program it compiles for 100 s (measured on an H200's host).
    """
    keys = jax.random.split(key, len(shapes.params))
    params = {
        name: 0.02 * jax.random.normal(k, x.shape, x.dtype)
        if len(x.shape) > 1
        else jnp.ones(x.shape, x.dtype)
        for k, (name, x) in zip(keys, shapes.params.items(), strict=True)
    }
    zeros: Any = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return train.TrainState(
        params, zeros.frozen, zeros.opt_state, zeros.step, zeros.scale, zeros.skipped
    )


def lines(found: dict[str, dict[str, Any]], why: Callable[[Any], str]) -> Iterator[str]:
    """The results of this section as Markdown."""
    if not found:
        return
    yield (
        f"Training: a Llama of {matmul_parameters(LLAMA_1B) / 1e9:.2f}B parameters in products, "
        f"{ROWS} x {LENGTH} tokens a step, bfloat16 with float32 weights and AdamW. MFU: "
        "(6 parameters + 6 L T N H) a token, of 989 TFLOP/s."
    )
    yield ""
    yield "| step | ms | tokens/s | MFU | compiled in, s | peak, GB |"
    yield "|---|--:|--:|--:|--:|--:|"
    for name, row in found.items():
        if "step_s" not in row:
            yield f"| {name} | {why(row)} | | | | |"
            continue
        compiled = f"{row['compile_s']:.0f}" if "compile_s" in row else ""
        yield (
            f"| {name} | {1e3 * row['step_s']:.0f} | {row['tokens_per_s']:.0f} | "
            f"{100 * row['mfu']:.1f} % | {compiled} | {row['peak_bytes'] / 1e9:.1f} |"
        )
    yield ""
