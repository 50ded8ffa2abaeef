"""The best of the valid layouts of a number of devices.

Candidates are taken in the order of a time that they cannot be below (`CostModel.bound`), so the best are
found without simulating the rest: the result is that of simulating all.
"""

from dataclasses import dataclass
from functools import cached_property

from mlm.plan.candidates import Query, Rejections, layouts
from mlm.plan.cost import CostModel, StepTime
from mlm.plan.layer_counts import counts_of
from mlm.plan.layout import PlannedLayout
from mlm.plan.memory import GIB, DeviceMemory, MemoryModel


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
        self.query, self.hardware = query, query.hardware.for_ranks(query.gpus)
        self.counts = counts_of(query.run, self.hardware.device)
        self.memory = MemoryModel(self.counts, self.hardware.reserved_gib * GIB)

    @cached_property
    def cost(self) -> CostModel:
        """The model of time, of hardware whose peaks are known."""
        return CostModel(self.counts, self.hardware, self.query.gpus)

    def forecast(self, layout: PlannedLayout) -> LayoutForecast:
        """A layout with its step and its memory."""
        return LayoutForecast(layout, self.cost.step(layout), self.memory.worst(layout))

    def lacks(self, layout: PlannedLayout) -> float:
        """Bytes that a layout needs beyond a device's memory; negative if it fits."""
        return self.memory.worst(layout).total - self.query.memory_bytes


def search(query: Query, most: int = 10) -> SearchResult:
    """The fastest layouts that fit."""
    models, rejections = Models(query), Rejections()
    valid = list(layouts(query, rejections))
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
