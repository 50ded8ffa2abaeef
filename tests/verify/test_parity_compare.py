"""Every layout equals one process: a matrix of layouts that combines every two features."""

import math
from dataclasses import replace
from itertools import chain
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from mlm.data.sampler import RankSampler, SyntheticDataset
from mlm.parallel.mesh import ParallelContext
from mlm.training.observer import StepOutcome
from mlm.training.trainer import Trainer
from mlm.verify.parity import Report, compare, compare_trainers, judge, one_process
from tests.ranks import run_on_ranks
from tests.slow import slow_but, thinned
from tests.verify.parity_layouts import (
    BERT_LAYOUTS,
    LAYOUTS,
    LLAMA_LAYOUTS,
    LONG_LAYOUTS,
    MOE_LAYOUTS,
    Layout,
    compatible_pairs,
    is_compatible,
    pairs,
    verdict_of,
)

FAMILIES = [*LAYOUTS, *BERT_LAYOUTS, *LLAMA_LAYOUTS]
QUICK = {0, 8, 16, 24, 26, len(LAYOUTS) + 4, len(FAMILIES) - 4, len(FAMILIES) - 2}
"""Layouts of each family that `make test` compares; `make test-slow` compares the others."""
TRUE_UPDATE = Trainer.clip_and_update


@pytest.mark.parametrize("layout", slow_but(QUICK, FAMILIES), ids=str)
def test_layout_equals_one_process(layout: Layout) -> None:
    """Losses, gradients and weights of two steps; dropout, clipping and weight decay included."""
    (first, report), *others = run_on_ranks(verdict_of, layout, **layout.sizes)
    assert first.equal, f"{first.sentence}; {first.hint}"
    assert [verdict for verdict, _ in others] == [first] * len(others)
    assert len(report.lrs) == 2


@pytest.mark.parametrize("layout", slow_but({2, 12}, MOE_LAYOUTS), ids=str)
def test_experts_over_ranks_equal_one_process(layout: Layout) -> None:
    """Five steps: losses, gradients, weights and what balances the routers; in float64 to 1e-10."""
    verdict, report = run_on_ranks(verdict_of, layout, steps=5, **layout.sizes)[0]
    assert verdict.equal, f"{verdict.sentence}; {verdict.hint}"
    if layout.precision == "fp64":
        assert len(report.of("loss")) == 5
        for each in report.differences:  # of weights, those that loads of experts move
            if each.kind != "weight" or each.name.endswith((".router.bias", ".router.load")):
                assert each.difference < 1e-10 * (each.norm if each.kind == "norm" else 1.0)


@pytest.mark.parametrize("layout", thinned(LONG_LAYOUTS, 5), ids=str)
def test_long_sequences_over_ranks_equal_one_process(layout: Layout) -> None:
    """The loss and every gradient of a step in float64, to 1e-10 of the largest."""
    verdict, report = run_on_ranks(verdict_of, layout, steps=1, **layout.sizes)[0]
    assert verdict.equal, f"{verdict.sentence}; {verdict.hint}"
    assert report.of("loss", 1)[0].difference < 1e-10
    assert max(gradient.relative for gradient in report.of("gradient", 1)) < 1e-10


@pytest.mark.slow
def test_every_two_compatible_features_meet_in_a_layout() -> None:
    """In float64, whose runs agree to 1e-10."""
    exact = [layout for layout in LAYOUTS if layout.precision == "fp64"]
    assert all(is_compatible(layout.axes) for layout in exact)
    assert compatible_pairs() - set(chain.from_iterable(pairs(layout.axes) for layout in exact)) == set()


def test_llamas_split_sequences_together_with_every_other_axis() -> None:
    """In float64: tp, sequence parallelism, pp, dp, and what is sharded over them."""
    split = [x for x in (*LLAMA_LAYOUTS, *LONG_LAYOUTS) if x.llama and x.cp > 1 and x.precision == "fp64"]
    sizes = [{**layout.sizes, "sequence_parallel": 1 + layout.sequence_parallel} for layout in split]
    met = {axis for each in sizes for axis, size in each.items() if size > 1}
    assert met == {"tp", "sequence_parallel", "cp", "pp", "dp"}
    assert {layout.zero for layout in split} == {0, 2, 3}


@pytest.mark.parametrize(
    "layout",
    slow_but(
        {0},
        [
            Layout(tp=2, sequence_parallel=True, dropout=0.2, documents=True),
            Layout(pp=2, pipeline="zb_h1", dropout=0.2, precision="bf16"),
            Layout(dp=2, zero=3, dropout=0.2),
        ],
    ),
    ids=str,
)
def test_recomputing_changes_no_bit_of_a_gradient(layout: Layout) -> None:
    for none, selective, full in run_on_ranks(gradients_of_each_recompute, layout, **layout.sizes):
        for expected, *recomputed in zip(none, selective, full, strict=True):
            assert all(torch.equal(gradient, expected) for gradient in recomputed)


def gradients_of_each_recompute(ctx: ParallelContext, layout: Layout) -> list[list[Tensor]]:
    return [first_gradients(ctx, replace(layout, recompute=how)) for how in ("none", "selective", "full")]


def first_gradients(ctx: ParallelContext, layout: Layout) -> list[Tensor]:
    config = layout.config()
    batch, micro_batch = config.train.global_batch_size, config.train.micro_batch_size
    samples = SyntheticDataset(config.model.vocab_size, config.data.seq_length, batch, config.seed)
    batches = RankSampler(samples, 0, batch, micro_batch, ctx.dp.rank, ctx.dp.size, False).step(0)
    assert batches is not None
    trainer = Trainer(config, ctx)
    trainer.compute_gradients(batches)
    gradients = [shard.parameter.grad for shard in trainer.shards]
    assert all(gradient is not None for gradient in gradients)
    return [gradient.clone() for gradient in gradients if gradient is not None]


@pytest.mark.parametrize(
    "layout, name",
    [(Layout(pp=2), "token.weight"), (Layout(tp=2, dp=2, zero=2), "position.weight")],
    ids=str,
)
def test_a_copy_that_differs_in_one_bit_is_found(layout: Layout, name: str) -> None:
    whole, torn = run_on_ranks(tear, layout, name, **layout.sizes)[0]
    assert (whole.torn, torn.torn) == ((), (name,))
    assert judge(torn).word == "DIFFERENT"


def tear(ctx: ParallelContext, layout: Layout, name: str) -> list[Report | None]:
    """The comparison, and that of a run whose last rank ends a step with another bit."""
    config = layout.config(steps=1)

    def flip(trainer: Trainer) -> None:
        if trainer.ctx.rank == trainer.ctx.world_size - 1 and trainer.ctx.world_size > 1:
            (shard,) = (s for s in trainer.shards if s.name == name)
            shard.parameter.detach().view(torch.int64).view(-1)[0] ^= 1

    def tearing(trainer: Trainer, parts: Tensor) -> StepOutcome:
        outcome = TRUE_UPDATE(trainer, parts)
        flip(trainer)
        return outcome

    whole = compare(config, ctx)
    with patch.object(Trainer, "clip_and_update", tearing):
        return [whole, compare(config, ctx)]


def test_what_no_rank_holds_is_no_equality() -> None:
    """A part of a layer that one rank forgot: comparing what is held would not miss it."""
    report = run_on_ranks(forget, Layout(tp=2), "rank 1", tp=2)[0]
    found = {weight.name: weight.difference for weight in report.of("weight", 1)}
    assert {name for name, off in found.items() if off == math.inf} == {"layers.1.mlp.up.weight"}
    assert judge(report).word == "DIFFERENT"
    report = run_on_ranks(forget, Layout(tp=2), "all", tp=2)[0]
    assert report.finding.where.startswith("layers.1.mlp.up.weight (reduced gradient, step 1")
    assert report.finding.cause == "lost"


def forget(ctx: ParallelContext, layout: Layout, who: str) -> Report | None:
    config = layout.config(steps=1)
    trainer, alone = Trainer(config, ctx), one_process(config, ctx) if ctx.is_main else None
    if who == "all" or ctx.rank == 1:
        trainer.shards = tuple(s for s in trainer.shards if s.name != "layers.1.mlp.up.weight")
    return compare_trainers(trainer, alone, 1)


def test_rounding_that_adam_amplifies_is_compared_by_gradient() -> None:
    """At eps=1e-30 the biases of keys, whose gradient is zero but for rounding, move by whole steps."""
    verdict, without = map(judge, run_on_ranks(compare_with_tiny_eps, Layout(pp=2), pp=2)[0])
    assert verdict.equal, verdict.sentence
    assert "attention.qkv.bias (updated weight" in without.sentence


def compare_with_tiny_eps(ctx: ParallelContext, layout: Layout) -> list[Report | None]:
    """The comparison, and one that takes no gradient for rounding."""
    config = layout.config()
    config = replace(config, optimizer=replace(config.optimizer, eps=1e-30))
    report = compare(config, ctx)
    with patch("mlm.verify.audit.compare.ROUNDING", 0.0):
        return [report, compare(config, ctx)]


def test_a_wrong_update_of_a_weight_is_found_at_any_eps() -> None:
    """A weight that the optimizer forgets on one rank differs though its gradient does not."""
    report = run_on_ranks(forget_to_update, Layout(tp=2), tp=2)[0]
    wrong = {weight.name for weight in report.of("weight", 1) if weight.difference > 1e-5 * 1e-3}
    assert wrong == {"layers.1.mlp.up.weight"}
    assert judge(report).word == "DIFFERENT"
    assert report.finding.place == "layers.1.mlp.up.weight"


def forget_to_update(ctx: ParallelContext, layout: Layout) -> Report | None:
    config = layout.config(steps=1)

    def without_one(trainer: Trainer, parts: Tensor) -> StepOutcome:
        held = [s.parameter for s in trainer.shards if s.name == "layers.1.mlp.up.weight"]
        before = [p.detach().clone() for p in held]
        outcome = TRUE_UPDATE(trainer, parts)
        if trainer.ctx.tp.size == 2 and ctx.rank == 1:
            for p, value in zip(held, before, strict=True):
                p.data.copy_(value)
        return outcome

    with patch.object(Trainer, "clip_and_update", without_one):
        return compare(replace(config, optimizer=replace(config.optimizer, eps=1e-30)), ctx)
