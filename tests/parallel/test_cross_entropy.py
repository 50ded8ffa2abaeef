"""Fused vocabulary projection and cross-entropy against torch.nn.functional.cross_entropy, in float64."""

import math
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.parallel import matmul
from mlm.parallel.collectives import copy_to_tp, gather_sequence
from mlm.parallel.cross_entropy import (
    HALF_CHUNKS,
    IGNORE_INDEX,
    cross_entropy_and_hits,
    differentiable_losses,
    full_logits,
    linear_cross_entropy,
    token_losses,
    token_scores,
)
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.logits import log_sum_and_target, logits_gradient
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.parallel.sharding import load_full, shard_of
from tests.ranks import on_ranks
from tests.slow import slow

VOCAB, PADDED, HIDDEN, ROWS = 10, 16, 5, 11


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight, labels (two of them ignored); the same on every rank."""
    torch.manual_seed(0)
    labels = torch.randint(0, VOCAB, (ROWS,))
    labels[[3, 7]] = IGNORE_INDEX
    hidden = torch.randn(ROWS, HIDDEN, dtype=torch.float64, requires_grad=True)
    return hidden, torch.randn(VOCAB, HIDDEN, dtype=torch.float64, requires_grad=True), labels


def table_of(weight: Tensor, tp: Axis) -> VocabParallelEmbedding:
    table = VocabParallelEmbedding(VOCAB, PADDED, HIDDEN, tp=tp).to(weight.dtype)
    load_full(table, {"weight": weight.detach()}, tp)
    return table


@pytest.mark.parametrize("tp", [1, 2, 4])
@on_ranks()
def test_losses_hits_and_gradients_match_one_process(ctx: ParallelContext, tp: int) -> None:
    """At tp=4 with 16 padded rows the last shard holds nothing but padding."""
    for chunk_bytes in (1, 3 * 4 * PADDED, 1 << 20):
        for has_bias in (False, True):
            check_loss_and_gradients(ctx, chunk_bytes, has_bias)
    check_tokens(ctx)
    check_softcap(ctx)
    check_ties(ctx)


def check_loss_and_gradients(ctx: ParallelContext, chunk_bytes: int, has_bias: bool) -> None:
    """The first chunk, of however many rows, has hits that the last has not."""
    hidden, weight, labels = problem()
    bias = torch.linspace(-1, 1, VOCAB, dtype=torch.float64).mul(has_bias).requires_grad_()
    logits = hidden @ weight.t() + bias
    labels[[0, 1, 5]] = logits.argmax(-1)[[0, 1, 5]]
    expected = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum") * 0.25
    (3 * expected).backward()  # an output gradient that is not 1
    table, padding = table_of(weight, ctx.tp), torch.zeros(PADDED - VOCAB, dtype=torch.float64)
    own_bias = shard_of(torch.cat([bias.detach(), padding]), ctx.tp, 0).requires_grad_()
    x = hidden.detach().clone().requires_grad_()
    scale = torch.tensor(0.25, dtype=torch.float64)
    if has_bias:
        loss, hits = cross_entropy_and_hits(x, labels, table, own_bias, scale, chunk_bytes)
        assert hits.item() == 0.25 * int((logits.argmax(-1) == labels).sum()) >= 0.75
    else:
        loss = linear_cross_entropy(x, labels, table, scale, chunk_bytes)
    (3 * loss).backward()

    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(x.grad, hidden.grad)
    padded = torch.cat([weight.grad, padding.unsqueeze(1).expand(-1, HIDDEN)])
    torch.testing.assert_close(table.weight.grad, shard_of(padded, ctx.tp, 0))
    if has_bias:
        torch.testing.assert_close(own_bias.grad, shard_of(torch.cat([bias.grad, padding]), ctx.tp, 0))


def test_no_gradient_of_a_frozen_table_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = problem()
    expected = F.cross_entropy(hidden @ weight.t(), labels, ignore_index=IGNORE_INDEX, reduction="sum")
    (3 * expected).backward()
    table = table_of(weight, Axis("tp")).requires_grad_(False)
    monkeypatch.setattr("mlm.parallel.cross_entropy.add_chunk", None)
    x = hidden.detach().clone().requires_grad_()
    (3 * linear_cross_entropy(x, labels, table, torch.ones((), dtype=torch.float64))).backward()
    torch.testing.assert_close(x.grad, hidden.grad)
    assert table.weight.grad is None


@on_ranks(tp=2)
def test_hidden_states_that_entered_tp_before_are_rejected(ctx: ParallelContext) -> None:
    """Their gradients would be summed twice; so would those of too few rows be another batch's."""
    hidden, weight, labels = problem()
    hidden, labels = hidden[:10].detach().requires_grad_(), labels[:10]  # a multiple of tp
    table, scale = table_of(weight, ctx.tp), torch.tensor(0.25, dtype=torch.float64)
    x = hidden.detach().requires_grad_()
    for name, entered in (
        ("copy_to_tp", copy_to_tp(x, ctx.tp).view(1, *x.shape).flatten(0, 1)),
        ("gather_sequence", gather_sequence(shard_of(x, ctx.tp, 0), ctx.tp)),
    ):
        with pytest.raises(ValueError, match=f"summed over tp twice; omit {name}"):
            linear_cross_entropy(entered, labels, table, scale)
    table.sequence_parallel = True
    with pytest.raises(ValueError, match=f"{2 * len(x)} rows over tp for {len(x)} labels"):
        linear_cross_entropy(x, labels, table, scale)
    mine = shard_of(hidden.detach(), ctx.tp, 0).requires_grad_()
    linear_cross_entropy(mine, labels, table, scale).backward()
    expected = F.cross_entropy(hidden @ weight.t(), labels, ignore_index=IGNORE_INDEX, reduction="sum") * 0.25
    expected.backward()
    torch.testing.assert_close(mine.grad, shard_of(hidden.grad, ctx.tp, 0))


def check_tokens(ctx: ParallelContext) -> None:
    hidden, weight, labels = problem()
    table, logits = table_of(weight, ctx.tp), hidden @ weight.t()
    torch.testing.assert_close(full_logits(hidden, table), logits)
    expected = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    torch.testing.assert_close(token_losses(hidden, labels, table), expected)
    labels[[3, 7]] = 0
    labels[::2] = logits.argmax(-1)[::2]
    losses, best = token_scores(hidden, labels, table)
    torch.testing.assert_close(losses, F.cross_entropy(logits, labels, reduction="none"))
    assert torch.equal(best.bool(), logits.argmax(-1) == labels)


def check_softcap(ctx: ParallelContext) -> None:
    """Every loss bounds logits by the softcap."""
    hidden, weight, labels = problem()
    table = table_of(weight, ctx.tp)
    table.softcap = 1.5
    logits = 1.5 * torch.tanh(hidden @ weight.t() / 1.5)
    expected = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    torch.testing.assert_close(full_logits(hidden, table), logits)
    torch.testing.assert_close(token_losses(hidden, labels, table), expected)
    scored = labels >= 0
    losses, _ = token_scores(hidden, labels.clamp(min=0), table)
    torch.testing.assert_close(losses[scored], expected[scored])
    wanted = torch.autograd.grad(0.7 * expected.sum(), (hidden, weight))
    padding = torch.zeros(PADDED - VOCAB, HIDDEN, dtype=torch.float64)
    for loss in (
        lambda x: linear_cross_entropy(x, labels, table, torch.tensor(0.7).double(), 3 * 4 * PADDED),
        lambda x: 0.7 * differentiable_losses(x, labels, table).sum(),
    ):
        x, table.weight.grad = hidden.detach().requires_grad_(), None
        loss(x).backward()
        torch.testing.assert_close(x.grad, wanted[0])
        torch.testing.assert_close(table.weight.grad, shard_of(torch.cat([wanted[1], padding]), ctx.tp, 0))


def check_ties(ctx: ParallelContext) -> None:
    """Of equal logits the lowest id is the most probable, and padding never, whose logit is above all.

    Tokens 2, 3 and 9 are alike, 9 in another shard than 2 at tp=2 and 4.
    """
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


@pytest.mark.parametrize(
    ("tp", "chunk_bytes", "softcap", "compile_them"),
    [(1, 3 * 4 * PADDED, 0.0, False), (2, 3 * 4 * PADDED, 3.0, False), slow((1, 1 << 20, 0.0, True))],
)
@on_ranks()
def test_two_passes_for_a_compiler_give_what_many_give(
    ctx: ParallelContext, chunk_bytes: int, softcap: float, compile_them: bool, tp: int
) -> None:
    """The passes that a GPU runs compiled, also as they are: numbers equal but for rounding."""
    hidden, weight, labels = problem()
    passes = (log_sum_and_target, logits_gradient)
    if compile_them:
        passes = (torch.compile(passes[0]), torch.compile(passes[1]))
    for dtype in (torch.bfloat16,) if compile_them else (torch.bfloat16, torch.float16):
        found = []
        for fused in (None, passes):
            table, x = table_of(weight.float(), ctx.tp), hidden.detach().to(dtype).requires_grad_()
            table.compiled, table.softcap = True, softcap
            with patch("mlm.parallel.cross_entropy.compiled_passes", lambda fused=fused: fused):
                loss = linear_cross_entropy(x, labels, table, torch.tensor(0.23), chunk_bytes)
            loss.backward()
            found.append((loss.detach(), x.grad.float(), table.weight.grad))
        for plain, ours in zip(*found, strict=True):
            tolerance = 2 * torch.finfo(dtype).eps * float(plain.abs().max())
            torch.testing.assert_close(ours, plain, rtol=0, atol=max(tolerance, 1e-6))


def test_chunks_of_half_precision_add_to_the_gradient_in_their_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device that can, all but the first; here the product is computed wide, and so rounded less."""
    hidden, weight, labels = problem()
    joined: list[Tensor] = []

    def add(total: Tensor, dy: Tensor, x: Tensor) -> None:
        joined.append(total)
        total += dy.float().t() @ x.float()

    monkeypatch.setattr(matmul, "_add_wide", add)
    found = []
    for can in (False, True):
        monkeypatch.setattr(matmul, "_WIDE_ADDS", {"cpu": can})
        table = table_of(weight.float(), Axis("tp"))
        x = hidden.detach().bfloat16().requires_grad_()
        linear_cross_entropy(x, labels, table, torch.tensor(0.23), 4 * PADDED).backward()
        found.append(table.weight.grad)
    assert len(joined) == math.ceil(len(labels) / HALF_CHUNKS) - 1
    assert len({total.data_ptr() for total in joined}) == 1
    torch.testing.assert_close(*found, rtol=0, atol=2**-7 * float(found[0].abs().max()))


@pytest.mark.parametrize(("dtype", "softcap"), [(torch.bfloat16, 2.0), (torch.float16, 0.0)])
def test_half_precision_gradients_are_near_float32(dtype: torch.dtype, softcap: float) -> None:
    """Within the dtype's own rounding: its epsilon times a few, relative to the largest gradient."""
    hidden, weight, labels = (x.float() if x.is_floating_point() else x for x in problem())
    exact, table = hidden.detach().requires_grad_(), table_of(weight, Axis("tp"))
    table.softcap = softcap
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


@pytest.mark.parametrize(("dtype", "off"), [(torch.bfloat16, 2e-4), (torch.float16, 2**-11)])
def test_the_scale_of_half_precision_gradients_is_not_rounded(dtype: torch.dtype, off: float) -> None:
    """The number of scored tokens sets the scale, here half way between two of bfloat16. One error for all
    gradients would not average out; errors of single elements do, over thousands."""
    torch.manual_seed(0)
    table = VocabParallelEmbedding(64, 64, 128, tp=Axis("tp"))
    hidden, labels = torch.randn(256, 128).to(dtype), torch.randint(0, 64, (256,))
    weight, bias = torch.randn(64, 128), torch.zeros(64)
    found = []
    for scale in (1.0, 1 + 2**-8):
        load_full(table, {"weight": weight}, Axis("tp"))
        x, b = hidden.clone().requires_grad_(), bias.clone().requires_grad_()
        table.weight.grad = None
        cross_entropy_and_hits(x, labels, table, b, torch.tensor(scale))[0].backward()
        found.append([p.grad.double().flatten() for p in (x, table.weight, b)])
    for whole, scaled in zip(*found, strict=True):
        factor = (scaled @ whole / (whole @ whole)).item()
        assert factor == pytest.approx(1 + 2**-8, rel=off)
