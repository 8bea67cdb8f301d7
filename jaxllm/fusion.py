"""One product for q, k and v, and one for gate and up, where a layer has three and two.

    fuse(model)          # in place: layers.0.self_attn.qkv_proj, layers.0.mlp.gate_up_proj, ...

The joined weight holds the parts' rows, one part behind the other, as families that store it joined
have it; what a layer computes stays the same to rounding. In decoding it is fewer launches. In
training the backward pass adds no products up; there the weights are joined by name while they are
cast (`join`), and the gradients are cut again (`split`), so that parameters keep their names.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxllm.checkpoint.tensor_names import FUSED
from jaxllm.layers import Linear

Groups = dict[str, tuple[str, ...]]


def fuse(model: nnx.Module, only: Collection[str] | None = None) -> None:
    """Joins all that can be joined, layer by layer: beside the model, one layer's joined weight.

    only: names of `groups`; None for all of them.
    """
    found = {name: parts for name, parts in groups(model).items() if only is None or name in only}
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    # Flax's split and merge, by which a checkpoint is loaded, leave cycles that hold all weights
    gc.collect()
    for name, parts in found.items():
        parent, _, attribute = name.rpartition(".")
        owner = modules[parent]
        joined: Any = modules[parts[0]]
        for kind in ("weight", "bias"):
            arrays = [getattr(modules.get(part), kind) for part in parts]
            if arrays[0] is not None:
                setattr(joined, kind, nnx.Param(_concatenate([x[...] for x in arrays])))
            del arrays
        for part in parts:
            setattr(owner, part.rpartition(".")[2], None)
            del modules[part]
        setattr(owner, attribute, joined)
        # A host that runs ahead would make the next layer's beside this one's parts
        jax.block_until_ready(joined.weight[...])


def groups(model: nnx.Module) -> Groups:
    """What can be joined: the joined module's dotted name, and those of its parts in order.

    Plain `Linear`s all of them, with a bias each or none.
    """
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    found = {}
    for parent in modules:
        for name, parts in FUSED.items():
            holder, _, last = name.rpartition(".")
            if parent.rpartition(".")[2] != holder:
                continue
            paths = tuple(f"{parent}.{part.rpartition('.')[2]}" for part in parts)
            linears = [modules.get(path) for path in paths]
            plain = all(type(linear) is Linear for linear in linears)
            if plain and len({linear.bias is None for linear in linears}) == 1:  # type: ignore[union-attr]
                found[f"{parent}.{last}"] = paths
    return found


def structure(model: nnx.Module, only: Collection[str]) -> Any:
    """A model of shapes alone: `model` after `fuse(model, only)`; `model` itself stays as it is."""
    graph, state = nnx.split(model)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)

    def build(state: Any) -> nnx.Module:
        copy = nnx.merge(graph, state)
        fuse(copy, only)
        return copy

    return nnx.eval_shape(build, shapes)


def join(params: Mapping[str, Array], found: Groups) -> dict[str, Array]:
    """Parameters by name, with the parts' replaced by the joined modules' own."""
    joined = dict(params)
    for name, parts in found.items():
        for kind in ("weight", "bias"):
            arrays = [joined.pop(f"{part}.{kind}", None) for part in parts]
            if arrays[0] is not None:
                joined[f"{name}.{kind}"] = _concatenate(arrays)
    return joined


def split(joined: Mapping[str, Array], found: Groups, like: Mapping[str, Any]) -> dict[str, Array]:
    """The inverse of `join`; `like` has the parts' shapes by name."""
    params = dict(joined)
    for name, parts in found.items():
        for kind in ("weight", "bias"):
            if (array := params.pop(f"{name}.{kind}", None)) is None:
                continue
            start = 0
            for part in parts:
                rows = like[f"{part}.{kind}"].shape[0]
                params[f"{part}.{kind}"] = jax.lax.slice_in_dim(array, start, start + rows)
                start += rows
    return params


def _concatenate(arrays: Any) -> Array:
    return jnp.concatenate(arrays, axis=0)
