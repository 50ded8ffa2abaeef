"""The interface of a type of task: one object, from a record to a score."""

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlm.data.tokenizer import Tokenizer
from mlm.finetune.config import TaskConfig
from mlm.finetune.examples import Example, Frame
from mlm.finetune.metrics import Metric
from mlm.finetune.rows import ExampleError, TaskRow
from mlm.util.errors import Problem, format_value

if TYPE_CHECKING:
    from torch import Tensor

    from mlm.finetune.batches import Batcher

RowExamples = tuple[list[Example], bool] | ExampleError
"""The examples of a row and whether it was truncated, or the error of a row without examples."""
Output = NDArray[np.float32]
"""Model output for one example: [num_labels] per text, or [n, 2] for the n tokens of a text (head span)."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The model's answer to a row."""

    id: str
    value: int | float | str
    """Index of a label or option, a number, or a text; for type span the answer, empty for no answer."""
    scores: tuple[float, ...] = ()
    """The model's output for each label or option."""


class TaskType(ABC):
    """A type of task. Subclasses define a row, its examples, the loss, and the prediction."""

    head: Literal["classification", "span", "language_model"] = "classification"
    """Head of the model: num_labels outputs per text, two scores per token, or the pretrained head."""
    batcher: "type[Batcher] | str" = "mlm.finetune.batches:Batcher"
    """Class that makes micro-batches of examples, or its import path: checks of a task need no torch."""
    loss_unit: str = "per example"
    """Unit of the loss in curves."""
    is_chat: bool = False
    """True if rows are conversations: the tokenizer's chat template renders them, and task.held_out divides a
    single file."""
    needs_template: bool = True
    """False if rows of conversations may also be plain texts, which need no template."""
    metrics: Mapping[str, Metric] = MappingProxyType({})
    """Metrics that task.metrics may name, of labels and predicted values."""
    metric_names: tuple[str, ...] = ()
    """Names of the metrics of a type that overrides `score`; by default the keys of `metrics`."""
    errors: frozenset[str] = frozenset()
    """Metrics whose lower values are better."""
    modules: tuple[str, ...] = ()
    """Optional modules that the metrics import (the extra `mlm[finetune]`)."""
    columns: tuple[Sequence[int], str] | None = None
    """Allowed numbers of task.columns, and their description; None allows any."""
    names_labels: bool = False
    """True if task.labels must name two labels or more; they must be empty otherwise."""
    gives_probabilities: bool = False
    """True if the softmax of a prediction's scores is the probability of each of task.labels."""

    @abstractmethod
    def num_labels(self, task: TaskConfig) -> int:
        """Outputs per text of head=classification; 0 for head=span."""

    @abstractmethod
    def parse(self, task: TaskConfig, record: Mapping[str, Any], id: str) -> TaskRow:
        """Return the checked row of a record. Raises RowError."""

    @abstractmethod
    def make_examples(
        self, task: TaskConfig, rows: Sequence[TaskRow], tokenizer: Tokenizer, frame: Frame
    ) -> Iterator[RowExamples]:
        """Yield the examples of each row, at least one."""

    @abstractmethod
    def loss(self, outputs: "Tensor", labels: "Tensor", lengths: "Tensor") -> "Tensor":
        """Return the loss of a micro-batch, summed over its E examples: 0-d.

        Args:
            outputs: [T, num_labels], or [T, S, 2] of head=span, of T texts.
            labels: [E] or [E, k] int64, IGNORE_INDEX where not scored; or [E] float64, NaN where not scored.
            lengths: [T] tokens of each text.
        """

    @abstractmethod
    def predict(
        self, task: TaskConfig, row: TaskRow, examples: Sequence[Example], outputs: Sequence[Output]
    ) -> Prediction:
        """Return the prediction for a row, from the outputs for its examples."""

    def row_id(self, task: TaskConfig, name: str, earlier: int) -> str:
        """Return the id of a row; `earlier` rows have the same name. Raises RowError."""
        return name

    def least_room(self, task: TaskConfig) -> int:
        """Fewest tokens of texts in a sequence, without special tokens."""
        return 2

    def problems(self, task: TaskConfig) -> list[Problem]:
        """Return the problems of a task's columns, labels and lengths."""
        problems = []
        if self.columns is not None and len(task.columns) not in self.columns[0]:
            problem = f"kind {task.kind} has {self.columns[1]}"
            problems.append(Problem.at("task.columns", list(task.columns), problem))
        if self.names_labels and (len(task.labels) < 2 or len(set(task.labels)) < len(task.labels)):
            problem = "must be two or more names, all different, by number"
            problems.append(
                Problem(("task.labels",), f"task.labels={format_value(list(task.labels))} {problem}")
            )
        elif task.labels and not self.names_labels:
            problem = f"kind {task.kind} has none"
            problems.append(Problem.at("task.labels", list(task.labels), problem, "leave it out"))
        return problems

    def metric_problem(self, task: TaskConfig, name: str) -> Problem | None:
        """Return the problem of a known metric that does not suit a task."""
        return None

    def score(
        self, task: TaskConfig, rows: Sequence[TaskRow], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Return each of task.metrics, in their order, for labelled rows and their predictions."""
        labels = np.array([row.label for row in rows])
        values = np.array([prediction.value for prediction in predictions])
        with warnings.catch_warnings(action="ignore"):  # undefined scores are 0
            return {name: self.metrics[name](labels, values) for name in task.metrics}

    def standard_errors(
        self, task: TaskConfig, rows: Sequence[TaskRow], predictions: Sequence[Prediction]
    ) -> dict[str, float | None]:
        """Return the standard errors of the scores that are means over rows, as lm-eval's `mean_stderr`."""
        return {}

    def files(self, task: TaskConfig, stem: str) -> list[str]:
        """Return the names of the files of a split's predictions."""
        return [f"{stem}.json"]

    def contents(self, task: TaskConfig, predictions: Sequence[Prediction]) -> list[str]:
        """Return the contents of `files`."""
        answers = {p.id: format_prediction(task, p) for p in predictions}
        return [json.dumps(answers, ensure_ascii=False, indent=0) + "\n"]


def format_prediction(task: TaskConfig, prediction: Prediction) -> str:
    value = prediction.value
    if isinstance(value, float):
        low, high = task.label_range or (value, value)
        return f"{min(max(value, low), high):.3f}"
    if isinstance(value, int):
        return task.labels[value] if task.submit_names and task.labels else str(value)
    return value
