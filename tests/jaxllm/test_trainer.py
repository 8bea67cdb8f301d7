"""The loop: what it writes, that it stops, resumes and falls back, and what it refuses."""

import csv
import dataclasses
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console
from tiny_models import TINY, build

from jaxllm import metrics, trace, train
from jaxllm import trainer as trainer_module
from jaxllm.batches import check_batch, digest_of
from jaxllm.checkpoint.native import Checkpoints
from jaxllm.config import Runtime
from jaxllm.flops import flops_a_token, peak_flops
from jaxllm.precision import DynamicScale
from jaxllm.trainer import SMOOTHED, StoppedError, Trainer, _Speed, _Work, fingerprint

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'jaxllm[train]'")

ONE_LAYER = dataclasses.replace(TINY, num_hidden_layers=1, layer_types=())


class Counting:
    """Batches of a text in which each token tells the next; the place is a count."""

    batches_per_epoch = 4

    def __init__(self, at=0):
        self.at = at

    def __next__(self):
        rng = np.random.default_rng(self.at)
        self.at += 1
        text = (rng.integers(0, 31, (2, 1)) + 7 * np.arange(9)[None]) % 31
        tokens, targets = text[:, :-1].astype(np.int32), text[:, 1:].astype(np.int32)
        return {"tokens": tokens, "targets": targets, "segment_ids": np.ones_like(tokens)}

    def state(self):
        return {"at": self.at}

    def restore(self, state):
        self.at = state["at"]


class Interrupting(Counting):
    """Presses Ctrl-C where it is asked for the batch behind `place` of them."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def __next__(self):
        if self.at == self.place:
            signal.raise_signal(signal.SIGINT)
        return super().__next__()


HELD_OUT = [next(Counting(1000 + i)) for i in range(2)]


COMPILED = {}  # step and evaluation of what was trained here: tracing takes longer than a run


@pytest.fixture(scope="module", autouse=True)
def _programs(tmp_path_factory):
    """Compiled once and quickly: all these runs are of one model, and of few steps."""
    during = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_disable_most_optimizations": True,
    }
    before = {name: jax.config.values[name] for name in during}
    for name, value in during.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def said():
    """A console, and what is printed on it."""

    class Lines:
        def __init__(self):
            self.text = ""

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    return Lines()


def trainer(out, *, steps=8, seed=0, batches=None, said=None, config=ONE_LAYER, **options):
    model = build(config, Runtime(dtype="float32"), seed=seed)
    defaults = {
        "held_out": HELD_OUT,
        "eval_every": 4,
        "console": Console(file=said, width=300) if said else Console(quiet=True),
    }
    run = Trainer(
        model, optax.adam(1e-2), batches or Counting(), out, steps=steps, **{**defaults, **options}
    )
    names = ("loss", "micro_batches", "scale", "stochastic_rounding", "trainable")
    alike = config, *map(options.get, names)
    run.step, run.evaluate = COMPILED.setdefault(alike, (run.step, run.evaluate))
    return run


def arrays(params):
    return {name: np.array(x) for name, x in params.items()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def rows_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def numbers_of(out):
    """What must be the same in a run that was stopped and one that was not."""
    kept = ("step", "loss", "held_out_loss", "grad_norm", "tokens", "epoch", "skipped")
    return [{k: row.get(k) for k in kept} for row in rows_of(out)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, _programs):
    """A run that nothing stopped: its folder, and its parameters."""
    out = tmp_path_factory.mktemp("whole")
    return out, arrays(trainer(out).fit().params)


@pytest.mark.slow  # starting the profiler takes seconds
def test_a_run_writes_rows_curve_and_checkpoints(tmp_path, said):
    out, seen = tmp_path / "run", []

    def sample(model):
        logits = model(HELD_OUT[0]["tokens"][:1])
        return f"token {int(np.argmax(logits[0, -1]))}"

    fitted = trainer(
        out,
        said=said,
        sample=sample,
        schedule=lambda step: 0.01 / (1 + step),
        writers=[lambda step, row: seen.append((step, row))],
        profile=2,
    ).fit()
    rows = rows_of(out)
    assert [row["step"] for row in rows] == list(range(9))
    assert [row["step"] for row in rows if "held_out_loss" in row] == [0, 4, 8]
    assert [row["step"] for row in rows if "sample" in row] == [0, 4, 8]
    assert rows[0]["held_out_loss"] == fitted.base_loss
    assert rows[fitted.step]["held_out_loss"] == fitted.loss < fitted.base_loss
    assert rows[0]["sample"] == fitted.before
    assert rows[fitted.step]["sample"] == fitted.after
    assert rows[3]["learning_rate"] == pytest.approx(0.01 / 3)
    assert (rows[2]["tokens"], rows[2]["epoch"]) == (16, 0.5)
    assert all(row["memory_bytes"] > 1e6 and row["loss"] > 0 for row in rows[1:])
    assert [row["step"] for row in rows if row.get("tokens_per_s", 0) > 0] == list(range(2, 9))
    assert [step for step, _ in seen] == list(range(9))
    assert all(isinstance(x, int | float) for _, row in seen for x in row.values())
    with (out / "metrics.csv").open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert [row["loss"] for row in table[1:]] == [str(row["loss"]) for row in rows[1:]]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["4", "8"]

    lines = said.text.splitlines()
    assert lines[0] == f"step 0: held-out loss {fitted.base_loss:.4f}"
    at = next(i for i, line in enumerate(lines) if "what took longest" in line)
    assert "steps 3 to 4" in lines[at]
    assert all(" ms " in line for line in lines[at + 1 : at + 11])
    kernels = trace.longest(out / "profile")
    assert len(kernels) == 10
    assert kernels == sorted(kernels, key=lambda kernel: -kernel.total_us)


def test_the_best_parameters_are_saved_returned_and_left_in_the_model(tmp_path):
    """The last batches teach nonsense, so that the best step is not the last; nor is it one of
    those that are saved anyway.
    """

    class Spoilt(Counting):
        def __next__(self):
            batch = super().__next__()
            if self.at > 4:
                batch["targets"] = batch["targets"] + 30
            return batch

    run = trainer(tmp_path, steps=12, batches=Spoilt(), eval_every=2, save_every=12)
    moments = []
    end = run._end
    run._end = lambda *args: moments.extend(jax.tree.leaves(run.state.opt_state)) or end(*args)
    fitted = run.fit()
    losses = {
        row["step"]: row["held_out_loss"] for row in rows_of(tmp_path) if row["step"] % 2 == 0
    }
    assert fitted.step == min(losses, key=losses.get) < 12
    assert fitted.loss == losses[fitted.step]
    total, count = run.evaluate(train.parameters(run.model), HELD_OUT)
    assert total / count == fitted.loss
    assert moments
    assert all(x.is_deleted() for x in moments)


def without_saves(monkeypatch, *steps):
    """As a disk that was full at these steps."""
    save = Checkpoints.save

    def saving(self, state, **more):
        if int(state.step) not in steps:
            save(self, state, **more)

    monkeypatch.setattr(Checkpoints, "save", saving)


def measuring(run, *losses):
    """The run with these held-out losses, one after the other."""
    found = iter(losses)
    run.evaluate = lambda *_: (next(found), 1)
    return run


LAST_UNSAVED = (
    "the checkpoint of step 8 could not be saved, so nothing can go on from it; the parameters "
    "themselves are here"
)
BEST_UNSAVED = (
    "step 4 had the lowest held-out loss, 1.0000, but could not be saved; what is kept is step 8"
)


@pytest.mark.parametrize(
    ("failing", "losses", "kept", "unsaved"),
    [
        ((), (3.0, 2.0, 1.0), 8, None),
        ((), (3.0, 1.0, 2.0), 4, None),
        ((8,), (3.0, 1.0, 2.0), 4, None),
        ((8,), (3.0, 2.0, 1.0), 8, LAST_UNSAVED),
        ((4, 8), (3.0, 2.0, 1.0), 8, LAST_UNSAVED),
        ((4,), (3.0, 1.0, 2.0), 8, BEST_UNSAVED),
    ],
)
def test_what_is_kept_where_saving_fails(tmp_path, monkeypatch, failing, losses, kept, unsaved):
    without_saves(monkeypatch, *failing)
    fitted = measuring(trainer(tmp_path), *losses).fit()
    assert (fitted.step, fitted.loss) == (kept, losses[kept // 4])
    assert fitted.unsaved == unsaved


def test_behind_a_failed_save_what_is_better_than_what_is_saved_is_saved(tmp_path, monkeypatch):
    without_saves(monkeypatch, 4)
    run = trainer(tmp_path, eval_every=2, save_every=8)
    fitted = measuring(run, 3.0, 2.0, 1.0, 1.5, 2.5).fit()
    assert (fitted.step, fitted.loss) == (6, 1.5)
    assert "what is kept is step 6" in fitted.unsaved


def test_a_run_whose_rows_are_lost_still_knows_its_best(tmp_path):
    with pytest.raises(StoppedError):
        measuring(trainer(tmp_path, batches=Interrupting(4)), 3.0, 1.0).fit()
    (tmp_path / "metrics.jsonl").unlink()
    fitted = measuring(trainer(tmp_path), 2.0).fit(resume=True)
    assert (fitted.step, fitted.loss, fitted.base_loss) == (4, 1.0, None)
    assert fitted.unsaved is None


def test_no_number_is_read_before_the_next_steps_are_dispatched(tmp_path, monkeypatch):
    """The loop may look at step i only when i + LAG was handed to the device. A schedule would wait
    for those: all of it is computed before the first.
    """
    dispatched, seen, asked, linear = [0], [], [], optax.linear_schedule(0.0, 1.0, 12)

    def schedule(count):
        asked.append(dispatched[0])
        return linear(count)

    run = trainer(tmp_path, steps=12, held_out=(), eval_every=12, schedule=schedule)
    step = run.step

    def counted(state, batch):
        dispatched[0] += 1
        return step(state, batch)

    run.step = counted
    write = metrics.Rows.write

    def noted(self, row):
        seen.append((row["step"], dispatched[0]))
        write(self, row)

    monkeypatch.setattr(metrics.Rows, "write", noted)
    run.fit()
    assert all(ahead - i == 2 for i, ahead in seen[1:-2]), seen
    assert asked == [0]
    assert rows_of(tmp_path)[4]["learning_rate"] == 0.25


@pytest.mark.parametrize("at", [1, 4, 6])
def test_ctrl_c_saves_and_a_resumed_run_equals_one_that_was_not_stopped(tmp_path, whole, at):
    out = tmp_path / "cut"
    with pytest.raises(StoppedError, match=f"saved at step {at}"):
        trainer(out, batches=Interrupting(at - 1)).fit()
    assert len(rows_of(out)) == at + 1
    run = trainer(out)
    at_first = jax.tree.leaves((run.state.params, run.state.opt_state))
    fitted = run.fit(resume=True)
    assert all(x.is_deleted() for x in at_first)  # they make room for those that were saved
    assert_same(arrays(fitted.params), whole[1])
    assert numbers_of(out) == numbers_of(whole[0])


def test_ctrl_c_during_an_evaluation_that_is_no_better_saves_too(tmp_path, whole, monkeypatch):
    def measure(self, i, measure=Trainer._measure):
        measured = measure(self, i)
        if i == 4:
            signal.raise_signal(signal.SIGINT)
            measured["held_out_loss"] += 100
        return measured

    monkeypatch.setattr(Trainer, "_measure", measure)
    with pytest.raises(StoppedError, match="saved at step 4"):
        trainer(tmp_path, save_every=8, eval_every=2).fit()
    monkeypatch.undo()
    fitted = trainer(tmp_path, save_every=8, eval_every=2).fit(resume=True)
    assert_same(arrays(fitted.params), whole[1])


def test_a_loss_that_is_not_finite(tmp_path):
    """Before training it is an error; later it is no best step's, and nothing is sampled of it."""
    sampled = []

    def run(name, *losses):
        found = trainer(tmp_path / name, sample=lambda _: sampled.append(name) or name)
        return measuring(found, *losses)

    with pytest.raises(ValueError, match="^trainer: the held-out loss is nan before training"):
        run("first", math.nan).fit()
    assert not sampled
    fitted = run("last", 3.0, 2.0, math.inf).fit()
    assert (fitted.step, fitted.loss, fitted.after) == (4, 2.0, "last")
    assert len(sampled) == 2
    assert run("all", 3.0, math.nan, math.inf).fit().loss is None


def test_a_sample_that_fails_loses_no_step_and_no_row(tmp_path, whole):
    """Though no checkpoint was due."""

    def sample(model):
        if len(rows_of(tmp_path)) > 2:
            raise MemoryError("no room to generate")
        return "text"

    run = trainer(tmp_path, sample=sample, eval_every=2, save_every=8)
    with pytest.raises(MemoryError, match="no room to generate"):
        measuring(run, 500.0, 300.0, 400.0).fit()
    rows = rows_of(tmp_path)
    assert [row.get("sample") for row in rows] == ["text", None, "text", None, None]
    assert rows[4]["held_out_loss"] == 400
    fitted = trainer(tmp_path, save_every=8).fit(resume=True)
    assert_same(arrays(fitted.params), whole[1])


def test_a_first_sample_that_fails_loses_no_row(tmp_path):
    def sample(model):
        raise MemoryError("no room to generate")

    with pytest.raises(MemoryError, match="no room to generate"):
        measuring(trainer(tmp_path, sample=sample, eval_every=2), 500.0).fit()
    (row,) = rows_of(tmp_path)
    assert (row["step"], row["held_out_loss"]) == (0, 500)


def test_a_schedule_must_be_one_that_jax_can_trace(tmp_path):
    for schedule in (lambda i: 1.0 if i < 2 else 0.5, lambda i: np.sin(i)):
        with pytest.raises(ValueError, match="^trainer: schedule must be one that JAX can trace"):
            trainer(tmp_path, schedule=schedule)
    assert trainer(tmp_path, schedule=lambda _: 0.5).rates == [0.5] * 8
    assert not list(tmp_path.iterdir())


@pytest.mark.own_errors
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("scale", 2.0, "precision: a scale is one of jaxllm.precision's, .*, got 2.0"),
        ("loss", None, "train: loss must be a function of a model and a batch, .*, got None"),
        ("sample", "x", "trainer: sample must be a function of the model, got 'x'"),
        ("writers", 5, "trainer: writers must be a list of functions, .*, got 5"),
        ("writers", [5], r"trainer: writers must be a list of functions, .*, got \[5\]"),
    ],
)
def test_what_is_no_function_is_refused_before_a_folder_is_made(tmp_path, name, value, words):
    with pytest.raises(ValueError, match=f"^{words}$"):
        trainer(tmp_path / "run", **{name: value})
    assert not (tmp_path / "run").exists()


def test_batches_must_say_how_far_they_are(tmp_path):
    with pytest.raises(ValueError, match=r"state\(\) and restore\(\), .*, got a list_iterator$"):
        trainer(tmp_path, batches=iter([1]))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"at": np.int64(1)}, "Object of type int64 is not JSON serializable"),
        ({"at": math.nan}, "Out of range float values are not JSON compliant.*"),
        ({0: (1, 2)}, r".*, got {0: \(1, 2\)}, which comes back as {'0': \[1, 2\]}"),
    ],
)
def test_a_state_that_json_does_not_give_back_is_refused_before_training(
    tmp_path, said, state, words
):
    class Strange(Counting):
        def state(self):
            return state

    with pytest.raises(
        ValueError, match=f"^trainer: the batches' state must be plain JSON.*{words}$"
    ):
        trainer(tmp_path, batches=Strange(), said=said).fit()
    assert not said.text


def test_a_state_that_goes_on_with_the_batches_is_kept_as_it_was(tmp_path, whole):
    """The place behind step 3, when the batch of step 4 was drawn and could not be taken."""

    class Live(Counting):
        def __init__(self, last):
            super().__init__()
            self.last, self.place = last, {"at": 0, "of": (1, 2)}

        def __next__(self):
            batch = super().__next__()
            self.place["at"] = self.at
            return batch if self.at <= self.last else {}

        def state(self):
            return self.place

    with pytest.raises(ValueError, match="the batch of step 4 has no 'tokens'"):
        trainer(tmp_path, batches=Live(3)).fit()
    assert_same(arrays(trainer(tmp_path, batches=Live(8)).fit(resume=True).params), whole[1])


def test_ctrl_c_says_which_step_is_there(tmp_path, monkeypatch):
    class Interrupting(Counting):
        def __next__(self):
            if self.at == 2:
                monkeypatch.setattr(Checkpoints, "save", lambda *_, **__: None)  # as on a full disk
                signal.raise_signal(signal.SIGINT)
            return super().__next__()

    with pytest.raises(StoppedError, match="^saved at step 2$") as stopped:
        trainer(tmp_path / "one", batches=Interrupting(), save_every=1).fit()
    assert stopped.value.step == 2
    with pytest.raises(StoppedError, match="^nothing was saved$") as stopped:
        trainer(tmp_path / "none", batches=Interrupting()).fit()
    assert stopped.value.step is None


class Flagged(Counting):
    """Batches of which `flagged_loss` makes no finite number at the steps that `bad` names."""

    def __init__(self, bad):
        super().__init__()
        self.bad = bad

    def __next__(self):
        batch = super().__next__()
        return {**batch, "bad": np.float32(np.nan if self.bad(self.at) else 0)}


def flagged_loss(model, batch):
    total, count = train.token_loss(model, batch)
    return total + batch["bad"], count


def test_steps_that_changed_nothing_are_said_and_count_for_no_schedule(tmp_path, said):
    options = {"loss": flagged_loss, "held_out": (), "said": said}
    batches = Flagged(lambda step: step in (2, 3))
    trainer(tmp_path / "some", batches=batches, schedule=lambda count: 1.0 * count, **options).fit()
    assert "2 of 8 steps changed nothing, for a loss or gradient was not finite" in said.text
    rows = rows_of(tmp_path / "some")[1:]
    assert [row["learning_rate"] for row in rows] == [0, 1, 1, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="none of the 8 steps changed anything, for a loss or gr"):
        trainer(tmp_path / "all", batches=Flagged(lambda step: True), **options).fit()


@pytest.mark.slow
def test_a_run_in_which_nothing_changes_any_more_says_so_and_ends(tmp_path, said, monkeypatch):
    monkeypatch.setattr("jaxllm.trainer.IDLE_SAID", 3)
    monkeypatch.setattr("jaxllm.trainer.IDLE_ENDS", 8)
    options = {"loss": flagged_loss, "held_out": (), "steps": 30, "said": said}
    with pytest.raises(
        ValueError, match=r"the last 8 steps changed nothing, .*\(saved at step 12\)"
    ):
        trainer(tmp_path, batches=Flagged(lambda step: step > 4), **options).fit()
    told = [line.partition(", for")[0] for line in said.text.splitlines()]
    assert told == [
        "step 7: the last 3 steps changed nothing",
        "step 8: the last 4 steps changed nothing",
        "step 12: the last 8 steps changed nothing",
    ]
    with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.latest_step == 12
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(13))
    trainer(tmp_path, batches=Flagged(lambda step: False), **options).fit(resume=True)
    assert "8 of 30 steps changed nothing" in said.text
    # What is under way when the eighth is read changes something; so does an evaluation's step
    for every, steps in ((5, 30), (13, 30), (12, 12)):
        some = {**options, "eval_every": every, "steps": steps}
        folder = tmp_path / f"some-{every}"
        trainer(folder, batches=Flagged(lambda step: 4 < step <= 12), **some).fit()
        assert [row["step"] for row in rows_of(folder)] == list(range(steps + 1))
    assert "8 of 12 steps changed nothing" in said.text


def test_a_scale_that_still_falls_is_waited_for(tmp_path, said, monkeypatch):
    """From 2**8 down to 1 in eight steps, and at 1 for 3 of the 11 that change nothing."""
    monkeypatch.setattr("jaxllm.trainer.IDLE_SAID", 3)
    monkeypatch.setattr("jaxllm.trainer.IDLE_ENDS", 4)
    options = {"steps": 14, "loss": flagged_loss, "held_out": (), "said": said}
    run = trainer(tmp_path, batches=Flagged(lambda step: step < 13), **options)
    run.state = dataclasses.replace(run.state, scale=DynamicScale(2.0**8))
    run.fit()
    assert said.text.splitlines()[0].startswith("step 12: the last 3 steps changed nothing")


def test_options_of_the_step_reach_it(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(train, "make_train_step", lambda *_, **options: seen.append(options))
    trainer(tmp_path, loss=lambda *_: None, micro_batches=2, stochastic_rounding=True)
    assert seen == [{"micro_batches": 2, "stochastic_rounding": True}]


def test_what_is_not_trainable_is_neither_changed_nor_saved(tmp_path):
    def of_the_mlp(name):
        return ".mlp." in name

    run = trainer(tmp_path, steps=2, trainable=of_the_mlp)
    before = arrays(run.state.all_params)
    fitted = run.fit()
    changed = {name for name, x in arrays(fitted.params).items() if np.any(x != before[name])}
    assert changed == set(filter(of_the_mlp, before)) < before.keys()
    with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.parameters().keys() == changed
    again = trainer(tmp_path, steps=2, trainable=of_the_mlp).fit(resume=True)
    assert_same(arrays(again.params), arrays(fitted.params))


def test_how_often_it_evaluates_and_saves(tmp_path):
    """Ten times in all, and a checkpoint each time, where nobody says otherwise."""
    for steps, given, wanted in (
        (95, {}, (10, 10)),
        (8, {}, (1, 1)),
        (95, {"eval_every": 7}, (7, 7)),
        (95, {"save_every": 7}, (10, 7)),
    ):
        run = trainer(tmp_path, steps=steps, **{"eval_every": None, **given})
        assert (run.eval_every, run.save_every) == wanted


def test_as_many_checkpoints_are_kept_as_are_told(tmp_path):
    trainer(tmp_path, save_every=1, keep=3, held_out=()).fit()
    with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps == [6, 7, 8]


def test_what_cannot_be_trained_is_said_before_anything_is_measured(tmp_path, said, monkeypatch):
    run = trainer(tmp_path, said=said, micro_batches=3)
    with pytest.raises(ValueError, match="2 rows cannot be split into 3 equal micro-batches"):
        run.fit()
    assert not said.text
    nothing = [{**batch, "targets": np.full_like(batch["targets"], -100)} for batch in HELD_OUT]
    with pytest.raises(ValueError, match="^trainer: the held-out batches hold no target"):
        trainer(tmp_path / "none", held_out=nothing).fit()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="matplotlib, which draws loss.png, is not installed"):
        trainer(tmp_path)


def test_a_run_goes_back_past_a_torn_checkpoint(tmp_path, whole, said):
    out = tmp_path / "torn"
    shutil.copytree(whole[0], out)
    (out / "checkpoints/8/state/manifest.ocdbt").write_bytes(b"torn")
    fitted = trainer(out, said=said).fit(resume=True)
    assert "going back to step 4" in said.text
    assert_same(arrays(fitted.params), whole[1])
    assert numbers_of(out) == numbers_of(whole[0])


def test_what_a_resumed_run_must_have_alike(tmp_path):
    trainer(tmp_path, settings={"rows": 2}).fit()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    alike = {"settings": {"rows": 2}}
    narrow = dataclasses.replace(ONE_LAYER, intermediate_size=32)
    for changes, words in (
        ({"settings": {"rows": 4}}, "has other rows: 2, and not 4; resume it with what it began"),
        ({**alike, "steps": 9}, "has other steps: 8, and not 9"),
        ({**alike, "seed": 1}, "has other base weights"),
        ({**alike, "held_out": HELD_OUT[:1]}, "has other held-out data"),
        ({**alike, "held_out": ()}, r"has other held-out data: \w{16}, and not none;"),
        ({}, "has other rows: 2, and not none;"),
        ({**alike, "config": narrow}, "has other base weights"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            trainer(tmp_path, **changes).fit(resume=True)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="holds a run, at step 8; resume it, or give another"):
        trainer(tmp_path, **alike).fit()
    with pytest.raises(FileNotFoundError, match="no training was saved here"):
        trainer(tmp_path / "none").fit(resume=True)
    assert {p: p.read_bytes() for p in before} == before


def test_settings_are_compared_as_json_has_them(tmp_path):
    settings = {"betas": (0.9, 0.95), "ranks": {1: 8}}
    first = trainer(tmp_path, settings=settings).fit()
    assert trainer(tmp_path, settings=settings).fit(resume=True).loss == first.loss
    for wrong, why in ((Path("x"), ".*PosixPath"), (math.nan, "Out of range float")):
        with pytest.raises(ValueError, match=f"settings must be what JSON can say: {why}"):
            trainer(tmp_path / "other", settings={"data": wrong})


def test_batches_that_end_early_are_a_sentence(tmp_path):
    class Short(Counting):
        def __next__(self):
            if self.at == 3:
                raise StopIteration
            return super().__next__()

    with pytest.raises(ValueError, match="the batches ended before step 4 of 8"):
        trainer(tmp_path, batches=Short()).fit()
    with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps == [3]  # what was trained is there to go on from
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2, 3]
    whole = trainer(tmp_path / "whole").fit()
    again = trainer(tmp_path).fit(resume=True)
    np.testing.assert_array_equal(
        *(np.concatenate([x.ravel() for x in f.params.values()]) for f in (whole, again))
    )


@pytest.mark.parametrize("name", ["steps", "eval_every", "save_every", "keep", "micro_batches"])
def test_numbers_below_one(tmp_path, name):
    with pytest.raises(
        ValueError, match=rf"trainer: {name} must be an integer of at least 1, got 0"
    ):
        trainer(tmp_path, **{name: 0})
    assert not list(tmp_path.iterdir())


def test_arguments_of_another_kind(tmp_path):
    class Endless(Counting):
        epochs = None

    for wrong, words in (
        ({"steps": 2.0}, r"steps must be an integer of at least 1, got 2.0"),
        ({"keep": None}, r"keep must be an integer of at least 1, got None"),
        ({"schedule": 1e-3}, "schedule must be a function of the count .*, got 0.001"),
        (
            {"schedule": lambda i: i * np.ones(2)},
            r"schedule must give one number .*, got shape \(2,\)",
        ),
        ({"schedule": lambda i: {"x": i}}, "schedule must give one number .*, got a dict"),
        ({"held_out": [{"tokens": np.full((1, 4), 61)}]}, "the tokens of the held-out batch 1 go"),
        (
            {"held_out": [HELD_OUT[0] | {"targets": np.full((2, 8), 61)}]},
            "the targets of the held-out batch 1 go from 0 to 61",
        ),
        ({"held_out": Endless()}, "held_out must end, got a loader without epochs"),
        ({"settings": {"base weights": "x"}}, "settings has 'base weights': 'x', but the"),
    ):
        with pytest.raises(ValueError, match=f"trainer: {words}"):
            trainer(tmp_path, **wrong)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "tokens",
            TINY.vocab_size,
            "go from .* to 61, but the model has .* tokens in its vocabulary",
        ),
        ("tokens", -1, "go from -1 to"),
        (
            "targets",
            TINY.vocab_size,
            r"go from 0 to 61, .* 61 tokens in .* \(-100 is not counted\)",
        ),
        ("targets", -1, "go from -1 to [0-9]+, but the model has 61 tokens"),
        (
            "positions",
            TINY.max_position_embeddings,
            "go from 0 to 64, but the model has .* positions",
        ),
    ],
)
def test_a_batch_beyond_the_model_is_refused(tmp_path, name, value, words):
    class Beyond(Counting):
        def __next__(self):
            batch = super().__next__()
            array = batch.setdefault(name, np.zeros_like(batch["tokens"]))
            array[1, 3] = value
            return batch

    with pytest.raises(ValueError, match=f"trainer: the {name} of the batch of step 1 {words}"):
        trainer(tmp_path, batches=Beyond()).fit()


def test_what_a_batch_need_not_have(tmp_path):
    """None, and numbers that a reference model may give otherwise, are no other held-out data."""
    extra = {"positions": None, "reference": np.float32(1), "beta": 0.1, "key": jax.random.key(0)}
    anew = extra | {"reference": np.float32(2)}
    runs = [trainer(tmp_path, held_out=[HELD_OUT[0] | more]) for more in (extra, anew)]
    assert runs[0].settings == runs[1].settings != trainer(tmp_path).settings
    assert trainer(tmp_path, steps=np.int64(8)).settings["steps"] == 8


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("tokens", np.ndarray.tolist, "a list"),
        ("targets", np.ndarray.tolist, "a list"),
        ("tokens", np.ravel, r"shape \(16,\)"),
        ("tokens", lambda x: None, "a NoneType"),
    ],
)
def test_a_batch_of_something_else_is_refused(tmp_path, name, change, words):
    class Other(Counting):
        def __next__(self):
            batch = super().__next__()
            return {**batch, name: change(batch[name])}

    with pytest.raises(
        ValueError, match=rf"^trainer: the {name} of the batch of step 1 must be .*, got {words}$"
    ):
        trainer(tmp_path, batches=Other()).fit()


def test_targets_that_do_not_count_or_are_of_ones_own_loss_are_taken(tmp_path):
    def loss(model, batch):
        return train.token_loss(model, {**batch, "targets": batch["targets"] % 31})

    for value, options in ((-100, {}), (500, {"loss": loss})):
        targets = HELD_OUT[0]["targets"].copy()
        targets[0, 3] = value
        trainer(tmp_path / str(value), held_out=[HELD_OUT[0] | {"targets": targets}], **options)


def test_a_fingerprint_tells_weights_apart():
    params = train.parameters(build(ONE_LAYER))
    assert fingerprint(params) == fingerprint(dict(reversed(params.items())))
    name = "layers.0.mlp.up_proj.weight"
    assert fingerprint(params) != fingerprint({**params, name: params[name] + 1e-6})
    assert fingerprint(params) != fingerprint({**params, name: params[name].astype("bfloat16")})
    assert fingerprint(params) != fingerprint({**params, name: params[name].reshape(-1)})
    renamed = {f"{key}x" if key == name else key: value for key, value in params.items()}
    assert fingerprint(params) != fingerprint(renamed)


def test_writers_are_closed_also_after_an_error(tmp_path):
    class Closing:
        closed = 0

        def __call__(self, step, row):
            if step == 2:
                raise OSError("full")

        def close(self):
            self.closed += 1

    first, second = Closing(), Closing()
    with pytest.raises(OSError, match="full"):
        trainer(tmp_path, writers=[first, second]).fit()
    assert (first.closed, second.closed) == (1, 1)


def test_writers_see_the_loss_before_training(tmp_path):
    seen = []
    fitted = trainer(tmp_path, writers=[lambda *told: seen.append(told)]).fit()
    assert [step for step, _ in seen] == list(range(9))
    assert seen[0][1] == {"held_out_loss": fitted.base_loss}


def test_a_profile_without_a_trace(tmp_path, said, monkeypatch):
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    assert trainer(tmp_path, said=said, profile=2).fit().step == 8
    sentence = f"profile: {tmp_path}/profile: there is no *.trace.json.gz here; the run goes on"
    assert sentence in said.text.splitlines()


def test_a_profile_without_kernels(tmp_path, said, monkeypatch):
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    monkeypatch.setattr(trace, "longest", lambda folder: [])
    trainer(tmp_path, said=said, profile=2).fit()
    sentence = f"{tmp_path}/profile: steps 3 to 4; the profile holds no kernels"
    assert sentence in said.text.splitlines()


def test_padding_is_no_work():
    rows = {
        "tokens": np.zeros((2, 5), np.int32),
        "segment_ids": np.array([[1, 1, 2, 2, 2], [1, 1, 1, 0, 0]]),
        "positions": np.array([[0, 1, 0, 1, 2], [0, 1, 2, 0, 0]]),
    }
    assert _Work.of(rows) == _Work(tokens=8, pairs=(1 + 2) + (1 + 2 + 3) + (1 + 2 + 3))
    del rows["positions"]
    assert _Work.of(rows) == _Work(tokens=8, pairs=15 + 6)
    assert _Work.of({"tokens": rows["tokens"]}) == _Work(tokens=10, pairs=30)


@pytest.mark.parametrize("trains_all", [True, False])
def test_speed_and_mfu_are_of_the_last_steps_and_all_devices(monkeypatch, trains_all):
    clock = iter([100.0, 102.0, 106.0, 200.0, *range(210, 1000, 10)])
    watch = types.SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr(trainer_module, "time", watch)
    gpu = types.SimpleNamespace(
        device_kind="NVIDIA H200", memory_stats=lambda: {"peak_bytes_in_use": 7}
    )
    model, work = build(ONE_LAYER, Runtime("bfloat16")), _Work(tokens=80, pairs=240)
    speed = _Speed(model, [gpu, gpu], trains_all=trains_all)
    assert speed.of(work) == {"memory_bytes": 7}  # nothing is known of when it began
    flops = 80 * flops_a_token(ONE_LAYER, 3, trains_all=trains_all)
    row = speed.of(work)
    assert row["tokens_per_s"] == 40
    assert row["mfu"] == pytest.approx(flops / 2 / (2 * peak_flops("NVIDIA H200")))
    assert speed.of(work)["tokens_per_s"] == pytest.approx(160 / 6)
    speed.resume()  # an evaluation was in between
    found = [speed.of(work if i else _Work(800, 0))["tokens_per_s"] for i in range(SMOOTHED + 1)]
    assert found[0] == 80
    assert found[-2:] == [(800 + 19 * 80) / 200, 8]
    plain = _Speed(build(ONE_LAYER, Runtime("float32")), [gpu], trains_all=trains_all)
    plain.resume()
    assert plain.of(work).keys() == {"memory_bytes", "tokens_per_s"}


# Forks processes that begin with everything imported, and no device asked for: each trains until it
# is done or killed, and says so for each batch.
NURSERY = """
import os, sys
sys.path[:0] = {path!r}
import numpy as np
import test_trainer as tests
import jaxllm, orbax.checkpoint, matplotlib.figure, matplotlib.backends.backend_agg
from pathlib import Path

def live(out):
    jaxllm.enable_compile_cache({cache!r})
    class Telling(tests.Counting):
        def __next__(self):
            print("batch", flush=True)
            return super().__next__()
    run = tests.trainer(out, steps={steps}, batches=Telling(), eval_every=10, save_every=1)
    begun = any(p.name.isdecimal() for p in (out / "checkpoints").glob("*"))
    end, moments = run._end, []
    def noting(*args):
        moments.extend(np.ravel(x) for x in tests.jax.tree.leaves(run.state.opt_state))
        return end(*args)
    run._end = noting
    fitted = run.fit(resume=begun)
    final = {{**tests.arrays(fitted.params), "moments": np.concatenate(moments)}}
    np.savez(out / "final.npz", **final)

for line in sys.stdin:
    pid = os.fork()
    if not pid:
        try:
            live(Path(line.strip()))
        except BaseException as error:
            print("failed", repr(error), flush=True)
        os._exit(0)
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("over", flush=True)
"""


class Nursery:
    """Runs of the tiny model in processes of their own, which can be killed."""

    def __init__(self, cache, steps):
        here = Path(__file__).resolve().parent
        code = NURSERY.format(path=[str(here), str(here.parent)], cache=str(cache), steps=steps)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )

    def run(self, out, *, kill_after=None, delay_s=0.0):
        """Train in `out`; killed `delay_s` after so many batches. True if it came to the end."""
        self.process.stdin.write(f"{out}\n")
        self.process.stdin.flush()
        pid, batches, killed = None, 0, False
        for line in self.process.stdout:
            word = line.strip()
            assert not word.startswith("failed"), word
            if word.isdecimal():
                pid = int(word)
            batches += word == "batch"
            if word == "over":
                return not killed
            if pid is not None and not killed and batches == kill_after:
                time.sleep(delay_s)
                os.kill(pid, signal.SIGKILL)  # until it is waited for, the id is nobody else's
                killed = True
        raise AssertionError("the nursery ended")

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.mark.slow
def test_killed_twenty_times_a_run_ends_with_the_same_weights(tmp_path):
    steps, kills, dice = 50, 20, random.Random(0)
    nursery = Nursery(tmp_path / "cache", steps)
    try:
        assert nursery.run(tmp_path / "whole")
        killed = torn = 0
        out = tmp_path / "killed"
        while killed < kills:
            # A step with its save takes some 40 ms when nothing else runs
            delay_s = dice.uniform(0, 0.1)
            assert not nursery.run(out, kill_after=dice.randint(1, 3), delay_s=delay_s)
            killed += 1
            torn += any("tmp" in path.name for path in (out / "checkpoints").glob("*"))
        assert nursery.run(out)
        assert not list((out / "checkpoints").glob("*tmp*"))
    finally:
        nursery.close()
    assert torn > 0, "no kill fell into a save"
    with np.load(tmp_path / "whole/final.npz") as whole, np.load(out / "final.npz") as after:
        assert_same(dict(whole), dict(after))
    assert numbers_of(out) == numbers_of(tmp_path / "whole")
    assert len(rows_of(out)) == steps + 1


def test_the_comparison_of_weights_can_fail():
    with pytest.raises(AssertionError, match="norm"):
        assert_same({"norm": np.ones(2)}, {"norm": np.nextafter(np.ones(2), 2)})


def test_a_trainer_trains_once(tmp_path):
    run = trainer(tmp_path / "run")
    run.fit()
    with pytest.raises(
        ValueError, match="^trainer: this one has trained to its end; make a new Trainer"
    ):
        run.fit(resume=True)


def test_what_is_held_out_is_batches(tmp_path):
    assert trainer(tmp_path / "one", held_out=HELD_OUT[0]).held_out == [HELD_OUT[0]]
    with pytest.raises(ValueError, match="^trainer: held_out must be batches, .*, got a str$"):
        trainer(tmp_path / "two", held_out=["tokens"])


def test_mfu_counts_no_gradients_of_weights_that_are_frozen(tmp_path, monkeypatch):
    seen = []

    def speed(*of, trains_all):
        seen.append(trains_all)
        raise StoppedError(None)

    monkeypatch.setattr(trainer_module, "_Speed", speed)
    for trainable in (None, lambda name: ".mlp." in name):
        with pytest.raises(StoppedError):
            trainer(tmp_path / str(len(seen)), trainable=trainable).fit()
    assert seen == [True, False]


@pytest.mark.parametrize(
    ("steps", "profile", "traced"), [(2, 2, "2 to 2"), (3, 2, "3 to 3"), (8, 2, "7 to 8")]
)
def test_a_profile_lies_within_the_steps_of_its_run(
    tmp_path, said, monkeypatch, steps, profile, traced
):
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    monkeypatch.setattr(trace, "longest", lambda folder: [])
    if resumed := steps == 8:
        with pytest.raises(StoppedError, match="saved at step 4"):
            trainer(tmp_path, batches=Interrupting(3)).fit()
    trainer(tmp_path, steps=steps, said=said, profile=profile).fit(resume=resumed)
    sentence = f"{tmp_path}/profile: steps {traced}; the profile holds no kernels"
    assert sentence in said.text.splitlines()


def test_ctrl_c_in_the_last_step_ends_the_run_as_it_would_end(tmp_path, whole):
    fitted = trainer(tmp_path, batches=Interrupting(7)).fit()
    assert fitted.step == 8
    assert_same(arrays(fitted.params), whole[1])


def test_samples_and_losses_of_a_run_are_those_of_its_steps(tmp_path, said):
    count = iter(range(9))
    run = trainer(tmp_path, said=said, sample=lambda model: f"sample {next(count)}")
    fitted = run.fit()
    assert (fitted.step, fitted.before, fitted.after) == (8, "sample 0", "sample 2")
    assert said.text.splitlines() == [
        f"step {row['step']}: held-out loss {row['held_out_loss']:.4f}"
        for row in rows_of(tmp_path)
        if "held_out_loss" in row
    ]
    assert [row["epoch"] for row in rows_of(tmp_path)[1:]] == [step / 4 for step in range(1, 9)]
    least = 5e7 if jax.default_backend() == "cpu" else 0  # Python and JAX alone; else of arrays
    assert all(row["memory_bytes"] > least for row in rows_of(tmp_path)[1:])


def test_a_batch_none_of_whose_targets_counts_is_within_the_model():
    batch = next(Counting())
    batch["targets"] = np.full_like(batch["targets"], train.IGNORE)
    check_batch(batch, "batch", build(ONE_LAYER), train.token_loss)


def test_the_digest_of_held_out_batches_tells_them_apart():
    zeros, ones = np.zeros((2, 3), np.int32), np.ones((2, 3), np.int32)
    kinds = [
        [{"tokens": zeros, "targets": ones}],
        [{"tokens": ones, "targets": zeros}],
        [{"targets": ones}, {"tokens": zeros}],
        [{"tokens": zeros, "positions": ones}],
        [{"tokens": zeros, "segment_ids": ones}],
        [{"tokens": zeros, "mask": ones.astype(bool)}],
        [{"tokens": zeros, "mask": zeros.astype(bool)}],
        [{"tokens": zeros}],
        [{"tokens": zeros.T}],
        [{"tokens": zeros.astype(np.uint32)}],
    ]
    assert len({digest_of(batches) for batches in kinds}) == len(kinds)
    assert digest_of([]) is None
