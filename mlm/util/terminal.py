"""Terminal output of commands: tables without control characters, readable sizes, progress bars."""

import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from mlm.util.errors import escape_controls

Advance = Callable[[int], None]
LINE_S = 60.0
"""Seconds between lines of progress in a log."""


class Screen(Console):
    """A console that writes escape codes to terminals alone, and strings without control characters.

    Whatever FORCE_COLOR says: notebooks set it for the commands that they start.
    """

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        stream = options.get("file") or (sys.stderr if stderr else sys.stdout)
        is_terminal = getattr(stream, "isatty", lambda: False)()
        options.setdefault("force_terminal", None if is_terminal else False)
        super().__init__(stderr=stderr, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        printable = (
            "\n".join(map(escape_controls, item.split("\n"))) if isinstance(item, str) else item
            for item in objects
        )
        super().print(*printable, **options)


def console() -> Screen:
    """Return a console for tables that interprets no markup in the values it prints."""
    return Screen(highlight=False, markup=False, soft_wrap=True)


def one_line(value: object) -> str:
    """A value from a file as one line without control characters, of at most 300 characters."""
    text = str(value)
    return escape_controls(text[:300]) + ("…" if text[300:] else "")


def safe_text(text: str) -> str:
    """A text of many lines for standard output: on a terminal, without control characters."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


def table(title: str, *columns: str) -> Table:
    """A table of names and numbers, none truncated. A column that ends in "#" holds numbers."""
    grid = Table(
        title=Text(one_line(title)),
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_header=any(columns),
    )
    for name in columns:
        is_number = name.endswith("#")
        justify: Literal["right", "left"] = "right" if is_number else "left"
        grid.add_column(name.removesuffix("#"), justify=justify, overflow="fold", no_wrap=is_number)
    return grid


def add_row(grid: Table, *cells: object) -> None:
    grid.add_row(*(Text(one_line(cell)) for cell in cells))


def format_bytes(count: int) -> str:
    """Bytes in the largest decimal unit: 1.2 MB."""
    number = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:,.1f} TB"


@contextmanager
def progress_bar(title: str, total: int, *, in_bytes: bool = False, shown: bool = True) -> Iterator[Advance]:
    """Show a progress bar on stderr, removed when done; yields a function to call with the number just done.

    With `in_bytes` it counts bytes, with their rate. If stderr is not a terminal, a line is printed each
    minute instead; nothing if not `shown`.
    """
    counts = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    columns = (TextColumn(title), BarColumn(), *counts, TimeRemainingColumn())
    console = Screen(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not (shown and console.is_terminal)
    ) as bar:
        task = bar.add_task(title, total=total)
        lines = ProgressLines(title, total, in_bytes=in_bytes)
        yield lines.advance if shown and not console.is_terminal else partial(bar.advance, task)


class ProgressLines:
    """Progress in a log: a line on stderr each minute."""

    def __init__(
        self, title: str, total: int, *, in_bytes: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.title, self.total, self.clock = title, total, clock
        self.number: Callable[[int], str] = format_bytes if in_bytes else "{:,}".format
        self.done, self.printed = 0, clock()
        self.first: tuple[float, int] | None = None
        """Time and number of the first advance: an earlier command may have done that number."""

    def advance(self, count: int) -> None:
        self.done += count
        now = self.clock()
        self.first = self.first or (now, self.done)
        if now - self.printed >= LINE_S:
            self.printed = now
            begin, before = self.first
            line = f"{self.title}: {self.number(self.done)} of {self.number(self.total)}"
            if self.done > before:  # the rate is known
                seconds = (self.total - self.done) * (now - begin) / (self.done - before)
                line += f", {timedelta(seconds=round(seconds))} left"
            print(line, file=sys.stderr, flush=True)
