"""GPT windows: what they cover, in which order, and that the order holds still."""

from pathlib import Path

import numpy as np
import pytest

from mlm.data.epochs import permutation
from mlm.data.gpt import EvalWindows, GPTDataset
from mlm.data.indexed import IndexedDataset
from mlm.parallel.config import IGNORE_INDEX
from mlm.util.errors import UserError
from tests.data.corpora import counting_corpus

LENGTHS = [5, 0, 1, 17, 3, 0, 0, 9, 2]  # 37 tokens
SEQ = 4


@pytest.fixture
def corpus(tmp_path: Path) -> IndexedDataset:
    return counting_corpus(tmp_path / "c", LENGTHS)


def gpt(corpus: IndexedDataset, num_samples: int = 40, **options: object) -> GPTDataset:
    return GPTDataset(corpus, **{"seq_length": SEQ, "num_samples": num_samples, "seed": 3} | options)  # type: ignore[arg-type]


def stream(corpus: IndexedDataset, epochs: int, seed: int = 3) -> list[int]:
    """The tokens of several epochs laid end to end, written as plainly as can be."""
    tokens: list[int] = []
    for epoch in range(epochs):
        for document in permutation(corpus.num_documents, seed, epoch, stream=0):
            tokens.extend(corpus[document])
    return tokens


def test_samples_are_the_windows_of_the_shuffled_documents(corpus: IndexedDataset) -> None:
    tokens = stream(corpus, epochs=6)
    windows = [tokens[k * SEQ : k * SEQ + SEQ + 1] for k in range(40)]
    served = gpt(corpus).gather(range(40)).tolist()
    # The last epoch is served in part; the earlier four are 4 * 37 tokens = windows 0 to 36.
    assert sorted(served[:37]) == sorted(windows[:37])


def test_samples_do_not_depend_on_how_many_there_are_nor_on_their_order(corpus: IndexedDataset) -> None:
    """Raising train.steps on resume neither repeats nor skips a sample."""
    whole = gpt(corpus, num_samples=100).gather(range(100))
    ids = np.array([39, 0, 12, 12, 30, 3])  # in the order asked, across epochs, one twice
    np.testing.assert_array_equal(gpt(corpus).gather(ids), whole[ids])
    for count in (1, 9, 10, 55):
        np.testing.assert_array_equal(gpt(corpus, num_samples=count).gather(range(count)), whole[:count])


def test_permutation_stays_what_it_was() -> None:
    """A change here would reorder the data of every run in progress."""
    assert permutation(8, 1234, 0, stream=0).tolist() == [5, 6, 3, 7, 4, 1, 2, 0]


def test_corpus_of_one_window_runs_round_and_round_and_a_shorter_one_says_what_it_needs(
    tmp_path: Path,
) -> None:
    corpus = counting_corpus(tmp_path / "c", [SEQ + 1])
    samples = gpt(corpus).gather(range(40))
    assert ((samples[:, :-1] + 1) % 5 == samples[:, 1:]).all()
    corpus = counting_corpus(tmp_path / "c", [2, 2])
    with pytest.raises(
        UserError, match=r"c\.bin holds 4 tokens.*seq_length=4 needs 5: lower data\.seq_length to 3"
    ):
        gpt(corpus)


def cached(corpus: IndexedDataset, folder: Path, **options: object) -> np.ndarray:
    return gpt(corpus, cache_dir=folder, cache_from=0, **options).gather(range(40))


def test_cache_is_read_rather_than_built_and_serves_the_same_samples(
    corpus: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = gpt(corpus).gather(range(40))
    np.testing.assert_array_equal(cached(corpus, tmp_path / "cache"), plain)
    monkeypatch.setattr(GPTDataset, "_build", lambda *_: pytest.fail("built again"))
    np.testing.assert_array_equal(cached(corpus, tmp_path / "cache"), plain)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "foreign"])
def test_damaged_cache_is_rebuilt(corpus: IndexedDataset, tmp_path: Path, damage: str) -> None:
    plain = cached(corpus, tmp_path / "cache")
    for file in (tmp_path / "cache").iterdir():
        content = bytearray(file.read_bytes())
        content[len(content) // 2 + 20] ^= 1
        new = {"truncated": bytes(content[:-30]), "flipped": bytes(content), "foreign": b"PK\3\4" * 9}
        file.write_bytes(new[damage])
    np.testing.assert_array_equal(cached(corpus, tmp_path / "cache"), plain)


def test_cache_that_cannot_be_written_is_done_without(corpus: IndexedDataset, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    np.testing.assert_array_equal(cached(corpus, tmp_path / "cache"), gpt(corpus).gather(range(40)))


@pytest.mark.parametrize("seq_length", [1, 9, 100])
def test_eval_windows_predict_every_token_but_the_first_once(corpus: IndexedDataset, seq_length: int) -> None:
    windows = EvalWindows(corpus, seq_length=seq_length)
    samples = windows.gather(range(len(windows)))
    labels = samples[:, 1:].ravel()
    assert labels[labels != IGNORE_INDEX].tolist() == list(range(1, 37))


@pytest.mark.parametrize("head", [1, 63, 2000])
def test_head_of_a_permutation_is_its_first_entries(head: int) -> None:
    whole = permutation(1000, 3, 4, stream=0)
    np.testing.assert_array_equal(permutation(1000, 3, 4, stream=0, head=head), whole[:head])
