"""A shard file read once: the bytes that are used are the bytes that were digested.

The manifest holds a digest of each block of a file. A block is read, compared, and used from memory. Files of
older versions have one digest for all: they are digested first, and read by a descriptor that must show the
file unchanged since.
"""

import os
import stat
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

import xxhash

from mlm.checkpoint.native import format as layout
from mlm.checkpoint.native.format import RESTORE, FileEntry
from mlm.util.atomic import digest_name
from mlm.util.errors import CorruptFileError

Signature: TypeAlias = tuple[int, int, int, int, int]
"""Device, inode, size, time of the last change of content and of the inode: equal for an untouched file."""


def signature(found: os.stat_result) -> Signature:
    """Return the signature of a file."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class Digester:
    """Digests of a file and of its blocks, taken on the way to the disk."""

    def __init__(self) -> None:
        self._whole, self._block = xxhash.xxh3_128(), xxhash.xxh3_128()
        self._room, self._size = layout.DIGEST_BLOCK, 0
        self._blocks: list[str] = []

    def update(self, content: memoryview) -> None:
        """The next bytes of the file."""
        self._whole.update(content)
        self._size += len(content)
        while len(content):
            piece, content = content[: self._room], content[self._room :]
            self._block.update(piece)
            self._room -= len(piece)
            if not self._room:
                self._end_block()

    def entry(self) -> FileEntry:
        """Size and digests of all bytes received."""
        if self._room < layout.DIGEST_BLOCK:
            self._end_block()
        return FileEntry(self._size, digest_name(self._whole), tuple(self._blocks))

    def _end_block(self) -> None:
        self._blocks.append(digest_name(self._block))
        self._block, self._room = xxhash.xxh3_128(), layout.DIGEST_BLOCK


class CheckedFile:
    """A shard file open for reading; a context manager. Has what of a binary file `copy_region` uses.

    Attributes:
        name:    its path
        size:    its bytes, as the manifest says and as found
        checked: numbers of the blocks whose digest was compared
        found:   the file as it was opened
    """

    def __init__(
        self, path: Path, entry: FileEntry, expected: Signature | None = None, *, raw: bool = False
    ) -> None:
        """Open the file; with `raw` its bytes are not compared, to recognise its format.

        Raises CorruptFileError when it is missing, no regular file, of another size, or, with `expected`, not
        the file that was digested; OSError.
        """
        self.name, self.size, self._expected = str(path), entry.bytes, expected
        self.checked: set[int] = set()
        self._blocks = () if raw else entry.blocks
        self._position, self._held, self._buffer = 0, -1, bytearray()
        size = layout.regular_size(path)
        if size != entry.bytes:
            raise CorruptFileError(f"{path}: {size} bytes, the manifest says {entry.bytes}. {RESTORE}")
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(self._descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                raise CorruptFileError(f"{path}: replaced while it was opened. {RESTORE}")
            self.found = signature(found)
            self.check_unchanged()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> "CheckedFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor and free the memory."""
        self.release()
        os.close(self._descriptor)

    def release(self) -> None:
        """Free the block in memory; a later read fetches and checks it again."""
        self._held, self._buffer = -1, bytearray()

    def seek(self, position: int) -> None:
        """Set the place of the next read."""
        self._position = position

    def read(self, count: int) -> bytes:
        """At most `count` bytes."""
        content = bytearray(max(0, min(count, self.size - self._position)))
        self.readinto(memoryview(content))
        return bytes(content)

    def readinto(self, target: memoryview) -> int:
        """Fill `target` as far as the file goes. Raises CorruptFileError for a block that is damaged."""
        count = max(0, min(len(target), self.size - self._position))
        if not self._blocks:
            done = self._read_at(target[:count], self._position)
        else:
            done = 0
            while done < count:
                number, begin = divmod(self._position + done, layout.DIGEST_BLOCK)
                block = self._fetch(number)[begin:]
                piece = min(len(block), count - done)
                target[done : done + piece] = block[:piece]
                done += piece
        self._position += done
        return done

    def check_all(self) -> None:
        """Compare every block that no read has compared. Raises CorruptFileError."""
        for number in range(len(self._blocks)):
            if number not in self.checked:
                self._fetch(number)

    def check_unchanged(self) -> None:
        """Raises CorruptFileError unless the file is the one that was digested, of a file without blocks."""
        if self._expected is not None and signature(os.fstat(self._descriptor)) != self._expected:
            raise CorruptFileError(f"{self.name}: changed after it was digested. {RESTORE}")

    def _fetch(self, number: int) -> memoryview:
        """A block, from memory if it was the last one."""
        if self._held != number:
            begin = number * layout.DIGEST_BLOCK
            size = min(layout.DIGEST_BLOCK, self.size - begin)
            if len(self._buffer) < size:
                self._buffer = bytearray(size)
            self._held = -1
            view = memoryview(self._buffer)[:size]
            if self._read_at(view, begin) != size:
                raise CorruptFileError(f"{self.name}: ends early. {RESTORE}")
            found, said = digest_name(xxhash.xxh3_128(view)), self._blocks[number]
            if found != said:
                raise CorruptFileError(
                    f"{self.name}: damaged, digest {found} from byte {begin} on, not {said}. {RESTORE}"
                )
            self._held = number
            self.checked.add(number)
        return memoryview(self._buffer)[: min(layout.DIGEST_BLOCK, self.size - number * layout.DIGEST_BLOCK)]

    def _read_at(self, target: memoryview, position: int) -> int:
        done = 0
        while done < len(target) and (count := os.preadv(self._descriptor, [target[done:]], position + done)):
            done += count
        return done
