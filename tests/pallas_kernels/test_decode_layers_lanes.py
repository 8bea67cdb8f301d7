"""The code of `decode_layers`, lane by lane and block by block, against float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from layers_calls import assert_right, call, poisoned
from layers_lanes import by_lanes

from pallas_kernels import (
    awaited,
    decode_layers_attention,
    decode_layers_lanes,
    decode_layers_turn,
    quantized_finish,
)
from pallas_kernels.awaited import AWAITED
from pallas_kernels.decode_layers import plan_of
from pallas_kernels.decode_layers_attention import Attention, Seen
from pallas_kernels.decode_layers_config import COPIES, LATER, SLACK, Config
from pallas_kernels.decode_layers_turn import Turn
from pallas_kernels.device import Device
from pallas_kernels.lane_code import load_late, store_float
from pallas_kernels.meeting import EarlyMeeting
from pallas_kernels.packed import PLAIN

# Of few heads an error of one score is that of all that they see
SEVERAL = partial(
    call, 128, 128, (8, 1, 128), layers=3, slots=100, keys=99, slot=50, head_norms="qk", scale=0.3
)
# Blocks, and what they have
CALLS: Any = {
    "16 bits, bias": (Config(4, 3, 2), 3, partial(call, 128, 192, (4, 2, 64), bias=True)),
    "several blocks a head": (
        Config(4, 3, 2, turns=1),
        5,
        partial(call, 128, 192, (2, 2, 128), slots=100, keys=99),
    ),
    "a window, int4": (
        Config(4, 3, 2, turns=1),
        3,
        partial(call, 128, 256, (4, 1, 64), "int4", slots=120, keys=110, window=100),
    ),
    "narrow heads, int8": (
        Config(4, 2, 1, turns=2),
        4,
        partial(call, 128, 128, (8, 1, 32), "int8", layers=3, slots=60, keys=60),
    ),
    "one key": (Config(4, 2, 2), 2, partial(call, 128, 128, (2, 1, 96), layers=1, slots=8, keys=1)),
    "a row that has ended, and is full": (
        Config(4, 2, 2),
        3,
        partial(call, 128, 128, (2, 1, 64), slots=20, keys=20, slot=20, length=21),
    ),
    "a full ring": (
        Config(4, 2, 2),
        3,
        partial(call, 128, 128, (2, 1, 64), slots=24, keys=24, slot=7, window=24, scale=0.3),
    ),
    "no keys before it, a length that is none": (
        Config(4, 2, 2),
        3,
        partial(call, 128, 128, (2, 1, 64), slots=8, slot=0, length=-3, centred=True),
    ),
    "GELU's gate": (Config(4, 2, 2), 3, partial(call, 128, 128, (2, 1, 64), gate="geglu")),
    "a token's key amid others": (Config(4, 3, 2, turns=1), 3, SEVERAL),
    "one norm, zero-centred, int4": (
        Config(4, 2, 2, turns=1),
        3,
        partial(
            call, 128, 128, (4, 1, 96), "int4", head_norms="k", centred=True, slots=80, keys=77
        ),
    ),
    "a slot before the window": (
        Config(4, 3, 2, turns=1),
        3,
        partial(
            call, 128, 128, (8, 1, 128), layers=1, slots=100, keys=40, slot=3, window=8, scale=0.3
        ),
    ),
    "a slot behind the keys": (
        Config(8, 2, 2),
        2,
        partial(call, 128, 256, (8, 1, 96), slots=40, keys=30, slot=33, turned=80, head_norms="qk"),
    ),
    "a part of each head is turned": (
        Config(4, 2, 2),
        3,
        partial(call, 128, 128, (3, 1, 128), turned=96, head_norms="q", slot=7, scale=0.3),
    ),
    "more layers than copies": (
        Config(4, 2, 2, turns=1),
        5,
        partial(call, 128, 128, (2, 1, 64), layers=6, slots=100, keys=99),
    ),
    "ternary, norms": (
        Config(4, 2, 1),
        5,
        partial(call, 128, 512, (4, 4, 64), "ternary", sub_norms=True, gate="relu2_glu"),
    ),
}


@pytest.mark.parametrize("all_late", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_lanes(name: str, all_late: bool, monkeypatch: pytest.MonkeyPatch):
    config, blocks, make = CALLS[name]
    arguments = make()
    with monkeypatch.context() as patched:
        ours = by_lanes(
            patched, poisoned(arguments), config, blocks, late=range(blocks) if all_late else ()
        )
    assert_right(arguments, ours)


def test_a_block_alone(monkeypatch: pytest.MonkeyPatch):
    """Nobody to wait for, and all heads and tiles are its own."""
    arguments = call(128, 128, (2, 1, 64), PLAIN)
    assert_right(arguments, by_lanes(monkeypatch, poisoned(arguments), Config(4, 2, 1), 1))


def test_what_comes_in_is_not_awaited(monkeypatch: pytest.MonkeyPatch):
    """A NaN whose bits say of numbers that blocks hand each other that they are not there."""
    arguments = call(128, 128, (2, 1, 64), PLAIN)
    bits = np.asarray(arguments["x"]).view(np.uint16).copy()
    bits[0, 5] = AWAITED
    arguments["x"] = jnp.asarray(bits.view(arguments["x"].dtype))
    y, _ = by_lanes(monkeypatch, poisoned(arguments), Config(4, 2, 1), 3)
    assert np.isnan(y.astype(np.float32)).all()


def without_norms(self: Turn, *rest: Any, put: Any = Turn.put) -> None:
    self.norms = []
    put(self, *rest)


def turned_by_itself(self: Turn, both: Any, *rest: Any, put: Any = Turn.put) -> None:
    put(self, [both[0], both[0]], *rest)


def without_clearing(address: Any, value: Any, spent: Any) -> None:
    store_float(address, value, "bfloat16")


def without_parts_of_others(self: Attention, place: Any, part: Any) -> None:
    self._write(place, part)


def parts_not_cleared(self: Attention, *rest: Any, leave: Any = Attention._leave) -> None:
    self.at = {**self.at, "parts spent": self.at["parts"]}  # where numbers follow at once
    leave(self, *rest)


def at_once(places: Any, wait: Any = None, **how: Any) -> Any:
    return [load_late(*place) for place in places]


def all_of(self: Attention, at: Any, where: Any, of: Any = Attention._of_value) -> Any:
    return of(self, at, None)


FAULTS: Any = {
    "of several blocks the first adds up its own": (
        Attention,
        "_write_all",
        without_parts_of_others,
        "error is",
    ),
    "keys behind the last are read": (
        Seen,
        "within",
        lambda self, key: key,
        "not finite|nothing lies",
    ),
    "the cache's key is scored before it is there": (
        decode_layers_attention,
        "without",
        lambda a, b: a,
        "not finite",
    ),
    "the cache's value is read before it is there": (Attention, "_of_value", all_of, "not finite"),
    "heads are turned by themselves": (Turn, "put", turned_by_itself, "error is"),
    "heads are not normed": (Turn, "put", without_norms, "error is"),
    "nobody writes the token's key and value": (
        decode_layers_turn,
        "store",
        lambda *_: None,
        "not finite",
    ),
    "nobody is a head": (Attention, "run", lambda *_: None, "wait for ever"),
    "what is awaited is not cleared": (decode_layers_lanes, "clear", lambda *_: None, "error is"),
    "what was there is not cleared": (quantized_finish, "store_awaited", without_clearing, "error"),
    "what was there of heads becomes zeros": (decode_layers_attention, "BOTH", 0, "error is"),
    "what was there of parts is not cleared": (Attention, "_leave", parts_not_cleared, "error is"),
    "numbers are not awaited": (awaited, "load_awaited", at_once, "not finite"),
    "q and parts of heads are not awaited": (
        decode_layers_attention,
        "load_awaited",
        at_once,
        "not finite",
    ),
    "blocks do not wait": (EarlyMeeting, "wait", lambda self, _: self.barrier(), "for ever"),
    "blocks do not see to it that all is cleared": (
        EarlyMeeting,
        "settle",
        lambda self: self.barrier(),
        "for ever",
    ),
    "nobody sees to it that numbers are there": (EarlyMeeting, "fence", lambda _: None, "for ever"),
}
# Layers, blocks, and which of them have late stores; of the others three, three and all. The first
# block of two clears some of what is written first.
SEEN_WITH: Any = {
    "what was there is not cleared": (COPIES + 1, 3, range(3)),
    "what was there of parts is not cleared": (COPIES + 1, 3, [0]),
    "blocks do not wait": (1, 3, [0]),
    "blocks do not see to it that all is cleared": (1, 2, [0]),
}


# Of what is handed on: behind which meeting it is written, and before which its last reader comes,
# counted from a layer's first
HANDED = {
    "qkv": (1, 2),
    "parts": (1, 2),
    "heads": (1, 3),
    "middle": (2, 5),
    "gated": (3, 5),
    "stream": (4, 7),
}


def most_slack(copies: int, later: int) -> int:
    """Of blocks, with which a copy has been read before it is AWAITED again, and is AWAITED before
    it is looked at: when the block that sees to it has come twice.
    """
    read = [4 * (copies - later) + written - read for written, read in HANDED.values()]
    return min(*read, 4 * later - 2)


def test_slack():
    x, layers, token = SEVERAL().values()
    plan = plan_of(x, layers, token, device=Device("gpu", "NVIDIA H200", 9.0, 3))
    assert HANDED.keys() == plan.handed_on.keys()
    assert [most_slack(*how) for how in ((2, 1), (3, 1), (4, 2))] == [1, 2, 5]
    assert most_slack(COPIES, LATER) >= SLACK


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch):
    """What the kernel must not do, done by one that is right otherwise."""
    *what, said = FAULTS[fault]
    layers, blocks, late = SEEN_WITH.get(fault, (3, 3, range(3)))
    arguments = SEVERAL(layers=layers)
    monkeypatch.setattr(*what)
    given = poisoned(arguments), Config(4, 3, 2, turns=1), blocks
    run = partial(by_lanes, monkeypatch, *given, late=late)
    with pytest.raises(AssertionError, match=said):
        assert_right(arguments, run())
