"""BitNet checkpoints: the hub's packing and ours into each other; three forms of one tiny model."""

import dataclasses
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_checkpoints
import tiny_models
from safetensors.numpy import load_file, save_file

import jaxllm
from jaxllm.checkpoint.bitnet import from_hub, to_hub
from jaxllm.families import from_hf, to_hf
from jaxllm.layers import BitLinear, Linear
from jaxllm.quantize import PackedLinear
from pallas_kernels.quantize import quantize
from pallas_kernels.ternary_matmul import unpack


def ternary(*shape):
    return np.random.default_rng(0).integers(-1, 2, shape).astype(np.int8)


def test_golden_of_the_hub():
    column = np.array([1, -1, 0, 1, 0, 0, -1, 1], np.int8)
    weight = np.repeat(column[:, None], 4, axis=1)
    stored = np.repeat(np.array([[22], [152]], np.uint8), 4, axis=1)
    codes = from_hub(stored, "w")
    np.testing.assert_array_equal(unpack(codes), weight)
    np.testing.assert_array_equal(to_hub(codes, "w"), stored)


@pytest.mark.parametrize("shape", [(4, 4), (116, 96), (12, 20)])
def test_round_trip(shape):
    weight = ternary(*shape)
    # A weight of -1, 0 and 1 whose mean is near that of its quantised self
    packed = quantize(jnp.asarray(weight, jnp.float32), "ternary")
    codes = np.asarray(packed.codes)
    stored = to_hub(codes, "w")
    assert stored.shape == (shape[0] // 4, shape[1])
    for place in range(4):
        rows = slice(place * shape[0] // 4, (place + 1) * shape[0] // 4)
        code = (stored >> 2 * place & 3).astype(np.int8) - 1
        np.testing.assert_array_equal(code, weight[rows])
    np.testing.assert_array_equal(from_hub(stored, "w"), codes)
    np.testing.assert_array_equal(unpack(codes), weight)


def test_what_cannot_be():
    with pytest.raises(ValueError, match="layer: holds the code 3; ternary codes are 0, 1 and 2"):
        from_hub(np.full((1, 4), 3 << 4, np.uint8), "layer")
    with pytest.raises(ValueError, match="layer: a ternary weight of 6 inputs cannot be packed"):
        from_hub(np.zeros((1, 6), np.uint8), "layer")
    with pytest.raises(ValueError, match="layer: a ternary weight of 6 outputs cannot be stored"):
        to_hub(np.zeros((6, 1), np.uint8), "layer")


# ------------------------------------------------------------------------ a tiny model, in 3 forms

TOLERANCE = 1e-4  # of the largest logit; float32 is off by 1e-6
GOLDEN = tiny_checkpoints.read_golden("bitnet_linears")
BITLINEAR = {"quant_method": "bitnet", "modules_to_not_convert": None}
OFFLINE = {**BITLINEAR, "linear_class": "autobitlinear", "quantization_mode": "offline"}
FORMS = {
    "online": GOLDEN.config["quantization_config"],
    "autobitlinear": OFFLINE,
    "bitlinear": BITLINEAR,
}


def write(folder, form, *, change=None):
    """The golden's model as a checkpoint of that form; change: (tensors) -> None, on the way."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tiny_checkpoints.make_weights(GOLDEN)
    config = {**GOLDEN.config, "quantization_config": FORMS[form]}
    if form != "online":
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            weight = tensors[name]
            gamma = max(np.abs(weight).mean(dtype=np.float32), np.float32(1e-5))
            codes = (np.clip(np.round(weight / gamma), -1, 1) + 1).astype(np.uint8)
            parts = codes.reshape(4, codes.shape[0] // 4, -1)
            tensors[name] = parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6
            scale = gamma if form == "autobitlinear" else 1 / gamma
            tensors[f"{name}_scale"] = np.array([scale], np.float32)
    if change is not None:
        change(tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def distance(ours, theirs):
    return float(np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs)))


@pytest.fixture(scope="module", params=FORMS)
def form(request):
    return request.param


@pytest.fixture(scope="module")
def model(form, tmp_path_factory):
    model, tokenizer = jaxllm.load(write(tmp_path_factory.mktemp(form), form), dtype="float32")
    assert tokenizer is None
    return model


def logits_of(model, text):
    return tiny_models.logits(model, text[None])[0]


def test_logits_are_the_originals(model):
    for text, logits in zip(GOLDEN.group("text"), GOLDEN.group("logits"), strict=True):
        assert distance(logits_of(model, text), logits) < TOLERANCE


def test_projections_are_what_the_form_says(form, model):
    down = model.layers[1].mlp.down_proj
    if form == "online":
        assert type(down) is BitLinear
        assert down.weight.shape == (96, 116)
    else:
        assert type(down) is PackedLinear
        assert down.codes.shape == (96, 29)
        assert down.codes.dtype == jnp.uint8
        assert down.row_scale.shape == (96,)


def test_greedy_tokens_are_the_originals(model):
    for prompt, greedy in zip(GOLDEN.group("prompt"), GOLDEN.group("greedy"), strict=True):
        result = jaxllm.generate(
            model, None, [prompt.tolist()], max_new_tokens=len(greedy), stop_ids=[]
        )
        assert result.tokens == [greedy.tolist()]


def test_fused_it_decodes_the_same(tmp_path):
    """Norms, gate and sums as parts of products: token by token, the logits of the text."""
    model, _ = jaxllm.load(write(tmp_path, "bitlinear"), dtype="float32")
    jaxllm.fuse(model)
    assert model.layers[0].self_attn.qkv_proj.codes.shape == (192, 24)
    text, expected = GOLDEN.group("text")[0], GOLDEN.group("logits")[0]
    cache = jaxllm.KVCache.create(model.config, 1, len(text), jnp.float32)
    weights = jaxllm.flatten(model)
    for token, logits in zip(text, expected, strict=True):
        ours, cache = jaxllm.decode_step(weights, jnp.asarray([token]), cache)
        assert distance(np.asarray(ours[0]), logits) < TOLERANCE


def test_a_wrong_scale_is_seen(tmp_path):
    """The twin: of one layer, gamma where its inverse is meant."""

    def change(tensors):
        tensors["model.layers.0.mlp.down_proj.weight_scale"] **= -1

    other, _ = jaxllm.load(write(tmp_path, "bitlinear", change=change), dtype="float32")
    text, logits = GOLDEN.group("text")[0], GOLDEN.group("logits")[0]
    assert distance(logits_of(other, text), logits) > 10 * TOLERANCE


def test_packed_by_us_it_computes_the_same(tmp_path):
    """Bit for bit: what `jaxllm.quantize` packs, an unpacked projection makes at each call."""
    model, _ = jaxllm.load(write(tmp_path, "online"), dtype="float32")
    text = GOLDEN.group("text")[0]
    before = logits_of(model, text)
    jaxllm.quantize(model, "ternary")
    assert type(model.layers[0].self_attn.q_proj) is PackedLinear
    np.testing.assert_array_equal(logits_of(model, text), before)


def test_what_is_not_converted(tmp_path):
    kept = {**FORMS["online"], "modules_to_not_convert": ["lm_head", "model.layers.1", "o_proj"]}
    folder = write(tmp_path, "online")
    (folder / "config.json").write_text(json.dumps({**GOLDEN.config, "quantization_config": kept}))
    model, _ = jaxllm.load(folder, dtype="float32")
    first, second = model.layers
    assert type(first.self_attn.q_proj) is type(first.mlp.up_proj) is BitLinear
    assert type(first.self_attn.o_proj) is type(second.self_attn.q_proj) is Linear


def test_saved_and_loaded_it_is_the_same(form, model, tmp_path):
    jaxllm.save(model, None, tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert said["linear_class"] == "autobitlinear"
    assert said["quantization_mode"] == ("online" if form == "online" else "offline")
    again, _ = jaxllm.load(tmp_path, dtype="float32")
    text = GOLDEN.group("text")[0]
    np.testing.assert_array_equal(logits_of(again, text), logits_of(model, text))
    stored = load_file(tmp_path / "model.safetensors")
    theirs = load_file(write(tmp_path / "original", form) / "model.safetensors")
    for name, array in theirs.items():
        if not name.endswith("scale"):
            np.testing.assert_array_equal(stored[name], array, strict=True)
    assert stored.keys() == theirs.keys()


def test_a_llama_made_ternary_is_saved_as_a_bitnet(tmp_path):
    model = tiny_models.build(tiny_models.TINY)
    jaxllm.quantize(model, "ternary", keep=("o_proj",))
    jaxllm.save(model, None, tmp_path)
    again, _ = jaxllm.load(tmp_path, dtype="float32")
    kept = tuple(f"model.layers.{i}.self_attn.o_proj" for i in range(2))
    assert again.config.modules_to_not_convert == kept
    assert type(again.layers[0].self_attn.o_proj) is Linear
    tokens = tiny_models.tokens(1, 9)
    expected = tiny_models.logits(model, tokens)
    np.testing.assert_array_equal(tiny_models.logits(again, tokens), expected)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop(f"{Q}.weight_scale"), "q_proj: has no weight_scale"),
        (lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][1:]}), "q_proj: weight is U8"),
        (lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"] | 3}), "holds the code 3"),
        (lambda t: t.update({f"{Q}.weight_scale": NONE}), "weight_scale is 0.0, not a positive"),
        (lambda t: t.update({f"{Q}.weight_scale": NONE / NONE}), "weight_scale is nan, not a pos"),
    ],
)
def test_tensors_that_contradict_the_config(change, sentence, tmp_path):
    with np.errstate(invalid="ignore"):
        folder = write(tmp_path, "bitlinear", change=change)
    with pytest.raises(ValueError, match=sentence):
        jaxllm.load(folder, dtype="float32")


Q, NONE = "model.layers.0.self_attn.q_proj", np.zeros(1, np.float32)


def test_weights_that_are_not_packed_where_the_config_says_so(tmp_path):
    folder = write(tmp_path, "online")
    config = {**GOLDEN.config, "quantization_config": OFFLINE}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"down_proj: weight is F32 \[96, 116\], where"):
        jaxllm.load(folder, dtype="float32")


NAMES = ["model.layers.1", "model.layers.1.", "model.layers.1.mlp", "layers.1.mlp", "mlp.up_proj"]
NAMES += ["up_proj", "_proj", "proj.", "model", "model.layers.1.mlp.up"]


@pytest.mark.reference
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_converted_as_transformers(transformers, name):
    config = dataclasses.replace(tiny_models.TINY, bit_linear=True, modules_to_not_convert=(name,))
    converts = transformers.quantizers.quantizers_utils.should_convert_module
    for module in ("layers.1.mlp.up_proj", "layers.11.mlp.up_proj", "layers.0.self_attn.q_proj"):
        assert config.is_bit_linear(module) == converts(f"model.{module}", [name])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"linear_class": "linear"}, "linear_class is 'linear'; supported are bitlinear, autobit"),
        ({"linear_class": "bitlinear"}, "quantization_mode is 'online'; supported of a bitlinear"),
        ({"use_rms_norm": True}, "use_rms_norm is True; supported are False"),
        ({"modules_to_not_convert": ["o_proj"]}, "a list must name lm_head, too"),
        (
            {"modules_to_not_convert": ["lm_head", "model.layers.*.mlp"]},
            r"modules_to_not_convert has 'model.layers.\*.mlp'; it must be names of modules",
        ),
        ({"bits": 2}, "could change the result: bits=2"),
    ],
)
def test_configs_that_cannot_be(change, sentence):
    said = {**FORMS["online"], **change}
    with pytest.raises(ValueError, match=sentence):
        from_hf({**GOLDEN.config, "quantization_config": said})


def test_of_a_llama(tmp_path):
    """As those of the hub that were converted: without sub-norms, packed as `bitlinear`."""
    config = {**tiny_checkpoints.read_golden("llama").config, "quantization_config": BITLINEAR}
    llama = from_hf(config)
    assert llama.bit_linear
    assert not llama.sub_norms
    assert to_hf(llama)["quantization_config"]["quantization_mode"] == "online"
    phi = tiny_checkpoints.read_golden("phi3").config
    with pytest.raises(ValueError, match="a family of fused projections cannot be one of BitNet's"):
        from_hf({**phi, "quantization_config": BITLINEAR})


def test_packed_in_part_it_is_not_saved(tmp_path):
    model, _ = jaxllm.load(write(tmp_path, "online"), dtype="float32")
    jaxllm.quantize(model, "ternary", keep=("o_proj",))
    with pytest.raises(NotImplementedError, match="o_proj is not packed beside layers that are"):
        jaxllm.save(model, None, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.fixture(scope="module")
def original(transformers):
    """transformers' own module, not compiled by torch; which warns of itself as it is imported."""
    import torch

    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        from transformers.integrations import bitnet
    before, torch._dynamo.config.disable = torch._dynamo.config.disable, True
    yield bitnet
    torch._dynamo.config.disable = before


@pytest.mark.reference
def test_the_original_packs_so(original):
    import torch

    weight = ternary(36, 20)
    codes = np.asarray(quantize(jnp.asarray(weight, jnp.float32), "ternary").codes)
    theirs = original.pack_weights(torch.from_numpy(weight.astype(np.float32)))
    np.testing.assert_array_equal(to_hub(codes, "w"), theirs.numpy())


@pytest.mark.reference
def test_the_original_reads_the_same_files(form, model, original, transformers, tmp_path):
    """The golden's texts, live: others may have an activation that float32 rounds either way."""
    import torch

    folder = write(tmp_path, form)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype="float32"
    ).eval()
    for text in GOLDEN.group("text"):
        with torch.no_grad():
            out = theirs(torch.from_numpy(text.astype(np.int64))[None], use_cache=False)
        assert distance(logits_of(model, text), out.logits[0].numpy()) < TOLERANCE


@pytest.fixture
def biased(tmp_path):
    """A ternary model with biases, its folder, and its logits of some tokens."""
    golden = tiny_checkpoints.read_golden("llama_biases")
    source = tiny_checkpoints.write_checkpoint(tmp_path / "source", golden)
    model, _ = jaxllm.load(source, dtype="float32")
    jaxllm.quantize(model, "ternary")
    folder = tmp_path / "saved"
    jaxllm.save(model, None, folder)
    text = np.arange(9) % model.config.vocab_size
    return folder, text, logits_of(model, text)


def as_autobitlinear(folder):
    """Of a saved folder: the other form of the same numbers, its biases as they are."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale")]:
        tensors[name] = 1 / tensors[name]
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["linear_class"] = "autobitlinear"
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_biases_are_added_last_in_what_is_saved(biased):
    folder, text, expected = biased
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert said["linear_class"] == "bitlinear"
    again, _ = jaxllm.load(folder, dtype="float32")
    assert distance(logits_of(again, text), expected) < 1e-6
    as_autobitlinear(folder)  # where the scale multiplies them too
    other, _ = jaxllm.load(folder, dtype="float32")
    assert distance(logits_of(other, text), expected) > 10 * TOLERANCE
    with jax.numpy_dtype_promotion("strict"):
        narrow, _ = jaxllm.load(folder, dtype="bfloat16")
    plain, scaled, rounded = (m.layers[0].self_attn.q_proj for m in (again, other, narrow))
    wanted = plain.bias[...] * scaled.row_scale[...]
    np.testing.assert_array_equal(scaled.bias[...], wanted)
    assert rounded.bias.dtype == jnp.bfloat16
    # rounded by 2**-8 at most as it is read, and again with its scale
    np.testing.assert_allclose(rounded.bias[...].astype(jnp.float32), wanted, rtol=2**-7)


@pytest.mark.reference
def test_the_original_adds_biases_so(biased, original, transformers):
    import torch

    folder, text, _ = biased
    for change in (lambda _: None, as_autobitlinear):
        change(folder)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype="float32"
        ).eval()
        with torch.no_grad():
            out = theirs(torch.from_numpy(text)[None], use_cache=False)
        ours, _ = jaxllm.load(folder, dtype="float32")
        assert distance(logits_of(ours, text), out.logits[0].numpy()) < TOLERANCE
