"""Bytes of plain and compressed files, block by block: memory does not grow with the file.

Python's gzip module hides what it decoded before a fault, and python-zstandard's reader takes a truncated
file for a whole one; so gzip is unpacked with zlib and Zstandard with pyarrow, which reports both. A packed
file of no bytes is damaged: even of nothing, every packer makes a header.
"""

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from mlm.corpus.read.records import readable
from mlm.extras import load_extra

BLOCK = 1 << 18  # bytes handed on at a time: 256 KiB
ZSTD_BLOCK = 1 << 14  # 16 KiB: what a fault takes with it that was sound
GZIP_WBITS = 31  # zlib: expect gzip's header and check its checksum (RFC 1952)
XZ_MEMORY = 1 << 27  # 128 MiB: what xz -9 needs, twice; a file that asks for more counts as damage
EMPTY = "no bytes"


class DamagedError(Exception):
    """A compressed file is truncated or corrupt."""

    line: int | None = None
    """Line reached, where it is known."""


def blocks(path: str, *, begin: int = 0, moved: Callable[[int], None]) -> Iterator[bytes]:
    """The content of a file from byte `begin` on (0 for compressed ones), in blocks of 256 KiB at the most.

    `moved` hears of bytes of the file that were read. Raises DamagedError after the last sound block, and
    UserError when the file cannot be read or the package for Zstandard is missing.
    """
    name = path.lower()
    if name.endswith(".zst"):
        return zstd_blocks(path, moved)
    raw = raw_blocks(path, begin, moved)
    if name.endswith(".gz"):
        return gzip_blocks(raw)
    if name.endswith(".bz2"):
        return packed_blocks(raw, bz2.BZ2Decompressor, padded=False)
    if name.endswith(".xz"):
        return packed_blocks(raw, lambda: lzma.LZMADecompressor(memlimit=XZ_MEMORY), padded=True)
    return raw


def raw_blocks(path: str, begin: int, moved: Callable[[int], None]) -> Iterator[bytes]:
    """The bytes of a file as they are."""
    with ExitStack() as stack:
        with readable(path):
            f = stack.enter_context(open(path, "rb", buffering=0))
            f.seek(begin)
        while True:
            with readable(path):
                block = f.read(BLOCK)
            if not block:
                return
            moved(len(block))
            yield block


def gzip_blocks(source: Iterator[bytes]) -> Iterator[bytes]:
    """Members one after the other (RFC 1952, section 2.2); zeros may pad the end, as on tapes."""
    member, first = None, True
    for data in source:
        while data:
            if member is None:
                if not first and not (data := data.lstrip(b"\0")):
                    break
                member, first = zlib.decompressobj(wbits=GZIP_WBITS), False
            try:
                block = member.decompress(data, BLOCK)
            except zlib.error as error:
                raise DamagedError(error) from error
            data = member.unused_data if member.eof else member.unconsumed_tail
            if member.eof:
                member = None
            if block:
                yield block
    if member is not None or first:
        raise DamagedError(EMPTY if first else "truncated")


class Unpacker(Protocol):
    """Interface that bz2 and lzma share: one stream."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


def packed_blocks(source: Iterator[bytes], new: Callable[[], Unpacker], *, padded: bool) -> Iterator[bytes]:
    """Streams of bzip2 or xz, one after the other. `padded`: zeros may stand between them, as xz allows."""
    stream, first = None, True
    for data in source:
        while data or (stream is not None and not stream.needs_input):
            if stream is None:
                if padded and not first and not (data := data.lstrip(b"\0")):
                    break
                stream, first = new(), False
            try:
                block = stream.decompress(data, BLOCK)
            except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
                raise DamagedError(error) from error
            data = stream.unused_data if stream.eof else b""
            if stream.eof:
                stream = None
            if block:
                yield block
    if stream is not None or first:
        raise DamagedError(EMPTY if first else "truncated")


def zstd_blocks(path: str, moved: Callable[[int], None]) -> Iterator[bytes]:
    """Frames one after the other. A window above 128 MiB (zstd --long=28 and more) counts as damage."""
    pyarrow = load_extra("pyarrow", f"input {path}")
    position = 0
    with ExitStack() as stack:
        with readable(path):
            f = stack.enter_context(pyarrow.OSFile(path))
            stream = stack.enter_context(pyarrow.CompressedInputStream(f, "zstd"))
        while True:
            with readable(path), damage_is_told():
                block = stream.read(ZSTD_BLOCK)
                count, position = f.tell() - position, f.tell()
            if not block:
                if not position and not f.size():
                    raise DamagedError(EMPTY)
                return
            moved(count)
            yield block


@contextmanager
def damage_is_told() -> Iterator[None]:
    """Turns what pyarrow raises for a damaged file into DamagedError; the disk's own faults pass."""
    try:
        yield
    except load_extra("pyarrow", "the input").ArrowException as error:
        raise DamagedError(error) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise DamagedError(error) from error


def lines(source: Iterator[bytes], max_bytes: int) -> Iterator[tuple[bytes | bytearray | None, int]]:
    """Lines without their newline, and their length with it; None for a line above `max_bytes`.

    Such a line is read to its end and dropped as it comes: no more than `max_bytes` and two blocks are held.
    """
    held, size = bytearray(), 0  # the line under way
    for block in source:
        *ended, rest = block.split(b"\n")
        for piece in ended:
            size += len(piece)
            if size > max_bytes:
                yield None, size + 1
            elif held:
                held += piece
                whole, held = held, bytearray()
                yield whole, size + 1
                del whole  # a long line is held once, and by who reads it
            else:
                yield piece, size + 1
            held, size = bytearray(), 0
        size += len(rest)
        if size > max_bytes:
            held = bytearray()
        else:
            held += rest
    if size:
        yield (None if size > max_bytes else held), size


def first_line(path: str, begin: int, end: int) -> int | None:
    """Where the first line starts that has its first byte in [begin, end); None when there is none.

    Reads to the end of the line before and holds none of it. Raises UserError when the file cannot be read.
    """
    if begin == 0:
        return begin
    # from the byte before: when it is a newline, a line starts at `begin`
    position = begin - 1
    for block in raw_blocks(path, position, lambda count: None):
        found = block.find(b"\n")
        if found >= 0:
            start = position + found + 1
            return start if start < end else None
        position += len(block)
        if position >= end:
            break
    return None
