"""Sentences: where they end, and that nothing of the text is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm.corpus.pieces import BLOCK, split_sentences

PIECES = ["a", "B", " ", ".", "\n", "\n\n", "!", '"', "(", ")", "1.", "é", "😀", "。", "Mr. ", "\u3000", "«"]


def letters(texts: list[str]) -> str:
    """All but white space."""
    return "".join("".join(texts).split())


@pytest.mark.parametrize(
    "sentences",
    [
        ["Dr. Smith of the U.S. Army met Mr. J. R. Ewing at 5 p.m. on Jan. 3.", "He left."],
        ["What?!", "No...", "It cost $3.50.", "Yes!"],
        ['He said "Go away."', "Then he left."],
        ["A line\nthat goes on.", "The next."],
        ["A heading", "Its text."],
    ],
)
def test_sentences_are_split_as_a_reader_would(sentences: list[str]) -> None:
    between = "\n\n" if "A heading" in sentences else " "
    assert split_sentences(between.join(sentences)) == sentences


@given(st.lists(st.sampled_from(PIECES)).map("".join) | st.text(st.characters(exclude_categories=["Cs"])))
def test_sentences_hold_the_whole_text(text: str) -> None:
    assert letters(split_sentences(text)) == letters([text])


def test_marks_of_the_next_paragraph_stay_apart() -> None:
    assert split_sentences("They leave.\n\n* * *\n\nThey return.") == ["They leave.", "* * *", "They return."]


def test_the_end_of_a_block_ends_no_sentence() -> None:
    sentences = [f"Sentence number {'one ' * (k % 7)}is of some length." for k in range(BLOCK // 10)]
    assert split_sentences(" ".join(sentences)) == sentences


@pytest.mark.parametrize("unit", ["word ", "x", "word\n", "ß ", "Mr. "])
def test_text_without_a_full_stop_falls_into_blocks(unit: str) -> None:
    text = unit * (5 * BLOCK // len(unit))
    sentences = split_sentences(text)
    assert max(map(len, sentences)) <= BLOCK
    assert len(sentences) <= 6
    assert letters(sentences) == letters([text])


def test_spaces_outside_ascii_before_a_full_stop_are_borne() -> None:
    """sentencex 1.0 alone stops in a panic here."""
    assert split_sentences("B\u3000. Then.") == ["B\u3000.", "Then."]
