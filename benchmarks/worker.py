"""The process that holds the GPU for JAX: takes tasks one by one, writes what came of each.

`__main__.py` starts it, reads its log, and starts it anew without the task that killed it: a kernel
that hangs or faults takes one row with it, not the run. Order: correctness of a few cases, then the
ceilings, then their times; then the next few, the ops in turn, so that what no time is left for is
a bit of each. While programs are compiled nothing is timed: XLA times candidates on the GPU then.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from benchmarks import ceilings, rivals, sections
from benchmarks.case import Case
from benchmarks.cases import all_cases
from benchmarks.correct import DIFFERS, check, sentence
from pallas_kernels.measure import Stopwatch, num_sets

# After these the process can do nothing more on the GPU.
FATAL = ("CUDA_ERROR_ILLEGAL", "CUDA_ERROR_LAUNCH", "CUDA_ERROR_MISALIGNED", "unspecified launch")
FATAL_EXIT, CLOCKS_EXIT = 70, 71
AT_A_TIME = 12  # cases: some 70 programs of attention, which compile in half a minute
ROUNDS, ROUND_S = 2, 3.0
FEW_CALLS, TIMED_S = 4, 0.3  # a call so long that 20 of them take longer is repeated less often
ALONE_BYTES = 2**32  # what no cache holds a tenth of needs no second set of inputs
LATE_S = 150.0  # of the time kept for whole models, whose programs take long to compile
HOST_BYTES = 24 * 2**30  # float64 arrays of checks that may lie on the host at a time
# What a host checks in float64 within a second or two
CHECK_BYTES, CHECK_OPERATIONS = 300_000_000, 100_000_000_000
TOO_LARGE = {"not_run": "too large for this run: pytest -m gpu checks it"}


@dataclasses.dataclass
class Plan:
    """What the parent asks for; done holds the keys of tasks that have a result already."""

    log: str
    names: list[str]
    done: list[str]
    deadline: float
    threads: int = 8
    quick: bool = False
    host_clock: bool = False
    layers: int = 32


class Log:
    """JSON lines: what was begun, and what came of it."""

    def __init__(self, path: str):
        self.path = Path(path)

    def write(self, event: str, key: str, **values: Any) -> None:
        """One line, on disk when this returns."""
        record = {"event": event, "key": key, "at": time.time(), **values}
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def chosen(names: list[str], quick: bool, on_gpu: bool) -> list[Case]:
    """The cases to run: those named; without a GPU or in a hurry, the smallest (and largest) an op.

    Names of sections choose no case.
    """
    ops = tuple(name for name in names if name not in sections.SECTIONS)
    if names and not ops:
        return []
    cases = [case for case in all_cases(ops) if not case.compile_only]
    if on_gpu and not quick:
        return cases
    picked: dict[str, Case] = {}
    for op in dict.fromkeys(case.op for case in cases):
        falling = sorted((c for c in cases if c.op == op), key=lambda c: c.bytes)
        for case in [falling[0], *([falling[-1]] if on_gpu else [])]:
            picked[case.name] = case
    return list(picked.values())


def in_turn(cases: Sequence[Case]) -> list[Case]:
    """The ops in turn, forward before backward: of each the largest, the smallest, and so on."""
    piles = []
    for key in sorted({(rivals.is_backward(c), c.op) for c in cases}):
        falling = sorted(
            (c for c in cases if (rivals.is_backward(c), c.op) == key), key=lambda c: -c.bytes
        )
        ends = itertools.zip_longest(falling, reversed(falling))
        piles.append(list(itertools.chain(*ends))[: len(falling)])
    return [c for c in itertools.chain(*itertools.zip_longest(*piles)) if c is not None]


@dataclasses.dataclass(frozen=True)
class Program:
    """run is timed; prepare makes its arguments of the case's, which run takes as they are if
    it is None.
    """

    run: Callable[..., Any]
    prepare: Callable[..., tuple] | None = None


class Programs:
    """The programs of some cases at a time, compiled in threads."""

    def __init__(self, *, on_gpu: bool, threads: int):
        self.on_gpu = on_gpu
        self.pool = ThreadPoolExecutor(threads)
        self.rivals: dict[str, dict[str, rivals.Rival]] = {}
        self.futures: dict[tuple[str, str], Future] = {}
        self.makers: dict[str, Future] = {}

    def begin(self, cases: Sequence[Case]) -> None:
        """Compile what these cases need, and forget what the cases before needed."""
        self.rivals = {case.name: rivals.of(case) for case in cases}
        self.futures, self.makers = {}, {}
        for case in cases:  # first what the checks need
            self.makers[case.name] = self.pool.submit(_compile_inputs, case)
            self._submit(case, "xla", self.rivals[case.name]["xla"])
            if self.on_gpu:
                self._submit(case, "ours", rivals.Rival(case.run))
        for case in cases if self.on_gpu else ():
            for name, rival in self.rivals[case.name].items():
                if name != "xla":
                    self._submit(case, name, rival)

    def _submit(self, case: Case, name: str, rival: rivals.Rival) -> None:
        self.futures[case.name, name] = self.pool.submit(_compile, case.arguments, rival)

    def inputs(self, case: Case, seed: int) -> tuple[jax.Array, ...]:
        """The case's arguments, on the device."""
        return self.makers[case.name].result()(jax.random.key(seed))

    def get(self, case: Case, name: str) -> Program:
        """The compiled programs of "ours" or a rival."""
        return self.futures[case.name, name].result()

    def waiting(self, timeout_s: float) -> int:
        """How many programs are still being compiled after so long."""
        pending = concurrent.futures.wait(self.futures.values(), timeout_s).not_done
        return len(pending)

    def close(self) -> None:
        """Compile nothing more."""
        self.pool.shutdown(wait=False, cancel_futures=True)


def _compile(arguments: tuple, rival: rivals.Rival) -> Program:
    prepare = None
    if rival.prepare is not None:
        before = jax.jit(rival.prepare).lower(*arguments)
        prepare = before.compile()
        # Of this very trace: the functions in a saved forward pass are equal to no other trace's
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tuple(before.out_info)
        )
    program = jax.jit(rival.run).lower(*arguments)
    compiled = program.compile(compiler_options=dict(rival.options) or None)
    if rival.must_have and rival.must_have not in (compiled.as_text() or ""):
        raise NotImplementedError(f"XLA put no {rival.must_have} into the program")
    return Program(compiled, prepare)


def _compile_inputs(case: Case) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    return jax.jit(case.inputs).lower(jax.random.key(0)).compile()


def main(argv: list[str]) -> int:
    """Run a plan: the path of its JSON file is the only argument."""
    plan = Plan(**json.loads(Path(argv[0]).read_text()))
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
    cases = chosen(plan.names, plan.quick, on_gpu)
    run = _Run(plan, log, cases, on_gpu)
    try:
        run.everything()
    finally:
        run.programs.close()
    log.write("end", "all", result={})
    return 0


def is_large(case: Case) -> bool:
    """Whether a host would take long to do the whole call again in float64."""
    return case.bytes > CHECK_BYTES or case.operations > CHECK_OPERATIONS


class _Run:
    def __init__(self, plan: Plan, log: Log, cases: list[Case], on_gpu: bool):
        self.plan, self.log, self.cases, self.on_gpu = plan, log, cases, on_gpu
        self.programs = Programs(on_gpu=on_gpu, threads=plan.threads)
        self.watch = Stopwatch("host" if plan.host_clock or not on_gpu else None)

    def task(self, key: str, work: Callable[[], Any]) -> None:
        """Do it unless it is done, and write down what came of it."""
        if key in self.plan.done:
            return
        self.plan.done.append(key)
        if time.time() > self.plan.deadline:
            self.log.write("end", key, result={"not_run": "the time for this run was spent"})
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
        """Cases, a few at a time, and sections; whole models last, with time kept for them."""
        plan = self.plan
        work = sections.tasks(plan.names, plan.quick, self.on_gpu, plan.layers)
        late = [key for key, _ in work if key.split("/")[0] in sections.LATE]
        early = [(key, run) for key, run in work if key not in late]
        end = plan.deadline
        if late and self.cases:
            plan.deadline -= LATE_S
        cases = [c for c in in_turn(self.cases) if f"time/{c.name}" not in plan.done]
        for some in [cases[i : i + AT_A_TIME] for i in range(0, len(cases), AT_A_TIME)] or [[]]:
            if time.time() < plan.deadline:
                self.programs.begin(some)
            self.correctness(some)
            self.compilation()
            self.ceilings()
            self.sections(early)
            for case in some:
                self.task(f"time/{case.name}", lambda case=case: self.time(case))
        plan.deadline = end
        self.sections([(key, run) for key, run in work if key in late])

    def sections(self, work: Sequence[tuple[str, sections.Work]]) -> None:
        """See sections.py."""
        for key, run in work:
            self.task(f"section/{key}", lambda run=run: run(self.watch))

    def correctness(self, cases: Sequence[Case]) -> None:
        """Cases that the host can do again against float64: the GPU's part here, the host's in
        threads. The rest is compared with its plain path when it is timed, and by the GPU tests.
        """
        pool = ThreadPoolExecutor(max(2, min(12, (os.cpu_count() or 4) - 2)))
        waiting: list[tuple[str, Future, int]] = []

        def finish(limit: int) -> None:
            while waiting and (waiting[0][1].done() or sum(size for _, _, size in waiting) > limit):
                key, future, _ = waiting.pop(0)
                self.log.write("end", key, result=future.result())

        def begin(case: Case, key: str) -> None:
            arguments = whole = self.programs.inputs(case, 0)
            plain = self.programs.get(case, "xla").run(*arguments)
            ours = self.programs.get(case, "ours").run(*arguments) if self.on_gpu else plain
            if is_large(case) and case.sample is not None:
                arguments, ours = case.sample(whole, ours)
                _, plain = case.sample(whole, plain)
            arguments, ours, plain = jax.device_get((arguments, ours, plain))
            size = 8 * 6 * sum(x.size for x in jax.tree.leaves((arguments, ours)))
            finish(max(0, HOST_BYTES - size))
            waiting.append((key, pool.submit(check, case, arguments, ours, plain), size))

        for case in cases:
            key = f"correct/{case.name}"
            if is_large(case) and case.sample is None:
                if key not in self.plan.done:
                    self.log.write("end", key, result=TOO_LARGE)
                continue
            self.task(key, lambda case=case, key=key: begin(case, key))
        finish(0)
        pool.shutdown()

    def compilation(self) -> None:
        """Wait for it: XLA times candidates on the GPU meanwhile, and would be timed with them."""
        while self.on_gpu and time.time() < self.plan.deadline:
            if not (left := self.programs.waiting(5.0)):
                break
            self.log.write("begin", f"compilation: {left} programs left")  # a sign of life

    def ceilings(self) -> None:
        """What percent is percent of."""
        if self.on_gpu:
            believe = self.plan.host_clock
            self.task("ceilings", lambda: ceilings.measure(self.watch, believe=believe))

    def time(self, case: Case) -> dict[str, Any]:
        """{rival: its timing, or why there is none}."""
        count = num_sets(case.bytes) if self.on_gpu else 2
        if case.bytes > ALONE_BYTES:
            count = 1
        sets = [self.programs.inputs(case, i) for i in range(count)]
        jax.block_until_ready(sets)
        names = (["ours"] if self.on_gpu else []) + list(self.programs.rivals[case.name])
        times: dict[str, dict[str, Any]] = {}
        ready: dict[str, tuple] = {}
        most = 10 if self.plan.quick or not self.on_gpu else 20
        plain = None
        for name in ["xla", *names] if self.on_gpu else ["xla"]:
            if name in ready:
                continue
            try:
                program = self.programs.get(case, name)
                used = sets
                if program.prepare is not None:
                    used = jax.block_until_ready([program.prepare(*x) for x in sets])
                result = jax.block_until_ready(program.run(*used[0]))
                plain = result if name == "xla" else plain
                apart = 0.0 if plain is None else _apart(result, plain)
                if not apart < DIFFERS:
                    times[name] = {"failed": f"its result is {apart:.2g} away from xla's"}
                else:
                    start = time.time()
                    jax.block_until_ready(program.run(*used[0]))
                    calls = max(FEW_CALLS, min(most, int(TIMED_S / (time.time() - start + 1e-9))))
                    ready[name] = program.run, used, calls
            except Exception as error:
                self._survive(error)
                times[name] = {"failed": sentence(error)}
        del plain
        if not case.time_plain and "xla" in ready:
            times["xla"] = {"not_run": "a check of the others: its scores do not fit in memory"}
            del ready["xla"]
        start = time.time()
        for _ in range(ROUNDS):  # in turns, since clocks drift; the better one counts
            for name, (program, used, calls) in list(ready.items()):
                try:
                    timing = dataclasses.asdict(self.watch.time(program, used, calls=calls))
                except Exception as error:
                    self._survive(error)
                    times[name] = {"failed": sentence(error)}
                    del ready[name]
                    continue
                if name not in times or timing["us"] < times[name]["us"]:
                    times[name] = timing
            if time.time() - start > ROUND_S:
                break
        return {name: times[name] for name in dict.fromkeys([*names, "xla"]) if name in times}

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
    return max(float(_distance(a, b)) for a, b in zip(ours, other, strict=True))


@jax.jit
def _distance(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = a.astype(jax.numpy.float32), b.astype(jax.numpy.float32)
    norm = jax.numpy.linalg.norm(b.ravel())
    return jax.numpy.linalg.norm((a - b).ravel()) / jax.numpy.maximum(norm, 1e-30)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
