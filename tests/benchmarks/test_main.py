"""The command: workers that die are started anew, results survive, a machine without a GPU."""

import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as main
from benchmarks import ceilings, rivals, sections, worker
from benchmarks.case import Case
from benchmarks.models import QWEN
from pallas_kernels import _compat, measure

REPO = Path(__file__).resolve().parents[2]

# A worker without a GPU: tasks one to five, of which some end badly.
FAKE = """
import json, os, sys, time
plan = json.load(open(sys.argv[1]))
log = open(plan["log"], "a")
def write(event, key, **values):
    log.write(json.dumps({"event": event, "key": key, **values}) + "\\n"); log.flush()
for key in ("one", "two", "three", "four"):
    if key in plan["done"]: continue
    write("begin", key)
    if key == BAD: ACTION
    write("end", key, result={"threads": plan["threads"]})
write("end", "all", result={})
"""


def run_fake(tmp_path, bad, action, *, task_s=30.0):
    script = tmp_path / "fake.py"
    script.write_text(FAKE.replace("BAD", repr(bad)).replace("ACTION", action))
    plan = worker.Plan(str(tmp_path / "log"), [], [], time.time() + 60, threads=8)
    fake = main.Worker("worker", plan, tmp_path, task_s=task_s)
    fake.command = [sys.executable, str(script)]
    seen = []
    fake.run(lambda: seen.append(len(fake.results)))
    assert seen[-1] == len(fake.results)
    return fake


def test_a_worker_without_trouble_runs_once(tmp_path):
    fake = run_fake(tmp_path, "", "pass")
    assert fake.results.keys() == {"one", "two", "three", "four", "all"}
    assert fake.starts == 1
    assert fake.stopped is None


def test_a_task_that_kills_its_worker_is_blamed_when_it_is_alone(tmp_path):
    fake = run_fake(tmp_path, "two", "os.abort()")
    assert fake.starts == 3  # with threads, then without, then behind the task
    assert fake.results["one"] == {"threads": 8}
    assert fake.results["two"]["failed"] == "the process died: exit code -6"
    assert fake.results["three"] == {"threads": 1}


def test_a_task_that_hangs_is_ended(tmp_path):
    fake = run_fake(tmp_path, "three", "time.sleep(600)", task_s=2.0)
    assert fake.results["three"]["failed"] == "the process was ended: it took more than 2 s"
    assert fake.results["four"] == {"threads": 1}


def test_a_worker_that_has_said_why_is_started_anew(tmp_path):
    action = f'write("end", key, result={{"failed": "fault"}}); sys.exit({worker.FATAL_EXIT})'
    fake = run_fake(tmp_path, "two", action)
    assert fake.starts == 2
    assert fake.results["two"] == {"failed": "fault"}
    assert fake.results["three"] == {"threads": 8}


def test_clocks_that_disagree_end_the_run(tmp_path):
    action = f'write("end", "ceilings", result={{"failed": "6 %"}}); sys.exit({worker.CLOCKS_EXIT})'
    fake = run_fake(tmp_path, "two", action)
    assert fake.starts == 1
    assert fake.stopped == "6 %"
    assert "three" not in fake.results


def test_a_worker_that_never_begins(tmp_path):
    fake = run_fake(tmp_path, "one", "os.abort()")
    assert fake.results["one"]["failed"].startswith("the process died")
    plan = worker.Plan(str(tmp_path / "log2"), [], [], time.time() + 60)
    dead = main.Worker("worker", plan, tmp_path, task_s=9)
    dead.command = [sys.executable, "-c", "raise SystemExit(3)"]
    dead.run(lambda: None)
    assert dead.stopped == "the process ended before its first task: exit code 3"


X = jax.ShapeDtypeStruct((16, 32), jnp.bfloat16)


def square(x):
    return x * x


def toy(label="16 x 32", run=square, **changes):
    fields = {"arguments": (X,), "plain": square, "kind": "memory", "bytes": 2048}
    truth = lambda x: x.astype(np.float64) ** 2  # noqa: E731
    return Case("toy", label, run=run, truth=truth, **{**fields, **changes})


def results_of(tmp_path, cases, monkeypatch, **plan):
    """What a worker that takes this CPU for a GPU writes down."""
    monkeypatch.setattr(measure, "COLD_BYTES", 2**14)
    path = tmp_path / "log"
    fields = {"names": [], "done": [], "deadline": time.time() + 60, "host_clock": True, **plan}
    run = worker._Run(worker.Plan(str(path), **fields), worker.Log(str(path)), cases, True)
    monkeypatch.setattr(sections, "tasks", lambda *args: [])
    monkeypatch.setattr(ceilings, "measure", lambda watch, believe: {"copy": 1.0})
    run.everything()
    run.programs.close()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return {e["key"]: e["result"] for e in events if e["event"] == "end"}


def test_the_worker_checks_and_times_a_case(tmp_path, monkeypatch):
    case = toy(rivals={"cube": lambda x: x * x * x, "sundial": lambda x: x.nothing})
    found = results_of(tmp_path, [case, toy("wrong", run=jnp.abs)], monkeypatch)
    assert found["correct/toy: 16 x 32"]["status"] == "right"
    assert found["correct/toy: wrong"]["status"] == "wrong"
    times = found["time/toy: 16 x 32"]
    assert list(times) == ["ours", "xla", "cube", "sundial"]
    assert times["ours"]["us"] > 0
    assert times["xla"]["clock"] == "host (asked for)"
    assert "away from xla's" in times["cube"]["failed"]
    assert times["sundial"]["failed"].startswith("AttributeError")


def test_what_fails_or_is_done_stops_nothing(tmp_path, monkeypatch):
    def fails(x):
        raise RuntimeError("no kernel\nof that size")

    cases = [toy("done"), toy("bad", run=fails), toy("good")]
    done = ["correct/toy: done", "time/toy: done"]
    found = results_of(tmp_path, cases, monkeypatch, done=done)
    assert found["correct/toy: bad"]["failed"] == "RuntimeError: no kernel of that size"
    assert found["time/toy: bad"]["ours"] == {"failed": "RuntimeError: no kernel of that size"}
    assert found["time/toy: bad"]["xla"]["us"] > 0
    assert found["correct/toy: good"]["status"] == "right"
    assert not any("done" in key for key in found)


def test_a_case_is_timed_before_the_next_few_are_compiled(tmp_path, monkeypatch):
    """So that a run which ends early has whole rows."""
    monkeypatch.setattr(worker, "AT_A_TIME", 2)
    found = results_of(tmp_path, [toy(str(i)) for i in range(5)], monkeypatch)
    keys = [key for key in found if not key.startswith("ceilings")]
    kinds = [key.split("/")[0] for key in keys]
    assert kinds == ["correct", "correct", "time", "time"] * 2 + ["correct", "time"]
    assert list(found).index("ceilings") == 2
    assert found["time/toy: 4"]["ours"]["us"] > 0


def test_nothing_is_begun_behind_the_deadline(tmp_path, monkeypatch):
    found = results_of(tmp_path, [toy()], monkeypatch, deadline=time.time() - 1)
    assert set(map(str, found.values())) == {"{'not_run': 'the time for this run was spent'}"}


def test_a_rival_must_be_what_its_name_says():
    rival = rivals.Rival(square, must_have="__cudnn$norm")
    with pytest.raises(NotImplementedError, match=r"XLA put no __cudnn\$norm into the program"):
        worker._compile((X,), rival)


def test_without_a_gpu_the_smallest_case_of_each_op(monkeypatch):
    cases = [
        toy("large", bytes=9),
        toy("small", bytes=1),
        toy("hidden", bytes=1, compile_only=True),
    ]
    monkeypatch.setattr(worker, "all_cases", lambda names: cases)

    def labels(*args):
        return [case.label for case in worker.chosen(*args)]

    assert labels([], False, False) == ["small"]
    assert labels([], True, True) == ["small", "large"]
    assert labels([], False, True) == ["large", "small"]
    assert labels(["decode"], False, True) == []


def test_the_ops_take_turns_forward_first_from_both_ends():
    def case(op, label, size):
        return Case(op, label, (X,), square, square, "memory", size)

    cases = [case("a", str(n), n) for n in (1, 2, 3)]
    cases += [case("b", "backward", 5), case("b", "9", 9)]
    order = [(c.op, c.label) for c in worker.in_turn(cases)]
    assert order == [("a", "3"), ("b", "9"), ("b", "backward"), ("a", "1"), ("a", "2")]


def test_rows_join_both_workers(monkeypatch):
    case = toy()
    monkeypatch.setattr(main, "chosen", lambda names, quick, on_gpu: [case, toy("other")])

    class Done(main.Worker):
        def __init__(self, results):
            self.results = results

    workers: dict[str, main.Worker] = {
        "worker": Done(
            {
                "device": {"platform": "gpu"},
                "correct/toy: 16 x 32": {"status": "right"},
                "time/toy: 16 x 32": {"ours": {"us": 1.0}},
                "time/toy: other": {"not_run": "no time"},
                "section/layer/512 tokens": {"failed": "x"},
            }
        ),
        "torch_worker": Done({"torch/toy: 16 x 32/liger": {"us": 2.0}, "torch": {"version": "2"}}),
    }
    results = {}
    main.assemble(results, workers, [], False)
    assert results["rows"][0]["times"] == {"ours": {"us": 1.0}, "liger": {"us": 2.0}}
    assert results["rows"][1]["times"] == {"ours": {"not_run": "no time"}}
    assert results["rows"][1]["correct"] == {"not_run": "no result"}
    assert results["sections"] == {"layer/512 tokens": {"failed": "x"}}
    assert results["torch"] == {"version": "2"}


def test_a_name_that_nothing_has(tmp_path, capsys):
    assert main.main(["sundial", "--out", str(tmp_path / "x.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks: nothing is named sundial; there are attention, ")


@pytest.mark.slow
def test_the_smoke_test_of_a_machine_without_a_gpu(tmp_path):
    if jax.default_backend() == "gpu":
        pytest.skip("a GPU is here")
    out = tmp_path / "results" / "x.json"
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--out", str(out), "--no-torch"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "there is no GPU that JAX can use" in result.stdout
    found = json.loads(out.read_text())
    assert found["device"]["platform"] == "cpu"
    assert found["notes"]["gpu"].startswith("no GPU")
    for row in found["rows"]:
        assert row["correct"]["status"] == "right", row
        assert row["times"]["xla"]["us"] > 0, row


TINY = sections.dataclasses.replace(
    QWEN,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    layer_types=(),
)


@pytest.mark.slow
def test_the_sections_run(monkeypatch):
    watch = measure.Stopwatch("host")
    found = sections.layer(TINY, 8, watch)
    assert found["largest_difference"] < 0.1
    assert found["op by op, attention on the host"]["us"] > found["jitted"]["us"]
    found = sections.decode(TINY, "xla", watch, prompt=4, new_tokens=8)
    assert found["tokens_per_s"] > 0
    parameters = 64 * 32 + 3 * 32 + 32 * (32 + 16 + 16) + 64 + 32 * 32 + 3 * 32 * 64
    cached = 2 * 2 * 1 * 16 * (4 + 4)
    assert found["bytes_a_token"] == 2 * parameters + cached
    for cached in (True, False):
        found = sections.prefill(TINY, "xla", 16, cached, watch)
        assert found["layers"] == 1
        assert found["tokens_per_s"] > 0
    found = sections.long_context((1, 32, 4, 2, 16), "xla", watch)
    assert found["forward"]["finite"]
    assert found["forward and backward"]["operations"] == 3.5 * 2 * 4 * 16 * 32 * 32


def test_kernels_are_seen_by_cupti_alone():
    with pytest.raises(ValueError, match="stopwatch: kernels are seen by CUPTI alone: asked for"):
        measure.Stopwatch("host").kernels(jnp.sin, [(jnp.ones(3),)])


def test_the_longest_kernels():
    kernels = [("a", 1.0), ("b", 5.0), ("a", 2.0), ("c", 0.5)]
    assert sections._longest(kernels, 2) == {"b": 5.0, "a": 3.0}


@pytest.mark.slow
def test_the_sections_of_softmax_run_in_the_interpreter():
    if not _compat.INTERPRETS_CUT_COPIES:
        pytest.skip("the interpreter of jax 0.10 copies nothing that passes the end of an array")
    watch = measure.Stopwatch("host")
    found = sections.softmax_fusion((2, 256), watch, interpret=True)
    assert found["largest_difference"] < 0.01
    assert found["model_bytes"] == 2 * 2 * 2 * 256 + 256
    assert found["separate"]["bytes"] > found["model_bytes"]
    found = sections.unfused_attention((1, 64, 1, 16), "float32", watch, interpret=True)
    assert max(timing["apart"] for timing in found["times"].values()) < 1e-5  # float32 throughout


def test_sections_are_chosen_by_name():
    def keys(names, quick=False, on_gpu=True):
        return [key.split("/")[0] for key, _ in sections.tasks(names, quick, on_gpu)]

    assert set(keys([])) == set(sections.SECTIONS)
    assert set(keys(["layer"])) == {"layer"}
    assert "decode" not in keys([], quick=True)
    assert "decode" in keys(["decode"], quick=True)
    assert keys([], on_gpu=False) == []
    assert sections.expand(["rope", "attention", "prefill"]) == [
        *("rope", "flash_attention", "flash_attention_backward", "decode_attention"),
        *("prefill", "long-context"),
    ]
    [two] = [run for key, run in sections.tasks(["prefill"], False, True, 2)][:1]
    assert two.args[0].num_hidden_layers == 2


def test_ceilings_need_a_gpu(tmp_path):
    path = tmp_path / "log"
    plan = worker.Plan(str(path), [], [], time.time() + 60)
    run = worker._Run(plan, worker.Log(str(path)), [], False)
    run.everything()
    assert not path.exists()
    assert ceilings.MATMUL == 8192
