"""The command: workers that die are started anew, results survive, a machine without a GPU."""

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as main
from benchmarks import (
    ceilings,
    compiling,
    lacking,
    plan,
    rivals,
    sections,
    torch_rivals,
    torch_training,
    worker,
)
from benchmarks.case import Case
from benchmarks.cases import all_cases
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
    asked = plan.Plan(str(tmp_path / "log"), [], [], time.time() + 60, threads=8)
    fake = main.Worker("worker", asked, tmp_path, task_s=task_s)
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
    asked = plan.Plan(str(tmp_path / "log2"), [], [], time.time() + 60)
    dead = main.Worker("worker", asked, tmp_path, task_s=9)
    dead.command = [sys.executable, "-c", "raise SystemExit(3)"]
    dead.run(lambda: None)
    assert dead.stopped == "the process ended before its first task: exit code 3"


# The command, with a worker that has started a process of its own, says so and sleeps
ENDED = """
import json, os, pathlib, signal, sys, tempfile, time
from benchmarks import __main__ as main
from benchmarks import plan
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup
main.end_in_order()
with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
    asked = plan.Plan(f"{folder}/log", [], [], time.time() + 600)
    worker = main.Worker("worker", asked, pathlib.Path(folder), task_s=600)
    started = "import os, subprocess, sys, time; "
    started += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    started += "print(os.getpid(), child.pid, flush=True); time.sleep(600)"
    worker.command = [sys.executable, "-c", started]
    worker.run(lambda: None)
"""


def is_there(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks /proc who is there")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_who_ends_the_command_ends_its_worker(tmp_path, number):
    command = [sys.executable, "-c", ENDED, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            pids = process.stdout.readline().split()
            assert len(list(tmp_path.iterdir())) == 1
            assert all(map(is_there, pids))
            process.send_signal(number)
            assert process.wait(60) == 128 + number
        finally:
            process.kill()
    end = time.time() + 30
    while any(map(is_there, pids)) and time.time() < end:
        time.sleep(0.1)
    assert not any(map(is_there, pids))
    assert list(tmp_path.iterdir()) == []


def test_a_worker_takes_stage_after_stage(tmp_path):
    """A later stage is not ended by the first, and its tasks are blamed as well."""
    fake = run_fake(tmp_path, "", "pass")
    (tmp_path / "fake.py").write_text(
        FAKE.replace("BAD", '"five"').replace("ACTION", "os.abort()").replace('"four"', '"five"')
    )
    fake.run(lambda: None)
    assert fake.results["five"]["failed"] == "the process died: exit code -6"
    assert fake.results.keys() == {"one", "two", "three", "four", "five", "all"}


def test_training_takes_turns_and_the_main_case_is_first(monkeypatch):
    def chosen(plan, on_gpu):
        ops = [name for name in plan.names if name in ("rope", "gemv")]
        return [types.SimpleNamespace(op=op) for op in ops if plan.takes(f"{op}: x")]

    monkeypatch.setattr(main, "chosen", chosen)
    torch_keys = [("train/torch.compile", None), ("train/lora-8b, PEFT", None)]
    monkeypatch.setattr(
        torch_training, "tasks", lambda names: torch_keys if "train" in names else []
    )

    def turns(names, *, with_torch=True, **changes):
        asked = plan.Plan("", names, [], 0.0, **changes)
        found = main.turns(asked, 100.0, with_torch=with_torch)
        return [(module, part.stage, part.deadline) for module, part in found]

    train = [
        ("worker", 1, 100.0),
        ("torch_worker", 1, 100.0),
        ("worker", 2, 100.0),
        ("torch_worker", 2, 100.0),
        ("worker", 3, 100.0),
    ]
    assert turns(["train"], only="^train/") == train
    assert turns(["rope"]) == [("worker", 0, 72.0), ("torch_worker", 0, 100.0)]
    assert turns(["rope"], with_torch=False) == [("worker", 0, 100.0)]
    assert turns(["gemv"]) == [("worker", 0, 100.0)]  # in which torch has no rival
    both = [("worker", 0, 36.0), ("torch_worker", 0, 50.0), *train]
    assert turns(["rope", "train"]) == both
    alone = [("worker", 1, 100.0), ("torch_worker", 1, 100.0)]  # ours says what device there is
    assert turns(["train"], only="torch.compile") == alone


X = jax.ShapeDtypeStruct((16, 32), jnp.bfloat16)


def square(x):
    return x * x


def toy(label="16 x 32", run=square, **changes):
    fields = {"arguments": (X,), "plain": square, "kind": "memory", "bytes": 2048}
    fields["truth"] = lambda x: x.astype(np.float64) ** 2
    return Case("toy", label, run=run, **{**fields, **changes})


def results_of(tmp_path, cases, monkeypatch, work=(), **changes):
    """What a worker that takes this CPU for a GPU writes down."""
    monkeypatch.setattr(measure, "COLD_BYTES", 2**14)
    path = tmp_path / "log"
    fields = {"names": [], "done": [], "deadline": time.time() + 60, "host_clock": True}
    asked = plan.Plan(str(path), **{**fields, "threads": 2, **changes})  # too few for processes
    run = worker._Run(asked, worker.Log(str(path)), cases, True)
    monkeypatch.setattr(sections, "tasks", lambda *args: work)
    monkeypatch.setattr(ceilings, "measure", lambda watch, believe: {"copy": 1.0})
    run.everything()
    run.programs.close()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    found = {e["key"]: e["result"] for e in events if e["event"] == "end"}
    due = found.pop(lacking.FURTHER, {"cases": []})["cases"]
    assert {key for key in found if key.startswith("rivals/")} <= {f"rivals/{x}" for x in due}
    spent = found.pop(f"spent/{os.getpid()}", {})
    assert all(seconds >= 0 for seconds in spent.values())
    return found


def test_the_worker_checks_and_times_a_case(tmp_path, monkeypatch):
    case = toy(rivals={"cube": lambda x: x * x * x, "sundial": lambda x: x.nothing})
    found = results_of(tmp_path, [case, toy("wrong", run=jnp.abs)], monkeypatch)
    assert found["correct/toy: 16 x 32"]["status"] == "right"
    assert found["correct/toy: wrong"]["status"] == "wrong"
    times = found["time/toy: 16 x 32"]
    assert list(times) == ["ours", "xla"]
    assert times["ours"]["us"] > 0
    assert times["xla"]["clock"] == "host (asked for)"
    times = found["rivals/toy: 16 x 32"]
    assert list(times) == ["cube", "sundial"]
    assert "away from xla's" in times["cube"]["failed"]
    assert times["sundial"]["failed"].startswith("AttributeError")


def test_what_a_case_reads_of_its_inputs_is_what_a_cache_must_not_hold(tmp_path, monkeypatch):
    told = []
    time = measure.Stopwatch.time

    def timed(self, *args, call_bytes, **kwargs):
        told.append(call_bytes)
        return time(self, *args, **kwargs)

    monkeypatch.setattr(measure.Stopwatch, "time", timed)
    results_of(tmp_path, [toy(bytes=96)], monkeypatch)
    assert set(told) == {96}


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


def test_what_leaves_the_gpu_unusable_ends_the_process_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "_exit", sys.exit)  # an orderly end can hang
    monkeypatch.setattr(worker, "sys", None)
    path = tmp_path / "log"
    asked = plan.Plan(str(path), [], [], time.time() + 60)
    run = worker._Run(asked, worker.Log(str(path)), [], False)

    def fails():
        raise RuntimeError("INTERNAL: CUDA error: CUDA_ERROR_ASSERT: device-side assert triggered")

    with pytest.raises(SystemExit, match=str(worker.FATAL_EXIT)):
        run.task("bad", fails)
    assert "CUDA_ERROR_ASSERT" in json.loads(path.read_text().splitlines()[-1])["result"]["failed"]


@pytest.mark.parametrize(("turn", "stays"), [(1, False), (3, True)])
def test_a_time_outlasts_a_round_that_fails(tmp_path, monkeypatch, turn, stays):
    time_once, turns = measure.Stopwatch.time, iter(range(1, 9))  # xla, ours, and again

    def timed(self, *args, **kwargs):
        if next(turns) == turn:
            raise RuntimeError("no memory left")
        return time_once(self, *args, **kwargs)

    monkeypatch.setattr(measure.Stopwatch, "time", timed)
    times = results_of(tmp_path, [toy()], monkeypatch)["time/toy: 16 x 32"]
    assert next(turns) == (5 if stays else 4)
    assert times["ours"]["us"] > 0
    if stays:
        assert times["xla"]["us"] > 0
    else:
        assert times["xla"] == {"failed": "RuntimeError: no memory left"}


def test_what_is_cheap_comes_first(tmp_path, monkeypatch):
    """Every case's own time before any of the rivals that take longer to compile."""
    cases = [toy(str(i), rivals={"same": square, "cudnn": square}) for i in range(3)]
    found = results_of(tmp_path, cases, monkeypatch)
    kinds = [key.split("/")[0] for key in found]
    assert kinds == [*["correct"] * 3, "ceilings", *["time"] * 3, *["rivals"] * 3]
    assert list(found["time/toy: 2"]) == ["ours", "xla", "cudnn"]
    assert list(found["rivals/toy: 2"]) == ["same"]


def test_what_is_ready_is_timed_before_more_is_compiled(tmp_path, monkeypatch):
    """So that a run which ends early has whole rows."""
    monkeypatch.setattr(worker, "COMPILE_S", 0.0)
    compile_here = compiling.compile_here

    def slowly(*arguments):
        time.sleep(0.2)
        return compile_here(*arguments)

    monkeypatch.setattr(compiling, "compile_here", slowly)
    found = results_of(tmp_path, [toy(str(i)) for i in range(3)], monkeypatch, threads=1)
    kinds = [key.split("/")[0] for key in found if key != "ceilings"]
    assert sorted(kinds) == ["correct"] * 3 + ["time"] * 3
    assert kinds.index("time") < 3
    assert all(found[f"time/toy: {i}"]["ours"]["us"] > 0 for i in range(3))


def test_a_long_call_is_repeated_less_often(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "TIMED_S", 0.0)
    found = results_of(tmp_path, [toy()], monkeypatch)
    assert found["time/toy: 16 x 32"]["ours"]["calls"] == worker.FEW_CALLS


@pytest.mark.parametrize(("run", "status"), [(square, "compared"), (jnp.abs, "wrong")])
def test_what_is_too_large_for_a_host_is_compared_with_the_plain_path(
    tmp_path, monkeypatch, run, status
):
    monkeypatch.setattr(plan, "CHECK_BYTES", 100)
    found = results_of(tmp_path, [toy(run=run)], monkeypatch)["correct/toy: 16 x 32"]
    assert found["status"] == status
    assert found["truth"] == "plain"
    assert (found["error"] < 0.02) == (status == "compared")


def test_nothing_is_begun_behind_the_deadline(tmp_path, monkeypatch):
    found = results_of(tmp_path, [toy()], monkeypatch, deadline=time.time() - 1)
    assert set(map(str, found.values())) == {"{'not_run': 'the time for this run was spent'}"}


def test_ceilings_are_measured_in_the_time_that_is_kept_for_whole_models(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "LATE_S", 100.0)  # more than there is
    model = ("decode/xla", lambda watch: {"tokens_per_s": 9.0})
    found = results_of(tmp_path, [toy()], monkeypatch, work=[model])
    assert found["time/toy: 16 x 32"] == lacking.SPENT
    assert found["ceilings"] == {"copy": 1.0}
    assert found["section/decode/xla"] == {"tokens_per_s": 9.0}


def test_a_truth_of_another_shape_is_told_in_its_own_row(tmp_path, monkeypatch):
    cases = [toy("good"), toy("bad", truth=lambda x: np.ones((3, 5)))]
    found = results_of(tmp_path, cases, monkeypatch)
    assert found["correct/toy: good"]["status"] == "right"
    assert found["correct/toy: bad"]["failed"].startswith("ValueError: ")
    assert found["time/toy: bad"]["ours"]["us"] > 0


def test_a_rival_must_be_what_its_name_says():
    rival = rivals.Rival(square, must_have="__cudnn$norm")
    with pytest.raises(NotImplementedError, match=r"XLA put no __cudnn\$norm into the program"):
        compiling.compile_here((X,), rival)


def test_without_a_gpu_the_smallest_case_of_each_op(monkeypatch):
    cases = [
        toy("large", bytes=9),
        toy("small", bytes=1),
        toy("hidden", bytes=1, compile_only=True),
    ]
    monkeypatch.setattr(plan, "all_cases", lambda names: cases)

    def labels(names, on_gpu, **changes):
        asked = plan.Plan("", names, [], 0.0, **changes)
        return [case.label for case in plan.chosen(asked, on_gpu)]

    assert labels([], False) == ["small"]
    assert labels([], True, quick=True) == ["small", "large"]
    assert labels([], True) == ["large", "small"]
    assert labels(["decode"], True) == []
    assert labels([], True, only="^toy: l") == ["large"]
    assert labels([], False, only="large|hidden") == ["large"]
    monkeypatch.setattr(plan, "CHECK_BYTES", 1)
    assert labels([], False, only="large|hidden") == []  # a host would take long
    assert labels([], True, have=["toy: large"]) == ["small"]
    monkeypatch.undo()
    monkeypatch.setattr(plan, "all_cases", lambda names: cases)
    assert labels([], False, have=["toy: small"]) == ["small"]  # a smoke test is no rest of a run


def test_the_ops_take_turns_forward_first_as_their_files_have_them():
    def case(op, label, size):
        return Case(op, label, (X,), square, square, "memory", size)

    cases = [case("a", str(n), n) for n in (1, 3, 2)]
    cases += [case("b", "backward", 5), case("b", "9", 9)]
    order = [(c.op, c.label) for c in plan.in_turn(cases)]
    assert order == [("a", "1"), ("b", "9"), ("b", "backward"), ("a", "3"), ("a", "2")]


def test_attention_begins_with_what_matters_most():
    cases = plan.in_turn([c for c in all_cases(("flash_attention",)) if not c.compile_only])
    assert [c.arguments[0].shape[1] for c in cases[:6]] == [1024 * 2**i for i in range(6)]
    assert all(c.arguments[0].shape[2:] == (32, 128) for c in cases[:6])


def test_rows_join_both_workers(monkeypatch):
    case = toy()
    monkeypatch.setattr(main, "chosen", lambda plan, on_gpu: [case, toy("other")])

    class Done(main.Worker):
        def __init__(self, results):
            self.results, self.seconds = results, 5.04

    workers: dict[str, main.Worker] = {
        "worker": Done(
            {
                "device": {"platform": "gpu"},
                "correct/toy: 16 x 32": {"status": "right"},
                "time/toy: 16 x 32": {"ours": {"us": 1.0}},
                "rivals/toy: 16 x 32": {"triton": {"us": 3.0}},
                "time/toy: other": {"not_run": "no time"},
                "rivals/toy: other": {"not_run": "no time"},
                "spent/7": {"compiling": 2.0, "timing": 1.0},
                "spent/8": {"compiling": 1.5},
                "section/layer/512 tokens": {"failed": "x"},
            }
        ),
        "torch_worker": Done({"torch/toy: 16 x 32/liger": {"us": 2.0}, "torch": {"version": "2"}}),
    }
    results = {}
    main.assemble(results, workers, plan.Plan("", ["layer"], [], 0.0))
    times = {"ours": {"us": 1.0}, "triton": {"us": 3.0}, "liger": {"us": 2.0}}
    assert results["rows"][0]["times"] == times
    assert results["rows"][0]["dtype"] == "bfloat16"
    late = {"not_run": "no time"}
    assert results["rows"][1]["times"] == {"ours": late, "further rivals": late}
    assert results["spent_s"] == {"compiling": 3.5, "timing": 1.0, "jax": 5.0, "torch": 5.0}
    assert results["rows"][1]["correct"] == {"not_run": "no result"}
    assert results["sections"] == {"layer/512 tokens": {"failed": "x"}}
    assert results["torch"] == {"version": "2"}


def test_a_run_that_was_interrupted_is_not_complete(monkeypatch):
    cases = [toy("both"), toy("ours alone"), toy("of torch")]
    monkeypatch.setattr(main, "chosen", lambda plan, on_gpu: cases)
    monkeypatch.setattr(torch_rivals, "OPS", {"toy": None})

    class Ended(main.Worker):
        def __init__(self, results):
            self.results, self.seconds = results, 1.0

    timed = {"ours": {"us": 1.0}, "xla": {"us": 2.0}}
    found: dict = {"device": {"platform": "gpu"}, lacking.FURTHER: {"cases": ["toy: both"]}}
    for case in cases:
        found |= {f"correct/{case.name}": {"status": "right"}, f"time/{case.name}": timed}
    workers: dict[str, main.Worker] = {"worker": Ended(found)}

    def complete(**changes):
        results: dict = {}
        main.assemble(results, workers, plan.Plan("", [], [], 0.0), **changes)
        return lacking.complete(results)

    assert complete() == ["toy: ours alone", "toy: of torch"]
    found["rivals/toy: both"] = {"triton": {"us": 3.0}}
    assert complete() == [case.name for case in cases]
    assert complete(with_torch=True) == []  # its worker never ran
    ran: dict = {"torch/toy: of torch/torch": {"us": 1.0}}
    workers["torch_worker"] = Ended(ran)
    assert complete(with_torch=True) == []  # it had more to do
    ran["all"] = {}
    assert complete(with_torch=True) == [case.name for case in cases]
    workers["torch_worker"] = Ended({"torch": {"failed": "torch sees no GPU"}})
    assert complete(with_torch=True) == [case.name for case in cases]


def test_sections_that_a_run_did_not_come_to_are_missing(monkeypatch):
    monkeypatch.setattr(main, "chosen", lambda plan, on_gpu: [])
    monkeypatch.setattr(
        torch_training, "tasks", lambda names: [("train/torch", None)] * ("train" in names)
    )

    class Ended(main.Worker):
        def __init__(self, results):
            self.results, self.seconds = results, 1.0

    done = {"section/layer/512 tokens": {"us": 1.0}}
    workers: dict[str, main.Worker] = {"worker": Ended({"device": {"platform": "gpu"}, **done})}
    asked = plan.Plan("", ["layer", "long-context", "train"], [], 0.0)

    def sections_of(**changes):
        results: dict = {}
        main.assemble(results, workers, asked, **changes)
        assert results["sections"].pop("layer/512 tokens") == {"us": 1.0}
        assert all(found == lacking.NO_RESULT for found in results["sections"].values())
        return results

    found = sections_of(with_torch=True)
    assert {"long-context/cudnn", "train/none, 1 part", "train/torch"} <= found["sections"].keys()
    assert set(lacking.names_of(found)) == {"long-context", "train"}
    assert "train/torch" not in sections_of()["sections"]
    workers["torch_worker"] = Ended({"torch": {"failed": "torch sees no GPU"}})
    assert "train/torch" not in sections_of(with_torch=True)["sections"]
    workers["worker"] = Ended({"device": {"platform": "cpu"}, **done})
    assert sections_of()["sections"] == {}


def test_a_command_is_written_down_as_it_was_given_but_for_where_files_are():
    given = ["rope", "--only", "4 / 1 heads", "--out=a/b/x.json", "--missing", "./c/y.json"]
    words = list(main._words(main._arguments(given), given))
    assert words == ["rope", "--only", "4 / 1 heads", "--out=x.json", "--missing", "y.json"]


@pytest.mark.parametrize("bad", range(3))
def test_a_result_that_is_no_number_is_not_near(bad):
    plain = [jnp.ones(3)] * 3
    ours = [x.at[1].set(jnp.nan) if i == bad else x for i, x in enumerate(plain)]
    assert worker._apart(plain, plain) == 0.0
    assert np.isnan(worker._apart(ours, plain))


def test_a_name_that_nothing_has(tmp_path, capsys):
    assert main.main(["sundial", "--out", str(tmp_path / "x.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks: nothing is named sundial; there are attention, ")


def test_options_that_leave_nothing_or_make_no_sense(tmp_path, capsys):
    out = ["--out", str(tmp_path / "x.json")]
    assert main.main(["rope", "--only", "sundial", *out]) == 2
    assert "--only and --missing leave nothing to run" in capsys.readouterr().err
    assert main.main(["rope", "--only", "(", *out]) == 2
    assert "--only '(' is no regular expression" in capsys.readouterr().err
    for name, value, why in (
        ("--layers", "0", "at least 1, got 0"),
        ("--threads", "0", "at least 1, got 0"),
        ("--budget-s", "-5", "a positive number, got -5"),
        ("--task-s", "nan", "a positive number, got nan"),
    ):
        assert main.main(["rope", f"{name}={value}", *out]) == 2
        assert capsys.readouterr().err == f"benchmarks: {name} must be {why}\n"
    (tmp_path / "other.json").write_text("{}")
    for name, why in (("none", "cannot be read as results"), ("other", "is no file that python")):
        path = tmp_path / f"{name}.json"
        assert main.main(["--missing", str(path), *out]) == 2
        assert capsys.readouterr().err.startswith(f"report: {path} {why}")
    assert main.main(["rope", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"benchmarks: --out {tmp_path} is a folder; give a file\n"


SIZES = {"kind": "memory", "bytes": 1, "operations": 0}


def results_file(**changes):
    whole = {"date": "2026-11-24", "gpu": {}, "versions": {}, "libraries": {}}
    return {**whole, "rows": [], "sections": {}, **changes}


def test_a_second_run_takes_what_the_first_has_not_had_the_time_for(tmp_path):
    cases = [c for c in all_cases(("rope",)) if not c.compile_only][:4]
    timed = {"ours": {"us": 1.0}, "xla": {"us": 1.0}}
    rows = [
        {"op": c.op, "label": c.label, "correct": {"status": "right"}, "times": times, **SIZES}
        for c, times in zip(
            cases,
            (
                timed,
                {**timed, "torch": lacking.SPENT},
                {"ours": lacking.NO_RESULT},
                {"ours": {"failed": "x"}, "xla": {"not_run": "its scores do not fit in memory"}},
            ),
            strict=True,
        )
    ]
    sections_found = {"layer/512 tokens": {"jitted": {"us": 1.0}}, "decode/xla": lacking.SPENT}
    path = tmp_path / "first.json"
    path.write_text(json.dumps(results_file(rows=rows, sections=sections_found)))
    out = str(tmp_path / "x.json")
    asked = main._plan(main._arguments(["--missing", str(path), "--out", out]))
    assert asked.names == ["rope", "layer", "decode"]
    taken = [c.name for c in plan.chosen(asked, True)]
    assert {cases[1].name, cases[2].name} <= set(taken)
    assert not {cases[0].name, cases[3].name} & set(taken)
    assert "decode/xla" in main._sections(asked, "worker")
    assert "layer/512 tokens" not in main._sections(asked, "worker")
    named = main._plan(main._arguments(["rope", "--missing", str(path), "--out", out]))
    assert named.names == ["rope"]


def test_a_prefill_of_other_layers_is_missing_too(tmp_path):
    path = tmp_path / "first.json"
    found = {"prefill/pallas": {"layers": 8}, "prefill/cudnn": {"failed": "x"}}
    path.write_text(json.dumps(results_file(sections=found)))

    def missing(*options):
        arguments = ["--missing", str(path), "--out", str(tmp_path / "x.json"), *options]
        return main._sections(main._plan(main._arguments(arguments)), "worker")

    assert missing("--layers", "8") == ["prefill/pallas, no cache", "prefill/cudnn, no cache"]
    assert "prefill/pallas" in missing()


def test_a_run_does_not_overwrite_what_it_is_to_complete(tmp_path, capsys):
    path, link = tmp_path / "first.json", tmp_path / "link.json"
    text = json.dumps(results_file(sections={"decode/xla": {}}))
    path.write_text(text)
    link.symlink_to(path)
    for out in (path, link):
        assert main.main(["--missing", str(path), "--out", str(out)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"benchmarks: --out {out} is what --missing is to complete, and")
        assert path.read_text() == text


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, capsys):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "x.json"
    assert main.main(["rope", "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"benchmarks: --out {out} cannot be written: File exists\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt, 130, "benchmarks: interrupted; {} has 1 rows with a time\n"),
        (BrokenPipeError, 141, ""),
    ],
)
def test_an_interrupt_and_a_closed_pipe_are_no_traceback(
    tmp_path, monkeypatch, capfd, error, code, said
):
    def measured(args, plan, results, *, with_torch):
        results["rows"] = [{"times": {"ours": {"us": 1.0}}}, {"times": {"ours": lacking.NO_RESULT}}]
        raise error

    monkeypatch.setattr(main, "_measure", measured)
    out = tmp_path / "x.json"
    assert main.main(["rope", "--out", str(out)]) == code
    assert capfd.readouterr().err == said.format(out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stopped", [(), ("torch_worker",), ("worker", "torch_worker")])
def test_a_worker_that_was_given_up_is_named_and_the_command_ends_with_1(
    tmp_path, monkeypatch, capsys, stopped
):
    class Ended(main.Worker):
        def run(self, on_change):
            self.results["device"] = {"platform": "gpu"}
            self.stopped = "given up after 12 starts" if self.module in stopped else None
            on_change()

    asked = plan.Plan("", ["layer"], [], 0.0)
    turns = [(module, sections.dataclasses.replace(asked)) for module in main.MODULES]
    monkeypatch.setattr(main, "turns", lambda *args, with_torch: turns)
    monkeypatch.setattr(main, "Worker", Ended)
    kept, out = tmp_path / "x.part", tmp_path / "x.json"
    kept.write_text("a file of somebody else's")
    args = main._arguments(["layer", "--out", str(out)])
    code = main._measure(args, asked, results_file(notes={}), with_torch=True)
    assert code == int(bool(stopped))
    lines = [f"benchmarks: {module}: given up after 12 starts\n" for module in stopped]
    assert capsys.readouterr().err == "".join(lines)
    assert json.loads(out.read_text())["notes"].keys() == set(stopped)
    assert kept.read_text() == "a file of somebody else's"
    assert {path.name for path in tmp_path.iterdir()} == {"x.json", "x.part"}


def test_the_gpu_is_the_first_that_cuda_shows(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "card $3, 580.1"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for shown, first in ((None, "0"), ("2,0", "2"), ("GPU-8f, GPU-9a", "GPU-8f")):
        if shown is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert main.gpu() == {"name": f"card --id={first}", "driver": "580.1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main.gpu() == {}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for text in ("#!/bin/sh\n", "#!/bin/sh\nexit 6\n"):
        program.write_text(text)
        assert main.gpu() == {}


@pytest.mark.parametrize("given", [None, "FASTEST_FIRST"])
def test_workers_count_gpus_as_nvidia_smi_does(tmp_path, monkeypatch, given):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", given)
    action = 'write("end", "order", result={"is": os.environ["CUDA_DEVICE_ORDER"]})'
    found = run_fake(tmp_path, "two", action).results["order"]
    assert found == {"is": given or "PCI_BUS_ID"}


@pytest.mark.slow
def test_the_smoke_test_of_a_machine_without_a_gpu(tmp_path):
    if jax.default_backend() == "gpu":
        pytest.skip("a GPU is here")
    out = tmp_path / "results" / "x.json"
    options = ["--no-torch", "--budget-s", "3600"]  # on a busy machine some have no time else
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--out", str(out), *options],
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
        if row["op"] == "linear_cross_entropy":  # its plain path rounds as the kernel does
            assert "not_run" in row["times"]["xla"], row
        else:
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
def test_the_sections_run():
    watch = measure.Stopwatch("host")
    found = sections.layer(TINY, 8, watch)
    assert found["largest_difference"] < 0.1
    assert min(found[how]["us"] for how in ("op by op, attention on the host", "jitted")) > 0
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

    assert set(keys([])) == set(sections.SECTIONS) - set(sections.BY_NAME)
    for name in sections.BY_NAME:
        assert set(keys([name], quick=True)) == {name}
    assert set(keys(sections.expand(["decoding"]))) == {
        *("decode", "packed-decode", "decode-heads", "decode-gemma", "cuda-graphs", "step-kernels")
    }
    assert set(keys(["layer"])) == {"layer"}
    assert "decode" not in keys([], quick=True)
    assert "decode" in keys(["decode"], quick=True)
    assert keys([], on_gpu=False) == []
    attention = sections.GROUPS["attention"]
    assert {"flash_attention", "decode_attention", "prefill"} < set(attention)
    assert sections.expand(["rope", "attention", "prefill"]) == ["rope", *attention]
    [two] = [run for key, run in sections.tasks(["prefill"], False, True, 2)][:1]
    assert two.args[0].num_hidden_layers == 2


def test_ceilings_need_a_gpu(tmp_path):
    path = tmp_path / "log"
    asked = plan.Plan(str(path), [], [], time.time() + 60)
    run = worker._Run(asked, worker.Log(str(path)), [], False)
    run.everything()
    assert not path.exists()
    assert ceilings.MATMUL == 8192
