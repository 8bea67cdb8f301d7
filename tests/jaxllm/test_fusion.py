import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file
from tiny_models import ALL, TINY, build

import jaxllm
from jaxllm import fusion, lora, train
from jaxllm.config import ModelConfig, Runtime

CONFIGS = {
    "plain": TINY,
    "biases": dataclasses.replace(TINY, qkv_bias=True, mlp_bias=True),
    "all": ALL,
}


def tokens(config: ModelConfig) -> jax.Array:
    return jax.random.randint(jax.random.key(2), (2, 9), 0, config.vocab_size, jnp.int32)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_fused_model_computes_the_same(name):
    model = build(CONFIGS[name])
    before = model(tokens(CONFIGS[name]))
    parts = train.parameters(model)
    fusion.fuse(model)
    after = train.parameters(model)
    # Sums of float32 in another order at most
    np.testing.assert_allclose(model(tokens(CONFIGS[name])), before, atol=2e-5)
    assert not fusion.groups(model)
    assert not any(path.split(".")[-2] in ("q_proj", "up_proj") for path in after)
    assert "layers.0.self_attn.qkv_proj.weight" in after
    assert sum(x.size for x in after.values()) == sum(x.size for x in parts.values())
    other = build(CONFIGS[name])
    weight = after["layers.0.mlp.gate_up_proj.weight"]
    mlp: Any = other.layers[0].mlp
    np.testing.assert_array_equal(
        weight, jnp.concatenate([mlp.gate_proj.weight[...], mlp.up_proj.weight[...]])
    )


def test_what_is_more_than_a_linear_is_left_alone():
    model = build(TINY)
    lora.add_adapters(model, rank=2, targets=["layers.0.self_attn.k_proj"], rngs=nnx.Rngs(3))
    left = {f"layers.{i}.mlp.gate_up_proj" for i in range(len(model.layers))}
    left |= {f"layers.{i}.self_attn.qkv_proj" for i in range(1, len(model.layers))}
    assert set(fusion.groups(model)) == left


def test_join_and_split_are_inverses():
    model = build(CONFIGS["biases"])
    params, found = train.parameters(model), fusion.groups(model)
    joined = fusion.join(params, found)
    fusion.fuse(model)
    assert joined.keys() == train.parameters(model).keys()
    back = fusion.split(joined, found, params)
    assert back.keys() == params.keys()
    for name, x in params.items():
        np.testing.assert_array_equal(x, back[name], err_msg=name)


def step(config: ModelConfig, runtime: Runtime, **state: Any) -> tuple[train.TrainState, Any]:
    model = build(config, runtime)
    text = tokens(config)
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    run = train.make_train_step(model, optax.sgd(0.5), micro_batches=2)
    return run(train.init_state(model, optax.sgd(0.5), **state), batch)


# Weights that are cast are joined; bfloat16 ones that are computed in float32 show it exactly
CAST = Runtime(dtype="float32", param_dtype="bfloat16")


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_training_step_with_joined_weights_is_the_same_step(monkeypatch, remat):
    runtime = dataclasses.replace(CAST, remat=remat)
    joined: list[str] = []
    structure = fusion.structure
    monkeypatch.setattr(
        fusion, "structure", lambda model, only: joined.extend(only) or structure(model, only)
    )
    state, metrics = step(CONFIGS["biases"], runtime)
    assert len(joined) == 2 * TINY.num_hidden_layers
    monkeypatch.setattr(fusion, "groups", lambda model: {})
    plain, plain_metrics = step(CONFIGS["biases"], runtime)
    assert state.params.keys() == plain.params.keys()
    np.testing.assert_allclose(metrics["loss"], plain_metrics["loss"], rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], plain_metrics["grad_norm"], rtol=1e-5)
    for name, x in plain.params.items():
        assert x.dtype == state.params[name].dtype == jnp.bfloat16
        # A last digit of bfloat16, where a sum fell on the other side of it
        np.testing.assert_allclose(
            *(np.float32(y) for y in (x, state.params[name])), rtol=2**-7, err_msg=name
        )


@pytest.mark.parametrize(
    ("runtime", "trainable"),
    [
        (Runtime(), None),
        (CAST, lambda name: not name.endswith(("k_proj.weight", "up_proj.weight"))),
    ],
)
def test_weights_that_are_not_cast_or_not_trained_are_not_joined(monkeypatch, runtime, trainable):
    monkeypatch.setattr(fusion, "structure", None)  # is not called
    state, _ = step(TINY, runtime, trainable=trainable)
    assert "layers.0.self_attn.q_proj.weight" in state.params


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
