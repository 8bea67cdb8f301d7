"""Writes the goldens of tokens: what transformers makes of conversations, templates and texts.

    python tests/goldens/make_chat.py [folder of data]      (default: ../shared/data)

chat/<tokenizer>.json holds, for a tokenizer in the folder of data,
  chats   messages, what else the template is given, the rendered text and its ids (null where
          transformers fails too)
  texts   a text, its ids, the text of these ids without special tokens
chat/templates.json holds small templates of our own and the text that each renders.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import transformers
from jinja2.exceptions import UndefinedError
from transformers.utils.chat_template_utils import render_jinja_template

HERE = Path(__file__).resolve().parent
FOLDERS = {
    "qwen2.5": "tokenizers/qwen2.5",
    "phi3-mini": "tokenizers/phi3-mini",
    "mistral-v0.3": "tokenizers/mistral-v0.3",
    "stories260K": "stories260K",
}
HARD_TEXTS = [
    "Once upon a time",
    "",
    " leading,  double and trailing spaces ",
    "line\nline\r\n\n\ttab",
    "e\u0301 é 你好 世界 नमस्ते Ελληνικά ﷽",
    "👩\u200d👩\u200d👧\u200d👦 🇩🇪 👍🏽 𓂀",
    "a <s> written</s> <|im_end|> <0xE4> ▁ \N{REPLACEMENT CHARACTER}",
    "1234567 3.14 don't I'LL\x00\x7f",
]
USER = {"role": "user", "content": "Say <b>'hi' & \"é\"</b> 👍🏽\n"}
SYSTEM = {"role": "system", "content": " Be brief.\nBe kind. "}
ASSISTANT = {"role": "assistant", "content": "Hi  there"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <today> & 'tomorrow' in °C",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    ],
}
CHATS: dict[str, dict[str, Any]] = {
    "user": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "turns": {"messages": [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "And  you?"}]},
    "late system": {"messages": [USER, ASSISTANT, SYSTEM, USER]},
    "ends with the assistant": {"messages": [USER, ASSISTANT]},
    "tools": {
        "messages": [
            USER,
            CALL,
            {"role": "tool", "content": "21"},
            {"role": "tool", "content": "x"},
        ],
        "tools": [TOOL],
    },
}
TEMPLATES = {
    "blocks": """  {% for m in messages %}
  {%- if true %}
    [{{ m.role }}]
  {% endif %}
{% endfor %}
""",
    "tojson": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|"
    "{{ {'b': 1, 'a': '<é>'} | tojson(ensure_ascii=True, sort_keys=true, separators=(',', ':')) }}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token is defined }}",
    "generation": "{% set x = 'out' %}{% for m in messages %}{% generation %}{% set x = 'in' %}"
    "{{ m.content }}{{ x }}{{ loop.index }}{% endgeneration %}{{ x }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{{ m.role }}{{ loop.length }}{{ loop.last }}"
    "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(seen=false, n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{% if m.role == 'user' %}{% set ns.seen = true %}{% endif %}"
    "{% endfor %}{{ ns.seen }}{{ ns.n }}",
    "macro": "{% macro say(m, end='.') %}{{ m.role ~ ': ' ~ m.content | trim }}{{ end }}"
    "{% endmacro %}{% for m in messages[1:] %}{{ say(m) }}{{ say(m, end='!') }}{% endfor %}",
    "filters": "{{ messages | map(attribute='role') | join(', ') }}|"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}|"
    "{{ 'a b' | upper | replace(' ', '_') | center(9) }}|{{ '%s=%d' | format('x', 3) }}|"
    "{{ '{}-{:>3}'.format(1, 'b') }}|{{ 'x' * 3 ~ 2 ** 10 ~ 7 % 4 ~ 1700000000 | string }}",
    "strings": "{% set c = messages[-1].content %}{{ c.split('>')[-1].lstrip('\\n') }}|"
    "{{ c[::-1] }}|{{ 'hi' in c }}|{{ c.startswith('Say') and c is string }}|"
    "{{ dict(a=1).items() | list }}|{{ c | indent(2) }}",
    "none and undefined": "{{ tools is none }}{{ tools is defined }}{{ documents is none }}"
    "{{ other is defined }}{{ other }}{{ messages[0].tool_calls }}{{ add_generation_prompt }}",
    "recursion": "{% for x in [[1, [2]], 3] recursive %}"
    "{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{{ loop.depth }}{% endif %}{% endfor %}",
}


def chats_of(tokenizer: Any) -> list[dict[str, Any]]:
    rows = []
    for name, chat in CHATS.items():
        for prompt in (True, False):
            row = {"name": name, **chat, "add_generation_prompt": prompt}
            settings = {k: v for k, v in row.items() if k not in ("name", "messages")}
            row["text"] = row["ids"] = None
            with contextlib.suppress(UndefinedError):  # some templates know no tools
                text = tokenizer.apply_chat_template(row["messages"], tokenize=False, **settings)
                ids = tokenizer.apply_chat_template(row["messages"], return_dict=False, **settings)
                row.update(text=text, ids=ids)
            rows.append(row)
    return rows


def texts_of(tokenizer: Any) -> list[dict[str, Any]]:
    return [
        {"text": text, "ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=True)}
        for text in HARD_TEXTS
        for ids in [tokenizer(text)["input_ids"]]
    ]


def rendered(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    chat = [{k: v for k, v in message.items() if v is not None} for message in messages]
    return render_jinja_template([chat], chat_template=template, **variables)[0][0]


def write(name: str, content: dict[str, Any]) -> None:
    versions = {"transformers": transformers.__version__}
    text = json.dumps({"versions": versions, **content}, indent=1, ensure_ascii=False)
    (HERE / "chat" / f"{name}.json").write_text(text + "\n")


def main() -> None:
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parents[2] / "shared" / "data"
    for name, folder in FOLDERS.items():
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(data / folder)
        chats = chats_of(tokenizer) if tokenizer.chat_template else []
        write(name, {"chats": chats, "texts": texts_of(tokenizer)})
    messages = [SYSTEM, USER, ASSISTANT, CALL, USER]
    variables = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    texts = {name: rendered(t, messages, **variables) for name, t in TEMPLATES.items()}
    rows = [{"name": n, "template": TEMPLATES[n], "text": texts[n]} for n in TEMPLATES]
    write("templates", {"messages": messages, "variables": variables, "templates": rows})


if __name__ == "__main__":
    main()
