"""Matmul: square products, the projections of real models at 8192 tokens and when decoding, bytes.

A label is M x N x K; "transposed" has b as [N, K], as weights lie in checkpoints; "silu" has a
weight of 2N rows, gate and up; "blocks" has scales of 1 x 128 of a and of 128 x 128 of b; "gelu" is
the formula with tanh.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case
from pallas_kernels.matmul import Config, Device, candidates, matmul, matmul_reference
from pallas_kernels.matmul_finish import BLOCK
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
BYTES = ("float8_e4m3fn", "int8")
HEADS = ((151936, 896), (128256, 4096))  # Qwen2.5-0.5B, Llama-3.1-8B
ROWS = 8192
FEW_ROWS = 64  # whose time is that of reading the weight
MOST_EXACT = 2**37  # products that NumPy takes in float64 within seconds


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
    found += [_case(size, size, size, dtype="int8") for size in (4096, 8192)]
    found += [_case(size, size, size, "transposed, blocks", BYTES[0]) for size in (4096, 8192)]
    for rows in (16, 64, ROWS):
        found.append(_case(rows, *LLAMA["query"], "transposed, scales", "int8", out="bfloat16"))
        found.append(_case(rows, *LLAMA["query"], "transposed, blocks", BYTES[0]))
    found.append(_case(ROWS, 8192, 3072, "transposed, scales, gelu", "int8", out="int8"))
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
    return found + _bytes()


def _bytes() -> list[Case]:
    only: dict[str, Any] = {"compile_only": True}
    shapes = [model[name] for model in (QWEN, LLAMA, PHI) for name in ("gate, up", "down")]
    found = []
    for rows in (1, 300):
        for n, k in (*shapes, HEADS[0]):
            found.append(_case(rows, n, k, dtype="int8", **only))
            found.append(_case(rows, n, k, "transposed, blocks", BYTES[0], **only))
        for words in ("blocks, silu", "blocks, bias, residual", "blocks, gelu"):
            found.append(_case(rows, 4864, 896, f"transposed, {words}", BYTES[0], **only))
        for out in BYTES:
            for words in ("transposed, scales, bias, gelu", "transposed, scales, silu"):
                found.append(_case(rows, 4864, 896, words, "int8", out=out, **only))
            found.append(_case(rows, 4864, 896, "transposed, gelu", BYTES[0], out=out, **only))
        found.append(_case(rows, 4864, 896, "transposed, exact gelu, bias", **only))
        found.append(_case(rows, 4864, 896, "exact gelu", **only))
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
    narrow = {"float8_e4m3fn": "bfloat16", "int8": "int32"}.get(dtype, dtype)
    result = jax.ShapeDtypeStruct((m, n), out or narrow)
    arguments = [a, b]
    names = []
    for name, shape, kind in (
        ("residual", (m, n), result.dtype),
        ("bias", (wide,), jnp.bfloat16 if result.dtype.itemsize == 1 else result.dtype),
        ("scales", (m,), jnp.float32),
        ("scales", (wide,), jnp.float32),
        ("blocks", (m, -(-k // BLOCK)), jnp.float32),
        ("blocks", (-(-wide // BLOCK), -(-k // BLOCK)), jnp.float32),
    ):
        if name in words:
            arguments.append(jax.ShapeDtypeStruct(shape, kind))
            scales = name in ("scales", "blocks")
            names.append(("a_scale", "b_scale")["a_scale" in names] if scales else name)
    if out in BYTES:
        arguments.append(jax.ShapeDtypeStruct((), jnp.float32))
        names.append("out_scale")
    epilogues = {"exact gelu": "gelu", "gelu": "gelu_pytorch_tanh", "silu": "swiglu"}
    keywords = {
        "transpose_b": "transposed" in words,
        "epilogue": next((name for word, name in epilogues.items() if word in words), None),
    }
    both = {**keywords, "out_dtype": None if out is None else jnp.dtype(out)}
    run = functools.partial(_call, matmul, tuple(names), {**both, "config": config})
    plain = functools.partial(_call, matmul_reference, tuple(names), both)
    truth = functools.partial(_truth, tuple(names), keywords)
    forward_bytes = size_bytes(arguments, result)
    operations = 2 * m * wide * k
    rivals = {}
    if "backward" in words:
        if len(arguments) == 2 and not keywords["epilogue"] and dtype in ("bfloat16", "float16"):
            product = functools.partial(_product, keywords["transpose_b"])
            rivals["xla"] = functools.partial(_backward, product, 2)
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
        truth=None if "backward" in words else truth,
        sample=functools.partial(_some_rows, max(1, m * MOST_EXACT // operations), tuple(names))
        if operations > MOST_EXACT and "backward" not in words
        else None,
        rivals=rivals,
        compile_only=compile_only,
        make=functools.partial(_integers, arguments) if dtype == "int8" else None,
        # Hopper's tensor cores cut a sum off, instead of rounding it, each 16 products: after 62
        # steps as far off as four numbers of 4 * sqrt(K) rounded once.
        largest_term=16 * k**0.5 if out == "float32" else None,
    )


def _integers(specs: list[jax.ShapeDtypeStruct], key: jax.Array) -> tuple[jax.Array, ...]:
    """All of int8; scales that bring sums back to the size of one number."""
    arrays = []
    for one, spec in zip(jax.random.split(key, len(specs)), specs, strict=True):
        if spec.dtype == jnp.int8:
            arrays.append(jax.random.randint(one, spec.shape, -128, 128, jnp.int8))
        elif spec.shape:
            arrays.append(jax.random.uniform(one, spec.shape, spec.dtype, 1e-3, 2e-3))
        else:
            arrays.append(jnp.asarray(30, spec.dtype))
    return tuple(arrays)


def _call(f: Any, names: tuple[str, ...], keywords: dict[str, Any], a, b, *rest) -> Any:
    return f(a, b, **dict(zip(names, rest, strict=True)), **keywords)


def _product(transpose_b: bool, a: jax.Array, b: jax.Array) -> jax.Array:
    """As users write it. The reference's sums are float32, and so is their cotangent: its backward
    products of 16 bits are float32's.
    """
    return a @ (b.T if transpose_b else b)


def _backward(f: Any, count: int, *arguments: jax.Array) -> tuple[jax.Array, ...]:
    return jax.vjp(f, *arguments[:count])[1](arguments[count])


def _some_rows(
    count: int, names: tuple[str, ...], arguments: tuple[jax.Array, ...], result: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """The first row, the last, and others as far apart as they can be."""
    a, b, *rest = arguments
    at = np.linspace(0, len(a) - 1, count).astype(int)
    rest = [
        x[at] if name in ("residual", "a_scale") else x for name, x in zip(names, rest, strict=True)
    ]
    return (a[at], b, *rest), result[at]


def _truth(names: tuple[str, ...], keywords: dict[str, Any], a, b, *rest: np.ndarray) -> Any:
    a, b = a.astype(np.float64), b.astype(np.float64)
    extra: Any = {name: x.astype(np.float64) for name, x in zip(names, rest, strict=True)}
    rows, columns = (extra.get(name, np.ones(())) for name in ("a_scale", "b_scale"))
    if columns.ndim == 2:
        a = a * np.repeat(rows, BLOCK, axis=1)[:, : a.shape[1]]
        wide = np.repeat(np.repeat(columns, BLOCK, axis=0), BLOCK, axis=1)
        b = b * wide[: b.shape[0], : b.shape[1]]
        rows = columns = np.ones(())
    y = a @ (b.T if keywords["transpose_b"] else b)
    y = y * (rows[:, None] if rows.ndim else rows) * columns
    y = y + extra.get("bias", 0)
    if keywords["epilogue"] == "swiglu":
        gate, up = np.split(y, 2, axis=-1)
        y = gate * (1 + np.tanh(gate / 2)) / 2 * up
    elif keywords["epilogue"] == "gelu_pytorch_tanh":
        y = y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))) / 2
    elif keywords["epilogue"] == "gelu":
        y = y * (1 + np.vectorize(math.erf)(y / np.sqrt(2))) / 2
    else:
        assert keywords["epilogue"] is None, keywords["epilogue"]
    y = y + extra.get("residual", 0)
    if "out_scale" in extra:  # not rounded: then a tie that fell the other way would count as wrong
        return np.clip(y * extra["out_scale"], -127, 127)
    return y
