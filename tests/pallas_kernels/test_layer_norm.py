"""LayerNorm in the interpreter: every dtype, odd sizes, gradients, large means; what it refuses."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import H200
from kernels import interpreted
from numerics import assert_as_accurate

from pallas_kernels import device as device_lib
from pallas_kernels.layer_norm import (
    Config,
    bucket,
    candidates,
    default_config,
    layer_norm,
    layer_norm_reference,
    tuning_calls,
    why_not,
)

pytestmark = pytest.mark.usefixtures("strict_jax")

EPS = 1e-5


def case(*shape, dtype: Any = jnp.float32, weight_dtype: Any = None, bias=True, mean=0.0) -> Any:
    """x, weight, bias and the cotangent of the result."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(mean + rng.standard_normal(shape), dtype)
    weight, other = (
        jnp.asarray(at + 0.3 * rng.standard_normal(shape[-1]), weight_dtype or dtype)
        for at in (1, 0)
    )
    return x, weight, other if bias else None, jnp.asarray(rng.standard_normal(shape), dtype)


def both(norm, x, weight, bias, d_out, **keywords):
    """The result and the gradients."""
    f = lambda *arrays: norm(*arrays, eps=EPS, **keywords)  # noqa: E731
    out, pull = jax.vjp(f, x, weight, bias)
    return out, *pull(d_out)


def truth(x, weight, bias, d_out):
    arrays = np.asarray(x), np.asarray(weight), None if bias is None else np.asarray(bias)
    d_arrays = oracles.layer_norm(*arrays, eps=EPS, d_out=np.asarray(d_out))
    return oracles.layer_norm(*arrays, eps=EPS), *d_arrays


def assert_right(ours, arrays, **keywords):
    plain = both(layer_norm_reference, *arrays)
    wanted = (arrays[0], *arrays[:3])
    for mine, near, exact, like in zip(ours, plain, truth(*arrays), wanted, strict=True):
        if like is None:
            assert mine is None
            continue
        assert mine.dtype == like.dtype
        assert_as_accurate(mine, near, exact, **keywords)


def run(x, *others):
    """What lanes take is plain JAX in the interpreter: of rows of 16 bits those of more than 256
    numbers, and up to 8192 their gradients.
    """
    return both(functools.partial(layer_norm, interpret=True), x, *others)


@pytest.mark.parametrize(
    ("shape", "kwargs"),
    [
        ((1, 96), {}),  # a quarter of a warp has a row
        ((7, 96), {"dtype": jnp.bfloat16, "bias": False}),
        ((3, 5, 40), {"dtype": jnp.float16, "weight_dtype": jnp.float32}),
        ((13, 448), {}),  # a warp has a row, not filled
        ((5, 500), {"weight_dtype": jnp.float16}),
        ((1, 516), {}),  # one past what four warps have in one access
        ((3, 516), {"weight_dtype": jnp.bfloat16}),
        ((2, 2048), {}),  # fills the threads: no stream
        ((2, 2432), {"weight_dtype": jnp.bfloat16, "bias": False}),
    ],
)
def test_layer_norm(shape, kwargs):
    arrays = case(*shape, **kwargs)
    assert_right(interpreted(run, *arrays), arrays)


@pytest.mark.slow
@pytest.mark.parametrize("width", [3072, 7168, 7680, 8192, 16384])
def test_wide_rows(width):
    arrays = case(3, width, dtype=jnp.bfloat16 if width > 8192 else jnp.float32)
    assert_right(interpreted(run, *arrays), arrays)


def test_the_check_can_fail():
    x, weight, bias, d_out = arrays = case(5, 96)
    out, d_x, d_weight, d_bias = interpreted(run, *arrays)
    for wrong in (
        (out.at[0, 0].multiply(1.05), d_x, d_weight, d_bias),
        (out - bias[None], d_x, d_weight, d_bias),
        (out, d_x.at[4, 95].add(1e-3), d_weight, d_bias),
        (out, d_x, d_bias, d_weight),
        (out, d_x, d_weight, d_bias - d_out[4]),  # the last row of an odd number is forgotten
        both(functools.partial(layer_norm_reference), x + 0.01 * x**2, weight, bias, d_out),
    ):
        with pytest.raises(AssertionError, match="error is"):
            assert_right(wrong, arrays)


@pytest.mark.parametrize("width", [96, 1000])
def test_a_mean_far_from_zero(width):
    """At mean 1e4 and variance 1 nothing of E[x^2] - mean^2 is left in float32.

    1000 columns do not fill the threads: a zero beside the row, counted in the variance, would add
    (1e4)^2. The mean itself is a sum of terms of 1e4, so its last digits are those of 1e4.
    """
    arrays = case(3, width, mean=1e4)
    ours = interpreted(run, *arrays)
    assert_right(ours, arrays, largest_term=1e4)
    x = arrays[0]
    naive = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(
        jnp.mean(x * x, -1, keepdims=True) - x.mean(-1, keepdims=True) ** 2 + EPS
    )
    with pytest.raises(AssertionError):
        assert_right(
            (naive * arrays[1][None] + arrays[2][None], *ours[1:]), arrays, largest_term=1e4
        )


@pytest.mark.parametrize(("width", "mean"), [(1040, 1e4), (2048, 0.0)])
def test_wide_rows_far_from_zero_and_with_outliers(width, mean):
    """Sums around a few numbers of the row: far from zero, and where all of these are outliers."""
    x, *others = case(3, width, mean=mean)
    if not mean:
        x = x.at[:, ::64].set(jnp.asarray([300.0, -300.0, 1e4])[:, None])
    arrays = x, *others
    assert_right(interpreted(run, *arrays), arrays, largest_term=1e4)


def test_a_row_of_one_number_is_the_bias():
    x, weight, bias, _ = case(2, 96)
    f = functools.partial(layer_norm, eps=EPS, interpret=True)
    out = interpreted(f, jnp.full_like(x, 7.0), weight, bias)
    np.testing.assert_array_equal(out, jnp.broadcast_to(bias, x.shape))


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((19, 96), Config(1, 1, 1)),
        ((19, 96), Config(2, 3, 1)),
        ((8, 256), Config(2, 0, 1)),
    ],
)
def test_a_config_changes_no_bit(shape, config):
    x, weight, bias, _ = case(*shape, dtype=jnp.bfloat16)
    f = functools.partial(layer_norm, eps=EPS, interpret=True)
    other = interpreted(functools.partial(f, config=config), x, weight, bias)
    np.testing.assert_array_equal(other, interpreted(f, x, weight, bias))


@pytest.mark.parametrize(
    ("shape", "config"), [((9, 516), Config(4, 2, 3)), ((3, 1024), Config(1, 2, 1, 2))]
)
def test_a_config_changes_no_result(shape, config):
    """Of wide rows: their sums are taken in another order, so that a last digit may differ."""
    x, weight, bias, _ = case(*shape)
    f = functools.partial(layer_norm, eps=EPS, interpret=True)
    a, b = (interpreted(functools.partial(f, config=c), x, weight, bias) for c in (None, config))
    assert_as_accurate(b, a, oracles.layer_norm(*map(np.asarray, (x, weight, bias)), eps=EPS))


def specs(M=8192, D=4096, dtype="bfloat16", weight="bfloat16", bias: Any = "bfloat16") -> Any:
    x = jax.ShapeDtypeStruct((M, D), dtype)
    row = lambda dtype: jax.ShapeDtypeStruct((D,), dtype)  # noqa: E731
    return x, row(weight), bias and row(bias)


@pytest.mark.parametrize(
    ("arrays", "device", "phrase"),
    [
        (specs(), device_lib.Device("cpu"), "needs an NVIDIA GPU, found cpu"),
        (specs(), dataclasses.replace(H200, capability=8.0), "needs a Hopper GPU"),
        (specs(dtype="float64"), H200, "takes bfloat16, float16 or float32, got x float64"),
        (specs(weight="float64"), H200, "got weight float64"),
        (specs(bias="float64"), H200, "got bias float64"),
        (specs(M=0), H200, r"an array [0, 4096] holds no numbers"),
        (specs(D=100), H200, "rows of 200 bytes are no multiple of 16 bytes"),
        (specs(D=32), H200, "rows of 32 numbers have a weight of fewer bytes than a warpgroup"),
        (
            specs(D=6152, dtype="float32"),
            H200,
            "rows of 6152 numbers are 769 runs of 8; a copy takes 256",
        ),
        (specs(D=11264), H200, "rows of 11264 numbers are 88 a thread, more than the 64 whose"),
        (specs(D=16640), H200, "rows of 33280 bytes are longer than 32768, what stays on chip"),
    ],
)
def test_why_not(arrays, device, phrase):
    assert phrase in (why_not(*arrays, eps=EPS, device=device) or "")


@pytest.mark.parametrize(
    "arrays", [specs(), specs(bias=None), specs(D=6152), specs(dtype="float32", D=8192)]
)
def test_nothing_stands_in_the_way(arrays):
    assert why_not(*arrays, eps=EPS, device=H200) is None


def test_it_says_why_it_cannot_run():
    with pytest.raises(NotImplementedError, match="layer_norm: cannot run this call: needs an NV"):
        layer_norm(*case(2, 96)[:3], eps=EPS)
    with pytest.raises(NotImplementedError, match="layer_norm: cannot run this call: rows of 20"):
        layer_norm(*case(2, 5)[:3], eps=EPS, interpret=True)


@pytest.mark.parametrize(
    ("change", "eps", "sentence"),
    [
        ({1: jnp.ones(95)}, EPS, r"the weight has shape \(95,\), but the rows of x \(2, 96\) want"),
        ({2: jnp.ones((1, 96))}, EPS, r"the bias has shape \(1, 96\), but"),
        ({0: jnp.ones(())}, EPS, r"x has shape \(\); its rows must hold numbers"),
        ({0: jnp.ones((2, 0))}, EPS, r"x has shape \(2, 0\); its rows must hold numbers"),
        ({0: jnp.ones((2, 96), jnp.int32)}, EPS, "x is int32; it must be floating point"),
        ({2: jnp.ones(96, jnp.int32)}, EPS, "bias is int32; it must be floating point"),
        ({}, 0.0, "eps must be positive and finite, got 0.0"),
        ({}, float("nan"), "eps must be positive and finite, got nan"),
    ],
)
@pytest.mark.own_errors
def test_user_errors(change, eps, sentence):
    arrays = [change.get(i, x) for i, x in enumerate(case(2, 96)[:3])]
    with pytest.raises(ValueError, match=f"layer_norm: {sentence}"):
        layer_norm(*arrays, eps=eps, interpret=True)


def test_configs_follow_the_sizes():
    assert bucket(*specs(M=5000), eps=EPS) == "bfloat16-m8192-d4096-bfloat16-bias"
    different = {
        bucket(*arrays, eps=EPS)
        for arrays in (specs(), specs(D=896), specs(M=1), specs(bias=None), specs(dtype="float16"))
    }
    assert len(different) == 5
    for call in tuning_calls():
        found = candidates(*call.arguments, **call.keywords, device=H200)
        assert found == [Config(1, 0, 1, 1), Config(1, 0, 1, 2)]
        assert default_config(*call.arguments, **call.keywords, device=H200).blocks_per_sm > 0
        assert why_not(*call.arguments, **call.keywords, device=H200) is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [(1, 4096), (64, 896), (8192, 896), (33, 1032), (65, 5120), (8191, 3072), (8192, 8192)],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_on_the_gpu(shape, dtype):
    arrays = case(*shape, dtype=dtype, mean=1e4 if dtype == jnp.float32 else 3.0)
    ours = jax.jit(functools.partial(both, layer_norm))(*arrays)
    assert_right(ours, arrays, largest_term=1e4 if dtype == jnp.float32 else None)
