"""Long tests, order of the test files, and garbage collection that skips what lives to the end."""

import gc
from pathlib import Path

import pytest

SLOW = Path(__file__).with_name("slow.txt")
"""Ids of tests that only `make test-all` runs, a line each; a function stands for all its parameters."""


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark long tests, and put files that start processes first: a long one must not be the last."""
    slow = frozenset(SLOW.read_text().splitlines())
    for item in items:
        if item.nodeid in slow or item.nodeid.partition("[")[0] in slow:
            item.add_marker(pytest.mark.slow)

    def rank(item: pytest.Item) -> int:
        names = vars(getattr(item, "module", None) or pytest)
        if names.keys() & {"run_on_ranks", "subprocess", "launch_jobs"}:
            return 0
        return 1 if "main" in names else 2

    items.sort(key=rank)  # stable: a file's tests stay together


def pytest_collection_finish() -> None:
    """Exclude half a million objects of imported libraries and tests from collections: 0.3 s each."""
    gc.collect()
    gc.freeze()
