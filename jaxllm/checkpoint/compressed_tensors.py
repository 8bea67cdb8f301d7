"""A model with packed weights as a compressed-tensors checkpoint: its tensors, and what is said of
them in config.json; of ternary weights as a BitNet one. `packed_weights` reads them.

int8 and int4 become "pack-quantized", fp8 "float-quantized", nvfp4, mxfp4 and mxfp8 the formats of
their names. Codes and scales are moved, not computed; of nvfp4 the tensor's scale, and of ternary
weights beside biases theirs, are stored as reciprocals, which are rounded.
Source: compressed-tensors 0.20 (no code taken).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.checkpoint import bitnet
from jaxllm.checkpoint.quantization_config import Form

# By scheme: the layout of its tensors, the format's name, and what the numbers are
_FORMATS = {
    "int4": ("words", "pack-quantized", "int", 4),
    "int8": ("words", "pack-quantized", "int", 8),
    "fp8": ("codes", "float-quantized", "float", 8),
    "nvfp4": ("nvfp4", "nvfp4-pack-quantized", "float", 4),
    "mxfp4": ("mxfp4", "mxfp4-pack-quantized", "float", 4),
    "mxfp8": ("mxfp8", "mxfp8-quantized", "float", 8),
}
_SCALE_DTYPES = {"nvfp4": "float8_e4m3fn", "mxfp4": "uint8", "mxfp8": "uint8"}


def form_of(packed: Any, *, biased: bool) -> Form:
    """The form that holds the weight, a `Packed` of NumPy arrays; biased: whether any of the
    model's packed layers has a bias.
    """
    if packed.scheme == "ternary":
        return bitnet.BIASED if biased else bitnet.FORM
    size = packed.group_size
    strategy = "channel" if size is None else "group"
    zero_points = packed.zero is not None
    return Form(_FORMATS[packed.scheme][0], packed.scheme, strategy, size, zero_points=zero_points)


def check(packed: Any, owner: str) -> None:
    """Raises: NotImplementedError, which names `owner`, if parts of an nvfp4 or a ternary weight
    have scales of their own, or a ternary one has outputs that are not packed four to a byte.
    """
    if packed.scheme == "ternary" and packed.shape[0] % bitnet.PER_BYTE:
        raise NotImplementedError(
            f"save: {owner} has {packed.shape[0]} outputs, which are not packed four to a byte"
        )
    if packed.scheme in ("nvfp4", "ternary"):
        scale = np.asarray(packed.row_scale)
        if np.any(scale != scale[:1]):
            raise NotImplementedError(
                f"save: {owner} is one tensor of the family, of parts that were packed with scales "
                f"of their own, and {packed.scheme} stores one; fuse the model before it is packed"
            )


def tensor(name: str, packed: Any, form: Form) -> np.ndarray:
    """The tensor of that name, one of those that `packed_weights.parts` lists for the form, of this
    weight of NumPy arrays.
    """
    if name in ("weight", "weight_packed"):
        codes = np.asarray(packed.codes)
        if packed.scheme == "ternary":
            return bitnet.to_hub(codes, name)
        if packed.scheme == "int8":
            codes = codes.view(np.uint8) ^ np.uint8(128)
        return _words(codes) if packed.scheme in ("int4", "int8") else codes
    if name == "weight_shape":
        return np.array(packed.shape, np.int64)
    if name == "weight_global_scale":
        return np.float32(1) / np.asarray(packed.row_scale)[:1]
    if name == "weight_zero_point":
        zero = np.asarray(packed.zero)
        zero = np.pad(zero, [(0, 0), (0, zero.shape[1] % 2)])
        return np.ascontiguousarray(_words(zero[:, 0::2] | zero[:, 1::2] << np.uint8(4)).T)
    assert name == "weight_scale", name
    if packed.scheme == "ternary":
        scale = np.asarray(packed.row_scale)[:1]
        return scale if form == bitnet.FORM else np.float32(1) / scale
    if packed.scale is None:
        return np.asarray(packed.row_scale)[:, None]
    return np.ascontiguousarray(np.asarray(packed.scale).T)


def _words(stored: np.ndarray) -> np.ndarray:
    """Rows of bytes as rows of int32, with zeros behind."""
    return np.pad(stored, [(0, 0), (0, -stored.shape[1] % 4)]).view(np.int32)


def quantization_config(forms: Mapping[str, Form | None]) -> dict[str, Any]:
    """What config.json says of a model whose linear layers, by name, are stored in these forms
    (None: not packed).
    """
    if any(form is not None and form.scheme == "ternary" for form in forms.values()):
        return bitnet.quantization_config(forms)
    names: dict[Form, list[str]] = {}
    for name, form in forms.items():
        if form is not None:
            names.setdefault(form, []).append(name)
    groups = {}
    for i, (form, targets) in enumerate(names.items()):
        _, format_, kind, bits = _FORMATS[form.scheme]
        weights = {
            "num_bits": bits,
            "type": kind,
            "symmetric": not form.zero_points,
            "strategy": "tensor_group" if form.scheme == "nvfp4" else form.strategy,
            "group_size": form.group_size,
            "dynamic": False,
        }
        if form.scheme in _SCALE_DTYPES:
            weights["scale_dtype"] = f"torch.{_SCALE_DTYPES[form.scheme]}"
        groups[f"group_{i}"] = {
            "targets": ["Linear"] if len(names) == 1 else targets,
            "weights": weights,
            "format": format_,
        }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": [name for name, form in forms.items() if form is None],
    }
