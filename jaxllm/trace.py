"""The kernels that took longest in a profiler's trace."""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What one kernel (on a CPU: one operation) took in a trace, all its launches together.

    scope: where in the model the first launch stood ("layer_3/attention"), if the trace says it.
    """

    name: str
    scope: str
    launches: int
    total_us: float


def longest(folder: Path, count: int = 10) -> list[Kernel]:
    """The kernels of the newest trace in the folder that took most time in all.

    Raises: FileNotFoundError if there is no trace.
    """
    files = sorted(folder.glob("**/*.trace.json.gz"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        raise FileNotFoundError(f"{folder}: there is no *.trace.json.gz here")
    with gzip.open(files[-1], "rt", encoding="utf-8") as stream:
        events = json.load(stream)["traceEvents"]
    threads, processes = {}, {}
    for event in events:
        if event.get("ph") == "M" and event["name"] == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
        elif event.get("ph") == "M" and event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
    total: dict[str, float] = collections.defaultdict(float)
    launches: collections.Counter[str] = collections.Counter()
    scopes: dict[str, str] = {}
    for event in events:
        facts = event.get("args", {})
        if event.get("ph") != "X" or "hlo_op" not in facts:
            continue
        # A GPU's kernels stand once on their stream and again on lines derived from it.
        on_device = processes.get(event["pid"], "").startswith("/device:")
        thread = threads.get((event["pid"], event.get("tid")), "")
        if on_device and not thread.startswith("Stream"):
            continue
        total[event["name"]] += event.get("dur", 0.0)
        launches[event["name"]] += 1
        scopes.setdefault(event["name"], _scope(facts.get("name") or facts.get("tf_op") or ""))
    names = sorted(total, key=lambda name: -total[name])[:count]
    return [Kernel(name, scopes[name], launches[name], total[name]) for name in names]


def _scope(path: str) -> str:
    """The model's part of an operation's path: without the transforms around it, and its end."""
    parts = [part for part in path.split("/")[:-1] if "(" not in part and part != "while"]
    return "/".join(part for part in parts if part not in ("body", "closed_call", "checkpoint"))
