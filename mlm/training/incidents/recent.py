"""Recent losses and gradient norms, and the limits that clean steps do not reach.

A number is judged by its excess over the level, the median of the last LEVEL steps: of losses the difference,
of gradient norms that of the logarithms. Excesses have heavy tails where batches are small or the learning
rate is high, so that no multiple of their deviation holds for all runs. The tail itself is estimated from the
largest of `size` steps, peaks over a threshold with exponential excesses: for norms the Hill estimator (Hill
1975). The limit is the excess that is reached once in a number of steps by the predictive distribution, which
allows for an estimate from few peaks.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

NORMAL = 1.4826  # standard deviation over median absolute deviation, of normally distributed numbers
LEAST_SPREAD = 0.01  # of the median: a loss that hardly changes makes no incident of a change of a hundredth
LEAST_LOG_SPREAD = 0.05  # of gradient norms, whose changes by a twentieth mean less
LEVEL = 32
"""Steps whose median is the level."""
FEWEST = 16
"""Steps before there is a level, and excesses before there is a limit; half of a smaller window."""
FEWEST_PEAKS, SHARE = 4, 16
"""The tail is one in SHARE of the excesses, at least FEWEST_PEAKS."""
CEILING = math.log(1000)
"""Excess of a norm that is an outlier whatever the tail; clean runs had 400 times the level."""
TINY = 1e-30


def deviations(value: float, others: Sequence[float]) -> float:
    """Return how far a number is above the median of others, in robust standard deviations."""
    middle = median(others)
    least = max(LEAST_SPREAD * abs(middle), 1e-30)
    if value - middle <= least:  # most steps: less than one deviation, whatever the spread
        return (value - middle) / least
    return (value - middle) / max(NORMAL * median([abs(other - middle) for other in others]), least)


def return_level(excesses: Sequence[float], steps: float, least: float) -> float:
    """Return the excess that is reached once in so many steps; `least` bounds the tail's mean from below.

    Excesses are in ascending order.
    """
    size = len(excesses)
    count = min(max(FEWEST_PEAKS, size // SHARE), size)
    start = excesses[-count - 1] if count < size else 0.0
    mean = max(sum(excesses[-count:]) / count - start, least)
    # of exponential excesses with this estimated mean, P(excess > x) = (1 + x / (count * mean)) ** -count
    return start + mean * count * (max(steps * count / size, 1.0) ** (1 / count) - 1)


def median(values: Iterable[float]) -> float:
    """Return the median; NaN of nothing."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


class Tail:
    """Level of a number's last steps, and its excesses over the levels of `size` steps."""

    def __init__(self, size: int) -> None:
        self.size, self.fewest = size, max(1, min(FEWEST, size // 2))
        self.values = deque[float](maxlen=min(LEVEL, size))
        self.excesses = deque[float]()
        self.ordered: list[float] = []
        self.level = math.nan

    def add(self, value: float) -> None:
        """Take note of a step."""
        if len(self.values) >= self.fewest:
            if len(self.excesses) == self.size:
                del self.ordered[bisect_left(self.ordered, self.excesses.popleft())]
            self.excesses.append(max(value - self.level, 0.0))
            insort(self.ordered, self.excesses[-1])
        self.values.append(value)
        self.level = median(self.values)

    def limit(self, steps: float, least: float) -> float:
        """Return the number that clean steps reach once in so many; infinite before it is known."""
        if len(self.excesses) < self.fewest:
            return math.inf
        least *= self.size / len(self.excesses)  # few steps have not shown all that a young run does
        return self.level + return_level(self.ordered, steps, least)


class Recent:
    """The finite losses and gradient norms of the last `size` steps, and those that their levels need.

    Outliers are among them: where training settles on another level, they soon are none.
    """

    def __init__(self, size: int, pairs: Sequence[Sequence[float]] = ()) -> None:
        self.losses, self.norms = Tail(size), Tail(size)
        self.pairs = deque[tuple[float, float]](maxlen=size + LEVEL)
        for loss, norm in pairs[-size - LEVEL :]:
            self.add(float(loss), float(norm))

    def add(self, loss: float, norm: float) -> None:
        """Take note of a step."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.pairs.append((loss, norm))
            self.losses.add(loss)
            self.norms.add(math.log(max(norm, TINY)))

    def limits(self, steps: float) -> tuple[float, float]:
        """Return the loss and the norm that clean steps reach once in so many; infinite for 0 steps."""
        if not steps:
            return math.inf, math.inf
        loss = self.losses.limit(steps, max(LEAST_SPREAD * abs(self.losses.level), TINY))
        norm = self.norms.limit(steps, LEAST_LOG_SPREAD)
        return loss, math.exp(min(norm, self.norms.level + CEILING)) if norm < math.inf else norm
