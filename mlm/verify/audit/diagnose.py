"""The first place at which a layout parts, and the likely cause: what reproduces the wrong numbers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from mlm.verify.audit.compare import Comparison, Location
from mlm.verify.audit.formats import EPS
from mlm.verify.audit.hypotheses import explain_norm, explain_update
from mlm.verify.audit.parts import SPLIT_AXES, Coordinates, are_copies, difference, scale_of
from mlm.verify.audit.patterns import cause_of, is_close, pattern
from mlm.verify.audit.record import KINDS, Cause, Split

MOST_NAMES = 4
MASK = "dropout mask"
"""What parts where masks do, and no number without dropout."""
NEITHER = "it is no sum, mean, multiple or order of what ranks have"
"""Of a difference that no hypothesis reproduces."""


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

    @property
    def is_explained(self) -> bool:
        """True if a hypothesis reproduces the wrong numbers."""
        return NEITHER not in self.sentence

    def with_note(self, note: str) -> "Finding":
        return replace(self, sentence=f"{self.sentence}; {note}")

    @property
    def where(self) -> str:
        """`2.norm (gradient of the output, step 1, off by 0.46 of its largest element)`."""
        of = "what it moved" if self.kind == KINDS["weight"] else "its largest element"
        is_spoken = self.size not in (0.0, 1.0, math.inf) and self.kind != KINDS["loss"]
        size = f", off by {self.size:.2g} of {of}" if is_spoken else ""
        kind = "" if self.place in KINDS else f"{self.kind}, "
        return f"{self.place} ({kind}step {self.step}{size})"


def diagnose(comparison: Comparison) -> Finding | None:
    """The finding at the first place where the layout parts; None where it does not."""
    initial = [place for place in comparison.locations if place.key.kind == "initial"]
    if torn := [place for place in initial if unequal(place) or equal(place)]:
        return _torn(torn)
    if not (wrong := comparison.wrong):
        if rounded := explain_rounding(comparison, ()):
            return Finding(rounded.place, "reduction", 1, 0.0, rounded.name, rounded.why)
        return _dropout(comparison)
    place = wrong[0]
    if place.key.kind == "gradient" and not _has_outputs(comparison):  # backward begins with the last
        place = [p for p in wrong if p.key[:2] == place.key[:2]][-1]
    alike = [p for p in wrong if p.key[:2] == place.key[:2] and p.match.pairs]
    if not place.match.pairs:
        cause = Cause("lost", "no rank has it; look at how layers are distributed", place.key.name)
    elif not all(bool(part.isfinite().all()) for part in place.match.parts.values()):
        cause = Cause("not finite", "it is NaN or infinite, and a number on one process", place.key.name)
    else:
        explain = EXPLAINERS.get(place.key.kind, _explain_activation)
        cause = explain_rounding(comparison, alike) or explain(comparison, place, alike)
    name = place.key.name or "the whole module"
    if place.key.kind in ("gradient", "clipped", "weight"):
        every = [p for p in comparison.locations if p.key[:2] == place.key[:2] and p.match.pairs]
        name = "all parameters" if len(alike) == len(every) else _list(alike)
    kind, step = KINDS[place.key.kind], place.key.step + 1
    return Finding(cause.place or name, kind, step, place.relative, cause.name, cause.why)


def unequal(place: Location) -> str | None:
    """An axis whose ranks hold copies that differ."""
    for axis in SPLIT_AXES:
        for first, *rest in (group.values() for group in place.match.copies(axis)):
            if not all(torch.equal(first, copy) for copy in rest):
                return axis
    return None


def equal(place: Location) -> str | None:
    """An axis whose ranks hold parts that are equal, and not constant."""
    parts = place.match.parts
    if all(bool((part == part.flatten()[:1]).all()) for part in parts.values()):
        return None
    split = (axis for axis, how in place.match.placement.items() if isinstance(how, Split))
    return next((axis for axis in split if are_copies(parts, axis)), None)


def _torn(torn: Sequence[Location]) -> Finding:
    """Initial weights that differ between copies, or are equal between parts."""
    axis = unequal(torn[0])
    if axis and (why := _regrouped(torn[0], axis)):
        cause = "parts on other ranks"
    elif axis:
        cause = "weights depend on the rank"
        why = f"copies on {axis} ranks differ before the first step; draw them from one seed, or broadcast"
    else:
        cause = "shards begin equal"
        why = f"every {equal(torn[0])} rank begins with the same numbers; draw the whole, and slice it"
    return Finding(_list(torn), KINDS["initial"], 1, torn[0].relative, cause, why)


def _regrouped(place: Location, axis: str) -> str:
    """Return the groups of ranks with equal parts beside the right ones; empty if their sizes differ."""
    number = SPLIT_AXES.index(axis)
    right, parts = list[list[int]](), dict[int, Tensor]()
    for group in place.match.copies(axis):
        ranks = {at[number]: x for at, x in group.items() if not any(at[:number] + at[number + 1 :])}
        right += [[*ranks]] if ranks else []
        parts |= ranks
    alike = [[m for m in sorted(parts) if torch.equal(parts[m], parts[n])] for n in sorted(parts)]
    held = [group for n, group in enumerate(alike) if group not in alike[:n]]
    if len(held) < 2 or sorted(map(len, held)) != sorted(map(len, right)):
        return ""
    has, should = (" and ".join(str(group) for group in groups) for groups in (held, right))
    return (
        f"{axis} ranks {has} hold the same part each, where {should} should; look at how the number of a "
        "part, of a key and value head say, follows from the rank: r // n, not r % n"
    )


def _list(places: Sequence[Location]) -> str:
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
                return Finding(name, MASK, 1, 1.0, "dropout streams", why)
    return None


def explain_rounding(comparison: Comparison, wrong: Sequence[Location]) -> Cause | None:
    """A 16-bit format of the layout alone that explains `wrong`, with its place."""
    reduced = {at: name for record in comparison.ranks.values() for at, name in record.reductions.items()}
    for at, name in sorted(comparison.layout_formats, key=lambda each: each[0] not in reduced):
        is_close = all(place.match.error <= 8 * EPS[name] * place.largest for place in wrong)
        if EPS[name] > 1e-4 and is_close and (wrong or at in reduced):
            where, cause = at or "the whole module", "narrow format"
            why = f"ranks compute in {name} in {where}, one process does not"
            if at in reduced:
                cause, why = "reduction in a narrow format", f"{why}; reduce in the format of what is summed"
            return Cause(cause, why, where)
    return None


def _explain_activation(comparison: Comparison, place: Location, _: Sequence[Location]) -> Cause:
    """The cause of a wrong output or gradient of an output."""
    kind, same = place.key.kind, [p for p in comparison.locations if p.key[:2] == place.key[:2]]
    before = next((p for p, following in pairwise(same) if following is place), None)
    first = "the loss" if kind == "backward" else "what is"
    name = (before.key.name or "the whole module") if before is not None else first
    misread = comparison.misread.get(place.key.step)
    cause = (_gathered(comparison, place) or misread) if kind == "output" else None
    if kind == "backward":
        cause = comparison.swapped.get(place.key) or _of_all_gradients(comparison, place.key.step)
    cause = cause or comparison.operation
    if cause is None and not place.match.sums:
        cause = cause_of(kind, pattern(comparison, [place]), name)
    if cause is not None:
        return cause
    bound = place.limit * place.largest
    wrong = [at for at, pair in place.match.pairs.items() if not difference(*pair) <= bound]
    numbers = {axis: {at[SPLIT_AXES.index(axis)] for at in wrong} for axis in place.match.placement}
    ranks = " ".join(f"{axis} rank {min(n)}" for axis, n in numbers.items() if len(n) == 1) or "some ranks"
    ranks = ranks if len(wrong) < len(place.match.pairs) else ""
    stage = f" of stage {place.stage}" if comparison.layout["pp"] > 1 else ""
    where = f"{name} before it is right, it is wrong on {ranks or 'all ranks'}{stage}"
    return Cause(f"depends on the {'rank' if ranks else 'layout'}", f"{where}; {NEITHER}")


def _of_all_gradients(comparison: Comparison, step: int) -> Cause | None:
    """The cause of factors by which all gradients of parameters are wrong: a divisor of the loss, say."""
    gradients = [p for p in comparison.locations if p.key[:2] == (step, "gradient")]
    found = pattern(comparison, gradients) if gradients and any(p.is_wrong for p in gradients) else None
    if found is None or found.name in ("own", "mean", "permuted"):
        return None
    if found.name in ("times", "divided", "scaled"):
        return Cause("wrong divisor", f"all gradients are {found.factor} times those of one process")
    return cause_of("gradient", found)


def _gathered(comparison: Comparison, place: Location) -> Cause | None:
    """The cause of a loss, or losses of tokens, that is log(tp) too large."""
    tp, pairs = comparison.layout["tp"], place.match.pairs.values()
    is_loss = place.key.kind in ("loss", "scalar") or not place.key.name
    if is_loss and tp > 1 and all(is_close(x - y, torch.full_like(y, math.log(tp)), place) for x, y in pairs):
        why = f"it is log({tp}) too large: a vocabulary-parallel loss reads whole logits; give it this rank's"
        return Cause("gathered logits in a split loss", why)
    return None


def _values(place: Location, cause: Cause) -> Cause:
    """The cause, after means of what ranks have and the right one."""
    values = dict.fromkeys(f"{float(part.double().mean()):.10g}" for part in place.match.parts.values())
    right = float(next(iter(place.match.pairs.values()))[1].double().mean())
    head = f"it is {', '.join(list(values)[:4])} in place of {right:.10g}"
    return cause._replace(why=f"{head}: {cause.why}")


def _explain_loss(comparison: Comparison, place: Location, _: Sequence[Location]) -> Cause:
    gradients = [p for p in comparison.locations if p.key[:2] == (place.key.step, "gradient")]
    cause = _gathered(comparison, place) or _of_all_gradients(comparison, place.key.step)
    if cause is None and not _has_outputs(comparison):
        why = (
            "look at sums over tp and cp, the order of qkv rows, positions, dropout masks, routers and their "
            "capacity, and which samples each replica reads"
        )
        cause = Cause("forward pass", why)
    if cause is None and (found := pattern(comparison, [place])) and found.name in ("times", "divided"):
        cause = Cause("wrong divisor", f"it is {found.factor} times as much")
    cause = cause or comparison.misread.get(place.key.step) or comparison.operation
    if cause is None and not any(p.is_wrong for p in gradients):
        cause = Cause("reported loss", "all gradients are right: only what is reported is not")
    scalars = [p for p in comparison.locations if p.is_wrong and p.key[:2] == (place.key.step, "scalar")]
    also = f" but a scalar of {_list(scalars)}" if scalars else ""
    return _values(place, cause or Cause("loss", f"no output that is compared is wrong{also}; {NEITHER}"))


def _explain_scalar(comparison: Comparison, place: Location, _: Sequence[Location]) -> Cause:
    cause = comparison.misread.get(place.key.step) or comparison.operation
    if cause is None and (found := pattern(comparison, [place])) and found.name in ("times", "divided"):
        cause = Cause("wrong divisor", f"it is {found.factor} times as much")
    return _values(place, cause or Cause("scalar", f"all outputs are right; {NEITHER}"))


def _has_outputs(comparison: Comparison) -> bool:
    """True if outputs of modules were recorded, not only what a step ends with."""
    return any(place.key.kind == "output" for place in comparison.locations)


def _explain_gradients(comparison: Comparison, place: Location, wrong: Sequence[Location]) -> Cause:
    if cause := cause_of("gradient", pattern(comparison, wrong)):
        return cause
    if _has_outputs(comparison):
        why = f"inside the model gradients are right but for a scale; {NEITHER}"
        return comparison.operation or Cause("wrong reduction", why)
    # by whose gradients are wrong: backward begins at the end of the model
    step = [p for p in comparison.locations if p.key[:2] == place.key[:2] and p.match.pairs]
    index = step.index(wrong[-1])
    after = step[index + 1].key.name if step[index + 1 :] else "the loss"
    if cause := cause_of("backward", pattern(comparison, wrong[-1:]), after):
        return cause._replace(place=place.key.name)
    others = "some before it are too" if len(wrong) <= index else "all before it are wrong"
    why = (
        f"{after} is right and {others}; look at what is done to the gradient of its layer's input over tp, "
        "of keys and values over cp, at losses that routers add, and at the ranks over dp whose gradients "
        "are summed"
    )
    return Cause("backward pass", why, place.key.name)


def _explain_norm(comparison: Comparison, place: Location, _: Sequence[Location]) -> Cause:
    cause = explain_norm(comparison, place)
    return _values(place, cause or Cause("norm", f"the gradients are right; {NEITHER}"))


def _explain_clipped(comparison: Comparison, place: Location, wrong: Sequence[Location]) -> Cause:
    """Gradients clipped by another norm than the one that `clip` returns, which is right."""
    scales: dict[Coordinates, float] = {}
    for p in wrong:
        for at, (part, right) in p.match.pairs.items():
            scale = scales.setdefault((p.stage, *at), scale_of(part, right))
            if not is_close(part, scale * right, p):
                return Cause("clipping", f"the norm is right, the clipped gradients are not; {NEITHER}")
    factors = ", ".join(dict.fromkeys(f"{scale:.6g}" for scale in scales.values()))
    why = f"the norm that clip returns is right, gradients of ranks are {factors} times what it makes them"
    return Cause("clipped by another norm", why)


def _explain_weights(comparison: Comparison, place: Location, wrong: Sequence[Location]) -> Cause:
    cause = explain_update(comparison, wrong)
    name, why, _ = cause or comparison.operation or Cause("update depends on the layout", NEITHER)
    if axis := next(filter(None, map(unequal, wrong)), None):
        name, why = "replicas drift", f"copies on {axis} ranks differ ({name}: {why})"
    return Cause(name, f"the gradients are right, the update is not: {why}")


EXPLAINERS: dict[str, Callable[[Comparison, Location, Sequence[Location]], Cause]] = {
    "scalar": _explain_scalar,
    "loss": _explain_loss,
    "gradient": _explain_gradients,
    "norm": _explain_norm,
    "clipped": _explain_clipped,
    "weight": _explain_weights,
}
"""By type of tensor; outputs and their gradients have the other one."""
