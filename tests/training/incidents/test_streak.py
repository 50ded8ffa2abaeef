"""Steps in a row without finite numbers, and those that the loss scale handles."""

import math
from dataclasses import replace
from pathlib import Path

from mlm.parallel.mesh import shape_context
from mlm.training.incidents.numbers import StepNumbers
from mlm.training.incidents.watcher import Incidents
from mlm.training.trainer import Trainer
from tests.training.incidents.runs import watcher
from tests.training.test_trainer import config


def incidents_of(dtype: str, folder: Path) -> Incidents:
    made = watcher(Trainer(config(dtype=dtype), shape_context()), folder)
    made.settings = replace(made.settings, patience=3)
    return made


def kinds_of(incidents: Incidents, *numbers: StepNumbers) -> list[list[str]]:
    """Why each step of a run with these numbers is an incident."""
    found = []
    for each in numbers:
        verdict = incidents.judge_numbers(each)
        incidents.count_bad_steps(each, verdict)
        found.append(verdict.kinds)
    return found


def test_a_finite_step_ends_a_row_of_those_that_are_not(tmp_path: Path) -> None:
    bad, good = StepNumbers(math.nan, math.inf), StepNumbers(2.0, 1.0)
    one = ["loss_not_finite", "gradient_not_finite"]
    found = kinds_of(incidents_of("fp64", tmp_path), bad, bad, good, bad, bad, bad)
    assert found == [one, one, [], one, one, [*one, "exhausted"]]


def test_an_overflow_above_the_smallest_scale_is_no_incident(tmp_path: Path) -> None:
    """The scale is halved then, and the update left out as usual."""
    incidents = incidents_of("fp16", tmp_path)
    floor = incidents.trainer.config.precision.min_loss_scale
    above, at = (StepNumbers(2.0, math.inf, scale=scale) for scale in (2 * floor, floor))
    assert kinds_of(incidents, above, at) == [[], ["loss_scale_at_floor", "gradient_not_finite"]]
