"""Branch and bound for the fastest valid layouts that fit.

Layouts that lower bounds of time and memory exclude (`CostModel.bound`, `MemoryModel.bound`) are neither
simulated nor counted; the result equals an exhaustive search.
"""

from dataclasses import dataclass
from functools import cached_property

from mlm.plan.candidates import Query, layouts
from mlm.plan.cost import CostModel, StepTime
from mlm.plan.hardware import GIB
from mlm.plan.layer_counts import counts_of
from mlm.plan.layout import PlannedLayout
from mlm.plan.memory import DeviceMemory, MemoryModel


@dataclass(frozen=True)
class LayoutForecast:
    layout: PlannedLayout
    step: StepTime
    memory: DeviceMemory


@dataclass
class SearchResult:
    best: list[LayoutForecast]
    """The fastest first."""
    candidates: int
    """Number of valid layouts."""
    nearest: tuple[PlannedLayout, float] | None
    """The layout that lacks least memory among those that do not fit and may be as fast, and the bytes that
    it lacks."""


class Forecaster:
    def __init__(self, query: Query) -> None:
        self.query = query
        self.counts = counts_of(query.run, query.hardware.device)
        self.memory = MemoryModel(self.counts, query.hardware.reserved_gib * GIB)

    @cached_property
    def cost(self) -> CostModel:
        """The model of time; needs hardware with known peaks."""
        return CostModel(self.counts, self.query.hardware, self.query.gpus)

    def forecast(self, layout: PlannedLayout) -> LayoutForecast:
        return LayoutForecast(layout, self.cost.step(layout), self.memory.worst(layout))


def search(query: Query, most: int = 10) -> SearchResult:
    """Return the `most` fastest layouts that fit."""
    forecaster, capacity, valid = Forecaster(query), query.memory_bytes, list(layouts(query))
    best, too_large = list[LayoutForecast](), list[tuple[float, int]]()
    for bound, n in sorted((forecaster.cost.bound(layout), n) for n, layout in enumerate(valid)):
        if len(best) >= most and bound > best[most - 1].step.total:
            break
        layout, least = valid[n], forecaster.memory.bound(valid[n])
        if least > capacity or forecaster.memory.worst(layout).total > capacity:
            too_large.append((least, n))
        else:
            candidate = forecaster.forecast(layout)
            best = sorted([*best, candidate], key=lambda x: (x.step.total, x.memory.total))
    nearest: tuple[PlannedLayout, float] | None = None
    for least, n in sorted(too_large):
        if nearest is not None and least - capacity >= nearest[1]:
            break
        lacks = forecaster.memory.worst(valid[n]).total - capacity
        nearest = nearest if nearest is not None and nearest[1] <= lacks else (valid[n], lacks)
    return SearchResult(best[:most], len(valid), nearest)
