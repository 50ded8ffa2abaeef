"""Preference training: of two answers to a prompt, one was preferred (DPO, arXiv:2305.18290)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mlm.data.chat_template import ChatError
from mlm.data.conversation import ASSISTANT, Tokens, check_messages, encode
from mlm.data.tokenizer import Tokenizer
from mlm.finetune.chat import Chat, json_text, scored_text
from mlm.finetune.config import TaskConfig
from mlm.finetune.examples import Example, Frame
from mlm.finetune.examples import encode as encode_texts
from mlm.finetune.rows import ExampleError, RowError, TaskRow, check_text, present
from mlm.finetune.task_type import RowExamples
from mlm.parallel.labels import IGNORE_INDEX

PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
"""Columns, as TRL names them."""
REFERENCE_FREE = ("simpo", "orpo")


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
            texts = [check_text(before or "", prompt), *map(check_text, answers, names)]
            for name, text in zip(names, texts[1:], strict=True):
                if not text:
                    raise RowError(f"'{name}' is empty: fill or delete it")
            found: Any = texts
        else:
            found = [
                _conversation(before, answer, prompt, name)
                for answer, name in zip(answers, names, strict=True)
            ]
        if found[-1] == found[-2]:
            raise RowError(f"'{names[0]}' and '{names[1]}' are equal: fix or delete the row")
        return TaskRow(id, (json_text(found, names[0]),), 1)

    def make_examples(
        self, task: TaskConfig, rows: Sequence[TaskRow], tokenizer: Tokenizer, frame: Frame
    ) -> Iterator[RowExamples]:
        """Yield one example per pair, none for one whose answers begin after max_length tokens."""
        pairs = [json.loads(row.texts[0]) for row in rows]
        for number, tokens in enumerate(_tokens_of_pairs(pairs, tokenizer, frame)):
            texts, labels = zip(*(scored_text(each, frame.max_length) for each in tokens), strict=True)
            is_long = any(len(each.ids) > frame.max_length for each in tokens)
            if all((label != IGNORE_INDEX).any() for label in labels):
                from mlm.finetune.packing import PairLabel  # imports torch

                yield [Example(number, texts, PairLabel(labels))], is_long
            elif is_long:
                yield [], True
            else:
                raise ExampleError(number, "an answer has no token: fill or delete the row")


def _conversation(before: Any, answer: Any, prompt: str, name: str) -> list[Any]:
    """Return the messages of a prompt and an answer. Raises RowError."""
    try:
        said = [] if before is None else check_messages(before)
    except ChatError as error:
        raise RowError(f"'{prompt}': {error}") from error
    try:
        messages = check_messages(answer)
    except ChatError as error:
        raise RowError(f"'{name}': {error}") from error
    if messages[-1]["role"] != ASSISTANT:
        raise RowError(f"'{name}': its last message is not the assistant's: fix or delete the row")
    return [*said, *messages]


def _tokens_of_pairs(
    pairs: Sequence[Any], tokenizer: Tokenizer, frame: Frame
) -> Iterator[tuple[Tokens, Tokens]]:
    """Yield the tokens of the chosen and the rejected text of each pair. Raises ExampleError."""
    for number, pair in enumerate(pairs):
        if isinstance(pair[0], str):
            yield _tokens_of_texts(pair, tokenizer, frame)
            continue
        if tokenizer.chat_template is None:
            problem = "holds messages, and the model has no chat template: set data.chat_template=…"
            raise ExampleError(number, problem)
        talks = ((messages, None) for messages in pair)
        chosen, rejected = encode(talks, tokenizer, tokenizer.chat_template, "last")
        for each in (chosen, rejected):
            if isinstance(each, ChatError):
                raise ExampleError(number, str(each)) from each
        assert isinstance(chosen, Tokens)
        assert isinstance(rejected, Tokens)
        yield chosen, rejected


def _tokens_of_texts(pair: Sequence[str], tokenizer: Tokenizer, frame: Frame) -> tuple[Tokens, Tokens]:
    """Return prompt and answer as one text with its end, the answer from where it differs from the prompt."""
    prompt, *whole = encode_texts([pair[0], pair[0] + pair[1], pair[0] + pair[2]], tokenizer)
    common = min(_common(prompt, each) for each in whole)
    ids = [np.concatenate([each, frame.end]) for each in whole]
    chosen, rejected = (Tokens(each, np.arange(len(each)) >= max(common, 1)) for each in ids)
    return chosen, rejected


def _common(one: Any, other: Any) -> int:
    """Return the number of equal tokens at the beginning."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size


PREFERENCES = Preferences()
