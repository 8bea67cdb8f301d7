"""GEMV of a decode step: the four products of a layer of real models, one row."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case
from benchmarks.models import LLAMA, LLAMA_8B, PHI_3_MINI, QWEN
from jaxllm.config import ModelConfig
from pallas_kernels.around_product import Norm, Rotary
from pallas_kernels.gemv import gemv, gemv_reference
from pallas_kernels.measure import size_bytes

EPS = 1e-6
MODELS = (QWEN, LLAMA_8B, PHI_3_MINI, LLAMA)


def cases() -> list[Case]:
    """An odd size is compiled only."""
    found = [case for model in MODELS for case in _layer(model)]
    return [*found, _case(24, 384, norm=True, compile_only=True)]


def _layer(model: ModelConfig) -> list[Case]:
    d, f, width = model.hidden_size, model.intermediate_size, model.head_dim
    heads = model.num_attention_heads, model.num_key_value_heads
    outputs = (heads[0] + 2 * heads[1]) * width
    return [
        _case(outputs, d, norm=True, heads=(*heads, width), bias=model.qkv_bias),
        _case(d, heads[0] * width, residual=True),
        _case(2 * f, d, norm=True, epilogue="swiglu"),
        _case(d, f, residual=True),
    ]


def _case(
    o: int,
    i: int,
    *,
    norm: bool = False,
    bias: bool = False,
    residual: bool = False,
    epilogue: str | None = None,
    heads: tuple[int, int, int] | None = None,
    compile_only: bool = False,
) -> Case:
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    outputs = o // 2 if epilogue == "swiglu" else o
    named: dict[str, Any] = {"x": bf16((1, i)), "weight": bf16((o, i))}
    named |= {"norm": bf16((i,))} if norm else {}
    named |= {"bias": bf16((o,))} if bias else {}
    named |= {"residual": bf16((1, o))} if residual else {}
    if heads is not None:
        epilogue = "rope"
        angles = jax.ShapeDtypeStruct((1, heads[2] // 2), jnp.float32)
        named |= {"cos": angles, "sin": angles}
    words = ["norm"] * norm + ["bias"] * bias + [epilogue or ""] + ["residual"] * residual
    call = functools.partial(_call, tuple(named), epilogue, heads)
    return Case(
        op="gemv",
        label=", ".join(filter(None, [f"1 x {o} x {i} bfloat16", *words])),
        arguments=tuple(named.values()),
        run=functools.partial(call, gemv),
        plain=functools.partial(call, gemv_reference),
        kind="memory-read",
        bytes=size_bytes(*named.values()) + 2 * outputs,
        operations=2 * o * i,
        ceiling="read",
        truth=functools.partial(_truth, tuple(named), epilogue, heads),
        compile_only=compile_only,
    )


def _call(names: tuple[str, ...], epilogue: str | None, heads: Any, run: Any, *arrays: Any) -> Any:
    given = dict(zip(names, arrays, strict=True))
    x, weight = given.pop("x"), given.pop("weight")
    if "norm" in given:
        given["norm"] = Norm(given["norm"], EPS)
    if heads is not None:
        given["rotary"] = Rotary(given.pop("cos"), given.pop("sin"), *heads[:2])
    return run(x, weight, epilogue=epilogue, **given)


def _truth(names: tuple[str, ...], epilogue: str | None, heads: Any, *arrays: np.ndarray) -> Any:
    import oracles  # type: ignore

    given = {name: a.astype(np.float64) for name, a in zip(names, arrays, strict=True)}
    y = given["x"]
    if "norm" in given:
        y = oracles.rms_norm(y, given["norm"], eps=EPS)
    y = y @ given["weight"].T + given.get("bias", 0.0)
    if epilogue == "swiglu":
        gate, up = np.split(y, 2, axis=-1)
        y = oracles.glu(gate, up, activation="silu")
    if heads is None:
        return y + given.get("residual", 0.0)
    n, k, width = heads
    dtype = arrays[0].dtype
    cos, sin = (given[name].astype(dtype).astype(np.float64)[None] for name in ("cos", "sin"))
    q, keys, values = np.split(y.reshape(1, 1, -1, width), (n, n + k), axis=2)
    q, keys = (oracles.turn(part, cos, sin) for part in (q, keys))
    kv = np.concatenate([keys, values], axis=2)
    return tuple(part.reshape(1, -1) for part in (q, kv))
