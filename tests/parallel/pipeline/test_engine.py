"""The engine on stages of one linear layer each, against running them one after the other."""

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from mlm.parallel.compute_state import ComputeState, DeferredWeightGrads
from mlm.parallel.linear import linear
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.pipeline.actions import SENDS_KEPT
from mlm.parallel.pipeline.engine import ChunkGradients, Stages, run_plan
from mlm.parallel.pipeline.lower import lower
from mlm.parallel.pipeline.schedules import build_schedule, forward_only
from tests.ranks import on_ranks

WIDTH = 5


@dataclass
class Sample:
    """A micro-batch of the test's own kind, of any length."""

    x: Tensor
    weight: float


class Part(nn.Module):
    """One stage: tanh of a linear layer; the last one ends in a weighted sum."""

    def __init__(self, number: int, is_last: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64))
        self.is_last, self.deferred = is_last, DeferredWeightGrads()

    def forward(self, sample: Sample, x: Tensor) -> Tensor:
        y = torch.tanh(linear(x, self.w, None, ComputeState(deferred=self.deferred)))
        return y.sum() * sample.weight if self.is_last else y


def samples(lengths: list[int]) -> list[Sample]:
    generator = torch.Generator().manual_seed(9)
    return [
        Sample(torch.randn(n, WIDTH, generator=generator, dtype=torch.float64), 1.0 + i)
        for i, n in enumerate(lengths)
    ]


def in_order(num_stages: int, batches: list[Sample]) -> tuple[list[Tensor], list[Tensor]]:
    """Results and weight gradients of one process without a pipeline."""
    parts = [Part(n, n == num_stages - 1) for n in range(num_stages)]
    results = []
    for sample in batches:
        x = sample.x
        for part in parts:
            x = part(sample, x)
        x.backward()
        results.append(x.detach())
    return results, [part.w.grad for part in parts if part.w.grad is not None]


class Noted:
    """A reducer that notes the last backward pass of its chunk."""

    sync_late = False

    def __init__(self, chunk: int, told: list[tuple[int, bool]]) -> None:
        self.chunk, self.told = chunk, told

    sync = property(None, lambda self, is_last: self.told.append((self.chunk, is_last)))

    def settle(self) -> None: ...


def stages_of(ctx: ParallelContext, v: int) -> tuple[Stages[Sample], list[Part], list[tuple[int, bool]]]:
    p = ctx.pp.size
    parts = [Part(c * p + ctx.pp.rank, c * p + ctx.pp.rank == p * v - 1) for c in range(v)]
    told: list[tuple[int, bool]] = []
    stages = Stages[Sample](
        pp=ctx.pp,
        num_stages=p * v,
        forward=lambda chunk, sample, x: parts[chunk](sample, sample.x if x is None else x),
        boundary_shape=lambda sample: tuple(sample.x.shape),
        dtype=torch.float64,
        device=ctx.device,
        gradients=[
            ChunkGradients(cast(Any, Noted(chunk, told)), deferred=part.deferred)
            for chunk, part in enumerate(parts)
        ],
    )
    return stages, parts, told


CASES = [
    ("1f1b", 1, 1, 3),
    ("1f1b", 4, 1, 2),  # fewer micro-batches than stages
    ("1f1b", 3, 2, 6),
    ("gpipe", 2, 1, 12),  # more sends than are kept
    ("zb_h1", 4, 1, 3),
]


@pytest.mark.parametrize(("name", "pp", "v", "m"), CASES)
@on_ranks()
def test_results_and_gradients_are_those_of_running_in_order(
    ctx: ParallelContext, name: str, v: int, m: int, pp: int
) -> None:
    """float64, two steps of different lengths with accumulation between them cleared."""
    assert name != "gpipe" or m > SENDS_KEPT
    stages, parts, told = stages_of(ctx, v)
    plan = lower(build_schedule(name, stages=ctx.pp.size, chunks=v, micro_batches=m))
    for lengths in ([3 + i % 2 for i in range(m)], [7] * m):
        batches = samples(lengths)
        results, grads = in_order(ctx.pp.size * v, batches)
        told.clear()
        for part in parts:
            part.w.grad = None
        mine = run_plan(stages, plan.instructions[ctx.pp.rank], batches)
        torch.testing.assert_close(mine, results if ctx.pp.rank == ctx.pp.size - 1 else [])
        for chunk, part in enumerate(parts):
            torch.testing.assert_close(part.w.grad, grads[chunk * ctx.pp.size + ctx.pp.rank])
            assert [last for c, last in told if c == chunk] == [False] * (m - 1) + [True]


@pytest.mark.parametrize(("pp", "v", "m"), [(3, 1, 1), (2, 2, 3)])
@on_ranks()
def test_a_forward_only_plan_gives_the_results_and_keeps_nothing(
    ctx: ParallelContext, v: int, m: int, pp: int
) -> None:
    stages, parts, told = stages_of(ctx, v)
    batches = samples([4] * m)
    forward = stages.forward

    def without_autograd(chunk: int, sample: Sample, x: Tensor | None) -> Tensor:
        assert not torch.is_grad_enabled()
        return forward(chunk, sample, x)

    stages = replace(stages, forward=without_autograd)
    plan = lower(forward_only(ctx.pp.size, v, m))
    mine = run_plan(stages, plan.instructions[ctx.pp.rank], batches)
    results, _ = in_order(ctx.pp.size * v, batches)
    torch.testing.assert_close(mine, results if ctx.pp.rank == ctx.pp.size - 1 else [])
    assert told == []
    assert all(part.w.grad is None for part in parts)
