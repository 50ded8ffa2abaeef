"""Attention over sequences that ranks split: numbers, bytes sent and balance."""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.models.cache import window_mask
from mlm.parallel import context as module
from mlm.parallel.context import (
    GPUKernel,
    KeyBlock,
    attention_blocks,
    context_attention,
    local_tokens,
    rank_positions,
)
from mlm.parallel.dropout import DropoutStream, draw_keep_mask, dropped, site_keys
from mlm.parallel.mesh import Axis, ParallelContext
from tests.ranks import run_on_ranks
from tests.slow import thinned

B, HEADS, KV_HEADS, D = 2, 4, 2, 8
LONG = 1024


@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_ranks_hold_each_token_once_and_in_order(cp: int) -> None:
    places = [rank_positions(rank, 48, cp, torch.device("cpu")) for rank in range(cp)]
    assert torch.equal(torch.cat(places).sort().values, torch.arange(48))
    assert all(torch.equal(own, own.sort().values) for own in places)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS])
def test_the_kernel_of_a_gpu_takes_what_it_is_given(kv_heads: int, causal: bool) -> None:
    """PyTorch's own signature, dtypes and shapes, forward and backward, on the meta device."""
    q = torch.empty(16, B, HEADS, D, device="meta", dtype=torch.bfloat16).permute(1, 2, 0, 3)
    k = v = torch.empty(B, kv_heads, 32, D, device="meta", dtype=torch.bfloat16)[..., :16, :]
    block, kernel = KeyBlock(0, slice(None), slice(None), causal), GPUKernel()
    y, log_sum = kernel.forward(block, q, k, v)
    assert (y.shape, y.dtype) == (q.shape, torch.bfloat16)
    assert (log_sum.shape, log_sum.dtype) == (q.shape[:3], torch.float32)
    found = kernel.backward(block, torch.empty_like(y), q, k, v, y, log_sum)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, torch.bfloat16) for x in (q, k, v)]


@pytest.mark.parametrize("cp", [2, 3, 8])
def test_every_rank_computes_the_same_scores(cp: int) -> None:
    """(S/c)^2 (1/2 + (c - 1)/2) scores: those of the lower triangle, no more, in equal shares."""
    length = 48 // cp
    for rank in range(cp):
        own, others = attention_blocks(Axis("cp", rank, cp), length)
        everything = range(length)
        sizes = [len(everything[block.rows]) * len(everything[block.columns]) for block in others]
        assert own.causal
        assert sum(sizes) == (cp - 1) * length**2 // 2


def test_ranks_beyond_the_window_are_left_out() -> None:
    """Pieces of 4 tokens: with a window of 5 a token reaches into the neighbouring piece, of 6 beyond it."""
    near = [block.source for block in attention_blocks(Axis("cp", 0, 4), 8, window=5)[1]]
    further = [block.source for block in attention_blocks(Axis("cp", 0, 4), 8, window=6)[1]]
    assert (near, further) == ([1], [1, 2])


@pytest.mark.parametrize(
    ("cp", "length", "window", "dropout"),
    thinned(
        [
            *((2, LONG, 0, 0.0), (4, LONG, 0, 0.0)),
            *((2, 32, 3, 0.0), (4, 32, 5, 0.0), (4, 32, 6, 0.0), (4, 32, 0, 0.3), (2, 36, 7, 0.3)),
        ],
        2,
    ),
)
def test_attention_over_ranks_equals_one_process(cp: int, length: int, window: int, dropout: float) -> None:
    """Results and gradients of queries, keys and values in float64; fewer heads of keys than of queries."""
    for differences in run_on_ranks(compare_with_whole, length, window, dropout, cp=cp):
        assert max(differences) < 1e-12


def compare_with_whole(ctx: ParallelContext, length: int, window: int, p: float) -> list[float]:
    torch.manual_seed(0)
    samples = 1 if length == LONG else B
    whole = [
        torch.randn(samples, heads, length, D, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    dy = torch.randn(samples, HEADS, length, D, dtype=torch.float64)
    stream, place = DropoutStream.of_micro_batch(1, 0, samples, ctx.device), site_keys([(3, "attention")])[0]
    expected = attention_of_whole(*whole, window, p, stream, place)
    expected.backward(dy)

    def drop(x: Tensor, heads: range, rows: Tensor, columns: Tensor) -> Tensor:
        how = {"length": length, "heads": heads, "rows": rows, "columns": columns}
        return stream.probabilities_at(x, p, place, **how)

    own = [local_tokens(x.detach(), ctx.cp, 2).requires_grad_() for x in whole]
    with patch.object(module, "MOST_SCORES", 100):  # a few heads at a time
        y = context_attention(*own, ctx.cp, window=window, drop=drop if p else None)
        y.backward(local_tokens(dy, ctx.cp, 2))
    assert all(x.grad is not None for x in (*own, *whole))
    pairs = [(y, expected), *((x.grad, full.grad) for x, full in zip(own, whole, strict=True))]
    return [float((mine - local_tokens(full, ctx.cp, 2)).abs().max()) for mine, full in pairs]  # type: ignore


def attention_of_whole(
    q: Tensor, k: Tensor, v: Tensor, window: int, p: float, stream: DropoutStream, place: Tensor
) -> Tensor:
    length = q.shape[2]
    if not window and not p:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = (q @ k.mT / D**0.5).masked_fill(~window_mask(length, window or length, q.device), -torch.inf)
    rows = torch.arange(HEADS * length, dtype=torch.int32)
    keep = draw_keep_mask(rows[None], (stream.keys ^ place)[:, None], length, p).view(scores.shape)
    return dropped(torch.softmax(scores, -1), keep, p) @ v if p else torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("cp", [2, 4])
def test_bytes_sent_equal_the_closed_formula(cp: int) -> None:
    """A rank sends (c - 1)/c of keys and values forward, twice that backward; shared heads once."""
    length = 64
    n = 2 * B * KV_HEADS * length * D * 4
    for forward, whole in run_on_ranks(count_bytes, length, cp=cp):
        assert forward == {"all_gather": n * (cp - 1) // cp}
        assert whole == {"all_gather": 2 * n * (cp - 1) // cp, "reduce_scatter": n * (cp - 1) // cp}


def count_bytes(ctx: ParallelContext, length: int) -> tuple[dict[str, int], dict[str, int]]:
    sent: Counter[str] = Counter()

    def counted(name: str, share: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor, axis: Axis) -> Any:
            sent[name] += x.nbytes // share * (axis.size - 1)
            return original(x, axis)

        return call

    cp = ctx.cp
    q, k, v = (
        torch.randn(B, heads, length // cp.size, D, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    gather = counted("all_gather", 1, module.start_all_gather)
    scatter = counted("reduce_scatter", cp.size, module.reduce_scatter)
    with patch.object(module, "start_all_gather", gather), patch.object(module, "reduce_scatter", scatter):
        y = context_attention(q, k, v, cp)
        forward = dict(sent)
        y.sum().backward()
    return forward, dict(sent)
