"""`ops.linear` and `ops.embedding` of packed weights."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from kernels import interpreted
from quantized_calls import with_signs

from jaxllm import ops
from pallas_kernels.device import INTERPRETED
from pallas_kernels.packed import SCHEMES
from pallas_kernels.quantize import dequantize, quantize

pytestmark = pytest.mark.usefixtures("strict_jax")


def draw(*shape: int, dtype=jnp.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64)])
def test_zero_points_a_bias_and_any_leading_dimensions(shape):
    weight, bias, x = draw(12, 64) + 1, draw(12, seed=1), draw(*shape, seed=2)
    packed = quantize(weight, "int4", 32, zero_points=True)
    y = ops.linear(x, packed, bias)
    truth = np.asarray(x, np.float64) @ np.asarray(dequantize(packed), np.float64).T
    truth = truth + np.asarray(bias)
    assert (y.dtype, y.shape) == (jnp.float32, truth.shape)
    np.testing.assert_allclose(y, truth, atol=1e-5)
    assert ops.linear(x, packed, bias, out_dtype=jnp.dtype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(("scheme", "size"), [("int8", None), ("int4", 32), ("fp8", 64)])
def test_scales_of_either_sign(scheme, size):
    packed, x = with_signs(quantize(draw(12, 64), scheme, size)), draw(3, 64, seed=1)
    truth = np.asarray(x, np.float64) @ oracles.packed_numbers(packed).T
    np.testing.assert_allclose(ops.linear(x, packed), truth, atol=1e-5)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(ops.linear(x, with_signs(packed)), truth, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_kernel_and_xla_agree(scheme):
    """Forward, and backward, which is XLA's on both ways."""
    weight, bias = draw(32, 256), draw(32, seed=1, dtype=jnp.bfloat16)
    x, out = draw(2, 3, 256, seed=2, dtype=jnp.bfloat16), draw(2, 3, 32, seed=3)
    packed = quantize(weight, scheme)

    def both(implementation):
        def loss(x, bias):
            y = ops.linear(
                x, packed, bias, out_dtype=jnp.dtype(jnp.float32), implementation=implementation
            )
            return jnp.sum(y * out), y

        run = jax.grad(loss, (0, 1), has_aux=True)
        return run(x, bias) if implementation == "xla" else interpreted(run, x, bias)

    (d_x, d_bias), y = both("pallas-interpret")
    (other_d_x, other_d_bias), other = both("xla")
    # Sums of 256 products of about 1 in float32, in another order
    np.testing.assert_allclose(y, other, atol=2e-4)
    np.testing.assert_array_equal(d_x, other_d_x)
    np.testing.assert_array_equal(d_bias, other_d_bias)


@pytest.mark.parametrize("scheme", ["int8", "int4", "ternary"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_cpu_holds_one_weight_at_a_time(scheme, backward):
    """Of six it would hold six, if they were made outside of a branch."""
    packed = jax.eval_shape(lambda: quantize(jnp.zeros((512, 512)), scheme))
    x = jax.ShapeDtypeStruct((2, 512), jnp.float32)

    def run(x, weights):
        for weight in weights:
            x = jnp.sin(ops.linear(x, weight, implementation="xla"))
        return jnp.sum(x)

    run = jax.grad(run) if backward else run
    memory = jax.jit(run).lower(x, [packed] * 6).compile().memory_analysis()
    weight = 512 * 512 * (1 if scheme == "ternary" and not backward else 4)
    assert memory.temp_size_in_bytes < 2.5 * weight


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_that_are_spread_over_a_mesh(scheme):
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
    packed, x = quantize(draw(16, 64), scheme), draw(4, 64, seed=1)

    def total(x):
        return jnp.sum(jnp.sin(ops.linear(x, packed, implementation="xla")), axis=-1)

    spread = jax.shard_map(total, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    np.testing.assert_array_equal(jax.jit(spread)(x), jax.jit(total)(x))
    ours, plain = (jax.jit(jax.grad(lambda x, f=f: jnp.sum(f(x))))(x) for f in (spread, total))
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_who_runs_a_packed_product():
    """The kernel wherever it can: XLA would write the weight as numbers first."""
    packed, x = quantize(draw(32, 256), "int4"), draw(3, 256, dtype=jnp.bfloat16)
    kernel = ops.LINEAR["pallas"]
    assert kernel.why_not_auto(x, packed, device=INTERPRETED) is None
    reason = kernel.why_not_auto(x.astype(jnp.float32), packed, device=INTERPRETED)
    assert reason == "takes x in bfloat16 or float16, got float32"
    assert ops.chosen("linear", x, packed) == "xla"  # there is no GPU here
    with pytest.raises(NotImplementedError, match="'pallas-interpret' cannot run .* float32"):
        ops.linear(x.astype(jnp.float32), packed, implementation="pallas-interpret")


@pytest.mark.own_errors
def test_a_width_that_is_not_the_weights_is_refused():
    packed = quantize(draw(12, 64), "int4")
    sentence = (
        r"^linear: x has 32 inputs, but the packed weight is \[12, 64\], and not \[outputs, 32\]"
    )
    with pytest.raises(ValueError, match=sentence):
        ops.linear(draw(2, 32), packed)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_of_a_packed_table(scheme):
    packed, ids = quantize(draw(7, 64), scheme), jnp.asarray([[0, 6], [3, 3]], jnp.int32)
    rows = np.asarray(dequantize(packed))[np.asarray(ids)]
    np.testing.assert_array_equal(ops.embedding(packed, ids), rows)
    bf16 = jnp.dtype(jnp.bfloat16)
    scaled = ops.embedding(packed, ids, scale=8.0, dtype=bf16)
    np.testing.assert_array_equal(scaled, jnp.asarray(rows).astype(bf16) * bf16.type(8))
    outside = jax.jit(lambda ids: ops.embedding(packed, ids))(jnp.asarray([-3, 99]))
    np.testing.assert_array_equal(outside, np.asarray(dequantize(packed))[[0, 6]])


def test_what_a_packed_table_refuses():
    packed = quantize(draw(7, 64), "int8")
    with pytest.raises(ValueError, match="^embedding: ids go from 0 to 7, but the table has rows"):
        ops.embedding(packed, jnp.asarray([0, 7]))
    reason = ops.EMBEDDING["pallas"].why_not(packed, jnp.asarray([0]), device=INTERPRETED)
    assert reason == "the table is packed"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_ids_give_no_rows(scheme):
    table = quantize(draw(12, 64), scheme)
    assert ops.embedding(table, jnp.zeros((2, 0), jnp.int32)).shape == (2, 0, 64)
