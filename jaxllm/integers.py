"""Arguments that count something, or are lists of what does."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any


def integer(
    name: str, value: Any, low: int, high: int | None = None, *, who: str = "generate"
) -> int:
    """The value, if it is an integer from low to high. Raises: ValueError by `who`."""
    allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < low or (high is not None and number > high):
        raise ValueError(f"{who}: {name} must be an integer {allowed}, got {value!r}")
    return number


def is_list(value: Any) -> bool:
    """Whether it holds values in a row: no text, no mapping, no array without an axis."""
    single = isinstance(value, str | bytes | Mapping) or getattr(value, "ndim", 1) == 0
    return isinstance(value, Iterable) and not single
