"""A plan drawn for a terminal and for a page: a line per rank, time from left to right.

In a terminal lines are folded to its width. A cell begins with the op's letter and is filled with dashes, on
the colour of its op; idle time is dots.
"""

from collections.abc import Sequence

from markupsafe import Markup, escape
from rich.console import Console
from rich.text import Text

from mlm.parallel.pipeline.actions import Action, Op, Plan, TimedAction
from mlm.util.results import CREATOR

NAMES = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.WEIGHT: "weight gradient"}
INPUT_GRADIENT = "input gradient"  # what BACKWARD is where there are WEIGHT actions
IDLE = "."
MOST_LINES = 60  # of a picture
HUES = {Op.FORWARD: "rgb(43,108,176)", Op.BACKWARD: "rgb(39,119,73)", Op.WEIGHT: "rgb(192,86,33)"}
PAGE_WIDTH, ROW = 1000, 24
"""Width of a drawing in a page, and height of a rank, in its own units."""


def draw(plan: Plan, screen: Console) -> None:
    """Print all ranks' timelines, folded to the screen's width, of long ones the start; and a legend.

    The shortest computation takes a time of 1.
    """
    chunks, margin = plan.num_stages // len(plan.timeline), len(f"rank {len(plan.timeline) - 1}  ")
    cell = max(len(label(span.action, chunks)) for rank in plan.timeline for span in rank)
    columns, width = round(plan.makespan * cell), max(screen.width - margin, 20)
    shown = min(columns, width * max(MOST_LINES // (len(plan.timeline) + 1), 2))
    lines = [row(spans, chunks, cell, shown) for spans in plan.timeline]
    for start in range(0, shown, width):
        for rank, line in enumerate(lines):
            name = Text(f"{f'rank {rank}':<{margin}}")
            screen.print(name.append_text(line[start : start + width]), soft_wrap=True)
        screen.print()
    if shown < columns:
        screen.print(f"… the rest, from {shown / cell:.6g} on, is left out; out=schedule.svg draws all …\n")
    words = [f"{op.value} {name}" for op, name in op_names(plan.timeline).items()]
    more = ("", "; small letters: the second chunk", "; after the point: chunks")[min(chunks, 3) - 1]
    screen.print("   ".join([*words, f"{IDLE} idle", f"numbers: micro-batches{more}"]))


def label(action: Action, chunks: int) -> str:
    """Label of a cell: F3, and on the second of two chunks f3; of more chunks F3.2."""
    letter = action.op.value.lower() if chunks == 2 and action.chunk else action.op.value
    return f"{letter}{action.micro_batch}" + (f".{action.chunk}" if chunks > 2 else "")


def row(spans: Sequence[TimedAction], chunks: int, cell: int, columns: int) -> Text:
    """A rank's computations and idle times in the first columns, `cell` for the shortest computation."""
    line = Text()
    for span in spans:
        if len(line) >= columns:
            break
        line.append(IDLE * (round(span.start * cell) - len(line)), style="dim")
        text = label(span.action, chunks).ljust(round(span.end * cell) - len(line), "-")
        line.append(text, style=f"white on {HUES[span.action.op]}")
    return line.append(IDLE * (columns - len(line)), style="dim")[:columns]


def op_names(lines: Sequence[Sequence[TimedAction]]) -> dict[Op, str]:
    """The operations of a drawing with their names."""
    ops = {span.action.op for spans in lines for span in spans}
    names = NAMES | ({Op.BACKWARD: INPUT_GRADIENT} if Op.WEIGHT in ops else {})
    return {op: names[op] for op in Op if op in ops}


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
    colours = "".join(f".op{op.value}{{fill:{hue}}}" for op, hue in HUES.items())
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
