"""Time of all micro-batches through a pipeline: the simulator of parallel/pipeline, compiled per schedule."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from mlm.parallel.config import Schedule
from mlm.parallel.pipeline.actions import Cost, Op
from mlm.parallel.pipeline.schedules import build_schedule
from mlm.parallel.pipeline.simulate import ordered

LEAST_SIMULATED = 512
"""Pairs of stage and micro-batch up to which a step is simulated in full."""
PLACE = {Op.FORWARD: 0, Op.BACKWARD: 1, Op.WEIGHT: 2}
"""Index of each op in a stage's durations."""


def pipeline_time(name: Schedule, p: int, v: int, m: int, costs: Sequence[Cost]) -> float:
    """The time of all micro-batches through all stages; `costs` are those of the p * v stages.

    Of a long step the first rounds of p micro-batches are simulated: each further one takes as long as the
    last of them.
    """
    few = (3 if name == "zb_h1" else 2) * p + m % p
    if m <= few or m * p * v <= LEAST_SIMULATED:
        return _simulated(_program(name, p, v, m), p, costs)[0]
    elapsed, period = _simulated(_program(name, p, v, few), p, costs)
    if name != "1f1b":  # forwards all come first, or weight gradients last: the end is not like the rest
        period = elapsed - _simulated(_program(name, p, v, few - p), p, costs)[0]
    return elapsed + period * (m - few) / p


def _simulated(program: "Program", p: int, costs: Sequence[Cost]) -> tuple[float, float]:
    """Time of the last end, and of p micro-batches at the end of the last stage."""
    durations = [
        (cost.forward, cost.input_gradient if program.split else cost.backward, cost.weight_gradient)
        for cost in costs
    ]
    transfers = [cost.transfer for cost in costs]
    free, ends = [0.0] * p, list[float]()
    for stage, rank, op, producer, source in program.steps:
        start = free[rank]
        if producer >= 0:
            arrival = ends[producer]
            if source != stage:  # from another rank
                arrival += transfers[source]
            if arrival > start:
                start = arrival
        start += durations[stage][op]
        free[rank] = start
        ends.append(start)
    losses = [ends[index] for index in program.losses]
    return max(free), losses[-1] - losses[-1 - p] if len(losses) > p else 0.0


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule's actions in an order in which each comes after all that it needs; no cost changes it."""

    steps: tuple[tuple[int, int, int, int, int], ...]
    """(stage, rank, op, index of what it needs or -1, stage of that: its own if on the same rank)."""
    losses: tuple[int, ...]
    """Indices of the last stage's backward passes."""
    split: bool
    """True if weight gradients are actions of their own."""


@cache
def _program(name: str, p: int, v: int, m: int) -> Program:
    """The order in which the pipeline's simulator computes a schedule."""
    schedule = build_schedule(name, stages=p, chunks=v, micro_batches=m)
    steps, losses = list[tuple[int, int, int, int, int]](), list[int]()
    for rank, action, producer in ordered(schedule):
        stage = action.chunk * p + rank
        source = stage if producer < 0 or steps[producer][1] == rank else steps[producer][0]
        if action.op is Op.BACKWARD and stage == p * v - 1:
            losses.append(len(steps))
        steps.append((stage, rank, PLACE[action.op], producer, source))
    split = any(action.op is Op.WEIGHT for action in schedule[0])
    return Program(tuple(steps), tuple(losses), split)
