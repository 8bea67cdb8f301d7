"""Within `jax.shard_map`: the axes of the mesh over which arrays vary, where it checks that."""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer


def varying_axes(*trees: Any) -> frozenset[str]:
    """The axes over which an array of these varies; none where nothing is checked."""
    arrays = (x for x in jax.tree.leaves(trees) if isinstance(x, Tracer))
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def vary_alike(*trees: Any) -> tuple[Any, ...]:
    """The arrays, each marked as varying over the axes over which one of them varies.

    So have a custom gradient and what a loop carries one type. The gradient of an array that was
    the same on all devices is summed over them.
    """
    axes = varying_axes(trees)

    def mark(x):
        missing = tuple(axes - varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, trees) if axes else trees


def why_no_kernel(*trees: Any) -> str | None:
    """What keeps a kernel from these arrays: it cannot say over which axes its results vary."""
    if not (axes := varying_axes(trees)):
        return None
    return (
        f"its arrays vary over {', '.join(sorted(axes))}, which jax.shard_map checks and a kernel "
        "cannot tell; give it check_vma=False"
    )
