"""Chat templates render as transformers renders them; a hostile one ends in one sentence."""

import concurrent.futures
import json
import time
from pathlib import Path

import pytest

from jaxllm import chat_template

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "chat" / "templates.json").read_text())
MESSAGES = [{"role": "user", "content": "hi"}]


def render(template, messages=MESSAGES, **variables):
    return chat_template.render(template, messages, variables)


def golden_text(template):
    nothing = {"tools": None, "documents": None}
    return render(template, GOLDEN["messages"], **nothing, **GOLDEN["variables"])


@pytest.mark.parametrize("row", GOLDEN["templates"], ids=lambda row: row["name"])
def test_goldens(row):
    assert golden_text(row["template"]) == row["text"]


@pytest.mark.reference
@pytest.mark.parametrize("row", GOLDEN["templates"], ids=lambda row: row["name"])
def test_as_transformers(transformers, row):
    chat = [{k: v for k, v in m.items() if v is not None} for m in GOLDEN["messages"]]
    render_theirs = transformers.utils.chat_template_utils.render_jinja_template
    theirs = render_theirs([chat], chat_template=row["template"], **GOLDEN["variables"])[0][0]
    assert golden_text(row["template"]) == theirs


THOUGHTS = [
    {"reasoning": "r"},
    {"thinking": "t"},
    {"reasoning_content": "c"},
    {"reasoning": "r", "thinking": "t", "reasoning_content": "c"},
    {"reasoning": "r", "thinking": "", "reasoning_content": None},
    {"reasoning": None},
]
READS = """{% for m in messages %}{% for k, v in m.items() %}{{ k }}={{ v }};{% endfor %}
{% endfor %}"""


@pytest.mark.parametrize(
    ("thought", "text"),
    [
        (THOUGHTS[0], "thinking=r;role=a;reasoning=r;content=x;reasoning_content=r;"),
        (THOUGHTS[1], "thinking=t;role=a;content=x;reasoning_content=t;"),
        (THOUGHTS[2], "thinking=c;role=a;reasoning_content=c;content=x;"),
        (THOUGHTS[3], "thinking=t;role=a;reasoning=r;reasoning_content=c;content=x;"),
        (THOUGHTS[4], "thinking=;role=a;reasoning=r;content=x;reasoning_content=;"),
        (THOUGHTS[5], "role=a;content=x;"),
    ],
)
def test_what_a_model_thought_has_every_name(thought, text):
    assert render(READS, [{"role": "a", **thought, "content": "x"}]) == text


@pytest.mark.reference
@pytest.mark.parametrize("thought", THOUGHTS)
def test_what_a_model_thought_as_transformers(transformers, thought):
    chat = [{"role": "a", **thought, "content": "x"}]
    there = [{k: v for k, v in chat[0].items() if v is not None}]
    render_theirs = transformers.utils.chat_template_utils.render_jinja_template
    assert render(READS, chat) == render_theirs([there], chat_template=READS)[0][0]


def test_the_goldens_can_fail():
    # Jinja as it comes keeps the space around blocks, escapes HTML in tojson and knows no `break`
    import jinja2

    plain = jinja2.Environment()
    different = set()
    for row in GOLDEN["templates"]:
        try:
            text = plain.from_string(row["template"]).render(
                messages=GOLDEN["messages"], **GOLDEN["variables"]
            )
        except (jinja2.TemplateError, TypeError):
            text = None
        if text != row["text"]:
            different.add(row["name"])
    assert {"blocks", "tojson", "generation", "loop controls"} <= different


def test_time_of_day():
    year = time.strftime("%Y")
    assert render("{{ strftime_now('%Y') }}") in (year, time.strftime("%Y"))


ATTRIBUTES = [
    "{{ ().__class__.__mro__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ messages['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages | map('attr', '__class__') | list }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ dict.__base__ }}",
    "{{ dict.mro() }}",
    "{{ lipsum.__globals__ }}",
    "{{ ''.format.__wrapped__ }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% set ns = namespace() %}{% set ns._Namespace__attrs = 1 %}",
    "{{ namespace(__html__=1) }}",
    "{{ namespace(_x=1) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
]
IMPORTS = [
    "{% import 'os' as os %}{{ os.getcwd() }}",
    "{% from 'os' import system %}",
    "{% include '/etc/passwd' %}",
    "{% extends 'base' %}",
    "{{ __import__('os').getcwd() }}",
    "{% do messages.append(1) %}",
    "{% debug %}",
]
TOWER = "{% set a = [1] %}" + "{% set a = [a, a, a, a, a, a, a, a, a, a] %}" * 12
NEVER_ENDING = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in 'aaaaaaaaaa' recursive %}{{ loop('aaaaaaaaaa') if loop.depth < 20 }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in range(90000) %}" + "x" * 10000 + "{% endfor %}",
    "{% for i in range(90000) %}{{ 'x' | center(1000000) }}{% endfor %}",
    "{% set a = 'a' * 1000000 %}{% for i in range(90000) %}{% set b = a[1:] %}{% endfor %}",
    "{% set a = 'a' * 1000000 %}{% for i in range(90000) %}{{ 'b' in a }}{% endfor %}",
    "{% for i in range(99999) %}{% set q = range(99999) | sort %}{% endfor %}",
]
TOO_LARGE = [
    "{{ 'a' * 10**10 }}",
    "{{ ([0] * 10**9) | length }}",
    "{{ 10**(10**10) }}",
    "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{{ 'x' | center(10**10) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ messages | tojson(indent=10**10) }}",
    "{{ messages | batch(10**10, 1) | list }}",
    "{{ '%1000d' % 1 }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '%9999999999d' | format(1) }}",
    "{{ '{:1000d}'.format(1) }}",
    "{{ '{:9999999999d}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**10) }}",
    "{% set a = 'a' * 100000 %}{{ a.replace('a', a) }}",
    "{% set a = 'a' * 100000 %}{{ a | replace('a', a) }}",
    "{% set a = 'a' * 100000 %}{{ a.join(a) }}",
    TOWER + "{{ a }}",
    TOWER + "{{ a | tojson }}",
    TOWER + "{{ a == [a] }}",
    "{{ 'a' | charge(-10**9, false) }}{{ 'a' * 10**8 }}",
]


@pytest.mark.parametrize("template", [*ATTRIBUTES, *IMPORTS, *NEVER_ENDING, *TOO_LARGE])
def test_hostile_templates_are_refused(template):
    start = time.perf_counter()
    with pytest.raises(ValueError, match=r"^chat template: refused: \w+: .+") as caught:
        render(template)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert time.perf_counter() - start < 60  # a few seconds at most, on a busy machine


def test_widths_of_a_table_are_let_through():
    assert render("{{ '%999d' % 1 }}{{ '{:999d}'.format(1) }}") == 2 * f"{1:999d}"


def test_the_sandbox_is_what_refuses():
    # Without it the first of them walks to the classes of the interpreter
    import jinja2

    assert "object" in jinja2.Environment().from_string(ATTRIBUTES[0]).render()


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{{ raise_exception('Roles must\n alternate') }}",
            "refuses these messages: Roles must alt",
        ),
        ("{% if %}", "TemplateSyntaxError: Expected an expression"),
        ("{% for m in messages %}", "TemplateSyntaxError: Unexpected end of template"),
        ("{{ nope.x.y }}", "UndefinedError: 'nope' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "RecursionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ raise_exception('x' * 100000) }}", "refuses these messages: xxx"),
    ],
)
def test_templates_that_fail(template, reason):
    with pytest.raises(ValueError, match="^chat template: ") as caught:
        render(template)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "the list of messages is empty"),
        ("hello", "must be a list of dicts"),
        (["hello"], "must be a list of dicts"),
        ({"role": "user"}, "must be a list of dicts"),
        ([{"role": "user", "content": object()}], "plain JSON values"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "message 1 has no role: "),
        ([{"rle": "user", "content": "a"}], "message 0 has no role: "),
        ([{"role": "user"}], "message 0 has no content: "),
        ([{"role": "user", "content": None}], "message 0 has no content: "),
        ([{"role": "user", "content": b"hi"}], "plain JSON values"),
        ([{"role": "user", "content": "a", 1: "b"}], "keys of a message .* must be texts, got 1"),
        (
            [{"role": "user", "content": [{"type": "text", "meta": ({None: 1},)}]}],
            "keys of a message and within it must be texts, got None",
        ),
    ],
)
def test_wrong_messages(messages, reason):
    with pytest.raises(ValueError, match="^chat template: .*" + reason):
        render("x", messages)


def test_a_template_sees_copies_of_plain_values():
    class Text(str):
        def secret(self):
            return "seen"

    with pytest.raises(ValueError, match="has no attribute 'secret'"):
        render("{{ messages[0].content.secret() }}", [{"role": "user", "content": Text("hi")}])


def test_long_conversations_are_not_refused():
    # The budget grows with the messages: these templates look at all messages for each message
    template = (
        "{% for m in messages %}{% for o in messages[::-1] %}{% if loop.first %}{{ o.role }}"
        "{% endif %}{% endfor %}{{ messages | length }}{{ m.role ~ m.content | trim + '\n' }}"
        "{{ m.content.split('</think>')[-1].replace('\n', ' ') }}{% endfor %}"
    )
    long = render(template, [{"role": "user", "content": "lorem ipsum " * 20}] * 400)
    assert long.count("lorem") == 400 * 20 * 2
    one = render(template, [{"role": "user", "content": "lorem ipsum " * 50_000}])
    assert one.count("lorem") == 100_000


def test_long_messages_are_not_refused_for_variables_of_a_loop():
    """Jinja passes those to each call beside its arguments."""
    template = (
        "{% for m in messages %}{% set content = m.content %}"
        "{{ content.split('</think>')[-1].strip() ~ content.startswith('x') }}{% endfor %}"
    )
    text = "lorem ipsum " * 5000
    messages = [{"role": "user", "content": text}]
    assert render(template, messages) == text.strip() + "False"
    with pytest.raises(ValueError, match="it needs more than the"):  # what a call reads does count
        render("{% set s = messages[0].content %}{{ s.replace(s, s) }}", messages)


def test_a_rendering_leaves_nothing_to_the_next():
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    for _ in range(2):
        with pytest.raises(ValueError, match="steps"):
            render(template)
        assert render("{{ messages[0].content }}") == "hi"


def test_a_template_is_set_up_once_and_each_thread_has_its_own_steps(monkeypatch):
    made, init = [], chat_template._Sandbox.__init__
    monkeypatch.setattr(
        chat_template._Sandbox, "__init__", lambda self: (made.append(self), init(self))[1]
    )
    # About 2/3 of the steps that a rendering has
    template = "{# once #}{% for i in range(150) %}{{ 'a' * 3000 }}{% endfor %}"
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        render(template)
        assert {len(text) for text in pool.map(lambda _: render(template), range(8))} == {450_000}
    assert len(made) == 1


# Where the assistant's words stand

CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "ONE"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "TWO"},
]
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>"
    "{% generation %}{{ m.content }}<end>{% endgeneration %}"
    "{% else %}<{{ m.role }}>{{ m.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As Phi-3's: an EOS token behind every text that is not to be continued
CLOSED = PLAIN.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
# As Qwen3's: thoughts stand only in answers behind the last user's message, in the last one always
THINKING = """
{%- set last = namespace(user=-1) %}
{%- for m in messages if m.role == 'user' %}{% set last.user = messages.index(m) %}{% endfor %}
{%- for m in messages %}
    {%- set said, thought = m.content or '', m.reasoning_content or '' %}
    {%- if '~' in said %}{% set thought, said = said.split('~') %}{% endif %}
    {{- '<' ~ m.role ~ '>' }}
    {%- if loop.index0 > last.user and m.role == 'assistant' and (loop.last or thought) %}
        {{- '<think>' ~ thought ~ '</think>' }}
    {%- endif %}
    {{- said.strip() }}
    {%- for call in m.tool_calls or [] %}{{ (' ' if said else '') ~ '<call>' ~ call }}{% endfor %}
    {{- '<end>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}
"""
# As Qwen3-Thinking's: the generation prompt begins the thought
THINKING_ALWAYS = THINKING.replace("{{ '<assistant>' }}", "{{ '<assistant><think>' }}")


def answers(template, messages=CHAT, first=0, **variables):
    text, spans = chat_template.answer_spans(template, messages, variables, first=first)
    assert text == render(template, messages, add_generation_prompt=False, **variables)
    return [text[a:b] for a, b in spans]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_answers_stand_where_the_template_puts_them(template):
    assert answers(template) == ["ONE<end>", "TWO<end>"]
    assert answers(template, first=3) == ["TWO<end>"]
    assert answers(template, CHAT[:2]) == []


def test_an_eos_behind_every_text_belongs_to_the_last_answer_only():
    assert answers(CLOSED, eos_token="<eos>") == ["ONE<end>", "TWO<end><eos>"]


def test_generation_blocks_decide_even_where_they_differ_from_the_messages():
    own = MARKED.replace("{{ m.content }}<end>{% end", "{{ m.content | lower }}{% end")
    assert answers(own) == ["one", "two"]
    around = MARKED.replace("<assistant>{% gen", "{% gen").replace(
        "%}{{ m.content }}<end>{% end", "%}<assistant>{{ m.content }}<end>{% end"
    )
    assert answers(around)[1] == "<assistant>TWO<end>"
    assert answers(around, first=4) == ["TWO<end>"]  # the prompt of generation is given


def test_characters_of_private_use_are_no_marks():
    chat = [CHAT[1], {"role": "assistant", "content": "\ue000A\ue001"}]
    assert answers(MARKED, chat) == ["\ue000A\ue001<end>"]


def said(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


CALLS = [
    {"role": "assistant", "content": None, "tool_calls": ["f"], "reasoning_content": "hm"},
    {"role": "tool", "content": "21"},
    {"role": "assistant", "content": "It is 21", "tool_calls": ["g"]},
    {"role": "tool", "content": "22"},
]


@pytest.mark.parametrize(
    ("messages", "learnt"),
    [
        (said("a", "hm~A", "b", "so~B"), ["A<end>", "<think>so</think>B<end>"]),
        (said("a", "A", "b", "B"), ["A<end>", "<think></think>B<end>"]),
        (said("a", "hm~A", "b"), ["A<end>"]),
        (said("a", " a\n", "a", "a", "a"), ["a<end>", "a<end>"]),
        (CHAT, ["ONE<end>", "<think></think>TWO<end>"]),
        ([*said("a"), *CALLS], ["<think>hm</think><call>f<end>", "It is 21 <call>g<end>"]),
        (
            [*said("a"), *CALLS, *said("b", "B")],
            ["<call>f<end>", "It is 21 <call>g<end>", "<think></think>B<end>"],
        ),
        (
            said(*"aAbBcCdDeEfF"),
            [*"A<end> B<end> C<end> D<end> E<end>".split(), "<think></think>F<end>"],
        ),
        (said("<end><assistant>", "A", "b", "B"), ["A<end>", "<think></think>B<end>"]),
        (
            [*said("a", "A"), {"role": "assistant", "content": "A"}, *said("b", "B")],
            ["A<end>", "A<end>", "<think></think>B<end>"],
        ),
    ],
)
def test_answers_that_are_written_otherwise_where_more_follows(messages, learnt):
    """Learnt is what stands in the whole text: of earlier answers, what was thought does not."""
    assert answers(THINKING, messages) == learnt
    early = len(answers(PLAIN, messages[:3]))
    assert answers(THINKING, messages, first=3) == learnt[early:]
    assert answers(THINKING_ALWAYS, messages) == [a.removeprefix("<think>") for a in learnt]


@pytest.mark.parametrize("template", [PLAIN, CLOSED, MARKED, THINKING])
def test_long_conversations_are_rendered_a_few_times(monkeypatch, template):
    few, many = said(*"aAbBcC"), said(*(f"message {i}" for i in range(100)))
    expected = [f"message {i}<end>" for i in range(1, 100, 2)]
    end = {CLOSED: "{}<eos>", THINKING: "<think></think>{}"}.get(template, "{}")
    expected[-1] = end.format(expected[-1])
    assert len(answers(template, few, eos_token="<eos>")) == 3
    rendered, real = [], chat_template._render
    monkeypatch.setattr(chat_template, "_render", lambda *a: (rendered.append(1), real(*a))[1])
    assert answers(template, many, eos_token="<eos>") == expected
    assert len(rendered) < 12


@pytest.mark.parametrize(
    "messages",
    [
        said("a", "x<end><user>b<end><assistant>y", "b", "B"),  # where does the first answer end?
        said("a", "hm~A", "b", "count"),
    ],
)
def test_an_answer_whose_place_is_not_certain_is_refused(messages):
    counts = "{% if messages[-1].content == 'count' %}{{ messages[1].content | length }}{% endif %}"
    with pytest.raises(ValueError, match="the first [12] messages are written in another way wher"):
        answers(counts + THINKING, messages)
    early = "{% if messages | length > 2 %}{% set messages = messages[2:] %}{% endif %}"
    with pytest.raises(ValueError, match="the first 1 messages are written in another way where"):
        answers(early + THINKING, said("a", "A", "b", "B"))


def test_an_answer_without_a_question_needs_generation_blocks():
    with pytest.raises(ValueError, match="an answer begins that is the first message cannot be"):
        answers(PLAIN, CHAT[2:])
    assert answers(MARKED, CHAT[2:]) == ["ONE<end>", "TWO<end>"]


@pytest.mark.parametrize(
    "inner",
    ["{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}"]
    + ["{% set x %}{% generation %}ab{% endgeneration %}{% endset %}{{ x }}{{ x | length }}"],
)
def test_generation_blocks_that_cannot_be_told_apart_are_refused(inner):
    with pytest.raises(ValueError, match="generation %} blocks change or overlap one another"):
        answers(inner, CHAT)


def test_answer_spans_are_refused_as_render_refuses():
    with pytest.raises(ValueError, match="chat template: refuses these messages: no system"):
        answers("{{ raise_exception('no system') }}")
    with pytest.raises(ValueError, match="messages must be a list of dicts"):
        answers(PLAIN, "text")


@pytest.mark.reference
def test_generation_blocks_as_transformers(transformers):
    theirs = transformers.utils.chat_template_utils.render_jinja_template
    texts, indices = theirs([CHAT], chat_template=MARKED, return_assistant_tokens_mask=True)
    assert answers(MARKED) == [texts[0][a:b] for a, b in indices[0]]
