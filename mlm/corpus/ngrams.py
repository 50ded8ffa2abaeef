"""Exact search for n-grams of evaluation texts in a document, at the speed of splitting it into words.

A word is a run of letters and digits, casefolded, in Unicode form NFKC and without invisible code points
(soft hyphens, zero-width spaces and joiners, variation selectors). So punctuation, case, line breaks,
full-width letters and the marks of WikiText's tokenisation (` @-@ `, `@,@`, spaces before commas) make no
difference. This is for matching alone: the remaining text keeps its letters.

A word of an evaluation text is a number here; a word that is in none is 0, and no n-gram with one matches.
N-grams are looked up by a 64-bit hash, and hits are compared word by word.

Shapes: w words of a text, e words of all evaluation texts with a 0 after each run, n words of an n-gram.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from mlm.corpus.minhash import Hashes, ngram_hashes
from mlm.corpus.pieces import pieces_of
from mlm.util.splitmix import mix

Words = NDArray[np.int32]
Ints = NDArray[np.int64]

WORD = re.compile(r"[^\W_]+")
SEPARATORS = re.compile(r"[^\w\x00-\x7f]+")  # non-ASCII, and neither letter nor digit
KEPT = bytes(c if c >= 128 or chr(c).isalnum() else 32 for c in range(256))
SPACES = re.compile(r"\s+|\S+")
IGNORABLE = re.compile(  # Default_Ignorable_Code_Point of Unicode 16
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]+"
)
UNKNOWN = re.compile(r"<unk>|@@UNKNOWN@@", re.IGNORECASE)  # a lost word: nothing matches across it
SPLIT_NEGATION = re.compile(r"(?<=\w)\s+(?=n['’]t\b)", re.IGNORECASE)  # "did n't" of the Penn Treebank
BLOCK = 1 << 15  # words processed at a time: their hashes stay in a core's cache


def words(text: str) -> list[bytes]:
    """Return the words of a text, in UTF-8."""
    folded = plain_form(text).casefold()
    if not folded.isascii():
        folded = SEPARATORS.sub(" ", folded)
    return folded.encode().translate(KEPT).split()


def plain_form(text: str) -> str:
    """Return a text in the form that is compared."""
    if text.isascii():
        return text
    return unicodedata.normalize("NFKC", IGNORABLE.sub("", text))  # returns at once what is in this form


def spans(text: str) -> tuple[Ints, Ints]:
    """Return begin and end of each of `words(text)` in the text: letters, int64 [w] each.

    If letters are composed, a word extends between two white spaces.
    """
    begins, ends, done = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    for piece in pieces_of(text):
        begin, end = _spans(piece)
        begins.append(begin + done)
        ends.append(end + done)
        done += len(piece)
    return np.concatenate(begins), np.concatenate(ends)


def _spans(text: str) -> tuple[Ints, Ints]:
    units: list[str] | str = text
    folded = text.casefold()
    if not text.isascii() and (IGNORABLE.search(text) or not unicodedata.is_normalized("NFKC", text)):
        units = [unit for piece in SPACES.findall(text) for unit in units_of(piece)]
        folded = "".join(plain_form(unit).casefold() for unit in units)
    found = np.array([match.span() for match in WORD.finditer(folded)], dtype=np.int64).reshape(-1, 2)
    begin, end = found[:, 0], found[:, 1]
    if len(folded) == len(text) and units is text:  # casefolding never shortens, so no letter grew
        return begin, end
    after = np.cumsum([len(unit) for unit in units])
    grown = [len(plain_form(unit).casefold()) for unit in units]
    unit_of = np.repeat(np.arange(len(units)), grown)
    return np.append(0, after)[unit_of[begin]], after[unit_of[end - 1]]


def units_of(piece: str) -> list[str]:
    """Split a piece without white space into parts that normalise separately: its letters, if they do."""
    if piece.isascii() or "".join(map(plain_form, piece)) == plain_form(piece):
        return list(piece)
    return [piece]


def runs(text: str) -> Iterator[list[bytes]]:
    """Yield runs of words of an evaluation text, split where a word was replaced by `<unk>`."""
    for part in UNKNOWN.split(SPLIT_NEGATION.sub("", text)):
        if found := words(part):
            yield found


@dataclass(frozen=True, eq=False)
class Hits:
    """N-grams of a text that occur in evaluation texts, by position in the text. int64 [hits] each."""

    begin: Ints
    """First word."""
    end: Ints
    """One past the last word."""
    text: Ints
    """Number of the first evaluation text that holds the n-gram."""


class NGrams:
    """The n-grams of evaluation texts.

    If a text has no run of `ngram` words, its longest is matched whole if it has at least `min_ngram`.

    Attributes:
        num_ngrams  int64 [texts]   distinct n-grams of each text that no earlier text holds
        covered     bool [texts]    True if any run of the text is long enough
    """

    def __init__(self, texts: Sequence[str], *, ngram: int, min_ngram: int) -> None:
        self._numbers: dict[bytes, int] = {}
        flat, starts, lengths, owners = list[int](), list[int](), list[int](), list[int]()
        self.covered = np.zeros(len(texts), dtype=bool)
        for number, text in enumerate(texts):
            found = list(runs(text))
            chosen = [run for run in found if len(run) >= ngram]
            if not chosen and found and len(longest := max(found, key=len)) >= min_ngram:
                chosen = [longest]
            self.covered[number] = bool(chosen)
            for run in chosen:
                starts.append(len(flat))
                lengths.append(len(run))
                owners.append(number)
                flat += [self._numbers.setdefault(word, len(self._numbers) + 1) for word in run]
                flat.append(0)
        self._words = np.array(flat, dtype=np.int32)  # [e]
        self._starts, self._owners = np.array(starts, dtype=np.int64), np.array(owners, dtype=np.int64)
        self._keys = mix(np.arange(1, len(self._numbers) + 2, dtype=np.uint64))  # hash of each word
        sizes = np.array(lengths, dtype=np.int64)
        self._tables = [self._table(n, sizes, ngram) for n in sorted({*np.minimum(sizes, ngram).tolist()})]
        self.num_ngrams = np.zeros(len(texts), dtype=np.int64)
        for table in self._tables:
            np.add.at(self.num_ngrams, self._text_of(table.places), 1)

    def find(self, text: str) -> Hits | None:
        """Find the known n-grams of a text, ordered by first word and length; None if there is none."""
        numbers = np.concatenate([np.empty(0, np.int32), *map(self._numbers_of, pieces_of(text))])
        hits = [hit for table in self._tables for hit in self._find(table, numbers)]
        if not hits:
            return None
        begin, end, place = (np.concatenate(part) for part in zip(*hits, strict=True))
        order = np.lexsort((end, begin))
        return Hits(begin[order], end[order], self._text_of(place[order]))

    def _numbers_of(self, piece: str) -> Words:
        """Return the number of each word: i32 [w]."""
        listed = words(piece)
        return np.fromiter(map(self._numbers.get, listed, repeat(0)), dtype=np.int32, count=len(listed))

    def _find(self, table: "Table", numbers: Words) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Yield (first word, end, position in the evaluation words) of known n-grams of one length."""
        n = table.ngram
        for start in range(0, len(numbers) - n + 1, BLOCK):
            hashes = ngram_hashes(self._keys[numbers[start : start + BLOCK + n - 1]], n)
            at = np.minimum(np.searchsorted(table.hashes, hashes), len(table.hashes) - 1)
            candidates = np.flatnonzero(table.hashes[at] == hashes)
            begin, place = start + candidates, table.places[at[candidates]]
            same = (windows(self._words, place, n) == windows(numbers, begin, n)).all(axis=1)
            if same.any():
                yield begin[same], begin[same] + n, place[same]

    def _table(self, n: int, sizes: Ints, ngram: int) -> "Table":
        """Index the n-grams of length n: of longer runs if n is `ngram`, else the runs of that length."""
        mine = sizes >= n if n == ngram else sizes == n
        count = sizes[mine] - n + 1
        first = np.repeat(self._starts[mine] - (np.cumsum(count) - count), count)
        places = first + np.arange(count.sum())
        hashes, firsts = np.unique(ngram_hashes(self._keys[self._words], n)[places], return_index=True)
        return Table(n, hashes, places[firsts])

    def _text_of(self, places: Ints) -> Ints:
        """Return the evaluation text at a position in the evaluation words."""
        return self._owners[np.searchsorted(self._starts, places, side="right") - 1]


@dataclass(frozen=True, eq=False)
class Table:
    """Distinct n-grams of one length, by hash. Of two that share a hash (1 in 2^64) the first is known."""

    ngram: int
    hashes: Hashes
    """Sorted: [m]."""
    places: Ints
    """First position of each n-gram in the evaluation words: [m]."""


def windows(values: Words, begin: Ints, n: int) -> Words:
    """Return values[b : b + n] for every b in `begin`: [k, n]."""
    return values[begin[:, None] + np.arange(n)]
