"""The global gradient norm against torch.nn.utils.clip_grad_norm_ of the unsplit model."""

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mlm.optim.adamw import apply, build_optimizer, ensure_state
from mlm.optim.clip import clip_factor, gradient_norm, scale_gradients
from mlm.optim.config import OptimizerConfig
from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear
from mlm.parallel.mesh import Axis, ParallelContext, shape_context
from mlm.parallel.sharding import load_full, parameter_shards
from tests.ranks import run_on_ranks


def layers(tp: Axis) -> torch.nn.Sequential:
    return torch.nn.Sequential(
        ColumnParallelLinear(6, 8, tp=tp), RowParallelLinear(8, 6, tp=tp), torch.nn.LayerNorm(6)
    ).double()


def whole_gradients() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        s.name: torch.randn(s.global_shape, dtype=torch.float64)
        for s in parameter_shards(layers(Axis("tp")), Axis("tp"))
    }


@pytest.mark.parametrize(("tp", "dp", "pp"), [(4, 1, 1), (2, 2, 1), (1, 1, 2)])
def test_norm_counts_each_parameter_once(tp: int, dp: int, pp: int) -> None:
    """Split ones on every tp rank, replicated ones once, data-parallel copies not at all, those of each
    pipeline stage: here the stages have equal gradients."""
    stage = sum(float(g.square().sum()) for g in whole_gradients().values())
    assert run_on_ranks(norm_of, tp=tp, dp=dp, pp=pp) == pytest.approx(
        [math.sqrt(pp * stage)] * (tp * dp * pp), rel=1e-12
    )


def norm_of(ctx: ParallelContext) -> float:
    model, grads = layers(ctx.tp), layers(ctx.tp)
    load_full(grads, whole_gradients(), ctx.tp)
    for p, g in zip(model.parameters(), grads.parameters(), strict=True):
        p.grad = g.detach()
    return float(gradient_norm(list(parameter_shards(model, ctx.tp)), ctx))


@pytest.mark.parametrize(("max_norm", "scaled"), [(0.0, 1.0), (1.0, 0.2), (10.0, 1.0)])
def test_gradients_are_clipped_like_torch_does(max_norm: float, scaled: float) -> None:
    model = torch.nn.Linear(2, 1, bias=False).double()
    model.weight.grad = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    shards = list(parameter_shards(model, Axis("tp")))
    norm = gradient_norm(shards, shape_context())
    scale_gradients(shards, clip_factor(norm, max_norm))
    assert model.weight.grad.tolist()[0] == pytest.approx([3.0 * scaled, 4.0 * scaled], rel=1e-6)


def test_the_fused_step_scales_as_a_pass_over_the_gradients_does() -> None:
    """Against gradients scaled first and PyTorch's plain AdamW; overflow leaves all as it is.

    Factors differ from step to step: Adam's weights do not depend on one that stays.
    """
    weights, gradient = torch.randn(5, 3), torch.randn(5, 3)
    ours, theirs = torch.nn.Linear(3, 5, bias=False), torch.nn.Linear(3, 5, bias=False)
    for model in (ours, theirs):
        model.weight.data.copy_(weights)
        model.weight.grad = gradient.clone()
    shards, config = list(parameter_shards(ours, Axis("tp"))), OptimizerConfig(lr=0.1)
    optimizer, zero = build_optimizer(shards, config), torch.zeros(())
    ensure_state(optimizer)
    apply(optimizer, shards, torch.tensor(0.3), torch.ones(()))
    assert torch.equal(ours.weight, weights)
    plain = torch.optim.AdamW(
        theirs.parameters(), lr=0.1, betas=config.betas, weight_decay=config.weight_decay, fused=False
    )
    for factor in (0.3, 2.0):
        ours.weight.grad = gradient.clone()
        apply(optimizer, shards, torch.tensor(factor), zero)
        theirs.weight.grad = gradient * factor
        plain.step()
    torch.testing.assert_close(ours.weight, theirs.weight)
    assert not torch.equal(ours.weight, weights)


def test_the_norm_of_gradients_of_all_sizes_is_that_of_float64() -> None:
    """To 1e-6, or clipping would depend on how tensors are split: less than a piece, a rest, two million."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(n)) for n in (1, 1025, 70001, 1 << 21)])
    for parameter in model:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    exact = torch.cat([p.grad for p in model if p.grad is not None]).double().norm()
    norm = float(gradient_norm(list(parameter_shards(model, Axis("tp"))), shape_context()))
    assert norm == pytest.approx(float(exact), rel=1e-6)


def test_the_norm_makes_no_wide_copy_of_a_gradient() -> None:
    """A float64 copy took a tenth of a step of GPT-2 124M."""
    model = torch.nn.Linear(512, 512, bias=False)
    model.weight.grad = torch.ones(512, 512)
    shards = list(parameter_shards(model, Axis("tp")))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        gradient_norm(shards, shape_context())
    assert max(event.self_cpu_memory_usage for event in profiler.events()) <= 8 * 512
