"""Products with packed weights against float64: on the CPU what calls become, on a GPU the rest.

The interpreter runs the kernel's frame; what a warp does in it is plain JAX there, and is run lane
by lane in test_quantized_lanes.py.
"""

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import H200
from kernels import interpreted
from numerics import assert_as_accurate
from quantized_calls import (
    BF16,
    DTYPES,
    F16,
    F32,
    FORMATS,
    assert_right,
    call,
    interpret,
    numbers,
    on_chip,
    packed_shape,
    truth,
)

from jaxllm import aot
from pallas_kernels import device as device_lib
from pallas_kernels import quantized_matmul_config as sizes
from pallas_kernels import quantized_matmul_kernel as kernel
from pallas_kernels.around_product import Norm
from pallas_kernels.device import SHARED_BYTES
from pallas_kernels.packed import PLAIN, Packed
from pallas_kernels.quantize import quantize
from pallas_kernels.quantized_matmul import (
    SCHEMES,
    Config,
    bucket,
    candidates,
    default_config,
    quantized_matmul,
    quantized_matmul_reference,
    why_not,
)
from pallas_kernels.quantized_matmul_config import Static

pytestmark = pytest.mark.usefixtures("strict_jax")


CALLS: Any = {
    "one row": partial(call, 1, 64, 256),
    "a prime of rows, K of 896, bias": partial(call, 7, 96, 896, "int4", F16, "bias"),
    "all": partial(call, 3, 64, 512, "int8", BF16, "bias residual", epilogue="swiglu"),
    "norm": partial(call, 2, 64, 256, "int4, zero points", BF16, "norm bias residual"),
    "norm of one row, gate": partial(call, 1, 64, 896, "int8", BF16, "norm", epilogue="swiglu"),
    "GELU's gate": partial(call, 2, 64, 256, "int4", BF16, "norm centred", epilogue="geglu"),
    "GELU's gate, not packed": partial(call, 3, 64, 256, PLAIN, F16, "bias", epilogue="geglu"),
    "norm that adds 1": partial(call, 3, 32, 256, "mxfp4", BF16, "norm centred"),
    "float32 result": partial(call, 2, 32, 256, "nvfp4", BF16, "residual", out_dtype=F32),
    "not packed": partial(call, 9, 64, 256, PLAIN, BF16, "norm bias residual", epilogue="swiglu"),
    "not packed, float16": partial(call, 3, 32, 896, PLAIN, F16, "bias"),
}


@pytest.mark.parametrize("name", CALLS)
def test_forward(name: str):
    arrays, keywords = CALLS[name]()
    assert_right(arrays, keywords, interpret(arrays, keywords))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_the_mathematics(form: str, dtype: str):
    arrays, _ = call(5, 48, 512, form, DTYPES[dtype])
    ours = quantized_matmul_reference(**arrays, out_dtype=F32)
    exact = truth(arrays, {})
    # numbers of 8 to 11 bits, each rounded once
    np.testing.assert_allclose(ours, exact, rtol=0, atol=2**-7 * np.abs(exact).max())
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(ours * 1.02, exact, rtol=0, atol=2**-7 * np.abs(exact).max())


def test_the_check_sees_another_norm():
    arrays, keywords = CALLS["norm"]()
    other = {**arrays, "norm": arrays["norm"]._replace(eps=0.05)}
    with pytest.raises(AssertionError, match="error is"):
        assert_right(arrays, keywords, interpret(other, keywords))


# Of 7 turns of int4 and nvfp4 4 and 3, or 3, 3 and 1; of 14 of int8 7 and 7, or 5, 5 and 4
@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("form", ["int4", "int8", "nvfp4"])
def test_splits(form: str, splits: int):
    """Scales of rows, gate, bias and residual follow the sum of all."""
    arrays, keywords = call(9, 64, 1792, form, BF16, "bias residual", epilogue="swiglu")
    y = interpret(arrays, keywords, config=Config(32, 4, 1, 1, splits))
    assert_right(arrays, keywords, y)
    without = {**arrays, "x": arrays["x"].at[:, 1664:].set(0)}  # the last turn, of int8
    with pytest.raises(AssertionError, match="error is"):
        assert_right(without, keywords, y)


def test_rows_that_do_not_lie_on_chip_are_split():
    """As often as they must be, and by tuning, but for one row's second launch; a norm, which is of
    whole rows, is refused.
    """
    weight = shaped(64, 14336)
    found = [default_config(shape(m, 14336), weight, device=H200) for m in (1, 8, 16)]
    assert [getattr(config, "splits", None) for config in found] == [1, 4, 4]
    x, weight = shape(1, 1024), shaped(64, 1024)
    split = Config(16, 4, 1, 1, splits=2)
    assert why_not(x, weight, config=split, device=H200) is None
    reason = why_not(x, weight, norm=norm(1024), config=split, device=H200)
    assert reason == "norms whole rows of x, and 1 of 1024 numbers are in 2 parts"
    for rows, splits in ((1, {1}), (2, {1, 2, 4})):
        some = candidates(shape(rows, 4096), shaped(4096, 4096), device=H200)
        assert {getattr(config, "splits", None) for config in some} == splits


def test_leading_dimensions():
    arrays, _ = call(6, 64, 256, "int8", BF16, "residual")
    run = partial(quantized_matmul, packed=arrays["packed"], interpret=True)
    flat = interpreted(lambda x, r: run(x, residual=r), arrays["x"], arrays["residual"])
    x, residual = (arrays[name].reshape(2, 3, -1) for name in ("x", "residual"))
    y = interpreted(lambda x, r: run(x, residual=r), x, residual)
    assert y.shape == (2, 3, 64)
    np.testing.assert_array_equal(y.reshape(6, 64), flat)
    row = interpreted(run, arrays["x"][0])
    assert row.shape == (64,)


def test_gradients():
    arrays, keywords = call(3, 64, 256, "int4", BF16, "bias residual", epilogue="swiglu")
    packed = arrays.pop("packed")
    d_out = numbers(9, (3, 32), BF16)

    def run(arrays: dict[str, Any], d_out: jax.Array, **extra: Any) -> Any:
        f = partial(quantized_matmul, packed=packed, **keywords, **extra)
        return jax.vjp(lambda arrays: f(**arrays), arrays)[1](d_out)[0]

    ours = interpreted(partial(run, interpret=True), arrays, d_out)
    weight = oracles.packed_numbers(packed)
    exact = {name: np.asarray(x).astype(np.float64) for name, x in arrays.items()}
    both: Any = {"transpose_b": True, **keywords}
    want = oracles.matmul(
        exact.pop("x"), weight, **exact, **both, d_out=np.asarray(d_out).astype(np.float64)
    )
    rounded = {name: np.asarray(x) for name, x in arrays.items()}
    plain = oracles.matmul(
        rounded.pop("x"), weight, **rounded, **both, d_out=np.asarray(d_out), dtype=BF16
    )
    for name, of in (("x", "a"), ("bias", "bias"), ("residual", "residual")):
        assert ours[name].dtype == BF16
        assert_as_accurate(ours[name], plain[of], want[of])


def test_gradients_of_a_norm():
    arrays, _ = call(3, 64, 256, "int8", BF16, "norm")
    packed, norm, x = arrays["packed"], arrays["norm"], arrays["x"]
    d_out = numbers(9, (3, 64), BF16)

    def run(x: jax.Array, weight: jax.Array, d_out: jax.Array) -> Any:
        def f(x: jax.Array, weight: jax.Array) -> jax.Array:
            return quantized_matmul(x, packed, norm=norm._replace(weight=weight), interpret=True)

        return jax.vjp(f, x, weight)[1](d_out)

    ours = interpreted(run, x, norm.weight, d_out)

    def steps(dtype: Any) -> Any:
        """The gradients of x and the norm's weight, rounded to the dtype between two steps."""
        x_, weight, d = (np.asarray(a).astype(dtype) for a in (x, norm.weight, d_out))
        normed = oracles.rms_norm(x_, weight, eps=norm.eps, dtype=dtype)
        w = oracles.packed_numbers(packed)
        d = oracles.matmul(normed, w, transpose_b=True, d_out=d, dtype=dtype)["a"]
        return [a.astype(dtype) for a in oracles.rms_norm(x_, weight, eps=norm.eps, d_out=d)]

    for y, plain, want in zip(ours, steps(BF16), steps(np.float64), strict=True):
        assert y.dtype == BF16
        assert_as_accurate(y, plain, want)


def shaped(o: int, i: int, form: str = "int4", dtype: Any = BF16) -> Packed:
    return packed_shape(form, o, i, dtype)


def shape(*sizes: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def norm(width: int, *, eps: float = 1e-5, zero_centered: bool = False, dtype: Any = BF16) -> Norm:
    weight: Any = shape(width, dtype=dtype)
    return Norm(weight, eps, zero_centered)


X, W = shape(3, 256), shaped(64, 256)
TERNARY = jax.eval_shape(lambda w: quantize(w, "ternary"), shape(64, 256))


@pytest.mark.parametrize(
    ("x", "keywords", "sentence"),
    [
        (shape(3, 128), {}, r"x \[3, 128\] is \[.., I\], which a weight \[O, I\] of \[64, 256\]"),
        (shape(3, 256, dtype=jnp.int8), {}, "x is int8; it must be floating point"),
        (X, {"bias": shape(63)}, r"bias \[63\] is not \[O\] = \[64\]"),
        (X, {"bias": shape(64, dtype=jnp.int32)}, "bias is int32"),
        (X, {"residual": shape(3, 63)}, r"residual is bfloat16\[3, 63\], but the result is"),
        (X, {"residual": shape(3, 64, dtype=F32)}, "residual is float32"),
        (X, {"out_dtype": jnp.int8}, "out_dtype int8 is not bfloat16, float16 or float32"),
        (
            X,
            {"norm": norm(255)},
            r"the norm's weight \[255\] is not \[I\] =",
        ),
        (X, {"norm": norm(256, eps=0.0)}, "the norm's eps must be positive and finite, got 0.0"),
        (X, {"norm": norm(256, dtype=jnp.int32)}, "the norm's weight is int32"),
        (
            X,
            {"epilogue": "relu"},
            "no epilogue is named 'relu'; there are 'swiglu', 'geglu', 'rope'",
        ),
    ],
)
def test_wrong_calls(x: Any, keywords: dict[str, Any], sentence: str):
    arrays = {name: x for name, x in keywords.items() if isinstance(x, jax.ShapeDtypeStruct)}
    rest = {name: x for name, x in keywords.items() if name not in arrays}
    with pytest.raises(ValueError, match=f"^quantized_matmul: .*{sentence}"):
        jax.eval_shape(lambda x, w, arrays: quantized_matmul(x, w, **arrays, **rest), x, W, arrays)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (Config(tile_n=24), "tile_n must be a multiple of 16 that divides 64"),
        (Config(tile_n=48), "tile_n must be a multiple"),
        (Config(warps=6), "warps must be a multiple of 4, 16 at most"),
        (Config(ahead=0), "ahead must be 1 at least"),
        (Config(blocks=0), "blocks must be 1 at least"),
        (Config(splits=0), "splits must be 1 to 8, each with turns of a row's 1"),
        (Config(splits=2), "splits must be 1 to 8, each"),
        (Config(tma=True), "tma is for x that is held, and codes"),
        (Config(tile_n=64, ahead=60), "takes [0-9]+ of 232448 bytes on chip"),
    ],
)
def test_wrong_configs(config: Config, sentence: str):
    run = lambda x, w: quantized_matmul(x, w, config=config, interpret=True)  # noqa: E731
    with pytest.raises(ValueError, match=f"^quantized_matmul: .*{sentence}"):
        jax.eval_shape(run, X, W)


def test_x_that_registers_do_not_hold():
    """Of 8 rows of 8192 numbers four warps would have 256 words a thread, eight 128."""
    weight = shaped(64, 8192)
    sentence = "256 words of x and 4 sums are too much for a thread's 255 registers"
    assert sizes.problem(Config(16, 4, 1, 1, held=True), 8, weight, apart=0) == sentence
    assert sizes.problem(Config(16, 8, 1, 1, held=True), 8, weight, apart=0) is None
    assert sizes.problem(Config(16, 4, 1, 1), 8, weight, apart=0) is None
    # Two blocks of 16 warps leave fewer registers
    sentence = "32 words of x and 8 sums are too much for a thread's 64 registers"
    config = Config(32, 16, 1, 2, held=True)
    assert sizes.problem(config, 1, shaped(64, 4096), apart=0) == sentence


@pytest.mark.slow
@pytest.mark.aot
def test_x_that_registers_hold_as_compiled():
    """What they just hold does not spill."""
    for rows, i, config in (
        (16, 4096, Config(16, 8, 4, 1, held=True)),
        (16, 4096, Config(16, 8, 3, 1, held=True, tma=True)),
        (8, 8192, Config(16, 8, 3, 1, held=True, tma=True)),
        (16, 4096, Config(16, 4, 2, 1, splits=2, held=True)),
        (1, 4096, Config(32, 8, 2, 2, held=True)),
    ):
        x, weight = shape(rows, i), shaped(256, i)
        assert sizes.problem(config, rows, weight, apart=128) is None
        run = partial(quantized_matmul, epilogue="swiglu", config=config)
        compiled = aot.compile_for(run, x, weight).kernel("quantized_matmul_swiglu")
        assert compiled.spill_store_bytes == 0


@pytest.mark.parametrize(
    ("m", "o", "i", "form", "config"),
    [
        (16, 28672, 4096, "int4", Config(16, 8, 3, 1, held=True, tma=True)),
        (4, 28672, 4096, "int4", None),
        (5, 28672, 4096, "int4", Config(16, 8, 3, 1, held=True, tma=True)),
        (16, 57344, 8192, "int4", Config(16, 8, 3, 1, 2, held=True, tma=True)),
        (8, 4096, 4096, "int4", Config(16, 8, 2, 1, held=True, tma=True)),
        (4, 4096, 4096, "int4", Config(16, 8, 2, 1, held=True)),
        (1, 5120, 3072, "int4", Config(16, 8, 2, 1, held=True)),
        (9, 4096, 2048, "int4", Config(16, 8, 2, 1, held=True, tma=True)),
        (8, 4096, 2048, "int4", None),
        (8, 4096, 14336, "int4", Config(16, 8, 3, 1, 4, held=True, tma=True)),
        (8, 3584, 18944, "int4", Config(16, 8, 3, 1, 4, held=True, tma=True)),
        (8, 3072, 8192, "int4", Config(16, 8, 2, 1, held=True, tma=True)),
        (16, 8192, 28672, "int4", Config(16, 8, 3, 1, 8, held=True, tma=True)),
        (8, 4096, 4096, "int8", None),
    ],
)
def test_which_weights_hold_x(m, o, i, form, config):
    found = default_config(shape(m, i), shaped(o, i, form), device=H200)
    assert (found if found.held else None) == config


def test_a_norm_wants_whole_rows_of_x():
    """Where x would be held in parts without one, it is read from the chip for each tile."""
    x, weight = shape(16, 5120), shaped(8192, 5120)
    assert default_config(x, weight, device=H200) == Config(16, 8, 3, 1, 2, held=True, tma=True)
    config = default_config(x, weight, norm=norm(5120), device=H200)
    assert (config.splits, config.held) == (1, False)
    assert why_not(x, weight, norm=norm(5120), config=config, device=H200) is None


@pytest.mark.parametrize(("m", "k"), [(16, 5120), (9, 8192), (5, 8448), (7, 12288)])
def test_a_call_with_a_norm_gets_whole_rows(m: int, k: int):
    """Such as without a norm would be held in parts."""
    x, weight = shape(m, k), shaped(256, k)
    assert default_config(x, weight, device=H200).splits > 1

    def run(x, weight, scale):
        return quantized_matmul(x, weight, norm=norm(k)._replace(weight=scale), interpret=True)

    assert jax.eval_shape(run, x, weight, shape(k)).shape == (m, 256)


def test_warps_take_few_rows():
    run = partial(quantized_matmul, config=Config(ahead=1), interpret=True)
    with pytest.raises(ValueError, match="^quantized_matmul: .*warps take 16 rows of x at most"):
        jax.eval_shape(run, shape(17, 256), W)


@pytest.mark.parametrize(
    ("x", "weight", "keywords", "device", "phrase"),
    [
        (X, W, {}, H200, None),
        (X, W, {}, device_lib.INTERPRETED, None),
        (X, W, {}, device_lib.Device("cpu", "cpu"), "needs an NVIDIA GPU, found cpu"),
        (X, W, {}, device_lib.Device("gpu", "NVIDIA B200", 10.0), "needs a Hopper GPU"),
        (shape(3, 256, dtype=F32), W, {}, H200, "takes x in bfloat16 or float16, got float32"),
        (shape(3, 256, dtype=F16), shaped(64, 256, "mxfp4"), {}, H200, "has not the exponents"),
        (shape(65, 256), TERNARY, {}, H200, "takes 64 rows of x at most, got 65"),
        (shape(0, 256), W, {}, H200, "nothing to multiply"),
        (X, W, {"norm": norm(256)}, H200, None),
        (
            shape(3, 256, dtype=F16),
            shaped(64, 256, dtype=F16),
            {"norm": norm(256, dtype=F16)},
            H200,
            "may pass what float16 holds",
        ),
        (
            X,
            W,
            {"norm": norm(256, dtype=F32)},
            H200,
            "a norm's weight in bfloat16, got float32",
        ),
        (
            shape(17, 256),
            W,
            {"norm": norm(256)},
            H200,
            "norms 16 rows of x at most, got 17",
        ),
        (
            shape(16, 14336),
            shaped(64, 14336),
            {"norm": norm(14336)},
            H200,
            "norms whole rows of x, and 16 of 14336 numbers are in 4 parts",
        ),
        (
            shape(3, 768),
            jax.eval_shape(lambda w: quantize(w, "int8", 192), shape(64, 768)),
            {"norm": norm(768)},
            H200,
            "norms no rows of x where tiles multiply them: 3 of 768 numbers",
        ),
        (X, TERNARY, {"norm": norm(256, zero_centered=True)}, H200, "adds no 1 to its own"),
        (shape(3, 160), shaped(64, 160, "int4, groups of 32"), {}, H200, "multiples of 128"),
        (X, shaped(24, 256), {}, H200, "takes outputs in multiples of 16 at 3 rows, got 24"),
        (X, shaped(40, 256), {"epilogue": "swiglu"}, H200, "multiples of 16 at 3 rows, got 40"),
        (
            X,
            shaped(48, 256, "mxfp4"),
            {"epilogue": "swiglu"},
            H200,
            "outputs in multiples of 32 at 3 rows, got 48",
        ),
        (
            shape(3, 384),
            jax.eval_shape(lambda w: quantize(w, "int4", 48), shape(64, 384)),
            {"config": Config(16, 4, 1, 1)},
            H200,
            "groups of 48 straddle the inputs of a lane",
        ),
    ],
)
def test_why_not(x: Any, weight: Any, keywords: Any, device: Any, phrase: str | None):
    reason = why_not(x, weight, **keywords, device=device)
    assert reason is None if phrase is None else phrase in str(reason)


def test_refuses_without_a_gpu():
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    with pytest.raises(NotImplementedError, match="^quantized_matmul: cannot run this call: needs"):
        quantized_matmul(jnp.ones((1, 256), BF16), quantize(jnp.ones((64, 256), BF16), "int8"))


def test_bucket_says_what_matters():
    keys = {
        bucket(X, W),
        bucket(shape(1, 256), W),
        bucket(shape(3, 256, dtype=F16), W),
        bucket(X, shaped(128, 256)),
        bucket(X, shaped(64, 256, "int4, zero points")),
        bucket(X, shaped(64, 256, "int4, groups of 32")),
        bucket(X, shaped(64, 256, "int8")),
        bucket(X, W, epilogue="swiglu"),
        bucket(X, W, out_dtype=F32),
    }
    assert len(keys) == 9
    assert bucket(X, W) == bucket(shape(4, 256), W) == "int4-g128-bfloat16-m4-n64-k256-bfloat16"


@pytest.mark.parametrize("m", [1, 2, 7, 16])
@pytest.mark.parametrize(
    ("o", "i"),
    [(1152, 896), (896, 4864), (9728, 896), (151936, 896), (6144, 4096), (4096, 14336), (128, 128)],
)
@pytest.mark.parametrize("form", ["int4", "int8"])
def test_the_default_config_is_legal(m: int, o: int, i: int, form: str):
    x, weight = shape(m, i), shaped(o, i, form)
    for epilogue in (None, "swiglu"):
        config = default_config(x, weight, epilogue=epilogue, device=H200)
        assert why_not(x, weight, epilogue=epilogue, config=config, device=H200) is None
        run = partial(quantized_matmul, epilogue=epilogue, config=config, interpret=True)
        jax.eval_shape(run, x, weight)


TOO_LARGE = Config(32, 8, 1, 1)  # at 16 rows of 4864, int8 in groups, with a gate


@pytest.mark.parametrize("form", FORMATS)
def test_what_lies_on_chip_is_known(form: str, monkeypatch: pytest.MonkeyPatch):
    """A launch of more than there is fails; one byte of it is Mosaic's own."""
    for rows, i, epilogue in itertools.product((1, 7, 16), (1024, 4864), (None, "swiglu")):
        if i % (FORMATS[form][1] or 1):
            continue
        x, weight = shape(rows, i), shaped(256, i, form)
        config = default_config(x, weight, epilogue=epilogue, device=H200)
        for c in (config, Config(32, 4, 3, 1), Config(32, 4, 1, 1, splits=2), TOO_LARGE):
            static = Static("name", c, False, "bfloat16", 132, epilogue)
            run = partial(kernel.warp_products, static, plain=jnp.add)
            taken = on_chip(monkeypatch, run, x, weight)
            assert taken < sizes.shared_bytes(c, rows, weight) <= taken + 1024


def test_a_config_that_fills_all_there_is_refused():
    run = partial(quantized_matmul, epilogue="swiglu", interpret=True)
    x, weight = shape(16, 4864), shaped(256, 4864, "int8, groups")
    with pytest.raises(ValueError, match="takes 233472 of 232448 bytes on chip"):
        jax.eval_shape(partial(run, config=TOO_LARGE), x, weight)
    config = default_config(x, weight, epilogue="swiglu", device=H200)
    jax.eval_shape(partial(run, config=config), x, weight)


@pytest.mark.slow
@pytest.mark.aot
def test_on_chip_as_compiled():
    """The nearest to all there is of the configs that are taken."""
    x, weight = shape(16, 4864), shaped(256, 4864, "int8")
    assert sizes.shared_bytes(TOO_LARGE, 16, weight) == SHARED_BYTES
    run = partial(quantized_matmul, epilogue="swiglu", config=TOO_LARGE)
    compiled = aot.compile_for(run, x, weight).kernel("quantized_matmul_swiglu")
    assert compiled.dynamic_shared_bytes == SHARED_BYTES - 1024
    assert compiled.static_shared_bytes == 1


def test_every_scheme_is_tried():
    assert {scheme for scheme, _, _ in FORMATS.values()} | {PLAIN} == set(SCHEMES)


def test_a_weight_that_is_not_packed():
    """It has a gradient, is of x's dtype, and is for few rows."""
    x, weight = numbers(0, (9, 256), BF16), numbers(1, (64, 256), BF16, 1 / 16)

    def product(f, x, w):
        return jnp.sum(jnp.tanh(f(x, w).astype(F32)))

    def ours(x, w):
        return quantized_matmul(x, Packed.of(w), interpret=True)

    found = interpreted(jax.grad(partial(product, ours), (0, 1)), x, weight)
    theirs = jax.grad(partial(product, lambda x, w: x @ w.T), (0, 1))
    plain, exact = theirs(x, weight), theirs(x.astype(F32), weight.astype(F32))
    for mine, near, right in zip(found, plain, exact, strict=True):
        assert_as_accurate(mine, near, np.asarray(right, np.float64))
        with pytest.raises(AssertionError):  # the twin
            assert_as_accurate(mine * 1.03, near, np.asarray(right, np.float64))
    of = Packed.of(jax.ShapeDtypeStruct((64, 256), BF16))
    assert why_not(jax.ShapeDtypeStruct((16, 256), BF16), of, device=H200) is None
    for m, dtype, phrase in (
        (17, BF16, "multiplies no 17 rows of 256 numbers by a weight that is not packed"),
        (1, F16, "takes numbers of x's dtype, float16, got bfloat16"),
    ):
        assert why_not(jax.ShapeDtypeStruct((m, 256), dtype), of, device=H200) == phrase


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_on_a_gpu(form: str, dtype: str):
    """Rows of x with a single 1 read the weight out, exactly where its numbers are exact."""
    scheme, group, zeros = FORMATS[form]
    if dtype == "float16" and scheme in ("mxfp4", "mxfp8"):
        pytest.skip("not taken")
    o, i = 64, 512
    weight = quantize(numbers(1, (o, i), DTYPES[dtype]), scheme, group, zero_points=zeros)
    codes = np.random.default_rng(0).integers(0, 256, weight.codes.shape).astype(np.uint8)
    if weight.codes.dtype != jnp.uint8:
        codes = codes.view(weight.codes.dtype)
        codes = np.where(np.isnan(codes.astype(np.float32)), 0, codes).astype(weight.codes.dtype)
    weight = Packed(
        jnp.asarray(codes), weight.scale, weight.zero, weight.row_scale, scheme, weight.group_size
    )
    exact = oracles.packed_numbers(weight)
    for start in range(0, i, 16):
        x = jnp.eye(i, dtype=DTYPES[dtype])[start : start + 16]
        y = quantized_matmul(x, weight, out_dtype=F32)
        # a scale that multiplies numbers of 16 bits rounds them
        np.testing.assert_allclose(y.T, exact[:, start : start + 16], rtol=2**-7, atol=0)
        if scheme == "nvfp4" or "groups of" not in form:
            want = exact[:, start : start + 16].astype(np.float32)
            np.testing.assert_allclose(y.T, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_a_bias_of_8_bits(dtype: Any):
    """Becomes one of 16 before any kernel: no lane reads a byte."""
    arrays, keywords = call(3, 64, 256, "int8", BF16, "bias")
    bias = arrays["bias"].astype(dtype)
    found = []

    def recorded(static: Any, x: Any, packed: Any, norm: Any, bias: Any, *_: Any, **more: Any):
        found.append(bias.dtype)
        return quantized_matmul_reference(x, packed, bias=bias)[None]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernel, "warp_products", recorded)
        jax.clear_caches()
        quantized_matmul(**{**arrays, "bias": bias}, **keywords, interpret=True)
    jax.clear_caches()
    assert found == [BF16]


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [2, 3, 4])
@pytest.mark.parametrize(
    "form", ["int4", "int4, groups of 64, zero points", "int8", "nvfp4", PLAIN]
)
def test_splits_on_a_gpu(form: str, splits: int):
    """Of 4864 numbers, whose last turn is not whole; and of rows that do not lie on chip."""
    for rows, i in ((1, 4864), (16, 4864), (16, 14336)):
        if i == 14336 and splits != 4:
            continue
        arrays, keywords = call(rows, 256, i, form, BF16, "bias residual", epilogue="swiglu")
        config = Config(32, 4, 2, 1, splits)
        y = quantized_matmul(**arrays, **keywords, config=config)
        assert_right(arrays, keywords, y)
        again = quantized_matmul(**arrays, **keywords, config=config)
        np.testing.assert_array_equal(np.asarray(y), np.asarray(again))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form", ["int4", "int4, groups of 64, zero points", "int8", "nvfp4", PLAIN]
)
def test_x_in_registers_on_a_gpu(form: str):
    config = Config(32, 8, 1, 1, held=True)
    for rows, i in ((1, 4096), (7, 896), (16, 2048)):
        what = "norm bias residual"
        arrays, keywords = call(rows, 6144, i, form, BF16, what, epilogue="swiglu")
        y = quantized_matmul(**arrays, **keywords, config=config)
        assert_right(arrays, keywords, y)
        without = dataclasses.replace(config, held=False)
        again = quantized_matmul(**arrays, **keywords, config=without)
        np.testing.assert_array_equal(np.asarray(y), np.asarray(again))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 9, 16])
@pytest.mark.parametrize("form", ["int4", "int4, groups of 64, zero points", "int8", "nvfp4"])
def test_x_by_the_copy_engine_on_a_gpu(form: str, rows: int):
    """Of whole rounds and others, and of parts of K."""
    for i, what, splits, keywords in (
        (2048, "norm bias residual", 1, {"epilogue": "swiglu"}),
        (896, "norm heads 32 8 64", 1, {}),
        (4864, "bias residual", 2, {}),
        (4864, "", 3, {"out_dtype": F32}),
    ):
        arrays, keywords = call(rows, 3072, i, form, BF16, what, **keywords)
        grain = sizes.grain(arrays["packed"], halves=1 if splits > 1 else 2)
        config = Config(grain, 8, 1, 1, splits, held=True, tma=True)
        y = quantized_matmul(**arrays, **keywords, config=config)
        assert_right(arrays, keywords, y)
        again = quantized_matmul(**arrays, **keywords, config=config)
        for left, right in zip(jax.tree.leaves(y), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
@pytest.mark.parametrize("form", [*FORMATS, PLAIN])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(rows: int, form: str, dtype: str):
    if dtype == "float16" and form.startswith("mx"):
        pytest.skip("not taken")
    for i in (1024, 3584) if form == "int4, groups of 512" else (896, 4864):
        calls = [(None, ""), ("swiglu", "bias residual")]
        if dtype == "bfloat16" and i <= 1024:
            calls += [(None, "norm residual"), ("swiglu", "norm centred"), ("geglu", "norm")]
        for epilogue, extra in calls:
            arrays, keywords = call(rows, 256, i, form, DTYPES[dtype], extra, epilogue=epilogue)
            config = default_config(arrays["x"], arrays["packed"], **keywords, device=H200)
            y = quantized_matmul(**arrays, **keywords, config=config)
            assert_right(arrays, keywords, y)
            again = quantized_matmul(**arrays, **keywords, config=config)
            np.testing.assert_array_equal(np.asarray(y), np.asarray(again))
