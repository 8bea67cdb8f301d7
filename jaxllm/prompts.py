"""What `generate` may be given, as token ids: texts, chats, lists of ids."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxllm.detokenizer import StreamDecoder
from jaxllm.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[Message] | Sequence[int]

# What a prompt and a list of them may be, beside arrays; str is a Sequence, bytes are refused.
Listed = list | tuple | str
_KINDS = "a text, a chat (a list of messages), a list of token ids"


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A prompt's ids, and what turns the ids that follow into text (None without a tokenizer)."""

    ids: list[int]
    decoder: StreamDecoder | None


def encode_prompts(
    prompts: Prompt | Sequence[Prompt], tokenizer: Tokenizer | None, vocab_size: int
) -> list[Encoded]:
    """Every prompt as ids below vocab_size. A single prompt may stand alone, outside a list.

    Raises: ValueError for an empty prompt, an id out of range, or a text without a tokenizer.
    """
    if isinstance(prompts, jax.Array | np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, Mapping) or not isinstance(prompts, Listed):
        raise ValueError(f"generate: prompts are {_KINDS} or a list of those, got {prompts!r:.60}")
    if not isinstance(prompts, str) and not prompts:
        raise ValueError("generate: there are no prompts")
    every: list[Any] = list(prompts) if several(prompts) else [prompts]
    return [_encode(i, prompt, tokenizer, vocab_size) for i, prompt in enumerate(every)]


def several(prompts: Any) -> bool:
    """Whether it is a list of prompts, and neither a text, nor a chat, nor ids."""
    if isinstance(prompts, jax.Array | np.ndarray):
        return prompts.ndim > 1
    if isinstance(prompts, str) or not isinstance(prompts, Listed) or not prompts:
        return False
    return not (isinstance(prompts[0], Mapping) or _is_number(prompts[0]))


def _is_number(x: Any) -> bool:
    return isinstance(x, int | np.integer) or getattr(x, "ndim", None) == 0


def _id(i: int, token: Any, vocab_size: int) -> int:
    """The id, of prompt i."""
    try:
        number = None if isinstance(token, bool) else operator.index(token)
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"generate: prompt {i} holds {token!r:.60}; a prompt is {_KINDS}")
    if not 0 <= number < vocab_size:
        raise ValueError(
            f"generate: prompt {i} holds the id {number}; ids are from 0 to {vocab_size - 1}"
        )
    return number


def _encode(i: int, prompt: Any, tokenizer: Tokenizer | None, vocab_size: int) -> Encoded:
    if isinstance(prompt, jax.Array | np.ndarray):
        prompt = prompt.tolist()
    if isinstance(prompt, Mapping) or not isinstance(prompt, Listed):
        raise ValueError(f"generate: prompt {i} is {prompt!r:.60}; a prompt is {_KINDS}")
    text = isinstance(prompt, str)
    chat = not text and bool(prompt) and isinstance(prompt[0], Mapping)
    if tokenizer is None and (chat or text):
        kind = "chat" if chat else "text"
        raise ValueError(
            f"generate: prompt {i} is a {kind}, which needs a tokenizer; give token ids without one"
        )
    if not prompt:
        raise ValueError(f"generate: prompt {i} is empty; give at least one token")
    ids: Any = prompt
    if tokenizer is not None and chat:
        messages: Any = prompt
        ids = tokenizer.apply_chat_template(messages)
    elif tokenizer is not None and isinstance(prompt, str):
        ids = tokenizer.encode(prompt)
    if not ids:  # of a text of control characters, say, or of a chat that its template leaves out
        raise ValueError(f"generate: the tokenizer makes no token of prompt {i}, {prompt!r:.40}")
    ids = [_id(i, token, vocab_size) for token in ids]
    if tokenizer is None:
        return Encoded(ids, None)
    # A text goes on behind its prompt, its leading space included; an answer in a chat begins.
    return Encoded(ids, tokenizer.stream() if chat else tokenizer.stream(after=ids))
