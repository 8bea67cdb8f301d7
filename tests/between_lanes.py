"""`between_attentions` lane by lane and block by block: its code on a machine of Python."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from lane_blocks import Blocks, Part
from lane_machine import LANES, stand_in

from pallas_kernels import (
    awaited,
    between_attentions_bring,
    between_attentions_join,
    between_attentions_lanes,
    between_attentions_tiles,
    lane_arithmetic,
    lane_code,
    meeting,
    quantized_digits,
    quantized_finish,
    quantized_matmul_lanes,
    quantized_rows,
    quantized_unpack,
    ternary_rows,
)
from pallas_kernels.between_attentions import Config, plan_of
from pallas_kernels.between_attentions_kernel import flows_of
from pallas_kernels.between_attentions_lanes import Chain, begin
from pallas_kernels.device import Device
from pallas_kernels.rms_norm import rms_norm_reference

MODULES = (
    awaited,
    between_attentions_bring,
    between_attentions_join,
    between_attentions_lanes,
    between_attentions_tiles,
    lane_code,
    lane_arithmetic,
    meeting,
    quantized_digits,
    quantized_finish,
    quantized_matmul_lanes,
    quantized_rows,
    quantized_unpack,
    ternary_rows,
)
PARTS = ("codes", "scale", "zero", "row_scale")


def by_lanes(
    monkeypatch: Any, arguments: dict[str, Any], config: Config, blocks: int, **how: Any
) -> Any:
    """The result, by so many multiprocessors' blocks; how: as `Blocks` has it."""
    x, link = arguments["x"], arguments["link"]
    device = Device("gpu", "NVIDIA H200", 9.0, blocks)
    plan = plan_of(x, link, config=config, device=device)
    assert plan.problem() is None
    held: dict[str, Any] = {name: arguments[name] for name in ("heads", "x")}
    held["meeting"] = np.zeros(2, np.uint32)
    widths, dtypes, post_norm = {}, [], None
    for i, (name, (weight, bias, *norms)) in enumerate(link.products.items()):
        norm, mine = (None if each is None else each.weight for each in norms)
        own = {part: getattr(weight, part) for part in PARTS}
        own |= {"bias": bias, "norm": norm, "post_norm": post_norm}
        held |= {f"{part} {i}": a for part, a in own.items() if a is not None}
        post_norm = mine  # before the next product
        widths[name] = weight.shape[0] // (1 + (name == "gate_up"))
        dtypes.append({} if bias is None else {"bias": bias.dtype})
    rotary, cache = (None, None) if link.following is None else link.following[1:]
    if rotary is not None and cache is not None:
        widths["qkv"] = 2 * rotary.cos.shape[1] * rotary.q_heads
        held |= {"cos": rotary.cos, "sin": rotary.sin, **cache._asdict()}
        dtypes[3] |= {"cos": rotary.cos.dtype, "sin": rotary.sin.dtype}
    flows, last, added = flows_of(plan)
    widths |= {flow["joined"]: x.shape[1] for flow in flows if "joined" in flow}
    held |= {name: np.full((1, n), np.nan, x.dtype) for name, n in widths.items()}
    held = {name: np.asarray(a) for name, a in held.items()}
    threads = config.warps * LANES
    machine = Blocks(held, plan.scratch_bytes(), threads + 4 * LANES, blocks, **how)
    stand_in(monkeypatch, machine, MODULES)
    pointers = []
    for i, flow in enumerate(flows):
        own = {name: machine.at[name] for name in plan.scratch_bytes()}
        own |= {name: machine.at[array] for name, array in flow.items()}
        names = [name for name in held if name.endswith(f" {i}")]
        own |= {name.split()[0]: machine.at[name] for name in names}
        if i == 3 and rotary is not None:
            own |= {name: machine.at[name] for name in ("cos", "sin", "k", "v", "slots")}
        pointers.append(own)

    parts = []
    for block in range(blocks):
        number, asked = machine.at_block(block), [partial(dict, own) for own in pointers]
        chip = {name: machine.at[name] for name in ("ring", "barriers")}
        chain = Chain(plan, dtypes, asked, machine.at["meeting"], number, **chip)
        begin(plan.config, machine.at["barriers"])
        parts.append(Part(block, 0, threads, chain.multiply))
        parts.append(
            Part(block, threads, threads + 4 * LANES, partial(chain.bring, chain.nothing_brought()))
        )
    machine.together(parts)
    assert not machine.content("meeting", np.uint32, (2,)).any()
    y = machine.content(last, x.dtype, x.shape)
    if added is not None:
        norm = link.down.post_norm
        z = machine.content("down", x.dtype, x.shape)
        y = y + np.asarray(rms_norm_reference(z, norm.weight, **norm.keywords))
    if link.following is None:
        return y, None
    q = machine.content("qkv", x.dtype, (1, widths["qkv"]))
    if cache is None:
        return y, (q,)
    return y, (q, *(machine.content(name, x.dtype, cache.k.shape) for name in "kv"))
