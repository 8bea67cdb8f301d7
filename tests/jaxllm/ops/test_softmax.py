"""Every implementation of scale, mask and softmax means the same: against float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import absent
from kernels import interpreted
from numerics import assert_as_accurate

from jaxllm.ops import explain, scale_softmax
from jaxllm.ops.softmax import SCALE_SOFTMAX

pytestmark = pytest.mark.usefixtures("strict_jax")

# x, dtype, mask, then arguments
CASES: dict[str, tuple[tuple[int, ...], Any, tuple[int, ...] | None, dict[str, Any]]] = {
    "plain": ((3, 24), jnp.float32, None, {}),
    "scale": ((2, 3, 40), jnp.bfloat16, None, {"scale": -0.5}),
    "causal": ((2, 3, 5, 16), jnp.float16, None, {"causal": True, "scale": 2.0}),
    "more queries than keys": ((2, 9, 8), jnp.float32, None, {"causal": True}),
    "mask of all heads": ((2, 3, 4, 32), jnp.float32, (2, 1, 4, 32), {"causal": True}),
    "another axis": ((3, 16, 5), jnp.bfloat16, (16, 1), {"axis": 1, "scale": 0.3}),
}


def arrays(shape, dtype, mask):
    rng = np.random.default_rng(0)
    x, d_y = (jnp.asarray(k * rng.standard_normal(shape), dtype) for k in (3, 1))
    mask = np.ones(shape[-1:], bool) if mask is None else rng.random(mask) < 0.6
    mask[(0,) * (mask.ndim - 1)] = False  # its first row
    return x, d_y, jnp.asarray(mask) if mask.ndim > 1 else None


def run(name: str, implementation: str):
    """y, d_x and d_scale: ours, the plain path, the truth."""
    shape, dtype, mask, kwargs = CASES[name]
    x, d_y, mask = arrays(shape, dtype, mask)
    scale, rest = kwargs.get("scale", 1.0), {k: v for k, v in kwargs.items() if k != "scale"}

    def call(x, d_y, mask, scale):
        def f(x, scale):
            return scale_softmax(x, scale=scale, mask=mask, **rest, implementation=implementation)

        y, pull = jax.vjp(f, x, scale)
        return y, *pull(d_y)

    if implementation == "pallas-interpret":
        ours = interpreted(call, x, d_y, mask, jnp.float32(scale))
    else:
        ours = jax.jit(call)(x, d_y, mask, jnp.float32(scale))
    sides = {**kwargs, "mask": None if mask is None else np.asarray(mask)}
    expected = []
    for kind in (dtype, np.float64):
        y = oracles.scale_softmax(np.asarray(x), **sides, dtype=kind)
        both = oracles.scale_softmax(np.asarray(x), **sides, d_y=np.asarray(d_y), dtype=kind)
        expected.append((y, *both))
    return ours, *expected


@pytest.mark.parametrize("implementation", ["auto", "xla", "pallas-interpret"])
@pytest.mark.parametrize("name", CASES)
def test_result_and_gradients(name, implementation):
    ours, plain, truth = run(name, implementation)
    assert ours[0].dtype == ours[1].dtype == CASES[name][1]
    for got, near, exact in zip(ours[:2], plain, truth, strict=False):
        assert_as_accurate(got, near, exact)
    d_scale, largest = ours[2], float(np.max(np.abs(truth[1]))) * truth[1].size
    assert_as_accurate(d_scale, plain[2], np.asarray(truth[2]), largest_term=largest)
    blind = truth[0] == 0
    for got in ours[:2]:
        assert np.all(np.asarray(got)[blind] == 0)


def test_some_rows_are_blind():
    for name in ("more queries than keys", "mask of all heads"):
        seen = (run(name, "xla")[2][0] > 0).any(axis=-1)
        assert seen.any()
        assert not seen.all()


def test_the_check_can_fail():
    ours, plain, truth = run("plain", "xla")
    for wrong in (ours[0].at[0, 3].multiply(1.05), ours[1], ours[0].astype(jnp.bfloat16)):
        with pytest.raises(AssertionError, match="error is"):
            assert_as_accurate(wrong, plain[0], truth[0])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"scale": float("nan")}, "scale is NaN"),
    ({"axis": (0, 1)}, r"axis must be an integer, got \(0, 1\)"),
    ({"axis": 1.0}, "axis must be an integer, got 1.0"),
    ({"axis": 2}, r"axis 2 is out of range for x \(4, 16\)"),
    ({"causal": True, "axis": 0}, "causal is over the last two axes"),
    ({"mask": jnp.ones((3, 16), bool)}, r"mask \(3, 16\) does not broadcast to x \(4, 16\)"),
    ({"mask": jnp.ones((4, 16))}, "the mask is float32; it must be boolean"),
]


@pytest.mark.own_errors
@pytest.mark.parametrize("implementation", SCALE_SOFTMAX)
def test_bad_arguments_are_refused_by_all(implementation):
    x = jnp.zeros((4, 16))
    for kwargs, sentence in BAD:
        with pytest.raises(ValueError, match=f"scale_softmax: .*{sentence}"):
            scale_softmax(x, **kwargs, implementation=implementation)
    with pytest.raises(ValueError, match="scale_softmax: x is int32; it must be floating point"):
        scale_softmax(jnp.zeros((4, 16), jnp.int32), implementation=implementation)


def test_who_runs():
    x, odd = (jax.ShapeDtypeStruct((64, width), jnp.bfloat16) for width in (512, 9))
    with absent("NVIDIA H200"):
        assert explain("scale_softmax", x)["pallas"] is None
        assert explain("scale_softmax", odd)["pallas"] == (
            "rows of 18 bytes are no multiple of 16 bytes, which the copy engine needs"
        )
        assert explain("scale_softmax", odd)["xla"] is None
    here = explain("scale_softmax", x)
    assert here["pallas"] is not None
    assert "runs only by name" in (here["pallas-interpret"] or "")
