"""Chat templates: a list of messages -> the text that a model was trained to see.

A template is a Jinja program that comes with a checkpoint: foreign code. Jinja's sandbox keeps it
from Python's internals but hardly bounds its work, so `_Sandbox` also counts what loops, calls and
growing values cost. A template that takes more than its share, or reaches for what is private,
ends in one ValueError. Tags, globals and filters are those that transformers gives to templates.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import Template, meta, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

# A step is an item or character that is read or made, or about 0.1 us of other work.
_STEPS, _STEPS_A_CHARACTER, _STEPS_A_CALL = 2_000_000, 1000, 100
# Filters and methods that make much out of little: their integers count as steps.
_WIDTHS = frozenset(
    ("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "tojson", "truncate")
    + ("wordwrap", "zfill")
)
# Filters that take a list or dict and look no deeper; others may write or compare all within
_SHALLOW = frozenset(
    ("batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject")
    + ("rejectattr", "reverse", "select", "selectattr", "slice")
)
_MARKS = ("_generation_begins", "_generation_ends")  # variables that a generation block prints
_REASONING = ("reasoning_content", "thinking", "reasoning")  # of several the first counts
_WIDE = re.compile(  # "%9999d", "%*d", "{:9999}", "{:{}}"
    r"%[^a-zA-Z%]*(\d{4}|\*)|\{[^{}]*:[^{}]*(\d{4}|\{)"
)


def render(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """`messages` as the template `source` writes them; it sees plain JSON values only, and so a
    tuple as a list.

    Entries of a message that are None are dropped, and what a model thought has the names
    reasoning_content and thinking where a message has it as one of `_REASONING`: as transformers
    does both.
    Raises: ValueError if the messages are not JSON objects, whose keys are texts, or if the
    template has a syntax error, calls raise_exception, fails, or asks for what the sandbox refuses.
    """
    return _render(source, messages, variables, ("", ""))


def answer_spans(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    first: int = 0,
    passed_over: Container[int] = (),
) -> tuple[str, list[tuple[int, int]]]:
    """The text of `messages`, and where in it, in characters, stands what the assistant says in
    messages[first:], but in those whose indices are passed over.

    A template with `{% generation %}` blocks says it itself. Of another, an answer is what its
    message adds to the text: from the end of the messages before it, rendered with
    add_generation_prompt, to the end of the messages up to it, without an EOS token that the
    template puts at the end of every text. Where the template writes those in another way than with
    all that follows, as Qwen3's does with what was thought, an answer is all of the whole text that
    stands between the generation prompt and the end of its turn.
    Raises: ValueError as `render`; or if that does not tell for certain where an answer stands.
    """
    variables = {**variables, "add_generation_prompt": False}
    text = render(source, messages, variables)
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    places = functools.partial(_places, text, source, messages, variables)
    if re.search(r"\{%[-+]?\s*generation\b", source):
        spans = _generation_spans(text, source, messages, variables)
        asked = first in answers
        start = _end(text, source, messages, variables, first, asked) if first else 0
        others = places([i for i in answers if i in passed_over])
        return text, [
            (max(a, start), b)
            for a, b in spans
            if b > start and not any(a < end and begin < b for begin, end in others)
        ]
    learnt = [i for i in answers if i >= first and i not in passed_over]
    if learnt[:1] == [0]:
        raise ValueError(
            "chat template: where an answer begins that is the first message cannot be told "
            "from a template without {% generation %} blocks; put a message before it"
        )
    return text, places(learnt)


def _places(text, source, messages, variables, answers: list[int]) -> list[tuple[int, int]]:
    """Where the answers with these indices stand, by the texts of the messages alone."""

    def grown(i: int) -> tuple[int, int]:
        end = functools.partial(_end, text, source, messages, variables)
        return end(i, True), end(i + 1, False)

    marked = functools.cache(lambda: _marked_places(text, source, messages, variables))
    try:
        if len(answers) > 4 and marked():  # few renderings tell all, if these agree at both ends
            spans = [marked()[i] for i in answers]
            if [spans[0], spans[-1]] == [grown(answers[0]), grown(answers[-1])]:
                return spans
        return [grown(i) for i in answers]
    except ValueError:
        if not marked():
            raise
        return [marked()[i] for i in answers]


def _end(text, source, messages, variables, count: int, answer_follows: bool) -> int:
    """Where the first `count` messages end in the text."""
    if count in (0, len(messages)):
        return len(text) if count else 0
    asked = {**variables, "add_generation_prompt": answer_follows}
    prefix = render(source, messages[:count], asked)
    if not text.startswith(prefix):
        prefix = prefix.removesuffix(variables.get("eos_token") or "")
    if not text.startswith(prefix):
        raise ValueError(
            f"chat template: the first {count} messages are written in another way where more "
            "follow, so an answer's place cannot be told; train on conversations that end with "
            "their only answer, or give the template {% generation %} blocks"
        )
    return len(prefix)


def _marked_places(text, source, messages, variables) -> dict[int, tuple[int, int]]:
    """Where each answer stands: between those parts of the text that stay as they are where marks
    take the place of the answers. Empty if that is not certain.

    An answer begins behind the generation prompt, or, where the template has not put that before
    it, where its content does; and ends as one does that is the last message.
    """
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    last, mark = answers[-1], next(_unused(text, source))
    chat: list[Any] = list(messages)
    for i in answers:
        chat[i] = {"role": "assistant", "content": f"{mark}{i}{mark}"}

    def write(count: int, prompt: bool = False) -> str:
        return render(source, chat[:count], {**variables, "add_generation_prompt": prompt})

    try:
        whole, before, asked = write(len(chat)), write(last), write(last, prompt=True)
        ended = whole if last + 1 == len(chat) else write(last + 1)
    except ValueError:  # the template looks into what was said
        return {}
    eos = variables.get("eos_token") or ""
    if not asked.startswith(before):
        before = before.removesuffix(eos)
    parts = re.split(f"{mark}([0-9]+){mark}", whole)
    known = asked.startswith(before) and ended.startswith(asked)
    if not known or parts[1::2] != [str(i) for i in answers]:
        return {}
    prompt = asked.removeprefix(before)
    lead, _, end = ended.removeprefix(asked).partition(f"{mark}{last}{mark}")
    parts, begins, ends = parts[::2], [], []
    for i, part in enumerate(parts):
        if i == len(answers) and last + 1 == len(chat):
            end = part
        elif i and not part.startswith(end):
            end = end.removesuffix(eos)
        if i and not part.startswith(end):
            return {}
        ends.append(len(end))
        if i < len(answers):
            begins.append(_begin(part, prompt, lead, chat))
            parts[i] = part[: begins[i]]
    at = _only_places(text, parts)
    if not at:
        return {}
    starts = [_behind(text, at[n] + begin, prompt) for n, begin in enumerate(begins)]
    stops = [at[n] + end for n, end in enumerate(ends)]
    return dict(zip(answers, zip(starts, stops[1:], strict=True), strict=True))


def _begin(part: str, prompt: str, lead: str, chat: Sequence[Mapping[str, Any]]) -> int:
    """How much of the text before an answer's content is not of the answer; `lead`: what stands
    between the prompt and the content of the last one.
    """
    if part.endswith(prompt + lead):
        return len(part) - len(lead)
    quoted = any(prompt in str(message.get("content")) for message in chat)
    return len(part) if quoted or prompt not in part else part.rindex(prompt) + len(prompt)


def _behind(text: str, at: int, prompt: str) -> int:
    """The place behind the prompt, if some of it stands before `at` and all the rest behind."""
    rest = (
        len(prompt) - n
        for n in range(len(prompt), 0, -1)
        if text.startswith(prompt, at - n) and n <= at
    )
    return at + next(rest, 0)


def _only_places(text: str, parts: list[str]) -> list[int]:
    """Where the parts stand in the text, one behind the other, the first at its beginning and the
    last at its end. Empty if they do not, or could in another way.
    """
    begin, end = len(parts[0]), len(text) - len(parts[-1])
    if not (text.startswith(parts[0]) and text.endswith(parts[-1])):
        return []
    earliest, latest = [], []
    for part in parts[1:-1]:
        earliest.append(text.find(part, begin))
        begin = earliest[-1] + len(part)
    fits = begin <= end and -1 not in earliest
    for part in parts[-2:0:-1]:
        end = text.rfind(part, 0, max(end, 0))
        latest.append(end)
    certain = fits and earliest == latest[::-1]
    return [0, *earliest, len(text) - len(parts[-1])] if certain else []


def _unused(*texts: str) -> Iterator[str]:
    """Characters of private use that none of the texts has."""
    return (c for c in map(chr, range(0xE000, 0xF900)) if not any(c in text for text in texts))


def _generation_spans(text, source, messages, variables) -> list[tuple[int, int]]:
    """Where `{% generation %}` blocks stand: rendered again, between two characters that nobody
    else uses.
    """
    marks = list(itertools.islice(_unused(text, source), 2))
    pieces = re.split(f"([{''.join(marks)}])", _render(source, messages, variables, marks))
    if "".join(pieces[::2]) != text or pieces[1::2] != marks * (len(pieces) // 4):
        raise ValueError(
            "chat template: its {% generation %} blocks change or overlap one another in the text"
        )
    ends = list(itertools.accumulate(map(len, pieces[::2])))
    return list(zip(ends[:-1:2], ends[1::2], strict=True))


def _render(source, messages, variables, marks: Sequence[str]) -> str:
    """`render`, with the first mark before and the second behind each generation block."""
    if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) for m in messages):
        raise ValueError("chat template: messages must be a list of dicts with role and content")
    if not messages:
        raise ValueError("chat template: the list of messages is empty; at least one is needed")
    chat = [_as_read(message) for message in messages]
    for i, message in enumerate(chat):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"chat template: message {i} has no role: {message!r:.80}")
        if not message.keys() & {"content", "tool_calls"}:
            raise ValueError(f"chat template: message {i} has no content: {message!r:.80}")
    try:
        plain = json.dumps({**variables, "messages": chat})
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"chat template: messages must be made of plain JSON values: {error}"
        ) from None
    if strange := [key for key in _keys(chat) if not isinstance(key, str)]:
        raise ValueError(
            f"chat template: the keys of a message and within it must be texts, got {strange[0]!r}"
        )
    values = json.loads(plain) | dict(zip(_MARKS, marks, strict=True))
    try:
        sandbox, template = _template(source)
        sandbox.give(_STEPS + _STEPS_A_CHARACTER * len(plain))
        return template.render(values)
    except Exception as error:  # foreign code may raise anything; its user gets one sentence
        reason = " ".join(str(error).split())[:500] or "no reason given"
        if type(error) is TemplateError:  # what raise_exception raises
            raise ValueError(f"chat template: refuses these messages: {reason}") from None
        raise ValueError(f"chat template: refused: {type(error).__name__}: {reason}") from None


def _keys(value: Any) -> Iterator[Any]:
    """Of all dictionaries within."""
    if isinstance(value, Mapping):
        yield from value
        value = list(value.values())
    for part in value if isinstance(value, list | tuple) else ():
        yield from _keys(part)


def _as_read(message: Mapping[str, Any]) -> dict[str, Any]:
    said = {key: value for key, value in message.items() if value is not None}
    for key in _REASONING:
        if key in said:
            return {"thinking": said[key], **said, "reasoning_content": said[key]}
    return said


@functools.lru_cache(maxsize=32)
def _template(source: str) -> tuple[_Sandbox, Template]:
    sandbox = _Sandbox()
    return sandbox, sandbox.from_string(source)


@functools.lru_cache(maxsize=32)
def variables_of(source: str) -> frozenset[str] | None:
    """The names that a template takes from its caller; None if it cannot be read."""
    sandbox = _Sandbox()
    try:
        found = meta.find_undeclared_variables(sandbox.parse(source))
    except Exception:  # foreign code, of which `render` says why
        return None
    return frozenset(found - sandbox.globals.keys() - {*_MARKS})


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said: its body, between the two marks."""

    tags = {"generation"}  # noqa: RUF012 (the type is Jinja's)

    def parse(self, parser: Any) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (
            nodes.Output([nodes.Name(name, "load", lineno=lineno)], lineno=lineno)
            for name in _MARKS
        )
        return nodes.Scope([begin, *body, end], lineno=lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox for one template; a rendering has the steps that `give` gave its thread."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self._print,
            optimized=False,  # what is folded at compile time would cost nothing when it runs
        )
        self.steps = threading.local()
        self.filters["tojson"] = _tojson
        for name, function in self.filters.items():
            self.filters[name] = self._paying(function, name, deep=name not in _SHALLOW)
        for name, function in self.tests.items():
            compares = name == "in" or function.__module__ == "_operator"
            self.tests[name] = self._paying(function, name, deep=compares)
        self.filters["charge"] = self._charge
        del self.globals["lipsum"]
        self.globals.update(
            dict=lambda *args, **kwargs: dict(*args, **kwargs),  # not the type and its methods
            namespace=_namespace,
            raise_exception=_raise_exception,
            strftime_now=lambda form: datetime.datetime.now().strftime(form),
        )

    def give(self, steps: int) -> None:
        self.steps.limit = self.steps.left = steps

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Charges().visit(super()._parse(source, name, filename))

    def getattr(self, obj: Any, attribute: str) -> Any:
        if attribute.startswith("__"):
            return self.unsafe_undefined(obj, attribute)
        return super().getattr(obj, attribute)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        # Jinja's own answer is an Undefined, which prints as nothing
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is unsafe")

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        # str.format comes wrapped by the sandbox, which keeps the method beside it
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        name = getattr(function, "__name__", "") if isinstance(owner, str) else ""
        # in loops and blocks Jinja passes its variables too, which the function never sees
        given = (value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars"))
        self._pay_call(name, isinstance(owner, str | list | dict), owner, *args, *given)
        return self._paid(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            self._pay_call("format", True, left, right)
        elif operator in ("*", "**"):
            for value, times in ((left, right), (right, left)):
                grows = isinstance(times, int) and (operator == "**" or hasattr(value, "__len__"))
                self._pay(self._size(value) * (max(times, 0) if grows else 1))
        return self._paid(super().call_binop(context, operator, left, right))

    @pass_context  # for Jinja prints constants at compile time unless this needs the context
    def _print(self, context: Any, value: Any) -> Any:
        return self._paid(value, deep=True)

    @pass_context
    def _charge(self, context: Any, value: Any, times: int, deep: bool) -> Any:
        return self._paid(value, times, deep)

    def _paying(self, function: Callable, name: str, deep: bool) -> Callable:
        """A filter or test that pays for what it reads and makes."""

        @functools.wraps(function)  # with Jinja's marks on the function
        def paying(*args: Any, **kwargs: Any) -> Any:
            self._pay_call(name, deep, *args, *kwargs.values())
            return self._paid(function(*args, **kwargs))

        return paying

    def _pay_call(self, name: str, deep: bool, first: Any, *others: Any) -> None:
        """Pays as if all others took the place of each item of the largest argument."""
        if name in ("format", "format_map") and isinstance(first, str) and _WIDE.search(first):
            raise SecurityError("a format is wider than 999 or takes its width from an argument")
        widths = name in _WIDTHS
        sizes = [self._size(first, deep)]
        sizes += [v if widths and isinstance(v, int) else self._size(v, deep) for v in others]
        self._pay(_STEPS_A_CALL + max(sizes) * (1 + sum(sizes) - max(sizes)))

    def _paid(self, value: Any, times: int = 1, deep: bool = False) -> Any:
        """The value, or the list of an iterator's items."""
        if isinstance(value, Iterator):
            value = list(itertools.islice(value, self.steps.left + 1))
        self._pay(self._size(value, deep) * times)
        return value

    def _pay(self, steps: int) -> None:
        self.steps.left -= max(steps, 0)
        if self.steps.left < 0:
            raise SecurityError(f"it needs more than the {self.steps.limit} steps that it is given")

    def _size(self, value: Any, deep: bool = False) -> int:
        """Steps to read a value, if `deep` its items and theirs too; counted up to what is left."""
        if isinstance(value, str):
            return len(value) + 1
        total, stack, left = 0, [value], self.steps.left
        while stack and total <= left:
            value = stack.pop()
            if deep and isinstance(value, dict):
                stack += [*value, *value.values()]
            elif deep and isinstance(value, list | tuple):
                stack += value
            elif isinstance(value, int):
                total += (value.bit_length() // 64) ** 2  # to print or multiply it
            elif hasattr(type(value), "__len__"):
                total += len(value)
            total += 1
        return total


class _Charges(NodeTransformer):
    """Puts the filter `charge` around what takes time or grows without a call."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (these names are Jinja's)
        # What the body does anyway, each time, and the texts that it may print
        steps = sum(1 + len(getattr(part, "data", "")) for part in node.find_all(nodes.Node))
        steps += sum(len(str(part.value)) for part in node.find_all(nodes.Const))
        self.generic_visit(node)
        node.iter = _charged(node.iter, steps)
        return node

    def visit_Operand(self, node: nodes.Operand) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _charged(node.expr, deep=True)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_charged(part, deep=True) for part in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _charged(node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: Any) -> nodes.Node:  # noqa: N802
        # All within, so that lists of lists of the same list stay small
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _charged(node, deep=True)

    visit_Tuple = visit_Dict = visit_List  # noqa: N815

    def visit_NSRef(self, node: nodes.NSRef) -> nodes.Node:  # noqa: N802
        _check_names([node.attr])
        return node


def _charged(node: Any, times: int = 1, deep: bool = False) -> nodes.Expr:
    arguments = [nodes.Const(value, lineno=node.lineno) for value in (times, deep)]
    return nodes.Filter(
        node, "charge", arguments, [], None, None, lineno=node.lineno, environment=node.environment
    )


def _check_names(names: Sequence[str]) -> None:
    if any(name.startswith("_") for name in names):
        raise SecurityError("names of a namespace must not begin with an underscore")


def _namespace(*args: Any, **kwargs: Any) -> Namespace:
    values = dict(*args, **kwargs)
    _check_names([str(name) for name in values])
    return Namespace(values)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
