import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kernels import interpreted
from numerics import assert_as_accurate
from safetensors.numpy import load_file
from tiny_models import ALL, SLIDING, TINY, build, logits

import jaxllm
from jaxllm import fusion, layers, lora, train
from jaxllm.config import ModelConfig, Runtime
from jaxllm.layers import Linear
from jaxllm.ops.fused_linear import PACKED_ROWS
from jaxllm.quantize import PackedLinear
from pallas_kernels.quantize import quantize as pack

CONFIGS = {
    "plain": TINY,
    "biases": dataclasses.replace(TINY, qkv_bias=True, mlp_bias=True),
    "sliding": SLIDING,
    "all": ALL,
}


def tokens(config: ModelConfig, *shape: int) -> jax.Array:
    shape = shape or (2, 9)
    return jax.random.randint(jax.random.key(2), shape, 0, config.vocab_size, jnp.int32)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_fused_model_computes_the_same(name):
    model = build(CONFIGS[name])
    before = logits(model, tokens(CONFIGS[name]))
    parts = train.parameters(model)
    fusion.fuse(model)
    after = train.parameters(model)
    # Sums of float32 in another order at most
    np.testing.assert_allclose(logits(model, tokens(CONFIGS[name])), before, atol=2e-5)
    assert not any(path.split(".")[-2] in ("q_proj", "up_proj") for path in after)
    assert "layers.0.self_attn.qkv_proj.weight" in after
    assert sum(x.size for x in after.values()) == sum(x.size for x in parts.values())
    other = build(CONFIGS[name])
    weight = after["layers.0.mlp.gate_up_proj.weight"]
    mlp: Any = other.layers[0].mlp
    np.testing.assert_array_equal(
        weight, jnp.concatenate([mlp.gate_proj.weight[...], mlp.up_proj.weight[...]])
    )


def kinds(model: Any) -> set[str]:
    """What the projections of the layers are called, without the layers' numbers."""
    paths = train.parameters(model)
    return {path.split(".")[-2] for path in paths if "_proj" in path}


def test_what_is_more_than_a_linear_is_left_alone():
    model = build(TINY)
    first: Any = model.layers[0].self_attn
    lora.add_adapters(model, rank=2, targets=["layers.0.self_attn.k_proj"], rngs=nnx.Rngs(3))
    second: Any = model.layers[1].self_attn
    second.v_proj = Linear(*second.v_proj.weight.shape[::-1], bias=True, rngs=nnx.Rngs(4))
    fusion.fuse(model)
    assert first.qkv_proj is None
    assert second.qkv_proj is None
    assert all(layer.mlp.gate_up_proj is not None for layer in model.layers)


@pytest.mark.parametrize("scheme", ["int8", "int4", "nvfp4", "ternary"])
def test_packed_weights_are_joined(scheme):
    config = dataclasses.replace(CONFIGS["biases"], hidden_size=32, intermediate_size=64)
    model = build(config)
    jaxllm.quantize(model, scheme)
    before = logits(model, tokens(config))
    fusion.fuse(model)
    assert {"qkv_proj", "gate_up_proj"} < kinds(model)
    assert not {"q_proj", "v_proj", "up_proj"} & kinds(model)
    # Sums of float32 in another order at most
    np.testing.assert_allclose(logits(model, tokens(config)), before, atol=2e-5)


@pytest.mark.parametrize(
    ("most", "other"),
    [
        (("int8", None), ("fp8", None)),
        (("int4", 16), ("int4", 8)),
        (("int4", 16), ("int4", 16, "bfloat16")),
        (("int4", 16), None),
    ],
)
def test_packed_weights_that_differ_are_not_joined(most, other):
    """In scheme, groups or dtype of scales; nor are packed ones with one that is not."""
    config = dataclasses.replace(TINY, hidden_size=32, intermediate_size=64)
    model = build(config)
    jaxllm.quantize(model, *most, keep="layers.0.*.k_proj")
    layer: Any = model.layers[0]
    if other is not None:
        scheme, size, *dtype = other
        weight = layer.self_attn.k_proj.weight[...].astype(*dtype or ["float32"])
        layer.self_attn.k_proj = PackedLinear(pack(weight, scheme, size), dtype="float32")
    before = logits(model, tokens(config))
    fusion.fuse(model)
    assert layer.self_attn.qkv_proj is None
    assert layer.mlp.gate_up_proj is not None
    # Sums of float32 in another order at most
    np.testing.assert_allclose(logits(model, tokens(config)), before, atol=2e-5)


def test_a_ternary_projection_behind_joined_ones_stays_ternary():
    """Its weight is no other's: the layer decodes module by module."""
    names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    config = dataclasses.replace(TINY, bit_linear=True, modules_to_not_convert=names)
    model = build(config)
    before = jaxllm.generate(model, None, [[1, 2]], max_new_tokens=4).tokens
    fusion.fuse(model)
    assert model.layers[0].self_attn.qkv_proj is not None
    assert "another kind" in str(model.layers[0].why_not_fused(1))
    assert jaxllm.generate(model, None, [[1, 2]], max_new_tokens=4).tokens == before


def test_what_is_no_module_is_refused():
    with pytest.raises(ValueError, match="^fuse: model must be a Flax module, not dict$"):
        jaxllm.fuse({})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="^flatten: model must be a Transformer, not dict$"):
        jaxllm.flatten({})  # pyright: ignore[reportArgumentType]


def test_fusing_twice_is_fusing_once():
    model = build(TINY)
    fusion.fuse(model)
    before = train.parameters(model)
    fusion.fuse(model)
    after = train.parameters(model)
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in after)


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_with_a_fused_model_is_decoding(name):
    """Also of few rows, where a layer takes another op."""
    config, steps = CONFIGS[name], 3
    found = []
    for prepare in (lambda model: None, fusion.fuse):
        prepare(model := build(config))
        weights = jaxllm.flatten(model)
        cache = jaxllm.KVCache.create(config, 2, 16, jnp.float32)
        logits, cache = jaxllm.prefill(weights, tokens(config), jnp.asarray([9, 7]), cache)
        rows = [logits]
        for step in range(steps):
            ids = jnp.asarray([step, 5 + step])
            logits, cache = jaxllm.decode_step(weights, ids, cache)
            rows.append(logits)
        found.append(np.stack(rows))
    # Sums of float32 in another order at most
    np.testing.assert_allclose(*found, atol=2e-5)


# Wide enough for the kernels of `ops.fused_linear`
WIDE = dataclasses.replace(
    TINY,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=1,
    head_dim=32,
    qkv_bias=True,
    layer_types=(),
)


@pytest.mark.parametrize(
    ("rows", "changes"), [(1, {}), (2, {}), (2, {"zero_centered_norm": True}), (16, {})]
)
def test_a_fused_model_decodes_with_its_kernels(rows, changes):
    """So do the 16 tokens of the prompts, of one or two rows without a place in the cache."""
    config = dataclasses.replace(WIDE, **changes)
    ids = tokens(config, rows, 16 // rows)
    lengths = jnp.full(rows, ids.shape[1], jnp.int32).at[0].set(1)

    def steps(weights, ids, cache):
        logits, cache = jaxllm.prefill(weights, ids, lengths, cache)
        return jnp.stack([logits, jaxllm.decode_step(weights, ids[:, 0], cache)[0]])

    def decoded(dtype, implementation):
        runtime = Runtime(dtype, dtype, implementation={"fused_linear": implementation})
        fusion.fuse(model := build(config, runtime))
        run = interpreted if "interpret" in implementation else lambda f, *args: jax.jit(f)(*args)
        cache = jaxllm.KVCache.create(config, rows, 32, jnp.dtype(dtype))
        return run(steps, jaxllm.flatten(model), ids, cache)

    ours = decoded("bfloat16", "pallas-interpret")
    plain, truth = (decoded(dtype, "xla") for dtype in ("bfloat16", "float32"))
    truth = np.asarray(truth, np.float64)
    # As far as plain is, and a hundredth of the largest number beside it: both round, otherwise
    term = 0.01 * float(np.abs(truth).max()) / (4 * 2**-23)
    assert_as_accurate(ours, plain, truth, largest_term=term)
    with pytest.raises(AssertionError):  # the twin
        assert_as_accurate(np.float64(ours) * 1.05, plain, truth, largest_term=term)


@pytest.mark.parametrize("family", [{}, {"qkv_bias": True, "model_type": "qwen2"}])
def test_a_fused_model_is_saved_as_the_model_it_was(tmp_path, family):
    config = dataclasses.replace(TINY, **family)
    saved = []
    for name, prepare in (("before", lambda model: None), ("after", fusion.fuse)):
        prepare(model := build(config))
        jaxllm.save(model, None, tmp_path / name)
        saved.append(load_file(tmp_path / name / "model.safetensors"))
    before, after = saved
    assert before.keys() == after.keys()
    for tensor, x in before.items():
        np.testing.assert_array_equal(x, after[tensor], err_msg=tensor)


def test_adapters_want_single_projections():
    model = build(TINY)
    fusion.fuse(model)
    with pytest.raises(ValueError, match="^lora: layers.0.mlp.gate_up_proj is several"):
        lora.add_adapters(model, rank=2, rngs=nnx.Rngs(3))


@pytest.mark.parametrize(("scheme", "epilogue"), [("int4", "swiglu"), ("ternary", None)])
def test_the_gate_of_many_rows_is_its_products(monkeypatch, scheme, epilogue):
    """Of packed weights; more rows than are decoded, and the numbers of the two ops."""
    config = dataclasses.replace(WIDE, mlp_bias=True)
    jaxllm.quantize(model := build(config), scheme)
    ids = tokens(config, 2, 1 + PACKED_ROWS // 2)
    before = logits(model, ids)
    fusion.fuse(model)
    whole, seen = layers.ops.fused_linear, []

    def watched(*args: Any, **keywords: Any) -> Any:
        seen.append(keywords["epilogue"])
        return whole(*args, **keywords)

    monkeypatch.setattr(layers.ops, "fused_linear", watched)
    np.testing.assert_allclose(logits(model, ids), before, atol=2e-5)
    assert seen == ([] if epilogue is None else [epilogue])


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
@pytest.mark.parametrize("packed", [False, True])
def test_a_fused_model_of_no_tokens_gives_no_logits(shape, packed):
    model = build(TINY)
    fusion.fuse(model)
    if packed:
        jaxllm.quantize(model, "int8", head="int8")
    none = jnp.zeros(shape, jnp.int32)
    assert logits(model, none).shape == (*shape, TINY.vocab_size)
