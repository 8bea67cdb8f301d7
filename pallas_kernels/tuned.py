"""Measured tile configs: one row of `tuned/<gpu>.json`, by its exact key; nothing else.

A file is {"gpu": name, "rows": [{"op", "key", "config", "evidence"}]}; `tune.py` writes it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from pallas_kernels.device import Device

FOLDER = Path(__file__).with_suffix("")

Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that is worth a row, as a kernel module's `tuning_calls()` lists them.

    `run(*arrays, config=config, **keywords)` is timed; the module's `bucket`, `default_config` and
    `candidates` are asked with `arguments` (ShapeDtypeStructs) and `keywords`. make: key -> arrays,
    where normal random numbers will not do.
    """

    arguments: tuple[jax.ShapeDtypeStruct, ...]
    run: Callable[..., Any]
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    make: Callable[[jax.Array], tuple[jax.Array, ...]] | None = None


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less: how a key rounds a size, and Triton a block's."""
    return 1 << max(number - 1, 0).bit_length()


def lookup(op: str, key: str, device: Device, config: Callable[..., Config]) -> Config | None:
    """The measured config of `op` for this bucket on this GPU, if there is one."""
    if device.platform != "gpu":
        return None
    row = _rows(file_name(device.name)).get((op, key))
    return None if row is None else config(**row)


def file_name(gpu: str) -> str:
    """Where a GPU has its rows: those of "NVIDIA H200" are in h200.json."""
    name = re.sub(r"[^a-z0-9]+", "_", gpu.lower().removeprefix("nvidia ")).strip("_")
    return f"{name}.json"


def read(path: Path) -> list[dict[str, Any]]:
    """All rows of a file, each of which must be whole."""
    rows = json.loads(path.read_text())["rows"]
    for row in rows:
        if row.keys() != {"op", "key", "config", "evidence"}:
            raise ValueError(
                f"tuned: a row of {path.name} has {', '.join(row)}; it must have op, key, config, "
                "evidence"
            )
    return rows


@functools.lru_cache(maxsize=8)
def _rows(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    path = FOLDER / name
    if not path.is_file():
        return {}
    return {(row["op"], row["key"]): row["config"] for row in read(path)}
