r"""MinHash signatures of documents: shingles and band keys.

Shingles are the set of 64-bit hashes of a document's n-grams. Text is case-folded first, with a space for
every run of anything but letters, marks, digits and `_` (`\w` of Unicode TS 18, annex C, without its join
controls). A document shorter than one n-gram has one shingle, its normalised text; one without words has
none. Scripts without spaces between words are better compared by characters.

A signature has bands * rows slots. Two documents agree on a slot with probability J, the Jaccard similarity
of their shingles, so on some band with probability 1 - (1 - J**rows)**bands (Leskovec, Rajaraman and Ullman,
Mining of Massive Datasets, section 3.4). The slots are rensa's R-MinHash, after arXiv:1704.04370.

Shapes: T units (words, or characters of the normalised text) of D documents laid end to end.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal
from unicodedata import category

import numpy as np
import xxhash
from numpy.typing import NDArray
from rensa import RMinHash

from mlm.corpus.config import DedupConfig
from mlm.corpus.pieces import pieces_of
from mlm.util.splitmix import mix

Hashes = NDArray[np.uint64]
Numbers = NDArray[np.int64]
Unit = Literal["word", "character"]

SPACE = ord(" ")
BLOCK = 1 << 22  # bytes of text hashed at a time, which bounds memory
VECTORISED = 32  # bytes of the longest word that NumPy hashes; longer ones go to xxhash one at a time

FOLD = 0x9E3779B97F4A7C15  # 5 modulo 8, so no two of its first 8 powers agree in more than 4 low bits
PAD = 0xD1B54A32D192ED03  # pads a document shorter than one n-gram; words hash to it only by chance

ASCII = bytes(ord(chr(i).lower()) if chr(i).isalnum() or chr(i) == "_" else SPACE for i in range(128))
ASCII_OR_MORE = ASCII + bytes(range(128, 256))


def shingles(text: str, *, ngram: int, unit: Unit) -> Hashes:
    """Return the set of n-grams of one document, sorted."""
    flat, _ = flat_shingles([text], ngram=ngram, unit=unit)
    flat.sort()
    return flat[np.concatenate(([True], flat[1:] != flat[:-1]))] if len(flat) else flat


def flat_shingles(texts: Sequence[str], *, ngram: int, unit: Unit) -> tuple[Hashes, Numbers]:
    """Return the n-grams of each document in text order, with repetitions.

    Returns hashes [T'] and offsets [D + 1]; document d has hashes[offsets[d]:offsets[d + 1]].
    """
    normal = [normalise(text) for text in texts]
    units, counts = hash_texts(normal) if unit == "word" else _characters(normal)
    return _ngrams(units, counts, ngram)


def shingles_in_parts(text: str, *, ngram: int, unit: Unit) -> Iterator[Hashes]:
    """Yield the n-grams of a text in parts, with repetitions, which bounds the memory of a long one."""
    space, pending, is_short = np.array([SPACE], np.uint64), np.empty(0, np.uint64), True
    mix(space)
    for piece in pieces_of(text):  # pieces end at white space: no word is split
        units, _ = hash_texts([normalise(piece)]) if unit == "word" else _characters([normalise(piece)])
        separator = space[: unit == "character" and len(pending) > 0 and len(units) > 0]
        pending = np.concatenate([pending, separator, units])
        if len(pending) >= ngram:
            is_short = False
            yield _ngrams(pending, np.array([len(pending)]), ngram)[0]
            pending = pending[len(pending) - ngram + 1 :]
    if is_short:
        yield _ngrams(pending, np.array([len(pending)]), ngram)[0]


def normalise(text: str) -> bytes:
    """Return case-folded text as UTF-8, with spaces between words."""
    if text.isascii():
        return text.encode("ascii").translate(ASCII_OR_MORE)
    # Lone surrogates, which JSON can spell, are not letters and become spaces.
    codes = np.frombuffer(text.casefold().encode("utf-32-le", "surrogatepass"), "<u4")
    return np.where(_in_words()[codes], codes, SPACE).astype("<u4").tobytes().decode("utf-32-le").encode()


@lru_cache(maxsize=1)
def _in_words() -> NDArray[np.bool_]:
    """Return a mask of the code points that are part of words: bool [0x110000]."""
    characters = map(chr, range(0x110000))
    return np.fromiter((c.isalnum() or c == "_" or category(c)[0] == "M" for c in characters), bool, 0x110000)


def hash_texts(normal: Sequence[bytes]) -> tuple[Hashes, Numbers]:
    """Return the hash of each word of normalised texts [T], and the words per text [D]."""
    ends = np.cumsum([len(text) + 1 for text in normal], dtype=np.int64)  # of documents, in bytes
    text, words_before = b" ".join([*normal, b""]), np.zeros(len(ends), np.int64)
    hashes = [np.empty(0, np.uint64)]
    begin = 0
    while begin < len(text):
        end = text.find(b" ", begin + BLOCK) + 1 or len(text)  # no word is split
        starts, words = hash_words(text[begin:end])
        hashes.append(words)
        words_before += np.searchsorted(starts, ends - begin)
        begin = end
    return np.concatenate(hashes), np.diff(words_before, prepend=0)


def hash_words(text: bytes) -> tuple[Numbers, Hashes]:
    """Return the start and 64-bit hash, a function of its bytes alone, of each word of normalised text."""
    padded = b" " + text + b" " * 8
    inside = np.frombuffer(padded, np.uint8)[: len(text) + 2] != SPACE
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    eights: Hashes = np.ndarray(len(text) + 1, "<u8", padded, offset=1, strides=(1,))  # [i]: bytes i to i + 8
    hashes = eights[starts] & _LOW_BYTES[np.minimum(lengths, 8)]
    mix(hashes)
    for begin in range(8, VECTORISED, 8):
        long_words = np.flatnonzero((lengths > begin) & (lengths <= VECTORISED))
        if not len(long_words):
            break
        block = eights[starts[long_words] + begin] & _LOW_BYTES[np.minimum(lengths[long_words] - begin, 8)]
        block ^= hashes[long_words]
        mix(block)
        hashes[long_words] = block
    for i in np.flatnonzero(lengths > VECTORISED):
        hashes[i] = xxhash.xxh3_64_intdigest(text[starts[i] : starts[i] + lengths[i]])
    return starts, hashes


_LOW_BYTES: Hashes = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)  # masks of the first n bytes


def _characters(normal: Sequence[bytes]) -> tuple[Hashes, Numbers]:
    """Return the hash of each character of text with single spaces [T], and characters per document [D]."""
    texts = [" ".join(text.decode().split()) for text in normal]
    units = np.frombuffer("".join(texts).encode("utf-32-le"), "<u4").astype(np.uint64)
    mix(units)
    return units, np.array([len(text) for text in texts], np.int64)


def _ngrams(units: Hashes, counts: Numbers, n: int) -> tuple[Hashes, Numbers]:
    """Return the hash of each n neighbouring units within one document [T'], and offsets [D + 1]."""
    ends = np.cumsum(counts)
    short_documents = np.flatnonzero((counts > 0) & (counts < n))
    if len(short_documents):
        missing = n - counts[short_documents]
        units = np.insert(units, np.repeat(ends[short_documents], missing), np.uint64(PAD))
        counts = counts.copy()
        counts[short_documents] = n
        ends = np.cumsum(counts)
    offsets = np.concatenate(([0], np.cumsum(np.maximum(counts - n + 1, 0))))
    if not offsets[-1]:
        return np.empty(0, np.uint64), offsets
    hashes = ngram_hashes(units, n)
    mix(hashes)
    if len(counts) == 1:
        return hashes, offsets
    is_inside = np.ones(len(units), np.bool_)
    for k in range(1, n):  # n-grams that begin less than n units before a document's end reach into the next
        is_inside[ends[ends >= k] - k] = False
    return hashes[is_inside[: len(hashes)]], offsets


def ngram_hashes(units: Hashes, n: int) -> Hashes:
    """Return a hash of every n neighbours, a polynomial in FOLD modulo 2^64: [w] to [max(0, w - n + 1)]."""
    total = max(0, len(units) - n + 1)
    hashes = units[:total].copy()
    for k in range(1, n):
        hashes *= np.uint64(FOLD)
        hashes += units[k : total + k]
    return hashes


Slots = NDArray[np.uint32]

NO_KEY = 0
"""Key in every band of a document without shingles, which matches no other."""
SEED = 1
# Larger batches would start rensa's threads (from 128 sets, or about 10^5 shingles), but a worker has one
# core. Batches that fit the processor's caches are also hashed twice as fast.
BATCH_DOCUMENTS = 64
BATCH_CHARACTERS = {"word": 1 << 18, "character": 1 << 16}
_MULTIPLIER = np.uint64(0xFF51AFD7ED558CCD)


class MinHasher:
    """Signatures of documents under one configuration.

    A document's signature is a function of its set of shingles and the configuration, not of its neighbours,
    the machine or the number of threads.
    """

    def __init__(self, config: DedupConfig) -> None:
        self.config, self.width = config, config.bands * config.rows

    def keys(self, texts: Sequence[str]) -> Hashes:
        """Return one key per band of each text: uint64 [n, bands], NO_KEY for a text without words.

        Equal keys mean the same band with equal slots, up to a chance of 2^-64 per pair of documents.
        """
        ngram, unit, bands = self.config.ngram, self.config.unit, self.config.bands
        keys = np.full((len(texts), bands), NO_KEY, np.uint64)
        begin = 0
        while begin < len(texts):
            end, characters = begin, 0
            while end < min(len(texts), begin + BATCH_DOCUMENTS) and characters < BATCH_CHARACTERS[unit]:
                characters += len(texts[end])
                end += 1
            if end - begin == 1:
                # Slots are minima over a set: the signature of a union is the minimum of signatures.
                parts = [
                    self.slots(part, np.array([0, len(part)]))
                    for part in shingles_in_parts(texts[begin], ngram=ngram, unit=unit)
                    if len(part)
                ]
                slots = np.minimum.reduce(parts) if parts else np.empty((0, self.width), np.uint32)
                full = np.arange(len(slots))
            else:
                flat, offsets = flat_shingles(texts[begin:end], ngram=ngram, unit=unit)
                full = np.flatnonzero(np.diff(offsets))
                slots = self.slots(flat, offsets)[full]
            keys[begin + full] = band_keys(slots, bands)
            begin = end
        return keys

    def slots(self, flat: Hashes, offsets: Numbers) -> Slots:
        """Return signatures [n, bands * rows] of the sets of shingles flat[offsets[i]:offsets[i + 1]]."""
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(
            np.ascontiguousarray(flat), offsets.astype(np.uint64), num_perm=self.width, seed=SEED
        )
        return np.array(matrix.to_rows(), np.uint32).reshape(-1, self.width)


def band_keys(slots: Slots, bands: int) -> Hashes:
    """Return a strong 64-bit hash of each band of each signature: [n, bands * rows] to [n, bands]."""
    bands_of = slots.reshape(len(slots), bands, slots.shape[1] // bands)
    keys = np.broadcast_to(np.arange(1, bands + 1, dtype=np.uint64), (len(slots), bands)).copy()
    for row in range(bands_of.shape[2]):
        keys ^= bands_of[:, :, row]
        keys *= _MULTIPLIER
        keys ^= keys >> np.uint64(32)
    keys *= _MULTIPLIER
    keys ^= keys >> np.uint64(29)
    keys[keys == NO_KEY] = 1
    return keys
