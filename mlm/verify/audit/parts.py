"""Tensors of several ranks beside the whole one of the reference: each rank's part, and how far off it is."""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from mlm.verify.audit.record import Split

SPLIT_AXES = ("dp", "cp", "tp")
"""Axes over which a tensor may be split, outermost first: the order of coordinates here."""
Coordinates = tuple[int, ...]
Parts = dict[Coordinates, Tensor]
Pairs = dict[Coordinates, tuple[Tensor, Tensor]]
How = Split | Literal["copy", "sum"]
Placement = Mapping[str, How]
"""Of each axis with several ranks: how they hold a tensor. "sum": the whole is the sum of theirs."""


@dataclass(frozen=True, eq=False)
class Match:
    """Parts beside what they should be, at the placement that fits best."""

    pairs: Pairs
    """(a rank's tensor, what it should be), after sums."""
    regions: Mapping[Coordinates, Hashable]
    """What each rank's part is of the whole: the same for ranks that hold copies."""
    placement: Placement = field(default_factory=dict)
    is_complete: bool = True
    """False if the ranks together do not hold each element."""

    @cached_property
    def error(self) -> float:
        """Largest difference of an element; infinite where one is not finite, or held by no rank."""
        return max(difference(*pair) for pair in self.pairs.values()) if self.is_complete else math.inf

    @property
    def parts(self) -> Parts:
        """The ranks' own tensors, after sums."""
        return {at: part for at, (part, _) in self.pairs.items()}

    @property
    def sums(self) -> list[str]:
        """Axes of a split model over which ranks hold addends."""
        return [axis for axis, how in self.placement.items() if how == "sum" and axis != "dp"]

    def copies(self, axis: str) -> list[Parts]:
        """The parts, in groups of those that hold the same region on ranks along an axis."""
        return groups_along(axis, self.parts, self.regions)


def groups_along(axis: str, parts: Parts, regions: Mapping[Coordinates, Hashable]) -> list[Parts]:
    """Parts in groups of the same region on ranks along an axis; without regions, all of these ranks."""
    number, groups = SPLIT_AXES.index(axis), dict[Hashable, Parts]()
    for at, part in parts.items():
        groups.setdefault((at[:number], at[number + 1 :], regions.get(at)), {})[at] = part
    return list(groups.values())


def region(whole: Tensor, placement: Placement, at: Coordinates, parts: Parts) -> Tensor:
    """A copy of the part of a whole tensor that belongs to the rank at some coordinates.

    Raises RuntimeError where the shapes do not fit.
    """
    for split in (how for how in placement.values() if isinstance(how, Split)):
        number, count, dim = part_number(at, split, parts), part_count(split, parts), split.dim % whole.ndim
        rows = torch.arange(whole.shape[dim])
        if split.is_zigzag:
            pieces = rows.view(2 * count, -1)
            rows = torch.cat([pieces[number], pieces[-1 - number]])
        else:
            rows = rows.view(split.blocks, count, -1)[:, number].flatten()
        whole = whole.index_select(dim, rows)
    if whole.shape != parts[at].shape:
        raise RuntimeError("the shapes do not fit")
    return whole


def part_count(split: Split, parts: Iterable[Coordinates]) -> int:
    return split.groups or 1 + max(at[SPLIT_AXES.index(split.axis)] for at in parts)


def part_number(at: Coordinates, split: Split, parts: Iterable[Coordinates]) -> int:
    """The number of a rank's part along the axis of a split."""
    axis = SPLIT_AXES.index(split.axis)
    return at[axis] * part_count(split, parts) // (1 + max(each[axis] for each in parts))


def add_over(parts: Parts, axis: str, how: How = "sum") -> Parts:
    """Parts of which each is the sum over an axis, or over the ranks along it that hold the same part."""
    numbers = {at: part_number(at, how, parts) for at in parts} if isinstance(how, Split) else {}
    groups = groups_along(axis, parts, numbers)
    return {at: torch.stack([*group.values()]).sum(0) for group in groups for at in group}


def are_copies(parts: Parts, axis: str) -> bool:
    """True if all ranks along an axis hold the same numbers."""
    groups = (group.values() for group in groups_along(axis, parts, {}))
    return all(torch.equal(first, part) for first, *rest in groups for part in rest)


def fill(whole: Tensor, parts: Parts, placement: Placement) -> None:
    """Put a whole tensor together from its parts."""
    numbers = torch.arange(whole.numel()).view(whole.shape)
    for at, part in parts.items():
        whole.view(-1)[region(numbers, placement, at, parts).flatten()] = part.flatten()


def placements(
    parts: Parts,
    whole: Tensor,
    sizes: Mapping[str, int],
    *,
    blocks: Mapping[str, Iterable[int]],
    sums: Sequence[str] = (),
) -> Iterator[Placement]:
    """Placements that the shapes allow; copies before splits before sums, one block before several."""
    shape = next(iter(parts.values())).shape
    dims = [d for d in range(whole.ndim) if d >= len(shape) or shape[d] != whole.shape[d]]
    axes = [axis for axis in SPLIT_AXES if sizes[axis] > 1]
    groups = [g for g in range(2, sizes["tp"]) if sizes["tp"] % g == 0]
    options: list[list[How]] = [
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
    for choice in product(*options):
        placement = dict(zip(axes, choice, strict=True))
        try:
            for at in parts:
                region(whole, placement, at, parts)
        except (RuntimeError, IndexError, ZeroDivisionError):
            continue
        yield placement


def match(
    parts: Parts, whole: Tensor, choices: Iterable[Placement], limit: float, *, is_scaled: bool
) -> Match | None:
    """The first placement at which no element is further off than `limit`, else the best; None without any.

    If `is_scaled`, each replica's gradients have a scale of their own, which its reduction undoes.
    """
    best: Match | None = None
    for placement in choices:
        if any(how == "sum" and are_copies(parts, axis) for axis, how in placement.items()):
            continue
        found = match_at(placement, parts, whole)
        found = replace(found, pairs=unscaled(found.pairs)) if is_scaled else found
        if best is None or found.error < best.error:
            best = found
        if found.error <= limit:
            break
    return best


def match_at(placement: Placement, parts: Parts, whole: Tensor) -> Match:
    """Parts, or their sums, beside what they should be at a placement."""
    summed = parts
    for axis, how in placement.items():
        if how == "sum" or (isinstance(how, Split) and how.is_sum):
            summed = add_over(summed, axis, how)
    pairs = {at: (part, region(whole, placement, at, parts)) for at, part in summed.items()}
    split = [
        how if isinstance(how, Split) else Split(0, axis) for axis, how in placement.items() if how != "copy"
    ]
    regions = {at: tuple(part_number(at, how, parts) for how in split) for at in pairs}
    return Match(pairs, regions, placement)


def unscaled(pairs: Pairs) -> Pairs:
    """Parts divided by the scale of their replica, which is fitted."""
    groups: dict[Coordinates, Pairs] = {}
    for at, pair in pairs.items():
        groups.setdefault(at[:2], {})[at] = pair
    found: Pairs = {}
    for group in groups.values():
        parts, rights = (torch.cat([x.flatten() for x in each]) for each in zip(*group.values(), strict=True))
        scale = scale_of(parts, rights) or 1.0
        found |= {at: (part / scale, right) for at, (part, right) in group.items()}
    return found


def match_offsets(parts: Parts, whole: Tensor, offsets: Mapping[Coordinates, tuple[int, ...]]) -> Match:
    """Parts beside the regions that begin at known offsets; the error is infinite if these leave a hole."""
    regions = {at: (offsets[at], tuple(part.shape)) for at, part in parts.items()}
    pairs = {
        at: (part, whole[tuple(slice(o, o + n) for o, n in zip(offsets[at], part.shape, strict=True))])
        for at, part in parts.items()
    }
    is_whole = sum(math.prod(shape) for _, shape in set(regions.values())) == whole.numel()
    return Match(pairs, regions, is_complete=is_whole)


def match_rows(
    parts: Parts, whole: Tensor, bound: float, *, is_scaled: bool, outputs: tuple[Parts, Tensor] | None
) -> Match | None:
    """Replicas' rows, in any order, beside those of the whole: of tokens that an expert receives, say.

    Gradients are in the order of their outputs: in any order only where these are equal.
    """
    if whole.ndim < 2:
        return None
    rows = torch.cat([part for _, part in sorted(parts.items())])
    if rows.shape != whole.shape:
        return None

    def key(x: Tensor) -> Tensor:
        return x.flatten(1) @ torch.linspace(1, 2, x[0].numel(), dtype=x.dtype)

    sides, groups = [rows, whole], torch.zeros(len(rows))
    if outputs is not None:
        keys = [key(torch.cat([x for _, x in sorted(outputs[0].items())])), key(outputs[1])]
        if any(len(own) != len(rows) for own in keys):
            return None
        sides = [x[own.argsort()] for x, own in zip(sides, keys, strict=True)]
        equal = 10 * bound / whole.abs().amax() * keys[1].abs().amax()
        groups[1:] = (keys[1].sort().values.diff() > equal).cumsum(0)
    orders = ((x, key(x).argsort()) for x in sides)
    part, right = (x[order[groups[order].argsort(stable=True)]] for x, order in orders)
    pairs: Pairs = {(0, 0, 0): (part, right)}
    return Match(unscaled(pairs) if is_scaled else pairs, {(0, 0, 0): 0}, {"dp": Split(0, "dp")})


def difference(part: Tensor, right: Tensor) -> float:
    """Largest difference of an element; infinite where one is not finite."""
    if not part.numel():
        return 0.0
    part, right = part.double(), right.double()
    off = (part - right).abs().nan_to_num(nan=torch.inf)
    return float(off.masked_fill(part == right, 0.0).amax())  # of masked scores, infinities are equal


def scale_of(part: Tensor, right: Tensor) -> float:
    """The number that a tensor is of another, by least squares; 1 where the other is zero."""
    x, y = part.double().flatten(), right.double().flatten()
    return float(x @ y / (y @ y)) if bool(y.any()) else 1.0
