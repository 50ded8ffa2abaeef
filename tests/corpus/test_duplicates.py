"""Links, components and removed documents, against SciPy, sets of words, and planted near-duplicates."""

from collections.abc import Sequence
from itertools import pairwise
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from mlm.corpus import duplicates as module
from mlm.corpus.config import DedupConfig
from mlm.corpus.duplicates import Duplicate, components, duplicates_in, jaccard, links_of_band, star_links
from mlm.corpus.minhash import MinHasher
from mlm.corpus.stages.group import label_documents, ranges
from tests.corpus.planted import plant, similar_pairs

CONFIG = DedupConfig()
REAL_SHINGLES = module.shingles
EDGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=60)


def as_links(pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.array(pairs, np.int64).reshape(-1, 2)


def expected_labels(links: np.ndarray, total: int) -> dict[int, int]:
    """The first document of its component, by SciPy, for each document but the first of one."""
    ones = np.ones(len(links))
    _, component = connected_components(coo_matrix((ones, links.T), shape=(total, total)), directed=False)
    firsts = np.unique(component, return_index=True)[1][component]
    return {document: int(first) for document, first in enumerate(firsts) if first != document}


@settings(deadline=None)
@given(first=EDGES, second=EDGES)
def test_components_are_those_of_scipy_also_folded_band_after_band(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    first, second = ([(a, b) for a, b in pairs if a != b] for pairs in (first, second))
    folded = star_links(*components(as_links(first), 41))
    assert len(folded) <= len({x for pair in first for x in pair})
    documents, bounds = components(np.concatenate((folded, as_links(second))), 41)
    found = [documents[begin:end].tolist() for begin, end in pairwise(bounds)]
    assert found == sorted(map(sorted, found))
    labels = {document: members[0] for members in found for document in members[1:]}
    assert labels == expected_labels(as_links(first + second), 41)


def found_in(
    texts: list[str], config: DedupConfig = CONFIG, keys: np.ndarray | None = None
) -> list[Duplicate]:
    """Documents removed from one component; without `keys`, all share all keys."""
    if keys is None:
        keys = np.tile(np.arange(1, config.bands + 1, dtype=np.uint64), (len(texts), 1))
    return duplicates_in(np.arange(len(texts)), keys.__getitem__, texts.__getitem__, config)


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def test_a_document_goes_above_the_threshold_only() -> None:
    config = DedupConfig(threshold=0.5, ngram=1)
    above, at = words(1, 2, 3), words(1, 2, 4, 5)  # of {1, 2, 3, 4}: 0.75, and 0.33 of the other
    base = words(1, 2, 3, 4)
    assert found_in([base, above], config) == [Duplicate(1, 0, 0.75)]
    assert found_in([words(1, 2, 3), words(1, 2, 4)], config) == []  # exactly 0.5
    assert found_in([words(*range(20)), words(*range(11))], config) == [Duplicate(1, 0, 0.55)]
    assert found_in([above, at], config) == []


def test_a_document_that_goes_takes_nobody_with_it() -> None:
    """0 and 1 are similar, 1 and 2 are, 0 and 2 are not: 2 stays."""
    config = DedupConfig(threshold=0.5, ngram=1)
    chain = [words(*range(i, i + 10)) for i in (0, 3, 6)]  # neighbours 7/13, the ends 4/16
    assert found_in(chain, config) == [Duplicate(1, 0, 7 / 13)]


def test_only_documents_that_share_a_key_are_compared() -> None:
    keys = np.arange(1, 1 + 3 * 42, dtype=np.uint64).reshape(3, 42)
    keys[2, 5] = keys[0, 5]
    base = words(*range(50))
    assert found_in([base, base + " x", base + " y"], keys=keys) == [Duplicate(2, 0, pytest.approx(46 / 47))]


def test_equal_documents_are_read_once_and_hashed_never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 copies of two similar texts: linear work."""
    hashed = []
    monkeypatch.setattr(
        module, "shingles", lambda text, **kw: hashed.append(text) or REAL_SHINGLES(text, **kw)
    )
    base = words(*range(100))
    texts = [base, base + " more"] * 10_000
    found = found_in(texts)
    assert len(hashed) == 2
    assert [duplicate.document for duplicate in found] == list(range(1, 20_000))
    assert {duplicate.original for duplicate in found} == {0}
    assert {duplicate.jaccard for duplicate in found} == {1.0, 96 / 97}


def test_boilerplate_is_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distinct documents that share one key: no exact comparison, and repetitions are removed."""
    compared = []
    monkeypatch.setattr(module, "jaccard", lambda a, b: compared.append(1) or jaccard(a, b))
    monkeypatch.setattr(module, "PROPOSED", 100)
    rng = np.random.default_rng(2)
    keys = rng.integers(1, 2**63, (1000, 42), dtype=np.uint64)
    keys[:, 7] = 1
    texts = [words(*rng.integers(0, 10**6, 60)) for _ in range(1000)]
    texts[900] = texts[5] + " end"
    assert found_in(texts, keys=keys) == [Duplicate(900, 5, pytest.approx(56 / 57))]
    assert len(compared) <= 10


def test_the_most_similar_of_many_candidates_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPARED", 4)
    # 160 words of 200 in common: all have similarity 156 / 236 = 0.66
    texts = [words(*range(160), *range(1000 * i, 1000 * i + 40)) for i in range(1, 100)]
    texts.append(texts[70] + " end")
    assert found_in(texts) == [Duplicate(99, 70, 196 / 197)]


def test_signatures_skip_no_pair_that_exact_comparison_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = plant(made_up_paragraphs(), seed=4, limit=60)
    without = found_in(corpus.texts)
    assert len(corpus.texts) > module.SMALL
    monkeypatch.setattr(module, "SMALL", 10**6)
    assert found_in(corpus.texts) == without != []


def made_up_paragraphs(num_words: int = 120_000) -> list[str]:
    """Paragraphs of words drawn by Zipf's law."""
    rng = np.random.default_rng(6)
    drawn = np.minimum(rng.zipf(1.3, num_words), 30_000).tolist()
    return [words(*drawn[i : i + 60]) for i in range(0, num_words, 60)]


@pytest.mark.parametrize("unit", ["word", "character"])
def test_planted_duplicates_are_found_and_nothing_else_goes(unit: str) -> None:
    config = DedupConfig(unit="word" if unit == "word" else "character")
    corpus = plant(made_up_paragraphs(), seed=7, limit=130)
    similarities = similar_pairs(corpus.texts, unit, least=0.3)
    pairs = {pair for pair, similarity in similarities.items() if similarity > config.threshold}
    keys, links = MinHasher(config).keys(corpus.texts), as_links([])
    for band in np.ascontiguousarray(keys.T):
        links = star_links(*components(np.concatenate((links, links_of_band(band))), len(corpus.texts)))
    documents, bounds = components(links, len(corpus.texts))
    removed = {
        duplicate.document
        for a, b in pairwise(bounds)
        for duplicate in duplicates_in(documents[a:b], keys.__getitem__, corpus.texts.__getitem__, config)
    }
    wanted = pairs.intersection(corpus.planted)
    assert len(wanted) > 60
    assert sum(removed.isdisjoint(pair) for pair in wanted) <= 0.02 * len(wanted)
    for document in removed:
        assert any(document in pair and not removed.issuperset(pair) for pair in pairs)


def labels_of(files: list[np.ndarray], total: int, of_range: int, most: int) -> dict[int, int]:
    """Label of each document that is not the first of its component."""
    bounds = ranges(0, total, of_range)
    with TemporaryDirectory() as folder:
        found = label_documents(files, bounds, f"{folder}/x", most)
        pairs = [found.of(number) for number in range(len(bounds) - 1)]
        assert all(
            low <= p[:, 0].min() < high
            for p, (low, high) in zip(pairs, pairwise(bounds), strict=True)
            if len(p)
        )
        rows = np.concatenate(pairs).tolist()
    assert len({document for _, document in rows}) == len(rows)
    return {document: label for label, document in rows}


@settings(deadline=None, max_examples=150)
@given(pairs=EDGES, of_range=st.integers(1, 41), most=st.integers(1, 9))
def test_labels_are_the_least_documents_of_components(
    pairs: list[tuple[int, int]], of_range: int, most: int
) -> None:
    links = as_links([(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]])
    files = [part[np.argsort(part[:, 1])] for part in np.array_split(links, 3)]
    assert labels_of(files, 41, of_range, most) == expected_labels(links, 41)
