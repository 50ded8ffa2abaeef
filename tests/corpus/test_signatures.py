"""Shingles against n-grams spelled out; signatures against what is proved of MinHash: slots agree with
probability J, bands with J**rows.
"""

import math
import string
import unicodedata
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm.corpus.config import DedupConfig
from mlm.corpus.minhash import BATCH_DOCUMENTS, NO_KEY, MinHasher, Unit, flat_shingles, shingles

CONFIG = DedupConfig(bands=42, rows=6)
GOLDEN = [[17881121019154703858, 1071245217213772694], [5374615585964787492, 6747461728683282535]]


def agreement(common: int, union: int, trials: int, config: DedupConfig = CONFIG) -> np.ndarray:
    """Mask of slots that agree for pairs of random sets of that overlap: bool [trials, bands, rows]."""
    rng = np.random.default_rng(20190917)
    sets = rng.integers(0, 2**64, (trials, union), dtype=np.uint64)
    middle = common + (union - common) // 2
    pairs = sets[:, :middle], np.concatenate((sets[:, :common], sets[:, middle:]), axis=1)
    a, b = (
        MinHasher(config).slots(part.reshape(-1), np.arange(trials + 1) * part.shape[1]) for part in pairs
    )
    return (a == b).reshape(trials, config.bands, config.rows)


@pytest.mark.parametrize("common, union", [(1, 2), (18, 20), (125, 250), (700, 1000)])
def test_slots_agree_with_probability_j(common: int, union: int) -> None:
    trials, j = 300, common / union
    mean = agreement(common, union, trials).mean()
    # no more variance than independent slots have: rensa's is lower
    assert abs(mean - j) < 5 * math.sqrt(j * (1 - j) / (trials * CONFIG.bands * CONFIG.rows))


@pytest.mark.parametrize("common, union", [(10, 20), (1000, 2000)])
def test_pairs_are_proposed_as_often_as_the_formula_says(common: int, union: int) -> None:
    trials = 1000
    expected = 1 - (1 - (common / union) ** CONFIG.rows) ** CONFIG.bands  # 0.48 at J = 0.5
    proposed = agreement(common, union, trials).all(axis=2).any(axis=1).mean()
    assert abs(proposed - expected) < 5 * math.sqrt(expected * (1 - expected) / trials)


def test_a_signature_does_not_depend_on_its_neighbours() -> None:
    texts = [f"document number {i} " * (i % 7) + f"ends {i}" for i in range(3 * BATCH_DOCUMENTS + 5)]
    signer = MinHasher(CONFIG)
    together = signer.keys(texts)
    alone = np.concatenate([signer.keys([text]) for text in texts])
    assert np.array_equal(together, alone)


def test_a_text_without_words_has_a_key_of_its_own() -> None:
    keys = MinHasher(CONFIG).keys(["words", "...", "", "words"])
    assert np.all(keys[1:3] == NO_KEY)
    assert np.all(keys[[0, 3]] != NO_KEY)
    assert np.array_equal(keys[0], keys[3])


def test_keys_of_this_version_stay_what_they_are() -> None:
    """A build is resumed with keys written before: a change here, or of rensa's, needs a new format."""
    texts = ["five words make one shingle", "Großes Haus, naïve Zeit"]
    keys = MinHasher(DedupConfig(bands=2, rows=3)).keys(texts)
    assert keys.tolist() == GOLDEN


UNITS: tuple[Unit, ...] = ("word", "character")
WORDS = st.sampled_from(["a", "b", "the", "straße", "STRASSE", "naïve", "x" * 40, "y" * 9, "日本語", "İ"])
GAPS = st.sampled_from([" ", "  ", "\n\n", ", ", " — ", "-", "\x00", "\u3000", "…"])
MIXED = st.lists(st.tuples(WORDS, GAPS), max_size=30).map(lambda pairs: "".join(map("".join, pairs)))
TEXTS = st.one_of(st.text(), st.text(string.printable), MIXED)  # st.text() draws from all of Unicode


def spelled(text: str, ngram: int, unit: Unit) -> set[tuple[str, ...]]:
    """The n-grams of a text by the definition of minhash.py, a character at a time."""
    letters = "".join(
        c if c.isalnum() or c == "_" or unicodedata.category(c).startswith("M") else " "
        for c in text.casefold()
    )
    units = letters.split() if unit == "word" else list(" ".join(letters.split()))
    if not units:
        return set()
    return {tuple(units[i : i + ngram]) for i in range(max(1, len(units) - ngram + 1))}


@pytest.mark.parametrize("unit", UNITS)
@settings(deadline=None)
@given(a=TEXTS, b=TEXTS, ngram=st.integers(1, 7))
def test_shingles_of_two_texts_overlap_as_their_ngrams_do(unit: Unit, a: str, b: str, ngram: int) -> None:
    one, other = (set(shingles(text, ngram=ngram, unit=unit).tolist()) for text in (a, b))
    expected_one, expected_other = (spelled(text, ngram, unit) for text in (a, b))
    assert len(one) == len(expected_one)
    assert len(one & other) == len(expected_one & expected_other)


@pytest.mark.parametrize("unit", UNITS)
@settings(deadline=None)
@given(texts=st.lists(TEXTS, max_size=6), ngram=st.integers(1, 7))
def test_texts_together_have_the_shingles_each_has_alone(unit: Unit, texts: list[str], ngram: int) -> None:
    flat, offsets = flat_shingles(texts, ngram=ngram, unit=unit)
    together = [set(flat[begin:end].tolist()) for begin, end in pairwise(offsets)]
    assert together == [set(shingles(text, ngram=ngram, unit=unit).tolist()) for text in texts]
