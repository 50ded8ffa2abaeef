"""A corpus of one repeated token in which one sample is noise: the loss of its step is an outlier."""

import os

import numpy as np
from numpy.typing import ArrayLike, NDArray

BAD = 41


class Constant:
    """Samples of token 1; number BAD holds random tokens."""

    def __init__(self, vocab_size: int, seq_length: int, num_samples: int) -> None:
        self.vocab_size, self.seq_length, self.num_samples = vocab_size, seq_length, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def gather(self, sample_ids: ArrayLike) -> NDArray[np.int64]:
        ids = np.asarray(sample_ids, dtype=np.int64)
        samples = np.ones((len(ids), self.seq_length + 1), dtype=np.int64)
        noise = np.random.default_rng(0).integers(2, self.vocab_size, self.seq_length + 1)
        samples[ids == BAD] = noise
        return samples


def build(data: object, *, vocab_size: int, num_samples: int, seed: int, validation: bool) -> Constant:
    """The samples that data.kind=tests.training.incidents.bad_data:build names."""
    return Constant(vocab_size, int(os.environ.get("SEQ", "8")), num_samples)
