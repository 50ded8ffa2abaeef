"""Checks of the settings of the commands that maintain checkpoints."""

import os
from pathlib import Path
from typing import Any

from mlm.errors import Problem
from mlm.files.results import is_stream


def check_out_file(config: Any) -> list[Problem]:
    """The problem of an `out` that cannot become a file, found before anything is read."""
    if config.out is None or is_stream(config.out):
        return []
    path = Path(config.out)
    if path.is_dir():
        return [
            Problem.at(
                "out", config.out, "is a directory", f"name a file in it, such as out={path / 'result.json'}"
            )
        ]
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        problem = f"{path.parent} is no folder that can be written"
        return [Problem.at("out", config.out, problem, "name another file")]
    return []
