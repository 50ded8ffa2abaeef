"""Parameters cut over dp by FSDP2 against one process that keeps them whole, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from mlm.models.stage import PipelineStage
from mlm.optim.clip import gradient_norm
from mlm.parallel.collectives import all_reduce
from mlm.parallel.compute_state import DeferredWeightGrads
from mlm.parallel.config import ZeroReduce
from mlm.parallel.mesh import ParallelContext
from tests.parallel.sharded_rank import (
    EXACT,
    SCALE,
    Rank,
    all_samples,
    assert_gradients_equal,
    defer_weight_grads,
    samples_of,
)
from tests.ranks import on_ranks


@pytest.mark.parametrize(("tp", "dp", "zero", "recompute"), [(1, 4, 2, "none"), (2, 2, 3, "full")])
@on_ranks()
def test_steps_equal_those_of_one_process(
    ctx: ParallelContext, zero: int, recompute: str, tp: int, dp: int
) -> None:
    """Losses, gradients and their norm over three steps of three micro-batches."""
    one, mine = Rank(ParallelContext()), Rank(ctx, zero, recompute=recompute)
    for step in range(3):
        expected_loss = one.accumulate(all_samples(ctx, step))
        loss = mine.accumulate(list(samples_of(step, ctx.dp.rank)))
        total = all_reduce(torch.tensor(loss, dtype=torch.float64), ctx.dp)
        torch.testing.assert_close(total.item(), expected_loss, **EXACT)
        assert_gradients_equal(mine, one)
        norm = gradient_norm(mine.shards, ctx)
        torch.testing.assert_close(norm, gradient_norm(one.shards, one.ctx), **EXACT)
        one.optimizer.step()
        mine.optimizer.step()
        evaluated = mine.model.losses(*tokens_and_labels(ctx))  # gathers the new weights, not the old ones
        torch.testing.assert_close(evaluated, one.model.losses(*tokens_and_labels(ctx)), **EXACT)


def tokens_and_labels(ctx: ParallelContext) -> tuple[Tensor, Tensor]:
    sample = samples_of(0, ctx.dp.rank)[0]
    return sample[:, :-1], sample[:, 1:]


@on_ranks(dp=2)
def test_weights_loaded_after_an_evaluation_are_trained_from(ctx: ParallelContext) -> None:
    """Weights that an evaluation gathered are out of date once others are loaded."""
    one, mine = Rank(ParallelContext()), Rank(ctx, 2)
    mine.model.losses(*tokens_and_labels(ctx))
    with torch.no_grad():
        for rank in (one, mine):
            for s in rank.shards:
                s.parameter.mul_(0.5)
    one.accumulate(all_samples(ctx, 0))
    mine.accumulate(list(samples_of(0, ctx.dp.rank)))
    assert_gradients_equal(mine, one)


@pytest.mark.parametrize(
    ("zero", "late_weights", "reduce"),
    [(0, False, "last"), (2, False, "every"), (2, True, "last"), (3, True, "every")],
)
@on_ranks(dp=2)
def test_passes_of_a_pipeline_equal_one_process(
    ctx: ParallelContext, zero: int, late_weights: bool, reduce: ZeroReduce
) -> None:
    """Several forwards before the first backward, begun at a node of the graph; with `late_weights` the
    gradients of weights come when all backward passes are over: the last of these must not end the step."""
    one, mine = Rank(ParallelContext()), Rank(ctx, zero, reduce=reduce, late_weights=late_weights)
    deferred = defer_weight_grads(mine.model) if late_weights else DeferredWeightGrads()
    for step in range(2):
        one.accumulate(all_samples(ctx, step))
        mine.reducer.start_step()
        edges = [get_gradient_edge(mine.loss(x)) for x in samples_of(step, ctx.dp.rank)]
        for i, edge in enumerate(edges):
            mine.reducer.sync = i == len(edges) - 1
            torch.autograd.backward(edge, torch.ones_like(SCALE))
        jobs = deferred.take()
        assert bool(jobs) == late_weights
        for job in jobs:
            job()
            mine.reducer.settle()
        mine.reducer.finish()
        assert_gradients_equal(mine, one)
        one.optimizer.step()
        mine.optimizer.step()


@on_ranks(dp=2)
def test_chunks_of_a_pipeline_equal_one_process(ctx: ParallelContext) -> None:
    """The first, one of layers alone and the last: each is cut on its own, the middle one has no rest."""
    one = Rank(ParallelContext())
    stages = [
        PipelineStage(range(1), True, False),
        PipelineStage(range(1, 2), False, False),
        PipelineStage(range(2, 2), False, True),
    ]
    chunks = [Rank(ctx, 2, stage=stage) for stage in stages]
    one.accumulate(all_samples(ctx, 0))
    for chunk in chunks:
        chunk.reducer.start_step()
    samples = samples_of(0, ctx.dp.rank)
    passes = [forward_through(chunks, sample) for sample in samples]  # all forwards before any backward
    for i, kept in enumerate(passes):
        dy = torch.ones_like(SCALE)
        for chunk, (x, edge) in zip(chunks[::-1], kept[::-1], strict=True):
            chunk.reducer.sync = i == len(samples) - 1
            torch.autograd.backward(edge, dy)
            if x is not None:
                assert x.grad is not None
                dy = x.grad
    for chunk in chunks:
        chunk.reducer.finish()
    (embedding,) = (s.parameter.grad for s in chunks[0].shards if s.name == "token.weight")
    for s in chunks[-1].shards:
        if s.name == "token.weight":  # summed over the stages: the trainer's part
            embedding += s.parameter.grad
            s.parameter.grad = embedding
    for chunk in chunks:
        assert_gradients_equal(chunk, one)


def forward_through(chunks: list[Rank], sample: Tensor) -> list[tuple[Tensor | None, Any]]:
    """Each chunk's input and the place of its output in the graph."""
    kept: list[tuple[Tensor | None, Any]] = []
    x = None
    for chunk in chunks:
        y = chunk.model(sample[:, :-1], sample[:, 1:], SCALE, None, x)
        kept.append((x, get_gradient_edge(y)))
        x = y.detach().requires_grad_()
    return kept
