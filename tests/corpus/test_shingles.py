"""Shingles against n-grams spelled out as Python tuples."""

import string
import unicodedata
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm.corpus.minhash import Unit, flat_shingles, shingles

UNITS: tuple[Unit, ...] = ("word", "character")
WORDS = st.sampled_from(["a", "b", "the", "straße", "STRASSE", "naïve", "x" * 40, "y" * 9, "日本語", "İ"])
GAPS = st.sampled_from([" ", "  ", "\n\n", ", ", " — ", "-", "\x00", "\u3000", "…"])
MIXED = st.lists(st.tuples(WORDS, GAPS), max_size=30).map(lambda pairs: "".join(map("".join, pairs)))
TEXTS = st.one_of(st.text(), st.text(string.printable), MIXED)  # st.text() draws from all of Unicode


def spelled(text: str, ngram: int, unit: Unit) -> set[tuple[str, ...]]:
    """The n-grams of a text by the definition of minhash.py, a character at a time."""
    letters = "".join(letter if in_word(letter) else " " for letter in text.casefold())
    units = letters.split() if unit == "word" else list(" ".join(letters.split()))
    if not units:
        return set()
    return {tuple(units[i : i + ngram]) for i in range(max(1, len(units) - ngram + 1))}


def in_word(letter: str) -> bool:
    return letter.isalnum() or letter == "_" or unicodedata.category(letter).startswith("M")


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


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("text", ["", " \n", "?!… —", "\ud800"])
def test_a_text_without_words_has_no_shingles(unit: Unit, text: str) -> None:
    assert len(shingles(text, ngram=5, unit=unit)) == 0


def test_half_a_million_words_that_are_alike_do_not_collide() -> None:
    text = " ".join(map(str, range(500_000)))  # digits: bytes that differ in a few bits
    assert len(shingles(text, ngram=1, unit="word")) == 500_000
    assert len(shingles(text, ngram=2, unit="word")) == 499_999


def test_words_of_any_length_that_differ_in_one_byte_differ() -> None:
    long = [f"{'a' * i}b{'a' * (length - i - 1)}" for length in range(1, 80) for i in range(length)]
    assert len(shingles(" ".join(long), ngram=1, unit="word")) == len(long)


def test_each_bit_of_a_shingle_is_set_in_half_of_them() -> None:
    """Even where all shingles hold the same words, in another order."""
    texts = [" ".join(order) for order in permutations(["to", "be", "or", "not", "that", "is", "question"])]
    flat, _ = flat_shingles(texts, ngram=7, unit="word")
    shares = np.array([np.mean(flat >> np.uint64(bit) & np.uint64(1)) for bit in range(64)])
    assert np.all(np.abs(shares - 0.5) < 5 * 0.5 / len(flat) ** 0.5)
