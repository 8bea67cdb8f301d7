"""DPO training against TRL's formula, written out in torch around transformers' model."""

import copy

import numpy as np
import optax
import pytest
from flax import nnx
from tiny_checkpoints import read_golden, write_checkpoint

import jaxllm
from jaxllm import dpo, lora, train
from jaxllm.data import Example, PreferenceExample, preference_batch

pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
LENGTH, PAIRS, STEPS, DECAY = 14, 4, 50, 0.1
RATE = {"sigmoid": 1e-3, "ipo": 1e-4}  # small enough that no loss jumps
BETA = {"sigmoid": 0.1, "ipo": 0.5}  # both losses begin near 1


def make_pairs(vocab_size: int, seed: int) -> list[PreferenceExample]:
    rng = np.random.default_rng(seed)

    def answer(prompt):
        text = np.concatenate([prompt, rng.integers(0, vocab_size, rng.integers(3, 11))])
        targets = text[1:].astype(np.int32)
        targets[: len(prompt) - 1] = train.IGNORE
        return Example(text[:-1].astype(np.int32), targets)

    prompts = rng.integers(0, vocab_size, (PAIRS, 4))
    return [PreferenceExample(answer(prompt), answer(prompt)) for prompt in prompts]


def their_log_probs(model, batch):
    import torch

    tokens, targets = (
        torch.from_numpy(batch[key].astype(np.int64)) for key in ("tokens", "targets")
    )
    mask = torch.from_numpy((batch["segment_ids"] != 0).astype(np.int64))
    found = model(tokens, attention_mask=mask, use_cache=False).logits
    loss_mask = targets != train.IGNORE
    labels = torch.where(loss_mask, targets, 0)
    each = torch.gather(found.log_softmax(-1), 2, labels[..., None]).squeeze(2)
    return (each * loss_mask).sum(-1), loss_mask.sum(-1)


def their_curve(folder, batches, kind):
    import torch
    import transformers
    from torch.nn.functional import logsigmoid

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype="float32"
    ).eval()
    frozen = copy.deepcopy(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=RATE[kind], weight_decay=DECAY)
    curve = []
    for i in range(STEPS):
        batch = batches[i % len(batches)]
        with torch.no_grad():
            reference, _ = their_log_probs(frozen, batch)
        sums, counts = their_log_probs(model, batch)
        if kind == "ipo":  # TRL: all_logps / loss_mask.sum(-1), for both models
            sums, reference = sums / counts, reference / counts
        logratios = sums[:PAIRS] - sums[PAIRS:]
        logits = logratios - (reference[:PAIRS] - reference[PAIRS:])
        beta = BETA[kind]
        each = {"sigmoid": -logsigmoid(beta * logits), "ipo": (logits - 1 / (2 * beta)) ** 2}
        loss = each[kind].mean()
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        curve.append(loss.item())
    return curve


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("llama"), read_golden("llama"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", dpo.KINDS)
def test_training_goes_as_by_trls_formula(folder, transformers, kind):
    """50 steps of AdamW on all weights: the losses agree to 1e-4."""
    del transformers
    model, _ = jaxllm.load(folder, "float32")
    batches = []
    for seed in range(3):
        pairs = make_pairs(model.config.vocab_size, seed)
        reference = dpo.cache_reference(model, pairs, pairs=PAIRS, length=LENGTH)
        batches.append(preference_batch(pairs, LENGTH, reference))
    optimizer = optax.adamw(RATE[kind], weight_decay=DECAY)
    state = train.init_state(model, optimizer)
    step = train.make_train_step(model, optimizer, dpo.make_loss(beta=BETA[kind], kind=kind))
    ours = []
    for i in range(STEPS):
        state, metrics = step(state, batches[i % 3])
        ours.append(float(metrics["loss"]))
    curve = their_curve(folder, batches, kind)
    print(f"{kind}: {curve[0]:.4f} to {curve[-1]:.4f}, {np.max(np.abs(np.subtract(ours, curve)))}")
    np.testing.assert_allclose(ours, curve, atol=1e-4, rtol=0)
    assert curve[-1] < 0.7 * curve[0]


@pytest.mark.slow
def test_the_base_below_the_adapter_gives_the_curve_of_the_cache(folder, transformers):
    """LoRA both ways: what is left is rounding of two programs."""
    del transformers
    curves = []
    for cached in (False, True):
        model, _ = jaxllm.load(folder, "float32")
        pairs = make_pairs(model.config.vocab_size, 0)
        reference = dpo.cache_reference(model, pairs, pairs=PAIRS, length=LENGTH)
        batch = preference_batch(pairs, LENGTH, reference if cached else None)
        lora.add_adapters(model, rank=4, rngs=nnx.Rngs(0))
        optimizer = optax.adamw(1e-3, weight_decay=DECAY)
        state = train.init_state(model, optimizer, trainable=lora.is_adapter)
        step = train.make_train_step(model, optimizer, dpo.make_loss())
        curves.append([])
        for _ in range(20):
            state, metrics = step(state, batch)
            curves[-1].append(float(metrics["loss"]))
    np.testing.assert_allclose(*curves, atol=1e-4)
    assert curves[0][-1] < 0.5
