"""A pipeline schedule simulated: drawn by `mlm plan schedule`, and timed for plans. No torch, no model."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from mlm.parallel.config import Schedule
from mlm.parallel.pipeline.actions import Cost, Plan
from mlm.parallel.pipeline.lower import DEFAULT_COST, lower
from mlm.parallel.pipeline.schedules import build_schedule
from mlm.parallel.pipeline.simulate import Step, ordered, times_of
from mlm.plan.config import PlanScheduleConfig
from mlm.plan.drawing import draw
from mlm.util.results import save_result
from mlm.util.terminal import console

LEAST_SIMULATED = 512
"""Pairs of stage and micro-batch up to which a step is simulated in full."""


def run(config: PlanScheduleConfig) -> Plan:
    """Print the schedule and its numbers, write `out` where it is given, and return the plan.

    Raises UserError if `out` cannot be written.
    """
    plan, screen = simulate(config), console()
    name = {"1f1b": "1F1B", "gpipe": "GPipe", "zb_h1": "ZB-H1"}[config.pipeline]
    name = f"interleaved {name}" if config.vp > 1 else name
    screen.print(f"{name} · pp={config.pp} vp={config.vp} micro_batches={config.micro_batches}\n")
    draw(plan, screen)
    screen.print(f"\nbubble    {plan.bubble:.2%} of the ideal time")
    screen.print(f"makespan  {plan.makespan:.6g}; {plan.makespan / (1 + plan.bubble):.6g} without the bubble")
    held = " ".join(map(str, plan.peak_in_flight))
    screen.print(f"in flight {held}: micro-batches of which a rank holds activations, in each of its chunks")
    save_result(config.out, record(plan, config), screen.print)
    return plan


def simulate(config: PlanScheduleConfig, cost: Cost = DEFAULT_COST) -> Plan:
    """The plan of these settings; by default a backward pass takes as long as two forward ones."""
    schedule = build_schedule(
        config.pipeline, stages=config.pp, chunks=config.vp, micro_batches=config.micro_batches
    )
    return lower(schedule, cost=cost)


def record(plan: Plan, config: PlanScheduleConfig) -> dict[str, Any]:
    """All of a plan in values that JSON holds; a forward pass of a chunk takes 1. F3.1 is of chunk 1."""
    return {
        "format": "mlm-schedule-1",
        "settings": {key: value for key, value in asdict(config).items() if key != "out"},
        "bubble": plan.bubble,
        "makespan": plan.makespan,
        "peak_in_flight": plan.peak_in_flight,
        "instructions": [list(map(str, of_rank)) for of_rank in plan.instructions],
        "timeline": [[(str(span.action), span.start, span.end) for span in spans] for spans in plan.timeline],
    }


def pipeline_time(name: Schedule, p: int, v: int, m: int, costs: Sequence[Cost]) -> float:
    """The time of all micro-batches through all stages; `costs` are those of the p * v stages.

    Of a long step the first rounds of p micro-batches are simulated: each further one takes as long as the
    last of them.
    """
    split = name == "zb_h1"
    few = (3 if split else 2) * p + m % p
    if m <= few or m * p * v <= LEAST_SIMULATED:
        return _simulated(_steps(name, p, v, m), p, costs, split=split)[0]
    elapsed, period = _simulated(_steps(name, p, v, few), p, costs, split=split)
    if name != "1f1b":  # forwards all come first, or weight gradients last: the end is not like the rest
        period = elapsed - _simulated(_steps(name, p, v, few - p), p, costs, split=split)[0]
    return elapsed + period * (m - few) / p


def _simulated(steps: list[Step], p: int, costs: Sequence[Cost], *, split: bool) -> tuple[float, float]:
    """Time of the last end, and of p micro-batches at the end of the last stage."""
    _, ends = times_of(steps, p, costs, split=split)
    last = len(costs) - 1
    losses = [end for step, end in zip(steps, ends, strict=True) if step.op == 1 and step.stage == last]
    return max(ends), losses[-1] - losses[-1 - p] if len(losses) > p else 0.0


@cache
def _steps(name: str, p: int, v: int, m: int) -> list[Step]:
    """A schedule's actions in an order in which each comes after all that it needs; no cost changes it."""
    return ordered(build_schedule(name, stages=p, chunks=v, micro_batches=m))
