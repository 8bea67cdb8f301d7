"""How much memory is free, on a device and on the host; asked before something large is made."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
# Of each version: the limit, what is used of it, and the line of memory.stat for unused file pages.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def free_bytes(device: Any) -> int | None:
    """Bytes that a `jax.Device` can still give; None where nobody says (a CPU off Linux).

    A CPU device has what the host has, within the limits of the process's control groups.
    """
    if device.platform == "cpu":
        return host_free_bytes()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def host_free_bytes() -> int | None:
    """Bytes of main memory that this process can still take without swapping; None off Linux."""
    try:
        lines = (_PROC / "meminfo").read_text().splitlines()
    except OSError:
        return None
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min(free + _cgroup_free_bytes(), default=None)


def _cgroup_free_bytes() -> list[int]:
    """What each control group above this process leaves it, for groups of version 1 and 2."""
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    free = []
    for _, controllers, group in (line.split(":", 2) for line in lines):
        if controllers == "":
            mount, (limit, usage, cache) = _CGROUPS, _V2
        elif "memory" in controllers.split(","):
            mount, (limit, usage, cache) = _CGROUPS / "memory", _V1
        else:
            continue
        path = PurePosixPath(group.lstrip("/"))
        for folder in {mount / parent for parent in (path, *path.parents)}:
            try:
                most, used = (folder / limit).read_text().strip(), (folder / usage).read_text()
                stats = (folder / "memory.stat").read_text().splitlines()
            except OSError:
                continue  # in a container the host's name of the group may lead nowhere
            if most != "max":
                # File pages that nobody uses are given up before an allocation fails.
                unused = int(dict(line.split() for line in stats).get(cache, 0))
                free.append(max(0, int(most) - int(used) + unused))
    return free
