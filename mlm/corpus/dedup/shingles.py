"""Shingles: the n-grams of a document as a set of 64-bit hashes.

Text is normalised first: case-folded, and every run of anything but letters, marks, digits and `_` becomes a
space (`\\w` of Unicode TS 18, annex C, without its join controls). A document shorter than one n-gram has one
shingle, its whole normalised text; a document without words has none. Text in a script that puts no spaces
between words is better compared by characters.

Shapes: T units (words, or characters of the normalised text) of D documents laid end to end.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from mlm.corpus.read.long_text import at_breaks

Hashes = NDArray[np.uint64]
Numbers = NDArray[np.int64]
Unit = Literal["word", "character"]

SPACE = ord(" ")
BLOCK = 1 << 22  # bytes of text hashed at a time: bounds what a long document needs besides its hashes
VECTORISED = 32  # bytes of the longest word that is hashed by NumPy; longer ones go to xxhash one at a time

FOLD = 0x9E3779B97F4A7C15  # 5 modulo 8, so no two of its first 8 powers agree in more than 4 low bits
PAD = 0xD1B54A32D192ED03  # fills up a document shorter than one n-gram; no word hashes to it but by chance

ASCII = bytes(ord(chr(i).lower()) if chr(i).isalnum() or chr(i) == "_" else SPACE for i in range(128))
ASCII_OR_MORE = ASCII + bytes(range(128, 256))


def shingles(text: str, *, ngram: int, unit: Unit) -> Hashes:
    """The set of n-grams of one document: sorted, each once."""
    flat, _ = flat_shingles([text], ngram=ngram, unit=unit)
    flat.sort()
    return flat[np.concatenate(([True], flat[1:] != flat[:-1]))] if len(flat) else flat


def flat_shingles(texts: Sequence[str], *, ngram: int, unit: Unit) -> tuple[Hashes, Numbers]:
    """The n-grams of each document in text order, repetitions and all.

    Returns hashes [T'] and offsets [D + 1]: those of document d are hashes[offsets[d]:offsets[d + 1]].
    """
    normal = [normalise(text) for text in texts]
    units, counts = _words(normal) if unit == "word" else _characters(normal)
    return _ngrams(units, counts, ngram)


def long_shingles(pieces: Iterable[str], *, ngram: int, unit: Unit) -> Iterator[Hashes]:
    """The n-grams of a text that comes in pieces, a piece at a time: together those of `flat_shingles`.

    A word of more than a piece is several here.
    """
    before, seen, spaced = np.empty(0, np.uint64), 0, True
    for piece in at_breaks(iter(pieces)):
        normal = normalise(piece)
        if unit == "word":
            units, _ = _words([normal])
        else:
            text = " ".join(normal.decode().split())
            # white space between two letters is one space, wherever the pieces are cut
            first = " " if text and seen and (spaced or normal[:1] == b" ") else ""
            spaced = normal[-1:] == b" " if text else spaced or bool(normal)
            units, _ = _hash_characters([first + text])
        seen += len(units)
        units = np.concatenate((before, units))
        if seen >= ngram and len(units) >= ngram:
            yield _ngrams(units, np.array([len(units)]), ngram)[0]
        before = units[max(0, len(units) - ngram + 1) :]
    if 0 < seen < ngram:
        yield _ngrams(before, np.array([len(before)]), ngram)[0]


def normalise(text: str) -> bytes:
    """Case-folded text as UTF-8, with a space in place of whatever stands between words."""
    if text.isascii():
        return text.encode("ascii").translate(ASCII_OR_MORE)
    # JSON can spell lone surrogates; they are no letters and end up as spaces.
    codes = np.frombuffer(text.casefold().encode("utf-32-le", "surrogatepass"), "<u4")
    return np.where(_in_words()[codes], codes, SPACE).astype("<u4").tobytes().decode("utf-32-le").encode()


@lru_cache(maxsize=1)
def _in_words() -> NDArray[np.bool_]:
    """Whether a code point is part of a word: bool [0x110000]. Made when the first non-ASCII text comes."""
    from unicodedata import category

    every = map(chr, range(0x110000))
    return np.fromiter((c.isalnum() or c == "_" or category(c)[0] == "M" for c in every), bool, 0x110000)


def _words(normal: Sequence[bytes]) -> tuple[Hashes, Numbers]:
    """A hash of each word [T], and the number of words of each document [D]."""
    ends = np.cumsum([len(text) + 1 for text in normal], dtype=np.int64)  # of documents, in bytes
    text = b" ".join([*normal, b""])
    hashes, starts = [], []
    for begin, block in _blocks(text):
        found, words = _hash_words(block)
        hashes.append(words)
        starts.append(found + begin)
    before = np.searchsorted(_joined(starts, np.int64), ends)
    return _joined(hashes, np.uint64), np.diff(before, prepend=0)


def _blocks(text: bytes) -> Iterator[tuple[int, bytes]]:
    """Pieces of about BLOCK bytes with their offsets; no word is cut."""
    begin = 0
    while begin < len(text):
        end = text.find(b" ", begin + BLOCK) + 1 or len(text)
        yield begin, text[begin:end]
        begin = end


def _hash_words(text: bytes) -> tuple[Numbers, Hashes]:
    """Where each word of normalised text begins, and its 64-bit hash, a function of its bytes alone."""
    padded = b" " + text + b" " * 8
    inside = np.frombuffer(padded, np.uint8)[: len(text) + 2] != SPACE
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    eights: Hashes = np.ndarray(len(text) + 1, "<u8", padded, offset=1, strides=(1,))  # [i]: bytes i to i + 8
    hashes = eights[starts] & _LOW_BYTES[np.minimum(lengths, 8)]
    _mix(hashes)
    for done in range(8, VECTORISED, 8):
        longer = np.flatnonzero((lengths > done) & (lengths <= VECTORISED))
        if not len(longer):
            break
        block = eights[starts[longer] + done] & _LOW_BYTES[np.minimum(lengths[longer] - done, 8)]
        block ^= hashes[longer]
        _mix(block)
        hashes[longer] = block
    for i in np.flatnonzero(lengths > VECTORISED):
        hashes[i] = xxhash.xxh3_64_intdigest(text[starts[i] : starts[i] + lengths[i]])
    return starts, hashes


_LOW_BYTES: Hashes = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)  # masks of the first n bytes


def _characters(normal: Sequence[bytes]) -> tuple[Hashes, Numbers]:
    """A hash of each character of text with single spaces [T], and their number per document [D]."""
    return _hash_characters([" ".join(text.decode().split()) for text in normal])


def _hash_characters(texts: Sequence[str]) -> tuple[Hashes, Numbers]:
    """A hash of each character [T], and their number per document [D]."""
    units = np.frombuffer("".join(texts).encode("utf-32-le"), "<u4").astype(np.uint64)
    _mix(units)
    return units, np.array([len(text) for text in texts], np.int64)


def _ngrams(units: Hashes, counts: Numbers, n: int) -> tuple[Hashes, Numbers]:
    """Hashes of n neighbouring units within one document [T'], and offsets [D + 1]."""
    ends = np.cumsum(counts)
    short = np.flatnonzero((counts > 0) & (counts < n))
    if len(short):
        missing = n - counts[short]
        units = np.insert(units, np.repeat(ends[short], missing), np.uint64(PAD))
        counts = counts.copy()
        counts[short] = n
        ends = np.cumsum(counts)
    offsets = np.concatenate(([0], np.cumsum(np.maximum(counts - n + 1, 0))))
    if not offsets[-1]:
        return np.empty(0, np.uint64), offsets
    total = len(units) - n + 1
    hashes = units[:total].copy()
    for k in range(1, n):  # polynomial in FOLD, modulo 2^64
        hashes *= np.uint64(FOLD)
        hashes += units[k : total + k]
    _mix(hashes)
    if len(counts) == 1:
        return hashes, offsets
    whole = np.ones(len(units), np.bool_)
    for k in range(1, n):  # those that begin less than n units before a document's end run into the next
        whole[ends[ends >= k] - k] = False
    return hashes[whole[:total]], offsets


def _mix(x: Hashes) -> None:
    """Spread each number over its 64 bits, one to one, in place (Steele, Lea and Flood 2014: SplitMix64)."""
    y = x >> np.uint64(30)
    x ^= y
    x *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(x, np.uint64(27), out=y)
    x ^= y
    x *= np.uint64(0x94D049BB133111EB)
    np.right_shift(x, np.uint64(31), out=y)
    x ^= y


def _joined(pieces: list[NDArray], dtype: type) -> NDArray:
    """The pieces end to end, also when there are none."""
    return np.concatenate(pieces) if pieces else np.empty(0, dtype)
