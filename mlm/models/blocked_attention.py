"""Causal attention of a CPU in blocks of queries, by batched products of several heads.

PyTorch's fused kernel multiplies tiles of 32 queries of one head, with 50 to 75 GFLOP/s on a Zen 4 core whose
products of bfloat16 reach 220. Here one product multiplies a block of queries of several heads by all keys up
to its end; of the masked scores only the block's triangle is computed.

Scores are float32, also those of bfloat16 queries, as in the fused kernel: rounded to bfloat16 they would be
off by 2^-9 of themselves, and probabilities by exp(2^-9 s). Nothing of size S * S outlives a block: backward
recomputes the probabilities, as flash attention does (arXiv:2205.14135, section 3.1).

Shapes: S sequence, B micro-batch, D head_dim, K heads of keys and values, g queries to each; c = b h heads of
keys of b samples at a time, r rows of queries in a block, e keys up to its end.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlm.parallel.compute_state import skip_compile

BLOCK_ROWS = 64
"""Queries in a block: more compute more of the masked triangle, fewer starve the products."""
BUFFER_BYTES = 2 << 20
"""Scores at a time, which the passes over them should find in the cache."""
AMX_LENGTH = 160
"""Longest sequence in bfloat16 for which blocks are faster where the fused kernel has AMX.

Its time over that of blocks on an Intel Xeon: 1.54 at S = 64, 1.42 at 128, 0.84 at 192, 0.66 at 512.
"""
LENGTHS = {
    torch.float32: range(257, 513),
    torch.bfloat16: range(32, 1 + (AMX_LENGTH if torch.cpu._is_amx_tile_supported() else 512)),
}
"""Sequences for which blocks are faster than the fused kernel. Its time over that of blocks, forward and
backward on two Zen 4 cores: 4 x 6 heads of 64 at S = 512 1.30 in bfloat16 and 1.23 in float32; 8 x 4 of 64 at
S = 256 1.37 and 1.0; 8 x 4 of 16 at S = 128 1.6 and 1.0; 2 x 16 of 64 at S = 1024 0.8 and 1.05."""


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


def pays_in_blocks(x: Tensor) -> bool:
    """True if causal attention to heads [S, B, ...] is faster in blocks."""
    lengths = LENGTHS.get(x.dtype, range(0))
    return x.is_cpu and lengths.start <= len(x) < lengths.stop  # a compiler's length is in no range


@skip_compile  # its loops would be unrolled
def causal_attention_in_blocks(x: Tensor, layout: HeadLayout) -> Tensor:
    """Causal softmax(q k^T / sqrt(D)) v of heads [S, B, heads, D] -> [S, B, K g D]. Differentiable once."""
    y: Tensor = _BlockedAttention.apply(x, layout)  # type: ignore[no-untyped-call]
    return y.flatten(2)


class _Blocks:
    """Walk over samples, heads and blocks of queries, with the buffers that all of them use."""

    def __init__(self, x: Tensor, layout: HeadLayout) -> None:
        queries = layout.split(x.transpose(0, 1))[0]
        self.batch, self.heads, self.queries, self.length, self.width = queries.shape
        self.rows = min(BLOCK_ROWS, self.length)
        self.factor = 1 / math.sqrt(self.width)
        per_head = self.queries * self.rows * self.length
        most = max(1, BUFFER_BYTES // (4 * per_head))
        heads, samples = min(most, self.heads), max(1, most // self.heads)
        # heads of a range of samples are computed side by side
        self.sample_ranges = [slice(n, n + samples) for n in range(0, self.batch, samples)]
        self.head_ranges = [slice(n, n + heads) for n in range(0, self.heads, heads)]
        # the last block of queries first: it needs all keys, so that it begins their sums
        firsts = reversed(range(0, self.length, self.rows))
        self.query_ranges = [slice(first, min(first + self.rows, self.length)) for first in firsts]
        size = min(heads * samples, self.batch * self.heads) * per_head
        self.scores, self.rounded_scores = torch.empty(size), torch.empty(size, dtype=x.dtype)
        self.future = torch.full((self.rows, self.rows), -math.inf).triu_(1)

    def probabilities(self, q: Tensor, k: Tensor, rows: slice) -> Tensor:
        """Softmax of a block's scores: q [c, g, S, D] scaled, k [c, S, D], float32 -> [c, g r, e]."""
        c, g, end = k.shape[0], q.shape[1], rows.stop
        r = end - rows.start
        p = self.scores[: c * g * r * end].view(c, g * r, end)
        torch.bmm(q[:, :, rows].flatten(1, 2), k[:, :end].transpose(1, 2), out=p)
        p.view(c, g, r, end)[..., rows].add_(self.future[:r, :r])
        return torch.softmax(p, -1, out=p)

    def round(self, x: Tensor) -> Tensor:
        """Return scores `x` in the dtype of the inputs."""
        y = self.rounded_scores
        return x if x.dtype == y.dtype else y[: x.numel()].view(x.shape).copy_(x)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: HeadLayout) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(x)
        blocks = _Blocks(x, layout)
        y = x.new_empty(*x.shape[:2], blocks.heads * blocks.queries, blocks.width)
        for samples in blocks.sample_ranges:
            local_x = x[:, samples].transpose(0, 1).contiguous()  # [b, S, heads, D]
            local_y = local_x.new_empty(*local_x.shape[:2], *y.shape[2:])
            out = local_y.transpose(1, 2).unflatten(1, (blocks.heads, -1))  # [b, K, g, S, D]
            queries, keys, values = layout.split(local_x)
            for heads in blocks.head_ranges:
                q = (queries[:, heads].float() * blocks.factor).flatten(0, 1)  # [c, g, S, D]
                k, v = keys[:, heads].float().flatten(0, 1), values[:, heads].flatten(0, 1)
                target = out[:, heads]
                for rows in blocks.query_ranges:
                    p = blocks.round(blocks.probabilities(q, k, rows))
                    part = torch.bmm(p, v[:, : rows.stop])
                    target[..., rows, :] = part.view(*target.shape[:3], -1, blocks.width)
            y[:, samples] = local_y.transpose(0, 1)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        layout: HeadLayout = ctx.layout
        blocks, dx = _Blocks(x, layout), torch.empty_like(x)
        for samples in blocks.sample_ranges:
            local_x, local_dy = (t[:, samples].transpose(0, 1).contiguous() for t in (x, dy))
            local_dx = torch.empty_like(local_x)
            out = local_dy.transpose(1, 2).unflatten(1, (blocks.heads, -1))
            inputs, outputs = layout.split(local_x), layout.split(local_dx)
            for heads in blocks.head_ranges:
                queries, keys, values = (t[:, heads] for t in inputs)
                gradients = _gradients(blocks, queries, keys, values, out[:, heads])
                for t, gradient in zip(outputs, gradients, strict=True):
                    t[:, heads] = gradient.view(t[:, heads].shape)
            dx[:, samples] = local_dx.transpose(0, 1)
        return dx, None


def _gradients(
    blocks: _Blocks, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries [c, g, S, D], keys and values [c, S, D] of some heads; the last two are float32.

    `out` [b, h, g, S, D] is the gradient of their output; the others are as `HeadLayout.split` gives them.
    """
    q, k, v, dy = queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), out.flatten(0, 1)
    scaled_q, k32 = q.float() * blocks.factor, k.float()
    dq, dk, dv = torch.empty_like(q), k32, k32  # the first block begins the sums
    for rows in blocks.query_ranges:
        end, is_first = rows.stop, rows.stop == blocks.length
        p = blocks.probabilities(scaled_q, k32, rows)  # [c, g r, e] float32
        g = dy[:, :, rows].flatten(1, 2)  # [c, g r, D]
        dv = _add_product(None if is_first else dv, blocks.round(p), g)
        ds32 = torch.bmm(g, v[:, :end].transpose(1, 2)).float()
        torch._softmax_backward_data(ds32, p, -1, torch.float32, grad_input=ds32)
        ds = blocks.round(ds32.mul_(blocks.factor))
        dq[:, :, rows] = torch.bmm(ds, k[:, :end]).view(dq[:, :, rows].shape)
        dk = _add_product(None if is_first else dk, ds, q[:, :, rows].flatten(1, 2))
    return dq, dk, dv


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Add left^T right to the first e rows of `total` [c, S, D] in float32: [c, g r, e], [c, g r, D]."""
    if total is None:
        return torch.bmm(left.transpose(1, 2), right).float()
    rows = total[:, : left.shape[2]]
    if left.dtype == total.dtype:
        rows.baddbmm_(left.transpose(1, 2), right)
    else:
        rows += torch.bmm(left.transpose(1, 2), right)
    return total
