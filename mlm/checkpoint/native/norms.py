"""Norms of saved tensors: they show numbers that are not finite, and weights that a wrong step blew up."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mlm.checkpoint.native.format import TensorEntry

JUMP = 100.0
"""Growth of a weight's norm since the checkpoint before, from which the new one is doubtful."""
LEAST_RMS = 0.01
"""Root mean square of a weight that can jump: biases begin at zero, and grow by any factor."""
NOT_FINITE = math.nan


class NormSums:
    """Norms of the tensors of a file, summed block by block while it is digested, in the processor's cache.

    Args:
        places: name, dtype, first byte and end of each tensor in the file.
    """

    def __init__(self, places: Sequence[tuple[str, torch.dtype, int, int]]) -> None:
        self._left = [place for place in places if place[1].is_floating_point and place[2] < place[3]]
        self.norms = {name: 0.0 for name, *_ in self._left}

    def update(self, start: int, block: memoryview | bytearray) -> None:
        """Take the next bytes of the file, from byte `start` on. No element lies in two blocks."""
        end = start + len(block)
        for name, dtype, begin, stop in self._left:
            if begin >= end:
                break
            first, last = max(begin, start), min(stop, end)
            x = torch.frombuffer(block, dtype=torch.uint8, count=last - first, offset=first - start)
            self.norms[name] = joint_norm([self.norms[name], norm(x.view(dtype))])
        self._left = [place for place in self._left if place[3] > end]


def norm(x: Tensor) -> float:
    """L2 norm; NaN if an element is not finite, whatever the size of those that are."""
    flat = x.detach().reshape(-1)
    values = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    square = float(torch.dot(values, values))
    if math.isfinite(square):
        return math.sqrt(square)
    wide = flat.double()  # squares beyond the range of the dtype, or an element that is not finite
    largest = float(wide.abs().max())
    if not math.isfinite(largest):
        return NOT_FINITE
    return min(largest * float(torch.linalg.vector_norm(wide / largest)), torch.finfo(torch.float64).max)


def joint_norm(norms: Sequence[float]) -> float:
    """Norm of a tensor from those of its parts; NaN if one is."""
    if any(math.isnan(part) for part in norms):
        return NOT_FINITE
    return min(math.hypot(*norms), torch.finfo(torch.float64).max)


def with_norms(
    tensors: Mapping[str, TensorEntry],
    parts: Sequence[Mapping[str, float]],
    before: Mapping[str, float | None],
) -> dict[str, TensorEntry]:
    """Add to entries the norms of their parts on all ranks, and those of the checkpoint before."""
    found: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            found.setdefault(name, []).append(value)
    norms = {name: joint_norm(values) for name, values in found.items()}
    return {
        name: replace(entry, norm=norms.get(name), norm_before=before.get(name))
        for name, entry in tensors.items()
    }


def first_not_finite(tensors: Mapping[str, TensorEntry]) -> str | None:
    """Name of a tensor with an element that is not finite, a weight if there is one; by its norm."""
    bad = [name for name, entry in tensors.items() if entry.norm is not None and math.isnan(entry.norm)]
    return min(bad, key=lambda name: not name.startswith("model."), default=None)


def largest_jump(tensors: Mapping[str, TensorEntry]) -> tuple[str, float] | None:
    """The weight that grew most since the checkpoint before, and its factor; None if none reached JUMP."""
    grown = {}
    for name, entry in tensors.items():
        least = LEAST_RMS * math.sqrt(math.prod(entry.shape))
        if name.startswith("model.") and entry.norm is not None and (entry.norm_before or 0.0) > least:
            grown[name] = entry.norm / (entry.norm_before or 1.0)
    name = max(grown, key=lambda each: grown[each], default=None)
    return (name, grown[name]) if name is not None and grown[name] >= JUMP else None


def describe_not_finite(name: str) -> str:
    """The finding in words: `weights not finite: model.token.weight`."""
    what = "weights" if name.startswith("model.") else "optimizer state"
    return f"{what} not finite: {name}"
