"""Cases of a test of which some run by default, and all in `make test-slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(keep: Iterable[int], cases: Iterable[Any]) -> list[Any]:
    """Return the cases, those marked slow whose number is not among `keep`."""
    kept = set(keep)
    return [
        case
        if number in kept
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]
