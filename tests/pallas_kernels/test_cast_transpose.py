"""Cast and transpose: in the interpreter, a thread's bytes by the machine of lanes, on a GPU."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absent_device import H200
from kernels import interpreted
from lane_machine import Machine, Value, dialects

from jaxllm import aot
from pallas_kernels import device as device_lib
from pallas_kernels.cast_transpose import (
    DTYPES,
    HELD,
    OUT_DTYPES,
    TILE,
    WORD,
    cast_transpose,
    cast_transpose_reference,
    why_not,
)

pytestmark = pytest.mark.usefixtures("strict_jax")

MODULE = importlib.import_module("pallas_kernels.cast_transpose")
E4M3, E5M2 = OUT_DTYPES
SPECIAL = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-30, 448, 464, 465, 57344]


def numbers(m: int, n: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Of every size, and some that no 8 bits have."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, n)) * 2.0 ** rng.integers(-20, 20, (m, n))
    x.flat[: 5 * len(SPECIAL) : 5] = SPECIAL
    with np.errstate(over="ignore"):  # float16 has no 1e30
        return jnp.asarray(x.astype(np.float32), dtype)


def truth(x: jax.Array, scale: float, dtype: Any) -> np.ndarray:
    """Rounded once, to the nearest and ties to even, as ml_dtypes does it."""
    quotient = np.asarray(x).astype(np.float32) * (np.float32(1) / np.float32(scale))
    most = float(ml_dtypes.finfo(dtype).max)
    return np.clip(quotient, -most, most).astype(dtype)


def assert_same(found: Any, wanted: Any) -> None:
    """Bit by bit; one NaN is as good as another."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    wide = found.astype(np.float32), wanted.astype(np.float32)
    np.testing.assert_array_equal(*wide)
    np.testing.assert_array_equal(*(np.signbit(x)[~np.isnan(x)] for x in wide))


@pytest.mark.parametrize(
    ("tiles", "x_dtype", "dtype", "scale"),
    [
        ((1, 1), jnp.bfloat16, E4M3, 1.0),
        ((1, 3), jnp.float32, E5M2, 0.25),
        ((3, 1), jnp.float16, E4M3, 3.7),
        ((2, 2), jnp.bfloat16, E5M2, 1e-3),
    ],
)
def test_cast_transpose(tiles, x_dtype, dtype, scale):
    x = numbers(*(count * tile for count, tile in zip(tiles, TILE, strict=True)), x_dtype)
    wanted = truth(x, scale, dtype)
    arguments = x, jnp.float32(scale)
    ours = interpreted(functools.partial(cast_transpose, dtype=dtype, interpret=True), *arguments)
    plain = cast_transpose_reference(*arguments, dtype)
    for y, turned in (ours, plain):
        assert_same(y, wanted)
        assert_same(turned, wanted.T)
    for wrong in (wanted[::-1], truth(x, 1.1 * scale, dtype), -wanted):
        with pytest.raises(AssertionError):
            assert_same(ours[0], wrong)


def test_a_thread_turns_its_bytes(monkeypatch):
    """Words as `_turned` takes and leaves them: of 4 x 4 bytes of each thread."""
    machine = Machine({}, {}, 32)
    monkeypatch.setattr(MODULE, "asm", dialects(machine)["asm"])
    held = np.random.default_rng(0).integers(0, 256, (WORD, 32, WORD), np.uint8)
    words = [Value(row.copy().view(np.uint32)[:, 0], "i32") for row in held]
    turned = [word.bits.astype(np.uint32) for word in MODULE._turned_words(*words)]
    found = np.stack([word.view(np.uint8).reshape(32, WORD) for word in turned])
    np.testing.assert_array_equal(found, held.transpose(2, 1, 0))


def test_no_gradient_passes_through():
    x = numbers(*TILE)

    def total(run, x, scale):
        y, turned = run(x, scale)
        return jnp.sum(y.astype(jnp.float32)[:, 80:]) + jnp.sum(turned.astype(jnp.float32)[80:])

    for run in (functools.partial(cast_transpose, interpret=True), cast_transpose_reference):
        slope = jax.grad(functools.partial(total, run), argnums=(0, 1))(x, jnp.float32(2))
        assert not any(np.any(np.asarray(part)) for part in slope)


def test_what_the_kernel_refuses():
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    assert why_not(shape(TILE), device=H200) is None
    for other in ((0, 128), (129, 128), (128, 192), (16, 64)):
        wanted = f"takes rows and columns in multiples of 128: {list(other)}"
        assert why_not(shape(other), device=H200) == wanted
    wide = jax.ShapeDtypeStruct(TILE, jnp.float64)
    assert why_not(wide, device=H200) == "takes bfloat16, float16 or float32, got float64"
    assert why_not(shape((2**14, 2**17)), device=H200) == (
        "an array of 2147483648 numbers has no index of 32 bits"
    )
    assert why_not(shape((2**23, 128)), device=H200) == "8388608 rows are more than 8388480"
    ampere = device_lib.Device("gpu", "NVIDIA A100", 8.0, 108)
    assert str(why_not(shape(TILE), device=ampere)).startswith("needs a Hopper GPU")
    with pytest.raises(NotImplementedError, match="^cast_transpose: cannot run this call: takes"):
        cast_transpose(numbers(64, 64), jnp.float32(1), interpret=True)


@pytest.mark.parametrize(
    ("x", "scale", "dtype", "message"),
    [
        (jnp.zeros((2, 3, 4)), jnp.float32(1), E4M3, r"x is float32\[2, 3, 4\]; it must be \[M, N"),
        (jnp.zeros((2, 3), jnp.int8), jnp.float32(1), E4M3, r"x is int8\[2, 3\]; it must be"),
        (jnp.zeros((2, 3)), jnp.ones(2), E4M3, r"scale is float32\[2\]; it must be one float32"),
        (jnp.zeros((2, 3)), jnp.bfloat16(1), E4M3, r"scale is bfloat16\[\]; it must be one"),
        (jnp.zeros((2, 3)), 1, E4M3, r"scale is int32\[\]; it must be one float32"),
        (jnp.zeros((2, 3)), jnp.float32(1), jnp.int8, "dtype is int8; it must be float8_e4m3fn or"),
    ],
)
def test_bad_input(x, scale, dtype, message):
    with pytest.raises(ValueError, match=f"^cast_transpose: {message}"):
        cast_transpose(x, scale, dtype, interpret=True)


@pytest.mark.aot
@pytest.mark.parametrize("dtype", OUT_DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_compiled(x_dtype, dtype):
    """Two numbers are rounded at once, four words turned by eight instructions; nothing on chip."""
    shapes = jax.ShapeDtypeStruct((256, 384), x_dtype), jax.ShapeDtypeStruct((), jnp.float32)
    program = aot.compile_for(functools.partial(cast_transpose, dtype=dtype), *shapes)
    kernel = program.kernel("cast_transpose")
    assert kernel.count("F2FP") >= HELD[0] * HELD[1] // 2
    assert kernel.count("PRMT") >= HELD[0] * HELD[1] // 2
    assert not any(kernel.count(code) for code in ("STS", "LDS", "SHFL"))
    assert kernel.registers <= 168  # three blocks of 128 threads a multiprocessor


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", OUT_DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("shape", [TILE, (384, 896), (8192, 5504)])
def test_on_a_gpu(shape, x_dtype, dtype):
    x = numbers(*shape, x_dtype)
    found = cast_transpose(x, jnp.float32(0.125), dtype)
    wanted = truth(x, 0.125, dtype)
    assert_same(found[0], wanted)
    assert_same(found[1], wanted.T)
