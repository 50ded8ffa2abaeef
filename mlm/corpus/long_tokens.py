"""The tokens of a long text, piece by piece, as if it were tokenised whole.

A text is cut where its tokens do not change: between two words, where the tokens of the letters around the
cut are those of the two sides. What splits text into words (GPT-2's pattern and its heirs, BERT's, Metaspace)
offers such a place at every space. A tokenizer that looks at the whole text may not: it is cut all the same,
and the tokens beside the cut may differ.
"""

import re
from array import array
from collections.abc import Iterable, Iterator

from mlm.corpus.read.long_text import PIECE
from mlm.data.tokenizer import Tokenizer

AROUND = 64
"""Letters on each side of a cut whose tokens must agree."""
WINDOW = 1 << 13
TRIED = 16
BETWEEN_WORDS = re.compile(r"(?<=\w)(?= \w)")
BETWEEN_KINDS = re.compile(r"(?<=\S)(?=\s)|(?<=\s)(?=\S)|(?<=\w)(?=[^\w\s])|(?<=[^\w\s])(?=\w)")


def long_tokens(tokenizer: Tokenizer, pieces: Iterable[str]) -> Iterator["array[int]"]:
    """The tokens of a text that comes in pieces."""
    held = ""
    for piece in pieces:
        held += piece
        while len(held) >= 2 * PIECE:
            cut = place_to_cut(tokenizer, held)
            yield tokenizer.encode_batch([held[:cut]])[0]
            held = held[cut:]
    if held:
        yield tokenizer.encode_batch([held])[0]


def place_to_cut(tokenizer: Tokenizer, text: str) -> int:
    """Position to cut a text of at least 2 * PIECE letters: at most PIECE letters on."""
    begin, first = PIECE - WINDOW, PIECE
    for pattern in (BETWEEN_WORDS, BETWEEN_KINDS):
        found = [begin + match.start() for match in pattern.finditer(text[begin:PIECE])][AROUND:]
        places = found[:: -max(1, len(found) // TRIED)][:TRIED]
        for place in places:
            if is_seam(tokenizer, text, place):
                return place
        first = places[0] if places and first == PIECE else first
    return first


def is_seam(tokenizer: Tokenizer, text: str, place: int) -> bool:
    """True if the tokens around a place are those of its two sides."""
    left, right = text[place - AROUND : place], text[place : place + AROUND]
    both, *sides = tokenizer.encode_batch([left + right, left, right])
    return both == sides[0] + sides[1]
