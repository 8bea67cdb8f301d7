"""The commands `jaxllm finetune`, `jaxllm export` and `jaxllm plan`; `cli.py` registers them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm import cli_quantize
from jaxllm.checkpoint.folder import (
    find_folder,
    read_config,
    read_json,
    read_quantization,
    stated_dtype,
)
from jaxllm.config import REMAT, ModelConfig
from jaxllm.console import Lines
from jaxllm.families import from_hf
from jaxllm.lora import KINDS, RANK
from jaxllm.optimizers import BY_NAME, SCHEDULES
from jaxllm.precision import POLICIES
from jaxllm.records import ON_LONG

# Options of finetune that are fields of its recipe, None where they are not given
SAME_NAMES = (
    "targets kind alpha learning_rate schedule warmup_steps weight_decay epochs steps "
    "micro_batches precision remat optimizer eval_every save_every seed on_long"
).split()


def add_commands(commands: Any) -> None:
    """Puts the three commands beside the others."""
    _add_finetune(commands)
    export = commands.add_parser("export", help="what a run has learnt, for transformers or PEFT")
    export.add_argument("run_folder", metavar="RUN_DIR", help="the --out of jaxllm finetune")
    export.add_argument("--out", required=True, metavar="FOLDER", help="a new folder")
    export.add_argument(
        "--adapter", action="store_true", help="a PEFT folder, and not the merged model"
    )
    export.set_defaults(run=_export)
    _add_plan(commands)


def _add_method(parser: argparse.ArgumentParser) -> None:
    method = parser.add_argument_group(f"what is trained (default: adapters of rank {RANK})")
    method.add_argument(
        "--lora", type=int, metavar="RANK", help=f"adapters of this rank (default {RANK})"
    )
    method.add_argument(
        "--qlora", choices=("int4",), metavar="int4", help="adapters beside packed base weights"
    )
    method.add_argument("--full", action="store_true", help="all weights")


def _method(args: argparse.Namespace) -> str | None:
    """None if nothing was said."""
    if args.full and (args.lora is not None or args.qlora is not None):
        raise ValueError("--full trains all weights; give it without --lora and --qlora")
    if args.full or args.qlora:
        return "full" if args.full else "qlora"
    return None if args.lora is None else "lora"


def _add_memory(parser: argparse.ArgumentParser, *, precision: str, remat: str) -> None:
    """`precision`, `remat`: what they are where they are not given."""
    group = parser.add_argument_group("memory")
    group.add_argument("--precision", choices=tuple(POLICIES), help=f"default: {precision}")
    group.add_argument(
        "--remat",
        choices=("auto", *REMAT) if remat == "auto" else REMAT,
        help=f"what the backward pass computes again (default {remat})",
    )
    group.add_argument("--optimizer", choices=tuple(BY_NAME), help="adamw_8bit: 8-bit moments")


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan", help="what a training step needs of a GPU's memory, with or without that GPU"
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a Hugging Face folder, hub id, or config.json")
    add("--batch", type=int, default=8, metavar="B", help="rows a step (default 8)")
    add(
        "--seq",
        type=int,
        metavar="T",
        help="tokens a row (default 1024, or the positions of a model with fewer)",
    )
    add("--micro-batches", type=int, default=1, metavar="N", help="parts of a batch (default 1)")
    text = "h200, h100, a100, rtx4090, or a size such as 24GB (default h200)"
    add("--card", default="h200", metavar="NAME|SIZE", help=text)
    _add_method(parser)
    _add_memory(parser, precision="bf16", remat="auto")
    cli_quantize.add_options(parser)
    parser.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> int:
    from jaxllm.plan import plan

    method = _method(args)
    cli_quantize.check(args)
    config, checkpoint = _config(args.model)
    with Lines(stderr=True).status("compiling the step"):
        found = plan(
            config,
            batch=args.batch,
            seq=min(1024, config.max_position_embeddings) if args.seq is None else args.seq,
            lora=None if method == "full" else RANK if args.lora is None else args.lora,
            qlora=method == "qlora",
            quantize=cli_quantize.arguments(args),
            checkpoint=checkpoint,
            policy=args.precision or "bf16",
            remat=args.remat or "auto",
            optimizer=args.optimizer or "adamw",
            micro_batches=args.micro_batches,
            card=args.card,
        )
    print(found)
    return 0


def _config(model: str) -> tuple[ModelConfig, Path | None]:
    """The config, and the folder if there is one with packed weights."""
    file = Path(model)
    if file.is_file():
        hf = read_json(file)
        said = hf.get("quantization_config")
        if said and isinstance(said, Mapping) and said.get("quantization_mode") != "online":
            raise ValueError(
                f"{model}: the weights are packed, and how large they are stands in the files "
                "beside it; give the folder"
            )
        return from_hf(hf, owner=model), None
    folder = find_folder(model)
    config, hf = read_config(folder)
    return config, None if read_quantization(folder, config, hf) is None else folder


def _add_finetune(commands: Any) -> None:
    parser = commands.add_parser("finetune", help="train a checkpoint on a file of records")
    add = parser.add_argument
    add("model", metavar="MODEL", help="a Hugging Face folder or hub id")
    add(
        "--data",
        required=True,
        metavar="FILE",
        help="JSONL or a JSON array: text, or prompt and completion, or messages of a chat",
    )
    add("--out", required=True, metavar="DIR", help="a new folder for all that the run makes")
    add("--resume", action="store_true", help="go on from the newest checkpoint of --out")
    _add_method(parser)
    add = parser.add_argument_group().add_argument
    add(
        "--targets",
        metavar="PATTERN",
        help="which linears get adapters: a regular expression, such as 'q_proj|v_proj'",
    )
    add("--adapter-kind", dest="kind", choices=KINDS, help="default lora")
    add("--alpha", type=float, metavar="X", help="of adapters (default: twice their rank)")
    group = parser.add_argument_group("data")
    add = group.add_argument
    add(
        "--held-out",
        metavar="FILE|PART",
        help="records only measured: a file, or a part of --data such as 0.05, or 0: none "
        "(default: a tenth, 256 records at most)",
    )
    key = "a field's name, several with commas, or a format such as '{question}\\nAnswer: '"
    add("--prompt-key", metavar="KEY", help=key)
    add("--completion-key", metavar="KEY", help="likewise")
    add(
        "--seq",
        type=int,
        metavar="T",
        help="tokens a row (default: the power of two that holds the longest record, 1024 at most; "
        "what is longer goes by --on-long)",
    )
    add(
        "--on-long",
        choices=ON_LONG,
        help="what is done with a record longer than a row (default truncate)",
    )
    add("--batch", type=int, metavar="B", help="rows a step (default 8)")
    group = parser.add_argument_group("steps")
    add = group.add_argument
    add(
        "--epochs",
        type=int,
        metavar="N",
        help="times through the data (default: 3, and 100 steps at least)",
    )
    add("--steps", type=int, metavar="N", help="or how many batches")
    add(
        "--learning-rate",
        type=float,
        metavar="R",
        help="at the end of the warm-up (default: by method and width)",
    )
    text = "to a tenth by a cosine (default), linearly to 0, or constant"
    add("--schedule", choices=SCHEDULES, help=text)
    text = "steps until the learning rate is whole (default: a twentieth of all)"
    add("--warmup-steps", type=int, metavar="N", help=text)
    text = "of matrices, not of norms and biases (default 0)"
    add("--weight-decay", type=float, metavar="X", help=text)
    text = "compute a batch in so many parts (default: 1 on a GPU, one a row on a CPU)"
    add("--micro-batches", type=int, metavar="N", help=text)
    add("--eval-every", type=int, metavar="N", help="steps (default: ten times in all)")
    add("--save-every", type=int, metavar="N", help="steps (default: with each evaluation)")
    add("--seed", type=int, metavar="N", help="of adapters and of the order of the data")
    _add_memory(parser, precision="bf16 on a GPU, fp32 on a CPU", remat="none")
    group = parser.add_argument_group("seeing")
    group.add_argument("--log", choices=("tensorboard", "wandb"), help="beside JSONL and CSV")
    group.add_argument(
        "--profile",
        type=int,
        default=0,
        metavar="STEPS",
        help="trace so many steps and print the ten longest kernels",
    )
    parser.add_argument(
        "--no-compile-cache",
        dest="compile_cache",
        action="store_false",
        help="do not keep compiled programs in ~/.cache/jaxllm (or $XDG_CACHE_HOME/jaxllm)",
    )
    parser.set_defaults(run=_finetune)


def _finetune(args: argparse.Namespace) -> int:
    # Slow to import (Orbax, grain), and of no use to the other commands
    from jaxllm.finetune import finetune
    from jaxllm.recipe import Recipe, read_recipe
    from jaxllm.trainer import StoppedError

    given = {
        "held_out": _held_out(args.held_out),
        "prompt_key": _key(args.prompt_key),
        "completion_key": _key(args.completion_key),
        "method": _method(args),
        "rank": args.lora,
        "rows": args.batch,
        "length": args.seq,
        **{name: getattr(args, name) for name in SAME_NAMES},
    }
    given = {name: value for name, value in given.items() if value is not None}
    recipe = Recipe(model=args.model, data=args.data, **given)
    options = {"resume": args.resume, "profile": args.profile, "log": args.log}
    try:
        fitted = finetune(recipe, args.out, given=given.keys() | {"model", "data"}, **options)
    except StoppedError as stopped:
        goes_on = "; the same command with --resume goes on" if stopped.step is not None else ""
        _say(f"jaxllm: {stopped}{goes_on}")
        return 130
    ran = read_recipe(args.out)  # for a resumed run need not be told again
    kind = "model" if ran.method == "full" else "adapter"
    print(_of_losses(fitted.base_loss, fitted.loss, fitted.step))
    print(f"\nbefore: {fitted.before}\n\nafter: {fitted.after}\n")
    print(f"{args.out}/{kind}, loss.png, metrics.csv")
    if fitted.unsaved is not None:
        _say(f"jaxllm: {fitted.unsaved}")
        return 2
    if kind == "adapter":
        print(f"jaxllm generate {ran.model} --adapter {args.out}/adapter takes it along")
        print(f"jaxllm export {args.out} --out FOLDER merges it into the model")
    return 0


def _say(sentence: str) -> None:
    Lines(stderr=True).print(sentence, soft_wrap=True)


def _of_losses(before: float | None, after: float | None, step: int) -> str:
    """What has become of the held-out loss; before: None where the rows of a run are gone, after:
    where nothing is held out.
    """
    if after is None:
        return f"nothing was held out: what is written is the last step ({step})"
    if before is None:
        return f"held-out loss: {after:.4f} after (step {step}); the one before is lost"
    found = f"held-out loss: {before:.4f} before, {after:.4f} after (step {step})"
    if not before:
        return found
    change = round(100 * (after / before - 1), 1)
    if change <= 0:
        return f"{found}: {abs(change):.1f} % less"
    return (
        f"{found}: {change:.1f} % more\nThe model was better at these records before training; "
        "what is written is the best of the steps that were evaluated. A lower --learning-rate, or "
        "more records, may help."
    )


def _held_out(text: str | None) -> str | float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _key(text: str | None) -> str | list[str] | None:
    r"""A format, where \n is a line break and \t a tab; names between commas; or a name."""
    if text is None:
        return None
    if "{" in text:
        return text.replace("\\n", "\n").replace("\\t", "\t")
    return text.split(",") if "," in text else text


def _export(args: argparse.Namespace) -> int:
    from jaxllm.finetune import export
    from jaxllm.recipe import read_recipe

    out = Path(args.out).expanduser()
    step = export(args.run_folder, out, adapter=args.adapter)
    base = read_recipe(args.run_folder).model
    what = f"the adapter of step {step}, for {base}"
    if not args.adapter:
        what = f"the model of step {step}, in {stated_dtype(read_config(out)[1])}"
    print(f"{out}: {what}")
    return 0
