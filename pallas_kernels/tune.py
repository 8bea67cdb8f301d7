"""`python -m pallas_kernels.tune NAME`: time a kernel's candidate configs, write what wins.

The kernel module says what to tune: `tuning_calls`, `bucket`, `default_config`, `candidates`. A
config that does not beat the default outside the noise gets no row, and an old row of that key is
taken out. Runs on the GPU that is here.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import math
import sys
from collections.abc import Callable, Sequence
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
    """The command. 2 if it cannot run here."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description=__doc__)
    parser.add_argument("name", help="a kernel: rms_norm, matmul, ...")
    parser.add_argument("--out", type=Path, help="the file to write (default: tuned/<gpu>.json)")
    parser.add_argument("--calls", type=int, default=20, help="timed calls of a config")
    args = parser.parse_args(argv)
    device = device_lib.current()
    if device.platform != "gpu":
        print(f"tune: needs a GPU to measure on, found {device.platform}", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(f"pallas_kernels.{args.name}")
        if not hasattr(module, "tuning_calls"):
            raise ModuleNotFoundError(f"pallas_kernels.{args.name} has no tuning_calls")
    except ModuleNotFoundError as error:
        print(f"tune: {args.name!r} is no kernel that can be tuned: {error}", file=sys.stderr)
        return 2
    path = args.out or tuned.FOLDER / tuned.file_name(device.name)
    tried, rows = tune(module, args.name, device, measure.Stopwatch(), calls=args.calls)
    write(path, device.name, args.name, tried, rows)
    print(f"{path}: {len(rows)} rows of {args.name}, {len(tried)} keys tried")
    return 0


def tune(
    module: ModuleType,
    name: str,
    device: Device,
    watch: measure.Stopwatch,
    *,
    calls: int = 20,
    say: Callable[[str], None] = print,
) -> tuple[set[str], list[dict[str, Any]]]:
    """The keys that were tried, and the rows that earn their place."""
    rows, tried = [], set()
    for call in module.tuning_calls():
        key = module.bucket(*call.arguments, **call.keywords)
        if key in tried:
            say(f"{name} {key}: passed over, a call of the same key went before")
            continue
        tried.add(key)
        row = _row(module, name, key, call, device, watch, calls, say)
        if row is not None:
            rows.append(row)
    return tried, rows


def _row(module, name, key, call, device, watch, calls, say) -> dict[str, Any] | None:
    sizes = sum(math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in call.arguments)
    sets = [_inputs(call, i) for i in range(measure.num_sets(sizes))]
    default = module.default_config(*call.arguments, device=device, **call.keywords)
    programs = {}
    for config in [default, *module.candidates(*call.arguments, device=device, **call.keywords)]:
        if config in programs:
            continue
        try:
            run = jax.jit(lambda *x, c=config: call.run(*x, config=c, **call.keywords))
            programs[config] = run.lower(*call.arguments).compile()
        except Exception as error:  # whatever a compiler may raise: it is said, and passed over
            if config == default:
                raise
            say(f"{name} {key}: {config} does not compile: {_first_line(error)}")
    short = {c: watch.time(p, sets, calls=max(3, calls // 4)) for c, p in programs.items()}
    others = sorted((c for c in programs if c != default), key=lambda c: short[c].us)
    best, times = None, {}
    for config in [default, *others[:FINALISTS], default]:  # the default twice: clocks drift
        timing = watch.time(programs[config], sets, calls=calls)
        if config not in times or timing.us < times[config].us:
            times[config] = timing
    for config in others[:FINALISTS]:
        if times[config].beats(times[default]) and (
            best is None or times[config].us < times[best].us
        ):
            best = config
    base = times[default]
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


def write(path: Path, gpu: str, name: str, tried: set[str], rows: list[dict[str, Any]]) -> None:
    """Put the rows in the place of those of the same keys. No row, no file."""
    old = tuned.read(path) if path.is_file() else []
    kept = [row for row in old if row["op"] != name or row["key"] not in tried]
    merged = sorted(kept + rows, key=lambda row: (row["op"], row["key"]))
    if not merged:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in merged)
    path.write_text(f'{{"gpu": {json.dumps(gpu)}, "rows": [\n{lines}\n]}}\n')


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
