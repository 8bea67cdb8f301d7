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
from pallas_kernels.decode_layers_config import Plan
from pallas_kernels.decode_layers_lanes import Layers
from pallas_kernels.device import THREADS, WARPS
from pallas_kernels.lane_code import address_of, further, word

STREAM = ("x", "residual")  # entries that are the layer's input, which is no array of its own


def layers(
    plan: Plan, x, own: Sequence[Sequence[Any]], angles, slots, lengths, meeting
) -> tuple[Any, ...]:
    """y [1, D], the meeting, and of each layer the cache's k and v.

    x [1, D]. own: of each layer the arrays of `plan.entries` in their order, but for STREAM.
    angles: cos and sin, [1, H / 2] each; slots and lengths int32 [1]. meeting: as in `Meeting`, and
    a word for each key head; zeros, which come back so.
    Small arrays come as one, which a launch of XLA makes with what they are made of.
    """
    a, d, inner = plan.attend, x.shape[1], plan.gate_up.packed.shape[0] // 2
    entries = [entry for entry in plan.entries if entry[1] not in STREAM]
    dtypes: list[dict[str, Any]] = [{} for _ in plan.products]
    for (product, name), array in zip(entries, own[0], strict=True):
        if product is not None and name == "bias":
            dtypes[product][name] = array.dtype
    dtypes[0] |= dict.fromkeys(("cos", "sin"), jnp.dtype(jnp.float32))
    held = [product is None for product, _ in entries]  # k and v
    own = [
        [jax.new_ref(array) if mine else array for array, mine in zip(layer, held, strict=True)]
        for layer in own
    ]
    angles = jnp.concatenate([angle.astype(jnp.float32) for angle in angles], axis=1)
    half_bytes = a.width // 2 * angles.dtype.itemsize
    words = jax.new_ref(jnp.concatenate([slots, lengths, meeting]))

    def body(x_ref, own, angles_ref, words_ref, *results, **scratch):
        y, q, heads, middle, gated, parts, stats = results
        table = scratch.pop("table")
        products: list[dict[str, Any]] = [
            {"cos": angles_ref, "slots": words_ref, "out": q},
            {"x": heads, "out": middle},
            {"x": middle, "out": gated},
            {"x": gated, "residual": middle, "out": y},
        ]
        products = [{**each, **scratch} for each in products]
        around = {"q": q, "heads": heads, "parts": parts, "stats": stats, "table": table}
        around |= {"kept": scratch["kept"]}
        refs = (products, around, own, x_ref)
        types = jax.tree.map(lambda _: plgpu.RefType(), refs)

        @plgpu.inline_mgpu(arg_types=(*types, plgpu.Layout.WG_SPLAT))
        def run(_: Any, *given: Any) -> Any:
            *refs, block = given
            products, around, own, x = jax.tree.map(address_of, refs)
            products[0]["sin"] = further(products[0]["cos"], word(half_bytes))
            for name, start in (("lengths", 1), ("meeting", 2), ("counts", 2 + MEETING_WORDS)):
                around[name] = further(products[0]["slots"], word(4 * start))
            tables = []
            for layer in own:
                rest = iter(layer)
                tables.append([x if name in STREAM else next(rest) for _, name in plan.entries])
                x = products[-1]["out"]  # of the layer that follows
            Layers(plan, dtypes, products, around, block.registers.item()).run(tables)

        run(*refs, lax.axis_index("block"))  # pyright: ignore[reportCallIssue]

    scratch = {
        name: plgpu.SMEM((size_bytes,), jnp.uint8)
        for name, size_bytes in plan.scratch_bytes().items()
    }
    out_type = [
        jax.ShapeDtypeStruct((1, width), x.dtype)
        for width in (d, *[a.q_heads * a.width] * 2, d, inner)
    ]
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
        jax.freeze(ref) for layer in own for ref, mine in zip(layer, held, strict=True) if mine
    ]
    return results[0], jax.freeze(words)[2:], *caches
