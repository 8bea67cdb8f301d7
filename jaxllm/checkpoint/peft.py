"""A PEFT folder (adapter_config.json, adapter_model.safetensors) to low-rank factors, and back.

Strict both ways, as for checkpoints: a setting that would change what the adapter computes, or a
tensor that no module takes, stops the load.
Source: PEFT 0.21, peft/tuners/lora (its names and formulas; no code taken).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoint.folder import enumerate_some, read_json, replacing
from jaxllm.checkpoint.safetensors_file import Source, Tensor, read, read_header, write
from jaxllm.checkpoint.tensor_names import LAYOUTS, Shape, stored_tensors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
OLDER = "adapter_model.bin"

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"base_model\.model\.(.+)\.(lora_A|lora_B|lora_magnitude_vector)(\.weight)?")
_PARTS = {"lora_A": "a", "lora_B": "b", "lora_magnitude_vector": "magnitude"}
_READ = frozenset("r lora_alpha use_rslora use_dora rank_pattern alpha_pattern".split())
# What says nothing of what a trained adapter computes: which modules it has, the tensors tell.
_INERT = frozenset(
    "auto_mapping base_model_name_or_path eva_config exclude_modules inference_mode "
    "layers_pattern layers_to_transform lora_dropout megatron_config megatron_core peft_version "
    "qalora_group_size revision runtime_config target_modules task_type".split()
)
_OTHER_VALUES = {  # keys whose harmless values are not empty
    "peft_type": ("LORA",),
    "bias": ("none",),
    # PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change the base's weights before the first step
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
}


@dataclasses.dataclass(frozen=True)
class LowRank:
    """What one module's weight [O I] gets: scale * b @ a; with a magnitude, its rows that length.

    a: float32 [r I]; b: float32 [O r]; magnitude: float32 [O], DoRA's; scale: alpha / r, and
    alpha / sqrt(r) with rslora.
    """

    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None
    alpha: float
    rslora: bool

    @property
    def rank(self) -> int:
        """The width of the bottleneck."""
        return len(self.a)

    @property
    def scale(self) -> float:
        """What b @ a is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def read_folder(folder: Path, shapes: Mapping[str, Shape], *, fused: bool) -> dict[str, LowRank]:
    """The factors of each adapted module, by its dotted name.

    `shapes`: [out, in] of every module that can be adapted. `fused`: the family stores q/k/v, and
    gate/up, as one tensor; its factors are split: each part gets the whole `a` and its rows of `b`.
    Raises: FileNotFoundError; ValueError for tensors without a module or of another shape, and for
    files of the older format; NotImplementedError for settings that are not supported.
    """
    file = folder / CONFIG
    for needed in (file, folder / TENSORS):
        if not needed.is_file():
            if needed.name == TENSORS and (folder / OLDER).is_file():
                raise ValueError(
                    f"{folder}: {OLDER} is of an older format, which torch wrote; save the adapter "
                    "anew with safe_serialization=True"
                )
            inner = folder / "adapter"  # of a run of jaxllm finetune
            there = f"; there is one in {inner}" if (inner / CONFIG).is_file() else ""
            raise FileNotFoundError(
                f"{folder}: there is no {needed.name}; give a folder that PEFT's save_pretrained, "
                f"or save_peft, wrote{there}"
            )
    config = read_json(file)
    _check_config(file, config)
    file = folder / TENSORS
    modules: dict[str, dict[str, Tensor]] = {}
    strange = []
    for name, tensor in read_header(file).items():
        if found := _TENSOR.fullmatch(name):
            modules.setdefault(found[1], {})[_PARTS[found[2]]] = tensor
        else:
            strange.append(name)
    copies = [name for name in strange if name.endswith(".base_layer.weight")]
    if others := [name for name in strange if name not in copies]:  # which no saving anew mends
        raise NotImplementedError(
            f"{file}: {len(others)} tensors are not lora_A, lora_B or lora_magnitude_vector of a "
            f"Linear: {enumerate_some(others)}"
        )
    if copies:
        raise NotImplementedError(
            f"{file}: beside the adapter there are weights of its base: {enumerate_some(copies)}; "
            "save it anew with save_embedding_layers=False"
        )
    places = _places(shapes, fused, modules)
    base = config.get("base_model_name_or_path")
    made_for = f"; the adapter is for {base}" if base else ""
    if unknown := modules.keys() - places.keys():
        raise ValueError(
            f"{file}: the model has no Linear for {enumerate_some(list(unknown))}; it has "
            f"{enumerate_some(list(places))}{made_for}"
        )
    loaded: dict[str, LowRank] = {}
    for module, tensors in modules.items():
        whole = _read_module(file, module, tensors, config)
        parts = places[module]
        shape = [sum(shapes[part][0] for part in parts), shapes[parts[0]][1]]
        if shape != [len(whole.b), whole.a.shape[1]]:
            raise ValueError(
                f"{file}: {module} has lora_A {list(whole.a.shape)} and lora_B "
                f"{list(whole.b.shape)}, but the model's weight is {shape}{made_for}"
            )
        begin = 0
        for part in parts:
            rows = slice(begin, begin + shapes[part][0])
            magnitude = None if whole.magnitude is None else whole.magnitude[rows]
            loaded[part] = dataclasses.replace(whole, b=whole.b[rows], magnitude=magnitude)
            begin = rows.stop
    return loaded


def _check_config(file: Path, config: Mapping[str, Any]) -> None:
    for key in ("r", "lora_alpha"):
        if type(config.get(key)) not in (int, float) or not config[key] > 0:
            raise ValueError(f"{file}: {key} must be a positive number, got {config.get(key)!r}")
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(key) or {}
        if not isinstance(pattern, dict):
            raise ValueError(f"{file}: {key} must be an object, got {pattern!r}")
        for name, value in pattern.items():
            if type(value) not in (int, float) or not value > 0:
                raise ValueError(
                    f"{file}: {key} of {name!r} must be a positive number, got {value!r}"
                )
            try:
                re.compile(name)
            except re.error as error:
                raise ValueError(
                    f"{file}: {key} has {name!r}, which is no regular expression: {error}"
                ) from None
    refused = [
        f"{key} {value!r}"
        for key, value in config.items()
        if key not in _READ | _INERT
        and (value not in _OTHER_VALUES[key] if key in _OTHER_VALUES else bool(value))
        and value is not None
    ]
    if refused:
        raise NotImplementedError(f"{file}: not supported: {', '.join(sorted(refused))}")


def _places(
    shapes: Mapping[str, Shape], fused: bool, found: Iterable[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Which of our modules each module of transformers is, in the order of its rows.

    Names are of the layout that has most of what was `found`; the plain one if none has any.
    """
    found = set(found)
    weights = {f"{name}.weight": shape for name, shape in shapes.items()}
    candidates = [
        {
            name.removesuffix(".weight"): tuple(
                part.removesuffix(".weight") for part in stored.parameters
            )
            for name, stored in stored_tensors(weights, fused=fused, layout=layout).items()
        }
        for layout in LAYOUTS
    ]
    return max(candidates, key=lambda places: len(found & places.keys()))


def _read_module(
    file: Path,
    module: str,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
) -> LowRank:
    dora = bool(config.get("use_dora"))
    wanted = {"a", "b"} | ({"magnitude"} if dora else set())
    if tensors.keys() != wanted:
        raise ValueError(
            f"{file}: {module} has {', '.join(sorted(tensors))}; with use_dora {dora} it must have "
            f"{', '.join(sorted(wanted))}"
        )
    arrays = {key: read(tensor, np.dtype(np.float32)) for key, tensor in tensors.items()}
    a, b, magnitude = arrays["a"], arrays["b"], arrays.get("magnitude")
    shapes = f"lora_A {list(a.shape)} and lora_B {list(b.shape)}"
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        raise ValueError(f"{file}: {module} has {shapes}, which are no [r, in] and [out, r]")
    if magnitude is not None and magnitude.shape != (len(b),):
        raise ValueError(
            f"{file}: {module} has a magnitude {list(magnitude.shape)}, which is not [{len(b)}]"
        )
    rank = _by_pattern(config.get("rank_pattern"), module, config["r"])
    if rank != len(a):
        raise ValueError(f"{file}: {module} has {shapes}, but {CONFIG} gives it rank {rank}")
    alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    return LowRank(a, b, magnitude, float(alpha), bool(config.get("use_rslora")))


def _by_pattern(pattern: Mapping[str, float] | None, module: str, default: float) -> float:
    """The value of the first regular expression that fits the name, or its end behind a dot."""
    for key, value in (pattern or {}).items():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return value
    return default


def write_folder(
    folder: Path,
    modules: Mapping[str, LowRank],
    shapes: Mapping[str, Shape],
    *,
    fused: bool,
    base_model_name: str | None = None,
) -> None:
    """Write a folder that `read_folder`, and PEFT, read. Arguments as there.

    In a fused family, parts with factors of their own become one module of the sum of their ranks;
    parts that share `a` keep their rank. Files get their names only when both are written, the
    config last.
    Raises: NotImplementedError if PEFT cannot say it: DoRA beside LoRA, or on a part of a fused
    module alone; ValueError if the path is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"save_peft: {folder} is a file; give a folder")
    dora = {factors.magnitude is not None for factors in modules.values()}
    if len(dora) > 1:
        raise NotImplementedError(
            "save_peft: some modules have DoRA and some have not; a PEFT folder has one kind"
        )
    places = _places(shapes, fused)
    wholes = {
        module: _fuse(module, parts, modules, shapes)
        for module, parts in places.items()
        if any(part in modules for part in parts)
    }
    rslora = all(whole.rslora for whole in wholes.values())
    alphas = {
        module: whole.alpha if rslora else whole.scale * whole.rank
        for module, whole in wholes.items()
    }
    rank = Counter(whole.rank for whole in wholes.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name,
        "r": rank,
        "lora_alpha": _plain(alpha),
        "target_modules": _targets(wholes.keys(), places.keys()),
        "rank_pattern": {m: whole.rank for m, whole in wholes.items() if whole.rank != rank},
        "alpha_pattern": {m: _plain(value) for m, value in alphas.items() if value != alpha},
        "use_rslora": rslora,
        "use_dora": dora == {True},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
    }
    sources = []
    for module, whole in wholes.items():
        arrays = {"lora_A.weight": whole.a, "lora_B.weight": whole.b}
        if whole.magnitude is not None:
            arrays["lora_magnitude_vector"] = whole.magnitude
        for name, array in arrays.items():
            make = functools.partial(lambda array: [array], array)
            sources.append(Source(f"{_PREFIX}{module}.{name}", array.dtype, array.shape, make))
    with replacing(folder, CONFIG) as stage:
        write(stage / TENSORS, sources)
        (stage / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _fuse(
    module: str,
    parts: Sequence[str],
    modules: Mapping[str, LowRank],
    shapes: Mapping[str, Shape],
) -> LowRank:
    """One module of transformers from the parts that its rows are."""
    there = [modules[part] for part in parts if part in modules]
    if len(parts) == 1:
        return there[0]
    first = there[0]
    magnitude = None
    if first.magnitude is not None:
        if len(there) < len(parts):
            raise NotImplementedError(
                f"save_peft: transformers has {' and '.join(parts)} as one {module}, and DoRA is "
                f"on {len(there)} of them; adapt all of them, or merge"
            )
        magnitude = np.concatenate([part.magnitude for part in there])  # type: ignore[misc]
    one_a = all(np.array_equal(part.a, first.a) and part.scale == first.scale for part in there)
    if one_a and len(there) == len(parts):
        b = np.concatenate([part.b for part in there])
        return dataclasses.replace(first, b=b, magnitude=magnitude)
    a = np.concatenate([part.a for part in there])
    b = np.zeros((sum(shapes[part][0] for part in parts), len(a)), np.float32)
    row = column = 0
    for part in parts:
        if part in modules:
            factors = modules[part]
            block = factors.b * np.float32(factors.scale / first.scale)
            b[row : row + len(block), column : column + factors.rank] = block
            column += factors.rank
        row += shapes[part][0]
    divisor = math.sqrt(len(a)) if first.rslora else len(a)
    return LowRank(a, b, magnitude, first.scale * divisor, first.rslora)


def _targets(adapted: Iterable[str], every: Iterable[str]) -> list[str]:
    """PEFT's list: an entry is a module's name or the end of it, so "q_proj" where all have it."""
    adapted, every = set(adapted), set(every)

    def tail(module: str) -> str:
        return module.rpartition(".")[2]

    partly = {tail(module) for module in every - adapted}
    return sorted({module if tail(module) in partly else tail(module) for module in adapted})


def _plain(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value
