"""A mixture of experts against `transformers`: choices, outputs and all gradients, float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlm.models.config import ModelConfig
from mlm.models.llama.mixture import MixtureOfExperts
from mlm.models.llama.settings import num_blocks
from mlm.parallel.mesh import Axis
from tests.models.llama.test_parts import MODEL

transformers = pytest.importorskip("transformers")
S, B, E, F = 7, 3, 8, 12
MIXTURE = replace(MODEL, options={"num_experts": E, "experts_per_token": 3, "expert_ffn_size": F})


def random_mixture(model: ModelConfig) -> MixtureOfExperts:
    mixture = MixtureOfExperts(model, tp=Axis("tp")).double()
    generator = torch.Generator().manual_seed(3)
    for parameter in mixture.parameters():
        parameter.data.normal_(0, 0.5, generator=generator)
    return mixture


def theirs_of(up: Tensor, model: ModelConfig, width: int) -> Tensor:
    """Rows [gate, up] of the shared experts' rows [block][gate, up]: [2F, H]."""
    blocks = num_blocks(replace(model, ffn_hidden_size=width))
    return up.unflatten(-2, (blocks, 2, -1)).transpose(-4, -3).flatten(-4, -2)


def check(mixture: MixtureOfExperts, theirs: torch.nn.Module, router: torch.nn.Module) -> None:
    """Outputs [S, B, H] and gradients of x, router and experts equal; their `router` is what ours is."""
    model = MIXTURE
    named = dict(theirs.named_parameters())
    with torch.no_grad():
        named["gate.weight"].copy_(mixture.router.weight)
        named["experts.gate_up_proj"].copy_(mixture.experts.up.flatten(1, 2))
        named["experts.down_proj"].copy_(mixture.experts.down)
    x = torch.randn(S, B, model.hidden_size, dtype=torch.float64).requires_grad_()
    dy = torch.randn_like(x)
    x2 = x.detach().transpose(0, 1).contiguous().requires_grad_()  # theirs is [B, S, H]
    y = mixture(x)
    y.backward(dy)
    y2 = theirs(x2)
    y2.backward(dy.transpose(0, 1))
    experts = router(x.detach().flatten(0, 1))[2]
    assert torch.equal(experts.sort().values, mixture.router(x.detach()).experts.flatten(0, 1).sort().values)
    torch.testing.assert_close(y, y2.transpose(0, 1), rtol=1e-5, atol=1e-5)  # their routers are float32
    grads: list[tuple[Any, Any]] = [
        (x.grad, x2.grad.transpose(0, 1)),
        (mixture.router.weight.grad, named["gate.weight"].grad),
        (mixture.experts.up.grad.flatten(1, 2), named["experts.gate_up_proj"].grad),
        (mixture.experts.down.grad, named["experts.down_proj"].grad),
    ]
    for ours, other in grads:
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)


def test_softmax_mixture_is_mixtrals() -> None:
    config = transformers.MixtralConfig(
        hidden_size=24, intermediate_size=F, num_local_experts=E, num_experts_per_tok=3
    )
    config._experts_implementation = "eager"
    theirs = transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock(config).double()
    check(random_mixture(MIXTURE), theirs, theirs.gate)


def test_sigmoid_mixture_with_groups_bias_and_shared_experts_is_deepseeks() -> None:
    options = {
        "router_scores": "sigmoid",
        "router_groups": 4,
        "router_top_groups": 2,
        "router_bias": True,
        "router_scale": 2.5,
        "shared_experts": 2,
    }
    model = replace(MIXTURE, options=MIXTURE.options | options)
    mixture = random_mixture(model)
    config = transformers.DeepseekV3Config(
        hidden_size=24,
        moe_intermediate_size=F,
        n_routed_experts=E,
        num_local_experts=E,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    config._experts_implementation = "eager"
    theirs = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3MoE(config).double()
    assert mixture.shared is not None
    with torch.no_grad():
        theirs.gate.e_score_correction_bias.copy_(mixture.router.bias)
        both = theirs_of(mixture.shared.up.weight, model, 2 * F)
        theirs.shared_experts.gate_proj.weight.copy_(both[: 2 * F])
        theirs.shared_experts.up_proj.weight.copy_(both[2 * F :])
        theirs.shared_experts.down_proj.weight.copy_(mixture.shared.down.weight)
    check(mixture, theirs, theirs.gate)
    expected = torch.cat(
        [theirs.shared_experts.gate_proj.weight.grad, theirs.shared_experts.up_proj.weight.grad]
    )
    torch.testing.assert_close(theirs_of(mixture.shared.up.weight.grad, model, 2 * F), expected)
