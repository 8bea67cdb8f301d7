"""Scale, mask and softmax: attention scores, rows as long as a vocabulary or more, decoding."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case
from pallas_kernels import softmax as kernel
from pallas_kernels import triton_softmax
from pallas_kernels.measure import size_bytes

SCALE = 0.125
SCORES = (8, 32, 2048, 2048)
MOST_EXACT = 2**26  # numbers that NumPy takes in float64 within seconds; more are float32's


def cases() -> list[Case]:
    """Odd sizes are compiled only."""
    found = [_case((32, 512)), _case((2, 8, 128, 128)), _case(SCORES)]
    found += [_case(SCORES, causal=True), _case(SCORES, mask=(8, 1, 2048, 2048))]
    found += [_case((8, 32, 512, 512), "float32"), _case((8192, 8192))]
    found += [_case((64, 131072)), _case((64, 131072), "float32"), _case((1024, 131072))]
    # Scores of one new token over a cache, and the logits of Phi-3-mini, Llama-3.1, Qwen2.5
    found += [_case((b, 32, 1, 4096)) for b in (1, 64)]
    found += [_case((1, 32064)), _case((16, 128256)), _case((64, 151936), "float32")]
    backward: dict[str, Any] = {"backward": True}
    found += [_case(shape, **backward) for shape in ((2, 8, 128, 128), SCORES, (64, 131072))]
    found.append(_case((64, 131072), "float32", **backward))
    odd: dict[str, Any] = {"compile_only": True}
    for shape, dtype in (
        ((1, 96), "bfloat16"),
        ((7, 1000), "float16"),
        ((13, 4864), "float32"),
        ((3, 8248), "bfloat16"),
        ((257, 16384), "bfloat16"),
        ((2, 40008), "bfloat16"),  # shares of more than one copy
        ((2, 151936), "float32"),  # the most that registers keep of a share
    ):
        found += [_case(shape, dtype, **odd), _case(shape, dtype, **backward, **odd)]
        found.append(_case(shape, dtype, mask=shape[-1:], **odd))
    for dtype in ("bfloat16", "float32"):
        for causal in (False, True):
            found.append(
                _case((4, 4, 100, 1000), dtype, mask=(4, 1, 100, 1000), causal=causal, **odd)
            )
        found.append(_case((2, 2, 64, 2048), dtype, mask=(2, 1, 1, 2048), causal=True, **odd))
        found.append(_case((1, 64, 131072), dtype, mask=(131072,), causal=True, **odd))
        # Scores of a token, a mask of which no row is as long as a copy by all threads must be
        found += [_case((3, 4, 1, s), dtype, mask=(3, 1, 1, s), **odd) for s in (16, 24, 64)]
    found.append(_case(SCORES, "float32", causal=True, **odd))
    found.append(_case(SCORES, "float32", **backward, **odd))
    return found


def _case(
    shape: tuple[int, ...],
    dtype: str = "bfloat16",
    *,
    mask: tuple[int, ...] | None = None,
    causal: bool = False,
    backward: bool = False,
    compile_only: bool = False,
) -> Case:
    x = jax.ShapeDtypeStruct(shape, dtype)
    arguments = (x,) if mask is None else (x, jax.ShapeDtypeStruct(mask, jnp.bool_))
    words = [f"mask {' x '.join(map(str, mask))}"] if mask else []
    words += ["causal"] * causal + ["backward"] * backward
    softmaxes = (
        kernel.scale_softmax,
        kernel.scale_softmax_reference,
        triton_softmax.scale_softmax,
    )
    run, plain, triton = (functools.partial(_forward, f, causal) for f in softmaxes)
    if backward:
        arguments = (x, x, x)
        run, plain = _ours_backward, _plain_backward
    exact = math.prod(shape) <= MOST_EXACT
    return Case(
        op="scale_softmax",
        label=", ".join([f"{' x '.join(map(str, shape))} {dtype}", *words]),
        arguments=arguments,
        run=run,
        plain=plain,
        kind="memory-reduce",
        bytes=size_bytes(arguments[backward:], x),  # going back, x itself is not read
        truth=functools.partial(_truth_backward if backward else _truth, causal) if exact else None,
        rivals={} if backward else {"triton": triton},
        make=functools.partial(_make, arguments, backward),
        compile_only=compile_only,
    )


def _forward(f: Any, causal: bool, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    return f(x, scale=SCALE, mask=mask, causal=causal)


def _ours_backward(x: jax.Array, y: jax.Array, d_y: jax.Array) -> jax.Array:
    del x
    return kernel.scale_softmax_backward(y, d_y, scale=SCALE)


def _plain_backward(x: jax.Array, y: jax.Array, d_y: jax.Array) -> jax.Array:
    p, d = y.astype(jnp.float32), d_y.astype(jnp.float32)
    return (SCALE * p * (d - jnp.sum(p * d, axis=-1, keepdims=True))).astype(x.dtype)


def _make(arguments: Any, backward: bool, key: jax.Array) -> tuple[jax.Array, ...]:
    """Normal numbers; the y of a backward pass is the softmax of x, a mask keeps three of four."""
    keys = jax.random.split(key, 2)
    x = arguments[0]
    x, other = (4 * jax.random.normal(k, x.shape, jnp.float32).astype(x.dtype) for k in keys)
    if backward:
        return x, kernel.scale_softmax_reference(x, scale=SCALE), other
    if len(arguments) == 1:
        return (x,)
    return x, jax.random.bernoulli(keys[1], 0.75, arguments[1].shape)


def _truth(causal: bool, x: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    import oracles  # type: ignore

    return oracles.scale_softmax(x, scale=SCALE, mask=mask, causal=causal)


def _truth_backward(causal: bool, x: np.ndarray, y: np.ndarray, d_y: np.ndarray) -> np.ndarray:
    del causal, x
    p, d = y.astype(np.float64), d_y.astype(np.float64)
    return SCALE * p * (d - np.sum(p * d, axis=-1, keepdims=True))
