"""Placements of tensors on ranks: the part of the full tensor that each rank holds, and its error."""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, combinations, product
from typing import Literal, TypeVar

import torch
from torch import Tensor

from mlm.verify.audit.record import Split

SPLIT_AXES = ("dp", "cp", "tp")
"""Axes over which a tensor may be split, outermost first: the order of `Coordinates`."""
Coordinates = tuple[int, ...]
Parts = dict[Coordinates, Tensor]
Pairs = dict[Coordinates, tuple[Tensor, Tensor]]
AxisSharding = Split | Literal["copy", "sum"]
Item = TypeVar("Item")
Placement = Mapping[str, AxisSharding]
"""By axis with several ranks: how a tensor is sharded. "sum": the full tensor is the sum over the axis."""


@dataclass(frozen=True, eq=False)
class Match:
    """Parts of ranks and their expected values at one placement."""

    pairs: Pairs
    """(actual, expected) by rank, after sums."""
    regions: Mapping[Coordinates, Hashable]
    """Region of the full tensor on each rank; equal for ranks that hold copies."""
    placement: Placement = field(default_factory=dict)
    is_complete: bool = True
    """False if the ranks together do not hold each element."""

    @cached_property
    def error(self) -> float:
        """Largest difference of an element; infinite if one is not finite or on no rank."""
        return max(difference(*pair) for pair in self.pairs.values()) if self.is_complete else math.inf

    @property
    def parts(self) -> Parts:
        return {rank: part for rank, (part, _) in self.pairs.items()}

    @property
    def sums(self) -> list[str]:
        """Axes over which ranks hold addends; dp aside, whose addends are usual."""
        return [axis for axis, sharding in self.placement.items() if sharding == "sum" and axis != "dp"]

    def copies(self, axis: str) -> list[Parts]:
        """Groups of parts along an axis that hold the same region."""
        return groups_along(axis, self.parts, self.regions)


def groups_along(axis: str, parts: Parts, regions: Mapping[Coordinates, Hashable]) -> list[Parts]:
    """Groups of parts with the same region along an axis; without regions, all ranks along it."""
    number, groups = SPLIT_AXES.index(axis), dict[Hashable, Parts]()
    for rank, part in parts.items():
        groups.setdefault((rank[:number], rank[number + 1 :], regions.get(rank)), {})[rank] = part
    return list(groups.values())


def region(full: Tensor, placement: Placement, rank: Coordinates, parts: Parts) -> Tensor:
    """A copy of a rank's part of the full tensor. Raises RuntimeError if the shapes do not fit."""
    for split in (sharding for sharding in placement.values() if isinstance(sharding, Split)):
        number, count, dim = part_number(rank, split, parts), part_count(split, parts), split.dim % full.ndim
        rows = torch.arange(full.shape[dim])
        if split.is_zigzag:
            pieces = rows.view(2 * count, -1)
            rows = torch.cat([pieces[number], pieces[-1 - number]])
        else:
            rows = rows.view(split.blocks, count, -1)[:, number].flatten()
        full = full.index_select(dim, rows)
    if full.shape != parts[rank].shape:
        raise RuntimeError("the shapes do not fit")
    return full


def part_count(split: Split, parts: Iterable[Coordinates]) -> int:
    return split.groups or 1 + max(rank[SPLIT_AXES.index(split.axis)] for rank in parts)


def part_number(rank: Coordinates, split: Split, parts: Iterable[Coordinates]) -> int:
    axis = SPLIT_AXES.index(split.axis)
    return rank[axis] * part_count(split, parts) // (1 + max(coords[axis] for coords in parts))


def subsets(items: Sequence[Item]) -> Iterator[tuple[Item, ...]]:
    """All subsets in order, smallest first; the first is empty."""
    return chain.from_iterable(combinations(items, size) for size in range(len(items) + 1))


def add_over(parts: Parts, axis: str, sharding: AxisSharding = "sum") -> Parts:
    """Sums over an axis, or over the ranks along it that hold the same part of a split."""
    numbers: dict[Coordinates, int] = {}
    if isinstance(sharding, Split):
        numbers = {rank: part_number(rank, sharding, parts) for rank in parts}
    groups = groups_along(axis, parts, numbers)
    return {rank: torch.stack([*group.values()]).sum(0) for group in groups for rank in group}


def are_copies(parts: Parts, axis: str) -> bool:
    """True if all ranks along an axis hold the same numbers."""
    groups = (group.values() for group in groups_along(axis, parts, {}))
    return all(torch.equal(first, part) for first, *rest in groups for part in rest)


def fill(full: Tensor, parts: Parts, placement: Placement) -> None:
    numbers = torch.arange(full.numel()).view(full.shape)
    for rank, part in parts.items():
        full.view(-1)[region(numbers, placement, rank, parts).flatten()] = part.flatten()


def placements(
    parts: Parts,
    full: Tensor,
    sizes: Mapping[str, int],
    *,
    blocks: Mapping[str, Iterable[int]],
    sums: Sequence[str] = (),
) -> Iterator[Placement]:
    """Placements that fit the shapes; copies before splits before sums, one block before several."""
    shape = next(iter(parts.values())).shape
    dims = [d for d in range(full.ndim) if d >= len(shape) or shape[d] != full.shape[d]]
    axes = [axis for axis in SPLIT_AXES if sizes[axis] > 1]
    groups = [g for g in range(2, sizes["tp"]) if sizes["tp"] % g == 0]
    options: list[list[AxisSharding]] = [
        [
            "copy",
            *(Split(d, axis, b) for b in blocks.get(axis, (1,)) for d in dims),
            *(Split(d, axis, is_zigzag=True) for d in dims if axis == "cp"),
            *(Split(d, axis, groups=g) for g in groups for d in dims if axis == "tp"),
            *(Split(d, axis, groups=g, is_sum=True) for g in groups for d in dims if axis == "tp" in sums),
            *(["sum"] if axis in sums else []),  # type: ignore[list-item]
        ]
        for axis in axes
    ]
    for shardings in product(*options):
        placement = dict(zip(axes, shardings, strict=True))
        try:
            for rank in parts:
                region(full, placement, rank, parts)
        except (RuntimeError, IndexError, ZeroDivisionError):
            continue
        yield placement


def match(
    parts: Parts, full: Tensor, choices: Iterable[Placement], limit: float, *, is_scaled: bool
) -> Match | None:
    """The first placement whose error is at most `limit`, else the best; None if no placement fits.

    If `is_scaled`, gradients of each replica may have another scale, which its reduction undoes.
    """
    best: Match | None = None
    for placement in choices:
        if any(sharding == "sum" and are_copies(parts, axis) for axis, sharding in placement.items()):
            continue
        candidate = match_at(placement, parts, full)
        candidate = replace(candidate, pairs=unscaled(candidate.pairs)) if is_scaled else candidate
        if best is None or candidate.error < best.error:
            best = candidate
        if candidate.error <= limit:
            break
    return best


def match_at(placement: Placement, parts: Parts, full: Tensor) -> Match:
    """Match of parts, or of their sums, at a placement."""
    summed = parts
    for axis, sharding in placement.items():
        if sharding == "sum" or (isinstance(sharding, Split) and sharding.is_sum):
            summed = add_over(summed, axis, sharding)
    pairs = {rank: (part, region(full, placement, rank, parts)) for rank, part in summed.items()}
    splits = [x if isinstance(x, Split) else Split(0, axis) for axis, x in placement.items() if x != "copy"]
    regions = {rank: tuple(part_number(rank, split, parts) for split in splits) for rank in pairs}
    return Match(pairs, regions, placement)


def unscaled(pairs: Pairs) -> Pairs:
    """Parts divided by a fitted scale of their replica."""
    groups: dict[Coordinates, Pairs] = {}
    for rank, pair in pairs.items():
        groups.setdefault(rank[:2], {})[rank] = pair
    rescaled: Pairs = {}
    for group in groups.values():
        sides = zip(*group.values(), strict=True)
        scale = scale_of(*(torch.cat([x.flatten() for x in tensors]) for tensors in sides)) or 1.0
        rescaled |= {rank: (part / scale, expected) for rank, (part, expected) in group.items()}
    return rescaled


def match_offsets(parts: Parts, full: Tensor, offsets: Mapping[Coordinates, tuple[int, ...]]) -> Match:
    """Match of parts at known offsets; incomplete if these leave a hole."""
    regions = {rank: (offsets[rank], tuple(part.shape)) for rank, part in parts.items()}
    pairs = {rank: (part, region_at(full, offsets[rank], part.shape)) for rank, part in parts.items()}
    is_complete = sum(math.prod(shape) for _, shape in set(regions.values())) == full.numel()
    return Match(pairs, regions, is_complete=is_complete)


def region_at(full: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    return full[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def match_rows(
    parts: Parts, full: Tensor, bound: float, *, is_scaled: bool, outputs: tuple[Parts, Tensor] | None
) -> Match | None:
    """Match of replicas' rows in any order, as of the tokens that an expert receives.

    Gradients are sorted by their `outputs`, and by themselves only where these are equal.
    """
    if full.ndim < 2:
        return None
    rows = torch.cat([part for _, part in sorted(parts.items())])
    if rows.shape != full.shape:
        return None

    def key(x: Tensor) -> Tensor:
        return x.flatten(1) @ torch.linspace(1, 2, x[0].numel(), dtype=x.dtype)

    sides, groups = [rows, full], torch.zeros(len(rows))
    if outputs is not None:
        keys = [key(torch.cat([x for _, x in sorted(outputs[0].items())])), key(outputs[1])]
        if any(len(key_values) != len(rows) for key_values in keys):
            return None
        sides = [x[key_values.argsort()] for x, key_values in zip(sides, keys, strict=True)]
        equal = 10 * bound / full.abs().amax() * keys[1].abs().amax()
        groups[1:] = (keys[1].sort().values.diff() > equal).cumsum(0)
    orders = ((x, key(x).argsort()) for x in sides)
    part, expected = (x[order[groups[order].argsort(stable=True)]] for x, order in orders)
    pairs: Pairs = {(0, 0, 0): (part, expected)}
    return Match(unscaled(pairs) if is_scaled else pairs, {(0, 0, 0): 0}, {"dp": Split(0, "dp")})


def difference(part: Tensor, expected: Tensor) -> float:
    """Largest difference of an element; infinite if one is not finite."""
    if not part.numel():
        return 0.0
    part, expected = part.double(), expected.double()
    off = (part - expected).abs().nan_to_num(nan=torch.inf)
    return float(off.masked_fill(part == expected, 0.0).amax())  # masked scores: equal infinities


def scale_of(part: Tensor, expected: Tensor) -> float:
    """Least-squares factor of `part` over `expected`; 1 if that is zero."""
    x, y = part.double().flatten(), expected.double().flatten()
    return float(x @ y / (y @ y)) if bool(y.any()) else 1.0
