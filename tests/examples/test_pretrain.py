"""The recipe of a model from scratch, on a text and a model so small that it takes seconds."""

import runpy
import sys
from pathlib import Path

import pytest

import jaxllm

RECIPE = Path(__file__).resolve().parents[2] / "examples/pretrain.py"
SMALL = (
    "--vocab-size 300 --context 32 --width 32 --mlp-width 32 --layers 1 --heads 2 --steps 4 "
    "--batch-tokens 64 --eval-every 2"
).split()
LINE = "to be or not to be, that is the question\n"

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'jaxllm[train]'")


@pytest.fixture
def pretrain(monkeypatch, tmp_path):
    """Runs the recipe on a text; the folder that it writes."""

    def run(text, *more):
        (tmp_path / "in.txt").write_text(text)
        out = tmp_path / "out"
        command = ["pretrain.py", tmp_path / "in.txt", "--output", out, *SMALL, *more]
        monkeypatch.setattr(sys, "argv", [str(x) for x in command])
        runpy.run_path(str(RECIPE), run_name="__main__")
        return out

    return run


@pytest.mark.slow
def test_it_writes_a_folder_that_generates(pretrain, capsys):
    out = pretrain(40 * LINE)
    printed = capsys.readouterr().out
    assert "step 4: " in printed
    assert f"{out}: " in printed
    assert LINE in printed  # with which the sample begins
    model, tokenizer = jaxllm.load(out)
    assert tokenizer is not None
    assert tokenizer.has_chat_template
    assert (model.config.num_hidden_layers, model.generation.temperature) == (1, 0.8)
    assert (out / "loss.png").stat().st_size > 1000
    with pytest.raises(SystemExit, match="out-training holds a run; --resume goes on with it"):
        pretrain(40 * LINE)
    with pytest.raises(SystemExit, match="--resume takes the same text and options"):
        pretrain(40 * LINE, "--resume", "--seed", "5")


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        (LINE, (), "is too short: [0-9]+ tokens to train on do not fill a window of 32"),
        (40 * LINE, ("--batch-tokens", "31"), "--batch-tokens is less than one window"),
        (
            *(40 * LINE, ("--prompt", "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z?!")),
            "the prompt has [0-9]+ tokens, and a window of 32 has no room for another; give a shor",
        ),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(pretrain, text, more, words):
    with pytest.raises(SystemExit, match=f"^pretrain: .*{words}") as stopped:
        pretrain(text, *more)
    assert "\n" not in str(stopped.value)
