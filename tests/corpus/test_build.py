"""`mlm data build` of small files that are clean already: what it writes, rejects and leaves alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mlm.corpus.build import run_build
from mlm.data.indexed import IndexedDataset
from mlm.util.errors import UserError
from tests.corpus.texts import TEXTS, plain, quiet, write_jsonl


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    write_jsonl(folder / "train.jsonl", TEXTS)
    write_jsonl(folder / "validation.jsonl", ["a held-out cat", ""])
    return folder


def build(source: Path, console: Console | None = None, **options: Any) -> dict[str, Any]:
    return run_build(plain(source, **options), console or quiet())


def test_receipt_counts_documents_tokens_and_bytes(source: Path) -> None:
    build(source)
    out = source.parent / "out"
    receipt = json.loads((out / "corpus.json").read_text())
    assert receipt["splits"]["train"] == {
        "documents": 6,
        "sequences": 6,
        "tokens": IndexedDataset(out / "train").num_tokens,
        "bytes": sum(len(text.encode()) for text in TEXTS),
        "end_tokens": 6,
    }
    assert receipt["splits"]["validation"]["documents"] == 1
    assert receipt["removed"] == {"empty": {"documents": 1, "bytes": 0}}
    written = ".mlm.json corpus-inputs.jsonl corpus.json tokenizer.json"
    written += " train.bin train.idx validation.bin validation.idx"
    assert sorted(path.name for path in out.iterdir()) == written.split()


def test_damaged_corpus_is_not_called_up_to_date(source: Path) -> None:
    build(source)
    (source.parent / "out" / "train.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"train\.bin differs from corpus\.json"):
        build(source)


def test_full_disk_is_a_users_mistake(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlm.data.indexed.IndexedWriter.add_document", fail)
    with pytest.raises(UserError, match=r"out=.*No space left on device; free space"):
        build(source)


@pytest.mark.parametrize("repeats, is_said", [(1, True), (1000, False)])
def test_vocabulary_large_for_the_text_is_said(tmp_path: Path, repeats: int, is_said: bool) -> None:
    source = write_jsonl(tmp_path / "text/train.jsonl", ["a cat and a cat"] * repeats)
    screen = quiet()
    receipt = build(source.parent, screen)
    tokens = IndexedDataset(tmp_path / "out/train").tokens[:].tolist()
    told = f"{len(tokens):,} tokens, of {len(set(tokens))} of {receipt['vocab_size']} ids"
    assert (told in screen.file.getvalue()) == is_said
