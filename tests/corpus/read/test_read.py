"""Documents of .jsonl, .txt and Parquet files, whole and in shards; errors by file, line and row."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.corpus.reading import read, write

GOOD = b'{"text": "x"}\n'


def jsonl(folder: Path, content: bytes) -> Path:
    return write(folder / "a.jsonl", content)


@pytest.mark.parametrize("shard_bytes", [1, 13, 14, 15, 64])
def test_documents_do_not_depend_on_where_a_file_is_split(tmp_path: Path, shard_bytes: int) -> None:
    """Lines of 14 bytes with their newline: cuts fall before, on and after one; also CRLF and empty lines."""
    content = b'{"text": "1"}\n{"text": "2"}\r\n\n\r\n{"text": "a longer one"}\n\n\n[]\n'
    content += b'{"text": "4"}\n{"text": "5"}'
    path = jsonl(tmp_path, content)
    found = read(path, shard_bytes=shard_bytes)
    assert found.texts == ["1", "2", "a longer one", "4", "5"]
    lines = [int(str(document.location).rpartition(":")[2]) for document in found.documents]
    assert lines == [1, 2, 5, 9, 10]
    assert found.problems == [("a.jsonl:8", "not_object")]


@pytest.mark.parametrize(
    ("line", "rule", "detail"),
    [
        (b'{"text": "x"', "not_json", "not a line of JSON"),
        ('{"text": "x"}'.encode("utf-16"), "not_utf8", "convert it: iconv -f UTF-16"),
        (b"[" * 100_000, "not_json", "nested too deeply"),
        (b'{"text": "x", "n": ' + b"1" * 5000 + b"}", "not_json", "holds a number of more than 4,300 digits"),
        (b"[1]", "not_object", "a list, not a JSON object"),
        (b'{"body": "x", "id": 1}', "no_text", "its keys: body, id; text_key"),
        (b'{"text": 3}', "text_type", "holds an integer, not a text"),
        (b'{"text": "a\\ud800"}', "surrogate", "letter 2"),
        (b'{"text": "' + b"x" * (1 << 20) + b'"}', "too_long", "max_document_bytes=1048576"),
    ],
)
def test_bad_line_is_named_and_the_next_is_read(tmp_path: Path, line: bytes, rule: str, detail: str) -> None:
    shard_bytes = 10 if len(line) < 1000 else 1000  # not a hundred thousand shards
    found = read(jsonl(tmp_path, GOOD + b"\n" + line + b"\n" + GOOD), shard_bytes=shard_bytes)
    assert found.texts == ["x", "x"]
    assert found.problems == [("a.jsonl:3", rule)]
    assert detail in found.rejected[0].detail
    assert "\n" not in found.rejected[0].detail


@pytest.mark.parametrize(("name", "suffix"), [("a.jsonl", ".gz"), ("a.txt", ".zst")])
def test_compressed_file_reads_as_the_plain_one(tmp_path: Path, name: str, suffix: str) -> None:
    content = b'{"text": "one"}\n{"text": "two"}\n[]\n<|endoftext|>\nthree\n'
    pack = gzip.compress if suffix == ".gz" else zstandard.compress
    plain = read(write(tmp_path / name, content))
    packed = read(write(tmp_path / f"{name}{suffix}", pack(content[:20]) + pack(content[20:])), shard_bytes=5)
    assert packed.texts == plain.texts != []
    assert [rule for _, rule in packed.problems] == [rule for _, rule in plain.problems]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz"])
def test_truncated_file_is_one_error_and_its_beginning_is_read(tmp_path: Path, name: str) -> None:
    pieces = [json.dumps({"text": str(i) * 50}) for i in range(1000)]
    content = "\n".join(pieces if "jsonl" in name else "\n<|endoftext|>\n".join(pieces).split("\n")).encode()
    whole = read(write(tmp_path / "whole" / name, gzip.compress(content)))
    file = (tmp_path / "whole" / name).read_bytes()
    found = read(write(tmp_path / name, file[: len(file) // 2]))
    assert 10 < len(found.texts) < 1000
    assert found.texts == whole.texts[: len(found.texts)]
    [(place, rule)] = found.problems
    assert rule == "damaged"
    reached = len(found.texts) + 1
    assert int(place.rpartition(":")[2]) in (
        (reached,) if "jsonl" in name else (2 * reached - 1, 2 * reached)
    )


def test_text_documents_end_at_separator_lines(tmp_path: Path) -> None:
    content = b"one\n<|endoftext|>\n <|endoftext|> \r\ntwo\n<|endoftext|>\n"
    found = read(write(tmp_path / "a.txt", content))
    assert found.texts == ["one\n", "", "two\n"]
    assert [document.location.number for document in found.documents] == [1, 3, 4]


@pytest.mark.parametrize("long", [b"x" * 101, b"x\n" * 51])
def test_text_document_above_the_bound_is_rejected(tmp_path: Path, long: bytes) -> None:
    content = b"one\n<|endoftext|>\n" + long + b"\n<|endoftext|>\ntwo"
    found = read(write(tmp_path / "a.txt", content), max_bytes=100)
    assert found.texts == ["one\n", "two"]
    assert found.problems == [("a.txt:3", "too_long")]


TEXTS = [f"document {i} " * 20 for i in range(100)]


def table(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


@pytest.mark.parametrize("shard_bytes", [1, 5000, 1 << 30])
def test_documents_of_a_table_do_not_depend_on_where_it_is_split(tmp_path: Path, shard_bytes: int) -> None:
    path = table(tmp_path / "a.parquet", {"text": TEXTS}, row_group_size=7)
    found = read(path, shard_bytes=shard_bytes)
    assert found.texts == TEXTS
    assert [str(document.location) for document in found.documents] == [
        f"{path}:row {i}" for i in range(1, 101)
    ]


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
    ],
)
def test_wrong_columns_are_one_error_of_the_file(
    tmp_path: Path, columns: dict[str, Any], rule: str, detail: str
) -> None:
    path = table(tmp_path / "a.parquet", columns, row_group_size=10)
    found = read(path, shard_bytes=1)
    assert (found.texts, found.problems) == ([], [("a.parquet:row 1", rule)])
    assert detail in found.rejected[0].detail


@pytest.mark.parametrize("keep", [0, 100, 0.9])
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
