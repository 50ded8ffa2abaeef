"""RoBERTa samples: windows of a corpus, framed and masked, each token of it in an epoch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlm.data.config import DataConfig
from mlm.data.gpt import EvalWindows, GPTDataset
from mlm.data.indexed import IndexedDataset
from mlm.models.bert.masking import BERTVocab
from mlm.models.bert.samples import BERTSamples
from mlm.models.roberta.family import FAMILY, corpus_problems
from mlm.models.roberta.samples import MaskedWindows
from mlm.parallel.config import IGNORE_INDEX
from tests.data.corpora import write_corpus
from tests.finetune.material import roberta
from tests.finetune.runs import ROBERTA

CLS, PAD, SEP, MASK = range(4)
SEQ = 16


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    """Documents whose tokens count up from 4, so that each says where it stood, each ended by [SEP]."""
    sizes = np.random.default_rng(1).integers(3, 40, 31)
    ends = 4 + np.cumsum(sizes)
    documents = [[*range(end - n, end), SEP] for n, end in zip(sizes.tolist(), ends.tolist(), strict=True)]
    return write_corpus(tmp_path_factory.mktemp("windows") / "c", documents)


def vocab_of(corpus: IndexedDataset, size: int | None = None) -> BERTVocab:
    return BERTVocab(CLS, SEP, MASK, PAD, np.ones(size or int(corpus.tokens.max()) + 1, dtype=bool))


def samples_of(corpus: IndexedDataset, seed: int = 3, **options: Any) -> MaskedWindows:
    windows = GPTDataset(corpus, seq_length=SEQ - 3, num_samples=900, seed=seed)
    settings: dict[str, Any] = {"vocab": vocab_of(corpus), "masked_lm_prob": 0.15, "max_ngram": 3}
    return MaskedWindows(windows, seed=seed, **settings | options)


def true_tokens(samples: BERTSamples) -> np.ndarray:
    return np.where(samples.labels == IGNORE_INDEX, samples.tokens, samples.labels)


def test_a_sample_is_a_window_between_cls_and_sep(corpus: IndexedDataset) -> None:
    dataset = samples_of(corpus)
    samples = dataset.gather(range(100))
    tokens = true_tokens(samples)
    assert (tokens[:, 0] == CLS).all()
    assert (tokens[:, -1] == SEP).all()
    np.testing.assert_array_equal(tokens[:, 1:-1], dataset.windows.gather(range(100)))
    assert (samples.lengths == SEQ).all()
    assert not samples.token_types.any()
    assert (samples.is_swapped == IGNORE_INDEX).all()


def test_an_epoch_reads_every_token(corpus: IndexedDataset) -> None:
    dataset = samples_of(corpus)
    count = -(-corpus.num_tokens // dataset.windows.seq_length)
    read = set(true_tokens(dataset.gather(range(count)))[:, 1:-1].flatten().tolist())
    assert read == {*corpus.tokens.tolist()}


def test_a_share_of_the_text_is_predicted_and_masked_anew_each_epoch(corpus: IndexedDataset) -> None:
    samples = samples_of(corpus).gather(range(900))
    is_masked = samples.labels != IGNORE_INDEX
    assert set(is_masked.sum(1).tolist()) <= {1, 2}  # round(0.15 * 16)
    assert not is_masked[np.isin(true_tokens(samples), [CLS, SEP])].any()
    by_window: dict[bytes, set[bytes]] = {}
    for window, mask in zip(true_tokens(samples), is_masked, strict=True):
        by_window.setdefault(window.tobytes(), set()).add(mask.tobytes())
    assert max(map(len, by_window.values())) > 1
    other = samples_of(corpus, seed=4).gather(range(900))
    assert (other.tokens != samples.tokens).any()


def test_validation_reads_the_corpus_once_and_pads_its_end(corpus: IndexedDataset) -> None:
    windows = EvalWindows(corpus, seq_length=SEQ - 3)
    dataset = MaskedWindows(windows, seed=0, vocab=vocab_of(corpus), masked_lm_prob=0.15, max_ngram=3)
    samples = dataset.gather(range(len(dataset)))
    last, tokens = int(samples.lengths[-1]), true_tokens(samples)
    assert (samples.lengths[:-1] == SEQ).all()
    assert 2 < last < SEQ
    assert (samples.tokens[-1, last:] == PAD).all()
    assert (samples.labels[-1, last:] == IGNORE_INDEX).all()
    assert tokens[-1, last - 1] == SEP
    text = np.concatenate([tokens[0, 1:-1], *tokens[1:-1, 2:-1], tokens[-1, 2 : last - 1]])
    np.testing.assert_array_equal(text, corpus.tokens)


def test_the_family_reads_a_corpus_with_the_tokenizer_of_a_roberta(tmp_path: Path) -> None:
    tokenizer = roberta()
    text = tokenizer.encode("the cat sat on the mat , the dog ran far . " * 20)
    prefix = write_corpus(tmp_path / "train", [[*text, tokenizer.eod_id]] * 5).prefix
    data = DataConfig(seq_length=24)
    for dataset in (
        FAMILY.samples.train(data, prefix, tokenizer, 10, seed=1, cache=None),
        FAMILY.samples.validation(data, prefix, tokenizer),
    ):
        samples = dataset.gather(range(5))
        assert isinstance(samples, BERTSamples)
        assert samples.tokens.shape == (5, 24)
        assert set(samples.tokens[:, 0].tolist()) == {tokenizer.cls_id}
        # whole words: a token that continues a word is masked with the one before it
        continues = (samples.labels != IGNORE_INDEX) & ~tokenizer.is_word_start[np.maximum(samples.labels, 0)]
        rows, columns = np.nonzero(continues[:, 2:])
        assert (samples.labels[rows, columns + 1] != IGNORE_INDEX).all()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"options": {"position_offset": 1}},
            "model.options.position_offset=1: positions of a RoBERTa begin",
        ),
        ({"options": {}, "token_types": 0}, None),
        ({"vocab_size": 100}, "model.vocab_size=100 is less than the 324 tokens of the tokenizer"),
    ],
)
def test_positions_begin_after_the_padding_of_the_tokenizer(
    tmp_path: Path, changes: dict[str, Any], problem: str | None
) -> None:
    roberta().save(tmp_path)
    found = corpus_problems(replace(ROBERTA, **changes), [], tmp_path / "tokenizer.json")
    assert [str(one)[: len(problem or "")] for one in found] == ([] if problem is None else [problem])
