"""Tokenizers of checkpoints: ids as transformers makes them, one BOS, errors in one sentence."""

import json
import re
from pathlib import Path

import pytest
import tiny_tokenizers
from tokenizers import AddedToken, models, processors
from tokenizers import Tokenizer as Library

from jaxllm.tokenizer import Tokenizer

CHAT = Path(__file__).parents[1] / "goldens" / "chat"
FOLDERS = {
    "qwen2.5": "tokenizers/qwen2.5",
    "phi3-mini": "tokenizers/phi3-mini",
    "mistral-v0.3": "tokenizers/mistral-v0.3",
    "stories260K": "stories260K",
}
WITH_TEMPLATE = ["qwen2.5", "phi3-mini"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
USER = [{"role": "user", "content": "the hello"}]


@pytest.fixture(scope="module")
def folder(shared: Path):
    return lambda name: shared / "data" / FOLDERS[name]


def golden(name):
    return json.loads((CHAT / f"{name}.json").read_text())


def tiny(*, bos=False, **config):
    return Tokenizer(tiny_tokenizers.files(tiny_tokenizers.byte_fallback(bos=bos), **config))


def check_chats(tokenizer, rows):
    for row in rows:
        settings = {k: v for k, v in row.items() if k not in ("name", "messages", "text", "ids")}
        if row["text"] is None:
            with pytest.raises(ValueError, match="^chat template: "):
                tokenizer.apply_chat_template(row["messages"], **settings)
        else:
            text = tokenizer.apply_chat_template(row["messages"], tokenize=False, **settings)
            assert text == row["text"], row["name"]
            assert tokenizer.apply_chat_template(row["messages"], **settings) == row["ids"]


# As the originals


@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_chats_as_the_goldens(folder, name):
    tokenizer = Tokenizer.from_folder(folder(name))
    assert tokenizer.has_chat_template
    rows = golden(name)["chats"]
    assert {row["add_generation_prompt"] for row in rows if row["text"]} == {True, False}
    check_chats(tokenizer, rows)


@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_the_check_of_chats_can_fail(folder, name):
    files = {p.name: p.read_bytes() for p in folder(name).glob("*.json")}
    config = json.loads(files["tokenizer_config.json"])
    config["chat_template"] = config["chat_template"].replace("add_generation_prompt", "false")
    changed = Tokenizer({**files, "tokenizer_config.json": json.dumps(config).encode()})
    with pytest.raises(AssertionError):
        check_chats(changed, golden(name)["chats"])


@pytest.mark.parametrize("name", FOLDERS)
def test_texts_as_the_goldens(folder, name):
    tokenizer = Tokenizer.from_folder(folder(name))
    for row in golden(name)["texts"]:
        assert tokenizer.encode(row["text"]) == row["ids"]
        assert tokenizer.decode(row["ids"]) == row["decoded"]


def test_the_check_of_texts_can_fail(folder):
    tokenizer = Tokenizer.from_folder(folder("phi3-mini"))
    rows = golden("mistral-v0.3")["texts"]
    assert not any(tokenizer.encode(row["text"]) == row["ids"] for row in rows)


@pytest.mark.reference
@pytest.mark.parametrize("name", FOLDERS)
def test_as_transformers(folder, transformers, name):
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder(name))
    ours = Tokenizer.from_folder(folder(name))
    content = golden(name)
    for row in content["texts"]:
        ids = theirs(row["text"])["input_ids"]
        assert ours.encode(row["text"]) == ids
        assert ours.encode(row["text"], add_special_tokens=False) == theirs.encode(
            row["text"], add_special_tokens=False
        )
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )
    for row in content["chats"]:
        if row["text"] is not None:
            settings = {k: row[k] for k in ("add_generation_prompt", "tools") if k in row}
            text = theirs.apply_chat_template(row["messages"], tokenize=False, **settings)
            ids = theirs.apply_chat_template(row["messages"], return_dict=False, **settings)
            assert ours.apply_chat_template(row["messages"], tokenize=False, **settings) == text
            assert ours.apply_chat_template(row["messages"], **settings) == ids
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    if theirs.bos_token is not None:
        assert ours.bos_id == theirs.bos_token_id
    assert (ours.eos_id, ours.pad_id) == (theirs.eos_token_id, theirs.pad_token_id)


def test_ids_of_the_folders(folder):
    ids = {}
    for name in FOLDERS:
        t = Tokenizer.from_folder(folder(name))
        ids[name] = (t.vocab_size, t.bos_id, t.eos_id, t.pad_id)
    assert ids == {
        "qwen2.5": (151665, None, 151645, 151643),
        "phi3-mini": (32011, 1, 32000, 32000),
        "mistral-v0.3": (32768, 1, None, None),  # no tokenizer_config.json
        "stories260K": (512, 1, 2, None),
    }


# One BOS, no EOS


@pytest.mark.parametrize("bos", [True, False], ids=["post-processor", "no post-processor"])
@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize(
    ("kind", "follows"),
    [("LlamaTokenizer", True), ("GemmaTokenizerFast", True), ("Qwen2Tokenizer", False), (None, 0)],
)
def test_bos_as_the_checkpoint_says(bos, flag, kind, follows):
    config = {"bos_token": "<s>", "tokenizer_class": kind}
    config |= {} if flag is None else {"add_bos_token": flag}
    tokenizer = tiny(bos=bos, **config)
    body = tokenizer.encode("the hello", add_special_tokens=False)
    first = [1] if bos or (flag and follows) else []
    assert 1 not in body
    assert tokenizer.encode("the hello") == first + body
    assert tokenizer.encode("") == first


def test_bos_of_stories260k_without_its_post_processor(folder):
    files = {p.name: p.read_bytes() for p in folder("stories260K").glob("*.json")}
    content = json.loads(files["tokenizer.json"])
    assert content["post_processor"] is not None
    content["post_processor"] = None
    files["tokenizer.json"] = json.dumps(content).encode()
    config = {**json.loads(files["tokenizer_config.json"]), "tokenizer_class": "LlamaTokenizer"}
    files["tokenizer_config.json"] = json.dumps(config).encode()
    assert Tokenizer(files).encode("Once upon a time") == [1, 403, 407, 261, 378]


def test_tokens_that_only_the_files_beside_it_name():
    library = tiny_tokenizers.byte_fallback()
    files = tiny_tokenizers.files(library)
    text, size = "the <tool>", library.get_vocab_size()
    apart = Tokenizer(files).encode(text)
    decoder = {str(size): {"content": "<tool>", "special": True}}
    named = {
        **files,
        "tokenizer_config.json": json.dumps({"added_tokens_decoder": decoder}).encode(),
    }
    older = {**files, "added_tokens.json": json.dumps({"<tool>": size}).encode()}
    for contents, hidden in ((named, True), (older, False)):
        tokenizer = Tokenizer(contents)
        ids = tokenizer.encode(text)
        assert ids[-1] == size == tokenizer.vocab_size - 1
        assert len(ids) < len(apart)
        assert tokenizer.decode(ids).endswith("<tool>") is not hidden
    # One of the vocabulary becomes a token that is found in a text, with the id that it has
    piece = library.token_to_id("he")
    decoder = {str(piece): {"content": "he", "normalized": False}}
    for config in ({"added_tokens_decoder": decoder}, {"eos_token": "he"}):
        tokenizer = Tokenizer(tiny_tokenizers.files(library, **config))
        assert tokenizer.vocab_size == size
        assert tokenizer.encode("the") == [library.token_to_id("▁t"), piece]
    assert piece not in library.encode("the").ids


@pytest.mark.parametrize(
    "named",
    [
        {"eos_token": "<end>"},
        {"image_token": "<end>"},
        {"extra_special_tokens": {"audio_token": "<end>"}},
    ],
)
def test_an_added_token_is_special_if_it_is_named_so(named):
    library = tiny_tokenizers.byte_level()
    library.add_tokens([AddedToken("<end>", rstrip=True, normalized=False)])
    end, text = library.token_to_id("<end>"), "hello<end>  there"
    assert library.decode([end]) == "<end>"
    tokenizer = Tokenizer(tiny_tokenizers.files(library, **named))
    ids = tokenizer.encode(text)
    assert ids == library.encode(text).ids  # and it takes spaces along as before
    assert tokenizer.decode(ids) == "hellothere"
    stream = tokenizer.stream()
    assert stream.push(ids) + stream.finish() == "hellothere"
    assert tokenizer.special_ids(["<end>"]) == [end]


@pytest.mark.parametrize("key", ["extra_special_tokens", "additional_special_tokens"])
@pytest.mark.parametrize("listed", ["he", {"content": "he", "__type": "AddedToken"}])
def test_a_word_is_special_if_it_is_listed_so(key, listed):
    library = tiny_tokenizers.byte_fallback()
    tokenizer = Tokenizer(tiny_tokenizers.files(library, **{key: [listed, "<absent>"]}))
    assert tokenizer.vocab_size == library.get_vocab_size()
    ids = tokenizer.encode("the")
    assert ids == [library.token_to_id("▁t"), library.token_to_id("he")]
    assert tokenizer.decode(ids) == "t"


def test_an_older_file_of_added_tokens_counts_without_a_newer_one():
    library = tiny_tokenizers.byte_fallback()
    size, stale = library.get_vocab_size(), json.dumps({"<old>": 999}).encode()
    files = tiny_tokenizers.files(library, added_tokens_decoder={str(size): {"content": "<tool>"}})
    tokenizer = Tokenizer({**files, "added_tokens.json": stale})
    assert tokenizer.encode("the <tool>")[-1] == size
    # Its tokens are special if they are named so
    older = json.dumps({"<pad>": size, "<tool>": size + 1}).encode()
    named = json.dumps({"pad_token": "<pad>"}).encode()
    files = {**tiny_tokenizers.files(library), "special_tokens_map.json": named}
    tokenizer = Tokenizer({**files, "added_tokens.json": older})
    assert tokenizer.pad_id == size
    ids = tokenizer.encode("the <pad> <tool>")
    assert {size, size + 1} <= set(ids)
    assert tokenizer.decode(ids).split() == ["the", "<tool>"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "added_tokens.json",
            {"<tool>": 400},
            "give the token '<tool>' the id 400, but behind",
        ),
        (
            "added_tokens.json",
            {"<tool>": "x"},
            "added_tokens.json must have ids by token, and added",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"7": "<tool>"}},
            "objects with content",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"7": {}}},
            "objects with content by id",
        ),
    ],
)
def test_added_tokens_that_cannot_be(name, content, message):
    files = tiny_tokenizers.files(tiny_tokenizers.byte_fallback())
    with pytest.raises(ValueError, match=f"^tokenizer: .*{message}"):
        Tokenizer({**files, name: json.dumps(content).encode()})


def test_added_tokens_are_saved_with_the_rest(tmp_path):
    library = tiny_tokenizers.byte_fallback()
    added = json.dumps({"<tool>": library.get_vocab_size()}).encode()
    Tokenizer({**tiny_tokenizers.files(library), "added_tokens.json": added}).save(tmp_path)
    assert Tokenizer.from_folder(tmp_path).vocab_size == library.get_vocab_size() + 1


def test_no_second_bos():
    tokenizer = tiny(bos=True, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    text = tokenizer.apply_chat_template(USER, tokenize=False)
    assert text == "<s>the hello</s>"
    for ids in (tokenizer.apply_chat_template(USER), tokenizer.encode(text)):
        assert ids.count(1) == 1
        assert ids[0] == 1
    assert tiny_tokenizers.byte_fallback(bos=True).encode(text).ids[:2] == [1, 1]  # so it can fail


@pytest.mark.parametrize("written", ["", "<s>", "<s></s>"])
def test_what_a_text_has_of_a_longer_beginning_is_not_doubled(written):
    library = tiny_tokenizers.byte_fallback(strip=False)
    library.post_processor = processors.TemplateProcessing(
        single="<s> </s> $A", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer = Tokenizer(tiny_tokenizers.files(library))
    assert tokenizer.encode(f"{written}the") == [1, 2, *tokenizer.encode("the")[2:]]
    assert tokenizer.encode("</s>the")[:3] == [1, 2, 2]


def test_a_template_without_bos_gets_none():
    # As transformers: it encodes what a template renders without special tokens
    tokenizer = tiny(bos=True, bos_token="<s>", chat_template="{{ messages[0].content }}")
    assert 1 not in tokenizer.apply_chat_template(USER)


@pytest.mark.parametrize("sequence", [False, True])
def test_no_eos_from_the_post_processor(sequence):
    library = tiny_tokenizers.byte_fallback()
    processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    library.post_processor = processors.Sequence([processor]) if sequence else processor
    tokenizer = Tokenizer(tiny_tokenizers.files(library, add_eos_token=True, eos_token="</s>"))
    assert library.encode("the").ids[-1] == 2
    assert tokenizer.encode("the")[0] == 1
    assert 2 not in tokenizer.encode("the")
    assert tokenizer.bos_id == 1


def test_limits_of_tokenizer_json_do_not_cut_prompts():
    library = tiny_tokenizers.byte_fallback()
    library.enable_truncation(4)
    library.enable_padding(length=64)
    tokenizer = Tokenizer(tiny_tokenizers.files(library))
    assert len(library.encode("the hello there").ids) == 64
    assert 4 < len(tokenizer.encode("the hello there")) < 64


# Files


def test_a_special_token_is_found_as_tokenizer_json_has_it():
    library = tiny_tokenizers.byte_fallback()
    library.add_tokens([AddedToken("<|end|>", special=True, rstrip=True, normalized=False)])
    tokenizer = Tokenizer(tiny_tokenizers.files(library, eos_token="<|end|>"))
    ids = tokenizer.encode("the<|end|>  he", add_special_tokens=False)
    assert ids[1] == tokenizer.eos_id
    assert tokenizer.decode(ids[2:]) == "he"
    assert tokenizer.decode(ids[1:2]) == ""
    assert tokenizer.special_ids(["<|end|>"]) == [tokenizer.eos_id]


def test_special_tokens_as_strings_objects_or_the_older_file():
    token = {"content": "</s>", "lstrip": False, "special": True, "__type": "AddedToken"}
    assert tiny(eos_token="</s>").eos_id == tiny(eos_token=token).eos_id == 2
    assert tiny(eos_token=None).eos_id is None
    assert tiny(eos_token="<absent>").eos_id is None
    older = {"special_tokens_map.json": json.dumps({"eos_token": token}).encode()}
    library = tiny_tokenizers.byte_fallback()
    assert Tokenizer({**tiny_tokenizers.files(library), **older}).eos_id == 2
    newer = tiny_tokenizers.files(library, eos_token="<s>", added_tokens_decoder={})
    assert Tokenizer({**newer, **older}).eos_id == 1
    alone = {"tokenizer.json": tiny_tokenizers.files(library)["tokenizer.json"]}
    assert Tokenizer(alone).eos_id is None
    assert not Tokenizer(alone).has_chat_template


def test_templates_see_the_special_tokens_of_the_model():
    tokenizer = tiny(
        bos_token={"content": "<s>"},
        image_token="<image>",
        num_image_token=256,
        extra_special_tokens={"video_token": "<video>"},
        chat_template="{{ bos_token }}{{ image_token }}{{ video_token }}{{ eos_token }}",
    )
    assert tokenizer.apply_chat_template(USER, tokenize=False) == "<s><image><video>"
    text = tokenizer.apply_chat_template(USER, tokenize=False, bos_token="B", eos_token="E")
    assert text == "B<image><video>E"


def test_a_variable_that_the_template_does_not_read():
    source = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ think or raise_exception('no') }}"
    )
    tokenizer = tiny(chat_template=source)
    assert tokenizer.apply_chat_template(USER, tokenize=False, think="!", tools=[]) == "the hello!"
    for name in ("continue_final_message", "add_generation_promt"):
        sentence = (
            f"^tokenizer: the chat template has no variable '{name}'; it reads messages, think$"
        )
        with pytest.raises(ValueError, match=sentence):
            tokenizer.apply_chat_template(USER, think="!", **{name: True})
    with pytest.raises(ValueError, match="has no variable 'thinks'"):
        tokenizer.encode_answers(USER, thinks=True)
    with pytest.raises(ValueError, match="^chat template: refused: TemplateSyntaxError"):
        tiny(chat_template="{% if %}").apply_chat_template(USER, think=True)
    with pytest.raises(ValueError, match="^chat template: refused: RecursionError"):
        tiny(chat_template="{{" + "(" * 3000 + "}}").apply_chat_template(USER, think=True)
    with pytest.raises(ValueError, match="has no variable 'think'; it reads none$"):
        tiny(chat_template="always this").apply_chat_template(USER, think=True)


def test_named_templates():
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = tiny(chat_template=named)
    assert tokenizer.apply_chat_template(USER, tokenize=False, tools=None) == "plain"
    assert tokenizer.apply_chat_template(USER, tokenize=False) == "plain"
    assert tokenizer.apply_chat_template(USER, tokenize=False, tools=[{}]) == "tools"
    only = tiny(chat_template=named[1:])
    with pytest.raises(ValueError, match="only the chat templates tool_use, no default"):
        only.apply_chat_template(USER)


def test_a_template_in_a_file_wins(tmp_path):
    files = tiny_tokenizers.files(tiny_tokenizers.byte_fallback(), chat_template="config")
    (tmp_path / "additional_chat_templates").mkdir()
    files["chat_template.jinja"] = b"file {{ messages[0].content }}\n"
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert Tokenizer.from_folder(tmp_path).apply_chat_template(USER, tokenize=False) == (
        "file the hello"
    )
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.apply_chat_template(USER, tokenize=False, tools=[]) == "tools"
    tokenizer.save(tmp_path / "copy")
    again = Tokenizer.from_folder(tmp_path / "copy")
    assert again.apply_chat_template(USER, tokenize=False, tools=[]) == "tools"


@pytest.mark.parametrize("name", FOLDERS)
def test_save_is_bit_for_bit(folder, name, tmp_path):
    Tokenizer.from_folder(folder(name)).save(tmp_path / "new" / "folder")
    saved = {p.name: p.read_bytes() for p in (tmp_path / "new" / "folder").iterdir()}
    assert "tokenizer.json" in saved
    assert saved == {n: (folder(name) / n).read_bytes() for n in saved}
    names = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert saved.keys() == {p.name for p in folder(name).iterdir()} & names


def test_save_removes_what_the_folder_has_of_another_one(tmp_path):
    extra = "additional_chat_templates/tool_use.jinja"
    for name in ("chat_template.jinja", extra, "special_tokens_map.json", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    tiny().save(tmp_path)
    left = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {"tokenizer.json", "tokenizer_config.json", "notes.txt"}
    assert not Tokenizer.from_folder(tmp_path).has_chat_template


def test_vocab_size_is_the_largest_id_and_one():
    library = tiny_tokenizers.byte_fallback()
    size = library.get_vocab_size()
    library.add_tokens(["<|one more|>"])
    assert Tokenizer(tiny_tokenizers.files(library)).vocab_size == size + 1
    holes = Library(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    assert Tokenizer(tiny_tokenizers.files(holes)).vocab_size == 10


def trained():
    library = tiny_tokenizers.byte_level()
    return Tokenizer.from_tokenizers(
        library, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )


def test_from_tokenizers(tmp_path):
    tokenizer = trained()
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, None)
    assert tokenizer.decode(tokenizer.encode(" hello 你好 x")) == " hello 你好 x"
    tokenizer.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    assert again.apply_chat_template(USER) == tokenizer.apply_chat_template(USER)
    assert again.apply_chat_template(USER)[0] == 1
    with pytest.raises(ValueError, match="pad_token '<pad>' is not in the vocabulary"):
        Tokenizer.from_tokenizers(tiny_tokenizers.byte_level(), pad_token="<pad>")


@pytest.mark.reference
def test_transformers_reads_what_from_tokenizers_saves(transformers, tmp_path):
    tokenizer = trained()
    tokenizer.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = " hello 你好 x\n👍"
    assert theirs(text)["input_ids"] == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.eos_id
    ids = theirs.apply_chat_template(USER, return_dict=False)
    assert ids == tokenizer.apply_chat_template(USER)


# Bad input


def test_no_folder_and_no_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer: there is no folder .*absent"):
        Tokenizer.from_folder(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json; other formats"):
        Tokenizer.from_folder(tmp_path)


GOOD = tiny_tokenizers.files(tiny_tokenizers.byte_fallback(), bos_token="<s>")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", b"", "tokenizer.json cannot be read"),
        ("tokenizer.json", b"{}", "tokenizer.json cannot be read"),
        ("tokenizer.json", b"[]", "tokenizer.json cannot be read"),
        ("tokenizer.json", b"\xff\xfe\x00", "tokenizer.json cannot be read"),
        ("tokenizer.json", GOOD["tokenizer.json"][:2000], "tokenizer.json cannot be read"),
        (
            "tokenizer.json",
            b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}',
            "has no tokens",
        ),
        ("tokenizer_config.json", b"", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", b"[" * 100_000, "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", b"[1]", r"must hold an object, not \[1\]"),
        ("tokenizer_config.json", b'{"bos_token": 5}', "bos_token must be a string"),
        ("tokenizer_config.json", b'{"eos_token": {"a": 1}}', "eos_token must be a string"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "chat_template must be a string or"),
        ("tokenizer_config.json", b'{"chat_template": ["a"]}', "chat_template must be a string"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "a"}]}', "chat_template must be"),
        ("special_tokens_map.json", b"{", "special_tokens_map.json is not valid JSON"),
        ("chat_template.jinja", b"\xff", "a chat template is not UTF-8"),
    ],
)
def test_corrupt_files(tmp_path, name, content, reason):
    for file, good in {**GOOD, name: content}.items():
        (tmp_path / file).write_bytes(good)
    with pytest.raises(ValueError, match=f"^tokenizer of .*: .*{reason}") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_post_processor_with_an_unknown_token():
    content = json.loads(tiny_tokenizers.byte_fallback(bos=True).to_str())
    content["post_processor"]["single"][0]["SpecialToken"]["id"] = "<bos>"
    with pytest.raises(ValueError, match="tokenizer: the post-processor knows no token '<bos>'"):
        Tokenizer({"tokenizer.json": json.dumps(content).encode()})


def test_wrong_texts_and_ids():
    tokenizer = tiny()
    with pytest.raises(ValueError, match="a text must be a str, not bytes"):
        tokenizer.encode(b"the")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"half a surrogate pair, U\+DCFF, at character 1"):
        tokenizer.encode("a\udcff")
    for wrong in (-1, 2**32, [2, 3], 1.5, "a"):
        sentence = f"^tokenizer: {re.escape(repr(wrong))} is not a token id"
        with pytest.raises(ValueError, match=sentence):
            tokenizer.decode([1, wrong])  # type: ignore[list-item]
        with pytest.raises(ValueError, match=sentence):
            tokenizer.stream().push([1, wrong])  # type: ignore[list-item]
    assert tokenizer.decode([10**6]) == ""
    with pytest.raises(ValueError, match="^tokenizer: ids must be a list of token ids, got 5$"):
        tokenizer.decode(5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="^tokenizer: files must be a mapping .*; Tokenizer.from_"):
        Tokenizer("folder")  # pyright: ignore[reportArgumentType]


def test_no_chat_template():
    with pytest.raises(ValueError, match="there is no chat template; give plain text"):
        tiny().apply_chat_template(USER)


def test_hostile_template_of_a_checkpoint():
    tokenizer = tiny(chat_template="{{ ().__class__.__mro__[1].__subclasses__() }}")
    assert tokenizer.encode("the")  # the checkpoint itself still works
    with pytest.raises(ValueError, match="^chat template: refused: SecurityError: "):
        tokenizer.apply_chat_template(USER)
