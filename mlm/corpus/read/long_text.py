"""Long texts in pieces: what a worker holds of one does not grow with it.

As a Python string a text of 60 MB may take 240 MB, and what is made of it (words, hashes, tokens) forty times
that. A text above LONG bytes is therefore never one string: it is read, fixed, compared and tokenised a piece
at a time, with the result of the whole. A source of pieces can be read again and again.

It is tokenised piece by piece as if whole, split where its tokens do not change: between two words, where the
tokens of the characters around the split are those of the two sides. Every pattern that splits text into
words (GPT-2's and its heirs, BERT's, Metaspace) offers such a position at each space. A tokenizer that looks
at the whole text may not: the text is split all the same, and the tokens beside the split may differ.
"""

import json
import os
import re
import tempfile
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from mlm.data.tokenizer import Tokenizer

LONG = 1 << 19
"""Bytes above which a text is processed in pieces: 512 KiB."""
PIECE = 1 << 18
"""Bytes of a piece: 256 KiB. Processing it takes some 30 MB."""
JSON_UNITS = re.compile(
    # letters and whole escapes; an escaped high surrogate at the end waits for its other half
    rb"(?:[^\\]++|\\u(?![dD][89abAB][0-9a-fA-F]{2}\Z)[0-9a-fA-F]{4}|\\[^u])*+",
    re.DOTALL,
)


class LongText(Protocol):
    """A text of more than LONG bytes."""

    def pieces(self) -> Iterator[str]:
        """Yield the text from its beginning, a piece at a time; no piece is empty."""
        ...


@dataclass(frozen=True, slots=True)
class Utf8Text:
    """A long text as bytes in memory, begin to end. They must be valid UTF-8."""

    content: bytes | bytearray | memoryview
    begin: int
    end: int

    def pieces(self) -> Iterator[str]:
        """Yield the text, a piece at a time."""
        at = self.begin
        while at < self.end:
            stop = letter_start(self.content, min(at + PIECE, self.end), self.end)
            yield bytes(self.content[at:stop]).decode()
            at = stop

    def problem(self) -> tuple[str, int] | None:
        """Return the reason why the bytes are not UTF-8, and the byte; None if they are."""
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
        """Yield the text, a piece at a time."""
        for at in range(0, len(self.text), PIECE):
            yield self.text[at : at + PIECE]


@dataclass(frozen=True, slots=True)
class JsonText:
    """A long text as the inside of a JSON string. Iterating raises ValueError if it is not one."""

    line: bytes | bytearray
    begin: int
    end: int

    def pieces(self) -> Iterator[str]:
        """Yield the text, a piece at a time."""
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
        """Yield the text, a piece at a time."""
        left = b""
        for block in self.blocks():
            block = left + block
            stop = letter_start(block, len(block), len(block) + 1)
            if stop:
                yield block[:stop].decode()
            left = block[stop:]
        assert not left, "the text is valid UTF-8"

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes of the text."""
        at, end = self.begin, self.begin + self.num_bytes
        while at < end:
            block = os.pread(self.descriptor, min(PIECE, end - at), at)
            assert block, "the file holds the text"
            yield block
            at += len(block)

    def part(self, begin: int, end: int) -> "StoredText":
        """Return the text between two of its bytes."""
        return StoredText(self.descriptor, self.begin + begin, end - begin)

    def read(self) -> str:
        """Return all of it as a string; for short parts."""
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
        """Return letters begin … end - 1, as far as they exist."""
        end = min(end, len(self))
        first = bisect_right(self._letters, begin) - 1
        last = bisect_left(self._letters, end)
        some = self.text.part(self._bytes[first], self._bytes[last]).read()
        return some[begin - self._letters[first] : end - self._letters[first]]

    def part(self, begin: int, end: int) -> StoredText:
        """Return the text of letters begin … end - 1."""
        return self.text.part(self._byte_of(begin), self._byte_of(end))

    def _byte_of(self, letter: int) -> int:
        first = bisect_right(self._letters, letter) - 1
        return self._bytes[first] + len(self.between(self._letters[first], letter).encode())


class Scratch:
    """A long text that is being written to an unnamed file."""

    def __init__(self, folder: Path) -> None:
        self.file: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self.num_bytes = 0
        self.is_blank = True
        """True while there is only white space."""

    def add(self, piece: str) -> None:
        """Append a piece. Raises OSError."""
        content = piece.encode()
        self.file.write(content)
        self.num_bytes += len(content)
        self.is_blank = self.is_blank and (not piece or piece.isspace())

    @property
    def text(self) -> StoredText:
        """The text so far."""
        self.file.flush()
        return StoredText(self.file.fileno(), 0, self.num_bytes)

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def letter_start(content: bytes | bytearray | memoryview, at: int, end: int) -> int:
    """Return the last byte at or before `at` where a letter of UTF-8 begins; `end` begins one.

    If `at` is the end of the content, return the end of its last whole letter.
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
    return at if content[begin] & 0xC0 == 0x80 else begin  # not UTF-8: decoding it reports that


def at_breaks(pieces: Iterator[str], most: int = PIECE) -> Iterator[str]:
    """Yield the same text in pieces that end after a line end, else after white space, if at all possible.

    A word of more than `most` letters is split, in a run of dots only at a multiple of three.
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
    """Return the position to split a text of at least 2 * `most` letters, at most `most` letters on."""
    if (end := text.rfind("\n", 0, most) + 1) > most // 2:
        return end
    for at in range(most, most // 2, -1):
        if text[at - 1].isspace() and not text[at].isspace():
            return at
    end = len(text[:most].rstrip("."))
    return end or most - most % 3


AROUND = 64
"""Letters on each side of a split whose tokens must agree."""
WINDOW = 1 << 13
TRIED = 16
BETWEEN_WORDS = re.compile(r"(?<=\w)(?= \w)")
BETWEEN_CLASSES = re.compile(r"(?<=\S)(?=\s)|(?<=\s)(?=\S)|(?<=\w)(?=[^\w\s])|(?<=[^\w\s])(?=\w)")


def long_tokens(tokenizer: Tokenizer, pieces: Iterable[str]) -> Iterator["array[int]"]:
    """Yield the tokens of a text that comes in pieces."""
    held = ""
    for piece in pieces:
        held += piece
        while len(held) >= 2 * PIECE:
            cut = split_position(tokenizer, held)
            yield tokenizer.encode_batch([held[:cut]])[0]
            held = held[cut:]
    if held:
        yield tokenizer.encode_batch([held])[0]


def split_position(tokenizer: Tokenizer, text: str) -> int:
    """Return the position to split a text of at least 2 * PIECE letters, at most PIECE letters on."""
    begin, first = PIECE - WINDOW, PIECE
    for pattern in (BETWEEN_WORDS, BETWEEN_CLASSES):
        found = [begin + match.start() for match in pattern.finditer(text[begin:PIECE])][AROUND:]
        places = found[:: -max(1, len(found) // TRIED)][:TRIED]
        for place in places:
            if splits_tokens(tokenizer, text, place):
                return place
        first = places[0] if places and first == PIECE else first
    return first


def splits_tokens(tokenizer: Tokenizer, text: str, place: int) -> bool:
    """True if the tokens around a position are those of its two sides."""
    left, right = text[place - AROUND : place], text[place : place + AROUND]
    both, *sides = tokenizer.encode_batch([left + right, left, right])
    return both == sides[0] + sides[1]
