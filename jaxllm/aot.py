"""Compile any JAX function for a GPU that may be absent, and report what it became.

    program = aot.compile_for(f, jax.ShapeDtypeStruct((8192, 4096), "bfloat16"))
    program.peak_bytes, program.alias_bytes
    [launch.name for launch in program.launches]
    program.kernel("rms_norm").registers

It needs JAX's CUDA plugin and no GPU and no driver; `why_not` says what to install. It shows that a
program compiles and what it became, never that it is right or fast: nothing is autotuned without a
device, so the tiles of XLA's own matrix products here mean nothing.

Where the facts come from. XLA writes its sequence of thunks (what the GPU is told to do, in order)
and the PTX of its own kernels into the folder that `xla_dump_to` names, an option of the one
compilation. Mosaic takes no option: it writes a kernel's assembly code and what the assembler said
into the folder that the variable MOSAIC_GPU_DUMP_TO names, which jax 0.11 looks up anew whenever it
lowers or compiles a kernel (measured; the compiled program itself holds its code in no form that
can be read). So the variable is set while one compilation lasts and put back after it. It changes
what is written down, never what is compiled; and a kernel that has left no trace is an error here,
not a row that is missing. Calls from several threads wait for each other.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

_TARGETS = Path(__file__).parent / "targets"
_DUMP_VARIABLE = "MOSAIC_GPU_DUMP_TO"
_one_at_a_time = threading.Lock()
_calls = itertools.count()


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU to compile for: what JAX calls it, how many SMs it has, and XLA's description."""

    device_kind: str
    num_sms: int
    description: str

    @classmethod
    def named(cls, name: str) -> Target:
        """One of the descriptions that ship with the package, such as "h200"."""
        known = sorted(path.stem for path in _TARGETS.glob("*.txtpb"))
        if name not in known:
            raise ValueError(f"aot: no target is named {name!r}; there are {', '.join(known)}")
        text = (_TARGETS / f"{name}.txtpb").read_text()
        kind = re.search(r'device_description_str: "([^"]+)"', text)
        cores = re.search(r"core_count: (\d+)", text)
        assert kind, name
        assert cores, name
        return cls(kind[1], int(cores[1]), text)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel as machine code.

    source: "mosaic" or "xla" (XLA's own, its Triton kernels included). notes: what the assembler
    remarked, such as "C7512 Potential Performance Loss: ...". instructions: how many of each, with
    all modifiers: {"LDG.E.128": 4}. Shared memory is in bytes, the dynamic one None if not known.
    """

    name: str
    source: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int
    dynamic_shared_bytes: int | None
    notes: tuple[str, ...]
    instructions: Mapping[str, int]

    def count(self, opcode: str, *modifiers: str) -> int:
        """How many instructions have this opcode and all these modifiers: ("LDG", "128")."""
        total = 0
        for instruction, number in self.instructions.items():
            base, *rest = instruction.split(".")
            total += number * (base == opcode and set(modifiers) <= set(rest))
        return total


@dataclasses.dataclass(frozen=True)
class Launch:
    """One thing that the GPU is told to do, in the order in which it is told.

    kind: XLA's kind of thunk ("kCustomKernel", "kCopy", "kCuDnn", ...). name: of the kernel; for a
    Mosaic kernel the one it was given, for what is no kernel the HLO instruction's. opcode: of the
    HLO instruction. results: (dtype, shape) of what it writes.
    """

    kind: str
    name: str
    opcode: str
    results: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def is_mosaic(self) -> bool:
        return self.opcode.startswith("custom-call mosaic_gpu")


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program. Bytes are XLA's own plan, before anything is allocated.

    alias_bytes: of the outputs, what lies in donated arguments. peak_bytes: arguments and outputs
    included. kernels: each once, Mosaic's first, XLA's own if they were asked for. launches: the
    bodies of loops once. graphs: how many CUDA graphs XLA makes of them.
    """

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    alias_bytes: int
    peak_bytes: int
    kernels: tuple[Kernel, ...]
    launches: tuple[Launch, ...]
    graphs: int
    hlo: str = dataclasses.field(repr=False)
    compiled: Any = dataclasses.field(repr=False)

    def kernel(self, name: str) -> Kernel:
        """The first kernel of that name."""
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        raise KeyError(f"no kernel {name!r}; there are {[k.name for k in self.kernels]}")

    def mosaic_launches(self) -> list[str]:
        """The names of the Mosaic kernels, in order, as often as each is launched."""
        return [launch.name for launch in self.launches if launch.is_mosaic]


def why_not(*, code: bool = True) -> str | None:
    """What has to be installed before anything can be compiled for a GPU; None if nothing.

    code: whether the kernels' code is to be read too, which `peak_bytes` does not.
    """
    plugins = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    has_any = importlib.util.find_spec("jax_plugins") is not None
    if not has_any or not any(importlib.util.find_spec(name) for name in plugins):
        return (
            "JAX's CUDA plugin is not installed: pip install 'jax[cuda13]<0.12' (no GPU is needed)"
        )
    for tool in ("ptxas", "nvdisasm") if code else ("ptxas",):
        if _tool(tool) is None:
            wheel = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}[tool]
            return f"NVIDIA's {tool} is not installed: pip install {wheel}"
    return None


def compile_for(
    function: Callable[..., Any],
    *arguments: Any,
    target: str | Target = "h200",
    xla_kernels: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Program:
    """Compile `function(*arguments, **keywords)` for one `target` GPU.

    A function that is jitted already keeps its donations and static arguments. Arrays and
    ShapeDtypeStructs stand for their shape and dtype; whatever else is handed on as it is.
    xla_kernels: assemble XLA's own kernels too (about 0.1 s each; they are in `launches` anyway).
    Raises: ValueError for an unknown target, or without an array among the arguments that the
    program takes: they say where it runs, what the function closes over does not. RuntimeError if
    `why_not` has a reason, or if a kernel has left no code to look at.
    """
    if (reason := why_not()) is not None:
        raise RuntimeError(f"aot: cannot compile for a GPU: {reason}")
    with (
        _one_at_a_time,
        tempfile.TemporaryDirectory(prefix="jaxllm-aot-") as folder,
        _mosaic_writes_to(mosaic := Path(folder, "mosaic")),
    ):
        options = {"xla_dump_to": str(xla := Path(folder, "xla"))}
        if xla_kernels:
            # In XLA_FLAGS it makes compilations for the CPU crash; here it is for this one alone.
            options["xla_dump_emitter_re"] = ".*"
        options |= compiler_options or {}
        compiled = _compiled(function, target, arguments, keywords, compiler_options=options)
        return _read(compiled, xla, mosaic)


def peak_bytes(
    function: Callable[..., Any], *arguments: Any, target: str | Target = "h200", **keywords: Any
) -> int:
    """What `compile_for` has under this name; no kernel's code is written down or read for it.

    Raises: ValueError as that; RuntimeError if `why_not(code=False)` has a reason.
    """
    if (reason := why_not(code=False)) is not None:
        raise RuntimeError(f"aot: cannot compile for a GPU: {reason}")
    with _one_at_a_time:
        compiled = _compiled(function, target, arguments, keywords)
    return compiled.memory_analysis().peak_memory_in_bytes


def _compiled(
    function: Callable[..., Any], target: str | Target, arguments: Any, keywords: Any, **how: Any
) -> Any:
    if not isinstance(target, Target):
        target = Target.named(target)
    arguments, keywords = jax.tree.map(
        functools.partial(_placed, sharding=_sharding(target)), (arguments, keywords)
    )
    jitted: Any = function if hasattr(function, "lower") else jax.jit(function, keep_unused=True)
    device = AbstractDevice(
        device_kind=target.device_kind, num_cores=target.num_sms, platform="gpu"
    )
    # Ops and kernels ask the abstract mesh which device they will run on.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = jitted.lower(*arguments, **keywords)
    compiled = lowered.compile(**how)
    results = jax.tree.leaves(compiled.output_shardings)
    if any(device.platform == "cpu" for sharding in results for device in sharding.device_set):
        raise ValueError(
            "aot: the program takes no argument that is an array, which says for what to compile; "
            "give it one"
        )
    return compiled


def _placed(x: Any, sharding: NamedSharding) -> Any:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return x
    return jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=sharding, weak_type=getattr(x, "weak_type", False)
    )


def _sharding(target: Target) -> NamedSharding:
    # The axis has a new name each time, for otherwise a function that was compiled here before
    # comes from JAX's caches, and its Mosaic kernels leave no code.
    mesh = topologies.make_mesh(
        topo=_topology(target), mesh_shape=(1,), axis_names=(f"device{next(_calls)}",)
    )
    return NamedSharding(mesh, PartitionSpec())


@functools.lru_cache(maxsize=8)
def _topology(target: Target) -> Any:
    return topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=target.description
    )


@contextlib.contextmanager
def _mosaic_writes_to(folder: Path) -> Iterator[None]:
    folder.mkdir()
    before = os.environ.get(_DUMP_VARIABLE)
    os.environ[_DUMP_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_DUMP_VARIABLE]
        else:
            os.environ[_DUMP_VARIABLE] = before


# Reading what was written


def _read(compiled: Any, xla: Path, mosaic: Path) -> Program:
    hlo = compiled.as_text()
    dumped = sorted(path.stem for path in mosaic.glob("*.ptx") if _is_module(path))
    instructions = {name: _Instruction(line, dumped) for name, line in _definitions(hlo)}
    launches, shared = _launches(_only(xla, "thunk_sequence.txt"), xla, instructions)
    kernels = [_mosaic_kernel(mosaic / f"{name}.ptx") for name in dumped]
    ptx = [path for path in sorted(xla.glob("*.ptx")) if _is_module(path)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(_assemble, ptx):
            kernels += [
                dataclasses.replace(k, dynamic_shared_bytes=shared.get(k.name)) for k in found
            ]
    memory = compiled.memory_analysis()
    after = _only(xla, "thunk_sequence_after_thunk_passes.txt", missing="")
    return Program(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        kernels=tuple(kernels),
        launches=tuple(launches),
        graphs=len(re.findall(r"^\s*\d+: kCommandBuffer", after, re.M)),
        # Each Mosaic kernel lies in the text as a blob of 100 kB.
        hlo=re.sub(r', module = "(?:[^"\\]|\\.)*"', "", hlo),
        compiled=compiled,
    )


def _only(folder: Path, ending: str, missing: str | None = None) -> str:
    """The text of the one file with this ending."""
    found = [path for path in folder.iterdir() if path.name.endswith(f".{ending}")]
    if not found and missing is not None:
        return missing
    if len(found) != 1:
        raise RuntimeError(
            f"aot: XLA wrote {len(found)} files *.{ending}, not one: the program came from a "
            "compilation cache, or this jax writes them otherwise"
        )
    return found[0].read_text()


def _is_module(path: Path) -> bool:
    return ".version" in path.read_text()[:4096]  # jax 0.10 writes empty modules too


def _definitions(hlo: str) -> Iterator[tuple[str, str]]:
    for match in re.finditer(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*)$", hlo, re.M):
        yield match[1], match[2]


class _Instruction:
    """What a line of HLO says: `bf16[8,128]{1,0} fusion(...), kind=kLoop, ...`."""

    def __init__(self, line: str, dumped: list[str]):
        head = re.match(r"(\((?:[^()]|\([^()]*\))*\)|\S+) ([\w-]+)\(", line)
        self.result = head[1] if head else ""
        self.opcode = head[2] if head else ""
        self.kernel = None
        if target := re.search(r'custom_call_target="([^"]+)"', line):
            self.opcode += f" {target[1]}"
            if target[1].startswith("mosaic_gpu"):
                self.kernel = self._mosaic_name(line, dumped)

    @staticmethod
    def _mosaic_name(line: str, dumped: list[str]) -> str:
        # The kernel's module names the files that were written of it.
        found = [name for name in dumped if f"\\00{name}\\00" in line]
        if len(found) != 1:
            raise RuntimeError(
                f"aot: {len(found)} Mosaic kernels, not one, have left code for a call in the "
                f"program (written: {', '.join(dumped) or 'none'})"
            )
        return _without_number(found[0])

    def results(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple(
            (dtype, tuple(int(n) for n in shape.split(",") if n))
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", self.result)
        )


def _without_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _launches(
    sequence: str, xla: Path, instructions: Mapping[str, _Instruction]
) -> tuple[list[Launch], dict[str, int]]:
    """The launches in order, and the dynamic shared memory of XLA's own kernels by name."""
    annotations = {
        int(number): name
        for name, number in re.findall(
            r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)', _only(xla, "thunk_metadata.txt")
        )
    }
    launches, shared = [], {}
    for line in sequence.splitlines():
        thunk = re.match(r"\s*(\d+): (k\w+)\s*\[[^\]]*\]\s*(\S*)(.*)", line)
        if thunk is None or thunk[2] in ("kSequential", "kWhile", "kConditional"):
            continue
        number, kind, name, rest = thunk.groups()
        instruction = instructions.get(annotations.get(int(number), ""))
        if memory := re.search(r"shared_memory: (\d+) bytes", rest):
            shared[name] = int(memory[1])
        elif instruction is not None:
            name = instruction.kernel or annotations[int(number)]
        launches.append(
            Launch(
                kind,
                name,
                instruction.opcode if instruction else "",
                instruction.results() if instruction else (),
            )
        )
    return launches, shared


def _mosaic_kernel(ptx: Path) -> Kernel:
    """From what JAX's own compilation wrote beside the PTX; what it left out is made up for."""
    name = _without_number(ptx.stem)
    log, sass = ptx.with_suffix(".ptxas"), ptx.with_suffix(".sass_ctrl")
    if log.exists() and sass.exists() and "Used " in log.read_text():
        [kernel] = _kernels(log.read_text(), sass.read_text(), "mosaic")
    else:
        [kernel] = _assemble(ptx, "mosaic")
    resources = ptx.with_suffix(".resources.txt")
    dynamic = None
    if resources.exists() and (m := re.search(r"smem_scratch_bytes=(\d+)", resources.read_text())):
        dynamic = int(m[1])
    return dataclasses.replace(kernel, name=name, dynamic_shared_bytes=dynamic)


def _assemble(ptx: Path, source: str = "xla") -> list[Kernel]:
    """All kernels of a PTX file, by our own run of NVIDIA's assembler."""
    architecture = re.search(r"^\.target (\w+)", ptx.read_text(), re.M)
    assert architecture, ptx
    cubin = str(ptx.with_suffix(".cubin"))
    assembled = _run("ptxas", f"-arch={architecture[1]}", "-v", str(ptx), "-o", cubin)
    return _kernels(assembled, _run("nvdisasm", "-c", cubin), source)


def _kernels(log: str, sass: str, source: str) -> list[Kernel]:
    notes = tuple(f"{number} {text}" for number, text in re.findall(r"\((C7\d+)\) ([^\n]*)", log))
    bodies = {
        part.partition(",")[0].strip().strip('"'): part
        for part in re.split(r"\n\s*\.section\s+\.text\.", sass)[1:]
    }
    pattern = (
        r"Compiling entry function '([^']+)'(?:.|\n)*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads\n.*?Used (\d+) registers([^\n]*)"
    )
    kernels = []
    for name, stores, loads, registers, rest in re.findall(pattern, log):
        if name not in bodies:
            raise RuntimeError(f"aot: the disassembly holds no {name}, only {', '.join(bodies)}")
        static = re.search(r"(\d+) bytes smem", rest)
        counts = collections.Counter(
            re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)", bodies[name])
        )
        kernels.append(
            Kernel(
                name,
                source,
                int(registers),
                int(stores),
                int(loads),
                int(static[1]) if static else 0,
                None,
                notes,
                counts,
            )
        )
    return kernels


def _run(tool: str, *arguments: str) -> str:
    """What the tool said; ptxas says it on stderr."""
    path = _tool(tool)
    assert path is not None, tool  # why_not has asked
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"aot: {tool} failed on {arguments[-1]}: {done.stderr.strip()}")
    return done.stdout + done.stderr


def _tool(name: str) -> str | None:
    """Where one of NVIDIA's tools lies: in the wheels that the plugin wants, or on the PATH."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for place in ("cu13", "cuda_nvcc", "cuda_nvdisasm"):
            if os.access(path := f"{folder}/{place}/bin/{name}", os.X_OK):
                return path
    return shutil.which(name)
