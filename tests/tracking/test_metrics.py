"""Rates and the time left, by a clock the tests move."""

import pytest

from mlm.tracking.metrics import Eta, Throughput
from tests.tracking.reporting import Clock


def watch(clock: Clock, peak: float | None = 1e12) -> Throughput:
    """1000 tokens per step on two devices at 1e9 FLOP per token: 5e11 FLOP per step and device."""
    return Throughput(tokens_per_step=1000, flops_per_token=1e9, devices=2, peak=peak, clock=clock)


def run_steps(throughput: Throughput, clock: Clock, steps: int, seconds_each: float) -> None:
    for _ in range(steps):
        clock.now += seconds_each
        throughput.count()


def test_rates_cover_the_steps_since_the_last_lap() -> None:
    throughput = watch(clock := Clock())
    throughput.start()
    run_steps(throughput, clock, 3, 10.0)
    throughput.lap()
    run_steps(throughput, clock, 4, 2.0)
    rates = throughput.lap()
    assert rates.step_time_s == pytest.approx(2.0)
    assert rates.tokens_per_s == pytest.approx(500.0)
    assert rates.tflops == pytest.approx(0.25)
    assert rates.mfu == pytest.approx(0.25)


@pytest.mark.parametrize("laps", [False, True])
def test_paused_time_does_not_count_whether_a_lap_ends_in_it_or_not(laps: bool) -> None:
    throughput = watch(clock := Clock())
    throughput.start()
    run_steps(throughput, clock, 1, 2.0)
    throughput.pause()
    throughput.pause()
    if laps:
        throughput.lap()
    clock.now += 100
    throughput.start()
    run_steps(throughput, clock, 1, 3.0)
    throughput.start()  # runs already: nothing is forgotten
    assert throughput.lap().step_time_s == pytest.approx(3.0 if laps else 2.5)


def test_eta_leaves_out_what_came_before_the_first_logged_step_and_counts_pauses() -> None:
    clock = Clock()
    eta = Eta(100, clock)
    clock.now += 1000  # compilation
    eta.update(10, step_time_s=100.0)
    assert eta.seconds() == pytest.approx(90 * 100.0)  # by the first step's own duration
    clock.now += 30  # 10 steps of 2 s and a validation of 10 s
    eta.update(20, step_time_s=2.0)
    assert eta.seconds() == pytest.approx(80 * 3.0)
    clock.now += 40  # it counts down between updates, and stops at zero
    assert eta.seconds() == pytest.approx(200.0)
    clock.now += 400
    assert eta.seconds() == 0.0
