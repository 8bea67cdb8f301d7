"""Whether arguments are of the kind that a call wants; each check speaks in the name of an op."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def check_flags(name: str, **flags: Any) -> None:
    """Refuses what is neither True nor False of Python or NumPy, such as "none", which counts as
    true.
    """
    for what, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"{name}: {what} must be True or False, got {value!r:.60}")


def check_options(name: str, config: Any, *kinds: type, **flags: Any) -> None:
    """Refuses a config that is none of these classes, nor None, and flags as `check_flags` does."""
    if config is not None and not isinstance(config, kinds):
        allowed = " or ".join(map(_path, kinds))
        raise ValueError(
            f"{name}: config must be None or a {allowed}, got {config!r:.60} of the class "
            f"{_path(type(config))}"
        )
    check_flags(name, **flags)


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def is_number(value: Any) -> bool:
    """Whether it is one real number of Python, NumPy or JAX, traced or not; a bool is none."""
    if not hasattr(value, "dtype"):
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    real = any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer))
    return real and jnp.shape(value) == ()


def check_number(
    name: str, what: str, value: Any, *, positive: bool = False, optional: bool = False
) -> None:
    """Refuses what is no finite number that is known when the call is traced; optional: nor None.

    A traced one is refused for every implementation, for it is part of a kernel.
    """
    if optional and value is None:
        return
    if isinstance(value, Tracer):
        raise ValueError(
            f"{name}: {what} is traced; it must be a Python number, known when the call is traced"
        )
    least = 0.0 if positive else -math.inf
    if not is_number(value) or not least < _as_float(value) < math.inf:
        allowed = "positive and finite" if positive else "a finite number"
        raise ValueError(
            f"{name}: {what} must be {allowed}{' or None' * optional}, got {value!r:.60}"
        )


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except (OverflowError, TypeError):  # 10**400, or a shape alone
        return math.nan


def check_scale(name: str, scale: Any) -> None:
    """Refuses a scale that is no number or NaN; a traced one may be any number."""
    if hasattr(scale, "dtype") and jnp.shape(scale) != ():
        raise ValueError(f"{name}: scale has shape {jnp.shape(scale)}; it must be a number")
    if not is_number(scale):
        raise ValueError(f"{name}: scale must be a number, got {scale!r:.60}")
    if not isinstance(scale, Tracer) and math.isnan(scale):
        raise ValueError(f"{name}: scale is NaN")


def check_arrays(name: str, **arrays: Any) -> None:
    """Refuses lists and numbers of Python where arrays are meant; None is an array left out."""
    check_given(name, **{what: array for what, array in arrays.items() if array is not None})


def check_given(name: str, **arrays: Any) -> None:
    """As `check_arrays`, of arrays that cannot be left out."""
    for what, array in arrays.items():
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise ValueError(f"{name}: {what} must be an array, got {array!r:.60}")


def is_known(size: Any) -> bool:
    """Whether an array's size is a number, and not a letter of `jax.export`."""
    return isinstance(size, numbers.Integral)


def check_dtype(name: str, what: str, dtype: Any) -> None:
    """Refuses what names no dtype of an array; None stands for that of another argument."""
    try:
        is_one = dtype is None or jnp.dtype(dtype).fields is None
    except TypeError:
        is_one = False
    if not is_one:
        raise ValueError(f"{name}: {what} must be a dtype, got {dtype!r:.60}")
