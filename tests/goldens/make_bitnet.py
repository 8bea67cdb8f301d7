"""Writes bitnet_linears.{json,npz}: a tiny BitNet with ternary projections, by transformers.

    TORCHDYNAMO_DISABLE=1 python tests/goldens/make_bitnet.py

bitnet_linears.json has the fields of make.py's files (no `config_old`); its config is that of a
checkpoint whose weights are not packed ("online"). `measured` has
  margin    how far the activations are from a tie of their rounding to int8, in steps, at least
  kinds     how far the logits of packed weights are from these, relative to the largest
  gap       as in make.py
bitnet_linears.npz holds texts, logits, prompts and greedy tokens as make.py's files do.
Activations at a tie are rounded one way or the other by the last bit of float32, and one step moves
the logits by a thousandth. So the texts are those among random ones that have none.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.integrations.bitnet import replace_with_bitnet_linear
from transformers.utils.quantization_config import BitNetQuantConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny_checkpoints
from goldens import families, make

HERE = Path(__file__).resolve().parent
TEXTS = (11, 9, 7)
PROMPTS = (4, 3)
NEW_TOKENS = 6
MIN_MARGIN = 1e-4  # five times what float32 moves a quotient of 127
MIN_GAP = 2e-2
ONLINE = {
    "quant_method": "bitnet",
    "linear_class": "autobitlinear",
    "quantization_mode": "online",
    "modules_to_not_convert": None,
}


def build(content: dict[str, Any], weights: dict[str, np.ndarray], **kind: Any) -> Any:
    """The model with its projections replaced by those of the kind, ternary as that one has it."""
    model = make.build(content, weights)
    replace_with_bitnet_linear(model, ["lm_head"], BitNetQuantConfig(**kind))
    state = {name: torch.from_numpy(array.copy()) for name, array in weights.items()}
    if kind["quantization_mode"] == "offline":
        for name in [name for name in state if name.endswith("_proj.weight")]:
            gamma = state[name].abs().mean().clamp_(min=1e-5)
            codes = (state[name] / gamma).round().clamp(-1, 1)
            inverse = kind["linear_class"] == "bitlinear"
            if inverse:
                codes = transformers.integrations.bitnet.pack_weights(codes)
            state[name] = codes
            state[f"{name}_scale"] = (1 / gamma if inverse else gamma).reshape(1)
    # Modules were replaced by ones without memory
    missing, surplus = model.to_empty(device="cpu").load_state_dict(state, strict=False)
    assert not surplus, surplus
    assert list(missing) == ["lm_head.weight"], missing
    model.tie_weights()
    inner = model.model  # the one buffer that is not stored
    inner.rotary_emb = type(inner.rotary_emb)(config=model.config)
    return model.eval()


class Margins:
    """The smallest distance of a quotient from a tie since `reset`."""

    def __init__(self, model: Any) -> None:
        self.reset()
        for module in model.modules():
            if type(module).__name__ == "AutoBitLinear":
                module.register_forward_pre_hook(self.look)

    def reset(self) -> None:
        self.least = 1.0

    def look(self, module: Any, arguments: Any) -> None:
        x = arguments[0].double()
        quotients = x * 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        self.least = min(self.least, float((quotients - quotients.floor() - 0.5).abs().min()))


def main() -> None:
    case = families.CASES["bitnet"]
    content = make.saved(make.hf_config(case))
    tensors, scale, seed = make.tensors_of(content), 1.5, 0
    weights = {
        name: tiny_checkpoints.make_weight(name, shape, model_type="bitnet", seed=seed, scale=scale)
        for name, shape in tensors.items()
    }
    said = {key: value for key, value in ONLINE.items() if key != "quant_method"}
    model = build(content, weights, **said)
    margins = Margins(model)
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    least, gap = 1.0, np.inf

    def draw(length: int, new: int) -> tuple[np.ndarray, np.ndarray, float]:
        """A text without ties, its greedy continuation and the gap of that."""
        while True:
            text = rng.integers(content["vocab_size"], size=length).astype(np.int32)
            tokens, found = text, np.inf
            for _ in range(new):
                last = np.sort(row := make.logits_of(model, tokens)[-1])
                found = min(found, float(last[-1] - last[-2]))
                tokens = np.append(tokens, np.int32(row.argmax()))
            margins.reset()
            make.logits_of(model, tokens)
            if margins.least >= MIN_MARGIN and found >= MIN_GAP:
                return text, tokens[length:], found

    for i, length in enumerate(TEXTS):
        arrays[f"text_{i}"], _, _ = draw(length, 0)
        least = min(least, margins.least)
        arrays[f"logits_{i}"] = make.logits_of(model, arrays[f"text_{i}"])
    for i, length in enumerate(PROMPTS):
        arrays[f"prompt_{i}"], arrays[f"greedy_{i}"], found = draw(length, NEW_TOKENS)
        least, gap = min(least, margins.least), min(gap, found)
    kinds = {}
    for kind in ("bitlinear", "autobitlinear"):
        packed = build(content, weights, linear_class=kind, quantization_mode="offline")
        kinds[kind] = max(
            make.distance(make.logits_of(packed, arrays[f"text_{i}"]), arrays[f"logits_{i}"])
            for i in range(len(TEXTS))
        )
    measured = {"margin": least, "kinds": kinds, "gap": gap}
    facts = {
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "seed": seed,
        "scale": scale,
        "digest": tiny_checkpoints.digest(weights),
        "measured": measured,
        "config": {**content, "quantization_config": ONLINE},
        "config_old": {},
        "tensors": tensors,
    }
    assert max(kinds.values()) < 1e-5, kinds
    np.savez_compressed(HERE / "bitnet_linears.npz", allow_pickle=False, **arrays)
    (HERE / "bitnet_linears.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(measured))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
