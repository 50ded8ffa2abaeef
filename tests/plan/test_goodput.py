"""Goodput under failures, against a simulation and the limits of its formula."""

import random

import pytest

from mlm.plan.goodput import FailureConfig, goodput


def simulated(mean: float, interval: float, cost: float, restart: float, segments: int) -> float:
    """Share of time that is progress, with failures at random that strike restarts too."""
    draw, clock = random.Random(1), 0.0
    for _ in range(segments):
        while (until := draw.expovariate(1 / mean)) < interval + cost:  # what was trained is lost
            clock += until + restarted(draw, mean, restart)
        clock += interval + cost
    return segments * interval / clock


def restarted(draw: random.Random, mean: float, restart: float) -> float:
    """Time of a restart that failures may strike."""
    spent = 0.0
    while (until := draw.expovariate(1 / mean)) < restart:
        spent += until
    return spent + restart


@pytest.mark.parametrize(("cost", "restart"), [(30.0, 0.0), (120.0, 900.0)])
def test_goodput_is_that_of_a_simulation(cost: float, restart: float) -> None:
    config = FailureConfig(mtbf_hours=1000.0, checkpoint_s=cost, restart_s=restart, interval_s=1200.0)
    found = goodput(config, 1000)
    assert found is not None
    assert found.failure_s == 3600
    assert found.share == pytest.approx(simulated(3600, 1200, cost, restart, 20_000), rel=0.02)


def test_the_proposed_interval_loses_least() -> None:
    best = goodput(FailureConfig(mtbf_hours=50_000), 4096)
    assert best is not None
    for factor in (0.7, 1.4):
        other = FailureConfig(mtbf_hours=50_000, interval_s=factor * best.interval_s)
        found = goodput(other, 4096)
        assert found is not None
        assert found.share < best.share


def test_no_failures_are_planned_unasked_and_too_many_end_nothing() -> None:
    assert goodput(FailureConfig(), 8) is None
    never = goodput(FailureConfig(mtbf_hours=1.0, restart_s=600), 10_000_000)
    assert never is not None
    assert never.share == 0.0
