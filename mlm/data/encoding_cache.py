"""Cache of the token ids of words: text is encoded by lookup.

A tokenizer splits text into words and encodes each alone, so most of its work repeats. Here a text is split
into chunks, which end where every tokenizer of `is_cacheable` ends a word, whatever follows, so that its
tokens are its chunks' tokens. The library encodes new chunks.

A chunk ends in ASCII text alone: between a visible character and a space; between a letter or digit and a
sign other than an apostrophe (which may begin a contraction), or a line end; and after a single line end
before a letter. The patterns of GPT-2, GPT-4 and their heirs end a match there and look no further, and
BERT's splits at spaces and signs.

The chunks of a batch are found and looked up together, in arrays. A key is not a hash but the chunk itself:
up to 15 bytes of UTF-8, and their number. Longer chunks are keys of a dictionary.

Shapes: n chunks of the texts of a batch, which are concatenated in UTF-8, with the byte END after each.
"""

import re
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm.util.splitmix import GOLDEN, Bits, mix

Numbers = NDArray[np.int64]
TokenSpan = tuple[int, int]
"""Position of a chunk's first token in the cache, and number of its tokens."""

END = b"\xff"
"""Byte after each text, which UTF-8 never contains: a chunk without tokens."""
SIGN = r"!-&(-/:-@\[-`{-~"
LETTER, DIGIT, MARK, QUOTE, SPACE, LINE, TEXT = range(1, 8)
MEMBERS = {LETTER: "[A-Za-z]", DIGIT: "[0-9]", MARK: f"[{SIGN}]", QUOTE: "'", SPACE: " ", LINE: "\n"}
"""Classes of bytes, with TEXT for END; 0 for all others."""
CLASSES = bytes(
    next((number for number, members in MEMBERS.items() if re.fullmatch(members, chr(byte))), 0)
    for byte in range(255)
) + bytes([TEXT])
ALWAYS, AFTER_VISIBLE = 1, 2
EDGES = bytearray(256)
"""8 * class + class of two bytes -> ALWAYS or AFTER_VISIBLE if a chunk ends between them, else 0."""
for _class in range(8):
    EDGES[8 * _class + TEXT] = EDGES[8 * TEXT + _class] = ALWAYS
for _class in (LETTER, DIGIT, MARK, QUOTE):
    EDGES[8 * _class + SPACE] = ALWAYS
for _class in (LETTER, DIGIT):
    EDGES[8 * _class + MARK] = EDGES[8 * _class + LINE] = ALWAYS
EDGES[8 * LINE + LETTER] = AFTER_VISIBLE
WORD = re.compile(" [A-Za-z]+")
CROSSING = re.compile(rf"[ \n]|[A-Za-z0-9][{SIGN}]")
"""Possible end of a chunk in an added token."""
KEY_BYTES = 15
LENGTH, SIZE = 64, 1 << 18
"""Letters of the longest cached chunk, and cached chunks, about 40 MB, after which the cache is cleared."""
ROWS_BITS = 19
"""The table has 1 << ROWS_BITS rows and is at most half full."""
BATCH = 1 << 18
"""Letters of texts that are encoded together, so that the arrays fit a core's cache."""
_LOW_BYTES: Bits = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)  # masks of the first n bytes

_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEGIN, _END = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERNS = {
    _GPT4.replace("DIGITS", r"\p{N}{1,3}"),  # GPT-4, Llama 3
    _GPT4.replace("DIGITS", r"\p{N}"),  # Qwen
    rf"{_BEGIN}{_UPPER}*{_LOWER}+{_END}|{_BEGIN}{_UPPER}+{_LOWER}*{_END}|\p{{N}}{{1,3}}"  # GPT-4o, Llama 4
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Word patterns that never match across the end of a chunk."""
BERT = {"type": "BertPreTokenizer"}


class EncodingCache:
    """Encoding of texts chunk by chunk. `encode` is the library's, of many texts: a uint32 array each."""

    def __init__(self, encode: Callable[[list[str]], "list[array[int]]"]) -> None:
        self._encode = encode
        self._clear()

    def _clear(self) -> None:
        self._table = np.zeros((1 << ROWS_BITS, 4), np.uint64)
        """Rows of a key, two numbers, and a span: each in the first free row from its hash on."""
        self._long = dict[str, TokenSpan]()
        self._size, self._ids = 0, array("I")
        self._insert([END], [(0, 0)])

    def encode_batch(self, texts: Sequence[str]) -> "list[array[int]]":
        encoded, begin, letters = list["array[int]"](), 0, 0
        for end, text in enumerate(texts, 1):
            letters += len(text)
            if letters >= BATCH or end == len(texts):
                encoded += self._encode_some(texts[begin:end])
                begin, letters = end, 0
        return encoded

    def _encode_some(self, texts: Sequence[str]) -> "list[array[int]]":
        if self._size >= SIZE:
            self._clear()
        content = END.join([*(text.encode() for text in texts), b""])
        starts = chunk_starts(content)
        ends = np.append(starts[1:], len(content))
        low, high = chunk_keys(content, starts, ends)
        entries = np.take(self._table, self._rows(low, high), axis=0)
        begins, counts = entries[:, 2:].astype(np.int64).T
        missing = np.flatnonzero((entries[:, 1] != high) | (ends - starts > KEY_BYTES))
        num_kept = len(self._ids)
        if len(missing):
            spans = zip(starts[missing].tolist(), ends[missing].tolist(), strict=True)
            places, num_kept = self._places([content[begin:end].decode() for begin, end in spans])
            begins[missing], counts[missing] = np.array(places).T
        ends_of_chunks = np.cumsum(counts)
        positions = np.arange(counts.sum()) + np.repeat(begins - (ends_of_chunks - counts), counts)
        ids = np.frombuffer(self._ids, np.uint32)[positions] if len(positions) else np.empty(0, np.uint32)
        del self._ids[num_kept:]
        is_end = np.frombuffer(content, np.uint8)[starts] == END[0]
        bounds = [0, *ends_of_chunks[is_end].tolist()]
        return [array("I", ids[begin:end].tobytes()) for begin, end in pairwise(bounds)]

    def _places(self, chunks: list[str]) -> tuple[list[TokenSpan], int]:
        """Return the spans of chunks that the table lacks, and the number of tokens to keep.

        New chunks are encoded, and cached if they are short.
        """
        new_spans, short_chunks = dict[str, TokenSpan](), dict[bytes, TokenSpan]()
        encoded = dict[str, bytes]()
        if new_chunks := set(chunks) - self._long.keys():
            # The library takes half as long for one text of words. Commas between them are chunks of one
            # token each, which no word contains; otherwise, as for a vocabulary without a comma, the counts
            # differ and the words are encoded singly.
            words = [chunk for chunk in new_chunks if WORD.fullmatch(chunk)]
            joined, comma = map(np.asarray, self._encode([",".join(words), ","]))
            ends = np.append(np.flatnonzero(joined == comma[0]), len(joined)) if len(comma) == 1 else comma
            if len(ends) != len(words):
                words, ends = [], ends[:0]
            spans = zip(words, np.append(0, ends + 1).tolist(), ends.tolist(), strict=False)
            encoded = {word: joined[begin:end].tobytes() for word, begin, end in spans}
            other_chunks = [chunk for chunk in new_chunks if chunk not in encoded]
            encoded |= zip(other_chunks, (ids.tobytes() for ids in self._encode(other_chunks)), strict=True)
        num_kept = len(self._ids)
        for chunk, ids in sorted(encoded.items(), key=lambda item: len(item[0]) > LENGTH):
            new_spans[chunk] = len(self._ids), len(ids) // 4
            self._ids.frombytes(ids)
            if len(chunk) > LENGTH or self._size + len(short_chunks) >= SIZE:
                continue
            num_kept = len(self._ids)
            if len(content := chunk.encode()) <= KEY_BYTES:
                short_chunks[content] = new_spans[chunk]
            else:
                self._long[chunk] = new_spans[chunk]
                self._size += 1
        places = [new_spans[chunk] if chunk in new_spans else self._long[chunk] for chunk in chunks]
        self._insert(list(short_chunks), list(short_chunks.values()))
        return places, num_kept

    def _insert(self, chunks: list[bytes], places: list[TokenSpan]) -> None:
        """Insert new chunks of up to KEY_BYTES into the table."""
        lengths = np.array([len(chunk) for chunk in chunks], np.int64)
        ends = np.cumsum(lengths)
        keys = chunk_keys(b"".join(chunks), ends - lengths, ends)
        entries = np.column_stack((*keys, np.array(places, np.uint64).reshape(-1, 2)))
        while len(entries):
            rows, first = np.unique(self._rows(entries[:, 0], entries[:, 1]), return_index=True)
            self._table[rows] = entries[first]
            entries = np.delete(entries, first, axis=0)  # other entries of a row that is now taken
        self._size += len(chunks)

    def _rows(self, low: Bits, high: Bits) -> Numbers:
        """Return the row of each key, or the free row for it: int64 [n]."""
        rows = (mix(low + high * np.uint64(GOLDEN)) >> np.uint64(64 - ROWS_BITS)).astype(np.int64)
        pending = np.arange(len(rows))
        while len(pending):
            entries = np.take(self._table, rows[pending], axis=0)
            is_other = (entries[:, 0] != low[pending]) | (entries[:, 1] != high[pending])
            pending = pending[is_other & (entries[:, 1] != 0)]
            rows[pending] = (rows[pending] + 1) % len(self._table)
        return rows


def chunk_starts(content: bytes) -> Numbers:
    """Return the starts of the chunks: int64 [n]."""
    if not content:
        return np.empty(0, np.int64)
    classes = np.frombuffer(content.translate(CLASSES), np.uint8)
    pairs = classes[:-1] * np.uint8(8) + classes[1:]
    edges = np.frombuffer(pairs.tobytes().translate(EDGES), np.uint8)
    ends = np.flatnonzero(edges != 0)  # the last byte of each chunk
    preceding = classes[ends - 1]
    is_visible = (preceding >= LETTER) & (preceding <= QUOTE)
    return np.append(0, ends[(edges[ends] == ALWAYS) | is_visible] + 1)


def chunk_keys(content: bytes, starts: Numbers, ends: Numbers) -> tuple[Bits, Bits]:
    """Return the keys of chunks: their first eight bytes, and seven more with the number of bytes, [n] each.

    Chunks of more than KEY_BYTES may share a key.
    """
    lengths, padded = ends - starts, content + bytes(16)
    eights: Bits = np.ndarray(len(content) + 9, "<u8", padded, strides=(1,))  # [i]: bytes i to i + 8
    low = eights[starts] & _LOW_BYTES[np.minimum(lengths, 8)]
    high = eights[starts + 8] & _LOW_BYTES[np.clip(lengths - 8, 0, 7)]
    return low, high | lengths.astype(np.uint64) << np.uint64(56)


def is_cacheable(content: dict[str, Any]) -> bool:
    """True if the words of a tokenizer.json never extend over the end of a chunk, for any text."""
    normalizer = (content["normalizer"] or {}).get("type")
    splitter = content["pre_tokenizer"] or {"type": None}
    # BertNormalizer replaces line ends by spaces, which BERT's splitter treats alike; NFC composes `<` and
    # U+0338 to a letter at which BERT's splitter does not split.
    normalizers = (None, "BertNormalizer" if splitter == BERT else "NFC")
    if content["model"].get("type") not in ("BPE", "WordPiece") or normalizer not in normalizers:
        return False
    # An added token must be found in a chunk exactly where it is found in the full text. The library skips
    # special tokens, and others that begin in one. A normaliser may turn other letters into ASCII, in which a
    # chunk may end.
    added = content["added_tokens"]
    special = set("".join(token["content"] for token in added if token["special"]))
    for token in added:
        name, depends = token["content"], token["single_word"] or token["lstrip"] or token["rstrip"]
        is_plain = re.fullmatch("[!-~]*", name) is not None or not token["normalized"]
        is_inside = is_plain and not depends and not CROSSING.search(name) and special.isdisjoint(name)
        if not is_inside and not token["special"]:
            return False
    steps = splitter["pretokenizers"] if splitter.get("type") == "Sequence" else [splitter]
    word_steps = [step for step in steps if step["type"] != "Digits"]
    if [step["type"] for step in word_steps] == ["Split", "ByteLevel"]:
        split, last = word_steps
        is_known = split["pattern"].get("Regex") in PATTERNS and split["behavior"] == "Isolated"
        return is_known and not split["invert"] and not last["use_regex"] and not last["add_prefix_space"]
    if [step["type"] for step in word_steps] == ["ByteLevel"]:
        return bool(word_steps[0]["use_regex"]) and not word_steps[0]["add_prefix_space"]
    return steps == [BERT]
