"""exact=8 over cp: one digest whichever ranks hold the parts of a sequence."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlm.parallel import context, exact, exact_gradients
from mlm.parallel.context import context_attention, held_parts, local_positions
from mlm.parallel.mesh import CPU, Axis, ParallelContext
from mlm.runs.config import PretrainConfig
from tests.ranks import run_on_ranks
from tests.slow import thinned
from tests.training.test_exact import chain, digest, result, spec_of, train

LENGTH = 512
"""Tokens of a sequence: four parts of 128."""
LAYOUTS: list[dict[str, Any]] = [
    {"cp": 2},
    {"cp": 2, "tp": 2, "sequence_parallel": True},
    {"cp": 2, "dp": 2, "zero": 3},
    {"cp": 4},
    {"cp": 2, "pp": 2, "pipeline": "zb_h1"},
    {"cp": 2, "dp": 2},
    {"cp": 4, "dp": 2, "zero": 2},
    {"cp": 2, "pp": 2, "dp": 2, "recompute": "full"},
    {"cp": 4, "tp": 2},
    {"cp": 2, "tp": 2, "pp": 2, "recompute": "selective", "sequence_parallel": True},
    {"cp": 1, "tp": 4, "sequence_parallel": True},
]
RUNS = [("gpt2", "fp32", 0.0), ("llama", "bf16", 0.0), ("gpt2", "bf16", 0.1), ("llama", "fp32", 0.0)]
CASES = [(*RUNS[(i + shift) % 4], layout) for i, layout in enumerate(LAYOUTS) for shift in (0, 1)]
ONE: dict[Any, tuple[str, list[float]]] = {}
"""Results of one process, by the run."""


def long_spec_of(
    kind: str, dtype: str = "fp32", dropout: float = 0.0, *, length: int = LENGTH, **others: Any
) -> PretrainConfig:
    spec = spec_of(kind, dtype, dropout=dropout, **{"batch": 4, **others})
    model = replace(spec.model, max_positions=length, attention_dropout=0.0)
    return replace(spec, model=model, data=replace(spec.data, seq_length=length))


def ranks_of(layout: dict[str, Any]) -> dict[str, int]:
    return {key: layout[key] for key in ("tp", "pp", "dp", "cp") if key in layout}


@pytest.mark.parametrize(("kind", "dtype", "dropout", "layout"), thinned(CASES, 9))
def test_digest_is_that_of_one_process(kind: str, dtype: str, dropout: float, layout: dict[str, Any]) -> None:
    """Five steps."""
    key = kind, dtype, dropout
    if key not in ONE:
        ONE[key] = result(long_spec_of(*key), 5)
    assert result(long_spec_of(*key, **layout), 5, **ranks_of(layout)) == ONE[key]


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"optimizer": "muon"}, {"rank": 4}], ids=str)
def test_muon_and_adapters_over_cp_have_one_digest(change: dict[str, Any]) -> None:
    layout = {"cp": 2, "tp": 2, "sequence_parallel": True}
    spec = long_spec_of("llama", "bf16", **change, **layout)
    assert result(spec, **ranks_of(layout)) == result(long_spec_of("llama", "bf16", **change))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
def test_interleaved_stages_over_cp_have_one_digest(dtype: str) -> None:
    layout = {"cp": 2, "pp": 2, "vp": 2}
    spec = long_spec_of("llama", dtype, layers=4, **layout)
    assert result(spec, 5, **ranks_of(layout)) == result(long_spec_of("llama", dtype, layers=4), 5)


@pytest.mark.slow
def test_eight_ranks_hold_the_eight_parts_of_1024_tokens() -> None:
    spec = long_spec_of("llama", length=1024, batch=2)
    assert result(replace(spec, parallel=replace(spec.parallel, cp=8)), 2, cp=8) == result(spec, 2)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_exact_run_computes_what_the_usual_one_does(kind: str) -> None:
    """float64: losses of three steps to 1e-12, the usual path being compared with one process elsewhere."""
    usual = result(long_spec_of(kind, "fp64", parts=0))[1]
    assert result(long_spec_of(kind, "fp64"))[1] == pytest.approx(usual, rel=1e-12)


def train_sabotaged(ctx: ParallelContext, spec: PretrainConfig, change: str) -> Any:
    """Train with one sum in another order."""
    with pytest.MonkeyPatch.context() as patch:
        if change == "keys":
            patch.setattr(context, "tree_sum", chain)
        elif change == "rows":
            patch.setattr(
                exact.Region, "weight_gradient", lambda _, *args: exact.weight_gradient_of_rows(*args)
            )
        elif change == "late":  # cp after the micro-batches
            patch.setattr(exact_gradients.TreeReducer, "_take", take_late)
            patch.setattr(exact_gradients.TreeReducer, "_summed", sum_late)
        return train(ctx, spec, 2)


def take_late(reducer: exact_gradients.TreeReducer, p: Tensor) -> None:
    if p.grad is not None:
        reducer.trees[p].add(p.grad)  # type: ignore[index]
        p.grad = None


def sum_late(reducer: exact_gradients.TreeReducer, p: Any, tree: exact_gradients.GradientTree) -> Any:
    total = tree.take()
    return total if total is None or p not in reducer.trees else exact.sum_over_ranks(total, reducer.cp)


@pytest.mark.parametrize(("change", "cp"), [("keys", 1), ("rows", 2), ("late", 2)])
def test_sum_in_another_order_shows(change: str, cp: int) -> None:
    """A chain of four parts is another sum than their tree; the others are those of one process otherwise."""
    ranks = run_on_ranks(train_sabotaged, long_spec_of("llama", cp=cp), change, cp=cp)
    assert digest([shards for _, shards in ranks]) != result(long_spec_of("llama"), 2)[0]


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_rank_holds_the_tokens_of_as_many_ranks_as_it_stands_for(cp: int) -> None:
    """Of 32 tokens in 8 pieces parts 0 to 3 have pieces 0 and 7, 1 and 6, 2 and 5, 3 and 4."""
    parts = [[0, 7], [1, 6], [2, 5], [3, 4]]
    for rank in range(cp):
        axis = Axis("cp", rank, cp, exact_parts=4)
        pieces = [piece for part in held_parts(axis) for piece in parts[part]]
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
