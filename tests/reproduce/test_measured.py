"""Contenders in rounds: their steps, and when a difference counts."""

import pytest

from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.measured import above, percent, timed_steps


def test_contenders_take_turns() -> None:
    steps = timed_steps("made", {"a": ("tp=1",), "b": ("tp=2",)}, ReproduceConfig(seeds=2), minutes=1)
    names = [step.name for step in steps]
    assert names == ["made-a-round1", "made-b-round1", "made-a-round2", "made-b-round2"]
    assert [step.needs for step in steps] == [(), *((name,) for name in names[:-1])]


@pytest.mark.parametrize(
    "rounds,expected",
    [((1.1, 1.2, 1.3), True), ((0.9, 0.8, 0.7), False), ((0.9, 1.1, 1.2), None), ((1.1, 1.2), None)],
)
def test_a_difference_counts_if_three_rounds_all_show_it(
    rounds: tuple[float, ...], expected: bool | None
) -> None:
    assert above(rounds, 1.0) is expected


def test_shares_are_shown_with_their_spread() -> None:
    assert percent([1.1, 1.12, 1.2]) == "+12.0 % (+10.0 to +20.0)"
    assert percent([0.9]) == "-10.0 %"
