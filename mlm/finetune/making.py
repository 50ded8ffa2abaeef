"""Examples of classification, regression and choice; spans.py has those of questions on a context."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlm.data.tokenizer import Tokenizer
from mlm.finetune.parsing import Row
from mlm.finetune.task_config import TaskConfig
from mlm.finetune.tokens import Frame, Text, cut_longest, encode

Made = tuple[list["Example"], bool]
"""The examples of a row, and whether some of its tokens were cut off."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """What one output of the model is for."""

    row: int
    """Index of the row in its split; windows of one context share it."""
    texts: tuple[Text, ...]
    """One, or one per option of kind choice."""
    label: int | float | tuple[int, int] | None
    """Index of label or option, a number, or first and last token of the answer; None without a label."""


def make_pairs(task: TaskConfig, rows: Sequence[Row], tokenizer: Tokenizer, frame: Frame) -> Iterator[Made]:
    """One example per row: its text, or its two, of which the longer is cut first."""
    columns = len(task.columns)
    ids = encode((text for row in rows for text in row.texts), tokenizer)
    for number, row in enumerate(rows):
        a = next(ids)
        if columns == 1:
            text, length = frame.one(a[: frame.room(1)]), len(a)
            was_cut = length > frame.room(1)
        else:
            b = next(ids)
            kept = cut_longest(len(a), len(b), frame.room(2))
            text, was_cut = frame.two(a[: kept[0]], b[: kept[1]]), kept != (len(a), len(b))
        assert not isinstance(row.label, tuple)
        yield [Example(number, (text,), row.label)], was_cut


def make_choices(task: TaskConfig, rows: Sequence[Row], tokenizer: Tokenizer, frame: Frame) -> Iterator[Made]:
    """One text per option: question and option, cut to task.question_length, and what fits of the article.

    [CLS] question option [SEP] article [SEP] as Megatron-LM's tasks/race; GPT-2 reads the article first, so
    that its last token has seen the option.
    """
    articles = encode((tidy(row.texts[0]) for row in rows), tokenizer)
    asked = encode((question_with(row.texts[1], option) for row in rows for option in row.options), tokenizer)
    limit = min(task.question_length or frame.max_length, frame.room(2))
    for number, (row, article) in enumerate(zip(rows, articles, strict=True)):
        texts, was_cut = list[Text](), False
        for _ in row.options:
            whole = next(asked)
            question = whole[:limit]
            part = article[: frame.room(2) - len(question)]
            texts.append(frame.two(question, part) if frame.types else frame.two(part, question))
            was_cut |= len(question) + len(part) < len(whole) + len(article)
        assert not isinstance(row.label, tuple)
        yield [Example(number, tuple(texts), row.label)], was_cut


def question_with(question: str, option: str) -> str:
    """A question with an option in the place of its blanks, or behind it.

    Source: Megatron-LM's tasks/race/data.py, which v1 was measured with.
    """
    return tidy(question.replace("_", option) if "_" in question else f"{question} {option}")


def tidy(text: str) -> str:
    """A text on one line, no two spaces in a row, none before a full stop (Megatron-LM's clean_text)."""
    text = re.sub(r"\s+", " ", text)
    for _ in range(3):  # " . . . " overlaps: once does not find all
        text = text.replace(" . ", ". ")
    return text
