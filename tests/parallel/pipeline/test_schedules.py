"""Pipeline schedules: their orders, bubbles and memory are the papers'."""

from fractions import Fraction
from itertools import product

import pytest

from mlm.parallel.pipeline.actions import Action, Cost, Plan
from mlm.parallel.pipeline.lower import lower
from mlm.parallel.pipeline.schedules import build_schedule, forward_only

SIZES = [(p, m) for p in range(1, 8) for m in (*range(1, 10), 16, 21)]


def plan(name: str, p: int, v: int, m: int, cost: Cost | None = None) -> Plan:
    return lower(build_schedule(name, stages=p, chunks=v, micro_batches=m), cost=cost or Cost())


def written(actions: tuple[Action, ...]) -> str:
    return " ".join(map(str, actions))


def test_1f1b_order_is_the_papers() -> None:
    """arXiv:2104.04473, figure 4, upper half: 4 devices, counted from 0 here."""
    schedule = build_schedule("1f1b", stages=4, chunks=1, micro_batches=5)
    assert written(schedule[0]) == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"
    assert written(schedule[2]) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert written(schedule[3]) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"


def test_interleaved_order_is_the_papers() -> None:
    """arXiv:2104.04473, figure 4, lower half: 4 devices with 2 chunks each."""
    schedule = build_schedule("1f1b", stages=4, chunks=2, micro_batches=8)
    first, last = written(schedule[0]), written(schedule[3])
    assert first.startswith(
        "F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 F4 F5 F6 B0.1 F7 B1.1 F4.1 B2.1 F5.1 B3.1 F6.1 B0"
    )
    assert last.startswith(
        "F0 F1 F2 F3 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4 B0 F5 B1 F6 B2 F7 B3 F4.1 B4.1"
    )


def test_zb_h1_puts_weight_gradients_off_by_the_rank() -> None:
    schedule = build_schedule("zb_h1", stages=3, chunks=1, micro_batches=4)
    assert written(schedule[0]) == "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    assert written(schedule[1]) == "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3"
    assert written(schedule[2]) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_is_p_minus_1_over_v_m(name: str) -> None:
    """arXiv:2104.04473, sections 2.2.1 and 2.2.2; without chunks also for m < p.

    Costs are of a chunk: dividing F and B by v changes no ratio.
    """
    chunked = [(p, v, groups * p) for p, v, groups in product(range(1, 6), (2, 3, 4), (1, 2, 3, 5))]
    for p, v, m in [*((p, 1, m) for p, m in SIZES), *chunked]:
        assert plan(name, p, v, m).bubble == (p - 1) / (v * m), (p, v, m)


@pytest.mark.parametrize("forward, backward", [(1, 1), (3, 2), (2, 7)])
def test_interleaved_bubble_holds_for_any_cost(forward: int, backward: int) -> None:
    for p, v, m in [(2, 2, 4), (4, 2, 8), (3, 3, 9), (4, 3, 4)]:
        assert plan("1f1b", p, v, m, Cost(forward, backward)).bubble == (p - 1) / (v * m), (p, v, m)


def test_zb_h1_bubble_is_a_third_of_1f1b() -> None:
    """arXiv:2401.10241, section 2.1: with F = B = W and m >= p."""
    for p, m in SIZES[::3]:
        if m >= p:
            assert plan("zb_h1", p, 1, m).bubble == (p - 1) / (3 * m), (p, m)


@pytest.mark.parametrize("f, b, w", [(1, 2, 3), (3, 1, 2), (2, 2, 1)])
def test_zb_h1_idle_time_for_any_cost_and_few_micro_batches(f: int, b: int, w: int) -> None:
    """Derived: W fills min(p, m) - 1 waits of at most the shortest op."""
    for p, m in SIZES[::3]:
        idle = (p - 1) * (f + b) - (min(p, m) - 1) * min(f, b, w)
        cost = Cost(forward=f, backward=1000, input_gradient=b, weight_gradient=w)
        assert plan("zb_h1", p, 1, m, cost).makespan == m * (f + b + w) + idle, (p, m)


def test_forward_only_idles_p_minus_1_forwards() -> None:
    for p, v, m in [(1, 1, 1), (4, 1, 2), (4, 3, 4), (4, 3, 7), (3, 2, 10), (2, 4, 5)]:
        assert lower(forward_only(p, v, m)).makespan == v * m + p - 1, (p, v, m)


def test_micro_batches_in_flight() -> None:
    """All of them; p - r of 1F1B; p on every rank of ZB-H1, pending W included (arXiv:2401.10241, 2.1)."""
    for p, m in SIZES[::3]:
        assert plan("gpipe", p, 1, m).peak_in_flight == (m,) * p, (p, m)
        assert plan("1f1b", p, 1, m).peak_in_flight == tuple(min(p - r, m) for r in range(p)), (p, m)
        assert plan("zb_h1", p, 1, m).peak_in_flight == (min(p, m),) * p, (p, m)


def test_interleaved_1f1b_holds_one_over_p_more_on_rank_0() -> None:
    """arXiv:2205.05198, section 4.2.3: L(1 + (p - 1)/(p * v)) layers, L/(p * v) to a chunk."""
    for p, v in [(2, 2), (4, 2), (4, 3), (8, 2)]:
        peak = plan("1f1b", p, v, 4 * p).peak_in_flight
        assert Fraction(peak[0], p * v) == 1 + Fraction(p - 1, p * v)
        assert peak == tuple((v + 1) * p - 2 * r - 1 for r in range(p))
