"""`Stopwatch`: how long one callable takes on the device, warm, over inputs that no cache holds."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Twice the largest L2 of a GPU that we know (B200: 126 MB; H200: 60 MB)
COLD_BYTES = 2**28
MAX_SETS = 64
FEW_SETS = 4
LEAST_US = 0.1  # no call takes less: what clearing the cache takes is known no better


@dataclasses.dataclass(frozen=True)
class Timing:
    """One callable's time.

    us is the median of a call and spread_us half the distance of its quartiles, by `clock`:
    "cupti" is the sum of its kernels' times by the device's own clock, "host" the wall clock over
    calls in a row, behind which stands why CUPTI was not used; of calls between which a GPU's cache
    is cleared, less what clearing takes. wall_us is the wall clock over calls in a row without
    that in any case, and includes what CUPTI does not see: copies, and the gaps between kernels.
    kernels are the names in one call (None where the clock does not see them).
    """

    us: float
    spread_us: float
    wall_us: float
    clock: str
    calls: int
    kernels: tuple[str, ...] | None = None

    def beats(self, other: Timing) -> bool:
        """Faster by more than the spreads of both together, and by more than two in a hundred."""
        noise = max(self.spread_us + other.spread_us, 0.02 * other.us)
        return self.us + noise < other.us


def size_bytes(*trees: Any) -> int:
    """The bytes of all arrays, or ShapeDtypeStructs, in some pytrees."""
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(trees))


def num_sets(call_bytes: int) -> int:
    """How many sets of inputs a call of this many bytes needs so that no cache holds them.

    A few if it would take too many: `Stopwatch` then clears the cache between calls.
    """
    wanted = max(2, -(-COLD_BYTES // max(call_bytes, 1)))
    return wanted if wanted <= MAX_SETS else FEW_SETS


class Stopwatch:
    """Times callables on JAX's default device, by CUPTI where it works.

    Holds a buffer that is read between calls too small to push each other out of the L2.
    `clock`: "cupti" or "host"; None takes the first that works. `reason` says why not CUPTI.
    """

    def __init__(self, clock: str | None = None):
        if clock not in (None, "cupti", "host"):
            raise ValueError(f"stopwatch: clock {clock!r} is not 'cupti', 'host' or None")
        self.reason: str | None = None
        self._clear: Callable[[], Any] | None = None
        self._clear_kernels: tuple[str, ...] = ()
        platform = jax.devices()[0].platform
        if platform == "gpu":
            buffer = jnp.ones(COLD_BYTES // 4, jnp.float32)
            read = jax.jit(jnp.max).lower(buffer).compile()
            self._clear = lambda: read(buffer)
        if clock == "host":
            self.reason = "asked for"
        elif self._clear is None:
            self.reason = f"no CUPTI on {platform}"
        else:
            try:
                calls = self._cupti(self._clear, [()], 3, clear=False)
                self._clear_kernels = tuple(name for name, _ in calls[0])
            except RuntimeError as error:  # a GPU or driver without the right to profile
                self.reason = f"CUPTI: {error}"
        if clock == "cupti" and self.reason is not None:
            raise ValueError(f"stopwatch: there is no clock 'cupti' here: {self.reason}")

    def time(
        self,
        f: Callable[..., Any],
        sets: Sequence[tuple],
        *,
        calls: int = 20,
        call_bytes: int | None = None,
    ) -> Timing:
        """The time of `f(*sets[i])`, i going round. `f` is jitted; its results are not read.

        Give `num_sets` sets. Inputs and results of as many calls are alive at a time. call_bytes:
        what a call moves, if it reads a part of its inputs only, as rows of a table.
        """
        if not sets or calls < 1:
            raise ValueError(f"stopwatch: needs inputs and calls, got {len(sets)} and {calls}")
        warm = jax.block_until_ready([f(*arguments) for arguments in sets[:2]])
        whole = size_bytes(sets[0]) + size_bytes(warm[0])
        cold_bytes = len(sets) * (whole if call_bytes is None else min(whole, call_bytes))
        del warm
        clear = self._clear if cold_bytes < COLD_BYTES else None
        walls = sorted(self._wall(f, sets, calls) for _ in range(3))
        wall_us, reason = statistics.median(walls), self.reason
        if reason is None:
            try:
                events = self._cupti(f, sets, calls, clear=clear is not None)
            except RuntimeError as error:
                reason = f"CUPTI: {error}"
            else:
                times = sorted(1e3 * sum(ms for _, ms in call) for call in events)
                names = tuple(name for name, _ in events[0])
                us = statistics.median(times)
                return Timing(us, _spread(times), wall_us, "cupti", calls, names)
        us, spread_us = wall_us, _spread(walls)
        if clear is not None:
            both = sorted(self._wall(f, sets, calls, clear) for _ in range(3))
            alone = sorted(self._wall(clear, [()], calls) for _ in range(3))
            us = max(LEAST_US, statistics.median(both) - statistics.median(alone))
            spread_us = _spread(both) + _spread(alone)
        return Timing(us, spread_us, wall_us, f"host ({reason})", calls)

    def kernels(
        self, f: Callable[..., Any], sets: Sequence[tuple], *, calls: int = 3
    ) -> list[tuple[str, float]]:
        """(name, microseconds) of each kernel of one call, in order: medians of `calls`.

        Raises: ValueError where there is no CUPTI; RuntimeError if the calls differ.
        """
        if self.reason is not None:
            raise ValueError(f"stopwatch: kernels are seen by CUPTI alone: {self.reason}")
        events = self._cupti(f, sets, calls, clear=False)
        if len({tuple(name for name, _ in call) for call in events}) != 1:
            raise RuntimeError("the calls differ in their kernels")
        return [
            (same[0][0], 1e3 * statistics.median(ms for _, ms in same))
            for same in zip(*events, strict=True)
        ]

    def _wall(
        self,
        f: Callable[..., Any],
        sets: Sequence[tuple],
        calls: int,
        clear: Callable[[], Any] | None = None,
    ) -> float:
        """Microseconds a call, of `calls` in a row; with clear, each with one of it behind."""
        kept: list[Any] = [None] * len(sets)
        start = time.perf_counter()
        for i in range(calls):
            out = f(*sets[i % len(sets)])
            kept[i % len(sets)] = out if clear is None else (out, clear())
        jax.block_until_ready(kept)
        return 1e6 * (time.perf_counter() - start) / calls

    def _cupti(
        self, f: Callable[..., Any], sets: Sequence[tuple], calls: int, *, clear: bool
    ) -> list[list[tuple[str, float]]]:
        """(kernel, milliseconds) for each kernel of each call."""
        from jax.experimental.mosaic.gpu import profiler  # needs a jaxlib with Mosaic

        run = _Rotation(f, sets, calls, self._clear if clear else None)
        _, seen = profiler.measure(run, aggregate=False, iterations=calls)()
        if seen is None:
            raise RuntimeError("it saw no kernel")
        events: list[Any] = [seen] if calls == 1 else seen
        if not clear:
            return events
        ours = len(events[0]) - len(self._clear_kernels)
        if tuple(name for name, _ in events[0][ours:]) != self._clear_kernels:
            raise RuntimeError("the kernels came in another order than they were launched")
        return [call[:ours] for call in events]


class _Rotation:
    """`f` over its inputs in turn, as the profiler takes it: one call to warm up, then `calls`.

    The profiler jits what has not the methods of a jitted function, hence trace and lower.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        sets: Sequence[tuple],
        calls: int,
        clear: Callable[[], Any] | None,
    ):
        self.f, self.sets, self.last, self.clear = f, sets, calls, clear
        self.kept: list[Any] = [None] * len(sets)  # results too must not stay in the same place
        self.count = itertools.count()

    def __call__(self) -> Any:
        i = next(self.count)
        out = self.kept[i % len(self.sets)] = self.f(*self.sets[i % len(self.sets)])
        if self.clear is not None:
            out = (out, self.clear())
        return out if i in (0, self.last) else None  # the profiler waits for what it gets

    def trace(self) -> None:
        raise NotImplementedError("a rotation is only called")

    lower = trace


def _spread(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / 2
