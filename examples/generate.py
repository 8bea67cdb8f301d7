"""Load a checkpoint and continue a prompt, with the text as it comes.

    python examples/generate.py path/to/folder "Once upon a time" --temperature 0.8

The folder is one of Hugging Face's (Llama, Qwen, Mistral, Phi, Gemma); without one, the small model
that ships with jaxllm writes. `jaxllm generate` is the same with more options.
"""

import argparse
import sys

import jax

import jaxllm


def main(args: argparse.Namespace) -> None:
    """The recipe."""
    folder = jaxllm.shipped_checkpoint() if args.folder is None else args.folder
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    model, tokenizer = jaxllm.load(folder, dtype=dtype)
    jaxllm.fuse(model)  # for the fastest kernels of a Hopper GPU; the command does it too

    pieces = jaxllm.stream(
        model,
        tokenizer,
        args.prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
    )
    pieces.compile()  # so that the speed below is that of the model alone
    print(args.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)

    timings = pieces.result.timings
    print(f"\n\nprefill {timings.prefill_tokens_per_s:,.0f} tokens/s", end=", ")
    print(f"decode {timings.decode_tokens_per_s:,.0f} tokens/s")


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="Continue a prompt.")
    parser.add_argument("folder", nargs="?", help="a Hugging Face folder or hub id")
    parser.add_argument("prompt", nargs="?", default="ROMEO:\n")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(parse())
    except (OSError, ValueError, MemoryError) as error:
        sys.exit(f"examples/generate.py: {error}")
