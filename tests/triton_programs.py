"""Kernels in official Triton without a GPU: what a call would launch, compiled or interpreted.

Only tests for which Triton is importable import this.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import oracles
import pytest
import triton
from absent_device import absent
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from pallas_kernels import _triton_call, _triton_kernels

TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bool": "i1"}
# One GPU of each kind that the kernels are for, and its SMs
GPUS = {
    "NVIDIA A100-SXM4-80GB": 108,
    "NVIDIA L40S": 142,
    "NVIDIA H200": 132,
    "NVIDIA GeForce RTX 5090": 170,
}


# Bytes of shared memory that a block may have
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One call of one kernel; types by the name of its arguments."""

    kernel: str
    types: dict[str, str]
    constants: dict[str, Any]
    programs: int
    warps: int
    capability: int


def launches(function: Callable, *arguments: Any, gpu: str = "NVIDIA H200") -> list[Launch]:
    """What a call of `function` launches on a GPU that is absent."""
    found = []

    def record(kernel, *values, out_type, programs, warps, device, **constants):
        names = getattr(_triton_kernels, kernel).arg_names
        types = ["i32" if isinstance(v, int) else f"*{TYPES[v.dtype.name]}" for v in values]
        types += [f"*{TYPES[out.dtype.name]}" for out in jax.tree.leaves(out_type)]
        types = dict(zip(names, types, strict=False))
        assert {*types, *constants} == {*names}, kernel
        capability = round(10 * device.capability)
        found.append(Launch(kernel, types, constants, programs, warps, capability))
        return jax.tree.map(lambda out: jax.numpy.zeros(out.shape, out.dtype), out_type)

    with pytest.MonkeyPatch.context() as patch, absent(gpu, GPUS[gpu]):
        patch.setattr(_triton_call, "call", record)
        jax.eval_shape(function, *arguments)
    return found


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What ptxas and the program in its assembly say of a launch."""

    ptx: str
    target: str
    registers: int
    spilled: int
    shared: int
    wide: int  # global accesses of 16 bytes
    narrow: int  # all other global accesses
    shuffles: int


@functools.lru_cache(maxsize=256)
def _compile(kernel, types, constants, warps, capability) -> Compiled:
    function = getattr(_triton_kernels, kernel)
    types, constants = dict(types), dict(constants)
    indices = {name: i for i, name in enumerate(function.arg_names)}
    source = ASTSource(
        function,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs={(indices[name],): value for name, value in constants.items()},
        attrs={(indices[n],): [["tt.divisibility", 16]] for n, t in types.items() if t[0] == "*"},
    )
    options = {"num_warps": warps, **_triton_call.BACKEND_OPTIONS}
    if _triton_call.is_old(_triton_call.load()):
        del options["ptx_version"]
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = result.asm["ptx"]
    target = re.search(r"\.target (\w+)", ptx)[1]
    log = subprocess.run(
        [get_ptxas(capability).path, f"-arch={target}", "-v", "-o", "/dev/null", "-"],
        input=ptx, capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    accesses = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)\s", ptx)
    assert result.metadata.shared <= SHARED_BYTES[capability], (kernel, result.metadata.shared)
    widths = [int(n or 1) * int(bits) // 8 for n, bits in accesses]
    return Compiled(
        ptx,
        target,
        int(re.search(r"Used (\d+) registers", log)[1]),
        sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        result.metadata.shared,
        sum(w >= 16 for w in widths),
        sum(w < 16 for w in widths),
        ptx.count("shfl.sync"),
    )


def compile_launch(launch: Launch) -> Compiled:
    return _compile(
        launch.kernel,
        tuple(launch.types.items()),
        tuple(launch.constants.items()),
        launch.warps,
        launch.capability,
    )


def calls_in_program(function: Callable, *arguments: Any) -> int:
    """How often the program that JAX hands to the compiler for an H200 calls a Triton kernel."""
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        pytest.skip("jax-triton lowers a call only where JAX's CUDA plugin is installed")
    with absent("NVIDIA H200"):
        program = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    return program.as_text().count("custom_call @triton_kernel_call")


def run_interpreted(op: str) -> None:
    """The tests of `triton_interpreted.py` for one op, in a process of their own."""
    if (version := importlib.metadata.version("triton")) < "3.7":
        pytest.skip(
            f"the interpreter of Triton {version} fails with NumPy 2.4; that of 3.9 does not"
        )
    file = Path(__file__).parent / "pallas_kernels/triton_interpreted.py"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", op],
        env=os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]


class _Storage:
    """A NumPy array as Triton's interpreter sees a tensor of torch."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, TYPES[array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "_Storage":
        return self

    cpu = untyped_storage

    def new_empty(self, *_: Any, **__: Any) -> "_Storage":
        return _Storage(self.array)

    def set_(self, *_: Any) -> None:
        pass

    storage_offset = size = stride = copy_ = set_


def interpret_call(kernel, *arguments, out_type, programs, warps, device, **constants):
    """`_triton_call.call` in Triton's interpreter, for TRITON_INTERPRET=1."""
    del warps, device
    arrays = [a for a in arguments if not isinstance(a, int)]

    def run(*arrays):
        arrays = iter(arrays)
        ins = [
            a if isinstance(a, int) else _Storage(np.array(next(arrays), order="C"))
            for a in arguments
        ]
        outs = [np.full(out.shape, 7, out.dtype) for out in jax.tree.leaves(out_type)]
        function = getattr(_triton_kernels, kernel)
        with np.errstate(all="ignore"):  # a GPU says nothing of inf - inf in what is not used
            function[(programs,)](*ins, *map(_Storage, outs), **constants)
        return jax.tree.unflatten(jax.tree.structure(out_type), outs)

    return jax.pure_callback(run, out_type, *arrays)


def rms_norm_truth(x, weight, residual, d_y, d_total, *, eps, zero_centered=False) -> Any:
    """In float64: the norm of x and its gradients; norm and sum with the residual, and theirs."""
    total = x.astype(np.float64) + residual.astype(np.float64)
    norm = functools.partial(oracles.rms_norm, eps=eps, zero_centered=zero_centered)
    gradients = functools.partial(norm, d_out=d_y.astype(np.float64))
    d_h, d_weight = gradients(total, weight)
    d_h = d_h + d_total.astype(np.float64)
    return (
        norm(x, weight),
        gradients(x, weight),
        (norm(total, weight), total),
        (d_h, d_weight, d_h),
    )


def scale_softmax_truth(x, d_y, scale, keep) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """In float64 over the last axis: softmax(scale * x) of what is kept; d_x and d_scale."""
    softmax = functools.partial(oracles.scale_softmax, x, scale=scale, mask=keep)
    return softmax(), *softmax(d_y=d_y)


def scale_softmax_plain(reference, x, d_y, scale, **kwargs) -> tuple[Any, Any, Any]:
    """The same by a reference, with gradients from the result as it is stored, as kernels do."""
    y = reference(x, scale=scale, **kwargs)
    y32, d32, x32 = (a.astype(np.float32) for a in (y, d_y, x))
    d_scores = y32 * (d32 - (y32 * d32).sum(axis=-1, keepdims=True))
    return y, (scale * d_scores).astype(x.dtype), (d_scores * x32).sum()
