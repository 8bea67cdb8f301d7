"""SwiGLU and GeGLU, of two arrays and of one, forward and backward: the MLPs of real models."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from benchmarks.case import Case
from pallas_kernels.measure import size_bytes
from pallas_kernels.swiglu import FEW, geglu, geglu_reference, swiglu, swiglu_reference

QWEN, LLAMA, PHI = 4864, 14336, 8192  # Qwen2.5-0.5B, Llama-3.1-8B, Phi-3-mini (one array)


def cases() -> list[Case]:
    """Training and prefill at 8192 tokens, decoding at 1 to 64; odd sizes are compiled only."""
    found = [_case(m, QWEN) for m in (8192, 64, 1)]
    found += [_case(m, LLAMA) for m in (8192, 64, 16, 1)]
    found += [_case(m, PHI, one=True) for m in (8192, 64, 1)]
    found += [_case(8192, f, backward=True) for f in (LLAMA, QWEN)]
    found += [_case(8192, PHI, one=True, backward=True), _case(8192, QWEN, one=True)]
    found += [_case(8192, 8192, "float32"), _case(8192, 8192, "float16")]
    for activation in ("tanh", "exact"):
        found += [_case(8192, LLAMA, activation=activation, backward=b) for b in (False, True)]
    found.append(_case(1, QWEN, activation="tanh"))
    for m, f, dtype in (
        (1, 96, "bfloat16"),
        (7, 1000, "float16"),
        (13, 4864, "float32"),
        (257, 520, "bfloat16"),
    ):
        for one in (False, True):
            for backward in (False, True):
                found.append(_case(m, f, dtype, one, backward, compile_only=True))
    return found


def _case(
    m: int,
    f: int,
    dtype: str = "bfloat16",
    one: bool = False,
    backward: bool = False,
    activation: str = "silu",
    compile_only: bool = False,
) -> Case:
    out = jax.ShapeDtypeStruct((m, f), dtype)
    arrays = (jax.ShapeDtypeStruct((m, 2 * f), dtype),) if one else (out, out)
    ways: list[Any] = [swiglu, swiglu_reference]
    if activation != "silu":
        approximate = activation == "tanh"
        ways = [functools.partial(way, approximate=approximate) for way in (geglu, geglu_reference)]
    if backward:
        ways = [functools.partial(_backward, way) for way in ways]
    run, plain = ways
    words = ["fused"] * one + ["exact"] * (activation == "exact") + ["backward"] * backward
    truth = functools.partial(_truth, activation, backward, one)
    return Case(
        op="swiglu" if activation == "silu" else "geglu",
        label=", ".join([f"{m} x {f} {dtype}", *words]),
        arguments=(*arrays, out) if backward else arrays,
        run=run,
        plain=plain,
        kind="launch" if f > 1024 and f % 1024 and m * f <= FEW else "memory",  # no whole tiles
        bytes=size_bytes(arrays, out, arrays if backward else ()),
        truth=truth if activation != "exact" else None,  # erf takes NumPy minutes
        compile_only=compile_only,
    )


def _backward(op: Any, *arguments: jax.Array) -> tuple[jax.Array, ...]:
    *arrays, d_out = arguments
    return jax.vjp(op, *arrays)[1](d_out)


def _truth(activation: str, backward: bool, one: bool, *arguments: np.ndarray) -> Any:
    import oracles  # type: ignore

    name = "silu" if activation == "silu" else "gelu_pytorch_tanh"
    gate, up = np.split(arguments[0], 2, axis=-1) if one else arguments[:2]
    if not backward:
        return oracles.glu(gate, up, activation=name)
    gradients = oracles.glu_gradient(gate, up, arguments[-1], activation=name)
    return (np.concatenate(gradients, axis=-1),) if one else gradients
