"""Capacity of experts: an expert takes the first tokens of a sequence that choose it, and drops the others.

Of a sequence, not of a rank's batch (arXiv:2101.03961, equation 3), so that no layout changes training. Where
ranks hold parts of a sequence, each gathers the choices of all.

Shapes: S sequence (this rank's rows of it), B micro-batch, E experts, k experts per token, L the whole
sequence, of which c = cp and t = tp ranks (with sequence parallelism) hold S each.
"""

import math

import torch
from torch import Tensor

from mlm.config.fields import exact
from mlm.parallel.collectives import all_gather
from mlm.parallel.context import rank_positions
from mlm.parallel.mesh import Axis


def drop_choices(experts: Tensor, num_experts: int, factor: float, cp: Axis, tp: Axis) -> Tensor:
    """Replace choices beyond capacity by E: [S, B, k] -> [S, B, k] int64. Collective over cp and tp."""
    rows, batch, k = experts.shape
    length = rows * cp.size * tp.size
    places = torch.arange(length, device=experts.device)  # of each rank's rows, in order of ranks
    if cp.size > 1:
        places = torch.cat([rank_positions(n, length, cp.size, experts.device) for n in range(cp.size)])
    chosen = torch.zeros(length, batch, num_experts, dtype=torch.int32, device=experts.device)
    chosen[places] = chosen.scatter(-1, all_gather(all_gather(experts, tp), cp).view(length, batch, k), 1)
    order = chosen.cumsum(0, dtype=torch.int32)[places].view(-1, rows, batch, num_experts)
    mine = order[cp.rank * tp.size + tp.rank]
    capacity = expert_capacity(factor, k * length, num_experts)
    return experts.masked_fill(mine.gather(-1, experts) > capacity, num_experts)


def expert_capacity(factor: float, choices: int, num_experts: int) -> int:
    """Return the tokens of a sequence that an expert takes: ceil(factor * choices / E)."""
    return math.ceil(exact(factor) * choices / num_experts)
