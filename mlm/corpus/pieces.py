"""Long texts in pieces, so that what is made of a text (words, hashes, tokens) is never all held at once.

A document is one string, of at most `max_document_bytes`. As a list of words it would take ten times that,
as the tokenizer's encodings forty times: so words are looked at, and tokens made, a piece at a time, with
the result of the whole.

A text is tokenised in segments that end where its tokens do not change: between two words, where the tokens
of the characters around the end are those of the two sides. Every pattern that splits text into words
(GPT-2's and its heirs, BERT's, Metaspace) offers such a position at each space. A tokenizer that looks at the
whole text may not: the text is split all the same, and the tokens beside the split may differ.
"""

import re
from collections.abc import Iterator

from mlm.data.tokenizer import Tokenizer

PIECE = 1 << 18
"""Letters of a piece: 256 Ki. Processing it takes some 30 MB."""
SPACE = re.compile(r"\s")
AROUND = 64
"""Letters on each side of a split whose tokens must agree."""
WINDOW = 1 << 13
TRIED = 16
BETWEEN_WORDS = re.compile(r"(?<=\w)(?= \w)")
BETWEEN_CLASSES = re.compile(r"(?<=\S)(?=\s)|(?<=\s)(?=\S)|(?<=\w)(?=[^\w\s])|(?<=[^\w\s])(?=\w)")


def pieces_of(text: str) -> Iterator[str]:
    """Yield a text in pieces of at least PIECE letters, each but the last ending at its first white space."""
    begin = 0
    while begin < len(text):
        space = SPACE.search(text, begin + PIECE)
        end = space.end() if space else len(text)
        yield text[begin:end]
        begin = end


def segments(tokenizer: Tokenizer, text: str) -> Iterator[str]:
    """Yield a text in segments whose tokens, one after the other, are those of the text."""
    begin = 0
    while len(text) - begin >= 2 * PIECE:
        end = begin + split_position(tokenizer, text[begin : begin + 2 * PIECE])
        yield text[begin:end]
        begin = end
    yield text[begin:]


def split_position(tokenizer: Tokenizer, text: str) -> int:
    """Return the position to split a text of 2 * PIECE letters, at most PIECE letters on."""
    begin, first = PIECE - WINDOW, PIECE
    for pattern in (BETWEEN_WORDS, BETWEEN_CLASSES):
        ends = [begin + match.start() for match in pattern.finditer(text[begin:PIECE])][AROUND:]
        tried = ends[:: -max(1, len(ends) // TRIED)][:TRIED]
        for position in tried:
            if splits_tokens(tokenizer, text, position):
                return position
        first = tried[0] if tried and first == PIECE else first
    return first


def splits_tokens(tokenizer: Tokenizer, text: str, position: int) -> bool:
    """True if the tokens around a position are those of its two sides."""
    left, right = text[position - AROUND : position], text[position : position + AROUND]
    both, *sides = tokenizer.encode_batch([left + right, left, right])
    return both == sides[0] + sides[1]
