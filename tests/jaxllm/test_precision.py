"""Loss scales by the script of the specs; half precision trains as float32 does."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_models import TINY, poisoned

from jaxllm import ops, train
from jaxllm.config import Runtime
from jaxllm.model import Transformer
from jaxllm.precision import POLICIES, DynamicScale, NoScale, StaticScale, policy


def make_model(name: str) -> Transformer:
    p = policy(name)
    runtime = Runtime(dtype=p.compute_dtype, param_dtype=p.param_dtype)
    return Transformer(TINY, runtime, rngs=nnx.Rngs(0))


def test_policies_are_known_by_name():
    for name, p in POLICIES.items():
        assert policy(name) is p
        assert (p.name, p.param_dtype) == (name, "float32")
    assert [p.compute_dtype for p in POLICIES.values()] == [
        *("float32", "bfloat16", "float16", "bfloat16")
    ]
    scales = [type(p.scale()) for p in POLICIES.values()]
    assert scales == [NoScale, NoScale, DynamicScale, NoScale]
    assert [name for name, p in POLICIES.items() if p.fp8] == ["fp8"]
    with pytest.raises(ValueError, match="no policy is named 'fp4'; there are fp32, bf16"):
        policy("fp4")


def run_script(scale: Any, script: str) -> list[float]:
    """The scales after each step: "." is finite, "x" is not. Through `jit`, as in training."""
    adjust = jax.jit(lambda scale, finite: scale.adjust(finite))
    values = []
    for step in script:
        scale = adjust(scale, jnp.asarray(step == "."))
        values.append(float(scale.value))
    return values


def test_the_scripted_sequence():
    assert run_script(DynamicScale(interval=3), "...x.") == [
        *(2.0**15, 2.0**15, 2.0**16, 2.0**15, 2.0**15)
    ]


def test_growth_needs_good_steps_in_a_row_and_is_bounded_both_ways():
    assert run_script(DynamicScale(scale=4.0, interval=2), ".x..") == [4, 2, 2, 4]
    assert run_script(DynamicScale(scale=4.0, min_scale=2.0), "xxx") == [2, 2, 2]
    assert run_script(DynamicScale(scale=4.0, max_scale=8.0, interval=1), "...") == [8, 8, 8]
    assert run_script(DynamicScale(scale=1.0, growth=4.0, backoff=0.25, interval=1), ".x") == [4, 1]
    assert run_script(DynamicScale(scale=1.0, interval=2), "....") == [1, 2, 2, 4]


def test_a_scale_begins_with_what_float16_trains_with():
    """It grows after 2000 steps and stays within 1 and 2 ** 24."""
    assert run_script(DynamicScale(), 2000 * ".")[-2:] == [2.0**15, 2.0**16]
    assert run_script(DynamicScale(scale=1.0), "x") == [1]
    assert run_script(DynamicScale(scale=2.0**24, interval=1), ".") == [2.0**24]


@pytest.mark.own_errors
@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (StaticScale(0.0), "scale of a StaticScale must be above 0 and finite, got 0.0"),
        (StaticScale(-2.0), "scale of a StaticScale must be above 0 and finite, got -2.0"),
        (StaticScale(math.inf), "scale of a StaticScale must be above 0 and finite, got inf"),
        (DynamicScale(math.nan), "scale of a DynamicScale must be above 0 and finite, got nan"),
        (DynamicScale(growth=1.0), "growth of a DynamicScale must be above 1 and finite, got 1"),
        (DynamicScale(backoff=1.0), "backoff of a DynamicScale must be above 0 and below 1, got "),
        (DynamicScale(good=-5), "good of a DynamicScale must be above -1 and finite, got -5"),
        (DynamicScale(interval=0), "interval of a DynamicScale must be above 0 and finite, got "),
        (
            DynamicScale(min_scale=8.0, max_scale=4.0),
            "scale 32768.0 is not between min_scale 8.0 and max_scale 4.0$",
        ),
    ],
)
def test_numbers_that_cannot_be_a_scales(scale, words):
    model = make_model("fp32")
    with pytest.raises(ValueError, match=f"^precision: {words}"):
        train.init_state(model, optax.sgd(0.1), scale=scale)


@dataclasses.dataclass(frozen=True)
class Shifted(NoScale):
    """A scale of one's own, whose numbers mean what it likes."""

    shift: float = 0.0


jax.tree_util.register_dataclass(Shifted)


@pytest.mark.parametrize("scale", [DynamicScale(1.0), DynamicScale(2.0**24), Shifted()])
def test_a_scale_at_a_bound_or_of_ones_own_is_taken(scale):
    state = train.init_state(make_model("fp32"), optax.sgd(0.1), scale=scale)
    assert float(state.scale.value) == float(scale.value)


def test_a_tree_of_sizes_has_the_scales_classes():
    """So that what is made cannot be checked where it is made."""
    assert jax.tree.map(lambda x: 0 * x.nbytes, StaticScale(8.0)) == StaticScale(0)


@pytest.mark.parametrize("scale", [NoScale(), StaticScale(2.0**10), DynamicScale()], ids=type)
def test_scaling_is_exact_and_in_float32(scale):
    loss = jnp.asarray(1.2345, jnp.float16)
    scaled = scale.scale_loss(loss)
    assert scaled.dtype == jnp.float32
    assert float(scaled) == float(loss) * float(scale.value)
    back = scale.unscale({"x": scaled.astype(jnp.float32), "y": jnp.ones(2, jnp.bfloat16)})
    assert float(back["x"]) == float(loss)
    assert back["y"].dtype == jnp.float32


@pytest.mark.parametrize("scale", [StaticScale(8.0), DynamicScale(good=5, interval=7)], ids=type)
def test_all_state_is_in_leaves(scale):
    leaves, tree = jax.tree.flatten(scale)
    again = jax.jit(lambda x: x)(jax.tree.unflatten(tree, leaves))
    for name, value in vars(scale).items():
        assert getattr(again, name).dtype == value.dtype
        assert getattr(again, name) == value


def test_the_scripted_sequence_in_training():
    """Finite three times, infinite, finite: what is skipped leaves Adam's count alone."""
    model = make_model("fp16")
    optimizer = optax.adam(1e-3)
    state = train.init_state(model, optimizer, scale=DynamicScale(interval=3))
    step = train.make_train_step(model, optimizer, poisoned)
    scales, used = [], []
    for i, factor in enumerate([1, 1, 1, np.inf, 1]):
        before = jax.tree.map(np.array, state.params)
        state, metrics = step(state, {**text(i), "factor": np.full(4, factor, np.float32)})
        after = jax.tree.map(np.array, state.params)
        moved = [bool(np.any(after[name] != before[name])) for name in before]
        assert all(moved) if factor == 1 else not any(moved)
        scales.append(float(state.scale.value))
        used.append(float(metrics["scale"]))
    assert scales == [2.0**15, 2.0**15, 2.0**16, 2.0**15, 2.0**15]
    assert used == [2.0**15, 2.0**15, 2.0**15, 2.0**16, 2.0**15]
    assert (int(state.step), int(state.skipped), int(state.opt_state[0].count)) == (5, 1, 4)


@pytest.mark.parametrize(
    ("scale", "trains"), [(NoScale(), False), (StaticScale(2.0**12), True), (DynamicScale(), True)]
)
def test_gradients_of_1e_8_train_float16_only_with_a_scale(scale, trains):
    """The least number of float16 is 6e-8."""

    def tiny(model, batch):
        half = model.norm.weight[...].astype(jnp.float16)
        small = half * batch["factor"] * batch["factor"]  # constants would become one, of zero
        return jnp.sum(small.astype(jnp.float32)), jnp.int32(batch["tokens"].size)

    model = make_model("fp16")
    optimizer = optax.sgd(1e6)
    state = train.init_state(
        model, optimizer, trainable=lambda name: name == "norm.weight", scale=scale
    )
    step = train.make_train_step(model, optimizer, tiny)
    batch = {"tokens": np.zeros((1, 1), np.int32), "factor": np.float16(1e-4)}
    state, metrics = step(state, batch)
    assert int(metrics["skipped"]) == 0
    moved = 1 - np.asarray(state.params["norm.weight"])
    # 1e-4 is rounded twice, to 11 bits; 1 - 0.01 to 24
    np.testing.assert_allclose(moved, 0.01 if trains else 0.0, rtol=2e-3)


def text(seed: int) -> dict[str, np.ndarray]:
    """Rows of a text where each word has three successors: its entropy is log 3."""
    rng = np.random.default_rng(seed)
    choice = rng.integers(0, 3, (4, 17))
    words = np.zeros((4, 17), np.int32)
    words[:, 0] = rng.integers(0, TINY.vocab_size, 4)
    for i in range(1, 17):
        words[:, i] = (7 * words[:, i - 1] + 11 * choice[:, i] + 1) % TINY.vocab_size
    return {"tokens": words[:, :-1], "targets": words[:, 1:]}


@functools.cache
def losses(name: str) -> np.ndarray:
    model, optimizer = make_model(name), optax.adamw(1e-2)
    state = train.init_state(model, optimizer, scale=policy(name).scale())
    step = train.make_train_step(model, optimizer)
    found = []
    for i in range(300):
        state, metrics = step(state, text(i))
        found.append(metrics["loss"])
    assert int(state.skipped) == 0
    return np.asarray(jax.device_get(found))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_precision_ends_within_a_percent_of_float32(name):
    exact, found = losses("fp32"), losses(name)
    assert exact[-30:].mean() < exact[0] / 2
    assert np.any(exact != found)
    np.testing.assert_allclose(found[-30:].mean(), exact[-30:].mean(), rtol=0.01)


def products(name: str) -> list[tuple[tuple[str, str, str], bool]]:
    """Of each product in a step: its operands' and its result's dtype, and whether it is
    attention's own (its operands have the four or five axes of heads).
    """
    model, optimizer = make_model(name), optax.adamw(1e-3)
    state = train.init_state(model, optimizer, scale=policy(name).scale())
    step: Any = train.make_train_step(model, optimizer)
    lines = re.findall(
        r"dot_general.*: \(tensor<([^>]*)>, tensor<([^>]*)>\) -> tensor<([^>]*)>",
        step.lower(state, text(0)).as_text(),
    )
    return [
        (tuple(t.rpartition("x")[2] for t in line), line[0].count("x") > 3)  # pyright: ignore
        for line in lines
    ]


@pytest.mark.parametrize(("name", "dtype"), [("bf16", "bf16"), ("fp16", "f16")])
def test_products_have_operands_of_the_compute_dtype(name, dtype):
    """Loss and scores have float32 results; projections round what was summed in float32.

    Only attention in plain JAX multiplies float32 numbers, in its backward pass; kernels round
    there too.
    """
    found = products(name)
    half = [kinds for kinds, _ in found if kinds[0] == dtype]
    assert set(half) == {(dtype, dtype, dtype), (dtype, dtype, "f32")}
    assert half.count((dtype, dtype, "f32")) >= 3 + TINY.num_hidden_layers
    others = [(kinds, heads) for kinds, heads in found if kinds[0] != dtype]
    assert all(kinds == ("f32", "f32", "f32") and heads for kinds, heads in others)
    assert len(others) <= 4 * TINY.num_hidden_layers
    assert {kinds for kinds, _ in products("fp32")} == {("f32", "f32", "f32")}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_projections_sum_in_float32(dtype):
    """In bfloat16 a sum of ones would stop at 256, in float16 at 2048."""
    ones = jnp.ones((1, 4096), dtype)
    assert float(jax.jit(ops.linear)(ones, ones)[0, 0]) == 4096
