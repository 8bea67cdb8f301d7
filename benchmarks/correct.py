"""Right before fast: a kernel's result against float64 truth, by the rule of tests/numerics.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.case import Case

TESTS = Path(__file__).resolve().parent.parent / "tests"


def use_tests() -> None:
    """Let `numerics` and `oracles` of tests/ be imported: benchmarks run from a clone."""
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))


def check(case: Case, arguments: Sequence[np.ndarray], ours: Any, plain: Any) -> dict[str, Any]:
    """{"status": "right", "wrong" or "unchecked", "error", "plain_error", "message", "truth"}.

    The errors are ||out - truth|| / ||truth||, the largest of all results. `plain` is the result
    of the plain path in the same dtype; where the case has no truth, what plain gives in float32.
    """
    use_tests()
    import numerics  # type: ignore

    result = {"status": "right", "error": 0.0, "plain_error": 0.0, "truth": "float64"}
    try:
        if case.truth is None:
            result["truth"] = "plain in float32"
            wide = [_widen(x) for x in arguments]
            with jax.default_matmul_precision("highest"):
                truth = jax.device_get(jax.jit(case.plain)(*wide))
        else:
            truth = case.truth(*arguments)
    except Exception as error:
        return {"status": "unchecked", "message": f"no truth: {sentence(error)}"}
    results = ours, plain, truth
    if case.compared is not None:
        results = map(case.compared, results)
    leaves = [jax.tree.leaves(tree) for tree in results]
    if len({len(x) for x in leaves}) != 1:
        counts = ", ".join(str(len(x)) for x in leaves)
        return {"status": "unchecked", "message": f"ours, plain, truth have {counts} results"}
    for our, other, true in zip(*leaves, strict=True):
        true = np.asarray(true, np.float64)
        result["error"] = max(result["error"], distance(our, true))
        result["plain_error"] = max(result["plain_error"], distance(other, true))
        try:
            numerics.assert_as_accurate(our, other, true, largest_term=case.largest_term)
        except AssertionError as error:
            result |= {"status": "wrong", "message": sentence(error)}
    return result


def distance(x: Any, truth: np.ndarray) -> float:
    """||x - truth|| / ||truth||; NaN where x has a number that is not finite."""
    import numerics  # type: ignore

    norm = float(np.linalg.norm(truth.reshape(-1))) / max(truth.size, 1) ** 0.5
    return numerics.far(np.asarray(x), truth)[1] / (norm or 1.0)


def sentence(error: BaseException, limit: int = 300) -> str:
    """An exception as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:limit]


def _widen(x: np.ndarray) -> np.ndarray:
    is_float = jax.numpy.issubdtype(x.dtype, jax.numpy.floating)
    return x.astype(np.float32) if is_float else x
