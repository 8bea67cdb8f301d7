"""Text <-> token ids, as a checkpoint's own files say: tokenizer.json, its chat template, its BOS.

A `Tokenizer` keeps the files that it was read from and writes them back unchanged. `StreamDecoder`
turns ids into text as they come; its pieces together are what `decode` makes of all the ids.
"""

from __future__ import annotations

import bisect
import functools
import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import tokenizers

from jaxllm import chat_template
from jaxllm.detokenizer import StreamDecoder, checked_ids

_TOKENIZER, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_SPECIAL, _TEMPLATES = "special_tokens_map.json", "additional_chat_templates"
_ADDED = "added_tokens.json"
_ADDED_SAYS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
# Whose add_bos_token transformers 4 followed; 5 leaves it to tokenizer.json alone, and of other
# classes neither does
_BOS_BY_FLAG = re.compile(r"(Llama|CodeLlama|Gemma|Cohere)Tokenizer(Fast)?")


def tokenizer_files(folder: str | Path) -> list[str]:
    """What a tokenizer is read from, of the files that a folder has."""
    folder = Path(folder)
    named = (_TOKENIZER, _CONFIG, _SPECIAL, _ADDED, _TEMPLATE)
    templates = sorted((folder / _TEMPLATES).glob("*.jinja"))
    found = [name for name in named if (folder / name).is_file()]
    return found + [file.relative_to(folder).as_posix() for file in templates if file.is_file()]


def check_tokenizer(who: str, tokenizer: Any, *, optional: bool = False) -> None:
    """Raises: ValueError by `who` for another library's, or what else is none."""
    if not isinstance(tokenizer, Tokenizer) and not (optional and tokenizer is None):
        kind = type(tokenizer)
        raise ValueError(
            f"{who}: tokenizer must be a jaxllm.Tokenizer{' or None' * optional}, not "
            f"{kind.__module__}.{kind.__qualname__}"
        )


class Tokenizer:
    """The tokenizer of a checkpoint.

    `vocab_size` is the largest id plus one, added tokens included. `bos_id`, `eos_id` and `pad_id`
    are None where the files name no such token or the vocabulary does not hold it.
    """

    def __init__(self, files: Mapping[str, bytes], source: str = "tokenizer"):
        """From the contents of files by their names; `source` says in errors whose they are.

        Raises: ValueError if a file is missing, corrupt or contradicts another.
        """
        if not isinstance(files, Mapping):
            raise ValueError(
                f"{source}: files must be a mapping from names to contents, got {files!r:.60}; "
                "Tokenizer.from_folder reads a folder"
            )
        self._files, self._source = dict(files), source
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self._files[_TOKENIZER])
        except KeyError:
            raise ValueError(f"{source}: there is no {_TOKENIZER}") from None
        except ValueError as error:
            raise ValueError(f"{source}: {_TOKENIZER} cannot be read: {error}") from None
        # Limits of some training run; they would cut prompts short or fill them up
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = self._json(_CONFIG)
        self._templates = self._read_templates(config)
        if "added_tokens_decoder" not in config:  # then the older file counts, as in transformers
            config = {**config, **self._json(_SPECIAL)}
        self.special_tokens = self._read_special_tokens(config)
        self._add_tokens(config)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"{source}: {_TOKENIZER} has no tokens")
        self.vocab_size = max(vocabulary.values()) + 1
        self.bos_id, self.eos_id, self.pad_id = (
            vocabulary.get(self.special_tokens.get(key, "")) for key in _NAMED[:3]
        )
        # Found as one in a text, also where tokenizer.json has them as words like others; and
        # special, which an added token that is named as one need not be there
        known, named = self._added_tokens(), self.special_tokens.values()
        for token in (known[text] for text in named if text in known):
            token.special = True
            self._tokenizer.add_special_tokens([token])
        special = [text for text in [*named, *_more_special(config)] if text in vocabulary]
        self._tokenizer.add_special_tokens([text for text in special if text not in known])
        added = self._added_tokens()
        self._added = frozenset(added)
        self._special = frozenset(text for text, token in added.items() if token.special)

        self._prefix = self._read_prefix()
        by_flag = _BOS_BY_FLAG.fullmatch(str(config.get("tokenizer_class")))
        asked = by_flag and config.get("add_bos_token") is True
        if not self._prefix and asked and self.bos_id is not None:
            self._prefix = [self.bos_id]
        if self.bos_id is None and self._prefix:
            self.bos_id = self._prefix[0]

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Reads a Hugging Face folder; all files but tokenizer.json may be absent.

        Raises: FileNotFoundError if the folder or its tokenizer.json is missing; ValueError if a
        file is corrupt.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"tokenizer: there is no folder {folder}")
        if not (folder / _TOKENIZER).is_file():
            raise FileNotFoundError(
                f"tokenizer: {folder} has no {_TOKENIZER}; other formats (tokenizer.model, "
                "vocab.json) must be converted to it first"
            )
        files = {name: (folder / name).read_bytes() for name in tokenizer_files(folder)}
        return cls(files, f"tokenizer of {folder}")

    @classmethod
    def from_tokenizers(
        cls,
        tokenizer: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        chat_template: str | None = None,
    ) -> Tokenizer:
        """From a tokenizer of the `tokenizers` library, a trained one for example.

        Prompts get the BOS only if the tokenizer's own post-processor writes it.
        Raises: ValueError if a named token is not in the vocabulary.
        """
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        for key, token in zip(_NAMED, (bos_token, eos_token, pad_token), strict=False):
            if token is not None and tokenizer.token_to_id(token) is None:
                raise ValueError(f"tokenizer: {key} {token!r} is not in the vocabulary")
            config[key] = token
        config["clean_up_tokenization_spaces"] = False
        if chat_template is not None:
            config["chat_template"] = chat_template
        files = {_TOKENIZER: tokenizer.to_str(pretty=True), _CONFIG: json.dumps(config, indent=2)}
        return cls({name: text.encode() for name, text in files.items()})

    def save(self, folder: str | Path) -> None:
        """Writes the files that this tokenizer was read from, bit for bit, and removes what else
        the folder has of another one, which would be read with them.
        """
        for name in tokenizer_files(folder):
            if name not in self._files:
                (Path(folder) / name).unlink()
        for name, content in self._files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    @functools.cached_property
    def puts_space_before(self) -> bool:
        """Whether it encodes a text as if a space stood before it."""
        mark, marked, alone = (self._encode(text).ids for text in ("\x01", "\x01a", "a"))
        return marked[len(mark) :] != alone

    def special_ids(self, texts: Iterable[str]) -> list[int]:
        """The ids of those texts that are special tokens, which decoding leaves out."""
        ids = (self._tokenizer.token_to_id(text) for text in texts if text in self._special)
        return [i for i in ids if i is not None]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, after the BOS, or what else prompts of this checkpoint begin with.

        What of that the text itself begins with is not doubled; an EOS is never added.
        """
        ids, prefix = self._encode(text).ids, self._prefix
        if not add_special_tokens:
            return ids
        there = next(n for n in range(len(prefix), -1, -1) if ids[:n] == prefix[:n])
        return prefix + ids[there:]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; ids that the tokenizer does not know have none.

        Spaces before punctuation stay (`clean_up_tokenization_spaces` is not followed), so that
        text comes back as it was.
        """
        return self._tokenizer.decode(checked_ids(ids), skip_special_tokens=skip_special_tokens)

    def stream(
        self, after: Iterable[int] = (), *, skip_special_tokens: bool = True
    ) -> StreamDecoder:
        """A fresh decoder for ids that arrive bit by bit and continue the text of `after`.

        Many decoders take a space off the front of a text. A continuation keeps it.
        """
        hidden = self._special if skip_special_tokens else frozenset()
        before = (self._tokenizer.id_to_token(i) for i in after)
        begun = any(token is not None and token not in hidden for token in before)
        return StreamDecoder(self._tokenizer, hidden, begun=begun)

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint came with a chat template."""
        return bool(self._templates)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tokenize: Literal[True] = True,
        **extra: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tokenize: Literal[False],
        **extra: Any,
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        **extra: Any,
    ) -> list[int] | str:
        """A conversation in the checkpoint's own format: its ids, or its text.

        The ids are those of the text alone: no BOS is added, for templates write their own.
        `extra` (tools, documents, enable_thinking, ...) goes to the template; with tools, a
        template named "tool_use" is taken where there is one.
        Raises: ValueError if there is no template, or it has no such variable as one of `extra`
        (but tools and documents), or it refuses the messages, or is refused.
        """
        source, variables = self._template(extra)
        variables["add_generation_prompt"] = add_generation_prompt
        text = chat_template.render(source, messages, variables)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def encode_answers(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        first: int = 0,
        passed_over: Container[int] = (),
        **extra: Any,
    ) -> tuple[list[int], list[bool]]:
        """The ids of a whole conversation, and of each whether it is of what the assistant says in
        messages[first:], but in those whose indices are passed over.

        An id is an answer's if its last character is; an added token, which may take spaces around
        it along, if its own first character is. `extra` as in `apply_chat_template`.
        Raises: ValueError as there; or if the template does not let answers be told apart.
        """
        source, variables = self._template(extra)
        text, spans = chat_template.answer_spans(
            source, messages, variables, first=first, passed_over=passed_over
        )
        encoding = self._encode(text)
        added = {i for i in set(encoding.ids) if self._tokenizer.id_to_token(i) in self._added}
        bounds = [at for span in spans for at in span]

        def answers(id_: int, begin: int, end: int) -> bool:
            at = end - (max(1, len(text[begin:end].lstrip())) if id_ in added else 1)
            return bisect.bisect(bounds, at) % 2 == 1

        offsets = zip(encoding.ids, encoding.offsets, strict=True)
        return encoding.ids, [answers(id_, *offset) for id_, offset in offsets]

    def _encode(self, text: str) -> tokenizers.Encoding:
        """A text alone, checked: the library would panic at half a surrogate pair."""
        if not isinstance(text, str):
            raise ValueError(f"tokenizer: a text must be a str, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"half a surrogate pair, U+{ord(text[error.start]):04X}"
            raise ValueError(
                f"tokenizer: the text has {what}, at character {error.start}"
            ) from None
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _template(self, extra: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The source of the template to use, and its variables but for add_generation_prompt."""
        with_tools = extra.get("tools") is not None and "tool_use" in self._templates
        name = "tool_use" if with_tools else "default"
        if name not in self._templates:
            names = ", ".join(sorted(self._templates))
            found = f"only the chat templates {names}, no default" if names else "no chat template"
            raise ValueError(f"{self._source}: there is {found}; give plain text as the prompt")
        variables = {"tools": None, "documents": None, **self.special_tokens}
        source = self._templates[name]
        read = chat_template.variables_of(source)
        if read is not None and (unknown := sorted(extra.keys() - read - variables.keys())):
            raise ValueError(
                f"{self._source}: the chat template has no variable {unknown[0]!r}; it reads "
                f"{', '.join(sorted(read)) or 'none'}"
            )
        return source, {**variables, **extra}

    def _json(self, name: str) -> dict[str, Any]:
        """A file that may be absent."""
        try:
            content = json.loads(self._files.get(name, b"{}"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self._source}: {name} is not valid JSON: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{self._source}: {name} must hold an object, not {content!r:.40}")
        return content

    def _added_tokens(self) -> dict[str, tokenizers.AddedToken]:
        """Those that are found in a text before it is taken apart, by their texts."""
        return {
            token.content: token for token in self._tokenizer.get_added_tokens_decoder().values()
        }

    def _add_tokens(self, config: Mapping[str, Any]) -> None:
        """Those that only a file beside tokenizer.json names with their ids: `added_tokens_decoder`
        of tokenizer_config.json, or, where that is not, the older added_tokens.json.
        """
        known = self._added_tokens()
        found: dict[int, tokenizers.AddedToken] = {}  # by id
        special = [*self.special_tokens.values(), *_more_special(config)]
        try:
            for id_, token in (config.get("added_tokens_decoder") or {}).items():
                said = {key: token[key] for key in _ADDED_SAYS if key in token}
                found[int(id_)] = tokenizers.AddedToken(token["content"], **said)
            older = {} if "added_tokens_decoder" in config else self._json(_ADDED)
            for text, id_ in older.items():
                is_special = text in special
                found[int(id_)] = tokenizers.AddedToken(
                    text, special=is_special, normalized=not is_special
                )
        except (TypeError, ValueError, KeyError, AttributeError):
            raise ValueError(
                f"{self._source}: {_ADDED} must have ids by token, and added_tokens_decoder of "
                f"{_CONFIG} objects with content by id"
            ) from None
        new = [id_ for id_, token in sorted(found.items()) if token.content not in known]
        self._tokenizer.add_tokens([found[id_] for id_ in new])
        for id_ in new:
            text = found[id_].content
            if (got := self._tokenizer.token_to_id(text)) != id_:
                raise ValueError(
                    f"{self._source}: the files beside {_TOKENIZER} give the token {text!r} the id "
                    f"{id_}, but behind those of {_TOKENIZER} it has {got}; add it there, with "
                    "what lies between"
                )

    def _read_special_tokens(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Special tokens by the names under which templates know them."""
        extra = config.get("extra_special_tokens")
        found = {**config, **(extra if isinstance(extra, dict) else {})}
        special = {}
        for key, value in found.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                special[key] = text
            elif key in _NAMED and value is not None:
                raise ValueError(
                    f"{self._source}: {key} must be a string or an object with content, "
                    f"not {value!r:.40}"
                )
        return special

    def _read_templates(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Templates by name; files win over tokenizer_config.json, as in transformers."""
        files = {k: v for k, v in self._files.items() if k.endswith(".jinja")}
        if files:
            names = {name: Path(name).stem for name in files}
            names[_TEMPLATE] = "default"
            try:
                return {names[name]: content.decode() for name, content in files.items()}
            except UnicodeDecodeError as error:
                raise ValueError(f"{self._source}: a chat template is not UTF-8: {error}") from None
        found = config.get("chat_template") or {}
        if isinstance(found, str):
            return {"default": found}
        try:
            templates = {entry["name"]: entry["template"] for entry in found}
            if all(isinstance(text, str) for text in templates.values()):
                return templates
        except (TypeError, KeyError):
            pass
        raise ValueError(
            f"{self._source}: chat_template must be a string or a list of objects with name and "
            f"template, not {found!r:.40}"
        )

    def _read_prefix(self) -> list[int]:
        """What the post-processor of tokenizer.json writes before a text.

        Read, not run: it would also write what comes after a text, and the library panics on
        tokens that it does not know.
        """
        processor = self._tokenizer.post_processor
        steps = [] if processor is None else [json.loads(processor.__getstate__())]
        while any(step["type"] == "Sequence" for step in steps):
            steps = [s for step in steps for s in step.get("processors", [step])]
        prefix = []
        for step in steps:
            for piece in step.get("single", []):  # of a TemplateProcessing
                if "SpecialToken" not in piece:
                    break
                name = piece["SpecialToken"]["id"]
                if name not in step["special_tokens"]:
                    raise ValueError(f"{self._source}: the post-processor knows no token {name!r}")
                prefix += step["special_tokens"][name]["ids"]
        return prefix


def _more_special(config: Mapping[str, Any]) -> list[str]:
    """The special tokens that have no name of their own."""
    lists = (config.get(key) for key in ("extra_special_tokens", "additional_special_tokens"))
    listed = next((more for more in lists if more and isinstance(more, list)), [])
    texts = [token.get("content") if isinstance(token, dict) else token for token in listed]
    return [text for text in texts if isinstance(text, str)]
