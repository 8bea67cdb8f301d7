"""`python -m benchmarks.loading`: what a step costs more when its batches come from the loader.

Time in turns: some steps on batches that a loader packs and places while the step before runs, some
on one batch that lies on the device already. The median of each, and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
import optax
from flax import nnx

import jaxllm
from jaxllm import data, train
from jaxllm.config import DTYPES


def main(args: argparse.Namespace) -> None:
    """Print two times and their ratio."""
    config = jaxllm.ModelConfig(
        model_type="llama",
        vocab_size=args.vocab_size,
        hidden_size=args.width,
        intermediate_size=args.width * 8 // 3 // 128 * 128,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        num_key_value_heads=args.width // 64,
        head_dim=64,
        max_position_embeddings=args.length,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        rope=jaxllm.Rope(rope_theta=10_000.0),
        tie_word_embeddings=True,
    )
    runtime = jaxllm.Runtime(dtype=args.dtype, param_dtype="float32")
    model = jaxllm.Transformer(config, runtime, rngs=nnx.Rngs(0))
    optimizer = optax.adamw(1e-4)
    step = train.make_train_step(model, optimizer)
    state = train.init_state(model, optimizer)

    rng = np.random.default_rng(0)
    sizes = np.minimum(rng.geometric(4 / args.length, 20_000), args.length)
    ids = [rng.integers(0, args.vocab_size, n + 1).astype(np.int32) for n in sizes]
    examples = [data.Example(x[:-1], x[1:]) for x in ids]
    loader = data.Loader(examples, rows=args.rows, length=args.length, seed=0)
    placed = map(jax.device_put, loader)  # as a Trainer does: while the step before still runs
    batch = next(placed)
    sources: dict[str, Iterator] = {"loader": placed, "device": iter(lambda: batch, None)}
    times: dict[str, list[float]] = {name: [] for name in sources}
    state, metrics = step(state, batch)
    jax.block_until_ready(metrics)
    for _ in range(args.turns):
        for name, source in sources.items():
            start = time.perf_counter()
            for _ in range(args.steps):
                state, metrics = step(state, next(source))
            jax.block_until_ready((state, metrics))
            times[name].append((time.perf_counter() - start) / args.steps)
    loader.close()
    ms = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    print(
        f"{jax.devices()[0].device_kind}, {args.dtype}, {args.rows} x {args.length} tokens: "
        f"{ms['loader']:.2f} ms a step with the loader, {ms['device']:.2f} ms with data on the "
        f"device, ratio {ms['loader'] / ms['device']:.3f} (5 % are allowed)"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; by default a step of some 100 ms on a large GPU."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--rows", type=int, default=16, help="rows a batch")
    add("--length", type=int, default=2048, help="tokens a row, at least 4")
    add("--width", type=int, default=1024, help="model width, a multiple of 128")
    add("--layers", type=int, default=12, help="decoder blocks")
    add("--vocab-size", type=int, default=32_000, help="tokens of the vocabulary")
    add("--dtype", choices=DTYPES, default="bfloat16", help="to compute in")
    add("--steps", type=int, default=10, help="steps a turn")
    add("--turns", type=int, default=7, help="turns of each source")
    args = parser.parse_args(arguments)
    if args.width < 128 or args.width % 128:
        parser.error(f"--width must be a multiple of 128, got {args.width}")
    least = {"rows": 1, "length": 4, "layers": 1, "vocab_size": 1, "steps": 1, "turns": 1}
    for name, fewest in least.items():
        if (count := getattr(args, name)) < fewest:
            option = name.replace("_", "-")
            parser.error(f"--{option} must be at least {fewest}, got {count}")
    return args


if __name__ == "__main__":
    main(parse())
