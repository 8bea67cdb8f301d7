"""Each implementation of attention is given each argument: it means the same, or is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import H200, absent
from attention_calls import (
    NOTHING,
    SINKS,
    compare,
    ids,
    inputs,
    lengths,
    segments,
)
from kernels import interpreted
from numerics import assert_as_accurate

from jaxllm import aot, ops
from jaxllm.cache import KV_DTYPES, quantize
from jaxllm.ops.attention import ATTENTION, attention

BIG = {"B": 2, "T": 16, "S": 32, "H": 64}  # scale_softmax takes a mask of 16 keys or more
TOKEN = {**BIG, "B": 8, "T": 1}
HELD = lengths(3, 32, 17, 1, 30, 8, 9, 25)
ARGUMENTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "none": (BIG, {}),
    "causal": (BIG, {"causal": False}),
    "scale": (BIG, {"scale": 0.3}),
    "window": (BIG, {"window": 5}),
    "softcap": (BIG, {"softcap": 1.5}),
    "segment ids": (
        BIG,
        segments(ids("1112222333333344", "0000111111112222"), ids("1" * 16 + "2" * 16, "1" * 32)),
    ),
    "kv_lengths": (BIG, {"kv_lengths": lengths(0, 21)}),
    "kv_lengths past the end": (BIG, {"kv_lengths": lengths(17, 40)}),
    "sinks": (BIG, {"sinks": SINKS}),
    "return_weights": (BIG, {"return_weights": True}),
    "a token": (TOKEN, {}),
    "a token, kv_lengths": (TOKEN, {"kv_lengths": HELD, "scale": 0.3}),
    "a token, an empty row": (
        TOKEN,
        {"kv_lengths": lengths(3, 33, 0, 1, 30, 8, 9, 25), "causal": False},
    ),
    "a token, window": (TOKEN, {"kv_lengths": HELD, "window": 5}),
    "a token, softcap": (TOKEN, {"kv_lengths": HELD, "softcap": 1.5}),
    "a token, sinks": (TOKEN, {"kv_lengths": HELD, "sinks": SINKS}),
    "a token, segment ids": (TOKEN, segments(ids(*"12211121"), ids(*["12" * 16, "1" * 32] * 4))),
}
REFUSED = {
    ("cudnn", "softcap"): "has no soft cap",
    ("cudnn", "a token, softcap"): "has no soft cap",
    ("cudnn", "sinks"): "has no sinks",
    ("cudnn", "a token, sinks"): "has no sinks",
    ("cudnn", "return_weights"): "returns no weights: it never has them all",
    ("cudnn", "a token, window"): "takes a mask only for even lengths, got T=1, S=32",
    ("cudnn", "a token, segment ids"): "takes a mask only for even lengths, got T=1, S=32",
    ("unfused", "sinks"): "has no sinks",
    ("unfused", "a token, sinks"): "has no sinks",
    ("pallas", "return_weights"): "returns no weights: it never has them all",
}


# Interpreting a backward pass takes seconds; all that it may meet is in its own tests
PULLED = ("segment ids", "kv_lengths", "sinks", "a token, sinks")
INTERPRETED = [name for name in ATTENTION if name.endswith("-interpret")]


def is_refused(implementation: str, name: str, arrays: list[jax.Array]) -> bool:
    """Whether the implementation cannot take the argument; then it says what it should."""
    phrase = REFUSED.get((implementation.removesuffix("-interpret"), name))
    if phrase is None:
        return False
    sentence = f"attention: '{implementation}' cannot run this call: {phrase}"
    with absent("NVIDIA H200"), pytest.raises(NotImplementedError) as error:
        attention(*arrays[:3], **ARGUMENTS[name][1], implementation=implementation)
    assert str(error.value) == sentence
    return True


def with_argument(implementation: str, name: str, *, gradient: bool = True) -> None:
    sizes, kwargs = ARGUMENTS[name]
    arrays = list(inputs(**sizes, dtype=jnp.bfloat16))
    if is_refused(implementation, name, arrays):
        return
    gradient = gradient and name != "return_weights"
    ours, plain, truth = compare(arrays, kwargs, gradient, implementation)
    if name == "return_weights":
        ours, plain, truth = ours[0], plain[0], truth[0]
    for mine, near, exact in zip(ours, plain, truth, strict=True):
        assert_as_accurate(mine, near, exact)


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("implementation", [*INTERPRETED, "xla"])
def test_each_argument_is_taken_or_refused(implementation, name):
    with_argument(implementation, name, gradient="pallas" not in implementation or name in PULLED)


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.usefixtures("plain_cudnn")
def test_cudnn_takes_or_refuses_each_argument(name):
    sizes, kwargs = ARGUMENTS[name]
    q, k, v, _ = arrays = list(inputs(**sizes, dtype=jnp.bfloat16))
    if is_refused("cudnn", name, arrays):
        return
    call = {**NOTHING, "scale": q.shape[-1] ** -0.5, "causal": True, **kwargs}
    assert ATTENTION["cudnn"].why_not(q, k, v, device=H200, **call) is None
    out = jax.jit(lambda q, k, v: ATTENTION["cudnn"].run(q, k, v, **call))(q, k, v)
    args, sides = [np.asarray(x) for x in (q, k, v)], {}
    for key, value in kwargs.items():
        sides[key] = np.asarray(value) if isinstance(value, jax.Array) else value
    near = oracles.attention(*args, **sides, dtype=jnp.bfloat16)
    assert_as_accurate(out, near, oracles.attention(*args, **sides))


# A chunk, and a token, over the codes of a cache
CODED: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "a chunk": ({**BIG, "S": 64}, {"kv_lengths": lengths(16, 50)}),
    "a chunk, window": ({**BIG, "S": 64}, {"kv_lengths": lengths(17, 64), "window": 9}),
    "a token": ({**TOKEN, "S": 64}, {"kv_lengths": HELD}),
}


def over_codes(implementation: str, name: str, kind: str) -> tuple[Any, Any, Any]:
    """Ours, the plain path over the numbers of the codes in q's dtype, and the truth."""
    sizes, kwargs = CODED[name]
    q, *sides, _ = inputs(**sizes, dtype=jnp.bfloat16)
    (k, k_scale), (v, v_scale) = (quantize(x, KV_DTYPES[kind]) for x in sides)
    scales = {"k_scale": k_scale, "v_scale": v_scale}

    def call(q, k, v, scales):
        return attention(q, k, v, **scales, **kwargs, implementation=implementation)

    arrays = (q, k, v, scales)
    inside = implementation.endswith("-interpret")
    ours = interpreted(call, *arrays) if inside else jax.jit(call)(*arrays)
    numbers = [
        np.asarray(x, np.float64) * np.asarray(scale, np.float64)[..., None]
        for x, scale in ((k, k_scale), (v, v_scale))
    ]
    known = {key: np.asarray(x) if key == "kv_lengths" else x for key, x in kwargs.items()}
    rounded = [x.astype(q.dtype) for x in numbers]
    plain = oracles.attention(np.asarray(q), *rounded, **known, dtype=jnp.bfloat16)
    return ours, plain, oracles.attention(np.asarray(q), *numbers, **known)


@pytest.mark.parametrize("kind", KV_DTYPES)
@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("implementation", [*INTERPRETED, "xla", "auto"])
def test_each_reads_codes_as_the_others_do(implementation, name, kind):
    assert_as_accurate(*over_codes(implementation, name, kind))


def test_the_check_of_codes_can_fail():
    ours, plain, truth = over_codes("xla", "a chunk", "int8")
    with pytest.raises(AssertionError, match="error is"):
        assert_as_accurate(ours * 1.02, plain, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KV_DTYPES)
@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("implementation", ["pallas", "unfused"])
def test_each_reads_codes_as_the_others_do_on_a_gpu(implementation, name, kind):
    assert_as_accurate(*over_codes(implementation, name, kind))


def test_a_token_over_codes_goes_to_our_kernel():
    q = jax.ShapeDtypeStruct((2, 1, 8, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.int8)
    scale = jax.ShapeDtypeStruct((2, 128, 2), jnp.float32)
    scales = {"k_scale": scale, "v_scale": scale}
    chunk = jax.ShapeDtypeStruct((2, 64, 8, 64), jnp.bfloat16)
    narrow = [jax.ShapeDtypeStruct((*x.shape[:3], 8), x.dtype) for x in (q, k)]
    with absent("NVIDIA H200"):
        assert ops.chosen("attention", q, k, k, **scales) == "pallas"
        assert ops.chosen("attention", chunk, k, k, **scales) == "pallas"
        reasons = ops.explain("attention", narrow[0], narrow[1], narrow[1], **scales)
        assert reasons["pallas"] == "head width 8 is not a multiple of 16 up to 256"
        assert reasons["cudnn"] is None
    with absent("cpu", None, platform="cpu"):
        assert ops.chosen("attention", q, k, k, **scales) == "xla"


@pytest.mark.own_errors
def test_codes_that_are_none():
    q, k = jnp.ones((2, 1, 4, 8)), jnp.ones((2, 16, 2, 8), jnp.int8)
    scale = jnp.ones((2, 16, 2))
    for arrays, scales, sentence in (
        ((q, k, k), {}, "k is int8; it must be floating point"),
        ((q, k, k), {"k_scale": scale}, "scales are given for one side; both or neither have them"),
        (
            (q, k, k.astype(jnp.float8_e4m3fn)),
            {"k_scale": scale, "v_scale": scale},
            "k is int8 and v float8_e4m3fn; with scales both must be int8 or float8_e4m3fn",
        ),
        (
            (q, k.astype(jnp.float32), k.astype(jnp.float32)),
            {"k_scale": scale, "v_scale": scale},
            "k is float32 and v float32; with scales both must be int8 or float8_e4m3fn",
        ),
        (
            (q, k, k),
            {"k_scale": scale, "v_scale": scale[..., 0]},
            "v_scale is float32[2, 16]; it must be float32, a number for each key and head: "
            "[2, 16, 2]",
        ),
    ):
        with pytest.raises(ValueError, match="^attention: [^\n]*$") as error:
            attention(*arrays, **scales)
        assert str(error.value) == f"attention: {sentence}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("implementation", ["pallas", "cudnn", "unfused"])
def test_each_argument_is_taken_or_refused_on_a_gpu(implementation, name):
    with_argument(implementation, name, gradient=name in PULLED)


@pytest.mark.aot
@pytest.mark.parametrize("name", ["kv_lengths", "a token, kv_lengths", "a token, segment ids"])
@pytest.mark.parametrize("implementation", ["pallas", "unfused"])
def test_what_is_taken_compiles_for_a_gpu(implementation, name):
    """The interpreter takes copies that the hardware does not."""
    sizes, kwargs = ARGUMENTS[name]
    arrays = inputs(**sizes, dtype=jnp.bfloat16)[:3]
    rest = {k: x for k, x in kwargs.items() if not isinstance(x, jax.Array)}
    sides = {k: x for k, x in kwargs.items() if k not in rest}

    def call(arrays, sides):
        return attention(*arrays, **sides, **rest, implementation=implementation)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (arrays, sides))
    launched = aot.compile_for(call, *shapes).mosaic_launches()
    kernel = "decode_attention" if name == "a token, kv_lengths" else "flash_attention"
    assert list(launched) == [kernel if implementation == "pallas" else "scale_softmax"]


@pytest.mark.aot
@pytest.mark.parametrize("kind", KV_DTYPES)
@pytest.mark.parametrize("name", ["a chunk", "a token"])
def test_codes_compile_for_a_gpu(name, kind):
    sizes, kwargs = CODED[name]
    q, *sides, _ = inputs(**sizes, dtype=jnp.bfloat16)
    (k, k_scale), (v, v_scale) = (quantize(x, KV_DTYPES[kind]) for x in sides)

    def call(q, k, v, k_scale, v_scale, held):
        return attention(q, k, v, k_scale=k_scale, v_scale=v_scale, kv_lengths=held)

    arrays = (q, k, v, k_scale, v_scale, kwargs["kv_lengths"])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    launched = aot.compile_for(call, *shapes).mosaic_launches()
    assert list(launched) == ["decode_attention" if name == "a token" else "flash_attention"]


EVERY = [*ATTENTION, "auto"]


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize(
    ("shapes", "kwargs", "sentence"),
    [
        (((2, 5, 4, 8), (2, 5, 3, 8)), {}, "4 query heads cannot share 3 key heads; N must be a"),
        (((2, 5, 4, 8), (1, 5, 2, 8)), {}, "differ in batch or head width"),
        (((2, 5, 4, 8), (2, 5, 2, 4)), {}, "differ in batch or head width"),
        (((5, 4, 8), (5, 2, 8)), {}, r"are not \[B, T, N, H\] and twice \[B, S, K, H\]"),
        (
            ((2, 5, 4, 8), (2, 5, 2, 8)),
            {"window": 0},
            "window must be a whole number, 1 at least, or None, got 0",
        ),
        (
            ((2, 5, 4, 8), (2, 5, 2, 8)),
            {"window": -3},
            "window must be a whole number, 1 at least, or None, got -3",
        ),
        (((2, 5, 4, 8), (2, 5, 2, 8)), {"window": 2.5}, "must be a whole number, 1 at least, or"),
        (
            ((2, 5, 4, 8), (2, 5, 2, 8)),
            {"softcap": 0.0},
            r"softcap must be positive and finite or None, got 0\.0",
        ),
        (
            ((2, 5, 4, 8), (2, 5, 2, 8)),
            {"q_segment_ids": ids("11111", "11111")},
            "segment ids are given for one side; both sides or neither",
        ),
        (
            ((2, 5, 4, 8), (2, 5, 2, 8)),
            segments(ids("11111", "11111"), ids("1111", "1111")),
            r"kv_segment_ids has shape \(2, 4\), not \(2, 5\)",
        ),
        (
            ((2, 5, 4, 8), (2, 5, 2, 8)),
            segments(jnp.ones((2, 5))),
            "q_segment_ids is float32; it must hold integers",
        ),
        (
            ((2, 5, 4, 8), (2, 5, 2, 8)),
            {"kv_lengths": lengths(1)},
            r"kv_lengths has shape \(1,\), not \(2,\)",
        ),
        (
            ((2, 5, 4, 8), (2, 5, 2, 8)),
            {"kv_lengths": jnp.ones(2)},
            "kv_lengths is float32; it must hold integers",
        ),
        (
            ((2, 5, 4, 8), (2, 5, 2, 8)),
            {"kv_lengths": lengths(5, 6)},
            r"kv_lengths\[1\] is 6; a row has 0 to 5 keys, which the cache has room for",
        ),
        (
            ((2, 5, 4, 8), (2, 5, 2, 8)),
            {"kv_lengths": lengths(-1, 5)},
            r"kv_lengths\[0\] is -1; a row has 0 to 5 keys",
        ),
        (
            ((2, 5, 4, 8), (2, 5, 2, 8)),
            {"sinks": jnp.ones(2)},
            r"sinks is float32\[2\]; it must be float32, one number a query head: \[4\]",
        ),
        (
            ((2, 5, 4, 8), (2, 5, 2, 8)),
            {"sinks": jnp.ones(4, jnp.bfloat16)},
            r"sinks is bfloat16\[4\]; it must be float32",
        ),
    ],
)
@pytest.mark.own_errors
def test_arguments_that_disagree(shapes, kwargs, sentence, implementation):
    q, k = (jnp.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=f"attention: .*{sentence}"):
        attention(q, k, k, **kwargs, implementation=implementation)


@pytest.mark.own_errors
@pytest.mark.parametrize("implementation", EVERY)
def test_keys_and_values_of_different_shapes(implementation):
    q, k, v = jnp.zeros((2, 5, 4, 8)), jnp.zeros((2, 5, 2, 8)), jnp.zeros((2, 6, 2, 8))
    with pytest.raises(ValueError, match=r"k \(2, 5, 2, 8\), v \(2, 6, 2, 8\) are not"):
        attention(q, k, v, implementation=implementation)


@pytest.mark.own_errors
@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize(
    ("scale", "sentence"),
    [
        (float("nan"), "scale is NaN"),
        (np.float32("nan"), "scale is NaN"),
        (np.array([1.0, 2.0]), r"scale has shape \(2,\); it must be a number"),
    ],
)
def test_a_scale_that_is_no_number(scale, sentence, implementation):
    q = jnp.zeros((2, 5, 4, 8))
    with pytest.raises(ValueError, match=f"^attention: {sentence}$"):
        attention(q, q, q, scale=scale, implementation=implementation)


def test_keys_of_another_dtype():
    """As a cache may hold them: the products have the wider one."""
    q, k, v = (
        jax.random.normal(key, (2, 5, 4, 8)) for key in jax.random.split(jax.random.key(0), 3)
    )
    for narrow in (jnp.bfloat16, jnp.float16):
        out = attention(q.astype(narrow), k, v)
        assert out.dtype == narrow
        wide = attention(q.astype(narrow).astype(jnp.float32), k, v)
        np.testing.assert_array_equal(out, wide.astype(narrow))
        with pytest.raises(NotImplementedError, match="takes one dtype, got q"):
            attention(q.astype(narrow), k, v, implementation="pallas-interpret")


@pytest.mark.own_errors
@pytest.mark.parametrize("implementation", EVERY)
def test_integers_are_refused(implementation):
    q, k = jnp.zeros((2, 5, 4, 8)), jnp.zeros((2, 5, 2, 8), jnp.int32)
    with pytest.raises(ValueError, match="attention: v is int32; it must be floating point"):
        attention(q, k.astype(q.dtype), k, implementation=implementation)
