"""Rivals that JAX can call, by op: XLA's own cuDNN norm, tokamax, jax-linear-attention.

A case's `plain` and its own rivals come on top; those of attention are in attention_rivals.py,
those of torch in torch_rivals.py. Each is asked for by importing it: what is absent is named with
its reason, in the results too.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax

from benchmarks.case import Case
from pallas_kernels.matmul import matmul_reference

# The distribution, and the module that must be importable.
LIBRARIES = {
    "tokamax": "tokamax",
    "jax-linear-attention": "jla",
    "jax-triton": "jax_triton",
    "torch": "torch",
    "triton": "triton",
    "liger-kernel": "liger_kernel",
    "gemlite": "gemlite",
    "transformers": "transformers",
    "peft": "peft",
}


@dataclasses.dataclass(frozen=True)
class Rival:
    """run: jitted and timed. prepare: the case's arguments -> run's, not timed (a saved forward).

    options: XLA's, for this compilation. must_have: what the compiled program has to hold, else the
    rival is not what its name says.
    """

    run: Callable[..., Any]
    prepare: Callable[..., tuple] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    must_have: str = ""


def available() -> dict[str, dict[str, str]]:
    """{"version"} or {"absent": the reason} of every library that a rival comes from."""
    found = {}
    for name, module in LIBRARIES.items():
        if importlib.util.find_spec(module) is None:
            found[name] = {"absent": "not installed"}
        else:
            found[name] = {"version": _version(name)}
    return found


def of(case: Case) -> dict[str, Rival]:
    """The JAX rivals of a case whose libraries are here."""
    from benchmarks import attention_rivals  # it imports this file

    rivals = {"xla": Rival(case.plain)}
    rivals |= {name: Rival(run) for name, run in case.rivals.items()}
    rivals |= attention_rivals.of(case)
    backward = is_backward(case)
    if "dense" in case.keywords:
        rest = {name: case.keywords[name] for name in ("epilogue", "out_dtype")}
        product = functools.partial(matmul_reference, transpose_b=True, **rest)
        rivals["dense"] = Rival(product, case.keywords["dense"])
    if case.op in ("rms_norm", "layer_norm"):
        rivals["xla cudnn norm"] = Rival(
            case.plain,
            options={"xla_gpu_enable_cudnn_layer_norm": True},
            must_have="__cudnn$norm",
        )
    for name, table in (("tokamax", _tokamax), ("jax-linear-attention", _jla)):
        if importlib.util.find_spec(LIBRARIES[name]) is None:
            continue
        try:
            forward = table(case)
        except Exception as error:  # what the library says is its row's result
            forward = Rival(functools.partial(fail, f"{type(error).__name__}: {error}"))
        if isinstance(forward, Rival):
            rivals[name] = forward
        elif forward is not None:
            rivals[name] = _backward(forward, case) if backward else Rival(forward)
    return rivals


def fail(message: str, *arguments: Any) -> Any:
    """A rival that says why it is none."""
    del arguments
    raise RuntimeError(message)


def is_backward(case: Case) -> bool:
    """Whether the case is a backward pass: its last arguments are cotangents."""
    return "backward" in case.name


def num_forward(case: Case) -> int:
    """How many of a backward case's arguments the forward pass takes."""
    label = case.label
    return {
        "rms_norm": 3 if "residual" in label else 2,
        "layer_norm": 3,
        "scale_softmax": 2 if "mask" in label else 1,
        "rope": 4,
        "embedding": 2,
        "matmul": 2,
        "flash_attention_backward": 4 if case.keywords.get("documents") else 3,
    }.get(case.op, 1 if "fused" in label else 2)


def _backward(forward: Callable[..., Any], case: Case) -> Rival:
    """The backward pass alone: the forward's residuals are arguments of the program."""
    n = num_forward(case)

    def prepare(*arguments):
        out, vjp = jax.vjp(forward, *arguments[:n])
        count = len(jax.tree.leaves(out))
        cotangents = jax.tree.unflatten(jax.tree.structure(out), arguments[-count:])
        return vjp, cotangents

    return Rival(lambda vjp, cotangents: vjp(cotangents), prepare)


def _tokamax(case: Case) -> Callable[..., Any] | Rival | None:
    """tokamax 0.0.17: its norms, and its gated unit for a matmul with SiLU."""
    if case.op == "matmul" and "silu" in case.label.lower() and not is_backward(case):
        stub_xprof()
        import tokamax  # type: ignore

        d = case.arguments[0].shape[-1]

        def prepare(x, weight, *_):
            weight = weight if weight.shape[0] == d else weight.T
            return x, weight.reshape(d, 2, -1)

        return Rival(lambda x, w: tokamax.gated_linear_unit(x, w, activation=jax.nn.silu), prepare)
    if case.op not in ("rms_norm", "layer_norm") or "residual" in case.label:
        return None
    stub_xprof()
    import tokamax  # type: ignore

    if case.op == "layer_norm":
        return lambda x, w, b: tokamax.layer_norm(x, w, b, epsilon=1e-5)
    return lambda x, w: tokamax.layer_norm(x, w, None, epsilon=1e-6, subtract_mean=False)


def _jla(case: Case) -> Callable[..., Any] | Rival | None:
    """jax-linear-attention 0.1.0: norm and SwiGLU, which XLA compiles; fused gate-up, and loss."""
    if case.op == "rms_norm" and "residual" not in case.label:
        from jla.layers.norm import rms_norm  # type: ignore

        return lambda x, w: rms_norm(x, w, 1e-6)
    if case.op == "swiglu" and len(case.arguments) == (2 if is_backward(case) else 1):
        from jla.layers.mlp import swiglu  # type: ignore

        return lambda x: swiglu(x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2))
    if case.op == "matmul" and "silu" in case.label.lower() and not is_backward(case):
        from jla.ops.mosaic_gpu import fused_gemm  # type: ignore

        x, weight = case.arguments[:2]
        d, f = x.shape[-1], max(weight.shape) // 2
        if fused_gemm.unsupported_reason(x.shape[0], d, f, x.dtype, check_devices=False):
            return None

        def prepare(x, weight, *_):
            weight = weight if weight.shape[0] == d else weight.T
            return x, fused_gemm.interleave(weight.reshape(d, 2, f))

        return Rival(lambda x, w: fused_gemm.swiglu_gate_up(x, w, save_gu=False), prepare)
    if case.op == "linear_cross_entropy":
        from jla.ops import cross_entropy  # type: ignore

        def total(hidden, head, targets):
            call = functools.partial(cross_entropy.linear_cross_entropy_objective, impl="auto")
            return call(hidden, head, targets).objective_sum

        return Rival(jax.value_and_grad(total, (0, 1)) if case.keywords["gradients"] else total)
    return None


def stub_xprof() -> None:
    """tokamax 0.0.17 imports xprof for a benchmark of its own; without it, an empty module does."""
    if importlib.util.find_spec("xprof") is not None:
        return
    path = ""
    for part in ("xprof", "cli", "tools", "get_kernel_stats_tool"):
        parent, path = path, f"{path}.{part}" if path else part
        module = sys.modules[path] = types.ModuleType(path)
        module.__spec__ = importlib.util.spec_from_loader(path, None)
        if parent:
            setattr(sys.modules[parent], part, module)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
