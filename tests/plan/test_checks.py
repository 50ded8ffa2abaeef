"""Problems of `mlm plan`: key, value, remedy."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mlm.cli.compose.composition import load_config
from mlm.cli.plan import (
    check_plan_layouts,
    check_plan_memory,
    check_plan_schedule,
)
from mlm.util.errors import Problem


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


@pytest.mark.parametrize(("out", "remedy"), [("a.jsn", "a.json"), ("..", "schedule.json")])
def test_unknown_ending_gets_the_nearest(out: str, remedy: str) -> None:
    endings = ".json or .svg or .png"
    assert problems_of(f"out='{out}'") == [f"out={out} must end in {endings}; use out={remedy}"]


def test_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (problem,) = problems_of(f"out={tmp_path}/file/b/a.json")
    assert problem.endswith(
        f"{tmp_path}/file is no folder that can be written; name a file in one that is, such as out=a.json"
    )


@pytest.mark.parametrize(
    ("command", "check"), [("plan_memory", check_plan_memory), ("plan_layouts", check_plan_layouts)]
)
def test_a_family_that_is_not_there_is_a_problem(command: str, check: Callable[..., list[Problem]]) -> None:
    (problem,) = check(load_config(command, ["model.kind=gtp2"]))
    assert problem == "model.kind=gtp2: no such choice; did you mean model.kind=gpt2?"
