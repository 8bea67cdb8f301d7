"""Ternary weights times int8: the sums against int64, bit for bit, and what the call refuses.

The interpreter knows no products of a warp: there, a block computes its rows in plain JAX, so that
what it tries is which rows, scales and results are a block's. The tests at the end try the rest on
a GPU.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import H200
from kernels import equations, interpreted

from jaxllm import aot, ops
from pallas_kernels import device as device_lib
from pallas_kernels import ternary_matmul_kernel as kernel
from pallas_kernels.quantize import dequantize, quantize
from pallas_kernels.quantized_matmul import Config as QuantizedConfig
from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.rms_norm import rms_norm_reference
from pallas_kernels.ternary_matmul import (
    MAX_ROWS,
    Config,
    bucket,
    candidates,
    default_config,
    in_kernel,
    quantize_rows,
    shapes_of,
    ternary_linear,
    ternary_matmul,
    ternary_matmul_reference,
    tuning_calls,
    unpack,
    why_not,
)

pytestmark = pytest.mark.usefixtures("strict_jax")

F32 = jnp.dtype(jnp.float32)


def case(*lead, n=48, k=128):
    """xq, x_scale, and a weight whose row scales differ, as those of joined weights do."""
    rng = np.random.default_rng(0)
    xq = jnp.asarray(rng.integers(-128, 128, (*lead, k)), jnp.int8)
    packed = quantize(jnp.asarray(rng.standard_normal((n, k)), jnp.float32), "ternary")
    row_scale = jnp.asarray(rng.uniform(0.5, 1.5, n), jnp.float32)
    x_scale = jnp.asarray(rng.uniform(0.5, 1.5, lead), jnp.float32)
    return xq, x_scale, dataclasses.replace(packed, row_scale=row_scale)


def ones(xq, x_scale, packed):
    """The same with scales of 1: the result is the sum itself, exact in float32."""
    one = dataclasses.replace(packed, row_scale=jnp.ones_like(packed.row_scale))
    return xq, jnp.ones_like(x_scale), one


def sums(xq, packed):
    return np.asarray(xq, np.int64) @ np.asarray(unpack(packed.codes), np.int64).T


@pytest.mark.parametrize("k", [64, 896, 14336])
def test_sums_are_exact(k):
    xq, x_scale, packed = ones(*case(7, k=k))
    # the largest that can be: all of one sign
    xq = xq.at[0].set(-128)
    packed = dataclasses.replace(packed, codes=packed.codes.at[0].set(0))
    y = ternary_matmul_reference(xq, x_scale, packed, out_dtype=F32)
    np.testing.assert_array_equal(np.asarray(y, np.int64), sums(xq, packed))
    assert y[0, 0] == 128 * k


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (64,)])
@pytest.mark.parametrize("tile_n", [16, 48])
def test_a_block_has_its_rows(lead, tile_n):
    arguments = case(*lead)
    config = Config(tile_n=tile_n, ahead=1)
    run = functools.partial(ternary_matmul, interpret=True, out_dtype=F32, config=config)
    y = interpreted(run, *arguments)
    np.testing.assert_array_equal(y, ternary_matmul_reference(*arguments, out_dtype=F32))
    exact = interpreted(run, *ones(*arguments))
    np.testing.assert_array_equal(np.asarray(exact, np.int64), sums(arguments[0], arguments[2]))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_what_follows_the_sums(dtype):
    arguments = case(2, 3)
    rng = np.random.default_rng(1)
    rest = {
        "bias": jnp.asarray(300 * rng.standard_normal(48), dtype),
        "residual": jnp.asarray(300 * rng.standard_normal((2, 3, 48)), dtype),
    }
    xq, x_scale, packed = arguments
    truth = sums(xq, packed) * np.asarray(x_scale, np.float64)[..., None]
    truth = truth * np.asarray(packed.row_scale, np.float64)
    truth = truth + np.asarray(rest["bias"], np.float64) + np.asarray(rest["residual"], np.float64)

    def with_rest(xq, x_scale, packed, bias, residual):
        return ternary_matmul(
            xq, x_scale, packed, bias=bias, residual=residual, out_dtype=dtype, interpret=True
        )

    y = interpreted(with_rest, *arguments, rest["bias"], rest["residual"])
    assert y.dtype == dtype
    # one rounding to the dtype, three in float32 of numbers up to 5000
    same = functools.partial(
        np.testing.assert_allclose, rtol=float(jnp.finfo(dtype).eps) / 2 + 3e-7, atol=2e-3
    )
    same(np.asarray(y, np.float64), truth)
    with pytest.raises(AssertionError):
        same(np.asarray(y, np.float64), truth + 0.01 * np.asarray(rest["bias"], np.float64))


def test_rows_as_int8():
    x = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    x[3], x[4, 0] = 0, 1e4
    xq, x_scale = quantize_rows(jnp.asarray(x))
    a = np.maximum(np.abs(x.astype(np.float64)).max(-1, keepdims=True), 1e-5)
    np.testing.assert_array_equal(xq, np.clip(np.round(127 * x / a), -128, 127))
    np.testing.assert_allclose(x_scale, a[:, 0] / 127, rtol=1e-6)
    wide, _ = quantize_rows(jnp.asarray(x, jnp.bfloat16))  # in float32 whatever came
    narrow = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    a = np.maximum(np.abs(narrow).max(-1, keepdims=True), 1e-5)
    np.testing.assert_array_equal(wide, np.clip(np.round(127 * narrow / a), -128, 127))


def in_float32(x) -> tuple[jax.Array, jax.Array]:
    """`quantize_rows` of numbers that float32 has, each step rounded to the nearest."""
    x = np.asarray(x).astype(np.float32)
    largest = np.maximum(np.abs(x).max(-1), np.float32(1e-5))
    codes = np.rint(x * (np.float32(127) / largest)[..., None])
    return jnp.asarray(np.clip(codes, -128, 127), jnp.int8), jnp.asarray(largest / np.float32(127))


def assert_same_codes(codes, x):
    """But for ties: XLA divides float32 on a GPU with an error of up to two units in the last place
    (div.full.f32), so 127 x / a may be taken for more or less than n + 1/2 if it is so near.
    """
    x = np.asarray(x).astype(np.float64)
    quotients = 127 * x / np.maximum(np.abs(x).max(-1, keepdims=True), 1e-5)
    away = np.abs(np.asarray(codes, np.float64) - quotients) - 0.5
    assert np.all(away <= 3 * 2.0**-23 * np.abs(quotients))  # and the product is rounded


def test_the_check_of_codes_can_fail():
    """The largest half as large is a tie: 63.5. In this row float32 calls it less."""
    x = np.random.default_rng(0).uniform(-4, 4, (1, 512)).astype(np.float32)
    x[0, 7:9] = 4.75, 2.375
    codes = np.array(in_float32(x)[0])
    np.testing.assert_array_equal(quantize_rows(jnp.asarray(x))[0], codes)
    assert codes[0, 8] == 63
    for code in (64, 63):
        codes[0, 8] = code
        assert_same_codes(codes, x)
    for place, code in ((8, 65), (100, codes[0, 100] + 1)):
        wrong = codes.copy()
        wrong[0, place] = code
        with pytest.raises(AssertionError):
            assert_same_codes(wrong, x)


SHAPES = [
    *((2560, 2560), (3840, 2560), (13824, 2560), (2560, 6912), (3200, 3200), (20480, 3200)),
    *((6144, 4096), (28672, 4096), (4096, 14336), (896, 4864), (48, 64)),
]


@pytest.mark.parametrize("m", [1, 2, 7, 16, 33, 64])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_default_configs_can_run(m, n, k):
    xq, x_scale, packed = shapes_of(m, n, k)
    assert packed.shape == (n, k)
    assert why_not(xq, packed, device=H200) is None
    config = default_config(xq, x_scale, packed, device=H200)
    assert kernel.problem(config, m, n, k) is None
    others = candidates(xq, x_scale, packed, device=H200)
    assert config not in others
    assert all(kernel.problem(config, m, n, k) is None for config in others)


def test_tuning_calls():
    calls = tuning_calls()
    arguments: Any = [call.arguments for call in calls]
    keys = [bucket(*each) for each in arguments]
    assert len(set(keys)) == len(keys)
    assert "m8-n13824-k2560" in keys
    assert calls[0].make is not None
    made: Any = calls[0].make(jax.random.key(0))
    xq, x_scale, packed = made
    specs = jax.tree.map(lambda x: (x.shape, x.dtype), calls[0].arguments)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), (xq, x_scale, packed)) == specs
    weight = np.asarray(unpack(packed.codes))
    assert [(weight == w).mean() > 0.3 for w in (-1, 0, 1)] == [True] * 3
    assert xq.min() == -128
    assert xq.max() == 127


@pytest.mark.parametrize(
    ("m", "n", "k", "reason"),
    [
        (MAX_ROWS + 1, 48, 64, "takes 64 rows of x at most, got 65"),
        (1, 48, 96, "takes inputs in multiples of 64, fewer than 131072, got 96"),
        (1, 48, 2**17, "takes inputs in multiples of 64, fewer than 131072, got 131072"),
        (1, 40, 64, "takes outputs in multiples of 16, got 40"),
        (0, 48, 64, r"nothing to multiply: x is \[0, 64\], the weight \[48, 64\]"),
    ],
)
def test_what_it_cannot_run(m, n, k, reason):
    xq, x_scale, packed = shapes_of(m, n, k)
    with pytest.raises(NotImplementedError, match=f"cannot run this call: {reason}"):
        jax.eval_shape(functools.partial(ternary_matmul, interpret=True), xq, x_scale, packed)


def test_without_a_gpu():
    cpu = device_lib.Device("cpu", "cpu")
    xq, _, packed = shapes_of(1, 48, 64)
    assert why_not(xq, packed, device=cpu) == "needs an NVIDIA GPU, found cpu"
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        ternary_matmul(*case(1))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (Config(tile_n=24), "tile_n must divide the weight's rows and be a multiple of 16"),
        (Config(tile_n=32), "tile_n must divide the weight's rows and be a multiple of 16"),
        (Config(tile_n=16, warps=6), "warps must be a multiple of 4, 16 at most"),
        (Config(tile_n=16, ahead=2), "ahead must be 1 to 1, the turns of a warp"),
    ],
)
def test_a_config_that_does_not_fit(config, sentence):
    with pytest.raises(ValueError, match=sentence):
        ternary_matmul(*case(1), config=config, interpret=True)


def test_a_config_that_is_too_large():
    problem = kernel.problem(Config(tile_n=1024, warps=16, ahead=1), 64, 1024, 4096)
    assert problem is not None
    assert problem.endswith("bytes on chip")
    few = Config(tile_n=16, warps=4, ahead=1)
    assert kernel.problem(few, 4, 1024, 65536) is None
    problem = kernel.problem(few, 4, 1024, 65536, floats=True)
    assert problem is not None
    assert problem.endswith("bytes on chip")
    problem = kernel.problem(few, 4, 1024, 4096, halves=2)
    assert problem is not None
    assert problem.endswith("be a multiple of 32")


@pytest.mark.own_errors
def test_arguments_that_cannot_be():
    xq, x_scale, packed = case(2)
    call = functools.partial(ternary_matmul, interpret=True)
    with pytest.raises(ValueError, match=r"x \[2, 64\] is \[.., I\], which a weight \[O, I\] of"):
        call(xq[:, :64], x_scale, packed)
    with pytest.raises(ValueError, match="xq is int32; it must be int8"):
        call(xq.astype(jnp.int32), x_scale, packed)
    with pytest.raises(ValueError, match=r"x_scale is float32\[1\], not a float32 for each row"):
        call(xq, x_scale[:1], packed)
    with pytest.raises(ValueError, match="the weight is int8, not ternary"):
        call(xq, x_scale, quantize(jnp.ones((48, 128)), "int8"))
    with pytest.raises(ValueError, match="the weight is an array, not ternary"):
        call(xq, x_scale, jnp.ones((48, 128)))
    with pytest.raises(ValueError, match="'swiglu' needs two halves of outputs, got 47"):
        call(*case(2, n=47), epilogue="swiglu")
    with pytest.raises(ValueError, match="out_dtype int8 is not bfloat16, float16 or float32"):
        call(xq, x_scale, packed, out_dtype=jnp.int8)
    with pytest.raises(ValueError, match=r"bias is float32\[47\], not floats \[O\] = \[48\]"):
        call(xq, x_scale, packed, bias=jnp.ones(47))
    with pytest.raises(ValueError, match=r"the residual is float32\[2, 48\], but the result is"):
        call(xq, x_scale, packed, residual=jnp.ones((2, 48)))
    with pytest.raises(ValueError, match="no epilogue is named 'gelu'; there are 'swiglu', 'relu2"):
        call(xq, x_scale, packed, epilogue="gelu")
    floats = functools.partial(ternary_linear, packed=packed, interpret=True)
    with pytest.raises(ValueError, match="x is int8; it must be floating point"):
        floats(xq)
    with pytest.raises(ValueError, match=r"norm \[64\] is not \[I\] = \[128\]"):
        floats(jnp.ones((2, 128)), norm=jnp.ones(64))
    with pytest.raises(ValueError, match=r"^ternary_linear: x \[2, 64\] is \[.., I\]"):
        floats(jnp.ones((2, 64)))


def test_a_weight_without_row_scale_is_left_to_xla():
    x, packed = floats()
    bare, ones = (dataclasses.replace(packed, row_scale=s) for s in (None, jnp.ones(48)))
    assert "has no row_scale" in (why_not(x, bare, device=H200) or "")
    for implementation in ("xla", "auto"):
        run = functools.partial(ops.linear, x, implementation=implementation)
        np.testing.assert_array_equal(run(bare), run(ones))


@pytest.mark.parametrize(("m", "k", "within"), [(4, 53248, True), (4, 65536, False), (1, 2**16, 1)])
def test_rows_that_do_not_fit_on_chip_become_int8_before_the_kernel(m, k, within):
    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    packed = shapes_of(m, 4096, k)[2]
    assert in_kernel(x) == within
    for epilogue in (None, "swiglu"):
        config = default_config(x, None, packed, epilogue=epilogue, device=H200)
        form: Any = {"halves": 1 if epilogue is None else 2, "floats": in_kernel(x)}
        assert kernel.problem(config, m, 4096, k, **form) is None


def floats(dtype=jnp.float32):
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, 3, 128)), dtype)
    return x, case(1)[2]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_of_floats(dtype):
    """By the door of all packed weights."""
    x, packed = floats(dtype)
    y = interpreted(functools.partial(quantized_matmul, interpret=True), x, packed)
    expected = ternary_matmul_reference(*quantize_rows(x), packed, out_dtype=dtype)
    np.testing.assert_array_equal(y, expected)
    assert y.dtype == dtype


def test_gradients_pass_the_rounding():
    x, packed = floats()
    bias, residual = jnp.ones(48), jnp.ones((2, 3, 48))
    d_y = jnp.asarray(np.random.default_rng(3).standard_normal((2, 3, 48)), jnp.float32)

    def gradients(x, packed, bias, residual, d_y):
        def run(x, bias, residual):
            return ternary_linear(x, packed, bias=bias, residual=residual, interpret=True)

        return jax.vjp(run, x, bias, residual)[1](d_y)

    d_x, d_bias, d_residual = interpreted(gradients, x, packed, bias, residual, d_y)
    np.testing.assert_allclose(d_x, np.asarray(d_y) @ np.asarray(dequantize(packed)), atol=1e-5)
    np.testing.assert_allclose(d_bias, np.asarray(d_y).sum((0, 1)), rtol=1e-5)
    np.testing.assert_array_equal(d_residual, d_y)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(d_x, np.asarray(d_y) @ (1.01 * dequantize(packed)), atol=1e-5)


def test_gradients_of_float32_are_of_float32():
    """A GPU would otherwise round operands to 10 bits."""
    x, packed = floats()
    pull = jax.grad(lambda x: jnp.sum(ternary_linear(x, packed, interpret=True)))
    made = equations(jax.make_jaxpr(pull)(x).jaxpr)
    products = [each for each in made if each.primitive.name == "dot_general"]
    assert products
    for each in products:
        exact = each.invars[0].aval.dtype == jnp.int8
        assert exact or set(each.params["precision"]) == {jax.lax.Precision.HIGHEST}


def test_what_the_door_of_all_packed_weights_refuses():
    x, packed = floats()
    with pytest.raises(ValueError, match="give them to ternary_linear"):
        quantized_matmul(x, packed, config=QuantizedConfig(), interpret=True)


@pytest.mark.parametrize("epilogue", [None, "swiglu", "relu2_glu"])
# XLA on a CPU leaves out the rounding to bfloat16 that stands between norm and int8
@pytest.mark.parametrize(("rows", "dtype"), [(1, jnp.float16), (4, jnp.float16), (5, F32)])
def test_what_stands_around_a_product(rows, dtype, epilogue):
    """In the kernel for few rows of 16 bits, and before it for the others: the same numbers."""
    _, _, packed = case(1, n=64)
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.standard_normal((rows, 128)), dtype)
    norm = jnp.asarray(rng.uniform(0.5, 1.5, 128), F32)
    residual = jnp.asarray(rng.standard_normal((rows, 64 if epilogue is None else 32)), dtype)
    bias = jnp.asarray(rng.standard_normal(64), dtype)
    assert in_kernel(x) == (rows < 5)

    def run(x, packed, norm, bias, residual):
        return ternary_linear(
            x,
            packed,
            norm=norm,
            eps=1e-3,
            bias=bias,
            epilogue=epilogue,
            residual=residual,
            interpret=True,
        )

    def truth(norm):
        h: Any = rms_norm_reference(x, norm.astype(dtype), eps=1e-3)
        xq, x_scale = quantize_rows(h)
        total = sums(xq, packed) * np.asarray(x_scale, np.float64)[:, None]
        total = total * np.asarray(packed.row_scale, np.float64) + np.asarray(bias, np.float64)
        if epilogue is not None:
            gate, up = np.split(total, 2, axis=-1)
            total = oracles.activate(gate, ACTIVATIONS[epilogue]) * up
        return total + np.asarray(residual, np.float64)

    y = interpreted(run, x, packed, norm, bias, residual)
    assert y.dtype == dtype
    same = functools.partial(
        np.testing.assert_allclose, rtol=float(jnp.finfo(dtype).eps) / 2 + 1e-6, atol=1e-2
    )
    same(np.asarray(y, np.float64), truth(norm))
    with pytest.raises(AssertionError):
        same(np.asarray(y, np.float64), truth(1.1 * norm))


ACTIVATIONS = {"swiglu": "silu", "relu2_glu": "relu2"}  # by the names of the oracle


def test_gradients_of_what_stands_around_a_product():
    """Those of plain JAX at the numbers that were made int8."""
    _, _, packed = case(1, n=64)
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.standard_normal((3, 128)), F32)
    norm = jnp.asarray(rng.uniform(0.5, 1.5, 128), F32)
    d_y = jnp.asarray(rng.standard_normal((3, 32)), F32)
    weight = dequantize(packed)

    def gradients(x, norm, packed, d_y):
        run = functools.partial(ternary_linear, packed=packed, epilogue="swiglu", interpret=True)
        return jax.vjp(lambda x, norm: run(x, norm=norm, eps=0.1), x, norm)[1](d_y)

    def plain(x, norm):
        h: Any = rms_norm_reference(x, norm, eps=0.1)
        xq, x_scale = jax.lax.stop_gradient(quantize_rows(h))
        h = h - jax.lax.stop_gradient(h) + xq.astype(F32) * x_scale[:, None]
        gate, up = jnp.split(h @ weight.T, 2, axis=-1)
        return jax.nn.silu(gate) * up

    found = interpreted(gradients, x, norm, packed, d_y)
    expected = jax.vjp(plain, x, norm)[1](d_y)
    for mine, theirs in zip(found, expected, strict=True):
        size = float(jnp.max(jnp.abs(theirs)))
        np.testing.assert_allclose(mine, theirs, atol=1e-5 * size)
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(mine, 1.001 * theirs, atol=1e-5 * size)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_largest_magnitude_is_nan_if_a_number_is(dtype):
    """Else the maximum would pass over a NaN, and its row would have numbers for a result."""
    x, packed = jax.ShapeDtypeStruct((2, 4864), dtype), shapes_of(2, 896, 4864)[2]
    found = aot.compile_for(lambda x, packed: ternary_linear(x, packed), x, packed)
    product = found.kernel("ternary_matmul")
    maxima = [name for name in product.instructions if "HMNMX" in name or "FMNMX" in name]
    assert maxima
    assert all(name.endswith(".NAN") for name in maxima), maxima


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16, 33, 64])
@pytest.mark.parametrize(("n", "k"), [(48, 64), (896, 4864), (3200, 3200), (4096, 14336)])
def test_sums_on_a_gpu(m, n, k):
    xq, x_scale, packed = ones(*case(m, n=n, k=k))
    xq = xq.at[0].set(-128)
    y = ternary_matmul(xq, x_scale, packed, out_dtype=F32)
    np.testing.assert_array_equal(np.asarray(y, np.int64), sums(xq, packed))
    for config in candidates(xq, x_scale, packed, device=H200):
        again = ternary_matmul(xq, x_scale, packed, out_dtype=F32, config=config)
        np.testing.assert_array_equal(again, y)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rows_become_int8_on_a_gpu(m, dtype):
    """The codes of float32 arithmetic, and a NaN or an infinity stays in its row."""
    _, _, packed = case(1, n=96, k=4864)
    x = jnp.asarray(np.random.default_rng(6).standard_normal((m, 4864)), dtype)
    assert_same_codes(quantize_rows(x)[0], x)
    expected = ternary_matmul_reference(*in_float32(x), packed, out_dtype=F32)
    y = ternary_linear(x, packed, out_dtype=F32)
    np.testing.assert_allclose(y, expected, rtol=1e-6)  # sums are exact, three roundings follow
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(y, 1.001 * expected, rtol=1e-6)
    norm = jnp.ones(4864, dtype)
    for number in (jnp.nan, jnp.inf, -jnp.inf):
        wrong = x.at[m - 1, 4000].set(number)
        bare = ternary_linear(wrong, packed, out_dtype=F32)
        assert not np.isfinite(bare[m - 1]).any()
        np.testing.assert_array_equal(bare[: m - 1], y[: m - 1])
        assert not np.isfinite(ternary_linear(wrong, packed, norm=norm)[m - 1]).any()
