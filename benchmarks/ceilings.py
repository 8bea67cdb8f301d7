"""What this device can do today: read, copy and matmul rates, by two clocks that must agree."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.measure import Stopwatch, Timing

AGREE = 0.05  # two clocks on a copy of known bytes
COPY_BYTES = 2**31  # 1 ms on an H200: the start of a kernel is lost in it
MATMUL = 8192


class ClocksDisagreeError(Exception):
    """The bench does not believe itself."""


def measure(
    watch: Stopwatch, *, believe: bool = False, copy_bytes: int = COPY_BYTES, size: int = MATMUL
) -> dict[str, Any]:
    """{"read", "copy": bytes a second, "matmul": operations a second, and how each was timed}.

    Copy is the better of a kernel (x to -x) and the driver's own copy, read + written bytes.
    `believe` takes the one clock that there is.
    Raises: ClocksDisagreeError if CUPTI and the wall clock are more than 5 % apart on the kernel.
    """
    keys = jax.random.split(jax.random.key(0), 2)
    x = [(jax.random.normal(key, (copy_bytes // 4,), jnp.float32),) for key in keys]
    negate = watch.time(jax.jit(jnp.negative), x)
    apart = None if believe else agree(negate)
    copy = watch.time(jax.jit(jnp.copy), x)
    read = watch.time(jax.jit(jnp.max), x)
    del x
    a = [
        tuple(jax.random.normal(k, (size, size), jnp.float32).astype(jnp.bfloat16) for k in pair)
        for pair in jax.random.split(jax.random.key(1), (2, 2))
    ]
    matmul = watch.time(jax.jit(jnp.matmul), a)
    # The driver's copy is no kernel, so that only the wall clock sees it.
    copy_us = min(negate.us, copy.wall_us)
    return {
        "read": 1e6 * copy_bytes / read.us,
        "copy": 2e6 * copy_bytes / copy_us,
        "matmul": 2e6 * size**3 / matmul.us,
        "clocks_apart": apart,
        "times": {
            name: dataclasses.asdict(timing)
            for name, timing in {
                "negate": negate,
                "copy": copy,
                "read": read,
                "matmul": matmul,
            }.items()
        },
    }


def agree(timing: Timing) -> float:
    """How far the two clocks are apart on one long kernel, as a part of one.

    Raises: ClocksDisagreeError beyond AGREE, or if there is one clock only.
    """
    if timing.clock != "cupti":
        raise ClocksDisagreeError(
            f"there is one clock only, {timing.clock}: nothing can be checked against it; "
            "--host-clock believes the wall clock alone"
        )
    apart = abs(timing.wall_us - timing.us) / timing.us
    if apart > AGREE:
        raise ClocksDisagreeError(
            f"a copy of known bytes takes {timing.us:.0f} us by CUPTI and {timing.wall_us:.0f} us "
            f"by the wall clock: {100 * apart:.1f} % apart, believed are {100 * AGREE:.0f} %"
        )
    return apart
