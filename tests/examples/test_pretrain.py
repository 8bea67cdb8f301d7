"""The recipe, on a text and a model so small that it takes seconds."""

import runpy
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import jaxllm
from jaxllm import train

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/pretrain.py"
SMALL = (
    "--vocab-size 280 --context 16 --width 16 --mlp-width 24 --layers 1 --heads 2 "
    "--batch-tokens 32 --steps 8 --eval-every 3"
).split()

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'jaxllm[train]'")


@pytest.fixture
def text(tmp_path):
    """Words in an order that no one knows, so that no seed makes it easy."""
    rng = np.random.default_rng(0)
    words = "what light through yonder window breaks it is the east".split()
    lines = [" ".join(rng.choice(words, 5)) for _ in range(60)]
    file = tmp_path / "text.txt"
    file.write_text("Juliet:\n" + "\n".join(lines), encoding="utf-8")
    return file


@pytest.fixture
def pretrain(monkeypatch):
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["pretrain.py", *map(str, args)])
        runpy.run_path(str(EXAMPLE), run_name="__main__")

    return run


@pytest.mark.slow
def test_it_trains_saves_and_resumes(pretrain, text, tmp_path, monkeypatch, capsys):
    pretrain(text, "--output", tmp_path / "whole", *SMALL)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed[:3]] == ["step 3", "step 6", "step 8"]
    assert "nats a character of the held-out tenth, as saved" in printed[3]
    assert printed[4] == "Juliet:"

    folder = tmp_path / "whole"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    model, tokenizer = jaxllm.load(folder, dtype=None)
    assert tokenizer is not None
    assert model.runtime.param_dtype == "bfloat16"
    assert model.generation.stop_ids == (tokenizer.eos_id,)
    chat = [{"role": "user", "content": "Speak. "}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "User:\nSpeak.\n\nAssistant:\n"
    # The loss that it printed: all characters of the last tenth, each scored once.
    whole = text.read_text()
    held_out = whole[len(whole) * 9 // 10 :]
    ids = [tokenizer.eos_id, *tokenizer.encode(held_out)]
    assert tokenizer.decode(ids[1:]) == held_out
    model, _ = jaxllm.load(folder, dtype="float32")
    windows = train.cover_windows(ids, rows=8, length=16, stride=8)
    total, count = train.make_evaluate(model)(train.parameters(model), windows)
    assert count == len(ids) - 1
    assert f"{total / len(held_out):.4f} nats" in printed[3]

    with pytest.raises(SystemExit, match="whole-training holds a run; --resume goes on with it"):
        pretrain(text, "--output", folder, *SMALL)

    draws = 0

    def interrupt_at_the_fifth(*args, draw=train.draw_windows, **kwargs):
        nonlocal draws
        draws += 1
        if draws == 5:
            signal.raise_signal(signal.SIGINT)
        return draw(*args, **kwargs)

    monkeypatch.setattr(train, "draw_windows", interrupt_at_the_fifth)
    cut = tmp_path / "cut"
    with pytest.raises(SystemExit, match="saved at step 5; the same command with --resume goes on"):
        pretrain(text, "--output", cut, *SMALL)
    with pytest.raises(SystemExit, match="--resume takes the same text and options"):
        pretrain(text, "--output", cut, *SMALL, "--seed", 1, "--resume")
    pretrain(text, "--output", cut, *SMALL, "--resume")
    for name in ("model.safetensors", "tokenizer.json", "config.json", "loss.png"):
        assert (cut / name).read_bytes() == (folder / name).read_bytes(), name


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is empty; give a text to train on"),
        (b" \n", "is empty; give a text to train on"),
        (b"\xff\xfe\xfd", "is not a text file in UTF-8"),
        (b"To be", "is too short: .* do not fill a window of 16"),
    ],
)
def test_a_text_that_will_not_do_is_one_sentence(pretrain, tmp_path, content, words):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit, match=f"^pretrain: .*text.txt {words}") as stopped:
        pretrain(file, "--output", tmp_path / "out", *SMALL)
    assert "\n" not in str(stopped.value)
    assert not (tmp_path / "out").exists()


def test_what_the_library_refuses_is_one_sentence_too(pretrain, text, tmp_path):
    for option, value, words in (
        ("--heads", 0, "--heads must be at least 1, got 0"),
        ("--eval-every", 0, "--eval-every must be at least 1, got 0"),
        ("--seed", 2**64, r"--seed must be from 0 to 2\*\*32 - 1, got 18446744073709551616"),
        ("--learning-rate", "nan", "--learning-rate must be a number above 0, .*, got nan and 0.8"),
        ("--weight-decay", "inf", ".* --weight-decay one of at least 0, got 0.003 and inf"),
        ("--width", 18, "9 numbers of a head cannot be rotated"),
        ("--batch-tokens", 8, "--batch-tokens is less than one window"),
        ("--resume", None, "no training was saved here"),
        ("--prompt", "x y z " * 9, "the prompt has [0-9]+ tokens, and a window of 16 has no room"),
    ):
        more = [option] if value is None else [option, value]
        with pytest.raises(SystemExit, match=f"^pretrain: .*{words}"):
            pretrain(text, "--output", tmp_path / "out", *SMALL, *more)


def test_a_run_without_a_finite_loss_writes_no_model(pretrain, text, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "make_evaluate", lambda model: lambda *_: (float("nan"), 1))
    with pytest.raises(SystemExit, match="^pretrain: no held-out loss is a finite number; try a"):
        pretrain(text, "--output", tmp_path / "out", *SMALL)
    assert not (tmp_path / "out").exists()


def test_what_could_not_be_written_is_said_before_training(pretrain, text, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "init_state", None)
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file/inside"):
        with pytest.raises(SystemExit, match="^pretrain: .*/file is a file; give a folder$"):
            pretrain(text, "--output", out, *SMALL)
    make = jaxllm.ModelConfig
    monkeypatch.setattr(jaxllm, "ModelConfig", lambda **fields: make(**fields, qk_norm=True))
    with pytest.raises(SystemExit, match="^pretrain: config: a config.json of model_type 'llama'"):
        pretrain(text, "--output", tmp_path / "out", *SMALL)
