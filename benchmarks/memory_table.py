"""What each remat policy costs in memory, for a model that need not fit on this machine.

    python -m benchmarks.memory_table [--layers 32] [--tokens 8192] [--qlora | --full]

(`make gpu-compile` brings along what it needs.) Adapters of rank 16 beside all linear layers of
Llama-3.1-8B's shape are trained, with a base in bfloat16 or packed in 4 bits; or, with `--full`,
all weights in float32. The rows are XLA's plan of the compiled step for an H200, in GiB: nothing
is run.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from benchmarks.models import LLAMA_8B
from jaxllm import aot
from jaxllm.plan import ORDER, Plan, plan


def row(name: str, found: Plan) -> str:
    """A line of a Markdown table."""
    sizes = (found.weights, found.activations, found.temporaries, found.peak, found.host)
    return f"| {name} | " + " | ".join(f"{size / 2**30:.2f}" for size in sizes) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 2 if it cannot compile, or not a model of that size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_table")
    parser.add_argument("--layers", type=int, default=LLAMA_8B.num_hidden_layers)
    parser.add_argument("--tokens", type=int, default=8192)
    trained = parser.add_mutually_exclusive_group()
    trained.add_argument("--qlora", action="store_true", help="a base in 4 bits")
    trained.add_argument("--full", action="store_true", help="no adapters")
    parser.add_argument("--policies", nargs="+", default=ORDER, choices=ORDER)
    options = parser.parse_args(arguments)
    if (reason := aot.why_not(code=False)) is not None:
        print(f"memory_table: {reason}", file=sys.stderr)
        return 2
    try:
        model = dataclasses.replace(LLAMA_8B, num_hidden_layers=options.layers, layer_types=())
        for name in options.policies:
            found = plan(
                model,
                batch=1,
                seq=options.tokens,
                lora=None if options.full else 16,
                qlora=options.qlora,
                remat=name,
            )
            if name == options.policies[0]:
                print("| policy | weights | activations | temporaries | peak | on the host |")
                print("|---|---:|---:|---:|---:|---:|")
            print(row(name, found), flush=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
