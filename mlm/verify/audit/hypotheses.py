"""Hypotheses: each predicts wrong numbers from tensors of one process, and is a cause if they are these.

Each returns a cause and a sentence, or None.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from mlm.verify.audit.compare import Cause, Comparison, Location, magnitude
from mlm.verify.audit.formats import EPS
from mlm.verify.audit.parts import SPLIT_AXES, Coordinates, difference, region, scale_of
from mlm.verify.audit.patterns import FIT
from mlm.verify.audit.record import AXES, SQUARE, Key, Record, Split

FORMULAS: dict[str, Callable[[Sequence[float]], float]] = {
    "norm of parts": lambda squares: math.sqrt(sum(squares)),
    "norm of roots": lambda squares: sum(map(math.sqrt, squares)),
}
"""Of the squares of ranks: wrong ways to a norm."""


def values_of(place: Location) -> str:
    """Means of what ranks have, and the right one, in words."""
    values = dict.fromkeys(f"{float(part.double().mean()):.10g}" for part in place.match.parts.values())
    right = float(next(iter(place.match.pairs.values()))[1].double().mean())
    return f"it is {', '.join(list(values)[:4])} in place of {right:.10g}"


def explain_rounding(comparison: Comparison, wrong: Sequence[Location]) -> tuple[str, str, str] | None:
    """Return cause, sentence and place of a 16-bit format of the layout alone that explains `wrong`."""
    reduced = {at: each for record in comparison.ranks.values() for at, each in record.reductions.items()}
    own = {at: ("it", name) for at, name in comparison.layout_formats if EPS[name] > 1e-4 and wrong}
    for at, (wide, narrow) in (reduced or own).items():
        if all(place.match.error <= 8 * EPS[narrow] * place.largest for place in wrong):
            where = at or "the whole module"
            if not reduced:
                return "narrow format", f"{where} computes in {narrow}, on one process it does not", where
            why = f"{wide} is rounded to {narrow} to be reduced in {where}, and is {wide} again after it"
            return "reduction in a narrow format", f"{why}; reduce it in {wide}", where
    return None


class LossRows(NamedTuple):
    """A gradient of logits as a·softmax + s − w at the label: [rows] each."""

    a: Tensor
    s: Tensor
    w: Tensor
    label: Tensor

    @classmethod
    def fit(cls, softmax: Tensor, grad: Tensor) -> "LossRows | None":
        """Of [..., V] and [..., V]; None where the gradient is not that of a cross entropy."""
        p, g = (x.double().reshape(-1, x.shape[-1]) for x in (softmax, grad))
        if p.shape != g.shape or p.shape[-1] < 4:
            return None
        label = g.argmin(-1, keepdim=True)
        rest = torch.ones_like(p).scatter(-1, label, 0.0)
        mean_p, mean_g = ((x * rest).sum(-1, True) / rest.sum(-1, True) for x in (p, g))
        x, y = (p - mean_p) * rest, (g - mean_g) * rest
        a = (x * y).sum(-1, True) / (x * x).sum(-1, True).clamp_min(1e-300)
        s = mean_g - a * mean_p
        w = (a * p + s - g).gather(-1, label)
        fitted = (a * p + s).scatter_add(-1, label, -w)
        return cls(a[:, 0], s[:, 0], w[:, 0], label[:, 0]) if near(fitted, g, magnitude(g)) else None

    @property
    def counts(self) -> Tensor:
        """True for rows that count and have their label here."""
        return self.w > FIT * magnitude(self.w)


def near(x: Tensor, y: Tensor, size: float) -> bool:
    return difference(x, y) <= FIT * size


class Rows(NamedTuple):
    """A rank's rows, the right ones, and of its part of the vocabulary the sum of the softmax."""

    own: LossRows
    right: LossRows
    share: Tensor
    log_sum: Tensor
    """Of the exponentials of all logits."""


def explain_loss(comparison: Comparison, step: int) -> Cause | None:
    """Labels, divisors and terms of a cross entropy, as the gradient of its logits shows them."""
    outputs = [p for p in comparison.locations if p.key[:2] == (step, "output") and not p.is_wrong]
    for place in reversed(outputs):
        key = place.key._replace(kind="backward")
        logits, grad = (comparison.reference.tensors.get(k) for k in (place.key, key))
        if logits is None or grad is None or logits.shape != grad.shape or logits.ndim < 2:
            continue
        softmax, ranks = logits.double().softmax(-1), dict[Coordinates, Rows]()
        for at, (_, part) in place.match.pairs.items():
            actual = comparison.ranks[place.stage, *at].tensors.get(key)
            p, right = (region(x, place.match.placement, at, place.match.parts) for x in (softmax, grad))
            fits = [None if x is None else LossRows.fit(p, x) for x in (actual, right)]
            if fits[0] is not None and fits[1] is not None:
                log_sum = (part - p.log())[..., 0].flatten()
                ranks[at] = Rows(fits[0], fits[1], p.sum(-1).flatten(), log_sum)
        if len(ranks) == len(place.match.pairs):
            tp = comparison.layout["tp"]
            return (
                _of_labels(place, logits, ranks)
                or _of_weights(comparison, ranks)
                or _of_vocabulary(ranks, tp)
            )
    return None


def _of_labels(place: Location, whole: Tensor, ranks: Mapping[Coordinates, Rows]) -> Cause | None:
    shape, parts = next(iter(place.match.parts.values())).shape[:-1], place.match.parts
    wrong = {
        at: own.right.counts & ~(own.own.counts & (own.own.label == own.right.label))
        for at, own in ranks.items()
    }
    count = sum(int(rows.sum()) for rows in wrong.values())
    splits = [how for how in place.match.placement.values() if isinstance(how, Split)]
    for split in (s for s in splits if count and s.dim % (len(shape) + 1) < len(shape)):
        size = whole.shape[split.dim]
        numbers = torch.arange(size).view([-1 if d == split.dim else 1 for d in range(whole.ndim)])
        is_end = {}
        for at in ranks:  # tokens of a rank after which its next is not the next of the sequence
            own = region(numbers.expand(whole.shape), place.match.placement, at, parts)[..., 0]
            following = own.roll(-1, split.dim)
            is_end[at] = (following != own + 1).flatten()
        if all(bool((is_end[at] | ~rows).all()) for at, rows in wrong.items()):
            why = f"the last token of each chunk of a {split.axis} rank has another label, or does not count"
            return "labels at the ends of chunks", f"{why}; shift labels before the sequence is split"
    some = f"{count} of {len(ranks) * math.prod(shape)} tokens of ranks have another, or do not count"
    return ("other labels", some) if count else None


def _of_weights(comparison: Comparison, ranks: Mapping[Coordinates, Rows]) -> Cause | None:
    scales = []
    for own, right, *_ in ranks.values():
        x, y = torch.cat(own[:3]), torch.cat(right[:3])
        scales.append(scale_of(x, y))
        if not near(x, scales[-1] * y, magnitude(x)):
            return None
    factors = ", ".join(dict.fromkeys(f"{scale:.6g}" for scale in scales))
    if "," not in factors:  # a factor of replicas is undone where these are averaged
        is_right = any(math.isclose(scales[0], n, rel_tol=FIT) for n in (1, comparison.replicas))
        return None if is_right else ("wrong divisor", f"each token counts {factors} times as on one process")
    sums = [float(own.w.sum()) for own, *_ in ranks.values()]
    if all(math.isclose(x, sums[0], rel_tol=FIT) for x in sums):
        why = f"tokens of ranks count {factors} times as on one process, so that each rank's sum is the same"
        return "divided by local tokens", f"{why}; divide by the tokens of all ranks"
    return "ranks weighed unequally", f"tokens of ranks count {factors} times as on one process"


def _of_vocabulary(ranks: Mapping[Coordinates, Rows], tp: int) -> Cause | None:
    """A term of the loss that is of a rank's part of the vocabulary."""
    own, right = (
        LossRows(*map(torch.cat, zip(*(rows[i] for rows in ranks.values()), strict=True))) for i in (0, 1)
    )
    share, log_sum = (torch.cat([rows[i] for rows in ranks.values()]) for i in (2, 3))  # type: ignore[misc]
    size, is_softmax_right = magnitude(right.a), near(own.a, right.a, magnitude(right.a))
    if tp == 1 or (is_softmax_right and near(own.s, right.s, size)):
        return None
    if is_softmax_right and near(own.s, right.s * tp, size):
        return "local statistics", "label smoothing divides by the size of a rank's part of the vocabulary"
    if is_softmax_right or not near(own.s, right.s, size):
        return None
    if near(own.a, right.a / share, size):
        return "local statistics", "the softmax is over a rank's part of the vocabulary"
    # a z-loss adds 2 c w log_sum to the weight w of the softmax; that of a rank's part has its own softmax
    z = (own.a - right.a) * share / (log_sum * (1 - share) + share.log())
    factor = scale_of(z, right.a - z * log_sum)
    if near(z, factor * (right.a - z * log_sum), magnitude(z)):
        return (
            "local statistics",
            "the z-loss takes the sum of exponentials of a rank's part of the vocabulary",
        )
    return None


def explain_norm(comparison: Comparison, place: Location) -> Cause | None:
    """Formulas of a gradient norm: parts of ranks, parameters that are missed or repeated."""
    step = place.key.step
    whole, ranks = squares_of(comparison.reference, step), comparison.ranks.items()
    total, bound = sum(whole.values()), max(FIT / 10, 10 * place.limit)
    found = {at: float(r.tensors[place.key]) for at, r in ranks if place.key in r.tensors}
    if not math.isclose(total**0.5, float(comparison.reference.tensors[place.key]), rel_tol=bound):
        return None  # another norm
    squares = {at: squares_of(record, step) for at, record in ranks}
    earlier = {
        at: {n for b in squares if b[0] < at[0] and b[1:] == at[1:] for n in squares[b]} for at in squares
    }
    every = {at: sum(own.values()) for at, own in squares.items()}
    once = {at: sum(x for n, x in own.items() if n not in earlier[at]) for at, own in squares.items()}
    for own in (every, once):  # of weights on several stages, all or the first
        if cause := _of_ranks(comparison, found, own, total, bound):
            return cause[0], f"{values_of(place)}: {cause[1]}"
    return _of_parameters(comparison, place, whole, {x * x - total for x in found.values()}, bound * total)


def squares_of(record: Record, step: int) -> dict[str, float]:
    """Sums of squares of a rank's parts of gradients, by parameter."""
    own = {k.name: float(x) for k, x in record.tensors.items() if k[:2] == (step, SQUARE)}
    grads = ((k.name, x) for k, x in record.tensors.items() if k[:2] == (step, "gradient"))
    return own or {name: float(x.double().square().sum()) for name, x in grads}


def _of_ranks(
    comparison: Comparison,
    found: Mapping[tuple[int, ...], float],
    own: Mapping[tuple[int, ...], float],
    total: float,
    bound: float,
) -> Cause | None:
    """The cause of norms `found` by ranks, as a formula of the squares of ranks along some axes."""
    axes = [n for n, axis in enumerate(AXES) if comparison.layout[axis] > 1]
    for axis in (c for size in range(len(axes) + 1) for c in combinations(axes, size)):
        others = [n for n in range(len(AXES)) if n not in axis]
        groups = {at: [b for b in own if all(b[n] == at[n] for n in others)] for at in own}
        over = ", ".join(AXES[n] for n in axis)
        sums = (sum(found.get(b, 0.0) ** 2 for b in groups[at]) for at in own)
        if all(math.isclose(x, total, rel_tol=bound) for x in sums):
            why = f"squares of ranks along {over} add up to the right one: each has its own parts alone"
            return "norm misses parameters", why
        for name, formula in FORMULAS.items():
            squares = {at: [own[b] for b in groups[at]] for at in found}
            if not all(math.isclose(x, formula(squares[at]), rel_tol=bound) for at, x in found.items()):
                continue
            if name != "norm of parts" and axis:
                return "norm of roots", f"{name} of ranks along {over}; add squares, then take the root"
            if sum(next(iter(squares.values()))) < total:
                summed = over and f", summed over {over}"
                return "norm misses parameters", f"of the parts of a rank{summed} alone"
            return "norm repeats parameters", f"copies on ranks along {over} are added; add each once"
    return None


def _of_parameters(
    comparison: Comparison, place: Location, squares: Mapping[str, float], off: set[float], bound: float
) -> Cause | None:
    """Parameters of one kind that a norm misses, repeats or divides."""
    kinds: dict[frozenset[str], str] = {}
    copies = {
        p.key.name
        for p in comparison.locations
        if p.key.kind == "gradient" and set(p.match.placement.values()) <= {"copy"}
    }
    flat = {k.name for k, x in comparison.reference.tensors.items() if k.kind == "gradient" and x.ndim == 1}
    for some, kind in ((copies, "replicated parameters"), (flat, "norms and biases")):
        kinds |= {frozenset(some): kind, frozenset(set(squares) - some): f"all but {kind}"}
    modules = {name: re.sub(r"\d+", "*", name).split(".") for name in squares}
    for path in modules.values():
        for word in path:
            kinds.setdefault(frozenset(n for n in squares if word in modules[n]), word)
    pairs = [(a | b, f"{kinds[a]} and {kinds[b]}") for a, b in combinations(kinds, 2)]
    kinds |= {frozenset([name]): name for name in squares}
    for names, words in (*kinds.items(), *pairs):
        square, sizes = sum(squares[n] for n in names), {n for n in comparison.layout.values() if n > 1}
        for factor in (0.0, 2.0, *(f for n in sizes for f in (n, 1 / n))):
            if square > 1e3 * bound and all(abs(x - (factor - 1) * square) < bound for x in off):
                verb, why = (
                    "misses" if factor < 1 else "repeats",
                    f"squares of {words} count {factor:.3g} times",
                )
                return f"norm {verb} parameters", f"{values_of(place)}: {why}"
    return None


def explain_update(comparison: Comparison, wrong: Sequence[Location]) -> Cause | None:
    """Formulas of an update: its scale, what decays, what stays as it was."""
    moves: list[tuple[Coordinates, Tensor, Tensor, Tensor, float]] = []
    for place in wrong:
        key = place.key
        before = Key(key.step - 1, "weight", key.name) if key.step else Key(0, "initial", key.name)
        for at, (part, right) in place.match.pairs.items():
            try:
                start = region(
                    comparison.reference.tensors[before], place.match.placement, at, place.match.parts
                )
            except (RuntimeError, KeyError):  # of parameters whose regions are offsets
                return None
            bound = max(1e-4, 10 * place.limit) * place.largest
            moves.append((at, part.double() - start, right.double() - start, start, bound))
    torn = [move for move in moves if not difference(move[1], move[2]) <= move[4]]
    if all(magnitude(moved) <= bound for _, moved, *_, bound in torn):
        return "not updated", "weights stay as they were"
    _, moved, right, start, _ = max(torn, key=lambda move: magnitude(move[3]))
    decay = scale_of(moved - right, start)
    if all(difference(m - r, decay * s) <= bound for _, m, r, s, bound in torn):
        return "weight decay", f"weights move by {decay:.3g} of themselves beside the right update"
    scales: dict[Coordinates, float] = {}
    for at, moved, right, *_ in sorted(torn, key=lambda move: magnitude(move[2])):
        scales[at] = scale_of(moved, right)
    if all(difference(m, scales[at] * r) <= bound for at, m, r, _, bound in torn):
        return (
            "update scaled",
            f"weights move {', '.join(dict.fromkeys(f'{x:.6g}' for x in scales.values()))} times as far",
        )
    if all(float((m - r).abs().minimum(m.abs()).amax()) <= bound for _, m, r, _, bound in torn):
        return (
            "partly updated",
            "some elements stay as they were, the others are right; look at gathers of updates",
        )
    return None


def explain_parts(comparison: Comparison, place: Location) -> Cause | None:
    """Parts of other ranks."""
    whole, layout = comparison.reference.tensors[place.key], comparison.layout
    bound = max(FIT, 10 * place.limit) * place.largest
    for n, axis in enumerate(SPLIT_AXES):
        parts = {at[n]: part for at, part in sorted(place.match.parts.items())}
        for dim in range(whole.ndim if layout[axis] > 1 else 0):
            rights = whole.chunk(layout[axis], dim)
            if len(rights) != layout[axis] or any(part.shape != rights[0].shape for part in parts.values()):
                continue
            fits = [[m for m, x in enumerate(rights) if difference(x, y) <= bound] for y in parts.values()]
            if all(fits):
                ranks = [each[0] for each in fits]
                cause = "shards permuted" if len(set(ranks)) > 1 else "the same part on each rank"
                return cause, f"{axis} ranks have the parts of ranks {', '.join(map(str, ranks))}"
    return None
