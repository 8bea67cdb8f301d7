"""How a kernel is tried on the CPU: in the interpreter, with an eye on races."""

from collections.abc import Callable
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
