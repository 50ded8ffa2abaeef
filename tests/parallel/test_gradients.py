"""Bucketed data-parallel reduction: the sum over ranks, once per step, while backward runs."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlm.parallel.gradients import GradientReducer, build_reducer
from mlm.parallel.mesh import Axis, ParallelContext
from tests.operators import Operators
from tests.ranks import on_ranks


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
@on_ranks(dp=3)
def test_gradients_are_the_sum_over_ranks_and_micro_batches(ctx: ParallelContext, bucket_bytes: int) -> None:
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


def model_and_input() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, torch.randn(3, 2, 7, 4, dtype=torch.float64)  # [rank, micro-batch, rows, in]


@on_ranks(dp=2)
def test_nothing_is_reduced_before_the_last_micro_batch(ctx: ParallelContext) -> None:
    model, x = model_and_input()
    dp = replace(ctx.dp, swaps=False)
    reducer = GradientReducer(list(model.parameters()), dp, bucket_bytes=200)
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


@on_ranks(dp=2)
def test_a_parameter_without_gradient_is_still_reduced(ctx: ParallelContext) -> None:
    """One rank may not use a parameter (a padding batch): its bucket is summed at the end."""
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    reducer = GradientReducer([used, unused], ctx.dp)
    reducer.start_step()
    reducer.sync = True
    ((used if ctx.rank == 0 else unused) * 2).sum().backward()
    reducer.finish()
    assert used.grad.tolist() == unused.grad.tolist() == [2.0, 2.0]


class _Withheld(torch.autograd.Function):
    """x times w, whose gradient is kept back as one that is put off; the hook of w runs all the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy * ctx.saved_tensors[0], None


@on_ranks(dp=2)
def test_a_step_leaves_nothing_of_the_step_before(ctx: ParallelContext) -> None:
    """Gradients that come in all micro-batches, in the second only, not at all, or are kept back."""
    always, late, never, withheld = (nn.Parameter(torch.full((2,), float(i))) for i in range(1, 5))
    reducer = GradientReducer([always, late, never, withheld], ctx.dp)
    for step in range(2):
        reducer.start_step()
        for i in range(2):
            reducer.sync = i == 1
            y = always * 2
            if step == 0:
                y = (y + late + never) * withheld
            else:
                y = _Withheld.apply(y, withheld) + (late * 3 if i == 1 else 0)
            y.sum().backward()
        reducer.finish()
    # two ranks: 2 micro-batches of 2 times withheld (4); 3 in one of them
    found = [p.grad.tolist() for p in (always, late, never, withheld)]
    assert found == [[32.0, 32.0], [6.0, 6.0], [0.0, 0.0], [0.0, 0.0]]


@on_ranks(dp=2)
def test_a_bucket_under_way_in_backward_has_no_remains(ctx: ParallelContext) -> None:
    """It is complete when the hook of its last parameter runs, with a gradient or without."""
    x, w = nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((2,), 5.0))
    reducer = GradientReducer([x, w], ctx.dp)
    for times in (torch.mul, _Withheld.apply):
        reducer.start_step()
        reducer.sync = True
        times(x, w).sum().backward()
        assert reducer.buckets[0].work is not None  # before finish
        reducer.finish()
    assert (x.grad.tolist(), w.grad.tolist()) == ([10.0, 10.0], [0.0, 0.0])


def test_the_first_gradient_of_a_step_is_written_and_others_are_added() -> None:
    """Once to its place: no zeros before it and no copy of its own between; bits are those of one process."""
    (model, x), (plain, _) = model_and_input(), model_and_input()
    reducer = GradientReducer(list(model.parameters()), Axis("dp"), keep_buffers=True)
    places = [view.data_ptr() for bucket in reducer.buckets for view in bucket.views]
    for _ in range(2):
        with Operators() as seen:
            reducer.start_step()
            for i in range(2):
                model(x[0, i]).square().sum().backward()
            reducer.finish()
        plain.zero_grad()
        for i in range(2):
            plain(x[0, i]).square().sum().backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        assert [p.grad.data_ptr() for p in list(model.parameters())[::-1]] == places
        counts = Counter(seen.names)
        assert (counts["aten.copy_.default"], counts["aten.add_.Tensor"]) == (4, 4)
        assert (
            counts["aten.zero_.default"] == counts["aten.fill_.Scalar"] == counts["aten.clone.default"] == 0
        )


def test_sums_that_products_join_begin_with_zeros_in_each_step() -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    reducer = GradientReducer([weight, other], Axis("dp"), keep_buffers=True, joined=[weight])
    for _ in range(2):
        reducer.start_step()
        assert other.grad is None
        weight.grad += 3  # as a product does, past autograd
        (weight * other).sum().backward()
        reducer.finish()
        assert (weight.grad.tolist(), other.grad.tolist()) == ([4.0, 4.0], [1.0, 1.0])


def test_gradients_of_graphs_are_added_to_zeros() -> None:
    """Graphs own what they return: autograd would copy it, and the hook of each parameter once more."""
    model, x = model_and_input()
    reducer = build_reducer(model, Axis("dp"), zero=0, compute_dtype=torch.float32, keep_buffers=True)
    with Operators() as seen:
        reducer.start_step()
        model(x[0, 0]).square().sum().backward()
        reducer.finish()
    counts = Counter(seen.names)
    assert counts["aten.copy_.default"] == counts["aten.clone.default"] == 0
    assert counts["aten.add_.Tensor"] == len(list(model.parameters()))


@on_ranks(dp=2)
def test_a_loop_may_clear_the_gradients_itself(ctx: ParallelContext) -> None:
    """By `optimizer.zero_grad()`, in place of `start_step`: each step's sums are of its own gradients."""
    x = nn.Parameter(torch.ones(3, dtype=torch.float64))
    reducer = GradientReducer([x], ctx.dp)
    for factor in (2.0, 5.0):
        x.grad = None
        reducer.sync = True
        (x.sum() * factor * (ctx.dp.rank + 1)).backward()
        reducer.finish()
        assert x.grad.tolist() == [3 * factor] * 3
