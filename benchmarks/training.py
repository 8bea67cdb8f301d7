"""Whole training steps: tokens a second, model FLOP utilisation and memory, by remat policy.

The model is a Llama of 1.3B parameters; the rivals of torch_training.py train the same one. Every
step: bfloat16 products, float32 weights and AdamW's moments, clipping, random tokens on the device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.models import LLAMA_1B, LLAMA_8B
from jaxllm import fp8, lora, precision, train
from jaxllm.config import ModelConfig, Runtime
from jaxllm.flops import PEAK_FLOPS, flops_a_token, matrix_weights
from jaxllm.model import Transformer

ROWS, LENGTH = 32, 2048  # 65536 tokens a step
ADAPTED_ROWS, RANK = 8, 16  # of Llama-3.1-8B: 16384 tokens a step
WARM_UP, STEPS = 2, 6
# (remat policy, micro-batches): parts as few as 139 GiB hold, the least remat first
WAYS = (("none", 1), ("none", 2), ("dots", 1), ("save_attention", 1), ("full", 1))
# What a run does first, a stage behind the other: by JAX in this order, then by torch, each in a
# process of its own
STAGES = (
    (
        *("none, 1 part", "jax-linear-attention", "none, 2 parts", "fp8, 2 parts"),
        *("torch eager", "torch.compile", "torch.compile, Liger's loss"),
    ),
    ("lora-8b, 8 parts", "lora-8b, PEFT, 8 parts", "lora-8b, PEFT"),
)


def utilisation(
    config: ModelConfig, length: int, tokens_per_s: float, *, trains_all: bool = True
) -> float:
    """MFU: the share of an H200's peak that `flops_a_token` of causal rows at that rate are."""
    operations = flops_a_token(config, length / 2, trains_all=trains_all)
    return operations * tokens_per_s / PEAK_FLOPS["H200"]


def tasks(section: str) -> Iterator[tuple[str, Callable[..., dict[str, Any]]]]:
    """(key, work) of each way to run our step, and of rivals in JAX, the first of STAGES first."""
    from benchmarks import jla_training  # it imports this file

    work = dict(jla_training.tasks(section))
    for remat, parts in WAYS:
        name = f"{section}/{remat}, {parts} part{'s' if parts > 1 else ''}"
        work[name] = functools.partial(measure, LLAMA_1B, remat, parts)
    work[f"{section}/fp8, 2 parts"] = functools.partial(measure, LLAMA_1B, "none", 2, policy="fp8")
    for parts in (8, 2):
        adapters = functools.partial(measure, LLAMA_8B, "none", parts, rank=RANK, rows=ADAPTED_ROWS)
        work[f"{section}/lora-8b, {parts} parts"] = adapters
    first = [f"{section}/{name}" for names in STAGES for name in names]
    yield from ((name, work.pop(name)) for name in first if name in work)
    yield from work.items()


def stage(name: str) -> int:
    """In which stage of a run a step is measured, from 1; the last: what STAGES does not name."""
    places = (place for place, names in enumerate(STAGES, 1) if name in names)
    return next(places, len(STAGES) + 1)


def program(
    config: ModelConfig,
    remat: str,
    parts: int,
    *,
    rows: int = ROWS,
    length: int = LENGTH,
    policy: str = "bf16",
    rank: int | None = None,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step, and the shapes of its arguments: to compile with and without a GPU.

    rank: of adapters, which are then all that is trained, beside a base in bfloat16.
    """
    stored = "float32" if rank is None else "bfloat16"
    runtime = Runtime(dtype="bfloat16", param_dtype=stored, remat=remat)

    def build() -> Transformer:
        model = Transformer(config, runtime, rngs=nnx.Rngs(0))
        if precision.policy(policy).fp8:
            fp8.use_fp8(model)
        if rank is not None:
            lora.add_adapters(model, rank=rank, rngs=nnx.Rngs(0))
        return model

    model = nnx.eval_shape(build)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.1))
    trainable = None if rank is None else lora.is_adapter
    state = train.init_state(model, optimizer, trainable=trainable)
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
    policy: str = "bf16",
    rank: int | None = None,
) -> dict[str, Any]:
    """Steps by the wall clock, one after the other, as a loop runs them."""
    del watch  # a step is long, and its kernels are not all there is to it
    step, (shapes, batch_shapes) = program(
        config, remat, parts, rows=rows, length=length, policy=policy, rank=rank
    )
    start = time.perf_counter()
    compiled = step.lower(shapes, batch_shapes).compile()  # type: ignore[attr-defined]
    compile_s = time.perf_counter() - start
    state = _random_state(shapes, jax.random.key(0))
    text = jax.random.randint(
        jax.random.key(1), (rows, length + 1), 0, config.vocab_size, jnp.int32
    )
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}

    def train() -> Any:
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics["loss"]

    losses, seconds = in_a_row(train, WARM_UP + steps)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        **figures(config, rows, length, seconds[WARM_UP:], trains_all=rank is None),
        "losses": losses,
        "compile_s": compile_s,
        "parts": parts,
        **planned(compiled),
        "peak_bytes": stats.get("peak_bytes_in_use", 0),
    }


def planned(compiled: jax.stages.Compiled) -> dict[str, int]:
    """What XLA's plan of a step's memory says: of all, and of what is passed on or temporary."""
    memory = compiled.memory_analysis()
    assert memory is not None
    kept = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "planned_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes + kept,
        "temporary_bytes": memory.temp_size_in_bytes,
        "state_bytes": memory.alias_size_in_bytes,
    }


def in_fewest_parts(
    name: str,
    rows: int,
    try_parts: Sequence[int],
    run: Callable[[int], dict[str, Any]],
    is_out_of_memory: Callable[[Exception], bool],
) -> dict[str, Any]:
    """`run` with the first of those micro-batches that divide the rows and for which memory lasts.

    Raises: MemoryError if it lasts for none. ValueError if none divides the rows.
    """
    tried = [parts for parts in try_parts if rows % parts == 0]
    if not tried:
        every = " or ".join(map(str, try_parts))
        raise ValueError(f"{name}: {rows} rows cannot be cut into {every} equal parts")
    for parts in tried:
        try:
            return run(parts)
        except Exception as error:  # whose frames keep what is in memory until it is let go
            if not is_out_of_memory(error):
                raise
    raise MemoryError(f"{name}: {rows} rows do not fit in {' or '.join(map(str, tried))} parts")


def in_a_row(step: Callable[[], Any], count: int) -> tuple[list[float], list[float]]:
    """The loss of each of `count` calls of `step`, and the seconds from one loss to the next.

    A loss is read when the next step is under way, as in a `Trainer`'s run: one step more runs.
    """
    losses: list[float] = []
    ends = [time.perf_counter()]
    last = step()
    for _ in range(count):
        following = step()
        losses.append(float(last))  # waits
        ends.append(time.perf_counter())
        last = following
    float(last)
    return losses, [end - start for start, end in itertools.pairwise(ends)]


def figures(
    config: ModelConfig,
    rows: int,
    length: int,
    seconds: list[float],
    *,
    trains_all: bool = True,
) -> dict[str, Any]:
    """What is told of a run, ours or a rival's."""
    step_s = statistics.median(seconds)
    rate = rows * length / step_s
    return {
        "step_s": step_s,
        "tokens_per_s": rate,
        "mfu": utilisation(config, length, rate, trains_all=trains_all),
        "tokens": rows * length,
    }


def _random_state(shapes: train.TrainState, key: jax.Array) -> train.TrainState:
    """A state of those shapes: matrices by chance, norms 1, the rest 0.

    Array by array, for as one program it compiles for 100 s (measured on an H200's host).
    """
    every = shapes.all_params
    keys = jax.random.split(key, len(every))
    drawn = {
        name: 0.02 * jax.random.normal(k, x.shape, x.dtype)
        if len(x.shape) > 1
        else jnp.ones(x.shape, x.dtype)
        for k, (name, x) in zip(keys, every.items(), strict=True)
    }
    params, frozen = (
        {name: drawn[name] for name in part} for part in (shapes.params, shapes.frozen)
    )
    rest = dataclasses.replace(shapes, params={}, frozen={})
    zeros: Any = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)
    return train.TrainState(params, frozen, zeros.opt_state, zeros.step, zeros.scale, zeros.skipped)


def lines(found: dict[str, dict[str, Any]], why: Callable[[Any], str]) -> Iterator[str]:
    """The results of this section as Markdown."""
    if not found:
        return
    yield (
        f"Training: a Llama of {matrix_weights(LLAMA_1B) / 1e9:.2f}B parameters in products, "
        f"{ROWS} x {LENGTH} tokens a step, bfloat16 with float32 weights and AdamW. MFU: "
        "(6 parameters + 6 L T N H) a token, of 989 TFLOP/s, also for fp8. lora-8b: adapters of "
        "rank 16 beside Llama-3.1-8B, 8 rows; 4 parameters + 6 L T N H. Parts: micro-batches, "
        "torch's as few as fit where its name says none. Planned: by XLA, as `jaxllm plan` has it; "
        "the peak is the allocator's: by JAX, that of all steps so far in the process."
    )
    yield ""
    yield "| step | parts | ms | tokens/s | MFU | compiled in, s | planned, GB | peak, GB |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for name in sorted(found, key=stage):
        row = found[name]
        if "step_s" not in row:
            yield f"| {name} | | {why(row)} | | | | | |"
            continue
        compiled = f"{row['compile_s']:.0f}" if "compile_s" in row else ""
        gigabytes = (
            f"{row[bytes_] / 1e9:.1f}" if bytes_ in row else ""
            for bytes_ in ("planned_bytes", "peak_bytes")
        )
        yield (
            f"| {name} | {row.get('parts', '')} | {1e3 * row['step_s']:.0f} | "
            f"{row['tokens_per_s']:.0f} | {100 * row['mfu']:.1f} % | {compiled} | "
            f"{' | '.join(gigabytes)} |"
        )
    yield ""
