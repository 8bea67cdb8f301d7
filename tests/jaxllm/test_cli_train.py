"""finetune, export and plan from the command line, on a tiny model."""

import dataclasses
import errno
import importlib.util
import json
import os
import re
import shutil
import signal

import jax
import numpy as np
import pytest
import quantised_checkpoints
import tiny_models

import jaxllm
from jaxllm import cli, cli_train, finetune, lora, metrics, optimizers, plan, train
from jaxllm.checkpoint import native
from jaxllm.finetune import _sample
from jaxllm.quantize import qlora_group_size
from jaxllm.recipe import Recipe, named, read_recipe
from jaxllm.trainer import Fitted, StoppedError, Trainer

pytest.importorskip("grain", reason="grain is not installed: pip install 'jaxllm[train]'")
pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'jaxllm[train]'")

# Groups of 64 inputs, which int4 packs
CONFIG = dataclasses.replace(
    tiny_models.TINY,
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=64,
    head_dim=16,
    num_hidden_layers=1,
    layer_types=(),
    max_position_embeddings=128,
)
FEW = "--steps 4 --batch 2 --seq 32 --micro-batches 1 --eval-every 2".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model in bfloat16 with the shipped model's tokenizer."""
    _, tokenizer = jaxllm.load(jaxllm.shipped_checkpoint(), dtype="float32")
    path = tmp_path_factory.mktemp("models") / "tiny"
    model = tiny_models.build(CONFIG, jaxllm.Runtime(param_dtype="bfloat16"))
    jaxllm.save(model, tokenizer, path)
    return path


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "records.jsonl"
    lines = [{"prompt": f"Say {w}:", "completion": f" {w} {w}"} for w in "abcdefghijklmnop"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def run(capsys):
    """Runs a command line; (exit code, standard output, standard error)."""

    def run(*arguments):
        code = cli.main([str(a) for a in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def tune(run, folder, records):
    def tune(out, *more, model=folder, data=records):
        common = ("--data", data, "--out", out, "--no-compile-cache")
        return run("finetune", model, *common, *FEW, *more)

    return tune


def load(path, adapter=None):
    model, _ = jaxllm.load(path, dtype="float32")
    if adapter is not None:
        lora.load_peft(model, adapter)
    return model


def logits(path, adapter=None):
    model = load(path, adapter)
    return np.asarray(jax.jit(lambda t: model(t))(np.arange(12, dtype=np.int32)[None]))


@pytest.mark.slow
@pytest.mark.parametrize("method", [("--full",), ("--lora", "4"), ("--qlora", "int4")])
def test_finetune_and_export(
    run, tune, folder, tmp_path, method, transformers_or_none, monkeypatch
):
    out = tmp_path / "run"
    code, printed, err = tune(out, *method)
    assert code == 0, err
    assert "held-out loss: " in printed
    assert "% less" in printed
    assert "before: " in printed
    assert "after: " in printed
    assert "held out: 2 records" in err
    kind = "model" if method == ("--full",) else "adapter"
    names = {kind, "checkpoints", "loss.png", "metrics.csv", "metrics.jsonl", "run.json"}
    assert {path.name for path in out.iterdir()} == names
    rows = metrics.read_rows(out / "metrics.jsonl")
    assert [row["step"] for row in rows if "held_out_loss" in row] == [0, 2, 4]
    assert rows[4]["held_out_loss"] < rows[0]["held_out_loss"]

    whole = tmp_path / "whole"
    monkeypatch.setenv("HOME", str(tmp_path))
    code, printed, err = run("export", out, "--out", "~/whole")
    assert (code, printed) == (0, f"{whole}: the model of step 4, in bfloat16\n"), err
    stored = json.loads((whole / "config.json").read_text())
    assert stored["dtype"] == "bfloat16"
    assert (logits(whole) != logits(folder)).any()
    code, printed, err = run("export", out, "--out", tmp_path / "peft", "--adapter")
    if kind == "model":
        assert code == 2
        assert "a full fine-tuning has no adapter; leave --adapter out" in err
        np.testing.assert_array_equal(logits(out / "model"), logits(whole))
    else:
        assert code == 0, err
        apart = logits(folder, out / "adapter")
        np.testing.assert_array_equal(logits(folder, tmp_path / "peft"), apart)
        assert np.abs(apart - logits(folder)).max() > 1e-3
        merged = load(folder, out / "adapter")
        names = {name.rpartition(".")[0] + ".weight" for name in lora.adapters(merged)}
        lora.merge(merged)
        found, base = (train.parameters(load(path)) for path in (whole, folder))
        wanted = train.parameters(merged)
        assert found.keys() == wanted.keys()
        for name, x in wanted.items():  # rounded once, from a sum in float32
            np.testing.assert_array_equal(found[name], x.astype("bfloat16").astype("float32"), name)
            assert (name in names) == (found[name] != base[name]).any(), name
    code, _, err = run("export", out, "--out", whole)
    assert code == 2
    assert "is there already; give a new folder" in err
    if transformers_or_none is not None:
        theirs = transformers_or_none.AutoModelForCausalLM.from_pretrained(whole)
        import torch

        with torch.no_grad():
            numbers = theirs.float()(torch.arange(12)[None]).logits.numpy()
        # Both compute in float32 with the same bfloat16 weights
        np.testing.assert_allclose(logits(whole), numbers, atol=2e-4)


@pytest.fixture
def transformers_or_none():
    try:
        import transformers
    except ImportError:
        return None
    return transformers


@pytest.mark.slow
def test_ctrl_c_and_resume(tune, tmp_path, monkeypatch):
    code, _, _ = tune(tmp_path / "whole", "--full")
    assert code == 0
    calls = []

    def interrupting(*args, save=native.Checkpoints.save, **options):
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return save(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(native.Checkpoints, "save", interrupting)
        code, _, err = tune(tmp_path / "cut", "--full")
    assert code == 130
    assert "saved at step 2; the same command with --resume goes on" in err
    assert not (tmp_path / "cut/model").exists()

    before = {p: p.read_bytes() for p in (tmp_path / "cut").rglob("*") if p.is_file()}
    for more, words in (
        ((), "holds a run; --resume goes on with it, another --out begins one"),
        (
            ("--resume", "--batch", "8"),
            "the run began with rows (--batch) 2, and not 8",
        ),  # the default
        (
            ("--resume", "--lora", "8"),
            "the run began with method (--lora, --qlora, --full) full, and not lora",
        ),
        (("--resume", "--seed", "1"), "the run began with seed (--seed) 0, and not 1"),
    ):
        method = () if "--lora" in more else ("--full",)
        code, _, err = tune(tmp_path / "cut", *method, *more)
        assert code == 2
        assert words in err
        assert err.count("\n") == 1
    assert {p: p.read_bytes() for p in before} == before

    code, _, err = tune(tmp_path / "cut", "--full", "--resume")
    assert code == 0, err
    for name in ("model.safetensors", "config.json"):
        whole = (tmp_path / "whole/model" / name).read_bytes()
        assert (tmp_path / "cut/model" / name).read_bytes() == whole, name


@pytest.mark.slow
def test_resuming_with_another_model_or_other_data(tune, folder, records, tmp_path):
    out = tmp_path / "run"
    assert tune(out)[0] == 0
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    other = tmp_path / "other.jsonl"
    other.write_text(records.read_text().replace("Say", "Tell"))
    code, _, err = tune(out, "--resume", data=other)
    assert code == 2
    assert "the run there has other held-out data" in err  # they are a part of the data
    model, tokenizer = jaxllm.load(folder, dtype="bfloat16")
    params = train.parameters(model)
    train.update(model, {**params, "norm.weight": params["norm.weight"] * 2})
    jaxllm.save(model, tokenizer, tmp_path / "another")
    code, _, err = tune(out, "--resume", model=tmp_path / "another")
    assert code == 2
    assert "has other base weights" in err
    assert {p: p.read_bytes() for p in before} == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty; give one JSON object a line"),
        ('{"prompt": "a", "completion": "b"}\n{"prompt": \n', "line 2: this is not JSON"),
        ('{"prompt": "a", "answer": "b"}\n' * 12, "there is no 'messages', no "),
        ('{"prompt": "a", "completion": "b"}\n', "another file (--held-out FILE|PART; 0: none)"),
    ],
)
def test_data_that_will_not_do_is_one_sentence(tune, tmp_path, content, words):
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    code, _, err = tune(tmp_path / "out", data=file)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--full", "--lora", "4"), "--full trains all weights; give it without"),
        (("--steps", "0"), "steps (--steps) must be a whole number (int), at least 1, got 0"),
        (("--epochs", "2"), "give epochs (--epochs) or steps (--steps), not both"),
        (("--lora", "0"), "rank (--lora) must be a whole number (int), at least 1, got 0"),
        (("--seq", "999"), "length (--seq) 999 is more than the model's 128 positions"),
        (("--resume",), "there is no run to go on with; begin one without --resume"),
        (("--held-out", "2"), "a part of the records, at least 0 and below 1, got 2.0"),
        (("--learning-rate", "-1"), "learning_rate (--learning-rate) must be positive"),
        (("--learning-rate", "inf"), "must be positive and finite, got inf"),
        (("--profile", "-1"), "profile must be at least 0 steps, got -1"),
        (("--targets", "nothing"), "'nothing' matches no Linear"),
        (("--prompt-key", "{a"), "jaxllm: data: the format '{a' cannot be read"),
        (("--prompt-key", "nope,prompt"), "no record has 'nope', which the key 'nope,prompt'"),
        (("--prompt-key", "promt"), "no record has 'promt', which the key 'promt' names; there"),
        (
            ("--qlora", "int4", "--precision", "fp8"),
            "(--precision) 'fp8' is of plain weights",
        ),
        (("--batch", "3", "--micro-batches", "2"), "rows (--batch) 3 cannot be split into 2 equal"),
        (
            ("--eval-every", "0"),
            "eval_every (--eval-every) must be a whole number (int), at least 1, got 0",
        ),
        (
            ("--save-every", "0"),
            "save_every (--save-every) must be a whole number (int), at least 1, got 0",
        ),
        (("--seed", "-1"), "seed (--seed) must be a whole number from 0 to 2**32 - 1, got -1"),
        (
            ("--seed", f"{2**32}"),
            "(--seed) must be a whole number from 0 to 2**32 - 1, got 4294967296",
        ),
        (("--full", "--targets", "q_proj"), "targets (--targets) 'q_proj' is of adapters"),
        (("--full", "--adapter-kind", "dora"), "kind (--adapter-kind) 'dora' is of adapters"),
        (("--full", "--alpha", "8"), "alpha (--alpha) 8.0 is of adapters, and method 'full' has"),
        (("--alpha", "0"), "alpha (--alpha) must be positive and finite, got 0.0"),
    ],
)
def test_options_that_will_not_do_are_one_sentence(tune, tmp_path, more, words):
    code, _, err = tune(tmp_path / "out", *more)
    assert code == 2
    assert words in err
    assert len([line for line in err.splitlines() if line.startswith("jaxllm: ")]) == 1
    assert not (tmp_path / "out").exists()


OPTIONS = {
    "held_out": 0.25,
    "prompt_key": "question",
    "completion_key": "answer",
    "rank": 3,
    "targets": "q_proj",
    "kind": "dora",
    "alpha": 5.0,
    "learning_rate": 0.5,
    "schedule": "linear",
    "warmup_steps": 2,
    "weight_decay": 0.125,
    "steps": 9,
    "rows": 6,
    "length": 40,
    "on_long": "drop",
    "micro_batches": 3,
    "precision": "fp16",
    "remat": "dots",
    "optimizer": "adamw_8bit",
    "eval_every": 4,
    "save_every": 5,
    "seed": 11,
}


def test_every_option_is_the_recipes(run, monkeypatch):
    seen = []

    def stopped(recipe, out, **options):
        seen.append((recipe, out, options))
        raise StoppedError(None)

    monkeypatch.setattr(finetune, "finetune", stopped)
    command = ["finetune", "m", "--data", "d", "--out", "o", "--no-compile-cache"]
    told = [(re.findall("--[a-z-]+", named(k))[0], v) for k, v in OPTIONS.items()]
    others = ("--log", "wandb", "--profile", 7, "--resume")
    assert run(*command, *(x for option in told for x in option), *others)[0] == 130
    [(recipe, out, options)] = seen
    assert recipe == Recipe("m", "d", **OPTIONS)
    given = {"method", "model", "data", *OPTIONS}
    assert (out, options.pop("given")) == ("o", given)
    assert options == {"resume": True, "profile": 7, "log": "wandb"}
    assert given | {"epochs"} == {field.name for field in dataclasses.fields(Recipe)}
    assert not [k for k, v in OPTIONS.items() if v == getattr(Recipe, k)]


def test_the_help_of_plan_names_its_cards(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    assert ", ".join(plan.CARDS) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("method", [("--full",), ("--qlora", "int4")])
def test_packed_weights_are_not_trained_nor_packed_again(run, tmp_path, method):
    packed, _ = quantised_checkpoints.write(tmp_path, "int4")
    code, _, err = run("finetune", packed, "--data", tmp_path, "--out", tmp_path / "out", *method)
    assert code == 2
    name = "full" if method == ("--full",) else "qlora"
    assert err == (
        f"jaxllm: finetune: the weights of {packed} are packed, and stay as they are; take method "
        f"'lora' (--lora 16), which trains adapters beside them, not '{name}'\n"
    )
    assert not (tmp_path / "out").exists()


def test_a_run_goes_on_as_it_began_where_defaults_have_changed(
    run, folder, records, tmp_path, monkeypatch
):
    """`run.json` leaves open only how often it is evaluated and saved, and steps or epochs."""
    begun = []

    def fit(self, *, resume):
        begun.append((self.steps, len(self.held_out), self.settings))
        raise StoppedError(1)

    monkeypatch.setattr(Trainer, "fit", fit)
    out = tmp_path / "run"
    command = "finetune", folder, "--data", records, "--out", out, "--no-compile-cache"
    assert run(*command)[0] == 130
    (out / "checkpoints" / "1").mkdir(parents=True)
    recipe = dataclasses.asdict(read_recipe(out))
    left = {name for name, value in recipe.items() if value is None}
    assert left == {"epochs", "eval_every", "save_every"}
    monkeypatch.setattr("jaxllm.recipe.LEAST_STEPS", 77)
    monkeypatch.setattr(finetune, "HELD_OUT", 1)
    assert run(*command, "--resume")[0] == 130
    assert begun[0] == begun[1]
    assert dataclasses.asdict(read_recipe(out)) == recipe


def test_a_folder_with_something_else_in_it_is_left_alone(tune, tmp_path):
    (tmp_path / "letter.txt").write_text("mine")
    code, _, err = tune(tmp_path)
    assert code == 2
    assert "is not empty and holds no run" in err
    code, _, err = tune(tmp_path / "letter.txt")
    assert code == 2
    assert "is a file; give a folder" in err
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_folder_that_cannot_be_written_to_is_said_first(tune, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    code, _, err = tune(tmp_path / "deep/out", model=tmp_path / "none")
    assert code == 2
    assert err == f"jaxllm: {tmp_path} cannot be written to; give another folder\n"


def test_a_run_that_has_saved_nothing_cannot_be_resumed(tune, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    code, _, err = tune(tmp_path, "--resume")
    assert code == 2
    assert "the run there has saved nothing yet; begin it again without --resume" in err


def test_export_of_no_run(run, tmp_path):
    code, _, err = run("export", tmp_path, "--out", tmp_path / "new")
    assert code == 2
    assert "there is no run here (run.json is missing)" in err


def test_export_of_a_run_that_saved_nothing_leaves_its_folder_alone(run, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(dataclasses.asdict(Recipe("m", "d"))))
    code, _, err = run("export", tmp_path, "--out", tmp_path / "new")
    assert code == 2
    assert "no training was saved here" in err
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.slow
def test_plan(run, folder):
    code, printed, err = run("plan", folder, "--seq", 64, "--batch", 2, "--lora", 4)
    assert code == 0, err
    for word in ("weights", "gradients", "moments", "activations", "temporaries", "peak"):
        assert word in printed
    assert "fits on h200" in printed
    code, printed, err = run("plan", folder / "config.json", "--full", "--seq", 64, "--batch", 2)
    assert code == 0, err
    assert "Trained: 100.00%" in printed
    code, _, err = run("plan", folder, "--card", "abacus")
    assert code == 2
    assert "card 'abacus' is not one of" in err


def test_plan_of_a_config_that_says_too_much(run, tmp_path, folder):
    config = json.loads((folder / "config.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config, "hidden_size": 10**400}))
    code, _, err = run("plan", file)
    assert code == 2
    assert f"{file}: hidden_size must be a positive integer of at most 2147483647, got 1000" in err


def test_plan_says_what_it_makes_of_packed_weights(run, tmp_path, monkeypatch):
    packed, plain = quantised_checkpoints.write(tmp_path, "gptq")
    asked = []
    monkeypatch.setattr(plan, "plan", lambda config, **options: asked.append(options))
    assert (
        run("plan", packed)[0]
        == run("plan", plain)[0]
        == run("plan", plain / "config.json")[0]
        == 0
    )
    assert [options["checkpoint"] for options in asked] == [packed, None, None]
    assert [options["quantize"] for options in asked] == [None, None, None]
    code, _, err = run("plan", packed / "config.json")
    assert code == 2
    assert (
        "the weights are packed, and how large they are stands in the files beside it; giv" in err
    )
    options = ("--quantize", "int4", "--group-size", 32, "--quantize-head", "int8")
    assert run("plan", plain, *options, "--keep", "o_proj")[0] == 0
    how = {"scheme": "int4", "group_size": 32, "head": "int8", "keep": ["o_proj"]}
    assert asked[-1]["quantize"] == how
    code, _, err = run("plan", plain, "--group-size", 32)
    assert (code, err) == (2, "jaxllm: --group-size needs --quantize\n")


def test_keys():
    from jaxllm.cli_train import _held_out, _key

    assert _key(None) is None
    assert _key("question") == "question"
    assert _key("instruction,input") == ["instruction", "input"]
    assert _key("{question}\\n\\tAnswer: ") == "{question}\n\tAnswer: "
    assert [_held_out(x) for x in (None, "0.2", "a.jsonl")] == [None, 0.2, "a.jsonl"]


@pytest.mark.slow
def test_a_base_that_names_no_dtype_is_written_as_its_files_are(run, tune, folder, tmp_path):
    base, out = tmp_path / "base", tmp_path / "run"
    shutil.copytree(folder, base)
    config = json.loads((base / "config.json").read_text())
    assert config.pop("dtype") == "bfloat16"
    (base / "config.json").write_text(json.dumps(config))
    code, _, err = tune(out, "--full", model=base)
    assert code == 0, err
    code, _, err = run("export", out, "--out", tmp_path / "whole")
    assert code == 0, err
    for written in (out / "model", tmp_path / "whole"):
        assert json.loads((written / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
def test_what_an_export_refuses_and_says(run, tune, folder, tmp_path, monkeypatch):
    """A base with other weights than the run had; and steps that no loss speaks for."""
    base, out = tmp_path / "base", tmp_path / "run"
    shutil.copytree(folder, base)
    code, _, err = tune(out, "--lora", "4", "--learning-rate", "1e30", model=base)
    assert code == 2, err
    assert "is not a finite number, so nothing is written" in err
    code, _, err = run("export", out, "--out", tmp_path / "peft", "--adapter")
    assert code == 0
    assert "no saved step has a finite held-out loss; step 4 is the last of them" in err
    model, tokenizer = jaxllm.load(base, dtype=None)
    model.norm.weight.set_value(2 * model.norm.weight[...])
    jaxllm.save(model, tokenizer, base)
    code, _, err = run("export", out, "--out", tmp_path / "whole")
    assert code == 2
    assert "trained beside other weights than" in err
    assert not (tmp_path / "whole").exists()
    content = json.loads((out / "run.json").read_text())
    del content["base_weights"]  # as older versions have written it
    (out / "run.json").write_text(json.dumps(content))
    code, printed, err = run("export", out, "--out", tmp_path / "older", "--adapter")
    said = f"{tmp_path}/older: the adapter of step 4, for {base}\n"
    assert (code, printed) == (0, said), err
    monkeypatch.setattr(
        native.Checkpoints, "parameters", lambda *_, **__: {"x": np.full(3, np.nan, np.float32)}
    )
    code, _, err = run("export", out, "--out", tmp_path / "whole")
    assert code == 2
    assert "what was learnt until step 4 is not finite" in err


def test_int4_beside_adapters_has_groups_that_divide():
    wide = {64: 64, 96: 32, 40: 64}  # of 40 quantize says that nothing does
    for width, size in wide.items():
        config = dataclasses.replace(CONFIG, intermediate_size=width)
        assert qlora_group_size(config) == size
    assert qlora_group_size(dataclasses.replace(CONFIG, head_dim=24)) == 32  # four heads


def test_a_missing_package_is_said_before_the_model_is_read(tune, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    for log, package in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda n, p=package: None if n == p else find(n)
        )
        code, _, err = tune(tmp_path / "out", "--log", log, model=tmp_path / "none")
        assert code == 2
        assert f"{log} is not installed: pip install {package}" in err


@pytest.fixture
def fitted(monkeypatch):
    """`fit` without training: what it returns, and the last row it writes."""

    def pretend(row, **numbers):
        result = Fitted(**{**{"params": {}, "step": 4, "before": "b", "after": "a"}, **numbers})
        seen = []

        def fit(self, *, resume):
            seen.append(self.settings)
            (self.out / "metrics.jsonl").write_text(json.dumps({"step": 4, **row}) + "\n")
            return result

        monkeypatch.setattr(Trainer, "fit", fit)
        return seen

    return pretend


def test_what_comes_out_of_no_finite_loss_is_one_sentence(tune, fitted, tmp_path):
    fitted({}, base_loss=2.0, loss=None)
    code, _, err = tune(tmp_path / "out", "--lora", "2")
    assert code == 2
    assert "the held-out loss of step 4 is not a finite number" in err
    assert not (tmp_path / "out/adapter").exists()
    fitted({}, base_loss=None, loss=2.0)
    code, printed, err = tune(tmp_path / "out", "--lora", "2")
    assert code == 0, err
    assert "held-out loss: 2.0000 after (step 4); the one before is lost" in printed


def test_what_could_not_be_saved_ends_with_a_sentence_and_2(tune, fitted, tmp_path):
    fitted({}, base_loss=2.0, loss=1.0, unsaved="step 3 had the lowest held-out loss")
    code, printed, err = tune(tmp_path / "out", "--lora", "2")
    assert code == 2
    assert err.endswith("jaxllm: step 3 had the lowest held-out loss\n")
    assert f"{tmp_path}/out/adapter" in printed


def test_an_out_that_cannot_be_made_is_said_first(tune, run, tmp_path):
    (tmp_path / "letter.txt").write_text("mine")
    out = tmp_path / "letter.txt/deep/out"
    code, _, err = tune(out, model=tmp_path / "none")
    assert code == 2
    assert err == f"jaxllm: {tmp_path}/letter.txt is a file; give a folder\n"
    code, _, err = tune(tmp_path / "deep/out", model=tmp_path / "none")
    assert code == 2
    assert "there is no folder" in err
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_a_full_disk_is_said_with_the_folder(tune, tmp_path, monkeypatch, number):
    def full(self, *, resume):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Trainer, "fit", full)
    code, _, err = tune(tmp_path / "out")
    assert code == 2
    assert err.endswith(f"jaxllm: {tmp_path}/out: {os.strerror(number)}\n")


def test_a_bare_resume_of_a_full_run_names_the_model(tune, fitted, folder, tmp_path, monkeypatch):
    fitted({}, base_loss=2.0, loss=1.0)
    out = tmp_path / "out"
    monkeypatch.chdir(folder.parent)
    _, printed, _ = tune(out, "--full", model=folder.name)
    assert f"{out}/model, loss.png" in printed
    assert json.loads((out / "run.json").read_text())["model"] == str(folder.resolve())
    (out / "checkpoints/4").mkdir(parents=True)
    _, printed, _ = tune(out, "--resume", model=folder.name)
    assert f"{out}/model, loss.png" in printed
    assert "adapter" not in printed


def test_adapters_are_of_the_kind_and_alpha_that_are_told(
    run, tune, fitted, folder, tmp_path, monkeypatch
):
    seen, out = fitted({}, base_loss=2.0, loss=1.0), tmp_path / "run"
    told = "--lora 2 --adapter-kind dora --alpha 3".split()
    code, printed, err = tune(out, *told)
    assert code == 0, err
    command = f"jaxllm generate {folder} --adapter {out}/adapter"
    assert f"{command} takes it along\n" in printed
    code, _, err = run(*command.split()[1:], "--max-new-tokens", 2, "--no-compile-cache")
    assert code == 0, err
    said = json.loads((out / "adapter/adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["use_dora"]) == (2, 3, True)
    recipe = read_recipe(out)
    assert (recipe.kind, recipe.alpha) == (seen[0]["kind"], seen[0]["alpha"]) == ("dora", 3)

    (out / "checkpoints/4").mkdir(parents=True)
    assert tune(out, *told, "--resume")[0] == 0
    assert seen[1] == seen[0]
    code, _, err = tune(out, "--resume", "--adapter-kind", "rslora")
    assert code == 2
    assert "the run began with kind (--adapter-kind) dora, and not rslora" in err
    code, _, err = tune(out, "--resume", "--alpha", "4")
    assert code == 2
    assert "the run began with alpha (--alpha) 3.0, and not 4.0" in err

    model = load(folder, out / "adapter")
    params = {name: np.asarray(x) + 1 for name, x in lora.adapters(model).items()}
    monkeypatch.setattr(native.Checkpoints, "best_step", 4)
    monkeypatch.setattr(native.Checkpoints, "parameters", lambda self, step: params)
    assert run("export", out, "--out", tmp_path / "peft", "--adapter")[0] == 0
    assert (tmp_path / "peft/adapter_config.json").read_text() == (
        out / "adapter/adapter_config.json"
    ).read_text()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        # Width 64; 4 heads of 16 and 2 of them for keys and values
        (
            ("--lora", "2", "--targets", "q_proj|v_porj"),
            "256 of {256} parameters, beside 1 linear (1 q_proj)",
        ),
        (
            ("--qlora", "int4", "--targets", "q_proj|v_proj"),
            "3,584 of {3584} parameters, beside 2 linears (1 q_proj, 1 v_proj)",
        ),
        (("--full",), "all {0} parameters"),
    ],
)
def test_what_is_trained_is_said(tune, fitted, folder, tmp_path, more, said):
    fitted({}, base_loss=2.0, loss=1.0)
    code, _, err = tune(tmp_path / "run", *more)
    assert code == 0, err
    base = sum(x.size for x in train.parameters(load(folder)).values())
    said = re.sub(r"{(\d+)}", lambda found: f"{base + int(found[1]):,}", said)
    assert f"trained: {said}\n" in err


def test_a_run_of_before_kinds_goes_on(tune, fitted, tmp_path):
    seen, out = fitted({}, base_loss=2.0, loss=1.0), tmp_path / "run"
    assert tune(out, "--lora", "2")[0] == 0
    assert not {"kind", "alpha"} & seen[0].keys()
    recipe = json.loads((out / "run.json").read_text())
    assert (recipe.pop("kind"), recipe.pop("alpha")) == ("lora", 4)
    (out / "run.json").write_text(json.dumps(recipe))
    (out / "checkpoints/4").mkdir(parents=True)
    for said in ((), ("--alpha", "4")):  # what it had
        code, _, err = tune(out, "--resume", *said)
        assert code == 0, err
        assert seen[-1] == seen[0]
    assert read_recipe(out).alpha == 4


def test_a_base_that_has_moved_is_recorded_where_it_is(tune, fitted, folder, records, tmp_path):
    fitted({}, base_loss=2.0, loss=1.0)
    out, there, moved, other = (tmp_path / name for name in ("out", "there", "moved", "other"))
    shutil.copytree(folder, there)
    assert tune(out, model=there)[0] == 0
    (out / "checkpoints/4").mkdir(parents=True)
    began = json.loads((out / "run.json").read_text())
    there.rename(moved)
    again = shutil.copy(records, tmp_path / "again.jsonl")
    code, _, err = tune(out, "--resume", model=moved, data=again)
    assert code == 0, err
    assert json.loads((out / "run.json").read_text()) == began | {"model": str(moved)}
    model, tokenizer = jaxllm.load(moved, dtype=None)
    model.norm.weight.set_value(2 * model.norm.weight[...])
    jaxllm.save(model, tokenizer, other)
    assert tune(out, "--resume", model=other)[0] == 0  # what the trainer refuses is not its own
    assert read_recipe(out).model == str(moved)


def test_a_held_out_file_is_recorded_with_its_whole_path(
    tune, fitted, records, tmp_path, monkeypatch
):
    fitted({}, base_loss=2.0, loss=1.0)
    shutil.copy(records, tmp_path / "held.jsonl")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for out, file in (("relative", "held.jsonl"), ("home", "~/held.jsonl")):
        assert tune(tmp_path / out, "--held-out", file)[0] == 0
        assert read_recipe(tmp_path / out).held_out == str(tmp_path / "held.jsonl")


def test_held_out_records_that_teach_nothing_are_told_apart(tune, tmp_path):
    held, both = tmp_path / "held.jsonl", tmp_path / "both.jsonl"
    long = json.dumps({"prompt": 99 * "a b ", "completion": "c"})
    held.write_text(long)
    both.write_text(long + '\n{"text": "a"}')  # of these two, the first is held out
    for part, more, source in ((held, {}, held), (0.5, {"data": both}, f"0.5 of {both}")):
        code, _, err = tune(tmp_path / "out", "--held-out", part, **more)
        assert code == 2
        assert "data: there is nothing to learn; 1 record: 0 examples" in err
        assert err.endswith(f" (held out: {source})\n")


@pytest.mark.parametrize("stop_ids", [7, [9, 7], None])
def test_texts_end_as_the_checkpoint_says_where_the_tokenizer_does_not(
    tune, fitted, folder, tmp_path, monkeypatch, stop_ids
):
    base, ends = tmp_path / "base", []
    shutil.copytree(folder, base)
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        said = json.loads((base / name).read_text())
        said.pop("eos_token", None)
        if "eos_token_id" in said:
            said["eos_token_id"] = stop_ids
        (base / name).write_text(json.dumps(said))
    fitted({}, base_loss=2.0, loss=1.0)
    batches = finetune.data.batches
    monkeypatch.setattr(
        finetune.data,
        "batches",
        lambda examples, **options: (
            ends.extend(int(x.targets[-1]) for x in examples) or batches(examples, **options)
        ),
    )
    code, _, err = tune(tmp_path / "out", model=base)
    if stop_ids is None:
        assert code == 2
        assert err == (
            f"jaxllm: finetune: neither the tokenizer nor the config of {base} names an EOS token "
            "to end texts with; give eos_token_id in its generation_config.json\n"
        )
    else:
        assert code == 0, err
        assert set(ends) == {np.ravel(stop_ids)[0]}


def test_other_held_out_records_are_another_run(tune, fitted, records, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(records.read_text().replace("Say", "Tell"))
    again = tmp_path / "again.jsonl"
    again.write_text(records.read_text())
    seen = fitted({}, base_loss=2.0, loss=1.0)
    for number, file in enumerate((records, again, other)):
        assert tune(tmp_path / str(number), "--held-out", file)[0] == 0
    same, copy, changed = seen
    assert same == copy
    assert {name for name in same if same[name] != changed[name]} == {"held-out data"}


def test_long_records_are_split_where_that_is_asked_for(tune, fitted, tmp_path):
    file = tmp_path / "long.jsonl"
    file.write_text(20 * (json.dumps({"text": 40 * "word "}) + "\n"))
    fitted({}, base_loss=2.0, loss=1.0)
    code, _, err = tune(tmp_path / "out", "--on-long", "split", data=file)
    assert code == 0, err
    assert " split" in err


def test_a_prompt_that_takes_all_positions_has_a_sample(folder):
    model, tokenizer = jaxllm.load(folder, dtype="float32")
    assert tokenizer is not None
    prompt = list(range(100, 100 + CONFIG.max_position_embeddings))
    sample = _sample(model, tokenizer, prompt)
    assert sample == _sample(model, tokenizer, prompt[:-1])
    assert sample


def test_a_base_to_pack_is_loaded_into_the_hosts_memory(folder, monkeypatch):
    where = []
    load = finetune.hf.load

    def loading(*args):
        where.append(jax.config.jax_default_device)
        return load(*args)

    monkeypatch.setattr(finetune.hf, "load", loading)
    for method in ("qlora", "lora"):
        finetune._build(Recipe(str(folder), "d", method=method, precision="fp32"))
    assert where == [jax.devices("cpu")[0], None]


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (4.0, "held-out loss: 4.0000 before, 3.0000 after (step 7): 25.0 % less"),
        (2.9999, "held-out loss: 2.9999 before, 3.0000 after (step 7): 0.0 % less"),
        (0.0, "held-out loss: 0.0000 before, 3.0000 after (step 7)"),
        (2.0, "held-out loss: 2.0000 before, 3.0000 after (step 7): 50.0 % more\nThe model was"),
        (None, "held-out loss: 3.0000 after (step 7); the one before is lost"),
    ],
)
def test_what_became_of_the_loss_is_said(before, said):
    found = cli_train._of_losses(before, 3.0, 7)
    assert found.startswith(said)
    assert ("was better at these records before" in found) == (before == 2.0)


def test_a_run_may_count_epochs(run, fitted, folder, records, tmp_path):
    seen = fitted({}, base_loss=2.0, loss=1.0)
    common = ("--data", records, "--out", tmp_path / "out", "--no-compile-cache", "--epochs", "2")
    assert run("finetune", folder, *common)[0] == 0
    assert seen[0]["epochs"] == 2
    assert seen[0]["steps"] >= 2


def test_rates_and_weight_decay_are_those_that_are_told(tune, tmp_path, monkeypatch):
    """What Adam is given; the trainer's own record of the rates beside it."""
    seen = []
    adam = optimizers.BY_NAME["adamw"]

    def watched(rates, **how):
        seen.append(how)
        return adam(rates, **how)

    monkeypatch.setitem(optimizers.BY_NAME, "adamw", watched)
    told = "--learning-rate 0.008 --schedule linear --warmup-steps 1 --weight-decay 0.1".split()
    code, _, err = tune(tmp_path / "run", *told)
    assert code == 0, err
    assert seen == [{"weight_decay": 0.1, "mask": optimizers.matrices}]
    rows = metrics.read_rows(tmp_path / "run" / "metrics.jsonl")
    rates = [row["learning_rate"] for row in rows if "learning_rate" in row]
    np.testing.assert_allclose(rates, [4e-3, 8e-3, 8e-3 * 2 / 3, 8e-3 / 3], rtol=1e-6)
    code, _, err = tune(tmp_path / "run", "--resume", "--schedule", "cosine")
    assert code == 2
    assert "the run began with schedule (--schedule) linear, and not cosine" in err


def test_a_warm_up_that_is_too_long_is_said_before_weights_are_read(tune, tmp_path, monkeypatch):
    monkeypatch.delattr(finetune, "_build")
    code, _, err = tune(tmp_path / "out", "--warmup-steps", "4")
    assert code == 2
    assert "warmup_steps (--warmup-steps) 4 leaves none of 4 steps" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_all_records_may_be_trained_on(run, tune, folder, tmp_path):
    out = tmp_path / "run"
    code, printed, err = tune(out, "--held-out", "0", "--lora", "4")
    assert code == 0, err
    assert "training: 16 records" in err
    assert "held out: nothing" in err
    assert "nothing was held out: what is written is the last step (4)" in printed
    assert "\nbefore: " in printed
    assert not any("held_out_loss" in row for row in metrics.read_rows(out / "metrics.jsonl"))
    code, printed, err = run("export", out, "--out", tmp_path / "whole")
    assert (code, err) == (0, "")
    assert "the model of step 4" in printed
    assert (logits(tmp_path / "whole") != logits(folder)).any()
    code, _, err = tune(out, "--held-out", "0.5", "--lora", "4", "--resume")
    assert code == 2
    assert "the run there has other held-out data" in err


def test_weights_that_are_not_finite_are_not_written(tune, tmp_path, monkeypatch):
    fit = Trainer.fit

    def broken(self, **how):
        result = fit(self, **how)
        self.state.params.update({n: x * np.inf for n, x in self.state.params.items()})
        return result

    monkeypatch.setattr(Trainer, "fit", broken)
    code, _, err = tune(tmp_path / "out", "--held-out", "0", "--lora", "2")
    assert code == 2
    assert "finetune: a weight after step 4 is not a finite number, so nothing is written" in err
    assert not (tmp_path / "out/adapter").exists()
