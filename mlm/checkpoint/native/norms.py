"""Norms of saved tensors: they show numbers that are not finite, and weights that a wrong step blew up."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mlm.checkpoint.native.format import TensorEntry

JUMP = 100.0
"""Growth or shrinkage of a weight's norm since the previous checkpoint that makes a checkpoint doubtful."""
LEAST_RMS = 0.01
"""Least root mean square of a weight that can jump: biases begin at zero, and grow by any factor."""
NOT_FINITE, LARGEST = math.nan, sys.float_info.max
PIECE = 1 << 16  # elements summed at a time: in the processor's cache, by one thread


def norm(x: Tensor) -> float:
    """Return the L2 norm; NaN if an element is not finite. Finite elements of any size do not overflow."""
    total = 0.0
    for piece in x.detach().reshape(-1).split(PIECE):
        if piece.dtype in (torch.float32, torch.float64):
            square = torch.dot(piece, piece).item()
            if math.isfinite(square):
                total += square
                continue
        wide = piece.double()  # squares beyond the range of the dtype, or an element that is not finite
        if not wide.isfinite().all():
            return NOT_FINITE
        total += torch.dot(wide, wide).item()
    return min(math.sqrt(total), LARGEST)


def with_norms(
    tensors: Mapping[str, TensorEntry],
    parts: Sequence[Mapping[str, float]],
    norms_before: Mapping[str, float | None],
) -> dict[str, TensorEntry]:
    """Add norms to entries: of their `parts` on all ranks, NaN if one is, and of the previous checkpoint."""
    pieces: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            pieces.setdefault(name, []).append(value)
    norms = {name: min(math.hypot(*values), LARGEST) for name, values in pieces.items()}  # min keeps NaN
    return {
        name: replace(entry, norm=norms.get(name), norm_before=norms_before.get(name))
        for name, entry in tensors.items()
    }


def largest_jump(tensors: Mapping[str, TensorEntry]) -> tuple[str, float] | None:
    """Return the weight whose norm grew most since the previous checkpoint, and its factor.

    None if no norm grew or shrank by JUMP.
    """
    ratios = {}
    for name, entry in tensors.items():
        least = LEAST_RMS * math.sqrt(math.prod(entry.shape))
        if name.startswith("model.") and entry.norm is not None and (entry.norm_before or 0.0) > least:
            ratios[name] = entry.norm / (entry.norm_before or 1.0)
    jumps = [item for item in ratios.items() if not 1 / JUMP < item[1] < JUMP]
    return max(jumps, key=lambda item: item[1], default=None)
