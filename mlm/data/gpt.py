"""GPT samples: windows of seq_length + 1 tokens over shuffled documents, in shuffled order.

One pass over the corpus is an epoch. The documents of each epoch are shuffled separately, and the epochs are
concatenated to an endless stream. Window k covers tokens k * S to k * S + S of it (neighbours share one
token), belongs to the epoch in which it starts, and is read in an order shuffled within that epoch. So

- every token is predicted exactly once per epoch, also at the border of two epochs;
- the order within an epoch depends on (lengths of the corpus, seq_length, seed, epoch) alone: sample i does
  not depend on num_samples, and a run with more steps on resume repeats and skips nothing.

Megatron-LM separates only its last epoch (the separate-last-epoch rule); here every epoch is separate.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from mlm.data.epochs import CACHE_FROM, EpochCache, Ids, permutation
from mlm.data.indexed import IndexedDataset
from mlm.parallel.config import IGNORE_INDEX
from mlm.util.errors import UserError

BLOCK = 1 << 16  # tokens gathered at a time: intermediate arrays stay in a core's cache


@dataclass(frozen=True, eq=False)
class Epoch:
    """Sample order of one pass. Arrays are int64.

    documents  [m]   corpus documents in this epoch's order, then the head of the next epoch's
    ends       [m]   tokens of the epoch up to the end of each of them
    windows    [w]   window of each sample, counted from the first that starts in this epoch
    """

    documents: Ids
    ends: Ids
    windows: Ids


class GPTDataset:
    """Training windows of a corpus. Sample ids range from 0 to num_samples.

    `cache_dir` holds the order of large epochs, if any; see EpochCache. Raises UserError if the corpus is
    shorter than one window.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        seq_length: int,
        num_samples: int,
        seed: int,
        cache_dir: Path | None = None,
        cache_from: int = CACHE_FROM,
    ) -> None:
        if indexed.num_tokens < seq_length + 1:
            raise UserError(too_short(indexed, seq_length))
        self.indexed, self.seq_length, self.num_samples, self.seed = indexed, seq_length, num_samples, seed
        self.cache_from = cache_from
        self._epochs = EpochCache(
            self._build,
            lambda epoch: np.concatenate([epoch.documents, epoch.ends, epoch.windows]),
            self._unpack,
            folder=cache_dir,
            name="gpt",
            key=lambda: f"1 {indexed.digest} {seq_length} {seed}",  # 1: number of the sampling rule
        )

    def __len__(self) -> int:
        return self.num_samples

    @property
    def epochs(self) -> float:
        """Passes over the corpus in all samples."""
        return self.num_samples * self.seq_length / self.indexed.num_tokens

    def __getitem__(self, i: int) -> Ids:
        """Return sample `i`: int64 [seq_length + 1]. Raises IndexError."""
        if not 0 <= i < self.num_samples:
            raise IndexError(f"sample {i} of {self.num_samples}")
        sample: Ids = self.gather([i])[0]
        return sample

    def gather(self, sample_ids: ArrayLike) -> Ids:
        """Return samples in bulk: int64 [n, seq_length + 1]. The ids must be in range."""
        ids = np.asarray(sample_ids, dtype=np.int64)
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < self.num_samples), "sample id out of range"
        samples = np.empty((len(ids), self.seq_length + 1), dtype=np.int64)
        # Window k starts in epoch floor(k * S / T); the samples of an epoch are its windows.
        width, total = samples.shape[1], self.indexed.num_tokens
        epochs, block = ids * self.seq_length // total, max(1, BLOCK // width)
        for number in np.unique(epochs).tolist():
            epoch, first = self.epoch(number), self.first_window(number)
            (in_epoch,) = np.nonzero(epochs == number)
            for rows in np.split(in_epoch, range(block, len(in_epoch), block)):
                begins = (first + epoch.windows[ids[rows] - first]) * self.seq_length - number * total
                # Windows are split into pieces at document ends. A token is in the first document that ends
                # after it, which skips empty documents.
                head = np.searchsorted(epoch.ends, begins, side="right")  # of each window's first token
                tail = np.searchsorted(epoch.ends, begins + width - 1, side="right")  # … and of its last
                count = tail - head + 1  # pieces per window
                last = np.cumsum(count)
                document = np.arange(last[-1]) + np.repeat(head - (last - count), count)
                window_begin = np.repeat(begins, count)
                document_begin = np.where(document > 0, epoch.ends[document - 1], 0)
                begin = np.maximum(document_begin, window_begin)
                length = np.minimum(epoch.ends[document], window_begin + width) - begin
                # Convert positions in the epoch to positions in the .bin.
                begin += self.indexed.document_starts[epoch.documents[document]] - document_begin
                ends = np.cumsum(length)  # of the pieces, in these samples
                positions = np.arange(ends[-1]) + np.repeat(begin + length - ends, length)
                samples[rows] = self.indexed.tokens[positions].reshape(-1, width)
        return samples

    def epoch(self, number: int) -> Epoch:
        is_large = self.indexed.num_documents + self._windows_of(number) >= self.cache_from
        return self._epochs.get(number, is_large=is_large)

    def first_window(self, epoch: int) -> int:
        """Return the number of the first window that starts in an epoch: ceil(epoch * T / S)."""
        return -(-epoch * self.indexed.num_tokens // self.seq_length)

    def _build(self, number: int) -> Epoch:
        count, head = self.indexed.num_documents, 1024
        lengths = np.diff(self.indexed.document_starts)
        documents = permutation(count, self.seed, number, stream=0)
        # The first documents of the next epoch: the last windows extend into its first S tokens.
        following = permutation(count, self.seed, number + 1, stream=0, head=head)
        while lengths[following].sum() < self.seq_length:
            head *= 16
            following = permutation(count, self.seed, number + 1, stream=0, head=head)
        ends = np.cumsum(lengths[following])
        following = following[: int(np.searchsorted(ends, self.seq_length)) + 1]
        documents = np.concatenate([documents, following])
        order = permutation(self._windows_of(number), self.seed, number, stream=1)
        return Epoch(documents, np.cumsum(lengths[documents]), order)

    def _unpack(self, number: int, stored: Ids) -> Epoch | None:
        windows = self._windows_of(number)
        if len(stored) < windows or (len(stored) - windows) % 2:
            return None
        documents = (len(stored) - windows) // 2
        return Epoch(stored[:documents], stored[documents : 2 * documents], stored[2 * documents :])

    def _windows_of(self, epoch: int) -> int:
        return self.first_window(epoch + 1) - self.first_window(epoch)


class EvalWindows:
    """Consecutive windows over a corpus in its stored order, which score every token exactly once.

    Window k covers tokens k * S to k * S + S; the last is padded with IGNORE_INDEX. The first token of the
    corpus has no context: num_tokens - 1 are predicted. Raises UserError for a one-token corpus.
    """

    def __init__(self, indexed: IndexedDataset, *, seq_length: int) -> None:
        if indexed.num_tokens < 2:
            raise UserError(too_short(indexed, 1))
        self.indexed, self.seq_length = indexed, seq_length

    def __len__(self) -> int:
        return -(-(self.indexed.num_tokens - 1) // self.seq_length)

    def gather(self, window_ids: ArrayLike) -> Ids:
        """Return windows in bulk: int64 [n, seq_length + 1], IGNORE_INDEX past the end of the corpus."""
        ids = np.asarray(window_ids, dtype=np.int64)
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < len(self)), "window id out of range"
        positions = ids[:, None] * self.seq_length + np.arange(self.seq_length + 1)
        inside = positions < self.indexed.num_tokens
        tokens = self.indexed.tokens[np.where(inside, positions, 0)].astype(np.int64)
        return np.where(inside, tokens, IGNORE_INDEX)


def too_short(indexed: IndexedDataset, seq_length: int) -> str:
    return (
        f"{indexed.bin_path} holds {indexed.num_tokens} tokens, one window of data.seq_length={seq_length} "
        f"needs {seq_length + 1}: lower data.seq_length to {max(1, indexed.num_tokens - 1)} or less or build "
        f"a larger corpus"
    )
