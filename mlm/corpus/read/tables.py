"""Documents of tables: Parquet files and datasets of the Hugging Face Hub. Needs mlm[data].

Only the text column of a Parquet file is read, a few rows at a time. The library `datasets` streams a Hub
dataset, with a small cache. No code of a dataset runs: `datasets` 4 and later reject a dataset with a script,
and only text formats are accepted (FORMATS).
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from mlm.corpus.read.records import BadRecordError, Document, Input, InputShard, Intake, RecordLocation
from mlm.data.records import explain_hub_errors, open_parquet, row_group_batches
from mlm.data.streams import DamagedError, explain_damage, readable
from mlm.util.errors import UserError
from mlm.util.extras import load_extra

HUB = "hub:"
FORMATS = ("arrow", "csv", "json", "parquet", "text")
LOCAL_COPY = "check name and network, or download it and give the files as input"


def open_table(path: str) -> tuple[Any, list[int]]:
    """Open a pyarrow ParquetFile; return it and the rows of its row groups.

    Raises DamagedError, and UserError if it cannot be read.
    """
    with readable(path), explain_damage(path):
        file = open_parquet(path)
    rows = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    if any(count < 0 for count in rows):
        raise DamagedError("a row group of fewer than no rows")
    return file, rows


def row_ranges(path: str, shard_bytes: int) -> list[tuple[int, int]]:
    """Return ranges of rows of full row groups, of about `shard_bytes` each uncompressed; at least one.

    A damaged file has the range (0, 0): the reader reports the damage. Raises UserError.
    """
    try:
        file, rows = open_table(path)
    except DamagedError:
        return [(0, 0)]
    with file:
        sizes = [max(0, file.metadata.row_group(i).total_byte_size) for i in range(file.num_row_groups)]
    ranges, begin, end, size = list[tuple[int, int]](), 0, 0, 0
    for count, num_bytes in zip(rows, sizes, strict=True):
        end, size = end + count, size + num_bytes
        if size >= shard_bytes and count:
            ranges.append((begin, end))
            begin, size = end, 0
    return [*ranges, (begin, end)] if end > begin or not ranges else ranges


def read_parquet(shard: InputShard, intake: Intake) -> Iterator[Document]:
    """Yield documents of the row groups that begin in the shard."""
    row = shard.begin
    try:
        file, rows = open_table(shard.path)
        with file:
            names, problem = list(file.schema_arrow.names), None
            if intake.text_key not in names:
                problem = intake.without_text(names)
            else:
                types = load_extra("pyarrow.types", f"input {shard.path}")
                kind = file.schema_arrow.field(intake.text_key).type
                text = kind.value_type if types.is_dictionary(kind) else kind
                if not (types.is_string(text) or types.is_large_string(text) or types.is_string_view(text)):
                    detail = f'column "{intake.text_key}" holds {text}, not strings'
                    problem = BadRecordError("text_type", detail)
            if problem is not None:
                if shard.begin == 0:  # reported once per file
                    intake.reject(RecordLocation(shard.path, 1, unit="row "), problem)
                return
            for batch in batches(file, rows, shard, intake.text_key):
                for index in range(len(batch)):
                    row += 1
                    location = RecordLocation(shard.path, row, unit="row ")
                    yield from intake.attempt(location, row_document, batch, index, intake, location)
    except DamagedError as error:
        intake.damaged(RecordLocation(shard.path, row + 1, unit="row "), error)


def batches(file: Any, rows: list[int], shard: InputShard, column: str) -> Iterator[Any]:
    """Yield batches of the rows of a shard. Raises DamagedError where the rest cannot be read."""
    starts = list(accumulate(rows, initial=0))[:-1]
    for group, start in enumerate(starts):
        if not shard.begin <= start < shard.end:
            continue
        # One row group at a time: a batch over two would be lost if the second is damaged.
        source = row_group_batches(file, group, 256, [column])
        while True:
            with readable(shard.path), explain_damage(shard.path):
                batch = next(source, None)
            if batch is None:
                break
            yield batch


def row_document(batch: Any, index: int, intake: Intake, location: RecordLocation) -> Document:
    value = batch.column(intake.text_key)[index]
    value = getattr(value, "value", value)  # entry of a dictionary
    if value is not None and value.is_valid and value.as_buffer().size > intake.max_bytes:
        raise intake.too_long("text")
    try:
        return intake.document({intake.text_key: None if value is None else value.as_py()}, location)
    except UnicodeDecodeError as error:  # pyarrow accepts any bytes as a string
        detail = f'"{intake.text_key}" is not UTF-8 ({error.reason} at byte {error.start + 1})'
        raise BadRecordError("not_utf8", detail) from error


@dataclass(frozen=True)
class HubSource:
    path: str
    """hub:OWNER/NAME"""
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    @property
    def setting(self) -> str:
        return f"input={self.path} hub_config={self.config} hub_split={self.split}"

    @classmethod
    def of(cls, path_with_settings: str) -> "HubSource":
        path, _, settings = path_with_settings.partition("?")
        return cls(path, *json.loads(settings))


def find_hub(source: HubSource) -> Input:
    """Return a dataset as an input. Raises UserError.

    Its path lets another machine read the same rows: it holds the commit, so that the dataset cannot change
    between stages.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source.path.removeprefix(HUB)):
        raise UserError(f"input={source.path} is not a Hub dataset: write hub:OWNER/NAME")
    builder, _ = open_hub(source)
    commit, splits = str(builder.hash), builder.info.splits or {}
    size = splits[source.split].num_bytes if source.split in splits else 0
    return Input(
        name=source.path,
        path=f"{source.path}?{json.dumps([source.config, source.split, commit])}",
        bytes=max(int(size or 0), 0),
        digest=f"hub:{commit}:{source.config}:{source.split}",
        split=None,
    )


@lru_cache(maxsize=4)
def open_hub(source: HubSource) -> tuple[Any, Any]:
    """Open the builder of a dataset, and its split as a stream. Raises UserError."""
    datasets = load_extra("datasets", f"input={source.path}")
    # With the prefix `datasets` does not read a local folder of the same name.
    name = f"hf://datasets/{source.path.removeprefix(HUB)}"
    with explain_hub_errors(source.setting, LOCAL_COPY):
        builder = datasets.load_dataset_builder(name, source.config, revision=source.revision)
        if builder.name not in FORMATS:
            raise UserError(
                f"input={source.path} holds {builder.name}, not text in one of {', '.join(FORMATS)}: "
                f"convert it to .jsonl"
            )
        return builder, builder.as_streaming_dataset(split=source.split)


def read_hub(shard: InputShard, intake: Intake) -> Iterator[Document]:
    """Yield documents of a shard of the dataset; rows are counted within the shard."""
    source = HubSource.of(shard.path)
    _, stream = open_hub(source)
    with explain_hub_errors(source.setting, LOCAL_COPY):
        if stream.features is not None and intake.text_key in stream.features:
            stream = stream.select_columns([intake.text_key])  # so that nothing else is decoded
        rows = iter(stream.shard(num_shards=stream.num_shards, index=shard.begin))
    row = 0
    while True:
        with explain_hub_errors(source.setting, LOCAL_COPY):
            record = next(rows, None)
        if record is None:
            return
        row += 1
        location = RecordLocation(source.path, row, unit=f"shard {shard.begin} row ")
        yield from intake.attempt(location, intake.document, record, location)
