"""Sums of exact=8 in themselves: over ranks, micro-batches, parts of a sequence, rows of experts."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mlm.models import exact as exact_models
from mlm.models.llama.gated import gate
from mlm.parallel import exact
from mlm.parallel.compute_state import ComputeState, DeferredWeightGrads
from mlm.parallel.context import context_attention, local_parts, local_positions
from mlm.parallel.exact_gradients import leaf_order
from mlm.parallel.expert.experts import Experts
from mlm.parallel.matmul import GroupedRows
from mlm.parallel.mesh import CPU, Axis, ExpertAxes, ParallelContext
from mlm.parallel.sharding import shard_of
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError
from tests.ranks import run_on_ranks
from tests.training.exact_runs import spec_of


def nested(terms: Sequence[Tensor]) -> Tensor:
    """((a + b) + (c + d)) + …, by its definition."""
    half = len(terms) // 2
    return terms[0].clone() if len(terms) == 1 else nested(terms[:half]) + nested(terms[half:])


def check_sums(ctx: ParallelContext) -> None:
    tp = replace(ctx.tp, exact_parts=8)
    generator = torch.Generator().manual_seed(0)
    terms = torch.randn(8, 16, 3, generator=generator).unbind()
    own = terms[tp.rank * 8 // tp.size : (tp.rank + 1) * 8 // tp.size]
    expected = nested(terms)
    subtree = exact.tree_sum([x.clone() for x in own])
    assert torch.equal(exact.sum_over_ranks(subtree.clone(), tp), expected)
    assert torch.equal(exact.scatter_over_ranks(subtree, tp), expected.chunk(tp.size)[tp.rank])
    assert exact.sum_over_ranks(torch.empty(0, 3), tp).shape == (0, 3)  # of an expert without rows
    rows = torch.randn(16, 2, 5, generator=generator)
    total = nested(rows.flatten(0, 1).unbind())
    region = exact.ExactRegion(tp, sequence_parallel=True, is_split=False)
    assert torch.equal(region.sum_rows(rows.chunk(tp.size)[tp.rank], torch.float32), total)
    assert torch.equal(exact.ExactRegion(tp, False).sum_rows(rows, torch.float32), total)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_sums_over_ranks_are_the_nested_sum(tp: int) -> None:
    run_on_ranks(check_sums, tp=tp)


def check_products(ctx: ParallelContext, dtype: torch.dtype, cp_parts: int) -> None:
    """A layer split by column and one split by row, outputs and gradients, against those of one rank."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(32, 2, 64, generator=generator).to(dtype) for _ in range(2))
    up, bias, down = (torch.randn(*size, generator=generator) for size in ((128, 64), (128,), (64, 128)))

    def run(tp: Axis) -> list[Any]:
        own = [shard_of(p, tp, dim).requires_grad_() for p, dim in ((up, 0), (bias, 0), (down, 1))]
        own_x = x.clone().requires_grad_()
        region = exact.ExactRegion(tp, False, Axis("cp", exact_parts=cp_parts))
        parts = exact.Products.apply(own[0], own[1], region, False, own_x)
        y = exact.Products.apply(own[2], None, region, True, *map(torch.relu, parts))
        y.backward(dy)
        return [y.detach(), own_x.grad, *(p.grad for p in own)]

    tp = replace(ctx.tp, exact_parts=8)
    y, dx, *gradients = run(Axis("tp", exact_parts=8))
    slices = [shard_of(g, tp, dim) for g, dim in zip(gradients, (0, 0, 1), strict=True)]
    for own, expected in zip(run(tp), (y, dx, *slices), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("cp_parts", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_have_the_same_bits_at_tp_2(dtype: torch.dtype, cp_parts: int) -> None:
    run_on_ranks(check_products, dtype, cp_parts, tp=2)


def test_deferred_weight_gradients_record_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    deferred, needs_grad, compute = (
        DeferredWeightGrads(open=True),
        list[bool](),
        exact.ExactRegion.weight_gradient,
    )

    def noted(*args: Any) -> Tensor:
        dw = compute(*args)
        needs_grad.append(dw.requires_grad)
        return dw

    monkeypatch.setattr(exact.ExactRegion, "weight_gradient", noted)
    weight = torch.randn(8, 4, requires_grad=True)
    x = torch.randn(4, 2, 4, requires_grad=True)
    region = exact.ExactRegion(Axis("tp"), False, compute=ComputeState(deferred=deferred))
    (y,) = exact.Products.apply(weight, None, region, False, x)
    y.sum().backward()
    (job,) = deferred.take()
    job()
    assert needs_grad == [False]
    torch.testing.assert_close(weight.grad, x.detach().sum((0, 1)).expand(8, 4))


@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_micro_batches_are_summed_as_a_nested_sum(dp: int) -> None:
    """16 micro-batches in leaves of two, j and j + 8: ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7))."""
    x = torch.randn(16, generator=torch.Generator().manual_seed(1)).unbind()
    order, leaf = leaf_order(16 // dp, Axis("dp", size=dp, exact_parts=8))
    ranks = [exact.tree_sum([x[i * dp + rank].clone() for i in order], leaf) for rank in range(dp)]
    while len(ranks) > 1:  # the levels of `sum_over_ranks` from the farthest on
        half = len(ranks) // 2
        ranks = [a + b for a, b in zip(ranks[:half], ranks[half:], strict=True)]
    assert torch.equal(ranks[0], nested([x[j] + x[j + 8] for j in (0, 4, 2, 6, 1, 5, 3, 7)]))


def test_module_without_an_order_is_rejected() -> None:
    spec = spec_of("llama fp32")
    model = replace(spec.model, options={"num_kv_heads": 8, "qk_norm": True, "qk_norm_whole": True})
    with pytest.raises(UserError, match="query_norm is a AllHeadsNorm"):
        Trainer(replace(spec, model=model), ParallelContext())


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_rank_holds_the_tokens_of_as_many_ranks_as_it_stands_for(cp: int) -> None:
    """Of 32 tokens in 8 pieces parts 0 to 3 have pieces 0 and 7, 1 and 6, 2 and 5, 3 and 4."""
    parts = [[0, 7], [1, 6], [2, 5], [3, 4]]
    for rank in range(cp):
        axis = Axis("cp", rank, cp, exact_parts=4)
        pieces = [piece for part in local_parts(axis) for piece in parts[part]]
        expected = [4 * piece + i for piece in pieces for i in range(4)]
        assert local_positions(32, axis, CPU).tolist() == expected


def test_attention_of_parts_is_that_of_the_sequence() -> None:
    """Outputs and gradients of 4 parts on one rank against PyTorch's attention, float64."""
    axis = Axis("cp", exact_parts=4)
    order = local_positions(64, axis, CPU)
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(2, 3, 64, 8, dtype=torch.float64, generator=generator) for _ in range(4)]
    q, k, v = (t.clone().requires_grad_() for t in x[:3])
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    y.backward(x[3])
    own = [t[:, :, order].clone().requires_grad_() for t in x[:3]]
    own_y = context_attention(own[0], own[1], own[2], axis)
    own_y.backward(x[3][:, :, order])
    torch.testing.assert_close(own_y, y[:, :, order])
    for part, full in zip(own, (q, k, v), strict=True):
        assert full.grad is not None
        torch.testing.assert_close(part.grad, full.grad[:, :, order])


def check_leave(ctx: ParallelContext) -> None:
    x = torch.arange(8.0).view(4, 2).requires_grad_()
    y = exact_models._leave(cast(Any, None), exact.ExactRegion(ctx.tp, True), x, ctx.tp)
    own = slice(2 * ctx.tp.rank, 2 * ctx.tp.rank + 2)
    assert torch.equal(y, x[own])
    dy = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    y.backward(dy[own])
    assert torch.equal(x.grad, dy)


def test_rows_kept_of_what_all_ranks_compute_have_the_gradients_of_all() -> None:
    run_on_ranks(check_leave, tp=2)


def test_experts_give_each_source_of_rows_its_gradients() -> None:
    """float64, three experts: outputs and gradients of two sources against those of each on its own."""
    generator = torch.Generator().manual_seed(0)
    experts = Experts(3, 4, 5, inner=partial(gate, activation="silu"), axes=ExpertAxes(), init_stds=(1, 1))
    for p in experts.double().parameters():
        torch.nn.init.normal_(p, generator=generator)
    received: dict[str, dict[int, Tensor]] = {"up": {}, "down": {}}
    experts.add_gradients = {name: of_source.__setitem__ for name, of_source in received.items()}
    runs = GroupedRows([3, 4, 3])
    runs.sources = [[2, 0, 3], [1, 4, 0]]
    source_of = torch.tensor([0, 0, 1, 1, 1, 1, 1, 0, 0, 0])
    x, dy = (torch.randn(10, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    y = exact_models._experts(experts, exact.ExactRegion(Axis("tp"), False), x.requires_grad_(), runs)
    y.backward(dy)
    for source, counts in enumerate(runs.sources):
        rows = source_of == source
        own_x = x.detach()[rows].requires_grad_()
        expected = experts(own_x, GroupedRows(counts))
        gradients = torch.autograd.grad(expected, (own_x, experts.up, experts.down), dy[rows])
        own = x.grad[rows], received["up"][source], received["down"][source]
        torch.testing.assert_close((y[rows], *own), (expected, *gradients))
