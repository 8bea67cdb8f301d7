"""The whole decoder: one forward pass for training, prefill and decoding."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny_models
from absent_device import absent
from flax import nnx
from kernels import equations
from numerics import assert_as_accurate
from tiny_models import ALL, LONGROPE, SLIDING, TINY

from jaxllm.cache import KVCache
from jaxllm.config import REMAT, Rope, Runtime
from jaxllm.model import Transformer
from jaxllm.ops import cross_entropy
from pallas_kernels import _compat

pytestmark = pytest.mark.usefixtures("strict_jax")

LONG = dataclasses.replace(TINY, rope=LONGROPE)  # chooses its lists above 9 tokens
GELU = dataclasses.replace(
    TINY,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=6,
    hidden_act="gelu",
    qkv_bias=True,
    qk_norm=True,
    rope=Rope(1e4, "yarn", factor=2.0, attention_factor=1.1, original_max_position_embeddings=16),
)
TOKENS = tiny_models.tokens(2, 12)
CONFIGS = {"plain": TINY, "sliding": SLIDING, "all switches": ALL, "longrope": LONG, "gelu": GELU}


def expected(model: Transformer, tokens: Any, dtype: Any = np.float32) -> list[np.ndarray]:
    """Logits [T, V] of one row on the plain path, and in truth."""
    config, weights = tiny_models.as_dict(model.config), tiny_models.weights(model)
    row = np.asarray(tokens)
    return [oracles.decoder(config, weights, row, dtype=d) for d in (jnp.dtype(dtype), np.float64)]


@functools.partial(jax.jit, static_argnums=0)
def step(graph, state, tokens, cache, segment_ids):
    model = nnx.merge(graph, state)
    hidden, cache = model.hidden(tokens, segment_ids=segment_ids, cache=cache)
    return model.head(hidden), cache


# ------------------------------------------------------------------------------------- one forward


def test_what_is_no_config_is_refused():
    with pytest.raises(ValueError, match="^model: config must be a ModelConfig, got None$"):
        Transformer(None, rngs=nnx.Rngs(0))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name):
    model = tiny_models.build(CONFIGS[name])
    logits = tiny_models.logits(model, TOKENS)
    assert logits.dtype == np.float32
    for row, text in zip(logits, TOKENS, strict=True):
        assert_as_accurate(row, *expected(model, text))


def test_the_check_can_fail():
    """One number of one weight, by a thousandth."""
    model = tiny_models.build(TINY)
    near = expected(model, TOKENS[0])
    weight = model.layers[0].self_attn.v_proj.weight
    weight[...] = weight[...].at[0, 0].multiply(1.001)
    with pytest.raises(AssertionError, match="error is"):
        assert_as_accurate(tiny_models.logits(model, TOKENS)[0], *near)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        *((name, [4, 4, *[1] * 4]) for name in CONFIGS),
        ("sliding", [5, *[1] * 7]),
        ("all switches", [1] * 12),
    ],
)
def test_prefill_and_decode_are_the_full_forward(name, chunks):
    """At every position; rows of 12 and 7 tokens in a cache that is just large enough."""
    config = CONFIGS[name]
    model = tiny_models.build(config)
    graph, state = nnx.split(model)
    lengths = np.array([12, 7])
    cache = KVCache.create(config, 2, 12, jnp.float32)
    cache = dataclasses.replace(cache, rope_lengths=jnp.asarray(lengths, jnp.int32))
    parts, at = [], 0
    for size in chunks:
        real = np.arange(at, at + size) < lengths[:, None]
        chunk = jnp.where(real, TOKENS[:, at : at + size], jnp.int32(3))  # padding is any token
        logits, cache = step(graph, state, chunk, cache, jnp.asarray(real, jnp.int32))
        parts.append(np.asarray(logits))
        at += size
        assert cache.lengths.tolist() == np.minimum(at, lengths).tolist()
    whole = np.concatenate(parts, axis=1)
    for row, text, length in zip(whole, TOKENS, lengths, strict=True):
        assert_as_accurate(row[:length], *expected(model, text[:length]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
@pytest.mark.parametrize("name", ["plain", "sliding"])
def test_padding_needs_no_room_outside_a_compiled_program(name, dtype):
    """There attention knows the lengths, and refuses those beyond the cache; both rows fill up."""
    model = tiny_models.build(CONFIGS[name])
    graph, state = nnx.split(model)
    cache = KVCache.create(model.config, 2, 8, dtype)
    room = cache.layers[-1].k.shape[1]  # codes lie in buffers of 64
    eager = compiled = dataclasses.replace(cache, lengths=cache.lengths + jnp.int32(room - 8))
    for size, counts in ((6, (6, 5)), (4, (2, 1)), (4, (0, 2)), (1, (0, 0)), (3, (0, 0))):
        real = np.arange(size) < np.array(counts)[:, None]
        tokens, ids = TOKENS[:, :size], jnp.asarray(real, jnp.int32)
        truth, compiled = step(graph, state, tokens, compiled, ids)
        hidden, eager = model.hidden(tokens, segment_ids=ids, cache=eager)
        np.testing.assert_allclose(model.head(hidden)[real], truth[real], rtol=1e-4, atol=1e-4)
    # A token more than there is room for is still refused
    sentence = rf"kv_lengths\[0\] is {room + 4}; a row has 0 to {room} keys"
    with pytest.raises(ValueError, match=sentence):
        model.hidden(TOKENS[:, :4], segment_ids=jnp.eye(2, 4, dtype=jnp.int32), cache=eager)


def test_a_cache_that_is_wrong_would_show():
    """The twin: a row believed to be one token longer."""
    model = tiny_models.build(TINY)
    graph, state = nnx.split(model)
    cache = KVCache.create(TINY, 2, 12, jnp.float32)
    ones = jnp.ones((2, 4), jnp.int32)
    _, cache = step(graph, state, TOKENS[:, :4], cache, ones)
    cache = dataclasses.replace(cache, lengths=cache.lengths + jnp.asarray([0, 1], jnp.int32))
    logits, _ = step(graph, state, TOKENS[:, 4:5], cache, ones[:, :1])
    near = [[x[4] for x in expected(model, text)] for text in TOKENS]
    assert_as_accurate(logits[0, 0], *near[0])
    with pytest.raises(AssertionError, match="error is"):
        assert_as_accurate(logits[1, 0], *near[1])


def test_half_precision_with_a_cache():
    """As near to the truth as the plain path in bfloat16."""
    model = tiny_models.build(ALL, Runtime(dtype="bfloat16"))
    graph, state = nnx.split(model)
    cache = KVCache.create(ALL, 2, 12, jnp.bfloat16)
    parts, at = [], 0
    for size in [5, *[1] * 7]:
        ones = jnp.ones((2, size), jnp.int32)
        logits, cache = step(graph, state, TOKENS[:, at : at + size], cache, ones)
        parts.append(np.asarray(logits))
        at += size
    for row, text in zip(np.concatenate(parts, axis=1), TOKENS, strict=True):
        plain, truth = expected(model, text, jnp.bfloat16)
        assert_as_accurate(row, plain, truth)
        with pytest.raises(AssertionError, match="error is"):
            assert_as_accurate(row, expected(model, text)[0], truth)


# ------------------------------------------------------------------------------ rows and documents


def pack(*lengths: int) -> tuple[list[np.ndarray], list[jax.Array]]:
    """Documents, and one row of them with positions, segment ids and two places of padding."""
    texts = [np.asarray(tiny_models.tokens(n, seed=n)) for n in lengths]
    row = np.concatenate([*texts, [0, 0]])
    positions = np.concatenate([*(np.arange(n) for n in lengths), [0, 0]])
    segments = np.concatenate([np.repeat(np.arange(len(lengths)) + 1, lengths), [0, 0]])
    return texts, [jnp.asarray(x, jnp.int32)[None] for x in (row, positions, segments)]


@pytest.mark.parametrize("name", ["all switches", "longrope"])
def test_packed_documents_are_as_if_alone(name):
    model = tiny_models.build(CONFIGS[name])
    texts, row = pack(5, 10, 3)
    logits = tiny_models.logits(model, *row)[0]
    parts = np.split(logits, np.cumsum([len(text) for text in texts]))
    for part, text in zip(parts[:3], texts, strict=True):
        assert_as_accurate(part, *expected(model, text))
    without = tiny_models.logits(model, row[0], row[1])[0]
    with pytest.raises(AssertionError, match="error is"):
        assert_as_accurate(without[5:15], *expected(model, texts[1]))


def test_gradient_of_packed_documents_is_the_sum():
    model = tiny_models.build(SLIDING)
    graph, state = nnx.split(model)
    texts, row = pack(5, 6)

    @jax.jit
    def gradient(state, tokens, positions, segments, targets):
        def loss(state):
            logits = nnx.merge(graph, state)(tokens, positions, segments)
            return cross_entropy(logits, targets)[0]

        return jax.grad(loss)(state)

    targets = np.concatenate([*([*text[1:], -100] for text in texts), [-100, -100]])
    packed = gradient(state, *row, jnp.asarray(targets, jnp.int32)[None])
    apart = None
    for text in texts:  # alone, in a row as long: padding behind it sees and is seen by nobody
        alone = [np.zeros(13, np.int32) for _ in range(3)]
        wanted = np.full(13, -100, np.int32)
        for array, values in zip(alone, (text, np.arange(len(text)), 1), strict=True):
            array[: len(text)] = values
        wanted[: len(text) - 1] = text[1:]
        part = gradient(state, *(jnp.asarray(x)[None] for x in (*alone, wanted)))
        part = jax.tree.map(np.asarray, part)
        apart = part if apart is None else jax.tree.map(np.add, apart, part)
    for ours, other in zip(jax.tree.leaves(packed), jax.tree.leaves(apart), strict=True):
        scale = np.max(np.abs(other))
        assert scale > 1e-3
        # Float32 sums of some hundred terms in another order
        np.testing.assert_allclose(ours, other, atol=1e-5 * scale, rtol=0)
        assert not np.allclose(ours, 1.001 * other, atol=1e-5 * scale, rtol=0)


def test_longrope_chooses_for_each_row_by_its_own_length():
    """A row of 9 real tokens takes the short list beside a row of 12 that takes the long one."""
    model = tiny_models.build(LONG)
    real = jnp.asarray(np.arange(12) < np.array([[9], [12]]), jnp.int32)
    logits = tiny_models.logits(model, TOKENS, None, real)
    assert_as_accurate(logits[0, :9], *expected(model, TOKENS[0, :9]))
    assert_as_accurate(logits[1], *expected(model, TOKENS[1]))
    unmarked = tiny_models.logits(model, TOKENS)
    with pytest.raises(AssertionError, match="error is"):
        assert_as_accurate(unmarked[0, :9], *expected(model, TOKENS[0, :9]))


def test_longrope_with_a_cache_chooses_by_the_length_so_far_if_none_is_planned():
    model = tiny_models.build(LONG)
    graph, state = nnx.split(model)
    cache = KVCache.create(LONG, 2, 12, jnp.float32)
    lengths = (12, 9)
    real = jnp.asarray(np.arange(12) < np.array(lengths)[:, None], jnp.int32)
    logits, _ = step(graph, state, TOKENS, cache, real)
    for row, text, length in zip(logits, TOKENS, lengths, strict=True):
        assert_as_accurate(row[:length], *expected(model, text[:length]))


def test_positions_turn_and_mask_nothing():
    model = tiny_models.build(SLIDING)
    here = tiny_models.logits(model, TOKENS)
    counted = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), (2, 12))
    np.testing.assert_allclose(tiny_models.logits(model, TOKENS, counted), here, atol=1e-6)
    far = tiny_models.logits(model, TOKENS, counted + jnp.int32(50))
    np.testing.assert_allclose(far, here, atol=1e-4)
    back = tiny_models.logits(model, TOKENS, counted[:, ::-1])
    assert np.max(np.abs(back - here)) > 0.1
    np.testing.assert_allclose(back[:, 0], here[:, 0], atol=1e-4)  # it still sees itself alone


# -------------------------------------------------------------------------- gradient checkpointing


# XLA's CPU compiler of jax 0.10.2 drops the barriers in front of a recomputation, and its default
# schedule then recomputes as soon as it can; this one keeps the order that takes least memory.
OPTIONS: dict[str, str | bool] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


@functools.cache
def compiled(remat: str) -> tuple[Any, Any]:
    """The compiled gradient of a model of several layers, and the gradient."""
    config = dataclasses.replace(TINY, num_hidden_layers=3, layer_types=())
    model = tiny_models.build(config, Runtime(remat=remat))
    graph, state = nnx.split(model)
    tokens = tiny_models.tokens(4, 48)

    def loss(state):
        return cross_entropy(nnx.merge(graph, state)(tokens[:, :-1]), tokens[:, 1:])[0]

    options = OPTIONS if jax.default_backend() == "cpu" else None
    program = jax.jit(jax.grad(loss)).lower(state).compile(compiler_options=options)
    return program, program(state)


def test_gradient_checkpointing_takes_less_memory():
    none, full, dots = (
        compiled(remat)[0].memory_analysis().temp_size_in_bytes
        for remat in ("none", "full", "dots")
    )
    assert full < 0.5 * none, (full, none)
    assert full < dots < 0.6 * none, (full, dots, none)


@pytest.mark.parametrize("remat", [name for name in REMAT if name != "none"])
def test_gradient_checkpointing_changes_no_gradient(remat):
    for ours, other in zip(
        jax.tree.leaves(compiled(remat)[1]), jax.tree.leaves(compiled("none")[1]), strict=True
    ):
        scale = float(jnp.max(jnp.abs(other)))
        # The same operations, fused otherwise
        np.testing.assert_allclose(ours, other, atol=1e-5 * scale, rtol=0)
        assert not np.allclose(1.001 * ours, other, atol=1e-5 * scale, rtol=0)


def attention_calls(remat: str, implementation: str) -> int:
    """How often the gradient of a model of three layers runs attention's forward kernel."""
    config = dataclasses.replace(
        TINY, num_hidden_layers=3, layer_types=(), head_dim=64, num_attention_heads=2
    )
    runtime = Runtime("bfloat16", implementation={"attention": implementation}, remat=remat)
    model = nnx.eval_shape(lambda: Transformer(config, runtime, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    tokens = jnp.zeros((1, 128), jnp.int32)
    positions = tokens

    def loss(state):
        return jnp.sum(nnx.merge(graph, state).hidden(tokens, positions)[0].astype(jnp.float32))

    with absent():
        jaxpr = jax.make_jaxpr(jax.grad(loss))(state).jaxpr
    names = [(e.primitive.name, e.params.get("name")) for e in equations(jaxpr)]
    return sum(
        primitive == "dot_product_attention_fwd_wrapper" or name == "flash_attention"
        for primitive, name in names
    )


@pytest.mark.aot
@pytest.mark.parametrize("implementation", ["pallas", "cudnn"])
@pytest.mark.parametrize(("remat", "times"), [("none", 1), ("save_attention", 1), ("full", 2)])
def test_save_attention_runs_attention_once(remat, times, implementation):
    assert attention_calls(remat, implementation) == 3 * times


# ---------------------------------------------------------------------------- what a program says


def names(program: Any) -> set[str]:
    """Of its operations, without the marks that differentiation leaves."""
    found = re.findall(r'op_name="([^"]*)"', program.as_text())
    return {re.sub(r"\w+\(|\)", "", name) for name in found}


def test_every_layer_has_a_name_in_the_compiled_program():
    graph, state = nnx.split(tiny_models.build(TINY))
    model = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
    forward = names(model.lower(state, TOKENS).compile())
    backward = names(compiled("full")[0])
    for found, layers in ((forward, 2), (backward, 3)):
        parts = ["embed/", "norm/", "head/"]
        parts += [f"layer_{i}/{part}/" for i in range(layers) for part in ("attention", "mlp")]
        for part in parts:
            assert any(part in name for name in found), part
        assert not any(f"layer_{layers}" in name for name in found)


def test_a_table_of_the_model():
    assert "Transformer" in nnx.tabulate(tiny_models.build(TINY), TOKENS)


def test_equal_models_share_a_program():
    """Configs and runtimes are compared by value, and a model's arrays are no constants of it."""
    count = 0

    @functools.partial(jax.jit, static_argnums=0)
    def run(graph, state, tokens):
        nonlocal count
        count += 1
        return nnx.merge(graph, state)(tokens)

    models = (tiny_models.build(TINY, Runtime(), seed=seed) for seed in (0, 1))
    one, two = (np.asarray(run(*nnx.split(model), TOKENS)) for model in models)
    assert count == 1
    assert np.max(np.abs(one - two)) > 0.1


def test_two_calls_are_equal():
    model = tiny_models.build(TINY)
    before = tiny_models.weights(model)
    np.testing.assert_array_equal(
        tiny_models.logits(model, TOKENS), tiny_models.logits(model, TOKENS)
    )
    for name, weight in tiny_models.weights(model).items():
        np.testing.assert_array_equal(weight, before[name])


def test_head_of_hidden_is_the_model():
    model = tiny_models.build(TINY)
    graph, state = nnx.split(model)

    @jax.jit
    def apart(state, tokens):
        model = nnx.merge(graph, state)
        hidden, cache = model.hidden(tokens)
        assert cache is None
        assert hidden.shape == (2, 12, TINY.hidden_size)
        return model.head(hidden), model.head(hidden[:, -1])

    logits, last = apart(state, TOKENS)
    assert last.shape == (2, TINY.vocab_size)
    whole = tiny_models.logits(model, TOKENS)
    np.testing.assert_allclose(logits, whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(last, whole[:, -1], rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------- switches


def test_a_tied_head_is_the_embedding():
    model = tiny_models.build(dataclasses.replace(TINY, tie_word_embeddings=True))
    assert not any(name.startswith("lm_head") for name in tiny_models.weights(model))
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((3, 24)), jnp.float32)
    table = np.asarray(model.embed_tokens.weight[...])
    np.testing.assert_allclose(model.head(hidden), hidden @ table.T, rtol=1e-5, atol=1e-5)
    graph, state = nnx.split(model)
    tokens = tiny_models.tokens(1, 4)
    gradient = jax.jit(jax.grad(lambda s: jnp.sum(nnx.merge(graph, s)(tokens)[0, :, 7])))(state)
    rows = np.any(np.asarray(gradient["embed_tokens"]["weight"][...]) != 0, axis=1)
    # From the head, row 7; from the embedding, the rows of the tokens
    assert set(np.flatnonzero(rows)) == {7, *np.asarray(tokens[0]).tolist()}


def test_the_final_soft_cap_bounds_the_logits():
    capped = dataclasses.replace(TINY, final_logit_softcapping=1.5)
    models = [tiny_models.build(config) for config in (TINY, capped)]
    free, bound = (tiny_models.logits(model, TOKENS) for model in models)
    assert np.max(np.abs(free)) > 1.5 > np.max(np.abs(bound))
    np.testing.assert_allclose(bound, 1.5 * np.tanh(free / 1.5), atol=1e-5)


def test_a_fresh_model_knows_nothing():
    """Parameters are drawn so that no token is likelier than another by much."""
    logits = tiny_models.logits(Transformer(TINY, rngs=nnx.Rngs(0)), TOKENS)
    assert np.max(np.abs(logits)) < 0.5
    surprise = np.log(np.exp(logits.astype(np.float64)).sum(axis=-1)).mean() - logits.mean()
    assert surprise == pytest.approx(math.log(61), abs=0.01)


def test_parameters_are_one_array_a_layer_with_llamas_names():
    names = set(tiny_models.weights(tiny_models.build(TINY)))
    layer = {f"self_attn.{x}_proj" for x in "qkvo"}
    layer |= {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    layer |= {"input_layernorm", "post_attention_layernorm"}
    assert names == {
        *(f"layers.{i}.{part}.weight" for i in range(2) for part in layer),
        "embed_tokens.weight",
        "norm.weight",
        "lm_head.weight",
    }


# --------------------------------------------------------------------------------------- errors


def traced(runtime: Runtime, **arrays: Any) -> Any:
    """The call of a model that is never made."""
    return jax.eval_shape(
        lambda arrays: Transformer(TINY, runtime, rngs=nnx.Rngs(0))(**arrays), arrays
    )


@pytest.mark.own_errors
@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (np.zeros(3, np.int32), r"tokens must be integers of shape \[B, T\], got int32\(3,\)"),
        (np.zeros((1, 3), np.float32), r"tokens must be integers .*, got float32\(1, 3\)"),
        (np.zeros((1, 65), np.int32), "65 tokens are more than the model's 64 positions"),
    ],
)
def test_tokens_that_cannot_be(tokens, sentence):
    with pytest.raises(ValueError, match=f"model: {sentence}"):
        traced(Runtime(), tokens=tokens)


def test_ids_may_be_lists_of_what_is_traced():
    model = tiny_models.build(tiny_models.TINY)
    ours = jax.jit(lambda a, b: model([[a, b]], positions=[[0, a]]))(3, 4)
    np.testing.assert_allclose(ours, model([[3, 4]], positions=[[0, 3]]), rtol=1e-5, atol=1e-6)


@pytest.mark.own_errors
@pytest.mark.parametrize("name", ["tokens", "positions", "segment_ids"])
def test_numbers_of_64_bits_are_not_cut(name):
    """2**32 + 5 would be id 5."""
    model, few = tiny_models.build(tiny_models.TINY), np.arange(3, dtype=np.int64)[None, :]
    given = {"tokens": few, "positions": few, "segment_ids": few + 1}
    model(**given)
    with pytest.raises(ValueError, match=f"^model: {name} must fit int32, but go from 42949"):
        model(**{**given, name: given[name] + np.int64(2**32)})


@pytest.mark.own_errors
@pytest.mark.parametrize("name", ["positions", "segment_ids"])
def test_shapes_that_disagree(name):
    with pytest.raises(
        ValueError, match=rf"model: {name} has shape \(1, 2\), but tokens have \(1, 3\)"
    ):
        traced(Runtime(), tokens=np.zeros((1, 3), int), **{name: np.zeros((1, 2), int)})


@pytest.mark.own_errors
@pytest.mark.parametrize("name", ["positions", "segment_ids"])
def test_fractions_are_not_cut(name):
    with pytest.raises(ValueError, match=f"model: {name} must be integers, got float32"):
        traced(Runtime(), tokens=np.zeros((1, 3), int), **{name: np.zeros((1, 3), np.float32)})


@pytest.mark.own_errors
@pytest.mark.parametrize(
    ("changed", "rows", "sentence"),
    [
        ({}, 3, "it has 3 rows, but there are tokens of 1"),
        ({"num_hidden_layers": 3, "layer_types": ()}, 1, "it has 3 layers, but the model 2"),
        ({"num_key_value_heads": 1}, 1, "layer 0 has 1 heads of 8, but the model 2 of 8"),
        (
            {"sliding_window": 4, "layer_types": ("full_attention", "sliding_attention")},
            1,
            "layer 1 keeps the last 4 tokens, but the model's sees all",
        ),
    ],
)
def test_a_cache_of_something_else(changed, rows, sentence):
    """One with a window was taken, and the logits behind its first chunk were wrong."""
    cache = KVCache.create(dataclasses.replace(TINY, **changed), rows, 16, jnp.float32)
    model = tiny_models.build(TINY)
    with pytest.raises(ValueError, match=f"^cache: {sentence}"):
        jax.eval_shape(lambda cache: model.hidden(np.zeros((1, 3), int), cache=cache), cache)


@pytest.mark.parametrize(
    ("implementation", "words"),
    [
        ("fast", "no implementation is named 'fast'; there are"),
        ("cudnn", "scale_softmax: no implementation is named 'cudnn'; there are"),
        ({"linear_cross_entropy": "fast"}, "^linear_cross_entropy: no implementation is named"),
        ({"atention": "xla"}, "the mapping names no op: atention; there are attention,"),
    ],
)
def test_an_implementation_that_does_not_exist_makes_no_model(implementation, words):
    with pytest.raises(ValueError, match=words):
        Transformer(TINY, Runtime(implementation=implementation), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_any_integers_will_do(dtype):
    model = tiny_models.build(TINY)
    other = np.asarray(TOKENS).astype(dtype)
    np.testing.assert_allclose(
        tiny_models.logits(model, other), tiny_models.logits(model, TOKENS), atol=1e-6
    )


def test_an_id_outside_the_vocabulary_reads_the_nearest_row():
    """It can't raise inside a compiled program."""
    model = tiny_models.build(TINY)
    outside = jnp.asarray([[0, 61, 1000, -1] * 3] * 2, jnp.int32)
    inside = jnp.asarray([[0, 60, 60, 0] * 3] * 2, jnp.int32)
    np.testing.assert_array_equal(
        tiny_models.logits(model, outside), tiny_models.logits(model, inside)
    )


# ------------------------------------------------------------------------------------- kernels

# Rows of every op are multiples of 16 bytes
KERNELS = dataclasses.replace(
    TINY,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    layer_types=(),
    head_dim=32,
    qk_norm=True,
)


def logits_and_gradient(dtype, implementation):
    """Of packed texts."""
    runtime = Runtime(dtype=dtype, param_dtype="float32", implementation=implementation)
    graph, state = nnx.split(tiny_models.build(KERNELS, runtime))
    tokens = tiny_models.tokens(1, 16)
    texts = jnp.asarray([[0] * 5 + [1] * 11], jnp.int32)

    def loss(state):
        logits = nnx.merge(graph, state)(tokens, segment_ids=texts)
        return jnp.mean(jnp.square(logits)), logits

    @jax.jit
    def both(state):
        (_, logits), gradient = jax.value_and_grad(loss, has_aux=True)(state)
        return logits, gradient

    return both(state)


by_xla = functools.cache(functools.partial(logits_and_gradient, implementation="xla"))


@pytest.mark.parametrize(
    "chosen",
    [
        *({op: "pallas-interpret"} for op in ("rms_norm", "rope", "glu", "embedding", "attention")),
        {"attention": "unfused-interpret"},
        "pallas-interpret",
    ],
    ids=str,
)
def test_the_model_runs_with_each_kernel(chosen):
    """Logits and gradients of packed texts with our kernels, interpreted, are those of XLA to
    rounding.
    """
    if not _compat.INTERPRETS_TRANSPOSED_WGMMA:
        pytest.skip("the interpreter of jax 0.10 can do too little")
    try:
        ours = jax.block_until_ready(logits_and_gradient("bfloat16", chosen))
        assert not _compat.races_found()
    finally:
        _compat.reset_interpreter()
    plain, truth = by_xla("bfloat16"), by_xla("float32")
    for mine, near, exact in zip(*map(jax.tree.leaves, (ours, plain, truth)), strict=True):
        exact = np.asarray(exact, np.float64)
        scale = float(np.abs(exact).max())
        # bfloat16 rounds what the two paths add up in another order: as far as plain is, and a
        # hundredth of the largest number beside it
        assert_as_accurate(mine, near, exact, largest_term=0.01 * scale / (4 * 2**-23))
