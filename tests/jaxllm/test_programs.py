"""Few programs, few dispatches, all on the device, nothing kept."""

import dataclasses
import math
import os
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_device import absent
from flax import nnx
from jax import export
from tiny_checkpoints import read_golden, write_checkpoint
from tiny_models import LONGROPE, SLIDING, TINY, build

import jaxllm
from jaxllm import programs
from jaxllm.config import GenerationDefaults, Runtime

FP32 = Runtime(dtype="float32")


def test_one_program_a_bucket(tiny):
    prompts = [[1] * n for n in (3, 9, 17, 30, 5)]
    before = jaxllm.compile_count()
    result = jaxllm.generate(tiny, None, prompts, max_new_tokens=200)
    assert jaxllm.compile_count() - before <= 2  # one chunk size, one cache size
    assert sum(len(tokens) for tokens in result.tokens) == 1000
    again = jaxllm.compile_count()
    jaxllm.generate(tiny, None, [[2] * n for n in (4, 8, 20, 31, 6, 7)], max_new_tokens=190)
    assert jaxllm.compile_count() == again
    jaxllm.generate(tiny, None, [[1]], max_new_tokens=200)
    assert jaxllm.compile_count() > again  # another batch bucket: the counter counts


def test_prompts_are_read_without_graphs(tiny):
    """The public `prefill` may be called within a jit, where no options can be given."""
    programs.prefill_without_graphs.clear_cache()
    before = programs.prefill._cache_size()
    jaxllm.generate(tiny, None, [[1] * 5], max_new_tokens=300)
    assert programs.prefill._cache_size() == before
    assert programs.prefill_without_graphs._cache_size() == 1


@pytest.mark.parametrize("steps", [16, 9])
def test_n_tokens_a_dispatch(tiny, steps):
    result = jaxllm.generate(tiny, None, [5], max_new_tokens=64, steps_per_dispatch=steps)
    assert len(result.tokens[0]) == 64
    assert result.timings.dispatches == math.ceil(64 / steps)


def test_steps_a_dispatch_share_a_program_up_to_64(tiny):
    def generate(steps):
        jaxllm.generate(tiny, None, [3], max_new_tokens=70, steps_per_dispatch=steps)
        return jaxllm.compile_count()

    before = generate(64)
    assert generate(5) == generate(16) == before
    assert generate(65) > before


def test_warmup_compiles_all_that_is_needed(tiny):
    options = {"max_new_tokens": 20, "prefill_chunk": 32}
    jaxllm.warmup(tiny, None, batch_size=2, prompt_lengths=(10, 40, 120), **options)
    before = jaxllm.compile_count()
    for length in (10, 12, 40, 120):
        jaxllm.generate(tiny, None, [[1] * length, [2]], **options)
    assert jaxllm.compile_count() == before


def test_warmup_takes_the_options_of_the_call_to_come(tiny):
    options = {"max_new_tokens": 5, "stop_ids": list(range(40, 49))}  # one more than one step of 8
    jaxllm.warmup(tiny, None, prompt_lengths=(3,), stop=(), **options)
    before = jaxllm.compile_count()
    jaxllm.generate(tiny, None, [1, 2, 3], **options)
    assert jaxllm.compile_count() == before


def test_a_stream_frees_its_cache_when_it_is_left(stories):
    model, tokenizer, _ = stories
    before = len(jax.live_arrays())
    pieces = jaxllm.stream(model, tokenizer, "Once upon a time", steps_per_dispatch=4)
    next(pieces)
    assert len(jax.live_arrays()) > before
    assert pieces.result.finish_reasons == ["running"]
    with pytest.raises(ValueError, match="compile it before the first piece"):
        pieces.compile()
    so_far = pieces.result.tokens
    pieces.close()
    assert len(jax.live_arrays()) == before
    assert list(pieces) == []
    assert pieces.result.tokens == so_far
    with jaxllm.stream(model, tokenizer, "Once upon a time", steps_per_dispatch=4) as pieces:
        next(pieces)
    assert len(jax.live_arrays()) == before
    pieces = jaxllm.stream(model, tokenizer, "Once upon a time", steps_per_dispatch=4)
    next(pieces)
    del pieces
    assert len(jax.live_arrays()) == before  # at once, not when the garbage is collected


def test_a_row_that_grows_over_longropes_boundary_has_no_logits_from_there_on():
    """The other row has been over it from the beginning, or was told that it would be."""
    model = build(dataclasses.replace(TINY, rope=LONGROPE), FP32)
    weights, boundary = jaxllm.flatten(model), LONGROPE.original_max_position_embeddings
    lengths = np.array([boundary - 1, boundary + 2])
    text = np.arange(2 * (boundary + 2), dtype=np.int32).reshape(2, -1) % TINY.vocab_size
    for told in ((0, 0), (boundary + 9, 0)):
        cache = jaxllm.KVCache.create(model.config, 2, 2 * boundary, jnp.float32)
        cache = dataclasses.replace(cache, rope_lengths=jnp.asarray(told, jnp.int32))
        logits, cache = jaxllm.prefill(weights, text, lengths, cache)
        finite = [np.isfinite(logits).all(-1)]
        for _ in range(3):
            logits, cache = jaxllm.decode_step(weights, text[:, 0], cache)
            finite.append(np.isfinite(logits).all(-1))
        assert np.transpose(finite).tolist() == [
            [True, True, bool(told[0]), bool(told[0])],
            [True] * 4,
        ]

    cache = jaxllm.KVCache.create(model.config, 2, 2 * boundary, jnp.float32)
    logits, cache = jaxllm.prefill(weights, text[:, :5], np.array([99, 5]), cache)  # at most 5
    logits, cache = jaxllm.prefill(weights, text[:, 5:], np.array([2, boundary - 3]), cache, logits)
    assert np.isfinite(logits).all(-1).tolist() == [True, False]
    cache = dataclasses.replace(cache, lengths=jnp.zeros(2, jnp.int32))  # rows begin anew
    logits, cache = jaxllm.prefill(weights, text[:, :5], np.array([5, 5]), cache)
    logits, _ = jaxllm.decode_step(weights, text[:, 0], cache)
    assert np.isfinite(logits).all()


def test_models_that_differ_in_their_defaults_alone_share_programs(tiny):
    jaxllm.generate(tiny, None, [1], max_new_tokens=4)
    before = jaxllm.compile_count()
    other = nnx.clone(tiny)
    other.generation = GenerationDefaults(stop_ids=(3,), temperature=0.5)
    jaxllm.generate(other, None, [1], max_new_tokens=4, stop_ids=[])
    assert jaxllm.compile_count() == before
    assert other.generation.stop_ids == (3,)


def test_flattening_changes_nothing_that_another_thread_could_see(tiny, monkeypatch):
    model, flatten = nnx.clone(tiny), jax.tree.flatten
    own = model.generation = GenerationDefaults(stop_ids=(3,), temperature=0.5)
    seen = []

    def looking(*arguments):
        seen.append(model.generation)
        return flatten(*arguments)

    monkeypatch.setattr(jax.tree, "flatten", looking)
    weights = jaxllm.flatten(model)
    assert [*seen, model.generation] == [own, own]
    assert weights.model().generation == GenerationDefaults()


def test_parameters_that_were_put_back_as_numpy_arrays(tiny):
    model = nnx.clone(tiny)
    nnx.update(model, jax.device_get(nnx.state(model)))
    assert isinstance(model.norm.weight.get_value(), np.ndarray)
    expected = jaxllm.generate(tiny, None, [5, 9, 2], max_new_tokens=4).tokens
    before = jaxllm.compile_count()
    assert jaxllm.generate(model, None, [5, 9, 2], max_new_tokens=4).tokens == expected
    assert jaxllm.compile_count() == before


@pytest.mark.own_errors
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"weights": None}, r"it takes what jaxllm.flatten\(model\) returns, got NoneType"),
        ({"cache": None}, "it takes what KVCache.create returns, got NoneType"),
        ({"tokens": [[1, 2]]}, "tokens must be an array, got list"),
        ({"tokens": np.ones(2, int)}, r"tokens must be integers \[B, T\] of the cache's 2 rows"),
        (
            {"tokens": np.ones((2, 0), int)},
            r"tokens must be .* one or more in each, got .*\[2, 0\]",
        ),
        ({"counts": np.ones((), int)}, r"counts must be integers \[B\] of .*, got int32\[\]"),
        ({"counts": np.ones(3, int)}, r"counts must be integers \[B\] of .*, got int32\[3\]"),
        ({"counts": np.ones(2, np.float32)}, r"counts must be integers .*, got float32\[2\]"),
        ({"logits": np.ones((1, 61), np.float32)}, r"logits must be \[2, 61\]"),
    ],
)
def test_what_prefill_does_not_take(given, sentence):
    arguments = {
        "weights": jaxllm.flatten(build(TINY)),
        "tokens": np.ones((2, 3), int),
        "counts": np.ones(2, int),
        "cache": jaxllm.KVCache.create(TINY, 2, 8, jnp.float32),
    }
    with pytest.raises(ValueError, match=f"^prefill: {sentence}"):
        jaxllm.prefill(**{**arguments, **given})


@pytest.mark.own_errors
@pytest.mark.parametrize("tokens", [np.ones((), int), np.ones((2, 1), int), np.ones(3, int)])
def test_what_decode_step_does_not_take(tokens):
    cache = jaxllm.KVCache.create(TINY, 2, 8, jnp.float32)
    with pytest.raises(ValueError, match=r"^decode_step: tokens must be integers \[B\] of the"):
        jaxllm.decode_step(jaxllm.flatten(build(TINY)), tokens, cache)


RINGS = dataclasses.replace(SLIDING, layer_types=("sliding_attention",) * 2)


@pytest.mark.parametrize(
    ("config", "kv_dtype", "room"),
    [
        (TINY, jnp.float32, 4),
        (SLIDING, jnp.float32, 4),  # of one layer a ring
        (TINY, jnp.int8, 64),  # codes have room for a multiple of 64
        (RINGS, jnp.float32, None),
    ],
)
def test_logits_of_a_row_without_room_are_nan(config, kv_dtype, room):
    weights = jaxllm.flatten(build(config, FP32))
    tokens, few = np.ones((2, 6), int), 2
    full = 6 if room is None else min(room, 6)

    def prefill(count):
        cache = jaxllm.KVCache.create(config, 2, 4, kv_dtype)
        return jaxllm.prefill(weights, tokens, np.asarray([count, few]), cache)

    def lost(logits):
        return np.isnan(logits).all(-1).tolist()

    logits, cache = prefill(full)
    assert np.isfinite(logits).all()
    if room == 4:
        assert lost(prefill(full + 1)[0]) == [True, False]
    for length in range(full + 1, (room or 6) + 3):
        logits, cache = jaxllm.decode_step(weights, tokens[:, 0], cache)
        most = math.inf if room is None else room
        assert lost(logits) == [length > most, length - full + few > most]


@pytest.mark.parametrize("limit", [8, 20, 300])
def test_any_number_of_positions(limit):
    model = build(dataclasses.replace(TINY, max_position_embeddings=limit), FP32)
    for length in {1, limit - 3, limit - 1}:
        result = jaxllm.generate(model, None, [1] * length, max_new_tokens=4)
        assert len(result.tokens[0]) == min(4, limit - length)


@pytest.mark.slow
@pytest.mark.own_errors  # sizes that are letters are none to the check of shapes
@pytest.mark.parametrize(
    ("config", "how"), [(TINY, "fused"), (SLIDING, None), (TINY, "int8"), (TINY, "int4, fused")]
)
def test_one_exported_program_is_for_any_number_of_rows_and_tokens(config, how):
    model = build(config, FP32)
    if how and how.startswith("int"):
        jaxllm.quantize(model, how.partition(",")[0])
    if how and how.endswith("fused"):
        jaxllm.fuse(model)
    weights = jaxllm.flatten(model)
    arrays, [rows, length] = weights.arrays, export.symbolic_shape("b, t", constraints=["t <= 9"])

    def created(batch):
        cache = jaxllm.KVCache.create(config, batch, capacity=12, dtype="bfloat16")
        return jax.tree.flatten(cache)

    def read(arrays, tokens, counts, cache):
        given = jaxllm.Weights(arrays, weights.structure)
        cache = jax.tree.unflatten(created(1)[1], cache)
        logits, cache = jaxllm.prefill(given, tokens, counts, cache)
        after, cache = jaxllm.decode_step(given, jnp.argmax(logits, axis=-1), cache)
        return given.model()(tokens), logits, after

    def letters(*shape, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    cache = [letters(rows, *x.shape[1:], dtype=x.dtype) for x in created(1)[0]]
    given = (arrays, letters(rows, length), letters(rows), cache)
    with absent("NVIDIA H200"):
        jax.eval_shape(read, *given)
    exported = export.export(jax.jit(read))(*given)
    for counts in ([1], [9, 4, 2]):
        tokens = jnp.ones((len(counts), max(counts)), jnp.int32)
        call = (arrays, tokens, jnp.asarray(counts, jnp.int32), created(len(counts))[0])
        for found, wanted in zip(exported.call(*call), jax.jit(read)(*call), strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.fixture(scope="module")
def compiled(stories):
    """The decode program of a model of five layers, and the bytes of what goes in."""
    model = stories[0]
    weights = jaxllm.flatten(model)
    cache = jaxllm.KVCache.create(model.config, 2, 256, jnp.float32)
    state = jaxllm.DecodeState(
        cache,
        jnp.zeros((2, model.config.vocab_size)),
        jnp.ones(2, jnp.int32),
        jnp.zeros(2, jnp.int32),
    )
    settings = jaxllm.Sampling.of(2, temperature=0.5, top_p=0.9)
    program = jaxllm.decode.lower(
        weights,
        state,
        settings,
        jnp.zeros(8, jnp.int32),
        jnp.int32(4),
        jnp.zeros(2, bool),
        size=8,
    ).compile()

    def size(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    return program, size(weights), size(cache), size(state)


HOST = ("callback", "infeed", "outfeed", " send(", " recv(", "S(5)")


def host_operations(text):
    return [word for word in HOST if word in text]


def large_constants(text, limit=2**20):
    sizes = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f64": 8, "s64": 8, "u64": 8}
    found = []
    for dtype, dims in re.findall(r"= (\w+)\[([\d,]*)\]\S* constant\(", text):
        count = math.prod(int(d) for d in dims.split(",") if d)
        if count * sizes.get(dtype, 4) > limit:
            found.append((dtype, dims))
    return found


def test_decode_stays_on_the_device(compiled):
    text = compiled[0].as_text()
    assert host_operations(text) == []
    assert large_constants(text) == []
    assert "layer_3/attention" in text


def test_these_checks_can_fail():
    def chatty(x):
        jax.debug.callback(lambda x: None, x)
        return x + jnp.asarray(np.random.default_rng(0).random((600, 600)), jnp.float32)

    text = jax.jit(chatty).lower(jnp.zeros((600, 600))).compile().as_text()
    assert host_operations(text)
    assert large_constants(text)


def test_decode_takes_the_parameters_and_reuses_the_cache(compiled):
    program, weights, cache, state = compiled
    sizes = program.memory_analysis()
    assert weights + state <= sizes.argument_size_in_bytes <= 1.01 * (weights + state) + 4096
    assert cache <= sizes.alias_size_in_bytes <= 1.01 * state + 4096


def test_live_arrays_are_constant_over_100_steps(tiny):
    weights = jaxllm.flatten(tiny)
    cache = jaxllm.KVCache.create(tiny.config, 2, 128, jnp.float32)
    state = jaxllm.DecodeState(
        cache, jnp.zeros((2, 61)), jnp.full(2, 120, jnp.int32), jnp.zeros(2, jnp.int32)
    )
    settings, stop = jaxllm.Sampling.of(2), jnp.full(8, -1, jnp.int32)
    steps, halted = jnp.int32(1), jnp.zeros(2, bool)
    counts = set()
    for _ in range(101):
        state, out = jaxllm.decode(
            weights, state, settings, stop, steps, halted, size=1, greedy=True
        )
        counts.add(len(jax.live_arrays()))
    assert int(state.cache.lengths[0]) == 101
    assert out.tokens.shape == (2, 1)
    assert len(counts) <= 2  # the first call's outputs stand beside nothing yet
    del state, out


@pytest.mark.reference
@pytest.mark.slow
def test_decoding_is_three_times_as_fast_as_transformers(shared, stories, transformers):
    import torch

    model, _, reference = stories
    folder = shared / "data/stories260K"
    original = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor(reference["prompt_ids"], dtype=torch.long)[None]

    def theirs():
        start = time.perf_counter()
        with torch.no_grad():
            out = original.generate(
                prompt, max_new_tokens=100, min_new_tokens=100, do_sample=False, pad_token_id=0
            )
        assert out.shape[1] == prompt.shape[1] + 100
        return 100 / (time.perf_counter() - start)

    def ours():
        ids = reference["prompt_ids"].tolist()
        result = jaxllm.generate(model, None, ids, max_new_tokens=100, stop_ids=[])
        return result.timings.decode_tokens_per_s

    theirs(), ours()
    best_theirs, best_ours = max(theirs() for _ in range(3)), max(ours() for _ in range(3))
    print(f"transformers {best_theirs:.0f} tokens/s, jaxllm {best_ours:.0f} tokens/s")
    assert best_ours >= 3 * best_theirs


SHARDED = """
import sys, numpy as np, jax, jaxllm
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
rows = lambda path, shape: NamedSharding(mesh, P("x") if len(shape) == 2 else P())
model, _ = jaxllm.load(sys.argv[1], dtype="float32", sharding=rows)
weight = model.layers[0].mlp.up_proj.weight[...]
assert weight.addressable_shards[0].data.shape[0] * 4 == weight.shape[0]
ids = [int(i) for i in sys.argv[2].split(",")]
print(jaxllm.generate(model, None, [ids, ids[:2]], max_new_tokens=20, stop_ids=[]).tokens[0])
"""


@pytest.mark.slow
def test_weights_spread_over_four_devices_give_the_same_tokens(stories, shared):
    _, _, reference = stories
    ids = ",".join(map(str, reference["prompt_ids"].tolist()))
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, shared / "data/stories260K", ids],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(reference["generated_ids"].tolist()[:20])


AROUND = """
import sys, jax, jaxllm
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
before, _ = jaxllm.load(sys.argv[1], dtype="float32")
tokens = jaxllm.generate(before, None, [[3, 1, 4]], max_new_tokens=6, stop_ids=[]).tokens
with jax.set_mesh(mesh):
    inside, _ = jaxllm.load(sys.argv[1], dtype="float32")
    spread, _ = jaxllm.load(sys.argv[1], dtype="float32", sharding=NamedSharding(mesh, P()))
    for model in (before, inside, spread):
        found = jaxllm.generate(model, None, [[3, 1, 4]], max_new_tokens=6, stop_ids=[]).tokens
        assert found == tokens
"""


@pytest.mark.slow
def test_within_a_mesh_models_load_and_generate(tmp_path):
    write_checkpoint(tmp_path / "llama", read_golden("llama"))
    subprocess.run(
        [sys.executable, "-c", AROUND, tmp_path / "llama"],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        check=True,
    )


WARM = """
import sys, jax, jaxllm
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
rows = lambda path, shape: NamedSharding(mesh, P("x" if shape[0] % 4 == 0 and shape[1:] else None))
model, _ = jaxllm.load(sys.argv[1], dtype="float32", sharding=rows)
options = {"max_new_tokens": 6, "prefill_chunk": 4, "steps_per_dispatch": 2}
jaxllm.warmup(model, None, batch_size=2, prompt_lengths=[13], **options)
compiled = jaxllm.compile_count()
jaxllm.generate(model, None, [[3] * 13, [1]], stop_ids=[], **options)
assert jaxllm.compile_count() == compiled
"""


@pytest.mark.slow
def test_warmup_compiles_for_the_caches_that_xla_spreads(tmp_path):
    write_checkpoint(tmp_path / "gemma3", read_golden("gemma3"))  # one key head, which XLA splits
    subprocess.run(
        [sys.executable, "-c", WARM, tmp_path / "gemma3"],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        check=True,
    )


def test_a_dispatch_takes_no_more_steps_than_it_has_places_for(tiny):
    state = jaxllm.DecodeState(
        jaxllm.KVCache.create(tiny.config, 1, 128, jnp.float32),
        jnp.zeros((1, 61)),
        jnp.full(1, 9, jnp.int32),
        jnp.zeros(1, jnp.int32),
    )
    stop, halted = jnp.full(8, -1, jnp.int32), jnp.zeros(1, bool)
    state, out = jaxllm.decode(
        jaxllm.flatten(tiny),
        state,
        jaxllm.Sampling.of(1),
        stop,
        jnp.int32(5),
        halted,
        size=2,
        greedy=True,
    )
    assert out.tokens.shape == (1, 2)
    assert (state.cache.lengths.tolist(), state.left.tolist()) == ([2], [7])


def test_only_rows_that_run_are_halted(tiny):
    ended = jnp.asarray([programs.LENGTH, programs.RUNNING], jnp.int32)
    state = jaxllm.DecodeState(
        jaxllm.KVCache.create(tiny.config, 2, 128, jnp.float32),
        jnp.zeros((2, 61)),
        jnp.full(2, 9, jnp.int32),
        ended,
    )
    stop, halted = jnp.full(8, -1, jnp.int32), jnp.ones(2, bool)
    settings = jaxllm.Sampling.of(2)
    _, out = jaxllm.decode(
        jaxllm.flatten(tiny), state, settings, stop, jnp.int32(2), halted, size=2, greedy=True
    )
    assert out.ended.tolist() == [programs.LENGTH, programs.STOP]
    assert out.tokens.tolist() == [[-1, -1]] * 2
