"""Quantised checkpoints of every layout: the model of their dequantised twin, and refusals."""

import dataclasses
import json
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantised_checkpoints as made
import safetensors.numpy
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from tiny_models import logits

import jaxllm
from jaxllm import lora, train
from jaxllm.checkpoint import packed_weights as stored_weights
from jaxllm.checkpoint.hf import pack_as_stored
from jaxllm.checkpoint.packed_weights import fault
from jaxllm.checkpoint.quantization_config import Form
from jaxllm.config import Runtime
from jaxllm.quantize import PackedLinear, packed_weights
from pallas_kernels.quantize import quantize

TOKENS = jnp.asarray([[5, 9, 2, 60, 31, 7, 7, 0]], jnp.int32)


def edit(folder: Path, **changes) -> None:
    """Changes the quantization_config."""
    file = folder / "config.json"
    content = json.loads(file.read_text())
    content["quantization_config"] |= changes
    file.write_text(json.dumps(content))


def rewrite(folder: Path, change) -> None:
    """The tensors after `change(tensors)` has altered the dictionary."""
    file = folder / "model.safetensors"
    tensors = made.read_tensors(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file)


def assert_same_model(packed: Path, plain: Path) -> jaxllm.Transformer:
    model, _ = jaxllm.load(packed, dtype="float32")
    twin, _ = jaxllm.load(plain, dtype="float32")
    ours, theirs = logits(model, TOKENS), logits(twin, TOKENS)
    # Sums of 96 terms; where scales are applied after them, in another order: 4e-6 was measured
    np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max())
    for i, block in enumerate(model.layers):
        for module in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"):
            owner, name = module.split(".")
            mine = getattr(getattr(block, owner), name)
            other = getattr(getattr(twin.layers[i], owner), name)
            assert type(mine) is PackedLinear
            numbers = mine.dequantize()
            np.testing.assert_allclose(numbers, other.weight[...], rtol=3e-7, err_msg=module)
    assert type(model.lm_head) is type(twin.lm_head)
    return model


@pytest.mark.parametrize("name", made.LAYOUTS)
def test_a_packed_checkpoint_is_its_dequantised_twin(tmp_path, name):
    model = assert_same_model(*made.write(tmp_path, name))
    packed = model.layers[0].mlp.down_proj.packed
    assert packed.shape == (64, 96)
    zeros = "zero" in name or "asym" in name or name == "awq"
    assert (packed.zero is not None) == zeros


@pytest.mark.parametrize("name", made.LAYOUTS)
def test_of_shapes_alone_it_is_packed_likewise(tmp_path, name):
    packed, _ = made.write(tmp_path, name)
    model, _ = jaxllm.load(packed, dtype="float32")
    config = model.config

    def build():
        model = jaxllm.Transformer(config, Runtime("float32"), rngs=nnx.Rngs(0))
        pack_as_stored(model, packed)
        return model

    found, wanted = packed_weights(nnx.eval_shape(build)), packed_weights(model)
    assert found.keys() == wanted.keys()
    for path, weight in wanted.items():
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype), weight)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), found[path]) == shapes, path


@pytest.mark.parametrize(
    "name", ["int4 zero", "fp8 tensor", "fp8 block", "nvfp4", "gptq asym order"]
)
def test_fused_tensors_are_cut_into_their_layers(tmp_path, name):
    config = dataclasses.replace(made.LLAMA, model_type="phi3")
    assert_same_model(*made.write(tmp_path, name, config, fused=True))


def test_the_comparison_can_fail(tmp_path):
    packed, plain = made.write(tmp_path, "int4")

    def change(tensors):
        name = "model.layers.1.self_attn.v_proj.weight_packed"
        tensors[name] = tensors[name].copy()
        tensors[name][3, 2] ^= 1 << 20

    rewrite(packed, change)
    with pytest.raises(AssertionError):
        assert_same_model(packed, plain)


def test_modelopts_own_file_says_the_same(tmp_path):
    packed, plain = made.write(tmp_path, "modelopt-nvfp4")
    file = packed / "config.json"
    content = json.loads(file.read_text())
    del content["quantization_config"]
    file.write_text(json.dumps(content))
    said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    said["exclude_modules"] = ["lm_head"]
    hf_quant = {"producer": {"name": "modelopt", "version": "0.33"}, "quantization": said}
    (packed / "hf_quant_config.json").write_text(json.dumps(hf_quant))
    rewrite(
        packed,
        lambda tensors: tensors.update(
            {f"model.layers.0.self_attn.{x}_proj.{x}_scale": np.ones((), np.float32) for x in "kv"}
        ),
    )
    assert_same_model(packed, plain)


@pytest.mark.parametrize("scheme", ["int8", "nvfp4", "awq"])
def test_layers_that_are_not_packed(tmp_path, scheme):
    """By a pattern, by a name, by a part of a name: as each method has it."""
    packed, plain = made.write(tmp_path, scheme)
    kept = "model.layers.1.mlp.down_proj"
    if scheme == "awq":
        edit(packed, modules_to_not_convert=["layers.1.mlp.down_proj"])
    else:
        edit(
            packed, ignore=["lm_head", r"re:.*layers\.1\.mlp\.down.*" if scheme == "int8" else kept]
        )
    twin = made.read_tensors(plain / "model.safetensors")

    def change(tensors):
        for name in [name for name in tensors if name.startswith(kept)]:
            del tensors[name]
        tensors[f"{kept}.weight"] = twin[f"{kept}.weight"]

    rewrite(packed, change)
    model, _ = jaxllm.load(packed, dtype="float32")
    other, _ = jaxllm.load(plain, dtype="float32")
    assert type(model.layers[1].mlp.down_proj) is type(other.lm_head)
    assert type(model.layers[0].mlp.down_proj) is PackedLinear
    theirs = logits(other, TOKENS)
    np.testing.assert_allclose(logits(model, TOKENS), theirs, atol=2e-5 * np.abs(theirs).max())


def test_greedy_tokens_and_a_dtype_of_its_own(tmp_path):
    packed, plain = made.write(tmp_path, "gptq asym")
    both = [jaxllm.load(folder, dtype="float32")[0] for folder in (packed, plain)]
    prompts = [[5, 9, 2], [7] * 11]
    found = [jaxllm.generate(model, None, prompts, max_new_tokens=12).tokens for model in both]
    assert found[0] == found[1]
    half, _ = jaxllm.load(packed, dtype="bfloat16")
    module = half.layers[0].self_attn.q_proj
    assert (module.dtype, module.packed.scale.dtype) == ("bfloat16", jnp.float16)
    assert half.embed_tokens.weight[...].dtype == jnp.bfloat16
    assert logits(half, TOKENS).dtype == np.float32


def test_arrays_go_where_sharding_says(tmp_path):
    packed, _ = made.write(tmp_path, "int4 zero")
    device = jax.devices()[0]
    asked = {}

    def sharding(path, shape):
        asked[path] = shape
        return jax.sharding.SingleDeviceSharding(device)

    model, _ = jaxllm.load(packed, dtype="float32", sharding=sharding)
    assert all(x.committed for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    at = "layers.0.mlp.down_proj."
    assert {path: asked[path] for path in asked if path.startswith(at)} == {
        f"{at}codes": (64, 48),
        f"{at}scale": (3, 64),
        f"{at}zero": (3, 64),
    }
    plain, _ = jaxllm.load(packed, dtype="float32")
    np.testing.assert_array_equal(logits(model, TOKENS), logits(plain, TOKENS))


@pytest.mark.parametrize(("kind", "part"), [("packed", "codes"), ("plain", "weight")])
def test_what_cannot_spread_an_array_is_refused(tmp_path, kind, part):
    made.write(tmp_path, "int4")
    path = f"layers.0.mlp.down_proj.{part}"
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    for place, said in (
        (NamedSharding(mesh, jax.P()), f"{path} cannot be spread as .* axes of type Auto"),
        (jax.P(), f"the sharding of {path} must be a jax.sharding.Sharding, got"),
    ):
        with pytest.raises(ValueError, match=said):
            jaxllm.load(tmp_path / kind, sharding=lambda p, _, to=place: to if p == path else None)


@pytest.mark.slow
def test_progress_counts_packed_tensors_and_nothing_is_held_twice(tmp_path, monkeypatch):
    config = dataclasses.replace(
        made.LLAMA, hidden_size=256, intermediate_size=1024, num_hidden_layers=12, layer_types=()
    )
    packed, _ = made.write(tmp_path, "gptq", config)
    size = (packed / "model.safetensors").stat().st_size
    said, held, load = [], [], stored_weights.load

    def beside():
        """The model's bytes, and the most that was there beside what stays."""
        tracemalloc.start()
        model, _ = jaxllm.load(
            packed, dtype="float32", progress=lambda done, total: said.append((done, total))
        )
        held.clear()
        left, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return sum(x.nbytes for x in jax.tree.leaves(jaxllm.flatten(model).arrays)), peak - left

    kept, most = beside()
    assert said[-1][0] == said[-1][1]
    assert 0.95 * size < said[-1][1] <= size
    assert [done for done, _ in said] == sorted(done for done, _ in said)
    # A few of 84 modules as they are stored and turned: a fifth was measured
    assert most < 0.4 * kept

    def holding(*args):
        held.append(load(*args))
        return held[-1]

    monkeypatch.setattr(stored_weights, "load", holding)
    kept, most = beside()
    assert most > 0.4 * kept  # the twin


def test_a_module_is_reordered_without_twice_its_bytes(monkeypatch):
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 16, (2048, 1024), np.uint8)
    codes = numbers[:, ::2] | numbers[:, 1::2] << 4
    order = rng.permutation(1024)

    def peak():
        given = codes.copy()
        tracemalloc.start()
        stored_weights._reorder(given, order)
        _, size = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        np.testing.assert_array_equal(given & 15, numbers[:, order[::2]])
        np.testing.assert_array_equal(given >> 4, numbers[:, order[1::2]])
        return size

    assert peak() < codes.nbytes
    monkeypatch.setattr(stored_weights, "_ROWS", len(codes))
    assert peak() > 3 * codes.nbytes  # the twin


# ----------------------------------------------------------------------------------- bad input

DOWN = "model.layers.0.mlp.down_proj."


def set_tensor(last, value):
    """A change of down_proj's tensor of layer 0: another one, or None for no such tensor."""

    def change(tensors):
        old = tensors.pop(DOWN + last, None)
        new = value(old) if callable(value) else value
        if new is not None:
            tensors[DOWN + last] = new

    return change


def with_number(index, number):
    def change(array):
        array = array.copy()
        array[index] = number
        return array

    return change


BAD_TENSORS = {
    "no scale": ("int8", "weight_scale", None, "down_proj: has no weight_scale"),
    "scale of another shape": (
        "int8",
        "weight_scale",
        np.ones((64, 2), np.float32),
        r"down_proj: weight_scale is F32 \[64, 2\], where its config asks for .* \[64, 1\]",
    ),
    "codes of another dtype": (
        "int8",
        "weight",
        np.ones((64, 96), np.float32),
        r"down_proj: weight is F32 \[64, 96\], where its config asks for I8 \[64, 96\]",
    ),
    "zero points that nobody spoke of": (
        "int4",
        "weight_zero_point",
        np.zeros((8, 3), np.int32),
        "down_proj: has weight_zero_point, which its config has no place for",
    ),
    "another shape said": (
        "int4",
        "weight_shape",
        np.array([64, 90]),
        r"down_proj: weight_shape says \[64, 90\], the model has \[64, 96\]",
    ),
    "a scale of zero": (
        "int4",
        "weight_scale",
        with_number((3, 1), 0),
        "down_proj: 1 of 192 numbers of scale are zero, NaN or infinite",
    ),
    "a scale that is NaN": (
        "fp8 channel",
        "weight_scale",
        with_number((3, 0), np.nan),
        "down_proj: 1 of 64 numbers of row_scale are zero, NaN or infinite",
    ),
    "a block scale of zero": (
        "nvfp4",
        "weight_scale",
        with_number((0, 0), 0),
        "down_proj: 1 of 384 numbers of scale are zero, negative, NaN or infinite",
    ),
    "an E8M0 that is NaN": (
        "mxfp4",
        "weight_scale",
        with_number((0, 0), 255),
        "down_proj: 1 of 192 numbers of scale are zero, negative, NaN or infinite",
    ),
    "a global scale of zero": (
        "nvfp4",
        "weight_global_scale",
        np.zeros(1, np.float32),
        "down_proj: weight_global_scale is 0.0, not a positive number",
    ),
    "a tensor's scale that is infinite": (
        "modelopt-nvfp4",
        "weight_scale_2",
        np.array(np.inf, np.float32),
        "down_proj: 64 of 64 numbers of row_scale are zero, negative, NaN or infinite",
    ),
    "zero points of a symmetric GPTQ": (
        "gptq",
        "qzeros",
        np.zeros((3, 8), np.int32),
        "down_proj: has zero points, which its config says it has not",
    ),
    "words turned the other way": (
        "gptq",
        "qweight",
        np.zeros((96, 8), np.int32),
        r"down_proj: qweight is I32 \[96, 8\], where its config asks for I32 \[12, 64\]",
    ),
    "not packed after all": (
        "awq",
        "qweight",
        None,
        "down_proj: has no qweight",
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_contradict_their_config(tmp_path, name):
    layout, last, value, sentence = BAD_TENSORS[name]
    packed, _ = made.write(tmp_path, layout)
    rewrite(packed, set_tensor(last, value))
    with pytest.raises(ValueError, match=f"^[^\n]*{sentence}[^\n]*$"):
        jaxllm.load(packed, dtype="float32")


def test_inputs_of_a_group_that_lie_apart(tmp_path):
    """Joined or not, also in decoding, where a norm stands before the product."""
    packed, plain = made.write(tmp_path, "gptq asym order")
    model, twin = (jaxllm.load(folder, dtype="float32")[0] for folder in (packed, plain))
    prompts = [[5, 9, 2], [7] * 11]
    want = jaxllm.generate(twin, None, prompts, max_new_tokens=12)
    for prepare in (lambda model: None, jaxllm.fuse):
        prepare(model)
        found = jaxllm.generate(model, None, prompts, max_new_tokens=12)
        assert found.tokens == want.tokens
    attention = model.layers[0].self_attn
    np.testing.assert_array_equal(
        np.sort(attention.qkv_proj.order[...]), np.arange(64, dtype=np.int32)
    )
    with pytest.raises(NotImplementedError, match=r"^save: the inputs of .*_proj have an order of"):
        jaxllm.save(model, None, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_orders_that_differ_are_not_joined(tmp_path):
    packed, plain = made.write(tmp_path, "gptq asym order")
    name = "model.layers.0.self_attn.k_proj.g_idx"
    rewrite(packed, lambda tensors: tensors.update({name: np.roll(tensors[name], 1)}))
    model, _ = jaxllm.load(packed, dtype="float32")
    twin, _ = jaxllm.load(plain, dtype="float32")
    before = logits(model, TOKENS)
    assert np.abs(before - logits(twin, TOKENS)).max() > 0.01  # another order is another model
    jaxllm.fuse(model)
    assert model.layers[0].self_attn.qkv_proj is None
    assert model.layers[1].self_attn.qkv_proj is not None
    np.testing.assert_allclose(logits(model, TOKENS), before, atol=2e-5 * np.abs(before).max())


@pytest.mark.slow
def test_a_head_with_an_order_and_an_adapter_above_one(tmp_path):
    packed, plain = made.write(tmp_path, "gptq asym order")
    model, twin = (jaxllm.load(folder, dtype="float32")[0] for folder in (packed, plain))
    order = np.random.default_rng(0).permutation(64).astype(np.int32)
    head = quantize(twin.lm_head.weight[...][:, order], "int4", 32)
    model.lm_head = PackedLinear(head, order=jnp.asarray(order), dtype="float32")
    twin.lm_head.weight.set_value(model.lm_head.dequantize())
    batch = {"tokens": TOKENS, "targets": TOKENS}
    adapters = nnx.DiffState(0, lambda path, _: lora.is_adapter(".".join(map(str, path))))
    found = []
    for each in (model, twin):
        lora.add_adapters(each, rank=2, targets=["down_proj", "q_proj"], rngs=nnx.Rngs(0))
        for block in each.layers:
            for module in (block.mlp.down_proj, block.self_attn.q_proj):
                b = module.lora_b
                b.set_value(jax.random.normal(jax.random.key(1), b.shape, b.dtype) / 8)
        loss = nnx.value_and_grad(lambda m: train.token_loss(m, batch)[0], argnums=adapters)
        found.append(nnx.jit(loss)(each))
    assert len(jax.tree.leaves(found[0])) == 1 + 2 * 2 * 2
    for ours, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        largest = np.abs(theirs).max()
        assert largest > 0
        # Sums of float32 in another order: 1e-6 was measured
        np.testing.assert_allclose(ours, theirs, atol=5e-6 * largest)
    model.lm_head.order.set_value(jnp.roll(jnp.asarray(order), 1))
    assert abs(float(train.token_loss(model, batch)[0] - found[1][0])) > 0.1


def test_groups_of_other_sizes(tmp_path):
    packed, _ = made.write(tmp_path, "gptq")
    groups = np.arange(96, dtype=np.int32) // 32
    groups[40] = 2
    rewrite(packed, set_tensor("g_idx", groups))
    edit(packed, desc_act=True)
    sentence = r"^[^\n]*down_proj: g_idx puts 31 inputs into group 1, [^\n]* 3 groups of 32$"
    with pytest.raises(ValueError, match=sentence):
        jaxllm.load(packed, dtype="float32")


def test_biases_that_the_model_has_not(tmp_path):
    """AutoGPTQ writes them; of zeros they say nothing."""
    packed, plain = made.write(tmp_path, "gptq")
    rewrite(packed, set_tensor("bias", np.zeros(64, np.float16)))
    assert_same_model(packed, plain)
    rewrite(packed, set_tensor("bias", np.full(64, 1e-3, np.float16)))
    with pytest.raises(ValueError, match="1 surplus: model.layers.0.mlp.down_proj.bias"):
        jaxllm.load(packed, dtype="float32")


def test_biases_that_the_model_has(tmp_path):
    config = dataclasses.replace(made.LLAMA, model_type="qwen2", qkv_bias=True)
    packed, plain = made.write(tmp_path, "gptq", config)
    sizes = {"q": 64, "k": 32, "v": 32}
    biases = {
        f"model.layers.{i}.self_attn.{x}_proj.bias": np.linspace(-1, 1, size, dtype=np.float32)
        for i in range(2)
        for x, size in sizes.items()
    }
    for folder in (packed, plain):
        rewrite(folder, lambda tensors: tensors.update(biases))
    model = assert_same_model(packed, plain)
    assert model.layers[0].self_attn.k_proj.bias.shape == (32,)


def test_an_order_of_other_inputs():
    packed = jax.eval_shape(lambda: quantize(jnp.zeros((8, 64)), "int4", 32))
    for order in (jnp.arange(32), jnp.arange(64, dtype=jnp.uint32)):
        with pytest.raises(
            ValueError, match=r"order is u?int32 \[\d+\], where .* is int32 \[64\]$"
        ):
            PackedLinear(packed, order=order)


@pytest.mark.parametrize("ordered", [True, False])
def test_desc_act_in_place(tmp_path, ordered):
    """Groups whose inputs lie side by side are what they are, whatever order they were made in."""
    packed, plain = made.write(tmp_path, "gptq")
    edit(packed, desc_act=True, static_groups=True)
    if not ordered:
        rewrite(packed, set_tensor("g_idx", None))
    assert_same_model(packed, plain)


def test_a_config_that_speaks_of_other_modules(tmp_path):
    packed, _ = made.write(tmp_path, "int4")
    edit(packed, ignore=["lm_head", "model.layers.0.mlp.down_proj"])
    with pytest.raises(ValueError, match=r"down_proj has weight_packed, weight_scale.*not packed"):
        jaxllm.load(packed, dtype="float32")
    edit(packed, ignore=[])
    with pytest.raises(ValueError, match="in 1 module: lm_head: has no weight_packed"):
        jaxllm.load(packed, dtype="float32")


def test_groups_that_do_not_divide(tmp_path):
    packed, _ = made.write(tmp_path, "gptq")
    edit(packed, group_size=40)
    with pytest.raises(ValueError, match="64 inputs do not divide into groups of 40"):
        jaxllm.load(packed, dtype="float32")


@pytest.mark.parametrize(
    ("form", "shape", "phrase"),
    [
        (Form("gptq", "int4", "group", 4), (8, 12), "8 outputs and 12 inputs are not packed eight"),
        (Form("awq", "int4", "group", 4), (12, 8), "12 outputs and 8 inputs are not packed eight"),
        (Form("words", "int4", "channel"), (8, 7), "7 inputs are not packed two to a byte"),
        (Form("autobitlinear", "ternary", "tensor"), (8, 6), "8 outputs and 6 inputs are not pack"),
    ],
)
def test_sizes_that_are_not_packed(form, shape, phrase):
    """No tensor is asked for, so that none of the wrong size can be taken."""
    assert str(fault(form, shape, {})).startswith(phrase)


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(tmp_path, monkeypatch):
    packed, _ = made.write(tmp_path, "int8")
    size = (packed / "model.safetensors").stat().st_size
    monkeypatch.setattr(jaxllm.checkpoint.placement.memory, "free_bytes", lambda device: size // 2)
    with pytest.raises(ValueError, match="the parameters take .* kB are free"):
        jaxllm.load(packed, dtype="float32", runtime=Runtime())
