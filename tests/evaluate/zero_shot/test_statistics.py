"""Means and their standard errors."""

import math

import numpy as np
import pytest

from mlm.evaluate.zero_shot.protocol import exp, mean_stderr, ratio_stderr

LOSSES = np.random.default_rng(7).uniform(0, 9, 400).tolist()


def test_the_error_of_a_share_is_that_of_lm_eval() -> None:
    """sqrt(p (1 - p) / (n - 1)) = sqrt(0.3 * 0.7 / 9)."""
    assert mean_stderr([1.0] * 3 + [0.0] * 7) == pytest.approx(math.sqrt(0.3 * 0.7 / 9), rel=1e-12)
    theirs = pytest.importorskip("lm_eval.api.metrics").mean_stderr
    assert mean_stderr(LOSSES) == pytest.approx(theirs(LOSSES), rel=1e-12)


def test_the_error_of_a_ratio_is_what_resampling_gives() -> None:
    draw = np.random.default_rng(1)
    weights = draw.integers(1, 9, 300).astype(float)
    sums = weights * draw.uniform(2, 4, 300)
    chosen = draw.integers(0, 300, (3000, 300))
    resampled = (sums[chosen].sum(1) / weights[chosen].sum(1)).std(ddof=1)
    assert ratio_stderr(sums.tolist(), weights.tolist()) == pytest.approx(resampled, rel=0.06)


def test_a_hopeless_loss_is_no_overflow() -> None:
    assert math.isfinite(exp(1e6))
