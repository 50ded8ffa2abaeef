"""The first place at which a layout parts, and the likely cause: what reproduces the wrong numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from mlm.verify.audit.compare import Comparison, Location
from mlm.verify.audit.hypotheses import (
    explain_loss,
    explain_norm,
    explain_parts,
    explain_rounding,
    explain_update,
    values_of,
)
from mlm.verify.audit.parts import SPLIT_AXES, Coordinates, are_copies, difference, scale_of
from mlm.verify.audit.patterns import Pattern, cause_of, is_close, pattern
from mlm.verify.audit.record import KINDS, Split
from mlm.verify.audit.replay import explain_part_update, explain_replay

MOST_NAMES = 4
FORWARD = (
    "the forward pass differs; look at how weights are split (the order of the qkv rows), a sum over tp, "
    "positions (learned or rotary positions, of tp and cp ranks too), dropout masks, the order in which "
    "tokens come back from experts, the biases of routers, which move once a step, the capacity of experts, "
    "which is of a whole sequence, or which samples each replica reads"
)
"""Of a wrong loss where no output of a module was recorded."""
BACKWARD = (
    "{after} is right and {others}; look at what is done to the gradient of its layer's input (f, its sum "
    "over tp; its way to the stage before), of keys and values (its sum over cp), at a loss that a router "
    "adds (balance, z-loss), and at how gradients are kept and summed: over dp and cp, copies (norms, shared "
    "key-value heads) over tp, experts over the ranks that hold the same ones"
)
"""Of a wrong gradient there: the first in backward."""
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
            return Finding(rounded[2], "reduction", 1, 0.0, *rounded[:2])
        return _dropout(comparison)
    place = wrong[0]
    if place.key.kind == "gradient" and not _has_outputs(comparison):  # backward begins with the last
        place = [p for p in wrong if p.key[:2] == place.key[:2]][-1]
    functions = {
        "loss": _loss,
        "norm": _norm,
        "gradient": _gradients,
        "clipped": _clipped,
        "weight": _weights,
    }
    names: list[str]
    if not place.match.pairs:
        cause, sentence, *names = "lost", "no rank has it; look at how layers are distributed"
    elif not all(bool(part.isfinite().all()) for part in place.match.parts.values()):
        cause, sentence, *names = "not finite", "it is NaN or infinite, and a number on one process"
    elif rounded := explain_rounding(comparison, [p for p in wrong if p.key[:2] == place.key[:2]]):
        cause, sentence, *names = *rounded[:2], _list([p for p in wrong if p.key[:2] == place.key[:2]])
    else:
        cause, sentence, *names = functions.get(place.key.kind, _activation)(comparison, place)
    name = names[0] if names else place.key.name or "the whole module"
    return Finding(name, KINDS[place.key.kind], place.key.step + 1, place.relative, cause, sentence)


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
    axis, names = unequal(torn[0]), _list(torn)
    if axis is not None:
        cause = "weights depend on the rank"
        why = f"copies on {axis} ranks differ before the first step; draw them from one seed, or broadcast"
    else:
        cause = "shards begin equal"
        why = f"every {equal(torn[0])} rank begins with the same numbers; draw the whole, and slice it"
    return Finding(names, KINDS["initial"], 1, torn[0].relative, cause, why)


def _list(locations: Sequence[Location]) -> str:
    names = list(dict.fromkeys(place.key.name for place in locations))
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


def _activation(comparison: Comparison, place: Location) -> tuple[str, ...]:
    """The cause of a wrong output or gradient of an output."""
    kind, same = place.key.kind, [p for p in comparison.locations if p.key[:2] == place.key[:2]]
    before = next((p for p, following in pairwise(same) if following is place), None)
    name = before.key.name if before is not None else "the loss" if kind == "backward" else "what is"
    if kind == "output" and not place.key.name and (cause := _gathered(comparison, place)):
        return cause
    if (kind == "backward" or not place.key.name) and (cause := explain_loss(comparison, place.key.step)):
        return cause
    if kind == "output" and (cause := comparison.misread or explain_parts(comparison, place)):
        return cause
    found = None if place.match.sums else pattern(comparison, [place])
    if found is not None and (cause := cause_of(kind, found, name)):
        return cause
    if before is not None and before.match.sums:  # right as addends, and taken for the sum
        cause = cause_of(kind, Pattern("own", before.match.sums[0]))
        assert cause is not None
        return (*cause, name)
    if cause := explain_replay(comparison, place):
        return cause
    ranks = _wrong_ranks(place)
    stage = f" of stage {place.stage}" if comparison.layout["pp"] > 1 else ""
    where = f"{name} before it is right, it is wrong on {ranks or 'all ranks'}{stage}"
    return f"depends on the {'rank' if ranks else 'layout'}", f"{where}; {NEITHER}"


def _wrong_ranks(place: Location) -> str:
    """The ranks that differ, where others do not."""
    bound = place.limit * place.largest
    wrong = [at for at, pair in place.match.pairs.items() if not difference(*pair) <= bound]
    if len(wrong) == len(place.match.pairs):
        return ""
    axes = [axis for axis in place.match.placement if len({at[SPLIT_AXES.index(axis)] for at in wrong}) == 1]
    return " ".join(f"{axis} rank {wrong[0][SPLIT_AXES.index(axis)]}" for axis in axes) or "some ranks"


def _loss(comparison: Comparison, place: Location) -> tuple[str, ...]:
    head = values_of(place)
    if cause := _gathered(comparison, place) or explain_loss(comparison, place.key.step):
        return cause[0], f"{head}: {cause[1]}"
    gradients = [p for p in comparison.locations if p.key[:2] == (place.key.step, "gradient")]
    found = pattern(comparison, gradients) if any(p.is_wrong for p in gradients) else None
    if found is not None and found.name in ("times", "divided", "scaled"):
        return "wrong divisor", f"{head}, and all gradients are {found.factor} times those of one process"
    if not _has_outputs(comparison):
        return "forward pass", f"{head}: {FORWARD}"
    if (found := pattern(comparison, [place])) and found.name in ("times", "divided"):
        return "wrong divisor", f"{head}, {found.factor} times as much"
    if not any(p.is_wrong for p in gradients):
        return "reported loss", f"{head}, and all gradients are right: only what is reported is not"
    return "loss", f"{head}, and all outputs are right; {NEITHER}"


def _has_outputs(comparison: Comparison) -> bool:
    """True if outputs of modules were recorded, not only what a step ends with."""
    return any(place.key.kind == "output" for place in comparison.locations)


def _gathered(comparison: Comparison, place: Location) -> tuple[str, str] | None:
    """The cause of a loss, or losses of tokens, that is log(tp) too large."""
    tp, pairs = comparison.layout["tp"], place.match.pairs.values()
    if tp > 1 and all(is_close(part - ref, torch.full_like(ref, math.log(tp)), place) for part, ref in pairs):
        return (
            "gathered logits in a split loss",
            f"it is log({tp}) too large: a vocabulary-parallel loss received whole logits, and counts each "
            "on every tp rank; give it this rank's logits",
        )
    return None


def _gradients(comparison: Comparison, place: Location) -> tuple[str, ...]:
    step = [p for p in comparison.locations if p.key[:2] == place.key[:2] and p.match.pairs]
    wrong = [p for p in step if p.is_wrong]
    names = "all parameters" if len(wrong) == len(step) else _list(wrong)
    found = pattern(comparison, wrong)
    if found is not None and found.name != "weighed" and (cause := cause_of("gradient", found)):
        return (*cause, names)
    if cause := explain_loss(comparison, place.key.step) or (found and cause_of("gradient", found)):
        return (*cause, names)
    if not _has_outputs(comparison):
        return _along_the_model(comparison, step, wrong)
    return "wrong reduction", f"inside the model gradients are right but for a scale; {NEITHER}", names


def _along_the_model(
    comparison: Comparison, step: Sequence[Location], wrong: Sequence[Location]
) -> tuple[str, str]:
    """The cause of wrong gradients by whose they are: backward begins at the end of the model."""
    index = step.index(wrong[-1])
    after = step[index + 1].key.name if step[index + 1 :] else "the loss"
    if (found := pattern(comparison, wrong[-1:])) and (cause := cause_of("backward", found, after)):
        return cause
    others = "some before it are too" if len(wrong) <= index else "all before it are wrong"
    return "backward pass", BACKWARD.format(after=after, others=others)


def _norm(comparison: Comparison, place: Location) -> tuple[str, ...]:
    if cause := explain_norm(comparison, place):
        return cause
    return "norm", f"{values_of(place)}, the gradients are right; {NEITHER}"


def _clipped(comparison: Comparison, place: Location) -> tuple[str, ...]:
    """Gradients clipped by another norm than the one that `clip` returns, which is right."""
    wrong = [p for p in comparison.wrong if p.key[:2] == place.key[:2]]
    scales: dict[Coordinates, float] = {}
    for p in wrong:
        for at, (part, right) in p.match.pairs.items():
            scale = scales.setdefault((p.stage, *at), scale_of(part, right))
            if not is_close(part, scale * right, p):
                return (
                    "clipping",
                    f"the norm is right, the clipped gradients are not; {NEITHER}",
                    _list(wrong),
                )
    factors = ", ".join(dict.fromkeys(f"{scale:.6g}" for scale in scales.values()))
    why = (
        f"the norm that clip returns is right, and gradients of ranks are {factors} times what it makes them"
    )
    return "clipped by another norm", why, _list(wrong)


def _weights(comparison: Comparison, place: Location) -> tuple[str, ...]:
    wrong = [p for p in comparison.wrong if p.key[:2] == place.key[:2]]
    cause, why = (
        explain_update(comparison, wrong)
        or explain_part_update(comparison, wrong)
        or ("update depends on the layout", NEITHER)
    )
    if axis := next(filter(None, map(unequal, wrong)), None):
        cause, why = "replicas drift", f"copies on {axis} ranks differ ({cause}: {why})"
    return cause, f"the gradients are right, the update is not: {why}", _list(wrong)
