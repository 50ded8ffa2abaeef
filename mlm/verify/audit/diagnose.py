"""The first difference of a layout from one process, and its likely cause: a formula that reproduces it."""

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
"""Kind of a finding in dropout masks alone."""
UNEXPLAINED = "it is no sum, mean, multiple or order of what ranks have"
"""Note on a difference that no hypothesis reproduces."""


@dataclass(frozen=True)
class Finding:
    """First difference of a layout from one process, and its likely cause."""

    place: str
    """Module or parameters."""
    kind: str
    """Type of the tensor: output, gradient of the output …"""
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
        return UNEXPLAINED not in self.sentence

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
    """The first difference and its cause; None if there is none."""
    initial = comparison.of_kind(0, "initial")
    if initial := [x for x in initial if unequal_copies_axis(x) or equal_shards_axis(x)]:
        return _explain_initial(initial)
    if not (wrong := comparison.wrong_locations):
        if rounding := explain_rounding(comparison, ()):
            return Finding(rounding.place, "reduction", 1, 0.0, rounding.name, rounding.reason)
        return _explain_dropout(comparison)
    location = wrong[0]
    if location.key.kind == "gradient" and not _has_outputs(comparison):  # the last is computed first
        location = [other for other in wrong if other.key[:2] == location.key[:2]][-1]
    same_kind = [other for other in wrong if other.key[:2] == location.key[:2] and other.match.pairs]
    if not location.match.pairs:
        cause = Cause("lost", "no rank has it; look at how layers are distributed", location.key.name)
    elif not all(bool(part.isfinite().all()) for part in location.match.parts.values()):
        cause = Cause("not finite", "it is NaN or infinite, and a number on one process", location.key.name)
    else:
        explain = EXPLAINERS.get(location.key.kind, _explain_activation)
        cause = explain_rounding(comparison, same_kind) or explain(comparison, location, same_kind)
    name = location.key.name or "the whole module"
    if location.key.kind in ("gradient", "clipped", "weight"):
        compared = [x for x in comparison.of_kind(*location.key[:2]) if x.match.pairs]
        name = "all parameters" if len(same_kind) == len(compared) else _joined_names(same_kind)
    kind, step = KINDS[location.key.kind], location.key.step + 1
    return Finding(cause.place or name, kind, step, location.relative, cause.name, cause.reason)


def unequal_copies_axis(location: Location) -> str | None:
    """First axis along which copies differ."""
    for axis in SPLIT_AXES:
        for first, *rest in (group.values() for group in location.match.copies(axis)):
            if not all(torch.equal(first, copy) for copy in rest):
                return axis
    return None


def equal_shards_axis(location: Location) -> str | None:
    """First axis along which shards are equal, unless they are constant."""
    parts = location.match.parts
    if all(bool((part == part.flatten()[:1]).all()) for part in parts.values()):
        return None
    split = (axis for axis, sharding in location.match.placement.items() if isinstance(sharding, Split))
    return next((axis for axis in split if are_copies(parts, axis)), None)


def _explain_initial(locations: Sequence[Location]) -> Finding:
    """The finding on initial weights with unequal copies, or with equal shards."""
    axis = unequal_copies_axis(locations[0])
    if axis and (reason := _explain_grouping(locations[0], axis)):
        cause = "parts on other ranks"
    elif axis:
        cause = "weights depend on the rank"
        reason = f"copies on {axis} ranks differ before the first step; draw them from one seed, or broadcast"
    else:
        cause = "shards begin equal"
        axis = equal_shards_axis(locations[0])
        reason = f"every {axis} rank begins with the same numbers; draw the whole, and slice it"
    return Finding(_joined_names(locations), KINDS["initial"], 1, locations[0].relative, cause, reason)


def _explain_grouping(location: Location, axis: str) -> str:
    """Explain copies on the wrong ranks, where groups of equal parts have the right sizes; else empty."""
    number = SPLIT_AXES.index(axis)
    right, parts = list[list[int]](), dict[int, Tensor]()
    for group in location.match.copies(axis):
        ranks = {rank[number]: x for rank, x in group.items() if not any(rank[:number] + rank[number + 1 :])}
        right += [[*ranks]] if ranks else []
        parts |= ranks
    equal_ranks = [[m for m in sorted(parts) if torch.equal(parts[m], parts[n])] for n in sorted(parts)]
    wrong = [group for n, group in enumerate(equal_ranks) if group not in equal_ranks[:n]]
    if len(wrong) < 2 or sorted(map(len, wrong)) != sorted(map(len, right)):
        return ""
    actual, expected = (" and ".join(map(str, groups)) for groups in (wrong, right))
    return (
        f"{axis} ranks {actual} hold the same part each, where {expected} should; look at how the number of "
        "a part, of a key and value head say, follows from the rank: r // n, not r % n"
    )


def _joined_names(locations: Sequence[Location]) -> str:
    names = list(dict.fromkeys(location.key.name for location in locations))
    unlisted = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {unlisted} more" if unlisted > 0 else "")


def _explain_dropout(comparison: Comparison) -> Finding | None:
    """Masks that differ on copies of an input, or agree on different inputs."""
    for rank, record in comparison.ranks.items():
        axis = next((axis for axis, i in zip(SPLIT_AXES, rank[1:], strict=True) if i), "")
        first = comparison.ranks[(rank[0], *(0 for _ in SPLIT_AXES))]
        for (name, x, mask), (_, x0, mask0) in zip(record.masks, first.masks, strict=False):
            if axis and (x == x0) != (mask == mask0):
                reason = "hold copies of its input and drop other elements; seed its random stream alike"
                if x != x0:
                    reason = "hold other inputs and drop the same elements; seed its random stream by "
                    reason += f"{axis} rank"
                return Finding(name, MASK, 1, 1.0, "dropout streams", f"{axis} ranks {reason}")
    return None


def explain_rounding(comparison: Comparison, wrong: Sequence[Location]) -> Cause | None:
    """A 16-bit format of the layout alone that explains `wrong`."""
    reduced = {module for record in comparison.ranks.values() for module in record.reductions}
    for module, name in sorted(comparison.layout_formats, key=lambda item: item[0] not in reduced):
        is_close = all(location.match.error <= 8 * EPS[name] * location.unit for location in wrong)
        if EPS[name] > 1e-4 and is_close and (wrong or module in reduced):
            place, cause = module or "the whole module", "narrow format"
            reason = f"ranks compute in {name} in {place}, one process does not"
            if module in reduced:
                cause = "reduction in a narrow format"
                reason += "; reduce in the format of what is summed"
            return Cause(cause, reason, place)
    return None


def _explain_activation(comparison: Comparison, location: Location, _: Sequence[Location]) -> Cause:
    kind = location.key.kind
    pairs = pairwise(comparison.of_kind(*location.key[:2]))
    previous = next((x for x, following in pairs if following is location), None)
    boundary = "the loss" if kind == "backward" else "what is"
    name = (previous.key.name or "the whole module") if previous is not None else boundary
    sample_cause = comparison.sample_causes.get(location.key.step)
    cause = (_explain_gathered_logits(comparison, location) or sample_cause) if kind == "output" else None
    if kind == "backward":
        swap_cause = comparison.swap_causes.get(location.key)
        cause = swap_cause or _explain_all_gradients(comparison, location.key.step)
    cause = cause or comparison.operation_cause
    if cause is None and not location.match.sums:
        cause = cause_of(kind, pattern(comparison, [location]), name)
    if cause is not None:
        return cause
    bound = location.limit * location.unit
    wrong_ranks = [rank for rank, pair in location.match.pairs.items() if not difference(*pair) <= bound]
    placement = location.match.placement
    coordinates = {axis: {rank[SPLIT_AXES.index(axis)] for rank in wrong_ranks} for axis in placement}
    cause_name, ranks = "depends on the layout", "all ranks"
    if len(wrong_ranks) < len(location.match.pairs):
        names = [f"{axis} rank {min(n)}" for axis, n in coordinates.items() if len(n) == 1]
        cause_name, ranks = "depends on the rank", " ".join(names) or "some ranks"
    stage = f" of stage {location.stage}" if comparison.layout["pp"] > 1 else ""
    return Cause(cause_name, f"{name} before it is right, it is wrong on {ranks}{stage}; {UNEXPLAINED}")


def _explain_all_gradients(comparison: Comparison, step: int) -> Cause | None:
    """The cause of a factor common to all gradients of parameters, as of a wrong divisor of the loss."""
    gradients = comparison.of_kind(step, "gradient")
    common = pattern(comparison, gradients) if gradients and any(p.is_wrong for p in gradients) else None
    if common is None or common.name in ("addend", "mean", "permuted"):
        return None
    if common.name in ("times", "divided", "scaled"):
        return Cause("wrong divisor", f"all gradients are {common.factor} times those of one process")
    return cause_of("gradient", common)


def _explain_gathered_logits(comparison: Comparison, location: Location) -> Cause | None:
    """The cause of losses that are log(tp) too large."""
    tp, pairs = comparison.layout["tp"], location.match.pairs.values()
    is_loss = location.key.kind in ("loss", "scalar") or not location.key.name
    if not is_loss or tp == 1:
        return None
    if not all(is_close(x - y, torch.full_like(y, math.log(tp)), location) for x, y in pairs):
        return None
    reason = f"it is log({tp}) too large: a vocabulary-parallel loss reads whole logits; give it this rank's"
    return Cause("gathered logits in a split loss", reason)


def _with_values(location: Location, cause: Cause) -> Cause:
    """Prepend the means of actual and expected values."""
    means = dict.fromkeys(f"{float(part.double().mean()):.10g}" for part in location.match.parts.values())
    expected = float(next(iter(location.match.pairs.values()))[1].double().mean())
    prefix = f"it is {', '.join(list(means)[:4])} in place of {expected:.10g}"
    return cause._replace(reason=f"{prefix}: {cause.reason}")


def _explain_loss(comparison: Comparison, location: Location, _: Sequence[Location]) -> Cause:
    gradients = comparison.of_kind(location.key.step, "gradient")
    gathered = _explain_gathered_logits(comparison, location)
    cause = gathered or _explain_all_gradients(comparison, location.key.step)
    if cause is None and not _has_outputs(comparison):
        reason = (
            "look at sums over tp and cp, the order of qkv rows, positions, dropout masks, routers and their "
            "capacity, and which samples each replica reads"
        )
        cause = Cause("forward pass", reason)
    cause = cause or _explain_factor(comparison, location)
    cause = cause or comparison.sample_causes.get(location.key.step) or comparison.operation_cause
    if cause is None and not any(p.is_wrong for p in gradients):
        cause = Cause("reported loss", "all gradients are right: only what is reported is not")
    scalars = [x for x in comparison.of_kind(location.key.step, "scalar") if x.is_wrong]
    suffix = f" but a scalar of {_joined_names(scalars)}" if scalars else ""
    unknown = Cause("loss", f"no output that is compared is wrong{suffix}; {UNEXPLAINED}")
    return _with_values(location, cause or unknown)


def _explain_scalar(comparison: Comparison, location: Location, _: Sequence[Location]) -> Cause:
    cause = comparison.sample_causes.get(location.key.step) or comparison.operation_cause
    cause = cause or _explain_factor(comparison, location)
    return _with_values(location, cause or Cause("scalar", f"all outputs are right; {UNEXPLAINED}"))


def _explain_factor(comparison: Comparison, location: Location) -> Cause | None:
    """The cause of a loss or scalar that is a multiple of the expected one."""
    factor_pattern = pattern(comparison, [location])
    if factor_pattern is None or factor_pattern.name not in ("times", "divided"):
        return None
    return Cause("wrong divisor", f"it is {factor_pattern.factor} times as much")


def _has_outputs(comparison: Comparison) -> bool:
    """False in parity, which records no outputs of modules."""
    return any(location.key.kind == "output" for location in comparison.locations)


def _explain_gradients(comparison: Comparison, location: Location, wrong: Sequence[Location]) -> Cause:
    if cause := cause_of("gradient", pattern(comparison, wrong)):
        return cause
    if _has_outputs(comparison):
        name, state = "wrong reduction", "are right but for a scale"
        if not comparison.of_kind(location.key.step, "backward"):
            name, state = "wrong gradients", "are not compared"
        reason = f"inside the model gradients {state}; {UNEXPLAINED}"
        return comparison.operation_cause or Cause(name, reason)
    # the place is between a right and a wrong gradient: backward begins at the end of the model
    same_kind = [x for x in comparison.of_kind(*location.key[:2]) if x.match.pairs]
    index = same_kind.index(wrong[-1])
    following = same_kind[index + 1].key.name if same_kind[index + 1 :] else "the loss"
    if cause := cause_of("backward", pattern(comparison, wrong[-1:]), following):
        return cause._replace(place=location.key.name)
    scope = "some before it are too" if len(wrong) <= index else "all before it are wrong"
    reason = (
        f"{following} is right and {scope}; "
        "look at what is done to the gradient of its layer's input over tp, of keys and values over cp, "
        "at losses that routers add, and at the ranks over dp whose gradients are summed"
    )
    return Cause("backward pass", reason, location.key.name)


def _explain_norm(comparison: Comparison, location: Location, _: Sequence[Location]) -> Cause:
    cause = explain_norm(comparison, location)
    return _with_values(location, cause or Cause("norm", f"the gradients are right; {UNEXPLAINED}"))


def _explain_clipped(_: Comparison, __: Location, wrong: Sequence[Location]) -> Cause:
    """The cause of gradients clipped by another norm than `clip` returns, which is right."""
    scales: dict[Coordinates, float] = {}
    for location in wrong:
        for rank, (part, expected) in location.match.pairs.items():
            scale = scales.setdefault((location.stage, *rank), scale_of(part, expected))
            if not is_close(part, scale * expected, location):
                return Cause("clipping", f"the norm is right, the clipped gradients are not; {UNEXPLAINED}")
    factors = ", ".join(dict.fromkeys(f"{scale:.6g}" for scale in scales.values()))
    reason = f"the norm that clip returns is right, gradients of ranks are {factors} times what it makes them"
    return Cause("clipped by another norm", reason)


def _explain_weights(comparison: Comparison, location: Location, wrong: Sequence[Location]) -> Cause:
    cause = explain_update(comparison, wrong)
    name, reason, _ = (
        cause or comparison.operation_cause or Cause("update depends on the layout", UNEXPLAINED)
    )
    if axis := next(filter(None, map(unequal_copies_axis, wrong)), None):
        name, reason = "replicas drift", f"copies on {axis} ranks differ ({name}: {reason})"
    return Cause(name, f"the gradients are right, the update is not: {reason}")


EXPLAINERS: dict[str, Callable[[Comparison, Location, Sequence[Location]], Cause]] = {
    "scalar": _explain_scalar,
    "loss": _explain_loss,
    "gradient": _explain_gradients,
    "norm": _explain_norm,
    "clipped": _explain_clipped,
    "weight": _explain_weights,
}
"""By type of tensor; `_explain_activation` for outputs and their gradients."""
