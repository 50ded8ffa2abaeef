"""Supervised finetuning on conversations: the loss is taken on the assistant's answers alone."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mlm.data.chat_template import ChatError
from mlm.data.chat_tokens import Tokens, encode
from mlm.data.conversation import ASSISTANT, Conversation, is_trained, read_conversation
from mlm.data.tokenizer import Tokenizer
from mlm.finetune.config import TaskConfig
from mlm.finetune.examples import Example, Frame, InputText
from mlm.finetune.rows import ExampleError, RowError, TaskRow, check_text, present
from mlm.finetune.task_type import Output, Prediction, RowExamples, TaskType
from mlm.parallel.labels import IGNORE_INDEX
from mlm.util.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor


class Chat(TaskType):
    """Conversations: a row is a list of messages with a role and a content, at least one the assistant's."""

    head = "language_model"
    batcher = "mlm.finetune.packing:Packer"
    loss_unit = "nats per token of the answers"
    metric_names: tuple[str, ...] = ("loss", "perplexity")
    errors = frozenset({"loss", "perplexity"})
    columns = ((1,), "one column, of messages")
    is_chat = True

    def num_labels(self, task: TaskConfig) -> int:
        """Return 0: the model keeps its output layer."""
        return 0

    def parse(self, task: TaskConfig, record: Mapping[str, Any], id: str) -> TaskRow:
        """Return the checked row of a record, in any form of `read_conversation`. Raises RowError."""
        column = task.columns[0]
        try:
            said = read_conversation(record, column, keep_nulls=task.keep_nulls)
        except KeyError:
            present(record, column)  # raises the error of a record without it
            raise
        except ChatError as error:
            raise RowError(f"'{column}': {error}") from error
        roles = [message["role"] for message in said.messages if is_trained(message)]
        if not (answers := roles[said.prompt :].count(ASSISTANT)):
            raise RowError(f"'{column}' has no message of the assistant: add the answer, or delete the row")
        return TaskRow(id, (json_text(said.to_json(), column),), answers, changes=said.changes)

    def make_examples(
        self, task: TaskConfig, rows: Sequence[TaskRow], tokenizer: Tokenizer, frame: Frame
    ) -> Iterator[RowExamples]:
        """Yield one example per conversation, none for one whose answers begin after max_length tokens."""
        template = tokenizer.chat_template
        assert template is not None, "read with the tokenizer"
        said = (Conversation(*json.loads(row.texts[0])) for row in rows)
        for number, tokens in enumerate(encode(said, tokenizer, template, task.answers)):
            if isinstance(tokens, ChatError):
                yield ExampleError(number, str(tokens))
                continue
            problem = "the template renders its answers as no text: fill or delete them"
            yield example_of(number, [tokens], frame.max_length, lambda labels: labels[0], problem)

    def problems(self, task: TaskConfig) -> list[Problem]:
        """Return the problems of a task's columns, labels and splits."""
        problems = super().problems(task)
        if task.tests:
            problem = f"kind {task.kind} writes no predictions of splits"
            fix = "leave it out, and use `mlm eval` or `mlm generate chat=true`"
            problems.append(Problem.at("task.tests", list(task.tests), problem, fix))
        return problems

    def loss(self, outputs: "Tensor", labels: "Tensor", lengths: "Tensor") -> "Tensor":
        """Not called: the objective is that of the batcher."""
        raise AssertionError("answers are scored token by token")

    def predict(
        self, task: TaskConfig, row: TaskRow, examples: Sequence[Example], outputs: Sequence[Output]
    ) -> Prediction:
        """Not called: `mlm generate` answers."""
        raise AssertionError("a conversation has no prediction")


def example_of(
    row: int,
    texts: Sequence[Tokens],
    max_length: int,
    label_of: Callable[[Any], Any],
    problem: str,
) -> RowExamples:
    """Return the example of a row's texts, none where no answer begins in `max_length` tokens of one.

    `label_of` makes its label of those of each text: the next token where an answer holds it, else −100.
    `problem` is that of an answer without tokens.
    """
    inputs, labels, notes = list[InputText](), list[NDArray[np.int64]](), dict[str, None]()
    for text in texts:
        ids = text.ids[:max_length].copy()  # a view would keep the rest
        inputs.append(InputText(ids, len(ids)))
        labels.append(np.full(len(ids), IGNORE_INDEX, dtype=np.int64))
        labels[-1][:-1] = np.where(text.is_answer[1 : len(ids)], ids[1:], IGNORE_INDEX)
        is_cut = bool(text.is_answer[max_length:].any())
        notes |= dict.fromkeys((*text.notes, *["an answer was cut"] * is_cut))
    is_long = any(len(text.ids) > max_length for text in texts)
    if all((each != IGNORE_INDEX).any() for each in labels):
        return [Example(row, tuple(inputs), label_of(tuple(labels)), notes=tuple(notes))], is_long
    return ([], True) if is_long else ExampleError(row, problem)


def json_text(value: Any, column: str) -> str:
    """Return a value of a row as checked JSON. Raises RowError, which names the column."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"'{column}' holds more than JSON values ({error}): fix or delete it") from error
    return check_text(text, column)


CHAT = Chat()
