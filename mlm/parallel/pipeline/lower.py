"""Lower a schedule to each rank's instructions, with sends and receives placed without deadlock.

All transfers of all ranks have one global order, in which their data is computed; each rank issues its
transfers in that order. So the two ends of any pair of ranks agree on the order of their transfers: NCCL
matches by order and ignores tags. Nothing can deadlock, even if each transfer blocks both ranks: take the
first transfer in the order that never completes. The instructions before it at both ends need only earlier
transfers, so both reach it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple
from itertools import product
from typing import NamedTuple

from mlm.parallel.pipeline.actions import (
    Action,
    Cost,
    Instruction,
    Op,
    Plan,
    Receive,
    Schedule,
    ScheduleError,
    Send,
    TimedAction,
)

DEFAULT_COST = Cost()


def lower(schedule: Schedule, *, cost: Cost = DEFAULT_COST) -> Plan:
    """The plan of `schedule`; `cost` is one chunk's, and times are in its unit.

    `cost` decides the order of transfers too, but any cost gives a plan without deadlock. A pair of chunk and
    micro-batch is in flight on a rank from the start of its F to the end of its last action there.

    Raises ScheduleError if an action is missing, doubled or too early, or if the schedule cannot complete.
    """
    assert min(astuple(cost)) >= 0, f"negative duration: {cost}"
    check_complete(schedule)
    p, v = len(schedule), num_chunks(schedule)
    steps, split = order_actions(schedule), any(action.op is Op.WEIGHT for action in schedule[0])
    starts, ends = simulate_steps(steps, p, [cost] * (p * v), split=split)
    timeline: list[list[TimedAction]] = [[] for _ in schedule]
    for step, start, end in zip(steps, starts, ends, strict=True):
        timeline[step.rank].append(TimedAction(step.action, start, end))
    # Sorting is stable, and `steps` has every action after its inputs: with equal ends (actions of no cost)
    # data still comes after its inputs.
    transfers: list[list[Send | Receive]] = [[] for _ in schedule]
    for step, _ in sorted(zip(steps, ends, strict=True), key=lambda pair: pair[1]):
        target = consumer(step.rank, step.action, p=p, v=v)
        if target is not None and target[0] != step.rank:
            transfers[step.rank].append(Send(step.action, target[0]))
            transfers[target[0]].append(Receive(target[1], step.rank))
    peaks = []  # most (chunk, micro-batch) pairs between F and their last action, both included
    for actions in schedule:
        last = {(action.chunk, action.micro_batch): action for action in actions}
        in_flight = peak = 0
        for action in actions:
            in_flight += action.op is Op.FORWARD
            peak = max(peak, in_flight)
            in_flight -= last[action.chunk, action.micro_batch] == action
        peaks.append(peak)
    makespan = max(spans[-1].end for spans in timeline) - min(spans[0].start for spans in timeline)
    busy = max(sum(span.end - span.start for span in spans) for spans in timeline)
    return Plan(
        num_stages=p * v,
        instructions=tuple(_place(*rank) for rank in zip(schedule, transfers, strict=True)),
        timeline=tuple(map(tuple, timeline)),
        makespan=makespan,
        bubble=(makespan - busy) / busy if busy else 0.0,  # rounds once: exact for costs in whole numbers
        peak_in_flight=tuple(peaks),
    )


def check_complete(schedule: Schedule) -> None:
    """Every rank has each op exactly once for each chunk and micro-batch, in the order F, B, W.

    The ops are F alone (evaluation), F and B, or all three. Raises ScheduleError naming the first action that
    is missing, doubled or too early.
    """
    present = {action.op for actions in schedule for action in actions}
    ops = [op for op in Op if op in present]
    if not ops or ops != list(Op)[: len(ops)]:
        names = "+".join(op.value for op in ops) or "no actions"
        raise ScheduleError(f"the schedule has {names}; it needs F, F+B or F+B+W")
    micro_batches = 1 + max(action.micro_batch for actions in schedule for action in actions)
    for rank, actions in enumerate(schedule):
        done: dict[tuple[int, int], int] = {}
        for action in actions:
            pair = (action.chunk, action.micro_batch)
            count = done.get(pair, 0)
            if count == len(ops) or action.op is not ops[count]:
                raise ScheduleError(f"rank {rank} has {action} twice or out of order")
            done[pair] = count + 1
        for pair in product(range(num_chunks(schedule)), range(micro_batches)):
            if done.get(pair, 0) < len(ops):
                raise ScheduleError(f"rank {rank} lacks {Action(ops[done.get(pair, 0)], *pair)}")


class Step(NamedTuple):
    """An action of a rank, with its stage, the index of its op in Op, and its input."""

    stage: int
    rank: int
    op: int
    producer: int
    """Index of the step that produces its input; -1 without input."""
    source: int
    """Stage that sends the input from another rank; else its own stage."""
    action: Action


def order_actions(schedule: Schedule) -> list[Step]:
    """Order all actions of all ranks so that each follows its inputs, independent of durations.

    The schedule must be complete (`check_complete`). Raises ScheduleError naming deadlocked ranks and their
    missing inputs.
    """
    p, v = len(schedule), num_chunks(schedule)
    produced: dict[tuple[bool, int, int], int] = {}  # steps by direction, stage and micro-batch
    position = [0] * p
    order: list[Step] = []
    ready = list(range(p))  # ranks that may be able to continue
    while ready:
        rank = ready.pop()
        actions = schedule[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
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
    stuck = []
    for rank, actions in enumerate(schedule):
        if position[rank] < len(actions):
            action = actions[position[rank]]
            needed = _neighbour(rank, action, p, v, step=-1 if action.op is Op.FORWARD else 1)
            assert needed is not None
            stuck.append(f"rank {rank} at {action} needs {needed[1]} of rank {needed[0]}")
    if stuck:
        raise ScheduleError("the schedule cannot complete: " + ", ".join(stuck[:8]))
    return order


def simulate_steps(
    steps: Iterable[Step], p: int, costs: Sequence[Cost], *, split: bool
) -> tuple[list[float], list[float]]:
    """Starts and ends of steps on p ranks with each stage's costs; `split` with WEIGHT actions."""
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


def consumer(rank: int, action: Action, *, p: int, v: int) -> tuple[int, Action] | None:
    """Return the rank and action that consume the output of `action` on `rank`, if any."""
    if action.op is Op.WEIGHT:
        return None
    return _neighbour(rank, action, p, v, step=1 if action.op is Op.FORWARD else -1)


def _neighbour(rank: int, action: Action, p: int, v: int, *, step: int) -> tuple[int, Action] | None:
    stage = action.chunk * p + rank + step
    if not 0 <= stage < p * v:
        return None
    return stage % p, Action(action.op, stage // p, action.micro_batch)


def num_chunks(schedule: Schedule) -> int:
    """v: the highest chunk number of any rank, plus 1."""
    return 1 + max((action.chunk for actions in schedule for action in actions), default=0)


def _place(actions: Sequence[Action], transfers: Sequence[Send | Receive]) -> tuple[Instruction, ...]:
    """Merge one rank's actions and transfers, without changing the order of either.

    A send follows its action. A receive is one action earlier than necessary (before its action and before
    the next send), so that it overlaps with computation; not earlier, since a posted receive holds a buffer.
    """
    index = {action: i for i, action in enumerate(actions)}
    before = len(actions)  # the action to precede: limits the current transfer and all earlier ones
    limits = []
    for transfer in reversed(transfers):
        at = index[transfer.action]
        before = at if isinstance(transfer, Send) else min(before, at - 1)
        limits.append(before)
    placed: list[Instruction] = []
    done = 0  # actions placed
    for transfer, before in zip(transfers, reversed(limits), strict=True):
        stop = before + 1 if isinstance(transfer, Send) else max(done, before)
        placed += (*actions[done:stop], transfer)
        done = stop
    return (*placed, *actions[done:])
