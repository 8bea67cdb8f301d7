"""decode_attention before it runs: what it refuses, its configs and defaults, its machine code."""

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_device import H200

from jaxllm import aot
from pallas_kernels import device as device_lib
from pallas_kernels.decode_attention import (
    Config,
    bucket,
    candidates,
    config_problem,
    decode_attention,
    default_config,
    tuning_calls,
    why_not,
)

pytestmark = pytest.mark.usefixtures("strict_jax")


def shapes(n=4, k=2, h=64, s=128, dtype=jnp.bfloat16, batch=2, **others) -> dict[str, Any]:
    x = jax.ShapeDtypeStruct
    call = {
        "q": x((batch, 1, n, h), dtype),
        "k_cache": x((batch, s, k, h), dtype),
        "v_cache": x((batch, s, k, h), dtype),
        "kv_lengths": x((batch,), jnp.int32),
    }
    return {**call, **others}


def zeros(call) -> dict[str, Any]:
    """Arrays for what is only a shape."""
    return {
        name: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x
        for name, x in call.items()
    }


INT8: dict[str, Any] = {
    name: jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.int8) for name in ("k_cache", "v_cache")
} | {name: jax.ShapeDtypeStruct((2, 128, 2), jnp.float32) for name in ("k_scale", "v_scale")}


def heads_with_scales(k, group, h) -> dict[str, Any]:
    x = jax.ShapeDtypeStruct
    cache, scale = x((1, 128, k, h), jnp.int8), x((1, 128, k), jnp.float32)
    packed: dict[str, Any] = {
        "k_cache": cache,
        "v_cache": cache,
        "k_scale": scale,
        "v_scale": scale,
    }
    return shapes(k * group, k, h, batch=1, **packed)


def test_a_measured_config_that_does_not_fit_is_left(monkeypatch):
    """Its key rounds the room for keys up; the caller has said nothing wrong."""
    x = jax.ShapeDtypeStruct
    cache, scale = x((2, 192, 2, 64), jnp.int8), x((2, 192, 2), jnp.float32)
    call = shapes(k_cache=cache, v_cache=cache, k_scale=scale, v_scale=scale)
    measured = Config(tile=128)
    assert config_problem(measured, call["q"], cache) is not None
    monkeypatch.setattr("pallas_kernels.tuned.lookup", lambda *_: measured)
    monkeypatch.setattr("pallas_kernels._compat.INTERPRETS_LAYOUTS", True)
    out = jax.eval_shape(lambda call: decode_attention(**call, interpret=True), call)
    assert out.shape == call["q"].shape


@pytest.mark.parametrize(
    ("call", "device", "phrase"),
    [
        (shapes(), device_lib.Device("cpu", "cpu"), "needs an NVIDIA GPU, found cpu"),
        (shapes(dtype=jnp.float32), H200, "would round float32 to 10 bits"),
        (shapes(dtype=jnp.float8_e4m3fn), H200, "takes bfloat16 or float16, got float8_e4m3fn"),
        (
            shapes(v_cache=jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.float16)),
            H200,
            "takes one dtype, got q bfloat16, k bfloat16, v float16",
        ),
        (shapes(h=36), H200, "head width 36 is not a multiple of 8 up to 256"),
        (shapes(h=264), H200, "head width 264 is not a multiple of 8 up to 256"),
        (shapes(n=130, k=2), H200, "65 query heads share a key head; it takes 64 at most"),
        (shapes(s=0), H200, "nothing to attend to: q is [2, 1, 4, 64], the cache [2, 0, 2, 64]"),
        (
            shapes(page_table=jax.ShapeDtypeStruct((2, 0), jnp.int32)),
            H200,
            "the cache [2, 128, 2, 64], the page table [2, 0]",
        ),
        (
            shapes(page_table=jax.ShapeDtypeStruct((2, 4), jnp.int32), s=24),
            H200,
            "pages of 24 keys are not of 16, 32, 64, 128 or 256",
        ),
        (
            shapes(h=24, k_scale=INT8["k_scale"], v_scale=INT8["v_scale"]),
            H200,
            "head width 24 is not a multiple of 16 up to 256",
        ),
        (
            shapes(s=130, k_scale=INT8["k_scale"], v_scale=INT8["v_scale"]),
            H200,
            "a cache with scales wants a multiple of 64 keys, has room for 130",
        ),
        (
            shapes(
                s=32,
                page_table=jax.ShapeDtypeStruct((2, 4), jnp.int32),
                k_scale=INT8["k_scale"],
                v_scale=INT8["v_scale"],
            ),
            H200,
            "a cache with scales wants a multiple of 64 keys, has pages of 32",
        ),
        (heads_with_scales(288, 1, 16), H200, "so many heads with scales want a smaller tile"),
        (heads_with_scales(96, 64, 256), H200, "bytes of shared memory, but a block has 232448"),
    ],
)
def test_why_not(call, device, phrase):
    reason = why_not(**call, device=device)
    assert reason is not None
    assert phrase in reason


def test_nothing_keeps_it_from():
    for call in (shapes(), shapes(**INT8), shapes(h=96), shapes(n=14, k=2)):
        assert why_not(**call, device=H200) is None


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    call = shapes(n=4, k=4, h=64, s=1, batch=1, kv_lengths=jnp.asarray([1], jnp.int32))
    with pytest.raises(NotImplementedError, match="decode_attention: cannot run this call: needs"):
        decode_attention(**zeros(call))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": (2, 3, 4, 64)}, "q (2, 3, 4, 64) is not [B, 1, N, H]: it takes one new token a row"),
        ({"k_cache": (2, 128, 64)}, "are not [B, S, K, H]"),
        ({"v_cache": (2, 64, 2, 64)}, "are not [B, S, K, H]"),
        ({"k_cache": (2, 128, 3, 64), "v_cache": (2, 128, 3, 64)}, "4 query heads cannot share 3"),
        ({"k_cache": (2, 9, 2, 32), "v_cache": (2, 9, 2, 32)}, "differ in batch or head width"),
        ({"kv_lengths": None}, "kv_lengths is None; it says how many keys each row has"),
        ({"kv_lengths": np.zeros(3, np.int32)}, "kv_lengths has shape (3,), not (2,)"),
        (
            {"kv_lengths": np.asarray([129, 0], np.int32)},
            "kv_lengths[0] is 129; a row has 0 to 128",
        ),
        ({"kv_lengths": np.asarray([1.0, 0.0], np.float32)}, "it must hold integers"),
        ({"window": 0}, "window must be a whole number, 1 at least, or None, got 0"),
        ({"softcap": -1.0}, "softcap must be positive and finite or None, got -1.0"),
        ({"sinks": np.zeros(3, np.float32)}, "sinks is float32[3]; it must be float32"),
        ({"splits": 0}, "splits must be an integer from 1 to 512 or None, got 0"),
        ({"splits": 10**9}, "splits must be an integer from 1 to 512 or None, got 1000000000"),
        ({"splits": 1.5}, "splits must be an integer from 1 to 512 or None, got 1.5"),
        ({"splits": True}, "splits must be an integer from 1 to 512 or None, got True"),
        ({"page_table": np.zeros((3, 2), np.int32)}, "page_table has shape (3, 2), not [B, pages]"),
        ({"page_table": np.zeros((2, 2), np.float32)}, "page_table is float32; it must hold"),
        (
            {"page_table": np.zeros((2, 2), np.int32), "k_cache": (2, 128, 64)},
            "are not [P, page, K, H]",
        ),
        ({"k_scale": np.zeros((2, 128, 2), np.float32)}, "k_scale and v_scale: both or neither"),
        ({"new_k": (2, 1, 2, 64)}, "new_k and new_v: both or neither are given"),
        (
            {"new_k": (2, 1, 4, 64), "new_v": (2, 1, 2, 64)},
            "new_k is bfloat16[2, 1, 4, 64]; it must",
        ),
        (
            {name: np.zeros((2, 128, 2), np.float32) for name in ("k_scale", "v_scale")},
            "the cache is bfloat16 and bfloat16; caches of int8 or float8_e4m3fn, and no others",
        ),
        (
            {**INT8, "k_scale": np.zeros((2, 128), np.float32)},
            "k_scale is float32[2, 128]; it must be float32, one number a token and head",
        ),
        (
            {**INT8, "new_k": (2, 1, 2, 64), "new_v": (2, 1, 2, 64)},
            "new_k has no scale to go with a cache of int8",
        ),
        ({"config": Config(tile=96)}, "tile must be one of (64, 128, 256)"),
        ({"config": Config(stages=0)}, "stages must be at least 1"),
        ({"config": Config(), "splits": 2}, "splits and config both say how many blocks"),
        ({"config": Config(splits=3, cluster=2)}, "splits must be a multiple of cluster"),
        ({"config": Config(splits=32, cluster=32)}, "a cluster has 16 blocks at most"),
        ({"config": Config(splits=66, cluster=2)}, "more than 32 parts to add"),
        ({"config": Config(tile=256, stages=8)}, "bytes of shared memory, but a block has 232448"),
        ({**INT8, "config": Config(tile=256)}, "tile must divide the 128 keys that lie together"),
        (
            {
                "q": (1, 1, 130, 16),
                "kv_lengths": np.ones(1, np.int32),
                **{
                    name: np.zeros((1, 128, 130, *rest), dtype)
                    for letter in "kv"
                    for name, rest, dtype in (
                        (f"{letter}_cache", (16,), np.int8),
                        (f"{letter}_scale", (), np.float32),
                    )
                },
                "config": Config(tile=128),
            },
            "so many heads with scales want a smaller tile",
        ),
    ],
)
def test_what_a_call_gets_wrong(changes, message):
    call = shapes(kv_lengths=jnp.asarray([1, 2], jnp.int32))
    for name, x in changes.items():
        shape = isinstance(x, tuple)
        call[name] = jax.ShapeDtypeStruct(x, jnp.bfloat16) if shape else x
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        decode_attention(**zeros(call), interpret=True)
    assert str(caught.value).startswith("decode_attention: ")


@pytest.mark.aot
@pytest.mark.parametrize("group", [33, 56, 64])
def test_many_heads_share_a_key_head(group):
    """wgmma of int8 has no 40 or 56 columns; nor have 32 parts of 64 heads room in registers."""
    call = shapes(group, 1, 64, 131072, batch=1)
    for name in "kv":
        call[f"{name}_cache"] = jax.ShapeDtypeStruct((1, 131072, 1, 64), jnp.int8)
        call[f"{name}_scale"] = jax.ShapeDtypeStruct((1, 131072, 1), jnp.float32)
    program = aot.compile_for(lambda call: decode_attention(**call), call)
    assert program.mosaic_launches() == ["decode_attention", "decode_attention_combine"]
    for kernel in program.kernels:
        assert kernel.spill_store_bytes == 0, kernel
        assert not [note for note in kernel.notes if note.startswith("C75")], kernel


def test_configs():
    for call in tuning_calls():
        key = bucket(*call.arguments)
        default = default_config(*call.arguments, device=H200)
        others = candidates(*call.arguments, device=H200)
        assert default not in others
        assert others
        assert len(set(others)) == len(others)
        assert key.startswith("bfloat16-b")
    few = shapes(n=32, k=8, h=128, s=8192, batch=1)
    assert default_config(**few, device=H200) == Config(128, 3, 8, 8)  # one launch
    assert default_config(**few, splits=3, device=H200).splits == 3
    assert default_config(**few, splits=40, device=H200).splits == 32
    long = shapes(n=14, k=2, h=64, s=131072, batch=1)
    assert default_config(**long, device=H200) == Config(256, 3, 56, 8)
    assert default_config(**long, window=512, device=H200).splits == 4
    many = shapes(n=32, k=8, h=128, s=131072, batch=64)
    config = default_config(**many, device=H200)
    assert config.splits > 8  # a row may be longer than others
    assert config.cluster == 1
    few_heads = shapes(n=14, k=2, h=64, s=131072, batch=8)
    assert default_config(**few_heads, device=H200) == Config(256, 3, 8, 2)  # every multiprocessor
    assert default_config(**shapes(**INT8), device=H200).tile in (64, 128)
    short = shapes(n=32, k=8, h=128, s=64, batch=20)
    assert default_config(**short, device=H200).splits == 1  # nothing to gain
    many_keys = shapes(n=32, k=8, h=128, s=524288, batch=2)
    assert default_config(**many_keys, device=H200).cluster == 2  # more than 32 parts in all
    assert bucket(**shapes(**INT8)) == "int8-b2-s128-n4-k2-h64-bfloat16"
    paged = shapes(page_table=jax.ShapeDtypeStruct((2, 4), jnp.int32), s=64)
    assert bucket(**paged) == "bfloat16-b2-s256-n4-k2-h64-page64"


@pytest.mark.parametrize("num_sms", [2, 78, 114, 132])
@pytest.mark.parametrize("cache", [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn])
def test_no_default_has_a_problem(num_sms, cache):
    device = device_lib.Device("gpu", "NVIDIA H200", 9.0, num_sms)
    seen = 0
    for batch, (k, group), h, s, width in itertools.product(
        (1, 2, 3, 8, 20, 64),
        ((1, 1), (1, 64), (2, 7), (8, 4), (96, 64), (130, 1), (256, 1)),
        (64, 128, 256),
        (64, 128, 1024, 32768, 131072, 524288),
        (None, 64),
    ):
        call = shapes(k * group, k, h, s, batch=batch)
        paged = {}
        cached = (batch, s, k, h)
        if width is not None:
            cached = (batch * s // width, width, k, h)
            paged["page_table"] = jax.ShapeDtypeStruct((batch, s // width), jnp.int32)
        for name in "kv":
            call[f"{name}_cache"] = jax.ShapeDtypeStruct(cached, cache)
            if cache != jnp.bfloat16:
                scales = jax.ShapeDtypeStruct(cached[:3], jnp.float32)
                paged[f"{name}_scale"] = scales
        if why_not(**call, **paged, device=device) is not None:
            continue
        config = default_config(**call, **paged, device=device)
        assert config_problem(config, call["q"], call["k_cache"]) is None, (cached, config)
        assert config.splits == 1 or config.splits <= s // 32, (cached, config)
        seen += 1
    assert seen > 900
