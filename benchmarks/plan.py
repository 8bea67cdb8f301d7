"""Which cases and sections a run takes, and in which order."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

from benchmarks import rivals, sections
from benchmarks.case import Case
from benchmarks.cases import all_cases

# What a host checks in float64 within a second or two
CHECK_BYTES, CHECK_OPERATIONS = 300_000_000, 100_000_000_000


@dataclasses.dataclass
class Plan:
    """What a run asks of its workers.

    only: a regular expression, found in the case's name ("rope: 1 x ..."), or the section's key;
    have: names and keys that another file has already. done: keys of tasks that have a result.
    stage: the one that is run now (`sections.stage`); None: all of them.
    """

    log: str
    names: list[str]
    done: list[str]
    deadline: float
    threads: int = 8
    quick: bool = False
    host_clock: bool = False
    layers: int = 32
    only: str = ""
    have: list[str] = dataclasses.field(default_factory=list)
    stage: int | None = None

    def takes(self, name: str) -> bool:
        """Whether a case or section of this name is asked for."""
        now = self.stage in (None, sections.stage(name))
        return now and name not in self.have and re.search(self.only, name) is not None


def chosen(plan: Plan, on_gpu: bool) -> list[Case]:
    """The cases to run: those named; in a hurry the smallest and the largest an op, and without a
    GPU the smallest, if it is small, also where another file has it.

    Names of sections choose no case.
    """
    if not on_gpu:
        plan = dataclasses.replace(plan, have=[])
    ops = tuple(name for name in plan.names if name not in sections.SECTIONS)
    if plan.names and not ops:
        return []
    cases = [case for case in all_cases(ops) if not case.compile_only and plan.takes(case.name)]
    if on_gpu and not plan.quick:
        return cases
    if not on_gpu:
        cases = [case for case in cases if not is_large(case)]
    picked: dict[str, Case] = {}
    for op in dict.fromkeys(case.op for case in cases):
        rising = sorted((c for c in cases if c.op == op), key=lambda c: c.bytes)
        for case in [rising[0], *([rising[-1]] if on_gpu else [])]:
            picked[case.name] = case
    return list(picked.values())


def is_large(case: Case) -> bool:
    """Whether a host would take long to do the whole call again in float64."""
    return case.bytes > CHECK_BYTES or case.operations > CHECK_OPERATIONS


def in_turn(cases: Sequence[Case]) -> list[Case]:
    """The ops in turn, forward before backward, the cases of each as its file has them: those that
    matter most stand first there.
    """
    piles: dict[tuple[bool, str], list[Case]] = {}
    for case in cases:
        piles.setdefault((rivals.is_backward(case), case.op), []).append(case)
    turns = itertools.zip_longest(*(piles[key] for key in sorted(piles)))
    return [case for case in itertools.chain(*turns) if case is not None]
