"""The kernel of `decode_layers`: layers in one launch, by blocks that stay.

There are as many blocks as multiprocessors, one on each, for they wait for each other. Imported
only by decode_layers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.between_attentions_config import BRINGING, MEETING_WORDS
from pallas_kernels.decode_layers_config import CACHE, COPIES, Plan
from pallas_kernels.decode_layers_lanes import Layers
from pallas_kernels.device import THREADS, WARPS
from pallas_kernels.lane_code import by_thread, further, word


def layers(
    plan: Plan, x, own: Sequence[Sequence[Any]], angles, slots, lengths, meeting
) -> tuple[Any, ...]:
    """y [1, D], the meeting, and of each layer the cache's k and v.

    x [1, D]. own: of each layer the arrays of `plan.own`, in their order.
    angles: cos and sin, [1, R / 2] each; slots and lengths int32 [1]. meeting: as in `Meeting`, and
    a word for each key head; zeros, which come back so.
    Small arrays come as one, which a launch of XLA makes with what they are made of.
    """
    a = plan.attend
    dtypes: list[dict[str, Any]] = [{} for _ in plan.products]
    for (product, name), array in zip(plan.own, own[0], strict=True):
        if product is not None and name == "bias":
            dtypes[product][name] = array.dtype
    held = [entry in CACHE for entry in plan.own]
    own = [
        [_compat.hold(array) if mine else array for array, mine in zip(layer, held, strict=True)]
        for layer in own
    ]
    angles = jnp.concatenate([angle.astype(x.dtype) for angle in angles], axis=1)
    half_bytes = a.half * angles.dtype.itemsize
    words = _compat.hold(jnp.concatenate([slots, lengths, meeting]))

    def body(x_ref, own, angles_ref, words_ref, *results, **scratch):
        shared = dict(zip(("y", "handed", "parts", "stats"), results, strict=True))
        shared |= {"x": x_ref, "angles": angles_ref, "words": words_ref}

        def run(addresses: Any, block: Any) -> None:
            at, chip, own = addresses
            at |= {"cos": at["angles"], "sin": further(at["angles"], word(half_bytes))}
            starts = {"slots": 0, "lengths": 1, "meeting": 2, "counts": 2 + MEETING_WORDS}
            at |= {name: further(at["words"], word(4 * i)) for name, i in starts.items()}
            Layers(plan, dtypes, at, chip, block).run(own)

        by_thread(run, (shared, scratch, own), lax.axis_index("block"))

    scratch = {
        name: plgpu.SMEM((size_bytes,), jnp.uint8)
        for name, size_bytes in plan.scratch_bytes().items()
    }
    widths = x.shape[1], COPIES * plan.handed_bytes // x.dtype.itemsize
    out_type = [jax.ShapeDtypeStruct((1, n), x.dtype) for n in widths]
    lead = (a.kv_heads, a.splits, a.group)
    out_type += [jax.ShapeDtypeStruct((*lead, n), jnp.float32) for n in (a.width, 2)]
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
    )(x, own, angles, words)
    caches = [
        _compat.let_go(ref) for layer in own for ref, mine in zip(layer, held, strict=True) if mine
    ]
    return results[0], _compat.let_go(words)[2:], *caches
