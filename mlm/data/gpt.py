"""GPT samples: windows of seq_length + 1 tokens over shuffled documents, in a shuffled order.

One pass over the corpus is an epoch. Each epoch's documents are shuffled on their own and laid end to end,
epoch after epoch; window k covers tokens k * S to k * S + S of that endless stream (neighbours share one
token), belongs to the epoch it starts in, and is served in an order shuffled within that epoch. So

- every token is predicted exactly once per epoch, also those where one epoch runs into the next;
- the order within an epoch depends on (lengths of the corpus, seq_length, seed, epoch) alone: sample i is the
  same whatever num_samples is, and a run whose steps are raised on resume repeats and skips nothing.

Megatron-LM treats only its last epoch apart (its separate-last-epoch rule); here every epoch is apart.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from mlm.data.indexed import IndexedDataset
from mlm.data.vectors import coarse, copy_runs, first_above, stable_argsort
from mlm.errors import UserError
from mlm.files.atomic import digest_bytes, write_atomic
from mlm.files.one_builder import one_builder
from mlm.parallel.labels import IGNORE

CACHE_FROM = 1 << 20
"""Documents plus windows of an epoch from which its order is worth a file."""
KEPT_EPOCHS = 2
BLOCK = 1 << 16  # tokens gathered at a time: what is worked out on the way stays in a core's cache
RULE = 1  # number of the sampling rule; part of the cache key

Ids = NDArray[np.int64]


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

    @cached_property
    def coarse_ends(self) -> Ids:
        """Every STRIDE-th of `ends`, for first_above."""
        return coarse(self.ends)


class GPTDataset:
    """Training windows of a corpus. Sample ids run from 0 to num_samples.

    `cache_dir` keeps the order of large epochs (None: nowhere). The cache is only an optimisation: damaged
    files are rebuilt, a folder that cannot be written is done without, and of several processes one builds.

    Raises UserError when the corpus is shorter than one window.
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
        self.cache_dir, self.cache_from = cache_dir, cache_from
        self._epochs: dict[int, Epoch] = {}

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> Ids:
        """Sample `i`: int64 [seq_length + 1]. Raises IndexError."""
        if not 0 <= i < self.num_samples:
            raise IndexError(f"sample {i} of {self.num_samples}")
        return self.gather([i])[0]

    def gather(self, sample_ids: ArrayLike) -> Ids:
        """Samples in bulk: int64 [n, seq_length + 1]. The ids must be in range."""
        ids = np.asarray(sample_ids, dtype=np.int64)
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < self.num_samples), "sample id out of range"
        samples = np.empty((len(ids), self.seq_length + 1), dtype=np.int64)
        # Window k starts in epoch floor(k * S / T), and the samples of an epoch are its windows.
        epochs = ids * self.seq_length // self.indexed.num_tokens
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            samples[mine] = self._gather_epoch(int(epoch), ids[mine])
        return samples

    def epoch(self, number: int) -> Epoch:
        """Sample order of one epoch: from memory, from the cache, or built."""
        if number not in self._epochs:
            while len(self._epochs) >= KEPT_EPOCHS:
                self._epochs.pop(next(iter(self._epochs)), None)
            self._epochs[number] = self._load_or_build(number)
        return self._epochs[number]

    def _gather_epoch(self, number: int, ids: Ids) -> Ids:
        """Samples of one epoch: [n, seq_length + 1]."""
        samples = np.empty((len(ids), self.seq_length + 1), dtype=np.int64)
        rows = max(1, BLOCK // (self.seq_length + 1))
        for at in range(0, len(ids), rows):
            begin, length = self._pieces(number, ids[at : at + rows])
            copy_runs(self.indexed.tokens, begin, length, samples[at : at + rows].reshape(-1))
        return samples

    def _pieces(self, number: int, ids: Ids) -> tuple[Ids, Ids]:
        """The runs of tokens that make up samples of one epoch: (first token in the .bin, tokens), [pieces].

        Windows are cut into pieces at document ends; a piece is a run of tokens of one document.
        """
        epoch, width, first = self.epoch(number), self.seq_length + 1, self.first_window(number)
        begins = (first + epoch.windows[ids - first]) * self.seq_length - number * self.indexed.num_tokens
        # The first that ends after a token holds it: documents without tokens are passed over.
        head = first_above(epoch.ends, epoch.coarse_ends, begins)  # document of each window's first token
        tail = first_above(epoch.ends, epoch.coarse_ends, begins + width - 1)  # … and of its last
        count = tail - head + 1  # pieces per window
        last = np.cumsum(count)
        place = np.arange(last[-1]) + np.repeat(head - (last - count), count)
        window_begin = np.repeat(begins, count)
        document_begin = np.where(place > 0, epoch.ends[place - 1], 0)
        begin = np.maximum(document_begin, window_begin)
        length = np.minimum(epoch.ends[place], window_begin + width) - begin
        return self.indexed.document_starts[epoch.documents[place]] + begin - document_begin, length

    def first_window(self, epoch: int) -> int:
        """Number of the first window that starts in an epoch: ceil(epoch * T / S)."""
        return -(-epoch * self.indexed.num_tokens // self.seq_length)

    def _build(self, number: int) -> Epoch:
        count = self.indexed.num_documents
        lengths = np.diff(self.indexed.document_starts)
        documents = permutation(count, self.seed, number, stream=0)
        documents = np.concatenate([documents, self._following(number + 1, lengths)])
        windows = self.first_window(number + 1) - self.first_window(number)
        order = permutation(windows, self.seed, number, stream=1)
        return Epoch(documents, np.cumsum(lengths[documents]), order)

    def _following(self, number: int, lengths: Ids) -> Ids:
        """The head of an epoch's documents that the last windows of the epoch before reach into: S tokens."""
        head = 1024
        while True:
            documents = permutation(self.indexed.num_documents, self.seed, number, stream=0, head=head)
            ends = np.cumsum(lengths[documents])
            if ends[-1] >= self.seq_length:
                return documents[: int(np.searchsorted(ends, self.seq_length)) + 1]
            head *= 16

    def _load_or_build(self, number: int) -> Epoch:
        windows = self.first_window(number + 1) - self.first_window(number)
        if self.cache_dir is None or self.indexed.num_documents + windows < self.cache_from:
            return self._build(number)
        path = self._cache_path(self.cache_dir, number)
        found = self._cached(path, windows)
        if found is None:
            with one_builder(path):  # which may be another one, and then its work is there
                found = self._cached(path, windows) or self._build_into(path, number, windows)
        return found

    def _cached(self, path: Path, windows: int) -> Epoch | None:
        """An epoch of so many windows from the cache: documents, ends and windows one after another."""
        stored = load_checked(path)
        if stored is None or len(stored) < windows or (len(stored) - windows) % 2:
            return None
        documents = (len(stored) - windows) // 2
        return Epoch(stored[:documents], stored[documents : 2 * documents], stored[2 * documents :])

    def _build_into(self, path: Path, number: int, windows: int) -> Epoch:
        """An epoch, through the cache: its arrays are then shared by all processes that map them."""
        built = self._build(number)
        try:
            save_checked(path, np.concatenate([built.documents, built.ends, built.windows]))
        except OSError:
            return built  # a read-only or full disk costs time at the next start, nothing else
        return self._cached(path, windows) or built

    def _cache_path(self, cache_dir: Path, number: int) -> Path:
        key = f"{RULE} {self.indexed.digest} {self.seq_length} {self.seed}"
        name = digest_bytes(key.encode()).partition(":")[2]
        return cache_dir / f"gpt-{name}-epoch{number:05d}.npy"


class EvalWindows:
    """Consecutive windows over the whole corpus in its own order, for scoring every token exactly once.

    Window k covers tokens k * S to k * S + S; the last is padded with IGNORE. The corpus's very first
    token has no context and is not predicted: num_tokens - 1 are. Raises UserError for a one-token corpus.
    """

    def __init__(self, indexed: IndexedDataset, *, seq_length: int) -> None:
        if indexed.num_tokens < 2:
            raise UserError(too_short(indexed, 1))
        self.indexed, self.seq_length = indexed, seq_length

    def __len__(self) -> int:
        return -(-(self.indexed.num_tokens - 1) // self.seq_length)

    def gather(self, window_ids: ArrayLike) -> Ids:
        """Windows in bulk: int64 [n, seq_length + 1], IGNORE past the end of the corpus."""
        ids = np.asarray(window_ids, dtype=np.int64)
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < len(self)), "window id out of range"
        positions = ids[:, None] * self.seq_length + np.arange(self.seq_length + 1)
        inside = positions < self.indexed.num_tokens
        tokens = self.indexed.tokens[np.where(inside, positions, 0)].astype(np.int64)
        return np.where(inside, tokens, IGNORE)


def windows_per_epoch(num_tokens: int, seq_length: int) -> int:
    """Whole windows in one pass over a corpus."""
    return max(0, num_tokens - 1) // seq_length


def too_short(indexed: IndexedDataset, seq_length: int) -> str:
    """What to say about a corpus that does not fill one window."""
    return (
        f"{indexed.bin_path} holds {indexed.num_tokens} tokens, one window of data.seq_length={seq_length} "
        f"needs {seq_length + 1}: lower data.seq_length to {max(1, indexed.num_tokens - 1)} or less or build "
        f"a larger corpus"
    )


def permutation(n: int, seed: int, epoch: int, *, stream: int, head: int | None = None) -> Ids:
    """A shuffle of 0 … n-1, int64 [n], the same on every machine and under every NumPy release.

    NumPy promises that for a bit generator's raw output but not for Generator.permutation, so the raw
    numbers are sorted. `head` gives the first entries alone, for less work.
    """
    raw = np.random.PCG64(np.random.SeedSequence([seed % (1 << 64), epoch, stream])).random_raw(n)
    if head is None or head >= n:
        return stable_argsort(raw)
    chosen = np.flatnonzero(raw <= np.partition(raw, head - 1)[head - 1])  # ties included
    return chosen[stable_argsort(raw[chosen])][:head]


def save_checked(path: Path, values: NDArray[Any]) -> None:
    """Write an .npy file followed by 8 bytes of its array's digest, atomically. Raises OSError."""

    def write(f: BinaryIO) -> None:
        np.lib.format.write_array(f, values, allow_pickle=False)
        f.write(xxhash.xxh3_64(values.data).digest())

    write_atomic(path, write)


def load_checked(path: Path) -> Ids | None:
    """The mapped array of a file `save_checked` wrote, or None if it is absent or damaged."""
    try:
        values = np.lib.format.open_memmap(path, mode="r").view(np.ndarray)  # refuses objects, so no pickle
        with open(path, "rb") as f:
            f.seek(-8, os.SEEK_END)
            digest = f.read()
    except Exception:  # NumPy's reader of headers raises half a dozen kinds on a damaged one
        return None
    whole = values.ndim == 1 and values.dtype == np.int64 and xxhash.xxh3_64(values.data).digest() == digest
    return values if whole else None
