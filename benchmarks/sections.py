"""What is no single kernel against its rivals: fusion side by side, a layer, whole models."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxllm
from benchmarks import decoding, step_kernels, training
from benchmarks.models import LLAMA_8B, QWEN
from jaxllm import ops
from jaxllm.config import ModelConfig, Runtime
from jaxllm.layers import Block
from pallas_kernels.measure import Stopwatch, Timing, num_sets, size_bytes

SECTIONS = (
    "softmax-fusion",
    "unfused-attention",
    "layer",
    "decode",
    "prefill",
    "long-context",
    "packed-decode",
    "decode-heads",
    "decode-gemma",
    "cuda-graphs",
    "step-kernels",
    "train",
)
# Those of minutes are run by name only; whose tasks they are
BY_NAME = {
    "packed-decode": decoding,
    "decode-heads": decoding,
    "decode-gemma": decoding,
    "cuda-graphs": decoding,
    "step-kernels": step_kernels,
    "train": training,
}
# Names that stand for several
GROUPS = {
    "attention": (
        "flash_attention",
        "flash_attention_backward",
        "flash_attention_fp8",
        "decode_attention",
        "prefill",
        "long-context",
    ),
    "decoding": (
        "decode",
        "packed-decode",
        "decode-heads",
        "decode-gemma",
        "cuda-graphs",
        "step-kernels",
    ),
}
LATE = ("decode", "prefill", *BY_NAME)  # whose programs take long to compile
NUM_STAGES = 2 + len(training.STAGES)  # that of all else, training's, and that of what they leave

Work = Callable[[Stopwatch], dict[str, Any]]

ATTENTION_SHAPE = (1, 2048, 32, 128)  # B T N H: Llama-3.1-8B's query heads
LONG_SHAPE = (1, 65536, 32, 8, 128)  # B T N K H: Llama-3.1-8B's heads
PREFILL_TOKENS = 8192
ATTENTIONS = ("pallas", "cudnn")
# Of the kernels that are attention, ours and others', parts of their names
ATTENTION_KERNELS = ("flash_attention", "decode_attention", "sdpa", "fmha")
SOFTMAX_SHAPES = ((32, 512), (2, 8, 128, 128), (8, 32, 2048, 2048), (64, 131072))


def expand(names: Sequence[str]) -> list[str]:
    """The names with what GROUPS says that they stand for."""
    return list(dict.fromkeys(one for name in names for one in GROUPS.get(name, (name,))))


def tasks(names: list[str], quick: bool, on_gpu: bool, layers: int = 32) -> list[tuple[str, Work]]:
    """The sections named (without names all but BY_NAME's); none without a GPU."""
    if not on_gpu:
        return []
    work: list[tuple[str, Work]] = []
    if wanted("softmax-fusion", names):
        for shape in SOFTMAX_SHAPES:
            label = " x ".join(map(str, shape))
            work.append((f"softmax-fusion/{label}", functools.partial(softmax_fusion, shape)))
    if wanted("unfused-attention", names):
        for dtype in ("bfloat16", "float32"):
            run = functools.partial(unfused_attention, ATTENTION_SHAPE, dtype)
            work.append((f"unfused-attention/{dtype}", run))
    if wanted("layer", names):
        work.append(("layer/512 tokens", functools.partial(layer, QWEN, 512)))
    if wanted("decode", names) and not (quick and "decode" not in names):
        work += decoding.tasks("decode")
    if wanted("long-context", names):
        for name in ATTENTIONS:
            run = functools.partial(long_context, LONG_SHAPE, name)
            work.append((f"long-context/{name}", run))
    if wanted("prefill", names) and not (quick and "prefill" not in names):
        config = dataclasses.replace(LLAMA_8B, num_hidden_layers=layers, layer_types=())
        for cached in (True, False):
            for name in ATTENTIONS:
                run = functools.partial(prefill, config, name, PREFILL_TOKENS, cached)
                work.append((f"prefill/{name}{'' if cached else ', no cache'}", run))
    for name, module in BY_NAME.items():
        if name in names:
            work += module.tasks(name)
    return work


def stage(name: str) -> int:
    """When a case or section is run: behind all of the stages before, in processes of its own.

    0: at once. Training has stages of its own, for a run may end before the last.
    """
    prefix = "train/"
    return training.stage(name.removeprefix(prefix)) if name.startswith(prefix) else 0


def wanted(section: str, names: list[str]) -> bool:
    """Whether the command line asks for it."""
    return not names or section in names


def softmax_fusion(
    shape: tuple[int, ...], watch: Stopwatch, *, interpret: bool = False
) -> dict[str, Any]:
    """Scale, mask and softmax: each alone, as XLA fuses them, and ours. bfloat16, a key mask [S].

    bytes: by XLA's own count of what its kernels read and write; ours: x and mask in, y out.
    """
    from pallas_kernels.softmax import scale_softmax

    scale = 0.125
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((1,) * (len(shape) - 1) + shape[-1:], jnp.bool_)

    def scaled(x):
        return x * jnp.asarray(scale, x.dtype)

    def masked(x, mask):
        return jnp.where(mask, x, jnp.asarray(-jnp.inf, x.dtype))

    def softmax(x):
        return jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)

    parts = [_compile(scaled, x), _compile(masked, x, mask), _compile(softmax, x)]
    fused = _compile(lambda x, mask: softmax(masked(scaled(x), mask)), x, mask)
    ours = _compile(
        lambda x, mask: scale_softmax(x, scale=scale, mask=mask, interpret=interpret), x, mask
    )
    keep = jnp.arange(shape[-1]).reshape(mask.shape) < shape[-1] * 3 // 4
    sets = [
        (jax.random.normal(key, shape, jnp.float32).astype(jnp.bfloat16), keep)
        for key in jax.random.split(jax.random.key(0), num_sets(2 * size_bytes(x)))
    ]
    truth = fused(*sets[0])
    apart = jnp.max(jnp.abs(ours(*sets[0]).astype(jnp.float32) - truth.astype(jnp.float32)))
    moved = 2 * size_bytes(x) + size_bytes(mask)
    return {
        "model_bytes": moved,
        "largest_difference": float(apart),
        "separate": {
            **_time(watch, lambda x, mask: parts[2](parts[1](parts[0](x), mask)), sets),
            "bytes": sum(_bytes(part) for part in parts),
        },
        "xla": {**_time(watch, fused, sets), "bytes": _bytes(fused)},
        "ours": {**_time(watch, ours, sets), "bytes": moved},
    }


def unfused_attention(
    shape: tuple[int, ...], dtype: str, watch: Stopwatch, *, interpret: bool = False
) -> dict[str, Any]:
    """Causal attention as matmul, softmax, matmul: with our softmax, with XLA's, and fused ones."""
    from pallas_kernels.softmax import scale_softmax, scale_softmax_reference

    scale = shape[-1] ** -0.5
    ours = functools.partial(scale_softmax, interpret=interpret)

    def unfused(softmax, q, k, v):
        precision = "highest" if q.dtype == jnp.float32 else None
        scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision=precision)
        weights = softmax(scores, scale=scale, causal=True)
        return jnp.einsum("bnts,bsnh->btnh", weights, v, precision=precision)

    ways = {
        "matmul, our softmax, matmul": functools.partial(unfused, ours),
        "matmul, XLA's softmax, matmul": functools.partial(unfused, scale_softmax_reference),
        "ops.attention, xla": functools.partial(ops.attention, scale=scale, implementation="xla"),
    }
    if dtype == "bfloat16" and jax.default_backend() == "gpu":
        ways["cudnn"] = functools.partial(
            jax.nn.dot_product_attention, scale=scale, is_causal=True, implementation="cudnn"
        )
    spec = jax.ShapeDtypeStruct(shape, dtype)
    sets = [
        tuple(
            jax.random.normal(k, shape, jnp.float32).astype(dtype) for k in jax.random.split(key, 3)
        )
        for key in jax.random.split(jax.random.key(0), num_sets(4 * size_bytes(spec)))
    ]
    times: dict[str, Any] = {}
    first = None
    for name, way in ways.items():
        program = _compile(way, spec, spec, spec)
        out = program(*sets[0]).astype(jnp.float32)
        first = out if first is None else first
        apart = float(jnp.linalg.norm((out - first).ravel()) / jnp.linalg.norm(first.ravel()))
        times[name] = {**_time(watch, program, sets), "apart": apart}
    return {"shape": list(shape), "times": times}


def layer(config: ModelConfig, tokens: int, watch: Stopwatch) -> dict[str, Any]:
    """One decoder layer in bfloat16: op by op with attention on the host, and the jitted step."""
    block = Block(config, runtime=Runtime(dtype="bfloat16", param_dtype="bfloat16"), rngs=_rngs())
    x = jax.random.normal(jax.random.key(1), (1, tokens, config.hidden_size), jnp.float32)
    x = x.astype(jnp.bfloat16)
    rotary = block.self_attn.rotary(jnp.arange(tokens, dtype=jnp.int32)[None, :])
    graph, state = nnx.split(block)
    weights, tree = jax.tree.flatten(state)

    @jax.jit
    def step(weights, x, rotary):
        return nnx.merge(graph, jax.tree.unflatten(tree, weights))(x, rotary)[0]

    jitted = watch.time(step, [(tuple(weights), x, rotary)])
    slow = lambda: jax.block_until_ready(_op_by_op(block, x, rotary))  # noqa: E731
    apart = jnp.max(jnp.abs((slow() - step(tuple(weights), x, rotary)).astype(jnp.float32)))
    walls = []
    for _ in range(5):
        start = time.perf_counter()
        slow()
        walls.append(1e6 * (time.perf_counter() - start))
    return {
        "largest_difference": float(apart),
        "op by op, attention on the host": {"us": statistics.median(walls), "clock": "host"},
        "jitted": {**dataclasses.asdict(jitted), "us": jitted.wall_us, "clock": "host"},
        "jitted, kernels alone": dataclasses.asdict(jitted),
    }


def _op_by_op(block: Block, x: jax.Array, rotary: Any) -> jax.Array:
    """What a program without jit and without a kernel for attention does."""
    attention, cpu = block.self_attn, jax.devices("cpu")[0]
    here = x.device
    h = block.input_layernorm(x)
    heads = (*x.shape[:2], -1, attention.width)
    q, k, v = (
        project(h).reshape(heads)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q, k = ops.rope(q, k, *rotary, implementation="xla")
    q, k, v = jax.device_put((q, k, v), cpu)
    with jax.default_device(cpu):
        out = ops.attention(q, k, v, scale=attention.scale, implementation="xla")
    out = jax.device_put(out, here)
    x = x + attention.o_proj(out.reshape(*x.shape[:2], -1))
    return x + block.mlp(block.post_attention_layernorm(x))


def long_context(
    shape: tuple[int, int, int, int, int], implementation: str, watch: Stopwatch
) -> dict[str, Any]:
    """Causal attention of one long row, forward, and forward with backward: time and memory.

    scores_bytes: what the scores would take in bfloat16, if they were ever stored.
    """
    b, t, n, k, h = shape
    attend = functools.partial(ops.attention, implementation=implementation)
    q, kv = (jax.ShapeDtypeStruct((b, t, heads, h), jnp.bfloat16) for heads in (n, k))

    def both(q, k, v, d_out):
        out, vjp = jax.vjp(attend, q, k, v)
        return out, vjp(d_out)

    arguments = tuple(
        jax.random.normal(key, x.shape, x.dtype)
        for key, x in zip(jax.random.split(jax.random.key(0), 4), (q, kv, kv, q), strict=True)
    )
    found: dict[str, Any] = {"shape": list(shape), "scores_bytes": 2 * b * n * t * t}
    operations = 2 * b * n * h * t * t
    for name, f, used, factor in (
        ("forward", attend, arguments[:3], 1.0),
        ("forward and backward", both, arguments, 3.5),
    ):
        program = _compile(f, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in used))
        memory = program.memory_analysis()
        finite = [bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(program(*used))]
        timing = dataclasses.asdict(watch.time(program, [used], calls=4))
        found[name] = {
            **timing,
            "operations": int(factor * operations),
            "finite": all(finite),
            "temporary_bytes": memory.temp_size_in_bytes,
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
        }
    return found


def prefill(
    config: ModelConfig, attention: str, tokens: int, cached: bool, watch: Stopwatch
) -> dict[str, Any]:
    """One prompt through a model with random bfloat16 weights, all ops "auto" but attention.

    cached: into a fresh cache, as `generate` does it; else as training does. attention_us: of the
    kernels that are attention by their names; masks made for them are not among them.
    """
    choice = {"attention": attention}
    runtime = Runtime(dtype="bfloat16", param_dtype="bfloat16", implementation=choice)
    model = jaxllm.Transformer(config, runtime, rngs=_rngs())
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    flat = jaxllm.flatten(model)
    del model, state
    ids = jax.random.randint(jax.random.key(1), (1, tokens), 0, config.vocab_size, jnp.int32)

    def with_cache(weights, ids):
        cache = jaxllm.KVCache.create(config, batch=1, capacity=tokens, dtype=jnp.bfloat16)
        return jaxllm.prefill(weights, ids, jnp.full((1,), tokens, jnp.int32), cache)

    def without(leaves, ids):
        model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        return model.head(model.hidden(ids)[0][:, -1])

    start = time.perf_counter()
    weights = flat if cached else leaves
    program = jax.jit(with_cache if cached else without).lower(weights, ids).compile()
    compile_s = time.perf_counter() - start
    sets = [(weights, ids)]
    timing = watch.time(program, sets, calls=5)
    found = {
        **dataclasses.asdict(timing),
        "layers": config.num_hidden_layers,
        "tokens": tokens,
        "tokens_per_s": 1e6 * tokens / timing.wall_us,
        "compile_s": compile_s,
    }
    if watch.reason is None:
        kernels_us = watch.kernels(program, sets)
        attention_us = [
            us for name, us in kernels_us if any(part in name for part in ATTENTION_KERNELS)
        ]
        found["attention_us"] = sum(attention_us)
        found["attention_kernels"] = len(attention_us)
        found["share"] = sum(attention_us) / sum(us for _, us in kernels_us)
        found["kernels"] = len(kernels_us)
        found["longest"] = _longest(kernels_us)
    return found


def _longest(kernels_us: list[tuple[str, float]], count: int = 10) -> dict[str, float]:
    """The kernels that take most, by name, microseconds in all."""
    totals: dict[str, float] = {}
    for name, us in kernels_us:
        totals[name[:80]] = totals.get(name[:80], 0.0) + us
    return dict(sorted(totals.items(), key=lambda item: -item[1])[:count])


def _rngs() -> nnx.Rngs:
    return nnx.Rngs(0)


def _compile(f: Callable[..., Any], *arguments: jax.ShapeDtypeStruct) -> Any:
    return jax.jit(f).lower(*arguments).compile()


def _bytes(compiled: Any) -> int:
    cost = compiled.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    return int((cost or {}).get("bytes accessed", 0))


def _time(watch: Stopwatch, f: Callable[..., Any], sets: list[tuple]) -> dict[str, Any]:
    timing: Timing = watch.time(f, sets)
    return dataclasses.asdict(timing)
