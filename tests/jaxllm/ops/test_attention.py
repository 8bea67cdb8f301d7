"""Attention against float64: each argument, dtype and gradient; and what cuDNN may be asked."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import absent
from attention_cases import CASES as THEIRS
from kernels import interpreted
from numerics import assert_as_accurate

from jaxllm import aot
from jaxllm.ops import explain
from jaxllm.ops.attention import ATTENTION, attention
from pallas_kernels.device import Device

H200 = Device("gpu", "NVIDIA H200", 9.0, 132)
A100 = Device("gpu", "NVIDIA A100", 8.0, 108)


def numbers(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def inputs(B=2, T=5, S=5, N=4, K=2, H=8, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    """q, k, v and a cotangent; scores of a size that makes attention far from uniform."""
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))
    q, k, v, d_out = (numbers(i, *shape, dtype=dtype) for i, shape in enumerate(shapes))
    return q * jnp.asarray(2, dtype), k, v, d_out


def ids(*rows: str) -> jax.Array:
    return jnp.asarray([[int(c) for c in row] for row in rows], jnp.int32)


def lengths(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def segments(q: jax.Array, kv: jax.Array | None = None) -> dict[str, jax.Array]:
    return {"q_segment_ids": q, "kv_segment_ids": q if kv is None else kv}


SINKS = jnp.asarray([0.5, -1.0, 2.0, -jnp.inf], jnp.float32)  # a head: the last has none

# Sizes, then arguments. Every value of an argument meets several of the others.
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "causal": ({}, {}),
    "all see all": ({"N": 3, "K": 3}, {"causal": False}),
    "one head, odd width": ({"N": 1, "K": 1, "H": 5}, {}),
    "one key head for six": ({"N": 6, "K": 1, "T": 3, "S": 3}, {"scale": 0.3}),
    "two heads a key head, prime sizes": ({"N": 6, "K": 3, "T": 7, "S": 7, "H": 3}, {"softcap": 2}),
    "one token": ({"T": 1, "S": 7}, {}),
    "one token over a cache": ({"T": 1, "S": 7}, {"kv_lengths": lengths(3, 7)}),
    "one token, window": ({"T": 1, "S": 7}, {"window": 3, "kv_lengths": lengths(2, 7)}),
    "one token over a full cache": ({"T": 1, "S": 7}, {"kv_lengths": lengths(8, 7), "window": 3}),
    "a chunk behind others": ({"T": 3, "S": 7}, {}),
    "a chunk over a cache": ({"T": 3, "S": 7}, {"kv_lengths": lengths(4, 7), "softcap": 1.5}),
    "a chunk over an empty row": ({"T": 3, "S": 7}, {"kv_lengths": lengths(0, 2), "window": 2}),
    "a padded chunk past the end": ({"T": 3, "S": 7}, {"kv_lengths": lengths(8, 9)}),
    "more queries than keys": ({"T": 7, "S": 4}, {"window": 3}),
    "more queries than keys, not causal": ({"T": 9, "S": 5}, {"window": 6, "causal": False}),
    "one key": ({"T": 4, "S": 1}, {}),
    "window of one": ({}, {"window": 1, "softcap": 3.0}),
    "window": ({"T": 7, "S": 7}, {"window": 3}),
    "window wider than the text": ({}, {"window": 9}),
    "window to both sides": ({"T": 3, "S": 7}, {"window": 2, "causal": False}),
    "lengths, not causal": ({"T": 3, "S": 7}, {"causal": False, "kv_lengths": lengths(2, 6)}),
    "packed": ({"T": 7, "S": 7}, segments(ids("1122223", "0011100"))),
    "packed, window": ({"T": 7, "S": 7}, {**segments(ids("1112222", "1111111")), "window": 2}),
    "packed, not causal": ({}, {**segments(ids("12122", "11222")), "causal": False}),
    "segments that nobody has": ({"T": 2, "S": 4}, segments(ids("31", "22"), ids("1122", "1111"))),
    "sinks": ({}, {"sinks": SINKS}),
    "sinks, window, softcap": ({"T": 3, "S": 7}, {"sinks": SINKS, "window": 2, "softcap": 2.0}),
    "sinks alone": ({"T": 3, "S": 7}, {"sinks": SINKS, "kv_lengths": lengths(0, 2)}),
    "segments and lengths": (
        {"T": 4, "S": 6},
        {**segments(ids("1122", "1111"), ids("111122", "111111")), "kv_lengths": lengths(6, 3)},
    ),
}
# Backward, masks differ only by what the softmax has left
GRADIENTS = (
    "two heads a key head, prime sizes",
    "one token, window",
    "a chunk over a cache",
    "a chunk over an empty row",
    "more queries than keys",
    "packed, window",
    "segments that nobody has",
    "sinks",
    "sinks, window, softcap",
    "sinks alone",
)
BLIND = ("a chunk over an empty row", "segments that nobody has", "more queries than keys")


# The same arguments for the path with a softmax of our own, whose rows have 4 numbers at least and,
# with a mask, 16.
UNFUSED: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "causal": ({"N": 3, "K": 1, "H": 5, "S": 8}, {"scale": 0.3}),
    "all see all, soft cap": ({"S": 8}, {"causal": False, "softcap": 2.0}),
    "one token over a cache": ({"T": 1, "S": 16}, {"kv_lengths": lengths(3, 17), "window": 9}),
    "more queries than keys": ({"T": 7, "S": 4}, {}),
    "a chunk over an empty row": ({"T": 3, "S": 20}, {"kv_lengths": lengths(0, 18)}),
    "window": ({"T": 16, "S": 16}, {"window": 3, "softcap": 1.5}),
    "window to both sides": ({"T": 4, "S": 16}, {"window": 2, "causal": False}),
    "packed": ({"T": 16, "S": 16}, segments(ids("1112222333333344", "0000111111112222"))),
}


def run(
    sizes,
    kwargs,
    dtype: Any = jnp.float32,
    *,
    gradient: bool = True,
    implementation: str = "auto",
):
    """`compare` for numbers of these sizes."""
    return compare(inputs(**sizes, dtype=dtype), kwargs, gradient, implementation)


def compare(arrays, kwargs, gradient: bool, implementation: str):
    """Ours, the plain path and the truth: the result, and the gradients of q, k, v and sinks.

    `arrays` are q, k, v and the cotangent.
    """
    *qkv, d_out = arrays
    dtype = qkv[0].dtype
    # Arrays are traced, as in a model; the rest is part of the program
    sides = {name: jnp.asarray(x) for name, x in kwargs.items() if hasattr(x, "shape")}
    rest = {name: value for name, value in kwargs.items() if name not in sides}
    sinks = [sides.pop("sinks")] if "sinks" in sides else []

    def both(operands, d_out, sides):
        def call(q, k, v, *sinks):
            more = {**sides, **rest, **({"sinks": sinks[0]} if sinks else {})}
            return attention(q, k, v, **more, implementation=implementation)

        if not gradient:
            return (call(*operands),)
        out, pull = jax.vjp(call, *operands)
        return out, *pull(d_out)

    args, operands = (*qkv, *sinks), tuple(np.asarray(x) for x in qkv)
    known = {name: np.asarray(value) for name, value in sides.items()} | rest
    if qkv[0].shape[1] == 1 and "kv_lengths" in known:  # a traced one past the end counts as S
        known["kv_lengths"] = np.minimum(known["kv_lengths"], qkv[1].shape[1])
    if sinks:
        known["sinks"] = np.asarray(sinks[0])
    expected = []
    for kind in (dtype, np.dtype(np.float64)):
        out = oracles.attention(*operands, **known, dtype=kind)
        gradients = ()
        if gradient:
            gradients = oracles.attention(*operands, **known, d_out=np.asarray(d_out), dtype=kind)
        expected.append((out, *gradients))
    if implementation.endswith("-interpret"):
        return interpreted(both, args, d_out, sides), *expected
    return jax.jit(both)(args, d_out, sides), *expected


@pytest.mark.usefixtures("strict_jax")
@pytest.mark.parametrize("name", CASES)
def test_attention_and_its_gradient(name):
    gradient = name in GRADIENTS
    results = run(*CASES[name], gradient=gradient)
    for ours, plain, truth in zip(*results, strict=True):
        assert ours.dtype == jnp.float32
        assert_as_accurate(ours, plain, truth)
    if name in BLIND:  # a query that sees nothing gives zeros, and no gradient
        sizes, kwargs = CASES[name]
        blind = ~oracles.sees((2, sizes["T"], sizes["S"]), causal=True, **kwargs).any(axis=-1)
        assert 0 < blind.sum() < blind.size
        for result in results[0][:2]:  # the result and the gradient of q
            assert np.all(np.asarray(result)[blind] == 0)


@pytest.mark.usefixtures("strict_jax")
@pytest.mark.parametrize("name", UNFUSED)
def test_unfused(name):
    for implementation in ("unfused-interpret", "xla"):
        for ours, plain, truth in zip(
            *run(*UNFUSED[name], implementation=implementation), strict=True
        ):
            assert ours.dtype == jnp.float32
            assert_as_accurate(ours, plain, truth)


@pytest.mark.usefixtures("strict_jax")
@pytest.mark.parametrize("implementation", ["xla", "unfused-interpret"])
@pytest.mark.parametrize("name", ["a chunk over an empty row", "causal"])
def test_returned_weights(name, implementation):
    sizes, kwargs = UNFUSED[name]
    q, k, v, _ = inputs(**sizes, dtype=jnp.bfloat16)

    def both(q, k, v):
        return attention(q, k, v, **kwargs, return_weights=True, implementation=implementation)

    by_itself = attention(q, k, v, **kwargs)
    out, weights = interpreted(both, q, k, v) if "-" in implementation else both(q, k, v)
    sides = {n: np.asarray(x) if isinstance(x, jax.Array) else x for n, x in kwargs.items()}
    args = [np.asarray(x) for x in (q, k, v)]
    near, truth = (
        oracles.attention(*args, **sides, return_weights=True, dtype=dtype)
        for dtype in (jnp.bfloat16, np.float64)
    )
    assert (out.dtype, weights.dtype) == (jnp.bfloat16, jnp.float32)
    for ours, plain, exact in zip((out, weights), near, truth, strict=True):
        assert_as_accurate(ours, plain, exact)
    assert_as_accurate(by_itself, near[0], truth[0])
    blind = ~(truth[1] > 0).any(axis=-1)
    assert np.all(np.asarray(weights)[blind] == 0)


@pytest.mark.usefixtures("strict_jax")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["a chunk over an empty row", "packed"])
def test_half_precision(name, dtype):
    for ours, plain, truth in zip(*run(*CASES[name], dtype), strict=True):
        assert ours.dtype == dtype
        assert_as_accurate(ours, plain, truth)


def test_the_check_can_fail():
    (out, *_), (plain, *_), (truth, *_) = run(*CASES["causal"], gradient=False)
    assert_as_accurate(out, plain, truth)
    for wrong in (
        out.at[0, 0, 0, 0].multiply(1.05),
        run({}, {"window": 4}, gradient=False)[0][0],
        run({}, {"softcap": 1000.0}, gradient=False)[0][0],
        out.astype(jnp.bfloat16),
        out * jnp.nan,
    ):
        with pytest.raises(AssertionError, match=r"error is|not finite"):
            assert_as_accurate(wrong, plain, truth)


# Those that take a second or two; the kernels' own tests have all of them
SMALL = [name for name, case in THEIRS.items() if case.scores <= 2**23]


@pytest.mark.parametrize("name", SMALL)
def test_cases_of_other_projects(name):
    """What other projects test with agrees, too."""
    case = THEIRS[name]
    arrays = [jnp.asarray(x, case.dtype) for x in case.inputs()]
    results = compare(arrays, case.kwargs, case.gradient, "xla")
    for ours, plain, truth in zip(*results, strict=True):
        assert_as_accurate(ours, plain, truth)


NOTHING: dict[str, Any] = {
    **dict.fromkeys(
        ("window", "softcap", "q_segment_ids", "kv_segment_ids", "kv_lengths", "sinks")
    ),
    "return_weights": False,
}


# ------------------------------------------------- each implementation is given each argument

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


@pytest.fixture
def plain_cudnn(monkeypatch):
    """JAX's own plain path stands in for its cuDNN call: the same arguments mean the same there."""
    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *args, implementation, **kwargs: plain(*args, implementation="xla", **kwargs),
    )


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


@pytest.mark.gpu
@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("implementation", ["pallas", "cudnn", "unfused"])
def test_each_argument_is_taken_or_refused_on_a_gpu(implementation, name):
    with_argument(implementation, name, gradient=name in PULLED)


@pytest.mark.skipif(aot.why_not() is not None, reason="nothing here compiles for a GPU")
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


EVERY = [*ATTENTION, "auto"]


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize(
    ("shapes", "kwargs", "sentence"),
    [
        (((2, 5, 4, 8), (2, 5, 3, 8)), {}, "4 query heads cannot share 3 key heads; N must be a"),
        (((2, 5, 4, 8), (1, 5, 2, 8)), {}, "differ in batch or head width"),
        (((2, 5, 4, 8), (2, 5, 2, 4)), {}, "differ in batch or head width"),
        (((5, 4, 8), (5, 2, 8)), {}, r"are not \[B, T, N, H\] and twice \[B, S, K, H\]"),
        (((2, 5, 4, 8), (2, 5, 2, 8)), {"window": 0}, "window must be at least 1 or None, got 0"),
        (((2, 5, 4, 8), (2, 5, 2, 8)), {"window": -3}, "window must be at least 1 or None, got -3"),
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
def test_integers_are_refused(implementation):
    q, k = jnp.zeros((2, 5, 4, 8)), jnp.zeros((2, 5, 2, 8), jnp.int32)
    with pytest.raises(ValueError, match="attention: v is int32; it must be floating point"):
        attention(q, k.astype(q.dtype), k, implementation=implementation)


def test_float32_is_the_highest_precision():
    """A GPU would otherwise round operands to 10 bits; a CPU cannot tell, but the program can."""
    q, k, v, _ = inputs()
    program = jax.make_jaxpr(jax.grad(lambda q: jnp.sum(attention(q, k, v))))(q)
    found = [e.params["precision"] for e in program.eqns if e.primitive.name == "dot_general"]
    assert len(found) == 4  # two forward, two backward
    assert set(found) == {(jax.lax.Precision.HIGHEST,) * 2}


# ------------------------------------------------------------------------------------------- cuDNN


def why_not(
    device: Device = H200, dtype: Any = jnp.bfloat16, T=8, S=8, H=64, name="cudnn", **kwargs: Any
):
    q, k = jax.ShapeDtypeStruct((1, T, 4, H), dtype), jax.ShapeDtypeStruct((1, S, 2, H), dtype)
    call = {"causal": True, "scale": 1.0, **NOTHING, **kwargs}
    return ATTENTION[name].why_not(q, k, k, device=device, **call)


ROW = jax.ShapeDtypeStruct((1,), jnp.int32)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"device": A100, "H": 128},
        {"device": Device("gpu", "NVIDIA B200", 10.0), "H": 256},
        {"dtype": jnp.float16},
        {"T": 7, "S": 7},  # causal without a mask
        {"T": 7, "S": 7, "window": 3},
        {"T": 1, "S": 7, "kv_lengths": ROW},
        {"T": 1, "S": 7, "kv_lengths": ROW, "window": 7},
        {"T": 4, "S": 8, "kv_lengths": ROW, "window": 3},
        {"causal": False},
    ],
)
def test_cudnn_runs(kwargs):
    assert why_not(**kwargs) is None


def test_cudnn_needs_a_gpu():
    assert why_not(device=Device("cpu", "cpu")) == "needs an NVIDIA GPU, found cpu"
    assert why_not(device=Device("tpu", "TPU v5")) == "needs an NVIDIA GPU, found TPU v5"


def test_cudnn_needs_ampere():
    t4 = Device("gpu", "Tesla T4", 7.5)
    assert why_not(device=t4) == "needs compute capability 8.0 or newer, found 7.5 (Tesla T4)"


def test_cudnn_needs_a_known_capability():
    amd = Device("gpu", "AMD Instinct MI300X")
    phrase = "needs compute capability 8.0 or newer, found an unknown one (AMD Instinct MI300X)"
    assert why_not(device=amd) == phrase


def test_cudnn_takes_half_precision():
    assert why_not(dtype=jnp.float32) == "takes bfloat16 or float16, got float32"


def test_cudnn_takes_one_dtype():
    q, k = (jax.ShapeDtypeStruct((1, 8, 2, 64), d) for d in (jnp.bfloat16, jnp.float16))
    phrase = ATTENTION["cudnn"].why_not(q, k, k, device=H200, causal=True, scale=1.0, **NOTHING)
    assert phrase == "takes one dtype, got q bfloat16, k float16, v float16"


@pytest.mark.parametrize(
    ("device", "H", "widest"), [(H200, 60, 256), (H200, 264, 256), (A100, 256, 128)]
)
def test_cudnn_takes_some_head_widths(device, H, widest):
    phrase = f"head width {H} is not a multiple of 8 up to {widest}"
    assert why_not(device=device, H=H) == phrase


def test_cudnn_has_no_soft_cap():
    assert why_not(softcap=50.0) == "has no soft cap"


def test_cudnn_returns_no_weights():
    assert why_not(return_weights=True) == "returns no weights: it never has them all"


def test_who_runs_unfused():
    """What flash attention refuses: float32, odd widths, returned weights, a soft cap."""
    taken: list[dict[str, Any]] = [
        {"dtype": jnp.float32},
        {"H": 60, "return_weights": True},
        {"softcap": 50.0, "T": 1, "S": 16, "kv_lengths": ROW},
    ]
    for kwargs in taken:
        assert why_not(name="unfused", **kwargs) is None
    refused: list[tuple[dict[str, Any], str]] = [
        ({"device": A100}, "needs a Hopper GPU (compute capability 9.0), found 8.0 (NVIDIA A100)"),
        ({"T": 7, "S": 7}, "rows of 28 bytes are no multiple of 16 bytes, which the copy engine"),
        ({"T": 1, "kv_lengths": ROW}, "a mask of rows of 8 bytes is too narrow for the copy engin"),
    ]
    for kwargs, phrase in refused:
        assert (why_not(name="unfused", **kwargs) or "").startswith(f"its scale_softmax: {phrase}")
    assert why_not(name="unfused-interpret", device=A100) is None
    q = jax.ShapeDtypeStruct((1, 8, 4, 64), jnp.float32)
    with absent("NVIDIA H200"):
        small = explain("attention", q, q, q)["unfused"]
        assert small == "no call as small (T=8, S=8) was measured faster than xla"
        q = jax.ShapeDtypeStruct((1, 2048, 4, 64), jnp.float32)
        assert explain("attention", q, q, q)["unfused"] is None


@pytest.mark.parametrize(
    "kwargs",
    [
        {"T": 3, "S": 8, "kv_lengths": ROW},
        {"T": 8, "S": 9},
        {"T": 1, "S": 8, "window": 3, "kv_lengths": ROW},
        {"T": 7, "S": 7, "causal": False, "window": 3},
    ],
)
def test_cudnn_takes_masks_of_even_lengths(kwargs):
    phrase = f"takes a mask only for even lengths, got T={kwargs['T']}, S={kwargs['S']}"
    assert why_not(**kwargs) == phrase


ASKED = (
    "causal",
    "all see all",
    "one token over a cache",
    "one token over a full cache",
    "a chunk behind others",
    "a chunk over an empty row",
    "more queries than keys, not causal",
    "window",
    "packed, window",
)


@pytest.fixture
def asked(monkeypatch):
    """The arguments of the calls to JAX's cuDNN attention, which are answered with zeros."""
    calls = []

    def call(q, k, v, *, implementation, **kwargs):
        assert implementation == "cudnn"
        calls.append(kwargs)
        return jnp.zeros_like(q)

    monkeypatch.setattr(jax.nn, "dot_product_attention", call)
    return calls


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.usefixtures("plain_cudnn")
def test_what_cudnn_is_asked_means_the_same(name):
    sizes, kwargs = {"T": 5, "S": 5, **CASES[name][0]}, {"causal": True, **CASES[name][1]}
    q, k, v, _ = inputs(**sizes, dtype=jnp.bfloat16)
    call = {**NOTHING, "scale": q.shape[-1] ** -0.5, **kwargs}
    out = jax.jit(lambda q, k, v: ATTENTION["cudnn"].run(q, k, v, **call))(q, k, v)
    args, sides = [np.asarray(x) for x in (q, k, v)], {}
    for key, value in kwargs.items():
        sides[key] = np.asarray(value) if isinstance(value, jax.Array) else value
    near = oracles.attention(*args, **sides, dtype=jnp.bfloat16)
    assert_as_accurate(out, near, oracles.attention(*args, **sides))


def test_cudnn_is_asked_for_a_mask_where_its_own_would_mean_another(asked):
    """Its causal mask is aligned to the start: the last query would see the first three keys."""
    q, k, v, _ = inputs(T=3, S=7, dtype=jnp.bfloat16)
    ATTENTION["cudnn"].run(q, k, v, causal=True, scale=1.0, **NOTHING)
    (kwargs,) = asked
    assert not kwargs.get("is_causal", False)
    np.testing.assert_array_equal(kwargs["mask"][0, 0], np.tri(3, 7, 4, bool))


def test_cudnn_is_asked_for_no_key_past_the_cache(asked):
    q, k, v, _ = inputs(T=1, S=7, dtype=jnp.bfloat16)
    call = {**NOTHING, "kv_lengths": lengths(8, 3)}
    ATTENTION["cudnn"].run(q, k, v, causal=True, scale=1.0, **call)
    (kwargs,) = asked
    assert kwargs["key_value_seq_lengths"].tolist() == [7, 3]


def test_a_name_that_cannot_run_says_why():
    q, k, v, _ = inputs()
    with pytest.raises(
        NotImplementedError,
        match="attention: 'cudnn' cannot run this call: needs an NVIDIA GPU, found ",
    ):
        attention(q, k, v, implementation="cudnn")
    with (
        absent("NVIDIA H200"),
        pytest.raises(NotImplementedError, match="takes bfloat16 or float16, got float32"),
    ):
        attention(q, k, v, implementation={"attention": "cudnn"})
