"""The likely cause of a difference, from the pattern of its numbers.

At the first place that differs, `pattern` tries formulas in turn: the sum over an axis is right, the numbers
are off by the size of an axis, they are right in another order, or but for a scale and a shift … CAUSES has
the words for each.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlm.verify.audit.compare import Comparison, Place, magnitude
from mlm.verify.audit.parts import SPLIT_AXES, Parts, add_over, are_copies, difference
from mlm.verify.audit.record import KINDS
from mlm.verify.audit.subject import Split

FIT = 1e-6
"""Formulas hold to this fraction of the largest element, or to ten tolerances."""
MOST_NAMES = 4
CAUSES = {
    ("output", "addends"): (
        "missing all-reduce",
        "each {axis} rank has one addend, and their sum is right; sum it over {axis}",
    ),
    ("output", "times"): (
        "doubled all-reduce",
        "it is {factor} times that of one process; sum it over {axis} once",
    ),
    ("output", "divided"): (
        "averaged instead of summed",
        "it is 1/{size} of that of one process; sum it over {axis} without a division",
    ),
    ("output", "permuted"): (
        "shards permuted",
        "it holds the right numbers in another order; look at the order in which parts are put together "
        "(gather, all-to-all, order of ranks in the group)",
    ),
    ("output", "affine"): (
        "local statistics",
        "it is right but for a scale and a shift: a mean, variance or sum is that of a rank's part, to be "
        "reduced over the ranks that hold the others; or a sum is made twice before a bias is added",
    ),
    ("backward", "addends"): (
        "missing all-reduce of a gradient",
        "each {axis} rank has one addend, and their sum is right; sum it over {axis} in backward (operator f "
        "of arXiv:1909.08053)",
    ),
    ("backward", "times"): (
        "doubled all-reduce of a gradient",
        "it is {factor} times that of one process, and that of {before} is right; look at the backward of "
        "the sum over {axis} between them, which must not sum again",
    ),
    ("backward", "divided"): (
        "averaged instead of summed",
        "it is 1/{size} of that of one process, and that of {before} is right; look for a mean over {axis} "
        "in backward",
    ),
    ("backward", "permuted"): (
        "shards permuted",
        "it holds the right numbers in another order; look at the backward of a gather or a scatter",
    ),
    ("gradient", "addends"): (
        "gradients not summed",
        "those of {names} are of one {axis} rank alone, and their sum is right; sum them over {axis} (with "
        "sequence parallelism those of norms, whose inputs are split)",
    ),
    ("gradient", "mean"): (
        "gradients not reduced",
        "those of {names} are of one {axis} rank alone, and their mean is right; reduce them over {axis}",
    ),
    ("gradient", "times"): (
        "unscaled mean",
        "those of {names} are {factor} times those of one process; a sum over {axis} lacks its division, or "
        "is made twice",
    ),
    ("gradient", "divided"): (
        "divided twice",
        "those of {names} are 1/{size} of those of one process; look for a division by {axis} too many",
    ),
}


@dataclass(frozen=True)
class Finding:
    """First difference of a layout from one process, and its likely cause."""

    place: str
    """Module or parameters."""
    kind: str
    """What parts: output, gradient of the output …"""
    step: int
    """From 1."""
    size: float
    """Largest difference as a fraction of the largest element."""
    cause: str
    """A short name: "missing all-reduce"."""
    sentence: str
    """The pattern, and what to look at."""


def diagnose(comparison: Comparison) -> Finding | None:
    """The finding at the first place where the layout parts; None where it does not."""
    torn = [
        place
        for place in comparison.places
        if place.key.kind == "initial" and (unequal(place) or equal(place))
    ]
    if torn:
        return _torn(torn)
    wrong = comparison.wrong
    if all(place.key.kind == "loss" and _is_own_loss(place) for place in wrong):
        return _dropout(comparison)
    place = wrong[0]
    functions = {"loss": _loss, "norm": _norm, "gradient": _gradients, "weight": _weights}
    cause, sentence, *names = functions.get(place.key.kind, _activation)(comparison, place)
    name = names[0] if names else place.key.name or "the whole module"
    return Finding(name, KINDS[place.key.kind], place.key.step + 1, place.relative, cause, sentence)


def pattern(comparison: Comparison, places: Sequence[Place]) -> tuple[str, str] | None:
    """The formula that explains all places, and its axis ("" for those without); None without any."""
    pairs = [(place, part, right) for place in places for part, right in place.match.pairs.values()]
    for axis, size in axes_of(comparison):
        for name, factor in (("times", float(size)), ("divided", 1 / size)):
            if all(is_close(part, factor * right, place) for place, part, right in pairs):
                return name, axis
        if all(place.match.over(axis) == "copy" for place in places):
            for name, divisor in (("addends", 1), ("mean", size)):
                if all(_adds_up(place, axis, divisor) for place in places):
                    return name, axis
    if all(_is_permuted(place) for place in places):
        return "permuted", ""
    return ("affine", "") if all(map(_is_affine, places)) else None


def axes_of(comparison: Comparison) -> list[tuple[str, int]]:
    """Axes with several ranks, innermost first."""
    return [(axis, comparison.layout[axis]) for axis in reversed(SPLIT_AXES) if comparison.layout[axis] > 1]


def is_close(part: Tensor, right: Tensor, place: Place) -> bool:
    """True if a formula explains a tensor."""
    bound = max(FIT, 10 * place.limit) * max(magnitude(right), magnitude(part))
    return part.shape == right.shape and difference(part, right) <= bound


def _adds_up(place: Place, axis: str, divisor: int) -> bool:
    total = add_over(_parts(place), axis)
    return all(is_close(total[at] / divisor, right, place) for at, (_, right) in place.match.pairs.items())


def _parts(place: Place) -> Parts:
    return {at: part for at, (part, _) in place.match.pairs.items()}


def _is_permuted(place: Place) -> bool:
    parts, rights = zip(*place.match.pairs.values(), strict=True)
    actual, expected = (torch.cat([x.flatten() for x in each]).sort().values for each in (parts, rights))
    return actual.numel() > 1 and is_close(actual, expected, place)


def _is_affine(place: Place) -> bool:
    """True if along some dimension each part is a·x + b of the right one x."""
    pairs = list(place.match.pairs.values())
    for dim in range(pairs[0][1].ndim):
        centred = [[t - t.mean(dim, keepdim=True) for t in pair] for pair in pairs]
        slopes = [
            (x * y).sum(dim, keepdim=True) / (x * x).sum(dim, keepdim=True).clamp_min(1e-300)
            for y, x in centred
        ]
        if pairs[0][1].shape[dim] > 3 and all(
            is_close(y, slope * x, place) for (y, x), slope in zip(centred, slopes, strict=True)
        ):
            return True
    return False


def unequal(place: Place) -> str | None:
    """An axis whose ranks hold copies that differ."""
    copied = (axis for axis, how in place.match.placement.items() if how == "copy")
    return next((axis for axis in copied if not are_copies(_parts(place), axis)), None)


def equal(place: Place) -> str | None:
    """An axis whose ranks hold parts that are equal, and not constant."""
    parts = _parts(place)
    if all(bool((part == part.flatten()[:1]).all()) for part in parts.values()):
        return None
    split = (axis for axis, how in place.match.placement.items() if isinstance(how, Split))
    return next((axis for axis in split if are_copies(parts, axis)), None)


def _torn(torn: Sequence[Place]) -> Finding:
    """Initial weights that differ between copies, or are equal between parts."""
    axis, names = unequal(torn[0]), _list(torn)
    if axis is not None:
        cause = "weights depend on the rank"
        why = f"copies on {axis} ranks differ before the first step; draw them from one seed, or broadcast"
    else:
        cause = "shards begin equal"
        why = f"every {equal(torn[0])} rank begins with the same numbers; draw the whole, and slice it"
    return Finding(names, KINDS["initial"], 1, torn[0].relative, cause, why)


def _list(places: Sequence[Place]) -> str:
    names = list(dict.fromkeys(place.key.name for place in places))
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _dropout(comparison: Comparison) -> Finding | None:
    """Masks that are not equal where inputs are copies, or are where they are not."""
    for rank, record in comparison.ranks.items():
        axis = next((axis for axis, i in zip(SPLIT_AXES, rank[1:], strict=True) if i), "")
        first = comparison.ranks[(rank[0], *(0 for _ in SPLIT_AXES))]
        for (name, x, mask), (_, x0, mask0) in zip(record.masks, first.masks, strict=False):
            if axis and (x == x0) != (mask == mask0):
                held, dropped = ("copies of its input", "other") if x == x0 else ("other inputs", "the same")
                how = "alike" if x == x0 else f"by {axis} rank"
                why = f"{axis} ranks hold {held} and drop {dropped} elements; seed its random stream {how}"
                return Finding(name, "dropout mask", 1, 1.0, "dropout streams", why)
    return None


def _worded(
    comparison: Comparison, kind: str, found: tuple[str, str] | None, **words: str
) -> tuple[str, str] | None:
    if found is None or (kind, found[0]) not in CAUSES:
        return None
    cause, sentence = CAUSES[kind, found[0]]
    size = comparison.layout[found[1]] if found[1] else 1
    return cause, sentence.format(axis=found[1], size=size, factor=size, **words)


def _activation(comparison: Comparison, place: Place) -> tuple[str, ...]:
    """The cause of a wrong output or gradient of an output."""
    kind, before = place.key.kind, comparison.before(place)
    name = before.key.name if before is not None else "the loss"
    if kind == "output" and not place.key.name and (cause := _split_loss(comparison, place)):
        return cause
    if ranks := _wrong_ranks(place):
        return (
            "depends on the rank",
            f"{name} before it is right, and it is wrong on {ranks} alone; look at what reads a rank's place "
            "(positions, masks, samples, random numbers)",
        )
    if kind == "output" and (bias := _repeated_bias(comparison, place)):
        return bias
    if not place.match.sums and (
        found := _worded(comparison, kind, pattern(comparison, [place]), before=name)
    ):
        return found
    if before is not None and before.match.sums:  # right as addends, and taken for the sum
        found = _worded(comparison, kind, ("addends", before.match.sums[0]), before=name)
        assert found is not None
        return (*found, name)
    if before is None and kind == "backward":
        return (
            "backward of the loss",
            "outputs and loss are right, the gradient with which backward begins is not; look at the "
            "backward of the loss over each rank's vocabulary (local sums, sizes, smoothing)",
        )
    splits = [] if before is None else [how for how in before.match.placement.values() if how != "copy"]
    if kind == "output" and any(isinstance(how, Split) and how.axis != "dp" for how in splits):
        return (
            "shards permuted",
            f"{name} before it is right in parts: these are not the parts that this takes them for, or what "
            "is computed between them reads the size of a part; look at the order of fused rows (q, k, v; "
            "gate, up), of heads and of ranks, and at divisors",
        )
    return (
        "depends on the layout",
        f"{name} before it is right; look at what reads the layout (masks, samples, random numbers, "
        "divisors) and at communication between them",
    )


def _wrong_ranks(place: Place) -> str:
    """The ranks that differ, where others do not."""
    bound = place.limit * place.largest
    wrong = [at for at, pair in place.match.pairs.items() if not difference(*pair) <= bound]
    if len(wrong) == len(place.match.pairs):
        return ""
    axes = [axis for axis in place.match.placement if len({at[SPLIT_AXES.index(axis)] for at in wrong}) == 1]
    return " ".join(f"{axis} rank {wrong[0][SPLIT_AXES.index(axis)]}" for axis in axes) or "some ranks"


def _repeated_bias(comparison: Comparison, place: Place) -> tuple[str, str] | None:
    tensors = comparison.reference.tensors
    biases = {key.name: x for key, x in tensors.items() if key.kind == "initial" and x.ndim == 1 and x.any()}
    pairs = [] if place.match.sums else list(place.match.pairs.values())
    for axis, size in axes_of(comparison) if pairs else []:
        for name, bias in biases.items():
            if all(part.shape[-1] == len(bias) for part, _ in pairs) and all(
                is_close(part - right, (size - 1) * bias.expand_as(part), place) for part, right in pairs
            ):
                why = f"every {axis} rank adds {name} before the sum over {axis}; add it once, after the sum"
                return "bias added on every rank", why
    return None


def _is_own_loss(place: Place) -> bool:
    """True if replicas report losses of their own, equal on all their tp ranks: no difference of training."""
    values: dict[tuple[int, ...], set[float]] = {}
    for at, part in _parts(place).items():
        values.setdefault(at[:2], set()).add(float(part.double().sum()))
    return len(values) > 1 and all(max(v) - min(v) <= FIT * abs(max(v)) for v in values.values())


def _loss(comparison: Comparison, place: Place) -> tuple[str, ...]:
    shown, right = _means(place)
    return _split_loss(comparison, place) or (
        "wrong divisor",
        f"the outputs are right, and it is {shown} in place of {right:.6g}; look at the count of tokens that "
        "it is divided by, which should be that of the global batch, and at labels",
    )


def _split_loss(comparison: Comparison, place: Place) -> tuple[str, str] | None:
    """The cause of a wrong loss, or losses of tokens, over a vocabulary that is split over tp."""
    tp, (shown, right) = comparison.layout["tp"], _means(place)
    outputs = [p for p in comparison.places if p.key[:2] == (place.key.step, "output") and p.key.name]
    pairs = place.match.pairs.values()
    if tp > 1 and all(is_close(part - ref, torch.full_like(ref, math.log(tp)), place) for part, ref in pairs):
        return (
            "gathered logits in a split loss",
            f"it is log({tp}) too large: a vocabulary-parallel loss received whole logits, and counts each "
            "on every tp rank; give it this rank's logits",
        )
    if tp > 1 and outputs and isinstance(outputs[-1].match.over("tp"), Split):
        return (
            "local statistics",
            f"the logits are right, split over tp, and it is {shown} in place of {right:.6g}: it takes a "
            "rank's part of the vocabulary for all; look at maxima, sums, means, sizes (label smoothing, "
            "z-loss)",
        )
    return None


def _means(place: Place) -> tuple[str, float]:
    """Means of what ranks have, in words, and the right one."""
    values = dict.fromkeys(f"{float(part.double().mean()):.6g}" for part in _parts(place).values())
    right = float(next(iter(place.match.pairs.values()))[1].double().mean())
    return ", ".join(list(values)[:MOST_NAMES]), right


def _gradients(comparison: Comparison, place: Place) -> tuple[str, ...]:
    step = [p for p in comparison.places if p.key[:2] == place.key[:2]]
    wrong = [p for p in step if p.is_wrong]
    names = "all parameters" if len(wrong) == len(step) else _list(wrong)
    if (stages := _tied(wrong)) is not None:
        return "tied weights not summed", stages, _list(wrong[:1])
    if found := _worded(comparison, "gradient", pattern(comparison, wrong), names=names):
        return (*found, names)
    factors = sorted({f"{value:.4g}" for value in comparison.factors.get(place.key.step, {}).values()})
    if len(factors) > 1:
        return (
            "wrong divisor",
            f"inside the model gradients are right but for a factor of each replica ({', '.join(factors)}): "
            "each divides by its own count of tokens; divide by that of the global batch",
            names,
        )
    if axis := next(filter(None, map(unequal, wrong)), None):
        return (
            "replicas drift",
            f"the copies of {names} differ between {axis} ranks; reduce them over all of these",
            names,
        )
    return (
        "gradient",
        f"inside the model gradients are right, those of {names} are not; look at how they are reduced",
        names,
    )


def _tied(wrong: Sequence[Place]) -> str | None:
    """Weights on several stages, whose gradients sum to the right one."""
    first = [place for place in wrong if place.key == wrong[0].key]
    parts = [_parts(place) for place in first]
    if len(first) < 2 or any(len(part) != len(parts[0]) for part in parts):
        return None
    sums = {at: sum((part[at] for part in parts[1:]), parts[0][at]) for at in parts[0]}
    if all(is_close(sums[at], right, first[0]) for at, (_, right) in first[0].match.pairs.items()):
        stages = " and ".join(str(place.stage) for place in first)
        return f"stages {stages} each have the gradient of their own use of it; sum these"
    return None


def _norm(comparison: Comparison, place: Place) -> tuple[str, ...]:
    """Name the parameters that the norm misses or repeats, by formula."""
    values = [float(part) for part in _parts(place).values()]
    right = float(next(iter(place.match.pairs.values()))[1])
    gradients = {p.key: p for p in comparison.places if p.key[:2] == (place.key.step, "gradient")}
    squares = {key: float(comparison.reference.tensors[key].double().square().sum()) for key in gradients}
    shown = ", ".join(f"{value:.6g}" for value in list(dict.fromkeys(values))[:4])
    head = f"it is {shown} in place of {right:.6g}"
    for axis, size in axes_of(comparison):
        copied = sum(squares[key] for key, p in gradients.items() if p.match.over(axis) == "copy")
        split = sum(squares.values()) - copied
        for square, verb, what in (
            (split + size * copied, "repeats", f"parameters that all {axis} ranks hold count {size} times"),
            (size * (split + copied), "repeats", f"every parameter counts {size} times"),
            (split, "misses", f"parameters that all {axis} ranks hold do not count"),
            (copied + split / size, "misses", f"the squares of parts are averaged over {axis}"),
        ):
            if all(math.isclose(value, math.sqrt(square), rel_tol=FIT) for value in values):
                return f"norm {verb} parameters", f"{head}: {what}"
    verb = "misses" if min(values) < right else "repeats"
    return (
        f"norm {verb} parameters",
        f"{head}; add the squares of each part of each parameter once, over tp, pp and shards",
    )


def _weights(comparison: Comparison, place: Place) -> tuple[str, ...]:
    wrong = [p for p in comparison.wrong if p.key[:2] == place.key[:2]]
    if axis := next(filter(None, map(unequal, wrong)), None):
        return (
            "replicas drift",
            f"the gradients are right, and the copies on {axis} ranks differ after the update; look at what "
            "else it reads on each rank (learning rate, moments, order of parameters)",
            _list(wrong),
        )
    return (
        "update depends on the layout",
        "the gradients are right, the update is not; look at the optimizer (its state, decay, which "
        "parameters it holds, updates that read a whole matrix) and at the clipping factor",
        _list(wrong),
    )
