"""Context parallelism: the tokens of a sequence on each rank, and causal attention over all of them.

A sequence is split into 2c pieces, and rank r holds pieces r and 2c - 1 - r in this order, so that causal
attention costs every rank the same (arXiv:2407.21783, section 3.3.2).

Each rank attends with its queries. Keys and values of the other ranks are gathered while it attends to its
local ones; the results are merged by their log-sum-exps, as in ring attention (arXiv:2310.01889). Gathered
tensors are not saved: backward gathers keys and values again, and reduce-scatters their gradients. Heads of
keys and values are not repeated for the queries that share them. A rank sends 3 (c - 1) / c of all keys and
values in a forward and a backward pass.

Only the local block of rank r is causal. All queries attend to the first piece of ranks before r and not to
their second; of ranks after r, the second piece of queries attends to both pieces and the first to none. Each
of these blocks costs the same.

With exact=N (exact.py) a sequence is split into more parts, independent of c: each rank holds consecutive
parts and computes the blocks of as many ranks.

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
from mlm.parallel.exact import scatter_over_ranks, tree_sum
from mlm.parallel.mesh import Axis


def local_tokens(x: Tensor, cp: Axis, dim: int) -> Tensor:
    """This rank's tokens along `dim`: S -> S/c."""
    return x if cp.parts == 1 else _tokens_of(x, cp, dim)


def local_positions(length: int, cp: Axis, device: torch.device) -> Tensor:
    """Positions of this rank's tokens in a sequence of S = `length`: int64 [S/c]."""
    return local_tokens(torch.arange(length, device=device), cp, 0)


def rank_positions(rank: int, length: int, size: int, device: torch.device) -> Tensor:
    """`local_positions` of rank number `rank` of `size`."""
    return _tokens_of(torch.arange(length, device=device), Axis("cp", rank, size), 0)


def _tokens_of(x: Tensor, cp: Axis, dim: int) -> Tensor:
    last = 2 * cp.parts - 1
    assert x.shape[dim] % (last + 1) == 0, f"{x.shape[dim]} tokens in {last + 1} pieces"
    pieces = x.chunk(last + 1, dim)
    return torch.cat([pieces[i] for part in local_parts(cp) for i in (part, last - part)], dim)


def local_parts(cp: Axis) -> range:
    """Parts of a sequence on this rank: one, or with exact=N several."""
    share = cp.parts // cp.size
    return range(cp.rank * share, (cp.rank + 1) * share)


MOST_SCORES = 1 << 24
"""Scores that `UnfusedKernel` computes at a time."""

Drop = Callable[[Tensor, range, Tensor, Tensor], Tensor]
"""drop(probabilities [B, heads, rows, columns], heads, rows, columns): dropout by this rank's numbers of
heads and the positions of queries and keys in the sequence."""


@dataclass(frozen=True)
class KeyBlock:
    """Queries of one part of a sequence and keys of one part that they attend to."""

    target: int
    """Part of the queries."""
    source: int
    """Part of the keys."""
    rows: slice
    """Queries, among the target's tokens."""
    columns: slice
    """Keys, among the source's tokens."""
    causal: bool
    """True if target and source are the same part; else each query attends to each key."""


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
    """Unfused attention for windows, softcaps, dropout, and devices without a kernel; as CPUKernel."""

    parts: int
    """Parts of a sequence."""
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
            p = torch.exp(
                scores - sums.masked_fill(sums == -math.inf, 0)[..., None]
            )  # rows without keys: zeros
            if self.drop is not None:
                p = p * self._factors(block, p, heads)
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
            dp, dropped = (dy_ @ v[:, shared].unsqueeze(2).mT).to(p.dtype), p
            if self.drop is not None:
                factors = self._factors(block, p, heads)
                dp, dropped = dp * factors, p * factors
            dp = dp - (dy_ * y_).sum(-1, keepdim=True, dtype=p.dtype)
            ds = p * dp * scale
            ds = (ds if slope is None else ds * slope).to(q.dtype)
            dropped = dropped.to(q.dtype)
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
        if q.is_cpu:  # as in its fused kernel: bfloat16 would round scores by 2^-9
            q, k = q.to(dtype), k.to(dtype)
        scores = (q.unflatten(1, (k.shape[1], -1)) @ k.unsqueeze(2).mT).to(dtype)
        scores = scores * self.scores.factor(q.shape[-1])
        slope, cap = None, self.scores.softcap
        if cap:
            scores.div_(cap).tanh_()
            slope = 1 - scores.square() if wants_slope else None
            scores.mul_(cap)
        if not block.causal and not self.scores.window:
            return scores, slope
        rows, columns = self._positions(block, q.device)
        distance = rows[:, None] - columns
        hidden = distance < 0
        if self.scores.window:
            hidden |= distance >= self.scores.window
        return scores.masked_fill_(hidden, -math.inf), slope

    def _factors(self, block: KeyBlock, p: Tensor, heads: slice) -> Tensor:
        """Return the factors of dropout, 0 or 1 / (1 - p), for the probabilities `p`, in their shape."""
        assert self.drop is not None
        ones = torch.ones_like(p).flatten(1, 2)
        return self.drop(ones, range(heads.start, heads.stop), *self._positions(block, p.device)).view(
            p.shape
        )

    def _positions(self, block: KeyBlock, device: torch.device) -> tuple[Tensor, Tensor]:
        rows = rank_positions(block.target, self.length, self.parts, device)[block.rows]
        return rows, rank_positions(block.source, self.length, self.parts, device)[block.columns]


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
        kernel = UnfusedKernel(cp.parts, q.shape[2] * cp.size, scores, drop)
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
        gathering = start_all_gather(torch.stack([k, v]), cp) if cp.parts > 1 else None
        blocks = attention_blocks(cp, q.shape[2], window)
        queries = q.chunk(len(blocks), 2)
        parts = zip(blocks, *(x.chunk(len(blocks), 2) for x in (q, k, v)), strict=True)
        results = [kernel.forward(local, *inputs) for (local, _), *inputs in parts]
        wide = torch.promote_types(q.dtype, torch.float32)
        results = [(y.to(wide), log_sum.contiguous()) for y, log_sum in results]
        gathered = None if gathering is None else _by_part(gathering.wait(), cp)
        for (_, remote), q_part, (y, log_sum) in zip(blocks, queries, results, strict=True):
            for block in remote:
                assert gathered is not None
                keys, values = gathered[block.source][..., block.columns, :]
                part = kernel.forward(block, q_part[:, :, block.rows], keys, values)
                _merge(y[:, :, block.rows], log_sum[:, :, block.rows], *part)
        y, log_sum = (x[0] if len(x) == 1 else torch.cat(x, 2) for x in zip(*results, strict=True))
        if sinks is not None:  # their value is 0
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
            # softmax gradient p (dp - sum of p dp) with dp = 0 and the sum y dy
            p = torch.exp(sinks.to(log_sum.dtype)[:, None] - log_sum)  # [B, n, L]
            d_sinks = -(p * (dy * y).sum(-1, dtype=p.dtype)).sum((0, 2)).to(sinks.dtype)
        blocks = attention_blocks(cp, q.shape[2], ctx.window)
        if cp.parts == 1:
            gradients = kernel.backward(blocks[0][0], dy, q, k, v, y, log_sum)
            return *gradients, None, None, None, d_sinks
        gathering = start_all_gather(torch.stack([k, v]), cp)
        parts = list(zip(*(x.chunk(len(blocks), 2) for x in (dy, q, k, v, y, log_sum)), strict=True))
        local_gradients = [kernel.backward(b[0], *part) for b, part in zip(blocks, parts, strict=True)]
        gathered, dqs, terms = _by_part(gathering.wait(), cp), list[Tensor](), list[Tensor]()
        for (local, remote), part, gradients in zip(blocks, parts, local_gradients, strict=True):
            dq, term = gradients[0].to(log_sum.dtype), torch.zeros_like(gathered)
            term[local.source, 0], term[local.source, 1] = gradients[1:]
            for block in remote:
                keys, values = gathered[block.source][..., block.columns, :]
                dy_rows, q_rows, _, _, y_rows, sums = (x[:, :, block.rows] for x in part)
                dq_rows, *shared = kernel.backward(block, dy_rows, q_rows, keys, values, y_rows, sums)
                dq[:, :, block.rows] += dq_rows
                for target, gradient in zip(term[block.source], shared, strict=True):
                    target[..., block.columns, :] = gradient
            dqs.append(dq.to(q.dtype))
            terms.append(term)
        scatter = scatter_over_ranks if cp.exact_parts else reduce_scatter
        dk, dv = scatter(tree_sum(terms), cp).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        return torch.cat(dqs, 2), dk, dv, None, None, None, d_sinks


def _by_part(gathered: Tensor, cp: Axis) -> Tensor:
    """Keys and values of each part of the sequence: [c, 2, B, k, L, D] -> [parts, 2, B, k, P, D]."""
    c, two, b, k, _, d = gathered.shape
    parts = gathered.view(c, two, b, k, cp.parts // cp.size, -1, d)
    return parts.permute(0, 4, 1, 2, 3, 5, 6).flatten(0, 1)


def attention_blocks(cp: Axis, tokens: int, window: int = 0) -> list[tuple[KeyBlock, list[KeyBlock]]]:
    """Return the local block and the remote blocks of each part of this rank's `tokens`."""
    targets, all_tokens = local_parts(cp), slice(None)
    half, blocks = tokens // len(targets) // 2, list[tuple[KeyBlock, list[KeyBlock]]]()
    for target in targets:
        remote = []
        for source in range(cp.parts):
            distance = abs(source - target)
            if distance == 0 or 0 < window <= (distance - 1) * half + 1:
                continue
            rows, columns = (all_tokens, slice(half)) if source < target else (slice(half, None), all_tokens)
            remote.append(KeyBlock(target, source, rows, columns, causal=False))
        blocks.append((KeyBlock(target, target, all_tokens, all_tokens, causal=True), remote))
    return blocks


def _merge(y: Tensor, log_sum: Tensor, new_y: Tensor, new_log_sum: Tensor) -> None:
    total = torch.logaddexp(log_sum, new_log_sum)
    y.mul_((log_sum - total).exp()[..., None]).add_(new_y * (new_log_sum - total).exp()[..., None])
    log_sum.copy_(total)
