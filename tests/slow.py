"""Cases of a parametrised test of which `make test` runs some; `make test-slow` runs the others."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_but(keep: Container[int], cases: Iterable[Any]) -> list[Any]:
    """The cases, of which all but those of these numbers are marked slow."""
    return [case if number in keep else slow(case) for number, case in enumerate(cases)]


def thinned(cases: Iterable[Any], every: int) -> list[Any]:
    """The cases, of which all but every `every`-th are marked slow."""
    cases = list(cases)
    return slow_but(range(0, len(cases), every), cases)


def slow(case: Any) -> Any:
    """A case, one value or a tuple of several, that `make test-slow` runs."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
