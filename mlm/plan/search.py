"""The best of the valid layouts of a number of devices, by time, memory or cost.

What cannot be among them, by a time and a memory that it cannot be below (`CostModel.bound`,
`MemoryModel.bound`), is neither simulated nor counted: the result is that of trying all.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
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
    """The best layouts, and what became of the others."""

    best: list[LayoutForecast]
    """As the goal orders them."""
    candidates: int
    """Valid layouts."""
    nearest: tuple[PlannedLayout, float] | None
    """Of the layouts that do not fit and might be among the best, the leanest, with the bytes that it
    lacks."""


class Models:
    def __init__(self, query: Query) -> None:
        self.query = query
        self.counts = counts_of(query.run, query.hardware.device)
        self.memory = MemoryModel(self.counts, query.hardware.reserved_gib * GIB)

    @cached_property
    def cost(self) -> CostModel:
        """The model of time, of hardware whose peaks are known."""
        return CostModel(self.counts, self.query.hardware, self.query.gpus)

    def forecast(self, layout: PlannedLayout) -> LayoutForecast:
        return LayoutForecast(layout, self.cost.step(layout), self.memory.worst(layout))


def search(query: Query, most: int = 10, *, is_lean: bool = False) -> SearchResult:
    """The fastest layouts that fit, the fastest first.

    With `is_lean` those that no other beats in both memory and time, from the leanest to the fastest; of more
    than `most` both ends, and others evenly between them.
    """
    models, capacity, valid = Models(query), query.memory_bytes, list(layouts(query))
    time_bound, memory_bound = models.cost.bound, models.memory.bound
    best, too_large = list[LayoutForecast](), list[tuple[float, int, float]]()
    for bound, n in sorted((time_bound(layout), n) for n, layout in enumerate(valid)):
        if not is_lean and len(best) >= most and bound > best[most - 1].step.total:
            break
        layout, least = valid[n], memory_bound(valid[n])
        if is_lean and any(x.step.total <= bound and x.memory.total <= least for x in best):
            continue
        if least > capacity or models.memory.worst(layout).total > capacity:
            too_large.append((least, n, bound))
            continue
        candidate = models.forecast(layout)
        if is_lean:
            best = [x for x in best if not _beats(candidate, x)]
            best += [] if any(_beats(x, candidate) for x in best) else [candidate]
        else:
            best = sorted([*best, candidate], key=lambda x: (x.step.total, x.memory.total))
    if is_lean:
        best.sort(key=lambda x: x.memory.total)
        # what is slower than all that fit is no loss
        too_large = [entry for entry in too_large if not best or entry[2] < best[-1].step.total]
        few = min(most, len(best))
        best = [best[n * (len(best) - 1) // max(few - 1, 1)] for n in range(few)]
    nearest: tuple[PlannedLayout, float] | None = None
    for least, n, _ in sorted(too_large):
        if nearest is not None and least - capacity >= nearest[1]:
            break
        lacks = models.memory.worst(valid[n]).total - capacity
        nearest = nearest if nearest is not None and nearest[1] <= lacks else (valid[n], lacks)
    return SearchResult(best[:most], len(valid), nearest)


def _beats(a: LayoutForecast, b: LayoutForecast) -> bool:
    """True if a layout is at least as good as another in memory and time."""
    return a.memory.total <= b.memory.total and a.step.total <= b.step.total


def search_cheapest(query: Query, most: int, share: Callable[[int], float]) -> SearchResult:
    """Of gpus, gpus/2, gpus/4, … those that no other beats in both GPU-hours and time, the cheapest first.

    Each with its fastest layout. `share` is the progress in a number of GPUs' time.
    """

    def time(forecast: LayoutForecast) -> float:
        return forecast.step.total / share(forecast.layout.gpus)

    sizes = [query.gpus >> n for n in range(query.gpus.bit_length()) if query.gpus % (1 << n) == 0]
    results = [search(replace(query, gpus=gpus), 1) for gpus in sizes]
    fastest = [result.best[0] for result in results if result.best]
    best: list[LayoutForecast] = []
    for forecast in sorted(fastest, key=lambda x: (time(x) * x.layout.gpus, time(x))):
        if not best or time(forecast) < time(best[-1]):
            best.append(forecast)
    return SearchResult(best[:most], sum(result.candidates for result in results), results[0].nearest)
