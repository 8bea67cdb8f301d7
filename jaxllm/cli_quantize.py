"""`--quantize` of the `jaxllm` command: its options, and what they say."""

from __future__ import annotations

import argparse
from typing import Any

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
