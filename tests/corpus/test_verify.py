"""`mlm data verify` and `inspect`: what damage is found, counts against NumPy's, what is safe to print."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlm.cli.data.run import run_inspect, run_verify
from mlm.cli.data.settings import DataInspectConfig, DataVerifyConfig
from mlm.corpus.train_tokenizer import train_bpe
from mlm.corpus.verify import ExpectedFacts, FileCheck, check_pair
from mlm.data.indexed import DTYPES, IndexedDataset, IndexedWriter, bin_path, idx_path, token_dtype
from mlm.data.receipt import RECEIPT, read_receipt
from mlm.util.errors import CheckFailedError
from mlm.util.files import digest_file
from tests.data.corpora import write_corpus

DOCUMENTS = [[1, 2, 9], [], [7, 9], [5, 6, 9]]
EOD = 9


def verified(path: Path, **keys: Any) -> list[dict[str, str]]:
    out = path.parent / "verdict.json"
    try:
        run_verify(DataVerifyConfig(path=str(path), out=str(out), **keys))
    except CheckFailedError:
        assert not json.loads(out.read_text())["whole"]
    return list(json.loads(out.read_text())["checks"])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with the corpus `train` and its receipt."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_corpus(folder / "train", DOCUMENTS)
    files = bin_path(folder / "train"), idx_path(folder / "train")
    receipt = {
        "vocab_size": 10,
        "eod_id": EOD,
        "splits": {"train": {"documents": 4, "tokens": 8}},
        "files": {f.name: {"bytes": f.stat().st_size, "digest": digest_file(f)} for f in files},
    }
    (folder / RECEIPT).write_text(json.dumps(receipt))
    return folder


@pytest.mark.parametrize("block", [1, 3, 1 << 22])
def test_first_id_out_of_range_is_named_by_document(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("mlm.corpus.verify.BLOCK", 2 * block)
    write_corpus(corpus / "train", [[1, 2, 3], [], [4, 7], [5, 8]])
    with pytest.raises(CheckFailedError, match="document 2, token 1 of it, is 7, not below vocab_size=7"):
        run_verify(DataVerifyConfig(path=str(corpus), vocab_size=7))


@pytest.mark.parametrize("name", ["train.bin", "train.idx"])
def test_missing_half_is_named(corpus: Path, name: str) -> None:
    (corpus / name).unlink()
    with pytest.raises(CheckFailedError, match=rf"{name}: is missing"):
        run_verify(DataVerifyConfig(path=str(corpus)))


def test_foreign_corpus_without_receipt_passes_with_notes(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c_text_document", DOCUMENTS)
    states = {check["name"]: check["state"] for check in verified(tmp_path / "c_text_document")}
    assert "error" not in states.values()
    assert states["token ids"] == "note"


def contents(prefix: Path) -> list[list[int]]:
    corpus = IndexedDataset(prefix)
    return [corpus.document(i).tolist() for i in range(corpus.num_documents)]


def problems(prefix: Path, expected: ExpectedFacts) -> list[FileCheck]:
    return [check for check in check_pair(prefix, expected, lambda count: None) if check.state == "error"]


@pytest.mark.parametrize("change", [1, 8, 11, 128])
def test_changed_byte_of_header_lengths_or_pointers_is_found_or_harmless(tmp_path: Path, change: int) -> None:
    """Without a receipt. Harmless: all documents read as before, as where u16 becomes i16 (8 xor 11 = 3)."""
    prefix = tmp_path / "c"
    with IndexedWriter(prefix, DTYPES[8]) as writer:
        writer.add_document([1, 2, 3], [1, 2])
        writer.add_document([4, 5])
    index, before = idx_path(prefix).read_bytes(), contents(prefix)
    for at in range(34 + 12 * 3):
        damaged = bytearray(index)
        damaged[at] ^= change
        idx_path(prefix).write_bytes(damaged)
        if not problems(prefix, ExpectedFacts(None, None, None)):
            assert contents(prefix) == before, f"byte {at} of the index"


def test_every_changed_byte_is_found_with_a_receipt(corpus: Path) -> None:
    expected = ExpectedFacts(read_receipt(corpus), 10, EOD)
    for name in ("train.idx", "train.bin"):
        content = (corpus / name).read_bytes()
        for at in range(len(content)):
            (corpus / name).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            assert problems(corpus / "train", expected), f"byte {at} of {name}"
        (corpus / name).write_bytes(content)


def inspected(path: Path, **keys: Any) -> dict[str, Any]:
    """The facts of the only corpus at `path`."""
    out = path.parent / "facts.json"
    run_inspect(DataInspectConfig(path=str(path), out=str(out), **keys))
    (facts,) = json.loads(out.read_text())["corpora"]
    return dict(facts)


@pytest.mark.parametrize("count", [1, 100])
def test_lengths_are_those_of_numpy(tmp_path: Path, count: int) -> None:
    lengths = np.random.default_rng(count).integers(0, 90, count).tolist()
    write_corpus(tmp_path / "c", [[5] * length for length in lengths])
    found = inspected(tmp_path / "c")["tokens_per_document"]
    assert (found["min"], found["max"]) == (min(lengths), max(lengths))
    assert found["median"] == sorted(lengths)[(count - 1) // 2]
    assert found["mean"] == pytest.approx(np.mean(lengths))


def test_sequences_documents_and_ends_are_counted(tmp_path: Path) -> None:
    (tmp_path / "corpus.json").write_text('{"vocab_size": 400, "eod_id": 300}')
    with IndexedWriter(tmp_path / "c", token_dtype(400)) as writer:
        writer.add_document([1, 2, 300], [1, 2])
        writer.add_document([300, 4])
        writer.add_document([])
        writer.add_document([5, 6, 300], [1, 1, 1])
    found = inspected(tmp_path / "c")
    assert (found["sequences"], found["documents"], found["tokens"]) == (7, 4, 8)
    assert (found["ends_with_eod"], found["looked_at"]) == (0.5, 4)


def test_samples_are_text_and_cannot_steer_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = train_bpe(["a b c"], 260)
    tokenizer.save(tmp_path)
    write_corpus(tmp_path / "c", [tokenizer.encode("red \x1b[31m [bold] text")])
    (sample,) = inspected(tmp_path / "c")["samples"]
    shown = capsys.readouterr().out
    assert sample["text"] == "red \x1b[31m [bold] text"
    assert "\x1b" not in shown
    assert r"red \x1b[31m [bold] text" in shown
