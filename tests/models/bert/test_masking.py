"""Whole-word n-gram masking: budgets, words kept whole, and the shares that chance has to give."""

from pathlib import Path

import numpy as np
import pytest

from mlm.data.tokenizer import Tokenizer
from mlm.models.bert.masking import BERTVocab, choose_grams, draw_sizes, mask_tokens, split_grams
from mlm.parallel.config import IGNORE_INDEX
from mlm.util.errors import UserError
from mlm.util.splitmix import draw, root

CLS, SEP, MASK, PAD = 0, 1, 2, 3
VOCAB_SIZE, WIDTH = 1000, 128
CONTINUES = 700
"""Tokens from here on continue a word."""
vocab = BERTVocab(CLS, SEP, MASK, PAD, np.arange(VOCAB_SIZE) < CONTINUES)


def batch(count: int, width: int = WIDTH, continued: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    """Samples of random tokens, [CLS] A [SEP] B [SEP] and some padding, and their lengths."""
    rng = np.random.default_rng(0)
    tokens = np.where(
        rng.random((count, width)) < continued,
        rng.integers(CONTINUES, VOCAB_SIZE, (count, width)),
        rng.integers(4, CONTINUES, (count, width)),
    )
    lengths = rng.integers(width - 20, width + 1, count)
    middles = rng.integers(2, width - 30, count)
    tokens[:, 0] = CLS
    tokens[np.arange(count), middles] = tokens[np.arange(count), lengths - 1] = SEP
    tokens[np.arange(width) >= lengths[:, None]] = PAD
    return tokens, lengths


def mask(tokens: np.ndarray, lengths: np.ndarray, **options: object) -> tuple[np.ndarray, np.ndarray]:
    states = draw(root(9), np.arange(len(tokens)))
    return mask_tokens(tokens, lengths, vocab, states, **{"masked_lm_prob": 0.15, "max_ngram": 3} | options)  # type: ignore[arg-type]


def runs_of_words(row: np.ndarray) -> list[list[list[int]]]:
    """The words of one sample as lists of places, one list of words per segment, written plainly."""
    runs: list[list[list[int]]] = []
    for place, token in enumerate(row.tolist()):
        if token in (CLS, SEP, MASK, PAD):
            runs.append([])
        elif token >= CONTINUES and runs[-1]:
            runs[-1][-1].append(place)
        else:
            runs[-1].append([place])
    return [run for run in runs if run]


def words_of(row: np.ndarray) -> list[list[int]]:
    return [word for run in runs_of_words(row) for word in run]


def test_masked_tokens_never_exceed_the_budget_and_nearly_always_fill_it() -> None:
    tokens, lengths = batch(2000)
    _, labels = mask(tokens, lengths)
    counts = (labels != IGNORE_INDEX).sum(axis=1)
    budgets = [max(1, round(0.15 * length)) for length in lengths.tolist()]
    assert (counts <= budgets).all()
    assert (counts == budgets).mean() > 0.999  # what is left takes a word of its length: there are dozens


def test_a_word_longer_than_the_budget_stays() -> None:
    tokens = np.array([[CLS, 10, 900, SEP, 11, 901, SEP]])
    _, labels = mask(tokens, np.array([7]))  # round(1.05) = 1
    assert (labels == IGNORE_INDEX).all()


def test_special_tokens_are_never_masked() -> None:
    tokens, lengths = batch(500)
    tokens[:, 40] = MASK  # one that the text holds
    _, labels = mask(tokens, lengths, masked_lm_prob=0.6)
    assert not np.isin(labels, [CLS, SEP, MASK, PAD]).any()


def test_words_are_masked_whole_and_labels_are_the_true_tokens() -> None:
    tokens, lengths = batch(200)
    masked, labels = mask(tokens, lengths)
    np.testing.assert_array_equal(np.where(labels == IGNORE_INDEX, masked, labels), tokens)
    for row, row_labels in zip(tokens, labels, strict=True):
        for word in words_of(row):
            assert len({bool(row_labels[place] == IGNORE_INDEX) for place in word}) == 1


@pytest.mark.parametrize("max_ngram", [1, 3])
def test_ngrams_are_consecutive_words_of_one_segment_and_cover_all(max_ngram: int) -> None:
    tokens, _ = batch(100)
    grams = split_grams(tokens, vocab, draw(root(1), np.arange(100)), max_ngram)
    assert grams.words.max() == max_ngram
    place = 0
    pieces = np.split(grams.tokens, np.cumsum(grams.lengths)[:-1])
    for row in range(len(tokens)):
        for run in runs_of_words(tokens[row]):
            at = 0
            while at < len(run):
                count = int(grams.words[place])
                expected = [row * WIDTH + k for word in run[at : at + count] for k in word]
                assert at + count <= len(run)
                assert pieces[place].tolist() == expected
                assert grams.rows[place] == row
                at, place = at + count, place + 1
    assert place == len(grams.words)


def test_chosen_ngrams_follow_one_over_n() -> None:
    tokens = np.random.default_rng(3).integers(4, CONTINUES, (1000, 512))  # one long run
    tokens[:, 0], tokens[:, -1] = CLS, SEP
    states = draw(root(4), np.arange(1000))
    grams = split_grams(tokens, vocab, states, 3)
    chosen = choose_grams(grams, np.full(1000, 77), draw(states, 0))
    counts = np.bincount(grams.words[chosen])[1:]
    shares = counts / counts.sum()
    # About 47 are chosen in each of 1,000 samples: 5 sigma is 0.012. Beyond chance, the last tokens of a
    # budget take short ones: 2 of the 47 at most (0.04), and about half of those would be short anyway.
    np.testing.assert_allclose(shares, [6 / 11, 3 / 11, 2 / 11], atol=0.03)


def test_chosen_tokens_become_mask_random_or_stay_in_80_10_10() -> None:
    tokens, lengths = batch(3000)
    masked, labels = mask(tokens, lengths)
    was, now = labels[labels != IGNORE_INDEX], masked[labels != IGNORE_INDEX]
    count = len(was)
    as_mask, same = (now == MASK).sum(), (now == was).sum()
    unlucky = 0.1 / (VOCAB_SIZE - 4)  # a random token may be the true one
    assert abs(as_mask - 0.8 * count) < 5 * np.sqrt(count * 0.16)
    assert abs(same - (0.1 + unlucky) * count) < 5 * np.sqrt(count * 0.09)


def test_replacement_is_drawn_per_token_not_per_ngram() -> None:
    """Of two chosen neighbours both are [MASK] in 64% of cases, not in 80%."""
    tokens, lengths = batch(3000)
    masked, labels = mask(tokens, lengths)
    both = (labels[:, 1:] != IGNORE_INDEX) & (labels[:, :-1] != IGNORE_INDEX)
    hits = ((masked[:, 1:] == MASK) & (masked[:, :-1] == MASK))[both]
    assert abs(hits.mean() - 0.64) < 5 * np.sqrt(
        0.64 * 0.36 * 2 / len(hits)
    )  # neighbouring pairs share a token


def test_drawn_sizes_follow_one_over_n() -> None:
    counts = np.bincount(draw_sizes(draw(root(2), np.arange(60_000)), 4))
    expected = 60_000 * 12 / 25 / np.arange(1, 5)
    assert ((counts[1:] - expected) ** 2 / expected).sum() < 33  # chi-square, 3 degrees: 3e-7


def test_random_tokens_are_even_over_all_but_the_special_ones() -> None:
    tokens, lengths = batch(6000)
    masked, labels = mask(tokens, lengths)
    drawn = masked[(labels != IGNORE_INDEX) & (masked != MASK) & (masked != labels)]
    counts = np.bincount(drawn, minlength=VOCAB_SIZE)
    assert counts[:4].sum() == 0
    expected = len(drawn) / (VOCAB_SIZE - 4)
    chi_square, degrees = ((counts[4:] - expected) ** 2 / expected).sum(), VOCAB_SIZE - 5
    assert abs(chi_square - degrees) < 6 * np.sqrt(2 * degrees)


def test_vocabulary_of_a_tokenizer_of_berts(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing"]) + "\n")
    found = BERTVocab.of(Tokenizer.load(path))
    assert (found.cls_id, found.sep_id, found.mask_id, found.pad_id) == (2, 3, 4, 0)
    assert found.word_starts.tolist() == [True] * 6 + [False]


def test_tokenizer_without_special_tokens_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[UNK]", "[SEP]", "[CLS]", "play"]) + "\n")
    with pytest.raises(UserError, match=r"no \[MASK\], \[PAD\], which BERT samples need"):
        BERTVocab.of(Tokenizer.load(path))
