"""Attention against float64: what each argument means, in each dtype, and its gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from attention_calls import (
    CASES,
    compare,
    ids,
    inputs,
    lengths,
    segments,
)
from attention_cases import CASES as THEIRS
from kernels import interpreted
from numerics import assert_as_accurate

from jaxllm.ops.attention import attention
from pallas_kernels.decode_attention import decode_attention_reference

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
    """The gradients of q and k are of differences of sums of products of d_out and v, which are
    larger than they are: the softmax's powers of two, which XLA's exp2 on a CPU has to 5 ulps of
    float32, show there first.
    """
    sizes, kwargs = UNFUSED[name]
    *_, v, d_out = inputs(**sizes)
    product = float(jnp.max(jnp.abs(v)) * jnp.max(jnp.abs(d_out)))
    for implementation in ("unfused-interpret", "xla"):
        results = run(sizes, kwargs, implementation=implementation)
        terms = (None, product, product, None)
        for ours, plain, truth, term in zip(*results, terms, strict=True):
            assert ours.dtype == jnp.float32
            assert_as_accurate(ours, plain, truth, largest_term=term)
            with pytest.raises(AssertionError, match="error is"):
                assert_as_accurate(ours * 1.0001, plain, truth, largest_term=term)


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


# Those whose plain path does not take minutes; the kernels' own tests have all of them
SMALL = [name for name, case in THEIRS.items() if case.scores <= 2**20]
LONG = [name for name in SMALL if max(THEIRS[name].T, THEIRS[name].S) >= 512]


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x in LONG else x for x in SMALL]
)
def test_cases_of_other_projects(name):
    """What other projects test with agrees, too.

    Of 512 terms and more, which XLA's products on an AMD EPYC add up one by one, the largest error
    is 4 times that of NumPy's own: there the plain path's do so, too. And where all numbers are
    positive, so that scores grow to 160: jax 0.12's are off by 6.1e-5, NumPy's one by one by
    6.8e-5, jax 0.11's by 2.4e-5.
    """
    case = THEIRS[name]
    arrays = [jnp.asarray(x, case.dtype) for x in case.inputs()]
    one_by_one = name in LONG or case.positive
    results = compare(arrays, case.kwargs, case.gradient, "xla", one_by_one=one_by_one)
    for ours, plain, truth in zip(*results, strict=True):
        assert_as_accurate(ours, plain, truth)
        wrong = ours + 0.05 * (np.abs(truth).max() or 1.0)
        with pytest.raises(AssertionError, match="error is"):
            assert_as_accurate(wrong, plain, truth)


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8])
def test_lengths_may_be_of_integers_that_the_keys_are_too_many_for(dtype):
    """300 keys are -1 or 44 in 8 bits."""
    q, k = jnp.ones((1, 1, 2, 8)), jnp.asarray(np.random.default_rng(0).random((1, 300, 1, 8)))
    k = k.astype(jnp.float32)
    found = attention(q, k, k, kv_lengths=jnp.asarray([100], dtype), implementation="xla")
    wanted = attention(q, k[:, :100], k[:, :100], implementation="xla")
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    found = decode_attention_reference(q, k, k, jnp.asarray([100], dtype))
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_float32_is_the_highest_precision():
    """A GPU would otherwise round operands to 10 bits; a CPU cannot tell, but the program can."""
    q, k, v, _ = inputs()
    program = jax.make_jaxpr(jax.grad(lambda q: jnp.sum(attention(q, k, v))))(q)
    found = [e.params["precision"] for e in program.eqns if e.primitive.name == "dot_general"]
    assert len(found) == 4  # two forward, two backward
    assert set(found) == {(jax.lax.Precision.HIGHEST,) * 2}
