"""The README: its Python runs, in its order; its commands exist, and its figures are measured."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

import jaxllm
from benchmarks import __main__ as benchmark
from benchmarks import report
from jaxllm import cli

REPO = Path(__file__).resolve().parent.parent
README = REPO / "README.md"
RESULTS = REPO / "benchmarks" / "results"
DOCUMENTS = [README, REPO / "CHANGELOG.md", REPO / "CONTRIBUTING.md", RESULTS / "README.md"]
DOCUMENTS += [REPO / "benchmarks" / name for name in ("README.md", "notes.md")]


@pytest.mark.slow
def test_the_python_of_the_readme_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 5
    scope = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), scope)
    assert scope["result"].finish_reasons == ["length", "length"]
    assert scope["out"].shape[-1] == scope["model"].config.hidden_size
    assert scope["logits"].shape == (1, scope["model"].config.vocab_size)
    assert scope["y"].shape == (8, 64)
    assert "'" in capsys.readouterr().out


def test_what_the_readme_names_is_there():
    text = README.read_text()
    for name in re.findall(r"jaxllm\.(\w+)", text):
        assert hasattr(jaxllm, name), name
    from jaxllm.families import FAMILIES

    for family in FAMILIES:
        assert f"`{family}`" in text


def commands(text, program):
    """Of lines and of `spans`; then each with the options that its comment names."""
    lines = re.findall(rf"^(?: {{4}})?{program} (.+)$", text, re.M)
    for line in [*lines, *re.findall(rf"`{program} ([^`]+)`", text)]:
        line, _, comment = line.partition("#")
        yield shlex.split(line)
        for option in re.findall(r"--[^:;|]+", comment):
            yield [*shlex.split(line), *shlex.split(option)]


def test_the_commands_of_the_readme_exist():
    parser = cli._parser()
    found = list(commands(README.read_text(), "jaxllm"))
    assert ["finetune", *"MODEL --data FILE.jsonl --out DIR --qlora int4".split()] in found
    assert len({words[0] for words in found}) == 6  # generate, chat, inspect and three of training
    for words in found:
        parser.parse_args(words)  # else it ends the process
    with pytest.raises(SystemExit):
        parser.parse_args([*found[0], "--sundial"])


def test_the_commands_of_the_benchmarks_have_work_to_do():
    text = (REPO / "benchmarks" / "README.md").read_text()
    found = [words for words in commands(text, "python -m benchmarks") if "--missing" not in words]
    assert ["rope", "--only", "32 [+] 8 heads", "--out", "FILE.json"] in found
    for words in found:
        plan = benchmark._plan(benchmark._arguments(words))
        assert any(benchmark._has_work(module, plan) for module in benchmark.MODULES), words
    for file in DOCUMENTS:
        for module in re.findall(r"python -m ([\w.]+)", file.read_text()):
            assert importlib.util.find_spec(module) is not None, module


def anchors(file):
    """As GitHub makes them of headings."""
    for heading in re.findall(r"^#+ (.+)$", file.read_text(), re.M):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken_links(file):
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", file.read_text()):
        target = file.parent / path if path else file
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield f"{path}#{anchor}"


def test_the_links_of_the_documents_lead_somewhere(tmp_path):
    for file in DOCUMENTS:
        assert list(broken_links(file)) == [], file
    (tmp_path / "a.md").write_text("# `One`: two\n[x](#one-two) [y](#one) [z](b.md) [w](a.md#two)")
    assert list(broken_links(tmp_path / "a.md")) == ["#one", "b.md#", "a.md#two"]


MEASURED = {
    "RMSNorm, 8192 x 8192": "rms_norm: 8192 x 8192 bfloat16",
    "with the residual": "rms_norm: 8192 x 8192 bfloat16, residual",
    "its backward pass": "rms_norm: 8192 x 8192 bfloat16, backward",
    "LayerNorm, 8192 x 8192": "layer_norm: 8192 x 8192 bfloat16",
    "scale and softmax, 8 x 32 x 2048 x 2048": "scale_softmax: 8 x 32 x 2048 x 2048 bfloat16",
    "scale and softmax, 1024 x 131072": "scale_softmax: 1024 x 131072 bfloat16",
    "RoPE, 8192 tokens, 32 + 32 heads of 96": (
        "rope: 1 x 8192 tokens, 32 + 32 heads of 96, bfloat16"
    ),
    "SwiGLU, 8192 x 14336": "swiglu: 8192 x 14336 bfloat16",
    "matmul, 4096 x 4096 x 4096": "matmul: 4096 x 4096 x 4096 bfloat16, transposed",
    "attention, 4 x 4096 tokens, causal": (
        "flash_attention: 4 x 4096 tokens, 32 / 8 heads of 128, bfloat16, causal"
    ),
    "its backward pass, 4 x 4096 tokens": (
        "flash_attention_backward: 4 x 4096 tokens, 32 / 8 heads of 128, bfloat16, causal"
    ),
}


def test_the_table_of_the_readme_is_of_committed_results():
    figures = {}
    runs = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    for results in sorted(runs, key=lambda run: run["date"]):  # the last is what counts
        if results["gpu"]["name"] != "NVIDIA H200":
            continue
        for row in results["rows"]:
            figures[f"{row['op']}: {row['label']}"] = row, report.figures(row, results["ceilings"])
    table = re.findall(
        r"^\| (\S.*?) \| ([\d.]+) us, (.*?) \| ([\d.]+) \| (.*?) \|$", README.read_text(), re.M
    )
    assert [name for name, *_ in table] == list(MEASURED)
    for name, us, share, xla, best in table:
        row, found = figures[MEASURED[name]]
        assert is_rounded(us, found["us"]), name
        assert is_rounded(xla, found["xla_us"]), name
        assert is_rounded(best.split()[-1], found["best_us"]), name
        number, unit = share.split()[:2]
        rate = row["operations"] / found["us"] / 1e6
        assert is_rounded(number, found["percent"] if unit == "%" else rate), name
    assert not is_rounded("66.8", 66.9)


def is_rounded(text, number):
    return f"{number:.{len(text.partition('.')[2])}f}" == text


# By the first words of a row: the section of a run; of Qwen2.5-0.5B and of Llama-3.1-8B.
DECODED = {
    "fused: all layers in one launch": "decode/auto, fused",
    "fused, two launches a layer": "decode/auto, fused, two launches a layer",
    "fused, a launch a product": "decode/auto, fused, a launch a product",
    "XLA alone, not fused": "decode/xla",
    **{f"{name}, ": f"packed-decode/{name}" for name in ("bfloat16", "int8", "int4", "ternary")},
}
GPUS = {"NVIDIA H200": 0, "NVIDIA H100 80GB HBM3": 1}


@pytest.mark.parametrize("gpu", GPUS)
def test_the_decoding_tables_of_the_readme_are_of_committed_results(gpu):
    runs = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    sections, read = {}, {}
    for run in sorted(runs, key=lambda run: run["date"]):
        if run["gpu"]["name"] == gpu:
            sections |= run["sections"]
            read |= dict.fromkeys(run["sections"], (run["ceilings"] or {}).get("read"))
    lines = [line for line in README.read_text().splitlines() if line.startswith("| ")]
    for words, key in DECODED.items():
        [line] = [line for line in lines if line.startswith(f"| {words}")]
        cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
        cells = cells[GPUS[gpu] * len(cells) // 2 :][: len(cells) // 2]
        keys = [key, f"{key}, 4 rows", f"{key}, 16 rows"]
        if key.startswith("packed"):
            share = sections[key]["bytes_a_token"] * sections[key]["tokens_per_s"] / read[key]
            assert cells.pop(1) == f"{100 * share:.0f} %", words
            keys[1] = f"{key}, a launch a product"
        for cell, each in zip(cells, keys, strict=True):
            assert cell == "" or is_rounded(cell, sections[each]["tokens_per_s"]), (words, each)
        assert cells[0] != ""
