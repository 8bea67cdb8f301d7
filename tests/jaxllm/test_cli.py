"""The command line: what it prints, and one sentence with exit code 2 for bad input."""

import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import quantised_checkpoints
import tiny_models
from absent_device import absent
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from tiny_models import ALL, SLIDING, TINY

import jaxllm
from jaxllm import cli, cli_inspect
from jaxllm.cli import main
from jaxllm.config import Runtime
from jaxllm.console import Lines
from pallas_kernels import _compat

NO_CACHE = "--no-compile-cache"


@pytest.fixture(scope="module")
def stories(shared):
    return shared / "data/stories260K"


@pytest.fixture(scope="module")
def talker(stories, tmp_path_factory):
    """stories260K with a chat template and sampling defaults."""
    folder = tmp_path_factory.mktemp("talker")
    for file in stories.iterdir():
        shutil.copy(file, folder / file.name)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}Once upon a time{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    generation = {"do_sample": True, "temperature": 0.5, "top_k": 3, "eos_token_id": [1, 2]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_generate_streams_and_ends_with_its_speed(stories, capsys):
    code = main(
        ["generate", str(stories), "--prompt", "Once upon a time", "--max-new-tokens", "16"]
        + [NO_CACHE]
    )
    out, err = capsys.readouterr()
    assert code == 0
    assert out.startswith("Once upon a time, there was a little girl named Lily.")
    assert "prefill 5 tokens, " in err
    assert "decode 16 tokens, " in err
    assert "ended by: length" in err
    assert len(err.splitlines()) == 1  # no bars where there is no terminal


def test_several_prompts_are_one_batch(stories, capsys):
    prompts = ["--prompt", "Once upon a time", "--prompt", "A dog"]
    assert main(["generate", str(stories), *prompts, "--max-new-tokens", "8", NO_CACHE]) == 0
    out, err = capsys.readouterr()
    first, second = out.strip().split("\n\n")
    assert first.startswith("Once upon a time, there was")
    assert second.startswith("A dog ")
    assert "decode 16 tokens" in err


def test_both_commands_hand_on_how_the_cache_is_stored(talker, monkeypatch):
    seen = []
    for name in ("generate", "stream"):
        call = getattr(jaxllm, name)

        def recorded(*arguments, call=call, kv_dtype="not given", **options):
            seen.append(kv_dtype)
            return call(*arguments, kv_dtype=kv_dtype, **options)

        monkeypatch.setattr(jaxllm, name, recorded)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    options = [str(talker), "--max-new-tokens", "2", NO_CACHE]
    assert main(["generate", *options]) == 0
    assert main(["generate", *options, "--kv-dtype", "int8"]) == 0
    assert main(["generate", *options, *["--prompt", "a"] * 2, "--kv-dtype", "fp8"]) == 0
    assert main(["chat", *options, "--kv-dtype", "fp8"]) == 0
    assert seen == [None, "int8", "fp8", "fp8"]


def test_both_commands_hand_on_where_to_end_and_the_dtype(talker, monkeypatch):
    seen, stream = [], jaxllm.stream

    def recorded(model, *arguments, **options):
        asked = (options["stop"], options.get("stop_ids", "not given"))
        seen.append((model.runtime.param_dtype, *asked))
        return stream(model, *arguments, **options)

    monkeypatch.setattr(jaxllm, "stream", recorded)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    options = [str(talker), "--max-new-tokens", "2", NO_CACHE]
    stops = ["--stop", "a b", "--stop", "c"]
    assert main(["generate", *options]) == 0
    assert main(["generate", *options, *stops, "--dtype", "bfloat16"]) == 0
    assert main(["generate", *options, "--ignore-eos"]) == 0
    assert main(["chat", *options, *stops, "--dtype", "float16"]) == 0
    assert seen == [
        ("float32", [], None),
        ("bfloat16", ["a b", "c"], None),
        ("float32", [], []),
        ("float16", ["a b", "c"], "not given"),
    ]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """Of the model that ships: large enough to change what is said."""
    model, _ = jaxllm.load(jaxllm.shipped_checkpoint(), dtype="float32")
    jaxllm.lora.add_adapters(model, rank=2, targets="q_proj|o_proj", rngs=nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(0), 1000))
    draw = {
        n: jax.random.normal(next(keys), x.shape) for n, x in jaxllm.lora.adapters(model).items()
    }
    jaxllm.lora.set_adapters(model, draw)
    folder = tmp_path_factory.mktemp("run") / "adapter"
    jaxllm.lora.save_peft(model, folder, base_model_name="the/base")
    return folder


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("more", [(), ("--quantize", "int4")])
def test_an_adapter_stands_beside_the_model(adapter, command, more):
    args = cli._parser().parse_args([command, "--adapter", str(adapter), *more])
    found, _ = cli._load(args)
    wanted, _ = jaxllm.load(jaxllm.shipped_checkpoint(), dtype="float32")
    if more:
        jaxllm.quantize(wanted, "int4")
    base = wanted(jnp.arange(8)[None])
    jaxllm.lora.load_peft(wanted, adapter)
    logits = wanted(jnp.arange(8)[None])
    assert (found(jnp.arange(8)[None]) == logits).all()
    assert (logits != base).any()


@pytest.mark.slow
def test_generate_takes_an_adapter_along(adapter, capsys):
    command = ["generate", "--max-new-tokens", "8", NO_CACHE]
    assert main(command) == 0
    before, _ = capsys.readouterr()
    assert main([*command, "--adapter", str(adapter)]) == 0
    after, _ = capsys.readouterr()
    model, tokenizer = jaxllm.load(jaxllm.shipped_checkpoint(), dtype="float32")
    jaxllm.lora.load_peft(model, adapter)
    result = jaxllm.generate(model, tokenizer, [cli.DEFAULT_PROMPT], max_new_tokens=8)
    assert after == f"{cli.DEFAULT_PROMPT}{result.texts[0]}\n" != before


def test_an_adapter_that_does_not_fit_is_one_sentence(adapter, tmp_path, capsys, monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("weights are read")

    few, narrow, shipped = tmp_path / "few", tmp_path / "narrow", jaxllm.shipped_checkpoint()
    for folder, layers in ((few, 1), (narrow, 8)):
        config = dataclasses.replace(TINY, num_hidden_layers=layers, layer_types=())
        jaxllm.save(tiny_models.build(config), None, folder)
    monkeypatch.setattr(jaxllm, "load", load)
    for model, folder, sentence in (
        (shipped, tmp_path, f"{tmp_path}: there is no adapter_config.json; give a folder that"),
        (shipped, adapter.parent, f"save_peft, wrote; there is one in {adapter}"),
        (few, adapter, "the model has no Linear for model.layers.1.self_attn.o_proj, "),
        (narrow, adapter, " has lora_A [2, 192] and lora_B [192, 2], but the model's weight is "),
        (narrow, adapter, "; the adapter is for the/base\n"),
        (adapter, adapter, f"{adapter}: there is no config.json; give a checkpoint's folder; this"),
        (adapter, adapter, "beside a model: jaxllm generate MODEL --adapter FOLDER, or lora.load_"),
    ):
        assert main(["generate", str(model), "--adapter", str(folder), NO_CACHE]) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert sentence in err


def test_prompts_from_standard_input_and_chats(talker, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time"))
    arguments = ["generate", str(talker), "--prompt", "-", "--max-new-tokens", "8", NO_CACHE]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("Once upon a time, there was")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    assert main([*arguments, "--chat"]) == 0
    assert "hello" not in capsys.readouterr().out


def test_chat_follows_the_template_and_remembers(talker, capsys, monkeypatch):
    lines = ["My name is Tim.", "", "What did I say?", "/reset", "Hi.", "/exit", "never"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    seen = []

    def recorded(model, tokenizer, messages, **options):
        seen.append(([dict(message) for message in messages], options))
        return jaxllm_stream(model, tokenizer, messages, **options)

    jaxllm_stream = jaxllm.stream
    monkeypatch.setattr(jaxllm, "stream", recorded)
    arguments = ["chat", str(talker), "--system", "Be brief.", "--max-new-tokens", "8", NO_CACHE]
    assert main([*arguments, "--temperature", "0.7"]) == 0
    out = capsys.readouterr().out
    assert len(out.strip().splitlines()) >= 3
    roles = [[message["role"] for message in messages] for messages, _ in seen]
    assert roles == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert seen[1][0][2]["content"] in out
    assert [options["seed"] for _, options in seen] == [0, 1, 2]  # each answer is drawn anew
    assert {key: seen[0][1][key] for key in ("temperature", "top_k")} == {
        "temperature": 0.7,  # what is given goes before what the checkpoint says
        "top_k": 3,
    }


def test_chat_of_a_checkpoint_that_says_no_top_k(talker, tmp_path, monkeypatch):
    folder = tmp_path / "plain"
    shutil.copytree(talker, folder)
    (folder / "generation_config.json").write_text('{"do_sample": true}')
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main(["chat", str(folder), "--max-new-tokens", "2", NO_CACHE]) == 0


@pytest.mark.parametrize(("given", "temperature"), [([], None), (["--temperature", "0.7"], 0.7)])
def test_chat_takes_what_else_a_checkpoint_says_without_do_sample(
    talker, tmp_path, monkeypatch, given, temperature
):
    folder = tmp_path / "penalised"
    shutil.copytree(talker, folder)
    said = {"temperature": 0.3, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps(said))
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    seen = []
    stream = jaxllm.stream
    monkeypatch.setattr(jaxllm, "stream", lambda *a, **k: seen.append(k) or stream(*a, **k))
    assert main(["chat", str(folder), "--max-new-tokens", "2", *given, NO_CACHE]) == 0
    assert seen[0].get("temperature") == temperature
    drawn = dict(top_k=5, top_p=0.9) if temperature else dict(top_k=None, top_p=None)
    assert {name: seen[0].get(name) for name in drawn} == drawn  # without a draw it says nothing
    assert seen[0]["repetition_penalty"] == 1.5


def test_chat_goes_on_behind_the_largest_seed(talker, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi.\nAnd?"))
    arguments = ["chat", str(talker), "--max-new-tokens", "8", NO_CACHE]
    assert main([*arguments, "--temperature", "0.7", "--seed", str(2**32 - 1)]) == 0


class Terminal(io.StringIO):
    """A standard input at which somebody sits."""

    def isatty(self):
        return True


def answer_with(monkeypatch, *lines):
    left = iter([*lines, "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(left))


TOO_LONG = "jaxllm: the conversation has "


def test_a_full_conversation_goes_on_after_a_sentence_in_a_terminal(talker, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal())
    answer_with(monkeypatch, "word " * 600, "Hi.", "word " * 600)
    assert main(["chat", str(talker), "--max-new-tokens", "4", NO_CACHE]) == 0
    out, err = capsys.readouterr()
    assert out.strip()  # the long message is forgotten, so the short one gets an answer
    alone, behind = [line for line in err.splitlines() if line.startswith("jaxllm: ")]
    assert alone.startswith(TOO_LONG)
    assert alone.endswith(" tokens, but the model has 512 positions")
    assert behind.startswith(TOO_LONG)
    assert behind.endswith(" tokens, but the model has 512 positions; /reset begins anew")
    assert "the answer ended at --max-new-tokens" in err


def test_a_full_conversation_ends_a_pipe(talker, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("word " * 600 + "\nHi.\n"))
    assert main(["chat", str(talker), "--max-new-tokens", "4", NO_CACHE]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(TOO_LONG)
    assert len(err.splitlines()) == 1


def test_chat_says_when_the_positions_end_an_answer(talker, capsys, monkeypatch):
    tokenizer = jaxllm.load(talker, dtype="float32")[1]
    assert tokenizer is not None
    text = "word"
    while len(tokenizer.apply_chat_template([{"role": "user", "content": text}])) < 500:
        text += " word"
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["chat", str(talker), "--temperature", "0", NO_CACHE]) == 0
    assert "the answer ended at the model's last position" in capsys.readouterr().err


def test_ctrl_c_in_a_chat_ends_the_answer_alone(talker, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal())
    answer_with(monkeypatch, "One.", "Two.", "Three.")
    seen, streams = [], []

    class Interrupted:
        """Ctrl-C after `pieces` pieces."""

        def __init__(self, stream, pieces):
            self.stream, self.pieces, self.closed = stream, pieces, False

        def __iter__(self):
            for _ in range(self.pieces):
                yield next(self.stream)
            raise KeyboardInterrupt

        def close(self):
            self.closed = True
            self.stream.close()

        @property
        def result(self):
            return self.stream.result

    def interrupted(model, tokenizer, messages, **options):
        seen.append([message["content"] for message in messages])
        streams.append(Interrupted(stream(model, tokenizer, messages, **options), len(streams)))
        return streams[-1]

    stream = jaxllm.stream
    monkeypatch.setattr(jaxllm, "stream", interrupted)
    assert main(["chat", str(talker), "--max-new-tokens", "40", NO_CACHE]) == 0
    assert [len(contents) for contents in seen] == [1, 1, 3]  # the first got no answer
    assert seen[2][0] == "Two."
    assert seen[2][1] in capsys.readouterr().out
    assert seen[2][1]
    assert all(stream.closed for stream in streams)


def test_chat_needs_a_template(stories, capsys):
    assert main(["chat", str(stories), NO_CACHE]) == 2
    assert "no chat template; use jaxllm generate" in capsys.readouterr().err


def test_what_a_checkpoint_says_of_sampling_is_looked_at(talker, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "odd"
    shutil.copytree(talker, folder)
    (folder / "generation_config.json").write_text('{"do_sample": true, "top_k": -1}')
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    arguments = ["chat", str(folder), "--max-new-tokens", "2", NO_CACHE]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"jaxllm: {folder}: generation_config.json: sampling: top_k must be an integer, 0 (off) or "
        "more, got -1\n"
    )
    assert main([*arguments, "--top-k", "3"]) == 0  # it is not what is done


def test_what_says_nothing_at_a_temperature_of_0_is_refused_in_chats_too(
    talker, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    arguments = ["chat", str(talker), "--max-new-tokens", "2", NO_CACHE, "--temperature", "0"]
    assert main([*arguments, "--top-k", "3"]) == 2
    assert "--top-k needs --temperature above 0" in capsys.readouterr().err
    assert main(arguments) == 0  # what the checkpoint says of top_k is no setting of the user


def test_inspect_says_what_is_there_and_what_would_run(stories, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["inspect", str(stories)]) == 0
    out = capsys.readouterr().out
    for text in ("llama", "5 full", "260,032 in 47 tensors", "stored as F32", "1.0 MB"):
        assert text in out, text
    assert "8 query, 4 key/value, 8 wide" in out
    assert "640 bytes a token in 16 bits, 480 bytes in 8, before windows" in out
    assert "cudnn: needs an NVIDIA GPU" in out
    for op in (
        *("attention", "linear", "fused_linear", "embedding", "rms_norm", "rope", "glu"),
        *("sampling_threshold", "linear_cross_entropy"),
    ):
        assert f"│ {op} " in out


def test_inspect_fits_a_terminal_of_80_columns(stories, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["inspect", str(stories)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 80
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def test_inspect_of_packed_weights(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    packed, plain = quantised_checkpoints.write(tmp_path, "gptq")
    assert main(["inspect", str(packed)]) == 0
    out = capsys.readouterr().out
    # Half a byte a number and a float16 scale a group of 32; two tables of 61 x 64 and five norms
    numbers = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)
    size, rest = numbers // 2 + 2 * numbers // 32, 4 * (2 * 61 * 64 + 5 * 64)
    assert f"parameters, gptq │ {numbers + rest // 4:,} in " in " ".join(out.split())
    assert re.search(r"stored as I32 .* \d[\d,]* elements, ", out)
    said = [f"{(size + rest) / 1000:.1f} kB", f"{rest / 1000:.1f} kB of float32"]
    assert f"{said[0]}: {said[1]}, {size / 1000:.1f} kB of int4" in " ".join(out.split())
    assert main(["inspect", str(packed), "--quantize", "int8"]) == 2
    assert "down_proj is packed in int4 already, and not again in int8" in capsys.readouterr().err
    ordered, _ = quantised_checkpoints.write(tmp_path / "ordered", "gptq asym order")
    assert main(["inspect", str(ordered)]) == 0
    found = " ".join(capsys.readouterr().out.split())
    assert f"parameters, gptq │ {numbers + rest // 4:,} in " in found
    assert main(["inspect", str(plain)]) == 0
    out = capsys.readouterr().out
    assert "gptq" not in out
    assert "int4" not in out


def test_inspect_of_a_bitnet(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    even = dataclasses.replace(TINY, hidden_size=32, intermediate_size=64, hidden_act="relu2")
    config = dataclasses.replace(even, model_type="bitnet", sub_norms=True, bit_linear=True)
    model = tiny_models.build(config, Runtime("float32"))
    jaxllm.save(model, None, tmp_path / "trained")
    assert main(["inspect", str(tmp_path / "trained")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "ternary times int8 (BitNet b1.58)" in out
    assert "weights in memory │ 90.8 kB: 90.8 kB of float32" in out
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    jaxllm.quantize(model, "ternary")
    jaxllm.save(model, None, tmp_path / "packed")
    assert main(["inspect", str(tmp_path / "packed")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"parameters, bitnet │ {parameters:,} in \d+ tensors", out)
    assert "ternary times int8 (BitNet b1.58)" in out
    # 2 layers of 9,216 numbers, four to a byte, and 256 rows with a float32 scale
    assert f"of float32, {2 * (9216 // 4 + 256 * 4) / 1000:.1f} kB of ternary" in out


def test_inspect_describes_the_calls_that_the_cache_makes():
    config = dataclasses.replace(SLIDING, sliding_window=33, max_position_embeddings=64)
    model = tiny_models.build(config, Runtime("bfloat16"))
    with absent():
        explained = list(cli_inspect.explained(model, "bfloat16"))
    cudnn = {call: reasons["cudnn"] for op, call, reasons in explained if op == "attention"}
    assert cudnn == {
        "prefill, full": None,
        "prefill, sliding": "takes a mask only for even lengths, got T=64, S=97",  # ring and chunk
        "decode, full": None,
        "decode, sliding": None,  # the ring alone: the window masks nothing
    }


def test_inspect_tells_fused_products_where_a_layer_decodes_with_them():
    calls, other = {}, dataclasses.replace(TINY, hidden_act="gelu")
    for name, config in (("llama", TINY), ("every switch", ALL), ("another gate", other)):
        model = tiny_models.build(config, Runtime("bfloat16"))
        jaxllm.fuse(model)
        said = cli_inspect.explained(model, "bfloat16")
        calls[name] = [(op, call) for op, call, _ in said if "linear" in op and "decode" in call]
    names = ("q k v", "output", "gate and up", "down")
    fused = [*(("fused_linear", f"decode, {name}") for name in names), ("linear", "decode, head")]
    assert calls == {
        "llama": fused,
        "every switch": fused,
        "another gate": [("linear", "decode")],
    }


def test_inspect_tells_which_heads_a_product_does_not_turn(monkeypatch):
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    wide = dataclasses.replace(TINY, hidden_size=128, intermediate_size=256)
    said = {}
    for width in (32, 40):
        model = tiny_models.build(dataclasses.replace(wide, head_dim=width), Runtime("bfloat16"))
        jaxllm.fuse(model)
        with absent():
            rows = cli_inspect.explained(model, "bfloat16")
            said[width] = {call: why["pallas"] for op, call, why in rows if op == "fused_linear"}
    assert set(said[32].values()) == {None}
    assert said[40]["decode, q k v"] == "takes outputs in multiples of 8, got 20"
    assert said[40]["decode, gate and up"] is None


def test_inspect_asks_for_the_rope_that_runs():
    """Queries and keys that are cut out of one product's result "auto" leaves to XLA."""
    config = dataclasses.replace(TINY, head_dim=32, max_position_embeddings=4096)
    said = []
    for fused in (False, True):
        model = tiny_models.build(config, Runtime("bfloat16"))
        if fused:
            jaxllm.fuse(model)
        with absent():
            rows = {op: reasons for op, _, reasons in cli_inspect.explained(model, "bfloat16")}
        said.append(rows["rope"]["pallas"])
    assert said[0] != said[1]
    assert "it would need copies of the slices" in said[1]


def test_inspect_tells_that_packed_gates_are_in_their_product():
    found = []
    for scheme in (None, "int4"):
        model = tiny_models.build(TINY, Runtime("bfloat16"))
        if scheme is not None:
            jaxllm.quantize(model, scheme)
        jaxllm.fuse(model)
        said = cli_inspect.explained(model, "bfloat16")
        found.append([(op, call) for op, call, _ in said if "prefill" in call])
    plain, packed = found
    assert ("glu", "prefill") in plain
    assert ("glu", "prefill") not in packed
    assert set(packed) - set(plain) == {("fused_linear", "prefill, gate")}


def test_inspect_tells_what_decoding_has_in_one_launch(monkeypatch):
    """All layers, or what lies between two attentions; with a cache as long as a row's may be."""
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    wide = dataclasses.replace(
        TINY,
        hidden_size=128,
        intermediate_size=256,
        head_dim=32,
        max_position_embeddings=2**17,  # of which the cache has but few
    )
    capped = dataclasses.replace(wide, attn_logit_softcapping=4.0)
    said = {}
    behind = dataclasses.replace(wide, post_norms=True, hidden_act="gelu_pytorch_tanh")
    other = dataclasses.replace(wide, hidden_act="gelu")
    configs = (("wide", wide), ("capped", capped), ("narrow", TINY), ("norms behind", behind))
    for name, config in (*configs, ("another gate", other)):
        model = tiny_models.build(config, Runtime("bfloat16"))
        jaxllm.fuse(model)
        with absent():
            rows = list(cli_inspect.explained(model, "bfloat16"))
        said[name] = {
            op: reasons for op, _, reasons in rows if op in ("decode_layers", "between_attentions")
        }
    assert said["wide"].keys() == {"decode_layers"}
    assert said["wide"]["decode_layers"]["pallas"] is None
    assert said["capped"]["decode_layers"]["pallas"] == "scores have a soft cap, 4"
    assert said["capped"]["decode_layers"]["between_attentions"] is None
    assert said["capped"]["between_attentions"]["pallas"] is None
    reasons = said["narrow"]["between_attentions"]
    assert reasons["pallas"] == "out: takes outputs in multiples of 16 at 1 rows, got 24"
    assert reasons["op by op"] is None
    assert said["norms behind"]["decode_layers"]["pallas"] == "takes no post_norm"
    assert said["norms behind"]["between_attentions"]["pallas"] is None
    assert said["another gate"] == {}


def test_inspect_of_a_cache_in_8_bits(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    monkeypatch.setenv("COLUMNS", "300")
    config = dataclasses.replace(TINY, hidden_size=128, intermediate_size=256, head_dim=32)
    jaxllm.save(tiny_models.build(config), None, tmp_path / "wide")
    why = "layer 0 has keys and values in int8, not bfloat16"
    title = "bfloat16, keys and values in int8\n"
    arguments = ["inspect", str(tmp_path / "wide"), "--dtype", "bfloat16"]
    with absent():
        assert main(arguments) == 0
        assert "keys and values" not in capsys.readouterr().out
        assert main([*arguments, "--kv-dtype", "int8"]) == 0
    out = capsys.readouterr().out
    assert why in out
    assert title in re.sub(" +\n", "\n", out)


def test_inspect_asks_attention_over_a_cache_in_8_bits():
    narrow = tiny_models.build(dataclasses.replace(TINY, head_dim=24), Runtime("bfloat16"))
    for kind, wanted in ((None, None), ("int8", "head width 24 is not a multiple of 16 up to 256")):
        with absent():
            rows = list(cli_inspect.explained(narrow, "bfloat16", kind))
        [reasons] = [reasons for _, call, reasons in rows if call == "decode, full"]
        assert reasons["pallas"] == wanted


def test_inspect_asks_with_packed_tables():
    model = tiny_models.build(dataclasses.replace(TINY, tie_word_embeddings=True))
    jaxllm.quantize(model, "int8", head="int8")
    with absent():
        said = {op: reasons for op, _, reasons in cli_inspect.explained(model, "bfloat16")}
    assert said["embedding"]["pallas"] == "the table is packed"


def test_brackets_in_a_path_are_printed(capsys, monkeypatch):
    monkeypatch.setattr(cli, "errors", Lines(stderr=True, force_terminal=True, width=200))
    with cli._bar("loading a[bold]b/[/x]", cli.MofNCompleteColumn()) as progress:
        progress(1, 2)
    assert "loading a[bold]b/[/x]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "no/such/folder"], "there is no folder 'no/such/folder'"),
        (["inspect", "no/such/folder"], "there is no folder 'no/such/folder'"),
        (["inspect", "checkpoints/typo"], "(org/name) where there is no folder 'checkpoints'"),
        (["generate", "{empty}"], "there is no config.json"),
        (["generate", "{stories}", "--prompt", ""], "prompt 0 is empty"),
        (["generate", "{stories}", "--temperature", "-1"], "temperature"),
        (["generate", "{stories}", "--temperature", "nan"], "temperature"),
        (["generate", "{stories}", "--top-p", "0"], "top_p"),
        (["generate", "{stories}", "--max-new-tokens", "0"], "--max-new-tokens must be"),
        (["generate", ""], "there is no folder ''"),
        # Settings are looked at before the checkpoint.
        (["generate", "no/such/folder", "--top-p", "2"], "top_p must be in (0, 1]"),
        (["generate", "no/such/folder", "--max-new-tokens", "0"], "--max-new-tokens must be"),
        (["generate", "no/such/folder", "--prompt", ""], "prompt 0 is empty"),
        (["chat", "no/such/folder", "--temperature", "-1"], "temperature must be"),
        (["chat", "no/such/folder", "--stop", ""], "--stop must be"),
        (["chat", "no/such/folder", "--stop", "a\udcff"], "--stop is not UTF-8: byte 0xff at"),
        (["chat", "no/such/folder", "--system", "\udcff"], "--system is not UTF-8: byte 0xff at"),
        (["generate", "no/such/folder", "--top-p", "0.5"], "--top-p needs --temperature above 0"),
        (
            ["generate", "no/such/folder", "--prompt", "a\udcff"],
            "prompt 0 is not UTF-8: byte 0xff at",
        ),
        (
            ["plan", "{stories}", "--seq", "600"],
            "600 tokens a row are more than the model",
        ),
        (["plan", "{stories}", "--batch", "0"], "batch must be an integer of at least 1, got 0"),
        (["generate", "{stories}", "--prompt", "{long}"], "the model has 512 positions"),
        (
            ["generate", "{stories}", "--implementation", "fast"],
            "no implementation is named 'fast'",
        ),
        (["generate", "{stories}", "--implementation", "att=xla"], "is not op=name; the ops are"),
        (["generate", "{stories}", "--implementation", "attention=cudnn"], "needs an NVIDIA GPU"),
        (
            ["generate", "{stories}", "--implementation", "attention=xla,attention=cudnn"],
            "names an op twice",
        ),
    ],
)
def test_bad_input_gets_one_sentence_and_code_2(stories, tmp_path, capsys, arguments, sentence):
    names = {"{empty}": str(tmp_path), "{stories}": str(stories), "{long}": "word " * 600}
    arguments = [names.get(argument, argument) for argument in arguments]
    cache = [] if arguments[0] in ("inspect", "plan") else [NO_CACHE]
    assert main(arguments + cache) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxllm: ")
    assert len(err.splitlines()) == 1
    assert sentence in err


@pytest.mark.parametrize("platform", ["cuda", "sundial"])
def test_a_platform_that_is_not_there_gets_one_sentence(platform):
    command = [sys.executable, "-m", "jaxllm", "generate", "--prompt", "Once", NO_CACHE]
    env = {**os.environ, "JAX_PLATFORMS": platform, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("jaxllm: ")]
    assert len(said) == 1
    assert f"JAX cannot start with JAX_PLATFORMS={platform}: " in said[0]
    assert "Traceback" not in done.stderr


def test_the_compilation_cache_is_kept_unless_it_is_turned_off(stories, tmp_path):
    command = [sys.executable, "-m", "jaxllm", "generate", str(stories), "--prompt", "Once"]
    command += ["--max-new-tokens", "4"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([*command, NO_CACHE], env=env, check=True, capture_output=True)
    assert not (tmp_path / "jaxllm").exists()
    subprocess.run(command, env=env, check=True, capture_output=True)
    assert any((tmp_path / "jaxllm").iterdir())
    assert jax.config.jax_compilation_cache_dir is None  # nobody turned it on here


def refuse(error):
    def refused(*_):
        raise error

    return refused


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            PermissionError(13, "Permission denied", "/home/me/.cache"),
            "/home/me/.cache: Permission",
        ),
        (
            RuntimeError("Could not determine home directory."),
            "Could not determine home directory.",
        ),
    ],
)
def test_without_a_home_programs_are_not_kept(stories, capsys, monkeypatch, error, reason):
    monkeypatch.setattr(cli, "enable_compile_cache", refuse(error))
    arguments = ["generate", str(stories), "--prompt", "Once", "--max-new-tokens", "2"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Once")
    assert f"jaxllm: compiled programs are not kept: {reason}" in err
    assert "; --no-compile-cache silences this" in err


def test_the_compilation_cache_needs_a_folder_to_write_to(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        jaxllm.enable_compile_cache(tmp_path / "file" / "cache")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # for tests that run as root
    with pytest.raises(PermissionError, match="Permission denied"):
        jaxllm.enable_compile_cache(tmp_path)
    assert jax.config.jax_compilation_cache_dir is None


def test_the_compilation_cache_moves_to_the_folder_named_last(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # where a folder called ~ would be made
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    try:
        for number, name in enumerate(("first", "second")):
            folder = jaxllm.enable_compile_cache(f"~/{name}")
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            jax.jit(lambda x, n=number: x * n + 5)(jnp.ones(7)).block_until_ready()
            assert folder == tmp_path / name
            assert any(folder.iterdir())
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
        compilation_cache.reset_cache()


def test_the_systems_errors_are_sentences(capsys, monkeypatch):
    def raises(name):
        raise IsADirectoryError(21, "Is a directory", "a/config.json")

    monkeypatch.setattr(cli_inspect, "find_folder", raises)
    assert main(["inspect"]) == 2
    assert capsys.readouterr().err == "jaxllm: a/config.json: Is a directory\n"


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        (
            "Out of memory while trying to allocate 17179869184 bytes.",
            " (it was asked for 17.2 GB)",
        ),
        (
            "Out of memory while trying to allocate 1125899906842624 bytes.",
            " (it was asked for 1125899.9 GB)",
        ),
        ("Out of memory while trying to allocate 16.00GiB.", " (it was asked for 16.00 GiB)"),
        ("CUDA_ERROR_OUT_OF_MEMORY", ""),
    ],
)
def test_a_full_device_is_a_sentence(capsys, monkeypatch, message, asked):
    error = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}")
    monkeypatch.setattr(cli_inspect, "find_folder", refuse(error))
    assert main(["inspect"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"jaxllm: the device ran out of memory{asked}; fewer rows")


def test_another_error_of_the_device_is_not_taken_for_a_full_one(monkeypatch):
    error = jax.errors.JaxRuntimeError("INTERNAL: an illegal memory access was encountered")
    monkeypatch.setattr(cli_inspect, "find_folder", refuse(error))
    with pytest.raises(jax.errors.JaxRuntimeError, match="illegal"):
        main(["inspect"])


@pytest.mark.parametrize("command", [["inspect"], ["generate", NO_CACHE]])
def test_a_reader_that_leaves_is_no_error(stories, command):
    command = [sys.executable, "-m", "jaxllm", *command, str(stories)]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("command", [["inspect"], ["generate", NO_CACHE, "--max-new-tokens", "2"]])
def test_a_full_disk_is_a_sentence(stories, command):
    command = [sys.executable, "-m", "jaxllm", *command, str(stories)]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, env=buffered, check=False
        )
    assert done.returncode == 2
    assert done.stderr == b"jaxllm: No space left on device\n"


def test_a_closed_output_is_no_error(capfd, monkeypatch):
    """As `>&-` leaves it: what is printed goes nowhere."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["inspect"]) == 0
    assert main(["inspect", "no/such/folder"]) == 2
    assert capfd.readouterr().err.startswith("jaxllm: there is no folder")


def test_what_is_wrong_is_never_said_on_the_output(capfd, monkeypatch):
    """Where `2>&-` leaves nothing for it: the exit code tells."""
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["inspect", "no/such/folder"]) == 2
    assert capfd.readouterr().out == ""


def test_chat_with_a_closed_output_reads_to_the_end(talker, monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    said = io.StringIO("hello\n/exit\n")
    monkeypatch.setattr(sys, "stdin", said)
    assert main(["chat", str(talker), NO_CACHE, "--max-new-tokens", "2"]) == 0
    assert said.read() == ""


@pytest.mark.parametrize("command", [["generate", "--prompt", "-"], ["chat"]])
def test_a_closed_input_is_a_sentence(capsys, monkeypatch, command):
    monkeypatch.setattr(sys, "stdin", None)
    assert main([*command, NO_CACHE]) == 2
    assert capsys.readouterr().err == (
        "jaxllm: there is no standard input, which `chat` and `--prompt -` read\n"
    )


def test_ctrl_c_ends_without_a_traceback(talker):
    command = [sys.executable, "-m", "jaxllm", "chat", str(talker), NO_CACHE]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "8"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("hello\n")
    process.stdin.flush()
    assert process.stdout.readline()  # it has answered, and waits for the next message
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
