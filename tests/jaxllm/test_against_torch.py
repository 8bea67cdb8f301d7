"""Full fine-tuning beside PyTorch: the same tiny model, the same data, AdamW in float32."""

import jax
import numpy as np
import optax
import pytest
import tiny_models
from tiny_models import TINY, build

from jaxllm import train

STEPS = 50
RATE, DECAY, CLIP = 3e-3, 0.1, 1.0


def batch(seed: int) -> dict[str, np.ndarray]:
    """Four rows with answers of other lengths each; what is asked is not counted."""
    rng = np.random.default_rng(seed)
    start, stride = rng.integers(0, TINY.vocab_size, (4, 1)), rng.integers(1, 4, (4, 1))
    words = ((start + stride * np.arange(13)) % TINY.vocab_size).astype(np.int32)
    targets = words[:, 1:].copy()
    for row in range(4):
        targets[row, : 1 + 2 * row] = train.IGNORE
    return {"tokens": words[:, :-1], "targets": targets}


def ours(weights: dict[str, np.ndarray], micro_batches: int) -> tuple[list[float], list[float]]:
    model = build(TINY)
    train.update(model, {name: jax.numpy.asarray(x) for name, x in weights.items()})
    matrices = {name: x.ndim > 1 for name, x in weights.items()}
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP), optax.adamw(RATE, weight_decay=DECAY, mask=matrices)
    )
    state = train.init_state(model, optimizer)
    step = train.make_train_step(model, optimizer, micro_batches=micro_batches)
    losses, norms = [], []
    for i in range(STEPS):
        state, metrics = step(state, batch(i))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    return losses, norms


def theirs(weights: dict[str, np.ndarray], transformers) -> tuple[list[float], list[float]]:
    import torch

    config = transformers.LlamaConfig(
        vocab_size=TINY.vocab_size,
        hidden_size=TINY.hidden_size,
        intermediate_size=TINY.intermediate_size,
        num_hidden_layers=TINY.num_hidden_layers,
        num_attention_heads=TINY.num_attention_heads,
        num_key_value_heads=TINY.num_key_value_heads,
        head_dim=TINY.head_dim,
        rms_norm_eps=TINY.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": TINY.rope.rope_theta},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).float()
    named = {name: f"model.{name}" if name != "lm_head.weight" else name for name in weights}
    missing = model.load_state_dict(
        {named[name]: torch.from_numpy(x.copy()) for name, x in weights.items()}, strict=False
    )
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    losses, norms = [], []
    for i in range(STEPS):
        arrays = {name: torch.from_numpy(x).long() for name, x in batch(i).items()}
        logits = model(input_ids=arrays["tokens"]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), arrays["targets"].flatten(), ignore_index=train.IGNORE
        )
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms


@pytest.mark.reference
@pytest.mark.slow
def test_full_fine_tuning_is_that_of_torch(transformers):
    """Losses within 1e-4 over 50 steps, as the issue asks; with micro-batches too, which torch
    does not need here.
    """
    weights = tiny_models.weights(build(TINY))
    expected, expected_norms = theirs(weights, transformers)
    assert expected[-1] < expected[0] - 1  # it learns
    assert max(expected_norms) > CLIP  # it was clipped
    for parts in (1, 2):
        losses, norms = ours(weights, parts)
        print(f"{parts} parts: {np.max(np.abs(np.subtract(losses, expected))):.2e} apart")
        np.testing.assert_allclose(losses, expected, atol=1e-4, rtol=0)
        np.testing.assert_allclose(norms, expected_norms, rtol=1e-3)
    other = {**weights, "norm.weight": weights["norm.weight"] * np.float32(1.001)}
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        np.testing.assert_allclose(ours(other, 1)[0], expected, atol=1e-4, rtol=0)
