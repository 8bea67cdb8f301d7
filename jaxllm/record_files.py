"""A file -> records, the JSON objects in it; what is wrong with a file is said with the line."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"  # how such files begin
_STRING = re.compile(r'"(?:\\.|[^"\\])*"')  # of JSON, where it holds no line break


class Record(dict[str, Any]):
    """A JSON object that knows where it stood: `where` is "FILE, line 3", for errors."""

    where = "a record"


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """The objects of a JSONL file (one a line; blank lines are passed over) or of a JSON array.

    Raises: FileNotFoundError if there is no such file. ValueError if it is empty, compressed,
    parquet or not UTF-8, or if something in it is no JSON object; the sentence has the line, or the
    place in the array.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"data: a file of records is a path, got {path!r:.60}")
    path = Path(os.path.expanduser(path))
    if path.is_dir() or not path.exists():  # a pipe will do
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"data: {path} {what}; give a JSONL file or a JSON array")
    content = path.read_bytes()
    if content.startswith(_GZIP):
        raise ValueError(f"data: {path} is compressed; decompress it first")
    if content.startswith(_PARQUET):
        raise ValueError(f"data: {path} is parquet; JSONL files and JSON arrays are read")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"data: {path}, line {line}: the file is not UTF-8") from None
    if not text.strip():
        raise ValueError(f"data: {path} is empty; give one JSON object a line, or a JSON array")
    if text.lstrip()[0] == "[":
        found = _json(text, lambda line: f"{path}, line {line}")
        places = [(f"{path}, entry {i}", value) for i, value in enumerate(found, 1)]
    else:
        places, lines = [], text.split("\n")
        for i, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path}, line {i}"
                try:
                    places.append((where, _json(line, lambda _, where=where: where)))
                except ValueError:
                    _check_lines(path, lines, i)
                    raise
    records = []
    for where, value in places:
        if not isinstance(value, dict):
            raise ValueError(f"data: {where}: a record must be a JSON object, not {value!r:.40}")
        records.append(Record(value))
        records[-1].where = where
    if not records:
        raise ValueError(f"data: {path} holds an array without records")
    return records


def _check_lines(path: Path, lines: Sequence[str], i: int) -> None:
    """Raises ValueError if an object goes on behind line i, where it begins."""
    rest = "\n".join(lines[i - 1 :]).strip()
    try:
        found, size = json.JSONDecoder().raw_decode(rest)
    except (ValueError, RecursionError):  # something else is wrong
        return
    count = rest.count("\n", 0, size) + 1
    if isinstance(found, dict) and count > 1:
        whole = size == len(rest) and not "".join(lines[: i - 1]).strip()
        what = "the file is one JSON object" if whole else "here a JSON object goes"
        raise ValueError(
            f"data: {path}, line {i}: {what} over {count} lines; give one object a line, or an "
            "array of them"
        ) from None


def _json(text: str, where: Callable[[int], str]) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.colno}"
        if error.msg == "Extra data" and text.lstrip().startswith("["):
            reason += "; a file is one array, or has an object on each line"
        raise ValueError(f"data: {where(error.lineno)}: this is not JSON: {reason}") from None
    except ValueError:  # Python reads no whole number of more than 4300 digits
        outside = _STRING.sub('""', text)
        many = rf"[0-9]{{{sys.get_int_max_str_digits() + 1},}}"
        # Digits of a fraction or an exponent are a float's; a whole number may have a minus
        long = re.search(rf"(?<![0-9.eE])(?<![eE][+-]){many}(?![0-9.eE])", outside)
        if long is None:
            raise
        place = where(outside.count("\n", 0, long.start()) + 1)
        raise ValueError(f"data: {place}: a number of {len(long[0])} digits is too long") from None
    except RecursionError:
        raise ValueError(f"data: {where(1)}: this JSON is nested too deeply") from None
