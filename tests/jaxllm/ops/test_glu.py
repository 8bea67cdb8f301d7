"""The gated activation against float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import absent
from kernels import interpreted
from numerics import assert_as_accurate

from jaxllm.config import ACTIVATIONS
from jaxllm.ops import explain, glu

pytestmark = pytest.mark.usefixtures("strict_jax")


def case(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(3 * rng.standard_normal((2, 3, 37)), dtype) for _ in range(2)]


def expected(gate, up, activation):
    arrays = np.asarray(gate), np.asarray(up)
    return [oracles.glu(*arrays, activation=activation, dtype=d) for d in (gate.dtype, np.float64)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_glu(activation, dtype):
    gate, up = case(dtype)
    out = jax.jit(glu, static_argnames="activation")(gate, up, activation=activation)
    assert out.dtype == dtype
    assert_as_accurate(out, *expected(gate, up, activation))


def test_the_check_can_fail():
    gate, up = case()
    good, (plain, truth) = glu(gate, up, activation="gelu"), expected(gate, up, "gelu")
    for wrong in (
        good.at[0, 0, 0].multiply(1.05),
        glu(gate, up, activation="gelu_pytorch_tanh"),
        glu(up, gate, activation="gelu"),
    ):
        with pytest.raises(AssertionError, match="error is"):
            assert_as_accurate(wrong, plain, truth)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_far_out_it_stays_finite(activation):
    gate, up = jnp.asarray([-1e4, -90.0, 0.0, 90.0, 1e4]), jnp.ones(5)
    out, pull = jax.vjp(lambda gate: glu(gate, up, activation=activation), gate)
    y, slope = ([0, 0, 0, 90, 1e4], [0, 0, 0.5, 1, 1])
    if activation == "relu2":
        y, slope = np.square(y), [0, 0, 0, 180, 2e4]
    np.testing.assert_allclose(out, y, atol=1e-30)
    np.testing.assert_allclose(pull(jnp.ones(5))[0], slope, atol=1e-6)


def test_an_unknown_activation():
    gate, up = case()
    with pytest.raises(
        ValueError, match="glu: activation 'relu' is not one of silu, gelu, gelu_pytorch_tanh"
    ):
        glu(gate, up, activation="relu")
    unhashable: Any = ["silu"]
    with pytest.raises(ValueError, match=r"glu: activation \['silu'\] is not one of"):
        glu(gate, up, activation=unhashable)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_has_a_gradient_of_nan(activation):
    gate = jnp.asarray([jnp.nan, -jnp.inf, -1.0, 0.0, 2.0])

    def f(gate):
        return glu(gate, jnp.ones(5), activation=activation, implementation="xla")

    found = jax.vjp(f, gate)[1](jnp.ones(5))[0]
    assert np.isnan(found[0])
    if activation == "relu2":
        assert found[1:].tolist() == [0, 0, 0, 4]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_pallas(activation):
    """The kernel that the activation's name stands for."""
    gate, up = (x[..., :32] for x in case(jnp.bfloat16))
    f = functools.partial(glu, activation=activation, implementation="pallas-interpret")
    assert_as_accurate(interpreted(f, gate, up), *expected(gate, up, activation))


def test_who_runs():
    x = jax.ShapeDtypeStruct((8192, 4864), jnp.bfloat16)
    with absent("NVIDIA H200"):
        assert explain("glu", x, x, activation="silu")["pallas"] is None
        wide = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        reasons = explain("glu", wide, wide, activation="silu")
    assert reasons["pallas"] == "in float32 XLA is as fast"
    assert reasons["xla"] is None
    with absent("NVIDIA A100"):
        reasons = explain("glu", x, x, activation="silu")
    assert (reasons["pallas"] or "").startswith("needs a Hopper GPU")
