"""`python -m benchmarks.start`: what somebody waits for from the command to the first token.

A new process loads a checkpoint and writes one token, then 65, first without compiled programs on
disk, then with those that the first has left. The checkpoint is one of random weights in the shape
of a real model, saved just before: its files are in the system's page cache, and no disk is timed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from flax import nnx

import jaxllm
from benchmarks import models
from pallas_kernels.packed import SCHEMES

MODELS = {
    "Qwen2.5-0.5B": models.QWEN,
    "Llama-3.2-1B": models.LLAMA,
    "Llama-3.1-8B": models.LLAMA_8B,
}
PROMPT, TOKENS = 60, 65


def _save(name: str, folder: str) -> None:
    runtime = jaxllm.Runtime(dtype="bfloat16", param_dtype="bfloat16")
    model = jaxllm.Transformer(MODELS[name], runtime, rngs=nnx.Rngs(0))
    jaxllm.save(model, None, folder)


def _laps(folder: str, programs: str, scheme: str | None) -> Iterator[tuple[str, Any]]:
    """Each step's name when it is done; at last the device, and the bytes of the weights."""
    yield "import", None
    jaxllm.enable_compile_cache(programs)
    device = jax.devices()[0]
    yield "find the device", None
    model, _ = jaxllm.load(folder, dtype="bfloat16")
    jax.block_until_ready(jax.tree.leaves(model))
    yield "load", None
    if scheme is not None:
        jaxllm.quantize(model, scheme)
        jax.block_until_ready(jax.tree.leaves(model))
        yield "quantize", None
    jaxllm.fuse(model)
    jax.block_until_ready(jax.tree.leaves(model))
    yield "fuse", None
    prompt: dict[str, Any] = {"prompts": [[5] * PROMPT], "stop_ids": []}
    jaxllm.generate(model, None, **prompt, max_new_tokens=1)
    yield "the first token", None
    jaxllm.generate(model, None, **prompt, max_new_tokens=TOKENS)
    yield f"the prompt again, and {TOKENS} tokens", None
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    yield "facts", {"device": device.device_kind, "weight_bytes": size}


def _start(begun: float, folder: str, programs: str, scheme: str | None) -> None:
    seconds = {}
    for lap, facts in _laps(folder, programs, scheme):
        now = time.time()  # as another process has it
        if facts is None:
            seconds[lap], begun = now - begun, now
        else:
            print(json.dumps({"seconds": seconds, **facts}))


def _process(*arguments: str) -> str:
    """What such a process prints last. Raises: SystemExit if it fails, after its own words."""
    command = [sys.executable, "-m", "benchmarks.start", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"start: the process with {arguments[0]} ended with {done.returncode}")
    return done.stdout.strip().rpartition("\n")[2]


def main(args: argparse.Namespace) -> None:
    """Print the table; write it to `--out`, too."""
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder, programs = args.model, str(Path(temporary, "programs"))
        if folder in MODELS:
            folder = str(Path(temporary, "model"))
            _process("--save", args.model, folder)
        scheme = [] if args.quantize is None else [args.quantize]
        runs = []
        for _ in range(2):
            last = _process("--start", str(time.time()), folder, programs, *scheme)
            runs.append(json.loads(last))
    first, again = (run["seconds"] for run in runs)
    what = f"{args.model}, {args.quantize or 'bfloat16'}"
    size = runs[0]["weight_bytes"] / 1e9
    print(f"{what}, {size:.1f} GB of weights, on {runs[0]['device']}; seconds\n")
    print("| | first | with programs on disk |\n|---|--:|--:|")
    for lap in first:
        print(f"| {lap} | {first[lap]:.2f} | {again[lap]:.2f} |")
    print(f"| all | {sum(first.values()):.1f} | {sum(again.values()):.1f} |")
    if args.out is not None:
        args.out.write_text(json.dumps({"model": what, "runs": runs}, indent=1) + "\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    add = parser.add_argument
    names = f"{', '.join(MODELS)} (default), or a checkpoint's folder"
    add("model", nargs="?", default="Llama-3.1-8B", help=names)
    add("--quantize", choices=SCHEMES, metavar="SCHEME", help=", ".join(SCHEMES))
    add("--folder", type=Path, help="where there is room for files (default: the system's)")
    add("--out", type=Path, metavar="FILE.json", help="where to write the seconds")
    args = parser.parse_args(arguments)
    if args.model not in MODELS and not Path(args.model).is_dir():
        parser.error(f"{args.model} is no folder, and none of {', '.join(MODELS)}")
    if args.folder is not None and not args.folder.is_dir():
        parser.error(f"--folder {args.folder} is no folder")
    if args.out is not None:
        is_new = not args.out.exists()
        try:
            args.out.open("a").close()  # now, and not after minutes
            if is_new:  # a run that fails leaves none
                args.out.unlink()
        except OSError as error:
            parser.error(f"--out {args.out}: {error.strerror}")
    return args


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--save", name, folder]:
            _save(name, folder)
        case ["--start", begun, folder, programs, *scheme]:
            _start(float(begun), folder, programs, scheme[0] if scheme else None)
        case arguments:
            main(parse(arguments))
