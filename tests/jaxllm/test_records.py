"""Records become examples; what is wrong with one is one sentence that says where."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tiny_tokenizers
import tokenizers
from tokenizers import processors

from jaxllm import record_files, records, train
from jaxllm.record_files import Record
from jaxllm.records import Example, encode, encode_preference, encode_records
from jaxllm.tokenizer import Tokenizer

REPO = Path(__file__).parents[2]
IGNORE = records.IGNORE
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LLAMA = {"tokenizer_class": "LlamaTokenizer"}
KINDS = {
    "byte level": (tiny_tokenizers.byte_level, {}),
    "byte level, BOS": (tiny_tokenizers.byte_level, LLAMA | {"add_bos_token": True}),
    "byte fallback": (tiny_tokenizers.byte_fallback, {}),
    "byte fallback, BOS": (lambda: tiny_tokenizers.byte_fallback(bos=True), {}),
    "no strip": (lambda: tiny_tokenizers.byte_fallback(strip=False), {}),
}


def make(kind="byte level", **config) -> Tokenizer:
    build, settings = KINDS[kind]
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT} | settings | config
    return Tokenizer(tiny_tokenizers.files(build(), **settings))


@pytest.fixture(params=KINDS)
def tokenizer(request) -> Tokenizer:
    return make(request.param)


TINY = make()


def whole(example: Example) -> list[int]:
    """The ids that an example was made of."""
    last = [] if example.targets[-1] == IGNORE else [int(example.targets[-1])]
    return example.tokens.tolist() + last


def learnt(example: Example) -> list[int]:
    return example.targets[example.targets != IGNORE].tolist()


# Examples


def test_a_text_is_learnt_whole_and_ends(tokenizer):
    ids = [*tokenizer.encode("hello there"), tokenizer.eos_id]
    example = encode({"text": "hello there"}, tokenizer)
    assert example.tokens.tolist() == ids[:-1]
    assert example.targets.tolist() == ids[1:]
    assert example.tokens.dtype == example.targets.dtype == np.int32


@pytest.mark.parametrize(
    ("prompt", "completion"), [("hell", "o there"), ("the ", "the"), ("a\n", " b")]
)
def test_a_completion_goes_on_as_generation_would(tokenizer, prompt, completion):
    example = encode({"prompt": prompt, "completion": completion}, tokenizer)
    before = tokenizer.encode(prompt)
    assert whole(example)[: len(before)] == before  # what `generate` gives to the model
    assert whole(example)[len(before) :] == learnt(example)
    assert learnt(example)[-1] == tokenizer.eos_id
    decoder = tokenizer.stream(after=before)
    assert decoder.push(learnt(example)[:-1]) + decoder.finish() == completion


def test_a_completion_is_split_as_the_model_writes_it():
    """Punctuation at its beginning is one with what follows, as it is behind a line break."""
    tokenizer = Tokenizer.from_folder(REPO / "checkpoints" / "tiny-shakespeare")
    example = encode({"prompt": "thou\n", "completion": "'s great"}, tokenizer)
    assert whole(example) == [*tokenizer.encode("thou\n's great"), tokenizer.eos_id]


@pytest.mark.parametrize("completion", ["_name", "#include <x>", "(yes)", "@property", "'s great"])
@pytest.mark.parametrize("name", ["mistral-v0.3", "phi3-mini", "qwen2.5"])
def test_completions_of_real_checkpoints(shared, name, completion):
    tokenizer = Tokenizer.from_folder(shared / "data" / "tokenizers" / name)
    example = encode({"prompt": "Field?\n", "completion": completion}, tokenizer, stop_id=2)
    assert whole(example) == [*tokenizer.encode(f"Field?\n{completion}"), 2]


def test_without_a_prompt_everything_is_learnt(tokenizer):
    a = encode({"prompt": "", "completion": "hello"}, tokenizer)
    b = encode({"text": "hello"}, tokenizer)
    assert whole(a) == whole(b)
    assert learnt(a) == learnt(b)


def test_a_beginning_of_two_tokens_takes_none_of_the_text():
    library = tiny_tokenizers.byte_level()
    library.post_processor = processors.TemplateProcessing(
        single="<s> <unk> $A", special_tokens=[("<s>", 1), ("<unk>", 0)]
    )
    tokenizer = Tokenizer(tiny_tokenizers.files(library, eos_token="</s>"))
    whole_text = whole(encode({"text": "hello"}, tokenizer))
    assert whole(encode({"text": "<s>hello"}, tokenizer)) == whole_text


def test_the_end_is_not_doubled_and_may_be_another():
    eos = TINY.eos_id
    assert learnt(encode({"prompt": "a", "completion": "b</s>"}, TINY)).count(eos) == 1
    assert learnt(encode({"prompt": "a", "completion": "b"}, TINY, stop_id=0))[-1] == 0
    endless = make(eos_token=None)
    with pytest.raises(ValueError, match="a record: the tokenizer names no EOS token to end texts"):
        encode({"text": "a"}, endless)
    assert whole(encode({"text": "a"}, endless, stop_id=2))[-1] == 2


RECORD = {"question": "Q", "more": "M", "empty": "", "none": None, "answer": "A"}


@pytest.mark.parametrize(
    ("key", "prompt"),
    [
        ("question", "Q"),
        ("Say {question}: {answer}{empty}\n", "Say Q: A\n"),
        ("{{{question}}}", "{Q}"),
        (["question", "more"], "Q\nM"),
        (["question", "empty", "none", "absent", "more"], "Q\nM"),
        (["absent", "question"], "Q"),
    ],
)
def test_other_keys(key, prompt):
    example = encode(RECORD, TINY, prompt_key=key, completion_key=" {answer}")
    expected = encode({"prompt": prompt, "completion": " A"}, TINY)
    assert whole(example) == whole(expected)
    assert learnt(example) == learnt(expected)


@pytest.mark.parametrize("key", [["nope", "input"], "nope", "{nope}: {input}"])
def test_a_name_that_no_record_has_is_refused(key):
    rows = [{"instruction": "a", "output": "b"}, {"instruction": "a", "input": "c", "output": "b"}]
    records.check_keys(rows, "prompt", ["instruction", "input"], "output", "{input}")
    said = key if isinstance(key, str) else ",".join(key)
    sentence = (
        f"data: no record has 'nope', which the key '{said}' names; there are 'instruction', "
        "'output', 'input'"
    )
    with pytest.raises(ValueError, match=re.escape(sentence) + "$"):
        records.check_keys(rows, "prompt", key)


def test_keys_of_ones_own_come_before_other_forms():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    record = {"question": "q", "answer": "a", "text": "no", "messages": chat}
    keys = {"prompt_key": "question", "completion_key": "answer"}
    assert whole(encode(record, TINY, **keys)) == whole(
        encode({"prompt": "q", "completion": "a"}, TINY)
    )
    for key in keys:  # beside the other's default
        with pytest.raises(ValueError, match="which prompt_key and completion_key name; the rec"):
            encode(record, TINY, **{key: keys[key]})


def test_a_field_that_is_null_is_none():
    """As a table's columns are written where a row has no such field."""
    empty = {"messages": None, "prompt": None, "completion": None, "text": None}
    for record in ({"text": "a"}, {"prompt": "a", "completion": "b"}):
        assert whole(encode(empty | record, TINY)) == whole(encode(record, TINY))


def test_an_empty_list_of_messages_is_none_beside_another_form():
    for record in ({"text": "a"}, {"prompt": "a", "completion": "b"}):
        assert whole(encode({"messages": [], **record}, TINY)) == whole(encode(record, TINY))


def test_content_in_parts_is_their_texts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    question, answer = ({"role": role} for role in ("user", "assistant"))
    split = {"messages": [question | {"content": parts}, answer | {"content": parts}]}
    joined = {"messages": [question | {"content": "ab"}, answer | {"content": "ab"}]}
    assert whole(encode(split, TINY)) == whole(encode(joined, TINY))
    assert learnt(encode(split, TINY)) == learnt(encode(joined, TINY))


def test_keys_of_texts_and_chats():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert whole(encode({"content": "a"}, TINY, text_key="content")) == whole(
        encode({"text": "a"}, TINY)
    )
    assert whole(encode({"dialog": chat}, TINY, messages_key="dialog")) == whole(
        encode({"messages": chat, "text": "a", "prompt": "b", "completion": "c"}, TINY)
    )
    assert whole(encode({"text": "no", "prompt": "a", "completion": "b"}, TINY)) != whole(
        encode({"text": "no", "prompt": "a"}, TINY)
    )


NO_FORM = "there is no 'messages', no 'prompt' with 'completion' and no 'text'; the record has {}"


@pytest.mark.parametrize(
    ("record", "keys", "sentence"),
    [
        ({}, {}, NO_FORM.format("no fields")),
        ({"prompt": "a", "b": 1}, {}, NO_FORM.format("'prompt', 'b'")),
        ({"text": 3}, {}, "'text' must be a text, not 3"),
        ({"text": None}, {}, "and no 'text'; the record has 'text' (null)"),
        ({"prompt": "a", "completion": None}, {}, "the record has 'prompt', 'completion' (null)"),
        ({"chosen": "a", "rejected": "b"}, {}, "jaxllm.dpo learns from 'chosen' and 'rejected'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {}, "{'type': 'image'}"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, {}, "'text': a text}, not 'hi'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            {},
            "each part of a message's content must be {'type': 'text', 'text': a text}, not {'type",
        ),
        ({"prompt": "a", "completion": ["b"]}, {}, "'completion' must be a text, not ['b']"),
        (
            {"a": "x", "b": None, "completion": "y"},
            {"prompt_key": "{a} {b}"},
            "'b' must be a text, not None",
        ),
        (
            {"a": "x", "completion": "y"},
            {"prompt_key": "{a} {b}"},
            "there is no 'b'; the record has 'a', 'completion'",
        ),
        (
            {"a": "x", "completion": "y"},
            {"prompt_key": "{a.b}"},
            "must name fields, each as {name}",
        ),
        (
            {"a": "x", "completion": "y"},
            {"prompt_key": "{a!r}"},
            "must name fields, each as {name}",
        ),
        ({"a": "x", "completion": "y"}, {"prompt_key": "{a"}, "the format '{a' cannot be read: "),
        ({"a": 1, "completion": "y"}, {"prompt_key": ["a", "b"]}, "'a' must be a text, not 1"),
        (
            {"question": "x", "text": "y"},
            {"prompt_key": "question"},
            "there is no 'question' with 'completion', which prompt_key and completion_key name; "
            "the record has 'question', 'text'",
        ),
        (
            {"question": "x", "answer": None, "messages": []},
            {"prompt_key": "question", "completion_key": "answer"},
            "there is no 'question' with 'answer', which prompt_key and completion_key name; the "
            "record has 'question', 'answer' (null), 'messages'",
        ),
        ({"text": "y"}, {"completion_key": "a"}, "there is no 'prompt' with 'a', which"),
        ({"messages": "hi"}, {}, "'messages' must be a list of messages, not 'hi'"),
        ({"messages": []}, {}, "the list of messages is empty"),
        ({"messages": [], "tools": "f"}, {}, "'tools' must be a list of objects, not 'f'"),
        ({"messages": [], "tools": ["f"]}, {}, "'tools' must be a list of objects, not ['f']"),
        ({"messages": [{"role": "user", "content": "a"}]}, {}, "no message of the assistant"),
        ({"text": "\ud800"}, {}, "the text has half a surrogate pair"),
    ],
)
def test_bad_records(record, keys, sentence):
    record = Record(record)
    record.where = "file, line 7"
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        encode(record, TINY, **keys)
    assert str(caught.value).startswith("data: file, line 7: ")
    assert "\n" not in str(caught.value)


# Chats


def chat(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def test_only_answers_of_a_chat_are_learnt(tokenizer):
    messages = chat("hello", "there", "the", "hello there")
    example = encode({"messages": messages}, tokenizer)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert whole(example) == [*text, tokenizer.eos_id]  # this template ends nothing itself
    assert tokenizer.decode(learnt(example)[:-1]).strip() == "there\nhello there"
    # The first answer is learnt from its first token on: at the last of the prompt for it
    first = len(tokenizer.apply_chat_template(messages[:1]))
    assert (example.targets[: first - 1] == IGNORE).all()
    assert example.targets[first - 1] != IGNORE


def test_prompt_and_completion_may_both_be_chats():
    """Of which the answers in the prompt are not learnt."""
    messages = chat("hello", "there", "the", "hello there")
    record = {"prompt": messages[:3], "completion": messages[3:]}
    example = encode(record, TINY)
    assert whole(example) == whole(encode({"messages": messages}, TINY))
    assert learnt(example) == learnt(encode({"messages": messages[2:]}, TINY))
    named = {"asked": record["prompt"], "said": record["completion"]}
    same = encode(named, TINY, prompt_key="asked", completion_key="said")
    assert learnt(same) == learnt(example)
    with pytest.raises(ValueError, match="there is no message of the assistant"):
        encode({"prompt": messages[:2], "completion": messages[:1]}, TINY)
    with pytest.raises(ValueError, match="'prompt' must be a text, not "):
        encode({"prompt": messages[:3], "completion": "hello"}, TINY)


ANSWERS_MARKED = CHAT.replace(
    "{{ m.content }}\n",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\n{% endgeneration %}"
    "{% else %}{{ m.content }}\n{% endif %}",
)


@pytest.mark.parametrize("template", [CHAT, ANSWERS_MARKED])
@pytest.mark.parametrize("weights", [(0, 1), (1, 0), (None, 0), (1, 1), (0, 0)])
def test_answers_of_no_weight_are_read_and_not_learnt(template, weights):
    tokenizer = make(chat_template=template)
    plain = chat("hello", "there", "the", "hello there")
    messages = [dict(message) for message in plain]
    messages[1]["weight"], messages[3]["weight"] = weights
    example = encode({"messages": messages}, tokenizer)
    stop = [tokenizer.eos_id] * (weights[1] != 0)
    text = tokenizer.apply_chat_template(plain, add_generation_prompt=False)
    assert whole(example)[: len(text) - 1] == text[:-1]
    said = ["there\n"] * (weights[0] != 0) + ["hello there\n"] * (weights[1] != 0)
    assert learnt(example) == [i for text in said for i in tokenizer.encode(text)] + stop


def test_weights_are_no_part_of_the_text():
    tokenizer = make(chat_template="{{ messages | tojson }}" + ANSWERS_MARKED)
    plain, weighted = chat("a", "b"), chat("a", "b")
    weighted[1]["weight"] = 1
    assert whole(encode({"messages": weighted}, tokenizer)) == whole(
        encode({"messages": plain}, tokenizer)
    )


def test_chats_of_no_weight_are_left_out():
    rows = [{"messages": chat("a", "b")} for _ in range(2)]
    rows[1]["messages"][1]["weight"] = 0
    assert encode_records(rows, TINY, length=40).untaught == 1


@pytest.mark.parametrize("weight", [2, 0.5, "0", [0]], ids=str)
def test_other_weights_are_refused(weight):
    messages = chat("a", "b")
    messages[1]["weight"] = weight
    sentence = f"message 1 has the weight {weight!r}; an answer's may be 0 or 1"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        encode({"messages": messages}, TINY)


def test_what_is_no_answer_may_have_any_weight():
    messages = chat("a", "b")
    messages[0]["weight"] = 1
    assert whole(encode({"messages": messages}, TINY)) == whole(
        encode({"messages": chat("a", "b")}, TINY)
    )


def test_a_chat_that_another_ends_is_not_ended_as_an_answer(tokenizer):
    ended = encode({"messages": chat("hello", "there")}, tokenizer)
    example = encode({"messages": chat("hello", "there", "the")}, tokenizer)
    assert learnt(ended) == [*learnt(example), tokenizer.eos_id]


def test_a_chat_may_end_with_another_token():
    messages = chat("a", "b")
    for record in ({"messages": messages}, {"prompt": messages[:1], "completion": messages[1:]}):
        assert learnt(encode(record, TINY, stop_id=0))[-1] == 0
    pair = encode_preference({"chosen": messages, "rejected": chat("a", "c")}, TINY, stop_id=0)
    assert learnt(pair.chosen)[-1] == learnt(pair.rejected)[-1] == 0


def test_a_template_that_ends_its_answers_gets_no_second_end():
    tokenizer = make(chat_template=CHAT.replace("}}\n", "}}</s>\n"))
    example = encode({"messages": chat("a", "b", "c", "d")}, tokenizer)
    assert learnt(example).count(tokenizer.eos_id) == 2


def test_a_template_that_ends_others_messages_only_gets_an_end():
    tokenizer = make(chat_template=CHAT.replace("}}\n", "}}{{ '</s>' if m.role == 'user' }}\n"))
    example = encode({"messages": chat("a", "b", "c", "d")}, tokenizer)
    assert whole(example).count(tokenizer.eos_id) == 3
    assert learnt(example)[-1] == tokenizer.eos_id


def test_the_tools_of_a_chat_are_in_its_template():
    tokenizer = make(
        chat_template="{% if tools is not none %}{{ tools | tojson }}\n{% endif %}" + CHAT
    )
    messages, other, tools = chat("hello", "there"), chat("hello", "the"), [{"name": "f"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=False, tools=tools)
    example = encode({"messages": messages, "tools": tools}, tokenizer)
    assert whole(example) == [*text, tokenizer.eos_id]
    without = encode({"messages": messages}, tokenizer)
    for none in (None, []):
        assert whole(encode({"messages": messages, "tools": none}, tokenizer)) == whole(without)
    assert learnt(example) == learnt(without)
    assert len(example) > len(without)
    halves = {"prompt": messages[:1], "completion": messages[1:], "tools": tools}
    assert whole(encode(halves, tokenizer)) == whole(example)
    pair = encode_preference({"chosen": messages, "rejected": other, "tools": tools}, tokenizer)
    assert whole(pair.chosen) == whole(example)
    assert learnt(pair.rejected) == learnt(encode({"messages": other}, tokenizer))


TURN = "{{ m.content }}<|end|>\n"
SPACED = (
    "{% for m in messages %}<|{{ m.role }}|>\n" + TURN + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
BLOCKS = SPACED.replace(
    TURN,
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}\n"
    "{% else %}" + TURN + "{% endif %}",
)


@pytest.mark.parametrize("template", [SPACED, BLOCKS])
@pytest.mark.parametrize("special", [True, False])
def test_an_added_token_is_whose_its_own_text_is(template, special):
    """As Phi-3's, which take the spaces behind them along, be they the first of an answer."""
    built = tiny_tokenizers.byte_fallback()
    roles = ["<|user|>", "<|assistant|>", "<|end|>"]
    of = {"rstrip": True, "special": special, "normalized": False}
    built.add_tokens([tokenizers.AddedToken(name, **of) for name in roles])
    files = tiny_tokenizers.files(built, eos_token="</s>", chat_template=template)
    tokenizer = Tokenizer(files)
    messages = chat("hello", "\n the", "a", " hell")
    ids, answers = tokenizer.encode_answers(messages)
    mine = [i for i, answer in zip(ids, answers, strict=True) if answer]
    end = tokenizer.encode("<|end|>")
    the, hell = (tokenizer.encode(text) for text in ("the", "hell"))
    assert mine == [*the, *end, *hell, *end]


def test_an_added_token_behind_an_answer_is_the_templates():
    """Also where it takes the spaces before it along, be they the last of an answer."""
    built = tiny_tokenizers.byte_fallback()
    built.add_tokens([tokenizers.AddedToken("<|end|>", lstrip=True, normalized=False)])
    template = BLOCKS.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
    tokenizer = Tokenizer(tiny_tokenizers.files(built, eos_token="</s>", chat_template=template))
    ids, answers = tokenizer.encode_answers(chat("hello", "the ", "a", "hell"))
    mine = [i for i, answer in zip(ids, answers, strict=True) if answer]
    assert tokenizer.encode("<|end|>")[0] in ids
    assert tokenizer.decode(mine) == "thehell"


def test_an_added_token_of_spaces_alone_is_the_templates():
    built = tiny_tokenizers.byte_fallback()
    built.add_tokens([tokenizers.AddedToken(name) for name in ("\n", "<|end|>")])
    tokenizer = Tokenizer(tiny_tokenizers.files(built, eos_token="</s>", chat_template=SPACED))
    ids, answers = tokenizer.encode_answers(chat("hello", "the"))
    mine = [i for i, answer in zip(ids, answers, strict=True) if answer]
    assert mine[0] != tokenizer.encode("\n")[0]
    assert tokenizer.decode(mine, skip_special_tokens=False).strip().startswith("the")


@pytest.mark.parametrize("name", ["phi3-mini", "qwen2.5"])
def test_templates_of_real_checkpoints(shared, name):
    tokenizer = Tokenizer.from_folder(shared / "data" / "tokenizers" / name)
    messages = [{"role": "system", "content": "Be kind."}, *chat("Hi", "Hello!", "Who?", "Me.")]
    example = encode({"messages": messages}, tokenizer)
    text = tokenizer.decode(learnt(example), skip_special_tokens=False)
    ends = {"phi3-mini": ("<|end|>", "<|endoftext|>"), "qwen2.5": ("<|im_end|>\n", "")}[name]
    assert text.replace(" ", "").replace("\n", "") == (
        f"Hello!{ends[0]}Me.{ends[0]}{ends[1]}".replace("\n", "")
    )
    first = len(tokenizer.apply_chat_template(messages[:2]))
    assert tokenizer.decode([example.targets[first - 1]]).strip() == "Hello"


# Preference pairs


def test_a_pair_of_texts():
    pair = encode_preference({"prompt": "a", "chosen": "b", "rejected": "c"}, TINY)
    for side, answer in ((pair.chosen, "b"), (pair.rejected, "c")):
        expected = encode({"prompt": "a", "completion": answer}, TINY)
        assert whole(side) == whole(expected)
        assert learnt(side) == learnt(expected)


def test_a_pair_of_other_keys_with_another_end():
    record = {"q": "a", "good": "b", "bad": "c", "chosen": "x", "rejected": "y"}
    keys = {"prompt_key": "q", "chosen_key": "good", "rejected_key": "bad"}
    pair = encode_preference(record, TINY, **keys, stop_id=0)
    for side, answer in ((pair.chosen, "b"), (pair.rejected, "c")):
        expected = encode({"prompt": "a", "completion": answer}, TINY, stop_id=0)
        assert whole(side) == whole(expected)
        assert learnt(side) == learnt(expected)
        assert learnt(side)[-1] == 0


def test_a_pair_of_chats_in_each_form():
    before, good, bad = chat("one", "ONE", "two"), chat("", "TWO")[1:], chat("", "no")[1:]
    prompt = {"prompt": before, "chosen": good, "rejected": bad}
    implicit = {"chosen": before + good, "rejected": before + bad}
    both = {"prompt": "two", **implicit}
    pairs = [encode_preference(record, TINY) for record in (prompt, implicit, both)]
    for pair in pairs:
        assert TINY.decode(learnt(pair.chosen)) == "TWO\n"  # not ONE, which the prompt holds
        assert TINY.decode(learnt(pair.rejected)) == "no\n"
        assert whole(pair.chosen) == whole(encode({"messages": before + good}, TINY))
    text = encode_preference({"prompt": "one", "chosen": good, "rejected": bad}, TINY)
    assert whole(text.chosen) == whole(encode({"messages": before[:1] + good}, TINY))


def test_a_chat_that_the_other_goes_on_with_keeps_its_answer():
    short, long = chat("one", "ONE"), chat("one", "ONE", "two", "TWO")
    for chosen, rejected in ((short, long), (long, short)):
        pair = encode_preference({"chosen": chosen, "rejected": rejected}, TINY)
        for side, messages in ((pair.chosen, chosen), (pair.rejected, rejected)):
            assert learnt(side) == learnt(encode({"messages": messages}, TINY))


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"prompt": "a", "chosen": "b"}, "no 'rejected'; the record has 'prompt', 'chosen'"),
        ({"chosen": "b", "rejected": "c"}, "no 'prompt'; the record has 'chosen', 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' are the same"),
        (
            {"prompt": "a", "chosen": "b", "rejected": None},
            "'rejected' must be a text or a list of messages, not None",
        ),
        ({"chosen": {}, "rejected": {}}, "'chosen' must be a text or a list of messages, not {}"),
        (
            {"prompt": "a", "chosen": "b", "rejected": chat("a", "b")},
            "'chosen' is a text and 'rejected' a list of messages; both must be of one kind",
        ),
        (
            {"prompt": "a", "chosen": chat("a", "b"), "rejected": "b"},
            "'rejected' is a text and 'chosen' a list of messages; both must be of one kind",
        ),
        ({"chosen": chat("a", "b"), "rejected": chat("c", "b")}, "there is no 'prompt'"),
        (
            {"chosen": chat("a", "b"), "rejected": chat("a", "c"), "tools": {}},
            "'tools' must be a list of objects, not {}",
        ),
    ],
)
def test_bad_pairs(record, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        encode_preference(record, TINY)


# All of a file


TEXTS = [{"text": "x" * n} for n in (3, 10, 4, 25)]  # each makes as many tokens as letters


def test_longer_records_are_truncated_split_or_left_out():
    results, lost = {}, {"truncate": 15, "split": 0, "drop": 25}
    for on_long in records.ON_LONG:
        found = encode_records(TEXTS, TINY, length=10, on_long=on_long)
        results[on_long] = [len(example) for example in found.examples]
        assert (found.records, found.long, found.untaught) == (4, 1, 0)
        assert found.lost == lost[on_long]
        assert "1 longer than 10 tokens" in str(found)
    assert results == {
        "truncate": [3, 10, 4, 10],
        "split": [3, 10, 4, 10, 10, 5],
        "drop": [3, 10, 4],
    }
    parts = encode_records(TEXTS[3:], TINY, length=10, on_long="split").examples
    one = encode(TEXTS[3], TINY)
    np.testing.assert_array_equal(np.concatenate([p.tokens for p in parts]), one.tokens)
    np.testing.assert_array_equal(np.concatenate([p.targets for p in parts]), one.targets)
    with pytest.raises(ValueError, match="on_long must be one of truncate, split, drop, not 'cut'"):
        encode_records(TEXTS, TINY, length=10, on_long="cut")


@pytest.mark.own_errors
def test_the_summary_counts():
    rows = [{"prompt": "abcdefghijkl", "completion": "m"}, {"prompt": "ab", "completion": "cd"}]
    found = encode_records(rows, TINY, length=10)
    assert str(found) == (
        "2 records: 1 example, 4 tokens, 3 of them learnt; 1 longer than 10 tokens truncated, 13 "
        "tokens of them lost; 1 without anything to learn left out"
    )
    silent = {"messages": chat("a", "b")}
    silent["messages"][1]["weight"] = 0  # left out, but not for its length
    found = encode_records([*rows, silent], TINY, length=40)
    assert (found.long, found.lost, found.untaught) == (0, 0, 1)
    with pytest.raises(ValueError, match="data: there is nothing to learn; 1 record: 0 examples"):
        encode_records(rows[:1], TINY, length=10)
    for length in (0, 8.5, "8"):
        words = f"^data: length must be an integer of at least 1, got {length!r}$"
        with pytest.raises(ValueError, match=words):
            encode_records(rows, TINY, length=length)  # type: ignore[arg-type]


def test_records_of_ones_own_are_told_by_their_number():
    rows = [{"text": "a"}, {"prompt": 1}]
    with pytest.raises(ValueError, match="^data: record 2: "):
        encode_records(rows, TINY, length=10)
    with pytest.raises(ValueError, match="^data: record 1 must have fields by name, not 'text'$"):
        encode_records(["text"], TINY, length=10)  # pyright: ignore[reportArgumentType]
    assert encode_records(rows[:1], TINY, length=10).records == 1


def test_of_records_that_cannot_be_used_the_others_are_counted(monkeypatch):
    rows = [{"text": "a"}, {"prompt": 1}, {"text": "a"}, {"text": 3}, ["text"], {"text": "b"}]
    said = r"^data: record 2: there is no .*'prompt'; 2 more of the next 4 records cannot be used$"
    with pytest.raises(ValueError, match=said):
        encode_records(rows, TINY, length=10)
    monkeypatch.setattr(records, "_LOOK_ON", 2)
    with pytest.raises(ValueError, match="; 1 more of the next 2 records cannot be used$"):
        encode_records(rows, TINY, length=10)
    with pytest.raises(ValueError, match="'prompt'$"):
        encode_records([*rows[:3], {"text": "b"}], TINY, length=10)


def test_pairs_are_cut_and_left_out_whole():
    rows = [
        {"prompt": "ab", "chosen": "c", "rejected": "d"},
        {"prompt": "ab", "chosen": "c", "rejected": "d" * 20},
        {"prompt": "a" * 20, "chosen": "c", "rejected": "d"},
    ]
    found = records.encode_preferences(rows, TINY, length=10)
    assert [(len(p.chosen), len(p.rejected)) for p in found.examples] == [(3, 3), (3, 10)]
    assert (found.long, found.untaught) == (2, 1)
    dropped = records.encode_preferences(rows, TINY, length=10, on_long="drop")
    assert len(dropped.examples) == 1
    late = {"prompt": "a", "chosen": chat("a", "b")[1:], "rejected": chat("c" * 40, "d")}
    for row in (late, {**late, "chosen": late["rejected"], "rejected": late["chosen"]}):
        assert records.encode_preferences([rows[0], row], TINY, length=40).untaught == 1
    with pytest.raises(ValueError, match="on_long must be one of truncate, drop, not 'split'"):
        records.encode_preferences(rows, TINY, length=10, on_long="split")


def test_tokens_outside_the_vocabulary(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n{"text": "hello"}')
    rows = record_files.read_records(path)
    top = max(TINY.encode("hello"))
    encode_records(rows, TINY, length=9, vocab_size=top + 1)
    with pytest.raises(ValueError, match=f", line 2: the token {top} is outside the model's vocab"):
        encode_records(rows, TINY, length=9, vocab_size=top)
    bad = Example(np.array([1], np.int32), np.array([-1], np.int32))
    with pytest.raises(ValueError, match="the target -1 is outside the model's vocabulary of 9"):
        records.check_vocabulary(bad, 9)


def test_examples_are_checked():
    ids = np.arange(3, dtype=np.int32)
    with pytest.raises(ValueError, match="an example's targets must be an int32 array"):
        Example(ids, ids.astype(np.int64))
    with pytest.raises(ValueError, match="an example's 3 tokens and 2 targets must be equally"):
        Example(ids, ids[1:])


def test_what_is_ignored_is_what_the_loss_ignores():
    assert records.IGNORE == train.IGNORE


# What ships


@pytest.mark.parametrize(
    ("name", "count", "read"),
    [
        ("clerk.jsonl", 128, encode_records),
        ("clerk-chat.jsonl", 48, encode_records),
        ("courtesy-pairs.jsonl", 40, records.encode_preferences),
    ],
)
def test_shipped_data_suits_the_shipped_model(name, count, read):
    tokenizer = Tokenizer.from_folder(REPO / "checkpoints" / "tiny-shakespeare")
    rows = record_files.read_records(REPO / "examples" / "data" / name)
    found = read(rows, tokenizer, length=512, vocab_size=1024)
    assert len(rows) == len(found.examples) == count
    assert (found.long, found.untaught) == (0, 0)
    assert len({json.dumps(row) for row in rows}) == count
    assert f"| `{name}` | {count} of" in (REPO / "examples" / "data" / "README.md").read_text()


@pytest.mark.own_errors
def test_the_tokenizer_of_another_library_is_refused():
    other = tiny_tokenizers.byte_level()
    record, pair = {"text": "a"}, {"prompt": "a", "chosen": "b", "rejected": "c"}
    for call in (
        lambda: encode(record, other),
        lambda: encode_preference(pair, other),
        lambda: encode_records([record, record], other, length=8),
        lambda: records.encode_preferences([pair, pair], other, length=8),
    ):
        words = "^data: tokenizer must be a jaxllm.Tokenizer, not tokenizers.Tokenizer$"
        with pytest.raises(ValueError, match=words):
            call()
