"""Programs compiled in other processes are those compiled here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import compiling, rivals
from benchmarks.case import Case
from benchmarks.cases import all_cases

X = jax.ShapeDtypeStruct((16, 32), jnp.bfloat16)


@pytest.fixture
def elsewhere(monkeypatch):
    """Programs of which all that a process can compile is compiled there."""
    monkeypatch.setattr(compiling, "HERE", ())
    programs = compiling.Programs(on_gpu=True, threads=1, processes=1)
    yield programs
    programs.close()


def smallest(op):
    return min((c for c in all_cases((op,)) if not c.compile_only), key=lambda c: c.bytes)


@pytest.mark.slow
def test_a_program_of_another_process(elsewhere, monkeypatch):
    if jax.default_backend() == "gpu":
        pytest.skip("our kernel compiles here")
    case = smallest("swiglu")
    elsewhere.begin([case], first=True)
    assert elsewhere.waiting(120.0) == 0
    assert elsewhere.ready(case, first=True)
    with pytest.raises(RuntimeError, match=r"NotImplementedError: swiglu: .* needs an NVIDIA GPU"):
        elsewhere.get(case, "ours")
    monkeypatch.setattr(compiling, "compile_here", None)  # it came from there
    arguments = elsewhere.inputs(case, 0)
    found = elsewhere.get(case, "xla").run(*arguments)
    np.testing.assert_array_equal(found, jax.jit(case.plain)(*arguments))
    elsewhere.forget(case)
    assert not elsewhere.ready(case, first=True)


@pytest.mark.slow
def test_a_process_that_dies_or_hands_over_nonsense(elsewhere, monkeypatch):
    case = smallest("swiglu")
    arguments = case.inputs(jax.random.key(0))
    monkeypatch.setattr(compiling, "_load", None)  # raises TypeError
    elsewhere.begin([case], first=True)
    expected = jax.jit(case.plain)(*arguments)
    np.testing.assert_array_equal(elsewhere.get(case, "xla").run(*arguments), expected)
    elsewhere.forget(case)
    for process in elsewhere.processes._processes.values():
        process.kill()
    elsewhere.begin([case], first=True)
    np.testing.assert_array_equal(elsewhere.get(case, "xla").run(*arguments), expected)


def test_what_a_process_cannot_hand_over_is_compiled_here_alone(monkeypatch):
    programs = compiling.Programs(on_gpu=True, threads=1, processes=1)
    try:
        asked = []
        monkeypatch.setattr(programs.drivers, "submit", lambda run, case, name: asked.append(name))
        case = Case("toy", "16 x 32", (X,), jnp.sin, jnp.sin, "memory", 1)
        names = ("tokamax", "tokamax, bfloat16", "cudnn, float8", "xla chunked", "triton")
        programs.rivals[case.name] = dict.fromkeys(names, rivals.Rival(jnp.sin))
        for name in names:
            programs._submit(case, name)
        assert asked == ["xla chunked", "triton"]
    finally:
        programs.close()


def test_a_saved_forward_pass_as_arrays_alone():
    def forward(x):
        return jnp.sin(x) * x

    case = Case("toy", "fused, backward", (X, X), forward, forward, "memory", 1)
    rival = rivals._backward(forward, case)
    assert rival.prepare is not None
    flat = compiling.compile_here(case.arguments, compiling._flat(rival, rival.prepare))
    whole = compiling.compile_here(case.arguments, rival)
    arguments = case.inputs(jax.random.key(0))
    assert flat.prepare is not None
    assert whole.prepare is not None
    leaves = flat.prepare(*arguments)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    np.testing.assert_array_equal(
        *(p.run(*args)[0] for p, args in ((flat, leaves), (whole, whole.prepare(*arguments))))
    )


def test_what_was_not_begun_is_forgotten_and_begun_again():
    slow = Case("toy", "slow", (X,), jnp.sin, jnp.sin, "memory", 1)
    others = [Case("toy", str(i), (X,), jnp.sin, jnp.sin, "memory", 1) for i in range(20)]
    programs = compiling.Programs(on_gpu=True, threads=1, processes=0)
    try:
        programs.begin([slow, *others], first=True)
        programs.stop()
        assert not programs.ready(others[-1], first=True)
        programs.begin([slow, *others], first=True)
        assert programs.waiting(60.0) == 0
        assert all(programs.ready(case, first=True) for case in others)
    finally:
        programs.close()
