"""The choice of experts, losses of balance, capacity, and products of experts, against closed formulas."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.parallel import matmul
from mlm.parallel.config import RouterSettings
from mlm.parallel.context import local_tokens
from mlm.parallel.expert.experts import grouped_linear
from mlm.parallel.expert.router import Balance, Router, drop_choices, expert_capacity
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.parallel.sharding import shard_of
from tests.ranks import run_on_ranks

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
    assert balance.counts.sum() == 2 * S * B * K
    balance.reduce()
    router(x).weights.sum().backward()  # after the step
    assert balance.counts.sum() == 2 * S * B * K


LENGTH, SAMPLES, NUM_EXPERTS, CHOICES = 24, 3, 5, 2


def choices() -> Tensor:
    """[LENGTH, SAMPLES, CHOICES], different experts of a token; low numbers more often."""
    scores = (
        torch.randn(LENGTH, SAMPLES, NUM_EXPERTS, generator=torch.Generator().manual_seed(5))
        - torch.arange(NUM_EXPERTS) / 3
    )
    return scores.topk(CHOICES).indices


@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
def test_an_expert_takes_the_first_tokens_of_a_sequence_that_choose_it(factor: float) -> None:
    experts, taken = choices(), choices()
    capacity = math.ceil(factor * CHOICES * LENGTH / NUM_EXPERTS)
    for b in range(SAMPLES):
        left = [capacity] * NUM_EXPERTS
        for s in range(LENGTH):
            for k in range(CHOICES):
                expert = int(experts[s, b, k])
                taken[s, b, k] = expert if left[expert] > 0 else NUM_EXPERTS
                left[expert] -= 1
    assert torch.equal(drop_choices(experts, NUM_EXPERTS, factor, Axis("cp"), Axis("tp")), taken)
    assert (taken == NUM_EXPERTS).any() == (factor < 3)


def test_capacity_is_that_of_the_factor_as_it_is_typed() -> None:
    """Of 7,800 combinations, in whole numbers: 1.1 as a float is a little more than 11 / 10."""
    for twentieths, choices, experts in product(range(1, 61), range(2, 262, 10), (4, 6, 8, 10, 60)):
        expected = -(-twentieths * choices // (20 * experts))
        assert expert_capacity(twentieths / 20, choices, experts) == expected
    assert expert_capacity(1.1, 2 * 50, 10) == 11


def drop_own(ctx: ParallelContext) -> tuple[Tensor, Tensor]:
    """What this rank drops of its rows, and the same rows of what one process drops."""

    def mine(x: Tensor) -> Tensor:
        return shard_of(local_tokens(x, ctx.cp, 0), ctx.tp, 0)

    whole = drop_choices(choices(), NUM_EXPERTS, 0.75, Axis("cp"), Axis("tp"))
    return drop_choices(mine(choices()).contiguous(), NUM_EXPERTS, 0.75, ctx.cp, ctx.tp), mine(whole)


@pytest.mark.parametrize("sizes", [{"tp": 3}, {"cp": 3, "tp": 2}], ids=str)
def test_ranks_that_split_a_sequence_drop_what_one_process_drops(sizes: dict[str, int]) -> None:
    """Pieces in zigzag, split over an odd number of ranks, and into odd numbers of rows."""
    for own, expected in run_on_ranks(drop_own, **sizes):
        assert torch.equal(own, expected)


COUNTS = (5, 0, 9, 2)
"""Rows of each expert; one has none."""


@pytest.mark.parametrize(
    "onednn_from", [None, 1, 2 * 5 * 12 * 8]
)  # no product, all, those of 5 rows and more
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_grouped_linear_is_the_linear_of_each_expert(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, onednn_from: int | None
) -> None:
    """y, dx and dW of float32 master weights; without rows the gradient is 0."""
    if onednn_from is not None and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: onednn_from is not None)
    monkeypatch.setattr(matmul, "NEW_SHAPE_FLOPS", onednn_from or 0)
    torch.manual_seed(0)
    x = torch.randn(sum(COUNTS), 8, dtype=dtype, requires_grad=True)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    weight = torch.randn(len(COUNTS), 12, 8, dtype=wide, requires_grad=True)
    dy = torch.randn(sum(COUNTS), 12, dtype=dtype)
    y = grouped_linear(x, weight, matmul.GroupedRows(COUNTS))
    parts = zip(x.split(COUNTS), weight.to(dtype), strict=True)
    expected = torch.cat([F.linear(rows, each) for rows, each in parts])
    torch.testing.assert_close(y, expected)
    ours, theirs = (torch.autograd.grad(out, (x, weight), dy) for out in (y, expected))
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want)
    assert not ours[1][1].any()
