"""A plan drawn for a terminal and for a page: a line per rank, time from left to right.

In a terminal lines are folded to its width. A cell begins with the op's letter and is filled with dashes, on
the colour of its op and chunk; idle time is dots.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape
from rich.console import Console
from rich.text import Text

from mlm.parallel.pipeline.actions import Action, Op, Plan, TimedAction
from mlm.util.results import CREATOR

NAMES = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.WEIGHT: "weight gradient"}
INPUT_GRADIENT = "input gradient"  # what BACKWARD is where there are WEIGHT actions
IDLE = "."
MOST_LINES = 60  # of a picture; longer ones lose their middle
MOST_UNEQUAL = 8  # a computation this many times shorter than the longest is drawn without its number
TICK_COLUMNS = 10  # between numbers on the time axis, at least
HUES = {Op.FORWARD: (43, 108, 176), Op.BACKWARD: (39, 119, 73), Op.WEIGHT: (192, 86, 33)}
LIGHTEST = 0.65  # share of white in the last chunk's colour
PAGE_WIDTH, ROW = 1000, 24
"""Width of a drawing in a page, and height of a rank, in its own units."""


@dataclass(frozen=True)
class Scale:
    """Time and chunks in characters."""

    num_chunks: int
    columns_per_time: float

    def column(self, time: float) -> int:
        """Column of a time, counted from the start."""
        return round(time * self.columns_per_time)


def draw(plan: Plan, screen: Console) -> None:
    """Print the timeline of all ranks and its legend."""
    scale = scale_for(plan)
    margin = len(row_name(len(plan.timeline) - 1)) + 2
    all_windows = windows(scale.column(plan.makespan), max(screen.width - margin, 20))
    shown = max(MOST_LINES // (len(plan.timeline) + 2), 2)
    first = all_windows if len(all_windows) <= shown else all_windows[: shown - shown // 2]
    last = [] if len(all_windows) <= shown else all_windows[-(shown // 2) :]
    draw_windows(plan, scale, first, screen, margin)
    if last:
        since, until = (column / scale.columns_per_time for column in (first[-1][1], last[0][0]))
        screen.print(f"… from {since:.6g} to {until:.6g} left out; out=schedule.svg draws all …\n")
    draw_windows(plan, scale, last, screen, margin)
    screen.print(legend(plan, scale))


def draw_windows(plan: Plan, scale: Scale, some: list[tuple[int, int]], screen: Console, margin: int) -> None:
    """Each window of time [first column, end) as a block: the time axis, a line per rank, an empty line."""
    for start, end in some:
        screen.print(Text(f"{'time':<{margin}}{axis(scale, start, end)}".rstrip(), style="dim"))
        for rank, spans in enumerate(plan.timeline):
            line = Text(f"{row_name(rank):<{margin}}")
            screen.print(line.append_text(row(spans, scale, start, end)), soft_wrap=True)
        screen.print()


def row_name(rank: int) -> str:
    """Label at the start of a line."""
    return f"rank {rank}"


def windows(total: int, width: int) -> list[tuple[int, int]]:
    """Columns 0 to `total` split into windows [start, end) of at most `width`."""
    return [(start, min(start + width, total)) for start in range(0, total, width)]


def scale_for(plan: Plan) -> Scale:
    """As many columns per time as the shortest computation needs for its label."""
    spans = [span for rank in plan.timeline for span in rank]
    num_chunks = plan.num_stages // len(plan.timeline)
    cell = max(len(label(span.action, num_chunks)) for span in spans)
    lengths = [span.end - span.start for span in spans]
    shortest = max(min(lengths), max(lengths) / MOST_UNEQUAL)
    return Scale(num_chunks, cell / shortest)


def label(action: Action, num_chunks: int) -> str:
    """Label of a cell: F3, and on the second of two chunks f3; of more chunks F3.2."""
    letter = action.op.value.lower() if num_chunks == 2 and action.chunk else action.op.value
    return f"{letter}{action.micro_batch}" + (f".{action.chunk}" if num_chunks > 2 else "")


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
        colour = fill(span.action, scale.num_chunks)
        text = label(span.action, scale.num_chunks).ljust(last - first, "-")
        shown = text[max(at - first, 0) : min(last, end) - first]
        line.append(shown, style=f"{ink(colour)} on {colour}")
        at = min(last, end)
    return line.append(IDLE * (end - at), style="dim")


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


def legend(plan: Plan, scale: Scale) -> str:
    """Legend of the cells."""
    words = [f"{op.value} {name}" for op, name in op_names(plan.timeline).items()]
    line = "   ".join([*words, f"{IDLE} idle", "numbers: micro-batches"])
    if scale.num_chunks == 1:
        return line
    return (
        f"{line}; {'small letters: the second chunk' if scale.num_chunks == 2 else 'after the point: chunks'}"
    )


def op_names(lines: Sequence[Sequence[TimedAction]]) -> dict[Op, str]:
    """The operations of a drawing with their names."""
    ops = {span.action.op for spans in lines for span in spans}
    names = NAMES | ({Op.BACKWARD: INPUT_GRADIENT} if Op.WEIGHT in ops else {})
    return {op: names[op] for op in Op if op in ops}


def fill(action: Action, num_chunks: int) -> str:
    """The colour of a computation's cell, as #rrggbb."""
    white = LIGHTEST * action.chunk / max(num_chunks - 1, 1)
    return "#" + "".join(f"{round(value + white * (255 - value)):02x}" for value in HUES[action.op])


def ink(colour: str) -> str:
    """Black or white, whichever reads better on a colour given as #rrggbb."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def svg_timeline(plan: Plan) -> Markup:
    """Draw who computes what when, with a legend."""
    lines = plan.timeline
    chunks = plan.num_stages // len(lines)
    return Markup(svg(lines, chunks, plan.makespan, "schedule") + svg_legend(lines))


def svg(lines: Sequence[Sequence[TimedAction]], chunks: int, whole: float, name: str) -> Markup:
    """Draw a line of computations for each stage, over a time of `whole`; `name` is read aloud."""
    scale, height, parts = PAGE_WIDTH / whole, ROW * len(lines), []
    for rank, spans in enumerate(lines):
        parts.append(
            f'<rect class="idle" x="0" y="{rank * ROW + 1}" width="{PAGE_WIDTH}" height="{ROW - 2}"/>'
        )
        for span in spans:
            action, x, y = span.action, span.start * scale, rank * ROW
            width, paler = (span.end - span.start) * scale, 1 - 0.5 * action.chunk / max(chunks - 1, 1)
            inner = max(width - 0.6, 0.4)
            label = f"{action.op.value}{action.micro_batch}" if width > 22 else str(action.micro_batch)
            parts.append(
                f'<rect class="op{action.op.value}" x="{x:.4g}" y="{y + 1}" width="{inner:.4g}"'
                f' height="{ROW - 2}" fill-opacity="{paler:.2g}"/>'
            )
            if width > 7 * len(label):
                parts.append(f'<text x="{x + width / 2:.4g}" y="{y + 16}">{label}</text>')
    return Markup(
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(name)}"><svg class="schedule" '
        f'role="img" viewBox="0 0 {PAGE_WIDTH} {height}" aria-label="a line per stage, time to the right">'
        f"{''.join(parts)}</svg></div>"
    )


def svg_file(plan: Plan, caption: str) -> bytes:
    """Draw a plan as a file of its own, with a caption and the colours of a terminal."""
    lines, top = plan.timeline, 2 * ROW
    drawn = svg(lines, plan.num_stages // len(lines), plan.makespan, "schedule")
    inner = drawn[drawn.index(">", drawn.index("<svg")) + 1 : drawn.index("</svg>")]
    colours = "".join(f".op{op.value}{{fill:rgb{hue}}}" for op, hue in HUES.items())
    keys = "".join(
        f'<text class="op{op.value}" x="{120 * n}" y="{top + ROW * len(lines) + 18}">{op.value} {name}</text>'
        for n, (op, name) in enumerate(op_names(lines).items())
    )
    style = f".idle{{fill:#e8e8e8}}text{{font:11px sans-serif}}g text{{text-anchor:middle}}{colours}"
    size = f"0 0 {PAGE_WIDTH} {top + ROW * (len(lines) + 1)}"
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:dc="http://purl.org/dc/elements/1.1/"'
    return (
        f'<svg {names} viewBox="{size}"><metadata><dc:title>{CREATOR} plan</dc:title></metadata>'
        f'<style>{style}</style><text y="16">{escape(caption)}</text>'
        f'<g transform="translate(0 {ROW})">{inner}</g>{keys}</svg>\n'
    ).encode()


def svg_legend(lines: Sequence[Sequence[TimedAction]]) -> Markup:
    """Name the colours of a drawing."""
    names = ((op.value, name) for op, name in op_names(lines).items())
    keys = "".join(f'<span class="key op{letter}">{letter}</span> {name} ' for letter, name in names)
    return Markup(f'<p class="legend">{keys}<span class="key idle"> </span> idle</p>\n')
