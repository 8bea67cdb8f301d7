"""What `generate` returns, and the host's side of a row while it is being made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxllm.programs import RUNNING, STOP
from jaxllm.prompts import Encoded


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds and tokens of one call. Compiling counts in, unless it was done before.

    `warmup` and `TextStream.compile` do it before. prefill_tokens are those that were read, padding
    left out (twice where longrope's boundary was crossed); decode_tokens those that came back.
    decode_s is from the start of a dispatch until its tokens are there; what the caller does with a
    piece, or in `progress`, is in it where the next dispatch is under way meanwhile.
    """

    prefill_s: float
    decode_s: float
    prefill_tokens: int
    decode_tokens: int
    dispatches: int

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s else math.nan

    @property
    def decode_tokens_per_s(self) -> float:
        """New tokens a second, all rows together."""
        return self.decode_tokens / self.decode_s if self.decode_s else math.nan


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """What `generate` returns: new tokens only, a list a row.

    - texts: without special tokens, cut before a stop string; None without a tokenizer
    - tokens: a stop id that ended the row is its last token; none follow a stop string
    - logprobs: log-softmax of the raw float32 logits, before penalties and temperature
    - top_logprobs: for each token the likeliest (id, logprob) pairs; None unless asked for
    - finish_reasons: "stop" (a stop id or string), "length" (max_new_tokens), "context" (the model
      has no more positions), "running" (a stream that has not ended)
    """

    texts: list[str] | None
    tokens: list[list[int]]
    logprobs: list[list[float]]
    top_logprobs: list[list[list[tuple[int, float]]]] | None
    finish_reasons: list[str]
    timings: Timings


class Row:
    """The host's side of one prompt: its tokens, and its text as far as it is certain."""

    def __init__(self, prompt: Encoded, budget: int, capped: bool, stop: Sequence[str]):
        self.prompt, self.decoder = prompt.ids, prompt.decoder
        self.budget, self.capped = budget, capped
        self.stop = stop
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[list[tuple[int, float]]] = []
        self.reason: str | None = None
        self.text = ""
        self.shown = 0  # characters of the text that `stream` has given out

    def push(self, token: int, logprob: float, top: list[tuple[int, float]], last: bool) -> None:
        """One token more; `last` where the device has ended the row with it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.top.append(top)
        if self.decoder is None:
            return
        before = len(self.text)
        self.text += self.decoder.push([token])
        if last:
            self.text += self.decoder.finish()
        # A stop string may have begun in the text before, by all but its last character.
        at = [self.text.find(s, max(0, before - len(s) + 1)) for s in self.stop]
        if found := [x for x in at if x >= 0]:
            self.text, self.reason = self.text[: min(found)], "stop"

    def finish(self, ended: int) -> None:
        """What the device says of the row's end."""
        if self.reason is None and ended != RUNNING:
            self.reason = "stop" if ended == STOP else ("context" if self.capped else "length")

    def piece(self) -> str:
        """The text that is new and certain: what may be the start of a stop string is held back."""
        end = len(self.text)
        if self.reason is None:
            for s in self.stop:
                for n in range(min(len(s) - 1, len(self.text)), 0, -1):
                    if self.text.endswith(s[:n]):
                        end = min(end, len(self.text) - n)
                        break
        piece, self.shown = self.text[self.shown : max(end, self.shown)], max(end, self.shown)
        return piece
