"""The backward pass of attention against float64: interpreted if small, at full sizes on a GPU."""

import dataclasses
import functools
import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import absent
from kernels import interpreted
from numerics import assert_as_accurate

from jaxllm import aot
from pallas_kernels import device as device_lib
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.flash_attention_backward import (
    Config,
    backward,
    config_problem,
    default_config,
)

pytestmark = pytest.mark.usefixtures("strict_jax")

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
NOTHING = {"window": None, "softcap": None, "causal": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """q [B, T, N, H], k and v [B, S, K, H]; segments: "sorted", "mixed" or none of them."""

    shape: tuple[int, int, int, int, int, int]
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)
    segments: str = ""
    lengths: tuple[int, ...] | None = None
    sinks: bool = False
    dtype: Any = BF16
    config: Config | None = None

    def arrays(self) -> dict[str, Any]:
        """What the forward pass took, and both cotangents."""
        b, t, s, n, kv_heads, h = self.shape
        rng = np.random.default_rng(sum(self.shape))
        heads = {"q": (b, t, n, h), "k": (b, s, kv_heads, h), "v": (b, s, kv_heads, h)}
        found: dict[str, Any] = {
            name: jnp.asarray(rng.standard_normal(shape), F32).astype(self.dtype)
            for name, shape in (*heads.items(), ("d_out", (b, t, n, h)))
        }
        found["d_lse"] = jnp.asarray(rng.standard_normal((b, t, n)), F32)
        if self.segments == "sorted":
            ids = np.sort(rng.integers(0, 4, (b, max(t, s))), axis=1).astype(np.int32)
            found |= {"q_segment_ids": ids[:, -t:], "kv_segment_ids": ids[:, -s:]}
        if self.segments == "mixed":
            found["q_segment_ids"] = rng.integers(-1, 3, (b, t)).astype(np.int32)
            found["kv_segment_ids"] = rng.integers(0, 4, (b, s)).astype(np.int32)
        if self.lengths is not None:
            found["kv_lengths"] = np.asarray(self.lengths, np.int32)
        if self.sinks:
            found["sinks"] = jnp.asarray(rng.standard_normal(n), F32)
        return found


FULL = {"causal": False}
BY_HEAD = Config(128, early=False, dq_buffers=1, ds_buffers=2, by_head=True)
INTERPRETED = {
    "one query, one key": Case((1, 1, 1, 1, 1, 8)),
    "17 queries": Case((1, 17, 17, 3, 1, 64)),
    "two tiles": Case((1, 130, 130, 2, 1, 64)),
    "a chunk at the end": Case((1, 70, 200, 3, 1, 128), dtype=F16),
    "more queries than keys": Case((1, 200, 70, 1, 1, 128)),
    "all keys": Case((1, 64, 129, 2, 2, 128), FULL),
    "shares of heads of 96": Case((2, 70, 130, 4, 2, 96), config=Config(together=3, shares=2)),
    "shares of heads of 192": Case(
        (1, 70, 65, 3, 1, 192),
        FULL,
        config=Config(do_stages=1, early=False, dq_buffers=1, together=2, shares=3),
    ),
    "head by head": Case((1, 130, 130, 4, 2, 64), config=BY_HEAD),
    "shares, head by head": Case(
        (1, 70, 130, 4, 1, 64), config=dataclasses.replace(BY_HEAD, shares=2)
    ),
    "heads of 72": Case((1, 65, 129, 1, 1, 72)),
    "heads of 40": Case((1, 130, 130, 1, 1, 40), FULL, dtype=F16),
    "heads of 256": Case((1, 65, 70, 2, 1, 256)),
    "heads of 136": Case((1, 70, 65, 1, 1, 136), FULL),
    "window": Case((1, 200, 300, 1, 1, 128), {"window": 50}),
    "window of one": Case((1, 64, 130, 1, 1, 128), {"window": 1}),
    "window on both sides": Case((1, 130, 260, 1, 1, 64), {**FULL, "window": 33}),
    "lengths": Case((3, 64, 257, 1, 1, 128), lengths=(0, 130, 257)),
    "a length past the end": Case((1, 70, 130, 1, 1, 64), lengths=(150,)),
    "negative scale": Case((1, 70, 130, 1, 1, 64), {"scale": -0.1}),
    "lengths, all keys": Case((2, 17, 257, 1, 1, 64), FULL, lengths=(1, 200)),
    "soft cap": Case((1, 64, 129, 2, 1, 128), {"softcap": 2.0, "scale": 0.2}, sinks=True),
    "documents": Case((1, 257, 257, 1, 1, 128), segments="sorted"),
    "documents in no order": Case((1, 130, 200, 1, 1, 64), FULL, segments="mixed"),
    "everything": Case(
        (2, 130, 257, 2, 1, 128),
        {"window": 100, "softcap": 5.0, "scale": 0.3},
        segments="sorted",
        lengths=(97, 257),
        sinks=True,
    ),
}


def forward(case: Case, arrays: dict[str, Any]) -> tuple[Any, Any]:
    """(out, lse), of float64, as the forward kernel gives them."""
    inputs = {name: x for name, x in arrays.items() if name not in ("d_out", "d_lse")}
    exact = {
        name: np.asarray(x).astype(np.float64) if name in ("q", "k", "v", "sinks") else x
        for name, x in inputs.items()
    }
    out, lse = oracles.attention(**exact, **case.keywords, return_lse=True)
    # a query that sees nothing has no log-sum-exp to depend on anything
    arrays["d_lse"] = jnp.where(np.isfinite(lse), arrays["d_lse"], 0.0)
    return jnp.asarray(out, F32).astype(case.dtype), jnp.asarray(lse, F32)


def gradients(case: Case, arrays: dict[str, Any], *, interpret: bool = False) -> Any:
    out, lse = forward(case, arrays)

    def call(arrays, out, lse):
        sides = {x: arrays.get(x) for x in ("q_segment_ids", "kv_segment_ids", "kv_lengths")}
        return backward(
            arrays["q"],
            arrays["k"],
            arrays["v"],
            out,
            jnp.swapaxes(lse, 1, 2),
            arrays["d_out"],
            jnp.swapaxes(arrays["d_lse"], 1, 2),
            **{**NOTHING, "scale": case.shape[-1] ** -0.5, **case.keywords},
            **sides,
            sinks=arrays.get("sinks"),
            config=case.config,
            interpret=interpret,
        )

    return interpreted(call, arrays, out, lse) if interpret else jax.jit(call)(arrays, out, lse)


def assert_right(case: Case, arrays: dict[str, Any], results: Any) -> None:
    given: dict[str, Any] = {name: np.asarray(x) for name, x in arrays.items()}
    plain = oracles.attention(**given, **case.keywords, dtype=case.dtype)
    exact = {
        name: x if np.issubdtype(x.dtype, np.integer) else x.astype(np.float64)
        for name, x in given.items()
    }
    truth = oracles.attention(**exact, **case.keywords)
    wanted = [case.dtype] * 3 + [F32] * case.sinks
    given_back = [x for x in results if x is not None]
    for ours, dtype, other, true in zip(given_back, wanted, plain, truth, strict=True):
        assert ours.dtype == dtype
        assert_as_accurate(ours, other, true)


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str):
    case = INTERPRETED[name]
    arrays = case.arrays()
    assert_right(case, arrays, gradients(case, arrays, interpret=True))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(96), "block_q must be 64 for heads of 128"),
        (Config(stages=0), "stages and do_stages must be at least 1"),
        (Config(do_stages=0), "stages and do_stages must be at least 1"),
        (Config(ds_buffers=3), "dq_buffers and ds_buffers must be 1 or 2"),
        (Config(dq_buffers=0), "dq_buffers and ds_buffers must be 1 or 2"),
        (Config(together=0), "together must be at least 1"),
        (Config(shares=2), "shares must divide the 3 query heads of a key head"),
        (Config(shares=0), "shares must divide the 3 query heads of a key head"),
        (Config(stages=6), "of 232448 bytes on chip"),
    ],
)
def test_what_is_wrong_with_a_config(config: Config, message: str):
    (q, k, v, out, lse, d_out), _, keywords = structs((1, 70, 70, 3, 1, 128), "")
    call = functools.partial(backward, **keywords, config=config, interpret=True)
    with pytest.raises(ValueError, match=message) as caught:
        jax.eval_shape(call, q, k, v, out, lse, d_out)
    assert str(caught.value).startswith(f"flash_attention_backward: {config}: ")


@pytest.mark.parametrize("width", [8, 64, 72, 128, 136, 256])
@pytest.mark.parametrize("tokens", [1, 1000, 32768])
def test_no_default_has_a_problem(width: int, tokens: int):
    for heads, kv_heads in ((1, 1), (7, 1), (32, 8)):
        (q, k, *_), _, _ = structs((2, tokens, tokens, heads, kv_heads, width), "")
        for num_sms in (2, 78, 132):
            device = device_lib.Device("gpu", "NVIDIA H200", 9.0, num_sms)
            assert config_problem(default_config(q, k, device=device), q, k) is None


def test_the_check_can_fail():
    case = INTERPRETED["17 queries"]
    arrays = case.arrays()
    forward(case, arrays)
    given: dict[str, Any] = {name: np.asarray(x) for name, x in arrays.items()}
    good = [jnp.asarray(x, BF16) for x in oracles.attention(**given, dtype=BF16)]
    assert_right(case, arrays, good)
    for i in range(3):
        bad = list(good)
        bad[i] = bad[i].at[0, 3, 0].multiply(1.1)
        with pytest.raises(AssertionError):
            assert_right(case, arrays, bad)


def structs(shape: tuple[int, ...], masks: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    b, t, s, n, kv_heads, h = shape
    q = jax.ShapeDtypeStruct((b, t, n, h), BF16)
    k = jax.ShapeDtypeStruct((b, s, kv_heads, h), BF16)
    arrays: dict[str, Any] = {}
    keywords = dict(NOTHING, scale=h**-0.5, causal=masks != "all keys")
    if masks in ("documents", "everything"):
        arrays["q_segment_ids"] = jax.ShapeDtypeStruct((b, t), jnp.int32)
        arrays["kv_segment_ids"] = jax.ShapeDtypeStruct((b, s), jnp.int32)
    if masks == "everything":
        arrays["kv_lengths"] = jax.ShapeDtypeStruct((b,), jnp.int32)
        keywords |= {"window": 300, "softcap": 30.0}
    lse = jax.ShapeDtypeStruct((b, n, t), F32)
    return (q, k, k, q, lse, q), arrays, keywords


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize(
    ("masks", "width"),
    [
        *(("everything", width) for width in (64, 96, 128, 256)),
        *(("documents", width) for width in (64, 128)),
        ("all keys", 96),
        ("", 256),
    ],
)
def test_compiled(masks: str, width: int):
    """No product that the assembler makes wait for another."""
    inputs, arrays, keywords = structs((2, 1000, 1003, 8, 2, width), masks)
    program = aot.compile_for(lambda x, y: backward(*x, **y, **keywords), inputs, arrays)
    assert program.mosaic_launches() == ["flash_attention_backward"]
    kernel = program.kernel("flash_attention_backward")
    assert not [note for note in kernel.notes if note.startswith("C75")]
    assert kernel.count("HGMMA")


@pytest.mark.aot
def test_memory_is_linear():
    for tokens in (4096, 16384, 65536):
        inputs, _, keywords = structs((1, tokens, tokens, 4, 1, 128), "")
        program = aot.compile_for(lambda *x, keywords=keywords: backward(*x, **keywords), *inputs)
        # dQ and the shares of dK and dV in float32, and what is a number a query
        assert program.temporary_bytes <= tokens * 4 * (3 * 4 * 128 + 64) + 2**20


ON_DEVICE = {
    **INTERPRETED,
    "513": Case((2, 513, 513, 8, 2, 128)),
    "513, heads of 64": Case((2, 513, 513, 7, 1, 64), dtype=F16),
    "513, heads of 256": Case((1, 513, 513, 2, 1, 256)),
    "2048": Case((2, 2048, 2048, 4, 1, 128)),
    "2048, everything": Case(
        (2, 2048, 2048, 4, 1, 128),
        {"window": 700, "softcap": 20.0},
        segments="sorted",
        lengths=(1500, 2048),
        sinks=True,
    ),
    "8192": Case((1, 8192, 8192, 2, 1, 128)),
    "8192, documents": Case((1, 8192, 8192, 2, 1, 64), segments="sorted"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_DEVICE)
def test_on_the_device(name: str):
    case = ON_DEVICE[name]
    arrays = case.arrays()
    assert_right(case, arrays, gradients(case, arrays))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128, 256])
def test_two_runs_give_the_same_bits(width: int):
    """So many blocks that they add in another order each time if nobody holds them back."""
    case = Case((2, 2048, 2048, 8, 2, width))
    arrays = case.arrays()
    rng = np.random.default_rng(0)
    lse = jnp.asarray(rng.uniform(7, 9, (2, 8, 2048)), F32)
    out = arrays["q"]
    call = jax.jit(lambda q, k, v, d: backward(q, k, v, out, lse, d, scale=0.1, **NOTHING)[:3])
    inputs = [arrays[name] for name in ("q", "k", "v", "d_out")]
    first = call(*inputs)
    for _ in range(50):
        for x, y in zip(call(*inputs), first, strict=True):
            assert jnp.array_equal(x, y)


def test_under_vmap_a_slice_is_a_launch_of_its_own():
    arrays = [jax.ShapeDtypeStruct((3, 1, 256, n, 64), BF16) for n in (4, 2, 2)]
    total = lambda *x: jnp.sum(flash_attention(*x).astype(F32))  # noqa: E731
    with absent():
        program = str(jax.make_jaxpr(jax.vmap(jax.grad(total, (0, 1, 2))))(*arrays))
    grids = re.findall(r"grid=\((.*?)\),[^)]*\).*?kernel_name='(\w+)'", program)
    grids = {name: [int(n) for n in grid.split(",") if n] for grid, name in grids}
    assert len(grids["flash_attention"]) == 2  # whose blocks wait for nobody: all slices at once
    assert len(grids["flash_attention_backward"]) == 1


@pytest.mark.gpu
def test_vmap_on_a_gpu():
    """Blocks count at words of their own slice, or a part of dQ is put where it should be added."""
    rng = np.random.default_rng(0)
    shapes = ((8, 1, 2048, n, 64) for n in (4, 2, 2))
    q, k, v = (jnp.asarray(rng.standard_normal(shape), BF16) for shape in shapes)

    def total(q, k, v):
        return jnp.sum(flash_attention(q, k, v).astype(F32) ** 2)

    pull = jax.grad(total, (0, 1, 2))
    slices = [jax.jit(pull)(q[i], k[i], v[i]) for i in range(8)]
    wanted = [jnp.stack(parts) for parts in zip(*slices, strict=True)]
    many = jax.jit(jax.vmap(pull))
    for _ in range(5):
        for ours, exact in zip(many(q, k, v), wanted, strict=True):
            np.testing.assert_array_equal(ours, exact)


@pytest.mark.gpu
@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_random_combinations(data):
    draw = data.draw
    kv_heads = draw(st.integers(1, 2))
    b, t, s = draw(st.integers(1, 2)), draw(st.integers(1, 300)), draw(st.integers(1, 400))
    shape = (b, t, s, kv_heads * draw(st.sampled_from([1, 4, 7])), kv_heads)
    keywords = {
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.integers(1, 200)),
        "softcap": draw(st.none() | st.floats(1, 30)),
    }
    case = Case(
        (*shape, 8 * draw(st.integers(1, 32))),
        keywords,
        draw(st.sampled_from(["", "sorted", "mixed"])),
        draw(st.none() | st.tuples(*[st.integers(0, s)] * b)),
        draw(st.booleans()),
        draw(st.sampled_from([BF16, F16])),
    )
    arrays = case.arrays()
    assert_right(case, arrays, gradients(case, arrays))
