"""Official metrics of labels and numbers, from scikit-learn and SciPy; span.py has SQuAD's.

All but the errors are shares or correlations: 0.5 where GLUE's pages print 50. An undefined metric, such as
the correlation of equal predictions, is 0.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm.util.extras import load_extra

Values = NDArray[Any]
Metric = Callable[[Values, Values], float]
"""Score of labels [rows] and predicted values [rows]."""
EXTRA, NEEDS = "finetune", "the metrics of task"


def _of_labels(name: str, **options: Any) -> Callable[..., float]:
    """Return a metric of scikit-learn; labels, predicted labels and optional weights are [rows]."""

    def metric(labels: Values, values: Values, weights: Values | None = None) -> float:
        sklearn = load_extra("sklearn.metrics", NEEDS, EXTRA)
        return float(getattr(sklearn, name)(labels, values, sample_weight=weights, **options))

    return metric


def _correlation(name: str) -> Metric:
    def metric(labels: Values, values: Values) -> float:
        measure = getattr(load_extra("scipy.stats", NEEDS, EXTRA), name)
        correlation = float(measure(labels, values).statistic) if len(labels) > 1 else 0.0
        return correlation if np.isfinite(correlation) else 0.0  # not a number when all are equal

    return metric


accuracy, matthews = _of_labels("accuracy_score"), _of_labels("matthews_corrcoef")
f1 = _of_labels("f1_score", zero_division=0)
"""Harmonic mean of precision and recall of label 1."""
macro_f1 = _of_labels("f1_score", average="macro", zero_division=0)
"""Mean over the labels of their F1."""
pearson, spearman = _correlation("pearsonr"), _correlation("spearmanr")


def accuracy_f1(labels: Values, values: Values, weights: Values | None = None) -> float:
    """Mean of accuracy and F1, by which GLUE ranks MRPC and QQP (arXiv:1804.07461, section 3)."""
    return (accuracy(labels, values, weights) + f1(labels, values, weights)) / 2


def pearson_spearman(labels: Values, values: Values) -> float:
    """Mean of both correlations, by which GLUE ranks STS-B (arXiv:1804.07461, section 3)."""
    return (pearson(labels, values) + spearman(labels, values)) / 2


def mse(labels: Values, values: Values) -> float:
    return float(np.square(np.asarray(labels, dtype=np.float64) - values).mean())


def rmse(labels: Values, values: Values) -> float:
    return math.sqrt(mse(labels, values))


def mae(labels: Values, values: Values) -> float:
    return float(np.abs(np.asarray(labels, dtype=np.float64) - values).mean())


OF_LABELS: dict[str, Callable[..., float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "accuracy_f1": accuracy_f1,
    "matthews": matthews,
}
"""Functions of labels [rows], predicted labels [rows] and, if given, weights [rows]."""
OF_NUMBERS: dict[str, Metric] = {
    "pearson": pearson,
    "spearman": spearman,
    "pearson_spearman": pearson_spearman,
    "mse": mse,
    "rmse": rmse,
    "mae": mae,
}
ERRORS = frozenset({"mse", "rmse", "mae"})
"""Metrics of numbers of which less is better."""


def jackknife(metric: Callable[..., float], labels: Values, values: Values) -> float:
    """Return the standard error of a metric of two rows or more, by the jackknife.

    From the scores without each of the n rows in turn, and their mean:
    SE^2 = (n - 1) / n * sum_i (score without row i - mean)^2. Equal rows are left out once for all. For a
    share p of right rows it is sqrt(p (1 - p) / (n - 1)). Nothing is drawn at random.
    """
    cells, counts = np.unique(np.stack([labels, values]), axis=1, return_counts=True)
    size = int(counts.sum())
    with warnings.catch_warnings(action="ignore"):  # of undefined scores, which are 0
        without = np.array([metric(*cells, counts - one) for one in np.eye(len(counts), dtype=counts.dtype)])
    mean = (counts * without).sum() / size
    return math.sqrt((size - 1) / size * float((counts * (without - mean) ** 2).sum()))
