"""Capacity: the first tokens of a sequence that choose an expert, whichever rank holds them."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from mlm.parallel.context import local_tokens
from mlm.parallel.expert.router import drop_choices, expert_capacity
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.parallel.sharding import shard_of
from tests.ranks import run_on_ranks

S, B, E, K = 24, 3, 5, 2


def choices() -> Tensor:
    """[S, B, K], different experts of a token; low numbers more often."""
    scores = torch.randn(S, B, E, generator=torch.Generator().manual_seed(5)) - torch.arange(E) / 3
    return scores.topk(K).indices


@pytest.mark.parametrize("factor", [0.3, 0.75, 1.0, 3.0])
def test_an_expert_takes_the_first_tokens_of_a_sequence_that_choose_it(factor: float) -> None:
    experts, taken = choices(), choices()
    capacity = math.ceil(factor * K * S / E)
    for b in range(B):
        left = [capacity] * E
        for s in range(S):
            for k in range(K):
                expert = int(experts[s, b, k])
                taken[s, b, k] = expert if left[expert] > 0 else E
                left[expert] -= 1
    assert torch.equal(drop_choices(experts, E, factor, Axis("cp"), Axis("tp")), taken)
    assert (taken == E).any() == (factor < 3)


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

    whole = drop_choices(choices(), E, 0.75, Axis("cp"), Axis("tp"))
    return drop_choices(mine(choices()).contiguous(), E, 0.75, ctx.cp, ctx.tp), mine(whole)


@pytest.mark.parametrize(
    "sizes", [{"tp": 3}, {"cp": 2, "tp": 3}, {"cp": 3, "tp": 2}, {"cp": 2, "tp": 4}], ids=str
)
def test_ranks_that_split_a_sequence_drop_what_one_process_drops(sizes: dict[str, int]) -> None:
    """Pieces in zigzag, split over an odd number of ranks, and into odd numbers of rows."""
    for own, expected in run_on_ranks(drop_own, **sizes):
        assert torch.equal(own, expected)
