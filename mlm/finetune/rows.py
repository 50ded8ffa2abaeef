"""A row of a task, and checks of the fields of a record. Errors are raised without the record's location."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlm.finetune.config import TaskConfig
from mlm.util.errors import lone_surrogate, type_of
from mlm.util.terminal import one_line

MAX_TEXT = 1 << 24  # characters; an article of 10,000 words has 60,000
NO_LABEL = -1  # withheld, in GLUE's test splits


class RowError(Exception):
    """A problem of a record in one line, with its fix."""


class ExampleError(RowError):
    """A row that has no example."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(problem)
        self.row = row
        """Index in its split."""


class MissingColumnError(RowError):
    """A record lacks a column of texts."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One question of a task."""

    id: str
    texts: tuple[str, ...]
    """In the order of task.columns."""
    label: Any
    """JSON values: the index of a label or option, a number, or answers, empty if unanswerable. None if
    unlabelled."""
    options: tuple[str, ...] = ()
    """Type choice: the options to choose from."""
    changes: tuple[str, ...] = ()
    """Changes made while reading, counted in the run's header."""


def read_texts(task: TaskConfig, record: Mapping[str, Any], columns: Sequence[str]) -> tuple[str, ...]:
    """Return the texts in these columns, none empty. Raises RowError."""
    texts = tuple(check_text(column_value(record, column), column) for column in columns)
    for column, text in zip(columns, texts, strict=True):
        if not text.strip() and not task.allow_empty:
            raise RowError(f"'{column}' is empty: fill or delete it, or set task.allow_empty=true")
    return texts


def column_value(record: Mapping[str, Any], column: str) -> Any:
    if column not in record:
        names = ", ".join(one_line(key)[:40] for key in list(record)[:20]) or "none"
        raise MissingColumnError(f"no column '{column}' (those there: {names}): set task.columns, or add it")
    return record[column]


def check_text(value: Any, column: str) -> str:
    """Return a text that UTF-8 can encode. Raises RowError."""
    if not isinstance(value, str):
        raise RowError(f"'{column}' holds {type_of(value)}, not a text: fix or delete it")
    if len(value) > MAX_TEXT:
        raise RowError(f"'{column}' has {len(value)} characters, {MAX_TEXT} is the limit: shorten it")
    if not value.isascii() and (half := lone_surrogate(value)) is not None:  # JSON can escape it
        raise RowError(f"'{column}' holds {half}: fix or delete it")
    return value


def parse_label(task: TaskConfig, value: Any) -> int | None:
    """Return the index of a label's name or number; None without a label. Raises RowError."""
    if isinstance(value, str) and value in task.labels:
        return task.labels.index(value)
    number = parse_whole_number(value)
    if number == NO_LABEL or value is None or value == "":
        return None
    if number is None or not 0 <= number < len(task.labels):
        names = ", ".join(task.labels[:20])
        raise RowError(
            f"{task.label}={quote(value)} is not a label: use 0 to {len(task.labels) - 1} or a name "
            f"({names}), or set task.labels"
        )
    return number


def row_name(record: Mapping[str, Any], column: str | None, number: int) -> str:
    """Return a row's name: the value of its id column, or the number of rows before it. Raises RowError."""
    value = None if column is None else record.get(column)
    if value is None:
        return str(number)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError(f"'{column}' holds {type_of(value)}; an id is a text or a whole number: fix it")
    return check_text(str(value), column or "")


def parse_whole_number(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_list(value: Any) -> list[Any] | None:
    return list(value) if isinstance(value, list | tuple) else None


def quote(value: Any) -> str:
    text = one_line(value)
    return repr(text if len(text) <= 60 else text[:60] + "…") if isinstance(value, str) else text[:60]
