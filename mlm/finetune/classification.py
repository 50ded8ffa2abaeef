"""Classification, multiple choice as RACE, and regression: a label, one of a row's options, or a number."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mlm.data.tokenizer import Tokenizer
from mlm.finetune import metrics
from mlm.finetune.config import TaskConfig
from mlm.finetune.examples import Example, Frame, InputText, encode
from mlm.finetune.rows import (
    NO_LABEL,
    RowError,
    TaskRow,
    as_list,
    check_text,
    column_value,
    parse_label,
    quote,
    read_texts,
)
from mlm.finetune.task_type import Output, Prediction, RowExamples, TaskType, format_prediction
from mlm.inference.scoring import mean_stderr
from mlm.parallel.config import IGNORE_INDEX
from mlm.util.errors import Problem, type_of

if TYPE_CHECKING:
    from torch import Tensor


class Labelling(TaskType):
    """Base of the types that predict one of task.labels."""

    modules = ("sklearn.metrics",)
    names_labels = True
    gives_probabilities = True

    def loss(self, outputs: "Tensor", labels: "Tensor", lengths: "Tensor") -> "Tensor":
        """Cross-entropy, summed: outputs [E, C] or [E * C, 1] of C labels or options, labels [E]."""
        import torch.nn.functional as F  # late: checks of a task need no torch

        return F.cross_entropy(
            outputs.view(len(labels), -1), labels, ignore_index=IGNORE_INDEX, reduction="sum"
        )

    def predict(
        self, task: TaskConfig, row: TaskRow, examples: Sequence[Example], outputs: Sequence[Output]
    ) -> Prediction:
        (scores,) = outputs
        return Prediction(row.id, int(scores.argmax()), tuple(scores.tolist()))

    def standard_errors(
        self, task: TaskConfig, rows: Sequence[TaskRow], predictions: Sequence[Prediction]
    ) -> dict[str, float | None]:
        right = [float(row.label == p.value) for row, p in zip(rows, predictions, strict=True)]
        return {"accuracy": mean_stderr(right)} if "accuracy" in task.metrics else {}


class OneOrTwoTexts(TaskType):
    """Base of classification and regression: one example per row."""

    columns: tuple[Sequence[int], str] | None = ((1, 2), "one or two columns of texts")

    def make_examples(
        self, task: TaskConfig, rows: Sequence[TaskRow], tokenizer: Tokenizer, frame: Frame
    ) -> Iterator[RowExamples]:
        """Yield one example per row; the longer of two texts is truncated first."""
        columns = len(task.columns)
        ids = encode((text for row in rows for text in row.texts), tokenizer)
        for number, row in enumerate(rows):
            a = next(ids)
            if columns == 1:
                text, length = frame.one(a[: frame.room(1)]), len(a)
                was_truncated = length > frame.room(1)
            else:
                b, room = next(ids), frame.room(2)
                # longest_first of `tokenizers`: the longer is truncated to the other, and gets the odd token
                was_truncated = len(a) + len(b) > room
                if was_truncated:
                    short = min(len(a), len(b), room // 2)
                    size_a = short if len(a) <= len(b) else room - short
                    a, b = a[:size_a], b[: room - size_a]
                text = frame.two(a, b)
            yield [Example(number, (text,), row.label)], was_truncated

    def files(self, task: TaskConfig, stem: str) -> list[str]:
        return [f"{stem}.tsv"]

    def contents(self, task: TaskConfig, predictions: Sequence[Prediction]) -> list[str]:
        """Return GLUE's table, as gluebenchmark.com takes it."""
        lines = [f"{' '.join(p.id.split())}\t{format_prediction(task, p)}" for p in predictions]
        return ["\n".join(["index\tprediction", *lines, ""])]


class Classification(Labelling, OneOrTwoTexts):
    """One of task.labels."""

    metrics = metrics.OF_LABELS

    def num_labels(self, task: TaskConfig) -> int:
        return len(task.labels)

    def parse(self, task: TaskConfig, record: Mapping[str, Any], id: str) -> TaskRow:
        return TaskRow(id, read_texts(task, record, task.columns), parse_label(task, record.get(task.label)))

    def metric_problem(self, task: TaskConfig, name: str) -> Problem | None:
        if name not in ("f1", "accuracy_f1") or len(task.labels) <= 2:
            return None
        problem = f"task.metrics: {name} is of two labels"
        return Problem(("task.metrics", "task.labels"), problem, f"of {len(task.labels)} use macro_f1")


class MultipleChoice(Labelling):
    """One of a row's options: one text per option, one output per text."""

    columns = ((3,), "the columns of article, question and options")
    metrics = MappingProxyType({"accuracy": metrics.accuracy})

    def num_labels(self, task: TaskConfig) -> int:
        return 1

    def row_id(self, task: TaskConfig, name: str, earlier: int) -> str:
        return f"{name}-{earlier}"

    def parse(self, task: TaskConfig, record: Mapping[str, Any], id: str) -> TaskRow:
        *columns, column = task.columns
        texts = read_texts(task, record, columns)
        options = as_list(column_value(record, column))
        if options is None or not all(isinstance(option, str) for option in options):
            raise RowError(
                f"'{column}' holds {type_of(record[column])}, not a list of texts: fix or delete it"
            )
        if len(options) != len(task.labels):
            raise RowError(
                f"'{column}' holds {len(options)} options, task.labels {len(task.labels)}: fix or delete it"
            )
        checked = tuple(check_text(option, column) for option in options)
        return TaskRow(id, texts, parse_label(task, record.get(task.label)), checked)

    def make_examples(
        self, task: TaskConfig, rows: Sequence[TaskRow], tokenizer: Tokenizer, frame: Frame
    ) -> Iterator[RowExamples]:
        """Yield an example with one text per option.

        A text is question and option, truncated to task.question_length, and the truncated article:
        [CLS] question option [SEP] article [SEP], as in Megatron-LM's tasks/race. GPT-2 reads the article
        first, so that its last token attends to the option.
        """
        articles = encode((clean_text(row.texts[0]) for row in rows), tokenizer)
        questions = encode(
            (fill_blank(row.texts[1], option) for row in rows for option in row.options), tokenizer
        )
        limit = min(task.question_length or frame.max_length, frame.room(2))
        for number, (row, article) in enumerate(zip(rows, articles, strict=True)):
            texts, was_truncated = list[InputText](), False
            for _ in row.options:
                full_question = next(questions)
                question = full_question[:limit]
                part = article[: frame.room(2) - len(question)]
                texts.append(frame.two(part, question) if frame.causal else frame.two(question, part))
                was_truncated |= len(question) + len(part) < len(full_question) + len(article)
            yield [Example(number, tuple(texts), row.label)], was_truncated


class Regression(OneOrTwoTexts):
    """A number."""

    errors = metrics.ERRORS
    metrics = metrics.OF_NUMBERS
    modules = ("scipy.stats",)

    def num_labels(self, task: TaskConfig) -> int:
        return 1

    def parse(self, task: TaskConfig, record: Mapping[str, Any], id: str) -> TaskRow:
        """Return the row, its label a number or None. Raises RowError."""
        texts, value = read_texts(task, record, task.columns), record.get(task.label)
        if value is None or value == "":
            return TaskRow(id, texts, None)
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise RowError(f"{task.label}={quote(value)} is not a number: fix or delete it")
        if task.label_range is not None and not task.label_range[0] <= number <= task.label_range[1]:
            if number == NO_LABEL:
                return TaskRow(id, texts, None)
            low, high = task.label_range
            raise RowError(
                f"{task.label}={quote(value)} is not in {low:g} to {high:g}: fix or delete it, "
                f"or set task.label_range"
            )
        return TaskRow(id, texts, number)

    def loss(self, outputs: "Tensor", labels: "Tensor", lengths: "Tensor") -> "Tensor":
        """Squared error, summed: outputs [E, 1], labels [E]; NaN is not scored."""
        is_scored = ~labels.isnan()
        return ((outputs[:, 0] - labels.nan_to_num().to(outputs.dtype)) * is_scored).square().sum()

    def predict(
        self, task: TaskConfig, row: TaskRow, examples: Sequence[Example], outputs: Sequence[Output]
    ) -> Prediction:
        (scores,) = outputs
        return Prediction(row.id, float(scores[0]))


def fill_blank(question: str, option: str) -> str:
    """Return a question with an option in place of its blank, or after it.

    Source: Megatron-LM's tasks/race/data.py, which v1 was measured with.
    """
    return clean_text(question.replace("_", option) if "_" in question else f"{question} {option}")


def clean_text(text: str) -> str:
    """Return a text on one line, no two spaces in a row, none before a full stop.

    Source: Megatron-LM's clean_text.
    """
    text = re.sub(r"\s+", " ", text)
    for _ in range(3):  # matches in " . . . " overlap: one pass misses some
        text = text.replace(" . ", ". ")
    return text


CLASSIFICATION, CHOICE, REGRESSION = Classification(), MultipleChoice(), Regression()
