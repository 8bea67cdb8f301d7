"""The README's Python runs as it stands, in its order."""

import re
from pathlib import Path

import pytest

import jaxllm

README = Path(__file__).resolve().parent.parent / "README.md"


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
