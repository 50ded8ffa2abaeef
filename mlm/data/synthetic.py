"""Random tokens in the place of a corpus, for throughput runs and tests."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

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


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mixing function of SplitMix64, elementwise (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
