"""What a run has had no time for: how its results say so, and how the next run finds it."""

from __future__ import annotations

from typing import Any

SPENT = {"not_run": "the time for this run was spent"}
NO_RESULT = {"not_run": "no result"}
FURTHER = "further rivals"  # of a case, in the second round; and which cases have them
LATE = (SPENT, NO_RESULT)


def complete(results: dict[str, Any]) -> list[str]:
    """Names of the cases, and keys of the sections, that a run has had the time for: they are right
    or wrong, timed or failed, and so are all their rivals.
    """
    rows = [
        f"{row['op']}: {row['label']}"
        for row in results["rows"]
        if not any(found in LATE for found in (row["correct"], *row["times"].values()))
    ]
    return rows + [key for key, found in results["sections"].items() if found not in LATE]


def names_of(results: dict[str, Any]) -> list[str]:
    """The ops and sections that a file of results is of."""
    keys = [row["op"] for row in results["rows"]]
    return list(dict.fromkeys(keys + [key.split("/")[0] for key in results["sections"]]))
