"""Simulation of a pipeline schedule: drawn by `mlm plan schedule`, and timed for plans. No torch, no model.

The drawing has a line per rank, time from left to right, folded to the screen's width. A computation begins
with its op's letter and is filled with dashes, in the colour of its op; idle time is dots.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mlm.parallel.config import Schedule
from mlm.parallel.pipeline.actions import Action, Cost, Op, Plan, TimedAction
from mlm.parallel.pipeline.lower import Step, lower, order_actions, simulate_steps
from mlm.parallel.pipeline.schedules import build_schedule
from mlm.plan.config import PlanScheduleConfig
from mlm.util.extras import load_extra
from mlm.util.results import save_result
from mlm.util.terminal import console

LEAST_SIMULATED = 512
"""Pairs of stage and micro-batch up to which a step is simulated in full."""


def run(config: PlanScheduleConfig) -> Plan:
    """Print the schedule and its numbers and write `out`; return the plan."""
    schedule = build_schedule(
        config.pipeline, stages=config.pp, chunks=config.vp, micro_batches=config.micro_batches
    )
    plan, screen = lower(schedule), console()
    name = {"1f1b": "1F1B", "gpipe": "GPipe", "zb_h1": "ZB-H1"}[config.pipeline]
    name = f"interleaved {name}" if config.vp > 1 else name
    screen.print(f"{name} · pp={config.pp} vp={config.vp} micro_batches={config.micro_batches}\n")
    draw(plan, screen)
    screen.print(f"\nbubble    {plan.bubble:.2%} of the ideal time")
    screen.print(f"makespan  {plan.makespan:.6g}; {plan.makespan / (1 + plan.bubble):.6g} without the bubble")
    in_flight = " ".join(map(str, plan.peak_in_flight))
    screen.print(
        f"in flight {in_flight}: micro-batches of which a rank holds activations, in each of its chunks"
    )
    ending = Path(config.out or "").suffix
    content: bytes | dict[str, Any]
    if ending in (".svg", ".png"):
        content = render_picture(plan, config.out, ending[1:])
    else:  # a forward pass of a chunk takes 1; F3.1 is of chunk 1
        content = {
            "format": "mlm-schedule-1",
            "settings": {key: value for key, value in asdict(config).items() if key != "out"},
            "bubble": plan.bubble,
            "makespan": plan.makespan,
            "peak_in_flight": plan.peak_in_flight,
            "instructions": [list(map(str, of_rank)) for of_rank in plan.instructions],
            "timeline": [[(str(x.action), x.start, x.end) for x in spans] for spans in plan.timeline],
        }
    save_result(config.out, content, screen.print)
    return plan


def pipeline_time(name: Schedule, p: int, v: int, m: int, costs: Sequence[Cost]) -> float:
    """Return the time of all micro-batches through p * v stages with these costs.

    A long step is simulated for its first rounds of p micro-batches; each further round takes as long as the
    last of these.
    """
    split = name == "zb_h1"
    few = (3 if split else 2) * p + m % p
    if m <= few or m * p * v <= LEAST_SIMULATED:
        return _simulate(_steps(name, p, v, m), p, costs, split=split)[0]
    elapsed, period = _simulate(_steps(name, p, v, few), p, costs, split=split)
    if name != "1f1b":  # all forward passes come first, or weight gradients last: rounds differ
        period = elapsed - _simulate(_steps(name, p, v, few - p), p, costs, split=split)[0]
    return elapsed + period * (m - few) / p


def _simulate(steps: list[Step], p: int, costs: Sequence[Cost], *, split: bool) -> tuple[float, float]:
    """Return the time of the step, and of the last p micro-batches at the end of the last stage."""
    _, ends = simulate_steps(steps, p, costs, split=split)
    last = len(costs) - 1
    losses = [end for step, end in zip(steps, ends, strict=True) if step.op == 1 and step.stage == last]
    return max(ends), losses[-1] - losses[-1 - p] if len(losses) > p else 0.0


@cache
def _steps(name: str, p: int, v: int, m: int) -> list[Step]:
    """Return a schedule's actions, each after its inputs; the order does not depend on costs."""
    return order_actions(build_schedule(name, stages=p, chunks=v, micro_batches=m))


NAMES = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.WEIGHT: "weight gradient"}
INPUT_GRADIENT = "input gradient"  # BACKWARD in a schedule with WEIGHT actions
IDLE = "."
MAX_LINES = 60  # of a drawing on the terminal
HUES = {Op.FORWARD: "rgb(43,108,176)", Op.BACKWARD: "rgb(39,119,73)", Op.WEIGHT: "rgb(192,86,33)"}


def draw(plan: Plan, screen: Console) -> None:
    """Print all ranks' timelines, folded to the screen's width and truncated, and a legend.

    The shortest computation takes a time of 1.
    """
    chunks, margin = plan.num_stages // len(plan.timeline), len(f"rank {len(plan.timeline) - 1}  ")
    cell = max(len(label(span.action, chunks)) for rank in plan.timeline for span in rank)
    columns, width = round(plan.makespan * cell), max(screen.width - margin, 20)
    shown = min(columns, width * max(MAX_LINES // (len(plan.timeline) + 1), 2))
    lines = [timeline_text(spans, chunks, cell, shown) for spans in plan.timeline]
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


MAX_LABELS = 2000


def render_picture(plan: Plan, out: str | None, form: str) -> bytes:
    """Return the timelines of all ranks as SVG or PNG. Raises UserError without matplotlib."""
    rc_context = load_extra("matplotlib", f"out={out}", "reproduce").rc_context
    figures = load_extra("matplotlib.figure", f"out={out}", "reproduce")
    chunks, ranks = plan.num_stages // len(plan.timeline), len(plan.timeline)
    figure = figures.Figure(figsize=(min(max(plan.makespan / 3, 6), 40), 1 + 0.4 * ranks), layout="tight")
    axes = figure.subplots()
    ops = {span.action.op for spans in plan.timeline for span in spans}
    colours = {op: tuple(int(c) / 255 for c in HUES[op][4:-1].split(",")) for op in Op if op in ops}
    for op, colour in colours.items():
        name = INPUT_GRADIENT if op is Op.BACKWARD and Op.WEIGHT in ops else NAMES[op]
        for rank, spans in enumerate(plan.timeline):
            times = [(span.start, span.end - span.start) for span in spans if span.action.op is op]
            style = {"label": name if rank == 0 else None, "edgecolor": "white", "linewidth": 0.5}
            axes.broken_barh(times, (rank - 0.45, 0.9), facecolors=colour, **style)
    if sum(map(len, plan.timeline)) <= MAX_LABELS:
        for rank, spans in enumerate(plan.timeline):
            for span in spans:
                style = {"color": "white", "fontsize": 6, "ha": "center", "va": "center"}
                axes.text((span.start + span.end) / 2, rank, label(span.action, chunks), **style)
    axes.set(xlim=(0, plan.makespan), ylim=(ranks - 0.5, -0.5), xlabel="time (a forward pass takes 1)")
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_title(f"bubble {plan.bubble:.2%}, makespan {plan.makespan:.6g}", fontsize=9)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.25), ncols=3, fontsize=8, frameon=False)
    content = BytesIO()
    metadata = {"Software": "mlm"} if form == "png" else {"Creator": "mlm", "Date": None}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "mlm"}):  # text stays text, and equal files
        figure.savefig(content, format=form, dpi=150, metadata=metadata)
    return content.getvalue()


def label(action: Action, chunks: int) -> str:
    """Return the label of a computation: F3, in the second of two chunks f3, of more chunks F3.2."""
    letter = action.op.value.lower() if chunks == 2 and action.chunk else action.op.value
    return f"{letter}{action.micro_batch}" + (f".{action.chunk}" if chunks > 2 else "")


def timeline_text(spans: Sequence[TimedAction], chunks: int, cell: int, columns: int) -> Text:
    """Return a rank's timeline in the first `columns`; `cell` columns are a time of 1."""
    line = Text()
    for span in spans:
        if len(line) >= columns:
            break
        line.append(IDLE * (round(span.start * cell) - len(line)), style="dim")
        text = label(span.action, chunks).ljust(round(span.end * cell) - len(line), "-")
        line.append(text, style=f"white on {HUES[span.action.op]}")
    return line.append(IDLE * (columns - len(line)), style="dim")[:columns]
