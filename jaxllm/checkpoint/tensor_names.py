"""Which tensor of a Hugging Face checkpoint holds which parameter: a handful of rules.

Parameter paths are Llama's tensor names without `model.`, so a name is a prefix and a path. Some
rules more: some families store q/k/v, and gate/up, as one tensor; a multimodal Gemma 3 puts another
prefix before the names of its text model and has tensors of other models beside them; a model saved
without its head has no prefix; and of what is tied, a file has the embedding, the head, or both.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from jaxllm.checkpoint.folder import enumerate_some
from jaxllm.checkpoint.safetensors_file import BLOCK_BYTES, FLOATS, Tensor, read

Shape = tuple[int, ...]

# A fused module: which modules' rows it holds, in this order. Source: Phi-3's `modeling_phi3.py`.
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_FUSED_INTO = {part: fused for fused, parts in FUSED.items() for part in parts}
_LAYER = re.compile(r"(layers\.\d+\.)(.+)(\.\w+)")

# Buffers that old files carry and that follow from config.json.
INERT = re.compile(r".*\brotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)")


@dataclasses.dataclass(frozen=True)
class Layout:
    """What stands before a language model's names, and the prefixes of other models' tensors."""

    body: str = "model."
    head: str = ""
    others: tuple[str, ...] = ()


LAYOUTS = (
    Layout(),
    Layout(body=""),  # of a model saved without its head
    # Gemma 3 with vision: as transformers 4 wrote it, and as transformers 5 writes it.
    Layout("language_model.model.", "language_model.", ("vision_tower.", "multi_modal_projector.")),
    Layout("model.language_model.", "", ("model.vision_tower.", "model.multi_modal_projector.")),
)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint: its shape, and the parameters that its rows are, in order."""

    shape: Shape
    parameters: tuple[str, ...]


def stored_tensors(
    shapes: Mapping[str, Shape], *, fused: bool, layout: Layout = LAYOUTS[0]
) -> dict[str, Stored]:
    """The tensors, by name, that hold the parameters with these paths and shapes.

    `fused` says whether the family stores the modules of `FUSED` as one tensor.
    """
    groups: dict[str, list[str]] = {}
    for path in shapes:
        groups.setdefault(_stored_in(path) if fused else path, []).append(path)
    stored = {}
    for path, parameters in groups.items():
        parameters.sort(key=_place)
        _, *rest = shapes[parameters[0]]
        rows = sum(shapes[parameter][0] for parameter in parameters)
        prefix = layout.head if path == "lm_head.weight" else layout.body
        stored[prefix + path] = Stored((rows, *rest), tuple(parameters))
    return stored


def _stored_in(path: str) -> str:
    if match := _LAYER.fullmatch(path):
        layer, module, kind = match.groups()
        return layer + _FUSED_INTO.get(module, module) + kind
    return path


def _place(path: str) -> int:
    """Where a parameter stands among the parts of its fused tensor."""
    match = _LAYER.fullmatch(path)
    parts = list(_FUSED_INTO)
    return parts.index(match[2]) if match and match[2] in parts else 0


def layout_of(tensors: Collection[str]) -> Layout:
    """The layout, told by the name of the embedding or of the last norm; plain without both."""
    ends = ("embed_tokens.weight", "norm.weight")
    present = (layout for layout in LAYOUTS for end in ends if f"{layout.body}{end}" in tensors)
    return next(present, LAYOUTS[0])


def match(
    folder: Path,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    *,
    fused: bool,
    tied: bool,
) -> dict[str, tuple[Tensor, int]]:
    """For each parameter path, the tensor that holds it and the row where it begins.

    Strict both ways. A checkpoint whose head is `tied` may hold the head if it is the embedding,
    or in its place.
    Raises: ValueError with every tensor that is missing, surplus or of another shape;
    NotImplementedError with those that are no floats.
    """
    layout = layout_of(tensors)
    wanted = stored_tensors(shapes, fused=fused, layout=layout)
    head, embedding = f"{layout.head}lm_head.weight", f"{layout.body}embed_tokens.weight"
    if tied and head in tensors and embedding not in tensors:
        tensors = {embedding if name == head else name: x for name, x in tensors.items()}
    extra = tensors.keys() - wanted
    if tied and head in extra and embedding in tensors:
        if not _equal(tensors[head], tensors[embedding]):
            raise ValueError(
                f"{folder}: config.json ties the head to the embedding, but {head} differs from "
                f"{embedding}; set tie_word_embeddings to false there, or remove the tensor"
            )
        extra = extra - {head}
    faults = {
        "missing": [name for name in wanted if name not in tensors],
        "surplus": [
            name
            for name in extra
            if not name.startswith(layout.others) and not INERT.fullmatch(name)
        ],
        "of another shape": [
            f"{name} {list(tensors[name].shape)} instead of {list(stored.shape)}"
            for name, stored in wanted.items()
            if name in tensors and tensors[name].shape != stored.shape
        ],
    }
    if any(faults.values()):
        raise ValueError(
            f"{folder}: the tensors are not those that config.json asks for: "
            + "; ".join(
                f"{len(names)} {fault}: {enumerate_some(names)}"
                for fault, names in faults.items()
                if names
            )
        )
    no_floats = [name for name in wanted if tensors[name].dtype not in FLOATS]
    if no_floats:
        some = enumerate_some([f"{name} ({tensors[name].dtype})" for name in no_floats])
        raise NotImplementedError(
            f"{folder}: {len(no_floats)} tensors are not stored as {', '.join(FLOATS)}, which is "
            f"not supported yet: {some}"
        )
    places = {}
    for name, stored in wanted.items():
        first = 0
        for path in stored.parameters:
            places[path] = (tensors[name], first)
            first += shapes[path][0]
    return places


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    f32 = np.dtype(np.float32)
    step = max(1, a.shape[0] * BLOCK_BYTES // max(1, a.size_bytes))
    blocks = (slice(begin, begin + step) for begin in range(0, a.shape[0], step))
    return all(
        np.array_equal(read(a, f32, rows), read(b, f32, rows), equal_nan=True) for rows in blocks
    )
