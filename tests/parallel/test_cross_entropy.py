"""Fused vocabulary projection and cross-entropy against torch.nn.functional.cross_entropy, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.parallel.collectives import copy_to_tp
from mlm.parallel.cross_entropy import IGNORE, full_logits, linear_cross_entropy, token_losses, token_scores
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.parallel.sharding import load_whole, shard_of
from tests.ranks import run_on_ranks

VOCAB, PADDED, HIDDEN, ROWS = 10, 16, 5, 11


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight, labels (two of them ignored); the same on every rank."""
    torch.manual_seed(0)
    labels = torch.randint(0, VOCAB, (ROWS,))
    labels[[3, 7]] = IGNORE
    hidden = torch.randn(ROWS, HIDDEN, dtype=torch.float64, requires_grad=True)
    return hidden, torch.randn(VOCAB, HIDDEN, dtype=torch.float64, requires_grad=True), labels


def table_of(weight: Tensor, tp: Axis) -> VocabParallelEmbedding:
    table = VocabParallelEmbedding(VOCAB, PADDED, HIDDEN, tp=tp).to(weight.dtype)
    load_whole(table, {"weight": weight.detach()}, tp)
    return table


@pytest.mark.parametrize("chunk_bytes", [1, 3 * 4 * PADDED, 1 << 20])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_loss_and_gradients_match_one_process(tp: int, chunk_bytes: int) -> None:
    """At tp=4 with 16 padded rows the last shard holds nothing but padding."""
    run_on_ranks(check_loss_and_gradients, chunk_bytes, tp=tp)


def check_loss_and_gradients(ctx: ParallelContext, chunk_bytes: int) -> None:
    hidden, weight, labels = problem()
    expected = F.cross_entropy(hidden @ weight.t(), labels, ignore_index=IGNORE, reduction="sum") * 0.25
    (3 * expected).backward()  # an output gradient that is not 1
    table = table_of(weight, ctx.tp)
    x = hidden.detach().clone().requires_grad_()
    scale = torch.tensor(0.25, dtype=torch.float64)
    loss = linear_cross_entropy(copy_to_tp(x, ctx.tp), labels, table, scale, chunk_bytes)
    (3 * loss).backward()

    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(x.grad, hidden.grad)
    padding = torch.zeros(PADDED - VOCAB, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(table.weight.grad, shard_of(torch.cat([weight.grad, padding]), ctx.tp, 0))


@pytest.mark.parametrize("tp", [1, 2])
def test_token_losses_match_one_process(tp: int) -> None:
    run_on_ranks(check_token_losses, tp=tp)


def check_token_losses(ctx: ParallelContext) -> None:
    hidden, weight, labels = problem()
    expected = F.cross_entropy(hidden @ weight.t(), labels, ignore_index=IGNORE, reduction="none")
    torch.testing.assert_close(token_losses(hidden, labels, table_of(weight, ctx.tp)), expected)
    torch.testing.assert_close(full_logits(hidden, table_of(weight, ctx.tp)), hidden @ weight.t())


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_token_scores_match_one_process(tp: int) -> None:
    run_on_ranks(check_token_scores, tp=tp)


def check_token_scores(ctx: ParallelContext) -> None:
    hidden, weight, labels = problem()
    labels[[3, 7]] = 0
    logits = hidden @ weight.t()
    labels[::2] = logits.argmax(-1)[::2]
    losses, best = token_scores(hidden, labels, table_of(weight, ctx.tp))
    torch.testing.assert_close(losses, F.cross_entropy(logits, labels, reduction="none"))
    assert torch.equal(best.bool(), logits.argmax(-1) == labels)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_of_equal_logits_the_lowest_id_is_the_most_probable_and_padding_never(tp: int) -> None:
    """Tokens 2, 3 and 9 are alike, 9 in another shard than 2 at tp=2 and 4; padding's logit is above all."""
    run_on_ranks(check_ties, tp=tp)


def check_ties(ctx: ParallelContext) -> None:
    weight = -torch.arange(2.0, VOCAB + 2).unsqueeze(1).repeat(1, HIDDEN)
    weight[[2, 3, 9]] = -1.0
    labels = torch.arange(VOCAB)
    best = token_scores(torch.ones(VOCAB, HIDDEN), labels, table_of(weight, ctx.tp))[1]
    assert best.nonzero().flatten().tolist() == [2]


def test_loss_survives_logits_that_overflow_exp() -> None:
    """Logits of ±1e4 give the exact loss, not inf: the largest is taken off first."""
    weight = torch.eye(VOCAB, HIDDEN)
    hidden = torch.tensor([[1e4, -1e4, 0.0, 0.0, 0.0]])
    loss = token_losses(hidden, torch.tensor([1]), table_of(weight, Axis("tp")))
    torch.testing.assert_close(loss, torch.tensor([2e4]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_near_float32(dtype: torch.dtype) -> None:
    """Within the dtype's own rounding: its epsilon times a few, relative to the largest gradient."""
    hidden, weight, labels = (x.float() if x.is_floating_point() else x for x in problem())
    exact, table = hidden.detach().requires_grad_(), table_of(weight, Axis("tp"))
    linear_cross_entropy(exact, labels, table, torch.tensor(1.0)).backward()
    d_weight, table.weight.grad = table.weight.grad, None
    rough = hidden.detach().to(dtype).requires_grad_()
    linear_cross_entropy(rough, labels, table, torch.tensor(1.0)).backward()
    tolerance = 8 * torch.finfo(dtype).eps
    assert (rough.grad.float() - exact.grad).abs().max() <= tolerance * exact.grad.abs().max()
    assert (table.weight.grad - d_weight).abs().max() <= tolerance * d_weight.abs().max()


def test_gradient_of_a_bfloat16_weight_is_added_up_in_float32() -> None:
    """512 chunks of a row: rounded once, within half a unit in the last place (2^-8 relative, plus products).

    Added up in bfloat16 the sum would stop growing at 2^8 times its terms.
    """
    rows = 512
    table = table_of(torch.zeros(VOCAB, HIDDEN), Axis("tp")).to(torch.bfloat16)
    hidden = torch.ones(rows, HIDDEN, dtype=torch.bfloat16)
    labels = torch.zeros(rows, dtype=torch.int64)
    linear_cross_entropy(hidden, labels, table, torch.tensor(1.0), chunk_bytes=1).backward()
    assert table.weight.grad.dtype == torch.bfloat16
    expected = torch.full((HIDDEN,), rows * (1 / VOCAB - 1))
    torch.testing.assert_close(table.weight.grad[0].float(), expected, rtol=2**-8, atol=0)
