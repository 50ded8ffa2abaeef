"""Losses from which weights are doubtful, and replicas that differ."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlm.checkpoint.native.run_state import DOUBTFUL_SINCE, INCIDENTS
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import IncidentConfig
from mlm.training.incidents.numbers import IncidentState, RecentSteps, decode
from mlm.training.incidents.watcher import Incidents
from mlm.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.training.incidents.runs import watcher
from tests.training.incidents.test_places import batches_of
from tests.training.incidents.test_transient import usual
from tests.training.test_trainer import config

NAME = "token.weight"


def doubts(losses: list[float], window: int = 512) -> list[int]:
    """The step since which a run is in doubt, after each of its losses."""
    memory, found = IncidentState(RecentSteps(window)), []
    for step, loss in enumerate(losses, 1):
        memory.judge_loss(loss, step)
        memory.recent.add(loss, 1.0)
        found.append(memory.high)
    return found


def noise(count: int, mean: float) -> list[float]:
    draw = random.Random(0)
    return [draw.gauss(mean, 0.05) for _ in range(count)]


@pytest.mark.parametrize("steps", [1, 3, 15])
def test_the_first_steps_are_in_doubt_above_twice_the_highest_level_and_a_nat(steps: int) -> None:
    """Of equal losses the median is the level: 2 * 4 + 1 = 9."""
    assert doubts([*[4.0] * steps, 8.99])[-1] == 0
    assert doubts([*[4.0] * steps, 9.01])[-1] == steps + 1


def test_a_ruin_that_grows_step_by_step_is_noticed_in_a_young_run() -> None:
    """As of lr=1 from step 41 on: each loss alone is near the one before."""
    assert doubts([*noise(40, 4.2), 4.3, 6.5, 8.9, 12.0, 20.0])[-1] == 42


def test_a_model_that_has_learned_is_in_doubt_at_the_loss_of_a_uniform_guess() -> None:
    """Of 64 tokens: ln 64 = 4.16."""
    assert doubts([*noise(600, 2.0), 4.16])[-1] == 601


def test_a_loss_that_creeps_up_is_compared_with_the_best_of_the_window() -> None:
    creeping = [2.0 + step / 50 for step in range(200)]
    assert doubts([*noise(600, 2.0), *creeping])[-1] > 0


def test_doubt_lasts_until_the_loss_is_usual_again_or_for_a_window() -> None:
    young = noise(200, 2.0)
    assert doubts([*young, *[9.0] * 300])[-1] == 201
    assert doubts([*young, *[9.0] * 300, *[2.0] * 3, 9.0])[-5:] == [201, 201, 0, 0, 504]
    assert doubts([*young, *[9.0] * 600])[-1] == 0


@pytest.mark.parametrize(("last", "limit"), [(0.5, 1.5), (4.0, 5.0), (8.0, 10.0)])
def test_samples_of_the_last_step_are_in_doubt_a_nat_and_a_quarter_above_their_loss(
    last: float, limit: float
) -> None:
    """As after an update of lr=1: 6.54 where the loss of the same samples was 4.30."""
    memory = IncidentState(RecentSteps(512))
    for step in range(40):
        memory.recent.add(last + 2 * (step % 2), 1.0)  # others are 2 above by chance
    memory.recent.add(last, 1.0)
    memory.judge_loss(limit - 0.01, 42, is_repeated=True)
    assert memory.high == 0
    memory.judge_loss(limit + 0.01, 42, is_repeated=True)
    assert memory.high == 42


def test_a_doubt_of_the_last_step_is_not_ended_by_the_samples_that_it_has_fitted() -> None:
    memory = IncidentState(RecentSteps(512))
    memory.recent.add(1.0, 1.0)
    memory.judge_loss(4.0, 2)
    memory.judge_loss(1.0, 3, is_repeated=True)
    assert memory.high == 2


def test_losses_of_zero_are_usual_and_a_tenth_above_them_too() -> None:
    assert doubts([*[0.0] * 40, 0.1])[-1] == 0


def test_a_checkpoint_remembers_the_doubt() -> None:
    memory = IncidentState(RecentSteps(8), suspect=3, count=4, expires=9, differ=5, ceilings=(4.5, 4.25, 4.0))
    again = decode(json.loads(json.dumps(memory.encode())), 8)
    assert (again.suspect, again.count, again.expires, again.differ) == (3, 4, 9, 5)
    assert again.ceilings == (4.5, 4.25, 4.0)
    assert again.doubt == again.high == 3


def faulty_replica(ctx: ParallelContext, out: Path, action: Any) -> tuple[list[str], int, bool]:
    """What a step says of a weight that is wrong on rank 1, since when the run is in doubt, if it ended."""
    trainer = Trainer[Any](replace(config(), incident=IncidentConfig(action=action)), ctx)
    incidents: Incidents = watcher(trainer, out)
    incidents.memory.recent = usual()
    if ctx.rank == 1:
        next(s for s in trainer.shards if s.name == NAME).parameter.data.mul_(1e4)
    ended = False
    try:
        trainer.train_step((incidents.on_step_start(batches := batches_of(trainer)), batches)[1])
    except Exception as error:  # of all ranks
        ended = "resume from a checkpoint before it" in str(error)
    return incidents.said, incidents.memory.doubt, ended  # type: ignore[attr-defined]


@pytest.mark.parametrize(("action", "ends"), [("log", False), ("rewind", True)])
def test_an_incident_of_one_replica_blames_no_sample(action: str, ends: bool, tmp_path: Path) -> None:
    for (said,), doubt, ended in run_on_ranks(faulty_replica, tmp_path, action, dp=2):
        assert f"silent corruption: {NAME} differs over dp on ranks 0, 1" in said
        assert "sample" not in said
        assert (doubt, ended) == (1, ends)


def save_with_a_flip(ctx: ParallelContext, out: Path) -> tuple[int | None, int, str]:
    """Since when a save says that replicas differ and its checkpoint is in doubt, what the run hears."""
    trainer = Trainer[Any](config(), ctx)
    incidents = watcher(trainer, out)
    if ctx.rank == 1:
        trainer.shards[0].parameter.data.view(-1)[0] += 1e-9
    incidents.before_save()
    incidents.before_save()  # said once
    return trainer.wrong_since, trainer.extra_state[INCIDENTS][DOUBTFUL_SINCE], " ".join(incidents.said)  # type: ignore[attr-defined]


def test_replicas_are_compared_before_a_save(tmp_path: Path) -> None:
    """The weights after step 0 are what the first step begins with."""
    for wrong_since, since, said in run_on_ranks(save_with_a_flip, tmp_path, dp=2):
        assert (wrong_since, since) == (1, 1)
        assert said.count("silent corruption: ") == 1
