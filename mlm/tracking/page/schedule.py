"""A pipeline's schedule on a page: as planned, and as it was measured."""

from dataclasses import replace
from statistics import fmean
from typing import Any, cast

from mlm.parallel.pipeline.actions import Plan, ScheduleError
from mlm.plan.config import PlanScheduleConfig
from mlm.plan.numbers import Formula, closed_bubble, rank_numbers, simulate, title
from mlm.plan.terminal import NAMES
from mlm.plan.timeline import drawing, legend, timeline
from mlm.tracking.html.elements import Html, join, paragraph, table
from mlm.tracking.html.rows import number
from mlm.tracking.page.drawings import MOST_STAGES, Plans
from mlm.tracking.page.measured import Measured

MOST_SPANS = 1200
MOST_SIMULATED = 20_000  # computations: half a second
WAITING = "waiting over pp"


def draw_schedule(plans: Plans) -> Html:
    """Draw the pipeline's schedule as planned and as measured, with idle times; empty without a pipeline."""
    pp, chunks, batches = plans.sizes["pp"], plans.size("vp"), plans.micro_batches
    if pp == 1:
        return Html()
    settings = PlanScheduleConfig(pp=pp, vp=chunks, micro_batches=batches, pipeline=cast(Any, plans.schedule))
    each = 3 * pp * chunks
    try:
        measured = newest(plans, simulate(settings)) if each * batches <= MOST_SIMULATED else None
        settings = settings if measured is None else with_means(settings, measured)
        whole = simulate(settings) if each * batches <= MOST_SIMULATED else None
        drawn = batches if each * batches <= MOST_SPANS else MOST_SPANS // each // pp * pp
        some = simulate(replace(settings, micro_batches=drawn)) if drawn else None
    except (ScheduleError, ValueError) as error:
        return paragraph(f"{by_formula(settings)}It cannot be drawn: {error}.")
    words = by_formula(settings)
    if some is not None and drawn < batches:
        words += f"Drawn are {drawn} of its {batches} micro-batches. "
    words += "Numbers are micro-batches. " + ("Later chunks are paler. " if chunks > 1 else "")
    if measured is not None and whole is not None:
        words += compared(measured, whole)
    elif plans.schedule != "zb_h1":
        words += "Backward is taken for twice as long as forward."
    picture = paragraph("It is too large to draw.") if some is None else timeline(some)
    if measured is not None and some is not None and drawn == batches:
        picture = both(some, measured, chunks)
    return join([paragraph(words), picture, stages(plans, whole, closed_bubble(settings), measured)])


def by_formula(settings: PlanScheduleConfig) -> str:
    """Name a schedule and its bubble."""
    formula = closed_bubble(settings)
    return f"{title(settings)}: bubble {formula.words} = {formula.value:.1%} of the ideal time by formula. "


def newest(plans: Plans, plan: Plan) -> Measured | None:
    """Return the newest step of this plan whose computations were timed; None without one."""
    actions = [[span.action for span in line] for line in plan.timeline]
    found = (Measured.of(record, actions) for record in reversed(plans.run.timelines))
    return next((each for each in found if each is not None), None)


def with_means(settings: PlanScheduleConfig, measured: Measured) -> PlanScheduleConfig:
    """Return the settings of a plan in which each computation takes the mean time that was measured."""
    cost = measured.cost
    return replace(
        settings,
        forward_cost=cost.forward,
        backward_cost=cost.backward,
        input_gradient_cost=cost.input_gradient,
        weight_gradient_cost=cost.weight_gradient,
    )


def compared(measured: Measured, plan: Plan) -> str:
    """Return lines on the planned and the measured bubble."""
    means = ", ".join(f"{NAMES[op]} {mean:.3g} ms" for op, mean in measured.means.items())
    clock = "" if measured.one_clock else " Ranks of several hosts were aligned by a barrier before the step."
    return (
        f"Planned is a step whose computations take the means of step {measured.step:,} ({means}), without "
        f"transfers: {plan.makespan:.4g} ms, bubble {plan.bubble:.1%}. Measured in the first replica: "
        f"{measured.makespan:.4g} ms, bubble {measured.bubble:.1%} of the busiest stage's time.{clock}"
    )


def both(plan: Plan, measured: Measured, chunks: int) -> Html:
    """Draw a plan, and below it at the same scale what was measured."""
    whole = max(plan.makespan, measured.makespan)
    return join(
        [
            Html('<p class="small">planned</p>\n'),
            drawing(plan.timeline, chunks, whole, "planned schedule"),
            Html('<p class="small">measured, at the same scale</p>\n'),
            drawing(measured.lines, chunks, whole, "measured schedule"),
            legend(measured.lines),
        ]
    )


def stages(plans: Plans, plan: Plan | None, formula: Formula, measured: Measured | None) -> Html:
    """Return a table of the stages' idle times."""
    planned = planned_idle(plan, formula, plans.sizes["pp"])
    rows = [[f"P{rank}", *planned[rank], *waited(plans, rank)] for rank in range(len(planned))]
    headings = ["stage", "idle, planned", "in flight", "waiting for the pipeline, measured", "computing"]
    if measured is not None:
        headings.insert(2, f"idle, measured in step {measured.step:,}")
        for row, busy in zip(rows, measured.busy, strict=False):
            row.insert(2, f"{1 - busy / measured.makespan:.1%}")
    return table(headings, rows)


def planned_idle(plan: Plan | None, formula: Formula, count: int) -> list[tuple[str, str]]:
    """Return the first stages' share of idle time and micro-batches in flight; by formula without a plan."""
    if plan is None:
        idle = f"{formula.value / (1 + formula.value):.1%}"
        return [(idle, "not simulated")] * min(count, MOST_STAGES)
    rows = rank_numbers(plan)[:MOST_STAGES]
    return [(f"{row.idle / plan.makespan:.1%}", str(row.peak_in_flight)) for row in rows]


def waited(plans: Plans, stage: int) -> tuple[str, str]:
    """Return the shares of time that a stage's ranks waited and computed, by the newest record of ranks."""
    records = plans.run.ranks[-1].get("ranks") if plans.run.ranks else None
    each = plans.sizes["tp"] * plans.sizes["cp"] * plans.sizes["dp"]
    if not isinstance(records, list) or len(records) != each * plans.sizes["pp"]:
        return "not recorded", "not recorded"
    shares = []
    for times in records[stage * each : (stage + 1) * each]:
        parts = {name: number(value) for name, value in times.items()} if isinstance(times, dict) else {}
        total = sum(value for value in parts.values() if value == value)
        if total > 0:
            shares.append((parts.get(WAITING, 0.0) / total, parts.get("computing", 0.0) / total))
    if not shares:
        return "not recorded", "not recorded"
    return f"{fmean(wait for wait, _ in shares):.1%}", f"{fmean(busy for _, busy in shares):.1%}"
