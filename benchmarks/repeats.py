"""What several runs have: in whose table it stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.lacking import complete


def without_repeats(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs without the rows and sections that they had no time for and another run on the same
    GPU has, unless that is older: it may have measured other code.
    """
    kept = []
    for run in runs:
        gpu = run["gpu"].get("name")
        same = [other for other in runs if other["gpu"].get("name") == gpu]
        done = {name for other in same if other["date"] >= run["date"] for name in complete(other)}
        late = done - set(complete(run))
        rows = [row for row in run["rows"] if f"{row['op']}: {row['label']}" not in late]
        sections = {key: x for key, x in run["sections"].items() if key not in late}
        kept.append({**run, "rows": rows, "sections": sections})
    return kept


def newest_first(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of `without_repeats`, also without the rows and the sections that stand in a newer run
    on the same GPU; `newer` counts the rows that a run no longer has, `newer_sections` names those.

    The newer row times ours and every rival that the older one times: where it lacks one, both
    stay, for no ratio is taken across runs. So a section goes as a whole: the newer run has
    measured all of it that the older one has.
    """
    kept = []
    timed: dict[tuple[str, str, str], list[set[str]]] = {}
    measured: dict[tuple[str, str], list[set[Any]]] = {}
    pairs = zip(runs, without_repeats(runs), strict=True)
    for whole, run in sorted(pairs, key=lambda pair: pair[0]["date"], reverse=True):
        rows = []
        for row in run["rows"]:
            newer = timed.setdefault((run["gpu"].get("name", ""), row["op"], row["label"]), [])
            names = {name for name, timing in row["times"].items() if "us" in timing}
            if not any(names | {"ours"} <= others for others in newer):
                rows.append(row)
            newer.append(names)
        gone = []
        for name in dict.fromkeys(key.split("/")[0] for key in run["sections"]):
            newer = measured.setdefault((run["gpu"].get("name", ""), name), [])
            keys = _measured(run["sections"], name)
            if any(others and keys <= others for others in newer):
                gone.append(name)
            newer.append(keys)
        sections = {k: x for k, x in run["sections"].items() if k.split("/")[0] not in gone}
        count = len(whole["rows"]) - len(rows)
        parts = {"rows": rows, "sections": sections, "newer": count, "newer_sections": gone}
        kept.append({**run, **parts})
    return kept


def _measured(sections: dict[str, Any], name: str) -> set[tuple[str, int | None]]:
    """What of a section has numbers; a model of fewer layers is another."""
    return {
        (key, found.get("layers"))
        for key, found in sections.items()
        if key.split("/")[0] == name and not found.keys() & {"failed", "not_run"}
    }
