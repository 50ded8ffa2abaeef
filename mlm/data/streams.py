"""Bytes of plain and compressed files, block by block: memory does not grow with the file.

Python's gzip module drops content decoded before an error, and python-zstandard's reader accepts a truncated
file; so gzip is unpacked with zlib and Zstandard with pyarrow, which reports both. An empty compressed file
is damaged: every compressor writes a header.
"""

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from io import RawIOBase
from pathlib import Path
from typing import Any

from mlm.util.errors import UserError, reading_from
from mlm.util.extras import load_extra
from mlm.util.files import READABLE, open_input
from mlm.util.object_store import explain_store_errors, is_stored, open_object
from mlm.util.terminal import one_line

DAMAGED = "damaged, or of a form that is not supported"
WRITE_AGAIN = "write it again, unencrypted and with gzip, or as .jsonl"
BLOCK = 1 << 18  # bytes yielded at a time: 256 KiB
UNPACKERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),  # gzip's header and checksum (RFC 1952)
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lambda: lzma.LZMADecompressor(memlimit=1 << 27),  # 128 MiB, twice what xz -9 needs
}


class DamagedError(Exception):
    """A file that is truncated, corrupt, or of an unsupported form, which libraries do not distinguish.

    Unsupported forms are encrypted Parquet and windows above 128 MiB.
    """


def blocks(path: str, begin: int = 0) -> Iterator[bytes]:
    """Yield the content of a file from byte `begin` on (0 for compressed ones), in blocks of at most 256 KiB.

    Raises DamagedError after the last intact block, and UserError if the file cannot be read or the package
    for Zstandard is missing.
    """
    suffix = Path(path.lower()).suffix
    content = zstd_blocks(path) if suffix == ".zst" else raw_blocks(path, begin)
    return packed_blocks(path, content, UNPACKERS[suffix]) if suffix in UNPACKERS else content


class BlockReader(RawIOBase):
    """File object that reads blocks."""

    def __init__(self, source: Iterator[bytes]) -> None:
        self._source, self._rest = source, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._source, b""))
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


@contextmanager
def readable(file: str | Path) -> Iterator[None]:
    """Convert errors of reading a file to UserError."""
    with (
        reading_from(Path(file), READABLE),
        explain_store_errors(str(file)) if is_stored(str(file)) else nullcontext(),
    ):
        yield


def open_binary(path: str) -> Any:
    return open_object(path) if is_stored(path) else open_input(path, 0)


def raw_blocks(path: str, begin: int) -> Iterator[bytes]:
    with ExitStack() as stack:
        with readable(path):
            f = stack.enter_context(open_binary(path))
            f.seek(begin)
        while True:
            with readable(path):
                block = f.read(BLOCK)
            if not block:
                return
            yield block


def packed_blocks(path: str, source: Iterator[bytes], new: Callable[[], Any]) -> Iterator[bytes]:
    """Unpack streams of gzip, bzip2 or xz, one after the other; zeros may separate them."""
    stream, first = None, True
    for data in source:
        # zlib returns unused input; bz2 and lzma buffer it, and report that they need no input.
        while data or not getattr(stream, "needs_input", True):
            if stream is None:
                if not first and not (data := data.lstrip(b"\0")):
                    break
                stream, first = new(), False
            try:
                block = stream.decompress(data, BLOCK)
            except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
                check_supported(path, error)
                raise DamagedError(error) from error
            data = stream.unused_data if stream.eof else getattr(stream, "unconsumed_tail", b"")
            if stream.eof:
                stream = None
            if block:
                yield block
    if stream is not None or first:
        raise DamagedError("no bytes" if first else "truncated")


def zstd_blocks(path: str) -> Iterator[bytes]:
    """Unpack frames one after the other. A window above 128 MiB (zstd --long=28) is rejected."""
    pyarrow, is_first = load_extra("pyarrow", f"input {path}"), True
    with ExitStack() as stack:
        with readable(path):
            source = pyarrow.PythonFile(open_binary(path)) if is_stored(path) else pyarrow.OSFile(path)
            f = stack.enter_context(source)
            stream = stack.enter_context(pyarrow.CompressedInputStream(f, "zstd"))
        while True:
            with readable(path), explain_damage(path):
                block = stream.read(1 << 14)  # small, as an error loses the intact bytes of a read
            if not block:
                if is_first and not f.size():
                    raise DamagedError("no bytes")
                return
            is_first = False
            yield block


@contextmanager
def explain_damage(path: str) -> Iterator[None]:
    """Convert pyarrow's errors for a damaged file to DamagedError; errors of the disk or a store pass.

    Raises UserError for features that pyarrow does not support.
    """
    try:
        yield
    except (load_extra("pyarrow", "the input").ArrowException, OSError) as error:
        if isinstance(error, OSError) and (error.errno is not None or type(error) is not OSError):
            raise
        check_supported(path, error)
        raise DamagedError(error) from error


def check_supported(file: str, error: Exception) -> None:
    """Raise UserError if a library's error means that a file is intact but of an unsupported form."""
    if isinstance(error, NotImplementedError):
        problem = f"{file} is of a form that is not supported ({one_line(error)[:200]})"
        raise UserError(f"{problem}: {WRITE_AGAIN}") from error
