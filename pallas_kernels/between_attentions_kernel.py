"""The kernel of `between_attentions`: a layer's products in one launch, by blocks that stay.

There are as many blocks as multiprocessors, one on each, for behind each product they wait for each
other. Imported only by between_attentions.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.between_attentions_config import BRINGING, NAMES, NormNumbers, Plan
from pallas_kernels.between_attentions_lanes import Chain
from pallas_kernels.device import THREADS, WARPS
from pallas_kernels.lane_code import by_thread
from pallas_kernels.packed import Packed
from pallas_kernels.rms_norm import rms_norm_reference

PARTS = ("codes", "scale", "zero", "row_scale")


def products(
    plan: Plan,
    heads,
    x,
    weights: Sequence[Packed],
    biases,
    norms,
    post_norms,
    angles,
    cache,
    meeting,
) -> tuple[Any, ...]:
    """y [1, D]; q [1, N H], keys and values where heads of the next layer are turned, where not its
    product [1, (N + 2K) H]; meeting.

    heads [1, N H], x [1, D]. weights, biases, norms, post_norms: of each product of the plan, None
    where there is none. angles: cos and sin, [1, H / 2] each. meeting: int32 [2] of zeros, which
    come back so.
    """
    parts = [{name: getattr(weight, name) for name in PARTS} for weight in weights]
    joined = (None, *post_norms[:-1])  # what the product before gave
    around = (
        {"bias": bias, "norm": norm, "post_norm": post_norm}
        for bias, norm, post_norm in zip(biases, norms, joined, strict=True)
    )
    given = [
        {name: a for name, a in (own | more).items() if a is not None}
        for own, more in zip(parts, around, strict=True)
    ]
    dtypes = [{name: own[name].dtype for name in ("bias",) if name in own} for own in given]
    flows, y, last = flows_of(plan)
    d = x.shape[1]
    widths = {"out": d, "gate_up": weights[1].shape[0] // 2, "down": d}
    if len(weights) == len(NAMES):
        widths["qkv"] = weights[-1].shape[0] if cache is None else heads_width(plan)
    widths |= {own["joined"]: d for own in flows if "joined" in own}
    held = None
    if cache is not None:
        dtypes[-1] |= {"cos": angles[0].dtype, "sin": angles[1].dtype}
        held = (_compat.hold(cache.k), _compat.hold(cache.v), cache.slots)
    meeting = _compat.hold(meeting)

    def body(heads_ref, x_ref, given, angle_refs, held, meeting_ref, *results, **scratch):
        at = {"heads": heads_ref, "x": x_ref, **dict(zip(widths, results, strict=True))}
        own: list[Any] = [
            {**refs, **scratch, **{name: at[array] for name, array in flow.items()}}
            for refs, flow in zip(given, flows, strict=True)
        ]
        if held is not None:
            own[NAMES.index("qkv")] |= dict(zip(("cos", "sin"), angle_refs, strict=True))
            own[NAMES.index("qkv")] |= dict(zip(("k", "v", "slots"), held, strict=True))

        def run(at: Any, block: Any) -> None:
            pointers, meeting = at
            chip = {name: pointers[0][name] for name in ("ring", "barriers")}
            asked = [functools.partial(dict, own) for own in pointers]
            Chain(plan, dtypes, asked, meeting, block, **chip).run()

        by_thread(run, (own, meeting_ref), lax.axis_index("block"))

    scratch = {
        name: plgpu.SMEM((size_bytes,), jnp.uint8)
        for name, size_bytes in plan.scratch_bytes().items()
    }
    results = _compat.kernel(
        body,
        name="between_attentions",
        out_type=[jax.ShapeDtypeStruct((1, width), x.dtype) for width in widths.values()],
        scratch_types=scratch,
        grid=(plan.num_blocks,),
        grid_names=("block",),
        interpret=False,
        approx_math=True,
        num_threads=plan.config.warps // WARPS + BRINGING // THREADS,
        thread_name="group",
    )(heads, x, given, angles, held, meeting)
    found = dict(zip(widths, results, strict=True))
    result = found[y]
    if last is not None:  # no product follows that would add it
        how = last._asdict()
        result = result + rms_norm_reference(found["down"], post_norms[-1], **how)
    after = [found["qkv"]] if "qkv" in found else []
    kv = [] if held is None else [_compat.let_go(held[0]), _compat.let_go(held[1])]
    return result, *after, *kv, _compat.let_go(meeting)


def flows_of(plan: Plan) -> tuple[list[dict[str, str]], str, NormNumbers | None]:
    """Of each product which array is what to it, of heads, x, and results: those of products by
    their names, and sums with a norm of one; which is y, and the norm of what is still to be added.
    """
    flows: list[dict[str, str]] = []
    source, stream, post_norm = "heads", "x", None
    for product in plan.products:
        name = product.static.name
        flow = {"x": source, "out": name}
        if post_norm is not None:
            flow |= {"stream": stream, "joined": f"x behind {source}"}
            stream = flow["joined"]
        post_norm = product.post_norm
        if name in ("out", "down") and post_norm is None:
            flow["residual"] = stream
            stream = name
        flows.append(flow)
        source = name
    return flows, stream, post_norm


def heads_width(plan: Plan) -> int:
    """Of the queries that are made."""
    heads = plan.products[-1].static.heads
    assert heads is not None, "there is a next layer"
    return 2 * heads.half * heads.q
