"""The programs of cases, compiled side by side.

Pallas lowers its kernels in Python, and Python's lock lets one thread do that at a time: 32 of our
attention kernels took 57 s in 15 threads, 1.6 s each (cuDNN's 32 took 3 s). So they are compiled in
processes, which hand the executables over; in threads here is what XLA alone compiles, for it tunes
itself with much memory, and what cannot be handed over.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import jax
from jax.experimental import serialize_executable

from benchmarks import rivals
from benchmarks.case import Case
from benchmarks.cases import all_cases
from benchmarks.correct import sentence

FIRST = ("ours", "xla", "cudnn")  # of a case's programs; further rivals come in a second round
# Lowered in no time; and tokamax, whose executables jaxlib 0.11.2 does not load again ("Invalid
# metadata payload id")
HERE = ("xla", "cudnn", "xla cudnn norm", "tokamax")
OTHER_THREADS = 3  # that are kept for these


@dataclasses.dataclass(frozen=True)
class Program:
    """run is timed; prepare makes its arguments of the case's, which run takes as they are if
    it is None.
    """

    run: Callable[..., Any]
    prepare: Callable[..., tuple] | None = None


class Programs:
    """The programs of some cases, compiled in threads and, if there are enough, in processes."""

    def __init__(self, *, on_gpu: bool, threads: int, processes: int | None = None):
        self.on_gpu = on_gpu
        self.pool = ThreadPoolExecutor(threads)
        count = max(0, threads - OTHER_THREADS) * on_gpu if processes is None else processes
        # Each thread of `drivers` has a process work, and takes what it hands over
        self.drivers = ThreadPoolExecutor(count) if count else None
        self.processes = _processes(count) if count else None
        self.rivals: dict[str, dict[str, rivals.Rival]] = {}
        self.futures: dict[tuple[str, str], Future] = {}

    def names(self, case: Case, *, first: bool) -> list[str]:
        """What is timed of a case in the first round, or in the second."""
        if case.name not in self.rivals:
            self.rivals[case.name] = _table(case, self.on_gpu)
        if not self.on_gpu:
            return ["xla"] if first else []
        return [name for name in self.rivals[case.name] if (name in FIRST) == first]

    def begin(self, cases: Sequence[Case], *, first: bool) -> None:
        """Compile what these cases need for a round, case by case, unless it is there."""
        for case in cases:
            names = self.names(case, first=first)
            if (case.name, "") not in self.futures:
                self.futures[case.name, ""] = self.pool.submit(_compile_inputs, case)
            for name in dict.fromkeys(["xla", *names]):
                if (case.name, name) not in self.futures:
                    self.futures[case.name, name] = self._submit(case, name)

    def _submit(self, case: Case, name: str) -> Future:
        if self.drivers is None or name.partition(", ")[0] in HERE:  # "tokamax, bfloat16" too
            rival = self.rivals[case.name][name]
            return self.pool.submit(compile_here, case.arguments, rival)
        return self.drivers.submit(self._elsewhere, case, name)

    def _elsewhere(self, case: Case, name: str) -> Program:
        """Compiled by a process; here if it died, or if its executables cannot be loaded."""
        assert self.processes is not None
        try:
            found = self.processes.submit(_handed_over, case.op, case.name, name).result()
        except concurrent.futures.BrokenExecutor:
            return compile_here(case.arguments, self.rivals[case.name][name])
        if isinstance(found, str):
            raise RuntimeError(found)
        try:
            return Program(*map(_load, found))
        except Exception:  # not the kernel's fault: nothing has run yet
            return compile_here(case.arguments, self.rivals[case.name][name])

    def stop(self) -> None:
        """Begin no more of it, and forget what was not begun."""
        self.futures = {key: future for key, future in self.futures.items() if not future.cancel()}

    def forget(self, case: Case) -> None:
        """Give back what a case's programs take."""
        for key in [key for key in self.futures if key[0] == case.name]:
            del self.futures[key]

    def ready(self, case: Case, *, first: bool) -> bool:
        """Whether all that a round needs of the case has been compiled, or has failed."""
        keys = [(case.name, name) for name in ("", "xla", *self.names(case, first=first))]
        return all(key in self.futures and self.futures[key].done() for key in keys)

    def inputs(self, case: Case, seed: int) -> tuple[jax.Array, ...]:
        """The case's arguments, on the device."""
        return self.futures[case.name, ""].result()(jax.random.key(seed))

    def get(self, case: Case, name: str) -> Program:
        """The compiled programs of "ours" or a rival."""
        return self.futures[case.name, name].result()

    def waiting(self, timeout_s: float) -> int:
        """How many programs are still being compiled after so long."""
        pending = concurrent.futures.wait(self.futures.values(), timeout_s).not_done
        return len(pending)

    def close(self) -> None:
        """Compile nothing more."""
        for pool in (self.pool, self.drivers, self.processes):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)


def _table(case: Case, on_gpu: bool) -> dict[str, rivals.Rival]:
    return ({"ours": rivals.Rival(case.run)} if on_gpu else {}) | rivals.of(case)


def _processes(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        count, mp_context=multiprocessing.get_context("spawn"), initializer=_begin_process
    )


def _begin_process() -> None:
    # Read when JAX first looks for devices: the worker has most of the memory already
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def compile_here(arguments: tuple, rival: rivals.Rival) -> Program:
    """The rival's programs, for the case's arguments."""
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


def _handed_over(op: str, name: str, rival_name: str) -> list[tuple | None] | str:
    """In a process: run and prepare as `_load` takes them, or why there are none."""
    try:
        case = next(case for case in all_cases((op,)) if case.name == name)
        rival = _table(case, True)[rival_name]
        if rival.prepare is not None:
            rival = _flat(rival, rival.prepare)
        program = compile_here(case.arguments, rival)
        parts: list[Any] = [program.run, program.prepare]
        return [None if part is None else serialize_executable.serialize(part) for part in parts]
    except Exception as error:  # not every exception can be sent
        return sentence(error)


def _load(part: tuple | None) -> Any:
    return None if part is None else serialize_executable.deserialize_and_load(*part)


def _flat(rival: rivals.Rival, prepare: Callable[..., tuple]) -> rivals.Rival:
    """The same with nothing but arrays between prepare and run: a saved forward pass holds
    functions, which no other process has.
    """
    trees: list[Any] = []

    def flat_prepare(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        leaves, tree = jax.tree.flatten(prepare(*arguments))
        trees.append(tree)
        return tuple(leaves)

    def flat_run(*leaves: jax.Array) -> Any:
        return rival.run(*jax.tree.unflatten(trees[-1], leaves))

    return dataclasses.replace(rival, run=flat_run, prepare=flat_prepare)


def _compile_inputs(case: Case) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    return jax.jit(case.inputs).lower(jax.random.key(0)).compile()
