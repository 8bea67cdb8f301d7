"""Cases of matmul: what a host checks of a large product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import rivals
from benchmarks.cases import matmul
from benchmarks.correct import check


@pytest.mark.parametrize(
    ("words", "dtype", "out"),
    [("transposed", "bfloat16", None), ("transposed, scales, gelu", "int8", "int8")],
)
def test_a_wrong_last_row_of_a_large_product_is_found(monkeypatch, words, dtype, out):
    m, n, k = 96, 64, 128
    monkeypatch.setattr(matmul, "MOST_EXACT", 2 * 8 * n * k)
    case = matmul._case(m, n, k, words, dtype, out=out)
    assert case.sample is not None
    arguments = case.inputs(jax.random.key(0))
    ours = jax.jit(case.plain)(*arguments)
    part, some = case.sample(arguments, ours)
    assert some.shape == (8, n)
    assert check(case, *jax.device_get((part, some, some)))["status"] == "right"
    worse = np.asarray(ours).copy()
    worse[-1, 3] += 40
    _, bad = case.sample(arguments, worse)
    found = check(case, *jax.device_get((part, bad, some)))
    assert found["status"] == "wrong", found


@pytest.mark.parametrize("words", ["transposed, backward", "backward"])
def test_a_backward_pass_is_timed_beside_products_of_16_bits(words):
    """As users run it; the reference's cotangent, and so its products, are float32's."""
    case = matmul._case(96, 64, 128, words)
    rival = rivals.of(case)["xla"].run
    equations = jax.make_jaxpr(rival)(*case.arguments).eqns
    products = [x for x in equations if x.primitive.name == "dot_general"]
    assert len(products) >= 2
    assert {v.aval.dtype for x in products for v in x.invars} == {jnp.dtype("bfloat16")}
    arguments = case.inputs(jax.random.key(0))
    ours, plain = jax.jit(rival)(*arguments), jax.jit(case.plain)(*arguments)
    found = check(case, *jax.device_get((arguments, ours, plain)))
    assert found["status"] == "right", found
