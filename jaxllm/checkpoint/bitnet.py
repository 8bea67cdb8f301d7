"""BitNet's ternary weights as the hub stores them: uint8 [O / 4, I] and one scale, both ways.

    autobitlinear   weight_scale is what a 1 stands for; it multiplies the sum with its bias
    bitlinear       weight_scale is the inverse of that, and of the sum alone

Four codes, weight + 1, lie in a byte, and byte row r holds the rows r, r + O / 4, r + O / 2 and
r + 3 O / 4 of the weight, the first in its lowest bits; `Packed` has four columns in a byte.
Source: `integrations/bitnet.py` of transformers 5.23 (no code taken).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import UInt8

from jaxllm.checkpoint.quantization_config import Form, Quantization
from jaxllm.config import ModelConfig

PER_BYTE = 4
# Of what is saved: the first where no layer has a bias, for its scale is not rounded
FORM, BIASED = (Form(layout, "ternary", "tensor") for layout in ("autobitlinear", "bitlinear"))


def packed_modules(owner: str, config: ModelConfig, hf: Mapping[str, Any]) -> Quantization | None:
    """Of a config.json and what it says of the model: None unless BitLinears are packed in files.

    `owner` names the file.
    """
    said = hf.get("quantization_config")
    if not config.bit_linear or said is None:
        return None
    if (said.get("quantization_mode") or "offline") != "offline":
        return None
    form = Form(said.get("linear_class") or "bitlinear", "ternary", "tensor")

    def of(name: str) -> Form | None:
        return form if config.is_bit_linear(name.removeprefix("model.")) else None

    return Quantization(owner, "bitnet", of)


def quantization_config(forms: Mapping[str, Form | None]) -> dict[str, Any]:
    """What config.json says of a model whose linear layers, by name, are ternary (None: not).

    Raises: NotImplementedError if one is packed otherwise, or the head is ternary.
    """
    others = [name for name, form in forms.items() if form not in (None, FORM, BIASED)]
    if forms.get("lm_head") in (FORM, BIASED):
        raise NotImplementedError(
            "save: lm_head is ternary, which no checkpoint has; quantize with another head, or none"
        )
    if others:
        raise NotImplementedError(
            f"save: {others[0]} is packed beside ternary layers, which no "
            "checkpoint has; keep it as it is"
        )
    kept = [name for name, form in forms.items() if form is None]
    return {
        "quant_method": "bitnet",
        "linear_class": (BIASED if BIASED in forms.values() else FORM).layout,
        "quantization_mode": "offline",
        "modules_to_not_convert": kept if set(kept) - {"lm_head"} else None,
    }


def from_hub(stored: UInt8[np.ndarray, "R I"], owner: str) -> UInt8[np.ndarray, "O C"]:
    """The codes of a `Packed`, [O, I / 4]. Beside both, as many bytes as one of them has.

    Raises: ValueError if I is no multiple of 4, or a code is 3; `owner` is the tensor it names.
    """
    rows, columns = stored.shape
    if columns % PER_BYTE:
        raise ValueError(
            f"{owner}: a ternary weight of {columns} inputs cannot be packed four to a byte"
        )
    codes = np.zeros((PER_BYTE, rows, columns // PER_BYTE), np.uint8)
    for place in range(PER_BYTE):
        part = stored >> np.uint8(2 * place) & np.uint8(3)
        if part.max(initial=0) == 3:
            raise ValueError(f"{owner}: holds the code 3; ternary codes are 0, 1 and 2")
        for column in range(PER_BYTE):
            codes[place] |= part[:, column::PER_BYTE] << np.uint8(2 * column)
    return codes.reshape(PER_BYTE * rows, -1)


def to_hub(codes: UInt8[np.ndarray, "O C"], owner: str) -> UInt8[np.ndarray, "R I"]:
    """What the hub stores for the codes of a `Packed`.

    Raises: ValueError if O is no multiple of 4; `owner` is the tensor it names.
    """
    outputs, width = codes.shape
    if outputs % PER_BYTE:
        raise ValueError(
            f"{owner}: a ternary weight of {outputs} outputs cannot be stored four to a byte"
        )
    parts = codes.reshape(PER_BYTE, outputs // PER_BYTE, width)
    stored = np.zeros((outputs // PER_BYTE, width * PER_BYTE), np.uint8)
    for column in range(PER_BYTE):
        for place in range(PER_BYTE):
            part = parts[place] >> np.uint8(2 * column) & np.uint8(3)
            stored[:, column::PER_BYTE] |= part << np.uint8(2 * place)
    return stored
