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
from rich.filesize import decimal
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
format_bytes = decimal
"""Bytes in the largest decimal unit: 1.2 MB."""
LINE_S = 60.0
"""Seconds between lines of progress in a log."""


class Screen(Console):
    """A console that escapes control characters, and writes escape codes to terminals alone.

    Ignores FORCE_COLOR, which notebooks set for their child processes.
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
    """Return a console for tables that prints markup literally."""
    return Screen(highlight=False, markup=False, soft_wrap=True)


def one_line(value: object) -> str:
    """A value from a file as one line without control characters, of at most 300 characters."""
    text = str(value)
    return escape_controls(text[:300]) + ("…" if text[300:] else "")


def safe_text(text: str) -> str:
    """Replace control characters of a multi-line text if standard output is a terminal."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


def table(title: str, *columns: str) -> Table:
    """A table without truncation. A column whose name ends in "#" holds numbers."""
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


@contextmanager
def progress_bar(title: str, total: int, *, in_bytes: bool = False, shown: bool = True) -> Iterator[Advance]:
    """Show a progress bar on stderr, removed at the end; yield a function that advances it by a count.

    With `in_bytes` it shows bytes and their rate. If stderr is not a terminal, prints a line each minute
    instead; nothing if not `shown`.
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
        """Time and count of the first advance, which may include work of an earlier command."""

    def advance(self, count: int) -> None:
        self.done += count
        now = self.clock()
        self.first = self.first or (now, self.done)
        if now - self.printed >= LINE_S:
            self.printed = now
            start, initial = self.first
            line = f"{self.title}: {self.number(self.done)} of {self.number(self.total)}"
            if self.done > initial:
                seconds = (self.total - self.done) * (now - start) / (self.done - initial)
                line += f", {timedelta(seconds=round(seconds))} left"
            print(line, file=sys.stderr, flush=True)
