"""The process that holds the GPU for JAX: takes tasks one by one, writes what came of each.

`__main__.py` starts it, reads its log, and starts it anew without the task that killed it: a kernel
that hangs or faults takes one row with it, not the run. What is cheap and matters comes first:
every case's own kernel, its plain path and cuDNN are compiled, all in threads, then checked, then
timed; the other rivals come in a second round. While programs are compiled nothing is timed, for
XLA times candidates on the GPU then; after a minute of it what is ready is checked and timed, so
that a run which ends early has whole rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import ceilings, sections
from benchmarks.case import Case
from benchmarks.compiling import Programs
from benchmarks.correct import check, sentence
from benchmarks.lacking import FURTHER, SPENT
from benchmarks.plan import Plan, chosen, in_turn, is_large
from pallas_kernels.measure import Stopwatch, num_sets

# After these the process can do nothing more on the GPU.
FATAL = (
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_ILLEGAL",
    "CUDA_ERROR_LAUNCH",
    "CUDA_ERROR_MISALIGNED",
    "unspecified launch",
)
FATAL_EXIT, CLOCKS_EXIT = 70, 71
COMPILE_S = 60.0  # then what is ready is checked and timed before more is compiled
ROUNDS, ROUND_S = 2, 3.0
FEW_CALLS, TIMED_S = 3, 0.1  # a call so long that 20 of them take longer is repeated less often
ALONE_BYTES = 2**32  # what no cache holds a tenth of needs no second set of inputs
LATE_S = 150.0  # of the time kept for whole models, whose programs take long to compile
HOST_BYTES = 24 * 2**30  # float64 arrays of checks that may lie on the host at a time
COMPARED = "too large for float64 here: compared with the plain path; pytest -m gpu does it"


class Log:
    """JSON lines: what was begun, and what came of it."""

    def __init__(self, path: str):
        self.path = Path(path)

    def write(self, event: str, key: str, **values: Any) -> None:
        """One line, on disk when this returns."""
        record = {"event": event, "key": key, "at": time.time(), **values}
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def main(argv: list[str]) -> int:
    """Run a plan: the path of its JSON file is the only argument."""
    plan = Plan(**json.loads(Path(argv[0]).read_text()))
    if plan.stage:
        # JAX takes three quarters of a card, and leaves room for the processes that compile; a
        # training step of one part, beside which there are none, needs 126 GB of an H200's 150
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    log = Log(plan.log)
    log.write("begin", "device")
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    stats = device.memory_stats() or {}
    log.write(
        "end",
        "device",
        result={
            "platform": device.platform,
            "kind": device.device_kind,
            "capability": str(getattr(device, "compute_capability", "")),
            "memory_bytes": stats.get("bytes_limit", 0),
            "jax": jax.__version__,
        },
    )
    cases = chosen(plan, on_gpu)
    run = _Run(plan, log, cases, on_gpu)
    try:
        run.everything()
    finally:
        run.programs.close()
    log.write("end", "all", result={})
    return 0


class _Run:
    def __init__(self, plan: Plan, log: Log, cases: list[Case], on_gpu: bool):
        self.plan, self.log, self.cases, self.on_gpu = plan, log, cases, on_gpu
        self.programs = Programs(on_gpu=on_gpu, threads=plan.threads)
        self.watch = Stopwatch("host" if plan.host_clock or not on_gpu else None)
        self.spent: dict[str, float] = {}

    def task(self, key: str, work: Callable[[], Any]) -> None:
        """Do it unless it is done, and write down what came of it."""
        if key in self.plan.done:
            return
        self.plan.done.append(key)
        if time.time() > self.plan.deadline:
            self.log.write("end", key, result=SPENT)
            return
        self.log.write("begin", key)
        try:
            result = work()
        except ceilings.ClocksDisagreeError as error:
            self.log.write("end", key, result={"failed": str(error)})
            sys.exit(CLOCKS_EXIT)
        except Exception as error:  # the row says what went wrong; the run goes on
            self.log.write("end", key, result={"failed": sentence(error)})
            if any(text in str(error) for text in FATAL):
                os._exit(FATAL_EXIT)  # ending in order would wait for a GPU that answers no more
        else:
            if result is not None:
                self.log.write("end", key, result=result)

    def everything(self) -> None:
        """Cases, those that are ready at a time, and sections; whole models last, with time kept
        for them.
        """
        plan = self.plan
        if self.on_gpu and self.cases:
            due = [c.name for c in self.cases if self.programs.names(c, first=False)]
            self.log.write("end", FURTHER, result={"cases": due})
        work = sections.tasks(plan.names, plan.quick, self.on_gpu, plan.layers)
        work = [(key, run) for key, run in work if plan.takes(key)]
        late = [key for key, _ in work if key.split("/")[0] in sections.LATE]
        early = [(key, run) for key, run in work if key not in late]
        end = plan.deadline
        if late and self.cases:
            plan.deadline -= LATE_S
        cases = in_turn(self.cases)
        self.round([c for c in cases if f"time/{c.name}" not in plan.done], early, first=True)
        self.round([c for c in cases if f"rivals/{c.name}" not in plan.done], [], first=False)
        plan.deadline = end
        self.ceilings()
        self.sections(early)
        self.sections([(key, run) for key, run in work if key in late])

    def round(
        self, cases: list[Case], early: Sequence[tuple[str, sections.Work]], *, first: bool
    ) -> None:
        """Compile, check and time; the second round is of rivals that take longer to compile."""
        cases = [case for case in cases if self.programs.names(case, first=first)]
        while cases:
            in_time = time.time() < self.plan.deadline
            if in_time:
                with self.phase("compiling"):
                    self.compilation(cases, first=first)
            some = [case for case in cases if self.programs.ready(case, first=first)]
            if in_time and not some:
                continue
            some = some or cases  # whose tasks say that there was no time
            cases = [case for case in cases if case not in some]
            if first:
                with self.phase("checking"):
                    self.correctness(some)
            if time.time() < self.plan.deadline:  # else in the time that is kept for whole models
                self.ceilings()
            self.sections(early)
            with self.phase("timing"):
                for case in some:
                    key = f"{'time' if first else 'rivals'}/{case.name}"
                    self.task(key, lambda case=case: self.time(case, first=first))
                    if not first:
                        self.programs.forget(case)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds, and write down those of all phases so far."""
        start = time.time()
        yield
        self.spent[name] = self.spent.get(name, 0.0) + time.time() - start
        self.log.write("end", f"spent/{os.getpid()}", result=self.spent)

    def sections(self, work: Sequence[tuple[str, sections.Work]]) -> None:
        """See sections.py."""
        for key, run in work:
            gc.collect()  # Flax's split and merge leave cycles that hold a model's weights
            with self.phase("sections"):
                self.task(f"section/{key}", lambda run=run: run(self.watch))

    def correctness(self, cases: Sequence[Case]) -> None:
        """Cases that the host can do again against float64: the GPU's part here, the host's in
        threads. The rest is compared with its plain path at full size, and left to the GPU tests.
        """
        pool = ThreadPoolExecutor(max(2, min(12, (os.cpu_count() or 4) - 2)))
        waiting: list[tuple[str, Future, int]] = []

        def finish(limit: int) -> None:
            while waiting and (waiting[0][1].done() or sum(size for _, _, size in waiting) > limit):
                key, future, _ = waiting.pop(0)
                error = future.exception()
                result = future.result() if error is None else {"failed": sentence(error)}
                self.log.write("end", key, result=result)

        def begin(case: Case, key: str) -> dict[str, Any] | None:
            arguments = whole = self.programs.inputs(case, 0)
            plain = self.programs.get(case, "xla").run(*arguments)
            ours = self.programs.get(case, "ours").run(*arguments) if self.on_gpu else plain
            if is_large(case):
                if case.sample is None:
                    apart = _apart(ours, plain)
                    status = "compared" if apart < case.differs else "wrong"
                    return {"status": status, "error": apart, "truth": "plain", "message": COMPARED}
                arguments, ours = case.sample(whole, ours)
                _, plain = case.sample(whole, plain)
            arguments, ours, plain = jax.device_get((arguments, ours, plain))
            size = 8 * 6 * sum(x.size for x in jax.tree.leaves((arguments, ours)))
            finish(max(0, HOST_BYTES - size))
            waiting.append((key, pool.submit(check, case, arguments, ours, plain), size))
            return None

        for case in cases:
            key = f"correct/{case.name}"
            self.task(key, lambda case=case, key=key: begin(case, key))
        finish(0)
        pool.shutdown()

    def compilation(self, cases: Sequence[Case], *, first: bool) -> None:
        """Until all is compiled; after a minute, or half of the time left, no more is begun."""
        self.programs.begin(cases, first=first)
        stop = time.time() + min(COMPILE_S, (self.plan.deadline - time.time()) / 2)
        while left := self.programs.waiting(min(5.0, max(0.1, stop - time.time()))):
            self.log.write("begin", f"compilation: {left} programs left")  # a sign of life
            if time.time() > stop:
                self.programs.stop()
                stop = float("inf")

    def ceilings(self) -> None:
        """What percent is percent of."""
        if self.on_gpu and "ceilings" not in self.plan.done:
            believe = self.plan.host_clock
            with self.phase("ceilings"):
                self.task("ceilings", lambda: ceilings.measure(self.watch, believe=believe))

    def time(self, case: Case, *, first: bool) -> dict[str, Any]:
        """{rival: its timing, or why there is none}."""
        count = num_sets(case.bytes) if self.on_gpu else 2
        if case.bytes > ALONE_BYTES:
            count = 1
        sets = [self.programs.inputs(case, i) for i in range(count)]
        jax.block_until_ready(sets)
        names = self.programs.names(case, first=first)
        times: dict[str, dict[str, Any]] = {}
        ready: dict[str, tuple] = {}
        most = 10 if self.plan.quick or not self.on_gpu else 20
        plain = None
        for name in dict.fromkeys(["xla", *names]):  # xla's result is what others must give
            try:
                program = self.programs.get(case, name)
                used = sets
                if program.prepare is not None:
                    used = jax.block_until_ready([program.prepare(*x) for x in sets])
                result = jax.block_until_ready(program.run(*used[0]))
                plain = result if name == "xla" else plain
                apart = 0.0 if plain is None else _apart(result, plain)
                if not apart < case.differs:
                    times[name] = {"failed": f"its result is {apart:.2g} away from xla's"}
                elif name in names:
                    start = time.time()
                    jax.block_until_ready(program.run(*used[0]))
                    calls = max(FEW_CALLS, min(most, int(TIMED_S / (time.time() - start + 1e-9))))
                    ready[name] = program.run, used, calls
            except Exception as error:
                self._survive(error)
                times[name] = {"failed": sentence(error)}
        del plain
        if not case.time_plain and "xla" in ready:
            times["xla"] = {"not_run": "what the others are compared with, and no rival"}
            del ready["xla"]
        start = time.time()
        for _ in range(ROUNDS):  # in turns, since clocks drift; the better one counts
            for name, (program, used, calls) in list(ready.items()):
                try:
                    timing = dataclasses.asdict(
                        self.watch.time(program, used, calls=calls, call_bytes=case.bytes)
                    )
                except Exception as error:
                    self._survive(error)
                    times.setdefault(name, {"failed": sentence(error)})  # a round's time stays
                    del ready[name]
                    continue
                if name not in times or timing["us"] < times[name]["us"]:
                    times[name] = timing
            if time.time() - start > ROUND_S:
                break
        return {name: times[name] for name in names if name in times}

    def _survive(self, error: Exception) -> None:
        """One rival's failure is its own, unless the process can do nothing more."""
        if any(text in str(error) for text in FATAL):
            raise error


def _apart(result: Any, plain: Any) -> float:
    """The largest normwise distance of two results; infinite if they have not the same shapes."""
    ours, other = jax.tree.leaves(result), jax.tree.leaves(plain)
    if [x.shape for x in ours] != [x.shape for x in other]:
        shapes = [[tuple(x.shape) for x in tree] for tree in (ours, other)]
        raise ValueError(f"its results have shapes {shapes[0]}, xla's {shapes[1]}")
    distances = [float(_distance(a, b)) for a, b in zip(ours, other, strict=True)]
    return float(np.max(distances))  # NaN stays NaN, wherever it stands


@jax.jit
def _distance(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = a.astype(jax.numpy.float32), b.astype(jax.numpy.float32)
    norm = jax.numpy.linalg.norm(b.ravel())
    return jax.numpy.linalg.norm((a - b).ravel()) / jax.numpy.maximum(norm, 1e-30)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
