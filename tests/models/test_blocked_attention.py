"""Causal attention in blocks against PyTorch's in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.models import blocked_attention
from mlm.models.blocked_attention import (
    BUFFER_BYTES,
    FUSED,
    HeadLayout,
    causal_attention_in_blocks,
    generated_attention,
    uses_blocks,
    uses_generated_kernel,
    uses_windowed_flash,
    windowed_flash_attention,
)
from mlm.parallel.config import PLAIN_SCORES, AttentionScores
from mlm.parallel.context import context_attention
from mlm.parallel.matmul import onednn_is_faster
from mlm.parallel.mesh import Axis

GROUPED = HeadLayout(slice(4), slice(4, 6), slice(6, None))
"""Four heads of queries that share two of keys and values."""
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
"""Of the largest number. Scores reach 20, where half an ulp of float32 is 1e-6: the roundings of a score, of
the log-sum-exp and of their difference each enter the exponential."""


def exact(
    x: Tensor, layout: HeadLayout, scores: AttentionScores = PLAIN_SCORES, sinks: Tensor | None = None
) -> Tensor:
    """Attention to heads [S, B, heads, D] by PyTorch's kernel or formula: [S, B, n D]."""
    q, k, v = (x[:, :, heads].permute(1, 2, 0, 3) for heads in (layout.query, layout.key, layout.value))
    if scores == PLAIN_SCORES and sinks is None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        s = q @ k.mT * (scores.scale or q.shape[-1] ** -0.5)
        s = scores.softcap * torch.tanh(s / scores.softcap) if scores.softcap else s
        tokens = torch.arange(len(x), device=x.device)
        distance = tokens[:, None] - tokens
        hidden = (distance < 0) | (distance >= (scores.window or len(x)))
        s = s.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            s = torch.cat([s, sinks.view(-1, 1, 1).expand(*s.shape[:3], 1)], -1)
        y = s.softmax(-1)[..., : len(x)] @ v
    return y.permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("scores", "layout", "buffer_bytes"),
    [
        *((PLAIN_SCORES, layout, size) for layout in (FUSED, GROUPED) for size in (1, 40_000)),
        *((AttentionScores(window=window), GROUPED, BUFFER_BYTES) for window in (1, 16, 17, 40)),
        (AttentionScores(window=21, softcap=3.0), GROUPED, BUFFER_BYTES),
        (AttentionScores(softcap=2.0, scale=0.5), GROUPED, BUFFER_BYTES),
    ],
    ids=str,
)
def test_blocks_give_the_output_and_gradient_of_float64(
    monkeypatch: pytest.MonkeyPatch,
    scores: AttentionScores,
    layout: HeadLayout,
    buffer_bytes: int,
    dtype: torch.dtype,
) -> None:
    """Of all sizes of buffer and window; the last block is shorter than the others."""
    monkeypatch.setattr(blocked_attention, "BLOCK_ROWS", 16)
    monkeypatch.setattr(blocked_attention, "BUFFER_BYTES", buffer_bytes)
    x = 2 * torch.randn(40, 3, 12 if layout is FUSED else 8, 8, generator=torch.Generator().manual_seed(0))
    x = x.to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, reference = causal_attention_in_blocks(x, layout, scores), exact(wide, layout, scores)
    dy = torch.randn(reference.shape).to(dtype)
    gradients = torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(reference, wide, dy.double())[0]
    for found, expected in ((y, reference), gradients):
        off = (found.double() - expected).abs().max() / expected.abs().max()
        assert off < TOLERANCE.get(dtype, 1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "scores",
    [PLAIN_SCORES, AttentionScores(window=5), AttentionScores(window=17), AttentionScores(softcap=2.0)],
    ids=str,
)
def test_sinks_are_a_key_of_each_query_without_a_value(
    monkeypatch: pytest.MonkeyPatch, scores: AttentionScores, dtype: torch.dtype
) -> None:
    """In blocks, and by the log-sum-exps of PyTorch's kernel; gradients of the sinks too."""
    monkeypatch.setattr(blocked_attention, "BLOCK_ROWS", 16)
    monkeypatch.setattr(blocked_attention, "BUFFER_BYTES", 20_000)
    generator = torch.Generator().manual_seed(0)
    x = (2 * torch.randn(40, 3, 8, 8, generator=generator)).to(dtype).requires_grad_()
    sinks = (2 * torch.randn(4, generator=generator)).to(dtype).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (x, sinks)]
    reference = exact(wide[0], GROUPED, scores, wide[1])
    dy = torch.randn(reference.shape, generator=generator).to(dtype)
    expected = (reference, *torch.autograd.grad(reference, wide, dy.double()))
    results = [causal_attention_in_blocks(x, GROUPED, scores, sinks)]
    if scores == PLAIN_SCORES:
        q, k, v = x.permute(1, 2, 0, 3).split([4, 2, 2], 1)
        y = context_attention(q, k, v, Axis("cp"), sinks=sinks)
        results.append(y.permute(2, 0, 1, 3).flatten(2))
    for y in results:
        for found, want in zip((y, *torch.autograd.grad(y, (x, sinks), dy)), expected, strict=True):
            off = (found.double() - want).abs().max() / want.abs().max()
            assert off < TOLERANCE.get(dtype, 1e-13)


def test_a_gpus_kernel_receives_the_window_and_each_samples_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """By PyTorch's documentation a query sees window_size[0] tokens before its own, of its sequence."""

    def by_formula(q: Tensor, k: Tensor, v: Tensor, begins: Tensor, *_: Any, **options: Any) -> Tensor:
        tokens = torch.arange(len(q))
        sample = torch.bucketize(tokens, begins[1:].long(), right=True)
        distance, (left, right) = tokens[:, None] - tokens, options["window_size"]
        seen = (distance >= -right) & (distance <= left) & (sample[:, None] == sample)
        scores = torch.einsum("qnd,knd->nqk", q, k) * options["scale"]
        return torch.einsum("nqk,knd->qnd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_formula)
    x, scores = torch.randn(11, 3, 8, 8, dtype=torch.float64), AttentionScores(window=4, scale=0.3)
    q, k, v = (x[:, :, heads].permute(1, 2, 0, 3) for heads in (slice(4), slice(4, 6), slice(6, None)))
    torch.testing.assert_close(windowed_flash_attention(q, k, v, scores), exact(x, GROUPED, scores))


@pytest.mark.slow
def test_a_generated_kernel_computes_softcaps_and_windows() -> None:
    """PyTorch generates no backward pass for a CPU: gradients are compared where there is a GPU."""
    scores = AttentionScores(window=21, softcap=3.0, scale=0.5)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    needs_grad = device.type == "cuda"
    x = (2 * torch.randn(140, 3, 8, 16, generator=torch.Generator().manual_seed(0))).to(device)
    x.requires_grad_(needs_grad)
    assert uses_generated_kernel(x, 16, scores) == needs_grad
    q, k, v = (x[:, :, heads].permute(1, 2, 0, 3) for heads in (slice(4), slice(4, 6), slice(6, None)))
    wide = x.detach().double().requires_grad_(needs_grad)
    y, reference = generated_attention(q, k, v, scores), exact(wide, GROUPED, scores)
    pairs = [(y, reference)]
    if needs_grad:
        dy = torch.randn_like(y)
        pairs += zip(
            torch.autograd.grad(y, x, dy), torch.autograd.grad(reference, wide, dy.double()), strict=True
        )
    for found, expected in pairs:
        # kernels of a GPU multiply float32 as TF32 unless they are told
        assert (found - expected).abs().max() < (2e-3 if needs_grad else 2e-6) * expected.abs().max()


def test_a_window_of_a_long_sequence_takes_blocks_and_no_mask_of_all_pairs() -> None:
    """Scores that exist at a time are of a block of queries."""
    scores = AttentionScores(window=100)
    assert not uses_blocks(torch.empty(4096, 1, 1, device="meta"), scores)
    assert uses_blocks(torch.empty(4097, 1, 1, device="meta"), scores)
    assert [uses_blocks(torch.empty(length, 1, 1), scores) for length in (511, 512)] == [False, True]
    assert not uses_windowed_flash(torch.empty(4097, 1, 1, dtype=torch.bfloat16), 64, scores)
    assert uses_blocks(torch.empty(9, 1, 1, dtype=torch.float64), AttentionScores(softcap=50.0))
    x = torch.randn(4224, 1, 3, 4, requires_grad=True)
    with torch.autograd.profiler.profile(use_kineto=False, profile_memory=True) as profile:
        y = causal_attention_in_blocks(x, FUSED, scores)
        y.sum().backward()
    assert max(event.cpu_memory_usage for event in profile.function_events) < 4224**2
    tail = exact(x.detach()[-200:], FUSED, scores)[-100:]
    torch.testing.assert_close(y.detach()[-100:], tail, rtol=1e-4, atol=1e-5)


def test_blocks_are_no_further_from_float64_than_the_kernel_in_half_precision() -> None:
    x = (2 * torch.randn(256, 2, 12, 32)).bfloat16()
    wide = x.double().requires_grad_()
    dy = torch.randn(256, 2, 128).bfloat16()
    expected = torch.autograd.grad(exact(wide, FUSED), wide, dy.double())[0]
    errors = []
    for attention in (causal_attention_in_blocks, exact):
        held = x.clone().requires_grad_()
        gradient = torch.autograd.grad(attention(held, FUSED), held, dy)[0]
        errors.append(float((gradient.double() - expected).norm() / expected.norm()))
    assert errors[0] < 1.2 * errors[1]


def test_long_wide_and_tiny_attention_keeps_the_kernel() -> None:
    has_amx = torch.cpu._is_amx_tile_supported()
    assert uses_blocks(torch.empty(160 if has_amx else 512, 1, 1, dtype=torch.bfloat16))
    assert uses_blocks(torch.empty(512, 1, 1)) == onednn_is_faster()
    for length, dtype in (
        (513, torch.bfloat16),
        (31, torch.bfloat16),
        (256, torch.float32),
        (512, torch.float64),
    ):
        assert not uses_blocks(torch.empty(length, 1, 1, dtype=dtype))
    assert not uses_blocks(torch.empty(512, 1, 1, device="meta"))
