"""Types of task on conversations: answers of the assistant, and preferences among two (arXiv:2305.18290)."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from mlm.finetune.rows import ExampleError, RowError, TaskRow, check_text, present
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


def example_of(
    row: int, texts: Sequence[Tokens], max_length: int, label_of: Callable[[Any], Any], problem: str
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


QUESTIONS = ("question", "instruction", "input", "query")
"""Columns of prompts in other data sets."""


class Preferences(Chat):
    """Pairs of answers: texts, or messages of which the last is the assistant's."""

    batcher = "mlm.finetune.packing:PairPacker"
    loss_unit = "per pair"
    metric_names = ("loss", "accuracy", "margin")
    errors = frozenset({"loss"})
    columns = ((3,), "three columns: of prompts, chosen and rejected answers")
    needs_template = False

    def parse(self, task: TaskConfig, record: Mapping[str, Any], id: str) -> TaskRow:
        """Return the checked row of a record. Raises RowError.

        Without a prompt both answers are whole conversations.
        """
        prompt, *names = task.columns
        before = record.get(prompt)
        answers = [present(record, name) for name in names]
        if isinstance(before, str) or (before is None and all(isinstance(one, str) for one in answers)):
            found: Any = _texts(record, [before, *answers], task.columns)
            changes: tuple[str, ...] = ()
        else:
            pair = _conversations(record, [before, *answers], task)
            found, changes = [each.to_json() for each in pair], pair[0].changes
        if found[-1] == found[-2]:
            raise RowError(f"'{names[0]}' and '{names[1]}' are equal: fix or delete the row")
        return TaskRow(id, (json_text(found, names[0]),), 1, changes=changes)

    def make_examples(
        self, task: TaskConfig, rows: Sequence[TaskRow], tokenizer: Tokenizer, frame: Frame
    ) -> Iterator[RowExamples]:
        """Yield one example per pair, none for one whose answers begin after max_length tokens."""
        from mlm.finetune.packing import PairLabel  # imports torch

        pairs = [json.loads(row.texts[0]) for row in rows]
        for number, tokens in enumerate(_tokens_of_pairs(pairs, tokenizer, frame)):
            if isinstance(tokens, ExampleError):
                yield tokens
                continue
            problem = "an answer has no token: fill or delete the row"
            yield example_of(number, tokens, frame.max_length, PairLabel, problem)


def _texts(record: Mapping[str, Any], said: Sequence[Any], columns: Sequence[str]) -> list[str]:
    """Return prompt and answers that are texts; without a prompt their common beginning. Raises RowError."""
    if unread := [name for name in (SYSTEM, OPTIONS, TOOLS, *QUESTIONS, *MEDIA) if record.get(name)]:
        fix = "write messages, or set task.columns" if said[0] is None else "write messages"
        raise RowError(f"'{unread[0]}' is not read beside answers that are texts: {fix}")
    prompt, *texts = (check_text(text or "", name) for text, name in zip(said, columns, strict=True))
    for name, text in zip(columns[1:], texts, strict=True):
        if not text:
            raise RowError(f"'{name}' is empty: fill or delete it")
    if said[0] is None:
        size = min(common_start(*texts), *(len(text) - 1 for text in texts))
        size -= texts[0][:size].endswith(" ")
        prompt, texts = texts[0][:size], [text[size:] for text in texts]
    return [prompt, *texts]


def _conversations(record: Mapping[str, Any], said: Sequence[Any], task: TaskConfig) -> list[Conversation]:
    """Return both conversations, each with the number of messages of their prompt. Raises RowError.

    Without a prompt it is the messages with which both begin.
    """
    found, (before, *answers) = list[Conversation](), said
    for name, messages in zip(task.columns, said, strict=True):
        if not (isinstance(messages, list) and messages) and not (name == task.columns[0] and before is None):
            raise RowError(f"'{name}': no list of messages: fix or delete the row")
    if before is None:
        size = min(common_start(*answers), *(len(answer) - 1 for answer in answers))
        if not size:
            raise RowError(
                f"'{task.columns[1]}' and '{task.columns[2]}' begin with no common prompt: add one"
            )
        before, answers = answers[0][:size], [answer[size:] for answer in answers]
    for name, answer in zip(task.columns[1:], answers, strict=True):
        try:
            check_messages(before if name == task.columns[1] else answer)
            whole = [*before, *answer]
            found.append(make_conversation(record, whole, len(before), keep_nulls=task.keep_nulls))
        except ChatError as error:
            raise RowError(f"'{name}': {error}") from error
        if found[-1].messages[-1]["role"] != ASSISTANT:
            raise RowError(f"'{name}': its last message is not the assistant's: fix or delete the row")
    return found


def _tokens_of_pairs(
    pairs: Sequence[Any], tokenizer: Tokenizer, frame: Frame
) -> Iterator[tuple[Tokens, Tokens] | ExampleError]:
    """Yield the tokens of the chosen and the rejected text of each pair, or why there are none.

    Both answers begin where the first of them differs from the prompt.
    """
    for number, pair in enumerate(pairs):
        if isinstance(pair[0], str):
            # prompt and answer are one text with its end
            prompt, *whole = encode_texts([pair[0], pair[0] + pair[1], pair[0] + pair[2]], tokenizer)
            begin = min(common_start(prompt, each) for each in whole)
            ended = [np.concatenate([each, frame.end]) for each in whole]
            first, second = (Tokens(ids, np.arange(len(ids)) >= max(begin, 1)) for ids in ended)
            yield first, second
            continue
        if tokenizer.chat_template is None:
            problem = "holds messages, and the model has no chat template: set data.chat_template=…"
            yield ExampleError(number, problem)
            continue
        talks = (Conversation(*fields) for fields in pair)
        chosen, rejected = encode(talks, tokenizer, tokenizer.chat_template)
        if isinstance(chosen, ChatError) or isinstance(rejected, ChatError):
            yield ExampleError(number, str(chosen if isinstance(chosen, ChatError) else rejected))
            continue
        begin = min(int(np.sum(~each.is_answer)) for each in (chosen, rejected))
        first, second = (
            Tokens(each.ids, np.arange(len(each.ids)) >= max(begin, 1), each.notes)
            for each in (chosen, rejected)
        )
        yield first, second


PREFERENCES = Preferences()
