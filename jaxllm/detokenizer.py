"""Token ids -> text as they come: what has become certain, and never half a character.

The whole text is what the decoder of tokenizer.json makes of all tokens at once. The decoders of
the supported families read token after token with little memory, so that a piece of text costs
what its own ids cost, however many came before.
"""

from __future__ import annotations

import codecs
import functools
import json
import operator
import re
from collections.abc import Iterable
from typing import Any

import tokenizers

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_STEPS = re.compile("(Replace )*(ByteFallback )?(Fuse (Strip )?)?")


class StreamDecoder:
    """One sequence of ids to text: the pieces of `push`, then `finish`.

    Together they are the `decode` of all ids. Held back are the bytes of an unfinished character,
    and a run of byte-fallback tokens until it ends, for one wrong byte changes all its text. A
    decoder of another kind (WordPiece, CTC: none of the supported families) gives its whole text
    at the end.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        hidden: frozenset[str] = frozenset(),
        *,
        begun: bool = False,
    ):
        """`hidden`: tokens that have no text here, the special ones as a rule.

        `begun`: the ids continue a text, so that nothing is taken off the front of theirs.
        """
        self._tokenizer, self._hidden = tokenizer, hidden
        self._reader = _reader(tokenizer.decoder)
        if begun and isinstance(self._reader, _Pieces):
            self._reader.continue_text()

    def push(self, ids: Iterable[int]) -> str:
        """The text that has become certain with these ids; often empty."""
        tokens = map(self._tokenizer.id_to_token, checked_ids(ids))
        return self._reader.read([t for t in tokens if t is not None and t not in self._hidden])

    def finish(self) -> str:
        """The text that was held back. Nothing may be pushed after it."""
        return self._reader.read([], last=True)


def checked_ids(ids: Iterable[int]) -> list[int]:
    """The ids as integers; ValueError if one cannot be a token's."""
    if not isinstance(ids, Iterable):
        raise ValueError(f"tokenizer: ids must be a list of token ids, got {ids!r:.60}")
    found = []
    for i in ids:
        try:
            number = operator.index(i)
        except TypeError:  # a list of ids, say, where there were several
            number = None
        if number is None or not 0 <= number < 2**32:
            raise ValueError(
                f"tokenizer: {i!r:.60} is not a token id; ids are integers from 0 to 2**32 - 1"
            )
        found.append(number)
    return found


class _Whole:
    """Any decoder, asked once at the end."""

    def __init__(self, decoder: Any):
        self._decoder, self._tokens = decoder, []

    def read(self, tokens: list[str], *, last: bool = False) -> str:
        self._tokens += tokens
        return self._decoder.decode(self._tokens) if last else ""


class _ByteLevel:
    """Tokens whose characters stand for bytes, as GPT-2's."""

    def __init__(self):
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, tokens: list[str], *, last: bool = False) -> str:
        table = _byte_table()
        # A token with a character that stands for no byte means its own text
        parts = (
            bytes(map(table.__getitem__, t)) if table.keys() >= set(t) else t.encode()
            for t in tokens
        )
        return self._utf8.decode(b"".join(parts), last)


class _Pieces:
    """Tokens that are text, with a sign for the space and perhaps bytes, as SentencePiece's.

    `drop` is taken out of the first token and `replace` is done in each; `before` comes before
    each; `strip` is a character and how many of it come off the front of the whole text.
    """

    def __init__(
        self,
        replace: list[tuple[str, str]] | None = None,
        *,
        byte_fallback: bool = False,
        strip: tuple[str, int] = ("", 0),
        drop: str = "",
        before: str = "",
    ):
        self._replace, self._byte_fallback = replace or [], byte_fallback
        self._strip, self._left = strip
        self._drop, self._before = drop, before
        self._run = bytearray()

    def continue_text(self) -> None:
        self._drop, self._left = "", 0

    def read(self, tokens: list[str], *, last: bool = False) -> str:
        text = ""
        for token in tokens:
            if self._drop:
                token, self._drop = token.replace(self._drop, ""), ""
            for old, new in self._replace:
                token = token.replace(old, new)
            byte = _BYTE.fullmatch(token) if self._byte_fallback else None
            if byte:
                self._run.append(int(byte[1], 16))
            else:
                text += self._end_run() + self._before + token
        if last:
            text += self._end_run()
        while self._left and text:
            self._left = self._left - 1 if text[0] == self._strip else 0
            text = text.removeprefix(self._strip)
        return text

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(run)


def _reader(decoder: Any) -> _ByteLevel | _Pieces | _Whole:
    """Reads tokens as a decoder of `tokenizers` does, but bit by bit."""
    if decoder is None:  # the library then joins tokens with spaces
        return _Pieces(before=" ", strip=(" ", 1))
    steps = [json.loads(decoder.__getstate__())]
    while any(step["type"] == "Sequence" for step in steps):
        steps = [s for step in steps for s in step.get("decoders", [step])]
    kinds = "".join(step["type"] + " " for step in steps)
    strings = all("String" in step.get("pattern", "String") for step in steps)
    if kinds == "ByteLevel ":
        return _ByteLevel()
    if kinds == "Metaspace ":
        sign = steps[0]["replacement"]
        first = sign if steps[0]["prepend_scheme"] != "never" else ""
        return _Pieces(replace=[(sign, " ")], drop=first)
    if not _STEPS.fullmatch(kinds) or not strings or any(step.get("stop") for step in steps):
        return _Whole(decoder)
    replace = [(s["pattern"]["String"], s["content"]) for s in steps if s["type"] == "Replace"]
    strip = next(((s["content"], s["start"]) for s in steps if s["type"] == "Strip"), ("", 0))
    return _Pieces(replace, byte_fallback="ByteFallback" in kinds, strip=strip)


@functools.cache
def _byte_table() -> dict[str, int]:
    """The character that stands for each byte: itself if it prints, else one from U+0100 on."""
    table = {chr(b): b for b in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]}
    rest = sorted(set(range(256)) - set(table.values()))
    return table | {chr(256 + i): b for i, b in enumerate(rest)}
