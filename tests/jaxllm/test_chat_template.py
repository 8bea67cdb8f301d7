"""Chat templates render as transformers renders them; a hostile one ends in one sentence."""

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
    "{{ namespace(__html__=1) }}",
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
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '%9999999999d' | format(1) }}",
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
        ([{"role": "user", "content": b"hi"}], "plain JSON values"),
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


def test_a_rendering_leaves_nothing_to_the_next():
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    for _ in range(2):
        with pytest.raises(ValueError, match="steps"):
            render(template)
        assert render("{{ messages[0].content }}") == "hi"
