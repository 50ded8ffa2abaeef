"""exact=8 of mixtures of experts and norms of heads: one digest at every layout, on real ranks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlm.parallel import exact, exact_gradients
from mlm.parallel.exact_experts import SourceRuns
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import PretrainConfig
from tests.ranks import run_on_ranks
from tests.slow import thinned
from tests.training.test_exact import digest, nested, result, spec_of, train

MIXTURE: dict[str, Any] = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_size": 128}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": True},
    "gemma3": {"qk_norm": True, "zero_centered_norms": True},
    "mixtral": {**MIXTURE, "balance": "global_batch", "balance_coefficient": 0.1},
    "deepseek": {
        **MIXTURE,
        "router_scores": "sigmoid",
        "router_groups": 4,
        "router_top_groups": 2,
        "balance": "bias",
        "balance_rate": 0.1,
        "shared_experts": 1,
        "dense_layers": 1,
    },
    "qwen2_moe": {
        **MIXTURE,
        "qk_norm": True,
        "shared_experts": 1,
        "shared_gate": True,
        "balance": "sequence",
        "z_loss": 0.1,
        "capacity_factor": 1.0,
        "router_logit_bias": True,
    },
}
LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2},
    {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True},
    {"dp": 4, "ep": 2, "zero": 3},
    {"tp": 2, "dp": 2, "ep": 4, "expert_tp": 1, "sequence_parallel": True},
    {"tp": 8},
    {"tp": 4, "sequence_parallel": True},
    {"dp": 8, "ep": 4},
    {"dp": 4, "ep": 4},
    {"pp": 2, "dp": 2, "ep": 2},
    {"pp": 2, "dp": 2, "ep": 2, "pipeline": "zb_h1"},
    {"tp": 2, "ep": 2, "expert_tp": 1, "sequence_parallel": True},
    {"dp": 4, "ep": 2, "zero": 2},
    {"dp": 2, "ep": 2, "recompute": "full"},
    {"tp": 2, "dp": 2, "zero": 3},
    {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "recompute": "selective"},
]
RUNS = [("mixtral", "fp32"), ("deepseek", "bf16"), ("qwen2_moe", "fp32"), ("mixtral", "bf16")]
CASES = [
    *((model, "fp32", {"tp": 4, "sequence_parallel": True}) for model in ("qwen3", "gemma3")),
    *(("qwen3", "bf16", layout) for layout in ({"tp": 8}, {"tp": 2, "dp": 2, "pp": 2}, {"dp": 4, "zero": 3})),
    *((*RUNS[(i + shift) % 4], layout) for i, layout in enumerate(LAYOUTS) for shift in (0, 1)),
]
ONE: dict[Any, tuple[str, list[float]]] = {}
"""Results of one process, by the run."""


def mixture_of(model: str, dtype: str = "fp32", **parallel: Any) -> PretrainConfig:
    # gates of single tokens take whole vectors
    size = {"micro_batch": 8, "batch": 64} if model == "qwen2_moe" else {}
    spec = spec_of("llama", dtype, **size, **parallel)
    return replace(spec, model=replace(spec.model, options={"num_kv_heads": 8, **MODELS[model]}))


def ranks_of(layout: dict[str, Any]) -> dict[str, int]:
    return {key: layout[key] for key in ("tp", "pp", "dp", "ep", "expert_tp") if key in layout}


@pytest.mark.parametrize(("model", "dtype", "layout"), thinned(CASES, 9))
def test_digest_is_that_of_one_process(model: str, dtype: str, layout: dict[str, Any]) -> None:
    """Five steps."""
    if (model, dtype) not in ONE:
        ONE[model, dtype] = result(mixture_of(model, dtype), 5)
    assert result(mixture_of(model, dtype, **layout), 5, **ranks_of(layout)) == ONE[model, dtype]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_interleaved_stages_with_experts_have_one_digest(dtype: str) -> None:
    layout = {"pp": 2, "vp": 2, "dp": 2, "ep": 2}
    spec = mixture_of("mixtral", dtype, layers=4, **layout)
    assert result(spec, 5, **ranks_of(layout)) == result(mixture_of("mixtral", dtype, layers=4), 5)


@pytest.mark.slow
def test_muon_of_experts_has_one_digest() -> None:
    layout = {"tp": 2, "dp": 2, "ep": 2, "zero": 2}
    spec = mixture_of("mixtral", optimizer="muon", **layout)
    assert result(spec, **ranks_of(layout)) == result(mixture_of("mixtral", optimizer="muon"))


@pytest.mark.parametrize("model", ["gemma3", "deepseek", "qwen2_moe"])
def test_exact_run_computes_what_the_usual_one_does(model: str) -> None:
    """float64: losses of three steps to 1e-12, the usual path being compared with one process elsewhere."""
    usual = result(mixture_of(model, "fp64", parts=0))[1]
    assert result(mixture_of(model, "fp64"))[1] == pytest.approx(usual, rel=1e-12)


def of_one_source(counts: Sequence[Sequence[int]]) -> SourceRuns:
    return SourceRuns([[sum(expert) for expert in zip(*counts, strict=True)]])


def sum_any_heads(region: exact.Region, x: Tensor, dtype: torch.dtype) -> Tensor:
    return exact.sum_over_ranks(exact.Region(region.tp, False).sum_rows(x, dtype), region.tp)


def train_sabotaged(ctx: ParallelContext, spec: PretrainConfig, change: str) -> Any:
    """Train with one sum in another order."""
    with pytest.MonkeyPatch.context() as patch:
        if change == "one source":
            patch.setattr("mlm.models.exact.SourceRuns", of_one_source)
        elif change == "levels of sources":
            patch.setattr(exact_gradients, "sum_of_sources", nested)
        elif change == "heads":
            patch.setattr(exact.Region, "sum_heads", sum_any_heads)
        return train(ctx, spec, 2)


@pytest.mark.parametrize(
    ("change", "model", "layout"),
    [
        ("one source", "mixtral", {"dp": 2, "ep": 2}),
        ("levels of sources", "mixtral", {"dp": 4, "ep": 4}),
        ("heads", "qwen3", {"tp": 2}),
    ],
)
def test_sum_in_another_order_shows(change: str, model: str, layout: dict[str, int]) -> None:
    ranks = run_on_ranks(train_sabotaged, mixture_of(model, **layout), change, **layout)
    assert digest([shards for _, shards in ranks]) != result(mixture_of(model), 2)[0]


def check_keep_rows(ctx: ParallelContext) -> None:
    x = torch.arange(8.0).view(4, 2).requires_grad_()
    y = exact.KeepRows.apply(x, ctx.tp)
    own = slice(2 * ctx.tp.rank, 2 * ctx.tp.rank + 2)
    assert torch.equal(y, x[own])
    dy = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    y.backward(dy[own])
    assert torch.equal(x.grad, dy)


def test_rows_kept_of_what_all_ranks_compute_have_the_gradients_of_all() -> None:
    run_on_ranks(check_keep_rows, tp=2)


def test_products_of_sources_are_those_of_each_expert() -> None:
    """float64 against an einsum of each row with the weight of its expert."""
    generator = torch.Generator().manual_seed(0)
    counts = [[2, 0, 3], [1, 4, 0]]
    runs = SourceRuns(counts)
    assert runs.sizes == [2, 1, 0, 4, 3, 0]
    experts = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2])
    sources = torch.tensor([0, 0, 1, 1, 1, 1, 1, 0, 0, 0])
    x, dy = (torch.randn(10, n, dtype=torch.float64, generator=generator) for n in (4, 5))
    weights = torch.randn(3, 5, 4, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(runs.product(x, weights), torch.einsum("ri,roi->ro", x, weights[experts]))
    dx, dw = runs.gradients(dy, x, weights, torch.float64)
    torch.testing.assert_close(dx, torch.einsum("ro,roi->ri", dy, weights[experts]))
    for source in range(2):
        for expert in range(3):
            own = (experts == expert) & (sources == source)
            torch.testing.assert_close(dw[source, expert], dy[own].T @ x[own])
