"""Records checked and made rows: texts, options and a label. Faults are said without the record's place."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlm.finetune.task_config import TaskConfig
from mlm.terminal import plain

MAX_TEXT = 1 << 24  # letters; an article of 10,000 words has 60,000
NO_LABEL = -1
"""How GLUE's test splits write that a label is withheld."""

NO_ANSWER = "has no answer, as in SQuAD 2.0: use task=squad_v2, or set task.unanswerable=true"
"""What is wrong with a question of SQuAD 2.0 in SQuAD 1.1."""


class RowError(Exception):
    """What is wrong with a record, in one line, with the remedy."""


class MissingColumnError(RowError):
    """A record lacks a column of texts."""


class Answer(NamedTuple):
    """Words of a context that answer its question."""

    text: str
    start: int
    """Letters before it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One question of a task."""

    id: str
    texts: tuple[str, ...]
    """In the order of task.columns."""
    label: int | float | tuple[Answer, ...] | None
    """Index into labels or options, a number, or the answers (none: unanswerable); None without a label."""
    options: tuple[str, ...] = ()
    """Of kind choice."""


def parse_classification(task: TaskConfig, record: Mapping[str, Any], id: str) -> Row:
    """A row of one or two texts and the index of a label. Raises RowError."""
    return Row(id, texts_of(task, record, task.columns), index_of_label(task, record.get(task.label)))


def parse_regression(task: TaskConfig, record: Mapping[str, Any], id: str) -> Row:
    """A row of one or two texts and a number. Raises RowError."""
    return Row(id, texts_of(task, record, task.columns), number_of_label(task, record.get(task.label)))


def parse_choice(task: TaskConfig, record: Mapping[str, Any], id: str) -> Row:
    """A row of an article, a question and its options. Raises RowError."""
    *columns, column = task.columns
    texts = texts_of(task, record, columns)
    options = sequence(present(record, column))
    if options is None or not all(isinstance(option, str) for option in options):
        raise RowError(f"'{column}' holds {kind_of(record[column])}, not a list of texts: mend or delete it")
    if len(options) != len(task.labels):
        raise RowError(
            f"'{column}' holds {len(options)} options, task.labels {len(task.labels)}: mend or delete it"
        )
    checked = tuple(encodable(option, column) for option in options)
    return Row(id, texts, index_of_label(task, record.get(task.label)), checked)


def parse_span(task: TaskConfig, record: Mapping[str, Any], id: str) -> Row:
    """A row of a context, a question and the answers that are found in the context. Raises RowError."""
    texts = texts_of(task, record, task.columns)
    answers = answers_of(task, record.get(task.label))
    if answers == () and not task.unanswerable:
        if record.get("is_impossible"):
            raise RowError(NO_ANSWER)
        answers = None
    for answer in answers or ():
        found = texts[0][answer.start : answer.start + len(answer.text)]
        if answer.start < 0 or found != answer.text or not answer.text:
            raise RowError(
                f"answer_start={answer.start} of '{task.label}' is not where {shown(answer.text)} is: the "
                f"context has {shown(found)} there: mend or delete it"
            )
    return Row(id, texts, answers)


def texts_of(
    task: TaskConfig, record: Mapping[str, Any], columns: "tuple[str, ...] | list[str]"
) -> tuple[str, ...]:
    """The texts under these columns, none empty. Raises RowError."""
    texts = tuple(encodable(present(record, column), column) for column in columns)
    for column, text in zip(columns, texts, strict=True):
        if not text.strip() and not task.allow_empty:
            raise RowError(f"'{column}' is empty: fill or delete it, or set task.allow_empty=true")
    return texts


def present(record: Mapping[str, Any], column: str) -> Any:
    """The value under a column. Raises MissingColumnError."""
    if column not in record:
        known = ", ".join(plain(key)[:40] for key in list(record)[:20]) or "none"
        raise MissingColumnError(f"no column '{column}' (those there: {known}): set task.columns, or add it")
    return record[column]


def encodable(value: Any, column: str) -> str:
    """A text that UTF-8 can hold. Raises RowError."""
    if not isinstance(value, str):
        raise RowError(f"'{column}' holds {kind_of(value)}, not a text: mend or delete it")
    if len(value) > MAX_TEXT:
        raise RowError(f"'{column}' has {len(value)} letters, {MAX_TEXT} is the limit: cut it")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON can spell what no UTF-8 holds
            raise RowError(f"'{column}' holds half a surrogate pair: mend or delete it") from error
    return value


def index_of_label(task: TaskConfig, value: Any) -> int | None:
    """The number of a label, given by name or number; None when there is none. Raises RowError."""
    if isinstance(value, str) and value in task.labels:
        return task.labels.index(value)
    number = whole_number(value)
    if number == NO_LABEL or value is None or value == "":
        return None
    if number is None or not 0 <= number < len(task.labels):
        names = ", ".join(task.labels[:20])
        raise RowError(
            f"{task.label}={shown(value)} is no label: use 0 to {len(task.labels) - 1} or a name ({names}), "
            f"or set task.labels"
        )
    return number


def number_of_label(task: TaskConfig, value: Any) -> float | None:
    """A label that is a number; None when there is none. Raises RowError."""
    if value is None or value == "":
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RowError(f"{task.label}={shown(value)} is no number: mend or delete it")
    if task.label_range is not None and not task.label_range[0] <= number <= task.label_range[1]:
        if number == NO_LABEL:
            return None
        low, high = task.label_range
        raise RowError(
            f"{task.label}={shown(value)} is not in {low:g} to {high:g}: mend or delete it, "
            f"or set task.label_range"
        )
    return number


def answers_of(task: TaskConfig, value: Any) -> tuple[Answer, ...] | None:
    """Answers in the Hub's form, {text: [...], answer_start: [...]}, or in SQuAD's own, a list of
    {text, answer_start}; None when there are none. Raises RowError."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        texts, starts = sequence(value.get("text")), sequence(value.get("answer_start"))
        if texts is None or starts is None or len(texts) != len(starts):
            raise RowError(f"'{task.label}' has not as many text as answer_start: mend or delete it")
        pairs = list(zip(texts, starts, strict=True))
    else:
        items = sequence(value)
        if items is None or not all(isinstance(item, Mapping) for item in items):
            raise RowError(
                f"'{task.label}' holds {kind_of(value)}, not text and answer_start: mend or delete it"
            )
        pairs = [(item.get("text"), item.get("answer_start")) for item in items]
    answers = list[Answer]()
    for text, start in pairs:
        number = whole_number(start)
        if number is None:
            raise RowError(
                f"answer_start={shown(start)} of '{task.label}' is no whole number: mend or delete it"
            )
        answers.append(Answer(encodable(text, task.label), number))
    return tuple(answers)


def identity_of(record: Mapping[str, Any], column: str | None, number: int) -> str:
    """What names a row: the value of its id column, or how many rows come before. Raises RowError."""
    value = None if column is None else record.get(column)
    if value is None:
        return str(number)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError(f"'{column}' holds {kind_of(value)}; an id is a text or a whole number: mend it")
    return encodable(str(value), column or "")


def whole_number(value: Any) -> int | None:
    """A whole number, also as text or as 1.0; None when it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str):
        short = len(value) <= 20 and value.removeprefix("-").isascii() and value.removeprefix("-").isdigit()
        return int(value) if short else None
    return value if isinstance(value, int) else None


def sequence(value: Any) -> list[Any] | None:
    """A list; also of a library that has its own. None when it is none."""
    return list(value) if isinstance(value, list | tuple) else None


def kind_of(value: Any) -> str:
    """The type of a value, in words."""
    return "nothing" if value is None else f"a {type(value).__name__}"


def shown(value: Any) -> str:
    """A value of a file, short and harmless."""
    text = plain(value)
    return repr(text if len(text) <= 60 else text[:60] + "…") if isinstance(value, str) else text[:60]
