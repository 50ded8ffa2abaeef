"""Pieces, segments and sentences of a text.

Words, hashes and tokens of a document, a string of at most `max_document_bytes`, are computed piece by piece:
all words would take ten times that memory, all encodings forty times.

A text is tokenised in segments whose ends do not change its tokens: between two words, if the tokens of the
characters around the end equal the tokens of both sides. Every pattern that splits text into words (GPT-2's
and its successors', BERT's, Metaspace) has such a position at each space. A tokenizer that depends on the
full text may have none: then the tokens next to a split may differ.

Sentences are found by the library `sentencex` (Wikimedia; rules and lists of abbreviations). Of 2,065
boundaries between RTE's hypotheses it finds 0.992 with precision 0.999; the Punkt algorithm, which v1 used,
0.978 with 0.998. Two bugs of its version 1.0 are worked around here: quadratic time on a long list, and a
panic where a full stop follows a non-ASCII space.
"""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

from mlm.data.tokenizer import Tokenizer
from mlm.util.extras import load_extra

PIECE = 1 << 18
"""Letters of a piece: 256 Ki, whose processing takes about 30 MB."""
SPACE = re.compile(r"\s")
AROUND = 64
"""Letters on each side of a split whose tokens must agree."""
WINDOW = 1 << 13
TRIED = 16
BETWEEN_WORDS = re.compile(r"(?<=\w)(?= \w)")
BETWEEN_CLASSES = re.compile(r"(?<=\S)(?=\s)|(?<=\s)(?=\S)|(?<=\w)(?=[^\w\s])|(?<=[^\w\s])(?=\w)")


def pieces_of(text: str) -> Iterator[str]:
    """Yield a text in pieces that end at the first white space after PIECE letters."""
    begin = 0
    while begin < len(text):
        space = SPACE.search(text, begin + PIECE)
        end = space.end() if space else len(text)
        yield text[begin:end]
        begin = end


def segments(tokenizer: Tokenizer, text: str) -> Iterator[str]:
    """Yield a text in segments whose concatenated tokens are the tokens of the text."""
    begin = 0
    while len(text) - begin >= 2 * PIECE:
        end = begin + split_position(tokenizer, text[begin : begin + 2 * PIECE])
        yield text[begin:end]
        begin = end
    yield text[begin:]


def split_position(tokenizer: Tokenizer, text: str) -> int:
    """Return the position at which to split a text of 2 * PIECE letters, at most PIECE."""
    begin, first = PIECE - WINDOW, PIECE
    for pattern in (BETWEEN_WORDS, BETWEEN_CLASSES):
        ends = [begin + match.start() for match in pattern.finditer(text[begin:PIECE])][AROUND:]
        tried = ends[:: -max(1, len(ends) // TRIED)][:TRIED]
        for position in tried:  # the tokens around it must equal the tokens of both sides
            left, right = text[position - AROUND : position], text[position : position + AROUND]
            joined, *sides = tokenizer.encode_batch([left + right, left, right])
            if joined == sides[0] + sides[1]:
                return position
        first = tried[0] if tried and first == PIECE else first
    return first


PARAGRAPH_END = re.compile(r"\n\s*\n")
WORD = re.compile(r"\w")
BLOCK = 1 << 12
"""Letters processed at a time, for linear time. No sentence is longer, except by marks after it."""
SPACES = [chr(code) for code in range(0x80, 0x3001) if chr(code).isspace()]
"""Non-ASCII white space."""


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text in order, without white space around them, none of them empty.

    Only white space is lost. A blank line ends a sentence, a single line end does not. A piece without letter
    or digit belongs to the preceding sentence of its paragraph. The text must be valid Unicode (no lone
    surrogates). Raises UserError if the library is not installed.
    """
    segment: Callable[[str, str], list[str]] = load_extra("sentencex", "sentences=true").segment
    sentences = list[str]()
    for paragraph in PARAGRAPH_END.split(text):
        limits, begin = [0], 0
        while begin < len(paragraph):
            stop = begin + BLOCK
            if stop >= len(paragraph):
                stop = len(paragraph)
            else:  # end after white space if possible
                space_position = max(paragraph.rfind(" ", begin, stop), paragraph.rfind("\n", begin, stop))
                stop = space_position + 1 if space_position >= begin else stop
            block = paragraph[begin:stop]
            for space in () if block.isascii() else SPACES:
                block = block.replace(space, " ")
            pieces = segment("en", block)
            assert sum(map(len, pieces)) == stop - begin, "the pieces are the text"
            # The last piece may continue after the block: the next block begins with it.
            complete = pieces if stop == len(paragraph) or len(pieces) == 1 else pieces[:-1]
            for piece in complete:
                if not WORD.search(piece) and len(limits) > 1:
                    limits.pop()
                begin += len(piece)
                limits.append(begin)
        sentences += (paragraph[begin:end].strip() for begin, end in pairwise(limits))
    return [sentence for sentence in sentences if sentence]
