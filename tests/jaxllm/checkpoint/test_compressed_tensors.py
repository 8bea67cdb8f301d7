"""Models with packed weights as files: back again, and as the compressed-tensors package has it."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import quantised_checkpoints as made
from flax import nnx
from tiny_models import build, logits

import jaxllm
from jaxllm.checkpoint import compressed_tensors, hf
from jaxllm.config import ModelConfig, Runtime
from jaxllm.quantize import PackedLinear, packed_weights, quantize
from pallas_kernels.quantize import quantize as pack

TOKENS = jnp.asarray([[5, 9, 2, 60, 31, 7, 7, 0]], jnp.int32)
# Scheme and group size; what of it a checkpoint says
SCHEMES = (
    ("int8", None),
    ("int8", 32),
    ("int4", 32),
    ("fp8", None),
    ("nvfp4", None),
    ("mxfp4", None),
    ("mxfp8", None),
)


def model_of(
    scheme: str, size: int | None = None, config: ModelConfig = made.LLAMA, **options
) -> jaxllm.Transformer:
    model = build(config, Runtime(dtype="float32"))
    quantize(model, scheme, size, **options)
    return model


def arrays(model) -> dict[str, np.ndarray]:
    state = jaxllm.flatten(model)
    return dict(enumerate(map(np.asarray, state.arrays)))


def assert_equal(ours, theirs, *, exact: bool = True) -> None:
    ours, theirs = arrays(ours), arrays(theirs)
    assert ours.keys() == theirs.keys()
    for key, x in ours.items():
        assert x.dtype == theirs[key].dtype
        if exact or x.dtype != np.float32:
            np.testing.assert_array_equal(x, theirs[key])
        else:  # nvfp4's tensor scale was stored as its reciprocal
            np.testing.assert_allclose(x, theirs[key], rtol=1.2e-7)


@pytest.mark.parametrize(("scheme", "size"), SCHEMES)
def test_what_is_saved_comes_back_bit_for_bit(tmp_path, scheme, size):
    model = model_of(scheme, size)
    jaxllm.save(model, None, tmp_path)
    again, _ = jaxllm.load(tmp_path, dtype="float32")
    assert_equal(again, model, exact=scheme != "nvfp4")
    jaxllm.save(again, None, tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        if scheme != "nvfp4" or name.endswith(".json"):
            assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.parametrize("name", ["int4 zero", "gptq asym", "awq", "fp8 tensor", "fp8 block"])
def test_other_layouts_become_compressed_tensors(tmp_path, name):
    packed, _ = made.write(tmp_path / "made", name)
    model, _ = jaxllm.load(packed, dtype="float32")
    jaxllm.save(model, None, tmp_path / "saved")
    said = json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "compressed-tensors"
    assert said["ignore"] == ["lm_head"]
    again, _ = jaxllm.load(tmp_path / "saved", dtype="float32")
    assert_equal(again, model)


def test_several_kinds_and_layers_that_stay(tmp_path):
    """The head in int8, layers of two group sizes, and one that is not packed."""
    config = dataclasses.replace(made.LLAMA, intermediate_size=80)  # groups of 64, and of 80
    model = model_of("int4", None, config, head="int8", keep=("layers.1.mlp.up_proj",))
    jaxllm.save(model, None, tmp_path, max_shard_size=20_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert said["ignore"] == ["model.layers.1.mlp.up_proj"]
    groups = said["config_groups"].values()
    kinds = {(group["weights"]["num_bits"], group["weights"]["group_size"]) for group in groups}
    assert kinds == {(8, None), (4, 64), (4, 80)}
    again, _ = jaxllm.load(tmp_path, dtype="float32")
    assert type(again.lm_head) is PackedLinear
    assert type(again.layers[1].mlp.up_proj) is not PackedLinear
    np.testing.assert_array_equal(logits(again, TOKENS), logits(model, TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_fused_families_and_fused_models(tmp_path, scheme):
    """Three parts that a file has as one tensor; and one module that a file has as three."""
    for model_type in ("phi3", "llama"):
        config = dataclasses.replace(made.LLAMA, model_type=model_type)
        model = model_of(scheme, None, config)
        jaxllm.save(model, None, tmp_path / model_type)
        again, _ = jaxllm.load(tmp_path / model_type, dtype="float32")
        assert_equal(again, model)
        jaxllm.fuse(model)
        jaxllm.save(model, None, tmp_path / "fused")
        names = ("config.json", "model.safetensors")
        for name in names:
            here, there = tmp_path / "fused" / name, tmp_path / model_type / name
            assert here.read_bytes() == there.read_bytes()


def test_zero_points_of_one_part_alone(tmp_path):
    config = dataclasses.replace(made.LLAMA, model_type="phi3")
    model = model_of("int4", 32, config)
    weight = jnp.asarray(np.random.default_rng(0).uniform(0, 1, (32, 64)), jnp.float32)
    attention = model.layers[0].self_attn
    attention.k_proj = PackedLinear(
        pack(weight, "int4", 32, zero_points=True), dtype="float32", implementation="auto"
    )
    jaxllm.save(model, None, tmp_path)
    again, _ = jaxllm.load(tmp_path, dtype="float32")
    np.testing.assert_array_equal(logits(again, TOKENS), logits(model, TOKENS))


def test_a_table_for_embedding_and_head(tmp_path):
    """The embedding is stored as it is looked up, and the head with its codes."""
    tied = dataclasses.replace(made.LLAMA, tie_word_embeddings=True)
    model = model_of("int4", 32, tied, head="int8")
    jaxllm.save(model, None, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["quantization_config"]["ignore"] == []
    again, _ = jaxllm.load(tmp_path, dtype="float32")
    table = model.embed_tokens
    np.testing.assert_array_equal(again.embed_tokens.weight[...], table.dequantize())
    np.testing.assert_array_equal(again.lm_head.packed.codes, table.packed.codes)
    # XLA sums in another order where the table is another array
    np.testing.assert_allclose(logits(again, TOKENS), logits(model, TOKENS), atol=1e-5)


def test_a_plain_model_over_a_packed_one(tmp_path):
    """Nothing of what was said of the packed one stays."""
    jaxllm.save(model_of("nvfp4"), None, tmp_path)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    plain = build(made.LLAMA, Runtime(dtype="float32"))
    jaxllm.save(plain, None, tmp_path)
    again, _ = jaxllm.load(tmp_path, dtype="float32")
    assert_equal(again, plain)


@pytest.mark.slow
def test_what_cannot_be_said(tmp_path):
    phi = dataclasses.replace(made.LLAMA, model_type="phi3")
    even = dataclasses.replace(made.LLAMA, vocab_size=64)
    fused = build(phi, Runtime(dtype="float32"))
    jaxllm.fuse(fused)
    quantize(fused, "ternary")
    cases = [
        (fused, r"ternary, and a family of fused projections \(phi3\) cannot be one of BitNet's"),
        (model_of("ternary", config=phi), "proj is ternary, and a family of fused projections"),
        (model_of("ternary", head="int8"), "lm_head is packed beside ternary layers"),
        (model_of("int8", config=even, head="ternary"), "lm_head is ternary, which no checkpoint"),
        (model_of("nvfp4", config=phi), "gate_up_proj is one tensor .* nvfp4 stores one"),
        (model_of("int4", config=phi, keep=("up_proj",)), "gate_up_proj .* only parts are packed"),
    ]
    mixed = model_of("int4", 32, config=phi, keep=("up_proj",))
    quantize(mixed, "int8", keep=list(packed_weights(mixed)))
    cases.append((mixed, "gate_up_proj is one tensor .* parts that are packed in 2 ways"))
    for model, sentence in cases:
        with pytest.raises(NotImplementedError, match=f"^save: [^\n]*{sentence}[^\n]*$"):
            jaxllm.save(model, None, tmp_path / "folder")
        with pytest.raises(NotImplementedError, match=f"^save: [^\n]*{sentence}[^\n]*$"):
            hf.check_packed(nnx.eval_shape(lambda model: model, model))
        assert not (tmp_path / "folder").exists()


def test_a_tensor_is_made_when_its_turn_comes(tmp_path, monkeypatch):
    model = model_of("int4", 32)
    made_of, written = [], []
    tensor, write = compressed_tensors.tensor, hf.write

    def recorded(name, packed, form):
        made_of.append(name)
        return tensor(name, packed, form)

    def writing(file, sources):
        assert not made_of
        written.extend(source.name for source in sources)
        return write(file, sources)

    monkeypatch.setattr(compressed_tensors, "tensor", recorded)
    monkeypatch.setattr(hf, "write", writing)
    jaxllm.save(model, None, tmp_path)
    assert len(made_of) == len([name for name in written if "_proj.weight_" in name]) == 3 * 14


# ----------------------------------------------------------------------------- the reference


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(("scheme", "size"), SCHEMES)
def test_transformers_reads_what_is_saved(tmp_path, transformers, scheme, size):
    pytest.importorskip("compressed_tensors")
    import torch

    model = model_of(scheme, size)
    jaxllm.save(model, None, tmp_path)
    # The package gives numbers of four bits and of MX in bfloat16: MX is exact there
    half = scheme in ("nvfp4", "mxfp4", "mxfp8")
    whole = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.bfloat16 if half else torch.float32,
        **({"quantization_config": whole} if half else {}),
    )
    if half:  # what is not packed was rounded too
        theirs = theirs.float()
        state = {key: torch.from_numpy(x) for key, x in plain(model)}
        assert not theirs.load_state_dict(state, strict=False).unexpected_keys
    with torch.no_grad():
        expected = theirs(torch.tensor(np.asarray(TOKENS))).logits.float().numpy()
    ours = logits(model, TOKENS)
    near = 0.02 if scheme == "nvfp4" else 1e-4
    far = np.abs(logits(build(made.LLAMA, Runtime(dtype="float32")), TOKENS) - expected).max()
    np.testing.assert_allclose(ours, expected, atol=near * np.abs(expected).max())
    assert far > 2 * near * np.abs(expected).max()  # the packing is felt


@pytest.mark.reference
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "mxfp8"])
def test_transformers_needs_bfloat16_for_numbers_that_it_unpacks_to_it(
    tmp_path, transformers, scheme
):
    """As `save` says."""
    pytest.importorskip("compressed_tensors")
    import torch

    model = model_of(scheme)
    jaxllm.save(model, None, tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens, ours = torch.tensor(np.asarray(TOKENS)), logits(model, TOKENS)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="to have the same dtype"):
            load(tmp_path)(tokens)
        theirs = load(tmp_path, dtype=torch.bfloat16)(tokens).logits.float().numpy()
    np.testing.assert_allclose(ours, theirs, atol=0.05 * np.abs(ours).max())  # 3 % at most


def plain(model):
    """The weights that are not packed, by the names of a file."""
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[-1] == "weight":
            name = ".".join(map(str, path))
            key = name if name == "lm_head.weight" else f"model.{name}"
            yield key, np.array(parameter[...], np.float32)


THEIRS = [name for name in made.LAYOUTS if not name.startswith(("modelopt", "gptq", "awq"))]


@pytest.mark.reference
@pytest.mark.parametrize("name", THEIRS)
def test_the_package_unpacks_made_up_tensors_alike(name):
    """That the made-up checkpoints are what the package says they are."""
    pytest.importorskip("compressed_tensors")
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    layout = made.Layout(name)
    weight = layout.weight(96, 64)
    said = layout.config()
    scheme = QuantizationScheme(**said["config_groups"]["group_0"])
    kinds = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}

    def tensor(x):
        if x.dtype.name in kinds:
            bits = {2: np.int16, 1: np.uint8}[x.dtype.itemsize]
            return torch.from_numpy(x.view(bits)).view(kinds[x.dtype.name])
        return torch.from_numpy(x)

    state = {key: tensor(x) for key, x in weight.tensors.items() if not key.startswith("input")}
    compressor = BaseCompressor.get_value_from_registry(said["format"])
    found = compressor.decompress(state, scheme)["weight"].double().numpy()
    # They round to the scale's dtype
    np.testing.assert_allclose(found, weight.values, rtol=2.0**-8)
