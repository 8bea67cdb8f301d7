"""`Trainer`: the loop around a training step, over a data set.

It evaluates, shows a live bar, writes metrics, saves, and resumes bit for bit. The loop reads
nothing back that the device still works on: numbers come `LAG` steps late, and the next batch is
placed while a step runs. Those who want another loop write one with `train.make_train_step`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

from jaxllm import metrics, trace, train
from jaxllm.batches import Batches, check_batch, digest_of, kept_state
from jaxllm.checkpoint.native import Checkpoints, host_device
from jaxllm.console import Lines
from jaxllm.flops import flops_a_token, peak_flops
from jaxllm.integers import integer
from jaxllm.model import Transformer
from jaxllm.precision import NoScale, Scale
from jaxllm.train import Batch, Params

LAG = 2  # steps between a dispatch and a look at its numbers: the device always has one to do
SMOOTHED = 20  # steps that a speed is the mean of
# Steps in a row that changed nothing, at a scale of the loss that fell no further: what differs
# from one to the next is the batch alone
IDLE_SAID, IDLE_ENDS = 10, 200
WHY_IDLE = "for a loss or gradient was not finite, or no target counted"


@dataclasses.dataclass(frozen=True)
class Fitted:
    """How a run ended.

    params: those of the step, the last or one that was saved, with the lowest held-out loss, or
        the last ones if nothing is held out; with the frozen ones. `step` is theirs.
    unsaved: where saving has failed, what could not be kept, in a sentence; else None.
    base_loss, loss: held-out nats a token before training and with `params` (None: nothing is held
        out). `before`, `after`: samples of text at the same places (None without `sample`).
    """

    params: Params
    step: int
    base_loss: float | None
    loss: float | None
    before: str | None
    after: str | None
    unsaved: str | None = None


class StoppedError(Exception):
    """Ctrl-C. step: that of the newest checkpoint, from which a resumed run goes on; None: nothing
    could be saved.
    """

    def __init__(self, step: int | None):
        super().__init__("nothing was saved" if step is None else f"saved at step {step}")
        self.step = step


class Trainer:
    """Trains a model on batches and keeps what it makes in a folder.

    out: gets `checkpoints/`, `metrics.jsonl` and `metrics.csv`, and at the end `loss.png`. In the
        metrics `tokens` are the targets that count; `tokens_per_s` is of all tokens that are no
        padding.
    steps: how many batches in all.
    trainable, scale: as in `train.init_state`; what is not trained is never written. loss,
        micro_batches, stochastic_rounding: as in `train.make_train_step`.
    held_out: batches whose loss is measured at the start, every `eval_every` steps (None: ten times
        in all) and at the end. sample: text from the model at the same places; what it raises ends
        the run, when the step is saved.
    save_every: steps between two checkpoints (None: with each evaluation). An evaluation with the
        lowest loss so far is saved in any case. keep: how many are kept beside the best.
    schedule: the learning rate by the count of batches before that were not skipped, for the
        metrics; one that JAX can trace, as optax's. An optimiser that updates only every k-th time
        (optax.MultiSteps) counts those: of its schedule give `lambda count: schedule(count // k)`.
    settings: what JSON can say (a tuple is a list there), and a resumed run must have been given
        alike.
    writers: `metrics.tensorboard(...)` and the like; one with a `close` is closed after `fit`.
    profile: how many steps, from the third on, are traced into `out/profile`; 0: none.
    Raises: ValueError for numbers that are no integers or below what they must be, what is no
    function (a loss, sample or writer), batches that cannot say how far they have got, a held_out
    that has no end or tokens or targets that the model has not, a schedule that cannot be traced or
    is not one number a count, settings that JSON cannot say or that contradict the trainer's own,
    without matplotlib, and for what `train.init_state` refuses.
    """

    def __init__(
        self,
        model: Transformer,
        optimizer: optax.GradientTransformation,
        batches: Batches,
        out: str | os.PathLike[str],
        *,
        steps: int,
        loss: train.Loss = train.token_loss,
        trainable: Callable[[str], bool] | None = None,
        scale: Scale = NoScale(),
        micro_batches: int = 1,
        stochastic_rounding: bool = False,
        held_out: Sequence[Batch] = (),
        sample: Callable[[Transformer], str] | None = None,
        eval_every: int | None = None,
        save_every: int | None = None,
        keep: int = 2,
        schedule: optax.Schedule | None = None,
        settings: Mapping[str, Any] | None = None,
        writers: Sequence[metrics.Writer] = (),
        profile: int = 0,
        console: Console | None = None,
    ):
        for name, value, least in (
            ("steps", steps, 1),
            ("micro_batches", micro_batches, 1),
            ("eval_every", eval_every, 1),
            ("save_every", save_every, 1),
            ("keep", keep, 1),
            ("profile", profile, 0),
        ):
            if value is not None or name not in ("eval_every", "save_every"):
                integer(name, value, least, who="trainer")
        if not isinstance(batches, Batches):
            raise ValueError(
                "trainer: batches must be an iterator with state() and restore(), as data.Loader "
                f"is, got a {type(batches).__name__}"
            )
        if getattr(held_out, "epochs", 1) is None:
            raise ValueError(
                "trainer: held_out must end, got a loader without epochs; give it epochs=1"
            )
        held_out = [held_out] if isinstance(held_out, Mapping) else list(held_out)
        if strange := [batch for batch in held_out if not isinstance(batch, Mapping)]:
            raise ValueError(
                "trainer: held_out must be batches, which are dictionaries of arrays, got a "
                f"{type(strange[0]).__name__}"
            )
        for i, batch in enumerate(held_out, 1):
            check_batch(batch, f"held-out batch {i}", model, loss)
        if not (sample is None or callable(sample)):
            raise ValueError(f"trainer: sample must be a function of the model, got {sample!r:.60}")
        metrics.check_writers(writers)
        try:  # as a checkpoint will have them
            said = json.loads(json.dumps(dict(settings or {}), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"trainer: settings must be what JSON can say: {error}") from None
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError(
                "trainer: matplotlib, which draws loss.png, is not installed: pip install "
                "matplotlib"
            )
        self.model, self.loss, self.batches, self.out = model, loss, batches, Path(out)
        steps = int(steps)
        self.steps, self.keep, self.profile = steps, int(keep), int(profile)
        self.micro_batches = micro_batches
        self.eval_every = eval_every or -(-steps // 10)
        self.save_every = save_every or self.eval_every
        self.held_out, self.sample = held_out, sample
        self.rates, self.writers = self._rates(schedule, steps), writers
        self.console = console or Lines(stderr=True)
        self.step = train.make_train_step(
            model,
            optimizer,
            loss,
            micro_batches=micro_batches,
            stochastic_rounding=stochastic_rounding,
        )
        self.evaluate = train.make_evaluate(model, loss)
        self.state = train.init_state(model, optimizer, trainable=trainable, scale=scale)
        base = fingerprint(self.state.frozen or self.state.params)
        own = {"base weights": base, "held-out data": digest_of(held_out), "steps": steps}
        if clash := [name for name in own if said.get(name, own[name]) != own[name]]:
            raise ValueError(
                f"trainer: settings has {clash[0]!r}: {said[clash[0]]!r}, but the trainer's own is "
                f"{own[clash[0]]!r}; leave it out"
            )
        self.settings = {**said, **own}
        self._ended = False

    def fit(self, *, resume: bool = False) -> Fitted:
        """Trains to the last step; with `resume`, from the newest good checkpoint of the folder on.

        Afterwards the model holds the parameters that are returned, and the optimiser's state is
        gone. A state that is to be resumed takes the place of the one there is, and never lies
        beside it.
        Raises: ValueError, with nothing overwritten, if the folder holds a run and `resume` is not
        set, or if it holds one with other settings, another model or optimiser; if what is held out
        has no target, or a loss that is not finite before training; if no step changed anything,
        for a loss or gradient was not finite or no target counted; and, the last step being saved
        first, if that goes on for `IDLE_ENDS` steps of this call, if the batches end early, have
        rows that `micro_batches` does not divide, or (in the host's memory) tokens, targets or
        positions that the model has not. FileNotFoundError if there is none to resume. StoppedError
        after Ctrl-C.
        """
        if self._ended:
            raise ValueError(
                "trainer: this one has trained to its end; make a new Trainer, also to resume"
            )
        folder = self.out / "checkpoints"
        with Checkpoints(folder, keep=self.keep, say=self._say) as checkpoints:
            if resume:
                saved = checkpoints.restore(self.state, check=self._check, donate=True)
                self.state = saved.state
                self.batches.restore(saved.position["batches"])
            elif checkpoints.latest_step is not None:
                raise ValueError(
                    f"{self.out} holds a run, at step {checkpoints.latest_step}; resume it, or "
                    "give another folder"
                )
            begun = int(self.state.step)
            with (
                metrics.Rows(self.out, resume_at=begun if resume else None) as rows,
                train.catch_interrupt() as stop,
                contextlib.ExitStack() as writers,
            ):
                for write in self.writers:
                    writers.callback(getattr(write, "close", lambda: None))
                self._run(checkpoints, rows, begun, stop)
                self._say_skipped()
                fitted = self._end(checkpoints, rows.rows)
                metrics.draw_curve(rows.rows, self.out / "loss.png")
        return fitted

    def _say(self, sentence: str) -> None:
        self.console.print(sentence, soft_wrap=True)

    def _check(self, position: Mapping[str, Any]) -> None:
        """Raises ValueError unless a checkpoint belongs to a run like this one."""
        was = position.get("settings", {})
        for name in sorted(was.keys() | self.settings.keys()):
            there, here = was.get(name), self.settings.get(name)
            if there != here:
                there, here = ("none" if each is None else each for each in (there, here))
                raise ValueError(
                    f"{self.out}: the run there has other {name}: {there}, and not {here}; resume "
                    "it with what it began with, or give another folder"
                )

    def _run(
        self, checkpoints: Checkpoints, rows: metrics.Rows, begun: int, stop: threading.Event
    ) -> None:
        """Steps `begun + 1` to the last."""
        ready = self._next_batch(begun + 1) if begun < self.steps else None
        pending: collections.deque[tuple[dict[str, Any], dict[str, Any]]] = collections.deque()
        skipped, idle = int(self.state.skipped), 0
        scale = float(self.state.scale.value)
        speed = _Speed(
            self.model, _devices(self.state.all_params), trains_all=not self.state.frozen
        )
        per_epoch = getattr(self.batches, "batches_per_epoch", None)
        progress, move = metrics.bar(self.steps, completed=begun, console=self.console)

        def read(leave: int) -> None:
            """Writes the rows of all steps but the last `leave`."""
            nonlocal skipped, idle, scale
            while len(pending) > leave:
                row, numbers = pending.popleft()
                row["learning_rate"] = self.rates[row["step"] - 1 - skipped]
                row |= {name: x.item() for name, x in jax.device_get(numbers).items()}
                changed = row["skipped"] == skipped or row["scale"] != scale
                idle = 0 if changed else idle + 1
                skipped, scale = row["skipped"], row["scale"]
                if "work" in row:
                    row |= speed.of(row.pop("work"))
                move(row["step"], row)
                tell(row)
                again = idle > IDLE_SAID and row["step"] % self.eval_every == 0
                if idle == IDLE_SAID or again:
                    self._say(
                        f"step {row['step']}: the last {idle} steps changed nothing, {WHY_IDLE}; "
                        f"after {IDLE_ENDS} of them the run ends"
                    )

        def tell(row: dict[str, Any]) -> None:
            rows.write(row)
            for write in self.writers:
                write(row["step"], metrics.numbers(row))

        def save(place: dict[str, Any], loss: float | None) -> None:
            """The state as it is; its rows are there before what goes on from them."""
            read(0)
            notes = {"settings": self.settings, "batches": place}
            key = jax.random.key(0)  # nothing draws: rounding takes its key from the step
            checkpoints.save(self.state, key=key, position=notes, loss=loss)

        with progress, _Profile(self, begun + 3) as profile:
            if begun == 0:
                row = {"step": 0, **self._measure(0)}
                try:
                    row |= self._sample(row)
                finally:
                    tell(row)
                if not math.isfinite(loss := row.get("held_out_loss", 0.0)):
                    raise ValueError(
                        f"trainer: the held-out loss is {loss} before training: the model's "
                        "weights, or what is computed from them, are not finite, and no step can "
                        "be compared with that; look at the model, or take a wider precision"
                    )
            saved, place = begun, {}
            for i in range(begun + 1, self.steps + 1):
                try:
                    batch, work, place = ready or self._next_batch(i)
                except Exception:  # of others' code, or there are no more of them
                    if i - 1 > saved:
                        save(place, None)
                    raise
                ready = None
                profile.before(i)
                self.state, numbers = self.step(self.state, batch)
                for x in numbers.values():
                    x.copy_to_host_async()
                epoch = i / per_epoch if per_epoch else None
                row = {"step": i, "epoch": epoch, "work": work}
                pending.append((row, numbers))
                read(LAG)
                profile.after(i)
                evaluates = i % self.eval_every == 0 or i == self.steps
                saves = i % self.save_every == 0 or i == self.steps
                failed: BaseException | None = None
                if evaluates:
                    read(1)
                    jax.block_until_ready(numbers)
                    row |= speed.of(row.pop("work"))
                    row |= self._measure(i)
                    loss = row.get("held_out_loss", math.inf)
                    saves = saves or loss < checkpoints.best_loss
                    try:
                        row |= self._sample(row)
                    except BaseException as error:  # of others' code: what is trained is kept first
                        failed = error
                # Ctrl-C may have come during the evaluation
                saves = saves or stop.is_set() or failed is not None
                if evaluates:
                    read(0)
                if saves:
                    save(place, row.get("held_out_loss"))
                    saved = i
                if evaluates or saves:
                    speed.resume()
                if failed is not None:
                    raise failed
                if saves and stop.is_set() and i < self.steps:
                    checkpoints.wait()
                    raise StoppedError(checkpoints.latest_step)
                if idle >= IDLE_ENDS:
                    read(0)  # what is under way may change something
                if idle >= IDLE_ENDS and i < self.steps:
                    if not saves:
                        save(place, None)
                    raise ValueError(
                        f"trainer: the last {idle} steps changed nothing, {WHY_IDLE}; look at the "
                        "data, or take a wider precision or a lower learning rate "
                        f"({StoppedError(checkpoints.latest_step)})"
                    )

    def _next_batch(self, i: int) -> tuple[Batch, _Work, dict[str, Any]]:
        """A batch on its way to the device, which still works on the last one; what there is to do
        in it; and the place in the data behind it.
        """
        try:
            batch = next(self.batches)
        except StopIteration:
            raise ValueError(
                f"trainer: the batches ended before step {i} of {self.steps}"
            ) from None
        check_batch(batch, f"batch of step {i}", self.model, self.loss)
        rows = len(batch["tokens"])
        if rows % self.micro_batches:
            raise ValueError(
                f"trainer: a batch of {rows} rows cannot be split into {self.micro_batches} equal "
                "micro-batches"
            )
        return jax.device_put(dict(batch)), _Work.of(batch), kept_state(self.batches.state())

    @staticmethod
    def _rates(schedule: optax.Schedule | None, steps: int) -> Sequence[float | None]:
        """The schedule's values by the count of updates, before there is a step that one of them
        would wait for.
        """
        if schedule is None:
            return [None] * steps
        if not callable(schedule):
            raise ValueError(
                "trainer: schedule must be a function of the count of updates, as optax's are, got "
                f"{schedule!r:.60}"
            )
        with jax.default_device(host_device()):
            try:
                rates = jax.vmap(schedule)(jnp.arange(steps))
            except jax.errors.JAXTypeError:
                raise ValueError(
                    "trainer: schedule must be one that JAX can trace, as optax's are; it has an "
                    "`if`, or a function of NumPy, of the count (jnp.where does that)"
                ) from None
        if not isinstance(rates, jax.Array) or rates.shape != (steps,):
            kind = type(rates).__name__
            found = f"shape {rates.shape[1:]}" if isinstance(rates, jax.Array) else f"a {kind}"
            raise ValueError(
                f"trainer: schedule must give one number for a count of updates, got {found}"
            )
        return np.asarray(rates, np.float64).tolist()

    def _say_skipped(self) -> None:
        skipped, steps = int(self.state.skipped), int(self.state.step)
        if skipped == steps:
            raise ValueError(
                f"trainer: none of the {steps} steps changed anything, {WHY_IDLE}; look at the "
                "data, or take a wider precision"
            )
        if skipped:
            self._say(f"{skipped} of {steps} steps changed nothing, {WHY_IDLE}")

    def _measure(self, i: int) -> dict[str, Any]:
        """The held-out loss of the parameters as they are, if anything is held out."""
        if not self.held_out:
            return {}
        total, count = self.evaluate(self.state.all_params, self.held_out)
        if not count:
            raise ValueError("trainer: the held-out batches hold no target to measure a loss of")
        self._say(f"step {i}: held-out loss {total / count:.4f}")
        return {"held_out_loss": total / count}

    def _sample(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A sample of the parameters as they are, unless the row's loss of them is not finite."""
        if self.sample is None or not math.isfinite(row.get("held_out_loss", 0.0)):
            return {}
        train.update(self.model, self.state.all_params)
        return {"sample": self.sample(self.model)}

    def _end(self, checkpoints: Checkpoints, rows: list[dict[str, Any]]) -> Fitted:
        by_step = {row["step"]: row for row in rows}
        step = int(self.state.step)
        best = checkpoints.best_step if self.held_out else None
        losses = {
            i: loss for i, row in by_step.items() if (loss := row.get("held_out_loss")) is not None
        }
        kept = step
        if best is not None:
            losses[best] = checkpoints.best_loss  # its row may be gone
            if losses.get(step, math.inf) >= losses[best]:  # else the last, though only here
                kept = best
        unsaved = _unsaved(kept, losses, checkpoints.steps)
        # What is not needed any more goes first, for its room
        self._ended = True
        self.state = dataclasses.replace(self.state, opt_state=_deleted(self.state.opt_state))
        if kept != step:
            of_best = checkpoints.parameters(step=kept)
            places = {name: x.sharding for name, x in self.state.params.items()}
            found = {  # of size 0 nothing is saved
                name: of_best[name] if x.size else np.zeros(x.shape, x.dtype)
                for name, x in self.state.params.items()
            }
            _deleted(self.state.params)
            placed = jax.device_put(found, places)
            self.state = dataclasses.replace(self.state, params=placed)
        params = self.state.all_params
        train.update(self.model, params)
        first, last = by_step.get(0, {}), by_step.get(kept, {})
        return Fitted(
            params,
            kept,
            base_loss=first.get("held_out_loss"),
            loss=losses.get(kept),
            before=first.get("sample"),
            after=last.get("sample"),
            unsaved=unsaved,
        )


def _unsaved(kept: int, losses: Mapping[int, float], saved: Collection[int]) -> str | None:
    """What could not be saved of a run whose step `kept` is its result; None: nothing.

    losses: held out, by step. saved: the steps that have a checkpoint.
    """
    lowest = min((step for step in losses if step), key=losses.__getitem__, default=kept)
    if losses.get(lowest, math.inf) < losses.get(kept, math.inf):
        return (
            f"step {lowest} had the lowest held-out loss, {losses[lowest]:.4f}, but could not be "
            f"saved; what is kept is step {kept}"
        )
    if kept not in saved:
        return (
            f"the checkpoint of step {kept} could not be saved, so nothing can go on from it; the "
            "parameters themselves are here"
        )
    return None


@dataclasses.dataclass(frozen=True)
class _Work:
    """What there is to compute in a batch: tokens that are no padding, and the pairs of a token and
    one that it sees (sliding windows not taken off).
    """

    tokens: int
    pairs: int

    @classmethod
    def of(cls, batch: Batch) -> _Work:
        shape = np.shape(batch["tokens"])
        real = np.ones(shape, bool)
        if batch.get("segment_ids") is not None:
            real = np.asarray(batch["segment_ids"]) != 0
        positions = batch.get("positions")
        positions = np.arange(shape[1]) if positions is None else np.asarray(positions)
        return cls(int(real.sum()), int(((positions + 1) * real).sum(dtype=np.int64)))


def _devices(params: Params) -> list[Any]:
    """Those that parameters were put on, or the default one."""
    put = (x.devices() for x in params.values() if x.committed)
    devices = next(put, None) or next(iter(params.values())).devices()
    return sorted(devices, key=lambda device: device.id)


class _Speed:
    """Tokens a second, MFU and memory, by when the numbers of the last steps came."""

    def __init__(self, model: Transformer, devices: list[Any], *, trains_all: bool):
        self.config = model.config
        self.device = devices[0]
        half = model.runtime.compute_dtype != "float32"
        peak = peak_flops(self.device.device_kind) if half else None
        self.peak = None if peak is None else len(devices) * peak
        self.trains_all = trains_all
        self.seen: collections.deque[tuple[float, _Work]] = collections.deque(maxlen=SMOOTHED + 1)

    def resume(self) -> None:
        """What lies behind this look was no training: steps are timed anew."""
        self.seen.clear()
        self.seen.append((time.perf_counter(), _Work(0, 0)))

    def of(self, work: _Work) -> dict[str, Any]:
        self.seen.append((time.perf_counter(), work))
        row: dict[str, Any] = {"memory_bytes": _memory_bytes(self.device)}
        seconds = self.seen[-1][0] - self.seen[0][0]
        if seconds:
            done = [work for _, work in self.seen][1:]
            tokens = sum(work.tokens for work in done)
            row["tokens_per_s"] = tokens / seconds
            if self.peak is not None and tokens:
                seen = sum(work.pairs for work in done) / tokens
                flops = tokens * flops_a_token(self.config, seen, trains_all=self.trains_all)
                row["mfu"] = flops / seconds / self.peak
        return row


class _Profile:
    """Traces some steps of a run, and says which kernels took longest in them."""

    def __init__(self, trainer: Trainer, first: int):
        self.trainer, self.first = trainer, min(first, trainer.steps)
        self.last = min(self.first + trainer.profile - 1, trainer.steps)
        self.folder = trainer.out / "profile"
        self.runs = False

    def before(self, i: int) -> None:
        if self.trainer.profile and i == self.first:
            jax.block_until_ready(self.trainer.state.step)
            jax.profiler.start_trace(str(self.folder))
            self.runs = True

    def after(self, i: int) -> None:
        if self.runs and i == self.last:
            jax.block_until_ready(self.trainer.state.step)
            self._stop()
            try:
                kernels = trace.longest(self.folder)
            except FileNotFoundError as error:
                return self.trainer._say(f"profile: {error}; the run goes on")
            which = f"{self.folder}: steps {self.first} to {i}"
            if not kernels:
                return self.trainer._say(f"{which}; the profile holds no kernels")
            self.trainer._say(f"{which}; what took longest:")
            for kernel in kernels:
                self.trainer._say(
                    f"{kernel.total_us / 1e3:10.2f} ms  {kernel.launches:6} x  {kernel.name}"
                    f"  {kernel.scope}".rstrip()
                )

    def _stop(self) -> None:
        self.runs = False
        jax.profiler.stop_trace()

    def __enter__(self) -> _Profile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.runs:
            self._stop()


def _deleted(tree: Any) -> tuple[()]:
    for x in jax.tree.leaves(tree):
        x.delete()
    return ()


def fingerprint(params: Params) -> str:
    """A digest of names, shapes, dtypes and some numbers of each parameter: it tells two
    checkpoints of one shape apart without reading all of them back.
    """

    @jax.jit
    def some(params: Params) -> dict[str, Any]:
        return {n: x.reshape(-1)[:: max(1, x.size // 64)][:64] for n, x in params.items()}

    digest = hashlib.sha256()
    numbers = jax.device_get(some(params))
    for name in sorted(params):
        x = params[name]
        digest.update(f"{name} {x.dtype}{x.shape}".encode() + np.asarray(numbers[name]).tobytes())
    return digest.hexdigest()[:16]


def _memory_bytes(device: Any) -> int:
    """The most that the device, or on a CPU this process, has held so far."""
    stats = device.memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
