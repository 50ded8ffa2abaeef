"""The best of the valid layouts of a number of devices.

Candidates are taken in the order of a time that they cannot be below (`CostModel.bound`), so the best are
found without simulating the rest: the result is that of simulating all.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mlm.parallel.layout_checks import TRAIN_RULES, Launch
from mlm.plan.candidates import Query, Rejections, all_splits, batches, first_breach, layouts, settings
from mlm.plan.cost import CostModel, StepTime
from mlm.plan.layer_counts import counts_of
from mlm.plan.layout import PlannedLayout
from mlm.plan.memory import GIB, DeviceMemory, MemoryModel

MOST_NODES = 1 << 17
"""Devices up to which a model that fits nowhere is tried."""


@dataclass(frozen=True)
class LayoutForecast:
    """A layout with its predicted step and its memory on the fullest rank."""

    layout: PlannedLayout
    step: StepTime
    memory: DeviceMemory


@dataclass
class SearchResult:
    """The best layouts, and what became of the others."""

    best: list[LayoutForecast]
    """Fastest first."""
    candidates: int
    """Valid layouts."""
    too_large: list[tuple[PlannedLayout, float]]
    """Layouts faster than the slowest of `best` that do not fit, with the bytes that they lack."""
    rejections: Rejections
    """Layouts that the rules do not allow."""


class Models:
    """Models of time and memory of a query."""

    def __init__(self, query: Query) -> None:
        self.query = query
        hardware = query.hardware.for_ranks(query.gpus)
        counts = counts_of(query.run, hardware.device)
        self.memory = MemoryModel(counts, hardware.reserved_gib * GIB)
        self.cost = CostModel(counts, hardware, query.gpus)

    def forecast(self, layout: PlannedLayout) -> LayoutForecast:
        """A layout with its step and its memory."""
        return LayoutForecast(layout, self.cost.step(layout), self.memory.worst(layout))

    def lacks(self, layout: PlannedLayout) -> float:
        """Bytes that a layout needs beyond a device's memory; negative if it fits."""
        return self.memory.worst(layout).total - self.query.memory_bytes


def search(
    query: Query, most: int = 10, belongs: Callable[[PlannedLayout], bool] = lambda _: True
) -> SearchResult:
    """The fastest layouts that fit, of those that belong to a class."""
    models, rejections = Models(query), Rejections()
    valid = [layout for layout in layouts(query, rejections) if belongs(layout)]
    ordered = sorted((models.cost.bound(layout), n) for n, layout in enumerate(valid))
    best: list[LayoutForecast] = []
    too_large: list[tuple[PlannedLayout, float]] = []
    for bound, n in ordered:
        if len(best) >= most and bound > best[most - 1].step.total:
            break
        layout = valid[n]
        if (lacks := models.lacks(layout)) > 0:
            too_large.append((layout, lacks))
            continue
        best.append(models.forecast(layout))
        best.sort(key=lambda forecast: (forecast.step.total, forecast.memory.total))
    return SearchResult(best[:most], len(valid), too_large, rejections)


def least_gpus(query: Query) -> int | None:
    """The fewest devices on which some layout fits, whole nodes above one; None if there are none."""
    node = query.hardware.devices_per_node
    few = [n for n in range(1, node) if node % n == 0]
    most = node
    while most <= MOST_NODES and not _fits(replace(query, gpus=most)):
        most *= 2
    if most > MOST_NODES:
        return None
    least = most // 2 if most > node else 0
    tried = few if most == node else range(least + node, most, max(node, most // 64 // node * node))
    return next((n for n in tried if _fits(replace(query, gpus=n))), most)


def _fits(query: Query) -> bool:
    """True if a layout fits, looking at those that save most memory; any batch that its replicas divide."""
    models = Models(query)
    saving = {"recompute": "full", "zero_reduce": "every", "pipeline": "1f1b", "vp": 1, "micro_batch": 1}
    for choice in all_splits(replace(query, fixed={**saving, **query.fixed})):
        dp = choice["dp"]
        train = replace(query.run.train, global_batch_size=dp * max(1, query.global_batch // dp))
        each = replace(query, run=replace(query.run, train=train), fixed={**saving, **query.fixed})
        if first_breach(TRAIN_RULES, settings(each, choice), Launch(query.gpus, None)):
            continue
        if any(models.lacks(layout) <= 0 for layout in batches(each, choice)):
            return True
    return False
