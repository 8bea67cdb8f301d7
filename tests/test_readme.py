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
    assert len(blocks) == 6
    scope = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), scope)
    assert scope["result"].finish_reasons == ["length", "length"]
    assert scope["out"].shape[-1] == scope["model"].config.hidden_size
    assert scope["logits"].shape == (1, scope["model"].config.vocab_size)
    assert scope["y"].shape == (8, 64)
    assert scope["state"].step == 2
    assert scope["state"].skipped == 0
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
    # generate, chat, inspect, quantize and three of training
    assert len({words[0] for words in found}) == 7
    for words in found:
        parser.parse_args(words)  # else it ends the process
    with pytest.raises(SystemExit):
        parser.parse_args([*found[0], "--sundial"])


@pytest.mark.slow
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


def runs_of(gpu):
    """Oldest first."""
    runs = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    return sorted((r for r in runs if r["gpu"]["name"] == gpu), key=lambda run: run["date"])


def test_the_table_of_the_readme_is_of_committed_results():
    figures = {}
    for results in runs_of("NVIDIA H200"):  # the last is what counts
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


# Of the README's decoding tables, by the first cell of a row: the section of a run
DECODED = {
    "Qwen2.5-0.5B": "decode/auto, fused",
    "Qwen2.5-0.5B, XLA alone, not fused": "decode/xla",
    "Llama-3.1-8B, bfloat16, 16.1 GB": "packed-decode/bfloat16",
    "Llama-3.1-8B, int8, 8.6 GB": "packed-decode/int8",
    "Llama-3.1-8B, int4, 5.2 GB": "packed-decode/int4",
    "Llama-3.1-8B, ternary, 3.3 GB": "packed-decode/ternary",
}
GPUS = {"H200": "NVIDIA H200", "H100": "NVIDIA H100 80GB HBM3"}
COLUMNS = ("", ", a launch a product", ", 4 rows", ", 16 rows", ", 64 rows")


def wrong_figures(readme, name):
    """Cells of a GPU's decoding table that are not what its last runs have."""
    sections = {}
    for run in runs_of(GPUS[name]):
        timed = {key: x for key, x in run["sections"].items() if "tokens_per_s" in x}
        sections |= {key: (x, run["ceilings"]) for key, x in timed.items()}
    table = readme[readme.index(f"| on an {name}") :].partition("\n\n")[0]
    lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()]
    assert [cells[0] for cells in lines[2:]] == list(DECODED)
    for model, one, share, *others in lines[2:]:
        found, ceilings = sections[DECODED[model]]
        rate = found["bytes_a_token"] * found["tokens_per_s"] / ceilings["read"]
        if share != f"{100 * rate:.0f} %":
            yield model, share
        for cell, more in zip([one, *others], COLUMNS, strict=True):
            found, _ = sections.get(DECODED[model] + more, ({}, None))
            if cell != (f"{found['tokens_per_s']:.0f}" if found else ""):
                yield model, cell


@pytest.mark.parametrize("name", GPUS)
def test_the_decoding_tables_of_the_readme_are_of_committed_results(name):
    readme = README.read_text()
    assert list(wrong_figures(readme, name)) == []
    other = {"H200": ("6896", "6897"), "H100": ("| 5978 |", "| |")}[name]
    assert len(list(wrong_figures(readme.replace(*other), name))) == 1
