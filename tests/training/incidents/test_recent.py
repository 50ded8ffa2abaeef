"""Distances of losses and gradient norms from recent ones."""

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mlm.parallel.mesh import Axis
from mlm.training.incidents import numbers as findings
from mlm.training.incidents.numbers import RecentSteps, deviations, exceeds_limits, return_level
from tests.slow import slow_but


def test_one_spike_among_the_others_hides_no_second() -> None:
    others = [2.0, 2.1, 1.9, 2.05, 1.95, 50.0]
    assert deviations(50.0, others) > 100


def test_small_changes_of_a_flat_loss_are_no_deviation() -> None:
    assert deviations(2.02, [2.0] * 8) == pytest.approx(1.0)


def test_a_low_number_is_below_and_never_an_outlier() -> None:
    assert deviations(0.0, [2.0, 2.1, 1.9]) < 0


def clean_norms(kind: str, count: int) -> list[float]:
    """Gradient norms of a run whose tails are those of small batches, or heavier."""
    draw, level = random.Random(4), 0.0
    drawn = []
    for step in range(count):
        level = 0.95 * level + draw.gauss(0, 0.03)  # neighbouring steps are alike
        tail = {
            "normal": draw.gauss(0, 0.2),
            "exponential": 0.15 * draw.expovariate(1.0) * draw.choice((-1, 1)),
            "heavier": 0.1 * draw.expovariate(1.0) ** 1.3,
        }[kind]
        drawn.append(math.exp(level + tail + 2 / (1 + step / 50)))
    return drawn


@pytest.mark.parametrize("kind", slow_but({2}, ["normal", "exponential", "heavier"]))
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


def test_a_resumed_run_has_the_limits_of_one_that_was_never_stopped() -> None:
    draw, recent = random.Random(1), RecentSteps(64)
    for _ in range(500):
        recent.add(draw.gauss(3, 0.1), draw.expovariate(1.0))
    assert RecentSteps(64, list(recent.pairs)).limits(1e6) == recent.limits(1e6)


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


@pytest.mark.parametrize(
    "numbers, flagged",
    [
        ([1.0, 2.0], 0.0),
        ([1.5, 2.0], 1.0),
        ([1.0, 3.0], 1.0),
        ([math.nan, 2.0], 1.0),
        ([-math.inf, 2.0], 1.0),
    ],
)
def test_a_number_at_its_limit_or_not_finite_leaves_the_update_out(
    numbers: list[float], flagged: float
) -> None:
    assert exceeds_limits(torch.tensor(numbers), (1.5, 3.0)).item() == flagged
    assert exceeds_limits(torch.tensor([1.0, math.inf]), (math.inf, math.inf)).item() == 1.0


def test_numbers_that_groups_sum_in_other_orders_are_one_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each axis has groups of its own, whose sums may round differently."""

    def all_reduce(x: torch.Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        return x.copy_(torch.tensor([5.0, 7.0])) if op == dist.ReduceOp.MAX else x.add_(torch.rand(2))

    monkeypatch.setattr(findings, "all_reduce", all_reduce)
    axes = {name: Axis(name) for name in ("tp", "replicas", "pp")}
    ctx = SimpleNamespace(**axes, world_size=1, device=torch.device("cuda"))
    trainer: Any = SimpleNamespace(ctx=ctx, objective=SimpleNamespace(num_losses=1))
    assert findings.sum_numbers(trainer, torch.ones(1), torch.tensor(2.0)).tolist() == [5.0, 7.0]
