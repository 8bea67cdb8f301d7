"""Prefill, decode and a training step of small models, compiled whole, and what they may cost.

The models have the widths of real ones and four layers. How many kernels a layer costs is the
difference to the same program with two layers, halved.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxllm
from benchmarks.models import GEMMA3_1B, LLAMA, LLAMA_8B, QWEN, QWEN3, kernels
from jaxllm import aot, ops, train
from jaxllm.config import ModelConfig, Runtime
from pallas_kernels.measure import size_bytes

LAYERS = 4
PROMPT, CAPACITY = 512, 1024  # tokens of the prefill, room in the cache
LONG_PROMPT = 8192  # of the model of 8B, whose cache has room for no more
BATCH = 4  # rows of PROMPT tokens in a training step

_QWEN, _QWEN3, _LLAMA, _LLAMA_8B = (
    dataclasses.replace(model, num_hidden_layers=LAYERS, layer_types=())
    for model in (QWEN, QWEN3, LLAMA, LLAMA_8B)
)
_GEMMA3 = dataclasses.replace(  # both kinds among the first ones too
    GEMMA3_1B,
    num_hidden_layers=LAYERS,
    layer_types=("sliding_attention", "full_attention") * (LAYERS // 2),
)
MODELS = {
    "Qwen2.5-0.5B float32": (_QWEN, "float32"),
    "Qwen2.5-0.5B bfloat16": (_QWEN, "bfloat16"),
    "Qwen3-0.6B bfloat16": (_QWEN3, "bfloat16"),
    "Gemma-3-1B bfloat16": (_GEMMA3, "bfloat16"),
    "Llama-3.2-1B bfloat16": (_LLAMA, "bfloat16"),
    "Llama-3.1-8B bfloat16": (_LLAMA_8B, "bfloat16"),
}


@dataclasses.dataclass(frozen=True)
class Limit:
    """What a program may cost at most: what it cost when the limits were written last.

    kernels_a_layer: launches; peak_mib: with arguments and outputs, rounded up; weight_copies: of
    whole matrices. XLA copies some in a training step, where it writes the new parameter over the
    donated old one before the old one is read for the last time. compiled: Mosaic kernels; layers
    share one if what launches it is jitted, and each call compiles its own if not.
    """

    kernels_a_layer: float
    peak_mib: int
    weight_copies: int
    compiled: int


_8B = "Llama-3.1-8B bfloat16"

# (model, program, implementation). "xla" is what our kernels are measured against: XLA for all ops
# but attention.
KEYS = (
    *(
        ("Qwen2.5-0.5B bfloat16", program, implementation)
        for program in ("training", "prefill", "decode")
        for implementation in ("xla", "auto", "pallas")
        if (program, implementation) != ("training", "xla")  # the slowest to compile
    ),
    *(
        ("Llama-3.2-1B bfloat16", program, implementation)
        for program in ("prefill", "decode")
        for implementation in ("auto", "pallas")
    ),
    ("Qwen2.5-0.5B float32", "decode", "auto"),
    *(
        (model, "fused decode", name)
        for model in ("Qwen2.5-0.5B bfloat16", _8B)
        for name in ("one launch", "gemv")
    ),
    *(("Qwen2.5-0.5B bfloat16", "fused decode", name) for name in ("all layers", "xla")),
    ("Qwen3-0.6B bfloat16", "fused decode", "all layers"),
    *((f"{name} bfloat16", "fused decode", "one launch") for name in ("Qwen3-0.6B", "Gemma-3-1B")),
    *((_8B, "int4 decode", name) for name in ("one launch", "packed")),
    *((_8B, "long prefill", name) for name in ("cudnn", "pallas attention")),
)
_LIMITS_FILE = Path(__file__).parent / "program_limits.json"


@dataclasses.dataclass(frozen=True)
class Facts:
    """What one whole program became.

    kernels_a_layer: for training all launches divided by the layers. mosaic: names of our kernels,
    in order, as often as they are launched; compiled: how many were compiled for that.
    """

    kept_bytes: int
    alias_bytes: int
    temporary_bytes: int
    peak_bytes: int
    kernels_a_layer: float
    graphs: int
    weight_copies: tuple[str, ...]
    mosaic: tuple[str, ...]
    compiled: int

    def limit(self) -> Limit:
        """The tightest that these facts keep."""
        peak_mib = -(-self.peak_bytes // 2**20)
        return Limit(self.kernels_a_layer, peak_mib, len(self.weight_copies), self.compiled)


def _structs(
    model: ModelConfig,
    dtype: str,
    implementation: Any,
    *,
    fused: bool = False,
    scheme: str | None = None,
) -> Any:
    runtime = Runtime(dtype=dtype, param_dtype=dtype, implementation=implementation)

    def build() -> jaxllm.Transformer:
        made = jaxllm.Transformer(model, runtime, rngs=nnx.Rngs(0))
        if scheme is not None:
            jaxllm.quantize(made, scheme)
        if fused:
            jaxllm.fuse(made)
        return made

    return nnx.eval_shape(build)


def _serving(
    model: ModelConfig,
    dtype: str,
    implementation: Any,
    capacity: int = CAPACITY,
    **kind: Any,
) -> tuple[Any, Any]:
    weights = jaxllm.flatten(_structs(model, dtype, implementation, **kind))
    cache = jax.eval_shape(
        lambda: jaxllm.KVCache.create(model, batch=1, capacity=capacity, dtype=jnp.dtype(dtype))
    )
    return weights, cache


def _ids(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


# Each returns the function, its arguments, and those that it is given to keep


def _prefill(*model: Any) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    weights, cache = _serving(*model)
    return jaxllm.prefill, (weights, _ids(1, PROMPT), _ids(1), cache), cache


def _long_prefill(*model: Any) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    weights, cache = _serving(*model, capacity=LONG_PROMPT)
    return jaxllm.prefill, (weights, _ids(1, LONG_PROMPT), _ids(1), cache), cache


def _decode(*model: Any) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    weights, cache = _serving(*model)
    return jaxllm.decode_step, (weights, _ids(1), cache), cache


def _fused_decode(
    *model: Any, scheme: str | None = None
) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    weights, cache = _serving(*model, fused=True, scheme=scheme)
    return jaxllm.decode_step, (weights, _ids(1), cache), cache


def _train(*model: Any) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    module = _structs(*model)
    optimizer = optax.adamw(1e-3)
    state = train.init_state(module, optimizer)
    batch = {"tokens": _ids(BATCH, PROMPT), "targets": _ids(BATCH, PROMPT)}
    return train.make_train_step(module, optimizer), (state, batch), state


PROGRAMS = {
    "prefill": _prefill,
    "long prefill": _long_prefill,
    "decode": _decode,
    "fused decode": _fused_decode,
    "int4 decode": functools.partial(_fused_decode, scheme="int4"),
    "training": _train,
}


def compile_program(model: str, program: str, implementation: str) -> Facts:
    """Compile one of PROGRAMS for one of MODELS, to be served with four layers and with two."""
    config, dtype = MODELS[model]
    chosen = CHOICES.get(implementation, implementation)
    function, arguments, kept = PROGRAMS[program](config, dtype, chosen)
    whole = aot.compile_for(function, *arguments)
    launches, layers = len(whole.launches), LAYERS
    if program != "training":
        layers = LAYERS // 2
        kinds = config.layer_types[:layers]
        short = dataclasses.replace(config, num_hidden_layers=layers, layer_types=kinds)
        function, fewer_arguments, _ = PROGRAMS[program](short, dtype, chosen)
        launches -= len(aot.compile_for(function, *fewer_arguments).launches)
    return Facts(
        kept_bytes=size_bytes(kept),
        alias_bytes=whole.alias_bytes,
        temporary_bytes=whole.temporary_bytes,
        peak_bytes=whole.peak_bytes,
        kernels_a_layer=launches / layers,
        graphs=whole.graphs,
        weight_copies=weight_copies(whole, arguments[0]),
        mosaic=tuple(whole.mosaic_launches()),
        compiled=sum(kernel.source == "mosaic" for kernel in whole.kernels),
    )


def limits() -> dict[tuple[str, ...], Limit]:
    """The limits of KEYS, as they are committed."""
    if not _LIMITS_FILE.exists():
        return {}
    rows = json.loads(_LIMITS_FILE.read_text())
    return {tuple(key.split(", ")): Limit(**row) for key, row in rows.items()}


def write_limits(limits: Mapping[tuple[str, ...], Limit]) -> None:
    """Puts these in the place of all that are committed."""
    rows = {", ".join(key): dataclasses.asdict(each) for key, each in limits.items()}
    _LIMITS_FILE.write_text(json.dumps(rows, indent=1) + "\n")


def faults(facts: Facts, limit: Limit) -> list[str]:
    """What is wrong with a whole program, a phrase each."""
    found = []
    if facts.alias_bytes < facts.kept_bytes:
        found.append(f"of {facts.kept_bytes} donated bytes {facts.alias_bytes} are aliased")
    now = facts.limit()
    if now.kernels_a_layer > limit.kernels_a_layer:
        found.append(f"{now.kernels_a_layer:g} kernels a layer, not {limit.kernels_a_layer:g}")
    if now.peak_mib > limit.peak_mib:
        found.append(f"peak of {now.peak_mib} MiB, not {limit.peak_mib}")
    if now.compiled > limit.compiled:
        found.append(f"{now.compiled} kernels compiled, not {limit.compiled}")
    if now.weight_copies > limit.weight_copies:
        found.append(
            f"copies weights: {', '.join(facts.weight_copies)}, not {limit.weight_copies} of them"
        )
    return found


XLA = {op: "xla" for op in ops.OPS if op != "attention"}
# Who names these is told what keeps a model from them, as that it is not fused
FUSED_OPS = ("fused_linear", "between_attentions", "decode_layers")
PALLAS = {op: name for op, name in kernels().items() if op not in FUSED_OPS}
# What `Runtime` takes for those implementations whose name it does not
CHOICES: dict[str, Any] = {
    "xla": XLA,
    "pallas": PALLAS,
    "cudnn": {"attention": "cudnn"},
    "pallas attention": {"attention": "pallas"},
    "one launch": {"between_attentions": "pallas"},
    "all layers": {"decode_layers": "pallas"},
    "gemv": {"fused_linear": "pallas", "between_attentions": "xla"},
    "packed": {"fused_linear": "pallas", "between_attentions": "xla"},
}
# The ops whose kernels such an implementation names
CHOSEN = {
    "pallas": list(PALLAS),
    "pallas attention": ["attention"],
    "one launch": ["attention", "between_attentions"],
    "all layers": ["decode_layers"],
    "gemv": ["attention", "fused_linear"],
    "packed": ["attention", "packed weights"],
}

# What the kernels of an op are called, and how often at least a Llama of LAYERS layers has them
KERNEL_OF = {
    "embedding": ("embedding", 1),
    "rms_norm": ("rms_norm", 2 * LAYERS + 1),
    "linear": ("matmul", 4 * LAYERS),
    "rope": ("rope", LAYERS),
    "glu": ("swiglu", LAYERS),
    "fused_linear": ("gemv", 4 * LAYERS),
    "between_attentions": ("between_attentions", LAYERS),
    "decode_layers": ("decode_layers", 1),
    "packed weights": ("quantized_matmul", 4 * LAYERS),
}

# Attention's kernel by program, and how often a layer launches it: decoding may combine its parts
ATTENTION_OF = {
    "prefill": ("flash_attention", 1, 1),
    "long prefill": ("flash_attention", 1, 1),
    "decode": ("decode_attention", 1, 2),
    "fused decode": ("decode_attention", 1, 2),
    "int4 decode": ("decode_attention", 1, 2),
    "training": ("flash_attention", 1, 1),
}


def missing_kernels(launched: Sequence[str], chosen: Iterable[str], program: str) -> list[str]:
    """Which kernels of the ops `chosen` a program ought to launch and does not, or launches more
    often than it ought, a phrase each.
    """
    found, training = [], program == "training"
    if "attention" in chosen:
        name, least, most = ATTENTION_OF[program]
        number = sum(k.startswith(name) and "backward" not in k for k in launched)
        if not least * LAYERS <= number <= most * LAYERS:
            wanted = " to ".join(str(n * LAYERS) for n in dict.fromkeys((least, most)))
            found.append(f"{number} launches of {name}, not {wanted}")
        if training and not any(k.startswith(f"{name}_backward") for k in launched):
            found.append(f"no backward kernel of {name}")
    for name, times in (KERNEL_OF[op] for op in chosen if op in KERNEL_OF):
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
