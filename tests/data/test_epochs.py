"""The fast forms agree with NumPy's plain ones, which are what sample orders were defined by."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm.data.epochs import permutation, stable_argsort
from mlm.data.gpt import SHORT_RUN, STRIDE, coarse, copy_runs, first_above


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 20) | st.integers(2**63, 2**63 + 9), max_size=80))
def test_stable_argsort_is_that_of_numpy(values: list[int]) -> None:
    raw = np.array(values, dtype=np.uint64)
    np.testing.assert_array_equal(stable_argsort(raw), np.argsort(raw, kind="stable"))


def test_stable_argsort_of_many_numbers_that_agree_in_their_high_bits() -> None:
    raw = np.random.default_rng(0).integers(0, 1 << 14, size=50_000, dtype=np.uint64)
    np.testing.assert_array_equal(stable_argsort(raw), np.argsort(raw, kind="stable"))


@pytest.mark.parametrize("head", [1, 2, 63, 999, 1000, 2000])
def test_head_of_a_permutation_is_its_first_entries(head: int) -> None:
    whole = permutation(1000, 3, 4, stream=0)
    np.testing.assert_array_equal(permutation(1000, 3, 4, stream=0, head=head), whole[:head])


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4 * STRIDE), st.data())
def test_first_above_is_searchsorted(steps: list[int], data: st.DataObject) -> None:
    rising = np.cumsum([*steps, 1])  # equal neighbours too
    values = np.array(data.draw(st.lists(st.integers(0, int(rising[-1]) - 1), max_size=20)), dtype=np.int64)
    expected = np.searchsorted(rising, values, side="right")
    np.testing.assert_array_equal(first_above(rising, coarse(rising), values), expected)


def test_first_above_passes_over_equal_entries_however_many() -> None:
    rising = np.array([3] * 5 * STRIDE + [9])
    assert first_above(rising, coarse(rising), np.array([2, 3, 8])).tolist() == [0, 5 * STRIDE, 5 * STRIDE]


@pytest.mark.parametrize("mean", [1, SHORT_RUN // 2, 2 * SHORT_RUN])
@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_copy_runs_lays_runs_end_to_end(mean: int, dtype: str) -> None:
    rng = np.random.default_rng(1)
    tokens = np.arange(50_000).astype(dtype)
    cuts = np.sort(rng.integers(0, len(tokens), size=len(tokens) // mean // 20))
    runs = [*pairwise(cuts.tolist()), (7, 7), (50_000, 50_000), (49_999, 50_000)]  # two hold nothing
    begin, end = np.array(runs)[rng.permutation(len(runs))].T
    out = np.empty(int((end - begin).sum()), dtype=np.int64)
    copy_runs(tokens, begin, end - begin, out)
    expected = [token for b, e in zip(begin.tolist(), end.tolist(), strict=True) for token in range(b, e)]
    assert out.tolist() == tokens[expected].tolist()
