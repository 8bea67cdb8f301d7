"""Quantized matmul: the projections of Llama-3.1-8B and Qwen2.5-0.5B when decoding, and of the
first also for 64 to 4096 rows of x, a prefill's.

A label is M x N x K and the format; "silu" has a weight of 2N rows, gate and up. "plain" is no
format: the weight is in 16 bits, and what stands around its product is part of it. "dense" is a
rival of the formats: the product by XLA with the weight in 16 bits. "packed" is the structure of
the weight, whose parts are the arguments behind x.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case
from pallas_kernels.around_product import Cache, Norm, Rotary
from pallas_kernels.measure import size_bytes
from pallas_kernels.packed import PLAIN, Packed
from pallas_kernels.quantize import dequantize, quantize
from pallas_kernels.quantized_matmul import (
    Config,
    Device,
    candidates,
    quantized_matmul,
    quantized_matmul_reference,
)
from pallas_kernels.quantized_tiles_config import Tiles

H200 = Device("gpu", "NVIDIA H200", 9.0, 132)
# [out, in]; query, key and value are one weight, and so are gate and up, of twice the width here
LLAMA = {"qkv": (6144, 4096), "out": (4096, 4096), "gate, up": (14336, 4096)}
LLAMA |= {"down": (4096, 14336)}
QWEN = {"qkv": (1152, 896), "out": (896, 896), "gate, up": (4864, 896), "down": (896, 4864)}
HEADS = ((151936, 896), (128256, 4096))
EPS = 1e-5  # of a norm
SLOTS = 512  # of a cache
FORMATS = ("int4", "int8", "fp8", "nvfp4", "mxfp4", "mxfp8")
FEW_ROWS = 64  # of x, up to which reading the codes should be the time


def cases() -> list[Case]:
    """Further formats, rows and tiles are compiled only."""
    found = [
        _case(m, *LLAMA[name], form, silu="gate" in name)
        for m in (1, 16)
        for form in ("int4", "int8")
        for name in LLAMA
    ]
    found += [_case(m, *QWEN[name], silu="gate" in name) for m in (1, 16) for name in QWEN]
    found += [_case(1, *LLAMA["out"], form) for form in FORMATS[2:]]
    found += [_case(1, *LLAMA["out"], group=group, zeros=True) for group in (32, 128)]
    found += [_case(1, *HEADS[1], "int8", out="float32"), _case(1, *HEADS[0], out="float32")]
    found += [
        _case(m, *LLAMA[name], silu="gate" in name) for m in (64, 512, 4096) for name in LLAMA
    ]
    for m in (2, 16):
        for model, of_qkv in ((QWEN, "norm bias"), (LLAMA, "norm")):
            found += [
                _case(m, *model["qkv"], PLAIN, words=of_qkv),
                _case(m, *model["out"], PLAIN, words="residual"),
                _case(m, *model["gate, up"], PLAIN, words="norm", silu=True),
                _case(m, *model["down"], PLAIN, words="residual"),
            ]
    named = {case.label for case in found}
    return found + [case for case in _compiled() if case.label not in named]


def _compiled() -> list[Case]:
    only: dict[str, Any] = {"compile_only": True}
    found = [
        _case(m, *model[name], form, silu="gate" in name, **only)
        for m in (1, 7, 16, 64, 512)
        for model in (LLAMA, QWEN)
        for name in model
        for form in ("int4", "int8")
    ]
    for m in (1, 7, 64, 300):
        for dtype in ("bfloat16", "float16"):
            for form in FORMATS:
                if not (form.startswith("mx") and dtype == "float16"):
                    found.append(_case(m, 1152, 896, form, dtype, words="bias", **only))
            found.append(_case(m, 896, 4864, "int4", dtype, 128, True, words="residual", **only))
            found.append(_case(m, 896, 4864, "int4", dtype, 32, True, **only))
    for m in (1, 7, 16):
        found.append(_case(m, *QWEN["qkv"], PLAIN, "float16", words="bias", **only))
        for form in (*FORMATS, PLAIN):
            found.append(_case(m, *QWEN["qkv"], form, words="norm bias", **only))
        found.append(_case(m, *LLAMA["qkv"], group=32, zeros=True, words="norm", **only))
        found.append(_case(m, *LLAMA["gate, up"], silu=True, words="norm", **only))
        for form in (*FORMATS, PLAIN):
            found.append(_case(m, *QWEN["qkv"], form, words="norm bias", heads=(14, 2, 64), **only))
        for form in ("int4", "int8", PLAIN):
            found.append(_case(m, *LLAMA["qkv"], form, words="norm", heads=(32, 8, 128), **only))
        found.append(_case(m, 9216, 3072, words="norm", heads=(32, 32, 96), **only))
    for m in (1, 16, 64):
        x, weight = _shapes(m, *LLAMA["out"], "int4", "bfloat16", None, False)
        for config in candidates(x, weight, device=H200):
            found.append(_case(m, *LLAMA["out"], config=config, **only))
    return found


def _shapes(m: int, n: int, k: int, form: str, dtype: str, group: int | None, zeros: bool):
    make = functools.partial(_weight, form=form, group=group, zeros=zeros)
    return jax.ShapeDtypeStruct((m, k), dtype), jax.eval_shape(
        make, jax.ShapeDtypeStruct((n, k), dtype)
    )


def _weight(numbers: Any, form: str, group: int | None, zeros: bool) -> Packed:
    if form == PLAIN:
        return Packed.of(numbers)
    return quantize(numbers, form, group, zero_points=zeros)


def _case(
    m: int,
    n: int,
    k: int,
    form: str = "int4",
    dtype: str = "bfloat16",
    group: int | None = None,
    zeros: bool = False,
    *,
    silu: bool = False,
    words: str = "",
    heads: tuple[int, int, int] | None = None,
    out: str | None = None,
    config: Config | Tiles | None = None,
    compile_only: bool = False,
) -> Case:
    rows = 2 * n if silu else n
    x, weight = _shapes(m, rows, k, form, dtype, group, zeros)
    codes, tree = jax.tree.flatten(weight)
    rest = {"norm": (k,), "bias": (rows,), "residual": (m, n)}
    rest = {name: jax.ShapeDtypeStruct(s, dtype) for name, s in rest.items() if name in words}
    keywords: dict[str, Any] = {"epilogue": "swiglu" if silu else None, "out_dtype": out}
    if heads is not None:
        assert compile_only, "what is told of bytes is the product's alone"
        held = jax.ShapeDtypeStruct((m, SLOTS, heads[1], heads[2]), dtype)
        angles = jax.ShapeDtypeStruct((m, heads[2] // 2), jnp.float32)
        rest |= {"cos": angles, "sin": angles, "k": held, "v": held}
        keywords |= {"epilogue": "rope", "heads": heads[:2]}
    call = functools.partial(_call, tree, tuple(rest), keywords)
    dense = {} if form == PLAIN else {"dense": functools.partial(_dense, tree)}
    label = [f"{m} x {n} x {k} {form}"]
    label += [f"groups of {group}"] * bool(group) + ["zero points"] * zeros + ["silu"] * silu
    label += [words] * bool(words) + ["rope"] * bool(heads) + [dtype] * (dtype != "bfloat16")
    label += [f"{out} result"] * bool(out)
    label += [] if config is None else [str(config).removeprefix("Config")]
    result = jax.ShapeDtypeStruct((m, n), out or dtype)
    return Case(
        op="quantized_matmul",
        label=", ".join(label),
        arguments=(x, *codes, *rest.values()),
        run=functools.partial(call, functools.partial(quantized_matmul, config=config)),
        plain=functools.partial(call, quantized_matmul_reference),
        kind="memory-read" if m <= FEW_ROWS else "matmul",
        bytes=size_bytes(x, codes, tuple(rest.values()), result),
        operations=2 * m * rows * k,
        ceiling="read" if m <= FEW_ROWS else "matmul",
        keywords={**keywords, "packed": tree, **dense},
        make=functools.partial(_make, x, (rows, k), (form, group, zeros), tuple(rest.values())),
        truth=functools.partial(_truth, tree, tuple(rest), silu, heads),
        sample=_sample if m > FEW_ROWS and "residual" not in rest else None,
        compile_only=compile_only,
    )


def _call(tree: Any, names: tuple[str, ...], keywords: Any, f: Any, x, *rest: Any) -> Any:
    keywords = dict(keywords)
    heads = keywords.pop("heads", None)
    weight = jax.tree.unflatten(tree, rest[: tree.num_leaves])
    more = dict(zip(names, rest[tree.num_leaves :], strict=True))
    if "norm" in more:
        more["norm"] = Norm(more["norm"], EPS)
    if heads is not None:
        more["rotary"] = Rotary(more.pop("cos"), more.pop("sin"), *heads)
        more["cache"] = Cache(more.pop("k"), more.pop("v"), _slots(len(x)))
    return f(x, weight, **more, **keywords)


def _slots(rows: int) -> jax.Array:
    return jnp.full(rows, SLOTS - 1, jnp.int32)


def _make(x: Any, shape: Any, how: Any, rest: Any, key: jax.Array) -> tuple[jax.Array, ...]:
    def made(key: jax.Array) -> tuple[Any, ...]:
        one, two, *more = jax.random.split(key, 2 + len(rest))
        weight = jax.random.normal(two, shape, jnp.float32) * jnp.float32(shape[1] ** -0.5)
        weight = _weight(weight.astype(x.dtype), *how)
        normal = [
            jax.random.normal(key, spec.shape, jnp.float32).astype(spec.dtype)
            for key, spec in zip((one, *more), (x, *rest), strict=True)
        ]
        return (normal[0], *jax.tree.leaves(weight), *normal[1:])

    return jax.jit(made)(key)


def _sample(arguments: tuple, result: Any) -> tuple[tuple, Any]:
    """At most 64 rows of x, and of the result."""
    step = -(-result.shape[0] // FEW_ROWS)
    return (arguments[0][::step], *arguments[1:]), result[::step]


def _dense(tree: Any, x, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x, and the weight that the codes stand for in x's dtype."""
    return x, dequantize(jax.tree.unflatten(tree, rest[: tree.num_leaves]), x.dtype)


def _truth(tree: Any, names: tuple[str, ...], silu: bool, heads: Any, x, *rest: np.ndarray) -> Any:
    import oracles  # type: ignore

    weight = oracles.packed_numbers(jax.tree.unflatten(tree, rest[: tree.num_leaves]))
    more = dict(zip(names, rest[tree.num_leaves :], strict=True))
    dtype, x = x.dtype, x.astype(np.float64)
    if "norm" in more:
        x = oracles.rms_norm(x, more["norm"].astype(np.float64), eps=EPS)
    y = x @ weight.T + more.get("bias", np.zeros(1)).astype(np.float64)
    if silu:
        gate, up = np.split(y, 2, axis=-1)
        y = gate * (1 + np.tanh(gate / 2)) / 2 * up
    if heads is not None:
        angles = (more[name].astype(dtype).astype(np.float64) for name in ("cos", "sin"))
        cache = Cache(jnp.asarray(more["k"]), jnp.asarray(more["v"]), _slots(len(x)))
        return oracles.turn_and_write(y, *angles, heads[0], cache)
    return y + more.get("residual", np.zeros(1)).astype(np.float64)
