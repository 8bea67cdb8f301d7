"""The recipes, on a model and a file so small that they take seconds."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import tiny_models

import jaxllm
from jaxllm.trainer import Fitted, Trainer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = "--steps 4 --rows 2 --length 64 --micro-batches 2".split()

pytest.importorskip("grain", reason="grain is not installed: pip install 'jaxllm[train]'")
pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'jaxllm[train]'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with the shipped model's tokenizer."""
    _, tokenizer = jaxllm.load(jaxllm.shipped_checkpoint(), dtype="float32")
    config = tiny_models.dataclasses.replace(
        tiny_models.TINY,
        vocab_size=tokenizer.vocab_size,
        num_hidden_layers=1,
        layer_types=(),
        max_position_embeddings=128,
    )
    model = tiny_models.build(config, jaxllm.Runtime(param_dtype="float32"))
    jaxllm.save(model, tokenizer, tmp_path_factory.mktemp("model") / "tiny")
    return next(tmp_path_factory.getbasetemp().glob("model*/tiny"))


@pytest.fixture
def recipe(monkeypatch):
    def run(name, *args):
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return run


@pytest.mark.slow
def test_finetune_writes_a_folder_that_loads(recipe, folder, tmp_path, capsys):
    out = tmp_path / "tuned"
    data = EXAMPLES / "data/clerk.jsonl"
    recipe("finetune.py", data, "--model", folder, "--output", out, *SMALL)
    printed = capsys.readouterr().out
    assert "128 records" not in printed  # a tenth of them is held out
    assert "before:" in printed
    assert "after:" in printed
    before, _ = jaxllm.load(folder, dtype=None)
    after, tokenizer = jaxllm.load(out, dtype=None)
    assert tokenizer is not None
    assert after.runtime.param_dtype == "bfloat16"
    assert (before.norm.weight[...] != after.norm.weight[...].astype("float32")).any()
    training = tmp_path / "tuned-training"
    rows = [json.loads(x) for x in (training / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[4]["held_out_loss"] < rows[0]["held_out_loss"]
    with pytest.raises(SystemExit, match="finetune: .*tuned-training holds a run, at step 4"):
        recipe("finetune.py", data, "--model", folder, "--output", out, *SMALL)
    recipe("finetune.py", data, "--model", folder, "--output", out, *SMALL, "--resume")


@pytest.mark.slow
def test_finetune_lora_writes_a_peft_folder(recipe, folder, tmp_path, capsys):
    out = tmp_path / "adapter"
    data = EXAMPLES / "data/clerk.jsonl"
    recipe("finetune_lora.py", data, "--model", folder, "--output", out, *SMALL)
    assert "before:" in capsys.readouterr().out
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 16
    model, _ = jaxllm.load(folder, dtype="float32")
    from jaxllm import lora

    lora.load_peft(model, out)
    assert any((x != 0).any() for name, x in lora.adapters(model).items() if "lora_b" in name)


def test_what_the_library_refuses_is_one_sentence(recipe, folder, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(SystemExit, match="^finetune: data: .*empty.jsonl is empty") as stopped:
        recipe("finetune.py", empty, "--model", folder, "--output", tmp_path / "out", *SMALL)
    assert "\n" not in str(stopped.value)
    assert not list(tmp_path.glob("out*"))


def pretend(monkeypatch, loss):
    """`fit` without training; what a Trainer was given is what it returns the loss beside."""
    seen = []

    def fit(self, *, resume):
        seen.append(self)
        return Fitted({}, 1, 2.0, loss, "b", "a")

    monkeypatch.setattr(Trainer, "fit", fit)
    return seen


def test_one_step_of_texts_without_prompts(recipe, folder, tmp_path, monkeypatch, capsys):
    seen = pretend(monkeypatch, 1.0)
    texts = tmp_path / "texts.jsonl"
    texts.write_text(20 * (json.dumps({"text": "To be, or not to be"}) + "\n"))
    small = ["--model", folder, "--output", tmp_path / "out", *SMALL, "--steps", "1"]
    recipe("finetune_lora.py", texts, *small)
    assert [run.settings["dtype"] for run in seen] == ["float32"]  # --resume must have it alike
    assert "To be" in capsys.readouterr().out


def test_a_loss_that_is_not_finite_is_one_sentence(recipe, folder, tmp_path, monkeypatch):
    pretend(monkeypatch, None)
    small = ["--model", folder, "--output", tmp_path / "out", *SMALL]
    with pytest.raises(SystemExit, match="^finetune: the held-out loss is not a finite number"):
        recipe("finetune.py", EXAMPLES / "data/clerk.jsonl", *small)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["finetune", "finetune_lora"])
def test_an_output_that_cannot_be_written_is_said_before_training(
    recipe, tmp_path, monkeypatch, name
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(jaxllm, "load", None)
    with pytest.raises(SystemExit, match=f"^{name}: .*/file is a file; give a folder$"):
        recipe(f"{name}.py", EXAMPLES / "data/clerk.jsonl", "--output", tmp_path / "file")
