"""Sample orders of epochs: shuffles that are equal on all machines, and a cache that processes share."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from mlm.util.files import digest_bytes, write_atomic
from mlm.util.lock import single_builder

CACHE_FROM = 1 << 20
"""Documents plus windows of an epoch from which its order is cached in a file."""

Ids = NDArray[np.int64]
Order = TypeVar("Order")


@dataclass(eq=False)
class EpochCache(Generic[Order]):
    """Orders of epochs: the last two in memory, large ones also in files that all processes map.

    The files are optional: damaged ones are rebuilt, a read-only folder is ignored, and of several processes
    one builds.
    """

    build: Callable[[int], Order]
    """Compute the order of an epoch."""
    pack: Callable[[Order], Ids]
    """Return the order as one array, int64 [n]."""
    unpack: Callable[[int, Ids], Order | None]
    """Return the order of an epoch from that array; None if the array is of another epoch."""
    folder: Path | None
    """Folder of the files; None for no files."""
    name: str
    """Prefix of the files' names."""
    key: Callable[[], str]
    """Return everything except the epoch that determines the order; called when a file is needed."""

    def __post_init__(self) -> None:
        self._epochs: dict[int, Order] = {}

    def get(self, epoch: int, *, is_large: bool) -> Order:
        """Return the order of an epoch: from memory, if `is_large` from a file, else computed."""
        if epoch not in self._epochs:
            while len(self._epochs) >= 2:  # batches may span two epochs
                self._epochs.pop(next(iter(self._epochs)), None)
            if self.folder is not None and is_large:
                self._epochs[epoch] = self._load_or_build(self.folder, epoch)
            else:
                self._epochs[epoch] = self.build(epoch)
        return self._epochs[epoch]

    def _load_or_build(self, folder: Path, epoch: int) -> Order:
        digest = digest_bytes(self.key().encode()).partition(":")[2]
        path = folder / f"{self.name}-{digest}-epoch{epoch:05d}.npy"

        def load() -> Order | None:
            stored = load_checked(path)
            return None if stored is None else self.unpack(epoch, stored)

        if (order := load()) is not None:
            return order
        with single_builder(path):
            if (order := load()) is not None:  # another process has built it meanwhile
                return order
            built = self.build(epoch)
            try:
                save_checked(path, self.pack(built))
            except OSError:
                return built  # a read-only or full disk only costs time at the next start
            mapped = load()  # its arrays are shared by all processes
            return built if mapped is None else mapped


def permutation(n: int, seed: int, epoch: int, *, stream: int, head: int | None = None) -> Ids:
    """Return a shuffle of 0 … n-1, int64 [n], equal on every machine and with every NumPy release.

    NumPy guarantees that for the raw output of a bit generator but not for Generator.permutation, so the raw
    numbers are sorted. `head` returns only the first entries, with less work.
    """
    raw = np.random.PCG64(np.random.SeedSequence([seed % (1 << 64), epoch, stream])).random_raw(n)
    if head is None or head >= n:
        return np.argsort(raw, kind="stable")
    smallest = np.flatnonzero(raw <= np.partition(raw, head - 1)[head - 1])  # ties included
    return smallest[np.argsort(raw[smallest], kind="stable")][:head]


def save_checked(path: Path, values: NDArray[Any]) -> None:
    """Write an .npy file followed by 8 bytes of its array's digest, atomically. Raises OSError."""

    def write(f: BinaryIO) -> None:
        np.lib.format.write_array(f, values, allow_pickle=False)
        f.write(xxhash.xxh3_64(values.data).digest())

    write_atomic(path, write)


def load_checked(path: Path) -> Ids | None:
    """Return the mapped array of a file that `save_checked` wrote; None if it is absent or damaged."""
    try:
        values = np.lib.format.open_memmap(path, mode="r").view(np.ndarray)  # rejects objects, so no pickle
        with open(path, "rb") as f:
            f.seek(-8, os.SEEK_END)
            digest = f.read()
    except Exception:  # NumPy raises half a dozen types for a damaged header
        return None
    is_valid = values.ndim == 1 and values.dtype == np.int64
    return values if is_valid and xxhash.xxh3_64(values.data).digest() == digest else None
