"""Decontamination removes what occurs in evaluation texts, in whatever form, and nothing else."""

import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm.corpus import decontaminate as module
from mlm.corpus.benchmarks import EvaluationText
from mlm.corpus.config import DecontaminateConfig
from mlm.corpus.decontaminate import NGramIndex, plain_words
from tests.corpus.texts import build, plain, write_jsonl

WIKI = (
    'It was " red @-@ tipped " , 5 @,@ 000 strong and 0 @.@ 7 long ; the crab \'s claw '
    "did n't close on the naïve fisherman , who <unk> and went home to his wife and told her all about it "
    "in great detail ."
)
RAW = (
    "It was “RED-tipped”, 5,000 strong\nand 0.7 long; the crab's claw didn't  close on the naïve fisherman, "
    "who stumbled and went home\r\n\r\nto his wife and _told_ her all about it in great detail."
)
FILLER = " ".join(f"word{i}" for i in range(200))  # 1.5 kB that no evaluation text holds


def against(*texts: str, **options: object) -> NGramIndex:
    """Index of one set. Margins and least lengths default to 0."""
    config = DecontaminateConfig(**{"margin": 0, "min_piece": 0} | options)  # type: ignore[arg-type]
    return NGramIndex(config, [EvaluationText("set", f"line {i}", text) for i, text in enumerate(texts)])


def words(text: str) -> list[bytes]:
    return plain_words(text).split()


def count_from(first: int, count: int) -> str:
    return " ".join(f"w{i}" for i in range(first, first + count))


def test_raw_text_is_found_by_its_wikitext_form() -> None:
    cleaned = against(WIKI).clean(f"{FILLER}. {RAW} {FILLER}")
    assert "crab" not in "".join(cleaned.pieces)
    assert "told" not in "".join(cleaned.pieces)


@given(
    st.lists(
        st.sampled_from(["a", "k", " ", "<", "\u0338", "\u0301", "\u00ad", "é", "x" * 80]) | st.characters()
    )
)
def test_words_are_those_of_the_whole_text_in_its_form(letters: list[str]) -> None:
    """Folded around letters that are not ASCII alone."""
    text = "".join(letters).encode(errors="ignore").decode()
    form = unicodedata.normalize("NFKC", module.IGNORABLE.sub("", text)).casefold()
    assert words(text) == [word.encode() for word in re.findall(r"[^\W_]+", form)]


def test_nothing_matches_across_a_word_that_was_lost() -> None:
    index = against(f"{count_from(0, 7)} <unk> {count_from(7, 7)}")
    for between in ("", "lost", "unk"):
        assert index.clean(f"{count_from(0, 7)} {between} {count_from(7, 7)}").outcome == "kept"


def test_margin_is_removed_at_word_boundaries() -> None:
    text = f"alpha beta gamma {count_from(0, 13)} delta, epsilon"
    assert against(count_from(0, 13), margin=4).clean(text).pieces == ["alpha beta", ", epsilon"]
    assert against(count_from(0, 13), margin=6).clean(text).pieces == ["alpha beta", ", epsilon"]
    assert against(count_from(0, 13), margin=8).clean(text).pieces == ["alpha", "epsilon"]


def test_pieces_with_few_letters_go() -> None:
    text = f"1234567 {count_from(0, 13)} 12345678"
    assert against(count_from(0, 13), min_piece=8).clean(text).pieces == ["12345678"]
    assert against(count_from(0, 13), min_piece=9).clean(text).outcome == "dropped"


@pytest.mark.parametrize("most, outcome", [(3, "cut"), (2, "dropped")])
def test_document_cut_at_too_many_places_is_dropped(most: int, outcome: str) -> None:
    match = count_from(0, 13)
    text = f"before {match} one {match} two {match} after"
    assert against(match, max_matches=most).clean(text).outcome == outcome


def test_cuts_that_overlap_by_their_margins_are_one_place() -> None:
    match = count_from(0, 13)
    text = f"{FILLER} {match} one {match} two {match} {FILLER}"
    cleaned = against(match, max_matches=1, margin=5).clean(text)
    assert (len(cleaned.matches), len(cleaned.pieces)) == (3, 2)


def test_overlapping_ngrams_are_one_match_with_its_place() -> None:
    text = f"before ({count_from(3, 20)}) after"
    (match,) = against(count_from(50, 30), count_from(0, 40)).clean(text).matches
    assert (match.set, match.number) == ("set", 1)
    assert text[match.begin : match.end] == count_from(3, 20)


def test_ngrams_at_block_edges_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 5)
    index = against(count_from(0, 40))
    for before in range(12):
        assert index.clean(f"{'x ' * before}{count_from(3, 13)} y").pieces[-1] == "y"


WORDS = st.sampled_from(["a", "B", "é", "e\u0301", "ß", "SS", "<unk>", "ﬁ", "'", "n't", "_", "中", "İ", "7"])
GAPS = st.sampled_from([" ", "  ", "\n", "-", "\u2028", ""])
TEXTS = st.lists(st.tuples(WORDS, GAPS), max_size=30).map(lambda pairs: "".join(w + g for w, g in pairs))


@settings(deadline=None, max_examples=200)
@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=4), st.integers(2, 5), st.integers(1, 2))
def test_ngrams_found_are_those_of_a_plain_search(
    text: str, texts: list[str], ngram: int, min_ngram: int
) -> None:
    begin, end, _ = against(*texts, ngram=ngram, min_ngram=min_ngram).find(text)
    known = set[tuple[bytes, ...]]()
    for runs in ([run.split() for run in module.runs(text)] for text in texts):
        short = not any(len(run) >= ngram for run in runs)
        if short and max(map(len, runs), default=0) >= min_ngram:
            known.add(tuple(max(runs, key=len)))
        for run in runs:
            known.update(tuple(run[i : i + ngram]) for i in range(len(run) - ngram + 1))
    mine = words(text)
    pairs = ((i, j) for i in range(len(mine)) for j in range(i + 1, len(mine) + 1))
    expected = {(i, j) for i, j in pairs if tuple(mine[i:j]) in known}
    assert set(zip(begin.tolist(), end.tolist(), strict=True)) == expected


@settings(deadline=None, max_examples=100)
@given(st.lists(TEXTS, max_size=6), TEXTS)
def test_texts_searched_together_are_those_that_hold_an_ngram(texts: list[str], evaluation: str) -> None:
    """One whose last words and the next text's first are an n-gram may be among them."""
    index = against(evaluation, ngram=3, min_ngram=2)
    searched = index.suspects(texts).tolist()
    alone = [len(index.find(text)[0]) > 0 for text in texts]
    assert [found for found, is_hit in zip(searched, alone, strict=True) if is_hit] == [True] * sum(alone)
    assert [index.suspects([text]).tolist() for text in texts] == [[is_hit] for is_hit in alone]


@settings(deadline=None, max_examples=100)
@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=3), st.integers(0, 3), st.integers(0, 3))
def test_pieces_hold_no_match_and_stand_in_the_document_in_order(
    text: str, texts: list[str], margin: int, min_piece: int
) -> None:
    index = against(*texts, ngram=2, min_ngram=1, margin=margin, min_piece=min_piece)
    at = 0
    for piece in index.clean(text).pieces:
        assert index.clean(piece).outcome == "kept"
        assert text.find(piece, at) >= at
        at = text.find(piece, at) + len(piece)


@pytest.mark.parametrize("joint", ["\u0301", "\u00ad", "\u200b"], ids=["accent", "soft hyphen", "zero width"])
def test_a_cut_ends_behind_a_word_whatever_stands_in_it(joint: str) -> None:
    """A word cut at an accent of its own would leave a piece that matches again."""
    index = against("a", ngram=2, min_ngram=1, margin=2, min_piece=1)
    assert index.clean(f"a e{joint}a b").pieces == ["b"]
    assert index.clean(f"b e{joint}a a").pieces == ["b"]


def test_receipt_names_sets_and_the_texts_matched_most(tmp_path: Path) -> None:
    (tmp_path / "set.txt").write_text(f"{count_from(0, 20)}\n{count_from(100, 20)}\n")
    texts = [f"x {count_from(0, 20)} y {count_from(0, 20)} {count_from(100, 20)}", count_from(100, 13), "no"]
    drop = DecontaminateConfig(against=(str(tmp_path / "set.txt"),), action="drop")
    report = build(plain(write_jsonl(tmp_path / "t.jsonl", texts), decontaminate=drop))["contamination"]
    assert report["documents_dropped"] == 2
    assert report["letters_removed"] == len(texts[0] + texts[1])
    assert report["sets"]["set.txt"] == {"texts": 2, "too_short": 0, "texts_hit": 2, "documents": 2}
    assert [(hit["place"], hit["documents"]) for hit in report["most_hit"]] == [("line 2", 2), ("line 1", 1)]
