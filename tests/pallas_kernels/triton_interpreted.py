"""What the kernels in official Triton compute, by Triton's interpreter.

Run by `triton_programs.run_interpreted` with TRITON_INTERPRET=1. The interpreter cuts off what does
not fit bfloat16 where a GPU rounds to even, so bfloat16 is left to the tests on a GPU.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_programs
from numerics import assert_as_accurate

from pallas_kernels import _triton_call, triton_rms_norm, triton_softmax
from pallas_kernels import device as device_lib
from pallas_kernels.rms_norm import rms_norm_reference
from pallas_kernels.softmax import scale_softmax_reference
from pallas_kernels.triton_softmax import scale_softmax

# So few SMs that a program of the backward pass has several tiles
DEVICE = device_lib.Device("gpu", "NVIDIA H200", 9.0, 2)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    monkeypatch.setattr(_triton_call, "call", triton_programs.interpret_call)
    monkeypatch.setattr(device_lib, "current", lambda: DEVICE)


def rms_norm_case(shape, dtype, weight_dtype):
    keys = jax.random.split(jax.random.key(0), 5)
    x, residual, d_y, d_total = (3 * jax.random.normal(key, shape, dtype) for key in keys[:4])
    weight = 1 + 0.3 * jax.random.normal(keys[4], shape[-1:], weight_dtype or dtype)
    return x, weight, residual, d_y, d_total


def rms_norm_both_ways(norm, x, weight, residual, d_y, d_total, **kwargs):
    def run(x, weight, residual, d_y, d_total):
        y, pull = jax.vjp(lambda x, w: norm(x, w, **kwargs), x, weight)
        sums, pull_sums = jax.vjp(
            lambda x, w, r: norm(x, w, residual=r, **kwargs), x, weight, residual
        )
        return y, pull(d_y), sums, pull_sums((d_y, d_total))

    return jax.jit(run)(x, weight, residual, d_y, d_total)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype", "weight_dtype"),
    [
        ((1, 5), jnp.float32, None),
        ((7, 96), jnp.float16, jnp.float32),
        ((2, 3, 97), jnp.float32, None),
        ((13, 128), jnp.float16, None),
        ((3, 1000), jnp.float32, jnp.float16),
        ((2, 1025), jnp.float16, None),
        ((1, 8193), jnp.float16, None),
    ],
)
def test_rms_norm(shape, dtype, weight_dtype, zero_centered):
    arrays = rms_norm_case(shape, dtype, weight_dtype)
    kwargs = {"eps": 1e-5, "zero_centered": zero_centered}
    ours = rms_norm_both_ways(triton_rms_norm.rms_norm, *arrays, **kwargs)
    plain = rms_norm_both_ways(rms_norm_reference, *arrays, **kwargs)
    truth = triton_programs.rms_norm_truth(*map(np.asarray, arrays), **kwargs)
    ours, plain, truth = map(jax.tree.leaves, (ours, plain, truth))
    for one, other, true in zip(ours, plain, truth, strict=True):
        assert one.dtype == other.dtype
        assert_as_accurate(one, other, true)


def test_rms_norm_check_can_fail():
    arrays = rms_norm_case((3, 97), jnp.float32, None)
    plain = rms_norm_both_ways(rms_norm_reference, *arrays, eps=1e-5)
    truth = triton_programs.rms_norm_truth(*map(np.asarray, arrays), eps=1e-5)
    wrong = rms_norm_both_ways(triton_rms_norm.rms_norm, *arrays, eps=1e-3)
    wrong, plain, truth = map(jax.tree.leaves, (wrong, plain, truth))
    for i in (0, 1, 2, 3, 5, 7):  # all but the sum and the gradient that is twice there
        with pytest.raises(AssertionError, match="error is"):
            assert_as_accurate(wrong[i], plain[i], truth[i])


def test_rms_norm_config_never_changes_the_result():
    x, weight, residual, d_y, d_total = rms_norm_case((11, 96), jnp.float32, None)
    default = triton_rms_norm.default_config(x, weight, eps=1e-5, device=DEVICE)
    configs = triton_rms_norm.candidates(x, weight, eps=1e-5, device=DEVICE)
    configs += [dataclasses.replace(default, rows=r, backward_rows=s) for r, s in ((8, 2), (2, 16))]
    results = [
        jax.tree.leaves(
            rms_norm_both_ways(
                triton_rms_norm.rms_norm, x, weight, residual, d_y, d_total,
                eps=1e-5, config=config,
            )
        )
        for config in configs
    ]  # fmt: skip
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-5)  # sums in another order


def softmax_both_ways(x, d_y, scale, **kwargs):
    def run(x, d_y, scale):
        y, pull = jax.vjp(lambda x, s: scale_softmax(x, scale=s, **kwargs), x, scale)
        return y, *pull(d_y)

    return jax.jit(run)(x, d_y, jnp.float32(scale))


def kept(shape, mask, causal):
    keep = np.broadcast_to(True if mask is None else np.asarray(mask), shape)
    return keep & np.tri(*shape[-2:], shape[-1] - shape[-2], dtype=bool) if causal else keep


def assert_right(x, d_y, scale, mask, causal, config=None):
    kwargs = {"mask": mask, "causal": causal}
    ours = softmax_both_ways(x, d_y, scale, config=config, **kwargs)
    plain = triton_programs.scale_softmax_plain(
        scale_softmax_reference, x, d_y, jnp.float32(scale), **kwargs
    )
    keep = kept(x.shape, mask, causal)
    truth = triton_programs.scale_softmax_truth(*map(np.asarray, (x, d_y)), scale, keep)
    for one, other, true in zip(ours, plain, truth, strict=True):
        assert one.dtype == other.dtype
        # A gradient is a difference of products of up to 1 and 3 times the scale
        assert_as_accurate(one, other, true, largest_term=3 * max(abs(scale), 1))


def softmax_case(shape, dtype, mask_shape=None):
    keys = jax.random.split(jax.random.key(0), 3)
    x, d_y = (3 * jax.random.normal(key, shape, dtype) for key in keys[:2])
    mask = None if mask_shape is None else jax.random.bernoulli(keys[2], 0.6, mask_shape)
    return x, d_y, mask


@pytest.mark.parametrize(
    ("shape", "dtype", "scale", "mask_shape", "causal"),
    [
        ((1,), jnp.float32, 1.0, None, False),
        ((97,), jnp.float16, -0.5, None, False),
        ((5, 512), jnp.float32, 0.125, None, False),
        ((2, 3, 5, 64), jnp.float16, 0.125, None, True),
        ((3, 7, 4), jnp.float32, 2.0, None, True),  # the first queries see nothing
        ((7, 7), jnp.float16, 0.0, None, True),
        ((2, 3, 2, 50), jnp.float32, 0.3, (2, 1, 2, 50), True),
        ((2, 3, 2, 50), jnp.float16, 0.3, (50,), False),
        ((2, 3, 2, 50), jnp.float32, 0.3, (2, 1), False),
        ((2, 3, 2, 50), jnp.float32, 0.3, (2, 1, 1, 50), True),
        ((2, 3, 2, 50), jnp.float32, 0.3, (2, 3, 2, 50), False),
        ((2, 2, 1, 3, 16), jnp.float32, 0.3, (2, 1, 1, 3, 1), False),
        ((2, 2, 2, 2, 16), jnp.float32, 0.3, (2, 1, 2, 1, 16), False),  # more than three groups
        ((2, 2, 3, 16), jnp.float32, 0.3, (1, 2, 1, 16), False),
        ((5, 1000), jnp.float32, 1.0, (1, 1000), False),
        ((1, 2049), jnp.float16, 1.0, None, False),
    ],
)
def test_scale_softmax(shape, dtype, scale, mask_shape, causal):
    x, d_y, mask = softmax_case(shape, dtype, mask_shape)
    assert_right(x, d_y, scale, mask, causal)


@pytest.mark.parametrize("parts", [1, 5])
@pytest.mark.parametrize(
    ("shape", "mask_shape", "causal"),
    [((2, 300), None, False), ((2, 3, 300), (2, 1, 300), True), ((9, 130), (9, 1), True)],
)
def test_scale_softmax_of_long_rows(shape, mask_shape, causal, parts):
    x, d_y, mask = softmax_case(shape, jnp.float32, mask_shape)
    assert_right(x, d_y, 0.3, mask, causal, triton_softmax.Config(64, 1, 1, parts))


def test_scale_softmax_check_can_fail():
    x, d_y, _ = softmax_case((2, 97), jnp.float32)
    truth = triton_programs.scale_softmax_truth(*map(np.asarray, (x, d_y)), 0.3, True)
    wrong = softmax_both_ways(x, d_y, 0.301)
    for one, true in zip(wrong, truth, strict=True):
        with pytest.raises(AssertionError, match="error is"):
            assert_as_accurate(one, true, true, largest_term=3)


@pytest.mark.parametrize("config", [None, (16, 1, 1, 1), (16, 1, 1, 3)])
def test_scale_softmax_of_nothing_is_zero(config):
    """Whatever lies behind the mask, in x and in the cotangent; and rows of -inf."""
    config = config and triton_softmax.Config(*config)
    x, d_y, mask = softmax_case((4, 40), jnp.float32, (4, 40))
    mask = mask.at[1].set(False)
    behind = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 1e30])[jnp.arange(40) % 4]
    bad_x, bad_d_y = jnp.where(mask, x, behind), jnp.where(mask, d_y, behind)
    bad_x = bad_x.at[2].set(-jnp.inf)
    x = x.at[2].set(-jnp.inf)
    good = softmax_both_ways(x, d_y, 0.3, mask=mask, config=config)
    bad = softmax_both_ways(bad_x, bad_d_y, 0.3, mask=mask, config=config)
    for one, other in zip(good, bad, strict=True):
        assert np.all(np.isfinite(one))
        np.testing.assert_array_equal(one, other)
    for rows in good[:2]:
        np.testing.assert_array_equal(rows[np.array([1, 2])], 0)


def test_scale_softmax_over_another_axis():
    x, _, mask = softmax_case((3, 20, 5), jnp.float32, (20, 1))
    for axis in (0, 1, -2):
        ours = scale_softmax(x, mask=mask, axis=axis)
        plain = scale_softmax_reference(x, mask=mask, axis=axis)
        np.testing.assert_allclose(ours, plain, rtol=1e-6, atol=1e-7)


def test_scale_softmax_config_never_changes_the_result():
    x, d_y, mask = softmax_case((5, 70), jnp.float32, (70,))
    configs = [None, *(triton_softmax.Config(128, rows, 4) for rows in (1, 2, 8))]
    configs += [triton_softmax.Config(block, 1, 2, parts) for block in (16, 64) for parts in (1, 4)]
    results = [softmax_both_ways(x, d_y, 0.3, mask=mask, config=config) for config in configs]
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)  # sums in another order
