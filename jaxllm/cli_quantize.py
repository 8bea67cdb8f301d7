"""`--quantize` of the `jaxllm` command: its options, and what `inspect` says of them."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.filesize import decimal

from jaxllm.config import ModelConfig, Runtime
from jaxllm.model import Transformer
from jaxllm.quantize import quantize
from pallas_kernels.packed import SCHEMES, Packed
from pallas_kernels.quantize import quantize as pack


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


def apply(args: argparse.Namespace, model: nnx.Module, *, from_host: bool = False) -> None:
    """Packs the model as the options say."""
    head, keep = args.quantize_head, args.keep or ()
    quantize(model, args.quantize, args.group_size, head=head, keep=keep, from_host=from_host)


def facts(args: argparse.Namespace, config: ModelConfig, dtype: str) -> dict[str, str]:
    """Rows of the table of `inspect`: the weights in memory, as the options have them.

    Raises: ValueError if the model cannot be packed so.
    """

    def build() -> Transformer:
        model = Transformer(config, Runtime(dtype), rngs=nnx.Rngs(0))
        if args.quantize is not None:
            apply(args, model)
        return model

    arrays = jax.tree.leaves(nnx.state(nnx.eval_shape(build), nnx.Param))
    size = decimal(sum(x.size * x.dtype.itemsize for x in arrays))
    if args.quantize is None:
        return {f"weights as {dtype}": size}
    return {f"weights as {args.quantize}, head {args.quantize_head or dtype}": size}


def weight(args: argparse.Namespace, shape: tuple[int, int], dtype: str) -> Any:
    """The shapes of a projection's weight."""
    plain = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    if args.quantize is None:
        return plain
    how = functools.partial(pack, scheme=args.quantize, group_size=args.group_size)
    packed: Packed = jax.eval_shape(how, plain)
    return packed
