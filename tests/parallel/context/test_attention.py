"""Attention over sequences that ranks split: numbers, bytes sent, balance, kernels and rounding."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.models.cache import window_mask
from mlm.parallel import context as module
from mlm.parallel.config import PLAIN_SCORES, AttentionScores
from mlm.parallel.context import (
    CPUKernel,
    GPUKernel,
    Kernel,
    KeyBlock,
    UnfusedKernel,
    attention_blocks,
    context_attention,
    local_tokens,
)
from mlm.parallel.dropout import DropoutStream, apply_dropout, draw_keep_mask, site_keys
from mlm.parallel.mesh import Axis, ParallelContext
from tests.ranks import run_on_ranks

B, HEADS, KV_HEADS, D = 2, 4, 2, 8
LONG = 1024
BF16, META = torch.bfloat16, "meta"
LENGTH = 512


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS])
def test_the_kernel_of_a_gpu_takes_what_it_is_given(kv_heads: int, causal: bool) -> None:
    """PyTorch's own signature, dtypes and shapes, forward and backward, on the meta device."""
    q = torch.empty(16, B, HEADS, D, device="meta", dtype=torch.bfloat16).permute(1, 2, 0, 3)
    k = v = torch.empty(B, kv_heads, 32, D, device="meta", dtype=torch.bfloat16)[..., :16, :]
    block, kernel = KeyBlock(0, 0, slice(None), slice(None), causal), GPUKernel()
    y, log_sum = kernel.forward(block, q, k, v)
    assert (y.shape, y.dtype) == (q.shape, torch.bfloat16)
    assert (log_sum.shape, log_sum.dtype) == (q.shape[:3], torch.float32)
    found = kernel.backward(block, torch.empty_like(y), q, k, v, y, log_sum)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, torch.bfloat16) for x in (q, k, v)]


@pytest.mark.parametrize("cp", [2, 8])
def test_every_rank_computes_the_same_scores(cp: int) -> None:
    """(S/c)^2 (1/2 + (c - 1)/2) scores: those of the lower triangle, no more, in equal shares."""
    length = 48 // cp
    for rank in range(cp):
        ((own, others),) = attention_blocks(Axis("cp", rank, cp), length)
        everything = range(length)
        sizes = [len(everything[block.rows]) * len(everything[block.columns]) for block in others]
        assert own.causal
        assert sum(sizes) == (cp - 1) * length**2 // 2


def test_ranks_beyond_the_window_are_left_out() -> None:
    """Pieces of 4 tokens: with a window of 5 a token reaches into the neighbouring piece, of 6 beyond it."""
    near = [block.source for block in attention_blocks(Axis("cp", 0, 4), 8, window=5)[0][1]]
    further = [block.source for block in attention_blocks(Axis("cp", 0, 4), 8, window=6)[0][1]]
    assert (near, further) == ([1], [1, 2])


@pytest.mark.parametrize(
    ("cp", "length", "scores", "dropout"),
    [
        *((2, LONG, PLAIN_SCORES, 0.0), (4, 32, AttentionScores(window=6), 0.0)),
        *((4, 32, PLAIN_SCORES, 0.3), (2, 36, AttentionScores(window=7), 0.3)),
        (4, 32, AttentionScores(window=9, softcap=0.8, scale=0.9), 0.0),
    ],
)
def test_attention_over_ranks_equals_one_process(
    cp: int, length: int, scores: AttentionScores, dropout: float
) -> None:
    """Results and gradients of queries, keys and values in float64; fewer heads of keys than of queries."""
    for differences in run_on_ranks(compare_with_whole, length, scores, dropout, cp=cp):
        assert max(differences) < 1e-12


def test_sinks_over_ranks_equal_those_of_one_process() -> None:
    """Their gradients are each rank's term of a sum over cp, as of all parameters."""
    scores = AttentionScores(window=9)
    results = run_on_ranks(compare_with_whole, 32, scores, 0.0, True, cp=2)
    assert max(max(differences[:4]) for differences in results) < 1e-12
    total = [sum(parts) for parts in zip(*(differences[4:] for differences in results), strict=True)]
    expected = run_on_ranks(compare_with_whole, 32, scores, 0.0, True, cp=1)[0][4:]
    assert total == pytest.approx(expected, rel=1e-12)


def compare_with_whole(
    ctx: ParallelContext, length: int, rule: AttentionScores, p: float, has_sinks: bool = False
) -> list[float]:
    torch.manual_seed(0)
    samples = 1 if length == LONG else B
    whole = [
        torch.randn(samples, heads, length, D, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    dy = torch.randn(samples, HEADS, length, D, dtype=torch.float64)
    stream, place = DropoutStream.of_micro_batch(1, 0, samples, ctx.device), site_keys([(3, "attention")])[0]
    sinks = torch.randn(HEADS, dtype=torch.float64, requires_grad=True) if has_sinks else None
    expected = attention_of_whole(*whole, rule, p, stream, place, sinks)
    expected.backward(dy)
    own_sinks = None if sinks is None else sinks.detach().requires_grad_()

    def drop(x: Tensor, heads: range, rows: Tensor, columns: Tensor) -> Tensor:
        how = {"length": length, "heads": heads, "rows": rows, "columns": columns}
        return stream.probabilities_at(x, p, place, **how)

    own = [local_tokens(x.detach(), ctx.cp, 2).requires_grad_() for x in whole]
    with patch.object(module, "MOST_SCORES", 100):  # a few heads at a time
        y = context_attention(*own, ctx.cp, scores=rule, drop=drop if p else None, sinks=own_sinks)
        y.backward(local_tokens(dy, ctx.cp, 2))
    assert all(x.grad is not None for x in (*own, *whole))
    pairs = [(y, expected), *((x.grad, full.grad) for x, full in zip(own, whole, strict=True))]
    found = [float((mine - local_tokens(full, ctx.cp, 2)).abs().max()) for mine, full in pairs]  # type: ignore
    if own_sinks is None or sinks is None:
        return found
    return [*found, *(own_sinks.grad if ctx.cp.size > 1 else sinks.grad).tolist()]


def attention_of_whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionScores,
    p: float,
    stream: DropoutStream,
    place: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    length, window = q.shape[2], rule.window
    if rule == PLAIN_SCORES and not p and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = q @ k.mT * (rule.scale or D**-0.5)
    scores = torch.tanh(scores / rule.softcap) * rule.softcap if rule.softcap else scores
    scores = scores.masked_fill(~window_mask(length, window or length, q.device), -torch.inf)
    if sinks is not None:
        column = sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ v
    rows = torch.arange(HEADS * length, dtype=torch.int32)
    keep = draw_keep_mask(rows[None], (stream.keys ^ place)[:, None], length, p).view(scores.shape)
    return apply_dropout(torch.softmax(scores, -1), keep, p) @ v if p else torch.softmax(scores, -1) @ v


def test_bytes_sent_equal_the_closed_formula() -> None:
    """A rank sends (c - 1)/c of keys and values forward, twice that backward; shared heads once."""
    length, cp = 64, 4
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


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "options", "kind"),
    [
        *(("cpu", BF16, 8, {}, CPUKernel), (META, torch.float16, 256, {}, GPUKernel)),
        # FlashAttention knows half precision alone, and heads of multiples of 8 up to 256
        *((META, torch.float32, 64, {}, UnfusedKernel), (META, BF16, 20, {}, UnfusedKernel)),
        ("cpu", BF16, 8, {"scores": AttentionScores(window=3)}, UnfusedKernel),
        (META, BF16, 64, {"drop": lambda p, *_: p}, UnfusedKernel),
    ],
)
def test_each_device_dtype_and_width_has_its_kernel(
    device: str, dtype: torch.dtype, head_dim: int, options: dict[str, Any], kind: type[Kernel]
) -> None:
    x = torch.empty(1, 2, 4, head_dim, device=device, dtype=dtype)
    with patch.object(module._ContextAttention, "apply") as apply:
        context_attention(x, x, x, Axis("cp", 0, 2), **options)
    assert type(apply.call_args.args[3]) is kind


@pytest.mark.parametrize("causal", [False, True])
def test_a_gpus_kernel_masks_the_ranks_own_keys_alone(causal: bool) -> None:
    """Forward and backward; keys of other ranks are all before the queries."""
    x = torch.empty(1, 2, 4, 8, device=META, dtype=BF16)
    block, kernel, aten = KeyBlock(0, 0, slice(None), slice(None), causal), GPUKernel(), torch.ops.aten
    sums = torch.empty(1, 2, 4, device=META)
    with (
        patch.object(aten, "_scaled_dot_product_flash_attention", return_value=(x, sums)) as forward,
        patch.object(
            aten, "_scaled_dot_product_flash_attention_backward", return_value=(x, x, x)
        ) as backward,
    ):
        kernel.forward(block, x, x, x)
        kernel.backward(block, x, x, x, x, x, sums)
    assert forward.call_args.args[3:] == (0.0, causal)
    assert backward.call_args.args[10:12] == (0.0, causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_does_not_grow_with_the_ranks(dtype: torch.dtype) -> None:
    """Results and gradients of queries, summed over 2 or 16 ranks' keys, against float64 of the same inputs.

    A sum in half precision is rounded with each block: at 16 ranks 1.8 and 1.5 times as much as at 2; a sum
    in float32 1.09 times at most.
    """
    few, many = rounding(dtype, 2), rounding(dtype, 16)
    for name in ("y", "dq"):
        assert many[name] < 1.25 * few[name]
        assert few[name] < torch.finfo(dtype).eps / 2


def test_a_window_of_all_tokens_rounds_scores_no_more_than_none() -> None:
    """Of scores of up to 50: rounded to half precision, results are six and gradients three times as far off.

    A window's kernel rounds the products of output gradients and values: 1.6 times.
    """
    without, windowed = (rounding(BF16, 2, window, sharpness=10.0) for window in (0, LENGTH))
    for name in ("y", "dq"):
        assert windowed[name] < 2 * without[name]


def rounding(dtype: torch.dtype, cp: int, window: int = 0, sharpness: float = 1.0) -> dict[str, float]:
    """Relative errors of `cp` ranks, which run one after another; `sharpness` is a factor of queries."""
    torch.manual_seed(0)
    sizes = (4, sharpness), (2, 1.0), (2, 1.0)
    whole = [(factor * torch.randn(1, heads, LENGTH, 16)).to(dtype) for heads, factor in sizes]
    dy = torch.randn(1, 4, LENGTH, 16).to(dtype)
    exact = [x.double().requires_grad_() for x in whole]
    y = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    y.backward(dy.double())
    axes = [Axis("cp", rank, cp) for rank in range(cp)]
    pairs = torch.stack([torch.stack([local_tokens(x, axis, 2) for x in whole[1:]]) for axis in axes])
    found: dict[str, list[Tensor]] = {"y": [], "dq": []}
    with (
        patch.object(module, "start_all_gather", lambda x, axis: SimpleNamespace(wait=lambda: pairs)),
        patch.object(module, "reduce_scatter", lambda x, axis: x[axis.rank][None]),
    ):
        for axis in axes:
            q, k, v = (local_tokens(x, axis, 2).requires_grad_() for x in whole)
            mine = context_attention(q, k, v, axis, scores=AttentionScores(window=window))
            mine.backward(local_tokens(dy, axis, 2))
            found["y"].append(mine.detach() - local_tokens(y.detach(), axis, 2))
            found["dq"].append(q.grad - local_tokens(exact[0].grad, axis, 2))  # type: ignore[arg-type]
    scales = {"y": y.detach(), "dq": exact[0].grad}
    return {name: float(torch.cat(errors, 2).norm() / scales[name].norm()) for name, errors in found.items()}  # type: ignore[union-attr]
