"""The rope of a `config.json`: `rope_parameters` or `rope_scaling` to `Rope`s, and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxllm.config import LAYER_TYPES, ROPE_TYPES, ModelConfig, Rope
from jaxllm.config_keys import Keys


@dataclasses.dataclass(frozen=True)
class RopeRules:
    """What a family has of its own.

    `two` says that each of `LAYER_TYPES` has a dictionary of its own, `part_of_head` that it may
    leave the rest of a head as it is; `kinds` are those that it may have, and `aliases` gives kinds
    that only its files name so.
    """

    two: bool = False
    part_of_head: bool = False
    kinds: tuple[str, ...] = ROPE_TYPES
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    theta_by_default: float = 1e4  # Llama 2's first files carry none: it was a constant
    original_by_default: int | None = None  # positions; else what the dictionary says


# Keys that a kind does not read, harmless at these values; the length says nothing by itself.
ROPE_INERT_AT = {"factor": 1, "attention_factor": 1, "partial_rotary_factor": 1}
ROPE_INERT = {"original_max_position_embeddings"}
# What YaRN's own code and vLLM read, and transformers does not.
YARN_INERT = {"attn_factor", "extrapolation_factor", "finetuned"}
YARN_SCALES = ("mscale", "mscale_all_dim")


def read_ropes(hf: Keys, rules: RopeRules) -> dict[str, Rope]:
    """`rope`, and `sliding_rope` where the family has two."""
    scaling, parameters = hf.mapping("rope_scaling"), hf.mapping("rope_parameters")
    if not rules.two:
        theta = hf.number("rope_theta", rules.theta_by_default)
        if scaling and parameters and scaling != parameters:
            raise ValueError(f"{hf.owner}: rope_scaling and rope_parameters are there and differ")
        return {"rope": _rope(hf, scaling or parameters, theta=theta, rules=rules)}
    if unknown := sorted(set(parameters) - set(LAYER_TYPES)):
        raise ValueError(
            f"{hf.owner}: rope_parameters has unknown keys {', '.join(unknown)}; in this family it "
            f"has one dictionary for each of {', '.join(LAYER_TYPES)}"
        )
    older, factor = scaling.get("type"), scaling.get("factor")
    inert = older in (None, "default") or (older == "linear" and factor == 1)  # as gemma-3-1b-it's
    if not inert and not scaling.get("rope_type"):
        raise ValueError(
            f"{hf.owner}: rope_scaling has type={older!r}, which transformers does not read in "
            "this family; the key must be rope_type"
        )
    kinds = Keys(parameters, f"{hf.owner}: rope_parameters")
    full, sliding = (kinds.mapping(kind) for kind in LAYER_TYPES)
    theta = hf.number("rope_theta", rules.theta_by_default)
    local = hf.number("rope_local_base_freq", 1e4)
    return {
        "rope": _rope(hf, {**full, **scaling}, theta=theta, rules=rules),
        "sliding_rope": _rope(hf, sliding, theta=local, rules=rules),
    }


def written_ropes(config: ModelConfig, rules: RopeRules) -> dict[str, Any]:
    """The keys that say the config's ropes: `rope_parameters`, and those that transformers 4 and
    what is built on it read in its place (where Gemma 3's windows have no other rope than the
    default, and Phi-3's longrope has three keys: it refuses more).
    """
    rope, sliding = config.rope, config.sliding_rope or config.rope
    said: dict[str, Any] = {"rope_parameters": _written(rope, rules), "rope_theta": rope.rope_theta}
    if rope.rope_type != "default":
        said["rope_scaling"] = _written(rope, rules)
    if rope.rope_type == "longrope":  # not looked for in a dictionary there
        key = "original_max_position_embeddings"
        said[key] = rope.original_max_position_embeddings
    if rules.part_of_head:
        said["partial_rotary_factor"] = rope.partial_rotary_factor
    if rules.two:
        ropes = (_written(each, rules) for each in (rope, sliding))
        said["rope_parameters"] = dict(zip(LAYER_TYPES, ropes, strict=True))
        said["rope_local_base_freq"] = sliding.rope_theta
    return said


def _rope(hf: Keys, spec: Mapping[str, Any], *, theta: float, rules: RopeRules) -> Rope:
    """One `rope_parameters` (or `rope_scaling`); `theta` and the rest of the file fill its gaps."""
    kind = spec.get("rope_type") or spec.get("type") or "default"
    kind = rules.aliases.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in rules.kinds:
        raise ValueError(
            f"{hf.owner}: rope_type {kind!r} is not supported; supported are "
            f"{', '.join(rules.kinds)}{' in this family' * (rules.kinds != ROPE_TYPES)}"
        )
    rope = Keys(
        {key: value for key, value in spec.items() if key not in ("rope_type", "type")},
        f"{hf.owner}: the {kind} rope",
    )
    values: dict[str, Any] = {"rope_type": kind, "rope_theta": rope.number("rope_theta", theta)}
    if rules.part_of_head:
        whole = hf.number("partial_rotary_factor", 1.0)
        values["partial_rotary_factor"] = rope.number("partial_rotary_factor", whole)
    positions = original = hf.size("max_position_embeddings")
    if kind in ("llama3", "yarn", "longrope"):
        # The entry beside the dictionary wins over the one inside, and so does a family's own
        # default; but not in a family with a dictionary for each kind of layer
        original = rules.original_by_default
        if original is None:
            original = rope.size("original_max_position_embeddings", positions)
        if not rules.two:
            original = hf.size("original_max_position_embeddings", original)
        values["original_max_position_embeddings"] = original
    if kind in ("linear", "llama3"):
        values["factor"] = rope.number("factor")
    if kind == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            values[key] = rope.number(key)
    if kind in ("yarn", "longrope"):
        factor = rope.number("factor", positions / original)
        if kind == "yarn":
            values["factor"] = factor
            for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
                values[key] = rope.number(key, default) or default
            # Transformers looks for it beside the dictionaries of a family that has two
            values["truncate"] = rope.flag("truncate", True) or rules.two
            scales = [rope.number(key, 0.0) for key in YARN_SCALES]
            if min(scales) < 0:
                raise ValueError(
                    f"{rope.owner}: {' and '.join(YARN_SCALES)} must be 0 or more, got "
                    f"{' and '.join(map(str, scales))}"
                )
            attention = _yarn_attention(factor, *scales)
        else:
            values |= {key: rope.numbers(key) for key in ("short_factor", "long_factor")}
            attention = 1.0
            if factor > 1 and original > 1:  # Rope refuses an original of 1
                attention = math.sqrt(1 + math.log(factor) / math.log(original))
        values["attention_factor"] = rope.number("attention_factor", attention)
    inert = ROPE_INERT | YARN_INERT if kind == "yarn" else ROPE_INERT
    strange = [
        key
        for key in rope.unread()
        if rope.hf[key] is not None
        and key not in inert
        and not (key in ROPE_INERT_AT and rope.hf[key] == ROPE_INERT_AT[key])
    ]
    if strange:
        raise ValueError(
            f"{rope.owner} of this family does not read "
            + ", ".join(f"{key}={rope.hf[key]!r}" for key in strange)
            + f"; it reads {', '.join(sorted(rope.read))}"
        )
    try:
        return Rope(**values)
    except ValueError as error:
        raise ValueError(f"{hf.owner}: {error}") from None


def _yarn_attention(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """What yarn multiplies cos and sin with, where the config does not say; of the two scales
    (DeepSeek's) one alone says nothing. Source: Peng 2023, arXiv:2309.00071, and transformers'
    modeling_rope_utils.py.
    """
    growth = 0.1 * math.log(max(factor, 1.0))
    if not (mscale and mscale_all_dim):
        return growth + 1.0
    return (mscale * growth + 1.0) / (mscale_all_dim * growth + 1.0)


def _written(rope: Rope, rules: RopeRules) -> dict[str, Any]:
    names = {
        "default": "",
        "linear": "factor",
        "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
        "yarn": "factor beta_fast beta_slow truncate attention_factor "
        "original_max_position_embeddings",
        "longrope": "short_factor long_factor attention_factor original_max_position_embeddings",
    }[rope.rope_type].split()
    written = {"rope_type": rope.rope_type, "rope_theta": rope.rope_theta}
    if rules.part_of_head:
        written["partial_rotary_factor"] = rope.partial_rotary_factor
    for name in names:
        value = getattr(rope, name)
        written[name] = list(value) if isinstance(value, tuple) else value
    return written
