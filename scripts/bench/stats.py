"""Arithmetic of fair timing: quartiles, ratios of pairs, and the rules for dropping and rejecting samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from mlm.errors import UserError

MAX_DRIFT = 0.10
"""Largest change of the bracketing product, between before and after and from the session's median."""
MAX_SPREAD = 0.10
"""Distance between the quartiles of a ratio, over its median, above which it is not to be quoted."""
MIN_PAIRS = 8
"""Pairs below which a run is a trial, not a result."""


@dataclass(frozen=True)
class Sample:
    """One timed sample and the bracketing products around it."""

    contender: str
    seconds: float
    """Seconds of one step (a sample's time divided by its steps)."""
    steps: int
    probe_before: float
    """Seconds of the fixed matrix product just before."""
    probe_after: float
    """Seconds of the same product just after."""

    def steady(self, session_median: float) -> bool:
        """True if the machine was the same before, after and through the session.

        Dropped if the two products differ by more than MAX_DRIFT, or either from the session's median.
        """
        low, high = sorted((self.probe_before, self.probe_after))
        if high > low * (1 + MAX_DRIFT):
            return False
        return low >= session_median * (1 - MAX_DRIFT) and high <= session_median * (1 + MAX_DRIFT)


@dataclass(frozen=True)
class Pair:
    """A sample of the reference and one of another contender, taken one after the other."""

    reference: Sample
    other: Sample
    order: str
    """AB if the reference came first, BA if the other did."""

    @property
    def ratio(self) -> float:
        """Ratio of the reference's tokens/s to the other's, at equal tokens per step."""
        return self.other.seconds / self.reference.seconds

    def steady(self, session_median: float) -> bool:
        """True if both samples count."""
        return self.reference.steady(session_median) and self.other.steady(session_median)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Median, first and third quartile (linear interpolation) of at least one value."""
        ordered = sorted(values)
        return cls(median(ordered), quantile(ordered, 0.25), quantile(ordered, 0.75), len(ordered))

    def scaled(self, factor: float) -> "Spread":
        """The spread of the values times a positive factor."""
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.count)

    def inverse_of(self, numerator: float) -> "Spread":
        """The spread of numerator / value."""
        return Spread(numerator / self.median, numerator / self.high, numerator / self.low, self.count)


def quantile(ordered: Sequence[float], q: float) -> float:
    """Quantile of sorted values with linear interpolation between neighbours."""
    place = q * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def next_order(kept: Sequence[Pair]) -> str:
    """AB and BA in turn, counting the pairs that are kept, so that they balance whatever is dropped."""
    return "AB" if sum(p.order == "AB" for p in kept) <= sum(p.order == "BA" for p in kept) else "BA"


def reject_above_peak(contender: str, flops: float, peak: float) -> None:
    """Raise UserError if a model FLOP/s exceeds the measured peak: one of the two is then wrong."""
    if flops > peak:
        raise UserError(
            f"{contender} reached {flops / 1e9:.1f} model GFLOP/s, above the measured matrix-product peak of "
            f"{peak / 1e9:.1f}: rejected. The machine was busy when the peak was measured, or the clock is "
            "wrong; run again with nothing else running"
        )
