"""What cuDNN may be asked, and the path with our own softmax; and what cuDNN is asked then."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import H200, absent
from attention_calls import (
    CASES,
    NOTHING,
    inputs,
    lengths,
)
from numerics import assert_as_accurate

from jaxllm.ops import explain
from jaxllm.ops.attention import ATTENTION, attention
from pallas_kernels.device import Device

A100 = Device("gpu", "NVIDIA A100", 8.0, 108)


def why_not(
    device: Device = H200, dtype: Any = jnp.bfloat16, T=8, S=8, H=64, name="cudnn", **kwargs: Any
):
    q, k = jax.ShapeDtypeStruct((1, T, 4, H), dtype), jax.ShapeDtypeStruct((1, S, 2, H), dtype)
    call = {"causal": True, "scale": 1.0, **NOTHING, **kwargs}
    return ATTENTION[name].why_not(q, k, k, device=device, **call)


ROW = jax.ShapeDtypeStruct((1,), jnp.int32)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"device": A100, "H": 128},
        {"device": Device("gpu", "NVIDIA B200", 10.0), "H": 256},
        {"dtype": jnp.float16},
        {"T": 7, "S": 7},  # causal without a mask
        {"T": 7, "S": 7, "window": 3},
        {"T": 1, "S": 7, "kv_lengths": ROW},
        {"T": 1, "S": 7, "kv_lengths": ROW, "window": 7},
        {"T": 4, "S": 8, "kv_lengths": ROW, "window": 3},
        {"causal": False},
    ],
)
def test_cudnn_runs(kwargs):
    assert why_not(**kwargs) is None


@pytest.mark.parametrize("sizes", [{"T": 0}, {"S": 0}])
def test_cudnn_is_not_asked_to_attend_to_nothing(sizes):
    assert "nothing to attend to: q is [1, " in (why_not(**sizes) or "")


def test_cudnn_needs_a_gpu():
    assert why_not(device=Device("cpu", "cpu")) == "needs an NVIDIA GPU, found cpu"
    assert why_not(device=Device("tpu", "TPU v5")) == "needs an NVIDIA GPU, found TPU v5"


def test_cudnn_needs_ampere():
    t4 = Device("gpu", "Tesla T4", 7.5)
    assert why_not(device=t4) == "needs compute capability 8.0 or newer, found 7.5 (Tesla T4)"


def test_cudnn_needs_a_known_capability():
    amd = Device("gpu", "AMD Instinct MI300X")
    phrase = "needs compute capability 8.0 or newer, found an unknown one (AMD Instinct MI300X)"
    assert why_not(device=amd) == phrase


def test_cudnn_takes_half_precision():
    assert why_not(dtype=jnp.float32) == "takes bfloat16 or float16, got float32"


def test_cudnn_takes_one_dtype():
    q, k = (jax.ShapeDtypeStruct((1, 8, 2, 64), d) for d in (jnp.bfloat16, jnp.float16))
    phrase = ATTENTION["cudnn"].why_not(q, k, k, device=H200, causal=True, scale=1.0, **NOTHING)
    assert phrase == "takes one dtype, got q bfloat16, k float16, v float16"


@pytest.mark.parametrize(
    ("device", "H", "widest"), [(H200, 60, 256), (H200, 264, 256), (A100, 256, 128)]
)
def test_cudnn_takes_some_head_widths(device, H, widest):
    phrase = f"head width {H} is not a multiple of 8 up to {widest}"
    assert why_not(device=device, H=H) == phrase


def test_cudnn_has_no_soft_cap():
    assert why_not(softcap=50.0) == "has no soft cap"


def test_cudnn_returns_no_weights():
    assert why_not(return_weights=True) == "returns no weights: it never has them all"


def test_who_runs_unfused():
    """What flash attention refuses: float32, odd widths, returned weights, a soft cap."""
    taken: list[dict[str, Any]] = [
        {"dtype": jnp.float32},
        {"H": 60, "return_weights": True},
        {"softcap": 50.0, "T": 1, "S": 16, "kv_lengths": ROW},
    ]
    for kwargs in taken:
        assert why_not(name="unfused", **kwargs) is None
    refused: list[tuple[dict[str, Any], str]] = [
        ({"device": A100}, "needs a Hopper GPU (compute capability 9.0), found 8.0 (NVIDIA A100)"),
        ({"T": 7, "S": 7}, "rows of 28 bytes are no multiple of 16 bytes, which the copy engine"),
        ({"T": 1, "kv_lengths": ROW}, "a mask of rows of 8 bytes is too narrow for the copy engin"),
    ]
    for kwargs, phrase in refused:
        assert (why_not(name="unfused", **kwargs) or "").startswith(f"its scale_softmax: {phrase}")
    assert why_not(name="unfused-interpret", device=A100) is None
    q = jax.ShapeDtypeStruct((1, 8, 4, 64), jnp.float32)
    with absent("NVIDIA H200"):
        small = explain("attention", q, q, q)["unfused"]
        assert small == "no call as small (T=8, S=8) was measured faster than xla"
        q = jax.ShapeDtypeStruct((1, 2048, 4, 64), jnp.float32)
        assert explain("attention", q, q, q)["unfused"] is None


@pytest.mark.parametrize(
    "kwargs",
    [
        {"T": 3, "S": 8, "kv_lengths": ROW},
        {"T": 8, "S": 9},
        {"T": 1, "S": 8, "window": 3, "kv_lengths": ROW},
        {"T": 7, "S": 7, "causal": False, "window": 3},
    ],
)
def test_cudnn_takes_masks_of_even_lengths(kwargs):
    phrase = f"takes a mask only for even lengths, got T={kwargs['T']}, S={kwargs['S']}"
    assert why_not(**kwargs) == phrase


ASKED = (
    "causal",
    "all see all",
    "one token over a cache",
    "one token over a full cache",
    "a chunk behind others",
    "a chunk over an empty row",
    "more queries than keys, not causal",
    "window",
    "packed, window",
)


@pytest.fixture
def asked(monkeypatch):
    """The arguments of the calls to JAX's cuDNN attention, which are answered with zeros."""
    calls = []

    def call(q, k, v, *, implementation, **kwargs):
        assert implementation == "cudnn"
        calls.append(kwargs)
        return jnp.zeros_like(q)

    monkeypatch.setattr(jax.nn, "dot_product_attention", call)
    return calls


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.usefixtures("plain_cudnn")
def test_what_cudnn_is_asked_means_the_same(name):
    sizes, kwargs = {"T": 5, "S": 5, **CASES[name][0]}, {"causal": True, **CASES[name][1]}
    q, k, v, _ = inputs(**sizes, dtype=jnp.bfloat16)
    call = {**NOTHING, "scale": q.shape[-1] ** -0.5, **kwargs}
    out = jax.jit(lambda q, k, v: ATTENTION["cudnn"].run(q, k, v, **call))(q, k, v)
    args, sides = [np.asarray(x) for x in (q, k, v)], {}
    for key, value in kwargs.items():
        sides[key] = np.asarray(value) if isinstance(value, jax.Array) else value
    near = oracles.attention(*args, **sides, dtype=jnp.bfloat16)
    assert_as_accurate(out, near, oracles.attention(*args, **sides))


def test_cudnn_is_asked_for_a_mask_where_its_own_would_mean_another(asked):
    """Its causal mask is aligned to the start: the last query would see the first three keys."""
    q, k, v, _ = inputs(T=3, S=7, dtype=jnp.bfloat16)
    ATTENTION["cudnn"].run(q, k, v, causal=True, scale=1.0, **NOTHING)
    (kwargs,) = asked
    assert not kwargs.get("is_causal", False)
    np.testing.assert_array_equal(kwargs["mask"][0, 0], np.tri(3, 7, 4, bool))


def test_cudnn_is_asked_for_no_key_past_the_cache(asked):
    q, k, v, _ = inputs(T=1, S=7, dtype=jnp.bfloat16)
    call = {**NOTHING, "kv_lengths": lengths(8, 3)}
    ATTENTION["cudnn"].run(q, k, v, causal=True, scale=1.0, **call)
    (kwargs,) = asked
    assert kwargs["key_value_seq_lengths"].tolist() == [7, 3]


def test_a_name_that_cannot_run_says_why():
    q, k, v, _ = inputs()
    with pytest.raises(
        NotImplementedError,
        match="attention: 'cudnn' cannot run this call: needs an NVIDIA GPU, found ",
    ):
        attention(q, k, v, implementation="cudnn")
    with (
        absent("NVIDIA H200"),
        pytest.raises(NotImplementedError, match="takes bfloat16 or float16, got float32"),
    ):
        attention(q, k, v, implementation={"attention": "cudnn"})


def test_a_traced_scale_is_left_to_others():
    reasons = []

    @jax.make_jaxpr
    def traced(scale):
        reasons.append(why_not(scale=scale))
        return scale

    traced(0.1)
    assert reasons == ["the scale is part of the kernel, and here it is traced"]
    assert why_not(scale=np.float32(0.1)) is why_not(scale=jnp.float32(0.1)) is None
