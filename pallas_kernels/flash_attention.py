"""Flash attention: softmax(scale q k^T) v with nothing of size T x S in memory, and its gradient.

q [B, T, N, H], k and v [B, S, K, H]; query head n reads key head n // (N // K). What is computed,
and which keys a query sees, `attention_reference` says; what a block does,
`flash_attention_forward` and `flash_attention_backward`; for float8 `attention_fp8` and
`flash_attention_fp8`.
Sources: Dao 2023, arXiv:2307.08691; Shah et al. 2024 (FlashAttention-3), arXiv:2407.08608.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Integer

from pallas_kernels import attention_fp8, flash_attention_fp8, soft_cap, tuned
from pallas_kernels import device as device_lib
from pallas_kernels.attention_fp8 import FP8
from pallas_kernels.attention_reference import attention_reference, check, in_32_bits
from pallas_kernels.device import SHARED_BYTES, Device
from pallas_kernels.flash_attention_backward import backward
from pallas_kernels.flash_attention_forward import forward, padded_width, shared_bytes
from pallas_kernels.flash_attention_plan import Config, Static
from pallas_kernels.flash_attention_tiles import REGISTERS
from pallas_kernels.options import check_options
from pallas_kernels.wgmma_tiles import WGMMA_ROWS

DTYPES = (jnp.bfloat16, jnp.float16, FP8)
WIDEST = 256
MANY_QUERIES = 2**17  # of all heads: eight tiles a multiprocessor


def flash_attention(
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
    kv_lengths: Integer[Array, " B"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    q_scale: Float[Array, "*N"] | None = None,
    k_scale: Float[Array, "*K"] | None = None,
    v_scale: Float[Array, "*K"] | None = None,
    return_lse: bool = False,
    config: Config | None = None,
    interpret: bool = False,
) -> Any:
    """Softmax attention with grouped heads; with `return_lse` also the float32 [B, T, N] logarithm
    of each query's denominator, -inf where nothing was summed.

    Row b has kv_lengths[b] keys (all S if None), and its query t sits at key kv_lengths[b] - T + t:
    aligned to the end. With causal a query sees no later key; `window=w` leaves the last w keys,
    its own included (without causal: the keys nearer than w). Segment ids, given for both sides,
    must agree. `scale` is 1 / sqrt(H) if None; `softcap=c` turns a score s into c tanh(s / c);
    sinks are a score a head that has no value. A query that sees no key gives zeros. Keys and
    values must be finite, those that nobody sees too, for 0 times NaN is NaN.
    Dtypes: bfloat16 or float16; scores, sums and statistics are float32, and the weights are
    rounded to v's dtype for their product with v; the result has q's dtype.
    Or q, k and v are all float8_e4m3fn: `attention_fp8` says what the scales are (float32, one
    number or one a head, 1 if None) and how far the result, bfloat16, may be from the exact one.
    Gradients: of q, k, v and sinks, also through the logarithm; float8 has none.
    Raises: ValueError if shapes or dtypes disagree, a known length is not in [0, S] (a traced one
    means what `attention_reference.visible` says), or a known scale is not positive and finite.
    NotImplementedError without a Hopper GPU (unless `interpret`), for what `why_not` says, or if a
    gradient of float8 is asked for.
    """
    masks: dict[str, Any] = {
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "kv_lengths": kv_lengths,
    }
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    numbers: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    check("flash_attention", q, k, v, causal=causal, **numbers, sinks=sinks, **masks)
    check_options("flash_attention", config, Config, return_lse=return_lse, interpret=interpret)
    attention_fp8.check_scales("flash_attention", q, k, v, **scales)
    if config is not None and (problem := _config_problem(config, q)):
        raise ValueError(f"flash_attention: {config}: {problem}")
    keywords: dict[str, Any] = {"causal": causal, **numbers, **masks, "sinks": sinks}
    keywords |= {"return_lse": return_lse, **scales}
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    reason = why_not(q, k, v, **keywords, device=device)
    if reason is not None:
        raise NotImplementedError(f"flash_attention: cannot run this call: {reason}")
    config = (
        config
        or tuned.lookup("flash_attention", bucket(q, k, v, **keywords), device, Config)
        or default_config(q, k, v, **keywords, device=device)
    )
    if interpret and (reason := device_lib.why_not_interpreted()):
        raise NotImplementedError(f"flash_attention: cannot run this call: {reason}")
    static = Static(
        config,
        device.num_sms,
        interpret,
        causal=causal,
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        window=None if window is None else in_32_bits(window),
        softcap=None if softcap is None else float(softcap),
        save_lse=return_lse,
    )
    arrays = (q, k, v, q_segment_ids, kv_segment_ids, kv_lengths, sinks)
    if q.dtype == FP8:
        arrays, scales = attention_fp8.forward_only("flash_attention", (arrays, scales))
        results: Any = _attention_fp8(static, arrays, **scales)
    else:
        results = _attention(static, *arrays)
    return (results[0], jnp.swapaxes(results[1], 1, 2)) if return_lse else results[0]


def flash_attention_reference(q, k, v, **keywords):
    """The mathematics in plain JAX."""
    if q.dtype == FP8:
        return attention_fp8.attention_fp8_reference(q, k, v, **keywords)
    return attention_reference(q, k, v, **keywords)


def why_not(
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
    q_scale=None,
    k_scale=None,
    v_scale=None,
    return_lse=False,
    device: Device | None = None,
) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    del causal, window, q_segment_ids, kv_segment_ids, kv_lengths, sinks, return_lse
    del q_scale, k_scale, v_scale
    if reason := device_lib.why_not_hopper(device or device_lib.current()):
        return reason
    if q.dtype == jnp.float32:
        return "the tensor cores would round float32 to 10 bits (tf32)"
    if q.dtype not in DTYPES:
        return f"takes bfloat16, float16 or float8_e4m3fn, got {q.dtype}"
    if not q.dtype == k.dtype == v.dtype:
        return f"takes one dtype, got q {q.dtype}, k {k.dtype}, v {v.dtype}"
    multiple = 16 // q.dtype.itemsize  # of a head, 16 bytes: what the copy engine takes
    if q.shape[-1] % multiple or q.shape[-1] > WIDEST:
        return f"head width {q.shape[-1]} is not a multiple of {multiple} up to {WIDEST}"
    if 0 in (*q.shape, *k.shape):
        return f"nothing to attend to: q is {list(q.shape)}, k is {list(k.shape)}"
    if isinstance(scale, Tracer):
        return "the scale is part of the kernel, and here it is traced"
    return soft_cap.why_not(softcap)


def default_config(
    q, k, v, *, device: Device, q_segment_ids=None, softcap=None, window=None, **keywords
) -> Config:
    """As many keys at a time as the registers hold; three consumers where the sums are few, one
    where each can have a multiprocessor of its own.
    """
    del k, v, keywords
    segmented, capped = q_segment_ids is not None, softcap is not None
    if q.dtype == FP8:
        return _default_fp8(q, device, segmented=segmented)
    (b, t, n, _), width = q.shape, padded_width(q.shape[-1])
    if width <= 128:
        # both need registers: with a window too, three consumers spill 500 bytes with 128 keys
        kv_block = 96 if segmented and capped and width <= 64 else 128
        if b * n * -(-t // WGMMA_ROWS) <= device.num_sms:  # 512 tokens, 14 heads: 7.0 us, not 10.6
            return Config(kv_block, consumers=1, q_stages=1)
        if width <= 64:
            # 4 x 4096 tokens with a soft cap: 1131 us without turns, 1164 with them
            return Config(kv_block, consumers=3 if t > 128 else 2, turns=not capped)
        # 16 documents in 16384 tokens: 490 us without turns, 507 with them; 8192 tokens with a soft
        # cap 1228 and 1262. 32 heads, 16 x 1024 and 1 x 16384 tokens 243 and 3423, 246 and 3524;
        # but 1 x 512 and 2048 12.1 and 60.3, 11.3 and 59.6, windows of 1024 in 16384 458 and 452
        many = b * t * n > MANY_QUERIES and window is None
        return Config(kv_block, turns=not (segmented or capped or many))
    if width <= 192:
        # 8192 tokens with a soft cap: 759 us, and with 64 keys 822; with documents 96 would spill
        return Config(64 if segmented else 96, q_stages=1)
    # The sums alone take 128 registers. 8 documents in 8192 tokens: 147 us, and with turns 153
    return Config(64, q_stages=1, turns=False)


def _default_fp8(q, device: Device, *, segmented: bool) -> Config:
    """As many keys at a time as the registers hold beside the sums."""
    (b, t, n, _), width = q.shape, flash_attention_fp8.padded_width(q.shape[-1])
    alone = b * n * -(-t // WGMMA_ROWS) <= device.num_sms
    kv_block = 128 if width <= 64 or (width <= 128 and not segmented and not alone) else 64
    if alone:
        return Config(kv_block, consumers=1, stages=3, q_stages=1)
    # 4 x 4096 tokens, all keys: 1.19 to 1.25 ms without turns, 1.27 with them; heads of 192 in 8192
    # tokens 480 and 515 us
    stages, q_stages = (4, 2) if width <= 128 else (3, 1)
    return Config(kv_block, stages=stages, q_stages=q_stages, turns=False)


def bucket(q, k, v, *, causal=True, window=None, **keywords) -> str:
    """The key of a tuned row: tokens up to a power of two, heads and width as they are."""
    del v
    tokens, keys = (tuned.power_of_two(x.shape[1]) for x in (q, k))
    names = [q.dtype.name, f"t{tokens}", f"s{keys}"]
    names += [f"n{q.shape[2]}", f"k{k.shape[2]}", f"h{q.shape[3]}"]
    names += ["causal"] * bool(causal) + ["window"] * (window is not None)
    names += [name for name in ("softcap", "q_segment_ids") if keywords.get(name) is not None]
    return "-".join(names)


def candidates(q, k, v, *, device: Device, **keywords) -> list[Config]:
    """What is worth a measurement: the default's neighbours."""
    default = default_config(q, k, v, device=device, **keywords)
    found = [
        Config(kv_block, consumers, stages, q_stages, turns)
        for consumers in (2, 3)
        for kv_block in (64, 96, 128, 160, 192)
        for q_stages in (2, 1)
        for stages in (2, 3, 4)
        for turns in (True, False)
    ]
    return [c for c in found if c != default and _config_problem(c, q) is None]


def tuning_calls() -> list[tuned.Call]:
    """Prefill and training sizes of real models."""
    calls = []
    for n, kv_heads, h in ((32, 8, 128), (14, 2, 64), (32, 32, 96)):
        for t in (1024, 4096, 16384):
            shapes = [(16384 // t, t, heads, h) for heads in (n, kv_heads, kv_heads)]
            arguments = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
            calls.append(tuned.Call(arguments, flash_attention))
    return calls


def _config_problem(config: Config, q) -> str | None:
    """What the hardware has against a tile."""
    c, h = config, q.shape[-1]
    if fp8 := q.dtype == FP8:
        size_bytes, registers = (
            flash_attention_fp8.shared_bytes(config, h),
            flash_attention_fp8.registers(config, h),
        )
    else:
        size_bytes = shared_bytes(config, h)
        # of a consumer's thread: sums, scores and the weights of the block before
        registers = padded_width(h) // 2 + c.kv_block // 2 + c.kv_block // 4
    room = {1: 200, 2: 210, 3: 136}.get(c.consumers, 0)
    problems = {
        f"consumers must be one of {list(REGISTERS)}": c.consumers not in REGISTERS,
        "kv_block must be a multiple of 32, from 32 to 256": (  # 128 bytes of segment ids
            c.kv_block % 32 or not 32 <= c.kv_block <= 256
        ),
        "kv_block must be a multiple of 64 for float8": fp8 and c.kv_block % 64 > 0,
        "stages must be 2 at least, q_stages 1": c.stages < 2 or c.q_stages < 1,
        f"sums, scores and weights take {registers} of {room} registers": registers > room,
        f"takes {size_bytes} of {SHARED_BYTES} bytes on chip": size_bytes > SHARED_BYTES,
    }
    return next((problem for problem, found in problems.items() if found), None)


@functools.partial(jax.jit, static_argnums=0)
def _attention_fp8(static: Static, arrays, *, q_scale, k_scale, v_scale):
    """As `_attention`, of its arrays and the scales."""
    heads, kv_heads = (x.shape[2] for x in arrays[:2])
    of_scores = attention_fp8.score_scale(q_scale, k_scale, heads, kv_heads)
    of_values = attention_fp8.value_scale(v_scale, kv_heads)
    return flash_attention_fp8.forward(static, arrays, of_scores, of_values)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: Static, q, k, v, q_segment_ids, kv_segment_ids, kv_lengths, sinks):
    """(out, lse [B, N, T], or None if nobody asked for it)."""
    return forward(static, q, k, v, q_segment_ids, kv_segment_ids, kv_lengths, sinks)


def _attention_forward(static, *arrays):
    out, lse = forward(dataclasses.replace(static, save_lse=True), *arrays)
    # A policy of jax.checkpoint may keep both, and the backward pass does not run this again
    out, lse = checkpoint_name(out, "attention_output"), checkpoint_name(lse, "attention_lse")
    return (out, lse if static.save_lse else None), (*arrays, out, lse)


def _attention_backward(static, saved, cotangents):
    q, k, v, q_segment_ids, kv_segment_ids, kv_lengths, sinks, out, lse = saved
    d_out, d_lse = cotangents
    d_q, d_k, d_v, d_sinks = backward(
        q,
        k,
        v,
        out,
        lse,
        d_out,
        d_lse,
        causal=static.causal,
        scale=static.scale,
        window=static.window,
        softcap=static.softcap,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        kv_lengths=kv_lengths,
        sinks=sinks,
        interpret=static.interpret,
    )
    return d_q, d_k, d_v, None, None, None, d_sinks


_attention.defvjp(_attention_forward, _attention_backward)
# Calls alike share one compiled kernel
_attention = jax.jit(_attention, static_argnums=0)  # pyright: ignore[reportAssignmentType]
