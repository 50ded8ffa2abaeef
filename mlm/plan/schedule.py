"""`mlm plan schedule`: simulate a pipeline schedule, draw it and print its cost. No torch, no model."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mlm.parallel.pipeline.actions import Cost, Plan, Receive, Send
from mlm.parallel.pipeline.lower import lower
from mlm.parallel.pipeline.schedules import build_schedule
from mlm.plan.config import PlanScheduleConfig
from mlm.plan.drawing import draw, svg_file
from mlm.util.errors import writing_to
from mlm.util.results import target_name, write_result
from mlm.util.terminal import Screen, add_row, console, table


@dataclass(frozen=True, slots=True)
class BubbleFormula:
    """A bubble as a function of the settings."""

    words: str
    """The formula with p, v, m for pp, vp, micro_batches and F, B, W for the costs."""
    value: float
    """Idle time over ideal time."""
    holds: str
    """Condition under which it is exact."""

    def compared(self, bubble: float) -> str:
        """The value compared with the simulated one, and why they differ."""
        words = f"formula {self.words} = {self.value:.2%}"
        return words if abs(bubble - self.value) < 1e-9 else f"{words} (exact {self.holds})"


class RankNumbers(NamedTuple):
    """One rank's share of a plan."""

    rank: int
    idle: float
    """Time within the makespan in which it computes nothing."""
    peak_in_flight: int
    """Most (chunk, micro-batch) pairs whose activations it holds at once."""
    sends: int
    receives: int


def run(config: PlanScheduleConfig) -> Plan:
    """Print the schedule and its numbers, write `out` where it is given, and return the plan.

    Raises UserError if `out` cannot be written.
    """
    plan, screen = simulate(config), console()
    screen.print(f"{title(config)}\n")
    draw(plan, screen)
    show_numbers(plan, closed_bubble(config), screen)
    if config.out is not None:
        with writing_to(str(config.out)):
            Path(config.out).parent.mkdir(parents=True, exist_ok=True)
        caption = f"{title(config)}   bubble {plan.bubble:.2%}   makespan {plan.makespan:.6g}"
        is_picture = Path(config.out).suffix == ".svg"
        write_result(config.out, svg_file(plan, caption) if is_picture else record(plan, config))
        screen.print(f"written to {target_name(config.out)}")
    return plan


def simulate(config: PlanScheduleConfig) -> Plan:
    """The plan of these settings."""
    schedule = build_schedule(
        config.pipeline, stages=config.pp, chunks=config.vp, micro_batches=config.micro_batches
    )
    cost = Cost(
        forward=config.forward_cost,
        backward=config.backward_cost,
        input_gradient=config.input_gradient_cost,
        weight_gradient=config.weight_gradient_cost,
        transfer=config.transfer_cost,
    )
    return lower(schedule, cost=cost)


def title(config: PlanScheduleConfig) -> str:
    """`interleaved 1F1B · pp=4 vp=2 micro_batches=8`."""
    name = {"1f1b": "1F1B", "gpipe": "GPipe", "zb_h1": "ZB-H1"}[config.pipeline]
    if config.vp > 1:
        name = f"interleaved {name}"
    return f"{name} · pp={config.pp} vp={config.vp} micro_batches={config.micro_batches}"


def closed_bubble(config: PlanScheduleConfig) -> BubbleFormula:
    """The bubble by formula: arXiv:2104.04473, section 2.2, and arXiv:2401.10241, table 2, for zb_h1.

    The latter is written for any F, B, W and m; where W is the shortest and m >= p it is the paper's
    (p-1)(F + B - W).
    """
    p, v, m = config.pp, config.vp, config.micro_batches
    if config.pipeline == "zb_h1":
        f, b, w = config.forward_cost, config.input_gradient_cost, config.weight_gradient_cost
        idle = (p - 1) * (f + b) - (min(p, m) - 1) * min(f, b, w)
        plain = w <= min(f, b) and m >= p
        words = "(p-1)(F+B-W)" if plain else "((p-1)(F+B) - (min(p,m)-1) min(F,B,W))"
        return BubbleFormula(f"{words} / (m(F+B+W))", idle / (m * (f + b + w)), "without transfers")
    if v == 1:
        return BubbleFormula("(p-1)/m", (p - 1) / m, "without transfers")
    costs = "m >= p" if config.pipeline == "gpipe" else "F <= B <= 2F"
    return BubbleFormula("(p-1)/(v*m)", (p - 1) / (v * m), f"without transfers and for {costs}")


def rank_numbers(plan: Plan) -> list[RankNumbers]:
    """A line per rank."""
    ranks = zip(plan.timeline, plan.instructions, plan.peak_in_flight, strict=True)
    return [
        RankNumbers(
            rank,
            idle=plan.makespan - sum(span.end - span.start for span in spans),
            peak_in_flight=peak,
            sends=sum(isinstance(each, Send) for each in instructions),
            receives=sum(isinstance(each, Receive) for each in instructions),
        )
        for rank, (spans, instructions, peak) in enumerate(ranks)
    ]


def show_numbers(plan: Plan, formula: BubbleFormula, screen: Screen) -> None:
    """The numbers of the whole plan in two lines, those of the ranks in a table."""
    screen.print(f"\nbubble    {plan.bubble:.2%} of the ideal time; {formula.compared(plan.bubble)}")
    screen.print(f"makespan  {plan.makespan:.6g}; {plan.makespan / (1 + plan.bubble):.6g} without the bubble")
    rows = table("", "rank#", "idle#", "peak in flight#", "sends#", "receives#")
    for numbers in rank_numbers(plan):
        add_row(rows, numbers.rank, f"{numbers.idle:.6g}", *numbers[2:])
    screen.print(rows)
    screen.print("in flight: micro-batches whose activations it holds, each chunk's counted separately")


def record(plan: Plan, config: PlanScheduleConfig) -> dict[str, Any]:
    """All of a plan in values that JSON holds; times in the unit of the costs. F3.1 is of chunk 1."""
    return {
        "format": "mlm-schedule-1",
        "settings": {key: value for key, value in asdict(config).items() if key != "out"},
        "bubble": plan.bubble,
        "bubble_formula": asdict(closed_bubble(config)),
        "makespan": plan.makespan,
        "ranks": [numbers._asdict() for numbers in rank_numbers(plan)],
        "instructions": [list(map(str, of_rank)) for of_rank in plan.instructions],
        "timeline": [[(str(span.action), span.start, span.end) for span in spans] for spans in plan.timeline],
    }
