"""The packed modules of a checkpoint: found and read one after the other; and written, each tensor
made when its turn comes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from jaxllm.checkpoint import bitnet, compressed_tensors, packed_weights
from jaxllm.checkpoint.folder import enumerate_some
from jaxllm.checkpoint.placement import check_sharding, to_host
from jaxllm.checkpoint.quantization_config import Form, Quantization
from jaxllm.checkpoint.safetensors_file import Source, Tensor
from jaxllm.checkpoint.tensor_names import layout_of, stored_tensors
from jaxllm.layers import BitLinear, Linear
from jaxllm.quantize import PackedLinear, linears
from pallas_kernels.packed import Packed
from pallas_kernels.quantize import check_scales, quantize

Shape = tuple[int, ...]
Ordered = tuple[Packed, jax.Array | None]  # a weight and the input that each of its columns is for

_KINDS = (Linear, BitLinear)  # that a checkpoint may have packed


@dataclasses.dataclass(frozen=True)
class PackedModule:
    """One module of a file: its tensors by the last part of their names, and the linear layers
    that its rows are, in order, with how many each has.
    """

    name: str
    form: Form
    shape: Shape
    tensors: Mapping[str, Tensor]
    layers: Mapping[str, int]

    @property
    def scales_bias(self) -> bool:
        """Whether a bias is stored as a part of the sum that the weight's scale multiplies."""
        return self.form == bitnet.FORM

    @property
    def size_bytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    def load(
        self,
        sharding: Callable[[str, Shape], Sharding | None],
        on_bytes: Callable[[int], None],
    ) -> dict[str, Ordered]:
        """The weight of each linear layer and its order of inputs, every array where `sharding`
        says for its path and shape ("layers.0.mlp.up_proj.codes"). Beside them the host holds this
        one module.

        Raises: ValueError if its tensors contradict the config, a scale is no positive number, or
        an array cannot be spread so.
        """
        owner = f"{next(iter(self.tensors.values())).file}: {self.name}"
        whole, order = packed_weights.load(self.form, self.tensors, self.shape, owner, on_bytes)
        found, first = {}, 0
        for layer, rows in self.layers.items():
            part = packed_weights.rows(whole, first, rows)
            arrays = {
                field: _put(f"{layer}.{field}", array, sharding)
                for field in ("codes", "scale", "zero", "row_scale")
                if (array := getattr(part, field)) is not None
            }
            weight, places = dataclasses.replace(part, **arrays), None
            if order is not None:
                places = _put(f"{layer}.order", order, sharding)
            check_scales(weight, owner)
            found[layer] = weight, places
            first += rows
        jax.block_until_ready(list(found.values()))  # a copy under way holds the host's memory
        return found

    def zeros(self) -> dict[str, Ordered]:
        """Zeros with the shapes and dtypes of `load`'s weights: for a model of shapes alone, made
        by `nnx.eval_shape`. Where the config has zero points for int4 they are counted; an order of
        inputs, which the file alone knows, is not.
        """
        form = self.form
        size = form.block[1] if form.block else form.group_size
        if form.scheme == "int4" and size is None:
            size = self.shape[1]
        [scale] = [x for last, x in self.tensors.items() if last in ("weight_scale", "scales")]
        # Groups of int8, int4 and fp8 have scales in the weight's dtype; others have none in it
        stored = packed_weights.DTYPES[scale.dtype]
        dtype = stored if stored.itemsize > 1 else np.dtype(np.float32)
        return {
            layer: (
                quantize(
                    jnp.zeros((rows, self.shape[1]), dtype),
                    form.scheme,
                    size,
                    zero_points=form.zero_points,
                ),
                None,
            )
            for layer, rows in self.layers.items()
        }


def _put(
    path: str, array: np.ndarray, sharding: Callable[[str, Shape], Sharding | None]
) -> jax.Array:
    array = np.ascontiguousarray(array)
    place = sharding(path, array.shape)
    check_sharding(path, array.shape, place)
    if place is None:
        return jax.device_put(array)
    return jax.make_array_from_callback(array.shape, place, lambda index: array[index])


def find(
    folder: Path,
    quantization: Quantization,
    tensors: Mapping[str, Tensor],
    model: nnx.Module,
    *,
    fused: bool,
) -> tuple[list[PackedModule], dict[str, Tensor]]:
    """The packed modules among the linear layers of a model, which may be of shapes alone, and the
    tensors that are not theirs; those of activations and caches are left out.

    `fused` says whether the family stores the modules of `FUSED` as one tensor.
    Raises: ValueError with every module whose tensors are not those that the config says.
    """
    every = {path: linear for path, (*_, linear) in linears(model, (), _KINDS).items()}
    # GPTQ's files may have zeros for others, too
    biased = {path for path, linear in every.items() if linear.bias is not None}
    rest = {
        name: tensor
        for name, tensor in tensors.items()
        if not packed_weights.OF_ACTIVATIONS.fullmatch(name)
    }
    weights = {f"{path}.weight": linear.weight.shape for path, linear in every.items()}
    modules, faults = [], []
    for name, stored in stored_tensors(weights, fused=fused, layout=layout_of(tensors)).items():
        module = name.removesuffix(".weight")
        found = {
            last: rest[f"{module}.{last}"] for last in _LAST_PARTS if f"{module}.{last}" in rest
        }
        form = quantization.form(module)
        if form is None:
            if packed := sorted(found.keys() - {"weight"}):
                faults.append(f"{module} has {', '.join(packed)}, and is not packed by it")
            continue
        if problem := packed_weights.fault(form, stored.shape, found):
            faults.append(f"{module}: {problem}")
            continue
        layers = {path.removesuffix(".weight"): weights[path][0] for path in stored.parameters}
        modules.append(PackedModule(module, form, stored.shape, found, layers))
        for last in found:
            del rest[f"{module}.{last}"]
        bias = rest.get(f"{module}.bias")
        if bias is not None and not biased & layers.keys() and packed_weights.is_zero(bias):
            del rest[f"{module}.bias"]
    if faults:
        raise ValueError(
            f"{folder}: the tensors contradict {quantization.owner} in {len(faults)} "
            f"{'module' if len(faults) == 1 else 'modules'}: {enumerate_some(faults, most=3)}"
        )
    return modules, rest


def put(
    model: nnx.Module, weights: Iterable[tuple[str, Ordered]], *, scaled: Collection[str] = ()
) -> None:
    """Makes `PackedLinear`s of the linear layers of these paths, one after the other.

    scaled: those of a module that `scales_bias`.
    """
    places = linears(model, (), _KINDS)
    for path, (weight, order) in weights:
        parent, attribute, linear = places.pop(path)
        bias = linear.bias
        if bias is not None and path in scaled:
            assert weight.row_scale is not None, "a ternary weight"
            bias = nnx.Param((bias[...].astype(jnp.float32) * weight.row_scale).astype(bias.dtype))
        like = {"dtype": linear.dtype, "implementation": linear.implementation}
        setattr(parent, attribute, PackedLinear(weight, bias, order=order, **like))


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some outputs of a packed weight: a linear layer, or a part of what `jaxllm.fuse` joined."""

    packed: Packed
    first: int
    count: int


class _Joined:
    """The rows of several weights below one another, as the `Packed` of NumPy arrays that they
    are; each of its arrays is brought to the host when it is asked for.
    """

    def __init__(self, parts: Sequence[Rows]):
        first = parts[0].packed
        self.parts, self.scheme, self.group_size = parts, first.scheme, first.group_size
        self.shape = sum(part.count for part in parts), first.shape[1]

    @property
    def codes(self) -> np.ndarray:
        return self._join("codes", 0)

    @property
    def scale(self) -> np.ndarray | None:
        return None if self.parts[0].packed.scale is None else self._join("scale", 1)

    @property
    def row_scale(self) -> np.ndarray | None:
        return None if self.parts[0].packed.row_scale is None else self._join("row_scale", 0)

    @property
    def zero(self) -> np.ndarray | None:
        some = any(part.packed.zero is not None for part in self.parts)
        return self._join("zero", 1) if some else None

    def _join(self, field: str, axis: int) -> np.ndarray:
        found = []
        for part in self.parts:
            array = getattr(part.packed, field)
            if array is None:  # zero points of a part that has none
                array = np.full(part.packed.scale.shape, packed_weights.NO_ZERO, np.uint8)  # pyright: ignore
            else:
                array = to_host(array)
            cut = slice(part.first, part.first + part.count)
            found.append(array[cut] if axis == 0 else array[:, cut])
        return found[0] if len(found) == 1 else np.concatenate(found, axis=axis)


def sources(
    layers: Mapping[str, Rows], *, fused: bool, biased: bool
) -> tuple[list[Source], dict[str, Form]]:
    """The tensors to write for packed linear layers ("layers.0.mlp.up_proj"), in the forms of
    compressed-tensors, and the form of each module by its name in the file.

    biased: whether any of them has a bias, which is not written here.
    Raises: NotImplementedError for what those forms cannot hold.
    """
    shapes = {f"{path}.weight": (rows.count, rows.packed.shape[1]) for path, rows in layers.items()}
    found, forms = [], {}
    for name, stored in stored_tensors(shapes, fused=fused).items():
        module = name.removesuffix(".weight")
        joined = _Joined([layers[path.removesuffix(".weight")] for path in stored.parameters])
        kinds = {_kind(part.packed) for part in joined.parts}
        if len(kinds) > 1:
            raise NotImplementedError(
                f"save: {module} is one tensor of the family, of parts that are packed in "
                f"{len(kinds)} ways"
            )
        compressed_tensors.check(joined, module)
        form = forms[module] = compressed_tensors.form_of(joined, biased=biased)
        for last, part in packed_weights.parts(form, joined.shape).items():
            scale = joined.parts[0].packed.scale
            dtype = packed_weights.DTYPES[part.dtypes[0]]
            if last == "weight_scale":
                dtype = np.dtype(np.float32 if scale is None else scale.dtype)
            make = functools.partial(_tensor, last, joined, form)
            found.append(Source(f"{module}.{last}", dtype, part.shapes[0], make))
    return found, forms


def _kind(packed: Packed) -> tuple[Any, ...]:
    dtype = None if packed.scale is None else packed.scale.dtype
    return packed.scheme, packed.group_size, dtype, packed.codes.shape[1]


def _tensor(name: str, joined: _Joined, form: Form) -> list[np.ndarray]:
    return [compressed_tensors.tensor(name, joined, form)]


# Every tensor that some layout has beside a bias
_LAST_PARTS = sorted(packed_weights.NAMES)
