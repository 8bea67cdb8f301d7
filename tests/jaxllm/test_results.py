"""A row's text as it grows: where a stop string ends it, and what is certain before."""

import itertools
import math

import pytest

from jaxllm.programs import LENGTH, STOP
from jaxllm.prompts import Encoded
from jaxllm.results import Row, Timings


class Words:
    """A decoder whose tokens are these texts."""

    def __init__(self, *texts):
        self.texts = texts

    def push(self, ids):
        return "".join(self.texts[i] for i in ids)

    def finish(self):
        return ""


def row_of(stop, *texts):
    return Row(Encoded([0], Words(*texts)), len(texts), False, stop)


def push(row, token, *, last=False):
    row.push(token, -1.0, [], last)


@pytest.mark.parametrize("stop", list(itertools.permutations(["lo", "he", "never"])), ids=" ".join)
def test_of_several_stop_strings_the_first_of_the_text_ends_it(stop):
    row = row_of(stop, "Oh, ", "hello")
    push(row, 0)
    assert (row.text, row.reason) == ("Oh, ", None)
    push(row, 1)
    assert (row.text, row.reason) == ("Oh, ", "stop")


@pytest.mark.parametrize("stop", list(itertools.permutations(["and", "da", "nd!"])), ids=" ".join)
def test_what_may_begin_a_stop_string_is_held_back(stop):
    row = row_of(stop, "a land", "s", ".")
    push(row, 0)
    assert row.reason == "stop"  # at "and"
    assert row.piece() == "a l"
    row = row_of([s for s in stop if s != "and"], "a land", "s", ".")
    push(row, 0)
    assert row.piece() == "a la"  # of "nd" comes "nd!", and of "d" comes "da"
    push(row, 1)
    assert row.piece() == "nds"
    push(row, 2, last=True)
    assert (row.piece(), row.reason) == (".", None)


def test_no_time_has_no_speed():
    timings = Timings(2.0, 0.0, 6, 0, 0)
    assert timings.prefill_tokens_per_s == 3
    assert math.isnan(timings.decode_tokens_per_s)


def test_a_stop_string_that_comes_in_several_tokens():
    row = row_of(["abc"], "xa", "b", "cd")
    for token in range(3):
        assert row.reason is None
        push(row, token)
    assert (row.text, row.reason) == ("x", "stop")


def test_one_character_that_may_begin_a_stop_string_is_held_back():
    row = row_of(["da"], "a land", "s")
    push(row, 0)
    assert row.piece() == "a lan"
    push(row, 1)
    assert row.piece() == "ds"


@pytest.mark.parametrize(
    ("ended", "capped", "reason"),
    [(LENGTH, False, "length"), (LENGTH, True, "context"), (STOP, False, "stop")],
)
def test_nothing_is_held_back_of_a_row_that_has_ended(ended: int, capped: bool, reason: str):
    row = Row(Encoded([0], Words("a land")), 1, capped, ["da"])
    push(row, 0, last=True)
    row.finish(ended)
    assert (row.piece(), row.reason) == ("a land", reason)


def test_a_stop_string_in_the_last_token_there_may_be_is_why_the_row_ended():
    row = row_of(["nd"], "a land")
    push(row, 0, last=True)
    row.finish(LENGTH)
    assert (row.text, row.reason) == ("a la", "stop")


def test_speeds():
    timings = Timings(prefill_s=2, decode_s=4, prefill_tokens=6, decode_tokens=20, dispatches=1)
    assert (timings.prefill_tokens_per_s, timings.decode_tokens_per_s) == (3, 5)
