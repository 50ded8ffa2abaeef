"""Files that are whole or absent: atomic writes, durable directories, digests."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import xxhash

CHUNK = 1 << 22  # bytes read at a time when digesting: 4 MiB


def write_atomic(path: Path, content: bytes | Callable[[BinaryIO], None]) -> None:
    """Write `content` to `path` so that a kill at any instant leaves the old file or the new one.

    `content` is the bytes, or a function that writes them to an open file. Raises OSError.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as f:
            if callable(content):
                content(f)
            else:
                f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make renames inside `path` survive a power loss."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def digest_file(path: Path, progress: Callable[[int], None] = lambda count: None) -> str:
    """Content digest of a file, as `xxh3:<hex>`; `progress` hears of bytes read. Raises OSError."""
    h = xxhash.xxh3_128()
    with open(path, "rb") as f:
        while block := f.read(CHUNK):
            h.update(block)
            progress(len(block))
    return digest_name(h)


def digest_bytes(content: bytes) -> str:
    """Content digest of bytes, as `xxh3:<hex>`."""
    return digest_name(xxhash.xxh3_128(content))


def digest_name(h: "xxhash.xxh3_128") -> str:
    """How a digest is written in manifests and receipts."""
    return f"xxh3:{h.hexdigest()}"
