"""Matmul of bytes: int8 bit for bit, float8 with scales of blocks; with what follows its sums.

M is 1, 2, 7, 16, 64 and 300. N and K of real models are odd multiples of 128: in the interpreter 3
of them stand for 7 (896), 19 (4864), 112 (14336) or 1187 (151936); on a GPU they are as they are.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from kernels import interpreted
from numerics import assert_as_accurate

from pallas_kernels import _compat
from pallas_kernels.matmul import Config, matmul, matmul_reference

pytestmark = [
    pytest.mark.usefixtures("strict_jax"),
    pytest.mark.skipif(
        not _compat.INTERPRETS_TRANSPOSED_WGMMA,
        reason="the interpreter of jax 0.10 has no transposed wgmma operand",
    ),
]

BF16, F16, F32, FP8, I8 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn, jnp.int8
ROWS = (1, 2, 7, 16, 64, 300)
WIDE = Config(128, 128, 128, consumers=2, stages=2)
WIDEST = Config(128, 256, 128, consumers=2, stages=2)  # with block scales, in two parts
NARROW = Config(64, 64, 128, consumers=1, stages=2)


def integers(seed: int, *shape: int) -> jax.Array:
    """All of int8, -128 too."""
    return jnp.asarray(np.random.default_rng(seed).integers(-128, 128, shape), I8)


def floats(seed: int, *shape: int, dtype: Any = F32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), F32).astype(dtype)


def positive(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).uniform(0.5, 2, shape), F32)


def of_blocks(m: int, n: int, k: int, extra: str = "", gated: bool = False) -> dict[str, jax.Array]:
    """Arrays of a call with scales of blocks that differ by up to 4; n is the result's width."""
    wide = 2 * n if gated else n
    arrays = {
        "a": floats(0, m, k, dtype=FP8),
        "b": floats(1, wide, k, dtype=FP8),
        "a_scale": positive(2, m, -(-k // 128)),
        "b_scale": positive(3, -(-wide // 128), -(-k // 128)) * k**-0.5,
    }
    if "bias" in extra:
        arrays["bias"] = floats(4, wide, dtype=BF16)
    if "residual" in extra:
        arrays["residual"] = floats(5, m, n, dtype=BF16)
    return arrays


def run(arrays: dict[str, jax.Array], config: Config | None, **keywords: Any) -> jax.Array:
    return interpreted(
        lambda x: matmul(**x, transpose_b=True, config=config, interpret=True, **keywords), arrays
    )


def assert_right(arrays: dict[str, jax.Array], ours: jax.Array, **keywords: Any) -> None:
    exact: Any = {name: np.asarray(x).astype(np.float64) for name, x in arrays.items()}
    epilogue = keywords.get("epilogue")
    truth = oracles.matmul(**exact, transpose_b=True, epilogue=epilogue)
    plain = matmul_reference(**arrays, transpose_b=True, **keywords)
    assert ours.dtype == plain.dtype
    assert_as_accurate(ours, plain, truth)


def exact_sums(a: jax.Array, b: jax.Array) -> np.ndarray:
    return np.asarray(a).astype(np.int64) @ np.asarray(b).astype(np.int64).T


@pytest.mark.parametrize("m", ROWS)
def test_int8_bit_for_bit(m: int):
    a, b = integers(0, m, 384), integers(1, 384, 384)
    y = run({"a": a, "b": b}, Config(64, 256, 128, 1, 2) if m < 65 else WIDE)
    assert y.dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(y), exact_sums(a, b))


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (67, 80, 144, NARROW),  # one past a tile, in all three
        (3, 24, 1008, Config(64, 16, 256, 1, 2)),
        (130, 72, 272, Config(128, 64, 128, 2, 3, snake=1)),
        (200, 72, 144, Config(128, 64, 128, 2, 2)),
        (5, 40, 144, None),
    ],
    ids=str,
)
def test_int8_of_other_tiles(m: int, n: int, k: int, config: Config | None):
    a, b = integers(0, m, k), integers(1, n, k)
    y = run({"a": a, "b": b}, config)
    np.testing.assert_array_equal(np.asarray(y), exact_sums(a, b))


def test_largest_int8_sums_are_exact():
    """float32 would hold 24 of these 25 bits."""
    a = jnp.full((3, 1280), -128, I8).at[0, 0].set(127)
    y = run({"a": a, "b": jnp.full((16, 1280), -128, I8)}, NARROW)
    np.testing.assert_array_equal(
        np.asarray(y)[:, 0], [1279 * 2**14 - 127 * 128, *[1280 * 2**14] * 2]
    )


INT8_FLOATS: Any = {
    "no scales": ({}, {"out_dtype": F32}),
    "one each": (
        {"a_scale": jnp.float32(0.01), "b_scale": jnp.float32(0.003)},
        {"out_dtype": BF16},
    ),
    "rows, columns, bias, residual": (
        {
            "a_scale": positive(2, 67) * 1e-3,
            "b_scale": positive(3, 80) * 1e-3,
            "bias": floats(4, 80, dtype=F16),
            "residual": floats(5, 67, 80, dtype=F16),
        },
        {"out_dtype": F16},
    ),
}


@pytest.mark.parametrize("name", INT8_FLOATS)
def test_int8_to_floats(name: str):
    extra, keywords = INT8_FLOATS[name]
    arrays = {"a": integers(0, 67, 144), "b": integers(1, 80, 144), **extra}
    assert_right(arrays, run(arrays, NARROW, **keywords), **keywords)


def test_int8_swiglu():
    arrays = {
        "a": integers(0, 67, 144),
        "b": integers(1, 144, 144),
        "a_scale": positive(2, 67) * 1e-3,
        "b_scale": positive(3, 144) * 1e-2,
    }
    keywords = {"out_dtype": BF16, "epilogue": "swiglu"}
    assert_right(arrays, run(arrays, WIDE, **keywords), **keywords)


def test_what_follows_an_int8_product_has_a_gradient():
    arrays = {
        "a_scale": positive(2, 5) * 1e-3,
        "b_scale": positive(3, 40) * 1e-2,
        "bias": floats(4, 40, dtype=F32),
    }
    a, b, d_out = integers(0, 5, 144), integers(1, 40, 144), floats(6, 5, 40)
    keywords: Any = {"transpose_b": True, "out_dtype": F32, "epilogue": "gelu"}

    def pull(arrays: dict[str, jax.Array], d_out: jax.Array) -> Any:
        call = lambda x: matmul(a, b, **x, **keywords, config=NARROW, interpret=True)  # noqa: E731
        return jax.vjp(call, arrays)[1](d_out)[0]

    ours = interpreted(pull, arrays, d_out)
    call = lambda x: matmul_reference(a, b, **x, **keywords)  # noqa: E731
    plain = jax.vjp(call, arrays)[1](d_out)[0]
    exact: Any = {name: np.asarray(x).astype(np.float64) for name, x in arrays.items()}
    wide: Any = [np.asarray(x).astype(np.float64) for x in (a, b)]
    truth = oracles.matmul(
        *wide, **exact, transpose_b=True, epilogue="gelu", d_out=np.asarray(d_out, np.float64)
    )
    for name in arrays:
        assert_as_accurate(ours[name], plain[name], truth[name])


@pytest.mark.parametrize("m", ROWS)
def test_blocks(m: int):
    arrays = of_blocks(m, 384, 384)
    assert_right(arrays, run(arrays, WIDE if m > 64 else NARROW, out_dtype=F32), out_dtype=F32)


BLOCKS: Any = {
    "a rest of N and of K": ((67, 160, 272), {}, WIDE, ""),
    "16 columns, a rest of K": ((3, 24, 272), {}, Config(64, 16, 128, 1, 3), ""),
    "bias, residual": ((67, 160, 144), {}, NARROW, "bias residual"),
    "two tiles of rows": ((200, 136, 272), {}, Config(128, 64, 128, 2, 2), ""),
    "swiglu": ((67, 128, 272), {"epilogue": "swiglu"}, WIDE, "bias"),
    "256 columns of a tile, some beyond N": ((200, 320, 400), {}, WIDEST, "residual"),
    "swiglu, 256 columns": ((67, 256, 272), {"epilogue": "swiglu"}, WIDEST, ""),
    "swiglu, 256 columns, up begins within a block": (
        (67, 192, 144),
        {"epilogue": "swiglu"},
        WIDEST,
        "bias",
    ),
    "swiglu, gate and up in one block": ((5, 64, 272), {"epilogue": "swiglu"}, None, ""),
    "gelu, the default tile": ((130, 72, 144), {"epilogue": "gelu"}, None, "bias"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_and_what_follows(name: str):
    sizes, keywords, config, extra = BLOCKS[name]
    arrays = of_blocks(*sizes, extra=extra, gated="swiglu" in name)
    assert_right(arrays, run(arrays, config, **keywords), **keywords)


def test_blocks_of_several_leading_dimensions():
    arrays = of_blocks(6, 40, 272)
    y = run(
        {
            **arrays,
            "a": arrays["a"].reshape(2, 3, 272),
            "a_scale": arrays["a_scale"].reshape(2, 3, 3),
        },
        NARROW,
    )
    assert y.shape == (2, 3, 40)
    assert_right(arrays, y.reshape(6, 40))


@pytest.mark.parametrize("name", ["a_scale", "b_scale"])
def test_the_check_sees_a_scale_of_another_block(name: str):
    arrays = of_blocks(67, 160, 272)
    y = run({**arrays, name: jnp.roll(arrays[name], 1, axis=-1)}, WIDE)
    with pytest.raises(AssertionError, match="error is"):
        assert_right(arrays, y)


def test_the_gradient_with_blocks_is_the_references():
    arrays = of_blocks(5, 40, 272, "bias")
    d_out = floats(9, 5, 40, dtype=BF16)

    def pull(arrays: dict[str, jax.Array], d_out: jax.Array) -> Any:
        call = lambda x: matmul(**x, transpose_b=True, config=NARROW, interpret=True)  # noqa: E731
        return jax.vjp(call, arrays)[1](d_out)[0]

    ours = interpreted(pull, arrays, d_out)
    exact: Any = {name: np.asarray(x).astype(np.float64) for name, x in arrays.items()}
    truth = oracles.matmul(**exact, transpose_b=True, d_out=np.asarray(d_out).astype(np.float64))
    assert ours.keys() == arrays.keys()
    for name, x in arrays.items():
        assert (ours[name].dtype, ours[name].shape) == (x.dtype, x.shape), name
        # rounded once from float32: by half a unit of the last of 3, 7 or 23 bits
        bits = jnp.finfo(x.dtype).nmant
        scale = np.abs(truth[name]).max()
        error = np.abs(np.asarray(ours[name]).astype(np.float64) - truth[name])
        assert error.max() <= 2.0 ** -(bits + 1) * scale + 1e-5 * scale, name
    large = interpreted(pull, arrays, jnp.full((5, 40), 1e4, BF16))
    assert np.asarray(abs(large["a"])).astype(float).max() == 448


MODELS = (  # N x K: Qwen2.5-0.5B, Llama-3.1-8B, Phi-3-mini, a vocabulary
    *((4864, 896), (896, 4864), (14336, 4096), (4096, 14336)),
    *((9216, 3072), (3072, 8192), (151936, 896)),
)


@pytest.mark.gpu
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("sizes", MODELS, ids=str)
def test_int8_on_the_device(m: int, sizes: tuple[int, int]):
    n, k = sizes
    a, b = integers(0, m, k), integers(1, n, k)
    y = np.asarray(jax.jit(lambda a, b: matmul(a, b, transpose_b=True))(a, b))
    some = np.unique(np.linspace(0, m - 1, 9).astype(int))
    exact = np.asarray(a)[some].astype(np.float64) @ np.asarray(b).astype(np.float64).T
    np.testing.assert_array_equal(y[some], exact)


@pytest.mark.gpu
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("sizes", MODELS, ids=str)
def test_blocks_on_the_device(m: int, sizes: tuple[int, int]):
    """Hopper adds fp8 products with fewer bits than float32 has, here 128 of them at most."""
    arrays = of_blocks(m, *sizes)
    y = jax.jit(lambda x: matmul(**x, transpose_b=True, out_dtype=F32))(arrays)
    some = np.unique(np.linspace(0, m - 1, 9).astype(int))
    exact: Any = {name: np.asarray(x).astype(np.float64) for name, x in arrays.items()}
    exact |= {"a": exact["a"][some], "a_scale": exact["a_scale"][some]}
    truth = oracles.matmul(**exact, transpose_b=True)
    ours = np.asarray(y).astype(np.float64)[some]
    assert np.linalg.norm(ours - truth) < 2**-8 * np.linalg.norm(truth)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, WIDEST], ids=str)
@pytest.mark.parametrize(
    ("n", "epilogue"),
    [(4864, None), (4864, "swiglu"), (4864, "gelu"), (896, "gelu_pytorch_tanh"), (960, "swiglu")],
)
def test_what_follows_blocks_on_the_device(n: int, epilogue: str | None, config: Config | None):
    """Of 896 columns the last tile of 256 has half, and of 960 up begins within a block."""
    arrays = of_blocks(1111, n, 896, "bias residual", gated=epilogue == "swiglu")
    keywords: Any = {"transpose_b": True, "epilogue": epilogue}
    y = jax.jit(lambda x: matmul(**x, **keywords, config=config))(arrays)
    exact: Any = {name: np.asarray(x).astype(np.float64) for name, x in arrays.items()}
    truth = oracles.matmul(**exact, **keywords)
    ours = np.asarray(y).astype(np.float64)
    assert np.linalg.norm(ours - truth) < 2**-7 * np.linalg.norm(truth)
