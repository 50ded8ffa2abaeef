"""Scores of predictions by a task's official metrics, from scikit-learn, SciPy and torchmetrics.

All are shares or correlations, 0.5 where GLUE's and SQuAD's pages print 50. What is not
defined, such as a correlation when all predictions are equal, is 0.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm.config.downstream_schema import TaskConfig
from mlm.data.corpus.extras import load_extra
from mlm.tasks.finetune.answers import Prediction
from mlm.tasks.finetune.parsing import Answer
from mlm.tasks.finetune.rows import Split

Values = NDArray[Any]
EXTRA = "finetune"
NEEDED = {
    "classification": ("sklearn.metrics",),
    "regression": ("scipy.stats",),
    "choice": ("sklearn.metrics",),
    "span": ("torchmetrics.functional.text",),
}
"""Modules that the metrics of a kind of task need."""


def check_installed(task: TaskConfig) -> None:
    """Raises UserError when a package is missing: before training rather than at its first validation."""
    for module in NEEDED[task.kind]:
        load_extra(module, f"task={task.name}", EXTRA)


def score(task: TaskConfig, split: Split, predictions: Sequence[Prediction]) -> dict[str, float]:
    """Each of task.metrics, in their order, of a split with labels.

    `predictions` are those of all its rows, in their order. The metrics of questions with or without an
    answer are left out when there is no such question.
    """
    assert split.has_labels
    assert len(predictions) == len(split)
    if task.kind == "span":
        found = score_spans(split, predictions)
        return {name: found[name] for name in task.metrics if name in found}
    labels = np.array([row.label for row in split.rows])
    values = np.array([prediction.value for prediction in predictions])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scores that are not defined: they are 0
        return {name: METRICS[name](labels, values) for name in task.metrics}


def accuracy(labels: Values, values: Values) -> float:
    """Share of right predictions."""
    return float(_sklearn().accuracy_score(labels, values))


def f1(labels: Values, values: Values) -> float:
    """Harmonic mean of precision and recall of label 1."""
    return float(_sklearn().f1_score(labels, values, zero_division=0))


def macro_f1(labels: Values, values: Values) -> float:
    """Mean over the labels of their F1."""
    return float(_sklearn().f1_score(labels, values, average="macro", zero_division=0))


def accuracy_f1(labels: Values, values: Values) -> float:
    """Mean of accuracy and F1, by which GLUE ranks MRPC and QQP (arXiv:1804.07461, section 3)."""
    return (accuracy(labels, values) + f1(labels, values)) / 2


def matthews(labels: Values, values: Values) -> float:
    """Matthews correlation."""
    return float(_sklearn().matthews_corrcoef(labels, values))


def pearson(labels: Values, values: Values) -> float:
    """Correlation."""
    return _correlation("pearsonr", labels, values)


def spearman(labels: Values, values: Values) -> float:
    """Correlation of the ranks."""
    return _correlation("spearmanr", labels, values)


def pearson_spearman(labels: Values, values: Values) -> float:
    """Mean of both correlations, by which GLUE ranks STS-B (arXiv:1804.07461, section 3)."""
    return (pearson(labels, values) + spearman(labels, values)) / 2


METRICS: dict[str, Callable[[Values, Values], float]] = {
    metric.__name__: metric
    for metric in (
        accuracy, f1, macro_f1, accuracy_f1, matthews, pearson, spearman, pearson_spearman,
    )
}  # fmt: skip
"""Of labels [rows] and predicted values [rows], by name."""


def score_spans(split: Split, predictions: Sequence[Prediction]) -> dict[str, float]:
    """SQuAD's exact match and F1: the best over a question's answers, averaged over questions.

    A question without answer has the empty text for its answer (arXiv:1806.03822), so that each of the two is
    1 for no answer, else 0.
    """
    squad = load_extra(NEEDED["span"][0], "task.kind=span", EXTRA).squad
    scores, answerable = list[tuple[float, float]](), list[bool]()
    for row, prediction in zip(split.rows, predictions, strict=True):
        assert isinstance(row.label, tuple)
        texts = [answer.text for answer in row.label if isinstance(answer, Answer)]
        # one at a time: of many, torchmetrics adds up scores in float32
        found = squad(
            [{"id": row.id, "prediction_text": str(prediction.value)}],
            [{"id": row.id, "answers": {"text": texts or [""]}}],
        )
        scores.append((float(found["f1"]) / 100, float(found["exact_match"]) / 100))
        answerable.append(bool(texts))
    table, has_answer = np.array(scores), np.array(answerable)
    means = {"f1": table[:, 0].mean(), "exact_match": table[:, 1].mean()}
    if has_answer.any():
        means["has_answer_f1"], means["has_answer_exact_match"] = table[has_answer].mean(axis=0)
    if not has_answer.all():
        means["no_answer_f1"] = table[~has_answer, 0].mean()
    return {name: float(mean) for name, mean in means.items()}


def _sklearn() -> Any:
    return load_extra("sklearn.metrics", "the metrics of task", EXTRA)


def _correlation(name: str, labels: Values, values: Values) -> float:
    measure = getattr(load_extra("scipy.stats", "the metrics of task", EXTRA), name)
    if len(labels) < 2:
        return 0.0
    found = float(measure(labels, values).statistic)  # not a number when all are equal
    return found if np.isfinite(found) else 0.0
