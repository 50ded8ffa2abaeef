"""Records of files and of datasets of the Hub: a dict by column, with its location. Nothing is executed."""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO

from mlm.data.streams import (
    DAMAGED,
    WRITE_AGAIN,
    BlockReader,
    DamagedError,
    blocks,
    check_supported,
    open_binary,
    readable,
)
from mlm.util.errors import CorruptFileError, UserError, decode_problem
from mlm.util.extras import load_extra
from mlm.util.files import open_input
from mlm.util.object_store import is_stored
from mlm.util.terminal import one_line

Record = dict[str, Any]
Located = tuple[str, Record]
"""Location of a record (file:line), and the record."""

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
PACKED = (".gz", ".bz2", ".zst")
BOM = b"\xef\xbb\xbf"


def form_of(file: Path) -> str:
    """Return the suffix of a file that shows its format: .jsonl for a.jsonl.gz."""
    name = Path(file.name.lower())
    form = Path(name.stem).suffix if name.suffix in PACKED else name.suffix
    return "" if form == ".parquet" != name.suffix else form


def read_records(file: Path) -> Iterator[Located]:
    """Yield the records of a file of SUFFIXES, compressed or not. Raises UserError, CorruptFileError."""
    form = form_of(file)
    if form not in SUFFIXES:
        forms = f"{', '.join(SUFFIXES)} file, or one packed as {', '.join(PACKED)}"
        raise UserError(f"{file}: is of no known form: give a {forms}")
    with readable(file):
        if form == ".parquet":
            yield from _parquet_records(file)
        elif form in (".csv", ".tsv"):
            yield from _table_records(file, form)
        elif form != ".json" or is_json_lines(file):
            yield from _jsonl_records(file)
        else:
            yield from _json_records(file)


@contextmanager
def open_unpacked(file: Path) -> Iterator[BinaryIO]:
    """Open a file and decompress it. Raises OSError, UserError, CorruptFileError."""
    is_packed = file.suffix.lower() in PACKED
    try:
        with BufferedReader(BlockReader(blocks(str(file)))) if is_packed else open_input(file) as f:
            yield f
    except DamagedError as error:
        problem = f"{file} is {DAMAGED} ({one_line(error)[:200]})"
        raise CorruptFileError(f"{problem}: replace it, or {WRITE_AGAIN}") from error


def _jsonl_records(file: Path) -> Iterator[Located]:
    with open_unpacked(file) as f:
        for number, line in enumerate(f, 1):
            line = line.removeprefix(BOM) if number == 1 else line
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{file}:{number}: {json_problem(error)}: fix or delete it") from error
            if not isinstance(record, dict):
                raise UserError(f"{file}:{number}: not a JSON object: fix or delete it")
            yield f"{file}:{number}", record


def is_json_lines(file: Path) -> bool:
    """True if a .json file has an object in its first line, and more lines: a record in each line.

    Raises OSError, UserError, CorruptFileError.
    """
    with open_unpacked(file) as f:
        first, more = f.readline(1 << 26), f.read(64).strip()  # 64 MiB
    try:
        return bool(more) and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _json_records(file: Path) -> Iterator[Located]:
    """Yield the objects of a list, or of the list under "data"."""
    try:
        with open_unpacked(file) as f:
            content = json.loads(f.read())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: is not JSON ({one_line(error)[:120]}): fix it") from error
    if isinstance(content, dict):
        content = content.get("data", [content])
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise UserError(f"{file}: has no list of objects under 'data', as SQuAD's files have: fix it")
    for number, record in enumerate(content, 1):
        yield f"{file}:row {number}", record


def json_problem(error: ValueError | RecursionError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return decode_problem(error, f" at byte {error.start + 1}")
    if isinstance(error, json.JSONDecodeError):
        return f"not a line of JSON ({error.msg.removesuffix(' at')} at letter {error.pos + 1})"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return f"holds a number of more than {sys.get_int_max_str_digits():,} digits"


def _table_records(file: Path, form: str) -> Iterator[Located]:
    """Yield the rows below a line of column names. In a .tsv quotes are ordinary characters, as in GLUE's."""
    dialect: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if form == ".tsv" else {}
    csv.field_size_limit(max(csv.field_size_limit(), 1 << 24))  # letters of a cell
    with open_unpacked(file) as f:
        reader = csv.DictReader(TextIOWrapper(f, encoding="utf-8-sig", newline=""), **dialect)
        try:
            check_names(file, reader.fieldnames or ())
            for row in reader:
                if None in row:
                    problem = f"has {len(row[None])} more cells than the first line names"
                    raise UserError(f"{file}:{reader.line_num}: {problem}: quote its text, or fix it")
                yield f"{file}:{reader.line_num}", dict(row)
        # The inner reader also counts the lines of the current row.
        except csv.Error as error:
            location = f"{file}:{reader.reader.line_num}"
            raise UserError(f"{location}: {error}: fix it, or make a .jsonl of it") from error
        except UnicodeDecodeError as error:
            # Text is decoded in blocks, from the line after the last one that was read.
            line = reader.reader.line_num + 1 + error.object.count(b"\n", 0, error.start)
            raise UserError(f"{file}:{line}: is {decode_problem(error)}; save it as UTF-8") from error


def check_names(file: Path, names: Sequence[str]) -> None:
    if duplicates := [name for name in names if list(names).count(name) > 1]:
        raise UserError(f"{file}: has two columns '{one_line(duplicates[0])[:40]}': rename one, or delete it")


def _parquet_records(file: Path) -> Iterator[Located]:
    pa, row = load_extra("pyarrow", str(file)), 0
    try:
        with open_parquet(file) as table:
            check_names(file, table.schema_arrow.names)
            for group in range(table.num_row_groups):
                for batch in row_group_batches(table, group, 64):
                    for index in range(len(batch)):
                        row += 1
                        yield f"{file}:row {row}", batch.slice(index, 1).to_pylist()[0]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        check_supported(str(file), error)
        problem = f"{file} is not a Parquet file, {DAMAGED} ({one_line(error)[:200]})"
        raise CorruptFileError(f"{problem}: replace it, or {WRITE_AGAIN}") from error


def open_parquet(file: str | Path) -> Any:
    """Open a pyarrow ParquetFile. Needs pyarrow; raises its errors, and OSError.

    Texts are read as dictionary entries: a file of a few kilobytes can repeat the same 64 MB a million times,
    and memory holds one copy. Each row group has its own dictionaries: see `row_group_batches`.
    """
    parquet = load_extra("pyarrow.parquet", str(file))
    if not is_stored(str(file)):
        open_input(file).close()  # rejects a FIFO, for which pyarrow would wait
    source = open_binary(str(file)) if is_stored(str(file)) else file
    metadata = parquet.read_metadata(source)
    texts = [metadata.schema.column(i).path for i in range(len(metadata.schema))]
    return parquet.ParquetFile(
        source, metadata=metadata, pre_buffer=False, buffer_size=1 << 20, read_dictionary=texts
    )


def row_group_batches(table: Any, group: int, rows: int, columns: list[str] | None = None) -> Iterator[Any]:
    """Yield one row group of a ParquetFile in batches of at most `rows`. Raises pyarrow's errors.

    A batch over two row groups would hold two dictionaries, which pyarrow does not join in nested columns.
    """
    remaining = table.metadata.row_group(group).num_rows
    for batch in table.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False):
        remaining -= len(batch)
        yield batch
    if remaining:  # pyarrow ends in silence where a column has fewer rows than its group
        problem = f"row group {group} lacks {remaining} of its rows"
        raise load_extra("pyarrow", "Parquet").ArrowInvalid(problem)


@lru_cache(maxsize=4)
def hub_records(name: str, config: str | None, split: str, *, key: str, bring: str) -> Sequence[Record]:
    """Return the rows of a split of a dataset on the Hub. No code of a dataset is run.

    Raises UserError, which names the setting `key` and the files to `bring` instead.
    """
    datasets, source = load_extra("datasets", key), " ".join(filter(None, (name, config, split)))
    with explain_hub_errors(f"{key}: {source}", f"bring {bring} and give {key}=…"):
        # With the prefix `datasets` does not read a local folder of the same name.
        rows: Sequence[Record] = datasets.load_dataset(f"hf://datasets/{name}", config, split=split)
    return rows


@contextmanager
def explain_hub_errors(subject: str, fix: str) -> Iterator[None]:
    """Turn any error of `datasets` into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of datasets, huggingface_hub, httpx and pyarrow: no base class in common
        reason = " ".join(str(error).split())[:300]
        problem = f"could not be loaded from the Hub ({type(error).__name__}: {reason})"
        raise UserError(f"{subject} {problem}: {fix}") from error
