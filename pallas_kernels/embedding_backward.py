"""Sums of rows by id: what `embedding` has for a gradient. Imported by it alone.

dy [M, D], ids [M] -> [V, D], in two kernels. The first writes zeros where no id is, which takes the
time, and meanwhile brings the ids in order (`embedding_zeros_lanes`; XLA sorts more than
MOST_COUNTED of them, those that need more than 32 bits with a place, and those of the interpreter).
The second adds up, in float32, the rows of each id, one after another in their order
(`embedding_sums_lanes`). Nothing is added atomically, and two runs give the same bits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat
from pallas_kernels.embedding_sums_lanes import RUN, Order, Sums, sums_by_order
from pallas_kernels.embedding_zeros_lanes import BLOCKS, MOST_COUNTED, Keys, Zeros, zeros_and_order


def sum_by_id(
    dy: jax.Array,
    ids: jax.Array,
    *,
    count: int,
    dtype: Any,
    scale: float | None,
    num_sms: int,
    interpret: bool,
) -> jax.Array:
    """For each of `count` ids the sum of its rows, times `scale` (rounded to dy's dtype)."""
    rows, width = dy.shape
    scale = None if scale is None else float(dy.dtype.type(scale))
    by_id, dtype = _compat.WRITES_REFERENCES, jnp.dtype(dtype).name
    sums = Sums(rows, width, count, dy.dtype.name, dtype, scale, by_id)
    keys = Keys(count, (rows - 1).bit_length())
    counted = keys.fit and rows <= MOST_COUNTED and not interpret
    zeros = Zeros(sums, keys, BLOCKS * num_sms, counted)
    result, *order = zeros_and_order(zeros, ids, dy, interpret=interpret)
    inside = jnp.clip(ids, 0, count - 1)
    order = Order(*order) if counted else sorted_order(sums, keys, inside, *order)
    if by_id:
        held = _compat.hold(result)
        order = order._replace(arrivals=_compat.hold(order.arrivals))
        sums_by_order(sums, dy, order, held, interpret=interpret)
        return _compat.let_go(held)
    found = sums_by_order(sums, dy, order, interpret=interpret)
    here, behind, place = order.ids[:rows], order.ids[1 : rows + 1], jnp.arange(rows)
    # At the last row of each id is its sum; the others go outside, where they are dropped
    to = jnp.where(here != behind, here, count + place)
    return result.at[to].set(found, mode="drop", unique_indices=True)


def sorted_order(sums: Sums, keys: Keys, ids: jax.Array, arrivals: Any) -> Order:
    """The order by XLA, of ids [M] that are inside."""
    if keys.fit:
        place = jnp.arange(sums.rows, dtype=jnp.uint32)
        every = jnp.sort(ids.astype(jnp.uint32) << keys.shift | place, stable=False)
        places = every & jnp.uint32(2**keys.shift - 1)
        ids, places = (x.astype(jnp.int32) for x in (every >> keys.shift, places))
    else:
        places = jnp.argsort(ids, stable=True).astype(jnp.int32)
        ids = ids[places]
    lasts = ids[jnp.minimum(jnp.arange(sums.runs) * RUN + RUN - 1, sums.rows - 1)]
    begins = jnp.searchsorted(ids, ids[::RUN], method="scan_unrolled")
    ends = jnp.searchsorted(ids, lasts, side="right", method="scan_unrolled")
    more = (0, sums.order_shapes.ids[0] - sums.rows)
    return Order(
        jnp.pad(ids, more, constant_values=sums.count),
        jnp.pad(places, more),
        begins.astype(jnp.int32),
        ends.astype(jnp.int32),
        arrivals,
    )
