"""Decode attention: one new token over the cache of a real model, in bfloat16, int8, and in pages.

A label is batch x keys in the cache, query / key heads of a width, and how the cache is stored.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case
from pallas_kernels import attention_reference as plain
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.measure import size_bytes

LLAMA, QWEN = (32, 8, 128), (14, 2, 64)  # Llama-3.1-8B, Qwen2.5-0.5B
BATCHES, KEYS = (1, 8, 64), (1024, 8192, 32768, 131072)
PAGE = 64
STEP = 1 / 73  # of an int8 number: all of them, equally often, then have a deviation of 1


def cases() -> list[Case]:
    """Further layouts and odd sizes are compiled only."""
    found = [_case(b, s, heads) for heads in (LLAMA, QWEN) for b in BATCHES for s in KEYS]
    found += [_case(b, 32768, LLAMA, cache="int8") for b in BATCHES]
    found.append(_case(8, 32768, QWEN, cache="int8"))
    found += [_case(8, 8192, LLAMA, pages=True), _case(64, 32768, LLAMA, uneven=True)]
    odd = functools.partial(_case, compile_only=True)
    found += [odd(2, 257, (7, 1, 128)), odd(3, 1000, (8, 8, 96)), odd(1, 17, (4, 1, 256))]
    found += [odd(1, 8192, LLAMA, cache="float8_e4m3fn"), odd(8, 1024, QWEN, pages=True)]
    found += [odd(8, 4096, LLAMA, cache="int8", pages=True), odd(8, 4096, LLAMA, softcap=30.0)]
    found += [odd(1, 131072, (64, 1, 64), cache="int8"), odd(1, 8192, (40, 1, 64), cache="int8")]
    found += [odd(2, 1024, (16, 1, 256), cache="int8"), odd(2, 1024, (8, 1, 96), cache="int8")]
    return found


def _case(
    b: int,
    s: int,
    heads: tuple[int, int, int],
    *,
    cache: str = "bfloat16",
    pages: bool = False,
    uneven: bool = False,
    softcap: float | None = None,
    compile_only: bool = False,
) -> Case:
    n, k, h = heads
    q = jax.ShapeDtypeStruct((b, 1, n, h), "bfloat16")
    shape = (b * s // PAGE, PAGE, k, h) if pages else (b, s, k, h)
    held = jax.ShapeDtypeStruct(shape, cache)
    lengths = _lengths(b, s) if uneven else np.full((b,), s, np.int32)
    arguments = [q, held, held, jax.ShapeDtypeStruct((b,), "int32")]
    names, constants = [], {3: lengths}
    if pages:
        names.append("page_table")
        constants[len(arguments)] = _page_table(b, s)
        arguments.append(jax.ShapeDtypeStruct((b, s // PAGE), "int32"))
    if cache != "bfloat16":
        names += ["k_scale", "v_scale"]
        arguments += [jax.ShapeDtypeStruct(shape[:3], "float32")] * 2
    tokens = int(lengths.sum())
    a_token = 2 * k * h * jnp.dtype(cache).itemsize + (2 * 4 * k if "k_scale" in names else 0)
    words = ["uneven lengths"] * uneven + [f"softcap {softcap}"] * bool(softcap)
    words = [f"{cache} cache", *[f"pages of {PAGE}"] * pages, *words]
    call = functools.partial(_call, tuple(names))
    return Case(
        op="decode_attention",
        label=", ".join([f"{b} x {s} keys, {n} / {k} heads of {h}", *words]),
        arguments=tuple(arguments),
        run=functools.partial(call, _ours, softcap),
        plain=functools.partial(call, _plain, softcap),
        kind="matmul",
        bytes=size_bytes(q, q, *arguments[4 : 4 + pages]) + 4 * b + tokens * a_token,
        operations=4 * n * h * tokens,
        ceiling="read",
        keywords={"softcap": softcap, "pages": pages, "uneven": uneven},
        truth=functools.partial(call, _truth, softcap),
        sample=None if pages else functools.partial(_sample, heads),
        make=functools.partial(_make, tuple(arguments), constants),
        constants=constants,
        compile_only=compile_only,
    )


def _lengths(b: int, s: int) -> np.ndarray:
    return np.random.default_rng(0).integers(1, s + 1, b).astype(np.int32)


def _page_table(b: int, s: int) -> np.ndarray:
    """Pages in no order, as a server that has run for a while has them."""
    pages = np.random.default_rng(0).permutation(b * s // PAGE)
    return pages.reshape(b, -1).astype(np.int32)


def _call(names: tuple[str, ...], f: Any, softcap: float | None, q, k, v, lengths, *rest) -> Any:
    return f(q, k, v, lengths, softcap=softcap, **dict(zip(names, rest, strict=True)))


def _ours(q, k, v, lengths, **keywords: Any) -> jax.Array:
    return decode_attention(q, k, v, lengths, **keywords)


def _plain(q, k, v, lengths, *, softcap, page_table=None, k_scale=None, v_scale=None) -> jax.Array:
    """The reference; a scale a key multiplies its scores, a scale a value its weight."""
    if page_table is not None:
        in_order = lambda x: x[page_table].reshape(q.shape[0], -1, *x.shape[2:])  # noqa: E731
        k, v = in_order(k), in_order(v)
        if k_scale is not None:
            k_scale, v_scale = in_order(k_scale), in_order(v_scale)
    if k_scale is None:
        return plain.attention_reference(q, k, v, softcap=softcap, kv_lengths=lengths)
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    heads = lambda x: jnp.repeat(jnp.swapaxes(x, 1, 2), q.shape[2] // k.shape[2], 1)[:, :, None]  # noqa: E731
    scores = plain.scores(q, k, scale=None, softcap=None) * heads(k_scale)
    if softcap is not None:
        scores = jnp.tanh(scores / jnp.float32(softcap)) * jnp.float32(softcap)
    mask = plain.visible(1, k.shape[1], causal=True, window=None, kv_lengths=lengths)
    weights, _ = plain.softmax(scores, mask, None)
    return plain.weighted(weights * heads(v_scale), v, q.dtype)


def _make(arguments: Any, constants: Any, key: jax.Array) -> tuple[jax.Array, ...]:
    """Normal numbers; int8 ones are all equally likely, with scales that give them back a
    deviation of one.
    """
    made = []
    for i, (one, x) in enumerate(
        zip(jax.random.split(key, len(arguments)), arguments, strict=True)
    ):
        if i in constants:
            made.append(jnp.asarray(constants[i]))
        elif x.dtype == jnp.int8:
            bits = jax.random.bits(one, x.shape, jnp.uint8)
            made.append(jnp.maximum(jax.lax.bitcast_convert_type(bits, jnp.int8), jnp.int8(-127)))
        elif i > 3:
            spread = jax.random.uniform(one, x.shape, jnp.float32, 0.5, 1.5)
            small = arguments[1].dtype == jnp.int8
            made.append(spread * jnp.float32(STEP if small else 1))
        else:
            made.append(jax.random.normal(one, x.shape, jnp.bfloat16).astype(x.dtype))
    return tuple(made)


def _sample(heads: Any, arguments: tuple, result: Any) -> tuple[tuple, Any]:
    """The first and the last key head of the last row of the batch."""
    n, k, _ = heads
    kept = np.asarray([0, k - 1])
    queries = (kept[:, None] * (n // k) + np.arange(n // k)).ravel()
    q, keys, values, lengths, *scales = (x[-1:] for x in arguments)
    part = (q[:, :, queries], keys[:, :, kept], values[:, :, kept], lengths)
    return (*part, *(x[:, :, kept] for x in scales)), result[-1:][:, :, queries]


def _truth(q, k, v, lengths, *, softcap, page_table=None, k_scale=None, v_scale=None) -> np.ndarray:
    """In float64, a row and head at a time."""
    out = np.empty(q.shape, np.float64)
    for b, n in np.ndindex(q.shape[0], q.shape[2]):
        head = n // (q.shape[2] // k.shape[2])

        def held(x, scale, b=b, head=head):
            rows = b if page_table is None else page_table[b]
            numbers = x[rows].reshape(-1, *x.shape[2:])[: lengths[b], head].astype(np.float64)
            if scale is None:
                return numbers
            return numbers * scale[rows].reshape(-1, x.shape[2])[: lengths[b], head, None]

        scores = held(k, k_scale) @ q[b, 0, n].astype(np.float64) * q.shape[-1] ** -0.5
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        e = np.exp(scores - scores.max())
        out[b, 0, n] = e @ held(v, v_scale) / e.sum()
    return out
