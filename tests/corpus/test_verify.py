"""`mlm data verify`: what damage is found, and that the rest is harmless."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlm.cli.data.run import run_verify
from mlm.cli.data.settings import DataVerifyConfig
from mlm.corpus.verify import Expected, FileCheck, check_pair
from mlm.data.indexed import DTYPES, IndexedDataset, IndexedWriter, bin_path, idx_path
from mlm.data.receipt import RECEIPT, read_receipt
from mlm.util.errors import CheckFailedError
from mlm.util.files import digest_file
from tests.data.corpora import write_corpus

DOCUMENTS = [[1, 2, 9], [], [7, 9], [5, 6, 9]]
EOD = 9


def with_receipt(folder: Path, *names: str) -> None:
    """A receipt of corpora in a folder."""
    files = [path(folder / name) for name in names for path in (bin_path, idx_path)]
    receipt = {
        "vocab_size": 10,
        "eod_id": EOD,
        "splits": {name: {"documents": 4, "tokens": 8} for name in names},
        "files": {f.name: {"bytes": f.stat().st_size, "digest": digest_file(f)} for f in files},
    }
    (folder / RECEIPT).write_text(json.dumps(receipt))


def verified(path: Path, **keys: Any) -> list[dict[str, str]]:
    """All checks, of a corpus that may be damaged."""
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
    with_receipt(folder, "train")
    return folder


def test_whole_corpus_passes(corpus: Path) -> None:
    assert {check["state"] for check in verified(corpus)} == {"ok"}


@pytest.mark.parametrize("block", [1, 2, 3, 8, 1 << 22])
def test_first_id_out_of_range_is_named_by_document(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("mlm.corpus.verify.BLOCK", 2 * block)
    write_corpus(corpus / "train", [[1, 2, 3], [], [4, 7], [5, 8]])
    with pytest.raises(CheckFailedError, match="document 2, token 1 of it, is 7, not below vocab_size=7"):
        run_verify(DataVerifyConfig(path=str(corpus), vocab_size=7))


def test_truncated_bin_is_named_with_both_sizes(corpus: Path) -> None:
    (corpus / "train.bin").write_bytes(b"12345")
    with pytest.raises(CheckFailedError, match=r"train\.bin: is truncated: expected 16 bytes"):
        run_verify(DataVerifyConfig(path=str(corpus)))


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
    """Every document of a corpus."""
    corpus = IndexedDataset(prefix)
    return [corpus.document(i).tolist() for i in range(corpus.num_documents)]


def problems(prefix: Path, expected: Expected) -> list[FileCheck]:
    return [check for check in check_pair(prefix, expected, lambda count: None) if check.state == "error"]


@pytest.mark.parametrize("change", [1, 2, 4, 8, 11, 16, 32, 64, 128, 255])
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
        if not problems(prefix, Expected(None, None, None)):
            assert contents(prefix) == before, f"byte {at} of the index"


def test_every_changed_byte_is_found_with_a_receipt(corpus: Path) -> None:
    expected = Expected(read_receipt(corpus), 10, EOD)
    for name in ("train.idx", "train.bin"):
        content = (corpus / name).read_bytes()
        for at in range(len(content)):
            (corpus / name).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            assert problems(corpus / "train", expected), f"byte {at} of {name}"
        (corpus / name).write_bytes(content)
