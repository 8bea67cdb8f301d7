"""Every kernel of one step: its time, and the least that its bytes and operations can take.

The program is compiled without CUDA graphs, so that its kernels come in the order of XLA's
schedule, and each is paired with the instruction that launches it: that tells which weights it
reads. By the wall clock the step is timed as a user runs it, with graphs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxllm
from benchmarks.decoding import cache_bytes, random_model, step_bytes
from benchmarks.models import PHI_3_MINI, QWEN
from jaxllm import sampling
from jaxllm.config import ModelConfig
from jaxllm.run import SMALLEST_CHUNK
from pallas_kernels.measure import Stopwatch

MODELS = {"Qwen2.5-0.5B": QWEN, "Phi-3-mini": PHI_3_MINI}
PROMPT, HELD, CAPACITY = 10, 64, 128  # tokens read; held when one is decoded; room
AIMS_MS = {"Qwen2.5-0.5B, decode": 0.5, "Phi-3-mini, decode": 2.4}
WITHOUT_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
# What is no kernel, or a copy by the driver, which CUPTI counts as none
NO_KERNEL = (
    "parameter constant bitcast get-tuple-element tuple copy copy-start copy-done after-all"
).split()
MOSAIC = "_mosaic_gpu_kernel"  # how their names end

Work = Callable[[Stopwatch], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Launch:
    """An instruction that launches a kernel, or some.

    kind: "mosaic", "xla" (one kernel, under the name of some instruction) or "library" (one or
    more). weights: names of those it reads. bytes, operations: by model.
    """

    name: str
    kind: str
    weights: tuple[str, ...]
    bytes: int
    operations: int


def tasks(section: str) -> Iterator[tuple[str, Work]]:
    """(key, work): prefill and decode of each model."""
    for model, config in MODELS.items():
        for step in ("prefill", "decode"):
            yield f"{section}/{model}, {step}", functools.partial(measure, config, step)


def measure(config: ModelConfig, step: str, watch: Stopwatch) -> dict[str, Any]:
    """One row of a fused bfloat16 model: PROMPT tokens into an empty cache, or one behind HELD.

    Both end with the arg-max. bytes: every weight once, and the cache that is read.
    """
    model = random_model(config)
    weights = jaxllm.flatten(model)
    real, tokens = (PROMPT, SMALLEST_CHUNK) if step == "prefill" else (1, 1)
    before = 0 if step == "prefill" else HELD
    run = _Step(config, weights, real, tokens, before)
    program = run.compile(WITHOUT_GRAPHS)
    launches = launches_of(program.as_text(), config, names_of(model), real, before)
    found: dict[str, Any] = {
        "tokens": real,
        "bytes": step_bytes(model) + cache_bytes(config) * (before + real),
        "clock": "cupti" if watch.reason is None else f"host ({watch.reason})",
    }
    if watch.reason is None:
        kernels = watch.kernels(run, [(weights,)])
        found["us"] = sum(us for _, us in kernels)
        found["rows"] = rows(launches, kernels)
    else:
        found["rows"] = rows(launches)
    run.compile({})
    found["wall_us"] = watch.time(run, [(weights,)]).wall_us
    return found


def step_program(tokens: int) -> Any:
    """(weights, ids [1, tokens], counts [1], cache) -> the next token's id, and the cache."""

    def step(weights, ids, counts, cache):
        if tokens == 1:
            logits, cache = jaxllm.decode_step(weights, ids[:, 0], cache)
        else:
            logits, cache = jaxllm.prefill(weights, ids, counts, cache)
        return sampling.greedy(logits), cache

    return jax.jit(step, donate_argnums=3, keep_unused=True)


class _Step:
    """The program with its cache, which is donated, and as full before each call."""

    def __init__(self, config: ModelConfig, weights: Any, real: int, tokens: int, before: int):
        cache = jaxllm.KVCache.create(config, batch=1, capacity=CAPACITY, dtype=jnp.bfloat16)
        keys = iter(jax.random.split(jax.random.key(1), 2 * config.num_hidden_layers + 1))
        self.cache = jax.tree.map(
            lambda x: jax.random.normal(next(keys), x.shape, x.dtype) if x.ndim > 1 else x, cache
        )
        ids = jax.random.randint(next(keys), (1, tokens), 0, config.vocab_size, jnp.int32)
        self.ids, self.counts = ids, jnp.full((1,), real, jnp.int32)
        self.weights, self.before = weights, np.full((1,), before, np.int32)
        self.jitted, self.program = step_program(tokens), None

    def compile(self, options: Mapping[str, Any]) -> Any:
        """From now on this is what is called."""
        arguments = (self.weights, self.ids, self.counts, self.cache)
        program = self.jitted.lower(*arguments).compile(compiler_options=dict(options))
        self.program = program
        return program

    def __call__(self, weights: Any) -> jax.Array:
        # Copied from the host, which launches no kernel
        cache = dataclasses.replace(self.cache, lengths=jax.device_put(self.before))
        assert self.program is not None
        out, self.cache = self.program(weights, self.ids, self.counts, cache)
        return out


def names_of(model: nnx.Module) -> list[str]:
    """The parameters' names without the layer's number, in the order that `flatten` has them."""
    leaves = jax.tree.flatten_with_path(nnx.split(model)[1])[0]
    paths = [
        ".".join(str(getattr(k, "key", "")) for k in path if hasattr(k, "key"))
        for path, _ in leaves
    ]
    return [re.sub(r"^layers\.\d+\.", "", path) for path in paths]


def launches_of(
    hlo: str, config: ModelConfig, names: Sequence[str], tokens: int, before: int
) -> list[Launch]:
    """What a compiled step launches, in order: `tokens` more where the cache holds `before`.

    By model: inputs are read and results are written once; of the token table the tokens' rows,
    unless all logits come of it; of the cache what it holds, by what reads it, and the new tokens,
    by what writes it.
    """
    table: dict[str, _Instruction] = {}
    found = []
    for instruction in _instructions(hlo):
        table[instruction.name] = instruction
        if instruction.opcode not in NO_KERNEL:
            operands = [table[name] for name in dict.fromkeys(instruction.operands)]
            found.append(
                _launch(instruction, operands, table, config, names, tokens, before + tokens)
            )
    return found


def _launch(
    instruction: _Instruction,
    operands: Sequence[_Instruction],
    table: Mapping[str, _Instruction],
    config: ModelConfig,
    names: Sequence[str],
    tokens: int,
    held: int,
) -> Launch:
    cache = config.num_key_value_heads * config.head_dim  # numbers of a token
    windows = (config.window(i) or CAPACITY for i in range(config.num_hidden_layers))
    caches = {cache * min(CAPACITY, window) for window in windows}
    vocabulary = config.vocab_size * config.hidden_size
    writes = any(a.numbers in caches for a in instruction.arrays)
    makes_logits = any(config.vocab_size in a.shape for a in instruction.arrays)
    total, operations, read = 0, 0, []
    for operand in operands:
        source = _source(operand, table)
        for array in operand.arrays:
            numbers = array.numbers
            if numbers in caches:
                numbers = 0 if writes else cache * held
            elif numbers == vocabulary and not makes_logits:
                numbers = tokens * config.hidden_size
            total += numbers * array.itemsize
        if source.parameter is not None and source.parameter < len(names):
            read.append(names[source.parameter])
            [array] = source.arrays
            if len(array.shape) > 1 and (array.numbers != vocabulary or makes_logits):
                operations += 2 * (1 if makes_logits else tokens) * array.numbers
    kind = "xla"
    if instruction.opcode == "custom-call":
        kind = "mosaic" if "mosaic" in instruction.target else "library"
    for array in instruction.arrays:
        if kind == "library" and array.dtype == "s8" and len(array.shape) == 1:
            continue  # room that it works in
        numbers = cache * tokens if array.numbers in caches else array.numbers
        total += numbers * array.itemsize
    name = re.sub(r"[.-]", "_", instruction.name)
    return Launch(name, kind, tuple(sorted(set(read))), total, operations)


def _source(instruction: _Instruction, table: Mapping[str, _Instruction]) -> _Instruction:
    """What the instruction's array is one with: behind copies, and a tuple (of a barrier, say)."""
    while instruction.operands:
        first = table[instruction.operands[0]]
        if instruction.opcode == "get-tuple-element" and first.opcode == "tuple":
            assert instruction.index is not None
            first = table[first.operands[instruction.index]]
        elif instruction.opcode not in ("bitcast", "copy"):
            break
        instruction = first
    return instruction


@dataclasses.dataclass(frozen=True)
class _Array:
    dtype: str
    shape: tuple[int, ...]

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        bits = re.search(r"\d+", self.dtype)  # bf16, f8e4m3fn; pred has none
        return max(1, int(bits[0]) // 8) if bits else 1


@dataclasses.dataclass(frozen=True)
class _Instruction:
    """A line of the entry computation. parameter: its number; target: of a custom call; index: of
    an element of a tuple.
    """

    name: str
    opcode: str
    arrays: tuple[_Array, ...]
    operands: tuple[str, ...]
    parameter: int | None
    target: str
    index: int | None = None


def _instructions(hlo: str) -> Iterator[_Instruction]:
    """Of the entry computation, in the order in which they run."""
    entry = re.search(r"^ENTRY [^\n]*\{\n(.*?)^\}", hlo, re.M | re.S)
    assert entry, hlo[:200]
    pattern = r"^\s*(?:ROOT )?%([\w.-]+) = (\((?:[^()]|\([^()]*\))*\)|\S+) ([\w-]+)\(([^)]*)\)(.*)$"
    for name, result, opcode, inside, rest in re.findall(pattern, entry[1], re.M):
        target = re.search(r'custom_call_target="([^"]+)"', rest)
        yield _Instruction(
            name,
            opcode,
            tuple(
                _Array(dtype, tuple(int(n) for n in sizes.split(",") if n))
                for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", result)
            ),
            tuple(re.findall(r"%([\w.-]+)", inside)),
            int(inside) if opcode == "parameter" else None,
            target[1] if target else "",
            int(index[1]) if (index := re.match(r", index=(\d+)", rest)) else None,
        )


def rows(
    launches: Sequence[Launch], kernels: Sequence[tuple[str, float]] | None = None
) -> list[dict[str, Any]]:
    """The table: kernels of one name that read weights of one name are one row, longest first.

    kernels: (name, us) in order; None where nothing sees them: then by the instructions' names.
    Without bytes and operations, and the weights that are read, where they cannot be paired.
    """
    if kernels is None:
        pairs = [(launch.name, None, launch) for launch in launches]
    else:
        pairs = pair(launches, kernels)
    table: dict[tuple[str, tuple[str, ...] | None], dict[str, Any]] = {}
    for name, us, launch in pairs:
        name = re.sub(r"(\.\d+|_\d+)+$", "", name.removesuffix(MOSAIC))[:60]
        weights = None if launch is None else launch.weights
        row = table.setdefault(
            (name, weights),
            {"kernel": name, "weights": weights, "launches": 0, "us": None},
        )
        row["launches"] += 1
        if us is not None:
            row["us"] = (row["us"] or 0.0) + us
        if launch is not None:
            row["bytes"] = row.get("bytes", 0) + launch.bytes
            row["operations"] = row.get("operations", 0) + launch.operations
    return sorted(table.values(), key=lambda row: -(row["us"] or 0.0))


def pair(
    launches: Sequence[Launch], kernels: Sequence[tuple[str, float]]
) -> list[tuple[str, float, Launch | None]]:
    """Each kernel, in order, with the launch that it belongs to.

    Runs of one kind stand for each other. A library may launch several kernels a call, as many for
    each call of a run; the bytes of a call are its first kernel's. The driver's copies belong to no
    launch; where the others do not agree, neither does any other kernel.
    """
    own = {launch.name for launch in launches if launch.kind == "xla"}

    def kind(name: str) -> str:
        return "mosaic" if name.endswith(MOSAIC) else "xla" if name in own else "library"

    nothing: list[tuple[str, float, Launch | None]] = [(name, us, None) for name, us in kernels]
    copies = [i for i, (name, _) in enumerate(kernels) if re.match("mem(cpy|set)", name, re.I)]
    launched = [kernel for i, kernel in enumerate(kernels) if i not in copies]
    wanted = [(k, list(run)) for k, run in itertools.groupby(launches, lambda x: x.kind)]
    seen = [(k, list(run)) for k, run in itertools.groupby(launched, lambda x: kind(x[0]))]
    if [k for k, _ in wanted] != [k for k, _ in seen]:
        return nothing
    pairs: list[tuple[str, float, Launch | None]] = []
    for (k, calls), (_, run) in zip(wanted, seen, strict=True):
        each, rest = divmod(len(run), len(calls))
        if rest or (each != 1 and k != "library"):
            return nothing
        for i, (name, us) in enumerate(run):
            call = calls[i // each]
            pairs.append((name, us, call if i % each == 0 else _rest_of(call)))
    for i in copies:
        pairs.insert(i, nothing[i])
    return pairs


def _rest_of(call: Launch) -> Launch:
    return dataclasses.replace(call, bytes=0, operations=0)


def floor_us(row: Mapping[str, Any], ceilings: Mapping[str, Any]) -> float | None:
    """What the bytes at the read rate take, or the operations at the matmul rate, if more."""
    if "bytes" not in row or not {"read", "matmul"} <= ceilings.keys():
        return None
    operations = row.get("operations", 0) / ceilings["matmul"]
    return 1e6 * max(row["bytes"] / ceilings["read"], operations)


def lines(
    found: dict[str, dict[str, Any]], ceilings: Mapping[str, Any], why: Callable[[Any], str]
) -> Iterator[str]:
    """The results of this section as Markdown."""
    for name, result in found.items():
        if "rows" not in result:
            yield f"Kernels of one step, {name}: {why(result)}"
            yield ""
            continue
        tokens, aim = result["tokens"], AIMS_MS.get(name)
        yield (
            f"Kernels of one step, {name} of {tokens} token{'s' if tokens > 1 else ''}, one row, "
            "fused, bfloat16, arg-max included. Floor: bytes by model at the read rate of the run, "
            "or operations at its matmul rate:"
        )
        yield ""
        yield "| kernel | reads | launches | us | floor, us | floor of time |"
        yield "|---|---|--:|--:|--:|--:|"
        for row in result["rows"]:
            weights = "?" if row["weights"] is None else ", ".join(row["weights"])
            yield _line(row["kernel"], weights, row["launches"], row, ceilings)
        launches = sum(row["launches"] for row in result["rows"])
        yield _line("all", "every weight once, and the cache", launches, result, ceilings)
        yield ""
        yield (
            f"By the wall clock, with CUDA graphs, a step after the other: "
            f"{result['wall_us'] / 1e3:.3f} ms{'' if aim is None else f' (aim: {aim} ms)'}."
        )
        yield ""


def _line(
    kernel: str, reads: str, launches: int, row: Mapping[str, Any], ceilings: Mapping[str, Any]
) -> str:
    us, floor = row.get("us"), floor_us(row, ceilings)
    share = "" if floor is None or not us else f"{100 * floor / us:.0f} %"
    cells = ("" if x is None else f"{x:.2f}" for x in (us, floor))
    return f"| {kernel} | {reads} | {launches} | {' | '.join(cells)} | {share} |"
