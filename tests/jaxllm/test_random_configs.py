"""Configs that nobody chose, of each family, live beside transformers (`reference`): what
`test_families.py` has with one switch at a time stands here with any others.
"""

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

import jaxllm

TOLERANCE = 1e-4  # of the largest logit; float32 is off by 2e-6 to 1e-5
POSITIONS, NEW_TOKENS = 128, 12
# Seeds of `draw`, as few as have every switch of a family once
SEEDS = {
    "llama": (99, 0, 2, 3, 35),
    "mistral": (85, 0, 3, 4, 20),
    "qwen2": (217, 0, 2, 7, 48),
    "qwen3": (269, 0, 2, 3, 4),
    "phi3": (1, 2),
    "gemma2": (7,),
    "gemma3_text": (3,),
}


def rope(draw: random.Random, kinds: str, width: int) -> dict[str, Any]:
    """The `rope_parameters` of one of the kinds, whose cosines are so wide."""
    kind = draw.choice(kinds.split())
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": draw.choice([123.0, 1e4, 5e5])}
    if kind in ("llama3", "yarn", "longrope"):
        found["original_max_position_embeddings"] = 32  # which a text and a prompt cross
    if kind in ("linear", "llama3", "yarn"):
        found["factor"] = draw.choice([2.0, 4.0])
    if kind == "llama3":
        found |= {"low_freq_factor": draw.choice([0.5, 1.0]), "high_freq_factor": 4.0}
    if kind == "yarn":
        for more in (
            {"beta_fast": 16.0, "beta_slow": 2.0},
            {"truncate": False},
            draw.choice([{"attention_factor": 1.3}, {"mscale": 0.7, "mscale_all_dim": 0.5}]),
        ):
            found |= more if draw.random() < 0.6 else {}
    if kind == "longrope":
        for key, most in (("short_factor", 1.5), ("long_factor", 6.0)):
            found[key] = [draw.uniform(1.0, most) for _ in range(width // 2)]
    return found


def config(draw: random.Random, family: str) -> dict[str, Any]:
    """Arguments of the family's configuration in transformers."""
    kv_heads, layers = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 4])
    heads, width = kv_heads * draw.choice([1, 2, 4]), draw.choice([8, 16, 20, 32])
    found: dict[str, Any] = {
        "vocab_size": draw.choice([67, 131]),
        "hidden_size": heads * width,
        "intermediate_size": draw.choice([36, 100]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": draw.random() < 0.5 or family.startswith("gemma"),
        "rms_norm_eps": draw.choice([1e-6, 1e-3]),
    }
    kinds = "default linear llama3 yarn"
    if family not in ("qwen2", "phi3") and draw.random() < 0.5:
        found["head_dim"] = width = draw.choice([8, 12, 24, 32])
    if family in ("llama", "qwen3"):
        found["attention_bias"] = draw.random() < 0.4
    if family == "llama":
        found["mlp_bias"] = draw.random() < 0.4
    if family in ("mistral", "phi3"):
        found["sliding_window"] = draw.choice([None, 7, 40])
    if family in ("qwen2", "qwen3"):
        found |= {"use_sliding_window": draw.random() < 0.5, "sliding_window": draw.choice([5, 16])}
        found["max_window_layers"] = draw.randrange(layers + 1)
    if family.startswith("gemma"):
        found |= {"sliding_window": draw.choice([4, 9])}
        found["query_pre_attn_scalar"] = draw.choice([8, 24, 256])
        types = ["sliding_attention", "full_attention"]
        found["layer_types"] = [draw.choice(types) for _ in range(layers)]
    if family == "gemma2":
        found["attn_logit_softcapping"] = draw.choice([None, 5.0, 50.0])
        found["final_logit_softcapping"] = draw.choice([None, 3.0, 30.0])
        kinds = "default"
    if family == "phi3":
        part = draw.choice([0.5, 1.0])
        found["rope_parameters"] = rope(draw, "default longrope", int(width * part))
        original = found["rope_parameters"].get("original_max_position_embeddings", POSITIONS)
        found["rope_parameters"]["partial_rotary_factor"] = part
        found |= {"original_max_position_embeddings": original, "pad_token_id": 0}
    elif family == "gemma3_text":
        kinds = {"sliding_attention": "default", "full_attention": "default linear"}
        found["rope_parameters"] = {name: rope(draw, k, width) for name, k in kinds.items()}
    else:
        found["rope_parameters"] = rope(draw, kinds, width)
    return found | {"bos_token_id": 1, "eos_token_id": 2}


def original(
    transformers: ModuleType, found: dict[str, Any], draw: random.Random, family: str
) -> Any:
    """The family's model there, with weights that make attention sharp."""
    import torch

    torch.manual_seed(draw.randrange(2**31))
    theirs = transformers.AutoConfig.for_model(family, **found)
    model = transformers.AutoModelForCausalLM.from_config(theirs, attn_implementation="eager")
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, draw.choice([0.7, 1.5]) / math.sqrt(parameter.shape[-1]))
            elif "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.3)
    return model


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64)), use_cache=False).logits.numpy()


def switches(found: dict[str, Any]) -> set[str]:
    """What is on in a config."""
    layers, ropes = found["num_hidden_layers"], found["rope_parameters"]
    full = found.get("layer_types", ()).count("full_attention")
    on = {
        "head_dim": "head_dim" in found,
        "attention_bias": found.get("attention_bias", False),
        "mlp_bias": found.get("mlp_bias", False),
        "tied": found["tie_word_embeddings"],
        "window": (found.get("sliding_window") or POSITIONS) < POSITIONS,
        "windows above a layer": found.get("use_sliding_window", False)
        and 0 < found["max_window_layers"] < layers,
        "both kinds of layer": 0 < full < layers,
        "attn cap": bool(found.get("attn_logit_softcapping")),
        "final cap": bool(found.get("final_logit_softcapping")),
        "partial rotary": ropes.get("partial_rotary_factor", 1.0) < 1.0,
    }
    named = {name for name, is_on in on.items() if is_on}
    for one in ropes.values() if "full_attention" in ropes else [ropes]:
        named |= {str(one["rope_type"]), *(one.keys() & {"attention_factor", "mscale", "truncate"})}
    return named


@pytest.mark.parametrize("family", SEEDS)
def test_the_seeds_have_every_switch(family: str) -> None:
    def of(seeds: Iterable[int]) -> set[str]:
        drawn = (config(random.Random(f"{family} {seed}"), family) for seed in seeds)
        return set().union(*map(switches, drawn))

    assert of(SEEDS[family]) == of(range(500))


@pytest.mark.reference
@pytest.mark.slow
@pytest.mark.parametrize(("family", "seed"), [(name, i) for name in SEEDS for i in SEEDS[name]])
def test_any_config_is_the_originals(
    transformers: ModuleType, tmp_path: Path, family: str, seed: int
) -> None:
    draw, numbers = random.Random(f"{family} {seed}"), np.random.default_rng(seed)
    theirs = original(transformers, config(draw, family), draw, family)
    theirs.save_pretrained(tmp_path / "theirs")
    model, _ = jaxllm.load(tmp_path / "theirs", dtype="float32")
    tokens = numbers.integers(3, model.config.vocab_size, (2, draw.choice([33, 100])))
    tokens = tokens.astype(np.int32)
    expected = logits_of(theirs, tokens)
    bound = TOLERANCE * np.abs(expected).max()
    assert np.abs(jax.jit(model)(tokens) - expected).max() < bound

    jaxllm.save(model, None, tmp_path / "ours")
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", dtype="float32"
    )
    np.testing.assert_array_equal(logits_of(back.eval(), tokens), expected)

    prompts = [tokens[0, :n].tolist() for n in (31, draw.choice([1, 20]))]  # 31: across 32
    jaxllm.fuse(model)
    options = {"max_new_tokens": NEW_TOKENS, "stop_ids": [], "prefill_chunk": 16}
    found = jaxllm.generate(model, None, prompts, **options)
    for prompt, ids in zip(prompts, found.tokens, strict=True):
        for i, token in enumerate(ids):
            last = logits_of(theirs, np.asarray([[*prompt, *ids[:i]]]))[0, -1]
            assert last.max() - last[token] < 2 * bound, (len(prompt), i)  # each is off by one


@pytest.mark.reference
@pytest.mark.slow
@pytest.mark.parametrize("key", ["rope_theta", "sliding_window", "rms_norm_eps"])
def test_a_changed_number_is_seen(transformers: ModuleType, tmp_path: Path, key: str) -> None:
    draw = random.Random("changed")
    found = {**config(draw, "mistral"), "sliding_window": 7, "rms_norm_eps": 1e-3}
    original(transformers, found, draw, "mistral").save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(3, 67, (2, 33)).astype(np.int32)

    def logits() -> Any:
        return jax.jit(jaxllm.load(tmp_path, dtype="float32")[0])(tokens)

    before = logits()
    file = tmp_path / "config.json"
    hf = json.loads(file.read_text())
    place = hf["rope_parameters"] if key == "rope_theta" else hf
    place[key] = place[key] * 2
    file.write_text(json.dumps(hf))
    assert np.abs(logits() - before).max() > 10 * TOLERANCE * np.abs(before).max()
