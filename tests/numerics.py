"""How near is near enough, decided once."""

from typing import Any

import numpy as np

ULPS = 4  # float32 sums of a few dozen terms end within two of the largest term


def assert_as_accurate(
    ours: Any, plain: Any, truth: Any, *, largest_term: float | None = None
) -> None:
    """Ours is at most twice as far from float64 truth as the plain path in the same dtype.

    Far is the largest error, and the root of the mean square of all. Four float32 ulps of the
    largest term that was summed (the largest number of the truth if None) are always allowed, so
    that an entry which cancels to zero does not trip it.
    """
    truth = np.asarray(truth)
    assert truth.dtype == np.float64, f"the truth is {truth.dtype}, not float64"
    ours, plain = (np.asarray(x).astype(np.float64) for x in (ours, plain))
    assert ours.shape == plain.shape == truth.shape, (ours.shape, plain.shape, truth.shape)
    assert np.all(np.isfinite(ours)), "a number is not finite"
    if largest_term is None:
        largest_term = float(np.max(np.abs(truth), initial=0.0))
    floor = ULPS * largest_term * float(np.finfo(np.float32).eps)
    for name, far in (("largest", np.max), ("root mean square", _root_mean_square)):
        allowed = 2 * float(far(np.abs(plain - truth))) + floor
        error = float(far(np.abs(ours - truth)))
        assert error <= allowed, f"the {name} error is {error:.3e}, allowed are {allowed:.3e}"


def _root_mean_square(x: np.ndarray) -> np.floating:
    return np.sqrt(np.mean(x * x))
