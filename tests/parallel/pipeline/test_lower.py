"""Lowered plans: nothing missing, one order of transfers for all ranks, no deadlock."""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
)
from mlm.parallel.pipeline.lower import consumer, lower
from mlm.parallel.pipeline.schedules import build_schedule, forward_only

F, B, W = Op
F0, F1, B0, B1 = Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 0), Action(B, 0, 1)

durations = st.sampled_from([0.0, 0.1, 1.0, 2.0, 7.5])
costs = st.builds(Cost, durations, durations, durations, durations, durations)
quick = settings(max_examples=60, deadline=None)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any of ours, at any small size."""
    p, m = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    kind = draw(st.sampled_from(["1f1b", "gpipe", "zb_h1", "interleaved", "forward_only"]))
    v = draw(st.integers(1, 3)) if kind in ("gpipe", "forward_only") else 1
    if kind == "forward_only":
        return forward_only(p, v, m)
    if kind == "interleaved":
        return build_schedule("1f1b", stages=p, chunks=draw(st.integers(2, 3)), micro_batches=p * min(m, 4))
    return build_schedule(kind, stages=p, chunks=v, micro_batches=m)


def transfers_of(plan: Plan, rank: int) -> list[Send | Receive]:
    return [i for i in plan.instructions[rank] if not isinstance(i, Action)]


def sent(plan: Plan, rank: int, transfer: Send | Receive) -> tuple[int, int, Op, int, int]:
    """The same name for a transfer at both ends: sender, receiver, op, receiving stage and micro-batch."""
    here = isinstance(transfer, Send)
    p, action = len(plan.instructions), transfer.action
    step = 0 if not here else 1 if action.op is F else -1
    stage = action.chunk * p + rank + step
    ends = (rank, transfer.peer) if here else (transfer.peer, rank)
    return *ends, action.op, stage, action.micro_batch


@quick
@given(schedules(), costs)
def test_plan_has_each_action_and_transfer_in_its_order_and_completes(schedule: Schedule, cost: Cost) -> None:
    """Also where each transfer holds up both its ranks."""
    plan = lower(schedule, cost=cost)
    pairs = {(action.op, action.chunk, action.micro_batch) for action in schedule[0]}
    chunks, micro_batches = (1 + max(pair[i] for pair in pairs) for i in (1, 2))
    every = set(product({pair[0] for pair in pairs}, range(chunks), range(micro_batches)))
    for actions, instructions in zip(schedule, plan.instructions, strict=True):
        computed = tuple(i for i in instructions if isinstance(i, Action))
        assert computed == actions
        assert Counter((a.op, a.chunk, a.micro_batch) for a in computed) == dict.fromkeys(every, 1)
        for i, instruction in enumerate(instructions):
            if isinstance(instruction, Send):
                assert instructions[i - 1] == instruction.action
            if isinstance(instruction, Receive):
                assert instruction.action in instructions[i:]
    ends = {
        (rank, *sent(plan, rank, Send(span.action, -1))[2:]): span.end
        for rank, spans in enumerate(plan.timeline)
        for span in spans
    }
    for rank in range(len(schedule)):  # transfers in the order in which their data is computed
        names = [sent(plan, rank, transfer) for transfer in transfers_of(plan, rank)]
        times = [ends[sender, *what] for sender, _, *what in names]
        assert times == sorted(times)
    assert completes(plan.instructions, plan.num_stages // len(schedule))


def completes(instructions: Sequence[Sequence[Instruction]], v: int) -> bool:
    """True if all complete by rendezvous: a transfer waits for its data and for the rank at the other end.

    What completes so completes too where transfers overlap the computation. False for a transfer whose two
    ends mean different data.
    """
    p = len(instructions)
    todo = [deque(mine) for mine in instructions]
    computed: list[set[Action]] = [set() for _ in range(p)]
    arrived: list[set[Action]] = [set() for _ in range(p)]
    moved = True
    while moved:
        moved = False
        for rank in range(p):
            while todo[rank]:
                now = todo[rank][0]
                if isinstance(now, Action):
                    before = now.chunk * p + rank + (-1 if now.op is F else 1)
                    remote = p > 1 and now.op is not W and 0 <= before < p * v
                    if remote and now not in arrived[rank]:
                        break
                    computed[rank].add(todo[rank].popleft())
                elif isinstance(now, Send):
                    there = todo[now.peer][0] if todo[now.peer] else None
                    if not isinstance(there, Receive) or there.peer != rank:
                        break
                    if now.action not in computed[rank]:
                        break
                    if consumer(rank, now.action, p=p, v=v) != (now.peer, there.action):
                        return False
                    arrived[now.peer].add(there.action)
                    todo[rank].popleft()
                    todo[now.peer].popleft()
                else:
                    break  # its sender moves both on
                moved = True
    return not any(todo)


@quick
@given(st.data())
def test_any_schedule_that_can_complete_has_a_plan(data: st.DataObject) -> None:
    """Actions in random order on each rank: rejected by the simulation, or lowered without deadlock."""
    p, m = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    ranks = []
    for _ in range(p):
        turns = data.draw(st.permutations([i for i in range(m) for _ in range(2)]))
        seen: Counter[int] = Counter()
        mine = []
        for i in turns:
            mine.append(Action(B if seen[i] else F, 0, i))
            seen[i] += 1
        ranks.append(tuple(mine))
    try:
        plan = lower(tuple(ranks))
    except ScheduleError as error:
        assert "the schedule cannot complete" in str(error)  # noqa: PT017
    else:
        assert completes(plan.instructions, 1)


def test_receives_are_posted_one_computation_ahead() -> None:
    plan = lower(build_schedule("1f1b", stages=2, chunks=1, micro_batches=3))
    assert [[str(i) for i in mine] for mine in plan.instructions] == [
        [
            *("F0", "send of F0 to 1", "F1", "send of F1 to 1", "receive for B0 from 1", "B0"),
            *("receive for B1 from 1", "F2", "send of F2 to 1", "receive for B2 from 1", "B1", "B2"),
        ],
        [
            *("receive for F0 from 0", "F0", "receive for F1 from 0", "B0", "send of B0 to 0"),
            *("F1", "B1", "send of B1 to 0", "receive for F2 from 0", "F2", "B2", "send of B2 to 0"),
        ],
    ]


def test_timeline_counts_transfers() -> None:
    cost = Cost(forward=1, backward=2, transfer=0.5)
    plan = lower(build_schedule("1f1b", stages=2, chunks=1, micro_batches=1), cost=cost)
    times = [[(str(span.action), span.start, span.end) for span in spans] for spans in plan.timeline]
    assert times == [[("F0", 0, 1), ("B0", 5, 7)], [("F0", 1.5, 2.5), ("B0", 2.5, 4.5)]]
    assert (plan.makespan, plan.bubble) == (7, 4 / 3)


def test_micro_batch_is_in_flight_until_its_weight_gradient() -> None:
    actions = [Action(op, 0, i) for op, i in [(F, 0), (B, 0), (F, 1), (W, 0), (B, 1), (W, 1)]]
    assert lower((tuple(actions),)).peak_in_flight == (2,)
    assert lower((tuple(a for a in actions if a.op is not W),)).peak_in_flight == (1,)


@pytest.mark.parametrize(
    "schedule, message",
    [
        (((F0, F1, B0, B1), (F0, F1, B0)), "rank 1 lacks B1"),
        (((F0, B0), (F0, B0, B0)), "rank 1 has B0 twice"),
        (((F0, Action(F, 1, 0)), (F0,)), r"rank 1 lacks F0\.1"),
        (((F0, B0), (B0, F0)), "rank 1 has B0 twice or out of order"),
        (((F0, Action(W, 0, 0)),), r"the schedule has F\+W; it needs F, F\+B or F\+B\+W"),
        (((), ()), "the schedule has no actions"),
        (
            ((F0, B0, F1, B1), (F1, B1, F0, B0)),
            "rank 0 at B0 needs B0 of rank 1, rank 1 at F1 needs F1 of rank 0",
        ),
    ],
)
def test_wrong_schedule_is_rejected_by_name(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        lower(schedule)


def test_a_layout_of_the_largest_models_lowers() -> None:
    """arXiv:2104.04473: the 35 stages and 280 micro-batches of 530 billion parameters."""
    plan = lower(build_schedule("1f1b", stages=35, chunks=3, micro_batches=280))
    assert plan.bubble == 34 / (3 * 280)
