"""Preference pairs to an adapter that makes a checkpoint answer as the chosen ones do.

    python examples/dpo.py examples/data/courtesy-pairs.jsonl --output checkpoints/courtesy

Adapters are trained, and the frozen base below them is the reference. To train all weights, leave
the adapters out and give the loader `reference=dpo.cache_reference(model, pairs, ...)`. Ctrl-C
saves; --resume goes on.
"""

import argparse
import sys
from pathlib import Path

import optax
from flax import nnx

import jaxllm
from jaxllm import data, dpo, lora, train
from jaxllm.checkpoint.folder import check_writable
from jaxllm.finetune import prompt_tokens
from jaxllm.optimizers import learning_rates
from jaxllm.trainer import StoppedError, Trainer


def main(args: argparse.Namespace) -> None:
    """The recipe."""
    check_writable(args.output)
    runtime = jaxllm.Runtime(dtype=args.dtype, param_dtype="float32")
    model, tokenizer = jaxllm.load(args.model, dtype="float32", runtime=runtime)
    if tokenizer is None:
        sys.exit(f"dpo: {args.model} has no tokenizer.json")
    lora.add_adapters(model, rank=args.rank, rngs=nnx.Rngs(args.seed))

    # Records of prompt, chosen and rejected -> pairs; the loss is on the answers only.
    records = data.read_records(args.data)
    training, held_out = data.hold_out(records, fraction=0.2)
    options = {"length": args.length, "vocab_size": model.config.vocab_size}
    pairs = data.encode_preferences(training, tokenizer, **options)
    measured = data.encode_preferences(held_out, tokenizer, **options)
    print(f"training: {pairs}\nheld out: {measured}")
    shape = {"pairs": args.pairs, "length": args.length}
    loader = data.PreferenceLoader(pairs.examples, **shape, seed=args.seed)
    with data.PreferenceLoader(measured.examples, **shape, seed=0, epochs=1) as all_once:
        evaluation = list(all_once)

    schedule = learning_rates(args.learning_rate, args.steps, warmup_steps=args.steps // 10)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.0))

    prompt = prompt_tokens(measured.examples[0].chosen)

    def sample(model: jaxllm.Transformer) -> str:
        result = jaxllm.generate(model, tokenizer, [prompt], max_new_tokens=40, stop="\n")
        return (result.texts or [""])[0]

    trainer = Trainer(
        model,
        optimizer,
        loader,
        f"{args.output}-training",
        steps=args.steps,
        loss=dpo.make_loss(beta=args.beta, kind=args.loss),
        trainable=lora.is_adapter,
        held_out=evaluation,
        sample=sample,
        schedule=schedule,
        settings={k: getattr(args, k) for k in "learning_rate beta loss rank dtype".split()},
    )
    try:
        with loader:
            fitted = trainer.fit(resume=args.resume)
    except StoppedError as stopped:
        sys.exit(f"dpo: {stopped}; --resume goes on from the newest checkpoint")
    if fitted.loss is None or fitted.base_loss is None:
        sys.exit("dpo: the held-out loss is not a finite number; try a lower --learning-rate")

    # The model now holds the adapters with the lowest held-out loss.
    lora.save_peft(model, args.output, base_model_name=str(args.model))
    params = train.parameters(model)
    measures = {
        "accuracy": dpo.make_accuracy(kind=args.loss),
        "margin": dpo.make_margin(beta=args.beta, kind=args.loss),
    }
    for name, measure in measures.items():
        total, count = train.make_evaluate(model, measure)(params, evaluation)
        print(f"{name} over {count} held-out pairs: {total / count:.3f}")
    print(f"{args.output}: step {fitted.step}, held-out loss {fitted.base_loss:.4f} before and")
    print(f"{fitted.loss:.4f} after\n\n{tokenizer.decode(prompt)}")
    print(f"before: {fitted.before}\nafter: {fitted.after}")


def parse() -> argparse.Namespace:
    """The options; the learning rate suits a small model."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("data", type=Path, help="JSONL or a JSON array of records: prompt, chosen, rejected")
    add("--model", default=jaxllm.shipped_checkpoint(), help="a Hugging Face folder or hub id")
    add("--output", type=Path, default=Path("checkpoints/preferred"), help="the folder to write")
    add("--resume", action="store_true", help="go on from the run's last checkpoint")
    add("--loss", choices=dpo.KINDS, default="sigmoid", help="DPO's own, or IPO's")
    add("--beta", type=float, default=0.1, help="how near to the base the model is held")
    add("--rank", type=int, default=16, help="of the adapters")
    add("--steps", type=int, default=30, help="optimiser steps")
    add("--pairs", type=int, default=8, help="pairs a step")
    add("--length", type=int, default=64, help="tokens a row; an answer and its prompt take one")
    add("--learning-rate", type=float, default=1e-3, help="at the end of the warm-up")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="to compute in")
    add("--seed", type=int, default=0, help="of the adapters and the order of the data")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(parse())
    except (OSError, ValueError) as error:
        sys.exit(f"dpo: {error}")
