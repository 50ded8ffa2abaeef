"""Mixing corpora by weight: which sample of the blend is which sample of which corpus.

The rule: sample j of source i is due at (j + 1/2) / w_i, the weights w summing to 1, and the blend is all
sources merged by due time, equal times by the source's number. So sample n of the blend is a pure function of
the weights and n. (Megatron-LM takes, at each step, the source that lags most: sample n then needs all
samples before it. The proportions are as exact here.)

The proportions. Let c_i be the samples of source i among the first n of the blend, k the number of sources.
Split the merge anywhere: there is a time t with every sample due before t taken, and none due after it, so
w_i t - 1/2 <= c_i <= w_i t + 1/2. Summed over the sources, |n - t| <= k / 2. With c_i = w_i t + e_i, where
|e_i| <= 1/2, and n = t + sum e:

    c_i - w_i n  =  (1 - w_i) e_i - w_i * (sum of e_j, j != i)
    |c_i - w_i n|  <=  (1 - w_i) / 2 + w_i (k - 1) / 2  <=  max(1/2, (k - 1) / 2)  <  1 + k

Random access follows from |n - t| <= k / 2: samples a … b of the blend are due between a - k/2 and b + k/2,
the samples of a source due before a time can be counted by one multiplication, and what is due in between is
sorted.

Due times are float64: sums of halves and one IEEE division, the same on every machine, so the order is too.
Rounding may swap two samples that are due at almost the same time, but the blocks of a sequence always fit
together: all of them compare the same numbers. It moves c_i by w_i t * 2^-52: 0.0002 samples
at n = 1e12. Up to MAX_SAMPLES the due times of a source are all different.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlm.data.sampler import Dataset, Samples

MAX_SAMPLES = 1 << 50

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


class BlendedDataset:
    """Samples of a blend by their number in the whole run: `from_sample` to `num_samples`.

    `datasets` are its sources, `weights` [k] sum to 1. Of each source `first` [k] samples were read before
    the blend began, and `samples_per_source` in it: each dataset must have that many.
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
        """Return (source, sample number in it) of samples of the run: int64 [n] each."""
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
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        windows = [part for part in parts if isinstance(part, np.ndarray)]
        if windows:
            return np.concatenate(windows)[back]
        first, *others = (part for part in parts if not isinstance(part, np.ndarray))
        joined: Samples = first.followed_by(others)[back]
        return joined


def locate(weights: ArrayLike, sample_ids: ArrayLike) -> tuple[Ids, Ids]:
    """Return (source, sample number in it) of any samples of a blend that begins at 0: int64 [n] each."""
    ids = np.asarray(sample_ids, dtype=np.int64)
    source, number = np.empty_like(ids), np.empty_like(ids)
    order = np.argsort(ids, kind="stable")
    # numbers further apart than 1024 are looked up separately
    for near in np.split(order, np.flatnonzero(np.diff(ids[order]) > 1024) + 1):
        if len(near):
            begin, last = int(ids[near[0]]), int(ids[near[-1]])
            sources, numbers = block(weights, begin, last + 1)
            source[near], number[near] = sources[ids[near] - begin], numbers[ids[near] - begin]
    return source, number


def block(weights: ArrayLike, begin: int, end: int) -> tuple[Ids, Ids]:
    """Return (source, sample number in it) of samples begin … end - 1 of a blend: int64 [end - begin] each.

    `weights` are positive and sum to 1. Time and memory grow with end - begin alone.
    """
    before, source, number = _around(np.asarray(weights, dtype=np.float64), begin, end)
    wanted = slice(begin - int(before.sum()), end - int(before.sum()))
    return source[wanted], number[wanted]


def samples_per_source(weights: ArrayLike, n: int) -> Ids:
    """Count the first n samples by source: int64 [k]."""
    before, source, _ = _around(np.asarray(weights, dtype=np.float64), n, n)
    head = source[: n - int(before.sum())]
    return before + np.bincount(head, minlength=len(before))


def _around(weights: Floats, begin: int, end: int) -> tuple[Ids, Ids, Ids]:
    """Return a run of the blend that covers samples begin … end.

    It is (samples of each source before it, [k]; source and number of each of its samples, [m] each).
    """
    assert 0 <= begin <= end <= MAX_SAMPLES
    reach = len(weights) + 2  # k / 2 is enough for weights that sum to 1 exactly
    before, after = _count_due(weights, begin - reach), _count_due(weights, end + reach)
    while before.sum() > begin or after.sum() < end:
        reach *= 4
        before, after = _count_due(weights, begin - reach), _count_due(weights, end + reach)
    count = after - before
    source = np.repeat(np.arange(len(weights)), count)
    number = np.arange(count.sum()) + np.repeat(before - (np.cumsum(count) - count), count)
    due = (number + 0.5) / np.repeat(weights, count)
    order = np.argsort(due, kind="stable")  # of equal times the lower source is first already
    return before, source[order], number[order]


def _count_due(weights: Floats, time: int) -> Ids:
    """Count the samples of each source that are due before a time: int64 [k].

    The product is an estimate; the same division as everywhere else decides.
    """
    count = np.maximum(0, np.ceil(weights * time - 0.5)).astype(np.int64)
    while (many := (count > 0) & ((count - 0.5) / weights >= time)).any():
        count -= many
    while (few := (count + 0.5) / weights < time).any():
        count += few
    return count
