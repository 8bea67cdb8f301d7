"""Orbax: save, restore and resume our own training state. Orbax imports slowly, so `import jaxllm`
leaves this file out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from jaxllm.train import TrainState


@dataclasses.dataclass(frozen=True)
class Saved:
    """One checkpoint: the training state, the random key, what the recipe wrote down about its
    place in the data and its settings, and the validation loss (None if it had none).
    """

    state: TrainState
    key: Array
    position: dict[str, Any]
    loss: float | None


class TornError(ValueError):
    """A checkpoint of which a part is missing or broken."""


def host_device() -> Any:
    """The CPU; None, which stands for the default device, if this process has left it out."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _to_stderr(sentence: str) -> None:
    if sys.stderr is not None:  # where it is closed, print would take the output
        print(sentence, file=sys.stderr)


class Checkpoints:
    """The checkpoints of one training run: a folder that keeps the latest ones, and the one with
    the lowest validation loss.

    A checkpoint is written while training goes on, and gets its name when it is whole: a run that
    dies while it writes leaves those before, and what it has begun, which the next save removes. A
    save that fails (a full disk) is said with `say`, in one sentence, and leaves them too; the next
    save tries again.
    For the whole process, and not undone: the loggers `absl` and `asyncio` leave out Orbax's
    messages, and `sys.unraisablehook` the tracebacks of writes that end after a save has failed.
    keep: how many of the latest are kept. Two, so that a torn one has one before it.
    read_only: nothing in the folder is made, renamed or removed, for a run may be at work there.
    Raises: ValueError if the folder is a file; TornError if a loss in it cannot be read and it may
    not be set aside.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 2,
        read_only: bool = False,
        say: Callable[[str], None] = _to_stderr,
    ):
        if keep < 1:
            raise ValueError(f"checkpoints: keep must be at least 1, got {keep}")
        self.folder = Path(folder).expanduser().resolve()
        existing = next(p for p in (self.folder, *self.folder.parents) if p.exists())
        if not existing.is_dir():
            raise ValueError(f"checkpoints: {existing} is a file; give a folder")
        self._say, self._read_only = say, read_only
        self._saving: int | None = None
        for step in self._broken_metrics():
            if read_only:  # with it, Orbax would not open the folder
                raise self._torn_error(step)
            self._say(f"{self._unreadable(step)}{self._set_aside(step)}; it is left out")
        best = BestN(
            get_metric_fn=_measure, reverse=True, n=1, keep_checkpoints_without_metrics=False
        )
        for logger in ("absl", "asyncio"):  # whose errors become sentences of ours
            logging.getLogger(logger).addFilter(_is_not_orbax)
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "notes": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                best_fn=_measure,
                best_mode="min",
                read_only=read_only,
                preservation_policy=AnyPreservationPolicy([LatestN(keep), best]),
            ),
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.wait()
        self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """The step of the newest checkpoint that is whole; None if there is none."""
        self.wait()
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """The steps of all checkpoints that are whole, ascending."""
        self.wait()
        return sorted(self._manager.all_steps())

    @property
    def best_step(self) -> int | None:
        """The step of the checkpoint with the lowest loss; None if none has one."""
        self.wait()
        step = self._manager.best_step()
        return None if step is None or self._loss(step) is None else step

    @property
    def best_loss(self) -> float:
        """The lowest loss that a checkpoint was saved with; infinite if none has one."""
        step = self.best_step
        loss = None if step is None else self._loss(step)
        return math.inf if loss is None else loss

    def save(
        self,
        state: TrainState,
        *,
        key: Array,
        position: Mapping[str, Any] | None = None,
        loss: float | None = None,
    ) -> None:
        """Begins to write a checkpoint under the state's step, and then removes those that are
        neither among the latest nor the best. The state may be donated at once. `wait` returns when
        all is on disk; a save waits for the one before. A step that is there already is left alone.

        The state's `frozen` parameters are not written. `key` is a typed random key. `position` is
        what else a resumed run needs, as JSON: how far it had read its data.
        Raises: ValueError if the position is not JSON, or the folder is only read.
        """
        if self._read_only:
            raise ValueError(f"checkpoints: {self.folder} was opened to be read, not to save in")
        try:  # a copy, for it is written later, and its owner may go on with what is in it
            position = json.loads(json.dumps(dict(position or {})))
        except (TypeError, ValueError) as error:
            raise ValueError(f"checkpoints: position must be plain JSON values: {error}") from None
        self.wait()
        for begun in self.folder.glob("*.orbax-checkpoint-tmp*"):  # by a run that was killed
            shutil.rmtree(begun, ignore_errors=True)
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        # Never without a number, for Orbax would warn; one that is no number would be the best.
        measure = math.inf if loss is None or math.isnan(loss) else float(loss)
        leaves = {**_leaves(state), "key": jax.random.key_data(key)}
        self._saving = step
        _pass_over_late_writes()  # some end before the first failure is told
        with self._saying_what_fails():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(jax.tree.map(_own, leaves)),
                    notes=ocp.args.JsonSave({"position": position, "key": _kind(key)}),
                ),
                metrics={"loss": measure},
            )

    def wait(self) -> None:
        """Returns when what was begun is on disk, or has failed and was said."""
        if self._saving is not None:
            with self._saying_what_fails():
                self._manager.wait_until_finished()
            self._saving = None

    def restore(
        self,
        like: TrainState,
        *,
        step: int | None = None,
        check: Callable[[Mapping[str, Any]], None] | None = None,
        donate: bool = False,
    ) -> Saved:
        """The checkpoint of a step, with the shapes, dtypes, placement and frozen parameters of
        `like`, which is not changed.

        None: the newest that can be read. One that is torn is said, and set aside as `torn-STEP`
        (but not if the folder is only read).
        `check` is called with the position before any array is compared or read; it may raise.
        donate: the arrays of `like` but the frozen ones are deleted when all was compared and
        before any is read, so that there is room where a state does not fit twice.
        Raises: FileNotFoundError if there is none. ValueError if the one that was asked for, or
        every one, is torn (`TornError`), or it is of another model or optimiser. What stands in the
        way of reading and is no fault of the checkpoint (no memory, no permission) as it comes, and
        nothing is set aside.
        """
        self.wait()
        given = jax.tree.leaves(dataclasses.replace(like, frozen={})) if donate else []
        # Shapes from here on, for a second one may be read when the arrays are gone
        frozen, like = like.frozen, dataclasses.replace(like, frozen={})
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)

        def read(step: int) -> Saved:
            saved = self._read(step, like, check, given)
            return dataclasses.replace(saved, state=dataclasses.replace(saved.state, frozen=frozen))

        steps = sorted(self._manager.all_steps())
        if not steps:
            raise FileNotFoundError(f"{self.folder}: no training was saved here")
        if step is not None:
            self._check_saved(step)
            return read(step)
        while True:
            step = steps.pop()
            try:
                return read(step)
            except TornError:
                if not steps:
                    raise
            aside = "" if self._read_only else self._set_aside(step)
            self._say(f"{self._unreadable(step)}{aside}; going back to step {steps[-1]}")
            self._manager.reload()

    def parameters(self, *, step: int | None = None) -> dict[str, Array]:
        """The trained parameters of a step (None: the best; without losses, the latest), by name,
        as they were saved. Nothing else is read, and they lie in the host's memory: a computation
        takes them to where its other arguments are.

        Raises: FileNotFoundError if there is none; TornError.
        """
        if step is not None:
            self._check_saved(step)
        step = self.best_step if step is None else step
        step = self.latest_step if step is None else step
        if step is None:
            raise FileNotFoundError(f"{self.folder}: no training was saved here")
        with self._torn(step):
            saved = self._manager.item_metadata(step)["state"].tree
            names = [name for name in saved if name.startswith(_PARAMS)]
            to_host = ocp.RestoreArgs(restore_type=np.ndarray)
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                leaves = reader.restore(
                    self.folder / str(step) / "state",
                    args=ocp.args.PyTreeRestore(
                        item={name: saved[name] for name in names},
                        restore_args=dict.fromkeys(names, to_host),
                        partial_restore=True,
                    ),
                )
        with jax.default_device(host_device()):
            return {name.removeprefix(_PARAMS): jnp.asarray(leaves[name]) for name in names}

    def _check_saved(self, step: int) -> None:
        steps = sorted(self._manager.all_steps())
        if not steps:
            raise FileNotFoundError(f"{self.folder}: no training was saved here")
        if isinstance(step, bool) or step not in steps:
            raise FileNotFoundError(
                f"{self.folder}: step {step!r} was not saved here; the steps that were: "
                f"{', '.join(map(str, steps))}"
            )

    def _read(
        self,
        step: int,
        like: TrainState,
        check: Callable[[Mapping[str, Any]], None] | None,
        given: list[Array],
    ) -> Saved:
        """`like`: shapes. `given`: what is deleted before arrays are read."""
        stored = self.folder / str(step)
        with self._torn(step):
            notes = self._manager.restore(
                step, args=ocp.args.Composite(notes=ocp.args.JsonRestore())
            )
            notes = notes["notes"]
            key: Any = jax.random.key_data(jax.random.key(0, impl=notes["key"]))
            wanted = {**_leaves(like), "key": ocp.utils.to_shape_dtype_struct(key)}
            saved_shapes = _shapes(self._manager.item_metadata(step)["state"].tree)
        if check is not None:
            check(notes["position"])
        shapes = _shapes(wanted)
        for name in sorted(saved_shapes.keys() | shapes.keys()):  # Orbax would cut or fill
            if saved_shapes.get(name) != shapes.get(name):
                raise ValueError(
                    f"{stored}: {name} is {saved_shapes.get(name, 'absent')} there, but "
                    f"{shapes.get(name, 'absent')} in the model or optimiser that is to go on"
                )
        for x in given:
            x.delete()
        with self._torn(step):
            restored = self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
            )["state"]
        key = jax.random.wrap_key_data(restored.pop("key"), impl=notes["key"])
        empty = {
            name: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)
            for name, x in zip(_names(like), jax.tree.leaves(like), strict=True)
            if not x.size
        }
        leaves = [(restored | empty)[name] for name in _names(like)]
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return Saved(state, key, notes["position"], self._loss(step))

    def _loss(self, step: int) -> float | None:
        loss = (self._manager.metrics(step) or {}).get("loss", math.inf)
        return loss if math.isfinite(loss) else None

    @contextlib.contextmanager
    def _torn(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and the file layers below raise many kinds
            if not _is_torn(error):
                raise
            folder = self.folder / str(step)
            if self._read_only and not folder.exists():
                raise FileNotFoundError(
                    f"{folder}: the run at work there has removed this checkpoint for a newer one; "
                    "open the folder anew"
                ) from error
            raise self._torn_error(step) from error

    def _torn_error(self, step: int) -> TornError:
        return TornError(
            f"{self._unreadable(step)}; remove that folder to go back to the one before"
        )

    def _unreadable(self, step: int) -> str:
        return (
            f"{self.folder / str(step)}: this checkpoint cannot be read, a part of it is missing "
            "or broken"
        )

    def _broken_metrics(self) -> list[int]:
        """Steps whose loss is not JSON: Orbax would not open the folder."""
        broken = []
        for file in self.folder.glob("*/metrics/metrics"):
            if file.parts[-3].isdecimal():
                try:
                    json.loads(file.read_bytes())
                except FileNotFoundError:  # a run at work has removed it
                    continue
                except ValueError:
                    broken.append(int(file.parts[-3]))
        return sorted(broken)

    def _set_aside(self, step: int) -> str:
        """Renames a torn checkpoint, so that its step can be saved again; says so."""
        torn = self.folder / f"torn-{step}"
        shutil.rmtree(torn, ignore_errors=True)
        (self.folder / str(step)).rename(torn)
        return f" (it is now {torn.name})"

    @contextlib.contextmanager
    def _saying_what_fails(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:  # what the layers below Orbax raise
            step, self._saving = self._saving, None
            self._free_the_room(step)
            last = self._manager.latest_step()
            rest = "there is none yet" if last is None else f"the last good one is step {last}"
            self._say(f"{self.folder}: step {step} was not saved: {_reason(error)}; {rest}")

    def _free_the_room(self, step: int | None) -> None:
        """Removes what a failed save left. Orbax waits for the first writer that fails alone: the
        others may still be at work, and make their folders anew, so it looks until none does.
        """
        still = 0
        for _ in range(100):
            left = list(self.folder.glob(f"{step}.orbax-checkpoint-tmp*"))
            still = 0 if left else still + 1
            if still == 3:
                return
            for folder in left:
                shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.05)


_PARAMS = "params."


def _own(x: Array) -> Array:
    """An array that no step donates: on a CPU, arrays are written from where they lie."""
    return jnp.copy(x) if next(iter(x.devices())).platform == "cpu" else x


def _is_torn(error: BaseException) -> bool:
    """Whether a part of what was read is missing or broken, and not the reading itself at fault:
    out of memory, not permitted, a disk that fails.
    """
    chain: list[BaseException] = []
    while error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__ or error
    if any(isinstance(e, jax.errors.JaxRuntimeError | MemoryError) for e in chain):
        return False
    if any(isinstance(e, OSError) and not isinstance(e, _MISSING) for e in chain):
        return False
    # TensorStore raises ValueError, with a status in front
    return any(
        isinstance(e, (*_MISSING, KeyError, json.JSONDecodeError, UnicodeDecodeError))
        or (isinstance(e, ValueError) and str(e).startswith(_BROKEN))
        for e in chain
    )


_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_BROKEN = ("DATA_LOSS", "NOT_FOUND", "FAILED_PRECONDITION", "OUT_OF_RANGE", "INVALID_ARGUMENT")


def _leaves(state: TrainState) -> dict[str, Array]:
    """All of a state that is written, by name: of arrays of size 0 there is nothing to write."""
    thawed = dataclasses.replace(state, frozen={})
    leaves = zip(_names(thawed), jax.tree.leaves(thawed), strict=True)
    return {name: x for name, x in leaves if x.size}


def _names(tree: Any) -> list[str]:
    return [
        ".".join(re.findall(r"[^\[\]'.]+", jax.tree_util.keystr(path)))
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _shapes(leaves: Mapping[str, Any]) -> dict[str, str]:
    """dtype and shape of each array."""
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in leaves.items()}


def _kind(key: Array) -> str:
    return str(jax.random.key_impl(key))


def _measure(metrics: Mapping[str, float]) -> float:
    return metrics["loss"]


def _reason(error: Exception) -> str:
    """What the system said, of an error with many lines."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(code[1])) if code else str(error).partition("\n")[0]


def _is_not_orbax(record: logging.LogRecord) -> bool:
    """Its threads log what goes wrong whenever they get to it, some after the save has failed."""
    return "orbax" not in record.pathname and "orbax" not in record.getMessage()


class _LateWriteHook:
    """A hook in place of `sys.unraisablehook`: when a write of a save has failed, Orbax's loop is
    closed, and each that ends later would print a traceback from tensorstore's threads. They have
    no Python of their own, so what they raise is of no object; all else goes to the hook there was.
    """

    def __init__(self, hook: Callable[[Any], Any]):
        self._hook = hook

    def __call__(self, what: Any) -> None:
        late = what.exc_type is RuntimeError and str(what.exc_value) == "Event loop is closed"
        if not (late and what.object is None):
            self._hook(what)


def _pass_over_late_writes() -> None:
    if not isinstance(sys.unraisablehook, _LateWriteHook):
        sys.unraisablehook = _LateWriteHook(sys.unraisablehook)
