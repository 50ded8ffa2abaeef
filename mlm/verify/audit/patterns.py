"""Patterns of wrong numbers: what ranks have beside what they should, as a formula, and its cause in words.

Most are linear: what a rank has is a sum of addends with other factors than the right one. Addends of a
reduced gradient are those of each rank and micro-batch, recorded before any reduction; of other tensors they
are what ranks have.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from mlm.verify.audit.compare import Comparison, Location, magnitude
from mlm.verify.audit.parts import SPLIT_AXES, difference, scale_of
from mlm.verify.audit.record import ADDEND, AXES, Cause

FIT = 1e-6
"""Formulas hold to this fraction of the largest element, or to ten tolerances."""
FACTOR = 1e-4
"""Factors of addends are equal to this fraction, or to the tolerance."""
Addend = tuple[tuple[int, ...], int]
"""A rank's coordinates over AXES, and the number of a micro-batch."""

TIMES = "it is {factor} times that of one process{right}; "
CAUSES = {
    "own": (
        "missing all-reduce{of}",
        "gradients not summed",
        "each {axis} rank has one addend, and their sum is right; sum over {axis}{where}",
    ),
    "mean": (
        "missing all-reduce{of}",
        "gradients not reduced",
        "each {axis} rank has its own, and their mean is right; reduce over {axis}{where}",
    ),
    "times": (
        "doubled all-reduce{of}",
        "unscaled mean",
        TIMES + "sum over {axis} once: in backward not again, before a bias is added, and divided for a mean",
    ),
    "divided": ("averaged instead of summed", "wrong divisor", TIMES + "look for one division too many"),
    "scaled": ("wrong divisor", "wrong divisor", TIMES + "look at products and divisions, in backward too"),
    "permuted": (
        "shards permuted",
        "",
        "it holds the right numbers in another order; look at gathers, all-to-alls, the order of ranks",
    ),
    "shifted": (
        "bias added on every rank",
        "",
        "it is right but for a shift of all rows; add it once, after the sum over {axis}",
    ),
    "times and shifted": (
        "doubled all-reduce",
        "",
        "it is {factor} times right, but for a shift of all rows; sum over {axis} once, before the bias",
    ),
    "affine": (
        "local statistics",
        "",
        "it is right but for a scale and a shift; a mean, variance or sum is of a rank's part: reduce it",
    ),
    "micro": (
        "",
        "micro-batches counted unequally",
        "gradients of a rank's micro-batches count {factor} times: they are reduced while they accumulate, "
        "or one is lost",
    ),
    "weighed": (
        "",
        "ranks weighed unequally",
        "gradients of ranks count {factor} times: divide by the tokens of all replicas",
    ),
}
"""By pattern: a short name, of an activation and of a parameter's gradient; the fact, and what to do."""
TIED = {
    "own": ("tied weights not summed", "stages each have the gradient of their use of it; sum these"),
    "divided": ("averaged instead of summed", "its gradients on stages count {factor} times; sum these"),
}
"""Of a weight on several pipeline stages."""


class Pattern(NamedTuple):
    name: str
    axis: str = ""
    factor: str = "1"


def cause_of(kind: str, found: Pattern | None, right: str = "") -> Cause | None:
    """The cause of a pattern in a tensor of a kind; `right` is the module whose tensor is right."""
    if found is None:
        return None
    of_activation, of_gradient, why = CAUSES[found.name]
    name = of_gradient if kind == "gradient" else of_activation
    if found.axis == "pp" and found.name in TIED:
        name, why = TIED[found.name]
    words = found._asdict() | {"right": f", and that of {right} is right" if right else ""}
    is_backward = kind == "backward"
    words |= {"of": " of a gradient" if is_backward else ""}
    words |= {"where": " in backward (operator f of arXiv:1909.08053)" if is_backward else ""}
    return Cause(name.format(**words), why.format(**words)) if name else None


def pattern(comparison: Comparison, places: Sequence[Location]) -> Pattern | None:
    """The formula that explains all places; None without any."""
    if found := _mixture(comparison, places):
        return found
    if all(map(_is_permuted, places)):
        return Pattern("permuted")
    return _line(comparison, places[0]) if len(places) == 1 and places[0].key.kind == "output" else None


def is_close(part: Tensor, right: Tensor, place: Location) -> bool:
    """True if a formula explains a tensor."""
    bound = max(FIT, 10 * place.limit) * max(magnitude(right), magnitude(part))
    return part.shape == right.shape and difference(part, right) <= bound


def _mixture(comparison: Comparison, places: Sequence[Location]) -> Pattern | None:
    """The factors of addends in what ranks have, over those in the right tensor, as a pattern."""
    factors = factors_of(comparison, places, of_micro=True) or factors_of(comparison, places, of_micro=False)
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
        for axis, size in sizes.items():
            for name, right in (("times", size), ("divided", 1 / size)):
                if are([multiple], right) and (axis != "pp" or "pp" in axes):
                    return Pattern(name, axis, f"{multiple:.6g}")
        return None if are(every, 1.0) else Pattern("scaled", factor=f"{multiple:.6g}")
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
    comparison: Comparison, places: Sequence[Location], *, of_micro: bool
) -> Mapping[tuple[tuple[int, ...], Addend], float]:
    """By rank and addend: its factor in what the rank has over its factor in the right tensor.

    They are the least squares of all places, and none if these do not fit.
    """
    systems: dict[tuple[tuple[int, ...], tuple[Addend, ...]], list[list[Tensor]]] = {}
    for place in places:
        addends = _addends(comparison, place) if of_micro else _parts(comparison, place)
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


def _addends(comparison: Comparison, place: Location) -> dict[Addend, Tensor]:
    """A parameter's gradients of each rank and backward pass, where they were recorded."""
    key = place.key._replace(kind=ADDEND)
    return {
        (rank, k.call): x
        for rank, record in comparison.ranks.items()
        for k, x in record.tensors.items()
        if place.key.kind == "gradient" and k._replace(call=0) == key
    }


def _parts(comparison: Comparison, place: Location) -> dict[Addend, Tensor]:
    """The part of a tensor on each rank, of every stage that holds it."""
    places = (p for p in comparison.locations if p.key == place.key)
    return {((p.stage, *at), 0): part for p in places for at, part in p.match.parts.items()}


def _is_permuted(place: Location) -> bool:
    parts, rights = zip(*place.match.pairs.values(), strict=True)
    actual, expected = (torch.cat([x.flatten() for x in each]).sort().values for each in (parts, rights))
    return actual.numel() > 1 and is_close(actual, expected, place)


def _line(comparison: Comparison, place: Location) -> Pattern | None:
    """An output that along a dimension is right but for a scale and a shift."""
    pairs = [*place.match.pairs.values()]
    for dim in (
        d for d, size in enumerate(pairs[0][1].shape) if size > 3
    ):  # through two points there is a line
        centred = [(y - y.mean(dim, True), x - x.mean(dim, True)) for y, x in pairs]
        slopes = [(x * y).sum(dim, True) / (x * x).sum(dim, True).clamp_min(1e-300) for y, x in centred]
        if all(is_close(y, a * x, place) for (y, x), a in zip(centred, slopes, strict=True)):
            break
    else:
        return None
    slope = scale_of(*centred[0])
    if not all(is_close(y, slope * x, place) for y, x in centred):
        return Pattern("affine")
    part, right = pairs[0]
    shift = (part - slope * right).flatten(0, -2)
    starts = [x for k, x in comparison.reference.tensors.items() if k.kind == "initial" and x.ndim == 1]
    for axis, size in ((axis, comparison.layout[axis]) for axis in reversed(SPLIT_AXES)):
        biases = (abs(size - 1) * x.abs() for x in starts if x.shape == shift.shape[1:] and bool(x.any()))
        if size > 1 and any(is_close(shift.abs(), bias.expand_as(shift), place) for bias in biases):
            for name, multiple in (("shifted", 1), ("times and shifted", size)):
                if math.isclose(slope, multiple, rel_tol=FIT):
                    return Pattern(name, axis, f"{slope:.6g}")
    return None if math.isclose(slope, 1.0, rel_tol=FIT) else Pattern("affine")
