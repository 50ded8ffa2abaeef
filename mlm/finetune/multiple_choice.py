"""Multiple choice: an article, a question, and options of which one is right, as RACE."""

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from mlm.data.tokenizer import Tokenizer
from mlm.finetune import metrics
from mlm.finetune.classification import best_label, cross_entropy, errors_of_labels
from mlm.finetune.config import TaskConfig
from mlm.finetune.examples import Example, Frame, Text, encode
from mlm.finetune.rows import Row, RowError, encodable, index_of_label, present, sequence, texts_of
from mlm.finetune.task_type import Made, Output, Prediction, TaskType
from mlm.util.errors import type_of


class MultipleChoice(TaskType):
    """One of a row's options: one text per option, one output per text."""

    columns = ((3,), "the columns of article, question and options")
    metrics = MappingProxyType({"accuracy": metrics.accuracy})
    modules = ("sklearn.metrics",)
    names_labels = True
    gives_probabilities = True

    def num_labels(self, task: TaskConfig) -> int:
        """Return the outputs per text."""
        return 1

    def row_id(self, task: TaskConfig, name: str, earlier: int) -> str:
        """Return the id of a question: an article has several."""
        return f"{name}-{earlier}"

    def parse(self, task: TaskConfig, record: Mapping[str, Any], id: str) -> Row:
        """Return the checked row of a record. Raises RowError."""
        *columns, column = task.columns
        texts = texts_of(task, record, columns)
        options = sequence(present(record, column))
        if options is None or not all(isinstance(option, str) for option in options):
            raise RowError(
                f"'{column}' holds {type_of(record[column])}, not a list of texts: fix or delete it"
            )
        if len(options) != len(task.labels):
            raise RowError(
                f"'{column}' holds {len(options)} options, task.labels {len(task.labels)}: fix or delete it"
            )
        checked = tuple(encodable(option, column) for option in options)
        return Row(id, texts, index_of_label(task, record.get(task.label)), checked)

    def make_examples(
        self, task: TaskConfig, rows: Sequence[Row], tokenizer: Tokenizer, frame: Frame
    ) -> Iterator[Made]:
        """Yield an example of one text per option.

        A text is question and option, truncated to task.question_length, and what fits of the article:
        [CLS] question option [SEP] article [SEP], as Megatron-LM's tasks/race. GPT-2 reads the article first,
        so that its last token has seen the option.
        """
        articles = encode((tidy(row.texts[0]) for row in rows), tokenizer)
        asked = encode(
            (with_option(row.texts[1], option) for row in rows for option in row.options), tokenizer
        )
        limit = min(task.question_length or frame.max_length, frame.room(2))
        for number, (row, article) in enumerate(zip(rows, articles, strict=True)):
            texts, was_truncated = list[Text](), False
            for _ in row.options:
                whole = next(asked)
                question = whole[:limit]
                part = article[: frame.room(2) - len(question)]
                texts.append(frame.two(part, question) if frame.causal else frame.two(question, part))
                was_truncated |= len(question) + len(part) < len(whole) + len(article)
            yield [Example(number, tuple(texts), row.label)], was_truncated

    def loss(self, outputs: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        """Cross-entropy over the C options, summed: outputs [E * C, 1], labels [E]."""
        return cross_entropy(outputs.view(len(labels), -1), labels)

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


def with_option(question: str, option: str) -> str:
    """Return a question with an option in place of its blank, or after it.

    Source: Megatron-LM's tasks/race/data.py, which v1 was measured with.
    """
    return tidy(question.replace("_", option) if "_" in question else f"{question} {option}")


def tidy(text: str) -> str:
    """Return a text on one line, no two spaces in a row, none before a full stop.

    Source: Megatron-LM's clean_text.
    """
    text = re.sub(r"\s+", " ", text)
    for _ in range(3):  # " . . . " overlaps: once does not find all
        text = text.replace(" . ", ". ")
    return text


CHOICE = MultipleChoice()
