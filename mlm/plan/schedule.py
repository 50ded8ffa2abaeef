"""`mlm plan schedule`: simulate a pipeline schedule, draw it and print its cost. No torch, no model."""

import json
from io import BytesIO
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlm.parallel.pipeline.actions import Plan
from mlm.plan import picture, terminal
from mlm.plan.config import PlanScheduleConfig
from mlm.plan.numbers import Formula, closed_bubble, rank_numbers, record, simulate, title
from mlm.plan.timeline import timeline
from mlm.tracking.page.html import page, paragraph, table
from mlm.util.errors import UserError
from mlm.util.results import target_name, write_result
from mlm.util.terminal import Screen

MOST_DRAWN = 10_000
"""Computations on a page: some 2 MB."""


def run(config: PlanScheduleConfig, console: Console | None = None) -> Plan:
    """Print the schedule and its numbers, write `out` where it is given, and return the plan.

    Raises UserError if `out` cannot be written.
    """
    console = console or Screen()
    plan = simulate(config)
    say(f"{title(config)}\n", console)
    terminal.draw(plan, console)
    show_numbers(plan, closed_bubble(config), console)
    if config.out is not None:
        write(plan, config, Path(config.out))
        say(f"written to {target_name(config.out)}", console)
    return plan


def show_numbers(plan: Plan, formula: Formula, console: Console) -> None:
    """The numbers of the whole plan in two lines, those of the ranks in a table."""
    say(f"\nbubble    {plan.bubble:.2%} of the ideal time; {compared(plan.bubble, formula)}", console)
    ideal = plan.makespan / (1 + plan.bubble)
    say(f"makespan  {plan.makespan:.6g}; {ideal:.6g} without the bubble\n", console)
    shown = Table()
    for heading in ("rank", "idle", "peak in flight", "sends", "receives"):
        shown.add_column(heading, justify="right")
    for row in rank_numbers(plan):
        cells = (row.rank, f"{row.idle:.6g}", row.peak_in_flight, row.sends, row.receives)
        shown.add_row(*map(str, cells))
    console.print(shown)
    say("in flight: micro-batches whose activations it holds, each chunk's counted separately", console)


def schedule_page(plan: Plan, config: PlanScheduleConfig) -> bytes:
    """Return a page with the drawing and the numbers of a plan."""
    count = sum(map(len, plan.timeline))
    large = f"{count:,} computations are too many to draw here; out=schedule.svg draws all."
    words = f"Bubble {plan.bubble:.2%} of the ideal time; {compared(plan.bubble, closed_bubble(config))}. "
    words += f"Makespan {plan.makespan:.6g}. Numbers in the drawing are micro-batches."
    drawn = timeline(plan) if count <= MOST_DRAWN else paragraph(large)
    rows = [
        [f"P{row.rank}", f"{row.idle:.6g}", row.peak_in_flight, row.sends, row.receives]
        for row in rank_numbers(plan)
    ]
    ranks = table(["rank", "idle", "peak in flight", "sends", "receives"], rows)
    parts = [("schedule", "Schedule", paragraph(words) + drawn), ("ranks", "Ranks", ranks)]
    return page(title(config), parts)


def say(line: str, console: Console) -> None:
    """Print one line as it is: no markup, no wrapping, no colours."""
    console.print(Text(line), soft_wrap=True)


def compared(bubble: float, formula: Formula) -> str:
    """The formula's value compared with the simulated one, and why they differ."""
    said = f"formula {formula.words} = {formula.value:.2%}"
    return said if abs(bubble - formula.value) < 1e-9 else f"{said} (exact {formula.holds})"


def write(plan: Plan, config: PlanScheduleConfig, out: Path) -> None:
    """Write the picture or, to a .json, a stream or a device, the record. Raises UserError."""
    kind = out.suffix.removeprefix(".")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"out={out}: {error.strerror} ({error.filename}): free space there, or set another out="
        ) from error
    if kind in ("svg", "png"):
        caption = f"{title(config)}   bubble {plan.bubble:.2%}   makespan {plan.makespan:.6g}"
        drawn = BytesIO()
        picture.draw(plan, caption, drawn, kind)
        write_result(out, drawn.getvalue())
    elif kind == "html":
        write_result(out, schedule_page(plan, config))
    else:
        write_result(out, (json.dumps(record(plan, config), indent=1) + "\n").encode())
