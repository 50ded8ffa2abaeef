"""Preference training: of two answers to a prompt, one was preferred (DPO, arXiv:2305.18290)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

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
    make_conversation,
)
from mlm.data.tokenizer import Tokenizer
from mlm.finetune.chat import Chat, example_of, json_text
from mlm.finetune.config import TaskConfig
from mlm.finetune.examples import Frame
from mlm.finetune.examples import encode as encode_texts
from mlm.finetune.rows import ExampleError, RowError, TaskRow, check_text, present
from mlm.finetune.task_type import RowExamples

QUESTIONS = ("question", "instruction", "input", "query")
"""Columns of prompts in other data sets."""


class Preferences(Chat):
    """Pairs of answers: texts, or messages of which the last is the assistant's."""

    batcher = "mlm.finetune.pairs:PairPacker"
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
