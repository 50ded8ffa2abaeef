"""The guide names what is written."""

from dataclasses import fields
from pathlib import Path

from mlm.tracking.metrics import ExpertLoads, StepMetrics

GUIDE = (Path(__file__).parents[2] / "scripts/docs/pages/guides/runs.md").read_text()


def test_every_field_of_a_step_has_a_row() -> None:
    named = {line.split("`")[1] for line in GUIDE.splitlines() if line.startswith("| `")}
    of_experts = set(ExpertLoads({0: [1]}, {0: [0]}).summary())
    assert {field.name for field in fields(StepMetrics)} - {"parts", "loads"} | of_experts <= named
