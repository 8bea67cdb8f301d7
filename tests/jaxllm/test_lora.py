"""Adapters: the mathematics, the surgery, switching; and PEFT's own word (`reference`)."""

import dataclasses
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from numerics import assert_as_accurate
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import read_golden, write_checkpoint
from tiny_models import TINY, build, fill, logits, tokens

import jaxllm
from jaxllm import lora, train
from jaxllm.config import Runtime
from jaxllm.layers import Linear
from jaxllm.quantize import quantize

# One layer: less to compile
SMALL = dataclasses.replace(TINY, num_hidden_layers=1, layer_types=TINY.layer_types[:1])
KINDS = pytest.mark.parametrize("kind", lora.KINDS)
# rsLoRA is LoRA with another number, which the first test looks at
TWO_KINDS = pytest.mark.parametrize("kind", ["lora", "dora"])
# float32 sums of some dozens of terms; logits are at most 5
ROUNDING = {"rtol": 0, "atol": 2e-5}


def stir(model, seed: int = 0) -> None:
    """Adapters that do something: each by chance, magnitudes a little off."""
    rng = np.random.default_rng(seed)
    lora.set_adapters(
        model,
        {
            name: x * (0.8 + 0.4 * rng.random(x.shape, np.float32))
            if name.endswith("magnitude")
            else (rng.standard_normal(x.shape) * 0.3).astype(np.float32)
            for name, x in lora.adapters(model).items()
        },
    )


def adapted(kind: str = "lora", runtime: Runtime = Runtime(), config=SMALL, **options):
    model = build(config, runtime)
    lora.add_adapters(model, kind=kind, rngs=nnx.Rngs(1), **{"rank": 3, **options})
    return model


def oracle(x, weight, bias, a, b, scale, magnitude=None):
    x, weight, a, b = (np.asarray(v, np.float64) for v in (x, weight, a, b))
    weight = weight + scale * b @ a
    if magnitude is not None:
        weight *= (np.asarray(magnitude) / np.linalg.norm(weight, axis=1))[:, None]
    return x @ weight.T + (0 if bias is None else np.asarray(bias, np.float64))


@KINDS
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("strict_jax")
def test_one_module_is_the_formula(kind, bias):
    rng = np.random.default_rng(0)
    base = Linear(24, 40, bias=bias, rngs=nnx.Rngs(0))
    base.weight.set_value(jnp.asarray(rng.standard_normal((40, 24)), jnp.float32))
    if base.bias is not None:
        base.bias.set_value(jnp.asarray(rng.standard_normal(40), jnp.float32))
    module = lora.Adapted(base, rank=4, alpha=6, kind=kind, rngs=nnx.Rngs(0))
    b = jnp.asarray(rng.standard_normal((40, 4)), jnp.float32)
    module.lora_b.set_value(b)
    if module.magnitude is not None:
        module.magnitude.set_value(module.magnitude[...] * np.float32(1.3))
    x = jnp.asarray(rng.standard_normal((2, 5, 24)), jnp.float32)
    scale = 6 / 2 if kind == "rslora" else 6 / 4
    a, weight = module.lora_a[...], base.weight[...]
    magnitude = module.magnitude and module.magnitude[...]
    plain = x @ (weight + np.float32(scale) * (b @ a)).T
    if kind == "dora":
        np.testing.assert_allclose(magnitude, 1.3 * np.linalg.norm(weight, axis=1), rtol=1e-5)
        long = jnp.linalg.norm(weight + np.float32(scale) * (b @ a), axis=1)
        plain = plain * (magnitude / long)[None, None, :]
    if base.bias is not None:
        plain = plain + base.bias[...][None, None, :]
    bias = None if base.bias is None else base.bias[...]
    truth = oracle(x, weight, bias, a, b, scale, magnitude)
    # what is summed: x W, and beside it the adapter's share
    largest = np.max(np.abs(x) @ np.abs(weight).T) + np.max(np.abs(x) @ np.abs(b @ a).T) * scale
    assert_as_accurate(module(x), plain, truth, largest_term=float(largest))
    with pytest.raises(AssertionError):
        assert_as_accurate(base(x), plain, truth, largest_term=float(largest))


@TWO_KINDS
def test_at_first_it_changes_nothing(kind):
    plain, model = build(SMALL), adapted(kind)
    np.testing.assert_allclose(logits(model, tokens(2, 7)), logits(plain, tokens(2, 7)), **ROUNDING)
    a = np.asarray(model.layers[0].mlp.down_proj.lora_a[...])
    assert a.dtype == np.float32
    bound = 40**-0.5
    assert 0.8 * bound < np.max(np.abs(a)) <= bound
    np.testing.assert_allclose(np.std(a), bound / 3**0.5, rtol=0.15)  # 120 draws: 5 % each way
    assert not np.array_equal(a[:, :24], model.layers[0].mlp.up_proj.lora_a[...])


@TWO_KINDS
def test_merged_and_unmerged_give_the_same_logits(kind):
    model, text = adapted(kind), tokens(2, 9)
    stir(model)
    before, base = logits(model, text), logits(build(SMALL), text)
    assert np.max(np.abs(before - base)) > 0.5
    lora.merge(model)
    assert not lora.adapters(model)
    assert train.parameters(model).keys() == train.parameters(build(SMALL)).keys()
    np.testing.assert_allclose(logits(model, text), before, **ROUNDING)


@pytest.mark.parametrize("scheme", [None, "int8"])
@TWO_KINDS
def test_a_merged_module_keeps_its_dtype_and_its_bias(kind, scheme):
    """Also those that `disabled` has turned off; logits are those that they have elsewhere."""
    config = dataclasses.replace(SMALL, qkv_bias=True, o_bias=True, mlp_bias=True)
    model, text = build(config, Runtime("float32", "bfloat16")), tokens(2, 9)
    if scheme is not None:
        quantize(model, scheme)
    lora.add_adapters(model, kind=kind, rank=3, rngs=nnx.Rngs(1))
    stir(model)
    before = logits(model, text)
    biases = {n: x for n, x in train.parameters(model).items() if n.endswith(".bias")}
    assert len(biases) == 7
    with lora.disabled(model):
        lora.merge(model)
    merged = train.parameters(model)
    assert merged.keys() == train.parameters(build(config)).keys()
    assert {str(x.dtype) for x in merged.values()} == {"bfloat16"}
    for name, bias in biases.items():
        np.testing.assert_array_equal(merged[name.replace(".base.", ".")], bias)
    # Logits of at most 5, of weights that are rounded once more to 8 bits
    np.testing.assert_allclose(logits(model, text), before, atol=0.2)


@KINDS
def test_bfloat16_is_as_near_to_the_truth_as_the_formula(kind):
    rng = np.random.default_rng(0)
    runtime = Runtime(dtype="bfloat16", param_dtype="float32")
    base = Linear(24, 40, runtime=runtime, rngs=nnx.Rngs(0))
    base.weight.set_value(jnp.asarray(rng.standard_normal((40, 24)) / 5, jnp.float32))
    module = lora.Adapted(base, rank=4, alpha=8, kind=kind, rngs=nnx.Rngs(0))
    module.lora_b.set_value(jnp.asarray(rng.standard_normal((40, 4)), jnp.float32))
    x = jnp.asarray(rng.standard_normal((50, 24)), jnp.bfloat16)
    magnitude = module.magnitude and module.magnitude[...]
    a, b, scale = module.lora_a[...], module.lora_b[...], module.scale
    truth = oracle(x.astype("float32"), base.weight[...], None, a, b, scale, magnitude)
    # as autocast has it: bfloat16 behind each product
    plain = base(x) + (x @ a.T.astype("bfloat16") @ b.T.astype("bfloat16")) * scale
    if magnitude is not None:
        long = jnp.linalg.norm(base.weight[...] + scale * b @ a, axis=1)
        plain = plain * (magnitude / long).astype("bfloat16")
    ours = module(x)
    assert ours.dtype == jnp.bfloat16
    assert_as_accurate(ours.astype("float32"), plain.astype("float32"), truth)


def test_the_norm_of_dora_gets_no_gradient():
    base = Linear(6, 5, rngs=nnx.Rngs(0))
    module = lora.Adapted(base, rank=2, alpha=2, kind="dora", rngs=nnx.Rngs(0))
    module.lora_b.set_value(jnp.ones((5, 2)))
    graph, state = nnx.split(module)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 6)), jnp.float32)

    def total(state):
        return jnp.sum(nnx.merge(graph, state)(x))

    turn = module._turn()
    got = jax.grad(total)(state)["lora_b"][...]
    wanted = jnp.outer(turn, jnp.sum(x @ module.lora_a[...].T, axis=0))
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_rows_of_zeros_stay_finite():
    base = Linear(6, 5, rngs=nnx.Rngs(0))
    base.weight.set_value(jnp.zeros((5, 6)))
    module = lora.Adapted(base, rank=2, alpha=2, kind="dora", rngs=nnx.Rngs(0))
    graph, state = nnx.split(module)
    value, grads = jax.value_and_grad(lambda s: jnp.sum(nnx.merge(graph, s)(jnp.ones((2, 6)))))(
        state
    )
    assert value == 0
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))


ATTENTION = {f"layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qkvo"}
MLP = {f"layers.{i}.mlp.{p}_proj" for i in (0, 1) for p in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("all-linear", ATTENTION | MLP),
        ("lm_head", {"lm_head"}),
        (r"layers\.1\..*_proj|lm_head", {n for n in ATTENTION | MLP if "s.1" in n} | {"lm_head"}),
        ("(q|v)_proj", {f"layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qv"}),
        (["o_proj", "layers.0.mlp.*"],
         {n for n in ATTENTION | MLP if "o_proj" in n or "0.mlp" in n}),
        ("q_proj|v_proj", {f"layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qv"}),
        (r"self_a(t)\1n\.q_proj", {f"layers.{i}.self_attn.q_proj" for i in (0, 1)}),
        (["?_proj"], ATTENTION),
    ],
)  # fmt: skip
def test_targets(targets, names):
    model = build(TINY)
    added = lora.add_adapters(model, targets=targets, rngs=nnx.Rngs(0))
    assert set(added) == names
    own = {name for name in train.parameters(model) if lora.is_adapter(name)}
    assert own == {f"{name}.{key}" for name in names for key in ("lora_a", "lora_b")}
    assert own == lora.adapters(model).keys()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"targets": "gate"},
            ValueError,
            "lora: 'gate' matches no Linear without an adapter; there are "
            "layers.*.mlp.down_proj, layers.*.mlp.gate_proj, layers.*.mlp.up_proj, "
            "layers.*.self_attn.k_proj, layers.*.self_attn.o_proj, layers.*.self_attn.q_proj, "
            "layers.*.self_attn.v_proj",
        ),
        ({"targets": ["q_proj", "k_prj"]}, ValueError, "'k_prj' matches no Linear"),
        ({"targets": "q_(proj"}, ValueError, "unterminated subpattern at position 2);"),
        ({"targets": "k_proj)|(q_proj"}, ValueError, "unbalanced parenthesis at position 6);"),
        ({"targets": "*.q_proj"}, ValueError, "'*.q_proj' is no regular expression"),
        ({"targets": ["lm_head"]}, NotImplementedError, "the head is tied to the embedding"),
        ({"targets": "embed_tokens"}, NotImplementedError, "is a table and no Linear"),
        ({"targets": []}, ValueError, "lora: targets is empty; name modules, or give 'all-linear'"),
        ({"rngs": 0}, ValueError, "lora: rngs must be an nnx.Rngs, as nnx.Rngs(0), got 0"),
        ({"rank": 0}, ValueError, "lora: rank must be an integer of at least 1, got 0"),
        ({"rank": 2.5}, ValueError, "lora: rank must be an integer of at least 1, got 2.5"),
        ({"rank": True}, ValueError, "lora: rank must be an integer of at least 1, got True"),
        ({"targets": None}, ValueError, "a regular expression or a list of names, got None"),
        ({"targets": 5}, ValueError, "a regular expression or a list of names, got 5"),
        ({"targets": ["q_proj", 5]}, ValueError, "or a list of names, got ['q_proj', 5]"),
        ({"targets": b"q_proj"}, ValueError, "or a list of names, got b'q_proj'"),
        ({"rank": 10**5}, ValueError, "lora: rank 100000 is more than "),
        ({"alpha": 0}, ValueError, "lora: alpha must be a positive number, got 0"),
        ({"alpha": "8"}, ValueError, "lora: alpha must be a positive number, got '8'"),
        ({"alpha": True}, ValueError, "lora: alpha must be a positive number, got True"),
        ({"alpha": float("nan")}, ValueError, "lora: alpha must be a positive number, got nan"),
        ({"kind": "vera"}, ValueError, "lora: kind 'vera' is not one of lora, rslora, dora"),
    ],
)
def test_what_cannot_be_is_one_sentence(options, error, words):
    model = build(dataclasses.replace(TINY, tie_word_embeddings=True))
    with pytest.raises(error, match=re.escape(words)) as raised:
        lora.add_adapters(model, **{"rngs": nnx.Rngs(0), **options})
    assert "\n" not in str(raised.value)
    assert not lora.adapters(model)


def test_a_packed_table_gets_no_adapter():
    model = build(dataclasses.replace(TINY, tie_word_embeddings=True))
    plain = lora.add_adapters(model, rngs=nnx.Rngs(0))
    model = build(dataclasses.replace(TINY, tie_word_embeddings=True))
    quantize(model, "int8", head="int8")
    for target in ("embed_tokens", "lm_head"):
        with pytest.raises(NotImplementedError, match="is tied to the embedding, which is a table"):
            lora.add_adapters(model, targets=target, rngs=nnx.Rngs(0))
    assert lora.add_adapters(model, rngs=nnx.Rngs(0)) == plain
    assert np.all(np.isfinite(logits(model, tokens(1, 5))))


def test_a_head_has_one_adapter():
    model = adapted(targets="lm_head")
    with pytest.raises(ValueError, match="'lm_head' matches no Linear without an adapter"):
        lora.add_adapters(model, targets="lm_head", rngs=nnx.Rngs(0))


def test_a_second_call_adds_other_modules():
    model = adapted(targets="q_proj", rank=2)
    lora.add_adapters(model, targets="v_proj", rank=5, rngs=nnx.Rngs(0))
    assert model.layers[0].self_attn.q_proj.lora_a.shape == (2, 24)
    assert model.layers[0].self_attn.v_proj.lora_a.shape == (5, 24)
    with pytest.raises(ValueError, match="'q_proj' matches no Linear without an adapter"):
        lora.add_adapters(model, targets="q_proj", rngs=nnx.Rngs(0))
    lora.add_adapters(model, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="every Linear has an adapter already"):
        lora.add_adapters(model, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_a_module_of_ones_own_gets_adapters(scheme, tmp_path):
    block: Any = fill(jaxllm.Block(TINY, rngs=nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(0), (1, 5, TINY.hidden_size))
    if scheme is not None:
        quantize(block, scheme)
    plain = block(x)[0]
    names = lora.add_adapters(block, rank=2, rngs=nnx.Rngs(1))
    assert "self_attn.q_proj" in names
    assert len(names) == 7
    stir(block)
    before = block(x)[0]
    assert jnp.max(jnp.abs(before - plain)) > 0.01
    with pytest.raises(ValueError, match="^lora: a PEFT folder is of a Transformer, not of a Bl"):
        lora.save_peft(block, tmp_path)
    lora.merge(block)
    assert type(block.mlp.up_proj) is Linear
    np.testing.assert_allclose(block(x)[0], before, **ROUNDING)


def test_an_adapter_at_the_head():
    model = adapted("dora", targets="lm_head")
    stir(model)
    text = tokens(1, 5)
    before = logits(model, text)
    hidden, _ = model.hidden(text)
    np.testing.assert_allclose(hidden @ model.lm_head.weight.T, before, **ROUNDING)
    lora.merge(model)
    np.testing.assert_allclose(logits(model, text), before, **ROUNDING)


@TWO_KINDS
def test_the_adapter_of_a_head_leaves_logits_in_float32(kind):
    """Of a model in bfloat16, in which they would be rounded to 8 bits."""
    runtime = Runtime("bfloat16", "float32")
    model, text = adapted(kind, runtime, targets="lm_head"), tokens(1, 5)
    stir(model)
    model.lm_head.base.weight.set_value(jnp.zeros_like(model.lm_head.base.weight[...]))
    assert build(SMALL, runtime)(text).dtype == jnp.float32
    found = model(text)
    assert found.dtype == jnp.float32
    assert np.any(found != found.astype(jnp.bfloat16).astype(jnp.float32))


@TWO_KINDS
def test_disabled_is_the_base(kind):
    model, text = adapted(kind), tokens(2, 7)
    stir(model)
    base, before = logits(build(SMALL), text), logits(model, text)
    with lora.disabled(model):
        with lora.disabled(model):
            pass
        np.testing.assert_array_equal(logits(model, text), base)
    np.testing.assert_array_equal(logits(model, text), before)
    with pytest.raises(RuntimeError), lora.disabled(model):
        raise RuntimeError
    np.testing.assert_array_equal(logits(model, text), before)
    lora.set_adapters(model, lora.no_adapters(model))
    np.testing.assert_allclose(logits(model, text), base, **ROUNDING)
    lora.remove_adapters(model)
    np.testing.assert_array_equal(logits(model, text), base)


def test_sets_are_switched_without_compiling_again():
    model, prompt = adapted(), [3, 1, 4]
    sets, results = [lora.adapters(model)], []
    for seed in (1, 2):
        stir(model, seed)
        sets.append(lora.adapters(model))
    generated, compiled, weights = [], [], []
    for arrays in [*sets, sets[1]]:
        lora.set_adapters(model, arrays)
        generated.append(jaxllm.generate(model, None, prompt, max_new_tokens=8).tokens[0])
        compiled.append(jaxllm.compile_count())
        weights.append(jaxllm.flatten(model))
        results.append(logits(model, jnp.asarray([prompt])))
    assert compiled == [compiled[0]] * 4
    assert all(w.structure is weights[0].structure for w in weights)
    assert generated[1] == generated[3] != generated[2]
    np.testing.assert_array_equal(results[1], results[3])
    assert np.max(np.abs(results[1] - results[2])) > 0.1
    # what is not an adapter is the same memory
    names = list(train.parameters(model))
    shared = [a is b for a, b in zip(weights[0].arrays, weights[1].arrays, strict=True)]
    assert sum(shared) == sum(not lora.is_adapter(name) for name in names)


def test_a_set_lies_where_the_one_before_it_lay():
    model = adapted(targets="q_proj")
    where = jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec())
    train.update(model, jax.device_put(train.parameters(model), where))
    lora.set_adapters(model, jax.tree.map(np.asarray, lora.adapters(model)))
    assert all(x.committed and x.sharding == where for x in lora.adapters(model).values())
    train.update(model, jax.device_get(train.parameters(model)))
    for _ in range(2):  # in place of NumPy's arrays, and of some that nobody has put anywhere
        lora.set_adapters(model, lora.adapters(model))
        assert not any(x.committed for x in lora.adapters(model).values())


def test_a_set_must_fit():
    model = adapted(targets="q_proj")
    arrays = lora.adapters(model)
    first = next(iter(arrays))
    with pytest.raises(ValueError, match="0 missing .*, 1 surplus \\['x'\\]"):
        lora.set_adapters(model, arrays | {"x": 0})
    with pytest.raises(ValueError, match="1 missing .*lora_a"):
        lora.set_adapters(model, {k: v for k, v in arrays.items() if k != first})
    with pytest.raises(ValueError, match=r"lora_a has shape \(2, 2\), the model's \(3, 24\)"):
        lora.set_adapters(model, arrays | {first: np.zeros((2, 2))})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_set_of_another_dtype_becomes_float32(dtype):
    model = adapted(targets="q_proj")
    arrays = {name: np.asarray(x).astype(dtype) for name, x in lora.adapters(model).items()}
    lora.set_adapters(model, arrays)
    for name, x in lora.adapters(model).items():
        assert x.dtype == jnp.float32
        np.testing.assert_array_equal(x, arrays[name].astype(np.float32))


def test_only_adapters_are_trained():
    model = adapted("dora", Runtime(remat="full"))
    optimizer = optax.adam(1e-2)
    state = train.init_state(model, optimizer, trainable=lora.is_adapter)
    assert state.params.keys() == lora.adapters(model).keys()
    frozen = {name: np.asarray(x) for name, x in state.frozen.items()}
    step = train.make_train_step(model, optimizer)
    text = np.asarray(tokens(4, 10))
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    losses = []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]
    for name, x in state.frozen.items():
        np.testing.assert_array_equal(x, frozen[name])
    train.update(model, state.all_params)
    total, count = train.make_evaluate(model)(train.parameters(model), [batch])
    assert total / count < losses[-1]


@pytest.mark.slow
@TWO_KINDS
def test_beside_packed_weights(kind, tmp_path):
    model, text = build(SMALL), tokens(2, 7)
    quantize(model, "int4", 8)
    base = logits(model, text)
    lora.add_adapters(model, kind=kind, rank=3, rngs=nnx.Rngs(1))
    np.testing.assert_allclose(logits(model, text), base, **ROUNDING)
    stir(model)
    before = logits(model, text)
    assert np.max(np.abs(before - base)) > 0.5
    optimizer = optax.sgd(0.1)
    state = train.init_state(model, optimizer, trainable=lora.is_adapter)
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    frozen = [name for name in state.frozen if name.endswith("codes")]
    assert frozen
    start = {name: np.asarray(x) for name, x in state.all_params.items()}
    after, _ = train.make_train_step(model, optimizer)(state, batch)
    assert all(np.any(x != start[name]) for name, x in after.params.items())
    train.update(model, {name: jnp.asarray(x) for name, x in start.items()})
    lora.save_peft(model, tmp_path / "adapter")
    same_sets(lora.read_peft(model, tmp_path / "adapter"), lora.adapters(model))
    with pytest.raises(
        ValueError,
        match="save: a checkpoint has no .*jaxllm.lora.merge makes",
    ):
        jaxllm.save(model, None, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    lora.merge(model)
    assert train.parameters(model).keys() == train.parameters(build(SMALL)).keys()
    np.testing.assert_allclose(logits(model, text), before, **ROUNDING)
    jaxllm.save(model, None, tmp_path / "whole")
    other, _ = jaxllm.load(tmp_path / "whole", "float32")
    np.testing.assert_array_equal(logits(other, text), logits(model, text))


# ------------------------------------------------------------------------------- PEFT folders


def same_sets(a, b) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


BITNET = dataclasses.replace(
    SMALL,
    hidden_size=32,
    intermediate_size=64,
    model_type="bitnet",
    hidden_act="relu2",
    sub_norms=True,
    bit_linear=True,
)


@pytest.mark.parametrize("packed", [False, True])
def test_beside_ternary_layers(packed, tmp_path):
    """In training and packed: the base's product and the adapter's, and the first is frozen."""
    model = build(BITNET)
    if packed:
        quantize(model, "ternary")
    base = logits(model, tokens(2, 9))
    layer = model.layers[0].mlp.up_proj
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 32)), jnp.float32)
    alone = np.asarray(layer(x))
    lora.add_adapters(model, rank=3, rngs=nnx.Rngs(1))
    np.testing.assert_allclose(logits(model, tokens(2, 9)), base, **ROUNDING)
    stir(model)
    ours = model.layers[0].mlp.up_proj
    a, b = (np.asarray(part[...]) for part in (ours.lora_a, ours.lora_b))
    np.testing.assert_allclose(ours(x), alone + 2 * np.asarray(x) @ a.T @ b.T, rtol=0, atol=2e-5)
    stirred = logits(model, tokens(2, 9))
    lora.save_peft(model, tmp_path)
    other = build(BITNET)
    lora.load_peft(other, tmp_path)
    np.testing.assert_allclose(logits(other, tokens(2, 9)), stirred, rtol=0, atol=1e-4)

    optimizer = optax.adam(1e-2)
    state = train.init_state(model, optimizer, trainable=lora.is_adapter)
    frozen = jax.tree.map(np.asarray, state.frozen)
    step = train.make_train_step(model, optimizer)
    text = tokens(2, 9)
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    losses = []
    for _ in range(12):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]
    for name, weight in frozen.items():
        np.testing.assert_array_equal(state.frozen[name], weight)


@pytest.mark.parametrize("packed", [False, True])
def test_a_sum_with_a_ternary_layer_is_refused_and_nothing_is_changed(packed):
    model = build(BITNET)
    if packed:
        quantize(model, "ternary")
    lora.add_adapters(model, targets="down_proj|lm_head", rngs=nnx.Rngs(1))
    with pytest.raises(NotImplementedError, match="^lora: layers.0.mlp.down_proj is ternary, and"):
        lora.merge(model)
    assert len(lora.adapters(model)) == 4


def test_dora_and_what_trains_a_ternary_layer_are_not_both():
    model = build(BITNET)
    with pytest.raises(NotImplementedError, match="^lora: kind 'dora' beside a ternary layer in t"):
        lora.add_adapters(model, kind="dora", targets="down_proj|lm_head", rngs=nnx.Rngs(1))
    assert not lora.adapters(model)


@KINDS
def test_a_peft_folder_comes_back(kind, tmp_path):
    model = adapted(kind, targets="(q|o|down)_proj")
    lora.add_adapters(model, kind=kind, targets="lm_head", rank=5, alpha=2.5, rngs=nnx.Rngs(2))
    stir(model)
    lora.save_peft(model, tmp_path / "out", base_model_name="some/model")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "lm_head", "o_proj", "q_proj"]
    assert (config["r"], config["lora_alpha"]) == (3, 6)
    assert config["rank_pattern"] == {"lm_head": 5}
    assert config["alpha_pattern"] == {"lm_head": 2.5}
    assert (config["use_rslora"], config["use_dora"]) == (kind == "rslora", kind == "dora")
    assert config["base_model_name_or_path"] == "some/model"
    names = load_file(tmp_path / "out/adapter_model.safetensors").keys()
    assert "base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight" in names
    assert "base_model.model.lm_head.lora_A.weight" in names
    other = build(SMALL)
    lora.load_peft(other, tmp_path / "out")
    same_sets(lora.adapters(other), lora.adapters(model))
    np.testing.assert_array_equal(logits(other, tokens(1, 6)), logits(model, tokens(1, 6)))


def test_only_some_layers_are_named_in_full(tmp_path):
    model = adapted(config=TINY, targets=["layers.1.self_attn.q_proj", "k_proj"])
    lora.save_peft(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["k_proj", "model.layers.1.self_attn.q_proj"]


def test_sets_of_other_ranks_and_kinds_share_the_slots(tmp_path):
    text, wanted = tokens(1, 6), []
    for i, (kind, options) in enumerate(
        [
            ("lora", {"targets": "q_proj", "rank": 2, "alpha": 5}),
            ("rslora", {"rank": 4}),
            ("dora", {"rank": 1, "alpha": 1, "targets": "mlp..*"}),
        ]
    ):
        model = adapted(kind, **options)
        stir(model, i)
        wanted.append(logits(model, text))
        lora.save_peft(model, tmp_path / str(i))
    host = adapted("dora", rank=4, alpha=4)
    sets = [lora.read_peft(host, tmp_path / str(i)) for i in range(3)]
    structure = jaxllm.flatten(host).structure
    for arrays, result in zip(sets, wanted, strict=True):
        lora.set_adapters(host, arrays)
        np.testing.assert_allclose(logits(host, text), result, rtol=0, atol=5e-5)
        assert jaxllm.flatten(host).structure is structure
    lora.load_peft(host, tmp_path / "1")
    np.testing.assert_allclose(logits(host, text), wanted[1], rtol=0, atol=5e-5)
    for host, i, words in (
        (adapted("dora", rank=2), 1, "has rank 4, but the model's slot 2; give add_ad"),
        (adapted("lora"), 2, "has DoRA, but the model's slot is lora"),
        (adapted("lora", targets="v_proj"), 0, "1 modules of the folder have no slot in the model"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            lora.load_peft(host, tmp_path / str(i))


def change(folder, tensors=None, **config):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if tensors is not None:
        file = folder / "adapter_model.safetensors"
        save_file(tensors(load_file(file)), file)


def test_lora_and_rslora_share_a_folder(tmp_path):
    """As LoRA, each with the alpha that gives its scale."""
    model, text = adapted("rslora", targets="q_proj", rank=4), tokens(1, 6)
    lora.add_adapters(model, targets="o_proj", rank=4, rngs=nnx.Rngs(2))
    stir(model)
    lora.save_peft(model, tmp_path)
    other = build(SMALL)
    lora.load_peft(other, tmp_path)
    np.testing.assert_allclose(logits(other, text), logits(model, text), **ROUNDING)


def test_dora_may_have_the_scale_of_rslora(tmp_path):
    model, text = adapted("dora", targets="q_proj", rank=4, alpha=2), tokens(1, 6)
    stir(model)
    lora.save_peft(model, tmp_path)
    before = logits(model, text)
    change(tmp_path, use_rslora=True)
    other = build(SMALL)
    lora.load_peft(other, tmp_path)
    same_sets(lora.adapters(other), lora.adapters(model))  # the scale alone is another
    model.layers[0].self_attn.q_proj.alpha *= 4**0.5
    np.testing.assert_allclose(logits(other, text), logits(model, text), **ROUNDING)
    assert np.max(np.abs(logits(other, text) - before)) > 0.01


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "config", "error", "words"),
    [
        (None, {"lora_bias": True}, NotImplementedError, "not supported: lora_bias True"),
        (None, {"bias": "all"}, NotImplementedError, "not supported: bias 'all'"),
        (None, {"modules_to_save": ["lm_head"]}, NotImplementedError, "modules_to_save"),
        (None, {"init_lora_weights": "pissa"}, NotImplementedError, "init_lora_weights 'pissa'"),
        (None, {"peft_type": "IA3"}, NotImplementedError, "peft_type 'IA3'"),
        (None, {"of_the_future": 1}, NotImplementedError, "of_the_future 1"),
        (None, {"r": None}, ValueError, "r must be a positive number, got None"),
        (None, {"rank_pattern": [1]}, ValueError, "rank_pattern must be an object"),
        (None, {"rank_pattern": {"q_proj": None}}, ValueError,
         "rank_pattern of 'q_proj' must be a positive number, got None"),
        (None, {"alpha_pattern": {"(q_proj": 8}}, ValueError,
         "alpha_pattern has '(q_proj', which is no regular expression: "),
        (None, {"r": 7}, ValueError, "but adapter_config.json gives it rank 7"),
        (None, {"use_dora": True}, ValueError, "with use_dora True it must have a, b, magnitude"),
        (lambda t: {k.replace("0.self_attn.q", "0.attn.q"): v for k, v in t.items()}, {},
         ValueError, "the model has no Linear for model.layers.0.attn.q_proj; it has lm_head"),
        (lambda t: t | {"x.lora_embedding_A": np.ones(1)}, {}, NotImplementedError,
         "1 tensors are not lora_A, lora_B or lora_magnitude_vector of a Linear"),
        (lambda t: t | {f"{Q}.lora_A.weight": np.ones((3, 5))}, {}, ValueError,
         "but the model's weight is [32, 24]"),
        (lambda t: t | {f"{Q}.lora_A.weight": np.ones((4, 24))}, {}, ValueError,
         "which are no [r, in] and [out, r]"),
    ],
)  # fmt: skip
def test_folders_that_are_refused(tmp_path, tensors, config, error, words):
    lora.save_peft(adapted(targets="q_proj"), tmp_path)
    change(tmp_path, tensors, **config)
    model = build(SMALL)
    with pytest.raises(error, match=re.escape(words)) as raised:
        lora.load_peft(model, tmp_path)
    assert "\n" not in str(raised.value)
    assert not lora.adapters(model)


def test_a_fused_model_is_told_so(tmp_path):
    lora.save_peft(adapted(), tmp_path)
    model = build(SMALL)
    jaxllm.fuse(model)
    with pytest.raises(ValueError, match=r"^lora: .* is several projections joined by jaxllm.fuse"):
        lora.load_peft(model, tmp_path)


def test_what_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no adapter_config.json; give a folder"):
        lora.load_peft(build(SMALL), tmp_path)
    with pytest.raises(ValueError, match="save_peft: the model has no adapters"):
        lora.save_peft(build(SMALL), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file; give a folder"):
        lora.save_peft(adapted(), tmp_path / "file")
    model = adapted(targets="q_proj")
    lora.add_adapters(model, targets="k_proj", kind="dora", rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match="some modules have DoRA and some have not"):
        lora.save_peft(model, tmp_path / "out")


def phi3(tmp_path):
    return jaxllm.load(write_checkpoint(tmp_path / "phi3", read_golden("phi3")), "float32")[0]


@KINDS
def test_a_fused_family_has_one_adapter_of_the_sum_of_ranks(kind, tmp_path):
    model = phi3(tmp_path)
    lora.add_adapters(model, kind=kind, rank=2, rngs=nnx.Rngs(0))
    stir(model)
    lora.save_peft(model, tmp_path / "out")
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]
    tensors = load_file(tmp_path / "out/adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight"].shape[0] == 6
    other = phi3(tmp_path)
    lora.load_peft(other, tmp_path / "out")
    text = tokens(1, 8) % other.config.vocab_size
    np.testing.assert_allclose(logits(other, text), logits(model, text), rtol=0, atol=5e-5)
    lora.save_peft(other, tmp_path / "again")  # parts that share a are one module as they came
    same_sets(load_file(tmp_path / "again/adapter_model.safetensors"), tensors)


def test_a_part_of_a_fused_module_alone(tmp_path):
    model = phi3(tmp_path)
    lora.add_adapters(model, targets="v_proj", rank=2, rngs=nnx.Rngs(0))
    stir(model)
    lora.save_peft(model, tmp_path / "out")
    other = phi3(tmp_path)
    lora.load_peft(other, tmp_path / "out")
    text = tokens(1, 8) % other.config.vocab_size
    np.testing.assert_allclose(logits(other, text), logits(model, text), rtol=0, atol=5e-5)
    model = phi3(tmp_path)
    lora.add_adapters(model, targets="v_proj", kind="dora", rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match="as one model.layers.0.self_attn.qkv_proj"):
        lora.save_peft(model, tmp_path / "dora")
    assert not (tmp_path / "dora").exists()
