"""What is read of a profiler's trace, here made-up ones."""

import gzip
import json
import os

import pytest

from jaxllm.trace import Kernel, longest

GPU, HOST = 1, 2
STREAM, DERIVED, THREAD = 10, 11, 12


def named(pid, name, tid=None):
    kind = "process_name" if tid is None else "thread_name"
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def ran(name, us, path="", *, pid=GPU, tid=STREAM, **facts):
    facts = {"hlo_op": name, "name": path, **facts}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "dur": us, "args": facts}


def write(folder, *events, at=1):
    file = folder / f"plugins/profile/{at}/host.trace.json.gz"
    file.parent.mkdir(parents=True, exist_ok=True)
    names = [
        named(GPU, "/device:GPU:0"),
        named(GPU, "Stream #13(Compute)", STREAM),
        named(GPU, "XLA Ops", DERIVED),
        named(HOST, "/host:CPU"),
        named(HOST, "tf_XLAEigen/7", THREAD),
    ]
    with gzip.open(file, "wt", encoding="utf-8") as stream:
        json.dump({"traceEvents": [*events, *names]}, stream)
    os.utime(file, (at, at))


def test_launches_are_added_up_and_the_longest_come_first(tmp_path):
    write(
        tmp_path,
        ran("gemm", 5.0, "jit(step)/transpose(jvp(loss))/layer_3/mlp/dot_general"),
        ran("softmax", 9.0, "jit(step)/while/body/closed_call/checkpoint/layer_0/attention/exp"),
        ran("gemm", 6.0, "jit(step)/layer_4/mlp/dot_general"),
        ran("copy", 1.0),
    )
    kernels = [
        Kernel("gemm", "layer_3/mlp", 2, 11.0),
        Kernel("softmax", "layer_0/attention", 1, 9.0),
        Kernel("copy", "", 1, 1.0),
    ]
    assert longest(tmp_path) == kernels
    assert longest(tmp_path, 2) == kernels[:2]


def test_a_gpus_kernels_count_on_their_stream_alone(tmp_path):
    write(
        tmp_path,
        ran("gemm", 5.0),
        ran("gemm", 5.0, tid=DERIVED),
        ran("add", 2.0, pid=HOST, tid=THREAD),
        {"ph": "X", "pid": HOST, "tid": THREAD, "name": "python", "dur": 99.0},
    )
    assert longest(tmp_path) == [Kernel("gemm", "", 1, 5.0), Kernel("add", "", 1, 2.0)]


def test_the_newest_trace_counts(tmp_path):
    for at in (2, 3, 1):
        write(tmp_path, ran(f"of_{at}", 1.0), at=at)
    assert [kernel.name for kernel in longest(tmp_path)] == ["of_3"]


def test_a_folder_without_a_trace(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no \*\.trace\.json\.gz here$"):
        longest(tmp_path)
