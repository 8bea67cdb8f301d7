"""Records -> examples: which tokens a model reads, and which of them it learns to write.

A record is a JSON object of one of three forms: a `text`; a `prompt` with its `completion`; or
`messages` of a chat. Preference pairs have `chosen` and `rejected` in place of the completion.
`Example` is what all of them become; `jaxllm.data` makes batches of examples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import string
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from jaxllm.integers import integer
from jaxllm.record_files import Record
from jaxllm.tokenizer import Tokenizer, check_tokenizer

IGNORE = -100  # a target that is not counted, as in jaxllm.train
ON_LONG = ("truncate", "split", "drop")
_LOOK_ON = 1000  # records, behind one that cannot be used
Key = str | Sequence[str]
PROMPT, COMPLETION = "prompt", "completion"  # the keys of these, where nobody says others


@dataclasses.dataclass(frozen=True)
class Example:
    """What a model reads, and what it is to write after each token of it.

    tokens, targets: int32 [n]. Targets are shifted already: targets[i] follows tokens[i], or is
    -100 where nothing is learnt.
    Raises: ValueError for other dtypes or shapes.
    """

    tokens: np.ndarray
    targets: np.ndarray

    def __post_init__(self) -> None:
        for name, array in (("tokens", self.tokens), ("targets", self.targets)):
            if getattr(array, "dtype", None) != np.int32 or array.ndim != 1:
                raise ValueError(f"data: an example's {name} must be an int32 array [n]")
        if self.tokens.shape != self.targets.shape:
            raise ValueError(
                f"data: an example's {len(self.tokens)} tokens and {len(self.targets)} targets "
                "must be equally many"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def learnt(self) -> int:
        """How many targets are counted."""
        return int(np.count_nonzero(self.targets != IGNORE))

    def __getitem__(self, part: slice) -> Example:
        return Example(self.tokens[part], self.targets[part])


@dataclasses.dataclass(frozen=True)
class PreferenceExample:
    """Two answers to one prompt, the better one first; the prompt's tokens are no targets."""

    chosen: Example
    rejected: Example


Kind = TypeVar("Kind", Example, PreferenceExample)


@dataclasses.dataclass(frozen=True)
class Encoded(Generic[Kind]):
    """Examples, none longer than `length`, and what became of the records; as a text, a sentence.

    long: records that were longer, of which on_long says what was done. lost: tokens of theirs that
    no example has. untaught: records left out since no target of theirs is counted, be it that it
    was cut off.
    """

    examples: list[Kind]
    records: int
    length: int
    on_long: str
    long: int
    lost: int
    untaught: int

    def __str__(self) -> str:
        tokens = _tokens(self.examples)
        learnt = sum(part.learnt for example in self.examples for part in _parts(example))
        done = {"truncate": "truncated", "split": "split", "drop": "left out"}[self.on_long]
        said = [
            f"{_count(self.records, 'record')}: {_count(len(self.examples), 'example')}, "
            f"{_count(tokens, 'token')}, "
            f"{learnt} of them learnt"
        ]
        if self.long:
            lost = f", {_count(self.lost, 'token')} of them lost" if self.lost else ""
            said.append(f"{self.long} longer than {self.length} tokens {done}{lost}")
        if self.untaught:
            said.append(f"{self.untaught} without anything to learn left out")
        return "; ".join(said)


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def encode_records(
    records: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    length: int,
    on_long: str = "truncate",
    vocab_size: int | None = None,
    **keys: Any,
) -> Encoded[Example]:
    """The examples of all records, by `encode` with its `keys`, none longer than `length` tokens.

    on_long: "truncate" keeps a longer record's beginning, "split" makes several examples of it, in
    which every target is once, and "drop" leaves it out. vocab_size: the model's.
    Raises: ValueError as `encode`; if on_long is another word, if a token is outside the
    vocabulary, or if no record is left.
    """
    check_tokenizer("data", tokenizer)
    _check_on_long(on_long, ON_LONG)

    def cut(example: Example) -> list[Example]:
        starts = range(0, len(example), length) if on_long == "split" else [0]
        parts = [example[i : i + length] for i in starts]
        return [part for part in parts if part.learnt]

    one = functools.partial(encode, tokenizer=tokenizer, **keys)
    return _encode_all(records, one, cut, length, on_long, vocab_size)


def encode_preferences(
    records: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    length: int,
    on_long: str = "truncate",
    vocab_size: int | None = None,
    **keys: Any,
) -> Encoded[PreferenceExample]:
    """The pairs of all records, by `encode_preference` with its `keys`; else as `encode_records`.

    A pair cannot be split. It is left out if either answer has nothing to learn within `length`.
    """
    check_tokenizer("data", tokenizer)
    _check_on_long(on_long, ("truncate", "drop"))

    def cut(pair: PreferenceExample) -> list[PreferenceExample]:
        short = PreferenceExample(pair.chosen[:length], pair.rejected[:length])
        return [short] if short.chosen.learnt and short.rejected.learnt else []

    one = functools.partial(encode_preference, tokenizer=tokenizer, **keys)
    return _encode_all(records, one, cut, length, on_long, vocab_size)


def check_keys(records: Sequence[Mapping[str, Any]], *keys: Key) -> None:
    """Raises ValueError if a key, one of `encode`'s own apart, names a field that no record has:
    in a list of several, `encode` would leave it out.

    Of all records, for a part of them may lack what others have.
    """
    names = dict.fromkeys(name for record in records for name in record)
    for key in keys:
        try:
            asked = [] if key in (PROMPT, COMPLETION) else _fields(key)
        except ValueError as error:
            raise ValueError(f"data: {error}") from None
        for name in asked:
            if name not in names:
                said = key if isinstance(key, str) else ",".join(key)
                raise ValueError(
                    f"data: no record has {name!r}, which the key {said!r} names; there are "
                    f"{', '.join(map(repr, names)) or 'no fields'}"
                )


def check_vocabulary(example: Example | PreferenceExample, vocab_size: int) -> None:
    """Raises ValueError if a token or target is no id of a vocabulary of this size."""
    for part in _parts(example):
        learnt = part.targets[part.targets != IGNORE]
        for name, ids in (("token", part.tokens), ("target", learnt)):
            wrong = ids[(ids < 0) | (ids >= vocab_size)]
            if len(wrong):
                raise ValueError(
                    f"the {name} {wrong[0]} is outside the model's vocabulary of {vocab_size}"
                )


def _encode_all(
    records: Sequence[Mapping[str, Any]],
    one: Callable[[Mapping[str, Any]], Kind],
    cut: Callable[[Kind], list[Kind]],
    length: int,
    on_long: str,
    vocab_size: int | None,
) -> Encoded[Kind]:
    integer("length", length, 1, who="data")

    def encoded(i: int, record: Any) -> Kind:
        if not isinstance(record, Mapping):
            raise ValueError(f"data: record {i} must have fields by name, not {record!r:.40}")
        if not hasattr(record, "where"):
            record = Record(record)
            record.where = f"record {i}"
        example = one(record)
        with _place(record):
            if vocab_size is not None:
                check_vocabulary(example, vocab_size)
        return example

    examples, long, lost, untaught = [], 0, 0, 0
    for i, record in enumerate(records, 1):
        try:
            example = encoded(i, record)
        except ValueError as error:
            raise ValueError(f"{error}{_others(encoded, records, i)}") from None
        longer = max(map(len, _parts(example))) > length
        dropped = longer and on_long == "drop"
        parts = [] if dropped else cut(example)
        long += longer
        lost += longer * (_tokens([example]) - _tokens(parts))
        untaught += not (parts or dropped)
        examples += parts
    result = Encoded(examples, len(records), length, on_long, long, lost, untaught)
    if not examples:
        raise ValueError(f"data: there is nothing to learn; {result}")
    return result


def _others(encoded: Callable[[int, Any], object], records: Sequence[Any], before: int) -> str:
    """How many more records cannot be used, of those that come next, or that five seconds suffice
    for.
    """
    wrong, n, end = 0, before, time.monotonic() + 5
    while n < min(before + _LOOK_ON, len(records)):
        n += 1
        try:
            encoded(n, records[n - 1])
        except ValueError:
            wrong += 1
        if time.monotonic() > end:
            break
    read = _count(n - before, "record")
    return f"; {wrong} more of the next {read} cannot be used" * (wrong > 0)


def _check_on_long(on_long: str, allowed: Sequence[str]) -> None:
    if on_long not in allowed:
        raise ValueError(f"data: on_long must be one of {', '.join(allowed)}, not {on_long!r:.40}")


def _parts(example: Example | PreferenceExample) -> tuple[Example, ...]:
    return (example,) if isinstance(example, Example) else (example.chosen, example.rejected)


def _tokens(examples: Sequence[Example | PreferenceExample]) -> int:
    return sum(len(part) for example in examples for part in _parts(example))


def encode(
    record: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    prompt_key: Key = PROMPT,
    completion_key: Key = COMPLETION,
    text_key: str = "text",
    messages_key: str = "messages",
    stop_id: int | None = None,
) -> Example:
    r"""The example that a record makes: of several forms in it, of the first of these. Where a key
    of prompt or completion is not the default one, these two alone are read, and must be there. A
    field that is null is none, and so is an empty list of messages beside another form.

    messages: the tokenizer's own chat template, which is also given the record's `tools`; the
    assistant's messages are targets (`Tokenizer.encode_answers`), but not those with a `weight` of
    0 (it may be 0 or 1, and no template sees it). Content in parts is their texts, one behind the
    other. prompt and completion: one behind the other as they are, without a space between; the
    completion is the target. Both may be lists of messages: of that chat, the assistant's messages
    in the completion are targets. text: all of it is.
    A BOS comes first where `Tokenizer.encode` writes one, and `stop_id` (the tokenizer's EOS if
    None) last, as a target, so that the model learns to stop; after a chat, only where it ends with
    an answer that has none.

    A key is the name of a field. prompt_key and completion_key may also be a format with the names
    of fields, all of which must be there: "Question: {question}\nAnswer:". Or a list of names,
    which are joined by a line break, those that are absent or empty left out:
    ["instruction", "input"] (`check_keys` refuses names that no record has).
    Raises: ValueError, with the record's place, if fields are missing or hold something else; and
    if the tokenizer is none of ours.
    """
    check_tokenizer("data", tokenizer)
    with _place(record):
        stop = _stop_id(tokenizer, stop_id)
        completes = _present(record, prompt_key) and _present(record, completion_key)
        asked_for = (prompt_key, completion_key) != (PROMPT, COMPLETION)
        if asked_for and not completes:
            raise ValueError(
                f"there is no {_name(prompt_key)} with {_name(completion_key)}, which prompt_key "
                f"and completion_key name; the record has {_names(record)}"
            )
        other = completes or _present(record, text_key)
        has_messages = _present(record, messages_key)
        if has_messages and not asked_for and (record[messages_key] != [] or not other):
            messages = _messages(record, messages_key)
            return _chat(tokenizer, messages, _tools(record), stop)
        chats = [str(key) for key in (prompt_key, completion_key) if _is_chat(record, key)]
        if len(chats) == 2:
            before, after = (_messages(record, key) for key in chats)
            return _chat(tokenizer, [*before, *after], _tools(record), stop, len(before))
        if completes:
            prompt = _text(record, prompt_key)
            return _completion(tokenizer, prompt, _text(record, completion_key), stop)
        if _present(record, text_key):
            return _completion(tokenizer, "", _text(record, text_key), stop)
        pairs = "; jaxllm.dpo learns from 'chosen' and 'rejected'" if "rejected" in record else ""
        raise ValueError(
            f"there is no {messages_key!r}, no {_name(prompt_key)} with {_name(completion_key)} "
            f"and no {text_key!r}; the record has {_names(record)}{pairs}"
        )


def encode_preference(
    record: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    prompt_key: Key = PROMPT,
    chosen_key: str = "chosen",
    rejected_key: str = "rejected",
    stop_id: int | None = None,
) -> PreferenceExample:
    """The pair of examples that a preference record makes; keys and ends as in `encode`.

    Texts: the prompt, and two completions of it. Chats: chosen and rejected are lists of messages.
    Their prompt is the list of messages `prompt`; else the messages with which both begin; else
    the text `prompt`, as the user's message. Only what follows the prompt is a target. The record's
    `tools` go to the template.
    Raises: ValueError, with the record's place, as `encode`; also if chosen and rejected are equal.
    """
    keys = (chosen_key, rejected_key)
    check_tokenizer("data", tokenizer)
    with _place(record):
        stop = _stop_id(tokenizer, stop_id)
        for key in keys:
            if key not in record:
                raise ValueError(f"there is no {key!r}; the record has {_names(record)}")
        for key in keys:
            if not isinstance(record[key], str | list):
                raise ValueError(
                    f"{key!r} must be a text or a list of messages, not {record[key]!r:.40}"
                )
        if record[chosen_key] == record[rejected_key]:
            raise ValueError(f"{chosen_key!r} and {rejected_key!r} are the same")
        texts = [key for key in keys if isinstance(record[key], str)]
        if len(texts) == 1:
            (chat,) = set(keys) - set(texts)
            raise ValueError(
                f"{texts[0]!r} is a text and {chat!r} a list of messages; both must be of one kind"
            )
        if texts:
            prompt = _text(record, prompt_key)
            answers = (_text(record, key) for key in keys)
            return PreferenceExample(*(_completion(tokenizer, prompt, a, stop) for a in answers))
        chats = [_messages(record, key) for key in keys]
        if isinstance(prompt_key, str) and isinstance(record.get(prompt_key), list):
            before = _messages(record, prompt_key)
            chats = [[*before, *chat] for chat in chats]
        else:
            before = _common(*chats)
            if not before:
                before = [{"role": "user", "content": _text(record, prompt_key)}]
                chats = [[*before, *chat] for chat in chats]
        tools, first = _tools(record), len(before)
        return PreferenceExample(*(_chat(tokenizer, chat, tools, stop, first) for chat in chats))


def _common(chosen: list[Any], rejected: list[Any]) -> list[Any]:
    """The messages with which both chats begin; the last of each stays outside."""
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)
    return [a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _completion(tokenizer: Tokenizer, prompt: str, completion: str, stop: int) -> Example:
    before = tokenizer.encode(prompt)
    after = _continuation(tokenizer, completion) if prompt else tokenizer.encode(completion)
    if not prompt:  # the tokenizer writes its BOS, if it has one, in front of the completion
        before = tokenizer.encode("")
        after = after[len(before) :]
    if after[-1:] != [stop]:
        after = [*after, stop]
    return _example(before + after, [False] * len(before) + [True] * len(after))


def _continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that goes on behind another: without the space that some tokenizers put
    before every text. No merge reaches over the control character, for none holds one; but other
    tokenizers, which put no space, would split punctuation behind it in another way.
    """
    ids = functools.partial(tokenizer.encode, add_special_tokens=False)
    if tokenizer.puts_space_before:
        mark, marked = ids("\x01"), ids("\x01" + text)
        if marked[: len(mark)] == mark:
            return marked[len(mark) :]
    return ids(text)


def _chat(
    tokenizer: Tokenizer, messages: list[Any], tools: list[Any] | None, stop: int, first: int = 0
) -> Example:
    passed_over = [i for i, message in enumerate(messages) if not _weight(i, message)]
    messages = [{k: v for k, v in m.items() if k != "weight"} for m in messages]
    ids, answers = tokenizer.encode_answers(
        messages, first=first, passed_over=passed_over, tools=tools
    )
    if not any(answers):
        if any(messages[i]["role"] == "assistant" for i in passed_over if i >= first):
            return _example(ids, answers)  # a chat of which nothing is to be learnt
        raise ValueError("there is no message of the assistant, and so nothing to learn")
    last = len(answers) - 1 - answers[::-1].index(True)
    begin = next((i + 1 for i in range(last, -1, -1) if not answers[i]), 0)
    # Behind another's message the end would be no answer's
    learnt = messages[-1]["role"] == "assistant" and len(messages) - 1 not in passed_over
    if learnt and stop not in ids[begin:]:
        ids, answers = [*ids, stop], [*answers, True]
    return _example(ids, answers)


def _weight(i: int, message: Mapping[str, Any]) -> bool:
    """Whether a message is learnt if it is an answer."""
    weight = message.get("weight")
    if message.get("role") == "assistant" and weight not in (None, 0, 1):
        raise ValueError(f"message {i} has the weight {weight!r:.40}; an answer's may be 0 or 1")
    return weight != 0


def _example(ids: list[int], learnt: list[bool]) -> Example:
    """Without the last token, which nothing follows."""
    tokens = np.asarray(ids, np.int32)
    targets = np.where(learnt, tokens, np.int32(IGNORE))
    return Example(tokens[:-1], targets[1:])


def _stop_id(tokenizer: Tokenizer, stop_id: int | None) -> int:
    stop = tokenizer.eos_id if stop_id is None else stop_id
    if stop is None:
        raise ValueError("the tokenizer names no EOS token to end texts with; give stop_id")
    return stop


@contextlib.contextmanager
def _place(record: Mapping[str, Any]) -> Iterator[None]:
    """Puts the record's place before what is wrong with it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"data: {getattr(record, 'where', 'a record')}: {error}") from None


def _fields(key: Key) -> list[str]:
    """The fields that a key names."""
    if not isinstance(key, str):
        return list(key)
    if "{" not in key and "}" not in key:
        return [key]
    try:
        parts = list(string.Formatter().parse(key))
    except ValueError as error:
        raise ValueError(f"the format {key!r} cannot be read: {error}") from None
    names = [name for _, name, _, _ in parts if name is not None]
    plain = all(not spec and not how for _, _, spec, how in parts)
    if not names or not plain or not all(re.fullmatch(r"[^\[\].]+", name) for name in names):
        raise ValueError(f"the format {key!r} must name fields, each as {{name}} and no more")
    return names


def _present(record: Mapping[str, Any], key: Key) -> bool:
    return any(record.get(name) is not None for name in _fields(key))


def _text(record: Mapping[str, Any], key: Key) -> str:
    """The text that a key makes of a record's fields."""
    names = _fields(key)
    several = not isinstance(key, str)
    missing = [name for name in names if name not in record]
    if missing and not (several and len(missing) < len(names)):
        listed = ", ".join(map(repr, missing))
        raise ValueError(f"there is no {listed}; the record has {_names(record)}")
    values = {name: record[name] for name in names if name in record}
    for name, value in values.items():
        if not isinstance(value, str) and not (several and value is None):
            raise ValueError(f"{name!r} must be a text, not {value!r:.40}")
    if several:
        return "\n".join(value for value in values.values() if value)
    return values[key] if key in values else key.format_map(values)


def _objects(record: Mapping[str, Any], key: str, what: str) -> list[Any]:
    objects = record[key]
    if not (isinstance(objects, list) and all(isinstance(value, dict) for value in objects)):
        raise ValueError(f"{key!r} must be a list of {what}, not {objects!r:.40}")
    return objects


def _is_chat(record: Mapping[str, Any], key: Key) -> bool:
    return isinstance(key, str) and isinstance(record.get(key), list)


def _messages(record: Mapping[str, Any], key: str) -> list[Any]:
    """Messages, whose content is one text each, or what else a template may know."""
    return [
        message | {"content": _joined(message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in _objects(record, key, "messages")
    ]


def _joined(parts: list[Any]) -> str:
    """The text of content that is given in parts."""
    for part in parts:
        text = isinstance(part, dict) and part.get("type") == "text" and part.get("text")
        if not isinstance(text, str):
            raise ValueError(
                "each part of a message's content must be {'type': 'text', 'text': a text}, not "
                f"{part!r:.60}"
            )
    return "".join(part["text"] for part in parts)


def _tools(record: Mapping[str, Any]) -> list[Any] | None:
    """What a chat's template is to show of functions that the model may call; an empty list, as
    columns of JSONL have it, is none.
    """
    if record.get("tools") is None:
        return None
    return _objects(record, "tools", "objects") or None


def _name(key: Key) -> str:
    return repr(key) if isinstance(key, str) else " or ".join(map(repr, key))


def _names(record: Mapping[str, Any]) -> str:
    null = {name: " (null)" if value is None else "" for name, value in record.items()}
    return ", ".join(f"{name!r}{is_null}" for name, is_null in null.items()) or "no fields"
