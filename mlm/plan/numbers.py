"""Numbers of a simulated plan: the bubble beside its closed formula, a row per rank, and all as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlm.parallel.pipeline.actions import Action, Cost, Instruction, Plan, Receive, Send
from mlm.parallel.pipeline.lower import lower
from mlm.parallel.pipeline.schedules import build_schedule
from mlm.plan.config import PlanScheduleConfig


@dataclass(frozen=True, slots=True)
class Formula:
    """A bubble as a function of the settings."""

    words: str
    """The formula with p, v, m for pp, vp, micro_batches and F, B, W for the costs."""
    value: float
    """Idle time over ideal time."""
    holds: str
    """Condition under which it is exact."""


@dataclass(frozen=True, slots=True)
class RankNumbers:
    """One rank's share of a plan."""

    rank: int
    idle: float
    """Time within the makespan in which it computes nothing."""
    peak_in_flight: int
    """Most (chunk, micro-batch) pairs whose activations it holds at once."""
    sends: int
    receives: int


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


def closed_bubble(config: PlanScheduleConfig) -> Formula:
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
        return Formula(f"{words} / (m(F+B+W))", idle / (m * (f + b + w)), "without transfers")
    if v == 1:
        return Formula("(p-1)/m", (p - 1) / m, "without transfers")
    holds = (
        "without transfers and for m >= p"
        if config.pipeline == "gpipe"
        else "without transfers and for F <= B <= 2F"
    )
    return Formula("(p-1)/(v*m)", (p - 1) / (v * m), holds)


def rank_numbers(plan: Plan) -> list[RankNumbers]:
    """A line per rank."""
    return [
        RankNumbers(
            rank,
            idle=plan.makespan - sum(span.end - span.start for span in spans),
            peak_in_flight=peak,
            sends=count(instructions, Send),
            receives=count(instructions, Receive),
        )
        for rank, (spans, instructions, peak) in enumerate(
            zip(plan.timeline, plan.instructions, plan.peak_in_flight, strict=True)
        )
    ]


def count(instructions: Sequence[object], kind: type) -> int:
    """Number of instructions of a type."""
    return sum(isinstance(instruction, kind) for instruction in instructions)


def title(config: PlanScheduleConfig) -> str:
    """`interleaved 1F1B · pp=4 vp=2 micro_batches=8`."""
    name = {"1f1b": "1F1B", "gpipe": "GPipe", "zb_h1": "ZB-H1"}[config.pipeline]
    if config.vp > 1:
        name = f"interleaved {name}"
    return f"{name} · pp={config.pp} vp={config.vp} micro_batches={config.micro_batches}"


def record(plan: Plan, config: PlanScheduleConfig) -> dict[str, Any]:
    """All of a plan in values that JSON holds; times in the unit of the costs."""
    formula = closed_bubble(config)
    return {
        "format": "mlm-schedule-1",
        "settings": {key: value for key, value in asdict(config).items() if key != "out"},
        "bubble": plan.bubble,
        "bubble_formula": {"formula": formula.words, "value": formula.value, "exact": formula.holds},
        "makespan": plan.makespan,
        "ranks": [
            {
                **asdict(numbers),
                "instructions": [instruction_record(instruction) for instruction in instructions],
                "timeline": [
                    {**action_record(span.action), "start": span.start, "end": span.end} for span in spans
                ],
            }
            for numbers, instructions, spans in zip(
                rank_numbers(plan), plan.instructions, plan.timeline, strict=True
            )
        ],
    }


def instruction_record(instruction: Instruction) -> dict[str, Any]:
    """An instruction of a rank: do (compute, send, receive), op, chunk, micro_batch, peer."""
    if isinstance(instruction, Action):
        return {"do": "compute", **action_record(instruction)}
    verb = "send" if isinstance(instruction, Send) else "receive"
    return {"do": verb, **action_record(instruction.action), "peer": instruction.peer}


def action_record(action: Action) -> dict[str, Any]:
    """An action's op as F, B or W, its chunk and micro-batch."""
    return {"op": action.op.value, "chunk": action.chunk, "micro_batch": action.micro_batch}
