"""Splits: checked rows from local files or the Hub, with their locations and a digest, and their examples."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from mlm.config.fields import exact
from mlm.data.records import PACKED, SUFFIXES, Located, Record, form_of, hub_records, read_records
from mlm.data.row_forms import standard_form
from mlm.data.tokenizer import Tokenizer
from mlm.finetune.config import TaskConfig
from mlm.finetune.examples import Example, frame
from mlm.finetune.registry import task_type
from mlm.finetune.rows import ExampleError, MissingColumnError, RowError, TaskRow, row_name
from mlm.util.errors import ConfigError, UserError, format_value
from mlm.util.files import digest_name, read_input_text
from mlm.util.terminal import one_line

KEY = "data.path"
MAX_PROBLEMS = 10
"""Problems of a split that are listed; the others are counted."""
RowProblem = tuple[str, RowError]
"""Location of a row, and why it cannot be used."""
RowProblems = Sequence[RowProblem]


@dataclass(frozen=True, kw_only=True)
class TaskSplit:
    """The rows of one split."""

    name: str
    """As named in the task: validation, test_matched, …"""
    source: str
    """The folder or file, or the Hub dataset."""
    rows: Sequence[TaskRow]
    locations: Sequence[str]
    """Location of each row: file:line."""
    digest: str
    """Digest of the rows, in any file format, as `xxh3:<hex>`."""
    has_labels: bool
    """True if predictions can be scored; rows without labels can only be predicted."""
    note: str = ""
    """Line on how its rows were chosen; empty if it has all rows of a file."""
    skipped: RowProblems = ()
    """Rows that were left out because they cannot be read: their locations and why."""

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, numbers: Sequence[int]) -> "TaskSplit":
        """Return the split with these rows only, and the digest of all."""
        return replace(
            self, rows=[self.rows[n] for n in numbers], locations=[self.locations[n] for n in numbers]
        )


def read_split(
    task: TaskConfig,
    split: str,
    *,
    path: str | None,
    columns: Mapping[str, str] | None = None,
    skips: bool = False,
    check: Callable[[TaskSplit], RowProblems] = lambda split: (),
) -> TaskSplit:
    """Read the rows of a split from the folder or file `path`, or from the Hub if it is None.

    `columns` maps the task's columns to the file's; `skips` leaves out unreadable rows; `check` returns the
    problems of others. Raises UserError, with the `problem_lines`; CorruptFileError.
    """
    kind, source = task_type(task.kind), path or f"{task.hub} {task.hub_config or ''}".rstrip()
    rows, locations, earlier = list[TaskRow](), list[str](), Counter[str]()
    problems, skipped, outside, number = list[RowProblem](), list[RowProblem](), 0, -1
    renamed = ", ".join(f"{name} read from the column {column}" for name, column in (columns or {}).items())
    unlabelled = RowError(f"no label ('{task.label}'): add it, or delete the row")
    for location, record in rename_columns(read_split_records(task, split, path), columns or {}, source):
        # parsing reports a record without the column
        if task.subsets and not str(record.get(task.id or "", task.subsets[0])).startswith(task.subsets):
            outside += 1
            continue
        try:
            number += 1
            name = row_name(record, task.id, number)
            earlier[name] += 1
            record, change = standard_form(record, task.columns) if kind.is_chat else (record, "")
            row = kind.parse(task, record, kind.row_id(task, name, earlier[name] - 1))
            rows.append(replace(row, changes=(*row.changes, *filter(None, (renamed, change)))))
            locations.append(location)
            if rows[-1].label is None:
                problems.append((location, unlabelled))
        except RowError as error:
            (skipped if skips else problems).append((location, error))
    has_labels = any(row.label is not None for row in rows)
    unreadable = [(location, error) for location, error in problems if error is not unlabelled]
    if rows and not has_labels:
        problems = unreadable.copy()
        if split in (task.train, *task.validations):
            missing = f"no row of split {split} has a label ('{task.label}'): set task.label, or add labels"
            problems.insert(0, (source, RowError(missing)))
    task_split = TaskSplit(
        name=split,
        source=source,
        rows=rows,
        locations=locations,
        digest=digest_rows(rows),
        has_labels=has_labels,
        skipped=skipped,
    )
    unusable = check(task_split)
    skippable = [] if skips else [*unreadable, *(unusable if kind.is_chat else ())]
    raise_problems([*problems, *unusable], skippable)
    if not rows:
        hint = f" ({outside} have an {task.id} that begins with none of task.subsets={[*task.subsets]})"
        raise UserError(f"{source}: split {split} holds no row{hint * bool(outside)}: give another file")
    return task_split


def held_out_part(task: TaskConfig, split: TaskSplit, path: str | None) -> TaskSplit:
    """Return a split that was read from `path`; only its part of a single file of conversations.

    The file is divided into task.train and validation by the hash of each conversation, equal ones together.
    Raises UserError.
    """
    if path is None or not Path(path).is_file() or not task_type(task.kind).is_chat:
        return split
    ranks = [xxhash.xxh3_64_intdigest(row.texts[0].encode()) for row in split.rows]
    distinct = sorted(set(ranks))
    if len(distinct) < 2:
        raise UserError(
            f"{path}: holds one conversation, and some are held out to validate on: add others, or give a "
            "folder with train.jsonl and validation.jsonl"
        )
    last = distinct[min(max(1, round(exact(task.held_out) * len(distinct))), len(distinct) - 1) - 1]
    part = split.select([n for n, rank in enumerate(ranks) if (rank <= last) == (split.name != task.train)])
    note = f"{path}: {len(part):,} of {len(split):,} conversations are {split.name}"
    return replace(part, digest=digest_rows(part.rows), note=note)


def raise_problems(problems: RowProblems, skippable: RowProblems) -> None:
    """Raise ConfigError if there are problems of rows, with the setting that skips the skippable ones."""
    lines = problem_lines(problems)
    if skippable and not isinstance(skippable[0][1], MissingColumnError):
        lines[-1] += "; data.bad_rows=skip leaves such rows out"
    if lines:
        raise ConfigError(lines)


def problem_lines(problems: RowProblems) -> list[str]:
    """Return the first problems of rows and their locations, and the number of further ones.

    A column that all rows lack is one line, with the number of rows.
    """
    missing = Counter(str(error) for _, error in problems if isinstance(error, MissingColumnError))
    lines = list[str]()
    for location, error in problems:
        count = missing.get(str(error), 1)
        if count:
            lines.append(f"{location}: {error}" + (f" ({count - 1:,} more rows)" if count > 1 else ""))
        if str(error) in missing:
            missing[str(error)] = 0
    if more := len(lines[MAX_PROBLEMS:]):
        lines[MAX_PROBLEMS:] = [f"and {more:,} more rows like these"]
    return lines


def digest_rows(rows: Sequence[TaskRow]) -> str:
    h = xxhash.xxh3_128()
    for row in rows:
        # six digits: a float32 label of Parquet, 3.79999995, equals 3.8 of JSON
        label = f"{row.label:.6g}" if isinstance(row.label, float) else row.label
        h.update(json.dumps([row.id, row.texts, row.options, label]).encode())
        h.update(b"\n")
    return digest_name(h)


@dataclass(frozen=True, kw_only=True)
class TokenizedSplit:
    """A split and its examples."""

    split: TaskSplit
    examples: Sequence[Example]
    """In the order of the rows: at least one for each row that is not excluded."""
    truncated: int
    """Rows that lost tokens because they were too long."""
    excluded_samples: int
    """Truncated rows without an example: they lost all their answers."""
    max_length: int
    """Maximum tokens of a text."""
    problems: RowProblems = ()
    """Rows that were left out because they have no example: their locations and why."""

    def notes(self) -> list[str]:
        """Return lines on the choice of rows, and on skipped, rewritten and truncated ones."""
        notes, split = [self.split.note] if self.split.note else [], self.split
        changes = Counter(note for row in split.rows for note in row.changes)
        changes += Counter(note for example in self.examples for note in example.notes)
        notes += [
            f"{split.source}: {count:,} rows of {split.name}: {note}" for note, count in changes.items()
        ]
        if skipped := [*split.skipped, *self.problems]:
            notes.append(
                f"{split.source}: {len(skipped):,} rows of {split.name} skipped (data.bad_rows=skip)"
            )
            notes += [f"skipped {line}" for line in problem_lines(skipped)]
        if self.truncated:
            count = self.excluded_samples
            excluded = f", {count:,} of them left out: no answer begins in these" if count else ""
            notes.append(
                f"{split.source}: {self.truncated:,} of {len(split):,} rows of {split.name} were truncated "
                f"to {self.max_length} tokens{excluded}"
            )
        return notes


def tokenize(
    task: TaskConfig,
    split: TaskSplit,
    tokenizer: Tokenizer,
    *,
    causal: bool,
    max_length: int,
    skips: bool = False,
) -> TokenizedSplit:
    """Return a split with its examples; `skips` leaves out conversations that have none.

    `max_length` counts special tokens. Raises UserError if the tokenizer lacks the special tokens, or if
    `max_length` leaves no room for a text; ConfigError with the problems of rows.
    """
    special_tokens, kind = frame(tokenizer, causal=causal, max_length=max_length), task_type(task.kind)
    if missing := max(0, kind.least_room(task) - special_tokens.room(2)):
        raise UserError(
            f"task.max_length={max_length} leaves no room for texts: set {max_length + missing} or more"
        )
    examples, truncated, excluded_samples = list[Example](), 0, 0
    problems = list[RowProblem]()
    for result in kind.make_examples(task, split.rows, tokenizer, special_tokens):
        if isinstance(result, ExampleError):
            problems.append((split.locations[result.row], result))
            continue
        examples_of_row, was_truncated = result
        examples += examples_of_row
        truncated += was_truncated
        excluded_samples += not examples_of_row
    # only conversations may be left out: rows of other types have a prediction each
    if not (skips and kind.is_chat):
        raise_problems(problems, problems if kind.is_chat else ())
    return TokenizedSplit(
        split=split,
        examples=examples,
        truncated=truncated,
        excluded_samples=excluded_samples,
        max_length=max_length,
        problems=problems,
    )


# ----- records of files, RACE's and SQuAD's as published, and of the Hub


def read_split_records(task: TaskConfig, split: str, path: str | None) -> Iterator[Located]:
    """Yield the records of a split of a folder or file, or of the Hub. Raises UserError, CorruptFileError."""
    if path is not None:
        for file in find_files(Path(path), split, task.subsets):
            yield from read_file(file)
        return
    if task.hub is None:
        raise UserError(
            f"{KEY}=null: task {task.name} has no data set on the Hub: give {KEY}=… or task.hub=…"
        )
    bring = f"it as files such as {split}.jsonl or .parquet in a FOLDER"
    rows = hub_records(task.hub, task.hub_config, split, key=KEY, bring=bring)
    name = " ".join(filter(None, (task.hub, task.hub_config, split)))
    for number, record in enumerate(rows, 1):
        yield f"{name} row {number}", record


def rename_columns(rows: Iterable[Located], columns: Mapping[str, str], source: str) -> Iterator[Located]:
    """Yield rows with the file's columns renamed to the task's. Raises UserError for one that no row has."""
    missing, names = set(columns.values()), dict[str, None]()
    for location, record in rows:
        if columns:
            missing -= record.keys()
            names |= dict.fromkeys(record)
            renamed = {name: record[column] for name, column in columns.items() if column in record}
            record = {key: value for key, value in record.items() if key not in columns.values()} | renamed
        yield location, record
    if missing:
        choices = ", ".join(one_line(name)[:40] for name in list(names)[:20])
        problem = f"{source} has no column {', '.join(sorted(missing))}: use {choices}"
        raise UserError(f"data.columns={format_value(dict(columns))}: {problem}")


def find_files(path: Path, split: str, subsets: tuple[str, ...]) -> list[Path]:
    """Return the files of a split: `path` itself, or the files below it with the split's name.

    {split}.jsonl and the like; {split}-00000-of-00002.parquet as on the Hub; {split}-v1.1.json as SQuAD is
    published; {split}/{subset}/*.txt as RACE is; any of these in a folder named after a subset, or else in
    `data`, as in a clone from the Hub. `dev` is another name for `validation`. Raises UserError.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{KEY}={path}: no such file or folder: give one with {split}.jsonl, or a file")
    roots = folders_of(path, subsets) or [path]
    for name in dict.fromkeys([split, split.replace("validation", "dev")]):
        if files := [file for root in roots for file in files_named(root, name, subsets)]:
            return files
    if (path / "data").is_dir():
        return find_files(path / "data", split, subsets)
    raise UserError(f"{KEY}={path}: has no split {split}: give a folder with {split}.jsonl, or a file")


def files_named(root: Path, name: str, subsets: tuple[str, ...]) -> list[Path]:
    """Return the files of a split in a folder. Raises UserError if there are several to choose from."""
    suffixes = [suffix + packing for suffix in SUFFIXES for packing in ("", *PACKED)]
    plain = [[f"{name}{suffix}"] for suffix in suffixes]
    sharded = [[f"{name}-*-of-*{suffix}"] for suffix in suffixes]
    published = [[f"{name}-v[0-9]*.json"], [f"{name}/*.txt"]]
    by_subset = [f"{folder.relative_to(root)}/*.txt" for folder in folders_of(root / name, subsets)]
    files_by_form = [
        [file for pattern in patterns for file in sorted(root.glob(pattern))]
        for patterns in [*plain, *sharded, *published, by_subset]
    ]
    choices = [files for files in files_by_form if files]
    if len(choices) > 1:
        locations = " and ".join(str(files[0]) for files in choices[:2])
        raise UserError(f"{KEY}: both {locations} hold the split {name}: name one of them, or delete one")
    files = choices[0] if choices else []
    shards = {int(total[1]) for file in files if (total := re.search(r"-\d+-of-(\d+)", file.name))}
    if shards and shards != {len(files)}:
        present = f"{len(files)} of {max(shards)} files {files[0].name}"
        raise UserError(f"{KEY}: there are {present} and the like: add the others, or name one file")
    return files


def folders_of(path: Path, subsets: tuple[str, ...]) -> list[Path]:
    """Return the folders of all subsets; empty if there are none. Raises UserError if some are missing."""
    missing = [subset for subset in subsets if not (path / subset).is_dir()]
    if 0 < len(missing) < len(subsets):
        raise UserError(
            f"{KEY}: {path} has no folder {', '.join(missing)}: add it, or set task.subsets to what there is"
        )
    return [] if missing else [path / subset for subset in subsets]


def read_file(file: Path) -> Iterator[Located]:
    if file.suffix != ".txt":
        return squad_records(file) if form_of(file) == ".json" else read_records(file)
    text = read_input_text(file)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: is not JSON: give another file") from error
    return race_records(str(file), content)


def squad_records(file: Path) -> Iterator[Located]:
    """Yield (location, record) of every question of SQuAD's JSON, and other records as they are.

    Its form is {"data": [{title, paragraphs: [{context, qas}]}]}. Raises UserError.
    """
    for number, (location, article) in enumerate(read_records(file), 1):
        if "paragraphs" not in article:
            yield location, article
            continue
        location = f"{file}:article {number}"
        for n, paragraph in enumerate(object_list(article["paragraphs"], location, "paragraphs"), 1):
            place = f"{location} paragraph {n}"
            for index, qa in enumerate(object_list(paragraph.get("qas"), place, "qas"), 1):
                record = {**qa, "context": paragraph.get("context"), "title": article.get("title")}
                yield f"{place} question {index}", record


def race_records(file: str, content: Any) -> Iterator[Located]:
    """Yield (location, record) of every question of one of RACE's files.

    Its form is {article, questions, options, answers, id}. Raises UserError.
    """
    article = content if isinstance(content, dict) else {}
    questions, options, answers = (article.get(key) for key in ("questions", "options", "answers"))
    if not isinstance(questions, list) or not isinstance(options, list):
        raise UserError(
            f"{file}: is not an article of RACE (article, questions, options, answers, id): remove it"
        )
    answers = [None] * len(questions) if answers is None else answers
    if not isinstance(answers, list) or not len(questions) == len(options) == len(answers):
        raise UserError(f"{file}: not as many questions as options and answers: fix it")
    shared = {"example_id": article.get("id"), "article": article.get("article")}
    for number, (question, choices, answer) in enumerate(zip(questions, options, answers, strict=True), 1):
        record = {**shared, "question": question, "options": choices, "answer": answer}
        yield f"{file}:question {number}", record


def object_list(value: Any, location: str, name: str) -> list[Record]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UserError(f"{location}: has no list of objects under '{name}', as SQuAD's files have: fix it")
    return value
