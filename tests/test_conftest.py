"""--every, --slow-every and --first, which CI takes parts of the tests by."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


class Item:
    """A test of a file, with no mark but perhaps slow."""

    def __init__(self, path: str, number: int, slow: bool = False):
        self.path, self.number, self.slow = Path(path), number, slow

    def get_closest_marker(self, name: str) -> str | None:
        return name if self.slow and name == "slow" else None


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> Any:
    [module] = [
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(Path(__file__).with_name("conftest.py"))
    ]
    return module


def parts(conftest: Any, tests: list[Item], count: int, **every: int) -> list[list[Item]]:
    """What each of `count` numbers of --first leaves of the tests."""
    found = []
    for first in range(1000, 1000 + count):
        left_out: list[Item] = []
        hook = SimpleNamespace(pytest_deselected=lambda items, out=left_out: out.extend(items))
        option = SimpleNamespace(**{"every": 1, "slow_every": 1, "first": first} | every)
        kept = list(tests)
        conftest.pytest_collection_modifyitems(SimpleNamespace(option=option, hook=hook), kept)
        assert len(kept) + len(left_out) == len(tests)
        found.append(kept)
    return found


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_the_parts_are_all_and_none_twice(conftest: Any, every: int):
    sizes = {"a.py": 10, "b.py": 5, "c.py": 1}
    tests = [Item(name, i) for name, size in sizes.items() for i in range(size)]
    found = parts(conftest, tests, every, every=every)
    assert sorted(id(x) for kept in found for x in kept) == sorted(map(id, tests))
    for kept in found:  # one in so many, in each file's order
        for name in sizes:
            numbers = [x.number for x in kept if x.path.name == name]
            assert all(b - a == every for a, b in itertools.pairwise(numbers))


def test_single_tests_of_files_are_of_different_parts(conftest: Any):
    found = parts(conftest, [Item(f"{i}.py", 0) for i in range(6)], 3, every=3)
    assert [len(kept) for kept in found] == [2, 2, 2]


def test_of_slow_tests_alone_one_in_so_many(conftest: Any):
    tests = [Item("a.py", i, slow=i % 2 == 0) for i in range(12)]
    found = parts(conftest, tests, 3, slow_every=3)
    for kept in found:
        assert sum(x.slow for x in kept) == 2
        assert sum(not x.slow for x in kept) == 6
    assert {x.number for kept in found for x in kept} == set(range(12))
    both = parts(conftest, tests, 6, every=2, slow_every=3)
    for kept in both:
        assert sum(x.slow for x in kept) == 1
        assert sum(not x.slow for x in kept) == 3
    assert {x.number for kept in both for x in kept} == set(range(12))


@pytest.mark.parametrize("option", ["--every", "--slow-every"])
def test_one_in_none_is_refused(conftest: Any, option: str):
    given = {"--every": 1, "--slow-every": 1, option: 0}
    with pytest.raises(pytest.UsageError, match=f"^{option} must be at least 1, got 0$"):
        conftest.pytest_configure(SimpleNamespace(getoption=given.__getitem__))
