"""A shard file in memory: what a checkpoint copies while training waits, and writes while it goes on.

The copy is digested block by block while it is in the processor's cache. It is written past the page cache
where the file system lets it (O_DIRECT): training then loses neither processor time nor cached data to it.
"""

import errno
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from mlm.checkpoint.format import FileEntry
from mlm.checkpoint.shard_file import header_bytes, in_order
from mlm.files import CHUNK, digest_name

ALIGNMENT = 4096  # of address, offset and length under O_DIRECT
WRITE = 1 << 24  # bytes per write: 16 MiB
SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # NumPy knows no bfloat16


class StagedFile:
    """The shard file of one rank, held in memory that later saves use again."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._entry: FileEntry | None = None
        self._failure: Exception | None = None

    def fill(self, tensors: Mapping[str, Tensor], save_id: str) -> None:
        """Copy the tensors (any device, any strides) and digest the file they make. Never raises: `write`
        raises what went wrong, where the ranks tell each other.

        On CUDA, the caller's current stream orders the copies.
        """
        self._entry = self._failure = None
        try:
            self._fill(tensors, save_id)
        except Exception as error:
            self._failure = error

    def _fill(self, tensors: Mapping[str, Tensor], save_id: str) -> None:
        ordered = in_order(tensors)
        header = header_bytes([(name, x.dtype, tuple(x.shape)) for name, x in ordered], {"save_id": save_id})
        size = len(header) + sum(x.numel() * x.element_size() for _, x in ordered)
        memory = self._allocate(size)
        hasher = xxhash.xxh3_128(header)
        memory[: len(header)] = np.frombuffer(header, np.uint8)
        begin = len(header)
        for _, x in ordered:
            begin = _copy_in(x, memory, begin, hasher)
        self._entry = FileEntry(size, digest_name(hasher))

    def write(self, path: Path) -> FileEntry:
        """Write the file, which must be new, and fsync it. Raises OSError naming `path`."""
        if self._failure is not None:
            raise self._failure
        assert self._entry is not None, "nothing is staged"
        try:
            try:
                self._write(path, self._entry.bytes, os.O_DIRECT)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                path.unlink(missing_ok=True)  # a file system that has no O_DIRECT
                self._write(path, self._entry.bytes, 0)
        except OSError as e:
            raise OSError(e.errno, e.strerror, str(path)) from e
        return self._entry

    def _allocate(self, size: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        padded = max(-(-size // ALIGNMENT), 1) * ALIGNMENT
        if self._memory is None or len(self._memory) < padded:
            self._memory = None  # give the old one back first
            self._memory = mmap.mmap(-1, padded)  # begins at a page
            with suppress(OSError):  # a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(self._memory, np.uint8, padded)

    def _write(self, path: Path, size: int, flags: int) -> None:
        assert self._memory is not None
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o644)
        try:
            with memoryview(self._memory) as content:
                done = 0
                while done < padded:
                    with content[done : min(done + WRITE, padded)] as block:
                        done += os.write(descriptor, block)
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _copy_in(
    x: Tensor, memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]", begin: int, hasher: xxhash.xxh3_128
) -> int:
    """Copy a tensor to memory[begin:], in blocks of rows; the end of what was written."""
    kind = SAME_SIZE[x.element_size()]
    rows = x.detach().reshape(1) if x.dim() == 0 else x.detach()
    row_bytes = max(prod(rows.shape[1:]) * x.element_size(), 1)
    step = max(1, CHUNK // row_bytes)
    for first in range(0, rows.shape[0], step):
        source = rows[first : first + step]
        end = begin + source.numel() * x.element_size()
        target = memory[begin:end]
        if x.device.type == "cpu":
            # NumPy's copy lets go of the interpreter and starts no threads beside those that train
            np.copyto(target.view(f"i{x.element_size()}").reshape(source.shape), source.view(kind).numpy())
        else:
            torch.from_numpy(target).view(x.dtype).view(source.shape).copy_(source)
        hasher.update(target.data)
        begin = end
    return begin
