"""Checks of the settings of the commands that maintain checkpoints."""

from typing import Any

from mlm.errors import Problem
from mlm.files.results import folder_problem


def check_out_file(config: Any) -> list[Problem]:
    """Return the problem of an `out` that cannot become a file, before anything is read."""
    problem = folder_problem(config.out)
    return [] if problem is None else [problem]
