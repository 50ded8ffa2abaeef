"""State of an optimizer of the user's own, and values of a decay of the user's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlm.config.imports import OwnCodeError
from mlm.optim.adamw import applied_steps, apply, ensure_state
from mlm.optim.config import ScheduleConfig
from mlm.optim.user import share_of
from mlm.parallel.mesh import Axis
from mlm.parallel.sharding import ParameterShard, parameter_shards


class Counting(torch.optim.Optimizer):
    """Decays weights whatever the gradient, and counts its steps: in an int, or in a tensor."""

    def __init__(self, params: Any, count: Callable[[], Any]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.count = count

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("step", self.count())
                state.setdefault("sum", torch.ones_like(p)).add_(p.grad)
                state["step"] += 1
                p.mul_(0.5).add_(p.grad)


def counting(count: Callable[[], Any] = int) -> tuple[Counting, list[ParameterShard], Tensor]:
    """An optimizer, its shards and the weight."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    return Counting(model.parameters(), count), list(parameter_shards(model, Axis("tp"))), model.weight


@pytest.mark.parametrize("count", [int, lambda: torch.zeros(())], ids=["an int", "a tensor"])
def test_state_is_made_without_a_trace_and_counts_from_where_it_should(count: Callable[[], Any]) -> None:
    optimizer, _, weight = counting(count)
    before = weight.detach().clone()
    ensure_state(optimizer, 5.0)
    assert torch.equal(weight, before)
    assert weight.grad is None
    assert not optimizer.state[weight]["sum"].any()
    assert applied_steps(optimizer) == 5.0
    assert type(optimizer.state[weight]["step"]) is type(count())


@pytest.mark.parametrize("overflow", [False, True])
def test_an_overflow_leaves_out_the_step_of_an_unfused_optimizer(overflow: bool) -> None:
    optimizer, shards, weight = counting()
    ensure_state(optimizer)
    before = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    apply(optimizer, shards, torch.tensor(0.25), torch.tensor(float(overflow)))
    torch.testing.assert_close(weight.detach(), before if overflow else 0.5 * before + 0.25)


@pytest.mark.parametrize(("value", "share"), [(0.3, 0.3), (1 + 1e-7, 1.0), (-1e-7, 0.0), (True, 1.0)])
def test_a_decays_share_is_from_0_to_1_but_for_rounding(value: float, share: float) -> None:
    assert share_of(ScheduleConfig(), lambda _: value, 0.5) == share


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), None, "0.5"])
def test_a_decay_that_is_no_share_is_an_error(value: Any) -> None:
    with pytest.raises(OwnCodeError, match=r"decay\(0\.5\) is .*return a number from 0 to 1"):
        share_of(ScheduleConfig(), lambda _: value, 0.5)
