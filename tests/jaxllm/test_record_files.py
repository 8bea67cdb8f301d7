"""Files become records; what is wrong with a file is one sentence that says where."""

import json
import os
import re

import pytest

from jaxllm.record_files import read_records


def write(folder, text, name="data.jsonl"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_jsonl_and_arrays_hold_the_same_records(tmp_path):
    rows = [{"text": "a\u2028b"}, {"text": "é"}, {}]
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    jsonl = read_records(write(tmp_path, lines))
    windows = read_records(write(tmp_path, "\ufeff" + lines.replace("\n", "\r\n")))
    array = read_records(write(tmp_path, " \n" + json.dumps(rows, indent=1), "data.json"))
    assert jsonl == windows == array == rows
    assert [r.where for r in jsonl] == [f"{tmp_path}/data.jsonl, line {i}" for i in (1, 3, 5)]
    assert array[2].where == f"{tmp_path}/data.json, entry 3"


@pytest.mark.parametrize(
    ("content", "sentence"),
    {
        "": "{} is empty; give one JSON object a line, or a JSON array",
        " \n\n": "{} is empty; give one JSON object a line, or a JSON array",
        "[]": "{} holds an array without records",
        '{"a": 1}\n\n{"a": \n': "{}, line 3: this is not JSON: Expecting value at character 7",
        '{"a": 1}\nhello': "{}, line 2: this is not JSON: Expecting value at character 1",
        '{"a": 1},\n{"a": 2}': "{}, line 1: this is not JSON: Extra data at character 9",
        '{"a": 1} {"b": 2}': "{}, line 1: this is not JSON: Extra data at character 10",
        '[{"a": 1},\n{"a" 1}]': (
            "{}, line 2: this is not JSON: Expecting ':' delimiter at character 6"
        ),
        '{"a": 1}\n[1]': "{}, line 2: a record must be a JSON object, not [1]",
        '[{}, "b"]': "{}, entry 2: a record must be a JSON object, not 'b'",
        b'{"a": 1}\n\xff': "{}, line 2: the file is not UTF-8",
        "[" * 99999: "{}, line 1: this JSON is nested too deeply",
        "[1]\n[2]": (
            "{}, line 2: this is not JSON: Extra data at character 1; a file is one array, or has "
            "an object on each line"
        ),
        '{"a": 1}\n{"a": 1' + 5000 * "0" + "}": ("{}, line 2: a number of 5001 digits is too long"),
        '[{"a": 12},\n\n{"a": 1' + 5000 * "0" + "}]": (
            "{}, line 3: a number of 5001 digits is too long"
        ),
        '[{"a": "' + 9000 * "9" + '\\""},\n{"a": 1' + 5000 * "0" + "}]": (
            "{}, line 2: a number of 5001 digits is too long"
        ),
        **{
            f'[{{"a": {start}{5000 * "9"}}},\n{{"a": -1{5000 * "0"}}}]': (
                "{}, line 2: a number of 5001 digits is too long"
            )
            for start in ("0.", "1e", "1e-", "1E+")
        },
        b"\x1f\x8b\x08\x00": "{} is compressed; decompress it first",
        b"PAR1\x15\x04\xff": "{} is parquet; JSONL files and JSON arrays are read",
        '\n{\n "a": [\n  1]\n}\n': (
            "{}, line 2: the file is one JSON object over 4 lines; give one object a line, or an "
            "array of them"
        ),
        '{"a": 1}\n{\n "a": 1\n}\n{"a": 2}': (
            "{}, line 2: here a JSON object goes over 3 lines; give one object a line, or an array "
            "of them"
        ),
        '{\n "a": 1\n "b": 2\n}': (
            "{}, line 1: this is not JSON: Expecting property name enclosed in double quotes at "
            "character 2"
        ),
    }.items(),
)
def test_bad_files(tmp_path, content, sentence):
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=f"^data: {re.escape(sentence.format(path))}$"):
        read_records(path)


def test_a_file_in_ones_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, '{"text": "a"}')
    assert read_records("~/data.jsonl") == [{"text": "a"}]


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="data: .*/none does not exist; give a JSONL file"):
        read_records(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="data: .* is a folder, not a file; give a JSONL"):
        read_records(tmp_path)


def test_a_pipe_is_read():
    """As a shell's <(zcat FILE) is; one without anything is empty."""
    end, start = os.pipe()
    os.write(start, b'{"text": "a"}\n')
    os.close(start)
    with open(end, "rb"):
        assert read_records(f"/dev/fd/{end}") == [{"text": "a"}]
    with pytest.raises(ValueError, match="data: /dev/null is empty; give one JSON object a line"):
        read_records("/dev/null")
