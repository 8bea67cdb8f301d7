import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_models import ALL, TINY, build, poisoned
from tiny_models import logits as logits_of

import jaxllm
from jaxllm import fp8, ops, train
from jaxllm.config import Runtime
from jaxllm.model import Transformer
from jaxllm.precision import DynamicScale, NoScale


def make_model(runtime: Runtime = Runtime(), **changes) -> Transformer:
    return Transformer(dataclasses.replace(TINY, **changes), runtime, rngs=nnx.Rngs(0))


def make_batch(seed: int = 0, rows: int = 4, length: int = 9) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    text = rng.integers(0, TINY.vocab_size, (rows, length + 1)).astype(np.int32)
    targets = text[:, 1:].copy()
    for row in range(rows):  # a different count of targets in each row
        targets[row, : 2 * row] = train.IGNORE
    return {"tokens": text[:, :-1], "targets": targets}


def copied(tree: Any) -> Any:
    """On the host, and no view of what a step may write to."""
    return jax.tree.map(np.array, tree)


def assert_close(a: train.Params, b: train.Params, *, atol: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], atol=atol, err_msg=name)


def test_a_step_is_the_gradient_of_the_mean_loss():
    batch, rate = make_batch(), 0.5
    model = make_model()
    graph, start = nnx.split(model, nnx.Param)

    def mean_loss(params):
        logits = nnx.merge(graph, params)(jnp.asarray(batch["tokens"]))
        total, count = ops.cross_entropy(logits, jnp.asarray(batch["targets"]))
        return total / count

    loss, grads = jax.jit(jax.value_and_grad(mean_loss))(start)
    other = make_model()
    nnx.update(other, jax.tree.map(lambda p, g: p - rate * g, start, grads))

    step = train.make_train_step(model, optax.sgd(rate))
    state, metrics = step(train.init_state(model, optax.sgd(rate)), batch)

    assert_close(state.params, train.parameters(other), atol=1e-6)
    assert state.step == 1
    assert metrics["tokens"] == np.sum(batch["targets"] != train.IGNORE)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)


def test_micro_batches_are_weighted_by_their_tokens():
    results = []
    for parts in (1, 2, 4):
        model = make_model()
        step = train.make_train_step(model, optax.sgd(0.5), micro_batches=parts)
        results.append(step(train.init_state(model, optax.sgd(0.5)), make_batch()))
    (whole, whole_metrics), *others = results
    for state, metrics in others:
        assert_close(state.params, whole.params, atol=1e-6)
        assert metrics["tokens"] == whole_metrics["tokens"]
        np.testing.assert_allclose(metrics["loss"], whole_metrics["loss"], rtol=1e-6)


def test_a_batch_without_targets_changes_nothing_and_is_counted():
    """Weight decay and Adam's moments would move the weights without a gradient; and it is no step
    of those after which the scale of the loss grows.
    """
    model, optimizer = make_model(), optax.adamw(1e-2, weight_decay=0.1)
    step = train.make_train_step(model, optimizer)
    state = train.init_state(model, optimizer, scale=DynamicScale())
    state, _ = step(state, make_batch())
    before = copied((state.params, state.opt_state, state.scale))
    empty = {**make_batch(), "targets": np.full((4, 9), train.IGNORE, np.int32)}
    state, metrics = step(state, empty)
    after = copied((state.params, state.opt_state, state.scale))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert (int(state.step), int(state.skipped), int(metrics["skipped"])) == (2, 1, 1)
    assert (int(metrics["tokens"]), float(metrics["loss"])) == (0, 0.0)


def test_micro_batches_must_divide_the_rows():
    model = make_model()
    step = train.make_train_step(model, optax.sgd(0.5), micro_batches=3)
    with pytest.raises(ValueError, match="4 rows cannot be split into 3 equal micro-batches"):
        step(train.init_state(model, optax.sgd(0.5)), make_batch())
    with pytest.raises(ValueError, match="^train: micro_batches must be an integer of at least 1"):
        train.make_train_step(model, optax.sgd(0.5), micro_batches=0)


def test_a_step_of_ones_own_is_the_same_step():
    states = []
    optimizer = optax.adam(1e-2)
    for compiled in (False, True):
        model = make_model()
        state = train.init_state(model, optimizer)
        if compiled:
            step = train.make_train_step(model, optimizer)
        else:

            @jax.jit
            def step(state, batch, model=model):
                return train.train_step(state, batch, model=model, optimizer=optimizer)

        states.append(step(state, make_batch())[0])
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(a, b)


def in_blocks(name: str) -> bool:
    return name.startswith("layers.")


def test_what_is_frozen_does_not_move():
    model = make_model()
    before = copied(train.parameters(model))
    optimizer = optax.adam(1e-2)
    state = train.init_state(model, optimizer, trainable=in_blocks)
    assert set(state.frozen) == {"embed_tokens.weight", "norm.weight", "lm_head.weight"}
    assert set(state.opt_state[0].mu) == set(state.params) == before.keys() - set(state.frozen)
    step = train.make_train_step(model, optimizer, micro_batches=2)
    for _ in range(2):
        state, _ = step(state, make_batch())
    for name, x in state.frozen.items():
        np.testing.assert_array_equal(x, before[name])
    assert all(np.any(np.asarray(x) != before[name]) for name, x in state.params.items())
    assert train.make_evaluate(model)(state.all_params, [make_batch()])[0] < 30 * 4.2
    train.update(model, state.all_params)
    assert train.parameters(model).keys() == before.keys()


def test_training_a_part_is_the_whole_step_of_that_part():
    batch = make_batch()
    results = []
    for trainable in (None, in_blocks):
        model = make_model()
        state = train.init_state(model, optax.sgd(0.5), trainable=trainable)
        results.append(train.make_train_step(model, optax.sgd(0.5))(state, batch)[0].params)
    assert_close(results[1], {k: v for k, v in results[0].items() if in_blocks(k)}, atol=1e-6)


@pytest.mark.own_errors
def test_what_cannot_be_trained_is_named():
    model = make_model()
    with pytest.raises(ValueError, match=r"trainable must be a function .*, got \['norm.weight'\]"):
        train.init_state(model, optax.sgd(1), trainable=["norm.weight"])
    with pytest.raises(ValueError, match=r"the optimizer must have init and update, .*, got 0.1"):
        train.init_state(model, 0.1)
    for scale in (None, 2.0, NoScale):
        with pytest.raises(ValueError, match=rf"^precision: a scale is one of .*, got {scale}$"):
            train.init_state(model, optax.sgd(1), scale=scale)
    with pytest.raises(ValueError, match="^train: loss must be a function of a .*, got None$"):
        train.make_evaluate(model, None)
    with pytest.raises(ValueError, match="none of the 21 parameters is to be trained"):
        train.init_state(model, optax.sgd(0.5), trainable=lambda name: False)
    model.norm.weight.set_value(jnp.ones(24, jnp.int8))
    with pytest.raises(ValueError, match=r"norm\.weight is int8, which has no gradient"):
        train.init_state(model, optax.sgd(0.5))


def test_of_a_packed_layer_the_bias_alone_can_be_trained():
    model, optimizer = make_model(qkv_bias=True), optax.sgd(0.1)
    jaxllm.quantize(model, "int8")
    state = train.init_state(model, optimizer, trainable=lambda name: name.endswith(".bias"))
    assert len(state.params) == 2 * 3


ON_FOUR_DEVICES = """
import sys, numpy as np, jax, optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding
import jaxllm
from jaxllm import lora, train
from jaxllm.checkpoint.native import Checkpoints
from jaxllm.optimizers import adamw_8bit

mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
last = jax.devices()[-1]
of_rows = lambda path, shape: NamedSharding(mesh, P("x", None) if len(shape) == 2 else P())
text = np.random.default_rng(0).integers(0, 60, (4, 9)).astype(np.int32)
batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
optimizer = optax.adam(1e-2)
losses = []
for sharding, trainable in (
    (None, None), (of_rows, None), (SingleDeviceSharding(last), None), (of_rows, lora.is_adapter)
):
    model, _ = jaxllm.load(sys.argv[1], dtype="float32", sharding=sharding)
    lora.add_adapters(model, rank=2, rngs=nnx.Rngs(0))
    state = train.init_state(model, optimizer, trainable=trainable)
    if sharding is not None:
        devices = set(mesh.devices.flat) if sharding is of_rows else {last}
        assert all(x.devices() == devices for x in jax.tree.leaves(state))
        for name, x in state.opt_state[0].mu.items():
            assert x.sharding == state.params[name].sharding, name
    with Checkpoints(f"{sys.argv[1]}/{len(losses)}") as checkpoints:
        checkpoints.save(state, key=jax.random.key(0))
        state = checkpoints.restore(state).state
    step = train.make_train_step(model, optimizer)
    losses.append([])
    for _ in range(2):  # the second loss is of what the moments have made
        state, metrics = step(state, batch)
        losses[-1].append(float(metrics["loss"]))
np.testing.assert_allclose(losses[:3], losses[:1] * 3, rtol=1e-5)
assert losses[0][1] < losses[3][1] < losses[3][0]  # adapters alone
np.testing.assert_allclose(losses[3][0], losses[0][0], rtol=1e-5)

but_one = lambda path, shape: of_rows(path, () if "q_proj" in str(path) else shape)
model, _ = jaxllm.load(sys.argv[1], dtype="float32", sharding=but_one)
optimizer = adamw_8bit(1e-2, min_size=16)  # whose scales XLA alone would spread
state, step = train.init_state(model, optimizer), train.make_train_step(model, optimizer)
places = jax.tree.map(lambda x: x.sharding, state)
for _ in range(2):
    state, _ = step(state, batch)
    for x, place in zip(jax.tree.leaves(state), jax.tree.leaves(places), strict=True):
        assert x.sharding.is_equivalent_to(place, x.ndim), (x.shape, x.sharding)
assert sum(jitted._cache_size() for jitted in step._jitted.values()) == 1

compiled = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
two_axes = jax.make_mesh((4, 1), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
for spec in (P("x", None), P("x", "y")):  # XLA says P("x") of what it returns
    model, _ = jaxllm.load(
        sys.argv[1],
        dtype="float32",
        sharding=lambda path, _: NamedSharding(two_axes, spec if "mlp" in path else P()),
    )
    state, step = train.init_state(model, optimizer), train.make_train_step(model, optimizer)
    state, _ = step(state, batch)
    compiled.clear()
    step(state, batch)
    assert "/jax/core/compile/backend_compile_duration" not in compiled, spec
"""


@pytest.mark.slow
def test_the_state_lies_where_the_model_does(tmp_path):
    one_layer = {"num_hidden_layers": 1, "layer_types": ()}
    jaxllm.save(make_model(hidden_size=32, vocab_size=64, **one_layer), None, tmp_path)
    subprocess.run(
        [sys.executable, "-c", ON_FOUR_DEVICES, tmp_path],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        check=True,
    )


def test_parameters_may_be_numpy_arrays_or_traced():
    model, optimizer = make_model(), optax.adam(1e-2)
    expected, _ = train.make_train_step(model, optimizer)(
        train.init_state(make_model(), optimizer), make_batch()
    )
    nnx.update(model, jax.device_get(nnx.state(model)))
    state = train.init_state(model, optimizer)
    graph, arrays = nnx.split(model)
    jax.eval_shape(lambda arrays: train.init_state(nnx.merge(graph, arrays), optimizer), arrays)
    state, _ = train.make_train_step(model, optimizer)(state, make_batch())
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)


def test_a_model_of_shapes_has_a_state_of_shapes():
    model = nnx.eval_shape(make_model)
    optimizer = optax.adamw(1e-3)
    state = train.init_state(model, optimizer, trainable=in_blocks, scale=DynamicScale())
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state))
    real = train.init_state(make_model(), optimizer, trainable=in_blocks, scale=DynamicScale())
    like = jax.tree.map(lambda x: (x.shape, x.dtype), (state, real), is_leaf=lambda x: x is None)
    assert like[0] == like[1]
    step = train.make_train_step(model, optimizer)
    lowered = step.lower(state, make_batch())
    assert "dot_general" in lowered.as_text()


@pytest.mark.parametrize(
    ("scale", "bad", "is_number"),
    [
        (NoScale(), np.inf, False),
        (DynamicScale(), np.nan, False),
        (NoScale(), 1e38, False),
        (NoScale(), 1e36, True),  # the loss, and not its gradient's norm
    ],
)
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(scale, bad, is_number):
    model = make_model()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    state = train.init_state(model, optimizer, scale=scale)
    step = train.make_train_step(model, optimizer, poisoned, micro_batches=2)
    good = {**make_batch(), "factor": np.ones(4, np.float32)}
    state, _ = step(state, good)
    assert (int(state.step), int(state.skipped)) == (1, 0)
    before = copied((state.params, state.opt_state))
    # One micro-batch is enough
    state, metrics = step(state, {**good, "factor": np.array([1, bad, 1, 1], np.float32)})
    assert np.isfinite(metrics["loss"]) == is_number
    assert not np.isfinite(metrics["grad_norm"])
    after = copied((state.params, state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert (int(state.step), int(state.skipped), int(metrics["skipped"])) == (2, 1, 1)
    state, metrics = step(state, good)
    assert (int(state.step), int(state.skipped)) == (3, 1)
    assert np.isfinite(metrics["loss"])
    moved = jax.tree.map(lambda a, b: np.any(a != np.asarray(b)), before[0], state.params)
    assert all(moved.values())


def test_the_norm_is_told_before_clipping():
    norms, moves = [], []
    for limit in (1e9, 0.01):
        model = make_model()
        optimizer = optax.chain(optax.clip_by_global_norm(limit), optax.sgd(1.0))
        state = train.init_state(model, optimizer)
        before = copied(state.params)
        state, metrics = train.make_train_step(model, optimizer)(state, make_batch())
        norms.append(float(metrics["grad_norm"]))
        moves.append(float(optax.tree.norm(jax.tree.map(jnp.subtract, state.params, before))))
    assert norms[0] == norms[1] > 0.1
    np.testing.assert_allclose(moves, [norms[0], 0.01], rtol=1e-4)  # subtracted numbers near 1


@pytest.mark.parametrize("config", [TINY, ALL], ids=["llama", "every switch"])
def test_token_loss_is_cross_entropy_of_the_logits(config):
    """Tied and untied, soft-capped and not."""
    model = build(config)
    batch = make_batch()
    logits = logits_of(model, jnp.asarray(batch["tokens"]))
    total, count = ops.cross_entropy(logits, jnp.asarray(batch["targets"]))
    found, found_count = nnx.jit(train.token_loss)(model, batch)
    np.testing.assert_allclose(found, total, rtol=1e-6)
    assert int(count) == int(found_count)


@pytest.mark.parametrize("config", [TINY, ALL], ids=["llama", "every switch"])
def test_token_loss_of_a_packed_head_is_that_of_its_numbers(config, monkeypatch):
    model = build(config)
    jaxllm.quantize(model, "int8", head="int8")
    batch = make_batch()
    logits = logits_of(model, jnp.asarray(batch["tokens"]))
    total, _ = ops.cross_entropy(logits, jnp.asarray(batch["targets"]))
    monkeypatch.setattr(ops, "cross_entropy", None)  # which is of an array of all logits
    found, _ = nnx.jit(train.token_loss)(model, batch)
    np.testing.assert_allclose(found, total, rtol=1e-6)


@pytest.mark.own_errors
def test_the_loss_runs_as_the_runtime_says():
    batch = make_batch()
    for choice in ({"linear_cross_entropy": "xla"}, "xla"):
        train.token_loss(make_model(Runtime(implementation=choice)), batch)
    model = make_model(Runtime(implementation={"linear_cross_entropy": "pallas-interpret"}))
    with pytest.raises(NotImplementedError, match="takes hidden states in bfloat16"):
        train.token_loss(model, batch)


def test_the_gradient_of_a_row_that_many_tokens_share_is_summed_in_float32():
    """In bfloat16 a sum of 2048 equal terms stops growing at the 256th."""
    runtime = Runtime(dtype="bfloat16", param_dtype="float32")
    batch = {"tokens": np.full((64, 32), 7, np.int32)}

    def first_number(model, batch):
        x = model.embed_tokens(batch["tokens"])[..., 0].astype(jnp.float32)
        return jnp.sum(x), jnp.int32(x.size)

    model = make_model(runtime)
    state = train.init_state(model, optax.sgd(1.0))
    before = float(state.params["embed_tokens.weight"][7, 0])
    state, _ = train.make_train_step(model, optax.sgd(1.0), first_number)(state, batch)
    assert float(state.params["embed_tokens.weight"][7, 0]) == pytest.approx(before - 1.0)


def test_gradients_of_parts_are_summed_in_float32():
    """In bfloat16 a sum of 512 equal terms stops growing at the 256th."""
    runtime, name = Runtime(dtype="bfloat16", param_dtype="float32"), "layers.0.mlp.up_proj.weight"

    def first_number(model, batch):
        number = model.layers[0].mlp.up_proj.weight[0, 0].astype(jnp.float32)
        return number * np.float32(len(batch["tokens"])), jnp.int32(len(batch["tokens"]))

    model, optimizer = make_model(runtime), optax.sgd(1.0)
    state = train.init_state(model, optimizer)
    before = float(state.params[name][0, 0])
    step = train.make_train_step(model, optimizer, first_number, micro_batches=512)
    state, _ = step(state, {"tokens": np.zeros((512, 1), np.int32)})
    assert float(state.params[name][0, 0]) == pytest.approx(before - 1.0)


def test_a_step_casts_matrices_of_blocks_alone():
    seen = {}

    def noted(model, batch):
        seen.update({name: str(x.dtype) for name, x in train.parameters(model).items()})
        return train.token_loss(model, batch)

    model, optimizer = make_model(Runtime("bfloat16", "float32"), qkv_bias=True), optax.sgd(0.1)
    state = train.init_state(model, optimizer)
    train.make_train_step(model, optimizer, noted).lower(state, make_batch())
    narrow = {name for name, dtype in seen.items() if dtype == "bfloat16"}
    assert narrow == {name for name in seen if in_blocks(name) and state.params[name].ndim == 2}
    assert set(seen.values()) == {"bfloat16", "float32"}


def compiled_bytes(rows: int, **kwargs) -> int:
    """Temporaries of a step of a model whose weights outweigh its activations."""
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    model = nnx.eval_shape(lambda: make_model(layer_types=(), **wide))
    optimizer = optax.sgd(0.1, momentum=0.9)
    state = train.init_state(model, optimizer)
    batch = make_batch(rows=rows, length=8)
    step: Any = train.make_train_step(model, optimizer, **kwargs)
    return step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_accumulation_needs_one_buffer_of_the_parameters_size():
    """Beside the parts' own temporaries, which a step of one part has too: sums in, sums out of the
    loop, with gradients that are added as soon as they are made.
    """
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    model = nnx.eval_shape(lambda: make_model(layer_types=(), **wide))
    params = sum(4 * x.size for x in train.parameters(model).values())
    one, four = compiled_bytes(4), compiled_bytes(16, micro_batches=4)
    print(params, one, four)
    assert one > 0.9 * params  # the gradients, which the norm needs before the update
    assert four < one + 0.5 * params


def test_bfloat16_weights_round_by_chance_and_keep_float32_moments():
    """Steps of 1e-4 at weights of 1: half a digit of bfloat16 is 4e-3."""
    runtime = Runtime(dtype="bfloat16", param_dtype="bfloat16")
    optimizer = optax.adam(1e-4)
    moved = {}
    for stochastic in (False, True):
        model = make_model(runtime)
        for name in ("input_layernorm", "post_attention_layernorm"):
            assert getattr(model.layers[0], name).weight.dtype == jnp.bfloat16
        state = train.init_state(model, optimizer)
        assert {str(x.dtype) for x in state.opt_state[0].nu.values()} == {"float32"}
        step = train.make_train_step(model, optimizer, stochastic_rounding=stochastic)
        for i in range(20):
            state, _ = step(state, make_batch(seed=i))
        assert {str(x.dtype) for x in state.params.values()} == {"bfloat16"}
        norms = [x for name, x in state.params.items() if "norm" in name]
        moved[stochastic] = sum(float(jnp.sum(x != 1)) for x in norms)
    assert moved[False] == 0
    assert moved[True] > 10


def test_the_state_is_donated_and_the_model_is_whole_again_after_update():
    model = make_model()
    first = train.init_state(model, optax.sgd(0.5))
    step = train.make_train_step(model, optax.sgd(0.5))
    state, _ = step(first, make_batch())
    assert all(array.is_deleted() for array in first.params.values())
    train.update(model, state.params)
    logits = logits_of(model, jnp.asarray(make_batch()["tokens"]))
    assert bool(jnp.all(jnp.isfinite(logits)))


def test_update_names_the_parameter_that_does_not_fit():
    model = make_model()
    params = {name: 2 * x for name, x in train.parameters(model).items()}
    norm = params.pop("norm.weight")
    with pytest.raises(ValueError, match=r"no parameter norm\.weight"):
        train.update(model, params)
    with pytest.raises(ValueError, match=r"norm\.weight has shape \(3,\), the model's \(24,\)"):
        train.update(model, {**params, "norm.weight": norm[:3]})
    assert_close(train.parameters(model), train.parameters(make_model()), atol=0)


def test_tied_models_train_one_embedding():
    assert "lm_head.weight" in train.parameters(make_model())
    assert "lm_head.weight" not in train.parameters(make_model(tie_word_embeddings=True))


def compilations(step):
    return sum(jitted._cache_size() for jitted in step._jitted.values())


@pytest.mark.parametrize("runtime", [Runtime(), Runtime(dtype="bfloat16", param_dtype="float32")])
def test_the_loss_falls_and_master_weights_stay_float32(runtime):
    model = make_model(runtime)
    optimizer = optax.adamw(1e-2)
    state = train.init_state(model, optimizer)
    step = train.make_train_step(model, optimizer)
    losses = []
    for _ in range(30):
        state, metrics = step(state, make_batch())
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(np.log(TINY.vocab_size), rel=0.02)
    assert losses[-1] < losses[0] / 2
    assert {str(param.dtype) for param in state.params.values()} == {"float32"}
    assert metrics["loss"].dtype == jnp.float32
    assert compilations(step) == 1


BITNET = {"model_type": "bitnet", "hidden_act": "relu2", "sub_norms": True, "bit_linear": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "in_fp8", "trainable"),
    [
        ({}, False, None),
        ({}, True, None),
        ({}, True, lambda name: "mlp" in name),
        (BITNET, False, None),
    ],
    ids=["plain", "fp8", "partly-frozen-fp8", "bitnet"],
)
def test_what_is_measured_is_what_is_trained(changes, in_fp8, trainable):
    """Where a step casts the trained float32 weights of blocks to bfloat16, layers that quantise
    them do so with all of them, in every program.
    """
    model = build(dataclasses.replace(TINY, **changes), Runtime("bfloat16", "float32"))
    if in_fp8:
        fp8.use_fp8(model)
    optimizer = optax.sgd(0.0)
    state = train.init_state(model, optimizer, trainable=trainable)
    total, count = train.make_evaluate(model)(state.all_params, [make_batch()])
    _, metrics = train.make_train_step(model, optimizer)(state, make_batch())
    # Of weights quantised from float32 the loss was 1.5e-3 off in fp8, and 2e-3 as BitNet
    assert float(metrics["loss"]) == pytest.approx(total / count, rel=1e-5)


def test_another_loss_may_be_given():
    def reward(model, batch):
        return -jnp.sum(model(batch["tokens"])[..., 0]), jnp.int32(1)

    model = make_model()
    state = train.init_state(model, optax.sgd(0.1))
    evaluate = train.make_evaluate(model, reward)
    before, _ = evaluate(state.params, [make_batch()])
    state, _ = train.make_train_step(model, optax.sgd(0.1), reward)(state, make_batch())
    after, _ = evaluate(state.params, [make_batch()])
    assert after < before


@pytest.mark.parametrize("sign", [1, -1])
def test_a_loss_may_count_by_weights(sign):
    """Of tokens that count less than one, or less than nothing: the quotient, and its gradient, are
    the weighted mean.
    """
    weights = sign * np.random.default_rng(3).random((4, 9)).astype(np.float32) / 100

    def weighted(model, batch):
        losses = -ops.log_probs(model(batch["tokens"]), batch["targets"])
        return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])

    batch = {**make_batch(), "weights": weights}
    batch["targets"] = np.maximum(batch["targets"], 0)
    model, optimizer = make_model(), optax.sgd(1.0)
    before = copied(train.parameters(model))

    def mean(params):
        total, count = train._functional(model, weighted)(params, batch)
        return total / count

    loss, gradient = jax.value_and_grad(mean)(before)
    total, count = train.make_evaluate(model, weighted)(before, [batch, batch])
    assert count == pytest.approx(2 * weights.sum(), rel=1e-5)
    assert total / count == pytest.approx(float(loss), rel=1e-5)
    for parts in (1, 2):
        state = train.init_state(make_model(), optimizer)
        step = train.make_train_step(model, optimizer, weighted, micro_batches=parts)
        after, metrics = step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
        assert_close({k: before[k] - v for k, v in after.params.items()}, gradient, atol=1e-6)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_number_of_the_batch_is_every_parts(parts):
    def scaled(model, batch):
        total, count = train.token_loss(model, {k: batch[k] for k in ("tokens", "targets")})
        return total * batch["weight"], count

    model, optimizer = make_model(), optax.sgd(0.1)
    step = train.make_train_step(model, optimizer, scaled, micro_batches=parts)
    batch = {k: make_batch()[k] for k in ("tokens", "targets")}
    losses = [
        float(step(train.init_state(make_model(), optimizer), batch | {"weight": w})[1]["loss"])
        for w in (np.float32(1), 3.0)
    ]
    assert losses[1] == pytest.approx(3 * losses[0], rel=1e-6)


def test_what_has_other_rows_than_the_tokens_cannot_be_cut():
    """A weight a token of a vocabulary, say, of which each part would get a part."""

    def scaled(model, batch):
        total, count = train.token_loss(model, {k: batch[k] for k in ("tokens", "targets")})
        return total * jnp.sum(batch["more"]["by_token"]), count

    batch = {k: make_batch()[k] for k in ("tokens", "targets")}
    batch["more"] = {"by_token": np.ones(8, np.float32)}
    optimizer = optax.sgd(0.1)
    for parts in (1, 2):
        step = train.make_train_step(make_model(), optimizer, scaled, micro_batches=parts)
        words = "^train: more.by_token has 8 rows and tokens 4; micro_batches cuts a batch by rows"
        with pytest.raises(ValueError, match=words) if parts > 1 else contextlib.nullcontext():
            step(train.init_state(make_model(), optimizer), batch)


def test_an_optimiser_is_given_the_loss():
    """Halved after two steps without progress, at a rate at which there is none."""
    plateau = optax.contrib.reduce_on_plateau(0.5, patience=2)
    optimizer = optax.chain(optax.sgd(0.0), plateau)
    state = train.init_state(make_model(), optimizer)
    step = train.make_train_step(make_model(), optimizer)
    for _ in range(4):
        state, _ = step(state, make_batch())
    assert state.opt_state[1].scale == 0.5


def test_an_optimiser_that_takes_no_loss_is_given_none():
    optimizer = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01))
    state = train.init_state(make_model(), optimizer)
    _, metrics = train.make_train_step(make_model(), optimizer)(state, make_batch())
    assert np.isfinite(metrics["loss"])


def test_an_optimiser_that_calls_the_loss_is_refused():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.lbfgs())
    state = train.init_state(make_model(), optimizer)
    step = train.make_train_step(make_model(), optimizer)
    with pytest.raises(ValueError, match=r"^train: .* asks for 'grad' and 'value_fn', and a step "):
        step(state, make_batch())

    optimizer = optax.contrib.sophia(1e-3)
    step = train.make_train_step(make_model(), optimizer)
    with pytest.raises(ValueError, match=r"^train: .* asks for obj_fn, and a step has"):
        step(train.init_state(make_model(), optimizer), make_batch())

    def update(updates, state, params):
        def helper(x, *, decay): ...

        helper(updates)  # pyright: ignore[reportCallIssue]

    other = optax.GradientTransformation(lambda params: (), update)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'decay'"):
        train.make_train_step(make_model(), other)(
            train.init_state(make_model(), other), make_batch()
        )


def test_a_loss_without_a_count_is_refused():
    optimizer = optax.sgd(0.1)
    state = train.init_state(make_model(), optimizer)
    step = train.make_train_step(
        make_model(), optimizer, lambda model, batch: model(batch["tokens"]).mean()
    )
    with pytest.raises(ValueError, match=r"^train: a loss returns the sum .* count, got one "):
        step(state, make_batch())


def test_one_batch_is_evaluated_as_a_list_of_it_is():
    model = make_model()
    evaluate, params = train.make_evaluate(model), train.parameters(model)
    assert evaluate(params, make_batch()) == evaluate(params, [make_batch()])


def test_a_compiled_step_may_be_part_of_another_program():
    optimizer = optax.sgd(0.1)
    step = train.make_train_step(make_model(), optimizer)
    batches = jax.tree.map(lambda *x: np.stack(x), *(make_batch(i) for i in range(3)))
    state, metrics = jax.lax.scan(step, train.init_state(make_model(), optimizer), batches)
    alone = train.init_state(make_model(), optimizer)
    for i in range(3):
        alone, _ = step(alone, make_batch(i))
    assert metrics["loss"].shape == (3,)
    assert_close(state.params, alone.params, atol=1e-6)


@pytest.mark.own_errors
def test_a_batch_with_other_keys_is_refused():
    model, batch = make_model(), make_batch()
    step = train.make_train_step(model, optax.sgd(0.1))
    state = train.init_state(make_model(), optax.sgd(0.1))
    for wrong, sentence in (
        ({**batch, "segment_id": batch["tokens"]}, "has 'segment_id', which token_loss does not"),
        ({"tokens": batch["tokens"]}, "has no targets"),
        ({"input_ids": batch["tokens"]}, r"has no tokens, got only \['input_ids'\]"),
    ):
        with pytest.raises(ValueError, match=f"^train: the batch {sentence}"):
            step(state, wrong)
    params = {"norm.weight": model.norm.weight[...]}
    found = (
        r"^train: of the model's \d+ parameters \d+ are not given, embed_tokens.weight the first"
    )
    with pytest.raises(ValueError, match=found):
        train.make_evaluate(model)(params, [batch])


def test_packed_texts_do_not_see_each_other():
    text = make_batch(rows=2, length=8)["tokens"]
    targets = np.roll(text, -1, axis=1)
    apart = {"tokens": text, "targets": targets}
    packed = {
        "tokens": text.reshape(1, -1),
        "targets": targets.reshape(1, -1),
        "positions": np.tile(np.arange(8, dtype=np.int32), 2)[None],
        "segment_ids": np.repeat(np.array([1, 2], np.int32), 8)[None],
    }
    model = make_model()
    evaluate = train.make_evaluate(model)
    params = train.parameters(model)
    np.testing.assert_allclose(
        evaluate(params, [packed])[0], evaluate(params, [apart])[0], rtol=1e-6
    )


@pytest.mark.parametrize("count", [2, 8, 9, 10, 13, 40, 41])
@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 4), (8, 3), (8, 1)])
def test_every_token_is_a_target_once_with_its_context(count, length, stride):
    text = list(range(1, count + 1))
    [batch] = train.cover_windows(text, rows=64, length=length, stride=stride)
    tokens, targets = batch["tokens"], batch["targets"]
    assert tokens.shape == targets.shape == (64, length)
    counted = targets != train.IGNORE
    assert sorted(targets[counted].tolist()) == text[1:]
    for row, column in np.argwhere(counted).tolist():
        seen, target = column + 1, int(targets[row, column])
        assert seen == target - 1 or seen > length - stride
        assert tokens[row, :seen].tolist() == list(range(target - seen, target))


def test_batches_have_one_shape():
    batches = train.cover_windows(range(1, 30), rows=4, length=8, stride=4)
    assert [batch["tokens"].shape for batch in batches] == [(4, 8)] * 2
    assert sum(np.sum(batch["targets"] != train.IGNORE) for batch in batches) == 28


def test_the_loss_over_windows_is_that_of_the_text():
    """With a window as long as the text, and with shorter ones against each token's own context."""
    model = make_model()
    evaluate, params = train.make_evaluate(model), train.parameters(model)
    text = make_batch(rows=1, length=20)["tokens"][0]
    logits = jax.jit(lambda tokens: model(tokens))

    def nats(context, target):
        padded = np.zeros((1, 20), np.int32)
        padded[0, : len(context)] = context
        return -float(jax.nn.log_softmax(logits(padded)[0, len(context) - 1])[target])

    def score(length, stride):
        total, count = evaluate(
            params, train.cover_windows(text.tolist(), rows=3, length=length, stride=stride)
        )
        assert count == 19
        return total

    whole = sum(nats(text[: i + 1], text[i + 1]) for i in range(19))
    assert score(20, 20) == pytest.approx(whole, rel=1e-5)
    short = sum(nats(text[max(0, i - 5) : i + 1], text[i + 1]) for i in range(19))
    assert score(6, 1) == pytest.approx(short, rel=1e-5)


def test_windows_are_refused_that_cannot_be():
    for name, value, allowed in (
        ("stride", 9, "from 1 to 8"),
        ("stride", True, "from 1 to 8"),
        ("rows", 0, "of at least 1"),
        ("rows", 1.5, "of at least 1"),
        ("length", 8.0, "of at least 1"),
    ):
        sizes = {"rows": 1, "length": 8, "stride": 8, name: value}
        sentence = f"^train: {name} must be an integer {allowed}, got {value}$"
        with pytest.raises(ValueError, match=sentence):
            train.cover_windows([1, 2, 3], **sizes)
    with pytest.raises(ValueError, match="a text of 1 tokens holds no target"):
        train.cover_windows([1], rows=1, length=8, stride=8)
    for count in (0, 1, 8):
        with pytest.raises(ValueError, match=f"a text of at least 9 tokens, got {count}"):
            train.draw_windows(jnp.arange(count), jax.random.key(0), rows=1, length=8)
    for name in ("rows", "length"):
        sizes = {"rows": 1, "length": 8, name: 0}
        with pytest.raises(ValueError, match=f"^train: {name} must be an integer of at least 1, g"):
            train.draw_windows(jnp.arange(20), jax.random.key(0), **sizes)


def test_windows_may_be_drawn_of_numpys_text_where_the_key_is_traced():
    draw = functools.partial(train.draw_windows, np.arange(50), rows=2, length=8)
    key = jax.random.key(0)
    np.testing.assert_array_equal(jax.jit(draw)(key=key)["tokens"], draw(key=key)["tokens"])


def test_drawn_windows_lie_in_the_text_and_reach_its_end():
    tokens = jnp.arange(12)
    batch = train.draw_windows(tokens, jax.random.key(0), rows=200, length=8)
    starts = np.asarray(batch["tokens"][:, 0])
    assert set(starts.tolist()) == {0, 1, 2, 3}
    np.testing.assert_array_equal(batch["tokens"], starts[:, None] + np.arange(8))
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    [only] = train.draw_windows(tokens, jax.random.key(0), rows=1, length=11)["targets"]
    np.testing.assert_array_equal(only, tokens[1:])


def test_the_first_interrupt_waits_and_the_second_does_not():
    before = signal.getsignal(signal.SIGINT)
    with train.catch_interrupt() as stop:
        assert not stop.is_set()
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_nothing_is_caught():
    def look() -> bool:
        with train.catch_interrupt() as stop:
            return stop.is_set()

    before = signal.getsignal(signal.SIGINT)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(look).result() is False
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with train.catch_interrupt() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.is_set()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_is_not_pythons_stays(monkeypatch):
    """Python names it None, and could not put it back."""
    installed = []
    with monkeypatch.context() as patch:
        patch.setattr(signal, "getsignal", lambda number: None)
        patch.setattr(signal, "signal", lambda number, handler: installed.append(handler))
        with train.catch_interrupt() as stop:
            assert not stop.is_set()
    assert not installed
