"""Sentences of a sample, and their two segments."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm.data.indexed import IndexedDataset, IndexedWriter, token_dtype
from mlm.models.bert import pairs as bert_pairs
from mlm.models.bert.pairs import TargetLengths, find_spans, make_pairs, shorten
from mlm.util.splitmix import draw, root

Documents = Sequence[Sequence[int]]
"""Tokens of each sentence of each document."""

documents_of_some_kind = st.lists(st.lists(st.integers(0, 12), max_size=12), min_size=1, max_size=40)


def sentence_corpus(prefix: Path, documents: Documents) -> IndexedDataset:
    """A corpus whose tokens count up from 4."""
    at = 4
    with IndexedWriter(prefix, token_dtype(100_000)) as writer:
        for lengths in documents:
            writer.add_document(np.arange(at, at + sum(lengths)), np.array(lengths, dtype=np.int64))
            at += sum(lengths)
    return IndexedDataset(prefix, allow_empty=True)


def mixed(state: int, number: int) -> int:
    """Output of SplitMix64, in plain integers."""
    ones = (1 << 64) - 1
    bits = (state + (number + 1) * 0x9E3779B97F4A7C15) & ones
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & ones
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & ones
    return bits ^ bits >> 31


def target(state: int, sentence: int, longest: int, short_prob: float) -> int:
    bits = mixed(state, sentence)
    if (bits >> 11) / 2**53 < short_prob:
        return 2 + int((mixed(bits, 0) >> 11) / 2**53 * (longest - 1))
    return longest


def plain_spans(documents: Documents, state: int, longest: int, short_prob: float) -> list[tuple[int, int]]:
    """Samples of a corpus as a loop over its sentences."""
    spans, first = [], 0
    for lengths in documents:
        filled = [(first + k, length) for k, length in enumerate(lengths) if length]
        first += len(lengths)
        begin, tokens = 0, 0
        for k, (_, length) in enumerate(filled):
            tokens += length
            left = len(filled) - k - 1
            goal = target(state, filled[begin][0], longest, short_prob)
            if len(filled) > 1 and ((tokens >= goal and k > begin and left > 1) or left == 0):
                spans.append((filled[begin][0], filled[k][0] + 1))
                begin, tokens = k + 1, 0
    return spans


def spans_of(corpus: IndexedDataset, state: int, longest: int, short_prob: float) -> list[tuple[int, int]]:
    begins, ends = find_spans(corpus, TargetLengths(root(state), longest, short_prob))
    return list(zip(begins.tolist(), ends.tolist(), strict=True))


@given(documents_of_some_kind, st.integers(0, 9), st.integers(2, 40), st.sampled_from([0.0, 0.1, 0.7, 1.0]))
@settings(deadline=None)
def test_spans_equal_a_plain_loop(
    tmp_path_factory: pytest.TempPathFactory,
    documents: Documents,
    state: int,
    longest: int,
    short_prob: float,
) -> None:
    corpus = sentence_corpus(tmp_path_factory.mktemp("spans") / "c", documents)
    assert spans_of(corpus, state, longest, short_prob) == plain_spans(documents, state, longest, short_prob)


@pytest.fixture(scope="module")
def documents() -> Documents:
    """200 documents of 1 to 60 sentences, 2 of 1,500, some sentences empty."""
    rng = np.random.default_rng(0)
    counts = [*rng.integers(1, 60, 200), 1500, 1500]
    return [rng.integers(0, 40, count).tolist() for count in counts]


def test_spans_do_not_depend_on_how_the_work_is_cut(
    tmp_path: Path, documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bert_pairs, "CHUNK", 100)
    corpus = sentence_corpus(tmp_path / "c", documents)
    assert spans_of(corpus, 3, 100, 0.3) == plain_spans(documents, 3, 100, 0.3)


def megatron_helpers() -> ModuleType:
    """Megatron-LM's compiled sample builder, without the import of the whole package."""
    package = importlib.util.find_spec("megatron")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs megatron-core, which the extra dev installs")
    folder = Path(next(iter(package.submodule_search_locations))) / "core" / "datasets"
    found = sorted(folder.glob("helpers_cpp*.so"))
    if not found:
        pytest.skip(f"megatron-core has no compiled helpers in {folder}")
    spec = importlib.util.spec_from_file_location("helpers_cpp", found[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("longest", [2, 125])
def test_spans_of_full_length_are_megatrons(tmp_path: Path, documents: Documents, longest: int) -> None:
    """Without short samples: Megatron's random targets come from a generator of its own."""
    filled = [[length for length in lengths if length] for lengths in documents]
    corpus = sentence_corpus(tmp_path / "c", filled)
    theirs = megatron_helpers().build_mapping(
        np.array(corpus.document_indices), np.array(corpus.lengths), 1, 1 << 40, longest, 0.0, 1, False, 2
    )
    assert spans_of(corpus, 0, longest, 0.0) == sorted((int(begin), int(end)) for begin, end, _ in theirs)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 60))
def test_shortening_takes_tokens_from_the_longer_segment(first: int, second: int, goal: int) -> None:
    """Megatron-LM's rule, one token at a time."""
    got = shorten(np.array([[first, second]]), np.array([goal]))
    while first + second > goal:
        if first > second:
            first -= 1
        else:
            second -= 1
    assert got.tolist() == [[first, second]]


def pairs_of(corpus: IndexedDataset, count: int, goal: int) -> bert_pairs.Pairs:
    """The first document's pairs under `count` different draws."""
    begins = np.zeros(count, dtype=np.int64)
    ends = begins + corpus.document_indices[1]
    return make_pairs(corpus, begins, ends, np.full(count, goal), draw(root(7), np.arange(count)))


def test_pairs_are_cut_evenly_between_sentences(tmp_path: Path) -> None:
    corpus = sentence_corpus(tmp_path / "c", [[5, 3, 4, 6]])
    pairs = pairs_of(corpus, 30_000, goal=100)
    first = np.where(pairs.swapped, pairs.lengths[:, 1], pairs.lengths[:, 0])
    assert (pairs.lengths.sum(axis=1) == 18).all()
    counts = np.bincount(first)
    assert counts.nonzero()[0].tolist() == [5, 8, 12]
    assert ((counts[[5, 8, 12]] - 10_000) ** 2 / 10_000).sum() < 29  # chi-square, 2 degrees: 5e-7


def test_half_of_the_pairs_are_swapped(tmp_path: Path) -> None:
    pairs = pairs_of(sentence_corpus(tmp_path / "c", [[5, 3]]), 40_000, goal=100)
    assert abs(pairs.swapped.sum() - 20_000) < 5 * 100
    assert (pairs.places[:, 0] > pairs.places[:, 1]).tolist() == pairs.swapped.tolist()


def test_every_part_of_a_long_segment_may_stay(tmp_path: Path) -> None:
    pairs = pairs_of(sentence_corpus(tmp_path / "c", [[20, 1]]), 34_000, goal=5)
    long = np.where(pairs.swapped, pairs.places[:, 1], pairs.places[:, 0])
    counts = np.bincount(long, minlength=17)  # 4 of 20 tokens: 17 places
    assert ((counts - 2000) ** 2 / 2000).sum() < 59  # chi-square, 16 degrees: probability 7e-7
