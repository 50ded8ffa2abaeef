"""What must hold of the settings of the commands that look after checkpoints."""

import os
from pathlib import Path
from typing import Any

from mlm.files.results import is_stream


def check_out_file(config: Any) -> list[str]:
    """An `out` that cannot become a file: found before anything is read."""
    if config.out is None or is_stream(config.out):
        return []
    path = Path(config.out)
    if path.is_dir():
        return [f"out={config.out}: is a directory; name a file in it, such as out={path / 'result.json'}"]
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        return [f"out={config.out}: {path.parent} is no folder that can be written; name another file"]
    return []
