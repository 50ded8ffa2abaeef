"""What the `mlm ckpt` commands share: tables, words for sizes, and the result for machines."""

import json
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

import mlm
from mlm.config.errors import UserError
from mlm.files import write_atomic
from mlm.train.history import finite

LONGEST = 300  # characters of a name or value that a checkpoint says and a table shows


def console() -> Console:
    """Where tables go: nothing a checkpoint says is taken for markup."""
    return Console(highlight=False, markup=False, soft_wrap=True)


def plain(value: object) -> str:
    """What a checkpoint says, as one line that cannot steer a terminal."""
    text = str(value)
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:LONGEST]) + (
        "…" if text[LONGEST:] else ""
    )
    return text.encode(errors="backslashreplace").decode()  # half a surrogate pair


def table(title: str, *columns: str) -> Table:
    """A table of names and numbers, none cut short. A column that ends in "#" holds numbers."""
    made = Table(
        title=Text(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_header=any(columns)
    )
    for name in columns:
        numbers = name.endswith("#")
        made.add_column(
            name.removesuffix("#"),
            justify="right" if numbers else "left",
            overflow="fold",
            no_wrap=numbers,
        )
    return made


def add_row(made: Table, *cells: object) -> None:
    """A row of `plain` cells."""
    made.add_row(*(Text(plain(cell)) for cell in cells))


def size(count: int) -> str:
    """Bytes in the largest decimal unit: 1.2 MB."""
    number = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:,.1f} TB"


def versions() -> dict[str, str]:
    """What wrote a result."""
    return {"mlm": mlm.__version__, "torch": torch.__version__}


def write_result(out: str, result: dict[str, Any]) -> None:
    """Write the JSON for machines; numbers that are not finite become null. Raises UserError."""
    text = json.dumps(finite(result), indent=2, allow_nan=False) + "\n"
    try:
        write_atomic(Path(out), text.encode())
    except OSError as error:
        raise UserError(f"out={out}: {error.strerror}: choose a file that can be written") from error
