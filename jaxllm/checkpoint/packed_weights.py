"""Packed weights as files have them to a `Packed`: bytes are moved, no number is computed.

Each layout says which tensors a module has, with dtypes and shapes, and how they become codes
[O, I / numbers a byte], scales [I / G, O], zero points and row scales; on the host, in NumPy. A
word of 32 bits holds the codes of 8 numbers, the first in its lowest bits:

    codes, mxfp8    weight [O, I], weight_scale                       (compressed-tensors)
    words           weight_packed int32 [O, I / 8 (4 of 8 bits)], weight_scale, weight_zero_point
                    int32 [O / 8, I / G], weight_shape                (compressed-tensors)
    nvfp4, mxfp4    weight_packed uint8 [O, I / 2], weight_scale [O, I / G]; of nvfp4
                    weight_global_scale, one over the tensor's scale  (compressed-tensors)
    modelopt_nvfp4  weight uint8 [O, I / 2], weight_scale, weight_scale_2, the tensor's scale
    modelopt_fp8    weight [O, I], weight_scale, one number
    gptq            qweight int32 [I / 8, O], qzeros int32 [I / G, O / 8], scales [I / G, O], g_idx
                    [I], the group of each input; the zero points stored less 1, unless the format
                    is gptq_v2
    bitlinear, autobitlinear    weight uint8 [O / 4, I], weight_scale, one number: see bitnet.py
    awq             qweight int32 [I, O / 8], qzeros int32 [I / G, O / 8], scales [I / G, O]; a
                    word's codes are those of its outputs 0, 2, 4, 6, 1, 3, 5, 7

Sources: specs of compressed-tensors 0.20, NVIDIA ModelOpt 0.33; Frantar et al. 2022,
arXiv:2210.17323, with the files of AutoGPTQ 0.7; Lin et al. 2023, arXiv:2306.00978, with those of
AutoAWQ 0.2 (no code taken).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int32, UInt8

from jaxllm.checkpoint import bitnet
from jaxllm.checkpoint.quantization_config import Form
from jaxllm.checkpoint.safetensors_file import FLOATS, INTEGERS, Tensor, read
from pallas_kernels.packed import Packed

Shape = tuple[int, ...]
Arrays = Mapping[str, np.ndarray]

# What stands beside weights for activations and the cache, which are not quantised here.
OF_ACTIVATIONS = re.compile(r".*\.(input|output|k|v|q)_(scale|global_scale|zero_point)")

_SCALES = ("F32", "F16", "BF16")
_E4M3 = ("F8_E4M3",)
_WORDS, _BYTES = ("I32",), ("U8",)
_AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])
_ROWS = 256  # outputs whose codes are a byte each at a time
NO_ZERO = 8  # int4's code for 0 where there are no zero points


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor that a module may have: its dtypes and its shapes in the file, any of them."""

    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    optional: bool = False


def parts(form: Form, shape: Shape) -> dict[str, Part]:
    """The tensors of a module [O, I] by the last part of their names."""
    return LAYOUTS[form.layout][0](form, *shape)


def fault(form: Form, shape: Shape, found: Mapping[str, Tensor]) -> str | None:
    """What keeps the tensors of a module from being a weight [O, I] in this form, in a phrase."""
    outputs, inputs = shape
    if form.scheme == "ternary" and (inputs % 4 or outputs % 4):
        return f"{outputs} outputs and {inputs} inputs are not packed four to a byte"
    size = form.group_size or (form.block[1] if form.block else 1)
    if inputs % size:
        return f"{inputs} inputs do not divide into groups of {size}"
    if form.scheme in ("int4", "nvfp4", "mxfp4") and inputs % 2:
        return f"{inputs} inputs are not packed two to a byte"
    if form.layout in ("gptq", "awq") and (outputs % 8 or (form.layout == "gptq" and inputs % 8)):
        return f"{outputs} outputs and {inputs} inputs are not packed eight to a word"
    wanted = parts(form, shape)
    for name, part in wanted.items():
        if name not in found:
            if part.optional:
                continue
            return f"has no {name}"
        tensor = found[name]
        if tensor.dtype not in part.dtypes or tensor.shape not in part.shapes:
            return (
                f"{name} is {tensor.dtype} {list(tensor.shape)}, where its config asks for "
                f"{' or '.join(part.dtypes)} {' or '.join(str(list(s)) for s in part.shapes)}"
            )
    surplus = sorted(found.keys() - wanted.keys())
    return f"has {', '.join(surplus)}, which its config has no place for" if surplus else None


def load(
    form: Form,
    found: Mapping[str, Tensor],
    shape: Shape,
    owner: str,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> tuple[Packed, Int32[np.ndarray, " I"] | None]:
    """The weight, of tensors without a fault, as NumPy arrays, and the input that each of its
    columns is for (None: in order). Beside it the host holds the module's tensors.

    Raises: ValueError, which names `owner`, if what they hold contradicts the config.
    """
    arrays = {name: _whole(tensor, on_bytes) for name, tensor in found.items()}
    codes, scale, zero, row_scale = LAYOUTS[form.layout][1](form, shape, arrays, owner)
    order = _order(arrays["g_idx"], form.group_size, owner) if "g_idx" in arrays else None
    if order is not None:
        _reorder(codes, order)
    if zero is not None and np.all(zero == NO_ZERO):
        zero = None
    if zero is not None and not form.zero_points:
        raise ValueError(f"{owner}: has zero points, which its config says it has not")
    grouped = scale is not None
    packed = Packed(
        codes=codes,  # pyright: ignore
        scale=None if scale is None else np.ascontiguousarray(scale),  # pyright: ignore
        zero=None if zero is None else np.ascontiguousarray(zero),  # pyright: ignore
        row_scale=row_scale,
        scheme=form.scheme,
        group_size=shape[1] // scale.shape[0] if grouped else None,
    )
    return packed, order


def _order(
    groups: Int32[np.ndarray, " I"], group_size: int | None, owner: str
) -> Int32[np.ndarray, " I"] | None:
    """The inputs of one group after the other, of each input's group; None if they lie so."""
    size = group_size or len(groups)
    count = len(groups) // size
    for group, found in zip(*np.unique(groups, return_counts=True), strict=True):
        if not 0 <= group < count or found != size:
            raise ValueError(
                f"{owner}: g_idx puts {found} inputs into group {group}, where its config has "
                f"{count} groups of {size}"
            )
    order = np.argsort(groups, kind="stable").astype(np.int32)
    return None if np.array_equal(order, np.arange(len(groups))) else order


def _reorder(codes: np.ndarray, order: np.ndarray) -> None:
    """Brings the inputs of codes [O, I / 2] into an order [I], in place.

    Some rows at a time: a byte each, the numbers of a whole module take twice the codes.
    """
    for start in range(0, len(codes), _ROWS):
        some = codes[start : start + _ROWS]
        some[:] = _pairs(_nibbles(some)[:, order])


def is_zero(tensor: Tensor) -> bool:
    """Whether a tensor of floats has zeros only."""
    return tensor.dtype in FLOATS and not np.any(_whole(tensor, lambda count: None))


def rows(packed: Packed, first: int, count: int) -> Packed:
    """`count` outputs of a weight of NumPy arrays, from `first` on."""
    cut = slice(first, first + count)
    return dataclasses.replace(
        packed,
        codes=packed.codes[cut],
        scale=None if packed.scale is None else packed.scale[:, cut],
        zero=None if packed.zero is None else packed.zero[:, cut],
        row_scale=None if packed.row_scale is None else packed.row_scale[cut],
    )


DTYPES = FLOATS | INTEGERS


def _whole(tensor: Tensor, on_bytes: Callable[[int], None]) -> np.ndarray:
    if not tensor.shape:
        tensor = dataclasses.replace(tensor, shape=(1,))
    return read(tensor, DTYPES[tensor.dtype], on_bytes=on_bytes)


# -------------------------------------------------------------------------------------- layouts


def _scale_shapes(form: Form, outputs: int, inputs: int) -> tuple[Shape, ...]:
    if form.strategy == "tensor":
        return (1,), (), (1, 1)
    if form.strategy == "channel":
        return (outputs, 1), (outputs,)
    if form.block:
        return ((-(-outputs // form.block[0]), -(-inputs // form.block[1])),)
    return ((outputs, inputs // (form.group_size or inputs)),)


def _scales(form: Form, shape: Shape, scale: np.ndarray) -> tuple[Any, Any]:
    """(scale, row_scale) of a weight_scale."""
    outputs, _ = shape
    if form.strategy == "tensor":
        scale = np.broadcast_to(scale.reshape(1), (outputs,))
    if form.block:
        return np.repeat(scale, form.block[0], axis=0)[:outputs].T, None
    if form.strategy == "group":
        return scale.T, None
    if form.scheme == "int4":
        return scale.reshape(1, outputs), None
    return None, scale.reshape(outputs).astype(np.float32)


def _codes_parts(form: Form, outputs: int, inputs: int) -> dict[str, Part]:
    stored = {"int8": ("I8",), "fp8": _E4M3, "mxfp8": _E4M3}[form.scheme]
    scales = _BYTES if form.scheme == "mxfp8" else _SCALES
    return {
        "weight": Part(stored, ((outputs, inputs),)),
        "weight_scale": Part(scales, _scale_shapes(form, outputs, inputs)),
    }


def _codes(form: Form, shape: Shape, arrays: Arrays, owner: str):
    del owner
    scale, row_scale = _scales(form, shape, arrays["weight_scale"])
    return arrays["weight"], scale, None, row_scale


def _words_parts(form: Form, outputs: int, inputs: int) -> dict[str, Part]:
    bits = 4 if form.scheme == "int4" else 8
    wanted = {
        "weight_packed": Part(_WORDS, ((outputs, -(-inputs * bits // 32)),)),
        "weight_scale": Part(_SCALES, _scale_shapes(form, outputs, inputs)),
        "weight_shape": Part(("I64", "I32"), ((2,),)),
    }
    if form.zero_points:
        words, groups = -(-outputs // 8), inputs // (form.group_size or inputs)
        wanted["weight_zero_point"] = Part(_WORDS, ((words, groups),))
    return wanted


def _words(form: Form, shape: Shape, arrays: Arrays, owner: str):
    outputs, inputs = shape
    said = tuple(arrays["weight_shape"].tolist())
    if said != shape:
        raise ValueError(f"{owner}: weight_shape says {list(said)}, the model has {list(shape)}")
    stored = arrays["weight_packed"].view(np.uint8)
    if form.scheme == "int4":
        codes = stored[:, : inputs // 2]
    else:
        codes = (stored[:, :inputs] ^ np.uint8(128)).view(np.int8)
    zero = arrays.get("weight_zero_point")
    if zero is not None:
        zero = _nibbles(np.ascontiguousarray(zero.T))[:, :outputs]
    scale, row_scale = _scales(form, shape, arrays["weight_scale"])
    return np.ascontiguousarray(codes), scale, zero, row_scale


def _nvfp4_parts(form: Form, outputs: int, inputs: int) -> dict[str, Part]:
    return {
        "weight_packed": Part(_BYTES, ((outputs, inputs // 2),)),
        "weight_scale": Part(_E4M3, _scale_shapes(form, outputs, inputs)),
        "weight_global_scale": Part(("F32",), ((1,), ())),
    }


def _nvfp4(form: Form, shape: Shape, arrays: Arrays, owner: str):
    del form
    stored = arrays["weight_global_scale"].reshape(1)
    if not (np.isfinite(stored).all() and (stored > 0).all()):
        raise ValueError(f"{owner}: weight_global_scale is {stored[0]}, not a positive number")
    row_scale = np.broadcast_to(np.float32(1) / stored, shape[:1])
    return arrays["weight_packed"], arrays["weight_scale"].T, None, row_scale


def _mxfp4_parts(form: Form, outputs: int, inputs: int) -> dict[str, Part]:
    return {
        "weight_packed": Part(_BYTES, ((outputs, inputs // 2),)),
        "weight_scale": Part(_BYTES, _scale_shapes(form, outputs, inputs)),
    }


def _mxfp4(form: Form, shape: Shape, arrays: Arrays, owner: str):
    del form, shape, owner
    return arrays["weight_packed"], arrays["weight_scale"].T, None, None


def _modelopt_nvfp4_parts(form: Form, outputs: int, inputs: int) -> dict[str, Part]:
    return {
        "weight": Part(_BYTES, ((outputs, inputs // 2),)),
        "weight_scale": Part(_E4M3, _scale_shapes(form, outputs, inputs)),
        "weight_scale_2": Part(("F32",), ((), (1,))),
    }


def _modelopt_nvfp4(form: Form, shape: Shape, arrays: Arrays, owner: str):
    del form, owner
    row_scale = np.broadcast_to(arrays["weight_scale_2"].reshape(1), shape[:1])
    return arrays["weight"], arrays["weight_scale"].T, None, row_scale


def _gptq_parts(form: Form, outputs: int, inputs: int) -> dict[str, Part]:
    groups = inputs // (form.group_size or inputs)
    return {
        "qweight": Part(_WORDS, ((inputs // 8, outputs),)),
        "qzeros": Part(_WORDS, ((groups, outputs // 8),)),
        "scales": Part(_SCALES, ((groups, outputs),)),
        "g_idx": Part(_WORDS, ((inputs,),), optional=True),
    }


def _gptq(form: Form, shape: Shape, arrays: Arrays, owner: str):
    del shape, owner
    zeros = arrays["qzeros"].view(np.uint32)
    if form.plus_one:
        # Of whole words, as 1 was taken off: a 0 has borrowed from the code above it
        zeros = zeros + np.uint32(0x11111111)
    # A word [I / 8, O] is 4 bytes of a row of codes [O, I / 2]; a copy, which `_reorder` writes to
    codes = np.array(arrays["qweight"].T, order="C").view(np.uint8)
    return codes, arrays["scales"], _nibbles(zeros), None


def _awq_parts(form: Form, outputs: int, inputs: int) -> dict[str, Part]:
    groups = inputs // (form.group_size or inputs)
    return {
        "qweight": Part(_WORDS, ((inputs, outputs // 8),)),
        "qzeros": Part(_WORDS, ((groups, outputs // 8),)),
        "scales": Part(_SCALES, ((groups, outputs),)),
    }


def _awq(form: Form, shape: Shape, arrays: Arrays, owner: str):
    del form, owner
    outputs, inputs = shape
    words = arrays["qweight"].view(np.uint32)
    codes = np.empty((outputs // 8, 8, inputs // 2), np.uint8)
    for place, output in enumerate(_AWQ_ORDER):
        four = (words >> np.uint32(4 * place)).astype(np.uint8) & np.uint8(15)
        codes[:, output] = _pairs(four.T)
    zeros = _nibbles(arrays["qzeros"]).reshape(-1, outputs // 8, 8)
    zeros = zeros[..., np.argsort(_AWQ_ORDER)].reshape(-1, outputs)
    return codes.reshape(outputs, -1), arrays["scales"], zeros, None


def _pairs(codes: UInt8[np.ndarray, "O I"]) -> UInt8[np.ndarray, "O I2"]:
    """Two codes a byte, the first in its lowest bits."""
    return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)


def _nibbles(words: np.ndarray) -> UInt8[np.ndarray, "J C"]:
    """The codes of each word or byte [J, W], the lowest bits first, a byte each."""
    stored = words.view(np.uint8)
    both = np.stack([stored & np.uint8(15), stored >> np.uint8(4)], axis=-1)
    return both.reshape(words.shape[0], -1)


def _bitnet_parts(form: Form, outputs: int, inputs: int) -> dict[str, Part]:
    return {
        "weight": Part(_BYTES, ((outputs // bitnet.PER_BYTE, inputs),)),
        "weight_scale": Part(_SCALES, _scale_shapes(form, outputs, inputs)),
    }


def _bitnet(form: Form, shape: Shape, arrays: Arrays, owner: str):
    scale = arrays["weight_scale"].astype(np.float32).reshape(1)
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise ValueError(f"{owner}: weight_scale is {scale[0]}, not a positive number")
    if form.layout == "bitlinear":
        scale = np.float32(1) / scale
    return bitnet.from_hub(arrays["weight"], owner), None, None, np.broadcast_to(scale, shape[:1])


LAYOUTS: dict[str, tuple[Callable[..., dict[str, Part]], Callable[..., Any]]] = {
    "codes": (_codes_parts, _codes),
    "words": (_words_parts, _words),
    "nvfp4": (_nvfp4_parts, _nvfp4),
    "mxfp4": (_mxfp4_parts, _mxfp4),
    "mxfp8": (_codes_parts, _codes),
    "modelopt_nvfp4": (_modelopt_nvfp4_parts, _modelopt_nvfp4),
    "modelopt_fp8": (_codes_parts, _codes),
    "gptq": (_gptq_parts, _gptq),
    "awq": (_awq_parts, _awq),
    "bitlinear": (_bitnet_parts, _bitnet),
    "autobitlinear": (_bitnet_parts, _bitnet),
}

NAMES = frozenset(
    "weight weight_packed weight_scale weight_shape weight_zero_point weight_global_scale "
    "weight_scale_2 weight_g_idx qweight qzeros scales g_idx".split()
)
