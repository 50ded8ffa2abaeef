"""Official metrics of labels and numbers, from scikit-learn and SciPy; span.py has SQuAD's.

All but the errors are shares or correlations: 0.5 where GLUE's pages print 50. An undefined metric, such as
the correlation of equal predictions, is 0.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm.util.extras import load_extra

Values = NDArray[Any]
Metric = Callable[[Values, Values], float]
"""Score of labels [rows] and predicted values [rows]."""
EXTRA, NEEDS = "finetune", "the metrics of task"


def _of_labels(name: str, **options: Any) -> Metric:
    def metric(labels: Values, values: Values) -> float:
        sklearn = load_extra("sklearn.metrics", NEEDS, EXTRA)
        return float(getattr(sklearn, name)(labels, values, **options))

    return metric


def _correlation(name: str) -> Metric:
    def metric(labels: Values, values: Values) -> float:
        measure = getattr(load_extra("scipy.stats", NEEDS, EXTRA), name)
        correlation = float(measure(labels, values).statistic) if len(labels) > 1 else 0.0
        return correlation if np.isfinite(correlation) else 0.0  # NaN when all are equal

    return metric


accuracy, matthews = _of_labels("accuracy_score"), _of_labels("matthews_corrcoef")
f1 = _of_labels("f1_score", zero_division=0)
"""Harmonic mean of precision and recall of label 1."""
macro_f1 = _of_labels("f1_score", average="macro", zero_division=0)
"""Mean over the labels of their F1."""
pearson, spearman = _correlation("pearsonr"), _correlation("spearmanr")


def accuracy_f1(labels: Values, values: Values) -> float:
    """Mean of accuracy and F1, by which GLUE ranks MRPC and QQP (arXiv:1804.07461, section 3)."""
    return (accuracy(labels, values) + f1(labels, values)) / 2


def pearson_spearman(labels: Values, values: Values) -> float:
    """Mean of both correlations, by which GLUE ranks STS-B (arXiv:1804.07461, section 3)."""
    return (pearson(labels, values) + spearman(labels, values)) / 2


def mse(labels: Values, values: Values) -> float:
    return float(np.square(np.asarray(labels, dtype=np.float64) - values).mean())


def rmse(labels: Values, values: Values) -> float:
    return math.sqrt(mse(labels, values))


def mae(labels: Values, values: Values) -> float:
    return float(np.abs(np.asarray(labels, dtype=np.float64) - values).mean())


OF_LABELS: dict[str, Metric] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "accuracy_f1": accuracy_f1,
    "matthews": matthews,
}
OF_NUMBERS: dict[str, Metric] = {
    "pearson": pearson,
    "spearman": spearman,
    "pearson_spearman": pearson_spearman,
    "mse": mse,
    "rmse": rmse,
    "mae": mae,
}
ERRORS = frozenset({"mse", "rmse", "mae"})
"""Metrics of numbers whose lower values are better."""
