"""Documents of Parquet files, whole and by row groups; errors by file and row."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlm.corpus.read.finding import search
from mlm.corpus.read.shards import split_inputs
from tests.corpus.reading import read, write

TEXTS = [f"document {i} " * 20 for i in range(100)]


def table(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


@pytest.mark.parametrize("shard_bytes", [1, 5000, 1 << 30])
def test_documents_do_not_depend_on_where_a_file_is_split(tmp_path: Path, shard_bytes: int) -> None:
    path = table(tmp_path / "a.parquet", {"text": TEXTS}, row_group_size=7)
    found = read(path, shard_bytes=shard_bytes)
    assert found.texts == TEXTS
    assert [str(document.location) for document in found.documents] == [
        f"{path}:row {i}" for i in range(1, 101)
    ]


def test_file_is_split_where_row_groups_begin(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", {"text": TEXTS}, row_group_size=30)
    shards = split_inputs(search(str(path)).inputs, 1)
    assert [(shard.begin, shard.end) for shard in shards] == [(0, 30), (30, 60), (60, 90), (90, 100)]


def test_errors_name_the_row(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(pa.string(), 1, pa.array([b"a\xff"]).buffers())
    texts = pa.concat_arrays([pa.array(["one", None, "x" * 200, "two"]), broken, pa.array(["three"])])
    path = table(tmp_path / "a.parquet", {"text": texts}, row_group_size=2)
    found = read(path, shard_bytes=1, max_bytes=100)
    assert found.texts == ["one", "two", "three"]
    problems = [(2, "text_type"), (3, "too_long"), (5, "not_utf8")]
    assert found.problems == [(f"a.parquet:row {row}", rule) for row, rule in problems]


@pytest.mark.parametrize(
    ("columns", "rule", "detail"),
    [
        ({"body": TEXTS, "id": TEXTS}, "no_text", "its keys: body, id"),
        ({"text": list(range(100)), "id": TEXTS}, "text_type", "int64"),
        ({"text": [text.encode() for text in TEXTS], "id": TEXTS}, "text_type", "binary"),
    ],
)
def test_wrong_columns_are_one_error_of_the_file(
    tmp_path: Path, columns: dict[str, Any], rule: str, detail: str
) -> None:
    path = table(tmp_path / "a.parquet", columns, row_group_size=10)
    found = read(path, shard_bytes=1)
    assert (found.texts, found.problems) == ([], [("a.parquet:row 1", rule)])
    assert detail in found.rejected[0].detail


@pytest.mark.parametrize("keep", [0, 3, 100, 0.9])
def test_truncated_file_is_one_error(tmp_path: Path, keep: float) -> None:
    file = table(tmp_path / "a.parquet", {"text": TEXTS}).read_bytes()
    path = write(tmp_path / "b.parquet", file[: int(keep * len(file)) if keep == 0.9 else int(keep)])
    assert read(path).problems == [("b.parquet:row 1", "damaged")]


def test_documents_before_damaged_rows_stand(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", {"text": TEXTS}, row_group_size=50, compression="gzip")
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    begin = column.dictionary_page_offset or column.data_page_offset
    content = bytearray(path.read_bytes())
    content[begin : begin + column.total_compressed_size] = bytes(column.total_compressed_size)
    found = read(write(path, bytes(content)))
    assert found.texts == TEXTS[:50]
    assert found.problems == [("a.parquet:row 51", "damaged")]
