"""Frozen weights of four bits: packed in memory, dequantised where they are used.

    quantize_linears(model, "int4", group_size=64)

The layout is that of a packed checkpoint: groups of G numbers along the input axis share a scale,
two codes lie in a byte, the lower half first.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from jaxllm import ops
from jaxllm.layers import Linear
from jaxllm.ops.linear import precision

SCHEMES = ("int4",)
KEEP = ("lm_head",)  # the head's error goes straight to the logits

# While a weight is packed, three arrays of float32 of its size lie beside it
WORKING_BYTES = 12  # a number

_LARGEST = 7  # of the quotients, which are symmetric: -7 to 7
_ZERO = 8  # the code of the quotient 0


def quantize(
    weight: Float[Array, "O I"], scheme: str = "int4", group_size: int = 64
) -> tuple[UInt8[Array, "O I2"], Float[Array, "O I_G"]]:
    """Codes packed [O, I / 2] and scales [O, I / G] of a weight.

    Byte i of a row holds the codes of the columns 2i (its lower half) and 2i + 1. A code c stands
    for (c - 8) times the scale of its group, with c from 1 to 15; the scale is a seventh of the
    group's largest magnitude, in the weight's dtype, and 1 for a group of zeros. So no number is
    further from its own than half a scale.
    Raises: ValueError for another scheme, a group size that is odd or does not divide I.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"quantize: scheme {scheme!r} is not one of {', '.join(SCHEMES)}")
    rows, columns = weight.shape
    if group_size < 2 or group_size % 2 or columns % group_size:
        raise ValueError(
            f"quantize: groups of {group_size} do not divide {columns} inputs evenly; the size "
            "must be even and a divisor"
        )
    groups = weight.astype(jnp.float32).reshape(rows, -1, group_size)
    largest = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    scale = (largest / np.float32(_LARGEST)).astype(weight.dtype)
    scale = jnp.where(scale > 0, scale, jnp.ones_like(scale))
    quotients = jnp.round(groups / scale.astype(jnp.float32))
    quotients = jnp.clip(quotients, -_LARGEST, _LARGEST)
    codes = (quotients + np.float32(_ZERO)).astype(jnp.uint8).reshape(rows, -1, 2)
    return codes[..., 0] | codes[..., 1] << np.uint8(4), scale[..., 0]


def dequantize(
    packed: UInt8[Array, "O I2"], scale: Float[Array, "O I_G"], dtype: Any = None
) -> Float[Array, "O I"]:
    """The weight that the codes stand for, rounded once to `dtype` (the scale's if None)."""
    rows, groups = scale.shape
    low, high = packed & np.uint8(15), packed >> np.uint8(4)
    quotients = jnp.stack([low, high], axis=-1).astype(jnp.int32) - np.int32(_ZERO)
    quotients = quotients.reshape(rows, groups, -1).astype(jnp.float32)
    weight = quotients * scale.astype(jnp.float32)[..., None]
    return weight.reshape(rows, -1).astype(dtype or scale.dtype)


class Int4Linear(nnx.Module):
    """A `Linear` whose weight is frozen and packed; its parameters are packed, scale and bias.

    The product is that of `Linear` with the dequantised weight. Only x (and the bias) have a
    gradient; the backward pass dequantises again, and nothing of the weight's size is kept.
    """

    def __init__(self, linear: Linear, *, group_size: int = 64):
        packed, scale = quantize(linear.weight[...], "int4", group_size)
        self.packed = nnx.Param(packed)
        self.scale = nnx.Param(scale)
        self.bias = linear.bias
        self.dtype = linear.dtype
        self.implementation = linear.implementation

    def __call__(self, x: Float[Array, "*B I"], *, out_dtype=None) -> Float[Array, "*B O"]:
        y: Array = _product(
            jnp.dtype(out_dtype or self.dtype),
            self.implementation,
            x.astype(self.dtype),
            self.packed[...],
            self.scale[...],
        )
        if self.bias is None:
            return y
        bias = self.bias[...].astype(y.dtype)
        return y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)

    def dequantize(self) -> Float[Array, "O I"]:
        """The weight in the scale's dtype."""
        return dequantize(self.packed[...], self.scale[...])


def quantize_linears(
    model: nnx.Module,
    scheme: str = "int4",
    *,
    group_size: int = 64,
    keep: Sequence[str] = KEEP,
    from_host: bool = False,
) -> None:
    """Packs the weight of every `Linear` of the model but those whose name's last part is in
    `keep`, one after the other, and lets go of each before the next; the embedding stays as it is.

    from_host: of a model that was loaded into the host's memory. Each weight is brought to the
        default device to be packed there, and then all that stays as it is: the device never holds
        more than the packed model and one weight in work.
    Raises: ValueError for another scheme, a group size that does not divide a weight's inputs
    (which it names), or a model with nothing to pack; then nothing is changed.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"quantize: scheme {scheme!r} is not one of {', '.join(SCHEMES)}")
    found = linears(model, keep)
    if not found:
        raise ValueError("quantize: the model has no linear layer that is not packed or kept")
    for name, (_, _, linear) in found.items():
        columns = linear.weight.shape[1]
        if group_size < 2 or group_size % 2 or columns % group_size:
            raise ValueError(
                f"quantize: groups of {group_size} do not divide the {columns} inputs of {name} "
                "evenly; the size must be even and a divisor"
            )
    # Flax's split and merge, by which a checkpoint is loaded, leave cycles that hold all weights
    gc.collect()
    for name in list(found):
        parent, attribute, linear = found.pop(name)
        if from_host:
            _bring(linear.weight)
        packed = Int4Linear(linear, group_size=group_size)
        if from_host:
            # A host that runs ahead would bring the next weights beside this one
            jax.block_until_ready((packed.packed[...], packed.scale[...]))
        setattr(parent, attribute, packed)
        del linear, packed
    if from_host:
        for _, parameter in nnx.iter_graph(model):
            if isinstance(parameter, nnx.Param):
                _bring(parameter)


def _bring(parameter: nnx.Param) -> None:
    """To the default device, where it stays free to follow other arrays."""
    here = jnp.zeros(()).devices()
    if parameter[...].devices() != here:
        parameter.set_value(jnp.asarray(np.asarray(parameter[...])))


def linears(model: nnx.Module, keep: Sequence[str]) -> dict[str, tuple[Any, str, Linear]]:
    """Each plain `Linear` by its dotted name: what holds it, under which attribute, and it."""
    found = {}
    modules = dict(nnx.iter_modules(model))
    for path, module in modules.items():
        # A subclass computes otherwise
        if type(module) is Linear and path and path[-1] not in keep:
            found[".".join(map(str, path))] = (modules[path[:-1]], str(path[-1]), module)
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(out_dtype: Any, implementation: Any, x, packed, scale):
    # Behind the barrier with x the weight is made when it is needed: not for all layers at the
    # start of the program, and not in front of a loop over micro-batches.
    x, packed, scale = jax.lax.optimization_barrier((x, packed, scale))
    weight = dequantize(packed, scale, x.dtype)
    return ops.linear(x, weight, out_dtype=out_dtype, implementation=implementation)


def _product_forward(out_dtype, implementation, x, packed, scale):
    y = _product(out_dtype, implementation, x, packed, scale)
    return y, (packed, scale, jnp.zeros((0,), x.dtype))


def _product_backward(out_dtype, implementation, saved, d_y):
    packed, scale, like_x = saved
    # Without the barrier, XLA would see the forward pass's weight in this one, and keep that.
    d_y, packed, scale = jax.lax.optimization_barrier((d_y, packed, scale))
    weight = dequantize(packed, scale, like_x.dtype)
    d_x = jax.lax.dot_general(
        d_y.astype(like_x.dtype),
        weight,
        (((d_y.ndim - 1,), (0,)), ((), ())),
        precision=precision(like_x.dtype),
        preferred_element_type=like_x.dtype,
    )
    return d_x, None, None


_product.defvjp(_product_forward, _product_backward)
