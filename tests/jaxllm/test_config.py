"""What config.json says is what the model computes: read strictly, written back."""

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import ALL, SLIDING, TINY, shapes

from jaxllm.config import (
    MAX_LAYERS,
    MAX_POSITIONS,
    Rope,
    Runtime,
)
from jaxllm.families import FAMILIES, GEMMA3_TEXT, from_hf, to_hf

pytestmark = pytest.mark.usefixtures("strict_jax")

LLAMA = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 5}
QWEN = {**LLAMA, "model_type": "qwen2"}
PHI = {**LLAMA, "model_type": "phi3", "original_max_position_embeddings": 32}
GEMMA2 = {**LLAMA, "model_type": "gemma2", "sliding_window": 5}
GEMMA3 = {**LLAMA, "model_type": "gemma3_text", "sliding_window": 5}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PHI_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

# The text_config of the published multimodal checkpoints of Gemma 3, and what stands around it
LINEAR_ROPE = {"factor": 8.0, "rope_type": "linear"}
TEXT_4B = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": LINEAR_ROPE,
    "sliding_window": 1024,
}
TEXT_27B = {
    "head_dim": 128,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "model_type": "gemma3_text",
    "num_attention_heads": 32,
    "num_hidden_layers": 62,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 168,
    "rope_scaling": LINEAR_ROPE,
    "sliding_window": 1024,
}
WRAPPED = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": TEXT_4B,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}

# ------------------------------------------------------------------------- real config.json files

# The sizes of the published checkpoints; a tied head is counted once.
PARAMETERS = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "Llama-3.2-1B-Instruct": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Phi-3-mini-4k-instruct": 3_821_079_552,
    "Phi-3.5-mini-instruct": 3_821_079_552,
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-8B": 8_190_735_360,
    "SmolLM2-135M": 134_515_008,
    "gemma-2-2b-it": 2_614_341_888,
    "gemma-3-1b-it": 999_885_952,
}
UNSUPPORTED = {"Qwen3-30B-A3B": "qwen3_moe", "phi-2": "phi"}


def read(shared: Path, name: str) -> dict[str, Any]:
    return json.loads((shared / "data" / "configs" / f"{name}.json").read_text())


def test_every_real_config_is_tested(shared):
    names = {path.stem for path in (shared / "data" / "configs").glob("*.json")}
    assert names == {*PARAMETERS, *UNSUPPORTED}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_real_config_has_the_published_size(shared, name):
    config = from_hf(read(shared, name))
    # Two models of few layers tell the rest: shapes do not depend on the kind of a layer.
    one, two = (
        sum(
            math.prod(shape)
            for shape in shapes(
                dataclasses.replace(config, num_hidden_layers=n, layer_types=config.layer_types[:n])
            ).values()
        )
        for n in (1, 2)
    )
    assert one + (config.num_hidden_layers - 1) * (two - one) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_real_config_comes_back(shared, name):
    config = from_hf(read(shared, name))
    assert from_hf(json.loads(json.dumps(to_hf(config)))) == config


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_family_is_told_what_is_supported(shared, name):
    with pytest.raises(ValueError, match="is not supported; supported are ") as error:
        from_hf(read(shared, name), owner="its/config.json")
    text = str(error.value)
    assert text.startswith(f"its/config.json: model_type {UNSUPPORTED[name]!r} is not supported")
    assert text.endswith("supported are " + ", ".join([*FAMILIES, "gemma3"]))


def test_what_real_configs_say(shared):
    """One number of each kind, so that a key which is read but not used shows."""
    configs = {name: from_hf(read(shared, name)) for name in PARAMETERS}
    llama = configs["Llama-3.2-1B-Instruct"]
    assert llama.rope == Rope(
        5e5,
        "llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    assert (llama.head_dim, llama.rms_norm_eps) == (64, 1e-5)
    assert llama.tie_word_embeddings
    assert not llama.qkv_bias
    assert set(llama.layer_types) == {"full_attention"}
    assert configs["SmolLM2-135M"].rope == Rope(1e5)
    mistral = configs["Mistral-7B-v0.1"]
    assert {mistral.window(i) for i in range(32)} == {4096}
    assert mistral.rope == Rope(1e4)
    assert configs["Mistral-7B-Instruct-v0.3"].sliding_window is None
    qwen = configs["Qwen2.5-0.5B-Instruct"]
    assert (qwen.qkv_bias, qwen.o_bias, qwen.qk_norm, qwen.head_dim) == (True, False, False, 64)
    assert set(qwen.layer_types) == {"full_attention"}  # use_sliding_window is off
    qwen3 = configs["Qwen3-0.6B"]
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    phi = configs["Phi-3.5-mini-instruct"]
    assert phi.rope.attention_factor == 1.0  # this copy of the file has 4096 positions
    long = from_hf({**read(shared, "Phi-3.5-mini-instruct"), "max_position_embeddings": 131_072})
    assert long.rope.attention_factor == pytest.approx(1.1902380714238083, abs=1e-15)
    assert np.array(phi.rope.short_factor)[1] == 1.0199999809265137
    assert np.array(phi.rope.long_factor)[-1] == 64.83999633789062
    assert phi.window(0) == 262_144
    assert configs["Phi-3-mini-4k-instruct"].window(31) == 2047
    gemma = configs["gemma-2-2b-it"]
    assert [gemma.window(i) for i in range(3)] == [4096, None, 4096]
    assert (gemma.attn_logit_softcapping, gemma.final_logit_softcapping) == (50.0, 30.0)
    assert gemma.hidden_act == "gelu_pytorch_tanh"
    assert gemma.query_pre_attn_scalar == 256
    assert gemma.tie_word_embeddings  # which its file does not say
    gemma = configs["gemma-3-1b-it"]
    assert [gemma.window(i) for i in range(7)] == [512] * 5 + [None, 512]
    assert (gemma.rope.rope_theta, gemma.sliding_rope) == (1e6, Rope(1e4))
    assert gemma.attn_logit_softcapping is None
    for switch in ("zero_centered_norm", "post_norms", "scale_embedding"):
        assert getattr(gemma, switch)
        assert not getattr(llama, switch)


def test_what_a_short_file_leaves_out():
    """As the configuration classes of transformers 5.23 have it."""
    bare = {k: v for k, v in LLAMA.items() if k != "rope_theta"} | {"num_hidden_layers": 30}

    def short(family, **more):
        return from_hf({**bare, "model_type": family, **more})

    slides = {
        family: [i for i in range(30) if short(family, **more).window(i) == 4096]
        for family, more in {
            "mistral": {},
            "phi3": {},
            "qwen2": {"use_sliding_window": True},
            "gemma2": {},
            "gemma3_text": {},
        }.items()
    }
    assert slides == {
        "mistral": list(range(30)),
        "phi3": [],
        "qwen2": [28, 29],
        "gemma2": list(range(0, 30, 2)),
        "gemma3_text": [i for i in range(30) if i % 6 != 5],
    }
    assert short("mistral", sliding_window=None).sliding_window is None
    assert {f: short(f).head_dim for f in ("llama", "qwen3", "gemma2", "gemma3_text")} == {
        "llama": 6,
        "qwen3": 128,
        "gemma2": 256,
        "gemma3_text": 256,
    }
    gemma2, gemma3 = short("gemma2"), short("gemma3_text")
    assert (gemma2.attn_logit_softcapping, gemma2.final_logit_softcapping) == (50.0, 30.0)
    assert gemma3.final_logit_softcapping is None
    assert gemma2.query_pre_attn_scalar == gemma3.query_pre_attn_scalar == 256
    assert gemma2.tie_word_embeddings
    assert gemma3.tie_word_embeddings
    assert (gemma3.rope, gemma3.sliding_rope) == (Rope(1e6), Rope(1e4))
    assert short("bitnet").rope == Rope(5e5)
    assert {short(f).rope for f in ("llama", "mistral", "qwen2", "qwen3", "phi3")} == {Rope(1e4)}


def test_a_multimodal_file_leaves_most_of_the_text_model_to_defaults():
    config = from_hf(WRAPPED)
    assert config == from_hf({**WRAPPED["text_config"], **GEMMA3_TEXT, "sliding_window": 1024})
    assert (config.vocab_size, config.max_position_embeddings) == (262_208, 131_072)
    assert [config.window(i) for i in range(7)] == [1024] * 5 + [None, 1024]
    assert (config.rope, config.sliding_rope) == (Rope(1e6, "linear", factor=8.0), Rope(1e4))
    large = from_hf({**WRAPPED, "text_config": TEXT_27B})
    assert (large.head_dim, large.num_key_value_heads, large.query_pre_attn_scalar) == (
        128,
        16,
        168,
    )


@pytest.mark.reference
@pytest.mark.parametrize("text", [TEXT_4B, TEXT_27B])
def test_transformers_reads_the_same_in_a_multimodal_file(transformers, text):
    theirs = transformers.Gemma3Config(
        text_config=copy.deepcopy(text), vision_config=WRAPPED["vision_config"]
    )
    written = json.loads(theirs.to_json_string(use_diff=False))
    assert from_hf(written["text_config"]) == from_hf({**WRAPPED, "text_config": text})


# ------------------------------------------------------------------------------------- spellings


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({**LLAMA, "torch_dtype": "float16"}, {**LLAMA, "dtype": "bfloat16"}),
        (
            {k: v for k, v in LLAMA.items() if k != "rope_theta"},  # Llama 2: a constant then
            {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
        ),
        ({**LLAMA, "head_dim": None}, {**LLAMA, "head_dim": 6}),
        ({**LLAMA, "num_key_value_heads": None}, {**LLAMA, "num_key_value_heads": 4}),
        (
            {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        ),
        (
            {**LLAMA, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
            {**LLAMA, "rope_theta": 1.0, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}},
        ),
        (
            {**QWEN, "rope_scaling": YARN_ROPE},
            {
                **QWEN,
                "rope_parameters": {
                    **YARN_ROPE,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "truncate": True,
                    "attention_factor": 0.1 * math.log(4) + 1,
                },
            },
        ),
        (
            {**QWEN, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
            {
                **QWEN,
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
            },
        ),
        (
            {**PHI, "partial_rotary_factor": 0.75, "head_dim": 8},
            {**PHI, "rope_parameters": {"partial_rotary_factor": 0.75}, "head_dim": 8},
        ),
        (
            GEMMA2,
            {**GEMMA2, "layer_types": ["sliding_attention", "full_attention"] * 2},
        ),
        (
            {**GEMMA3, "sliding_window_pattern": 3},
            {
                **GEMMA3,
                "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
            },
        ),
        (
            {
                **GEMMA3,
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            {
                **GEMMA3,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
        ),
        (
            {
                **{k: v for k, v in GEMMA3.items() if k != "sliding_window"},
                "sliding_window_attention_size": 5,
            },
            {
                **GEMMA3,
                "sliding_window_attention_size": 5,
                "hidden_act": "gelu_pytorch_tanh",
                "global_local_attention_pattern": ["SLIDING_LOCAL"] * 5 + ["GLOBAL"],
            },
        ),
        ({**GEMMA2, "sliding_window_size": GEMMA2["sliding_window"]}, GEMMA2),
        (
            {**QWEN, "rope_scaling": {**YARN_ROPE, "beta_fast": 0, "beta_slow": 0}},
            {**QWEN, "rope_scaling": YARN_ROPE},
        ),
        (
            {**LLAMA, "rope_scaling": {**LLAMA3_ROPE, "type": "linear"}},
            {**LLAMA, "rope_scaling": LLAMA3_ROPE},
        ),
        (
            {
                **GEMMA3,
                "rope_scaling": LINEAR_ROPE,
                "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}},
            },
            {**GEMMA3, "rope_scaling": LINEAR_ROPE},
        ),
        ({**LLAMA, "hidden_act": "swish"}, LLAMA),
        ({**LLAMA, "hidden_act": "gelu_new"}, {**LLAMA, "hidden_act": "gelu_pytorch_tanh"}),
        (
            {**LLAMA, "rope_scaling": {**YARN_ROPE, "attn_factor": 0.9, "finetuned": True}},
            {**LLAMA, "rope_scaling": YARN_ROPE},
        ),
        (
            {"model_type": "gemma3", "vision_config": {}, "text_config": GEMMA3},
            {**GEMMA3, "model_type": "gemma3"},
        ),
    ],
)
def test_old_and_new_spelling_agree(old, new):
    assert from_hf(old) == from_hf(new)


@pytest.mark.parametrize(("base", "length"), [(LLAMA, 8), (GEMMA2, 8), (GEMMA3, 32)])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_which_original_length_wins(base, length, key):
    """The one beside the rope, as transformers has it, but not beside Gemma 3's two."""
    nested = base is GEMMA3 and key == "rope_parameters"
    rope = {"full_attention": LLAMA3_ROPE} if nested else LLAMA3_ROPE
    config = from_hf({**base, key: rope, "original_max_position_embeddings": 8})
    assert config.rope.original_max_position_embeddings == length


@pytest.mark.parametrize("base", [LLAMA, MISTRAL, QWEN, PHI, GEMMA2, GEMMA3])
def test_reading_changes_nothing_in_the_dictionary(base):
    rope = PHI_ROPE if base is PHI else {"rope_type": "linear", "factor": 2.0}
    hf = copy.deepcopy({**base, "rope_scaling": rope})
    before = copy.deepcopy(hf)
    to_hf(from_hf(hf))
    assert hf == before


# ---------------------------------------------------------------------------- keys not understood


YARN_SCALES = (
    (
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        (0.0707 * math.log(4) + 1) / (0.1 * math.log(4) + 1),
    ),
    ({"mscale": 0.707}, 0.1 * math.log(4) + 1),
    ({"mscale": None, "mscale_all_dim": 1.0}, 0.1 * math.log(4) + 1),
    ({"mscale": 0.0, "mscale_all_dim": 1.0}, 0.1 * math.log(4) + 1),
    ({"mscale": 0.707, "mscale_all_dim": 1.0, "attention_factor": 1.5}, 1.5),
    ({"mscale": 0.707, "mscale_all_dim": 1.0, "factor": 0.5}, 1.0),
)


@pytest.mark.parametrize(("more", "factor"), YARN_SCALES)
def test_the_scales_of_yarn_say_what_it_multiplies_with(more, factor):
    config = from_hf({**LLAMA, "rope_parameters": {**YARN_ROPE, "rope_theta": 1e4, **more}})
    assert config.rope.attention_factor == pytest.approx(factor, rel=1e-12)
    assert from_hf(to_hf(config)).rope == config.rope


@pytest.mark.reference
@pytest.mark.parametrize(("more", "factor"), YARN_SCALES)
def test_transformers_makes_the_same_of_the_scales_of_yarn(transformers, more, factor):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {**YARN_ROPE, "rope_theta": 1e4, **more}
    theirs = transformers.LlamaConfig(**{**LLAMA, "rope_parameters": rope})
    assert ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")[1] == pytest.approx(factor, rel=1e-12)


LONGROPE_SCALES = (
    ({}, 64, math.sqrt(1 + math.log(2) / math.log(32))),
    ({"factor": 8.0}, 64, math.sqrt(1 + math.log(8) / math.log(32))),
    ({}, 16, 1.0),  # shorter than it was trained
    ({"factor": 8.0, "attention_factor": 1.5}, 64, 1.5),
)


@pytest.mark.parametrize(("more", "positions", "factor"), LONGROPE_SCALES)
def test_what_longrope_multiplies_with(more, positions, factor):
    hf = {**PHI, "max_position_embeddings": positions, "rope_scaling": {**PHI_ROPE, **more}}
    assert from_hf(hf).rope.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.reference
@pytest.mark.parametrize(("more", "positions", "factor"), LONGROPE_SCALES)
def test_transformers_multiplies_longrope_with_the_same(transformers, more, positions, factor):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf = {**PHI, "max_position_embeddings": positions, "rope_scaling": {**PHI_ROPE, **more}}
    theirs = transformers.Phi3Config(**hf, pad_token_id=0)
    scale = ROPE_INIT_FUNCTIONS["longrope"](theirs, "cpu")[1]
    assert scale == pytest.approx(factor, rel=1e-12)


def test_an_unknown_key_stops_the_load():
    with pytest.raises(ValueError, match="could change the result: clip_qkv=8") as error:
        from_hf({**LLAMA, "clip_qkv": 8, "zebra": False}, owner="x/config.json")
    assert "x/config.json" in str(error.value)
    assert "zebra=False" in str(error.value)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}},
        {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}},
    ],
)
def test_an_unknown_key_of_the_rope_stops_the_load(rope):
    with pytest.raises(ValueError, match=r"x: the \w+ rope of this family does not read m"):
        from_hf({**LLAMA, **rope}, owner="x")


@pytest.mark.parametrize(
    "rope",
    [
        {"full_attention": {"mscale": 1.0}},
        {"sliding_attention": {"mscale": 1.0}},
        {"rope_type": "linear", "factor": 8.0},  # which layers would that be for?
        {"chunked_attention": {"rope_type": "default"}},
    ],
)
def test_an_unknown_key_of_gemmas_ropes_stops_the_load(rope):
    with pytest.raises(ValueError, match=r"unknown keys|does not read mscale=1.0"):
        from_hf({**GEMMA3, "rope_parameters": rope})


@pytest.mark.parametrize(
    ("base", "rope", "strange"),
    [
        (LLAMA, {"rope_type": "default", "factor": 8.0}, "factor=8.0"),
        (LLAMA, {"rope_type": "default", "attention_factor": 1.2}, "attention_factor=1.2"),
        (LLAMA, {**LLAMA3_ROPE, "rope_type": "linear"}, "high_freq_factor=4.0, low_freq_factor="),
        (LLAMA, {**LLAMA3_ROPE, "beta_fast": 32}, "beta_fast=32"),
        # transformers drops it from a default rope, and cannot run a scaled one that has it
        (
            LLAMA,
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5",
        ),
        (QWEN, {**YARN_ROPE, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            GEMMA2,
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.",
        ),
    ],
)
def test_what_a_kind_of_rope_does_not_read_stops_the_load(base, rope, strange):
    with pytest.raises(ValueError, match=f"rope of this family does not read {strange}"):
        from_hf({**base, "rope_parameters": rope})
    without = {key: value for key, value in rope.items() if f"{key}=" not in strange}
    if rope["rope_type"] == "default":
        neutral = {"factor": 1, "attention_factor": 1.0, "partial_rotary_factor": 1.0}
        extra = {"original_max_position_embeddings": 8, "short_factor": None, **neutral}
        assert from_hf({**base, "rope_parameters": {**without, **extra}}) == from_hf(base)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["LlamaForCausalLM"]),
        ("bos_token_id", 3),
        ("eos_token_id", [1, 2]),
        ("torch_dtype", "bfloat16"),
        ("use_cache", False),
        ("initializer_range", 0.1),
        ("attention_dropout", 0.5),
        ("transformers_version", "9"),
        ("rope_interleaved", False),
        ("use_mrope", False),
        ("_attn_implementation_autoset", True),
        ("temperature", 0.7),
        ("max_sequence_length", 2048),
        ("output_router_logits", False),
        ("dual_chunk_attention_config", {"chunk_size": 8}),
        ("a_list_of_nothing", []),
        ("a_null", None),
    ],
)
def test_an_inert_key_passes(key, value):
    assert from_hf({**LLAMA, key: value}) == from_hf(LLAMA)


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        (LLAMA, "rope_interleaved", True),
        (LLAMA, "partial_rotary_factor", 0.5),
        (MISTRAL, "partial_rotary_factor", 0.5),
        (QWEN, "partial_rotary_factor", 0.5),
        (GEMMA3, "partial_rotary_factor", 0.5),
        (GEMMA2, "sliding_window_pattern", 3),
        (LLAMA, "vision_config", {"hidden_size": 8}),
        (LLAMA, "use_mrope", True),
        (LLAMA, "sliding_window", 5),
        (LLAMA, "layer_types", ["full_attention"] * 4),
        (LLAMA, "use_sliding_window", True),
        (LLAMA, "quantization_config", {"bits": 4}),
        (QWEN, "attention_bias", True),
        (QWEN, "mlp_bias", True),
        (PHI, "qk_layernorm", True),
        (PHI, "full_attn_mod", 2),
        (PHI, "interpolate_factor", 2),
        (PHI, "lm_head_bias", True),
        (GEMMA2, "use_bidirectional_attention", True),
        (GEMMA2, "rope_local_base_freq", 1e4),
        (GEMMA3, "use_res_clamp", True),
        (LLAMA, "add_cross_attention", True),
        (LLAMA, "output_router_logits", True),
    ],
)
def test_a_key_inert_at_one_value_stops_at_another(base, key, value):
    with pytest.raises(ValueError, match=f"could change the result: {key}="):
        from_hf({**base, key: value})


def test_gemma_3_has_no_soft_cap_of_attention():
    """transformers computes without it, whatever the file says."""
    assert from_hf({**GEMMA3, "attn_logit_softcapping": None}).attn_logit_softcapping is None
    with pytest.raises(ValueError, match=r"attn_logit_softcapping is 50\.0, .* must be null$"):
        from_hf({**GEMMA3, "attn_logit_softcapping": 50.0})


def test_gemma3_may_have_an_older_key_that_scales_nothing():
    """As gemma-3-1b-it's first config.json has it."""
    rope = from_hf({**GEMMA3, "rope_scaling": {"type": "linear", "factor": 1.0}}).rope
    assert (rope.rope_type, rope.factor) == ("linear", 1.0)


NESTED_YARN = {
    "full_attention": {**YARN_ROPE, "factor": 8.0, "truncate": False},
    "sliding_attention": {"rope_type": "default"},
}


def test_gemma3_does_not_read_whether_yarn_truncates():
    assert from_hf({**GEMMA3, "rope_parameters": NESTED_YARN}).rope.truncate
    with pytest.raises(ValueError, match="the yarn rope: truncate must be true or false, got 'n"):
        from_hf({**GEMMA3, "rope_scaling": {**YARN_ROPE, "truncate": "no"}})


@pytest.mark.reference
def test_transformers_does_not_either(transformers):
    def frequencies(truncate):
        full = {**NESTED_YARN["full_attention"], "rope_theta": 1e4, "truncate": truncate}
        nested = {**NESTED_YARN, "full_attention": full}
        config = transformers.AutoConfig.for_model("gemma3_text", rope_parameters=nested)
        rotary = transformers.models.gemma3.modeling_gemma3.Gemma3RotaryEmbedding(config)
        return rotary.full_attention_inv_freq.numpy()

    np.testing.assert_array_equal(frequencies(False), frequencies(True))


def test_a_wrapped_gemma3_has_no_cap_of_logits():
    text = {**TEXT_4B, "final_logit_softcapping": None}
    assert from_hf({**WRAPPED, "text_config": text}) == from_hf(WRAPPED)
    with pytest.raises(
        ValueError, match=r"text_config: final_logit_softcapping is 30\.0, .* null$"
    ):
        from_hf({**WRAPPED, "text_config": {**text, "final_logit_softcapping": 30.0}})


@pytest.mark.parametrize(
    ("hf", "sentence"),
    [
        ({}, "the key 'model_type' is missing"),
        ({**LLAMA, "model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported are lla"),
        (
            {k: v for k, v in LLAMA.items() if k != "rms_norm_eps"},
            "the key 'rms_norm_eps' is missing",
        ),
        ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads must be a positive integer"),
        ({**LLAMA, "num_attention_heads": "4"}, "num_attention_heads must be a positive integer"),
        (
            {**LLAMA, "hidden_size": 24.0},
            "hidden_size must be a positive integer of at most 2147483647, got 24.0",
        ),
        ({**LLAMA, "hidden_size": 10**400}, "hidden_size must be .* at most 2147483647, got 1000"),
        ({**GEMMA2, "head_dim": 10**400}, "head_dim must be .* of at most 2147483647, got 1000"),
        *(
            (
                {**hf, "num_hidden_layers": 10**10},
                "x/config.json: num_hidden_layers must be a positive integer of at most 10000, got",
            )
            for hf in (LLAMA, MISTRAL, QWEN, GEMMA3)
        ),
        ({**LLAMA, "num_hidden_layers": "two"}, "num_hidden_layers must be a positive integer"),
        ({**MISTRAL, "num_hidden_layers": -1}, "num_hidden_layers must be a positive integer"),
        ({**LLAMA, "rms_norm_eps": "small"}, "rms_norm_eps must be a number, got 'small'"),
        ({**LLAMA, "rope_scaling": "linear"}, "rope_scaling must be a dictionary, got 'linear'"),
        (
            {**GEMMA3, "rope_parameters": {"full_attention": 3}},
            "full_attention must be a dictionary",
        ),
        ({**LLAMA, "model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
        ({**MISTRAL, "sliding_window": "4"}, "sliding_window must be a positive integer of"),
        ({**LLAMA, "rope_scaling": {"type": "ntk"}}, "rope_type 'ntk' is not supported; supported"),
        (
            {**PHI, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type 'linear' is not supported; supported are default, longrope in this family",
        ),
        (
            {**PHI, "rope_parameters": LLAMA3_ROPE},
            "rope_type 'llama3' is not supported; supported are default, longrope in this family",
        ),
        (
            {**GEMMA3, "rope_scaling": {"type": "linear", "factor": 3.0}},
            "rope_scaling has type='linear', which transformers does not read in this family; the",
        ),
        (
            {**LLAMA, "rope_scaling": {"type": "linear"}},
            "the linear rope: the key 'factor' is missing",
        ),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "the llama3 rope: the key 'low_freq_factor' is missing",
        ),
        (
            {**PHI, "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3}},
            "longrope needs the lists short_factor and long_factor",
        ),
        (
            {
                **PHI,
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1.0] * 3,
                    "long_factor": [1.0] * 4,
                },
            },
            "long_factor of the rope has 4 entries, but 3 pairs of the head are rotated",
        ),
        (
            {**QWEN, "layer_types": ["sliding_attention"] * 4},
            "layer_types has sliding layers, but use_sliding_window or sliding_window is off",
        ),
        (
            {**GEMMA3, "global_local_attention_pattern": ["GLOBAL", "SLIDING_LOCAL"]},
            r"global_local_attention_pattern \['GLOBAL', .*\] is not that of the layers: sliding_",
        ),
        (
            {**GEMMA3, "sliding_window_attention_size": 6},
            "sliding_window_attention_size is 6, but the model computes with 5",
        ),
        (
            {**GEMMA2, "sliding_window_size": 9},
            "sliding_window_size is 9, but the model computes with 5",
        ),
        (
            {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0, "attn_factor": 0.9}},
            "the linear rope of this family does not read attn_factor=0.9",
        ),
        (
            {**GEMMA2, "hidden_act": "gelu"},
            "hidden_act is 'gelu', but the model computes with 'gelu_pytorch_tanh'",
        ),
        (
            {**GEMMA3, "hidden_activation": "gelu", "hidden_act": "silu"},
            "hidden_act is 'silu', but the model computes with 'gelu'",
        ),
        ({**LLAMA, "rope_theta": "x"}, "x/config.json: rope_theta must be a number, got 'x'"),
        ({**LLAMA, "rope_theta": math.nan}, "rope_theta must be a number, got nan"),
        ({**LLAMA, "rope_theta": 10**400}, "rope_theta must be a number, got 1000"),
        (
            {**LLAMA, "rope_theta": -1.0},
            "x/config.json: rope: rope_theta must be positive and fin",
        ),
        ({**LLAMA, "rms_norm_eps": 0}, "x/config.json: config: rms_norm_eps must be positive"),
        (
            {**LLAMA, "rope_parameters": {"rope_theta": [1]}},
            r"x/config.json: the default rope: rope_theta must be a number, got \[1\]",
        ),
        ({**LLAMA, "attention_bias": "false"}, "attention_bias must be true or false, got 'false'"),
        ({**LLAMA, "tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        (
            {**QWEN, "use_sliding_window": "no"},
            "use_sliding_window must be true or false, got 'no'",
        ),
        ({**QWEN, "layer_types": [3] * 4}, r"layer_types must be a list of names, got \[3, 3"),
        ({**QWEN, "layer_types": 3}, "layer_types must be a list of names, got 3"),
        (
            {**MISTRAL, "sliding_window": True},
            "sliding_window must be a positive integer of at most 2147483647, got True",
        ),
        (
            {**GEMMA2, "query_pre_attn_scalar": "256"},
            "query_pre_attn_scalar must be a number, got '256'",
        ),
        (
            {**GEMMA2, "final_logit_softcapping": True},
            "final_logit_softcapping must be a number, got True",
        ),
        (
            {**LLAMA, "rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4.0}},
            "x/config.json: rope: high_freq_factor must be above low_freq_factor, got 4.0 and 4.0",
        ),
        (
            {**QWEN, "rope_scaling": {**YARN_ROPE, "truncate": "no"}},
            "the yarn rope: truncate must be true or false, got 'no'",
        ),
        (
            {**QWEN, "rope_scaling": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": -7.2}},
            "the yarn rope: mscale and mscale_all_dim must be 0 or more, got 1.0 and -7.2",
        ),
        (
            {**QWEN, "rope_scaling": YARN_ROPE, "rope_parameters": {"rope_theta": 1e6}},
            "rope_scaling and rope_parameters are there and differ",
        ),
        (
            {**PHI, "rope_scaling": {**PHI_ROPE, "long_factor": [1.0, 0.0, 2.0]}},
            "x/config.json: rope: each number of long_factor must be positive and finite, got 0.0",
        ),
        (
            {**PHI, "rope_scaling": {**PHI_ROPE, "short_factor": [1.0, "2", 2.0]}},
            r"the longrope rope: short_factor must be a list of numbers, got \[1.0, '2', 2.0\]",
        ),
        ({**WRAPPED, "text_config": 3}, "text_config must be a dictionary, got 3"),
        (
            {**WRAPPED, "text_config": {**TEXT_4B, "model_type": "llama"}},
            "text_config has model_type 'llama'; that of a gemma3 file is gemma3_text",
        ),
        (
            {**WRAPPED, "text_config": {**TEXT_4B, "clip_qkv": 8}},
            "x/config.json: text_config: keys that .* could change the result: clip_qkv=8",
        ),
        (
            {**WRAPPED, "text_config": {**TEXT_4B, "rope_theta": "x"}},
            "x/config.json: text_config: rope_theta must be a number, got 'x'",
        ),
        ({**WRAPPED, "rope_theta": 5.0}, "x/config.json: keys that .* result: rope_theta=5.0"),
        (
            {**WRAPPED, "tie_word_embeddings": False},
            "tie_word_embeddings differs from that of text",
        ),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(hf, sentence):
    with pytest.raises(ValueError, match=sentence):
        from_hf(hf, owner="x/config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_how_many_key_heads_there_are_is_not_made_up(family):
    """Llama and Phi-3 have all; what others have without the key, 8 or 32 or 4, no file means."""
    hf = {**LLAMA, "model_type": family, "hidden_act": "relu2" if family == "bitnet" else None}
    assert from_hf({**hf, "num_key_value_heads": None}).num_key_value_heads == 4
    del hf["num_key_value_heads"]
    if family in ("llama", "phi3"):
        assert from_hf(hf).num_key_value_heads == 4
    else:
        with pytest.raises(ValueError, match="^config.json: the key 'num_key_value_heads' is miss"):
            from_hf(hf)


@pytest.mark.reference
@pytest.mark.parametrize("family", FAMILIES)
def test_key_heads_by_default_as_transformers(transformers, family):
    sizes = {"num_attention_heads": 40, "hidden_size": 640, "pad_token_id": 0}
    theirs = transformers.AutoConfig.for_model(family, **sizes)
    assert (theirs.num_key_value_heads == 40) == FAMILIES[family].own_keys


# ------------------------------------------------------------------------------ impossible models


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        *(
            ({name: 0}, f"config: {name} must be a positive integer of at most [0-9]+, got 0")
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "max_position_embeddings",
            )
        ),
        ({"head_dim": True}, "head_dim must be a positive integer of at most 2147483647, got True"),
        (
            {"num_hidden_layers": 10**10, "layer_types": ()},
            "config: num_hidden_layers must be a positive integer of at most 10000, got 1000",
        ),
        (
            {"num_key_value_heads": 3},
            "4 query heads cannot share 3 key heads; num_attention_heads must be a multiple of num",
        ),
        (
            {"max_position_embeddings": MAX_POSITIONS + 1},
            "max_position_embeddings is 1048577, but at most 1048576 positions keep their rotary",
        ),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be positive and finite, got 0.0"),
        (
            {"hidden_act": "relu"},
            "hidden_act 'relu' is not one of silu, gelu, gelu_pytorch_tanh",
        ),
        ({"layer_types": ("full_attention",)}, "layer_types has 1 entries for 2 layers"),
        (
            {"layer_types": ("full_attention", "mamba")},
            "layer type 'mamba' is not one of full_attention, sliding_attention",
        ),
        (
            {"layer_types": ("sliding_attention",) * 2},
            "sliding layers need a positive sliding_window below .*, got None",
        ),
        (
            {"layer_types": ("sliding_attention",) * 2, "sliding_window": -1},
            "sliding layers need a positive sliding_window below .*, got -1",
        ),
        (
            {"layer_types": ("sliding_attention",) * 2, "sliding_window": 2**31},
            "sliding layers need a positive sliding_window below .*, got 2147483648",
        ),
        (
            {"query_pre_attn_scalar": 0.0},
            "query_pre_attn_scalar must be positive and .*, got 0",
        ),
        (
            {"attn_logit_softcapping": -1.0},
            "attn_logit_softcapping must be positive and finite or",
        ),
        (
            {"final_logit_softcapping": math.nan},
            "final_logit_softcapping must be positive and .* or No",
        ),
        ({"sliding_window": "4"}, "config: sliding_window must be a whole number, got '4'"),
        ({"sliding_window": True}, "config: sliding_window must be a whole number, got True"),
        ({"layer_types": 5}, "config: layer_types must be a tuple of names, got 5"),
        ({"layer_types": "full_attention"}, "layer_types must be a tuple of names, got 'full_att"),
        (
            {"modules_to_not_convert": "o_proj"},
            "config: modules_to_not_convert must be a tuple of names, got 'o_proj'",
        ),
        ({"modules_to_not_convert": [5]}, "config: modules_to_not_convert has 5; it must be names"),
        (
            {"modules_to_not_convert": ["layers.*"]},
            r"modules_to_not_convert has 'layers.\*'; it must be names",
        ),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps must be positive and finite, got inf"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be positive and finite, got True"),
        (
            {"tie_word_embeddings": "false"},
            "tie_word_embeddings must be True or False, got 'false'",
        ),
        (
            {"layer_types": ("sliding_attention",) * 2, "sliding_window": True},
            "sliding layers need a positive sliding_window below .*, got True",
        ),
        ({"head_dim": 7}, "7 numbers of a head cannot be rotated in pairs; the count must be even"),
        ({"rope": Rope(1e4, partial_rotary_factor=0.1)}, "0 numbers of a head cannot be rotated"),
    ],
)
def test_a_config_that_cannot_be_a_model(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(TINY, **change)


def test_the_largest_sizes_are_taken():
    changes = {"num_hidden_layers": MAX_LAYERS, "max_position_embeddings": MAX_POSITIONS}
    config = dataclasses.replace(TINY, **changes, layer_types=())
    assert len(config.layer_types) == MAX_LAYERS


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"rope_type": "ntk"}, "rope_type 'ntk' is not one of default, linear, llama3, yarn, long"),
        ({"rope_theta": 0.0}, "rope_theta must be positive and finite, got 0.0"),
        ({"factor": -2.0}, "factor must be positive and finite, got -2.0"),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor must be in \(0, 1\], got 1.5"),
        ({"rope_theta": "10000"}, "rope: rope_theta must be positive and finite, got '10000'"),
        (
            {"partial_rotary_factor": None},
            "partial_rotary_factor must be positive .*, got None",
        ),
        ({"truncate": "false"}, "rope: truncate must be True or False, got 'false'"),
        (
            {"short_factor": 2.0, "long_factor": ["1"]},
            "each number of long_factor must be positive and finite, got '1'",
        ),
        ({"short_factor": np.array(-2.0)}, "of short_factor must be positive .*, got array"),
        ({"rope_theta": 10**400}, "rope_theta must be positive and finite, got 1000"),
        (
            {"rope_theta": jax.ShapeDtypeStruct((), jnp.float32)},
            "rope_theta must be positive and finite, got ShapeDtypeStruct",
        ),
        (
            {"original_max_position_embeddings": "16"},
            "rope: original_max_position_embeddings must be a positive integer of at most .*'16'",
        ),
        ({"beta_slow": math.nan}, "beta_slow must be positive and finite, got nan"),
        ({"rope_type": "llama3"}, "llama3 needs original_max_position_embeddings"),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 1},
            "yarn needs original_max_position_embeddings, at least 2, got 1",
        ),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 8, "rope_theta": 1.0},
            "rope_theta of yarn must be above 1, got 1.0",
        ),
        (
            {"rope_type": "longrope", "original_max_position_embeddings": 8},
            "longrope needs the lists short_factor and long_factor",
        ),
    ],
)
def test_a_rope_that_cannot_be(kwargs, sentence):
    with pytest.raises(ValueError, match=sentence):
        Rope(**{"rope_theta": 1e4, **kwargs})


def test_numbers_of_numpy_and_jax_become_pythons():
    config = dataclasses.replace(
        TINY,
        model_type="mistral",
        rms_norm_eps=np.float32(2**-16),
        rope=Rope(jnp.float32(1e4), factor=np.int64(1)),
        sliding_window=np.int64(4),
        layer_types=("sliding_attention",) * 2,
        tie_word_embeddings=np.bool_(True),
    )
    assert json.loads(json.dumps(to_hf(config)))["sliding_window"] == 4
    assert hash(config.rms_norm_eps) == hash(2**-16)
    assert type(config.rope.rope_theta) is type(config.rope.factor) is float
    assert config.tie_word_embeddings is True
    assert dataclasses.replace(TINY, rms_norm_eps=jnp.float32(0.5)).rms_norm_eps == 0.5


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"dtype": "float64"}, "runtime: dtype 'float64' is not one of float32, bfloat16, float16"),
        ({"param_dtype": "int8"}, "runtime: param_dtype 'int8' is not one of float32, bfloat16"),
        ({"remat": "some"}, "runtime: remat 'some' is not one of none, full, dots, "),
        ({"implementation": 5}, "runtime: implementation 5 is neither a name nor names by op"),
        ({"implementation": {"rope": None}}, "implementation {'rope': None} is neither a name nor"),
    ],
)
def test_a_runtime_that_cannot_be(kwargs, sentence):
    with pytest.raises(ValueError, match=sentence):
        Runtime(**kwargs)


@pytest.mark.parametrize(
    ("config", "lost"),
    [
        (dataclasses.replace(TINY, qk_norm=True), "qk_norm=True"),
        (dataclasses.replace(TINY, qkv_bias=True), "qkv_bias=True"),
        (dataclasses.replace(ALL, mlp_bias=True), "mlp_bias=True, attn_logit_softcapping=4.0"),
        (dataclasses.replace(TINY, rope=Rope(1e4, attention_factor=2.0)), "rope=Rope"),
        (dataclasses.replace(SLIDING, model_type="mistral"), "layer_types="),
    ],
)
def test_a_config_that_its_family_cannot_say_is_not_written(config, lost):
    with pytest.raises(ValueError, match=f"cannot say .*{lost}"):
        to_hf(config)


def test_a_family_that_does_not_exist_is_not_written():
    with pytest.raises(ValueError, match="model_type 'gpt2' is not supported; supported are llama"):
        to_hf(dataclasses.replace(TINY, model_type="gpt2"))


def test_a_runtime_takes_dtypes_by_their_names():
    for dtype in (jnp.bfloat16, jnp.dtype("bfloat16"), "bfloat16"):
        runtime = Runtime(dtype=dtype, param_dtype=dtype)
        assert runtime == Runtime(dtype="bfloat16", param_dtype="bfloat16")
        assert hash(runtime) == hash(Runtime(dtype="bfloat16", param_dtype="bfloat16"))


LONGROPE_16 = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 3,
    "long_factor": [2.0] * 3,
}
LLAMA3_OF_4 = {"rope_theta": 5e5, "rope_scaling": {**LLAMA3_ROPE, "rope_theta": 5e5}}


@pytest.mark.parametrize(
    ("hf", "older"),
    [
        (LLAMA | {"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": None}),
        (LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE}, LLAMA3_OF_4),
        (LLAMA | {"rope_scaling": LONGROPE_16}, {"original_max_position_embeddings": 16}),
        (
            {
                **WRAPPED["text_config"],
                **GEMMA3_TEXT,
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e3,
            },
            {"rope_theta": 1e6, "rope_local_base_freq": 1e3},
        ),
    ],
)
def test_ropes_are_written_for_transformers_4_too(hf, older):
    """4.57.6 computes what 5.24 does; without these keys it takes another theta, in silence."""
    written = to_hf(from_hf(hf))
    assert {key: written.get(key) for key in older} == older
    assert from_hf({k: v for k, v in written.items() if k != "rope_parameters"}) == from_hf(hf)
