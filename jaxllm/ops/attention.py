"""Attention for training, prefill and decoding: one meaning, several implementations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Integer, Num

from jaxllm.ops._select import Implementation, Table, pallas, select, unless_symbolic
from pallas_kernels import attention_fp8
from pallas_kernels import attention_reference as reference
from pallas_kernels import softmax as softmax_kernels
from pallas_kernels.attention_fp8 import FP8, TWO_SUMS
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.decode_attention import why_not as why_not_decode
from pallas_kernels.device import why_not_interpreted
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.flash_attention import why_not as why_not_flash
from pallas_kernels.options import check_arrays, check_flags

CODES = (jnp.int8, FP8)


def attention(
    q: Float[Array, "B T N H"],
    k: Num[Array, "B S K H"],
    v: Num[Array, "B S K H"],
    *,
    q_scale: Float[Array, "*N"] | None = None,
    k_scale: Float[Array, "*scale"] | None = None,
    v_scale: Float[Array, "*scale"] | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    q_segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    kv_lengths: Integer[Array, " B"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    return_weights: bool = False,
    implementation: str | Mapping[str, str] = "auto",
) -> Any:
    """Softmax attention with grouped heads: query head n reads key head n // (N // K).

    Row b has kv_lengths[b] keys (all S if None), and its query t sits at key kv_lengths[b] - T + t:
    aligned to the end, as decoding needs. With causal a query sees no later key; `window=w` leaves
    the last w keys, its own included (without causal: the keys nearer than w). Segment ids, given
    for both sides, must agree. A query that sees no key gets zeros. Keys and values must be finite,
    those that nobody sees too, for 0 times NaN is NaN. `scale` is 1 / sqrt(H) if None;
    `softcap=c` turns a score s into c * tanh(s / c). `sinks` are float32, for each query head a
    score that takes part in its softmax and has no value.
    A traced length may be larger than S, as a chunk's is whose padding lies past the end of the
    cache: it still says where the queries sit, and the keys past S are not there. (Of a single
    query it counts as S.)
    With k_scale and v_scale, float32 [B, S, K], k and v are codes of int8 or float8_e4m3fn: a key
    is its scale times what is stored, rounded to q's dtype where an implementation makes numbers of
    them. No gradient goes to codes.
    If q is float8_e4m3fn, so are k and v, and each may have a scale of one number or one a head,
    float32, 1 if None: q_scale [N], k_scale and v_scale [K]. The result is bfloat16, how far from
    the exact one `attention_fp8` says, and has no gradient.
    Returns [B, T, N, H]; with `return_weights` also what the softmax gave, float32 [B, N, T, S].
    Dtypes: float32, bfloat16, float16; scores and softmax in float32; the result has q's dtype.
    Where k and v have another of these, as in a cache, the products have the wider dtype of both
    sides, and neither attention's kernels nor cuDNN take the call.
    Raises: ValueError if shapes disagree, a dtype is none of these, only one side has segment ids,
    a length that is not traced is outside [0, S], `scale` is no number or NaN, or a scale of float8
    queries, keys or values that is not traced is not positive and finite. NotImplementedError if
    the named implementation cannot run the call, or if a gradient of float8 queries is asked for.
    """
    masks = {
        "window": window,
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "kv_lengths": kv_lengths,
    }
    keys: Any = (k, v)
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    check_arrays("attention", q=q, k=k, v=v)
    check_flags("attention", return_weights=return_weights)
    coded = q.dtype != FP8 and not (k_scale is None and v_scale is None)
    if coded:
        _check_codes(k, v, k_scale, v_scale)
        keys = _like_numbers(q, k, v, k_scale)
    numbers = {"scale": scale, "softcap": softcap}
    reference.check("attention", q, *keys, causal=causal, **masks, **numbers, sinks=sinks)
    own = {"q_scale": q_scale, "k_scale": None, "v_scale": None} if coded else scales
    attention_fp8.check_scales("attention", q, *keys, **own)
    if kv_lengths is not None and q.shape[1] == 1:
        masks["kv_lengths"] = jnp.clip(jnp.asarray(kv_lengths, jnp.int32), 0, k.shape[1])
    if q.dtype == FP8:
        q, k, v, sinks, scales = attention_fp8.forward_only("attention", (q, k, v, sinks, scales))
    kwargs = {
        **scales,
        "causal": causal,
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
        **masks,
        "softcap": softcap,
        "sinks": sinks,
        "return_weights": return_weights,
    }
    return select("attention", ATTENTION, implementation, q, k, v, **kwargs)(q, k, v, **kwargs)


def _check_codes(k, v, k_scale, v_scale) -> None:
    check_arrays("attention", k_scale=k_scale, v_scale=v_scale)
    for name, x, scale in (("k", k, k_scale), ("v", v, v_scale)):
        if scale is None:
            raise ValueError("attention: scales are given for one side; both or neither have them")
        if x.dtype != k.dtype or x.dtype not in CODES:
            raise ValueError(
                f"attention: k is {k.dtype} and v {v.dtype}; with scales both must be "
                + " or ".join(jnp.dtype(dtype).name for dtype in CODES)
            )
        if scale.shape != x.shape[:3] or scale.dtype != jnp.float32:
            raise ValueError(
                f"attention: {name}_scale is {scale.dtype}{list(scale.shape)}; it must be float32, "
                f"a number for each key and head: {list(x.shape[:3])}"
            )


def _numbers(q, k, v, k_scale, v_scale) -> Any:
    """Keys and values in q's dtype, of codes too."""
    if k_scale is None:
        return k, v
    return tuple(
        (codes.astype(jnp.float32) * scale[..., None]).astype(q.dtype)
        for codes, scale in ((k, k_scale), (v, v_scale))
    )


def _like_numbers(q, k, v, k_scale) -> Any:
    """What `_numbers` gives, as shapes where it would be made."""
    if k_scale is None:
        return k, v
    return tuple(jax.ShapeDtypeStruct(x.shape, q.dtype) for x in (k, v))


def _over_codes(entry: Implementation) -> Implementation:
    """The entry, which reads numbers only, for a cache of codes too: it is given their numbers."""

    def run(q, k, v, *, q_scale, k_scale, v_scale, **kwargs):
        del q_scale
        return entry.run(q, *_numbers(q, k, v, k_scale, v_scale), **kwargs)

    def asked(why):
        def why_not(q, k, v, *, q_scale, k_scale, v_scale, **kwargs):
            del q_scale, v_scale
            if q.dtype == FP8:
                return "takes no queries of float8_e4m3fn"
            return why(q, *_like_numbers(q, k, v, k_scale), **kwargs)

        return why_not

    return Implementation(run, asked(entry.why_not), asked(entry.not_auto))


def _attention_xla(q, k, v, *, q_scale, k_scale, v_scale, return_weights, **kwargs):
    if q.dtype == FP8:
        kwargs |= {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return attention_fp8.attention_fp8_reference(
            q, k, v, **kwargs, weights_dtype=jnp.bfloat16, return_weights=return_weights
        )
    k, v = _numbers(q, k, v, k_scale, v_scale)
    if not return_weights:
        out = reference.attention_reference(q, k, v, **kwargs)
        return checkpoint_name(out, "attention_output")  # as the kernels name theirs
    of_scores = {name: kwargs.pop(name) for name in ("scale", "softcap")}
    sinks = kwargs.pop("sinks")
    mask = reference.visible(q.shape[1], k.shape[1], **kwargs)
    weights, _ = reference.softmax(reference.scores(q, k, **of_scores), mask, sinks)
    return reference.weighted(weights, v, q.dtype), weights


def _decodes(q, q_segment_ids) -> bool:
    """Whether the call is one new token a row: a kernel of its own, which has no segments and no
    float8 queries.
    """
    return q.shape[1] == 1 and q_segment_ids is None and q.dtype != FP8


def _as_decoding(q, k, *, causal, scale, window, softcap, kv_lengths, sinks, **segments):
    """What the call is for `decode_attention`: the lengths, and the rest."""
    del causal, segments  # the one query is the last: no key is later
    if kv_lengths is None:
        kv_lengths = jnp.full((q.shape[0],), k.shape[1], jnp.int32)
    if window is not None and window >= k.shape[1]:
        window = None
    return kv_lengths, {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}


def _attention_pallas(
    q, k, v, *, q_scale, k_scale, v_scale, return_weights, interpret=False, **kwargs
):
    del return_weights
    if q.dtype == FP8:
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return flash_attention(q, k, v, **scales, **kwargs, interpret=interpret)
    if _decodes(q, kwargs["q_segment_ids"]):
        kv_lengths, rest = _as_decoding(q, k, **kwargs)
        rest |= {"k_scale": k_scale, "v_scale": v_scale}
        return decode_attention(q, k, v, kv_lengths, **rest, interpret=interpret)
    k, v = _numbers(q, k, v, k_scale, v_scale)
    return flash_attention(q, k, v, **kwargs, interpret=interpret)


def _why_not_pallas(
    q, k, v, *, device, q_scale, k_scale, v_scale, return_weights, **kwargs
) -> str | None:
    del q_scale
    if return_weights:
        return "returns no weights: it never has them all"
    if _decodes(q, kwargs["q_segment_ids"]):
        lengths = jax.ShapeDtypeStruct(q.shape[:1], jnp.int32)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        scores = {"scale": kwargs["scale"], "softcap": kwargs["softcap"]}
        return why_not_decode(q, k, v, lengths, **scales, **scores, device=device)
    keys = (k, v) if q.dtype == FP8 else _like_numbers(q, k, v, k_scale)
    return why_not_flash(q, *keys, **kwargs, device=device)


def _has_own_mask(window, q_segment_ids, kv_lengths, kv_len) -> bool:
    """Whether more than `causal` says which keys a query sees."""
    narrow = window is not None and window < kv_len
    return narrow or q_segment_ids is not None or kv_lengths is not None


def _attention_unfused(
    q, k, v, *, causal, scale, window, softcap, sinks, return_weights, interpret=False, **sides
):
    """Matmul, our softmax, matmul: scores and weights go to memory, and nothing else does."""
    del sinks
    t, s = q.shape[1], k.shape[1]
    kwargs: dict[str, Any] = {"causal": causal and t > 1}
    if _has_own_mask(window, sides["q_segment_ids"], sides["kv_lengths"], max(t, s)):
        mask = reference.visible(t, s, causal=causal, window=window, **sides)
        kwargs = {"mask": None if mask is None else mask[:, None]}
    if softcap is None:  # the kernel scales as it reads
        scores, kwargs["scale"] = reference.scores(q, k, scale=1.0, softcap=None), scale
    else:
        scores = reference.scores(q, k, scale=scale, softcap=softcap)
    weights = softmax_kernels.scale_softmax(scores, **kwargs, interpret=interpret)
    out = reference.weighted(weights, v, q.dtype)
    return (out, weights) if return_weights else out


def _why_not_unfused(
    q, k, v, *, device, causal, window, q_segment_ids, kv_lengths, sinks, **rest
) -> str | None:
    del v, causal, rest
    if sinks is not None:
        return "has no sinks"
    b, t, n, _ = q.shape
    s = k.shape[1]
    scores = jax.ShapeDtypeStruct((b, n, t, s), jnp.float32)
    mask = None
    if _has_own_mask(window, q_segment_ids, kv_lengths, max(t, s)):
        mask = jax.ShapeDtypeStruct((b, 1, t, s), jnp.bool_)
    reason = softmax_kernels.why_not(scores, mask=mask, device=device)
    return None if reason is None else f"its scale_softmax: {reason}"


def _pallas_not_auto(q, k, v, *, device, **kwargs) -> str | None:
    del k, v, device
    t, width = q.shape[1], q.shape[-1]
    if q.dtype == FP8:
        if width <= TWO_SUMS:
            return None
        return f"values of heads of {width} are summed in the tensor cores' 13 bits over all keys"
    names = "q_segment_ids kv_lengths softcap sinks".split()
    alone = all(kwargs.get(name) is None for name in names)
    if not alone or t == 1 or t >= 8192 or width <= 128:
        return None
    return f"heads of {width} may be trained, which was not timed beside cudnn"


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
    if q_segment_ids is None and t == 1 and (window is None or window >= s):
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
    sinks,
    return_weights,
) -> str | None:
    del kv_segment_ids
    h, t, s = q.shape[-1], q.shape[1], k.shape[1]
    if 0 in (*q.shape, *k.shape):
        return f"nothing to attend to: q is {list(q.shape)}, k is {list(k.shape)}"
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
    if isinstance(scale, Tracer | jax.ShapeDtypeStruct):
        return "the scale is part of the kernel, and here it is traced"
    if softcap is not None:
        return "has no soft cap"
    if sinks is not None:
        return "has no sinks"
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
    sinks,
    return_weights,
):
    del softcap, sinks, return_weights
    scale = float(scale)
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
        mask = reference.visible(
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


UNFUSED = pallas(_attention_unfused, _why_not_unfused, _unfused_not_auto, name="unfused")
# The implementations that have the scores of a whole call in memory, twice
HOLDS_SCORES = (*UNFUSED, "xla")

ATTENTION: Table = {
    # First, for it was the fastest or as fast wherever it was measured. H200, bfloat16, 32 / 8
    # heads of 128, causal, us, ours and cuDNN's:
    # - forward, 16 x 1024 tokens: 243 and 284; 4 x 4096: 819 and 916; 1 x 16384: 3374 and 3791
    # - backward, 16 x 1024: 878 and 1097; 4 x 4096: 2697 and 2827; 2 x 8192: 5235 and 5304;
    #   heads of 64, 2 x 8192: 2707 and 3281; 14 / 2 heads of 64, 1 x 512: 25 and 27
    # - a token, 1 row over 1k, 8k, 32k keys: 4.4 and 6.7, 11.1 and 14.8, 33.2 and 37.0
    # cuDNN takes packed texts by a mask of T x S, twenty times as slow.
    **pallas(
        _attention_pallas, _why_not_pallas, _pallas_not_auto, not_interpreted=why_not_interpreted
    ),
    "cudnn": _over_codes(Implementation(_attention_cudnn, unless_symbolic(_why_not_cudnn))),
    **{name: _over_codes(entry) for name, entry in UNFUSED.items()},
    "xla": Implementation(_attention_xla),
}
