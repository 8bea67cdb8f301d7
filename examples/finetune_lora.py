"""As finetune.py, but adapters are trained and a PEFT folder is written; only that is here.

    python examples/finetune_lora.py examples/data/clerk.jsonl --output checkpoints/clerk-lora

An adapter wants a rate about ten times that of all weights.
"""

import argparse
import sys

from finetune import main, parse
from flax import nnx

import jaxllm
from jaxllm import lora


def adapt(model: jaxllm.Transformer) -> None:
    """Adapters of rank 16 beside every Linear of the blocks."""
    lora.add_adapters(model, rank=16, rngs=nnx.Rngs(0))


def write(model: jaxllm.Transformer, tokenizer: jaxllm.Tokenizer, args: argparse.Namespace) -> None:
    """The adapters; `lora.merge(model)` and `jaxllm.save` would write the whole model."""
    lora.save_peft(model, args.output, base_model_name=str(args.model))


if __name__ == "__main__":
    try:
        main(parse(rate=4e-3), adapt, lora.is_adapter, write)
    except (OSError, ValueError) as error:
        sys.exit(f"finetune_lora: {error}")
