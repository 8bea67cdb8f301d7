"""`python -m pallas_kernels.tune NAME ...`: time kernels' candidate configs, write what wins.

A kernel's module says what to tune: `tuning_calls`, `bucket`, `default_config`, `candidates`. The
configs of a key are compiled side by side, then timed one by one, and the file is written after
every key: an interrupt loses none of those before. A config gets a row if it beats the default by
more than the noise (the spreads of both) and by at least 2 % (`measure.Timing.beats`), by the same
clock; where none does, an old row of that key is taken out. Runs on the GPU that is here; where
CUPTI does not work there it says so, and the host's clock counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import fnmatch
import functools
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import device as device_lib
from pallas_kernels import measure, tuned
from pallas_kernels.device import Device

FINALISTS = 3  # of a first, short round; timed again in turns with the default


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 2 if it cannot run here, if `--out` is another GPU's, or no key as `--keys`."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="name", help="a kernel: rms_norm, matmul, ...")
    parser.add_argument("--out", type=Path, help="the file to write (default: tuned/<gpu>.json)")
    parser.add_argument(
        "--keys",
        default="*",
        metavar="PATTERN",
        help="only keys that a shell's pattern matches, such as 'int8-*-m1-*'",
    )
    parser.add_argument("--calls", type=int, default=20, help="timed calls of a config")
    args = parser.parse_args(argv)
    device = device_lib.current()
    if device.platform != "gpu":
        print(f"tune: needs a GPU to measure on, found {device.platform}", file=sys.stderr)
        return 2
    modules = {}
    for name in args.names:
        try:
            modules[name] = importlib.import_module(f"pallas_kernels.{name}")
            if not hasattr(modules[name], "tuning_calls"):
                raise ModuleNotFoundError(f"pallas_kernels.{name} has no tuning_calls")
        except ModuleNotFoundError as error:
            print(f"tune: {name!r} is no kernel that can be tuned: {error}", file=sys.stderr)
            return 2
    path = args.out or tuned.FOLDER / tuned.file_name(device.name)
    try:
        check_gpu(path, device.name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    watch, tried = measure.Stopwatch(), 0
    if watch.reason is not None:
        print(f"tune: times are the host clock's ({watch.reason})", file=sys.stderr)
    for name, module in modules.items():
        found = []
        for key, row in tune(module, name, device, watch, keys=args.keys, calls=args.calls):
            rows = [] if row is None else [row]
            write(path, device.name, name, {key}, rows)
            found.append(len(rows))
        print(f"{path}: {sum(found)} rows of {name}, {len(found)} keys tried", flush=True)
        tried += len(found)
    if not tried:
        print(f"tune: no key of {', '.join(modules)} matches {args.keys!r}", file=sys.stderr)
    return 0 if tried else 2


def tune(
    module: ModuleType,
    name: str,
    device: Device,
    watch: measure.Stopwatch,
    *,
    keys: str = "*",
    calls: int = 20,
    say: Callable[[str], None] = functools.partial(print, flush=True),
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Each key as soon as it was tried, with its row if one earns its place.

    keys: the pattern, as of a shell, of those that are tried.
    """
    tried = set()
    for call in module.tuning_calls():
        key = module.bucket(*call.arguments, **call.keywords)
        if not fnmatch.fnmatchcase(key, keys):
            continue
        if key in tried:
            say(f"{name} {key}: passed over, a call of the same key went before")
            continue
        tried.add(key)
        yield key, _row(module, name, key, call, device, watch, calls, say)


def _row(module, name, key, call, device, watch, calls, say) -> dict[str, Any] | None:
    sizes = measure.size_bytes(call.arguments)
    sets = [_inputs(call, i) for i in range(measure.num_sets(sizes))]
    default = module.default_config(*call.arguments, device=device, **call.keywords)
    configs = [default, *module.candidates(*call.arguments, device=device, **call.keywords)]
    programs = {}
    for config, program in _compile(call, dict.fromkeys(configs)):
        if not isinstance(program, Exception):
            programs[config] = program
        elif config == default:
            raise program
        else:
            say(f"{name} {key}: {config} does not compile: {_first_line(program)}")
    short = {c: watch.time(p, sets, calls=max(3, calls // 4)) for c, p in programs.items()}
    others = sorted((c for c in programs if c != default), key=lambda c: short[c].us)
    best, times = None, {}
    for config in [default, *others[:FINALISTS], default]:  # the default twice: clocks drift
        timing = watch.time(programs[config], sets, calls=calls)
        if config not in times or timing.us < times[config].us:
            times[config] = timing
    base = times[default]
    for config in others[:FINALISTS]:
        if (times[config].clock == "cupti") != (base.clock == "cupti"):  # it has failed on one
            continue
        if times[config].beats(base) and (best is None or times[config].us < times[best].us):
            best = config
    if best is None:
        say(f"{name} {key}: keeps {default}, {base.us:.1f} us, of {len(programs)} configs")
        return None
    say(f"{name} {key}: {best} {times[best].us:.1f} us, default {base.us:.1f} us")
    evidence = {
        "us": round(times[best].us, 3),
        "spread_us": round(times[best].spread_us, 3),
        "default_us": round(base.us, 3),
        "default_spread_us": round(base.spread_us, 3),
        "default": dataclasses.asdict(default),
        "clock": base.clock,
        "jax": importlib.metadata.version("jax"),
        "date": datetime.date.today().isoformat(),
    }
    return {"op": name, "key": key, "config": dataclasses.asdict(best), "evidence": evidence}


def _compile(call: tuned.Call, configs: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Each config with its program, or with what the compiler raised; all compile side by side."""

    def compiled(config):
        run = jax.jit(lambda *x: call.run(*x, config=config, **call.keywords))
        try:
            return config, run.lower(*call.arguments).compile()
        except Exception as error:  # whatever a compiler may raise: the caller says it
            return config, error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(compiled, configs)


def check_gpu(path: Path, gpu: str) -> None:
    """Raises: ValueError for a file of another GPU."""
    if path.is_file() and (other := json.loads(path.read_text())["gpu"]) != gpu:
        raise ValueError(f"tune: {path} has rows of {other}, and this is {gpu}; give another --out")


def write(path: Path, gpu: str, name: str, tried: set[str], rows: list[dict[str, Any]]) -> None:
    """Put the rows in the place of those of the same keys. No row, no file.

    Raises: ValueError for a file of another GPU.
    """
    check_gpu(path, gpu)
    old = tuned.read(path) if path.is_file() else []
    kept = [row for row in old if row["op"] != name or row["key"] not in tried]
    merged = sorted(kept + rows, key=lambda row: (row["op"], row["key"]))
    if not merged:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in merged)
    new = path.with_suffix(".new")  # whole or not at all
    new.write_text(f'{{"gpu": {json.dumps(gpu)}, "rows": [\n{lines}\n]}}\n')
    new.replace(path)


def _inputs(call: tuned.Call, seed: int) -> tuple[jax.Array, ...]:
    key = jax.random.key(seed)
    if call.make is not None:
        return tuple(call.make(key))
    keys = jax.random.split(key, len(call.arguments))
    return tuple(
        jax.random.normal(k, a.shape, jnp.float32).astype(a.dtype)
        for k, a in zip(keys, call.arguments, strict=True)
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


if __name__ == "__main__":
    sys.exit(main())
