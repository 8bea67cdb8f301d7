"""Writes the goldens: what transformers computes for the tiny models of families.py.

    python tests/goldens/make.py [case ...]

<case>.json holds
  config          what save_pretrained writes
  config_old      the same model in the form of transformers 4
  tensors         names and shapes
  seed, scale     they give the weights (tests/tiny_checkpoints.py); digest: their checksum
  measured        gap: the smallest distance between the two best logits of a greedy step;
                  sharpness: see `sharpness_of`; logits: their standard deviation;
                  moves: how far each of the case's moves takes the logits, relative to the largest
<case>.npz holds, in int32 and float32
  text_i [T], logits_i [T, V]       texts run alone and the logits of every position
  prompt_i [T], greedy_i [32]       prompts and their greedy continuations, each run alone
The seed is the first whose greedy tokens no rounding can change: see `why_not`.
"""

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny_checkpoints
from goldens import families

HERE = Path(__file__).resolve().parent
MIN_GAP = 5e-3  # float32 moves these logits by about 1e-5
MIN_SHARPNESS = 3.0
MIN_MOVE = 1e-2  # a hundred times the tests' tolerance


def hf_config(case: dict[str, Any]) -> Any:
    kind = transformers.CONFIG_MAPPING[case["model_type"]]
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return kind(**{**special, **copy.deepcopy(case["config"])}, dtype="float32")


def saved(config: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return json.loads((Path(folder) / "config.json").read_text())


def read_config(content: dict[str, Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(content))
        return transformers.AutoConfig.from_pretrained(folder)


def build(content: dict[str, Any], weights: dict[str, np.ndarray]) -> Any:
    """The model of a config.json with these weights; only eager attention has soft caps."""
    model = transformers.AutoModelForCausalLM.from_config(
        read_config(content), attn_implementation="eager", dtype=torch.float32
    ).eval()
    missing, surplus = model.load_state_dict(
        {name: torch.from_numpy(array.copy()) for name, array in weights.items()}, strict=False
    )
    model.tie_weights()
    tied = ["lm_head.weight"] if model.config.tie_word_embeddings else []
    assert list(missing) == tied, missing
    assert not surplus, surplus
    return model


def tensors_of(content: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as save_pretrained writes them: without the head where it is tied."""
    model = transformers.AutoModelForCausalLM.from_config(read_config(content))
    names = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        names.pop("lm_head.weight")
    return dict(sorted(names.items()))


@torch.no_grad()
def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    output = model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False)
    return output.logits[0].float().numpy()


@torch.no_grad()
def greedy_of(model: Any, prompt: np.ndarray) -> tuple[np.ndarray, float]:
    """Tokens of transformers' generate, and the smallest top-2 gap of their steps."""
    model.generation_config = transformers.GenerationConfig()
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=families.NEW_TOKENS,
        pad_token_id=0,
    )[0].numpy()
    assert len(tokens) == len(prompt) + families.NEW_TOKENS
    gap = np.inf
    for end in range(len(prompt), len(tokens)):
        best = np.argsort(last := logits_of(model, tokens[:end])[-1])
        gap = min(gap, float(last[best[-1]] - last[best[-2]]))
        assert gap < MIN_GAP or best[-1] == tokens[end], "generate and a full forward disagree"
    return tokens[len(prompt) :].astype(np.int32), gap


@torch.no_grad()
def sharpness_of(model: Any, tokens: np.ndarray) -> float:
    """A query's largest probability times the keys it sees, the mean in the bluntest layer.

    1 if attention is uniform.
    """
    output = model(torch.from_numpy(tokens.astype(np.int64))[None], output_attentions=True)
    per_layer = []
    for p in output.attentions:
        seen = (p > 0).sum(-1)
        few = seen < 5  # the first queries can't be sharp
        per_layer.append((p.amax(-1) * seen)[~few].mean().item())
    return min(per_layer)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.max(np.abs(a - b)) / np.max(np.abs(b)))


def moved(content: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    other = copy.deepcopy(content)
    inner = other
    for key in path[:-1]:
        inner = inner[key]
    assert path[-1] in inner, path
    inner[path[-1]] = value
    return other


def why_not(arrays: dict[str, np.ndarray], measured: dict[str, Any]) -> str | None:
    """Why this seed won't do, or None."""
    if measured["gap"] < MIN_GAP:
        return f"gap {measured['gap']:.2g}"
    if measured["sharpness"] < MIN_SHARPNESS:
        return f"sharpness {measured['sharpness']:.3g}"
    for key, tokens in arrays.items():
        if key.startswith("greedy") and len(set(tokens.tolist())) < 8:
            return f"{key} repeats itself"
    if measured["moves"] and min(measured["moves"].values()) < MIN_MOVE:
        return f"a move is too small: {measured['moves']}"
    return None


def make(name: str) -> None:
    case = families.CASES[name]
    content = saved(hf_config(case))
    old = case["old"]
    print(name)
    tensors = tensors_of(content)
    assert tensors == tensors_of(old)
    scale = case.get("scale", 1.5)
    vocabulary = content["vocab_size"]

    for seed in range(50):
        weights = {
            tensor: tiny_checkpoints.make_weight(
                tensor, shape, model_type=case["model_type"], seed=seed, scale=scale
            )
            for tensor, shape in tensors.items()
        }
        model = build(content, weights)
        arrays: dict[str, np.ndarray] = {}
        rng = np.random.default_rng(seed)
        for i, length in enumerate(case.get("texts", families.TEXTS)):
            arrays[f"text_{i}"] = rng.integers(vocabulary, size=length).astype(np.int32)
            arrays[f"logits_{i}"] = logits_of(model, arrays[f"text_{i}"])
        gaps = []
        for i, length in enumerate(case.get("prompts", families.PROMPTS)):
            arrays[f"prompt_{i}"] = rng.integers(vocabulary, size=length).astype(np.int32)
            arrays[f"greedy_{i}"], gap = greedy_of(model, arrays[f"prompt_{i}"])
            gaps.append(gap)
        measured: dict[str, Any] = {
            "gap": min(gaps),
            "sharpness": sharpness_of(model, arrays["text_0"]),
            "logits": float(np.std(arrays["logits_0"])),
            "moves": {},
        }
        texts = len(case.get("texts", families.TEXTS))
        old_model = build(old, weights)
        assert all(
            np.array_equal(logits_of(old_model, arrays[f"text_{i}"]), arrays[f"logits_{i}"])
            for i in range(texts)
        ), "the old form is another model"
        for path, value in case["moves"]:
            other = build(moved(content, path, value), weights)
            measured["moves"][f"{'.'.join(path)}={value}"] = max(
                distance(logits_of(other, arrays[f"text_{i}"]), arrays[f"logits_{i}"])
                for i in range(texts)
            )
        reason = why_not(arrays, measured)
        if reason is None:
            break
        print(f"  seed {seed}: {reason}")
    else:
        raise SystemExit(f"{name}: no seed will do")

    facts = {
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "seed": seed,
        "scale": scale,
        "digest": tiny_checkpoints.digest(weights),
        "measured": measured,
        "config": content,
        "config_old": old,
        "tensors": tensors,
    }
    np.savez_compressed(HERE / f"{name}.npz", allow_pickle=False, **arrays)
    (HERE / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"  seed {seed}: {json.dumps(measured)}")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for case_name in sys.argv[1:] or families.CASES:
        make(case_name)
