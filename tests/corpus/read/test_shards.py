"""Inputs: files, folders with and without parts, globs."""

import os
from pathlib import Path

import pytest

from mlm.corpus.read.finding import search
from mlm.util.errors import UserError


def put(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("{}")
    return root


def names(path: Path | str) -> list[tuple[str, str | None]]:
    return [(item.name, item.split) for item in search(str(path)).inputs]


def test_folder_is_read_to_its_depth_sorted_by_path(tmp_path: Path) -> None:
    put(tmp_path, "b.jsonl", "a/z.txt.gz", "a/b/c.parquet", "a.JSONL.zst", "c.txt")
    found = [name for name, _ in names(tmp_path)]
    assert found == ["a/b/c.parquet", "a/z.txt.gz", "a.JSONL.zst", "b.jsonl", "c.txt"]


def test_unknown_files_are_passed_over_and_named(tmp_path: Path) -> None:
    found = search(str(put(tmp_path, "a.jsonl", "b.csv", "c.json", "d.gz")))
    assert [item.name for item in found.inputs] == ["a.jsonl"]
    assert "not read: b.csv, c.json, d.gz" in str(found.notes())


def test_linked_folders_are_followed_once(tmp_path: Path) -> None:
    put(tmp_path / "far", "a.jsonl")
    put(tmp_path / "near", "b.jsonl")
    os.symlink(tmp_path / "far", tmp_path / "near/far")
    os.symlink(tmp_path / "near", tmp_path / "near/loop")
    assert names(tmp_path / "near") == [("b.jsonl", None), ("far/a.jsonl", None)]


def test_folder_gives_its_parts_in_order(tmp_path: Path) -> None:
    put(tmp_path, "test.txt", "train.jsonl.gz", "validation.parquet", "other.jsonl", "sub/train.jsonl")
    assert names(tmp_path) == [
        ("train.jsonl.gz", "train"),
        ("validation.parquet", "validation"),
        ("test.txt", "test"),
    ]
    assert "not read: other.jsonl (" in str(search(str(tmp_path)).notes())


def test_glob_takes_the_files_it_names(tmp_path: Path) -> None:
    put(tmp_path, "text/a.jsonl", "text/deep/er/b.jsonl", "text/c.txt", "text/train.txt")
    assert names(f"{tmp_path}/text/**/*.jsonl") == [("a.jsonl", None), ("deep/er/b.jsonl", None)]
    assert names(f"{tmp_path}/text/[ac].*") == [("a.jsonl", None), ("c.txt", None)]


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        (["test.jsonl"], "", r"holds test\.jsonl but no train\.jsonl"),
        (["train.jsonl", "train.txt.gz"], "", r"train\.jsonl and train\.txt\.gz, all for the part train"),
        (["a.csv"], "a.csv", "holds no .* rename"),
        (["a.json"], "a.json", "one object per line"),
        (["a.json"], "", "only 1 others such as a.json"),
        ([], "absent.jsonl", "does not exist"),
        ([], "", r"holds no \.jsonl"),
        ([], "*.jsonl", "matches no file"),
        (["a.csv"], "*", "rename"),
    ],
)
def test_input_that_cannot_be_read_says_why(
    tmp_path: Path, files: list[str], path: str, message: str
) -> None:
    put(tmp_path, *files)
    with pytest.raises(UserError, match=message) as problem:
        search(str(tmp_path / path))
    assert "\n" not in str(problem.value)
