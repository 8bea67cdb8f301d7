"""Ternary matmul: the projections of BitNet b1.58 and of Llama-3.1-8B's shape when decoding.

A label is M x N x K: rows of int8, and a weight [N, K] of two bits a number. `ternary_linear` takes
rows of bfloat16, with a norm before the product and a gate or a residual behind it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from benchmarks.case import Case
from pallas_kernels.device import Device
from pallas_kernels.measure import size_bytes
from pallas_kernels.ternary_matmul import (
    Config,
    candidates,
    random_arguments,
    shapes_of,
    ternary_linear,
    ternary_linear_reference,
    ternary_matmul,
    ternary_matmul_reference,
)

H200 = Device("gpu", "NVIDIA H200", 9.0, 132)
# The shapes that BitNet's own kernels are timed at (github.com/microsoft/BitNet, gpu/README.md): of
# its 2B model, and of one of 3B
BITNET = ((2560, 2560), (3840, 2560), (13824, 2560), (2560, 6912))
BITNET += ((3200, 3200), (4800, 3200), (3200, 10240), (20480, 3200))
LLAMA = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
ROWS = (1, 8, 16, 64)
# A layer's four products of one token, with what stands around them
LAYERS = {
    (3840, 2560): "norm",
    (2560, 2560): "norm, residual",
    (13824, 2560): "norm, relu2_glu",
    (2560, 6912): "norm, residual",
    (6144, 4096): "norm",
    (4096, 4096): "residual",
    (28672, 4096): "norm, swiglu",
    (4096, 14336): "residual",
}
EPS = 1e-5


def cases() -> list[Case]:
    """Few rows of both; odd ones, and every tile that tune tries, are compiled only."""
    found = [_linear_case(1, *sizes, words) for sizes, words in LAYERS.items()]
    found += [_case(m, n, k) for n, k in BITNET + LLAMA for m in ROWS]
    only: dict[str, Any] = {"compile_only": True}
    for m in (2, 7, 33):
        found += [_case(m, n, k, **only) for n, k in ((48, 64), (896, 4864), (3200, 3200))]
    found += [_case(m, 896, 4864, words="bias, residual", **only) for m in (1, 33)]
    found += [_case(3, 896, 4864, out="float32", **only)]
    for m, dtype in ((2, "bfloat16"), (4, "float16")):
        for words in ("", "norm, swiglu, residual", "norm, residual"):
            found.append(_linear_case(m, 896, 4864, words, dtype, **only))
    found += [_linear_case(2, 896, 4864, "relu2_glu", **only)]  # whose squares float16 has not
    for m in (1, 16):
        shapes = shapes_of(m, 13824, 2560)
        for config in candidates(*shapes, device=H200):
            found.append(_case(m, 13824, 2560, config=config, **only))
    return found


def _case(
    m: int,
    n: int,
    k: int,
    *,
    words: str = "",
    out: str = "bfloat16",
    config: Config | None = None,
    compile_only: bool = False,
) -> Case:
    shapes = shapes_of(m, n, k)
    rest = []
    for name, shape in (("bias", (n,)), ("residual", (m, n))):
        if name in words:
            rest.append(jax.ShapeDtypeStruct(shape, out))
    names = tuple(name for name in ("bias", "residual") if name in words)
    arguments, tree = jax.tree.flatten(shapes)
    call = functools.partial(_call, tree, names, out)
    label = [f"{m} x {n} x {k}", *([words] if words else [])]
    label += [f"{out} result"] if out != "bfloat16" else []
    if config is not None:
        label.append(str(config).removeprefix("Config"))
    return Case(
        op="ternary_matmul",
        label=", ".join(label),
        arguments=(*arguments, *rest),
        run=functools.partial(call, functools.partial(ternary_matmul, config=config)),
        plain=functools.partial(call, ternary_matmul_reference),
        kind="memory-read",
        bytes=size_bytes(shapes, rest, jax.ShapeDtypeStruct((m, n), out)),
        operations=2 * m * n * k,
        ceiling="read",
        make=functools.partial(_make, shapes, tuple(rest)),
        truth=functools.partial(_truth, names),
        compile_only=compile_only,
    )


def _linear_case(
    m: int, n: int, k: int, words: str, dtype: str = "bfloat16", *, compile_only: bool = False
) -> Case:
    _, _, packed = shapes_of(m, n, k)
    epilogue = next((name for name in ("swiglu", "relu2_glu") if name in words), None)
    result = jax.ShapeDtypeStruct((m, n if epilogue is None else n // 2), dtype)
    rest = {"norm": jax.ShapeDtypeStruct((k,), dtype)} if "norm" in words else {}
    if "residual" in words:
        rest["residual"] = result
    shapes = jax.ShapeDtypeStruct((m, k), dtype), packed, rest
    arguments, tree = jax.tree.flatten(shapes)
    call = functools.partial(_linear_call, tree, epilogue)
    return Case(
        op="ternary_linear",
        label=", ".join([f"{m} x {n} x {k} {dtype}", *([words] if words else [])]),
        arguments=tuple(arguments),
        run=functools.partial(call, ternary_linear),
        plain=functools.partial(call, ternary_linear_reference),
        kind="memory-read",
        bytes=size_bytes(shapes, result),
        operations=2 * m * n * k,
        ceiling="read",
        make=functools.partial(_make_linear, m, shapes),
        truth=functools.partial(_linear_truth, tree, epilogue),
        compile_only=compile_only,
    )


def _linear_call(tree: Any, epilogue: str | None, f: Any, *arguments: Any) -> Any:
    x, packed, rest = jax.tree.unflatten(tree, arguments)
    return f(x, packed, **rest, eps=EPS, epilogue=epilogue)


def _make_linear(m: int, shapes: Any, key: jax.Array) -> tuple[jax.Array, ...]:
    x, packed, rest = shapes
    keys = iter(jax.random.split(key, 4))
    weight = jax.jit(functools.partial(random_arguments, shapes_of(m, *packed.shape)))(key)[2]
    floats = [jax.random.normal(next(keys), a.shape, a.dtype) for a in (x, *rest.values())]
    made = floats[0], weight, dict(zip(rest, floats[1:], strict=True))
    return tuple(jax.tree.leaves(made))


def _linear_truth(tree: Any, epilogue: str | None, *arguments: np.ndarray) -> Any:
    """float64 but for what makes int8 of x, which rounds where the kernel must."""
    x, packed, rest = jax.tree.unflatten(tree, arguments)
    dtype, x = x.dtype, x.astype(np.float32)
    if "norm" in rest:
        mean = np.mean(np.square(x.astype(np.float64)), axis=-1, keepdims=True)
        x = (x / np.sqrt(mean + EPS)).astype(np.float32).astype(dtype) * rest["norm"]
        x = x.astype(np.float32)
    largest = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-5))
    xq = np.round(x * (np.float32(127) / largest))
    y = _truth((), xq, largest[:, 0].astype(np.float64) / 127, packed.codes, packed.row_scale)
    if epilogue is not None:
        gate, up = np.split(y, 2, axis=-1)
        gate = np.maximum(gate, 0) ** 2 if epilogue == "relu2_glu" else _silu(gate)
        y = gate * up
    return y + rest["residual"].astype(np.float64) if "residual" in rest else y


def _silu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.tanh(x / 2)) / 2


def _call(tree: Any, names: tuple[str, ...], out: str, f: Any, *arguments: Any) -> Any:
    count = len(arguments) - len(names)
    rest = dict(zip(names, arguments[count:], strict=True))
    return f(*jax.tree.unflatten(tree, arguments[:count]), **rest, out_dtype=out)


def _make(shapes: Any, rest: Any, key: jax.Array) -> tuple[jax.Array, ...]:
    made = jax.jit(functools.partial(random_arguments, shapes))(key)
    more = [jax.random.normal(key, x.shape, x.dtype) for x in rest]
    return (*jax.tree.leaves(made), *more)


def _truth(names: tuple[str, ...], xq, x_scale, codes, row_scale, *rest: np.ndarray) -> Any:
    columns = [(codes >> 2 * i & 3).astype(np.float64) - 1 for i in range(4)]
    weight = np.stack(columns, axis=-1).reshape(len(codes), -1)
    # Products of integers below 2^53: exact
    y = xq.astype(np.float64) @ weight.T * x_scale.astype(np.float64)[:, None] * row_scale
    for _, more in zip(names, rest, strict=True):
        y = y + more.astype(np.float64)
    return y
