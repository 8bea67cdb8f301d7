"""A checkpoint and a JSONL file of prompts and completions to a fine-tuned Hugging Face folder.

    python examples/finetune.py examples/data/clerk.jsonl --output checkpoints/clerk

All weights are trained; `finetune_lora.py` trains adapters. Ctrl-C saves; --resume goes on.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import optax

import jaxllm
from jaxllm import data, train
from jaxllm.checkpoint.folder import check_writable
from jaxllm.finetune import prompt_tokens
from jaxllm.optimizers import learning_rates
from jaxllm.trainer import StoppedError, Trainer


def write(model: jaxllm.Transformer, tokenizer: jaxllm.Tokenizer, args: argparse.Namespace) -> None:
    """What training made, as a Hugging Face folder in bfloat16."""
    train.update(model, {k: v.astype("bfloat16") for k, v in train.parameters(model).items()})
    jaxllm.save(model, tokenizer, args.output)


def main(
    args: argparse.Namespace,
    adapt: Callable[[jaxllm.Transformer], object] = lambda model: None,
    trainable: Callable[[str], bool] | None = None,
    write: Callable[..., None] = write,
) -> None:
    """The recipe; `finetune_lora.py` says otherwise what the model is, what is trained of it, and
    what is written.
    """
    check_writable(args.output)
    runtime = jaxllm.Runtime(dtype=args.dtype, param_dtype="float32", remat=args.remat)
    model, tokenizer = jaxllm.load(args.model, dtype="float32", runtime=runtime)
    if tokenizer is None:
        sys.exit(f"finetune: {args.model} has no tokenizer.json")
    adapt(model)

    # Records -> examples. Loss is on completions only; what is longer than a row is cut.
    records = data.read_records(args.data)
    training, held_out = data.hold_out(records, fraction=0.1)
    options = {"length": args.length, "vocab_size": model.config.vocab_size}
    encoded = data.encode_records(training, tokenizer, **options)
    measured = data.encode_records(held_out, tokenizer, **options)
    print(f"training: {encoded}\nheld out: {measured}")
    shape = {"rows": args.rows, "length": args.length}
    loader = data.Loader(encoded.examples, **shape, seed=args.seed)
    evaluation = data.batches(measured.examples, **shape)

    schedule = learning_rates(args.learning_rate, args.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.0))

    prompt = prompt_tokens(measured.examples[0])

    def sample(model: jaxllm.Transformer) -> str:
        return (jaxllm.generate(model, tokenizer, [prompt], max_new_tokens=40).texts or [""])[0]

    trainer = Trainer(
        model,
        optimizer,
        loader,
        f"{args.output}-training",
        steps=args.steps,
        trainable=trainable,
        micro_batches=args.micro_batches,
        held_out=evaluation,
        sample=sample,
        schedule=schedule,
        settings={"learning_rate": args.learning_rate, "dtype": args.dtype},
    )
    try:
        with loader:
            fitted = trainer.fit(resume=args.resume)
    except StoppedError as stopped:
        sys.exit(f"finetune: {stopped}; --resume goes on from the newest checkpoint")
    if fitted.loss is None or fitted.base_loss is None:
        sys.exit("finetune: the held-out loss is not a finite number; try a lower --learning-rate")

    # The model now holds the parameters with the lowest held-out loss.
    write(model, tokenizer, args)
    print(f"{args.output}: step {fitted.step}, held-out loss {fitted.base_loss:.4f} before and")
    print(f"{fitted.loss:.4f} after\n\n{tokenizer.decode(prompt)}")
    print(f"before: {fitted.before}\nafter: {fitted.after}")


def parse(rate: float = 4e-4) -> argparse.Namespace:
    """The options; the learning rate suits a small model: about 0.08 over its width."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("data", type=Path, help="JSONL or a JSON array of records with prompt and completion")
    add("--model", default=jaxllm.shipped_checkpoint(), help="a Hugging Face folder or hub id")
    add("--output", type=Path, default=Path("checkpoints/tuned"), help="the folder to write")
    add("--resume", action="store_true", help="go on from the run's last checkpoint")
    add("--steps", type=int, default=100, help="optimiser steps")
    add("--rows", type=int, default=8, help="rows a step")
    add("--length", type=int, default=128, help="tokens a row; short examples share one")
    add("--micro-batches", type=int, default=1, help="parts that a batch is computed in")
    add("--learning-rate", type=float, default=rate, help="at the end of the warm-up")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="to compute in")
    add("--remat", default="none", help="what the backward pass computes again")
    add("--seed", type=int, default=0, help="of the order of the data")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(parse())
    except (OSError, ValueError) as error:
        sys.exit(f"finetune: {error}")
