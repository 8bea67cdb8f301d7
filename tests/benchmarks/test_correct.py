"""Right before fast: a wrong kernel is found, and a truth that cannot be had is said."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import correct
from benchmarks.case import Case

X = jax.ShapeDtypeStruct((16, 32), jnp.bfloat16)


def plain(x):
    return x * x


def truth(x):
    return x.astype(np.float64) ** 2


CASE = Case("toy", "16 x 32", (X,), plain, plain, "memory", 2048, truth=truth)


@pytest.fixture
def x():
    return np.asarray(CASE.inputs(jax.random.key(0))[0])


def test_right(x):
    y = np.asarray(plain(jnp.asarray(x)))
    result = correct.check(CASE, [x], y, y)
    assert result["status"] == "right"
    assert result["truth"] == "float64"
    assert 0 < result["error"] < 1e-2
    assert result["error"] == result["plain_error"]


@pytest.mark.parametrize("wrong", [1.05, np.nan, np.inf])
def test_wrong(x, wrong):
    y = np.asarray(plain(jnp.asarray(x)))
    bad = y.copy()
    bad[0, 0] *= wrong
    result = correct.check(CASE, [x], bad, y)
    assert result["status"] == "wrong"
    assert "error is" in result["message"] or "not finite" in result["message"]


def test_without_a_truth_plain_in_float32_is_one(x):
    case = dataclasses.replace(CASE, truth=None)
    y = np.asarray(plain(jnp.asarray(x)))
    result = correct.check(case, [x], y, y)
    assert (result["status"], result["truth"]) == ("right", "plain in float32")
    assert correct.check(case, [x], y * 2, y)["status"] == "wrong"


def test_what_cannot_be_checked_is_not_called_right(x):
    y = np.asarray(plain(jnp.asarray(x)))

    def fails(x):
        raise KeyError("no such oracle")

    result = correct.check(dataclasses.replace(CASE, truth=fails), [x], y, y)
    assert result["status"] == "unchecked"
    assert "KeyError: 'no such oracle'" in result["message"]
    result = correct.check(CASE, [x], (y, y), y)
    assert result["message"] == "ours, plain, truth have 2, 1, 1 results"


def test_every_result_counts(x):
    y = np.asarray(plain(jnp.asarray(x)))
    case = dataclasses.replace(CASE, truth=lambda x: (truth(x), truth(x)))
    assert correct.check(case, [x], (y, y), (y, y))["status"] == "right"
    assert correct.check(case, [x], (y, 2 * y), (y, y))["status"] == "wrong"


def test_results_are_compared_as_a_case_puts_them_together(x):
    y = np.asarray(plain(jnp.asarray(x)))
    more = y * np.asarray(
        1.03, y.dtype
    )  # than twice the error of y, and less than that of y * 1.03
    case = dataclasses.replace(CASE, truth=lambda x: (truth(x), truth(x)))
    assert correct.check(case, [x], (more, y), (y, more))["status"] == "wrong"
    case = dataclasses.replace(case, compared=np.stack)
    assert correct.check(case, [x], (more, y), (y, more))["status"] == "right"
    assert correct.check(case, [x], (more * more, y), (y, more))["status"] == "wrong"


def test_a_sentence_is_one_line():
    assert correct.sentence(ValueError("a\n  b")) == "ValueError: a b"
    assert len(correct.sentence(ValueError("x" * 999))) == 300
