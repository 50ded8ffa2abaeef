"""`mlm data tokenizer` and `mlm data build`, run on small files."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from mlm.config.data_schema import DataBuildConfig, DataTokenizerConfig
from mlm.config.errors import UserError
from mlm.data.build import run_build, run_tokenizer
from mlm.data.indexed import IndexedDataset
from mlm.data.tokenizer import Tokenizer
from mlm.files import digest_file

TEXTS = ["the cat sat", "é on the mat", "a hat", "the rat", "sat in the hat", "that cat"]


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def write_jsonl(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with two parts and the tokenizer of the first."""
    folder = tmp_path / "text"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", TEXTS)
    write_jsonl(folder / "validation.jsonl", ["a held-out cat", ""])
    run_tokenizer(DataTokenizerConfig(input=str(folder), out=str(tmp_path), vocab_size=270), quiet())
    return folder


def build(source: Path, console: Console | None = None, **options: object) -> dict[str, object]:
    root = source.parent
    values = {"input": str(source), "tokenizer": str(root), "out": str(root / "out")} | options
    return run_build(DataBuildConfig(**values), console or quiet())  # type: ignore[arg-type]


def documents(prefix: Path) -> list[str]:
    corpus, tokenizer = IndexedDataset(prefix), Tokenizer.load(prefix.parent)
    return [tokenizer.decode(corpus[i].tolist()) for i in range(len(corpus))]


def test_build_writes_every_document_with_its_end(source: Path) -> None:
    build(source)
    assert documents(source.parent / "out" / "train") == [f"{text}<|endoftext|>" for text in TEXTS]


def test_receipt_counts_documents_tokens_and_bytes(source: Path) -> None:
    build(source)
    out = source.parent / "out"
    receipt = json.loads((out / "corpus.json").read_text())
    assert receipt["splits"]["train"] == {
        "documents": 6,
        "tokens": IndexedDataset(out / "train").num_tokens,
        "bytes": sum(len(text.encode()) for text in TEXTS),
        "empty": 0,
    }
    assert receipt["splits"]["validation"]["documents"] == 1
    assert receipt["splits"]["validation"]["empty"] == 1


def test_receipt_names_files_by_digest(source: Path) -> None:
    receipt = build(source)
    out = source.parent / "out"
    expected = {path.name: digest_file(path) for path in out.iterdir() if path.name != "corpus.json"}
    assert {name: entry["digest"] for name, entry in receipt["files"].items()} == expected  # type: ignore[attr-defined]


def test_tokenizer_travels_with_the_corpus(source: Path) -> None:
    receipt = build(source)
    copied = source.parent / "out" / "tokenizer.json"
    assert copied.read_bytes() == (source.parent / "tokenizer.json").read_bytes()
    assert receipt["tokenizer"] == digest_file(copied)


def test_one_file_is_divided_by_document(source: Path) -> None:
    write_jsonl(source / "all.jsonl", [f"document {i}" for i in range(60)])
    build(source / "all.jsonl", tokenizer=str(source.parent), out=str(source / "out"), split="0.6,0.2,0.2")
    parts = [documents(source / "out" / part) for part in ("train", "validation", "test")]
    assert sorted(text for part in parts for text in part) == sorted(
        f"document {i}<|endoftext|>" for i in range(60)
    )
    assert all(parts)


def test_part_with_share_zero_is_left_out(source: Path) -> None:
    build(source / "train.jsonl", tokenizer=str(source.parent), out=str(source / "out"), split="1,0,0")
    assert sorted(path.name for path in (source / "out").glob("*.bin")) == ["train.bin"]


def test_part_that_gets_no_document_is_named(source: Path) -> None:
    with pytest.raises(UserError, match=r"test got none of the 6 documents.*split=1,0,0.0000001"):
        build(source / "train.jsonl", tokenizer=str(source.parent), split="1,0,0.0000001")


def test_batches_do_not_change_the_output(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build(source)
    monkeypatch.setattr("mlm.data.build.BATCH_DOCUMENTS", 1)
    assert build(source, out=str(source.parent / "again"))["files"] == whole["files"]


def test_equal_build_is_up_to_date(source: Path) -> None:
    build(source)
    before = (source.parent / "out" / "corpus.json").stat().st_mtime_ns
    console = quiet()
    build(source, console)
    assert "up to date" in console.file.getvalue()  # type: ignore[attr-defined]
    assert (source.parent / "out" / "corpus.json").stat().st_mtime_ns == before


def test_other_build_in_the_same_folder_is_refused(source: Path) -> None:
    build(source)
    write_jsonl(source / "train.jsonl", [*TEXTS, "one more"])
    with pytest.raises(UserError, match=r"made with other inputs.*another out="):
        build(source)


def test_damaged_corpus_is_not_called_up_to_date(source: Path) -> None:
    build(source)
    (source.parent / "out" / "train.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"train\.bin is not what corpus\.json says"):
        build(source)


def test_corpus_of_someone_else_is_not_replaced(source: Path) -> None:
    (source.parent / "out").mkdir()
    (source.parent / "out" / "train.bin").write_bytes(b"precious")
    with pytest.raises(UserError, match=r"train\.bin but no corpus\.json"):
        build(source)
    assert (source.parent / "out" / "train.bin").read_bytes() == b"precious"


def test_build_that_was_killed_is_begun_anew(source: Path) -> None:
    whole = build(source)
    out = source.parent / "out"
    (out / "corpus.json").unlink()
    (out / ".building").touch()
    (out / "test.idx").write_bytes(b"left over")
    (out / ".train.bin.77.partial").write_bytes(b"left over")
    assert build(source)["files"] == whole["files"]
    assert not (out / "test.idx").exists()
    assert [path.name for path in out.glob(".*")] == []


def test_bad_line_is_named_and_no_corpus_appears(source: Path) -> None:
    with (source / "train.jsonl").open("a") as f:
        f.write('{"body": "x"}\n')
    with pytest.raises(UserError, match=r'train\.jsonl:7: no key "text"'):
        build(source)
    assert [path.name for path in (source.parent / "out").iterdir()] == [".building"]


@pytest.mark.parametrize("content", ["", "\n", '{"text": ""}\n'])
def test_empty_corpus_is_a_users_mistake(source: Path, content: str) -> None:
    (source / "train.jsonl").write_text(content)
    with pytest.raises(UserError, match="empty"):
        build(source)


def test_full_disk_is_a_users_mistake(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlm.data.indexed.IndexedWriter.add_document", fail)
    with pytest.raises(UserError, match=r"out=.*No space left on device: free space"):
        build(source)


def test_build_ends_with_a_table(source: Path) -> None:
    console = quiet()
    build(source, console)
    assert "validation" in console.file.getvalue()  # type: ignore[attr-defined]


def test_tokenizer_learns_from_training_text_alone(source: Path) -> None:
    write_jsonl(source / "validation.jsonl", ["zq zq zq zq"] * 99)
    config = DataTokenizerConfig(input=str(source), out=str(source / "t.json"), vocab_size=270)
    assert run_tokenizer(config, quiet()).read_bytes() == (source.parent / "tokenizer.json").read_bytes()


def test_another_tokenizer_is_not_replaced(source: Path) -> None:
    config = DataTokenizerConfig(input=str(source), out=str(source.parent), vocab_size=260)
    with pytest.raises(UserError, match="another tokenizer"):
        run_tokenizer(config, quiet())


def test_tokenizer_of_no_text_is_a_users_mistake(source: Path) -> None:
    (source / "train.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="holds no text"):
        run_tokenizer(DataTokenizerConfig(input=str(source), out=str(source / "t")), quiet())


def test_bad_line_stops_the_tokenizer_with_its_place(source: Path) -> None:
    (source / "train.jsonl").write_text("nonsense\n")
    with pytest.raises(UserError, match=r"train\.jsonl:1"):
        run_tokenizer(DataTokenizerConfig(input=str(source), out=str(source / "t")), quiet())
