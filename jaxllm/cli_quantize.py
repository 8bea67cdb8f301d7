"""`--quantize` of the `jaxllm` command, its options and what they say; and `jaxllm quantize`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from flax import nnx

import jaxllm
from jaxllm.checkpoint.folder import check_new, find_folder, read_config
from jaxllm.checkpoint.hf import check_packed, pack_as_stored
from jaxllm.config import Runtime
from jaxllm.console import Lines
from jaxllm.families import FAMILIES
from jaxllm.model import Transformer
from jaxllm.quantize import on_host
from pallas_kernels.measure import size_bytes
from pallas_kernels.packed import SCHEMES


def add_command(commands: Any) -> None:
    """Puts `quantize` beside the others."""
    parser = commands.add_parser(
        "quantize", help="a checkpoint with its weights in fewer bits, for jaxllm and transformers"
    )
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder or hub id")
    parser.add_argument("quantize", choices=SCHEMES, metavar="SCHEME", help=", ".join(SCHEMES))
    parser.add_argument("--out", required=True, metavar="FOLDER", help="a new folder")
    _add_how(parser)
    parser.set_defaults(run=_quantize)


def _quantize(args: argparse.Namespace) -> int:
    out, how = Path(args.out).expanduser(), arguments(args)
    assert how is not None
    check_new(out)
    folder = find_folder(args.model)
    config, _ = read_config(folder)
    # nvfp4 has one scale of a tensor, so what is one in the file is packed as one
    fused = FAMILIES[config.model_type].fused and how["scheme"] == "nvfp4"

    def packed() -> Transformer:
        model = Transformer(config, Runtime(), rngs=nnx.Rngs(0))
        pack_as_stored(model, folder)
        if fused:
            jaxllm.fuse(model)
        jaxllm.quantize(model, **how)
        return model

    check_packed(nnx.eval_shape(packed))
    with Lines(stderr=True).status(f"packing {args.model}"):
        with on_host():  # the device need not have room for what is packed as it was
            model, tokenizer = jaxllm.load(folder, dtype=None)
            if fused:
                jaxllm.fuse(model)
        before = size_bytes(nnx.state(model))
        jaxllm.quantize(model, **how, from_host=True)
        jaxllm.save(model, tokenizer, out)
    share = size_bytes(nnx.state(model)) / before
    print(f"{out}: {args.quantize}, {share:.0%} of the bytes that there were")
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """To the parser of a command that has a model."""
    group = parser.add_argument_group("weights in fewer bits (norms and embedding stay)")
    group.add_argument("--quantize", choices=SCHEMES, metavar="SCHEME", help=", ".join(SCHEMES))
    _add_how(group)


def _add_how(parser: Any) -> None:
    parser.add_argument(
        "--quantize-head",
        choices=SCHEMES,
        metavar="SCHEME",
        help="of the head, and of the embedding where they are one (default: it stays)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="numbers that share a scale (default: as the scheme has it; int4: 128, 64 or 32)",
    )
    parser.add_argument(
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
