"""Random BERT samples in place of a corpus, for throughput runs and tests."""

import numpy as np
from numpy.typing import ArrayLike

from mlm.data.synthetic import SyntheticDataset
from mlm.models.bert.samples import BERTSamples
from mlm.parallel.labels import IGNORE_INDEX

MASKED, SHORT = 0.15, 0.1
"""Share of tokens that are to be predicted, and of samples shorter than seq_length."""


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
            labels=np.where(is_masked, self._labels.gather(sample_ids)[:, :s], IGNORE_INDEX),
            is_swapped=(draws[:, s + 3] < 0.5).astype(np.int64),
        )
