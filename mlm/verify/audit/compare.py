"""The first place at which a layout parts from one process, in the order of computation."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mlm.util.errors import UserError
from mlm.verify.audit.parts import (
    SPLIT_AXES,
    Coordinates,
    Match,
    Parts,
    Placement,
    add_over,
    difference,
    fill,
    match,
    match_rows,
    placements,
)
from mlm.verify.audit.record import KINDS, Key, Record
from mlm.verify.audit.subject import Split
from mlm.verify.verdict import FLOOR, TOLERANCES

ROUNDING = 1e4
"""Gradients below this many tolerances of the largest hold rounding, of which Adam makes whole steps."""

Layout = Mapping[str, int]
Rank = tuple[int, ...]
"""Coordinates over AXES."""
Ranks = dict[Rank, Record]


@dataclass(frozen=True)
class Place:
    """A compared tensor."""

    key: Key
    match: Match
    largest: float
    """Largest magnitude of an element on one process, or a floor for tensors of rounding."""
    limit: float
    stage: int = 0

    @property
    def is_wrong(self) -> bool:
        """True if it is beyond the tolerance."""
        return not self.match.error <= self.limit * self.largest

    @property
    def relative(self) -> float:
        """The largest difference as a fraction of the largest element."""
        return self.match.error / self.largest if self.largest else math.inf


class Comparison:
    """Every tensor that both have, compared in the order of the reference's computation.

    Raises UserError if there is none.
    """

    def __init__(self, reference: Record, ranks: Ranks, layout: Layout) -> None:
        self.layout, self.reference, self.ranks = layout, reference, ranks
        self.places: list[Place] = []
        self.skipped: list[str] = []
        """What could not be compared, and why."""
        self.factors: dict[int, Mapping[Coordinates, float]] = {}
        """Of each step: the scale of replicas' gradients inside the model, which their reduction undoes."""
        formats = list(TOLERANCES)
        self.precision = max((r.precision for r in (reference, *ranks.values())), key=formats.index)
        self._rounding: dict[str, Tensor] = {}
        self._largest: dict[tuple[int, str], float] = {}
        self._calls = {id(record): _count_calls(record) for record in (reference, *ranks.values())}
        for key, tensor in reference.tensors.items():
            self._largest[key[:2]] = max(self._largest.get(key[:2], 0.0), magnitude(tensor))
        order = list(KINDS).index
        for key in sorted(reference.tensors, key=lambda key: (key.step, order(key.kind))):
            whole = reference.tensors[key]
            is_of_stage = layout["pp"] > 1 and not key.name  # the whole module is a stage
            for stage, parts in {} if is_of_stage else held(ranks, key).items():
                self._compare(key, whole, stage, parts)
        if not any(place.key.kind in ("output", "gradient") for place in self.places):
            raise UserError("no module or parameter of the layout has a name of one process; give names=")

    @property
    def wrong(self) -> list[Place]:
        """Places beyond the tolerance; the first is the first computed."""
        return [place for place in self.places if place.is_wrong]

    def before(self, place: Place) -> Place | None:
        """The place computed before one, of the same kind and step."""
        same = [p for p in self.places if p.key[:2] == place.key[:2]]
        index = same.index(place)
        return same[index - 1] if index else None

    def _compare(self, key: Key, whole: Tensor, stage: int, parts: Parts) -> None:
        record = next(record for rank, record in self.ranks.items() if rank[0] == stage)
        if self._calls[id(self.reference)][_call_of(key)] != self._calls[id(record)][_call_of(key)]:
            self._skip(f"{key.name} is called another number of times than on one process")
            return
        if key.kind == "weight":
            self.places.append(self._weight(key, whole, stage, parts))
            return
        tolerance = TOLERANCES[self.precision]
        limit = tolerance.gradient if key.step == 0 else tolerance.later
        largest = max(magnitude(whole), FLOOR * self._largest[key[:2]]) or 1.0
        found: Match | None
        if key.kind == "loss":
            found = self._loss(parts, whole, limit * largest)
        else:
            is_backward = key.kind == "backward"
            fits = is_backward and key.step not in self.factors
            factors = self.factors.get(key.step) if is_backward else None
            choices = self._choices(key, parts, whole)
            found = match(parts, whole, choices, limit * largest, factors=factors, fits_factors=fits)
            if fits and found is not None:
                self.factors[key.step] = found.factors
            is_right = found is not None and found.error <= limit * largest
            if (
                key.kind in ("output", "backward")
                and self.layout["tp"] * self.layout["cp"] == 1
                and not is_right
            ):
                rows = match_rows(parts, whole, factors or {})
                found = rows if rows is not None and rows.error <= limit * largest else found
        if found is None:
            shape = list(next(iter(parts.values())).shape)
            self._skip(f"{key.name}: {shape} is no part of {list(whole.shape)}")
        else:
            self.places.append(Place(key, found, largest, limit, stage))

    def _skip(self, why: str) -> None:
        if why not in self.skipped:
            self.skipped.append(why)

    def _choices(self, key: Key, parts: Parts, whole: Tensor) -> list[Placement]:
        """The placements that a tensor of this kind may have."""
        if key.kind in ("gradient", "initial"):
            return [placement_of(key.name, parts, whole, self.ranks, self.layout)]
        if not whole.ndim:
            return [{}]
        shape = next(iter(parts.values())).shape
        blocks = {1, *shape}
        for record in self.ranks.values():
            blocks |= {split.blocks for split in record.splits.get(f"{key.name}.weight") or ()}
        flat = {b for size in shape for b in range(1, size + 1) if size % b == 0}  # [S, B] as one dimension
        choices = {"dp": sorted(flat), "cp": sorted(blocks), "tp": sorted(blocks)}
        sums = ("cp", "tp") if key.name else ()
        if key.kind == "backward":  # of an output that is the same for all samples, such as positions
            sums = ("dp", *sums)
        return list(placements(parts, whole, self.layout, blocks=choices, sums=sums))

    def _loss(self, parts: Parts, whole: Tensor, bound: float) -> Match | None:
        """Compare the loss, of which replicas may each have their own: its mean or sum over them."""
        choices = list(placements(parts, whole, self.layout)) if whole.ndim else [{}]
        found = match(parts, whole, choices, bound)
        for is_mean in (True, False):
            if found is not None and found.error > bound:
                summed = add_over(add_over(parts, "cp"), "dp")
                count = self.layout["cp"] * self.layout["dp"] if is_mean else 1
                other = match({at: part / count for at, part in summed.items()}, whole, choices, bound)
                found = other if other is not None and other.error < found.error else found
        return found

    def _weight(self, key: Key, whole: Tensor, stage: int, parts: Parts) -> Place:
        """Compare weights in units of the largest that an element of them moved, but for ROUNDING."""
        limit = TOLERANCES[self.precision].weight
        moved = max(difference(whole, self.reference.tensors[Key(0, "initial", key.name)]), 1e-30)
        gradient = self.reference.tensors.get(Key(key.step, "gradient", key.name))
        if gradient is not None:
            tiny = gradient.abs() <= ROUNDING * TOLERANCES[self.precision].gradient * magnitude(gradient)
            self._rounding[key.name] = tiny | self._rounding.get(key.name, torch.zeros_like(tiny))
        placement = placement_of(key.name, parts, whole, self.ranks, self.layout)
        found = match(parts, whole, [placement], 0.0)
        assert found is not None
        if key.name in self._rounding:
            masks = match(parts, self._rounding[key.name].to(whole.dtype), [placement], 0.0)
            assert masks is not None
            pairs = {
                at: (torch.where(masks.pairs[at][1] > 0, right, part), right)
                for at, (part, right) in found.pairs.items()
            }
            found = Match(placement, pairs, max(difference(*pair) for pair in pairs.values()))
        return Place(key, found, moved, limit, stage)


def magnitude(tensor: Tensor) -> float:
    """Largest magnitude of an element."""
    return float(tensor.abs().amax()) if tensor.numel() else 0.0


def _call_of(key: Key) -> tuple[int, str, str, int]:
    return key.step, key.kind, key.name, key.item


def _count_calls(record: Record) -> Counter[tuple[int, str, str, int]]:
    return Counter(map(_call_of, record.tensors))


def held(ranks: Ranks, key: Key) -> dict[int, Parts]:
    """The parts of a tensor, by pipeline stage, on stages whose every rank has it."""
    stages: dict[int, Parts] = {}
    for (stage, *at), record in ranks.items():
        if key in record.tensors:
            stages.setdefault(stage, {})[tuple(at)] = record.tensors[key]
    return {s: p for s, p in stages.items() if len(p) == sum(rank[0] == s for rank in ranks)}


def placement_of(name: str, parts: Parts, whole: Tensor, ranks: Ranks, layout: Layout) -> Placement:
    """The placement of a parameter, as it says or by shapes. Raises UserError for none that fits."""
    splits = next(r.splits[name] for r in ranks.values() if name in r.splits)
    if splits is None:
        choices = list(placements(parts, whole, layout))
        by_tp = [c for c in choices if all(c[a] == "copy" for a in c if a != "tp")]
        if choices:
            return (by_tp or choices)[0]
    else:
        chosen: dict[str, Split | str] = {axis: "copy" for axis in SPLIT_AXES if layout[axis] > 1}
        chosen |= {split.axis: split for split in splits if layout[split.axis] > 1}
        blocks = {split.axis: (1, split.blocks) for split in splits}
        if chosen in list(placements(parts, whole, layout, blocks=blocks)):
            return chosen  # type: ignore[return-value]
    shape = list(next(iter(parts.values())).shape)
    raise UserError(
        f"parameter {name}: {shape} on each rank does not make {list(whole.shape)} on one process",
        fix="name its split in placements=",
    )


def assemble_weights(shapes: Mapping[str, Tensor], ranks: Ranks, layout: Layout) -> dict[str, Tensor]:
    """The layout's initial weights as those of one process. Raises UserError where names or shapes differ."""
    weights = {}
    for name, like in shapes.items():
        stages = held(ranks, Key(0, "initial", name))
        if not stages:
            own = sorted({n for record in ranks.values() for n in record.splits} - set(shapes))
            raise UserError(
                f"parameter {name} of one process is on no rank ({', '.join(own[:3]) or 'none'} are on ranks "
                "alone)",
                fix="map the names of ranks to those of one process with names=",
            )
        parts = next(iter(stages.values()))
        weights[name] = torch.empty(like.shape, dtype=like.dtype)
        fill(weights[name], parts, placement_of(name, parts, weights[name], ranks, layout))
    return weights
