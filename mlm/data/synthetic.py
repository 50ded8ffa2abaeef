"""Random tokens in the place of a corpus, for throughput runs and tests."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlm.data.gpt import IGNORED
from mlm.models.bert.samples import BERTSamples

MASKED, SHORT = 0.15, 0.1
"""BERT: share of tokens that are to be predicted, and of samples shorter than seq_length."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # increment of SplitMix64's counter


class SyntheticDataset:
    """Uniform random samples. Sample i is a function of (seed, i): any rank draws any batch alone."""

    def __init__(self, vocab_size: int, seq_length: int, num_samples: int, seed: int) -> None:
        self.vocab_size, self.seq_length, self.num_samples = vocab_size, seq_length, num_samples
        self._key = splitmix64(np.array([seed % (1 << 64)], dtype=np.uint64))

    def __len__(self) -> int:
        return self.num_samples

    def gather(self, sample_ids: ArrayLike) -> NDArray[np.int64]:
        """Samples in bulk: int64 [n, seq_length + 1], in [0, vocab_size)."""
        ids = np.asarray(sample_ids, dtype=np.uint64)
        keys = splitmix64(self._key + ids * GOLDEN)  # [n]
        counters = np.arange(1, self.seq_length + 2, dtype=np.uint64) * GOLDEN  # [S + 1]
        bits = splitmix64(keys[:, None] + counters) >> np.uint64(32)
        # Scaling 32 bits instead of taking a remainder: faster, and as even for any real vocabulary.
        return ((bits * np.uint64(self.vocab_size)) >> np.uint64(32)).astype(np.int64)


class SyntheticBERT:
    """Random BERT samples, a tenth of them short. Sample i is a function of (seed, i)."""

    def __init__(self, vocab_size: int, seq_length: int, num_samples: int, seed: int) -> None:
        assert seq_length >= 8
        self.vocab_size, self.seq_length, self.num_samples = vocab_size, seq_length, num_samples
        self._tokens = SyntheticDataset(vocab_size, seq_length, num_samples, seed)
        self._labels = SyntheticDataset(vocab_size, seq_length, num_samples, seed + 1)
        self._draws = SyntheticDataset(1 << 20, seq_length + 3, num_samples, seed + 2)

    def __len__(self) -> int:
        return self.num_samples

    def gather(self, sample_ids: ArrayLike) -> BERTSamples:
        """Samples in bulk: as BERTDataset's, of random tokens."""
        s, draws = self.seq_length, self._draws.gather(sample_ids) / (1 << 20)  # [n, S + 4], below 1
        lengths = np.where(draws[:, s] < SHORT, 8 + draws[:, s + 1] * (s - 8), s).astype(np.int64)
        second = (1 + draws[:, s + 2] * (lengths - 1)).astype(np.int64)  # where the second segment begins
        columns = np.arange(s)
        inside = columns < lengths[:, None]
        is_masked = (inside & (draws[:, :s] < MASKED)) | (columns == 1)  # one at least
        return BERTSamples(
            tokens=np.where(inside, self._tokens.gather(sample_ids)[:, :s], 0),
            token_types=(inside & (columns >= second[:, None])).astype(np.int64),
            lengths=lengths,
            labels=np.where(is_masked, self._labels.gather(sample_ids)[:, :s], IGNORED),
            is_swapped=(draws[:, s + 3] < 0.5).astype(np.int64),
        )


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mixing function of SplitMix64, elementwise (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
