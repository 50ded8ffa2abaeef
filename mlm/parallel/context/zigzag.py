"""Context parallelism: the tokens of a sequence that each rank holds.

A sequence is split into 2c pieces, and rank r holds pieces r and 2c - 1 - r in this order, so that causal
attention costs every rank the same (arXiv:2407.21783, section 3.3.2).

Shapes: S sequence, c = context-parallel size.
"""

import torch
from torch import Tensor

from mlm.parallel.mesh import Axis


def local_tokens(x: Tensor, cp: Axis, dim: int) -> Tensor:
    """This rank's part of what is there for each token along `dim`: S -> S/c."""
    return x if cp.size == 1 else _tokens_of(x, cp.rank, cp.size, dim)


def local_positions(length: int, cp: Axis, device: torch.device) -> Tensor:
    """Places in a sequence of S = `length` tokens of those that this rank holds: int64 [S/c]."""
    if cp.size == 1:
        return torch.arange(length, device=device)
    return rank_positions(cp.rank, length, cp.size, device)


def rank_positions(rank: int, length: int, size: int, device: torch.device) -> Tensor:
    """The same for rank number `rank` of `size`."""
    return _tokens_of(torch.arange(length, device=device), rank, size, 0)


def _tokens_of(x: Tensor, rank: int, size: int, dim: int) -> Tensor:
    assert x.shape[dim] % (2 * size) == 0, f"{x.shape[dim]} tokens in {2 * size} pieces"
    parts = x.chunk(2 * size, dim)
    return torch.cat([parts[rank], parts[2 * size - 1 - rank]], dim)
