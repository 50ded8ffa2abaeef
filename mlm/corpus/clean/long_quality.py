"""Numbers for the rules of quality.py, of a text that comes in pieces: those of the whole.

A word of more than a piece counts as one with a letter if its first piece has one.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash
from numpy.typing import NDArray

from mlm.corpus.clean.quality import BULLETS, ELLIPSES, LETTER, STOP_WORDS
from mlm.corpus.read.long_text import at_breaks

AT_ONCE = 1 << 21
"""Different lines that are held at a time, 8 bytes each."""

Pieces = Callable[[], Iterator[str]]


@dataclass
class SpannedLine:
    """A line that goes on over several pieces, stripped of white space at both ends."""

    head: str = ""
    tail: str = ""
    """Its last letters, as many as an ellipsis has."""

    def __post_init__(self) -> None:
        self._all, self._digest, self._spaces = xxhash.xxh3_64(), xxhash.xxh3_64(), ""

    def add(self, part: str) -> None:
        """Append a part of the line, line end and all."""
        part = part if self.head else part.lstrip()
        body = part.rstrip()
        if not body:
            self._spaces = (self._spaces + part)[-3:]
            self._all.update(part.encode())
            return
        self.head = self.head or body[:1]
        self.tail = (self.tail + self._spaces + body)[-3:]
        self._all.update(body.encode())
        self._digest = self._all.copy()
        self._spaces = part[len(body) :]
        self._all.update(self._spaces.encode())

    @property
    def digest(self) -> int:
        return int(self._digest.intdigest())


def lines_of(pieces: Pieces) -> Iterator[list[str] | SpannedLine]:
    """The lines with something on them: stripped, several at a time, or one that spans pieces."""
    spanned: SpannedLine | None = None
    for piece in at_breaks(pieces()):
        parts = piece.splitlines(keepends=True)
        if spanned is not None:
            spanned.add(first := parts.pop(0))
            if first.splitlines()[0] != first:
                if spanned.head:
                    yield spanned
                spanned = None
        if spanned is None and parts and parts[-1].splitlines()[0] == parts[-1]:
            spanned = SpannedLine()
            spanned.add(parts.pop())
        yield [line for line in map(str.strip, parts) if line]
    if spanned is not None and spanned.head:
        yield spanned


class LongMeasures:
    """As Measures."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._words, self._letters, self._with_letter = 0, 0, 0
        self._stop_words, symbols = set[str](), Counter[str]()
        in_word = False  # the piece before ended inside a word
        for piece in at_breaks(pieces()):
            found = piece.split()
            self._letters += sum(map(len, found))
            if in_word and not piece[0].isspace():
                found = found[1:]
            self._words += len(found)
            self._with_letter += sum(word.isalpha() or LETTER.search(word) is not None for word in found)
            self._stop_words |= STOP_WORDS.intersection(map(str.lower, found))
            symbols.update({symbol: piece.count(symbol) for symbol in ("#", *ELLIPSES)})
            in_word = not piece[-1].isspace()
        self._symbols = max(symbols["#"], sum(symbols[e] for e in ELLIPSES))

    @property
    def words(self) -> range:
        return range(self._words)

    @property
    def mean_word_length(self) -> float:
        return self._letters / self._words

    @property
    def symbol_ratio(self) -> float:
        return self._symbols / self._words

    @property
    def alphabetic_words(self) -> float:
        return self._with_letter / self._words

    @property
    def stop_words(self) -> int:
        return len(self._stop_words)

    @cached_property
    def _lines(self) -> Counter[str]:
        count = Counter[str]()
        for found in lines_of(self._pieces):
            some = [(found.head, found.tail)] if isinstance(found, SpannedLine) else [(f, f) for f in found]
            count["all"] += len(some)
            count["bullets"] += sum(head.startswith(BULLETS) for head, _ in some)
            count["ellipses"] += sum(tail.endswith(ELLIPSES) for _, tail in some)
        return count

    @property
    def bullet_lines(self) -> float:
        return self._lines["bullets"] / self._lines["all"]

    @property
    def ellipsis_lines(self) -> float:
        return self._lines["ellipses"] / self._lines["all"]

    @property
    def duplicate_lines(self) -> float:
        """By digests of 64 bits: a share of the lines at a time."""
        shares = -(-self._lines["all"] // AT_ONCE)
        return 1 - sum(map(self._different, range(shares), [shares] * shares)) / self._lines["all"]

    def _different(self, share: int, shares: int) -> int:
        """Different lines whose digest leaves the remainder `share`."""
        digests = (
            np.array([found.digest], dtype=np.uint64)
            if isinstance(found, SpannedLine)
            else np.array([xxhash.xxh3_64_intdigest(line.encode()) for line in found], dtype=np.uint64)
            for found in lines_of(self._pieces)
        )
        mine: list[NDArray[np.uint64]] = [d[d % np.uint64(shares) == share] for d in digests]
        return len(np.unique(np.concatenate(mine)))
