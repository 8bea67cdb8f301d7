import json

import pytest

from jaxllm.checkpoint import shipped
from jaxllm.checkpoint.shipped import shipped_checkpoint


def test_the_shipped_model_is_whole_and_small():
    folder = shipped_checkpoint()
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] >= 512
    names = {file.name for file in folder.iterdir()}
    assert {"model.safetensors", "tokenizer.json", "generation_config.json"} <= names
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 8_000_000


def test_inside_the_package_comes_before_beside_it(tmp_path, monkeypatch):
    """A wheel carries the folder inside the package; a clone has it at the top."""
    inside, beside = tmp_path / "jaxllm/checkpoints", tmp_path / "checkpoints"
    monkeypatch.setattr(shipped, "_FOLDERS", (inside, beside))
    for folder, name in ((inside, "a"), (beside, "a"), (beside, "b")):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
    assert shipped_checkpoint("a") == inside / "a"
    assert shipped_checkpoint("b") == beside / "b"
    with pytest.raises(FileNotFoundError, match="no model called 'c' ships.*those that do: a, b$"):
        shipped_checkpoint("c")


def test_nothing_ships(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "_FOLDERS", (tmp_path,))
    with pytest.raises(FileNotFoundError, match="those that do: none$"):
        shipped_checkpoint()
