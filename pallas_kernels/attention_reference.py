"""What attention means, for every implementation: its checks, its mask, and the plain path.

out[t] = sum_s exp(score[t, s]) v[s] / (exp(sink) + sum_s exp(score[t, s])), over the keys s that
query t sees. q is [B, T, N, H], k and v [B, S, K, H]; query head n reads key head n // (N // K).
score = scale q k, and with `softcap` c it is c tanh(score / c); a sink is a score of a head that
has no value. Sources: Vaswani et al. 2017, arXiv:1706.03762; soft cap: Gemma 2, arXiv:2408.00118;
sinks: gpt-oss, arXiv:2508.10925.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Integer

from pallas_kernels.matmul_finish import precision
from pallas_kernels.options import (
    check_arrays,
    check_flags,
    check_number,
    check_scale,
    is_known,
)
from pallas_kernels.whole_number import is_whole

UNSEEN = -1e30  # a score that no query sees: finite, so that no row gives NaN


def attention_reference(
    q,
    k,
    v,
    *,
    causal=True,
    scale=None,
    window=None,
    softcap=None,
    q_segment_ids=None,
    kv_segment_ids=None,
    kv_lengths=None,
    sinks=None,
    return_lse=False,
) -> Any:
    """The mathematics in plain JAX: [B, T, N, H] in q's dtype, and with `return_lse` also the
    logarithm of the denominator, float32 [B, T, N], -inf where nothing was summed.

    What a query sees is said in `visible`; one that sees no key gives zeros. Scores, softmax and
    sums are float32; the weights are rounded to v's dtype before their product with v, as a kernel
    must. Differentiable in q, k, v and sinks; the gradient of a query that sees no key is zero.
    """
    mask = visible(
        q.shape[1],
        k.shape[1],
        causal=causal,
        window=window,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        kv_lengths=kv_lengths,
    )
    weights, lse = softmax(scores(q, k, scale=scale, softcap=softcap), mask, sinks)
    out = weighted(weights, v, q.dtype)
    return (out, lse) if return_lse else out


def scores(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    *,
    scale: float | None,
    softcap: float | None,
) -> Float[Array, "B N T S"]:
    """Scaled and soft-capped, in float32."""
    b, t, n, h = q.shape
    products = jnp.einsum(
        "btkgh,bskh->bkgts",
        q.reshape(b, t, k.shape[2], n // k.shape[2], h),
        k,
        precision=precision(q.dtype),
        preferred_element_type=jnp.float32,
    ).reshape(b, n, t, k.shape[1])
    products = products * jnp.float32(h**-0.5 if scale is None else scale)
    if softcap is None:
        return products
    return jnp.tanh(products / jnp.float32(softcap)) * jnp.float32(softcap)


def softmax(
    scores: Float[Array, "B N T S"],
    mask: Bool[Array, "#B #T S"] | None,
    sinks: Float[Array, " N"] | None,
) -> tuple[Float[Array, "B N T S"], Float[Array, "B T N"]]:
    """The weights, and the logarithm of what they were divided by."""
    if mask is not None:
        mask = mask[:, None]
        scores = jnp.where(mask, scores, jnp.float32(UNSEEN))
    top = jnp.max(scores, axis=-1, keepdims=True, initial=UNSEEN)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)[None, :, None, None]
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(scores - top)
    if mask is not None:  # a query that sees nothing has every score at UNSEEN, every weight at 1
        weights = jnp.where(mask, weights, jnp.float32(0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    summed = total > 0
    total = jnp.where(summed, total, jnp.float32(1))
    lse = jnp.where(summed, top + jnp.log(total), -jnp.inf)
    return weights / total, jnp.swapaxes(lse[..., 0], 1, 2)


def weighted(
    weights: Float[Array, "B N T S"], v: Float[Array, "B S K H"], dtype: Any
) -> Float[Array, "B T N H"]:
    """The result, given what the softmax gave."""
    (b, n, t, s), (_, _, kv_heads, h) = weights.shape, v.shape
    out = jnp.einsum(
        "bkgts,bskh->btkgh",
        weights.astype(v.dtype).reshape(b, kv_heads, n // kv_heads, t, s),
        v,
        precision=precision(v.dtype),
        preferred_element_type=jnp.float32,
    )
    return out.reshape(b, t, n, h).astype(dtype)


def in_32_bits(window: int) -> int:
    """A window that sees as much, and whose sum with a key does not wrap."""
    return min(window, 2**30)


def visible(
    q_len: int,
    kv_len: int,
    *,
    causal: bool,
    window: int | None,
    q_segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    kv_lengths: Integer[Array, " B"] | None = None,
) -> Bool[Array, "#B #T S"] | None:
    """Which keys each query sees; None if it sees all.

    Row b has kv_lengths[b] keys (all S if None), of which those past S are not there, and its query
    t sits at key kv_lengths[b] - T + t: aligned to the end. (So does a traced length beyond S place
    its queries: a chunk padded on the right has padding past the end of a cache.) With causal a
    query sees no later key; `window=w` leaves the last w keys, its own included, and without causal
    the keys nearer than w to either side. Segment ids of both sides must agree.
    """
    ends = jnp.full((1,), kv_len, jnp.int32) if kv_lengths is None else kv_lengths.astype(jnp.int32)
    key = jnp.arange(kv_len, dtype=jnp.int32)[None, None, :]
    at = (ends[:, None] - q_len + jnp.arange(q_len, dtype=jnp.int32)[None, :])[:, :, None]
    rules = []
    if causal and q_len != 1:
        rules.append(key <= at)  # and so within the row's keys
    elif kv_lengths is not None:
        rules.append(key < ends[:, None, None])
    # A length beyond kv_len places queries further from the first keys than there are keys
    placed = kv_lengths is not None or not (is_known(q_len) and is_known(kv_len))
    if window is not None and (placed or window < max(q_len, kv_len)):
        near = in_32_bits(window)
        rules.append(key > at - near)
        if not causal:
            rules.append(key < at + near)
    if q_segment_ids is not None and kv_segment_ids is not None:
        rules.append(q_segment_ids[:, :, None] == kv_segment_ids[:, None, :])
    mask = None
    for rule in rules:
        mask = rule if mask is None else mask & rule
    return mask


def check_window(name: str, window: Any) -> None:
    """Refuses what is no number of keys; `name` is who speaks."""
    if window is not None and (not is_whole(window) or window < 1):
        raise ValueError(
            f"{name}: window must be a whole number, 1 at least, or None, got {window!r}"
        )


def check(
    name: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    scale: Any,
    window: int | None,
    softcap: float | None,
    q_segment_ids: Any,
    kv_segment_ids: Any,
    kv_lengths: Any,
    sinks: Any,
) -> None:
    """Refuses what no implementation of attention can take; `name` is who speaks.

    Lengths outside [0, S] are refused where they are known; where they are traced, `visible` says
    what they mean. Shapes suffice (`jax.ShapeDtypeStruct`).
    """
    of_tokens = {"q_segment_ids": q_segment_ids, "kv_segment_ids": kv_segment_ids}
    check_arrays(name, q=q, k=k, v=v, **of_tokens, kv_lengths=kv_lengths, sinks=sinks)
    check_flags(name, causal=causal)
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"{name}: q {q.shape}, k {k.shape}, v {v.shape} are not [B, T, N, H] and twice "
            "[B, S, K, H]"
        )
    (b, t, n, h), (kb, s, kv_heads, kh) = q.shape, k.shape
    if b != kb or h != kh:
        raise ValueError(f"{name}: q {q.shape} and k {k.shape} differ in batch or head width")
    if not kv_heads or n % kv_heads:
        raise ValueError(
            f"{name}: {n} query heads cannot share {kv_heads} key heads; N must be a multiple of K"
        )
    for what, array in (("q", q), ("k", k), ("v", v)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name}: {what} is {array.dtype}; it must be floating point")
    if not h:
        raise ValueError(f"{name}: q {q.shape} has heads of no numbers; H must be 1 at least")
    if scale is not None:
        check_scale(name, scale)
    check_window(name, window)
    check_number(name, "softcap", softcap, positive=True, optional=True)
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise ValueError(
            f"{name}: segment ids are given for one side; both sides or neither have them"
        )
    for what, array, shape in (
        ("q_segment_ids", q_segment_ids, (b, t)),
        ("kv_segment_ids", kv_segment_ids, (b, s)),
        ("kv_lengths", kv_lengths, (b,)),
    ):
        if array is None:
            continue
        if array.shape != shape:
            raise ValueError(f"{name}: {what} has shape {array.shape}, not {shape}")
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name}: {what} is {array.dtype}; it must hold integers")
    if sinks is not None and (sinks.shape != (n,) or sinks.dtype != jnp.float32):
        raise ValueError(
            f"{name}: sinks is {sinks.dtype}{list(sinks.shape)}; it must be float32, one number a "
            f"query head: [{n}]"
        )
    if kv_lengths is None or isinstance(kv_lengths, (Tracer, jax.ShapeDtypeStruct)):
        return
    for row, length in enumerate(kv_lengths.tolist()):
        if not 0 <= length <= s:
            raise ValueError(
                f"{name}: kv_lengths[{row}] is {length}; a row has 0 to {s} keys, which the cache "
                "has room for"
            )
