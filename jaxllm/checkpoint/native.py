"""Orbax: save, restore and resume our own training state. Orbax imports slowly, so `import jaxllm`
leaves this file out.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
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


class Checkpoints:
    """The checkpoints of one training run: a folder that keeps the latest, and the one with the
    lowest validation loss.

    A checkpoint gets its name when it is whole: a run that dies while it writes leaves those
    before.
    Raises: ValueError if the folder is a file.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder).expanduser().resolve()
        existing = next(p for p in (self.folder, *self.folder.parents) if p.exists())
        if not existing.is_dir():
            raise ValueError(f"checkpoints: {existing} is a file; give a folder")
        best = BestN(
            get_metric_fn=_measure, reverse=True, n=1, keep_checkpoints_without_metrics=False
        )
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "notes": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                best_fn=_measure,
                best_mode="min",
                preservation_policy=AnyPreservationPolicy([LatestN(1), best]),
                # The next step donates the arrays, and on a CPU they are written from where they
                # lie.
                enable_async_checkpointing=False,
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
        self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """The step of the newest checkpoint; None if there is none."""
        return self._manager.latest_step()

    @property
    def best_step(self) -> int | None:
        """The step of the checkpoint with the lowest loss; None if none has one."""
        step = self._manager.best_step()
        return None if step is None or self._loss(step) is None else step

    def save(
        self,
        state: TrainState,
        *,
        key: Array,
        position: Mapping[str, Any] | None = None,
        loss: float | None = None,
    ) -> None:
        """Writes a checkpoint under the state's step, and removes those that are neither the latest
        nor the best. It returns when all is on disk. A step that is there already is left alone.

        `key` is a typed random key. `position` is what else a resumed run needs, as JSON: how far
        it had read its data.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        # Never without a number, for Orbax would warn; one that is no number would be the best.
        measure = math.inf if loss is None or math.isnan(loss) else float(loss)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave({"train": state, "key": jax.random.key_data(key)}),
                notes=ocp.args.JsonSave({"position": dict(position or {}), "key": _kind(key)}),
            ),
            metrics={"loss": measure},
        )

    def restore(self, like: TrainState, *, step: int | None = None) -> Saved:
        """The checkpoint of a step (None: the latest), with the shapes, dtypes and placement of
        `like`, which is not changed.

        Raises: FileNotFoundError if there is none. ValueError if it is torn, or of another model or
        optimiser.
        """
        steps = sorted(self._manager.all_steps())
        if not steps:
            raise FileNotFoundError(f"{self.folder}: no training was saved here")
        step = steps[-1] if step is None else step
        if step not in steps:
            listed = ", ".join(map(str, steps))
            raise FileNotFoundError(
                f"{self.folder}: step {step} was not saved here; the steps that were: {listed}"
            )
        stored = self.folder / str(step)
        try:
            notes = self._manager.restore(
                step, args=ocp.args.Composite(notes=ocp.args.JsonRestore())
            )
            notes = notes["notes"]
            data = jax.random.key_data(jax.random.key(0, impl=notes["key"]))
            wanted = {"train": like, "key": data}
            saved_shapes = _shapes(self._manager.item_metadata(step)["state"].tree)
        except Exception as error:  # Orbax and the file layers below raise many kinds
            raise ValueError(_torn(stored)) from error
        shapes = _shapes(wanted)
        for name in sorted(saved_shapes.keys() | shapes.keys()):  # Orbax would cut or fill
            if saved_shapes.get(name) != shapes.get(name):
                raise ValueError(
                    f"{stored}: {name} is {saved_shapes.get(name, 'absent')} there, but "
                    f"{shapes.get(name, 'absent')} in the model or optimiser that is to go on"
                )
        try:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
            restored = self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
            )["state"]
        except Exception as error:
            raise ValueError(_torn(stored)) from error
        key = jax.random.wrap_key_data(restored["key"], impl=notes["key"])
        return Saved(restored["train"], key, notes["position"], self._loss(step))

    def _loss(self, step: int) -> float | None:
        loss = (self._manager.metrics(step) or {}).get("loss", math.inf)
        return loss if math.isfinite(loss) else None


def _torn(checkpoint: Path) -> str:
    return (
        f"{checkpoint}: this checkpoint cannot be read, a part of it is missing or broken; remove "
        "that folder to go back to the one before"
    )


def _kind(key: Array) -> str:
    return str(jax.random.key_impl(key))


def _shapes(tree: Any) -> dict[str, str]:
    """dtype and shape of each array, by its path: the same words for a pytree and for what Orbax
    makes of it (dictionaries and lists).
    """
    return {
        ".".join(re.findall(r"[^\[\]'.]+", jax.tree_util.keystr(path))): f"{x.dtype}{list(x.shape)}"
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def _measure(metrics: Mapping[str, float]) -> float:
    return metrics["loss"]
