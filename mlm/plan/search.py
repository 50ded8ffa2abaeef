"""The best of the valid layouts of a number of devices, by time, memory or cost.

What cannot be among them, by a time and a memory that it cannot be below (`CostModel.bound`,
`MemoryModel.bound`), is neither simulated nor counted: the result is that of trying all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush

from mlm.plan.candidates import Query, layouts
from mlm.plan.cost import CostModel, StepTime
from mlm.plan.hardware import GIB
from mlm.plan.layer_counts import counts_of
from mlm.plan.layout import PlannedLayout
from mlm.plan.memory import DeviceMemory, MemoryModel


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
    nearest: tuple[PlannedLayout, float] | None
    """Of the layouts that do not fit and might be among the best, the leanest, with the bytes that it
    lacks."""


class Models:
    """Models of time and memory of a query."""

    def __init__(self, query: Query) -> None:
        self.query = query
        self.counts = counts_of(query.run, query.hardware.device)
        self.memory = MemoryModel(self.counts, query.hardware.reserved_gib * GIB)

    @cached_property
    def cost(self) -> CostModel:
        """The model of time, of hardware whose peaks are known."""
        return CostModel(self.counts, self.query.hardware, self.query.gpus)

    def forecast(self, layout: PlannedLayout) -> LayoutForecast:
        """A layout with its step and its memory."""
        return LayoutForecast(layout, self.cost.step(layout), self.memory.worst(layout))

    def leanest_first(
        self, layouts: Sequence[PlannedLayout], is_wanted: Callable[[PlannedLayout], bool] = lambda _: True
    ) -> Iterator[tuple[PlannedLayout, float]]:
        """Wanted layouts with their bytes, counted when none that is left has a lower bound."""
        heap = [(self.memory.bound(layout), True, n) for n, layout in enumerate(layouts)]
        heapify(heap)
        while heap:
            size, is_bound, n = heappop(heap)
            if not is_wanted(layouts[n]):
                continue
            if is_bound:
                heappush(heap, (self.memory.worst(layouts[n]).total, False, n))
            else:
                yield layouts[n], size


def search(query: Query, most: int = 10) -> SearchResult:
    """The fastest layouts that fit, the fastest first."""
    models, capacity = Models(query), query.memory_bytes
    valid, memory = list(layouts(query)), models.memory
    best, too_large = list[LayoutForecast](), list[PlannedLayout]()
    for bound, n in sorted((models.cost.bound(layout), n) for n, layout in enumerate(valid)):
        if len(best) >= most and bound > best[most - 1].step.total:
            break
        layout = valid[n]
        if memory.bound(layout) > capacity or memory.worst(layout).total > capacity:
            too_large.append(layout)
            continue
        best.append(models.forecast(layout))
        best.sort(key=lambda forecast: (forecast.step.total, forecast.memory.total))
    nearest = next(((layout, n - capacity) for layout, n in models.leanest_first(too_large)), None)
    return SearchResult(best[:most], len(valid), nearest)


def search_leanest(query: Query, most: int = 10) -> SearchResult:
    """The layouts that no other beats in both memory and time, from the leanest to the fastest.

    Of more than `most` both ends, and others evenly between them.
    """
    models, valid, nearest = Models(query), list(layouts(query)), None
    best: list[LayoutForecast] = []

    def may_be_faster(layout: PlannedLayout) -> bool:
        return not best or models.cost.bound(layout) < best[-1].step.total

    for layout, size in models.leanest_first(valid, may_be_faster):
        if size > query.memory_bytes:
            nearest = layout, size - query.memory_bytes
            break
        found = models.forecast(layout)
        if best and found.step.total >= best[-1].step.total:
            continue
        if best and size == best[-1].memory.total:
            best.pop()
        best.append(found)
    few = min(most, len(best))
    shown = [best[n * (len(best) - 1) // max(few - 1, 1)] for n in range(few)]
    return SearchResult(shown, len(valid), nearest)


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
    return SearchResult(best[:most], valid, results[0].nearest)
