"""Bytes of plain and compressed files, block by block: memory does not grow with the file.

Python's gzip module hides what it decoded before an error, and python-zstandard's reader accepts a truncated
file; so gzip is unpacked with zlib and Zstandard with pyarrow, which reports both. A compressed file of no
bytes is damaged: every compressor writes a header.
"""

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mlm.corpus.read.encoding import UTF_8, transcoded
from mlm.data.records import check_supported, open_binary, readable
from mlm.util.extras import load_extra
from mlm.util.object_store import is_stored

BLOCK = 1 << 18  # bytes yielded at a time: 256 KiB
UNPACKERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),  # gzip's header and checksum (RFC 1952)
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lambda: lzma.LZMADecompressor(memlimit=1 << 27),  # 128 MiB, twice what xz -9 needs
}


class DamagedError(Exception):
    """A compressed file is truncated or corrupt."""

    line: int | None = None
    """Line reached, where it is known."""


def blocks(path: str, *, begin: int = 0, encoding: str = UTF_8) -> Iterator[bytes]:
    """Yield the content of a file from byte `begin` on (0 for compressed ones), in blocks of at most 256 KiB.

    With another encoding it is converted to UTF-8 (`transcoded`). Raises DamagedError after the last sound
    block, and UserError if the file cannot be read or the package for Zstandard is missing.
    """
    suffix = Path(path.lower()).suffix
    content = zstd_blocks(path) if suffix == ".zst" else raw_blocks(path, begin)
    if suffix in UNPACKERS:
        content = packed_blocks(path, content, UNPACKERS[suffix])
    return content if encoding == UTF_8 else transcoded(content, encoding)


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
        # zlib leaves what it has not used; bz2 and lzma keep it, and say that they need no input
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
                block = stream.read(1 << 14)  # small: with an error its sound bytes are lost
            if not block:
                if is_first and not f.size():
                    raise DamagedError("no bytes")
                return
            is_first = False
            yield block


@contextmanager
def explain_damage(path: str) -> Iterator[None]:
    """Turn pyarrow's errors for a damaged file into DamagedError; errors of the disk or a store pass.

    Raises UserError for what pyarrow does not support.
    """
    try:
        yield
    except (load_extra("pyarrow", "the input").ArrowException, OSError) as error:
        if isinstance(error, OSError) and (error.errno is not None or type(error) is not OSError):
            raise
        check_supported(path, error)
        raise DamagedError(error) from error


def lines(source: Iterator[bytes], max_bytes: int) -> Iterator[tuple[bytes | bytearray | None, int]]:
    """Yield lines without their newline, and their length with it; None for a line above `max_bytes`.

    Such a line is dropped while it is read: at most `max_bytes` and two blocks are held.
    """
    held, size = bytearray(), 0  # of the unfinished line
    for block in source:
        *ended, rest = block.split(b"\n")
        for piece in ended:
            size += len(piece)
            if size > max_bytes:
                yield None, size + 1
            else:
                yield (held + piece if held else piece), size + 1
            held, size = bytearray(), 0
        size += len(rest)
        if size > max_bytes:
            held = bytearray()
        else:
            held += rest
    if size:
        yield (None if size > max_bytes else held), size


def first_line(path: str, begin: int, end: int) -> int | None:
    """Return the start of the first line that begins in [begin, end); None if there is none.

    Reads to the end of the preceding line and holds none of it. Raises UserError if the file cannot be read.
    """
    if begin == 0:
        return begin
    # from the byte before: when it is a newline, a line starts at `begin`
    position = begin - 1
    for block in raw_blocks(path, position):
        newline = block.find(b"\n")
        if newline >= 0:
            start = position + newline + 1
            return start if start < end else None
        position += len(block)
        if position >= end:
            break
    return None
