"""`--quantize`, from the command to the text."""

import dataclasses
import io
import json
import os
import re
import shutil
import sys

import pytest
import quantised_checkpoints
from tiny_models import build

import jaxllm
from jaxllm.cli import main

NO_CACHE = "--no-compile-cache"


@pytest.fixture(scope="module")
def stories(shared):
    return shared / "data/stories260K"


@pytest.fixture
def packed(monkeypatch):
    """The models that were handed on to be run: the schemes of all their parts."""
    seen = []
    for name in ("generate", "stream"):
        call = getattr(jaxllm, name)

        def recorded(model, *arguments, call=call, **options):
            names = {"embed_tokens": model.embed_tokens, "lm_head": model.lm_head}
            names |= {"down_proj": model.layers[0].mlp.down_proj}
            names |= {"o_proj": model.layers[0].self_attn.o_proj}
            seen.append({k: v.scheme for k, v in names.items() if hasattr(v, "scheme")})
            return call(model, *arguments, **options)

        monkeypatch.setattr(jaxllm, name, recorded)
    return seen


def test_generate_and_chat_pack_the_model(stories, tmp_path, monkeypatch, capsys, packed):
    for file in stories.iterdir():
        shutil.copy(file, tmp_path / file.name)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time\n"))
    options = ["--max-new-tokens", "4", "--quantize", "int8", "--quantize-head", "fp8", NO_CACHE]
    assert main(["generate", str(tmp_path), "--prompt", "Once upon a time", *options]) == 0
    assert capsys.readouterr().out.strip() == "Once upon a time, there was a"
    options += ["--keep", "down_proj"]
    assert main(["chat", str(tmp_path), *options]) == 0
    assert capsys.readouterr().out.strip() == ", there was a"
    parts = {"embed_tokens": "fp8", "down_proj": "int8", "o_proj": "int8"}
    assert packed == [parts, {k: v for k, v in parts.items() if k != "down_proj"}]


def test_inspect_tells_the_bytes_and_what_would_run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["inspect"]) == 0
    plain = capsys.readouterr().out
    assert "7.1 MB: 7.1 MB of float32" in plain
    assert main(["inspect", "--quantize", "int4", "--quantize-head", "int8"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"1\.1 MB: .* of float32, .* of int4, .* of int8", out)
    assert main(["inspect", "--quantize", "int8", "--dtype", "bfloat16"]) == 0
    # The table, the codes, and the rows' scales in float32
    assert re.search(r"2\.0 MB: 39\d\.\d kB of bfloat16, 1\.6 MB of int8", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--quantize-head", "int8"], "--quantize-head needs --quantize"),
        (["--group-size", "64"], "--group-size needs --quantize"),
        (["--keep", "o_proj"], "--keep needs --quantize"),
        (
            ["--quantize", "nvfp4"],
            "quantize: groups of 16 do not divide the 172 inputs of layers.0.mlp.down_proj evenly",
        ),
        (
            ["--quantize", "int4", "--keep", "mlp"],
            "quantize: keep names 'mlp', which no projection is called",
        ),
    ],
)
@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_what_cannot_be_packed_is_one_sentence(stories, capsys, command, options, sentence):
    options = [*options, *([NO_CACHE] if command == "generate" else [])]
    assert main([command, str(stories), *options]) == 2
    assert capsys.readouterr().err == f"jaxllm: {sentence}\n"


def test_an_unknown_scheme_is_refused_with_those_there_are(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--quantize", "int3"])
    said = capsys.readouterr().err
    assert "invalid choice: 'int3'" in said
    assert "'ternary'" in said


def test_quantize_writes_a_checkpoint(stories, tmp_path, capsys, monkeypatch):
    out = tmp_path / "packed"
    options = ["--quantize-head", "fp8", "--keep", "o_proj"]
    assert main(["quantize", str(stories), "int8", "--out", str(out), *options]) == 0
    said = capsys.readouterr().out
    assert re.fullmatch(rf"{out}: int8, [2-5]\d% of the bytes that there were\n", said)
    again, tokenizer = jaxllm.load(out)
    assert again.layers[0].mlp.down_proj.scheme == "int8"
    assert again.lm_head.scheme == "fp8"
    assert not hasattr(again.layers[0].self_attn.o_proj, "scheme")
    assert tokenizer is not None
    for wrong, sentence in (
        ([str(stories), "int8", "--out", str(out)], "is there already; give a new folder"),
        (
            [str(out), "int8", "--out", str(tmp_path / "b"), "--keep", "o_proj"],
            "no linear layer that is not packed or kept",
        ),
        ([str(out), "int4", "--out", str(tmp_path / "b")], "is packed in int8 already"),
        ([str(tmp_path / "none"), "int4", "--out", str(tmp_path / "b")], "none"),
    ):
        assert main(["quantize", *wrong]) == 2
        assert sentence in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert main(["quantize", str(stories), "int8", "--out", str(tmp_path / "b")]) == 2
    assert f"{tmp_path} cannot be written to; give another folder" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
def test_quantize_packs_a_fused_projection_as_one(tmp_path, capsys):
    """Its parts would have scales of their own, of which an nvfp4 tensor of a file has one."""
    config = dataclasses.replace(quantised_checkpoints.LLAMA, model_type="phi3")
    plain, out = tmp_path / "plain", tmp_path / "packed"
    jaxllm.save(build(config), None, plain)
    head = ["--quantize-head", "fp8"]
    assert main(["quantize", str(plain), "nvfp4", "--out", str(out), *head]) == 0
    again, _ = jaxllm.load(out)
    three = [f"--keep={name}_proj" for name in "qkv"]  # by their own names
    assert main(["quantize", str(plain), "int8", "--out", str(tmp_path / "c"), *three]) == 0
    gate, up = again.layers[0].mlp.gate_proj.packed, again.layers[0].mlp.up_proj.packed
    assert gate.scheme == up.scheme == "nvfp4"
    assert float(gate.row_scale[0]) == float(up.row_scale[0])
    assert main(["quantize", str(out), "nvfp4", "--out", str(tmp_path / "b")]) == 2
    assert "no linear layer that is not packed or kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "options", "sentence"),
    [
        ("llama", ["ternary", "--quantize-head", "int8"], "lm_head is packed beside ternary"),
        ("phi3", ["ternary"], "down_proj is ternary, and a family of fused projections"),
        ("llama", ["int4", "--group-size", "48"], "groups of 48 do not divide the 64 inputs of"),
    ],
)
def test_quantize_knows_what_cannot_be_saved_before_it_reads(
    tmp_path, capsys, monkeypatch, family, options, sentence
):
    config = dataclasses.replace(quantised_checkpoints.LLAMA, model_type=family)
    jaxllm.save(build(config), None, tmp_path / "plain")
    monkeypatch.setattr(jaxllm, "load", None)
    out = tmp_path / "packed"
    assert main(["quantize", str(tmp_path / "plain"), *options, "--out", str(out)]) == 2
    assert re.fullmatch(f"jaxllm: [^\n]*{sentence}[^\n]*\n", capsys.readouterr().err)
    assert not out.exists()
