"""Limits of losses and gradient norms, doubt about weights, and what a checkpoint keeps of incidents."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mlm.checkpoint.native.run_state import INCIDENTS
from mlm.parallel.mesh import Axis, shape_context
from mlm.training.incidents import numbers as module
from mlm.training.incidents.numbers import (
    IncidentState,
    RecentSteps,
    StepNumbers,
    decode,
    exceeds_limits,
    return_level,
    spare_samples,
)
from mlm.training.incidents.watcher import Incidents
from mlm.training.trainer import Trainer
from mlm.util.errors import CorruptFileError
from tests.slow import slow_but
from tests.training.incidents.runs import watcher
from tests.training.test_trainer import config


def clean_norms(kind: str, count: int) -> list[float]:
    """Gradient norms of a run whose tails are those of small batches, or heavier."""
    draw, level = random.Random(4), 0.0
    drawn = []
    for step in range(count):
        level = 0.95 * level + draw.gauss(0, 0.03)  # neighbouring steps are alike
        tail = {"normal": draw.gauss(0, 0.2), "heavier": 0.1 * draw.expovariate(1.0) ** 1.3}[kind]
        drawn.append(math.exp(level + tail + 2 / (1 + step / 50)))
    return drawn


@pytest.mark.parametrize("kind", slow_but({1}, ["normal", "heavier"]))
def test_clean_steps_of_any_tail_are_no_outliers_and_faults_are(kind: str) -> None:
    recent, alarms, found = RecentSteps(512), 0, {100.0: 0, 1e4: 0}
    norms = clean_norms(kind, 20_000)
    for norm in norms:
        loss = 4 + 0.2 * math.log(norm)
        limits = recent.limits(1e6)
        alarms += loss >= limits[0] or norm >= limits[1]
        found = {factor: count + (norm * factor >= limits[1]) for factor, count in found.items()}
        recent.add(loss, norm)
    assert alarms == 0
    assert found[100.0] > 0.97 * len(norms)
    assert found[1e4] > 0.998 * len(norms)  # all but the first 32


def test_a_level_that_rises_for_good_is_soon_usual() -> None:
    draw = random.Random(0)
    recent = RecentSteps(512)
    alarms = []
    for step in range(600):
        norm = math.exp(draw.gauss(0, 0.1)) * (50 if step >= 300 else 1)
        alarms += [step] if norm >= recent.limits(1e6)[1] else []
        recent.add(4.0, norm)
    assert alarms[0] == 300
    assert len(alarms) < 20


def test_the_limit_is_reached_once_in_so_many_steps() -> None:
    """Exponential excesses with a mean of 1: one in a million is above 13.8, that of an estimate further."""
    draw = random.Random(0)
    excesses = sorted(draw.expovariate(1.0) for _ in range(512))
    assert 13.8 < return_level(excesses, 1e6, 0.0) < 20
    assert return_level(excesses, 1e3, 0.0) < return_level(excesses, 1e6, 0.0)
    assert return_level([0.0] * 512, 1e6, 0.01) == pytest.approx(0.132, abs=0.001)


def test_the_window_holds_finite_numbers_and_those_of_the_first_level() -> None:
    recent = RecentSteps(2)
    for loss in range(100):
        recent.add(float(loss), 1.0)
        recent.add(math.nan, 1.0)
    assert [loss for loss, _ in recent.pairs] == list(range(66, 100))


def test_there_is_no_limit_without_a_threshold_or_before_32_steps_are_known() -> None:
    pairs = [(1.0, 1.0)] * 100
    assert RecentSteps(512, pairs).limits(0) == (math.inf, math.inf)
    assert RecentSteps(512, pairs[:31]).limits(1e6) == (math.inf, math.inf)
    assert max(RecentSteps(512, pairs[:32]).limits(1e6)) < 1001
    assert RecentSteps(512, [(1.0, 0.0)] * 40).limits(1e6)[1] < 1e-20


def test_a_number_at_its_limit_or_not_finite_leaves_the_update_out() -> None:
    assert exceeds_limits(torch.tensor([1.0, 2.0]), (1.5, 3.0)).item() == 0.0
    for numbers in ([1.5, 2.0], [1.0, 3.0], [math.nan, 2.0], [-math.inf, 2.0]):
        assert exceeds_limits(torch.tensor(numbers), (1.5, 3.0)).item() == 1.0
    assert exceeds_limits(torch.tensor([1.0, math.inf]), (math.inf, math.inf)).item() == 1.0


def test_numbers_that_groups_sum_in_other_orders_are_one_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each axis has groups of its own, whose sums may round differently."""

    def all_reduce(x: torch.Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        return x.copy_(torch.tensor([5.0, 7.0])) if op == dist.ReduceOp.MAX else x.add_(torch.rand(2))

    monkeypatch.setattr(module, "all_reduce", all_reduce)
    axes = {name: Axis(name) for name in ("tp", "replicas", "pp")}
    ctx = SimpleNamespace(**axes, world_size=1, device=torch.device("cuda"))
    trainer: Any = SimpleNamespace(ctx=ctx, objective=SimpleNamespace(num_losses=1))
    assert module.sum_numbers(trainer, torch.ones(1), torch.tensor(2.0)).tolist() == [5.0, 7.0]


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


@pytest.mark.parametrize("steps", [1, 15])
def test_the_first_steps_are_in_doubt_above_twice_the_highest_level_and_a_nat(steps: int) -> None:
    """Of equal losses the median is the level: 2 * 4 + 1 = 9."""
    assert doubts([*[4.0] * steps, 8.99])[-1] == 0
    assert doubts([*[4.0] * steps, 9.01])[-1] == steps + 1


@pytest.mark.parametrize(
    ("losses", "since"),
    [
        # as of lr=1 from step 41 on: each loss alone is near the one before
        ([*noise(40, 4.2), 4.3, 6.5, 8.9, 12.0, 20.0], 42),
        # a model that has learned, at the loss of a uniform guess of 64 tokens
        ([*noise(600, 2.0), 4.16], 601),
        # creeping up from the best of the window
        ([*noise(600, 2.0), *(2.0 + step / 50 for step in range(200))], 614),
    ],
    ids=["a growing ruin", "a uniform guess", "creeping up"],
)
def test_a_run_is_in_doubt_since_the_step_of(losses: list[float], since: int) -> None:
    assert doubts(losses)[-1] == since


def test_doubt_lasts_until_the_loss_is_usual_again_or_for_a_window() -> None:
    young = noise(200, 2.0)
    assert doubts([*young, *[9.0] * 300])[-1] == 201
    assert doubts([*young, *[9.0] * 300, *[2.0] * 3, 9.0])[-5:] == [201, 201, 0, 0, 504]
    assert doubts([*young, *[9.0] * 600])[-1] == 0


@pytest.mark.parametrize(("last", "limit"), [(0.5, 1.5), (8.0, 10.0)])
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


def incident_state(**changes: Any) -> IncidentState:
    recent = RecentSteps(4, [(1.5, 2.5), (1.25, 0.5)])
    state = IncidentState(
        recent, ((8, 4), (40, 2)), [3, 11], rewinds=2, nonfinite_steps=1, last_rewind=(12, 8)
    )
    state = replace(state, suspect=3, count=4, expires=9, differ=5, ceilings=(4.5, 4.25, 4.0))
    return replace(state, **changes)


def test_a_resumed_run_remembers_all_that_the_first_did() -> None:
    state = incident_state()
    again = decode(json.loads(json.dumps(state.encode())), 4)
    assert again.recent.pairs == state.recent.pairs
    assert replace(again, recent=state.recent) == state
    assert again.doubt == again.high == 3
    assert [again.rewind_below(step) for step in (9, 12, 13)] == [8, 8, None]


@pytest.mark.parametrize(
    "change",
    [*({"streak": 1.0}, {"rewinds": True}, {"left_out_steps": [-3]}, {"left_out_samples": [[1 << 62, 1]]})],
    ids=str,
)
def test_a_count_that_is_none_is_damage(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptFileError, match=r"state of incidents is damaged .* is not a whole number"):
        decode({**incident_state().encode(), **change}, 4)


@pytest.mark.parametrize(("action", "further"), [("skip", 0), ("rewind", 2 * 4 * 3)])
def test_a_run_may_need_the_samples_in_place_of_those_left_out(action: str, further: int) -> None:
    """Each range, with the rest of its batch; for each rewind to come as much again."""
    config = SimpleNamespace(
        incident=SimpleNamespace(window=4, rewinds=3, action=action),
        train=SimpleNamespace(global_batch_size=4),
    )
    trainer: Any = SimpleNamespace(config=config, extra_state={INCIDENTS: incident_state().encode()})
    assert spare_samples(trainer) == (4 + 4) + (2 + 4) + further
    trainer.extra_state = {}
    assert spare_samples(trainer) == further


def incidents_of(dtype: str, folder: Path) -> Incidents:
    made = watcher(Trainer(config(dtype=dtype), shape_context()), folder)
    made.settings = replace(made.settings, patience=3)
    return made


def kinds_of(incidents: Incidents, *numbers: StepNumbers) -> list[list[str]]:
    """Why each step of a run with these numbers is an incident."""
    found = []
    for each in numbers:
        verdict = incidents.judge_numbers(each)
        incidents.count_nonfinite(each, verdict)
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
