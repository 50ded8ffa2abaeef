"""Recent losses and gradient norms, and the distance of a new one from them."""

import math
from collections.abc import Iterable, Sequence

NORMAL = 1.4826  # standard deviation over median absolute deviation, of normally distributed numbers
LEAST_SPREAD = 0.01  # of the median: a loss that hardly changes makes no incident of a change of a hundredth

ROUNDING = 1e-6
"""Share of a distance that rounding cannot reach."""


def deviations(value: float, others: Sequence[float]) -> float:
    """Return how far a number is above the median of others, in robust standard deviations."""
    middle = median(others)
    least = max(LEAST_SPREAD * abs(middle), 1e-30)
    if value - middle <= least:  # most steps: less than one deviation, whatever the spread
        return (value - middle) / least
    return (value - middle) / max(NORMAL * median([abs(other - middle) for other in others]), least)


def limit(others: Sequence[float], threshold: float) -> float:
    """Return the least number that can be `threshold` deviations above others."""
    middle = median(others)
    least = max(LEAST_SPREAD * abs(middle), 1e-30)
    spread = (
        max(NORMAL * median([abs(other - middle) for other in others]), least) if threshold > 1 else least
    )
    return middle + threshold * spread * (1 - ROUNDING)


def median(values: Iterable[float]) -> float:
    """Return the median; NaN of nothing."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


class Recent:
    """The finite losses and gradient norms of the last `size` steps.

    Outliers are among them: where training settles on another level, they soon are none.
    """

    def __init__(self, size: int, pairs: Iterable[Sequence[float]] = ()) -> None:
        self.size = size
        self.pairs = [(float(loss), float(norm)) for loss, norm in pairs][-size:]

    def add(self, loss: float, norm: float) -> None:
        """Take note of a step."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.pairs = [*self.pairs[-self.size + 1 :], (loss, norm)] if self.size > 1 else [(loss, norm)]

    def deviations(self, loss: float, norm: float) -> tuple[float, float]:
        """Return those of the loss and of the norm; zeros before a quarter of the steps is known."""
        if not self.is_known:
            return 0.0, 0.0
        losses, norms = zip(*self.pairs, strict=True)
        return deviations(loss, losses), deviations(norm, norms)

    @property
    def is_known(self) -> bool:
        """True from a quarter of the steps on."""
        return len(self.pairs) >= max(2, self.size // 4)

    def limits(self, threshold: float) -> tuple[float, float]:
        """Return a loss and a norm that no number of so many deviations is below; infinite without any."""
        if not threshold or not self.is_known:
            return math.inf, math.inf
        losses, norms = zip(*self.pairs, strict=True)
        return limit(losses, threshold), limit(norms, threshold)
