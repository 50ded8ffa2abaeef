"""The choice of experts and the losses of balance, against closed formulas."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mlm.parallel.config import RouterSettings
from mlm.parallel.expert.router import Balance, Router
from mlm.parallel.mesh import Axis

S, B, H, E, K = 6, 3, 10, 8, 2
PLAIN = RouterSettings(num_experts=E, experts_per_token=K)


def make_router(settings: RouterSettings) -> Router:
    router = Router(H, settings, axes=(Axis("cp"), Axis("tp")), init_std=1.0).double()
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(1))
    return router


def tokens() -> Tensor:
    x = torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return x.requires_grad_()


def train(router: Router, x: Tensor, scale: float) -> tuple[Tensor, Balance]:
    """The gradient of the logits' weight by the losses of balance alone, and the counts."""
    balance = Balance({0: router}, ())
    balance.start(torch.tensor(scale, dtype=torch.float64))
    (router(x).weights * 0).sum().backward()
    balance.reduce()
    assert router.weight.grad is not None
    return router.weight.grad, balance


def test_ties_go_to_the_lower_number() -> None:
    router = make_router(replace(PLAIN, experts_per_token=3))
    scores = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 2.0, 0.0, 2.0]])
    assert router.choose(scores).tolist() == [[1, 2, 4]]


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    """Four groups of two: the groups of the largest sums are open, whatever their highest score."""
    router = make_router(replace(PLAIN, router_groups=4, router_top_groups=2, experts_per_token=3))
    scores = torch.tensor([[0.9, 0.0, 0.6, 0.5, 0.5, 0.5, 0.1, 0.2]])  # sums 0.9, 1.1, 1.0, 0.3
    assert router.choose(scores).tolist() == [[2, 3, 4]]


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    router = make_router(replace(PLAIN, router_scores="sigmoid", router_bias=True, router_scale=2.5))
    assert router.bias is not None
    router.bias.data[7] = 10.0
    x = tokens()
    routing = router(x)
    assert (routing.experts == 7).any(-1).all()
    scores = (x @ router.weight.t()).sigmoid().gather(-1, routing.experts)
    torch.testing.assert_close(routing.weights, 2.5 * scores / scores.sum(-1, keepdim=True))


def chosen(router: Router, x: Tensor) -> Tensor:
    """[S, B, E] of 0 and 1."""
    return torch.zeros(S, B, E, dtype=torch.float64).scatter_(-1, router(x).experts, 1.0)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("balance", ["sequence", "global_batch", "micro_batch"])
def test_losses_of_balance_have_the_gradients_of_their_formulas(balance: str, scores: str) -> None:
    """alpha sum_e f_e P_e, f_e = E / (k S) sum_t 1, P_e = 1 / S sum_t s_t,e; the mean over sequences.

    Of the global batch, f is of the loads of the one before; z-loss is the mean of logsumexp squared.
    """
    settings = replace(PLAIN, balance=balance, balance_coefficient=0.3, z_loss=0.1, router_scores=scores)
    router, x = make_router(settings), tokens()
    if router.load is not None:
        router.load.copy_(torch.arange(E))
    found, _ = train(router, x, 4.0 / (S * B))

    weight = router.weight.detach().clone().requires_grad_()
    logits = x.detach() @ weight.t()
    shares = logits.softmax(-1) if scores == "softmax" else logits.sigmoid()
    shares = shares / shares.sum(-1, keepdim=True)
    hits = chosen(router, x.detach())
    if balance == "sequence":
        loads = E / (K * S) * hits.sum(0)  # [B, E]
        loss = (loads * shares.mean(0)).sum(-1).mean()
    else:
        total = hits.sum((0, 1)) if balance == "micro_batch" else torch.arange(E).double()
        loss = (E * total / total.sum() * shares.mean((0, 1))).sum()
    loss = 0.3 * loss + 0.1 * logits.logsumexp(-1).square().mean()
    (expected,) = torch.autograd.grad(4.0 * loss, weight)
    torch.testing.assert_close(found, expected)


def test_a_bias_moves_against_the_load_of_the_batch() -> None:
    """By the sign of mean - count (arXiv:2408.15664, algorithm 1); not in a skipped step."""
    router = make_router(replace(PLAIN, balance="bias", balance_rate=0.25))
    x = tokens()
    counts = chosen(router, x.detach()).sum((0, 1))
    _, balance = train(router, x, 1.0)
    assert router.bias is not None
    balance.update(torch.ones(()))
    assert not router.bias.any()
    balance.update(torch.zeros(()))
    torch.testing.assert_close(router.bias.data, 0.25 * (S * B * K / E - counts).sign())


def test_choices_are_counted_once_a_backward_pass_and_never_in_evaluation() -> None:
    router, x = make_router(PLAIN), tokens()
    balance = Balance({0: router}, (Axis("dp"),))
    balance.start(torch.ones((), dtype=torch.float64))
    with torch.no_grad():
        router(x)
    recomputed = torch.utils.checkpoint.checkpoint(lambda x: router(x).weights, x, use_reentrant=False)
    recomputed.sum().backward()
    router(x).weights.sum().backward()
    assert balance.counts is not None
    assert balance.counts.sum() == 2 * S * B * K
    balance.reduce()
    router(x).weights.sum().backward()  # after the step
    assert balance.counts.sum() == 2 * S * B * K
