"""BERT samples: what they hold, and that sample i is sample i whoever asks."""

from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest

from mlm.data.indexed import IndexedDataset
from mlm.models.bert import samples as bert
from mlm.models.bert.masking import BERTVocab
from mlm.models.bert.samples import BERTDataset, BERTSamples
from mlm.parallel.config import IGNORE_INDEX
from mlm.util.errors import UserError

from .test_pairs import sentence_corpus

CLS, SEP, MASK, PAD = 0, 1, 2, 3
SEQ = 32


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    """150 documents of 0 to 24 sentences; tokens count up from 4, so that each says where it stood."""
    rng = np.random.default_rng(1)
    documents = [rng.integers(1, 12, count).tolist() for count in rng.integers(0, 25, 150)]
    return sentence_corpus(tmp_path_factory.mktemp("bert") / "c", documents)


def vocab_of(corpus: IndexedDataset, missing: int = 0) -> BERTVocab:
    size = corpus.num_tokens + 4 - missing
    return BERTVocab(CLS, SEP, MASK, PAD, np.arange(size) % 4 != 1)


def samples_of(corpus: IndexedDataset, **options: object) -> BERTDataset:
    defaults: dict[str, object] = {
        "seq_length": SEQ,
        "num_samples": 2000,
        "seed": 3,
        "vocab": vocab_of(corpus),
    }
    return BERTDataset(corpus, **defaults | options)  # type: ignore[arg-type]


def assert_equal(one: BERTSamples, other: BERTSamples) -> None:
    for a, b in zip(astuple(one), astuple(other), strict=True):
        np.testing.assert_array_equal(a, b)


def rows(samples: BERTSamples, ids: np.ndarray | slice) -> BERTSamples:
    return BERTSamples(*(values[ids] for values in astuple(samples)))


def segments(samples: BERTSamples, k: int) -> tuple[list[int], list[int]]:
    """A and B of a sample with the true tokens back in place."""
    length = int(samples.lengths[k])
    true = np.where(samples.labels[k] == IGNORE_INDEX, samples.tokens[k], samples.labels[k])[:length].tolist()
    assert (true[0], true[-1], true.count(SEP)) == (CLS, SEP, 2)
    middle = true.index(SEP)
    return true[1:middle], true[middle + 1 : -1]


def test_samples_are_cls_a_sep_b_sep_and_padding(corpus: IndexedDataset) -> None:
    samples = samples_of(corpus).gather(range(500))
    for k in range(500):
        a, b = segments(samples, k)
        assert a
        assert b
        types = [0] * (len(a) + 2) + [1] * (len(b) + 1)
        assert samples.token_types[k].tolist() == types + [0] * (SEQ - len(types))
        assert samples.lengths[k] == len(types)
        assert (samples.tokens[k, len(types) :] == PAD).all()
        assert (samples.labels[k, len(types) :] == IGNORE_INDEX).all()


def test_segments_are_runs_of_one_document_in_the_order_the_label_says(corpus: IndexedDataset) -> None:
    samples, starts = samples_of(corpus).gather(range(500)), corpus.document_starts
    assert 0 < samples.is_swapped.sum() < 500
    for k in range(500):
        a, b = segments(samples, k)
        assert a == list(range(a[0], a[0] + len(a)))
        assert b == list(range(b[0], b[0] + len(b)))
        assert bool(samples.is_swapped[k]) == (a[0] > b[0])
        documents = np.searchsorted(starts, np.array([a[0], a[-1], b[0], b[-1]]) - 4, side="right")
        assert len(set(documents.tolist())) == 1


def test_an_epoch_covers_every_sentence_of_longer_documents_once(corpus: IndexedDataset) -> None:
    bounds = corpus.document_indices
    several = np.flatnonzero(np.diff(bounds) >= 2)
    for epoch in (0, 5):
        spans = samples_of(corpus).epoch(epoch)
        covered = sorted(k for begin, end in spans.T for k in range(begin, end))
        assert covered == [k for d in several for k in range(bounds[d], bounds[d + 1])]


def test_samples_are_served_epoch_after_epoch(corpus: IndexedDataset) -> None:
    """Sample ids run on through the epochs: each is served whole before the next begins."""
    dataset = samples_of(corpus, seq_length=400, short_seq_prob=0.0)  # nothing is shortened
    places = corpus.pointers // corpus.dtype.itemsize
    begins = np.concatenate([places[dataset.epoch(number)[0]] for number in range(3)])
    samples = dataset.gather(range(len(begins)))
    firsts = [min(a[0], b[0]) - 4 for a, b in (segments(samples, k) for k in range(len(begins)))]
    assert firsts == begins.tolist()


def test_one_sample_equals_the_same_of_many(corpus: IndexedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, so that raising train.steps neither repeats nor skips a sample."""
    whole = samples_of(corpus).gather(range(2000))
    monkeypatch.setattr(bert, "BATCH", 3 * SEQ)
    fresh = samples_of(corpus)
    ids = np.array([1999, 0, 12, 12, 700, 3, 4, 5])  # across epochs, one twice
    assert_equal(fresh.gather(ids), rows(whole, ids))
    for k in (1500, 2):
        assert_equal(samples_of(corpus, num_samples=k + 1).gather([k]), rows(whole, slice(k, k + 1)))


def test_samples_stay_what_they_were(tmp_path: Path) -> None:
    """A change here would alter the data of every run in progress."""
    samples = samples_of(sentence_corpus(tmp_path / "c", [[4, 3, 5], [2, 6]]), seq_length=16).gather(range(3))
    assert samples.tokens.tolist() == [
        [CLS, 16, 17, SEP, MASK, 19, 20, 21, MASK, 23, SEP, PAD, PAD, PAD, PAD, PAD],
        [CLS, 4, 5, 6, 7, 8, 9, 10, SEP, 11, 12, 13, MASK, MASK, SEP, PAD],
        [CLS, 11, 12, 13, 14, 4, SEP, 4, 5, MASK, 7, 8, 9, 10, SEP, PAD],
    ]
    assert samples.is_swapped.tolist() == [0, 0, 1]


def cached(corpus: IndexedDataset, folder: Path, **options: object) -> BERTSamples:
    return samples_of(corpus, cache_dir=folder, cache_from=0, **options).gather(range(2000))


def test_cache_serves_the_same_samples(corpus: IndexedDataset, tmp_path: Path) -> None:
    plain = samples_of(corpus).gather(range(2000))
    assert_equal(cached(corpus, tmp_path / "cache"), plain)
    assert_equal(cached(corpus, tmp_path / "cache"), plain)


@pytest.mark.parametrize("option", [{"seed": 9}, {"short_seq_prob": 0.5}])
def test_cache_of_other_settings_is_not_taken(
    corpus: IndexedDataset, tmp_path: Path, option: dict[str, object]
) -> None:
    cached(corpus, tmp_path / "cache")
    assert_equal(
        cached(corpus, tmp_path / "cache", **option), samples_of(corpus, **option).gather(range(2000))
    )


def test_corpus_without_two_sentences_says_what_to_build(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"c\.bin has no document of two sentences.*sentences=true"):
        samples_of(sentence_corpus(tmp_path / "c", [[5], [7], [0, 3]]))


@pytest.mark.parametrize("seq_length", [4, 1 << 20])
def test_sequence_length_out_of_range_is_named(corpus: IndexedDataset, seq_length: int) -> None:
    with pytest.raises(UserError, match=rf"data\.seq_length={seq_length}.*from 5 to 1048575"):
        samples_of(corpus, seq_length=seq_length)


def test_tokens_outside_the_vocabulary_are_rejected(corpus: IndexedDataset) -> None:
    dataset = samples_of(corpus, vocab=vocab_of(corpus, missing=20))
    with pytest.raises(UserError, match="token ids that the tokenizer's"):
        dataset.gather(range(2000))
