"""The records of a split: from .jsonl, .json, .parquet, .csv, .tsv, RACE's folders of .txt, or the Hub.

A record is a dict of columns as the Hub's data set has them. Files are untrusted: sizes are bounded,
only strings, numbers and lists of them are read, and nothing is executed.
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlm.corpus.read.tables import FORMATS
from mlm.finetune.task_config import TaskConfig
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.extras import load_extra

Record = dict[str, Any]
Placed = tuple[str, Record]
"""Location of a record (file:line), and the record."""

SUFFIXES = (".jsonl", ".parquet", ".json", ".csv", ".tsv")
MAX_BYTES = 1 << 31  # of one file: QQP has 60 MB, RACE 150 MB
MAX_JSON = 1 << 28  # of a file that must be held whole: SQuAD 2.0 has 42 MB
MAX_LINE = 1 << 24  # of one record: 16 MiB
BATCH_ROWS = 64
MAX_BATCH = 1 << 27  # of rows of a table: 2 MiB each
KEY = "data.path"


def local_records(task: TaskConfig, split: str, path: str) -> Iterator[Placed]:
    """Yield the records of a split below a folder, or of a file. Raises UserError, CorruptFileError."""
    for file in find_files(Path(path), split, task.subsets):
        try:
            if (size := file.stat().st_size) > MAX_BYTES:
                raise UserError(f"{file} has {size} bytes, {MAX_BYTES} is the limit: shorten it")
            yield from read_file(file)
        except OSError as error:
            raise UserError(f"{KEY}={path}: {error.strerror} ({file}): give what can be read") from error


def find_files(path: Path, split: str, subsets: tuple[str, ...]) -> list[Path]:
    """Return the files of a split: `path` itself, or those below it with the split's name.

    {split}.jsonl and the like; {split}-00000-of-00002.parquet as the Hub stores it; {split}-v1.1.json as
    SQuAD is published; {split}/{subset}/*.txt as RACE is; any of these below a folder named after a subset.
    `dev` is another name for `validation`. Raises UserError.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{KEY}={path}: no such file or folder: give one with {split}.jsonl, or a file")
    roots = folders_of(path, subsets) or [path]
    names = dict.fromkeys([split, split.replace("validation", "dev")])
    for name in names:
        found = [file for root in roots for file in files_named(root, name, subsets)]
        if found:
            return found
    raise UserError(f"{KEY}={path}: has no split {split}: give a folder with {split}.jsonl, or a file")


def files_named(root: Path, name: str, subsets: tuple[str, ...]) -> list[Path]:
    """Return the files of a split in a folder. Raises UserError if there are several to choose from."""
    plain = [[f"{name}{suffix}"] for suffix in SUFFIXES]
    published = [[f"{name}-*-of-*.parquet"], [f"{name}-v[0-9]*.json"], [f"{name}/*.txt"]]
    by_subset = [f"{folder.relative_to(root)}/*.txt" for folder in folders_of(root / name, subsets)]
    ways = [
        [file for pattern in patterns for file in sorted(root.glob(pattern))]
        for patterns in [*plain, *published, by_subset]
    ]
    found = [files for files in ways if files]
    if len(found) > 1:
        places = " and ".join(str(files[0]) for files in found[:2])
        raise UserError(f"{KEY}: both {places} hold the split {name}: name one of them, or delete one")
    return found[0] if found else []


def folders_of(path: Path, subsets: tuple[str, ...]) -> list[Path]:
    """Return the folders of all subsets; empty if there are none. Raises UserError if some are missing."""
    found = {subset: path / subset for subset in subsets}
    there = [folder for folder in found.values() if folder.is_dir()]
    if there and len(there) < len(found):
        missing = ", ".join(subset for subset, folder in found.items() if not folder.is_dir())
        raise UserError(
            f"{KEY}: {path} has no folder {missing}: add it, or set task.subsets to what there is"
        )
    return there


def read_file(file: Path) -> Iterator[Placed]:
    """Return the records of a file. Raises UserError, CorruptFileError, OSError."""
    match file.suffix:
        case ".jsonl":
            return jsonl_records(file)
        case ".parquet":
            return parquet_records(file)
        case ".csv" | ".tsv":
            return table_records(file)
        case ".json":
            return squad_records(str(file), load_json(file))
        case ".txt":
            return race_records(str(file), load_json(file))
    raise UserError(f"{KEY}: {file} is of no known form: give a {', '.join(SUFFIXES)} file")


def jsonl_records(file: Path) -> Iterator[Placed]:
    """Yield one object per line; blank lines are skipped."""
    with open(file, "rb") as f:
        number = 0
        while line := f.readline(MAX_LINE + 1):
            number += 1
            place = f"{file}:{number}"
            if len(line) > MAX_LINE:
                raise UserError(f"{place}: a line of more than {MAX_LINE} bytes: shorten or delete it")
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # ValueError covers bad UTF-8 too
                raise UserError(f"{place}: not a line of JSON: fix or delete it") from error
            if not isinstance(record, dict):
                raise UserError(f"{place}: not a JSON object: fix or delete it")
            yield place, record


def load_json(file: Path) -> Any:
    """Return the content of a JSON file. Raises UserError, OSError."""
    if (size := file.stat().st_size) > MAX_JSON:
        raise UserError(f"{file} has {size} bytes, {MAX_JSON} is the limit: make a .jsonl of it")
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: is not JSON: give another file") from error


def table_records(file: Path) -> Iterator[Placed]:
    """Yield the rows below a line of column names. In a .tsv quotes are ordinary characters, as in GLUE's."""
    tsv = file.suffix == ".tsv"
    with open(file, encoding="utf-8-sig", newline="") as f:
        reader = csv.DictReader(
            f, dialect="excel-tab" if tsv else "excel", quoting=csv.QUOTE_NONE if tsv else 0
        )
        try:
            for row in reader:
                yield f"{file}:{reader.line_num}", {key: row[key] for key in row if key is not None}
        except csv.Error as error:
            raise UserError(f"{file}:{reader.line_num}: {error}: fix it, or make a .jsonl of it") from error
        except UnicodeDecodeError as error:
            raise UserError(
                f"{file}:{reader.line_num + 1}: is not UTF-8 ({error.reason}): convert it"
            ) from error


def parquet_records(file: Path) -> Iterator[Placed]:
    """Yield the rows of a Parquet table. Needs pyarrow."""
    pa, pq = (load_extra(module, f"{KEY}={file}") for module in ("pyarrow", "pyarrow.parquet"))
    row = 0
    try:
        schema = pq.read_schema(file)
        # A small file can hold the same large text in every row: as entries of a dictionary it is held once.
        texts = [field.name for field in schema if field.type in (pa.string(), pa.large_string())]
        with pq.ParquetFile(file, pre_buffer=False, read_dictionary=texts) as table:
            for batch in table.iter_batches(BATCH_ROWS, use_threads=False):
                if unpacked_bytes(batch) > MAX_BATCH:
                    raise UserError(
                        f"{file}:row {row + 1}: more text than {MAX_BATCH} bytes in {len(batch)} rows: "
                        "shorten it"
                    )
                for record in batch.to_pylist():
                    row += 1
                    yield f"{file}:row {row}", record
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise CorruptFileError(f"{file} is no Parquet file, or a damaged one: replace it") from error


def unpacked_bytes(batch: Any) -> int:
    """Return the maximum size of a batch's rows if no two share texts."""
    compute, types = (load_extra(module, KEY) for module in ("pyarrow.compute", "pyarrow.types"))
    size = int(batch.nbytes)
    for column in batch.columns:
        if types.is_dictionary(column.type) and len(column.dictionary):
            size += len(column) * (compute.max(compute.binary_length(column.dictionary)).as_py() or 0)
    return size


def hub_records(task: TaskConfig, split: str) -> Iterator[Placed]:
    """Yield the records of a split on the Hub. No code of a dataset is run. Raises UserError."""
    if task.hub is None:
        raise UserError(
            f"{KEY}=null: task {task.name} has no data set on the Hub: give {KEY}=… or task.hub=…"
        )
    datasets = load_extra("datasets", f"{KEY}=null")
    name = f"{task.hub} {task.hub_config or ''} {split}".replace("  ", " ")
    try:
        # the prefix keeps `datasets` from taking a folder of the same name for it
        builder = datasets.load_dataset_builder(f"hf://datasets/{task.hub}", task.hub_config)
        if builder.name not in FORMATS:
            raise UserError(f"task.hub={task.hub} holds {builder.name}: convert it to .jsonl")
        builder.download_and_prepare()
        rows = builder.as_dataset(split=split)
    except UserError:
        raise
    except Exception as error:  # of datasets, huggingface_hub, httpx and pyarrow: no base class in common
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{KEY}=null: {name} could not be loaded from the Hub ({type(error).__name__}: {reason}): bring "
            f"it as files such as {split}.jsonl or .parquet and give {KEY}=FOLDER"
        ) from error
    for number, record in enumerate(rows, 1):
        yield f"{name} row {number}", record


def squad_records(file: str, content: Any) -> Iterator[tuple[str, Record]]:
    """Yield (location, record) of every question of SQuAD's JSON.

    Its form is {"data": [{title, paragraphs: [{context, qas}]}]}. A list of objects, or one under "data", is
    taken as records themselves. Raises UserError.
    """
    articles = content.get("data") if isinstance(content, dict) else content
    for number, article in enumerate(members(articles, file, "data"), 1):
        if "paragraphs" not in article:
            yield f"{file}:row {number}", article
            continue
        place = f"{file}:article {number}"
        for at, paragraph in enumerate(members(article["paragraphs"], place, "paragraphs"), 1):
            here = f"{place} paragraph {at}"
            for index, qa in enumerate(members(paragraph.get("qas"), here, "qas"), 1):
                record = {**qa, "context": paragraph.get("context"), "title": article.get("title")}
                yield f"{here} question {index}", record


def race_records(file: str, content: Any) -> Iterator[tuple[str, Record]]:
    """Yield (location, record) of every question of one of RACE's files.

    Its form is {article, questions, options, answers, id}. Raises UserError.
    """
    columns = ("questions", "options")
    if not isinstance(content, dict) or not all(isinstance(content.get(key), list) for key in columns):
        raise UserError(
            f"{file}: is no article of RACE (article, questions, options, answers, id): remove it"
        )
    questions, options, answers = (content.get(key) for key in (*columns, "answers"))
    assert isinstance(questions, list)
    assert isinstance(options, list)
    answers = [None] * len(questions) if answers is None else answers
    if not isinstance(answers, list) or not len(questions) == len(options) == len(answers):
        raise UserError(f"{file}: not as many questions as options and answers: fix it")
    for index, question in enumerate(questions):
        yield (
            f"{file}:question {index + 1}",
            {
                "example_id": content.get("id"),
                "article": content.get("article"),
                "question": question,
                "options": options[index],
                "answer": answers[index],
            },
        )


def members(value: Any, place: str, name: str) -> list[Record]:
    """Return a list of objects. Raises UserError."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UserError(f"{place}: has no list of objects under '{name}', as SQuAD's files have: fix it")
    return value
