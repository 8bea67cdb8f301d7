"""Within `jax.shard_map`, which checks over which axes of the mesh arrays vary."""

import functools
import os
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from kernels import interpreted

from jaxllm import fp8, ops, sampling
from pallas_kernels.device import INTERPRETED
from pallas_kernels.quantize import SCHEMES, quantize
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.varying import vary_alike, varying_axes

MESH = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def spread(f: Any, in_specs: Any, out_specs: Any = P("rows"), **options: Any) -> Any:
    return jax.shard_map(f, mesh=MESH, in_specs=in_specs, out_specs=out_specs, **options)


def test_alike():
    def f(x, y):
        assert varying_axes({"x": x, "y": [y, None]}) == {"rows"}
        assert varying_axes(y, 2.0) == frozenset()
        marked = vary_alike(x, {"y": y, "none": None})
        assert [varying_axes(a) for a in jax.tree.leaves(marked)] == [{"rows"}] * 2
        return marked[0] + marked[1]["y"]

    x, y = draw(4), draw(4, seed=1)
    np.testing.assert_array_equal(spread(f, (P("rows"), P()))(x, y), x + y)
    slope = jax.grad(lambda y: jnp.sum(spread(f, (P("rows"), P()))(x, y)))(y)
    np.testing.assert_array_equal(slope, jnp.ones(4))
    assert vary_alike(x, y) == (x, y)
    assert not varying_axes(x)


def linear_of(scheme: str, x, bias):
    return ops.linear(x, quantize(draw(8, 64, seed=2), scheme), bias)


def fp8_linear(x, weight):
    parts = {"weight": {...: weight}, "bias": None, "dtype": x.dtype, "implementation": "auto"}
    return fp8.Fp8Linear.__call__(types.SimpleNamespace(**parts), x)


PRODUCTS = {
    **{scheme: (functools.partial(linear_of, scheme), (8,)) for scheme in SCHEMES},
    "online ternary": (ops.bit_linear, (8, 64)),
    "fp8": (fp8_linear, (8, 64)),
    "plain": (ops.linear, (8, 64)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients_of_products_are_those_without(name):
    """Of x, of which each device has its rows, and of what all have: a bias, or a weight."""
    f, shape = PRODUCTS[name]
    x, other = draw(4, 64), draw(*shape, seed=1)

    def total(f, x, other):
        return jnp.sum(jnp.sin(f(x, other)))

    within = functools.partial(total, spread(f, (P("rows"), P())))
    found = jax.jit(jax.grad(within, (0, 1)))(x, other)
    wanted = jax.jit(jax.grad(functools.partial(total, f), (0, 1)))(x, other)
    for ours, plain in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("specs", [(P("rows"), P()), (P(), P("rows"))])
@pytest.mark.parametrize("settings", [{}, {"top_k": 3, "top_p": 0.9}])
def test_tokens_are_those_without(settings, specs):
    """Of rows that each have their settings, of which all devices have one or the other."""
    logits, positions = draw(2, 50), jnp.asarray([0, 1])
    settings = sampling.Sampling.of(2, temperature=1.0, seed=[3, 4], **settings)
    found = spread(sampling.sample, (*specs, P("rows")))(logits, settings, positions)
    np.testing.assert_array_equal(found, sampling.sample(logits, settings, positions))


def test_kernels_are_passed_over():
    """They cannot say what varies: each says so, to "auto" too, and by name they are refused."""
    x, weight = draw(4, 64).astype(jnp.bfloat16), jnp.ones(64, jnp.bfloat16)
    sentence = (
        "cannot run this call: its arrays vary over rows, which jax.shard_map checks and a kernel "
        "cannot tell; give it check_vma=False"
    )

    def reason(x, weight):
        calls = (ops.RMS_NORM, (x, weight), {"eps": 1e-6}), (ops.SCALE_SOFTMAX, (x,), {})
        for table, arrays, options in calls:
            for name in table.keys() - {"xla"}:
                found = table[name].why_not(*arrays, **options, device=INTERPRETED)
                assert found is not None
                assert sentence.endswith(found)
        return x

    spread(reason, (P("rows"), P()))(x, weight)
    kernel = functools.partial(rms_norm, eps=1e-6, interpret=True)
    named = functools.partial(ops.rms_norm, eps=1e-6, implementation="pallas-interpret")
    for f in (kernel, named):
        with pytest.raises(NotImplementedError, match=sentence):
            spread(f, (P("rows"), P()))(x, weight)


def test_a_kernel_runs_where_nothing_is_checked():
    x, weight = draw(4, 64).astype(jnp.bfloat16), draw(64, seed=1).astype(jnp.bfloat16)
    kernel = functools.partial(rms_norm, eps=1e-6, interpret=True)
    found = interpreted(spread(kernel, (P("rows"), P()), check_vma=False), x, weight)
    np.testing.assert_array_equal(found, interpreted(kernel, x, weight))


FOUR = """
import jax, jax.numpy as jnp, numpy as np
from jax import P
from jaxllm import ops
from pallas_kernels.quantize import quantize

mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
random = np.random.default_rng(0)
draw = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
x, weight, bias = draw(8, 64), draw(8, 64), draw(8)
packed, ids = quantize(weight, "int4"), jnp.asarray(random.integers(0, 8, 8))

for f, arrays in (
    (lambda x, bias: ops.linear(x, packed, bias), (x, bias)),
    (ops.bit_linear, (x, weight)),
    (lambda x, weight: x * ops.embedding(weight, ids[: len(x)]), (x, weight)),
):
    spread = jax.shard_map(f, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows"))
    alone = lambda x, other: jnp.concatenate([f(part, other) for part in jnp.split(x, 4)])
    slope = lambda g: jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(g(*a))), (0, 1)))(*arrays)
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    jax.tree.map(near, slope(spread), slope(alone))
"""


@pytest.mark.slow
def test_gradients_are_summed_over_four_devices():
    four = "--xla_force_host_platform_device_count=4"
    subprocess.run([sys.executable, "-c", FOUR], env={**os.environ, "XLA_FLAGS": four}, check=True)
