"""What a recipe has the trainer be given; runs from the command line stand in test_cli_train.py."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

import jaxllm
from jaxllm import data, finetune, fp8, lora
from jaxllm.precision import DynamicScale, NoScale
from jaxllm.recipe import Recipe
from jaxllm.trainer import StoppedError

pytest.importorskip("grain", reason="grain is not installed: pip install 'jaxllm[train]'")
pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'jaxllm[train]'")


@pytest.fixture
def handed(tmp_path, monkeypatch):
    """A function of a recipe's fields: what a Trainer is made of, before it trains."""
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps({"text": f"ROMEO: {i}"}) + "\n" for i in range(20)))

    def run(**fields):
        seen = {}

        def trainer(model, optimizer, batches, out, **options):
            seen.update(options, model=model, optimizer=optimizer, place=batches.state())
            raise StoppedError(None)

        monkeypatch.setattr(finetune, "Trainer", trainer)
        recipe = Recipe(jaxllm.shipped_checkpoint(), file, **{"steps": 4, "rank": 2, **fields})
        with pytest.raises(StoppedError):
            finetune.finetune(recipe, tmp_path / "out", console=Console(quiet=True))
        return seen

    return run


def test_numbers_of_a_recipe_reach_the_trainer(handed):
    given = handed(rows=6, micro_batches=3, eval_every=2, save_every=1, remat="full", length=64)
    for name, value in (("steps", 4), ("micro_batches", 3), ("eval_every", 2), ("save_every", 1)):
        assert given[name] == value, name
    assert given["model"].runtime.remat == "full"
    assert (given["place"]["rows"], given["place"]["length"]) == (6, 64)
    assert given["trainable"] is lora.is_adapter
    assert handed(method="full", rank=16)["trainable"] is None


@pytest.mark.parametrize(
    ("precision", "scale", "dtype"),
    [
        ("fp32", NoScale, "float32"),
        ("fp16", DynamicScale, "float16"),
        ("bf16", NoScale, "bfloat16"),
        ("fp8", NoScale, "bfloat16"),
    ],
)
def test_a_precision_is_its_scale_its_dtype_and_its_layers(handed, precision, scale, dtype):
    given = handed(precision=precision)
    assert type(given["scale"]) is scale
    assert given["model"].runtime.compute_dtype == dtype
    base = given["model"].layers[0].mlp.up_proj.base
    assert isinstance(base, fp8.Fp8Linear) == (precision == "fp8")


def test_a_seed_is_of_adapters_and_of_the_order(handed):
    first, other = handed(seed=0), handed(seed=1)
    assert (first["place"]["seed"], other["place"]["seed"]) == (0, 1)
    a, b = (next(iter(lora.adapters(given["model"]).values())) for given in (first, other))
    assert np.any(np.asarray(a) != np.asarray(b))


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize(("size", "left"), [(100.0, 1.0), (0.5, 0.5)])
def test_gradients_are_clipped_to_a_norm_of_one(handed, name, size, left):
    optimizer = handed(optimizer=name)["optimizer"]
    params = {"w": jnp.zeros((4, 4)), "b": jnp.zeros(4)}
    gradient = {"w": jnp.full((4, 4), 0.2 * size), "b": jnp.full(4, 0.3 * size)}
    assert float(optax.tree.norm(gradient)) == pytest.approx(size)
    _, state = optimizer.update(gradient, optimizer.init(params), params)
    moment = optax.tree.get(state, "mu")
    # The first is a tenth of what came
    assert float(optax.tree.norm(jax.tree.map(lambda x: 10 * x, moment))) == pytest.approx(left)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"precision": "bf16"}, "bfloat16"),
        ({"precision": "fp32"}, "float32"),
        ({"precision": "bf16", "method": "full", "rank": 16}, "float32"),
    ],
)
def test_what_is_frozen_is_stored_as_it_is_computed_and_what_is_trained_in_float32(
    handed, fields, dtype
):
    layer = handed(**fields)["model"].layers[0].mlp.up_proj
    assert getattr(layer, "base", layer).weight.dtype == dtype


def write_texts(file, *counts):
    """Records of as many tokens."""
    file.write_text("".join(json.dumps({"text": "a" * count}) + "\n" for count in counts))


def test_rows_are_as_long_as_the_longest_record_needs(handed, tmp_path, monkeypatch):
    """A power of two from `SHORTEST` on, and no more than `LONGEST`; also of what is held out."""
    monkeypatch.setattr(finetune, "LONGEST", 300)
    few, many = tmp_path / "records.jsonl", tmp_path / "held.jsonl"
    lengths = []
    for here, there in ((100, 100), (128, 128), (129, 128), (128, 129), (256, 256), (257, 1)):
        write_texts(few, *8 * [here])
        write_texts(many, there)
        lengths.append(handed(held_out=str(many))["place"]["length"])
    assert lengths == [128, 128, 256, 256, 256, 300]


def test_what_is_held_out_where_nobody_says(handed, tmp_path, monkeypatch):
    """A tenth, and no more than `HELD_OUT` records."""
    monkeypatch.setattr(finetune, "HELD_OUT", 5)
    file, seen, split = tmp_path / "records.jsonl", [], finetune._split

    def watched(recipe, records):
        found = split(recipe, records)
        seen.append(tuple(map(len, found)))
        return found

    monkeypatch.setattr(finetune, "_split", watched)
    for count in (20, 100):
        write_texts(file, *count * [9])
        handed()
    assert seen == [(18, 2), (95, 5)]


def test_the_prompt_of_a_sample_is_what_stands_before_the_answer():
    tokens, ignored = np.arange(1, 21, dtype=np.int32), data.IGNORE
    targets = np.arange(2, 22, dtype=np.int32)
    assert finetune.prompt_tokens(data.Example(tokens, targets)) == list(range(1, 9))
    answer = np.where(np.arange(20) < 3, ignored, targets)
    assert finetune.prompt_tokens(data.Example(tokens, answer)) == [1, 2, 3, 4]
