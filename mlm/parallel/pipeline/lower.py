"""From a schedule to what each rank executes: sends and receives placed so that nothing can deadlock.

All transfers of all ranks have one global order, that in which their data is computed; each rank issues
its own in that order. So the two ends of any pair of ranks agree on the order of what passes between them:
NCCL matches by order and ignores tags. Nothing can lock, even if each transfer holds up both ranks: take the
first transfer in the order that never completes. What its two ends do before it needs only earlier transfers,
so both come to it.
"""

from collections.abc import Sequence
from dataclasses import astuple
from itertools import product

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
from mlm.parallel.pipeline.simulate import Computed, num_chunks, simulate

DEFAULT_COST = Cost()

Transfers = list[list[Send | Receive]]
"""Each rank's transfers in the global order."""


def lower(schedule: Schedule, *, cost: Cost = DEFAULT_COST) -> Plan:
    """The plan of `schedule`; `cost` is that of one chunk, and times are in its unit.

    `cost` decides the order of transfers too, but any cost gives a plan without deadlock. A pair of chunk and
    micro-batch is in flight on a rank from the start of its F to the end of its last action there.

    Raises ScheduleError if an action is missing, doubled or too early, or if the schedule cannot complete.
    """
    assert min(astuple(cost)) >= 0, f"negative duration: {cost}"
    check_complete(schedule)
    order = simulate(schedule, cost=cost)
    timeline: list[list[TimedAction]] = [[] for _ in schedule]
    for computed in order:
        timeline[computed.rank].append(computed.span)
    transfers = _transfers(order, p=len(schedule))
    instructions = tuple(_place(*mine) for mine in zip(schedule, transfers, strict=True))
    makespan = max(spans[-1].end for spans in timeline) - min(spans[0].start for spans in timeline)
    busy = max(sum(span.end - span.start for span in spans) for spans in timeline)
    return Plan(
        num_stages=len(schedule) * num_chunks(schedule),
        instructions=instructions,
        timeline=tuple(map(tuple, timeline)),
        makespan=makespan,
        bubble=(makespan - busy) / busy if busy else 0.0,  # rounds once: exact for costs in whole numbers
        peak_in_flight=tuple(_peak_in_flight(actions) for actions in schedule),
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


def _transfers(order: list[Computed], *, p: int) -> Transfers:
    """Each rank's part of the global order of transfers: by the time their data is computed.

    Sorting is stable, and `order` has every action after all it needs: so where ends are equal (actions that
    cost nothing), data still comes after the data it was made of.
    """
    transfers: Transfers = [[] for _ in range(p)]
    for rank, span, to in sorted(order, key=lambda computed: computed.span.end):
        if to is not None and to[0] != rank:
            transfers[rank].append(Send(span.action, to[0]))
            transfers[to[0]].append(Receive(to[1], rank))
    return transfers


def _place(actions: Sequence[Action], transfers: Sequence[Send | Receive]) -> tuple[Instruction, ...]:
    """One rank's actions with its transfers put between them, without changing the order of either.

    A send stands right after its action. A receive stands one action earlier than it must (before its own
    action and before the next send), so the wire works while the rank computes; no earlier, since a posted
    receive holds a buffer.
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
        upto = before + 1 if isinstance(transfer, Send) else max(done, before)
        placed += (*actions[done:upto], transfer)
        done = upto
    return (*placed, *actions[done:])


def _peak_in_flight(actions: Sequence[Action]) -> int:
    """Most (chunk, micro-batch) pairs between F and their last action, both included."""
    last = {(action.chunk, action.micro_batch): action for action in actions}
    held = peak = 0
    for action in actions:
        held += action.op is Op.FORWARD
        peak = max(peak, held)
        held -= last[action.chunk, action.micro_batch] == action
    return peak
