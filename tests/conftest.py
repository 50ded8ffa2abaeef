"""Order of the test files."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that start processes first: a long file at the end would leave the other worker idle."""

    def rank(item: pytest.Item) -> int:
        names = vars(getattr(item, "module", None) or pytest)
        return 0 if names.keys() & {"run_on_ranks", "subprocess"} else 1 if "main" in names else 2

    items.sort(key=rank)  # stable: a file's tests stay together
