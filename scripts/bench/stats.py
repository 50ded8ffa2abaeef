"""Arithmetic of fair timing: quartiles, ratios of pairs, and the rules for dropping and rejecting steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import correlation, median
from typing import Literal

from mlm.util.errors import UserError

Measure = Literal["wall", "cpu"]
"""Wall time, or processor time of all threads."""
MEASURES: tuple[Measure, ...] = ("wall", "cpu")

MAX_DRIFT: Mapping[Measure, float] = {"wall": 0.10, "cpu": 0.30}
"""Largest difference among the fixed products around the two steps of a pair.

Caches that jobs share move these short products by a fifth, and steps by much less.
"""
MAX_WAIT = 0.05
"""Largest part of a step's wall time that its threads may have waited for a processor."""
MAX_SPREAD = 0.10
"""Distance between the quartiles of a ratio, over its median, above which it is not to be quoted."""
MIN_PAIRS = 8
"""Pairs below which a run is a trial, not a result."""


@dataclass(frozen=True)
class Timing:
    """Cost of some steps of one contender, per step."""

    seconds: float
    """Wall time of the slowest rank."""
    cpu_s: float
    """Processor time of all threads of all ranks."""
    waited_s: float = 0.0
    """Time that these threads were ready to run while other jobs held the processor."""


@dataclass(frozen=True)
class Turn:
    """One timed step of a contender, and the fixed products around it."""

    contender: str
    timing: Timing
    probe_before: float
    """Processor seconds of the fixed product just before; seconds on a GPU."""
    probe_after: float
    """The same just after, and just before the next contender's step."""

    @property
    def undisturbed(self) -> bool:
        """True if other jobs took no more than MAX_WAIT of its wall time."""
        return self.timing.waited_s <= MAX_WAIT * self.timing.seconds


Round = Mapping[str, Turn]
"""A step of each contender, by its name, in the order they took turns."""


@dataclass(frozen=True)
class Pair:
    """A step of the reference and one of another contender, of the same round."""

    reference: Turn
    other: Turn

    def steady(self, measure: Measure) -> bool:
        """True if the fixed product took much the same time before and after both steps."""
        turns = (self.reference, self.other)
        probes = [p for turn in turns for p in (turn.probe_before, turn.probe_after)]
        return max(probes) <= min(probes) * (1 + MAX_DRIFT[measure])

    def counts(self, measure: Measure) -> bool:
        """True if the pair says something of wall time or of processor time."""
        return self.steady(measure) and (
            measure == "cpu" or (self.reference.undisturbed and self.other.undisturbed)
        )


def pairs_of(rounds: Sequence[Round], reference: str, other: str) -> list[Pair]:
    return [Pair(one[reference], one[other]) for one in rounds]


def seconds_of(turn: Turn, measure: Measure) -> float:
    return turn.timing.seconds if measure == "wall" else turn.timing.cpu_s


@dataclass(frozen=True)
class Ratio:
    """The reference's speed over the other's, of pairs."""

    median: float
    low: float
    high: float
    """Quartiles of the pairs."""
    least: float
    most: float
    kept: int

    @classmethod
    def of(cls, pairs: Sequence[Pair], measure: Measure) -> "Ratio | None":
        """The ratio over the pairs that count; None if none does."""
        kept = [
            (seconds_of(p.reference, measure), seconds_of(p.other, measure))
            for p in pairs
            if p.counts(measure)
        ]
        if not kept:
            return None
        ratios = sorted(other / reference for reference, other in kept)
        return cls(
            median=median(ratios),
            low=quantile(ratios, 0.25),
            high=quantile(ratios, 0.75),
            least=ratios[0],
            most=ratios[-1],
            kept=len(kept),
        )

    def problems(self, pairs: int) -> list[str]:
        """Reasons not to quote it."""
        out = [] if self.kept >= pairs else [f"{self.kept} of {pairs} pairs kept"]
        if self.high - self.low > MAX_SPREAD * self.median:
            out.append(f"quartiles {self.low:.3f} to {self.high:.3f} are too far apart")
        return out


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and minimum."""

    median: float
    low: float
    high: float
    least: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        ordered = sorted(values)
        return cls(
            median(ordered), quantile(ordered, 0.25), quantile(ordered, 0.75), ordered[0], len(ordered)
        )


def quantile(ordered: Sequence[float], q: float) -> float:
    """Quantile of sorted values with linear interpolation between neighbours."""
    place = q * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's coefficient; equal values share the mean of their ranks."""
    ranks = []
    for values in (one, other):
        ordered = sorted(values)
        ranks.append([ordered.index(x) + (ordered.count(x) - 1) / 2 for x in values])
    return correlation(*ranks)


def reject_above_peak(contender: str, flops: float, peak: float) -> None:
    """Raise UserError if a model FLOP/s exceeds the measured peak: one of the two is then wrong."""
    if flops > peak:
        raise UserError(
            f"{contender} reached {flops / 1e9:.1f} model GFLOP/s, above the measured matrix-product peak of "
            f"{peak / 1e9:.1f}: rejected. The machine was busy when the peak was measured, or the clock is "
            "wrong; run again with nothing else running"
        )
