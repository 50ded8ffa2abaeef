"""The loss of each token, differentiable: for objectives that are functions of sequences' likelihoods.

Where all that counts is the sum over tokens, `linear_cross_entropy` computes the gradients with it. Here each
token's weight in the loss is known only later, so its logits are computed again in backward, a chunk at a
time; nothing of size V is kept.

Shapes: R rows (tokens), H hidden, V padded vocabulary, t = tensor-parallel size.
"""

from typing import Any

import torch
from torch import Tensor

from mlm.parallel.chunks import chunk_rows
from mlm.parallel.config import IGNORE_INDEX
from mlm.parallel.cross_entropy import enter, loss_dtype, softmax_and_loss, token_losses
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.matmul import product, weight_gradient


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, table: VocabParallelEmbedding
    ) -> Tensor:
        ctx.save_for_backward(hidden, labels)
        ctx.table = table
        return token_losses(hidden, labels, table)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, labels = ctx.saved_tensors
        table, (_, needs_weight) = ctx.table, ctx.needs_input_grad[:2]
        weight = table.weight_in(hidden.dtype)
        dy = dy.masked_fill(labels == IGNORE_INDEX, 0.0)
        d_hidden, d_weight = torch.empty_like(hidden), None
        rows = chunk_rows(len(hidden), len(weight), hidden.device.type, half=False).chunk
        for first in range(0, len(hidden), rows):
            part = slice(first, first + rows)
            logits = product(hidden[part], weight).to(loss_dtype(hidden.dtype))
            softmax_and_loss(logits, labels[part], table, subtract_label=True)
            d_logits = logits.mul_(dy[part].unsqueeze(1)).to(hidden.dtype)
            d_hidden[part] = product(d_logits, weight.t())
            if needs_weight:
                dw = weight_gradient(d_logits, hidden[part], table.weight.dtype)
                d_weight = dw if d_weight is None else d_weight.add_(dw)
        return d_hidden, d_weight, None, None


def differentiable_losses(hidden: Tensor, labels: Tensor, table: VocabParallelEmbedding) -> Tensor:
    """Return the loss of each row, 0 where it is not scored. Its gradient is summed over tp here.

    Args:
        hidden: [R, H] replicated over tp; [R/t, H], this rank's rows, if the table is sequence-parallel.
        labels: [R] int64, IGNORE_INDEX where not scored.
        table: the vocabulary-parallel weight [V/t, H].

    Returns:
        [R] float32 (float64 for float64), the same on every tp rank.
    """
    hidden = enter(hidden, labels, table)
    losses: Tensor = _TokenLosses.apply(hidden, table.weight, labels, table)  # type: ignore[no-untyped-call]
    return losses
