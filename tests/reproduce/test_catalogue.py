"""Every experiment at every scale: steps that compose, names that are unique, needs that are met."""

import re
from functools import cache
from typing import Any, get_args

import pytest

from mlm.config.cli.commands import COMMANDS
from mlm.config.cli.compose import load_config
from mlm.reproduce import run
from mlm.reproduce.catalogue import EXPERIMENTS
from mlm.reproduce.config import ReproduceConfig, Scale
from mlm.reproduce.experiment import ALL_CORES, Experiment, Step
from mlm.training.checks import check_pretrain
from mlm.util.ownership import KINDS, matches

SCALES = get_args(Scale)
PAIRS = [(experiment, scale) for experiment in EXPERIMENTS for scale in SCALES]
GPUS = 8
"""Of scale=node."""
PATHS = re.compile(r"(data\.path|task|ckpt)\b")


def steps_of(experiment: Experiment, scale: Scale, seeds: int = 1) -> list[Step]:
    return list(experiment.steps(ReproduceConfig(scale=scale, seeds=seeds)))


@cache
def problems_of(words: tuple[str, ...]) -> tuple[str, ...]:
    """Problems of a command's settings, those of files that an earlier step makes left out."""
    command = max(
        (each for each in COMMANDS if each.words == words[: len(each.words)]),
        key=lambda each: len(each.words),
    )
    rest = list(words[len(command.words) :])
    if command.words == ("finetune",) or command.words == ("eval",):
        rest = [word if "=" in word else f"task={word}" for word in rest]
    config = load_config(command.config, rest)
    found: list[Any] = []
    if command.words == ("pretrain",):
        parallel = config.parallel
        found = check_pretrain(config, world_size=parallel.replica * (parallel.dp or 1), local_devices=GPUS)
    return tuple(problem for problem in map(str, found) if not PATHS.match(problem))


@pytest.mark.parametrize("experiment,scale", PAIRS, ids=lambda each: getattr(each, "name", each))
def test_steps_are_commands_without_a_problem(experiment: Experiment, scale: Scale) -> None:
    for step in steps_of(experiment, scale):
        if step.words[0] == "mlm":
            assert problems_of(step.words[1:]) == (), step.name


@pytest.mark.parametrize("experiment,scale", PAIRS, ids=lambda each: getattr(each, "name", each))
def test_steps_need_steps_that_there_are(experiment: Experiment, scale: Scale) -> None:
    steps = steps_of(experiment, scale, seeds=2)
    names = {step.name for step in steps}
    assert all(name in names for step in steps for name in step.needs)
    assert all(re.fullmatch(r"[a-z0-9.-]+", name) for name in names)


def test_results_are_in_folders_that_are_not_taken_from_the_user() -> None:
    """A folder of the user's with one of these names is in the way (mlm/util/ownership.py)."""
    found = {experiment.name for experiment in EXPERIMENTS}
    for experiment, scale in PAIRS:
        config = ReproduceConfig(name=experiment.name, scale=scale)
        found |= {step.result.partition("/")[0] for step in run.steps_of(experiment, config)}
    assert {name for name in found if not matches(name, KINDS["reproduce"].writes)} == set()


def test_a_name_stands_for_one_step_in_all_experiments() -> None:
    for scale in SCALES:
        found = dict[str, Step]()
        for experiment in EXPERIMENTS:
            for step in steps_of(experiment, scale, seeds=2):
                assert found.setdefault(step.name, step) == step


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda each: each.name)
def test_nothing_is_trained_at_the_papers_scale(experiment: Experiment) -> None:
    for step in steps_of(experiment, "paper"):
        assert step.words[:2] == ("mlm", "plan"), step.name


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda each: each.name)
def test_what_is_timed_runs_alone(experiment: Experiment) -> None:
    for step in steps_of(experiment, "laptop"):
        if "-round" in step.name:
            assert step.cores == ALL_CORES, step.name
