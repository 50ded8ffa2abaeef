"""Hub datasets through `datasets`: a local fake of the loader, streamed by the real library."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from mlm.corpus.config import DataBuildConfig
from mlm.corpus.read.finding import find_inputs
from mlm.corpus.read.shards import split_inputs
from mlm.corpus.read.tables import open_hub
from mlm.util.errors import UserError
from tests.corpus.reading import Outcome, read_shards, write

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Loader = Callable[..., Any]


@pytest.fixture(autouse=True)
def _no_dataset_is_open() -> Iterator[None]:
    open_hub.cache_clear()
    yield
    open_hub.cache_clear()


def local(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: list[list[Any]]) -> list[tuple[Any, ...]]:
    """Let hub:us/books be .jsonl files of these rows; the calls for it are returned."""
    files = [
        str(write(folder / f"{i}.jsonl", "".join(json.dumps(row) + "\n" for row in part).encode()))
        for i, part in enumerate(rows)
    ]
    real, calls = datasets.load_dataset_builder, list[tuple[Any, ...]]()

    def fake(path: str, name: str | None = None, revision: str | None = None) -> Any:
        calls.append((path, name, revision))
        builder = real("json", data_files={"train": files}, cache_dir=str(folder / "cache"))
        builder.hash = COMMIT
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", fake)
    return calls


def config(**changes: Any) -> DataBuildConfig:
    return DataBuildConfig(**{"input": "hub:us/books", "tokenizer": "t", "out": "o"} | changes)


def read(**changes: Any) -> Outcome:
    wanted = config(**changes)
    shards = split_inputs(find_inputs(wanted).inputs, 1)
    return read_shards(shards, text_key=wanted.text_key, max_bytes=1000)


def test_rows_of_all_its_shards_are_documents_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local(tmp_path, monkeypatch, [[{"text": f"{i} {j}"} for j in range(5)] for i in range(3)])
    found = read()
    assert found.texts == [f"{i} {j}" for i in range(3) for j in range(5)]
    assert str(found.documents[6].location) == "hub:us/books:shard 1 row 2"


def test_digest_is_the_commit_and_later_stages_read_that_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = local(tmp_path, monkeypatch, [[{"text": "x"}]])
    [item] = find_inputs(config(hub_config="old", hub_revision="main")).inputs
    assert (item.name, item.digest) == ("hub:us/books", f"hub:{COMMIT}:old:train")
    split_inputs([item], 1)
    assert calls == [("hf://datasets/us/books", "old", "main"), ("hf://datasets/us/books", "old", COMMIT)]


def test_bad_rows_are_named_and_the_next_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local(tmp_path, monkeypatch, [[{"text": text} for text in ("x", None, "x" * 2000, "y")]])
    found = read()
    assert found.texts == ["x", "y"]
    assert found.problems == [("books:shard 0 row 2", "text_type"), ("books:shard 0 row 3", "too_long")]


def test_damaged_file_of_a_dataset_stops_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local(tmp_path, monkeypatch, [[{"text": "x"}], [{"text": "y"}]])
    write(tmp_path / "1.jsonl", b'{"text": "y"}\n{"text": \n')
    with pytest.raises(UserError, match=r"^input=hub:us/books .*download it"):
        read()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (datasets.exceptions.DatasetNotFoundError("no\nsuch set"), r"no such set\): check name"),
        (RuntimeError("Dataset scripts are no longer supported"), "scripts are no longer"),
    ],
)
def test_dataset_that_cannot_be_had_says_why(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset_builder", fail)
    with pytest.raises(UserError, match=rf"^input=hub:us/books .*{message}") as problem:
        find_inputs(config())
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("name", ["hub:books", "hub:../books?x"])
def test_malformed_hub_name_is_rejected(name: str) -> None:
    with pytest.raises(UserError, match="hub:OWNER/NAME"):
        find_inputs(config(input=name))
