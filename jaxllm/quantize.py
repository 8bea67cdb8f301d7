"""Weights of a model in 8, 4 or 2 bits: packed in memory, and run through the same ops.

    quantize(model, "int4")                         # in place, layer by layer
    quantize(model, "int4", head="int8", keep=("layers.0.*", "down_proj"))

What stays in high precision, in one rule: norms, biases and the embedding always, the head unless
`head` names a scheme, and each projection that `keep` names. With tied heads, `head` packs the one
table that serves both.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm import ops
from jaxllm.config import ModelConfig
from jaxllm.layers import BitLinear, Embedding, Linear
from pallas_kernels.packed import Packed
from pallas_kernels.quantize import check_finite, check_group_size, check_scheme, dequantize
from pallas_kernels.quantize import quantize as pack

KEEP = ("lm_head",)  # the head's error goes straight to the logits
_HEADS = ("lm_head", "embed_tokens")  # the second where they are one

# While a weight is packed: codes, scales, and parts of them in float32
WORKING_BYTES = 2  # a number


def qlora_group_size(config: ModelConfig) -> int:
    """Of the int4 base that adapters are trained beside: 64, or 32 where 64 does not divide the
    inputs of all projections.
    """
    heads = config.num_attention_heads * config.head_dim
    inputs = config.hidden_size, config.intermediate_size, heads
    return 32 if all(n % 32 == 0 for n in inputs) and any(n % 64 for n in inputs) else 64


class _Holder(nnx.Module):
    """Parameters codes, scale, zero, row_scale and bias (None where there is none)."""

    def __init__(self, packed: Packed, bias: nnx.Param | None, dtype: Any, implementation: Any):
        arrays = (packed.codes, packed.scale, packed.zero, packed.row_scale)
        self.codes, self.scale, self.zero, self.row_scale = (
            None if array is None else nnx.Param(array) for array in arrays
        )
        self.bias = nnx.data(bias)
        self.scheme, self.group_size = packed.scheme, packed.group_size
        self.dtype, self.implementation = dtype, implementation

    @property
    def packed(self) -> Packed:
        """The weight; of a `PackedLinear` with an `order`, its columns in that order."""
        parts = (self.codes, self.scale, self.zero, self.row_scale)
        arrays = (None if part is None else part.get_value() for part in parts)
        return Packed(*arrays, scheme=self.scheme, group_size=self.group_size)  # pyright: ignore

    def dequantize(self) -> Float[Array, "O I"]:
        """The weight in the dtype that the module computes in."""
        return dequantize(self.packed, self.dtype)


class PackedLinear(_Holder):
    """A `Linear` whose weight is packed and frozen, called like one; `ops.linear` says how it
    computes.

    order: int32 [I], the input that each column of the packed weight is for; None: in order. GPTQ
        with desc_act puts inputs into one group that do not lie side by side.
    """

    def __init__(
        self,
        packed: Packed,
        bias: nnx.Param | None = None,
        *,
        order: Int[Array, " I"] | None = None,
        dtype: Any = jnp.bfloat16,
        implementation: Any = "auto",
    ):
        super().__init__(packed, bias, dtype, implementation)
        inputs = packed.shape[1]
        if order is not None and (order.shape != (inputs,) or order.dtype != jnp.int32):
            raise ValueError(
                f"PackedLinear: order is {order.dtype} {list(order.shape)}, where a permutation of "
                f"the inputs is int32 [{inputs}]"
            )
        self.order = None if order is None else nnx.Param(order)

    def arranged(self, x: Float[Array, "*B I"]) -> Float[Array, "*B I"]:
        """Inputs as the columns of the packed weight want them."""
        if self.order is None:
            return x
        # A permutation: nothing to clamp, and in the gradient nothing to add
        places = x.at[..., self.order[...]]
        return places.get(mode="promise_in_bounds", unique_indices=True)

    def dequantize(self) -> Float[Array, "O I"]:
        weight = super().dequantize()
        if self.order is None:
            return weight
        places = jnp.zeros_like(weight).at[:, self.order[...]]
        return places.set(weight, mode="promise_in_bounds", unique_indices=True)

    def __call__(self, x: Float[Array, "*B I"], *, out_dtype=None) -> Float[Array, "*B O"]:
        return ops.linear(
            self.arranged(x.astype(self.dtype)),
            self.packed,
            None if self.bias is None else self.bias[...],
            out_dtype=out_dtype,
            implementation=self.implementation,
        )


class PackedEmbedding(_Holder):
    """An `Embedding` whose table is packed and frozen: for the gather and for a tied head."""

    def __init__(
        self,
        packed: Packed,
        *,
        scale_by: float | None = None,
        dtype: Any = jnp.bfloat16,
        implementation: Any = "auto",
    ):
        super().__init__(packed, None, dtype, implementation)
        self.scale_by = scale_by

    def __call__(self, ids: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        return ops.embedding(
            self.packed,
            ids,
            scale=self.scale_by,
            dtype=jnp.dtype(self.dtype),
            implementation=self.implementation,
        )

    def attend(self, x: Float[Array, "*B D"], *, out_dtype=None) -> Float[Array, "*B V"]:
        return ops.linear(
            x.astype(self.dtype),
            self.packed,
            out_dtype=out_dtype,
            implementation=self.implementation,
        )


def quantize(
    model: nnx.Module,
    scheme: str,
    group_size: int | None = None,
    *,
    head: str | None = None,
    keep: str | Sequence[str] = (),
    from_host: bool = False,
) -> None:
    """Packs the weights of a model in place, one after the other, letting go of each before the
    next: of the projections in `scheme`, of the head in `head`, with the names that stay as the
    module says.

    scheme, head: "int8", "int4", "fp8", "nvfp4", "mxfp4", "mxfp8" or "ternary"; head=None leaves
        the head as it is. "ternary" makes x int8 a token, too; of a BitNet it is what the model
        computes anyway, in fewer bytes, and the one scheme that its projections take.
    group_size: numbers along the inputs that share a scale, of the projections; None: the scheme's
        own, and for int4 the largest of 128, 64 and 32 that divides, or else the largest even one
        below 128 that does.
    keep: projections that stay: the last part of a name, or a pattern of whole dotted names.
    from_host: of a model that was loaded into the host's memory, with `on_host()` (of this module:
        `from jaxllm.quantize import on_host`). Each weight is brought to the default device to be
        packed there, and then all that stays as it is: the device never holds more than the packed
        model and one weight in work.
    Raises: ValueError for an unknown scheme, a group size that does not divide a weight's inputs,
    weights that are NaN or infinite (it names the first), a name in `keep` that is nobody's or
    the head's where `head` packs it, a projection that is BitNet's or packed in another way and not
    in `keep`, or a model with nothing to pack; then nothing is changed.
    """
    check_scheme(scheme)
    if head is not None:
        check_scheme(head)
    whole = isinstance(group_size, int | np.integer) and not isinstance(group_size, bool)
    if group_size is not None and not whole:
        raise ValueError(f"quantize: group_size must be an integer or None, got {group_size!r}")
    if not isinstance(keep, Iterable):
        raise ValueError(f"quantize: keep must be a list of names or patterns, got {keep!r:.60}")
    keep = (keep,) if isinstance(keep, str) else tuple(keep)
    if not all(isinstance(name, str) for name in keep):
        raise ValueError(f"quantize: keep must hold names or patterns, got {keep!r:.60}")
    _check_projections(model, scheme, group_size, keep)
    kinds = (Linear, BitLinear) if scheme == "ternary" else (Linear,)
    wanted = dict.fromkeys(linears(model, (*KEEP, *keep), kinds), (scheme, group_size))
    every = {**linears(model, (), kinds), **_tied_table(model)}
    names = [*every, *packed_weights(model)]
    for pattern in keep:
        if not any(_named(name, pattern) for name in names):
            raise ValueError(f"quantize: keep names {pattern!r}, which no projection is called")
    if head is not None:
        heads = [name for name in every if any(_named(name, head) for head in _HEADS)]
        if not heads:
            raise ValueError("quantize: the model has no head that is not packed")
        if kept := [pattern for pattern in keep if _named(heads[0], pattern)]:
            raise ValueError(
                f"quantize: keep names {kept[0]!r}, which is the head, and head packs that in "
                f"{head!r}"
            )
        wanted[heads[0]] = (head, None)
    if not wanted:
        raise ValueError("quantize: the model has no linear layer that is not packed or kept")
    for name, how in wanted.items():
        _check(name, every[name][2].weight[...], *how)
    # Flax's split and merge, by which a checkpoint is loaded, leave cycles that hold all weights
    gc.collect()
    found = {name: every[name] for name in wanted}
    every.clear()
    for name, (kind, size) in wanted.items():
        parent, attribute, module = found.pop(name)
        if from_host:
            _bring(module.weight)
        packed = _pack(module, kind, size)
        if from_host:
            # A host that runs ahead would bring the next weights beside this one
            jax.block_until_ready(packed.packed)
        setattr(parent, attribute, packed)
        del module, packed
    if from_host:
        for _, parameter in nnx.iter_graph(model):
            if isinstance(parameter, nnx.Param):
                _bring(parameter)


def on_host() -> contextlib.AbstractContextManager[object]:
    """New arrays in the host's memory, if JAX was not started without it (JAX_PLATFORMS=cuda)."""
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms and "cpu" not in platforms.split(","):
        return contextlib.nullcontext()
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def _check_projections(
    model: nnx.Module, scheme: str, group_size: int | None, keep: Sequence[str]
) -> None:
    """Raises: ValueError for the first that would stay as it is, and was asked for in `scheme`."""
    for name in linears(model, keep, (BitLinear,)) if scheme != "ternary" else ():
        raise ValueError(
            f"quantize: {name} is a ternary layer, which is packed in 'ternary', not in {scheme!r}"
        )
    for name, packed in packed_weights(model).items():
        if any(_named(name, pattern) for pattern in (*_HEADS, *keep)):
            continue
        if packed.scheme != scheme:
            raise ValueError(
                f"quantize: {name} is packed in {packed.scheme} already, and not again in {scheme}"
            )
        if group_size not in (None, packed.group_size):
            raise ValueError(
                f"quantize: {name} is packed by groups of {packed.group_size} already, and not "
                f"again of {group_size}"
            )


def _check(name: str, weight: Float[Array, "O I"], scheme: str, group_size: int | None) -> None:
    check_group_size(scheme, weight.shape[1], group_size, of=f" of {name}")
    check_finite(weight, name)


def _pack(module: Any, scheme: str, group_size: int | None) -> Any:
    weight = module.weight[...]
    if isinstance(module, BitLinear):
        weight = weight.astype(module.dtype)  # first, as the layer does
    packed = pack(weight, scheme, group_size)
    kwargs = {"dtype": module.dtype, "implementation": module.implementation}
    if isinstance(module, Embedding):
        return PackedEmbedding(packed, scale_by=module.scale, **kwargs)
    return PackedLinear(packed, module.bias, **kwargs)


def _bring(parameter: nnx.Param) -> None:
    """To the default device, where it stays free to follow other arrays."""
    here = jnp.zeros(()).devices()
    if parameter[...].devices() != here:
        parameter.set_value(jnp.asarray(np.asarray(parameter[...])))


def packed_weights(model: nnx.Module) -> dict[str, Packed]:
    """Every packed weight, by the dotted name of its module; as `packed` has it."""
    return {
        name: module.packed for name, _, _, module in _modules(model) if isinstance(module, _Holder)
    }


def linears(
    model: nnx.Module, keep: Sequence[str], kinds: Sequence[type[Linear]] = (Linear,)
) -> dict[str, tuple[Any, str, Linear]]:
    """Each linear layer by its dotted name, but those that `keep` names: what holds it, under
    which attribute, and it.
    """
    found = {}
    for name, parent, attribute, module in _modules(model):
        # A subclass computes otherwise
        if type(module) in kinds and not any(_named(name, pattern) for pattern in keep):
            found[name] = (parent, attribute, module)
    return found


def _tied_table(model: nnx.Module) -> dict[str, tuple[Any, str, Any]]:
    """The embedding of a model without a head of its own."""
    if getattr(model, "lm_head", None) is not None:
        return {}
    return {
        name: (parent, attribute, module)
        for name, parent, attribute, module in _modules(model)
        if name == "embed_tokens" and type(module) is Embedding
    }


def _modules(model: nnx.Module) -> Iterator[tuple[str, Any, str, Any]]:
    modules = dict(nnx.iter_modules(model))
    for path, module in modules.items():
        if path:
            yield ".".join(map(str, path)), modules[path[:-1]], str(path[-1]), module


def _named(name: str, pattern: str) -> bool:
    """Whether a module is meant; one beside an adapter (`lora.Adapted.base`) has its old name."""
    return any(
        each.rpartition(".")[2] == pattern or fnmatch.fnmatchcase(each, pattern)
        for each in (name, name.removesuffix(".base"))
    )
