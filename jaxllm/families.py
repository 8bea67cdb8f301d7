"""The table of families: a Hugging Face `config.json` to a `ModelConfig`, and back.

Strict both ways: a key that could change the result and is not understood stops the load, and a
config that no `config.json` of its family can say stops the save. To add a family, add a row.
Source: the configuration and modeling files of transformers 5.23. Reading and writing are one idea:
`to_hf` reads again what it wrote.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.config_keys import Keys
from jaxllm.config_rope import RopeRules, read_ropes, written_ropes


@dataclasses.dataclass(frozen=True)
class Family:
    """One row of the table: what a `model_type` computes, where its file does not say it plainly.

    `fields` returns the `ModelConfig` fields that differ from Llama's; `fused` says that q/k/v and
    gate/up are stored as one tensor each; `own_keys` that each query head has keys of its own where
    num_key_value_heads is absent, which is another number in other families; `write` returns the
    keys that only this family's `config.json` has.
    """

    architecture: str
    fields: Callable[[Keys], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    fused: bool = False
    own_keys: bool = False
    tied_by_default: bool = False
    head_dim_by_default: int | None = None
    rope: RopeRules = dataclasses.field(default_factory=RopeRules)


def _llama(hf: Keys) -> dict[str, Any]:
    bias = hf.flag("attention_bias", False)
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": hf.flag("mlp_bias", False)}


def _window_everywhere(hf: Keys, default: int | None) -> dict[str, Any]:
    window = hf.unless_null(hf.size, "sliding_window", default)
    if window is None:
        return {}
    layers = hf.size("num_hidden_layers")
    return {"sliding_window": window, "layer_types": ("sliding_attention",) * layers}


def _window_above(hf: Keys) -> dict[str, Any]:
    """Qwen: layers from max_window_layers on, or as listed, slide if use_sliding_window is set."""
    layers, first = hf.size("num_hidden_layers"), hf.number("max_window_layers", 28)
    types = hf.names("layer_types")
    on = hf.flag("use_sliding_window", False)
    window = hf.unless_null(hf.size, "sliding_window", 4096) if on else hf.get("sliding_window")
    if not (on and window):
        if "sliding_attention" in types:
            raise ValueError(
                f"{hf.owner}: layer_types has sliding layers, but use_sliding_window or "
                "sliding_window is off"
            )
        return {}
    types = types or [
        "sliding_attention" if i >= first else "full_attention" for i in range(layers)
    ]
    if "sliding_attention" not in types:
        return {}
    return {"sliding_window": window, "layer_types": tuple(types)}


def _qwen3(hf: Keys) -> dict[str, Any]:
    bias = hf.flag("attention_bias", False)
    return {"qk_norm": True, "qkv_bias": bias, "o_bias": bias, **_window_above(hf)}


def _gemma(hf: Keys, *, period: int) -> dict[str, Any]:
    """Gemma 2 and 3: every layer slides but the last one of each `period`."""
    types = hf.names("layer_types") or [
        "sliding_attention" if (i + 1) % period else "full_attention"
        for i in range(hf.size("num_hidden_layers"))
    ]
    # The first files of Gemma 3 name the window so; transformers reads sliding_window only.
    older = hf.unless_null(hf.size, "sliding_window_attention_size", None)
    window = hf.unless_null(hf.size, "sliding_window", older or 4096)
    activation = hf.get("hidden_activation", "gelu_pytorch_tanh")
    # More keys that transformers does not read: they may repeat what is in force, no more.
    in_force = {
        "sliding_window_attention_size": window,
        "sliding_window_size": window,  # in Gemma 2's files, beside sliding_window
        "hidden_act": activation,
    }
    for key, value in in_force.items():
        if hf.get(key, value) != value:
            raise ValueError(
                f"{hf.owner}: {key} is {hf.get(key)!r}, but the model computes with {value!r}"
            )
    pattern = hf.names("global_local_attention_pattern")
    words = {"GLOBAL": "full_attention", "SLIDING_LOCAL": "sliding_attention"}
    if pattern and types != [words.get(pattern[i % len(pattern)]) for i in range(len(types))]:
        raise ValueError(
            f"{hf.owner}: global_local_attention_pattern {pattern} is not that of the layers: "
            f"{', '.join(types)}"
        )
    bias = hf.flag("attention_bias", False)
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "zero_centered_norm": True,
        "post_norms": True,
        "scale_embedding": True,
        "hidden_act": activation,
        "query_pre_attn_scalar": hf.number("query_pre_attn_scalar", 256),
        "sliding_window": window,
        "layer_types": tuple(types),
    }


def _gemma3(hf: Keys) -> dict[str, Any]:
    if (cap := hf.get("attn_logit_softcapping", None)) is not None:
        raise ValueError(
            f"{hf.owner}: attn_logit_softcapping is {cap!r}, but transformers computes Gemma 3's "
            "attention without one; it must be null"
        )
    gemma = _gemma(hf, period=hf.size("sliding_window_pattern", 6))
    return {"qk_norm": True, **gemma, **_soft_cap(hf, "final_logit_softcapping", None)}


def _bitnet(hf: Keys) -> dict[str, Any]:
    bias = hf.flag("attention_bias", False)
    activation = hf.get("hidden_act", "relu2")
    return {"sub_norms": True, "qkv_bias": bias, "o_bias": bias, "hidden_act": activation}


def _bit_linears(hf: Keys, *, fused: bool) -> dict[str, Any]:
    """What a quantization_config of method "bitnet" says of the projections."""
    content = hf.hf.get("quantization_config")
    if not isinstance(content, Mapping) or content.get("quant_method") != "bitnet":
        return {}
    said = Keys(hf.mapping("quantization_config"), f"{hf.owner}: quantization_config")
    said.read.add("quant_method")
    kind = said.get("linear_class", "bitlinear")
    mode = said.get("quantization_mode", "offline")
    allowed = {
        "linear_class": (kind, ("bitlinear", "autobitlinear")),
        "quantization_mode": (mode, ("offline",) if kind == "bitlinear" else ("offline", "online")),
        "use_rms_norm": (said.flag("use_rms_norm", False), (False,)),
    }
    for key, (value, values) in allowed.items():
        if value not in values:
            raise ValueError(
                f"{said.owner}: {key} is {value!r}; supported"
                + f"{' of a bitlinear' * (key == 'quantization_mode')} are "
                + ", ".join(map(str, values))
            )
    if fused:
        raise ValueError(f"{hf.owner}: a family of fused projections cannot be one of BitNet's")
    kept = said.names("modules_to_not_convert")
    if kept and "lm_head" not in kept:
        raise ValueError(
            f"{said.owner}: modules_to_not_convert is {kept}; a list must name lm_head, too, for "
            "a ternary head is not supported"
        )
    _refuse_unread(said, also_inert=frozenset({"rms_norm_eps"}))
    kept = tuple(name for name in kept if name != "lm_head")
    return {"bit_linear": True, "modules_to_not_convert": kept}


def _soft_cap(hf: Keys, key: str, default: float | None) -> dict[str, Any]:
    return {key: hf.unless_null(hf.number, key, default)}


def _write_window(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window}


def _write_qwen(config: ModelConfig) -> dict[str, Any]:
    slides = "sliding_attention" in config.layer_types
    return {
        "use_sliding_window": slides,
        "sliding_window": config.sliding_window,
        "max_window_layers": config.num_hidden_layers,
        "layer_types": list(config.layer_types),
    }


def _whole(number: float | None) -> float | None:
    """256.0 as 256: transformers 5 refuses a float where its config declares an int."""
    return int(number) if number is not None and number == int(number) else number


def _write_gemma(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_activation": config.hidden_act,
        "attention_bias": config.o_bias,
        "query_pre_attn_scalar": _whole(config.query_pre_attn_scalar),
        "sliding_window": config.sliding_window,
        "layer_types": list(config.layer_types),
        "final_logit_softcapping": config.final_logit_softcapping,
    }


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        _llama,
        write=lambda config: {"attention_bias": config.o_bias, "mlp_bias": config.mlp_bias},
        own_keys=True,
    ),
    "mistral": Family(
        "MistralForCausalLM", lambda hf: _window_everywhere(hf, 4096), write=_write_window
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", lambda hf: {"qkv_bias": True, **_window_above(hf)}, write=_write_qwen
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _qwen3,
        write=lambda config: {"attention_bias": config.o_bias, **_write_qwen(config)},
        head_dim_by_default=128,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        lambda hf: _window_everywhere(hf, None),
        write=lambda config: {
            **_write_window(config),
            "original_max_position_embeddings": config.rope.original_max_position_embeddings
            or config.max_position_embeddings,
        },
        fused=True,
        own_keys=True,
        rope=RopeRules(
            part_of_head=True,
            kinds=("default", "longrope"),
            aliases={"su": "longrope", "yarn": "longrope"},  # before the field had the name
            original_by_default=4096,
        ),
    ),
    "bitnet": Family(
        "BitNetForCausalLM",
        _bitnet,
        write=lambda config: {"attention_bias": config.o_bias},
        rope=RopeRules(theta_by_default=5e5),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        lambda hf: {
            **_gemma(hf, period=2),
            **_soft_cap(hf, "attn_logit_softcapping", 50.0),
            **_soft_cap(hf, "final_logit_softcapping", 30.0),
        },
        write=lambda config: {
            **_write_gemma(config),
            "attn_logit_softcapping": config.attn_logit_softcapping,
        },
        tied_by_default=True,
        head_dim_by_default=256,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _gemma3,
        write=_write_gemma,
        tied_by_default=True,
        head_dim_by_default=256,
        rope=RopeRules(two=True, theta_by_default=1e6),
    ),
}

# What a multimodal Gemma 3 file's text_config leaves out.
# Source: Gemma3TextConfig, transformers 5.23; what it has in common with the row is not repeated.
GEMMA3_TEXT = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
}
# Keys of such a file beside text_config that the text model does without.
BESIDE_TEXT = frozenset(
    """ vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index
    boi_token_id eoi_token_id image_token_id
    """.split()
)
# Keys that cannot change the logits of a forward pass: names, training-time settings, token ids,
# which are read elsewhere, and what older versions kept here for generation. Of the lengths,
# `max_sequence_length` is Llama 1's; `dual_chunk_attention_config` (Qwen2.5-1M) is for engines that
# compute attention otherwise, which transformers does not.
INERT = frozenset(
    """ architectures attention_dropout auto_map bos_token_id cache_implementation dtype embd_pdrop
    eos_token_id id2label initializer_range is_llama_config label2id max_window_layers model_type
    name_or_path original_max_position_embeddings pad_token_id pretraining_tp resid_pdrop tokenizer
    tokenizer_class torch_dtype transformers.js_config transformers_version use_cache _name_or_path
    _attn_implementation attn_implementation output_attentions output_hidden_states return_dict
    problem_type chunk_size_feed_forward unsloth_fixed unsloth_version mask_value unk_token_id
    sep_token_id cls_token_id _sliding_window_pattern _attn_implementation_autoset
    _flash_attn_2_enabled dual_chunk_attention_config finetuning_task gradient_checkpointing
    max_sequence_length output_scores return_dict_in_generate torchscript use_bfloat16
    begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty
    max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    remove_invalid_values repetition_penalty suppress_tokens temperature top_k top_p typical_p
    """.split()
)
# Activations by other names of transformers' table.
ACTIVATIONS_ALSO = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}
# Keys that are harmless at these values only.
INERT_AT: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "layer_types": (None,),
    "lm_head_bias": (False,),
    "mlp_bias": (False,),
    "output_router_logits": (False,),
    "partial_rotary_factor": (1,),
    "qk_layernorm": (False,),
    "rope_interleaved": (False,),
    "rope_local_base_freq": (None,),
    "sliding_window": (None,),
    "sliding_window_pattern": (None,),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (False, None),
    "use_mrope": (False,),
    "use_res_clamp": (False,),
    "use_sliding_window": (False,),
}


def from_hf(hf: Mapping[str, Any], *, owner: str = "config.json") -> ModelConfig:
    """The `ModelConfig` of a `config.json`, in the old spelling of its keys or the new one.

    `owner` is the name that error sentences give the file.
    Raises: ValueError for a `model_type` that is not in `FAMILIES`, a missing key, a value that
    cannot be, or a key that is not understood.
    """
    keys = Keys(hf, owner)
    model_type = keys.need("model_type")
    if model_type == "gemma3":
        if hf.get("text_config") is not None:
            return _from_wrapped(keys)
        model_type = "gemma3_text"  # some text-only files use the short name
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"{owner}: model_type {model_type!r} is not supported; supported are "
            f"{', '.join(FAMILIES)}, gemma3"
        )
    family = FAMILIES[model_type]
    heads, width = keys.size("num_attention_heads"), keys.size("hidden_size")
    all_heads = heads if family.own_keys or "num_key_value_heads" in hf else None  # null: all
    values: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": keys.size("vocab_size"),
        "hidden_size": width,
        "intermediate_size": keys.size("intermediate_size"),
        "num_hidden_layers": keys.size("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("num_key_value_heads", all_heads),
        "head_dim": keys.size("head_dim", family.head_dim_by_default or width // heads),
        "max_position_embeddings": keys.size("max_position_embeddings"),
        "rms_norm_eps": keys.number("rms_norm_eps"),
        "hidden_act": keys.get("hidden_act", "silu"),
        "tie_word_embeddings": keys.flag("tie_word_embeddings", family.tied_by_default),
        **read_ropes(keys, family.rope),
        **family.fields(keys),
        **_bit_linears(keys, fused=family.fused),
    }
    _refuse_unread(keys)
    if isinstance(name := values["hidden_act"], str):
        values["hidden_act"] = ACTIVATIONS_ALSO.get(name, name)
    try:
        return ModelConfig(**values)
    except ValueError as error:
        raise ValueError(f"{owner}: {error}") from None


def _from_wrapped(hf: Keys) -> ModelConfig:
    """The text model of a multimodal Gemma 3 file; what else the file says must not concern it."""
    text = {"model_type": "gemma3_text", **GEMMA3_TEXT, **hf.mapping("text_config")}
    if text["model_type"] != "gemma3_text":
        raise ValueError(
            f"{hf.owner}: text_config has model_type {text['model_type']!r}; that of a gemma3 file "
            "is gemma3_text"
        )
    if (cap := text.get("final_logit_softcapping")) is not None:
        raise ValueError(
            f"{hf.owner}: text_config: final_logit_softcapping is {cap!r}, but transformers "
            "computes the logits of a gemma3 file without one; it must be null"
        )
    config = from_hf(text, owner=f"{hf.owner}: text_config")
    if hf.flag("tie_word_embeddings", config.tie_word_embeddings) != config.tie_word_embeddings:
        raise ValueError(f"{hf.owner}: tie_word_embeddings differs from that of text_config")
    _refuse_unread(hf, also_inert=BESIDE_TEXT)
    return config


def _refuse_unread(keys: Keys, *, also_inert: frozenset[str] = frozenset()) -> None:
    strange = [
        key
        for key in keys.unread()
        if key not in INERT | also_inert
        and not (key in INERT_AT and keys.hf[key] in INERT_AT[key])
        and keys.hf[key] not in (None, {}, [])
    ]
    if strange:
        raise ValueError(
            f"{keys.owner}: keys that this library does not know and that could change the "
            "result: " + ", ".join(f"{key}={keys.hf[key]!r}" for key in strange)
        )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` that says this config, in the spelling of transformers 5; its ropes also in
    that of 4.

    Its dtype and its token ids are not a config's: whoever writes the file adds them.

    Raises: ValueError if the family named by `model_type` cannot say every field.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"config: model_type {config.model_type!r} is not supported; supported are "
            f"{', '.join(FAMILIES)}"
        )
    family = FAMILIES[config.model_type]
    hf = {
        "architectures": [family.architecture],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
        "tie_word_embeddings": config.tie_word_embeddings,
        **written_ropes(config, family.rope),
        **family.write(config),
        **_write_bit_linears(config),
    }
    again = from_hf(hf, owner=f"config of model_type {config.model_type!r}")
    lost = [
        f.name
        for f in dataclasses.fields(ModelConfig)
        if getattr(again, f.name) != getattr(config, f.name)
    ]
    if lost:
        raise ValueError(
            f"config: a config.json of model_type {config.model_type!r} cannot say "
            + ", ".join(f"{name}={getattr(config, name)!r}" for name in lost)
            + f"; families are {', '.join(FAMILIES)}"
        )
    return hf


def _write_bit_linears(config: ModelConfig) -> dict[str, Any]:
    """With weights as they are trained; whoever packs them says "offline"."""
    if not config.bit_linear:
        return {}
    kept = ["lm_head", *config.modules_to_not_convert] if config.modules_to_not_convert else None
    said = {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "online",
        "modules_to_not_convert": kept,
    }
    return {"quantization_config": said}
