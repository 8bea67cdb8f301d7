"""decode_attention in the interpreter and on a GPU: heads, lengths, pages, packed caches; what it
refuses."""

import dataclasses
import functools
import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from attention_cases import CASES as CALLS
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import interpreted
from numerics import assert_as_accurate

from jaxllm import aot
from pallas_kernels import device as device_lib
from pallas_kernels.decode_attention import (
    Config,
    bucket,
    candidates,
    config_problem,
    decode_attention,
    decode_attention_reference,
    default_config,
    tuning_calls,
    why_not,
)

pytestmark = pytest.mark.usefixtures("strict_jax")

H200 = device_lib.Device("gpu", "NVIDIA H200", 9.0, 132)


@dataclasses.dataclass(frozen=True)
class Case:
    """Heads, the cache and its lengths; the keys of a page; the dtype of a cache of bytes."""

    N: int
    K: int
    H: int
    S: int
    lengths: tuple[int, ...]
    dtype: Any = jnp.bfloat16
    page: int | None = None
    packed: Any = None
    sinks: bool = False
    small: bool = False  # values, of about 0.001
    config: Config | None = None
    numbers: tuple[tuple[str, Any], ...] = ()

    def arrays(self, seed: int = 0) -> dict[str, Any]:
        """The arguments of a call."""
        rng = np.random.default_rng(seed)
        batch = len(self.lengths)
        draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), self.dtype)  # noqa: E731
        call: dict[str, Any] = {"q": draw(batch, 1, self.N, self.H)}
        for name in ("k", "v"):
            x = draw(batch, self.S, self.K, self.H)
            if self.small and name == "v":
                x = x * jnp.asarray(1e-3, self.dtype)
            if self.packed is not None:
                x, call[f"{name}_scale"] = packed(x, self.packed)
            call[f"{name}_cache"] = x
        call["kv_lengths"] = jnp.asarray(self.lengths, jnp.int32)
        if self.sinks:
            call["sinks"] = jnp.asarray(rng.standard_normal(self.N), jnp.float32)
        if self.page is not None:
            pages = self.S // self.page
            where = rng.permutation(batch * pages)
            call["page_table"] = jnp.asarray(where.reshape(batch, pages), jnp.int32)
            back = np.argsort(where)
            for name in call.keys() & {"k_cache", "v_cache", "k_scale", "v_scale"}:
                x = call[name]
                call[name] = x.reshape(-1, self.page, *x.shape[2:])[back]
        return call


def packed(x, dtype):
    """Bytes, and a scale for each token and head."""
    x = x.astype(jnp.float32)
    largest = 127.0 if dtype == jnp.int8 else 448.0
    scale = jnp.max(jnp.abs(x), axis=-1) / largest
    x = x / scale[..., None]
    return (jnp.round(x) if dtype == jnp.int8 else x).astype(dtype), scale


def truth(call, **numbers):
    """In float64, of what the cache holds."""
    call = {name: np.asarray(x) for name, x in call.items()}
    sides = {}
    for name in ("k", "v"):
        x, scale = call[f"{name}_cache"].astype(np.float64), call.get(f"{name}_scale")
        x = x if scale is None else x * scale.astype(np.float64)[..., None]
        if "page_table" in call:
            x = x[call["page_table"]].reshape(call["q"].shape[0], -1, *x.shape[2:])
        sides[name] = x
    lengths = np.clip(call["kv_lengths"], 0, sides["k"].shape[1])
    q = call["q"].astype(np.float64)
    return oracles.attention(q, **sides, kv_lengths=lengths, sinks=call.get("sinks"), **numbers)


def assert_right(ours, call, **numbers):
    plain: Any = decode_attention_reference(**call, **numbers)
    assert ours.dtype == plain.dtype
    assert_as_accurate(ours, plain, truth(call, **numbers))


def run(case: Case, **keywords):
    call = case.arrays()
    f = functools.partial(
        decode_attention, **dict(case.numbers), config=case.config, interpret=True, **keywords
    )
    return call, interpreted(lambda call: f(**call), call)


CASES = {
    "one key": Case(4, 4, 64, 1, (1,)),
    "a row without keys": Case(8, 2, 128, 257, (257, 0, 130), config=Config(128, 2, 2)),
    "7 heads a key head": Case(14, 2, 64, 128, (128, 17), config=Config(64, 1, 1)),
    "16 heads a key head, 96 wide": Case(
        16, 1, 96, 130, (70,), jnp.float16, config=Config(128, 1, 1)
    ),
    "40 wide, more blocks than tiles": Case(3, 3, 40, 192, (65,), config=Config(64, 3, 8)),
    "256 wide": Case(2, 1, 256, 65, (65,), config=Config(64, 1, 1)),
    "window": Case(4, 2, 64, 257, (250, 3), numbers=(("window", 100),), config=Config(64, 2, 2)),
    "soft cap": Case(4, 1, 64, 64, (60,), numbers=(("softcap", 2.0), ("scale", 0.5))),
    "sinks": Case(7, 1, 64, 70, (70, 0), sinks=True, config=Config(64, 2, 1)),
    "pages, sinks, parts": Case(
        8, 2, 64, 128, (100, 0), page=16, sinks=True, config=Config(64, 2, 2)
    ),
    "large pages": Case(4, 1, 128, 256, (200,), page=256, config=Config(128, 2, 2)),
    "int8": Case(8, 2, 128, 128, (128, 33), packed=jnp.int8, config=Config(64, 2, 2)),
    "int8, 96 wide, float16, window": Case(
        7,
        1,
        96,
        128,
        (100,),
        jnp.float16,
        packed=jnp.int8,
        config=Config(128, 1, 1),
        numbers=(("window", 70),),
    ),
    "fp8, 128 wide, sinks": Case(
        4, 1, 128, 128, (128, 0), packed=jnp.float8_e4m3fn, sinks=True, config=Config(64, 2, 2)
    ),
    "int8, values of 0.001, float16": Case(
        8, 2, 64, 256, (256, 33), jnp.float16, packed=jnp.int8, small=True, config=Config(64, 2, 2)
    ),
    "fp8, values of 0.001, float16": Case(
        4,
        1,
        64,
        128,
        (128, 0),
        jnp.float16,
        packed=jnp.float8_e4m3fn,
        small=True,
        config=Config(64, 2, 1),
    ),
    "int8, 33 heads a key head, sinks, parts": Case(
        33, 1, 64, 128, (128,), packed=jnp.int8, sinks=True, config=Config(64, 2, 2)
    ),
    "fp8, pages": Case(
        7, 1, 64, 128, (100,), page=64, packed=jnp.float8_e4m3fn, config=Config(64, 2, 1)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_decode_attention(name):
    case = CASES[name]
    call, ours = run(case)
    assert_right(ours, call, **dict(case.numbers))


def test_the_check_can_fail():
    call = CASES["one key"].arrays()
    good: Any = decode_attention_reference(**call)
    assert_right(good, call)
    for wrong in (good.at[0, 0, 0, 0].multiply(1.05), jnp.zeros_like(good)):
        with pytest.raises(AssertionError, match="error is"):
            assert_right(wrong, call)


@pytest.mark.parametrize("large", [300.0, 1e-3])
def test_int8_keys_with_a_query_of_uneven_numbers(large):
    """Queries become two int8 by their largest number; one far from the rest is the worst."""
    case = Case(8, 2, 64, 128, (128,), packed=jnp.int8, config=Config(64, 2, 1))
    call = case.arrays()
    call["q"] = call["q"].at[..., 3].set(large)
    f = functools.partial(decode_attention, config=case.config, interpret=True)
    assert_right(interpreted(lambda call: f(**call), call), call)


def test_a_new_token_is_written_and_seen():
    case = Case(4, 2, 64, 96, (96, 1, 50))
    call = case.arrays()
    rng = np.random.default_rng(1)
    new = {f"new_{x}": jnp.asarray(rng.standard_normal((3, 1, 2, 64)), jnp.bfloat16) for x in "kv"}
    f = functools.partial(decode_attention, interpret=True)
    out, k, v = interpreted(lambda call: f(**call), {**call, **new})
    last = np.asarray(call["kv_lengths"]) - 1
    for cache, name in ((k, "k"), (v, "v")):
        want = np.asarray(call[f"{name}_cache"]).copy()
        want[np.arange(3), last] = np.asarray(new[f"new_{name}"])[:, 0]
        np.testing.assert_array_equal(np.asarray(cache), want)
    assert_right(out, {**call, "k_cache": k, "v_cache": v})


@pytest.mark.parametrize("page", [None, 16])
def test_what_the_reference_writes(page):
    case = Case(2, 1, 8, 32, (32, 17, 0), page=page)
    call = case.arrays()
    new = {f"new_{x}": jnp.ones((3, 1, 1, 8), jnp.bfloat16) for x in "kv"}
    run_plain: Any = jax.jit(lambda call: decode_attention_reference(**call))
    out, k, v = run_plain({**call, **new})
    flat = Case(2, 1, 8, 32, (32, 17, 0)).arrays()
    want = np.asarray(flat["k_cache"]).copy()
    want[0, 31] = want[1, 16] = 1  # a row of no keys has no place for one
    if page is not None:
        k = k[call["page_table"]].reshape(want.shape)
    np.testing.assert_array_equal(np.asarray(k), want)
    assert v.shape == call["v_cache"].shape
    assert not np.asarray(out[2]).any()


def test_traced_lengths_are_clamped():
    case = Case(2, 1, 8, 20, (20, 0), numbers=(("window", 5),))
    call = case.arrays()
    right: Any = decode_attention_reference(**call, window=5)
    beyond = {**call, "kv_lengths": jnp.asarray([25, -3], jnp.int32)}
    plain: Any = jax.jit(lambda call: decode_attention_reference(**call, window=5))
    clamped = plain(beyond)
    np.testing.assert_array_equal(np.asarray(clamped), np.asarray(right))
    ours = interpreted(lambda call: decode_attention(**call, window=5, interpret=True), beyond)
    assert_right(ours, call, window=5)


@pytest.mark.slow
def test_gradients_are_those_of_the_reference():
    case = Case(4, 2, 64, 40, (40, 9), sinks=True)
    call = case.arrays()
    lengths = call.pop("kv_lengths")

    def f(attention: Any, call, **keywords):
        return jnp.sum(attention(**call, kv_lengths=lengths, **keywords).astype(jnp.float32) ** 2)

    ours = interpreted(jax.grad(functools.partial(f, decode_attention, interpret=True)), call)
    plain = jax.grad(functools.partial(f, decode_attention_reference))(call)
    for name, x in plain.items():
        near = np.asarray(x, np.float32)
        error = np.linalg.norm(np.asarray(ours[name], np.float32) - near)
        assert error <= 0.02 * np.linalg.norm(near), name  # of results that bfloat16 rounds apart


def shapes(n=4, k=2, h=64, s=128, dtype=jnp.bfloat16, batch=2, **others) -> dict[str, Any]:
    x = jax.ShapeDtypeStruct
    call = {
        "q": x((batch, 1, n, h), dtype),
        "k_cache": x((batch, s, k, h), dtype),
        "v_cache": x((batch, s, k, h), dtype),
        "kv_lengths": x((batch,), jnp.int32),
    }
    return {**call, **others}


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
    call = CASES["one key"].arrays()
    with pytest.raises(NotImplementedError, match="decode_attention: cannot run this call: needs"):
        decode_attention(**call)


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
        ({"window": 0}, "window must be at least 1 or None, got 0"),
        ({"softcap": -1.0}, "softcap must be positive and finite or None, got -1.0"),
        ({"sinks": np.zeros(3, np.float32)}, "sinks is float32[3]; it must be float32"),
        ({"splits": 0}, "splits must be at least 1 or None, got 0"),
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
    arrays: dict[str, Any] = {
        name: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x
        for name, x in call.items()
    }
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        decode_attention(**arrays, interpret=True)
    assert str(caught.value).startswith("decode_attention: ")


def test_a_float16_query_over_scales_that_nobody_wrote():
    """Behind a row's length a cache may hold anything, scales too; and a value may be zeros."""
    case = Case(4, 1, 64, 128, (70,), jnp.float16, packed=jnp.int8, config=Config(64, 2, 1))
    call = case.arrays()
    call["v_scale"] = call["v_scale"].at[:, 3].set(0.0)
    wild = {**call, "v_scale": call["v_scale"].at[:, 70:].set(jnp.nan)}
    f = functools.partial(decode_attention, config=case.config, interpret=True)
    assert_right(interpreted(lambda call: f(**call), wild), call)


@pytest.mark.skipif(aot.why_not() is not None, reason="nothing here compiles for a GPU")
@pytest.mark.parametrize("cache", [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn])
def test_no_block_of_a_cluster_goes_while_another_reads_what_it_has(cache, monkeypatch):
    """One thread tells the cluster that a block is done, so its warps have to meet before."""
    texts, read = [], aot._mosaic_kernel

    def kept(ptx):
        texts.append(ptx.read_text())
        return read(ptx)

    monkeypatch.setattr(aot, "_mosaic_kernel", kept)
    packed = None if cache == jnp.bfloat16 else cache
    call = Case(8, 2, 64, 512, (512,), packed=packed).arrays()
    config = Config(64, 2, 4, 2)  # two parts, so that the results go straight to memory
    aot.compile_for(lambda call: decode_attention(**call, config=config), call)
    [text] = [text for text in texts if "shared::cluster" in text]
    loads = [m.end() for m in re.finditer(r"ld[.\w]*\.shared::cluster", text)]
    arrivals = [m.start() for m in re.finditer(r"mbarrier\.arrive[.\w]*\.shared::cluster", text)]
    [*_, arrival] = arrivals
    assert loads
    assert loads[-1] < arrival
    assert re.search(r"\bbar(rier)?\.sync|barrier\.cta\.sync", text[loads[-1] : arrival])


@pytest.mark.skipif(aot.why_not() is not None, reason="nothing here compiles for a GPU")
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


ON_A_GPU = [
    Case(32, 8, 128, 513, (513, 64)),
    Case(32, 8, 128, 8192, (8192, 5000, 1)),
    Case(14, 2, 64, 2048, (2048,)),
    Case(14, 2, 64, 8192, (8192, 3, 0, 8000), config=Config(128, 3, 64, 16)),
    Case(32, 32, 96, 2048, (2000, 17), jnp.float16),
    Case(8, 4, 256, 2048, (2048, 100)),
    Case(64, 8, 64, 2048, (2048, 100), sinks=True, numbers=(("window", 128),)),
    Case(8, 4, 256, 2048, (1500,), numbers=(("softcap", 50.0), ("window", 1000))),
    Case(32, 8, 128, 2048, (2048, 700), page=16),
    Case(32, 8, 128, 2048, (2048, 700), page=256, packed=jnp.int8),
    Case(32, 8, 128, 8192, (8192, 700), packed=jnp.int8),
    Case(14, 2, 64, 8192, (8192, 700), packed=jnp.float8_e4m3fn),
    Case(16, 4, 96, 2048, (2048,), jnp.float16, packed=jnp.int8, sinks=True),
    *(
        Case(8, 2, 64, 4096, (4096, 1000, 0), packed=packed, sinks=True, config=config)
        for packed in (jnp.int8, jnp.float8_e4m3fn)
        for config in (Config(256, 2, 8, 2), Config(128, 3, 16, 2), Config(64, 1, 3, 1))
    ),
    *(
        Case(32, 8, 128, 1024, (1024, 1), jnp.float16, packed=packed, small=True)
        for packed in (jnp.int8, jnp.float8_e4m3fn)
    ),
    *(
        Case(8, 2, 64, 4096, (4096, 1000, 0), sinks=True, config=config)
        for config in (
            Config(64, 3, 4, 4),
            Config(128, 2, 8, 2),
            Config(256, 1, 16, 16),
            Config(64, 1, 32, 8),
            Config(128, 3, 3, 1),
        )
    ),
]
THEIRS = {name: case for name, case in CALLS.items() if case.T == 1}


def of_others(case) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of another project's call, and its numbers."""
    dtype = jnp.bfloat16 if case.dtype == "float32" else case.dtype
    q, k, v = (jnp.asarray(x, dtype) for x in case.inputs()[:3])
    numbers = {name: x for name, x in case.kwargs.items() if name != "causal"}
    lengths = numbers.pop("kv_lengths", np.full(case.B, case.S, np.int32))
    call = {"q": q, "k_cache": k, "v_cache": v, "kv_lengths": jnp.asarray(lengths)}
    return call, numbers


def both(call, config=None, **numbers):
    """Ours and the plain path, compiled for the GPU."""

    def run(call):
        ours = decode_attention(**call, **numbers, config=config)
        return ours, decode_attention_reference(**call, **numbers)

    return jax.jit(run).lower(call).compile()


@functools.cache
def programs() -> dict[Any, Any]:
    """All of the calls below, compiled side by side: one by one they would take minutes."""
    pool = ThreadPoolExecutor(8)
    found = {}
    for case in ON_A_GPU:
        found[case] = pool.submit(both, case.arrays(), case.config, **dict(case.numbers))
    for name, case in THEIRS.items():
        call, numbers = of_others(case)
        found[name] = pool.submit(both, call, **numbers)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_A_GPU, ids=str)
def test_on_a_gpu(case):
    call = case.arrays()
    ours, plain = programs()[case].result()(call)
    assert_as_accurate(ours, plain, truth(call, **dict(case.numbers)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", THEIRS)
def test_calls_of_other_projects(name):
    call, numbers = of_others(THEIRS[name])
    ours, plain = programs()[name].result()(call)
    assert_as_accurate(ours, plain, truth(call, **numbers))


@pytest.mark.gpu
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_any_call_on_a_gpu(data):
    draw = lambda *x: data.draw(st.sampled_from(x))  # noqa: E731
    heads, group, width = draw(1, 2, 8), draw(1, 3, 4, 7, 8, 12), draw(16, 64, 80, 96, 128, 256)
    packed = draw(None, None, jnp.int8, jnp.float8_e4m3fn)
    page = draw(None, 64, 128) if packed else draw(None, 16, 32, 256)
    size = 256 * data.draw(st.integers(1, 20))
    lengths = data.draw(st.lists(st.integers(0, size), min_size=1, max_size=5))
    case = Case(
        heads * group,
        heads,
        width,
        size,
        tuple(lengths),
        draw(jnp.bfloat16, jnp.float16),
        page=page,
        packed=packed,
        sinks=draw(True, False),
    )
    numbers = {"window": draw(None, None, 1, 200), "softcap": draw(None, None, 15.0)}
    call = case.arrays()
    ours, plain = both(call, **numbers)(call)
    assert_as_accurate(ours, plain, truth(call, **numbers))


@pytest.mark.gpu
def test_a_new_token_on_a_gpu():
    call = Case(32, 8, 128, 1024, (1024, 1, 500)).arrays()
    rng = np.random.default_rng(1)
    new = {f"new_{x}": jnp.asarray(rng.standard_normal((3, 1, 8, 128)), jnp.bfloat16) for x in "kv"}
    ours = jax.jit(lambda call: decode_attention(**call))({**call, **new})
    run_plain: Any = jax.jit(lambda call: decode_attention_reference(**call))
    plain = run_plain({**call, **new})
    for mine, near in zip(ours[1:], plain[1:], strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(near))
    assert_right(ours[0], {**call, "k_cache": ours[1], "v_cache": ours[2]})
