"""Long texts as pieces: what a worker holds of one does not grow with it.

As a Python string a text of 60 MB may take 240 MB, and what is made of it (words, hashes, tokens) forty
times that. A text above LONG bytes is therefore never one string: it is read, fixed, compared and tokenised a
piece at a time, with the result of the whole. A source of pieces can be gone through again and again.
"""

import json
import os
import re
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

LONG = 1 << 19
"""Bytes above which a text is processed in pieces: 512 KiB."""
PIECE = 1 << 18
"""Bytes of a piece: 256 KiB. What is made of it takes some 30 MB."""
JSON_UNITS = re.compile(
    # letters and whole escapes; an escaped high surrogate at the end waits for its other half
    rb"(?:[^\\]++|\\u(?![dD][89abAB][0-9a-fA-F]{2}\Z)[0-9a-fA-F]{4}|\\[^u])*+",
    re.DOTALL,
)


class LongText(Protocol):
    """A text of more than LONG bytes."""

    def pieces(self) -> Iterator[str]:
        """The text from its beginning, a piece at a time; no piece is empty."""
        ...


@dataclass(frozen=True, slots=True)
class Utf8Text:
    """A long text as bytes in memory, begin to end. They must be valid UTF-8."""

    content: bytes | bytearray | memoryview
    begin: int
    end: int

    def pieces(self) -> Iterator[str]:
        at = self.begin
        while at < self.end:
            stop = letter_start(self.content, min(at + PIECE, self.end), self.end)
            yield bytes(self.content[at:stop]).decode()
            at = stop

    def problem(self) -> tuple[str, int] | None:
        """Why the bytes are no UTF-8, and the byte at which that shows; None if they are."""
        at = self.begin
        while at < self.end:
            stop = letter_start(self.content, min(at + PIECE, self.end), self.end)
            try:
                bytes(self.content[at:stop]).decode()
            except UnicodeDecodeError as error:
                return error.reason, at + error.start
            at = stop
        return None


@dataclass(frozen=True, slots=True)
class StringText:
    """A long text that is a string already."""

    text: str

    def pieces(self) -> Iterator[str]:
        for at in range(0, len(self.text), PIECE):
            yield self.text[at : at + PIECE]


@dataclass(frozen=True, slots=True)
class JsonText:
    """A long text as the inside of a JSON string. Going through it raises ValueError where it is none."""

    line: bytes | bytearray
    begin: int
    end: int

    def pieces(self) -> Iterator[str]:
        at = self.begin
        while at < self.end:
            stop = letter_start(self.line, min(at + PIECE, self.end), self.end)
            raw = bytes(self.line[at:stop])
            if stop < self.end:
                found = JSON_UNITS.match(raw)
                whole = found.end() if found else 0
                raw = raw[:whole] if whole else raw
            yield json.loads(b'"' + raw + b'"')
            at += len(raw)


@dataclass(frozen=True, slots=True)
class StoredText:
    """A long text in an open file: `num_bytes` of UTF-8 from `begin` on."""

    descriptor: int
    begin: int
    num_bytes: int

    def pieces(self) -> Iterator[str]:
        left = b""
        for block in self.blocks():
            block = left + block
            stop = letter_start(block, len(block), len(block) + 1)
            if stop:
                yield block[:stop].decode()
            left = block[stop:]
        assert not left, "the text is valid UTF-8"

    def blocks(self) -> Iterator[bytes]:
        """The bytes of the text."""
        at, end = self.begin, self.begin + self.num_bytes
        while at < end:
            block = os.pread(self.descriptor, min(PIECE, end - at), at)
            assert block, "the file holds the text"
            yield block
            at += len(block)

    def part(self, begin: int, end: int) -> "StoredText":
        """The text between two of its bytes."""
        return StoredText(self.descriptor, self.begin + begin, end - begin)

    def read(self) -> str:
        """All of it as a string: for parts that are short."""
        return b"".join(self.blocks()).decode()


class Letters:
    """The letters of a stored text by number: one pass finds the bytes of every piece."""

    def __init__(self, text: StoredText) -> None:
        self.text, self._letters, self._bytes = text, [0], [0]
        for piece in text.pieces():
            self._letters.append(self._letters[-1] + len(piece))
            self._bytes.append(self._bytes[-1] + len(piece.encode()))

    def __len__(self) -> int:
        return self._letters[-1]

    def between(self, begin: int, end: int) -> str:
        """Letters begin … end - 1, as far as there are any."""
        end = min(end, len(self))
        first = bisect_right(self._letters, begin) - 1
        last = bisect_left(self._letters, end)
        some = self.text.part(self._bytes[first], self._bytes[last]).read()
        return some[begin - self._letters[first] : end - self._letters[first]]

    def part(self, begin: int, end: int) -> StoredText:
        """The text of letters begin … end - 1."""
        return self.text.part(self._byte_of(begin), self._byte_of(end))

    def _byte_of(self, letter: int) -> int:
        first = bisect_right(self._letters, letter) - 1
        return self._bytes[first] + len(self.between(self._letters[first], letter).encode())


class Scratch:
    """A long text on its way to disk: a file without a name."""

    def __init__(self, folder: Path) -> None:
        self.file: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self.num_bytes = 0
        self.is_blank = True
        """True while there is nothing but white space."""

    def add(self, piece: str) -> None:
        """Append a piece. Raises OSError."""
        content = piece.encode()
        self.file.write(content)
        self.num_bytes += len(content)
        self.is_blank = self.is_blank and (not piece or piece.isspace())

    @property
    def text(self) -> StoredText:
        self.file.flush()
        return StoredText(self.file.fileno(), 0, self.num_bytes)

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def letter_start(content: bytes | bytearray | memoryview, at: int, end: int) -> int:
    """The last byte at or before `at` where a letter of UTF-8 begins; `end` begins one.

    Where `at` is past the content, the end of its last whole letter.
    """
    if at == end:
        return at
    if at == len(content):
        begin = at - 1
        while begin > max(0, at - 4) and content[begin] & 0xC0 == 0x80:
            begin -= 1
        lead = content[begin]
        size = 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        return at if begin + size <= at else begin
    begin = at
    while begin > max(0, at - 3) and content[begin] & 0xC0 == 0x80:
        begin -= 1
    return at if content[begin] & 0xC0 == 0x80 else begin  # no UTF-8: whoever decodes it will say so


def at_breaks(pieces: Iterator[str], most: int = PIECE) -> Iterator[str]:
    """The same text in pieces that end after a line end, else after white space, if at all possible.

    A word of more than `most` letters is cut; not inside a run of dots but at a multiple of three of them.
    """
    held = ""
    for piece in pieces:
        held += piece
        while len(held) >= 2 * most:
            end = last_break(held, most)
            yield held[:end]
            held = held[end:]
    while held:
        end = last_break(held, most) if len(held) >= 2 * most else len(held)
        yield held[:end]
        held = held[end:]


def last_break(text: str, most: int) -> int:
    """Position to cut a text of at least 2 * `most` letters: at most `most` letters on."""
    if (end := text.rfind("\n", 0, most) + 1) > most // 2:
        return end
    for at in range(most, most // 2, -1):
        if text[at - 1].isspace() and not text[at].isspace():
            return at
    end = len(text[:most].rstrip("."))
    return end or most - most % 3
