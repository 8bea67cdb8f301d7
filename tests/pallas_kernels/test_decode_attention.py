"""decode_attention in the interpreter and on a GPU: heads, lengths, pages, packed caches."""

import dataclasses
import functools
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
from pallas_kernels.decode_attention import (
    Config,
    decode_attention,
    decode_attention_reference,
)

pytestmark = pytest.mark.usefixtures("strict_jax")


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
    "a window beyond 32 bits": Case(4, 4, 64, 1, (1,), numbers=(("window", 10**12),)),
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


@pytest.mark.aot
def test_a_new_token_compiles_with_a_soft_cap():
    """Its score comes in another layout than those of the cache."""
    call = jax.eval_shape(Case(32, 8, 128, 1024, (1024, 1, 500)).arrays)
    new = {f"new_{x}": jax.ShapeDtypeStruct((3, 1, 8, 128), jnp.bfloat16) for x in "kv"}
    f = functools.partial(decode_attention, softcap=50.0)
    program = aot.compile_for(lambda call: f(**call), {**call, **new})
    assert program.mosaic_launches() == ["decode_attention"]


@pytest.mark.parametrize("page", [None, 16])
def test_what_the_reference_writes(page):
    case = Case(2, 1, 8, 32, (32, 17, 0), page=page)
    call = case.arrays()
    new = {f"new_{x}": jnp.full((3, 1, 1, 8), n, jnp.bfloat16) for n, x in enumerate("kv", 1)}
    run_plain: Any = jax.jit(lambda call: decode_attention_reference(**call))
    out, *held = run_plain({**call, **new})
    flat = Case(2, 1, 8, 32, (32, 17, 0)).arrays()
    for n, (x, cache) in enumerate(zip("kv", held, strict=True), 1):
        want = np.asarray(flat[f"{x}_cache"]).copy()
        want[0, 31] = want[1, 16] = n  # a row of no keys has no place for one
        found = cache if page is None else cache[call["page_table"]].reshape(want.shape)
        np.testing.assert_array_equal(np.asarray(found), want)
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
    call = Case(4, 2, 64, 40, (40, 9), sinks=True).arrays()
    lengths, numbers = call.pop("kv_lengths"), {"window": 30, "softcap": 2.0, "scale": 0.2}
    # no function of the results, which the kernel rounds otherwise
    d_out = jnp.linspace(-1, 1, call["q"].size, dtype=jnp.bfloat16).reshape(call["q"].shape)

    def pull(attention: Any, call, **keywords):
        f = functools.partial(attention, kv_lengths=lengths, **numbers, **keywords)
        return jax.vjp(lambda call: f(**call), call)[1](d_out)[0]

    ours = interpreted(functools.partial(pull, decode_attention, interpret=True), call)
    plain = jax.jit(functools.partial(pull, decode_attention_reference))(call)
    for name, x in plain.items():
        assert np.any(x), name
        np.testing.assert_array_equal(np.float32(ours[name]), np.float32(x), err_msg=name)


def test_a_float16_query_over_scales_that_nobody_wrote():
    """Behind a row's length a cache may hold anything, scales too; and a value may be zeros."""
    case = Case(4, 1, 64, 128, (70,), jnp.float16, packed=jnp.int8, config=Config(64, 2, 1))
    call = case.arrays()
    call["v_scale"] = call["v_scale"].at[:, 3].set(0.0)
    wild = {**call, "v_scale": call["v_scale"].at[:, 70:].set(jnp.nan)}
    f = functools.partial(decode_attention, config=case.config, interpret=True)
    assert_right(interpreted(lambda call: f(**call), wild), call)


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
