"""How a kernel is tried on the CPU: in the interpreter, with an eye on races."""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallas_kernels import _compat


def interpreted(f: Callable[..., Any], *args: Any) -> Any:
    """The result of f(*args), which calls kernels with interpret=True; no race was seen."""
    if not _compat.INTERPRETS_CUT_COPIES:
        import pytest  # here, for the benchmarks take truths from this file without pytest

        pytest.skip("the interpreter of jax 0.10 copies nothing that passes the end of an array")
    result = jax.block_until_ready(jax.jit(f)(*args))
    assert not _compat.races_found(), "the interpreter saw a race; it printed where"
    return result


def equations(jaxpr: Any) -> Iterator[Any]:
    """All of a jaxpr's, those of what it calls included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns")
