"""Splits: checked rows from local files or the Hub, with their locations and a digest, and their examples."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import overload

import xxhash

from mlm.data.tokenizer import Tokenizer
from mlm.finetune.examples import Example, frame
from mlm.finetune.rows import ExampleError, MissingColumnError, Row, RowError, identity_of
from mlm.finetune.sources import Placed, hub_records, local_records
from mlm.finetune.task_config import TaskConfig
from mlm.finetune.task_type import task_type
from mlm.util.atomic import digest_name
from mlm.util.errors import ConfigError, UserError

MAX_PROBLEMS = 10
"""Problems of a split that are listed; the others are counted."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The rows of one split."""

    name: str
    """As named in the task: validation, test_matched, …"""
    source: str
    """The folder or file, or the Hub dataset."""
    rows: Sequence[Row]
    places: Sequence[str]
    """Location of each row: file:line."""
    digest: str
    """Digest of the rows, in any file format, as `xxh3:<hex>`."""
    has_labels: bool
    """True if predictions can be scored; rows without labels can only be predicted."""
    left_out: int = 0
    """Rows of the file that belong to other subsets."""
    note: str = ""
    """Line on how its rows were chosen; empty if they are those of a file."""

    def __len__(self) -> int:
        return len(self.rows)


def read_split(task: TaskConfig, split: str, *, path: str | None, limit: int | None = None) -> Split:
    """Read the rows of a split from the folder or file `path`, or from the Hub if it is None.

    Only the first `limit` rows are read. Raises UserError, with a line for each of the first problems and
    the number of the others; CorruptFileError.
    """
    records = hub_records(task, split) if path is None else local_records(task, split, path)
    belongs = Membership(task)
    rows, places, problems, seen = list[Row](), list[str](), Problems(), Counter[str]()
    kind = task_type(task.kind)
    for place, record in islice(filter(belongs, records), limit):
        try:
            name = identity_of(record, task.id, len(places))
            seen[name] += 1
            row = kind.parse(task, record, kind.row_id(task, name, seen[name] - 1))
        except RowError as error:
            # a file without a column lacks it in every row: one line, beside those of other problems
            problems.add(place, error, once=isinstance(error, MissingColumnError))
        else:
            rows.append(row)
        places.append(place)
    problems.check()
    source = path if path is not None else f"{task.hub} {task.hub_config or ''}".rstrip()
    if not rows:
        raise UserError(f"{source}: split {split} holds no row{belongs.hint()}: give another file")
    return Split(
        name=split,
        source=source,
        rows=rows,
        places=places,
        digest=digest_rows(rows),
        has_labels=labels_are_there(task, split, source, rows, places),
        left_out=belongs.left_out,
    )


def read_part(task: TaskConfig, split: str, *, path: str | None) -> Split:
    """Read a split as `read_split`; of a single file of conversations those held out, or the others.

    Equal conversations are on one side. Which side is a function of the conversation and its file alone.
    Raises UserError, CorruptFileError.
    """
    found = read_split(task, split, path=path)
    if path is None or not Path(path).is_file() or not task_type(task.kind).is_chat:
        return found
    ranks = [xxhash.xxh3_64_intdigest(row.texts[0].encode()) for row in found.rows]
    distinct = sorted(set(ranks))
    if len(distinct) < 2:
        raise UserError(
            f"{path}: holds one conversation, and some are held out to validate on: add others, or give a "
            "folder with train.jsonl and validation.jsonl"
        )
    last = distinct[min(max(1, round(task.held_out * len(distinct))), len(distinct) - 1) - 1]
    chosen = [n for n, rank in enumerate(ranks) if (rank <= last) == (split != task.train)]
    rows, places = [found.rows[n] for n in chosen], [found.places[n] for n in chosen]
    note = f"{path}: {len(rows):,} of {len(found):,} conversations are {split}"
    return replace(found, rows=rows, places=places, digest=digest_rows(rows), note=note)


class Membership:
    """Filter of records by task.subsets, which counts those left out."""

    def __init__(self, task: TaskConfig) -> None:
        self.subsets, self.column = task.subsets, task.id
        self.left_out = 0

    def __call__(self, placed: Placed) -> bool:
        """True if the record belongs to the task."""
        if not self.subsets or self.column is None or self.column not in placed[1]:
            return True  # a record without the column is reported by parsing
        ours = str(placed[1][self.column]).startswith(self.subsets)
        self.left_out += not ours
        return ours

    def hint(self) -> str:
        """Return a possible reason for a split without rows."""
        if not self.left_out:
            return ""
        names = " or ".join(self.subsets)
        return f" ({self.left_out} have an {self.column} that does not begin with {names}: see task.subsets)"


class Problems:
    """Problems of rows, collected."""

    def __init__(self) -> None:
        self.lines, self.first, self.more = dict[str, int](), dict[str, str](), 0

    def add(self, place: str, problem: object, *, once: bool = False) -> None:
        """Note the problem of a row; with `once` list the first row with it, and count the others."""
        line = f"{place}: {problem}"
        if once and str(problem) in self.first:
            self.lines[self.first[str(problem)]] += 1
        elif len(self.lines) == MAX_PROBLEMS:
            self.more += 1
        else:
            self.lines[line] = 0
            self.first[str(problem)] = line

    def check(self) -> None:
        """Raise ConfigError if there were any."""
        lines = [f"{line} ({count:,} more rows)" if count else line for line, count in self.lines.items()]
        if self.more:
            lines.append(f"and {self.more:,} more rows like these")
        if lines:
            raise ConfigError(lines)


def labels_are_there(
    task: TaskConfig, split: str, source: str, rows: Sequence[Row], places: Sequence[str]
) -> bool:
    """Return True if all rows have labels, False if none has. Raises UserError otherwise."""
    kind = task_type(task.kind)
    without = [place for row, place in zip(rows, places, strict=True) if row.label is None]
    if len(without) == len(rows):
        if split in (task.train, *task.validations):
            raise UserError(
                f"{source}: no row of split {split} has a label ('{task.label}'): set task.label, or give a "
                f"file with labels{kind.unlabelled_split_hint(task)}"
            )
        return False
    problems = Problems()
    for place in without:
        problems.add(place, f"{kind.unlabelled_row(task)}, or delete the row")
    problems.check()
    return True


def digest_rows(rows: Sequence[Row]) -> str:
    """Return the digest of rows, in their order."""
    h = xxhash.xxh3_128()
    for row in rows:
        # Parquet may hold a label in 4 bytes: 3.8 is then 3.79999995
        label = f"{row.label:.6g}" if isinstance(row.label, float) else row.label
        h.update(json.dumps([row.id, row.texts, row.options, label]).encode())
        h.update(b"\n")
    return digest_name(h)


@dataclass(frozen=True, kw_only=True)
class Examples(Sequence[Example]):
    """The examples of a split, in the order of its rows."""

    items: tuple[Example, ...]
    truncated: int
    """Rows that lost tokens because they were too long."""
    left_out: int = 0
    """Those of them without an example: all that there is to learn was lost."""
    max_length: int
    """Maximum tokens of a text."""

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Example, ...]: ...
    def __getitem__(self, index: int | slice) -> Example | tuple[Example, ...]:
        return self.items[index]

    def __iter__(self) -> Iterator[Example]:
        return iter(self.items)

    def note(self, split: Split) -> str:
        """Return a line on truncated rows; empty if there are none."""
        if not self.truncated:
            return ""
        left_out = f", {self.left_out:,} of them left out: no answer begins in these" if self.left_out else ""
        return (
            f"{split.source}: {self.truncated:,} of {len(split):,} rows of {split.name} were truncated to "
            f"{self.max_length} tokens{left_out}"
        )


def make_examples(
    task: TaskConfig, split: Split, tokenizer: Tokenizer, *, causal: bool, max_length: int
) -> Examples:
    """Return the tokenised examples of a split: at least one for each row that is not left out.

    `max_length` counts special tokens. Raises UserError if the tokenizer lacks the special tokens, or if
    `max_length` leaves no room for a text.
    """
    whole = frame(tokenizer, causal=causal, max_length=max_length)
    kind = task_type(task.kind)
    if whole.room(2) < (least := kind.least_room(task)):
        raise UserError(
            f"task.max_length={max_length} leaves no room for texts: "
            f"set {least + max_length - whole.room(2)} or more"
        )
    items, truncated, left_out = list[Example](), 0, 0
    try:
        for examples, was_truncated in kind.make_examples(task, split.rows, tokenizer, whole):
            items += examples
            truncated += was_truncated
            left_out += not examples
    except ExampleError as error:
        raise UserError(f"{split.places[error.row]}: {error}") from error
    return Examples(items=tuple(items), truncated=truncated, left_out=left_out, max_length=max_length)
