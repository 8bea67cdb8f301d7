"""Tuning: rows for what wins outside the noise, and for nothing else. The clock is made up."""

import dataclasses
import importlib
import json
import os
import threading
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from absent_device import H200

import pallas_kernels
from pallas_kernels import measure, tune, tuned

X = jax.ShapeDtypeStruct((8,), jnp.float32)


EMPTY = {"config": {}, "evidence": {}}


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int


def toy(*, calls=None, bad=None):
    """A module with tilings 1 (the default), 2, 3 and 4; `bad` does not compile."""

    def run(x, *, config, scale=1.0):
        if config.rows == bad:
            raise ValueError(f"no tile of {config.rows} rows\nand more")
        return x * (scale * config.rows)

    return types.SimpleNamespace(
        Config=Config,
        tuning_calls=lambda: calls or [tuned.Call((X,), run, {"scale": 2.0})],
        bucket=lambda x, *, scale: f"float32 {x.shape[0]}",
        default_config=lambda x, *, scale, device: Config(1),
        candidates=lambda x, *, scale, device: [Config(n) for n in (1, 2, 3, 4)],
    )


class Clock:
    """Takes as long as `us` says for the number that the program multiplies by."""

    def __init__(self, us, spread=0.1, *, reason=None, others=()):
        self.us, self.spread, self.reason, self.others = us, spread, reason, others

    def time(self, f, sets, *, calls):
        assert len(sets) == measure.FEW_SETS
        rows = round(float(f(jnp.ones_like(sets[0][0]))[0]) / 2.0)
        clock = "cupti" if rows in self.others else "made up"
        return measure.Timing(self.us[rows], self.spread, self.us[rows], clock, calls, None)


def rows_of(us, spread=0.1, **kwargs):
    said = []
    found = list(tune.tune(toy(**kwargs), "toy", H200, Clock(us, spread), calls=4, say=said.append))
    assert [key for key, _ in found] == ["float32 8"]
    return [row for _, row in found if row is not None], said


def test_the_fastest_is_written_with_its_evidence():
    rows, said = rows_of({1: 10.0, 2: 9.0, 3: 8.0, 4: 11.0})
    assert [row["config"] for row in rows] == [{"rows": 3}]
    assert (rows[0]["op"], rows[0]["key"]) == ("toy", "float32 8")
    evidence = rows[0]["evidence"]
    assert (evidence["us"], evidence["default_us"], evidence["clock"]) == (8.0, 10.0, "made up")
    assert evidence["default"] == {"rows": 1}
    assert evidence.keys() == {
        *("us", "spread_us", "default_us", "default_spread_us"),
        *("default", "clock", "jax", "date"),
    }
    assert said == ["toy float32 8: Config(rows=3) 8.0 us, default 10.0 us"]


@pytest.mark.parametrize(
    ("best", "spread"),
    [(9.85, 0.0), (9.81, 0.01), (10.0, 0.0), (20.0, 0.0), (9.0, 0.5)],  # 2 % win; 0.5 us are noise
)
def test_no_row_within_the_noise_or_two_percent(best, spread):
    rows, said = rows_of({1: 10.0, 2: best, 3: 12.0, 4: 12.0}, spread=spread)
    assert rows == []
    assert "keeps Config(rows=1)" in said[0]


def test_what_does_not_compile_is_said_and_passed_over():
    rows, said = rows_of({1: 10.0, 2: 9.0, 4: 12.0}, bad=3)
    assert rows[0]["config"] == {"rows": 2}
    assert "toy float32 8: Config(rows=3) does not compile: no tile of 3 rows" in said


def test_a_default_that_does_not_compile_is_a_bug():
    with pytest.raises(ValueError, match="no tile of 1 rows"):
        rows_of({}, bad=1)


def test_what_another_clock_has_timed_wins_nothing():
    clock = Clock({1: 10.0, 2: 9.0, 3: 1.0, 4: 12.0}, others=[3])
    [(_, row)] = tune.tune(toy(), "toy", H200, clock, say=lambda line: None)
    assert row is not None
    assert row["config"] == {"rows": 2}


def test_one_row_a_key():
    module = toy()
    module = toy(calls=module.tuning_calls() * 2)
    said = []
    clock = Clock({1: 9.0, 2: 1.0, 3: 9.0, 4: 9.0})
    assert len(list(tune.tune(module, "toy", H200, clock, say=said.append))) == 1
    assert "passed over" in said[1]


def test_configs_compile_side_by_side(monkeypatch):
    """Each waits until all four are being traced: one by one, the first would wait in vain."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    module, all_here = toy(), threading.Barrier(4, timeout=20)
    [call] = module.tuning_calls()

    def run(x, **keywords):
        all_here.wait()
        return call.run(x, **keywords)

    module.tuning_calls = lambda: [dataclasses.replace(call, run=run)]
    clock = Clock({1: 10.0, 2: 9.0, 3: 8.0, 4: 11.0})
    [(_, row)] = tune.tune(module, "toy", H200, clock, say=lambda line: None)
    assert row is not None
    assert row["config"] == {"rows": 3}


def test_an_interrupt_loses_no_key_before_it(tmp_path, monkeypatch):
    module = toy()
    [call] = module.tuning_calls()
    calls = [call, dataclasses.replace(call, arguments=(jax.ShapeDtypeStruct((16,), jnp.float32),))]

    class Impatient(Clock):
        def time(self, f, sets, *, calls):
            if sets[0][0].size == 16:
                raise KeyboardInterrupt
            return super().time(f, sets, calls=calls)

    monkeypatch.setattr("pallas_kernels.device.current", lambda: H200)
    monkeypatch.setattr(
        "pallas_kernels.tune.importlib.import_module", lambda name: toy(calls=calls)
    )
    clock = Impatient({1: 10.0, 2: 9.0, 3: 8.0, 4: 11.0})
    monkeypatch.setattr(measure, "Stopwatch", lambda: clock)
    with pytest.raises(KeyboardInterrupt):
        tune.main(["toy", "--out", str(tmp_path / "x.json")])
    assert [row["key"] for row in tuned.read(tmp_path / "x.json")] == ["float32 8"]
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_rows_replace_those_of_their_keys(tmp_path):
    def row(key, rows, op="toy"):
        return {"op": op, "key": key, "config": {"rows": rows}, "evidence": {}}

    path = tmp_path / "tuned" / "h200.json"
    tune.write(path, "NVIDIA H200", "toy", {"a"}, [])
    assert not path.exists()
    tune.write(path, "NVIDIA H200", "toy", {"a", "b"}, [row("b", 1), row("a", 1)])
    tune.write(path, "NVIDIA H200", "other", {"a"}, [row("a", 7, "other")])
    tune.write(path, "NVIDIA H200", "toy", {"a"}, [row("a", 2)])
    assert tuned.read(path) == [row("a", 7, "other"), row("a", 2), row("b", 1)]
    assert json.loads(path.read_text())["gpu"] == "NVIDIA H200"
    tune.write(path, "NVIDIA H200", "toy", {"a", "b"}, [])  # neither wins any more
    assert tuned.read(path) == [row("a", 7, "other")]


def test_rows_of_another_gpu_are_left_as_they_are(tmp_path, monkeypatch, capsys):
    path = tmp_path / "x.json"
    tune.write(path, "NVIDIA H100", "toy", {"a"}, [{**dict.fromkeys(("op", "key"), "a"), **EMPTY}])
    text = path.read_text()
    with pytest.raises(ValueError, match="x.json has rows of NVIDIA H100, and this is NVIDIA H200"):
        tune.write(path, "NVIDIA H200", "toy", {"a"}, [])
    monkeypatch.setattr("pallas_kernels.device.current", lambda: H200)
    assert tune.main(["rms_norm", "--out", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"tune: {path} has rows of NVIDIA H100, and this is {H200.name}; give another --out\n"
    )
    assert path.read_text() == text


FOLDER = Path(pallas_kernels.__file__).parent
TUNABLE = sorted(
    path.stem for path in FOLDER.glob("*.py") if "\ndef tuning_calls(" in path.read_text()
)


@pytest.mark.parametrize("name", TUNABLE)
def test_kernels_can_be_asked_what_to_tune(name):
    module = importlib.import_module(f"pallas_kernels.{name}")
    keys = set()
    for call in module.tuning_calls():
        default = module.default_config(*call.arguments, device=H200, **call.keywords)
        candidates = module.candidates(*call.arguments, device=H200, **call.keywords)
        kinds = {type(c) for c in [default, *candidates]}
        assert len(kinds) == 1, "a tuned row is read as the default's kind"
        assert any(c != default for c in candidates), f"{name}: nothing to try"
        keys.add(module.bucket(*call.arguments, **call.keywords))
    assert keys
    assert all(isinstance(key, str) for key in keys)


def test_without_a_gpu_it_says_so(capsys):
    if jax.default_backend() == "gpu":
        pytest.skip("a GPU is here")
    assert tune.main(["rms_norm"]) == 2
    assert "tune: needs a GPU to measure on, found cpu" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["no_such_kernel", "device"])
def test_a_name_that_is_no_kernel(name, capsys, monkeypatch):
    monkeypatch.setattr("pallas_kernels.device.current", lambda: H200)
    assert tune.main([name]) == 2
    assert f"{name!r} is no kernel that can be tuned" in capsys.readouterr().err


def test_the_command_writes_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pallas_kernels.device.current", lambda: H200)
    monkeypatch.setattr("pallas_kernels.tune.importlib.import_module", lambda name: toy())
    clock = Clock({1: 10.0, 2: 9.0, 3: 8.0, 4: 11.0})
    monkeypatch.setattr(measure, "Stopwatch", lambda: clock)
    assert tune.main(["toy", "--out", str(tmp_path / "x.json")]) == 0
    assert tuned.read(tmp_path / "x.json")[0]["config"] == {"rows": 3}
    said = capsys.readouterr()
    assert "1 rows of toy, 1 keys tried" in said.out
    assert said.err == ""
    clock.reason = "CUPTI: no right"
    assert tune.main(["toy", "--out", str(tmp_path / "x.json")]) == 0
    assert capsys.readouterr().err == "tune: times are the host clock's (CUPTI: no right)\n"


def test_only_the_keys_that_are_named(tmp_path, monkeypatch, capsys):
    [call] = toy().tuning_calls()
    calls = [dataclasses.replace(call, arguments=(X.update(shape=(n,)),)) for n in (8, 16, 18)]
    monkeypatch.setattr("pallas_kernels.device.current", lambda: H200)
    monkeypatch.setattr(
        "pallas_kernels.tune.importlib.import_module", lambda name: toy(calls=calls)
    )
    monkeypatch.setattr(measure, "Stopwatch", lambda: Clock({1: 10.0, 2: 9.0, 3: 8.0, 4: 11.0}))
    path = tmp_path / "x.json"
    assert tune.main(["toy", "--out", str(path), "--keys", "float32 1*"]) == 0
    assert [row["key"] for row in tuned.read(path)] == ["float32 16", "float32 18"]
    assert tune.main(["toy", "--out", str(path), "--keys", "Float32*"]) == 2
    assert "tune: no key of toy matches 'Float32*'" in capsys.readouterr().err
