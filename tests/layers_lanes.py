"""`decode_layers` lane by lane and block by block: its code on a machine of Python."""

from __future__ import annotations

from typing import Any

import numpy as np
from between_lanes import MODULES as OF_PRODUCTS
from lane_blocks import Blocks, Part
from lane_machine import LANES, stand_in

from pallas_kernels import decode_layers_attention, decode_layers_lanes, decode_layers_turn
from pallas_kernels.between_attentions_config import MEETING_WORDS
from pallas_kernels.decode_layers import _own, plan_of
from pallas_kernels.decode_layers_config import COPIES, Config
from pallas_kernels.decode_layers_lanes import Layers
from pallas_kernels.device import Device

MODULES = (*OF_PRODUCTS, decode_layers_attention, decode_layers_lanes, decode_layers_turn)


def by_lanes(
    monkeypatch: Any, arguments: dict[str, Any], config: Config, blocks: int, **how: Any
) -> Any:
    """The result, by so many multiprocessors' blocks; how: as `Blocks` has it."""
    x, layers, token = (arguments[name] for name in ("x", "layers", "token"))
    device = Device("gpu", "NVIDIA H200", 9.0, blocks)
    plan = plan_of(x, layers, token, config=config, device=device)
    assert plan.problem() is None
    d, names = x.shape[1], plan.own
    held: dict[str, Any] = {"x": x, "slots": token.slots, "lengths": token.kv_lengths}
    held |= {name: getattr(token.rotary, name).astype(x.dtype) for name in ("cos", "sin")}
    held["meeting"] = np.zeros(MEETING_WORDS, np.uint32)
    for i, layer in enumerate(layers):
        held |= {f"{i} {name}": a for name, a in zip(names, _own(plan, layer), strict=True)}
    held["y"] = np.full((1, d), np.nan, x.dtype)
    held["handed"] = np.ones(COPIES * plan.handed_bytes // 2, x.dtype)  # of another call
    held = {name: np.asarray(array) for name, array in held.items()}
    threads = config.warps * LANES
    machine = Blocks(held, plan.scratch_bytes(), threads + 4 * LANES, blocks, **how)
    stand_in(monkeypatch, machine, MODULES)
    at = machine.at
    chip = {name: at[name] for name in plan.scratch_bytes()}
    dtypes: list[dict[str, Any]] = [{} for _ in plan.products]
    for (product, name), array in zip(names, _own(plan, layers[0]), strict=True):
        if name == "bias":
            dtypes[product][name] = array.dtype
    shared = ("x", "y", "cos", "sin", "slots", "lengths", "meeting", "handed")
    around = {name: at[name] for name in shared}
    own = [[at[f"{i} {entry}"] for entry in names] for i in range(len(layers))]
    parts = []
    for block in range(blocks):
        run = Layers(plan, dtypes, around, chip, machine.at_block(block))
        run.begin(own)
        parts.append(Part(block, 0, threads, run.multiply))
        parts.append(Part(block, threads, threads + 4 * LANES, run.bring))
    machine.together(parts)
    assert not machine.content("meeting", np.uint32, held["meeting"].shape).any()
    y = machine.content("y", x.dtype, (1, d))
    shape = layers[0].k.shape
    return y, [
        tuple(machine.content(f"{i} {(None, name)}", x.dtype, shape) for name in "kv")
        for i in range(len(layers))
    ]
