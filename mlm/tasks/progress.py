"""A progress bar for commands that work through bytes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

Advance = Callable[[int], None]


@contextmanager
def byte_progress(title: str, total: int) -> Iterator[Advance]:
    """A bar with bytes, rate and time left on stderr, gone when done; yields what to call with bytes done.

    Nothing is drawn where stderr is no terminal.
    """
    columns = (
        TextColumn(title),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
