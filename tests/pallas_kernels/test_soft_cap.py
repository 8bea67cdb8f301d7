"""The tanh of soft caps against float64: as the interpreter has it, and on a GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernels import interpreted

from jaxllm import aot
from pallas_kernels import (
    _compat,
    decode_attention,
    flash_attention,
    linear_cross_entropy,
    soft_cap,
)

pytestmark = pytest.mark.usefixtures("strict_jax")

F32 = jnp.float32
# Both signs; the smallest normal number, and beyond where exp is infinite
POSITIVE = np.concatenate([[0.0, 2.0**-126, 1e4, np.inf], np.geomspace(1e-6, 120, 1020)])
NUMBERS = np.stack([POSITIVE, -POSITIVE]).reshape(64, 32).astype(np.float32)
# Large and small ones share a reciprocal
NUMBERS = np.random.default_rng(0).permutation(NUMBERS.ravel()).reshape(64, 32)
BOUND = {1: 4e-7, 2: 8e-7, 4: 8e-7}  # by how many share a reciprocal: what WRONG says


def call(factor: Any, together: int = 1, *, interpret: bool) -> Any:
    """minus_sigmoid and tanh of NUMBERS, a tile of wgmma."""

    def kernel(x_ref, out_ref, other_ref):
        x = _compat.load(x_ref, plgpu.Layout.WGMMA, optimized=False)
        out_ref[...] = soft_cap.minus_sigmoid(x, factor, interpret=interpret, together=together)
        other_ref[...] = soft_cap.tanh(x, factor, interpret=interpret)

    shape = jax.ShapeDtypeStruct(NUMBERS.shape, F32)
    return _compat.kernel(
        kernel,
        name="soft_cap",
        out_type=(shape, shape),
        grid=(1,),
        grid_names=("block",),
        interpret=interpret,
        approx_math=True,
    )


def assert_right(found: Any, factor: float, together: int = 1) -> None:
    half, whole = (np.asarray(x).astype(np.float64) for x in found)
    truth = np.tanh(factor * NUMBERS.astype(np.float64))
    assert np.abs(whole - truth).max() < BOUND[1]
    assert np.abs(half - (truth - 1) / 2).max() < BOUND[together] / 2
    of_eleven_bits = truth.astype(np.float16)
    assert np.abs(of_eleven_bits - truth).max() > 100 * BOUND[together]


@pytest.mark.parametrize("together", BOUND)
@pytest.mark.parametrize("factor", [1.0, -0.02])
def test_interpreted(factor: float, together: int):
    found = interpreted(call(factor, together, interpret=True), jnp.asarray(NUMBERS))
    assert_right(found, factor, together)


def test_a_cap_that_leaves_no_digits_is_refused():
    """A cap of 1e30 does nothing, but kernels would make 0 of every score."""
    assert soft_cap.why_not(None) is soft_cap.why_not(50.0) is soft_cap.why_not(512.0) is None
    heads, ids = jnp.zeros((1, 1, 1, 64), jnp.bfloat16), jnp.zeros((1,), jnp.int32)
    calls = (
        (flash_attention, (heads, heads, heads)),
        (decode_attention, (heads, heads, heads, ids)),
        (linear_cross_entropy, (heads[0, 0], heads[0, 0], ids)),
    )
    for f, arrays in calls:
        said = rf"^{f.__name__}: .*under a soft cap of 1e\+30 would be wrong by 8e\+23; takes 512"
        with pytest.raises(NotImplementedError, match=said):
            f(*arrays, softcap=1e30, interpret=True)


@pytest.mark.aot
@pytest.mark.parametrize("together", BOUND)
def test_the_reciprocal_is_one_instruction(together: int):
    shape = jax.ShapeDtypeStruct(NUMBERS.shape, F32)
    program = aot.compile_for(call(1.0, together, interpret=False), shape)
    kernel = program.kernel("soft_cap")
    # `tanh` has one for each number; alone, `minus_sigmoid` has the same, which are made once
    shared = 0 if together == 1 else NUMBERS.size // together
    assert kernel.count("MUFU", "RCP") == (NUMBERS.size + shared) // 128
    assert not kernel.count("FSETP")


@pytest.mark.gpu
@pytest.mark.parametrize("together", BOUND)
@pytest.mark.parametrize("factor", [1.0, -0.02])
def test_on_a_gpu(factor: float, together: int):
    found = jax.jit(call(factor, together, interpret=False))(jnp.asarray(NUMBERS))
    assert_right(found, factor, together)
