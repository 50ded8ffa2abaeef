"""Hypotheses: each predicts wrong numbers from tensors of one process, and is a cause if they are these.

Each returns a cause and a sentence, or None.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, combinations
from typing import NamedTuple

import torch
from torch import Tensor

from mlm.verify.audit.compare import Comparison, Layout, Location, magnitude
from mlm.verify.audit.parts import Coordinates, difference, region, scale_of
from mlm.verify.audit.patterns import FIT
from mlm.verify.audit.record import AXES, SQUARE, Cause, Key, Record, Split


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
        key, match = place.key._replace(kind="backward"), place.match
        logits, grad = (comparison.reference.tensors.get(k) for k in (place.key, key))
        if logits is None or grad is None or logits.shape != grad.shape or logits.ndim < 2:
            continue
        softmax, ranks = logits.double().softmax(-1), list[Rows]()
        for at, (_, part) in match.pairs.items():
            actual = comparison.ranks[place.stage, *at].tensors.get(key)
            p, right = (region(x, match.placement, at, match.parts) for x in (softmax, grad))
            own, rows = (None if x is None else LossRows.fit(p, x) for x in (actual, right))
            if own is not None and rows is not None:
                ranks.append(Rows(own, rows, p.sum(-1).flatten(), (part - p.log())[..., 0].flatten()))
        if len(ranks) == len(match.pairs):
            of_vocabulary = partial(_of_vocabulary, ranks, comparison.layout["tp"])
            return _of_labels(place, ranks) or _of_weights(comparison, ranks) or of_vocabulary()
    return None


def _of_labels(place: Location, ranks: Sequence[Rows]) -> Cause | None:
    shape = next(iter(place.match.parts.values())).shape[:-1]
    wrong = torch.stack(
        [right.counts & ~(own.counts & (own.label == right.label)) for own, right, *_ in ranks]
    ).view(-1, *shape)
    for split in (how for how in place.match.placement.values() if isinstance(how, Split)):
        if bool(wrong.any()) and (dim := split.dim % (len(shape) + 1)) < len(shape):
            ends = torch.arange(1, shape[dim] + 1) % (shape[dim] // (2 if split.is_zigzag else 1)) == 0
            if not bool(wrong.movedim(dim + 1, -1)[..., ~ends].any()):
                why = f"the last token of each chunk of a {split.axis} rank has another label, or none"
                return Cause("labels at the ends of chunks", f"{why}; shift labels before the split")
    some = f"{int(wrong.sum())} of {wrong.numel()} tokens of ranks have another, or do not count"
    return Cause("other labels", some) if bool(wrong.any()) else None


def _of_weights(comparison: Comparison, ranks: Sequence[Rows]) -> Cause | None:
    scales = []
    for own, right, *_ in ranks:
        x, y = torch.cat(own[:3]), torch.cat(right[:3])
        scales.append(scale_of(x, y))
        if not near(x, scales[-1] * y, magnitude(x)):
            return None
    factors = ", ".join(dict.fromkeys(f"{scale:.6g}" for scale in scales))
    why = f"tokens of ranks count {factors} times as on one process"
    if "," not in factors:  # a factor of replicas is undone where these are averaged
        is_right = any(math.isclose(scales[0], n, rel_tol=FIT) for n in (1, comparison.replicas))
        return None if is_right else Cause("wrong divisor", why)
    sums = [float(own.w.sum()) for own, *_ in ranks]
    if all(math.isclose(x, sums[0], rel_tol=FIT) for x in sums):
        why += ", so that each rank's sum is the same; divide by the tokens of all ranks"
        return Cause("divided by local tokens", why)
    return Cause("ranks weighed unequally", why)


def _of_vocabulary(ranks: Sequence[Rows], tp: int) -> Cause | None:
    """A term of the loss that is of a rank's part of the vocabulary."""
    own, right = (LossRows(*map(torch.cat, zip(*(rows[i] for rows in ranks), strict=True))) for i in (0, 1))
    share, log_sum = (torch.cat([rows[i] for rows in ranks]) for i in (2, 3))  # type: ignore[misc]
    size = magnitude(right.a)
    is_softmax_right, is_shift_right = near(own.a, right.a, size), near(own.s, right.s, size)
    term = ""
    if tp > 1 and is_softmax_right and not is_shift_right and near(own.s, right.s * tp, size):
        term = "label smoothing divides by the size"
    elif tp > 1 and is_shift_right and near(own.a, right.a / share, size) and not is_softmax_right:
        term = "the softmax is over the logits"
    elif tp > 1 and is_shift_right and not is_softmax_right:
        # a z-loss adds 2 c w log_sum to the weight w of the softmax; that of a part has its own softmax
        z = (own.a - right.a) * share / (log_sum * (1 - share) + share.log())
        factor = scale_of(z, right.a - z * log_sum)
        if near(z, factor * (right.a - z * log_sum), magnitude(z)):
            term = "the z-loss takes the sum of exponentials"
    return Cause("local statistics", f"{term} of a rank's part of the vocabulary") if term else None


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
            yield "norm of roots", why, {at: sum(map(math.sqrt, squares)) for at, squares in groups.items()}


def _norms_of_parameters(comparison: Comparison, squares: Mapping[str, float], least: float) -> Norms:
    """Of parameters that are missed, repeated or divided: some whose names share a word, or two words."""
    words: dict[str, frozenset[str]] = {}
    for name in squares:
        for word in name.split("."):
            words.setdefault(word, frozenset(n for n in squares if word in n.split(".")))
    copies = frozenset(
        p.key.name
        for p in comparison.locations
        if p.key.kind == "gradient" and set(p.match.placement.values()) <= {"copy"}
    )
    kinds = {copies: "replicated parameters"} | {names: word for word, names in words.items()}
    pairs = {words[a] | words[b]: f"{a} and {b}" for a, b in combinations(words, 2)}
    sizes = {n for n in comparison.layout.values() if n > 1}
    total = sum(squares.values())
    for names, which in (pairs | kinds | {frozenset([n]): n for n in squares}).items():
        square = sum(squares[n] for n in names if n in squares)
        for factor in (0.0, 2.0, *(f for n in sizes for f in (n, 1 / n))) if square > 1e3 * least else ():
            cause = f"norm {'misses' if factor < 1 else 'repeats'} parameters"
            norm = math.sqrt(max(0.0, total + (factor - 1) * square))  # all missed: rounding is left
            yield cause, f"squares of {which} count {factor:.3g} times", dict.fromkeys(comparison.ranks, norm)


class Move(NamedTuple):
    """A rank's part of a weight: where it begins, how far it and the right one move, and a tolerance."""

    at: Coordinates
    start: Tensor
    moved: Tensor
    right: Tensor
    bound: float


def explain_update(comparison: Comparison, wrong: Sequence[Location]) -> Cause | None:
    """Formulas of an update: its scale, what decays, what stays as it was."""
    moves: list[Move] = []
    for place in wrong:
        key, match = place.key, place.match
        before = Key(key.step - 1, "weight", key.name) if key.step else Key(0, "initial", key.name)
        bound = max(1e-4, 10 * place.limit) * place.largest
        for at, (part, right) in match.pairs.items():
            try:
                start = region(comparison.reference.tensors[before], match.placement, at, match.parts)
            except (RuntimeError, KeyError):  # of parameters whose regions are offsets
                return None
            moves.append(Move(at, start, part.double() - start, right.double() - start, bound))
    moves = [m for m in moves if not difference(m.moved, m.right) <= m.bound]
    largest = max(moves, key=lambda m: magnitude(m.start))
    decay = scale_of(largest.moved - largest.right, largest.start)
    scales: dict[Coordinates, float] = {}
    for m in sorted(moves, key=lambda m: magnitude(m.right)):
        scales[m.at] = scale_of(m.moved, m.right)
    if all(magnitude(m.moved) <= m.bound for m in moves):
        return Cause("not updated", "weights stay as they were")
    if all(difference(m.moved - m.right, decay * m.start) <= m.bound for m in moves):
        return Cause("weight decay", f"weights move by {decay:.3g} of themselves beside the right update")
    if all(difference(m.moved, scales[m.at] * m.right) <= m.bound for m in moves):
        factors = ", ".join(dict.fromkeys(f"{x:.6g}" for x in scales.values()))
        return Cause("update scaled", f"weights move {factors} times as far")
    if all(float((m.moved - m.right).abs().minimum(m.moved.abs()).amax()) <= m.bound for m in moves):
        why = "some elements stay as they were, the others are right; look at gathers of updates"
        return Cause("partly updated", why)
    return None
