"""Documents of Parquet files: the text's column (and the id's), a few rows at a time. Needs pyarrow."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from mlm.corpus.read.long_text import LONG, Utf8Text
from mlm.corpus.read.openers import DamagedError, damage_is_told
from mlm.corpus.read.records import BadRecordError, Document, Intake, Place, Shard, readable
from mlm.extras import load_extra

BATCH_ROWS = 256
BUFFER = 1 << 20  # bytes read ahead per column


def open_table(path: str, text_key: str | None = None) -> Any:
    """A pyarrow ParquetFile. Raises DamagedError, and UserError when it cannot be read or pyarrow is missing.

    Texts are read as entries of a dictionary: a file of a few kilobytes can say the same 64 MB a million
    times, and no more than one copy is made of it.
    """
    parquet = load_extra("pyarrow.parquet", f"input {path}")
    as_dictionary = [text_key] if text_key is not None else None
    with readable(path), damage_is_told():
        file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER, read_dictionary=as_dictionary)
    if any(rows < 0 for rows in group_rows(file)):
        raise DamagedError("a row group of fewer than no rows")
    return file


def row_ranges(path: str, shard_bytes: int) -> list[tuple[int, int]]:
    """Ranges of rows of whole row groups, of about `shard_bytes` each before compression; one at least.

    A damaged file has the range (0, 0): who reads it will say so. Raises UserError.
    """
    try:
        with open_table(path) as file:
            sizes = [max(0, file.metadata.row_group(i).total_byte_size) for i in range(file.num_row_groups)]
            rows = group_rows(file)
    except DamagedError:
        return [(0, 0)]
    ranges, begin, end, size = list[tuple[int, int]](), 0, 0, 0
    for count, more in zip(rows, sizes, strict=True):
        end, size = end + count, size + more
        if size >= shard_bytes and count:
            ranges.append((begin, end))
            begin, size = end, 0
    return [*ranges, (begin, end)] if end > begin or not ranges else ranges


def group_rows(file: Any) -> list[int]:
    """Rows of every row group."""
    return [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]


def read_parquet(shard: Shard, intake: Intake, moved: Callable[[int], None]) -> Iterator[Document]:
    """Documents of the row groups that begin in the shard."""
    row = shard.begin
    try:
        with open_table(shard.path) as file:
            fault = column_fault(file, shard.path, intake)
        if fault is not None:
            if shard.begin == 0:  # once for the file
                intake.reject(Place(shard.path, 1, unit="row "), fault)
            return
        with open_table(shard.path, intake.text_key) as file:
            for batch in batches(file, shard, intake.keys):
                for index in range(len(batch)):
                    row += 1
                    place = Place(shard.path, row, unit="row ")
                    try:
                        document = row_document(batch, index, intake, place)
                    except BadRecordError as bad:
                        intake.reject(place, bad)
                    else:
                        yield document
                moved(len(batch))
    except DamagedError as error:
        intake.damaged(Place(shard.path, row + 1, unit="row "), error)


def column_fault(file: Any, path: str, intake: Intake) -> BadRecordError | None:
    """What is wrong with the columns: they are missing, or the text's holds no strings."""
    names, types = list(file.schema_arrow.names), load_extra("pyarrow.types", f"input {path}")
    if intake.text_key not in names:
        return intake.without_text(names)
    kind = file.schema_arrow.field(intake.text_key).type
    letters = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(letters) or types.is_large_string(letters) or types.is_string_view(letters)):
        return BadRecordError("text_type", f'column "{intake.text_key}" holds {kind}, not strings')
    return intake.without_id() if intake.id_key is not None and intake.id_key not in names else None


def batches(file: Any, shard: Shard, columns: list[str]) -> Iterator[Any]:
    """Batches of the rows of a shard. Raises DamagedError where the file cannot be read on."""
    starts = list(accumulate(group_rows(file), initial=0))
    for group, start in enumerate(starts[:-1]):
        if not shard.begin <= start < shard.end:
            continue
        # one row group at a time: a batch over two would be lost when the second is damaged
        source = file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False)
        while True:
            with readable(shard.path), damage_is_told():
                batch = next(source, None)
            if batch is None:
                break
            yield batch


def row_document(batch: Any, index: int, intake: Intake, place: Place) -> Document:
    """The document of one row. Raises BadRecordError."""
    value = batch.column(intake.text_key)[index]
    value = getattr(value, "value", value)  # of a dictionary
    if value is not None and value.is_valid and value.as_buffer().size > intake.max_bytes:
        raise intake.too_long("text")
    if value is not None and value.is_valid and value.as_buffer().size > LONG:
        text = Utf8Text(memoryview(value.as_buffer()), 0, value.as_buffer().size)
        if (problem := text.problem()) is not None:
            detail = f'"{intake.text_key}" is not UTF-8 ({problem[0]} at byte {problem[1] + 1})'
            raise BadRecordError("not_utf8", detail)
        keys = [] if intake.id_key is None else [intake.id_key]
        others = {key: python_value(batch.column(key)[index], key) for key in keys}
        return intake.long_document(text, others, place)
    record = {intake.text_key: None if value is None else python_value(value, intake.text_key)}
    if intake.id_key is not None:
        record[intake.id_key] = python_value(batch.column(intake.id_key)[index], intake.id_key)
    return intake.document(record, place)


def python_value(value: Any, key: str) -> Any:
    """A cell as a Python value. Raises BadRecordError: pyarrow takes any bytes for a string."""
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        detail = f'"{key}" is not UTF-8 ({error.reason} at byte {error.start + 1})'
        raise BadRecordError("not_utf8", detail) from error
