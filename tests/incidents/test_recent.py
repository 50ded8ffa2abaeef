"""Distances of losses and gradient norms from recent ones."""

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mlm.incidents import findings
from mlm.incidents.findings import beyond
from mlm.incidents.recent import Recent, deviations, median
from mlm.parallel.mesh import Axis


def test_one_spike_among_the_others_hides_no_second() -> None:
    others = [2.0, 2.1, 1.9, 2.05, 1.95, 50.0]
    assert deviations(50.0, others) > 100


def test_small_changes_of_a_flat_loss_are_no_deviation() -> None:
    assert deviations(2.02, [2.0] * 8) == pytest.approx(1.0)


def test_a_low_number_is_below_and_never_an_outlier() -> None:
    assert deviations(0.0, [2.0, 2.1, 1.9]) < 0


def test_nothing_is_far_before_a_quarter_of_the_window_is_known() -> None:
    recent = Recent(16)
    for _ in range(3):
        recent.add(1.0, 1.0)
    assert recent.deviations(100.0, 100.0) == (0.0, 0.0)
    recent.add(1.0, 1.0)
    assert min(recent.deviations(100.0, 100.0)) > 1000


def test_the_window_holds_finite_numbers_of_the_last_steps() -> None:
    recent = Recent(2)
    for loss in (1.0, 2.0, math.nan, 3.0):
        recent.add(loss, 1.0)
    assert recent.pairs == [(2.0, 1.0), (3.0, 1.0)]


@pytest.mark.parametrize("threshold", [0.3, 1.0, 4.0])
def test_no_outlier_is_below_the_limit_and_few_others_are_above_it(threshold: float) -> None:
    """A GPU compares with the limit, the host with deviations: the host must see all that it calls far."""
    draw = random.Random(0)
    for _ in range(200):
        recent = Recent(8, [(draw.gauss(2, 10.0 ** draw.randint(-6, 1)), 1.0) for _ in range(8)])
        (most, _), middle = recent.limits(threshold), median(loss for loss, _ in recent.pairs)
        for far in (most - 1e-9 * abs(most), most, most + 1e-9 * abs(most), draw.gauss(2, 5)):
            assert far >= most or recent.deviations(far, 1.0)[0] < threshold
        if threshold > 1:
            assert recent.deviations(middle + 1.01 * (most - middle), 1.0)[0] >= threshold


def test_there_is_no_limit_without_a_threshold_or_before_a_quarter_of_the_window_is_known() -> None:
    assert Recent(8, [(1.0, 1.0)] * 8).limits(0) == (math.inf, math.inf)
    assert Recent(16, [(1.0, 1.0)] * 3).limits(4) == (math.inf, math.inf)
    assert Recent(16, [(1.0, 1.0)] * 4).limits(4) == pytest.approx((1.04, 1.04))


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
    assert beyond(torch.tensor(numbers), (1.5, 3.0)).item() == flagged
    assert beyond(torch.tensor([1.0, math.inf]), (math.inf, math.inf)).item() == 1.0


def test_numbers_that_groups_sum_in_other_orders_are_one_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each axis has groups of its own, whose sums may round differently."""

    def all_reduce(x: torch.Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        return x.copy_(torch.tensor([5.0, 7.0])) if op == dist.ReduceOp.MAX else x.add_(torch.rand(2))

    monkeypatch.setattr(findings, "all_reduce", all_reduce)
    axes = {name: Axis(name) for name in ("tp", "replicas", "pp")}
    ctx = SimpleNamespace(**axes, world_size=1, device=torch.device("cuda"))
    trainer: Any = SimpleNamespace(ctx=ctx, objective=SimpleNamespace(losses=1))
    assert findings.sum_numbers(trainer, torch.ones(1), torch.tensor(2.0)).tolist() == [5.0, 7.0]
