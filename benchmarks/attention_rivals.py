"""Rivals of our kernels for attention that JAX can call: cuDNN, tokamax,
jax-linear-attention, and the attention kernels that JAX ships as examples.

A case's keywords say what the call means: causal, window, softcap, documents (segment ids are its
fourth argument). What a rival has no argument for becomes a mask, made before the clock starts.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.case import Case
from benchmarks.rivals import LIBRARIES, Rival, fail, is_backward, stub_xprof
from pallas_kernels.attention_reference import visible

Forward = Callable[..., Any]  # (q, k, v, mask or segment ids or nothing) -> out
IMPLEMENTED_BY = {  # by library, what has to be importable
    "cudnn": "jax",
    "cudnn, bfloat16": "jax",
    "cudnn, float8": "jax",
    "tokamax, bfloat16": LIBRARIES["tokamax"],
    "jax attention_mgpu, float16": "jax",
    "tokamax": LIBRARIES["tokamax"],
    "jax-linear-attention": LIBRARIES["jax-linear-attention"],
    "jax-linear-attention, fused": LIBRARIES["jax-linear-attention"],
    "jax decode_attention": "jax",
}


def of(case: Case) -> dict[str, Rival]:
    """The rivals of a case; one that does not import or refuses the call says so when it runs."""
    table = TABLES.get(case.op, {})
    rivals = {}
    for name, make in table.items():
        if importlib.util.find_spec(IMPLEMENTED_BY[name]) is None:
            continue
        try:
            rival = make(case)
        except Exception as error:  # what the library says is its row's result
            rival = Rival(functools.partial(fail, f"{type(error).__name__}: {error}"))
        if rival is not None:
            rivals[name] = rival
    return rivals


def _flash(case: Case, forward: Forward, side: str) -> Rival:
    """A rival of flash_attention, or of its backward pass.

    side: what `forward` takes as a fourth argument where the case packs documents, "ids" or "mask".
    """
    documents = bool(case.keywords.get("documents"))

    def arguments(q, k, v, *rest):
        extra: tuple[jax.Array, ...] = ()
        if documents:
            ids, rest = rest[0], rest[1:]
            mask = visible(
                q.shape[1],
                k.shape[1],
                causal=case.keywords["causal"],
                window=case.keywords.get("window"),
                q_segment_ids=ids,
                kv_segment_ids=ids,
            )
            assert mask is not None
            extra = (ids,) if side == "ids" else (mask[:, None],)
        return (q, k, v), extra, rest

    if not is_backward(case):
        if not documents:
            return Rival(forward)

        def prepare(*all_arguments):
            qkv, extra, _ = arguments(*all_arguments)
            return qkv + extra

        return Rival(forward, prepare)

    def prepare_backward(*all_arguments):
        qkv, extra, rest = arguments(*all_arguments)
        vjp = jax.vjp(lambda *x: forward(*x, *extra), *qkv)[1]
        return vjp, rest[-1]

    return Rival(lambda vjp, cotangent: vjp(cotangent), prepare_backward)


def _flash_cudnn(case: Case) -> Rival:
    _refuse_softcap(case)
    causal, window = case.keywords["causal"], case.keywords.get("window")

    def forward(q, k, v, mask=None):
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            is_causal=causal and mask is None,
            local_window_size=None if window is None or mask is not None else (window - 1, 0),
            implementation="cudnn",
        )

    return _flash(case, forward, "mask")


def _refuse_softcap(case: Case) -> None:
    if case.keywords.get("softcap") is not None:
        raise NotImplementedError("has no soft cap")


def _flash_tokamax(case: Case) -> Rival:
    stub_xprof()
    import tokamax  # type: ignore

    window = case.keywords.get("window")

    def forward(q, k, v, mask=None):
        return tokamax.dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            is_causal=case.keywords["causal"] and mask is None,
            local_window_size=None if window is None or mask is not None else (window - 1, 0),
            logits_soft_cap=case.keywords.get("softcap"),
            implementation="mosaic",
        )

    return _flash(case, forward, "mask")


def _flash_jla(case: Case, backward: str) -> Rival | None:
    from jla.ops.mosaic_gpu.attention import flash_attention, supported  # type: ignore

    _refuse_softcap(case)
    if backward != "ranged" and not is_backward(case):
        return None
    if not case.keywords["causal"]:
        raise NotImplementedError("is always causal")
    if jax.default_backend() == "gpu" and (reason := supported(*case.arguments[:3])):
        raise NotImplementedError(reason)

    def forward(q, k, v, ids=None):
        window = case.keywords.get("window")
        return flash_attention(q, k, v, segment_ids=ids, sliding_window=window, backward=backward)

    return _flash(case, forward, "ids")


def _flash_example(case: Case) -> Rival | None:
    """JAX's own example for Hopper, whose buffers are float16 whatever comes in."""
    keywords = case.keywords
    _refuse_softcap(case)
    if keywords.get("window") is not None or keywords.get("documents") or is_backward(case):
        return None  # its backward pass is never causal
    if case.arguments[0].shape[1] != 4096:
        return None  # an example: once is enough
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=128, max_concurrent_steps=2, causal=keywords["causal"]
    )

    def prepare(q, k, v):
        scale = q.shape[-1] ** -0.5  # it has none
        return tuple(x.astype(jnp.float16) for x in ((q * scale).astype(q.dtype), k, v))

    return Rival(functools.partial(_call_example, config), prepare)


def _call_example(config, q, k, v):
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    return attention_mgpu.attention(q, k, v, config)


FLASH = {
    "cudnn": _flash_cudnn,
    "tokamax": _flash_tokamax,
    "jax-linear-attention": functools.partial(_flash_jla, backward="ranged"),
    "jax-linear-attention, fused": functools.partial(_flash_jla, backward="fused"),
    "jax attention_mgpu, float16": _flash_example,
}


def _in_bfloat16(make: Callable[[Case], Rival], case: Case) -> Rival:
    """A rival that takes no float8: of the same numbers, made bfloat16 before the clock starts."""
    rival = make(case)

    def prepare(q, k, v, *rest):
        wide = (*(x.astype(jnp.bfloat16) for x in (q, k, v)), *rest)
        return wide if rival.prepare is None else rival.prepare(*wide)

    return Rival(rival.run, prepare)


def _flash_cudnn_fp8(case: Case) -> Rival | None:
    """cuDNN's own, which JAX has no public name for; its result is float8."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    keywords = case.keywords
    _refuse_softcap(case)
    if keywords.get("window") is not None or keywords.get("documents"):
        return None
    one = jnp.ones((1, 1, 1, 1), jnp.float32)
    scales: Any = dict.fromkeys(cudnn.fp8_params_keys, one)
    scales |= {"scale_s": one * 256, "descale_s": one / 256}  # of weights, as ours are rounded
    mask = cudnn.MaskType.CAUSAL if keywords["causal"] else cudnn.MaskType.NO_MASK

    def forward(q, k, v):
        scale = q.shape[-1] ** -0.5
        kwargs: Any = {"scale": scale, "mask_type": mask, "use_fp8": True}
        results: Any = cudnn.dot_product_attention(q, k, v, fp8_params=scales, **kwargs)
        return results[0]

    return Rival(forward)


FLASH_FP8 = {
    "cudnn, bfloat16": functools.partial(_in_bfloat16, _flash_cudnn),
    "cudnn, float8": _flash_cudnn_fp8,
    "tokamax, bfloat16": functools.partial(_in_bfloat16, _flash_tokamax),
}


def _decode_cudnn(case: Case) -> Rival | None:
    if len(case.arguments) != 4 or case.keywords.get("pages"):
        return None  # it reads no int8 and no pages

    def attend(q, k, v, lengths):
        return jax.nn.dot_product_attention(
            q, k, v, key_value_seq_lengths=lengths, implementation="cudnn"
        )

    return Rival(attend)


def _decode_tokamax(case: Case) -> Rival | None:
    if len(case.arguments) != 4 or case.keywords.get("pages"):
        return None
    stub_xprof()
    import tokamax  # type: ignore

    def attend(q, k, v, lengths):
        return tokamax.dot_product_attention(
            q, k, v, key_value_seq_lengths=lengths, implementation="mosaic"
        )

    return Rival(attend)


def _decode_example(case: Case) -> Rival | None:
    """JAX's own example, through Triton; it transposes the cache first."""
    if len(case.arguments) != 4 or case.arguments[1].shape[1] != 8192:
        return None  # an example: once a batch is enough
    from jax.experimental.pallas.ops.gpu import decode_attention

    def attend(q, k, v, lengths):
        splits = min(16, k.shape[1] // 256)
        return decode_attention.gqa(q[:, 0], k, v, kv_seq_len=lengths, k_splits=splits)[:, None]

    return Rival(attend)


# jax-linear-attention decodes through XLA: it has no kernel for one token
DECODE = {
    "cudnn": _decode_cudnn,
    "tokamax": _decode_tokamax,
    "jax decode_attention": _decode_example,
}
TABLES = {
    "flash_attention": FLASH,
    "flash_attention_backward": FLASH,
    "flash_attention_fp8": FLASH_FP8,
    "decode_attention": DECODE,
}
