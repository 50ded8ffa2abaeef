"""Components found range by range, in files, are those of all links at once."""

from itertools import pairwise
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from mlm.corpus.stages.group import blocks, label_documents, ranges


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


def expected(links: np.ndarray, total: int) -> dict[int, int]:
    """The same by SciPy."""
    ones = np.ones(len(links))
    _, component = connected_components(coo_matrix((ones, links.T), shape=(total, total)), directed=False)
    firsts = np.unique(component, return_index=True)[1][component]
    return {document: int(first) for document, first in enumerate(firsts) if first != document}


@settings(deadline=None, max_examples=150)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=60),
    of_range=st.integers(1, 41),
    most=st.integers(1, 9),
)
def test_labels_are_the_least_documents_of_components(
    pairs: list[tuple[int, int]], of_range: int, most: int
) -> None:
    links = np.array([sorted(pair) for pair in pairs if pair[0] != pair[1]], np.int64).reshape(-1, 2)
    files = [part[np.argsort(part[:, 1])] for part in np.array_split(links, 3)]
    assert labels_of(files, 41, of_range, most) == expected(links, 41)


@pytest.mark.parametrize("of_range, most", [(1000, 300), (50_001, 50_001)])
def test_a_long_shuffled_path_is_one_component(of_range: int, most: int) -> None:
    """Labels travel through every range, downwards and upwards."""
    path = np.random.default_rng(1).permutation(50_001)
    links = np.sort(np.stack((path[:-1], path[1:]), axis=1), axis=1)
    files = [links[np.argsort(links[:, 1])]]
    assert labels_of(files, len(path), of_range, most) == dict.fromkeys(range(1, 50_001), 0)


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 7))
def test_blocks_are_the_rows_in_order(sizes: list[int], most: int) -> None:
    rows = np.arange(2 * sum(sizes)).reshape(-1, 2)
    given_blocks = list(blocks(np.split(rows, np.cumsum(sizes)[:-1]) if sizes else [], most))
    assert [len(block) for block in given_blocks[:-1]] == [most] * (len(given_blocks) - 1)
    assert all(0 < len(block) <= most for block in given_blocks)
    assert np.array_equal(np.concatenate([rows[:0], *given_blocks]), rows)
