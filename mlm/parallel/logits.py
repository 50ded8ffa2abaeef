"""Operations on a rank's logits [R, V/t]: softmax and loss over the whole vocabulary, hits, softcap.

Ranks exchange two numbers per token, two more where hits are counted, and never a logit (arXiv:1909.08053,
section 3).

With a compiler, half-precision logits are read in two passes. PyTorch's kernels read and write some 34 bytes
a logit for cast, maximum, softmax, label, scale and cast; compiled, `log_sum_and_target` and
`logits_gradient` read 2 bytes, then read 2 and write 2 (2 more if a log-sum-exp takes two passes).

Shapes: R rows (tokens), V padded vocabulary, t = tensor-parallel size.
"""

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from mlm.parallel.collectives import all_gather
from mlm.parallel.config import IGNORE_INDEX
from mlm.parallel.layers import VocabParallelEmbedding

LogSum = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
Gradient = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def cap_logits(logits: Tensor, table: VocabParallelEmbedding) -> Tensor:
    """Bound logits by the table's softcap, in place (arXiv:2408.00118, section 2)."""
    if not table.softcap:
        return logits
    return logits.div_(table.softcap).tanh_().mul_(table.softcap)


def softcap_slope(capped: Tensor, table: VocabParallelEmbedding) -> Tensor | None:
    """Derivative of `cap_logits` from its results, 1 - tanh^2; None without a softcap."""
    return (capped / table.softcap).square_().neg_().add_(1) if table.softcap else None


def losses_and_gradient(
    logits: Tensor,
    labels: Tensor,
    table: VocabParallelEmbedding,
    factor: Tensor,
    buffer: Tensor | None,
    passes: tuple[LogSum, Gradient] | None,
) -> tuple[Tensor, Tensor]:
    """Each row's loss [R] (0 where ignored), and `factor` times its gradient [R, V/t] in the logits' dtype.

    The gradient is of the logits before `cap_logits`. `passes` are the compiled `log_sum_and_target` and
    `logits_gradient`; without them it is computed in place, for float32 and float64 without the factor. Other
    arguments as of `softmax_and_loss`.
    """
    slope = softcap_slope(logits, table)  # before the logits are overwritten
    if passes is None:
        losses = softmax_and_loss(logits, labels, table, subtract_label=True, buffer=buffer, factor=factor)
        return losses, logits if slope is None else logits.mul_(slope)
    column = columns_of(labels, table)
    log_sum, target = passes[0](logits, column, table.true_local_rows)
    if table.tp.size > 1:
        parts = all_gather(torch.stack([log_sum, target]), table.tp)  # [t, 2, R]
        log_sum, target = torch.logsumexp(parts[:, 0], 0), parts[:, 1].sum(0)
    losses = (log_sum - target).masked_fill(labels == IGNORE_INDEX, 0.0)
    gradient = passes[1](logits, log_sum, column, factor, table.true_local_rows)
    return losses, gradient if slope is None else gradient.mul_(slope)


def softmax_and_loss(
    logits: Tensor,
    labels: Tensor,
    table: VocabParallelEmbedding,
    *,
    subtract_label: bool = False,
    buffer: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """Replace this rank's logits by their softmax over the whole vocabulary; return each row's loss.

    Args:
        logits: [R, V/t] float32 or float64, half precision with `buffer` and `factor`; overwritten.
        labels: [R] int64 global token ids, or IGNORE_INDEX.
        table: the vocabulary-parallel weight of the logits.
        subtract_label: True writes the loss's gradient instead, p - onehot(label).
        buffer: [r, V/t] float32, in which r rows of half-precision logits are processed at a time.
        factor: 0-d, multiplies the buffer before it is rounded.

    Returns:
        losses [R] (0 where ignored) in float32 or float64.
    """
    tp, true = table.tp, table.true_local_rows
    target, index, minus_one = label_logits(logits, columns_of(labels, table))
    log_sum = torch.empty_like(target)
    if true < logits.shape[1]:
        logits[:, true:] = -math.inf  # padding takes no probability, at every tp
    tensors = (logits, index, minus_one, log_sum, target)
    blocks = (
        [tensors] if buffer is None else zip(*(x.split(max(1, len(buffer))) for x in tensors), strict=True)
    )
    for block, block_index, block_minus_one, block_log_sum, block_target in blocks:
        p = block if buffer is None else buffer[: len(block)].copy_(block)
        softmax_in_place(p, true, block_log_sum)
        if tp.size > 1:
            parts = all_gather(torch.stack([block_log_sum, block_target]), tp)  # [t, 2, r]
            global_log_sum = torch.logsumexp(parts[:, 0], 0)
            p.mul_((block_log_sum - global_log_sum).exp_().unsqueeze(1))
            block_log_sum.copy_(global_log_sum)
            block_target.copy_(parts[:, 1].sum(0))
        if subtract_label:
            p.scatter_add_(1, block_index, block_minus_one)
        if buffer is not None:
            assert factor is not None
            if p.is_cpu:  # a product that also casts is four times slower than two passes
                block.copy_(p if factor.item() == 1.0 else p.mul_(factor))
            else:
                torch.mul(p, factor, out=block)
    return log_sum.sub_(target).masked_fill_(labels == IGNORE_INDEX, 0.0)


def label_logits(logits: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's logit at its column [R], 0 where that is -1; and index and value [R, 1] of its update."""
    index, is_here = column.clamp(min=0).unsqueeze(1), column >= 0
    target = logits.gather(1, index).squeeze(1).to(loss_dtype(logits.dtype)).masked_fill_(~is_here, 0.0)
    return target, index, is_here.to(target.dtype).neg_().unsqueeze(1)


def softmax_in_place(p: Tensor, true: int, log_sum: Tensor) -> None:
    """Replace logits [R, W] by their softmax, and write log-sum-exps [R]; columns from `true` on are -inf."""
    if true == 0:  # a shard of padding only
        log_sum.fill_(-math.inf)
        p.zero_()
        return
    torch.amax(p, -1, out=log_sum)
    torch.softmax(p, -1, out=p)
    # log-sum-exp from the largest probability, at least 1/V, without another pass
    log_sum.sub_(p.amax(-1).log_())


def columns_of(labels: Tensor, table: VocabParallelEmbedding) -> Tensor:
    """This shard's column of each label, -1 for labels of other shards and IGNORE_INDEX."""
    if table.tp.size == 1:
        return labels.clamp(min=-1)  # IGNORE_INDEX is negative, padding is not a label
    column = labels - table.first
    return column.masked_fill((column < 0) | (column >= table.true_local_rows), -1)


def is_argmax(logits: Tensor, labels: Tensor, table: VocabParallelEmbedding) -> Tensor:
    """True if a row's label has the largest logit (ties: lowest id): [R, V/t], [R] -> bool [R].

    Ranks exchange their shard's largest logit and whether it is the label's, never logits.
    """
    true = table.true_local_rows
    if true == 0:  # a shard of padding only
        peak, best = logits.new_full(labels.shape, -math.inf), torch.zeros_like(labels, dtype=torch.bool)
    else:
        peak, column = logits[:, :true].max(-1)  # the first of ties
        best = column + table.first == labels
    if table.tp.size == 1:
        return best
    parts = all_gather(torch.stack([peak, best.to(peak.dtype)]), table.tp)  # [t, 2, R]
    winner = parts[:, 0].argmax(0, keepdim=True)  # the first of ties: lower ranks hold lower ids
    return parts[:, 1].gather(0, winner).squeeze(0) > 0


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@cache
def compiled_passes() -> tuple[LogSum, Gradient]:
    """The two passes below, compiled, for half-precision losses of compiled models."""
    return torch.compile(log_sum_and_target), torch.compile(logits_gradient)


def log_sum_and_target(logits: Tensor, column: Tensor, true: int) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the first `true` columns, and each row's logit at `column`, 0 where that is -1.

    [R, V/t] half, [R] int64 -> [R], [R] float32.
    """
    target = logits.gather(1, column.clamp(min=0).unsqueeze(1)).squeeze(1).float()
    return torch.logsumexp(logits[:, :true].float(), -1), target.masked_fill(column < 0, 0.0)


def logits_gradient(logits: Tensor, log_sum: Tensor, column: Tensor, factor: Tensor, true: int) -> Tensor:
    """Factor * (softmax - onehot(column)) in the dtype of `logits`: 0 from column `true` on.

    Args:
        logits: [R, V/t] half.
        log_sum: [R] float32, over the whole vocabulary.
        column: [R] int64, -1 for labels of other shards.
        factor: 0-d float32.
        true: columns of this shard that belong to tokens.
    """
    columns = torch.arange(logits.shape[1], device=logits.device)
    p = torch.exp(logits.float() - log_sum.unsqueeze(1))
    p = torch.where(columns < true, p, 0.0) - (columns == column.unsqueeze(1)).float()
    return (p * factor).to(logits.dtype)
