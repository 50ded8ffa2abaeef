"""Time of all micro-batches through a pipeline, simulated in the order of parallel/pipeline/simulate.py."""

from collections.abc import Sequence
from functools import cache

from mlm.parallel.config import Schedule
from mlm.parallel.pipeline.actions import Cost
from mlm.parallel.pipeline.schedules import build_schedule
from mlm.parallel.pipeline.simulate import Step, ordered

LEAST_SIMULATED = 512
"""Pairs of stage and micro-batch up to which a step is simulated in full."""


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
    durations = [
        (cost.forward, cost.input_gradient if split else cost.backward, cost.weight_gradient)
        for cost in costs
    ]
    transfers, last = [cost.transfer for cost in costs], len(costs) - 1
    free, ends, losses = [0.0] * p, list[float](), list[float]()
    for stage, rank, op, producer, source, _ in steps:
        start = free[rank]
        if producer >= 0:
            arrival = ends[producer]
            if source != stage:
                arrival += transfers[source]
            if arrival > start:
                start = arrival
        start += durations[stage][op]
        free[rank] = start
        ends.append(start)
        if op == 1 and stage == last:
            losses.append(start)
    return max(free), losses[-1] - losses[-1 - p] if len(losses) > p else 0.0


@cache
def _steps(name: str, p: int, v: int, m: int) -> list[Step]:
    """A schedule's actions in an order in which each comes after all that it needs; no cost changes it."""
    return ordered(build_schedule(name, stages=p, chunks=v, micro_batches=m))
