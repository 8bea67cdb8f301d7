"""`--quantize` of the `jaxllm` command: its options, and what `inspect` says of them."""

from __future__ import annotations

import argparse
import collections
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from rich.filesize import decimal

from jaxllm.checkpoint.folder import read_config
from jaxllm.checkpoint.hf import pack_as_stored
from jaxllm.config import Runtime
from jaxllm.layers import BitLinear
from jaxllm.model import Transformer
from jaxllm.quantize import packed_weights, quantize
from pallas_kernels.packed import SCHEMES


def add_options(parser: argparse.ArgumentParser) -> None:
    """To the parser of a command that has a model."""
    group = parser.add_argument_group("weights in fewer bits (norms and embedding stay)")
    group.add_argument("--quantize", choices=SCHEMES, metavar="SCHEME", help=", ".join(SCHEMES))
    group.add_argument(
        "--quantize-head",
        choices=SCHEMES,
        metavar="SCHEME",
        help="of the head, and of the embedding where they are one (default: it stays)",
    )
    group.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="numbers that share a scale (default: as the scheme has it; int4: 128, 64 or 32)",
    )
    group.add_argument(
        "--keep",
        action="append",
        metavar="NAME",
        help="a projection that stays: down_proj, or a pattern such as 'layers.0.*'",
    )


def check(args: argparse.Namespace) -> None:
    """Raises: ValueError for options that mean nothing without --quantize."""
    for option in ("quantize_head", "group_size", "keep"):
        if getattr(args, option) is not None and args.quantize is None:
            raise ValueError(f"--{option.replace('_', '-')} needs --quantize")


def arguments(args: argparse.Namespace) -> dict[str, Any] | None:
    """What the options say, as `jaxllm.quantize` takes it; None without --quantize."""
    if args.quantize is None:
        return None
    size, head, keep = args.group_size, args.quantize_head, args.keep or ()
    return {"scheme": args.quantize, "group_size": size, "head": head, "keep": keep}


def in_memory(args: argparse.Namespace, folder: Path, dtype: str) -> Transformer:
    """The model as `generate` would have it, of shapes alone: packed as it is stored, and as the
    options say.

    Raises: ValueError if it cannot be packed so, or its tensors contradict its config.
    """
    config, _ = read_config(folder)

    def build() -> Transformer:
        model = Transformer(config, Runtime(dtype), rngs=nnx.Rngs(0))
        pack_as_stored(model, folder)
        if (how := arguments(args)) is not None:
            quantize(model, **how)
        return model

    return nnx.eval_shape(build)


def facts(model: Transformer) -> dict[str, str]:
    """A row of the table of `inspect`: the bytes of the weights in memory, by dtype or scheme."""
    sizes: dict[str, int] = collections.Counter()
    for array in jax.tree.leaves(nnx.state(model, nnx.Param)):
        sizes[array.dtype.name] += array.size * array.dtype.itemsize
    total = decimal(sum(sizes.values()))
    for packed in packed_weights(model).values():
        for array in jax.tree.leaves(packed):
            sizes[array.dtype.name] -= array.size * array.dtype.itemsize
            sizes[packed.scheme] += array.size * array.dtype.itemsize
    parts = [f"{decimal(size)} of {name}" for name, size in sorted(sizes.items()) if size]
    return {"weights in memory": f"{total}: {', '.join(parts)}"}


def weight(model: Transformer) -> Any:
    """The shapes of a projection's weight, packed or not; of the head's where the projections are
    BitNet's in training, which run in one way alone.
    """
    head = model.embed_tokens if model.lm_head is None else model.lm_head
    module: Any = model.layers[-1].mlp.up_proj
    if isinstance(module, BitLinear):
        module = head
    return module.packed if hasattr(module, "packed") else module.weight.get_value()
