"""The user's own dataset, whose samples are checked as they are read."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlm.config.imports import OwnCodeError
from mlm.data.sampler import Dataset, Samples, collate
from mlm.parallel.labels import IGNORE_INDEX


@dataclass(frozen=True)
class CheckedDataset:
    """A dataset whose token ids are all in the vocabulary: others would train in silence.

    The token table is padded and split over ranks, so that no lookup rejects them.
    """

    dataset: Dataset
    kind: str
    """data.kind."""
    vocab_size: int
    seq_length: int
    noun: str = "sample"
    """Name of its samples in errors."""

    def __len__(self) -> int:
        return len(self.dataset)

    def gather(self, sample_ids: ArrayLike, /) -> Samples:
        """Return samples in bulk. Raises OwnCodeError (a UserError)."""
        samples: Any = self.dataset.gather(sample_ids)
        numbers = np.asarray(sample_ids).reshape(-1)
        if isinstance(samples, np.ndarray):
            self._check_shape(samples, len(numbers))
            self._check_ids(samples, numbers, may_ignore=True)
            return samples.astype(np.int64, copy=False)
        if not hasattr(samples, "batch"):
            self._fail(
                f"gather() returned a {type(samples).__name__}", "return a NumPy array or a SampleBlock"
            )
        batch = collate(samples, 0)
        self._check_ids(batch.tokens.numpy(), numbers, may_ignore=False)
        if (labels := getattr(batch, "labels", None)) is not None:
            self._check_ids(labels.numpy(), numbers, may_ignore=True, what="label")
        return samples  # type: ignore[no-any-return]

    def _check_shape(self, samples: NDArray[Any], count: int) -> None:
        shape = (count, self.seq_length + 1)
        if samples.dtype.kind in "iu" and samples.shape == shape:
            return
        fix = f"return whole numbers of shape {shape}: samples of data.seq_length + 1 tokens"
        self._fail(f"gather() returned {samples.dtype} of shape {samples.shape}", fix)

    def _check_ids(
        self, ids: NDArray[Any], numbers: NDArray[Any], *, may_ignore: bool, what: str = "token"
    ) -> None:
        """Raise OwnCodeError for an id outside the vocabulary; IGNORE_INDEX is none where it `may_ignore`."""
        if ids.size == 0 or (ids.min() >= 0 and ids.max() < self.vocab_size):
            return
        wrong = (ids < 0) | (ids >= self.vocab_size)
        if may_ignore:
            wrong &= ids != IGNORE_INDEX
        for row, *places in np.argwhere(wrong)[:1]:
            position, value = places[-1] if places else 0, ids[(row, *places)]
            ignored = f", or {IGNORE_INDEX} where there is none" if may_ignore else ""
            self._fail(
                f"{self.noun} {numbers[row]} has {what} {value} at position {position}, and "
                f"model.vocab_size={self.vocab_size}",
                f"return ids from 0 to {self.vocab_size - 1}{ignored}, or raise model.vocab_size",
            )

    def _fail(self, problem: str, fix: str) -> None:
        raise OwnCodeError(f"data.kind={self.kind}: {problem}; {fix}")
