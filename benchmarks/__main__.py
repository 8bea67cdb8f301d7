"""`python -m benchmarks [NAME ...] --out FILE.json`: right, then the ceilings, then every rival.

This process touches no GPU: it starts a worker for JAX, then one for torch, reads their logs, and
starts them anew behind a task that killed them. The file is rewritten as results come in.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import report, rivals, sections, torch_rivals, torch_training
from benchmarks.case import Case
from benchmarks.cases import all_cases
from benchmarks.lacking import FURTHER, NO_RESULT, complete, names_of
from benchmarks.plan import Plan, chosen
from benchmarks.worker import CLOCKS_EXIT, FATAL_EXIT

REPO = Path(__file__).resolve().parent.parent
JAX_SHARE = 0.72  # of the time, if torch is there too
MAX_STARTS = 12
MODULES = ("worker", "torch_worker")
FINE = {"right", "compared", "not_run"}
PACKAGES = (
    "jax jaxlib jax-cuda13-plugin jax-cuda12-plugin flax numpy nvidia-cudnn-cu13 nvidia-cublas "
    "nvidia-cudnn-cu12 nvidia-cublas-cu12"
).split()


class Worker:
    """A worker process that is started as often as its tasks ask for, and what it found."""

    def __init__(self, module: str, plan: Plan, folder: Path, *, task_s: float):
        self.module, self.plan, self.folder, self.task_s = module, plan, folder, task_s
        self.results: dict[str, dict[str, Any]] = {}
        self.stopped: str | None = None
        self.read = self.starts = 0
        self.begun: str | None = None
        self.last_s = self.seconds = 0.0
        self.command = [sys.executable, "-m", f"benchmarks.{module}"]
        Path(plan.log).touch()

    def run(self, on_change: Callable[[], None]) -> None:
        """Until every task of the plan has a result, or why it has none."""
        self.starts, self.stopped = 0, None
        self.results.pop("all", None)  # of the stage before
        while self.starts < MAX_STARTS:
            self.starts += 1
            code, killed = self._once(on_change)
            on_change()
            if "all" in self.results or code == 0:
                return
            if code == CLOCKS_EXIT:
                self.stopped = self.results.get("ceilings", {}).get("failed", "the clocks disagree")
                return
            if code == FATAL_EXIT:
                continue  # the task that did it has said so itself
            why = f"it took more than {self.task_s:.0f} s" if killed else f"exit code {code}"
            if self.begun in (None, "device", "torch"):
                self.stopped = f"the process ended before its first task: {why}"
                return
            if self.plan.threads > 1 and not killed:
                self.plan.threads = 1  # it may have died in a thread: no task is blamed yet
                continue
            said = f"the process was ended: {why}" if killed else f"the process died: {why}"
            self.results.setdefault(self.begun, {"failed": said})
            self.plan.threads = 1
        self.stopped = f"given up after {self.starts} starts"

    def _once(self, on_change: Callable[[], None]) -> tuple[int, bool]:
        self.plan.done = sorted(self.results)
        path = self.folder / f"{self.module}.plan.json"
        path.write_text(json.dumps(dataclasses.asdict(self.plan)))
        command = [*self.command, str(path)]
        paths = [str(REPO), os.environ.get("PYTHONPATH", "")]
        env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ}  # as nvidia-smi counts: see gpu
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self.begun, self.last_s = None, (start := time.time())
        # In a group of its own, which is ended with the processes that compile for it: they have
        # the GPU too, and wait for work for ever
        process = subprocess.Popen(command, env=env, cwd=REPO, start_new_session=True)
        killed = False
        try:
            while process.poll() is None:
                time.sleep(0.2)
                if self._read():
                    on_change()
                late = time.time() > self.plan.deadline + self.task_s
                if late or time.time() - self.last_s > self.task_s:
                    killed = True
                    break
        finally:  # also where this process is interrupted
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.seconds += time.time() - start
        self._read()
        return process.returncode, killed

    def _read(self) -> bool:
        with Path(self.plan.log).open() as file:
            file.seek(self.read)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self.read += len(whole.encode())
        for line in whole.splitlines():
            event = json.loads(line)
            self.last_s = time.time()
            if event["event"] == "begin":
                self.begun = event["key"]
                print(f"... {event['key']}", file=sys.stderr, flush=True)
            else:
                self.results[event["key"]] = event["result"]
                if "failed" in event["result"]:
                    print(f"    {event['result']['failed']}", file=sys.stderr, flush=True)
        return bool(whole)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 if all went well; 1 if something is wrong, the bench does not believe it or a
    worker was given up; 2 for what it cannot do; 130 for Ctrl-C, with what came so far in the file;
    141 where nobody reads the output.
    """
    args = _arguments(argv)
    jax.config.update("jax_platforms", "cpu")  # shapes are all that this process needs of JAX
    try:
        plan = _plan(args)
        known = {case.op for case in all_cases()} | set(sections.SECTIONS)
        if unknown := [name for name in plan.names if name not in known]:
            raise ValueError(
                f"benchmarks: nothing is named {', '.join(unknown)}; there are "
                f"{', '.join(sorted(known | set(sections.GROUPS)))}"
            )
        if not any(_has_work(module, plan) for module in MODULES):
            raise ValueError("benchmarks: --only and --missing leave nothing to run")
        if args.out.is_dir():
            raise ValueError(f"benchmarks: --out {args.out} is a folder; give a file")
        try:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=args.out.parent).close()
        except OSError as error:
            reason = f"benchmarks: --out {args.out} cannot be written: {error.strerror}"
            raise ValueError(reason) from None
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    libraries = rivals.available()
    with_torch = "absent" not in libraries["torch"] and not args.no_torch
    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": ["python", "-m", "benchmarks", *_words(args, argv)],
        "revision": args.revision or _revision(),
        "gpu": gpu(),
        "versions": _versions(),
        "libraries": libraries,
        "ceilings": None,
        "rows": [],
        "sections": {},
        "notes": {},
    }
    try:
        return _measure(args, plan, results, with_torch=with_torch)
    except KeyboardInterrupt:
        timed = [row for row in results["rows"] if any("us" in x for x in row["times"].values())]
        print(
            f"benchmarks: interrupted; {args.out} has {len(timed)} rows with a time"
            if timed
            else "benchmarks: interrupted before a case was timed",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:  # Python flushes once more at its end, and would complain again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _measure(
    args: argparse.Namespace, plan: Plan, results: dict[str, Any], *, with_torch: bool
) -> int:
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        workers: dict[str, Worker] = {}

        def save() -> None:
            assemble(results, workers, plan, with_torch=with_torch)
            temporary = args.out.with_name(f"{args.out.name}.part")
            temporary.write_text(json.dumps(results, indent=1) + "\n")
            temporary.replace(args.out)

        for module, part in turns(plan, args.budget_s, with_torch=with_torch):
            if "worker" in workers and not _on_gpu(workers):
                break
            part.log, part.deadline = str(Path(folder) / f"{module}.log"), start + part.deadline
            if module not in workers:
                workers[module] = Worker(module, part, Path(folder), task_s=args.task_s)
            workers[module].plan = part
            workers[module].run(save)
            if workers[module].stopped:
                results["notes"][module] = workers[module].stopped
                if module == "worker" and workers[module].results.get("ceilings", {}).get("failed"):
                    save()
                    return _tell(results)
        results["seconds"] = round(time.time() - start, 1)
        if not _on_gpu(workers):
            why = "no GPU that JAX can use: a smoke test on the CPU, no measurement"
            results["notes"]["gpu"] = why
        save()
    if not _on_gpu(workers):
        print(
            "benchmarks: there is no GPU that JAX can use; this was a small smoke test on the CPU"
        )
    print("\n".join(report.lines(results)))
    print(f"{args.out}: {len(results['rows'])} rows, {results['seconds']} s", flush=True)
    bad = [row for row in results["rows"] if not FINE & _states(row["correct"])]
    for row in bad:
        print(f"not right: {row['op']}: {row['label']}: {row['correct']}", file=sys.stderr)
    return _tell(results) or int(bool(bad))


def _tell(results: dict[str, Any]) -> int:
    """Say which workers were given up; 1 if one was."""
    stopped = [module for module in MODULES if module in results["notes"]]
    for module in stopped:
        print(f"benchmarks: {module}: {results['notes'][module]}", file=sys.stderr)
    return int(bool(stopped))


def turns(plan: Plan, budget_s: float, *, with_torch: bool) -> Iterator[tuple[str, Plan]]:
    """Which worker is to do what, stage by stage, ours before torch's; deadlines in seconds from
    the start.

    Ours begins, if only to see what device there is. Whole training steps have half of the time
    where they are not all that is asked for.
    """
    stages = [dataclasses.replace(plan, stage=stage) for stage in range(sections.NUM_STAGES)]
    busy = [part for part in stages if any(_has_work(module, part) for module in MODULES)]
    for part in busy:
        alone = part.stage != 0 or len(busy) == 1
        deadline = budget_s if alone else budget_s / 2
        if part is busy[0] or _has_work("worker", part):
            both = with_torch and part.stage == 0 and _has_work("torch_worker", part)
            share = JAX_SHARE if both else 1.0
            yield "worker", dataclasses.replace(part, deadline=share * deadline)
        if with_torch and _has_work("torch_worker", part):
            yield "torch_worker", dataclasses.replace(part, deadline=deadline)


def _has_work(module: str, plan: Plan) -> bool:
    """Whether a worker has anything to do on a GPU."""
    cases = chosen(plan, on_gpu=True)
    if module == "torch_worker":
        cases = [case for case in cases if case.op in torch_rivals.OPS]
    return bool(cases or _sections(plan, module))


def assemble(
    results: dict[str, Any], workers: dict[str, Worker], plan: Plan, *, with_torch: bool = False
) -> None:
    """What the logs say so far, as rows and sections; with_torch: rivals of torch are due."""
    found = workers["worker"].results
    other = workers["torch_worker"].results if "torch_worker" in workers else {}
    results["device"] = found.get("device")
    results["torch"] = other.get("torch")
    results["ceilings"] = found.get("ceilings")
    on_gpu = _on_gpu(workers)
    asked = _sections(plan, "worker") if on_gpu else []
    if on_gpu and with_torch and "failed" not in other.get("torch", {}):
        asked += _sections(plan, "torch_worker")
    prefix = "section/"
    results["sections"] = dict.fromkeys(asked, NO_RESULT) | {
        key.removeprefix(prefix): value
        for key, value in {**found, **other}.items()
        if key.startswith(prefix)
    }
    ended = "all" in other or "failed" in other.get("torch", {})
    due = set(torch_rivals.OPS) if with_torch and on_gpu and not ended else set()
    results["rows"] = [_row(case, found, other, due) for case in chosen(plan, on_gpu)]
    results["spent_s"] = _spent(workers)


def _spent(workers: dict[str, Worker]) -> dict[str, float]:
    """Seconds by process and, of JAX's, by what they were spent on."""
    spent: dict[str, float] = {}
    for key, phases in workers["worker"].results.items():
        if key.startswith("spent/"):
            for name, seconds in phases.items():
                spent[name] = spent.get(name, 0.0) + seconds
    for module, name in (("worker", "jax"), ("torch_worker", "torch")):
        if module in workers:
            spent[name] = workers[module].seconds
    return {name: round(seconds, 1) for name, seconds in spent.items()}


def _row(
    case: Case, found: dict[str, Any], other: dict[str, Any], torch_due: set[str]
) -> dict[str, Any]:
    """torch_due: ops of which torch has not said that there is no more to come."""
    times = found.get(f"time/{case.name}", {"ours": NO_RESULT})
    if "failed" in times or "not_run" in times:
        times = {"ours": times}
    further = case.name in found.get(FURTHER, {}).get("cases", ())
    rest = found.get(f"rivals/{case.name}", NO_RESULT if further else {})
    if "failed" in rest or "not_run" in rest:
        rest = {FURTHER: rest}
    prefix = f"torch/{case.name}/"
    torch = {key.removeprefix(prefix): v for key, v in other.items() if key.startswith(prefix)}
    if case.op in torch_due:
        torch = {"torch": NO_RESULT, **torch, "further torch": NO_RESULT}
    return {
        "op": case.op,
        "label": case.label,
        "kind": case.kind,
        "bytes": case.bytes,
        "operations": case.operations,
        "ceiling": case.measured_by,
        "dtype": str(case.arguments[0].dtype),
        "correct": found.get(f"correct/{case.name}", NO_RESULT),
        "times": {**times, **rest, **torch},
    }


def _plan(args: argparse.Namespace) -> Plan:
    """Of all workers; without names, those of the files whose rest is asked for."""
    for name, count in (("--layers", args.layers), ("--threads", args.threads)):
        if count < 1:
            raise ValueError(f"benchmarks: {name} must be at least 1, got {count}")
    for name, seconds in (("--budget-s", args.budget_s), ("--task-s", args.task_s)):
        if not 0 < seconds < math.inf:
            raise ValueError(f"benchmarks: {name} must be a positive number, got {seconds:g}")
    names, have = sections.expand(args.names), []
    for path in args.missing:
        results = report.read(path)
        if path.resolve() == args.out.resolve():
            raise ValueError(
                f"benchmarks: --out {args.out} is what --missing is to complete, and would be "
                "lost; give another file"
            )
        found = results["sections"]
        other = [key for key in found if found[key].get("layers", args.layers) != args.layers]
        have += [name for name in complete(results) if name not in other]
        names += [] if args.names else names_of(results)
    try:
        re.compile(args.only)
    except re.error as error:
        raise ValueError(
            f"benchmarks: --only {args.only!r} is no regular expression: {error}"
        ) from None
    return Plan(
        log="",
        names=list(dict.fromkeys(names)),
        done=[],
        deadline=0.0,
        threads=args.threads,
        quick=args.quick,
        host_clock=args.host_clock,
        layers=args.layers,
        only=args.only,
        have=have,
    )


def _sections(plan: Plan, module: str) -> list[str]:
    """Keys of the sections that are asked of a worker."""
    work = sections.tasks(plan.names, plan.quick, True, plan.layers)
    if module == "torch_worker":
        work = torch_training.tasks(plan.names)
    return [key for key, _ in work if plan.takes(key)]


def gpu() -> dict[str, str]:
    """Name, driver and memory of the first GPU that CUDA shows, as nvidia-smi tells them; nothing
    without either.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if not first:
        return {}
    query = "name,driver_version,memory.total,clocks.max.sm,power.limit"
    try:
        text = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", f"--id={first}"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    if not text.strip():
        return {}
    keys = ("name", "driver", "memory", "max_sm_clock", "power_limit")
    values = [value.strip() for value in text.splitlines()[0].split(",")]
    return dict(zip(keys, values, strict=False))


def _states(correct: dict[str, Any]) -> set[str]:
    return {correct.get("status", ""), *correct}


def _words(args: argparse.Namespace, argv: Sequence[str] | None) -> Iterator[str]:
    """As they were given, of a path the name: where a machine has its files is nobody's concern."""
    paths = {args.out, *args.missing}
    for word in sys.argv[1:] if argv is None else argv:
        option, equals, value = word.partition("=")
        if Path(word) in paths:
            yield Path(word).name
        elif equals and Path(value) in paths:
            yield f"{option}={Path(value).name}"
        else:
            yield word


def _on_gpu(workers: dict[str, Worker]) -> bool:
    device = workers["worker"].results.get("device") or {}
    return device.get("platform") == "gpu"


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in (*PACKAGES, *rivals.LIBRARIES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _revision() -> str | None:
    try:
        command = ["git", "-C", str(REPO), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0]
    )
    named = ", ".join((*sections.SECTIONS, *sections.GROUPS))
    parser.add_argument("names", nargs="*", help=f"ops, or {named}")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--only", default="", help="cases whose name has this regular expression")
    rest = "only what this file of results has not had the time for"
    parser.add_argument("--missing", type=Path, action="append", default=[], help=rest)
    parser.add_argument(
        "--budget-s", type=float, default=360, help="begin nothing after this (%(default)g)"
    )
    parser.add_argument(
        "--task-s", type=float, default=120, help="end what takes longer (%(default)g)"
    )
    parser.add_argument("--threads", type=int, default=8, help="that compile ahead (%(default)d)")
    hurry = "two cases an op, no torch.compile; `decode` and `prefill` only if they are named"
    parser.add_argument("--quick", action="store_true", help=hurry)
    parser.add_argument(
        "--layers", type=int, default=32, help="of the model of `prefill` (%(default)d)"
    )
    without = "leave out torch and what runs through it: Liger, gemlite, PEFT"
    parser.add_argument("--no-torch", action="store_true", help=without)
    parser.add_argument("--host-clock", action="store_true", help="without CUPTI, unchecked")
    parser.add_argument("--revision", help="the commit measured, where there is no git")
    return parser.parse_args(argv)


def end_in_order() -> None:
    """Whoever ends this process, or closes its terminal, ends the worker too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda number, frame: sys.exit(128 + number))


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
