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

from pallas_kernels import _triton_call, triton_rms_norm
from pallas_kernels import device as device_lib
from pallas_kernels import rms_norm as mosaic_rms_norm

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
    plain = rms_norm_both_ways(mosaic_rms_norm.rms_norm_reference, *arrays, **kwargs)
    truth = triton_programs.rms_norm_truth(*map(np.asarray, arrays), **kwargs)
    ours, plain, truth = map(jax.tree.leaves, (ours, plain, truth))
    for one, other, true in zip(ours, plain, truth, strict=True):
        assert one.dtype == other.dtype
        assert_as_accurate(one, other, true)


def test_rms_norm_check_can_fail():
    arrays = rms_norm_case((3, 97), jnp.float32, None)
    plain = rms_norm_both_ways(mosaic_rms_norm.rms_norm_reference, *arrays, eps=1e-5)
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
