"""Attention for training, prefill and decoding: one meaning, several implementations."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.ops._select import Implementation, Table, select
from jaxllm.ops.linear import precision
from pallas_kernels import device as device_lib
from pallas_kernels import softmax as softmax_kernels


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    q_segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    return_weights: bool = False,
    implementation: str | Mapping[str, str] = "auto",
) -> Any:
    """Softmax attention with grouped heads: query head n reads key head n // (N // K).

    Row b has kv_lengths[b] keys (all S if None), and its query t sits at key kv_lengths[b] - T + t:
    aligned to the end, as decoding needs. With causal a query sees no later key; `window=w` leaves
    the last w keys, its own included (without causal: the keys nearer than w). Segment ids, given
    for both sides, must agree. A query that sees no key gets zeros. `scale` is 1 / sqrt(H) if None;
    `softcap=c` turns a score s into c * tanh(s / c).
    Returns [B, T, N, H]; with `return_weights` also what the softmax gave, float32 [B, N, T, S].
    Dtypes: float32, bfloat16, float16; scores and softmax in float32; the result has q's dtype.
    Raises: ValueError if shapes disagree or only one side has segment ids. NotImplementedError if
    the named implementation cannot run the call.
    """
    _check(q, k, v, window, q_segment_ids, kv_segment_ids, kv_lengths)
    kwargs = {
        "causal": causal,
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
        "window": window,
        "softcap": softcap,
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "kv_lengths": kv_lengths,
        "return_weights": return_weights,
    }
    return select("attention", ATTENTION, implementation, q, k, v, **kwargs)(q, k, v, **kwargs)


def _check(q, k, v, window, q_segment_ids, kv_segment_ids, kv_lengths) -> None:
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"attention: q {q.shape}, k {k.shape}, v {v.shape} are not [B, T, N, H] and twice "
            "[B, S, K, H]"
        )
    (b, t, n, h), (kb, s, kv_heads, kh) = q.shape, k.shape
    if b != kb or h != kh:
        raise ValueError(f"attention: q {q.shape} and k {k.shape} differ in batch or head width")
    if n % kv_heads:
        raise ValueError(
            f"attention: {n} query heads cannot share {kv_heads} key heads; N must be a multiple "
            "of K"
        )
    if window is not None and window < 1:
        raise ValueError(f"attention: window must be at least 1 or None, got {window}")
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise ValueError(
            "attention: segment ids are given for one side; both sides or neither have them"
        )
    for name, ids, shape in (("q", q_segment_ids, (b, t)), ("kv", kv_segment_ids, (b, s))):
        if ids is not None and ids.shape != shape:
            raise ValueError(f"attention: {name}_segment_ids has shape {ids.shape}, not {shape}")
    if kv_lengths is not None and kv_lengths.shape != (b,):
        raise ValueError(f"attention: kv_lengths has shape {kv_lengths.shape}, not {(b,)}")


def visible(
    q_len: int,
    kv_len: int,
    *,
    causal: bool,
    window: int | None,
    q_segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
) -> Bool[Array, "#B T S"] | None:
    """Which keys each query sees, by the rules of `attention`; None if it sees all."""
    ends = jnp.full((1,), kv_len, jnp.int32) if kv_lengths is None else kv_lengths.astype(jnp.int32)
    key = jnp.arange(kv_len, dtype=jnp.int32)[None, None, :]
    at = (ends[:, None] - q_len + jnp.arange(q_len, dtype=jnp.int32)[None, :])[:, :, None]
    rules = []
    if causal and q_len > 1:
        rules.append(key <= at)  # and so within the row's keys
    elif kv_lengths is not None:
        rules.append(key < ends[:, None, None])
    if window is not None and window < max(q_len, kv_len):
        rules.append(key > at - window)
        if not causal:
            rules.append(key < at + window)
    if q_segment_ids is not None and kv_segment_ids is not None:
        rules.append(q_segment_ids[:, :, None] == kv_segment_ids[:, None, :])
    mask = None
    for rule in rules:
        mask = rule if mask is None else mask & rule
    return mask


def _scores(q, k):
    """q k^T in float32, [B, K, N / K, T, S]."""
    b, t, n, h = q.shape
    return jnp.einsum(
        "btkgh,bskh->bkgts",
        q.reshape(b, t, k.shape[2], n // k.shape[2], h),
        k,
        precision=precision(q.dtype),
        preferred_element_type=jnp.float32,
    )


def _weighted(weights, q, v, return_weights):
    """The result, given what the softmax gave."""
    out = jnp.einsum(
        "bkgts,bskh->btkgh",
        weights.astype(v.dtype),
        v,
        precision=precision(v.dtype),
        preferred_element_type=jnp.float32,
    )
    out = out.reshape(q.shape).astype(q.dtype)
    if not return_weights:
        return out
    return out, weights.reshape(weights.shape[0], q.shape[2], *weights.shape[-2:])


def _capped(scores, softcap):
    return jnp.tanh(scores / jnp.float32(softcap)) * jnp.float32(softcap)


def _attention_xla(q, k, v, *, causal, scale, window, softcap, return_weights, **sides):
    scores = _scores(q, k) * jnp.float32(scale)
    if softcap is not None:
        scores = _capped(scores, softcap)
    mask = visible(q.shape[1], k.shape[1], causal=causal, window=window, **sides)
    if mask is not None:
        mask = mask[:, None, None]
        scores = jnp.where(mask, scores, jnp.float32(-1e30))
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    if mask is not None:  # a query that sees nothing has every score at -1e30, so every weight at 1
        weights = jnp.where(mask, weights, jnp.float32(0))
    total = jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), jnp.float32(1e-30))
    return _weighted(weights / total, q, v, return_weights)


def _has_own_mask(window, q_segment_ids, kv_lengths, kv_len) -> bool:
    """Whether more than `causal` says which keys a query sees."""
    narrow = window is not None and window < kv_len
    return narrow or q_segment_ids is not None or kv_lengths is not None


def _attention_unfused(
    q, k, v, *, causal, scale, window, softcap, return_weights, interpret=False, **sides
):
    """Matmul, our softmax, matmul: scores and weights go to memory, and nothing else does."""
    t, s = q.shape[1], k.shape[1]
    scores, kwargs = _scores(q, k), {"scale": scale, "causal": causal and t > 1}
    if softcap is not None:
        scores, kwargs["scale"] = _capped(scores * jnp.float32(scale), softcap), 1.0
    if _has_own_mask(window, sides["q_segment_ids"], sides["kv_lengths"], max(t, s)):
        mask = visible(t, s, causal=causal, window=window, **sides)
        kwargs |= {"causal": False, "mask": None if mask is None else mask[:, None, None]}
    weights = softmax_kernels.scale_softmax(scores, **kwargs, interpret=interpret)
    return _weighted(weights, q, v, return_weights)


def _why_not_unfused(
    q, k, v, *, device, causal, window, q_segment_ids, kv_lengths, **rest
) -> str | None:
    del v, causal, rest
    b, t, n, _ = q.shape
    s = k.shape[1]
    scores = jax.ShapeDtypeStruct((b, n, t, s), jnp.float32)
    mask = None
    if _has_own_mask(window, q_segment_ids, kv_lengths, max(t, s)):
        mask = jax.ShapeDtypeStruct((b, 1, t, s), jnp.bool_)
    reason = softmax_kernels.why_not(scores, mask=mask, device=device)
    return None if reason is None else f"its scale_softmax: {reason}"


def _why_not_unfused_interpret(q, k, v, *, device, **kwargs) -> str | None:
    del device
    return _why_not_unfused(q, k, v, device=device_lib.INTERPRETED, **kwargs)


def _unfused_not_auto(q, k, v, *, device, **kwargs) -> str | None:
    # H200, float32, 2048 x 2048, 32 heads of 128, causal: 1781 us, XLA 2025 us
    del v, device, kwargs
    t, s = q.shape[1], k.shape[1]
    return (
        f"no call as small (T={t}, S={s}) was measured faster than xla" if t * s < 2**20 else None
    )


def _cudnn_form(t, s, causal, window, q_segment_ids, kv_lengths) -> str:
    """How the call is said to cuDNN, whose causal mask is aligned to the start if T is not S."""
    if q_segment_ids is None and kv_lengths is None and causal and t == s:
        return "causal"
    if q_segment_ids is None and t == 1 and causal and (window is None or window >= s):
        return "lengths"
    return "mask"


def _why_not_cudnn(
    q,
    k,
    v,
    *,
    device,
    causal,
    scale,
    window,
    softcap,
    q_segment_ids,
    kv_segment_ids,
    kv_lengths,
    return_weights,
) -> str | None:
    del scale, kv_segment_ids
    h, t, s = q.shape[-1], q.shape[1], k.shape[1]
    if device.platform != "gpu":
        return f"needs an NVIDIA GPU, found {device.name or device.platform}"
    if device.capability < 8.0:
        found = device.capability or "an unknown one"
        return f"needs compute capability 8.0 or newer, found {found} ({device.name})"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 or float16, got {q.dtype}"
    if not q.dtype == k.dtype == v.dtype:
        return f"takes one dtype, got q {q.dtype}, k {k.dtype}, v {v.dtype}"
    widest = 256 if device.capability >= 9.0 else 128
    if h % 8 or h > widest:
        return f"head width {h} is not a multiple of 8 up to {widest}"
    if softcap is not None:
        return "has no soft cap"
    if return_weights:
        return "returns no weights: it never has them all"
    if _cudnn_form(t, s, causal, window, q_segment_ids, kv_lengths) == "mask" and (t % 2 or s % 2):
        return f"takes a mask only for even lengths, got T={t}, S={s}"
    return None


def _attention_cudnn(
    q,
    k,
    v,
    *,
    causal,
    scale,
    window,
    softcap,
    q_segment_ids,
    kv_segment_ids,
    kv_lengths,
    return_weights,
):
    del softcap, return_weights
    t, s = q.shape[1], k.shape[1]
    form = _cudnn_form(t, s, causal, window, q_segment_ids, kv_lengths)
    if form == "causal":
        left = None if window is None or window >= s else (window - 1, 0)
        return jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=True, local_window_size=left, implementation="cudnn"
        )
    if form == "lengths":
        # A full row that takes no more tokens asks for one key more than there is room for.
        held = None if kv_lengths is None else jnp.minimum(kv_lengths, s)
        out = jax.nn.dot_product_attention(
            q, k, v, scale=scale, key_value_seq_lengths=held, implementation="cudnn"
        )
        seen = None if kv_lengths is None else (kv_lengths > 0)[:, None]
    else:
        mask = visible(
            t,
            s,
            causal=causal,
            window=window,
            q_segment_ids=q_segment_ids,
            kv_segment_ids=kv_segment_ids,
            kv_lengths=kv_lengths,
        )
        out = jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=scale,
            mask=None if mask is None else mask[:, None],
            implementation="cudnn",
        )
        seen = None if mask is None else jnp.any(mask, axis=-1)
    # cuDNN gives a query that sees no key the mean of the values; our contract says zeros.
    return out if seen is None else jnp.where(seen[:, :, None, None], out, jnp.zeros_like(out))


ATTENTION: Table = {
    "cudnn": Implementation(_attention_cudnn, _why_not_cudnn),
    "unfused": Implementation(
        _attention_unfused,
        _why_not_unfused,
        _unfused_not_auto,
    ),
    "unfused-interpret": Implementation(
        functools.partial(_attention_unfused, interpret=True),
        _why_not_unfused_interpret,
        lambda *args, **kwargs: "runs only by name: it is a test, and slow",
    ),
    "xla": Implementation(_attention_xla),
}
