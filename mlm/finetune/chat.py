"""Types of task on conversations: the assistant's answers, and preferences (arXiv:2305.18290)."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mlm.data.chat_template import ChatError
from mlm.data.chat_tokens import Tokens, common_start, encode
from mlm.data.conversation import (
    ASSISTANT,
    MEDIA,
    OPTIONS,
    SYSTEM,
    TOOLS,
    Conversation,
    check_messages,
    is_trained,
    make_conversation,
    read_conversation,
)
from mlm.data.tokenizer import Tokenizer
from mlm.finetune.config import TaskConfig
from mlm.finetune.examples import Example, Frame, InputText
from mlm.finetune.examples import encode as encode_texts
from mlm.finetune.rows import ExampleError, RowError, TaskRow, check_text, column_value
from mlm.finetune.task_type import Output, Prediction, RowExamples, TaskType
from mlm.parallel.config import IGNORE_INDEX
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
        return 0

    def parse(self, task: TaskConfig, record: Mapping[str, Any], id: str) -> TaskRow:
        """Return the checked row of a record, in any form of `read_conversation`. Raises RowError."""
        column = task.columns[0]
        try:
            talk = read_conversation(record, column, keep_nulls=task.keep_nulls)
        except KeyError:
            column_value(record, column)  # raises the error of a record without it
            raise
        except ChatError as error:
            raise RowError(f"'{column}': {error}") from error
        roles = [message["role"] for message in talk.messages if is_trained(message)]
        if not (answers := roles[talk.prompt :].count(ASSISTANT)):
            raise RowError(f"'{column}' has no message of the assistant: add the answer, or delete the row")
        return TaskRow(id, (json_text(talk.to_json(), column),), answers, changes=talk.changes)

    def make_examples(
        self, task: TaskConfig, rows: Sequence[TaskRow], tokenizer: Tokenizer, frame: Frame
    ) -> Iterator[RowExamples]:
        """Yield one example per conversation, none for one whose answers begin after max_length tokens."""
        template = tokenizer.chat_template
        assert template is not None, "read with the tokenizer"
        talks = (Conversation(*json.loads(row.texts[0])) for row in rows)
        problem = "the template renders its answers as no text: fill or delete them"
        for number, tokens in enumerate(encode(talks, tokenizer, template, task.answers)):
            if isinstance(tokens, ChatError):
                yield ExampleError(number, str(tokens))
            else:
                yield make_example(number, [tokens], frame.max_length, lambda labels: labels[0], problem)

    def problems(self, task: TaskConfig) -> list[Problem]:
        problems = super().problems(task)
        if task.tests:
            problem = f"kind {task.kind} writes no predictions of splits"
            fix = "leave it out, and use `mlm eval` or `mlm generate chat=true`"
            problems.append(Problem.at("task.tests", list(task.tests), problem, fix))
        return problems

    def loss(self, outputs: "Tensor", labels: "Tensor", lengths: "Tensor") -> "Tensor":
        raise AssertionError("answers are scored token by token")

    def predict(
        self, task: TaskConfig, row: TaskRow, examples: Sequence[Example], outputs: Sequence[Output]
    ) -> Prediction:
        raise AssertionError("a conversation has no prediction")


class Preferences(Chat):
    """Pairs of answers: texts, or messages of which the last is the assistant's."""

    batcher = "mlm.finetune.packing:PairPacker"
    loss_unit = "per pair"
    metric_names = ("loss", "accuracy", "margin")
    errors = frozenset({"loss"})
    columns = ((3,), "three columns: of prompts, chosen and rejected answers")
    needs_template = False

    def parse(self, task: TaskConfig, record: Mapping[str, Any], id: str) -> TaskRow:
        """Return the checked row of a record: a prompt and two texts, or two conversations with one prompt.

        Without a prompt column the answers hold it. Raises RowError.
        """
        prompt, *names = task.columns
        before = record.get(prompt)
        answers = [column_value(record, name) for name in names]
        pair: list[Any]
        changes: tuple[str, ...] = ()
        if isinstance(before, str) or (before is None and all(isinstance(text, str) for text in answers)):
            pair = read_text_pair(record, before, answers, task.columns)
        else:
            talks = read_message_pair(record, before, answers, task)
            pair, changes = [talk.to_json() for talk in talks], talks[0].changes
        if pair[-1] == pair[-2]:
            raise RowError(f"'{names[0]}' and '{names[1]}' are equal: fix or delete the row")
        return TaskRow(id, (json_text(pair, names[0]),), 1, changes=changes)

    def make_examples(
        self, task: TaskConfig, rows: Sequence[TaskRow], tokenizer: Tokenizer, frame: Frame
    ) -> Iterator[RowExamples]:
        """Yield one example per pair, none for one whose answers begin after max_length tokens."""
        from mlm.finetune.packing import PairLabel  # imports torch

        problem = "an answer has no token: fill or delete the row"
        for number, row in enumerate(rows):
            try:
                texts = encode_pair(json.loads(row.texts[0]), tokenizer, frame)
            except ChatError as error:
                yield ExampleError(number, str(error))
            else:
                yield make_example(number, texts, frame.max_length, PairLabel, problem)


CHAT, PREFERENCES = Chat(), Preferences()


def make_example(
    row: int, texts: Sequence[Tokens], max_length: int, label_of: Callable[[Any], Any], problem: str
) -> RowExamples:
    """Return the example of a row's texts, none where no answer begins in `max_length` tokens of one.

    `label_of` makes its label from the labels of each text: the next token where an answer holds it, else
    −100. `problem` is reported for an answer without tokens.
    """
    inputs, labels, notes = list[InputText](), list[NDArray[np.int64]](), dict[str, None]()
    for text in texts:
        ids = text.ids[:max_length].copy()  # a view would hold the full text in memory
        inputs.append(InputText(ids, len(ids)))
        labels.append(np.full(len(ids), IGNORE_INDEX, dtype=np.int64))
        labels[-1][:-1] = np.where(text.is_answer[1 : len(ids)], ids[1:], IGNORE_INDEX)
        notes |= dict.fromkeys(text.notes)
        if text.is_answer[max_length:].any():
            notes["an answer was cut"] = None
    is_long = any(len(text.ids) > max_length for text in texts)
    if all((label != IGNORE_INDEX).any() for label in labels):
        return [Example(row, tuple(inputs), label_of(tuple(labels)), notes=tuple(notes))], is_long
    return ([], True) if is_long else ExampleError(row, problem)


def json_text(value: Any, column: str) -> str:
    """Return a value of a row as checked JSON. Raises RowError, which names the column."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"'{column}' holds more than JSON values ({error}): fix or delete it") from error
    return check_text(text, column)


def read_text_pair(
    record: Mapping[str, Any], prompt: str | None, answers: Sequence[Any], columns: Sequence[str]
) -> list[str]:
    """Return prompt and two answers as texts; the prompt may be their common beginning. Raises RowError."""
    questions = ("question", "instruction", "input", "query")  # columns of prompts in other data sets
    if ignored := [name for name in (SYSTEM, OPTIONS, TOOLS, *questions, *MEDIA) if record.get(name)]:
        fix = "write messages, or set task.columns" if prompt is None else "write messages"
        raise RowError(f"'{ignored[0]}' is not read beside answers that are texts: {fix}")
    texts = [check_text(text or "", name) for text, name in zip((prompt, *answers), columns, strict=True)]
    for name, text in zip(columns[1:], texts[1:], strict=True):
        if not text:
            raise RowError(f"'{name}' is empty: fill or delete it")
    if prompt is None:
        _, chosen, rejected = texts
        size = min(common_start(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
        size -= chosen[:size].endswith(" ")
        return [chosen[:size], chosen[size:], rejected[size:]]
    return texts


def read_message_pair(
    record: Mapping[str, Any], prompt: Any, answers: Sequence[Any], task: TaskConfig
) -> list[Conversation]:
    """Return both conversations, with the number of messages in their prompt. Raises RowError.

    Without a prompt column the prompt is their common first messages.
    """
    column, *names = task.columns
    for name, messages in zip(task.columns, (prompt, *answers), strict=True):
        if not (isinstance(messages, list) and messages) and not (name == column and prompt is None):
            raise RowError(f"'{name}': no list of messages: fix or delete the row")
    if prompt is None:
        size = min(common_start(*answers), *(len(answer) - 1 for answer in answers))
        if not size:
            raise RowError(f"'{names[0]}' and '{names[1]}' begin with no common prompt: add one")
        prompt, answers = answers[0][:size], [answer[size:] for answer in answers]
    talks = list[Conversation]()
    for name, answer in zip(names, answers, strict=True):
        try:
            check_messages(prompt if name == names[0] else answer)
            messages = [*prompt, *answer]
            talks.append(make_conversation(record, messages, len(prompt), keep_nulls=task.keep_nulls))
        except ChatError as error:
            raise RowError(f"'{name}': {error}") from error
        if talks[-1].messages[-1]["role"] != ASSISTANT:
            raise RowError(f"'{name}': its last message is not the assistant's: fix or delete the row")
    return talks


def encode_pair(pair: Sequence[Any], tokenizer: Tokenizer, frame: Frame) -> list[Tokens]:
    """Return the tokens of the chosen and the rejected text of a pair. Raises ChatError.

    Both answers begin at the first token where one of the texts differs from the prompt.
    """
    if isinstance(pair[0], str):
        # prompt and answer are tokenised as one text
        prompt, *texts = encode_texts([pair[0], pair[0] + pair[1], pair[0] + pair[2]], tokenizer)
        begin = min(common_start(prompt, text) for text in texts)
        ended = [np.concatenate([text, frame.end]) for text in texts]
        return [Tokens(ids, np.arange(len(ids)) >= max(begin, 1)) for ids in ended]
    if tokenizer.chat_template is None:
        raise ChatError("holds messages, and the model has no chat template: set data.chat_template=…")
    rendered = list[Tokens]()
    for tokens in encode((Conversation(*fields) for fields in pair), tokenizer, tokenizer.chat_template):
        if isinstance(tokens, ChatError):
            raise tokens
        rendered.append(tokens)
    begin = min(int(np.sum(~text.is_answer)) for text in rendered)
    return [replace(text, is_answer=np.arange(len(text.ids)) >= max(begin, 1)) for text in rendered]
