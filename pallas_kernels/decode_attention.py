"""Attention of one new token a row over a cache of keys and values, as it is stored.

out = sum_s exp(score[s]) v[s] / (exp(sink) + sum_s exp(score[s])), over the last `window` of the
row's kv_lengths[b] keys. q [B, 1, N, H]; the cache [B, S, K, H], or pages [P, page, K, H] that a
table [B, pages] lines up; head n reads n // (N // K). A ring is kv_lengths = min(length, W): the
order of keys means nothing here. `decode_attention_kernel` says what a block does: the keys of a
row are split over enough blocks to keep the memory busy, and their parts are added.
Source of the split: flash-decoding, Dao et al. 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Integer

from pallas_kernels import _compat, soft_cap, tuned
from pallas_kernels import device as device_lib
from pallas_kernels.attention_reference import attention_reference, check, in_32_bits
from pallas_kernels.decode_attention_config import (
    MOST_SPLITS,
    bucket,
    config_problem,
    default_config,
)
from pallas_kernels.decode_attention_config import (
    candidates as candidates,  # for tune
)
from pallas_kernels.decode_attention_kernel import LINE, Config, Static, attend
from pallas_kernels.decode_attention_parts import combine, padded_heads
from pallas_kernels.device import Device
from pallas_kernels.options import check_arrays, check_options
from pallas_kernels.whole_number import is_whole

NAME = "decode_attention"
DTYPES = (jnp.bfloat16, jnp.float16)
PACKED = (jnp.int8, jnp.float8_e4m3fn)
PAGES = (16, 32, 64, 128, 256)
WIDEST = 256
MOST_HEADS = 64  # that share a key head
SMALLEST = Config(tile=64, stages=1)  # what takes the least memory on chip


def decode_attention(
    q: Float[Array, "B 1 N H"],
    k_cache: Array,
    v_cache: Array,
    kv_lengths: Integer[Array, " B"],
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    page_table: Int[Array, "B pages"] | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    new_k: Float[Array, "B 1 K H"] | None = None,
    new_v: Float[Array, "B 1 K H"] | None = None,
    splits: int | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Any:
    """Softmax attention of one query a row: [B, 1, N, H] in q's dtype.

    Row b sees the last `window` (all if None) of its first kv_lengths[b] keys; none gives zeros.
    Lengths that are only known when traced are clamped to [0, S]. `scale` is 1 / sqrt(H) if None;
    `softcap` c turns a score s into c tanh(s / c); `sinks` are logits that join the sum.
    What is stored must be finite, also where nobody sees it, for 0 times NaN is NaN.
    With `page_table` the cache is [P, page, K, H] and S is pages * page; entries behind a row's
    length may name any page.
    k_scale and v_scale, float32 [B, S, K] (or [P, page, K]), belong to a cache of int8 or
    float8_e4m3fn: a key is k_scale times what is stored.
    new_k and new_v are written at kv_lengths[b] - 1 before the query looks, and the call returns
    (out, k_cache, v_cache). The same launch writes them, in place where the caller donates the
    cache (heads of another width than a multiple of 64, and jax 0.10: XLA writes them before).
    splits: how many blocks share a row and key head, MOST_SPLITS at most, or a few less where they
    are more than a cluster; None chooses from the shapes and the device.
    Dtypes: bfloat16 or float16, the cache alike; scores, softmax and sums in float32.
    Gradients: through `decode_attention_reference`.
    Raises: ValueError if shapes or dtypes disagree. NotImplementedError without a Hopper GPU
    (unless `interpret`), or for what `why_not` says.
    """
    rest: dict[str, Any] = {"page_table": page_table, "k_scale": k_scale, "v_scale": v_scale}
    shape: dict[str, Any] = {**rest, "window": window}
    news = {"new_k": new_k, "new_v": new_v}
    arrays = (q, k_cache, v_cache, kv_lengths)
    numbers = {"scale": scale, "softcap": softcap}
    _check(*arrays, **shape, **numbers, sinks=sinks, **news, splits=splits)
    check_options(NAME, config, Config, interpret=interpret)
    if splits is not None and config is not None:
        raise ValueError(
            f"{NAME}: splits and config both say how many blocks share a row; give one"
        )
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    reason = why_not(*arrays, **rest, **numbers, device=device)
    if reason is not None:
        raise NotImplementedError(f"{NAME}: cannot run this call: {reason}")
    if config is None and splits is None:
        config = tuned.lookup(NAME, bucket(*arrays, **shape), device, Config)
        if config is not None and config_problem(config, q, k_cache):
            config = None  # measured with another room for keys: its key has no exact one
    config = config or default_config(*arrays, **shape, splits=splits, device=device)
    if problem := config_problem(config, q, k_cache):
        raise ValueError(f"{NAME}: {config}: {problem}")
    if interpret and (reason := device_lib.why_not_interpreted()):
        raise NotImplementedError(f"{NAME}: cannot run this call: {reason}")
    static = Static(
        config,
        interpret,
        q.shape[-1] ** -0.5 if scale is None else float(scale),
        None if window is None else in_32_bits(window),
        None if softcap is None else float(softcap),
    )
    return _decode(static, *arrays, sinks, page_table, k_scale, v_scale, new_k, new_v)


def decode_attention_reference(
    q,
    k_cache,
    v_cache,
    kv_lengths,
    *,
    scale=None,
    window=None,
    softcap=None,
    sinks=None,
    page_table=None,
    k_scale=None,
    v_scale=None,
    new_k=None,
    new_v=None,
):
    """The mathematics in plain JAX: the cache as one array a row, and `attention_reference`."""
    if new_k is not None:
        k_cache, v_cache = _written(k_cache, v_cache, new_k, new_v, kv_lengths, page_table)
    k, v = k_cache, v_cache
    if k_scale is not None and v_scale is not None:
        k = (k.astype(jnp.float32) * k_scale[..., None]).astype(q.dtype)
        v = (v.astype(jnp.float32) * v_scale[..., None]).astype(q.dtype)
    if page_table is not None:
        k, v = (
            x[jnp.clip(page_table.astype(jnp.int32), 0, x.shape[0] - 1)].reshape(
                q.shape[0], -1, *x.shape[2:]
            )
            for x in (k, v)
        )
    lengths = jnp.clip(jnp.asarray(kv_lengths, jnp.int32), 0, k.shape[1])
    numbers: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    out = attention_reference(q, k, v, kv_lengths=lengths, sinks=sinks, **numbers)
    return out if new_k is None else (out, k_cache, v_cache)


def why_not(
    q,
    k_cache,
    v_cache,
    kv_lengths,
    *,
    scale=None,
    window=None,
    softcap=None,
    sinks=None,
    page_table=None,
    k_scale=None,
    v_scale=None,
    new_k=None,
    new_v=None,
    splits=None,
    device: Device | None = None,
) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    del kv_lengths, window, sinks, v_scale, new_k, new_v, splits
    if reason := device_lib.why_not_hopper(device or device_lib.current()):
        return reason
    width, group = q.shape[-1], q.shape[2] // k_cache.shape[2]
    if q.dtype == jnp.float32:
        return "the tensor cores would round float32 to 10 bits (tf32)"
    if isinstance(scale, Tracer):
        return "the scale is part of the kernel, and here it is traced"
    if q.dtype not in DTYPES:
        return f"takes bfloat16 or float16, got {q.dtype}"
    if k_scale is None and not q.dtype == k_cache.dtype == v_cache.dtype:
        return f"takes one dtype, got q {q.dtype}, k {k_cache.dtype}, v {v_cache.dtype}"
    least = 8 if k_scale is None else 16  # 16 bytes
    if width % least or not 0 < width <= WIDEST:
        return f"head width {width} is not a multiple of {least} up to {WIDEST}"
    if group > MOST_HEADS:
        return f"{group} query heads share a key head; it takes {MOST_HEADS} at most"
    pages = () if page_table is None else page_table.shape
    if 0 in (*q.shape, *k_cache.shape, *pages):
        table = f", the page table {list(pages)}" if pages else ""
        return f"nothing to attend to: q is {list(q.shape)}, the cache {list(k_cache.shape)}{table}"
    if page_table is not None and k_cache.shape[1] not in PAGES:
        return f"pages of {k_cache.shape[1]} keys are not of 16, 32, 64, 128 or 256"
    if k_scale is not None and k_cache.shape[1] % LINE:
        what = "room for" if page_table is None else "pages of"
        return f"a cache with scales wants a multiple of 64 keys, has {what} {k_cache.shape[1]}"
    if problem := config_problem(SMALLEST, q, k_cache):  # of very many heads
        return f"even the smallest tile is too large: {problem}"
    return soft_cap.why_not(softcap)


def tuning_calls() -> list[tuned.Call]:
    """Two models' heads, a few rows, short and long caches."""
    calls = []
    for n, k, h in ((32, 8, 128), (14, 2, 64)):
        for batch in (1, 8, 64):
            for size in (1024, 8192, 32768):
                shapes = ((batch, 1, n, h), (batch, size, k, h), (batch, size, k, h))
                arguments = tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)
                lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)

                def make(key, arguments=arguments, size=size):
                    keys = jax.random.split(key, len(arguments))
                    return *(
                        jax.random.normal(i, x.shape, jnp.float32).astype(x.dtype)
                        for i, x in zip(keys, arguments, strict=True)
                    ), jnp.full(arguments[0].shape[:1], size, jnp.int32)

                calls.append(tuned.Call((*arguments, lengths), decode_attention, make=make))
    return calls


def _check(
    q,
    k_cache,
    v_cache,
    kv_lengths,
    *,
    scale,
    window,
    softcap,
    sinks,
    page_table,
    k_scale,
    v_scale,
    new_k,
    new_v,
    splits,
) -> None:
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "page_table": page_table}
    arrays |= {"k_scale": k_scale, "v_scale": v_scale, "new_k": new_k, "new_v": new_v}
    check_arrays(NAME, **arrays)
    if q.ndim != 4 or q.shape[1] != 1:
        raise ValueError(f"{NAME}: q {q.shape} is not [B, 1, N, H]: it takes one new token a row")
    if k_cache.ndim != 4 or k_cache.shape != v_cache.shape:
        want = "[B, S, K, H]" if page_table is None else "[P, page, K, H]"
        raise ValueError(f"{NAME}: k_cache {k_cache.shape}, v_cache {v_cache.shape} are not {want}")
    shape = k_cache.shape
    if page_table is not None:
        if page_table.ndim != 2 or page_table.shape[0] != q.shape[0]:
            raise ValueError(
                f"{NAME}: page_table has shape {page_table.shape}, not [B, pages] with B = "
                f"{q.shape[0]}"
            )
        if not jnp.issubdtype(page_table.dtype, jnp.integer):
            raise ValueError(f"{NAME}: page_table is {page_table.dtype}; it must hold integers")
        shape = (q.shape[0], page_table.shape[1] * k_cache.shape[1], *k_cache.shape[2:])
    for given, other, what in (
        (k_scale, v_scale, "k_scale and v_scale"),
        (new_k, new_v, "new_k and new_v"),
    ):
        if (given is None) != (other is None):
            raise ValueError(f"{NAME}: {what}: both or neither are given")
    packed = k_cache.dtype in PACKED
    if packed != (k_scale is not None) or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"{NAME}: the cache is {k_cache.dtype} and {v_cache.dtype}; caches of int8 or "
            "float8_e4m3fn, and no others, have k_scale and v_scale"
        )
    for what, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        if x is not None and (x.shape != k_cache.shape[:3] or x.dtype != jnp.float32):
            raise ValueError(
                f"{NAME}: {what} is {x.dtype}{list(x.shape)}; it must be float32, one number a "
                f"token and head: {list(k_cache.shape[:3])}"
            )
    for what, x in (("new_k", new_k), ("new_v", new_v)):
        if x is None:
            continue
        if packed:
            raise ValueError(
                f"{NAME}: {what} has no scale to go with a cache of {k_cache.dtype}; write the "
                "cache and its scales before the call"
            )
        if x.shape != (q.shape[0], 1, *shape[2:]) or x.dtype != k_cache.dtype:
            raise ValueError(
                f"{NAME}: {what} is {x.dtype}{list(x.shape)}; it must be {k_cache.dtype}, "
                f"[B, 1, K, H] = {[q.shape[0], 1, *shape[2:]]}"
            )
    if splits is not None and (not is_whole(splits) or not 1 <= splits <= MOST_SPLITS):
        raise ValueError(
            f"{NAME}: splits must be an integer from 1 to {MOST_SPLITS} or None, got {splits!r}"
        )
    if kv_lengths is None:
        raise ValueError(f"{NAME}: kv_lengths is None; it says how many keys each row has")
    keys = jax.ShapeDtypeStruct(shape, q.dtype if packed else k_cache.dtype)
    check(
        NAME,
        q,
        keys,
        keys,
        causal=True,
        scale=scale,
        window=window,
        softcap=softcap,
        q_segment_ids=None,
        kv_segment_ids=None,
        kv_lengths=kv_lengths,
        sinks=sinks,
    )


def _written(k_cache, v_cache, new_k, new_v, kv_lengths, page_table):
    """The cache with the new token at the end of each row that has one."""
    at = kv_lengths.astype(jnp.int32) - 1
    row = jnp.arange(at.shape[0], dtype=jnp.int32)
    size = k_cache.shape[1]
    if page_table is not None:
        pages = page_table.shape[1]
        at = jnp.minimum(at, pages * size - 1)
        row = page_table[row, jnp.clip(at, 0) // size].astype(jnp.int32)
        row = jnp.where(at < 0, k_cache.shape[0], jnp.clip(row, 0, k_cache.shape[0] - 1))
        at = jnp.clip(at, 0) % size
    else:
        at = jnp.where(at < 0, size, jnp.minimum(at, size - 1))
    return tuple(
        cache.at[row, at].set(new[:, 0], mode="drop", unique_indices=True)
        for cache, new in ((k_cache, new_k), (v_cache, new_v))
    )


def _forward(
    static: Static,
    q,
    k_cache,
    v_cache,
    kv_lengths,
    sinks,
    page_table,
    k_scale,
    v_scale,
    new_k,
    new_v,
):
    batch, _, n, width = q.shape
    kv_heads = k_cache.shape[2]
    group = n // kv_heads
    if sinks is not None:
        sinks = jnp.pad(
            sinks.reshape(kv_heads, group),
            ((0, 0), (0, padded_heads(group, k_cache.dtype) - group)),
        )
    if page_table is not None:
        page_table = page_table.astype(jnp.int32)
    lengths = kv_lengths.astype(jnp.int32)
    flat = q.reshape(batch, n, width)
    rest = {"page_table": page_table, "k_scale": k_scale, "v_scale": v_scale}
    k, v = k_cache, v_cache
    if new_k is not None:
        if _writes(width):
            k, v = _compat.hold(k_cache), _compat.hold(v_cache)
            rest |= {"new_k": new_k[:, 0], "new_v": new_v[:, 0]}
        else:
            k, v = _written(k_cache, v_cache, new_k, new_v, kv_lengths, page_table)
    out = attend(static, flat, k, v, lengths, sinks=sinks, **rest)
    if isinstance(out, (list, tuple)):
        out = combine(*out, flat, sinks=sinks, interpret=static.interpret)
    out = out.reshape(q.shape)
    if new_k is None:
        return out
    return (out, _compat.let_go(k), _compat.let_go(v)) if _writes(width) else (out, k, v)


def _writes(width: int) -> bool:
    """Whether the kernel itself writes the new token: it stores 64 numbers at a time."""
    return _compat.WRITES_REFERENCES and not width % LINE


def _forward_saved(static, *arrays):
    return _forward(static, *arrays), arrays


def _backward(static: Static, saved, cotangent):
    names = ("q", "k_cache", "v_cache", "kv_lengths", "sinks", "page_table", "k_scale", "v_scale")
    call = dict(zip((*names, "new_k", "new_v"), saved, strict=True))
    floats = {
        name: x
        for name, x in call.items()
        if x is not None and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype not in PACKED
    }
    numbers: dict[str, Any] = {"scale": static.scale, "window": static.window}

    def plain(floats):
        return decode_attention_reference(**{**call, **floats}, **numbers, softcap=static.softcap)

    _, pull = jax.vjp(plain, floats)
    (grads,) = pull(cotangent)
    return tuple(grads.get(name) for name in call)


_decode = jax.custom_vjp(lambda static, *arrays: _forward(static, *arrays), nondiff_argnums=(0,))
_decode.defvjp(_forward_saved, _backward)
_decode = jax.jit(_decode, static_argnums=0)  # calls alike share one compiled kernel
