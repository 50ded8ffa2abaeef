"""Patterns of wrong tensors: the formula from expected to actual values, and its cause in words.

Most are linear: actual and expected values are sums of the same addends with other factors. Addends of a
reduced gradient are recorded before any reduction, for each rank and micro-batch; addends of other tensors
are the ranks' parts.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mlm.verify.audit.compare import Comparison, Location, magnitude
from mlm.verify.audit.parts import SPLIT_AXES, Coordinates, Parts, add_over, are_copies, difference, subsets
from mlm.verify.audit.record import ADDEND, AXES, Cause, Key

FIT = 1e-6
"""Error of a formula as a fraction of the largest element, if ten tolerances are not more."""
FACTOR = 1e-4
"""Relative error of equal factors, if the tolerance is not more."""
TIMES = "it is {factor} times that of one process{right}; "
CAUSES = {
    "addend": (
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
"""By pattern: a short name for activations, another for gradients of parameters, and evidence with advice."""
TIED = {
    "addend": ("tied weights not summed", "stages each have the gradient of their use of it; sum these"),
    "divided": ("averaged instead of summed", "its gradients on stages count {factor} times; sum these"),
}
"""As CAUSES, for a weight on several pipeline stages."""


class Addend(NamedTuple):
    rank: tuple[int, ...]
    """Coordinates over AXES."""
    micro: int


Factor = tuple[tuple[int, ...], Addend]
"""A rank, and an addend of its tensor."""


class Pattern(NamedTuple):
    name: str
    axis: str = ""
    factor: str = "1"


def cause_of(kind: str, pattern: Pattern | None, right: str = "") -> Cause | None:
    """The cause of a pattern in a tensor of a kind; `right` names the module whose tensor is right."""
    if pattern is None:
        return None
    activation_name, gradient_name, reason = CAUSES[pattern.name]
    name = gradient_name if kind == "gradient" else activation_name
    if pattern.axis == "pp" and pattern.name in TIED:
        name, reason = TIED[pattern.name]
    words = pattern._asdict() | {"right": f", and that of {right} is right" if right else ""}
    is_backward = kind == "backward"
    words |= {"of": " of a gradient" if is_backward else ""}
    words |= {"where": " in backward (operator f of arXiv:1909.08053)" if is_backward else ""}
    return Cause(name.format(**words), reason.format(**words)) if name else None


def explain_count(full: Tensor, parts: Parts, axis: str) -> Cause | None:
    """The cause of counts of one rank, or of reciprocal counts, in place of all ranks'."""
    ranks = 1 + max(rank[SPLIT_AXES.index(axis)] for rank in parts)
    for reciprocal in ("", "1/"):
        counts, expected = parts, full
        if reciprocal:
            counts, expected = {rank: 1 / x for rank, x in parts.items()}, 1 / full
        total = next(iter(add_over(counts, axis).values()))
        for operation, divisor in (("sum", 1), ("mean", ranks)):
            error = difference(total / divisor, expected)
            if are_copies(parts, axis) or not error <= FIT * magnitude(expected):
                continue
            numbers = (float(x.flatten()[0]) for x in (*counts.values(), expected))
            *actual, right = (f"{reciprocal}{number:.6g}" for number in numbers)
            reason = f"{', '.join(dict.fromkeys(actual))} in place of {right}: a count of this rank's"
            reason += f", whose {operation} over ranks is right; sum it over {axis}"
            return Cause("count of a rank", reason)
    return None


def pattern(comparison: Comparison, locations: Sequence[Location]) -> Pattern | None:
    """The formula that explains all locations; None if there is none."""
    if factor_pattern := _factor_pattern(comparison, locations):
        return factor_pattern
    return Pattern("permuted") if all(map(_is_permuted, locations)) else None


def is_close(part: Tensor, expected: Tensor, location: Location) -> bool:
    """True if two tensors are equal to the error of a formula."""
    bound = max(FIT, 10 * location.limit) * max(magnitude(expected), magnitude(part))
    return part.shape == expected.shape and difference(part, expected) <= bound


def _factor_pattern(comparison: Comparison, locations: Sequence[Location]) -> Pattern | None:
    factors = factors_of(comparison, locations, of_micro=True)
    factors = factors or factors_of(comparison, locations, of_micro=False)
    if not factors:
        return None
    bound = max(FACTOR, *(location.limit for location in locations))

    def are_all(values: Sequence[float], expected: float) -> bool:
        return all(math.isclose(x, expected, rel_tol=bound, abs_tol=bound) for x in values)

    values = list(factors.values())
    factor = max(values, key=abs)
    axes = [axis for n, axis in enumerate(AXES) if len({addend.rank[n] for _, addend in factors}) > 1]
    sizes = {axis: comparison.layout[axis] for axis in reversed(AXES) if comparison.layout[axis] > 1}
    if are_all(values, factor):
        for axis, size in sizes.items():
            for name, expected in (("times", size), ("divided", 1 / size)):
                if are_all([factor], expected) and (axis != "pp" or "pp" in axes):
                    return Pattern(name, axis, f"{factor:.6g}")
        return None if are_all(values, 1.0) else Pattern("scaled", factor=f"{factor:.6g}")
    for subset in filter(None, subsets(axes)):
        same_rank, other_ranks = list[float](), list[float]()
        for (rank, addend), x in factors.items():
            is_same = all(rank[n] == addend.rank[n] for n in map(AXES.index, subset))
            (same_rank if is_same else other_ranks).append(x)
        for name, expected in (("addend", 1), ("mean", math.prod(sizes[axis] for axis in subset))):
            if are_all(same_rank, expected) and are_all(other_ranks, 0.0):
                return Pattern(name, " and ".join(reversed(subset)))
    for name, index in (("micro", 1), ("weighed", 0)):
        groups: dict[object, list[float]] = {}
        for (_, addend), x in factors.items():
            groups.setdefault(addend[index], []).append(x)
        if all(are_all(group, group[0]) for group in groups.values()):
            counts = dict.fromkeys(f"{round(group[0], 6):g}" for _, group in sorted(groups.items()))
            if name == "weighed" and _are_clipped(comparison, locations[0].key, factors):
                name = "clipped"
            return Pattern(name, factor=", ".join(counts))
    return None


def _are_clipped(comparison: Comparison, key: Key, factors: Mapping[Factor, float]) -> bool:
    """True if each replica's factor, times the norm of its gradients before reduction, is the same."""
    squares: dict[Coordinates, float] = {}
    for location in comparison.of_kind(*key[:2]):
        sums: dict[tuple[int, ...], Tensor] = {}
        for (rank, _), x in _addends(comparison, location).items():
            sums[rank] = sums.get(rank, torch.zeros_like(x)) + x
        copies = {(rank[1:3], location.match.regions.get(rank[1:])): x for rank, x in sums.items()}
        for (replica, _), x in copies.items():
            squares[replica] = squares.get(replica, 0.0) + float(x.double().square().sum())
    products = [x * squares[addend.rank[1:3]] ** 0.5 for (_, addend), x in factors.items()]
    return all(math.isclose(x, products[0], rel_tol=FACTOR) for x in products)


def factors_of(
    comparison: Comparison, locations: Sequence[Location], *, of_micro: bool
) -> Mapping[Factor, float]:
    """By rank and addend: its factor in the actual tensor over its factor in the expected one.

    A least-squares solution over all locations; empty if it does not fit.
    """
    systems: dict[tuple[tuple[int, ...], tuple[Addend, ...]], list[list[Tensor]]] = {}
    for location in locations:
        addends = _addends(comparison, location) if of_micro else _parts(comparison, location)
        for rank, pair in location.match.pairs.items():
            regions = location.match.regions
            terms = {a: x for a, x in addends.items() if regions.get(a.rank[1:]) == regions[rank]}
            if not terms or any(x.shape != pair[0].shape for x in terms.values()):
                return {}
            sides = terms.values(), pair
            columns, values = (torch.stack([x.double().flatten() for x in xs], 1) for xs in sides)
            unit = location.unit * max(FIT, 10 * location.limit)
            system = systems.setdefault(((location.stage, *rank), tuple(terms)), [])
            system.append([columns / unit, values / unit])
    factors: dict[Factor, float] = {}
    for (rank, unknowns), blocks in systems.items():
        columns, values = (torch.cat(stacks) for stacks in zip(*blocks, strict=True))
        if not bool(columns.isfinite().all()):
            return {}
        solution = torch.linalg.pinv(columns, rtol=FIT) @ values  # equal for copies
        if magnitude(columns @ solution - values) > 1:
            return {}
        for addend, (actual, expected) in zip(unknowns, solution.tolist(), strict=True):
            if abs(expected) > FACTOR * magnitude(solution):
                factors[rank, addend] = actual / expected
            elif abs(actual) > FACTOR * magnitude(solution):
                return {}  # not an addend of the expected tensor
    return factors


def _addends(comparison: Comparison, location: Location) -> dict[Addend, Tensor]:
    """Gradients of a parameter by rank and backward pass; empty for other tensors."""
    key = location.key._replace(kind=ADDEND)
    return {
        Addend(rank, k.call): x
        for rank, record in comparison.ranks.items()
        for k, x in record.tensors.items()
        if location.key.kind == "gradient" and k._replace(call=0) == key
    }


def _parts(comparison: Comparison, location: Location) -> dict[Addend, Tensor]:
    """The parts of a tensor on the ranks of all its stages."""
    locations = [x for x in comparison.locations if x.key == location.key] or [location]
    return {Addend((x.stage, *rank), 0): part for x in locations for rank, part in x.match.parts.items()}


def _is_permuted(location: Location) -> bool:
    sides = zip(*location.match.pairs.values(), strict=True)
    actual, expected = (torch.cat([x.flatten() for x in tensors]).sort().values for tensors in sides)
    return actual.numel() > 1 and is_close(actual, expected, location)
