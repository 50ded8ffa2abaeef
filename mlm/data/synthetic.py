"""Random tokens instead of a corpus, for throughput runs and tests."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlm.util.splitmix import GOLDEN, draw, mix, root


class SyntheticDataset:
    """Uniform random samples. Sample i is a function of (seed, i): any rank draws any batch alone."""

    def __init__(self, vocab_size: int, seq_length: int, num_samples: int, seed: int) -> None:
        self.vocab_size, self.seq_length, self.num_samples = vocab_size, seq_length, num_samples
        self._key = mix(root(seed))

    def __len__(self) -> int:
        return self.num_samples

    def gather(self, sample_ids: ArrayLike) -> NDArray[np.int64]:
        """Return samples in bulk: int64 [n, seq_length + 1], in [0, vocab_size)."""
        ids = np.asarray(sample_ids, dtype=np.uint64)
        keys = mix(self._key + ids * np.uint64(GOLDEN))  # [n]
        bits = draw(keys[:, None], np.arange(self.seq_length + 1)) >> np.uint64(32)
        # Scaling 32 bits instead of taking a remainder: faster, and as even for any real vocabulary.
        return ((bits * np.uint64(self.vocab_size)) >> np.uint64(32)).astype(np.int64)
