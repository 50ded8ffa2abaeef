"""Capacity of experts: an expert takes the first tokens of a sequence that choose it, and drops the others.

Of a sequence, not of a rank's batch (arXiv:2101.03961, equation 3), so that no layout changes training. Where
ranks hold parts of a sequence, each needs the choices of the tokens before its own.

Shapes: S sequence (this rank's rows of it), B micro-batch, E experts, k experts per token, c and t = ranks
that split a sequence (cp, and tp with sequence parallelism).
"""

import math

import torch
from torch import Tensor

from mlm.parallel.collectives import all_gather
from mlm.parallel.mesh import Axis


def drop_choices(experts: Tensor, num_experts: int, factor: float, cp: Axis, tp: Axis) -> Tensor:
    """Replace choices beyond capacity by E: [S, B, k] -> [S, B, k] int64. Collective over cp and tp.

    Capacity is ceil(factor * k * length / E) tokens of a sequence.
    """
    rows, batch, k = experts.shape
    capacity = math.ceil(factor * k * rows * cp.size * tp.size / num_experts)
    chosen = torch.zeros(rows, batch, num_experts, dtype=torch.int32, device=experts.device)
    chosen.scatter_(-1, experts, 1)
    halves = chosen.tensor_split(2)
    earlier = earlier_choices(torch.stack([half.sum(0, dtype=torch.int32) for half in halves]), cp, tp)
    order = torch.cat(
        [half.cumsum(0, dtype=torch.int32) + n for half, n in zip(halves, earlier, strict=True)]
    )
    return experts.masked_fill(order.gather(-1, experts) > capacity, num_experts)


def earlier_choices(counts: Tensor, cp: Axis, tp: Axis) -> Tensor:
    """Sum of the counts of all tokens before each half of this rank's rows: [2, B, E] -> [2, B, E].

    A half lies within one of the two pieces of a sequence that a cp rank holds (context.py).
    """
    table = all_gather(all_gather(counts, tp), cp).flatten(1, 2)  # [c, 2t, B, E]
    starts = [[_start(rank, half, cp, tp) for half in range(2 * tp.size)] for rank in range(cp.size)]
    mine = starts[cp.rank][2 * tp.rank : 2 * tp.rank + 2]
    is_before = torch.tensor([[[start < own for start in each] for each in starts] for own in mine])
    return (table * is_before[..., None, None].to(table)).sum((1, 2), dtype=counts.dtype)


def _start(rank: int, half: int, cp: Axis, tp: Axis) -> int:
    """Return the number of halves before one of the 2t halves of cp rank `rank`."""
    piece = rank if half < tp.size else 2 * cp.size - 1 - rank
    return piece * tp.size + half % tp.size
