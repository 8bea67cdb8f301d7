"""The tanh of soft caps, in kernels of warpgroups.

tanh x = 1 - 2 / (exp(2 x) + 1). The GPU's own tanh has 11 bits, too few: scores of 25 under a cap
of 50 would be off by 0.01. A quotient is guarded against divisors beyond 2^126, four instructions
of which none is needed here: the reciprocal alone is one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention_reference import LOG2E

WRONG = 4e-7  # a tanh, at most
MOST = 1024.0  # a cap: its scores are then wrong by 0.0004, as much as float16 rounds a weight


def why_not(cap: float | None) -> str | None:
    """What keeps a kernel from scores under this cap."""
    if cap is None or cap <= MOST:
        return None
    wrong = f"{WRONG * cap:.2g}"
    return f"scores under a soft cap of {cap} would be wrong by {wrong}; takes {MOST:g} at most"


def tanh(
    x: jax.Array, factor: Any, *, interpret: bool, layout: Any = plgpu.Layout.WGMMA
) -> jax.Array:
    """Of factor x, wrong by 4e-7 at most. x: float32 in `layout`; factor: a number."""
    return 1.0 + 2.0 * minus_sigmoid(x, factor, interpret=interpret, layout=layout)


def minus_sigmoid(
    x: jax.Array, factor: Any, *, interpret: bool, layout: Any = plgpu.Layout.WGMMA
) -> jax.Array:
    """-sigmoid(-2 factor x) = (tanh(factor x) - 1) / 2: an instruction less than `tanh`, for where
    a constant does not count, as in a softmax.
    """
    divisor = -1.0 - jnp.exp2(x * (factor * (2 * LOG2E)))
    if interpret:
        return 1.0 / divisor

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout),
    )
    def reciprocal(_: Any, *arrays: Any) -> Any:
        """0 beyond 2^126."""
        (array,) = arrays
        return array._pointwise(array._lift_fast_instr("rcp.approx.ftz.f32"))

    return reciprocal(divisor)
