"""The code of a block of `quantized_matmul`, lane by lane, against float64 (`lane_machine`)."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from lane_machine import Machine, dialects, stand_in
from quantized_calls import BF16, DTYPES, F16, F32, FORMATS, assert_right, call

from pallas_kernels import (
    lane_arithmetic,
    lane_code,
    quantized_finish,
    quantized_matmul_lanes,
    quantized_rows,
    quantized_tma,
    quantized_unpack,
)
from pallas_kernels import quantized_matmul_config as sizes
from pallas_kernels.packed import PLAIN
from pallas_kernels.quantized_matmul_config import Config, Static

MODULES = (
    lane_code,
    lane_arithmetic,
    quantized_finish,
    quantized_matmul_lanes,
    quantized_rows,
    quantized_tma,
    quantized_unpack,
)


def by_lanes(monkeypatch: Any, arrays: Any, keywords: Any, config: Config) -> Any:
    """The result, by two multiprocessors' blocks."""
    x, packed, norm = arrays["x"], arrays["packed"], arrays.get("norm")
    gate, rotary = keywords.get("epilogue"), arrays.get("rotary")
    gate = gate if gate in oracles.GATES else None
    out = jnp.dtype(keywords.get("out_dtype") or x.dtype)
    around = (None, False) if norm is None else (norm.eps, norm.zero_centered)
    static = Static("", config, False, out.name, 2, gate, *around)
    m, n, c = len(x), packed.shape[0] // (1 + static.gated), config
    further = {}
    if rotary is not None:
        half, cache = rotary.cos.shape[1], arrays["cache"]
        heads = sizes.Heads(rotary.q_heads, rotary.kv_heads, half, cache.k.shape[1])
        static, n = dataclasses.replace(static, heads=heads), 2 * half * rotary.q_heads
        further = {"cos": rotary.cos, "sin": rotary.sin, **cache._asdict()}
    apart = static.apart(packed.shape[0])
    assert sizes.problem(config, len(x), packed, apart=apart) is None
    given = {name: getattr(packed, name) for name in ("codes", "scale", "zero", "row_scale")}
    given |= {"x": x, "norm": None if norm is None else norm.weight}
    given |= {name: arrays.get(name) for name in ("bias", "residual")} | further
    held = {name: np.asarray(a) for name, a in given.items() if a is not None}
    held["out"] = np.full((c.splits * m, n), np.nan, out)
    shared = {
        "ring": c.ahead * c.warps * sizes.warp_bytes(c, packed),
        "sums": sizes.sums_bytes(c, m, packed),
        **sizes.kept_bytes(c, m, packed),
        "parts": 2 * c.warps * m * c.tile_n * 4,
    }
    machine = Machine(held, shared, c.warps * 32)
    stand_in(monkeypatch, machine, MODULES)
    dtypes = {name: given[name].dtype for name in ("bias", "cos", "sin") if name in held}
    tiles = packed.shape[0] // c.tile_n
    for block in range(sizes.num_blocks(c, tiles, 2) * c.splits):
        start = block % c.splits * sizes.share(c, packed) * sizes.turn(packed.scheme)

        def code(at, start=start):
            of_block = quantized_matmul_lanes.Block(static, x, packed, dtypes, machine.at, at)
            if c.tma:
                of_block.ask()
                kept = machine.memory["shared"]["kept"][1]
                kept[:] = as_copied(x, start, sizes.numbers(c, packed))
            of_block.run()

        machine.run(block, code)
    y = machine.content("out", out, (c.splits, m, n)).sum(0)
    if rotary is None:
        return y
    return y, *(machine.content(name, out, further[name].shape) for name in "kv")


def as_copied(x: Any, start: int, numbers: int) -> np.ndarray:
    """Where the copy engine puts the bytes of numbers start and further: lines of 128 bytes, all
    rows of one side by side, row r's 16 bytes i where i ^ (r mod 8) would lie; zeros for what x has
    not.
    """
    rows, columns = np.asarray(x), -(-len(x) // 8) * 8
    wide = np.zeros((columns, start + numbers), rows.dtype)
    inside = min(rows.shape[1], start + numbers)
    wide[: len(rows), :inside] = rows[:, :inside]
    found = wide[:, start:].view(np.uint8).reshape(columns, -1, 8, 16).swapaxes(0, 1)
    r, i = np.arange(columns)[:, None], np.arange(8)
    return found[:, r, i ^ r % 8].reshape(-1)


HELD = partial(Config, held=True)  # x in registers
TMA = partial(HELD, tma=True)
OF_CODES: Any = {  # tile_n, warps, ahead, blocks, splits
    "": ((16, 4, 2, 1), partial(call, 16, 64, 1024, "int4", BF16, "residual")),
    ", a norm and two rounds of which one is short": (
        (16, 4, 2, 1),
        partial(call, 9, 64, 1152, "int4", BF16, "norm bias", epilogue="swiglu"),
    ),
    ", small groups": (
        (32, 4, 1, 1),
        partial(call, 2, 64, 896, "int4, groups of 32", F16, "bias"),
    ),
    ", zero points": ((32, 4, 1, 1), partial(call, 3, 64, 640, "int4, zero points")),
    ", splits": ((16, 4, 2, 1, 2), partial(call, 9, 64, 2304, "int4", out_dtype=F32)),
    ", a norm that adds 1": (
        (32, 4, 1, 1),
        partial(call, 9, 32, 640, "mxfp8", BF16, "norm centred"),
    ),
    ", int8": ((32, 8, 2, 1), partial(call, 12, 64, 1920, "int8", F16)),
    # Of 10 turns 4, 4 and 2
    ", splits, of which one is short": (
        (32, 4, 1, 2, 3),
        partial(call, 16, 64, 2432, "int4, groups of 64, zero points", F16, out_dtype=F32),
    ),
    ", heads": ((32, 4, 2, 1), partial(call, 16, 256, 512, "int4", BF16, "norm heads 2 1 64")),
}

CALLS: Any = {
    "int4": (Config(16, 4, 2, 1), partial(call, 1, 64, 896, "int4")),
    "norm": (Config(16, 4, 1, 2), partial(call, 1, 64, 896, "int4", BF16, "norm bias residual")),
    "norm, gate": (
        Config(32, 8, 2, 1),
        partial(call, 3, 64, 1024, "int8", BF16, "norm", epilogue="swiglu"),
    ),
    "norm that adds 1": (
        Config(32, 4, 1, 1),
        partial(call, 9, 32, 640, "mxfp8", BF16, "norm centred"),
    ),
    "norm, many accesses": (
        Config(16, 4, 2, 1),
        partial(call, 16, 16, 1152, "nvfp4", BF16, "norm bias"),
    ),
    "small groups": (
        Config(16, 4, 2, 1),
        partial(call, 9, 32, 512, "int4, groups of 32", F16, "bias"),
    ),
    "zero points": (Config(32, 4, 2, 1), partial(call, 2, 64, 512, "int4, zero points", F16)),
    "float32 result": (
        Config(16, 4, 3, 1),
        partial(call, 2, 32, 512, "mxfp4", BF16, "residual", out_dtype=F32),
    ),
    # Of 7 turns 4 and 3; of 10 turns 4, 4 and 2, the last of which ends with the row
    "splits": (Config(16, 4, 2, 1, 2), partial(call, 9, 64, 1792, "int4", BF16, out_dtype=F32)),
    "splits, of which one is short": (
        Config(32, 4, 1, 2, 3),
        partial(call, 16, 64, 2432, "int4, groups of 64, zero points", F16, out_dtype=F32),
    ),
    "splits of int8": (
        Config(16, 4, 1, 1, 4),
        partial(call, 3, 32, 896, "int8, groups", out_dtype=F32),
    ),
    "fp8, groups": (Config(16, 8, 1, 1), partial(call, 7, 32, 896, "fp8, groups", F16)),
    # Of 8 rows of either half
    "gate of half a tile": (
        Config(16, 4, 2, 1),
        partial(call, 2, 48, 640, "int4, groups of 32", BF16, "bias", epilogue="swiglu"),
    ),
    "heads": (Config(16, 4, 2, 1), partial(call, 1, 128, 896, "int4", BF16, "norm heads 2 1 32")),
    "heads, bias": (
        Config(32, 4, 1, 2),
        partial(call, 3, 256, 384, "int8", F16, "bias heads 2 1 64"),
    ),
    "heads, zero points": (
        Config(32, 4, 2, 1),
        partial(call, 9, 192, 512, "int4, groups of 64, zero points", BF16, "heads 2 2 32"),
    ),
    # Four results a thread, whose operands come late
    "heads of many rows": (
        Config(64, 4, 1, 1),
        partial(call, 16, 256, 256, "int8", BF16, "norm bias heads 2 1 64"),
    ),
    "many results": (
        Config(64, 4, 1, 1),
        partial(call, 9, 128, 256, "int8", BF16, "bias residual"),
    ),
    **{f"held{name}": (HELD(*tile), make) for name, (tile, make) in OF_CODES.items()},
    **{f"tma{name}": (TMA(*tile), make) for name, (tile, make) in OF_CODES.items()},
    "16 bits": (Config(16, 4, 2, 1), partial(call, 5, 48, 992, PLAIN, BF16, "residual")),
    "16 bits, a gate": (
        Config(32, 4, 3, 1),
        partial(call, 16, 64, 896, PLAIN, BF16, "norm bias", epilogue="swiglu"),
    ),
    "GELU's gate": (
        Config(32, 4, 2, 1),
        partial(call, 2, 64, 256, "int8", BF16, "norm centred", epilogue="geglu"),
    ),
    "16 bits, held": (HELD(16, 8, 2, 1), partial(call, 7, 64, 576, PLAIN, F16, "bias")),
    "16 bits, heads": (
        Config(32, 4, 2, 1),
        partial(call, 12, 256, 256, PLAIN, BF16, "norm bias heads 2 1 64"),
    ),
    "heads, scales of a byte": (
        Config(64, 4, 1, 1),
        partial(call, 2, 384, 256, "mxfp4", BF16, "bias heads 4 1 64"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_lanes(name: str, monkeypatch: Any):
    config, make = CALLS[name]
    arrays, keywords = make()
    with monkeypatch.context() as patched:
        ours = by_lanes(patched, arrays, keywords, config)
    assert_right(arrays, keywords, ours)


@pytest.mark.parametrize("make", [HELD, TMA])
def test_codes_that_are_not_zeros_where_there_are_none(make: Any, monkeypatch: Any):
    """Without groups code 0 is -8: x is 0 behind a block's 3 of 6 turns, where it has another's."""
    arrays, keywords = call(9, 32, 1536, out_dtype=F32)
    scale = arrays["packed"].scale[0].astype(F32)
    arrays["packed"] = dataclasses.replace(
        arrays["packed"], scale=None, row_scale=scale, group_size=None
    )
    with monkeypatch.context() as patched:
        ours = by_lanes(patched, arrays, keywords, make(16, 4, 1, 1, 2))
    assert_right(arrays, keywords, ours)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_by_lanes(form: str, dtype: str, monkeypatch: Any):
    if dtype == "float16" and form.startswith("mx"):
        pytest.skip("not taken")
    arrays, keywords = call(1, 16, 1024, form, DTYPES[dtype])
    packed = arrays["packed"]
    codes = np.arange(packed.codes.size).reshape(packed.codes.shape).astype(np.uint8)
    if packed.codes.dtype != jnp.uint8:
        codes = codes.view(packed.codes.dtype)
        codes = np.where(np.isnan(codes.astype(np.float32)), 0, codes).astype(codes.dtype)
    arrays["packed"] = dataclasses.replace(packed, codes=jnp.asarray(codes))
    with monkeypatch.context() as patched:
        ours = by_lanes(patched, arrays, keywords, Config(16, 4, 2, 1))
    assert_right(arrays, keywords, ours)


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("held")])
def test_what_is_held_is_read_once(name: str, monkeypatch: Any):
    """However many tiles a block has; and the bits are those without."""
    config, make = CALLS[name]
    arrays, keywords = make()
    places, read = [], Machine.load

    def watched(machine: Any, space: str, addresses: Any, size: int, count: int) -> Any:
        if space == "shared":
            places.append((machine.memory["shared"]["kept"], addresses[0]))
        return read(machine, space, addresses, size, count)

    def reads(config: Config) -> tuple[int, Any]:
        places.clear()
        with monkeypatch.context() as patched:
            patched.setattr(Machine, "load", watched)
            ours = by_lanes(patched, arrays, keywords, config)
        inside = [start <= at < start + len(content) for (start, content), at in places]
        return sum(inside), ours

    (held, ours), (anew, same) = reads(config), reads(dataclasses.replace(config, held=False))
    tiles = arrays["packed"].shape[0] // config.tile_n
    of_block = tiles // sizes.num_blocks(config, tiles, 2)
    if "norm" not in arrays:  # whose sums of squares lie there, too
        assert held * of_block == anew
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("name", [name for name in CALLS if "tma" in name])
def test_lanes_that_read_x_together_find_all_banks(name: str, monkeypatch: Any):
    """Where the copy engine has put it: 8 lanes at a time, 16 bytes each."""
    config, make = CALLS[name]
    arrays, keywords = make()
    banks, read = [], Machine.load

    def watched(machine: Machine, space: str, addresses: Any, size: int, count: int) -> Any:
        start, content = machine.memory["shared"]["kept"]
        if space == "shared" and start <= addresses[0] < start + len(content):
            banks.append(addresses.astype(np.int64).reshape(-1, 8) // 16 % 8)
        return read(machine, space, addresses, size, count)

    with monkeypatch.context() as patched:
        patched.setattr(Machine, "load", watched)
        by_lanes(patched, arrays, keywords, config)
    for each in banks:
        np.testing.assert_array_equal(np.sort(each), np.tile(np.arange(8), (len(each), 1)))
    tiles = len(arrays["packed"].codes) // config.tile_n
    blocks = sizes.num_blocks(config, tiles, 2) * config.splits
    held = sizes.held_words(config, len(arrays["x"]), arrays["packed"])
    assert len(banks) == blocks * held // 4  # and each access once


def test_another_norm_is_seen(monkeypatch: Any):
    config, make = CALLS["norm"]
    arrays, keywords = make()
    other = {**arrays, "norm": arrays["norm"]._replace(eps=0.05)}
    with monkeypatch.context() as patched:
        ours = by_lanes(patched, other, keywords, config)
    with pytest.raises(AssertionError, match="error is"):
        assert_right(arrays, keywords, ours)


@pytest.mark.parametrize("part", ["cos", "slots"])
def test_other_heads_are_seen(part: str, monkeypatch: Any):
    config, make = CALLS["heads, bias"]
    arrays, keywords = make()
    rotary, cache = arrays["rotary"], arrays["cache"]
    other = {"rotary": rotary._replace(cos=rotary.cos.at[2, 3].multiply(0.9))}
    if part == "slots":
        other = {"cache": cache._replace(slots=cache.slots.at[1].set(0))}
    with monkeypatch.context() as patched:
        ours = by_lanes(patched, {**arrays, **other}, keywords, config)
    with pytest.raises(AssertionError, match="error is"):
        assert_right(arrays, keywords, ours)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_what_no_lane_asks_for_is_zero(dtype: Any, monkeypatch: Any):
    machine = Machine({"numbers": np.arange(1, 33).astype(dtype)}, {}, 32)
    lane = dialects(machine)["mgpu_utils"].thread_idx()
    stand_in(monkeypatch, machine, [lane_code])
    size = jnp.dtype(dtype).itemsize
    address = lane_code.further(machine.at["numbers"], lane_code.times(lane, size))
    some = lane_code.load_float(address, jnp.dtype(dtype).name, lane_code.less(lane, 5))
    found = some.bits.astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(found, np.where(np.arange(32) < 5, np.arange(1, 33), 0))
    if dtype == F32:
        words = lane_code.load_word(address, lane_code.less(lane, 5))
        bits = words.bits.astype(np.uint32)
        assert (bits[5:] == 0).all()
        assert (bits[:5] != 0).all()
