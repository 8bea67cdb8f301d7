"""Which implementation runs: asked, never tried; a name is taken or refused; told once."""

import dataclasses
import functools
import importlib
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_device import absent
from jax import export

from jaxllm import ops
from jaxllm.ops import _select
from jaxllm.ops._select import Implementation, select
from pallas_kernels.device import why_not_interpreted


def refuse(x: Any, *, device: Any, **kwargs: Any) -> str | None:
    return None if device.platform == "gpu" and x > 0 else f"needs a GPU and more than {x}"


def fail(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("the kernel has a bug")


TABLE = {
    "fast": Implementation(lambda x: "fast", refuse),
    "xla": Implementation(lambda x: "xla"),
}


@pytest.mark.parametrize(
    ("device", "x", "taken"),
    [("NVIDIA H200", 1, "fast"), ("NVIDIA H200", 0, "xla"), ("cpu", 1, "xla")],
)
@pytest.mark.parametrize("implementation", ["auto", {}, {"glu": "xla"}, {"attention": "auto"}])
def test_auto_takes_the_first_entry_without_a_reason(implementation, device, x, taken):
    with absent(device, platform="cpu" if device == "cpu" else "gpu"):
        assert select("attention", TABLE, implementation, x)(x) == taken


def test_a_name_takes_its_entry():
    with absent("NVIDIA H200"):  # where "auto" would take another one
        assert select("attention", TABLE, "xla", 1)(1) == "xla"
        assert select("attention", TABLE, {"attention": "xla"}, 1)(1) == "xla"


def test_a_name_never_falls_back():
    with pytest.raises(
        NotImplementedError,
        match="attention: 'fast' cannot run this call: needs a GPU and more than 1",
    ):
        select("attention", TABLE, "fast", 1)


@pytest.mark.parametrize("implementation", ["fats", {"attention": "fats"}])
def test_an_unknown_name_is_told_the_names(implementation):
    with pytest.raises(
        ValueError, match="attention: no implementation is named 'fats'; there are fast, xla"
    ):
        select("attention", TABLE, implementation, 1)


def test_what_is_no_name_is_said_so():
    with pytest.raises(ValueError, match="^attention: implementation must be a name .* got None$"):
        select("attention", TABLE, None, 1)  # pyright: ignore[reportArgumentType]


def test_an_unknown_op_in_a_mapping_is_told_the_ops():
    """Else a slip of the pen would run with "auto" in silence."""
    with pytest.raises(ValueError, match="names no op: atention; there are attention, ") as error:
        ops.glu(jnp.ones(2), jnp.ones(2), activation="silu", implementation={"atention": "xla"})
    for op in ops.OPS:
        assert op in str(error.value)


def test_the_names_of_the_ops_are_those_of_their_tables():
    assert tuple(ops.OPS) == _select.OP_NAMES


def test_nothing_is_caught():
    """A kernel that accepts a call and fails has a bug, and the user sees it."""
    broken = {"broken": Implementation(fail), "xla": Implementation(lambda x: "xla")}
    with pytest.raises(RuntimeError, match="the kernel has a bug"):
        select("attention", broken, "auto", 1)(1)


def test_what_is_passed_over_on_a_gpu_is_told_once(caplog):
    _select._log_once.cache_clear()
    with caplog.at_level(logging.INFO, "jaxllm"):
        select("attention", TABLE, "auto", 1)  # no GPU: nothing to tell
        with absent("NVIDIA H200"):
            select("attention", TABLE, "auto", 1)  # nothing is passed over
            assert not caplog.messages
            for _ in range(3):
                select("attention", TABLE, "auto", 0)
    assert caplog.messages == [
        "attention runs with 'xla'; passed over fast: needs a GPU and more than 0"
    ]


# --------------------------------------------------------------------------------- our own tables


@pytest.mark.parametrize("op", ops.OPS)
def test_every_op_ends_with_xla_which_takes_all(op):
    _, table = ops.OPS[op]
    assert list(table)[-1] == "xla"
    assert table["xla"].why_not() is None
    assert {"pallas", "pallas-interpret"} < set(table)  # one name for a whole model


def heads(T: int, N: int, dtype: Any = jnp.bfloat16, H: int = 64) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, T, N, H), dtype)


def test_explain_asks_shapes_only():
    q, k = heads(8, 4), heads(8, 2)
    here = ops.explain("attention", q, k, k)
    by_name = "runs only by name: it is a test, and slow"
    names = ["pallas", "pallas-interpret", "cudnn", "unfused", "unfused-interpret", "xla"]
    assert list(here) == names
    assert here["xla"] is None
    if jax.default_backend() == "cpu":
        assert here["pallas"] == here["cudnn"] == "needs an NVIDIA GPU, found cpu"
    with absent("NVIDIA H200"):
        rest = {
            "pallas-interpret": why_not_interpreted() or by_name,  # jax 0.10's has no attention
            "unfused": "no call as small (T=8, S=8) was measured faster than xla",
            "unfused-interpret": by_name,
            "xla": None,
        }
        reasons = ops.explain("attention", q, k, k)
        assert reasons == {"pallas": None, "cudnn": None, **rest}
        reasons = ops.explain("attention", q, k, k, softcap=5.0, implementation="xla")
        assert reasons == {"pallas": None, "cudnn": "has no soft cap", **rest}
    with absent("Tesla T4"):
        reasons = ops.explain("attention", q, k, k)
        assert reasons["cudnn"] == "needs compute capability 8.0 or newer, found 7.5 (Tesla T4)"
        assert reasons["pallas"] == (
            "needs a Hopper GPU (compute capability 9.0), found 7.5 (Tesla T4)"
        )


def test_auto_takes_our_attention():
    ids, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 512), (1,)))
    sinks = jax.ShapeDtypeStruct((32,), jnp.float32)
    for (T, S, H), kwargs in (
        ((512, 512, 128), {}),
        ((512, 512, 64), {}),
        ((8192, 8192, 128), {}),
        ((512, 512, 128), {"q_segment_ids": ids, "kv_segment_ids": ids}),
        ((512, 8192, 128), {"kv_lengths": lengths}),
        ((512, 512, 256), {"softcap": 50.0}),
        ((512, 512, 128), {"sinks": sinks}),
        ((1, 8192, 128), {"kv_lengths": lengths}),
        ((1, 8192, 128), {}),
    ):
        q, k = heads(T, 32, H=H), heads(S, 8, H=H)
        with absent("NVIDIA H200"):
            assert ops.chosen("attention", q, k, k, **kwargs) == "pallas"
            assert ops.explain("attention", q, k, k, **kwargs)["pallas"] is None
    q, k = heads(512, 32, H=256), heads(512, 8, H=256)
    reason = "heads of 256 may be trained, which was not timed beside cudnn"
    with absent("NVIDIA H200"):
        assert ops.explain("attention", q, k, k)["pallas"] == reason


def test_float32_attention_is_left_to_others_by_name():
    for length, name in ((8, "xla"), (2048, "unfused")):
        q = heads(length, 4, jnp.float32)
        with absent("NVIDIA H200"):
            reasons = ops.explain("attention", q, q, q)
            assert ops.chosen("attention", q, q, q) == name
        assert reasons["pallas"] == "the tensor cores would round float32 to 10 bits (tf32)"
        assert reasons["cudnn"] == "takes bfloat16 or float16, got float32"


def test_lengths_may_be_numpys():
    q = jnp.zeros((2, 64, 4, 128), jnp.bfloat16)
    with absent("NVIDIA H200"):
        lengths = np.array([3, 64], np.int32)
        assert ops.chosen("attention", q, q, q, kv_lengths=lengths) == "pallas"


def test_chosen_is_what_runs():
    q, k = heads(8, 4), heads(8, 2)
    assert ops.chosen("attention", q, k, k, implementation="xla") == "xla"
    with absent("NVIDIA H200"):
        assert ops.chosen("attention", q, k, k, implementation={"attention": "pallas"}) == "pallas"
        reasons = ops.explain("attention", q, k, k)
        first = next(name for name, reason in reasons.items() if reason is None)
        assert ops.chosen("attention", q, k, k) == first
    with pytest.raises(TypeError, match="^chosen: rms_norm: missing a required .*argument: 'eps'"):
        ops.chosen("rms_norm", np.ones((2, 8)), np.ones(8))
    with pytest.raises(ValueError, match="chosen: no op is named 'attend'; there are attention"):
        ops.chosen("attend")
    arrays = [heads(8, 4, jnp.float32)] * 3
    with absent("NVIDIA H200"), pytest.raises(NotImplementedError, match="this call: takes bfloat"):
        ops.chosen("attention", *arrays, implementation="cudnn")


def test_explain_takes_the_arguments_of_every_op():
    x, row, ids = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((2, 8), jnp.float32), ((8,), jnp.float32), ((2,), jnp.int32))
    )
    for op, args, kwargs in (
        ("linear", (x, x), {}),
        ("linear", (x, x, row), {"out_dtype": jnp.dtype("float32")}),
        ("embedding", (x, ids), {}),
        ("rms_norm", (x, row), {"eps": 1e-6}),
        ("rope", (heads(2, 1), heads(2, 1), heads(2, 1), heads(2, 1)), {}),
        ("glu", (x, x), {"activation": "silu"}),
        ("scale_softmax", (x,), {"causal": True}),
    ):
        here = ops.explain(op, *args, **kwargs)
        assert list(here)[-1] == "xla"
        assert here["xla"] is None


def test_explain_of_an_unknown_op():
    with pytest.raises(ValueError, match="explain: no op is named 'softmaxx'; there are attention"):
        ops.explain("softmaxx")


@pytest.mark.own_errors  # sizes that are letters are none to the check of shapes
@pytest.mark.parametrize("name", ["pallas", "triton"])
def test_kernels_are_made_for_known_sizes(name):
    x = jax.ShapeDtypeStruct((*export.symbolic_shape("rows"), 512), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((512,), jnp.bfloat16)
    norm = functools.partial(ops.rms_norm, eps=1e-6)
    with absent("NVIDIA H200"):
        jax.eval_shape(norm, x, weight)
        with pytest.raises(NotImplementedError, match="made for known sizes, and one is rows"):
            jax.eval_shape(functools.partial(norm, implementation=name), x, weight)


def test_a_program_for_an_absent_gpu_asks_that_gpu(monkeypatch):
    """Under the abstract mesh of an H200 "auto" is ours, also inside jit; here it is XLA."""
    taken = []

    def run(name):
        def call(q, k, v, **kwargs):
            taken.append(name)
            return jnp.zeros_like(q)

        return call

    table = {
        name: dataclasses.replace(entry, run=run(name)) for name, entry in ops.ATTENTION.items()
    }
    monkeypatch.setattr(importlib.import_module("jaxllm.ops.attention"), "ATTENTION", table)
    q, k = heads(8, 4), heads(8, 2)
    with absent("NVIDIA H200"):
        jax.eval_shape(jax.jit(ops.attention), q, k, k)
    if jax.default_backend() == "cpu":
        jax.eval_shape(ops.attention, q, k, k)
        assert taken == ["pallas", "xla"]


@pytest.mark.parametrize(
    ("op", "arguments", "kwargs"),
    [
        ("rms_norm", [(1, 0, 512), (512,)], {"eps": 1e-5}),
        ("layer_norm", [(1, 0, 64), (64,), (64,)], {"eps": 1e-5}),
        ("glu", [(1, 0, 64), (1, 0, 64)], {"activation": "silu"}),
        ("rope", [(1, 0, 4, 64), (1, 0, 2, 64), (1, 0, 32), (1, 0, 32)], {}),
    ],
)
def test_auto_leaves_the_small_kernels_of_decoding_to_xla(op, arguments, kwargs):
    def reason(tokens):
        shapes = [
            jax.ShapeDtypeStruct([n or tokens for n in shape], jnp.bfloat16) for shape in arguments
        ]
        return ops.explain(op, *shapes, **kwargs)["pallas"]

    with absent("NVIDIA H200"):
        assert "decodes faster where XLA does it (1 tokens; from 512 on)" in str(reason(1))
        heads = jax.ShapeDtypeStruct((16, 64, 32, 128), jnp.bfloat16)  # each head has a norm
        norm = ops.explain("rms_norm", heads, jax.ShapeDtypeStruct((128,), jnp.bfloat16), eps=1e-5)
        assert norm["pallas"] == "XLA is as fast for rows of 256 numbers or fewer"
        assert reason(512) is None


def test_the_tokens_of_all_rows_count():
    def reasons(rows, tokens):
        q = jax.ShapeDtypeStruct((rows, tokens, 8, 128), jnp.bfloat16)
        cos = jax.ShapeDtypeStruct((rows, tokens, 64), jnp.float32)
        table = jax.ShapeDtypeStruct((1024, 64), jnp.bfloat16)
        ids = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
        calls = {"rope": (q, q, cos, cos), "embedding": (table, ids)}
        return [ops.explain(op, *call)["pallas"] for op, call in calls.items()]

    few = "a model decodes faster where XLA does it (16 tokens; from 512 on)"
    with absent("NVIDIA H200"):
        assert reasons(4, 128) == [None, None]
        assert reasons(2, 8) == [few, few]


@pytest.mark.parametrize(
    ("op", "shapes", "kwargs", "words"),
    [
        ("rms_norm", [(), ()], {"eps": 1e-5}, "takes rows, got a scalar"),
        ("layer_norm", [(), (), ()], {"eps": 1e-5}, "takes rows, got a scalar"),
        ("glu", [(), ()], {"activation": "silu"}, "takes rows, got a scalar"),
        ("glu", [(2**18, 2**14)] * 2, {"activation": "silu"}, "has no index of 32 bits"),
    ],
)
def test_a_kernel_says_what_it_does_not_take(op, shapes, kwargs, words):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with absent("NVIDIA H200"):
        found = ops.explain(op, *arrays, **kwargs)
    assert words in str(found["pallas"])
    assert found["xla"] is None


@pytest.mark.own_errors
@pytest.mark.parametrize("implementation", ["xla", "auto", "pallas-interpret"])
@pytest.mark.parametrize(
    ("op", "arguments", "kwargs", "words"),
    [
        ("rms_norm", [(2, 64), (64,)], {"eps": 0.0}, "eps must be positive and finite, got 0.0"),
        ("rms_norm", [(2, 64), (63,)], {"eps": 1e-5}, r"the weight has shape \(63,\)"),
        ("layer_norm", [(2, 64), (64,), (64,)], {"eps": -1.0}, "eps must be positive and finite"),
        ("glu", [(2, 64), (2, 63)], {"activation": "silu"}, "they must be alike and have rows"),
        ("rope", [(2, 8, 64)] * 4, {}, r"q \[2, 8, 64\] is \[B, T, N, H\]"),
        ("embedding", [(64,), (2,)], {}, r"the table \[64\] is not \[V, D\]"),
        ("rms_norm", [(2, 64), (64,)], {"eps": None}, "rms_norm: eps must be positive and finite"),
        ("layer_norm", [(2, 64), (64,), (64,)], {"eps": "a"}, "eps must be positive and .*got 'a'"),
        ("rms_norm", [(2, 64), (64,)], {"eps": 1.0, "zero_centered": "no"}, "must be True or Fals"),
        (
            "attention",
            [(1, 4, 2, 64)] * 3,
            {"softcap": "a"},
            "softcap must be positive and finite ",
        ),
        ("attention", [(1, 4, 2, 64)] * 3, {"causal": "no"}, "causal must be True or False, got"),
        ("attention", [(1, 4, 2, 64)] * 3, {"return_weights": "no"}, "return_weights must be True"),
        ("attention", [(1, 4, 2, 64)] * 3, {"kv_lengths": [3]}, "kv_lengths must be an array, got"),
        ("attention", [(1, 4, 2, 0)] * 3, {}, r"q \(1, 4, 2, 0\) has heads of no numbers; H must"),
        (
            "linear",
            [(2, 64), (8, 64)],
            {"out_dtype": "foo"},
            "out_dtype must be a dtype, got 'foo'",
        ),
        ("embedding", [(4, 64)], {"ids": [1, 2]}, r"ids must be an array, got \[1, 2\]"),
        (
            *("embedding", [(4, 64)], {"ids": np.asarray([1]), "scale": "a"}),
            "embedding: scale must be a finite number or None, got 'a'",
        ),
        (
            *("linear_cross_entropy", [(2, 64), (8, 64)], {"targets": [1, 2]}),
            r"targets must be an array, got \[1, 2\]",
        ),
        *(
            ("linear_cross_entropy", [(2, 64), (8, 64)], {"targets": np.ones(2, int), **z}, words)
            for z, words in (
                ({"z_loss": None}, "z_loss must be a finite number, got None"),
                ({"z_loss": "a"}, "z_loss must be a finite number, got 'a'"),
                ({"softcap": "a"}, "softcap must be positive and finite or None, got 'a'"),
            )
        ),
    ],
)
def test_who_runs_a_call_does_not_change_what_is_wrong_with_it(
    op, arguments, kwargs, words, implementation
):
    arrays = [jnp.ones(shape, jnp.float32) for shape in arguments]
    with pytest.raises(ValueError, match=words):
        getattr(ops, op)(*arrays, **kwargs, implementation=implementation)


@pytest.mark.own_errors
@pytest.mark.parametrize("implementation", ["xla", "auto", "pallas-interpret"])
@pytest.mark.parametrize(
    ("op", "shapes", "name"),
    [
        ("rms_norm", [(2, 64), (64,)], "eps"),
        ("layer_norm", [(2, 64), (64,), (64,)], "eps"),
        ("attention", [(1, 4, 2, 64)] * 3, "softcap"),
        ("embedding", [(4, 64), (2,)], "scale"),
        ("linear_cross_entropy", [(2, 64), (8, 64), (2,)], "softcap"),
        ("linear_cross_entropy", [(2, 64), (8, 64), (2,)], "z_loss"),
        ("linear_log_probs", [(2, 64), (8, 64), (2,)], "softcap"),
    ],
)
def test_a_number_that_must_be_known_and_is_traced(op, shapes, name, implementation):
    arrays = [jnp.ones(s, jnp.int32 if s == (2,) else jnp.bfloat16) for s in shapes]

    def f(number):
        return getattr(ops, op)(*arrays, **{name: number}, implementation=implementation)

    with pytest.raises(ValueError, match=f"^{op}: {name} is traced; it must be a Python number"):
        jax.eval_shape(f, 1.0)


def test_an_op_that_has_no_hash():
    op: Any = ["glu"]
    with pytest.raises(
        ValueError, match=r"^explain: no op is named \['glu'\]; there are attention"
    ):
        ops.explain(op)


@pytest.mark.own_errors
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "glu"])
def test_integers_are_refused(op):
    x, row = jnp.ones((2, 64), jnp.int32), jnp.ones(64)
    rest = {"rms_norm": (row,), "layer_norm": (row, row), "glu": (x,)}[op]
    kwargs = {"activation": "silu"} if op == "glu" else {"eps": 1e-5}
    with pytest.raises(ValueError, match="is int32; it must be floating point"):
        getattr(ops, op)(x, *rest, **kwargs, implementation="xla")
