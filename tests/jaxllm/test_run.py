"""What a batch is given room for, and that it is refused before it is made."""

import dataclasses
import gc
import itertools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absent_device import absent
from flax import nnx
from tiny_models import LONGROPE, TINY, build

import jaxllm
from jaxllm import run as run_module
from jaxllm import train
from jaxllm.config import Runtime
from jaxllm.run import Run, bucket

FP32 = Runtime(dtype="float32")


def make_run(model, prompts, **options):
    defaults = {
        "max_new_tokens": 8,
        "settings": {},
        "stop_ids": [],
        "stop": (),
        "top_logprobs": 0,
        "steps_per_dispatch": 16,
        "prefill_chunk": 512,
        "kv_dtype": None,
    }
    return Run(model, None, prompts, **{**defaults, **options})


def test_compiling_a_stream_compiles_longropes_second_reading_too():
    model = build(dataclasses.replace(TINY, rope=LONGROPE), FP32)
    run = make_run(model, [[1, 2, 3]], max_new_tokens=20)
    run.compile()
    before = jaxllm.compile_count()
    for _ in run.dispatches():
        pass
    assert jaxllm.compile_count() == before
    assert run.result().timings.prefill_tokens == 3 + 10


def test_a_warm_up_compiles_longropes_second_reading_of_a_ragged_batch():
    """The other row has grown when the short one crosses: to 37 tokens, which 64 places hold."""
    model = build(dataclasses.replace(TINY, rope=LONGROPE), FP32)
    jaxllm.warmup(model, None, batch_size=2, prompt_lengths=(30,), max_new_tokens=20)
    before = jaxllm.compile_count()
    result = jaxllm.generate(model, None, [[1] * 30, [1, 2, 3]], max_new_tokens=20)
    assert jaxllm.compile_count() == before
    assert result.timings.prefill_tokens == 33 + 37 + 10


def test_a_row_at_the_models_last_position_shortens_no_dispatch():
    run = make_run(build(TINY, FP32), [[1] * 62, [1]], max_new_tokens=16)
    assert len(list(run.dispatches())) == 1
    assert [len(tokens) for tokens in run.result().tokens] == [2, 16]


def watched(monkeypatch: pytest.MonkeyPatch, run: Run) -> list[str]:
    """What `run` does, in order: begin a dispatch, take its tokens, hand them on."""
    seen: list[str] = []
    decode, device_get = run_module.decode, jax.device_get

    def begin(*arguments: Any, **keywords: Any) -> Any:
        seen.append("begin")
        return decode(*arguments, **keywords)

    def take(x: Any) -> Any:
        seen.append("take")
        return device_get(x)

    monkeypatch.setattr(run_module, "decode", begin)
    monkeypatch.setattr(run_module.jax, "device_get", take)
    for _ in run.dispatches():
        seen.append("hand on")
    return seen


def test_a_dispatch_begins_before_the_tokens_of_the_last_one_are_taken(monkeypatch):
    run = make_run(build(TINY, FP32), [[1, 2], [3]], max_new_tokens=[4, 10], steps_per_dispatch=4)
    assert watched(monkeypatch, run) == [
        *("begin", "begin", "take", "hand on"),
        *("begin", "take", "hand on", "take", "hand on"),
    ]
    assert [len(tokens) for tokens in run.result().tokens] == [4, 10]
    assert run.result().timings.dispatches == 3


def test_with_a_stop_string_the_tokens_are_taken_first(monkeypatch):
    monkeypatch.setattr(run_module, "_stop_strings", lambda *_: ("never",))
    run = make_run(build(TINY, FP32), [[1, 2]], max_new_tokens=6, steps_per_dispatch=3)
    assert watched(monkeypatch, run) == ["begin", "take", "hand on"] * 2


@pytest.mark.parametrize(("given", "crosses"), [(1, False), (2, True), (9, True), (10, False)])
def test_a_row_that_may_cross_longropes_boundary_has_its_tokens_taken_first(
    monkeypatch, given, crosses
):
    """The boundary is behind nine tokens, of which some are given and eight are made."""
    model = build(dataclasses.replace(TINY, rope=LONGROPE), FP32)
    run = make_run(model, [[1] * given], max_new_tokens=8, steps_per_dispatch=4)
    seen = watched(monkeypatch, run)
    assert len(run.result().tokens[0]) == 8
    if crosses:
        assert seen == ["begin", "take", "hand on"] * (len(seen) // 3)
    else:
        assert seen == ["begin", "begin", "take", "hand on", "take", "hand on"]


def test_where_the_loop_asks_the_host_no_dispatch_begins_ahead():
    """XLA's search for the threshold of a sampled token is a conditional, the kernel has none."""
    wide = dataclasses.replace(TINY, vocab_size=2**15)
    model = build(wide, FP32)
    by_xla = build(wide, Runtime(dtype="float32", implementation={"sampling_threshold": "xla"}))
    sampled = {"settings": {"temperature": 1.0}}
    with absent("NVIDIA H200"):
        assert make_run(model, [[1]], **sampled).ahead
        assert not make_run(by_xla, [[1]], **sampled).ahead
    with absent("NVIDIA A100-SXM4-80GB", 108):
        assert not make_run(model, [[1]], **sampled).ahead
        assert make_run(model, [[1]]).ahead


def test_a_sampler_that_cannot_run_is_refused_before_the_prompts_are_read(monkeypatch):
    by_name = Runtime(dtype="float32", implementation={"sampling_threshold": "pallas"})
    model = build(TINY, by_name)
    monkeypatch.setattr(run_module, "_stop_strings", lambda *_: ("never",))
    with absent("NVIDIA A100-SXM4-80GB", 108):
        with pytest.raises(NotImplementedError, match="^sampling_threshold: "):
            make_run(model, [[1]], settings={"temperature": 1.0})
        make_run(model, [[1]])


def test_on_several_devices_no_dispatch_begins_ahead(monkeypatch):
    model, one = build(TINY, FP32), run_module._sharding

    class Several(jax.sharding.SingleDeviceSharding):
        num_devices = 2

    assert make_run(model, [[1]]).ahead
    devices = lambda weights: Several(*one(weights).device_set)  # noqa: E731
    monkeypatch.setattr(run_module, "_sharding", devices)
    assert not make_run(model, [[1]]).ahead


def test_a_row_that_stops_while_the_next_dispatch_is_under_way():
    model = build(TINY, FP32)
    call = {"prompts": [[1, 2, 3], [4]], "max_new_tokens": 24}
    whole = jaxllm.generate(model, None, **call, stop_ids=[])
    stop_ids = [whole.tokens[0][2], whole.tokens[1][9]]
    ended = jaxllm.generate(model, None, **call, stop_ids=stop_ids)
    several = jaxllm.generate(model, None, **call, stop_ids=stop_ids, steps_per_dispatch=2)
    assert several.tokens == ended.tokens
    assert several.logprobs == ended.logprobs
    assert several.finish_reasons == ended.finish_reasons == ["stop", "stop"]
    longest = max(len(tokens) for tokens in ended.tokens)
    assert several.timings.dispatches == -(-longest // 2) < 12


@pytest.mark.parametrize(("ahead", "seconds"), [(True, 20.0), (False, 0.0)])
def test_the_time_of_who_takes_the_tokens_counts_while_the_device_goes_on(
    monkeypatch, ahead, seconds
):
    run = make_run(build(TINY, FP32), [[1, 2]], max_new_tokens=6, steps_per_dispatch=2)
    run.ahead = ahead
    now = [0.0]
    monkeypatch.setattr(run_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    for _ in run.dispatches():
        now[0] += 10
    assert run.result().timings.decode_s == seconds


def test_who_leaves_early_leaves_nothing_behind(monkeypatch):
    """Nor is the device still at work, with a cache that the next call may have no room beside."""
    model, awaited, wait = build(TINY, FP32), [], jax.block_until_ready
    gc.collect()
    before = len(jax.live_arrays())
    run = make_run(model, [[1, 2]], max_new_tokens=40, steps_per_dispatch=4)
    dispatches = run.dispatches()
    next(dispatches)
    monkeypatch.setattr(
        run_module.jax, "block_until_ready", lambda x: awaited.append(type(x)) or wait(x)
    )
    dispatches.close()
    assert awaited == [jaxllm.programs.Decoded]
    assert run.state is None
    assert len(jax.live_arrays()) == before


def test_it_is_no_part_of_a_compiled_function():
    model = build(TINY, FP32)

    def tokens(model, prompt):
        return jnp.asarray(jaxllm.generate(model, None, prompt, max_new_tokens=2).tokens)

    sentence = "^generate: it runs on the host and cannot be a part of a function that JAX transf"
    with pytest.raises(ValueError, match=sentence):
        nnx.jit(lambda model: tokens(model, [1]))(model)
    with pytest.raises(ValueError, match=sentence):
        jax.jit(lambda prompt: tokens(model, prompt))(jnp.ones((1, 2), jnp.int32))
    with pytest.raises(ValueError, match=sentence):
        jax.jit(lambda x: x + tokens(model, [1]))(1)
    with pytest.raises(ValueError, match=sentence):
        nnx.grad(lambda model: tokens(model, [1]).sum() * 1.0)(model)


def test_weights_on_a_mesh_whose_axes_are_explicit():
    model = build(TINY, FP32)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    spread = jax.device_put(model, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    sentence = r"^{}: .* spread as .*: the mesh must have axes of type Auto, as of jax.make_mesh\("
    with pytest.raises(ValueError, match=sentence.format("generate")):
        jaxllm.generate(spread, None, [1])
    with pytest.raises(ValueError, match=sentence.format("train")):
        train.init_state(spread, optax.sgd(0.1))


def test_one_mesh_around_a_call_and_then_another():
    """Sizes that were traced within the first are not of its mesh."""
    model = build(TINY, FP32)
    for name in "abc":
        kind = jax.sharding.AxisType.Auto if name == "c" else jax.sharding.AxisType.Explicit
        with jax.set_mesh(jax.make_mesh((1,), (name,), axis_types=(kind,))):
            result = jaxllm.generate(model, None, [1, 2, 3], max_new_tokens=2)
        assert len(result.tokens[0]) == 2


def test_a_batch_that_does_not_fit_is_refused_before_it_is_made():
    wide = dataclasses.replace(TINY, max_position_embeddings=2**20)
    model = build(wide, FP32)
    gc.collect()  # or arrays of earlier tests go in between
    before = len(jax.live_arrays())
    with pytest.raises(MemoryError, match=r"need \d\.\d TB, but \d+\.\d GB are free") as caught:
        jaxllm.generate(model, None, [[1]] * 4096, max_new_tokens=10**6)
    assert "\n" not in str(caught.value)
    assert len(jax.live_arrays()) == before
    result = jaxllm.generate(model, None, [[1]] * 2, max_new_tokens=4)
    assert [len(tokens) for tokens in result.tokens] == [4, 4]
    del result
    assert len(jax.live_arrays()) == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "length", "kv_dtype"), [(8, 500, None), (1, 30, None), (8, 500, "int8")]
)
def test_what_a_batch_needs_is_what_the_compiled_programs_take(dtype, rows, length, kv_dtype):
    """State and temporaries of the compiled prefill.

    XLA's CPU backend copies 16-bit weights to float32 with jax 0.10.2 and does without with 0.12,
    where the count is then above what is taken by those copies.
    """
    config = dataclasses.replace(
        TINY, max_position_embeddings=1024, hidden_size=256, intermediate_size=512, head_dim=32
    )
    model = build(config, Runtime(dtype=dtype))
    run = make_run(model, [[1] * length] * rows, kv_dtype=kv_dtype)
    chunk = max(size for _, size in run.chunks(length))
    cache = jaxllm.KVCache.create(config, run.batch, run.capacity, kv_dtype or dtype)
    sizes = (
        jaxllm.prefill.lower(
            run.weights,
            jnp.zeros((run.batch, chunk), jnp.int32),
            jnp.zeros(run.batch, jnp.int32),
            cache,
            jnp.zeros((run.batch, config.vocab_size)),
        )
        .compile()
        .memory_analysis()
    )
    taken = sizes.alias_size_in_bytes + sizes.temp_size_in_bytes
    copies = 0 if dtype == "float32" else 4 * sum(x.size for x in run.weights.arrays)
    assert taken <= run.size_bytes() <= 3 * taken + copies


def test_scores_are_counted_where_attention_has_them_in_memory():
    config = dataclasses.replace(TINY, max_position_embeddings=1024, head_dim=32)
    implementations = ("xla", "unfused", "cudnn", "pallas")
    with absent("NVIDIA H200"):
        runs = {
            name: make_run(
                build(config, Runtime(dtype="bfloat16", implementation={"attention": name})),
                [[1] * 500],
            )
            for name in implementations
        }
        wanted = {name: run.size_bytes() for name, run in runs.items()}
    run = runs["xla"]
    scores = 2 * 4 * config.num_attention_heads * 512 * run.capacity
    assert wanted["xla"] == wanted["unfused"] == wanted["cudnn"] + scores
    assert wanted["pallas"] == wanted["cudnn"]


def test_what_codes_save_and_cost():
    config = dataclasses.replace(TINY, max_position_embeddings=1024, head_dim=64)
    model = build(config, Runtime(dtype="bfloat16", implementation={"attention": "cudnn"}))
    with absent("NVIDIA H200"):
        runs = {kind: make_run(model, [[1] * 500], kv_dtype=kind) for kind in (None, "int8", "fp8")}
        wanted = {kind: run.size_bytes() for kind, run in runs.items()}
    heads = 2 * runs[None].capacity * config.num_key_value_heads
    saved = heads * config.num_hidden_layers * (2 * 64 - (64 + 4))
    numbers = heads * 64 * 4  # of one layer, on a CPU in float32
    assert wanted["int8"] == wanted["fp8"] == wanted[None] - saved + numbers


def test_buckets():
    assert [bucket(n) for n in (1, 2, 3, 5, 2048, 2049, 5000)] == [1, 2, 4, 8, 2048, 4096, 6144]
    assert bucket(3, 16) == 16


def test_text_that_was_held_back_comes_once_behind_the_last_token():
    class Marks:
        def push(self, ids):
            return "." * len(ids)

        def finish(self):
            return "!"

    run = make_run(build(TINY, FP32), [[1, 2], [3]], max_new_tokens=[3, 20])
    for row in run.rows:
        row.decoder = Marks()
    for _ in run.dispatches():
        pass
    assert run.result().texts == ["...!", "." * 20 + "!"]


def test_timings_are_of_all_dispatches_and_of_nothing_compiled_before(monkeypatch):
    """A clock that ticks whenever it is read; the row is read again where it crosses."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr(run_module, "time", clock)
    model = build(dataclasses.replace(TINY, rope=LONGROPE), FP32)
    run = make_run(model, [[1, 2, 3]], max_new_tokens=20, steps_per_dispatch=5)
    run.compile()
    dispatches = len(list(run.dispatches()))
    timings = run.result().timings
    assert (timings.prefill_s, timings.decode_s, timings.dispatches) == (2, dispatches, 5)


def test_penalties_count_on_where_a_row_crosses_longropes_boundary():
    model = build(dataclasses.replace(TINY, rope=LONGROPE), FP32)
    settings = {"frequency_penalty": 0.5}
    run = make_run(model, [[1, 2, 3]], max_new_tokens=12, steps_per_dispatch=4, settings=settings)
    for _ in run.dispatches():
        expected = np.bincount(run.rows[0].tokens, minlength=TINY.vocab_size)
        np.testing.assert_array_equal(run.state.counts[0], expected)
