"""The loss from hidden states: the sum and both its gradients, the vocabularies of real models.

A label is tokens x words x width, and the head's dtype.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case
from benchmarks.correct import use_tests
from jaxllm import ops
from pallas_kernels.cross_entropy import linear_cross_entropy
from pallas_kernels.measure import size_bytes

LLAMA, QWEN, TRAINED = (128256, 4096), (151936, 896), (32000, 2048)


def cases() -> list[Case]:
    """The head in float32 is that of a model in training; odd sizes are compiled only."""
    found = [_case(1024, 8000, 1024), _case(4096, *LLAMA), _case(4096, *LLAMA, gradients=False)]
    found += [_case(8192, *QWEN), _case(32768, *TRAINED, "float32")]
    odd: Any = {"compile_only": True}
    found += [_case(1, 1003, 896, **odd), _case(1000, 1003, 896, "float32", **odd)]
    found.append(_case(1000, 1003, 896, softcap=30.0, z_loss=1e-4, **odd))
    found.append(_case(1000, 40000, 1024, softcap=30.0, gradients=False, **odd))
    return found


def _case(
    t: int,
    v: int,
    d: int,
    head: str = "bfloat16",
    *,
    gradients: bool = True,
    compile_only: bool = False,
    **keywords: Any,
) -> Case:
    hidden = jax.ShapeDtypeStruct((t, d), jnp.bfloat16)
    arguments = (hidden, jax.ShapeDtypeStruct((v, d), head), jax.ShapeDtypeStruct((t,), jnp.int32))

    def way(f: Any, **more: Any) -> Any:
        f = functools.partial(f, **keywords, **more)
        return jax.value_and_grad(f, (0, 1)) if gradients else f

    chunked = functools.partial(_chunked, **keywords)
    words = ["soft cap"] * ("softcap" in keywords) + ["the loss alone"] * (not gradients)
    return Case(
        op="linear_cross_entropy",
        label=", ".join([f"{t} x {v} x {d} {head}", *words]),
        arguments=arguments,
        run=way(linear_cross_entropy, reduction="sum"),
        plain=functools.partial(_rounded, gradients, **keywords),
        time_plain=False,
        kind="matmul",
        bytes=size_bytes(arguments, arguments[:2] if gradients else ()),
        operations=(6 if gradients else 2) * t * v * d,
        keywords={"gradients": gradients, **keywords},
        truth=functools.partial(_truth, gradients),
        rivals={"xla chunked": jax.value_and_grad(chunked, (0, 1)) if gradients else chunked},
        make=functools.partial(_inputs, t, v, d, head),
        compile_only=compile_only,
    )


def _rounded(gradients: bool, hidden, head, targets, **keywords: Any) -> Any:
    use_tests()
    import rounded  # type: ignore

    total, *both = rounded.linear_cross_entropy(hidden, head, targets, **keywords)
    return (total, tuple(both)) if gradients else total


def _chunked(hidden, head, targets, **keywords: Any) -> jax.Array:
    return ops.linear_cross_entropy(hidden, head, targets, implementation="xla", **keywords)[0]


def _inputs(t: int, v: int, d: int, head: str, key: jax.Array) -> tuple[jax.Array, ...]:
    """Logits with a deviation of 1, and targets by chance."""
    keys = jax.random.split(key, 3)
    return (
        jax.random.normal(keys[0], (t, d), jnp.bfloat16),
        (jax.random.normal(keys[1], (v, d), jnp.bfloat16) * d**-0.5).astype(head),
        jax.random.randint(keys[2], (t,), 0, v, jnp.int32),
    )


def _truth(gradients: bool, hidden, head, targets) -> Any:
    import oracles  # type: ignore

    total, *both = oracles.linear_cross_entropy(hidden, head, targets)
    return (np.array(total), tuple(both)) if gradients else np.array(total)
