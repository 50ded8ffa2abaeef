"""Who needs what from whom in a pipeline, and when each action of a schedule would run."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mlm.parallel.pipeline.actions import Action, Cost, Op, Schedule, ScheduleError, TimedAction


def consumer(rank: int, action: Action, *, p: int, v: int) -> tuple[int, Action] | None:
    """The rank and action of the neighbouring stage that needs what `action` on `rank` produces, or None."""
    if action.op is Op.WEIGHT:
        return None
    return _neighbour(rank, action, p, v, step=1 if action.op is Op.FORWARD else -1)


def _neighbour(rank: int, action: Action, p: int, v: int, *, step: int) -> tuple[int, Action] | None:
    stage = action.chunk * p + rank + step
    if not 0 <= stage < p * v:
        return None
    return stage % p, Action(action.op, stage // p, action.micro_batch)


def num_chunks(actions: Iterable[Iterable[Action]]) -> int:
    """v: the highest chunk number of any rank, plus 1."""
    return 1 + max((action.chunk for mine in actions for action in mine), default=0)


class Computed(NamedTuple):
    """A simulated computation: on which rank, when, and the rank and action that need its result, if any."""

    rank: int
    span: TimedAction
    consumer: tuple[int, Action] | None


class Step(NamedTuple):
    """An action of a rank, its stage, its op's place in Op, and what it needs."""

    stage: int
    rank: int
    op: int
    producer: int
    """Index of the step whose result it needs; -1 if it needs none."""
    source: int
    """Stage that sends that result from another rank; its own if none does."""
    action: Action


def ordered(schedule: Schedule) -> list[Step]:
    """Every action of every rank in an order in which each comes after all that it needs.

    No duration changes it. The schedule is complete (`check_complete`). Raises ScheduleError naming the ranks
    that wait for ever, and for what, if there are.
    """
    p, v = len(schedule), num_chunks(schedule)
    produced: dict[tuple[bool, int, int], int] = {}  # steps by direction, stage and micro-batch
    position = [0] * p
    order: list[Step] = []
    ready = list(range(p))  # ranks that may have become able to continue
    while ready:
        rank = ready.pop()
        mine = schedule[rank]
        while position[rank] < len(mine):
            action = mine[position[rank]]
            stage, op, producer = action.chunk * p + rank, 2, -1
            source = stage
            if action.op is not Op.WEIGHT:
                forward = action.op is Op.FORWARD
                op = 0 if forward else 1
                before, after = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
                if 0 <= before < p * v:
                    producer = produced.pop((forward, before, action.micro_batch), -1)
                    if producer < 0:
                        break
                    source = before if before % p != rank else stage
                if 0 <= after < p * v:
                    produced[forward, stage, action.micro_batch] = len(order)
                    ready.append(after % p)
            position[rank] += 1
            order.append(Step(stage, rank, op, producer, source, action))
    stuck = [(r, actions[position[r]]) for r, actions in enumerate(schedule) if position[r] < len(actions)][
        :8
    ]
    if stuck:
        raise ScheduleError("the schedule cannot complete: " + ", ".join(_wait(*at, p, v) for at in stuck))
    return order


def simulate(schedule: Schedule, *, cost: Cost) -> list[Computed]:
    """The steps of `ordered` with their times. Raises ScheduleError as it does.

    A rank runs its actions in the schedule's order, each as soon as the one before is done and its input has
    arrived; transfers take `cost.transfer` and never wait for one another.
    """
    p, v = len(schedule), num_chunks(schedule)
    steps, split = ordered(schedule), any(action.op is Op.WEIGHT for action in schedule[0])
    starts, ends = times_of(steps, p, [cost] * (p * v), split=split)
    return [
        Computed(rank, TimedAction(action, start, end), consumer(rank, action, p=p, v=v))
        for (_, rank, *_, action), start, end in zip(steps, starts, ends, strict=True)
    ]


def times_of(
    steps: Iterable[Step], p: int, costs: Sequence[Cost], *, split: bool
) -> tuple[list[float], list[float]]:
    """Starts and ends of steps on p ranks; `costs` are those of the stages.

    `split` if weight gradients are computed apart.
    """
    durations = [
        (cost.forward, cost.input_gradient if split else cost.backward, cost.weight_gradient)
        for cost in costs
    ]
    transfers, free = [cost.transfer for cost in costs], [0.0] * p
    starts, ends = list[float](), list[float]()
    for stage, rank, op, producer, source, _ in steps:
        start = free[rank]
        if producer >= 0:
            arrival = ends[producer]
            if source != stage:
                arrival += transfers[source]
            if arrival > start:
                start = arrival
        starts.append(start)
        free[rank] = start + durations[stage][op]
        ends.append(free[rank])
    return starts, ends


def _wait(rank: int, action: Action, p: int, v: int) -> str:
    producer = _neighbour(rank, action, p, v, step=-1 if action.op is Op.FORWARD else 1)
    assert producer is not None
    return f"rank {rank} at {action} needs {producer[1]} of rank {producer[0]}"
