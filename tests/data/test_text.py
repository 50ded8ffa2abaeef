"""Reading JSON lines and plain text: documents and faults by file and line."""

from collections import Counter
from pathlib import Path

import pytest

from mlm.config.errors import UserError
from mlm.data.text import find_sources, parse_split, part_of, read_documents


def texts(path: Path, content: bytes, text_key: str = "text") -> list[str]:
    path.write_bytes(content)
    return [document.text for document in read_documents(path, text_key)]


def test_jsonl_gives_a_document_per_line(tmp_path: Path) -> None:
    assert texts(tmp_path / "a.jsonl", b'{"text": "one\\ntwo"}\n\n{"text": "\xc3\xa9"}') == ["one\ntwo", "é"]


def test_document_counts_utf8_bytes_and_the_bytes_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\\u00e9a"}\n{"text": ""}\n')
    found = [(d.num_bytes, d.end) for d in read_documents(tmp_path / "a.jsonl", "text")]
    assert found == [(3, 20), (0, 33)]


def test_text_is_one_document_without_separators(tmp_path: Path) -> None:
    assert texts(tmp_path / "a.txt", b"one\n\ntwo\n") == ["one\n\ntwo\n"]


def test_text_documents_end_at_separator_lines(tmp_path: Path) -> None:
    assert texts(tmp_path / "a.txt", b"one\n<|endoftext|>\ntwo\n<|endoftext|>\n") == ["one\n", "two\n"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', "not a line of JSON"),
        (b'{"text": "\xff"}', "not a line of JSON"),
        (b"[" * 100_000, "not a line of JSON"),
        (b"[1]", "a JSON list"),
        (b'{"body": "x", "id": 1}', 'no key "text".*body, id.*text_key'),
        (b'{"text": 3}', "holds a int"),
        (b'{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_bad_json_line_is_named_by_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    with pytest.raises(UserError, match=rf"a\.jsonl:3: .*{message}"):
        texts(tmp_path / "a.jsonl", b'{"text": "x"}\n\n' + line + b"\n")


def test_text_that_is_no_utf8_is_named_by_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.txt:4: not UTF-8"):
        texts(tmp_path / "a.txt", b"one\n<|endoftext|>\ntwo\n\xff\n")


def test_folder_gives_its_parts_in_order(tmp_path: Path) -> None:
    for name in ("test.txt", "train.jsonl", "other.jsonl"):
        (tmp_path / name).write_text("")
    assert [(s.path.name, s.split) for s in find_sources(str(tmp_path))] == [
        ("train.jsonl", "train"),
        ("test.txt", "test"),
    ]


@pytest.mark.parametrize(
    ("names", "path", "message"),
    [
        (["test.jsonl"], "", r"no train\.jsonl"),
        (["train.jsonl", "train.txt"], "", "both"),
        (["a.csv"], "a.csv", "neither"),
        ([], "absent.jsonl", "does not exist"),
    ],
)
def test_input_that_cannot_be_read_says_why(
    tmp_path: Path, names: list[str], path: str, message: str
) -> None:
    for name in names:
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=message):
        find_sources(str(tmp_path / path))


@pytest.mark.parametrize("text", ["0.9,0.1,0", "0.9/0.1/0"])
def test_split_takes_commas_and_slashes(text: str) -> None:
    assert parse_split(text) == (0.9, 0.1, 0)


@pytest.mark.parametrize("text", ["", "0.9,0.1", "0.9,0.2,0", "a,b,c", "0,1,0", "1.5,-0.5,0", "nan,0,0"])
def test_split_that_is_no_division_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="split="):
        parse_split(text)


def test_documents_fall_into_parts_by_their_shares() -> None:
    counts = Counter(part_of(i, (0.8, 0.2, 0), seed=1) for i in range(10_000))
    assert counts["test"] == 0
    assert abs(counts["validation"] - 2000) < 200  # five standard deviations


def test_part_of_a_document_depends_on_the_seed() -> None:
    parts = [[part_of(i, (0.5, 0.5, 0), seed) for i in range(50)] for seed in (1, 1, 2)]
    assert parts[0] == parts[1] != parts[2]
