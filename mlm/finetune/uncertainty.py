"""Standard errors of a split's scores: how far they would move with other rows of the same kind.

The jackknife: of the scores without each of the n rows in turn, and their mean,
SE^2 = (n - 1) / n * sum_i (score without row i - mean)^2. Of a mean it is the usual error: for a share p of
right rows sqrt(p (1 - p) / (n - 1)). Nothing is drawn at random.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mlm.finetune.answers import Prediction
from mlm.finetune.metrics import OF_LABELS, Values, quietly, score_each_span
from mlm.finetune.rows import Split
from mlm.finetune.task_config import TaskConfig


def standard_errors(task: TaskConfig, split: Split, predictions: Sequence[Prediction]) -> dict[str, float]:
    """Of each of task.metrics, but for correlations of numbers, and for what fewer than two rows decide."""
    if not split.has_labels:
        return {}
    if task.kind == "span":
        each = score_each_span(task, split, predictions)
        errors = {name: of_mean(values) for name, values in each.items() if values.size > 1}
        return {name: errors[name] for name in task.metrics if name in errors}
    labels = np.array([row.label for row in split.rows])
    values = np.array([prediction.value for prediction in predictions])
    if len(labels) < 2:
        return {}
    return {name: jackknife(OF_LABELS[name], labels, values) for name in task.metrics if name in OF_LABELS}


def of_mean(values: NDArray[np.float64]) -> float:
    """Standard error of the mean of two values or more: the jackknife of a mean in closed form."""
    return float(values.std(ddof=1)) / math.sqrt(values.size)


def jackknife(metric: Callable[..., float], labels: Values, values: Values) -> float:
    """Standard error of a metric of two rows or more; rows that say the same are left out once for all."""
    cells, counts = np.unique(np.stack([labels, values]), axis=1, return_counts=True)
    size = int(counts.sum())
    with quietly():
        without = np.array([metric(*cells, counts - one) for one in np.eye(len(counts), dtype=counts.dtype)])
    mean = (counts * without).sum() / size
    return math.sqrt((size - 1) / size * float((counts * (without - mean) ** 2).sum()))
