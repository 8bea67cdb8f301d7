"""How near is near enough, decided once."""

from typing import Any

import numpy as np

PIECE = 2**16  # numbers: what is computed of them stays in a core's cache
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
    ours, plain = np.asarray(ours), np.asarray(plain)
    assert ours.shape == plain.shape == truth.shape, (ours.shape, plain.shape, truth.shape)
    if largest_term is None:
        largest_term = float(np.max(np.abs(truth), initial=0.0))
    floor = ULPS * largest_term * float(np.finfo(np.float32).eps)
    errors = zip(far(ours, truth), far(plain, truth), strict=True)
    for name, (error, other) in zip(("largest", "root mean square"), errors, strict=True):
        assert np.isfinite(error), "a number is not finite"
        allowed = 2 * other + floor
        assert error <= allowed, f"the {name} error is {error:.3e}, allowed are {allowed:.3e}"


def far(x: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """The largest error, and the root of the mean square of all; NaN if a number is not finite."""
    largest = squares = 0.0
    x, truth = x.reshape(-1), truth.reshape(-1)
    for start in range(0, x.size, PIECE):
        piece = slice(start, start + PIECE)
        error = np.abs(x[piece].astype(np.float64) - truth[piece])
        largest = max(largest, float(error.max()))
        squares += float(np.sum(error * error))  # no dot: its threads wait for each other here
    if not np.isfinite(squares):
        return np.nan, np.nan
    return largest, (squares / max(x.size, 1)) ** 0.5
