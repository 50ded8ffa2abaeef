"""Rectangles of a global tensor: what a rank holds of it, how two of them meet, whether they tile it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor


class Rectangle(NamedTuple):
    """The elements `offset[i] <= index[i] < offset[i] + size[i]`. Of a 0-d tensor: ((), ()), one element."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.size)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether every element is one of a tensor of `shape`."""
        return len(self.offset) == len(self.size) == len(shape) and all(
            o + n <= full for o, n, full in zip(self.offset, self.size, shape, strict=True)
        )

    def intersect(self, other: "Rectangle") -> "Rectangle | None":
        """The elements of both, None when there are none."""
        low = tuple(map(max, self.offset, other.offset))
        high = (min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        size = tuple(h - o for h, o in zip(high, low, strict=True))
        return Rectangle(low, size) if all(n > 0 for n in size) else None

    def within(self, outer: "Rectangle") -> tuple[slice, ...]:
        """Index of these elements in a tensor that holds `outer` only."""
        starts = (a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(a, a + n) for a, n in zip(starts, self.size, strict=True))


@dataclass(frozen=True)
class Shard:
    """A rectangle of a global tensor, held by this rank.

    `tensor` is a plain local tensor of any strides on any device; `global_shape` and `offset` have one
    number per dim of it (none for a 0-d tensor). A tensor of no elements is legal and never stored.
    """

    tensor: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.tensor.ndim == len(self.global_shape) == len(self.offset), "dims differ"
        assert not self.tensor.numel() or self.rectangle.fits(self.global_shape), (
            f"shard of {list(self.tensor.shape)} at {self.offset} is outside {self.global_shape}"
        )

    @classmethod
    def whole(cls, tensor: Tensor) -> "Shard":
        """All of a tensor."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.ndim)

    @property
    def rectangle(self) -> Rectangle:
        """Where in the global tensor this is."""
        return Rectangle(tuple(self.offset), tuple(self.tensor.shape))


def tiling_fault(shape: tuple[int, ...], pieces: Sequence[Rectangle]) -> str | None:
    """What keeps `pieces` from holding each element of `shape` exactly once; None when nothing does.

    Sweeps along dim 0, so that only pieces sharing rows are compared: cuts along dim 0, of which there may
    be thousands, cost n log n.
    """
    for piece in pieces:
        if not piece.fits(shape) or not piece.volume:
            return f"piece {describe(piece)} is not inside shape {list(shape)}"
    active: list[Rectangle] = []
    for piece in sorted(pieces):
        active = [other for other in active if not shape or other.offset[0] + other.size[0] > piece.offset[0]]
        for other in active:
            if piece.intersect(other):
                return f"pieces {describe(other)} and {describe(piece)} overlap"
        active.append(piece)
    held = sum(piece.volume for piece in pieces)
    return None if held == prod(shape) else f"{held} of its {prod(shape)} elements are held: there is a hole"


def describe(piece: Rectangle) -> str:
    """A rectangle as one would index it: [0:4, 8:16]."""
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(*piece, strict=True)) + "]"
