"""A plan drawn for a terminal: a line per rank, time from left to right, folded to the screen's width.

A cell begins with the op's letter and is filled with dashes, on
the colour of its op; idle time is dots.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from mlm.parallel.pipeline.actions import Action, Op, Plan, TimedAction

NAMES = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.WEIGHT: "weight gradient"}
INPUT_GRADIENT = "input gradient"  # what BACKWARD is where there are WEIGHT actions
IDLE = "."
MOST_LINES = 60  # of a picture
HUES = {Op.FORWARD: "rgb(43,108,176)", Op.BACKWARD: "rgb(39,119,73)", Op.WEIGHT: "rgb(192,86,33)"}


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
        screen.print(f"… the rest, from {shown / cell:.6g} on, is left out; out=schedule.json holds all …\n")
    ops = {span.action.op for spans in plan.timeline for span in spans}
    names = NAMES | ({Op.BACKWARD: INPUT_GRADIENT} if Op.WEIGHT in ops else {})
    words = [f"{op.value} {names[op]}" for op in Op if op in ops]
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
