"""A split of a task: its rows checked, with their places and a digest, from local files or the Hub."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import xxhash

from mlm.errors import UserError
from mlm.files.atomic import digest_name
from mlm.finetune.kinds import KINDS
from mlm.finetune.parsing import NO_ANSWER, MissingColumnError, Row, RowError, identity_of, shown
from mlm.finetune.sources import Placed, hub_records, local_records
from mlm.finetune.task_config import TaskConfig

MAX_FAULTS = 10
"""Faults of a split that are listed; the others are counted."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The rows of one split."""

    name: str
    """As it is asked for: validation, test_matched, …"""
    source: str
    """The folder or file, or what was taken from the Hub."""
    rows: Sequence[Row]
    places: Sequence[str]
    """Where each row is: file:line."""
    digest: str
    """Of the rows, whatever holds them, as `xxh3:<hex>`."""
    has_labels: bool
    """Whether there is something to score against; if not, rows can only be predicted."""
    left_out: int = 0
    """Rows of the file that belong to other subsets."""

    def __len__(self) -> int:
        return len(self.rows)


def read_split(task: TaskConfig, split: str, *, path: str | None, limit: int | None = None) -> Split:
    """The rows of a split, from the folder or file `path`, or from the Hub when that is None.

    Only the first `limit` rows are read. Raises UserError, with a line for each of the first faults and the
    number of the others; CorruptFileError.
    """
    records = hub_records(task, split) if path is None else local_records(task, split, path)
    belongs = Membership(task)
    rows, places, faults, seen = list[Row](), list[str](), Faults(), Counter[str]()
    parse = KINDS[task.kind].parse
    for place, record in islice(filter(belongs, records), limit):
        try:
            id = identity_of(record, task.id, len(places))
            seen[id] += 1
            if task.kind == "choice":  # an article has several questions
                id = f"{id}-{seen[id] - 1}"
            elif task.kind == "span" and seen[id] > 1:  # answers are handed in by id
                raise RowError(f"{task.id}={shown(id)} is another row's too: change or delete it")
            row = parse(task, record, id)
        except MissingColumnError as error:
            raise UserError(f"{place}: {error}") from error  # the other rows lack it too
        except RowError as error:
            faults.add(f"{place}: {error}")
        else:
            rows.append(row)
        places.append(place)
    faults.check()
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


class Membership:
    """Whether a record is of the task's subsets, as its id says; counts those that are not."""

    def __init__(self, task: TaskConfig) -> None:
        self.subsets, self.column = task.subsets, task.id
        self.left_out = 0

    def __call__(self, placed: Placed) -> bool:
        if not self.subsets or self.column is None or self.column not in placed[1]:
            return True  # without the column it is no row of the task: parsing names what is missing
        ours = str(placed[1][self.column]).startswith(self.subsets)
        self.left_out += not ours
        return ours

    def hint(self) -> str:
        """Why there may be no row."""
        if not self.left_out:
            return ""
        names = " or ".join(self.subsets)
        return f" ({self.left_out} have an {self.column} that does not begin with {names}: see task.subsets)"


class Faults:
    """What is wrong with rows, collected."""

    def __init__(self) -> None:
        self.lines, self.count = list[str](), 0

    def add(self, line: str) -> None:
        """Note a fault."""
        self.count += 1
        if len(self.lines) < MAX_FAULTS:
            self.lines.append(line)

    def check(self) -> None:
        """Raises UserError if there were any."""
        if self.count > len(self.lines):
            self.lines.append(f"and {self.count - len(self.lines):,} more rows like these")
        if self.lines:
            raise UserError("\n".join(self.lines))


def labels_are_there(
    task: TaskConfig, split: str, source: str, rows: Sequence[Row], places: Sequence[str]
) -> bool:
    """Whether the rows have labels: all, or none. Raises UserError."""
    # the Hub's SQuAD 2.0 has no is_impossible, and a test split withholds answers by an empty list too
    mistaken = task.kind == "span" and not task.unanswerable
    without = [place for row, place in zip(rows, places, strict=True) if row.label is None]
    if len(without) == len(rows):
        if split in (task.train, *task.validations):
            other = "; for SQuAD 2.0 use task=squad_v2" if mistaken else ""
            raise UserError(
                f"{source}: no row of split {split} has a label ('{task.label}'): set task.label, or give a "
                f"file with labels{other}"
            )
        return False
    faults = Faults()
    problem = NO_ANSWER if mistaken else f"no label ('{task.label}'): add it"
    for place in without:
        faults.add(f"{place}: {problem}, or delete the row")
    faults.check()
    return True


def digest_rows(rows: Sequence[Row]) -> str:
    """Digest of rows, in their order."""
    h = xxhash.xxh3_128()
    for row in rows:
        # Parquet may hold a label in 4 bytes: 3.8 is then 3.79999995
        label = f"{row.label:.6g}" if isinstance(row.label, float) else row.label
        h.update(json.dumps([row.id, row.texts, row.options, label]).encode())
        h.update(b"\n")
    return digest_name(h)
