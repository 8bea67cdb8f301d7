"""Every family and switch against transformers: on the committed goldens, and live (`reference`).

The goldens' models are random, so their attention is sharp by construction and any number of their
config that is read wrongly moves the logits by percents; the tests' tolerance is 1e-4.
"""

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_checkpoints
from flax import nnx
from goldens import families
from safetensors.numpy import load_file
from tiny_checkpoints import Golden

import jaxllm
from jaxllm.families import from_hf, to_hf

# What the issue asks for; float32 is off by 2e-6 to 1e-5 of the largest logit.
TOLERANCE = 1e-4

pytestmark = pytest.mark.usefixtures("strict_jax")


def distance(ours: Any, theirs: Any) -> float:
    """The largest difference, relative to the largest number."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype == np.float32
    return float(np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs)))


class Tiny:
    """A golden, its folder, the model loaded from there, and the model's compiled passes."""

    def __init__(self, golden: Golden, folder: Path):
        self.golden, self.folder = golden, folder
        self.model, tokenizer = jaxllm.load(folder, dtype="float32")
        assert tokenizer is None
        self.texts, self.logits = golden.group("text"), golden.group("logits")
        self.prompts = [p.tolist() for p in golden.group("prompt")]
        self.greedy = [g.tolist() for g in golden.group("greedy")]
        graph, self.state = nnx.split(self.model)

        @jax.jit
        def forward(state, tokens, positions=None, segment_ids=None):
            return nnx.merge(graph, state)(tokens, positions, segment_ids)

        @jax.jit
        def step(state, tokens, segment_ids, cache):
            model = nnx.merge(graph, state)
            hidden, cache = model.hidden(tokens, segment_ids=segment_ids, cache=cache)
            return model.head(hidden), cache

        self._forward, self._step = forward, step

    def forward(self, tokens, positions=None, segment_ids=None) -> np.ndarray:
        return np.asarray(self._forward(self.state, tokens, positions, segment_ids))

    def decode(
        self, texts: list[np.ndarray], *, rope_lengths: list[int], skip: int = 0
    ) -> list[np.ndarray]:
        """The logits of every position, texts side by side in one cache, by chunks and by tokens.

        `skip` leaves that many places free behind the first chunk, as a wrong length would.
        """
        lengths = np.array([len(text) for text in texts], np.int32)
        longest = int(lengths.max())
        cache = jaxllm.KVCache.create(self.model.config, len(texts), longest, jnp.float32)
        cache = dataclasses.replace(cache, rope_lengths=np.array(rope_lengths, np.int32))
        sizes = [7, *[1] * 6, 7, 7]  # both on an empty and on a full ring
        sizes += [1] * (longest - sum(sizes))
        assert sum(sizes) == longest
        parts, at = [], 0
        for size in sizes:
            tokens = np.zeros((len(texts), size), np.int32)
            real = (np.arange(at, at + size) < lengths[:, None]).astype(np.int32)
            for row, text in zip(tokens, texts, strict=True):
                part = text[at : at + size]
                row[: len(part)] = part
            logits, cache = self._step(self.state, tokens, real, cache)
            parts.append(np.asarray(logits))
            if at == 0 and skip:
                cache = dataclasses.replace(cache, lengths=cache.lengths + jnp.int32(skip))
            at += size
        if not skip:
            np.testing.assert_array_equal(cache.lengths, lengths)
        whole = np.concatenate(parts, axis=1)
        return [row[:length] for row, length in zip(whole, lengths, strict=True)]

    def generate(self, prompts: list[list[int]], **options: Any) -> list[list[int]]:
        new = families.NEW_TOKENS
        result = jaxllm.generate(
            self.model, None, prompts, max_new_tokens=new, stop_ids=[], **options
        )
        assert result.finish_reasons == ["length"] * len(prompts)
        return result.tokens


@pytest.fixture(scope="module", params=families.CASES)
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tiny]:
    """One model at a time: pytest runs all tests of a case before it goes on to the next."""
    golden = tiny_checkpoints.read_golden(request.param)
    folder = tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp(request.param), golden)
    yield Tiny(golden, folder)
    jax.clear_caches()  # the programs of twenty models are of no use to the next one


def moved(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The config with one number changed."""
    other = copy.deepcopy(config)
    inner = other
    for key in path[:-1]:
        inner = inner[key]
    assert path[-1] in inner
    inner[path[-1]] = value
    return other


# ---------------------------------------------------------------------------------- config.json


@pytest.mark.parametrize("name", families.CASES)
def test_old_and_new_spelling_are_one_config(name: str) -> None:
    golden = tiny_checkpoints.read_golden(name)
    config = from_hf(golden.config)
    assert from_hf(golden.config_old) == config
    assert from_hf(to_hf(config)) == config


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [(name, path, value) for name, case in families.CASES.items() for path, value in case["moves"]],
)
def test_no_number_of_the_config_is_dropped(name: str, path: tuple[str, ...], value: Any) -> None:
    golden = tiny_checkpoints.read_golden(name)
    assert from_hf(moved(golden.config, path, value)) != from_hf(golden.config)


def test_longrope_has_an_older_name() -> None:
    """Which transformers 5 no longer reads; the first Phi-3 checkpoints of 128k tokens have it."""
    golden = tiny_checkpoints.read_golden("phi3_longrope")
    older = moved(golden.config_old, ("rope_scaling", "type"), "su")
    assert from_hf(older) == from_hf(golden.config)


def test_qwen_without_a_window_does_not_slide() -> None:
    """A null is no window, whatever use_sliding_window says."""
    golden = tiny_checkpoints.read_golden("qwen2_window")
    config = from_hf(moved(golden.config_old, ("sliding_window",), None))
    assert set(config.layer_types) == {"full_attention"}


# ---------------------------------------------------------------------------------- the goldens


def test_logits_are_the_originals(tiny: Tiny) -> None:
    """The longest text, alone; `test_rows_are_as_if_alone` has the others."""
    assert distance(tiny.forward(tiny.texts[0][None])[0], tiny.logits[0]) < TOLERANCE


def test_a_changed_number_is_seen(tiny: Tiny, tmp_path: Path) -> None:
    """The twin of the test above."""
    path, value = families.CASES[tiny.golden.name]["moves"][0]
    config = moved(tiny.golden.config, path, value)
    other = Tiny(tiny.golden, tiny_checkpoints.write_checkpoint(tmp_path, tiny.golden, config))
    assert distance(other.forward(tiny.texts[0][None])[0], tiny.logits[0]) > 10 * TOLERANCE


def test_rows_are_as_if_alone(tiny: Tiny) -> None:
    """Padded on the right, padded on the left, and two texts packed into one row."""
    longest, shortest = max(map(len, tiny.texts)), tiny.texts[-1]
    n = len(shortest)
    tokens, positions, segments, places = [], [], [], []

    def add_row(*spans: tuple[int, int]) -> None:
        """A row with text i at column start, for each (i, start)."""
        row, position, segment = np.zeros((3, longest), np.int32)
        for number, (i, start) in enumerate(spans):
            text = tiny.texts[i]
            span = slice(start, start + len(text))
            row[span], position[span], segment[span] = text, np.arange(len(text)), number + 1
            places.append((len(tokens), span, i))
        tokens.append(row)
        positions.append(position)
        segments.append(segment)

    for i, text in enumerate(tiny.texts):
        add_row((i, 0))
        if len(text) < longest:
            add_row((i, longest - len(text)))
    last = len(tiny.texts) - 1
    add_row((last, 0), (last, n))

    logits = tiny.forward(np.stack(tokens), np.stack(positions), np.stack(segments))
    for row, span, i in places:
        assert distance(logits[row, span], tiny.logits[i]) < TOLERANCE, (row, span)

    unmarked = tiny.forward(np.stack(tokens), np.stack(positions), np.ones_like(np.stack(segments)))
    row, span, i = places[-1]
    assert distance(unmarked[row, span], tiny.logits[i]) > 10 * TOLERANCE


def test_prefill_then_decode_is_the_full_forward(tiny: Tiny) -> None:
    """At every position, for texts of different lengths in one cache, by chunks and by tokens."""
    lengths = [len(text) for text in tiny.texts]
    for ours, theirs in zip(
        tiny.decode(tiny.texts, rope_lengths=lengths), tiny.logits, strict=True
    ):
        assert distance(ours, theirs) < TOLERANCE
    wrong = tiny.decode(tiny.texts, rope_lengths=lengths, skip=1)
    assert distance(wrong[0], tiny.logits[0]) > 10 * TOLERANCE


@pytest.mark.slow
def test_greedy_tokens_are_the_originals(tiny: Tiny) -> None:
    """In a batch, with the prompts whole; and alone, with the prompts by chunks."""
    assert tiny.generate(tiny.prompts) == tiny.greedy
    for prompt, greedy in zip(tiny.prompts, tiny.greedy, strict=True):
        assert tiny.generate([prompt], prefill_chunk=5) == [greedy]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3_longrope", "phi3_longrope_window"])
def test_greedy_tokens_do_not_depend_on_the_chunks(name: str, tmp_path: Path) -> None:
    """Chunks of one token, of a length that divides nothing, and of more than a window."""
    golden = tiny_checkpoints.read_golden(name)
    tiny = Tiny(golden, tiny_checkpoints.write_checkpoint(tmp_path, golden))
    for prefill_chunk in (1, 7, 16):
        assert tiny.generate(tiny.prompts, prefill_chunk=prefill_chunk) == tiny.greedy


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen3", "phi3_longrope"])
def test_greedy_tokens_of_a_fused_model_are_the_originals(name: str, tmp_path: Path) -> None:
    """A row alone, whose layers are a chain, and several; each of what stands around products."""
    golden = tiny_checkpoints.read_golden(name)
    tiny = Tiny(golden, tiny_checkpoints.write_checkpoint(tmp_path, golden))
    jaxllm.fuse(tiny.model)
    assert [block.why_not_fused(1) for block in tiny.model.layers] == [None] * len(
        tiny.model.layers
    )
    assert tiny.generate(tiny.prompts) == tiny.greedy
    assert tiny.generate(tiny.prompts[:1]) == tiny.greedy[:1]


@pytest.mark.slow
def test_a_changed_number_is_seen_in_greedy_tokens(tmp_path: Path) -> None:
    golden = tiny_checkpoints.read_golden("mistral")
    config = moved(golden.config, ("sliding_window",), 8)
    tiny = Tiny(golden, tiny_checkpoints.write_checkpoint(tmp_path, golden, config))
    assert all(
        ours != theirs
        for ours, theirs in zip(tiny.generate(tiny.prompts), tiny.greedy, strict=True)
    )


def test_a_cache_that_is_not_made_again_is_seen(tmp_path: Path) -> None:
    """Past longrope's boundary, keys that were turned by the short list give other tokens."""
    golden = tiny_checkpoints.read_golden("phi3_longrope")
    tiny = Tiny(golden, tiny_checkpoints.write_checkpoint(tmp_path, golden))
    prompt, greedy = tiny.prompts[1], tiny.greedy[1]
    boundary = golden.config["original_max_position_embeddings"]
    assert len(prompt) < boundary < len(prompt + greedy)
    # 0 is the length so far: the list changes at the boundary, and the keys stay as they are.
    text = np.array(prompt + greedy, np.int32)
    best = tiny.decode([text], rope_lengths=[0])[0].argmax(-1)
    same = best[len(prompt) - 1 : -1] == greedy
    assert same[: boundary - len(prompt) + 1].all()
    assert not same[boundary - len(prompt) + 1 :].all()


# ------------------------------------------------------------------------------ transformers, live


@pytest.fixture(scope="module")
def original(tiny: Tiny, transformers: ModuleType) -> Iterator[Any]:
    """The same folder in transformers. Eager attention, for the others have no soft caps."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these models are too small for two to pay
    yield read_original(transformers, tiny.folder)
    torch.set_num_threads(threads)


def read_original(transformers: ModuleType, folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype="float32"
    ).eval()
    model.generation_config = transformers.GenerationConfig()  # no stop ids
    return model


def original_states(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits of each row, and what each layer returns; the last is behind the last norm."""
    import torch

    with torch.no_grad():
        out = model(
            torch.from_numpy(tokens.astype(np.int64)), use_cache=False, output_hidden_states=True
        )
    return out.logits.numpy(), [state.numpy() for state in out.hidden_states]


def fresh_text(tiny: Tiny) -> np.ndarray:
    """Two rows that are in no golden."""
    rng = np.random.default_rng(1)
    return rng.integers(tiny.model.config.vocab_size, size=(2, 41)).astype(np.int32)


@pytest.mark.reference
def test_live_logits_and_every_layer(tiny: Tiny, original: Any) -> None:
    tokens = fresh_text(tiny)
    graph, _ = nnx.split(tiny.model)

    @jax.jit
    def forward(state, tokens):
        model = nnx.merge(graph, state)
        states = [model.embed_tokens(tokens)]
        for block in model.layers:
            states.append(block(states[-1])[0])
        states[-1] = model.norm(states[-1])
        return model.head(states[-1]), states

    ours, our_states = forward(tiny.state, tokens)
    theirs, their_states = original_states(original, tokens)
    assert distance(ours, theirs) < TOLERANCE
    for layer, (a, b) in enumerate(zip(our_states, their_states, strict=True)):
        assert distance(a, b) < TOLERANCE, layer
    assert distance(tiny.forward(tokens), theirs) < TOLERANCE
    assert distance(tiny.forward(tokens[:, ::-1]), theirs) > 10 * TOLERANCE


@pytest.mark.reference
def test_live_greedy_tokens(tiny: Tiny, original: Any) -> None:
    """The goldens are what transformers says today."""
    import torch

    for prompt, greedy in zip(tiny.prompts, tiny.greedy, strict=True):
        ids = torch.tensor([prompt])
        out = original.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=families.NEW_TOKENS,
            pad_token_id=0,
        )
        assert out[0, len(prompt) :].tolist() == greedy


@pytest.mark.reference
def test_live_transformers_reads_what_we_save(
    tiny: Tiny, transformers: ModuleType, tmp_path: Path
) -> None:
    jaxllm.save(tiny.model, None, tmp_path)
    tokens = fresh_text(tiny)
    theirs, _ = original_states(read_original(transformers, tmp_path), tokens)
    assert distance(tiny.forward(tokens), theirs) < TOLERANCE
    files = sorted(tmp_path.glob("*.safetensors"))
    saved = {name: array for file in files for name, array in load_file(file).items()}
    stored = load_file(tiny.folder / "model.safetensors")
    assert saved.keys() == stored.keys()
    for name, array in stored.items():
        np.testing.assert_array_equal(saved[name], array, strict=True)
