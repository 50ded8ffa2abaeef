"""Documents are assigned to parts, and a corpus is checked before training on it."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from mlm.data.corpus_files import parse_split, split_of_document
from mlm.data.receipt import MARKER, check_corpus
from mlm.util.errors import UserError
from mlm.util.files import digest_file
from tests.data.corpora import counting_corpus


def problems(prefix: Path, *, vocab_size: int = 100, seq_length: int = 4, min_samples: int = 2) -> list[str]:
    return check_corpus(prefix, vocab_size=vocab_size, seq_length=seq_length, min_samples=min_samples)


def receipt(folder: Path, vocab_size: int, num_bytes: int) -> None:
    entry = {"bytes": num_bytes, "digest": digest_file(folder / "c.bin")}
    content = {"vocab_size": vocab_size, "files": {"c.bin": entry}}
    (folder / "corpus.json").write_text(json.dumps(content))


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    counting_corpus(tmp_path / "c", [30, 20])  # 50 tokens, 100 bytes
    return tmp_path / "c"


def test_sound_corpus_has_no_problem(prefix: Path) -> None:
    assert problems(prefix, vocab_size=50, seq_length=4, min_samples=12) == []


def test_a_corpus_is_not_read_where_a_command_was_interrupted(prefix: Path) -> None:
    (prefix.parent / MARKER).touch()
    assert problems(prefix) == [
        f"{prefix.parent} is incomplete: run the command again that was interrupted there"
    ]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"seq_length": 50}, "lower data.seq_length to 49"),
        ({"min_samples": 13}, "holds 12 windows .* lower train.global_batch_size to 12"),
        ({"vocab_size": 49}, "model.vocab_size=50"),  # found by scanning
    ],
)
def test_corpus_that_does_not_fit_names_the_setting_that_does(
    prefix: Path, setting: dict[str, int], words: str
) -> None:
    (problem,) = problems(prefix, **setting)
    assert re.search(words, problem)


def test_receipt_says_the_vocabulary_without_scanning(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mlm.data.indexed.IndexedDataset.max_token")
    receipt(prefix.parent, vocab_size=90, num_bytes=100)
    assert problems(prefix, vocab_size=90) == []
    (problem,) = problems(prefix, vocab_size=89)
    assert "model.vocab_size=90" in problem


OTHER_FILE = '{"vocab_size": 90, "files": {"c.bin": {"bytes": 102}}}'
OUTSIDE = '{"vocab_size": 90, "files": {"../c.bin": {"bytes": 100}}}'
VOCABULARIES = [f'{{"vocab_size": {size}}}' for size in (-1, 1 << 70)]


@pytest.mark.parametrize("content", ["{", "{}", OTHER_FILE, OUTSIDE, *VOCABULARIES])
def test_damaged_receipt_is_an_error(prefix: Path, content: str) -> None:
    """A negative vocabulary would let any token pass."""
    (prefix.parent / "corpus.json").write_text(content)
    (problem,) = problems(prefix)
    assert "corpus.json" in problem


@pytest.mark.parametrize("text", ["0.9,0.1", "0.9,0.2,0", "0,1,0", "1.5,-0.5,0", "nan,0,0"])
def test_split_takes_commas_or_slashes_between_three_shares_whose_sum_is_one(text: str) -> None:
    assert parse_split("0.9,0.1,0") == parse_split("0.9/0.1/0") == (0.9, 0.1, 0)
    with pytest.raises(UserError, match="split="):
        parse_split(text)


def test_documents_fall_into_parts_by_their_shares() -> None:
    counts = Counter(split_of_document(b"%d" % i, (0.8, 0.2, 0), seed=1) for i in range(10_000))
    assert counts["test"] == 0
    assert abs(counts["validation"] - 2000) < 200  # five standard deviations
    parts = [[split_of_document(b"%d" % i, (0.5, 0.5, 0), seed) for i in range(50)] for seed in (1, 2)]
    assert parts[0] != parts[1]
