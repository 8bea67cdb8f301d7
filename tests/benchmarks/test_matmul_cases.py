"""Cases of matmul: what a host checks of a large product."""

import jax
import numpy as np
import pytest

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
