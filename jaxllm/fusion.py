"""One product for q, k and v, and one for gate and up, where a layer has three and two.

    fuse(model)          # in place: layers.0.self_attn.qkv_proj, layers.0.mlp.gate_up_proj, ...

The joined weight holds the parts' rows, one part below the other, as families that store it joined
have it; what a layer computes stays the same to rounding. It is for decoding, where launches count.
A training step gains nothing: 32 x 2048 tokens of six layers of width 2048 in bfloat16, two parts,
H200, 277 ms with three and two products, with three and one, and with one and one.
"""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.checkpoint.tensor_names import FUSED
from jaxllm.layers import MLP, Attention, Linear, computes_as
from jaxllm.quantize import PackedLinear
from pallas_kernels.quantize import concatenate


def fuse(model: nnx.Module) -> None:
    """Joins the projections of each layer that can be: beside the model, one layer's joined weight.

    They can be where all of them are `Linear`s, or `PackedLinear`s of one scheme, one dtype of
    scales and one order of inputs, and all or none have a bias. What was fused already is left as
    it is, and so are modules of your own in a layer's place: only an `Attention` or `MLP` is
    changed, wherever it is held, and none of a subclass that has methods in place of theirs.
    Raises: ValueError if the model is no Flax module, or its blocks are stacked (by nnx.vmap); then
    nothing is changed.
    """
    if not isinstance(model, nnx.Module):
        raise ValueError(f"fuse: model must be a Flax module, not {type(model).__name__}")
    owners: dict[str, tuple[type[nnx.Module], list[str]]] = {
        name: (kind, [part.rpartition(".")[2] for part in FUSED[name]])
        for name, kind in (("self_attn.qkv_proj", Attention), ("mlp.gate_up_proj", MLP))
    }
    found = [
        (owner, name.rpartition(".")[2], attributes)
        for path, owner in nnx.iter_modules(model)
        for name, (kind, attributes) in owners.items()
        if computes_as(owner, kind) and _can_join(path, owner, attributes)
    ]
    # Flax's split and merge, by which a checkpoint is loaded, leave cycles that hold all weights
    gc.collect()
    for owner, joined, attributes in found:
        linears = [getattr(owner, attribute) for attribute in attributes]
        for attribute in attributes:
            setattr(owner, attribute, None)
        setattr(owner, joined, _join(linears))


def _can_join(path: tuple[Any, ...], owner: Any, attributes: list[str]) -> bool:
    linears: list[Any] = [getattr(owner, attribute, None) for attribute in attributes]
    kinds = {type(linear) for linear in linears}
    if kinds not in ({Linear}, {PackedLinear}):
        return False
    for attribute, linear in zip(attributes, linears, strict=True):
        if type(linear) is Linear and len(shape := linear.weight.shape) != 2:
            raise ValueError(
                f"fuse: {'.'.join(map(str, (*path, attribute)))}.weight is {list(shape)}; a weight "
                "must be [out, in], not several stacked"
            )
    return len({(linear.bias is None, _form(linear)) for linear in linears}) == 1


def _form(linear: Linear | PackedLinear) -> tuple[Any, ...] | None:
    """What packed weights that are joined must have alike."""
    if isinstance(linear, Linear):
        return None
    order = None if linear.order is None else np.asarray(linear.order[...]).tobytes()
    scales = (None if x is None else x.dtype for x in (linear.scale, linear.row_scale))
    return linear.scheme, linear.group_size, order, *scales


def _join(linears: list[Any]) -> Any:
    """The first of them with the rows of all, which are let go of."""
    first = linears[0]
    bias = first.bias
    if bias is not None:
        bias = nnx.Param(jnp.concatenate([linear.bias[...] for linear in linears]))
    if type(first) is PackedLinear:
        packed = concatenate([linear.packed for linear in linears])
        order = None if first.order is None else first.order[...]
        like = {"dtype": first.dtype, "implementation": first.implementation}
        first = PackedLinear(packed, bias, order=order, **like)
    else:
        weight = jnp.concatenate([linear.weight[...] for linear in linears])
        first.weight, first.bias = nnx.Param(weight), bias
    linears.clear()
    # A host that runs ahead would make the next layer's beside this one's parts
    jax.block_until_ready(nnx.state(first))
    return first
