"""Streams of ids: the pieces are the whole text, and none ends in half a character."""

import time
from pathlib import Path

import pytest
import tiny_tokenizers
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from jaxllm.detokenizer import StreamDecoder
from jaxllm.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
KINDS = {
    "byte level": tiny_tokenizers.byte_level(),
    "byte fallback": tiny_tokenizers.byte_fallback(),
    "byte fallback, no strip": tiny_tokenizers.byte_fallback(strip=False),
}
FOLDERS = [
    "tokenizers/qwen2.5",
    "tokenizers/phi3-mini",
    "tokenizers/mistral-v0.3",
    "stories260K",
]
# Families, flags, marks that combine, other scripts, what looks like tokens, any text at all
HARD = st.lists(
    st.one_of(
        st.sampled_from(
            ["👩\u200d👩\u200d👧\u200d👦", "🇩🇪", "👍🏽", "e\u0301", "नमस्ते", "你好", "﷽", "𓂀"]
        ),
        st.sampled_from(
            [" ", "  ", "\n", "▁", "\t", "hello", " there", "<0xE4>", "<s>", REPLACEMENT]
        ),
        st.text(max_size=4),
    ),
    max_size=12,
).map("".join)


def pieces(tokenizer, ids, hidden: frozenset[str] = frozenset(), sizes=(1,)):
    """What a stream gives when ids come in groups of these sizes, again and again."""
    stream, found, at, turn = StreamDecoder(tokenizer, hidden), [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        found.append(stream.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*found, stream.finish()]


def naive_pieces(tokenizer, ids):
    """What a stream must not do: every id on its own."""
    return [tokenizer.decode([i], skip_special_tokens=False) for i in ids]


def check(found, whole):
    assert "".join(found) == whole
    if REPLACEMENT not in whole:
        assert not any(REPLACEMENT in piece for piece in found)


@pytest.mark.parametrize("kind", KINDS)
@given(text=HARD, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(deadline=None, max_examples=150)
def test_texts(kind, text, sizes):
    ids = KINDS[kind].encode(text).ids
    whole = KINDS[kind].decode(ids, skip_special_tokens=False)
    check(pieces(KINDS[kind], ids, sizes=sizes), whole)


@pytest.mark.parametrize("kind", KINDS)
@given(ids=st.lists(st.integers(0, 320), max_size=30))  # some are in no vocabulary
@settings(deadline=None, max_examples=300)
def test_any_ids_even_bytes_that_are_no_text(kind, ids):
    check(pieces(KINDS[kind], ids), KINDS[kind].decode(ids, skip_special_tokens=False))
    check(
        pieces(KINDS[kind], ids, hidden=frozenset(tiny_tokenizers.SPECIAL)),
        KINDS[kind].decode(ids, skip_special_tokens=True),
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_real_tokenizers(shared: Path, folder):
    tokenizer = Tokenizer.from_folder(shared / "data" / folder)

    @given(text=HARD, noise=st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=8))
    @settings(deadline=None, max_examples=150)
    def run(text, noise):
        for skip in (True, False):
            ids = [*tokenizer.encode(text), *noise, *tokenizer.encode(text)]
            stream = tokenizer.stream(skip_special_tokens=skip)
            found = [*(stream.push([i]) for i in ids), stream.finish()]
            check(found, tokenizer.decode(ids, skip_special_tokens=skip))

    run()


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_can_fail(kind):
    ids = KINDS[kind].encode("hello 🦊 there").ids
    whole = KINDS[kind].decode(ids)
    with pytest.raises(AssertionError):
        check(naive_pieces(KINDS[kind], ids), whole)
    with pytest.raises(AssertionError):
        check(pieces(KINDS[kind], ids)[:-2], whole)


def test_text_comes_as_soon_as_it_is_certain():
    tokenizer = KINDS["byte level"]
    ids = tokenizer.encode("é👍x").ids
    found = pieces(tokenizer, ids)
    assert [piece for piece in found if piece] == ["é", "👍", "x"]
    assert found[-1] == ""
    assert found[-2] == "x"
    # The bytes of a byte-fallback run are certain when something else follows
    fallback = KINDS["byte fallback"]
    ids = fallback.encode("h👍t").ids
    assert pieces(fallback, ids)[-3:] == ["", "👍t", ""]


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=HARD, more=HARD)
@settings(deadline=None, max_examples=100)
def test_a_continuation_keeps_its_leading_space(kind, prompt, more):
    tokenizer = Tokenizer(tiny_tokenizers.files(KINDS[kind]))
    before, ids = tokenizer.encode("t" + prompt + "t"), tokenizer.encode(" t" + more)
    stream = tokenizer.stream(before)
    found = [*(stream.push([i]) for i in ids), stream.finish()]
    whole = tokenizer.decode([*before, *ids])
    check(found, whole.removeprefix(tokenizer.decode(before)))
    assert "".join(found).startswith(" ")
    assert tokenizer.stream([1, 2]).push(tokenizer.encode("t")).startswith("t")  # after none seen


def test_half_a_character_at_the_end():
    tokenizer = KINDS["byte level"]
    ids = tokenizer.encode("h👍").ids[:-1]
    assert pieces(tokenizer, ids)[-1] == REPLACEMENT
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "h" + REPLACEMENT


def test_added_tokens_outside_the_byte_alphabet():
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.add_tokens(["<｜end▁of sentence｜>"])  # noqa: RUF001 (DeepSeek writes it so)
    ids = tokenizer.encode("é<｜end▁of sentence｜>é").ids  # noqa: RUF001
    check(pieces(tokenizer, ids), "é<｜end▁of sentence｜>é")  # noqa: RUF001


DECODERS = {
    "none": None,
    "metaspace": decoders.Metaspace(),
    "metaspace, never": decoders.Metaspace(prepend_scheme="never"),
    "replace alone": decoders.Sequence([decoders.Replace("▁", "_"), decoders.Replace("_t", "T")]),
    "strip two": decoders.Sequence(
        [
            decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]),
            decoders.Strip(" ", 2, 0),
        ]
    ),
    "strip each": decoders.Strip("▁", 1, 0),
    "pattern": decoders.Replace(tokenizers.Regex("▁+"), " "),
    "word pieces": decoders.WordPiece("##"),
    "end of word": decoders.BPEDecoder("▁"),
}


def make_tokenizer(decoder):
    """A tokenizer of few words."""
    tokens = ["▁", "▁▁", "t", "▁t", "a", "##b", "c▁", ".", ""]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(tokens)}, "t"))
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


@pytest.mark.parametrize("kind", DECODERS)
@given(ids=st.lists(st.integers(0, 8), max_size=12))
@settings(deadline=None, max_examples=100)
def test_every_kind_of_decoder(kind, ids):
    tokenizer = make_tokenizer(DECODERS[kind])
    check(pieces(tokenizer, ids), tokenizer.decode(ids))


@pytest.mark.parametrize("kind", ["none", "metaspace"])
def test_of_what_goes_on_no_space_is_taken(kind):
    tokenizer, a, space_t = make_tokenizer(DECODERS[kind]), 4, 3
    stream = StreamDecoder(tokenizer, begun=True)
    more = tokenizer.decode([a, space_t]).removeprefix(tokenizer.decode([a]))
    assert stream.push([space_t]) + stream.finish() == more
    assert more.startswith(" ")


def test_a_decoder_may_take_the_last_space_off():
    """Not one of `DECODERS`: the library panics where it strips the end of an empty text."""
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 0, 1)]
    tokenizer, ids = make_tokenizer(decoders.Sequence(steps)), [4, 6]
    assert tokenizer.decode(ids) == "ac"
    check(pieces(tokenizer, ids), "ac")


@pytest.mark.parametrize("kind", KINDS)
def test_a_piece_costs_the_same_however_long_the_text(kind):
    ids = KINDS[kind].encode("hello 👩 there ").ids

    def seconds(push, times):
        return min(timed(push, times) for _ in range(3))

    def timed(push, times):
        start = time.perf_counter()
        push(ids * times)
        return time.perf_counter() - start

    def again_and_again(ids):
        for end in range(len(ids)):
            KINDS[kind].decode(ids[: end + 1])

    # 16 times the ids: linear is 16 times the time, decoding all again for each id 256 times
    assert seconds(lambda ids: pieces(KINDS[kind], ids), 640) < 100 * seconds(
        lambda ids: pieces(KINDS[kind], ids), 40
    )
    assert seconds(again_and_again, 128) > 100 * seconds(again_and_again, 8)
