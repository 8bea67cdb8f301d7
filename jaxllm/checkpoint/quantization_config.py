"""What a checkpoint says of its quantisation: which modules have packed weights, in what form.

It stands in config.json under `quantization_config`, or in modelopt's hf_quant_config.json. Four
methods: compressed-tensors, modelopt, gptq, awq (BitNet's is read with the model's config). Keys
that could change the weights and are not known stop the load. What is said of activations and of
the cache is not looked at: both stay in the runtime's dtype, whatever they were calibrated for.
Sources, no code taken: compressed-tensors 0.20 (`quantization/quant_config.py`), NVIDIA ModelOpt
0.33 (`export`), AutoGPTQ 0.7 and GPTQModel 4 (`quantize_config`), AutoAWQ 0.2,
AutoRound 0.16 (its exports in those forms).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HF_QUANT_CONFIG = "hf_quant_config.json"


@dataclasses.dataclass(frozen=True)
class Form:
    """How the weight [O, I] of one module is stored.

    layout: which tensors there are, a key of `packed_weights.LAYOUTS`; scheme: of the `Packed`.
    strategy: what shares a scale: "tensor", "channel" (a row), "group" (group_size numbers of a
        row) or "block" (block[0] rows by block[1] columns).
    zero_points: int4 has a code for 0 a group; plus_one: it is stored less 1 (GPTQ's first format).
    """

    layout: str
    scheme: str
    strategy: str = "group"
    group_size: int | None = None
    block: tuple[int, int] | None = None
    zero_points: bool = False
    plus_one: bool = False


@dataclasses.dataclass(frozen=True)
class Quantization:
    """`form(name)` is how the module of that name ("model.layers.0.mlp.up_proj") is stored, None
    for one that is not packed. `owner` is the file, for errors; `method` what made it.
    """

    owner: str
    method: str
    form: Callable[[str], Form | None]


def read_quantization(
    file: Path, hf: Mapping[str, Any], hf_quant: Mapping[str, Any] | None
) -> Quantization | None:
    """Of the content of a config.json, and of the hf_quant_config.json beside it if there is one.

    None if nothing is packed, and for BitNet.
    Raises: ValueError for values of the wrong kind or that contradict each other;
    NotImplementedError for a method, a scheme or a form that cannot be loaded.
    """
    owner, said = f"{file}: quantization_config", hf.get("quantization_config")
    if not said and (old := hf.get("compression_config")):
        raise NotImplementedError(
            f"{file}: compression_config is {old!r:.80}, in words of before quantization_config, "
            "which are not supported; load a newer conversion, or the one it was made from"
        )
    if not said and hf_quant is not None:
        owner, said = str(file.with_name(HF_QUANT_CONFIG)), hf_quant
    if not said:
        return None
    if not isinstance(said, Mapping):
        raise ValueError(f"{owner} must be an object, got {said!r:.80}")
    method = said.get("quant_method")
    if method is None and ("producer" in said or "quantization" in said):
        method = "modelopt"
    if method == "bitnet":
        return None
    for name, read in _READERS.items():
        if method == name or (name == "modelopt" and method == "modelopt_fp4"):
            return Quantization(owner, name, read(_Said(owner, said)))
    raise NotImplementedError(
        f"{owner}: quant_method {method!r} is not supported; supported are {', '.join(_READERS)}, "
        "bitnet; load the one it was made from"
    )


class _Said:
    """An object of a config, whose keys are asked for one by one; `done` refuses the others."""

    def __init__(self, owner: str, content: Any):
        if not isinstance(content, Mapping):
            raise ValueError(f"{owner} must be an object, got {content!r:.80}")
        self.owner, self.content, self.asked = owner, content, set[str]()

    def get(self, *keys: str, default: Any = None) -> Any:
        """The first of these keys that is there and not null."""
        self.asked |= set(keys)
        return next((x for key in keys if (x := self.content.get(key)) is not None), default)

    def kind(self, kinds: Any, what: str, *keys: str, default: Any = None) -> Any:
        """`get`, of that kind."""
        value = self.get(*keys, default=default)
        if value is None or (isinstance(value, kinds) and not (kinds is int and value is True)):
            return value
        raise ValueError(f"{self.owner}: {keys[0]} must be {what}, got {value!r:.80}")

    def names(self, *keys: str) -> tuple[str, ...]:
        """A list of names; () where there is none."""
        value = self.kind(list, "a list of names", *keys, default=[])
        if not all(isinstance(name, str) for name in value):
            raise ValueError(f"{self.owner}: {keys[0]} must be a list of names, got {value!r:.80}")
        return tuple(value)

    def patterns(self, key: str) -> tuple[str, ...]:
        """A list of names, of which those that begin with "re:" are regular expressions."""
        found = self.names(key)
        for name in found:
            if name.startswith("re:"):
                try:
                    re.compile(name.removeprefix("re:"))
                except re.error as error:
                    raise ValueError(
                        f"{self.owner}: {key} has {name!r:.80}, no regular expression: {error}"
                    ) from None
        return found

    def one_of(self, key: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """A value that is supported."""
        value = self.get(key, default=default)
        if value not in allowed:
            some = ", ".join(map(str, allowed))
            raise NotImplementedError(
                f"{self.owner}: {key} {value!r:.80} is not supported; supported: {some}"
            )
        return value

    def part(self, key: str) -> _Said:
        """The object under a key."""
        return _Said(f"{self.owner}.{key}", self.get(key, default={}))

    def done(self, inert: str) -> None:
        """Refuses keys that nobody asked for, but those that say nothing of how weights are stored.

        Null, false and empty values are no words.
        """
        rest = set(self.content) - self.asked - set(inert.split())
        if strange := sorted(key for key in rest if self.content[key]):
            some = ", ".join(f"{key}={self.content[key]!r:.40}" for key in strange)
            raise ValueError(f"{self.owner}: keys that could change the weights: {some}")


# ------------------------------------------------------------------------------ compressed-tensors

_BITS = {
    "int-quantized": {("int", 8): ("codes", "int8")},
    "float-quantized": {("float", 8): ("codes", "fp8")},
    "naive-quantized": {("int", 8): ("codes", "int8"), ("float", 8): ("codes", "fp8")},
    "pack-quantized": {("int", 4): ("words", "int4"), ("int", 8): ("words", "int8")},
    "nvfp4-pack-quantized": {("float", 4): ("nvfp4", "nvfp4")},
    "mxfp4-pack-quantized": {("float", 4): ("mxfp4", "mxfp4")},
    "mxfp8-quantized": {("float", 8): ("mxfp8", "mxfp8")},
}


def _compressed_tensors(said: _Said) -> Callable[[str], Form | None]:
    said.get("quant_method")
    said.one_of("quantization_status", ("compressed",), "compressed")
    for key in ("sparsity_config", "transform_config"):
        content = said.get(key)
        if content and (not isinstance(content, Mapping) or content.get("format") != "dense"):
            raise NotImplementedError(f"{said.owner}: {key} {content!r:.80} is not supported")
    overall = said.kind(str, "a name", "format")
    ignore = said.patterns("ignore")
    groups = said.part("config_groups")
    if not groups.content:
        raise ValueError(f"{said.owner}: config_groups names no group")
    forms = {}
    for name in groups.content:
        group = groups.part(name)
        weights = group.part("weights")
        if not weights.content:
            continue  # of activations alone
        targets = group.patterns("targets")
        format_ = group.kind(str, "a name", "format", default=overall)
        if format_ in (None, "mixed-precision"):
            raise ValueError(
                f"{group.owner}: format is missing, which says how weights are stored; supported: "
                f"{', '.join(_BITS)}"
            )
        forms |= dict.fromkeys(targets, _compressed_form(format_, weights))
        group.done("input_activations output_activations")
    said.done("kv_cache_scheme global_compression_ratio version run_compressed dequantize")

    def form(name: str) -> Form | None:
        if any(_is_called(name, pattern) for pattern in ignore):
            return None
        # A name, then the first expression by the alphabet, then the class: as its `match_targets`
        found = [target for target in forms if _is_called(name, target)]
        first = min(found, key=lambda t: (t == "Linear", t.startswith("re:"), t), default=None)
        return None if first is None else forms[first]

    return form


def _is_called(name: str, pattern: str) -> bool:
    """Whether compressed-tensors means the linear layer of that name."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return pattern in (name, "Linear")


def _compressed_form(format_: str, said: _Said) -> Form:
    if format_ not in _BITS:
        raise NotImplementedError(
            f"{said.owner}: format {format_!r} is not supported; supported: {', '.join(_BITS)}"
        )
    bits = said.kind(int, "a number", "num_bits", default=8)
    kind = said.kind(str, "a name", "type", default="int").lower()
    if (kind, bits) not in _BITS[format_]:
        raise NotImplementedError(
            f"{said.owner}: {format_} of {bits} bits of type {kind!r} is not supported"
        )
    layout, scheme = _BITS[format_][kind, bits]
    size = said.kind(int, "a number", "group_size")
    block = said.kind(list, "two sizes", "block_structure")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = said.kind(str, "a name", "strategy", default=inferred).lower()
    fixed = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}.get(scheme)
    if fixed:
        size = fixed if size is None else size
        if size != fixed or strategy not in ("group", "tensor_group"):
            raise ValueError(f"{said.owner}: {scheme} has groups of {fixed}, not {strategy} {size}")
        strategy = "group"
    if strategy not in ("tensor", "channel", "group", "block"):
        raise NotImplementedError(f"{said.owner}: strategy {strategy!r} is not supported")
    if strategy == "group" and (size is None or size < 1):
        raise ValueError(f"{said.owner}: strategy 'group' needs a group_size, got {size}")
    sizes = block if block and len(block) == 2 and all(map(_is_size, block)) else None
    if strategy == "block" and (scheme != "fp8" or sizes is None):
        raise ValueError(
            f"{said.owner}: blocks are of fp8 and have two sizes, got {scheme} {block}"
        )
    symmetric = said.kind(bool, "true or false", "symmetric", default=True)
    if not symmetric and scheme != "int4":
        raise NotImplementedError(f"{said.owner}: {scheme} with zero points is not supported")
    said.one_of("actorder", (None, False, "weight", "static"))
    said.one_of("dynamic", (None, False))
    said.done("observer observer_kwargs scale_dtype zp_dtype")
    return Form(
        layout,
        scheme,
        strategy,
        size if strategy == "group" else None,
        (sizes[0], sizes[1]) if strategy == "block" and sizes else None,
        zero_points=not symmetric,
    )


def _is_size(x: Any) -> bool:
    return type(x) is int and x > 0


# ----------------------------------------------------------------------- modelopt, gptq and awq


def _modelopt(said: _Said) -> Callable[[str], Form | None]:
    inner = said.part("quantization") if "quantization" in said.content else said
    algorithm = inner.one_of("quant_algo", ("NVFP4", "FP8"))
    size = inner.kind(int, "a number", "group_size")
    form = Form("modelopt_fp8", "fp8", "tensor")
    if algorithm == "NVFP4":
        if size not in (None, 16):
            raise ValueError(f"{inner.owner}: nvfp4 has groups of 16, not of {size}")
        form = Form("modelopt_nvfp4", "nvfp4", group_size=16)
    kept = inner.names("exclude_modules", "ignore")
    # What config_groups says again is said by quant_algo
    inert = "quant_method producer quantization config_groups kv_cache_quant_algo kv_cache_scheme"
    inner.done(f"{inert} has_zero_point pre_quant_scale")
    if inner.content.get("pre_quant_scale") or inner.content.get("has_zero_point"):
        raise NotImplementedError(
            f"{inner.owner}: pre_quant_scale and has_zero_point are not supported"
        )
    if inner is not said:
        said.done(inert)

    def of(name: str) -> Form | None:
        meant = (fnmatch.fnmatchcase(name, p) or name.startswith(f"{p}.") for p in kept)
        return None if any(meant) else form

    return of


_OF_AUTOROUND = "provider autoround_version to_quant_block_names"


def _four_bits(said: _Said, *keys: str) -> None:
    bits = said.kind(int, "a number", *keys)
    if bits != 4:
        raise NotImplementedError(f"{said.owner}: {bits} bits are not supported; supported: 4")


def _group_size(said: _Said, *keys: str) -> int | None:
    """-1, a row, is None."""
    size = said.kind(int, "a number", *keys)
    if size is None or (size != -1 and size < 1):
        raise ValueError(f"{said.owner}: group_size must be -1 or at least 1, got {size}")
    return None if size == -1 else size


def _gptq(said: _Said) -> Callable[[str], Form | None]:
    _four_bits(said, "bits")
    version = said.one_of(
        "checkpoint_format", ("gptq", "gptq_v2"), said.get("format", default="gptq")
    )
    said.one_of("is_marlin_format", (None, False))
    size = _group_size(said, "group_size")
    form = Form(
        "gptq",
        "int4",
        "channel" if size is None else "group",
        size,
        zero_points=not said.kind(bool, "true or false", "sym", default=True),
        plus_one=version == "gptq",
    )
    head = said.kind(bool, "true or false", "lm_head", default=False)
    blocks = said.kind(list, "lists of names", "modules_in_block_to_quantize", default=[])
    ends = tuple(f".{n}" for part in blocks for n in (part if isinstance(part, list) else [part]))
    if (method := said.get("quant_method")) != "gptq" or said.get("dynamic"):
        raise NotImplementedError(f"{said.owner}: {method} with rules a module is not supported")
    said.one_of("data_type", (None, "int"))
    # Which inputs are in a group, g_idx says, whatever desc_act does
    said.done(
        "desc_act static_groups damp_percent true_sequential model_name_or_path tokenizer dataset "
        "model_file_base_name use_cuda_fp16 use_exllama exllama_config meta "
        "batch_size model_seqlen block_name_to_quantize module_name_preceding_first_block "
        "pad_token_id disable_exllama max_input_length cache_block_outputs pack_dtype backend "
        "quantizer version uri hyb_act act_group_aware damp_auto_increment mse "
        f"{_OF_AUTOROUND}"
    )

    def of(name: str) -> Form | None:
        if name.endswith("lm_head"):
            return form if head else None
        return form if not ends or name.endswith(ends) else None

    return of


def _awq(said: _Said) -> Callable[[str], Form | None]:
    _four_bits(said, "bits", "w_bit")
    said.get("quant_method")
    version = said.get("version", default="gemm")
    if str(version).lower() != "gemm":
        raise NotImplementedError(
            f"{said.owner}: version {version!r} is not supported; supported: gemm"
        )
    size = _group_size(said, "group_size", "q_group_size")
    zero_points = said.kind(bool, "true or false", "zero_point", default=True)
    if said.kind(bool, "true or false", "sym", default=not zero_points) == zero_points:
        raise ValueError(f"{said.owner}: sym and zero_point are both {zero_points}")
    said.one_of("data_type", (None, "int"))
    kept = said.names("modules_to_not_convert")
    said.done(f"backend do_fuse fuse_max_seq_len modules_to_fuse exllama_config {_OF_AUTOROUND}")
    strategy = "channel" if size is None else "group"
    form = Form("awq", "int4", strategy, size, zero_points=zero_points)
    return lambda name: (
        None if name.endswith("lm_head") or any(part in name for part in kept) else form
    )


_READERS = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
}
