"""Checkpoint folders of tiny random models, written from the goldens without torch.

A golden stores no weights: they are made again from a seed, the tensor's name and its shape.
`goldens/make.py` gave the same weights to transformers.
"""

import functools
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

GOLDENS = Path(__file__).parent / "goldens"


class Golden(NamedTuple):
    """What transformers says of one tiny model; `arrays` as goldens/make.py describes them."""

    name: str
    config: dict[str, Any]
    config_old: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    seed: int
    scale: float
    digest: int
    arrays: dict[str, np.ndarray]

    def group(self, prefix: str) -> list[np.ndarray]:
        """Arrays `prefix_0`, `prefix_1`, ... in order."""
        count = sum(key.startswith(f"{prefix}_") for key in self.arrays)
        return [self.arrays[f"{prefix}_{i}"] for i in range(count)]


@functools.cache
def read_golden(name: str) -> Golden:
    facts = json.loads((GOLDENS / f"{name}.json").read_text())
    with np.load(GOLDENS / f"{name}.npz") as arrays:
        return Golden(
            name,
            facts["config"],
            facts["config_old"],
            {tensor: tuple(shape) for tensor, shape in facts["tensors"].items()},
            facts["seed"],
            facts["scale"],
            facts["digest"],
            dict(arrays),
        )


def make_weight(
    tensor: str, shape: tuple[int, ...], *, model_type: str, seed: int, scale: float
) -> np.ndarray:
    """One float32 tensor, uniform around the value that its kind has in a trained model.

    Raw bits of PCG64, because NumPy promises that stream, and not that of a Generator's methods.
    """
    bits = np.random.PCG64([seed, zlib.crc32(tensor.encode())]).random_raw(int(np.prod(shape)))
    # 24 bits fill a float32's mantissa, so this is exact: the numbers are the same on any machine.
    unit = ((bits >> 40).astype(np.float32) / np.float32(1 << 23) - np.float32(1)).reshape(shape)
    gemma = model_type.startswith("gemma")
    if tensor.endswith("norm.weight"):
        # Norms of q and k stand where other families have the size of their q and k weights.
        centre = (0.0 if gemma else 1.0) + (scale - 1.0 if "self_attn" in tensor else 0.0)
        if gemma and tensor == "model.norm.weight":
            centre = 2.0  # makes up for the small embedding, which is the head too
        return np.float32(centre) + np.float32(0.5) * unit
    if tensor.endswith("bias"):
        return np.float32(0.5) * unit
    if tensor.endswith("embed_tokens.weight"):
        return np.float32(0.1 if gemma else 0.8) * unit
    spread = np.float32(np.sqrt(3.0 / shape[-1]))  # keeps the variance of a row of inputs
    if any(part in tensor for part in ("q_proj", "k_proj", "qkv_proj")):
        return np.float32(scale) * spread * unit
    return np.float32(3.0 if tensor == "lm_head.weight" else 1.5) * spread * unit


def make_weights(golden: Golden) -> dict[str, np.ndarray]:
    weights = {
        tensor: make_weight(
            tensor,
            shape,
            model_type=golden.config["model_type"],
            seed=golden.seed,
            scale=golden.scale,
        )
        for tensor, shape in golden.tensors.items()
    }
    assert digest(weights) == golden.digest, f"{golden.name}: weights differ from the golden's own"
    return weights


def digest(weights: dict[str, np.ndarray]) -> int:
    value = 0
    for tensor in sorted(weights):
        value = zlib.crc32(np.ascontiguousarray(weights[tensor]).tobytes(), value)
    return value


def write_checkpoint(folder: Path, golden: Golden, config: dict[str, Any] | None = None) -> Path:
    """Writes `config` (the golden's own if None) and the golden's weights to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(golden.config if config is None else config))
    save_file(make_weights(golden), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def end_after(replaced: int, monkeypatch: Any) -> None:
    """A save ends when so many of its files have their names, as where its process is killed."""
    done = iter(range(replaced))

    def replace(old, new):
        if next(done, None) is None:
            raise KeyboardInterrupt
        Path(old).rename(new)

    monkeypatch.setattr(os, "replace", replace)


def let_pass(seconds: float, folder: Path) -> None:
    """All in the folder was last written so long ago."""
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - seconds,) * 2)
