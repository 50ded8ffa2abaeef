"""The first place at which a layout parts from one process, in the order of computation."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, combinations
from types import MappingProxyType

import torch
from torch import Tensor

from mlm.util.errors import UserError
from mlm.verify.audit.formats import EPS
from mlm.verify.audit.parts import (
    SPLIT_AXES,
    How,
    Match,
    Parts,
    Placement,
    add_over,
    are_copies,
    difference,
    fill,
    match,
    match_at,
    match_offsets,
    match_rows,
    placements,
)
from mlm.verify.audit.record import KINDS, REACHED, Cause, Key, Record
from mlm.verify.verdict import FLOOR, TOLERANCES

ROUNDING = 1e-10
"""Fraction of a model's largest gradient below which an element of one holds rounding in float64. Keys'
biases are such: softmax cancels them, so that their true gradient is zero."""
SPREADS = 3.0
"""Differences between one process and its runs with other rounding that a layout may differ by."""
LAYOUT_ONLY = 64 * EPS["fp32"]
"""Rounding of a tensor where a layout alone computes in float32, as buckets of gradients do."""

UNMOVED = 1e-30
"""Unit of weights of which none moves on one process."""

Layout = Mapping[str, int]
Ranks = dict[tuple[int, ...], Record]
"""Records by coordinates over AXES."""


@dataclass(frozen=True, eq=False)
class Location:
    """A compared tensor."""

    key: Key
    match: Match
    largest: float
    """Largest magnitude of an element on one process, or a floor for tensors of rounding."""
    limit: float
    stage: int = 0

    @property
    def is_wrong(self) -> bool:
        return not self.match.error <= self.limit * self.largest

    @property
    def relative(self) -> float:
        return self.match.error / self.largest if self.largest else math.inf if self.match.error else 0.0


class Comparison:
    """Every tensor that both have, compared in the order of the reference's computation.

    `spreads` say how far runs of one process whose narrow formats round otherwise are apart: a tensor's
    tolerance, and without narrow formats it is that of float64.
    Of our trainer, `lr_sum` is the unit of weights: its learning rates added up; `eps` is the optimizer's.
    Its loss is the global batch's on every rank, which others' need not be, and tolerances are its format's.
    Raises UserError where names do not match.
    """

    def __init__(
        self,
        reference: Record,
        ranks: Ranks,
        layout: Layout,
        *,
        spreads: Mapping[tuple[int, str, str, int], float] = MappingProxyType({}),
        lr_sum: float | None = None,
        eps: float = 0.0,
    ) -> None:
        self.layout, self.reference, self.ranks, self.spreads = layout, reference, ranks, spreads
        self.lr_sum, self.eps = lr_sum, eps
        self.replicas = layout["dp"] * layout["cp"]
        self.operation: Cause | None = None
        """The cause of an output that is wrong by an operation."""
        self.misread: Mapping[int, Cause] = {}
        """By step, the cause of samples that are not those of one process."""
        self.swapped: Mapping[Key, Cause] = {}
        """The cause of gradients of outputs that are those of other micro-batches."""
        self.locations: list[Location] = []
        self.skipped: list[str] = []
        """What could not be compared, and why, for each step."""
        formats = list(TOLERANCES)
        self.precision = max((r.precision for r in (reference, *ranks.values())), key=formats.index)
        self.layout_formats = {
            (place, name)
            for record in ranks.values()
            for place, name in record.formats.items()
            if formats.index(name) > formats.index(reference.formats.get(place, "fp64"))
        }
        """Places at which ranks compute in a narrower format than one process, and that."""
        self._largest: dict[tuple[int, str], float] = {}
        self._calls = {id(r): Counter(map(whose, r.tensors)) for r in (reference, *ranks.values())}
        for key, tensor in reference.tensors.items():
            size = self._moved(key) if key.kind == "weight" else magnitude(tensor)
            self._largest[key[:2]] = max(self._largest.get(key[:2], 0.0), size)
        order = list(KINDS).index
        compared = (key for key in reference.tensors if key.kind in KINDS)
        for key in sorted(compared, key=lambda key: (key.step, order(key.kind))):
            whole = reference.tensors[key]
            is_own = key.kind == "loss" and lr_sum is None and self.replicas > 1
            is_of_stage = layout["pp"] > 1 and not key.name  # the whole module is a stage
            stages = {} if is_of_stage else held(ranks, key)
            for stage, parts in stages.items():
                self._compare(key, whole, stage, combine_losses(parts, whole) if is_own else parts)
            if not stages and key.name in reference.offsets:
                self.locations.append(Location(key, Match({}, {}, is_complete=False), 1.0, 0.0))
        if not any(place.key.kind in ("output", "gradient", "weight") for place in self.locations):
            raise UserError("no module or parameter of the layout has a name of one process; give names=")
        gradients = (p for p in self.locations if p.key.kind == "gradient")
        self.split = {p.key.name for p in gradients if {*p.match.placement.values()} - {"copy"}}
        """Parameters that are split on ranks, or in a larger layout."""

    @property
    def blind(self) -> str:
        """The first place that has no finite numbers on one process either, in words; empty without any."""
        for place in self.locations:
            pairs = list(place.match.pairs.values())
            if place.is_wrong or place.key.kind in ("loss", "norm"):
                if any(all(bool((~x.isfinite()).any()) for x in pair) for pair in pairs):
                    return place.key.words
                if place.is_wrong:
                    break
        return ""

    @property
    def wrong(self) -> list[Location]:
        """Places beyond the tolerance; the first is the first computed.

        Scalars that modules return count if the loss depends on them, and it or a gradient is wrong.
        """
        places = [place for place in self.locations if place.is_wrong]
        ends = {p.key.step for p in places if p.key.kind in ("loss", "backward", "gradient")}
        reached = {key._replace(kind="scalar") for key in self.reference.tensors if key.kind == REACHED}
        return [p for p in places if p.key.kind != "scalar" or (p.key.step in ends and p.key in reached)]

    def _moved(self, key: Key) -> float:
        """Largest change of an element of the reference's weight since the start."""
        begin = self.reference.tensors.get(Key(0, "initial", key.name))
        return 0.0 if begin is None else difference(self.reference.tensors[key], begin)

    @property
    def rounding(self) -> str:
        """A sentence on formats narrower than float64 and the errors that they hide; empty without any."""
        formats = self.reference.formats | dict(self.layout_formats)
        if not formats:
            return ""
        places = list(dict.fromkeys(place or "the whole module" for place in formats))
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        limits: dict[str, float] = {}
        for kind in (kind for kind in KINDS if kind != "initial"):
            for place in (p for p in self.locations if p.key.kind == kind and p.largest > UNMOVED):
                limits[kind] = max(place.limit, limits.get(kind, 0.0))
        bounds = ", ".join(f"{limit:.1g} of the {KINDS[kind]}" for kind, limit in limits.items())
        return f"{self.precision} in {', '.join(places[:3])}{more}, which hides errors below {bounds}"

    def _unit_and_limit(self, key: Key, whole: Tensor) -> tuple[float, float]:
        """The size in which a difference is measured, and the tolerance in it."""
        is_ours = self.lr_sum is not None
        tolerance = TOLERANCES[self.precision if is_ours else "fp64"]
        size, floor = magnitude(whole), FLOOR * self._largest[key[:2]]
        unit, limit = max(size, floor) or 1.0, tolerance.gradient if key.step == 0 else tolerance.later
        if key.kind in ("loss", "scalar"):
            unit, limit = 1.0 if is_ours else max(size, 1.0), tolerance.loss  # nats a token
        elif key.kind == "norm":
            unit, limit = size, tolerance.norm
        elif key.kind == "weight":
            unit = max(self._moved(key), floor, UNMOVED) if self.lr_sum is None else self.lr_sum
            limit = tolerance.weight
        if is_ours or not unit:
            return unit, limit
        rounding = SPREADS * self.spreads.get(whose(key), 0.0)
        if self.layout_formats:
            rounding = max(rounding, LAYOUT_ONLY * size)
        if key.kind == "weight" and (own := self.reference.formats.get(key.name)):
            rounding = max(rounding, EPS[own] * size)  # an element may round the other way
        return unit, max(limit, rounding / unit)

    def _compare(self, key: Key, whole: Tensor, stage: int, parts: Parts) -> None:
        unit, limit = self._unit_and_limit(key, whole)
        if key.kind in ("initial", "gradient", "clipped", "weight"):
            own = self._parameter(key, whole, stage, parts)
            self.locations.append(Location(key, own, unit, limit, stage))
            return
        record = next(record for rank, record in self.ranks.items() if rank[0] == stage)
        if self._calls[id(self.reference)][whose(key)] != self._calls[id(record)][whose(key)]:
            self.skipped.append(f"{key.name} is called another number of times than on one process")
        elif key.kind == "scalar":
            if bool(whole.isfinite().all()) and not self._is_loss(key, whole):
                nearest = min(combined(parts), key=lambda own: difference(clamped(own, whole), whole))
                is_right = difference(clamped(nearest, whole), whole) <= limit * unit
                own = match_at({}, dict.fromkeys(parts, whole) if is_right else nearest, whole)
                self.locations.append(Location(key, own, unit, limit, stage))
        elif (found := self._activation(key, parts, whole, limit * unit)) is None:
            shape = list(next(iter(parts.values())).shape)
            self.skipped.append(f"{key.name}: {shape} is no part of {list(whole.shape)}")
        else:
            self.locations.append(Location(key, found, unit, limit, stage))

    def _is_loss(self, key: Key, values: Tensor) -> bool:
        """True for a scalar that is the loss of a step, or of its micro-batches."""
        loss = self.reference.tensors.get(Key(key.step, "loss", "loss"))
        totals = (values.sum(), values.double().mean())
        return loss is not None and any(difference(x, loss) <= ROUNDING * magnitude(loss) for x in totals)

    def _activation(self, key: Key, parts: Parts, whole: Tensor, bound: float) -> Match | None:
        """Compare an output, its gradient, the loss or the norm, at the placement that fits best."""
        choices: Iterable[Placement] = [{}]
        if whole.numel() != 1:
            shape = next(iter(parts.values())).shape
            blocks = {1, *shape}
            for record in self.ranks.values():
                blocks |= {split.blocks for split in record.splits.get(f"{key.name}.weight") or ()}
            flat = {
                b for size in shape for b in range(1, size + 1) if size % b == 0
            }  # [S, B] as one dimension
            by_axis = {"dp": sorted(flat), "cp": sorted(blocks), "tp": sorted(blocks)}
            sums = ("cp", "tp") if key.name else ()
            if key.kind == "backward":  # of an output that is the same for all samples, such as positions
                sums = ("dp", *sums)
            choices = placements(parts, whole, self.layout, blocks=by_axis, sums=sums)
        is_scaled = key.kind == "backward" and self.replicas * self.layout["pp"] > 1
        found = match(parts, whole, choices, bound, is_scaled=is_scaled)
        is_wrong = found is None or not found.error <= bound
        if is_wrong and key.kind != "norm" and self.layout["tp"] * self.layout["cp"] == 1:
            rows = match_rows(parts, whole, bound, is_scaled=is_scaled, outputs=self._outputs(key))
            found = rows if rows is not None and rows.error <= bound else found
        return found

    def _outputs(self, key: Key) -> tuple[Parts, Tensor] | None:
        """The output that a gradient is of: its parts, and the whole."""
        key = key._replace(kind={"backward": "output"}.get(key.kind, ""))
        stages = held(self.ranks, key) if key in self.reference.tensors else {}
        return next(((parts, self.reference.tensors[key]) for parts in stages.values()), None)

    def _parameter(self, key: Key, whole: Tensor, stage: int, parts: Parts) -> Match:
        """Compare parts of a parameter, its gradient or its update."""
        if key.name in self.reference.offsets:
            offsets = {at: self.ranks[stage, *at].offsets[key.name] for at in parts}
            found = match_offsets(parts, whole, offsets)
        else:
            placement = placement_of(key.name, parts, whole, self.ranks, self.layout)
            found = match_at(placement, parts, whole)
        of_gradient = key._replace(kind="gradient"), stage
        gradient = next((p.match for p in self.locations if (p.key, p.stage) == of_gradient), None)
        if key.kind != "weight" or gradient is None:
            return found
        # Elements whose gradients are rounding, of which optimizers make whole steps, are right as they are.
        bound, pairs = ROUNDING * self._largest[key.step, "gradient"], {}
        for at, (part, right) in found.pairs.items():
            larger = torch.maximum(*(x.abs().double() for x in gradient.pairs[at]))
            is_rounding = (larger > 0) & (larger + self.eps < bound)
            pairs[at] = right.to(part.dtype).where(is_rounding & part.isfinite(), part), right
        return replace(found, pairs=pairs)


def whose(key: Key) -> tuple[int, str, str, int]:
    """The tensor of all calls of a module in a step."""
    return key.step, key.kind, key.name, key.item


def spreads_of(reference: Record, runs: Sequence[Record]) -> dict[tuple[int, str, str, int], float]:
    """Largest differences of runs from a reference, by tensor."""
    spreads: dict[tuple[int, str, str, int], float] = {}
    for key, tensor in reference.tensors.items():
        apart = max((difference(run.tensors[key], tensor) for run in runs), default=0.0)
        spreads[whose(key)] = max(apart, spreads.get(whose(key), 0.0))
    return spreads


def magnitude(tensor: Tensor) -> float:
    return float(tensor.abs().amax()) if tensor.numel() else 0.0


def combine_losses(parts: Parts, whole: Tensor) -> Parts:
    """One loss of all replicas, on each tp rank: their sum or a mean, whichever is nearer one process's.

    Replicas may weigh in such a mean as they like, by their tokens say; of equal losses it is theirs.
    """
    combined: Parts = {}
    for tp in {at[-1] for at in parts}:
        losses = torch.stack([loss for at, loss in parts.items() if at[-1] == tp])
        mean = whole.clamp(losses.amin(0), losses.amax(0))
        combined[0, 0, tp] = min(losses.sum(0), mean, key=lambda loss: difference(loss, whole))
    return combined


def combined(parts: Parts) -> Iterator[Parts]:
    """Scalars of ranks, and their sums over some axes."""
    for some in chain.from_iterable(combinations(SPLIT_AXES, count) for count in range(len(SPLIT_AXES) + 1)):
        added = reduce(add_over, some, parts)
        if not any(are_copies(parts, axis) for axis in some):
            yield added


def clamped(parts: Parts, whole: Tensor) -> Tensor:
    """The mean of scalars of ranks, however weighed, that is nearest to another."""
    every = torch.stack([*parts.values()])
    return whole.clamp(every.amin(0), every.amax(0))


def held(ranks: Ranks, key: Key) -> dict[int, Parts]:
    """The parts of a tensor by pipeline stage: where every rank of it has one, or offsets tell."""
    stages: dict[int, Parts] = {}
    for (stage, *at), record in ranks.items():
        if key in record.tensors:
            stages.setdefault(stage, {})[tuple(at)] = record.tensors[key]
    is_known = any(key.name in record.offsets for record in ranks.values())
    return {s: p for s, p in stages.items() if is_known or len(p) == sum(rank[0] == s for rank in ranks)}


def placement_of(name: str, parts: Parts, whole: Tensor, ranks: Ranks, layout: Layout) -> Placement:
    """The placement of a parameter, as it says or by shapes. Raises UserError for none that fits."""
    splits = next(record.splits[name] for record in ranks.values() if name in record.splits)
    declared: dict[str, How] = {axis: "copy" for axis in SPLIT_AXES if layout[axis] > 1}
    for split in (split for split in splits or () if layout[split.axis] > 1):
        # of as many groups as ranks, or more, each has its own
        declared[split.axis] = split if split.groups < layout[split.axis] else replace(split, groups=0)
    blocks = {split.axis: (1, split.blocks) for split in splits or ()}
    choices = placements(parts, whole, layout, blocks=blocks)
    fitting = [choice for choice in choices if splits is None or choice == declared]
    if fitting:  # over tp alone if that explains the shapes
        return min(fitting, key=lambda choice: any(choice[a] != "copy" for a in choice if a != "tp"))
    shape = list(next(iter(parts.values())).shape)
    dim = next((d for d, (part, full) in enumerate(zip(shape, whole.shape, strict=False)) if part != full), 0)
    axis = next((axis for axis in SPLIT_AXES if layout[axis] > 1), "tp")
    raise UserError(
        f"parameter {name}: {shape} on each rank does not make {list(whole.shape)} on one process",
        fix=f'name its split, as in placements={{"{name}": mlm.Split({dim}, "{axis}")}}',
    )


def assemble(shapes: Mapping[str, Tensor], ranks: Ranks, layout: Layout, like: Key) -> dict[str, Tensor]:
    """The layout's weights or gradients, of one kind and step, as those of one process.

    Raises UserError where names or shapes of initial weights differ; what has no gradient is left out.
    """
    whole = {}
    for name, shape in shapes.items():
        stages = held(ranks, like._replace(name=name))
        if not stages and like.kind != "initial":
            continue
        if not stages:
            own = sorted({n for record in ranks.values() for n in record.splits} - set(shapes))
            alone = f"{', '.join(own[:3]) or 'none'} on ranks alone"
            problem = f"parameter {name} of one process is on no rank, {alone}"
            raise UserError(problem, fix="map these with names=")
        parts = next(iter(stages.values()))
        whole[name] = torch.empty(shape.shape, dtype=shape.dtype)
        fill(whole[name], parts, placement_of(name, parts, whole[name], ranks, layout))
    return whole
