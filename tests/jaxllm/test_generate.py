"""The loop: the same tokens alone and in company, few programs, all on the device, clear errors."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_tokenizers
import tokenizers
from flax import nnx
from tiny_models import LONGROPE, TINY, build
from tokenizers import models, normalizers

import jaxllm
from jaxllm.cache import KV_DTYPES
from jaxllm.config import GenerationDefaults, Runtime
from jaxllm.programs import MOST_COMPARED
from jaxllm.prompts import encode_prompts
from jaxllm.tokenizer import Tokenizer

FP32 = Runtime(dtype="float32")
PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [3, 3]]


def naive(model, prompt, count):
    """Greedy tokens by one full forward pass a token, on the right behind padding of segment 0."""
    tokens = list(prompt)
    size = 48
    for _ in range(count):
        padded = jnp.asarray([tokens + [0] * (size - len(tokens))], jnp.int32)
        real = jnp.arange(size)[None, :] < len(tokens)
        logits = forward(model, padded, None, real.astype(jnp.int32))
        tokens.append(int(jnp.argmax(logits[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


@jax.jit
def forward(model, *arguments):
    return model(*arguments)


# -------------------------------------------------------------------------------- the right tokens


def test_greedy_continuation_of_a_real_checkpoint(stories, strict_jax):
    model, _, reference = stories
    prompt = reference["prompt_ids"].tolist()
    result = jaxllm.generate(model, None, prompt, max_new_tokens=100, stop_ids=[])
    assert result.tokens == [reference["generated_ids"].tolist()]
    assert result.finish_reasons == ["length"]
    chosen = reference["step_logits"].astype(np.float64)
    logsumexp = np.log(np.exp(chosen - chosen.max(-1, keepdims=True)).sum(-1)) + chosen.max(-1)
    logprobs = chosen[np.arange(100), reference["generated_ids"]] - logsumexp
    np.testing.assert_allclose(result.logprobs[0], logprobs, atol=1e-3)


def test_step_logits_of_a_real_checkpoint_in_a_loop_of_ones_own(stories, strict_jax):
    model, _, reference = stories
    weights = jaxllm.flatten(model)
    prompt = jnp.asarray(reference["prompt_ids"])[None]
    cache = jaxllm.KVCache.create(model.config, 1, 128, jnp.float32)
    logits, cache = jaxllm.prefill(weights, prompt, jnp.asarray([prompt.shape[1]]), cache)
    worst = 0.0
    for expected, token in zip(reference["step_logits"], reference["generated_ids"], strict=True):
        worst = max(worst, float(np.abs(np.asarray(logits[0]) - expected).max()))
        assert int(jnp.argmax(logits[0])) == token
        logits, cache = jaxllm.decode_step(weights, jnp.argmax(logits, axis=-1), cache)
    assert worst < 1e-3
    assert worst > 0  # the numbers are the original's, not our own


def test_tokens_are_those_of_the_plain_forward_pass_in_any_batch_and_chunking(tiny, strict_jax):
    expected = [naive(tiny, prompt, 20) for prompt in PROMPTS]
    together = jaxllm.generate(tiny, None, PROMPTS, max_new_tokens=20, prefill_chunk=16)
    assert together.tokens == expected
    by_sevens = jaxllm.generate(
        tiny, None, PROMPTS, max_new_tokens=20, prefill_chunk=7, steps_per_dispatch=3
    )
    assert by_sevens.tokens == expected
    alone = [jaxllm.generate(tiny, None, prompt, max_new_tokens=20).tokens[0] for prompt in PROMPTS]
    assert alone == expected
    other = dataclasses.replace(tiny.config, sliding_window=5)
    assert naive(build(other, FP32), PROMPTS[2], 20) != expected[2]  # the window is seen


def test_longrope_rows_cross_the_boundary_each_at_its_own_time(strict_jax):
    """The plain forward pass chooses the list by the length of its text, so it is the measure."""
    config = dataclasses.replace(TINY, rope=LONGROPE)
    model = build(config, FP32)
    boundary = LONGROPE.original_max_position_embeddings
    prompts = [[5, 9, 2], list(range(1, boundary)), list(range(1, boundary + 1)), list(range(20))]
    together = jaxllm.generate(model, None, prompts, max_new_tokens=16, steps_per_dispatch=5)
    assert together.tokens == [naive(model, prompt, 16) for prompt in prompts]
    other = build(
        dataclasses.replace(
            TINY, rope=dataclasses.replace(LONGROPE, long_factor=LONGROPE.short_factor)
        ),
        FP32,
    )
    assert naive(other, prompts[0], 16) != together.tokens[0]  # the other list is felt


def rounded(x, kind):
    """Keys or values as a cache of 8 bits gives them back, said a second time."""
    largest, whole = {"int8": (127.0, True), "fp8": (448.0, False)}[kind]
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / np.float32(largest)
    codes = x / scale
    return (jnp.round(codes) if whole else codes.astype(jnp.float8_e4m3fn).astype(x.dtype)) * scale


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_greedy_tokens_over_a_cache_of_codes(tiny, monkeypatch, kind):
    """Those of the plain forward pass whose keys and values are rounded, in any chunking."""
    exact = jaxllm.generate(tiny, None, PROMPTS, max_new_tokens=20)
    found = [
        jaxllm.generate(tiny, None, PROMPTS, max_new_tokens=20, kv_dtype=kind, **options)
        for options in ({}, {"prefill_chunk": 7, "steps_per_dispatch": 3})
    ]
    alone = jaxllm.generate(tiny, None, PROMPTS[2], max_new_tokens=20, kv_dtype=kind)
    attention = jaxllm.ops.attention

    def over_rounded(q, k, v, **kwargs):
        return attention(q, rounded(k, kind), rounded(v, kind), **kwargs)

    monkeypatch.setattr(jaxllm.layers.ops, "attention", over_rounded)
    monkeypatch.setitem(globals(), "forward", jax.jit(lambda model, *rest: model(*rest)))
    expected = [naive(tiny, prompt, 20) for prompt in PROMPTS]
    for result in found:
        assert result.tokens == expected
    assert alone.tokens == [expected[2]]
    assert not np.allclose(found[0].logprobs, exact.logprobs, atol=1e-4)  # the rounding is felt


def test_how_far_codes_are_from_the_cache_of_numbers(stories):
    """Kullback-Leibler divergence of the next token, mean over a text that the model wrote.

    Measured: 0.00065 nats with int8, 0.0047 with fp8, whose numbers have three bits.
    """
    model, _, reference = stories
    text = jnp.concatenate([reference["prompt_ids"], reference["generated_ids"]])
    weights = jaxllm.flatten(model)

    def logprobs(dtype):
        cache, found = jaxllm.KVCache.create(model.config, 1, 128, dtype), []
        for token in text:
            logits, cache = jaxllm.decode_step(weights, token[None], cache)
            found.append(jax.nn.log_softmax(logits[0]))
        return np.stack(found).astype(np.float64)

    exact = logprobs(jnp.float32)
    far = {}
    for kind, dtype in KV_DTYPES.items():
        far[kind] = np.mean(np.sum(np.exp(exact) * (exact - logprobs(dtype)), axis=-1))
    assert 0 < far["int8"] < 0.002
    assert 0.002 < far["fp8"] < 0.01


def test_a_warm_up_fits_the_model(tiny):
    """Without lengths, whatever its positions; and says what was wrong under its own names."""
    jaxllm.warmup(tiny, None, max_new_tokens=4)
    for wrong, words in (
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be an integer of at least 1, got 2.5"),
        ({"prompt_lengths": 5}, "prompt_lengths must be a list of lengths or None, got 5"),
        ({"prompt_lengths": np.array(5)}, r"prompt_lengths must be a list .*, got array\(5\)"),
        ({"prompt_lengths": [0]}, "a prompt's length must be an integer from 1 to 511, got 0"),
        ({"prompt_lengths": [512]}, "a prompt's length must be an integer from 1 to 511, got 512"),
        ({"max_new_tokens": "4"}, "max_new_tokens must be an integer of at least 1, got '4'"),
    ):
        with pytest.raises(ValueError, match=f"^warmup: {words}$"):
            jaxllm.warmup(tiny, None, **wrong)


def test_a_warm_up_of_what_is_no_model():
    with pytest.raises(ValueError, match="^warmup: model must be a Transformer, not dict$"):
        jaxllm.warmup({}, None, prompt_lengths=[3])


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "top_k": 5}, {"top_logprobs": 2}, {"kv_dtype": "int8"}]
)
def test_no_array_moves_that_is_not_meant_to(tiny, options):
    """JAX's guard against transfers that nobody asked for has nothing to say."""
    run = functools.partial(jaxllm.generate, tiny, None, [[3, 1], [4, 1, 5]], max_new_tokens=4)
    wanted = run(**options).tokens
    with jax.transfer_guard("disallow"):
        assert run(**options).tokens == wanted


def test_an_option_that_there_is_not(tiny):
    tokenizer = Tokenizer(tiny_tokenizers.files(tiny_tokenizers.byte_level()))
    sentence = "^generate: there is no option 'temprature'; of sampling there are temperature, top"
    with pytest.raises(TypeError, match=sentence):
        jaxllm.stream(tiny, tokenizer, "<s>", temprature=1.0)
    with pytest.raises(TypeError, match=sentence):
        jaxllm.warmup(tiny, tokenizer, temprature=1.0)


def test_a_warm_up_takes_one_number_of_new_tokens_a_row(tiny):
    jaxllm.warmup(tiny, None, batch_size=2, max_new_tokens=[3, 200])
    before = jaxllm.compile_count()
    jaxllm.generate(tiny, None, [[1] * 312, [2]], max_new_tokens=[3, 200])
    assert jaxllm.compile_count() == before


@pytest.mark.parametrize("scalar", [np.int64, jnp.int32, np.array])
def test_ids_may_be_integers_of_any_kind(tiny, scalar):
    ours = jaxllm.generate(tiny, None, [scalar(3), scalar(5)], max_new_tokens=3)
    assert ours.tokens == jaxllm.generate(tiny, None, [3, 5], max_new_tokens=3).tokens


@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_arrays_for_lists_and_numbers(tiny, array):
    prompts = [[5, 9], [7, 1]]
    expected = jaxllm.generate(tiny, None, prompts, max_new_tokens=[3, 2]).tokens
    found = jaxllm.generate(tiny, None, array(prompts), max_new_tokens=array([3, 2])).tokens
    assert found == expected
    one = jaxllm.generate(tiny, None, array([5, 9]), max_new_tokens=array(3)).tokens
    assert one == expected[:1]
    for bad, words in ((array(5), "got 5"), ([[1], array(5)], "prompt 1 is 5; a prompt is a text")):
        with pytest.raises(ValueError, match=words):
            jaxllm.generate(tiny, None, bad)


def test_steps_without_end_are_those_of_the_models_positions(tiny):
    result = jaxllm.generate(tiny, None, [5], max_new_tokens=3, steps_per_dispatch=2**40)
    assert result.tokens == jaxllm.generate(tiny, None, [5], max_new_tokens=3).tokens


def test_streams_and_warmed_up_calls_over_codes(stories):
    model, tokenizer, _ = stories
    options = {"max_new_tokens": 24, "kv_dtype": "int8"}
    jaxllm.warmup(model, tokenizer, prompt_lengths=(5,), steps_per_dispatch=16, **options)
    before = jaxllm.compile_count()
    pieces = jaxllm.stream(model, tokenizer, "Once upon a time", **options)
    text = "".join(pieces)
    assert jaxllm.compile_count() == before
    assert jaxllm.generate(model, tokenizer, "Once upon a time", **options).texts == [text]


def test_a_sampled_row_does_not_depend_on_its_batch(tiny):
    settings = {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}
    seeds = [4, 2, 2**31, 7]
    together = jaxllm.generate(
        tiny, None, PROMPTS, max_new_tokens=12, seed=seeds, presence_penalty=0.3, **settings
    )
    for i in (0, 2):
        alone = jaxllm.generate(
            tiny,
            None,
            PROMPTS[i],
            max_new_tokens=12,
            seed=seeds[i],
            presence_penalty=0.3,
            prefill_chunk=16,
            **settings,
        )
        assert alone.tokens[0] == together.tokens[i]
    other = jaxllm.generate(
        tiny, None, PROMPTS, max_new_tokens=12, seed=0, presence_penalty=0.3, **settings
    )
    assert other.tokens != together.tokens


def test_64_bit_types_change_no_token(tiny):
    settings = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 4}
    expected = jaxllm.generate(tiny, None, PROMPTS, max_new_tokens=6, **settings).tokens
    with jax.enable_x64(True):
        assert jaxllm.generate(tiny, None, PROMPTS, max_new_tokens=6, **settings).tokens == expected


def test_settings_are_one_value_a_row(tiny):
    mixed = jaxllm.generate(
        tiny, None, [PROMPTS[0]] * 2, max_new_tokens=[3, 12], temperature=[0.0, 2.0], seed=3
    )
    greedy = jaxllm.generate(tiny, None, PROMPTS[0], max_new_tokens=12).tokens[0]
    assert mixed.tokens[0] == greedy[:3]
    assert mixed.tokens[1] != greedy
    assert [len(tokens) for tokens in mixed.tokens] == [3, 12]


# -------------------------------------------------------------------------------------------- ends


def test_stop_ids_end_a_row_and_stay_its_last_token(tiny):
    tokens = jaxllm.generate(tiny, None, PROMPTS[0], max_new_tokens=20).tokens[0]
    stop = next(token for token in tokens[3:] if token not in tokens[:3])
    at = tokens.index(stop)
    result = jaxllm.generate(tiny, None, PROMPTS[0], max_new_tokens=20, stop_ids=[stop])
    assert result.tokens == [tokens[: at + 1]]
    assert len(result.logprobs[0]) == at + 1
    assert result.finish_reasons == ["stop"]
    # More than are compared one by one
    others = [token for token in range(40) if token not in tokens]
    stops = [*others[:MOST_COMPARED], stop]
    many = jaxllm.generate(tiny, None, PROMPTS[0], max_new_tokens=20, stop_ids=stops)
    assert many.tokens == result.tokens
    own = dataclasses.replace(GenerationDefaults(), stop_ids=(32000, stop))
    model = build(tiny.config, FP32)
    model.generation = own
    assert jaxllm.generate(model, None, PROMPTS[0], max_new_tokens=20).tokens == result.tokens
    free = jaxllm.generate(model, None, PROMPTS[0], max_new_tokens=20, stop_ids=[])
    assert free.tokens == [tokens]


def test_the_models_positions_end_a_row():
    model = build(TINY, FP32)
    limit = TINY.max_position_embeddings
    result = jaxllm.generate(model, None, [[1] * (limit - 4), [2]], max_new_tokens=10)
    assert [len(tokens) for tokens in result.tokens] == [4, 10]
    assert result.finish_reasons == ["context", "length"]


def test_stop_strings_across_token_borders(stories):
    model, tokenizer, _ = stories
    whole = jaxllm.generate(model, tokenizer, "Once upon a time", max_new_tokens=40)
    text = whole.texts[0]
    for stop in ("girl named Lily", "ed to pl", "."):
        result = jaxllm.generate(
            model,
            tokenizer,
            ["Once upon a time", "Once upon a time"],
            max_new_tokens=40,
            stop=["not in it", stop],
            steps_per_dispatch=5,
        )
        assert result.texts == [text[: text.index(stop)]] * 2
        assert result.finish_reasons == ["stop"] * 2
        assert result.tokens[0] == whole.tokens[0][: len(result.tokens[0])]
        shown = tokenizer.decode(result.tokens[0])
        assert stop in shown  # up to the token that completed it, and no further
        assert stop not in tokenizer.decode(result.tokens[0][:-1])
    pieces = list(
        jaxllm.stream(
            model,
            tokenizer,
            "Once upon a time",
            max_new_tokens=40,
            stop="ed to pl",
            steps_per_dispatch=5,
        )
    )
    assert "".join(pieces) == text[: text.index("ed to pl")]
    assert len(pieces) > 1


def test_a_special_token_stops_as_a_stop_string(stories):
    """Its text is left out of what is searched for stop strings."""
    model, tokenizer, _ = stories
    call = {"max_new_tokens": 6, "prompts": [5, 1, 7]}
    likeliest = jaxllm.generate(model, tokenizer, **call, stop_ids=[]).tokens[0]
    tokenizer.special_ids = lambda texts: likeliest[2:3] if "<s>" in texts else []
    try:
        stopped = jaxllm.generate(model, tokenizer, **call, stop_ids=[], stop="<s>")
    finally:
        del tokenizer.special_ids
    assert stopped.tokens[0] == likeliest[:3]
    assert stopped.finish_reasons == ["stop"]
    assert tokenizer.special_ids(["<s>", "Once", "</s>", "no token"]) == [1, 2]


def test_stream_gives_the_text_of_generate(stories):
    model, tokenizer, _ = stories
    pieces = jaxllm.stream(model, tokenizer, "Once upon a time", max_new_tokens=40)
    text = "".join(pieces)
    whole = jaxllm.generate(model, tokenizer, "Once upon a time", max_new_tokens=40)
    assert text == whole.texts[0] == pieces.result.texts[0]
    assert pieces.result.tokens == whole.tokens
    assert pieces.result.timings.dispatches == math.ceil(40 / 16)


def test_a_continuation_keeps_the_space_before_its_first_word(stories):
    model, tokenizer, _ = stories
    prompt = "Once upon a time, there was a little girl"
    text = jaxllm.generate(model, tokenizer, prompt, max_new_tokens=8).texts[0]
    ids = tokenizer.encode(prompt)
    tokens = jaxllm.generate(model, None, ids, max_new_tokens=8).tokens[0]
    assert text.startswith(" named")
    assert prompt + text == tokenizer.decode(ids + tokens)


def test_logprobs_of_the_likeliest(tiny):
    result = jaxllm.generate(tiny, None, PROMPTS[:2], max_new_tokens=5, top_logprobs=3)
    logits = np.asarray(tiny(jnp.asarray([PROMPTS[0]], jnp.int32))[0, -1], np.float64)
    expected = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-expected)[:3]
    assert [i for i, _ in result.top_logprobs[0][0]] == best.tolist()
    np.testing.assert_allclose([p for _, p in result.top_logprobs[0][0]], expected[best], atol=1e-5)
    assert result.logprobs[0][0] == pytest.approx(expected[best[0]], abs=1e-5)
    assert [len(row) for row in result.top_logprobs] == [5, 5]


def test_surplus_rows_of_the_vocabulary_are_never_sampled(stories):
    """A model with more rows than the tokenizer has ids, and the surplus likelier than the rest."""
    small, tokenizer, _ = stories
    config = dataclasses.replace(small.config, vocab_size=600)
    model = jaxllm.Transformer(config, FP32, rngs=nnx.Rngs(0))
    surplus = jnp.full((88, config.hidden_size), 50.0).at[::2].multiply(-1.0)  # either sign is hot
    model.embed_tokens.weight[...] = jnp.concatenate([small.embed_tokens.weight[...], surplus])
    hot = jaxllm.generate(
        model, tokenizer, ["Once", "A dog"], max_new_tokens=8, temperature=[3.0, 0.0], stop_ids=[]
    )
    assert max(max(tokens) for tokens in hot.tokens) < 512
    free = jaxllm.generate(model, None, tokenizer.encode("Once"), max_new_tokens=8, stop_ids=[])
    assert max(free.tokens[0]) >= 512


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 4}])
def test_logits_that_are_not_finite_are_said(settings):
    """Of one row; the other goes well until then."""
    model = build(TINY, FP32)
    table = model.embed_tokens.weight
    table[...] = table[...].at[7].set(jnp.nan)
    assert len(jaxllm.generate(model, None, [[5, 9]], max_new_tokens=1, stop_ids=[]).tokens[0]) == 1
    with pytest.raises(ValueError, match="the logits of row 1 for position 1 are not finite"):
        jaxllm.generate(model, None, [[5], [7]], max_new_tokens=4, stop_ids=[], **settings)


@pytest.mark.parametrize(
    ("prompts", "options", "sentence"),
    [
        ([], {}, "no prompts"),
        ([[]], {}, "prompt 0 is empty"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[61]], {}, "id 61; ids are from 0 to 60"),
        ([[-1]], {}, "id -1"),
        ([[1, "a"]], {}, "prompt 0 holds 'a'"),
        ("text", {}, "prompt 0 is a text, which needs a tokenizer"),
        ([{"role": "user", "content": "hi"}], {}, "prompt 0 is a chat, which needs a tokenizer"),
        ([[1] * 512], {}, "prompt 0 has 512 tokens, but the model has 512 positions"),
        ([[1]], {"temperature": -0.1}, "temperature"),
        ([[1]], {"temperature": float("nan")}, "temperature"),
        ([[1]], {"top_p": 0.0}, "top_p"),
        ([[1]], {"top_p": 1.5}, "top_p"),
        ([[1]], {"top_k": -1}, "top_k"),
        ([[1], [2]], {"temperature": [1.0, 0.5, 0.2]}, "temperature"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, got 0"),
        ([[1], [2]], {"max_new_tokens": [1]}, "max_new_tokens has 1 entries for 2 prompts"),
        ([[1]], {"steps_per_dispatch": 0}, "steps_per_dispatch"),
        ([[1]], {"prefill_chunk": 0}, "prefill_chunk"),
        ([[1]], {"kv_dtype": "int4"}, "kv_dtype 'int4' is not one of int8, fp8, None"),
        ([[1]], {"kv_dtype": jnp.int8}, "is not one of int8, fp8, None"),
        ([[1]], {"kv_dtype": np.dtype("int8")}, "is not one of int8, fp8, None"),
        ([[1]], {"progress": 5}, "progress must be a function or None, got 5"),
        ([[1]], {"seed": jax.random.key(0)}, "seed must be an integer from 0 to 2**32 - 1, got a"),
        ([True, 2], {}, "prompt 0 holds True"),
        ([[1]], {"stop": "x"}, "stop strings need a tokenizer"),
        ([[1]], {"top_logprobs": 62}, "top_logprobs must be an integer from 0 to 61, got 62"),
        ([[1]], {"top_logprobs": 2.5}, "top_logprobs"),
        ([[1]], {"steps_per_dispatch": True}, "steps_per_dispatch"),
        ([[1]], {"stop_ids": ["</s>"]}, "stop_ids must be an integer from 0"),
        ([[1]], {"stop_ids": 5}, "stop_ids must be a list of token ids or None, got 5"),
        (
            [[1]],
            {"stop_ids": np.array(5)},
            "stop_ids must be a list of token ids or None, got array(5)",
        ),
        ([[1]], {"stop_ids": [2.7]}, "stop_ids"),
        ([[1]], {"stop_ids": [3, 61]}, "stop_ids must be an integer from 0 to 60, got 61"),
        ([[1]], {"stop_ids": [-1]}, "stop_ids must be an integer from 0 to 60, got -1"),
        (5, {}, "prompts are a text, a chat"),
        (None, {}, "prompts are a text, a chat"),
        (b"ab", {}, "prompts are a text, a chat"),
        ({"role": "user", "content": "hi"}, {}, "prompts are a text, a chat"),
        ([[1], 3], {}, "prompt 1 is 3; a prompt is a text"),
        ([1.5, 2], {}, "prompt 0 is 1.5; a prompt is a text"),
        ([[1.5, 2]], {}, "prompt 0 holds 1.5"),
    ],
)
def test_bad_calls_get_one_sentence(tiny, prompts, options, sentence):
    with pytest.raises(ValueError, match="^[^\n]*$") as caught:
        jaxllm.generate(tiny, None, prompts, **options)
    assert sentence in str(caught.value)


def test_a_model_that_has_no_weights():
    model = nnx.eval_shape(lambda: jaxllm.Transformer(TINY, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="^generate: the model has shapes in the place of weights"):
        jaxllm.generate(model, None, [1, 2])


def test_bad_calls_with_a_tokenizer(stories):
    model, tokenizer, _ = stories
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        jaxllm.generate(model, tokenizer, "")
    for stop in ([""], 5, 0):
        with pytest.raises(ValueError, match="stop strings must be texts .*, got"):
            jaxllm.generate(model, tokenizer, "a", stop=stop)
    with pytest.raises(ValueError, match="^generate: model must be a Transformer, not Tokenizer$"):
        jaxllm.generate(tokenizer, model, "a")
    with pytest.raises(ValueError, match="must be a jaxllm.Tokenizer or None, not jaxllm.model.T"):
        jaxllm.stream(model, model, "a")
    with pytest.raises(ValueError, match="must be a jaxllm.Tokenizer or None, not tokenizers.Tok"):
        jaxllm.generate(model, tokenizers.Tokenizer(models.BPE()), "a")
    with pytest.raises(ValueError, match="no chat template"):
        jaxllm.generate(model, tokenizer, [{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="needs a tokenizer"):
        jaxllm.stream(model, None, [1, 2])
    for prompts in (["a"], [[1, 2]], np.ones((1, 2), int)):
        with pytest.raises(ValueError, match="^stream: takes one prompt, not a list of them, got "):
            jaxllm.stream(model, tokenizer, prompts)
    with pytest.raises(ValueError, match="temperature"):
        jaxllm.stream(model, tokenizer, "a", temperature=-1.0)  # before the first piece


@pytest.mark.parametrize(
    "prompt", ["\ufeff", [{"role": "user", "content": "hi"}]], ids=["text", "chat"]
)
def test_prompts_of_which_no_token_is_made(tiny, prompt):
    """Even beside one that has tokens, where nothing else would stop it."""
    library = tiny_tokenizers.byte_level()
    library.normalizer = normalizers.Replace("\ufeff", "")
    tokenizer = Tokenizer(tiny_tokenizers.files(library, chat_template="{{ '' }}"))
    with pytest.raises(ValueError, match=r"^generate: the tokenizer makes no token of prompt 1, "):
        jaxllm.generate(tiny, tokenizer, [[1, 2], prompt], max_new_tokens=2)


def test_progress_is_of_all_rows(tiny):
    told = []
    jaxllm.generate(
        tiny,
        None,
        PROMPTS[:2],
        max_new_tokens=[3, 5],
        stop_ids=[],
        steps_per_dispatch=2,
        progress=lambda made, most: told.append((made, most)),
    )
    assert told == [(4, 8), (7, 8), (8, 8)]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"stop_ids": 5}, "stop_ids must be"),
        ({"stop": 5}, "stop strings must be"),
        ({"top_logprobs": -1}, "top_logprobs must be"),
        ({"steps_per_dispatch": 0}, "steps_per_dispatch must be"),
        ({"prefill_chunk": 0}, "prefill_chunk must be"),
        ({"kv_dtype": "int4"}, "kv_dtype 'int4' is not one of"),
        ({"temperature": -1}, "temperature must be"),
    ],
)
def test_streams_and_warm_ups_hand_on_every_option(tiny, option, words):
    tokenizer = Tokenizer(tiny_tokenizers.files(tiny_tokenizers.byte_level()))
    for call in (
        functools.partial(jaxllm.stream, tiny, tokenizer, [1]),
        functools.partial(jaxllm.warmup, tiny, tokenizer, prompt_lengths=[1]),
    ):
        with pytest.raises(ValueError, match=words):
            call(**option)


def test_an_end_that_the_models_positions_just_allow_is_no_end_of_them():
    model = build(TINY, FP32)
    prompt = [1] * (TINY.max_position_embeddings - 4)
    result = jaxllm.generate(model, None, prompt, max_new_tokens=4, stop_ids=[])
    assert (len(result.tokens[0]), result.finish_reasons) == (4, ["length"])


def test_a_stop_id_as_the_last_token_there_may_be_is_why_the_row_ended(tiny):
    tokens = jaxllm.generate(tiny, None, PROMPTS[0], max_new_tokens=1, stop_ids=[]).tokens[0]
    result = jaxllm.generate(tiny, None, PROMPTS[0], max_new_tokens=1, stop_ids=tokens)
    assert (result.tokens, result.finish_reasons) == ([tokens], ["stop"])


def test_a_sampled_row_does_not_depend_on_the_steps_of_a_dispatch(tiny):
    options = {"max_new_tokens": 12, "temperature": 3.0, "seed": 4, "stop_ids": []}
    expected = jaxllm.generate(tiny, None, PROMPTS[0], **options).tokens
    for steps in (1, 5):
        found = jaxllm.generate(tiny, None, PROMPTS[0], steps_per_dispatch=steps, **options)
        assert found.tokens == expected


def test_logprobs_of_sampled_tokens_are_of_the_raw_logits(tiny):
    """Before temperature, filters and penalties."""
    settings = {"temperature": 2.0, "top_k": 9, "frequency_penalty": 0.5, "seed": 3}
    result = jaxllm.generate(tiny, None, PROMPTS[0], max_new_tokens=6, stop_ids=[], **settings)
    text, tokens = PROMPTS[0] + result.tokens[0], np.asarray(result.tokens[0])
    logits = forward(tiny, jnp.asarray([text[:-1]], jnp.int32))[0, len(PROMPTS[0]) - 1 :]
    expected = jax.nn.log_softmax(logits)[np.arange(6), tokens]
    np.testing.assert_allclose(result.logprobs[0], expected, atol=1e-5)


def test_the_answer_in_a_chat_begins_without_the_space_that_a_continuation_keeps():
    files = tiny_tokenizers.files(
        tiny_tokenizers.byte_fallback(), chat_template="{{ messages[0].content }}"
    )
    tokenizer = Tokenizer(files)
    chat = [{"role": "user", "content": "the"}]
    found = encode_prompts([chat, "the"], tokenizer, tokenizer.vocab_size)
    word = tokenizer.encode("the")[-1:]
    assert [prompt.decoder.push(word) for prompt in found] == ["the", " the"]


@pytest.mark.parametrize("stop", [{"a": 1}, np.array("a"), ["a", ""]], ids=str)
def test_what_is_no_stop_string(tiny, stop):
    tokenizer = Tokenizer(tiny_tokenizers.files(tiny_tokenizers.byte_level()))
    sentence = "^generate: stop strings must be texts of at least one character, got "
    with pytest.raises(ValueError, match=sentence):
        jaxllm.generate(tiny, tokenizer, [5], stop=stop)


def test_none_is_no_stop_string(tiny):
    expected = jaxllm.generate(tiny, None, [5], max_new_tokens=3, stop=()).tokens
    assert jaxllm.generate(tiny, None, [5], max_new_tokens=3, stop=None).tokens == expected
