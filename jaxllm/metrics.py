"""What a run says of itself: rows as JSONL and CSV, the loss curve as a PNG, the live bar.

TensorBoard and wandb are asked for by name (`tensorboard`, `wandb`), and imported only then.
"""

from __future__ import annotations

import csv
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Row = Mapping[str, Any]
Writer = Callable[[int, Mapping[str, float]], None]

COLUMNS: Sequence[str] = (
    "step epoch loss held_out_loss grad_norm learning_rate tokens tokens_per_s mfu memory_bytes "
    "scale skipped"
).split()


def check_writers(writers: Any) -> None:
    """Raises: ValueError if it is anything else than a list or tuple of functions."""
    if not isinstance(writers, list | tuple) or not all(map(callable, writers)):
        raise ValueError(
            "trainer: writers must be a list of functions, as metrics.tensorboard(folder) is one, "
            f"got {writers!r:.60}"
        )


class Rows:
    """`metrics.jsonl` and `metrics.csv` of a run: a row a step, each written at once.

    A row may hold only some of the columns; JSONL also has what is no number (a sample of text).
    resume_at: the step of the checkpoint that a run goes on from: later rows are dropped, for they
        will come again. None begins both files anew.
    """

    def __init__(self, folder: Path, *, resume_at: int | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict[str, Any]] = []
        file = folder / "metrics.jsonl"
        if resume_at is not None and file.exists():
            self.rows = [row for row in read_rows(file) if row["step"] <= resume_at]
        header = dict(zip(COLUMNS, COLUMNS, strict=True))
        for name, write, rows in (
            ("metrics.jsonl", self._write_jsonl, self.rows),
            ("metrics.csv", self._write_csv, [header, *self.rows]),
        ):
            part = folder / f"{name}.part"
            with part.open("w", encoding="utf-8", newline="") as stream:
                write(stream, rows)
            os.replace(part, folder / name)
        self._jsonl = file.open("a", encoding="utf-8")
        self._csv = (folder / "metrics.csv").open("a", encoding="utf-8", newline="")

    def __enter__(self) -> Rows:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._jsonl.close()
        self._csv.close()

    def write(self, row: Row) -> None:
        """Appends one row; numbers that are not finite are null."""
        kept = {k: _plain(v) for k, v in row.items() if v is not None}
        self.rows.append(kept)
        self._write_jsonl(self._jsonl, [kept])
        self._write_csv(self._csv, [kept])
        self._jsonl.flush()
        self._csv.flush()

    @staticmethod
    def _write_jsonl(stream: Any, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")

    @staticmethod
    def _write_csv(stream: Any, rows: list[dict[str, Any]]) -> None:
        csv.DictWriter(stream, COLUMNS, extrasaction="ignore").writerows(rows)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, up to one that was cut off; what is behind it is left out."""
    rows = []
    # Bytes: what was cut off may end within a character, and a text has more ends of lines
    for line in file.read_bytes().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def numbers(row: Row) -> dict[str, float]:
    """What of a row is a number."""
    return {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def draw_curve(rows: list[dict[str, Any]], file: Path) -> None:
    """The losses of the rows, in nats a token, as a PNG.

    Raises: ImportError if matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, label, marker in (
        ("loss", "training batch", ""),
        ("held_out_loss", "held out", "o"),
    ):
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=4)
    axes.set(xlabel="step", ylabel="loss, nats a token")
    if axes.lines:
        axes.legend()
    part = file.with_name(f"{file.name}.part")
    figure.savefig(part, dpi=120, format="png")
    os.replace(part, file)


def bar(total: int, *, completed: int = 0, console: Console) -> tuple[Progress, Any]:
    """The live bar of a run, and the function that moves it: `move(step, row)`.

    It shows loss, tokens a second, MFU where the row has it, memory, steps that changed nothing and
    the time left; nothing where the console is no terminal.
    """
    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    task = progress.add_task("", total=total, completed=completed, facts="compiling")
    return progress, lambda step, row: progress.update(task, completed=step, facts=facts(row))


def facts(row: Row) -> str:
    """One row in a few words."""
    said = [f"loss {row['loss']:.3f}"] if row.get("loss") is not None else []
    if row.get("tokens_per_s"):
        said.append(f"{row['tokens_per_s']:,.0f} tokens/s")
    if row.get("mfu"):
        said.append(f"MFU {100 * row['mfu']:.1f} %")
    if row.get("memory_bytes"):
        said.append(f"{row['memory_bytes'] / 1e9:.1f} GB")
    if row.get("skipped"):
        said.append(f"{row['skipped']} skipped")
    return "  ".join(said)


class _Opened:
    """A writer that opens with its first row, for only then is it known where a run goes on."""

    def __init__(self, open_at: Callable[[int], tuple[Writer, Callable[[], None]]]):
        self._open_at = open_at
        self._opened: tuple[Writer, Callable[[], None]] | None = None

    def __call__(self, step: int, row: Mapping[str, float]) -> None:
        if self._opened is None:
            self._opened = self._open_at(step)
        self._opened[0](step, row)

    def close(self) -> None:
        if self._opened is not None:
            self._opened[1]()
            self._opened = None


def tensorboard(folder: Path) -> Writer:
    """Rows into TensorBoard's event files. Those of a run that is resumed take the place of what it
    had written of the same steps. Raises: ValueError if tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter  # type: ignore
    except ImportError as error:
        raise ValueError(
            "tensorboard: its writer is not installed: pip install tensorboardX"
        ) from error

    def open_at(first: int) -> tuple[Writer, Callable[[], None]]:
        writer = SummaryWriter(str(folder), purge_step=first)

        def write(step: int, row: Mapping[str, float]) -> None:
            for name, value in row.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        return write, writer.close

    return _Opened(open_at)


def wandb(folder: Path, settings: Mapping[str, Any]) -> Writer:
    """Rows into a wandb run. One that is resumed goes on with its run there, whose id is in
    `wandb-id`; wandb itself leaves out steps that it has. Raises: ValueError if wandb is not
    installed.
    """
    try:
        import wandb as client  # type: ignore
    except ImportError as error:
        raise ValueError("wandb: it is not installed: pip install wandb") from error

    def open_at(first: int) -> tuple[Writer, Callable[[], None]]:
        file = folder / "wandb-id"
        if first <= 1 or not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(secrets.token_hex(4), encoding="utf-8")
        run = client.init(
            project="jaxllm",
            dir=str(folder),
            config=dict(settings),
            id=file.read_text(encoding="utf-8"),
            resume="allow",
        )
        return lambda step, row: run.log(dict(row), step=step), run.finish

    return _Opened(open_at)
