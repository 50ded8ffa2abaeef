"""The time model beside published runs: its errors are those the guide shows, and below their targets."""

from pathlib import Path

import pytest
from plan_published import TABLES, Table, errors, markdown, mean_absolute, saved

GUIDE = Path(__file__).resolve().parents[2] / "mlm/plan/README.md"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_step_times_of_a_published_table_are_predicted(table: Table) -> None:
    """With the constants of its last fit: every row as saved, the mean within the target."""
    its = saved()[table.name]
    found = errors(table, table.rows, its["constants"])
    assert len(its["constants"]) <= 6
    assert found == pytest.approx([row["error"] for row in its["rows"]], abs=1e-3)
    assert mean_absolute(found) <= table.target
    assert mean_absolute([row["left_out"] for row in its["rows"]]) <= table.target


def test_the_guide_shows_the_errors() -> None:
    assert markdown(saved()) in GUIDE.read_text("utf-8")
