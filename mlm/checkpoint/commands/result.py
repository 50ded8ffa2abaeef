"""The JSON result of the `mlm ckpt` commands."""

from typing import Any

import torch

import mlm
from mlm.tracking.history import finite
from mlm.util import results as result_files


def versions() -> dict[str, str]:
    """Versions of the writer of a result."""
    return {"mlm": mlm.__version__, "torch": torch.__version__}


def write_result(out: str, result: dict[str, Any]) -> None:
    """Write the JSON for machines; numbers that are not finite become null. Raises UserError."""
    result_files.write_result(out, {key: finite(value) for key, value in result.items()})
