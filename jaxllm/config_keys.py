"""The keys of a `config.json`, read one by one: what cannot be is a sentence that names the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.config import check_size


class Keys:
    """An object of a `config.json`, which remembers the keys that were read; null is absent."""

    def __init__(self, hf: Mapping[str, Any], owner: str) -> None:
        self.hf, self.owner, self.read = hf, owner, set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        value = self.hf.get(key)
        return default if value is None else value

    def need(self, key: str, default: Any = None) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"{self.owner}: the key {key!r} is missing")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        return check_size(self.owner, key, self.need(key, default))

    def number(self, key: str, default: float | None = None) -> float:
        value = self.need(key, default)
        if not _is_number(value):
            raise ValueError(f"{self.owner}: {key} must be a number, got {value!r}")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self.get(key, [])
        if not isinstance(value, list | tuple) or not all(map(_is_number, value)):
            raise ValueError(f"{self.owner}: {key} must be a list of numbers, got {value!r}")
        return tuple(map(float, value))

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.owner}: {key} must be true or false, got {value!r}")
        return value

    def names(self, key: str) -> list[str]:
        value = self.get(key, [])
        if not isinstance(value, list | tuple) or not all(isinstance(x, str) for x in value):
            raise ValueError(f"{self.owner}: {key} must be a list of names, got {value!r}")
        return list(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.owner}: {key} must be a dictionary, got {value!r}")
        return value

    def unless_null(self, read: Callable[[str, Any], Any], key: str, default: Any) -> Any:
        """What `read` makes of the key, for keys where null says "off" instead of `default`."""
        self.read.add(key)
        return None if self.hf.get(key, default) is None else read(key, default)

    def unread(self) -> list[str]:
        return sorted(set(self.hf) - self.read)


def _is_number(value: Any) -> bool:
    # The range of float32; NaN, which JSON as Python reads it may hold, is not in it.
    return isinstance(value, int | float) and type(value) is not bool and -3e38 < value < 3e38
