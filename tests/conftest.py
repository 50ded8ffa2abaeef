"""Long tests, order of the test files, and garbage collection that skips what lives to the end."""

import gc
from collections import Counter
from pathlib import Path

import pytest

SLOW = Path(__file__).with_name("slow.txt")
"""Tests that only `make test-all` runs, a line each; with a number n behind, all cases but every nth."""


def listed() -> dict[str, int]:
    """Return the lines of SLOW; 0 where no number stands."""
    lines = (line.split() for line in SLOW.read_text().splitlines())
    return {test: int(rest[0]) if rest else 0 for test, *rest in lines}


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark long tests, and put files that start processes first: a long one must not be the last."""
    slow, seen = listed(), Counter[str]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test in slow:
            if slow[test] == 0 or seen[test] % slow[test]:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1

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
