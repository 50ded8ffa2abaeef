"""Texts from files and the Hub: every form gives the same text, every problem names its place."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlm.data import records
from mlm.evaluate.zero_shot import sources
from mlm.util.errors import UserError
from tests.evaluate.zero_shot.texts import PASSAGES, WIKITEXT, write_lambada, write_wikitext


def write_rows(folder: Path, name: str, key: str, rows: list[str]) -> str:
    path = folder / name
    if not name.endswith(".parquet"):
        path.write_text("".join(json.dumps({key: row}) + "\n" for row in rows))
    else:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({key: rows, "other": list(range(len(rows)))}), path)
    return str(path)


def hub_rows() -> list[str]:
    """Lines as the Hub's rows: with their newline, blank ones empty."""
    lines = [line + "\n" for line in WIKITEXT.split("\n")[:-1]]
    return [line if line.strip() else "" for line in lines]


@pytest.mark.parametrize("name", ["lines.jsonl", "lines.json", "lines.parquet"])
def test_rows_of_lines_make_the_file_they_came_from(tmp_path: Path, name: str) -> None:
    text = WIKITEXT.replace("\n\n", "\n \n")
    found = sources.wikitext(write_rows(tmp_path, name, "text", hub_rows()), raw=False)
    assert found.texts == (text,)


def test_rows_of_articles_are_those_articles(tmp_path: Path) -> None:
    pages = sources.articles(WIKITEXT)
    found = sources.wikitext(write_rows(tmp_path, "pages.jsonl", "page", pages), raw=True)
    assert sources.articles(found.texts[0]) == pages


def test_a_file_keeps_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "wiki.test.tokens"
    path.write_bytes(b" \r\n = A = \r\n caf\xc3\xa9 \x0b x \n")
    assert sources.wikitext(str(path), raw=False).texts[0].encode() == path.read_bytes()


def test_articles_begin_at_their_titles() -> None:
    found = sources.articles(WIKITEXT)
    first = [article.split("\n")[0] for article in found]
    assert first == [" = Homarus lobster = ", " = 2 @-@ 8 ( road ) = ", " = Third = "]
    assert "\n".join([" ", *found]) == WIKITEXT
    assert sources.articles("some text\n = A = \n b") == ["some text", " = A = \n b"]
    titles = (" = Title = ", " = = Section = = ", " = a = b = ", " = a = = ", "x = y")
    assert [line for line in titles if sources.is_article_title(line)] == [" = Title = ", " = a = b = "]


@pytest.mark.parametrize("name", ["passages.jsonl", "passages.parquet", "passages.txt"])
def test_passages_come_from_every_form(tmp_path: Path, name: str) -> None:
    passages = [text for text in PASSAGES if "\n" not in text]
    if name.endswith(".txt"):
        (tmp_path / name).write_text("".join(f"{text}\n" for text in passages))
        path = str(tmp_path / name)
    else:
        path = write_rows(tmp_path, name, "text", passages)
    found = sources.lambada(path, standard=False)
    assert list(found.texts) == passages
    same = write_lambada(tmp_path, tuple(passages))
    assert found.digest == sources.lambada(str(same), standard=False).digest


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b'{"txt": "a b"}\n', ":1: no text under 'text'"),
        (b'{"text": 7}\n', ":1: no text under 'text'"),
        (b'{"text": "\\ud800 b"}\n', ":1: holds half a surrogate pair"),
        (b"\n", "holds no passage"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: bytes, place: str) -> None:
    path = tmp_path / "lambada.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as told:
        sources.lambada(str(path), standard=False)
    assert str(path) in str(told.value)
    assert place in str(told.value)
    assert "\n" not in str(told.value)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], list[str]]:
    held: dict[tuple[str, str], list[str]] = {}

    def load_dataset(name: str, config: str, *, split: str) -> list[dict[str, str]]:
        assert split == "test"
        if (key := (name.removeprefix("hf://datasets/"), config)) not in held:
            raise ConnectionError("no network")
        return [{"text": text} for text in held[key]]

    module: Any = SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setattr(records, "load_extra", lambda name, setting: module)
    records.hub_records.cache_clear()
    return held


def test_each_protocol_takes_its_form_from_the_hub(hub: dict[tuple[str, str], list[str]]) -> None:
    hub["Salesforce/wikitext", "wikitext-103-v1"] = hub_rows()
    hub["Salesforce/wikitext", "wikitext-103-raw-v1"] = [r.replace("<unk>", "crab") for r in hub_rows()]
    assert "<unk>" in sources.wikitext(None, raw=False).texts[0]
    assert "crab" in sources.wikitext(None, raw=True).texts[0]
    assert sources.wikitext(None, raw=False).file_digest is None


def test_a_text_has_the_same_digest_from_the_hub_as_from_a_file(
    hub: dict[tuple[str, str], list[str]], tmp_path: Path
) -> None:
    text = WIKITEXT.replace("\n\n", "\n \n")
    hub["Salesforce/wikitext", "wikitext-103-v1"] = hub_rows()
    local = sources.wikitext(str(write_wikitext(tmp_path, text)), raw=False)
    assert sources.wikitext(None, raw=False).digest == local.digest
    hub["EleutherAI/lambada_openai", "default"] = list(PASSAGES)
    passages = sources.lambada(str(write_lambada(tmp_path)), standard=False)
    assert sources.lambada(None, standard=False).digest == passages.digest


def test_without_the_hub_the_file_to_bring_is_named(hub: dict[tuple[str, str], list[str]]) -> None:
    with pytest.raises(UserError, match=r"bring wiki\.test\.tokens as a file and give data\.path=…"):
        sources.wikitext(None, raw=False)
    with pytest.raises(UserError, match=r"a passage under `text` in each line and give data\.standard_path"):
        sources.lambada(None, standard=True)
