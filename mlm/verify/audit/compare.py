"""Comparison of the records of a layout with one process's, in the order of computation."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from types import MappingProxyType

import torch
from torch import Tensor

from mlm.util.errors import UserError
from mlm.verify.audit.formats import EPS
from mlm.verify.audit.parts import (
    SPLIT_AXES,
    AxisSharding,
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
    subsets,
)
from mlm.verify.audit.record import KINDS, SCALAR_GRADIENT, Cause, Key, Record
from mlm.verify.verdict import FLOOR, TOLERANCES

ROUNDING = 1e-10
"""Elements of gradients below this fraction of the model's largest are rounding in float64. Keys' biases have
such gradients: softmax cancels them."""
MAX_SPREADS = 3.0
"""Tolerance in units of the spread of runs of one process with other rounding."""
FP32_ROUNDING = 64 * EPS["fp32"]
"""Rounding where a layout alone computes in float32, as in buckets of gradients."""
UNMOVED = 1e-30
"""Unit of weights that do not move on one process."""

Layout = Mapping[str, int]
Ranks = dict[tuple[int, ...], Record]
"""Records by coordinates over AXES."""


@dataclass(frozen=True, eq=False)
class Location:
    key: Key
    match: Match
    unit: float
    """Unit of differences: the largest element on one process, or a floor for tensors of rounding."""
    limit: float
    """Tolerance in this unit."""
    stage: int = 0

    @property
    def is_wrong(self) -> bool:
        return not self.match.error <= self.limit * self.unit

    @property
    def relative(self) -> float:
        return self.match.error / self.unit if self.unit else math.inf if self.match.error else 0.0


class Comparison:
    """All tensors that both sides have, compared in the order of the reference's computation.

    Args:
        spreads: Largest differences between runs of one process with other rounding of narrow formats, by
            `call_group`. They widen the tolerance of float64.
        lr_sum: Sum of learning rates, the unit of weights. Set for our `Trainer` alone, whose loss is the
            global batch's on every rank and whose tolerances are its precision's.
        eps: Of the optimizer.

    Raises UserError if no names match.
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
        self.operation_cause: Cause | None = None
        """Cause found among operations."""
        self.sample_causes: Mapping[int, Cause] = {}
        """By step, the cause of samples that differ from one process's."""
        self.swap_causes: Mapping[Key, Cause] = {}
        """Cause of gradients of outputs that belong to other micro-batches."""
        self.locations: list[Location] = []
        self.skipped: list[str] = []
        """Tensors that could not be compared, with the reason, for each step."""
        formats = list(TOLERANCES)
        self.precision = max((r.precision for r in (reference, *ranks.values())), key=formats.index)
        self.layout_formats = {
            (module, name)
            for record in ranks.values()
            for module, name in record.formats.items()
            if formats.index(name) > formats.index(reference.formats.get(module, "fp64"))
        }
        """(module, format) where ranks compute in a narrower format than one process."""
        self._largest_of_kind: dict[tuple[int, str], float] = {}
        self._calls = {id(r): Counter(map(call_group, r.tensors)) for r in (reference, *ranks.values())}
        for key, tensor in reference.tensors.items():
            size = self.largest_move(key) if key.kind == "weight" else magnitude(tensor)
            self._largest_of_kind[key[:2]] = max(self._largest_of_kind.get(key[:2], 0.0), size)
        order = list(KINDS).index
        compared = (key for key in reference.tensors if key.kind in KINDS)
        for key in sorted(compared, key=lambda key: (key.step, order(key.kind))):
            full = reference.tensors[key]
            combines_losses = key.kind == "loss" and lr_sum is None and self.replicas > 1
            names_a_stage = layout["pp"] > 1 and not key.name  # the whole module is a stage
            stages = {} if names_a_stage else parts_by_stage(ranks, key)
            for stage, parts in stages.items():
                self._compare(key, full, stage, combine_losses(parts, full) if combines_losses else parts)
            if not stages and key.name in reference.offsets:
                self.locations.append(Location(key, Match({}, {}, is_complete=False), 1.0, 0.0))
        if not any(location.key.kind in ("output", "gradient", "weight") for location in self.locations):
            raise UserError("no module or parameter of the layout has a name of one process; give names=")
        gradients = (x for x in self.locations if x.key.kind == "gradient")
        self.split_parameters = {x.key.name for x in gradients if {*x.match.placement.values()} - {"copy"}}
        """Parameters that are split here, or in a larger layout."""

    @property
    def first_nonfinite(self) -> str:
        """First tensor that is not finite on one process either, in words; empty if there is none."""
        for location in self.locations:
            pairs = list(location.match.pairs.values())
            if location.is_wrong or location.key.kind in ("loss", "norm"):
                if any(all(bool((~x.isfinite()).any()) for x in pair) for pair in pairs):
                    return location.key.words
                if location.is_wrong:
                    break
        return ""

    @property
    def wrong_locations(self) -> list[Location]:
        """Locations beyond the tolerance, in the order of computation.

        Scalar outputs count if the loss depends on them, and it or a gradient is wrong in their step.
        """
        wrong = [x for x in self.locations if x.is_wrong]
        steps = {x.key.step for x in wrong if x.key.kind in ("loss", "backward", "gradient")}
        scalars = {key for key in self.reference.tensors if key.kind == SCALAR_GRADIENT and key.step in steps}
        trained = {key._replace(kind="scalar") for key in scalars}
        return [x for x in wrong if x.key.kind != "scalar" or x.key in trained]

    def of_kind(self, step: int, kind: str) -> list[Location]:
        return [location for location in self.locations if location.key[:2] == (step, kind)]

    def largest_move(self, key: Key) -> float:
        """Largest move of an element of the reference's weight since the start."""
        initial = self.reference.tensors.get(Key(0, "initial", key.name))
        return 0.0 if initial is None else difference(self.reference.tensors[key], initial)

    @property
    def rounding(self) -> str:
        """Formats narrower than float64 and the errors that they hide, in words; empty if there are none."""
        formats = self.reference.formats | dict(self.layout_formats)
        if not formats:
            return ""
        modules = list(dict.fromkeys(module or "the whole module" for module in formats))
        more = f" and {len(modules) - 3} more" if len(modules) > 3 else ""
        limits: dict[str, float] = {}
        for kind in (kind for kind in KINDS if kind != "initial"):
            for location in (p for p in self.locations if p.key.kind == kind and p.unit > UNMOVED):
                limits[kind] = max(location.limit, limits.get(kind, 0.0))
        bounds = ", ".join(f"{limit:.1g} of the {KINDS[kind]}" for kind, limit in limits.items())
        return f"{self.precision} in {', '.join(modules[:3])}{more}, which hides errors below {bounds}"

    def _unit_and_limit(self, key: Key, full: Tensor) -> tuple[float, float]:
        """Unit of differences, and the tolerance in it."""
        is_trainer = self.lr_sum is not None
        tolerance = TOLERANCES[self.precision if is_trainer else "fp64"]
        size, floor = magnitude(full), FLOOR * self._largest_of_kind[key[:2]]
        unit, limit = max(size, floor) or 1.0, tolerance.gradient if key.step == 0 else tolerance.later
        if key.kind in ("loss", "scalar"):
            unit, limit = 1.0 if is_trainer else max(size, 1.0), tolerance.loss  # nats a token
        elif key.kind == "norm":
            unit, limit = size, tolerance.norm
        elif key.kind == "weight":
            unit = max(self.largest_move(key), floor, UNMOVED) if self.lr_sum is None else self.lr_sum
            limit = tolerance.weight
        if is_trainer or not unit:
            return unit, limit
        rounding = MAX_SPREADS * self.spreads.get(call_group(key), 0.0)
        if self.layout_formats:
            rounding = max(rounding, FP32_ROUNDING * size)
        if key.kind == "weight" and (fmt := self.reference.formats.get(key.name)):
            rounding = max(rounding, EPS[fmt] * size)  # an element may round to the other neighbour
        return unit, max(limit, rounding / unit)

    def _compare(self, key: Key, full: Tensor, stage: int, parts: Parts) -> None:
        unit, limit = self._unit_and_limit(key, full)
        record = next(record for rank, record in self.ranks.items() if rank[0] == stage)
        group, best = call_group(key), None
        if key.kind in ("initial", "gradient", "clipped", "weight"):
            best = self.match_parameter(key, full, stage, parts)
        elif self._calls[id(self.reference)][group] != self._calls[id(record)][group]:
            self.skipped.append(f"{key.name} is called another number of times than on one process")
        elif key.kind == "scalar":
            if bool(full.isfinite().all()) and not self._is_loss(key, full):
                errors = [(difference(nearest_mean(x, full), full), x) for x in sums_over_axes(parts)]
                error, nearest = min(errors, key=lambda item: item[0])
                best = match_at({}, dict.fromkeys(parts, full) if error <= limit * unit else nearest, full)
        elif (best := self.match_activation(key, parts, full, limit * unit)) is None:
            shape = list(next(iter(parts.values())).shape)
            self.skipped.append(f"{key.name}: {shape} is not part of {list(full.shape)}")
        if best is not None:
            self.locations.append(Location(key, best, unit, limit, stage))

    def _is_loss(self, key: Key, values: Tensor) -> bool:
        """True for a scalar that is the loss of a step, or of its micro-batches."""
        loss = self.reference.tensors.get(Key(key.step, "loss", "loss"))
        totals = (values.sum(), values.double().mean())
        return loss is not None and any(difference(x, loss) <= ROUNDING * magnitude(loss) for x in totals)

    def match_activation(self, key: Key, parts: Parts, full: Tensor, bound: float) -> Match | None:
        """Match an output, its gradient, the loss or the norm at the placement that fits best."""
        choices: Iterable[Placement] = [{}]
        if full.numel() != 1:
            shape = next(iter(parts.values())).shape
            blocks = {1, *shape}
            for record in self.ranks.values():
                blocks |= {split.blocks for split in record.splits.get(f"{key.name}.weight") or ()}
            divisors = {b for size in shape for b in range(1, size + 1) if size % b == 0}  # [S, B] as one dim
            by_axis = {"dp": sorted(divisors), "cp": sorted(blocks), "tp": sorted(blocks)}
            sums = ("cp", "tp") if key.name else ()
            if key.kind == "backward":  # outputs that all samples share, such as positions, have addends
                sums = ("dp", *sums)
            choices = placements(parts, full, self.layout, blocks=by_axis, sums=sums)
        is_scaled = key.kind == "backward" and self.replicas * self.layout["pp"] > 1
        best = match(parts, full, choices, bound, is_scaled=is_scaled)
        is_wrong = best is None or not best.error <= bound
        if is_wrong and key.kind != "norm" and self.layout["tp"] * self.layout["cp"] == 1:
            rows = match_rows(parts, full, bound, is_scaled=is_scaled, outputs=self._outputs(key))
            best = rows if rows is not None and rows.error <= bound else best
        return best

    def _outputs(self, key: Key) -> tuple[Parts, Tensor] | None:
        """Parts and full tensor of the output that a gradient belongs to."""
        key = key._replace(kind={"backward": "output"}.get(key.kind, ""))
        stages = parts_by_stage(self.ranks, key) if key in self.reference.tensors else {}
        return next(((parts, self.reference.tensors[key]) for parts in stages.values()), None)

    def match_parameter(self, key: Key, full: Tensor, stage: int, parts: Parts) -> Match:
        """Match parts of a parameter, of its gradient or of its update."""
        if key.name in self.reference.offsets:
            offsets = {rank: self.ranks[stage, *rank].offsets[key.name] for rank in parts}
            parameter_match = match_offsets(parts, full, offsets)
        else:
            placement = placement_of(key.name, parts, full, self.ranks, self.layout)
            parameter_match = match_at(placement, parts, full)
        gradient_location = key._replace(kind="gradient"), stage
        gradient = next((p.match for p in self.locations if (p.key, p.stage) == gradient_location), None)
        if key.kind != "weight" or gradient is None:
            return parameter_match
        # Optimizers make whole steps of gradients that are rounding: do not compare these elements.
        bound, pairs = ROUNDING * self._largest_of_kind[key.step, "gradient"], {}
        for rank, (part, expected) in parameter_match.pairs.items():
            larger = torch.maximum(*(x.abs().double() for x in gradient.pairs[rank]))
            is_rounding = (larger > 0) & (larger + self.eps < bound)
            pairs[rank] = expected.to(part.dtype).where(is_rounding & part.isfinite(), part), expected
        return replace(parameter_match, pairs=pairs)


def call_group(key: Key) -> tuple[int, str, str, int]:
    """A key without its call: tensors of all calls of a module in a step."""
    return key.step, key.kind, key.name, key.item


def spreads_of(reference: Record, runs: Sequence[Record]) -> dict[tuple[int, str, str, int], float]:
    """Largest differences of runs from a reference, by `call_group`."""
    spreads: dict[tuple[int, str, str, int], float] = {}
    for key, tensor in reference.tensors.items():
        largest = max((difference(run.tensors[key], tensor) for run in runs), default=0.0)
        spreads[call_group(key)] = max(largest, spreads.get(call_group(key), 0.0))
    return spreads


def magnitude(tensor: Tensor) -> float:
    return float(tensor.abs().amax()) if tensor.numel() else 0.0


def combine_losses(parts: Parts, full: Tensor) -> Parts:
    """Losses of replicas combined on each tp rank: their sum or a mean, whichever is nearer one process's.

    Replicas may have any weights in the mean, such as their tokens.
    """
    combined_losses: Parts = {}
    for tp in {rank[-1] for rank in parts}:
        losses = {rank: loss for rank, loss in parts.items() if rank[-1] == tp}
        choices = torch.stack([*losses.values()]).sum(0), nearest_mean(losses, full)
        combined_losses[0, 0, tp] = min(choices, key=lambda loss: difference(loss, full))
    return combined_losses


def sums_over_axes(parts: Parts) -> Iterator[Parts]:
    """Scalars of ranks, and their sums over each set of axes."""
    for axes in subsets(SPLIT_AXES):
        sums = reduce(add_over, axes, parts)
        if not any(are_copies(parts, axis) for axis in axes):
            yield sums


def nearest_mean(parts: Parts, full: Tensor) -> Tensor:
    """The weighted mean of ranks' scalars that is nearest to one process's."""
    values = torch.stack([*parts.values()])
    return full.clamp(values.amin(0), values.amax(0))


def parts_by_stage(ranks: Ranks, key: Key) -> dict[int, Parts]:
    """Parts of a tensor by pipeline stage, where all its ranks have one or offsets are known."""
    stages: dict[int, Parts] = {}
    for (stage, *rank), record in ranks.items():
        if key in record.tensors:
            stages.setdefault(stage, {})[tuple(rank)] = record.tensors[key]
    has_offsets = any(key.name in record.offsets for record in ranks.values())
    sizes = Counter(stage for stage, *_ in ranks)
    return {s: parts for s, parts in stages.items() if has_offsets or len(parts) == sizes[s]}


def placement_of(name: str, parts: Parts, full: Tensor, ranks: Ranks, layout: Layout) -> Placement:
    """Placement of a parameter, as declared or by shapes. Raises UserError if none fits."""
    splits = next(record.splits[name] for record in ranks.values() if name in record.splits)
    declared: dict[str, AxisSharding] = {axis: "copy" for axis in SPLIT_AXES if layout[axis] > 1}
    for split in (split for split in splits or () if layout[split.axis] > 1):
        # groups=n is an ordinary split where there are at most n ranks
        declared[split.axis] = split if split.groups < layout[split.axis] else replace(split, groups=0)
    blocks = {split.axis: (1, split.blocks) for split in splits or ()}
    choices = placements(parts, full, layout, blocks=blocks)
    fitting = [choice for choice in choices if splits is None or choice == declared]
    if fitting:  # over tp alone if that fits the shapes
        return min(fitting, key=lambda choice: any(choice[a] != "copy" for a in choice if a != "tp"))
    shape = list(next(iter(parts.values())).shape)
    dim = next((d for d, (n, size) in enumerate(zip(shape, full.shape, strict=False)) if n != size), 0)
    axis = next((axis for axis in SPLIT_AXES if layout[axis] > 1), "tp")
    raise UserError(
        f"parameter {name}: {shape} on each rank does not make {list(full.shape)} on one process",
        fix=f'name its split, as in placements={{"{name}": mlm.Split({dim}, "{axis}")}}',
    )


def assemble(shapes: Mapping[str, Tensor], ranks: Ranks, layout: Layout, prototype: Key) -> dict[str, Tensor]:
    """Full initial weights, or gradients of a step, from the parts of a layout, by name.

    Parameters without gradient are left out. Raises UserError if names or shapes of initial weights differ.
    """
    full = {}
    for name, shape in shapes.items():
        stages = parts_by_stage(ranks, prototype._replace(name=name))
        if not stages and prototype.kind != "initial":
            continue
        if not stages:
            unmatched = sorted({n for record in ranks.values() for n in record.splits} - set(shapes))
            rank_names = f"{', '.join(unmatched[:3]) or 'none'} on ranks alone"
            problem = f"parameter {name} of one process is on no rank, {rank_names}"
            raise UserError(problem, fix="map these with names=")
        parts = next(iter(stages.values()))
        full[name] = torch.empty(shape.shape, dtype=shape.dtype)
        fill(full[name], parts, placement_of(name, parts, full[name], ranks, layout))
    return full
