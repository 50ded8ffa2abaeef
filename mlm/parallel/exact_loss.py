"""Vocabulary projection and cross-entropy in parts of the vocabulary, summed in one order (exact.py).

Shapes: R rows (tokens, S * B), H hidden, V padded vocabulary, t = tensor-parallel size, n parts of this rank,
each of w = V / parts columns.
"""

import math
from typing import Any

import torch
from torch import Tensor

from mlm.parallel.collectives import all_gather
from mlm.parallel.config import IGNORE_INDEX
from mlm.parallel.cross_entropy import HALF, chunk_rows, split_scale
from mlm.parallel.exact import Region, sum_of_rows, sum_over_ranks, tree_sum, weight_gradient_of_rows
from mlm.parallel.exact_gradients import GradientTree
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.logits import is_argmax, loss_dtype
from mlm.parallel.matmul import product


def exact_cross_entropy(
    hidden: Tensor,
    labels: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    *,
    table: VocabParallelEmbedding,
    region: Region,
) -> tuple[Tensor, Tensor]:
    """As `cross_entropy_and_hits`, hits 0 without a bias; no operator of tensor parallelism before it."""
    result: tuple[Tensor, Tensor] = _ExactLoss.apply(  # type: ignore[no-untyped-call]
        hidden, table.weight, bias, labels, scale, table, region
    )
    return result


class _ExactLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: Tensor,
        table: VocabParallelEmbedding,
        region: Region,
    ) -> tuple[Tensor, Tensor]:
        local_rows, hidden = len(hidden), region.gather(hidden)
        half, dtype, n = hidden.dtype in HALF, loss_dtype(hidden.dtype), region.terms
        logit_factor, row_factor = split_scale(scale.to(dtype), hidden.dtype)
        weights = table.weight_in(hidden.dtype).chunk(n)
        offsets = [None] * n if bias is None else bias.to(hidden.dtype).chunk(n)
        count = len(hidden) * region.cp.size // region.cp.parts
        rows, _ = chunk_rows(count, len(weights[0]) * region.tp.parts, hidden.device.type, half=False)
        scored = (labels != IGNORE_INDEX).unsqueeze(1)  # [R, 1]
        d_hidden, losses, hits = torch.empty_like(hidden), list[Tensor](), torch.zeros_like(scale)
        trees, bias_trees = ([GradientTree(leaf=-(-count // rows)) for _ in weights] for _ in range(2))
        parts = range(0, len(hidden), count)
        for part in (
            slice(i, min(i + rows, first + count))
            for first in parts
            for i in range(first, first + count, rows)
        ):
            logits = [product(hidden[part], w, b).to(dtype) for w, b in zip(weights, offsets, strict=True)]
            if bias is not None:
                hits += is_argmax(torch.cat(logits, 1), labels[part], table).sum()
            losses.append(_losses_and_gradient(logits, labels[part], table, region))
            gradients = [p.mul_(logit_factor).to(hidden.dtype) for p in logits] if half else logits
            d_hidden[part] = tree_sum([product(d, w.t()) for d, w in zip(gradients, weights, strict=True)])
            if ctx.needs_input_grad[1]:
                scaled = hidden[part] * (scored[part] if half else (scale * scored[part]).to(dtype))
                for tree, d in zip(trees, gradients, strict=True):
                    tree.add(weight_gradient_of_rows(d, scaled, loss_dtype(weight.dtype)))
            if bias is not None:
                for tree, d in zip(bias_trees, gradients, strict=True):
                    tree.add(sum_of_rows(d.to(dtype) * scored[part]))
        d_hidden = region.reduce(d_hidden)
        own = scored if len(d_hidden) == len(scored) else scored.view(region.tp.size, -1, 1)[region.tp.rank]
        assert len(d_hidden) == local_rows
        d_hidden.mul_((row_factor * own).to(dtype))
        d_weight = torch.cat([tree.total() for tree in trees]) if ctx.needs_input_grad[1] else None
        if d_weight is not None and half:
            d_weight.mul_(row_factor)
        d_bias: Tensor | None = None
        if bias is not None:
            d_bias = torch.cat([tree.total() for tree in bias_trees]).mul_(row_factor).to(bias.dtype)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.mark_non_differentiable(hits := hits * scale)
        loss = region.everywhere.sum_rows(torch.cat(losses).view(-1, 1, 1), dtype)
        return sum_over_ranks(loss, region.cp)[0] * scale, hits

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [None if d is None else (d * dy).to(d.dtype) for d in ctx.saved_tensors]
        return *gradients, None, None, None, None


def _losses_and_gradient(
    logits: list[Tensor], labels: Tensor, table: VocabParallelEmbedding, region: Region
) -> Tensor:
    """Each row's loss [R], 0 where ignored; logits n of [R, w] become p - onehot(label)."""
    tp, n, width = region.tp, len(logits), logits[0].shape[1]
    target, log_sums, labelled = (
        torch.zeros_like(logits[0][:, 0]),
        list[Tensor](),
        list[tuple[Tensor, Tensor]](),
    )
    for i, p in enumerate(logits):
        first = (tp.rank * n + i) * width
        true = min(max(table.true_rows - first, 0), width)
        p[:, true:] = -math.inf  # padding takes no probability
        column = labels - first
        is_here = (column >= 0) & (column < true)
        index = column.masked_fill(~is_here, 0).unsqueeze(1)
        labelled.append((index, is_here.to(p.dtype).neg_().unsqueeze(1)))
        target += p.gather(1, index).squeeze(1).masked_fill_(~is_here, 0.0)
        if true == 0:
            log_sums.append(torch.full_like(target, -math.inf))
            p.zero_()
        else:
            largest = p.amax(-1)
            torch.softmax(p, -1, out=p)
            log_sums.append(largest.sub_(p.amax(-1).log_()))
    gathered = all_gather(torch.stack([*log_sums, target]), tp)  # [t, n + 1, R]
    parts, target = gathered[:, :n].flatten(0, 1), gathered[:, n].sum(0)  # one of the targets is not 0
    largest = parts.amax(0)
    log_sum = tree_sum((parts - largest).exp_().unbind()).log_().add_(largest)
    shares = (parts - log_sum).exp_()[tp.rank * n :]  # [n, R]
    for p, share, (index, minus_one) in zip(logits, shares, labelled, strict=False):
        p.mul_(share.unsqueeze(1)).scatter_add_(1, index, minus_one)
    return (log_sum - target).masked_fill_(labels == IGNORE_INDEX, 0.0)
