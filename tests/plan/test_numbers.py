"""The numbers below the picture."""

from typing import Any

import pytest

from mlm.plan.config import PlanScheduleConfig
from mlm.plan.numbers import closed_bubble, rank_numbers, title
from mlm.plan.schedule import compared, simulate


def config(**settings: Any) -> PlanScheduleConfig:
    return PlanScheduleConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"pp": 1},
        {"pp": 4},
        {"pp": 4, "micro_batches": 2},
        {"pp": 3, "vp": 2, "micro_batches": 6},
        {"pp": 4, "vp": 4, "backward_cost": 1.5},
        {"pipeline": "gpipe", "forward_cost": 3.0},
        {"pipeline": "gpipe", "vp": 2},
        {"pipeline": "zb_h1"},
        {"pipeline": "zb_h1", "micro_batches": 3},
        {"pipeline": "zb_h1", "forward_cost": 0.5, "weight_gradient_cost": 0.75},
        {"pipeline": "zb_h1", "forward_cost": 3.0, "weight_gradient_cost": 2.0},
        {"pipeline": "zb_h1", "forward_cost": 2.0, "weight_gradient_cost": 2.0, "micro_batches": 3},
    ],
)
def test_formula_equals_the_simulation(settings: dict[str, Any]) -> None:
    assert simulate(config(**settings)).bubble == pytest.approx(closed_bubble(config(**settings)).value)


def test_zero_bubble_has_the_papers_formula_where_it_holds() -> None:
    """arXiv:2401.10241, table 2."""
    assert closed_bubble(config(pipeline="zb_h1")).words == "(p-1)(F+B-W) / (m(F+B+W))"
    assert "min(p,m)" in closed_bubble(config(pipeline="zb_h1", micro_batches=3)).words


def test_formula_that_does_not_hold_says_when_it_would() -> None:
    slow = config(vp=2, transfer_cost=0.5)
    words = compared(simulate(slow).bubble, closed_bubble(slow))
    assert words == "formula (p-1)/(v*m) = 18.75% (exact without transfers and for F <= B <= 2F)"
    assert "exact" not in compared(simulate(config(vp=2)).bubble, closed_bubble(config(vp=2)))


def test_ranks_hold_what_1f1b_promises() -> None:
    """In flight p - r (arXiv:2104.04473, section 2.2.1); the ends of the pipeline have one neighbour."""
    numbers = rank_numbers(simulate(config()))
    assert [n.rank for n in numbers] == [0, 1, 2, 3]
    assert [n.peak_in_flight for n in numbers] == [4, 3, 2, 1]
    assert [n.sends for n in numbers] == [n.receives for n in numbers] == [8, 16, 16, 8]
    assert [n.idle for n in numbers] == [9.0] * 4


def test_title_names_interleaving() -> None:
    assert title(config()) == "1F1B · pp=4 vp=1 micro_batches=8"
    assert title(config(vp=2)) == "interleaved 1F1B · pp=4 vp=2 micro_batches=8"
