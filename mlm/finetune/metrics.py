"""Scores of predictions by a task's official metrics, from scikit-learn, SciPy and torchmetrics.

All are shares or correlations, 0.5 where GLUE's and SQuAD's pages print 50. What is not
defined, such as a correlation when all predictions are equal, is 0.
"""

import re
import string
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm.extras import load_extra
from mlm.finetune.answers import Prediction
from mlm.finetune.parsing import Answer, Row
from mlm.finetune.rows import Split
from mlm.finetune.task_config import TaskConfig

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
        found = score_spans(task, split, predictions)
        return {name: found[name] for name in task.metrics if name in found}
    labels = np.array([row.label for row in split.rows])
    values = np.array([prediction.value for prediction in predictions])
    with quietly():
        return {name: METRICS[name](labels, values) for name in task.metrics}


def accuracy(labels: Values, values: Values, weights: Values | None = None) -> float:
    """Share of right predictions."""
    return float(_sklearn().accuracy_score(labels, values, sample_weight=weights))


def f1(labels: Values, values: Values, weights: Values | None = None) -> float:
    """Harmonic mean of precision and recall of label 1."""
    return float(_sklearn().f1_score(labels, values, sample_weight=weights, zero_division=0))


def macro_f1(labels: Values, values: Values, weights: Values | None = None) -> float:
    """Mean over the labels of their F1."""
    measure = _sklearn().f1_score
    return float(measure(labels, values, average="macro", sample_weight=weights, zero_division=0))


def accuracy_f1(labels: Values, values: Values, weights: Values | None = None) -> float:
    """Mean of accuracy and F1, by which GLUE ranks MRPC and QQP (arXiv:1804.07461, section 3)."""
    return (accuracy(labels, values, weights) + f1(labels, values, weights)) / 2


def matthews(labels: Values, values: Values, weights: Values | None = None) -> float:
    """Matthews correlation."""
    return float(_sklearn().matthews_corrcoef(labels, values, sample_weight=weights))


def pearson(labels: Values, values: Values) -> float:
    """Correlation."""
    return _correlation("pearsonr", labels, values)


def spearman(labels: Values, values: Values) -> float:
    """Correlation of the ranks."""
    return _correlation("spearmanr", labels, values)


def pearson_spearman(labels: Values, values: Values) -> float:
    """Mean of both correlations, by which GLUE ranks STS-B (arXiv:1804.07461, section 3)."""
    return (pearson(labels, values) + spearman(labels, values)) / 2


OF_LABELS: dict[str, Callable[..., float]] = {
    metric.__name__: metric for metric in (accuracy, f1, macro_f1, accuracy_f1, matthews)
}
"""Of labels [rows], predicted labels [rows] and, where they are given, weights [rows], by name."""
OF_NUMBERS = {metric.__name__: metric for metric in (pearson, spearman, pearson_spearman)}
METRICS: dict[str, Callable[[Values, Values], float]] = {**OF_LABELS, **OF_NUMBERS}
"""Of labels [rows] and predicted values [rows], by name."""


@contextmanager
def quietly() -> Iterator[None]:
    """Within, nobody is warned of scores that are not defined: they are 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def score_spans(task: TaskConfig, split: Split, predictions: Sequence[Prediction]) -> dict[str, float]:
    """SQuAD's exact match and F1: the best over a question's answers, averaged over questions."""
    each = score_each_span(task, split, predictions)
    return {name: float(values.mean()) for name, values in each.items() if values.size}


def score_each_span(
    task: TaskConfig, split: Split, predictions: Sequence[Prediction]
) -> dict[str, NDArray[np.float64]]:
    """By metric the score of each question that it is the mean of.

    A question without answer has the empty text for its answer (arXiv:1806.03822), so that each of the two is
    1 for no answer, else 0.
    """
    scores, answerable = list[tuple[float, float]](), list[bool]()
    for row, prediction in zip(split.rows, predictions, strict=True):
        texts = texts_of(row)
        scores.append(score_span(task, texts, str(prediction.value)))
        answerable.append(bool(texts))
    f1, exact = np.array(scores).T
    has_answer = np.array(answerable)
    return {
        "f1": f1,
        "exact_match": exact,
        "has_answer_f1": f1[has_answer],
        "has_answer_exact_match": exact[has_answer],
        "no_answer_f1": f1[~has_answer],
    }


def texts_of(row: Row) -> list[str]:
    """The answers of a row of kind span."""
    assert isinstance(row.label, tuple)
    return [answer.text for answer in row.label if isinstance(answer, Answer)]


def score_span(task: TaskConfig, texts: Sequence[str], value: str) -> tuple[float, float]:
    """(F1, exact match) of one answer, also where nothing of a text counts, such as "The!".

    SQuAD 1.1's evaluate-v1.1.py gives F1 = 0 where the answer has no word that counts; SQuAD 2.0's
    evaluate-v2.0.py leaves such right answers out, and without another the right one is none.
    """
    squad = load_extra(NEEDED["span"][0], "task.kind=span", EXTRA).squad
    if task.unanswerable:
        texts = [text for text in texts if counted(text)]
    # one at a time: of many, torchmetrics adds up scores in float32
    found = squad(
        [{"id": "", "prediction_text": value}], [{"id": "", "answers": {"text": list(texts) or [""]}}]
    )
    f1, exact = float(found["f1"]) / 100, float(found["exact_match"]) / 100
    return (f1 if task.unanswerable or counted(value) else 0.0), exact


def counted(text: str) -> str:
    """Part of a text that SQuAD's scripts compare (arXiv:1606.05250, section 6.1)."""
    letters = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())


def best_threshold(
    task: TaskConfig, split: Split, predictions: Sequence[Prediction]
) -> dict[str, dict[str, float]]:
    """By metric the task.null_threshold that scores best on a split, and that score; nothing for other tasks.

    As `find_best_thresh` of SQuAD 2.0's evaluate-v2.0.py, with the best answer of each question and how much
    the score of none exceeds its score.
    """
    if not (task.kind == "span" and task.unanswerable and split.has_labels):
        return {}
    answers = [p.n_best[0].text if p.n_best else "" for p in predictions]
    texts = [texts_of(row) for row in split.rows]
    scores = [score_span(task, *pair) for pair in zip(texts, answers, strict=True)]
    order = sorted(range(len(answers)), key=lambda n: excess(predictions[n]))
    found = {}
    for place, name in enumerate(("f1", "exact_match")):
        total = best = float(sum(not each for each in texts))  # all questions unanswered
        threshold = 0.0
        for n in order:
            total += scores[n][place] if texts[n] else -float(answers[n] != "")
            if total > best:
                best, threshold = total, excess(predictions[n])
        found[name] = {"threshold": threshold, "value": best / len(answers)}
    return found


def excess(prediction: Prediction) -> float:
    """Excess of the score of no answer over the best answer's: SQuAD 2.0's script seeks its threshold."""
    best = prediction.n_best[0].score if prediction.n_best else 0.0
    return (prediction.null_score or 0.0) - best


def _sklearn() -> Any:
    return load_extra("sklearn.metrics", "the metrics of task", EXTRA)


def _correlation(name: str, labels: Values, values: Values) -> float:
    measure = getattr(load_extra("scipy.stats", "the metrics of task", EXTRA), name)
    if len(labels) < 2:
        return 0.0
    found = float(measure(labels, values).statistic)  # not a number when all are equal
    return found if np.isfinite(found) else 0.0
