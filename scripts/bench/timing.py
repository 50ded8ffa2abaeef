"""Timed pairs: reference and contender one after the other, bracketed, repeated where the machine changed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

from bench.machine import Probe
from bench.ranks import WARM_UP_STEPS, Ranks
from bench.stats import Pair, Sample, next_order

Say = Callable[[str], None]


@dataclass
class Series:
    """All pairs of two contenders."""

    reference: str
    other: str
    steps: int = 0
    """Steps per sample, the same for both; 0 before the first."""
    pairs: list[Pair] = field(default_factory=list)
    cut_short: list[Sample] = field(default_factory=list)
    """First samples of a pair that were dropped at once, before the second was taken."""

    def kept(self, session_median: float) -> list[Pair]:
        """Pairs of two steady samples."""
        return [p for p in self.pairs if p.steady(session_median)]

    @property
    def attempts(self) -> int:
        """Pairs begun."""
        return len(self.pairs) + len(self.cut_short)


class Clock:
    """Takes samples of contenders with the probe around them."""

    def __init__(self, probe: Probe, min_sample_s: float) -> None:
        self.probe, self.min_sample_s = probe, min_sample_s
        self.next_batch: dict[str, int] = {}

    def choose_steps(self, series: Series, reference: Ranks) -> None:
        """Steps per sample, so that one lasts long enough to be timed."""
        series.steps = series.steps or max(1, ceil(self.min_sample_s / reference.time(WARM_UP_STEPS, 1)))

    def sample(self, contender: Ranks, steps: int, before: float) -> Sample:
        """Time `steps` steps; `before` is the probe's time just now."""
        first = self.next_batch.get(contender.name, 0)
        self.next_batch[contender.name] = first + steps
        seconds = contender.time(first, steps)
        return Sample(contender.name, seconds, steps, before, self.probe())

    def fill(
        self,
        series: Series,
        reference: Ranks,
        other: Ranks,
        *,
        pairs: int,
        limit: int,
        say: Say,
    ) -> None:
        """Add pairs until `pairs` are kept or `limit` were begun; again when the session's median moved."""
        self.choose_steps(series, reference)
        while len(kept := series.kept(self.probe.median())) < pairs and series.attempts < limit:
            order = next_order(kept)
            first, second = (reference, other) if order == "AB" else (other, reference)
            a = self.sample(first, series.steps, self.probe())
            if not a.steady(self.probe.median()):
                series.cut_short.append(a)
                say(f"{series.reference} : {series.other}: dropped, the machine changed under {a.contender}")
                continue
            b = self.sample(second, series.steps, a.probe_after)
            pair = Pair(a, b, order) if order == "AB" else Pair(b, a, order)
            series.pairs.append(pair)
            word = (
                f"{pair.ratio:.3f} ×" if pair.steady(self.probe.median()) else "dropped, the machine changed"
            )
            say(f"{series.reference} : {series.other}, pair {len(kept) + 1} of {pairs} ({order}): {word}")
