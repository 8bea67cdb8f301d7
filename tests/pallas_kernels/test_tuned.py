"""Rows of measured configs: every one builds its Config, and is found by its exact key alone."""

import dataclasses
import functools
import importlib
import json

import pytest
from absent_device import H200

from pallas_kernels import tuned
from pallas_kernels.device import Device

ROW = {"op": "toy", "key": "bf16 4096", "config": {"rows": 4}, "evidence": {"us": 1.0}}
EVIDENCE = {"us", "spread_us", "default_us", "default_spread_us", "default", "clock", "jax", "date"}


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int = 1


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    tuned._rows.cache_clear()
    yield tmp_path
    tuned._rows.cache_clear()


@functools.cache
def calls(op):
    """What is tuned of an op, by key."""
    module = importlib.import_module(f"pallas_kernels.{op}")
    return {module.bucket(*c.arguments, **c.keywords): c for c in module.tuning_calls()}


def call_of(row):
    return calls(row["op"])[row["key"]]


def rows_of(op):
    """All rows of an op, of which there are some."""
    rows = [row for path in tuned.FOLDER.glob("*.json") for row in tuned.read(path)]
    rows = [row for row in rows if row["op"] == op]
    assert rows
    return rows


def kind_of(row):
    """The class of a row's config: that of the call's default."""
    module, call = importlib.import_module(f"pallas_kernels.{row['op']}"), call_of(row)
    return type(module.default_config(*call.arguments, device=H200, **call.keywords))


def check(row, config):
    """A row is whole, builds its config and was faster than the default."""
    assert config(**row["config"]) != config(**row["evidence"]["default"])
    assert row["evidence"].keys() >= EVIDENCE
    assert row["evidence"]["us"] < row["evidence"]["default_us"]


def test_every_row_builds_its_config():
    for path in sorted(tuned.FOLDER.glob("*.json")):
        gpu = json.loads(path.read_text())["gpu"]
        assert path.name == tuned.file_name(gpu)
        rows = tuned.read(path)
        assert rows, f"{path.name} has no rows: take it out"
        assert len({(row["op"], row["key"]) for row in rows}) == len(rows)
        for row in rows:
            check(row, kind_of(row))


def test_rows_of_packed_weights_are_legal():
    """A config of a row is not looked at before it runs, but where heads are turned."""
    module = importlib.import_module("pallas_kernels.quantized_matmul")
    for row in rows_of("quantized_matmul"):
        call, config = call_of(row), kind_of(row)(**row["config"])
        x, packed = call.arguments
        apart = module._apart(packed, **call.keywords)
        assert (apart > 0) == row["key"].endswith(("-swiglu", "-rope"))
        assert config.splits == 1 or "norm" not in call.keywords
        assert module._problem(config, x.shape[0], packed, apart, x.dtype) is None, row["key"]
        larger = dataclasses.replace(config, tile_n=24)
        assert "tile_n" in module._problem(larger, x.shape[0], packed, apart, x.dtype)


def test_rows_of_gemv_are_legal():
    """Likewise, and whatever width the heads have, which a key does not tell."""
    module = importlib.import_module("pallas_kernels.gemv")
    for row in rows_of("gemv"):
        call, config = call_of(row), module.Config(**row["config"])
        problem = functools.partial(module.problem, **call.keywords)
        assert config.outputs == module.default_config(*call.arguments, **call.keywords).outputs
        assert problem(config, *call.arguments) is None, row["key"]
        no_whole_line = dataclasses.replace(config, inputs=config.inputs + 8)
        assert "inputs" in problem(no_whole_line, *call.arguments)


def test_the_check_of_rows_can_fail():
    whole = {**dict.fromkeys(EVIDENCE, 1.0), "default_us": 2.0, "default": {"rows": 1}}
    check({**ROW, "evidence": whole}, Config)
    with pytest.raises(TypeError, match="no_such_field"):
        check({**ROW, "config": {"no_such_field": 1}, "evidence": whole}, Config)
    undated = {name: x for name, x in whole.items() if name != "date"}
    for evidence in ({**whole, "us": 2.0}, {**whole, "default": ROW["config"]}, undated):
        with pytest.raises(AssertionError):
            check({**ROW, "evidence": evidence}, Config)


def test_lookup_is_exact(folder):
    (folder / "h200.json").write_text(json.dumps({"gpu": "NVIDIA H200", "rows": [ROW]}))
    assert tuned.lookup("toy", "bf16 4096", H200, Config) == Config(4)
    assert tuned.lookup("toy", "bf16 4097", H200, Config) is None
    assert tuned.lookup("other", "bf16 4096", H200, Config) is None
    h100 = dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3")
    assert tuned.lookup("toy", "bf16 4096", h100, Config) is None
    assert tuned.lookup("toy", "bf16 4096", Device("cpu", "NVIDIA H200"), Config) is None


def test_a_row_that_is_not_whole_is_refused(folder):
    row = {k: v for k, v in ROW.items() if k != "evidence"}
    (folder / "h200.json").write_text(json.dumps({"gpu": "NVIDIA H200", "rows": [row]}))
    with pytest.raises(ValueError, match=r"a row of h200.json has op, key, config; it must have"):
        tuned.lookup("toy", "bf16 4096", H200, Config)


@pytest.mark.parametrize(
    ("gpu", "file"),
    [
        ("NVIDIA H200", "h200.json"),
        ("NVIDIA H100 80GB HBM3", "h100_80gb_hbm3.json"),
        ("NVIDIA GeForce RTX 4090", "geforce_rtx_4090.json"),
    ],
)
def test_file_name(gpu, file):
    assert tuned.file_name(gpu) == file
