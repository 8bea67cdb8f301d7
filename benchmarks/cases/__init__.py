"""One file an op, with `cases() -> list[Case]`. A file here is found; there is no list to keep."""

from __future__ import annotations

import importlib
import pkgutil

from benchmarks.case import Case


def all_cases(names: tuple[str, ...] = ()) -> list[Case]:
    """The cases of all files here, in the order of the files; of the ops named, if any are.

    Raises: ValueError for a name that no case has.
    """
    cases = [
        case
        for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name)
        for case in importlib.import_module(f"{__name__}.{module.name}").cases()
    ]
    known = {case.op for case in cases}
    unknown = [name for name in names if name not in known]
    if unknown:
        there = ", ".join(sorted(known))
        raise ValueError(f"benchmarks: no case is named {', '.join(unknown)}; there are {there}")
    return [case for case in cases if not names or case.op in names]
