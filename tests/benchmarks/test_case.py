"""Cases: what is refused, what is found, and that those of the project can be made."""

import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks import cases
from benchmarks.case import Case
from benchmarks.correct import check
from pallas_kernels.measure import size_bytes

X = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)


def case(**changes):
    fields = {"op": "toy", "label": "4 x 8", "arguments": (X,), "run": abs, "plain": abs}
    return Case(**{**fields, "kind": "memory", "bytes": 128, **changes})


def test_inputs_are_normal_numbers_and_differ_by_key():
    a, b = (case().inputs(jax.random.key(i))[0] for i in range(2))
    assert a.shape == X.shape
    assert a.dtype == X.dtype
    assert bool(jnp.all(a != 0))
    assert not bool(jnp.all(a == b))


def test_make_makes_what_is_not_normal():
    ids = jax.ShapeDtypeStruct((3,), jnp.int32)
    with pytest.raises(ValueError, match="random numbers do not fit dtype int32; give the case a"):
        case(arguments=(ids,)).inputs(jax.random.key(0))
    made = case(arguments=(ids,), make=lambda key: (jnp.arange(3),)).inputs(jax.random.key(0))
    assert made[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kind": "fast"}, "kind 'fast' is not one of memory, .*, memory-read, matmul, launch"),
        ({"bytes": 0}, "moves 0 bytes"),
    ],
)
def test_a_case_that_cannot_be(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        case(**changes)


def test_size_bytes():
    assert size_bytes(X, (X, {"a": jax.ShapeDtypeStruct((3,), jnp.int8)})) == 131


def test_a_name_that_no_case_has():
    with pytest.raises(ValueError, match="no case is named sundial; there are"):
        cases.all_cases(("sundial",))


@pytest.mark.slow
def test_the_cases_of_the_project():
    """Shapes alone: what they compute is for the tests of the kernels."""
    found = cases.all_cases()
    names = [case.name for case in found]
    assert len(set(names)) == len(names), "two cases have one name"
    for case in found:
        out = jax.eval_shape(case.plain, *case.arguments)
        if case.truth is None:
            jax.eval_shape(case.plain, *map(widened, case.arguments))
        table = case.op == "embedding"  # of which few rows are read
        least = size_bytes(case.arguments[table:])
        assert case.bytes >= 0.5 * least, f"{case.name}: {case.bytes} of {least} bytes are read"
        assert jax.tree.leaves(out), case.name
        if case.kind == "matmul":
            assert case.operations > 0, case.name


def widened(x):
    """As the arguments are widened where the plain path in float32 is the truth."""
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return jax.ShapeDtypeStruct(x.shape, jnp.float32 if is_float else x.dtype)


def smallest_of_each_form():
    """A form: an op, its dtypes and what its label says beside sizes."""
    found = {}
    for case in cases.all_cases():
        if case.bytes < 2e6:
            words = frozenset(re.findall(r"[a-z]\w+", case.label))
            dtypes = tuple(x.dtype for x in case.arguments)
            found.setdefault((case.op, dtypes, words), []).append(case)
    return [min(some, key=lambda case: size_bytes(case.arguments)) for some in found.values()]


SMALL = smallest_of_each_form()


@pytest.mark.slow
@pytest.mark.parametrize("case", SMALL, ids=[case.name for case in SMALL])
def test_the_truth_of_a_case_is_what_plain_computes(case):
    """Up to the rounding of its dtype: a wrong truth would fail every kernel on a GPU."""
    arguments = case.inputs(jax.random.key(0))
    plain = jax.jit(case.plain)(*arguments)
    result = check(case, *jax.device_get((arguments, plain, plain)))
    assert result["status"] == "right", result
    assert result["plain_error"] < 0.1, result  # fp8 rounds to 4 bits
