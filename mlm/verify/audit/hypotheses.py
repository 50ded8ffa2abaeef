"""Formulas of gradient norms and updates: each predicts wrong numbers from tensors of one process.

One that gives what ranks have is the cause.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, permutations
from typing import NamedTuple

import torch
from torch import Tensor

from mlm.verify.audit.compare import Comparison, Layout, Location, magnitude
from mlm.verify.audit.parts import Coordinates, difference, region
from mlm.verify.audit.patterns import FIT
from mlm.verify.audit.record import AXES, SQUARE, Cause, Key, Record

LEAST_FITTED = 8
"""Elements for each factor that is fitted, at least: fewer would fit by chance."""
MOST_FACTORS = 4
"""Factors in a report."""
Groups = Mapping[tuple[int, ...], Sequence[tuple[int, ...]]]
Norms = Iterator[tuple[str, str, Mapping[tuple[int, ...], float]]]
"""Causes, and the norms of ranks that they predict."""


def explain_norm(comparison: Comparison, place: Location) -> Cause | None:
    """Formulas of a gradient norm: parts of ranks, parameters that are missed or repeated."""
    step, ranks = place.key.step, comparison.ranks.items()
    whole = squares_of(comparison.reference, step)
    total, bound = sum(whole.values()), max(FIT / 10, 10 * place.limit)
    if not math.isclose(total**0.5, float(comparison.reference.tensors[place.key]), rel_tol=bound):
        return None  # another norm
    found = {at: float(r.tensors[place.key]) for at, r in ranks if place.key in r.tensors}
    squares = {at: squares_of(record, step) for at, record in ranks}
    every = {at: sum(own.values()) for at, own in squares.items()}
    once = {}  # of weights on several stages, the first
    for at, own in squares.items():
        earlier = {n for b in squares if b[0] < at[0] and b[1:] == at[1:] for n in squares[b]}
        once[at] = sum(x for n, x in own.items() if n not in earlier)
    candidates = chain(
        _norms_of_ranks(comparison, every, total),
        _norms_of_ranks(comparison, once, total),
        _norms_of_parameters(comparison, whole, bound * total),
    )
    for cause, why, predicted in candidates:
        if all(math.isclose(x, predicted[at], rel_tol=bound) for at, x in found.items()):
            return Cause(cause, why)
    for over, groups in _groups(comparison.layout, found):
        if all(math.isclose(sum(found[b] ** 2 for b in groups[at]), total, rel_tol=bound) for at in found):
            why = f"squares of ranks along {over} add up to the right one: each has its own parts alone"
            return Cause("norm misses parameters", why)
    return None


def _groups(layout: Layout, ranks: Iterable[tuple[int, ...]]) -> Iterator[tuple[str, Groups]]:
    """Some axes, none at first, and for each rank those along them."""
    axes, every = [n for n, axis in enumerate(AXES) if layout[axis] > 1], list(ranks)
    for along in chain.from_iterable(combinations(axes, size) for size in range(len(axes) + 1)):
        others = [n for n in range(len(AXES)) if n not in along]
        groups = {at: [b for b in every if all(b[n] == at[n] for n in others)] for at in every}
        yield ", ".join(AXES[n] for n in along), groups


def squares_of(record: Record, step: int) -> dict[str, float]:
    """Sums of squares of a rank's parts of gradients, by parameter."""
    own = {k.name: float(x) for k, x in record.tensors.items() if k[:2] == (step, SQUARE)}
    grads = ((k.name, x) for k, x in record.tensors.items() if k[:2] == (step, "gradient"))
    return own or {name: float(x.double().square().sum()) for name, x in grads}


def _norms_of_ranks(comparison: Comparison, own: Mapping[tuple[int, ...], float], total: float) -> Norms:
    """Of the squares of ranks, summed along some axes before or after the root."""
    for over, ranks in _groups(comparison.layout, own):
        groups = {at: [own[b] for b in group] for at, group in ranks.items()}
        cause, why = "norm repeats parameters", f"copies on ranks along {over} are added; add each once"
        if sum(next(iter(groups.values()))) < total:
            cause = "norm misses parameters"
            why = "of the parts of a rank" + (f", summed over {over}" if over else "") + " alone"
        yield cause, why, {at: math.sqrt(sum(squares)) for at, squares in groups.items()}
        if over:
            why = f"roots of the squares of ranks along {over} are added; add squares, then take the root"
            if over in ("dp", "cp"):  # whose ranks hold copies
                why = f"it is that of a sum along {over} where a mean is due, or of ranks' roots added"
            yield "norm of roots", why, {at: sum(map(math.sqrt, squares)) for at, squares in groups.items()}


def _norms_of_parameters(comparison: Comparison, squares: Mapping[str, float], least: float) -> Norms:
    """Of parameters that are missed, repeated or divided: some whose names share a word, or two words."""
    words: dict[str, frozenset[str]] = {}
    for name in squares:
        for word in name.split("."):
            words.setdefault(word, frozenset(n for n in squares if word in n.split(".")))
    split, copies = frozenset(squares) & comparison.split, frozenset(squares) - comparison.split
    kinds = {split: "split parameters", copies: "replicated parameters"}
    kinds |= {names: word for word, names in words.items() if names not in kinds}
    pairs = {words[a] | words[b]: f"{a} and {b}" for a, b in combinations(words, 2)}
    axes = [n for n in comparison.layout.values() if n > 1]
    sizes = {math.prod(some) for count in range(1, len(axes) + 1) for some in combinations(axes, count)}
    factors = 0.0, 2.0, *(f for n in sorted(sizes) for f in (n, 1 / n))
    total, own = sum(squares.values()), [sum(squares[n] for n in names) for names in (split, copies)]
    for names, which in (pairs | kinds | {frozenset([n]): n for n in squares}).items():
        square = sum(squares[n] for n in names if n in squares)
        for factor in factors if square > 1e3 * least else ():
            cause = f"norm {'misses' if factor < 1 else 'repeats'} parameters"
            norm = math.sqrt(max(0.0, total + (factor - 1) * square))  # all missed: rounding is left
            yield cause, f"squares of {which} count {factor:.3g} times", dict.fromkeys(comparison.ranks, norm)
    for a, b in permutations(factors, 2) if min(own) > 1e3 * least else ():
        why = f"squares of split parameters count {a:.3g} times, of replicated ones {b:.3g} times"
        norm = math.sqrt(a * own[0] + b * own[1])
        yield "norm repeats parameters", why, dict.fromkeys(comparison.ranks, norm)


class Move(NamedTuple):
    """A rank's part of a weight: where it begins, how far it and the right one move, and a tolerance."""

    at: Coordinates
    name: str
    start: Tensor
    moved: Tensor
    right: Tensor
    bound: float


def explain_update(comparison: Comparison, wrong: Sequence[Location]) -> Cause | None:
    """Formulas of an update: its scale, what decays, what stays as it was."""
    moves = [m for m in _moves(comparison, wrong) if not difference(m.moved, m.right) <= m.bound]
    if not moves:  # of parameters whose regions are offsets
        return None
    if all(magnitude(m.moved) <= m.bound for m in moves):
        return Cause("not updated", "weights stay as they were")
    step, scales = wrong[0].key.step, _scales(moves)
    factors, decays = (
        ", ".join(dict.fromkeys(f"{float(x[n]):.{digits}g}" for x in scales.values()))
        for n, digits in ((0, 6), (1, 3))
    )
    if _are_scaled(moves, scales):
        if all(math.isclose(x[0], 1.0, rel_tol=1e-4) for x in scales.values()):
            return Cause("weight decay", f"weights move by {decays} of themselves beside the right update")
        why = f"weights move {factors} times as far"
        later = _moves(comparison, [p for p in comparison.wrong if p.key[:2] == (step + 1, "weight")])
        after = _scales(later)
        is_other = all(abs(x[0] - scales[at][0]) > 1e-2 for at, x in after.items() if at in scales)
        if later and is_other and _are_scaled(later, after):
            why += ", in the next step by another factor: look at step counts of schedules and corrections"
        sizes = [(magnitude(m.start), magnitude(m.moved)) for m in moves]
        if any(abs(x[1]) * start > 1e-4 * moved for start, moved in sizes for x in scales.values()):
            why += f", but for {decays} of themselves: the decay has another factor"
        return Cause("update scaled", why)
    scales = _scales(moves, of_names=True)
    if _are_scaled(moves, scales) and sum(m.right.numel() for m in moves) > LEAST_FITTED * len(scales):
        names: dict[str, list[str]] = {}
        for (_, name), x in scales.items():
            names.setdefault(f"{float(x[0]):.6g}", []).append(name)
        spoken = [f"{factor} ({own[0]})" for factor, own in names.items()]
        listed = ", ".join(spoken[:MOST_FACTORS])
        more = f" and {len(spoken) - MOST_FACTORS} other factors" if spoken[MOST_FACTORS:] else ""
        why = f"weights move a factor as far, by parameter: {listed}{more}; look at rates of the optimizer's "
        return Cause("update scaled", why + "groups, and at depths or counts of layers that are a stage's")
    if shift := _shift(moves):
        neighbour = f"the one {abs(shift)} {'after' if shift > 0 else 'before'} it in a flat tensor"
        why = f"each moves as {neighbour} should; look at where shards of flat tensors begin, and at padding"
        return Cause("shards shifted", why)
    if all(float((m.moved - m.right).abs().minimum(m.moved.abs()).amax()) <= m.bound for m in moves):
        why = "some elements stay as they were, the others are right; look at gathers of updates"
        return Cause("partly updated", why)
    ends = [[(m.start + x).flatten().sort().values for x in (m.moved, m.right)] for m in moves]
    if all(difference(*pair) <= m.bound for pair, m in zip(ends, moves, strict=True)):
        why = "updated weights are right in another order; look at gathers of updates"
        return Cause("shards permuted", why)
    return None


def _moves(comparison: Comparison, places: Sequence[Location]) -> list[Move]:
    """Return the update of each weight in its step, where the weight before it was recorded."""
    moves: list[Move] = []
    for place in places:
        key, match = place.key, place.match
        before = Key(key.step - 1, "weight", key.name) if key.step else Key(0, "initial", key.name)
        bound = max(1e-4, 10 * place.limit) * place.largest
        for at, (part, right) in match.pairs.items():
            own = comparison.ranks[place.stage, *at].tensors.get(before)
            try:
                whole = comparison.reference.tensors[before].double()
                start = region(whole, match.placement, at, match.parts)
            except (RuntimeError, KeyError):
                return []
            if own is None or own.shape != start.shape:
                return []
            moves.append(Move(at, key.name, own.double(), part.double() - own, right.double() - start, bound))
    return moves


def _shift(moves: Sequence[Move]) -> int:
    """Return the offset of the elements whose updates these receive, in flat weights; 0 for none.

    Decay is of an element itself: u(i) = v(i + shift) + d w(i + shift) - d w(i), where v are right updates.
    What is right is left out, and elements at either end, whose neighbours are another weight's.
    """
    for shift in (sign * size for size in range(1, 5) for sign in (1, -1)):
        columns: list[Tensor] = []
        for m in moves:
            start, moved, right = (x.flatten() for x in (m.start, m.moved, m.right))
            inner = slice(max(0, -shift), max(0, len(moved) - max(0, shift)))
            other = slice(max(0, shift), max(0, len(moved) - max(0, -shift)))
            rows = torch.stack([right[other], start[other] - start[inner], moved[inner]], 1) / m.bound
            columns.append(rows[(moved[inner] - right[inner]).abs() > m.bound])
        system = torch.cat(columns)
        if len(system) < 2 * LEAST_FITTED:
            continue
        factors = torch.linalg.lstsq(system[:, :2], system[:, 2:]).solution
        if difference(system[:, :2] @ factors, system[:, 2:]) <= 1 and abs(float(factors[0]) - 1) < 1e-3:
            return shift
    return 0


def _are_scaled(moves: Sequence[Move], scales: Mapping[tuple[Coordinates, str], Tensor]) -> bool:
    """True if weights move by factors of the right update and of themselves."""
    of_names = any(name for _, name in scales)
    factors = ((m, scales[m.at, m.name if of_names else ""]) for m in moves)
    return all(difference(m.moved, x[0] * m.right + x[1] * m.start) <= m.bound for m, x in factors)


def _scales(moves: Sequence[Move], *, of_names: bool = False) -> dict[tuple[Coordinates, str], Tensor]:
    """Factors of the right update and of the weights themselves, by least squares: by rank, and by name."""
    groups: dict[tuple[Coordinates, str], list[Tensor]] = {}
    for m in moves:
        columns = torch.stack([x.flatten() for x in (m.right, m.start, m.moved)], 1)
        groups.setdefault((m.at, m.name if of_names else ""), []).append(columns)
    systems = {who: torch.cat(columns) for who, columns in groups.items()}
    return {who: torch.linalg.lstsq(x[:, :2], x[:, 2:]).solution[:, 0] for who, x in systems.items()}
