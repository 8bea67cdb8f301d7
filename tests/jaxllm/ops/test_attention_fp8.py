"""Attention over float8 queries, keys and values: each entry means the same, or refuses."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import absent
from attention_calls import SINKS, ids, inputs, lengths, segments
from kernels import interpreted
from numerics import assert_as_accurate

from jaxllm import ops
from jaxllm.ops.attention import attention
from pallas_kernels.attention_fp8 import FP8, attention_fp8_reference
from pallas_kernels.device import why_not_interpreted

BYTES_REFUSED = "takes no queries of float8_e4m3fn"
BIG = {"B": 2, "T": 16, "S": 32, "H": 64}
BYTES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "no scales": (BIG, {}),
    "a number each": (BIG, {"q_scale": 0.5, "k_scale": 3.0, "v_scale": 0.1, "causal": False}),
    "a number a head": (
        BIG,
        {"q_scale": (0.5, 2.0, 1.5, 1.0), "k_scale": (0.3, 0.7), "v_scale": (5.0, 0.01)},
    ),
    "everything": (
        BIG,
        {
            **{"q_scale": 0.5, "k_scale": (2.0, 0.3), "scale": 0.3, "window": 9, "softcap": 3.0},
            **{"sinks": SINKS, "kv_lengths": lengths(11, 32)},
            **segments(
                ids("1112222333333344", "0000111111112222"), ids("1" * 16 + "2" * 16, "1" * 32)
            ),
        },
    ),
    "a token": ({**BIG, "T": 1}, {"q_scale": 0.5, "kv_lengths": lengths(3, 33)}),
}


def bytes_of(name: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Arrays and other arguments of the call; and the numbers that it is about, in float64."""
    sizes, kwargs = BYTES[name]
    q, k, v, _ = inputs(**sizes, dtype=jnp.float8_e4m3fn)
    kwargs = {
        key: jnp.asarray(x, jnp.float32) if key.endswith("_scale") else x
        for key, x in kwargs.items()
    }
    sides = {key: x for key, x in kwargs.items() if isinstance(x, jax.Array)}
    rest = {key: x for key, x in kwargs.items() if key not in sides}
    exact: dict[str, Any] = {key: np.asarray(x) for key, x in sides.items()} | rest
    if "kv_lengths" in exact:
        exact["kv_lengths"] = np.minimum(exact["kv_lengths"], k.shape[1])
    for key, x in (("q", q), ("k", k), ("v", v)):
        scale = np.reshape(np.asarray(exact.pop(f"{key}_scale", 1.0), np.float64), (-1, 1))
        exact[key] = np.asarray(x).astype(np.float64) * scale
    return {"q": q, "k": k, "v": v, **sides}, rest, exact


def over_bytes(implementation: str, name: str) -> tuple[Any, Any, Any]:
    """Ours, the plain path, which rounds the weights to float8 or bfloat16, and the truth."""
    arrays, rest, exact = bytes_of(name)

    def call(arrays):
        return attention(**arrays, **rest, implementation=implementation)

    inside = implementation.endswith("-interpret")
    ours = interpreted(call, arrays) if inside else jax.jit(call)(arrays)
    assert ours.dtype == jnp.bfloat16
    fp8 = {"weights_dtype": FP8 if "pallas" in implementation else jnp.bfloat16}
    return ours, attention_fp8_reference(**arrays, **rest, **fp8), oracles.attention(**exact)


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("implementation", ["pallas-interpret", "xla", "auto"])
def test_each_attends_to_float8(implementation, name):
    assert_as_accurate(*over_bytes(implementation, name))


@pytest.mark.parametrize("name", BYTES)
def test_float8_is_near_what_it_stands_for(name):
    """Without any reference of ours: xla rounds the weights and the result to 8 bits."""
    ours, _, truth = over_bytes("xla", name)
    numbers = bytes_of(name)[2]["v"]
    assert np.max(np.abs(np.asarray(ours, np.float64) - truth)) <= 2**-8 * np.abs(numbers).max()


def test_the_check_of_float8_can_fail():
    ours, plain, truth = over_bytes("xla", "a number a head")
    with pytest.raises(AssertionError, match="error is"):
        assert_as_accurate(ours * 1.02, plain, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BYTES)
def test_each_attends_to_float8_on_a_gpu(name):
    assert_as_accurate(*over_bytes("pallas", name))


def test_who_takes_float8():
    q, k, v, _ = inputs(**BIG, dtype=jnp.float8_e4m3fn)
    with absent("NVIDIA H200"):
        reasons = ops.explain("attention", q, k, v, q_scale=jnp.asarray(2.0))
        assert ops.chosen("attention", q, k, v) == "pallas"
        wide = [jnp.zeros((*x.shape[:3], 256), x.dtype) for x in (q, k, v)]
        assert ops.chosen("attention", *wide) == "xla"
        why = ops.explain("attention", *wide)["pallas"]
        assert why == "values of heads of 256 are summed in the tensor cores' 13 bits over all keys"
    refused = dict.fromkeys(("cudnn", "unfused", "unfused-interpret"), BYTES_REFUSED)
    by_name = why_not_interpreted() or "runs only by name: it is a test, and slow"
    assert reasons == {"pallas": None, "pallas-interpret": by_name, **refused, "xla": None}
    for name in refused:
        with absent("NVIDIA H200"), pytest.raises(NotImplementedError) as error:
            attention(q, k, v, implementation=name)
        assert str(error.value) == f"attention: '{name}' cannot run this call: {BYTES_REFUSED}"


@pytest.mark.own_errors
@pytest.mark.parametrize("implementation", ["auto", "pallas-interpret", "cudnn", "xla"])
def test_scales_that_disagree(implementation):
    q, k, v, _ = inputs(**BIG, dtype=jnp.float8_e4m3fn)
    number, attend = jnp.asarray(1.0), cast(Any, attention)
    for arrays, scales, sentence in (
        (
            (q, k, v),
            {"k_scale": jnp.asarray(0.0)},
            "k_scale is 0.0; a scale must be positive and finite",
        ),
        (
            (q, k, v),
            {"v_scale": jnp.asarray([1, jnp.nan], jnp.float32)},
            "v_scale[1] is nan; a scale must be positive and finite",
        ),
        (
            (q, k, v),
            {"k_scale": jnp.ones((2, 32, 2))},
            "k_scale is float32[2, 32, 2]; it must be float32, one number or one a head: [] or [2]",
        ),
        (
            (q, k.astype(jnp.bfloat16), v),
            {},
            "q is float8_e4m3fn and k is bfloat16; all three or none must be float8_e4m3fn",
        ),
        (
            tuple(x.astype(jnp.bfloat16) for x in (q, k, v)),
            {"q_scale": number},
            "q_scale is given and q is bfloat16; only float8_e4m3fn has scales",
        ),
    ):
        with pytest.raises(ValueError, match="^attention: [^\n]*$") as error:
            attend(*arrays, **scales, implementation=implementation)
        assert str(error.value) == f"attention: {sentence}"


@pytest.mark.parametrize("return_weights", [False, True])
def test_no_query_heads(return_weights):
    """As in other dtypes, whose results are empty too."""
    q, k = jnp.zeros((1, 3, 0, 16), FP8), jnp.zeros((1, 3, 2, 16), FP8)
    scales = {"q_scale": jnp.ones(0), "k_scale": jnp.ones(2), "v_scale": jnp.ones(2)}
    for given in ({}, scales):
        found = attention(q, k, k, **given, return_weights=return_weights)
        out, shape = (found[0], found[1].shape) if return_weights else (found, (1, 0, 3, 3))
        assert (out.shape, out.dtype, shape) == ((1, 3, 0, 16), jnp.bfloat16, (1, 0, 3, 3))


@pytest.mark.own_errors
def test_float8_has_no_gradient():
    q, k, v, _ = inputs(**BIG, dtype=jnp.float8_e4m3fn)
    for implementation in ("pallas-interpret", "xla"):

        def loss(scale, implementation=implementation):
            out = attention(q, k, v, v_scale=scale, implementation=implementation)
            return jnp.sum(out.astype(jnp.float32))

        with pytest.raises(NotImplementedError, match="^attention: float8_e4m3fn has no gradient"):
            jax.grad(loss)(jnp.asarray(1.0))
    beside = lambda x: x * 3 + loss(jax.lax.stop_gradient(x))  # noqa: E731
    assert float(jax.grad(beside)(jnp.asarray(1.0))) == 3
