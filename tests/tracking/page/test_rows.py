"""Columns of numbers, and curves thinned without loss of an extreme."""

import math

import numpy as np
import pytest

from mlm.tracking.html.rows import Rows, listed, number, thin


def axes(count: int) -> dict[str, np.ndarray]:
    return {"step": np.arange(float(count))}


def test_thinning_keeps_the_extremes_and_both_ends() -> None:
    y = np.random.default_rng(0).normal(size=100_000)
    y[54_321], y[12_345] = 99.0, -99.0
    curve = thin(axes(len(y)), y, 500)
    assert len(curve.y) <= 500
    assert {99.0, -99.0, y[0], y[-1]} <= set(curve.y)
    for start in range(0, len(y), 1000):  # of every bucket, whatever its place
        part = y[start : start + 1000]
        assert {part[0], part[-1], part.min(), part.max()} <= set(curve.y)


def test_a_short_curve_is_not_thinned() -> None:
    curve = thin(axes(100), np.arange(100.0), 100)
    assert curve.bucket == 1
    assert curve.encode() == {"step": list(range(100)), "y": list(range(100))}


def test_a_gap_survives_thinning() -> None:
    y = np.ones(10_000)
    y[5_005] = math.nan
    curve = thin(axes(len(y)), y, 100)
    assert 5_005 in curve.x["step"]
    assert listed(curve.y).count(None) == 1


def test_means_are_those_of_all_steps_of_a_bucket() -> None:
    y = np.concatenate([np.zeros(999), [1000.0], np.full(1000, 3.0)])
    curve = thin(axes(len(y)), y, 10)
    assert curve.mean_y.tolist() == [1.0, 3.0]
    assert curve.bucket == 1000


def test_of_a_step_logged_twice_the_later_value_holds() -> None:
    rows = Rows()
    for step, loss in ((1, 5.0), (2, 4.0), (3, 3.0), (2, 4.5)):
        rows.add({"step": step, "loss": loss})
    table = rows.table()
    assert table["step"].tolist() == [1, 2, 3]
    assert table["loss"].tolist() == [5.0, 4.5, 3.0]


def test_steps_after_the_one_that_is_returned_to_are_dropped() -> None:
    rows = Rows()
    for step in (1, 2, 3):
        rows.add({"step": step, "loss": 1.0 * step})
    rows.return_to(1)
    rows.add({"step": 2, "loss": 9.0})
    assert rows.table()["loss"].tolist() == [1.0, 9.0]


def test_a_column_that_comes_later_begins_with_gaps_and_their_number_is_bounded() -> None:
    rows = Rows()
    rows.add({"step": 1})
    rows.add({"step": 2, **{f"name {n}": 1.0 for n in range(1000)}})
    assert math.isnan(rows.columns["name 0"][0])
    assert len(rows.columns) < 100


@pytest.mark.parametrize("value", [None, True, "1", math.nan, math.inf, 10**400, [1]])
def test_what_is_no_finite_number_is_a_gap(value: object) -> None:
    assert math.isnan(number(value))
