"""Regions of a global tensor, and the shards of ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor


class Region(NamedTuple):
    """The elements `offset[i] <= index[i] < offset[i] + size[i]`; ((), ()) is the element of a 0-d tensor."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> "Region":
        return cls((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        return prod(self.size)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True if every element lies inside a tensor of `shape`."""
        return len(self.offset) == len(self.size) == len(shape) and all(
            o + n <= full for o, n, full in zip(self.offset, self.size, shape, strict=True)
        )

    def intersect(self, other: "Region") -> "Region | None":
        """Return the common elements, None if there are none."""
        low = tuple(map(max, self.offset, other.offset))
        high = (min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        size = tuple(h - o for h, o in zip(high, low, strict=True))
        return Region(low, size) if all(n > 0 for n in size) else None

    def within(self, outer: "Region") -> tuple[slice, ...]:
        """Return the index of these elements in a tensor that holds only `outer`."""
        starts = (a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(a, a + n) for a, n in zip(starts, self.size, strict=True))


Read = Callable[[str, Region], Tensor]
"""Returns elements of a tensor, on the CPU, by its name."""


@dataclass(frozen=True)
class TensorSplit:
    """Split of a tensor over layouts. Stored in the manifest, so that resharding needs no model."""

    tp_dim: int | None
    """Dim split over tp; None if every tp rank holds the full tensor, which the first writes."""
    stage: int | str
    """The layer it belongs to, or "first" or "last": the stage before or after the layers."""
    multiple: int = 1
    """Each tp rank holds a multiple of this many rows of tp_dim, the last ones the remainder (a padded
    vocabulary: padding rows are not stored)."""

    def rows(self, size: int, tp: int, rank: int) -> range:
        """Return the rows of tp_dim, `size` in all, that a tp rank holds."""
        rows = -(-size // (self.multiple * tp)) * self.multiple
        return range(min(rank * rows, size), min((rank + 1) * rows, size))


UNSPLIT = TensorSplit(None, "first")


@dataclass(frozen=True)
class TensorShard:
    """A region of a global tensor, held by this rank.

    `tensor` is a plain local tensor of any strides on any device; `global_shape` and `offset` have one
    number per dim. A tensor without elements is allowed and never stored.
    """

    tensor: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    split: TensorSplit = UNSPLIT
    """Split of the global tensor over layouts."""

    def __post_init__(self) -> None:
        assert self.tensor.ndim == len(self.global_shape) == len(self.offset), "dims differ"
        assert not self.tensor.numel() or self.region.fits(self.global_shape), (
            f"shard of {list(self.tensor.shape)} at {self.offset} is outside {self.global_shape}"
        )

    @classmethod
    def full(cls, tensor: Tensor) -> "TensorShard":
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.ndim)

    @property
    def region(self) -> Region:
        return Region(tuple(self.offset), tuple(self.tensor.shape))


def describe(piece: Region) -> str:
    """Format a region as an index: [0:4, 8:16]."""
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(*piece, strict=True)) + "]"
