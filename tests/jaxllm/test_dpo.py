"""DPO's losses: the formulas, both references, pairs in batches; TRL's formula (`reference`)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_models import TINY, build, logits

from jaxllm import dpo, fp8, lora, train
from jaxllm.config import Runtime
from jaxllm.data import Example, PreferenceExample, PreferenceLoader, preference_batch
from jaxllm.model import Transformer
from jaxllm.quantize import quantize

SMALL = dataclasses.replace(TINY, num_hidden_layers=1, layer_types=TINY.layer_types[:1])
LENGTH = 12
KINDS = pytest.mark.parametrize("kind", dpo.KINDS)


def make_pairs(count: int = 4, seed: int = 0) -> list[PreferenceExample]:
    """Prompts of 3 tokens, answers of 2 to 9."""
    rng = np.random.default_rng(seed)

    def answer(prompt):
        text = np.concatenate([prompt, rng.integers(0, TINY.vocab_size, rng.integers(2, 10))])
        targets = text[1:].copy()
        targets[: len(prompt) - 1] = train.IGNORE
        return Example(text[:-1].astype(np.int32), targets.astype(np.int32))

    prompts = rng.integers(0, TINY.vocab_size, (count, 3))
    return [PreferenceExample(answer(prompt), answer(prompt)) for prompt in prompts]


def measure(loss, model, batch) -> tuple[float, int]:
    return train.make_evaluate(model, loss)(train.parameters(model), [batch])


def oracle_sums(model, batch):
    """Row sums of log-probabilities in float64, and counts."""
    x = logits(model, batch["tokens"], batch["positions"], batch["segment_ids"]).astype(np.float64)
    x = x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))
    counted = batch["targets"] != train.IGNORE
    found = np.take_along_axis(x, np.where(counted, batch["targets"], 0)[..., None], -1)[..., 0]
    return np.sum(np.where(counted, found, 0), axis=-1), np.sum(counted, axis=-1)


def oracle(model, batch, reference, *, beta, kind, label_smoothing=0.0):
    sums, counts = oracle_sums(model, batch)
    ratios = sums - reference
    if kind == "ipo":
        ratios = ratios / counts
    pairs = len(sums) // 2
    z = ratios[:pairs] - ratios[pairs:]
    if kind == "ipo":
        return np.sum((z - 1 / (2 * beta)) ** 2)
    right, wrong = np.log1p(np.exp(-beta * z)), np.log1p(np.exp(beta * z))
    return np.sum((1 - label_smoothing) * right + label_smoothing * wrong)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "sigmoid", "beta": 0.1},
        {"kind": "sigmoid", "beta": 0.5, "label_smoothing": 0.2},
        {"kind": "ipo", "beta": 0.3},
    ],
)
def test_the_loss_is_the_formula(options):
    model, batch = build(SMALL), preference_batch(make_pairs(), LENGTH)
    reference = np.random.default_rng(1).normal(-9, 2, 8).astype(np.float32)
    total, count = measure(dpo.make_loss(**options), model, batch | {"reference": reference})
    assert count == 4
    wanted = oracle(model, batch, reference, **options)
    np.testing.assert_allclose(total, wanted, rtol=1e-5)  # float32 sums of a dozen logarithms
    other = oracle(model, batch, reference + np.arange(8), **options)
    assert abs(other - wanted) > 1e-3 * wanted


@KINDS
def test_accuracy_and_margin_are_the_formula(kind):
    """Of answers of other lengths, so that means and sums over tokens disagree."""
    model, batch = build(SMALL), preference_batch(make_pairs(), LENGTH)
    sums, counts = oracle_sums(model, batch)
    reference = sums - np.array([3, 1, -1, 2, 2, 2, -3, 1.9]) * np.sqrt(counts)
    ratios = (sums - reference) / (counts if kind == "ipo" else 1)
    z = ratios[:4] - ratios[4:]
    assert 0 < np.sum(z > 0) < 4
    batch["reference"] = reference.astype(np.float32)
    assert measure(dpo.make_accuracy(kind=kind), model, batch) == (np.sum(z > 0), 4)
    total, count = measure(dpo.make_margin(beta=0.3, kind=kind), model, batch)
    assert count == 4
    # Differences of float32 sums of some 30 nats
    np.testing.assert_allclose(total, 0.3 * np.sum(z), atol=1e-4)


def test_padding_pairs_are_not_counted():
    pairs, model = make_pairs(3), build(SMALL)
    loss = dpo.make_loss()
    results = []
    for filled in (pairs, [*pairs, None]):
        rows = len(filled)
        reference = np.zeros((rows, 2), np.float32)
        reference[:3] = -5
        results.append(measure(loss, model, preference_batch(filled, LENGTH, reference)))
    (a, count), (b, other) = results
    assert count == other == 3
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_answers_that_are_alike_win_nothing():
    pairs = [PreferenceExample(pair.chosen, pair.chosen) for pair in make_pairs()]
    batch = preference_batch(pairs, LENGTH, np.zeros((4, 2), np.float32))
    assert measure(dpo.make_accuracy(), build(SMALL), batch) == (0, 4)


def test_log_probs_are_of_capped_logits():
    model = build(dataclasses.replace(SMALL, final_logit_softcapping=2.0))
    batch = preference_batch(make_pairs(), LENGTH)
    ours = nnx.jit(dpo.log_probs)(model, batch)
    np.testing.assert_allclose(ours, oracle_sums(model, batch)[0], rtol=1e-5)
    plain = oracle_sums(build(SMALL), batch)[0]
    assert np.max(np.abs(plain - ours)) > 1


@KINDS
def test_the_base_below_the_adapter_is_the_reference(kind):
    pairs, model, told = make_pairs(), build(SMALL), []
    cached = dpo.cache_reference(
        model, pairs, pairs=3, length=LENGTH, progress=lambda *counts: told.append(counts)
    )
    assert told == [(3, 4), (4, 4)]
    batch = preference_batch(pairs, LENGTH)
    sums = oracle_sums(model, batch)[0].reshape(2, 4).T
    np.testing.assert_allclose(cached, sums, rtol=1e-5)
    lora.add_adapters(model, rank=2, rngs=nnx.Rngs(0))
    loss = dpo.make_loss(kind=kind)
    # at first the model is its own reference
    at_first = measure(loss, model, batch)[0] / 4
    np.testing.assert_allclose(at_first, {"sigmoid": np.log(2), "ipo": 25}[kind], rtol=1e-6)
    lora.set_adapters(model, {k: v + 0.1 for k, v in lora.adapters(model).items()})
    by_base = measure(loss, model, batch)[0]
    by_cache = measure(loss, model, batch | {"reference": cached.T.reshape(-1)})[0]
    assert abs(by_base - 4 * at_first) > 1e-3
    np.testing.assert_allclose(by_base, by_cache, rtol=1e-5)


def test_a_model_learns_what_is_preferred():
    pairs, model = make_pairs(8), build(SMALL)
    lora.add_adapters(model, rank=4, rngs=nnx.Rngs(0))
    optimizer = optax.adam(1e-2)
    state = train.init_state(model, optimizer, trainable=lora.is_adapter)
    step = train.make_train_step(model, optimizer, dpo.make_loss(beta=0.5))
    batch = preference_batch(pairs, LENGTH)
    losses = []
    for _ in range(15):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        assert metrics["tokens"] == 8
    np.testing.assert_allclose(losses[0], np.log(2), rtol=1e-5)
    assert losses[-1] < 0.1
    right, count = train.make_evaluate(model, dpo.make_accuracy())(state.all_params, [batch])
    margin, _ = train.make_evaluate(model, dpo.make_margin(beta=0.5))(state.all_params, [batch])
    assert right == count == 8
    assert margin / count > 2


def test_micro_batches_keep_pairs_together():
    pairs = make_pairs(4)
    batches, results = preference_batch(pairs, LENGTH), []
    for parts in (1, 2):
        model = build(SMALL)
        cached = dpo.cache_reference(model, pairs, pairs=4, length=LENGTH)
        optimizer = optax.sgd(0.5)
        step = train.make_train_step(model, optimizer, dpo.make_loss(), micro_batches=parts)
        batch = batches | {"reference": cached.T.reshape(-1) + np.arange(8, dtype=np.float32)}
        results.append(step(train.init_state(model, optimizer), batch))
    (whole, a), (split, b) = results
    np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-6)
    for name in whole.params:
        np.testing.assert_allclose(whole.params[name], split.params[name], atol=1e-6)


def test_the_loader_carries_the_reference():
    pairs, model = make_pairs(5), build(SMALL)
    cached = dpo.cache_reference(model, pairs, pairs=2, length=LENGTH)
    loader = PreferenceLoader(pairs, pairs=2, length=LENGTH, seed=0, epochs=1, reference=cached)
    with loader:
        evaluate = train.make_evaluate(model, dpo.make_loss())
        total, count = evaluate(train.parameters(model), loader)
    assert count == 5
    np.testing.assert_allclose(total, 5 * np.log(2), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "hinge"}, "dpo: kind 'hinge' is not one of sigmoid, ipo"),
        ({"beta": 0}, "dpo: beta must be positive and finite, got 0"),
        ({"beta": float("inf")}, "dpo: beta must be positive and finite, got inf"),
        ({"beta": "a"}, "dpo: beta must be positive and finite, got 'a'"),
        ({"label_smoothing": None}, "dpo: label_smoothing must be in [0, 0.5), got None"),
        ({"label_smoothing": 0.5}, "dpo: label_smoothing must be in [0, 0.5), got 0.5"),
        ({"kind": "ipo", "label_smoothing": 0.1}, "dpo: label_smoothing is for kind 'sigmoid'"),
    ],
)
def test_options_that_do_not_exist(options, words):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        dpo.make_loss(**options)
    assert str(raised.value) == words


def test_batches_that_will_not_do():
    model, batch = build(SMALL), preference_batch(make_pairs(2), LENGTH)
    for wrong in (np.float32(0), np.zeros((2, 2), np.float32)):
        with pytest.raises(ValueError, match=r"reference must have shape \(4,\), a number a row"):
            dpo.make_loss()(model, {**batch, "reference": wrong})
    with pytest.raises(ValueError, match="the batch has no 'reference', and the model no adapters"):
        dpo.make_loss()(model, batch)
    with pytest.raises(ValueError, match="dpo: 3 rows are no pairs"):
        dpo.make_loss()(model, {k: jnp.asarray(v[:3]) for k, v in batch.items()})
    with pytest.raises(ValueError, match="^dpo: the batch has no targets$"):
        dpo.make_loss()(model, {k: v for k, v in batch.items() if k != "targets"})
    for wrong in (0, 2.0):
        words = f"^dpo: pairs must be an integer of at least 1, got {wrong}$"
        with pytest.raises(ValueError, match=words):
            dpo.cache_reference(model, make_pairs(2), pairs=wrong, length=LENGTH)
    with pytest.raises(ValueError, match="data: [0-9]+ tokens do not fit into a row of 1"):
        dpo.cache_reference(model, make_pairs(2), pairs=2, length=1)


@pytest.mark.parametrize("tied", [False, True])
def test_of_a_packed_head_no_array_of_all_logits_is_made(tied, monkeypatch):
    model = build(dataclasses.replace(SMALL, tie_word_embeddings=tied))
    quantize(model, "int4", 8, head="int4")
    batch = preference_batch(make_pairs(), LENGTH)
    sums = oracle_sums(model, batch)[0]
    monkeypatch.setattr(Transformer, "head", None)  # which makes them
    ours = nnx.jit(dpo.log_probs)(model, batch)
    np.testing.assert_allclose(ours, sums, rtol=1e-4)  # as below


def test_log_probs_run_as_the_runtime_says(monkeypatch):
    seen = []

    def watched(hidden, head, targets, *, implementation, **options):
        seen.append(implementation)
        return jnp.zeros(targets.shape)

    monkeypatch.setattr(dpo.ops, "linear_log_probs", watched)
    runtime = Runtime(implementation={"linear": "xla"})
    dpo.log_probs(build(SMALL, runtime), preference_batch(make_pairs(), LENGTH))
    assert seen == [runtime.implementation]


@pytest.mark.parametrize("head", ["fp8", "adapter"])
def test_a_head_that_is_more_than_a_matrix(head):
    model, batch = build(SMALL), preference_batch(make_pairs(), LENGTH)
    if head == "fp8":
        fp8.use_fp8(model, keep=())
    else:
        lora.add_adapters(model, rank=2, targets="lm_head", rngs=nnx.Rngs(0))
        params = train.parameters(model)
        train.update(model, {**params, "lm_head.lora_b": params["lm_head.lora_b"] + 1})
    graph, state = nnx.split(model)
    sums = jax.jit(lambda state, batch: dpo.log_probs(nnx.merge(graph, state), batch))
    ours = sums(state, batch)
    # Of log-probabilities of 3 a token in float32; fp8 rounds alike on both sides
    np.testing.assert_allclose(ours, oracle_sums(model, batch)[0], rtol=1e-4)
    # A target outside the vocabulary shows, as it does where no logits are made
    wrong = batch["targets"].copy()
    wrong[1, 5] = -1
    found = np.isnan(sums(state, batch | {"targets": wrong}))
    np.testing.assert_array_equal(found, np.arange(len(found)) == 1)
