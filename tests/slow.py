"""Cases of a parametrised test, of which only some are quick enough for `make test`."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], every: int) -> list[Any]:
    """The cases, of which all but every `every`-th are marked slow."""
    return [case if number % every == 0 else slow(case) for number, case in enumerate(cases)]


def slow(case: Any) -> Any:
    """A case, one value or a tuple of several, that `make test-slow` runs."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
