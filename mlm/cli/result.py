"""Output shared by the commands on checkpoints: files, tables and lines."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

import mlm
from mlm.models.config import ModelConfig
from mlm.models.shape import count_parameters
from mlm.tracking.history import replace_nonfinite
from mlm.util import results as result_files
from mlm.util.terminal import add_row, console, table


def write_result(out: str, result: dict[str, Any]) -> None:
    """Write JSON for machines, with versions; numbers that are not finite become null. Raises UserError."""
    versions = {"mlm": mlm.__version__, "torch": torch.__version__}
    finite = {key: replace_nonfinite(value) for key, value in result.items()}
    result_files.write_result(out, {**finite, "versions": versions})


def show_table(title: str, columns: Mapping[str, object], notes: Iterable[str], *lines: str) -> None:
    """Print a table of one row, a line for each note, and more lines."""
    row, out = table(title, *columns), console()
    add_row(row, *columns.values())
    out.print(row)
    for line in (*(f"note: {note}" for note in notes), *lines):
        out.print(line)


def model_columns(model: ModelConfig) -> dict[str, object]:
    numbers = {
        "parameters": count_parameters(model),
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "heads": model.num_heads,
        "positions": model.max_positions,
        "vocabulary": model.vocab_size,
    }
    return {f"{name}#": f"{number:,}" for name, number in numbers.items()}
