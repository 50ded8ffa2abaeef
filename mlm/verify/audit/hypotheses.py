"""Formulas of wrong gradient norms and updates from tensors of one process; one that fits is the cause."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, permutations
from typing import NamedTuple

import torch
from torch import Tensor

from mlm.verify.audit.compare import Comparison, Layout, Location, magnitude
from mlm.verify.audit.parts import Coordinates, difference, region, subsets
from mlm.verify.audit.patterns import FIT
from mlm.verify.audit.record import AXES, SQUARE, Cause, Key, Record

LEAST_FITTED = 8
"""Least number of elements for each fitted factor: fewer fit by chance."""
MOST_FACTORS = 4
"""Largest number of factors in a report."""
Groups = Mapping[tuple[int, ...], Sequence[tuple[int, ...]]]
Norms = Iterator[tuple[str, str, Mapping[tuple[int, ...], float]]]
"""(cause, reason, predicted norm by rank)."""


def explain_norm(comparison: Comparison, location: Location) -> Cause | None:
    """The formula of a gradient norm: sums over some ranks, or with parameters missed or repeated."""
    step, ranks = location.key.step, comparison.ranks.items()
    full_squares = squares_of(comparison.reference, step)
    total, bound = sum(full_squares.values()), max(FIT / 10, 10 * location.limit)
    if not math.isclose(total**0.5, float(comparison.reference.tensors[location.key]), rel_tol=bound):
        return None  # not the 2-norm
    norms = {rank: float(r.tensors[location.key]) for rank, r in ranks if location.key in r.tensors}
    squares = {rank: squares_of(record, step) for rank, record in ranks}
    totals = {rank: sum(by_name.values()) for rank, by_name in squares.items()}
    untied_totals = {}  # a weight on several stages counts on the first
    for rank, by_name in squares.items():
        earlier = [b for b in squares if b[0] < rank[0] and b[1:] == rank[1:]]
        tied = {name for b in earlier for name in squares[b]}
        untied_totals[rank] = sum(x for name, x in by_name.items() if name not in tied)
    candidates = chain(
        _norms_of_ranks(comparison, totals, total),
        _norms_of_ranks(comparison, untied_totals, total),
        _norms_of_parameters(comparison, full_squares, bound * total),
    )
    for cause, reason, predicted in candidates:
        if all(math.isclose(x, predicted[rank], rel_tol=bound) for rank, x in norms.items()):
            return Cause(cause, reason)
    for axes, groups in _groups(comparison.layout, norms):
        sums = [sum(norms[b] ** 2 for b in group) for group in groups.values()]
        if all(math.isclose(x, total, rel_tol=bound) for x in sums):
            reason = f"squares of ranks along {axes} add up to the right one: each has its own parts alone"
            return Cause("norm misses parameters", reason)
    return None


def _groups(layout: Layout, ranks: Iterable[tuple[int, ...]]) -> Iterator[tuple[str, Groups]]:
    """Each set of axes, the empty one first, and by rank the ranks along them."""
    split_axes, all_ranks = [n for n, axis in enumerate(AXES) if layout[axis] > 1], list(ranks)
    for axes in subsets(split_axes):
        fixed = [n for n in range(len(AXES)) if n not in axes]
        groups = {a: [b for b in all_ranks if all(a[n] == b[n] for n in fixed)] for a in all_ranks}
        yield ", ".join(AXES[n] for n in axes), groups


def squares_of(record: Record, step: int) -> dict[str, float]:
    """Sums of squares of a rank's gradients by parameter: of local parts, if recorded."""
    local_squares = {k.name: float(x) for k, x in record.tensors.items() if k[:2] == (step, SQUARE)}
    grads = ((k.name, x) for k, x in record.tensors.items() if k[:2] == (step, "gradient"))
    return local_squares or {name: float(x.double().square().sum()) for name, x in grads}


def _norms_of_ranks(comparison: Comparison, squares: Mapping[tuple[int, ...], float], total: float) -> Norms:
    """Norms from squares of ranks that are summed along some axes, before or after the root."""
    for axes, members in _groups(comparison.layout, squares):
        groups = {rank: [squares[b] for b in group] for rank, group in members.items()}
        cause, reason = "norm repeats parameters", f"copies on ranks along {axes} are added; add each once"
        if sum(next(iter(groups.values()))) < total:
            cause = "norm misses parameters"
            reason = "of the parts of a rank" + (f", summed over {axes}" if axes else "") + " alone"
        yield cause, reason, {rank: math.sqrt(sum(squares)) for rank, squares in groups.items()}
        if axes:
            reason = f"roots of the squares of ranks along {axes} are added; add squares, then take the root"
            if axes in ("dp", "cp"):  # ranks along them hold copies
                reason = f"it is that of a sum along {axes} where a mean is due, or of ranks' roots added"
            yield "norm of roots", reason, {rank: sum(map(math.sqrt, x)) for rank, x in groups.items()}


def _norms_of_parameters(comparison: Comparison, squares: Mapping[str, float], least: float) -> Norms:
    """Norms with squares of some parameters missed, repeated or divided: names that share one word or two."""
    words: dict[str, frozenset[str]] = {}
    for name in squares:
        for word in name.split("."):
            words.setdefault(word, frozenset(n for n in squares if word in n.split(".")))
    split = frozenset(squares) & comparison.split_parameters
    copies = frozenset(squares) - split
    kinds = {split: "split parameters", copies: "replicated parameters"}
    kinds |= {names: word for word, names in words.items() if names not in kinds}
    pairs = {words[a] | words[b]: f"{a} and {b}" for a, b in combinations(words, 2)}
    axes = [n for n in comparison.layout.values() if n > 1]
    sizes = {math.prod(subset) for subset in subsets(axes) if subset}
    factors = 0.0, 2.0, *(f for n in sorted(sizes) for f in (n, 1 / n))
    total = sum(squares.values())
    split_square, copied_square = (sum(squares[n] for n in names) for names in (split, copies))
    for names, description in (pairs | kinds | {frozenset([n]): n for n in squares}).items():
        square = sum(squares[n] for n in names if n in squares)
        for factor in factors if square > 1e3 * least else ():
            cause = f"norm {'misses' if factor < 1 else 'repeats'} parameters"
            reason = f"squares of {description} count {factor:.3g} times"
            norm = math.sqrt(max(0.0, total + (factor - 1) * square))  # rounding may make it negative
            yield cause, reason, dict.fromkeys(comparison.ranks, norm)
    for a, b in permutations(factors, 2) if min(split_square, copied_square) > 1e3 * least else ():
        reason = f"squares of split parameters count {a:.3g} times, of replicated ones {b:.3g} times"
        norm = math.sqrt(a * split_square + b * copied_square)
        yield "norm repeats parameters", reason, dict.fromkeys(comparison.ranks, norm)


class Move(NamedTuple):
    """A rank's part of a weight: its start, actual and expected moves, and the tolerance of these."""

    rank: Coordinates
    name: str
    start: Tensor
    moved: Tensor
    expected: Tensor
    bound: float


def explain_update(comparison: Comparison, wrong: Sequence[Location]) -> Cause | None:
    """The formula of a wrong update: its scale, its decay, shifted shards, missing or permuted elements."""
    moves = [m for m in _moves(comparison, wrong) if not difference(m.moved, m.expected) <= m.bound]
    if not moves:  # as of parameters with offsets
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
        reason = f"weights move {factors} times as far"
        next_moves = _moves(comparison, [x for x in comparison.of_kind(step + 1, "weight") if x.is_wrong])
        next_scales = _scales(next_moves)
        changes = [float(x[0] - scales[k][0]) for k, x in next_scales.items() if k in scales]
        if next_moves and all(abs(x) > 1e-2 for x in changes) and _are_scaled(next_moves, next_scales):
            reason += ", in the next step by another factor: look at step counts of schedules and corrections"
        sizes = [(magnitude(m.start), magnitude(m.moved)) for m in moves]
        if any(abs(x[1]) * start > 1e-4 * moved for start, moved in sizes for x in scales.values()):
            reason += f", but for {decays} of themselves: the decay has another factor"
        return Cause("update scaled", reason)
    scales = _scales(moves, by_name=True)
    if _are_scaled(moves, scales) and sum(m.expected.numel() for m in moves) > LEAST_FITTED * len(scales):
        names: dict[str, list[str]] = {}
        for (_, name), x in scales.items():
            names.setdefault(f"{float(x[0]):.6g}", []).append(name)
        examples = [f"{factor} ({names_of[0]})" for factor, names_of in names.items()]
        listed = ", ".join(examples[:MOST_FACTORS])
        more = f" and {len(examples) - MOST_FACTORS} other factors" if examples[MOST_FACTORS:] else ""
        reason = f"weights move a factor as far, by parameter: {listed}{more}; look at rates of the "
        reason += "optimizer's groups, and at depths or counts of layers that are a stage's"
        return Cause("update scaled", reason)
    if shift := _shift(moves):
        neighbour = f"the one {abs(shift)} {'after' if shift > 0 else 'before'} it in a flat tensor should"
        reason = f"each moves as {neighbour}; look at where shards of flat tensors begin, and at padding"
        return Cause("shards shifted", reason)
    if all(float((m.moved - m.expected).abs().minimum(m.moved.abs()).amax()) <= m.bound for m in moves):
        reason = "some elements stay as they were, the others are right; look at gathers of updates"
        return Cause("partly updated", reason)
    updated = [[(m.start + x).flatten().sort().values for x in (m.moved, m.expected)] for m in moves]
    if all(difference(*pair) <= m.bound for pair, m in zip(updated, moves, strict=True)):
        reason = "updated weights are right in another order; look at gathers of updates"
        return Cause("shards permuted", reason)
    return None


def _moves(comparison: Comparison, locations: Sequence[Location]) -> list[Move]:
    """The update of each weight in its step; empty if a weight before it was not recorded."""
    moves: list[Move] = []
    for location in locations:
        key, match = location.key, location.match
        previous = Key(key.step - 1, "weight", key.name) if key.step else Key(0, "initial", key.name)
        bound = max(1e-4, 10 * location.limit) * location.unit
        for rank, (part, expected) in match.pairs.items():
            before = comparison.ranks[location.stage, *rank].tensors.get(previous)
            try:
                full = comparison.reference.tensors[previous].double()
                start = region(full, match.placement, rank, match.parts)
            except (RuntimeError, KeyError):
                return []
            if before is None or before.shape != start.shape:
                return []
            moved, right = part.double() - before, expected.double() - start
            moves.append(Move(rank, key.name, before.double(), moved, right, bound))
    return moves


def _shift(moves: Sequence[Move]) -> int:
    """Offset in flat weights between an element and the one whose update it receives; 0 if there is none.

    Each element decays itself: u(i) = v(i + shift) + d w(i + shift) - d w(i), where v are expected updates.
    Right elements are excluded, and those at either end, whose neighbours belong to other weights.
    """
    for shift in (sign * size for size in range(1, 5) for sign in (1, -1)):
        columns: list[Tensor] = []
        for m in moves:
            start, moved, expected = (x.flatten() for x in (m.start, m.moved, m.expected))
            inner = slice(max(0, -shift), max(0, len(moved) - max(0, shift)))
            shifted = slice(max(0, shift), max(0, len(moved) - max(0, -shift)))
            rows = torch.stack([expected[shifted], start[shifted] - start[inner], moved[inner]], 1) / m.bound
            columns.append(rows[(moved[inner] - expected[inner]).abs() > m.bound])
        system = torch.cat(columns)
        if len(system) < 2 * LEAST_FITTED:
            continue
        factors = torch.linalg.lstsq(system[:, :2], system[:, 2:]).solution
        if difference(system[:, :2] @ factors, system[:, 2:]) <= 1 and abs(float(factors[0]) - 1) < 1e-3:
            return shift
    return 0


def _are_scaled(moves: Sequence[Move], scales: Mapping[tuple[Coordinates, str], Tensor]) -> bool:
    """True if weights move by factors of the expected update and of themselves."""
    by_name = any(name for _, name in scales)
    factors = ((m, scales[m.rank, m.name if by_name else ""]) for m in moves)
    return all(difference(m.moved, x[0] * m.expected + x[1] * m.start) <= m.bound for m, x in factors)


def _scales(moves: Sequence[Move], *, by_name: bool = False) -> dict[tuple[Coordinates, str], Tensor]:
    """Least-squares factors of the expected update and of the weight, by rank and, if `by_name`, by name."""
    groups: dict[tuple[Coordinates, str], list[Tensor]] = {}
    for m in moves:
        columns = torch.stack([x.flatten() for x in (m.expected, m.start, m.moved)], 1)
        groups.setdefault((m.rank, m.name if by_name else ""), []).append(columns)
    systems = {group: torch.cat(columns) for group, columns in groups.items()}
    return {group: torch.linalg.lstsq(x[:, :2], x[:, 2:]).solution[:, 0] for group, x in systems.items()}
