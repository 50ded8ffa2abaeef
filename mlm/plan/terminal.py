"""A plan drawn in characters: a line per rank, time from left to right, folded to the terminal's width.

With colours a cell is its micro-batch's number on the colour of its op and chunk. Without, it begins with the
op's letter and is filled with dashes. Idle time is dots in both.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from mlm.parallel.pipeline.actions import Action, Op, Plan, TimedAction

NAMES = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.WEIGHT: "weight gradient"}
INPUT_GRADIENT = "input gradient"  # what BACKWARD is where there are WEIGHT actions
IDLE = "."
MOST_LINES = 60  # of a picture; longer ones lose their middle
MOST_UNEQUAL = 8  # a computation this many times shorter than the longest is drawn without its number
TICK_COLUMNS = 10  # between numbers on the time axis, at least
HUES = {Op.FORWARD: (43, 108, 176), Op.BACKWARD: (39, 119, 73), Op.WEIGHT: (192, 86, 33)}
LIGHTEST = 0.65  # share of white in the last chunk's colour


@dataclass(frozen=True)
class Scale:
    """Time and chunks in characters."""

    coloured: bool
    num_chunks: int
    columns_per_time: float

    def column(self, time: float) -> int:
        """Column of a time, counted from the start."""
        return round(time * self.columns_per_time)


def draw(plan: Plan, console: Console) -> None:
    """Print the timeline of all ranks and its legend."""
    scale = scale_for(plan, coloured=has_shades(console))
    margin = len(row_name(len(plan.timeline) - 1)) + 2
    width = max(console.width - margin, 20)
    all_windows = windows(scale.column(plan.makespan), width)
    shown = max(MOST_LINES // (len(plan.timeline) + 2), 2)
    first = all_windows if len(all_windows) <= shown else all_windows[: shown - shown // 2]
    last = [] if len(all_windows) <= shown else all_windows[-(shown // 2) :]
    draw_windows(plan, scale, first, console, margin)
    if last:
        since, until = (column / scale.columns_per_time for column in (first[-1][1], last[0][0]))
        show(Text(f"… from {since:.6g} to {until:.6g} left out; out=schedule.svg draws all …\n"), console)
    draw_windows(plan, scale, last, console, margin)
    show(legend(plan, scale), console)


def has_shades(console: Console) -> bool:
    """True if the terminal has enough colours to tell chunks apart by shades: 8 or 16 are too few."""
    return console.color_system in ("256", "truecolor") and not console.no_color


def draw_windows(
    plan: Plan, scale: Scale, some: list[tuple[int, int]], console: Console, margin: int
) -> None:
    """Each window of time [first column, end) as a block: the time axis, a line per rank, an empty line."""
    for start, end in some:
        show(Text(f"{'time':<{margin}}{axis(scale, start, end)}".rstrip(), style="dim"), console)
        for rank, spans in enumerate(plan.timeline):
            line = Text(f"{row_name(rank):<{margin}}")
            show(line.append_text(row(spans, scale, start, end)), console)
        show(Text(), console)


def show(line: Text, console: Console) -> None:
    """Print one line as it is."""
    console.print(line, soft_wrap=True, highlight=False)


def row_name(rank: int) -> str:
    """Label at the start of a line."""
    return f"rank {rank}"


def windows(total: int, width: int) -> list[tuple[int, int]]:
    """Columns 0 to `total` split into windows [start, end) of at most `width`."""
    return [(start, min(start + width, total)) for start in range(0, total, width)]


def scale_for(plan: Plan, *, coloured: bool) -> Scale:
    """As many columns per time as the shortest computation needs for its label."""
    spans = [span for rank in plan.timeline for span in rank]
    num_chunks = plan.num_stages // len(plan.timeline)
    bare = Scale(coloured, num_chunks, 1.0)
    cell = max(len(label(span.action, bare)) for span in spans)
    lengths = [span.end - span.start for span in spans]
    shortest = max(min(lengths), max(lengths) / MOST_UNEQUAL)
    return Scale(coloured, num_chunks, cell / shortest)


def label(action: Action, scale: Scale) -> str:
    """Label of a cell: its op and chunk in colours or in letters (F3 and f3 on two chunks, F3.2 on more)."""
    if scale.coloured:
        return f" {action.micro_batch}"
    letter = action.op.value.lower() if scale.num_chunks == 2 and action.chunk else action.op.value
    return f"{letter}{action.micro_batch}" + (f".{action.chunk}" if scale.num_chunks > 2 else "")


def row(spans: tuple[TimedAction, ...], scale: Scale, start: int, end: int) -> Text:
    """A rank's computations and idle times in columns [start, end)."""
    line, at = Text(), start
    for span in spans:
        first, last = scale.column(span.start), scale.column(span.end)
        if last <= at:
            continue
        if first >= end:
            break
        line.append(IDLE * (max(first, at) - at), style="dim")
        text = label(span.action, scale).ljust(last - first, " " if scale.coloured else "-")
        line.append(text[max(at - first, 0) : min(last, end) - first], style=style(span.action, scale))
        at = min(last, end)
    return line.append(IDLE * (end - at), style="dim")


def style(action: Action, scale: Scale) -> str:
    """Rich style of a cell."""
    if not scale.coloured:
        return ""
    colour = fill(action, scale.num_chunks)
    return f"{ink(colour)} on {colour}"


def axis(scale: Scale, start: int, end: int) -> str:
    """Times over their columns, at round distances."""
    line = ""
    step = round_step(TICK_COLUMNS / scale.columns_per_time)
    for tick in ticks(start / scale.columns_per_time, end / scale.columns_per_time, step):
        column = scale.column(tick) - start
        if column >= 0 and column + len(f"{tick:.6g}") <= end - start:
            line = f"{line:<{column}}{tick:.6g}"
    return line


def ticks(start: float, end: float, step: float) -> Iterator[float]:
    """Multiples of `step` from `start` to `end`."""
    for number in range(math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9) + 1):
        yield number * step


def round_step(least: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def legend(plan: Plan, scale: Scale) -> Text:
    """Legend of the cells."""
    ops = [op for op in Op if any(span.action.op is op for spans in plan.timeline for span in spans)]
    line = Text()
    for op in ops:
        name = INPUT_GRADIENT if op is Op.BACKWARD and Op.WEIGHT in ops else NAMES[op]
        if scale.coloured:
            for chunk in range(scale.num_chunks):
                line.append(f" {op.value} ", style=style(Action(op, chunk, 0), scale))
            line.append(f" {name}   ")
        else:
            line.append(f"{op.value} {name}   ")
    line.append(f"{IDLE} idle   numbers: micro-batches")
    if scale.num_chunks > 1:
        line.append(f"; {chunk_words(scale)}")
    return line


def chunk_words(scale: Scale) -> str:
    """The legend's words on a rank's chunks."""
    if scale.coloured:
        return "later chunks lighter"
    if scale.num_chunks == 2:
        return "small letters: the second chunk"
    return "after the point: chunks"


def fill(action: Action, num_chunks: int) -> str:
    """The colour of a computation's cell, as #rrggbb."""
    white = LIGHTEST * action.chunk / max(num_chunks - 1, 1)
    return "#" + "".join(f"{round(value + white * (255 - value)):02x}" for value in HUES[action.op])


def ink(colour: str) -> str:
    """Black or white, whichever reads better on a colour given as #rrggbb."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"
