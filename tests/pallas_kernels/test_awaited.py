"""Numbers that blocks hand each other, lane by lane."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from lane_blocks import Blocks, Part
from lane_machine import LANES, Value, stand_in

from pallas_kernels import awaited, lane_code
from pallas_kernels.awaited import AWAITED, clear, load_awaited, load_float_awaited, store_awaited
from pallas_kernels.lane_code import further, less, store, times, word

COUNT = 6  # accesses of a thread: more than it asks for at once
NUMBERS = np.arange(COUNT * LANES * 8).astype(ml_dtypes.bfloat16)


def handed_on(monkeypatch: Any, wait: int = 1, *, written: bool = True) -> tuple[Any, Any]:
    """What one block reads of what another clears, waits, and writes: words and a number each."""
    held: Any = {"x": np.ones_like(NUMBERS), "out": np.zeros_like(NUMBERS)}
    held["floats"] = np.zeros(LANES, np.float32)
    machine = Blocks(held, {"chip": 16}, LANES, 2)
    stand_in(monkeypatch, machine, (awaited, lane_code))
    x, out, thread = machine.at["x"], machine.at["out"], Value(np.arange(LANES), "i32")
    clear(x, NUMBERS.nbytes, thread, LANES)

    def read() -> None:
        places = [(further(x, times(thread, 16)), 16 * LANES * i) for i in range(COUNT)]
        for i, words in enumerate(load_awaited(places, word(wait))):
            store(further(out, times(thread, 16)), 16 * LANES * i, words)
        number = load_float_awaited(further(x, times(thread, 2)), less(thread, 7), word(wait))
        lane_code.store_float(further(machine.at["floats"], times(thread, 4)), number, "float32")

    def write() -> None:
        for i in range(0, NUMBERS.size, LANES):
            numbers = NUMBERS[i : i + LANES].astype(np.float32)
            value = Value(numbers.view(np.uint32), "f32")
            store_awaited(further(further(x, word(2 * i)), times(thread, 2)), value)

    parts = [Part(0, 0, LANES, read)] + [Part(1, 0, LANES, write)] * written
    machine.together(parts)
    return (
        machine.content("out", NUMBERS.dtype, NUMBERS.shape),
        machine.content("floats", np.float32, (LANES,)),
    )


def test_numbers_are_there_when_they_are_read(monkeypatch: pytest.MonkeyPatch):
    words, floats = handed_on(monkeypatch)
    np.testing.assert_array_equal(words, NUMBERS)
    np.testing.assert_array_equal(floats, np.where(np.arange(LANES) < 7, NUMBERS[:LANES], 0))


def test_what_need_not_be_waited_for_is_taken(monkeypatch: pytest.MonkeyPatch):
    words, floats = handed_on(monkeypatch, wait=0)
    assert (words.view(np.uint16) == AWAITED).all()
    assert np.isnan(floats[:7]).all()
    np.testing.assert_array_equal(floats[7:], 0)


def test_who_never_comes_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(AssertionError, match="wait for ever"):
        handed_on(monkeypatch, written=False)
