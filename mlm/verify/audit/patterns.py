"""Patterns of wrong numbers: what ranks have beside what they should, as a formula, and its cause in words.

Most are linear: what a rank has is a sum of addends with other factors than the right one. Addends of a
reduced gradient are those of each rank and micro-batch, recorded before any reduction; of other tensors they
are what ranks have.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from mlm.verify.audit.compare import Cause, Comparison, Location, magnitude
from mlm.verify.audit.parts import SPLIT_AXES, difference, scale_of
from mlm.verify.audit.record import ADDEND, AXES

FIT = 1e-6
"""Formulas hold to this fraction of the largest element, or to ten tolerances."""
FACTOR = 1e-4
"""Factors of addends are equal to this fraction, or to the tolerance."""
Addend = tuple[tuple[int, ...], int]
"""A rank's coordinates over AXES, and the number of a micro-batch."""

TIMES = "it is {factor} times that of one process{right}"
OWN = "each {axis} rank has one addend, and their sum is right"
MEAN = "each {axis} rank has its own, and their mean is right"
DIVISIONS = f"{TIMES}; look at divisions of the loss, and for one too many"
ACTIVATIONS = {
    "own": ("missing all-reduce{of}", OWN + "; sum it over {axis}{where}"),
    "mean": ("missing all-reduce{of}", MEAN + "; average it over {axis}{where}"),
    "times": ("doubled all-reduce{of}", TIMES + "; sum it over {axis} once, in backward not again"),
    "divided": ("averaged instead of summed", TIMES + "; sum it over {axis} without a division"),
    "scaled": ("wrong divisor", TIMES + "; look at products and divisions between, in backward too"),
    "permuted": (
        "shards permuted",
        "it holds the right numbers in another order; look at gathers, all-to-alls, the order of ranks",
    ),
    "shifted": (
        "bias added on every rank",
        "it is right but for a shift of all rows; add it once, after the sum over {axis}",
    ),
    "times and shifted": (
        "doubled all-reduce",
        "it is {factor} times right, but for a shift of all rows; sum over {axis} once, before the bias",
    ),
    "affine": (
        "local statistics",
        "it is right but for a scale and a shift; a mean, variance or sum is of a rank's part: reduce it",
    ),
}
GRADIENTS = {
    "own": ("gradients not summed", OWN + "; sum them over {axis}, in sequence parallelism too"),
    "mean": ("gradients not reduced", MEAN + "; reduce them over {axis}"),
    "times": (
        "unscaled mean",
        TIMES + "; a sum over {axis} lacks its division or is made twice, or a bias is added before the sum",
    ),
    "divided": ("wrong divisor", DIVISIONS),
    "scaled": ("wrong divisor", DIVISIONS),
    "micro": (
        "micro-batches counted unequally",
        "gradients of a rank's micro-batches count {factor} times: they are reduced while they accumulate, "
        "or one is lost",
    ),
    "weighed": (
        "ranks weighed unequally",
        "gradients of ranks count {factor} times: divide by the tokens of all replicas",
    ),
}
"""Causes by pattern: a short name; the fact, and what to do."""
TIED = {
    "own": ("tied weights not summed", "stages each have the gradient of their use of it; sum these"),
    "divided": ("averaged instead of summed", "its gradients on stages count {factor} times; sum these"),
}
"""Of a weight on several pipeline stages."""


class Pattern(NamedTuple):
    name: str
    axis: str = ""
    factor: str = "1"


def cause_of(kind: str, found: Pattern, right: str = "") -> Cause | None:
    """The cause of a pattern in a tensor of a kind; `right` is the module whose tensor is right."""
    table = GRADIENTS if kind == "gradient" else ACTIVATIONS
    table = TIED if found.axis == "pp" and found.name in TIED else table
    if found.name not in table:
        return None
    words = found._asdict() | {
        "of": "",
        "where": "",
        "right": f", and that of {right} is right" if right else "",
    }
    if kind == "backward":
        words |= {"of": " of a gradient", "where": " in backward (operator f of arXiv:1909.08053)"}
    cause, why = (text.format(**words) for text in table[found.name])
    return cause, why


def pattern(comparison: Comparison, locations: Sequence[Location]) -> Pattern | None:
    """The formula that explains all locations; None without any."""
    if found := _mixture(comparison, locations):
        return found
    if len(locations) == 1 and locations[0].key.kind == "output":
        slope = _slope(locations[0])
        for axis, size in ((axis, comparison.layout[axis]) for axis in reversed(SPLIT_AXES)):
            for name, multiple in (("shifted", 1), ("times and shifted", size)):
                is_slope = size > 1 and slope is not None and math.isclose(slope, multiple, rel_tol=FIT)
                if is_slope and _is_bias(comparison, locations[0], size - 1):
                    return Pattern(name, axis, f"{slope:.6g}")
        if slope is not None and not math.isclose(slope, 1.0, rel_tol=FIT):
            return Pattern("affine")
    return Pattern("permuted") if all(map(_is_permuted, locations)) else None


def is_close(part: Tensor, right: Tensor, place: Location) -> bool:
    """True if a formula explains a tensor."""
    bound = max(FIT, 10 * place.limit) * max(magnitude(right), magnitude(part))
    return part.shape == right.shape and difference(part, right) <= bound


def _mixture(comparison: Comparison, places: Sequence[Location]) -> Pattern | None:
    """The factors of addends in what ranks have, over those in the right tensor, as a pattern."""
    factors = factors_of(comparison, places, addends_of) or factors_of(comparison, places, parts_of)
    if not factors:
        return None
    bound = max(FACTOR, *(place.limit for place in places))

    def are(values: Sequence[float], right: float) -> bool:
        return all(math.isclose(x, right, rel_tol=bound, abs_tol=bound) for x in values)

    every = list(factors.values())
    multiple = max(every, key=abs)
    axes = [axis for axis in AXES if len({who[0][AXES.index(axis)] for _, who in factors}) > 1]
    sizes = {axis: comparison.layout[axis] for axis in reversed(AXES) if comparison.layout[axis] > 1}
    if are(every, multiple):
        if are(every, 1.0):
            return None
        for axis, size in sizes.items():
            for name, right in (("times", size), ("divided", 1 / size)):
                if are([multiple], right) and (axis != "pp" or "pp" in axes):
                    return Pattern(name, axis, f"{multiple:.6g}")
        return Pattern("scaled", factor=f"{multiple:.6g}")
    for some in (some for count in range(1, len(axes) + 1) for some in combinations(axes, count)):
        numbers = [AXES.index(axis) for axis in some]
        own = [x for (rank, who), x in factors.items() if all(rank[n] == who[0][n] for n in numbers)]
        others = [x for (rank, who), x in factors.items() if any(rank[n] != who[0][n] for n in numbers)]
        for name, right in (("own", 1), ("mean", math.prod(sizes[axis] for axis in some))):
            if are(own, right) and are(others, 0.0):
                return Pattern(name, " and ".join(reversed(some)))
    for name, part in (("micro", 1), ("weighed", 0)):
        groups: dict[object, list[float]] = {}
        for (_, who), x in factors.items():
            groups.setdefault(who[part], []).append(x)
        if all(are(group, group[0]) for group in groups.values()):
            counts = dict.fromkeys(f"{round(group[0], 6):g}" for _, group in sorted(groups.items()))
            return Pattern(name, factor=", ".join(counts))
    return None


def factors_of(
    comparison: Comparison,
    places: Sequence[Location],
    addends_of: Callable[[Comparison, Location], dict[Addend, Tensor]],
) -> Mapping[tuple[tuple[int, ...], Addend], float]:
    """By rank and addend: its factor in what the rank has over its factor in the right tensor.

    They are the least squares of all places, and none if these do not fit.
    """
    systems: dict[tuple[tuple[int, ...], tuple[Addend, ...]], list[list[Tensor]]] = {}
    for place in places:
        addends = addends_of(comparison, place)
        for at, pair in place.match.pairs.items():
            region = place.match.regions[at]
            own = {who: x for who, x in addends.items() if place.match.regions.get(who[0][1:]) == region}
            if not own or any(x.shape != pair[0].shape for x in own.values()):
                return {}
            columns, sides = (
                torch.stack([x.double().flatten() for x in xs], 1) for xs in (own.values(), pair)
            )
            unit = place.largest * max(FIT, 10 * place.limit)
            systems.setdefault(((place.stage, *at), tuple(own)), []).append([columns / unit, sides / unit])
    factors: dict[tuple[tuple[int, ...], Addend], float] = {}
    for (rank, names), blocks in systems.items():
        columns, sides = (torch.cat(each) for each in zip(*blocks, strict=True))
        if not bool(columns.isfinite().all()):
            return {}
        solution = torch.linalg.pinv(columns, rtol=FIT) @ sides  # of copies, the same for each
        if magnitude(columns @ solution - sides) > 1:
            return {}
        for who, (actual, right) in zip(names, solution.tolist(), strict=True):
            if abs(right) > FACTOR * magnitude(solution):
                factors[rank, who] = actual / right
            elif abs(actual) > FACTOR * magnitude(solution):
                return {}  # an addend of no right tensor
    return factors


def addends_of(comparison: Comparison, place: Location) -> dict[Addend, Tensor]:
    """A parameter's gradients of each rank and backward pass, where they were recorded."""
    found: dict[Addend, Tensor] = {}
    for rank, record in comparison.ranks.items() if place.key.kind == "gradient" else ():
        call = 0
        while (x := record.tensors.get(place.key._replace(kind=ADDEND, call=call))) is not None:
            found[rank, call], call = x, call + 1
    return found


def parts_of(comparison: Comparison, place: Location) -> dict[Addend, Tensor]:
    """The part of a tensor on each rank, of every stage that holds it."""
    places = (p for p in comparison.locations if p.key == place.key)
    return {((p.stage, *at), 0): part for p in places for at, part in p.match.parts.items()}


def _is_permuted(place: Location) -> bool:
    parts, rights = zip(*place.match.pairs.values(), strict=True)
    actual, expected = (torch.cat([x.flatten() for x in each]).sort().values for each in (parts, rights))
    return actual.numel() > 1 and is_close(actual, expected, place)


def _slope(place: Location) -> float | None:
    """The a of parts that along some dimension are a·x + b of the right x: NaN where it varies; else None."""
    for dim in range(next(iter(place.match.pairs.values()))[1].ndim):
        pairs = [
            (y - y.mean(dim, keepdim=True), x - x.mean(dim, keepdim=True))
            for y, x in place.match.pairs.values()
        ]
        if pairs[0][1].shape[dim] <= 3:  # through two points there is a line
            continue
        slopes = [(x * y).sum(dim, True) / (x * x).sum(dim, True).clamp_min(1e-300) for y, x in pairs]
        if all(is_close(y, a * x, place) for (y, x), a in zip(pairs, slopes, strict=True)):
            slope = scale_of(*pairs[0])
            return slope if all(is_close(y, slope * x, place) for y, x in pairs) else math.nan
    return None


def _is_bias(comparison: Comparison, place: Location, times: int) -> bool:
    """True if all rows are shifted by so many times a parameter."""
    biases = [x for key, x in comparison.reference.tensors.items() if key.kind == "initial" and x.ndim == 1]
    part, right = next(iter(place.match.pairs.values()))
    shift = (part - (_slope(place) or 1.0) * right).flatten(0, -2)
    fitting = (times * x for x in biases if x.shape == shift.shape[1:] and bool(x.any()))
    return any(is_close(shift.abs(), x.abs().expand_as(shift), place) for x in fitting)
