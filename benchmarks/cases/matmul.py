"""Matmul: square products, the projections of real models at 8192 tokens and when decoding, fp8.

A label is M x N x K; "transposed" has b as [N, K], as weights lie in checkpoints; "silu" has a
weight of 2N rows, gate and up.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case
from pallas_kernels.matmul import Config, Device, candidates, matmul, matmul_reference
from pallas_kernels.measure import size_bytes

# [out, in] of the projections; the gate and up of an MLP are one weight of twice its width
QWEN = {"query": (896, 896), "key": (128, 896), "gate, up": (4864, 896), "down": (896, 4864)}
LLAMA = {
    **{"query": (4096, 4096), "key": (1024, 4096)},
    **{"gate, up": (14336, 4096), "down": (4096, 14336)},
}
PHI = {
    **{"query, key, value": (9216, 3072), "out": (3072, 3072)},
    **{"gate, up": (8192, 3072), "down": (3072, 8192)},
}
HEADS = ((151936, 896), (128256, 4096))  # Qwen2.5-0.5B, Llama-3.1-8B
ROWS = 8192
FEW_ROWS = 64  # whose time is that of reading the weight
MOST_EXACT = 2**37  # products that NumPy takes in float64 within seconds; more are float32's


def cases() -> list[Case]:
    """Further projections, odd sizes and further tiles are compiled only."""
    found = [_case(size, size, size) for size in (4096, 8192)]
    found += [_case(size, size, size, dtype="float8_e4m3fn") for size in (4096, 8192)]
    timed: Any = [(ROWS, LLAMA, ("query", "gate, up", "down")), (ROWS, QWEN, ("gate, up", "down"))]
    timed += [(ROWS, PHI, ("gate, up", "down"))]
    timed += [(rows, LLAMA, ("query", "gate, up", "down")) for rows in (1, 8, 64)]
    timed += [(rows, QWEN, ("query", "gate, up", "down")) for rows in (1, 8, 64)]
    timed += [(1, QWEN, ("key",)), (16, LLAMA, ("query",))]
    for rows, model, names in timed:
        for name in names:
            n, k = model[name]
            found.append(_case(rows, n, k, _words(name)))
    found += [_case(rows, *HEADS[0], out="float32") for rows in (1, 8)]
    found.append(_case(ROWS, 4096, 4096, "transposed, backward"))
    named = {case.label for case in found}
    return found + [case for case in _compiled() + _tiles() if case.label not in named]


def _compiled() -> list[Case]:
    only: dict[str, Any] = {"compile_only": True}
    found = [_case(4096, 4096, 4096, "", **only), _case(1, *HEADS[1], out="float32", **only)]
    for rows in (1, 16, 64, ROWS):
        for model in (QWEN, LLAMA, PHI):
            found += [_case(rows, *sizes, _words(n), **only) for n, sizes in model.items()]
    found.append(_case(ROWS, 896, 896, "transposed, bias", **only))  # Qwen's query
    found.append(_case(ROWS, 4096, 4096, "transposed, residual", **only))  # Llama's attention
    found.append(_case(ROWS, 14336, 4096, "transposed, silu, backward", **only))
    found.append(_case(16, 4096, 4096, dtype="float8_e4m3fn", **only))
    for words in ("transposed", "transposed, bias", "transposed, residual", "transposed, silu", ""):
        found += [_case(m, 1000, 1000, words, "float16", **only) for m in (1, 131)]
    for words in ("transposed, backward", "backward", "transposed, silu, backward"):
        found.append(_case(131, 1000, 1000, words, **only))
    found.append(_case(131, 1000, 1000, out="float32", **only))
    found.append(_case(131, 1000, 1000, "transposed, residual", out="float32", **only))
    for words in ("transposed, scales", "transposed, scales, bias", "transposed, scales, silu"):
        found += [_case(m, 4864, 896, words, "float8_e4m3fn", **only) for m in (1, 1111)]
    found.append(_case(1111, 896, 896, "transposed, backward", "float8_e4m3fn", **only))
    return found


def _words(name: str) -> str:
    return "transposed, silu" if name == "gate, up" else "transposed"


def _tiles() -> list[Case]:
    """Every tile that tune tries must compile; the order of tiles is a number to the kernel."""
    found = []
    device = Device("gpu", "NVIDIA H200", 9.0, 132)
    for m, n, k in ((4096, 4096, 4096), (16, 4096, 4096), (2, 4096, 4096)):
        a, b = _operands(m, n, k, "transposed", "bfloat16")
        for config in candidates(a, b, transpose_b=True, device=device):
            if config.snake == 8 and (m > 2 or config.form == "vectors"):
                found.append(_case(m, n, k, config=config, compile_only=True))
    return found


def _operands(m: int, n: int, k: int, words: str, dtype: str) -> tuple[Any, Any]:
    wide = 2 * n if "silu" in words else n
    b = (wide, k) if "transposed" in words else (k, wide)
    return jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct(b, dtype)


def _case(
    m: int,
    n: int,
    k: int,
    words: str = "transposed",
    dtype: str = "bfloat16",
    *,
    out: str | None = None,
    config: Config | None = None,
    compile_only: bool = False,
) -> Case:
    a, b = _operands(m, n, k, words, dtype)
    wide = 2 * n if "silu" in words else n
    narrow = "bfloat16" if dtype == "float8_e4m3fn" else dtype
    result = jax.ShapeDtypeStruct((m, n), out or narrow)
    arguments = [a, b]
    names = []
    for name, shape, kind in (
        ("residual", (m, n), result.dtype),
        ("bias", (wide,), result.dtype),
        ("scales", (m,), jnp.float32),
        ("scales", (wide,), jnp.float32),
    ):
        if name in words:
            arguments.append(jax.ShapeDtypeStruct(shape, kind))
            names.append(("a_scale", "b_scale")["a_scale" in names] if name == "scales" else name)
    keywords = {
        "transpose_b": "transposed" in words,
        "epilogue": "swiglu" if "silu" in words else None,
    }
    both = {**keywords, "out_dtype": None if out is None else jnp.dtype(out)}
    run = functools.partial(_call, matmul, tuple(names), {**both, "config": config})
    plain = functools.partial(_call, matmul_reference, tuple(names), both)
    truth = functools.partial(_truth, tuple(names), keywords)
    forward_bytes = size_bytes(arguments, result)
    operations = 2 * m * wide * k
    if "backward" in words:
        run, plain = (functools.partial(_backward, f, len(arguments)) for f in (run, plain))
        forward_bytes += size_bytes(a, b)
        operations *= 2
        arguments.append(result)
    label = [f"{m} x {n} x {k} {dtype}", *([words] if words else [])]
    label += [f"{out} result"] if out else []
    if config is not None:
        label.append(str(config).removeprefix("Config"))
    return Case(
        op="matmul",
        label=", ".join(label),
        arguments=tuple(arguments),
        run=run,
        plain=plain,
        kind="memory-read" if m <= FEW_ROWS else "matmul",
        bytes=forward_bytes,
        operations=operations,
        ceiling="read" if m <= FEW_ROWS else None,
        truth=truth if operations <= MOST_EXACT and "backward" not in words else None,
        compile_only=compile_only,
        # Hopper's tensor cores cut a sum off, instead of rounding it, each 16 products: after 62
        # steps as far off as four numbers of 4 * sqrt(K) rounded once.
        largest_term=16 * k**0.5 if out == "float32" else None,
    )


def _call(f: Any, names: tuple[str, ...], keywords: dict[str, Any], a, b, *rest) -> Any:
    return f(a, b, **dict(zip(names, rest, strict=True)), **keywords)


def _backward(f: Any, count: int, *arguments: jax.Array) -> tuple[jax.Array, ...]:
    return jax.vjp(f, *arguments[:count])[1](arguments[count])


def _truth(names: tuple[str, ...], keywords: dict[str, Any], a, b, *rest: np.ndarray) -> Any:
    a, b = a.astype(np.float64), b.astype(np.float64)
    extra: Any = {name: x.astype(np.float64) for name, x in zip(names, rest, strict=True)}
    y = a @ (b.T if keywords["transpose_b"] else b)
    if "a_scale" in extra:
        y = y * extra["a_scale"][:, None] * extra["b_scale"]
    y = y + extra.get("bias", 0)
    if keywords["epilogue"] == "swiglu":
        gate, up = np.split(y, 2, axis=-1)
        y = gate * (1 + np.tanh(gate / 2)) / 2 * up
    return y + extra.get("residual", 0)
