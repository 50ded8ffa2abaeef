"""Order of the test files, and garbage collection that skips what lives to the end."""

import gc

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that start processes first: a long file at the end would leave the other worker idle."""

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
