"""A text file to a small model from scratch: tokenizer, training, a Hugging Face folder.

    python examples/pretrain.py input.txt --output checkpoints/mine

It made the model in checkpoints/tiny-shakespeare. Ctrl-C saves; --resume goes on from there.
"""

import argparse
import hashlib
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from matplotlib.figure import Figure
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import jaxllm
from jaxllm import train
from jaxllm.checkpoint.folder import check_writable
from jaxllm.checkpoint.native import Checkpoints
from jaxllm.families import to_hf

END = "<|endoftext|>"
COUNTS = (
    *("vocab_size", "context", "width", "mlp_width", "layers", "heads", "kv_heads"),
    *("steps", "batch_tokens", "eval_every"),
)
FREE = ("text", "output", "prompt", "resume")  # what a resumed run may say differently
# A chat is a play: a message is a speech under its speaker's name.
CHAT = (
    "{% for message in messages %}{{ message['role'] | capitalize }}:\n"
    "{{ message['content'] | trim }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)


def main(args: argparse.Namespace) -> None:
    """The recipe."""
    check_options(args)
    check_writable(args.output)
    text = read(args.text)
    cut = len(text) * 9 // 10  # the last tenth is held out, from the tokenizer too
    tokenizer = learn_tokens(text[:cut], args.vocab_size)
    [end] = tokenizer.encode(END)
    tokens = jnp.asarray([end, *tokenizer.encode(text[:cut]), end])
    held_out = [end, *tokenizer.encode(text[cut:])]
    if len(tokens) <= args.context + 1:
        sys.exit(
            f"pretrain: {args.text} is too short: {len(tokens)} tokens to train on do not fill a "
            f"window of {args.context}; give a longer text or a smaller --context"
        )
    if args.batch_tokens < args.context:
        sys.exit(f"pretrain: --batch-tokens is less than one window, --context {args.context}")
    # Of a line that is a paragraph so much as leaves room in a window
    prompt = args.prompt or text.lstrip().split("\n")[0][:40] + "\n"
    if (taken := len(tokenizer.encode(prompt))) >= args.context:
        sys.exit(
            f"pretrain: the prompt has {taken} tokens, and a window of {args.context} has no room "
            "for another; give a shorter --prompt"
        )

    config = jaxllm.ModelConfig(
        model_type="llama",
        vocab_size=tokenizer.vocab_size,
        hidden_size=args.width,
        intermediate_size=args.mlp_width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.width // args.heads,
        max_position_embeddings=args.context,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        rope=jaxllm.Rope(rope_theta=10_000.0),
        tie_word_embeddings=True,
    )
    to_hf(config)  # what no config.json can say is refused now, and not when it is saved
    runtime = jaxllm.Runtime(dtype=args.dtype, param_dtype="float32")
    model = jaxllm.Transformer(config, runtime, rngs=nnx.Rngs(args.seed))
    rate = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, args.steps // 20, args.steps, args.learning_rate / 50
    )
    matrices = {name: x.ndim > 1 for name, x in train.parameters(model).items()}  # not norms
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b2=0.99, weight_decay=args.weight_decay, mask=matrices),
    )
    state = train.init_state(model, optimizer)
    # Whole windows every fourth step, half ones else: attention's cost grows with the square.
    lengths = (args.context // 2, args.context)
    rows = {length: args.batch_tokens // length for length in lengths}
    # On a CPU a row at a time is fastest, its scores stay in the cache: 4.1 against 2.5 k tokens/s.
    parts = {n: rows[n] if jax.default_backend() == "cpu" else 1 for n in lengths}
    steps = {n: train.make_train_step(model, optimizer, micro_batches=parts[n]) for n in lengths}
    evaluate = train.make_evaluate(model)
    windows = train.cover_windows(held_out, rows=8, length=args.context, stride=args.context // 2)

    settings = {k: v for k, v in vars(args).items() if k not in FREE}
    settings["text"] = hashlib.sha256(text.encode()).hexdigest()
    key, curve = jax.random.key(args.seed), []
    with (
        Checkpoints(f"{args.output}-training") as checkpoints,
        train.catch_interrupt() as stop,
        Progress(disable=not sys.stdout.isatty()) as progress,
    ):
        if args.resume:
            saved = checkpoints.restore(state)
            state, key, curve = saved.state, saved.key, saved.position["curve"]
            if saved.position["settings"] != settings:
                sys.exit(
                    "pretrain: --resume takes the same text and options that the run began with"
                )
        elif checkpoints.latest_step is not None:
            sys.exit(
                f"pretrain: {checkpoints.folder} holds a run; --resume goes on with it, another "
                "--output begins a new one"
            )
        bar = progress.add_task("training", total=args.steps, completed=int(state.step))
        for i in range(int(state.step) + 1, args.steps + 1):
            length = lengths[i % 4 == 0]
            key, draw = jax.random.split(key)
            batch = train.draw_windows(tokens, draw, rows=rows[length], length=length)
            state, metrics = steps[length](state, batch)
            progress.update(bar, completed=i)
            loss = None
            if i % args.eval_every == 0 or i == args.steps:
                loss = evaluate(state.params, windows)[0] / (len(text) - cut)
                trained = float(metrics["loss"]) * len(tokens) / cut
                curve.append([i, trained, loss])
                progress.print(f"step {i}: {trained:.3f} trained, {loss:.4f} held out")
            if loss is not None or stop.is_set():
                position = {"settings": settings, "curve": curve}
                checkpoints.save(state, key=key, position=position, loss=loss)
            if stop.is_set():
                sys.exit(f"pretrain: saved at step {i}; the same command with --resume goes on")
        best = checkpoints.restore(state, step=checkpoints.best_step)
    if best.loss is None:
        sys.exit("pretrain: no held-out loss is a finite number; try a lower --learning-rate")

    train.update(model, {k: v.astype("bfloat16") for k, v in best.state.params.items()})
    model.generation = jaxllm.GenerationDefaults(
        (end,), pad_id=end, do_sample=True, temperature=0.8
    )
    jaxllm.save(model, tokenizer, args.output)
    draw_curve(curve, args.output / "loss.png")

    model, _ = jaxllm.load(args.output, dtype="float32")
    loss = evaluate(train.parameters(model), windows)[0] / (len(text) - cut)
    print(f"{args.output}: {loss:.4f} nats a character of the held-out tenth, as saved")
    sample = jaxllm.generate(model, tokenizer, prompt, max_new_tokens=200, temperature=0.8)
    print(prompt, *(sample.texts or ()), sep="")


def check_options(args: argparse.Namespace) -> None:
    """Leaves in one sentence if a number is none that it could be."""
    for name in COUNTS:
        if (value := getattr(args, name)) < 1:
            sys.exit(f"pretrain: --{name.replace('_', '-')} must be at least 1, got {value}")
    if not 0 < args.learning_rate < math.inf or not 0 <= args.weight_decay < math.inf:
        sys.exit(
            "pretrain: --learning-rate must be a number above 0, and --weight-decay one of at "
            f"least 0, got {args.learning_rate} and {args.weight_decay}"
        )
    if not 0 <= args.seed < 2**32:
        sys.exit(f"pretrain: --seed must be from 0 to 2**32 - 1, got {args.seed}")


def learn_tokens(text: str, vocab_size: int) -> jaxllm.Tokenizer:
    """A byte-level BPE tokenizer with an end token and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return jaxllm.Tokenizer.from_tokenizers(tokenizer, eos_token=END, chat_template=CHAT)


def draw_curve(curve: list[list[float]], file: Path) -> None:
    """The losses as a PNG."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps, trained, held_out = zip(*curve, strict=True)
    axes.plot(steps, trained, label="training batch")
    axes.plot(steps, held_out, label="held-out tenth")
    axes.set(xlabel="step", ylabel="nats a character")
    axes.legend()
    figure.savefig(file, dpi=120)


def read(file: Path) -> str:
    """The text, or one sentence that says why there is none."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        sys.exit(f"pretrain: {file} cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        sys.exit(f"pretrain: {file} is not a text file in UTF-8")
    if not text.strip():
        sys.exit(f"pretrain: {file} is empty; give a text to train on")
    return text


def parse() -> argparse.Namespace:
    """The options; their defaults made the shipped model."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("text", type=Path, help="a text file in UTF-8; its last tenth is held out")
    add("--output", type=Path, default=Path("checkpoints/mine"), help="the folder to write")
    add("--resume", action="store_true", help="go on from the run's last checkpoint")
    add("--prompt", help="how the sample at the end begins (None: with the text's first line)")
    add("--vocab-size", type=int, default=1024, help="how many tokens the tokenizer learns")
    add("--context", type=int, default=512, help="the longest text the model sees, in tokens")
    add("--width", type=int, default=192, help="model width")
    add("--mlp-width", type=int, default=512, help="MLP width")
    add("--layers", type=int, default=4, help="decoder blocks")
    add("--heads", type=int, default=3, help="query heads")
    add("--kv-heads", type=int, default=1, help="key/value heads")
    add("--steps", type=int, default=1500, help="optimiser steps")
    add("--batch-tokens", type=int, default=2048, help="tokens a step")
    add("--learning-rate", type=float, default=3e-3, help="at the end of the warm-up")
    add("--weight-decay", type=float, default=0.8, help="of matrices")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="to compute in")
    add("--eval-every", type=int, default=250, help="steps between evaluations")
    add("--seed", type=int, default=0, help="of the weights and of the order of the text")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(parse())
    except (OSError, ValueError) as error:
        sys.exit(f"pretrain: {error}")
