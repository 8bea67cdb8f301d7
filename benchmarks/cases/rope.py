"""RoPE of q and k, forward and backward: the heads of real models."""

from __future__ import annotations

import functools

import jax
import numpy as np

from benchmarks.case import Case
from pallas_kernels.measure import size_bytes
from pallas_kernels.rope import rope, rope_reference

QWEN, LLAMA, PHI = (14, 2, 64), (32, 8, 128), (32, 32, 96)  # Qwen2.5-0.5B, 3.1-8B, Phi-3-mini


def cases() -> list[Case]:
    """Prefill of 8192 tokens, decoding at batch 1 to 64; odd sizes are compiled only."""
    found = [_case(1, 8192, *heads) for heads in (QWEN, LLAMA, PHI)]
    found += [_case(b, 1, *heads) for b, heads in ((1, QWEN), (64, QWEN), (1, LLAMA), (64, LLAMA))]
    found += [_case(1, 8192, *LLAMA, rotary=64), _case(1, 8192, *LLAMA, dtype="float32")]
    found += [_case(1, 8192, *heads, backward=True) for heads in (QWEN, LLAMA)]
    for b, t, heads, rotary, dtype in (
        (1, 1, (3, 1, 64), 64, "bfloat16"),
        (2, 37, (2, 1, 96), 96, "float16"),
        (3, 5, (2, 2, 80), 32, "float32"),
        (1, 257, (8, 1, 80), 80, "float16"),
        (1, 33, (8, 4, 256), 256, "bfloat16"),
        (1, 33, (8, 4, 112), 112, "float16"),
        (1, 33, (8, 4, 120), 120, "float32"),
    ):
        for backward in (False, True):
            found.append(_case(b, t, *heads, rotary, dtype, backward, compile_only=True))
    return found


def _case(
    b: int,
    t: int,
    n: int,
    k: int,
    h: int,
    rotary: int | None = None,
    dtype: str = "bfloat16",
    backward: bool = False,
    compile_only: bool = False,
) -> Case:
    rotary = rotary or h
    heads = tuple(jax.ShapeDtypeStruct((b, t, m, h), dtype) for m in (n, k))
    angles = (jax.ShapeDtypeStruct((b, t, rotary // 2), "float32"),) * 2
    words = [f"rotary {rotary}"] * (rotary != h) + ["backward"] * backward
    run, plain = (_backward(f) if backward else f for f in (rope, rope_reference))
    return Case(
        op="rope",
        label=", ".join([f"{b} x {t} tokens, {n} + {k} heads of {h}, {dtype}", *words]),
        arguments=heads + angles + heads * backward,
        run=run,
        plain=plain,
        kind="memory",
        bytes=size_bytes(heads, angles, heads),
        truth=functools.partial(_truth, backward),
        compile_only=compile_only,
    )


def _backward(f):
    def pull(q, k, cos, sin, dq, dk):
        return jax.vjp(lambda q, k: f(q, k, cos, sin), q, k)[1]((dq, dk))

    return pull


def _truth(backward: bool, q, k, cos, sin, *cotangents):
    import oracles  # type: ignore

    cos, sin = (table.astype(q.dtype).astype(np.float64) for table in (cos, sin))
    if backward:
        return tuple(oracles.turn(x.astype(np.float64), cos, -sin) for x in cotangents)
    return tuple(oracles.turn(x.astype(np.float64), cos, sin) for x in (q, k))
