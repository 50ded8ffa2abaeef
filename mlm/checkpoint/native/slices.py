"""Regions of a global tensor: intersection, tiling, and the shards of ranks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, islice, product
from math import prod
from typing import NamedTuple

from torch import Tensor

MAX_CUT_DIMS = 4  # layouts split a tensor along one or two
MAX_COMPARED = 100_000  # pairs of pieces looked at to name two that overlap


class Region(NamedTuple):
    """The elements `offset[i] <= index[i] < offset[i] + size[i]`. Of a 0-d tensor: ((), ()), one element."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.size)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True if every element is one of a tensor of `shape`."""
        return len(self.offset) == len(self.size) == len(shape) and all(
            o + n <= full for o, n, full in zip(self.offset, self.size, shape, strict=True)
        )

    def intersect(self, other: "Region") -> "Region | None":
        """The elements of both, None when there are none."""
        low = tuple(map(max, self.offset, other.offset))
        high = (min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        size = tuple(h - o for h, o in zip(high, low, strict=True))
        return Region(low, size) if all(n > 0 for n in size) else None

    def within(self, outer: "Region") -> tuple[slice, ...]:
        """Index of these elements in a tensor that holds `outer` only."""
        starts = (a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(a, a + n) for a, n in zip(starts, self.size, strict=True))


@dataclass(frozen=True)
class Split:
    """Split of a tensor over layouts. Stored in the manifest, so that resharding needs no model."""

    tp_dim: int | None
    """Dim split over tp; None when every tp rank holds all of it, and the first writes it."""
    stage: int | str
    """The layer it belongs to, or "first" or "last": the stage before or after the layers."""
    multiple: int = 1
    """Each tp rank holds a multiple of this many rows of tp_dim, the last ones what is left (a padded
    vocabulary: rows that are padding are not stored)."""

    def rows(self, size: int, tp: int, rank: int) -> range:
        """The rows of tp_dim, `size` in all, that a tp rank holds."""
        each = -(-size // (self.multiple * tp)) * self.multiple
        return range(min(rank * each, size), min((rank + 1) * each, size))


@dataclass(frozen=True)
class Shard:
    """A region of a global tensor, held by this rank.

    `tensor` is a plain local tensor of any strides on any device; `global_shape` and `offset` have one
    number per dim of it (none for a 0-d tensor). A tensor of no elements is legal and never stored.
    """

    tensor: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    split: Split | None = None
    """Split of the global tensor over layouts, if known."""

    def __post_init__(self) -> None:
        assert self.tensor.ndim == len(self.global_shape) == len(self.offset), "dims differ"
        assert not self.tensor.numel() or self.region.fits(self.global_shape), (
            f"shard of {list(self.tensor.shape)} at {self.offset} is outside {self.global_shape}"
        )

    @classmethod
    def whole(cls, tensor: Tensor) -> "Shard":
        """All of a tensor."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.ndim)

    @property
    def region(self) -> Region:
        """Region of the global tensor."""
        return Region(tuple(self.offset), tuple(self.tensor.shape))


def tiling_problem(shape: tuple[int, ...], pieces: Sequence[Region]) -> str | None:
    """Return why `pieces` do not hold each element of `shape` exactly once; None if they do.

    Costs the same for each piece, however they lie: half a million forged ones must not stall a reader.
    """
    for piece in pieces:
        if not piece.fits(shape) or not piece.volume:
            return f"piece {describe(piece)} is not inside shape {list(shape)}"
    cut = [d for d, full in enumerate(shape) if any(piece.size[d] != full for piece in pieces)]
    if len(cut) > MAX_CUT_DIMS:
        return f"it is split along {len(cut)} dims, {MAX_CUT_DIMS} is the limit"
    if _tile(shape, pieces, cut):
        return None
    for a, b in islice(combinations(sorted(pieces), 2), MAX_COMPARED):
        if a.intersect(b):
            return f"pieces {describe(a)} and {describe(b)} overlap"
    held = sum(piece.volume for piece in pieces)
    return f"{held} of its {prod(shape)} elements are held: there is a hole, or pieces overlap"


def _tile(shape: tuple[int, ...], pieces: Sequence[Region], cut: Sequence[int]) -> bool:
    """Return True if pieces inside `shape`, each whole along all dims but `cut`, hold each element once.

    How often each element is held is a sum of products of steps, up at a piece's offset and down at its end.
    Such sums are equal where their steps are, corner by corner.
    """
    if not prod(shape):
        return not pieces
    steps: Counter[tuple[int, ...]] = Counter()
    for piece in pieces:
        _add_steps(steps, [(piece.offset[d], piece.offset[d] + piece.size[d]) for d in cut], 1)
    _add_steps(steps, [(0, shape[d]) for d in cut], -1)
    return not any(steps.values())


def _add_steps(steps: "Counter[tuple[int, ...]]", spans: Sequence[tuple[int, int]], weight: int) -> None:
    for ends in product((0, 1), repeat=len(spans)):
        corner = tuple(span[end] for span, end in zip(spans, ends, strict=True))
        steps[corner] += -weight if sum(ends) % 2 else weight


def describe(piece: Region) -> str:
    """A region as one would index it: [0:4, 8:16]."""
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(*piece, strict=True)) + "]"
