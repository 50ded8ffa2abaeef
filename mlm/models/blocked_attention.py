"""Causal attention in blocks of queries, by batched products of several heads: for CPUs, and for softcaps.

Windows of long sequences on a GPU use FlashAttention (`windowed_flash_attention`).

PyTorch's fused kernel multiplies tiles of 32 queries of one head, with 50 to 75 GFLOP/s on a Zen 4 core whose
products of bfloat16 reach 220. Here one product multiplies a block of queries of several heads by all keys up
to its end; only the block's triangle of masked scores is computed, and no keys before a window. Softcaps of
scores, which PyTorch's fused kernels lack, are computed here at any length and dtype; on a GPU by a kernel
that FlexAttention generates (`generated_attention`), unless runs must be deterministic.

Scores are float32, also for bfloat16 queries, as in the fused kernel: rounding them to bfloat16 would change
them by 2^-9, and probabilities by exp(2^-9 s). No tensor of size S * S outlives a block: backward recomputes
the probabilities, as flash attention does (arXiv:2205.14135, section 3.1).

Shapes: S sequence, B micro-batch, D head_dim, K heads of keys and values, g queries to each; c = b h heads of
keys of b samples at a time, r rows of queries in a block, e keys that some of them see.
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from mlm.parallel.compute_state import skip_compile
from mlm.parallel.config import PLAIN_SCORES, AttentionScores
from mlm.parallel.matmul import onednn_is_faster

BLOCK_ROWS = 64
"""Queries in a block: more queries compute more of the masked triangle, fewer starve the products."""
BUFFER_BYTES = 2 << 20
"""Scores at a time, so that they stay in the cache."""
ACCELERATOR_BLOCK_ROWS, ACCELERATOR_BUFFER_BYTES = 512, 256 << 20
"""The same for other devices, where few large launches are faster."""
LONGEST_MASK = 4096
"""Longest sequence whose window is a mask of all pairs of tokens for PyTorch's fused kernel."""
WINDOWED_LENGTH = 512
"""Shortest sequence with a window for which blocks are faster on a CPU. The kernel's time with a mask over
blocks', 4 heads of 64 on a Zen 4 core, in float32 and bfloat16: 1.1 and 1.5 at S = 512 with a window
of 400, 1.7 and 2.1 with 128, 2.7 and 3.2 at S = 1024 with 128, 6.5 and 6.7 at S = 4096 with 512."""
AMX_LENGTH = 160
"""Longest sequence in bfloat16 for which blocks are faster where the fused kernel has AMX.

Its time over blocks' on an Intel Xeon: 1.54 at S = 64, 1.42 at 128, 0.84 at 192, 0.66 at 512.
"""
LENGTHS = {
    torch.float32: range(257, 513) if onednn_is_faster() else range(0),
    torch.bfloat16: range(32, 1 + (AMX_LENGTH if torch.cpu._is_amx_tile_supported() else 512)),
}
"""Sequences for which blocks are faster than the fused kernel. Its time over blocks', forward and
backward on two Zen 4 cores: 4 x 6 heads of 64 at S = 512 1.30 in bfloat16 and 1.23 in float32; 8 x 4 of 64 at
S = 256 1.37 and 1.0; 8 x 4 of 16 at S = 128 1.6 and 1.0; 2 x 16 of 64 at S = 1024 0.8 and 1.05. On an Intel
Xeon the kernel's float32 products are as fast as these, and it is faster at all lengths: 0.90 at S = 512."""


@dataclass(frozen=True)
class HeadLayout:
    """Location of queries, keys and values among the heads of [..., S, heads, D]."""

    query: slice
    key: slice
    value: slice

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, K, g, S, D], keys and values [B, K, S, D]: views of x [B, S, heads, D]."""
        q, k, v = (x[:, :, heads].transpose(1, 2) for heads in (self.query, self.key, self.value))
        return q.unflatten(1, (k.shape[1], -1)), k, v


FUSED = HeadLayout(slice(0, None, 3), slice(1, None, 3), slice(2, None, 3))
"""Rows of a fused qkv weight: [head][q, k, v][head_dim]."""


def uses_blocks(x: Tensor, scores: AttentionScores = PLAIN_SCORES) -> bool:
    """True if causal attention to heads [S, B, ...] is faster in blocks, or has no fused kernel."""
    if scores.softcap:
        return True
    if scores.hides(len(x)):
        return len(x) > LONGEST_MASK or (x.is_cpu and x.dtype in LENGTHS and len(x) >= WINDOWED_LENGTH)
    lengths = LENGTHS.get(x.dtype, range(0))
    return x.is_cpu and lengths.start <= len(x) < lengths.stop  # a compiler's length is in no range


def uses_windowed_flash(x: Tensor, head_dim: int, scores: AttentionScores) -> bool:
    """True if FlashAttention computes the windows of heads [S, B, ...] too long for a mask of all pairs."""
    if scores.softcap or not scores.hides(len(x)) or len(x) <= LONGEST_MASK:
        return False
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16) or head_dim % 8 or head_dim > 256:
        return False
    return torch.backends.cuda.flash_sdp_enabled() and torch.cuda.get_device_capability() >= (8, 0)


@skip_compile
def windowed_flash_attention(q: Tensor, k: Tensor, v: Tensor, scores: AttentionScores) -> Tensor:
    """Attention of a window by the kernel that skips the keys outside it.

    Queries [B, n, S, D], keys and values [B, k, S, D] -> [S, B, n D].
    """
    from torch.nn.attention.varlen import varlen_attn  # loads the kernels' registration

    b, n, s, _ = q.shape
    begins = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=q.device)
    k, v = (x.repeat_interleave(n // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B S, n, D]
    window = (scores.window - 1, 0)  # tokens before and after a query's
    y = varlen_attn(q, k, v, begins, begins, s, s, scale=scores.scale, window_size=window)
    assert isinstance(y, Tensor)  # no auxiliary results were asked for
    merged: Tensor = y.unflatten(0, (b, s)).transpose(0, 1).flatten(2)
    return merged


def uses_generated_kernel(x: Tensor, head_dim: int, scores: AttentionScores) -> bool:
    """True if a GPU's kernel that PyTorch generates computes the softcaps of heads [S, B, ...]."""
    if not scores.softcap or not x.is_cuda or x.dtype == torch.float64:
        return False
    if head_dim not in (16, 32, 64, 128, 256) or torch.are_deterministic_algorithms_enabled():
        return False
    return torch.backends.cuda.flash_sdp_enabled() and torch.cuda.get_device_capability() >= (8, 0)


@skip_compile
def generated_attention(q: Tensor, k: Tensor, v: Tensor, scores: AttentionScores) -> Tensor:
    """Causal attention with a softcap, maybe a window, by a kernel generated for them (FlexAttention).

    Queries [B, n, S, D], keys and values [B, k, S, D] -> [S, B, n D]. Scores stay in the kernel.
    """
    mask = _visible_blocks(q.shape[2], scores.window, q.device)
    cap = _softcap(scores.softcap)
    grouped = q.shape[1] != k.shape[1]
    y: Tensor = _generator()(q, k, v, score_mod=cap, block_mask=mask, scale=scores.scale, enable_gqa=grouped)
    return y.permute(2, 0, 1, 3).flatten(2)


@cache
def _generator() -> Any:
    from torch.nn.attention.flex_attention import flex_attention  # loads the compiler

    return torch.compile(flex_attention, dynamic=False)


@cache
def _softcap(cap: float) -> Any:
    return lambda score, _b, _h, _query, _key: cap * torch.tanh(score / cap)


@lru_cache(maxsize=16)
def _visible_blocks(length: int, window: int, device: torch.device) -> Any:
    """Blocks of queries and keys that see each other: the kernel skips the others."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < (window or length))

    return create_block_mask(sees, None, None, length, length, device=device.type)


@skip_compile  # its loops would be unrolled
def causal_attention_in_blocks(
    x: Tensor, layout: HeadLayout, scores: AttentionScores = PLAIN_SCORES, sinks: Tensor | None = None
) -> Tensor:
    """Causal softmax(q k^T / sqrt(D)) v of heads [S, B, heads, D] -> [S, B, K g D]. Differentiable once.

    `sinks` [K g] are logits of a key without a value that every query sees.
    """
    y: Tensor = _BlockedAttention.apply(x, sinks, layout, scores)  # type: ignore[no-untyped-call]
    return y.flatten(2)


class _Blocks:
    """Walk over samples, heads and blocks of queries, with the buffers that all of them use."""

    def __init__(self, x: Tensor, layout: HeadLayout, scores: AttentionScores) -> None:
        queries = layout.split(x.transpose(0, 1))[0]
        self.batch, self.heads, self.queries, self.length, self.width = queries.shape
        self.settings, self.dtype = scores, torch.promote_types(x.dtype, torch.float32)
        rows, buffer_bytes = BLOCK_ROWS, BUFFER_BYTES
        if not x.is_cpu:
            rows, buffer_bytes = ACCELERATOR_BLOCK_ROWS, ACCELERATOR_BUFFER_BYTES
        self.rows = min(rows, self.length)
        self.factor = scores.factor(self.width)
        visible = min(self.length, self.rows + scores.window - 1) if scores.window else self.length
        per_head = self.queries * self.rows * visible
        most = max(1, buffer_bytes // (4 * per_head))
        heads, samples = min(most, self.heads), max(1, most // self.heads)
        # heads of a range of samples are computed side by side
        self.sample_ranges = [slice(n, n + samples) for n in range(0, self.batch, samples)]
        self.head_ranges = [slice(n, n + heads) for n in range(0, self.heads, heads)]
        # the last block of queries first: it needs all keys, so that it begins their sums
        firsts = reversed(range(0, self.length, self.rows))
        self.query_ranges = [slice(first, min(first + self.rows, self.length)) for first in firsts]
        size = min(heads * samples, self.batch * self.heads) * per_head
        self.scores = torch.empty(size, dtype=self.dtype, device=x.device)
        self.rounded_scores = torch.empty(size, dtype=x.dtype, device=x.device)
        self.tanh = torch.empty_like(self.scores) if scores.softcap else self.scores
        # 0 where a query sees a key of its block, -inf elsewhere
        self.past = torch.full((self.rows, self.rows), -math.inf, dtype=self.dtype, device=x.device)
        self.future = self.past.triu(1)

    def columns(self, rows: slice) -> slice:
        """Range of the keys that the queries of a block see."""
        window = self.settings.window
        return slice(max(0, rows.start - window + 1) if window else 0, rows.stop)

    def sinks_of(self, sinks: Tensor | None, samples: slice, heads: slice) -> Tensor | None:
        """Sinks of a range of heads and samples: [K g] -> [c, g, 1]."""
        if sinks is None:
            return None
        count = min(samples.stop, self.batch) - samples.start
        return sinks.to(self.dtype).view(self.heads, -1)[heads].repeat(count, 1).unsqueeze(-1)

    def probabilities(self, q: Tensor, k: Tensor, rows: slice, sinks: Tensor | None = None) -> Tensor:
        """Softmax of a block's scores: q [c, g, S, D] scaled, k [c, S, D], float32 -> [c, g r, e].

        With a softcap `tanh` is valid until the next block. `sinks` [c, g, 1] take a part of each row.
        """
        c, g, columns, cap = k.shape[0], q.shape[1], self.columns(rows), self.settings.softcap
        r, end = rows.stop - rows.start, columns.stop - columns.start
        p = self.scores[: c * g * r * end].view(c, g * r, end)
        torch.bmm(q[:, :, rows].flatten(1, 2), k[:, columns].transpose(1, 2), out=p)
        if cap:
            torch.mul(torch.tanh(p.div_(cap), out=self.tanh[: p.numel()].view(p.shape)), cap, out=p)
        by_row = p.view(c, g, r, end)
        by_row[..., end - r :].add_(self.future[:r, :r])
        if self.settings.hides(rows.stop):
            # key j is hidden from row i where columns.start + j <= rows.start + i - window
            before = self.past.tril(rows.start - self.settings.window - columns.start)
            by_row[..., :r].add_(before[:r, :r])
        if sinks is None:
            return torch.softmax(p, -1, out=p)
        share = torch.sigmoid(p.logsumexp(-1).view(c, g, r) - sinks)
        return torch.softmax(p, -1, out=p).mul_(share.view(c, g * r, 1))

    def score_gradient(self, dp: Tensor, p: Tensor, d_sinks: Tensor | None = None) -> Tensor:
        """Gradient of q k^T from the gradient of the last block's probabilities, in place: [c, g r, e].

        The gradients of a row and its sink add up to 0: the row's sum is subtracted from `d_sinks` [c, g].
        """
        torch._softmax_backward_data(dp, p, -1, self.dtype, grad_input=dp)
        if d_sinks is not None:
            d_sinks -= dp.sum(-1).view(*d_sinks.shape, -1).sum(-1)
        if self.settings.softcap:
            tanh = self.tanh[: dp.numel()].view(dp.shape)
            dp.mul_(tanh.square_().neg_().add_(1))
        return self.round(dp.mul_(self.factor))

    def round(self, x: Tensor) -> Tensor:
        """Return scores `x` in the dtype of the inputs."""
        y = self.rounded_scores
        return x if x.dtype == y.dtype else y[: x.numel()].view(x.shape).copy_(x)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sinks: Tensor | None, layout: HeadLayout, scores: AttentionScores
    ) -> Tensor:
        ctx.layout, ctx.scores = layout, scores
        ctx.save_for_backward(x, sinks)
        blocks = _Blocks(x, layout, scores)
        y = x.new_empty(*x.shape[:2], blocks.heads * blocks.queries, blocks.width)
        for samples in blocks.sample_ranges:
            local_x = x[:, samples].transpose(0, 1).contiguous()  # [b, S, heads, D]
            local_y = local_x.new_empty(*local_x.shape[:2], *y.shape[2:])
            out = local_y.transpose(1, 2).unflatten(1, (blocks.heads, -1))  # [b, K, g, S, D]
            queries, keys, values = layout.split(local_x)
            for heads in blocks.head_ranges:
                q = (queries[:, heads].to(blocks.dtype) * blocks.factor).flatten(0, 1)  # [c, g, S, D]
                k, v = keys[:, heads].to(blocks.dtype).flatten(0, 1), values[:, heads].flatten(0, 1)
                target, local_sinks = out[:, heads], blocks.sinks_of(sinks, samples, heads)
                for rows in blocks.query_ranges:
                    p = blocks.round(blocks.probabilities(q, k, rows, local_sinks))
                    part = torch.bmm(p, v[:, blocks.columns(rows)])
                    target[..., rows, :] = part.view(*target.shape[:3], -1, blocks.width)
            y[:, samples] = local_y.transpose(0, 1)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, sinks = ctx.saved_tensors
        layout: HeadLayout = ctx.layout
        blocks, dx = _Blocks(x, layout, ctx.scores), torch.empty_like(x)
        d_sinks = None if sinks is None else x.new_zeros(blocks.heads, blocks.queries, dtype=blocks.dtype)
        for samples in blocks.sample_ranges:
            local_x, local_dy = (t[:, samples].transpose(0, 1).contiguous() for t in (x, dy))
            local_dx = torch.empty_like(local_x)
            out = local_dy.transpose(1, 2).unflatten(1, (blocks.heads, -1))
            inputs, outputs = layout.split(local_x), layout.split(local_dx)
            for heads in blocks.head_ranges:
                queries, keys, values = (t[:, heads] for t in inputs)
                local_sinks = blocks.sinks_of(sinks, samples, heads)
                d_local = None if local_sinks is None else torch.zeros_like(local_sinks[..., 0])  # [c, g]
                gradients = _gradients(blocks, queries, keys, values, out[:, heads], local_sinks, d_local)
                if d_sinks is not None and d_local is not None:
                    d_sinks[heads] += d_local.view(-1, *d_sinks[heads].shape).sum(0)
                for t, gradient in zip(outputs, gradients, strict=True):
                    t[:, heads] = gradient.view(t[:, heads].shape)
            dx[:, samples] = local_dx.transpose(0, 1)
        return dx, None if d_sinks is None else d_sinks.flatten().to(sinks.dtype), None, None


def _gradients(
    blocks: _Blocks,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    sinks: Tensor | None,
    d_sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries [c, g, S, D], keys and values [c, S, D] of a range of heads; the last two float32.

    The gradient of `sinks` [c, g, 1] is added to `d_sinks` [c, g]. `out` [b, h, g, S, D] is the gradient of
    the output; the other arguments are as `HeadLayout.split` returns them.
    """
    q, k, v, dy = queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), out.flatten(0, 1)
    scaled_q, k32 = q.to(blocks.dtype) * blocks.factor, k.to(blocks.dtype)
    dq, sums = torch.empty_like(q), list[Tensor]()  # of keys and values
    if blocks.settings.hides(blocks.length):
        sums = [torch.zeros_like(k32), torch.zeros_like(k32)]
    for rows in blocks.query_ranges:
        columns = blocks.columns(rows)
        p = blocks.probabilities(scaled_q, k32, rows, sinks)  # [c, g r, e] float32
        g = dy[:, :, rows].flatten(1, 2)  # [c, g r, D]
        dp = torch.bmm(g, v[:, columns].transpose(1, 2)).to(blocks.dtype)
        dv = _add_product(sums[1] if sums else None, blocks.round(p), g, columns)
        ds = blocks.score_gradient(dp, p, d_sinks)
        dq[:, :, rows] = torch.bmm(ds, k[:, columns]).view(dq[:, :, rows].shape)
        dk = _add_product(sums[0] if sums else None, ds, q[:, :, rows].flatten(1, 2), columns)
        sums = [dk, dv]
    return dq, sums[0], sums[1]


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, columns: slice) -> Tensor:
    """Add a^T b to e rows of `total` [c, S, D] in float32: [c, g r, e], [c, g r, D].

    None starts the sum: without a window the last block of queries, the first one here, sees all keys.
    """
    if total is None:
        product = torch.bmm(a.transpose(1, 2), b)
        return product.to(torch.promote_types(product.dtype, torch.float32))
    rows = total[:, columns]
    if a.dtype == total.dtype:
        rows.baddbmm_(a.transpose(1, 2), b)
    else:
        rows += torch.bmm(a.transpose(1, 2), b)
    return total
