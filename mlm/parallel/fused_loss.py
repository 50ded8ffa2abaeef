"""The vocabulary loss and its gradient in two passes over half-precision logits, for a compiler.

PyTorch's kernels, one after the other, read and write some 34 bytes a logit for cast, largest, softmax,
label, scale and cast. Compiled, the two functions below read 2 bytes, then read 2 and write 2 (a compiler
that makes two passes of a log-sum-exp reads 2 more).

Shapes: R rows, V padded vocabulary, t = tensor-parallel size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

LogSum = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
Gradient = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def log_sum_and_target(logits: Tensor, column: Tensor, true: int) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the first `true` columns, and each row's logit at `column`, 0 where that is -1.

    [R, V/t] half, [R] int64 -> [R], [R] float32.
    """
    wide = logits[:, :true].float()
    target = logits.gather(1, column.clamp(min=0).unsqueeze(1)).squeeze(1).float()
    return torch.logsumexp(wide, -1), target.masked_fill(column < 0, 0.0)


def gradient(logits: Tensor, log_sum: Tensor, column: Tensor, factor: Tensor, true: int) -> Tensor:
    """Factor * (softmax - onehot(column)) in the dtype of `logits`: 0 from column `true` on.

    Args:
        logits: [R, V/t] half.
        log_sum: [R] float32, over the whole vocabulary.
        column: [R] int64, -1 where the label lives elsewhere.
        factor: 0-d float32.
        true: columns of this shard that belong to tokens.
    """
    columns = torch.arange(logits.shape[1], device=logits.device)
    p = torch.exp(logits.float() - log_sum.unsqueeze(1))
    p = torch.where(columns < true, p, 0.0) - (columns == column.unsqueeze(1)).float()
    return (p * factor).to(logits.dtype)


_compiled: list[tuple[LogSum, Gradient]] = []


def use_compiler() -> None:
    """Compile the passes; half-precision losses of compiled models take them."""
    if not _compiled:
        _compiled.append((torch.compile(log_sum_and_target), torch.compile(gradient)))


def compiled() -> tuple[LogSum, Gradient] | None:
    """The compiled passes, if `use_compiler` was called."""
    return _compiled[0] if _compiled else None
