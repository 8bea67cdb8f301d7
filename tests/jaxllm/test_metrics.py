"""What a run writes and shows of itself; the whole of it stands in `test_trainer.py`."""

import csv
import io
import json
import sys
import types

import pytest
from rich.console import Console

from jaxllm import metrics


def test_rows_after_the_checkpoint_are_dropped_and_a_cut_line_is_no_row(tmp_path):
    with metrics.Rows(tmp_path) as rows:
        for step in range(4):
            rows.write({"step": step, "loss": float("nan") if step == 1 else 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "lo')
    with metrics.Rows(tmp_path, resume_at=2) as rows:
        rows.write({"step": 3, "loss": 2.0, "sample": "Grüße"})
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [(row["step"], row.get("loss")) for row in map(json.loads, lines)] == [
        (0, 1.0),
        (1, None),
        (2, 1.0),
        (3, 2.0),
    ]
    with (tmp_path / "metrics.csv").open(newline="", encoding="utf-8") as stream:
        table = list(csv.DictReader(stream))
    assert list(table[0]) == list(metrics.COLUMNS)
    assert [(row["step"], row["loss"]) for row in table] == [
        ("0", "1.0"),
        ("1", ""),
        ("2", "1.0"),
        ("3", "2.0"),
    ]
    assert "Grüße" in lines[-1]


def test_rows_hold_any_sample_and_a_character_may_be_cut_off(tmp_path):
    sample = "one\u2028two\x85three\r\nfour"
    with metrics.Rows(tmp_path) as rows:
        for step in range(2):
            rows.write({"step": step, "sample": sample})
    with (tmp_path / "metrics.jsonl").open("ab") as stream:
        stream.write('{"step": 2, "sample": "ü'.encode()[:-1])
    with metrics.Rows(tmp_path, resume_at=1) as rows:
        assert rows.rows == [{"step": step, "sample": sample} for step in range(2)]


def test_what_stands_behind_a_broken_row_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    assert metrics.read_rows(tmp_path / "metrics.jsonl") == [{"step": 0}]


def test_a_run_that_resumes_none_begins_its_files_anew(tmp_path):
    for loss in (1.0, 2.0):
        with metrics.Rows(tmp_path) as rows:
            rows.write({"step": 0, "loss": loss})
    assert rows.rows == metrics.read_rows(tmp_path / "metrics.jsonl") == [{"step": 0, "loss": 2.0}]
    with (tmp_path / "metrics.csv").open(newline="", encoding="utf-8") as stream:
        assert [row["loss"] for row in csv.DictReader(stream)] == ["2.0"]


def test_the_bar_says_loss_speed_mfu_and_memory():
    said = io.StringIO()
    row = {"loss": 2.5, "tokens_per_s": 12345.6, "mfu": 0.5, "memory_bytes": 2e9}
    assert metrics.facts(row) == "loss 2.500  12,346 tokens/s  MFU 50.0 %  2.0 GB"
    assert metrics.facts({}) == ""
    progress, move = metrics.bar(10, console=Console(file=said, force_terminal=True, width=120))
    with progress:
        move(5, row)
    assert "5/10" in said.getvalue()
    assert "12,346 tokens/s" in said.getvalue()
    assert metrics.facts({"loss": 2.5, "skipped": 0}) == "loss 2.500"
    assert metrics.facts({"loss": 2.5, "skipped": 3}) == "loss 2.500  3 skipped"


def test_tensorboard_drops_the_steps_that_come_again(tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append(("open", purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def flush(self):
            pass

        def close(self):
            calls.append("closed")

    module = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    write = metrics.tensorboard(tmp_path)
    write.close()
    write(5, {"loss": 1.0})
    write(6, {"loss": 0.5})
    write.close()
    assert calls == [("open", 5), ("loss", 1.0, 5), ("loss", 0.5, 6), "closed"]


def test_wandb_goes_on_with_its_run(tmp_path, monkeypatch):
    opened, logged, finished = [], [], []

    class Run:
        def log(self, row, step):
            logged.append((row, step))

        def finish(self):
            finished.append(self)

    def init(**options):
        opened.append((options["id"], options["resume"]))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    for first in (0, 5, 1):  # a run, the same resumed, another one
        write = metrics.wandb(tmp_path / "run", {})
        for step in (first, first + 1):
            write(step, {"loss": 1.0 + step})
        write.close()
    assert logged == [({"loss": 1.0 + step}, step) for step in (0, 1, 5, 6, 1, 2)]
    assert len(finished) == 3
    assert (tmp_path / "run/wandb-id").read_text() == opened[2][0]
    assert opened[0] == opened[1] != opened[2]
    assert all(resume == "allow" for _, resume in opened)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_writer_that_is_not_installed_is_a_sentence(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    options = {"settings": {}} if name == "wandb" else {}
    with pytest.raises(ValueError, match="is not installed: pip install"):
        getattr(metrics, name)(tmp_path, **options)
