"""Vocabulary projection and cross-entropy in parts of the vocabulary, summed in one order (exact.py).

Shapes: R rows (tokens, S * B), H hidden, V padded vocabulary, t = tensor-parallel size, n parts of this rank,
each of w = V / parts columns.
"""

import math
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mlm.parallel.collectives import all_gather
from mlm.parallel.config import IGNORE_INDEX
from mlm.parallel.cross_entropy import HALF, chunk_rows, split_scale
from mlm.parallel.exact import (
    ExactRegion,
    TreeSum,
    sum_of_rows,
    sum_over_ranks,
    tree_sum,
    weight_gradient_of_rows,
)
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.logits import is_argmax, label_logits, loss_dtype, softmax_in_place
from mlm.parallel.matmul import product


class ExactLoss(torch.autograd.Function):
    """As `cross_entropy_and_hits`, hits 0 without a bias; apply no tensor-parallel operator before it."""

    @staticmethod
    def forward(
        ctx: Any,
        table: VocabParallelEmbedding,
        region: ExactRegion,
        weight: Tensor,
        hidden: Tensor,
        labels: Tensor,
        scale: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        half, dtype, n = hidden.dtype in HALF, loss_dtype(hidden.dtype), region.terms
        logit_factor, row_factor = split_scale(scale.to(dtype), hidden.dtype)
        weights = table.weight_in(hidden.dtype).chunk(n)
        offsets = [None] * n if bias is None else bias.to(hidden.dtype).chunk(n)
        full = region.gather(hidden)
        count = len(region.blocks(full)[0])
        size, _ = chunk_rows(count, len(weights[0]) * region.tp.parts, hidden.device.type, half=False)
        trees = [TreeSum(leaf=-(-count // size)) for _ in range(n + 1)]  # weights, then the bias
        d_hidden, losses, hits = list[Tensor](), list[Tensor](), torch.zeros_like(scale)
        chunks = (chain(*(part.split(size) for part in region.blocks(t))) for t in (full, labels))
        for x, targets in zip(*chunks, strict=True):
            scored = (targets != IGNORE_INDEX).unsqueeze(1)  # [rows, 1]
            logits = [product(x, w, b).to(dtype) for w, b in zip(weights, offsets, strict=True)]
            if bias is not None:
                hits += is_argmax(torch.cat(logits, 1), targets, table).sum()
            losses.append(_losses_and_gradient(logits, targets, table, region))
            gradients = [p.mul_(logit_factor).to(hidden.dtype) for p in logits] if half else logits
            terms = tree_sum([product(d, w.t()) for d, w in zip(gradients, weights, strict=True)])
            d_hidden.append(terms.mul_(scored))
            if ctx.needs_input_grad[2]:
                scaled = x * (scored if half else (scale * scored).to(dtype))
                for tree, d in zip(trees, gradients, strict=False):
                    tree.add(weight_gradient_of_rows(d, scaled, loss_dtype(weight.dtype)))
            if bias is not None:
                trees[n].add(torch.cat([sum_of_rows(d.to(dtype) * scored) for d in gradients]))
        d_weight = torch.cat([tree.take() for tree in trees[:n]]) if ctx.needs_input_grad[2] else None
        if d_weight is not None and half:
            d_weight.mul_(row_factor)
        d_bias = None if bias is None else trees[n].take().mul_(row_factor).to(bias.dtype)
        ctx.save_for_backward(d_weight, region.reduce(torch.cat(d_hidden)).mul_(row_factor.to(dtype)), d_bias)
        ctx.mark_non_differentiable(hits := hits * scale)
        loss = region.sum_rows(torch.cat(losses).view(-1, 1, 1), dtype)
        return sum_over_ranks(loss, region.cp)[0] * scale, hits

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dw, dx, db = [None if d is None else (d * dy).to(d.dtype) for d in ctx.saved_tensors]
        return None, None, dw, dx, None, None, db


def _losses_and_gradient(
    logits: list[Tensor], labels: Tensor, table: VocabParallelEmbedding, region: ExactRegion
) -> Tensor:
    """Each row's loss [R], 0 where ignored; logits n of [R, w] become p - onehot(label)."""
    tp, n, (rows, width) = region.tp, len(logits), logits[0].shape
    numbers = logits[0].new_zeros(n + 1, rows)  # log-sum-exps of the parts, and the label's logit
    label_updates = list[list[Tensor]]()
    for i, p in enumerate(logits):
        first = table.first + i * width
        true = min(max(table.true_rows - first, 0), width)
        p[:, true:] = -math.inf  # padding takes no probability
        column = labels - first
        target, *update = label_logits(p, column.masked_fill((column < 0) | (column >= true), -1))
        label_updates.append(update)
        numbers[n] += target
        softmax_in_place(p, true, numbers[i])
    gathered = all_gather(numbers, tp)  # [t, n + 1, R]
    parts, target = gathered[:, :n].flatten(0, 1), gathered[:, n].sum(0)  # one of the targets is not 0
    largest = parts.amax(0)
    log_sum = tree_sum((parts - largest).exp_().unbind()).log_().add_(largest)
    shares = (parts - log_sum).exp_()[tp.rank * n :]  # [n, R]
    for p, share, (index, minus_one) in zip(logits, shares, label_updates, strict=False):
        p.mul_(share.unsqueeze(1)).scatter_add_(1, index, minus_one)
    return (log_sum - target).masked_fill_(labels == IGNORE_INDEX, 0.0)
