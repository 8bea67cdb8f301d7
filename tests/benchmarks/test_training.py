"""The training benchmark, small and on the CPU: ours and torch's model learn the same."""

import dataclasses
import importlib.machinery
import importlib.util

import jax
import pytest

from benchmarks import jla_training, torch_training, training
from benchmarks.models import LLAMA_1B
from jaxllm import train
from jaxllm.flops import flops_a_token, matrix_weights

SMALL = dataclasses.replace(
    LLAMA_1B,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    layer_types=(),
)

RUN = {"config": SMALL, "rows": 4, "length": 16, "steps": 2}
SMALL_RUN = {**RUN, "device": "cpu"}  # torch's


def test_the_model_has_1_3_billion_parameters():
    _, (state, _) = training.program(LLAMA_1B, "none", 1)
    total = sum(x.size for x in jax.tree.leaves(state.params))
    vectors = sum(x.size for x in state.params.values() if len(x.shape) == 1)
    table = state.params["embed_tokens.weight"].size
    assert total == pytest.approx(1.345e9, rel=1e-3)
    assert matrix_weights(LLAMA_1B) == total - table - vectors
    assert training.ROWS * training.LENGTH == 65536


def test_utilisation_is_a_share_of_the_peak():
    """1.28e9 parameters: 7.68 GFLOP a token, and 0.60 of attention."""
    flops = flops_a_token(LLAMA_1B, 1024)
    assert flops == 6 * matrix_weights(LLAMA_1B) + 6 * 24 * 2048 * 2048
    assert flops / 1e9 == pytest.approx(8.28, abs=0.01)
    assert training.utilisation(LLAMA_1B, 2048, 989e12 / flops) == pytest.approx(1.0)


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


def test_the_main_case_and_fp8_are_measured_first_then_adapters(monkeypatch):
    """Ours and torch's of each before the next; the other policies last."""
    found = importlib.machinery.ModuleSpec("found", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert torch_training.tasks(["rope"]) == []
    ours, theirs = (
        [key.removeprefix("train/") for key, _ in work]
        for work in (training.tasks("train"), torch_training.tasks(["train"]))
    )
    named = [name for names in training.STAGES for name in names]
    assert sorted(set(named) & {*ours, *theirs}) == sorted(named)  # each once, and no other
    assert set(theirs) < set(named)
    assert [training.stage(name) for name in ours] == [1, 1, 1, 1, 2, 3, 3, 3, 3]
    assert ours[:4] == list(training.STAGES[0][:4])
    assert [training.stage(name) for name in theirs] == [1, 1, 1, 2, 2]


def test_the_table_has_what_was_planned_and_the_main_case_first():
    text = "\n".join(training.lines({"full": {}, "lora-8b, 8 parts": {}, "torch eager": {}}, str))
    order = [text.index(f"{name} |") for name in ("torch eager", "lora-8b, 8 parts", "full")]
    assert order == sorted(order)
    row = {"step_s": 1.0, "tokens_per_s": 1.0, "mfu": 0.5, "peak_bytes": 3e9}
    text = "\n".join(training.lines({"new": {**row, "planned_bytes": 2e9}, "old": row}, str))
    assert "| new |  | 1000 | 1 | 50.0 % |  | 2.0 | 3.0 |" in text
    assert "|  |  | 3.0 |" in text
    del row["peak_bytes"]
    assert "50.0 % |  |  |  |" in "\n".join(training.lines({"rival": row}, str))
    text = "\n".join(training.lines({"full": row, "x": {"failed": "it"}}, lambda row: str(row)))
    assert "| full |" in text
    assert "| x | | {'failed': 'it'}" in text


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch not installed")
def test_torch_trains_the_same_model():
    row = torch_training.measure(torch_training.whole, **SMALL_RUN)
    assert row["parts"] == 1
    assert row["losses"][-1] < row["losses"][0] == pytest.approx(4.16, abs=0.05)
    made = torch_training.model(SMALL, "cpu")
    count = sum(p.numel() for p in made.parameters())
    _, (state, _) = training.program(SMALL, "none", 1)
    assert isinstance(state, train.TrainState)
    assert count == sum(x.size for x in state.params.values())


def test_jax_linear_attention_trains_the_same_model():
    pytest.importorskip("jla")
    row = jla_training.measure(**RUN, try_parts=(2,), kernels="xla")
    assert row["parts"] == 2
    assert row["losses"][-1] < row["losses"][0] == pytest.approx(4.16, abs=0.05)
    assert row["planned_bytes"] > row["temporary_bytes"] > 0
    assert "peak_bytes" not in row  # which would be that of all steps of this process


def test_jax_linear_attention_takes_as_few_parts_as_fit(monkeypatch):
    tried = []

    def build(*arguments):
        tried.append(arguments[-1])
        if tried[-1] < 4:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return {"parts": tried[-1]}

    monkeypatch.setattr(jla_training, "_measure", build)
    assert jla_training.measure(**RUN)["parts"] == 4
    assert tried == [1, 2, 4]
    with pytest.raises(MemoryError, match="attention: 4 rows do not fit in 1 or 2 parts"):
        jla_training.measure(**RUN, try_parts=(1, 2, 3))
    with pytest.raises(ValueError, match="4 rows cannot be cut into 3 or 5 equal parts"):
        jla_training.measure(**RUN, try_parts=(3, 5))
    monkeypatch.setattr(jla_training, "_measure", lambda *rest: jax.block_until_ready(1 / 0))
    with pytest.raises(ZeroDivisionError):
        jla_training.measure(**RUN)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch not installed")
def test_torch_takes_as_few_parts_as_fit():
    import torch

    tried = []

    def build(config, device):
        parameters, loss = torch_training.whole(config, device)

        def limited(ids, targets):
            tried.append(len(ids))
            if len(ids) > 1:
                raise torch.OutOfMemoryError("as a GPU says it")
            return loss(ids, targets)

        return parameters, limited

    row = torch_training.measure(build, **SMALL_RUN)
    assert row["parts"] == 4
    assert tried[:3] == [4, 2, 1]
    with pytest.raises(MemoryError, match="torch: 4 rows do not fit in 1 or 2 parts"):
        torch_training.measure(build, **SMALL_RUN, try_parts=(1, 2))


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks transformers for such names
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_peft_trains_adapters_of_the_same_shapes():
    """As many numbers as ours; only they change, and in float32 over a base in bfloat16."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("peft")
    kept = {}

    def build(config, device):
        kept["parameters"], loss = torch_training.adapted(config, device, rank=2)
        return kept["parameters"], loss

    row = torch_training.measure(build, **SMALL_RUN, try_parts=(2,), trains_all=False)
    assert row["parts"] == 2
    assert row["losses"][-1] < row["losses"][0] == pytest.approx(4.16, abs=0.05)
    whole = torch_training.measure(torch_training.whole, **SMALL_RUN)
    assert row["mfu"] / row["tokens_per_s"] < whole["mfu"] / whole["tokens_per_s"]
    assert {parameter.dtype for parameter in kept["parameters"]} == {torch.float32}
    _, (state, _) = training.program(SMALL, "none", 1, rank=2)
    shapes = sorted(tuple(parameter.shape) for parameter in kept["parameters"])
    assert shapes == sorted(x.shape for x in state.params.values())
