"""How to fine-tune: what `jaxllm finetune` is told, and `run.json`, which keeps it with the run."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxllm import lora, optimizers, precision
from jaxllm.checkpoint.folder import weights_digest
from jaxllm.config import REMAT, ModelConfig
from jaxllm.records import ON_LONG

METHODS = ("lora", "qlora", "full")
# Learning rates at a width of 4096, as they are in use for models of 7 to 8 billion parameters.
# Adam's best step size falls as 1 / width (Yang et al. 2022, arXiv:2203.03466), and so does ours.
RATES = {"lora": 2e-4, "qlora": 2e-4, "full": 2e-5}
RUN = "run.json"
LEAST_STEPS = 100  # else a hundred records would be over before the warm-up is
BASE = "base_weights"  # in it beside the recipe: what tells the weights that adapters are for
# What `jaxllm finetune` calls a field, where it is no field's name with dashes
OPTIONS = {
    "method": "--lora, --qlora, --full",
    "kind": "--adapter-kind",
    "rank": "--lora",
    "rows": "--batch",
    "length": "--seq",
}
FREE = ("model", "data", "held_out", "eval_every", "save_every")  # compared by content, or free


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to fine-tune; None: chosen from the model, the data and the device. Paths become texts.

    model: a folder or hub id. data: a file for `data.read_records`. held_out: another one, or the
    fraction of the records whose loss is only measured (None: a tenth, 256 records at most; 0:
    none, and the last step is the result).
    method: "lora" and "qlora" (the base in int4) train adapters of `rank` beside all linears, or
    those that `targets` names, of a `kind` and with an `alpha` (None: 2 * rank) as in
    `lora.add_adapters`; "full" trains all.
    learning_rate: after `warmup_steps` (None: a twentieth of all); what then becomes of it says
    `schedule`, a name of `optimizers.SCHEDULES`. weight_decay: Adam's, decoupled, of matrices and
    not of norms and biases. epochs, or else steps, of batches of `rows` rows of `length` tokens
    (both None: three epochs, and 100 steps at least; the best step counts). length None: the power
    of two that holds the longest record, 1024 and the model's positions at most. on_long: what is
    done with records that are longer, as in `data.encode_records`.
    micro_batches: parts that a batch is computed in (None: 1, and row by row on a CPU, where that
    is fastest). precision, remat: by their names in `jaxllm.precision` and `Runtime`. seed: of
    adapters and of the order of the data; which records are held out does not depend on it.
    """

    model: str | os.PathLike[str]
    data: str | os.PathLike[str]
    held_out: str | os.PathLike[str] | float | None = None
    prompt_key: str | Sequence[str] = "prompt"
    completion_key: str | Sequence[str] = "completion"
    method: str = "lora"
    rank: int = lora.RANK
    targets: str = "all-linear"
    kind: str = "lora"
    alpha: float | None = None
    learning_rate: float | None = None
    schedule: str = "cosine"
    warmup_steps: int | None = None
    weight_decay: float = 0.0
    epochs: int | None = None
    steps: int | None = None
    rows: int = 8
    length: int | None = None
    on_long: str = "truncate"
    micro_batches: int | None = None
    precision: str | None = None
    remat: str = "none"
    optimizer: str = "adamw"
    eval_every: int | None = None
    save_every: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("model", "data", "held_out"):
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        for name in ("model", "data", "targets"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise ValueError(f"finetune: {name} must be a text, not empty, got {value!r:.60}")
        for name, names in (
            ("method", METHODS),
            ("kind", lora.KINDS),
            ("optimizer", optimizers.BY_NAME),
            ("schedule", optimizers.SCHEDULES),
            ("on_long", ON_LONG),
            ("remat", REMAT),
        ):
            if getattr(self, name) not in names:
                raise ValueError(
                    f"finetune: {named(name)} {getattr(self, name)!r} is not one of "
                    f"{', '.join(names)}"
                )
        counts = "rank epochs steps rows length micro_batches eval_every save_every".split()
        for name, least in (*((name, 1) for name in counts), ("warmup_steps", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(
                    f"finetune: {named(name)} must be a whole number (int), at least {least}, got "
                    f"{value!r}"
                )
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise ValueError(
                f"finetune: {named('seed')} must be a whole number from 0 to 2**32 - 1, got "
                f"{self.seed!r}"
            )
        part: Any = self.held_out
        is_part = part is None or (_is_number(part) and 0 <= part < 1)
        if not (is_part or (isinstance(part, str) and part)):
            raise ValueError(
                f"finetune: {named('held_out')} must be a file, or a part of the records, at least "
                f"0 and below 1, got {part!r:.60}"
            )
        for name in ("learning_rate", "alpha"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                raise ValueError(
                    f"finetune: {named(name)} must be positive and finite, got {value!r}"
                )
        if not (_is_number(self.weight_decay) and 0 <= self.weight_decay < math.inf):
            raise ValueError(
                f"finetune: {named('weight_decay')} must be finite and at least 0, got "
                f"{self.weight_decay!r}"
            )
        for name in ("rank", "targets", "kind", "alpha") if self.method == "full" else ():
            if (value := getattr(self, name)) != getattr(Recipe, name):
                raise ValueError(
                    f"finetune: {named(name)} {value!r} is of adapters, and method 'full' has none"
                )
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"finetune: give {named('epochs')} or {named('steps')}, not both")
        policy = None if self.precision is None else precision.policy(self.precision)
        if policy is not None and policy.fp8 and self.method == "qlora":
            raise ValueError(
                f"finetune: {named('precision')} {self.precision!r} is of plain weights, and "
                "method 'qlora' packs them in int4; take precision 'bf16', or method 'lora'"
            )


def _is_number(value: Any) -> bool:
    """Whether it is one that JSON can hold; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def named(field: str) -> str:
    """A field, with the option of the command line that it is."""
    return f"{field} ({OPTIONS.get(field, '--' + field.replace('_', '-'))})"


def write_recipe(recipe: Recipe, out: Path, base: str | None) -> None:
    """Keeps it in a run's folder, which need not be there yet. base: as in `read_run`."""
    out.mkdir(parents=True, exist_ok=True)
    part = out / f"{RUN}.part"
    content = {**dataclasses.asdict(recipe), BASE: base}
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(part, out / RUN)


def read_recipe(run: str | os.PathLike[str]) -> Recipe:
    """What a run is made by, so that it goes on alike where defaults have changed: nothing is left
    open but how often it is evaluated and saved, and `steps` where there are `epochs`.

    Raises: FileNotFoundError if there is no run; ValueError if it is of something else.
    """
    return read_run(Path(run).expanduser())[0]


def read_run(out: Path) -> tuple[Recipe, str | None]:
    """The recipe, and the digest of the base's weights (None: the run is of an older version)."""
    file = out / RUN
    try:
        content = dict(json.loads(file.read_text(encoding="utf-8")))
        base = content.pop(BASE, None)
        if absent := [name for name in ("model", "data") if name not in content]:
            raise ValueError(f"it has no {' and no '.join(absent)}")
        recipe = Recipe(**content)
        alpha, warmup = recipe.alpha or _usual_alpha(recipe), recipe.warmup_steps
        if warmup is None and recipe.steps is not None:
            warmup = optimizers.usual_warmup(recipe.steps)
        # An older version wrote none
        return dataclasses.replace(recipe, alpha=alpha, warmup_steps=warmup), base
    except FileNotFoundError:
        raise FileNotFoundError(f"{out}: there is no run here ({RUN} is missing)") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: this is no recipe of jaxllm finetune: {error}") from None


def resumed(recipe: Recipe, out: Path, given: Collection[str] | None) -> Recipe:
    """The recipe that the run began with; what is said anew must agree."""
    began = dataclasses.asdict(read_recipe(out))
    if given is None:
        plain = {field.name: field.default for field in dataclasses.fields(Recipe)}
        given = [name for name, default in plain.items() if getattr(recipe, name) != default]
    for name in (field.name for field in dataclasses.fields(Recipe) if field.name in given):
        value = getattr(recipe, name)
        value = list(value) if isinstance(value, tuple) else value
        if name in FREE:
            began[name] = value
        elif value != began[name]:
            raise ValueError(
                f"{out}: the run began with {named(name)} {began[name]}, and not {value}; resume "
                "it with what it began with, or give another folder"
            )
    return Recipe(**began)


def record_model(out: Path, model: str | os.PathLike[str], folder: Path) -> None:
    """Where the base of a resumed run is now, for its exports; not of other weights, with which the
    trainer will refuse to go on.
    """
    began, base = read_run(out)
    if began.model != model and base == weights_digest(folder):
        moved = dataclasses.replace(began, model=model)
        write_recipe(moved, out, base)


def with_model(recipe: Recipe, config: ModelConfig) -> Recipe:
    """With what the model and the device decide."""
    gpu, limit = jax.default_backend() == "gpu", config.max_position_embeddings
    if recipe.length is not None and recipe.length > limit:
        raise ValueError(
            f"finetune: {named('length')} {recipe.length} is more than the model's {limit} "
            "positions"
        )
    if recipe.rows % (recipe.micro_batches or 1):
        raise ValueError(
            f"finetune: {named('rows')} {recipe.rows} cannot be split into "
            f"{recipe.micro_batches} equal micro-batches"
        )
    rate = float(f"{RATES[recipe.method] * 4096 / config.hidden_size:.2g}")
    return dataclasses.replace(
        recipe,
        alpha=recipe.alpha or _usual_alpha(recipe),
        learning_rate=recipe.learning_rate or rate,
        precision=recipe.precision or ("bf16" if gpu else "fp32"),
        micro_batches=recipe.micro_batches or (1 if gpu else recipe.rows),
    )


def _usual_alpha(recipe: Recipe) -> float | None:
    return None if recipe.method == "full" else 2 * recipe.rank


def with_steps(recipe: Recipe, batches_per_epoch: int) -> tuple[Recipe, int]:
    """With what the number of batches decides; and how many steps that makes."""
    if recipe.steps is not None:
        steps = recipe.steps
    elif recipe.epochs is not None:
        steps = recipe.epochs * batches_per_epoch
    else:
        steps = max(LEAST_STEPS, 3 * batches_per_epoch)
        recipe = dataclasses.replace(recipe, steps=steps)
    warmup = optimizers.usual_warmup(steps) if recipe.warmup_steps is None else recipe.warmup_steps
    if warmup >= steps:
        raise ValueError(
            f"finetune: {named('warmup_steps')} {warmup} leaves none of {steps} steps with the "
            "whole learning rate"
        )
    return dataclasses.replace(recipe, warmup_steps=warmup), steps


def settings_of(recipe: Recipe, steps: int) -> dict[str, Any]:
    """What a run that goes on must have alike; of what came later than the first checkpoints, only
    where it is not as it was then.
    """
    settings = {k: v for k, v in dataclasses.asdict(recipe).items() if k not in FREE}
    then = {
        "kind": "lora",
        "alpha": _usual_alpha(recipe),
        "weight_decay": 0.0,
        "schedule": "cosine",
        "warmup_steps": optimizers.usual_warmup(steps),
    }
    settings = {k: v for k, v in settings.items() if k not in then or v != then[k]}
    return {**settings, "steps": steps}
