"""Against NumPy and ml_dtypes, which know nothing of how a `Packed` is made."""

import dataclasses
import itertools
import re
from typing import Any, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracles
import pytest

from jaxllm import ops
from pallas_kernels.packed import SCHEMES, Packed
from pallas_kernels.quantize import (
    MxRule,
    _divide,
    check_scales,
    concatenate,
    default_group_size,
    dequantize,
    quantize,
    take_rows,
)
from pallas_kernels.quantized_matmul import quantized_matmul

E2M1 = oracles.E2M1.tolist()
GOLDEN = [sign * tenth / 10 for tenth, sign in zip(range(1, 17), itertools.cycle((1, -1)))]
CALLS = [
    *((scheme, {}) for scheme in SCHEMES),
    *(("int8", {"group_size": 32}), ("fp8", {"group_size": 32}), ("int4", {"group_size": 2})),
    *((scheme, {"mx_rule": rule}) for scheme in ("mxfp4", "mxfp8") for rule in ("even", "ceil")),
]

SMALL = [("int8", 32, False), ("int4", 32, False), ("int4", 32, True), ("fp8", 16, False)]


def normal(*shape: int, dtype="float32", seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.dtype(dtype))


def numbers(packed: Packed) -> np.ndarray:
    """[O, I] in float64; a ternary weight has no fourth code."""
    if packed.scheme == "ternary":
        codes = np.asarray(packed.codes)
        assert not np.any(codes & (codes >> 1) & 0b01010101)
    return oracles.packed_numbers(packed)


def test_golden_nvfp4():
    packed = quantize(jnp.asarray([GOLDEN], jnp.float32), "nvfp4")
    assert bytes(np.asarray(packed.codes)[0]).hex(" ") == "a1 b2 c4 d5 e5 e6 f6 f7"
    assert np.asarray(packed.scale, np.float32).tolist() == [[448]]
    np.testing.assert_allclose(np.asarray(packed.row_scale), [1 / 1680], rtol=1e-7)
    values = [0.5, -1, 1, -1.5, 2, -2, 3, -3, 3, -4, 4, -4, 4, -6, 6, -6]
    np.testing.assert_allclose(dequantize(packed)[0], np.asarray(values) * 448 / 1680, rtol=1e-6)


def test_a_tensors_scale_of_nvfp4_survives_a_file():
    """Which has its reciprocal, in float32."""
    for seed in range(50):
        w = np.random.default_rng(seed).normal(size=(2, 16))
        scale = np.asarray(quantize(jnp.asarray(w, jnp.float32), "nvfp4").row_scale)
        stored = np.float32(1) / scale
        np.testing.assert_array_equal(np.float32(1) / stored, scale)
    tiny = quantize(jnp.full((1, 16), 1e-37, jnp.float32), "nvfp4").row_scale
    assert np.all(np.asarray(tiny) > 0)


@pytest.mark.parametrize(
    ("rule", "exponent", "values"),
    [
        ("floor", -2, [0.5, -1, 1, -1.5, 2, -2, 3, -3, 4, -4, 4, -4, 6, -6, 6, -6]),
        ("even", -2, [0.5, -1, 1, -1.5, 2, -2, 3, -3, 4, -4, 4, -4, 6, -6, 6, -6]),
        ("ceil", -1, [0, -0.5, 0.5, -1, 1, -1, 1.5, -1.5, 2, -2, 2, -2, 3, -3, 3, -3]),
    ],
)
def test_golden_mxfp4(rule, exponent, values):
    packed = quantize(jnp.asarray([GOLDEN * 2], jnp.float32), "mxfp4", mx_rule=rule)
    assert np.asarray(packed.scale).tolist() == [[exponent + 127]]
    assert (np.asarray(dequantize(packed))[0] / 2.0**exponent).tolist() == values * 2


def test_golden_ternary():
    weight = jnp.asarray([[0.5, -0.1, 0.02, -0.9], [0.3, 0, -0.45, 0.2]], jnp.float32)
    packed = quantize(weight, "ternary")
    np.testing.assert_allclose(np.asarray(packed.row_scale), [0.30875] * 2, rtol=1e-6)
    codes = np.round(numbers(packed) / 0.30875)
    assert codes.tolist() == [[1, 0, 0, -1], [1, 0, -1, 1]]
    assert np.asarray(packed.codes).tolist() == [[0b00010110], [0b10000110]]


def with_codes(codes: np.ndarray, scheme: str) -> Packed:
    """Codes [1, bytes] as such: every scale is 1."""
    inputs = codes.shape[1] * {"int4": 2, "nvfp4": 2, "mxfp4": 2, "ternary": 4}.get(scheme, 1)
    packed = quantize(jnp.ones((1, inputs)), scheme)
    scale, one = packed.scale, 127 if scheme in ("mxfp4", "mxfp8") else 1
    return dataclasses.replace(
        packed,
        codes=jnp.asarray(codes),
        scale=None if scale is None else jnp.full(scale.shape, one, scale.dtype),
        row_scale=None if packed.row_scale is None else jnp.ones(1),
    )


@pytest.mark.parametrize("scheme", ["int4", "nvfp4", "mxfp4"])
def test_every_code_of_four_bits(scheme):
    """All pairs of codes, in all 256 bytes."""
    got = dequantize(with_codes(np.arange(256, dtype=np.uint8)[None], scheme))
    table = np.arange(16) - 8 if scheme == "int4" else oracles.E2M1
    expected = np.stack([np.tile(table, 16), np.repeat(table, 16)], -1).reshape(1, -1)
    assert np.asarray(got).tolist() == expected.tolist()
    if scheme != "int4":
        nibbles = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
        assert nibbles.astype(np.float32).tolist() == table.tolist()


@pytest.mark.parametrize("scheme", ["int8", "fp8", "mxfp8"])
def test_every_code_of_eight_bits(scheme):
    dtype = np.int8 if scheme == "int8" else ml_dtypes.float8_e4m3fn
    codes = np.arange(256, dtype=np.uint8).view(dtype)[None]
    got = np.asarray(dequantize(with_codes(codes, scheme)))
    np.testing.assert_array_equal(got, codes.astype(np.float32))


def test_every_byte_of_two_bits():
    codes = list(itertools.product((0, 1, 2), repeat=4))
    packed = [a | b << 2 | c << 4 | d << 6 for a, b, c, d in codes]
    got = dequantize(with_codes(np.asarray([packed], np.uint8), "ternary"))
    assert np.asarray(got).tolist() == [[code - 1 for four in codes for code in four]]


@pytest.mark.parametrize("zero", range(16))
def test_every_code_with_every_zero_point(zero):
    packed = with_codes(np.arange(256, dtype=np.uint8)[None], "int4")
    assert packed.scale is not None
    packed = dataclasses.replace(packed, zero=jnp.full(packed.scale.shape, zero, jnp.uint8))
    np.testing.assert_array_equal(dequantize(packed), numbers(packed))
    assert np.asarray(dequantize(packed)).max() == 15 - zero


def around(bounds) -> np.ndarray:
    """Each number, its float32 neighbours, and all of it negative."""
    bounds = np.asarray(bounds, np.float32)
    three = [np.nextafter(bounds, np.float32(0)), bounds, np.nextafter(bounds, np.float32(1e9))]
    three = np.concatenate(three)
    return np.concatenate([three, -three])


def through(values: np.ndarray, scheme: str, largest: float) -> np.ndarray:
    """What numbers become in groups whose largest is that of the element type: the scale is 1."""
    rows = np.full((len(values), 32), largest, np.float32)
    rows[:, 1] = values
    if scheme == "nvfp4":
        rows[:, 16:] = 6 * 448  # and with that 1 is the tensor's
    rule: dict[str, Any] = {} if scheme == "nvfp4" else {"mx_rule": "ceil"}
    packed = quantize(jnp.asarray(rows), scheme, **rule)
    one = 1 if scheme == "nvfp4" else 127
    assert packed.scale is not None
    assert (np.asarray(packed.scale[0]).astype(np.float32) == one).all()
    return np.asarray(dequantize(packed))[:, 1]


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4"])
def test_thresholds_of_e2m1(scheme):
    bounds = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    got = through(around(bounds), scheme, 6)
    below, at, above = got[:21].reshape(3, 7)
    assert below.tolist() == E2M1[:7]
    assert above.tolist() == E2M1[1:8]
    assert at.tolist() == [0, 1, 1, 2, 2, 4, 4]
    np.testing.assert_array_equal(got[21:], -got[:21])
    rounded = around(bounds).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(got, rounded)
    assert np.signbit(through(np.asarray([-0.1]), scheme, 6))[0]


def test_thresholds_of_e4m3():
    """The middles between all neighbours: a cast by way of float16 would round some twice."""
    values = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    bounds = around((values[1:] + values[:-1]) / 2)
    got = through(bounds, "mxfp8", 448)
    np.testing.assert_array_equal(got, bounds.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


@pytest.mark.parametrize("rule", get_args(MxRule)[:2])
def test_mxfp8_saturates(rule):
    """500 would be NaN after a plain cast. Rule "even" takes it for 512, which is no more than 448
    of the next exponent.
    """
    packed = quantize(jnp.full((1, 32), 500.0), "mxfp8", mx_rule=rule)
    assert float(dequantize(packed)[0, 0]) == {"floor": 448, "even": 512}[rule]


@pytest.mark.parametrize("largest", [6.0, 7.0, 7.9, 1.0, 0.75, 1.01, 3e-39, 2.0**-126, 3e38])
@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp8"])
def test_mx_exponents(scheme: str, largest: float):
    """No cast to E8M0, which rounds 1.5 up and has no 0, and no logarithm."""
    largest = float(np.float32(largest))
    most, exponent, mantissa = {"mxfp4": (6, 2, 1), "mxfp8": (448, 8, 3)}[scheme]
    _, e = np.frexp(largest)  # largest = m 2^e, m in [.5, 1)
    rounded = np.floor(largest * 2.0 ** (mantissa + 1 - e) + 0.5)  # ties up
    expected = {
        "floor": e - 1 - exponent,
        "even": e - 1 - exponent + (rounded >= 2 ** (mantissa + 1)),
        "ceil": int(np.ceil(np.log2(largest / most))),
    }
    for rule in get_args(MxRule):
        power = expected[rule]
        packed = quantize(jnp.full((1, 32), largest), scheme, mx_rule=rule)
        assert packed.scale is not None
        assert int(packed.scale[0, 0]) == np.clip(power, -127, 127) + 127, rule


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("scheme", "keywords"), [*CALLS, ("int4", {"zero_points": True})])
def test_numbers_and_their_errors(scheme, keywords, dtype):
    """No number is further away than half of the spacing of codes there, times its scales."""
    weight = normal(6, 192, dtype=dtype) * jnp.exp2(jnp.arange(6.0))[:, None].astype(dtype)
    packed = quantize(weight, scheme, **keywords)
    assert packed.shape == weight.shape
    ours, theirs = np.asarray(dequantize(packed)), numbers(packed)
    np.testing.assert_allclose(ours, theirs, rtol=2**-23, atol=0)
    plain = np.asarray(weight, np.float64)
    error = np.abs(theirs - plain)
    group = packed.group_size or 192
    step = np.ones((6, 192))
    if packed.row_scale is not None:
        step = step * np.asarray(packed.row_scale, np.float64)[:, None]
    if packed.scale is not None:
        scale = np.asarray(packed.scale).astype(np.float64).T
        scale = 2.0 ** (scale - 127) if scheme in ("mxfp4", "mxfp8") else scale
        step = step * np.repeat(scale, group, axis=1)
    quotient, most = np.abs(plain) / step, {"fp8": 448, "mxfp8": 448, "ternary": 1}.get(scheme, 6)
    if scheme in ("int8", "int4"):
        # The quotient of the largest number may lie beyond the codes as far as its scale's dtype
        # is rough, and a zero point is rounded
        rough = 0.5 + 15 * 2.0**-9 * ("zero_points" in keywords)
        assert (error <= (rough + 1e-4) * step).all()
        return
    mantissa = {"fp8": 3, "mxfp8": 3, "ternary": 0}.get(scheme, 1)
    lowest = {"fp8": -6, "mxfp8": -6, "ternary": 0}.get(scheme, 0)
    exponent = np.maximum(np.floor(np.log2(np.maximum(quotient, 1e-30))), lowest)
    half = 0.5 * 2.0 ** (exponent - mantissa) if scheme != "ternary" else 0.5
    inside = quotient <= most
    assert (error <= (half + 1e-4 * quotient) * step)[inside].all()
    assert inside.mean() > (0.4 if scheme == "ternary" else 0.9)
    saturated = np.abs(theirs[~inside]) / step[~inside]
    np.testing.assert_allclose(saturated, most, rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "scheme", "group_size", "zero_points"),
    [
        *((dtype, *how) for dtype in ("float16", "bfloat16", "float32") for how in SMALL),
        *(("bfloat16", "int8", None, False), ("float32", "fp8", None, False)),
    ],
)
def test_scales_below_the_normal_numbers(dtype, scheme, group_size, zero_points):
    """Rounded up: to the nearest, they would be a third too small for some groups, and 0 for some.
    Two rows an octave, from the smallest number that is no zero on any device.
    """
    kind = dtype if group_size else "float32"
    normals = float(jnp.finfo(kind).tiny)
    step = max(float(jnp.finfo(kind).smallest_subnormal), 2.0**-126)
    least = max(float(jnp.finfo(dtype).smallest_subnormal), 2.0**-126)
    largest = least * 2 ** (np.arange(60) / 2)
    weight = np.random.default_rng(0).uniform(-1, 1, (60, 64)) * largest[:, None]
    weight[:, ::16] = largest[:, None]
    weight = jnp.asarray(weight, jnp.float32).astype(dtype)
    packed = quantize(weight, scheme, group_size, zero_points=zero_points)
    shape = (60, -1, group_size or 64)
    plain, theirs = (x.reshape(shape) for x in (np.asarray(weight, np.float64), numbers(packed)))
    found = packed.scale.T if packed.scale is not None else packed.row_scale[:, None]
    scale = np.asarray(found).astype(np.float64)[..., None]
    span = np.abs(plain).max(-1, keepdims=True)
    if zero_points:
        span = plain.max(-1, keepdims=True) - np.minimum(plain.min(-1, keepdims=True), 0)
    wanted = span / {"int8": 127, "int4": 15 if zero_points else 7, "fp8": 448}[scheme]
    below = (wanted < normals)[..., 0]
    assert 10 < below.sum() < below.size
    wanted, scale, plain, theirs = (x[below] for x in (wanted, scale, plain, theirs))
    assert ((scale >= wanted * (1 - 2.0**-23)) & (scale < wanted + step)).all()
    half = np.maximum(2.0**-10 * scale, 2.0**-4 * np.abs(plain)) if scheme == "fp8" else 0.5 * scale
    # What lies below float32's normal numbers may count as 0, and a zero point is rounded
    flushed = 2.0**-126 * (step == 2.0**-126)
    assert (np.abs(theirs - plain) <= half * (1 + zero_points + 1e-4) + flushed).all()
    assert np.any(theirs, axis=-1).all()


def test_a_float8_weight_has_scales_of_float32():
    weight = normal(4, 64).astype(jnp.float8_e4m3fn)
    for scheme in ("int8", "int4", "fp8"):
        packed = quantize(weight, scheme, 32)
        assert packed.scale is not None
        assert packed.scale.dtype == jnp.float32
        wide = quantize(weight.astype(jnp.float32), scheme, 32)
        np.testing.assert_array_equal(numbers(packed), numbers(wide))


@pytest.mark.parametrize(
    ("scheme", "keywords", "decibels"),
    [
        ("nvfp4", {}, 20.4),
        ("mxfp4", {}, 18.8),
        ("mxfp4", {"mx_rule": "ceil"}, 18.7),
        ("mxfp8", {}, 30.7),
        ("mxfp8", {"mx_rule": "ceil"}, 31.5),
        ("int8", {}, 42.1),
        ("ternary", {}, 5.8),
        ("int4", {"group_size": 128}, 18.6),  # this and the next measured here
        ("fp8", {}, 31.6),
    ],
)
def test_signal_to_noise(scheme, keywords, decibels):
    weight = normal(1024, 1024)
    noise = weight - dequantize(quantize(weight, scheme, **keywords))
    found = 10 * np.log10(float(jnp.sum(weight**2) / jnp.sum(noise**2)))
    assert abs(found - decibels) < 0.1


@pytest.mark.parametrize(("scheme", "keywords"), CALLS)
def test_what_is_quantised_stays(scheme, keywords):
    once = dequantize(quantize(normal(24, 384, dtype="bfloat16"), scheme, **keywords))
    twice = quantize(once, scheme, **keywords)
    if scheme == "ternary":  # its scale is the mean, now of zeros too
        np.testing.assert_array_equal(np.sign(numbers(twice)), np.sign(once))
    else:
        np.testing.assert_array_equal(dequantize(twice), once)


@pytest.mark.parametrize(("scheme", "keywords"), [*CALLS, ("int4", {"zero_points": True})])
def test_same_bits_inside_a_program(scheme, keywords):
    """XLA must leave out neither the rounding of a scale nor a division."""
    weight = normal(40, 256, dtype="bfloat16", seed=3)
    alone = quantize(weight, scheme, **keywords)
    inside = jax.jit(lambda w: quantize(w, scheme, **keywords))(weight)
    for ours, theirs in zip(jax.tree.leaves(inside), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    if scheme in ("int8", "fp8"):
        wide = np.asarray(weight, np.float32)
        group = alone.group_size or 256
        largest = np.abs(wide).reshape(40, -1, group).max(-1)
        scale = largest / np.float32(127 if scheme == "int8" else 448)
        if alone.group_size:
            assert alone.scale is not None
            scale = scale.astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(alone.scale, scale.T)
        else:
            np.testing.assert_array_equal(alone.row_scale, scale[:, 0])
        quotient = wide.reshape(40, -1, group) / scale.astype(np.float32)[..., None]
        if scheme == "int8":
            expected = np.clip(np.round(quotient), -127, 127)
        else:
            expected = np.clip(quotient, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(alone.codes, expected.reshape(40, 256).astype(expected.dtype))


@pytest.mark.parametrize("kind", ["any", "ties"])
def test_division_is_rounded_once(kind):
    """Divisors that XLA sees broadcast; without the mending a quarter differs from NumPy's."""
    rng = np.random.default_rng(0)
    by = np.ldexp(rng.random((50, 1)) + 0.1, rng.integers(-60, 60, (50, 1))).astype(np.float32)
    if kind == "ties":  # scales of 8 bits, times halves
        by = by.astype(ml_dtypes.bfloat16).astype(np.float32)
        x = (rng.integers(-900, 900, (50, 512)) / 2).astype(np.float32) * by
    else:
        x = np.ldexp(rng.standard_normal((50, 512)), rng.integers(-30, 30, (50, 512)))
        x = x.astype(np.float32) * by
    plain, mended = (jax.jit(f)(x, by) for f in (jnp.divide, _divide))
    np.testing.assert_array_equal(mended, x / by)
    assert np.mean(np.asarray(plain) != x / by) > 0.1
    for constant in (6, 7, 15, 127, 448, 2688):
        mended = jax.jit(lambda x, c=constant: _divide(x, c))(x)
        np.testing.assert_array_equal(mended, x / np.float32(constant))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros(scheme):
    """All zeros, and zeros in one group of several."""
    assert not np.any(dequantize(quantize(jnp.zeros((3, 64)), scheme)))
    weight = normal(3, 64).at[:, :32].set(0).at[1].set(0)
    got = np.asarray(dequantize(quantize(weight, scheme)))
    assert not np.any(got[:, :32])
    assert not np.any(got[1])
    assert np.any(got[0])


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "mxfp8"])
def test_exact_in_bfloat16(scheme):
    packed = quantize(normal(16, 128) * 1e3, scheme)
    packed = dataclasses.replace(packed, row_scale=None)
    exact = dequantize(packed, jnp.bfloat16)
    np.testing.assert_array_equal(exact.astype(jnp.float32), dequantize(packed))
    np.testing.assert_array_equal(exact.astype(jnp.float32), numbers(packed))


def test_tiny_powers():
    """2^-127 is a subnormal of float32, and six times it is not."""
    packed = with_codes(np.full((1, 16), 0x77, np.uint8), "mxfp4")
    packed = dataclasses.replace(packed, scale=jnp.zeros((1, 1), jnp.uint8))
    assert np.asarray(dequantize(packed)).tolist() == [[6 * 2.0**-127] * 32]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nan_in_a_program_is_not_hidden(scheme):
    weight = normal(2, 64).at[1, 5].set(jnp.nan)
    packed = jax.jit(lambda w: quantize(w, scheme))(weight)
    with pytest.raises(ValueError, match="are zero, .*NaN or infinite; a scale is "):
        check_scales(packed, "here")


@pytest.mark.parametrize(("scheme", "keywords"), [*CALLS, ("int4", {"zero_points": True})])
def test_concatenate_and_take_rows(scheme, keywords):
    parts = [quantize(normal(rows, 64, seed=rows) * rows, scheme, **keywords) for rows in (3, 1, 5)]
    whole = concatenate(parts)
    expected = np.concatenate([dequantize(part) for part in parts])
    np.testing.assert_array_equal(dequantize(whole), expected)
    rows = take_rows(whole, jnp.asarray([8, 0, 3, 3, -2, 99]))
    np.testing.assert_array_equal(dequantize(rows), expected[[8, 0, 3, 3, 0, 8]])
    assert len(jax.tree.leaves(whole)) == len(jax.tree.leaves(parts[0]))


def test_concatenate_with_zero_points():
    weight = normal(4, 64)
    parts = [quantize(weight, "int4"), quantize(weight, "int4", zero_points=True)]
    expected = np.concatenate([dequantize(part) for part in parts])
    np.testing.assert_array_equal(dequantize(concatenate(parts)), expected)


@pytest.mark.parametrize(
    "other",
    [("int8", 64, {}), ("int4", 128, {}), ("int4", 64, {"group_size": 32})],
)
def test_concatenate_refuses(other):
    scheme, inputs, keywords = other
    parts = [quantize(normal(2, 64), "int4"), quantize(normal(2, inputs), scheme, **keywords)]
    with pytest.raises(ValueError, match="^concatenate: weights must agree in scheme, "):
        concatenate(parts)
    with pytest.raises(ValueError, match="^concatenate: there are no weights"):
        concatenate([])


def test_default_group_sizes():
    sizes = [default_group_size("int4", inputs) for inputs in (4096, 896, 4864, 192, 96, 172, 6, 2)]
    assert sizes == [128, 128, 128, 64, 32, 86, 6, 2]
    assert default_group_size("int8", 7) is None


@pytest.mark.own_errors
@pytest.mark.parametrize(
    ("shape", "arguments", "keywords", "message"),
    [
        ((2, 64), ("int3",), {}, "scheme 'int3' is not one of int8, int4, fp8, nvfp4, mxfp4, mxfp"),
        ((64,), ("int8",), {}, r"a weight is \[out, in\] of floating point; got \[64\] of float32"),
        ((0, 64), ("int8",), {}, r"a weight \[0, 64\] holds no numbers"),
        ((2, 0), ("nvfp4",), {}, r"a weight \[2, 0\] holds no numbers"),
        ((2, 64), ("int4", 48), {}, "groups of 48 do not divide the 64 inputs evenly; the si"),
        (
            (2, 63),
            ("int4", 7),
            {},
            "groups of 7 do not divide the 63 inputs evenly; the si",
        ),
        ((2, 63), ("int4",), {}, "int4 packs two inputs in a byte, and the 63 inputs are odd"),
        (
            (2, 64),
            ("int8", 0),
            {},
            "groups of 0 do not divide the 64 inputs evenly; the si",
        ),
        ((2, 64), ("int8", 32.0), {}, "group_size must be an integer or None, got 32.0"),
        ((2, 64), ("int8", True), {}, "group_size must be an integer or None, got True"),
        ((2, 64), ("nvfp4", 16.0), {}, "group_size must be an integer or None, got 16.0"),
        ((2, 64), ("nvfp4", 32), {}, "nvfp4 has groups of 16, not of 32"),
        ((2, 40), ("nvfp4",), {}, "groups of 16 do not divide the 40 inputs evenly"),
        ((2, 48), ("mxfp8",), {}, "groups of 32 do not divide the 48 inputs evenly"),
        ((2, 64), ("ternary", 32), {}, "ternary has one scale a weight, and no groups of 32"),
        ((2, 66), ("ternary",), {}, "ternary packs four inputs in a byte, and the 66 inputs do "),
        ((2, 64), ("int8",), {"zero_points": True}, "int8 has no zero points; int4 has"),
        ((2, 64), ("int4",), {"zero_points": "no"}, "zero_points must be True or False, got 'no'"),
        ((2, 64), ("int4",), {"mx_rule": "floor"}, "int4 has no rule for exponents; mxfp4 and mxf"),
        ((2, 64), ("mxfp4",), {"mx_rule": "up"}, "mx_rule is 'floor', 'even' or 'ceil'; got 'up'"),
    ],
)
def test_refusals(shape, arguments, keywords, message):
    with pytest.raises(ValueError, match=f"^quantize: {message}"):
        quantize(jnp.ones(shape), *arguments, **keywords)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_refuses_what_is_not_finite(bad):
    with pytest.raises(ValueError, match="^quantize: the weight has numbers that are NaN or inf"):
        quantize(jnp.ones((2, 64)).at[0, 1].set(bad), "int8")


@pytest.mark.parametrize("bad", [0, -0.0, jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize(("scheme", "part"), [("int4", "scale"), ("int8", "row_scale")])
def test_check_scales(scheme, part, bad):
    packed = quantize(normal(4, 64), scheme)
    check_scales(packed, "a.weight")
    scale = getattr(packed, part)
    check_scales(dataclasses.replace(packed, **{part: -scale}), "a.weight")
    packed = dataclasses.replace(packed, **{part: scale.at[..., 2].set(bad)})
    sentence = f"^a.weight: 1 of 4 numbers of {part} are zero, NaN or infinite; a scale is a finite"
    with pytest.raises(ValueError, match=sentence):
        check_scales(packed, "a.weight")


@pytest.mark.parametrize(
    ("scheme", "part"), [("nvfp4", "scale"), ("nvfp4", "row_scale"), ("ternary", "row_scale")]
)
@pytest.mark.parametrize("bad", [0, -1, jnp.nan])
def test_check_scales_that_have_no_sign(scheme, part, bad):
    packed = quantize(normal(4, 64), scheme)
    packed = dataclasses.replace(packed, **{part: getattr(packed, part).at[..., 2].set(bad)})
    sentence = f"numbers of {part} are zero, negative, NaN or infinite; a scale is a positive"
    with pytest.raises(ValueError, match=sentence):
        check_scales(packed, "a.weight")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_traced_nan_stays_one(scheme):
    """Of its group at least, whose scale it makes NaN."""
    w = normal(4, 64).at[1, 3].set(jnp.nan)
    numbers = jax.jit(lambda w: dequantize(quantize(w, scheme)))(w)
    assert np.all(np.isnan(numbers[1, :16]))


def test_check_scales_of_mx():
    packed = quantize(jnp.zeros((4, 64)), "mxfp4")
    check_scales(packed, "a.weight")
    packed = dataclasses.replace(packed, scale=jnp.full((2, 4), 255, jnp.uint8))
    with pytest.raises(ValueError, match="^a.weight: 8 of 8 numbers of scale are"):
        check_scales(packed, "a.weight")


@pytest.mark.parametrize(
    ("scheme", "changes", "words"),
    [
        (
            "int8",
            {"row_scale": np.ones(1, np.float32)},
            r"row_scale of a .* is \[8\]",
        ),
        ("int4", {"scale": np.ones((8, 2), np.float32)}, r"the scale of a weight .* is \[2, 8\]"),
        ("int4", {"group_size": None}, "the scale of a weight .* is None without a group_size"),
        ("int4", {"zero": np.zeros((8, 2), np.uint8)}, r"the zero of a weight .* is \[2, 8\]"),
        ("int8", {"codes": np.zeros((8, 64), np.uint8)}, "the codes of int8 are int8, got uint8"),
        (
            "fp8",
            {"codes": np.zeros((2, 8, 64), ml_dtypes.float8_e4m3fn)},
            "not those of one weight",
        ),
        ("int4", {"group_size": 48}, "groups of 48 do not divide the 64 inputs"),
        ("int8", {"scheme": "foo"}, "no scheme is named 'foo'"),
        (
            "int4",
            {"scale": np.ones((2, 8), np.float64)},
            "the scale of int4 is bfloat16 or float16 or float32, got float64",
        ),
        ("int4", {"zero": np.zeros((2, 8), np.int8)}, "the zero of int4 is uint8, got int8"),
        (
            "nvfp4",
            {"scale": np.ones((4, 8), np.float32)},
            "the scale of nvfp4 is float8_e4m3fn, got float32",
        ),
        (
            "mxfp8",
            {"scale": np.ones((2, 8), np.float32)},
            "the scale of mxfp8 is uint8, got float32",
        ),
        (
            "int8",
            {"row_scale": np.ones(8, ml_dtypes.bfloat16)},
            "the row_scale of int8 is float32, got bfloat16",
        ),
        ("ternary", {"scale": 1.0}, r"ternary has no scale, got float \[\]"),
        (
            "ternary",
            {"scale": np.ones((2, 8), np.float32), "group_size": 32},
            r"ternary has no scale, got float32 \[2, 8\]",
        ),
        (
            "fp8",
            {"zero": np.zeros((2, 8), np.uint8), "group_size": 32},
            r"fp8 has no zero, got uint8 \[2, 8\]",
        ),
        ("nvfp4", {"group_size": 32}, "nvfp4 has groups of 16, got a group_size of 32"),
        ("mxfp4", {"group_size": None}, "mxfp4 has groups of 32, got a group_size of None"),
    ],
)
def test_parts_that_do_not_fit_each_other(scheme, changes, words):
    group_size = 32 if scheme == "int4" else None
    packed = dataclasses.replace(quantize(normal(8, 64), scheme, group_size), **changes)
    with pytest.raises(ValueError, match=f"^dequantize: .*{words}"):
        dequantize(packed)
    with pytest.raises(ValueError, match=f"^concatenate: .*{words}"):
        concatenate([packed])
    with pytest.raises(ValueError, match=f"^embedding: .*{words}"):
        ops.embedding(packed, jnp.zeros((1,), jnp.int32))
    for implementation in ("xla", "pallas-interpret"):
        with pytest.raises(ValueError, match=f"^linear: .*{words}"):
            ops.linear(normal(1, 64), packed, implementation=implementation)
    with pytest.raises(ValueError, match=f"^quantized_matmul: .*{words}"):
        quantized_matmul(normal(1, 64, dtype="bfloat16"), packed, interpret=True)


@pytest.mark.own_errors
@pytest.mark.parametrize("given", [np.ones((2, 4)), [[1.0]], None])
def test_what_is_not_packed(given):
    words = f"it takes a Packed, as quantize returns it, got {type(given).__name__}$"
    with pytest.raises(ValueError, match=f"^dequantize: {words}"):
        dequantize(given)
    with pytest.raises(ValueError, match=f"^concatenate: {words}"):
        concatenate([given])


@pytest.mark.own_errors
@pytest.mark.parametrize("codes", [[[1, 2]], None])
def test_codes_that_are_no_array(codes):
    packed = dataclasses.replace(quantize(normal(8, 64), "int8"), codes=codes)
    words = re.escape(f"the codes must be an array, got {codes!r}")
    with pytest.raises(ValueError, match=f"^dequantize: {words}$"):
        dequantize(packed)
    with pytest.raises(ValueError, match=f"^embedding: {words}$"):
        ops.embedding(packed, jnp.zeros((1,), jnp.int32))


@pytest.mark.own_errors
def test_one_weight_is_not_put_together():
    for parts in (quantize(normal(8, 64), "int8"), normal(8, 64)):
        sentence = (
            f"concatenate: parts must be a list of Packed weights, got {type(parts).__name__}"
        )
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            concatenate(parts)  # pyright: ignore[reportArgumentType]
