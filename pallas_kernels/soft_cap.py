"""The tanh of soft caps, in kernels of warpgroups.

tanh x = 1 - 2 / (exp(2 x) + 1). The GPU's own tanh has 11 bits, too few: scores of 25 under a cap
of 50 would be off by 0.01. A quotient is guarded against divisors beyond 2^126, four instructions
of which none is needed here: the reciprocal alone is one. A multiprocessor makes 16 reciprocals or
powers of two a clock, so several numbers may share a reciprocal: 1 / ab times b is 1 / a.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir.dialects import arith, vector
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import LOG2E
from pallas_kernels.lane_code import array_of

WRONG = 8e-7  # a bent score over its cap, at most; half of that where none shares a reciprocal
MOST = 512.0  # a cap: its scores are then wrong by 0.0004, as much as float16 rounds a weight
# Of powers of two that are multiplied four at a time: tanh is then 1 but for 2^-30
LARGEST_EXPONENT = 31.0


def why_not(cap: float | None) -> str | None:
    """What keeps a kernel from scores under this cap."""
    if cap is None or cap <= MOST:
        return None
    wrong = f"{WRONG * cap:.2g}"
    return f"scores under a soft cap of {cap} would be wrong by {wrong}; takes {MOST:g} at most"


def tanh(
    x: jax.Array, factor: Any, *, interpret: bool, layout: Any = plgpu.Layout.WGMMA
) -> jax.Array:
    """Of factor x, wrong by half of WRONG at most. x: float32 in `layout`; factor: a number."""
    return 1.0 + 2.0 * minus_sigmoid(x, factor, interpret=interpret, layout=layout)


def minus_sigmoid(
    x: jax.Array,
    factor: Any,
    *,
    interpret: bool,
    layout: Any = plgpu.Layout.WGMMA,
    together: int = 1,
) -> jax.Array:
    """-sigmoid(-2 factor x) = (tanh(factor x) - 1) / 2: an instruction less than `tanh`, for where
    a constant does not count, as in a softmax.

    together: 1, or as many numbers of a row as share a reciprocal, 2 or 4, of [64, a multiple of
    16] in Layout.WGMMA; where one of them is NaN, all are. It is wrong by half as much as a tanh.
    """
    assert together in (1, 2, 4), together
    exponents = x * (factor * (2 * LOG2E))
    if together > 1:
        exponents = jnp.minimum(exponents, LARGEST_EXPONENT)
    divisor = -1.0 - jnp.exp2(exponents)
    if interpret:
        return 1.0 / divisor

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout),
    )
    def reciprocal(_: Any, *arrays: Any) -> Any:
        """Alone 0 beyond 2^126, to which shared ones do not come."""
        (array,) = arrays
        one = array._lift_fast_instr("rcp.approx.ftz.f32")
        if together == 1:
            return array._pointwise(one)
        return array_of(_shared(array.registers, one, together), x.shape, layout)

    return reciprocal(divisor)


def _shared(registers: Any, reciprocal: Any, together: int) -> list[Any]:
    """The reciprocals of registers [1, columns / 8, ...], two numbers of a row each."""
    found = np.empty_like(registers)
    for place in np.ndindex(registers[:, ::2].shape):
        left, right = ((place[0], 2 * place[1] + i, *place[2:]) for i in range(2))
        a, b = registers[left], registers[right]
        both = arith.mulf(a, b)
        if together == 2:
            inverse = reciprocal(both)
        else:
            first, second = (vector.extract(both, [], [i]) for i in range(2))
            one = reciprocal(arith.mulf(first, second))
            pair = [arith.mulf(one, second), arith.mulf(one, first)]
            inverse = vector.from_elements(both.type, pair)
        found[left], found[right] = arith.mulf(inverse, b), arith.mulf(inverse, a)
    return list(found.flat)
