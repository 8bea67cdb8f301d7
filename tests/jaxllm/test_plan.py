import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
import quantised_checkpoints
import tiny_models
from flax import nnx
from quantised_checkpoints import LLAMA
from tiny_models import TINY

import jaxllm
from benchmarks.models import LLAMA_8B
from jaxllm import lora, train
from jaxllm import plan as plan_module
from jaxllm.plan import Plan, card_size, plan
from jaxllm.quantize import packed_weights

WIDE = dataclasses.replace(
    TINY, vocab_size=512, hidden_size=64, intermediate_size=128, num_attention_heads=2, head_dim=32
)
LINEAR = WIDE.num_hidden_layers * (2 * 64 * 64 + 2 * 64 * 64 + 3 * 64 * 128)
COUNT = sum(x.size for x in jax.tree.leaves(nnx.state(tiny_models.build(WIDE))))
ON_CPU = {"batch": 2, "seq": 32, "target": None}


def test_the_kinds_of_full_training_sum_up_and_are_what_they_are():
    ours = plan(WIDE, **ON_CPU, policy="fp32")
    kinds = dict(ours.rows())
    assert kinds.pop("peak") == sum(kinds.values())
    assert (ours.parameters, ours.trained) == (COUNT, COUNT)
    assert ours.weights == 4 * COUNT
    assert ours.moments == 8 * COUNT + 4  # and the count of steps
    assert ours.gradients <= 4 * COUNT
    assert ours.activations > 0
    assert ours.compiled_for == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_it_says_what_the_step_really_takes(parts):
    """The same numbers as from the step of a model with weights."""
    ours = plan(WIDE, **ON_CPU, policy="fp32", optimizer="sgd", micro_batches=parts)
    model, optimizer = tiny_models.build(WIDE), optax.sgd(1e-4)
    zeros = {name: jnp.zeros((2, 32), jnp.int32) for name in plan_module._rows(1, 1)}
    step = train.make_train_step(model, optimizer, micro_batches=parts)
    lowered = step.lower(train.init_state(model, optimizer), zeros)
    memory = lowered.compile().memory_analysis()
    kept = memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert ours.peak == memory.argument_size_in_bytes + memory.temp_size_in_bytes + kept


@pytest.fixture
def uncompiled(monkeypatch):
    """For what is known before the step is compiled, which takes seconds."""
    monkeypatch.setattr(plan_module._Step, "peak", lambda self, target: 10**9)


@pytest.mark.usefixtures("uncompiled")
def test_activations_are_what_the_policies_say():
    """Each block's input under full; that and more under the others."""
    found = {
        name: plan(WIDE, **ON_CPU, remat=name, policy="bf16").activations
        for name in ("none", "dots", "save_attention", "full")
    }
    assert found["none"] > found["dots"] > found["save_attention"] > found["full"]
    outputs = WIDE.num_hidden_layers * 2 * 32 * 2 * 32 * 2  # bfloat16, 2 heads of 32
    assert found["save_attention"] - found["full"] == outputs
    twice = dataclasses.replace(WIDE, num_hidden_layers=4, layer_types=())
    more = plan(twice, **ON_CPU, remat="full", policy="bf16").activations - found["full"]
    assert more == 2 * 2 * 32 * 64 * 2  # two more inputs of blocks


@pytest.mark.usefixtures("uncompiled")
def test_parts_of_a_batch_leave_the_activations_of_one_and_gradients_in_float32():
    small, whole, parts = (
        plan(WIDE, batch=batch, seq=32, target=None, policy="bf16", micro_batches=count)
        for batch, count in ((2, 1), (4, 1), (4, 2))
    )
    assert parts.activations == small.activations < whole.activations
    assert (whole.gradients, parts.gradients) == (2 * COUNT, 4 * COUNT)


@pytest.mark.usefixtures("uncompiled")
def test_adapters_are_all_that_is_trained():
    ours = plan(WIDE, **ON_CPU, lora=4, targets=["q_proj"])
    extra = WIDE.num_hidden_layers * 4 * (64 + 64)
    assert (ours.trained, ours.parameters) == (extra, COUNT + extra)
    assert ours.weights == 2 * COUNT + 4 * extra  # the base is bfloat16
    assert ours.moments == 8 * extra + 4


@pytest.mark.usefixtures("uncompiled")
def test_a_packed_base_weighs_half_a_byte_and_its_scales():
    plain, packed = (plan(WIDE, **ON_CPU, lora=16, qlora=q) for q in (False, True))
    assert plain.weights - packed.weights == 2 * LINEAR - LINEAR // 2 - 2 * LINEAR // 64
    assert packed.packed == LINEAR // 2 + 2 * LINEAR // 64
    assert plain.packed == 0
    assert plain.parameters == packed.parameters


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("quantize", "bits", "tables"),
    [
        ({"scheme": "int8"}, 8 + 32 / 64, 0),
        ({"scheme": "int4", "group_size": 32}, 4 + 16 / 32, 0),
        ({"scheme": "mxfp4", "head": "mxfp8"}, 4 + 8 / 32, 1),
    ],
)
def test_a_base_that_is_packed_as_quantize_does(quantize, bits, tables):
    square = dataclasses.replace(WIDE, intermediate_size=64)  # a scale a row is one in 64 numbers
    count = WIDE.num_hidden_layers * 7 * 64 * 64
    ours = plan(square, **ON_CPU, lora=4, quantize=quantize)
    assert ours.packed == count * bits / 8 + tables * 512 * 64 * (8 + 8 / 32) / 8
    assert f"({ours.packed / 2**20:.2f} MiB of them packed)" in str(ours).splitlines()[0]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("layout", ["int8", "int4 zero", "fp8 block", "nvfp4", "gptq", "awq"])
def test_a_packed_checkpoint_weighs_what_it_loads(layout, tmp_path):
    packed, plain = quantised_checkpoints.write(tmp_path, layout)
    model, _ = jaxllm.load(packed, "bfloat16")
    stored = sum(x.nbytes for x in jax.tree.leaves(packed_weights(model)))
    if layout == "gptq":  # whose zero points are all 8, and need no room: a plan does not read them
        assert model.layers[0].mlp.up_proj.packed.zero is None
    ours = plan(LLAMA, **ON_CPU, lora=4, checkpoint=packed)
    assert ours.packed == stored
    whole = plan(LLAMA, **ON_CPU, lora=4, checkpoint=plain)
    assert (whole.packed, whole.parameters) == (0, ours.parameters)
    adapters = 4 * 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 96))
    others = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert ours.weights == others + adapters
    with pytest.raises(ValueError, match="^plan: packed weights are not trained; give the rank"):
        plan(LLAMA, **ON_CPU, checkpoint=packed)


@pytest.mark.usefixtures("uncompiled")
def test_eight_bit_moments_weigh_a_quarter():
    wide, small = (plan(WIDE, **ON_CPU, optimizer=name) for name in ("adamw", "adamw_8bit"))
    assert small.moments < 0.3 * wide.moments


def test_auto_takes_the_first_policy_that_fits(monkeypatch):
    peaks = {"none": 10**9, "dots": 5 * 10**8, "save_attention": 10**8, "full": 10**7}
    monkeypatch.setattr(plan_module._Step, "peak", lambda self, target: peaks[self.remat])
    monkeypatch.setattr(plan_module, "RESERVED", 0)
    ours = plan(WIDE, **ON_CPU, remat="auto", card="0.2GB")
    assert ours.remat == "save_attention"
    assert ours.fits
    assert ours.tried == (("none", 10**9), ("dots", 5 * 10**8))
    assert "Policy none does not: 0.93 GiB or more." in str(ours)


def test_a_cpu_does_not_tell_that_a_step_is_too_large(monkeypatch):
    """But that weights and moments are (here of what CUDA leaves, 8 KB); and a step that fits there
    fits.
    """
    monkeypatch.setattr(plan_module._Step, "peak", lambda self, target: 3 * 10**9)
    unknown, too_large, fits = (
        plan(WIDE, **ON_CPU, remat="none", card=card) for card in ("2GB", "1.07375GB", "9GB")
    )
    assert (unknown.fits, unknown.is_known) == (False, False)
    assert "Whether the step fits on 2GB" in str(unknown)
    assert (too_large.fits, too_large.is_known) == (False, True)
    assert "The step does not fit on" in str(too_large)
    assert (fits.fits, fits.is_known) == (True, True)
    on_gpu = dataclasses.replace(unknown, compiled_for="h200")
    assert "The step does not fit on 2GB" in str(on_gpu)


@pytest.mark.usefixtures("uncompiled")
def test_auto_leaves_out_dots_where_adapters_double_the_products():
    ours = plan(WIDE, **ON_CPU, lora=16, remat="auto", card="0.1GB")
    assert [name for name, _ in ours.tried] == ["none", "save_attention", "full"]


def test_auto_compiles_nothing_that_cannot_fit(monkeypatch):
    asked = []

    def peak(self, target):
        asked.append(self.remat)
        return 10**9

    monkeypatch.setattr(plan_module._Step, "peak", peak)
    monkeypatch.setattr(plan_module, "RESERVED", 0)
    ours = plan(WIDE, **ON_CPU, remat="auto", card="0.0001GB")
    assert asked == ["offload"]  # the last is told, whatever it takes
    assert not ours.fits
    assert [name for name, _ in ours.tried] == ["none", "dots", "save_attention", "full"]


def test_auto_compiles_what_may_fit_though_activations_are_many(monkeypatch):
    """XLA needs less than what the forward pass leaves as it is traced."""
    monkeypatch.setattr(plan_module, "RESERVED", 0)
    step = plan(WIDE, **ON_CPU, policy="fp32")
    assert step.activations > 10**5
    size = step.weights + step.moments + 10**5
    monkeypatch.setattr(plan_module._Step, "peak", lambda self, target: size)
    ours = plan(WIDE, **ON_CPU, policy="fp32", remat="auto", card=f"{size / 1000}KB")
    assert (ours.remat, ours.tried, ours.fits) == ("none", (), True)


def test_what_is_printed():
    gib = 2**30
    kinds = {"weights": 4, "moments": 1, "activations": 9, "gradients": 2, "temporaries": 3}
    ours = Plan(
        remat="none",
        **{name: size * gib for name, size in kinds.items()},
        packed=0,
        peak=19 * gib,
        host=0,
        trained=10**7,
        parameters=10**9,
        card="24GB",
        card_bytes=card_size("24GB"),
        compiled_for="h200",
    )
    assert str(ours).splitlines() == [
        "weights          4.00 GiB",
        "moments          1.00 GiB",
        "activations      9.00 GiB",
        "gradients        2.00 GiB",
        "temporaries      3.00 GiB",
        "-------------------------",
        "peak            19.00 GiB",
        "",
        "Trained: 1.00% of 1.00 billion parameters. Remat policy: none.",
        "The step fits on 24GB (22.35 GiB, of which CUDA itself takes 1).",
        "JAX takes three quarters of a card unless XLA_PYTHON_CLIENT_MEM_FRACTION=0.95.",
        "Compiled for an H200, not run.",
    ]
    assert not dataclasses.replace(ours, peak=22 * gib).fits
    within = str(dataclasses.replace(ours, gradients=0, card="h200", card_bytes=card_size("h200")))
    assert "gradients               0 (in the space of activations that are done)" in within
    assert "The step fits on h200 (139 GiB, of which CUDA itself takes 1)." in within
    too_large = str(dataclasses.replace(ours, peak=22 * gib))
    assert not any("JAX takes three quarters" in said for said in (within, too_large))
    offloaded = str(dataclasses.replace(ours, host=5 * gib)).splitlines()
    assert offloaded[6:9] == ["peak            19.00 GiB", "on the host      5.00 GiB", ""]
    small = dataclasses.replace(ours, weights=gib // 10, moments=gib // 10 + 1, parameters=87654321)
    lines = str(small).splitlines()
    assert lines[:2] == ["weights        102.40 MiB", "moments          0.10 GiB"]
    assert lines[8] == "Trained: 11.41% of 87.65 million parameters. Remat policy: none."


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"card": "h300"}, "^plan: card 'h300' is not one of h200, h100, a100, rtx4090, or a size"),
        ({"card": "0GB"}, "^plan: card '0GB' is not one of .*, or a size above 0 such as '24GB'$"),
        ({"card": 24}, "^plan: card 24 is not one of h200, .*, or a size above 0 such as '24GB'$"),
        ({"target": "h300"}, "^aot: no target is named 'h300'; there are h200$"),
        ({"batch": 2.0}, "^plan: batch must be an integer of at least 1, got 2.0$"),
        ({"seq": 64.0}, "^plan: seq must be an integer of at least 1, got 64.0$"),
        ({"seq": 65}, "^plan: 65 tokens a row are more than the model's 64 positions$"),
        ({"micro_batches": True}, "^plan: micro_batches must be an integer of at least 1, got Tr"),
        ({"micro_batch": 4}, "^plan: there is no argument 'micro_batch'; those of adapters are al"),
        ({"lora": 4, "rngs": None}, "^plan: there is no argument 'rngs'; those of adapters are al"),
        ({"alpha": 8, "kind": "dora"}, "^plan: alpha, kind are of adapters, and there are none; g"),
        ({"remat": "some"}, "^plan: remat 'some' is not one of auto, none, full, dots, "),
        ({"optimizer": "lion"}, "^plan: optimizer 'lion' is not one of adamw, adamw_8bit, sgd$"),
        ({"policy": "fp64"}, "^precision: no policy is named 'fp64'"),
        ({"micro_batches": 3}, "^plan: 2 rows of 32 tokens cannot be split into 3 equal micro-"),
        ({"lora": 4, "targets": ["w_proj"]}, "^lora: "),
        (
            {"lora": 4, "quantize": {"scheme": "int4", "group_size": 48}},
            "^quantize: groups of 48 do not divide the ",
        ),
        ({"quantize": {"scheme": "int4"}}, "^plan: packed weights are not trained; give the rank"),
        ({"qlora": True, "quantize": {"scheme": "int8"}}, "^plan: qlora packs the base in int4; "),
    ],
)
def test_what_cannot_be_planned_is_said(keywords, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan(WIDE, **{**ON_CPU, **keywords})


def test_nothing_is_allocated():
    huge = dataclasses.replace(WIDE, hidden_size=2**20, num_attention_heads=2**15)
    recipe = plan_module._Recipe(huge, "bf16", 16, {"scheme": "int4"}, None, {})
    model = recipe.model("none")
    names = [name for name in train.parameters(model) if lora.is_adapter(name)]
    assert len(names) == 2 * 7 * WIDE.num_hidden_layers


# ------------------------------------------------------------------------ for a card that is absent


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize(
    ("keywords", "gigabytes"),
    [({"qlora": True, "remat": "full"}, 24), ({"lora": 16, "remat": "full"}, 40)],
)
def test_8b_with_adapters_at_8192_tokens_fits(keywords, gigabytes):
    ours = plan(LLAMA_8B, batch=1, seq=8192, card=f"{gigabytes}GB", **keywords)
    assert ours.compiled_for == "h200"
    assert ours.fits, str(ours)
    assert ours.peak > ours.weights + ours.activations


@pytest.mark.aot
@pytest.mark.slow
def test_offload_moves_the_inputs_of_blocks_to_the_host():
    short = dataclasses.replace(LLAMA_8B, num_hidden_layers=2, layer_types=())
    ours = plan(short, batch=1, seq=8192, lora=16, remat="offload")
    full = plan(short, batch=1, seq=8192, lora=16, remat="full")
    assert ours.host == 2 * 8192 * 4096 * 2
    assert full.activations - ours.activations == ours.host
    assert ours.peak <= full.peak  # XLA's usual schedule would keep half as much again


def test_a_packed_base_and_fp8_are_not_both():
    with pytest.raises(ValueError, match="^plan: policy 'fp8' is of plain weights, and int4"):
        plan(WIDE, **ON_CPU, qlora=True, policy="fp8")


def test_packing_counts_where_it_takes_more_than_the_step(monkeypatch):
    monkeypatch.setattr(plan_module._Step, "peak", lambda self, target: self.weights)
    ours = plan(WIDE, **ON_CPU, qlora=True, policy="bf16")
    largest = 64 * 128 * (2 + 2)  # up_proj in bfloat16, codes, and parts of them
    assert ours.peak == ours.weights + largest
    assert sum(size for kind, size in ours.rows() if kind != "peak") >= ours.peak


@pytest.mark.usefixtures("uncompiled")
def test_adapters_beside_a_packed_base_have_the_rank_that_is_told_or_the_usual_one():
    found = {rank: plan(WIDE, **ON_CPU, qlora=True, lora=rank).trained for rank in (4, 8, None)}
    assert found[8] == 2 * found[4]
    assert found[None] == found[4] * lora.RANK // 4
