"""Context parallelism: the tokens of a sequence that each rank holds, and causal attention over all of them.

A sequence is split into 2c pieces, and rank r holds pieces r and 2c - 1 - r in this order, so that causal
attention costs every rank the same (arXiv:2407.21783, section 3.3.2).

Each rank attends with its own queries. Keys and values of the others are gathered while it attends to its
own; the results of the ranks' blocks are merged by their log-sum-exps, as in ring attention
(arXiv:2310.01889). Nothing of other ranks is kept: backward gathers keys and values again, and
reduce-scatters their gradients. Heads of keys and values are sent as they are, not repeated for the queries
that share them. A rank sends 3 (c - 1) / c of all keys and values in a forward and a backward pass.

Of the blocks of rank r only its own is causal. The first of a rank's two pieces of a sequence is before the
second, so all queries attend to the first piece of ranks before r and to nothing of the second; of the ranks
after r both pieces are before the second piece of queries and after the first. Each of these blocks costs the
same.

Shapes: B micro-batch, n heads of queries, k heads of keys and values, S sequence, c = context-parallel size,
L = S/c tokens of a rank, P = L/2, D head_dim.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mlm.parallel.collectives import reduce_scatter, start_all_gather
from mlm.parallel.config import PLAIN_SCORES, AttentionScores
from mlm.parallel.mesh import Axis


def local_tokens(x: Tensor, cp: Axis, dim: int) -> Tensor:
    """This rank's part of what is there for each token along `dim`: S -> S/c."""
    return x if cp.size == 1 else _tokens_of(x, cp.rank, cp.size, dim)


def local_positions(length: int, cp: Axis, device: torch.device) -> Tensor:
    """Positions in a sequence of S = `length` tokens of those that this rank holds: int64 [S/c]."""
    return local_tokens(torch.arange(length, device=device), cp, 0)


def rank_positions(rank: int, length: int, size: int, device: torch.device) -> Tensor:
    """The same for rank number `rank` of `size`."""
    return _tokens_of(torch.arange(length, device=device), rank, size, 0)


def _tokens_of(x: Tensor, rank: int, size: int, dim: int) -> Tensor:
    assert x.shape[dim] % (2 * size) == 0, f"{x.shape[dim]} tokens in {2 * size} pieces"
    pieces = x.chunk(2 * size, dim)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]], dim)


MOST_SCORES = 1 << 24
"""Scores that `UnfusedKernel` makes at a time."""

Drop = Callable[[Tensor, range, Tensor, Tensor], Tensor]
"""drop(probabilities [B, heads, rows, columns], heads, rows, columns): their dropout, by this rank's numbers
of heads and the places of queries and keys in the sequence."""


@dataclass(frozen=True)
class KeyBlock:
    """Queries of this rank, and keys of one rank that some of them attend to."""

    source: int
    """Rank of the keys."""
    rows: slice
    """Of this rank's tokens."""
    columns: slice
    """Of the source's tokens."""
    causal: bool
    """True for a rank's own; in others each query attends to each key."""


@dataclass(frozen=True)
class CPUKernel:
    """PyTorch's fused kernel for a CPU; `scale` as in AttentionScores.

    `forward` returns the results of a block, [B, n, rows, D], and the log-sum-exps of scores, [B, n, rows].
    `backward` returns the block's part of the gradients of q, k and v; its y and log_sum are of all keys.
    """

    scale: float | None = None

    def forward(self, block: KeyBlock, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, block.causal, scale=self.scale
        )
        return y, log_sum

    def backward(
        self, block: KeyBlock, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(dy, q, k, v, y, log_sum, 0.0, block.causal, scale=self.scale)
        return dq, dk, dv


@dataclass(frozen=True)
class GPUKernel:
    """FlashAttention (arXiv:2307.08691), for half precision on a GPU; as CPUKernel."""

    scale: float | None = None

    def forward(self, block: KeyBlock, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y, log_sum, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, block.causal, scale=self.scale
        )
        return y, log_sum

    def backward(
        self, block: KeyBlock, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # state of dropout
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(dy, q, k, v, y, log_sum.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, block.causal),
            *(unused, unused[:0]),
            scale=self.scale,
        )
        return dq, dk, dv


@dataclass(frozen=True)
class UnfusedKernel:
    """Attention by its formula: with a window, softcap, dropout, or where no kernel serves; as CPUKernel."""

    cp: Axis
    length: int
    """S."""
    scores: AttentionScores = PLAIN_SCORES
    drop: Drop | None = None

    def forward(self, block: KeyBlock, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        parts = self._row_parts(block, q, k)
        if len(parts) > 1:
            results = [self.forward(part, q[:, :, rows], k, v) for part, rows in parts]
            return torch.cat([y for y, _ in results], 2), torch.cat([sums for _, sums in results], 2)
        y = torch.empty_like(q)
        log_sum = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for heads, shared in self._heads(q, k):
            scores, _ = self._scores(block, q[:, heads], k[:, shared])
            sums = torch.logsumexp(scores, -1)
            p = torch.exp(scores - sums.masked_fill(sums == -math.inf, 0)[..., None])  # of no keys: zeros
            p = self._dropped(block, p, heads)
            y[:, heads] = (p.to(v.dtype) @ v[:, shared].unsqueeze(2)).flatten(1, 2)
            log_sum[:, heads] = sums.flatten(1, 2)
        return y, log_sum

    def backward(
        self, block: KeyBlock, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        parts = self._row_parts(block, q, k)
        if len(parts) > 1:
            sums = [torch.zeros_like(x, dtype=log_sum.dtype) for x in (k, v)]
            for part, rows in parts:
                dy_, q_, y_, log_sum_ = (x[:, :, rows] for x in (dy, q, y, log_sum))
                dq[:, :, rows], *gradients = self.backward(part, dy_, q_, k, v, y_, log_sum_)
                for total, gradient in zip(sums, gradients, strict=True):
                    total += gradient
            return dq, sums[0].to(k.dtype), sums[1].to(v.dtype)
        share, scale = q.shape[1] // k.shape[1], self.scores.factor(q.shape[-1])
        for heads, shared in self._heads(q, k):
            dy_, q_, y_ = (x[:, heads].unflatten(1, (-1, share)) for x in (dy, q, y))  # [B, k, n/k, rows, D]
            log_sums = log_sum[:, heads].unflatten(1, (-1, share))[..., None]
            scores, slope = self._scores(block, q[:, heads], k[:, shared], wants_slope=True)
            p = torch.exp(scores - log_sums)
            dp = (dy_ @ v[:, shared].unsqueeze(2).mT).to(p.dtype)
            dp = self._dropped(block, dp, heads) - (dy_ * y_).sum(-1, keepdim=True, dtype=p.dtype)
            ds = p * dp * scale
            ds = (ds if slope is None else ds * slope).to(q.dtype)
            dropped = self._dropped(block, p, heads).to(q.dtype)
            dq[:, heads] = (ds @ k[:, shared].unsqueeze(2)).flatten(1, 2)
            dk[:, shared] = (ds.mT @ q_).sum(2)
            dv[:, shared] = (dropped.mT @ dy_).sum(2)
        return dq, dk, dv

    def _row_parts(self, block: KeyBlock, q: Tensor, k: Tensor) -> list[tuple[KeyBlock, slice]]:
        """Parts of a block's queries whose scores of one head of keys are MOST_SCORES at most."""
        b, n, rows, _ = q.shape
        size = max(1, MOST_SCORES // (b * (n // k.shape[1]) * k.shape[2]))
        first, parts = block.rows.start or 0, [slice(r, min(r + size, rows)) for r in range(0, rows, size)]
        return [(replace(block, rows=slice(first + p.start, first + p.stop)), p) for p in parts]

    def _heads(self, q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
        b, n, rows, _ = q.shape
        share = n // k.shape[1]
        size = max(1, MOST_SCORES // (b * share * rows * k.shape[2]))
        for first in range(0, k.shape[1], size):
            last = min(first + size, k.shape[1])
            yield slice(first * share, last * share), slice(first, last)

    def _scores(
        self, block: KeyBlock, q: Tensor, k: Tensor, *, wants_slope: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """[B, k, n/k, rows, columns], -inf where a query does not attend; and the softcap's derivative."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        if q.is_cpu:  # as in its fused kernel: rounded scores would be off by 2^-9 of themselves in bfloat16
            q, k = q.to(dtype), k.to(dtype)
        scores = (q.unflatten(1, (k.shape[1], -1)) @ k.unsqueeze(2).mT).to(dtype)
        scores = scores * self.scores.factor(q.shape[-1])
        slope, cap = None, self.scores.softcap
        if cap:
            scores.div_(cap).tanh_()
            slope = 1 - scores.square() if wants_slope else None
            scores.mul_(cap)
        rows, columns = self._positions(block, q.device)
        distance = rows[:, None] - columns
        hidden = distance < 0
        if self.scores.window:
            hidden |= distance >= self.scores.window
        return scores.masked_fill_(hidden, -math.inf), slope

    def _dropped(self, block: KeyBlock, p: Tensor, heads: slice) -> Tensor:
        if self.drop is None:
            return p
        flat: Tensor = self.drop(
            p.flatten(1, 2), range(heads.start, heads.stop), *self._positions(block, p.device)
        )
        return flat.view(p.shape)

    def _positions(self, block: KeyBlock, device: torch.device) -> tuple[Tensor, Tensor]:
        rows = rank_positions(self.cp.rank, self.length, self.cp.size, device)[block.rows]
        return rows, rank_positions(block.source, self.length, self.cp.size, device)[block.columns]


Kernel = CPUKernel | GPUKernel | UnfusedKernel
"""Attention of a block, forward and backward."""


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: Axis,
    *,
    scores: AttentionScores = PLAIN_SCORES,
    drop: Drop | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's tokens to those before them: q [B, n, L, D], k and v [B, k, L, D].

    `drop` is the dropout of probabilities; `sinks` [n] are logits of a key without a value that every query
    sees.
    """
    kernel = None if drop is not None else fused_kernel(q, scores)
    if kernel is None:
        kernel = UnfusedKernel(cp, q.shape[2] * cp.size, scores, drop)
    y: Tensor = _ContextAttention.apply(q, k, v, kernel, cp, scores.window, sinks)  # type: ignore[no-untyped-call]
    return y


def fused_kernel(q: Tensor, scores: AttentionScores) -> Kernel | None:
    """Return PyTorch's kernel for queries [B, n, L, D]; None if it has none."""
    if scores.window or scores.softcap:
        return None
    if q.device.type == "cpu":
        return CPUKernel(scores.scale)
    if q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        return GPUKernel(scores.scale)
    return None


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, cp: Axis, window: int, sinks: Tensor | None
    ) -> Tensor:
        own, others = attention_blocks(cp, q.shape[2], window)
        gathering = start_all_gather(torch.stack([k, v]), cp) if cp.size > 1 else None
        y, log_sum = kernel.forward(own, q, k, v)
        y, log_sum = y.to(torch.promote_types(q.dtype, torch.float32)), log_sum.contiguous()
        gathered = None if gathering is None else gathering.wait()  # [c, 2, B, k, L, D]
        for block in others:
            assert gathered is not None
            keys, values = gathered[block.source][..., block.columns, :]
            part = kernel.forward(block, q[:, :, block.rows], keys, values)
            _merge(y[:, :, block.rows], log_sum[:, :, block.rows], *part)
        if sinks is not None:  # of a value 0
            logits = sinks.to(log_sum.dtype)[:, None].expand(log_sum.shape)
            y.mul_(torch.sigmoid(log_sum - logits).unsqueeze(-1))
            log_sum = torch.logaddexp(log_sum, logits)
        y = y.to(q.dtype)
        ctx.save_for_backward(q, k, v, y, log_sum, sinks)
        ctx.kernel, ctx.cp, ctx.window = kernel, cp, window
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, log_sum, sinks = ctx.saved_tensors
        kernel, cp, d_sinks = ctx.kernel, ctx.cp, None
        if sinks is not None:
            # of a softmax's gradient p (dp - sum of p dp), where dp is 0 and the sum is y dy
            p = torch.exp(sinks.to(log_sum.dtype)[:, None] - log_sum)  # [B, n, L]
            d_sinks = -(p * (dy * y).sum(-1, dtype=p.dtype)).sum((0, 2)).to(sinks.dtype)
        own, others = attention_blocks(cp, q.shape[2], ctx.window)
        if cp.size == 1:
            return *kernel.backward(own, dy, q, k, v, y, log_sum), None, None, None, d_sinks
        gathering = start_all_gather(torch.stack([k, v]), cp)
        dq, dk, dv = kernel.backward(own, dy, q, k, v, y, log_sum)
        dq = dq.to(log_sum.dtype)
        gathered = gathering.wait()
        partial = torch.zeros_like(gathered)
        partial[cp.rank, 0], partial[cp.rank, 1] = dk, dv
        for block in others:
            keys, values = gathered[block.source][..., block.columns, :]
            dy_rows, q_rows, y_rows, sums = (x[:, :, block.rows] for x in (dy, q, y, log_sum))
            dq_rows, *shared = kernel.backward(block, dy_rows, q_rows, keys, values, y_rows, sums)
            dq[:, :, block.rows] += dq_rows
            for target, part in zip(partial[block.source], shared, strict=True):
                target[..., block.columns, :] = part
        dk, dv = reduce_scatter(partial, cp)[0]
        return dq.to(q.dtype), dk, dv, None, None, None, d_sinks


def attention_blocks(cp: Axis, tokens: int, window: int = 0) -> tuple[KeyBlock, list[KeyBlock]]:
    """This rank's own block, and the blocks of other ranks of which its `tokens` see something."""
    half, everything = tokens // 2, slice(None)
    others = []
    for source in range(cp.size):
        away = abs(source - cp.rank)
        if away == 0 or 0 < window <= (away - 1) * half + 1:
            continue
        if source < cp.rank:
            others.append(KeyBlock(source, everything, slice(half), causal=False))
        else:
            others.append(KeyBlock(source, slice(half, None), everything, causal=False))
    return KeyBlock(cp.rank, everything, everything, causal=True), others


def _merge(y: Tensor, log_sum: Tensor, other: Tensor, other_sum: Tensor) -> None:
    """Add the results of further keys, in place."""
    total = torch.logaddexp(log_sum, other_sum)
    y.mul_((log_sum - total).exp()[..., None]).add_(other * (other_sum - total).exp()[..., None])
    log_sum.copy_(total)
