"""Distances of losses and gradient norms from recent ones."""

import math

import pytest

from mlm.incidents.recent import Recent, deviations


def test_one_spike_among_the_others_hides_no_second() -> None:
    others = [2.0, 2.1, 1.9, 2.05, 1.95, 50.0]
    assert deviations(50.0, others) > 100


def test_small_changes_of_a_flat_loss_are_no_deviation() -> None:
    assert deviations(2.02, [2.0] * 8) == pytest.approx(1.0)


def test_a_low_number_is_below_and_never_an_outlier() -> None:
    assert deviations(0.0, [2.0, 2.1, 1.9]) < 0


def test_nothing_is_far_before_a_quarter_of_the_window_is_known() -> None:
    recent = Recent(16)
    for _ in range(3):
        recent.add(1.0, 1.0)
    assert recent.deviations(100.0, 100.0) == (0.0, 0.0)
    recent.add(1.0, 1.0)
    assert min(recent.deviations(100.0, 100.0)) > 1000


def test_the_window_holds_finite_numbers_of_the_last_steps() -> None:
    recent = Recent(2)
    for loss in (1.0, 2.0, math.nan, 3.0):
        recent.add(loss, 1.0)
    assert recent.pairs == [(2.0, 1.0), (3.0, 1.0)]
