"""The shingles of long texts: sorted sets of hashes that lie on disk, compared a range at a time."""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mlm.corpus.dedup.shingles import Hashes

BITS = 6
RANGES = 1 << BITS
"""Ranges of hashes, by their highest bits: what is in memory at a time."""
SHIFT = np.uint64(64 - BITS)
EDGES: Hashes = np.arange(1, RANGES, dtype=np.uint64) << SHIFT


class SpilledHashes:
    """A set of hashes in a file without a name."""

    nbytes = 1 << 20
    """Its weight in a cache: one open file."""

    def __init__(self, parts: Iterable[Hashes], folder: Path | None) -> None:
        self._file: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._bounds = [0]
        with ExitStack() as stack:
            ranges = [stack.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(RANGES)]
            for part in parts:
                in_order = np.sort(part)
                for file, some in zip(ranges, split_by_range(in_order), strict=True):
                    file.write(some.tobytes())
            for file in ranges:
                file.seek(0)
                found = np.unique(np.frombuffer(file.read(), dtype=np.uint64))
                self._file.write(found.tobytes())
                self._bounds.append(self._bounds[-1] + len(found))

    def __len__(self) -> int:
        return self._bounds[-1]

    def ranges(self) -> Iterator[Hashes]:
        """The hashes of each range, sorted."""
        for begin, end in zip(self._bounds, self._bounds[1:], strict=False):
            self._file.seek(8 * begin)
            yield np.frombuffer(self._file.read(8 * (end - begin)), dtype=np.uint64)


AnyHashes = Hashes | SpilledHashes


def split_by_range(hashes: Hashes) -> list[Hashes]:
    """Sorted hashes by range."""
    return np.split(hashes, np.searchsorted(hashes, EDGES))


def ranges_of(hashes: AnyHashes) -> Iterable[Hashes]:
    """The hashes of each range."""
    return hashes.ranges() if isinstance(hashes, SpilledHashes) else split_by_range(hashes)
