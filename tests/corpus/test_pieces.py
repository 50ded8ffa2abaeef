"""A long text is processed in pieces with the result of the whole, and split into sentences without loss."""

import random
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm.corpus import decontaminate, minhash, pieces
from mlm.corpus.benchmarks import EvaluationText
from mlm.corpus.config import DecontaminateConfig, DedupConfig
from mlm.corpus.filter import MEASURES, Measures
from mlm.corpus.minhash import MinHasher
from mlm.corpus.pieces import BLOCK, pieces_of, segments, split_sentences
from mlm.data.tokenizer import Tokenizer
from tests.corpus.texts import small_tokenizer, words, write_jsonl

ODD = [" ", " ", " ", "\n", "\r\n", ". ", "... ", "…", "# ", "\n- ", " “q” ", "Ã©", "\t", "İ", "ß", "e\u0301"]
ODD += ["😀", "\u00ad", "x" * 90, "   \n  ", "\u2028", "中文", "\x0b", "...."]


def odd_text(seed: int, count: int = 120) -> str:
    rng = random.Random(seed)
    return "".join(word + rng.choice(ODD) for word in words(rng, count))


@pytest.mark.parametrize("seed", range(4))
def test_measures_words_and_signatures_of_pieces_are_those_of_the_whole(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = odd_text(seed)
    names = ("words", "mean_word_length", "symbol_ratio", "alphabetic_words", "stop_words", "duplicate_lines")
    search = decontaminate.NGramIndex(
        DecontaminateConfig(ngram=3, min_ngram=2), [EvaluationText("set", "line 0", odd_text(seed)[200:600])]
    )

    def results() -> list[object]:
        measures, hits = Measures(text), search.find(text)
        assert len(hits[0])
        return [
            *(MEASURES[name](measures) for name in names),
            *(part.tolist() for part in (*decontaminate.spans(text), *hits)),
            *(MinHasher(DedupConfig(unit=unit)).keys([text]).tolist() for unit in get_args(minhash.Unit)),
        ]

    whole = results()
    monkeypatch.setattr(pieces, "PIECE", 50)
    monkeypatch.setattr(minhash, "BLOCK", 70)
    assert len(list(pieces_of(text))) > 5
    assert "".join(pieces_of(text)) == text
    assert results() == whole


def test_tokens_of_segments_are_those_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.load(small_tokenizer(tmp_path))
    monkeypatch.setattr(pieces, "PIECE", 200)
    monkeypatch.setattr(pieces, "WINDOW", 187)
    monkeypatch.setattr(pieces, "AROUND", 12)
    for seed in range(6):
        text = " ".join(words(random.Random(seed), 300)) + odd_text(seed, 20)
        found = tokenizer.encode_batch(list(segments(tokenizer, text)))
        assert len(found) > 5
        assert np.concatenate(found).tolist() == tokenizer.encode(text)


MEMORY = """
import resource, sys
from pathlib import Path
from mlm.corpus.config import DedupConfig, FilterConfig, NormaliseConfig
from tests.corpus.texts import plain, quiet, write_jsonl
from mlm.corpus.build import run_build
dedup = DedupConfig()
text = plain(Path(sys.argv[1]), dedup=dedup, normalise=NormaliseConfig(), filter=FilterConfig())
run_build(plain(Path(sys.argv[2]), dedup=dedup), quiet())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run_build(text, quiet())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_memory_does_not_multiply_with_a_document(tmp_path: Path) -> None:
    """A 4 MB document takes less than 100 MB beside what a small one takes; at once it took some 450."""
    text = " ".join(words(random.Random(0), 4000)) + "\n"
    long = write_jsonl(tmp_path / "long/a.jsonl", [text * (4_000_000 // len(text))])
    short = write_jsonl(tmp_path / "short/a.jsonl", [text])
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(long), str(short)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(done.stdout.split()[-1]) < 100_000


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


def test_the_end_of_a_block_ends_no_sentence() -> None:
    sentences = [f"Sentence number {'one ' * (k % 7)}is of some length." for k in range(BLOCK // 10)]
    assert split_sentences(" ".join(sentences)) == sentences


@pytest.mark.parametrize("unit", ["word ", "x", "Mr. "])
def test_text_without_a_full_stop_falls_into_blocks(unit: str) -> None:
    text = unit * (5 * BLOCK // len(unit))
    sentences = split_sentences(text)
    assert max(map(len, sentences)) <= BLOCK
    assert len(sentences) <= 6
    assert letters(sentences) == letters([text])


def test_spaces_outside_ascii_before_a_full_stop_are_borne() -> None:
    """sentencex 1.0 alone stops in a panic here."""
    assert split_sentences("B\u3000. Then.") == ["B\u3000.", "Then."]
