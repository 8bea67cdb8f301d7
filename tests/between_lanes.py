"""`between_attentions` lane by lane and block by block: its code on a machine of Python."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from lane_blocks import Blocks, Part
from lane_machine import LANES, stand_in

from pallas_kernels import (
    between_attentions_bring,
    between_attentions_lanes,
    between_attentions_tiles,
    lane_arithmetic,
    lane_code,
    quantized_digits,
    quantized_finish,
    quantized_matmul_lanes,
    quantized_rows,
    quantized_unpack,
    ternary_rows,
)
from pallas_kernels.between_attentions import Config, plan_of
from pallas_kernels.between_attentions_lanes import Chain, begin
from pallas_kernels.device import Device

MODULES = (
    between_attentions_bring,
    between_attentions_lanes,
    between_attentions_tiles,
    lane_code,
    lane_arithmetic,
    quantized_digits,
    quantized_finish,
    quantized_matmul_lanes,
    quantized_rows,
    quantized_unpack,
    ternary_rows,
)
PARTS = ("codes", "scale", "zero", "row_scale")


def by_lanes(monkeypatch: Any, arguments: dict[str, Any], config: Config, blocks: int) -> Any:
    """The result, by so many multiprocessors' blocks."""
    x, link = arguments["x"], arguments["link"]
    device = Device("gpu", "NVIDIA H200", 9.0, blocks)
    plan = plan_of(x, link, config=config, device=device)
    assert plan.problem() is None
    held: dict[str, Any] = {name: arguments[name] for name in ("heads", "x")}
    held["meeting"] = np.zeros(2, np.uint32)
    widths, dtypes = [], []
    for i, (name, (weight, bias, norm)) in enumerate(link.products.items()):
        own = {part: getattr(weight, part) for part in PARTS}
        own |= {"bias": bias, "norm": None if norm is None else norm.weight}
        held |= {f"{part} {i}": a for part, a in own.items() if a is not None}
        widths.append(weight.shape[0] // (1 + (name == "gate_up")))
        dtypes.append({} if bias is None else {"bias": bias.dtype})
    rotary, cache = (None, None) if link.following is None else link.following[1:]
    if rotary is not None and cache is not None:
        widths[3] = 2 * rotary.cos.shape[1] * rotary.q_heads
        held |= {"cos": rotary.cos, "sin": rotary.sin, **cache._asdict()}
        dtypes[3] |= {"cos": rotary.cos.dtype, "sin": rotary.sin.dtype}
    held |= {f"out {i}": np.full((1, n), np.nan, x.dtype) for i, n in enumerate(widths)}
    held = {name: np.asarray(a) for name, a in held.items()}
    threads = config.warps * LANES
    machine = Blocks(held, plan.scratch_bytes(), threads + 4 * LANES, blocks)
    stand_in(monkeypatch, machine, MODULES)
    pointers = []
    for i in range(len(widths)):
        own = {name: machine.at[name] for name in plan.scratch_bytes()}
        own["x"] = machine.at["heads" if i == 0 else f"out {i - 1}"]
        names = [name for name in held if name.endswith(f" {i}")]
        own |= {name.split()[0]: machine.at[name] for name in names}
        if i in (0, 2):
            own["residual"] = machine.at["x" if i == 0 else "out 0"]
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
    y = machine.content("out 2", x.dtype, (1, widths[2]))
    if link.following is None:
        return y, None
    q = machine.content("out 3", x.dtype, (1, widths[3]))
    if cache is None:
        return y, (q,)
    return y, (q, *(machine.content(name, x.dtype, cache.k.shape) for name in "kv"))
