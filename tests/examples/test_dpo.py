"""The recipe, on a model and a file so small that it takes seconds."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import tiny_models

import jaxllm
from jaxllm import lora
from jaxllm.trainer import Fitted, Trainer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytest.importorskip("grain", reason="grain is not installed: pip install 'jaxllm[train]'")
pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'jaxllm[train]'")


@pytest.mark.slow
def test_it_writes_a_peft_folder(monkeypatch, tmp_path, capsys):
    _, tokenizer = jaxllm.load(jaxllm.shipped_checkpoint(), dtype="float32")
    config = tiny_models.dataclasses.replace(
        tiny_models.TINY,
        vocab_size=tokenizer.vocab_size,
        num_hidden_layers=1,
        layer_types=(),
        max_position_embeddings=128,
    )
    folder, out = tmp_path / "model", tmp_path / "preferred"
    jaxllm.save(tiny_models.build(config), tokenizer, folder)
    small = "--steps 4 --pairs 4 --rank 4 --learning-rate 0.01 --loss ipo --beta 0.5".split()
    command = ["dpo.py", EXAMPLES / "data/courtesy-pairs.jsonl", "--model", folder]
    command += ["--output", out, "--length", 120, *small]
    monkeypatch.setattr(sys, "argv", list(map(str, command)))
    runpy.run_path(str(EXAMPLES / "dpo.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "accuracy over 8 held-out pairs: " in printed
    assert "before: " in printed
    rows = (tmp_path / "preferred-training/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(row)["held_out_loss"] for row in rows]
    assert losses[0] == pytest.approx(1.0)  # (1 / 2 beta)^2: the model is its own reference
    assert min(losses) < 1.0
    model, _ = jaxllm.load(folder, dtype="float32")
    lora.load_peft(model, out)
    assert any((x != 0).any() for name, x in lora.adapters(model).items() if "lora_b" in name)


def test_one_step_and_a_loss_that_is_not_finite(monkeypatch, tmp_path):
    def fit(self, *, resume):
        assert self.settings["dtype"] == "float32"  # which --resume must have alike
        return Fitted({}, 1, 2.0, None, "b", "a")

    monkeypatch.setattr(Trainer, "fit", fit)
    command = ["dpo.py", EXAMPLES / "data/courtesy-pairs.jsonl", "--steps", 1, "--rank", 1]
    command += ["--output", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", list(map(str, command)))
    with pytest.raises(SystemExit, match="^dpo: the held-out loss is not a finite number"):
        runpy.run_path(str(EXAMPLES / "dpo.py"), run_name="__main__")
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_written_is_said_before_training(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    command = ["dpo.py", EXAMPLES / "data/courtesy-pairs.jsonl", "--output", tmp_path / "file"]
    monkeypatch.setattr(sys, "argv", list(map(str, command)))
    monkeypatch.setattr(jaxllm, "load", None)
    with pytest.raises(SystemExit, match="^dpo: .*/file is a file; give a folder$"):
        runpy.run_path(str(EXAMPLES / "dpo.py"), run_name="__main__")
