"""Means and perplexities with their standard errors. Sums are float64 sums of Python's fsum."""

import math
from collections.abc import Sequence

LARGEST_EXPONENT = 700.0  # exp of more is no float64


def exp(x: float) -> float:
    """e to the x, without overflow."""
    return math.exp(min(x, LARGEST_EXPONENT))


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean of at least one number."""
    return math.fsum(values) / len(values)


def mean_stderr(values: Sequence[float]) -> float | None:
    """Standard error of a mean: the sample's deviation (over n - 1) over sqrt(n); None for n < 2.

    For zeros and ones of mean p this is sqrt(p (1 - p) / (n - 1)). lm-eval (lm_eval/api/metrics.py,
    mean_stderr) computes accuracies' errors so.
    """
    n = len(values)
    if n < 2:
        return None
    centre = mean(values)
    return math.sqrt(math.fsum((x - centre) ** 2 for x in values) / (n - 1) / n)


def ratio_stderr(sums: Sequence[float], weights: Sequence[float]) -> float | None:
    """Standard error of sum(sums) / sum(weights) over groups drawn independently; None for fewer than two.

    The linearised ratio estimator: sqrt(n / (n - 1) * sum_i (s_i - R w_i)^2) / sum(w), R the ratio. With
    equal weights it is `mean_stderr`. Cochran, Sampling Techniques, 3rd edition, section 2.11.
    """
    n, total = len(sums), math.fsum(weights)
    if n < 2 or total == 0:
        return None
    ratio = math.fsum(sums) / total
    squares = math.fsum((s - ratio * w) ** 2 for s, w in zip(sums, weights, strict=True))
    return math.sqrt(n / (n - 1) * squares) / total


def of_exp(x: float, stderr: float | None) -> float | None:
    """Standard error of exp(x) from that of x, to first order."""
    return None if stderr is None else exp(x) * stderr
