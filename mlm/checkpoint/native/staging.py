"""A shard file in memory: copied while training waits, written while it continues.

Where the file system supports it, writes bypass the page cache (O_DIRECT), which costs training neither
processor time nor cached data.
"""

import errno
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mlm.checkpoint.native.format import FileEntry
from mlm.checkpoint.native.shard_file import Digester, header_bytes, in_order

ALIGNMENT = 4096  # of address, offset and length under O_DIRECT
BLOCK = 1 << 24  # bytes per write: 16 MiB


def _lock_pages(address: int, size: int) -> bool:
    """Page-lock memory for CUDA; return False if the system does not allow it."""
    try:
        if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0:
            return True
    except (RuntimeError, AttributeError):
        return False
    _drop_error()
    return False


def _drop_error() -> None:
    """Clear the error of a failed call, which CUDA would raise at this thread's next kernel."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


class StagedFile:
    """The shard file of one rank, in memory that later saves reuse."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._size = 0
        """Bytes of the staged file; 0 without one."""
        self._failure: Exception | None = None
        self.tensors: dict[str, Tensor] = {}
        """Copies of the tensors, views of the memory."""
        self._locked: int | None = None
        """Address of the memory if it is page-locked."""

    def fill(self, tensors: Mapping[str, Tensor], save_id: str) -> None:
        """Copy the tensors (any device, any strides), with as many threads as torch has.

        Never raises: `write` raises the error, where the ranks exchange errors.

        On CUDA, the caller's current stream orders the copies.
        """
        self._size, self._failure, self.tensors = 0, None, {}
        try:
            ordered = in_order(tensors)
            forms = [(name, x.dtype, tuple(x.shape)) for name, x in ordered]
            header = header_bytes(forms, {"save_id": save_id})
            size = len(header) + sum(x.numel() * x.element_size() for _, x in ordered)
            memory = self._allocate(size, page_locked=any(x.is_cuda for _, x in ordered))
            memory[: len(header)] = np.frombuffer(header, np.uint8)
            begin = len(header)
            for name, x in ordered:
                end = begin + x.numel() * x.element_size()
                self.tensors[name] = torch.from_numpy(memory[begin:end]).view(x.dtype).view(x.shape)
                self.tensors[name].copy_(x.detach())
                begin = end
            self._size = size
        except Exception as error:
            self._failure = error

    def write(self, path: Path) -> FileEntry:
        """Write and digest the file, which must be new, and fsync it. Raises OSError naming `path`."""
        if self._failure is not None:
            raise self._failure
        assert self._size, "nothing is staged"
        try:
            try:
                return self._write(path, getattr(os, "O_DIRECT", 0))
            except OSError as e:
                if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                path.unlink(missing_ok=True)  # a file system that has no O_DIRECT
                return self._write(path, 0)
        except OSError as e:
            raise OSError(e.errno, e.strerror, str(path)) from e

    def _allocate(self, size: int, *, page_locked: bool) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        padded = max(-(-size // ALIGNMENT), 1) * ALIGNMENT
        if self._memory is None or len(self._memory) < padded:
            if self._locked is not None:
                torch.cuda.cudart().cudaHostUnregister(self._locked)
            self._memory = self._locked = None  # freed before the new one is allocated
            self._memory = mmap.mmap(-1, padded)  # begins at a page
            with suppress(OSError, AttributeError):  # a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            if page_locked:
                address = np.frombuffer(self._memory, np.uint8).ctypes.data
                # Without page-locked memory a GPU copies through a small buffer, at a fraction of the speed.
                self._locked = address if _lock_pages(address, padded) else None
        return np.frombuffer(self._memory, np.uint8, padded)

    def _write(self, path: Path, flags: int) -> FileEntry:
        assert self._memory is not None
        size, digester = self._size, Digester()
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o666)
        try:
            with memoryview(self._memory) as content:
                for start in range(0, size, BLOCK):
                    digester.update(content[start : min(start + BLOCK, size)])
                    position, end = start, min(start + BLOCK, padded)
                    while position < end:
                        position += os.write(descriptor, content[position:end])
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return digester.entry()
