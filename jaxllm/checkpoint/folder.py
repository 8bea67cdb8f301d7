"""A Hugging Face folder, up to its weights: found, its JSON and its tensors' headers checked."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from jaxllm.checkpoint import bitnet, quantization_config
from jaxllm.checkpoint.quantization_config import HF_QUANT_CONFIG, Quantization
from jaxllm.checkpoint.safetensors_file import Tensor, read_header
from jaxllm.config import GenerationDefaults, ModelConfig
from jaxllm.config_keys import Keys
from jaxllm.families import from_hf

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
STAGE = ".save-"  # how folders begin in which a save writes
DEAD_S = 600  # without a write; then a save was killed
# What is taken from the hub: no second copy of the weights in another format. Tokenizers that are
# not read are told from a model without one.
HUB_FILES: list[str] = [
    *("config.json", "generation_config.json", HF_QUANT_CONFIG),
    *(WEIGHTS, INDEX, "model-*.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja"),
]
_OTHER_FOLDERS = {  # by a file that tells them
    "run.json": "; this is a run of jaxllm finetune, of which jaxllm export makes one",
    "adapter_config.json": (
        "; this is a PEFT adapter, which stands beside a model: jaxllm generate MODEL --adapter "
        "FOLDER, or lora.load_peft"
    ),
}
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def find_folder(path_or_hub_id: str | os.PathLike[str]) -> Path:
    """The folder of that name, or else the model `org/name` of the Hugging Face hub, downloaded.

    Raises: FileNotFoundError if there is neither; ValueError if it is a file, or no name.
    """
    if not isinstance(path_or_hub_id, str | os.PathLike):
        raise ValueError(
            f"a checkpoint is a folder or a hub id (org/name), got {path_or_hub_id!r:.60}"
        )
    name = os.fspath(path_or_hub_id)
    folder = Path(os.path.expanduser(name))
    if name and folder.is_dir():
        return folder
    if name and folder.exists():
        raise ValueError(f"{name} is a file; give the folder of the checkpoint")
    # A path such as checkpoints/typo looks like org/name too; its first part tells them apart.
    is_id = isinstance(path_or_hub_id, str) and _HUB_ID.fullmatch(name)
    if not is_id or folder.parent.is_dir():
        where = f" where there is no folder {folder.parent.name!r}" if is_id else ""
        raise FileNotFoundError(
            f"there is no folder {name!r}; give a checkpoint's folder, or the id of a model on "
            f"the Hugging Face hub (org/name){where}"
        )
    return _download(name)


def _download(hub_id: str) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise FileNotFoundError(
            f"there is no folder {hub_id}, and to take it from the Hugging Face hub "
            "huggingface_hub is needed: pip install huggingface_hub"
        ) from None
    try:
        folder = Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=HUB_FILES))
        if others := _listed_elsewhere(folder):  # of the same commit, whose name the folder has
            huggingface_hub.snapshot_download(hub_id, revision=folder.name, allow_patterns=others)
        return folder
    except errors.GatedRepoError:
        reason = "its licence must be accepted on its page there first; then run: hf auth login"
    except errors.RepositoryNotFoundError:
        reason = "there is no such model, or it is private; check the name, or run: hf auth login"
    except Exception as error:  # the hub's client and its HTTP library share no base class
        first_line = (str(error).splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first_line}; check the network, or give a folder"
    raise FileNotFoundError(
        f"there is no folder {hub_id}, and the Hugging Face hub does not give it: {reason}"
    )


def _listed_elsewhere(folder: Path) -> list[str]:
    """The files that the index names and that are not there: `HUB_FILES` has the usual names."""
    places = None
    if (folder / WEIGHTS).exists():  # which `list_tensors` takes
        return []
    with contextlib.suppress(OSError, ValueError):  # `list_tensors` says what is wrong with it
        places = read_json(folder / INDEX).get("weight_map")
    names = places.values() if isinstance(places, dict) else ()
    absent = {name for name in names if isinstance(name, str) and not (folder / name).exists()}
    return sorted(map(glob.escape, absent))


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises: ValueError if the file holds anything else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must hold a JSON object, found {type(content).__name__}")
    return content


def read_config(folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """What config.json says, as a ModelConfig and as it stands there.

    Raises: FileNotFoundError, ValueError as `from_hf`; ValueError, NotImplementedError as
    `read_quantization`.
    """
    file = folder / "config.json"
    if not file.is_file():
        kind = next(
            (text for name, text in _OTHER_FOLDERS.items() if (folder / name).is_file()), ""
        )
        raise FileNotFoundError(
            f"{folder}: there is no config.json; give a checkpoint's folder{kind}"
        )
    hf = read_json(file)
    _read_quantization(folder, hf)  # before the rest, for it says more of what is not supported
    said = hf
    if not _is_bitnet(hf):
        said = {key: value for key, value in hf.items() if key not in _QUANTIZED}
        if inner := _text_config(hf):
            inner = {key: value for key, value in inner.items() if key not in _QUANTIZED}
            said = {**said, "text_config": inner}
    return from_hf(said, owner=str(file)), hf


def _text_config(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = hf.get("text_config")
    return inner if isinstance(inner, Mapping) else {}


_QUANTIZED = ("quantization_config", "compression_config")


def _is_bitnet(hf: Mapping[str, Any]) -> bool:
    """Whether `from_hf` reads the quantization_config, for the model computes what it says."""
    said = hf.get("quantization_config")
    return isinstance(said, Mapping) and said.get("quant_method") == "bitnet"


def read_quantization(
    folder: Path, config: ModelConfig, hf: Mapping[str, Any]
) -> Quantization | None:
    """What the folder says of packed weights, of `read_config`'s two; None if nothing is packed.

    Raises: ValueError, NotImplementedError for what cannot be loaded.
    """
    found = _read_quantization(folder, hf)
    return found or bitnet.packed_modules(str(folder / "config.json"), config, hf)


def _read_quantization(folder: Path, hf: Mapping[str, Any]) -> Quantization | None:
    """All but BitNet's, which is of the model, too."""
    parts = [part for part in (hf, _text_config(hf)) if any(map(part.get, _QUANTIZED))]
    beside = folder / HF_QUANT_CONFIG
    return quantization_config.read_quantization(
        folder / "config.json",
        parts[0] if parts else {},
        read_json(beside) if beside.is_file() else None,
    )


def stated_dtype(hf: Mapping[str, Any]) -> str | None:
    """The dtype that a config.json gives, under its new or its old key."""
    for part in (hf, _text_config(hf)):
        for key in ("dtype", "torch_dtype"):
            if part.get(key) is not None:
                return str(part[key]).removeprefix("torch.")
    return None


def check_new(folder: Path) -> None:
    """Before the work whose result goes there. Raises: ValueError if something is there but a
    folder that is empty, but for what saves were killed in; OSError as `check_writable`.
    """
    if folder.exists() and (
        not folder.is_dir() or any(not x.name.startswith(STAGE) for x in folder.iterdir())
    ):
        raise ValueError(f"{folder} is there already; give a new folder")
    check_writable(folder)


def check_writable(folder: Path) -> None:
    """Leaves nothing behind. Raises: OSError, a NotADirectoryError if a file is in the way, a
    PermissionError if nothing can be written to the folder, or another if it cannot be made.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{there} is a file; give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{there} cannot be written to; give another folder")
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    finally:
        for path in absent:
            with contextlib.suppress(OSError):  # it was not made, or is another's by now
                path.rmdir()


@contextlib.contextmanager
def replacing(
    folder: Path, config: str, outdated: Callable[[], Iterable[str]] = lambda: ()
) -> Iterator[Path]:
    """A folder to write files into, which then take their names in `folder`; of those that are
    `outdated` there, and not written, none is kept.

    Nothing is changed before all are written. From then on `config`, without which nothing is
    loaded, is the first to go and the last to come: a folder that is cut short is refused.
    """
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{STAGE}*"):
        with contextlib.suppress(FileNotFoundError):  # of a save that goes on meanwhile
            if time.time() - max(x.stat().st_mtime for x in (left, *left.rglob("*"))) > DEAD_S:
                shutil.rmtree(left, ignore_errors=True)
    stage = Path(tempfile.mkdtemp(prefix=STAGE, dir=folder))
    try:
        yield stage
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        if new and not any(folder.iterdir()):
            folder.rmdir()
        raise
    files = (file for file in sorted(stage.rglob("*")) if file.is_file())
    names = [file.relative_to(stage).as_posix() for file in files]
    (folder / config).unlink(missing_ok=True)
    for name in set(outdated()) - set(names):
        (folder / name).unlink()
    for name in sorted(names, key=lambda name: name == config):
        (folder / name).parent.mkdir(exist_ok=True)
        os.replace(stage / name, folder / name)
    shutil.rmtree(stage)  # not before all are in place: what is not can be moved by hand


def weights_digest(folder: Path) -> str:
    """A digest of each tensor's name, dtype, shape and some of its bytes: it tells two checkpoints
    of one shape apart without reading all of them, in how many files they may be. Of the files,
    and so before anything is loaded, cast or packed; `trainer.fingerprint` is of what a run holds.

    Raises: as `list_tensors`.
    """
    digest, tensors = hashlib.sha256(), list_tensors(folder)
    with contextlib.ExitStack() as stack:
        files = {
            file: stack.enter_context(file.open("rb"))
            for file in {tensor.file for tensor in tensors.values()}
        }
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{name} {tensor.dtype}{tensor.shape}".encode())
            for place in (0, tensor.size_bytes // 2, max(0, tensor.size_bytes - 64)):
                files[tensor.file].seek(tensor.offset + place)
                digest.update(files[tensor.file].read(min(64, tensor.size_bytes - place)))
    return digest.hexdigest()[:16]


def list_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint's one or many safetensors files; their data is not read.

    Raises: FileNotFoundError, ValueError if files or headers are missing, damaged, or disagree.
    """
    if (folder / WEIGHTS).is_file():
        return read_header(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        return _list_sharded(folder)
    for name in (WEIGHTS, INDEX):
        if (folder / name).is_symlink():  # what a hub's cache has of which a part was removed
            raise FileNotFoundError(
                f"{folder}: {name} is a link to {os.readlink(folder / name)}, which is not there; "
                "download it again"
            )
    others = sorted(file.name for file in folder.iterdir())
    if any(name.endswith(".safetensors") for name in others):
        found = ", ".join(name for name in others if name.endswith(".safetensors"))
        cure = f"it has {found}; {INDEX} is needed to read several files"
    elif any(name.startswith(("pytorch_model", "consolidated")) for name in others):
        cure = (
            "its PyTorch files are not read, since a pickle can run code; convert it with "
            "transformers: AutoModelForCausalLM.from_pretrained(a).save_pretrained(b)"
        )
    else:
        cure = f"weights must be there as {WEIGHTS}, or as several files with {INDEX}"
    raise FileNotFoundError(f"{folder}: there is no {WEIGHTS}; {cure}")


def _list_sharded(folder: Path) -> dict[str, Tensor]:
    index = folder / INDEX
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ValueError(f"{index}: needs a weight_map from tensor names to file names")
    headers: dict[str, dict[str, Tensor]] = {}
    for name in sorted(set(places.values())):
        # By name only: in the hub's cache, files of the folder are links to files outside it.
        parts = PurePosixPath(name.replace("\\", "/")).parts
        if Path(name).is_absolute() or ".." in parts or not parts:
            raise ValueError(f"{index}: names {name!r}, which is not a file of this folder")
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{index}: names {name}, which is not there; download it again")
        headers[name] = read_header(folder / name)
    lost = [f"{name} in {file}" for name, file in places.items() if name not in headers[file]]
    unlisted = [
        f"{name} of {file}" for file, header in headers.items() for name in header.keys() - places
    ]
    if lost or unlisted:
        raise ValueError(
            f"{index}: disagrees with the files: "
            + "; ".join(
                [f"{len(lost)} tensors are not where it says: {enumerate_some(lost)}"] * bool(lost)
                + [f"{len(unlisted)} are not listed: {enumerate_some(unlisted)}"] * bool(unlisted)
            )
        )
    return {name: headers[file][name] for name, file in places.items()}


def enumerate_some(items: list[str], most: int = 20) -> str:
    """Items with commas, and how many more there are than `most`."""
    more = f", and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(sorted(items)[:most]) + more


def read_generation(folder: Path, hf: Mapping[str, Any]) -> GenerationDefaults:
    """Token ids and sampling of generation_config.json; ids that it lacks come from config.json, as
    does all where there is no such file.

    Other keys are not read: searches and limits that `generate` does not have.
    Raises: ValueError if a value is of the wrong kind.
    """
    file: Any = folder / "generation_config.json"
    if file.is_file():
        said = read_json(file)
    else:
        file, said = "config.json", {**_text_config(hf), **hf}

    def ids(key: str) -> tuple[int, ...]:
        for owner, part in ((file, said), ("config.json", hf), ("config.json", _text_config(hf))):
            value: Any = part.get(key)
            if value is not None:
                values = value if isinstance(value, list) else [value]
                if not all(type(x) is int and x < 2**31 for x in values):
                    raise ValueError(f"{owner}: {key} must be token ids below 2**31, got {value!r}")
                return tuple(x for x in values if x >= 0)  # some files say -1 for none
        return ()

    def number(key: str, default: float) -> float:
        value = said.get(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not abs(value) < 3e38:
            raise ValueError(
                f"{file}: {key} must be a number between -3e38 and 3e38, got {value!r}"
            )
        return value

    if type(top_k := said.get("top_k")) not in (int, type(None)):
        raise ValueError(f"{file}: top_k must be a whole number, got {top_k!r}")
    off = GenerationDefaults()
    return GenerationDefaults(
        stop_ids=ids("eos_token_id"),
        bos_id=next(iter(ids("bos_token_id")), None),
        pad_id=next(iter(ids("pad_token_id")), None),
        do_sample=Keys(said, str(file)).flag("do_sample", False),
        temperature=float(number("temperature", off.temperature)),
        top_k=None if top_k is None else int(number("top_k", 0)),
        top_p=float(number("top_p", off.top_p)),
        min_p=float(number("min_p", off.min_p)),
        repetition_penalty=float(number("repetition_penalty", off.repetition_penalty)),
    )
