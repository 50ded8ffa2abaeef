"""Runs in a terminal: a table that is drawn again, or lines in a log."""

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from mlm.tracking.html.rows import Column
from mlm.tracking.html.runs import Run
from mlm.tracking.page.parts import MISSING, figure, last, lowest, middle, notes_on, progress, state
from mlm.tracking.panel import duration
from mlm.util.terminal import add_row, plain, table

BLOCKS = "▁▂▃▄▅▆▇█"
LEVELS = "_.-=*#"
"""Heights where a terminal has no blocks."""
WIDTH = 24  # characters of a curve


def overview(runs: Sequence[Run], *, ascii_only: bool = False) -> RenderableType:
    """Return a table of the runs with their newest numbers, and lines on what is missing."""
    numbers = ("step#", "loss#", "curve", "validation#", "best#", "tokens/s#", "left#", "last record#")
    made = table("", "run", "state", *numbers)
    for run in runs:
        add_row(
            made,
            run.name,
            state(run),
            progress(run),
            figure(last(run, "step", "loss")),
            sparkline(run.column("step", "loss"), LEVELS if ascii_only else BLOCKS),
            figure(last(run, "validation", "loss")),
            figure(lowest(run, "validation", "loss")),
            figure(middle(run, "tokens_per_s"), "{:,.0f}"),
            left(run),
            since_last(run),
        )
    return Group(made, *(Text(plain(note)) for run in runs for note in notes_on(run)))


def line(run: Run) -> str:
    """Return the newest numbers of a run as names and values."""
    found = [plain(run.name), state(run), f"step {progress(run)}"]
    found.append(f"loss {figure(last(run, 'step', 'loss'))}")
    if len(run.column("validation", "loss")):
        found.append(f"validation {figure(last(run, 'validation', 'loss'))}")
    return "  ".join(
        [*found, f"tokens/s {figure(middle(run, 'tokens_per_s'), '{:.0f}')}", f"left {left(run)}"]
    )


def left(run: Run) -> str:
    """Return the time that the rest of a run takes at its median speed."""
    step_s = middle(run, "step_time_s")
    return (
        MISSING
        if run.is_finished or run.total is None or step_s != step_s
        else duration((run.total - run.done) * step_s)
    )


def since_last(run: Run) -> str:
    """Return the time since a run's newest record."""
    since = time.time() - run.last_time
    return f"{duration(max(since, 0.0))} ago" if since == since else MISSING


def sparkline(column: Column, levels: str) -> str:
    """Draw a curve in a line of characters, each the mean of its part."""
    if not len(column):
        return ""
    count = min(WIDTH, len(column))
    means = [
        float(column[n * len(column) // count : (n + 1) * len(column) // count].mean()) for n in range(count)
    ]
    low, high = min(means), max(means)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((mean - low) * scale)] for mean in means)
