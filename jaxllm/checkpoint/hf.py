"""A Hugging Face folder to a model, tensor by tensor, and back. Strict both ways."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding

from jaxllm.byte_size import byte_size
from jaxllm.checkpoint import compressed_tensors
from jaxllm.checkpoint.folder import (
    INDEX,
    WEIGHTS,
    enumerate_some,
    find_folder,
    list_tensors,
    read_config,
    read_generation,
    read_quantization,
    replacing,
    stated_dtype,
)
from jaxllm.checkpoint.packed_modules import PackedModule, Rows, find, put
from jaxllm.checkpoint.packed_modules import sources as packed_sources
from jaxllm.checkpoint.placement import (
    PACKED_READERS,
    Placement,
    check_devices,
    check_memory,
    in_threads,
    load_all,
    to_host,
)
from jaxllm.checkpoint.quantization_config import HF_QUANT_CONFIG
from jaxllm.checkpoint.safetensors_file import FLOATS, Source, Tensor, write
from jaxllm.checkpoint.tensor_names import FUSED, match, stored_tensors
from jaxllm.config import DTYPES, GenerationDefaults, ModelConfig, Runtime
from jaxllm.families import FAMILIES, to_hf
from jaxllm.layers import BitLinear, Embedding, Linear, computes_as
from jaxllm.model import Transformer
from jaxllm.quantize import PackedEmbedding, PackedLinear, packed_weights
from jaxllm.tokenizer import Tokenizer, check_tokenizer, tokenizer_files
from pallas_kernels.packed import Packed
from pallas_kernels.whole_number import is_whole

Shape = tuple[int, ...]


def load(
    path_or_hub_id: str | os.PathLike[str],
    dtype: Any = "bfloat16",
    runtime: Runtime | None = None,
    sharding: Sharding | Callable[[str, Shape], Sharding | None] | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Transformer, Tokenizer | None]:
    """The model and the tokenizer (None if there is none) of a Hugging Face folder or hub id.

    dtype: of the parameters: "float32", "bfloat16", "float16", or None for what config.json says
        (the widest that is stored, if it says nothing). Stored float64 and float8 are cast too.
    runtime: its param_dtype must be None or agree with dtype.
    sharding: where parameters go: None for the default device, one Sharding for all, or a function
        from parameter path ("layers.0.mlp.up_proj.weight") and shape to one, or to None; for packed
        weights it is called from other threads, never from two at once. All name the same devices.
        A mesh has axes of type Auto. A process reads only the rows that its devices need.
    progress: called with (bytes read, bytes to read), from the first tensor on; from other threads
        than the caller's, never from two at once.

    The checkpoint is never held twice: eight tensors are read at a time, at most 128 MiB of each on
    the way to a GPU's memory, or four packed modules, each held twice meanwhile. A tied checkpoint
    may hold `lm_head.weight` too if it equals the embedding, or in its place.
    Of a quantised checkpoint (compressed-tensors, modelopt, GPTQ, AWQ, BitNet) the linear layers
    that it has packed are `PackedLinear`s with its codes and scales, whatever `dtype` says;
    activations and the cache stay in the runtime's dtype. `sharding` is asked for ".codes",
    ".scale", ".zero", ".row_scale" and ".order" instead of ".weight" there, and a process reads the
    whole of such a module.
    Raises: FileNotFoundError, ValueError, NotImplementedError, one sentence each.
    """
    folder = find_folder(path_or_hub_id)
    config, hf = read_config(folder)
    tensors = list_tensors(folder)
    runtime = _with_weight_dtype(runtime, dtype, hf, tensors)
    if config.num_hidden_layers > len(tensors):  # before ten thousand layers are built
        raise ValueError(
            f"{folder}: config.json says {config.num_hidden_layers} layers, but there are only "
            f"{len(tensors)} tensors"
        )
    shaped = nnx.eval_shape(lambda: Transformer(config, runtime, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(shaped, nnx.Param)
    parameters = _by_path(state)
    fused = FAMILIES[config.model_type].fused
    modules: list[PackedModule] = []
    if (quantization := read_quantization(folder, config, hf)) is not None:
        modules, tensors = find(folder, quantization, tensors, shaped, fused=fused)
    packed = {f"{layer}.weight" for module in modules for layer in module.layers}
    places = match(
        folder,
        tensors,
        {path: parameter.shape for path, parameter in parameters.items() if path not in packed},
        fused=fused,
        tied=config.tie_word_embeddings,
    )

    mesh, asked = jax.sharding.get_mesh(), threading.Lock()

    def sharding_of(path: str, shape: Shape) -> Sharding | None:
        if isinstance(sharding, Mesh) or not callable(sharding):  # a mesh is a decorator, too
            return sharding
        # Of packed modules other threads ask, which know nothing of `jax.set_mesh`
        with asked, contextlib.nullcontext() if mesh.empty else jax.set_mesh(mesh):
            return sharding(path, shape)

    placements = [
        Placement(
            path,
            parameters[path].shape,
            np.dtype(parameters[path].dtype),
            *place,
            sharding_of(path, parameters[path].shape),
        )
        for path, place in places.items()
    ]
    check_devices(placements)
    size = sum(module.size_bytes for module in modules)
    check_memory(folder, placements, 0 if sharding is not None else size)
    tokenizer = _read_tokenizer(folder)
    generation = read_generation(folder, hf)
    if not generation.stop_ids and tokenizer is not None and tokenizer.eos_id is not None:
        generation = dataclasses.replace(generation, stop_ids=(tokenizer.eos_id,))

    done, total = 0, size + sum(placement.read_bytes() for placement in placements)
    lock = threading.Lock()

    def on_bytes(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            if progress is not None:
                progress(done, total)

    for placement, array in load_all(placements, on_bytes):
        parameters[placement.path].set_value(array)
    model = nnx.merge(graph, state)
    weights = in_threads(PACKED_READERS, lambda x: x.load(sharding_of, on_bytes), modules)
    loaded = (item for found in weights for item in found.items())
    scaled = {layer for x in modules if x.scales_bias for layer in x.layers}
    put(model, loaded, scaled=scaled)
    model.generation = generation
    return model, tokenizer


def pack_as_stored(model: Transformer, path_or_hub_id: str | os.PathLike[str]) -> None:
    """In place, of a model of shapes alone with the checkpoint's config: its linear layers become
    packed where the checkpoint has them so, but without an order of inputs, which the tensors say
    and not their shapes. To be called inside `nnx.eval_shape`.

    Raises: as `load` does for packed modules; other tensors are not looked at.
    """
    folder = find_folder(path_or_hub_id)
    config, hf = read_config(folder)
    if (quantization := read_quantization(folder, config, hf)) is not None:
        fused = FAMILIES[config.model_type].fused
        modules, _ = find(folder, quantization, list_tensors(folder), model, fused=fused)
        put(model, (item for module in modules for item in module.zeros().items()))


def _by_path(state: nnx.State) -> dict[str, Any]:
    return {".".join(map(str, path)): param for path, param in nnx.to_flat_state(state)}


def _with_weight_dtype(
    runtime: Runtime | None, dtype: Any, hf: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Runtime:
    """The runtime with the dtype that parameters get."""
    runtime = Runtime() if runtime is None else runtime
    if not isinstance(runtime, Runtime):
        raise ValueError(f"load: runtime must be a Runtime or None, got {runtime!r:.60}")
    try:
        asked = dtype if dtype is None or isinstance(dtype, str) else jnp.dtype(dtype).name
    except (TypeError, ValueError):  # of torch, say, or a Runtime
        asked = str(dtype)
    if asked is not None and asked not in DTYPES:
        raise ValueError(f"load: dtype {asked!r} is not one of {', '.join(DTYPES)}, None")
    if asked and runtime.param_dtype and asked != runtime.param_dtype:
        raise ValueError(
            f"load: dtype is {asked!r}, but the runtime's param_dtype is {runtime.param_dtype!r}; "
            "give one of them, or both the same"
        )
    asked = asked or runtime.param_dtype or _said_dtype(hf, tensors)
    return dataclasses.replace(runtime, param_dtype=asked)


def default_dtype(folder: Path) -> str:
    """The dtype of `load(folder, dtype=None)`. Raises: as it does for config and headers."""
    return _said_dtype(read_config(folder)[1], list_tensors(folder))


def _said_dtype(hf: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    if (stated := stated_dtype(hf)) in DTYPES:
        return stated
    stored = {FLOATS[tensor.dtype] for tensor in tensors.values() if tensor.dtype in FLOATS}
    return _widest(stored) if stored else "float32"


def _widest(dtypes: Collection[np.dtype]) -> str:
    """The narrowest dtype of a model that holds all of these float dtypes (float64 apart)."""
    if all(dtype == np.float16 for dtype in dtypes):
        return "float16"
    narrow = [dtype.itemsize == 1 or dtype == jnp.bfloat16 for dtype in dtypes]
    return "bfloat16" if all(narrow) else "float32"


def _read_tokenizer(folder: Path) -> Tokenizer | None:
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((folder / name).exists() for name in names):
        return None
    return Tokenizer.from_folder(folder)


def save(
    model: Transformer,
    tokenizer: Tokenizer | None,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a folder that `load`, and transformers, read: config, weights, generation, tokenizer.

    Weights keep their dtypes, bit for bit, and packed ones their codes and scales in the formats of
    compressed-tensors (nvfp4 the reciprocal of the tensor's scale); a table that is packed for
    both embedding and head becomes a plain embedding and a packed head of its own: the same
    numbers, but Gemma's logits in 16 bits differ by a rounding, which XLA leaves out where it
    scales plain rows. Transformers unpacks nvfp4, mxfp4 and mxfp8 to bfloat16, and so reads
    them beside float32 weights only if it is given dtype=torch.bfloat16. More than
    `max_shard_size` (bytes, or a size such as "500MB") goes to several files. Files get their
    names only when all are written, config.json last, so that a folder is refused in which that was
    cut short; what other weights the folder had under those names is removed, and with a tokenizer
    what else it had of another one.
    Raises: ValueError if the model is no Transformer or has adapters, the tokenizer is none of
    ours, the model's parameters or modules are not those that its config asks for, the path is a
    file or empty, or the config cannot be said in a config.json; NotImplementedError if a parameter
    is spread over several processes, or a packed weight is one that compressed-tensors cannot say,
    or has an order of inputs.
    """
    if not isinstance(model, Transformer):
        raise ValueError(f"save: model must be a Transformer, not {type(model).__name__}")
    check_tokenizer("save", tokenizer, optional=True)
    if not os.fspath(path):
        raise ValueError("save: the path is empty; give a folder")
    shard_bytes = byte_size(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    if not is_whole(shard_bytes) or shard_bytes < 1:
        raise ValueError(
            "save: max_shard_size must be a number of bytes, 1 at least, or a size like '5GB', got "
            f"{max_shard_size!r}"
        )
    folder = Path(os.path.expanduser(path))
    existing = next((p for p in (folder, *folder.parents) if p.exists()), None)
    if existing is not None and not existing.is_dir():
        raise ValueError(f"save: {existing} is a file; give a folder")
    packed, table = _packed_layers(model)
    arrays, owned = _arrays(model, packed)
    strange = [path for path in arrays if path.rpartition(".")[2] not in ("weight", "bias")]
    if strange:
        raise ValueError(
            f"save: a checkpoint has no {strange[0]}, only weights and biases of the model that "
            "its config says; jaxllm.lora.merge makes such of adapters and what is below them, and "
            "jaxllm.lora.save_peft writes adapters alone"
        )
    if ordered := [name for name in packed if f"{name}.order" in owned]:
        raise NotImplementedError(
            f"save: the inputs of {ordered[0]} have an order of their own (GPTQ's desc_act), which "
            "is not written; copy the checkpoint that the model came from"
        )
    ids = _token_ids(model.generation, tokenizer)
    # The head of a table that is packed for both becomes one of its own
    said = dataclasses.replace(model.config, tie_word_embeddings=False) if table else model.config
    config = {**to_hf(said), "dtype": _common_dtype(arrays.values()).name, **ids}
    shapes = {path: array.shape for path, array in arrays.items()}
    shapes |= {f"{name}.weight": weight.shape for name, weight in packed.items()}
    shapes |= {} if table is None else {"embed_tokens.weight": table.packed.shape}
    _check_is_said(model, shapes, said)
    sources = _sources(arrays, model.config)
    if packed:
        more, quantization = _packed_sources(packed, [x.name for x in sources], model.config)
        sources, config = sources + more, {**config, "quantization_config": quantization}
    if table is not None:
        sources.append(_unpacked(table))

    def outdated() -> list[str]:
        """What a reader would take for the new model's."""
        weights = [file.name for file in folder.iterdir() if _WEIGHT_FILE.fullmatch(file.name)]
        return weights + (tokenizer_files(folder) if tokenizer is not None else [])

    with replacing(folder, "config.json", outdated) as stage:
        _write_weights(stage, sources, shard_bytes)
        if tokenizer is not None:
            tokenizer.save(stage)
        _write_json(stage / "generation_config.json", ids | _sampling(model.generation))
        _write_json(stage / "config.json", config)


def check_packed(model: Transformer) -> None:
    """Of a model of shapes alone, made by `nnx.eval_shape`, whether its packed weights can be
    saved; each weight counts as having a scale of its own, and its inputs as in order.

    Raises: NotImplementedError, as `save` would for it.
    """
    packed, _ = _packed_layers(model)
    arrays, _ = _arrays(model, packed)
    blank = {name: _blank(weight, 1.0 + i) for i, (name, weight) in enumerate(packed.items())}
    _packed_sources(blank, [x.name for x in _sources(arrays, model.config)], model.config)


def _blank(shaped: Packed, row_scale: float) -> Packed:
    """A weight of these shapes, in the memory of a few numbers."""
    numbers = {"codes": 0, "scale": 0, "zero": 0, "row_scale": row_scale}
    arrays = {
        field: np.broadcast_to(np.array(number, array.dtype), array.shape)
        for field, number in numbers.items()
        if (array := getattr(shaped, field)) is not None
    }
    return dataclasses.replace(shaped, **arrays)


def _check_is_said(model: Transformer, shapes: Mapping[str, Shape], config: ModelConfig) -> None:
    """Raises: ValueError unless these parameters are those that the config asks for, for else
    `load` would refuse what is written, and transformers would make up what is missing; and unless
    the modules compute what it says, for else what is read would give other logits.
    """
    said = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    wanted = {path: p.shape for path, p in _by_path(nnx.state(said, nnx.Param)).items()}
    found: dict[str, Shape] = {}
    for path, shape in shapes.items():
        parts = _parts(path, config)
        if shape[:1] == (sum(n for _, n in parts),):
            found |= {part: (n, *shape[1:]) for part, n in parts}
        else:
            found[path] = shape
    faults = {
        "has no nnx.Param": [path for path in wanted if path not in found],
        "has more than its config says": [path for path in found if path not in wanted],
        "has another shape than its config says": [
            f"{path} {list(found[path])} instead of {list(shape)}"
            for path, shape in wanted.items()
            if found.get(path, shape) != shape
        ],
    }
    if any(faults.values()):
        raise ValueError(
            "save: the model "
            + "; ".join(f"{fault}: {enumerate_some(x)}" for fault, x in faults.items() if x)
        )
    _check_module("", model, said)


# Attributes that say no more than how a module is run, or that are compared before
_HOW = {"dtype", "implementation", "runtime", "generation", "config"}
_JOINED = {name.rpartition(".")[2] for name in FUSED}


def _check_module(path: str, module: Any, said: Any) -> None:
    """Raises: ValueError for the first module below this one, or attribute of one, that is not what
    the config says.
    """
    _check_kind(path, module, type(said))
    if isinstance(module, PackedEmbedding) and module.scale_by != said.scale:
        raise ValueError(
            f"save: {path}.scale_by is {module.scale_by!r:.60}, but the config says {said.scale!r}"
        )
    if not isinstance(module, type(said)):
        return  # it is packed
    for name, value in vars(said).items():
        own: Any = getattr(module, name, None)
        where = f"{path}.{name}".removeprefix(".")
        if name.startswith("_") or name in _HOW or isinstance(value, nnx.Variable):
            continue
        if isinstance(value, nnx.List):
            for i, (part, like) in enumerate(zip(own, list(value), strict=False)):
                _check_module(f"{where}.{i}", part, like)
        elif isinstance(value, nnx.Module):
            if own is not None:  # the parameters are there: joined, or a table's
                _check_module(where, own, value)
        elif name in _JOINED and own is not None:
            _check_kind(where, own, Linear)
        elif own != value:
            what = f"a {type(own).__name__}" if isinstance(own, nnx.Module) else f"{own!r:.60}"
            raise ValueError(f"save: {where} is {what}, but the config says {value!r:.60}")


def _check_kind(path: str, module: Any, kind: type[nnx.Module]) -> None:
    from jaxllm.fp8 import Fp8Linear  # here, since `import jaxllm` leaves it out

    also: dict[type, tuple[type[nnx.Module], ...]] = {
        Linear: (PackedLinear, Fp8Linear),
        BitLinear: (PackedLinear,),
        Embedding: (PackedEmbedding,),
    }
    if not any(computes_as(module, each) for each in (kind, *also.get(kind, ()))):
        raise ValueError(
            f"save: {path or 'the model'} is a {type(module).__name__}, which a config.json cannot "
            f"say; it must be of the class {kind.__name__}, with its methods"
        )


# With what an older model's file may say of packed weights
_WEIGHT_FILE = re.compile(
    rf"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|{re.escape(HF_QUANT_CONFIG)}"
)
_PACKED_PARTS = ("codes", "scale", "zero", "row_scale", "order")


def _packed_layers(model: Transformer) -> tuple[dict[str, Packed], PackedEmbedding | None]:
    """The weights of the packed linear layers, by dotted name; and the embedding, if it is packed
    with the head that is tied to it, which is then among the layers.
    """
    found = packed_weights(model)
    if not isinstance(model.embed_tokens, PackedEmbedding):
        return found, None
    found["lm_head"] = found.pop("embed_tokens")
    return found, model.embed_tokens


def _arrays(
    model: Transformer, packed: Collection[str]
) -> tuple[dict[str, jax.Array], Collection[str]]:
    """By path the parameters that are not these packed layers', and the paths of those that are."""
    arrays = {path: p.get_value() for path, p in _by_path(nnx.state(model, nnx.Param)).items()}
    parts = {f"{name}.{part}" for name in [*packed, "embed_tokens"] for part in _PACKED_PARTS}
    owned = parts & arrays.keys()
    return {path: array for path, array in arrays.items() if path not in owned}, owned


def _unpacked(table: PackedEmbedding) -> Source:
    """The embedding's rows as the model looks them up."""
    return Source(
        "model.embed_tokens.weight",
        np.dtype(jnp.dtype(table.dtype)),
        table.packed.shape,
        lambda: [to_host(table.dequantize())],
    )


def _packed_sources(
    packed: Mapping[str, Packed], others: Sequence[str], config: ModelConfig
) -> tuple[list[Source], dict[str, Any]]:
    """The tensors of packed layers, and the quantization_config beside these other tensors."""
    fused = FAMILIES[config.model_type].fused
    ternary = [name for name, weight in packed.items() if weight.scheme == "ternary"]
    if fused and ternary:
        raise NotImplementedError(
            f"save: {ternary[0]} is ternary, and a family of fused projections "
            f"({config.model_type}) cannot be one of BitNet's; quantize to another scheme"
        )
    layers = {}
    for name, weight in packed.items():
        first = 0
        for part, rows in _parts(f"{name}.weight", config) or [(f"{name}.weight", weight.shape[0])]:
            layers[part.removesuffix(".weight")] = Rows(weight, first, rows)
            first += rows
    # In one order, joined by jaxllm.fuse or not
    layers = dict(sorted(layers.items()))
    biased = any(f"model.{layer}.bias" in others for layer in layers)
    sources, forms = packed_sources(layers, fused=fused, biased=biased)
    plain = [name.removesuffix(".weight") for name in others if name.endswith("_proj.weight")]
    if both := sorted(forms.keys() & plain):
        raise NotImplementedError(
            f"save: {both[0]} is one tensor of the family, of which only parts are packed"
        )
    if trained := [name for name in plain if config.is_bit_linear(name.removeprefix("model."))]:
        raise NotImplementedError(
            f"save: {trained[0]} is not packed beside layers that are, and no checkpoint of BitNet "
            "has both; pack all of them or none"
        )
    kept: list[str] = [] if "lm_head" in forms else ["lm_head"]
    said = compressed_tensors.quantization_config({**forms, **dict.fromkeys([*plain, *kept])})
    return sources, said


def _token_ids(generation: GenerationDefaults, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The keys for token ids. None is written too: transformers has ids of its own as defaults."""
    stops = generation.stop_ids
    bos = generation.bos_id
    if tokenizer is not None:
        bos = tokenizer.bos_id if bos is None else bos
        stops = stops or (() if tokenizer.eos_id is None else (tokenizer.eos_id,))
    eos = stops[0] if len(stops) == 1 else list(stops) or None
    return {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": generation.pad_id}


def _sampling(generation: GenerationDefaults) -> dict[str, Any]:
    """What a generation_config.json says of sampling: the fields that are not at their defaults."""
    said, off = dataclasses.asdict(generation), dataclasses.asdict(GenerationDefaults())
    return {key: said[key] for key in said if key not in _ID_FIELDS and said[key] != off[key]}


_ID_FIELDS = ("stop_ids", "bos_id", "pad_id")


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _sources(arrays: Mapping[str, jax.Array], config: ModelConfig) -> list[Source]:
    """The tensors to write; a fused one comes from the parameters whose rows it holds."""
    places = {}
    for path, array in arrays.items():
        start = 0
        for part, rows in _parts(path, config) or [(path, array.shape[0])]:
            places[part] = _Rows(array, start, start + rows)
            start += rows
    shapes = {path: place.shape for path, place in places.items()}
    fused = FAMILIES[config.model_type].fused
    sources = []
    for name, stored in stored_tensors(shapes, fused=fused).items():
        parts = [places[path] for path in stored.parameters]
        make = functools.partial(map, _Rows.to_host, parts)
        sources.append(Source(name, _common_dtype(parts), stored.shape, make))
    return sources


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A parameter: some rows of an array."""

    array: jax.Array
    start: int
    stop: int

    @property
    def shape(self) -> Shape:
        return (self.stop - self.start, *self.array.shape[1:])

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def to_host(self) -> np.ndarray:
        """Its values; what `jaxllm.fuse` has joined is cut there, not on the device."""
        return to_host(self.array)[self.start : self.stop]


def _parts(path: str, config: ModelConfig) -> list[tuple[str, int]]:
    """What a module that `jaxllm.fuse` has made holds: names and rows; nothing for another."""
    width, keys = config.head_dim, config.num_key_value_heads
    heads = (config.num_attention_heads, keys, keys)
    rows = {
        "self_attn.qkv_proj": [n * width for n in heads],
        "mlp.gate_up_proj": [config.intermediate_size] * 2,
    }
    owner, _, kind = path.rpartition(".")
    for joined, parts in FUSED.items():
        if owner.endswith(joined):
            names = [f"{owner.removesuffix(joined)}{part}.{kind}" for part in parts]
            return list(zip(names, rows[joined], strict=True))
    return []


def _common_dtype(arrays: Iterable[Any]) -> np.dtype:
    """The narrowest dtype that holds all of these; it is theirs where they have one."""
    return np.dtype(functools.reduce(jnp.promote_types, {array.dtype for array in arrays}))


def _write_weights(stage: Path, sources: Sequence[Source], shard_bytes: int) -> None:
    shards: list[list[Source]] = [[]]
    for source in sources:
        size = sum(other.size_bytes for other in shards[-1])
        if shards[-1] and size + source.size_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(source)
    if len(shards) == 1:
        return write(stage / WEIGHTS, sources)
    places = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        write(stage / name, shard)
        places |= {source.name: name for source in shard}
    total = sum(source.size_bytes for source in sources)
    _write_json(stage / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
