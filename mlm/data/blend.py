"""Mixing of corpora by weight: the source and number of each sample of a blend.

The rule: sample j of source i is due at (j + 1/2) / w_i, the weights w summing to 1, and the blend is all
sources merged by due time, equal times by the source's number. So sample n of the blend is a pure function of
the weights and n. (Megatron-LM takes, at each step, the source that lags most, so sample n depends on all
earlier ones. The proportions are equally exact.)

The proportions. Let c_i be the samples of source i among the first n of the blend, k the number of sources.
Split the merge anywhere: there is a time t with every sample due before t taken, and none due after it, so
w_i t - 1/2 <= c_i <= w_i t + 1/2. Summed over the sources, |n - t| <= k / 2. With c_i = w_i t + e_i, where
|e_i| <= 1/2, and n = t + sum e:

    c_i - w_i n  =  (1 - w_i) e_i - w_i * (sum of e_j, j != i)
    |c_i - w_i n|  <=  (1 - w_i) / 2 + w_i (k - 1) / 2  <=  max(1/2, (k - 1) / 2)  <  1 + k

Random access follows from |n - t| <= k / 2: samples a … b of the blend are due between a - k/2 and b + k/2,
a multiplication counts the samples of a source due before a time, and the samples in between are sorted.

Due times are float64: sums of halves and one IEEE division, so times and order are equal on every machine.
Rounding may swap two samples that are due at almost the same time, but blocks of a sequence are consistent:
all compare the same numbers. It moves c_i by w_i t * 2^-52: 0.0002 samples at n = 1e12. Up to MAX_SAMPLES
the due times of a source are all different.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlm.data.sampler import Dataset, Samples

MAX_SAMPLES = 1 << 50

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


class BlendedDataset:
    """Samples of a blend by their number in the run: `from_sample` to `num_samples`.

    `datasets` are the sources, `weights` [k] sum to 1. `first` [k] samples of each source were read before
    the blend began; each dataset must have `first` + `samples_per_source` samples.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        weights: ArrayLike,
        *,
        num_samples: int,
        from_sample: int = 0,
        first: ArrayLike | None = None,
    ) -> None:
        self.datasets, self.num_samples, self.from_sample = datasets, num_samples, from_sample
        self.weights = np.asarray(weights, dtype=np.float64)
        self.first = np.asarray([0] * len(datasets) if first is None else first, dtype=np.int64)
        assert len(datasets) == len(self.weights) == len(self.first)

    def __len__(self) -> int:
        return self.num_samples

    def locate(self, sample_ids: ArrayLike) -> tuple[Ids, Ids]:
        """Return (source, number in the source) of samples of the run: int64 [n] each."""
        ids = np.asarray(sample_ids, dtype=np.int64)
        inside = ids.size == 0 or (ids.min() >= self.from_sample and ids.max() < self.num_samples)
        assert inside, "sample id out of range"
        source, number = locate(self.weights, ids - self.from_sample)
        return source, number + self.first[source]

    def gather(self, sample_ids: ArrayLike) -> Samples:
        """Return samples in bulk, as the corpora return them. The ids must be in range."""
        source, number = self.locate(sample_ids)
        order = np.argsort(source, kind="stable")
        parts = [self.datasets[i].gather(number[source == i]) for i in np.unique(source)]
        positions = np.empty_like(order)
        positions[order] = np.arange(len(order))
        windows = [part for part in parts if isinstance(part, np.ndarray)]
        if windows:
            return np.concatenate(windows)[positions]
        first, *parts_after = (part for part in parts if not isinstance(part, np.ndarray))
        joined: Samples = first.followed_by(parts_after)[positions]
        return joined


def locate(weights: ArrayLike, sample_ids: ArrayLike) -> tuple[Ids, Ids]:
    """Return (source, number in the source) of any samples of a blend that begins at 0: int64 [n] each."""
    ids = np.asarray(sample_ids, dtype=np.int64)
    source, number = np.empty_like(ids), np.empty_like(ids)
    order = np.argsort(ids, kind="stable")
    # Numbers more than 1024 apart are looked up separately.
    for neighbours in np.split(order, np.flatnonzero(np.diff(ids[order]) > 1024) + 1):
        if len(neighbours):
            begin, last = int(ids[neighbours[0]]), int(ids[neighbours[-1]])
            sources, numbers = block(weights, begin, last + 1)
            source[neighbours], number[neighbours] = (
                sources[ids[neighbours] - begin],
                numbers[ids[neighbours] - begin],
            )
    return source, number


def block(weights: ArrayLike, begin: int, end: int) -> tuple[Ids, Ids]:
    """Return (source, number in the source) of samples begin … end - 1 of a blend: int64 [n] each.

    `weights` are positive and sum to 1. Time and memory grow with end - begin alone.
    """
    counts_before, source, number = _around(np.asarray(weights, dtype=np.float64), begin, end)
    rows = slice(begin - int(counts_before.sum()), end - int(counts_before.sum()))
    return source[rows], number[rows]


def samples_per_source(weights: ArrayLike, n: int) -> Ids:
    """Count the first n samples by source: int64 [k]."""
    counts_before, source, _ = _around(np.asarray(weights, dtype=np.float64), n, n)
    head = source[: n - int(counts_before.sum())]
    return counts_before + np.bincount(head, minlength=len(counts_before))


def _around(weights: Floats, begin: int, end: int) -> tuple[Ids, Ids, Ids]:
    """Return a run of the blend that covers samples begin … end.

    Returns samples of each source before it, [k]; source and number of each of its samples, [m] each.
    """
    assert 0 <= begin <= end <= MAX_SAMPLES
    reach = len(weights) + 2  # k / 2 is enough for weights that sum to 1 exactly
    first, end_counts = _count_due(weights, begin - reach), _count_due(weights, end + reach)
    while first.sum() > begin or end_counts.sum() < end:
        reach *= 4
        first, end_counts = _count_due(weights, begin - reach), _count_due(weights, end + reach)
    count = end_counts - first
    source = np.repeat(np.arange(len(weights)), count)
    number = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
    due = (number + 0.5) / np.repeat(weights, count)
    order = np.argsort(due, kind="stable")  # equal times stay in the order of sources
    return first, source[order], number[order]


def _count_due(weights: Floats, time: int) -> Ids:
    """Count the samples of each source that are due before a time: int64 [k].

    The product is an estimate; the division that defines due times decides.
    """
    count = np.maximum(0, np.ceil(weights * time - 0.5)).astype(np.int64)
    while (too_many := (count > 0) & ((count - 0.5) / weights >= time)).any():
        count -= too_many
    while (too_few := (count + 0.5) / weights < time).any():
        count += too_few
    return count
