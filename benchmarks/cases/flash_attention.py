"""Flash attention, forward and backward: the heads of real models, 16k tokens, documents, a window;
and the forward pass of float8.

A label is batch x tokens, query / key heads of a width, dtype, and what the call means.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import DIFFERS, Case
from pallas_kernels import attention_reference as plain
from pallas_kernels.flash_attention import flash_attention, flash_attention_reference
from pallas_kernels.flash_attention_backward import backward as flash_attention_backward
from pallas_kernels.measure import size_bytes

LLAMA, LLAMA_1B, PHI = (32, 8, 128), (32, 8, 64), (32, 32, 96)  # Llama-3.1-8B, -3.2-1B, Phi-3-mini
QWEN, GEMMA = (14, 2, 64), (16, 8, 256)  # Qwen2.5-0.5B, Gemma-2-9B
GEMMA_27B = (32, 16, 128)
TOKENS = 16384
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
DIRECT_BYTES = 2**33  # scores that the plain path may hold at a time; more go by blocks of queries
BLOCK = 1024
SAMPLED_ROWS = 128
SPILLED = (280, 40)  # bytes, of heads of 256, and of heads of 64 with every mask
# Bytes, outside the loops, of heads of 256 and documents, 36 of them without other masks: with half
# as many keys a tile nothing is spilled, and 8 documents of 1024 tokens take 194 us instead of 149
SPILLED_WIDE = 68
FP8 = "float8_e4m3fn"
FP8_DIFFERS = 0.1  # two ways to round weights to 4 bits are 3.6 % apart
EXACT_TOKENS = 8192  # rows of a backward pass that a host does again within seconds


def cases() -> list[Case]:
    """Odd sizes and further arguments are compiled only."""
    found = []
    for backward in (False, True):
        case = functools.partial(_case, backward=backward)
        found += [case(max(TOKENS // t, 1), t, LLAMA) for t in LENGTHS]
        found += [case(max(TOKENS // t, 1), t, LLAMA_1B) for t in (2048, 4096, 8192, 32768)]
        found.append(case(4, 4096, PHI))
        found.append(case(1, TOKENS, LLAMA, documents=16))
        found.append(case(1, TOKENS, LLAMA, window=4096))
        found.append(case(4, 4096, LLAMA, causal=False))
        found.append(case(1, 512, QWEN))
        if not backward:
            found += [case(1, 8192, GEMMA), case(1, 8192, GEMMA, softcap=50.0)]
            found.append(case(1, 8192, GEMMA_27B, softcap=50.0))
            found.append(case(1, 8192, GEMMA, documents=8, spilled_bytes=SPILLED_WIDE))
            found.append(case(4, 4096, LLAMA, dtype="float16"))
            of_bytes = functools.partial(case, dtype=FP8)
            found += [of_bytes(TOKENS // t, t, LLAMA) for t in (1024, 4096, 16384)]
            found += [of_bytes(4, 4096, LLAMA, causal=False), of_bytes(4, 4096, LLAMA_1B)]
            found += [of_bytes(1, TOKENS, LLAMA, documents=16), of_bytes(1, 512, QWEN)]
            found.append(of_bytes(1, 8192, GEMMA, softcap=50.0))
        odd: Any = functools.partial(case, compile_only=True)
        found += [odd(1, 257, (8, 1, 64)), odd(2, 513, (7, 1, 128), dtype="float16")]
        found += [odd(1, 1000, (4, 4, 80)), odd(3, 17, (4, 1, 128))]
        found += [odd(1, 65536, LLAMA), odd(16, 1024, LLAMA_1B)]
        # going back, two calls have more sums and masks than registers
        wide, masked = SPILLED if backward else (0, 0)
        found.append(odd(1, 257, (8, 2, 256), spilled_bytes=wide))
        if not backward:
            found.append(odd(1, 8192, GEMMA, window=4096, softcap=50.0))
        masks: Any = {"documents": 3, "window": 128, "softcap": 30.0}
        found.append(odd(2, 513, LLAMA_1B, **masks, spilled_bytes=masked))
        found.append(odd(2, 513, LLAMA, documents=3, causal=False))
    return found


def _case(
    b: int,
    t: int,
    heads: tuple[int, int, int],
    *,
    dtype: str = "bfloat16",
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    documents: int = 0,
    backward: bool = False,
    compile_only: bool = False,
    spilled_bytes: int = 0,
) -> Case:
    n, k, h = heads
    q = jax.ShapeDtypeStruct((b, t, n, h), dtype)
    kv = jax.ShapeDtypeStruct((b, t, k, h), dtype)
    keywords: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap}
    arguments: tuple[jax.ShapeDtypeStruct, ...] = (q, kv, kv)
    constants = {}
    lengths = [t]
    if documents:
        ids = document_ids(b, t, documents)
        arguments += (jax.ShapeDtypeStruct(ids.shape, ids.dtype),)
        constants = {3: ids}
        lengths = np.bincount(ids[0])[np.unique(ids[0])].tolist()
    pairs = b * sum(map(functools.partial(_pairs, causal, window), lengths))
    out = jax.ShapeDtypeStruct(q.shape, "bfloat16" if dtype == FP8 else dtype)
    moved = size_bytes(arguments, out)
    if backward:
        arguments += (q, jax.ShapeDtypeStruct((b, n, t), "float32"), q)
        moved = size_bytes(arguments, arguments[:3])
    words = ["causal" if causal else "full"]
    words += [f"window {window}"] * (window is not None) + [f"softcap {softcap}"] * bool(softcap)
    words += [f"{documents} packed documents"] * bool(documents)
    sampled = not backward or t <= EXACT_TOKENS
    op = "flash_attention_backward" if backward else "flash_attention"
    op = "flash_attention_fp8" if dtype == FP8 else op
    return Case(
        op=op,
        label=", ".join([f"{b} x {t} tokens, {n} / {k} heads of {h}, {dtype}", *words]),
        arguments=arguments,
        run=functools.partial(_ours_backward if backward else _ours, keywords),
        plain=functools.partial(_plain_backward if backward else _plain, keywords),
        kind="matmul",
        bytes=moved,
        operations=(10 if backward else 4) * n * h * pairs,
        keywords={**keywords, "documents": documents},
        truth=functools.partial(_truth_backward if backward else _truth, keywords)
        if sampled
        else None,
        sample=functools.partial(_sample, backward, heads) if sampled else None,
        make=functools.partial(_make, keywords, arguments[:3], constants) if backward else None,
        constants=constants,
        time_plain=4 * b * n * t * t <= DIRECT_BYTES,
        compile_only=compile_only,
        spilled_bytes=spilled_bytes,
        differs=FP8_DIFFERS if dtype == FP8 else DIFFERS,
    )


def document_ids(b: int, t: int, documents: int) -> np.ndarray:
    """int32 [B, T]: documents of uneven lengths, in order, none a multiple of a tile."""
    cuts = np.sort(np.random.default_rng(0).choice(np.arange(1, t), documents - 1, replace=False))
    ids = np.searchsorted(cuts, np.arange(t), side="right").astype(np.int32)
    return np.broadcast_to(ids, (b, t)).copy()


def _pairs(causal: bool, window: int | None, t: int) -> int:
    """Scores that count: by convention half of all where a query sees its past."""
    if window is not None and window < t:
        return t * window - window * window // 2
    return t * t // 2 if causal else t * t


def _ours(keywords: dict[str, Any], q, k, v, ids=None) -> jax.Array:
    return flash_attention(q, k, v, **keywords, q_segment_ids=ids, kv_segment_ids=ids)


def _ours_backward(keywords: dict[str, Any], q, k, v, *rest) -> Any:
    *ids, out, lse, d_out = rest
    ids = ids[0] if ids else None
    d_q, d_k, d_v, _ = flash_attention_backward(
        q,
        k,
        v,
        out,
        lse,
        d_out,
        None,
        **keywords,
        scale=q.shape[-1] ** -0.5,
        q_segment_ids=ids,
        kv_segment_ids=ids,
        kv_lengths=None,
    )
    return d_q, d_k, d_v


def _plain(keywords: dict[str, Any], q, k, v, ids=None, *, return_lse: bool = False) -> Any:
    """The reference, by blocks of queries where its scores would not fit in memory."""
    b, t, n, _ = q.shape
    call = functools.partial(flash_attention_reference, **keywords, return_lse=return_lse)
    if 4 * b * n * t * t <= DIRECT_BYTES:
        return call(q, k, v, q_segment_ids=ids, kv_segment_ids=ids)

    def block(i):
        end = jnp.full((b,), (i + 1) * BLOCK, jnp.int32) if keywords["causal"] else None
        q_ids = None if ids is None else _rows(ids, i)
        return call(_rows(q, i), k, v, q_segment_ids=q_ids, kv_segment_ids=ids, kv_lengths=end)

    return jax.tree.map(_joined, jax.lax.map(block, jnp.arange(t // BLOCK, dtype=jnp.int32)))


def _rows(x: jax.Array, i: Any) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, i * BLOCK, BLOCK, axis=1)


def _joined(blocks: jax.Array) -> jax.Array:
    x = jnp.moveaxis(blocks, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _plain_backward(keywords: dict[str, Any], q, k, v, *rest) -> Any:
    """The gradients from the saved result and log-sum-exp, which no rival has to make anew."""
    *ids, out, lse, d_out = rest
    ids = ids[0] if ids else None
    b, t, n, h = q.shape
    softcap, scale = keywords["softcap"], jnp.float32(h**-0.5)
    block_rows = BLOCK if t % BLOCK == 0 else t
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    group = lambda x: x.reshape(b, block_rows, k.shape[2], n // k.shape[2], -1)  # noqa: E731
    product = functools.partial(
        jnp.einsum, precision=plain.precision(q.dtype), preferred_element_type=jnp.float32
    )

    def block(sums, i):
        rows = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=i * block_rows, slice_size=block_rows, axis=1
        )
        part, d_part = rows(q), rows(d_out)
        scores = plain.scores(part, k, scale=None, softcap=softcap)
        weights = jnp.exp(scores - jnp.swapaxes(rows(jnp.swapaxes(lse, 1, 2)), 1, 2)[..., None])
        mask = plain.visible(
            block_rows,
            t,
            causal=keywords["causal"],
            window=keywords["window"],
            q_segment_ids=None if ids is None else rows(ids),
            kv_segment_ids=ids,
            kv_lengths=jnp.full((b,), (i + 1) * block_rows) if keywords["causal"] else None,
        )
        if mask is not None:
            weights = jnp.where(mask[:, None], weights, jnp.float32(0))
        # [B, K, G, T, S], as the products want it
        heads = lambda x: x.reshape(b, k.shape[2], -1, block_rows, t)  # noqa: E731
        d_weights = product("btkgh,bskh->bkgts", group(d_part), v)
        d_scores = heads(weights) * (
            d_weights
            - jnp.swapaxes(rows(delta), 1, 2).reshape(b, k.shape[2], -1, block_rows)[..., None]
        )
        if softcap is not None:
            d_scores = d_scores * (1 - heads(scores / jnp.float32(softcap)) ** 2)
        d_scores = d_scores.astype(q.dtype)
        d_q = product("bkgts,bskh->btkgh", d_scores, k) * scale
        d_k = product("bkgts,btkgh->bskh", d_scores, group(part)) * scale
        d_v = product("bkgts,btkgh->bskh", heads(weights).astype(q.dtype), group(d_part))
        sums = (sums[0] + d_k, sums[1] + d_v)
        return sums, d_q.reshape(b, block_rows, n, h).astype(q.dtype)

    zeros = jnp.zeros(k.shape, jnp.float32)
    count = jnp.arange(t // block_rows, dtype=jnp.int32)
    (d_k, d_v), d_q = jax.lax.scan(block, (zeros, zeros), count)
    return _joined(d_q), d_k.astype(k.dtype), d_v.astype(v.dtype)


def _make(keywords: dict[str, Any], qkv: Any, constants: Any, key: jax.Array) -> tuple:
    """Normal numbers, and of the forward pass what the backward pass is given."""
    keys = jax.random.split(key, 4)
    q, k, v, d_out = (
        jax.random.normal(one, x.shape, jnp.float32).astype(x.dtype)
        for one, x in zip(keys, (*qkv, qkv[0]), strict=True)
    )
    ids = tuple(jnp.asarray(x) for x in constants.values())
    out, lse = _plain(keywords, q, k, v, *ids, return_lse=True)
    return q, k, v, *ids, out, jnp.swapaxes(lse, 1, 2), d_out


def _sample(backward: bool, heads: Any, arguments: tuple, result: Any) -> tuple[tuple, Any]:
    """The last row of the batch: of a forward pass some queries of the first and the last key head,
    of a backward pass, whose sums go over all queries, the last key head.
    """
    n, k, _ = heads
    q, keys, values, *rest = (x[-1:] for x in arguments)
    kept = np.asarray([k - 1] if backward else sorted({0, k - 1}))
    queries = (kept[:, None] * (n // k) + np.arange(n // k)).ravel()
    of_q, of_k = (lambda x: x[:, :, queries]), (lambda x: x[:, :, kept])
    if backward:
        *ids, out, lse, d_out = rest
        part = (of_q(q), of_k(keys), of_k(values), *ids, of_q(out), lse[:, queries], of_q(d_out))
        d_q, d_k, d_v = (x[-1:] for x in result)
        return part, (of_q(d_q), of_k(d_k), of_k(d_v))
    rows = _sampled_rows(q.shape[1])
    return (of_q(q)[:, rows], of_k(keys), of_k(values), *rest), of_q(result[-1:])[:, rows]


def _sampled_rows(t: int) -> np.ndarray:
    return np.linspace(0, t - 1, min(t, SAMPLED_ROWS)).astype(int)


def _truth(keywords: dict[str, Any], q, k, v, ids=None) -> np.ndarray:
    """In float64; q has all rows, or the sampled ones."""
    at = np.arange(k.shape[1]) if q.shape[1] == k.shape[1] else _sampled_rows(k.shape[1])
    out = np.empty(q.shape, np.float64)
    for b, n in np.ndindex(q.shape[0], q.shape[2]):
        head = n // (q.shape[2] // k.shape[2])
        scores, _ = _exact_scores(keywords, q[b, :, n], k[b, :, head])
        weights = _exact_softmax(keywords, scores, at, None if ids is None else ids[b])
        out[b, :, n] = weights @ v[b, :, head].astype(np.float64)
    return out


def _exact_scores(keywords: dict[str, Any], q, k) -> tuple[np.ndarray, Any]:
    """Scores, and the slope of their soft cap."""
    scores = q.astype(np.float64) @ k.astype(np.float64).T * q.shape[-1] ** -0.5
    if (cap := keywords["softcap"]) is None:
        return scores, 1.0
    return cap * np.tanh(scores / cap), 1 - np.tanh(scores / cap) ** 2


def _exact_softmax(keywords: dict[str, Any], scores, at, ids) -> np.ndarray:
    key = np.arange(scores.shape[1])
    seen = np.ones(scores.shape, bool)
    if keywords["causal"]:
        seen &= key <= at[:, None]
    if keywords["window"] is not None:
        seen &= key > at[:, None] - keywords["window"]
    if ids is not None:
        seen &= ids[at][:, None] == ids
    e = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return e / e.sum(-1, keepdims=True)


def _truth_backward(keywords: dict[str, Any], q, k, v, *rest) -> tuple[np.ndarray, ...]:
    """In float64, from q, k, v and the cotangent alone."""
    *ids, _, _, d_out = rest
    d_q, d_k, d_v = (np.zeros(x.shape, np.float64) for x in (q, k, v))
    k, v = k.astype(np.float64), v.astype(np.float64)
    for b, n in np.ndindex(q.shape[0], q.shape[2]):
        head = n // (q.shape[2] // k.shape[2])
        for start in range(0, q.shape[1], BLOCK):
            rows = slice(start, start + BLOCK)
            at = np.arange(q.shape[1])[rows]
            part, d_o = q[b, rows, n].astype(np.float64), d_out[b, rows, n].astype(np.float64)
            scores, slope = _exact_scores(keywords, part, k[b, :, head])
            weights = _exact_softmax(keywords, scores, at, ids[0][b] if ids else None)
            d_weights = d_o @ v[b, :, head].T
            d_scores = weights * (d_weights - np.sum(weights * d_weights, -1, keepdims=True))
            d_scores *= slope * q.shape[-1] ** -0.5
            d_q[b, rows, n] = d_scores @ k[b, :, head]
            d_k[b, :, head] += d_scores.T @ part
            d_v[b, :, head] += weights.T @ d_o
    return d_q, d_k, d_v
