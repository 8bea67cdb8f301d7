"""The tanh of soft caps, of what wgmma has summed.

tanh x = 1 - 2 / (exp(2 x) + 1). The GPU's own tanh has 11 bits, too few: scores of 25 under a cap
of 50 would be off by 0.01. A quotient is guarded against divisors beyond 2^126, four instructions
of which none is needed here: the reciprocal alone is one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention_reference import LOG2E
from pallas_kernels.lane_code import asm


def tanh(x: jax.Array, factor: Any, *, interpret: bool) -> jax.Array:
    """Of factor x, float32 in Layout.WGMMA, wrong by 4e-7 at most. factor: a number."""
    return 1.0 + 2.0 * half_below(x, factor, interpret=interpret)


def half_below(x: jax.Array, factor: Any, *, interpret: bool) -> jax.Array:
    """(`tanh` - 1) / 2, an instruction less: where a constant does not count, as in a softmax."""
    power = jnp.exp2(x * (factor * (2 * LOG2E)))
    return _reciprocal(-1.0 - power, interpret=interpret)


def _reciprocal(x: jax.Array, *, interpret: bool) -> jax.Array:
    """1 / x where |x| is 1 or more; 0 beyond 2^126."""
    if interpret:
        return 1.0 / x

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def of_registers(_: Any, *arrays: Any) -> Any:
        (array,) = arrays
        registers = np.empty(array.registers.shape, dtype=object)
        for place, pair in np.ndenumerate(array.registers):
            for i in range(2):
                at = {"dynamic_position": [], "static_position": ir.DenseI64ArrayAttr.get([i])}
                done = asm("rcp.approx.ftz.f32 $0, $1;", "f", vector.extract(pair, **at))
                pair = vector.insert(done, pair, **at)
            registers[place] = pair
        layout = fragmented_array.WGMMA_LAYOUT
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return of_registers(x)
