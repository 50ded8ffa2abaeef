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
from mlm.verify.audit.parts import SPLIT_AXES, Coordinates, Parts, add_over, are_copies, difference
from mlm.verify.audit.record import ADDEND, AXES, Cause, Key

FIT = 1e-6
"""Formulas hold to this fraction of the largest element, or to ten tolerances."""
FACTOR = 1e-4
"""Factors of addends are equal to this fraction, or to the tolerance."""
Addend = tuple[tuple[int, ...], int]
"""A rank's coordinates over AXES, and the number of a micro-batch."""
Factor = tuple[tuple[int, ...], Addend]
"""A rank, and an addend of what it has."""

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
        "it holds the right numbers in another order; look at gathers, all-to-alls, the order of ranks, of "
        "q, k and v, of gate and up",
    ),
    "micro": (
        "micro-batches counted unequally",
        "micro-batches counted unequally",
        "gradients of a rank's micro-batches count {factor} times: they are reduced while they accumulate, "
        "or one is lost",
    ),
    "weighed": (
        "ranks weighed unequally",
        "ranks weighed unequally",
        "gradients of ranks count {factor} times: each is divided by a number of its own, say its tokens; "
        "divide by that of all replicas",
    ),
    "clipped": (
        "clipped before the sum",
        "clipped before the sum",
        "gradients of ranks count {factor} times, which times their own norms is the same number: each rank "
        "clips before gradients are summed; sum first, then clip by the norm of the sum",
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


def explain_count(whole: Tensor, parts: Parts, axis: str) -> Cause | None:
    """The cause of counts of replicas, or of numbers over them, where one process has that of all."""
    size = 1 + max(at[SPLIT_AXES.index(axis)] for at in parts)
    for over in ("", "1/"):
        own, right = ({at: 1 / x for at, x in parts.items()}, 1 / whole) if over else (parts, whole)
        total = next(iter(add_over(own, axis).values()))
        for how, n in (("sum", 1), ("mean", size)):
            if are_copies(parts, axis) or not difference(total / n, right) <= FIT * magnitude(right):
                continue
            *shown, its = (f"{over}{float(x.flatten()[0]):.6g}" for x in (*own.values(), right))
            why = f"{', '.join(dict.fromkeys(shown))} in place of {its}: a count of this rank's"
            return Cause("count of a rank", f"{why}, whose {how} over ranks is right; sum it over {axis}")
    return None


def pattern(comparison: Comparison, places: Sequence[Location]) -> Pattern | None:
    """The formula that explains all places; None without any."""
    if found := _mixture(comparison, places):
        return found
    return Pattern("permuted") if all(map(_is_permuted, places)) else None


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
            if name == "weighed" and _are_clipped(comparison, places[0].key, factors):
                name = "clipped"
            return Pattern(name, factor=", ".join(counts))
    return None


def _are_clipped(comparison: Comparison, key: Key, factors: Mapping[Factor, float]) -> bool:
    """True if the factor of each replica's gradients, times their norm before any reduction, is the same."""
    squares: dict[Coordinates, float] = {}
    for place in (p for p in comparison.locations if p.key[:2] == key[:2]):
        sums: dict[tuple[int, ...], Tensor] = {}
        for (rank, _), x in _addends(comparison, place).items():
            sums[rank] = sums.get(rank, torch.zeros_like(x)) + x
        copies = {(rank[1:3], place.match.regions.get(rank[1:])): x for rank, x in sums.items()}
        for (replica, _), x in copies.items():
            squares[replica] = squares.get(replica, 0.0) + float(x.double().square().sum())
    products = [x * squares[who[0][1:3]] ** 0.5 for (_, who), x in factors.items()]
    return all(math.isclose(x, products[0], rel_tol=FACTOR) for x in products)


def factors_of(
    comparison: Comparison, places: Sequence[Location], *, of_micro: bool
) -> Mapping[Factor, float]:
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
            both = own.values(), pair
            columns, sides = (torch.stack([x.double().flatten() for x in xs], 1) for xs in both)
            unit = place.largest * max(FIT, 10 * place.limit)
            systems.setdefault(((place.stage, *at), tuple(own)), []).append([columns / unit, sides / unit])
    factors: dict[Factor, float] = {}
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
    places = [p for p in comparison.locations if p.key == place.key] or [place]
    return {((p.stage, *at), 0): part for p in places for at, part in p.match.parts.items()}


def _is_permuted(place: Location) -> bool:
    parts, rights = zip(*place.match.pairs.values(), strict=True)
    actual, expected = (torch.cat([x.flatten() for x in each]).sort().values for each in (parts, rights))
    return actual.numel() > 1 and is_close(actual, expected, place)
