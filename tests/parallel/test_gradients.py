"""Bucketed data-parallel reduction: the sum over ranks, once per step, while backward runs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mlm.parallel.gradients import GradientReducer
from mlm.parallel.mesh import Axis, ParallelContext
from tests.ranks import run_on_ranks


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_gradients_are_the_sum_over_ranks_and_micro_batches(bucket_bytes: int) -> None:
    run_on_ranks(check_sum, bucket_bytes, dp=3)


def model_and_input() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, torch.randn(3, 2, 7, 4, dtype=torch.float64)  # [rank, micro-batch, rows, in]


def check_sum(ctx: ParallelContext, bucket_bytes: int) -> None:
    model, x = model_and_input()
    model(x.flatten(0, 2)).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    reducer = GradientReducer(list(model.parameters()), ctx.dp, bucket_bytes)
    for _ in range(2):  # the second step starts from cleared gradients
        reducer.start_step()
        for i in range(2):
            reducer.sync = i == 1
            model(x[ctx.rank, i]).square().sum().backward()
        reducer.finish()
        for p, want in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, want)


def test_nothing_is_reduced_before_the_last_micro_batch() -> None:
    run_on_ranks(check_calls, dp=2)


def check_calls(ctx: ParallelContext) -> None:
    model, x = model_and_input()
    reducer = GradientReducer(list(model.parameters()), ctx.dp, bucket_bytes=200)
    calls: list[int] = []
    original = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        calls.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted  # type: ignore[assignment]
    try:
        for _ in range(2):  # the second step counts the gradients of each bucket anew
            calls.clear()
            reducer.start_step()
            model(x[0, 0]).sum().backward()
            assert calls == []
            reducer.sync = True
            model(x[0, 1]).sum().backward()
            assert len(calls) == len(reducer.buckets) > 1  # all under way before finish() is called
            reducer.finish()
            assert len(calls) == len(reducer.buckets)
    finally:
        dist.all_reduce = original


def test_buckets_hold_the_last_layers_first() -> None:
    """Backward reaches them first, so the first bucket is under way while the others fill."""
    model, _ = model_and_input()
    reducer = GradientReducer(list(model.parameters()), Axis("dp", 0, 2), bucket_bytes=1)
    assert [bucket.parameters[0] for bucket in reducer.buckets] == list(model.parameters())[::-1]


def test_a_parameter_without_gradient_is_still_reduced() -> None:
    """One rank may not use a parameter (a padding batch): its bucket is summed at the end."""
    run_on_ranks(check_unused, dp=2)


def check_unused(ctx: ParallelContext) -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    reducer = GradientReducer([used, unused], ctx.dp)
    reducer.start_step()
    reducer.sync = True
    ((used if ctx.rank == 0 else unused) * 2).sum().backward()
    reducer.finish()
    assert used.grad.tolist() == unused.grad.tolist() == [2.0, 2.0]
