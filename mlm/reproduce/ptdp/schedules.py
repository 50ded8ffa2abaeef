"""Pipeline schedules drawn as in figures 3 and 4, their bubbles simulated beside the formulas."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from mlm.parallel.pipeline.actions import Plan
from mlm.plan.config import PlanScheduleConfig
from mlm.plan.numbers import closed_bubble, title
from mlm.plan.schedule import simulate
from mlm.reproduce.conclusion import Cell, Chart, Conclusion, Drawing, Series, Table, Verdict
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.experiment import Experiment, Step
from mlm.reproduce.results import Results

DRAWN: Mapping[str, Mapping[str, Any]] = {
    "gpipe": {"pipeline": "gpipe"},
    "1f1b": {"pipeline": "1f1b"},
    "interleaved": {"pipeline": "1f1b", "vp": 2},
    "zb-h1": {"pipeline": "zb_h1"},
}
"""Schedules by the name of their picture; the last is of arXiv:2401.10241, not of the paper."""
STAGES, MICRO_BATCHES = 4, 8
"""Sizes of the paper's figures."""
SIZES = ((2, 2), (2, 8), (4, 4), (4, 8), (4, 32), (8, 8), (8, 64))
"""(p, m) of the table."""
EXACT = 1e-9


def settings(name: str, stages: int, micro_batches: int) -> PlanScheduleConfig:
    """Return the settings of a schedule; a chunk takes 1/v of the time of a rank's layers."""
    chosen = DRAWN[name]
    chunks = chosen.get("vp", 1)
    return PlanScheduleConfig(
        **chosen,
        pp=stages,
        micro_batches=micro_batches,
        forward_cost=1 / chunks,
        backward_cost=2 / chunks,
    )


def steps(config: ReproduceConfig) -> Sequence[Step]:
    """Return none: a simulation takes no time."""
    return ()


def conclude(results: Results) -> Conclusion:
    """Simulate each schedule at all sizes and compare its bubble with the formula."""
    rows, off = list[list[Cell]](), list[str]()
    for stages, micro_batches in SIZES:
        for name in DRAWN:
            config = settings(name, stages, micro_batches)
            plan, formula = simulate(config), closed_bubble(config)
            rows.append([title(config), plan.bubble, formula.value, formula.words, max(plan.peak_in_flight)])
            if abs(plan.bubble - formula.value) > EXACT:
                off.append(title(config))
    return Conclusion(
        verdict=verdict(len(off), len(rows)),
        seen=seen(len(off), len(rows)),
        limits=(
            "The simulation takes equal stages, transfers that take no time, and a backward pass of twice "
            "the time of forward; ptdp-bubble measures a pipeline that has none of these exactly.",
            "ZB-H1 is of arXiv:2401.10241 and is drawn for comparison; PTD-P says nothing about it.",
        ),
        tables=(
            Table(
                title="Bubble: idle time over ideal time",
                headings=("schedule", "simulated", "formula", "formula in words", "most in flight"),
                rows=rows,
                note="In flight: pairs of chunk and micro-batch whose activations the fullest rank holds; a "
                "chunk of an interleaved schedule is half of a rank's layers.",
            ),
        ),
        charts=(against_micro_batches(),),
        drawings=[drawing(name) for name in DRAWN],
        commands=[
            (title(settings(name, STAGES, MICRO_BATCHES)), command(name, STAGES, MICRO_BATCHES))
            for name in DRAWN
        ],
    )


def verdict(off: int, cases: int) -> Verdict:
    """Return the verdict of so many cases in which the simulation is not the formula."""
    if off == 0:
        return Verdict.AGREES
    return Verdict.CONTRADICTS if off == cases else Verdict.PARTLY


def seen(off: int, cases: int) -> str:
    """Return the sentence on the comparison, with the bubbles of the sizes that are drawn."""
    drawn = {name: simulate(settings(name, STAGES, MICRO_BATCHES)).bubble for name in DRAWN}
    shares = ", ".join(f"{name} {bubble:.3g}" for name, bubble in drawn.items())
    return (
        f"Of {cases} simulated schedules {cases - off} have the bubble of the formula exactly; at "
        f"p={STAGES}, m={MICRO_BATCHES}: {shares}."
    )


def against_micro_batches() -> Chart:
    """Return the bubble of each schedule against the number of micro-batches."""
    counts = [STAGES * 2**n for n in range(6)]
    names = dict[tuple[float, ...], str]()  # schedules of equal bubbles are one line
    for name in DRAWN:
        bubbles = tuple(simulate(settings(name, STAGES, m)).bubble for m in counts)
        names[bubbles] = f"{names[bubbles]}, {name}" if bubbles in names else name
    return Chart(
        name="bubble",
        title=f"Bubble of {STAGES} stages",
        x_label="micro-batches of a step",
        y_label="idle time / ideal time",
        series=[Series(name=name, x=counts, y=bubbles) for bubbles, name in names.items()],
        log_x=True,
        from_zero=True,
    )


def drawing(name: str) -> Drawing:
    """Return the timeline of a schedule."""
    config = settings(name, STAGES, MICRO_BATCHES)
    plan = simulate(config)
    caption = f"{title(config)}: bubble {plan.bubble:.1%} of the ideal time"
    return Drawing(name=f"schedule-{name}", title=caption, svg=svg(plan, caption))


def svg(plan: Plan, caption: str) -> str:
    """Return a timeline as a file of its own."""
    from mlm.plan.picture import draw  # matplotlib takes half a second to import

    file = BytesIO()
    draw(plan, caption, file, "svg")
    return file.getvalue().decode()


def command(name: str, stages: int, micro_batches: int) -> str:
    """Return the command that draws a schedule."""
    words = [f"{key}={value}" for key, value in DRAWN[name].items()]
    chunks = DRAWN[name].get("vp", 1)
    words += [f"forward_cost={1 / chunks:g}", f"backward_cost={2 / chunks:g}"] if chunks > 1 else []
    return f"mlm plan schedule pp={stages} micro_batches={micro_batches} {' '.join(words)} out={name}.svg"


EXPERIMENT = Experiment(
    name="ptdp-schedules",
    title="Pipeline schedules and their bubbles",
    source="PTD-P, arXiv:2104.04473, figures 3 and 4",
    claim="GPipe and 1F1B idle (p-1)/m of the ideal time; with v chunks on each rank the interleaved "
    "schedule idles (p-1)/(v*m), at v times the communication.",
    minutes=0.1,
    steps=steps,
    conclude=conclude,
)
