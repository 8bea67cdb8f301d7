"""What follows the sums of matmul: GELU, a result of 8 bits, a number a row from a norm."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from kernels import interpreted
from numerics import assert_as_accurate
from tensor_cores import float8_sums

from pallas_kernels import _compat
from pallas_kernels.matmul import Config, matmul, matmul_reference
from pallas_kernels.matmul_finish import GELUS, saturated

pytestmark = pytest.mark.usefixtures("strict_jax")

BF16, F16, F32, FP8, I8 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn, jnp.int8
TILE = Config(64, 64, 64, consumers=1, stages=2)
BYTES = Config(64, 64, 128, consumers=1, stages=2)
WIDE = Config(128, 128, 128, consumers=2, stages=2)

transposed = pytest.mark.skipif(
    not _compat.INTERPRETS_TRANSPOSED_WGMMA,
    reason="the interpreter of jax 0.10 has no transposed wgmma operand",
)


def floats(seed: int, *shape: int, dtype: Any = F32, scale: float = 1.0) -> jax.Array:
    x = np.random.default_rng(seed).normal(size=shape) * scale
    return jnp.asarray(x, F32).astype(dtype)


def wide(arrays: dict[str, jax.Array]) -> Any:
    return {name: np.asarray(x).astype(np.float64) for name, x in arrays.items()}


def run(arrays: dict[str, jax.Array], config: Config, **keywords: Any) -> jax.Array:
    return interpreted(
        lambda x: matmul(**x, transpose_b=True, config=config, interpret=True, **keywords), arrays
    )


def test_gelus_are_those_of_the_models():
    """jax.nn and torch name them so; both formulas are within float32 rounding of the oracle."""
    x = jnp.linspace(-8, 8, 4001, dtype=F32)
    for name, ours in GELUS.items():
        truth = oracles.activate(np.asarray(x, np.float64), name)
        assert_as_accurate(ours(x), jax.nn.gelu(x, approximate=name != "gelu"), truth)
    apart = np.abs(np.asarray(GELUS["gelu"](x) - GELUS["gelu_pytorch_tanh"](x))).max()
    assert 1e-4 < apart < 1e-3


def gelu_arrays(m: int, dtype: Any, extra: str = "") -> dict[str, jax.Array]:
    arrays = {"a": floats(0, m, 144, dtype=dtype), "b": floats(1, 80, 144, dtype=dtype, scale=0.1)}
    result = BF16 if dtype == FP8 else dtype
    if "bias" in extra:
        arrays["bias"] = floats(2, 80, dtype=result)
    if "residual" in extra:
        arrays["residual"] = floats(3, m, 80, dtype=result)
    if "scales" in extra:
        arrays |= {"a_scale": 1 + abs(floats(4, m)), "b_scale": 1 + abs(floats(5, 80))}
    return arrays


@transposed
@pytest.mark.parametrize("epilogue", GELUS)
@pytest.mark.parametrize(
    ("m", "dtype", "config", "extra"),
    [
        (1, BF16, TILE, ""),
        (67, F16, TILE, "bias residual"),
        (130, FP8, WIDE, "bias scales"),
    ],
)
def test_gelu(epilogue: str, m: int, dtype: Any, config: Config, extra: str):
    arrays = gelu_arrays(m, dtype, extra)
    keywords: Any = {"epilogue": epilogue, "out_dtype": F32 if extra == "" else None}
    y = run(arrays, config, **keywords)
    truth = oracles.matmul(**wide(arrays), transpose_b=True, epilogue=epilogue)
    plain = matmul_reference(**arrays, transpose_b=True, **keywords)
    assert y.dtype == plain.dtype
    assert_as_accurate(y, plain, truth)


@transposed
def test_the_check_tells_the_gelus_apart():
    arrays = gelu_arrays(67, BF16)
    y = run(arrays, TILE, epilogue="gelu", out_dtype=F32)
    plain = matmul_reference(**arrays, transpose_b=True, epilogue="gelu", out_dtype=F32)
    truth = oracles.matmul(**wide(arrays), transpose_b=True, epilogue="gelu_pytorch_tanh")
    assert_as_accurate(y, plain, oracles.matmul(**wide(arrays), transpose_b=True, epilogue="gelu"))
    other = matmul_reference(
        **arrays, transpose_b=True, epilogue="gelu_pytorch_tanh", out_dtype=F32
    )
    with pytest.raises(AssertionError, match="error is"):
        assert_as_accurate(y, other, truth)


@transposed
@pytest.mark.parametrize("epilogue", GELUS)
def test_gradient_of_gelu(epilogue: str):
    arrays = gelu_arrays(5, BF16, "bias residual scales")
    d_out = floats(9, 5, 80, dtype=BF16)
    keywords: Any = {"transpose_b": True, "epilogue": epilogue}

    def pull(arrays: dict[str, jax.Array], d_out: jax.Array) -> Any:
        call = lambda x: matmul(**x, **keywords, config=TILE, interpret=True)  # noqa: E731
        return jax.vjp(call, arrays)[1](d_out)[0]

    ours = interpreted(pull, arrays, d_out)
    host = {name: np.asarray(x) for name, x in arrays.items()}
    truth = oracles.matmul(**wide(arrays), **keywords, d_out=np.asarray(d_out).astype(np.float64))
    plain = oracles.matmul(**host, **keywords, d_out=np.asarray(d_out), dtype=BF16)
    for name in arrays:
        assert_as_accurate(ours[name], plain[name], truth[name])


# Integers come to sums that float32 holds, so that ties are ties
TIES = {
    "int8": (I8, 0.5, [-300, -5, -3, -1, 0, 1, 3, 5, 253, 254, 255, 300]),
    "float8_e4m3fn": (FP8, 1.0, [-1000, -465, -17, -19, 0, 15, 17, 19, 34, 38, 449, 464, 700]),
}


@transposed
@pytest.mark.parametrize("name", TIES)
def test_ties_go_to_even_and_what_is_too_large_saturates(name: str):
    dtype, scale, totals = TIES[name]
    a = jnp.zeros((len(totals), 128), I8)
    for column, digit in enumerate((100, 1)):
        digits = [int(np.trunc(t / 100)) if digit == 100 else int(np.fmod(t, 100)) for t in totals]
        a = a.at[:, column].set(jnp.asarray(digits, I8))
    b = jnp.zeros((32, 128), I8).at[:, 0].set(100).at[:, 1].set(1)
    config = Config(64, 32, 128, 1, 2)
    y = run({"a": a, "b": b, "out_scale": jnp.float32(scale)}, config, out_dtype=dtype)
    assert y.dtype == dtype
    want = oracles.saturated(np.asarray(totals) * scale, name)
    np.testing.assert_array_equal(np.asarray(y)[:, 7].astype(np.float64), want)
    assert len(set(want)) < len(want)
    np.testing.assert_array_equal(
        np.asarray(saturated(jnp.asarray(totals, F32) * scale, dtype)).astype(np.float64), want
    )


def test_every_float8_is_its_own_nearest():
    codes = np.arange(256, dtype=np.uint8).view(FP8)
    codes = codes[np.isfinite(codes.astype(np.float64))]
    exact = np.sort(codes.astype(np.float64))
    np.testing.assert_array_equal(oracles.saturated(exact, "float8_e4m3fn"), exact)
    middles = (exact[1:] + exact[:-1]) / 2
    even = oracles.saturated(middles, "float8_e4m3fn")
    ours = np.asarray(saturated(jnp.asarray(middles, F32), FP8))
    np.testing.assert_array_equal(ours.astype(np.float64), even)
    assert not np.any(ours.view(np.uint8) & 1)


def requantised(m: int, dtype: Any, extra: str, gated: bool) -> dict[str, jax.Array]:
    n = 80
    wide = 2 * n if gated else n
    arrays = {
        "a": floats(0, m, 144, dtype=dtype),
        "b": floats(1, wide, 144, dtype=dtype, scale=0.1),
    }
    if dtype == I8:
        rng = np.random.default_rng(0)
        arrays = {
            "a": jnp.asarray(rng.integers(-128, 128, (m, 144)), I8),
            "b": jnp.asarray(rng.integers(-128, 128, (wide, 144)), I8),
            "a_scale": (1 + abs(floats(4, m))) * 1e-3,
            "b_scale": (1 + abs(floats(5, wide))) * 1e-3,
        }
    if "bias" in extra:
        arrays["bias"] = floats(2, wide)
    columns = "columns" in extra
    arrays["out_scale"] = 20 + 20 * abs(floats(6, n)) if columns else jnp.float32(31.7)
    return arrays


def assert_rounded(arrays: dict[str, jax.Array], keywords: dict[str, Any], y: jax.Array) -> None:
    """Each number is that of the float64 result, which float32 may move over a tie."""
    name = jnp.dtype(keywords["out_dtype"]).name
    exact = oracles.matmul(**wide(arrays), transpose_b=True, epilogue=keywords["epilogue"])
    error = 1e-6 * np.abs(exact).max()  # a few float32 roundings
    low, high = (oracles.saturated(exact + sign * error, name) for sign in (-1, 1))
    ours = np.asarray(y).astype(np.float64)
    assert np.all((low <= ours) & (ours <= high))
    assert np.mean(low == high) > 0.98


REQUANTISED: Any = {
    "int8 of int8, GELU, one scale": (67, I8, I8, "gelu", BYTES, "bias"),
    "int8 of int8, GELU of tanh, columns": (130, I8, I8, "gelu_pytorch_tanh", WIDE, "columns"),
    "float8 of int8, no epilogue": (1, I8, FP8, None, Config(64, 32, 128, 1, 2), "columns"),
    "int8 of bfloat16, swiglu": (67, BF16, I8, "swiglu", Config(64, 128, 64, 1, 2), "bias columns"),
    "float8 of float8, the default tile": (7, FP8, FP8, "gelu", None, ""),
}


@transposed
@pytest.mark.parametrize("name", REQUANTISED)
def test_a_result_of_8_bits(name: str):
    m, dtype, out_dtype, epilogue, config, extra = REQUANTISED[name]
    arrays = requantised(m, dtype, extra, epilogue == "swiglu")
    keywords = {"out_dtype": out_dtype, "epilogue": epilogue}
    y = run(arrays, config, **keywords)
    assert y.dtype == out_dtype
    assert_rounded(arrays, keywords, y)
    assert_rounded(arrays, keywords, matmul_reference(**arrays, transpose_b=True, **keywords))


@transposed
def test_the_check_sees_a_result_that_was_cut_off():
    arrays = requantised(67, I8, "", False)
    keywords: Any = {"out_dtype": I8, "epilogue": "gelu"}
    floats = matmul_reference(
        **{name: x for name, x in arrays.items() if name != "out_scale"},
        transpose_b=True,
        out_dtype=F32,
        epilogue="gelu",
    )
    cut = jnp.clip(floats * arrays["out_scale"], -127, 127).astype(I8)
    with pytest.raises(AssertionError):
        assert_rounded(arrays, keywords, cut)


def test_a_result_of_8_bits_has_no_gradient():
    arrays = requantised(5, BF16, "", False)

    def total(a: jax.Array, dtype: Any) -> jax.Array:
        keywords: Any = {**arrays, "a": a, "transpose_b": True, "out_dtype": dtype}
        y = matmul(**keywords, config=TILE, interpret=True)
        return y.astype(F32).sum()

    with pytest.raises(NotImplementedError, match="rounded to float8_e4m3fn has no gradient"):
        jax.eval_shape(jax.grad(lambda a: total(a, FP8)), arrays["a"])


@transposed
def test_an_rms_norm_is_a_number_a_row_after_the_product():
    """x W^T / rms(x), with the norm's weight in W: forward and the gradient of x."""
    x, w = floats(0, 5, 144, dtype=BF16, scale=3), floats(1, 40, 144, dtype=BF16, scale=0.1)
    gain = jnp.asarray(2.0 ** np.random.default_rng(2).integers(-2, 3, 144), BF16)
    d_out, eps = floats(3, 5, 40, dtype=BF16), 1e-6

    def projected(x: jax.Array, product: Any) -> jax.Array:
        rms = jnp.sqrt(jnp.mean(jnp.square(x.astype(F32)), axis=-1) + eps)
        return product(x, w * gain[None], transpose_b=True, a_scale=1 / rms)

    def both(x: jax.Array, d_out: jax.Array, product: Any) -> Any:
        y, pull = jax.vjp(lambda x: projected(x, product), x)
        return y, pull(d_out)[0]

    kernel = lambda *a, **k: matmul(*a, **k, config=TILE, interpret=True)  # noqa: E731
    y, d_x = interpreted(lambda x, d: both(x, d, kernel), x, d_out)
    plain_y, plain_d_x = both(x, d_out, matmul_reference)
    x64, w64, gain64, d64 = (np.asarray(t).astype(np.float64) for t in (x, w, gain, d_out))
    normed = oracles.rms_norm(x64, gain64, eps=eps)
    assert_as_accurate(y, plain_y, normed @ w64.T)
    d_normed, _ = oracles.rms_norm(x64, gain64, eps=eps, d_out=d64 @ w64)
    assert_as_accurate(d_x, plain_d_x, d_normed)
    # without it the rows are off by their rms
    other = matmul_reference(x, w * gain[None], transpose_b=True)
    with pytest.raises(AssertionError, match="error is"):
        assert_as_accurate(y, other, x64 * gain64 @ w64.T)


ON_DEVICE: Any = {
    **{
        f"{epilogue}, int8 of int8, {m} rows": (m, I8, I8, epilogue)
        for epilogue in (None, "swiglu", *GELUS)
        for m in (1, 16, 300)
    },
    "gelu, float8 of float8": (300, FP8, FP8, "gelu"),
    "gelu, float8 of bfloat16": (300, BF16, FP8, "gelu_pytorch_tanh"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_result_of_8_bits_on_the_device(name: str):
    m, dtype, out_dtype, epilogue = ON_DEVICE[name]
    n, k = 4864, 896
    rows = 2 * n if epilogue == "swiglu" else n
    if dtype == I8:
        rng = np.random.default_rng(0)
        a, b = (jnp.asarray(rng.integers(-128, 128, (x, k)), I8) for x in (m, rows))
        arrays = {"a": a, "b": b, "a_scale": (1 + abs(floats(4, m))) * 1e-3}
        arrays["b_scale"] = (1 + abs(floats(5, rows))) * 1e-3
    else:
        arrays = {"a": floats(0, m, k, dtype=dtype), "b": floats(1, rows, k, dtype=dtype)}
        arrays["b_scale"] = jnp.float32(k**-0.5)
    arrays["out_scale"] = 20 + 20 * abs(floats(6, n))
    keywords: Any = {"transpose_b": True, "epilogue": epilogue, "out_dtype": out_dtype}
    y = jax.jit(lambda x: matmul(**x, **keywords))(arrays)
    if dtype == FP8:
        exact = of_short_sums(arrays, epilogue)
    else:
        exact = oracles.matmul(**wide(arrays), transpose_b=True, epilogue=epilogue)
    assert_near(y, oracles.saturated(exact, jnp.dtype(out_dtype).name), dtype)


def of_short_sums(arrays: dict[str, jax.Array], epilogue: str) -> np.ndarray:
    """The result in float64, not rounded, of the sums that the tensor cores make of float8."""
    given = wide(arrays | {"sums": jax.jit(float8_sums)(arrays["a"], arrays["b"])})
    total = given["sums"] * given["b_scale"]
    return oracles.activate(total, epilogue) * given["out_scale"]


def assert_near(y: jax.Array, want: np.ndarray, dtype: Any) -> None:
    """All but a few are what was wanted, and those a step of their dtype away: erf and exp are the
    hardware's, and sums of bfloat16 are cut off, so ties may fall either way.
    """
    step = np.maximum(2**-9, np.abs(want) * 2**-3) if y.dtype == FP8 else 1
    ours = np.asarray(y).astype(np.float64)
    assert np.all(np.abs(ours - want) <= step)
    # cut off by that rule, sums of bfloat16 alone make 4e-5 of such results others
    assert np.mean(ours != want) < (1e-3 if dtype == I8 else 5e-3)


def test_the_check_of_the_device_can_fail():
    """The tensor cores' sums are not float64's, whose results are more than a step away near 0."""
    arrays = {"a": floats(0, 300, 896, dtype=FP8), "b": floats(1, 256, 896, dtype=FP8)}
    arrays |= {"b_scale": jnp.float32(896**-0.5), "out_scale": jnp.float32(40)}
    short = of_short_sums(arrays, "gelu")
    want = oracles.saturated(short, "float8_e4m3fn")
    assert_near(saturated(jnp.asarray(short, F32), FP8), want, FP8)
    exact = oracles.matmul(**wide(arrays), transpose_b=True, epilogue="gelu")
    for wrong in (exact, short * 1.01, np.roll(short, 1, axis=1)):
        with pytest.raises(AssertionError):
            assert_near(saturated(jnp.asarray(wrong, F32), FP8), want, FP8)


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", GELUS)
def test_gelu_on_the_device(epilogue: str):
    arrays = {
        "a": floats(0, 1111, 896, dtype=BF16),
        "b": floats(1, 4864, 896, dtype=BF16, scale=896**-0.5),
        "bias": floats(2, 4864, dtype=BF16),
    }
    keywords: Any = {"transpose_b": True, "epilogue": epilogue}
    y = jax.jit(lambda x: matmul(**x, **keywords))(arrays)
    plain = jax.jit(lambda x: matmul_reference(**x, **keywords))(arrays)
    assert_as_accurate(y, plain, oracles.matmul(**wide(arrays), **keywords))
