"""Rivals: who is asked, and that those of torch compute what their op means."""

import dataclasses
import functools
import importlib.util
import json
import os
import sys
import time
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import lacking, plan, rivals, torch_rivals, torch_worker, worker
from benchmarks.case import Case
from benchmarks.cases import all_cases, quantized_matmul
from pallas_kernels.measure import Timing


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def case(op, label, *arguments, **kwargs):
    return Case(op, label, arguments, jnp.abs, jnp.abs, "memory", 64, **kwargs)


NORM = case("rms_norm", "4 x 8", struct(4, 8), struct(8))


def test_xla_is_always_there_and_a_cases_own_rivals_too():
    found = rivals.of(dataclasses.replace(NORM, rivals={"triton": jnp.sin}))
    assert found["xla"].run is NORM.plain
    assert found["triton"].run is jnp.sin
    assert found["xla cudnn norm"].must_have == "__cudnn$norm"
    assert found["xla cudnn norm"].options == {"xla_gpu_enable_cudnn_layer_norm": True}


def test_absent_libraries_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = rivals.available()
    assert found.keys() == rivals.LIBRARIES.keys()
    assert set(map(str, found.values())) == {"{'absent': 'not installed'}"}
    assert rivals.of(NORM).keys() == {"xla", "xla cudnn norm"}


def test_a_library_that_does_not_import_fails_its_own_row_alone(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name == "jla" or real(name) is not None or None
    )
    monkeypatch.setitem(sys.modules, "jla", None)
    rival = rivals.of(NORM)["jax-linear-attention"]
    with pytest.raises(RuntimeError, match="ModuleNotFoundError"):
        rival.run(jnp.ones(3))


def test_the_backward_pass_is_timed_alone():
    backward = case("swiglu", "4 x 8, backward", struct(4, 8), struct(4, 8), struct(4, 8))
    rival = rivals._backward(lambda a, b: a * b, backward)
    assert rival.prepare is not None
    a, b, dy = (jnp.full((4, 8), x) for x in (2.0, 3.0, 5.0))
    vjp, cotangents = rival.prepare(a, b, dy)
    da, db = jax.jit(rival.run)(vjp, cotangents)
    assert float(da[0, 0]) == 15.0
    assert float(db[0, 0]) == 10.0


def silu(x):
    return x / (1 + np.exp(-x))


def rotate(x, cos, sin):
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, :, None], sin[:, :, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def softmax(x, keep: Any = True):
    x = np.where(keep, 0.125 * x, -np.inf)
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def rms(x, w):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


X, W = struct(4, 8), struct(8)
BOOL = struct(1, 8, dtype=jnp.bool_)
IDS = struct(2, 3, dtype=jnp.int32)
HEADS = (struct(1, 4, 2, 8), struct(1, 4, 1, 8), struct(1, 4, 3), struct(1, 4, 3))
TORCH = [
    (case("rms_norm", "4 x 8", X, W), lambda x, w: [rms(x, w)]),
    (case("rms_norm", "residual", X, W, X), lambda x, w, r: [rms(x + r, w), x + r]),
    (
        case("layer_norm", "4 x 8", X, W, W),
        lambda x, w, b: [
            (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w + b
        ],
    ),
    (case("scale_softmax", "masked", X, BOOL), lambda x, m: [softmax(x, m)]),
    (case("scale_softmax", "causal", X), lambda x: [softmax(x, np.tri(4, 8, 4, bool))]),
    (
        case("rope", "1 x 4", *HEADS),
        lambda q, k, cos, sin: [rotate(q, cos, sin), rotate(k, cos, sin)],
    ),
    (case("swiglu", "4 x 8", X, X), lambda gate, up: [silu(gate) * up]),
    (case("swiglu", "fused", X), lambda x: [silu(x[:, :4]) * x[:, 4:]]),
    (case("geglu", "4 x 8", X, X), lambda gate, up: [gelu_tanh(gate) * up]),
    (case("embedding", "16 x 8", struct(16, 8), IDS), lambda table, ids: [table[ids]]),
    (
        case("embedding", "scaled", struct(16, 8), IDS, keywords={"scale": 3.0}),
        lambda table, ids: [3 * table[ids]],
    ),
    (case("matmul", "4 x 8 x 6", X, struct(8, 6)), lambda a, b: [a @ b]),
    (case("matmul", "b transposed", X, struct(6, 8)), lambda a, b: [a @ b.T]),
    (case("matmul", "bias", X, struct(8, 6), struct(6)), lambda a, b, c: [a @ b + c]),
    (
        case("matmul", "silu", X, struct(8, 6)),
        lambda a, b: [silu((a @ b)[:, :3]) * (a @ b)[:, 3:]],
    ),
]


@pytest.mark.reference
@pytest.mark.parametrize(("case", "truth"), TORCH, ids=[c.name for c, _ in TORCH])
def test_torch_computes_the_op(case, truth):
    tensors = torch_rivals.arguments(case, 0, "cpu")
    found = torch_rivals.of(case)
    assert found["torch.compile"] is found["torch"]
    out = torch_rivals.call(case, found["torch"], tensors)()
    out = out if isinstance(out, tuple) else (out,)
    arrays = [
        x.numpy().astype(np.float64 if x.is_floating_point() else x.numpy().dtype) for x in tensors
    ]
    for ours, true in zip(out, truth(*arrays), strict=True):
        np.testing.assert_allclose(ours.numpy(), true, atol=1e-5)  # float32 beside float64


BACKWARD = [
    (case("rms_norm", "backward", X, W, X), [(4, 8), (8,)]),
    (case("rms_norm", "residual, backward", X, W, X, X, X), [(4, 8), (8,), (4, 8)]),
    (case("layer_norm", "backward", X, W, W, X), [(4, 8), (8,), (8,)]),
    (case("scale_softmax", "masked, backward", X, BOOL, X), [(4, 8)]),
    (case("rope", "backward", *HEADS, *HEADS[:2]), [(1, 4, 2, 8), (1, 4, 1, 8)]),
    (case("swiglu", "fused, backward", X, struct(4, 4)), [(4, 8)]),
    (case("geglu", "backward", X, X, X), [(4, 8), (4, 8)]),
    (case("embedding", "backward", struct(16, 8), IDS, struct(2, 3, 8)), [(16, 8)]),
]


@pytest.mark.reference
@pytest.mark.parametrize(("case", "shapes"), BACKWARD, ids=[c.name for c, _ in BACKWARD])
def test_torch_has_a_backward_pass_that_can_be_repeated(case, shapes):
    run = torch_rivals.call(
        case, torch_rivals.of(case)["torch"], torch_rivals.arguments(case, 0, "cpu")
    )
    first, second = run(), run()
    assert [tuple(x.shape) for x in first] == shapes
    assert all(bool((a == b).all()) for a, b in zip(first, second, strict=True))


@pytest.mark.reference
def test_the_comparison_with_torch_can_fail():
    with pytest.raises(AssertionError):
        test_torch_computes_the_op(NORM, lambda x, w: [1.01 * rms(x, w)])


def test_torch_gets_ids_that_there_are():
    """Of a loss those of words, also where there are more tokens."""
    pytest.importorskip("torch")
    loss = case(
        *("linear_cross_entropy", "900 x 30 x 8"),
        *(struct(900, 8), struct(30, 8), struct(900, dtype=jnp.int32)),
    )
    targets = torch_rivals.arguments(loss, 0, "cpu")[2]
    assert sorted(set(targets.tolist())) == list(range(30))
    table, ids = struct(64, 2), struct(3000, dtype=jnp.int32)
    for label, first in (("forward", 1 / 64), ("backward", 1 / 6)):  # log 2 / log 64
        found = torch_rivals.arguments(case("embedding", label, table, ids), 0, "cpu")[1]
        assert found.min() == 0
        assert found.max() == 63 if label == "forward" else 63 >= found.max() > 50
        assert abs(float((found == 0).float().mean()) - first) < 0.02


def test_the_rivals_of_an_embedding_scale_too():
    scales = {c.keywords["scale"] for c in all_cases(("embedding",)) if "scaled" in c.label}
    assert None not in scales


def test_ligers_geglu_is_no_rival_of_the_exact_one(monkeypatch):
    pytest.importorskip("torch")
    liger = types.SimpleNamespace(liger_geglu=max, liger_swiglu=min)
    monkeypatch.setattr(torch_rivals, "_liger", lambda: liger)
    assert "liger" in torch_rivals.of(case("geglu", "4 x 8", X, X))
    assert "liger" not in torch_rivals.of(case("geglu", "4 x 8, exact", X, X))


def test_what_scaled_mm_takes_is_made_before_the_clock_starts(monkeypatch):
    torch = pytest.importorskip("torch")
    seen = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **kwargs: seen.append(kwargs))
    made = {c.label: c for c in all_cases(("matmul",))}
    f8: Any = {"dtype": jnp.float8_e4m3fn}
    operands = struct(256, 256, **f8), struct(128, 256, **f8)
    for label, *scales in (
        ("16 x 4096 x 4096 float8_e4m3fn, transposed, blocks", struct(256, 2), struct(1, 2)),
        ("4096 x 4096 x 4096 float8_e4m3fn, transposed",),
    ):
        assert label in made
        small = case("matmul", label, *operands, *scales)
        tensors = torch_rivals.arguments(small, 0, "cpu")
        run = torch_rivals.call(small, torch_rivals.of(small)["torch scaled_mm"], tensors)
        run()
        run()
        first, second = seen[-2:]
        assert first["scale_a"] is second["scale_a"]
        assert first["scale_a"].stride() == ((1, 256) if scales else ())


def test_ligers_rope_gets_angles_of_the_whole_width(monkeypatch):
    torch = pytest.importorskip("torch")
    seen = []

    def liger_rope(q, k, cos, sin):
        seen.append(cos)
        return q * cos[:, None], k * sin[:, None]

    liger = types.SimpleNamespace(liger_rope=liger_rope)
    monkeypatch.setattr(torch_rivals, "_liger", lambda: liger)
    q, k, angles = struct(1, 4, 2, 8), struct(1, 4, 1, 8), struct(1, 4, 4)
    forward = case("rope", "1 x 4", q, k, angles, angles)
    tensors = torch_rivals.arguments(forward, 0, "cpu")
    run = torch_rivals.call(forward, torch_rivals.of(forward)["liger"], tensors)
    run()
    run()
    assert seen[0] is seen[1]
    assert torch.equal(seen[0], torch.cat([tensors[2]] * 2, -1))
    backward = case("rope", "backward", q, k, angles, angles, q, k)
    tensors = torch_rivals.arguments(backward, 0, "cpu")
    grads = torch_rivals.call(backward, torch_rivals.of(backward)["liger"], tensors)()
    assert [tuple(x.shape) for x in grads] == [q.shape, k.shape]


class FakeGemlite:
    """A layer of numbers (code - zero) * scale, a group of columns for each scale."""

    def __init__(self, *, device, dtype):
        self.dtype = dtype

    def from_weights(self, codes, scales, zeros=None):
        import torch

        assert codes.dtype == (torch.int8 if zeros is None else torch.uint8)
        size = codes.shape[1] // scales.shape[1]
        wide = scales.repeat_interleave(size, 1)
        shift = 0 if zeros is None else zeros.repeat_interleave(size, 1)
        return lambda x: x @ ((codes - shift) * wide).to(self.dtype).t()


def as_torch(x):
    import torch

    if jnp.issubdtype(x.dtype, jnp.floating):
        return torch.tensor(np.asarray(x, np.float32)).to(getattr(torch, str(x.dtype)))
    return torch.tensor(np.asarray(x))


@pytest.mark.reference
@pytest.mark.parametrize("how", [("int8",), ("int4",), ("int4", "bfloat16", 32, True)])
def test_gemlite_gets_the_weight_of_the_case(monkeypatch, how):
    import torch

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "gemlite" or real(name))
    helper = types.SimpleNamespace(A16W8_INT8=FakeGemlite, A16W4_HQQ_INT=FakeGemlite)
    monkeypatch.setitem(sys.modules, "gemlite", types.SimpleNamespace(helper=helper))
    of_weight = quantized_matmul._case(3, 96, 256, *how)
    rival = torch_rivals.of(of_weight)["gemlite"]
    arrays = of_weight.inputs(jax.random.key(0))
    tensors = [as_torch(x) for x in arrays]
    out = torch_rivals.call(of_weight, rival, tensors)().float().numpy()
    plain = np.asarray(of_weight.plain(*arrays), np.float32)
    # Numbers of the weight and results are rounded to bfloat16: 2^-9 each
    assert np.linalg.norm(out - plain) < 0.01 * np.linalg.norm(plain)
    tensors[1] = tensors[1].flip(0)
    wrong = torch_rivals.call(of_weight, rival, tensors)().float().numpy()
    assert np.linalg.norm(wrong - plain) > 0.5 * np.linalg.norm(plain)
    made = torch_rivals.arguments(of_weight, 0, "cpu")
    assert [x.dtype for x in made] == [x.dtype for x in tensors]
    assert len(torch.unique(made[1])) == 256
    small: Any = functools.partial(quantized_matmul._case, 1, 96, 256)
    for more in ({"silu": True}, {"words": "residual"}):
        found = torch_rivals.of(small(**more))
        assert list(found) == ["gemlite, product alone"]
    assert torch_rivals.of(small("fp8")) == {}


@pytest.mark.reference
def test_torch_takes_the_arguments_of_every_case():
    """On shapes alone, at full size: what would fail on a GPU for its arguments fails here."""
    import torch

    for case in all_cases():
        if case.compile_only:
            continue
        for name, forward in torch_rivals.of(case).items():
            if name.startswith(("torch.compile", "liger", "torch sdpa")) or "float8" in case.label:
                continue
            tensors = [
                torch.empty(x.shape, dtype=getattr(torch, str(x.dtype)), device="meta")
                for x in case.arguments
            ]
            out = torch_rivals.call(case, forward, tensors)()
            out = out if isinstance(out, tuple) else (out,)
            wanted = jax.tree.leaves(jax.eval_shape(case.plain, *case.arguments))
            shapes = [tuple(x.shape) for x in out]
            assert shapes == [x.shape for x in wanted][: len(shapes)], f"{case.name}: {name}"


def test_torch_begins_with_the_best_rival_of_every_case(monkeypatch):
    table = {"torch sdpa cudnn": 1, "torch sdpa": 2}
    tables = {"a": table, "b": {"torch": 3, "liger": 4, "torch.compile": 5}, "c": {}}
    monkeypatch.setattr(torch_rivals, "of", lambda case: dict(tables[case.op]))
    cases = [case(op, "4 x 8", struct(4, 8)) for op in tables]
    order = [(c.op, name) for c, name, _ in torch_worker.turns(cases, compiled=True)]
    firsts = [("a", "torch sdpa cudnn"), ("b", "torch")]
    assert order == [*firsts, ("a", "torch sdpa"), ("b", "liger"), ("b", "torch.compile")]
    assert len(list(torch_worker.turns(cases, compiled=False))) == 4


def test_the_better_of_two_rounds_counts_for_torch_too(monkeypatch):
    monkeypatch.setattr(torch_rivals, "arguments", lambda *args: [])
    monkeypatch.setattr(torch_rivals, "call", lambda *args: lambda: None)
    left = [5.0, 4.0, 3.0]

    class Watch:
        def time(self, runs, *, cold, calls):
            return Timing(left.pop(0), 0.1, 9.0, "cupti", calls)

    asked, watch = plan.Plan("", [], [], 0.0), Watch()
    assert torch_worker._time(asked, watch, NORM, None)["us"] == 4.0  # type: ignore
    monkeypatch.setattr(torch_worker, "ROUND_S", 0.0)
    left[:] = [5.0, 4.0]
    assert torch_worker._time(asked, watch, NORM, None)["us"] == 5.0  # type: ignore


def test_a_time_of_torch_outlasts_a_round_that_fails(monkeypatch):
    monkeypatch.setattr(torch_rivals, "arguments", lambda *args: [])
    monkeypatch.setattr(torch_rivals, "call", lambda *args: lambda: None)

    def found(*rounds):
        left = list(rounds)

        class Watch:
            def time(self, runs, *, cold, calls):
                if isinstance(us := left.pop(0), str):
                    raise RuntimeError(us)
                return Timing(us, 0.1, 9.0, "cupti", calls)

        return torch_worker._time(plan.Plan("", [], [], 0.0), Watch(), NORM, None)  # type: ignore

    assert found(5.0, "out of memory")["us"] == 5.0
    for rounds in (("out of memory", 5.0), (5.0, "an illegal memory access")):
        with pytest.raises(RuntimeError, match="memory"):
            found(*rounds)


def test_a_task_of_torch_says_what_came_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "_exit", sys.exit)  # at once: an orderly end can hang
    monkeypatch.setattr(torch_worker, "sys", None)
    path = tmp_path / "log"
    asked = plan.Plan(str(path), [], ["done"], time.time() + 60)
    log = worker.Log(str(path))

    def do(key, error=None):
        def work():
            if error is not None:
                raise RuntimeError(error)
            return {"us": 1.0}

        torch_worker.task(asked, log, key, work)

    do("done")
    do("good")
    do("bad", "no kernel\nof that size")
    for key, error in (
        ("fatal", "CUDA error: an illegal memory access was encountered"),
        ("assert", "CUDA error: device-side assert triggered"),
        ("cublas", "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx("),
    ):
        with pytest.raises(SystemExit, match=str(worker.FATAL_EXIT)):
            do(key, error)
    asked.deadline = 0.0
    do("late")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [e["key"] for e in events if e["event"] == "begin"] == [
        *("good", "bad", "fatal", "assert", "cublas")
    ]
    ends = {e["key"]: e["result"] for e in events if e["event"] == "end"}
    assert list(ends) == ["good", "bad", "fatal", "assert", "cublas", "late"]
    assert ends["good"] == {"us": 1.0}
    assert ends["bad"] == {"failed": "RuntimeError: no kernel of that size"}
    assert "illegal memory access" in ends["fatal"]["failed"]
    assert ends["late"] == lacking.SPENT
