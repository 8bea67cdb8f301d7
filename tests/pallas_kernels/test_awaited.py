"""Numbers that blocks hand each other, lane by lane."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from lane_blocks import Blocks, Part
from lane_machine import LANES, Value, stand_in

from pallas_kernels import awaited, lane_code
from pallas_kernels.awaited import AWAITED, clear, load_awaited, store_awaited
from pallas_kernels.lane_code import further, store, times, word

COUNT = 6  # accesses of a thread
NUMBERS = np.arange(COUNT * LANES * 8).astype(ml_dtypes.bfloat16)


def handed_on(monkeypatch: Any, wait: int | None, *, written: bool = True) -> Any:
    """What one block reads of what another clears, waits, and writes, and what becomes of those
    that were there before.
    """
    held: Any = {"x": np.ones_like(NUMBERS), "out": np.zeros_like(NUMBERS)}
    held["before"] = np.ones_like(NUMBERS)
    machine = Blocks(held, {"chip": 16}, LANES, 2)
    stand_in(monkeypatch, machine, (awaited, lane_code))
    x, out, thread = machine.at["x"], machine.at["out"], Value(np.arange(LANES), "i32")
    clear(x, NUMBERS.nbytes, thread, LANES)
    waits = None if wait is None else word(wait)

    def read() -> None:
        at = further(x, times(thread, 16))
        four = [(at, 16 * LANES * i, 4) for i in range(COUNT - 1)]
        two = [(at, 16 * LANES * (COUNT - 1) + 8 * i, 2) for i in range(2)]
        *loaded, low, high = load_awaited([*four, *two], waits)
        for i, words in enumerate([*loaded, low + high]):
            store(further(out, times(thread, 16)), 16 * LANES * i, words)

    def write() -> None:
        for i in range(0, NUMBERS.size, LANES):
            numbers = NUMBERS[i : i + LANES].astype(np.float32)
            value = Value(numbers.view(np.uint32), "f32")
            to, spent = (
                further(further(machine.at[name], word(2 * i)), times(thread, 2))
                for name in ("x", "before")
            )
            store_awaited(to, value, spent)

    parts = [Part(0, 0, LANES, read)] + [Part(1, 0, LANES, write)] * written
    machine.together(parts)
    return (
        machine.content("out", NUMBERS.dtype, NUMBERS.shape),
        machine.content("before", np.uint16, NUMBERS.shape),
    )


@pytest.mark.parametrize("wait", [None, 1])
def test_numbers_are_there_when_they_are_read(wait: int | None, monkeypatch: pytest.MonkeyPatch):
    words, before = handed_on(monkeypatch, wait)
    np.testing.assert_array_equal(words, NUMBERS)
    assert (before == AWAITED).all()


def test_what_need_not_be_waited_for_is_taken(monkeypatch: pytest.MonkeyPatch):
    words, _ = handed_on(monkeypatch, wait=0)
    assert (words.view(np.uint16) == AWAITED).all()


@pytest.mark.parametrize("shift", [0, 16])
def test_half_a_word_is_awaited(shift: int, monkeypatch: pytest.MonkeyPatch):
    """Which another thread writes than the other half."""
    words = np.full((LANES, 4), 0x3F803F80, np.uint32)
    words[9, 2] |= AWAITED << shift
    machine = Blocks({"x": words}, {"chip": 16}, LANES, 2)
    stand_in(monkeypatch, machine, (awaited, lane_code))
    at = further(machine.at["x"], times(Value(np.arange(LANES), "i32"), 16))
    found: list[Any] = []

    def write() -> None:
        machine.content("x", np.uint32, words.shape)[9, 2] = 7

    read = Part(0, 0, LANES, lambda: found.extend(load_awaited([(at, 0, 4)])[0]))
    machine.together([read, Part(1, 0, LANES, write)])
    words[9, 2] = 7
    np.testing.assert_array_equal(np.stack([each.bits for each in found], axis=1), words)


def test_a_whole_word_is_awaited(monkeypatch: pytest.MonkeyPatch):
    """A half of a float32 may be all ones. What is not read is not waited for."""
    ours, words, here = of_half_a_word(monkeypatch, whole=True)
    np.testing.assert_array_equal(ours[:, :2], words)
    nines = np.where(here, 9, 0)
    np.testing.assert_array_equal(ours[:, 2:], np.stack([nines, nines], axis=1))


def test_of_two_numbers_each_is_awaited(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(AssertionError, match="wait for ever"):
        of_half_a_word(monkeypatch, whole=False)


def of_half_a_word(monkeypatch: pytest.MonkeyPatch, *, whole: bool) -> Any:
    """What is read of words of which one becomes 0x3F80FFFF, and of some of those elsewhere; these
    words; and of which lanes they are read elsewhere.
    """
    words = np.full((LANES, 2), 7, np.uint32)
    words[5, 1] = 0xFFFFFFFF
    held = {"x": words, "elsewhere": np.full_like(words, 0xFFFFFFFF)}
    machine = Blocks(held, {"chip": 16}, LANES, 2)
    stand_in(monkeypatch, machine, (awaited, lane_code))
    lane = Value(np.arange(LANES), "i32")
    x, elsewhere = (further(machine.at[name], times(lane, 8)) for name in ("x", "elsewhere"))
    here = lane_code.less(lane, LANES // 2)
    found: list[Any] = []

    def read() -> None:
        found.extend(load_awaited([(x, 0, 2), (elsewhere, 0, 2, here)], whole=whole))

    def write() -> None:
        machine.content("x", np.uint32, words.shape)[5, 1] = 0x3F80FFFF
        machine.content("elsewhere", np.uint32, words.shape)[: LANES // 2] = 9

    machine.together([Part(0, 0, LANES, read), Part(1, 0, LANES, write)])
    ours = np.stack([each.bits for words in found for each in words], axis=1)
    words[5, 1] = 0x3F80FFFF
    return ours, words, np.arange(LANES) < LANES // 2


def test_who_never_comes_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(AssertionError, match="wait for ever"):
        handed_on(monkeypatch, None, written=False)
