"""The table of remat policies: what is asked of the plan, and how its rows read."""

import pytest

from benchmarks import memory_table
from jaxllm.plan import Plan

FOUND = Plan(
    remat="dots",
    weights=2**30,
    packed=0,
    moments=2**28,
    activations=2**29,
    gradients=2**27,
    temporaries=0,
    peak=3 * 2**30,
    host=2**31,
    trained=1,
    parameters=9,
    card="h200",
    card_bytes=2**37,
    compiled_for="h200",
)
KINDS = [([], 16, False), (["--qlora"], 16, True), (["--full"], None, False)]


@pytest.mark.parametrize(("option", "lora", "qlora"), KINDS)
def test_each_policy_is_a_row(monkeypatch, capsys, option, lora, qlora):
    asked = []
    monkeypatch.setattr(memory_table.aot, "why_not", lambda **_: None)
    monkeypatch.setattr(
        memory_table, "plan", lambda config, **options: asked.append((config, options)) or FOUND
    )
    assert memory_table.main([*option, "--layers", "2", "--policies", "none", "dots"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        f"| {name} | 1.00 | 0.50 | 0.00 | 3.00 | 2.00 |" for name in ("none", "dots")
    ]
    assert [options["remat"] for _, options in asked] == ["none", "dots"]
    for config, options in asked:
        assert config.num_hidden_layers == 2
        assert (options["lora"], options["qlora"], options["seq"]) == (lora, qlora, 8192)


def test_without_the_plugin_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(memory_table.aot, "why_not", lambda **_: "no plugin")
    assert memory_table.main([]) == 2
    assert capsys.readouterr().err == "memory_table: no plugin\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--layers", "0"], "num_hidden_layers"),
        (["--tokens", "0"], "seq must be an integer of at least 1, got 0"),
        (["--tokens", "999999999"], "999999999 tokens a row are more than the model's 131072"),
    ],
)
def test_a_size_that_makes_no_sense_is_one_sentence(monkeypatch, capsys, options, said):
    monkeypatch.setattr(memory_table.aot, "why_not", lambda **_: None)
    assert memory_table.main(options) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert said in error
    assert error.count("\n") == 1
