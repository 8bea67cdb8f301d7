"""What a run is told, and what run.json keeps of it."""

import dataclasses
import json
import re

import pytest
import tiny_models

from jaxllm import cli
from jaxllm.recipe import (
    Recipe,
    named,
    read_recipe,
    settings_of,
    with_model,
    with_steps,
    write_recipe,
)


def test_a_recipe_knows_what_may_be_computed_again():
    with pytest.raises(ValueError, match=r"remat \(--remat\) 'foo' is not one of none, full, "):
        Recipe("model", "data", remat="foo")


def test_fields_are_named_as_their_options(capsys):
    with pytest.raises(SystemExit):
        cli.main(["finetune", "--help"])
    options = re.findall(r"--[a-z-]+", capsys.readouterr().out)
    for field in dataclasses.fields(Recipe):
        if field.name != "model":
            found = re.findall(r"--[a-z-]+", named(field.name))
            assert found
            assert set(found) <= set(options)


def test_the_learning_rate_goes_with_method_and_width():
    wide, narrow = (dataclasses.replace(tiny_models.TINY, hidden_size=n) for n in (4096, 64))
    rates = [
        with_model(Recipe("m", "d", method=method), config).learning_rate
        for method in ("full", "lora", "qlora")
        for config in (wide, narrow)
    ]
    assert rates == [2e-5, 1.3e-3, 2e-4, 1.3e-2, 2e-4, 1.3e-2]


def test_a_recipe_takes_paths(tmp_path):
    recipe = Recipe(tmp_path, tmp_path / "data", held_out=tmp_path / "other")
    assert recipe == Recipe(str(tmp_path), f"{tmp_path}/data", held_out=f"{tmp_path}/other")
    for name, wrong in (("rows", "8"), ("rows", 4.0), ("rows", True), ("seed", 1.5)):
        with pytest.raises(ValueError, match=f"{name} .* must be a whole number .*, got {wrong!r}"):
            Recipe("m", "d", **{name: wrong})
    with pytest.raises(ValueError, match="learning_rate .* must be positive and finite, got '1'"):
        Recipe("m", "d", learning_rate="1")
    for name, wrong in (("model", 5), ("data", None), ("targets", ("q_proj",)), ("model", "")):
        with pytest.raises(ValueError, match=f"^finetune: {name} must be a text, not empty, got "):
            Recipe(**{"model": "m", "data": "d", name: wrong})
    words = r"schedule \(--schedule\) 'wsd' is not one of cosine, linear, constant$"
    with pytest.raises(ValueError, match=words):
        Recipe("m", "d", schedule="wsd")
    for wrong in (-1, 0.1, True):
        with pytest.raises(ValueError, match=rf"warmup_steps .* \(int\), at least 0, got {wrong}$"):
            Recipe("m", "d", warmup_steps=wrong)
    for wrong in (-0.1, float("nan"), "0"):
        with pytest.raises(ValueError, match=f"weight_decay .* at least 0, got {wrong!r}$"):
            Recipe("m", "d", weight_decay=wrong)
    for wrong in (-0.1, 1, float("nan"), False, ""):
        with pytest.raises(
            ValueError, match=r"held_out .* must be a file, or a part .* below 1, got"
        ):
            Recipe("m", "d", held_out=wrong)
    words = r"rank \(--lora\) 64 is of adapters, and method 'full' has none"
    with pytest.raises(ValueError, match=words):
        Recipe("m", "d", method="full", rank=64)


def test_a_recipe_without_a_model_says_so(tmp_path):
    (tmp_path / "run.json").write_text('{"rank": 4, "data": "d"}')
    words = "run.json: this is no recipe of jaxllm finetune: it has no model$"
    with pytest.raises(ValueError, match=words):
        read_recipe(tmp_path)


@pytest.mark.parametrize(
    ("given", "steps", "warmup"),
    [
        ({}, 120, 6),
        ({"epochs": 1}, 40, 2),
        ({"steps": 7}, 7, 1),
        ({"steps": 2}, 2, 1),
        ({"steps": 1}, 1, 0),
        ({"steps": 7, "warmup_steps": 0}, 7, 0),
        ({"epochs": 1, "warmup_steps": 39}, 40, 39),
    ],
)
def test_the_data_decides_how_many_steps_there_are(given, steps, warmup):
    recipe, found = with_steps(Recipe("m", "d", **given), batches_per_epoch=40)
    assert (found, recipe.warmup_steps) == (steps, warmup)
    assert recipe.steps == (None if "epochs" in given else steps)


def test_a_warm_up_leaves_a_step():
    words = (
        r"warmup_steps \(--warmup-steps\) 40 leaves none of 40 steps with the whole learning rate"
    )
    with pytest.raises(ValueError, match=words):
        with_steps(Recipe("m", "d", epochs=1, warmup_steps=40), batches_per_epoch=40)


def test_a_run_of_an_older_version_has_the_settings_of_its_checkpoints(tmp_path):
    """Those know nothing of what came later, and are compared with a resumed run's."""
    later = {"kind", "alpha", "schedule", "warmup_steps", "weight_decay"}
    begun = with_model(Recipe("m", "d", steps=40), tiny_models.TINY)
    write_recipe(begun, tmp_path, "digest")
    content = json.loads((tmp_path / "run.json").read_text())
    older = {name: value for name, value in content.items() if name not in later}
    (tmp_path / "run.json").write_text(json.dumps(older))
    recipe, steps = with_steps(read_recipe(tmp_path), batches_per_epoch=1)
    assert recipe.warmup_steps == read_recipe(tmp_path).warmup_steps == 2
    assert not later & settings_of(recipe, steps).keys()
    changed = {"schedule": "linear", "warmup_steps": 1, "weight_decay": 0.1}
    assert changed.items() <= settings_of(dataclasses.replace(recipe, **changed), steps).items()
