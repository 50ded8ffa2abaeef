"""Plans that would hang, or pass the wrong data, are found."""

import pytest

from mlm.parallel.pipeline.actions import Action, Instruction, Op, Receive, ScheduleError, Send
from mlm.parallel.pipeline.deadlock import check_no_deadlock

F0, F1 = (Action(Op.FORWARD, 0, i) for i in range(2))
B0, B1 = (Action(Op.BACKWARD, 0, i) for i in range(2))

SOUND: tuple[tuple[Instruction, ...], ...] = (
    (F0, Send(F0, 1), F1, Send(F1, 1), Receive(B0, 1), B0, Receive(B1, 1), B1),
    (Receive(F0, 0), F0, Receive(F1, 0), B0, Send(B0, 0), F1, B1, Send(B1, 0)),
)


def test_sound_plan_completes() -> None:
    check_no_deadlock(SOUND)


def test_ranks_that_both_receive_first_are_stuck() -> None:
    """Each would send next, but a transfer that was issued first is in the way."""
    first = (F0, Send(F0, 1), F1, Receive(B0, 1), Send(F1, 1), B0, Receive(B1, 1), B1)
    with pytest.raises(
        ScheduleError, match="deadlock: rank 0 at receive for B0 from 1, rank 1 at receive for F1 from 0"
    ):
        check_no_deadlock((first, SOUND[1]))


def test_ranks_that_both_send_first_are_stuck() -> None:
    second = (Receive(F0, 0), F0, B0, Send(B0, 0), Receive(F1, 0), F1, B1, Send(B1, 0))
    with pytest.raises(ScheduleError, match="deadlock: rank 0 at send of F1 to 1, rank 1 at send of B0 to 0"):
        check_no_deadlock((SOUND[0], second))


def test_swapped_receives_are_a_mismatch() -> None:
    """NCCL would put the second micro-batch where the first belongs, in silence."""
    second = (Receive(F1, 0), Receive(F0, 0), F0, B0, Send(B0, 0), F1, B1, Send(B1, 0))
    with pytest.raises(
        ScheduleError, match="rank 0 at send of F0 to 1 meets rank 1 at receive for F1 from 0"
    ):
        check_no_deadlock((SOUND[0], second))


def test_circle_of_three_ranks_is_stuck() -> None:
    """Every pair agrees on its order, but rank 0 waits for 1, 1 for 2 and 2 for 0."""
    forwards = [Action(Op.FORWARD, c, 0) for c in range(2)]
    ranks = (
        (F0, Receive(forwards[1], 2), Send(F0, 1), forwards[1], Send(forwards[1], 1)),
        (Receive(F0, 0), F0, Send(F0, 2), Receive(forwards[1], 0), forwards[1], Send(forwards[1], 2)),
        (Receive(F0, 1), F0, Send(F0, 0), Receive(forwards[1], 1), forwards[1]),
    )
    with pytest.raises(ScheduleError, match=r"rank 0 at receive for F0\.1 from 2, rank 1 at .*, rank 2 at"):
        check_no_deadlock(ranks)


@pytest.mark.parametrize("drop", [Send(F0, 1), Receive(F0, 0), Send(B1, 0), Receive(B1, 1)])
def test_lost_transfer_is_found(drop: Send | Receive) -> None:
    with pytest.raises(ScheduleError, match=r"deadlock|mismatch"):
        check_no_deadlock(tuple(tuple(i for i in mine if i != drop) for mine in SOUND))


def test_computation_that_nobody_sends_for_is_stuck() -> None:
    lost = (Send(B1, 0), Receive(B1, 1))
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0 at B1$"):
        check_no_deadlock(tuple(tuple(i for i in mine if i not in lost) for mine in SOUND))


def test_send_before_its_data_is_computed_is_stuck() -> None:
    with pytest.raises(ScheduleError, match="deadlock: rank 0 at send of F0 to 1"):
        check_no_deadlock(((Send(F0, 1), F0), (Receive(F0, 0), F0)))
