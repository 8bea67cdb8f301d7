"""What a PEFT folder may hold beside the adapter; `test_lora.py` has the rest."""

import dataclasses
import json
import re

import numpy as np
import pytest
import tiny_checkpoints
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoint import peft
from jaxllm.checkpoint.peft import LowRank, read_folder, write_folder

SHAPES = {"lm_head": (5, 4)}
ONE = LowRank(np.ones((2, 4), np.float32), np.ones((5, 2), np.float32), None, 4.0, False)


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path, {"lm_head": ONE}, SHAPES, fused=False)
    return tmp_path


def test_how_eva_began_is_nothing_that_is_computed(folder):
    file = folder / peft.CONFIG
    eva = {"init_lora_weights": "eva", "eva_config": {"rho": 2.0, "tau": 0.99}}
    file.write_text(json.dumps(json.loads(file.read_text()) | eva))
    assert read_folder(folder, SHAPES, fused=False).keys() == {"lm_head"}


def test_a_copy_of_the_base_is_refused_with_a_cure(folder):
    file, name = folder / peft.TENSORS, "base_model.model.lm_head.base_layer.weight"
    save_file(load_file(file) | {name: np.ones((5, 4), np.float32)}, file)
    sentence = f"{file}: beside the adapter there are weights of its base: {name}; save it anew wit"
    with pytest.raises(NotImplementedError, match=re.escape(sentence)):
        read_folder(folder, SHAPES, fused=False)


def test_an_adapter_of_an_embedding_is_refused_without_a_cure(folder):
    file, name = folder / peft.TENSORS, "base_model.model.model.embed_tokens"
    parts = ("lora_embedding_A", "base_layer.weight")  # of which PEFT writes the second beside it
    more = {f"{name}.{part}": np.ones((5, 4), np.float32) for part in parts}
    save_file(load_file(file) | more, file)
    sentence = f"{file}: 1 tensors are not lora_A, .* of a Linear: {name}.lora_embedding_A$"
    with pytest.raises(NotImplementedError, match=sentence):
        read_folder(folder, SHAPES, fused=False)


def test_the_older_format_is_named(folder):
    (folder / peft.TENSORS).rename(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match="bin is of an older format, .* safe_serialization=True"):
        read_folder(folder, SHAPES, fused=False)


def test_a_failed_save_leaves_no_folder(tmp_path, monkeypatch):
    def full(file, sources):
        raise OSError("disk full")

    monkeypatch.setattr(peft, "write", full)
    with pytest.raises(OSError, match="disk full"):
        write_folder(tmp_path / "new", {"lm_head": ONE}, SHAPES, fused=False)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("replaced", [0, 1])
def test_a_folder_in_which_a_save_was_cut_short_is_refused(folder, monkeypatch, replaced):
    """Of two adapters of one shape, the tensors of one would go with the alpha of the other."""
    other = dataclasses.replace(ONE, a=-ONE.a, alpha=8.0)
    with monkeypatch.context() as patch:
        tiny_checkpoints.end_after(replaced, patch)
        with pytest.raises(KeyboardInterrupt):
            write_folder(folder, {"lm_head": other}, SHAPES, fused=False)
    with pytest.raises(FileNotFoundError, match="there is no adapter_config.json; give a folder"):
        read_folder(folder, SHAPES, fused=False)
    tiny_checkpoints.let_pass(700, folder)
    write_folder(folder, {"lm_head": other}, SHAPES, fused=False)
    assert read_folder(folder, SHAPES, fused=False)["lm_head"].alpha == 8.0
    assert sorted(file.name for file in folder.iterdir()) == [peft.CONFIG, peft.TENSORS]
