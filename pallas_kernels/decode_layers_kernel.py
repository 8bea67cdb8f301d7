"""The kernel of `decode_layers`: layers in one launch, by blocks that stay.

There are as many blocks as multiprocessors, one on each, for they wait for each other. Imported
only by decode_layers.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.between_attentions_config import BRINGING
from pallas_kernels.decode_layers_config import CACHE, COPIES, Plan
from pallas_kernels.decode_layers_lanes import Layers
from pallas_kernels.device import THREADS, WARPS
from pallas_kernels.lane_code import by_thread, further, word


def side_by_side(
    words: Mapping[str, jax.Array], numbers: Mapping[str, jax.Array]
) -> tuple[jax.Array, dict[str, int]]:
    """Int32 arrays and then those of 16 bits as one, uint16, and at which byte each begins: in
    steps that XLA makes one launch of.
    """
    by = jnp.asarray([[0, 16]], jnp.int32)
    halves = {name: (each[:, None] >> by).astype(jnp.uint16) for name, each in words.items()}
    halves |= {name: lax.bitcast_convert_type(a, jnp.uint16) for name, a in numbers.items()}
    ends = itertools.accumulate(2 * each.size for each in halves.values())
    starts = dict(zip(halves, [0, *ends][:-1], strict=True))
    return jnp.concatenate([each.reshape(-1) for each in halves.values()]), starts


def layers(
    plan: Plan, x, own: Sequence[Sequence[Any]], angles, slots, lengths, meeting
) -> tuple[Any, ...]:
    """y [1, D], the meeting, and of each layer the cache's k and v.

    x [1, D]. own: of each layer the arrays of `plan.own`, in their order.
    angles: cos and sin, [1, R / 2] each; slots and lengths int32 [1]. meeting: as in `Meeting`;
    zeros, which come back so.
    Small arrays come as one, which a launch of XLA makes with what they are made of.
    """
    dtypes: list[dict[str, Any]] = [{} for _ in plan.products]
    for (product, name), array in zip(plan.own, own[0], strict=True):
        if product is not None and name == "bias":
            dtypes[product][name] = array.dtype
    held = [entry in CACHE for entry in plan.own]
    own = [
        [_compat.hold(array) if mine else array for array, mine in zip(layer, held, strict=True)]
        for layer in own
    ]
    cos, sin = (angle.astype(x.dtype) for angle in angles)
    small, starts = side_by_side(
        {"meeting": meeting, "slots": slots, "lengths": lengths}, {"cos": cos, "sin": sin}
    )
    small = _compat.hold(small)

    def body(x_ref, own, small_ref, *results, **scratch):
        shared = dict(zip(("y", "handed"), results, strict=True))
        shared |= {"x": x_ref, "small": small_ref}

        def run(addresses: Any, block: Any) -> None:
            at, chip, own = addresses
            at |= {name: further(at["small"], word(i)) for name, i in starts.items()}
            Layers(plan, dtypes, at, chip, block).run(own)

        by_thread(run, (shared, scratch, own), lax.axis_index("block"))

    scratch = {
        name: plgpu.SMEM((size_bytes,), jnp.uint8)
        for name, size_bytes in plan.scratch_bytes().items()
    }
    widths = x.shape[1], COPIES * plan.handed_bytes // x.dtype.itemsize
    out_type = [jax.ShapeDtypeStruct((1, n), x.dtype) for n in widths]
    results = _compat.kernel(
        body,
        name="decode_layers",
        out_type=out_type,
        scratch_types=scratch,
        grid=(plan.num_blocks,),
        grid_names=("block",),
        interpret=False,
        approx_math=True,
        num_threads=plan.config.warps // WARPS + BRINGING // THREADS,
        thread_name="group",
    )(x, own, small)
    caches = [
        _compat.let_go(ref) for layer in own for ref, mine in zip(layer, held, strict=True) if mine
    ]
    meeting = _compat.let_go(small)[: 2 * meeting.size].reshape(-1, 2)
    return results[0], lax.bitcast_convert_type(meeting, jnp.int32), *caches
