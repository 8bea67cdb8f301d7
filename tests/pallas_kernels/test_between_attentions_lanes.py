"""The code of `between_attentions`, lane by lane and block by block, against float64."""

from __future__ import annotations

from functools import partial, partialmethod
from typing import Any

import pytest
from between_calls import assert_right, call
from between_lanes import by_lanes

from pallas_kernels import between_attentions_lanes
from pallas_kernels.between_attentions import Config
from pallas_kernels.between_attentions_bring import Bring
from pallas_kernels.between_attentions_lanes import Chain
from pallas_kernels.lane_code import further, word
from pallas_kernels.meeting import Meeting
from pallas_kernels.packed import PLAIN

# Blocks, and what they have: a block without a tile of out or down, whose halves of K are folded
CALLS: Any = {
    "int4": (Config(4, 3, 2), 3, partial(call, 256, 384, (4, 1, 64), "int4")),
    "16 bits, bias": (Config(4, 3, 1), 5, partial(call, 128, 192, (2, 1, 64), PLAIN, bias=True)),
    "the last layer": (Config(4, 5, 5), 2, partial(call, 128, 256, None, "int8")),
    "folded": (Config(4, 4, 2), 7, partial(call, 128, 320, (2, 1, 64), PLAIN)),
    "folded int4": (Config(4, 4, 3), 7, partial(call, 128, 512, (4, 1, 64), "int4")),
    "zero points": (Config(4, 3, 3), 5, partial(call, 256, 256, (2, 2, 64), "int4, zero points")),
    "ternary": (Config(4, 3, 2), 3, partial(call, 256, 512, (4, 2, 64), "ternary")),
    "ternary, half a part": (Config(4, 3, 2), 3, partial(call, 128, 320, (2, 1, 64), "ternary")),
    "folded ternary, norms": (
        Config(4, 2, 1),
        7,
        partial(call, 128, 1024, (8, 2, 64), "ternary", sub_norms=True, gate="relu2_glu"),
    ),
    "norms of 16 bits": (
        Config(4, 3, 2),
        7,
        partial(call, 128, 256, (2, 1, 64), PLAIN, sub_norms=True, centred=True),
    ),
    "heads as they are": (
        Config(4, 3, 2),
        5,
        partial(call, 128, 256, (2, 1, 64), PLAIN, bias=True, turned=False),
    ),
    "ternary, heads as they are": (
        Config(4, 3, 2),
        3,
        partial(call, 256, 384, (4, 1, 64), "ternary", turned=False),
    ),
    "post norms": (
        Config(4, 3, 2),
        5,
        partial(
            call,
            *(128, 256, (2, 1, 64), PLAIN),
            centred=True,
            gate="geglu",
            turned=False,
            post_norms="out down",
        ),
    ),
    "post norms, turned heads": (
        Config(4, 3, 2),
        3,
        partial(call, 256, 384, (4, 1, 64), "int4", post_norms="out down"),
    ),
    "post norms, rows of more than an access": (
        Config(4, 2, 1),
        2,
        partial(call, 1280, 128, (2, 1, 64), "int8", bias=True, post_norms="out down"),
    ),
    "one post norm": (
        Config(4, 3, 2),
        3,
        partial(call, 128, 256, (2, 1, 64), PLAIN, post_norms="out"),
    ),
    "the other post norm": (
        Config(4, 3, 2),
        3,
        partial(call, 128, 256, (2, 1, 64), PLAIN, turned=False, post_norms="down"),
    ),
    "the last layer, post norms": (
        Config(4, 5, 5),
        2,
        partial(call, 128, 256, None, "int8", centred=True, post_norms="out down"),
    ),
    "folded int8": (Config(8, 2, 2), 6, partial(call, 128, 256, (4, 2, 32), "int8, groups")),
}


@pytest.mark.parametrize("all_late", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_lanes(name: str, all_late: bool, monkeypatch: Any):
    config, blocks, make = CALLS[name]
    arguments = make()
    with monkeypatch.context() as patched:
        ours = by_lanes(patched, arguments, config, blocks, late=range(blocks) if all_late else ())
    assert_right(arguments, ours)


def test_a_block_of_the_last_layer_alone(monkeypatch: Any):
    """Nobody to wait for, and every tile is its own."""
    arguments = call(128, 128, None, PLAIN)
    assert_right(arguments, by_lanes(monkeypatch, arguments, Config(4, 2, 1), 1))


def without(awaited: str) -> Any:
    """A chain's `_wait` that waits for no stage to be "full", or to be "empty"."""
    wait = Chain._wait

    def some(barrier: Any, phase: Any) -> None:
        kind = "empty" if barrier.bits[0] % 16 else "full"  # they lie side by side
        if kind != awaited:
            wait(barrier, phase)

    return staticmethod(some)


def further_on(self: Bring, ask: Any, begun: Any, round_: Any) -> None:
    halves, groups = begun
    ask(self, ([further(at, word(16)) for at in halves], groups), round_)


def first_half(self: Bring, ask: Any, begun: Any, round_: Any) -> None:
    halves, groups = begun
    ask(self, (halves[:1] * len(halves), groups), round_)


INTO_L2: Any = {
    "other codes are asked into the L2": (
        Bring,
        "ask_into_l2",
        partialmethod(further_on, Bring.ask_into_l2),
        "is not brought on chip|leaves its array|half a stage",
    ),
    "half of the codes are asked into the L2": (
        Bring,
        "ask_into_l2",
        partialmethod(first_half, Bring.ask_into_l2),
        "half a stage",
    ),
}
FAULTS: Any = {
    "a stage is read before it is full": (
        Chain,
        "_wait",
        without("full"),
        "wait for ever|not finite",
    ),
    "a stage is filled before it is read": (Chain, "_wait", without("empty"), "wait for ever"),
    "blocks do not wait": (Meeting, "wait", lambda *_: None, "not finite"),
    "blocks tell before it is there": (Meeting, "fence", lambda _: None, "not finite"),
    "a residual is read before it is made": (
        Chain,
        "_early",
        lambda chain, i: [
            chain.products[i].finish.operands(word(0), *each[2:]) for each in chain._results(i)
        ],
        "not finite",
    ),
    "more are waited for": (between_attentions_lanes, "BRINGING", 160, "wait for ever"),
    **INTO_L2,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str, monkeypatch: Any):
    """What the kernel must not do, done by one that is right otherwise."""
    *what, said = FAULTS[fault]
    arguments = call(128, 256, (2, 1, 64), PLAIN, post_norms="out")
    monkeypatch.setattr(*what)
    run = partial(by_lanes, monkeypatch, arguments, Config(4, 3, 2), 3, late=range(3))
    with pytest.raises(AssertionError, match=said):
        assert_right(arguments, run())


@pytest.mark.parametrize("fault", INTO_L2)
@pytest.mark.parametrize("name", ["folded", "folded int4", "ternary, half a part"])
def test_faults_with_the_l2_are_seen(name: str, fault: str, monkeypatch: Any):
    """In halves of K, in codes with scales, and where a row ends within a round."""
    *what, said = INTO_L2[fault]
    config, blocks, make = CALLS[name]
    monkeypatch.setattr(*what)
    with pytest.raises(AssertionError, match=said):
        by_lanes(monkeypatch, make(), config, blocks)
