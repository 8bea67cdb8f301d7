"""No field of a config, a rope or a runtime is dead."""

import copy
import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny_models
from flax import nnx
from numerics import assert_as_accurate
from tiny_models import ALL, LONGROPE, SLIDING, TINY, shapes

from jaxllm.config import (
    REMAT,
    ModelConfig,
    Rope,
    Runtime,
)
from jaxllm.families import from_hf, to_hf
from jaxllm.model import Transformer

pytestmark = pytest.mark.usefixtures("strict_jax")

TOKENS = tiny_models.tokens(1, 12)


def logits(config: ModelConfig, runtime: Runtime = Runtime()) -> np.ndarray:
    """Not compiled as one: most configs differ in numbers only, so their operations are shared."""
    return np.asarray(tiny_models.build(config, runtime)(TOKENS))


def moves(config: ModelConfig, other: ModelConfig) -> bool:
    """Whether the other config has parameters of other shapes, or other logits."""
    if shapes(config) != shapes(other):
        return True
    here, there = logits(config), logits(other)
    return bool(np.max(np.abs(here - there)) > 1e-3 * np.max(np.abs(here)))


OTHER: dict[str, Any] = {
    "vocab_size": 62,
    "hidden_size": 26,
    "intermediate_size": 41,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 4,
    "head_dim": 10,
    "rms_norm_eps": 0.1,
    "hidden_act": "gelu",
    "rope": Rope(100.0),
    "sliding_rope": Rope(100.0),
    "tie_word_embeddings": True,
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "qk_norm": True,
    "zero_centered_norm": True,
    "post_norms": True,
    "scale_embedding": True,
    "query_pre_attn_scalar": 2.0,
    "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 1.0,
    "sliding_window": 4,
    "layer_types": ("full_attention", "sliding_attention"),
    "sub_norms": True,
    "bit_linear": True,
    "modules_to_not_convert": ("o_proj",),
}
# Where the field means something only beside another one
BASE = {"sliding_rope": SLIDING, "sliding_window": SLIDING, "layer_types": SLIDING}
BASE["modules_to_not_convert"] = dataclasses.replace(TINY, bit_linear=True)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ModelConfig)])
def test_every_field_is_alive(field):
    if field == "model_type":  # the name under which a model is saved, no more
        assert to_hf(TINY)["model_type"] == "llama"
        assert to_hf(dataclasses.replace(TINY, model_type="mistral"))["model_type"] == "mistral"
    elif field == "max_position_embeddings":  # a limit
        model = nnx.eval_shape(lambda: Transformer(TINY, rngs=nnx.Rngs(0)))
        with pytest.raises(ValueError, match="65 tokens are more than the model's 64 positions"):
            jax.eval_shape(model, jnp.zeros((1, 65), jnp.int32))
    else:
        base = BASE.get(field, TINY)
        change = {field: OTHER[field]}
        if field == "num_hidden_layers":
            change["layer_types"] = ()
        assert moves(base, dataclasses.replace(base, **change)), field


def test_a_dead_field_would_show():
    """The twin: a window where no layer slides is such a field."""
    assert not moves(TINY, dataclasses.replace(TINY, sliding_window=4))


YARN = Rope(
    10_000.0, "yarn", factor=4.0, attention_factor=1.1, original_max_position_embeddings=256
)
LLAMA3 = Rope(10_000.0, "llama3", factor=4.0, original_max_position_embeddings=128)


@pytest.mark.parametrize(
    ("rope", "field", "value"),
    [
        (TINY.rope, "rope_theta", 100.0),
        (LONGROPE, "rope_theta", 100.0),
        (dataclasses.replace(TINY.rope, factor=3.0), "rope_type", "linear"),
        (TINY.rope, "partial_rotary_factor", 0.5),
        (Rope(10_000.0, "linear", factor=2.0), "factor", 3.0),
        (LLAMA3, "factor", 3.0),
        (YARN, "factor", 8.0),
        (LLAMA3, "low_freq_factor", 3.0),
        (LLAMA3, "high_freq_factor", 40.0),
        (YARN, "beta_fast", 2.0),
        (YARN, "beta_slow", 0.01),
        (YARN, "truncate", False),
        (YARN, "attention_factor", 1.5),
        (LONGROPE, "attention_factor", 1.5),
        (LLAMA3, "original_max_position_embeddings", 640),
        (YARN, "original_max_position_embeddings", 25),
        (LONGROPE, "original_max_position_embeddings", 12),
        (
            dataclasses.replace(LONGROPE, original_max_position_embeddings=12),
            "short_factor",
            (1.0, 2.0, 3.0, 4.0),
        ),
        (LONGROPE, "long_factor", (1.0, 2.0, 3.0, 4.0)),
    ],
)
def test_every_field_of_a_rope_is_alive(rope, field, value):
    assert getattr(rope, field) != value
    other = dataclasses.replace(rope, **{field: value})
    assert moves(dataclasses.replace(TINY, rope=rope), dataclasses.replace(TINY, rope=other))


def test_no_field_of_a_rope_was_forgotten():
    (marker,) = test_every_field_of_a_rope_is_alive.pytestmark
    assert {field for _, field, _ in marker.args[1]} == {f.name for f in dataclasses.fields(Rope)}


@pytest.mark.parametrize("rope", [TINY.rope, LONGROPE, YARN, LLAMA3])
def test_ropes_come_back(rope):
    config = dataclasses.replace(TINY, rope=rope)
    assert from_hf(json.loads(json.dumps(to_hf(config)))) == config


# --------------------------------------------------------------------- how it is run moves nothing

# Every switch, in one layer: how it is run does not hang on their number
ONE = dataclasses.replace(ALL, num_hidden_layers=1, layer_types=("sliding_attention",))
RUNTIMES = {
    "dtype": (None, "float32", "bfloat16", "float16"),
    "param_dtype": (None, "float32", "bfloat16", "float16"),
    "implementation": ("auto", "xla", {"attention": "xla"}, {}),
    "remat": REMAT,
}


def test_no_field_of_the_runtime_was_forgotten():
    assert set(RUNTIMES) == {f.name for f in dataclasses.fields(Runtime)}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, all_ in RUNTIMES.items() for value in all_]
)
def test_no_field_of_the_runtime_moves_the_logits(field, value):
    """Beyond the rounding of its dtype: as near to float64 as NumPy is in the same dtype."""
    runtime = Runtime(**{field: value})
    model = tiny_models.build(ONE, runtime)
    stored = {p.dtype for p in jax.tree.leaves(nnx.state(model, nnx.Param))}
    assert stored == {jnp.dtype(runtime.weight_dtype)}
    weights, row = tiny_models.weights(model), np.asarray(TOKENS[0])
    truth = oracles.decoder(tiny_models.as_dict(ONE), weights, row)
    plain = oracles.decoder(
        tiny_models.as_dict(ONE), weights, row, dtype=jnp.dtype(runtime.compute_dtype)
    )
    ours = tiny_models.logits(model, TOKENS)
    assert ours.dtype == jnp.float32
    assert_as_accurate(ours[0], plain, truth)


def test_moved_logits_would_show():
    """The twin: other mathematics, and rounding to fewer digits than the dtype has."""
    weights, row = tiny_models.weights(tiny_models.build(ONE)), np.asarray(TOKENS[0])
    truth = oracles.decoder(tiny_models.as_dict(ONE), weights, row)
    plain = oracles.decoder(tiny_models.as_dict(ONE), weights, row, dtype=np.float32)
    half = oracles.decoder(tiny_models.as_dict(ONE), weights, row, dtype=jnp.bfloat16)
    for other in (logits(dataclasses.replace(ONE, rms_norm_eps=1e-4))[0], half):
        with pytest.raises(AssertionError, match="error is"):
            assert_as_accurate(other, plain, truth)


def test_a_runtime_by_default_and_its_dtypes():
    assert (Runtime().weight_dtype, Runtime().compute_dtype) == ("float32", "float32")
    assert (Runtime().implementation, Runtime().remat) == ("auto", "none")
    half = Runtime(dtype="bfloat16")
    assert (half.weight_dtype, half.compute_dtype) == ("bfloat16", "bfloat16")
    stored = Runtime(param_dtype="bfloat16")
    assert (stored.weight_dtype, stored.compute_dtype) == ("bfloat16", "bfloat16")
    master = Runtime(dtype="bfloat16", param_dtype="float32")
    assert (master.weight_dtype, master.compute_dtype) == ("float32", "bfloat16")


def test_configs_and_runtimes_are_hashable_by_value():
    """They are static arguments of compiled programs."""
    one, two = (Runtime(implementation={"attention": "xla", "glu": "xla"}) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != Runtime(implementation={"attention": "xla"})
    names = {"glu": "xla", "attention": "xla"}  # in another order
    other = Runtime(implementation=names)
    names["glu"] = "pallas"
    assert (one, hash(one)) == (other, hash(other))
    assert hash(ALL) == hash(copy.deepcopy(ALL))
    rope = dataclasses.replace(LONGROPE, short_factor=list(LONGROPE.short_factor))
    lists = dataclasses.replace(ALL, layer_types=list(ALL.layer_types), modules_to_not_convert=[])
    assert (rope, lists) == (LONGROPE, ALL)
    assert (hash(rope), hash(lists)) == (hash(LONGROPE), hash(ALL))


def test_sizes_may_be_integers_of_numpy():
    config = dataclasses.replace(TINY, vocab_size=np.int64(TINY.vocab_size))
    assert type(config.vocab_size) is int
    assert config == TINY


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rope": None}, "rope must be a Rope, got None"),
        ({"rope": {"rope_theta": 1e4}}, "rope must be a Rope, got {'rope_theta': 10000.0}"),
        ({"sliding_rope": 1e4}, "sliding_rope must be a Rope or None, got 10000.0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be positive and finite, got '1e-5'"),
        ({"query_pre_attn_scalar": "a"}, "query_pre_attn_scalar must be positive .*, got 'a'"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be positive and finite, got True"),
        ({"num_hidden_layers": 1}, r"layer_types has 2 entries for 1 layers; give .* or \(\) for"),
    ],
)
def test_fields_of_another_kind_are_refused(changes, sentence):
    with pytest.raises(ValueError, match=f"^config: {sentence}"):
        dataclasses.replace(TINY, **changes)
