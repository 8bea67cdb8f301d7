"""The process that holds the GPU for torch: times the rivals of torch_rivals.py, case by case.

Started by `__main__.py` behind the worker of JAX, with the same plan and the same kind of log. JAX
is there for the cases' shapes alone, and kept off the GPU. The cases come in the order of JAX's,
first each case's best known rival, then the others, and what torch compiles last.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import torch_rivals, torch_training
from benchmarks.case import Case
from benchmarks.correct import sentence
from benchmarks.lacking import SPENT
from benchmarks.plan import Plan, chosen, in_turn
from benchmarks.worker import (
    ALONE_BYTES,
    FATAL_EXIT,
    FEW_CALLS,
    ROUND_S,
    ROUNDS,
    TIMED_S,
    Log,
)
from pallas_kernels.measure import COLD_BYTES, Timing, num_sets

FATAL = (
    "illegal memory access",
    "unspecified launch failure",
    "misaligned address",
    "device-side assert",  # an index that is none; and what cuBLAS says of it, which is called next
    "CUBLAS_STATUS_EXECUTION_FAILED",
)


class TorchWatch:
    """As `Stopwatch`, of torch: CUPTI through its profiler, CUDA events where that fails."""

    def __init__(self, torch: Any):
        self.torch = torch
        buffer = torch.ones(COLD_BYTES // 4, device="cuda")
        self.clear: Callable[[], Any] = buffer.max
        self.reason: str | None = None
        self.clear_kernels = 0
        try:
            self._events([self.clear], 2)  # the first use starts the profiler up
            self.clear_kernels = len(self._events([self.clear], 4)[0])
        except RuntimeError as error:
            self.reason = str(error)

    def time(self, runs: Sequence[Callable[[], Any]], *, cold: bool, calls: int) -> Timing:
        """The time of a call, `runs` being the same over other inputs; cold: the L2 is cleared.

        `calls` of them, or fewer where a call is long.
        """
        torch = self.torch
        for run in runs[:2]:
            run()
        torch.cuda.synchronize()
        once_s = self._wall(runs, 1) / 1e6
        calls = max(FEW_CALLS, min(calls, int(TIMED_S / (once_s + 1e-9))))
        walls = sorted(self._wall(runs, calls) for _ in range(3))
        wall_us, reason = statistics.median(walls), self.reason
        if reason is None:
            both = [self._then_clear(run) for run in runs] if cold else list(runs)
            try:
                events = self._events(both, calls)
                ours = len(events[0]) - (self.clear_kernels if cold else 0)
                if ours < 1:
                    raise RuntimeError("it saw no kernel")
            except RuntimeError as error:
                reason = str(error)
            else:
                times = [sum(us for _, us in call[:ours]) for call in events]
                names = tuple(name[:80] for name, _ in events[0][:ours])
                return Timing(*_middle(times), wall_us, "cupti", calls, names)
        times = []
        for i in range(calls):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.clear()
            start.record()
            runs[i % len(runs)]()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end))
        return Timing(*_middle(times), wall_us, f"cuda events (profiler: {reason})", calls)

    def _then_clear(self, run: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: (run(), self.clear())

    def _wall(self, runs: Sequence[Callable[[], Any]], calls: int) -> float:
        kept = [None] * len(runs)
        start = time.perf_counter()
        for i in range(calls):
            kept[i % len(runs)] = runs[i % len(runs)]()
        self.torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - start) / calls

    def _events(
        self, runs: Sequence[Callable[[], Any]], calls: int
    ) -> list[list[tuple[str, float]]]:
        """(name, microseconds) of what the device did in each call."""
        torch = self.torch
        kept = [None] * len(runs)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for i in range(calls):
                kept[i % len(runs)] = runs[i % len(runs)]()
            torch.cuda.synchronize()
        events = sorted(
            (event.time_range.start, event.name, event.time_range.elapsed_us())
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
            and not getattr(event, "is_user_annotation", False)  # ranges around kernels
        )
        if not events or len(events) % calls:
            raise RuntimeError(f"{len(events)} events in {calls} calls")
        size = len(events) // calls
        split = [events[i : i + size] for i in range(0, len(events), size)]
        names = [[name for _, name, _ in call] for call in split]
        if any(other != names[0] for other in names):
            raise RuntimeError("the calls differ in their kernels")
        return [[(name, us) for _, name, us in call] for call in split]


def _middle(times: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return statistics.median(times), (high - low) / 2


def main(argv: list[str]) -> int:
    """Run a plan: the path of its JSON file is the only argument."""
    plan = Plan(**json.loads(Path(argv[0]).read_text()))
    log = Log(plan.log)
    jax.config.update("jax_platforms", "cpu")
    log.write("begin", "torch")
    import torch

    if not torch.cuda.is_available():
        log.write("end", "torch", result={"failed": "torch sees no GPU"})
        return 0
    # Backward passes are called again and again on one graph.
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False
    cases = in_turn(chosen(plan, on_gpu=True))
    watch = TorchWatch(torch) if cases else None
    profiler = "no case wants it" if watch is None else watch.reason or "works"
    version = {"version": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    log.write("end", "torch", result={**version, "profiler": profiler})
    for key, work in torch_training.tasks(plan.names):
        if plan.takes(key):
            task(plan, log, f"section/{key}", work)
    if watch is not None:
        for case, name, forward in turns(cases, compiled=not plan.quick):
            if name == "torch.compile":
                torch._dynamo.reset()
                forward = torch.compile(forward, dynamic=False, fullgraph=True)
            work = functools.partial(_time, plan, watch, case, forward)
            task(plan, log, f"torch/{case.name}/{name}", work)
            torch.cuda.empty_cache()
    log.write("end", "all", result={})
    return 0


def turns(cases: Sequence[Case], *, compiled: bool) -> Iterator[tuple[Case, str, Any]]:
    """(case, rival, its forward function): every case's first rival, then the second ones, ..."""
    tables = [(case, torch_rivals.of(case)) for case in cases]
    last = {}
    for case, table in tables:
        if (forward := table.pop("torch.compile", None)) is not None and compiled:
            last[case.name] = forward
    for place in range(max((len(table) for _, table in tables), default=0)):
        for case, table in tables:
            yield from ((case, *item) for item in list(table.items())[place : place + 1])
    yield from ((c, "torch.compile", last[c.name]) for c in cases if c.name in last)


def task(plan: Plan, log: Log, key: str, work: Callable[[], dict[str, Any]]) -> None:
    """Do it unless it is done or there is no time, and write down what came of it.

    What leaves the GPU unusable ends the process.
    """
    if key in plan.done:
        return
    if time.time() > plan.deadline:
        log.write("end", key, result=SPENT)
        return
    log.write("begin", key)
    try:
        result = work()
    except Exception as error:
        result = {"failed": sentence(error)}
    log.write("end", key, result=result)
    if _is_fatal(result.get("failed", "")):
        os._exit(FATAL_EXIT)  # as the worker of JAX: ending in order may wait for ever


def _is_fatal(said: str) -> bool:
    return any(text in said for text in FATAL)


def _time(plan: Plan, watch: TorchWatch, case: Case, forward: Any) -> dict[str, Any]:
    count = 1 if case.bytes > ALONE_BYTES else num_sets(case.bytes)
    runs = [
        torch_rivals.call(case, forward, torch_rivals.arguments(case, i, "cuda"))
        for i in range(count)
    ]
    cold = count * case.bytes < COLD_BYTES
    timings, start = [], time.time()
    for _ in range(ROUNDS):  # as JAX has it: the better one counts
        try:
            timings.append(watch.time(runs, cold=cold, calls=10 if plan.quick else 20))
        except Exception as error:
            if not timings or _is_fatal(str(error)):
                raise
            break
        if time.time() - start > ROUND_S:
            break
    return dataclasses.asdict(min(timings, key=lambda timing: timing.us))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
