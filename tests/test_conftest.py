"""--every and --first, which CI takes parts of the tests by."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


class Item:
    """A test of a file, and no marks."""

    def __init__(self, path: str, number: int):
        self.path, self.number = Path(path), number

    def get_closest_marker(self, name: str) -> None:
        del name


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_the_parts_are_all_and_none_twice(request: pytest.FixtureRequest, every: int):
    plugins = request.config.pluginmanager
    [select] = [
        plugin.pytest_collection_modifyitems
        for plugin in plugins.get_plugins()
        if getattr(plugin, "__file__", None) == str(Path(__file__).with_name("conftest.py"))
    ]
    tests = [Item("a.py", i) for i in range(10)] + [Item("b.py", i) for i in range(5)]
    found: list[Item] = []
    for first in range(1000, 1000 + every):
        left_out: list[Item] = []
        hook = SimpleNamespace(pytest_deselected=lambda items, out=left_out: out.extend(items))
        config: Any = SimpleNamespace(option=SimpleNamespace(every=every, first=first), hook=hook)
        kept = list(tests)
        select(config, kept)
        assert len(kept) + len(left_out) == len(tests)
        assert [x.number % every for x in kept] == [first % every] * len(kept)
        found += kept
    assert sorted(map(id, found)) == sorted(map(id, tests))
