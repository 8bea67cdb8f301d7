"""Results as tables and a plot: `python -m benchmarks.report benchmarks/results/*.json`.

Of all of these it writes benchmarks/results/README.md, the tables, and results.png, a plot of each
op's largest call, beside it; of other files what `--tables` and `--plot` name. Ratios are taken
within one file, that is one run on one GPU. A row that several runs on a GPU have stands once, in
the newest that has all of it, and so does a section; what one had no time for, in the one that had.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import decoding, step_kernels, training
from benchmarks.lacking import LATE, names_of
from benchmarks.repeats import newest_first, without_repeats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parent / "results"
HEAD = """# Results

`python -m benchmarks.report benchmarks/results/*.json` writes this file; nobody edits it.

What a run does and how to read its tables: [benchmarks/](../README.md). What was tried besides:
[notes](../notes.md). The newest run comes first. A case stands in the newest run on its GPU that
has a time for ours, and in an older one only if that has timed a rival that the newer has not; a
section's table is left out where one newer run on its GPU has all of it.
"(TF32)" or "(float32)" behind a time: its kernels multiply the case's narrower numbers in these, at
a fraction of their rate, and it counts as no rival.
"""
# A sum of kernels this far below the wall clock leaves something out, such as a copy; of shorter
# calls it may be the host, which takes longer to start them than they run.
UNSEEN, LONG_US = 1.2, 1000.0
NARROW = re.compile(r"\b(bfloat16|float16|float8_\w+)")
WIDE = {"tf32": "TF32", "gemm_f32f32_f32f32": "float32"}  # in names of kernels
DICTIONARIES = ("gpu", "versions", "libraries", "sections")
KEYS = {"date": str, "rows": list, **dict.fromkeys(DICTIONARIES, dict)}
ROW_KEYS = {"op", "label", "kind", "bytes", "operations", "correct", "times"}
LEAST_DRAWN_BYTES = 9_000_000  # of an H200's copy rate, what a kernel's start takes: 2 us


def time_us(timing: dict[str, Any]) -> float | None:
    """Microseconds a call; None if there is no time.

    CUPTI's sum of kernels; the wall clock for long calls where that is a fifth above it: what CUPTI
    does not see, such as a copy, then takes time.
    """
    if "us" not in timing:
        return None
    us, wall_us = timing["us"], timing.get("wall_us", timing["us"])
    unseen = timing.get("clock") == "cupti" and us > LONG_US and wall_us > UNSEEN * us
    return wall_us if unseen else us


def percent(row: dict[str, Any], us: float, ceilings: dict[str, Any] | None) -> float | None:
    """Of the copy rate of the run, or of its matmul or read rate where that is what counts."""
    if not ceilings or "copy" not in ceilings:
        return None
    ceiling = row.get("ceiling")  # older files have none
    if ceiling is None:
        ceiling = "matmul" if row["kind"] == "matmul" and row["operations"] else "copy"
    counted = row["operations" if ceiling == "matmul" else "bytes"]
    return 1e8 * counted / us / ceilings[ceiling]


def wide(row: dict[str, Any], timing: dict[str, Any]) -> str:
    """What a rival's kernels multiply narrower numbers in, "TF32" or "float32"; else ""."""
    if not NARROW.search(f"{row['label']} {row.get('dtype', '')}"):  # older files have no dtype
        return ""
    names = " ".join(timing.get("kernels") or ())
    return next((word for part, word in WIDE.items() if part in names), "")


def figures(row: dict[str, Any], ceilings: dict[str, Any] | None) -> dict[str, Any]:
    """What a row says of ours: us, percent, best rival, its us, ratio (above 1: ours is faster).

    A variant of ours that was tried beside it ("ours, ...") is no rival, nor is what computes in
    wider numbers.
    """
    times = {name: time_us(timing) for name, timing in row["times"].items()}
    ours = times.pop("ours", None)
    rivals = {
        name: us
        for name, us in times.items()
        if us is not None and not name.startswith("ours, ") and not wide(row, row["times"][name])
    }
    best = min(rivals, key=lambda name: rivals[name], default=None)
    found: dict[str, Any] = {"us": ours, "percent": None, "best": best, "ratio": None}
    found["best_us"] = None if best is None else rivals[best]
    found["xla_us"] = times.get("xla")
    if ours is not None:
        found["percent"] = percent(row, ours, ceilings)
        if best is not None:
            found["ratio"] = rivals[best] / ours
    return found


def lines(results: dict[str, Any]) -> Iterator[str]:
    """One run as Markdown."""
    gpu = results["gpu"]
    ceilings = results.get("ceilings") or {}
    versions = results["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("jax", "torch") if name in versions)
    yield f"{gpu.get('name', 'no GPU')}, {results['date']}."
    yield f"Driver {gpu.get('driver', 'none')}, {named}."
    if "copy" in ceilings:
        yield (
            f"Ceilings of this run: copy {ceilings['copy'] / 1e12:.2f} TB/s, read "
            f"{ceilings['read'] / 1e12:.2f} TB/s, bf16 matmul {ceilings['matmul'] / 1e12:.0f} "
            "TFLOP/s."
        )
    yield ""
    if "seconds" not in results:
        yield "The run was ended before its end."
        yield ""
    elif spent := results.get("spent_s"):
        phases = ", ".join(f"{name} {seconds:.0f}" for name, seconds in spent.items())
        yield f"Of {results['seconds']:.0f} s, those of each process and of JAX's phases: {phases}."
        yield ""
    if newer := results.get("newer"):
        yield f"Rows that stand in a newer run: {newer} of {newer + len(results['rows'])}."
        yield ""
    if gone := results.get("newer_sections"):
        yield f"Sections that stand in a newer run: {', '.join(gone)}."
        yield ""
    yield from _cases(results, ceilings)
    yield from _narrow_caches(results)
    yield from _fusion(results, ceilings)
    yield from _attention(results)
    yield from _layer(results)
    yield from decoding.lines(functools.partial(_section, results), ceilings, _why)
    yield from step_kernels.lines(_section(results, "step-kernels"), ceilings, _why)
    yield from _prefill(results)
    yield from _long_context(results)
    yield from training.lines(_section(results, "train"), _why)
    yield from _failures(results)
    absent = {k: v["absent"] for k, v in results["libraries"].items() if "absent" in v}
    if absent:
        yield "Absent: " + ", ".join(f"{name} ({why})" for name, why in absent.items()) + "."
        yield ""


def _cases(results: dict[str, Any], ceilings: dict[str, Any]) -> Iterator[str]:
    rows = results["rows"]
    timed = [r for r in rows if r["correct"] not in LATE or r["times"].get("ours") not in LATE]
    if timed:
        yield (
            "| case | right | MB | GFLOP | ours, us | GB/s | TFLOP/s | of ceiling | XLA, us | "
            "best rival | ratio |"
        )
        yield "|---|---|--:|--:|--:|--:|--:|--:|--:|---|--:|"
    for row in timed:
        f = figures(row, ceilings)
        rival = "" if f["best"] is None else f"{f['best']} {f['best_us']:.1f}"
        wider = wide(row, row["times"].get("xla", {}))
        ours = _number(f["us"], "{:.1f}") or _why(row["times"].get("ours"))
        cells = [
            f"{row['op']}: {row['label']}",
            row["correct"].get("status") or _why(row["correct"]),
            f"{row['bytes'] / 1e6:.3g}",
            f"{row['operations'] / 1e9:.4g}" if row["operations"] else "",
            ours,
            _rate(row["bytes"], f["us"], 1e3, "{:.0f}"),
            _rate(row["operations"], f["us"], 1e6, "{:.3g}"),
            _number(f["percent"], "{:.0f} %"),
            _number(f["xla_us"], "{:.1f}") + (f" ({wider})" if wider else ""),
            rival,
            _number(f["ratio"], "{:.2f}"),
        ]
        yield "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
    if timed:
        yield ""
    if late := len(rows) - len(timed):
        yield f"{late} {'more' if timed else 'of its cases'} had no time in this run."
        yield ""


def _narrow_caches(results: dict[str, Any]) -> Iterator[str]:
    """Decoding over an int8 cache against the same over a bfloat16 one."""
    us = {
        row["label"]: time_us(row["times"].get("ours", {}))
        for row in results["rows"]
        if row["op"] == "decode_attention"
    }
    found = []
    for label, narrow in us.items():
        wide = us.get(label.replace("int8 cache", "bfloat16 cache"))
        if "int8 cache" in label and narrow and wide:
            found.append(f"{wide / narrow:.2f} at {label.removesuffix(', int8 cache')}")
    if found:
        yield f"Times as fast over an int8 cache as over a bfloat16 one: {'; '.join(found)}."
        yield ""


def _rate(counted: int, us: float | None, unit: float, form: str) -> str:
    return "" if us is None or not counted else form.format(counted / us / unit)


def _failures(results: dict[str, Any]) -> Iterator[str]:
    """Rivals without a time, each reason once."""
    cases: dict[tuple[str, str], int] = {}
    for row in results["rows"]:
        for name, timing in row["times"].items():
            if name != "ours" and "us" not in timing:
                cases[name, _why(timing)] = cases.get((name, _why(timing)), 0) + 1
    if cases:
        yield "Rivals without a time:"
        yield ""
        for (name, why), count in sorted(cases.items()):
            yield f"* {name}, {count} case{'s' if count > 1 else ''}: {why}"
        yield ""


def _fusion(results: dict[str, Any], ceilings: dict[str, Any]) -> Iterator[str]:
    found = _section(results, "softmax-fusion")
    if not found:
        return
    yield "Scale, mask and softmax, bfloat16, with a key mask:"
    yield ""
    yield "| shape | how | kernels | MB | us | of the copy rate, by ours' bytes |"
    yield "|---|---|--:|--:|--:|--:|"
    for shape, result in found.items():
        if "model_bytes" not in result:
            yield f"| {shape} | {_why(result)} | | | | |"
            continue
        for how in ("separate", "xla", "ours"):
            timing = result[how]
            us = time_us(timing) or 0.0
            kernels = timing.get("kernels")
            copy = ceilings.get("copy")  # none where it could not be measured
            rate = None if copy is None else 1e8 * result["model_bytes"] / us / copy
            yield (
                f"| {shape} | {how} | {'' if kernels is None else len(kernels)} | "
                f"{timing['bytes'] / 1e6:.4g} | {us:.1f} | {_number(rate, '{:.0f} %')} |"
            )
    yield ""


def _attention(results: dict[str, Any]) -> Iterator[str]:
    found = _section(results, "unfused-attention")
    if not found:
        return
    yield "Causal attention with and without our softmax between two matmuls:"
    yield ""
    yield "| B x T x N x H, dtype | how | kernels | us |"
    yield "|---|---|--:|--:|"
    for dtype, result in found.items():
        if "times" not in result:
            yield f"| {dtype} | {_why(result)} | | |"
            continue
        sizes = " x ".join(map(str, result["shape"]))
        for how, timing in result["times"].items():
            kernels = timing.get("kernels")
            count = "" if kernels is None else len(kernels)
            yield f"| {sizes} {dtype} | {how} | {count} | {time_us(timing) or 0.0:.1f} |"
    yield ""


def _layer(results: dict[str, Any]) -> Iterator[str]:
    for label, result in _section(results, "layer").items():
        if "jitted" not in result:
            yield f"A decoder layer, {label}: {_why(result)}"
        else:
            slow = result["op by op, attention on the host"]["us"]
            fast = result["jitted"]["us"]
            yield (
                f"A decoder layer of Qwen2.5-0.5B, {label}, wall clock: op by op with attention on "
                f"the host {slow:.0f} us, jitted {fast:.0f} us ({slow / fast:.0f} times faster)."
            )
        yield ""


def _prefill(results: dict[str, Any]) -> Iterator[str]:
    found = _section(results, "prefill")
    if not found:
        return
    yield "Prefill of one prompt, Llama-3.1-8B's shape, random bfloat16 weights, all else auto:"
    yield ""
    yield "| attention | layers | tokens | ms | of it attention | tokens a second |"
    yield "|---|--:|--:|--:|--:|--:|"
    for name, result in found.items():
        if "tokens_per_s" not in result:
            yield f"| {name} | {_why(result)} | | | | |"
            continue
        share = result.get("share")
        part = (
            "" if share is None else f"{result['attention_us'] / 1e3:.2f} ms, {100 * share:.1f} %"
        )
        yield (
            f"| {name} | {result['layers']} | {result['tokens']} | {result['wall_us'] / 1e3:.1f} | "
            f"{part} | {result['tokens_per_s']:.0f} |"
        )
    yield ""


def _long_context(results: dict[str, Any]) -> Iterator[str]:
    found = _section(results, "long-context")
    if not found:
        return
    yield "Causal attention of one long row, and the memory that its program takes:"
    yield ""
    yield (
        "| attention | B x T, N / K x H | pass | ms | TFLOP/s | "
        "arguments, results, temporaries, MB | all finite |"
    )
    yield "|---|---|---|--:|--:|--:|---|"
    for name, result in found.items():
        if "forward" not in result:
            yield f"| {name} | {_why(result)} | | | | | |"
            continue
        b, t, n, k, h = result["shape"]
        for how in ("forward", "forward and backward"):
            timing = result[how]
            us = time_us(timing) or 0.0
            sizes = (timing[f"{part}_bytes"] for part in ("argument", "output", "temporary"))
            yield (
                f"| {name} | {b} x {t}, {n} / {k} x {h} | {how} | {us / 1e3:.2f} | "
                f"{timing['operations'] / us / 1e6:.0f} | "
                f"{', '.join(f'{size / 1e6:.0f}' for size in sizes)} | "
                f"{'yes' if timing['finite'] else 'no'} |"
            )
    yield ""


def _section(results: dict[str, Any], name: str) -> dict[str, Any]:
    prefix = f"{name}/"
    sections = results["sections"].items()
    return {key.removeprefix(prefix): value for key, value in sections if key.startswith(prefix)}


def _number(x: float | None, form: str) -> str:
    return "" if x is None else form.format(x)


def _why(result: dict[str, Any] | None) -> str:
    """Why there is no number."""
    if not result:
        return "not run"
    for word in ("failed", "not_run", "absent"):
        if word in result:
            # A rival that says why it is none is wrapped on its way through the processes
            said = re.sub(r"^(?:RuntimeError: )+(?=\w+Error: )", "", result[word])
            cannot = said.removeprefix("NotImplementedError: ")
            word = "cannot" if cannot != said else word.replace("_", " ")
            return textwrap.shorten(f"{word}: {cannot}", 120, placeholder=" ...")
    return "not run"


def _largest(runs: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(row, run) of each GPU's and op's call of the most work, forward and backward; of each call
    the newest run; by GPU and op. Work is operations where there are some, else bytes; what moves
    less than LEAST_DRAWN_BYTES is left out.
    """
    calls: dict[tuple[str, str, str], tuple[dict[str, Any], dict[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run["date"]):
        large = (row for row in run["rows"] if row["bytes"] >= LEAST_DRAWN_BYTES)
        timed = (row for row in large if time_us(row["times"].get("ours", {})) is not None)
        name = run["gpu"].get("name", "")
        calls |= {(name, row["op"], row["label"]): (row, run) for row in timed}
    found: dict[tuple[str, str, bool], tuple[dict[str, Any], dict[str, Any]]] = {}
    for (name, op, label), call in calls.items():
        key = name, op, "backward" in label
        if key not in found or _work(call[0]) > _work(found[key][0]):
            found[key] = call
    return [found[key] for key in sorted(found)]


def _work(row: dict[str, Any]) -> tuple[int, int]:
    return row["operations"] or 0, row["bytes"]


def plot(runs: Sequence[dict[str, Any]]) -> Figure | None:
    """Percent of the ceiling, ours and the best rival, of the calls of `_largest`; above those of
    each GPU its name. None if no file has rows and ceilings to draw.
    """
    from matplotlib.figure import Figure

    drawn = _largest([run for run in runs if "copy" in (run.get("ceilings") or {})])
    if not drawn:
        return None
    labels: list[str] = []
    bars, headings = [], []
    for gpu, calls in itertools.groupby(drawn, lambda call: call[1]["gpu"].get("name", "")):
        headings.append(len(labels))
        labels.append(gpu)
        for row, run in calls:
            bars.append((len(labels), row, run["ceilings"]))
            labels.append(f"{row['op']}: {row['label']}")
    figure = Figure(figsize=(12, 0.36 * len(labels) + 1.4))
    axis = figure.subplots()
    for y, row, ceilings in bars:
        f = figures(row, ceilings)
        best = "" if f["best_us"] is None else f"{f['best']} "
        for at, us, name, color in (
            (y - 0.19, f["us"], "", "#1f77b4"),
            (y + 0.19, f["best_us"], best, "#b5b5b5"),
        ):
            if us is not None:
                share = percent(row, us, ceilings) or 0.0
                axis.barh(at, share, 0.36, color=color)
                axis.text(share + 0.5, at, f"{name}{us:.1f} us", va="center", fontsize=7)
    ticks = axis.set_yticks(range(len(labels)), labels, fontsize=8)
    for at in headings:
        ticks[at].label1.set_fontweight("bold")
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.margins(x=0.12)
    axis.axvline(100, color="#c8c8c8", linewidth=0.8, zorder=0)
    axis.set_xlabel("percent of the run's own ceiling: copy, read or bf16 matmul rate")
    axis.set_title("each op's largest call: ours (blue), best rival (grey)", fontsize=10)
    return figure


def document(runs: Sequence[dict[str, Any]]) -> str:
    """All of them as Markdown: what each has, its tables, and at the end those without any left."""
    runs = newest_first(runs)
    standing = [run for run in runs if run["rows"] or run["sections"]]
    text = [HEAD]
    for run in standing:
        anchor = run["file"].lower().replace(".", "")  # as GitHub makes it of the heading
        text.append(f"* [{run['file']}](#{anchor}): {', '.join(names_of(run))}")
    text.append("")
    for run in standing:
        text += [f"## {run['file']}", "", *lines(run)]
    text += [f"* superseded: {run['file']}" for run in runs if run not in standing]
    return "\n".join(text).strip() + "\n"


def read(path: Path) -> dict[str, Any]:
    """What a run wrote. Raises: ValueError if there is no file, or none that a run wrote."""
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"report: {path} cannot be read as results: {error}") from error
    whole = isinstance(results, dict) and all(
        isinstance(results.get(key), kind) for key, kind in KEYS.items()
    )
    if whole:
        found = (*results["rows"], *results["sections"].values())
        whole = all(isinstance(each, dict) for each in found)
        whole = whole and all(row.keys() >= ROW_KEYS for row in results["rows"])
    if not whole:
        raise ValueError(f"report: {path} is no file that python -m benchmarks wrote")
    return {**results, "file": path.name}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 2 for what cannot be read, drawn or written."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="what python -m benchmarks wrote")
    parser.add_argument("--tables", type=Path, help="the Markdown file to write")
    parser.add_argument("--plot", type=Path, help="the picture to write")
    args = parser.parse_args(argv)
    tables, picture = args.tables, args.plot
    if tables is None and picture is None:
        if {path.resolve() for path in args.files} != set(RESULTS.glob("*.json")):
            parser.error(
                "the project's own tables and plot are of all of benchmarks/results/*.json; name "
                "--tables or --plot for those of other files"
            )
        tables, picture = RESULTS / "README.md", RESULTS / "results.png"
    if picture is not None and importlib.util.find_spec("matplotlib") is None:
        print(
            "report: matplotlib, which draws the plot, is not installed: pip install matplotlib, "
            "or name --tables alone",
            file=sys.stderr,
        )
        return 2
    written = []
    try:
        runs = [read(path) for path in args.files]
        if tables is not None:
            tables.write_text(document(runs))
            written.append(str(tables))
        if picture is not None and (figure := plot(without_repeats(runs))) is not None:
            figure.savefig(picture, dpi=110, bbox_inches="tight")  # long labels pass its edge
            written.append(str(picture))
        elif picture is not None:
            print("report: no file has rows and ceilings to plot", file=sys.stderr)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"report: {error.filename} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{' and '.join(written) or 'nothing'}: {len(runs)} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
