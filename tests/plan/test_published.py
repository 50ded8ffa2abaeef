"""The time model beside published runs: its errors are those the guide shows, and below their targets."""

from pathlib import Path

import pytest
from plan_published import TABLES, Table, errors, markdown, mean_absolute, saved

GUIDE = Path(__file__).resolve().parents[2] / "scripts/docs/pages/guides/planning.md"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_step_times_of_a_published_table_are_predicted(table: Table) -> None:
    """With the constants of its last fit: every row as saved, the mean within the target."""
    its = saved()[table.name]
    found = errors(table, table.rows, its["constants"])
    assert len(its["constants"]) <= 6
    assert found == pytest.approx([row["error"] for row in its["rows"]], abs=1e-3)
    assert mean_absolute(found) <= table.target
    assert mean_absolute([row["left_out"] for row in its["rows"]]) <= table.target


@pytest.mark.parametrize(("fitted", "other"), [("sc21", "january_2021"), ("january_2021", "sc21")])
def test_constants_of_one_table_predict_another_of_the_same_gpus(fitted: str, other: str) -> None:
    """Other layouts, batches and a year's work on the program lie between them."""
    table = next(table for table in TABLES if table.name == other)
    assert mean_absolute(errors(table, table.rows, saved()[fitted]["constants"])) <= 0.05


def test_the_guide_shows_the_errors() -> None:
    assert markdown(saved()) in GUIDE.read_text("utf-8")
