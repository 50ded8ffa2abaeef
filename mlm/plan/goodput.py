"""Goodput: the share of a run's time that is progress, beside failures, checkpoints and restarts."""

import math
from dataclasses import dataclass
from typing import Annotated

from mlm.config.fields import NOT_NEGATIVE, POSITIVE, OnlyIf

LEAST_SHARE = 1e-6
"""Share of the time that is progress below which a run never ends."""
FAILS = OnlyIf("mtbf_hours")


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureConfig:
    """Failures of a long run, and what they cost."""

    mtbf_hours: Annotated[float | None, POSITIVE] = None
    """Mean time between failures of one GPU with its share of a host, hours; null plans without failures.
    419 interruptions of 16,384 GPUs in 54 days (arXiv:2407.21783, section 3.3.4) are 50,700."""
    checkpoint_s: Annotated[float, POSITIVE, FAILS] = 30.0
    """Seconds that a checkpoint stops training."""
    interval_s: Annotated[float | None, POSITIVE, FAILS] = None
    """Seconds of training between checkpoints; null takes Young's and Daly's, which loses least."""
    restart_s: Annotated[float, NOT_NEGATIVE, FAILS] = 600.0
    """Seconds from a failure to the first step after it."""


@dataclass(frozen=True, slots=True)
class Goodput:
    share: float
    """Of its time, that a run without failures and checkpoints would take."""
    interval_s: float
    failure_s: float
    """Mean time between failures of all GPUs."""


def goodput(config: FailureConfig, gpus: int) -> Goodput | None:
    """The goodput of so many GPUs; None without a mean time between failures.

    With failures at random, a mean of M apart, an interval t with its checkpoint c and restarts R takes
    M e^(R/M) (e^((t + c)/M) - 1), all that is lost included (Daly 2006, Future Generation Computer Systems,
    equation 13). The interval is his first-order one, sqrt(2 c M) - c.
    """
    if config.mtbf_hours is None:
        return None
    mean, cost = config.mtbf_hours * 3600 / gpus, config.checkpoint_s
    interval = config.interval_s or max(math.sqrt(2 * cost * mean) - cost, cost)
    exponents = (config.restart_s / mean, (interval + cost) / mean)
    if max(exponents) > 700:  # of a float: such a run never ends
        return Goodput(0.0, interval, mean)
    took = mean * math.exp(exponents[0]) * math.expm1(exponents[1])
    return Goodput(interval / took, interval, mean)
