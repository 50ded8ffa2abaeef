"""exact=8: one digest of weights and moments at every layout, on real ranks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mlm.models import exact as exact_models
from mlm.models.bert import model as bert
from mlm.models.bert.model import MaskedTargets, masked_targets
from mlm.optim import adamw, muon
from mlm.optim.config import MuonConfig
from mlm.parallel import context, exact, exact_gradients
from mlm.parallel.collectives import all_reduce
from mlm.parallel.exact_gradients import TreeReducer
from mlm.parallel.expert.experts import Experts
from mlm.parallel.matmul import GroupedRows
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.runs.config import PretrainConfig
from mlm.training import trainer as trainer_module
from tests.ranks import run_on_ranks
from tests.slow import slow, slow_but, thinned
from tests.training.exact_runs import (
    CASES,
    LONG_CASES,
    MIXTURE_CASES,
    OTHER_CASES,
    RUNS,
    Layout,
    Shards,
    digest,
    move,
    ranks_of,
    result,
    spec_of,
    train,
)
from tests.training.test_exact_sums import nested


@cache
def one_process(run: str, layers: int) -> tuple[str, list[float]]:
    return result(spec_of(run, layers=layers), 5)


@pytest.mark.parametrize(
    ("run", "layout"),
    [
        *(*thinned(CASES, 14), *thinned(MIXTURE_CASES, 24), *thinned(LONG_CASES, 24)),
        *map(slow, OTHER_CASES),
    ],
    ids=str,
)
def test_digest_is_that_of_one_process(run: str, layout: Layout) -> None:
    """Five steps: losses, weights and moments."""
    layers = 4 if layout.get("vp", 1) > 1 else 2
    assert result(spec_of(run, layers=layers), 5, layout) == one_process(run, layers)


def test_runs_differ_and_layouts_are_many() -> None:
    assert len({str(layout) for _, layout in CASES}) >= 20
    assert {run for run, _ in CASES} == set(RUNS)


@pytest.mark.parametrize(
    "run",
    slow_but(
        {0, 1, 5},
        [
            *("gpt2 fp64 muon pairs", "llama fp64 lora", "bert fp64 lora post", "roberta fp64"),
            *("gemma3 fp64", "deepseek fp64", "qwen2_moe fp64"),
            *("gpt2 fp64 long dropout", "gemma2 fp64 long", "gemma3 fp64 long"),
        ],
    ),
)
def test_exact_run_computes_what_the_usual_one_does(run: str) -> None:
    """float64: losses of three steps to 1e-12, the usual path being compared with one process elsewhere."""
    assert result(spec_of(run))[1] == pytest.approx(result(spec_of(run, parts=0))[1], rel=1e-12)


@pytest.mark.parametrize(
    ("run", "numbers", "layouts"),
    [
        ("gpt2 fp32", {"batch": 12}, [{"dp": 2}]),
        slow(("gpt2 fp32", {"batch": 12}, [{"dp": 4}])),
        slow(("llama fp32 long", {"length": 1024, "batch": 2}, [{"cp": 8}])),
    ],
    ids=str,
)
def test_leaves_of_three_and_eight_parts_have_one_order(
    run: str, numbers: dict[str, int], layouts: list[Layout]
) -> None:
    """12 micro-batches make leaves of three, of which ranks hold whole ones; 1,024 tokens eight parts."""
    spec = spec_of(run, **numbers)
    assert [result(spec, 2, layout) for layout in layouts] == [result(spec, 2)] * len(layouts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "layouts"),
    [
        ("bert bf16 muon", [layout for _, layout in CASES[:6]]),
        (
            "gemma3 bf16 long",
            [{"cp": 2}, {"tp": 2}, {"cp": 4}, {"cp": 2, "dp": 2, "zero": 3}, {}, {"cp": 2, "pp": 2}],
        ),
        (
            "mixtral fp32 long",
            [
                {"cp": 2, "ep": 2},
                {"tp": 2, "ep": 2, "expert_tp": 1, "sequence_parallel": True},
                {"cp": 2, "dp": 2, "ep": 4},
                {"dp": 4, "ep": 2, "zero": 3},
                {},
                {"cp": 2, "pp": 2, "ep": 2},
            ],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_run_moved_through_six_layouts_ends_with_the_digest_of_one_that_stayed(
    run: str, layouts: list[Layout], tmp_path: Path
) -> None:
    layers, path, ranks = 4 if run in RUNS else 2, None, list[Any]()
    for number, layout in enumerate(layouts):
        spec = spec_of(run, layers=layers, **layout)
        ranks = run_on_ranks(move, spec, path, tmp_path / str(number), **ranks_of(layout))
        path = ranks[0][0]
    assert digest([shards for _, shards in ranks]) == result(spec_of(run, layers=layers), 6)[0]


def chain(terms: Iterable[Tensor], leaf: int = 1) -> Tensor:
    first, *others = terms
    for term in others:
        first.add_(term)
    return first


def ring(x: Tensor, axis: Axis, *, nearest_first: bool = True) -> Tensor:
    return all_reduce(x, axis)


def other_order(x: Tensor, axis: Axis, *, nearest_first: bool = True) -> Tensor:
    return exact.sum_over_ranks(x, axis, nearest_first=not nearest_first)


def add_blocks_by_ring(region: exact.ExactRegion, terms: Iterable[Tensor]) -> Tensor:
    total = exact.tree_sum(terms)
    return all_reduce(total, region.tp) if region.sequence_parallel and not region.is_split else total


def targets_by_rank(labels: Tensor, is_swapped: Tensor, *, parts: int, local_parts: range) -> MaskedTargets:
    """Masked tokens padded to those of a rank of two."""
    rank = local_parts.start * 2 // parts
    return masked_targets(labels, is_swapped, parts=2, local_parts=range(rank, rank + 1))


def orthogonalise_transposed(x: Tensor, config: MuonConfig) -> Tensor:
    return muon.orthogonalise(x.mT.contiguous(), config).mT.contiguous()


def gradient_of_all_rows(region: exact.ExactRegion, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    # begun at another row: MKL may add blocks of as many rows as a part has
    dy, x = (rows.flatten(0, -2).roll(1, 0) for rows in (dy, x))
    return exact.weight_gradient_of_rows(dy, x, weight.dtype)


def take_late(reducer: TreeReducer, p: Tensor) -> None:
    if p.grad is not None:
        reducer._add(p, 0, p.grad)
        p.grad = None


def finish_late(reducer: TreeReducer, finish: Callable[[TreeReducer], None] = TreeReducer.finish) -> None:
    for p, trees in reducer.trees.items():
        if 0 in trees and reducer.axes[p].name == "dp":
            trees[0].sums = [exact.sum_over_ranks(trees[0].take(), reducer.cp)]
    finish(reducer)


def experts_of_one_rank(experts: Experts, region: exact.ExactRegion, x: Tensor, runs: GroupedRows) -> Any:
    return exact_models._experts(experts, replace(region, cp=Axis("cp")), x, runs)


def sum_tokens_of_heads(region: exact.ExactRegion, x: Tensor, dtype: torch.dtype) -> Tensor:
    parts = [region.sum_rows(part, dtype) for part in x.chunk(region.terms, 2)]
    return exact.sum_over_ranks(exact.tree_sum(parts), region.tp)


def experts_of_one_source(
    experts: Experts, region: exact.ExactRegion, x: Tensor, runs: GroupedRows
) -> Tensor:
    return exact_models._experts(experts, region, x, GroupedRows(runs.counts))


def sum_nearest_first(terms: Sequence[Tensor]) -> Tensor:
    return nested(exact.farthest_first(terms))


def sum_any_heads(region: exact.ExactRegion, x: Tensor, dtype: torch.dtype) -> Tensor:
    return exact.sum_over_ranks(exact.ExactRegion(region.tp, False).sum_rows(x, dtype), region.tp)


LATE = (
    (TreeReducer, "_take_gradient", take_late),
    (TreeReducer, "finish", finish_late),
)
SABOTAGES: dict[str, tuple[tuple[Any, Any, Any], ...]] = {
    "chain": ((exact, "tree_sum", chain),),
    "ring": ((exact, "sum_over_ranks", ring),),
    "levels of dp": ((exact_gradients, "sum_over_ranks", other_order),),
    "order of micro-batches": ((trainer_module, "leaf_order", lambda count, dp: (list(range(count)), 1)),),
    "rows in one part": ((exact.ExactRegion, "blocks", lambda region, x: (x,)),),
    "ring of rows": ((exact.ExactRegion, "add_blocks", add_blocks_by_ring),),
    "masked tokens by rank": ((bert, "masked_targets", targets_by_rank),),
    "transposed matrices": ((adamw, "orthogonalise", orthogonalise_transposed),),
    "one source": ((exact_models.FORMS, Experts, {"forward": experts_of_one_source}),),
    "levels of sources": ((exact_gradients, "tree_sum", sum_nearest_first),),
    "heads of all rows": ((exact.ExactRegion, "sum_heads", sum_any_heads),),
    "tokens before heads": ((exact.ExactRegion, "sum_heads", sum_tokens_of_heads),),
    "keys": ((context, "tree_sum", chain),),
    "ring of gradients": ((exact_gradients, "sum_over_ranks", ring),),
    "products of a rank's tokens": ((exact_models.FORMS, Experts, {"forward": experts_of_one_rank}),),
    "gradient of all rows": ((exact.ExactRegion, "weight_gradient", gradient_of_all_rows),),
    "cp after micro-batches": LATE,
}
"""An object, the name of a function in it, and one that computes the same to rounding."""


def train_sabotaged(ctx: ParallelContext, spec: PretrainConfig, change: str) -> tuple[list[float], Shards]:
    """Train with one sum in another order."""
    with pytest.MonkeyPatch.context() as patch:
        for place, name, function in SABOTAGES[change]:
            if isinstance(place, dict):
                patch.setitem(place, name, function)
            else:
                patch.setattr(place, name, function)
        return train(ctx, spec, 3)


@pytest.mark.parametrize(
    ("change", "run", "layout"),
    slow_but(
        {0, 3, 5, 9, 11, 12},
        [
            ("chain", "gpt2 fp32", {"tp": 2}),
            ("ring", "gpt2 fp32", {"tp": 4}),
            ("levels of dp", "gpt2 fp32", {"dp": 4}),
            ("order of micro-batches", "gpt2 fp32", {"dp": 2}),
            ("chain", "llama fp64 lora", {"tp": 2}),
            ("transposed matrices", "llama fp32 muon", {"tp": 2}),
            ("rows in one part", RUNS[8], {"tp": 2, "sequence_parallel": True}),
            ("ring of rows", RUNS[8], {"tp": 4, "sequence_parallel": True}),
            ("masked tokens by rank", RUNS[8], {"tp": 2, "sequence_parallel": True}),
            ("one source", "mixtral fp32", {"dp": 2, "ep": 2}),
            ("levels of sources", "mixtral fp32", {"dp": 4, "ep": 4}),
            ("heads of all rows", "qwen3 fp32", {"tp": 2}),
            ("keys", "llama fp32 long", {}),
            ("gradient of all rows", "llama fp32 long", {"cp": 2}),
            ("cp after micro-batches", "llama fp32 long", {"cp": 2}),
            ("ring of gradients", "mixtral fp32 long", {"cp": 2, "dp": 4, "ep": 2}),
            ("products of a rank's tokens", "mixtral fp32 long", {"cp": 2, "ep": 2}),
            ("cp after micro-batches", "mixtral fp32 long", {"cp": 2, "ep": 2}),
            ("tokens before heads", "gemma3 fp32 long", {"cp": 2}),
        ],
    ),
)
def test_sum_in_another_order_shows(change: str, run: str, layout: Layout) -> None:
    """Losses are those of one process to rounding, weights and moments are not its bits."""
    ranks = run_on_ranks(train_sabotaged, spec_of(run, **layout), change, **ranks_of(layout))
    expected, losses = result(spec_of(run))
    assert ranks[0][0] == pytest.approx(losses, rel=1e-3)
    assert digest([shards for _, shards in ranks]) != expected
