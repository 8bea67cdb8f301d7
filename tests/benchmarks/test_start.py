import json

import pytest

import jaxllm
from benchmarks import start


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_two_processes_say_what_each_step_took(tmp_path, capsys, scheme):
    out = tmp_path / "start.json"
    arguments = [str(jaxllm.shipped_checkpoint()), f"--out={out}", f"--folder={tmp_path}"]
    start.main(start.parse([*arguments, *([] if scheme is None else [f"--quantize={scheme}"])]))
    printed = capsys.readouterr().out
    runs = json.loads(out.read_text())["runs"]
    steps = ["import", "find the device", "load", "fuse", "the first token"]
    steps.append("the prompt again, and 65 tokens")
    if scheme is not None:
        steps.insert(3, "quantize")
    assert [[*run["seconds"]] for run in runs] == [steps, steps]
    for step in steps:
        first, again = (run["seconds"][step] for run in runs)
        assert f"| {step} | {first:.2f} | {again:.2f} |" in printed
    assert runs[0]["weight_bytes"] == runs[1]["weight_bytes"] > 10**6
    # The second has its programs from the disk
    assert runs[1]["seconds"]["the first token"] < runs[0]["seconds"]["the first token"]


def test_a_process_that_fails_ends_it_and_leaves_no_file(tmp_path, capfd):
    with pytest.raises(SystemExit, match="the process with --start ended with 1"):
        start.main(start.parse([str(tmp_path), f"--folder={tmp_path}", f"--out={tmp_path}/x.json"]))
    assert list(tmp_path.iterdir()) == []
    assert "there is no config.json" in capfd.readouterr().err


def test_what_is_not_there_is_said_before_anything_starts(tmp_path, capsys):
    for arguments in (["none"], [f"--folder={tmp_path}/none"], [f"--out={tmp_path}/none/x.json"]):
        with pytest.raises(SystemExit, match="^2$"):
            start.parse(arguments)
        assert "none" in capsys.readouterr().err


def test_a_file_that_is_there_is_kept_until_there_is_a_result(tmp_path):
    out = tmp_path / "x.json"
    out.write_text("of the run before")
    start.parse([f"--out={out}"])
    assert out.read_text() == "of the run before"
