"""Fine-tuning from a file of records to a folder: what `jaxllm finetune` and `jaxllm export` do.

It puts the library's pieces together in the usual way. `examples/finetune.py` shows them one by
one, to be edited.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.util
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

from jaxllm import data, fp8, lora, metrics, optimizers, precision, train
from jaxllm.checkpoint import hf
from jaxllm.checkpoint.folder import (
    check_new,
    check_writable,
    find_folder,
    read_config,
    read_generation,
    read_quantization,
    weights_digest,
)
from jaxllm.checkpoint.native import Checkpoints
from jaxllm.config import Runtime
from jaxllm.console import Lines
from jaxllm.generate import generate
from jaxllm.model import Transformer
from jaxllm.quantize import on_host, qlora_group_size, quantize
from jaxllm.recipe import (
    RUN,
    Recipe,
    read_run,
    record_model,
    resumed,
    settings_of,
    with_model,
    with_steps,
    write_recipe,
)
from jaxllm.tokenizer import Tokenizer
from jaxllm.trainer import Fitted, Trainer

LOGS = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # and the package of each
SHORTEST, LONGEST = 128, 1024  # tokens a row, where nobody says how many
HELD_OUT = 256  # records held out at most, where no file of them is given
SAMPLE = 64  # tokens of a sample
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def finetune(
    recipe: Recipe,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    given: Collection[str] | None = None,
    profile: int = 0,
    log: str | None = None,
    console: Console | None = None,
) -> Fitted:
    """Fine-tune as the recipe says; afterwards `out` holds the result and all that led to it.

    `model/` (a Hugging Face folder) or `adapter/` (a PEFT folder), `metrics.jsonl`, `metrics.csv`,
    `loss.png`, `checkpoints/`, and `run.json`, the recipe as `read_recipe` returns it.
    given: the fields in which a run to resume must have begun alike (None: all that are not at
        their defaults); the others are taken from its recipe.
    log: "tensorboard" or "wandb" beside that.
    Raises: ValueError and OSError, one sentence each, with nothing overwritten: for what the recipe
    names and is not there, an `out` that holds something else, a run to resume that began with
    another recipe; and at the end, for a run that changed nothing, or whose held-out loss (or a
    weight, where nothing is held out) is no finite number, with no result written. StoppedError
    after Ctrl-C.
    """
    _check_packages(log)
    if profile < 0:
        raise ValueError(f"finetune: profile must be at least 0 steps, got {profile}")
    out = Path(out).expanduser()
    console = console or Lines(stderr=True)
    _check_out(out, resume)
    if Path(recipe.model).expanduser().is_dir():  # for an export from another working directory
        folder = Path(recipe.model).expanduser().resolve()
        recipe = dataclasses.replace(recipe, model=str(folder))
    if isinstance(recipe.held_out, str):  # and for a resume from there
        file = Path(os.path.expanduser(recipe.held_out)).resolve()
        recipe = dataclasses.replace(recipe, held_out=str(file))
    if resume:
        recipe = resumed(recipe, out, given)
    folder = find_folder(recipe.model)
    config, said = read_config(folder)
    if recipe.method != "lora" and read_quantization(folder, config, said) is not None:
        raise ValueError(
            f"finetune: the weights of {recipe.model} are packed, and stay as they are; take "
            f"method 'lora' (--lora 16), which trains adapters beside them, not {recipe.method!r}"
        )
    recipe = with_model(recipe, config)
    assert recipe.precision is not None
    policy = precision.policy(recipe.precision)

    # What is cheap and can be wrong comes before the weights
    records = data.read_records(recipe.data)
    if recipe.held_out is None:
        recipe = dataclasses.replace(recipe, held_out=min(0.1, HELD_OUT / len(records)))
    training, held_out = _split(recipe, records)
    tokenizer = Tokenizer.from_folder(folder)
    keys = {"prompt_key": recipe.prompt_key, "completion_key": recipe.completion_key}
    data.check_keys([*training, *held_out], *keys.values())
    limit = recipe.length or min(config.max_position_embeddings, LONGEST)
    options: dict[str, Any] = {"length": limit, "vocab_size": config.vocab_size, **keys}
    options["on_long"] = recipe.on_long
    if tokenizer.eos_id is None:
        options["stop_id"] = _stop_id(recipe, folder, said)
    encoded = data.encode_records(training, tokenizer, **options)
    try:
        measured = data.encode_records(held_out, tokenizer, **options) if held_out else None
    except ValueError as error:
        part = recipe.held_out
        source = part if isinstance(part, str) else f"{part:g} of {recipe.data}"
        raise ValueError(f"{error} (held out: {source})") from None
    examples = [] if measured is None else measured.examples
    longest = max(map(len, [*encoded.examples, *examples]))
    length = recipe.length or min(limit, max(SHORTEST, 2 ** (longest - 1).bit_length()))
    recipe = dataclasses.replace(recipe, length=length)
    evaluation = data.batches(examples, rows=recipe.rows, length=length) if examples else ()
    console.print(f"training: {encoded}", soft_wrap=True)
    console.print(f"held out: {measured or 'nothing'}", soft_wrap=True)

    with data.Loader(encoded.examples, rows=recipe.rows, length=length, seed=recipe.seed) as loader:
        recipe, steps = with_steps(recipe, loader.batches_per_epoch)
        with console.status(f"loading {recipe.model}"):
            model = _build(recipe)
        console.print(f"trained: {_trained(model)}", soft_wrap=True)
        assert recipe.micro_batches is not None
        schedule, optimizer = _optimizer(recipe, steps)
        prompt = prompt_tokens((examples or encoded.examples)[0])
        settings = settings_of(recipe, steps)
        trainer = Trainer(
            model,
            optimizer,
            loader,
            out,
            steps=steps,
            trainable=None if recipe.method == "full" else lora.is_adapter,
            scale=policy.scale(),
            micro_batches=recipe.micro_batches,
            held_out=evaluation,
            sample=lambda model: _sample(model, tokenizer, prompt),
            eval_every=recipe.eval_every,
            save_every=recipe.save_every,
            schedule=schedule,
            settings=settings,
            writers=_writers(log, out, dataclasses.asdict(recipe) | settings),
            profile=profile,
            console=console,
        )
        with _naming(out):
            if resume:
                record_model(out, recipe.model, folder)
            else:
                write_recipe(recipe, out, weights_digest(folder))
            fitted = trainer.fit(resume=resume)
    finite = fitted.loss is not None
    if not examples:
        finite = all(bool(jnp.isfinite(x).all()) for x in trainer.state.params.values())
    if not finite:
        what = "the held-out loss of" if examples else "a weight after"
        raise ValueError(
            f"finetune: {what} step {fitted.step} is not a finite number, so nothing is written; "
            f"a lower learning rate than {recipe.learning_rate:g} may help"
        )
    with _naming(out / ("model" if recipe.method == "full" else "adapter")) as result:
        if recipe.method == "full":
            dtype = hf.default_dtype(folder)  # as an export, which loads the base with dtype=None
            train.update(model, {n: x.astype(dtype) for n, x in train.parameters(model).items()})
            hf.save(model, tokenizer, result)
        else:
            lora.save_peft(model, result, base_model_name=os.fspath(recipe.model))
    return fitted


def export(
    run: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    adapter: bool = False,
    console: Console | None = None,
) -> int:
    """Writes what a run has learnt at its best step so far, and returns that step: the last one
    saved where none has a finite held-out loss, which is said unless nothing was held out.

    A Hugging Face folder in the dtype of `load(base, dtype=None)`, with adapters merged into the
    weights of the original model (also where they were trained beside int4 ones); or, with
    `adapter`, a PEFT folder.
    Raises: FileNotFoundError if there is no run, or it has saved nothing; ValueError if `folder` is
    not empty, `adapter` is asked of a full run, what was learnt is not finite, or adapters were
    trained beside other weights than the base has now; NotImplementedError for adapters beside
    ternary layers, which only `adapter` can write.
    """
    run, folder = Path(run).expanduser(), Path(folder).expanduser()
    recipe, base = read_run(run)
    if adapter and recipe.method == "full":
        raise ValueError(f"{run}: a full fine-tuning has no adapter; leave --adapter out")
    check_new(folder)
    with Checkpoints(run / "checkpoints", read_only=True) as checkpoints:
        best = checkpoints.best_step
        step = checkpoints.latest_step if best is None else best
        params = checkpoints.parameters(step=step)
    assert step is not None
    if not all(np.isfinite(x).all() for x in params.values()):
        raise ValueError(f"{run}: what was learnt until step {step} is not finite")
    if recipe.method != "full" and base not in (None, weights_digest(find_folder(recipe.model))):
        raise ValueError(
            f"{run}: the adapters were trained beside other weights than {recipe.model} has now"
        )
    if best is None and recipe.held_out != 0:
        said = f"{run}: no saved step has a finite held-out loss; step {step} is the last of them"
        (console or Lines(stderr=True)).print(said, soft_wrap=True)
    model, tokenizer = hf.load(recipe.model, dtype=None)
    if recipe.method != "full":
        _add_adapters(model, recipe)
    own = train.parameters(model)
    for name, x in params.items():
        if name not in own or own[name].shape != x.shape:
            raise ValueError(
                f"{run}: {name}{list(x.shape)} was trained, and {recipe.model} has no such "
                "parameter now"
            )
    train.update(model, {**own, **{n: x.astype(own[n].dtype) for n, x in params.items()}})
    with _naming(folder):
        if adapter:
            lora.save_peft(model, folder, base_model_name=os.fspath(recipe.model))
        else:
            lora.merge(model)
            hf.save(model, tokenizer, folder)
    return step


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[Path]:
    """With the folder in an error of its disk that names no file, as a full one is."""
    try:
        yield folder
    except OSError as error:
        if error.errno not in DISK or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(folder)) from error


def _check_out(out: Path, resume: bool) -> None:
    begun = (out / RUN).is_file()
    check_writable(out)
    saved = [path for path in out.glob("checkpoints/*") if path.name.isdecimal()]
    if resume and not begun:
        raise FileNotFoundError(f"{out}: there is no run to go on with; begin one without --resume")
    if resume and not saved:
        raise FileNotFoundError(
            f"{out}: the run there has saved nothing yet; begin it again without --resume"
        )
    if not resume and out.exists():
        if begun and saved:
            raise ValueError(
                f"{out} holds a run; --resume goes on with it, another --out begins one"
            )
        if not begun and any(out.iterdir()):
            raise ValueError(f"{out} is not empty and holds no run; give a new folder")


def _split(recipe: Recipe, records: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    if isinstance(recipe.held_out, str | os.PathLike):
        return records, data.read_records(recipe.held_out)
    assert recipe.held_out is not None
    if not recipe.held_out:
        return records, []
    # Runs of other seeds are measured by the same records
    try:
        return data.hold_out(records, fraction=recipe.held_out)
    except ValueError as error:
        raise ValueError(f"{error} (--held-out FILE|PART; 0: none)") from None


def _stop_id(recipe: Recipe, folder: Path, config: dict[str, Any]) -> int:
    """What ends texts where the tokenizer names no token for it: the first id that `generate` stops
    at.
    """
    stop_ids = read_generation(folder, config).stop_ids
    if not stop_ids:
        raise ValueError(
            f"finetune: neither the tokenizer nor the config of {recipe.model} names an EOS token "
            "to end texts with; give eos_token_id in its generation_config.json"
        )
    return stop_ids[0]


def _build(recipe: Recipe) -> Transformer:
    """The model with what is trained in the policy's dtype, and what is not in that of compute."""
    assert recipe.precision is not None
    policy = precision.policy(recipe.precision)
    dtype = policy.param_dtype if recipe.method == "full" else policy.compute_dtype
    runtime = Runtime(dtype=policy.compute_dtype, param_dtype=dtype, remat=recipe.remat)
    # The device need not have room for what is packed as it was
    with on_host() if recipe.method == "qlora" else contextlib.nullcontext():
        model, _ = hf.load(recipe.model, dtype, runtime)
    if recipe.method == "qlora":
        quantize(model, "int4", qlora_group_size(model.config), from_host=True)
    elif policy.fp8:
        fp8.use_fp8(model)
    if recipe.method != "full":
        _add_adapters(model, recipe)
    return model


def _add_adapters(model: Transformer, recipe: Recipe) -> None:
    lora.add_adapters(
        model,
        rank=recipe.rank,
        alpha=recipe.alpha,
        targets=recipe.targets,
        kind=recipe.kind,
        rngs=nnx.Rngs(recipe.seed),
    )


def _trained(model: Transformer) -> str:
    """What a run changes, so that a slip in `targets` is seen."""
    total, adapters = train.count_parameters(model), lora.adapters(model)
    if not adapters:
        return f"all {total:,} parameters"
    linears = [name.split(".")[-2] for name in adapters if name.endswith(".lora_a")]
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(linears).items())
    count = sum(x.size for x in adapters.values())
    beside = f"{len(linears)} linear{'s' * (len(linears) > 1)} ({kinds})"
    return f"{count:,} of {total:,} parameters, beside {beside}"


def _optimizer(recipe: Recipe, steps: int) -> tuple[optax.Schedule, optax.GradientTransformation]:
    rate, warm = recipe.learning_rate, recipe.warmup_steps
    assert rate is not None
    assert warm is not None
    schedule = optimizers.learning_rates(rate, steps, warmup_steps=warm, schedule=recipe.schedule)
    decay = recipe.weight_decay
    mask = optimizers.matrices if decay else None  # without one checkpoints are as they were
    adam = optimizers.BY_NAME[recipe.optimizer](schedule, weight_decay=decay, mask=mask)
    return schedule, optax.chain(optax.clip_by_global_norm(1.0), adam)


def prompt_tokens(example: data.Example) -> list[int]:
    """The tokens before the answer; of a text that is all answer, the first ones."""
    first = int(np.argmax(example.targets != data.IGNORE))
    return example.tokens[: first + 1 if first else 8].tolist()


def _sample(model: Transformer, tokenizer: Tokenizer, prompt: list[int]) -> str:
    prompt = prompt[: model.config.max_position_embeddings - 1]  # a new token needs one
    result = generate(model, tokenizer, [prompt], max_new_tokens=SAMPLE)
    assert result.texts is not None
    return result.texts[0]


def _check_packages(log: str | None) -> None:
    if log is not None and log not in LOGS:
        raise ValueError(f"finetune: log {log!r} is not one of {', '.join(LOGS)}")
    missing = [name for name in ("grain", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"finetune: {' and '.join(missing)} not installed: pip install {' '.join(missing)}"
        )
    if log is not None and importlib.util.find_spec(LOGS[log]) is None:
        raise ValueError(f"finetune: {log} is not installed: pip install {LOGS[log]}")


def _writers(log: str | None, out: Path, settings: dict[str, Any]) -> list[metrics.Writer]:
    if log is None:
        return []
    if log == "tensorboard":
        return [metrics.tensorboard(out / "tensorboard")]
    return [metrics.wandb(out, settings)]
