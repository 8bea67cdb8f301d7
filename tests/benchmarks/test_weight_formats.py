"""The table of what formats cost."""

import re

import pytest

from benchmarks import weight_formats


def test_a_row_a_format_and_the_first_is_what_the_others_are_compared_with(
    shared, monkeypatch, capsys
):
    formats = ((None, None), ("int8", "int8"), ("nvfp4", None))
    monkeypatch.setattr(weight_formats, "FORMATS", formats)
    assert weight_formats.main(["--stories", str(shared / "data/stories260K")]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith(
        "| projections | embedding and head | bits a number | bytes | stories260K |"
    )
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:3] for row in cells] == [
        ["bfloat16", "bfloat16", "16.00"],
        ["int8", "int8", "8.43"],  # 8, and 32 a row of 64 or 172
        ["nvfp4", "bfloat16", "5.00"],  # 4, 8 a group of 16, and 32 a row of 64
    ]
    plain, *others = (float(row[4]) for row in cells)
    assert 0.6 < plain < 0.8  # of its own kind of text; 6.2 / 2.5 if it knew nothing
    assert 0 < others[1] - plain < 0.1
    assert abs(others[0] - plain) < 0.003
    assert [row[5].endswith("*") for row in cells] == [False, False, True]
    sizes = [int(re.sub(",", "", row[3])) for row in cells]
    assert sizes[0] == 2 * 260_032
    assert sizes[1] < 0.54 * sizes[0]


def test_without_a_text_there_is_nothing_to_measure(capsys):
    assert weight_formats.main([]) == 2
    assert capsys.readouterr().err == "weight_formats: give --shakespeare, --stories or both\n"


def test_what_is_not_there_is_said_before_anything_runs(tmp_path, capsys):
    for name, given, missing in (
        ("--shakespeare", tmp_path / "input.txt", tmp_path / "input.txt"),
        ("--stories", tmp_path, tmp_path / "config.json"),
    ):
        with pytest.raises(SystemExit, match="^2$"):
            weight_formats.main([name, str(given)])
        assert f"error: {name}: there is no file {missing}\n" in capsys.readouterr().err
