"""`Case`: one call of one kernel, shared by the compile table, the benchmark and the GPU tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("memory", "memory-reduce", "memory-read", "matmul", "launch")
DIFFERS = 2e-2
CEILINGS = ("copy", "read", "matmul")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of one kernel.

    op: the kernel's public name; `python -m benchmarks NAME` and tune choose by it.
    label: sizes, dtype and what is special: "8192 x 8192 bfloat16, residual".
    arguments: shapes and dtypes of the call's arguments.
    run: our kernel, plain: the same in plain jnp (the rival "xla", and the baseline of accuracy);
        both take arrays of those shapes and can be jitted.
    kind: "memory" (must show 16-byte accesses or TMA), "memory-reduce" (shuffles too),
        "memory-read" (reads much, writes a number for it: shuffles or tensor cores), "matmul",
        "launch" (so few bytes that nothing is asked of their accesses).
    bytes: the fewest that can move: every input read once, every output written once.
    operations: arithmetic by model, where that is what counts (2 M N K).
    ceiling: what percent is percent of, "copy", "read" or "matmul"; None: "matmul" for that kind if
        operations are counted, else "copy".
    keywords: what the call is told beside arrays ({"window": 4096}): rivals read it.
    truth: NumPy arrays -> float64 NumPy of the structure of run's result. None: plain in float32.
    sample: (arguments, result) -> a part of both that `truth` can do again, where a host would take
        too long for the whole; it runs on the device, and is asked for large calls only.
    compared: result -> what of it is compared with the truth's; None: each array by itself.
    rivals: further JAX callables by name ("cudnn", "jax.nn", "triton"); one named "xla" is run in
        plain's place, where users run another program of the same result. Those of torch are in
        torch_rivals.py, by op.
    make: key -> arguments, where normal random numbers will not do (ids, masks, angles).
    constants: arguments by place that are the same for all keys, for torch too (lengths).
    time_plain: whether "xla" is timed; else it is what others are compared with, and no rival.
    compile_only: a tested or tuned shape that the benchmark leaves out.
    spilled_bytes: what may be stored and loaded for want of registers, of a kernel that is right:
        because it is known not to be fast there, or because what spills nothing is slower. Written
        down either way; more of it is a fault.
    differs: a rival this far from plain, by the norm, computes something else: not rounding.
    largest_term: for tests/numerics.py, where sums pass through numbers larger than their results.
    """

    op: str
    label: str
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    run: Callable[..., Any]
    plain: Callable[..., Any]
    kind: str
    bytes: int
    operations: int = 0
    ceiling: str | None = None
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    truth: Callable[..., Any] | None = None
    sample: Callable[[tuple, Any], tuple[tuple, Any]] | None = None
    compared: Callable[[Any], Any] | None = None
    rivals: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    make: Callable[[jax.Array], tuple[jax.Array, ...]] | None = None
    constants: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    time_plain: bool = True
    compile_only: bool = False
    spilled_bytes: int = 0
    differs: float = DIFFERS
    largest_term: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"case: kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.ceiling not in (None, *CEILINGS):
            raise ValueError(f"case: ceiling {self.ceiling!r} is not one of {', '.join(CEILINGS)}")
        if self.bytes <= 0:
            raise ValueError(f"case: {self.op} {self.label} moves {self.bytes} bytes")

    @property
    def measured_by(self) -> str:
        """Which ceiling: see `ceiling`."""
        counts = self.kind == "matmul" and self.operations
        return self.ceiling or ("matmul" if counts else "copy")

    @property
    def name(self) -> str:
        return f"{self.op}: {self.label}"

    def inputs(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """Fresh arguments: `make`'s, or normal random numbers; never zeros, which run faster."""
        if self.make is not None:
            return tuple(self.make(key))
        keys = jax.random.split(key, len(self.arguments))
        return tuple(
            jnp.asarray(self.constants[i]) if i in self.constants else _random(k, a)
            for i, (k, a) in enumerate(zip(keys, self.arguments, strict=True))
        )


def _random(key: jax.Array, spec: jax.ShapeDtypeStruct) -> jax.Array:
    if not jnp.issubdtype(spec.dtype, jnp.floating):
        raise ValueError(
            f"case: random numbers do not fit dtype {spec.dtype}; give the case a make"
        )
    return jax.random.normal(key, spec.shape, jnp.float32).astype(spec.dtype)
