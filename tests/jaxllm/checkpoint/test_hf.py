"""A Hugging Face folder to a model and back: values, files, and what is refused."""

import json
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tiny_checkpoints
import tiny_models
import tiny_tokenizers
from flax import nnx
from tiny_checkpoints import GOLDENS, make_weights, read_golden, write_checkpoint

from jaxllm.checkpoint import hf, load, save
from jaxllm.checkpoint.folder import find_folder, read_config, weights_digest
from jaxllm.checkpoint.safetensors_file import read_header
from jaxllm.config import GenerationDefaults, Runtime
from jaxllm.model import Transformer
from jaxllm.tokenizer import Tokenizer

CASES = sorted(file.stem for file in GOLDENS.glob("*.json"))
BF16 = ml_dtypes.bfloat16
CHAT = [{"role": "user", "content": "hi"}]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def parameters(model: Transformer) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(param[...]) for path, param in flat}


def edit_json(file: Path, **changes) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))


def rewrite(folder: Path, change) -> dict[str, np.ndarray]:
    """Write the weights again after `change(weights)` has altered the dictionary."""
    weights = dict(safetensors.numpy.load_file(folder / WEIGHTS))
    change(weights)
    safetensors.numpy.save_file(weights, folder / WEIGHTS)
    return weights


def sentence(caught: pytest.ExceptionInfo) -> str:
    message = str(caught.value)
    assert "\n" not in message
    assert message[0] != "'", "a KeyError's repr"
    return message


# ------------------------------------------------------------------------------------------ values


def expected_parameters(weights: dict[str, np.ndarray], config) -> dict[str, np.ndarray]:
    """Parameters by path, said a second time: Llama's names, and Phi-3's rows by hand."""
    expected = {}
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    for name, x in weights.items():
        path = name.removeprefix("model.")
        if path.endswith("qkv_proj.weight"):
            at = path.removesuffix("qkv_proj.weight")
            expected[at + "q_proj.weight"] = x[:q]
            expected[at + "k_proj.weight"] = x[q : q + kv]
            expected[at + "v_proj.weight"] = x[q + kv :]
        elif path.endswith("gate_up_proj.weight"):
            at = path.removesuffix("gate_up_proj.weight")
            expected[at + "gate_proj.weight"] = x[: len(x) // 2]
            expected[at + "up_proj.weight"] = x[len(x) // 2 :]
        else:
            expected[path] = x
    return expected


@pytest.mark.parametrize("case", CASES)
def test_every_family_comes_in_and_goes_out_bit_for_bit(tmp_path, case):
    golden = read_golden(case)
    weights = make_weights(golden)
    source = write_checkpoint(tmp_path / "source", golden)
    model, tokenizer = load(source, dtype="float32")
    assert tokenizer is None
    expected = expected_parameters(weights, model.config)
    found = parameters(model)
    assert found.keys() == expected.keys()
    for path, x in found.items():
        np.testing.assert_array_equal(x, expected[path], err_msg=path)

    save(model, None, tmp_path / "copy")
    copy = safetensors.numpy.load_file(tmp_path / "copy" / WEIGHTS)
    assert copy.keys() == weights.keys()
    for name, x in copy.items():
        assert x.dtype == np.float32
        np.testing.assert_array_equal(x, weights[name], err_msg=name)
    assert read_config(tmp_path / "copy")[0] == model.config
    assert sorted(file.name for file in (tmp_path / "copy").iterdir()) == [
        "config.json",
        "generation_config.json",
        WEIGHTS,
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", jnp.float32])
def test_values_are_rounded_once_to_the_dtype_asked_for(folder, dtype):
    model, _ = load(folder, dtype=dtype)
    expected = safetensors.numpy.load_file(folder / WEIGHTS)
    for path, x in parameters(model).items():
        assert x.dtype == dtype
        name = path if path == "lm_head.weight" else f"model.{path}"
        np.testing.assert_array_equal(x, expected[name].astype(jnp.dtype(dtype)))
    assert model.runtime.param_dtype == model.runtime.compute_dtype == jnp.dtype(dtype).name


def test_bfloat16_round_trips_bit_for_bit(folder, tmp_path):
    model, _ = load(folder)
    save(model, None, tmp_path / "copy")
    again, _ = load(tmp_path / "copy", dtype=None)
    assert json.loads((tmp_path / "copy/config.json").read_text())["dtype"] == "bfloat16"
    first, second = parameters(model), parameters(again)
    assert first.keys() == second.keys()
    for path, x in first.items():
        assert x.dtype == second[path].dtype == BF16
        np.testing.assert_array_equal(x.view(np.uint16), second[path].view(np.uint16))


def test_dtype_none_is_what_the_checkpoint_says(folder):
    def dtype_of(**keys) -> str | None:
        config = json.loads((folder / "config.json").read_text())
        config = {key: config[key] for key in config if key not in ("dtype", "torch_dtype")}
        (folder / "config.json").write_text(json.dumps(config | keys))
        model, _ = load(folder, dtype=None)
        return model.runtime.param_dtype

    assert dtype_of(torch_dtype="bfloat16") == "bfloat16"
    assert dtype_of(dtype="float16", torch_dtype="bfloat16") == "float16"
    assert dtype_of(dtype="torch.bfloat16") == "bfloat16"
    assert dtype_of() == "float32"
    rewrite(folder, lambda w: w.update({name: x.astype(BF16) for name, x in w.items()}))
    assert dtype_of() == "bfloat16"
    assert dtype_of(dtype="float64") == "bfloat16"
    rewrite(folder, lambda w: w.update({"lm_head.weight": w["lm_head.weight"].astype(np.float16)}))
    assert dtype_of() == "float32"
    rewrite(folder, lambda w: w.update({name: x.astype(np.float16) for name, x in w.items()}))
    assert dtype_of() == "float16"


class OtherLibrarys:
    def __repr__(self):
        return "torch.bfloat16"


def test_the_runtime_is_kept_and_must_agree(folder):
    runtime = Runtime(dtype="float32", remat="full")
    model, _ = load(folder, runtime=runtime)
    assert model.runtime == Runtime(dtype="float32", param_dtype="bfloat16", remat="full")
    model, _ = load(folder, dtype=None, runtime=Runtime(param_dtype="float16"))
    assert model.runtime.param_dtype == "float16"
    with pytest.raises(ValueError, match="dtype is 'bfloat16', but the runtime's param_dtype"):
        load(folder, runtime=Runtime(param_dtype="float32"))
    with pytest.raises(ValueError, match="^load: runtime must be a Runtime or None, got {'dtype'"):
        load(folder, runtime={"dtype": "float32"})
    with pytest.raises(ValueError, match="'int8' is not one of float32, bfloat16, float16, None"):
        load(folder, dtype="int8")
    with pytest.raises(ValueError, match="'torch.bfloat16' is not one of float32, bfloat16"):
        load(folder, dtype=OtherLibrarys())
    with pytest.raises(ValueError, match=r"dtype \"Runtime\(.* is not one of float32, bfloat16"):
        load(folder, runtime)


def test_mixed_and_unusual_float_dtypes_are_cast(folder):
    fp8 = ml_dtypes.float8_e4m3fn

    def change(weights):
        weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.float64)
        weights["lm_head.weight"] = weights["lm_head.weight"].astype(fp8)
        weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].astype(BF16)

    weights = rewrite(folder, change)
    found = parameters(load(folder, dtype="float32")[0])
    for path in ("norm.weight", "embed_tokens.weight"):
        np.testing.assert_array_equal(found[path], weights[f"model.{path}"].astype(np.float32))
    np.testing.assert_array_equal(
        found["lm_head.weight"], weights["lm_head.weight"].astype(np.float32)
    )


def test_logits_of_a_trained_model(shared):
    source = shared / "data/stories260K"
    model, tokenizer = load(source, dtype=None)
    assert tokenizer is not None
    with np.load(source / "reference.npz") as reference:
        tokens = np.concatenate([reference["prompt_ids"], reference["generated_ids"]])
        expected = reference["teacher_forced_logits"]
    logits = model(jnp.asarray(tokens)[None])[0]
    np.testing.assert_allclose(np.asarray(logits), expected, rtol=0, atol=1e-3)


def test_the_whole_folder_round_trips(shared, tmp_path):
    source = shared / "data/stories260K"
    model, tokenizer = load(source, dtype=None)
    save(model, tokenizer, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / name).read_bytes() == (source / name).read_bytes()
    said = json.loads((tmp_path / "generation_config.json").read_text())
    assert (said["bos_token_id"], said["eos_token_id"]) == (1, [1, 2])
    again, tokenizer = load(tmp_path, dtype=None)
    assert tokenizer is not None
    assert again.generation == model.generation
    assert again.config == model.config


# ------------------------------------------------------------------- which tensors, and their names


@pytest.mark.parametrize(
    ("body", "head", "others"),
    [
        ("language_model.model.", "language_model.", ""),
        ("model.language_model.", "", "model."),
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_the_text_model_of_a_multimodal_gemma(tmp_path, body, head, others):
    golden = read_golden("gemma3")
    folder = write_checkpoint(tmp_path, golden)
    plain = parameters(load(folder, dtype="float32")[0])

    def change(weights):
        for name in list(weights):
            weights[body + name.removeprefix("model.")] = weights.pop(name)
        weights[f"{head}lm_head.weight"] = weights[f"{body}embed_tokens.weight"]
        weights[f"{others}vision_tower.encoder.weight"] = np.ones((2, 2), np.float32)
        weights[f"{others}multi_modal_projector.mm_input"] = np.ones(3, np.int32)

    rewrite(folder, change)
    config = {"model_type": "gemma3", "text_config": golden.config, "vision_config": {"a": 1}}
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [1, 106]}))
    model, _ = load(folder, dtype="float32")
    assert model.generation.stop_ids == (1, 106)
    found = parameters(model)
    assert found.keys() == plain.keys()
    for path, x in found.items():
        np.testing.assert_array_equal(x, plain[path])
    rewrite(folder, lambda weights: weights.update(vision=np.ones(1, np.float32)))
    with pytest.raises(ValueError, match="1 surplus: vision"):
        load(folder)


def test_a_vision_tower_is_surplus_in_a_plain_checkpoint(folder):
    rewrite(folder, lambda w: w.update({"vision_tower.weight": np.ones(3, np.float32)}))
    with pytest.raises(ValueError, match=r"1 surplus: vision_tower.weight$"):
        load(folder)


def test_known_buffers_are_left_aside(folder):
    rewrite(
        folder,
        lambda weights: weights.update(
            {
                "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
                "model.rotary_emb.inv_freq": np.ones(8, np.float32),
            }
        ),
    )
    load(folder)


def test_a_tied_checkpoint_may_hold_its_head_if_it_is_the_embedding(tmp_path):
    folder = write_checkpoint(tmp_path, read_golden("gemma2"))
    name, head = "model.embed_tokens.weight", "lm_head.weight"
    rewrite(folder, lambda weights: weights.update({head: weights[name].copy()}))
    load(folder)
    rewrite(folder, lambda weights: weights.update({head: weights[name] + np.float32(1e-3)}))
    with pytest.raises(ValueError, match="set tie_word_embeddings to false there") as caught:
        load(folder)
    assert "lm_head.weight differs from model.embed_tokens.weight" in sentence(caught)


def test_a_tied_checkpoint_may_hold_its_head_in_place_of_the_embedding(tmp_path):
    """As safetensors' save_model leaves it."""
    folder = write_checkpoint(tmp_path, read_golden("gemma2"))
    before = parameters(load(folder)[0])
    name = "model.embed_tokens.weight"
    rewrite(folder, lambda weights: weights.update({"lm_head.weight": weights.pop(name)}))
    after = parameters(load(folder)[0])
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_tied_model_saved_without_its_head(tmp_path):
    """Whose names have no prefix, as transformers writes a bare LlamaModel."""
    folder = write_checkpoint(tmp_path, read_golden("gemma2"))
    before = parameters(load(folder)[0])

    def strip(weights):
        for name in list(weights):
            weights[name.removeprefix("model.")] = weights.pop(name)

    rewrite(folder, strip)
    after = parameters(load(folder)[0])
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_every_misfit_is_in_one_error(folder):
    def change(weights):
        del weights["model.norm.weight"], weights["model.layers.1.mlp.up_proj.weight"]
        weights["model.layers.0.self_attn.q_proj.bias"] = np.ones(96, np.float32)
        weights["model.layers.2.input_layernorm.weight"] = np.ones(96, np.float32)
        weights["lm_head.weight"] = weights["lm_head.weight"][:-1]
        weights["model.layers.0.mlp.down_proj.weight"] = np.ones(3, np.float32)

    rewrite(folder, change)
    with pytest.raises(
        ValueError, match=r"the tensors are not those that config.json asks"
    ) as caught:
        load(folder)
    message = sentence(caught)
    assert message.startswith(str(folder))
    assert "2 missing: model.layers.1.mlp.up_proj.weight, model.norm.weight;" in message
    assert "2 surplus: model.layers.0.self_attn.q_proj.bias, model.layers.2.input" in message
    assert "2 of another shape: lm_head.weight [130, 96] instead of [131, 96], model." in message
    assert "model.layers.0.mlp.down_proj.weight [3] instead of [96, 116]" in message


def test_long_lists_of_misfits_are_cut_and_counted(folder):
    extra = {f"extra.{i:03}": np.ones(1, np.float32) for i in range(100)}
    rewrite(folder, lambda weights: weights.update(extra))
    with pytest.raises(ValueError, match=r"100 surplus: extra.000, .*extra.019, and 80 more$"):
        load(folder)


def test_a_wrong_fused_shape_is_reported_whole(tmp_path):
    folder = write_checkpoint(tmp_path, read_golden("phi3"))
    name = "model.layers.0.self_attn.qkv_proj.weight"
    rewrite(folder, lambda weights: weights.update({name: weights[name][:-1]}))
    with pytest.raises(
        ValueError, match=r"1 of another shape: .*qkv_proj.weight \[\d+, 96\] instead"
    ):
        load(folder)


def test_more_layers_than_tensors_are_not_built(folder):
    edit_json(folder / "config.json", num_hidden_layers=10**4)
    with pytest.raises(ValueError, match="says 10000 layers, but there are only 21 tensors"):
        load(folder)


def test_methods_that_are_not_supported(folder):
    rewrite(folder, lambda w: w.update({"lm_head.weight": np.ones((131, 96), np.int8)}))
    with pytest.raises(
        NotImplementedError, match=r"1 tensors are not stored .* lm_head.weight \(I8"
    ):
        load(folder)
    edit_json(folder / "config.json", quantization_config={"quant_method": "hqq", "bits": 4})
    with pytest.raises(
        NotImplementedError, match=r"quant_method 'hqq' is not supported; supp.*awq"
    ):
        load(folder)


# ------------------------------------------------------------------------------- files and folders


def shard(folder: Path, count: int = 3) -> dict[str, str]:
    """Spread the weights over files by hand, and return the index's map."""
    weights = safetensors.numpy.load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    places = {name: f"model-{i % count + 1:05}-of-0.safetensors" for i, name in enumerate(weights)}
    for file in set(places.values()):
        part = {name: weights[name] for name in weights if places[name] == file}
        safetensors.numpy.save_file(part, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


def test_sharded_checkpoints(folder, tmp_path):
    whole = parameters(load(folder)[0])
    shard(folder)
    model, _ = load(folder)
    for path, x in parameters(model).items():
        np.testing.assert_array_equal(x, whole[path])
    limit = 2 * 116 * 96 * 2 - 1  # a byte less than two of the MLP's weights
    save(model, None, tmp_path / "copy", max_shard_size=limit)
    files = sorted(file.name for file in (tmp_path / "copy").glob("*.safetensors"))
    assert len(files) > 2
    count = len(files)
    assert files == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    for file in files:
        held = read_header(tmp_path / "copy" / file).values()
        assert sum(tensor.size_bytes for tensor in held) <= limit
    index = json.loads((tmp_path / "copy" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in whole.values())
    for path, x in parameters(load(tmp_path / "copy")[0]).items():
        np.testing.assert_array_equal(x, whole[path])


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/../../b.safetensors", "..\\b", ""]
)
def test_an_index_must_stay_in_its_folder(folder, name):
    places = shard(folder)
    places["model.norm.weight"] = name
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ValueError, match="which is not a file of this folder") as caught:
        load(folder)
    assert repr(name) in sentence(caught)


def test_an_index_that_disagrees_with_its_files(folder):
    places = shard(folder)
    first, second = "model-00001-of-0.safetensors", "model-00002-of-0.safetensors"
    moved = next(name for name in places if places[name] == first)
    (folder / INDEX).write_text(json.dumps({"weight_map": places | {moved: second}}))
    with pytest.raises(ValueError, match=f"1 tensors are not where it says: {moved} in {second}"):
        load(folder)
    less = {name: places[name] for name in places if name != moved}
    (folder / INDEX).write_text(json.dumps({"weight_map": less}))
    with pytest.raises(ValueError, match=f"1 are not listed: {moved} of {first}"):
        load(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    (folder / first).unlink()
    with pytest.raises(FileNotFoundError, match=f"names {first}, which is not there"):
        load(folder)
    for content in ("[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "{}", "{"):
        (folder / INDEX).write_text(content)
        with pytest.raises(ValueError, match=r"weight_map|JSON"):
            load(folder)


def test_no_such_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    for name in (
        tmp_path / "none",
        "none",
        "./a/b",
        "checkpoints/none",
        "a/b/c",
        "~/none/none",
        "",
        Path("a/b"),
    ):
        with pytest.raises(FileNotFoundError, match=r"there is no folder .*\(org/name\)") as caught:
            load(name)
        sentence(caught)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file; give the folder"):
        load(tmp_path / "file")


@pytest.mark.parametrize("path", [None, 5, b"folder"])
def test_what_names_no_checkpoint(path):
    with pytest.raises(ValueError, match="^a checkpoint is a folder or a hub id .*, got") as caught:
        load(path)
    sentence(caught)


def test_an_empty_folder(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"there is no config.json; give a checkpoint's folder"
    ):
        load(tmp_path)
    for name, words in (("adapter_config.json", "PEFT adapter"), ("run.json", "a run of jaxllm")):
        (tmp_path / name).write_text("{}")
        with pytest.raises(FileNotFoundError, match=f"this is a.*{words}|this is {words}"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "config.json: not valid JSON"),
        (b"{", "config.json: not valid JSON"),
        (b"\xff\xfe", "config.json: not valid JSON"),
        (b"[" * 100_000, "config.json: not valid JSON"),
        (b"[1]", "config.json: must hold a JSON object, found list"),
        (b"{}", "config.json: the key 'model_type' is missing"),
        (b'{"model_type": "mamba"}', "model_type 'mamba' is not supported; supported are llama, "),
    ],
)
def test_a_bad_config(folder, content, words):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        load(folder)
    assert str(folder / "config.json") in sentence(caught)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("num_attention_heads", "6"),
        ("hidden_size", [96]),
        ("rms_norm_eps", "small"),
        ("rope_parameters", 3),
        ("vocab_size", -1),
        ("num_hidden_layers", 2.5),
        ("model_type", ["llama"]),
    ],
)
def test_config_values_of_the_wrong_kind(folder, key, value):
    edit_json(folder / "config.json", **{key: value})
    with pytest.raises(ValueError, match=key) as caught:
        load(folder)
    sentence(caught)


def test_no_safetensors(folder):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="a pickle can run code; convert it") as caught:
        load(folder)
    assert "save_pretrained" in sentence(caught)
    (folder / "pytorch_model.bin").rename(folder / "weights.safetensors")
    with pytest.raises(
        FileNotFoundError, match=r"no model.safetensors; it has weights.safetensors"
    ):
        load(folder)
    (folder / "weights.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no model.safetensors; weights must be"):
        load(folder)


@pytest.mark.parametrize("name", [WEIGHTS, INDEX])
def test_a_link_to_weights_that_are_gone(folder, name):
    (folder / WEIGHTS).unlink()
    (folder / name).symlink_to("../blobs/0123")
    with pytest.raises(FileNotFoundError, match=f"{name} is a link to ../blobs/0123, which is not"):
        load(folder)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_weights(folder, kept):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:kept])
    with pytest.raises(ValueError, match=r"model.safetensors: .*; download or save it again"):
        load(folder)


def test_a_tokenizer_of_another_format_is_not_passed_over(folder):
    (folder / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json"):
        load(folder)


# ---------------------------------------------------------------------------------------- the hub


class GatedRepoError(Exception):
    pass


class RepositoryNotFoundError(Exception):
    pass


@pytest.fixture
def hub(monkeypatch):
    """A hub that answers with the value, or the exception, that the test sets as `answer`."""
    state = types.SimpleNamespace(answer=None, asked=None)

    def snapshot_download(name, *, allow_patterns, revision=None):
        state.asked, state.revision = (name, allow_patterns), revision
        if isinstance(state.answer, Exception):
            raise state.answer
        return str(state.answer)

    module = types.ModuleType("huggingface_hub")
    errors = types.ModuleType("huggingface_hub.errors")
    errors.__dict__.update(
        GatedRepoError=GatedRepoError, RepositoryNotFoundError=RepositoryNotFoundError
    )
    module.__dict__.update(snapshot_download=snapshot_download, errors=errors)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    return state


def test_a_hub_id_is_downloaded(hub, folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    hub.answer = folder
    assert find_folder("org/name-1.5_b") == folder
    name, patterns = hub.asked
    assert name == "org/name-1.5_b"
    wanted = {"config.json", "tokenizer.json", "tokenizer.model", "model-*.safetensors", INDEX}
    assert wanted <= set(patterns)
    assert not any("bin" in pattern or pattern == "*.safetensors" for pattern in patterns)
    (tmp_path / "org/name-1.5_b").mkdir(parents=True)
    assert find_folder("org/name-1.5_b") == Path("org/name-1.5_b")


def test_weights_of_other_names_are_downloaded_too(hub, folder, monkeypatch, tmp_path):
    """Those that the index names, which "download it again" would not bring."""
    monkeypatch.chdir(tmp_path)
    hub.answer = folder
    (folder / WEIGHTS).rename(folder / "part-1.safetensors")
    names = safetensors.numpy.load_file(folder / "part-1.safetensors")
    weight_map = dict.fromkeys(names, "part-1.safetensors") | {"x": "part-2.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert find_folder("org/name") == folder
    assert hub.asked == ("org/name", ["part-2.safetensors"])
    assert hub.revision == folder.name  # of one commit with the index
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "*"}}))
    assert find_folder("org/name") == folder
    assert hub.asked == ("org/name", ["[*]"])
    (folder / INDEX).write_text("{")
    assert find_folder("org/name") == folder


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GatedRepoError("401\nlong"), "licence must be accepted"),
        (RepositoryNotFoundError("404\nlong"), "there is no such model, or it is private"),
        (ConnectionError("no route\nto host"), "ConnectionError: no route; check the network"),
        (RuntimeError(), "RuntimeError: ; check the network, or give a folder"),
    ],
)
def test_a_hub_that_gives_nothing(hub, error, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    hub.answer = error
    with pytest.raises(FileNotFoundError, match=words) as caught:
        load("org/name")
    assert sentence(caught).startswith("there is no folder org/name, and")


def test_without_the_hub_extra(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match="needed: pip install huggingface_hub"):
        load("org/name")


# ------------------------------------------------------------------------- generation_config.json


def test_generation_defaults(folder):
    assert load(folder)[0].generation == GenerationDefaults()
    edit_json(folder / "config.json", eos_token_id=2, bos_token_id=1, pad_token_id=-1)
    assert load(folder)[0].generation == GenerationDefaults(stop_ids=(2,), bos_id=1)
    file = folder / "generation_config.json"
    edit_json(file, eos_token_id=[7, 2], pad_token_id=0, do_sample=True, temperature=1, top_k=20)
    edit_json(file, top_p=0.8, min_p=0.1, repetition_penalty=1.05, max_length=99, num_beams=1)
    assert load(folder)[0].generation == GenerationDefaults(
        stop_ids=(7, 2),
        bos_id=1,
        pad_id=0,
        do_sample=True,
        temperature=1.0,
        top_k=20,
        top_p=0.8,
        min_p=0.1,
        repetition_penalty=1.05,
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token_id", "2"),
        ("eos_token_id", [2, 2**31]),
        ("top_p", "high"),
        ("top_k", True),
        ("top_k", float("nan")),
        ("top_k", 50.9),
        ("top_k", 10**39),
        ("do_sample", "false"),
        ("do_sample", 1),
        ("temperature", float("inf")),
    ],
)
def test_generation_settings_of_the_wrong_kind(folder, key, value):
    edit_json(folder / "generation_config.json", **{key: value})
    with pytest.raises(ValueError, match=f"generation_config.json: {key} must be"):
        load(folder)


def test_older_files_have_generation_in_their_config(folder):
    (folder / "generation_config.json").unlink(missing_ok=True)
    edit_json(folder / "config.json", do_sample=True, temperature=0.3, top_k=7)
    found = load(folder)[0].generation
    assert (found.do_sample, found.temperature, found.top_k, found.top_p) == (True, 0.3, 7, 1.0)
    edit_json(folder / "config.json", temperature="hot")
    with pytest.raises(ValueError, match=r"^config.json: temperature must be a number"):
        load(folder)


def test_generation_defaults_are_saved(folder, tmp_path):
    model, _ = load(folder)
    model.generation = GenerationDefaults((3, 4), 1, 0, do_sample=True, top_p=0.5)
    save(model, None, tmp_path / "copy")
    assert load(tmp_path / "copy")[0].generation == model.generation
    config = json.loads((tmp_path / "copy/config.json").read_text())
    assert config["eos_token_id"] == [3, 4]
    model.generation = GenerationDefaults()
    save(model, None, tmp_path / "copy")
    said = json.loads((tmp_path / "copy/generation_config.json").read_text())
    assert said == dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = json.loads((tmp_path / "copy/config.json").read_text())
    assert config["eos_token_id"] is None
    assert config["bos_token_id"] is None


@pytest.mark.parametrize("said", [{"top_k": 0}, {}])
def test_a_top_k_of_0_stays_said(folder, tmp_path, said):
    """Of a file without it transformers makes 50."""
    said = {"do_sample": True, "temperature": 0.5, **said}
    edit_json(folder / "generation_config.json", **said)
    save(load(folder)[0], None, tmp_path / "copy")
    written = json.loads((tmp_path / "copy/generation_config.json").read_text())
    assert {key: value for key, value in written.items() if not key.endswith("_id")} == said


# ------------------------------------------------------------------------------------------ saving


def test_a_failed_save_leaves_the_folder_as_it_was(folder, tmp_path):
    class Broken(Tokenizer):
        def save(self, folder):
            raise OSError("disk full")

    model, _ = load(folder)
    broken = Broken(tiny_tokenizers.files(tiny_tokenizers.byte_level()))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    for target in (folder, tmp_path / "new"):
        with pytest.raises(OSError, match="disk full"):
            save(model, broken, target)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert not (tmp_path / "new").exists()


def test_parameters_that_were_put_back_as_numpy_arrays_are_saved(folder, tmp_path):
    model, _ = load(folder)
    nnx.update(model, jax.device_get(nnx.state(model)))
    assert isinstance(model.norm.weight.get_value(), np.ndarray)
    save(model, None, tmp_path / "copy")
    save(load(folder)[0], None, tmp_path / "other")
    assert (tmp_path / "copy" / WEIGHTS).read_bytes() == (tmp_path / "other" / WEIGHTS).read_bytes()


def test_saving_over_a_checkpoint_leaves_none_of_its_weights(folder):
    model, _ = load(folder)
    (folder / "notes.safetensors").write_text("mine")
    save(model, None, folder, max_shard_size="0.04MB")
    assert not (folder / WEIGHTS).exists()
    load(folder)
    save(model, None, folder)
    assert sorted(file.name for file in folder.glob("*.safetensors*")) == [
        WEIGHTS,
        "notes.safetensors",
    ]
    load(folder)


@pytest.mark.parametrize("size", ["5GB", "0.04MB"])
@pytest.mark.parametrize("replaced", range(3))
def test_a_folder_in_which_a_save_was_cut_short_is_refused(folder, monkeypatch, replaced, size):
    model, tokenizer = load(folder)
    other, _ = load(folder)
    nnx.update(other, jax.tree.map(lambda x: -x, nnx.state(other)))
    with monkeypatch.context() as patch:
        tiny_checkpoints.end_after(replaced, patch)
        with pytest.raises(KeyboardInterrupt):
            save(other, tokenizer, folder, max_shard_size=size)
    with pytest.raises(FileNotFoundError, match=r"there is no config.json; give a checkpoint's f"):
        load(folder)
    assert len(list(folder.glob(".save-*"))) == 1
    save(model, tokenizer, folder)  # beside what may be another save
    load(folder)
    assert len(list(folder.glob(".save-*"))) == 1
    tiny_checkpoints.let_pass(700, folder)
    save(model, tokenizer, folder)
    load(folder)
    assert not list(folder.glob(".save-*"))


def test_saving_over_a_checkpoint_leaves_none_of_its_templates(folder):
    """They would be read before the template in the new tokenizer_config.json."""
    model, _ = load(folder)
    plain = tiny_tokenizers.files(tiny_tokenizers.byte_level(), chat_template="new")
    extra = "additional_chat_templates/tool_use.jinja"
    templates = {"chat_template.jinja": b"old", extra: b"tools", "special_tokens_map.json": b"{}"}
    with_templates = Tokenizer(plain | templates)
    for _ in range(2):  # the second time into a folder that has them
        save(model, with_templates, folder)
        assert load(folder)[1].apply_chat_template(CHAT, tools=[], tokenize=False) == "tools"
    save(model, None, folder)
    assert load(folder)[1].apply_chat_template(CHAT, tokenize=False) == "old"
    save(model, Tokenizer(plain), folder)
    assert load(folder)[1].apply_chat_template(CHAT, tools=[], tokenize=False) == "new"
    assert {name for name in templates if (folder / name).exists()} == set()
    with_templates.save(folder)
    Tokenizer(plain).save(folder)
    assert Tokenizer.from_folder(folder).apply_chat_template(CHAT, tokenize=False) == "new"


def test_saving_where_a_file_is(folder, tmp_path, monkeypatch):
    model, _ = load(folder)
    monkeypatch.chdir(tmp_path)  # which an empty path would mean
    with pytest.raises(ValueError, match="^save: the path is empty; give a folder$"):
        save(model, None, "")
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="file is a file; give a folder"):
            save(model, None, target)
    for size in (0, 1.5, True, "5", "GB", "5 TB"):
        with pytest.raises(ValueError, match=f"1 at least, or a size like '5GB', got '?{size}'?$"):
            save(model, None, tmp_path / "x", max_shard_size=size)


@pytest.mark.own_errors
def test_saving_what_is_no_model(tmp_path):
    with pytest.raises(ValueError, match="^save: model must be a Transformer, not NoneType$"):
        save(None, None, tmp_path / "x")  # type: ignore[arg-type]
    for wrong in ("x", tiny_tokenizers.byte_level()):  # a path, or another library's
        words = "^save: tokenizer must be a jaxllm.Tokenizer or None, not (builtins.str|tokenizers)"
        with pytest.raises(ValueError, match=words):
            save(tiny_models.build(tiny_models.TINY), wrong, tmp_path / "x")  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()


@pytest.mark.reference
@pytest.mark.parametrize(
    "case", ["llama_biases", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3"]
)
def test_transformers_reads_what_is_saved(tmp_path, transformers, case):
    import torch

    model, _ = load(write_checkpoint(tmp_path / "source", read_golden(case)), dtype="float32")
    model.generation = GenerationDefaults((5, 6), bos_id=1, pad_id=0, do_sample=True, top_k=7)
    save(model, None, tmp_path / "copy", max_shard_size=100_000)
    original, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "copy", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    assert original.dtype == torch.float32
    assert original.generation_config.eos_token_id == [5, 6]
    assert original.generation_config.top_k == 7
    tokens = np.arange(1, 40)[None]
    with torch.no_grad():
        expected = original(torch.tensor(tokens)).logits.numpy()
    found = np.asarray(model(jnp.asarray(tokens)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_float_names_agree_with_the_writer():
    assert hf._widest({np.dtype(np.float16)}) == "float16"
    assert hf._widest({np.dtype(BF16), np.dtype(ml_dtypes.float8_e5m2)}) == "bfloat16"
    assert hf._widest({np.dtype(BF16), np.dtype(np.float16)}) == "float32"


def test_a_digest_tells_weights_apart_and_not_files(tmp_path):
    model = tiny_models.build(tiny_models.TINY)
    save(model, None, tmp_path / "one")
    save(model, None, tmp_path / "many", max_shard_size="20KB")
    one = weights_digest(tmp_path / "one")
    assert weights_digest(tmp_path / "many") == one
    tensors = safetensors.numpy.load_file(tmp_path / "one/model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    x = tensors[name]
    changed = [{f"{key}x" if key == name else key: value for key, value in tensors.items()}]
    changed += [tensors | {name: y} for y in (x.view(np.int32), x.reshape(x.shape[::-1]))]
    for place in (0, x.size // 2, -1):  # one number is another
        y = x.copy()
        y.flat[place] += 1
        changed.append(tensors | {name: y})
    for others in changed:
        safetensors.numpy.save_file(others, tmp_path / "one/model.safetensors")
        assert weights_digest(tmp_path / "one") != one
