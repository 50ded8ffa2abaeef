"""Evaluation texts: each format is read, and a bad file is named in one line."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlm.corpus.benchmarks import EvaluationText, dump_benchmarks, load_benchmarks, read_benchmarks
from mlm.data import records
from mlm.util.errors import UserError

WIKI = "\n = Lobster = \n \n Red @-@ tipped claws . \n = = Life = = \n Long . \n \n = Crab = \n \n Short . \n"


def read(path: Path) -> list[tuple[str, str]]:
    return [(text.location, text.text) for text in read_benchmarks([str(path)])]


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("name", ["race.json", "race.jsonl.gz"])
def test_jsonl_without_text_gives_every_string_inside(tmp_path: Path, name: str) -> None:
    record = {"article": "a b", "options": [["c", "d"]], "answers": {"first": "e"}, "id": 4}
    content = json.dumps(record).encode()
    path = written(tmp_path / name, gzip.compress(content) if name.endswith(".gz") else content)
    assert [text for _, text in read(path)] == ["a b", "c", "d", "e"]


def test_wikitext_is_read_article_by_article(tmp_path: Path) -> None:
    assert read(written(tmp_path / "wiki.valid.tokens", WIKI)) == [
        ("Lobster", "= Lobster =\nRed @-@ tipped claws .\n= = Life = =\nLong ."),
        ("Crab", "= Crab =\nShort ."),
    ]


def test_parquet_gives_its_columns_of_strings(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"q": ["a", None], "n": [1, 2], "r": ["b", "c"]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [("row 1", "a"), ("row 1", "b"), ("row 2", "c")]


@pytest.mark.parametrize(
    "name, message",
    [
        ("wikitext2", "neither a known set nor a file of a known format: use wikitext103, lambada or a"),
        ("empty.txt", "holds no text"),
        ("latin.txt", "is not UTF-8"),
    ],
)
def test_unknown_evaluation_set_is_rejected(tmp_path: Path, name: str, message: str) -> None:
    written(tmp_path / "empty.txt", " \n\n")
    written(tmp_path / "latin.txt", b"caf\xe9")
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_two_sets_of_one_name_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    paths = [str(written(folder / "a.txt", "text")) for folder in (tmp_path, tmp_path / "b")]
    with pytest.raises(UserError, match=r"second set named a\.txt"):
        read_benchmarks(paths)


def hub(monkeypatch: pytest.MonkeyPatch, load_dataset: Callable[..., object]) -> None:
    monkeypatch.setattr(records, "load_extra", lambda *_: SimpleNamespace(load_dataset=load_dataset))
    records.hub_records.cache_clear()


def test_wikitext103_from_the_hub_is_validation_and_test(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[str, str, str]]()

    def load_dataset(source: str, config: str, *, split: str) -> list[dict[str, str]]:
        asked.append((source, config, split))
        return [{"text": line} for line in WIKI.splitlines(keepends=True)]

    hub(monkeypatch, load_dataset)
    texts = read_benchmarks(["wikitext103"])
    assert {config for _, config, _ in asked} == {"wikitext-103-raw-v1"}
    places = ["validation Lobster", "validation Crab", "test Lobster", "test Crab"]
    assert [text.location for text in texts] == places
    assert texts[3] == EvaluationText("wikitext103", "test Crab", "= Crab =\nShort .")


def test_saved_texts_come_back(tmp_path: Path) -> None:
    texts = [EvaluationText("a", "line 1", "one\n\u2028two"), EvaluationText("b", "line 9", "three \ud800")]
    (tmp_path / "saved.jsonl").write_bytes(dump_benchmarks(texts))
    assert load_benchmarks(tmp_path / "saved.jsonl") == texts
