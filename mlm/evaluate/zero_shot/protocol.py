"""Evaluation protocols: requests to score, and metrics from their scores."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlm.evaluate.zero_shot.sources import EvalTexts
from mlm.inference.scoring import Request, Score

V1, LM_EVAL = "Megatron-LM", "lm-eval"


@dataclass(frozen=True, slots=True)
class Metric:
    value: float
    stderr: float | None
    """Standard error; None for fewer than two samples."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Texts, split into requests by one protocol."""

    task: str
    """Its name at its source: wikitext103, lambada_openai, …"""
    name: str
    """V1 (arXiv:1909.08053, appendix E) or LM_EVAL."""
    source: EvalTexts
    requests: tuple[Request, ...]
    finish: Callable[[Sequence[Score]], dict[str, Metric]]
    """Metrics from the scores of `requests`, in their order."""
    facts: dict[str, Any]
    """Entries of the receipt: T, T_o, N, …, by key."""
    warnings: tuple[str, ...]
    """Texts left out or truncated, or not in the protocol's form."""


# ----- perplexities and standard errors; sums are float64 sums by fsum


def exp(x: float) -> float:
    """Return e to the x, without overflow."""
    return math.exp(min(x, 700.0))


def ratio_stderr(sums: Sequence[float], weights: Sequence[float]) -> float | None:
    """Return the standard error of sum(sums) / sum(weights) over independent groups; None for fewer than two.

    The linearised ratio estimator: sqrt(n / (n - 1) * sum_i (s_i - R w_i)^2) / sum(w), R the ratio. Cochran,
    Sampling Techniques, 3rd edition, section 2.11.
    """
    n, total = len(sums), math.fsum(weights)
    if n < 2 or total == 0:
        return None
    ratio = math.fsum(sums) / total
    squares = math.fsum((s - ratio * w) ** 2 for s, w in zip(sums, weights, strict=True))
    return math.sqrt(n / (n - 1) * squares) / total


def exp_stderr(x: float, stderr: float | None) -> float | None:
    """Return the standard error of exp(x) from that of x, to first order."""
    return None if stderr is None else exp(x) * stderr
