"""The training benchmark, small and on the CPU: ours and torch's model learn the same."""

import dataclasses
import importlib.util

import jax
import pytest

from benchmarks import torch_training, training
from jaxllm import train
from jaxllm.flops import flops_a_token, matrix_weights

SMALL = dataclasses.replace(
    training.LLAMA_1B,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    layer_types=(),
)


def test_the_model_has_1_3_billion_parameters():
    _, (state, _) = training.program(training.LLAMA_1B, "none", 1)
    total = sum(x.size for x in jax.tree.leaves(state.params))
    vectors = sum(x.size for x in state.params.values() if len(x.shape) == 1)
    table = state.params["embed_tokens.weight"].size
    assert total == pytest.approx(1.345e9, rel=1e-3)
    assert matrix_weights(training.LLAMA_1B) == total - table - vectors
    assert training.ROWS * training.LENGTH == 65536


def test_utilisation_is_a_share_of_the_peak():
    """1.28e9 parameters: 7.68 GFLOP a token, and 0.60 of attention."""
    flops = flops_a_token(training.LLAMA_1B, 1024)
    assert flops == 6 * matrix_weights(training.LLAMA_1B) + 6 * 24 * 2048 * 2048
    assert flops / 1e9 == pytest.approx(8.28, abs=0.01)
    assert training.utilisation(training.LLAMA_1B, 2048, 989e12 / flops) == pytest.approx(1.0)


def test_a_small_model_is_measured_here():
    row = training.measure(SMALL, "full", 2, rows=4, length=16, steps=2)
    assert row["losses"][-1] < row["losses"][0] == pytest.approx(4.16, abs=0.05)  # log 64
    assert row["tokens"] == 64
    assert row["tokens_per_s"] == pytest.approx(64 / row["step_s"])
    assert row["temporary_bytes"] > 0
    assert row["planned_bytes"] > row["temporary_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"policy": "fp8"}, {"rank": 2}])
def test_other_steps_are_measured_too(options):
    row = training.measure(SMALL, "none", 2, rows=4, length=16, steps=2, **options)
    assert row["losses"][-1] < row["losses"][0] == pytest.approx(4.16, abs=0.05)


def test_the_tasks_have_fp8_and_adapters_and_the_table_what_was_planned():
    assert {"train/fp8, 4 parts", "train/lora-8b, 8 parts"} <= dict(training.tasks()).keys()
    row = {"step_s": 1.0, "tokens_per_s": 1.0, "mfu": 0.5, "peak_bytes": 3e9}
    text = "\n".join(training.lines({"new": {**row, "planned_bytes": 2e9}, "old": row}, str))
    assert "|  | 2.0 | 3.0 |" in text
    assert "|  |  | 3.0 |" in text
    text = "\n".join(training.lines({"full": row, "x": {"failed": "it"}}, lambda row: str(row)))
    assert "| full |" in text
    assert "| x | {'failed': 'it'}" in text


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch not installed")
def test_torch_trains_the_same_model():
    row = torch_training.measure(
        False, False, config=SMALL, rows=4, length=16, steps=2, device="cpu"
    )
    assert row["losses"][-1] < row["losses"][0] == pytest.approx(4.16, abs=0.05)
    made = torch_training.model(SMALL, "cpu")
    count = sum(p.numel() for p in made.parameters())
    _, (state, _) = training.program(SMALL, "none", 1)
    assert isinstance(state, train.TrainState)
    assert count == sum(x.size for x in state.params.values())
