"""The project itself: what is packed, what make does, what the README promises."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import jaxllm

REPO = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


def test_files_of_the_project():
    assert re.search(r"^Copyright The jaxllm authors$", (REPO / "LICENSE").read_text(), re.M)
    assert "Apache License" in (REPO / "LICENSE").read_text()
    assert f"## {jaxllm.__version__}" in (REPO / "CHANGELOG.md").read_text()
    for package in ("jaxllm", "pallas_kernels"):
        assert (REPO / package / "py.typed").is_file()


def test_base_dependencies_are_light():
    names = {re.split(r"[^\w-]", line)[0] for line in PROJECT["dependencies"]}
    assert names == {
        *("jax", "flax", "optax", "orbax-checkpoint", "tokenizers"),
        *("jinja2", "rich", "numpy", "ml_dtypes", "jaxtyping"),
    }
    extras = PROJECT["optional-dependencies"]
    assert extras.keys() == {
        *("cuda12", "cuda13", "hub", "triton", "train", "test", "reference", "dev")
    }
    assert not any("torch" in line for line in extras["test"])


def test_readme_opens_with_commands_that_make_knows():
    readme = (REPO / "README.md").read_text()
    said = re.findall(r"\bmake ([a-z-]+)\b", " ".join(re.findall(r"`[^`]+`|^ {4}.*", readme, re.M)))
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.M))
    assert said[:2] == ["generate", "test"]
    assert set(said) <= targets


def make(
    folder: Path, *arguments: str, path: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run make in a folder that holds only what a target needs to find out that it cannot work."""
    (folder / ".ci").mkdir(parents=True, exist_ok=True)
    for name in ("Makefile", "pyproject.toml", ".ci/environment"):
        shutil.copy(REPO / name, folder / name)
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=folder,
        env={"PATH": path, "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def tools(folder: Path, **programs: str) -> str:
    """A folder for PATH: the system's small tools and these programs, with no other Python."""
    folder.mkdir()
    for name in (
        "make",
        "sh",
        "bash",
        "sed",
        "cat",
        "cksum",
        "mkdir",
        "rm",
        "dirname",
        "tr",
        "grep",
    ):
        if (found := shutil.which(name)) is not None:
            (folder / name).symlink_to(found)
    for name, code in programs.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{code}\n")
        program.chmod(0o755)
    return str(folder)


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

OLD_PYTHON = 'case "$1" in --version) echo "Python 3.9.18" ;; *) exit 1 ;; esac'


@needs_make
@pytest.mark.parametrize(
    ("programs", "arguments", "sentence"),
    [
        ({"python3": OLD_PYTHON}, [], "needs Python 3.11 or newer and found Python 3.9.18; "),
        ({}, [], "needs Python 3.11 or newer and found none; "),
        (
            {"old": OLD_PYTHON},
            ["PYTHON=old"],
            "needs Python 3.11 or newer, but PYTHON=old is Python 3.9.18.",
        ),
        (
            {},
            ["PYTHON=absent"],
            "needs Python 3.11 or newer, but PYTHON=absent is not a Python that runs.",
        ),
        (
            {"python3": 'case "$2" in *ensurepip*|"pip") exit 1 ;; esac'},
            [],
            "python3 cannot make a virtual environment: ",
        ),
    ],
)
def test_make_without_a_python_says_one_sentence(tmp_path, programs, arguments, sentence):
    path = tools(tmp_path / "bin", **programs)
    result = make(tmp_path / "a clone", "test", *arguments, path=path)
    assert result.returncode == 2
    said = [line for line in result.stderr.splitlines() if not line.startswith("make: ***")]
    assert len(said) == 1, result.stderr
    assert said[0].startswith(f"jaxllm: {sentence}")
    assert not result.stdout
    assert not (tmp_path / "a clone" / ".venv").exists()


@needs_make
@pytest.mark.slow  # makes a virtual environment
def test_make_without_network_says_one_sentence(tmp_path):
    path = tools(tmp_path / "bin", python3=f'exec "{sys.executable}" "$@"')
    clone = tmp_path / "a clone"
    (clone / ".venv").mkdir(parents=True)
    for name in ("unfinished", "half a package"):  # as an interrupted run leaves it
        (clone / ".venv" / name).touch()
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/"}
    result = make(clone, "test", path=path, **nowhere, PIP_RETRIES="0")
    assert result.returncode == 2
    *progress, sentence, from_make = result.stderr.splitlines()
    assert all(line.startswith("Installing jaxllm") for line in progress)
    log = clone / ".cache" / "pip.log"
    assert sentence == (
        f"jaxllm: pip cannot reach its package index (no network?); what it said is in {log}."
    )
    assert from_make.startswith("make: ***")
    assert "127.0.0.1" in log.read_text()
    left = {file.name for file in (clone / ".venv").iterdir()}
    assert "bin" in left
    assert not {"unfinished", "half a package", "installed-base"} & left


@pytest.mark.slow  # builds and installs
def test_wheel_holds_the_shipped_checkpoint(tmp_path):
    if find_spec("hatchling") is None or find_spec("pip") is None:
        pytest.skip("hatchling or pip is not installed: make test")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wheel = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", tmp_path]
    subprocess.run([*pip, *wheel, REPO], check=True)
    (built,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", site, built], check=True
    )
    for package in ("jaxllm", "pallas_kernels"):
        assert (site / package / "py.typed").is_file()
    assert (site / "jaxllm" / "targets" / "h200.txtpb").is_file()
    assert (site / "pallas_kernels" / "tuned" / "h200.json").is_file()
    ignored = (REPO / ".gitignore").read_text()
    shipped = re.findall(r"^!/(checkpoints/.+)/$", ignored, re.M)
    packed = {
        path.relative_to(site / "jaxllm"): path.read_bytes()
        for path in (site / "jaxllm" / "checkpoints").rglob("*")
        if path.is_file()
    }
    wanted = [REPO / "checkpoints" / "README.md"]
    wanted += [path for folder in shipped for path in (REPO / folder).iterdir()]
    assert packed == {path.relative_to(REPO): path.read_bytes() for path in wanted}
    assert len(wanted) > 3, "no checkpoint ships"
    asked = "from jaxllm.checkpoint.shipped import shipped_checkpoint; print(shipped_checkpoint())"
    told = subprocess.run(
        [sys.executable, "-c", asked],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [Path(told.stdout.strip())] == [site / "jaxllm" / folder for folder in shipped]
