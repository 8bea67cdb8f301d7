"""x as digits: every code by numbers large and small, against float64."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from between_calls import call
from between_lanes import MODULES, PARTS
from lane_blocks import Blocks
from lane_machine import LANES, stand_in

from pallas_kernels import lane_code
from pallas_kernels.between_attentions import Config, plan_of
from pallas_kernels.between_attentions_bring import Bring
from pallas_kernels.between_attentions_lanes import Chain
from pallas_kernels.between_attentions_tiles import DigitTiles
from pallas_kernels.device import Device
from pallas_kernels.quantized_digits import SPAN

WARPS, K, ROWS = 4, 1536, 16
FORMS = ("int8", "int8, groups", "int4", "int4, zero points")


def weight_of_every_code(form: str) -> Any:
    """16 rows of random codes among which every byte is, with the scales of another weight."""
    packed = call(128, 128, (K // 64, 1, 64), form)["link"].out.weight
    o, i = packed.codes.shape
    count = o * i // 256
    every = np.random.default_rng(1).permutation(np.repeat(np.arange(256, dtype=np.uint8), count))
    codes = every.view(packed.codes.dtype).reshape(o, i)
    assert len(np.unique(codes[:ROWS])) == 256
    return dataclasses.replace(packed, codes=jnp.asarray(codes))


def by_digits(monkeypatch: Any, packed: Any, x: np.ndarray) -> np.ndarray:
    """Of the weight's first 16 rows, by a warp's sums and those of the others."""
    arguments = call(128, 128, (K // 64, 1, 64), "int8")
    link = arguments["link"]
    link = link._replace(out=link.out._replace(weight=packed))
    device = Device("gpu", "NVIDIA H200", 9.0, 8)  # as many as tiles: nothing is folded
    plan = plan_of(arguments["x"], link, config=Config(WARPS, 1, 1), device=device)
    product = plan.products[0]
    assert not product.folded
    assert product.config.tile_n == ROWS
    held = {name: np.asarray(a) for name in PARTS if (a := getattr(packed, name)) is not None}
    shared = {**plan.scratch_bytes(), "found": 4 * WARPS * ROWS}
    machine = Blocks({**held, "x": x}, shared, WARPS * LANES, 1)
    stand_in(monkeypatch, machine, MODULES)
    block = machine.at_block(0)
    word = lane_code.word
    tiles = DigitTiles(product, {}, machine.at, block)
    tiles.keep(tiles.early(), lambda: None)
    barrier, stage, sums = machine.at["barriers"], machine.at["ring"], tiles.zeros()
    machine.asm("mbarrier.init.shared::cta.b64 [$0], 128;", "", barrier)
    bring = Bring(tiles, lane_code.mgpu_utils.thread_idx())
    begun = bring.begin(block)
    for each in range(product.rounds):
        round_ = word(each)
        bring.ask(begun, round_, stage, barrier)
        Chain._wait(barrier, word(each % 2))
        for which in range(2):
            sums = tiles.multiply(stage, round_, which, tiles.x_of(round_, which), sums)
    tiles.show(sums, machine.at["found"])
    found = machine.memory["shared"]["found"][1].view(np.float32).reshape(WARPS, ROWS)
    return found.astype(np.float64).sum(0)


def numbers(how: str) -> np.ndarray:
    """x [1, K] in bfloat16."""
    random = np.random.default_rng(0)
    normal = random.normal(size=K)
    x = {
        "normal": normal,
        "of many sizes": normal * 2.0 ** random.integers(-40, 1, K),
        "large": normal * 2.0**100,
        "small": normal * 2.0**-100,
        "below any unit": normal * 2.0**-118,  # and what float32 has as normal numbers
        "mantissas": (1 + np.arange(K) % 128 / 128) * 2.0 ** (np.arange(K) // 128 % 12),
        "zeros": np.where(np.arange(K) < SPAN, normal, 0.0),
    }[how]
    return np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16))[None]


def most_off(x: np.ndarray, weight: np.ndarray, form: str) -> np.ndarray:
    """By row: half a unit of each number, and the sums' roundings.

    A span's largest is 2^22 units at most, of int4's odd inputs, whose codes are 16 times as large,
    2^18; below 2^-105 it counts as that.
    """
    spans = x.reshape(-1, SPAN)
    unit = [2.0 ** (max(math.frexp(each)[1] - 1, -105) - 21) for each in np.abs(spans).max(1)]
    unit = np.repeat(unit, SPAN)
    if form.startswith("int4"):
        unit[1::2] *= 16
    terms = np.abs(weight * x)
    return np.abs(weight) @ unit / 2 + 16 * 2**-24 * terms.sum(1)


SIZES = ("normal", "of many sizes", "large", "small", "below any unit", "mantissas", "zeros")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", SIZES)
def test_every_code(how: str, form: str, monkeypatch: Any):
    packed, x = weight_of_every_code(form), numbers(how)
    weight = oracles.packed_numbers(dataclasses.replace(packed, row_scale=None))[:ROWS]
    ours, exact = by_digits(monkeypatch, packed, x), x[0].astype(np.float64)
    bound = most_off(exact, weight, form)
    error = np.abs(ours - weight @ exact)
    assert (error <= bound).all(), f"off by up to {(error / bound).max():.2f} of what is allowed"
    if how != "below any unit":  # the twin: a number that is off in its last bit
        exact[np.abs(exact).argmax()] *= 1 + 2**-7
        assert (np.abs(ours - weight @ exact) > bound).any()


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_none_behind_it(value: float, form: str, monkeypatch: Any):
    x = numbers("normal").copy()
    x[0, 700] = value
    assert np.isnan(by_digits(monkeypatch, weight_of_every_code(form), x)).all()
