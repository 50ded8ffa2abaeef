"""Sums of gradients over micro-batches and replicas: in which kernel, and when they are under way."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlm.data.sampler import Batch
from mlm.parallel import gradients, linear
from mlm.parallel.compute_state import ComputeState
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import PretrainConfig
from mlm.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.slow import thinned
from tests.training.test_trainer import SEQ, VOCAB, config

MICRO_BATCHES = 4
SPEC = config(global_batch_size=2 * MICRO_BATCHES, micro_batch_size=2)


def batches(rank: int, ranks: int) -> list[Batch]:
    """This replica's micro-batches of a step, the same samples at any number of replicas."""
    rows = torch.randint(0, VOCAB, (2 * MICRO_BATCHES, SEQ + 1), generator=torch.Generator().manual_seed(0))
    mine = rows.chunk(MICRO_BATCHES)[rank::ranks]
    return [Batch(x[:, :-1].contiguous(), x[:, 1:].contiguous(), 0) for x in mine]


def gradients_of(ctx: ParallelContext, spec: PretrainConfig) -> tuple[dict[str, Tensor], list[str]]:
    """Gradients after the second of two equal passes, and the sums that products joined by layer."""
    trainer: Trainer[Batch] = Trainer(spec, ctx)
    seen: list[str] = []
    original = linear.add_weight_gradient

    def counted(total: Tensor, dy: Tensor, x: Tensor) -> None:
        seen.append(str(tuple(total.shape)))
        original(total, dy, x)

    linear.add_weight_gradient = counted  # type: ignore[assignment]
    try:
        for _ in range(2):
            trainer.compute_gradients(batches(ctx.dp.rank, ctx.dp.size))
    finally:
        linear.add_weight_gradient = original
    layers = [layer for gradients in trainer.gradients for layer in gradients.fused_layers]
    assert all(layer.compute.fused_grad is None for layer in layers)
    return {s.name: s.parameter.grad.clone() for s in trainer.shards if s.parameter.grad is not None}, seen


LAYOUTS: dict[str, tuple[dict[str, int], ParallelConfig, tuple[int, ...]]] = {
    # sizes, layout, and for each rank how many of its micro-batches join a sum: the first of a step finds
    # none where gradients begin as None, nor the second where its forward pass comes before that gradient
    "one rank": ({}, ParallelConfig(), (3,)),
    "dp=2": ({"dp": 2}, ParallelConfig(dp=2), (2, 2)),
    "tp=2, rows split": ({"tp": 2}, ParallelConfig(tp=2, sequence_parallel=True), (3, 3)),
    "pp=2": ({"pp": 2}, ParallelConfig(pp=2), (2, 3)),
    "zero bubble": ({"pp": 2}, ParallelConfig(pp=2, pipeline="zb_h1"), (1, 1)),
    # here the last one's wait for a reduction, which autograd announces
    "zero bubble, dp=2": ({"dp": 2}, ParallelConfig(dp=2, pipeline="zb_h1"), (1, 1)),
}


@pytest.mark.parametrize("name", thinned(LAYOUTS, 2))
def test_sums_inside_products_are_those_after_them(name: str) -> None:
    """In float64 they differ by the order of sums alone."""
    sizes, layout, joined = LAYOUTS[name]
    spec = replace(SPEC, parallel=layout)
    after = run_on_ranks(gradients_of, spec, **sizes)
    inside = run_on_ranks(gradients_of, replace(spec, fuse_accumulation=True), **sizes)
    for (expected, none), (found, seen), number in zip(after, inside, joined, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        layers = 4 * spec.model.num_layers // layout.pp
        assert (len(none), len(seen)) == (0, 2 * number * layers)


def test_sums_inside_products_of_half_precision_stay_float32() -> None:
    """On a CPU, which has no such product, bit for bit what autograd adds."""
    spec = replace(config(dtype="bf16"), train=SPEC.train)
    (after, _), (inside, seen) = (
        gradients_of(ParallelContext(), replace(spec, fuse_accumulation=on)) for on in (False, True)
    )
    assert seen
    assert {grad.dtype for grad in inside.values()} == {torch.float32}
    assert all(torch.equal(inside[name], grad) for name, grad in after.items())


@pytest.mark.slow
def test_a_compiled_layer_adds_where_the_sum_is() -> None:
    """As a compiler traces it, whose own operators would write a new sum."""
    layers = [linear.linear, torch.compile(linear.linear, backend="aot_eager", fullgraph=True)]
    results = []
    for apply in layers:
        torch.manual_seed(0)
        x, weight = torch.randn(6, 4), torch.randn(8, 4, requires_grad=True)
        total = torch.randn(8, 4)
        apply(x, weight, compute=ComputeState(fused_grad=total)).square().sum().backward()
        assert weight.grad is None
        results.append(total)
    torch.testing.assert_close(*results)


def test_reductions_begin_before_the_last_weight_gradient_that_was_put_off() -> None:
    """zb_h1: most buckets of weights do, and none in earlier micro-batches."""
    for events, sums, expected in run_on_ranks(order_of_events, dp=2):
        weights = [i for i, event in enumerate(events) if event == "weight"]
        reduced = [i for i, event in enumerate(events) if event == "reduce"]
        *_, before, first = weights[: 1 - 4 * SPEC.model.num_layers]  # the first of the last micro-batch
        assert before < reduced[0]
        assert sum(first < i < weights[-1] for i in reduced) > 2  # those of biases began in the pass before
        torch.testing.assert_close(sums, expected, rtol=0, atol=1e-12)


def order_of_events(ctx: ParallelContext) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """Weight gradients and reductions as they begin; the sums, and those of 1f1b."""
    events: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            events.append(name)
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "weight_gradient", noted("weight", linear.weight_gradient))
        patch.setattr(gradients, "start_all_reduce", noted("reduce", gradients.start_all_reduce))
        patch.setattr(gradients, "BUCKET_BYTES", 1000)
        patch.setattr(gradients, "BUCKET_BYTES_PER_RANK", 0)
        sums, _ = gradients_of(ctx, replace(SPEC, parallel=ParallelConfig(dp=2, pipeline="zb_h1")))
        second = events[len(events) // 2 :]  # two equal steps
        expected, _ = gradients_of(ctx, replace(SPEC, parallel=ParallelConfig(dp=2)))
    return second, sums, expected
