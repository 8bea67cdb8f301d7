"""Each test has an interpreter of its own: races, and what a failed kernel left, are forgotten."""

from collections.abc import Iterator

import pytest

from pallas_kernels import _compat


@pytest.fixture(autouse=True)
def _interpreter() -> Iterator[None]:
    yield
    _compat.reset_interpreter()
