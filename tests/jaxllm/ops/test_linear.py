"""Products with weights [out, in], and rows of a table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from kernels import interpreted
from numerics import assert_as_accurate

from jaxllm import ops
from jaxllm.ops import embedding, linear
from pallas_kernels import _compat
from pallas_kernels.device import INTERPRETED
from pallas_kernels.quantize import quantize

pytestmark = pytest.mark.usefixtures("strict_jax")


def case(*shape: int, out: int, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = (shape, (out, shape[-1]), (out,))
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]


def expected(x, weight, bias=None):
    arrays = np.asarray(x), np.asarray(weight), None if bias is None else np.asarray(bias)
    return [oracles.linear(*arrays, dtype=d) for d in (x.dtype, np.float64)]


def terms(x, weight) -> float:
    """The largest product that is summed."""
    return float(jnp.max(jnp.abs(x)) * jnp.max(jnp.abs(weight)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("shape", "out", "dtype"),
    [
        ((5,), 3, jnp.float32),
        ((2, 3, 37), 11, jnp.float32),
        ((1, 1), 1, jnp.float32),
        ((2, 37), 896, jnp.bfloat16),
        ((2, 37), 11, jnp.float16),
    ],
)
def test_linear(shape, out, dtype, bias):
    x, weight, b = case(*shape, out=out, dtype=dtype)
    arguments = (x, weight, b if bias else None)
    y = jax.jit(linear)(*arguments)
    assert y.dtype == dtype
    assert_as_accurate(y, *expected(*arguments), largest_term=terms(x, weight))


def test_the_check_can_fail():
    x, weight, bias = case(2, 3, 37, out=11)
    good, (plain, truth) = linear(x, weight, bias), expected(x, weight, bias)
    for wrong in (
        good.at[0, 0, 0].multiply(1.05),
        linear(x, weight),
        linear(x.astype(jnp.bfloat16), weight, bias),
    ):
        with pytest.raises(AssertionError, match="error is"):
            assert_as_accurate(wrong, plain, truth, largest_term=terms(x, weight))


def test_sums_are_float32_in_half_precision():
    """A sum of ones stops at 256 in bfloat16."""
    x = jnp.ones((1, 4096), jnp.bfloat16)
    assert float(linear(x, x)[0, 0]) == 4096


def test_float32_is_the_highest_precision():
    """A GPU would otherwise round operands to 10 bits; a CPU cannot tell, but the program can."""

    def precision(dtype) -> set:
        x, weight, _ = case(2, 8, out=4, dtype=dtype)
        both = jax.make_jaxpr(jax.value_and_grad(lambda x: jnp.sum(linear(x, weight))))(x)
        found = [e.params["precision"] for e in both.eqns if e.primitive.name == "dot_general"]
        assert len(found) == 2  # forward and backward
        return set(found)

    highest = jax.lax.Precision.HIGHEST
    assert precision(jnp.float32) == {(highest, highest)}
    assert precision(jnp.bfloat16) == {None}


def test_the_result_may_be_wider():
    """Logits: not rounded to the activations' dtype."""
    x, weight, _ = case(3, 64, out=8, dtype=jnp.bfloat16)
    y = linear(x, weight, out_dtype=jnp.dtype(jnp.float32))
    assert y.dtype == jnp.float32
    # Products of bfloat16 numbers are exact in float32, so only the sum is rounded
    truth = expected(x, weight)[1]
    assert_as_accurate(y, truth, truth, largest_term=terms(x, weight))
    with pytest.raises(AssertionError, match="error is"):
        assert_as_accurate(linear(x, weight), truth, truth, largest_term=terms(x, weight))
    bias = jnp.full(8, 1.001, jnp.float32)  # nor is the bias
    with_bias = linear(x, weight, bias, out_dtype=jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(with_bias, np.asarray(y) + np.asarray(bias))


def test_weights_are_cast_to_the_inputs_dtype():
    x, weight, bias = case(3, 8, out=4)
    narrow = x.astype(jnp.bfloat16)
    y = linear(narrow, weight, bias)
    assert y.dtype == jnp.bfloat16
    same = linear(narrow, weight.astype(jnp.bfloat16), bias.astype(jnp.bfloat16))
    np.testing.assert_array_equal(y, same)


@pytest.mark.skipif(
    not _compat.INTERPRETS_TRANSPOSED_WGMMA,
    reason="the interpreter of jax 0.10 has no transposed wgmma operand",
)
@pytest.mark.parametrize(
    ("shape", "out", "dtype", "bias"),
    [
        ((72,), 40, jnp.bfloat16, True),
        ((2, 3, 72), 136, jnp.float16, False),
        ((1, 5, 64), 40, jnp.bfloat16, True),
    ],
)
def test_pallas_agrees(shape, out, dtype, bias):
    x, weight, b = case(*shape, out=out, dtype=dtype)
    arguments = (x, weight, b if bias else None)
    run = lambda *arrays: linear(*arrays, implementation="pallas-interpret")  # noqa: E731
    y = interpreted(run, *arguments)
    assert (y.dtype, y.shape) == (dtype, linear(*arguments).shape)
    assert_as_accurate(y, *expected(*arguments), largest_term=terms(x, weight))


@pytest.mark.skipif(
    not _compat.INTERPRETS_TRANSPOSED_WGMMA,
    reason="the interpreter of jax 0.10 has no transposed wgmma operand",
)
def test_pallas_casts_and_widens_as_xla_does():
    x, weight, b = case(3, 64, out=40)
    narrow = x.astype(jnp.bfloat16)
    keywords = {"out_dtype": jnp.dtype(jnp.float32)}

    def run(x, weight, bias):
        return linear(x, weight, bias, **keywords, implementation="pallas-interpret")

    y = interpreted(run, narrow, weight, b)
    assert y.dtype == jnp.float32
    cast = weight.astype(jnp.bfloat16).astype(jnp.float32)
    truth = expected(narrow.astype(jnp.float32), cast, b)[1]
    assert_as_accurate(y, truth, truth, largest_term=terms(x, weight))


def test_who_runs_a_product():
    """cuBLAS unless the kernel is named; and where it cannot run, why."""
    x, weight, _ = case(3, 64, out=40, dtype=jnp.bfloat16)
    assert list(ops.LINEAR) == ["pallas", "pallas-interpret", "xla"]
    kernel = ops.LINEAR["pallas"]
    assert kernel.why_not(x, weight, device=INTERPRETED) is None
    reason = kernel.why_not_auto(x, weight, device=INTERPRETED)
    assert reason is not None
    assert reason.startswith("a model decodes faster where XLA joins products with what stands")
    wide, narrow = x.astype(jnp.float32), weight.astype(jnp.float32)
    reason = kernel.why_not(wide, narrow, device=INTERPRETED)
    assert reason == "the tensor cores would round float32 to 10 bits (tf32)"
    with pytest.raises(NotImplementedError, match="'pallas-interpret' cannot run .*tf32"):
        linear(wide, narrow, implementation="pallas-interpret")


@pytest.mark.parametrize(
    ("rows", "weight", "dtype", "taken"),
    [
        (16, (128, 896), jnp.bfloat16, False),
        (17, (128, 896), jnp.bfloat16, True),
        (64, (151936, 896), jnp.bfloat16, True),
        (65, (128, 896), jnp.bfloat16, False),
        (17, (128, 896), jnp.float16, False),
        (17, (8, 896), jnp.bfloat16, False),
        (17, (896, 8), jnp.bfloat16, False),
    ],
)
def test_several_rows_are_the_kernels(rows, weight, dtype, taken):
    """As many as were measured, and not an adapter's products."""
    x, weight = (jax.ShapeDtypeStruct(s, dtype) for s in ((rows, weight[1]), weight))
    assert (ops.LINEAR["pallas"].why_not_auto(x, weight, device=INTERPRETED) is None) == taken


def test_a_prefill_of_packed_weights_is_the_kernels():
    weight = jax.eval_shape(lambda w: quantize(w, "int4"), jnp.ones((64, 256), jnp.bfloat16))
    for rows in (1, 512, 8192):
        x = jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16)
        assert ops.LINEAR["pallas"].why_not_auto(x, weight, device=INTERPRETED) is None


def test_embedding_takes_rows():
    table = jnp.asarray(np.random.default_rng(0).standard_normal((7, 3)), jnp.float32)
    ids = jnp.asarray([[0, 6], [3, 3]], jnp.int32)
    np.testing.assert_array_equal(embedding(table, ids), np.asarray(table)[np.asarray(ids)])
    narrow = embedding(table, ids, dtype=jnp.dtype(jnp.bfloat16))
    np.testing.assert_array_equal(narrow, np.asarray(table.astype(jnp.bfloat16))[np.asarray(ids)])


def test_embedding_clamps_ids_to_the_table():
    table = jnp.asarray([[1.0], [2.0], [3.0]])
    ids = jnp.asarray([-1, -100, 3, 100], jnp.int32)
    assert jax.jit(embedding)(table, ids)[:, 0].tolist() == [1, 1, 3, 3]


def test_embedding_refuses_concrete_ids_outside_the_table():
    table = jnp.ones((3, 1))
    for ids in ([0, 3], [-1, 3]):
        with pytest.raises(ValueError, match="to 3, but the table has rows 0 to 2"):
            embedding(table, jnp.asarray(ids, jnp.int32))


def test_a_table_without_rows():
    table, ids = jnp.ones((0, 4)), jnp.zeros((2,), jnp.int32)
    assert ops.embedding(table, ids[:0]).shape == (0, 4)
    for run in (ops.embedding, jax.jit(ops.embedding)):
        with pytest.raises(
            ValueError, match=r"^embedding: ids are \[2\], but the table \[0, 4\] has no rows"
        ):
            run(table, ids)


def test_the_kernel_takes_the_rows_that_xla_takes():
    table = jnp.asarray(np.random.default_rng(0).standard_normal((7, 32)), jnp.float32)
    ids = jnp.asarray([[0, 6, -2], [3, 3, 70]], jnp.int32)
    narrow = functools.partial(embedding, scale=5.5, dtype=jnp.dtype(jnp.bfloat16))
    kernel = functools.partial(narrow, implementation="pallas-interpret")
    np.testing.assert_array_equal(interpreted(kernel, table, ids), jax.jit(narrow)(table, ids))


def test_embedding_rounds_the_scale_first():
    table = jnp.asarray([[1.0, 3.0]], jnp.bfloat16)
    out = embedding(table, jnp.zeros((1,), jnp.int32), scale=3072**0.5)
    assert out.tolist() == [[55.5, 166.0]]


def test_embedding_gradient_adds_up_rows_that_occur_twice():
    table, ids = jnp.zeros((4, 2)), jnp.asarray([1, 3, 1], jnp.int32)
    d_out = jnp.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    (gradient,) = jax.vjp(lambda table: embedding(table, ids), table)[1](d_out)
    assert gradient.tolist() == [[0, 0], [6, 8], [0, 0], [3, 4]]


@pytest.mark.own_errors
@pytest.mark.parametrize("implementation", ["xla", "pallas-interpret"])
@pytest.mark.parametrize(
    ("x", "bias", "sentence"),
    [
        ((2, 64), (1,), r"bias \[1\] is not a number for each of 8 outputs"),
        ((2, 64), (1, 8), r"bias \[1, 8\] is not a number for each of 8 outputs"),
        ((), None, r"x must be floats \[\.\., I\], got float32\[\]"),
    ],
)
def test_what_cannot_be_is_refused(x, bias, sentence, implementation):
    bias = None if bias is None else jnp.ones(bias)
    for weight in (jnp.ones((8, 64)), quantize(jnp.ones((8, 64)), "int8")):
        with pytest.raises(ValueError, match=f"^linear: {sentence}$"):
            linear(jnp.ones(x), weight, bias, implementation=implementation)
        with pytest.raises(ValueError, match=r"^linear: x must be floats .*, got int32\[2, 64\]$"):
            linear(jnp.ones((2, 64), jnp.int32), weight, implementation=implementation)


@pytest.mark.own_errors
def test_results_are_floats_and_weights_are_arrays():
    x, weight = jnp.ones((2, 64)), jnp.ones((8, 64))
    for w in (weight, quantize(weight, "int8")):
        for dtype in (jnp.int32, jnp.int8, bool, jnp.complex64):
            sentence = f"^linear: out_dtype must be a float's, got {jnp.dtype(dtype)}$"
            with pytest.raises(ValueError, match=sentence):
                linear(x, w, out_dtype=jnp.dtype(dtype))
    for run, name in ((linear, "linear"), (ops.fused_linear, "fused_linear")):
        with pytest.raises(ValueError, match=rf"^{name}: weight must be an array, got \[\[1.0\]\]"):
            run(x, [[1.0]])


def test_a_packed_table_has_no_gradient():
    table = quantize(jnp.ones((8, 64)), "int8")
    total = lambda table: jnp.sum(embedding(table, jnp.asarray([3, 3])))  # noqa: E731
    gradient = jax.grad(total, allow_int=True)(table)
    assert not np.any(gradient.row_scale)


def test_a_weight_of_other_inputs_is_refused():
    sentence = r"^linear: x has 8 inputs, but the weight is \[8, 5\], and not \[outputs, 8\]$"
    with pytest.raises(ValueError, match=sentence):
        linear(jnp.ones((3, 8)), jnp.ones((8, 5)))


@pytest.mark.parametrize("dtype", ["int32", "float8_e4m3fn"])
@pytest.mark.parametrize("rows", [8, 24])
def test_results_that_no_kernel_gives_are_left_to_xla(dtype, rows):
    x, weight = jnp.ones((rows, 512), jnp.bfloat16), jnp.ones((512, 512), jnp.bfloat16)
    reason = ops.LINEAR["pallas"].why_not(x, weight, out_dtype=dtype, device=INTERPRETED)
    assert reason == f"gives bfloat16, float16 or float32, not {dtype}"
