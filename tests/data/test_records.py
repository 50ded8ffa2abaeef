"""Records of tables, which cannot fill the memory, and rows in the forms of other programs, against TRL's."""

import bz2
import gzip
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from trl.data_utils import extract_prompt, maybe_extract_prompt

from mlm.data.records import SUFFIXES, read_records
from mlm.data.row_forms import standard_form
from mlm.finetune.splits import read_file
from mlm.util.errors import CorruptFileError, UserError
from tests.util.special_files import put

MEMORY = """
import resource, sys
from pathlib import Path
import pyarrow.parquet
from mlm.data.records import SUFFIXES, read_records
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before, letters = peak(), 0
for _, record in read_records(Path(sys.argv[1])):
    letters += len(record["messages"][0]["content"])
print(letters >> 20, peak() - before)
"""


@pytest.mark.slow
def test_one_message_said_many_times_is_held_once(tmp_path: Path) -> None:
    """24 rows, a batch, that say the same 16 MB: 384 MB of text."""
    path = tmp_path / "a.parquet"
    message = [{"role": "user", "content": "x" * (1 << 24)}]
    pq.write_table(pa.table({"messages": [message] * 24}), path, compression="zstd")
    assert path.stat().st_size < 1 << 16
    done = subprocess.run([sys.executable, "-c", MEMORY, path], capture_output=True, text=True, check=True)
    letters, grown = map(int, done.stdout.split())
    assert letters == 384
    assert grown < 300


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        *(("FIFO", suffix) for suffix in (*SUFFIXES, ".txt")),
        *((kind, ".jsonl") for kind in ("socket", "device", "folder", "loop")),
    ],
)
def test_what_is_no_file_is_named_and_not_waited_for(tmp_path: Path, kind: str, suffix: str) -> None:
    path = put(kind, tmp_path / f"train{suffix}")
    problem = "Too many levels of symbolic links" if kind == "loop" else f"is a {kind}"
    with pytest.raises(UserError, match=f"train{suffix}: cannot be read: {problem}"):
        list(read_file(path))


MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string()), ("number", pa.int64())])


def message(n: int) -> dict[str, Any] | None:
    return None if n % 11 == 3 else {"role": "user" if n % 5 else None, "content": f"text {n}", "number": n}


def texts(n: int) -> list[str | None]:
    return [None if k == 2 else f"{n} {k}" for k in range(n % 5)]


NESTED: dict[str, tuple[Any, Callable[[int], Any]]] = {
    "string": (pa.string(), str),
    "string_view": (pa.string_view(), str),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), lambda n: str(n % 9)),
    "list": (pa.list_(pa.string()), texts),
    "list_of_two": (pa.list_(pa.string(), 2), lambda n: [str(n), None]),
    "list_of_dictionary": (pa.list_(pa.dictionary(pa.int32(), pa.string())), texts),
    "struct": (MESSAGE, message),
    "map": (
        pa.map_(pa.string(), pa.string()),
        lambda n: [(f"k{k}", value) for k, value in enumerate(texts(n))],
    ),
    "messages": (pa.list_(MESSAGE), lambda n: [message(3 * n + k) for k in range(n % 5)]),
    "struct_of_lists": (
        pa.struct([("tools", pa.list_(pa.struct([("name", pa.string())])))]),
        lambda n: {"tools": None if n % 2 else [{"name": str(n)}]},
    ),
}


@pytest.mark.parametrize("rows", [1, 64, 700])
def test_nested_columns_are_read_whatever_the_row_groups(tmp_path: Path, rows: int) -> None:
    values = {
        name: pa.array([None if n % 7 == 1 else value(n) for n in range(rows + 100)], type)
        for name, (type, value) in NESTED.items()
    }
    pq.write_table(table := pa.table(values), tmp_path / "a.parquet", row_group_size=rows)
    assert [record for _, record in read_records(tmp_path / "a.parquet")] == table.to_pylist()


def test_a_column_shorter_than_its_row_group_is_no_end_of_the_file(tmp_path: Path) -> None:
    """pyarrow writes such a file of lists of dictionaries in small pages, and reads no row of it."""
    lists = pa.array([[f"text {n}"] for n in range(20)], pa.list_(pa.dictionary(pa.int32(), pa.string())))
    path, sizes = tmp_path / "a.parquet", {"dictionary_pagesize_limit": 100, "data_page_size": 200}
    pq.write_table(pa.table({"a": lists, "b": range(20)}), path, row_group_size=1, **sizes)
    with pytest.raises(CorruptFileError, match="row group 0 lacks 1 of its rows"):
        list(read_records(path))


def test_what_pyarrow_lacks_is_damaged_or_of_another_form(tmp_path: Path) -> None:
    """pyarrow has no type of error that tells them apart."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"]}), path, use_dictionary=False)
    snappy, lzo = b"\x18\x04text\x15\x02", b"\x18\x04text\x15\x06"  # name and codec of the column
    assert path.read_bytes().count(snappy) == 1
    path.write_bytes(path.read_bytes().replace(snappy, lzo))
    problem = (
        r"a\.parquet is not a Parquet file, damaged, or of a form that is not supported \(.*write it again"
    )
    with pytest.raises(CorruptFileError, match=problem):
        list(read_records(path))


LINES = b'{"text": "a", "n": 1}\n\n{"text": "\xc3\xa9\\u2028", "n": null}\n'
FORMS: dict[str, tuple[str, bytes]] = {
    "a.ndjson": ("json", LINES),
    "line.json": ("json", LINES.partition(b"\n")[0]),
    "array.json": ("json", b'[{"text": "a", "n": 1},\n {"text": "b", "n": 2}]'),
    "a.JSONL.gz": ("json", gzip.compress(LINES)),
    "a.jsonl.bz2": ("json", bz2.compress(LINES)),
    "a.jsonl.zst": ("json", zstandard.compress(LINES)),
    "a.csv.zst": ("csv", zstandard.compress(b'text,more\na,"b\nc"\n')),
    "long.csv": ("csv", b"text,more\n" + b"a" * 200_000 + b",b\n"),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_files_are_read_as_by_datasets(tmp_path: Path, name: str) -> None:
    reader, content = FORMS[name]
    (path := tmp_path / name).write_bytes(content)
    wanted = datasets.load_dataset(reader, data_files=str(path), split="train", cache_dir=str(tmp_path / "c"))
    assert [record for _, record in read_records(path)] == wanted.to_list()


def parquet(table: Any) -> bytes:
    pq.write_table(table, sink := pa.BufferOutputStream())
    return bytes(sink.getvalue().to_pybytes())


HOSTILE: dict[str, tuple[str, bytes, str]] = {
    "no JSON": ("a.jsonl", LINES + b'{"text"\n', ":4: not a line of JSON"),
    "deep": ("a.jsonl", b"[" * 200_000, ":1: nested too deeply"),
    "many digits": ("a.jsonl", b'{"n": %s}' % (b"1" * 5000), ":1: holds a number of more than 4,300 digits"),
    "UTF-16": (
        "a.jsonl", LINES.decode().encode("utf-16"), r":1: not UTF-8 but UTF-16 \(convert it: iconv -f UTF-16"
    ),
    "packed and cut": ("a.jsonl.gz", gzip.compress(LINES)[:-9], r" is damaged, .*\(truncated\): replace it"),
    "no whole JSON": ("a.json", b'[{"text": "a"}', r"is not JSON \("),
    "a long cell": ("a.csv", b"a,b\n" + b"a" * (1 << 24) + b"a,b\n", ":2: field larger than"),
    "more cells": ("a.csv", b"a,b\na, b,1\n", ":2: has 1 more cells than the first line names: quote"),
    "a table not in UTF-8": ("a.tsv", b"a\tb\n\xff\tb\n", r":2: is not UTF-8 \("),
    "two columns": ("a.parquet", parquet(pa.table([["a"], ["b"]], ["text", "text"])), "two columns 'text'"),
    "cut": ("a.parquet", parquet(pa.table([["a"] * 99], ["text"]))[:-9], "is not a Parquet file, damaged"),
    "unknown": ("a.xml", b"<a>", r"is of no known form: give a \.jsonl, "),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_an_error_of_one_line_with_its_place(tmp_path: Path, case: str) -> None:
    name, content, problem = HOSTILE[case]
    (path := tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"^{path}.*{problem}") as caught:
        list(read_records(path))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, CorruptFileError) == ("damaged" in problem)


def test_lines_of_a_common_archive_need_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES * 20_000))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert len(list(read_records(tmp_path / "a.jsonl.gz"))) == 40_000


CHAT, PAIRS = ("messages",), ("prompt", "chosen", "rejected")


def said(*turns: str) -> list[dict[str, str]]:
    """Messages of the user and the assistant in turn; `system:` begins a system's."""
    system = [{"role": "system", "content": text[7:]} for text in turns[:1] if text.startswith("system:")]
    roles = ("user", "assistant") * len(turns)
    rest = zip(roles, turns[len(system) :], strict=False)
    return system + [{"role": role, "content": text} for role, text in rest]


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


OTHERS: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "alpaca": (
        CHAT,
        {"instruction": "Add", "input": "1 2", "output": "3", "text": "Below is …"},
        {"messages": said("Add\n1 2", "3"), "text": "Below is …"},
    ),
    "alpaca of LLaMA-Factory": (
        CHAT,
        {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]], "tools": "[]"},
        {"messages": said("system:s", "a", "b", "c", "d"), "tools": "[]"},
    ),
    "alpaca's pairs of LLaMA-Factory": (
        PAIRS,
        {"instruction": "Add", "input": "1 2", "chosen": "3", "rejected": "4"},
        {"prompt": said("Add\n1 2"), "chosen": answer("3"), "rejected": answer("4")},
    ),
    "sharegpt's pairs of LLaMA-Factory": (
        PAIRS,
        {
            "conversations": [{"from": "human", "value": "Hi"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
            "tools": "[]",
        },
        {
            "prompt": [{"from": "human", "value": "Hi"}],
            "chosen": [{"from": "gpt", "value": "good"}],
            "rejected": [{"from": "gpt", "value": "bad"}],
            "tools": "[]",
        },
    ),
    "Orca's pairs": (
        PAIRS,
        {"system": "s", "question": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": said("system:s", "q"), "chosen": answer("good"), "rejected": answer("bad")},
    ),
    "a text before answers alone": (
        PAIRS,
        {"prompt": "q", "chosen": answer("good"), "rejected": answer("bad")},
        {"prompt": said("q"), "chosen": answer("good"), "rejected": answer("bad")},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_forms_of_other_programs_are_read_as_messages(name: str) -> None:
    columns, row, wanted = OTHERS[name]
    found, change = standard_form(row, columns)
    assert found == wanted
    assert change


@pytest.mark.parametrize("talk", [("q",), ("system:s", "q"), ("a", "b", "q")])
def test_ultrafeedback_is_read_as_trl_extracts_its_prompt(talk: tuple[str, ...]) -> None:
    row: dict[str, Any] = {"prompt": "q", "chosen": said(*talk, "good"), "rejected": said(*talk, "bad")}
    found, change = standard_form(row, PAIRS)
    assert extract_prompt(found) == maybe_extract_prompt(row)
    assert change


AS_THEY_ARE: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "messages beside an instruction": (CHAT, {"messages": said("a", "b"), "instruction": "c", "output": "d"}),
    "TRL's pairs": (PAIRS, {"prompt": said("q"), "chosen": answer("a"), "rejected": answer("b"), "id": None}),
    "a prompt that neither answer holds": (
        PAIRS,
        {"prompt": "p", "chosen": said("q", "a"), "rejected": said("q", "b")},
    ),
}


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_other_rows_stay_as_they_are(name: str) -> None:
    columns, row = AS_THEY_ARE[name]
    assert standard_form(row, columns) == (row, "")
