"""RMSNorm in the interpreter: every dtype, odd sizes, residuals, gradients; what it refuses."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import H200, absent
from kernels import interpreted
from numerics import assert_as_accurate

from jaxllm import aot
from pallas_kernels import device as device_lib
from pallas_kernels import norm_lanes
from pallas_kernels.layer_norm import layer_norm
from pallas_kernels.rms_norm import (
    Config,
    bucket,
    candidates,
    default_config,
    rms_norm,
    rms_norm_reference,
    tuning_calls,
    why_not,
)

pytestmark = pytest.mark.usefixtures("strict_jax")

EPS = 1e-5


@pytest.mark.parametrize("lead", [(), (2,)])
def test_whole_numbers_of_64_bits_change_nothing(lead):
    x, weight, *_ = case(*lead, 5, 4096, dtype=jnp.bfloat16)

    def loss(x, weight):
        return jnp.sum(rms_norm(x, weight, eps=EPS, interpret=True).astype(jnp.float32))

    pull = jax.value_and_grad(loss, (0, 1))
    found = []
    for wide in (False, True):
        with jax.enable_x64(wide):
            run = jax.vmap(pull, (0, None)) if lead else pull
            found.append(interpreted(run, x, weight))
    jax.tree.map(np.testing.assert_array_equal, *found)


def case(*shape, dtype: Any = jnp.float32, weight_dtype: Any = None) -> Any:
    """x, weight, residual, and the cotangents of the norm and of x + residual."""
    rng = np.random.default_rng(0)
    draw = lambda: jnp.asarray(2 * rng.standard_normal(shape), dtype)  # noqa: E731
    weight = jnp.asarray(0.5 + 0.3 * rng.standard_normal(shape[-1]), weight_dtype or dtype)
    return draw(), weight, draw(), draw(), draw()


def both(norm, residual, zero_centered, x, weight, other, d_y, d_total, **keywords):
    """The results and the gradients."""

    def f(x, weight, other):
        given = {"residual": other} if residual else {}
        return norm(x, weight, eps=EPS, zero_centered=zero_centered, **given, **keywords)

    out, pull = jax.vjp(f, x, weight, other)
    return out, pull((d_y, d_total) if residual else d_y)


def truth(residual, zero_centered, x, weight, other, d_y, d_total):
    """In float64 from the sum that is stored."""
    total = np.asarray(x + other if residual else x)
    norm = functools.partial(
        oracles.rms_norm, total, np.asarray(weight), eps=EPS, zero_centered=zero_centered
    )
    d_x, d_weight = norm(d_out=np.asarray(d_y).astype(np.float64))
    if not residual:
        return norm(), (d_x, d_weight, np.zeros(other.shape))
    d_x = d_x + np.asarray(d_total).astype(np.float64)
    return (norm(), total.astype(np.float64)), (d_x, d_weight, d_x)


def assert_right(ours, arrays, residual=False, zero_centered=False):
    plain = both(rms_norm_reference, residual, zero_centered, *arrays)
    exact = truth(residual, zero_centered, *arrays)
    for mine, near, right in zip(*map(jax.tree.leaves, (ours, plain, exact)), strict=True):
        assert mine.dtype == near.dtype
        # d_weight is a sum over all rows of terms as large as the cotangent times h
        assert_as_accurate(mine, near, right, largest_term=max(1.0, float(np.abs(right).max())))


def run(*arrays, residual=False, zero_centered=False, **keywords):
    """What lanes take is plain JAX in the interpreter: of rows of 16 bits those of more than 256
    numbers, and up to 8192 their gradients.
    """
    norm = functools.partial(rms_norm, interpret=True)
    return interpreted(functools.partial(both, norm, residual, zero_centered, **keywords), *arrays)


@pytest.mark.parametrize(
    ("shape", "dtypes", "residual", "zero_centered"),
    [
        ((1, 96), {}, False, False),  # a quarter of a warp has a row
        ((7, 96), {"dtype": jnp.bfloat16}, True, False),
        ((3, 5, 40), {"dtype": jnp.float16, "weight_dtype": jnp.float32}, False, True),
        ((32, 128), {"dtype": jnp.bfloat16}, False, False),  # fills the threads: no stream
        ((13, 448), {}, True, True),  # a warp has a row, not filled
        ((5, 500), {"weight_dtype": jnp.float16}, True, False),
        ((1, 516), {}, False, False),  # one past a warpgroup's access
        ((3, 516), {}, False, True),
        ((2, 1024), {}, True, False),  # two warpgroups have a row
        ((2, 2432), {"weight_dtype": jnp.bfloat16}, False, False),
    ],
)
def test_rms_norm(shape, dtypes, residual, zero_centered):
    arrays = case(*shape, **dtypes)
    ours = run(*arrays, residual=residual, zero_centered=zero_centered)
    assert_right(ours, arrays, residual, zero_centered)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "residual"), [(3072, True), (8192, False), (9216, False), (16384, True)]
)
def test_wide_rows(width, residual):
    arrays = case(3, width, dtype=jnp.bfloat16 if width > 8192 else jnp.float32)
    assert_right(run(*arrays, residual=residual), arrays, residual)


@pytest.mark.aot
@pytest.mark.parametrize("norm", [rms_norm, functools.partial(layer_norm, bias=None)])
def test_a_weight_of_half_the_rows_bytes_compiles(norm):
    x = jax.ShapeDtypeStruct((5, 260), jnp.float32)
    weight = jax.ShapeDtypeStruct((260,), jnp.bfloat16)

    def gradients(x, weight):
        y, pull = jax.vjp(functools.partial(norm, eps=EPS), x, weight)
        return pull(y)

    program = aot.compile_for(gradients, x, weight)
    assert len(program.mosaic_launches()) == 2
    assert program.compiled.out_info[1].dtype == weight.dtype


@pytest.mark.aot
@pytest.mark.parametrize("width", [8448, 9216, 12800])
def test_gradients_of_rows_in_parts_compile(width):
    """Numbers that no warpgroup holds at once, and that two do not share evenly."""
    x, weight = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((33, width), (width,)))

    def loss(x, weight):
        return jnp.sum(rms_norm(x, weight, eps=EPS).astype(jnp.float32) ** 2)

    program = aot.compile_for(jax.grad(loss, argnums=(0, 1)), x, weight)
    assert program.mosaic_launches() == ["rms_norm", "rms_norm_backward"]
    assert program.kernel("rms_norm_backward").spill_store_bytes == 0


def test_the_check_can_fail():
    arrays = case(5, 96)
    out, (d_x, d_weight, d_other) = run(*arrays)
    for wrong in (
        (out.at[0, 0].multiply(1.05), (d_x, d_weight, d_other)),
        (out, (d_x.at[4, 95].add(1e-3), d_weight, d_other)),
        (out, (d_x, d_weight - 0.01, d_other)),
        both(rms_norm_reference, False, True, *arrays),
    ):
        with pytest.raises(AssertionError, match="error is"):
            assert_right(wrong, arrays)


@pytest.mark.parametrize(
    ("width", "config"),
    [
        (96, Config(2, 1, 1)),
        (96, Config(1, 3, 2)),
        (128, Config(1, 0, 1)),
        (128, Config(2, 2, 1)),
        (2048, Config(1, 0, 1, 1)),
        (2048, Config(1, 0, 1, 2)),
        (2048, Config(2, 2, 1, 2)),
        (3072, Config(1, 3, 1, 2)),  # of three accesses a thread: one warpgroup must have them
    ],
)
def test_a_config_changes_no_result(width, config):
    x, weight, *_ = case(16, width)
    f = functools.partial(rms_norm, eps=EPS, interpret=True)
    a, b = (interpreted(functools.partial(f, config=c), x, weight) for c in (None, config))
    # Sums are taken in another order: a last digit may differ
    assert_as_accurate(b, a, oracles.rms_norm(np.asarray(x), np.asarray(weight), eps=EPS))


def test_a_config_that_does_not_fit_says_so():
    x, weight, *_ = case(3, 96)
    with pytest.raises(NotImplementedError, match="has no stream, which takes rows that fill"):
        rms_norm(x, weight, eps=EPS, config=Config(1, 0), interpret=True)
    with pytest.raises(ValueError, match="stages may be 0, the other numbers must be 1"):
        Config(0, 1, 1)
    with pytest.raises(ValueError, match="at most 2 warpgroups share a row"):
        Config(1, 1, 1, 3)


@pytest.mark.own_errors
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": jnp.ones(95)}, r"the weight has shape \(95,\), but the rows of x \(5, 96\)"),
        ({"x": jnp.ones((5, 96), jnp.int32)}, "x is int32; it must be floating point"),
        ({"residual": jnp.ones((4, 96))}, r"the residual is float32\[4, 96\], not as x is"),
        ({"residual": jnp.ones((5, 96), jnp.bfloat16)}, "the residual is bfloat16"),
        ({"eps": 0.0}, "eps must be positive and finite, got 0.0"),
        ({"eps": float("nan")}, "eps must be positive and finite, got nan"),
    ],
)
def test_what_the_caller_got_wrong(change, words):
    arguments = {"x": jnp.ones((5, 96)), "weight": jnp.ones(96), "eps": EPS, **change}
    with pytest.raises(ValueError, match=f"^rms_norm: .*{words}"):
        rms_norm(arguments.pop("x"), arguments.pop("weight"), **arguments)


@pytest.mark.parametrize(
    ("x", "device", "words"),
    [
        ((5, 96), device_lib.Device("cpu"), "needs an NVIDIA GPU, found cpu"),
        ((5, 96), device_lib.Device("gpu", "NVIDIA A100", 8.0), r"9.0\), found 8.0 \(NVIDIA A100"),
        ((5, 96), device_lib.Device("gpu", "NVIDIA B200", 10.0), "needs a Hopper GPU"),
        ((5, 97), H200, "rows of 388 bytes are no multiple of 16 bytes, which the copy engine"),
        ((0, 96), H200, r"an array \[0, 96\] holds no numbers"),
        ((5, 2**20), H200, "rows of 4194304 bytes are longer than"),
        ((5, 8192), H200, None),
    ],
)
def test_why_not(x, device, words):
    x = jax.ShapeDtypeStruct(x, jnp.float32)
    weight = jax.ShapeDtypeStruct(x.shape[-1:], jnp.float32)
    reason = why_not(x, weight, eps=EPS, device=device)
    assert reason is None if words is None else re.search(words, str(reason)), reason


def test_other_dtypes_are_refused():
    x = jax.ShapeDtypeStruct((5, 96), jnp.float8_e4m3fn)
    weight = jax.ShapeDtypeStruct((96,), jnp.float32)
    assert "got x float8_e4m3fn" in str(why_not(x, weight, eps=EPS, device=H200))
    assert "got weight float8_e4m3fn" in str(
        why_not(weight, jax.ShapeDtypeStruct((96,), x.dtype), eps=EPS, device=H200)
    )


def test_without_a_gpu_the_sentence_is_raised():
    with pytest.raises(NotImplementedError, match=r"^rms_norm: cannot run this call: needs an NV"):
        rms_norm(jnp.ones((5, 96)), jnp.ones(96), eps=EPS)


@pytest.mark.parametrize("call", tuning_calls(), ids=lambda call: str(call.arguments[0].shape))
def test_what_is_tuned_can_run(call):
    with absent():
        default = default_config(*call.arguments, **call.keywords)
        tried = candidates(*call.arguments, **call.keywords)
    width = call.arguments[0].shape[-1]
    assert all(norm_lanes.takes(width, jnp.bfloat16, config) for config in [default, *tried])
    assert tried == [Config(1, 0, 1, 1), Config(1, 0, 1, 2)]
    assert f"-d{width}-" in bucket(*call.arguments, **call.keywords)


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(8192, 8192), (8191, 896), (1, 4096), (1000003, 128)])
def test_on_the_gpu(shape, residual):
    arrays = case(*shape, dtype=jnp.bfloat16)
    ours = jax.jit(functools.partial(both, rms_norm, residual, False))(*arrays)
    assert_right(ours, arrays, residual)
