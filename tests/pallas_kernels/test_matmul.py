"""Matmul against float64: in the interpreter at small tiles, on a GPU at the sizes of models."""

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
from quantized_calls import numbers

from pallas_kernels import _compat
from pallas_kernels import device as device_lib
from pallas_kernels.matmul import (
    Config,
    bucket,
    candidates,
    default_config,
    matmul,
    matmul_reference,
    why_not,
)

pytestmark = pytest.mark.usefixtures("strict_jax")

BF16, F16, F32, FP8 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn
I8 = jnp.int8
SMALL = Config(128, 64, 64, consumers=2, stages=2)
NARROW = Config(64, 32, 64, consumers=1, stages=2)
GATED = Config(128, 128, 64, consumers=2, stages=2)
BYTES = Config(64, 64, 128, consumers=1, stages=2)  # fp8: 128 bytes of K

transposed = pytest.mark.skipif(
    not _compat.INTERPRETS_TRANSPOSED_WGMMA,
    reason="the interpreter of jax 0.10 has no transposed wgmma operand",
)


def call(
    m: int, n: int, k: int, dtype: Any = BF16, *, extra: str = "", **keywords: Any
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Arrays and keywords of a call; `extra` names further arrays: bias residual rows columns one.

    n is the width of the result.
    """
    gated, transpose_b = keywords.get("epilogue") == "swiglu", keywords.get("transpose_b", False)
    wide = 2 * n if gated else n
    out = keywords.get("out_dtype") or (BF16 if dtype == FP8 else dtype)
    arrays = {
        "a": numbers(0, (m, k), dtype),
        "b": numbers(1, (wide, k) if transpose_b else (k, wide), dtype, k**-0.5),
    }
    if "bias" in extra:
        arrays["bias"] = numbers(2, (wide,), out)
    if "residual" in extra:
        arrays["residual"] = numbers(3, (m, n), out)
    if "rows" in extra:
        arrays["a_scale"] = 1 + abs(numbers(4, (m,), F32))
    if "columns" in extra:
        arrays["b_scale"] = 1 + abs(numbers(5, (wide,), F32))
    if "one" in extra:
        arrays |= {"a_scale": jnp.float32(0.5), "b_scale": jnp.float32(3)}
    return arrays, keywords


def plain_dtype(arrays: dict[str, jax.Array], keywords: dict[str, Any]) -> Any:
    return keywords.get("out_dtype") or (BF16 if arrays["a"].dtype == FP8 else arrays["a"].dtype)


def assert_right(arrays: dict[str, jax.Array], keywords: dict[str, Any], ours: jax.Array) -> None:
    assert ours.dtype == plain_dtype(arrays, keywords)
    keywords = {k: v for k, v in keywords.items() if k != "out_dtype"}
    exact = {name: np.asarray(x).astype(np.float64) for name, x in arrays.items()}
    plain = matmul_reference(**arrays, **keywords, out_dtype=ours.dtype)
    assert plain.dtype == ours.dtype
    assert_as_accurate(ours, plain, oracles.matmul(**exact, **keywords))


WEIGHT: Any = {"transpose_b": True}


def vectors(tile_n: int, tile_k: int) -> Config:
    return Config(tile_n=tile_n, tile_k=tile_k, form="vectors")


def split(tile_n: int, tile_k: int, stages: int = 2, cluster: int = 1) -> Config:
    return Config(tile_n=tile_n, tile_k=tile_k, stages=stages, cluster=cluster, form="split")


FORWARD = {
    "one row": (NARROW, partial(call, 1, 96, 96, **WEIGHT)),
    "a prime of rows, bias": (SMALL, partial(call, 131, 96, 72, extra="bias", **WEIGHT)),
    "one past a tile": (SMALL, partial(call, 129, 72, 72, F16, **WEIGHT)),
    "K of 1000": (SMALL, partial(call, 3, 40, 1000, **WEIGHT)),
    "float32 result, residual": (
        SMALL,
        partial(call, 130, 40, 64, F16, extra="residual", out_dtype=F32, **WEIGHT),
    ),
    "b as [K, N]": (SMALL, partial(call, 65, 72, 136)),
    "b as [K, N], bias, residual": (SMALL, partial(call, 200, 136, 64, F16, extra="bias residual")),
    "rows and columns scaled": (NARROW, partial(call, 65, 40, 64, extra="rows columns", **WEIGHT)),
    "two lines of K a stage": (Config(64, 16, 128, 1, 2), partial(call, 67, 40, 200, **WEIGHT)),
    "three stages, snake 1": (
        Config(64, 16, 64, 1, 3, snake=1),
        partial(call, 130, 40, 72, **WEIGHT),
    ),
    "two tiles of rows, the second not whole": (
        SMALL,
        partial(call, 200, 72, 136, extra="bias residual", **WEIGHT),
    ),
    "swiglu": (GATED, partial(call, 130, 72, 64, epilogue="swiglu", **WEIGHT)),
    "swiglu, all": (
        GATED,
        partial(call, 65, 136, 72, F16, extra="bias residual", epilogue="swiglu", **WEIGHT),
    ),
    # forms for few rows; 32, 16 or 8 lanes share a row of the weight of 1024, 384 or 192 numbers
    "vectors, one row": (vectors(4, 256), partial(call, 1, 40, 1024, **WEIGHT)),
    "vectors, a rest of K, residual": (
        vectors(16, 256),
        partial(call, 3, 48, 384, F16, extra="residual", **WEIGHT),
    ),
    "vectors, bias, float32 result": (
        vectors(16, 192),
        partial(call, 2, 32, 192, extra="bias", out_dtype=F32, **WEIGHT),
    ),
    "vectors, swiglu, all": (
        vectors(16, 1024),
        partial(call, 2, 24, 384, extra="bias residual", epilogue="swiglu", **WEIGHT),
    ),
    "split, one row": (split(128, 64), partial(call, 1, 128, 200, **WEIGHT)),
    "split, all": (
        split(64, 128),
        partial(call, 17, 64, 264, F16, extra="bias residual", **WEIGHT),
    ),
    "split, K among three": (
        split(64, 64, cluster=3),
        partial(call, 5, 128, 328, extra="bias residual", **WEIGHT),
    ),
    "split, swiglu, all": (
        split(128, 64, stages=3),
        partial(call, 9, 64, 200, F16, extra="bias residual", epilogue="swiglu", **WEIGHT),
    ),
    "split, swiglu, K among two": (
        split(128, 64, cluster=2),
        partial(call, 64, 64, 136, epilogue="swiglu", **WEIGHT),
    ),
    "fp8, one scale each": (BYTES, partial(call, 3, 72, 144, FP8, extra="one", **WEIGHT)),
    "fp8, all": (
        BYTES,
        partial(call, 65, 72, 144, FP8, extra="rows columns bias residual", **WEIGHT),
    ),
    "fp8, swiglu, float16 result": (
        Config(64, 128, 128, 1, 2),
        partial(call, 65, 72, 144, FP8, extra="one", epilogue="swiglu", out_dtype=F16, **WEIGHT),
    ),
}


@transposed
@pytest.mark.parametrize("name", FORWARD)
def test_forward(name: str):
    config, make = FORWARD[name]
    arrays, keywords = make()
    run = lambda arrays: matmul(**arrays, **keywords, config=config, interpret=True)  # noqa: E731
    assert_right(arrays, keywords, interpreted(run, arrays))


@transposed
def test_forward_fails_where_a_scale_is_left_out():
    """The twin: the check sees a result that is not the one that was asked for."""
    arrays, keywords = call(65, 72, 64, extra="rows", **WEIGHT)
    other = {name: x for name, x in arrays.items() if name != "a_scale"}
    y = interpreted(lambda x: matmul(**x, **keywords, config=NARROW, interpret=True), other)
    with pytest.raises(AssertionError, match="error is"):
        assert_right(arrays, keywords, y)


BACKWARD = {
    "weight, bias, residual": (SMALL, partial(call, 67, 72, 136, extra="bias residual", **WEIGHT)),
    "b as [K, N]": (SMALL, partial(call, 67, 72, 136, F16)),
    "float32 result": (NARROW, partial(call, 3, 40, 72, out_dtype=F32, **WEIGHT)),
    "swiglu": (
        GATED,
        partial(call, 67, 72, 64, epilogue="swiglu", extra="bias residual", **WEIGHT),
    ),
    "scales": (NARROW, partial(call, 5, 40, 64, extra="rows columns", **WEIGHT)),
    "vectors, swiglu": (
        vectors(16, 256),
        partial(call, 2, 24, 384, extra="bias residual", epilogue="swiglu", **WEIGHT),
    ),
    "split": (split(64, 64, cluster=2), partial(call, 9, 64, 136, extra="bias residual", **WEIGHT)),
    "one scale": (NARROW, partial(call, 5, 40, 64, F16, extra="one bias", **WEIGHT)),
}


@transposed
@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name: str):
    config, make = BACKWARD[name]
    arrays, keywords = make()
    m, n = matmul_reference(**arrays, **keywords).shape
    d_out = numbers(9, (m, n), plain_dtype(arrays, keywords))

    def run(arrays: dict[str, jax.Array], d_out: jax.Array) -> Any:
        call = lambda arrays: matmul(**arrays, **keywords, config=config, interpret=True)  # noqa: E731
        return jax.vjp(call, arrays)[1](d_out)[0]

    ours = interpreted(run, arrays, d_out)
    keywords = {k: v for k, v in keywords.items() if k != "out_dtype"}
    exact = {name: np.asarray(x).astype(np.float64) for name, x in arrays.items()}
    truth = oracles.matmul(**exact, **keywords, d_out=np.asarray(d_out).astype(np.float64))
    dtype = arrays["a"].dtype
    plain = oracles.matmul(
        **{name: np.asarray(x) for name, x in arrays.items()},
        **keywords,
        d_out=np.asarray(d_out),
        dtype=dtype,
    )
    assert ours.keys() == truth.keys() == arrays.keys()
    for name, x in arrays.items():
        assert (ours[name].dtype, ours[name].shape) == (x.dtype, x.shape), name
        assert_as_accurate(ours[name], plain[name], truth[name])


@transposed
@pytest.mark.slow
def test_backward_of_fp8_is_bfloat16_and_saturates():
    arrays, keywords = call(3, 40, 144, FP8, extra="one", **WEIGHT)

    def run(arrays: dict[str, jax.Array], size: jax.Array) -> Any:
        call = lambda arrays: matmul(**arrays, **keywords, interpret=True)  # noqa: E731
        y, pull = jax.vjp(call, arrays)
        return pull(jnp.full(y.shape, size, y.dtype))[0]

    ours = interpreted(run, arrays, jnp.bfloat16(1))
    exact = {name: np.asarray(x).astype(np.float64) for name, x in arrays.items()}
    truth = oracles.matmul(**exact, **keywords, d_out=np.ones((3, 40)))
    for name in ("a", "b"):
        assert ours[name].dtype == FP8
        rounded = np.asarray(jnp.asarray(truth[name], F32).astype(BF16).astype(FP8)).astype(float)
        # the same number, or its neighbour: e4m3 has three bits behind the point
        np.testing.assert_allclose(np.asarray(ours[name]).astype(float), rounded, rtol=2**-3)
    large = interpreted(run, arrays, jnp.bfloat16(1e4))
    assert np.asarray(abs(large["a"])).astype(float).max() == 448


@transposed
def test_leading_dimensions_and_batches():
    a, b = numbers(0, (2, 3, 5, 72), BF16), numbers(1, (40, 72), BF16)
    y = interpreted(
        lambda a, b: matmul(a, b, transpose_b=True, config=NARROW, interpret=True), a, b
    )
    assert y.shape == (2, 3, 5, 40)
    exact = [np.asarray(x).astype(np.float64) for x in (a, b)]
    plain = matmul_reference(a, b, transpose_b=True)
    assert_as_accurate(y, plain, oracles.matmul(*exact, transpose_b=True))

    many, over = numbers(2, (2, 3, 40, 72), BF16), numbers(3, (2, 3, 5, 40), BF16)
    run = lambda a, b, r: matmul(  # noqa: E731
        a, b, transpose_b=True, residual=r, config=NARROW, interpret=True
    )
    y = interpreted(run, a, many, over)
    exact = [np.asarray(x).astype(np.float64) for x in (a, many, over)]
    truth = oracles.matmul(*exact[:2], transpose_b=True, residual=exact[2])
    assert_as_accurate(y, matmul_reference(a, many, transpose_b=True, residual=over), truth)


def legal_configs() -> list[Config]:
    """Each value that a field may have, and no tile larger than the interpreter bears."""
    configs = [Config(64, n, 64, 1, 2) for n in (16, 192, 256)]
    configs += [Config(256, 64, 64, 2, 2), Config(128, 64, 64, 1, 4, snake=3)]
    return [*configs, Config(128, 64, 192, 2, 2)]


@transposed
@pytest.mark.parametrize("config", legal_configs(), ids=str)
def test_every_config_gives_the_same(config: Config):
    arrays, keywords = call(130, 72, 136, extra="bias", **WEIGHT)
    run = lambda arrays, c: matmul(**arrays, **keywords, config=c, interpret=True)  # noqa: E731
    one = interpreted(lambda arrays: run(arrays, config), arrays)
    other = interpreted(lambda arrays: run(arrays, SMALL), arrays)
    np.testing.assert_array_equal(
        np.asarray(one).view(np.uint16), np.asarray(other).view(np.uint16)
    )


def shape(*sizes: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


A, B, W = shape(3, 64), shape(64, 32), shape(32, 64)
INTEGERS = shape(3, 64, dtype=I8), shape(32, 64, dtype=I8)
BYTES8 = shape(3, 64, dtype=FP8), shape(32, 64, dtype=FP8)
ONE = shape(dtype=F32)
BLOCKS = {"a_scale": shape(3, 1, dtype=F32), "b_scale": shape(1, 1, dtype=F32)}


@pytest.mark.parametrize(
    ("a", "b", "keywords", "sentence"),
    [
        (shape(64), B, {}, "need two dimensions"),
        (A, W, {}, r"a \[3, 64\] is \[.., M, K\], which b \[32, 64\] as \[.., K, N\] does not fit"),
        (A, B, WEIGHT, r"as \[.., N, K\] does not fit"),
        (shape(2, 3, 64), shape(5, 64, 32), {}, "does not fit"),
        (shape(3, 64, dtype=I8), B, {}, "a is int8 and b is bfloat16; they must agree"),
        (A, shape(64, 32, dtype=jnp.int32), {}, "b is int32; it must be floating point or int8"),
        (A, shape(64, 32, dtype=F16), {}, "a is bfloat16 and b is float16; they must agree"),
        (A, B, {"out_dtype": jnp.int32}, "out_dtype int32 is not bfloat16, float16 or float32"),
        (A, B, {"out_dtype": I8}, "a result in int8 needs out_scale"),
        (A, B, {"out_scale": ONE}, "out_scale is for int8 or float8_e4m3fn, not for bfloat16"),
        (
            A,
            B,
            {"out_dtype": I8, "out_scale": ONE, "residual": shape(3, 32)},
            "a result in int8 takes no residual",
        ),
        (
            A,
            B,
            {"out_dtype": FP8, "out_scale": shape(31, dtype=F32)},
            r"out_scale \[31\] is neither one number nor \[32\]",
        ),
        (*INTEGERS, {**WEIGHT, "b_scale": ONE}, "b_scale and int32 sums do not go together"),
        (*INTEGERS, {**WEIGHT, "epilogue": "gelu"}, "epilogue and int32 sums do not go together"),
        (
            *INTEGERS,
            {**WEIGHT, **BLOCKS, "out_dtype": F32},
            r"no scales of blocks: .* of float8_e4m3fn",
        ),
        (*BYTES8, {**WEIGHT, "a_scale": BLOCKS["a_scale"]}, r"a_scale \[3, 1\] and b_scale None"),
        (
            *BYTES8,
            {**WEIGHT, **BLOCKS, "b_scale": shape(2, 1, dtype=F32)},
            r"b_scale \[2, 1\] are no scales of blocks: these are \[3, 1\] and \[1, 1\]",
        ),
        (A, B, {"epilogue": "relu"}, "no epilogue is named 'relu'; there are 'swiglu', 'gelu', "),
        (A, shape(64, 33), {"epilogue": "swiglu"}, "gate and up columns, but N = 33 is odd"),
        (A, B, {"bias": shape(31)}, r"bias \[31\] is not \[N\] = \[32\]"),
        (A, B, {"bias": shape(32, dtype=jnp.int32)}, "bias is int32"),
        (A, B, {"residual": shape(3, 31)}, r"residual is bfloat16\[3, 31\], but the result is"),
        (A, B, {"residual": shape(3, 32, dtype=F32)}, "residual is float32"),
        (
            A,
            B,
            {"epilogue": "swiglu", "residual": shape(3, 32)},
            r"the result is bfloat16\[3, 16\]",
        ),
        (A, B, {"a_scale": shape(4, dtype=F32)}, r"a_scale \[4\] is neither one number nor \[3\]"),
        (A, B, {"b_scale": shape(3, dtype=F32)}, r"b_scale \[3\] is neither one number nor \[32\]"),
    ],
)
def test_wrong_calls(a: Any, b: Any, keywords: dict[str, Any], sentence: str):
    arrays = {name: x for name, x in keywords.items() if isinstance(x, jax.ShapeDtypeStruct)}
    rest = {name: x for name, x in keywords.items() if name not in arrays}
    with pytest.raises(ValueError, match=f"^matmul: .*{sentence}"):
        jax.eval_shape(lambda a, b, arrays: matmul(a, b, **arrays, **rest), a, b, arrays)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (Config(consumers=3), "consumers must be 1 or 2"),
        (Config(tile_m=96), "tile_m must be 64, 128 or 256"),
        (Config(tile_m=64), "a consumer takes 64 rows at least"),
        (Config(tile_n=260), "tile_n must be a multiple of 64, 256 at most"),
        (Config(tile_k=96), "tile_k must be a multiple of 64"),
        (Config(256, 256), "a consumer can hold 64 x 256 sums"),
        (Config(stages=1), "stages must be 2 at least"),
        (Config(snake=0), "snake 1"),
        (Config(cluster=2), "cluster must be 1: it is for 'split'"),
        (Config(stages=5), "takes [0-9]+ of 232448 bytes on chip"),
        (Config(form="rows"), "form must be one of tiles, vectors, split"),
        (vectors(8, 64), "tile_n must divide N and be a multiple of 16"),
        (vectors(48, 64), "tile_n must divide N and be a multiple of 16"),
        (vectors(16, 0), "tile_k must be 1 at least"),
        (split(32, 64), "tile_n must divide N and be a multiple of 64, 256 at most"),
    ],
)
def test_wrong_configs(config: Config, sentence: str):
    run = lambda a, b: matmul(a, b, transpose_b=True, config=config, interpret=True)  # noqa: E731
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(run, A, W)


@pytest.mark.parametrize(
    ("config", "a", "b", "keywords", "sentence"),
    [
        (vectors(16, 64), (5, 64), (32, 64), {}, "takes 4 rows of a at most"),
        (vectors(16, 64), (1, 72), (32, 72), {}, "K must be a multiple of 64"),
        (split(64, 64), (65, 64), (64, 64), {}, "takes 64 rows of a at most"),
        (split(64, 96), (1, 64), (64, 64), {}, "tile_k must be a multiple of 64"),
        (split(64, 64, 1), (1, 64), (64, 64), {}, "stages must be 2 at least"),
        (split(64, 64, 2, 9), (1, 640), (64, 640), {}, "cluster must be 1 to 8"),
        (split(64, 64, 2, 2), (1, 64), (64, 64), {}, "have no step of K each"),
        (split(64, 64), (1, 64), (64, 64), {"out_dtype": F32}, "the result must have 16 bits"),
        (split(64, 64, 40), (1, 64), (64, 64), {}, "takes [0-9]+ of 232448 bytes on chip"),
        (split(64, 64), (1, 64), (64, 64), {"epilogue": "swiglu"}, "a multiple of 128, 256 at"),
        (split(64, 64), (1, 64), (64, 64), {"a_scale": jnp.float32(2)}, "'split' takes one weight"),
        (split(64, 64), (1, 64), (64, 64), {"epilogue": "gelu"}, "no scales and no GELU"),
        (split(64, 64), (2, 1, 64), (2, 64, 64), {}, "'split' takes one weight"),
        (vectors(16, 64), (1, 64), (64, 64), {"transpose_b": False}, "'vectors' takes one weight"),
    ],
)
def test_wrong_configs_for_few_rows(
    config: Config, a: Any, b: Any, keywords: dict[str, Any], sentence: str
):
    run = lambda a, b: matmul(a, b, **{**WEIGHT, **keywords}, config=config, interpret=True)  # noqa: E731
    with pytest.raises(ValueError, match=f"^matmul: .*{sentence}"):
        jax.eval_shape(run, shape(*a), shape(*b))


def test_wrong_configs_of_other_operands():
    gated = {"transpose_b": True, "epilogue": "swiglu"}
    for b, keywords, columns in ((B, {}, 64), (W, gated, 128)):
        run = lambda a, b, kw=keywords: matmul(a, b, **kw, config=NARROW, interpret=True)  # noqa: E731
        with pytest.raises(ValueError, match=f"tile_n must be a multiple of {columns}"):
            jax.eval_shape(run, A, b)


@pytest.mark.parametrize(
    ("a", "b", "keywords", "device", "phrase"),
    [
        (A, W, WEIGHT, H200, None),
        (A, B, {}, H200, None),
        (A, W, WEIGHT, device_lib.INTERPRETED, None),
        (A, W, WEIGHT, device_lib.Device("cpu", "cpu"), "needs an NVIDIA GPU, found cpu"),
        (A, W, WEIGHT, device_lib.Device("gpu", "NVIDIA A100", 8.0), "needs a Hopper GPU"),
        (A, W, WEIGHT, device_lib.Device("gpu", "NVIDIA B200", 10.0), "needs a Hopper GPU"),
        (shape(3, 64, dtype=F32), shape(32, 64, dtype=F32), WEIGHT, H200, "round float32 to 10"),
        (
            shape(3, 64, dtype=jnp.float8_e5m2),
            shape(32, 64, dtype=jnp.float8_e5m2),
            WEIGHT,
            H200,
            "takes bfloat16, float16, float8_e4m3fn or int8, got float8_e5m2",
        ),
        (
            shape(3, 64, dtype=FP8),
            shape(64, 32, dtype=FP8),
            {},
            H200,
            "float8_e4m3fn tensor cores want K innermost",
        ),
        (
            A,
            shape(64, 80),
            {"epilogue": "swiglu"},
            H200,
            "takes gate and up as rows of a weight",
        ),
        (
            shape(2, 3, 64),
            shape(2, 32, 64),
            {**WEIGHT, "a_scale": shape(dtype=F32)},
            H200,
            "takes scales for one b only",
        ),
        (*INTEGERS, WEIGHT, H200, None),
        (*BYTES8, {**WEIGHT, **BLOCKS}, H200, None),
        (INTEGERS[0], shape(64, 32, dtype=I8), {}, H200, "int8 tensor cores want K innermost"),
        (
            shape(2, 3, 64),
            shape(2, 32, 64),
            {**WEIGHT, "out_dtype": FP8, "out_scale": ONE},
            H200,
            "takes scales for one b only",
        ),
        (
            BYTES8[0],
            shape(96, 64, dtype=FP8),
            {**WEIGHT, **BLOCKS, "epilogue": "swiglu"},
            H200,
            "up begins within 64 columns that share a scale: F = 48",
        ),
        (
            A,
            shape(24, 64),
            {**WEIGHT, "out_dtype": I8, "out_scale": ONE},
            H200,
            "rows along N of 24 bytes are no multiple of 16",
        ),
        (shape(0, 64), W, WEIGHT, H200, "nothing to multiply"),
        (
            shape(3, 60),
            shape(32, 60),
            WEIGHT,
            H200,
            "rows along K of 120 bytes are no multiple of 16",
        ),
        (A, shape(36, 64), WEIGHT, H200, "rows along N of 72 bytes are no multiple of 16"),
        (
            A,
            shape(24, 64),
            {**WEIGHT, "epilogue": "swiglu"},
            H200,
            "rows along N of 24 bytes are no multiple of 16",
        ),
    ],
)
def test_why_not(a: Any, b: Any, keywords: dict[str, Any], device: Any, phrase: str | None):
    reason = why_not(a, b, **keywords, device=device)
    assert reason is None if phrase is None else phrase in str(reason)


def test_large_products_with_block_scales_have_tiles_of_256_columns():
    a, b = (jax.ShapeDtypeStruct((size, 4096), FP8) for size in (8192, 4096))
    a_scale, b_scale = (jax.ShapeDtypeStruct((size, 32), F32) for size in (8192, 32))
    config = default_config(a, b, transpose_b=True, a_scale=a_scale, b_scale=b_scale, device=H200)
    assert (config.tile_m, config.tile_n, config.tile_k, config.stages) == (128, 256, 128, 4)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu_the_call_says_so():
    with pytest.raises(NotImplementedError, match="^matmul: cannot run this call: needs an NVIDIA"):
        matmul(numbers(0, (3, 64), BF16), numbers(1, (64, 32), BF16))


SIZES = [(1, 16, 64), (64, 28672, 4096), (65, 896, 896), (8192, 28672, 4096)]


@pytest.mark.parametrize(
    ("config", "keywords", "sentence"),
    [
        (Config(64, 16, 128, 1), {"out_dtype": I8, "out_scale": ONE}, "tile_n must be 32 at least"),
        (Config(128, 192, 128), BLOCKS, "for scales of blocks"),
        (Config(128, 128, 256), BLOCKS, "for scales of blocks"),
        (Config(128, 128, 128, consumers=1), BLOCKS, "for scales of blocks"),
    ],
)
def test_wrong_configs_of_bytes(config: Config, keywords: dict[str, Any], sentence: str):
    arrays = {name: x for name, x in keywords.items() if name != "out_dtype"}
    rest = {**WEIGHT, "out_dtype": keywords.get("out_dtype")}
    run = lambda a, b, x: matmul(a, b, **x, **rest, config=config, interpret=True)  # noqa: E731
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(run, *BYTES8, arrays)


@pytest.mark.parametrize(
    ("dtype", "transpose_b", "epilogue"),
    [
        *((dtype, True, how) for dtype in (BF16, FP8, I8) for how in (None, "swiglu", "gelu")),
        *((BF16, False, how) for how in (None, "gelu")),
    ],
)
def test_configs_that_are_proposed_can_run(dtype: Any, transpose_b: bool, epilogue: str | None):
    for m, n, k in SIZES:
        a = shape(m, k, dtype=dtype)
        b = shape(*((n, k) if transpose_b else (k, n)), dtype=dtype)
        kw: dict[str, Any] = {"transpose_b": transpose_b, "epilogue": epilogue}
        kw["out_dtype"] = BF16
        vectors = {"bias": shape(n), "a_scale": shape(m, dtype=F32), "b_scale": shape(n, dtype=F32)}
        extras: Any = [{}, {"bias": vectors["bias"]} if dtype == BF16 else vectors]
        if dtype == FP8:
            blocks = [(m, -(-k // 128)), (-(-n // 128), -(-k // 128))]
            a_scale, b_scale = (shape(*sizes, dtype=F32) for sizes in blocks)
            extras.append({"a_scale": a_scale, "b_scale": b_scale})
        for extra in extras:
            tried = [default_config(a, b, **kw, **extra, device=H200)]
            tried += candidates(a, b, **kw, **extra, device=H200)
            of_blocks = extra.get("b_scale", ONE).ndim == 2
            assert len(set(tried)) == len(tried) > (0 if of_blocks else 2)
            for config in tried:
                # refused configs raise before a device is asked for
                run = lambda a, b, x, c=config, kw=kw: matmul(a, b, **kw, **x, config=c)  # noqa: E731
                with pytest.raises(NotImplementedError):
                    jax.eval_shape(run, a, b, extra)


def test_bucket():
    assert bucket(shape(5, 64), W, transpose_b=True) == "bfloat16-m8-n32-k64-nk-bfloat16"
    fp8 = shape(2, 3, 64, dtype=FP8), shape(32, 64, dtype=FP8)
    scales = {"a_scale": shape(2, 3, dtype=F32), "b_scale": shape(32, dtype=F32)}
    key = bucket(*fp8, transpose_b=True, out_dtype=F32, epilogue="swiglu", **scales)
    assert key == "float8_e4m3fn-m8-n32-k64-nk-float32-swiglu-2 vectors-scaled"
    blocks = {"a_scale": shape(2, 3, 1, dtype=F32), "b_scale": shape(1, 1, dtype=F32)}
    key = bucket(*fp8, transpose_b=True, **blocks)
    assert key == "float8_e4m3fn-m8-n32-k64-nk-bfloat16-blocks"
    scales["out_scale"] = shape(32, dtype=F32)
    key = bucket(*INTEGERS, transpose_b=True, out_dtype=I8, epilogue="gelu", **scales)
    assert key == "int8-m4-n32-k64-nk-int8-gelu-3 vectors-scaled"
    many = shape(3, 2, 64), shape(3, 32, 64)
    assert bucket(*many, transpose_b=True) == "bfloat16-m2-n32-k64-nk-bfloat16-batched"
    assert bucket(A, B) == "bfloat16-m4-n32-k64-kn-bfloat16"


ON_DEVICE = {
    "4096 cubed": partial(call, 4096, 4096, 4096, **WEIGHT),
    "a prime of rows, K of 1000": partial(call, 131, 1000, 1000, extra="bias residual", **WEIGHT),
    "b as [K, N]": partial(call, 1000, 4864, 896, F16),
    "one row": partial(call, 1, 4096, 4096, **WEIGHT),
    "decode, vocabulary": partial(call, 2, 151936, 896, out_dtype=F32, **WEIGHT),
    "swiglu": partial(call, 2048, 4864, 896, epilogue="swiglu", extra="bias", **WEIGHT),
    "swiglu, one row": partial(call, 1, 14336, 4096, epilogue="swiglu", **WEIGHT),
    "query, one row": partial(call, 1, 896, 896, extra="bias residual", **WEIGHT),
    "down, two rows": partial(call, 2, 896, 4864, F16, extra="residual", **WEIGHT),
    "down, five rows": partial(call, 5, 896, 4864, extra="bias residual", **WEIGHT),
    "down, 64 rows": partial(call, 64, 4096, 14336, extra="residual", **WEIGHT),
    "swiglu, 16 rows": partial(call, 16, 4864, 896, F16, extra="bias", epilogue="swiglu", **WEIGHT),
    "vocabulary, eight rows": partial(call, 8, 32064, 896, out_dtype=F32, **WEIGHT),
    "few rows, a weight of no whole tiles": partial(call, 7, 1000, 1000, extra="bias", **WEIGHT),
}
FEW_ROWS = {
    **{f"vectors, {m} rows": (vectors(16, 1024), m) for m in (1, 3, 4)},
    **{f"split, cluster {c}": (split(64, 128, 4, c), 13) for c in (1, 2, 3, 5, 7, 8)},
    "split, 128 rows of the weight": (split(128, 64, 4, 4), 64),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", FEW_ROWS)
def test_forms_for_few_rows_on_the_device(name: str):
    """Blocks of a cluster read each other's sums here alone; the same call gives the same bits."""
    config, m = FEW_ROWS[name]
    arrays, keywords = call(m, 1024, 4992, extra="bias residual", **WEIGHT)
    run = jax.jit(lambda x: matmul(**x, **keywords, config=config))
    assert_right(arrays, keywords, run(arrays))
    np.testing.assert_array_equal(
        np.asarray(run(arrays)).view(np.uint16), np.asarray(run(arrays)).view(np.uint16)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_DEVICE)
def test_forward_on_the_device(name: str):
    arrays, keywords = ON_DEVICE[name]()
    assert_right(arrays, keywords, jax.jit(lambda x: matmul(**x, **keywords))(arrays))


@pytest.mark.gpu
@pytest.mark.parametrize("extra", ["one", "rows columns bias"])
def test_fp8_on_the_device(extra: str):
    """Hopper adds fp8 products with fewer bits than float32 has: at most 2^-8 of the result."""
    arrays, keywords = call(1111, 2048, 4096, FP8, extra=extra, **WEIGHT)
    ours = np.asarray(jax.jit(lambda x: matmul(**x, **keywords))(arrays)).astype(np.float64)
    exact = {name: np.asarray(x).astype(np.float64) for name, x in arrays.items()}
    truth = oracles.matmul(**exact, **keywords)
    assert np.linalg.norm(ours - truth) < 2**-8 * np.linalg.norm(truth)


@pytest.mark.gpu
def test_backward_on_the_device():
    arrays, keywords = call(1021, 896, 4864, extra="bias residual", **WEIGHT)
    d_out = numbers(9, (1021, 896), BF16)
    run = lambda arrays, d_out: jax.vjp(lambda x: matmul(**x, **keywords), arrays)[1](d_out)[0]  # noqa: E731
    ours = jax.jit(run)(arrays, d_out)
    host = {name: np.asarray(x) for name, x in arrays.items()}
    exact = {name: x.astype(np.float64) for name, x in host.items()}
    truth = oracles.matmul(**exact, **keywords, d_out=np.asarray(d_out).astype(np.float64))
    plain = oracles.matmul(**host, **keywords, d_out=np.asarray(d_out), dtype=BF16)
    for name in arrays:
        assert_as_accurate(ours[name], plain[name], truth[name])


def test_what_stands_around_a_product_is_traced_by_every_jax():
    """Where the interpreter cannot run it, at least the kernel is made."""
    a, b = (jax.ShapeDtypeStruct((128, 128), jnp.bfloat16) for _ in range(2))
    row = jax.ShapeDtypeStruct((128,), jnp.float32)
    calls: Any = [({"bias": row, "residual": a}, {}), ({"a_scale": row, "b_scale": row}, {})]
    narrow = jax.ShapeDtypeStruct((128,), jnp.float8_e4m3fn)
    calls += [({"bias": narrow}, {"epilogue": "swiglu", "transpose_b": True})]
    for arrays, keywords in calls:
        run = partial(matmul, **keywords, interpret=True)
        assert jax.eval_shape(run, a, b, **arrays).shape == (128, 64 if keywords else 128)
