"""Samples of a blend: the rule by a reference, proportions, random access."""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm.data.blend import BlendedDataset, block, locate, samples_per_source
from mlm.data.blend_checks import normalize_weights
from mlm.data.gpt import GPTDataset
from tests.data.corpora import counting_corpus

RANDOM = np.random.default_rng(5)
WEIGHTS: dict[str, Sequence[float]] = {
    "one": [1.0],
    "two": [0.3, 0.7],
    "far apart": [1e-6, 1e-3, 1.0, 30.0],
    "twenty of all sizes": (10.0 ** -RANDOM.uniform(0, 6, 20)).tolist(),
}

weights_of = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=20).map(normalize_weights)


def due_times(weights: Sequence[Fraction]) -> Iterator[tuple[Fraction, int, int]]:
    """The merge by a heap and exact arithmetic, for ever: (due, source, number)."""
    heap = [(1 / (2 * w), source, 0) for source, w in enumerate(weights)]
    heapq.heapify(heap)
    while True:
        due, source, number = heap[0]
        yield due, source, number
        heapq.heapreplace(heap, (due + 1 / weights[source], source, number + 1))


@pytest.mark.parametrize("weights", [[1, 1, 2, 4], [3, 5], [1, 63]])
def test_the_order_is_that_of_a_heap_with_exact_due_times(weights: list[int]) -> None:
    """Sums are powers of two, so that due times are exact as floats too and ties are ties."""
    expected = list(islice(due_times([Fraction(w, sum(weights)) for w in weights]), 3000))
    source, number = block(normalize_weights(weights), 0, 3000)
    assert list(zip(source.tolist(), number.tolist(), strict=True)) == [(s, j) for _, s, j in expected]


@settings(max_examples=20, deadline=None)
@given(weights_of)
def test_any_weights_give_the_order_of_a_heap(weights: list[float]) -> None:
    """Except where due times agree to the last bits of a float."""
    expected = list(islice(due_times([Fraction(w) for w in weights]), 500))
    source, number = block(weights, 0, 500)
    due = [(j + Fraction(1, 2)) / Fraction(weights[s]) for s, j in zip(source, number.tolist(), strict=True)]
    for found, (exact, _, _) in zip(due, expected, strict=True):
        assert abs(found - exact) <= exact * Fraction(1, 1 << 50)


@settings(max_examples=40, deadline=None)
@given(weights_of, st.integers(0, 10**12), st.lists(st.integers(0, 300), max_size=8))
def test_blocks_of_any_partition_are_the_same_sequence(
    weights: list[float], begin: int, sizes: list[int]
) -> None:
    edges = np.cumsum([begin, *sizes]).tolist()
    whole = np.stack(block(weights, edges[0], edges[-1]))
    parts = [np.stack(block(weights, a, b)) for a, b in pairwise(edges)]
    assert np.array_equal(np.concatenate([whole[:, :0], *parts], axis=1), whole)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("n", [0, 17, 10**12])
def test_counts_agree_with_the_samples_that_follow(name: str, n: int) -> None:
    """The first sample of each source from n on is the one after those counted."""
    weights = normalize_weights(WEIGHTS[name])
    source, number = block(weights, n, n + 1000)
    counts = samples_per_source(weights, n)
    assert counts.sum() == n
    for i in np.unique(source):
        assert number[source == i][0] == counts[i]


@pytest.mark.parametrize("name", WEIGHTS)
def test_far_samples_have_their_proportions_too(name: str) -> None:
    """At a million million samples rounding moves a count by thousandths."""
    weights, n = normalize_weights(WEIGHTS[name]), 10**12
    exact = np.array([float(Fraction(w) * n) for w in weights])
    assert np.abs(samples_per_source(weights, n) - exact).max() <= max(1, len(weights) - 1) / 2 + 1e-2


def test_samples_are_found_in_any_order_and_any_distance() -> None:
    assert normalize_weights([1e308, 1e308]) == [0.5, 0.5]
    weights = normalize_weights(WEIGHTS["far apart"])
    ids = np.array([5, 10**9, 3, 3, 40_000, 10**9 + 2, 0])
    source, number = locate(weights, ids)
    for i, s, j in zip(ids.tolist(), source.tolist(), number.tolist(), strict=True):
        assert [s, j] == np.stack(block(weights, i, i + 1))[:, 0].tolist()
    assert locate(weights, [])[0].shape == (0,)


def blended(tmp_path: Path, **options: int) -> tuple[BlendedDataset, list[GPTDataset]]:
    corpora = [counting_corpus(tmp_path / "a", [7, 9, 40]), counting_corpus(tmp_path / "b", [3, 50, 20])]
    datasets = [GPTDataset(c, seq_length=4, num_samples=400, seed=3) for c in corpora]
    return BlendedDataset(datasets, [0.75, 0.25], num_samples=300, **options), datasets


def test_gather_gives_the_samples_of_the_sources_from_where_they_were(tmp_path: Path) -> None:
    blend, datasets = blended(tmp_path)
    ids = [7, 0, 250, 8]
    expected = [datasets[s][j] for s, j in zip(*locate([0.75, 0.25], ids), strict=True)]
    assert np.array_equal(blend.gather(ids), expected)
    assert Counter(blend.locate(np.arange(300))[0].tolist()) == {0: 225, 1: 75}
    blend, datasets = blended(tmp_path, from_sample=100, first=[60, 40])  # type: ignore[arg-type]
    source, number = locate([0.75, 0.25], np.arange(20))
    expected = [datasets[s][j + (60, 40)[s]] for s, j in zip(source, number, strict=True)]
    assert np.array_equal(blend.gather(np.arange(100, 120)), expected)
