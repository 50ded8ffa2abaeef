"""Random tokens."""

import numpy as np

from mlm.data.sampler import SyntheticDataset


def test_sample_depends_on_seed_and_number_alone() -> None:
    few, many = SyntheticDataset(100, 7, 10, seed=5), SyntheticDataset(100, 7, 10**9, seed=5)
    np.testing.assert_array_equal(few.gather([3, 9, 3]), many.gather(range(10))[[3, 9, 3]])


def test_samples_and_seeds_differ() -> None:
    samples = SyntheticDataset(50_000, 7, 100, seed=5).gather(range(100))
    other = SyntheticDataset(50_000, 7, 100, seed=6).gather(range(100))
    assert len({tuple(row) for row in np.concatenate([samples, other]).tolist()}) == 200


def test_tokens_fill_the_vocabulary_evenly() -> None:
    samples = SyntheticDataset(10, 99, 1000, seed=0).gather(range(1000))
    assert samples.shape == (1000, 100)
    assert samples.dtype == np.int64
    counts = np.bincount(samples.ravel(), minlength=10)
    assert len(counts) == 10
    assert np.abs(counts - 10_000).max() < 500  # five standard deviations of a binomial are 474
