"""Token ids of the words that a tokenizer has met: text is encoded by looking words up.

A tokenizer splits text into words and encodes each alone, so most of its work is done again and again. Here a
text is split into chunks, which end where every tokenizer of `is_cacheable` ends a word, whatever follows, so
that its tokens are those of its chunks. New chunks are encoded by the library: it alone says what ids are.

A chunk ends in ASCII text alone: before the space of " word"; between a letter and a sign other than an
apostrophe (which may begin a contraction), or a line end; and after a single line end before a letter. The
patterns of GPT-2, GPT-4 and their heirs end a match there and look no further, and BERT's splits at spaces
and signs.
"""

import re
from array import array
from collections.abc import Callable, Sequence
from itertools import compress
from operator import not_
from typing import Any

import numpy as np

SIGN = r"!-&(-/:-@\[-`{-~"
CHUNK = re.compile(
    rf" ?[A-Za-z]++(?= [A-Za-z]|[{SIGN}\n]|\Z)"  # most of a text; the rest ends where it first can
    rf"|(?s:.+?)(?:(?<=[!-~])(?= [A-Za-z])|(?<=[A-Za-z])(?=[{SIGN}\n])|(?<=[!-~]\n)(?=[A-Za-z])|\Z)"
)
WORD = re.compile(" [A-Za-z]+")
CROSSING = re.compile(rf"[ \n]|[A-Za-z][{SIGN}]")
"""In an added token: where a chunk may end."""
LENGTH, SIZE = 64, 1 << 18
"""Letters of the longest chunk that is kept, and chunks that are kept, about 60 MB; then it begins anew."""

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
"""Patterns of words that never match across the end of a chunk."""


class EncodingCache:
    """Encoding of texts chunk by chunk. `encode` is the library's, of many texts: a uint32 array each."""

    def __init__(self, encode: Callable[[list[str]], "list[array[int]]"]) -> None:
        self._encode = encode
        self._ids = dict[str, bytes]()

    def encode_batch(self, texts: Sequence[str]) -> "list[array[int]]":
        """Encode many texts: a uint32 array each."""
        if len(self._ids) > SIZE:
            self._ids = {}
        known = self._ids
        chunks = [CHUNK.findall(text) for text in texts]
        ids: list[list[Any]] = [list(map(known.get, parts)) for parts in chunks]
        gaps = [list(compress(range(len(parts)), map(not_, parts))) for parts in ids]
        fresh = self._encode_chunks(
            {parts[i] for parts, where in zip(chunks, gaps, strict=True) for i in where}
        )
        known.update({chunk: one for chunk, one in fresh.items() if len(chunk) <= LENGTH})
        for parts, of_text, where in zip(chunks, ids, gaps, strict=True):
            for i in where:
                of_text[i] = fresh[parts[i]]
        return [array("I", b"".join(of_text)) for of_text in ids]

    def _encode_chunks(self, chunks: set[str]) -> dict[str, bytes]:
        if not chunks:
            return {}
        # The library takes half as long for one text of words. Commas between them are chunks, one token each
        # that words have not; where that does not hold, as for a vocabulary without a comma, it shows.
        words = [chunk for chunk in chunks if WORD.fullmatch(chunk)]
        joined, comma = map(np.asarray, self._encode([",".join(words), ","]))
        ends = np.append(np.flatnonzero(joined == comma[0]), len(joined)) if len(comma) == 1 else comma
        if len(ends) != len(words):
            words, ends = [], ends[:0]
        starts = np.append(0, ends + 1).tolist()
        spans = zip(starts, ends.tolist(), strict=False)
        fresh = {word: joined[begin:end].tobytes() for word, (begin, end) in zip(words, spans, strict=True)}
        others = [chunk for chunk in chunks if chunk not in fresh]
        return fresh | dict(zip(others, (ids.tobytes() for ids in self._encode(others)), strict=True))


def is_cacheable(content: dict[str, Any]) -> bool:
    """True if the words of a tokenizer.json never reach across the end of a chunk, for any text."""
    return (
        content["model"].get("type") in ("BPE", "WordPiece")
        and (content["normalizer"] or {}).get("type") in (None, "NFC", "BertNormalizer")
        and splits_into_words(content["pre_tokenizer"] or {"type": None})
        and not any(
            CROSSING.search(token["content"]) or token["single_word"] or token["lstrip"] or token["rstrip"]
            for token in content["added_tokens"]
            if not token["special"]
        )
    )


def splits_into_words(splitter: dict[str, Any]) -> bool:
    steps = splitter["pretokenizers"] if splitter.get("type") == "Sequence" else [splitter]
    rest = [step for step in steps if step["type"] != "Digits"]
    if [step["type"] for step in rest] == ["Split", "ByteLevel"]:
        split, last = rest
        is_known = split["pattern"].get("Regex") in PATTERNS and split["behavior"] == "Isolated"
        return is_known and not split["invert"] and not last["use_regex"] and not last["add_prefix_space"]
    if [step["type"] for step in rest] == ["ByteLevel"]:
        return bool(rest[0]["use_regex"]) and not rest[0]["add_prefix_space"]
    return steps == [{"type": "BertPreTokenizer"}]
