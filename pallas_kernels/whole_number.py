"""Arguments that count something."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether it is an integer of Python or NumPy; a bool is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
