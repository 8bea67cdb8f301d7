"""Embedding in the interpreter: rows by id and sums of rows by id; what it refuses; its tilings."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import H200
from kernels import interpreted
from numerics import assert_as_accurate

from jaxllm import aot
from pallas_kernels import _compat, embedding_backward, embedding_zeros_lanes
from pallas_kernels import device as device_lib
from pallas_kernels.embedding import (
    Config,
    bucket,
    candidates,
    default_config,
    embedding,
    embedding_reference,
    tuning_calls,
    why_not,
)

pytestmark = pytest.mark.usefixtures("strict_jax")


def case(v: int, d: int, *shape: int, dtype: Any = jnp.float32) -> Any:
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.standard_normal((v, d)), dtype)
    return table, jnp.asarray(rng.integers(0, v, shape), jnp.int32)


@pytest.mark.parametrize(
    ("v", "d", "shape", "dtype", "keywords"),
    [
        (7, 96, (1,), jnp.bfloat16, {}),
        (7, 896, (5,), jnp.float16, {}),
        (5, 1000, (3,), jnp.bfloat16, {}),
        (3, 4864, (2,), jnp.float32, {}),
        (37, 64, (2, 19), jnp.float32, {"dtype": jnp.bfloat16}),
        (5, 1000, (3,), jnp.bfloat16, {"scale": 1000**0.5}),
        (11, 40, (13,), jnp.float32, {"scale": 0.3, "dtype": jnp.float16}),
        (1, 16, (2, 1), jnp.bfloat16, {"dtype": jnp.float32}),
    ],
)
def test_embedding(v, d, shape, dtype, keywords):
    """Rows are copied, or rounded as XLA rounds them: the same to the bit."""
    arguments = case(v, d, *shape, dtype=dtype)
    ours = interpreted(functools.partial(embedding, **keywords, interpret=True), *arguments)
    assert ours.dtype == keywords.get("dtype", dtype)
    np.testing.assert_array_equal(ours, embedding_reference(*arguments, **keywords))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.uint32])
def test_traced_ids_are_clamped_to_the_table(dtype):
    table, _ = case(5, 32, 1)
    ids = jnp.asarray([4, 0, 100], dtype)
    ids = jnp.append(ids, jnp.asarray([jnp.iinfo(dtype).max, jnp.iinfo(dtype).min], dtype))
    ours = interpreted(functools.partial(embedding, interpret=True), table, ids)
    np.testing.assert_array_equal(ours, np.asarray(table)[[4, 0, 4, 4, 0]])


def sums(v, d, ids, dtype, keywords):
    """The gradient of the table for random cotangents: ours, XLA's, and the truth."""
    table = case(v, d, 1, dtype=dtype)[0]
    ids = jnp.asarray(ids, jnp.int32)
    rng = np.random.default_rng(1)
    d_out = jnp.asarray(rng.standard_normal((*ids.shape, d)), keywords.get("dtype", dtype))

    def pull(f, table, ids):
        return jax.vjp(lambda table: f(table, ids, **keywords), table)[1](d_out)[0]

    ours = interpreted(
        functools.partial(pull, functools.partial(embedding, interpret=True)), table, ids
    )
    assert ours.dtype == dtype
    scale = 1.0
    if keywords.get("scale"):
        scale = float(jnp.asarray(keywords["scale"], d_out.dtype))
    inside = np.clip(np.asarray(ids), 0, v - 1)
    truth = oracles.rows_by_id(np.asarray(d_out, np.float64) * scale, inside, v)
    return ours, pull(embedding_reference, table, ids), truth


REPEATED = [3, 0, 3, 3, 12, 3, 1, 3, 3, 3, 3, 3, 3, 0]


@pytest.mark.parametrize(
    ("v", "d", "ids", "dtype", "keywords"),
    [
        (13, 96, REPEATED, jnp.float32, {}),
        (37, 64, [[36, 36], [0, -5], [40, 8]], jnp.bfloat16, {}),
        (3, 1000, [2], jnp.float16, {}),
        (5, 4864, [4, 1, 4], jnp.bfloat16, {}),
        (7, 64, [6, 2, 6], jnp.float32, {"dtype": jnp.bfloat16, "scale": 3.3}),
        (1, 16, [0, 0], jnp.bfloat16, {"dtype": jnp.float32}),
        (9, 64, [0, 1] * 8 + [7] * 5 + [2] * 75, jnp.bfloat16, {"scale": 0.7}),
        (2, 32, [1] * 64, jnp.float32, {}),
        (3, 4864, [2] * 35 + [0], jnp.bfloat16, {}),
    ],
)
def test_gradient(v, d, ids, dtype, keywords):
    ours, plain, truth = sums(v, d, ids, dtype, keywords)
    assert_as_accurate(ours, plain, truth)


@pytest.mark.parametrize(("name", "value"), [("NO_KEY", 1), ("WRITES_REFERENCES", False)])
def test_other_ways_to_the_gradient(name, value, monkeypatch):
    """Ids of many bits; jax 0.10, where XLA puts the sums in place."""
    module = _compat if name == "WRITES_REFERENCES" else embedding_zeros_lanes
    if not getattr(module, name):
        pytest.skip("the way that jax 0.10 goes anyway")
    monkeypatch.setattr(module, name, value)
    jax.clear_caches()  # of what was traced the other way
    ids = [3] * 70 + [12, 0, 3, 5] * 7 + [9] * 30
    ours, plain, truth = sums(13, 32, ids, jnp.bfloat16, {"scale": 0.7})
    jax.clear_caches()
    assert_as_accurate(ours, plain, truth)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_ids_give_exact_sums(seed):
    """Of whole numbers; alone and under vmap, where a kernel writes into a part of an array."""
    rng = np.random.default_rng(seed)
    v, d, m = int(rng.integers(1, 40)), 16, int(rng.integers(60, 200))
    ids = jnp.asarray(np.minimum(rng.zipf(1.4, (2, m)) - 1, v - 1), jnp.int32)
    d_out = jnp.asarray(rng.integers(-8, 9, (2, m, d)), jnp.float32)

    def pull(ids, d_out):
        look_up = functools.partial(embedding, ids=ids, interpret=True)
        return jax.vjp(look_up, jnp.zeros((v, d)))[1](d_out)[0]

    truth = [
        oracles.rows_by_id(np.asarray(y, np.float64), np.asarray(i), v)
        for y, i in zip(d_out, ids, strict=True)
    ]
    np.testing.assert_array_equal(interpreted(jax.vmap(pull), ids, d_out), truth)
    np.testing.assert_array_equal(interpreted(pull, ids[0], d_out[0]), truth[0])


def test_keys_of_32_bits(monkeypatch):
    """They are not taken for negative numbers."""
    monkeypatch.setattr(embedding_zeros_lanes.Keys, "shift", 28, raising=False)
    jax.clear_caches()  # of what was traced with fewer
    ids = [14] * 40 + [0, 3, 7, 8, 14, 9] * 5
    ours, plain, truth = sums(15, 32, ids, jnp.bfloat16, {})
    jax.clear_caches()
    assert_as_accurate(ours, plain, truth)


def test_the_check_can_fail():
    ours, plain, truth = sums(13, 96, REPEATED, jnp.float32, {})
    for wrong in (ours.at[3, 7].multiply(1.05), jnp.roll(ours, 1, axis=0)):
        with pytest.raises(AssertionError, match="error is"):
            assert_as_accurate(wrong, plain, truth)


@pytest.mark.slow
def test_sums_are_float32_and_the_same_to_the_bit():
    """A sum of ones stops at 256 in bfloat16."""
    table, ids = jnp.zeros((2, 128), jnp.bfloat16), jnp.ones((264,), jnp.int32)
    pull = jax.grad(lambda t, ids: jnp.sum(embedding(t, ids, interpret=True).astype(jnp.float32)))
    assert set(interpreted(pull, table, ids)[1].tolist()) == {264.0}
    again = [sums(13, 128, REPEATED, jnp.float32, {})[0] for _ in range(2)]
    np.testing.assert_array_equal(*again)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_plain_gradient_is_summed_in_float32_too(dtype):
    """A sum of ones stops at 256 in bfloat16, at 2048 in float16."""
    table, ids = jnp.zeros((2, 8), dtype), jnp.ones((4096,), jnp.int32)

    def total(table):
        return jnp.sum(embedding_reference(table, ids, scale=2.0).astype(jnp.float32))

    slope = jax.grad(total)(table)
    assert slope.dtype == dtype
    np.testing.assert_array_equal(slope, [[0] * 8, [8192] * 8])
    tangent = jax.jvp(total, (table,), (jnp.ones_like(table),))[1]
    assert float(tangent) == 2 * 8 * 4096


def test_the_plain_gradient_of_a_wider_result_is_summed_as_it_is():
    """In bfloat16 1.0039 would be 1."""
    table, ids = jnp.zeros((2, 8), jnp.bfloat16), jnp.zeros(2, jnp.int32)
    rows, pull = jax.vjp(lambda t: embedding_reference(t, ids, dtype=jnp.float32), table)
    assert rows.dtype == jnp.float32
    (slope,) = pull(jnp.asarray([[1 + 2**-8] * 8, [-1.0] * 8], jnp.float32))
    np.testing.assert_array_equal(slope, [[2**-8] * 8, [0] * 8])


def test_the_plain_gradient_of_traced_ids_outside_is_that_of_the_ends():
    slope = jax.grad(lambda t, ids: jnp.sum(embedding_reference(t, ids)))
    found = jax.jit(slope)(jnp.zeros((3, 2), jnp.bfloat16), jnp.asarray([-1, 5, 7]))
    np.testing.assert_array_equal(found, [[1, 1], [0, 0], [2, 2]])


def test_the_plain_gradient_of_float64_is_float64():
    with jax.enable_x64(True):
        table, ids = jnp.zeros((2, 2), jnp.float64), jnp.zeros(2, jnp.int32)
        pull = jax.vjp(lambda t: embedding_reference(t, ids), table)[1]
        (slope,) = pull(jnp.asarray([[1.0, 1.0], [2.0**-40, 0.0]], jnp.float64))
        np.testing.assert_array_equal(slope, [[1 + 2.0**-40, 1], [0, 0]])


def test_second_derivatives():
    table, ids = case(5, 32, 4)

    def slope(f, table, ids):
        return jnp.sum(jax.grad(lambda t: jnp.sum(f(t, ids) ** 3))(table) ** 2)

    ours = interpreted(
        jax.grad(functools.partial(slope, functools.partial(embedding, interpret=True))), table, ids
    )
    plain = jax.grad(functools.partial(slope, embedding_reference))(table, ids)
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-3)


def specs(v=1000, d=896, count=8192, dtype: Any = "bfloat16"):
    return jax.ShapeDtypeStruct((v, d), dtype), jax.ShapeDtypeStruct((count,), "int32")


@pytest.mark.parametrize(
    ("arrays", "keywords", "device", "phrase"),
    [
        (specs(), {}, device_lib.Device("cpu"), "needs an NVIDIA GPU, found cpu"),
        (specs(), {}, dataclasses.replace(H200, capability=8.0), "needs a Hopper GPU"),
        (specs(dtype="float64"), {}, H200, "float16 or float32, got a table of float64"),
        (specs(), {"dtype": "float64"}, H200, "float16 or float32, got a result of float64"),
        (specs(count=0), {}, H200, "nothing to look up: the table is [1000, 896], ids are [0]"),
        (specs(d=12), {}, H200, "rows of 24 bytes are no multiple of 16 bytes"),
        (specs(d=12, dtype="float32"), {"dtype": "bfloat16"}, H200, "rows of 24 bytes are no"),
        (specs(d=8192, count=2**21), {}, H200, "a result of 2147483648 times 16 bytes; fewer"),
    ],
)
def test_why_not(arrays, keywords, device, phrase):
    assert phrase in (why_not(*arrays, **keywords, device=device) or "")


def test_nothing_stands_in_the_way_of_real_models():
    for call in tuning_calls():
        assert why_not(*call.arguments, device=H200) is None
    for width in (64, 576, 1536, 2056, 2304, 3584, 4864, 5120, 8192, 14336, 16384):
        assert why_not(*specs(d=width), device=H200) is None
        assert why_not(*specs(d=width, dtype="float32"), dtype="bfloat16", device=H200) is None


def test_it_says_why_it_cannot_run():
    with pytest.raises(NotImplementedError, match="embedding: cannot run this call: needs an NVI"):
        embedding(*case(3, 32, 2))


@pytest.mark.parametrize(
    ("table", "ids", "keywords", "sentence"),
    [
        ((3,), [0], {}, r"the table \[3\] is not \[V, D\]"),
        ((3, 32), [0.5], {}, "ids are float32; they must be integers"),
        ((3, 32), [0], {"dtype": jnp.int32}, "dtype is int32; it must be floating point"),
        ((3, 32), [0], {"scale": float("nan")}, "scale must be a finite number or None, got nan"),
        ((3, 32), [0, 3], {}, "ids go from 0 to 3, but the table has rows 0 to 2"),
        ((3, 32), [-1, 2], {}, "ids go from -1 to 2, but the table has rows 0 to 2"),
        ((3, 32), [0], {"config": Config(0)}, "a thread takes 1 to 16 pieces"),
        ((3, 32), [0], {"config": Config(17)}, r"Config\(pieces=17\): a thread takes 1 to 16"),
    ],
)
def test_user_errors(table, ids, keywords, sentence):
    with pytest.raises(ValueError, match=f"embedding: .*{sentence}"):
        embedding(jnp.ones(table), jnp.asarray(ids), **keywords, interpret=True)


def test_a_table_of_integers():
    with pytest.raises(ValueError, match="the table is int32; it must be floating point"):
        embedding(jnp.ones((3, 32), jnp.int32), jnp.zeros((1,), jnp.int32), interpret=True)


def test_concrete_ids_are_looked_at_inside_a_jitted_function_too():
    table, ids = case(3, 32, 1)[0], jnp.asarray([5], jnp.int32)
    with pytest.raises(ValueError, match="ids go from 5 to 5"):
        jax.jit(lambda table: embedding(table, ids, interpret=True))(table)


def test_ids_of_64_bits_are_not_cut_off():
    ids: Any = np.asarray([2**32], np.int64)
    with pytest.raises(ValueError, match="ids go from 4294967296 to 4294967296"):
        embedding(jnp.ones((3, 32)), ids, interpret=True)


def test_what_is_tuned():
    assert bucket(*specs(count=5000)) == "bfloat16-bfloat16-m8192-d896"
    assert bucket(*specs(), scale=2.0) != bucket(*specs()) != bucket(*specs(), dtype="float32")
    for call in tuning_calls():
        found = candidates(*call.arguments, device=H200)
        assert len(found) == 3
        assert default_config(*call.arguments, device=H200) not in found


@pytest.mark.gpu
@pytest.mark.parametrize("call", tuning_calls(), ids=lambda call: bucket(*call.arguments))
def test_on_the_gpu(call):
    table, ids = call.make(jax.random.key(0))
    np.testing.assert_array_equal(jax.jit(embedding)(table, ids), embedding_reference(table, ids))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [Config(1), Config(3), Config(16)])
@pytest.mark.parametrize(
    ("v", "d", "count", "dtype", "keywords"),
    [
        (7, 8, 1, jnp.bfloat16, {}),
        (1009, 1000, 37, jnp.float16, {"scale": 2.5}),
        (5, 896, 333, jnp.float32, {}),
        (101, 4864, 7, jnp.float32, {"scale": 1.5, "dtype": jnp.bfloat16}),
        (101, 40, 501, jnp.float16, {"scale": 0.3, "dtype": jnp.float32}),
        (9, 24, 65, jnp.bfloat16, {"dtype": jnp.float16}),
    ],
)
def test_every_size_and_dtype_on_the_gpu(v, d, count, dtype, keywords, config):
    """Rows are rounded as XLA rounds them, sums of whole numbers exact; alone, and under vmap."""
    table, ids = case(v, d, 3, count, dtype=dtype)
    ids = ids.at[:, 0].set(jnp.asarray([-1, v, v + 5]))
    f = jax.jit(functools.partial(embedding, **keywords, config=config))
    wanted = jax.jit(functools.partial(embedding_reference, **keywords))(table, ids)
    np.testing.assert_array_equal(jax.vmap(f, (None, 0))(table, ids), wanted)
    np.testing.assert_array_equal(f(table, ids[0]), wanted[0])
    d_out = jnp.round(2 * jax.random.normal(jax.random.key(0), wanted.shape)).astype(wanted.dtype)
    pull = jax.jit(lambda ids, d: jax.vjp(lambda t: f(t, ids), table)[1](d)[0])
    by = float(jnp.asarray(keywords.get("scale", 1.0), wanted.dtype))
    truth = [
        oracles.rows_by_id(by * np.asarray(x, np.float64), np.clip(which, 0, v - 1), v)
        for x, which in zip(np.asarray(d_out, np.float32), np.asarray(ids), strict=True)
    ]
    truth = jnp.asarray(np.asarray(truth, np.float32)).astype(dtype)
    np.testing.assert_array_equal(jax.vmap(pull)(ids, d_out), truth)
    np.testing.assert_array_equal(pull(ids[0], d_out[0]), truth[0])


@pytest.mark.gpu
def test_batches_of_sorted_ids_on_the_gpu():
    """So few blocks that those of all batches run at a time; all ids alike."""
    m, d = embedding_backward.MOST_COUNTED + 1, 64
    ids = jnp.full((4, m), 2, jnp.int32)
    d_out = jnp.ones((4, m, d)) * jnp.arange(1.0, 5)[:, None, None]
    pull = lambda i, g: jax.vjp(lambda t: embedding(t, i), jnp.zeros((5, d)))[1](g)[0]  # noqa: E731
    pull = jax.jit(jax.vmap(pull))
    for _ in range(20):
        found = pull(ids, d_out)
        np.testing.assert_array_equal(found[:, 2, 0], m * np.arange(1, 5))
        assert not found[:, [0, 1, 3, 4]].any()


@pytest.mark.aot
@pytest.mark.parametrize(("v", "m"), [(151936, 16384), (262144, 8192)])
def test_ids_of_real_models_are_counted(v, m):
    """Not sorted by XLA: 18 bits and 14 are 32."""
    ids = jax.ShapeDtypeStruct((m,), jnp.int32)
    table, d_out = (jax.ShapeDtypeStruct((n, 64), jnp.bfloat16) for n in (v, m))
    pull = lambda t, ids, d_out: jax.vjp(lambda t: embedding(t, ids), t)[1](d_out)[0]  # noqa: E731
    launches = [launch.name for launch in aot.compile_for(pull, table, ids, d_out).launches]
    ours = [f"embedding_backward_{name}" for name in ("zeros", "sums")]
    assert launches == ours


@pytest.mark.aot
def test_a_long_row_has_a_gradient():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 131072), (2, 131072))]
    ids = jax.ShapeDtypeStruct((2,), jnp.int32)
    assert why_not(shapes[0], ids, device=H200) is None
    pull = lambda t, ids, d_out: jax.vjp(lambda t: embedding(t, ids), t)[1](d_out)[0]  # noqa: E731
    aot.compile_for(pull, shapes[0], ids, shapes[1])


@pytest.mark.gpu
@pytest.mark.parametrize("d", [896, 1000, 3072, 4864])
@pytest.mark.parametrize("m", [2048, embedding_backward.MOST_COUNTED + 1])
def test_gradients_on_the_gpu(d, m):
    v, rng = 3001, np.random.default_rng(0)
    ids = jnp.asarray(np.minimum(rng.zipf(1.3, m) - 1, v - 1), jnp.int32)
    table = jnp.asarray(rng.standard_normal((v, d)), jnp.bfloat16)
    d_out = jnp.asarray(rng.standard_normal((m, d)), jnp.bfloat16)
    np.testing.assert_array_equal(jax.jit(embedding)(table, ids), embedding_reference(table, ids))
    pull = jax.jit(lambda t, ids, d_out: jax.vjp(lambda t: embedding(t, ids), t)[1](d_out)[0])
    ours = pull(table, ids, d_out)
    np.testing.assert_array_equal(ours, pull(table, ids, d_out))
    truth = oracles.rows_by_id(np.asarray(d_out, np.float64), np.asarray(ids), v)
    assert_as_accurate(ours, jnp.asarray(truth, jnp.bfloat16), truth)
    # A kernel writes into a part of an array, and the sums of whole numbers are exact
    whole = jnp.round(d_out)
    twice = jax.vmap(pull, (None, 0, 0))(table, jnp.stack([ids, ids[::-1]]), jnp.stack([whole] * 2))
    for found, order in zip(twice, (ids, ids[::-1]), strict=True):
        truth = oracles.rows_by_id(np.asarray(whole, np.float64), np.asarray(order), v)
        np.testing.assert_array_equal(found, jnp.asarray(truth, jnp.bfloat16))
