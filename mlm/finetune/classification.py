"""Classification and regression: one or two texts, and one of task.labels or a number."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from mlm.data.tokenizer import Tokenizer
from mlm.finetune import metrics
from mlm.finetune.config import TaskConfig
from mlm.finetune.examples import Example, Frame, cut_longest, encode
from mlm.finetune.rows import Row, index_of_label, number_of_label, texts_of
from mlm.finetune.task_type import Made, Output, Prediction, TaskType, submitted
from mlm.parallel.labels import IGNORE
from mlm.util.errors import Problem

OF_TWO_LABELS = ("f1", "accuracy_f1")


class OneOrTwoTexts(TaskType):
    """Base of both types: one example per row."""

    columns: tuple[Sequence[int], str] | None = ((1, 2), "one or two columns of texts")

    def make_examples(
        self, task: TaskConfig, rows: Sequence[Row], tokenizer: Tokenizer, frame: Frame
    ) -> Iterator[Made]:
        """Yield one example per row; of two texts the longer is truncated first."""
        columns = len(task.columns)
        ids = encode((text for row in rows for text in row.texts), tokenizer)
        for number, row in enumerate(rows):
            a = next(ids)
            if columns == 1:
                text, length = frame.one(a[: frame.room(1)]), len(a)
                was_truncated = length > frame.room(1)
            else:
                b = next(ids)
                kept = cut_longest(len(a), len(b), frame.room(2))
                text, was_truncated = frame.two(a[: kept[0]], b[: kept[1]]), kept != (len(a), len(b))
            yield [Example(number, (text,), row.label)], was_truncated

    def files(self, task: TaskConfig, stem: str) -> list[str]:
        """Return the name of the table."""
        return [f"{stem}.tsv"]

    def contents(self, task: TaskConfig, predictions: Sequence[Prediction]) -> list[str]:
        """Return GLUE's table, as gluebenchmark.com takes it."""
        lines = [f"{' '.join(p.id.split())}\t{submitted(task, p)}" for p in predictions]
        return ["\n".join(["index\tprediction", *lines, ""])]


class Classification(OneOrTwoTexts):
    """One of task.labels."""

    metrics = metrics.OF_LABELS
    modules = ("sklearn.metrics",)
    names_labels = True
    gives_probabilities = True

    def num_labels(self, task: TaskConfig) -> int:
        """Return the outputs per text."""
        return len(task.labels)

    def parse(self, task: TaskConfig, record: Mapping[str, Any], id: str) -> Row:
        """Return the checked row of a record. Raises RowError."""
        return Row(id, texts_of(task, record, task.columns), index_of_label(task, record.get(task.label)))

    def metric_problem(self, task: TaskConfig, name: str) -> Problem | None:
        """Return the problem of a known metric that does not suit a task."""
        if name not in OF_TWO_LABELS or len(task.labels) <= 2:
            return None
        problem = f"task.metrics: {name} is of two labels"
        return Problem(("task.metrics", "task.labels"), problem, f"of {len(task.labels)} use macro_f1")

    def loss(self, outputs: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        """Cross-entropy, summed: outputs [E, num_labels], labels [E]."""
        return cross_entropy(outputs, labels)

    def predict(
        self, task: TaskConfig, row: Row, examples: Sequence[Example], outputs: Sequence[Output]
    ) -> Prediction:
        """Return the prediction for a row."""
        return best_label(row, outputs)

    def standard_errors(
        self, task: TaskConfig, rows: Sequence[Row], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Return the standard errors of task.metrics, as far as they have one."""
        return errors_of_labels(task, rows, predictions)


class Regression(OneOrTwoTexts):
    """A number."""

    errors = metrics.ERRORS
    metrics = metrics.OF_NUMBERS
    modules = ("scipy.stats",)

    def num_labels(self, task: TaskConfig) -> int:
        """Return the outputs per text."""
        return 1

    def parse(self, task: TaskConfig, record: Mapping[str, Any], id: str) -> Row:
        """Return the checked row of a record. Raises RowError."""
        return Row(id, texts_of(task, record, task.columns), number_of_label(task, record.get(task.label)))

    def loss(self, outputs: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        """Squared error, summed: outputs [E, 1], labels [E]; NaN is not scored."""
        is_scored = ~labels.isnan()
        return ((outputs[:, 0] - labels.nan_to_num().to(outputs.dtype)) * is_scored).square().sum()

    def predict(
        self, task: TaskConfig, row: Row, examples: Sequence[Example], outputs: Sequence[Output]
    ) -> Prediction:
        """Return the output itself, even outside task.label_range."""
        (scores,) = outputs
        return Prediction(row.id, float(scores[0]))


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy, summed: outputs [E, num_labels], labels [E]."""
    return F.cross_entropy(outputs, labels, ignore_index=IGNORE, reduction="sum")


def best_label(row: Row, outputs: Sequence[Output]) -> Prediction:
    """Return the label with the largest score; the first of equals."""
    (scores,) = outputs
    return Prediction(row.id, int(scores.argmax()), tuple(scores.tolist()))


def errors_of_labels(
    task: TaskConfig, rows: Sequence[Row], predictions: Sequence[Prediction]
) -> dict[str, float]:
    """Return the standard errors of task.metrics, by the jackknife."""
    labels, values = np.array([row.label for row in rows]), np.array([p.value for p in predictions])
    return metrics.label_errors(task.metrics, labels, values)


CLASSIFICATION, REGRESSION = Classification(), Regression()
