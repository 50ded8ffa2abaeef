"""Problems of `mlm plan`: key, value, remedy."""

import pytest

from mlm.cli.compose.composition import load_config
from mlm.cli.plan import (
    check_plan_schedule,
)


def problems_of(*overrides: str) -> list[str]:
    return check_plan_schedule(load_config("plan_schedule", overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["vp=2"],
        ["micro_batches=3"],
        ["pipeline=gpipe", "vp=2", "micro_batches=7"],
        ["pipeline=zb_h1", "micro_batches=7"],
    ],
)
def test_sound_settings_have_no_problem(overrides: list[str]) -> None:
    assert problems_of(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "keys", "fix"),
    [
        (["pp=0", "micro_batches=0"], ["pp", "micro_batches"], ""),
        (["vp=2", "micro_batches=10"], ["micro_batches"], "use micro_batches=8 or micro_batches=12, or vp=1"),
        (["vp=2", "pipeline=zb_h1"], ["vp"], "use pipeline=1f1b or vp=1"),
        (["micro_batches=100000"], ["micro_batches"], "use micro_batches=62500 or fewer"),
        (["pp=0", "vp=2", "pipeline=zb_h1", "out=a"], ["pp", "vp", "out"], "use out=a.json"),
    ],
)
def test_problems_come_together_with_key_and_fix(overrides: list[str], keys: list[str], fix: str) -> None:
    problems = check_plan_schedule(load_config("plan_schedule", overrides))
    assert [problem.keys[0] for problem in problems] == keys
    assert fix in [problem.fix for problem in problems]


def test_remedy_for_a_long_schedule_has_no_problem_itself() -> None:
    (problem,) = problems_of("pp=96", "vp=7", "micro_batches=9600")
    remedy = problem.rpartition("use ")[2].split()[0]
    assert problems_of("pp=96", "vp=7", remedy) == []
