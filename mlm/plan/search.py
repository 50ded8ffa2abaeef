"""The best of the valid layouts of a number of devices, by time, memory or cost.

What cannot be among them, by a time that it cannot be below (`CostModel.bound`), is not simulated: the result
is that of simulating all.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
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
    """As the goal orders them."""
    candidates: int
    """Valid layouts."""
    too_large: list[tuple[PlannedLayout, float]]
    """Layouts that might be among the best and do not fit, with the bytes that they lack."""
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
    """The fastest layouts that fit, the fastest first."""
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


def search_leanest(query: Query, most: int = 10) -> SearchResult:
    """The layouts that no other beats in both memory and time, from the leanest to the fastest.

    Of more than `most` both ends, and others evenly between them.
    """
    models, rejections = Models(query), Rejections()
    valid = list(layouts(query, rejections))
    sizes = [models.memory.worst(layout).total for layout in valid]
    best: list[LayoutForecast] = []
    for size, bound, n in sorted((sizes[n], models.cost.bound(each), n) for n, each in enumerate(valid)):
        if size > query.memory_bytes:
            break
        if best and bound >= best[-1].step.total:
            continue
        found = models.forecast(valid[n])
        if best and found.step.total >= best[-1].step.total:
            continue
        if best and size == best[-1].memory.total:
            best.pop()
        best.append(found)
    lacking = [(layout, size - query.memory_bytes) for layout, size in zip(valid, sizes, strict=True)]
    too_large = [(layout, lacks) for layout, lacks in lacking if lacks > 0]
    few = min(most, len(best))
    shown = [best[n * (len(best) - 1) // max(few - 1, 1)] for n in range(few)]
    return SearchResult(shown, len(valid), too_large, rejections)


def search_cheapest(query: Query, most: int, share: Callable[[int], float]) -> SearchResult:
    """Of gpus, gpus/2, gpus/4, … those that no other beats in both GPU-hours and time, the cheapest first.

    Each with its fastest layout. `share` is the progress in a number of GPUs' time.
    """

    def time(each: LayoutForecast) -> float:
        return each.step.total / share(each.layout.gpus)

    sizes = [query.gpus >> n for n in range(query.gpus.bit_length()) if query.gpus % (1 << n) == 0]
    results = [search(replace(query, gpus=gpus), 1) for gpus in sizes]
    found = [each for result in results for each in result.best]
    best: list[LayoutForecast] = []
    for each in sorted(found, key=lambda each: (time(each) * each.layout.gpus, time(each))):
        if not best or time(each) < time(best[-1]):
            best.append(each)
    valid = sum(each.candidates for each in results)
    return SearchResult(best[:most], valid, results[0].too_large, results[0].rejections)
